"""The training chart as one small picture: for a notebook without a kernel, and where the widgets' packages are missing."""

from __future__ import annotations

import base64
import dataclasses
import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from amp_widgets.charts import flags
from amp_widgets.charts.ceiling import Ceiling, Death, ceiling_height
from amp_widgets.charts.decimate import Points, evened, kept_points
from amp_widgets.charts.distinct import DASH_PX
from amp_widgets.charts.labels import EventLike, event_label, short_event_label, shortened
from amp_widgets.charts.look import COLOURS, DASHES, PLOTS
from amp_widgets.charts.peaks import KIND_NAMES, KIND_PATTERNS, KINDS, StepLike, memory_text, peak_of, phase_name
from amp_widgets.charts.phases import WIDTH, Positions, aligned
from amp_widgets.charts.series import drawable, essential, series_of
from amp_widgets.language import in_language, marked, say

WIDTH_PX = 900
LEFT_PX, RIGHT_PX = 66, 20
GAP_PX = 38
"""Between two plots: the title of the lower one, and room above it."""
BOTTOM_PX = 44
LINE_POINTS = 440
"""Points that a line is reduced to."""
FEWER_POINTS = 168
"""In place of it, where there is a picture of the memory within a step, too."""
MARK_PX = 7
"""Of marks that would hide each other one is drawn."""
MOST_MARKS = 150
MOUNTAIN_POINTS, MOUNTAIN_PX = 44, 150
NO_STEP = marked("No training step recorded yet.")
_MEMORY = {"allocated": marked("allocated"), "peak": marked("peak"), "reserved": marked("reserved")}


def training_svg(
    columns: Mapping[str, npt.NDArray[Any]],
    events: Sequence[EventLike],
    *,
    memory_source: str,
    line_points: int = LINE_POINTS,
) -> str:
    """Loss, loss scale, memory and step time over steps as an SVG document of its own, of 40 KB at most.

    Parameters
    ----------
    columns
        Name → array of shape (rows,), NaN where not measured; see :func:`amp_widgets.charts.figures.training_figure`.
        ``step_s`` is drawn too (seconds).
    events
        What happened, see :class:`amp_widgets.charts.labels.EventLike`.
    memory_source
        How the memory numbers are obtained, for people.
    line_points
        That a line is reduced to.

    Returns
    -------
    str
        On a background of its own, so that it can be read on a light page and on a dark one. Without any row it is a small
        picture that says so.
    """
    step = np.asarray(columns["step"], dtype=np.float64)
    if not step.size:
        return _document(60, say(NO_STEP), [_text(WIDTH_PX / 2, 35, say(NO_STEP), "middle")])
    skipped_steps = np.array(sorted({event.step for event in events if event.kind == "skipped"}), dtype=np.float64)
    series = series_of(columns, skipped_steps=skipped_steps)
    if not np.any(series["scale"][1]):  # 2^0 throughout, or unknown: the plot says so in words
        series["scale"] = step[:0], step[:0]
    step_s = np.asarray(columns.get("step_s", np.full(step.shape, np.nan)), dtype=np.float64)
    series["step_s"] = step, drawable(step_s)

    ends = [*step[[0, -1]].tolist(), *(float(event.step) for event in events)]
    first, last = min(ends), max(ends)
    margin = 0.02 * max(last - first, 1)
    across = _Axis(first - margin, last + margin, LEFT_PX, WIDTH_PX - RIGHT_PX)
    labels, lanes = _labels(events, across)
    top = loss_top = 12 + lanes * flags.LANE_PX + 22
    drawn: list[str] = []
    bottom = top
    for plot in _plots(series, memory_source):
        bottom = top + plot.height
        drawn += plot.drawn(series, across, top, line_points)
        top = bottom + GAP_PX
    drawn += _event_marks(events, across, loss_top)
    drawn += _flags(labels, across, lanes, bottom)
    for tick in _ticks(across.low, across.high, 9, whole=True):
        if first <= tick <= last:
            drawn.append(_text(across(tick), bottom + 16, f"{tick:,.0f}", "middle"))
    drawn.append(_text((LEFT_PX + WIDTH_PX - RIGHT_PX) / 2, bottom + 34, say("step"), "middle"))
    return _document(bottom + BOTTOM_PX, say("Training charts up to step {step}", step=f"{step[-1]:,.0f}"), drawn)


