"""How large gradients are, by powers of two, with what fp16 and bf16 would make of them at a loss scale."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from amp_widgets.charts import look
from amp_widgets.charts._extras import missing_extra
from amp_widgets.charts.labels import escaped, shortened
from amp_widgets.charts.look import Theme
from amp_widgets.language import marked, say

try:
    import plotly.graph_objects as go
except ImportError as error:
    raise missing_extra(error) from error

HEIGHT_PX = 360
MARGIN_PX = {"t": 66, "b": 62, "l": 76, "r": 34}
BAND_PX = 17
"""Height of the band of a format above the histogram."""
LEAST_SHARE = 1e-5
"""A bar of less is not drawn: a logarithmic axis has no zero."""
SHOWN_EXPONENTS = (-34, 22)
"""Shown in any case, so that the zones of fp16 always are."""
LOWEST_SHOWN, HIGHEST_SHOWN = -150, 132
CHARACTER = 0.75
"""In powers of two: so wide is a character, about, where the plot is narrow."""


class LayerRangeLike(Protocol):
    """What is read of the gradients of a layer, as they were stored, multiplied by `scale`.

    Attributes
    ----------
    by_exponent
        How many there are from 2^e to below 2^(e+1), for e from -127 (all that is smaller than 2^-126) to 127.
    """

    @property
    def layer(self) -> str: ...
    @property
    def scale(self) -> float: ...
    @property
    def by_exponent(self) -> npt.NDArray[np.float64]: ...
    @property
    def zeros(self) -> float: ...
    @property
    def infs(self) -> float: ...
    @property
    def nans(self) -> float: ...


class RangeLike(Protocol):
    """The gradients of a step: an ``amp_widgets.analysis.gradients.GradientRange`` is one."""

    @property
    def step(self) -> int: ...
    @property
    def scale(self) -> float: ...
    @property
    def at_stake(self) -> Sequence[LayerRangeLike]: ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Zone:
    """What a format makes of numbers up to a power of two; `name` is what is read, `short` where there is little room."""

    name: str
    short: str
    below: float


FP16_ZONES = (
    Zone(name=marked("becomes zero"), short=marked("zero"), below=-25),
    Zone(name=marked("subnormal"), short=marked("sub"), below=-14),
    Zone(name=marked("normal"), short=marked("normal"), below=16),
    Zone(name=marked("overflow"), short=marked("over"), below=math.inf),
)
BF16_ZONES = (
    Zone(name=marked("becomes zero"), short=marked("zero"), below=-134),
    Zone(name=marked("subnormal"), short=marked("sub"), below=-126),
    Zone(name=marked("normal"), short=marked("normal"), below=128),
    Zone(name=marked("overflow"), short=marked("over"), below=math.inf),
)

ZONE_COLOURS: dict[Theme, tuple[str, str, str, str]] = {
    "light": ("#56616c", "#e69f00", "#0072b2", "#c94f00"),
    "dark": ("#8a97a4", "#ffb733", "#56b4e9", "#ff8c42"),
}
"""Okabe and Ito's. Zones are told apart by their place, too."""
ZONE_PATTERNS = ("x", "/", "", "\\")
"""Of the bars in each zone."""


