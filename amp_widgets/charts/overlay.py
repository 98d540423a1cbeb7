"""Several runs on the same charts, as a Plotly figure: a pure function of their lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from amp_widgets.charts import look
from amp_widgets.charts._extras import missing_extra
from amp_widgets.charts.course import METRICS, SMOOTHED, Align
from amp_widgets.charts.decimate import Points, decimated
from amp_widgets.charts.distinct import line_look
from amp_widgets.charts.flags import CHARACTER_PX
from amp_widgets.charts.labels import HOVER_CHARACTERS, escaped, shortened
from amp_widgets.charts.look import Theme
from amp_widgets.charts.series import NAN, POSITIVE_INFINITY, lone
from amp_widgets.language import in_language, marked, say

try:
    import plotly.graph_objects as go
except ImportError as error:
    raise missing_extra(error) from error

LINE_POINTS, ALL_POINTS, FEWEST_POINTS = 2_000, 60_000, 400
"""Points of a line; of all lines together, where there are many; and of a line at least."""
LOSS_PX, PLOT_PX, GAP_PX = 190, 140, 36
MARGIN_PX = {"t": 26, "b": 44, "l": 64, "r": 34}
NAME_CHARACTERS = 40
FAR_APART = 20.0
"""Step times that are so many times as long as each other are drawn on a logarithmic axis."""
MOST_CHANGES = 200

NAMES = {
    "loss": marked("loss"), "scale": marked("loss scale"), "peak": marked("peak memory"),
    "allocated": marked("allocated memory"), "step_s": marked("step time"),
}  # fmt: skip
NOT_THERE = {
    "loss": marked("no loss was recorded"), "scale": marked("no loss scale was recorded"),
    "peak": marked("memory was not measured"),
    "allocated": marked("memory was not measured"), "step_s": marked("no step was timed"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OverlaidRun:
    """A run as it is drawn.

    Parameters
    ----------
    name
        For people.
    place
        Its number among all runs, also those that are not drawn: it decides colour and dash.
    lines
        Name → x and y: those of `amp_widgets.charts.course.Course`.
    changes
        Where settings were changed on the way, and to what.
    """

    name: str
    place: int
    lines: Mapping[str, Points]
    changes: Sequence[tuple[float, str]] = ()


def overlay_figure(
    runs: Sequence[OverlaidRun],
    *,
    align: Align = "step",
    metrics: Sequence[str] = METRICS,
    smoothing: int = 0,
    theme: Theme = "light",
    limit: int | None = None,
    legend: bool = True,
) -> go.Figure:
    """The same quantity of each run in one plot, the plots below each other.

    Parameters
    ----------
    runs
        What is drawn.
    align
        What x is: ``"step"``, or ``"time"`` in seconds since the first step of each began.
    metrics
        Which plots, of `METRICS`.
    smoothing
        Rows over which loss and step time were averaged already; it is only said.
    theme
        ``"light"`` or ``"dark"``.
    limit
        Points a line is reduced to, with its extremes kept; None: see `points_per_line`.
    legend
        Whether to say in the figure which line is which run.

    Returns
    -------
    plotly.graph_objects.Figure
        Traces have ``meta`` with the place of their run, their series and their part: ``line``, ``lone`` (points with a gap on
        both sides) or ``marks``; those of the part ``legend`` have no points. The scale is drawn as its base-2 logarithm.
    """
    colours = look.COLOURS[theme]
    metrics = [metric for metric in METRICS if metric in metrics]
    if limit is None:
        limit = points_per_line(len(runs) * len(metrics))
    unit = _TimeUnit(runs) if align == "time" else None
    layout = _layout(colours, runs, metrics, smoothing=smoothing, unit=unit, legend=legend)
    traces = [_legend_entry(run, theme) for run in runs] if legend else []
    for run in runs:
        for metric in metrics:
            traces += _lines(run, metric, _axis_of(metrics.index(metric)), theme, limit, unit)
        traces += _marks(run, metrics, theme, unit, limit)
    return go.Figure(traces, layout | {"template": go.layout.Template()})


LEGEND_PX, LEGEND_SAMPLE_PX, ASSUMED_WIDTH_PX = 24, 50, 900
"""Of a line of the legend; of the sample beside a name; and the width for which the lines are counted."""


def _legend_rows(runs: Sequence[OverlaidRun]) -> int:
    longest = max((len(shortened(run.name, NAME_CHARACTERS)) for run in runs), default=0)
    in_a_row = max(1, int(ASSUMED_WIDTH_PX / (longest * CHARACTER_PX + LEGEND_SAMPLE_PX)))
    return -(-len(runs) // in_a_row)


def points_per_line(lines: int) -> int:
    """How many points a line gets, so that many lines together are no more than a page draws at once."""
    return max(FEWEST_POINTS, min(LINE_POINTS, ALL_POINTS // max(lines, 1)))


class _TimeUnit:
    """In what the axis of time is labelled: seconds, or minutes or hours of a long run."""

    def __init__(self, runs: Sequence[OverlaidRun]) -> None:
        longest_s = max((float(x[-1]) for run in runs for x, _ in run.lines.values() if x.size), default=0.0)
        self.seconds, self.name = next(unit for unit in _UNITS if longest_s >= unit[2] * unit[0])[:2]


_UNITS = ((3600.0, marked("hours"), 3), (60.0, marked("minutes"), 5), (1.0, marked("seconds"), 0))


def _lines(run: OverlaidRun, metric: str, axis: str, theme: Theme, limit: int, unit: _TimeUnit | None) -> list[dict[str, Any]]:
    """The line of a run in one plot, and its points that have a gap on both sides, which a line does not show."""
    colour, dash = line_look(run.place, theme)
    points = decimated(*run.lines[metric], limit)
    alone = lone(points)
    shared = {
        "type": "scatter",
        "name": _name(run),
        "xaxis": "x",
        "yaxis": axis,
        "legendgroup": str(run.place),
        "showlegend": False,
    }
    line = shared | _placed(points, unit) | {
        "mode": "lines", "connectgaps": False, "hovertemplate": _HOVER.get(metric) or look.bytes_hover(),
        "line": {"color": colour, "dash": dash, "width": 1.5, **({"shape": "hv"} if metric == "scale" else {})},
        "meta": {"run": run.place, "series": metric, "part": "line"},
    }  # fmt: skip
    if not alone[0].size:
        return [line]
    dots = shared | _placed(alone, unit) | {
        "mode": "markers", "marker": {"size": 5, "color": colour}, "hoverinfo": "skip",
        "meta": {"run": run.place, "series": metric, "part": "lone"},
    }  # fmt: skip
    return [line, dots]


_HOVER = {
    "loss": "%{y:.6g}", "scale": "2^%{y:.4~g}", "step_s": "%{y:.4~s}s",
}  # fmt: skip


def _marks(run: OverlaidRun, metrics: Sequence[str], theme: Theme, unit: _TimeUnit | None, limit: int) -> list[dict[str, Any]]:
    """Losses that are not finite, skipped steps, and changes of settings."""
    colour, _ = line_look(run.place, theme)
    found: list[dict[str, Any]] = []

    def mark(series: str, points: Points, axis: str, symbol: str, hover: str, **more: Any) -> None:
        if points[0].size:
            found.append({
                "type": "scatter", "mode": "markers", "name": _name(run), "xaxis": "x", "yaxis": axis, "cliponaxis": False,
                "legendgroup": str(run.place), "showlegend": False, "hovertemplate": hover, **_placed(points, unit),
                "marker": {"symbol": symbol, "size": 8, "color": colour, "line": {"width": 1.5, "color": colour}},
                "meta": {"run": run.place, "series": series, "part": "marks"}, **more,
            })  # fmt: skip

    if "loss" in metrics:
        x, codes = decimated(*run.lines["not_finite"], limit)
        axis = _axis_of(metrics.index("loss"), over=True)
        texts = [
            say("NaN, or not recorded") if code == NAN else "+inf" if code == POSITIVE_INFINITY else "-inf" for code in codes
        ]
        mark("not_finite", (x, np.full(x.shape, look.TOP_EDGE)), axis, "x-thin", say("loss {loss}", loss="%{text}"), text=texts)
    if "scale" in metrics:
        skipped = decimated(*run.lines["skipped"], limit)
        mark(
            "skipped",
            skipped,
            _axis_of(metrics.index("scale")),
            "x-thin",
            say("skipped, scale used {scale}", scale="2^%{y:.4~g}"),
        )
    if metrics:
        changes = [
            (x, escaped(shortened(in_language(text), HOVER_CHARACTERS)))
            for x, text in run.changes[:MOST_CHANGES]
            if np.isfinite(x)
        ]
        places = np.array([x for x, _ in changes], dtype=np.float64)
        texts = [text for _, text in changes]
        mark("changes", (places, np.ones(places.shape)), _axis_of(0, over=True), "triangle-down", "%{text}", text=texts)
    return found


def _axis_of(plot: int, *, over: bool = False) -> str:
    """Plotly's name of the axis of a plot, counted from 0 at the top, or of the one for marks at its top edge."""
    return f"y{plot + 11}" if over else f"y{plot + 1}" if plot else "y"


