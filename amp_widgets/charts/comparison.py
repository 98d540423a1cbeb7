"""Several settings as points: peak memory against step time, less of both at the lower left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from amp_widgets.charts import look
from amp_widgets.charts._extras import missing_extra
from amp_widgets.charts.label_places import Places, label_px
from amp_widgets.charts.labels import escaped, shortened
from amp_widgets.charts.look import Theme
from amp_widgets.charts.peaks import memory_text
from amp_widgets.language import in_language, marked_all, say

try:
    import plotly.graph_objects as go
except ImportError as error:
    raise missing_extra(error) from error

HEIGHT_PX = 430
TITLE_PX = 28
MARGIN_PX = {"t": 84, "b": 58, "l": 76, "r": 34}
NOTE_PX = 17
"""Height of a line below the plot that says what is not drawn."""
ASSUMED_WIDTH_PX = 760
"""A figure is as wide as its place; for the places of labels a width must be assumed."""
MARKER_PX = 13
FAR_APART = 8.0
"""Times that are so many times as long as each other are drawn on a logarithmic axis."""
HEADROOM = 1.12
LABEL_CHARACTERS, NOTE_CHARACTERS, LEGEND_CHARACTERS = 28, 110, 20

FORMAT_COLOURS: dict[Theme, dict[str, str]] = {
    "light": {"fp32": "#0072b2", "fp16": "#c94f00", "bf16": "#00785a"},
    "dark": {"fp32": "#56b4e9", "fp16": "#ff8c42", "bf16": "#2fbf93"},
}
"""Okabe and Ito's, 3:1 against the background; the labels name the format, too."""
SETS = marked_all("none", "all", "planned", "chosen")
"""What sets of checkpointed layers are called that have a name by themselves."""
LAYER_SYMBOLS = {"none": "circle", "all": "square", "planned": "diamond", "chosen": "triangle-up"}
"""By what a set of checkpointed layers is called."""
OTHER_SYMBOLS = ("cross", "star", "hexagon", "triangle-down", "pentagon", "bowtie")


class RowLike(Protocol):
    """What is read of a row; an ``amp_widgets.analysis.comparison.Row`` is one. NaN: not measured.

    Attributes
    ----------
    step_s, step_s_low, step_s_high
        Median and quartiles.
    why_not
        Why it was not measured; None where it was.
    """

    @property
    def label(self) -> str: ...
    @property
    def autocast(self) -> str: ...
    @property
    def layers_name(self) -> str: ...
    @property
    def peak_bytes(self) -> float: ...
    @property
    def step_s(self) -> float: ...
    @property
    def step_s_low(self) -> float: ...
    @property
    def step_s_high(self) -> float: ...
    @property
    def few_steps(self) -> bool: ...
    @property
    def peak_ratio(self) -> float: ...
    @property
    def time_ratio(self) -> float: ...
    @property
    def loss(self) -> float: ...
    @property
    def gradient_error(self) -> float: ...
    @property
    def skipped(self) -> int: ...
    @property
    def why_not(self) -> str | None: ...