def exponent_figure(
    range_like: RangeLike,
    *,
    scale: float | None = None,
    layers: Sequence[str] | None = None,
    title: str | None = None,
    theme: Theme = "light",
) -> go.Figure:
    """A histogram of gradients by exponent, as they would be stored at a loss scale, over the zones of fp16 and bf16.

    Parameters
    ----------
    range_like
        The gradients of a step.
    scale
        The loss scale that they are shown at; None for the one that they had. It moves the bars; the zones stay.
    layers
        Names of those to be shown; None for all.
    title
        In place of the sentence about what is shown; ``""`` for none. Escaped.
    theme
        ``"light"`` or ``"dark"``.

    Returns
    -------
    plotly.graph_objects.Figure
        x is the base-2 logarithm of the gradient as stored; y the share of the gradients that are neither zero nor inf or NaN, in
        percent, on a logarithmic axis. Traces have ``meta`` with the format and the zone that its bars are in.
    """
    colours = look.COLOURS[theme]
    scale = range_like.scale if scale is None else scale
    rows = [row for row in range_like.at_stake if layers is None or row.layer in layers]
    x, share, count = _bars(rows, scale)
    low, high = _shown(x)
    traces = _traces(x, share, count, theme)
    layout = _layout(colours, low, high)
    words = _words(range_like, rows, scale) if title is None else title
    if words:
        layout["title"]["text"] = f"<b>{escaped(words)}</b>"
    else:
        layout["margin"]["t"] -= 26
        layout["height"] -= 26
    layout["shapes"], layout["annotations"] = _zones(low, high, theme, colours)
    if not x.size:
        layout["annotations"].append(
            _note(say("no gradient that is neither zero nor inf or NaN"), (low + high) / 2, 0.5, colours.muted, 12)
        )
    return go.Figure(traces, layout | {"template": go.layout.Template()})


def exponent_sentence(range_like: RangeLike, scale: float | None = None, layers: Sequence[str] | None = None) -> str:
    """What the figure shows, in words. Not escaped."""
    rows = [row for row in range_like.at_stake if layers is None or row.layer in layers]
    return _words(range_like, rows, range_like.scale if scale is None else scale)


def _words(range_like: RangeLike, rows: Sequence[LayerRangeLike], scale: float) -> str:
    of = shortened(rows[0].layer, 40) if len(rows) == 1 else say("{count} layers", count=len(rows))
    values = {"step": f"{range_like.step:,}", "layers": of, "scale": _power(range_like.scale), "other": _power(scale)}
    if scale == range_like.scale:
        return say("Gradients of step {step}, {layers}, at loss scale {scale}", **values)
    return say("Gradients of step {step}, {layers}, at loss scale {scale}, if it were {other}", **values)


def _power(scale: float) -> str:
    mantissa, power = math.frexp(scale)
    if mantissa == 0.5:
        return "1" if power == 1 else f"2^{power - 1}"
    return f"{scale:g}"


