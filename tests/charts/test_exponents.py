from __future__ import annotations

import itertools
import math

import numpy as np
import plotly.graph_objects as go
import pytest

from amp_widgets.analysis.gradients import GradientRange
from amp_widgets.charts.exponents import ZONE_COLOURS, exponent_figure, exponent_sentence
from amp_widgets.core.gradient_counts import GradientCounts
from tests.charts.gradient_step import gpt_range, row

EMPTY = GradientRange.of(GradientCounts(step=0, scale=1.0, rows=()))


def shares(figure: go.Figure) -> dict[str, float]:
    """By zone of fp16, from what is drawn."""
    return {trace.meta["zone"]: float(np.sum(trace.y)) / 100 for trace in figure.data}


@pytest.mark.parametrize("scale", [1.0, 2.0**10, 2.0**24])
def test_what_is_drawn_is_what_is_counted(scale: float) -> None:
    found = gpt_range()
    drawn, counted = shares(exponent_figure(found, scale=scale)), found.shares(scale)
    for zone, share in zip(
        ("zero", "sub", "normal", "over"), (counted.flushed, counted.subnormal, counted.normal, counted.overflow), strict=True
    ):
        assert drawn.get(zone, 0.0) == pytest.approx(share, abs=0.001), zone


def test_a_scale_moves_the_bars_and_leaves_the_zones() -> None:
    found = gpt_range()
    one, other = exponent_figure(found), exponent_figure(found, scale=2.0**5)
    bars = [sorted(itertools.chain.from_iterable(trace.x for trace in figure.data)) for figure in (one, other)]
    assert np.allclose(np.array(bars[1]) - np.array(bars[0]), 5.0)
    lines = [[shape.x0 for shape in figure.layout.shapes if shape.type == "line"] for figure in (one, other)]
    assert lines == [[-25, -14, 16]] * 2
    assert list(one.layout.xaxis.range) == [-34, 22] or one.layout.xaxis.range[0] < -34


def test_zones_of_both_formats_are_named() -> None:
    texts = [note.text for note in exponent_figure(gpt_range()).layout.annotations]
    assert {"fp16", "bf16", "normal", "subnormal", "overflow"} <= set(texts)
    assert sum(text == "becomes zero" or text == "zero" for text in texts) == 1  # bf16's is far outside


def test_far_away_gradients_are_shown_too() -> None:
    tiny = GradientRange.of(GradientCounts(step=0, scale=1.0, rows=(row("a", -100), row("b", 40))))
    low, high = exponent_figure(tiny).layout.xaxis.range
    assert low < -100
    assert high > 40
    far = exponent_figure(tiny, scale=2.0**-60)
    assert far.layout.xaxis.range[0] >= -150


def test_layers_that_are_chosen() -> None:
    found = gpt_range()
    head = exponent_figure(found, layers=["head"])
    assert sum(float(text[2].replace(",", "")) for trace in head.data for text in trace.customdata) == pytest.approx(
        65_536, rel=0.01
    )
    assert "head" in head.layout.title.text
    assert "19 layers" in exponent_figure(found).layout.title.text


def test_nothing_to_draw() -> None:
    for found in (EMPTY, GradientRange.of(GradientCounts(step=0, scale=1.0, rows=(row("a", 0, zeros=0, infs=0),)))):
        exponent_figure(found)
    figure = exponent_figure(EMPTY)
    assert not figure.data
    assert any("no gradient" in note.text for note in figure.layout.annotations)
    assert figure.layout.xaxis.range == (-34, 22)


def test_words() -> None:
    assert exponent_sentence(gpt_range(scale=2.0**10)) == "Gradients of step 240, 19 layers, at loss scale 2^10"
    assert exponent_sentence(gpt_range(), 2.0**16).endswith("at loss scale 1, if it were 2^16")
    assert exponent_figure(gpt_range(), title="").layout.title.text is None
    evil = exponent_figure(gpt_range(blocks=1), layers=["<b>evil</b>"], title="<b>$x$")
    assert "&lt;b>&#36;x&#36;" in evil.layout.title.text


def test_both_themes_are_alike_but_for_colours() -> None:
    light, dark = (exponent_figure(gpt_range(), theme=theme).to_dict() for theme in ("light", "dark"))
    assert light["layout"]["paper_bgcolor"] != dark["layout"]["paper_bgcolor"]
    assert [trace["name"] for trace in light["data"]] == [trace["name"] for trace in dark["data"]]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_zones_differ_in_lightness_from_the_background(theme: str) -> None:
    background = (1.0, 1.0, 1.0) if theme == "light" else (17 / 255,) * 3
    for colour in ZONE_COLOURS[theme]:  # type: ignore[index]
        assert _contrast(tuple(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)), background) > 2


def _contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    def luminance(colour: tuple[float, ...]) -> float:
        parts = [c / 12.92 if c <= 0.03928 else math.pow((c + 0.055) / 1.055, 2.4) for c in colour]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