def comparison_figure(rows: Sequence[RowLike], *, title: str | None = None, theme: Theme = "light") -> go.Figure:
    """Peak bytes against step time, a labelled point for each row, with the middle half of its step times.

    Parameters
    ----------
    rows
        The first is the one that the others are compared with: lines go through it.
    title
        In place of the sentence about what is shown; ``""`` for none. Escaped.
    theme
        ``"light"`` or ``"dark"``.

    Returns
    -------
    plotly.graph_objects.Figure
        x is in milliseconds, y in bytes. Traces have ``meta`` with the format and the name of the set of layers that their
        points are of; those without points are for the legend. What has no place is listed below.
    """
    colours = look.COLOURS[theme]
    drawn = [row for row in rows if _is_drawn(row)]
    symbols = _symbols(drawn)
    scale = _Scale(drawn)
    layout = _layout(colours, scale)
    places = _label_places(drawn, scale)
    traces = [_trace(row, place, symbols, colours, theme) for row, place in zip(drawn, places, strict=True)]
    traces += _legend(drawn, symbols, colours, theme)
    words = comparison_sentence(rows) if title is None else title
    if words:
        layout["title"]["text"] = f"<b>{escaped(words)}</b>"
    else:
        layout["margin"]["t"] -= TITLE_PX
        layout["height"] -= TITLE_PX
    if drawn and drawn[0] is rows[0]:
        layout["shapes"] = _reference_lines(drawn[0], colours)
    notes = [_not_drawn(row) for row in rows if not _is_drawn(row)]
    layout["annotations"] = _notes_below(notes, colours)
    layout["margin"]["b"] += NOTE_PX * len(notes)
    layout["height"] += NOTE_PX * len(notes)
    if not drawn:
        layout["annotations"].append(_note(say("nothing was measured"), 0.5, 0.5, colours.muted) | {"xanchor": "center"})
    return go.Figure(traces, layout | {"template": go.layout.Template()})


def comparison_sentence(rows: Sequence[RowLike]) -> str:
    """What the figure shows, in words. Not escaped."""
    drawn = [row for row in rows if _is_drawn(row)]
    least = min(drawn, key=lambda row: row.peak_bytes, default=None)
    fastest = min(drawn, key=lambda row: row.step_s, default=None)
    if least is None or fastest is None or len(drawn) < 2:
        return say("Peak memory and step time")
    others = [row for row in drawn if row is not fastest]
    if fastest.few_steps or any(row.few_steps or row.step_s_low <= fastest.step_s_high for row in others):
        return say("Least memory: {least}; no step clearly the shortest", least=_short(least) + _ratio(least.peak_ratio))
    return say(
        "Least memory: {least}; shortest step: {fastest}",
        least=_short(least) + _ratio(least.peak_ratio),
        fastest=_short(fastest) + _ratio(fastest.time_ratio),
    )


def set_name(name: str, *beside: str) -> str:
    """What a set of checkpointed layers is called in the language, and `beside` it as it is typed and as labels have it.

    Parameters
    ----------
    name
        One of `SETS`; others are their user's, and stay as they are.
    beside
        What else is said of it.
    """
    told = say(name) if name in SETS else name
    more = ", ".join([*([name] if told != name else []), *beside])
    return f"{told} ({more})" if more else told


class _Scale:
    """The axes, and where on the plot a point is."""

    def __init__(self, rows: Sequence[RowLike]) -> None:
        times_ms = [1e3 * t for row in rows for t in (row.step_s_low, row.step_s, row.step_s_high) if t > 0] or [1.0]
        self.logarithmic = max(times_ms) > FAR_APART * min(times_ms)
        if self.logarithmic:
            low, high = math.log10(min(times_ms)), math.log10(max(times_ms))
            self.x = (low - 0.08 * (high - low), high + 0.16 * (high - low))
        else:
            self.x = (0.0, HEADROOM * max(times_ms))
        self.y = (0.0, HEADROOM * max([row.peak_bytes for row in rows], default=1.0) or 1.0)

    def across(self, duration_s: float) -> float:
        """Pixels from the left."""
        x = math.log10(1e3 * duration_s) if self.logarithmic and duration_s > 0 else 1e3 * duration_s
        return (x - self.x[0]) / (self.x[1] - self.x[0]) * _WIDTH_PX

    def pixels(self, row: RowLike) -> tuple[float, float]:
        """From the left, and from the top."""
        return self.across(row.step_s), (1 - (row.peak_bytes - self.y[0]) / (self.y[1] - self.y[0])) * _PLOT_PX


_WIDTH_PX = ASSUMED_WIDTH_PX - MARGIN_PX["l"] - MARGIN_PX["r"]
_PLOT_PX = HEIGHT_PX - MARGIN_PX["t"] - MARGIN_PX["b"]
_GAP_PX = MARKER_PX / 2 + 3
_BAR_PX = 5.0
"""Half the height of the ends of the line between the quartiles."""


