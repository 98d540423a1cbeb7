"""Nothing in a chart is told by colour alone: what is drawn side by side differs in dash, pattern or symbol, too."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from amp_widgets.charts import look
from amp_widgets.charts.comparison import FORMAT_COLOURS, comparison_figure
from amp_widgets.charts.exponents import FP16_ZONES, ZONE_COLOURS, ZONE_PATTERNS, exponent_figure
from amp_widgets.charts.look import COLOURS, PLOTS, Theme
from amp_widgets.charts.mountain import KIND_COLOURS, KIND_PATTERNS, mountain_figure
from tests.charts.gpt_step import gpt_step
from tests.charts.gradient_step import gpt_range
from tests.charts.test_comparison import rows
from tests.charts.test_distinct import SIGHT, contrast, oklab

THEMES: tuple[Theme, ...] = ("light", "dark")
TOLD_APART = 0.055
"""In OKLab, of which 0.02 is just noticeable."""


def too_close(colours: dict[str, str], cues: dict[str, str]) -> list[tuple[str, str, str]]:
    """Pairs that somebody cannot tell apart, by colour or by another cue."""
    return [
        (one, other, sight)
        for one, other in itertools.combinations(colours, 2)
        for sight in SIGHT
        if np.linalg.norm(oklab(colours[one], sight) - oklab(colours[other], sight)) < TOLD_APART and cues[one] == cues[other]
    ]


def test_a_pair_of_the_same_look_is_found() -> None:
    assert too_close({"red": "#a00000", "green": "#5a5a00"}, {"red": "", "green": ""}) != []
    assert too_close({"red": "#a00000", "green": "#5a5a00"}, {"red": "solid", "green": "dot"}) == []
    assert too_close({"red": "#a00000", "blue": "#0072b2"}, {"red": "", "blue": ""}) == []


@pytest.mark.parametrize("theme", THEMES)
def test_lines_of_a_plot_have_a_dash_each(theme: Theme) -> None:
    drawn = {trace["meta"]["series"]: trace for trace in look.traces(COLOURS[theme]) if trace["meta"]["part"] == "line"}
    marks = {trace["meta"]["series"]: trace["mode"] for trace in look.traces(COLOURS[theme]) if trace["meta"]["part"] == "marks"}
    for plot in PLOTS.values():
        lines = [name for name in plot.series if name in drawn]
        assert all(marks[name] == "markers" for name in plot.series if name not in drawn)
        cues = {name: drawn[name]["line"].get("dash", "solid") for name in lines}
        assert len(set(cues.values())) == len(lines), plot
        assert too_close({name: drawn[name]["line"]["color"] for name in lines}, cues) == []


@pytest.mark.parametrize("theme", THEMES)
def test_areas_of_a_mountain_have_a_pattern_each(theme: Theme) -> None:
    assert len(set(KIND_PATTERNS.values())) == len(KIND_PATTERNS) == len(KIND_COLOURS[theme])
    assert too_close(KIND_COLOURS[theme], KIND_PATTERNS) == []
    areas = [trace for trace in mountain_figure([gpt_step()], theme=theme).data if trace.stackgroup]
    assert {area.meta["part"]: area.fillpattern.shape for area in areas} == {
        area.meta["part"]: KIND_PATTERNS[area.meta["part"]] for area in areas
    }
    assert len(areas) >= 4


@pytest.mark.parametrize("theme", THEMES)
def test_bars_of_a_zone_have_a_pattern_of_their_own(theme: Theme) -> None:
    assert len(set(ZONE_PATTERNS)) == len(FP16_ZONES)
    names = [zone.short for zone in FP16_ZONES]
    colours, cues = dict(zip(names, ZONE_COLOURS[theme], strict=True)), dict(zip(names, ZONE_PATTERNS, strict=True))
    assert too_close(colours, cues) == []
    for scale in (1.0, 2.0**30):
        bars = exponent_figure(gpt_range(), scale=scale, theme=theme).data
        assert len(bars) >= 2
        assert all(bar.marker.pattern.shape == cues[bar.meta["zone"]] for bar in bars)


@pytest.mark.parametrize("theme", THEMES)
def test_colours_of_formats_stand_out_and_points_say_their_format(theme: Theme) -> None:
    colours = FORMAT_COLOURS[theme]
    assert min(contrast(colour, COLOURS[theme].background) for colour in colours.values()) >= 3
    points = [trace for trace in comparison_figure(rows(), theme=theme).data if trace.mode == "markers+text"]
    assert points
    assert all(trace.meta["format"] in trace.text[0] for trace in points)


@pytest.mark.parametrize("theme", THEMES)
def test_lines_stand_out_and_text_is_read(theme: Theme) -> None:
    colours = COLOURS[theme]
    for name in ("loss", "scale", "alarm", "allocated", "peak", "reserved", "flag"):
        assert contrast(getattr(colours, name), colours.background) >= 3, name
    assert contrast(colours.text, colours.background) >= 7
    assert contrast(colours.muted, colours.background) >= 4.5
