from __future__ import annotations

import itertools

import numpy as np
import pytest

from amp_widgets.charts import flags


def boxes(placed: list[flags.Flag], first: float, last: float, width: float) -> dict[int, list[tuple[float, float]]]:
    lanes: dict[int, list[tuple[float, float]]] = {}
    for flag in placed:
        if flag.lane is not None:
            at = (flag.step - first) / (last - first) * width
            size = flags.CHARACTER_PX * len(flag.label)
            lanes.setdefault(flag.lane, []).append((at - size, at) if flag.leftwards else (at, at + size))
    return lanes


@pytest.mark.parametrize("seed", range(5))
def test_labels_never_overlap_and_stay_inside(seed: int) -> None:
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    steps = np.sort(rng.integers(0, 1000, 40)).tolist()
    labels = ["x" * int(n) for n in rng.integers(1, 30, 40)]
    placed = flags.placed(steps, labels, [label[:5] for label in labels], first_step=0, last_step=1000, width_px=900)
    assert [flag.step for flag in placed] == steps[::-1]
    lanes = boxes(placed, 0, 1000, 900)
    assert set(lanes) <= set(range(flags.LANES))
    for lane in lanes.values():
        for (_, end), (start, _) in itertools.pairwise(sorted(lane)):
            assert end <= start
        assert min(start for start, _ in lane) >= 0
        assert max(end for _, end in lane) <= 900


def test_neighbours_are_staggered_and_the_newest_has_the_lowest_lane() -> None:
    placed = flags.placed(range(10, 16), ["label"] * 6, ["label"] * 6, first_step=0, last_step=1000, width_px=900)
    assert [flag.lane for flag in placed] == [0, 1, 2, 3, 4, None]


def test_where_there_is_no_room_at_the_right_a_label_goes_left_and_then_is_shortened() -> None:
    long = "x" * 30
    placed = flags.placed(range(400, 411), [long] * 11, ["s"] * 11, first_step=0, last_step=1000, width_px=900)
    assert [(flag.lane, flag.leftwards) for flag in placed[:10]] == [(i, side) for side in (False, True) for i in range(5)]
    placed = flags.placed(range(30, 90, 10), [long] * 6, ["s"] * 6, first_step=0, last_step=1000, width_px=900)
    assert [(flag.label, flag.lane) for flag in placed] == [*((long, i) for i in range(5)), ("s", 0)]


def test_six_changes_close_together_are_all_labelled() -> None:
    labels = ["fp16", "scale 2^40", "4 layers", "fp16, scale 2^40, 1 layer", "2 layers", "0 layers"]
    steps = [17, 27, 37, 38, 39, 41]
    placed = flags.placed(steps, labels, labels, first_step=-3, last_step=50, width_px=680)
    assert [flag.label for flag in placed if flag.lane is not None] == labels[::-1]


def test_far_apart_all_are_in_the_lowest_lane() -> None:
    placed = flags.placed([0, 500, 1000], ["label"] * 3, ["label"] * 3, first_step=0, last_step=1000, width_px=900)
    assert [flag.lane for flag in placed] == [0, 0, 0]
    assert [flag.leftwards for flag in placed] == [True, False, False]


def test_only_the_newest_are_shown() -> None:
    placed = flags.placed(list(range(100)), ["a"] * 100, ["a"] * 100, first_step=0, last_step=100, width_px=900)
    assert [flag.step for flag in placed] == list(range(99, 99 - flags.MOST_FLAGS, -1))


def test_escapes_count_as_what_they_show() -> None:
    escaped, plain = (
        flags.placed([50, 50.5 + flags.CHARACTER_PX + 8], [label, "y"], [label, "y"], first_step=0, last_step=900, width_px=900)
        for label in ("&lt;", "x")
    )
    assert [flag.lane for flag in escaped] == [flag.lane for flag in plain] == [0, 0]


def test_one_step_has_no_width() -> None:
    assert [flag.lane for flag in flags.placed([0.0], ["a"], ["a"], first_step=0, last_step=0, width_px=900)] == [0]


def test_letters_of_hangul_take_twice_the_room() -> None:
    assert flags.text_px("레이어 4개") == flags.CHARACTER_PX * (4 * 2 + 2)
    apart_px = flags.text_px("abcd") + 9  # room for four letters and the gap
    for label, lanes in (("abcd", [0, 0]), ("손실척도", [1, 0])):
        found = flags.placed([0, apart_px], [label] * 2, [label] * 2, first_step=0, last_step=900, width_px=900)
        assert sorted(flag.lane for flag in found if flag.lane is not None) == sorted(lanes)
