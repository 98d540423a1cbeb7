"""The prepared situations, as data: what is shown, what is asked, how it is measured and why it comes out as it does."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from types import MappingProxyType

from amp_widgets.demos import measures
from amp_widgets.demos.prepared_scenario import Scenario

_ALL = (
    Scenario(
        name="scaling-off",
        title="Underflow: the loss is not scaled",
        demo="underflow",
        situation="A small network learns in fp16 where in a noisy picture the ink is. Loss scaling is switched off.",
        watch="Watch the loss: it stands still. From step 20 on it is scaled. The Gradients tab shows what is lost.",
        question="With the loss not scaled: which share of the gradients stored in fp16 is exactly zero?",
        unit="%",
        between=(0, 100),
        settings={"scaling": False},
        changes={20: {"scaling": True}},
        steps=40,
        measure=measures.zero_share,
        why=(
            "fp16 makes zero of everything that is not above 2^-25, and a weight whose gradient is zero does not move: in "
            "the first step that was counted {zeros} of {gradients} gradients were zero, and the loss went from {first_loss} "
            "to {middle_loss} in {turned} steps."
        ),
        more=(
            "From step {turned} on the loss was multiplied by {scale}, and the gradients were divided by it after they had "
            "been stored: {scaled_share} of them were zero then, and the loss went on to {last_loss}."
        ),
    ),
    Scenario(
        name="first-scale",
        title="Overflow: the search for the scale",
        demo="overflow",
        situation="Training begins in fp16, with the usual loss scale of 2^16 = 65536. One layer sums up over 64 pixels.",
        watch="Watch the loss scale: a step whose gradients hold inf or NaN is skipped, and halves it.",
        question="How many steps are skipped before the scale fits?",
        unit="steps",
        between=(0, inf),
        whole=True,
        steps=20,
        measure=measures.first_skips,
        why=(
            "Each skipped step halves the scale, and {skipped} of them take it from {first_scale} to {fitting_scale}: there "
            "the largest gradient of the layer {layer} stays below 65504, the largest number that fp16 has."
        ),
        more=(
            "Nothing is lost but the time of these steps: the weights stay as they were. An initial scale of "
            "{fitting_scale}, or that one layer kept in FP32, saves them."
        ),
    ),
    Scenario(
        name="growth",
        title="The scale grows: when?",
        demo="overflow",
        situation=(
            "A layer that sums up over 64 pixels overflows in the first steps, and the scale falls. The growth interval is "
            "20: after 20 steps in a row without inf or NaN the scale is doubled. Steps are counted from 0."
        ),
        watch="Watch the loss scale as it falls, stands, and rises.",
        question="Which step is the first to be trained at a doubled scale?",
        between=(0, inf),
        whole=True,
        settings={"growth_interval": 20},
        steps=30,
        measure=measures.first_doubling,
        why=(
            "It is step {step}, not step {interval}: each skipped step sets the count back to zero. The last of the "
            "{skipped} skipped ones was step {last_skip}, and {interval} good steps later the scale went from {before} to "
            "{after}."
        ),
        more=(
            "Whether the larger scale fits is only found out by trying: if it does not, that step is skipped and the scale "
            "is halved."
        ),
    ),
    Scenario(
        name="bf16-fp16",
        title="bf16 against fp16",
        demo="overflow",
        situation="A model that sums up over 64 pixels trains 20 steps in fp16, then 20 in bf16. Both formats have 16 bits.",
        watch="Watch the skipped steps and the format in the status line; then the outputs of each are compared with fp32.",
        question="Which of the two overflows here, and which rounds more coarsely?",
        choices={
            "fp16 bf16": "fp16 overflows, and bf16 rounds more coarsely",
            "bf16 fp16": "bf16 overflows, and fp16 rounds more coarsely",
            "fp16 fp16": "fp16 does both",
            "bf16 bf16": "bf16 does both",
            "none bf16": "neither overflows, and bf16 rounds more coarsely",
            "none fp16": "neither overflows, and fp16 rounds more coarsely",
        },
        changes={20: {"autocast": "bf16"}},
        steps=40,
        measure=measures.halves,
        why=(
            "In fp16 {fp16_skips} of {steps} steps were skipped, in bf16 {bf16_skips}: bf16 has the exponents of fp32 and "
            "needs no scaling. It pays for them with digits: its outputs were {bf16_error} off, those of fp16 {fp16_error}, "
            "which is {times} times less."
        ),
        more="fp16 keeps 10 bits of the fraction and bf16 7: three bits fewer make steps 2^3 = 8 times as wide.",
    ),
    Scenario(
        name="memory-wall",
        title="Memory wall: which batch fits?",
        demo="text",
        situation=(
            "A small GPT trains with batches of 16 windows. Suppose that the peak of such a step is all the memory there is: "
            "with 17 it would be out of memory."
        ),
        watch="Watch the memory chart: the peak lies far above what is held between two steps.",
        question="How many windows fit into the same memory when all of its 6 blocks are checkpointed?",
        unit="windows",
        within=4.0,
        between=(1, inf),
        whole=True,
        steps=3,
        measure=measures.fitting_batch,
        why=(
            "A checkpointed block keeps its input and drops what it computed inside until the backward pass needs it again. "
            "So {after} windows fit into {budget}, where without checkpointing it is {before}."
        ),
        more=(
            "A step with {after} windows was really run and taken back: its peak was {peak}. The price is a second forward "
            "pass of the {blocks} blocks."
        ),
    ),
    Scenario(
        name="both",
        title="Mixed precision and checkpointing together",
        demo="text",
        situation="A small GPT trains 4 steps as it is, and then 4 with autocast in bf16 and with all blocks checkpointed.",
        watch="Watch the peak of the memory, and the step time.",
        question="What is the peak with both, in percent of the peak with neither?",
        unit="%",
        between=(0, inf),
        changes={4: {"autocast": "bf16", "checkpointed": ["layers.*"]}},
        steps=8,
        measure=measures.peak_of_both,
        why=(
            "{neither} became {both}. Most of the peak are activations kept for the backward pass: checkpointing keeps only "
            "the inputs of the blocks, and bf16 halves what is kept. Weights, gradients and the optimizer's state stay in "
            "fp32."
        ),
        more="The step time went from {before_time} to {after_time}.",
        on_cpu=(
            "Most CPUs have no units for bf16: here it saves memory, and hardly time. On a GPU with tensor cores mixed "
            "precision wins back what the second forward pass costs; that cannot be shown here."
        ),
    ),
    Scenario(
        name="batchnorm",
        title="BatchNorm in a checkpointed layer",
        demo="digits",
        situation=(
            "All residual blocks are checkpointed: each is computed in the forward pass and once more in the backward pass. "
            "In each are two BatchNorms, which update their running statistics whenever they are computed in training."
        ),
        watch="Watch the loss: it goes as it would without checkpointing.",
        question="How often are the running statistics updated in one step?",
        choices={"never": "never", "once": "once", "twice": "twice", "otherwise": "not in every step alike"},
        settings={"checkpointed": ["layers.*"]},
        steps=10,
        measure=measures.statistics_updates,
        why=(
            "A BatchNorm counts its updates: {updates} in {steps} steps. The second computation is kept from changing what "
            "the first has left, or the statistics would move twice as fast."
        ),
        more=(
            "A check of this moment: the loss, {gradients} gradients and {buffers} buffers are bit-identical to those "
            "without checkpointing."
        ),
    ),
    Scenario(
        name="speed",
        title="Which format is fastest here?",
        demo="digits",
        situation=(
            "A convolutional network trains in fp32, in fp16 and in bf16 by turns, 6 steps each, on the machine that this "
            "kernel runs on."
        ),
        watch="Watch the step time.",
        question="In which format is a step fastest on this machine?",
        choices={"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "none": "none clearly"},
        changes={6 * turn: {"autocast": ("fp32", "fp16", "bf16")[turn % 3]} for turn in range(1, 9)},
        steps=54,
        measure=measures.fastest,
        why=(
            "The median step of the three rounds took {fp32_times} in fp32, {fp16_times} in fp16 and {bf16_times} in bf16, on "
            "{device}. A format is clearly the fastest where it is so by 10 % or more in each of the rounds."
        ),
        more=(
            "Speed comes from units that multiply small formats faster than large ones, and from moving half as many bytes; "
            "converting to and fro costs time."
        ),
        on_cpu=(
            "This is a CPU, and few have such units for 16 bits. A GPU with tensor cores is faster in fp16 and bf16, the "
            "more so the larger the matrices; that cannot be shown here."
        ),
    ),
)

SCENARIOS: Mapping[str, Scenario] = MappingProxyType({scenario.name: scenario for scenario in _ALL})
"""By name, in the order in which they are offered."""


def scenario_of_demo(demo: str) -> Scenario:
    """The first one that is played with this demo's model."""
    return next(scenario for scenario in _ALL if scenario.demo == demo)
