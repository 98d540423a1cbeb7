from __future__ import annotations

import math
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from amp_widgets.core.history import COLUMNS, Cursor, Event, History
from amp_widgets.errors import HistoryError


def event(step: int, kind: str = "note", reason: str = "because") -> Event:
    return Event(step=step, kind=kind, reason=reason, detail={}, time_s=0.0)


def filled(count: int, *, capacity: int = 1_000_000) -> History:
    history = History(capacity=capacity)
    for i in range(count):
        history.append(step=i, loss=float(i), peak_bytes=i % 7)
    return history


def test_rows_come_back_and_what_was_not_given_is_nan() -> None:
    history = History(extra_columns=["accuracy"])
    history.append(step=0, loss=1.5, scale=65536.0, skipped=0)
    history.append(step=1, accuracy=0.25, skipped=True)
    columns = history.columns()
    assert tuple(columns) == (*COLUMNS, "accuracy") == history.names
    assert columns["step"].dtype == np.int64
    assert columns["step"].tolist() == [0, 1]
    assert all(columns[name].dtype == np.float64 for name in columns if name != "step")
    np.testing.assert_array_equal(columns["loss"], [1.5, math.nan])
    np.testing.assert_array_equal(columns["scale"], [65536.0, math.nan])
    np.testing.assert_array_equal(columns["skipped"], [0.0, 1.0])
    np.testing.assert_array_equal(columns["accuracy"], [math.nan, 0.25])
    assert np.isnan(columns["peak_bytes"]).all()
    assert list(history.columns("scale", "step")) == ["scale", "step"]
    assert len(history) == history.total_rows == 2


def test_non_finite_values_are_kept_as_such() -> None:
    history = History()
    for value in (math.nan, math.inf, -math.inf):
        history.append(step=0, loss=value)
    np.testing.assert_array_equal(history.columns("loss")["loss"], [math.nan, math.inf, -math.inf])


def test_columns_are_copies() -> None:
    history = filled(3)
    history.columns("loss")["loss"][:] = -1
    assert history.columns("loss")["loss"].tolist() == [0, 1, 2]


def test_the_empty_history() -> None:
    history = History()
    assert all(column.shape == (0,) for column in history.columns().values())
    assert len(history) == 0
    assert history.events() == []
    assert math.isnan(history.last("loss"))
    assert history.rows_since(Cursor())[2] is False


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"step": 1, "los": 2.0}, "los: there is no such column; expected one of step, time_s, loss"),
        ({"loss": 2.0}, "expected step="),
        ({"step": 1, "loss": "2"}, "expected numbers only"),
        ({"step": 1, "loss": None}, "expected numbers only"),
    ],
)
def test_a_bad_row_is_refused_whole(values: dict[str, float], message: str) -> None:
    history = filled(1)
    with pytest.raises(HistoryError, match=message):
        history.append(**values)
    history.append(step=1)
    assert history.columns("step")["step"].tolist() == [0, 1]
    np.testing.assert_array_equal(history.columns("loss")["loss"], [0, math.nan])


def test_bad_names_and_capacities() -> None:
    history = History()
    for call in (
        lambda: history.columns("step", "peak"),
        lambda: history.last("peak"),
        lambda: history.rows_since(Cursor(), "peak"),
    ):
        with pytest.raises(HistoryError, match="peak: there is no such column; expected one of step"):
            call()
    with pytest.raises(HistoryError, match="expected at least 4 rows"):
        History(capacity=3)
    with pytest.raises(HistoryError, match="extra_columns"):
        History(extra_columns=["loss"])
    with pytest.raises(HistoryError, match="extra_columns"):
        History(extra_columns=["a", "a"])


@pytest.mark.parametrize("count", [1, 255, 256, 257, 1023, 1024, 1025, 5000])
def test_growth_loses_nothing(count: int) -> None:
    history = filled(count)
    assert history.columns("loss")["loss"].tolist() == list(range(count))
    assert len(history) == count


