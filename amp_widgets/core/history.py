"""What happened in a run: one row of numbers a step, and every event. Columnar, thread-safe, bounded; free of torch."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from amp_widgets.errors import HistoryError, MissingExtraError

if TYPE_CHECKING:
    import pandas

COLUMNS = ("step", "time_s", "loss", "scale", "skipped", "step_s", "allocated_bytes", "peak_bytes", "reserved_bytes")
DEFAULT_CAPACITY = 1_000_000


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that happened at a step.

    Parameters
    ----------
    step
        The first step, counted from 0, for which it holds; for ``"skipped"`` the step that was skipped.
    kind
        ``"applied"``, ``"rejected"``, ``"skipped"``, ``"scale_changed"``, ``"run"``, ``"note"`` or ``"out_of_memory"``.
    reason
        A sentence for people.
    detail
        What a program needs, JSON-able. ``applied`` and ``rejected``: the requested changes by name of the setting, and
        ``"source"``; ``scale_changed``: ``"from"`` and ``"to"``; ``run``: ``"state"``;
        ``out_of_memory``: bytes (None where not known), cause, phase, layer and operator.
    time_s
        Seconds since the history began.
    """

    step: int
    kind: str
    reason: str
    detail: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    time_s: float = math.nan


@dataclasses.dataclass(frozen=True, slots=True)
class Cursor:
    """How far a reader has come; ``Cursor()`` is the beginning. Made by :meth:`History.rows_since`.

    Parameters
    ----------
    rows
        Of those that are kept.
    reductions
        How often the older rows had been reduced.
    appended
        Of all rows that were ever appended.
    """

    rows: int = 0
    reductions: int = 0
    appended: int = 0


