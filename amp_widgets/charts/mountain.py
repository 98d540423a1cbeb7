"""The memory of one step as a mountain that forward builds and backward takes down; or two of them, before and after a change."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from amp_widgets.charts import look, peaks
from amp_widgets.charts._extras import missing_extra
from amp_widgets.charts.ceiling import Ceiling, Death, ceiling_height, ceiling_parts, death_parts, death_text, deaths_text
from amp_widgets.charts.decimate import kept_points
from amp_widgets.charts.label_places import label_px
from amp_widgets.charts.labels import escaped, shortened
from amp_widgets.charts.look import Theme
from amp_widgets.charts.peaks import KIND_NAMES, KIND_PATTERNS, KINDS, StepLike
from amp_widgets.charts.phases import WIDTH, Band, Positions, aligned
from amp_widgets.charts.reserved import highest_reserved, reserved_traces
from amp_widgets.language import in_language, say, say_number

try:
    import plotly.graph_objects as go
except ImportError as error:
    raise missing_extra(error) from error

HEIGHT_PX = 420
TITLE_PX = 28
MARGIN_PX = {"t": 64, "b": 62, "l": 64, "r": 34}
MOST_POINTS = 600
"""A mountain has about this many points: there are not more pixels. Peak and the ends of phases are among them."""
NARROW_PX = 530.0
"""Of a plot: notes are placed for it, and have more room in a wider one."""
NOTE_PX, NOTE_PAD_PX = 46.0, 2
"""So far beside its peak a note is, and around its text."""
BRACKET_AT = 102.0
"""Right of the step, where the distance of two peaks is drawn."""
ROOM = 16.0
"""Right of the step, for the distance and its words."""
HEADROOM = 1.30
DEATH_ROOM = 1.42
"""In place of it, where memory ran out: the note there is higher, and at the top."""
CEILING_ROOM = 1.12
"""Times as high as it is what is drawn above a ceiling."""
NARROW = 14.0
"""The name of a phase that is not so wide may be wider."""
RIGHTMOST = 70.0
"""A note that is to the right of a peak further to the right would not have room."""
SMALLEST_GAP = 0.25
"""Of the height: two notes on the same side need so much."""
SMALLEST_BRACKET = 0.05
"""Of the height: with a smaller distance there is no room for its arrow."""
LAYER_CHARACTERS, OPERATOR_CHARACTERS, LABEL_CHARACTERS, NOTE_CHARACTERS, LEGEND_CHARACTERS = 60, 40, 48, 36, 12

KIND_COLOURS: dict[Theme, dict[str, str]] = {
    "light": {
        "parameter": "#56616c", "buffer": "#8d99a5", "gradient": "#009e73", "optimizer": "#b7a2dc",
        "activation": "#0072b2", "recompute": "#e69f00", "temporary": "#cc79a7", "other": "#b5b5b5",
    },
    "dark": {
        "parameter": "#8a97a4", "buffer": "#626d78", "gradient": "#2fbf93", "optimizer": "#8f78bd",
        "activation": "#56b4e9", "recompute": "#ffb733", "temporary": "#e394bf", "other": "#707070",
    },
}  # fmt: skip
"""Okabe and Ito's; neighbours in the stack also differ in lightness. What stays all the time is grey."""


NO_DEATHS: Mapping[str, Death] = MappingProxyType({})


