"""A run that was recorded, or is being recorded by another kernel: read-only, and free of torch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import sqlite3
import stat
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from amp_widgets.core.gradient_counts import GradientCounts
from amp_widgets.core.history import COLUMNS, DEFAULT_CAPACITY, Event, History
from amp_widgets.core.memory.profile import StepProfile
from amp_widgets.core.settings import FIELD_NAMES, Settings
from amp_widgets.errors import RecordingError, SettingsError
from amp_widgets.recording import schema
from amp_widgets.recording.gradient_rows import from_row
from amp_widgets.recording.recorded_gradients import RecordedGradients
from amp_widgets.recording.run_path import run_path
from amp_widgets.recording.settings_course import WrittenSettings, settings_in_force
from amp_widgets.recording.step_profiles import profile_from_json
from amp_widgets.recording.system_error import why_not
from amp_widgets.recording.writer import WriterState, state_of


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecordedLayer:
    """A row of the layer table: as `amp_widgets.core.checkpointing.Layer`."""

    name: str
    type: str
    parameters: int
    why_not: str | None
    structural: bool


def open_run(path: str | os.PathLike[str]) -> Run:
    """The run in the file at `path`, also one that is being written.

    Raises
    ------
    RecordingError
        When there is no such file, it is none of a run, it is damaged, or a newer amp_widgets wrote it.
    """
    return Run(path)


class Run:
    """What is in a run file; made by `open_run`.

    Attributes
    ----------
    path
        Of the file.
    facts
        About the run: model, device, versions of packages, when it began.
    history
        Every step and every event, as a session has it.
    writer
        What had become of the process that writes the file when it was read last: whatever it had written is read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        named = run_path(path)
        if named is None:
            raise RecordingError(
                f"open_run: got {path!r}, expected the path of a file that a session has recorded, such as 'run.db'"
            )
        self.path = named
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = _connect(self.path)
        self._rows = 0
        self._events = 0
        self._profiles: tuple[StepProfile, ...] = ()
        self._gradients = RecordedGradients((), self._read_gradients)
        try:
            with self._reading() as connection:
                facts = _facts(connection)
                self._writer = facts.pop("writer", None)
                self.writer: WriterState = "unknown"
                self.facts: Mapping[str, Any] = MappingProxyType(facts)
                self._columns = _columns(connection)
                self.history = History(capacity=DEFAULT_CAPACITY, extra_columns=self._columns[len(COLUMNS) :])
            self.refresh()
        except BaseException:
            self.close()
            raise

    # ---- what is in it ----------------------------------------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        """The settings in force at the end."""
        return self.settings_at(None)

    def settings_at(self, step: int | None) -> Settings:
        """The settings in force in a step; None is the end.

        Raises
        ------
        RecordingError
            When what was applied cannot have been in force.
        """
        try:
            return settings_in_force(self.settings_written, self.history.events_since(0)[0], step)
        except SettingsError as error:
            raise RecordingError(f"{self.path}: {error}; the file is damaged") from None

    @property
    def settings_written(self) -> tuple[WrittenSettings, ...]:
        """What the file has of settings, as it was written."""
        with self._reading() as connection:
            rows = connection.execute("SELECT after_events, step, content FROM settings ORDER BY rowid").fetchall()
        return tuple(
            WrittenSettings(
                after_events=_whole(after_events, "settings"),
                step=_whole(step, "settings"),
                settings=_settings(_json(content, "settings")),
            )
            for after_events, step, content in rows
        )

    @property
    def events(self) -> list[Event]:
        """Every event, by step."""
        return self.history.events()

    @property
    def layers(self) -> tuple[RecordedLayer, ...]:
        """The layer table."""
        query = "SELECT name, type, parameters, why_not, structural FROM layers ORDER BY position"
        with self._reading() as connection:
            rows = connection.execute(query).fetchall()
        return tuple(
            RecordedLayer(
                name=_text(name, "layers"),
                type=_text(kind, "layers"),
                parameters=_whole(parameters, "layers"),
                why_not=None if why_not is None else _text(why_not, "layers"),
                structural=bool(structural),
            )
            for name, kind, parameters, why_not, structural in rows
        )

    @property
    def profiles(self) -> tuple[StepProfile, ...]:
        """Of the steps that were profiled, all of them, the newest last; the same objects every time."""
        with self._reading() as connection:
            query = "SELECT content FROM profiles ORDER BY id LIMIT -1 OFFSET ?"
            rows = connection.execute(query, (len(self._profiles),)).fetchall()
            if rows:
                self._profiles += tuple(profile_from_json(_json(content, "profiles")) for (content,) in rows)
            return self._profiles

    @property
    def gradients(self) -> RecordedGradients:
        """How large the gradients were in the steps in which they were counted, the newest last; each is read when looked at.

        See `amp_widgets.recording.schema` for what there is of which step. ``GradientRange.of(run.gradients[-1])`` of
        `amp_widgets.analysis.gradients` says what fp16 makes of them.
        """
        with self._reading() as connection:
            if _version(connection) < schema.TABLES_SINCE["gradients"]:
                return self._gradients
            known = len(self._gradients)
            rows = connection.execute("SELECT step FROM gradients ORDER BY id LIMIT -1 OFFSET ?", (known,)).fetchall()
            if rows:
                steps = (*self._gradients.steps, *(_whole(step, "gradients") for (step,) in rows))
                self._gradients = RecordedGradients(steps, functools.lru_cache(maxsize=_GRADIENTS_HELD)(self._read_gradients))
            return self._gradients

    def _read_gradients(self, number: int) -> GradientCounts:
        query = f"SELECT {', '.join(schema.GRADIENT_COLUMNS)} FROM gradients ORDER BY id LIMIT 1 OFFSET ?"
        with self._reading() as connection:
            return from_row(connection.execute(query, (number,)).fetchone())

    @property
    def silent_s(self) -> float:
        """Seconds since the file was written to, as its disk has it; 0 where that cannot be told."""
        silent_s = math.inf
        for path in (self.path, wal_of(self.path)):
            with contextlib.suppress(OSError):
                silent_s = min(silent_s, time.time() - path.stat().st_mtime)
        return max(silent_s, 0.0) if silent_s < math.inf else 0.0

    def refresh(self) -> int:
        """Read what was written since; how many steps that were."""
        writer = state_of(self._writer)  # first: it may write, close the file and end while this reads
        with self._lock, self._reading() as connection:
            ended = connection.execute("SELECT count(*) FROM facts WHERE name = 'ended'").fetchone() != (0,)
            columns = _rows_after(connection, self._columns, self._rows)
            events = [
                _event(row) for row in connection.execute("SELECT * FROM events WHERE id >= ? ORDER BY id", (self._events,))
            ]
            count = len(columns["step"])
            if count:
                self.history.extend(columns)
            for event in events:
                self.history.record(event)
            self._rows += count
            self._events += len(events)
            self.writer = "closed" if ended else writer
            return count

    def close(self) -> None:
        """Let go of the file; what was read stays."""
        with self._lock:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Run {self.path.name}: {self._rows} steps, {self._events} events>"

    # ---- private ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """One state of the file, whatever is written meanwhile."""
        with self._lock:
            connection = self._connection
            if connection is None:
                raise RecordingError(f"{self.path.name}: this run was closed; open it again: aw.open_run({str(self.path)!r})")
            try:
                with _transaction(connection):
                    yield connection
            except sqlite3.Error as error:
                reason = why_not(error)
                raise RecordingError(f"{self.path}: {reason}; expected a run file, and this one is damaged") from error


