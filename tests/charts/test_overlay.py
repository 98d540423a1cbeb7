from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

from amp_widgets.charts.course import COLUMNS, METRICS, Course
from amp_widgets.charts.distinct import line_look
from amp_widgets.charts.look import COLOURS, TOP_EDGE
from amp_widgets.charts.overlay import FEWEST_POINTS, LINE_POINTS, NAMES, OverlaidRun, overlay_figure, points_per_line

nan, inf = math.nan, math.inf
EVIL = "<img src=x onerror=alert(1)> $x$ %{y}"


def run_of(place: int = 0, name: str | None = None, *, stretch: float = 1.0, changes: Any = (), **values: Any) -> OverlaidRun:
    rows = len(next(iter(values.values()), ()))
    columns = {one: np.full(rows, nan) for one in COLUMNS} | {"step": np.arange(rows)}
    columns |= {one: np.asarray(value, np.float64) for one, value in values.items()}
    course = Course()
    course.append(columns["step"] * stretch, columns)
    return OverlaidRun(name=f"run {place}" if name is None else name, place=place, lines=course.lines, changes=changes)


def trace(figure: go.Figure, run: int, series: str, part: str = "line") -> go.Scatter:
    (found,) = [one for one in figure.data if one.meta == {"run": run, "series": series, "part": part}]
    return found


def parts(figure: go.Figure, part: str) -> list[go.Scatter]:
    return [one for one in figure.data if one.meta["part"] == part]


def texts(figure: go.Figure) -> list[str]:
    return [annotation.text for annotation in figure.layout.annotations]


def test_each_quantity_has_a_plot_with_the_line_of_each_run() -> None:
    figure = overlay_figure([
        run_of(0, loss=[3, 2, 1], scale=[4, 4, 2], peak_bytes=[10, 20, 30], allocated_bytes=[1, 2, 3], step_s=[0.1, 0.2, 0.3]),
        run_of(1, loss=[5, nan, 4, 2], scale=[1, 1, 1, 1], peak_bytes=[7, 8, 9, 6], step_s=[0.1, 0.1, 0.1, 0.1]),
    ])  # fmt: skip
    assert [list(trace(figure, run, "loss").x) for run in (0, 1)] == [[0, 1, 2], [0, 1, 2, 3]]  # of different lengths
    np.testing.assert_array_equal(trace(figure, 1, "loss").y, [5, nan, 4, 2])
    np.testing.assert_array_equal(trace(figure, 0, "scale").y, [2, 2, 1])
    assert trace(figure, 0, "scale").line.shape == "hv"
    assert list(trace(figure, 0, "allocated").y) == [1, 2, 3]
    assert list(trace(figure, 1, "step_s").y) == [0.1] * 4
    axes = [trace(figure, 1, metric).yaxis for metric in METRICS]
    assert axes == ["y", "y2", "y3", "y4", "y5"]
    assert [trace(figure, 0, metric).yaxis for metric in METRICS] == axes
    domains = [figure.layout[axis.replace("y", "yaxis")].domain for axis in axes]
    assert all(below[1] < above[0] for above, below in itertools.pairwise(domains))
    assert domains[0][1] == 1
    assert domains[-1][0] == pytest.approx(0, abs=1e-9)
    assert figure.layout.xaxis.anchor == "y5"
    assert figure.layout.xaxis.title.text == "step"
    assert texts(figure) == [f"<b>{NAMES[metric]}</b>" for metric in METRICS]


def test_a_run_keeps_its_colour_and_dash_when_others_are_not_drawn() -> None:
    for theme in ("light", "dark"):
        figure = overlay_figure([run_of(3, loss=[1, 2])], theme=theme)
        line = trace(figure, 3, "loss").line
        assert (line.color, line.dash) == line_look(3, theme)
        assert (parts(figure, "legend")[0].line.color, parts(figure, "legend")[0].line.dash) == line_look(3, theme)
        assert figure.layout.paper_bgcolor == COLOURS[theme].background


def test_time_is_in_the_unit_of_its_length() -> None:
    for longest_s, unit, seconds in ((299, "seconds", 1), (301, "minutes", 60), (4 * 3600, "hours", 3600)):
        figure = overlay_figure([run_of(0, loss=[1, 2], stretch=longest_s)], align="time")
        assert figure.layout.xaxis.title.text == f"{unit} since the run began"
        assert list(trace(figure, 0, "loss").x) == [0, longest_s / seconds]


def test_losses_that_are_not_finite_and_skipped_steps_are_marked() -> None:
    figure = overlay_figure([run_of(0, loss=[1, nan, inf, -inf, 1], scale=[8, 8, 4, 4, 4], skipped=[0, 1, 0, 0, 0])])
    marks = trace(figure, 0, "not_finite", "marks")
    assert list(marks.x) == [1, 2, 3]
    assert list(marks.y) == [TOP_EDGE] * 3
    assert list(marks.text) == ["NaN, or not recorded", "+inf", "-inf"]
    assert marks.yaxis == "y11"
    assert figure.layout.yaxis11.overlaying == "y"
    assert (list(trace(figure, 0, "skipped", "marks").x), list(trace(figure, 0, "skipped", "marks").y)) == ([1], [3])
    alone = trace(figure, 0, "loss", "lone")
    assert (list(alone.x), list(alone.y)) == ([0, 4], [1, 1])  # a line would not show them


