"""Any Plotly figure in the look of the notebook."""

from __future__ import annotations

import json
from typing import Any

import plotly.graph_objects as go
import plotly.io as pio
import pytest

import amp_widgets as aw
from amp_widgets.charts.distinct import LINE_COLOURS
from amp_widgets.charts.look import COLOURS, Theme
from amp_widgets.charts.own_figure import HEIGHT_PX, figure_label, in_theme
from amp_widgets.errors import AmpWidgetsError
from tests.charts.test_figure_view import in_dark

THEMES: tuple[Theme, Theme] = ("light", "dark")


def plain(**layout: Any) -> go.Figure:
    return go.Figure([go.Scatter(y=[1, 3, 2], name="loss"), go.Scatter(y=[2, 2, 2], line_color="#123456")], layout)


@pytest.mark.parametrize("theme", THEMES)
def test_what_says_nothing_of_colours_gets_those_of_the_theme(theme: Theme) -> None:
    figure = plain(xaxis_title="step", margin={"t": 20})
    before = figure.to_json()
    made = in_theme(figure, theme)
    colours = COLOURS[theme]
    assert (made.layout.paper_bgcolor, made.layout.plot_bgcolor) == (colours.background, colours.background)
    assert made.layout.font.color == colours.text
    assert made.layout.template.layout.colorway == LINE_COLOURS[theme]
    assert made.layout.template.layout.yaxis.gridcolor == colours.grid
    assert made.layout.height == HEIGHT_PX
    assert [trace.line.color for trace in made.data] == [None, "#123456"]
    assert (made.layout.xaxis.title.text, made.layout.margin.t) == ("step", 20)
    assert figure.to_json() == before
    assert "colorway" in figure.layout.template.layout.to_plotly_json()
    assert pio.templates["plotly_dark"].layout.colorway != LINE_COLOURS["dark"]  # Plotly's own is as it was


def test_what_the_figure_says_is_kept() -> None:
    made = in_theme(plain(template="ggplot2", height=200, font={"size": 20}, hoverlabel={"font": {"size": 9}}), "dark")
    assert made.layout.template.layout.colorway == pio.templates["ggplot2"].layout.colorway
    assert (made.layout.height, made.layout.font.size, made.layout.hoverlabel.font.size) == (200, 20, 9)


def test_a_view_of_a_figure_has_both_themes() -> None:
    figure = plain(title="Loss <b>of</b> a &lt;run&gt;")
    view = aw.figure_view(figure)
    assert {key: view.figure[key] for key in ("data", "layout")} == json.loads(in_theme(figure, "light").to_json())
    assert in_dark(view.figure) == json.loads(in_theme(figure, "dark").to_json())
    assert view.figure["own"] is True
    assert view.label == "Loss of a <run>: loss"
    view.close()


def test_a_view_of_what_makes_a_figure_asks_it_for_each_theme() -> None:
    asked: list[tuple[Any, ...]] = []

    def to_figure(before: int, *, title: str, theme: Theme) -> go.Figure:
        asked.append((before, title, theme))
        return go.Figure(layout={"title": title, "font": {"color": COLOURS[theme].text}})

    view = aw.figure_view(to_figure, 3, title="A peak")
    assert {*asked} == {(3, "A peak", "light"), (3, "A peak", "dark")}
    assert in_dark(view.figure)["layout"]["font"]["color"] == COLOURS["dark"].text
    assert "own" not in view.figure
    assert view.label == "A peak"
    view.close()


@pytest.mark.parametrize(
    ("layout", "label"),
    [
        ({}, "loss"),
        ({"xaxis_title": "step", "yaxis_title": "peak (MB)"}, "vertical: peak (MB), horizontal: step: loss"),
        ({"title": "One"}, "One: loss"),
    ],
)
def test_a_figure_in_words(layout: dict[str, Any], label: str) -> None:
    assert figure_label(plain(**layout)) == label


def test_a_figure_of_nothing_in_words() -> None:
    assert figure_label(go.Figure()) == "Figure"


@pytest.mark.parametrize("given", [3, None, [1, 2], lambda theme: theme])
def test_what_is_no_figure_is_refused(given: Any) -> None:
    with pytest.raises(AmpWidgetsError, match=r"figure_view: got .*, expected a plotly Figure"):
        aw.figure_view(given)