def mountain_figure(
    profiles: Sequence[StepLike],
    *,
    title: str | None = None,
    theme: Theme = "light",
    limit: int = MOST_POINTS,
    ceiling: Ceiling | None = None,
    deaths: Mapping[str, Death] = NO_DEATHS,
) -> go.Figure:
    """The memory of a step as areas stacked by kind, over the phases of the step, its peak marked.

    Parameters
    ----------
    profiles
        One profiled step; or two, before and after a change: the second is drawn as areas, the first as an outline behind it,
        each phase over the same phase of the other, and the title says what became of the peak.
    title
        In place of the sentence about the peak; ``""`` for none. Escaped.
    theme
        ``"light"`` or ``"dark"``.
    limit
        Points that a step is reduced to, about; at least 8. The peak is always among them.
    ceiling
        A height to be drawn that memory may not go above.
    deaths
        Label of a profile → how that step ran out of memory at its last point.

    Returns
    -------
    plotly.graph_objects.Figure
        x goes from 0 to 100; y is in bytes. Traces have ``meta`` with the position of their profile and their part: a kind,
        ``total`` (what is read on pointing), ``fill``, ``halo`` or ``outline``; on CUDA also ``allocated``, ``inactive`` and
        ``reserved``.

    Raises
    ------
    ValueError
        For none, or more than two profiles.
    """
    if not 1 <= len(profiles) <= 2:
        raise ValueError(f"mountain_figure: got {len(profiles)} profiles, expected one, or two: before and after")
    colours = look.COLOURS[theme]
    bands, positions = aligned([(len(profile.time_s), profile.phases) for profile in profiles])
    steps = [
        _reduced(profile, place, limit, i, i == len(profiles) - 1, deaths.get(profile.label))
        for i, (profile, place) in enumerate(zip(profiles, positions, strict=True))
    ]
    traces = [trace for step in steps if not step.areas for trace in _outline(step, colours, part="fill")]
    traces += _areas(steps[-1], colours, KIND_COLOURS[theme])
    traces += [trace for step in steps if not step.areas for trace in _outline(step, colours, part="outline")]
    allocator = profiles[-1].allocator
    if allocator and len(positions[-1].x) > 1:
        traces += reserved_traces(allocator, positions[-1].x, steps[-1].number, colours)
    highest = max([1.0, float(highest_reserved(allocator)), *(step.needed_bytes for step in steps)])
    height = max(highest, ceiling_height(ceiling, highest))
    headroom = DEATH_ROOM if any(step.death for step in steps) else HEADROOM
    layout = _layout(len(steps) == 2, bands, colours, max(headroom * highest, CEILING_ROOM * height))
    words = mountain_sentence(profiles, deaths, ceiling) if title is None else title
    if words:
        layout["title"]["text"] = f"<b>{escaped(words)}</b>"
    else:
        layout["margin"]["t"] -= TITLE_PX
        layout["height"] -= TITLE_PX
    layout["shapes"] = _band_shapes(bands, steps, colours, KIND_COLOURS[theme]["recompute"])
    layout["annotations"] = _peak_notes(steps, colours, layout["yaxis"]["range"][1])
    found = [_distance(steps[0], steps[1], colours)] if len(steps) == 2 and not any(step.death for step in steps) else []
    if ceiling is not None:
        found.append(ceiling_parts(ceiling, highest, layout["xaxis"]["range"][1], colours))
    for step in steps:
        if step.death is not None:
            x, left = float(step.x[-1]), float(step.x[-1]) > WIDTH / 2
            word = "" if len(steps) == 1 else say("after: ") if step.areas else say("before: ")
            found.append(death_parts(step.profile, step.death, x, step.number, colours, left=left, word=word))
    for shapes, notes in found:
        layout["shapes"] += shapes
        layout["annotations"] += notes
    return go.Figure(traces, layout | {"template": go.layout.Template()})


def mountain_sentence(
    profiles: Sequence[StepLike], deaths: Mapping[str, Death] = NO_DEATHS, ceiling: Ceiling | None = None
) -> str:
    """What a mountain shows, in a sentence: where the peak is, or what became of it; or that memory ran out. Not escaped."""
    died = [deaths.get(profile.label) for profile in profiles]
    if len(profiles) == 2 and any(died):
        return deaths_text(profiles[0], profiles[1], died[0], died[1], ceiling)
    if died[0] is not None:
        return death_text(profiles[0], died[0])
    if len(profiles) == 2:
        return peaks.difference_text(*(peaks.peak_of(profile)[1] for profile in profiles))
    return peaks.peak_text(profiles[0])


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """A profile as it is drawn; the last of two with `areas`. The arrays are of the points kept, and of the step's end, which for
    one that ran out of memory is its last point."""

    number: int
    areas: bool
    profile: StepLike
    x: npt.NDArray[np.float64]
    kinds: npt.NDArray[Any]
    total: npt.NDArray[Any]
    points: npt.NDArray[np.intp]
    recomputes: tuple[tuple[float, float], ...]
    peak_x: float
    peak_bytes: int
    death: Death | None

    @property
    def needed_bytes(self) -> float:
        """The height that it takes in the picture."""
        return self.peak_bytes if self.death is None else self.death.needed_bytes(self.profile)

    @property
    def label(self) -> str:
        return escaped(shortened(in_language(self.profile.label), LABEL_CHARACTERS))