def test_changes_are_marked_at_the_top() -> None:
    figure = overlay_figure(
        [run_of(0, loss=[1, 2], changes=[(1.0, f"autocast {EVIL}"), (nan, "nowhere")])], metrics=["peak", "loss"]
    )
    marks = trace(figure, 0, "changes", "marks")
    assert (list(marks.x), list(marks.y), marks.yaxis) == ([1], [1], "y11")
    assert "<img" not in marks.text[0]


def test_chosen_plots_only_in_their_order() -> None:
    figure = overlay_figure([run_of(0, loss=[1, 2], peak_bytes=[1, 2])], metrics=["peak", "loss"])
    assert {one.meta["series"] for one in parts(figure, "line")} == {"loss", "peak"}
    assert (trace(figure, 0, "loss").yaxis, trace(figure, 0, "peak").yaxis) == ("y", "y2")
    assert figure.layout.height < overlay_figure([run_of(0, loss=[1, 2])]).layout.height


def test_what_was_not_measured_is_said() -> None:
    figure = overlay_figure([run_of(0, loss=[1, 2]), run_of(1, loss=[1, 2])])
    assert texts(figure).count("memory was not measured") == 2
    assert "no step was timed" in texts(figure)
    assert "no loss was recorded" not in texts(figure)


def test_averaging_is_said_where_it_was_done() -> None:
    titles = texts(overlay_figure([run_of(0, loss=[1], peak_bytes=[1], step_s=[1])], smoothing=1000))
    assert [title for title in titles if "moving average over about 1,000 steps" in title] == [
        "<b>loss</b> · exponential moving average over about 1,000 steps",
        "<b>step time</b> · exponential moving average over about 1,000 steps",
    ]


def test_step_times_far_apart_are_logarithmic_and_it_is_said() -> None:
    near = overlay_figure([run_of(0, step_s=[1, 19])], metrics=["step_s"])
    far = overlay_figure([run_of(0, step_s=[1, 2]), run_of(1, step_s=[0.01, 0.02])], metrics=["step_s"])
    assert near.layout.yaxis.type is None
    assert far.layout.yaxis.type == "log"
    # Plotly writes those between powers of ten without the suffix: "500m", and beside it "100ms"
    alias = far.layout.yaxis.labelalias
    assert [alias[label] for label in ("500m", "20µ", "2", "300", "5k")] == ["500ms", "20µs", "2s", "300s", "5ks"]
    assert near.layout.yaxis.labelalias is None
    assert "<b>step time</b> · logarithmic" in texts(far)


def test_names_are_shown_as_they_are_written() -> None:
    figure = overlay_figure([run_of(0, EVIL, loss=[1, 2]), run_of(1, "x" * 500, loss=[1, nan])])
    for one in figure.data:
        assert "<img" not in (one.name or "")
        assert "$" not in (one.name or "")
        assert EVIL not in (one.hovertemplate or "")
        assert len(one.name) < 60


def test_the_legend_has_an_entry_a_run_and_may_be_left_out() -> None:
    runs = [run_of(place, loss=[1, 2]) for place in range(12)]
    with_legend, without = overlay_figure(runs), overlay_figure(runs, legend=False)
    assert [one.name for one in with_legend.data if one.showlegend] == [f"run {place}" for place in range(12)]
    assert parts(without, "legend") == []
    assert without.layout.height < with_legend.layout.height
    assert len({(one.line.color, one.line.dash) for one in parts(with_legend, "legend")}) == 12


def test_long_lines_keep_their_extremes() -> None:
    count = 100_000
    rng = np.random.default_rng(3)
    print("seed 3")
    loss = rng.normal(size=count)
    loss[[7, 31_416, 99_990]] = [50, -60, nan]
    figure = overlay_figure([run_of(0, loss=loss)], limit=500)
    line = trace(figure, 0, "loss")
    assert len(line.x) <= 2 * 500
    assert np.nanmax(line.y) == 50
    assert np.nanmin(line.y) == -60
    assert list(trace(figure, 0, "not_finite", "marks").x) == [99_990]


def test_many_lines_have_fewer_points_each() -> None:
    assert points_per_line(1) == points_per_line(10) == LINE_POINTS
    assert points_per_line(60) == 1000
    assert points_per_line(10_000) == FEWEST_POINTS
    assert points_per_line(0) == LINE_POINTS


def test_runs_without_a_step() -> None:
    figure = overlay_figure([run_of(0, loss=[]), run_of(1, loss=[])], align="time")
    assert "no loss was recorded" in texts(figure)
    assert figure.layout.xaxis.title.text == "seconds since the run began"
