"""The training chart as a Plotly figure: a pure function of a history's columns and events."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from amp_widgets.charts import flags
from amp_widgets.charts._extras import missing_extra
from amp_widgets.charts.labels import MARKED_KINDS, EventLike, escaped, event_label, event_text
from amp_widgets.charts.series import LINES, NAN, POSITIVE_INFINITY, lone, series_of, thinned

try:
    import plotly.graph_objects as go
except ImportError as error:
    raise missing_extra(error) from error

Theme = Literal["light", "dark"]
HEIGHT_PX = 600
MARGIN_PX = {"t": flags.FIRST_LANE_PX + flags.LANES * flags.LANE_PX + 4, "b": 40, "l": 64, "r": 34}
PLOT_HEIGHT_PX = HEIGHT_PX - MARGIN_PX["t"] - MARGIN_PX["b"]
ASSUMED_WIDTH_PX = 1000
"""A figure is as wide as its place; for the labels of a static one a width must be assumed."""
DOMAINS = {"loss": (0.70, 1.0), "scale": (0.36, 0.61), "memory": (0.0, 0.27)}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Colours:
    """Colours of one theme; lines have Okabe and Ito's, darker or lighter until they stand out from the background 3:1."""

    background: str
    text: str
    muted: str
    grid: str
    flag: str
    loss: str
    scale: str
    alarm: str
    allocated: str
    peak: str
    reserved: str


COLOURS: dict[Theme, Colours] = {
    "light": Colours(
        background="#ffffff", text="#212121", muted="#6b6b6b", grid="#e4e4e4", flag="#757575",
        loss="#0072b2", scale="#7a3e9d", alarm="#c94f00", allocated="#0072b2", peak="#c94f00", reserved="#6b6b6b",
    ),
    "dark": Colours(
        background="#111111", text="#e8e8e8", muted="#a0a0a0", grid="#333333", flag="#9a9a9a",
        loss="#56b4e9", scale="#cc9be8", alarm="#ff8c42", allocated="#56b4e9", peak="#ff8c42", reserved="#a8a8a8",
    ),
}  # fmt: skip

EMPTY_NOTES = {"loss": "no finite loss so far", "scale": "the loss is not scaled", "memory": "not measured"}