def _label_places(rows: Sequence[RowLike], scale: _Scale) -> list[str]:
    """Plotly's ``textposition`` for each point, such that labels cover neither points nor each other, as far as there is room."""
    places = Places(_WIDTH_PX, _PLOT_PX, _GAP_PX)
    for row in rows:
        x, y = scale.pixels(row)
        places.take_point(x, y)
        places.take((scale.across(row.step_s_low), y - _BAR_PX, scale.across(row.step_s_high), y + _BAR_PX), 1.0)
    return [places.put(*scale.pixels(row), label_px(_short(row))) for row in rows]


def _is_drawn(row: RowLike) -> bool:
    return row.why_not is None and math.isfinite(row.peak_bytes) and math.isfinite(row.step_s)


def _symbols(rows: Sequence[RowLike]) -> dict[str, str]:
    """A shape for each set of layers."""
    names = list(dict.fromkeys(row.layers_name for row in rows))
    others = [name for name in names if name not in LAYER_SYMBOLS]
    own = {name: OTHER_SYMBOLS[at % len(OTHER_SYMBOLS)] for at, name in enumerate(others)}
    return {name: LAYER_SYMBOLS.get(name) or own[name] for name in names}


def _trace(row: RowLike, place: str, symbols: dict[str, str], colours: look.Colours, theme: Theme) -> dict[str, Any]:
    colour = FORMAT_COLOURS[theme].get(row.autocast, colours.muted)
    return {
        "type": "scatter",
        "mode": "markers+text",
        "name": escaped(row.label),
        "x": [1e3 * row.step_s],
        "y": [row.peak_bytes],
        "text": [escaped(_short(row))],
        "textposition": place,
        "textfont": {"color": colours.text, "size": 12},
        "cliponaxis": False,
        "marker": _marker(symbols[row.layers_name], colour, colours),
        "error_x": {
            "type": "data", "symmetric": False, "color": colour, "thickness": 1.5, "width": 4,
            "array": [max(0.0, 1e3 * (row.step_s_high - row.step_s))],
            "arrayminus": [max(0.0, 1e3 * (row.step_s - row.step_s_low))],
        },
        "hovertemplate": f"{_hover(row)}<extra></extra>",
        "showlegend": False,
        "meta": {"format": row.autocast, "layers": row.layers_name},
    }  # fmt: skip


def _marker(symbol: str, colour: str, colours: look.Colours) -> dict[str, Any]:
    return {"symbol": symbol, "size": MARKER_PX, "color": colour, "line": {"width": 1.5, "color": colours.background}}


def _hover(row: RowLike) -> str:
    """What is read on pointing. Escaped, also from what a template would fill in."""
    lines = [
        f"<b>{escaped(row.label)}</b>",
        say("peak {size}", size=memory_text(row.peak_bytes) + _ratio(row.peak_ratio)),
        say(
            "step {time}, middle half {low} to {high}",
            time=_milliseconds(row.step_s) + _ratio(row.time_ratio),
            low=_milliseconds(row.step_s_low),
            high=_milliseconds(row.step_s_high),
        ),
    ]
    if not math.isnan(row.loss):
        lines.append(say("loss {loss}", loss=f"{row.loss:.4g}"))
    if not math.isnan(row.gradient_error):
        lines.append(say("relative error of gradients {error}", error=f"{row.gradient_error:.1e}"))
    if row.skipped:
        lines.append(say("skipped steps {count}", count=row.skipped))
    return "<br>".join(lines).replace("%{", "%&#123;")


