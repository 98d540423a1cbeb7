from __future__ import annotations

import math

import numpy as np
import pytest

from amp_widgets.charts.page_data import MOST_EVENTS, MOST_POINTS, OVERVIEW_POINTS, PageData
from amp_widgets.charts.series import COLUMNS, SERIES
from amp_widgets.core.history import Event


def rows(first: int, count: int, **values: np.ndarray) -> dict[str, np.ndarray]:
    step = np.arange(first, first + count)
    blank = {name: np.full(count, math.nan) for name in COLUMNS[1:]}
    return {"step": step, **blank, **values}


def test_pieces_add_up_to_the_whole() -> None:
    rng = np.random.default_rng(2)
    count = 1000
    values = {name: np.where(rng.random(count) < 0.3, math.nan, rng.random(count) + 1) for name in COLUMNS[1:]}
    values["skipped"] = (rng.random(count) < 0.1).astype(float)
    values["loss"][:5] = math.nan
    whole, pieces = PageData(), PageData()
    whole.append(rows(0, count, **values))
    added: dict[str, list[np.ndarray]] = {name: [] for name in SERIES}
    for start in range(0, count, 7):
        part = {name: column[start : start + 7] for name, column in values.items()}
        for name, points in pieces.append(rows(start, len(part["loss"]), **part)).items():
            added[name].append(np.array(points))
    for name in SERIES:
        np.testing.assert_array_equal(np.array(pieces.series[name].points()), np.array(whole.series[name].points()))
        np.testing.assert_array_equal(np.concatenate(added[name], axis=1), np.array(whole.series[name].points()))
    assert pieces.skipped == whole.skipped == values["skipped"].sum()
    assert pieces.last_step == count - 1
    assert pieces.first_loss_step == whole.first_loss_step == 5 + int(np.argmin(np.isnan(values["loss"][5:])))


def test_what_was_never_measured_takes_no_room() -> None:
    page = PageData()
    for i in range(100):
        page.append(rows(i, 1, loss=np.array([1.0])))
    assert {name: len(line) for name, line in page.series.items() if len(line)} == {"loss": 100}


def test_a_gap_that_lasts_is_one_point() -> None:
    page = PageData()
    for i in range(50):
        page.append(rows(i, 1, peak_bytes=np.array([7.0 if i in (3, 40) else math.nan])))
    np.testing.assert_array_equal(page.series["peak"].points()[0], [3, 4, 40, 41])


@pytest.mark.parametrize("pull", [100, 999, 30_000])
def test_a_long_run_stays_bounded_with_its_extremes_and_every_skip_counted(pull: int) -> None:
    print("seed 3")
    rng = np.random.default_rng(3)
    count = 100_000
    loss = rng.standard_normal(count)
    loss[[17, 60_000]] = 99.0, -99.0
    scale = 2.0 ** rng.integers(5, 20, count)
    skipped = (rng.random(count) < 0.02).astype(float)
    page = PageData()
    reductions = 0
    for start in range(0, count, pull):
        part = slice(start, start + pull)
        page.append(rows(start, len(loss[part]), loss=loss[part], scale=scale[part], skipped=skipped[part]))
        if page.is_full:
            page.reduce()
            reductions += 1
            assert all(len(line) <= 2 * OVERVIEW_POINTS for line in page.series.values())
            assert page.exact_from == page.last_step
        assert all(len(line) <= MOST_POINTS for line in page.series.values())
    assert reductions <= count / (MOST_POINTS - 2 * OVERVIEW_POINTS) + 1
    x, y = page.series["loss"].points()
    assert {17.0, 60_000.0} <= set(x.tolist())
    assert np.nanmax(y) == 99
    assert np.nanmin(y) == -99
    assert page.skipped == skipped.sum()
    overview = x[x <= page.exact_from]
    assert np.histogram(overview, 5, (0, page.exact_from))[0].min() > 200
    recent = x[x > page.exact_from]
    np.testing.assert_array_equal(recent, np.arange(page.exact_from + 1, count))


def event(step: int, kind: str = "applied") -> Event:
    return Event(step=step, kind=kind, reason=f"at {step}", detail={}, time_s=0.0)


def test_skips_and_changes_of_scale_have_no_mark_of_their_own() -> None:
    page = PageData()
    kinds = ["applied", "skipped", "scale_changed", "note", "run"]
    added, reduced = page.add_events([event(i, kind) for i, kind in enumerate(kinds)])
    assert [mark["step"] for mark in added] == [0, 3, 4]
    assert added == page.events
    assert not reduced
    assert added[0] == {"step": 0, "kind": "applied", "label": "at 0", "short": "at 0", "text": "at 0"}


def test_of_very_many_events_the_newer_stay() -> None:
    page = PageData()
    some_reduced = False
    for i in range(0, 10 * MOST_EVENTS, 50):
        _, reduced = page.add_events([event(step) for step in range(i, i + 50)])
        some_reduced |= reduced
        assert len(page.events) <= MOST_EVENTS
    assert some_reduced
    steps = [mark["step"] for mark in page.events]
    assert steps == sorted(steps)
    assert steps[-500:] == list(range(10 * MOST_EVENTS - 500, 10 * MOST_EVENTS))