def memory_svg(
    profiles: Sequence[StepLike], deaths: Mapping[str, Death], ceiling: Ceiling | None, kind_colours: Mapping[str, str]
) -> str:
    """The memory within one step, or before and after a change, as a small picture: with :func:`training_svg` of `FEWER_POINTS`
    of 40 KB at most.

    Parameters
    ----------
    profiles, deaths, ceiling
        As :func:`amp_widgets.charts.mountain.mountain_figure` has them.
    kind_colours
        Kind → colour.
    """
    bands, positions = aligned([(len(profile.time_s), profile.phases) for profile in profiles])
    needed = [_needed_bytes(profile, deaths.get(profile.label)) for profile in profiles]
    highest = max([1.0, *needed])
    unit, bytes_in_it = _unit([np.array([highest])], _BYTE_UNITS)
    top, bottom, right = 26, 26 + MOUNTAIN_PX, WIDTH_PX - RIGHT_PX
    across = _Axis(0, WIDTH, LEFT_PX, right)
    up = _Axis(0, 1.1 * max(highest, ceiling_height(ceiling, highest)), bottom, top)
    drawn = [f'<path stroke="{_INK.grid}" fill="none" d="M{LEFT_PX} {top}H{right}V{bottom}H{LEFT_PX}Z"/>']
    drawn.append(_text(LEFT_PX, top - 8, say("memory within a step ({unit})", unit=unit), bold=True))
    ticks = _ticks(0, up.high / bytes_in_it, 5)
    for tick, text in zip(ticks, _numbers(ticks), strict=True):
        drawn.append(f'<path stroke="{_INK.grid}" d="M{LEFT_PX} {up(tick * bytes_in_it):.1f}H{right}"/>')
        drawn.append(_text(LEFT_PX - 6, up(tick * bytes_in_it) + 4, text, "end"))
    taken_px, lower = 0.0, False
    for band in bands:
        drawn.append(f'<path stroke="{_INK.grid}" d="M{across(band.stop):.1f} {top}V{bottom}"/>')
        if band.stop - band.start > 4:
            name, x_px = shortened(phase_name(band.name), 16), across((band.start + band.stop) / 2)
            half_px = flags.text_px(name) / 2
            lower = x_px - half_px < taken_px and not lower  # in the way of the one before
            drawn.append(_text(x_px, bottom + (29 if lower else 16), name, "middle"))
            taken_px = x_px + half_px
    after, place = profiles[-1], positions[-1]
    names = []
    if len(after.time_s):
        summed = np.cumsum(after.bytes_by_kind, axis=1)
        for i in reversed(range(len(KINDS))):  # from the highest area to the lowest, each over the one before
            if after.bytes_by_kind[:, i].any():
                path = _stairs(after, place, deaths, summed[:, i], across, up)
                drawn.append(_pattern(f"k{i}", kind_colours[KINDS[i]], KIND_PATTERNS[KINDS[i]]))
                drawn.append(f'<path transform="scale(.5)" fill="url(#k{i})" d="{path}V{2 * bottom}H{2 * LEFT_PX}Z"/>')
                names.append((say(KIND_NAMES[KINDS[i]]), f"url(#k{i})"))
    if len(profiles) == 2 and len(profiles[0].time_s):
        path = _stairs(profiles[0], positions[0], deaths, profiles[0].bytes_by_kind.sum(axis=1), across, up)
        look = f'fill="none" stroke="{_INK.text}" stroke-width="3" stroke-dasharray="8 4"'
        drawn.append(f'<path transform="scale(.5)" {look} d="{path}"/>')
    died_px: list[float] = []
    for profile, placed in zip(profiles, positions, strict=True):
        death = deaths.get(profile.label)
        if death is not None:
            x_px, y_px = across(float(placed.x[-2 if len(placed.x) > 1 else -1])), up(death.asked_bytes(profile))
            drawn.append(f'<path stroke="{_INK.alarm}" stroke-width="2" d="M{x_px - 4:.1f} {y_px - 4:.1f}l8 8m0-8l-8 8"/>')
            left = x_px > WIDTH_PX / 2
            died_px.append(x_px)
            drawn.append(_text(x_px + (-8 if left else 8), y_px - 4, say("out of memory here"), "end" if left else "start"))
    if ceiling is not None and ceiling_height(ceiling, highest):
        y_px = up(ceiling.size_bytes)
        drawn.append(f'<path stroke="{_INK.alarm}" stroke-width="2" stroke-dasharray="8 4" d="M{LEFT_PX} {y_px:.1f}H{right}"/>')
        long_px = flags.text_px(ceiling.text) + 6
        x_px = LEFT_PX + 3 if not died_px or min(died_px) > LEFT_PX + 2 * long_px else right - 3 - long_px
        drawn.append(f'<path fill="{_INK.background}" d="M{x_px:.0f} {y_px - 16:.0f}h{long_px:.0f}v14h-{long_px:.0f}z"/>')
        drawn.append(_text(x_px + 3, y_px - 5, ceiling.text, "start", _INK.alarm))
    x_px = float(LEFT_PX)
    for name, fill in [*reversed(names), *([(say("before (outline)"), "")] if len(profiles) == 2 else [])]:
        if fill:
            drawn.append(f'<path transform="scale(.5)" fill="{fill}" d="M{2 * x_px:.0f} {2 * bottom + 80}h24v22h-24z"/>')
        drawn.append(_text(x_px + 14, bottom + 50, name))
        x_px += 30 + flags.text_px(name)
    return _document(bottom + 60, say("Memory within a step, at most {size}", size=memory_text(highest)), drawn)