def _placed(points: Points, unit: _TimeUnit | None) -> dict[str, Any]:
    x, y = points
    return {"x": x if unit is None else x / unit.seconds, "y": y}


def _legend_entry(run: OverlaidRun, theme: Theme) -> dict[str, Any]:
    colour, dash = line_look(run.place, theme)
    return {
        "type": "scatter", "mode": "lines", "x": [None], "y": [None], "name": _name(run), "hoverinfo": "skip",
        "legendgroup": str(run.place), "line": {"color": colour, "dash": dash, "width": 2}, "showlegend": True,
        "meta": {"run": run.place, "series": "", "part": "legend"},
    }  # fmt: skip


def _name(run: OverlaidRun) -> str:
    return escaped(shortened(run.name, NAME_CHARACTERS))


def _layout(
    colours: look.Colours,
    runs: Sequence[OverlaidRun],
    metrics: Sequence[str],
    *,
    smoothing: int,
    unit: _TimeUnit | None,
    legend: bool,
) -> dict[str, Any]:
    heights = [LOSS_PX if metric == "loss" else PLOT_PX for metric in metrics]
    inner = sum(heights) + GAP_PX * max(len(heights) - 1, 0)
    margin = MARGIN_PX | {"t": MARGIN_PX["t"] + LEGEND_PX * (_legend_rows(runs) if legend else 0)}
    layout = look.framed(colours, height_px=inner + margin["t"] + margin["b"], margin_px=margin)
    del layout["title"]
    axis = {"gridcolor": colours.grid, "zeroline": False, "linecolor": colours.muted, "automargin": False}
    across = {"tickformat": ",d", "hoverformat": ",d"} if unit is None else {"hoverformat": ".4~g"}
    words = say("step") if unit is None else say("{unit} since the run began", unit=say(unit.name))
    layout |= {
        "hovermode": "x unified",
        "dragmode": "zoom",
        "showlegend": legend,
        "legend": {
            "orientation": "h", "x": 0, "xanchor": "left", "y": 1 + 20 / max(inner, 1), "yanchor": "bottom", "font": {"size": 12},
            "bgcolor": "rgba(0,0,0,0)",
        },
        "xaxis": axis | across | {
            "anchor": _axis_of(max(len(metrics) - 1, 0)), "title": {"text": words, "font": {"size": 12}, "standoff": 6},
            "spikecolor": colours.muted, "spikethickness": 1, "spikedash": "solid",
        },
        "annotations": [],
        # what the user has zoomed to stays as long as x means the same
        "uirevision": f"{words}: {', '.join(metrics)}",
    }  # fmt: skip
    if unit is None and _span(runs) < 10:
        layout["xaxis"]["dtick"] = 1
    top = 1.0
    for plot, (metric, height) in enumerate(zip(metrics, heights, strict=True)):
        domain = [max(0.0, top - height / inner), top]
        values = [run.lines[metric][1] for run in runs]
        empty = all(np.isnan(y).all() for y in values)
        own = axis | {"domain": domain, "anchor": "x", "showticklabels": not empty} | _axis(metric, values)
        layout[_axis_of(plot).replace("y", "yaxis")] = own
        layout[_axis_of(plot, over=True).replace("y", "yaxis")] = {
            "overlaying": _axis_of(plot), "anchor": "x", "range": [0, 1], "visible": False, "fixedrange": True,
        }  # fmt: skip
        title = f"<b>{say(NAMES[metric])}</b>"
        if smoothing > 1 and metric in SMOOTHED:
            title += f" · {say('exponential moving average over about {count} steps', count=f'{smoothing:,}')}"
        if own.get("type") == "log":
            title += f" · {say('logarithmic')}"
        layout["annotations"].append(_text(title, 0, top, colours.text) | {"xanchor": "left", "yanchor": "bottom", "yshift": 4})
        if empty:
            layout["annotations"].append(_text(say(NOT_THERE[metric]), 0.5, sum(domain) / 2, colours.muted))
        top = domain[0] - GAP_PX / inner
    return layout


