"""Whether the settings in force give the numbers they should: the same as without checkpointing, and near to fp32."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from amp_widgets.analysis.autocast_lists import left_alone_text
from amp_widgets.analysis.held_interrupt import interrupts_noted
from amp_widgets.analysis.relative_error import RelativeError, error_text
from amp_widgets.analysis.trial import LossFunction, Outcome, loss_scale, trial
from amp_widgets.core.loop import LiveLoop
from amp_widgets.core.memory.death import is_out_of_memory
from amp_widgets.core.settings import AutocastName, Settings, describe_settings, format_scale
from amp_widgets.core.table import table_html, table_text, told
from amp_widgets.language import in_language, marked_all


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One thing that is not the same in two runs.

    Attributes
    ----------
    kind
        ``"loss"``, ``"gradient"``, ``"buffer"``, ``"random"`` (the state of a random generator) or ``"error"`` (a run failed).
    name
        Of the parameter, the buffer or the generator; empty for the loss.
    largest
        The largest absolute difference of an element; NaN where there is none: of random states, of shapes, of an inf.
    relative
        Norm of the difference over that of the reference, as `RelativeError` has it; NaN where it is not known.
    text
        In words.
    """

    kind: str
    name: str
    largest: float
    relative: float
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AutocastError:
    """How far autocast takes loss and gradients from an fp32 run of the same weights.

    Attributes
    ----------
    loss, gradients
        Relative errors; of all gradients taken together. NaN where there is nothing finite to compare.
    worst
        The parameters whose gradients are furthest off, with their relative errors, worst first; without those whose gradient
        is below 2^-20 of the norm of all, as that of a bias before a BatchNorm is.
    nonfinite
        Gradient elements that are inf or NaN where they are finite in fp32; an optimizer's step would be skipped.
    scale
        The loss was scaled by it.
    notes
        Sentences, such as on parameters that autocast leaves alone.
    """

    loss: float
    gradients: float
    worst: tuple[tuple[str, float], ...]
    nonfinite: int
    scale: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityReport:
    """The settings in force against a reference, on one batch.

    Attributes
    ----------
    settings
        What was in force.
    reproducible
        Whether runs without checkpointing agree with each other. If not, nothing can be said of checkpointing.
    differences
        Between the settings in force and the same without checkpointing: the loss, then gradients in the order in which a
        backward pass reaches their layers (the model's, from its end), buffers, random states. Empty: bit-identical.
    noise
        The same between two runs without checkpointing.
    blamed
        Checkpointed layers that change something when they alone are checkpointed.
    autocast
        None where autocast is not in force.
    loss, reference_loss
        With the settings in force, and the same without checkpointing; NaN for a run that failed.
    compared
        How many gradients, buffers and random states there are, by name of these.
    """

    settings: Settings
    reproducible: bool
    differences: tuple[Difference, ...]
    noise: tuple[Difference, ...]
    blamed: tuple[str, ...]
    autocast: AutocastError | None
    loss: float
    reference_loss: float
    compared: Mapping[str, int]

    @property
    def identical(self) -> bool:
        """Whether everything is bit for bit what it is without checkpointing."""
        return not self.differences

    @property
    def first(self) -> Difference | None:
        """The first difference; None when there is none."""
        return self.differences[0] if self.differences else None

    @property
    def verdict(self) -> str:
        """In one sentence."""
        parts = ", ".join(f"{count} {kind}{'s' * (count != 1)}" for kind, count in self.compared.items() if count)
        if not self.differences and not self.settings.checkpointed:
            return f"No layer is checkpointed, and a second run gave the same, bit for bit: the loss, {parts}."
        if not self.differences:
            return f"Bit-identical to a run without checkpointing: the loss, {parts}."
        if not self.reproducible:
            return (
                "It cannot be told: this model does not give the same twice, also without checkpointing. Two such runs differ in "
                f"{_summary(self.noise)}."
            )
        changed = f"Checkpointing changes {_summary(self.differences)}."
        return f"{changed} It comes from checkpointing {', '.join(map(repr, self.blamed))}." if self.blamed else changed

    def __repr__(self) -> str:
        rows = self._rows()
        table = table_text(told(rows, sentences=_SENTENCES), words=_WORDS) if len(rows) > 1 else []
        more = map(in_language, (*self._autocast_lines(), *self._more()))
        return "\n".join([in_language(self._title()), in_language(self.verdict), *table, *more])

    def _repr_html_(self) -> str:
        rows = self._rows()
        table = table_html(told(rows, sentences=_SENTENCES), words=_WORDS) if len(rows) > 1 else ""
        words = "".join(f"<div>{html.escape(in_language(line))}</div>" for line in (*self._more(), *self._autocast_lines()))
        title, verdict = html.escape(in_language(self._title())), html.escape(in_language(self.verdict))
        return f"<div><b>{title}</b><div>{verdict}</div>{table}{words}</div>"

    def _title(self) -> str:
        return f"check of {describe_settings(self.settings)}"

    def _rows(self) -> list[tuple[str, ...]]:
        shown = (self.differences if self.reproducible else self.noise)[:_SHOWN]
        rows = [(d.kind, d.name, error_text(d.largest), error_text(d.relative), d.text) for d in shown]
        return [marked_all("what", "name", "off by", "relative", ""), *rows]

    def _more(self) -> list[str]:
        hidden = len(self.differences if self.reproducible else self.noise) - _SHOWN
        return [f"… and {hidden} more: report.{'differences' if self.reproducible else 'noise'}"] if hidden > 0 else []

    def _autocast_lines(self) -> list[str]:
        if self.autocast is None:
            return []
        found = self.autocast
        worst = ", ".join(f"{name} {error_text(error)}" for name, error in found.worst)
        gradients = "no gradient to compare" if math.isnan(found.gradients) else f"all gradients {error_text(found.gradients)}"
        lines = [
            f"{self.settings.autocast} against fp32, relative error: loss {error_text(found.loss)}, {gradients}"
            f"{f'; furthest off: {worst}' if worst else ''}."
        ]
        if found.nonfinite:
            scaled = f" with the loss scaled by {format_scale(found.scale)}" if found.scale != 1.0 else ""
            harm = "this step would be skipped" if self.settings.scales_loss else "this step would make the parameters NaN"
            lines.append(f"{found.nonfinite:,} gradient elements are inf or NaN{scaled}: {harm}.")
        return [*lines, *found.notes]