def test_last_is_the_newest_row_or_the_newest_measurement() -> None:
    history = History()
    history.append(step=0, peak_bytes=5)
    assert history.last("peak_bytes") == 5
    for i in range(1, 1000):  # past the moment at which rows move out of the first buffer
        history.append(step=i, loss=i)
    assert history.last("loss") == 999
    assert history.last("step") == 999
    assert math.isnan(history.last("peak_bytes"))
    assert history.last("peak_bytes", measured=True) == 5
    assert math.isnan(history.last("scale", measured=True))
    history.columns()
    assert history.last("loss") == 999
    assert history.last("peak_bytes", measured=True) == 5


def test_events_are_ordered_by_step_and_then_by_arrival() -> None:
    history = History()
    arrived = [event(5, "applied", "a"), event(2, "skipped", "b"), event(5, "note", "c"), event(2, "applied", "d")]
    for one in arrived:
        history.record(one)
    assert [e.reason for e in history.events()] == ["b", "d", "a", "c"]
    assert [e.reason for e in history.events("applied")] == ["d", "a"]
    assert [e.reason for e in history.events("applied", "note")] == ["d", "a", "c"]
    assert history.events_since(0) == (arrived, 4)
    assert history.events_since(3) == (arrived[3:], 4)
    assert history.events_since(4) == ([], 4)


def test_a_reader_with_a_cursor_sees_each_row_once() -> None:
    history = filled(0)
    cursor, seen = Cursor(), []
    for i in range(1000):
        history.append(step=i, loss=2.0 * i)
        if i % 7 == 0:
            rows, cursor, start_over = history.rows_since(cursor, "step", "loss")
            assert not start_over
            assert rows["loss"].tolist() == (2.0 * rows["step"]).tolist()
            seen += rows["step"].tolist()
    seen += history.rows_since(cursor, "step")[0]["step"].tolist()
    assert seen == list(range(1000))


def test_reduction_keeps_the_newer_half_and_halves_the_older() -> None:
    history = filled(7, capacity=8)
    assert history.columns("step")["step"].tolist() == list(range(7))
    history.append(step=7, loss=7.0, peak_bytes=0)
    assert history.columns("step")["step"].tolist() == [0, 2, 3, 4, 5, 6, 7]
    assert history.columns("loss")["loss"].tolist() == [0, 2, 3, 4, 5, 6, 7]
    assert history.columns("peak_bytes")["peak_bytes"].tolist() == [0, 2, 3, 4, 5, 6, 0]  # of 0, (1, 2), 3, then as they were
    assert (len(history), history.total_rows) == (7, 8)
    larger = filled(16, capacity=16)
    assert larger.columns("step")["step"].tolist() == [0, 2, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]


def test_a_long_run_stays_visible_from_its_first_step() -> None:
    steps = filled(5000, capacity=1000).columns("step")["step"]
    # The row of step 4330 stands for those after 4320 until the next reduction adds six.
    assert steps.tolist() == [*range(0, 4321, 16), *range(4330, 5000)]