def _reduced(profile: StepLike, place: Positions, limit: int, number: int, areas: bool, death: Death | None) -> _Step:
    total = profile.bytes_by_kind.sum(axis=1)
    if not total.size:
        nothing = np.zeros((1, len(KINDS)), np.int64)
        return _Step(number, areas, profile, np.zeros(1), nothing, nothing[:, 0], np.array([-1]), (), 0.0, 0, death)
    peak, peak_bytes = peaks.peak_of(profile)
    kept = kept_points(total, limit, {0, total.size - 1, peak, *place.edges})
    points = np.append(kept, kept[-1])  # the last value holds until the end of the step
    x = np.append(place.x[kept], place.x[-1 if death is None else -2])
    return _Step(
        number, areas, profile, x, profile.bytes_by_kind[points], total[points], points, place.recomputes,
        float(place.x[peak]), peak_bytes, death,
    )  # fmt: skip


# ---- traces ----------------------------------------------------------------------------------------------------------


def _areas(step: _Step, colours: look.Colours, kind_colours: dict[str, str]) -> list[dict[str, Any]]:
    traces = []
    for i, kind in enumerate(KINDS):
        if not step.kinds[:, i].any():
            continue
        traces.append(
            _trace(step, kind, step.kinds[:, i])
            | {"name": say(KIND_NAMES[kind]), "stackgroup": "memory", "fillcolor": kind_colours[kind], "hoverinfo": "skip"}
            | {"line": {"width": 0.5, "color": colours.background, "shape": "hv"}}
            | {"fillpattern": look.patterned(kind_colours[kind], KIND_PATTERNS[kind], colours)}
        )
    line = {"width": 1.5, "color": colours.text, "shape": "hv"}
    return [*traces, _trace(step, "total", step.total) | {"line": line, "showlegend": False} | _hover(step)]


def _outline(step: _Step, colours: look.Colours, *, part: str) -> list[dict[str, Any]]:
    """Behind the areas its `fill`, before them its line: what is missing from the areas stands out between the two.
    The line has a seam, so that it is seen also where it crosses the areas."""
    trace = _trace(step, part, step.total)
    if part == "fill":
        fill = {"fill": "tozeroy", "fillcolor": _faint(colours.muted, 0.22), "line": {"width": 0, "shape": "hv"}}
        return [trace | fill | {"hoverinfo": "skip", "showlegend": False}]
    line = {"width": 1.75, "color": colours.muted, "dash": "4px,2px", "shape": "hv"}
    halo = {"line": {"width": 4, "color": colours.background, "shape": "hv"}, "hoverinfo": "skip", "showlegend": False}
    return [_trace(step, "halo", step.total) | halo, trace | {"name": _outline_name(step), "line": line} | _hover(step)]


def _outline_name(step: _Step) -> str:
    """A long one would push the others in the legend apart; the note at its peak has it too."""
    return say("before: ") + step.label if len(step.profile.label) <= LEGEND_CHARACTERS else say("before")


def _trace(step: _Step, part: str, y: npt.NDArray[Any]) -> dict[str, Any]:
    return {"type": "scatter", "mode": "lines", "x": step.x, "y": y, "meta": {"profile": step.number, "part": part}}


def _hover(step: _Step) -> dict[str, Any]:
    """Text and no template: with one, Plotly would also show x, which means nothing to people."""
    return {"hovertext": [_point_text(step, i) for i in range(len(step.points))], "hoverinfo": "text"}


