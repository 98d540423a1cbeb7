"""Why steps were skipped, and what is wrong when the loss scale does not settle: sentences from a history and a probe's notes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from amp_widgets.analysis.gradients import GradientRange
from amp_widgets.core.history import Event, History
from amp_widgets.core.overflow_probe import NoChecksNote, SkipNote
from amp_widgets.core.settings import format_scale

LOW_SCALE = 1.0
HIGH_SCALE = 2.0**32
"""Above it the largest gradient in fp16 would be below 2^-16, a gradient of no real loss."""
GROWN_IN_A_ROW = 3
"""Changes of the scale, all of them growth, before it is said that it grows without bound."""
RECURRING = 3
"""Skips for NaN before it is said that there is something about them."""
REPEATED = 3
"""Single skips for one cause before they are told in one sentence."""

OUTPUT = "the gradient of the model's output"
"""What comes before all layers in a backward pass."""

DiagnosisName = Literal["scale below 1", "scale grows without bound", "NaN whatever the scale", "no inf checks recorded"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SkippedStep:
    """Why one step was skipped.

    Attributes
    ----------
    step
        Its number.
    scale
        The loss scale that was used.
    loss_finite
        Whether the loss itself, before scaling, was neither inf nor NaN; None where it is not known.
    layer, parameter
        Whose gradient was the first with inf or NaN, in the order of the backward pass; ``""`` where it is not known. The layer
        may have no parameters; it is known by its outputs' gradients where these were counted in this step.
    nonfinite, of
        How many parameters' gradients had inf or NaN, and of how many; 0 of 0 where it is not known.
    nan
        Whether NaN was among them, and not only inf.
    in_output
        Whether the gradient of the model's own output had it already, so that it began in what comes after the model.
    """

    step: int
    scale: float
    loss_finite: bool | None
    layer: str
    parameter: str
    nonfinite: int
    of: int
    nan: bool
    in_output: bool = False

    @property
    def first(self) -> str:
        """The parameter, or the layer where that comes before any parameter of its own; ``""`` where it is not known.

        `OUTPUT` where it was in the gradient of the model's output already.
        """
        if self.in_output:
            return OUTPUT
        inside = self.parameter.rpartition(".")[0]
        return self.layer if self.layer and self.layer != inside else self.parameter

    @property
    def sentence(self) -> str:
        """All of it in a sentence."""
        return f"Step {self.step:,} was skipped at scale {format_scale(self.scale)}: {self._why()}"

    @property
    def cause(self) -> str:
        """Where inf or NaN began, without what may differ from one step to the next."""
        if self.loss_finite is False:
            return "the loss itself was inf or NaN before it was scaled, so that the forward pass is to blame and not the scale"
        what = "NaN" if self.nan else "overflow"
        if not self.of:
            return "inf or NaN in the gradients; in which was not looked up"
        if self.nonfinite == 0:
            return "its gradients were finite when they were looked at, so that they had been changed since"
        if not self.first:
            return "which gradient was the first with inf or NaN is not known"
        if self.in_output:
            return f"{what} in {OUTPUT} already: it begins in {'the loss function' if self.nan else _SCALED_LOSS}"
        return f"first {what} in {self.first}"

    def _why(self) -> str:
        if self.loss_finite is False or not self.of or self.nonfinite == 0:
            return self.cause
        spread = f"{self.nonfinite} of {self.of} parameters have inf or NaN"
        if not self.first:
            return f"{spread}, and which was the first is not known"
        reaches = f", and reaches {self.parameter} first" if self.in_output and self.parameter else ""
        return f"{self.cause}{reaches}; {spread}{', the loss was finite' if self.loss_finite else ''}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SkipRun:
    """Skipped steps in a row, at scales of which each is what the scaler made of the one before.

    Attributes
    ----------
    steps
        Each of them, oldest first.
    scale_after
        The scale that was in force after the last one; NaN where it is not known.
    """

    steps: tuple[SkippedStep, ...]
    scale_after: float

    @property
    def first_step(self) -> int:
        """The first step that was skipped."""
        return self.steps[0].step

    @property
    def last_step(self) -> int:
        """The last one."""
        return self.steps[-1].step

    @property
    def first(self) -> str:
        """Where the last of these overflows that is known began: at the lowest scale it is the narrowest place of the model."""
        return next((step.first for step in reversed(self.steps) if step.first), "")

    @property
    def sentence(self) -> str:
        """``12 skips from step 40: scale 2^40 → 2^28; first overflow in layers.3.mlp.fc2.weight``, or that of a single step."""
        if len(self.steps) == 1:
            return self.steps[0].sentence
        before = self.steps[0].scale
        after = self.steps[-1].scale if math.isnan(self.scale_after) else self.scale_after
        scales = f"scale {format_scale(before)} → {format_scale(after)}" if after != before else f"scale {format_scale(before)}"
        bad = sum(step.loss_finite is False for step in self.steps)
        if bad == len(self.steps):
            why = "the loss itself was inf or NaN, so that the forward pass is to blame and not the scale"
        elif bad:
            why = f"in {bad} of them the loss itself was inf or NaN"
        elif self.first:
            nan = all(step.nan for step in self.steps if step.of)
            why = f"first {'NaN' if nan else 'overflow'} in {self.first}"
            if self.first == OUTPUT:
                why += f", so that it begins in {'the loss function' if nan else _SCALED_LOSS}"
        else:
            why = "where it began was not looked up"
        return f"{len(self.steps)} skips from step {self.first_step:,}: {scales}; {why}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RepeatedSkips:
    """Single skipped steps, good ones between them, again and again for the same cause.

    Attributes
    ----------
    steps
        Each of them, oldest first.
    """

    steps: tuple[SkippedStep, ...]

    @property
    def first_step(self) -> int:
        """The first step that was skipped."""
        return self.steps[0].step

    @property
    def last_step(self) -> int:
        """The last one."""
        return self.steps[-1].step

    @property
    def sentence(self) -> str:
        """``30 single skips from step 0 to 87, every third step, at scales from 2^4 to 2^16: first overflow in head.weight``."""
        gaps = {later.step - step.step for step, later in itertools.pairwise(self.steps)}
        every = _every(gaps.pop()) if len(gaps) == 1 else ""
        scales = [step.scale for step in self.steps]
        low, high = format_scale(min(scales)), format_scale(max(scales))
        at = f"at scales from {low} to {high}" if low != high else f"at scale {high}"
        between = f"from step {self.first_step:,} to {self.last_step:,}{every}, {at}"
        return f"{len(self.steps)} single skips {between}: {self.steps[0].cause}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """Something that is wrong with how the loss scale behaves.

    Attributes
    ----------
    name
        What.
    sentence
        What was seen.
    cause
        The likely cause, and what to do about it.
    """

    name: DiagnosisName
    sentence: str
    cause: str


def explain_skips(
    history: History, notes: Iterable[SkipNote] = (), ranges: Iterable[GradientRange] = ()
) -> tuple[SkippedStep, ...]:
    """Why each step was skipped, oldest first.

    Parameters
    ----------
    history
        Of the run; every skip in it is an event.
    notes
        Of an `OverflowProbe`.
    ranges
        Of steps whose gradients were counted: of a skipped one they tell also the layers that have no parameters.
    """
    noted = {note.step: note for note in notes}
    counted = {found.step: found for found in ranges}
    losses = _losses(history)
    return tuple(_explained(event, noted.get(event.step), counted.get(event.step), losses) for event in history.events("skipped"))


def skip_runs(history: History, notes: Iterable[SkipNote] = (), ranges: Iterable[GradientRange] = ()) -> tuple[SkipRun, ...]:
    """The same, steps in a row taken together, but for where the scale was set in between. See `explain_skips`."""
    changes: dict[tuple[int, float], float] = {}
    for event in history.events("scale_changed"):
        changes.setdefault((event.step, float(event.detail["from"])), float(event.detail["to"]))
    runs: list[list[SkippedStep]] = []
    for step in explain_skips(history, notes, ranges):
        last = runs[-1][-1] if runs else None
        if last is not None and step.step <= last.step + 1 and step.scale == changes.get((last.step + 1, last.scale), last.scale):
            runs[-1].append(step)
        else:
            runs.append([step])
    return tuple(SkipRun(steps=tuple(run), scale_after=changes.get((run[-1].step + 1, run[-1].scale), math.nan)) for run in runs)


def summarised(runs: Iterable[SkipRun]) -> tuple[SkipRun | RepeatedSkips, ...]:
    """Runs, but from `REPEATED` single skips on that have the same cause, with good steps and no other skip between, as one."""
    groups: list[list[SkipRun]] = []
    for run in runs:
        last = groups[-1][-1] if groups else None
        single = last is not None and len(last.steps) == len(run.steps) == 1
        if last is not None and single and last.steps[0].cause == run.steps[0].cause and run.first_step > last.last_step + 1:
            groups[-1].append(run)
        else:
            groups.append([run])
    told: list[SkipRun | RepeatedSkips] = []
    for group in groups:
        if len(group) < REPEATED:
            told += group
        else:
            told.append(RepeatedSkips(steps=tuple(step for run in group for step in run.steps)))
    return tuple(told)


def diagnose(
    history: History, notes: Iterable[SkipNote] = (), refused: Iterable[NoChecksNote] = (), ranges: Iterable[GradientRange] = ()
) -> tuple[Diagnosis, ...]:
    """What is wrong with how the loss scale behaves, if anything: see `DiagnosisName`.

    Parameters
    ----------
    history, notes, ranges
        As for `explain_skips`.
    refused
        Of an `OverflowProbe`.
    """
    runs = skip_runs(history, notes, ranges)
    found = (
        scale_below_one(history, runs),
        scale_without_bound(history, runs, tuple(ranges)),
        nan_whatever_the_scale(history, runs),
        no_inf_checks(history, refused),
    )
    return tuple(diagnosis for diagnosis in found if diagnosis is not None)


def scale_below_one(history: History, runs: Sequence[SkipRun]) -> Diagnosis | None:
    """The scale in force is below 1, where it makes gradients smaller than they are."""
    scale = _scale_now(history)
    fell = [run for run in runs if run.last_step <= history.last("step")]
    if not scale < LOW_SCALE or not fell:
        return None
    last = fell[-1]
    if all(step.loss_finite is False for step in last.steps):
        cause = (
            "In the last skipped steps the loss itself was inf or NaN, which no scale can cure: look for the step at which it "
            "turned, lower the learning rate, or keep in FP32 what computes it"
        )
    else:
        where = f", first in {last.first}" if last.first else ""
        cause = (
            f"Gradients overflow in fp16 even without being scaled up{where}: they are too large, or sums of them are. Take the "
            "mean and not the sum in the loss, clip the gradients or lower the learning rate, keep that layer in FP32, or use "
            "bf16, whose range is that of FP32"
        )
    return Diagnosis(name="scale below 1", sentence=f"The loss scale has fallen to {format_scale(scale)}, below 1", cause=cause)


def scale_without_bound(history: History, runs: Sequence[SkipRun] = (), ranges: Sequence[GradientRange] = ()) -> Diagnosis | None:
    """The scale has grown to where fp16 gradients that are not zero would have overflowed."""
    scale = _scale_now(history)
    changes = history.events("scale_changed")[-GROWN_IN_A_ROW:]
    grown = [float(event.detail["to"]) > float(event.detail["from"]) for event in changes]
    if not scale > HIGH_SCALE or len(grown) < GROWN_IN_A_ROW or not all(grown):
        return None
    newest = ranges[-1] if ranges else None
    if newest is not None and newest.outputs and not newest.in_half:
        cause = (
            f"In step {newest.step:,} no gradient of a layer's output was stored in fp16: the forward pass does not run under "
            "autocast. Put the model's call and the loss into the autocast region, or switch scaling off"
        )
    elif newest is not None and newest.total.elements and newest.total.zeros >= 0.99 * newest.total.elements:
        cause = (
            f"In step {newest.step:,} nearly all gradients were zero: the loss hardly depends on the model. Look for a "
            "detach(), a dead activation, or a loss that is constant"
        )
    else:
        cause = (
            "Nothing overflows at a scale at which fp16 must overflow. Either no gradient is computed in fp16, because the "
            "forward pass is not in the autocast region, or the gradients are zero, because the loss does not depend on the "
            "model; sample the gradients of a step to see which"
        )
    sentence = f"The loss scale has grown to {format_scale(scale)} without a step being skipped"
    return Diagnosis(name="scale grows without bound", sentence=sentence, cause=cause)


def nan_whatever_the_scale(history: History, runs: Sequence[SkipRun]) -> Diagnosis | None:
    """Steps are skipped again and again for NaN that is not an overflow's: the loss has it, or the scale had been good before."""
    good = _good_scales(history)
    grown = {event.step for event in history.events("scale_changed") if event.detail["to"] > event.detail["from"]}
    bad = [step for run in runs for step in run.steps if step.loss_finite is False]
    bad += [
        step
        for run in runs
        for step in run.steps
        if step.of and step.nan and step.loss_finite is not False
        if run.first_step not in grown and good(run.first_step) >= step.scale
    ]
    bad.sort(key=lambda step: step.step)
    if len(bad) < RECURRING:
        return None
    scales = [step.scale for step in bad]
    losses = sum(step.loss_finite is False for step in bad)
    first, last = bad[0].step, bad[-1].step
    if 2 * losses > len(bad):
        where = "the loss itself was inf or NaN, so that it comes from the forward pass or from the data"
        cause = (
            "Look at the batches of those steps, and for what has no value in the forward pass: a logarithm or a square root of "
            "0 or less, a division by 0, a softmax over nothing but -inf. The loss scale only follows, and falls for nothing"
        )
    else:
        names = [step.first for step in bad if step.in_output] or [step.first for step in bad if step.first]
        often = max(set(names), key=names.count) if names else ""
        where = f"the loss was finite, and NaN began in {often}" if often else "the loss was finite"
        began = "The backward pass of the loss function" if often == OUTPUT else "The backward pass"
        cause = (
            f"{began} makes NaN where the forward pass has none: the derivative of a square root or a norm at 0, 0 times inf in "
            "a masked branch, a division by what is nearly 0. torch.autograd.set_detect_anomaly(True) names the operator"
        )
    low, high = format_scale(min(scales)), format_scale(max(scales))
    at = f"at scales from {low} to {high}" if low != high else f"at scale {high}"
    sentence = f"{len(bad)} steps between {first:,} and {last:,} were skipped for NaN {at}: {where}"
    return Diagnosis(name="NaN whatever the scale", sentence=sentence, cause=cause)