@pytest.mark.parametrize("capacity", [4, 5, 6, 7, 64, 1000])
def test_rows_stay_bounded_and_in_order_and_the_highest_peak_is_kept(capacity: int) -> None:
    history = History(capacity=capacity)
    raw = capacity - max(capacity // 2, 3)
    for i in range(5 * capacity):
        history.append(step=i, peak_bytes=1e9 if i == 3 else 1.0)
        assert capacity // 2 <= len(history) < capacity or i < capacity
    steps = history.columns("step")["step"]
    assert np.all(np.diff(steps) > 0)
    assert steps[0] == 0
    assert steps[-1] == 5 * capacity - 1
    assert history.columns("peak_bytes")["peak_bytes"].max() == 1e9
    assert steps[-raw:].tolist() == list(range(5 * capacity - raw, 5 * capacity))


@pytest.mark.parametrize("capacity", [64, 250, 1000])
def test_however_long_the_run_its_older_part_is_evenly_spread(capacity: int) -> None:
    history = History(capacity=capacity)
    checked = {*range(capacity, 50 * capacity + 1, capacity // 4 - 1), 50 * capacity}  # at every phase between two reductions
    for total in range(1, 50 * capacity + 1):
        history.append(step=total - 1, peak_bytes=float(total * 7919 % 104729))
        if total not in checked:
            continue
        steps = history.columns("step")["step"]
        gaps = np.diff(steps)
        assert len(steps) < capacity
        assert steps[0] == 0
        assert np.all(gaps > 0)
        assert steps[-capacity // 2 :].tolist() == list(range(total - capacity // 2, total))
        assert history.columns("peak_bytes")["peak_bytes"].max() == max(i * 7919 % 104729 for i in range(1, total + 1))
        reduced = int(np.flatnonzero(gaps > 1)[-1]) + 2  # rows up to the last gap
        span = int(gaps[0])
        assert span & (span - 1) == 0
        assert gaps[: reduced - 2].tolist() == [span] * (reduced - 2)  # even, but for the newest
        assert gaps[reduced - 2] <= span
        # It doubles when half of it would leave more rows than this, of which the first and the last lack some.
        most = capacity // 2 - capacity // 16
        assert span <= 2 * total / (most - 2)
        assert gaps.max() < 4 * total / (capacity / 4)
        assert most / 2 <= reduced <= most


def test_runs_with_many_skipped_steps_are_spread_within_twice_that() -> None:
    seed = 20
    rng, capacity, total = np.random.default_rng(seed), 200, 10_000
    history = History(capacity=capacity)
    for i, skipped in enumerate(rng.random(total) < 0.05):
        history.append(step=i, skipped=skipped)
    steps = history.columns("step")["step"]
    assert steps[0] == 0, seed
    assert 0 < np.diff(steps).min() <= np.diff(steps).max() < 2 * (8 / 7 * 4 * total / capacity), seed


@pytest.mark.parametrize(("capacity", "total"), [(4, 30), (16, 16), (16, 1000), (64, 64), (64, 100), (64, 777), (200, 5001)])
def test_a_reduced_row_shows_what_all_the_steps_it_stands_for_had(capacity: int, total: int) -> None:
    seed = 7
    rng = np.random.default_rng(seed)
    loss = np.where(rng.random(total) < 0.05, math.nan, rng.random(total))
    skipped = rng.random(total) < 0.03
    peak = np.where(rng.random(total) < 0.3, math.nan, rng.integers(1, 1 << 40, total))
    step_s = rng.integers(1, 100, total).astype(float)
    history, plain = History(capacity=capacity), filled(total, capacity=capacity)
    for i in range(total):
        history.append(step=i, loss=loss[i], skipped=skipped[i], peak_bytes=peak[i], step_s=step_s[i], scale=float(-i))
    rows = history.columns()
    # Of steps that are all alike the latest stays, so that a plain run tells where each row ends.
    ends = [int(step) for step in plain.columns("step")["step"]]
    assert len(history) == len(ends)
    for at, (before, end) in enumerate(zip([-1, *ends[:-1]], ends, strict=True)):
        steps = range(before + 1, end + 1)
        step = max(steps, key=lambda i: (skipped[i], not math.isfinite(loss[i]), i))
        assert rows["step"][at] == -rows["scale"][at] == step, seed
        np.testing.assert_array_equal(rows["loss"][at], loss[step])
        assert rows["skipped"][at] == any(skipped[i] for i in steps), seed
        known = [peak[i] for i in steps if not math.isnan(peak[i])]
        np.testing.assert_array_equal(rows["peak_bytes"][at], max(known, default=math.nan))
        assert rows["step_s"][at] == pytest.approx(sum(step_s[i] for i in steps) / len(steps), rel=1e-12), seed


def merged(first: dict[str, float], second: dict[str, float]) -> dict[str, float]:
    """The row that reduction makes of two."""
    history = History(capacity=4, extra_columns=["accuracy"])
    for i, row in enumerate(({}, first, second, {})):  # the very first is never merged
        history.append(**{"step": i - 1} | row)
    assert len(history) == 3
    return {name: float(column[1]) for name, column in history.columns().items()}


def test_of_a_pair_the_row_worth_keeping_stays_whole() -> None:
    plain = merged({"loss": 9.0, "scale": 8.0}, {"loss": 1.0, "scale": 4.0})
    assert (plain["step"], plain["loss"], plain["scale"]) == (1, 1.0, 4.0)
    skip = merged({"loss": 9.0, "scale": 8.0, "skipped": 1}, {"loss": math.nan, "scale": 4.0, "skipped": 0})
    assert (skip["step"], skip["loss"], skip["scale"], skip["skipped"]) == (0, 9.0, 8.0, 1)
    for value in (math.inf, -math.inf):
        lost = merged({"loss": value, "scale": 8.0}, {"loss": 1.0, "scale": 4.0})
        assert (lost["step"], lost["loss"], lost["scale"]) == (0, value, 8.0)
    assert math.isnan(merged({"loss": 1.0}, {"loss": math.nan})["loss"])
    both = merged({"loss": 1.0, "skipped": 1}, {"loss": 2.0, "skipped": 1})
    assert (both["step"], both["loss"], both["skipped"]) == (1, 2.0, 1)


def test_of_a_pair_bytes_are_the_larger_and_times_the_mean() -> None:
    row = merged(
        {"allocated_bytes": 5, "peak_bytes": math.nan, "reserved_bytes": 3, "step_s": 1.0, "accuracy": 0.5},
        {"allocated_bytes": 4, "peak_bytes": 7, "step_s": 2.0},
    )
    assert (row["allocated_bytes"], row["peak_bytes"], row["reserved_bytes"]) == (5, 7, 3)
    assert row["step_s"] == 1.5
    assert row["accuracy"] == 0.5
    assert merged({"step_s": 1.0}, {})["step_s"] == 1.0
    assert math.isnan(merged({}, {})["peak_bytes"])


def test_events_survive_every_reduction() -> None:
    history = History(capacity=16)
    for i in range(1000):
        history.append(step=i)
        history.record(event(i))
    assert [e.step for e in history.events()] == list(range(1000))
    assert history.events_since(990)[0] == history.events()[990:]


def test_a_reader_is_told_to_start_over_after_a_reduction() -> None:
    history = filled(5, capacity=8)
    _, cursor, _ = history.rows_since(Cursor(), "step")
    for i in range(5, 9):
        history.append(step=i, loss=float(i))
    rows, cursor, start_over = history.rows_since(cursor, "step")
    assert start_over
    assert rows["step"].tolist() == history.columns("step")["step"].tolist() == [0, 2, 4, 5, 6, 7, 8]
    rows, cursor, start_over = history.rows_since(cursor, "step")
    assert not start_over
    assert rows["step"].size == 0
    assert history.rows_since(Cursor(), "step")[2] is False  # nothing was read before, so there is nothing to drop


@pytest.mark.parametrize("capacity", [64, 100_000])
def test_readers_and_writers_in_many_threads(capacity: int) -> None:
    history, writers, each = History(capacity=capacity), 4, 3000
    failures: list[str] = []
    done = threading.Event()

    def write(writer: int) -> None:
        for i in range(each):
            history.append(step=i, loss=writer * each + i, scale=writer * each + i)
            history.record(event(i))

    def read() -> None:
        cursor, index = Cursor(), 0
        seen: list[float] = []
        while True:
            last_round = done.is_set()
            rows, cursor, start_over = history.rows_since(cursor, "loss", "scale")
            if not np.array_equal(rows["loss"], rows["scale"]):
                failures.append("a torn row")
            seen = rows["loss"].tolist() if start_over else seen + rows["loss"].tolist()
            _, index = history.events_since(index)
            if last_round:
                break
        if seen != history.columns("loss")["loss"].tolist():
            failures.append("rows were lost or doubled")
        if index != writers * each:
            failures.append("events were lost")

    threads = [threading.Thread(target=write, args=(i,)) for i in range(writers)]
    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in readers + threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    for thread in readers:
        thread.join()
    assert failures == []
    assert history.total_rows == writers * each
    if capacity > writers * each:
        assert sorted(history.columns("loss")["loss"].tolist()) == list(range(writers * each))


def test_appending_does_not_slow_down_with_length() -> None:
    def cost(history: History) -> float:
        best = math.inf
        for _ in range(5):
            start = time.perf_counter()
            for i in range(2000):
                history.append(step=i, loss=1.0, scale=2.0)
            best = min(best, time.perf_counter() - start)
        return best / 2000

    empty, full = History(), filled(300_000, capacity=300_001)
    assert cost(full) < 5 * cost(empty) + 5e-6  # a copy of 300,000 rows an append would be a hundred times that


def test_imports_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import amp_widgets.core.history; assert 'plotly' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