def wal_of(path: Path) -> Path:
    """What stands beside a run file as long as it is written to, or was not closed."""
    return path.with_name(f"{path.name}-wal")


_GRADIENTS_HELD = 64
_LONGEST_BYTES = 64 * 2**20
"""No value of a run is longer; one that is comes from something else."""


def _connect(path: Path) -> sqlite3.Connection:
    """A connection that can only read, to a file that is a run's."""
    try:
        status = path.stat()
    except OSError as error:
        reason = why_not(error)
        raise RecordingError(f"open_run: {path}: {reason}; expected a file that a session has recorded") from error
    if not stat.S_ISREG(status.st_mode):
        raise RecordingError(f"open_run: {path} is no file, expected one that a session has recorded")
    connection = _try_modes(path)
    try:
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA query_only = ON")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_BYTES)
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = _version(connection)
        if application != schema.APPLICATION_ID:
            raise RecordingError(
                f"open_run: {path} is an SQLite database, but not of a run; expected a file that a session has recorded"
            )
        if version > schema.VERSION:
            raise RecordingError(
                f"open_run: {path} was recorded by a newer amp_widgets (version {version} of the format, this one reads up to "
                f"{schema.VERSION}); update amp_widgets to read it"
            )
        _check_tables(connection, path, version)
    except sqlite3.Error as error:
        connection.close()
        reason = why_not(error)
        raise RecordingError(f"open_run: {path}: {reason}; expected a file that a session has recorded") from error
    except BaseException:
        connection.close()
        raise
    return connection


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _try_modes(path: Path) -> sqlite3.Connection:
    """Read-only; and where not even the file for shared memory can be made beside it, as one that nobody writes."""
    failed: sqlite3.Error | None = None
    for mode in ("mode=ro", "mode=ro&immutable=1"):
        connection = None
        try:
            uri = f"file:{urllib.parse.quote(str(path))}?{mode}"
            connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=_PATIENCE_S)
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            return connection
        except sqlite3.Error as error:
            if connection is not None:
                connection.close()
            failed = failed or error
    assert failed is not None
    reason = why_not(failed)
    raise RecordingError(f"open_run: {path}: {reason}; expected a file that a session has recorded") from failed


_PATIENCE_S = 2.0