def training_figure(
    columns: Mapping[str, npt.NDArray[Any]],
    events: Sequence[EventLike],
    *,
    memory_source: str,
    theme: Theme = "light",
    limit: int | None = None,
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

    Returns
    -------
    plotly.graph_objects.Figure
        Traces have ``meta`` with the name of their series and their part: ``line``, ``lone`` (points with a gap on both sides)
        or ``marks``. The scale is drawn as its base-2 logarithm.
    """
    skipped_steps = np.array(sorted({event.step for event in events if event.kind == "skipped"}), dtype=np.float64)
    series = series_of(columns, skipped_steps=skipped_steps)
    if limit is not None:
        series = thinned(series, limit)
    colours = COLOURS[theme]
    traces = [*_line_traces(colours), *_mark_traces(colours)]
    for trace in traces:
        name, part = trace.meta["series"], trace.meta["part"]
        if name == "events":
            marked = [event for event in events if event.kind in MARKED_KINDS]
            trace.update(
                x=[event.step for event in marked],
                y=[1] * len(marked),
                text=[event_text(event) for event in marked],
                marker_symbol=[EVENT_SYMBOLS[event.kind] for event in marked],
            )
        elif name == "not_finite":
            x, code = series[name]
            trace.update(x=x, y=np.full(x.shape, 0.96), text=[_not_finite_text(value) for value in code])
        else:
            trace.x, trace.y = lone(series[name]) if part == "lone" else series[name]
        if bool(np.isnan(trace.y).all()):
            trace.visible = False  # without points it has no place in the legend
    figure = go.Figure(traces, _layout(colours, memory_source))
    drawn = {"loss": ("loss",), "scale": ("scale", "skipped"), "memory": ("allocated", "peak", "reserved")}
    for plot, names in drawn.items():
        empty = all(np.isnan(series[name][1]).all() for name in names)
        figure.update_annotations({"visible": empty}, selector={"name": f"note {plot}"})
        figure.layout[_AXES[plot]].showticklabels = not empty
    figure.layout.yaxis2.dtick = whole_dtick(series["scale"][1])
    if series["loss"][0].size and np.ptp(series["loss"][0]) < 10:
        figure.layout.xaxis.dtick = 1
    _add_flags(figure, events, series["loss"][0], colours)
    return figure


EVENT_SYMBOLS = {"applied": "triangle-down", "rejected": "x-thin-open", "run": "circle-open", "note": "diamond-open"}
_AXES = {"loss": "yaxis", "scale": "yaxis2", "memory": "yaxis3"}


def whole_dtick(log2_scale: npt.NDArray[Any]) -> int:
    """Distance of ticks on the axis of the scale: a whole power of two, and at most about seven of them."""
    known = log2_scale[~np.isnan(log2_scale)]
    span = float(np.ptp(known)) if known.size else 0.0
    return max(1, 2 ** math.ceil(math.log2(span / 6))) if span > 0 else 1


def _line_traces(colours: Colours) -> list[go.Scatter]:
    looks: dict[str, dict[str, Any]] = {
        "loss": {"name": "loss", "yaxis": "y", "hovertemplate": "%{y:.6g}"},
        "scale": {"name": "loss scale", "yaxis": "y2", "line_shape": "hv", "hovertemplate": "2^%{y:.4~g}"},
        "allocated": {"name": "allocated", "yaxis": "y3"},
        "peak": {"name": "peak", "yaxis": "y3"},
        "reserved": {"name": "reserved", "yaxis": "y3", "line_dash": "dash"},
    }
    legends = {"y": "legend", "y2": "legend2", "y3": "legend3"}
    traces = []
    for name in LINES:
        look = {"hovertemplate": "%{y:.4~s}B (%{y:,d} bytes)"} | looks[name]
        look |= {"legend": legends[look["yaxis"]], "legendgroup": name, "line_color": getattr(colours, name), "line_width": 1.5}
        look |= {"meta": {"series": name, "part": "line"}, "mode": "lines", "connectgaps": False, "xaxis": "x"}
        if look["yaxis"] != "y3":
            look["showlegend"] = False  # the title says it
        traces.append(go.Scatter(look))
        traces.append(
            go.Scatter(
                mode="markers",
                name=look["name"],
                legendgroup=name,
                showlegend=False,
                hoverinfo="skip",
                marker={"size": 5, "color": getattr(colours, name)},
                yaxis=look["yaxis"],
                xaxis="x",
                meta={"series": name, "part": "lone"},
            )
        )
    return traces


def _mark_traces(colours: Colours) -> list[go.Scatter]:
    return [
        go.Scatter(
            name="loss not finite",
            mode="markers",
            marker={"symbol": "x", "size": 7, "color": colours.alarm},
            yaxis="y4",
            xaxis="x",
            legend="legend",
            hovertemplate="step %{x:,d}: %{text}",
            meta={"series": "not_finite", "part": "marks"},
        ),
        go.Scatter(
            name="skipped step",
            mode="markers",
            marker={"symbol": "x", "size": 8, "color": colours.alarm},
            cliponaxis=False,
            yaxis="y2",
            xaxis="x",
            legend="legend2",
            hovertemplate="step %{x:,d}, scale used 2^%{y:.4~g}",
            meta={"series": "skipped", "part": "marks"},
        ),
        go.Scatter(
            name="event",
            mode="markers",
            marker={"symbol": "triangle-down", "size": 8, "color": colours.flag, "line": {"width": 1.5, "color": colours.flag}},
            cliponaxis=False,
            showlegend=False,
            yaxis="y4",
            xaxis="x",
            hovertemplate="step %{x:,d}: %{text}",
            meta={"series": "events", "part": "marks"},
        ),
    ]


def _not_finite_text(code: float) -> str:
    if code == NAN:
        return "NaN, or not recorded"
    return "+inf" if code == POSITIVE_INFINITY else "-inf"


def _layout(colours: Colours, memory_source: str) -> dict[str, Any]:
    line = {"gridcolor": colours.grid, "zeroline": False, "linecolor": colours.muted, "automargin": False}
    titles = {
        "loss": "<b>loss</b>",
        "scale": "<b>loss scale</b>",
        "memory": f"<b>memory</b> · {escaped(memory_source)}",
    }
    steps: dict[str, Any] = {"title": {"text": "step", "standoff": 6}, "anchor": "y3", "tickformat": ",d", "hoverformat": ",d"}
    steps |= {"spikecolor": colours.muted, "spikethickness": 1, "spikedash": "solid"}
    legend = {"orientation": "h", "x": 1, "xanchor": "right", "yanchor": "bottom", "bgcolor": "rgba(0,0,0,0)", "font_size": 12}
    annotations = []
    for plot, (bottom, top) in DOMAINS.items():
        annotations.append(_text(titles[plot], x=0, y=top, colour=colours.text) | {"name": f"title {plot}"})
        note = _text(EMPTY_NOTES[plot], x=0.5, y=(bottom + top) / 2, colour=colours.muted)
        annotations.append(note | {"xanchor": "center", "yanchor": "middle", "name": f"note {plot}"})
    return {
        "template": go.layout.Template(),
        "height": HEIGHT_PX,
        "margin": MARGIN_PX,
        "paper_bgcolor": colours.background,
        "plot_bgcolor": colours.background,
        "font": {"color": colours.text, "size": 12},
        "hovermode": "x unified",
        "hoversubplots": "axis",
        "hoverlabel": {"bgcolor": colours.background, "bordercolor": colours.muted, "font": {"color": colours.text}},
        "dragmode": "zoom",
        "modebar": {"orientation": "v", "remove": ["select2d", "lasso2d"], "bgcolor": "rgba(0,0,0,0)", "color": colours.muted},
        "xaxis": line | steps,
        "yaxis": line | {"domain": DOMAINS["loss"], "exponentformat": "e"},
        "yaxis2": line | {"domain": DOMAINS["scale"], "tickprefix": "2<sup>", "ticksuffix": "</sup>", "tickformat": "d"},
        "yaxis3": line | {"domain": DOMAINS["memory"], "rangemode": "tozero", "tickformat": "~s", "ticksuffix": "B"},
        # Marks at the top edge of the loss, wherever its range is.
        "yaxis4": {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
        "legend": legend | {"y": DOMAINS["loss"][1]},
        "legend2": legend | {"y": DOMAINS["scale"][1]},
        "legend3": legend | {"y": DOMAINS["memory"][1]},
        "showlegend": True,
        "annotations": annotations,
    }


def _text(text: str, *, x: float, y: float, colour: str) -> dict[str, Any]:
    place = {"xref": "paper", "yref": "paper", "x": x, "y": y, "xanchor": "left", "yanchor": "bottom"}
    return place | {"text": text, "showarrow": False, "font": {"size": 12, "color": colour}}


def _add_flags(figure: go.Figure, events: Sequence[EventLike], step: npt.NDArray[Any], colours: Colours) -> None:
    applied = sorted((event for event in events if event.kind == "applied"), key=lambda event: event.step)
    steps = [float(event.step) for event in applied]
    ends = [*steps, *step[[0, -1]].tolist()] if step.size else steps
    shown = flags.placed(
        steps,
        [event_label(event) for event in applied],
        first_step=min(ends, default=0.0),
        last_step=max(ends, default=1.0),
        width_px=ASSUMED_WIDTH_PX - MARGIN_PX["l"] - MARGIN_PX["r"],
    )
    figure.layout.shapes = [flags.line_shape(flag, colour=colours.flag, plot_height_px=PLOT_HEIGHT_PX) for flag in shown]
    figure.layout.annotations += tuple(
        go.layout.Annotation(flags.label_annotation(flag, colour=colours.text, background=colours.background))
        for flag in shown
        if flag.lane is not None
    )
