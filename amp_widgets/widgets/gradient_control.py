"""Sampling the gradients of a step, what another loss scale would make of them, and why steps were skipped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import traitlets

from amp_widgets.analysis.gradients import GradientRange, percent
from amp_widgets.core.settings import format_scale
from amp_widgets.language import in_language, marked, say, say_number
from amp_widgets.widgets.control import Control, page_script
from amp_widgets.widgets.gradient_state import LARGEST_EXPONENT, GradientState, nearest_exponent
from amp_widgets.widgets.state import DashboardState

EXPLAINED = marked(
    "In the backward pass each layer hands a gradient to the one before it. FP16 stores these down to 2^-24 and up to 65504: "
    "smaller ones become zero, larger ones infinity. The loss scale multiplies all of them by the same number, which moves the "
    "histogram to the right, and is divided out before the optimizer steps. The slider shows what another scale would make "
    "of the gradients of the sampled step, by counting: nothing is run. What is zero already cannot be counted this way."
)
EXAMPLE = marked(
    "In the underflow demo (%amp demo underflow): press Start. At 2^16 none becomes zero. Move the slider to 2^0: most "
    "would. Switch loss scaling off: in the next sample they are zero, and the loss stands still; switch it on again, and it "
    "falls. In the digits demo, in fp16, most gradients lose bits at 2^0 and few become zero; in the text demo some 7 % do."
)
SKIPS_EXPLAINED = marked(
    "A step is skipped when a gradient is inf or NaN: the weights stay as they were, and the loss scale is halved. A skip now "
    "and then is how the largest scale that fits is found. Skips in a row are told together: the scales, the parameter in which "
    "the backward pass met inf or NaN first, and whether the loss itself was so already, which no scale can help. Skips that do "
    "not end, and a scale that falls below 1 or grows without bound, get a sentence with the likely cause."
)
SKIPS_EXAMPLE = marked(
    "In the overflow demo (%amp demo overflow): press Start. Its first steps, some five, are skipped, all for readout.weight, "
    "while the scale falls from 2^16 to about 2^11. Keep readout in FP32, or set the initial scale to 2^10, and start anew: none "
    "is. In the digits demo and the text demo: choose fp16, set the initial scale to 2^40 and press Start. Some 20 steps are "
    "skipped until the scale has come down to about 2^18; the first overflow is in head.weight, where the backward pass begins."
)
MOST_SKIPS = 5
MANY_ZEROS = 0.5
"""Above it, zeros are the news."""


class GradientCommand(Protocol):
    """What a gradient panel asks for, beside settings: ``("sample")`` the next step; ``("every", steps=n)``, 0 for none;
    and of the panel itself ``("scale", exponent=k)`` and ``("use")``."""

    def __call__(self, name: str, /, **values: Any) -> None: ...


class GradientControl(Control):
    """The head of a gradient panel. What it asks for, see `GradientCommand`."""

    _esm = page_script("gradient_control")
    _css = Control._css + (Path(__file__).parent / "gradient.css").read_text(encoding="utf-8")

    explanation = traitlets.Unicode(EXPLAINED).tag(sync=True, said=True)
    example = traitlets.Unicode(EXAMPLE).tag(sync=True, said=True)
    skips_explained: traitlets.List[Any] = traitlets.List([SKIPS_EXPLAINED, SKIPS_EXAMPLE]).tag(sync=True, said=True)
    recorded = traitlets.Bool(False, help="Of a run that was recorded: nothing can be sampled or used.").tag(sync=True)
    sampled = traitlets.Bool(False, help="Whether there is a step to be shown.").tag(sync=True)
    exponent = traitlets.Int(0, help="The scale that is shown, as a power of two.").tag(sync=True)
    measured = traitlets.Unicode(help="The scale that the sampled step had.").tag(sync=True)
    sentences: traitlets.List[Any] = traitlets.List(help="The first is the main one.").tag(sync=True)
    safe = traitlets.Unicode().tag(sync=True)
    suggested = traitlets.Int(None, allow_none=True, help="The scale that is suggested, as a power of two.").tag(sync=True)
    pending = traitlets.Bool(False).tag(sync=True)
    every = traitlets.Int(0).tag(sync=True)
    trains = traitlets.Bool(True).tag(sync=True)
    why_not = traitlets.Unicode().tag(sync=True)
    usable = traitlets.Unicode(help="What becomes of the scale when it is used, or nothing.").tag(sync=True)
    requested = traitlets.Int(
        None, allow_none=True, help="The loss scale that is waiting, else the live one, else the initial one; if a power of two."
    ).tag(sync=True)
    skips: traitlets.List[Any] = traitlets.List(help="Sentences.").tag(sync=True)
    diagnoses: traitlets.List[Any] = traitlets.List(help="What was seen, and the likely cause.").tag(sync=True)

    def __init__(self, command: GradientCommand, state: DashboardState | None = None, *, recorded: bool = False) -> None:
        super().__init__(command, state)
        self._put({"recorded": recorded})

    def show(self, state: GradientState) -> None:
        """Show this; nothing is sent when it is what is shown."""
        earlier = sum(len(told.steps) for told in state.skips[:-MOST_SKIPS])
        skips = [in_language(run.sentence) for run in state.skips[-MOST_SKIPS:]]
        self._put(
            {
                "pending": state.pending,
                "every": state.every,
                "trains": state.trains,
                "why_not": in_language(state.why_not or ""),
                "skips": (
                    [say_number("{count} earlier skipped step", "{count} earlier skipped steps", earlier)] if earlier else []
                )
                + skips,
                "diagnoses": [[in_language(diagnosis.sentence), in_language(diagnosis.cause)] for diagnosis in state.diagnoses],
            }
        )

    def show_range(self, found: GradientRange | None, exponent: int, pattern: str = "") -> None:
        """Show what a scale makes of the gradients of a step, and which scale would suit the model.

        Parameters
        ----------
        found
            The gradients of all layers, or None.
        exponent
            The scale, as a power of two.
        pattern
            Of the layers whose gradients are told of. The scale that is suggested is one for all layers, as there is only one.
        """
        if found is None:
            self._put({"sampled": False, "exponent": exponent, "measured": "", "sentences": [], "safe": "", "suggested": None})
            return
        scale = 2.0**exponent
        told = found.matching(pattern)
        if pattern and not told.at_stake:
            sentences = [no_match_text(pattern)]
        else:
            sentences = _sentences(told, scale)
        if pattern and told.at_stake:
            sentences[0] = say("Layers that match {pattern}: {sentence}", pattern=pattern, sentence=sentences[0])
        safe = found.safe_scale()
        words, suggested = say("No loss scale from 1 on suits these gradients"), None
        if not all(row.finite for row in (*found.at_stake, *found.parameters_at_stake)):
            words = say("Which scale would suit is not known, as some had overflowed: sample a step at a lower one")
        elif found.zeros_hide:
            words = say(
                "Which scale would suit is not known, as so many were zero already, and this step does not tell which would have "
                "saved them: sample one in fp32 or bf16, or at a higher scale"
            )
        elif safe.least_loss is not None and safe.largest is not None:
            suggested = nearest_exponent(safe.least_loss)
            words = say(
                "At {least_loss} the fewest are lost; up to {largest} nothing overflows, with a factor of 2 to spare",
                least_loss=format_scale(safe.least_loss),
                largest=format_scale(safe.largest),
            )
        stored = say("stored in 16 bits") if found.in_half else say("none of them stored in 16 bits")
        had = say("without loss scaling") if found.scale == 1 else say("at loss scale {scale}", scale=format_scale(found.scale))
        total = found.total
        count = f"{total.elements:,}"
        sampled = (
            ""
            if total.looked_at >= total.elements
            else say("; shares from a sample of {count}", count=in_language(total.counted_text))
        )
        if pattern:
            words = say("For the whole model: {sentence}", sentence=words[0].lower() + words[1:])
        self._put(
            {
                "sampled": True,
                "exponent": exponent,
                "measured": say(
                    "Step {step}, {had}: {count} gradients of layers' outputs, {stored}",
                    step=f"{found.step:,}",
                    had=had,
                    count=count,
                    stored=stored,
                )
                + sampled,
                "sentences": sentences,
                "safe": words,
                "suggested": suggested,
            }
        )

    def _traits_for(self, state: DashboardState) -> dict[str, Any]:
        scale = float(state.requested("init_scale"))
        if "init_scale" not in (state.pending or {}) and state.scale is not None:
            scale = state.scale  # which has grown, or backed off
        exponent = nearest_exponent(scale)
        autocast, scaling = state.requested("autocast"), state.requested("scaling")
        usable = say("In force from the next step")
        if autocast != "fp16":
            usable = say("Autocast is {autocast}, which does not scale the loss: it holds when that is fp16", autocast=autocast)
        elif not scaling:
            usable = say("Loss scaling is off: it holds when that is on")
        return {"requested": exponent if 2.0**exponent == scale else None, "usable": usable}

    def _ask(self, message: Mapping[str, Any]) -> None:
        if self.recorded and "exponent" not in message:
            return
        match message:
            case {"sample": True}:
                if not self.pending:
                    self._request("sample")
            case {"every": int(steps)} if steps != self.every and 0 <= steps <= 1_000_000:
                self._request("every", steps=int(steps))
            case {"exponent": int(exponent)} if 0 <= exponent <= LARGEST_EXPONENT:
                self._request("scale", exponent=int(exponent))
            case {"use": True}:
                if self.sampled:
                    self._request("use")


# Where an overflow began, beside what its own sentences are.
_SAID = (
    marked("the gradient of the model's output"), marked("overflow"), marked("NaN"), marked("the model's output"),
    marked("{format} at {scale}: {share} of the gradients become zero, {others} keep fewer bits, {overflow}"),
    marked("{format} at {scale}: {share} become zero, {others} keep fewer bits, {overflow}"),
    marked("{format} at {scale}, of the others: {share} become zero, {others} keep fewer bits, {overflow}"),
    marked("{format} at {scale}: {gradients} would overflow as well"),
    marked("{format} at {scale}: {gradients} would overflow: the step would be skipped"),
)  # fmt: skip


def no_match_text(pattern: str) -> str:
    """That a filter fits no layer."""
    return say("No layer matches {pattern}", pattern=pattern)


def _sentences(found: GradientRange, scale: float) -> list[str]:
    sentences = [in_language(one) for one in found.sentences(scale)]
    shares = found.shares(scale)
    if shares.zeros > MANY_ZEROS and shares.counted:  # else the main sentence would be of a few that are left
        others = in_language(found.sentences(scale)[0].replace(" of the gradients become", " become"))
        sentences[0] = say(
            "{share} of the gradients were zero already; of the others, {others}", share=percent(shares.zeros), others=others
        )
    return sentences
