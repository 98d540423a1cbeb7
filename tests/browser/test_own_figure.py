"""Figures that a cell shows by themselves: in the notebook's look, light and dark, as they are and as the user made them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Locator

    from conftest import OpenNotebook

pytestmark = pytest.mark.browser

CELL = """
import plotly.graph_objects as go
import amp_widgets as aw
from amp_widgets.charts.mountain import mountain_figure
from tests.charts.gpt_step import gpt_step

own = go.Figure(
    [go.Scatter(y=[3, 1, 2], name="a loss"), go.Scatter(y=[2, 2, 2], name="a line with a rather long name")],
    {"xaxis_title": "step", "yaxis_title": "loss", "height": 320, "margin": {"t": 20, "b": 50}},
)
def to_figure(theme="light"):
    return mountain_figure((gpt_step(),), theme=theme)
display(aw.figure_view(own), aw.figure_view(to_figure))
"""
COLOURS = """root => {
    const plot = root.querySelector('.js-plotly-plot');
    const fill = (name) => getComputedStyle(plot.querySelector(name)).fill;
    return {
        behind: getComputedStyle(plot.querySelector('.main-svg')).backgroundColor, page: getComputedStyle(document.body)
            .getPropertyValue('--jp-layout-color0').trim(),
        text: fill('.xtick text'), line: [...plot.querySelectorAll('.js-line')].map((one) => getComputedStyle(one).stroke),
        legend: [...plot.querySelectorAll('.legendtext')].map((one) => one.textContent),
        width: plot._fullLayout.width, right: Math.max(...[...plot.querySelectorAll('.legend')].map((one) =>
            one.getBoundingClientRect().right - plot.getBoundingClientRect().left)),
    };
}"""


def brightness(colour: str) -> float:
    if colour.startswith("#"):
        digits = colour[1:] if len(colour) == 7 else "".join(2 * one for one in colour[1:])
        return int(digits[:2], 16) / 255
    return int(colour.partition("(")[2].partition(",")[0]) / 255


def colours(figure: Locator) -> dict[str, Any]:
    found: dict[str, Any] = figure.evaluate(COLOURS)
    return found


def is_dark(figure: Locator) -> bool:
    return brightness(colours(figure)["behind"]) < 0.1


def test_figures_look_as_the_notebook_does(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([CELL], height=2600)
    notebook.run_and_wait(0)
    figures = notebook.output(0).locator(".amp-figure")
    notebook.wait_until(lambda: figures.locator(".main-svg .xtick text").count() > 4, what="there are no figures")
    own, ours = figures.nth(0), figures.nth(1)
    light = colours(own)
    assert brightness(light["behind"]) > 0.9
    assert light["legend"] == ["a loss", "a line with a rather long name"]
    assert light["right"] <= light["width"]
    notebook.screenshot("own-figure-light", notebook.output(0))

    notebook.set_theme("dark")
    for figure in (own, ours):
        notebook.wait_until(functools.partial(is_dark, figure), what="a figure stays light")
        dark = colours(figure)
        assert brightness(dark["behind"]) == pytest.approx(brightness(dark["page"]), abs=0.01)
        assert brightness(dark["text"]) > 0.6
    assert colours(own)["line"] != light["line"]
    notebook.screenshot("own-figure-dark", notebook.output(0))
    assert own.get_attribute("aria-label") == "vertical: loss, horizontal: step: a loss, a line with a rather long name"

    notebook.reopen()
    notebook.wait_until(lambda: figures.locator(".main-svg .xtick text").count() > 4, what="a figure does not come back")
