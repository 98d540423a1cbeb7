"""A plan: which layers to checkpoint so that a step fits a memory budget, and what that is expected to do."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from amp_widgets.analysis.choice import ChosenBy
from amp_widgets.core.memory.budget import told_apart
from amp_widgets.core.memory.profile import memory_text
from amp_widgets.core.table import table_html, table_text, told
from amp_widgets.language import in_language, marked, marked_all


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanPoint:
    """One set of layers on the curve of peak against time.

    Attributes
    ----------
    label
        ``"none"``, ``"all"``, ``"every second"``, ``"√n"``, ``"yours"`` (in force), ``"plan"``; or ``"curve"``: the cheapest set
        for one budget of several between the least peak and that of none.
    layers
        Names, in the model's order.
    peak_bytes, extra_s
        Of a step, and what it takes more than with no layer checkpointed.
    predicted
        Whether the peak is that of a step with this set; else it is an estimate, by a step with no layer checkpointed.
    fits
        Whether the peak is within the budget.
    """

    label: str
    layers: tuple[str, ...]
    peak_bytes: float
    extra_s: float
    predicted: bool
    fits: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """What else would help where no set of layers fits.

    Attributes
    ----------
    label
        Such as ``"bf16"`` or ``"batch 16"``.
    changes
        Settings that differ from those in force, to be requested.
    batch_size
        Rows of the batch; None for as many as there were.
    peak_bytes
        Predicted.
    fits
        Whether that is within the budget.
    """

    label: str
    changes: Mapping[str, Any]
    batch_size: int | None
    peak_bytes: float
    fits: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Which layers to checkpoint: ``session.request(checkpointed=plan)``.

    Attributes
    ----------
    layers
        Names, in the model's order. Where nothing fits, those with the lowest peak that was found.
    budget_bytes
        What a step may hold at a time.
    predicted_peak_bytes
        Of the first step with `layers` checkpointed, in the format in force, with a margin of 0.1 %, at most 4 kB. Later ones
        need about the same: in the first, a copy of a layer's inputs is held while the layer runs.
    predicted_extra_seconds
        What the step takes more than with no layer checkpointed.
    autocast
        The format in force. A request for the plan is refused where another one will be in force with it.
    fits
        Whether the predicted peak is within the budget. Where it is not, a request for the plan is refused; one for its
        `layers` is not.
    least_peak_bytes
        The lowest peak of the steps that were predicted, with the set among them that is the least by estimate: about the least
        budget that fits.
    obtained
        How the numbers were obtained: a sentence.
    chosen_by
        How the layers were chosen: ``"scipy milp"``, or, without scipy, ``"greedy"``.
    candidates
        How many layers there were to choose from.
    points
        Other sets, and this one, on the curve of peak against time.
    alternatives
        Where nothing fits: what else would help.
    notes
        Sentences about what the loop of the run holds besides a plain training step.
    fp32_layers
        Those that were kept in FP32.
    """

    layers: tuple[str, ...]
    budget_bytes: float
    predicted_peak_bytes: float
    predicted_extra_seconds: float
    autocast: str
    fits: bool
    least_peak_bytes: float
    obtained: str
    chosen_by: ChosenBy
    candidates: int
    points: tuple[PlanPoint, ...]
    alternatives: tuple[Alternative, ...] = ()
    notes: tuple[str, ...] = ()
    fp32_layers: tuple[str, ...] = ()

    @property
    def predicted_extra_s(self) -> float:
        """`predicted_extra_seconds`."""
        return self.predicted_extra_seconds

    def to_table(self) -> list[tuple[str, ...]]:
        """Rows of text, the first of them the headings: the sets of `points`, those with a name first, then `alternatives`."""
        named = [point for point in self.points if point.label != CURVE]
        curve = [point for point in self.points if point.label == CURVE]
        rows = [_cells(point) for point in (*named, *curve)]
        rows += [
            (f"instead: {each.label}", "", _count(self.layers), memory_text(each.peak_bytes), "predicted", _fits(each.fits), "")
            for each in self.alternatives
        ]
        return [_HEADINGS, *rows]

    @property
    def sentence(self) -> str:
        """What it comes to."""
        budget, peak = told_apart(self.budget_bytes, self.predicted_peak_bytes)
        names = _listed(self.layers)
        if self.fits and not self.layers:
            return f"plan for {budget} in {self.autocast}: it fits as it is, with a predicted peak of {peak}"
        what = f"checkpoint {len(self.layers)} of {self.candidates} layers ({names})"
        more = f"about {duration_text(self.predicted_extra_seconds)} more a step"
        if self.fits:
            return f"plan for {budget} in {self.autocast}: {what}; predicted peak {peak}, {more}"
        budget, lowest = told_apart(self.budget_bytes, self.least_peak_bytes)
        least = f"the least is {lowest}"
        nearest = f", with {len(self.layers)} of {self.candidates} layers checkpointed ({names})" if self.layers else ""
        helps = [f"{each.label}: {memory_text(each.peak_bytes)}" for each in self.alternatives if each.fits]
        advice = f"; what would fit instead: {', '.join(helps)}" if helps else ""
        larger = [each for each in self.alternatives if not each.fits]
        others = [f"{each.label}: {told_apart(each.peak_bytes, self.budget_bytes)[0]}" for each in larger]
        short = f"; what would be too much, too: {', '.join(others)}" if others else ""
        return f"plan for {budget} in {self.autocast}: no set of layers fits; {least}{nearest}{advice}{short}"

    @property
    def explanation(self) -> str:
        """How it was obtained, and what is to be noted."""
        return " ".join([self.obtained, *(f"Note: {note}." for note in self.notes)])

    def __str__(self) -> str:
        return in_language(self.sentence)

    def __repr__(self) -> str:
        return "\n".join([str(self), *table_text(self._told_table(), words=_WORDS), in_language(self.explanation)])

    def _repr_html_(self) -> str:
        return (
            f"<div><b>{html.escape(str(self))}</b>{table_html(self._told_table(), words=_WORDS)}"
            f"<div>{html.escape(in_language(self.explanation))}</div></div>"
        )

    def _told_table(self) -> list[list[str]]:
        return told(self.to_table(), sentences=_SENTENCES)


CURVE = marked("curve")
"""The label of points that have no name of their own."""
PLAN = "plan"


def duration_text(duration_s: float) -> str:
    """Seconds in a unit that fits.

    >>> duration_text(0.0473), duration_text(2.5), duration_text(float("nan"))
    ('47.3 ms', '2.50 s', 'an unknown time')
    """
    if math.isnan(duration_s):
        return "an unknown time"
    return f"{duration_s:.2f} s" if duration_s >= 1 else f"{1e3 * duration_s:.1f} ms"


_HEADINGS = marked_all("set", "layers", "count", "peak", "obtained", "fits", "extra time")
_WORDS = (0, 1, 4, 5)
_SENTENCES = (0, 4, 5, 6)
_NAMES_SHOWN = 4


def _cells(point: PlanPoint) -> tuple[str, ...]:
    return (
        point.label,
        _listed(point.layers),
        _count(point.layers),
        memory_text(point.peak_bytes),
        marked("predicted") if point.predicted else marked("estimate"),
        _fits(point.fits),
        duration_text(point.extra_s),
    )


def _count(layers: Sequence[str]) -> str:
    return str(len(layers))


def _fits(fits: bool) -> str:
    return marked("fits") if fits else marked("too much")


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return f"{shown}, …" if len(names) > _NAMES_SHOWN else shown
