"""Every figure is in the language in force: what is in no brackets of a language of its own has to be data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

from amp_widgets import language
from amp_widgets.charts.comparison import comparison_figure
from amp_widgets.charts.mountain import mountain_figure
from amp_widgets.charts.overlay import overlay_figure
from amp_widgets.charts.pareto import pareto_figure
from amp_widgets.charts.step_times import step_time_figure
from tests.bracket_language import bracketed, words_of
from tests.charts.gpt_step import dead_step, gpt_step
from tests.charts.test_comparison import rows
from tests.charts.test_figures import figure as training
from tests.charts.test_overlay import run_of
from tests.charts.test_pareto import BUDGET, POINTS

LAYERS = ("norm1", "norm2", "attention", "attent", "mlp", "fc1", "fc2")
SAID = ("text", "name", "hovertext", "hovertemplate", "title")


def overlaid() -> go.Figure:
    return overlay_figure(
        [run_of(0, loss=[3, 2], scale=[4, 2], peak_bytes=[10, 20], step_s=[0.1, 0.2], skipped=[0, 1]), run_of(1, loss=[5, 1])]
    )


FIGURES: dict[str, Callable[[], go.Figure]] = {
    "comparison": lambda: comparison_figure(rows()),
    "mountain": lambda: mountain_figure([gpt_step(), gpt_step("fp32 + 2 layers checkpointed", checkpointed=(0, 1))]),
    "dead": lambda: mountain_figure([dead_step(limit_bytes=40e6).profile]),
    "overlay": overlaid,
    "pareto": lambda: pareto_figure(POINTS, budget_bytes=BUDGET),
    "step time": lambda: step_time_figure(np.arange(3), np.array([0.1, 0.2, 0.1])),
    "training": lambda: training(loss=[3, 2], scale=[4, 2], skipped=[0, 1], peak_bytes=[10, 20]),
}


def said(part: Any, name: str = "") -> Iterator[str]:
    """Every text of a figure that is shown."""
    if isinstance(part, str):
        if name in SAID:
            yield part
    elif isinstance(part, dict):
        for key, value in part.items():
            if key not in ("meta", "template"):
                yield from said(value, "" if key == "name" and part.keys() & {"x0", "showarrow"} else key)  # for programs
    elif isinstance(part, (list, tuple)):
        for one in part:
            yield from said(one, name)


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_says_nothing_in_english(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(language._catalogues, "en", bracketed())
    made = FIGURES[name]().to_plotly_json()
    texts = [*said(made["data"]), *said(made["layout"])]
    found = {text: words for text in texts if (words := words_of(text, LAYERS))}
    assert found == {}
    assert any("⟦" in text for text in texts)