def no_inf_checks(history: History, refused: Iterable[NoChecksNote] = ()) -> Diagnosis | None:
    """The scaler has refused to step, or to update, as no gradient had been checked; told until a later step has ended."""
    seen = [(note.step, note.reason) for note in refused]
    seen += [(event.step, event.reason) for event in history.events("run", "note") if _NO_CHECKS in event.reason]
    if not seen:
        return None
    step, reason = max(seen)
    if history.last("step") >= step:
        return None
    if "update()" in reason:
        cause = (
            "scaler.update() was called without a scaler.step(optimizer) since the last one. The order is: "
            "scale(loss).backward(), step(optimizer), update(), and each of them once in a step"
        )
    elif "unscale_(optimizer) before" in reason:
        cause = (
            "scaler.unscale_(optimizer) looks for inf, and there was nothing to look at yet. The order is: "
            "scale(loss).backward(), unscale_(optimizer), clipping, step(optimizer), update()"
        )
    else:
        cause = (
            "No parameter of the optimizer had a gradient when scaler.step(optimizer) was called: backward() was not called or "
            "its loss does not depend on them, zero_grad() came between backward() and step(), or the optimizer was made with "
            "parameters that the model no longer has (before .to(), or of a copy)"
        )
    return Diagnosis(
        name="no inf checks recorded", sentence=f"In step {step:,} the scaler has stopped with “{_NO_CHECKS}”", cause=cause
    )


