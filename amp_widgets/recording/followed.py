"""A run as it is drawn over others, kept up to date. Free of torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from amp_widgets.charts.course import COLUMNS, Align, Course
from amp_widgets.core.history import Cursor, History
from amp_widgets.core.settings import FIELD_NAMES, describe_changes
from amp_widgets.errors import AmpWidgetsError
from amp_widgets.recording.beginning import began_s
from amp_widgets.recording.run_like import RunLike, changes_still, newest_history


class FollowedRun:
    """The lines of a run along steps or time, and the changes of its settings.

    Parameters
    ----------
    run
        Whose.
    align
        ``"step"``, or ``"time"``: seconds since its first step began.
    smoothing
        As in `Course`.

    Attributes
    ----------
    course
        Its lines.
    changes
        Where settings were changed on the way, and to what.
    why_not
        Why nothing new could be read the last time, for people; None while it can.
    """

    def __init__(self, run: RunLike, *, align: Align = "step", smoothing: int = 0) -> None:
        self.why_not: str | None = None
        self._run = run
        self._align = align
        self._smoothing = smoothing
        self._history: History | None = None
        self._cursor = Cursor()
        self._events = 0
        self._began_s = math.nan
        self._changes: list[tuple[int, float, str]] = []
        self.course = Course(smoothing=smoothing)

    def pull(self) -> bool:
        """Read what is new; whether there was anything.

        A file that cannot be read is said in `why_not`; what was read before stays, and the next time it is tried again.
        """
        before = self.why_not
        try:
            history = newest_history(self._run)
        except AmpWidgetsError as error:
            self.why_not = str(error)
            return self.why_not != before
        self.why_not = None
        anew = self._history is not None and history is not self._history
        if anew:
            self._start_over()
        self._history = history
        rows, cursor, start_over = history.rows_since(self._cursor, *COLUMNS)
        events, self._events = history.events_since(self._events)
        if start_over:  # older rows were merged; what is known of them is better
            rows, cursor = history.rows_appended_since(self._cursor)
        self._cursor = cursor
        if rows["step"].size:
            if math.isnan(self._began_s):
                self._began_s = began_s(rows)
            self.course.append(self._place(rows["step"], rows["time_s"]), rows)
        for event in events:
            if event.kind == "applied":
                what = describe_changes({name: value for name, value in event.detail.items() if name in FIELD_NAMES})
                self._changes.append((event.step, event.time_s, what or event.reason))
        return anew or before is not None or bool(rows["step"].size or events)

    @property
    def changes(self) -> list[tuple[float, str]]:
        """Where settings were changed, and to what."""
        if self._align == "step":
            return [(float(step), what) for step, _, what in self._changes]
        return [(max(time_s - self._began_s, 0.0), what) for _, time_s, what in self._changes]

    @property
    def live(self) -> bool:
        """Whether there may be more to come."""
        return changes_still(self._run)

    @property
    def steps(self) -> int:
        """How many were read."""
        return 0 if self._history is None else self._history.total_rows

    def _start_over(self) -> None:
        self.course = Course(smoothing=self._smoothing)
        self._cursor = Cursor()
        self._events = 0
        self._began_s = math.nan
        self._changes = []

    def _place(self, step: npt.NDArray[Any], time_s: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        return step.astype(np.float64) if self._align == "step" else time_s - self._began_s
