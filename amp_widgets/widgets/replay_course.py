"""A recorded run as it was at each of its steps: what a replay looks up. Its cost does not grow with the length of the run."""

from __future__ import annotations

import bisect
import datetime
import math
import threading
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from amp_widgets.analysis.gradients import GradientRange
from amp_widgets.core.history import COLUMNS, Cursor, Event
from amp_widgets.core.memory.profile import StepProfile
from amp_widgets.core.settings import Settings
from amp_widgets.errors import RecordingError, SettingsError
from amp_widgets.language import say
from amp_widgets.recording.run import Run
from amp_widgets.recording.settings_course import settings_in_force
from amp_widgets.recording.writer import WriterState
from amp_widgets.widgets.state import DashboardState

RECENT_STEPS = 50
"""The time of a step is the median of so many."""
LONGEST_WAIT_S = 2.0
"""Time between two steps beyond this, and beyond twice what the step took, is a pause of the run: it is not waited for."""
UNTIMED_S = 0.01
"""A step of which the time was not recorded takes so long."""
WHOLE_ROWS = 400_000
"""Of a longer run, only rows that shape the chart are given to it at once."""
BLOCK_ROWS = 64
"""Of so many rows the extremes are given. `WHOLE_ROWS` of them come to more points than a chart draws without reducing them, so
that it knows that it has not every step."""
MEASURED_WITHIN = 4096
"""Memory that was not measured in a step is that of the newest step before, among so many."""


