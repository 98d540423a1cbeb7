"""A line made smooth, row by row as it grows."""

from __future__ import annotations

import numpy as np

from amp_widgets.charts.decimate import Floats


class MovingAverage:
    """The exponential moving average over about `steps` rows, of what is finite.

    With ``d = 1 - 1 / steps``, the average of row t is the sum of ``d**(t - i) * y[i]`` over the sum of ``d**(t - i)``, over all
    finite rows i up to t: it has no bias towards zero at the beginning. Where a row is not finite, so is the result (NaN), and
    the average goes on behind it.

    Parameters
    ----------
    steps
        At least 1, which changes nothing.
    """

    def __init__(self, steps: int) -> None:
        self._decay = 1 - 1 / steps
        self._sums = np.zeros(2)  # of the values, and of their weights, up to the last row
        distance = np.subtract.outer(np.arange(_ROWS), np.arange(_ROWS))
        self._within = np.where(distance >= 0, self._decay ** np.maximum(distance, 0), 0.0)

    def __call__(self, y: Floats) -> Floats:
        """The average of these rows, which come after those that were given before; shape (rows,) as `y`."""
        known = np.isfinite(y)
        rows = y.size
        blocks = -(-rows // _ROWS)
        padded = np.zeros((2, blocks * _ROWS))
        padded[0, :rows] = np.where(known, y, 0.0)
        padded[1, :rows] = known
        sums = padded.reshape(2, blocks, _ROWS) @ self._within.T  # as if each block were the first
        fading = self._decay ** np.arange(1, _ROWS + 1)
        before = self._sums
        for block in range(blocks):
            sums[:, block] += before[:, None] * fading
            before = sums[:, block, -1]
        flat = sums.reshape(2, -1)[:, :rows]
        if rows:
            self._sums = flat[:, -1].copy()
        return np.where(known, flat[0] / np.where(known, flat[1], 1.0), np.nan)


_ROWS = 128
"""Of a block, which is averaged at once."""