@interrupts_noted()
def check(loop: LiveLoop, batch: tuple[Any, Any], loss_fn: LossFunction) -> ParityReport:
    """Compare a forward and a backward pass of the settings in force with what they should give.

    Checkpointing must change nothing: loss, gradients, buffers and random states are compared bit for bit with a run of the
    same settings without it. Autocast changes numbers, and is only measured: against a run in fp32, with the same random
    numbers, without autocast and checkpointing. The user's own checkpoints and autocast regions within the model stay in all
    runs, and so does the loss scale in force. NaN equals NaN; an inf equals the same inf.

    When something differs, the reference is run twice more: a model that does not give the same twice (a non-deterministic
    kernel, a random generator that is not known here) is not blamed on checkpointing. If it does, each checkpointed layer is
    tried alone, the first `TRIED_ALONE` of them, to name those at fault.

    Parameters
    ----------
    loop
        Whose model and settings; between two steps. No optimizer steps, and everything is as before afterwards.
    batch
        ``(inputs, targets)``; copies on the model's device are used.
    loss_fn
        ``loss_fn(model(inputs), targets)``; several inputs are given as `amp_widgets.core.model_call.call_model` says.

    Raises
    ------
    RunError
        When a step is in progress, a run is training, the model is compiled, or the batch is no pair.
    """
    settings, scale = loop.settings, loss_scale(loop)
    with trial(loop, batch, loss_fn, verb="check") as tried:
        active = tried.checkpointed

        def run(*checkpointed: str, autocast: AutocastName = settings.autocast, scale: float = scale) -> Outcome:
            tried.checkpoint(checkpointed)
            return tried.run(autocast, scale=scale)

        forced = _attempt(lambda: run(*active)) if active else run()
        plain = run()
        differences = _differences(forced, plain)
        noise: tuple[Difference, ...] = ()
        blamed: tuple[str, ...] = ()
        if differences and not active:
            noise = differences
        elif differences:
            noise = _differences(run(), plain) or _differences(run(), plain)
        if differences and not noise:
            blamed = active if len(active) == 1 else _blame(active[:TRIED_ALONE], run, plain)
        error = None
        if settings.autocast != "fp32":
            error = _autocast_error(plain, run(autocast="fp32", scale=1.0), tuple(left_alone_text(tried.model)))
    return ParityReport(
        settings=settings,
        reproducible=not noise,
        differences=differences,
        noise=noise,
        blamed=blamed,
        autocast=error,
        loss=math.nan if isinstance(forced, Exception) else float(forced.loss),
        reference_loss=float(plain.loss),
        compared={
            "gradient": sum(gradient is not None for gradient in plain.gradients.values()),
            "buffer": len(plain.buffers),
            "random state": len(plain.random_states),
        },
    )


TRIED_ALONE = 64
"""Checkpointed layers that are tried alone, at most, to find those at fault."""

_SHOWN = 10
_WORST = 3
_NEGLIGIBLE = 2.0**-20
_WORDS = (0, 1, 4)
_SENTENCES = (0, 4)


def _attempt(run: Callable[[], Outcome]) -> Outcome | Exception:
    """What a run gives, or how it fails: as a recompute that is not like its forward pass may."""
    try:
        return run()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return error.with_traceback(None)  # whose frames hold the graph