class Course:
    """What is known of a run, by its rows: one a step, from 0 on.

    Parameters
    ----------
    run
        An open one. It is read again by `refresh` alone; what was read stays when it is closed.

    Raises
    ------
    RecordingError
        When the run is closed, or its file is damaged.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._lock = threading.RLock()
        self._cursor: Cursor | None = None
        self._rows = _Rows()
        self._events_read = 0
        self._arrived: list[Event] = []
        self._events: tuple[Event, ...] = ()
        self._event_steps: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._skips: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._asked: list[Event] = []
        self._changes: list[int] = []
        self._settings: dict[int, Settings] = {}
        self._range: tuple[int, GradientRange] | None = None
        self._read()

    def refresh(self) -> bool:
        """Read what was written to the file since; whether that was anything.

        Raises
        ------
        RecordingError
            When the run is closed, or its file is damaged.
        """
        with self._lock:
            self._run.refresh()
            return self._read()

    @property
    def writer(self) -> WriterState:
        """What had become of the process that writes the file when it was read last."""
        return self._run.writer

    @property
    def silent_s(self) -> float:
        """Seconds since the file was written to."""
        return self._run.silent_s

    @property
    def rows(self) -> int:
        """How many there are."""
        return self._rows.size

    @property
    def last_step(self) -> int:
        """The step of the last row; -1 where there is none."""
        return int(self._rows.steps[-1]) if self.rows else -1

    @property
    def first_step(self) -> int:
        """The step of the first row; 0 where there is none."""
        return int(self._rows.steps[0]) if self.rows else 0

    @property
    def duration_s(self) -> float:
        """From the first to the last row, without pauses."""
        return float(self._rows.played_s[-1]) if self.rows else 0.0

    def step_at(self, row: int) -> int:
        """The step of a row; -1 where there is none."""
        return int(self._rows.steps[row]) if 0 <= row < self.rows else -1

    def row_of(self, step: float) -> int:
        """The last row that is not after a step; the first where there is none before it, and -1 where there is none at all."""
        return min(max(int(np.searchsorted(self._rows.ascending, step, side="right")) - 1, 0), self.rows - 1)

    def played_s(self, row: int) -> float:
        """Seconds from the first row to this one, without pauses."""
        return float(self._rows.played_s[row]) if 0 <= row < self.rows else 0.0

    def row_played(self, played_s: float) -> int:
        """The last row within so many seconds from the first; -1 where there is none at all."""
        return min(int(np.searchsorted(self._rows.played_s, played_s, side="right")), self.rows) - 1

    def is_end(self, row: int) -> bool:
        """Whether it is the last row, or there is none."""
        return row >= self.rows - 1

    def events_at(self, row: int) -> int:
        """How many events had happened by then, of those in order of their steps; at the end, all of them."""
        if self.is_end(row):
            return len(self._events)
        return int(np.searchsorted(self._event_steps, self.step_at(row), side="right"))

    def events(self, count: int) -> tuple[Event, ...]:
        """The first so many events, by step."""
        return self._events[:count]

    def history_at(self, row: int) -> HistoryUpTo:
        """The history as it was then."""
        return HistoryUpTo(self, row)

    def profiles_at(self, row: int) -> tuple[StepProfile, ...]:
        """The profiled steps until then, the same objects every time; at the end, all of them."""
        if self.is_end(row):
            return self._profiles
        step = self.step_at(row)
        return tuple(profile for profile in self._profiles if profile.step <= step)

    def gradients_at(self, row: int) -> GradientRange | None:
        """How large the gradients were in the newest step until then in which they were counted; the same object every time.

        Raises
        ------
        RecordingError
            When the run is closed, or its file is damaged.
        """
        steps = self._gradients.steps
        at = len(steps) if self.is_end(row) else bisect.bisect_right(steps, self.step_at(row))
        if not at:
            return None
        if self._range is None or self._range[0] != at:
            self._range = at, GradientRange.of(self._gradients[at - 1])
        return self._range[1]

    def settings_at(self, row: int) -> Settings:
        """What was in force in the step of a row."""
        step = self.step_at(row) if self.rows else None
        at = len(self._changes) if step is None else bisect.bisect_right(self._changes, step)
        if at not in self._settings:
            try:
                self._settings[at] = settings_in_force(self._written, self._arrived, step)
            except SettingsError as error:
                raise RecordingError(f"{self._run.path}: {error}; the file is damaged") from None
        return self._settings[at]

    def state_at(self, row: int) -> DashboardState:
        """All that the controls and the status line show of a step."""
        facts, rows = self._facts, self._rows
        settings = self.settings_at(row)
        common: dict[str, Any] = {
            "settings": settings,
            "layers": self._layers,
            "device": _text(facts.get("device")),
            "torch_version": _text(_mapping(facts.get("packages")).get("torch")),
            "memory_source": _text(facts.get("memory_source")) or say("not known"),
            "last_rejection": self._rejection_at(row),
            "notes": self._notes,
        }
        if not 0 <= row < self.rows:
            return DashboardState(**common)
        recent = slice(max(0, row + 1 - RECENT_STEPS), row + 1)
        scale = float(rows["scale"][row])
        return DashboardState(
            **common,
            step=self.step_at(row) + 1,
            scale=scale if settings.scales_loss and math.isfinite(scale) else None,
            step_s=_median(rows["step_s"][recent]),
            steps_per_s=_rate(rows.played_s[recent]),
            loss=float(rows["loss"][row]),
            skipped_steps=int(np.searchsorted(self._skips, self.step_at(row), side="right")),
            allocated_bytes=_newest_known(rows["allocated_bytes"], row),
            peak_bytes=_newest_known(rows["peak_bytes"], row),
            overall_peak_bytes=float(rows.highest[row]),
        )

    # ---- private ----------------------------------------------------------------------------------------------------

    def _read(self) -> bool:
        run, before = self._run, (self._rows.size, len(self._arrived))
        self._facts: Mapping[str, Any] = run.facts
        self._layers = run.layers
        self._profiles = run.profiles
        self._gradients = run.gradients
        self._written = run.settings_written
        self._notes = _notes(self._facts)
        self._settings = {}
        rows, self._cursor, start_over = run.history.rows_since(self._cursor, *COLUMNS)
        if start_over:  # what was thinned out has other rows now
            self._rows = _Rows()
        self._rows.append(rows)
        new, self._events_read = run.history.events_since(self._events_read)
        if new:
            self._arrived += new
            self._events = tuple(sorted(self._arrived, key=lambda event: event.step))
            self._event_steps = np.array([event.step for event in self._events], np.int64)
            self._asked = [event for event in self._events if event.kind in ("applied", "rejected")]
            self._skips = np.array([event.step for event in self._events if event.kind == "skipped"], np.int64)
        applied = {event.step for event in self._arrived if event.kind == "applied"}
        self._changes = sorted(applied | {one.step for one in self._written})
        return start_over or (self._rows.size, len(self._arrived)) != before

    def _rejection_at(self, row: int) -> str | None:
        """Why the newest request was rejected, if it was and none was granted since."""
        at = len(self._asked) if self.is_end(row) else bisect.bisect_right(self._asked, self.step_at(row), key=_step_of)
        newest = self._asked[at - 1] if at else None
        return newest.reason if newest is not None and newest.kind == "rejected" else None


class HistoryUpTo:
    """A history as it was after a row; what a chart and a picture read of one. Read-only; it goes on with `grow`.

    To go back, another one is made: a chart then starts over.
    """

    def __init__(self, course: Course, row: int) -> None:
        self._course = course
        self._rows = course._rows
        self._events = course.events(course.events_at(row))
        self.row = row

    def grow(self, row: int) -> bool:
        """Go on to this row; whether that could be done, which it cannot to an earlier one, or to one that is far away."""
        events = self._course.events(self._course.events_at(row))
        known = len(self._events)
        far = row < self.row or row - self.row > WHOLE_ROWS
        if far or self._course._rows is not self._rows or events[:known] != self._events:
            return False
        self.row = row
        if len(events) != known:
            self._events = events
        return True

    def columns(self, *names: str) -> dict[str, npt.NDArray[np.float64]]:
        """The named columns, or all; not copies, and not to be written to."""
        return {name: self._rows[name][: self.row + 1] for name in names or COLUMNS}

    @property
    def all_events(self) -> tuple[Event, ...]:
        """Every event until then, by step; the same object as long as there is no other."""
        return self._events

    def events(self, *kinds: str) -> list[Event]:
        """Every event until then, or those of these kinds, by step."""
        return [event for event in self._events if not kinds or event.kind in kinds]

    def events_since(self, index: int) -> tuple[list[Event], int]:
        """The events from the `index`-th on, by step, and the index to go on from."""
        return list(self._events[index:]), len(self._events)

    def rows_since(self, cursor: int | None, *names: str) -> tuple[dict[str, npt.NDArray[np.float64]], int, Literal[False]]:
        """As of `amp_widgets.core.history.History`; from the beginning on, of a long run only the rows that shape its lines."""
        end = self.row + 1
        new = slice(cursor, end) if cursor is not None or end <= WHOLE_ROWS else self._rows.shaping(end)
        return {name: self._rows[name][new] for name in names or COLUMNS}, end, False


class Outline:
    """A history of which only the rows that shape its lines are given: for a picture."""

    def __init__(self, history: HistoryUpTo) -> None:
        self._history = history

    def columns(self, *names: str) -> dict[str, npt.NDArray[np.float64]]:
        """The named columns, or all."""
        return self._history.rows_since(None, *names)[0]

    def events(self, *kinds: str) -> list[Event]:
        """Every event until then."""
        return self._history.events(*kinds)


class _Rows:
    """Columns that grow, and what follows from them."""

    def __init__(self) -> None:
        self.size = 0
        self._block: npt.NDArray[np.float64] = np.empty((len(COLUMNS) + 3, 0))
        self._shaping: list[npt.NDArray[np.intp]] = []  # positions of the rows that shape a line, by parts
        self._shaped = 0  # rows that were looked at for that: whole blocks

    def __getitem__(self, name: str) -> npt.NDArray[np.float64]:
        return self._block[COLUMNS.index(name), : self.size]

    @property
    def steps(self) -> npt.NDArray[np.float64]:
        """As they were recorded."""
        return self._block[0, : self.size]

    @property
    def ascending(self) -> npt.NDArray[np.float64]:
        """The steps; where they were to fall, level."""
        return self._block[-3, : self.size]

    @property
    def played_s(self) -> npt.NDArray[np.float64]:
        """Seconds since the first row, without pauses; ascending."""
        return self._block[-2, : self.size]

    @property
    def highest(self) -> npt.NDArray[np.float64]:
        """The highest peak so far."""
        return self._block[-1, : self.size]

    def append(self, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        start, end = self.size, self.size + len(columns["step"])
        if end == start:
            return
        if end > self._block.shape[1]:
            room = end if start == 0 else max(end, 2 * self._block.shape[1])
            grown = np.empty((len(self._block), room))
            grown[:, :start] = self._block[:, :start]
            self._block = grown
        new = self._block[:, start:end]
        for i, name in enumerate(COLUMNS):
            new[i] = columns[name]
        before = self._block[:, start - 1] if start else None
        new[-3] = np.maximum.accumulate(new[0] if before is None else np.maximum(new[0], before[-3]))
        new[-2] = self._played_s(new, before)
        peaks = new[COLUMNS.index("peak_bytes")]
        new[-1] = np.fmax.accumulate(peaks if before is None else np.fmax(peaks, before[-1]))
        self.size = end
        self._find_shaping()

    def _played_s(self, new: npt.NDArray[np.float64], before: npt.NDArray[np.float64] | None) -> npt.NDArray[np.float64]:
        time_s, step_s = new[COLUMNS.index("time_s")], new[COLUMNS.index("step_s")]
        first = time_s[0] if before is None else before[COLUMNS.index("time_s")]
        with np.errstate(invalid="ignore"):
            waits = np.diff(time_s, prepend=first)
        waits[~np.isfinite(waits)] = UNTIMED_S
        longest = np.fmax(LONGEST_WAIT_S, np.where(np.isfinite(step_s), 2 * step_s, 0.0))
        np.clip(waits, 0.0, longest, out=waits)
        if before is None:
            waits[0] = 0.0
        played: npt.NDArray[np.float64] = np.cumsum(waits) + (0.0 if before is None else before[-2])
        return played

    def shaping(self, end: int) -> npt.NDArray[np.intp]:
        """Of the rows before `end`: the extremes of each column in whole blocks, and all after these."""
        whole = min(end // BLOCK_ROWS * BLOCK_ROWS, self._shaped)
        kept = np.concatenate([part[: np.searchsorted(part, whole)] for part in self._shaping]) if self._shaping else _NONE
        return np.concatenate([kept, np.arange(whole, end)])

    def _find_shaping(self) -> None:
        end = self.size // BLOCK_ROWS * BLOCK_ROWS
        if self.size <= WHOLE_ROWS or end == self._shaped:
            return
        start = self._shaped
        blocks = np.arange(start, end, BLOCK_ROWS)
        found = [blocks, blocks + BLOCK_ROWS - 1]
        for name in ("loss", "scale", "allocated_bytes", "peak_bytes", "reserved_bytes"):
            column = self._block[COLUMNS.index(name), start:end].reshape(-1, BLOCK_ROWS)
            finite = np.isfinite(column)
            found.append(blocks + np.where(finite, column, np.inf).argmin(axis=1))
            found.append(blocks + np.where(finite, column, -np.inf).argmax(axis=1))
            if name == "loss":  # the first that is not finite has a mark
                found.append((blocks + (~finite).argmax(axis=1))[~finite.all(axis=1)])
        self._shaping.append(np.unique(np.concatenate(found)))
        self._shaped = end


_NONE = np.empty(0, np.intp)


def _step_of(event: Event) -> int:
    return event.step


def _newest_known(column: npt.NDArray[np.float64], row: int) -> float:
    first = max(0, row + 1 - MEASURED_WITHIN)
    known = np.flatnonzero(~np.isnan(column[first : row + 1]))
    return float(column[first + known[-1]]) if known.size else math.nan


def _median(values: npt.NDArray[np.float64]) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if known.size else math.nan


def _rate(times_s: npt.NDArray[np.float64]) -> float:
    span_s = float(times_s[-1] - times_s[0]) if times_s.size else 0.0
    return (times_s.size - 1) / span_s if span_s > 0 else math.nan


def _notes(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """Where and when the run was made, in a sentence."""
    packages = _mapping(facts.get("packages"))
    made = [
        f"{name} {_text(version)}"
        for name, version in (
            ("amp_widgets", packages.get("amp-widgets")),
            ("Python", facts.get("python")),
            ("CUDA", facts.get("cuda")),
        )
        if _text(version)
    ]
    system = _text(facts.get("system"))
    began = _when(_text(facts.get("began")))
    values = {
        "when": began,
        "packages": say(" with {packages}", packages=", ".join(made)) if made else "",
        "system": say(" on {system}", system=system) if system else "",
    }
    return (say("Recorded{when}{packages}{system}.", **values),) if any(values.values()) else ()


def _when(text: str) -> str:
    try:
        at = datetime.datetime.fromisoformat(text).astimezone(datetime.UTC)
        return say(" on {date} at {time} UTC", date=f"{at:%Y-%m-%d}", time=f"{at:%H:%M}")
    except (ValueError, OverflowError):
        return ""


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: Any) -> str:
    """A short text as such; anything else is none."""
    return value[:200] if isinstance(value, str) else ""