def _axis(metric: str, values: Sequence[Any]) -> dict[str, Any]:
    match metric:
        case "loss":
            return {"exponentformat": "e"}
        case "scale":
            known = np.concatenate([np.empty(0), *values])
            return {"tickprefix": "2<sup>", "ticksuffix": "</sup>", "tickformat": "d", "dtick": look.whole_dtick(known)}
        case "step_s":
            known = np.concatenate([np.empty(0), *values])
            known = known[known > 0]
            far = known.size and known.max() > FAR_APART * known.min()
            logarithmic = {"type": "log", "labelalias": _WITH_UNIT}
            return {"tickformat": "~s", "ticksuffix": "s"} | (logarithmic if far else {"rangemode": "tozero"})
        case _:
            return {"rangemode": "tozero", "tickformat": "~s", "ticksuffix": "B"}


_WITH_UNIT = {
    f"{digit}{zeros}{prefix}": f"{digit}{zeros}{prefix}s"
    for digit in range(1, 10)
    for zeros in ("", "0", "00")
    for prefix in ("n", "µ", "m", "", "k")
}
"""Plotly gives suffixes on a logarithmic axis only to powers of ten: of the labels between them, "500m" is none of a time."""


def _span(runs: Sequence[OverlaidRun]) -> float:
    ends = [float(x[at]) for run in runs for x, _ in run.lines.values() if x.size for at in (0, -1)]
    return max(ends) - min(ends) if ends else np.inf


def _text(text: str, x: float, y: float, colour: str) -> dict[str, Any]:
    return {
        "text": text, "x": x, "y": y, "xref": "paper", "yref": "paper", "showarrow": False,
        "font": {"size": 12, "color": colour},
    }  # fmt: skip
