"""What the Plan tab shows, as an immutable snapshot, and what of a plan has come true."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from amp_widgets.analysis.inspections import Inspection
from amp_widgets.analysis.plan import CURVE, Plan, PlanPoint
from amp_widgets.core.memory.profile import memory_text
from amp_widgets.language import in_language, say, say_number
from amp_widgets.widgets.measured_settings import Measured
from amp_widgets.widgets.text import seconds_text


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlanState:
    """What the panel shows, beside a `DashboardState`.

    Attributes
    ----------
    plan, largest_batch, on_cuda
        How these stand.
    measured
        What the steps of the run came to with each of the settings they had.
    why_no_batch
        Why there is no batch to plan on, or None.
    budget_bytes
        The session's memory budget, or None.
    """

    plan: Inspection = dataclasses.field(default_factory=Inspection)
    largest_batch: Inspection = dataclasses.field(default_factory=Inspection)
    on_cuda: Inspection = dataclasses.field(default_factory=Inspection)
    measured: tuple[Measured, ...] = ()
    why_no_batch: str | None = None
    budget_bytes: float | None = None

    @property
    def newest(self) -> Plan | None:
        """The newest plan."""
        return self.plan.result if isinstance(self.plan.result, Plan) else None


LEAST_STEPS = 5
"""Of fewer steps no time is shown."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredPoint:
    """A set of layers of a plan, as steps of the run had it.

    Attributes
    ----------
    layers
        Which set.
    peak_bytes, step_s, steps
        As in `Measured`.
    extra_s
        What the median step takes more than with no layer checkpointed; NaN where that is not known.
    reference_s, reference
        The median step that this is known by, and the label of the set that it was with.
    """

    layers: tuple[str, ...]
    peak_bytes: float
    step_s: float
    steps: int
    extra_s: float
    reference_s: float
    reference: str


def measured_points(plan: Plan, measured: Sequence[Measured], fp32_layers: Sequence[str] = ()) -> tuple[MeasuredPoint, ...]:
    """Those sets on the curve of a plan that steps of the run had in force, in the plan's format.

    The extra time is against steps with no layer checkpointed; where the run had none, against those with another set of the
    curve, of which it is predicted what they take more.
    """
    sets: dict[frozenset[str], PlanPoint] = {}
    for point in plan.points:
        if point.label != CURVE or frozenset(point.layers) not in sets:
            sets[frozenset(point.layers)] = point
    found = [
        (sets[frozenset(one.layers)], one)
        for one in measured
        if one.autocast == plan.autocast and set(one.fp32_layers) == set(fp32_layers) and frozenset(one.layers) in sets
    ]
    timed = [pair for pair in found if pair[1].steps >= LEAST_STEPS and math.isfinite(pair[1].step_s)]
    reference, base = min(timed, key=lambda pair: (bool(pair[0].layers), -pair[1].steps), default=(None, None))
    made = []
    for point, one in found:
        extra_s = math.nan
        if reference is not None and base is not None and (point, one) in timed and (one is not base or not reference.layers):
            extra_s = reference.extra_s + one.step_s - base.step_s
        made.append(
            MeasuredPoint(
                layers=one.layers,
                peak_bytes=one.peak_bytes,
                step_s=one.step_s,
                steps=one.steps,
                extra_s=extra_s,
                reference_s=math.nan if base is None else base.step_s,
                reference="" if reference is None else reference.label,
            )
        )
    return tuple(made)


def came_true_text(
    points: Sequence[MeasuredPoint], layers: Sequence[str], *, predicted_bytes: float, extra_s: float, budget_bytes: float
) -> str:
    """Predicted against measured, of one set of layers; nothing where no step had it.

    Parameters
    ----------
    extra_s
        Predicted; NaN for nothing about the time.
    """
    point = next((one for one in points if set(one.layers) == set(layers)), None)
    if point is None:
        return ""
    if math.isnan(point.peak_bytes):
        return say("The memory of the steps with these layers was not measured")
    within = say("within the budget") if point.peak_bytes <= budget_bytes else say("above the budget")
    if point.steps > 10:
        count = say("over {count} steps", count=f"{point.steps - 1:,}")
    else:
        count = say_number("{count} step", "{count} steps", point.steps)
    said = say(
        "Predicted {predicted}, measured {measured}: {within}, in {count} of the run",
        predicted=memory_text(predicted_bytes),
        measured=memory_text(point.peak_bytes),
        within=within,
        count=count,
    )
    if math.isnan(extra_s) or math.isnan(point.extra_s) or not layers:
        return said
    alone = point.reference == "none"
    more = point.step_s - point.reference_s
    values = {
        "time": seconds_text(point.step_s),
        "before": seconds_text(point.reference_s),
        "without": say("without checkpointing") if alone else say("with {layers}", layers=in_language(point.reference)),
        "change": seconds_text(abs(more)),
    }
    if more >= 0:
        took = say("A step took {time}, {before} {without}: {change} more", **values)
    else:
        took = say("A step took {time}, {before} {without}: {change} less", **values)
    against = say(", predicted {time} more", time=seconds_text(extra_s)) if alone else ""
    return f"{said}. {took}{against}"