def _every(steps: int) -> str:
    return {2: ", every second step", 3: ", every third step"}.get(steps, f", every {steps:,} steps")


_SCALED_LOSS = "the loss, scaled by so much"
_NO_CHECKS = "No inf checks were recorded"


def _explained(event: Event, note: SkipNote | None, counted: GradientRange | None, losses: dict[int, float]) -> SkippedStep:
    scale = float(event.detail.get("scale", math.nan))
    loss = losses.get(event.step)
    explained = SkippedStep(
        step=event.step, scale=scale, loss_finite=None if loss is None else math.isfinite(loss),
        layer="", parameter="", nonfinite=0, of=0, nan=False,
    )  # fmt: skip
    if note is not None:
        # Clipping by a norm that is NaN makes every gradient NaN: then the first of them is just the first.
        smeared = note.seen == "afterwards" and note.loss_finite is not False and note.with_nan == note.of
        parameter = "" if smeared or not note.parameters else note.parameters[0]
        explained = dataclasses.replace(
            explained,
            loss_finite=explained.loss_finite if note.loss_finite is None else note.loss_finite,
            parameter=parameter,
            layer=parameter.rpartition(".")[0],
            nonfinite=note.nonfinite,
            of=note.of,
            nan=note.with_nan == note.nonfinite > 0,
            in_output=note.output in ("inf", "nan"),
        )
    first = None if counted is None else counted.first_nonfinite()
    if first is not None and _before(first.layer, explained.parameter, counted):
        explained = dataclasses.replace(explained, layer=first.layer)
    return explained


