from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from amp_widgets.charts.course import COLUMNS, MARKS, METRICS, MOST_POINTS, OUTLINE_POINTS, Course
from amp_widgets.charts.series import NAN, POSITIVE_INFINITY

nan, inf = math.nan, math.inf


def columns(rows: int, **values: Any) -> dict[str, np.ndarray]:
    given = {name: np.full(rows, nan) for name in COLUMNS} | {"step": np.arange(rows)}
    return given | {name: np.asarray(value, np.float64) for name, value in values.items()}


def cut(whole: dict[str, np.ndarray], first: int, last: int) -> dict[str, np.ndarray]:
    return {name: column[first:last] for name, column in whole.items()}


def test_a_short_run_is_kept_as_it_is() -> None:
    course = Course()
    rows = columns(4, loss=[nan, 2, nan, inf], scale=[8, 8, 4, 4], skipped=[0, 0, 1, 0], peak_bytes=[10, nan, 30, 20],
                   allocated_bytes=[1, 2, 3, 4], step_s=[0.5, 0.1, inf, 0.2])  # fmt: skip
    course.append(rows["step"] * 10.0, rows)
    found = {name: (x.tolist(), y.tolist()) for name, (x, y) in course.lines.items()}
    x = [0.0, 10.0, 20.0, 30.0]
    np.testing.assert_equal(found["loss"], (x, [nan, 2.0, nan, nan]))
    assert found["not_finite"] == ([20.0, 30.0], [NAN, POSITIVE_INFINITY])  # the first was not recorded
    assert found["scale"] == (x, [3.0, 3.0, 2.0, 2.0])
    assert found["skipped"] == ([20.0], [2.0])
    np.testing.assert_equal(found["peak"], (x, [10.0, nan, 30.0, 20.0]))
    assert found["allocated"] == (x, [1.0, 2.0, 3.0, 4.0])
    np.testing.assert_equal(found["step_s"], (x, [0.5, 0.1, nan, 0.2]))
    assert set(found) == {*METRICS, *MARKS}


@pytest.mark.parametrize("smoothing", [0, 10])
def test_pieces_are_as_good_as_the_whole(smoothing: int) -> None:
    rng = np.random.default_rng(1)
    print("seed 1")
    rows = columns(900, loss=rng.normal(size=900), scale=2.0 ** rng.integers(3, 6, 900), step_s=rng.random(900),
                   skipped=rng.random(900) < 0.1)  # fmt: skip
    rows["loss"][[0, 1, 400, 401]] = nan
    whole, pieces = Course(smoothing=smoothing), Course(smoothing=smoothing)
    whole.append(rows["step"], rows)
    for first, last in ((0, 1), (1, 2), (2, 402), (402, 402), (402, 900)):
        pieces.append(rows["step"][first:last], cut(rows, first, last))
    for name in ("loss", "not_finite", "step_s", "skipped"):
        np.testing.assert_allclose(pieces.lines[name], whole.lines[name], rtol=1e-12, err_msg=name)
    if smoothing:
        assert np.nanstd(whole.lines["loss"][1]) < 0.5 * np.nanstd(rows["loss"])


def test_a_long_run_stays_bounded_and_keeps_the_extremes_of_every_stretch() -> None:
    count, piece = 200_000, 7_000
    rng = np.random.default_rng(2)
    print("seed 2")
    rows = columns(count, loss=rng.normal(size=count), peak_bytes=rng.integers(1, 1000, count), scale=np.full(count, 4.0))
    rows["loss"][123_456] = 77.0
    rows["loss"][50_000:50_400] = nan
    course = Course()
    for first in range(0, count, piece):
        course.append(rows["step"][first : first + piece], cut(rows, first, first + piece))
        assert all(x.size <= MOST_POINTS + 2 for x, _ in course.lines.values())
    x, y = course.lines["loss"]
    assert y[x == 123_456] == [77.0]
    known = ~np.isnan(y)
    np.testing.assert_array_equal(y[known], rows["loss"][x[known].astype(int)])  # nothing was made up
    width = 4 * 2 * count / OUTLINE_POINTS  # some of the narrower stretches by which it was reduced
    for first in range(0, count, 20_000):
        inside = (rows["step"] >= first) & (rows["step"] < first + 20_000)
        near = known & (x >= first - width) & (x < first + 20_000 + width)
        assert y[near].min() <= np.nanmin(rows["loss"][inside])
        assert y[near].max() >= np.nanmax(rows["loss"][inside])
    assert course.lines["scale"][0].tolist() == [0, count - 1]
    assert course.lines["not_finite"][0].min() == 50_000


def test_rows_without_a_place_are_left_out() -> None:
    course = Course()
    rows = columns(3, loss=[1, 2, 3])
    course.append(np.array([0.0, nan, 2.0]), rows)
    assert [part.tolist() for part in course.lines["loss"]] == [[0.0, 2.0], [1.0, 3.0]]
