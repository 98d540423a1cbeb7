"""Sets of checkpointed layers as points: the peak memory of a step against its extra time, with the budget as a line."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Protocol

from amp_widgets.charts import look
from amp_widgets.charts._extras import missing_extra
from amp_widgets.charts.label_places import LINE_PX, Places, label_px
from amp_widgets.charts.labels import escaped, shortened
from amp_widgets.charts.look import Theme
from amp_widgets.charts.peaks import memory_text
from amp_widgets.language import marked, say, say_number

try:
    import plotly.graph_objects as go
except ImportError as error:
    raise missing_extra(error) from error

HEIGHT_PX = 400
TITLE_PX = 28
MARGIN_PX = {"t": 62, "b": 58, "l": 76, "r": 34}
ASSUMED_WIDTH_PX = 760
"""A figure is as wide as its place; for the places of labels a width must be assumed."""
MARKER_PX = 12
HEADROOM = 1.12
LABEL_CHARACTERS, LAYERS_SHOWN = 28, 6
CURVE, PLAN = "curve", marked("plan")
"""The labels of points that have no name, and of the plan."""
SYMBOLS = {
    marked("none"): "circle",
    marked("all"): "square",
    marked("every second"): "triangle-up",
    marked("√n"): "triangle-down",
    marked("yours"): "star",
    PLAN: "diamond",
}
"""By the label of a point; of several that fall together the last one is drawn, and all are named."""
ORDER = (PLAN, "yours", "none", "all", "√n", "every second")
"""Whose shape and colour a point has that several labels stand for."""


class PointLike(Protocol):
    """What is read of a set of layers; an ``amp_widgets.analysis.plan.PlanPoint`` is one."""

    @property
    def label(self) -> str: ...
    @property
    def layers(self) -> Sequence[str]: ...
    @property
    def peak_bytes(self) -> float: ...
    @property
    def extra_s(self) -> float: ...
    @property
    def predicted(self) -> bool: ...


class MeasuredLike(Protocol):
    """What steps of the run came to with one of the sets.

    Attributes
    ----------
    layers
        Which set.
    extra_s
        What its median step takes more than with no layer checkpointed; NaN where that is not known.
    steps
        How many there were.
    """

    @property
    def layers(self) -> Sequence[str]: ...
    @property
    def peak_bytes(self) -> float: ...
    @property
    def extra_s(self) -> float: ...
    @property
    def steps(self) -> int: ...


def pareto_figure(
    points: Sequence[PointLike],
    *,
    budget_bytes: float,
    measured: Sequence[MeasuredLike] = (),
    title: str | None = None,
    theme: Theme = "light",
) -> go.Figure:
    """Peak bytes against extra seconds: a labelled point for each named set, and the curve of those that nothing beats.

    Parameters
    ----------
    points
        Named sets, and those of the curve.
    budget_bytes
        Where the line is drawn.
    measured
        Of those of the sets that steps of the run had in force, each set at most once.
    title
        In place of the sentence about what is shown; ``""`` for none. Escaped.
    theme
        ``"light"`` or ``"dark"``.

    Returns
    -------
    plotly.graph_objects.Figure
        x is in milliseconds, y in bytes. The traces' ``meta`` has their ``part``: ``"curve"``, ``"point"`` with the labels it
        stands for, or ``"measured"`` with the same labels.
    """
    colours = look.COLOURS[theme]
    found = _together([point for point in points if math.isfinite(point.peak_bytes) and math.isfinite(point.extra_s)])
    sets = {frozenset(together[0].layers) for together in found}
    at = {layers: one for one in measured if (layers := frozenset(one.layers)) in sets and math.isfinite(one.peak_bytes)}
    scale = _Scale(found, list(at.values()), budget_bytes)
    layout = _layout(colours, scale)
    traces = [_curve(found, colours), *_points(found, at, scale, colours)]
    words = pareto_sentence(points, budget_bytes=budget_bytes) if title is None else title
    if words:
        layout["title"]["text"] = f"<b>{escaped(words)}</b>"
    else:
        layout["margin"]["t"] -= TITLE_PX
        layout["height"] -= TITLE_PX
    layout["shapes"], layout["annotations"] = _budget_line(budget_bytes, colours)
    return go.Figure(traces, layout | {"template": go.layout.Template()})


def pareto_sentence(points: Sequence[PointLike], *, budget_bytes: float) -> str:
    """What the figure shows, in words. Not escaped."""
    plan = next((point for point in points if point.label == PLAN), None)
    if plan is None:
        return say("Peak memory and extra time, with a budget of {budget}", budget=memory_text(budget_bytes))
    values = {
        "peak": memory_text(plan.peak_bytes),
        "time": _milliseconds(plan.extra_s),
        "budget": memory_text(budget_bytes),
    }
    if plan.peak_bytes <= budget_bytes:
        return say("The plan: {peak} for {time} more a step; budget {budget}", **values)
    return say("The plan: {peak} for {time} more a step, which is above; budget {budget}", **values)


Together = list[PointLike]
"""Points of one set of layers: they fall together."""


def _together(points: Sequence[PointLike]) -> list[Together]:
    found: dict[frozenset[str], Together] = {}
    for point in points:
        found.setdefault(frozenset(point.layers), []).append(point)
    return list(found.values())


def _names(together: Together) -> list[str]:
    return [point.label for point in together if point.label != CURVE]


class _Scale:
    """The axes, and where on the plot a point is."""

    def __init__(self, found: Sequence[Together], measured: Sequence[MeasuredLike], budget_bytes: float) -> None:
        self.budget_bytes = budget_bytes
        times_ms = [1e3 * one[0].extra_s for one in found]
        times_ms += [1e3 * one.extra_s for one in measured if math.isfinite(one.extra_s)]
        low, high = min([*times_ms, 0.0]), max([*times_ms, 0.0])
        room = (high - low) or 1.0
        self.x = (low - 0.06 * room, high + (HEADROOM - 1) * room)
        peaks = [one[0].peak_bytes for one in found] + [one.peak_bytes for one in measured]
        highest = max(peaks, default=0.0) or budget_bytes
        self.y = (0.0, HEADROOM * max(highest, min(budget_bytes, 1.25 * highest)))

    def pixels(self, extra_s: float, peak_bytes: float) -> tuple[float, float]:
        """From the left, and from the top."""
        across = (1e3 * extra_s - self.x[0]) / (self.x[1] - self.x[0])
        return across * _WIDTH_PX, (1 - (peak_bytes - self.y[0]) / (self.y[1] - self.y[0])) * _PLOT_PX


_WIDTH_PX = ASSUMED_WIDTH_PX - MARGIN_PX["l"] - MARGIN_PX["r"]
_PLOT_PX = HEIGHT_PX - MARGIN_PX["t"] - MARGIN_PX["b"]
_GAP_PX = MARKER_PX / 2 + 3
_LINE_PX = 3.0
"""Half of what a line takes."""


def _curve(found: Sequence[Together], colours: look.Colours) -> dict[str, Any]:
    """The sets that no other beats in both, the cheapest first; between two, what the cheaper one needs."""
    front = _front(found)
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": say("cheapest sets of layers"),
        "x": [1e3 * point.extra_s for point in front],
        "y": [point.peak_bytes for point in front],
        "line": {"color": colours.allocated, "width": 1.5, "shape": "hv"},
        "marker": {"size": 5, "color": colours.allocated},
        "text": [_hover([point]) for point in front],
        "hovertemplate": "%{text}<extra></extra>",
        "meta": {"part": "curve"},
    }


def _front(found: Sequence[Together]) -> list[PointLike]:
    front: list[PointLike] = []
    for one in sorted((together[0] for together in found), key=lambda point: (point.extra_s, point.peak_bytes)):
        if not front or one.peak_bytes < front[-1].peak_bytes:
            front.append(one)
    return front


def _take_lines(places: Places, found: Sequence[Together], scale: _Scale) -> None:
    """A label is harder to read on the curve, and on the line of the budget and its words."""
    corners = [scale.pixels(point.extra_s, point.peak_bytes) for point in _front(found)]
    for (x, y), (next_x, next_y) in itertools.pairwise(corners):
        places.take((x, y - _LINE_PX, next_x, y + _LINE_PX), 1.0)
        places.take((next_x - _LINE_PX, y, next_x + _LINE_PX, next_y), 1.0)
    _, y = scale.pixels(0.0, scale.budget_bytes)
    places.take((0.0, y - _LINE_PX, _WIDTH_PX, y + _LINE_PX), 1.0)
    places.take((0.0, y - LINE_PX, label_px(_budget_text(scale.budget_bytes)), y), 3.0)


def _points(
    found: Sequence[Together], measured: dict[frozenset[str], MeasuredLike], scale: _Scale, colours: look.Colours
) -> list[dict[str, Any]]:
    """The sets with names, then what was measured of them."""
    named = [together for together in found if _names(together)]
    places = Places(_WIDTH_PX, _PLOT_PX, _GAP_PX)
    _take_lines(places, found, scale)
    for together in found:
        places.take_point(*scale.pixels(together[0].extra_s, together[0].peak_bytes), weight=3.0 if _names(together) else 0.3)
    for layers, one in measured.items():
        places.take_point(*scale.pixels(_measured_x(layers, one, found), one.peak_bytes), weight=2.0)
    traces: list[dict[str, Any]] = []
    for together in sorted(named, key=lambda one: min(ORDER.index(name) if name in ORDER else 99 for name in _names(one))):
        names = sorted(_names(together), key=lambda name: ORDER.index(name) if name in ORDER else 99)
        first = together[0]
        text = shortened(", ".join(map(say, names)), LABEL_CHARACTERS)
        is_plan = PLAN in names
        place = places.put(*scale.pixels(first.extra_s, first.peak_bytes), label_px(text, bold=is_plan))
        colour = colours.peak if is_plan else colours.text
        traces.append(
            {
                "type": "scatter",
                "mode": "markers+text",
                "name": escaped(text),
                "x": [1e3 * first.extra_s],
                "y": [first.peak_bytes],
                "text": [f"<b>{escaped(text)}</b>" if is_plan else escaped(text)],
                "textposition": place,
                "textfont": {"color": colours.text, "size": 12},
                "cliponaxis": False,
                "marker": {
                    "symbol": SYMBOLS.get(names[0], "hexagon"),
                    "size": MARKER_PX + 3 if is_plan else MARKER_PX,
                    "color": colour,
                    "line": {"width": 1.5, "color": colours.background},
                },
                "hovertemplate": f"{_hover(together)}<extra></extra>",
                "showlegend": False,
                "meta": {"part": "point", "labels": names},
            }
        )
    traces.reverse()  # the plan is drawn last, on top
    for layers, one in measured.items():
        together = next(each for each in found if frozenset(each[0].layers) == layers)
        traces.append(_measurement(together, one, colours, first=not any(t["meta"]["part"] == "measured" for t in traces)))
    return traces


def _measured_x(layers: frozenset[str], one: MeasuredLike, found: Sequence[Together]) -> float:
    """Where its time is not known it is drawn above or below what was predicted."""
    if math.isfinite(one.extra_s):
        return one.extra_s
    return next(each[0].extra_s for each in found if frozenset(each[0].layers) == layers)


def _measurement(together: Together, one: MeasuredLike, colours: look.Colours, *, first: bool) -> dict[str, Any]:
    """A cross, and a line to it from what was predicted."""
    predicted = together[0]
    names = _names(together) or [marked("a set of the curve")]
    x_s = _measured_x(frozenset(predicted.layers), one, [together])
    time = say("its extra time is not known")
    if math.isfinite(one.extra_s):
        time = say("{time} more a step", time=_milliseconds(one.extra_s))
    hover = [
        f"<b>{escaped(say('{layers}, measured', layers=', '.join(map(say, names))))}</b>",
        say("peak {size}, predicted {other}", size=memory_text(one.peak_bytes), other=memory_text(predicted.peak_bytes)),
        say("{time}, predicted {other}", time=time, other=_milliseconds(predicted.extra_s)),
        say_number("{count} step of the run", "{count} steps of the run", one.steps),
    ]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": say("measured"),
        "x": [1e3 * x_s, 1e3 * predicted.extra_s],  # the cross first: the legend shows the first marker
        "y": [one.peak_bytes, predicted.peak_bytes],
        "line": {"color": colours.scale, "width": 1, "dash": "dot"},
        "marker": {
            "symbol": ["x-thin-open", "circle"],
            "size": [MARKER_PX, 0],
            "color": colours.scale,
            "line": {"width": 3, "color": colours.scale},
        },
        "cliponaxis": False,
        "hovertemplate": [f"{'<br>'.join(hover)}<extra></extra>".replace("%{", "%&#123;"), "<extra></extra>"],
        "legendgroup": "measured",
        "showlegend": first,
        "meta": {"part": "measured", "labels": names},
    }


def _hover(together: Together) -> str:
    """What is read on pointing. Escaped, also from what a template would fill in."""
    point = together[0]
    count, size = len(point.layers), memory_text(point.peak_bytes)
    names = [shortened(name, LABEL_CHARACTERS) for name in point.layers[:LAYERS_SHOWN]]
    more = [say("and {count} more", count=count - LAYERS_SHOWN)] if count > LAYERS_SHOWN else []
    lines = [
        f"<b>{escaped(', '.join(map(say, _names(together))) or say('cheapest at this peak'))}</b>",
        say("peak {size}, predicted", size=size) if point.predicted else say("peak {size}, an estimate", size=size),
        say("{time} more a step, predicted", time=_milliseconds(point.extra_s)),
        say_number("{count} layer checkpointed", "{count} layers checkpointed", count),
        *map(escaped, [*names, *more]),
    ]
    return "<br>".join(lines).replace("%{", "%&#123;")


def _layout(colours: look.Colours, scale: _Scale) -> dict[str, Any]:
    axis = {"gridcolor": colours.grid, "zeroline": False, "linecolor": colours.muted, "automargin": False}
    return look.framed(colours, height_px=HEIGHT_PX, margin_px=MARGIN_PX) | {
        "legend": {
            "orientation": "h", "x": 0, "xanchor": "left", "y": 1 + 3 / _PLOT_PX, "yanchor": "bottom", "bgcolor": "rgba(0,0,0,0)",
            "font": {"size": 12}, "itemclick": False, "itemdoubleclick": False,
        },
        "xaxis": axis
        | {
            "range": list(scale.x), "tickformat": "~g",
            "title": {"text": say("extra time a step, milliseconds"), "font": {"size": 12}, "standoff": 8},
        },
        "yaxis": axis
        | {
            "range": list(scale.y), "tickformat": "~s", "ticksuffix": "B",
            "title": {"text": say("peak memory"), "font": {"size": 12}, "standoff": 4},
        },
    }  # fmt: skip


def _budget_line(budget_bytes: float, colours: look.Colours) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    line = {
        "type": "line", "layer": "below", "xref": "paper", "x0": 0, "x1": 1, "yref": "y", "y0": budget_bytes, "y1": budget_bytes,
        "line": {"width": 1.5, "dash": "dash", "color": colours.alarm}, "name": "budget",
    }  # fmt: skip
    text = {
        "xref": "paper", "x": 0.005, "xanchor": "left", "yref": "y", "y": budget_bytes, "yanchor": "bottom", "showarrow": False,
        "text": _budget_text(budget_bytes),
        "font": {"size": 12, "color": colours.alarm}, "name": "budget",
    }  # fmt: skip
    return [line], [text]


def _budget_text(budget_bytes: float) -> str:
    return say("budget {size}", size=memory_text(budget_bytes))


def _milliseconds(duration_s: float) -> str:
    return f"{1e3 * duration_s:.3g} ms" if duration_s < 0.9995 else f"{duration_s:.3g} s"
