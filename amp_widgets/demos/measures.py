"""How the answers of the scenarios are measured: each from a session whose run is paused, or from its history."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from amp_widgets.analysis.gradients import GradientRange
from amp_widgets.analysis.inspections import InspectionKind
from amp_widgets.analysis.overflow import explain_skips
from amp_widgets.core.settings import format_scale
from amp_widgets.demos.prepared_scenario import LOOK_S, Measured, Scenario
from amp_widgets.errors import RunError
from amp_widgets.widgets.question_text import value_text
from amp_widgets.widgets.text import bytes_text, loss_text, seconds_text

if TYPE_CHECKING:
    from amp_widgets.session import AmpSession

Rows = dict[str, npt.NDArray[Any]]
FASTER_BY = 1.1
"""A format counts as faster where a step with the other takes so many times as long, in every round."""
WARM_UP_STEPS = 2
"""After a change, so many steps are not timed."""


def zero_share(session: AmpSession, scenario: Scenario) -> Measured:
    """Percent of the gradients stored in fp16 that are zero, of those steps in which the loss was not scaled."""
    rows = _rows(session, scenario, "loss")
    counted = [GradientRange.of(counts) for counts in session.numerics.gradients.counts if counts.step < scenario.steps]
    bare = [one.total for one in counted if one.scale == 1.0]
    scaled = [one for one in counted if one.scale > 1.0]
    share = 100 * float(np.mean([one.shares().zeros for one in bare]))
    [turned] = scenario.changes  # where scaling is switched on
    return Measured(
        value=share,
        facts={
            "zeros": f"{bare[0].zeros:,.0f}",
            "gradients": f"{bare[0].elements:,}",
            "first_loss": loss_text(rows["loss"][0]),
            "middle_loss": loss_text(rows["loss"][turned - 1]),
            "last_loss": loss_text(rows["loss"][-1]),
            "turned": str(turned),
            "scale": format_scale(scaled[-1].scale),
            "scaled_share": value_text(100 * scaled[-1].shares().zeros, "%"),
        },
    )


def first_skips(session: AmpSession, scenario: Scenario) -> Measured:
    """How many steps are skipped before the first that is not."""
    rows = _rows(session, scenario, "skipped", "scale")
    trained = np.flatnonzero(rows["skipped"] == 0)
    if not trained.size:
        raise RunError(f"scenario: all of the {scenario.steps} steps were skipped, so that the scale is not known yet")
    count = int(trained[0])
    layers = [one.layer for one in explain_skips(session.history, session.numerics.overflow.notes) if one.step < count]
    return Measured(
        value=count,
        facts={
            "first_scale": format_scale(float(rows["scale"][0])),
            "fitting_scale": format_scale(float(rows["scale"][count])),
            "layer": layers[0] if layers else "–",
            "skipped": str(count),
        },
    )


def first_doubling(session: AmpSession, scenario: Scenario) -> Measured:
    """The first step with a larger scale than the step before."""
    rows = _rows(session, scenario, "skipped", "scale")
    grown = np.flatnonzero(np.diff(rows["scale"]) > 0)
    if not grown.size:
        raise RunError(f"scenario: the scale was not doubled in {scenario.steps} steps")
    step = int(grown[0]) + 1
    skipped = np.flatnonzero(rows["skipped"][:step] > 0)
    return Measured(
        value=step,
        facts={
            "skipped": str(skipped.size),
            "interval": str(session.settings.growth_interval),
            "last_skip": str(skipped[-1]) if skipped.size else "–",
            "before": format_scale(float(rows["scale"][step - 1])),
            "after": format_scale(float(rows["scale"][step])),
            "step": str(step),
        },
    )


def fitting_batch(session: AmpSession, scenario: Scenario) -> Measured:
    """The largest batch that fits into the peak of a step so far when all blocks are checkpointed; a step with it was run."""
    peak_bytes = float(np.nanmax(_rows(session, scenario, "peak_bytes")["peak_bytes"]))
    grid = {"autocast": [session.settings.autocast], "checkpointed": ["none", "layers.*"]}
    sizes = _inspected(session, "largest_batch", budget_bytes=peak_bytes, grid=grid, confirm=True)
    [before] = [row for row in sizes if not row.checkpointed]
    [row] = [row for row in sizes if row.checkpointed]
    if row.confirmed is None or not row.confirmed.fits:
        raise RunError(f"scenario: a batch of {row.size} was predicted to fit, and a step with it did not")
    return Measured(
        value=int(row.size),
        facts={
            "budget": bytes_text(peak_bytes),
            "before": f"{before.size:,}",
            "after": f"{row.size:,}",
            "peak": bytes_text(row.confirmed.peak_bytes),
            "blocks": str(len(row.checkpointed)),
        },
    )


def peak_of_both(session: AmpSession, scenario: Scenario) -> Measured:
    """The peak with both, in percent of that with neither; each of steps that are alike, without the first."""
    rows = _rows(session, scenario, "peak_bytes", "step_s")
    [changed] = scenario.changes
    neither, both = (float(np.nanmax(rows["peak_bytes"][part])) for part in (slice(1, changed), slice(changed + 1, None)))
    before_s, after_s = (float(np.median(rows["step_s"][part])) for part in (slice(1, changed), slice(changed + 1, None)))
    return Measured(
        value=100 * both / neither,
        facts={
            "neither": bytes_text(neither),
            "both": bytes_text(both),
            "before_time": seconds_text(before_s),
            "after_time": seconds_text(after_s),
        },
    )


def statistics_updates(session: AmpSession, scenario: Scenario) -> Measured:
    """How often the running statistics of a BatchNorm are updated in a step, counted by itself; and whether gradients agree."""
    model = session.model
    assert model is not None
    counts = [int(count) for name, count in model.named_buffers() if name.endswith("num_batches_tracked")]
    steps = session.step
    report = _inspected(session, "check")
    names = {0.0: "never", 1.0: "once", 2.0: "twice"}
    times = {count / steps for count in counts}
    return Measured(
        value=names.get(times.pop(), "otherwise") if len(times) == 1 else "otherwise",
        facts={
            "updates": str(counts[0]),
            "steps": str(steps),
            "gradients": str(report.compared.get("gradient", 0)),
            "buffers": str(report.compared.get("buffer", 0)),
            "report": str(report),
        },
        more=None if report.identical else "{report}",
    )


def halves(session: AmpSession, scenario: Scenario) -> Measured:
    """Which of fp16 and bf16 has had steps skipped, and which has the larger rounding errors."""
    rows = _rows(session, scenario, "skipped")
    [changed] = scenario.changes
    skips = {"fp16": int((rows["skipped"][:changed] > 0).sum()), "bf16": int((rows["skipped"][changed:] > 0).sum())}
    report = _inspected(session, "precision")
    errors = {name: float(np.nanmedian([layer.output_error for layer in report.of(name)])) for name in skips}
    overflows = max(skips, key=lambda name: skips[name])
    coarser = max(errors, key=lambda name: errors[name])
    return Measured(
        value=f"{overflows} {coarser}" if skips[overflows] else f"none {coarser}",
        facts={
            "fp16_skips": str(skips["fp16"]),
            "bf16_skips": str(skips["bf16"]),
            "steps": str(changed),
            "fp16_error": f"{100 * errors['fp16']:.2g} %",
            "bf16_error": f"{100 * errors['bf16']:.2g} %",
            "times": f"{errors['bf16'] / errors['fp16']:.1f}",
        },
    )


def fastest(session: AmpSession, scenario: Scenario) -> Measured:
    """The format whose median step is shortest in every round, clearly; or that there is none. The formats take turns, a few
    steps each: what else the machine does meanwhile slows whole rounds, or some steps of one."""
    rows = _rows(session, scenario, "step_s")
    edges = [0, *sorted(scenario.changes), scenario.steps]
    formats = ["fp32", *(str(scenario.changes[step]["autocast"]) for step in sorted(scenario.changes))]
    rounds_s: dict[str, list[float]] = {}
    for name, begin, end in zip(formats, edges[:-1], edges[1:], strict=True):
        rounds_s.setdefault(name, []).append(float(np.median(rows["step_s"][begin + WARM_UP_STEPS : end])))
    first = min(rounds_s, key=lambda name: float(np.median(rounds_s[name])))
    others = [medians_s for name, medians_s in rounds_s.items() if name != first]
    clear = all(other >= FASTER_BY * own for medians_s in others for own, other in zip(rounds_s[first], medians_s, strict=True))
    facts = {f"{name}_times": ", ".join(map(seconds_text, medians_s)) for name, medians_s in rounds_s.items()}
    return Measured(value=first if clear else "none", facts=facts | {"device": session.dashboard_state().device})


def _rows(session: AmpSession, scenario: Scenario, *names: str) -> Rows:
    """Of the scenario's own steps; a run that is paused has often gone a little further."""
    rows = session.history.columns("step", *names)
    mine = rows["step"] < scenario.steps
    return {name: column[mine] for name, column in rows.items()}


def _inspected(session: AmpSession, kind: InspectionKind, **options: Any) -> Any:
    """The result of an inspection of the newest batch, waited for."""
    session.inspect(kind, **options)
    while session.inspection(kind).pending:
        if session.closed:
            raise RunError("scenario: the session was closed while it was measured")
        time.sleep(LOOK_S)
    found = session.inspection(kind)
    if found.why_not is not None:
        raise RunError(found.why_not)
    return found.result
