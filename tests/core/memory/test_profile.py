"""The profile of a step: what it says of its numbers, and which points it keeps."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

from amp_widgets.core.memory.profile import (
    KINDS,
    AllocatorReadings,
    Phase,
    StepProfile,
    frozen_sums,
    memory_text,
    phases_of,
    points_kept,
)
from amp_widgets.errors import AmpWidgetsError


def made(**changes: Any) -> StepProfile:
    """Three points: at the start, in a forward pass and in an optimizer's step, where the peak of 700 bytes is."""
    bytes_by_kind = np.zeros((3, len(KINDS)), dtype=np.int64)
    bytes_by_kind[:, KINDS.index("parameter")] = 400
    bytes_by_kind[1, KINDS.index("activation")] = 200
    bytes_by_kind[2, KINDS.index("temporary")] = 300
    values: dict[str, Any] = {
        "label": "fp32",
        "step": 7,
        "device": "cpu",
        "source": "by hand",
        "bytes_by_kind": bytes_by_kind,
        "time_s": np.array([0.0, 0.1, 0.2]),
        "layer_index": np.array([-1, 1, -1], dtype=np.int32),
        "operator_index": np.array([-1, 0, 1], dtype=np.int32),
        "layer_names": ("a", "a.b"),
        "operator_names": ("aten::mm", "aten::sqrt"),
        "phases": (Phase(name="forward", start=0, stop=2), Phase(name="optimizer", start=2, stop=3)),
        "layers": (),
        "peak_by_layer": frozen_sums({"": {"temporary": 300}, "a": {"parameter": 100}, "a.b": {"parameter": 300}}),
    }
    return StepProfile(**{**values, **changes})


class TestWords:
    def test_peak(self) -> None:
        profile = made()
        assert profile.total_bytes.tolist() == [400, 600, 700]
        assert (profile.peak_point, profile.peak_bytes) == (2, 700)
        assert profile.peak_bytes_by_kind == {kind: {"parameter": 400, "temporary": 300}.get(kind, 0) for kind in KINDS}
        assert list(profile.peak_bytes_by_layer.items()) == [("", 300), ("a.b", 300), ("a", 100)]
        assert profile.peak_where == "in the optimizer step (aten::sqrt)"
        assert [profile.where(point) for point in (0, 1)] == ["at the start of the step", "in the forward pass of a.b (aten::mm)"]

    def test_difference(self) -> None:
        before, after = made(), made(label="bf16", bytes_by_kind=made().bytes_by_kind // 2)
        assert before.difference_text(after) == "fp32 → bf16: peak 700 B → 350 B, 350 B less (-50.0 %)"
        assert after.difference_text(before) == "bf16 → fp32: peak 350 B → 700 B, 350 B more (+100.0 %)"
        assert before.difference_text(made(label="again")) == "fp32 → again: peak 700 B → 700 B, the same"

    def test_of_nothing(self) -> None:
        nothing = made(bytes_by_kind=np.zeros((3, len(KINDS)), dtype=np.int64), peak_by_layer=frozen_sums({}))
        assert nothing.difference_text(made()) == "fp32 → fp32: peak 0 B → 700 B, 700 B more"
        assert "0 B" in nothing._repr_html_()

    def test_html_is_escaped(self) -> None:
        bad = "<script>&"
        profile = made(label=bad, layer_names=("a", bad), peak_by_layer=frozen_sums({bad: {"other": 1}}), notes=(bad,))
        assert "<script>" not in profile._repr_html_()
        assert profile._repr_html_().count("&lt;script&gt;&amp;") == 3
        assert bad in made(label=bad).__repr__()

    def test_html_adds_up(self) -> None:
        many = {f"layer{index}": {"other": 100 - index} for index in range(15)}
        assert "5 more" in made(peak_by_layer=frozen_sums(many))._repr_html_()
        assert "440 B" in made(peak_by_layer=frozen_sums(many))._repr_html_()  # 90 + 89 + 88 + 87 + 86

    @pytest.mark.parametrize(
        ("size", "text"),
        [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_950, "1.0 MB"), (1_234_567_000, "1.2 GB"), (-5e6, "-5.0 MB")],
    )
    def test_bytes(self, size: float, text: str) -> None:
        assert memory_text(size) == text

    def test_frozen(self) -> None:
        profile = made()
        with pytest.raises(AttributeError):
            profile.label = "other"  # type: ignore[misc]
        with pytest.raises(TypeError):
            profile.peak_by_layer["a"]["parameter"] = 0  # type: ignore[index]
        with pytest.raises(KeyError):
            profile.layer("c")