def picture_html(
    svg: str, caption: str, *, class_: str = "", memory: tuple[str, str] | None = None, report: Sequence[str] = ()
) -> str:
    """The picture with a sentence above it, as HTML that also shows where a notebook is not trusted.

    Parameters
    ----------
    svg
        From :func:`training_svg`.
    caption
        A sentence, as text.
    class_
        Name of a class for the whole.
    memory
        From :func:`memory_svg`, and its sentence; shown below.
    report
        Lines, as text, the first one a heading; shown last.
    """
    parts = [_paragraph(caption), _image(svg, say("Training charts"))]
    if memory is not None:
        parts += [_paragraph(memory[1], bold=True), _image(memory[0], say("Memory within a step"))]
    parts += [_paragraph(line, bold=i == 0) for i, line in enumerate(report)]
    return f'<div class="{html.escape(class_)}">{"".join(parts)}</div>'


def _paragraph(text: str, *, bold: bool = False) -> str:
    escaped = html.escape(_printable(text))
    return f"<p>{f'<b>{escaped}</b>' if bold else escaped}</p>"


def _image(svg: str, what: str) -> str:
    """As an image: front ends remove SVG elements from the HTML of a notebook that is not trusted, and images of data stay."""
    if not svg:
        return ""
    data = base64.b64encode(svg.encode()).decode()
    return f'<img src="data:image/svg+xml;base64,{data}" alt="{what}" style="max-width: 100%">'


def _needed_bytes(profile: StepLike, death: Death | None) -> float:
    return float(peak_of(profile)[1]) if death is None else death.needed_bytes(profile)


def _pattern(name: str, colour: str, shape: str) -> str:
    """The fill of an area, drawn at twice its size."""
    lines = f'<path stroke="{_INK.background}" stroke-width="2" d="{_PATTERNS[shape]}"/>' if shape else ""
    size = 'width="12" height="12" patternUnits="userSpaceOnUse"'
    return f'<pattern id="{name}" {size}><path fill="{colour}" d="M0 0h12v12H0z"/>{lines}</pattern>'


def _stairs(
    profile: StepLike, place: Positions, deaths: Mapping[str, Death], size_bytes: npt.NDArray[Any], across: _Axis, up: _Axis
) -> str:
    """The heights over the step, in whole half pixels."""
    total = profile.bytes_by_kind.sum(axis=1)
    kept = kept_points(total, MOUNTAIN_POINTS, {0, len(total) - 1, peak_of(profile)[0]})
    xs = np.rint(2 * across.pixels(np.append(place.x[kept], place.x[-2 if profile.label in deaths else -1]))).astype(int).tolist()
    ys = np.rint(2 * up.pixels(size_bytes[kept].astype(float))).astype(int).tolist()
    path = [f"M{2 * LEFT_PX} {ys[0]}H{xs[0]}"]
    for i, y_px in enumerate(ys):
        if i and y_px != ys[i - 1]:
            path.append(f"H{xs[i]}V{y_px}")
    return "".join([*path, f"H{xs[-1]}"])


