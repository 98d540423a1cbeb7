"""How the training chart looks: its traces without data and its layout, as Plotly describes them, in plain dictionaries."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from amp_widgets.charts import flags
from amp_widgets.charts.labels import escaped
from amp_widgets.charts.series import LINES
from amp_widgets.language import in_language, marked, say

Theme = Literal["light", "dark"]
HEIGHT_PX = 630
MARGIN_PX = {"t": flags.FIRST_LANE_PX + flags.LANES * flags.LANE_PX + 4, "b": 46, "l": 64, "r": 34}
PLOT_HEIGHT_PX = HEIGHT_PX - MARGIN_PX["t"] - MARGIN_PX["b"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """One of the three plots: its part of the height, its axis, what it draws and what it says when that is nothing."""

    domain: tuple[float, float]
    axis: str
    series: tuple[str, ...]
    empty_note: str


PLOTS = {
    "loss": Plot(domain=(0.70, 1.0), axis="yaxis", series=("loss",), empty_note=marked("no finite loss so far")),
    "scale": Plot(domain=(0.36, 0.61), axis="yaxis2", series=("scale", "skipped"), empty_note=marked("the loss is not scaled")),
    "memory": Plot(
        domain=(0.0, 0.27), axis="yaxis3", series=("allocated", "peak", "reserved"), empty_note=marked("not measured")
    ),
}
TOP_EDGE = 0.96
"""Where losses that are not finite are marked, as a part of the height of the loss plot."""
UNWANTED_BUTTONS = ("select2d", "lasso2d", "sendChartToCloud")
"""The last one sends all data of the chart to Plotly's server."""
EVENT_SYMBOLS = {
    "applied": "triangle-down",
    "rejected": "x-thin-open",
    "run": "circle-open",
    "note": "diamond-open",
    "out_of_memory": "square-x-open",
}


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
DASHES = {"allocated": "dot", "reserved": "dash"}
"""Of the lines that share a plot with another one; the others are solid. So they are told apart without colours, too."""


def patterned(colour: str, shape: str, colours: Colours) -> dict[str, Any]:
    """Plotly's pattern of an area that is to be told from its neighbours without colours, too; a `shape` of ``""`` is plain."""
    return {"shape": shape, "bgcolor": colour, "fgcolor": colours.background, "fillmode": "replace", "size": 8, "solidity": 0.18}


def traces(colours: Colours) -> list[dict[str, Any]]:
    """The traces without data. ``meta`` names the series of each and its part: ``line``, ``lone`` or ``marks``."""
    found = []
    for name in LINES:
        look = {"hovertemplate": bytes_hover()} | _LINES[name]
        line = {"color": getattr(colours, name), "width": 1.5} | look.get("line", {})
        found.append(_trace(name, "line", look | {"mode": "lines", "line": line, "connectgaps": False, "legendgroup": name}))
        # Of the same thing: it comes and goes with its line, and is not named again.
        marker = {"size": 5, "color": getattr(colours, name)}
        lone = {"name": look["name"], "yaxis": look["yaxis"], "marker": marker, "hoverinfo": "skip", "showlegend": False}
        found.append(_trace(name, "lone", lone | {"mode": "markers", "legendgroup": name}))
    crosses = {"mode": "markers", "marker": {"symbol": "x", "size": 8, "color": colours.alarm}, "cliponaxis": False}
    found.append(_trace("not_finite", "marks", crosses | _NOT_FINITE))
    found.append(_trace("skipped", "marks", crosses | _SKIPPED))
    marker = {"size": 8, "color": colours.flag, "line": {"width": 1.5, "color": colours.flag}}
    found.append(_trace("events", "marks", {"mode": "markers", "marker": marker, "cliponaxis": False} | _EVENTS))
    return found


def bytes_hover() -> str:
    """Plotly's template for a size, short and in full."""
    return say("{size} ({count} bytes)", size="%{y:.4~s}B", count="%{y:,d}")