def read(**changes: Any) -> AllocatorReadings:
    values: dict[str, Any] = {
        "device": "cuda:0",
        "point": np.array([0, 2], dtype=np.int32),
        "allocated_bytes": np.array([400, 3_200_000_000]),
        "inactive_bytes": np.array([0, 600_000_000]),
        "reserved_bytes": np.array([2_000_000, 4_100_000_000]),
        "peak_allocated_bytes": 3_300_000_000,
        "retries": 2,
        "ooms": 1,
    }
    return AllocatorReadings(**{**values, **changes})


class TestAllocator:
    def test_in_words(self) -> None:
        assert read().text == (
            "cuda:0: reserved 4.1 GB, of which 3.2 GB were allocated, 600.0 MB free but split (fragmentation) and 300.0 MB "
            "cached; 2 retries after freeing the cache, 1 allocation that did not fit"
        )
        profile = made(allocator=(read(device="<cuda>"),))
        assert "<cuda>: reserved 4.1 GB" in repr(profile)
        assert "&lt;cuda&gt;: reserved 4.1 GB" in profile._repr_html_()

    def test_nothing_is_said_of_what_is_not_counted(self) -> None:
        """With expandable segments no block counts as split, and nothing follows for fragmentation."""
        none = np.zeros(2, dtype=np.int64)
        assert read(inactive_bytes=none, retries=0, ooms=0).text == (
            "cuda:0: reserved 4.1 GB, of which 3.2 GB were allocated and 900.0 MB cached"
        )
        full = read(inactive_bytes=none, retries=1, ooms=0, reserved_bytes=read().allocated_bytes)
        assert full.text == "cuda:0: reserved 3.2 GB, of which 3.2 GB were allocated; 1 retry after freeing the cache"

    def test_on_a_cpu(self) -> None:
        assert made().allocator == ()
        assert "reserved" not in repr(made())

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"point": np.array([0], dtype=np.int32)}, "expected one length"),
            ({name: np.zeros(0, dtype=np.int64) for name in ("allocated_bytes", "inactive_bytes")}, "expected one length"),
            ({"point": np.array([0, 2])}, "expected int32 points"),
            ({"reserved_bytes": np.array([0.0, 1.0])}, "expected int32 points and int64 bytes"),
            ({"point": np.array([2, 2], dtype=np.int32)}, "expected them ascending"),
            ({"point": np.array([-1, 2], dtype=np.int32)}, "expected them ascending"),
            ({"inactive_bytes": np.array([0, -1])}, "below 0"),
            ({"retries": -1}, "below 0"),
        ],
    )
    def test_what_cannot_be(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(AmpWidgetsError, match=message):
            read(**changes)

    def test_points_that_there_are_not(self) -> None:
        with pytest.raises(AmpWidgetsError, match="got point 3, expected one of the profile's 3"):
            made(allocator=(read(point=np.array([0, 3], dtype=np.int32)),))


def test_phases() -> None:
    assert phases_of(["a", "a", "b", "a"]) == (
        Phase(name="a", start=0, stop=2),
        Phase(name="b", start=2, stop=3),
        Phase(name="a", start=3, stop=4),
    )
    assert phases_of([]) == ()


class TestThinning:
    def test_few_points_all_stay(self) -> None:
        assert points_kept(np.zeros((10, 8), dtype=np.int64), (), most=10).tolist() == list(range(10))

    def test_random_curves(self) -> None:
        seed = random.randrange(2**32)
        print("seed", seed)
        generator = np.random.default_rng(seed)
        for _ in range(20):
            points = int(generator.integers(101, 5000))
            curve = np.zeros((points, len(KINDS)), dtype=np.int64)
            curve[:, 0] = np.abs(generator.integers(-100, 100, points).cumsum())
            cuts = sorted({0, points, *generator.integers(1, points, 5).tolist()})
            phases = [Phase(name="x", start=start, stop=stop) for start, stop in itertools.pairwise(cuts)]
            kept = points_kept(curve, phases, most=100)
            total = curve.sum(axis=1)
            assert len(kept) <= 100
            assert (np.diff(kept) > 0).all()
            assert total[kept].max() == total.max()
            assert int(total.argmax()) in kept
            assert total[kept].min() == total.min()
            assert {edge for phase in phases for edge in (phase.start, phase.stop - 1)} <= set(kept.tolist())
            # Drawn as steps, no stretch of the curve is off by more than it varies within a stretch.
            drawn = total[kept][np.searchsorted(kept, np.arange(points), side="right") - 1]
            widest = -(-points // 44) + 1
            swing = max(np.ptp(total[max(0, at - widest) : at + widest]) for at in range(points))
            assert np.abs(drawn - total).max() <= swing