def _point_text(step: _Step, i: int) -> str:
    """Label; layer, operator, phase and time; bytes in all and of each kind that there is, as they are stacked."""
    profile, point = step.profile, int(step.points[i])
    layer = shortened(peaks.layer_at(profile, point), LAYER_CHARACTERS) or say("outside of any layer")
    operator = shortened(peaks.operator_at(profile, point), OPERATOR_CHARACTERS)
    time_ms = 1000 * float(profile.time_s[point]) if point >= 0 else 0.0
    where = [layer, operator, peaks.phase_name(peaks.phase_at(profile, point)), say("at {time} ms", time=f"{time_ms:,.2f}")]
    lines = [
        f"<b>{step.label}</b>",
        escaped(" · ".join(part for part in where if part)),
        f"<b>{_size(say('total'), step.total[i])}</b>",
    ]
    lines += [_size(say(KIND_NAMES[kind]), size) for kind, size in reversed(list(zip(KINDS, step.kinds[i], strict=True))) if size]
    return "<br>".join(lines)


def _size(name: str, size_bytes: int) -> str:
    return say("{name} {size} ({count} bytes)", name=name, size=peaks.memory_text(size_bytes), count=f"{size_bytes:,d}")


# ---- layout ----------------------------------------------------------------------------------------------------------


def _layout(compared: bool, bands: Sequence[Band], colours: look.Colours, top: float) -> dict[str, Any]:
    named = [band for band in bands if band.name != "other" or band.stop - band.start > 4]
    axis = {"gridcolor": colours.grid, "zeroline": False, "linecolor": colours.muted, "ticks": ""}
    return {
        "height": HEIGHT_PX,
        "margin": dict(MARGIN_PX),
        "paper_bgcolor": colours.background,
        "plot_bgcolor": colours.background,
        "font": {"color": colours.text, "size": 12},
        "hovermode": "x",
        "hoverlabel": {
            "bgcolor": colours.background, "bordercolor": colours.muted, "align": "left",
            "font": {"color": colours.text, "size": 12},
        },
        "modebar": {
            "orientation": "v", "remove": list(look.UNWANTED_BUTTONS), "bgcolor": "rgba(0,0,0,0)",
            "color": colours.muted, "activecolor": colours.text,
        },
        "title": {"x": 0, "xref": "paper", "y": 1, "yref": "container", "yanchor": "top", "pad": {"t": 8}, "font": {"size": 16}},
        "showlegend": True,
        "legend": {
            "orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "traceorder": "normal", "bgcolor": "rgba(0,0,0,0)",
            "font": {"size": 12}, "itemwidth": 30,
        },
        "xaxis": axis
        | {
            "range": [0, WIDTH + (ROOM if compared else 0)], "showgrid": False, "tickangle": 0, "ticklabelstandoff": 8,
            "tickvals": [(band.start + band.stop) / 2 for band in named],
            "ticktext": _band_names(named),
        },
        "yaxis": axis | {"range": [0, top], "tickformat": "~s", "ticksuffix": "B"},
    }  # fmt: skip


def _band_names(bands: Sequence[Band]) -> list[str]:
    """Under the axis; of narrow neighbours every second one a line lower, so that they do not run into each other."""
    names: list[str] = []
    was_narrow = lower = False
    for band in bands:
        narrow = band.stop - band.start < NARROW
        lower, was_narrow = narrow and was_narrow and not lower, narrow
        again = (
            f"<br>{say_number('with {count} recompute', 'with {count} recomputes', band.recomputes)}" if band.recomputes else ""
        )
        names.append(("<br>" if lower else "") + escaped(shortened(peaks.phase_name(band.name), 20)) + again)
    return names


def _band_shapes(bands: Sequence[Band], steps: Sequence[_Step], colours: look.Colours, recompute: str) -> list[dict[str, Any]]:
    """Every second phase shaded, and a strip at the bottom where layers are computed again."""
    shapes: list[dict[str, Any]] = []
    for i, band in enumerate(bands):
        rectangle = {"type": "rect", "xref": "x", "yref": "paper", "layer": "below", "line": {"width": 0}}
        place = {"x0": band.start, "x1": band.stop, "y0": 0, "y1": 1}
        shapes.append(rectangle | place | {"name": f"phase {i}", "fillcolor": _faint(colours.muted, 0.10 if i % 2 else 0.0)})
    for start, stop in steps[-1].recomputes:
        rectangle = {"type": "rect", "xref": "x", "yref": "paper", "layer": "above", "line": {"width": 0}, "fillcolor": recompute}
        shapes.append(rectangle | {"x0": start, "x1": stop, "y0": -0.022, "y1": -0.004, "name": "recompute"})
    return shapes


