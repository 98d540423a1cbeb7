from __future__ import annotations

import math

import numpy as np
import pytest

from amp_widgets.charts.moving_average import MovingAverage


def by_hand(y: np.ndarray, steps: int) -> list[float]:
    """Row by row, as the definition says."""
    decay, total, weight, found = 1 - 1 / steps, 0.0, 0.0, []
    for value in y:
        total, weight = decay * total, decay * weight
        if math.isfinite(value):
            total, weight = total + value, weight + 1
        found.append(total / weight if math.isfinite(value) else math.nan)
    return found


@pytest.mark.parametrize("steps", [1, 2, 10, 1000])
@pytest.mark.parametrize("pieces", [[700], [1, 127, 128, 1, 443], [0, 300, 0, 400]])
def test_it_is_the_definition_however_the_rows_arrive(steps: int, pieces: list[int]) -> None:
    rng = np.random.default_rng(7)
    y = rng.normal(size=700)
    y[[0, 5, 130, 131, 300, 699]] = [math.nan, math.inf, math.nan, -math.inf, math.nan, math.inf]
    average = MovingAverage(steps)
    found = np.concatenate([average(piece) for piece in np.split(y, np.cumsum(pieces)[:-1])])
    np.testing.assert_allclose(found, by_hand(y, steps), rtol=1e-10, atol=1e-13)


def test_over_one_step_nothing_changes() -> None:
    y = np.array([3.0, 1e300, -2.0, math.nan, 5.0])
    np.testing.assert_array_equal(MovingAverage(1)(y), y)


def test_there_is_no_pull_to_zero_at_the_beginning() -> None:
    np.testing.assert_allclose(MovingAverage(100)(np.full(300, 2.5)), 2.5, rtol=1e-14)
    assert MovingAverage(100)(np.empty(0)).shape == (0,)
