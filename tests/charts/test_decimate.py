from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from amp_widgets.charts.decimate import Floats, decimated, evened, level_parts_removed, without_long_gaps
from amp_widgets.errors import MissingExtraError

NAN = math.nan
LIMIT = 16

lines = hnp.arrays(
    np.float64,
    st.integers(0, 400),
    elements=st.one_of(st.just(NAN), st.floats(-1e6, 1e6), st.sampled_from([0.0, 1e300, -1e300])),
)


@pytest.mark.parametrize("reduce", [decimated, evened])
@given(y=lines)
@settings(max_examples=150, deadline=None)
def test_bounded_in_order_and_extremes_kept(reduce, y: np.ndarray) -> None:
    x = np.arange(y.size, dtype=np.float64) * 3
    new_x, new_y = reduce(x, y, LIMIT)
    known, new_known = ~np.isnan(y), ~np.isnan(new_y)
    assert new_x.shape == new_y.shape
    assert new_known.sum() <= LIMIT
    assert new_x.size <= 2 * LIMIT
    assert np.all(np.diff(new_x) > 0)
    np.testing.assert_array_equal(new_y[new_known], y[(new_x[new_known] / 3).astype(int)])  # points are points of the line
    if known.any():
        assert new_y[new_known].min() == y[known].min()
        assert new_y[new_known].max() == y[known].max()
        assert new_x[new_known][[0, -1]].tolist() == x[known][[0, -1]].tolist()
        assert np.isnan(new_y[-1]) == np.isnan(y[-1])
    else:
        assert new_x.size == 0


@given(y=lines)
@settings(max_examples=50, deadline=None)
def test_a_line_that_is_short_enough_keeps_every_point(y: np.ndarray) -> None:
    x = np.arange(y.size, dtype=np.float64)
    new_x, new_y = decimated(x, y, 1000)
    known = ~np.isnan(new_y)
    np.testing.assert_array_equal(new_x[known], x[~np.isnan(y)])
    np.testing.assert_array_equal(new_y[known], y[~np.isnan(y)])


def test_a_wide_gap_stays_and_a_narrow_one_is_closed() -> None:
    y = np.sin(np.arange(10_000.0))
    y[3000:4000] = NAN
    y[7000] = NAN
    x, new_y = decimated(np.arange(10_000.0), y, 100)
    assert np.isnan(new_y).sum() == 1
    at = int(np.flatnonzero(np.isnan(new_y))[0])
    assert x[at] == 3000
    assert x[at - 1] < 3000
    assert x[at + 1] >= 4000


def test_single_spikes_survive() -> None:
    rng = np.random.default_rng(0)
    y = rng.standard_normal(1_000_000)
    y[[123_456, 654_321]] = 50.0, -50.0
    for reduce in (decimated, evened):
        x, new_y = reduce(np.arange(1_000_000.0), y, 2000)
        assert x.size <= 2000
        assert {123_456.0, 654_321.0} <= set(x.tolist())
        assert sorted(new_y)[0] == -50
        assert sorted(new_y)[-1] == 50


def test_evening_a_growing_line_again_and_again_keeps_it_even_and_keeps_every_stretchs_extremes() -> None:
    rng = np.random.default_rng(1)
    whole = rng.standard_normal(200_000)
    x: Floats = np.empty(0)
    y: Floats = np.empty(0)
    for start in range(0, whole.size, 5000):
        new = np.arange(start, start + 5000)
        x, y = evened(np.concatenate([x, new]), np.concatenate([y, whole[new]]), 2000)
    counts, _ = np.histogram(x, 10, (0, whole.size))
    assert counts.max() < 1.5 * counts.min()
    for low in range(0, whole.size, 20_000):
        inside = (x >= low) & (x < low + 20_000)
        assert y[inside].max() == whole[low : low + 20_000].max()
        assert y[inside].min() == whole[low : low + 20_000].min()


def test_steps_that_do_not_ascend_are_no_error() -> None:
    x = np.concatenate([np.arange(500.0), np.arange(500.0)])
    new_x, _ = decimated(x, np.arange(1000.0), LIMIT)
    assert new_x.size <= LIMIT


def test_of_a_level_line_the_changes_stay_all() -> None:
    y = np.repeat([1.0, 2.0, NAN, 2.0, 1.0], 100)
    x, new_y = level_parts_removed(np.arange(500.0), y)
    assert x.tolist() == [0, 99, 100, 199, 200, 300, 399, 400, 499]
    np.testing.assert_array_equal(new_y, [1, 1, 2, 2, NAN, 2, 2, 1, 1])
    for short in ([], [1.0], [1.0, 1.0]):
        np.testing.assert_array_equal(level_parts_removed(np.arange(float(len(short))), np.array(short))[1], short)


def test_a_long_gap_is_one_gap() -> None:
    y = np.array([NAN, NAN, 1, NAN, NAN, NAN, 2, 3, NAN, NAN])
    x, new_y = without_long_gaps(np.arange(10.0), y)
    np.testing.assert_array_equal(new_y, [NAN, 1, NAN, 2, 3, NAN])
    assert x.tolist() == [0, 2, 3, 6, 7, 8]
    assert without_long_gaps(np.empty(0), np.empty(0))[0].size == 0


def test_evened_does_without_tsdownsample_and_decimated_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tsdownsample", None)
    x = np.arange(1000.0)
    assert evened(x, np.sin(x), LIMIT)[0].size <= LIMIT
    with pytest.raises(MissingExtraError, match="tsdownsample"):
        decimated(x, np.sin(x), LIMIT)
