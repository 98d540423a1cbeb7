"""What an overlay holds of one run: bounded, however long the run is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from amp_widgets.charts.decimate import Points, evened
from amp_widgets.charts.moving_average import MovingAverage
from amp_widgets.charts.series import essential, series_of

Align = Literal["step", "time"]
METRICS = ("loss", "scale", "peak", "allocated", "step_s")
"""The lines: loss, base-2 logarithm of the loss scale, peak and allocated bytes, seconds a step."""
MARKS = ("not_finite", "skipped")
"""As in `amp_widgets.charts.series`."""
SMOOTHED = ("loss", "step_s")
"""The lines that may be smoothed: what varies from batch to batch. A peak or a scale is what it is."""
COLUMNS = ("step", "time_s", "loss", "scale", "skipped", "step_s", "allocated_bytes", "peak_bytes")
"""The columns of a history that are read."""
MOST_POINTS = 16_000
OUTLINE_POINTS = 8_000


class Course:
    """The lines and marks of one run, along steps or time.

    Rows are appended as they are, until a line has more than ``MOST_POINTS`` points. Then it is reduced to the lowest and the
    highest point of each of ``OUTLINE_POINTS / 2`` stretches of equal width, and appending goes on.

    Parameters
    ----------
    smoothing
        Rows over which `SMOOTHED` lines are averaged, see `MovingAverage`; 0 for none. All rows count, before any is left out.
    """

    def __init__(self, *, smoothing: int = 0) -> None:
        self.lines: dict[str, Points] = {name: (np.empty(0), np.empty(0)) for name in (*METRICS, *MARKS)}
        self._averages = {name: MovingAverage(smoothing) for name in SMOOTHED} if smoothing > 1 else {}
        self._loss_known = False
        self._last_log2_scale = np.nan

    def append(self, x: npt.NDArray[Any], columns: Mapping[str, npt.NDArray[Any]]) -> None:
        """Add rows.

        Parameters
        ----------
        x
            Where each of them is drawn, shape (rows,); one that is not finite is left out.
        columns
            Name → array of shape (rows,), see `COLUMNS`.
        """
        placed = np.isfinite(x)
        rows = {name: np.asarray(columns[name], np.float64)[placed] for name in COLUMNS} | {"step": np.asarray(x)[placed]}
        series = series_of(rows, loss_known=self._loss_known, last_log2_scale=self._last_log2_scale)
        series["step_s"] = rows["step"], np.where(np.isfinite(rows["step_s"]), rows["step_s"], np.nan)
        for name, average in self._averages.items():
            series[name] = series[name][0], average(series[name][1])
        for name, line in self.lines.items():
            self.lines[name] = _bounded(name, line, series[name])
        self._loss_known = self._loss_known or not np.isnan(rows["loss"]).all()
        scales = series["scale"][1][~np.isnan(series["scale"][1])]
        if scales.size:
            self._last_log2_scale = float(scales[-1])


def _bounded(name: str, line: Points, added: Points) -> Points:
    whole = np.concatenate([line[0], added[0]]), np.concatenate([line[1], added[1]])
    if name == "scale":
        whole = essential(name, whole)
    return evened(*whole, OUTLINE_POINTS) if whole[0].size > MOST_POINTS else whole