def _legend(rows: Sequence[RowLike], symbols: dict[str, str], colours: look.Colours, theme: Theme) -> list[dict[str, Any]]:
    """What colours and shapes mean: traces without a point."""
    entries = []
    for format in dict.fromkeys(row.autocast for row in rows):
        colour = FORMAT_COLOURS[theme].get(format, colours.muted)
        entries.append((format, _marker("circle", colour, colours), {"format": format}, "legend"))
    for name, symbol in symbols.items():
        words = escaped(say("{layers} checkpointed", layers=shortened(set_name(name), LEGEND_CHARACTERS)))
        entries.append((words, _marker(symbol, colours.muted, colours), {"layers": name}, "legend2"))
    return [
        {
            "type": "scatter", "mode": "markers", "x": [None], "y": [None], "name": name, "marker": marker, "meta": meta,
            "legend": legend, "hoverinfo": "skip",
        }
        for name, marker, meta, legend in entries
    ]  # fmt: skip


def _layout(colours: look.Colours, scale: _Scale) -> dict[str, Any]:
    axis = {"gridcolor": colours.grid, "zeroline": False, "linecolor": colours.muted, "automargin": False}
    legend = {
        "orientation": "h", "x": 0, "xanchor": "left", "yanchor": "bottom", "yref": "paper", "bgcolor": "rgba(0,0,0,0)",
        "font": {"size": 12}, "itemclick": False, "itemdoubleclick": False,
    }  # fmt: skip
    words = say("step time, milliseconds (logarithmic)") if scale.logarithmic else say("step time, milliseconds")
    return look.framed(colours, height_px=HEIGHT_PX, margin_px=MARGIN_PX) | {
        "legend": legend | {"y": 1 + 24 / _PLOT_PX},
        "legend2": legend | {"y": 1 + 3 / _PLOT_PX},
        "xaxis": axis
        | {
            "type": "log" if scale.logarithmic else "linear", "range": list(scale.x), "tickformat": "~g",
            **({"dtick": "D2"} if scale.logarithmic else {}),
            "title": {"text": words, "font": {"size": 12}, "standoff": 8},
        },
        "yaxis": axis
        | {
            "range": list(scale.y), "tickformat": "~s", "ticksuffix": "B",
            "title": {"text": say("peak memory"), "font": {"size": 12}, "standoff": 4},
        },
        "shapes": [],
    }  # fmt: skip


def _reference_lines(row: RowLike, colours: look.Colours) -> list[dict[str, Any]]:
    line = {"type": "line", "layer": "below", "line": {"width": 1, "dash": "dot", "color": colours.muted}}
    return [
        line | {"xref": "paper", "x0": 0, "x1": 1, "yref": "y", "y0": row.peak_bytes, "y1": row.peak_bytes},
        line | {"xref": "x", "x0": 1e3 * row.step_s, "x1": 1e3 * row.step_s, "yref": "paper", "y0": 0, "y1": 1},
    ]


def _not_drawn(row: RowLike) -> str:
    because = in_language(row.why_not or "")
    because = because or (say("its memory was not measured") if math.isnan(row.peak_bytes) else say("its time is not known"))
    return shortened(f"{row.label}: {because}", NOTE_CHARACTERS)


def _notes_below(notes: Sequence[str], colours: look.Colours) -> list[dict[str, Any]]:
    return [
        _note(escaped(text), 0, 0, colours.muted)
        | {"xanchor": "left", "yanchor": "top", "yshift": -MARGIN_PX["b"] + 4 - NOTE_PX * at, "name": "not drawn"}
        for at, text in enumerate(notes)
    ]


def _note(text: str, x: float, y: float, colour: str) -> dict[str, Any]:
    return {
        "text": text, "x": x, "y": y, "xref": "paper", "yref": "paper", "showarrow": False,
        "font": {"size": 12, "color": colour},
    }  # fmt: skip


def _short(row: RowLike) -> str:
    return shortened(row.label, LABEL_CHARACTERS)


def _ratio(ratio: float) -> str:
    return "" if math.isnan(ratio) else f" (×{ratio:.2f})"


def _milliseconds(duration_s: float) -> str:
    return f"{1e3 * duration_s:.3g} ms"