def _check_tables(connection: sqlite3.Connection, path: Path, version: int) -> None:
    """Plain tables of plain columns, so that nothing runs when they are read."""
    found = {
        name: str(sql)
        for kind, name, sql in connection.execute("SELECT type, name, sql FROM sqlite_master")
        if kind == "table" and not str(sql).upper().startswith("CREATE VIRTUAL")
    }
    for table, since in schema.TABLES_SINCE.items():
        if table not in found:
            if version < since:
                continue
            raise RecordingError(f"open_run: {path} has no table {table!r}; expected a file that a session has recorded")
        if any(row[6] for row in connection.execute(f"PRAGMA table_xinfo({schema.quoted(table)})")):
            raise RecordingError(f"open_run: {path}: the table {table!r} has computed columns, which no run has; it is not read")


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    if connection.in_transaction:
        yield
        return
    connection.execute("BEGIN")
    try:
        yield
    finally:
        connection.execute("ROLLBACK")


def _columns(connection: sqlite3.Connection) -> tuple[str, ...]:
    names = tuple(str(row[1]) for row in connection.execute("PRAGMA table_info(steps)"))
    if names[: len(COLUMNS)] != COLUMNS or len(set(names)) != len(names):
        raise RecordingError(f"the table of steps has the columns {', '.join(names)[:200]}; expected {', '.join(COLUMNS)} first")
    return names


def _facts(connection: sqlite3.Connection) -> dict[str, Any]:
    return {_text(name, "facts"): _json(value, "facts") for name, value in connection.execute("SELECT name, value FROM facts")}


def _rows_after(connection: sqlite3.Connection, columns: tuple[str, ...], after: int) -> dict[str, npt.NDArray[np.float64]]:
    """The rows from the one numbered `after` on: by whole blocks where there are such, the rest one by one."""
    parts: list[npt.NDArray[np.float64]] = []
    done = after
    for first, rows, content in connection.execute("SELECT * FROM blocks WHERE first >= ? ORDER BY first", (after,)):
        if first != done:
            break
        if not isinstance(content, bytes) or type(rows) is not int or rows < 1 or len(content) != 8 * rows * len(columns):
            raise RecordingError(f"the block of steps from row {first} has not the length that it should; the file is damaged")
        parts.append(np.frombuffer(content, dtype="<f8").reshape(len(columns), rows))
        done += rows
    rest = connection.execute("SELECT * FROM steps WHERE rowid > ? ORDER BY rowid", (done,)).fetchall()
    try:
        parts.append(np.array(rest, dtype=np.float64).reshape(len(rest), len(columns)).T)
    except (TypeError, ValueError):
        raise RecordingError("a step has a value that is no number; the file is damaged") from None
    whole = np.concatenate(parts, axis=1)
    steps = whole[0]
    if not (np.isfinite(steps).all() and (np.abs(steps) < 2**53).all()):
        raise RecordingError("a step has no number; the file is damaged")
    return dict(zip(columns, whole, strict=True))


def _event(row: tuple[Any, ...]) -> Event:
    _, step, kind, reason, detail, time_s = row
    kept = _json(detail, "events")
    if not isinstance(kept, dict):
        raise RecordingError("the details of an event are no JSON object; the file is damaged")
    return Event(
        step=_whole(step, "events"),
        kind=_text(kind, "events"),
        reason=_text(reason, "events"),
        detail=kept,
        time_s=math.nan if time_s is None else _number(time_s, "events"),
    )


def _settings(content: Any) -> Settings:
    if not isinstance(content, dict):
        raise RecordingError("settings are no JSON object; the file is damaged")
    try:
        return Settings(**{name: value for name, value in content.items() if name in FIELD_NAMES})
    except (SettingsError, TypeError) as error:
        raise RecordingError(f"settings: {error}; the file is damaged") from None


def _json(value: Any, table: str) -> Any:
    text = _text(value, table)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise RecordingError(f"the table {table!r} has a value that is no JSON; the file is damaged") from None
    if text.count("[") + text.count("{") > _DEEPEST and not _is_shallow(content):
        raise RecordingError(f"the table {table!r} has JSON nested more than {_DEEPEST} deep; the file is damaged")
    return content


_DEEPEST = 50
"""Levels of JSON; what a session has written has a few, and whatever goes through more comes to the end of Python's stack."""


def _is_shallow(content: Any) -> bool:
    level = [content]
    for _ in range(_DEEPEST + 1):
        inner = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, (dict, list)))
        level = list(itertools.chain.from_iterable(inner))
        if not level:
            return True
    return False


def _text(value: Any, table: str) -> str:
    if not isinstance(value, str):
        raise RecordingError(f"the table {table!r} has {type(value).__name__} where a text belongs; the file is damaged")
    return value


def _number(value: Any, table: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RecordingError(f"the table {table!r} has {type(value).__name__} where a number belongs; the file is damaged")
    return value


def _whole(value: Any, table: str) -> int:
    number = _number(value, table)
    if not math.isfinite(number):
        raise RecordingError(f"the table {table!r} has {number} where a whole number belongs; the file is damaged")
    return int(number)
