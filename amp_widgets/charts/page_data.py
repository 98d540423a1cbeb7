"""What a page holds of a run: bounded, however long the run is, and the same on both sides of the wire."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from amp_widgets.charts.decimate import Points, decimated, evened, without_long_gaps
from amp_widgets.charts.labels import MARKED_KINDS, EventLike, event_label, event_text, short_event_label
from amp_widgets.charts.series import SERIES, essential, series_of

MOST_POINTS = 10_000
OVERVIEW_POINTS = 2_000
OUTLINE_POINTS = 8_000
MOST_EVENTS = 2_000


class PageData:
    """The lines, marks and events that a page draws.

    Rows are appended as they are until a series has more than ``MOST_POINTS`` points; then all are reduced to an overview of
    about ``OVERVIEW_POINTS`` and appending goes on. The overview is not made from the whole run but from an outline of it with
    four times the points, which is kept beside, so that its cost does not grow with the run.
    """

    def __init__(self) -> None:
        self.series: dict[str, _Growing] = {name: _Growing() for name in SERIES}
        self.events: list[dict[str, Any]] = []
        self.exact_from = -math.inf
        """The first step from which on every row is there; before it the lines are reduced."""
        self.last_step = math.nan
        self.skipped = 0
        self.first_loss_step = math.inf
        """Where a loss was recorded first; infinite as long as none was."""
        self._outline: dict[str, Points] = {name: (np.empty(0), np.empty(0)) for name in SERIES}
        self._overview_size = dict.fromkeys(SERIES, 0)

    def append(self, columns: Mapping[str, npt.NDArray[Any]], skipped_steps: npt.NDArray[Any] | None = None) -> dict[str, Points]:
        """Add rows; what was added to each series.

        Parameters
        ----------
        columns
            Name → array of shape (rows,), see :data:`amp_widgets.charts.series.COLUMNS`.
        skipped_steps
            See :func:`amp_widgets.charts.series.series_of`.
        """
        series = series_of(
            columns,
            skipped_steps=skipped_steps,
            loss_known=self.first_loss_step < math.inf,
            last_log2_scale=self.series["scale"].last_known,
        )
        added = {name: self.series[name].append(points) for name, points in series.items()}
        recorded = np.flatnonzero(~np.isnan(columns["loss"]))
        if recorded.size:
            self.first_loss_step = min(self.first_loss_step, float(columns["step"][recorded[0]]))
        self.skipped += series["skipped"][0].size
        if columns["step"].size:
            self.last_step = float(columns["step"][-1])
        return added

    def add_events(self, events: Sequence[EventLike]) -> tuple[list[dict[str, Any]], bool]:
        """Add the marks of events.

        Returns
        -------
        added
            The new marks.
        reduced
            There were more than ``MOST_EVENTS``: every second of the older half was dropped.
        """
        added = [
            {
                "step": event.step,
                "kind": event.kind,
                "label": event_label(event),
                "short": short_event_label(event),
                "text": event_text(event),
            }
            for event in events
            if event.kind in MARKED_KINDS
        ]
        self.events += added
        reduced = False
        while len(self.events) > MOST_EVENTS:
            half = len(self.events) // 2
            self.events = self.events[:half:2] + self.events[half:]
            reduced = True
        return added, reduced

    @property
    def is_full(self) -> bool:
        """Whether it is time to reduce."""
        return any(len(points) > MOST_POINTS for points in self.series.values())

    def reduce(self) -> None:
        """Reduce every series to an overview."""
        for name, line in self.series.items():
            x, y = line.points()
            outline_x, outline_y = self._outline[name]
            size = self._overview_size[name]
            whole = np.concatenate([outline_x, x[size:]]), np.concatenate([outline_y, y[size:]])
            self._outline[name] = evened(*essential(name, whole), OUTLINE_POINTS)
            line.replace(decimated(*self._outline[name], OVERVIEW_POINTS))
            self._overview_size[name] = len(line)
        self.exact_from = self.last_step

    def everything(self) -> dict[str, Points]:
        """All series."""
        return {name: points.points() for name, points in self.series.items()}


class _Growing:
    """One series; a run of gaps is one gap, and it does not begin with one."""

    def __init__(self) -> None:
        self._block = np.empty((2, 256))
        self._size = 0
        self.last_known = math.nan

    def __len__(self) -> int:
        return self._size

    def points(self) -> Points:
        return self._block[0, : self._size], self._block[1, : self._size]

    def append(self, points: Points) -> Points:
        x, y = without_long_gaps(*points)
        if y.size and np.isnan(y[0]) and (self._size == 0 or np.isnan(self._block[1, self._size - 1])):
            x, y = x[1:], y[1:]
        end = self._size + y.size
        if end > self._block.shape[1]:
            grown = np.empty((2, max(end, 2 * self._block.shape[1])))
            grown[:, : self._size] = self._block[:, : self._size]
            self._block = grown
        self._block[:, self._size : end] = x, y
        self._size = end
        known = y[~np.isnan(y)]
        if known.size:
            self.last_known = float(known[-1])
        return x, y

    def replace(self, points: Points) -> None:
        x, y = points
        self._block = np.array([x, y])
        self._size = y.size