def layout(colours: Colours, memory_source: str) -> dict[str, Any]:
    """The layout, with a note in each plot that it is empty."""
    steps: dict[str, Any] = {"anchor": "y3", "tickformat": ",d", "hoverformat": ",d"}
    steps |= {"spikecolor": colours.muted, "spikethickness": 1, "spikedash": "solid"}
    axis = {"gridcolor": colours.grid, "zeroline": False, "linecolor": colours.muted, "automargin": False}
    legend = {"orientation": "h", "x": 1, "xanchor": "right", "yanchor": "bottom", "bgcolor": "rgba(0,0,0,0)"}
    legend["font"] = {"size": 12}
    own: dict[str, dict[str, Any]] = {
        "loss": {"exponentformat": "e"},
        "scale": {"tickprefix": "2<sup>", "ticksuffix": "</sup>", "tickformat": "d", "dtick": 1},
        "memory": {"rangemode": "tozero", "tickformat": "~s", "ticksuffix": "B"},
    }
    described: dict[str, Any] = {
        "height": HEIGHT_PX,
        "margin": dict(MARGIN_PX),
        "paper_bgcolor": colours.background,
        "plot_bgcolor": colours.background,
        "font": {"color": colours.text, "size": 12},
        "hovermode": "x unified",
        "hoversubplots": "axis",
        "hoverlabel": {"bgcolor": colours.background, "bordercolor": colours.muted, "font": {"color": colours.text}},
        "dragmode": "zoom",
        "modebar": {
            "orientation": "v",
            "remove": list(UNWANTED_BUTTONS),
            "bgcolor": "rgba(0,0,0,0)",
            "color": colours.muted,
            "activecolor": colours.text,  # Plotly's own suits the colour behind, which for it is black
            "uirevision": "kept",
        },
        "showlegend": True,
        "xaxis": axis | steps,
        # Marks at the top edge of the loss, wherever its range is.
        "yaxis4": {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
        "annotations": [],
        "shapes": [],
    }
    described["legend3"] = legend | {"yref": "container", "y": 0}  # beside the title of the steps: there is room
    titles = {"loss": f"<b>{say('loss')}</b>", "scale": f"<b>{say('loss scale')}</b>"}
    titles["memory"] = f"<b>{say('memory')}</b> · {escaped(in_language(memory_source))}"
    texts: list[tuple[dict[str, Any], str]] = []
    texts.append(({"x": 0.5, "y": 0, "yshift": -22, "yanchor": "top", "text": say("step"), "name": "title step"}, colours.text))
    for name, plot in PLOTS.items():
        bottom, top = plot.domain
        described[plot.axis] = axis | {"domain": list(plot.domain), "showticklabels": False} | own[name]
        if plot.axis in _LEGENDS:
            described[_LEGENDS[plot.axis]] = legend | {"y": top}
        title = {"x": 0, "y": top, "xanchor": "left", "yanchor": "bottom", "text": titles[name], "align": "left"}
        title["name"] = f"title {name}"
        if name != "loss":  # that one is beside the marks of events and would hide them
            title["bgcolor"] = colours.background  # the lines of changes do not strike it through
        note = {"x": 0.5, "y": (bottom + top) / 2, "text": say(plot.empty_note), "name": f"note {name}", "visible": True}
        texts += [(title, colours.text), (note, colours.muted)]
    for text, colour in texts:
        font = {"size": 12, "color": colour}
        described["annotations"].append({"xref": "paper", "yref": "paper", "showarrow": False, "font": font} | text)
    return described


def framed(colours: Colours, *, height_px: int, margin_px: Mapping[str, int]) -> dict[str, Any]:
    """The layout around a figure with a title, a legend and points to hover over."""
    return {
        "height": height_px,
        "margin": dict(margin_px),
        "paper_bgcolor": colours.background,
        "plot_bgcolor": colours.background,
        "font": {"color": colours.text, "size": 12},
        "hovermode": "closest",
        "hoverlabel": {"bgcolor": colours.background, "bordercolor": colours.muted, "font": {"color": colours.text, "size": 12}},
        "modebar": {
            "orientation": "v",
            "remove": list(UNWANTED_BUTTONS),
            "bgcolor": "rgba(0,0,0,0)",
            "color": colours.muted,
            "activecolor": colours.text,
        },
        "title": {"x": 0, "xref": "paper", "y": 1, "yref": "container", "yanchor": "top", "pad": {"t": 8}, "font": {"size": 15}},
        "showlegend": True,
    }


def whole_dtick(log2_scale: npt.NDArray[Any]) -> int:
    """Distance of ticks on the axis of the scale: a whole power of two, and at most about seven of them."""
    known = log2_scale[~np.isnan(log2_scale)]
    span = float(np.ptp(known)) if known.size else 0.0
    return max(1, 2 ** math.ceil(math.log2(span / 6))) if span > 0 else 1


_LEGENDS = {"yaxis": "legend", "yaxis2": "legend2"}
# The titles say what the single lines of the first two plots are.
_LINES: dict[str, dict[str, Any]] = {
    "loss": {"name": marked("loss"), "yaxis": "y", "hovertemplate": "%{y:.6g}", "showlegend": False},
    "scale": {
        "name": marked("loss scale"),
        "yaxis": "y2",
        "hovertemplate": "2^%{y:.4~g}",
        "showlegend": False,
        "line": {"shape": "hv"},
    },
    "allocated": {"name": marked("allocated"), "yaxis": "y3", "legend": "legend3", "line": {"dash": DASHES["allocated"]}},
    "peak": {"name": marked("peak"), "yaxis": "y3", "legend": "legend3"},
    "reserved": {"name": marked("reserved"), "yaxis": "y3", "legend": "legend3", "line": {"dash": DASHES["reserved"]}},
}
# In a unified hover box a mark also appears near its step, so it says which step it is of.
_NOT_FINITE = {
    "name": marked("loss not finite"),
    "yaxis": "y4",
    "legend": "legend",
    "hovertemplate": (marked("step {step}: {what}"), {"what": "%{text}"}),
}
_SKIPPED: dict[str, Any] = {"name": marked("skipped step"), "yaxis": "y2", "legend": "legend2"}
_SKIPPED |= {"hovertemplate": (marked("step {step}, scale used {scale}"), {"scale": "2^%{y:.4~g}"})}
_EVENTS: dict[str, Any] = {"name": marked("event"), "yaxis": "y4", "showlegend": False}
_EVENTS |= {"hovertemplate": (marked("step {step}: {what}"), {"what": "%{text}"})}


def _trace(series: str, part: str, look: dict[str, Any]) -> dict[str, Any]:
    hover = look.get("hovertemplate")
    if isinstance(hover, tuple):  # a text, and what stands for its placeholders
        look = look | {"hovertemplate": say(hover[0], step="%{x:,d}", **hover[1])}
    return {"type": "scatter", "xaxis": "x", "meta": {"series": series, "part": part}} | look | {"name": say(look["name"])}