def _bars(
    rows: Sequence[LayerRangeLike], scale: float
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Lower edges of the bars, their shares in percent, and counts; only those that are there."""
    if not rows:
        return np.empty(0), np.empty(0), np.empty(0)
    count = np.sum([row.by_exponent for row in rows], axis=0)
    total = float(count.sum())
    moved = math.log2(scale / rows[0].scale)
    here = np.flatnonzero(count)
    edges = np.maximum(here - 127 + moved, LOWEST_SHOWN)
    return edges, np.maximum(100 * count[here] / max(total, 1.0), 100 * LEAST_SHARE), count[here]


def _shown(x: npt.NDArray[np.float64]) -> tuple[float, float]:
    low, high = SHOWN_EXPONENTS
    if not x.size:
        return low, high
    return min(low, max(math.floor(x[0]) - 1, LOWEST_SHOWN)), max(high, min(math.ceil(x[-1]) + 3, HIGHEST_SHOWN))


def _traces(
    x: npt.NDArray[np.float64], share: npt.NDArray[np.float64], count: npt.NDArray[np.float64], theme: Theme
) -> list[dict[str, Any]]:
    traces = []
    above = -math.inf
    for zone, colour, pattern in zip(FP16_ZONES, ZONE_COLOURS[theme], ZONE_PATTERNS, strict=True):
        inside = (x + 0.5 >= above) & (x + 0.5 < zone.below)
        above = zone.below
        if not inside.any():
            continue
        traces.append(
            {
                "type": "bar",
                "name": say("{zone} in fp16", zone=say(zone.name)),
                "x": x[inside] + 0.5,
                "y": share[inside],
                "width": 0.92,
                "marker": {
                    "color": colour, "line": {"width": 0}, "pattern": look.patterned(colour, pattern, look.COLOURS[theme]),
                },
                "customdata": [
                    [_edge(edge), _edge(edge + 1), f"{n:,.0f}"] for edge, n in zip(x[inside], count[inside], strict=True)
                ],
                "hovertemplate": say(
                    "from {low} to below {high}<br><b>{share}</b>, {count} gradients",
                    low="%{customdata[0]}", high="%{customdata[1]}", share="%{y:.3~g} %", count="%{customdata[2]}",
                )
                + f"<extra>{say('{zone} in fp16', zone=say(zone.name))}</extra>",
                "meta": {"format": "fp16", "zone": zone.short},
            }
        )  # fmt: skip
    return traces


def _edge(exponent: float) -> str:
    return f"2<sup>{exponent:g}</sup>"


def _layout(colours: look.Colours, low: float, high: float) -> dict[str, Any]:
    axis = {"gridcolor": colours.grid, "zeroline": False, "linecolor": colours.muted, "ticks": ""}
    step = next(step for step in (4, 8, 16, 32, 64) if (high - low) / step <= 16)
    ticks = range(-(-int(low) // step) * step, int(high) + 1, step)
    return look.framed(colours, height_px=HEIGHT_PX, margin_px=MARGIN_PX) | {
        "bargap": 0,
        "barmode": "overlay",
        "showlegend": False,
        "xaxis": axis
        | {
            "range": [low, high], "showgrid": False, "tickangle": 0,
            "tickvals": list(ticks), "ticktext": [_edge(tick) for tick in ticks],
            "title": {
                "text": say("size of a gradient as it is stored: true size × loss scale"), "font": {"size": 12}, "standoff": 8,
            },
        },
        "yaxis": axis
        | {
            "type": "log", "range": [math.log10(100 * LEAST_SHARE) - 0.1, 2.05], "ticksuffix": " %", "tickformat": "~g",
            "dtick": 1, "title": {"text": say("share of gradients"), "font": {"size": 12}, "standoff": 4},
        },
    }  # fmt: skip


def _zones(low: float, high: float, theme: Theme, colours: look.Colours) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Bands above the plot with the names of the zones, and lines through it at fp16's edges."""
    plot_px = HEIGHT_PX - MARGIN_PX["t"] - MARGIN_PX["b"]
    shapes: list[dict[str, Any]] = []
    notes: list[dict[str, Any]] = []
    for lane, (format, zones) in enumerate((("fp16", FP16_ZONES), ("bf16", BF16_ZONES))):
        bottom = 1 + (3 + (1 - lane) * (BAND_PX + 2)) / plot_px
        middle, top = bottom + BAND_PX / 2 / plot_px, bottom + BAND_PX / plot_px
        notes.append(_note(format, 0, middle, colours.text, 11) | {"xref": "paper", "xanchor": "right", "xshift": -5})
        start = low
        for zone, colour in zip(zones, ZONE_COLOURS[theme], strict=True):
            end = min(max(zone.below, low), high)
            if end > start:
                band = {"type": "rect", "xref": "x", "yref": "paper", "x0": start, "x1": end, "y0": bottom, "y1": top}
                shapes.append(band | {"fillcolor": _faint(colour, 0.28), "line": {"width": 1, "color": colours.background}})
                whole = say(zone.name)
                name = whole if end - start >= CHARACTER * len(whole) else say(zone.short)
                if end - start > 3:
                    notes.append(_note(name, (start + end) / 2, middle, colours.text, 11))
                if format == "fp16" and low < zone.below < high:
                    line = {"type": "line", "xref": "x", "yref": "paper", "x0": zone.below, "x1": zone.below, "y0": 0, "y1": 1}
                    shapes.append(line | {"line": {"width": 1, "color": colours.muted, "dash": "dot"}})
            start = max(start, end)
    return shapes, notes


def _note(text: str, x: float, y: float, colour: str, size: int) -> dict[str, Any]:
    return {
        "text": text, "x": x, "y": y, "xref": "x", "yref": "paper", "showarrow": False, "yanchor": "middle",
        "font": {"size": size, "color": colour},
    }  # fmt: skip


def _faint(colour: str, opacity: float) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"
