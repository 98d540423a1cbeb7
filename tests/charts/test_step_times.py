"""How long steps took, as a figure."""

from __future__ import annotations

import numpy as np
import pytest

from amp_widgets.charts.look import Theme
from amp_widgets.charts.step_times import step_time_figure


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_long_first_step_is_cut_off_and_said(theme: Theme) -> None:
    step_s = np.full(1000, 0.01)
    step_s[0], step_s[500] = 2.0, np.nan
    figure = step_time_figure(np.arange(1000), step_s, theme=theme)
    assert figure.layout.yaxis.range == (0, 0.02)
    assert "up to 2 s" in figure.layout.title.text
    line = figure.data[0]
    assert np.array_equal(line.y, step_s, equal_nan=True)


def test_lone_points_have_a_mark_and_what_was_not_measured_is_said() -> None:
    figure = step_time_figure(np.arange(5), np.array([np.nan, 0.1, np.nan, np.inf, 0.2]))
    assert np.array_equal(figure.data[1].x, [1, 4])
    assert not figure.layout.annotations
    assert step_time_figure(np.arange(2), np.full(2, np.nan)).layout.annotations[0].text == "not measured"


def test_a_long_run_is_reduced_with_its_extremes() -> None:
    step_s = 0.01 + 0.001 * np.random.default_rng(0).random(50_000)
    step_s[12_345] = 0.015
    line = step_time_figure(np.arange(50_000), step_s, limit=1000).data[0]
    assert len(line.x) <= 1000
    assert line.y.max() == 0.015
    assert line.y.min() == step_s.min()