def _peak_notes(steps: Sequence[_Step], colours: look.Colours, top: float) -> list[dict[str, Any]]:
    """An arrow to each peak: from above for one; of two the higher from the left and the lower from the right, or from the left
    below it where there is no room on the right. A page moves them where they are in each other's way: see figure_view.js."""
    notes: list[dict[str, Any]] = []
    highest = max(step.peak_bytes for step in steps)
    for step in steps:
        if step.death is not None:  # that is noted instead
            continue
        other = next((one for one in steps if one is not step), None)
        low = other is not None and (step.peak_bytes, step.number) < (other.peak_bytes, other.number)
        word = "" if other is None else say("after: ") if step.areas else say("before: ")
        size = peaks.memory_text(step.peak_bytes)
        place = escaped(shortened(peaks.peak_place(step.profile), NOTE_CHARACTERS))
        what = f"<b>{word}{say('peak {size}', size=size)}</b>"
        lines = [
            what,
            *([escaped(shortened(in_language(step.profile.label), NOTE_CHARACTERS))] if other is not None else []),
            place,
        ]
        from_axis = step.peak_x / (WIDTH + (ROOM if other is not None else 0)) * NARROW_PX
        text_px = max(label_px(html.unescape(line.removeprefix("<b>").removesuffix("</b>")), bold=line == what) for line in lines)
        over_axis = text_px + 2 * NOTE_PAD_PX - from_axis  # so far a note on the left would reach beyond the peak
        right = step.peak_x < RIGHTMOST and (low or over_axis > NOTE_PX or (other is None and step.peak_x < WIDTH / 2))
        up = 26 if highest == step.peak_bytes else 40
        if low and not right and other is not None and other.peak_bytes - step.peak_bytes < SMALLEST_GAP * top:
            up = -up
        text = "<br>".join(line for line in lines if line)
        notes.append(
            {
                "x": step.peak_x, "y": step.peak_bytes, "ax": NOTE_PX if right else max(-NOTE_PX, over_axis), "ay": -up,
                "xanchor": "left" if right else "right",
                "text": text, "align": "left" if right else "right",
                "showarrow": True, "arrowhead": 2, "arrowwidth": 1.5, "arrowcolor": colours.text, "name": f"peak {step.number}",
                "font": {"size": 12, "color": colours.text}, "bgcolor": colours.background, "opacity": 0.92,
                "borderpad": NOTE_PAD_PX,
            }
        )  # fmt: skip
    return notes


def _distance(before: _Step, after: _Step, colours: look.Colours) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The heights of both peaks carried to the right, an arrow from one to the other, and how far that is."""
    change = after.peak_bytes - before.peak_bytes
    highest = max(before.peak_bytes, after.peak_bytes)
    if abs(change) < SMALLEST_BRACKET * highest or not change:
        return [], []
    shapes = [
        {
            "type": "line", "xref": "x", "yref": "y", "x0": step.peak_x, "x1": BRACKET_AT + 1, "y0": step.peak_bytes,
            "y1": step.peak_bytes, "line": {"color": colours.muted, "width": 1, "dash": "dot"}, "name": "height",
        }
        for step in (before, after)
    ]  # fmt: skip
    arrow = {
        "x": BRACKET_AT, "y": after.peak_bytes, "axref": "x", "ayref": "y", "ax": BRACKET_AT, "ay": before.peak_bytes, "text": "",
        "showarrow": True, "arrowhead": 2, "arrowwidth": 2, "arrowcolor": colours.text, "name": "distance",
    }  # fmt: skip
    per_cent = f"{100 * change / before.peak_bytes:+.0f} %" if before.peak_bytes else ""
    apart = peaks.sizes_texts(before.peak_bytes, after.peak_bytes)[2]
    words = f"<b>{per_cent}</b><br>{apart}<br>{say('more') if change > 0 else say('less')}"
    label = {
        "x": BRACKET_AT, "y": (before.peak_bytes + after.peak_bytes) / 2, "xanchor": "left", "xshift": 4, "text": words,
        "align": "left", "showarrow": False, "font": {"size": 13, "color": colours.text}, "name": "difference",
    }  # fmt: skip
    return shapes, [arrow, label]


def _faint(colour: str, opacity: float) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity:g})"
