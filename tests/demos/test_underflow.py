"""Held to what the demo is for: without loss scaling most gradients vanish and the loss stands; with it, or in fp32, it falls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from amp_widgets.analysis.gradients import GradientRange
from amp_widgets.demos.underflow import heat_maps, underflow_session
from amp_widgets.session import AmpSession

Train = Callable[[AmpSession, int], None]
STEPS = 60


class Run:
    """What came of the same steps from the same seed, with other settings."""

    def __init__(self, train: Train, seed: int, **changes: Any) -> None:
        session = underflow_session(seed=seed, device="cpu")
        if changes:
            session.request(**changes)
        train(session, STEPS)
        columns = session.history.columns("loss", "skipped")
        self.losses = columns["loss"][:STEPS]
        self.skips = int((columns["skipped"][:STEPS] > 0).sum())
        self.ranges = [GradientRange.of(counts) for counts in session.numerics.gradients.counts]
        assert len(self.ranges) >= STEPS // 10  # sampled by itself

    @property
    def fell(self) -> float:
        return float(self.losses[0] - self.losses[-5:].mean())

    @property
    def zeros(self) -> list[float]:
        return [one.shares().zeros for one in self.ranges]


@pytest.mark.parametrize("seed", [0, 1])
def test_without_scaling_gradients_vanish_and_the_loss_stands(train: Train, seed: int) -> None:
    wide = Run(train, seed, autocast="fp32")
    scaled = Run(train, seed)
    bare = Run(train, seed, scaling=False)

    assert wide.fell > 0.6 * wide.losses[0]
    assert max(wide.zeros) == 0  # so that each zero in fp16 is one that has vanished

    np.testing.assert_allclose(scaled.losses, wide.losses, rtol=0.01)
    assert scaled.skips == 0
    assert all(one.in_half and one.scale == 2.0**16 for one in scaled.ranges)
    assert max(one.shares().zeros + one.shares().flushed for one in scaled.ranges) < 0.02

    assert all(one.in_half and one.scale == 1.0 for one in bare.ranges)
    assert min(bare.zeros) > 0.8
    assert abs(bare.fell) < 0.1 * scaled.fell

    # what is said beforehand is what comes about
    for told in (wide.ranges[0], scaled.ranges[0]):
        assert told.shares(1.0).flushed == pytest.approx(bare.zeros[0], abs=0.001)
    assert scaled.ranges[0].step == bare.ranges[0].step == 0


def test_it_is_the_softmax_that_hands_on_too_little(train: Train) -> None:
    bare = Run(train, 0, scaling=False)
    zeros = {row.layer: row.zeros / row.weights.sum() for row in bare.ranges[0].outputs}
    assert zeros.pop("(model)") < 0.05  # what the loss hands to its outputs is there
    assert set(zeros) == {"head", "layers.1.1", "layers.1.0", "layers.0.1", "layers.0.0", "stem.1", "stem.0"}
    assert min(zeros.values()) > 0.99


def test_the_maps_are_shares_of_the_ink() -> None:
    noisy, maps = heat_maps(copies=2, noise=0.5, seed=3)
    assert noisy.shape == maps.shape == (2 * 1797, 64)
    torch.testing.assert_close(maps.sum(dim=1), torch.ones(2 * 1797))
    assert float(maps.min()) >= 0
    assert torch.equal(noisy, heat_maps(copies=2, noise=0.5, seed=3)[0])
    assert not torch.equal(noisy[:1797], noisy[1797:])
    assert torch.equal(maps[:1797], maps[1797:])
