"""The training chart as a Plotly figure: a pure function of a history's columns and events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from amp_widgets.charts import flags, look
from amp_widgets.charts._extras import missing_extra
from amp_widgets.charts.decimate import Points
from amp_widgets.charts.labels import MARKED_KINDS, EventLike, event_label, event_text, short_event_label
from amp_widgets.charts.look import Theme
from amp_widgets.charts.series import NAN, POSITIVE_INFINITY, lone, series_of, thinned, thinned_to_extremes
from amp_widgets.language import say

try:
    import plotly.graph_objects as go
except ImportError as error:
    raise missing_extra(error) from error

ASSUMED_WIDTH_PX = 1000
"""A figure is as wide as its place; for the labels of a static one a width must be assumed."""


def training_figure(
    columns: Mapping[str, npt.NDArray[Any]],
    events: Sequence[EventLike],
    *,
    memory_source: str,
    theme: Theme = "light",
    limit: int | None = None,
    keep_scale: bool = False,
) -> go.Figure:
    """Loss, loss scale and memory over steps, and every applied change as a labelled line through all three.

    Parameters
    ----------
    columns
        Name → array of shape (rows,), NaN where not measured. ``step`` is needed; drawn are ``loss``, ``scale``, ``skipped``,
        ``allocated_bytes``, ``peak_bytes`` and ``reserved_bytes``, as far as they are there.
    events
        What happened, see :class:`amp_widgets.charts.labels.EventLike`.
    memory_source
        How the memory numbers are obtained, for people.
    theme
        ``"light"`` or ``"dark"``.
    limit
        Points a line is reduced to, with its extremes kept; None draws all.
    keep_scale
        Whether the limit is not for changes of the scale and skipped steps, so that none is left out.

    Returns
    -------
    plotly.graph_objects.Figure
        Traces have ``meta`` with the name of their series and their part: ``line``, ``lone`` (points with a gap on both sides)
        or ``marks``. The scale is drawn as its base-2 logarithm.
    """
    skipped_steps = np.array(sorted({event.step for event in events if event.kind == "skipped"}), dtype=np.float64)
    series = series_of(columns, skipped_steps=skipped_steps)
    if limit is not None:
        series = thinned_to_extremes(series, limit) if keep_scale else thinned(series, limit)
    colours = look.COLOURS[theme]
    layout = look.layout(colours, memory_source)
    _show_axes(layout, series)
    _add_flags(layout, events, series["loss"][0], colours)
    traces = [trace | _data(trace, series, events) for trace in look.traces(colours)]
    return go.Figure(traces, layout | {"template": go.layout.Template()})


def _data(trace: Mapping[str, Any], series: Mapping[str, Points], events: Sequence[EventLike]) -> dict[str, Any]:
    name, part = trace["meta"]["series"], trace["meta"]["part"]
    if name == "events":
        marked = [event for event in events if event.kind in MARKED_KINDS]
        return {
            "x": [event.step for event in marked],
            "y": [1] * len(marked),
            "text": [event_text(event) for event in marked],
            "marker": trace["marker"] | {"symbol": [look.EVENT_SYMBOLS[event.kind] for event in marked]},
        }
    x, y = lone(series[name]) if part == "lone" else series[name]
    if name == "not_finite":
        return {"x": x, "y": np.full(x.shape, look.TOP_EDGE), "text": [_not_finite_text(code) for code in y]}
    # Without any point it has no place in the legend; but it stays, as it is what its axis is there for.
    return {"x": [], "y": []} if np.isnan(y).all() else {"x": x, "y": y}


def _not_finite_text(code: float) -> str:
    if code == NAN:
        return say("NaN, or not recorded")
    return "+inf" if code == POSITIVE_INFINITY else "-inf"


def _show_axes(layout: dict[str, Any], series: Mapping[str, Points]) -> None:
    """Notes only where there is nothing, tick labels where there is something; no ticks between steps or powers of two."""
    notes = {annotation["name"]: annotation for annotation in layout["annotations"]}
    for name, plot in look.PLOTS.items():
        empty = all(np.isnan(series[one][1]).all() for one in plot.series)
        notes[f"note {name}"]["visible"] = empty
        layout[plot.axis]["showticklabels"] = not empty
    layout["yaxis2"]["dtick"] = look.whole_dtick(series["scale"][1])
    step = series["loss"][0]
    if step.size and np.ptp(step) < 10:
        layout["xaxis"]["dtick"] = 1


def _add_flags(layout: dict[str, Any], events: Sequence[EventLike], step: npt.NDArray[Any], colours: look.Colours) -> None:
    applied = sorted((event for event in events if event.kind == "applied"), key=lambda event: event.step)
    steps = [float(event.step) for event in applied]
    ends = [*steps, *step[[0, -1]].tolist()] if step.size else steps
    shown = flags.placed(
        steps,
        [event_label(event) for event in applied],
        [short_event_label(event) for event in applied],
        first_step=min(ends, default=0.0),
        last_step=max(ends, default=1.0),
        width_px=ASSUMED_WIDTH_PX - look.MARGIN_PX["l"] - look.MARGIN_PX["r"],
    )
    for flag in shown:
        layout["shapes"].append(flags.line_shape(flag, colour=colours.flag, plot_height_px=look.PLOT_HEIGHT_PX))
        if flag.lane is not None:
            layout["annotations"].append(flags.label_annotation(flag, colour=colours.text, background=colours.background))