@dataclasses.dataclass(frozen=True, slots=True)
class _Axis:
    """From values to pixels."""

    low: float
    high: float
    low_px: float
    high_px: float

    def __call__(self, value: float) -> float:
        return float(self.pixels(np.array(value)))

    def pixels(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        part = (values / 2 - self.low / 2) / (self.high / 2 - self.low / 2)  # halved: a range of floats may exceed a float
        return self.low_px + np.clip(part, 0, 1) * (self.high_px - self.low_px)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Plot:
    title: str
    height: int
    lines: Mapping[str, str]  # series → name in the legend
    marks: Mapping[str, str] = dataclasses.field(default_factory=dict)
    empty_note: str
    factor: float = 1.0  # from the series to the numbers at the axis
    power_of_two: bool = False
    from_zero: bool = False
    highest_shown: float = math.inf  # what is higher is drawn at the upper edge

    def drawn(self, series: Mapping[str, Points], across: _Axis, top: int, line_points: int) -> list[str]:
        """Everything between `top` and ``top + height``, and the title above."""
        bottom, right = top + self.height, WIDTH_PX - RIGHT_PX
        parts = [f'<path stroke="{_INK.grid}" fill="none" d="M{LEFT_PX} {top}H{right}V{bottom}H{LEFT_PX}Z"/>']
        known = {name: series[name] for name in self.lines if not np.isnan(series[name][1]).all()}
        crosses_of = {name: series[name] for name in self.marks if series[name][0].size}
        legend = [
            (text, _colour(name), _dash(name, 1) or "line")
            for name, text in self.lines.items()
            if name in known and len(self.lines) > 1
        ]
        legend += [(text, _INK.alarm, "cross") for name, text in self.marks.items() if name in crosses_of]
        parts += [_text(LEFT_PX, top - 6, self.title, bold=True), *_legend(legend, top - 6)]
        if not known:
            parts.append(_text((LEFT_PX + right) / 2, (top + bottom) / 2 + 4, self.empty_note, "middle", _INK.muted))
        values = [y[~np.isnan(y)] for _, y in (known or {"": (np.zeros(1), np.zeros(1))}).values()]
        low, high = self._range(min(float(y.min()) for y in values), max(float(y.max()) for y in values))
        up = _Axis(low, high, bottom, top)
        if known:
            ticks = _ticks(low * self.factor, high * self.factor, max(2, self.height // 24), whole=self.power_of_two)
            for tick, text in zip(ticks, _numbers(ticks), strict=True):
                y_px = up(tick / self.factor)
                parts.append(f'<path stroke="{_INK.grid}" d="M{LEFT_PX} {y_px:.1f}H{right}"/>')
                parts.append(_text(LEFT_PX - 6, y_px + 4, f"2^{text}" if self.power_of_two else text, "end"))
        for name, points in known.items():
            parts += _line(
                evened(*essential(name, points), line_points), across, up, _colour(name), stairs=name == "scale", dash=_dash(name)
            )
        for name, (x, y) in crosses_of.items():
            at_px = np.full(x.shape, top + 0.06 * self.height) if name == "not_finite" else up.pixels(y)
            crosses = "".join(f"M{x_px} {y_px}l7 7m0-7l-7 7" for x_px, y_px in _places(across.pixels(x) - 3.5, at_px - 3.5))
            parts.append(f'<path stroke="{_INK.alarm}" stroke-width="1.8" d="{crosses}"/>')
        return parts

    def _range(self, low: float, high: float) -> tuple[float, float]:
        high = min(high, self.highest_shown)
        low = 0.0 if self.from_zero else min(low, high)
        if high / 2 - low / 2 <= max(1e-12 * max(abs(low), abs(high)), 1e-290):  # too close together to be told apart
            margin = 1.0 if self.power_of_two else abs(low) / 20 or 1.0
        else:
            margin = high / 20 - low / 20
        return (0.0 if self.from_zero else low - margin), high + margin


def _plots(series: Mapping[str, Points], memory_source: str) -> list[_Plot]:
    memory = ("allocated", "peak", "reserved")
    byte_unit, bytes_in_it = _unit([series[name][1] for name in memory], _BYTE_UNITS)
    times = series["step_s"][1]
    known = times[~np.isnan(times)]
    usual = float(np.quantile(known, 0.98)) if known.size else 0.0
    time_unit, seconds_in_it = _unit([np.array([usual])], _TIME_UNITS)
    # The first step alone may take a hundred times as long: the others would be a line at zero.
    cut = 2 * usual if known.size and usual > 0 and known.max() > 3 * usual else math.inf
    higher = ""
    if cut < math.inf:
        higher = f" · {say('longest {time}, cut off', time=f'{known.max() / seconds_in_it:,.3g} {time_unit}')}"
    return [
        _Plot(
            title=say("loss"), height=150, lines={"loss": say("loss")}, marks={"not_finite": say("not finite")},
            empty_note=say(PLOTS["loss"].empty_note),
        ),
        _Plot(
            title=say("loss scale (powers of 2)"), height=84, lines={"scale": say("loss scale")},
            marks={"skipped": say("skipped step")},
            empty_note=say(PLOTS["scale"].empty_note), power_of_two=True,
        ),
        _Plot(
            title=f"{say('memory')} ({byte_unit}) · {shortened(in_language(memory_source), 78)}", height=110,
            lines={name: say(_MEMORY[name]) for name in memory},
            empty_note=say(PLOTS["memory"].empty_note), factor=1 / bytes_in_it, from_zero=True,
        ),
        _Plot(
            title=f"{say('step time')} ({time_unit}){higher}", height=84, lines={"step_s": say("step time")},
            empty_note=say("not measured"),
            factor=1 / seconds_in_it, from_zero=True, highest_shown=cut,
        ),
    ]  # fmt: skip


def _line(points: Points, across: _Axis, up: _Axis, colour: str, *, stairs: bool, dash: str) -> list[str]:
    """A line in whole half pixels, each point as its distance from the one before: that is short."""
    x, y = points
    gap = np.isnan(y)
    xs = np.rint(2 * across.pixels(x)).astype(int).tolist()
    ys = np.rint(2 * up.pixels(np.where(gap, up.low, y))).astype(int).tolist()
    path: list[str] = []
    lone: list[str] = []
    for i, (x_px, y_px, no_point) in enumerate(zip(xs, ys, gap.tolist(), strict=True)):
        if no_point:
            continue
        if i == 0 or gap[i - 1]:
            path.append(f"M{x_px} {y_px}")
            if i + 1 == len(xs) or gap[i + 1]:
                lone.append(f"M{x_px} {y_px}h0")
        elif stairs:
            path.append(f"h{x_px - xs[i - 1]}v{y_px - ys[i - 1]}")
        elif (x_px, y_px) != (xs[i - 1], ys[i - 1]):
            path.append(f"l{x_px - xs[i - 1]} {y_px - ys[i - 1]}".replace(" -", "-"))
    look = f'fill="none" stroke="{colour}" transform="scale(.5)" stroke-linecap="round" stroke-linejoin="round"'
    parts = [f'<path {look} stroke-width="3"{dash} d="{"".join(path)}"/>']
    if lone:
        parts.append(f'<path {look} stroke-width="8" d="{"".join(lone)}"/>')
    return parts


def _labels(events: Sequence[EventLike], across: _Axis) -> tuple[list[flags.Flag], int]:
    """The lines of applied changes, and how many lanes their labels need."""
    applied = sorted((event for event in events if event.kind == "applied"), key=lambda event: event.step)
    placed = flags.placed(
        [float(event.step) for event in applied],
        [event_label(event) for event in applied],
        [short_event_label(event) for event in applied],
        first_step=across.low,
        last_step=across.high,
        width_px=across.high_px - across.low_px,
    )
    return placed, 1 + max((flag.lane for flag in placed if flag.lane is not None), default=-1)


def _flags(placed: Iterable[flags.Flag], across: _Axis, lanes: int, bottom: int) -> list[str]:
    lines, texts = "", []
    for flag in placed:
        x_px = across(flag.step)
        base = 12 + lanes * flags.LANE_PX - (flag.lane or 0) * flags.LANE_PX
        lines += f"M{x_px:.1f} {base - 10 if flag.lane is not None else 12 + lanes * flags.LANE_PX}V{bottom}"
        if flag.lane is not None:
            side, anchor = (-3, "end") if flag.leftwards else (3, "start")
            # What is Plotly's escaping there is taken back: it is escaped anew for SVG.
            texts.append(_text(x_px + side, base, html.unescape(flag.label), anchor))
    return [f'<path stroke="{_INK.flag}" stroke-dasharray="2 3" d="{lines}"/>', *texts] if lines else []


def _event_marks(events: Iterable[EventLike], across: _Axis, y_px: float) -> list[str]:
    """What was rejected, and the stages of runs: marks at the upper edge of the loss."""
    parts = []
    for kind, shape in _EVENT_SHAPES.items():
        steps = np.array([event.step for event in events if event.kind == kind], dtype=np.float64)
        places = _places(across.pixels(steps) - 3, np.full(steps.shape, y_px - 3))
        if places:
            marks = "".join(f"M{x} {y}{shape}" for x, y in places)
            parts.append(f'<path fill="none" stroke="{_INK.flag}" d="{marks}"/>')
    return parts


def _places(x_px: npt.NDArray[Any], y_px: npt.NDArray[Any]) -> list[tuple[str, str]]:
    """One of the places that fall together."""
    cells = np.rint(x_px / MARK_PX) + 1e4 * np.rint(y_px / MARK_PX / 2)
    _, first = np.unique(cells, return_index=True)
    kept = np.sort(first)[-MOST_MARKS:].tolist()
    return [(f"{x_px[i]:.4g}", f"{y_px[i]:.4g}") for i in kept]


def _legend(entries: Sequence[tuple[str, str, str]], y_px: float) -> list[str]:
    parts: list[str] = []
    right = float(WIDTH_PX - RIGHT_PX)
    for text, colour, shape in reversed(entries):
        parts.append(_text(right, y_px, text, "end"))
        right -= flags.text_px(text) + 8
        d = f"M{right - 8} {y_px - 7}l7 7m0-7l-7 7" if shape == "cross" else f"M{right - 16} {y_px - 4}h16"
        parts.append(f'<path stroke="{colour}" stroke-width="2"{shape if "=" in shape else ""} d="{d}"/>')
        right -= 30
    return parts


def _ticks(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """At most about `most` round numbers from `low` to `high`."""
    raw = high / most - low / most
    power = 10.0 ** math.floor(math.log10(raw)) if raw > 0 else 1.0
    distance = next((power * factor for factor in (1, 2, 5) if power * factor >= raw), power * 10)
    if whole:
        distance = max(1.0, distance)
    first, last = math.ceil(low / distance), math.floor(high / distance)
    return [number * distance for number in range(first, last + 1)]


def _numbers(ticks: Sequence[float]) -> list[str]:
    """With as many digits as tell them apart, and without an exponent below a million."""
    whole = len(f"{max(map(abs, ticks), default=0.0):.0f}")
    for digits in range(min(max(whole, 3), 6), 17):
        texts = [f"{tick:.{digits}g}" for tick in ticks]
        if all(math.isclose(float(text), tick, rel_tol=1e-12, abs_tol=1e-12) for text, tick in zip(texts, ticks, strict=True)):
            break
    return texts


def _unit(values: Iterable[npt.NDArray[Any]], units: Sequence[tuple[float, str]]) -> tuple[str, float]:
    """The unit in which the highest value is 1 at least, and how much it is."""
    highest = max((float(np.nanmax(one)) for one in values if not np.isnan(one).all()), default=0.0)
    size, name = next(((size, name) for size, name in units if highest >= size), units[-1])
    return name, size


def _text(x_px: float, y_px: float, text: str, anchor: str = "start", colour: str = "", *, bold: bool = False) -> str:
    attributes = "" if anchor == "start" else f' text-anchor="{anchor}"'
    attributes += f' fill="{colour}"' if colour else ""
    attributes += ' font-weight="600"' if bold else ""
    return f'<text x="{x_px:.4g}" y="{y_px:.4g}"{attributes}>{html.escape(_printable(text))}</text>'


def _printable(text: str) -> str:
    """Without the characters that XML does not allow."""
    return re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)


def _document(height: float, label: str, parts: Iterable[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH_PX}" height="{height:.0f}" viewBox="0 0 {WIDTH_PX} {height:.0f}" '
        f'role="img" aria-label="{label}" font-family="system-ui, sans-serif" font-size="12" fill="{_INK.text}">'
        f'<rect width="100%" height="100%" rx="4" fill="{_INK.background}"/>{"".join(parts)}</svg>'
    )


def _dash(series: str, scale: float = 2.0) -> str:
    """The attribute of a path that is drawn `scale` times as large as it is seen; none for a solid line."""
    pixels = DASH_PX[DASHES.get(series, "solid")]
    return f' stroke-dasharray="{" ".join(f"{scale * part:g}" for part in pixels)}"' if pixels else ""


def _colour(series: str) -> str:
    return str(getattr(_INK, series, _INK.loss))


_BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
_TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_EVENT_SHAPES = {
    "rejected": "l6 6m0-6l-6 6",
    "run": "m0 3a3 3 0 1 0 6 0a3 3 0 1 0-6 0",
    "note": "m3 0l3 3l-3 3l-3-3z",
    "out_of_memory": "h6v6h-6z",
}
_PATTERNS = {
    "/": "M0 12L12 0", "\\": "M0 0l12 12", "x": "M0 0l12 12M0 12L12 0", "-": "M0 6h12", "|": "M6 0v12", "+": "M0 6h12M6 0v12",
    ".": "M5 6h2",
}  # fmt: skip
"""Plotly's names of shapes."""
_INK = COLOURS["light"]
