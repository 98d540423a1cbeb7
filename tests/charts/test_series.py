from __future__ import annotations

import math

import numpy as np

from amp_widgets.charts.series import NAN, NEGATIVE_INFINITY, POSITIVE_INFINITY, SERIES, lone, series_of, thinned
from amp_widgets.core.history import COLUMNS, Event, History

nan, inf = math.nan, math.inf


def columns(**values: list[float]) -> dict[str, np.ndarray]:
    rows = len(next(iter(values.values())))
    return {"step": np.arange(rows), **{name: np.array(column, dtype=float) for name, column in values.items()}}


def test_what_is_not_there_counts_as_not_measured() -> None:
    series = series_of({"step": np.arange(3)})
    assert tuple(series) == SERIES
    for name in ("loss", "scale", "allocated", "peak", "reserved"):
        assert series[name][0].tolist() == [0, 1, 2]
        assert np.isnan(series[name][1]).all()
    assert series["not_finite"][0].size == series["skipped"][0].size == 0


def test_lines_are_the_columns_and_the_scale_its_logarithm() -> None:
    series = series_of(columns(loss=[1, 2], scale=[65536, 0.5], allocated_bytes=[1, 2], peak_bytes=[3, 4], reserved_bytes=[5, 6]))
    assert series["loss"][1].tolist() == [1, 2]
    assert series["scale"][1].tolist() == [16, -1]
    assert series["allocated"][1].tolist() == [1, 2]
    assert series["peak"][1].tolist() == [3, 4]
    assert series["reserved"][1].tolist() == [5, 6]


def test_a_scale_that_has_no_logarithm_is_a_gap() -> None:
    np.testing.assert_array_equal(series_of(columns(scale=[0, -1, inf, nan, 4]))["scale"][1], [nan, nan, nan, nan, 2])


def test_losses_that_are_not_finite_are_gaps_with_a_mark() -> None:
    series = series_of(columns(loss=[1, inf, 2, -inf, nan, 3, 1.7e308]))
    np.testing.assert_array_equal(series["loss"][1], [1, nan, 2, nan, nan, 3, 1e300])
    assert series["not_finite"][0].tolist() == [1, 3, 4]
    assert series["not_finite"][1].tolist() == [POSITIVE_INFINITY, NEGATIVE_INFINITY, NAN]


def test_nan_before_the_first_recorded_loss_is_not_called_a_loss() -> None:
    assert series_of(columns(loss=[nan, nan, inf, nan]))["not_finite"][0].tolist() == [2, 3]
    assert series_of(columns(loss=[nan, nan]))["not_finite"][0].tolist() == []
    assert series_of(columns(loss=[nan, nan]), loss_known=True)["not_finite"][0].tolist() == [0, 1]


def test_skips_have_a_mark_at_the_scale_used() -> None:
    series = series_of(columns(scale=[8, 8, 4, 2], skipped=[0, 1, 1, nan]))
    assert series["skipped"][0].tolist() == [1, 2]
    assert series["skipped"][1].tolist() == [3, 2]


def test_a_skip_without_a_known_scale_has_the_last_known_one() -> None:
    assert series_of(columns(scale=[8, nan], skipped=[0, 1]))["skipped"][1].tolist() == [3]
    assert series_of(columns(scale=[nan], skipped=[1]), last_log2_scale=5.0)["skipped"][1].tolist() == [5]
    assert series_of(columns(scale=[nan], skipped=[1]))["skipped"][1].tolist() == [0]


def test_skips_that_reduction_merged_are_taken_from_the_log() -> None:
    history = History(capacity=16)
    skips = [0, 1, 2, 3, 9, 40, 62]
    for i in range(64):
        history.append(step=i, scale=2.0 ** (i // 8), skipped=i in skips)
        if i in skips:
            history.record(Event(step=i, kind="skipped", reason="inf", detail={}, time_s=0.0))
    rows = history.columns(*COLUMNS)
    assert len(rows["step"]) < 16
    steps = np.array([event.step for event in history.events("skipped")], dtype=float)
    marks = series_of(rows, skipped_steps=steps)["skipped"]
    assert marks[0].tolist() == skips
    assert np.isfinite(marks[1]).all()
    assert series_of(rows, skipped_steps=np.array([62.0, 64.0]))["skipped"][0][-1] == 62  # the row of 64 is not there yet


def test_lone_points_are_those_between_gaps() -> None:
    x, y = lone((np.arange(7.0), np.array([1, nan, 2, nan, 3, 4, nan])))
    assert x.tolist() == [0, 2]
    assert y.tolist() == [1, 2]
    assert lone((np.array([5.0]), np.array([1.0])))[0].tolist() == [5]
    assert lone((np.empty(0), np.empty(0)))[0].size == 0


def test_thinned_keeps_every_change_of_scale() -> None:
    scale = np.full(50_000, 65536.0)
    scale[20_000:] = 32768.0
    scale[20_001] = 16384.0
    series = thinned(series_of({"step": np.arange(50_000), "scale": scale, "loss": np.arange(50_000.0)}), 100)
    assert series["scale"][0].tolist() == [0, 19_999, 20_000, 20_001, 20_002, 49_999]
    assert series["loss"][0].size <= 100