def _before(layer: str, parameter: str, counted: GradientRange | None) -> bool:
    """Whether the outputs' gradient of a layer had inf or NaN before a parameter's had: the parameter of a layer that comes later
    in the backward pass."""
    inside = parameter.rpartition(".")[0]
    if counted is None or layer == inside:
        return False
    order = [row.layer for row in counted.outputs]
    return inside not in order or order.index(layer) < order.index(inside)


def _losses(history: History) -> dict[int, float]:
    """Step → loss where it is known: NaN stands also for what was not recorded, if no loss was."""
    columns = history.columns("step", "loss")
    losses = columns["loss"]
    if not any(map(math.isfinite, losses)):
        return {int(step): float(loss) for step, loss in zip(columns["step"], losses, strict=True) if math.isinf(loss)}
    return {int(step): float(loss) for step, loss in zip(columns["step"], losses, strict=True)}


def _good_scales(history: History) -> Callable[[int], float]:
    """Step → the highest scale of a step before it that was not skipped; 0 where there was none."""
    columns = history.columns("step", "scale", "skipped")
    steps = columns["step"]
    highest = np.maximum.accumulate(np.where(columns["skipped"] > 0, 0.0, np.nan_to_num(columns["scale"])))

    def good(step: int) -> float:
        at = int(np.searchsorted(steps, step)) - 1
        return float(highest[at]) if at >= 0 else 0.0

    return good


def _scale_now(history: History) -> float:
    """The scale that is in force, as far as is known; NaN where the loss is not scaled."""
    scale = history.last("scale")
    if math.isnan(scale):
        return math.nan
    changes = [event for event in history.events("scale_changed") if event.step > history.last("step")]
    return float(changes[-1].detail["to"]) if changes else scale
