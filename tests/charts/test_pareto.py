"""Sets of layers on the curve of peak against time: points, the curve, the budget, and what was measured."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from amp_widgets.charts import pareto
from amp_widgets.charts.label_places import Places, common, label_box, label_px
from amp_widgets.charts.pareto import pareto_figure, pareto_sentence

EVIL = "<img src=x onerror=1> %{x} $a$"


@dataclasses.dataclass(frozen=True)
class Point:
    label: str
    layers: tuple[str, ...]
    peak_bytes: float
    extra_s: float
    predicted: bool = True


@dataclasses.dataclass(frozen=True)
class Measured:
    layers: tuple[str, ...]
    peak_bytes: float
    extra_s: float
    steps: int = 4


NONE = Point("none", (), 125e6, 0.0)
ALL = Point("all", ("a", "b", "c", "d"), 43e6, 0.05)
SECOND = Point("every second", ("a", "c"), 80e6, 0.03)
YOURS = Point("yours", (), 125e6, 0.0)
PLAN = Point("plan", ("a", "b"), 60e6, 0.02)
CURVE = Point("curve", ("b",), 100e6, 0.01, predicted=False)
WORSE = Point("curve", ("d",), 110e6, 0.012)
POINTS = (NONE, ALL, SECOND, YOURS, PLAN, CURVE, WORSE)
BUDGET = 61.4e6


def traces(figure, part: str) -> list:
    return [trace for trace in figure.data if trace.meta["part"] == part]


def test_the_curve_goes_through_what_nothing_beats() -> None:
    [curve] = traces(pareto_figure(POINTS, budget_bytes=BUDGET), "curve")
    assert list(curve.x) == pytest.approx([0, 10, 20, 50])
    assert list(curve.y) == [125e6, 100e6, 60e6, 43e6]
    assert curve.line.shape == "hv"  # between two budgets, what the cheaper set needs
    assert "an estimate" in curve.text[1]
    assert "60.0 MB, predicted" in curve.text[2]


def test_points_have_their_labels_and_those_of_one_set_are_one() -> None:
    found = {tuple(trace.meta["labels"]): trace for trace in traces(pareto_figure(POINTS, budget_bytes=BUDGET), "point")}
    assert set(found) == {("plan",), ("yours", "none"), ("all",), ("every second",)}
    assert found[("yours", "none")].text == ("yours, none",)
    assert found[("plan",)].text == ("<b>plan</b>",)
    symbols = [trace.marker.symbol for trace in found.values()]
    assert len(set(symbols)) == 4
    assert found[("plan",)].x == (pytest.approx(20),)
    assert found[("plan",)].y == (60e6,)
    assert traces(pareto_figure(POINTS, budget_bytes=BUDGET), "point")[-1].meta["labels"] == ["plan"]  # on top


def test_the_order_of_layers_does_not_tell_sets_apart() -> None:
    same = dataclasses.replace(YOURS, layers=("b", "a"), peak_bytes=60e6, extra_s=0.02)
    found = [trace.meta["labels"] for trace in traces(pareto_figure((NONE, PLAN, same), budget_bytes=BUDGET), "point")]
    assert ["plan", "yours"] in found


def test_the_budget_is_a_line_with_its_text() -> None:
    figure = pareto_figure(POINTS, budget_bytes=BUDGET)
    [line] = figure.layout.shapes
    assert (line.y0, line.y1) == (BUDGET, BUDGET)
    assert [note.text for note in figure.layout.annotations] == ["budget 61.4 MB"]
    low, high = pareto_figure(POINTS, budget_bytes=8e12).layout.yaxis.range
    assert (low, high <= 1.5 * 125e6 * pareto.HEADROOM) == (0, True)  # a huge one does not squeeze the points


def test_what_was_measured_is_joined_to_what_was_predicted() -> None:
    measured = (Measured(("b", "a"), 59.9e6, 0.025), Measured((), 124e6, math.nan, 1), Measured(("z",), 1e6, 0.0))
    figure = pareto_figure(POINTS, budget_bytes=BUDGET, measured=measured)
    plan, none = traces(figure, "measured")
    assert (list(plan.x), list(plan.y)) == (pytest.approx([25, 20]), [59.9e6, 60e6])
    assert (plan.marker.symbol[0], plan.marker.size[1]) == ("x-thin-open", 0)
    assert "60.0 MB" in plan.hovertemplate[0]
    assert "4 steps of the run" in plan.hovertemplate[0]
    assert (list(none.x), list(none.y)) == ([0, 0], [124e6, 125e6])
    assert "its extra time is not known" in none.hovertemplate[0]
    assert [trace.showlegend for trace in (plan, none)] == [True, False]
    assert traces(pareto_figure(POINTS, budget_bytes=BUDGET, measured=[Measured((), math.nan, 0.0)]), "measured") == []


def test_a_measured_point_is_in_sight() -> None:
    figure = pareto_figure(POINTS, budget_bytes=BUDGET, measured=[Measured(("a", "b"), 300e6, -0.04)])
    assert figure.layout.xaxis.range[0] < -40
    assert figure.layout.yaxis.range[1] > 300e6


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_both_themes_have_the_same_points(theme: str) -> None:
    light, other = (pareto_figure(POINTS, budget_bytes=BUDGET, theme=one) for one in ("light", theme))
    assert [(trace.x, trace.y, trace.meta) for trace in light.data] == [(trace.x, trace.y, trace.meta) for trace in other.data]
    assert (light.layout.paper_bgcolor == other.layout.paper_bgcolor) == (theme == "light")


def test_names_are_text() -> None:
    point = Point(EVIL, (EVIL,), 50e6, 0.01)
    figure = pareto_figure((NONE, point), budget_bytes=BUDGET, title=EVIL, measured=[Measured((EVIL,), 5e7, 0.0)])
    figure.for_each_trace(lambda trace: trace.update(meta=None))  # not shown
    written = figure.to_json()
    assert "<img" not in written
    assert "$a$" not in written
    assert "%{" not in "".join(str(trace.hovertemplate) for trace in figure.data[1:])  # the first is the curve, of texts


def test_the_sentence() -> None:
    assert pareto_sentence(POINTS, budget_bytes=BUDGET) == "The plan: 60.0 MB for 20 ms more a step; budget 61.4 MB"
    assert pareto_sentence(POINTS, budget_bytes=50e6).startswith(
        "The plan: 60.0 MB for 20 ms more a step, which is above; budget"
    )
    assert pareto_sentence((NONE,), budget_bytes=BUDGET) == "Peak memory and extra time, with a budget of 61.4 MB"
    figure = pareto_figure(POINTS, budget_bytes=BUDGET)
    assert "The plan: 60.0 MB" in figure.layout.title.text
    assert pareto_figure(POINTS, budget_bytes=BUDGET, title="").layout.title.text is None


@pytest.mark.parametrize("points", [(), (NONE,), (Point("none", (), math.nan, math.nan),)], ids=["none", "one", "not known"])
def test_few_points(points: tuple[Point, ...]) -> None:
    figure = pareto_figure(points, budget_bytes=BUDGET)
    assert all(math.isfinite(edge) for axis in (figure.layout.xaxis, figure.layout.yaxis) for edge in axis.range)
    assert figure.layout.xaxis.range[0] < figure.layout.xaxis.range[1]


def test_labels_cover_neither_each_other_nor_leave_the_plot() -> None:
    places = Places(400, 300, 9)
    at = [(200.0 + 2 * i, 150.0) for i in range(6)] + [(1.0, 1.0), (399.0, 299.0)]
    for x, y in at:
        places.take_point(x, y)
    boxes = [label_box(x, y, places.put(x, y, 60), 60, 9) for x, y in at]
    assert sum(common(one, other) for one, other in itertools.combinations(boxes[-2:] + boxes[:4], 2)) == 0
    for left, top, right, bottom in boxes[-2:]:
        assert left >= 0
        assert top >= 0
        assert right <= 400
        assert bottom <= 300


@pytest.mark.parametrize("width_px", [500, 640, 760, 1200])
@pytest.mark.parametrize("language", ["en", "ko"])
@pytest.mark.parametrize(
    "points",
    [
        (NONE, ALL, SECOND, dataclasses.replace(PLAN, layers=(), peak_bytes=125e6, extra_s=0.0), CURVE),
        (NONE, ALL, SECOND, dataclasses.replace(NONE, label="√n"), CURVE),
        POINTS,
    ],
    ids=["nothing is to be done", "one block", "a plan"],
)
def test_no_label_crosses_an_axis_however_wide_the_page_is(
    points: tuple[Point, ...], language: str, width_px: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("amp_widgets.language._chosen", language)
    figure = pareto_figure(points, budget_bytes=BUDGET)
    margin = figure.layout.margin
    low, high = figure.layout.xaxis.range
    top = figure.layout.yaxis.range[1]
    across, down = width_px - margin.l - margin.r, figure.layout.height - margin.t - margin.b
    for trace in traces(figure, "point"):
        x, y = (trace.x[0] - low) / (high - low) * across, (1 - trace.y[0] / top) * down
        bold = trace.text[0].startswith("<b>")
        left, _, right, _ = label_box(x, y, trace.textposition, label_px(trace.name, bold=bold), pareto._GAP_PX)
        assert left >= 0, (trace.name, trace.textposition)
        assert right <= across + margin.r, (trace.name, trace.textposition)


def test_a_label_is_not_written_over_the_curve() -> None:
    points = (NONE, ALL, SECOND, dataclasses.replace(PLAN, layers=(), peak_bytes=125e6, extra_s=0.0), CURVE)
    [plan, *_] = [one for one in traces(pareto_figure(points, budget_bytes=BUDGET), "point") if "plan" in one.meta["labels"]]
    assert plan.name == "plan, none"
    assert plan.textposition in ("top right", "bottom right")  # right of it is the curve, and left of it the axis