class History:
    """A run, step by step.

    Parameters
    ----------
    capacity
        Most rows that are kept, at least 4. When they are reached, the older half of them is reduced; the newer half always has
        every step.
    extra_columns
        Names of further columns, after those in ``COLUMNS``.

    Notes
    -----
    Reduction brings the whole older half to one resolution, so that a long run stays visible from its beginning: each of its
    rows stands for the same number of appended rows, its span, except for the newest of them, which the next reduction
    completes. The span is a power of two. It doubles only when keeping it would free fewer than a sixteenth of the capacity,
    so reduced rows are spread evenly, and about 7/32 to 7/16 of the capacity. The very first row is never merged.

    Of the rows that become one, those that were skipped go before those whose loss is not finite, and these before others;
    of equals the latest stays. It stays whole, so that its step, loss and scale belong together, except that its byte columns
    are the largest of all, ``step_s`` is the mean over the steps, and what it had not measured is taken from another. Events are
    never dropped.

    Appending never waits for a reader: rows once written are not changed in place (reduction makes a new block), so readers
    copy outside of the lock.

    Raises
    ------
    HistoryError
        When the capacity is below 4, or a column is named twice.
    """

    def __init__(self, *, capacity: int = DEFAULT_CAPACITY, extra_columns: Sequence[str] = ()) -> None:
        if capacity < 4:
            raise HistoryError(f"capacity: got {capacity!r}, expected at least 4 rows")
        self._names = (*COLUMNS, *extra_columns)
        self._index = {name: i for i, name in enumerate(self._names)}
        if len(self._index) != len(self._names):
            raise HistoryError(
                f"extra_columns: got {list(extra_columns)!r}, expected names that differ from each other and from {COLUMNS}"
            )
        self._capacity = capacity
        self._lock = threading.Lock()
        self._block: npt.NDArray[np.float64] = np.empty((len(self._names), min(capacity, _FIRST_ROWS)))  # a column is contiguous
        self._stored = 0  # rows in the block
        # Rows arrive in a small row-wise buffer (one struct.pack each) and move to the block together.
        self._buffer = bytearray(8 * len(self._names) * min(capacity, _BUFFER_ROWS))
        self._arrived: npt.NDArray[np.float64] = np.frombuffer(self._buffer).reshape(-1, len(self._names))  # the same memory
        self._arrived_rows = 0
        self._room = len(self._arrived)  # rows that may arrive before they must be stored
        self._pack_into = struct.Struct(f"{len(self._names)}d").pack_into
        self._row_bytes = 8 * len(self._names)
        self._nothing = dict.fromkeys(self._names, math.nan)
        self._newest_measured = np.full(len(self._names), np.nan)  # of the rows in the block
        self._reductions = 0
        self._reduced_rows = 0  # the first of the block, from the last reduction
        self._span = 1  # appended rows that each of them stands for, but for the very first (1) and the last (may lack some)
        self._total_rows = 0
        self._events: list[Event] = []
        self.on_event: Callable[[], None] | None = None
        """Called after every event, on the thread that has recorded it."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns."""
        return self._names

    @property
    def capacity(self) -> int:
        """Most rows that are kept."""
        return self._capacity

    @property
    def total_rows(self) -> int:
        """Rows ever appended, also those that reduction has merged since."""
        return self._total_rows

    def __len__(self) -> int:
        """Rows kept."""
        with self._lock:
            return self._stored + self._arrived_rows

    def __repr__(self) -> str:
        return f"<History: {self._total_rows} steps, {len(self._events)} events>"

    def append(self, **values: float) -> None:
        """Add one row, of `values` by column; columns that are not named are NaN.

        Raises
        ------
        HistoryError
            When ``step`` is missing, a column is unknown or a value is not a number; nothing is added then.
        """
        row = self._nothing | values  # in the order of the columns
        if len(row) != len(self._nothing):
            raise self._unknown(next(name for name in values if name not in self._index))
        if "step" not in values:
            raise HistoryError("append: got no step, expected step=<number of the step> in every row")
        with self._lock:
            at = self._arrived_rows
            try:
                self._pack_into(self._buffer, at * self._row_bytes, *row.values())
            except (struct.error, TypeError, ValueError) as error:
                raise HistoryError(f"append: got {values!r}, expected numbers only ({error})") from None
            self._arrived_rows = at + 1
            self._total_rows += 1
            if at + 1 == self._room:
                self._store()

    def extend(self, columns: Mapping[str, npt.ArrayLike]) -> None:
        """Add many rows; columns that are not named are NaN.

        Parameters
        ----------
        columns
            Name → one number a row; ``step`` must be among them.

        Raises
        ------
        HistoryError
            When ``step`` is missing, a column is unknown, or they differ in length; nothing is added then.
        """
        if "step" not in columns:
            raise HistoryError("extend: got no step, expected the number of the step in every row")
        given = {self._positions((name,))[name]: np.asarray(column, dtype=np.float64) for name, column in columns.items()}
        shapes = {column.shape for column in given.values()}
        if len(shapes) != 1 or len(next(iter(shapes))) != 1:
            raise HistoryError(f"extend: got columns of the shapes {sorted(shapes)}, expected one length")
        rows = np.full((len(self._names), *shapes.pop()), np.nan)
        for position, column in given.items():
            rows[position] = column
        with self._lock:
            self._store()
            while rows.shape[1]:
                room = self._capacity - self._stored
                self._put(rows[:, :room])
                self._total_rows += min(room, rows.shape[1])
                if self._stored == self._capacity:
                    self._reduce()
                rows = rows[:, room:]
            self._room = min(len(self._arrived), self._capacity - self._stored)

    def record(self, event: Event) -> None:
        """Add an event."""
        with self._lock:
            self._events.append(event)
        listener = self.on_event
        if listener is not None:
            listener()

    def columns(self, *names: str) -> dict[str, npt.NDArray[Any]]:
        """The columns of these `names`, or all; copies of shape ``(len(self),)``.

        Returns
        -------
        dict
            Name → float64 array, NaN where not measured; ``step`` is int64.

        Raises
        ------
        HistoryError
            When there is no such column.
        """
        return self.rows_since(Cursor(), *names)[0]

    def rows_since(self, cursor: Cursor | None, *names: str) -> tuple[dict[str, npt.NDArray[Any]], Cursor, bool]:
        """What was appended since `cursor`, in the columns of these `names`; None is the beginning.

        Returns
        -------
        rows
            As from :meth:`columns`.
        cursor
            Where to go on next time.
        start_over
            True when the rows before `cursor` were reduced since: `rows` then has all that are kept, and what was read before is
            to be dropped.

        Raises
        ------
        HistoryError
            When there is no such column.
        """
        wanted = self._positions(names)
        cursor = cursor or Cursor()
        with self._lock:
            self._store()
            block, stored, reductions, appended = self._block, self._stored, self._reductions, self._total_rows
        start_over = cursor.reductions != reductions and cursor.rows > 0
        first = cursor.rows if cursor.reductions == reductions else 0
        rows = {
            name: block[i, first:stored].astype(np.int64 if name == "step" else np.float64, copy=True)
            for name, i in wanted.items()
        }
        return rows, Cursor(stored, reductions, appended), start_over

    def rows_appended_since(self, cursor: Cursor | None) -> tuple[dict[str, npt.NDArray[Any]], Cursor]:
        """All columns of the rows that were appended since `cursor`, never those before it; and where to go on next time.

        They are at full resolution, as long as they are not more than half the capacity.
        """
        rows, now, start_over = self.rows_since(cursor)
        if start_over and cursor is not None:
            first = max(0, now.rows - (now.appended - cursor.appended))
            rows = {name: column[first:] for name, column in rows.items()}
        return rows, now

    def last(self, name: str, *, measured: bool = False) -> float:
        """The value in the newest row of the column `name`, or with `measured` the newest that is not NaN; NaN if there is none.

        Raises
        ------
        HistoryError
            When there is no such column.
        """
        i = self._positions((name,))[name]
        with self._lock:
            if measured:
                arrived = self._arrived[: self._arrived_rows, i]
                known = np.flatnonzero(~np.isnan(arrived))
                return float(arrived[known[-1]]) if known.size else float(self._newest_measured[i])
            if self._arrived_rows:
                return float(self._arrived[self._arrived_rows - 1, i])
            return float(self._block[i, self._stored - 1]) if self._stored else math.nan

    def events(self, *kinds: str) -> list[Event]:
        """Every event, or those of these kinds, by step and within a step in order of arrival."""
        with self._lock:
            events = self._events.copy()
        return sorted((event for event in events if not kinds or event.kind in kinds), key=lambda event: event.step)

    def events_since(self, index: int) -> tuple[list[Event], int]:
        """The events from the `index`-th on in order of arrival, and the index to go on from."""
        with self._lock:
            return self._events[index:], len(self._events)

    def to_pandas(self) -> pandas.DataFrame:
        """Every row that is kept, as a table.

        Returns
        -------
        pandas.DataFrame
            A column for each of `names`, ``step`` of int64, the others of float64 with NaN where not measured. Units are in the
            names: sizes in bytes, times in seconds; ``time_s`` counts from when the history began, ``loss`` and ``scale`` have no
            unit, ``skipped`` is 0 or 1.

        Raises
        ------
        MissingExtraError
            When pandas is not installed.
        """
        return _pandas("to_pandas").DataFrame(self.columns())

    def events_to_pandas(self) -> pandas.DataFrame:
        """Every event, as a table.

        Returns
        -------
        pandas.DataFrame
            ``step`` (int64), ``kind``, ``reason``, ``detail`` (JSON text) and ``time_s`` (seconds since the history began), by
            step and within a step in order of arrival: see `Event`.

        Raises
        ------
        MissingExtraError
            When pandas is not installed.
        """
        events = self.events()
        columns: dict[str, Any] = {
            "step": np.array([event.step for event in events], dtype=np.int64),
            "kind": [_unicode(event.kind) for event in events],
            "reason": [_unicode(event.reason) for event in events],
            "detail": [json.dumps(dict(event.detail)) for event in events],
            "time_s": np.array([event.time_s for event in events], dtype=np.float64),
        }
        frame = _pandas("events_to_pandas").DataFrame(columns)
        return frame.astype({"kind": "str", "reason": "str", "detail": "str"})

    def _positions(self, names: Sequence[str]) -> dict[str, int]:
        try:
            return {name: self._index[name] for name in names or self._names}
        except KeyError as error:
            raise self._unknown(error.args[0]) from None

    def _unknown(self, name: str) -> HistoryError:
        return HistoryError(f"{name}: there is no such column; expected one of {', '.join(self._names)}")

    def _store(self) -> None:
        """Move the rows that have arrived to the block. The lock is held."""
        arrived, self._arrived_rows = self._arrived[: self._arrived_rows].T, 0
        if not arrived.shape[1]:
            return
        self._put(arrived)
        if self._stored == self._capacity:
            self._reduce()
        self._room = min(len(self._arrived), self._capacity - self._stored)

    def _put(self, rows: npt.NDArray[np.float64]) -> None:
        """Write rows for which there is room at the end of the block. The lock is held."""
        start, end = self._stored, self._stored + rows.shape[1]
        if end > self._block.shape[1]:
            grown = np.empty((len(self._names), min(self._capacity, max(end, 2 * self._block.shape[1]))))
            grown[:, :start] = self._block[:, :start]
            self._block = grown
        self._block[:, start:end] = rows
        for i, column in enumerate(rows):
            known = np.flatnonzero(~np.isnan(column))
            if known.size:
                self._newest_measured[i] = column[known[-1]]
        self._stored = end

    def _reduce(self) -> None:
        """Bring the older half to one resolution, in a new block. The lock is held, and all rows are in the block."""
        older = max(self._capacity // 2, 3)  # the first row stays as it is, so that it takes three to merge any
        # The place in the order of arrival at which each row begins, and at the end that of the first row that stays as it is.
        begins = np.arange(older + 1) + (self._total_rows - self._stored)
        begins[: self._reduced_rows] = (np.arange(self._reduced_rows) - 1) * self._span + 1
        begins[0] = 0
        first, last_span = max(self._reduced_rows - 1, 0), self._span  # rows before `first` are complete already
        while True:
            cells = -(-begins[:-1] // self._span)  # rounded up: the first row alone, then 1 to span, span + 1 to 2 span, ...
            starts = np.flatnonzero(np.diff(cells, prepend=-1))
            if older - starts.size >= max(self._capacity // 16, 1):
                break
            self._span *= 2
        if self._span != last_span:
            first = 0
        block, reduced = np.empty_like(self._block), starts.size
        block[:, :first] = self._block[:, :first]
        block[:, first:reduced] = _merged(
            self._names, self._block[:, first:older], np.diff(begins[first:]), starts[first:] - first
        )
        block[:, reduced : reduced + self._stored - older] = self._block[:, older : self._stored]
        self._block = block
        self._stored += reduced - older
        self._reduced_rows = reduced
        self._reductions += 1


def _unicode(text: str) -> str:
    """As every file can have it: Python's strings may hold half a character."""
    return text.encode(errors="replace").decode()


def _pandas(what: str) -> Any:
    try:
        import pandas
    except ImportError as error:
        raise MissingExtraError(f"{what}: {error}; install pandas with: pip install 'amp-widgets[pandas]'") from error
    return pandas


_FIRST_ROWS = 1024
_BUFFER_ROWS = 256


def _merged(
    names: Sequence[str], rows: npt.NDArray[np.float64], spans: npt.NDArray[np.int64], starts: npt.NDArray[np.intp]
) -> npt.NDArray[np.float64]:
    """One row for each group of neighbours, as the notes of :class:`History` say.

    `rows` is (columns, rows), `spans` how many appended rows each stands for, `starts` where the groups begin.
    """
    count = rows.shape[1]
    position = np.arange(count)
    worth = 2 * (rows[names.index("skipped")] == 1) + ~np.isfinite(rows[names.index("loss")])
    merged = rows[:, np.maximum.reduceat(worth * count + position, starts) % count]
    for i, name in enumerate(names):
        unknown = np.isnan(rows[i])
        if name.endswith("_bytes"):
            merged[i] = np.fmax.reduceat(rows[i], starts)
        elif name == "step_s":
            measured = np.add.reduceat(np.where(unknown, 0, spans), starts)
            total = np.add.reduceat(np.where(unknown, 0, rows[i] * spans), starts)
            merged[i] = np.divide(total, measured, out=np.full(starts.size, np.nan), where=measured > 0)
        elif name not in ("step", "loss"):
            latest_known = np.maximum(np.maximum.reduceat(np.where(unknown, 0, position), starts), starts)
            merged[i] = np.where(np.isnan(merged[i]), rows[i, latest_known], merged[i])
    return merged