def _blame(names: tuple[str, ...], run: Callable[..., Outcome], plain: Outcome) -> tuple[str, ...]:
    return tuple(name for name in names if _differences(_attempt(lambda name=name: run(name)), plain))  # type: ignore[misc]


def _differences(outcome: Outcome | Exception, reference: Outcome) -> tuple[Difference, ...]:
    if isinstance(outcome, Exception):
        words = f"{type(outcome).__name__}: {outcome}".splitlines()
        return (Difference(kind="error", name="", largest=math.nan, relative=math.nan, text=words[0]),)
    found = [_compare("loss", "", outcome.loss, reference.loss)]
    for kind, here, there in (
        ("gradient", outcome.gradients, reference.gradients),
        ("buffer", outcome.buffers, reference.buffers),
    ):
        names = list(dict.fromkeys([*there, *here]))
        if kind == "gradient":
            names.reverse()
        found += [_compare(kind, name, here.get(name), there.get(name)) for name in names]
    for name, state in reference.random_states.items():
        if outcome.random_states.get(name) != state:
            text = "more or fewer numbers were drawn, or from another state"
            found.append(Difference(kind="random", name=name, largest=math.nan, relative=math.nan, text=text))
    return tuple(difference for difference in found if difference is not None)


def _compare(kind: str, name: str, here: torch.Tensor | None, there: torch.Tensor | None) -> Difference | None:
    """None where the two are the same, bit for bit."""
    if here is None or there is None:
        if here is there:
            return None
        text = "there is one only without checkpointing" if here is None else "there is one only with checkpointing"
        return Difference(kind=kind, name=name, largest=math.nan, relative=math.nan, text=text)
    if (here.dtype, here.shape) != (there.dtype, there.shape):
        text = f"{here.dtype} of shape {tuple(here.shape)} in place of {there.dtype} of shape {tuple(there.shape)}"
        return Difference(kind=kind, name=name, largest=math.nan, relative=math.nan, text=text.replace("torch.", ""))
    here, there = _plain(here), _plain(there)
    differ = ~_same_bits(here, there)
    count = int(differ.sum())
    if count == 0:
        return None
    error = RelativeError()
    error.add(here, there)
    off = (here[differ].double() - there[differ].double()).abs()
    off = off[torch.isfinite(off)]
    return Difference(
        kind=kind,
        name=name,
        largest=float(off.max()) if off.numel() else math.nan,
        relative=error.value,
        text=f"{count} of {differ.numel()} elements" if differ.numel() > 1 else f"{here.item()!r} in place of {there.item()!r}",
    )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _same_bits(here: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """Element by element; of the many NaNs each equals each."""
    if not here.is_floating_point():
        return here == there
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[here.element_size()]
    return (here.contiguous().view(bits) == there.contiguous().view(bits)) | (torch.isnan(here) & torch.isnan(there))


def _autocast_error(outcome: Outcome, reference: Outcome, notes: tuple[str, ...]) -> AutocastError:
    loss, together = RelativeError(), RelativeError()
    loss.add(outcome.loss, reference.loss)
    alone: dict[str, RelativeError] = {}
    for name, there in reference.gradients.items():
        here = outcome.gradients.get(name)
        if here is None or there is None or here.shape != there.shape:
            continue
        alone[name] = RelativeError()
        for error in (alone[name], together):
            error.add(here, there, scale=outcome.scale)
    # The gradient of a bias before a BatchNorm is 0 but for rounding: how far that is off says nothing.
    floor = together.reference_norm * _NEGLIGIBLE
    errors = [(name, error.value) for name, error in alone.items() if error.value > 0 and error.reference_norm > floor]
    errors.sort(key=lambda pair: -pair[1])
    return AutocastError(
        loss=loss.value,
        gradients=together.value,
        worst=tuple(errors[:_WORST]),
        nonfinite=together.nonfinite,
        scale=outcome.scale,
        notes=notes,
    )


def _summary(differences: tuple[Difference, ...]) -> str:
    """``the loss and 3 gradients; first the loss, off by 1.2e-03``."""
    counts = {kind: sum(d.kind == kind for d in differences) for kind in ("error", "loss", "gradient", "buffer", "random")}
    if counts["error"]:
        return f"whether it runs at all: {differences[0].text}"
    words = ["the loss"] * counts["loss"]
    words += [f"{n} {kind}{'s' * (n > 1)}" for kind, n in counts.items() if n and kind in ("gradient", "buffer")]
    count = counts["random"]
    words += [f"{count} random state{'s' * (count > 1)}"] * bool(count)
    first = differences[0]
    kind = "random state" if first.kind == "random" else first.kind
    named = "the loss" if first.kind == "loss" else f"the {kind} of {first.name}"
    size = "" if math.isnan(first.largest) else f", off by {error_text(first.largest)}"
    return f"{' and '.join([', '.join(words[:-1]), words[-1]] if len(words) > 1 else words)}; first {named}{size}"
