"""Writes a run to a file while it happens, from a thread of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import sqlite3
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from amp_widgets.core.history import Event
from amp_widgets.errors import RecordingError
from amp_widgets.recording import schema
from amp_widgets.recording.follower import RETRY_S, Followed, Follower, LayerRow, News
from amp_widgets.recording.gradient_rows import GradientAllowance
from amp_widgets.recording.run_path import run_path
from amp_widgets.recording.step_profiles import profile_to_json
from amp_widgets.recording.system_error import why_not
from amp_widgets.recording.writer import this_process

EVERY_S = 0.25
"""How often steps are written; well below the second that a killed kernel may cost."""


class Recorder(Follower):
    """Writes to a new file what a history has and gets; steps some times a second, events at once.

    Training never waits for the disk but for an event, and that only as long as it takes to hand it to the operating system.
    What cannot be written, as on a full disk, stays in memory and is tried again; `notice` says so meanwhile.

    Parameters
    ----------
    path
        Of the file, which must not exist.
    source
        Whose run; it is not kept alive, and when it is gone, recording ends.
    facts
        About the run, JSON-able.
    every_s
        How often steps are written.

    Raises
    ------
    RecordingError
        When the file exists, or cannot be made.
    """

    def __init__(
        self, path: str | os.PathLike[str], source: Followed, *, facts: Mapping[str, Any], every_s: float = EVERY_S
    ) -> None:
        super().__init__(source, every_s=every_s, name="recording")
        named = run_path(path)
        if named is None:
            raise RecordingError(f"record: got {path!r}, expected the path of a new file, such as 'run.db'")
        self.path = named
        self._columns = self._history.names
        self._waiting: dict[str, npt.NDArray[Any]] = {name: np.empty(0) for name in self._columns}  # for the next block
        self._profiles_written = 0
        self._allowance = GradientAllowance()
        self._connection, self._identity = _make(self.path, self._columns)
        try:
            known = {"began": _utc_now(), "columns": list(self._columns), "writer": this_process()}
            self._put_facts({**known, **facts})
            self._hand_on(source)
        except sqlite3.Error as error:
            self._connection.close()
            reason = why_not(error)
            raise RecordingError(f"record: {self.path}: {reason}; choose another place") from error
        self._history.on_event = _weakly(self._event_arrived)
        self._follow()

    def close(self) -> None:
        """Write what is left, and let go of the file; where another program has locked it, after some time without."""
        if not self.closed:
            self._connection.execute(f"PRAGMA busy_timeout = {1000 * _LAST_PATIENCE_S:.0f}")
        super().close()

    # ---- private ----------------------------------------------------------------------------------------------------

    def _event_arrived(self) -> None:
        """On the thread in which it happened: an event is in the file before anything else happens."""
        if self._failing is None and self._lock.acquire(timeout=_PATIENCE_S):
            try:
                self._tick(None)
            finally:
                self._lock.release()
        else:
            self._wake.set()

    def _why_lost(self) -> str | None:
        if _is_still(self.path, self._identity):
            return None
        return f"Recording has ended: {self.path.name} was deleted, moved or replaced."

    def _failure(self, error: Exception) -> str | None:
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")
        if not isinstance(error, sqlite3.Error):
            return None
        reason = why_not(error)
        if self._closing:
            return f"The end of the run was not recorded to {self.path.name}: {reason}."
        return (
            f"Not recorded at present: {self.path.name}: {reason}. Training goes on; it is tried again every {RETRY_S:g} s, and "
            "nothing is lost as long as this kernel lives."
        )

    def _release(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._put_facts({"ended": _utc_now()})
        # One file, which opens anywhere. Where the run is open for reading it may have to keep its companions; all that was
        # written is in it all the same, so that it can be copied alone.
        for pragma in ("busy_timeout = 0", "wal_checkpoint(TRUNCATE)", "journal_mode = DELETE"):
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute(f"PRAGMA {pragma}").fetchall()
        self._connection.close()

    def _write(self, news: News) -> None:
        """One transaction with what is new."""
        gradients = self._allowance.rows_for(news.gradients, steps=news.cursor.appended)
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        if news.row_count:
            # SQLite makes NULL of NaN by itself
            rows = zip(*(column.tolist() for column in news.rows.values()), strict=True)
            connection.executemany(f"INSERT INTO steps VALUES ({', '.join('?' * len(self._columns))})", rows)
        waiting = {name: np.concatenate([self._waiting[name], column]) for name, column in news.rows.items()}
        first, count = news.first_row - len(self._waiting["step"]), schema.BLOCK_ROWS
        while len(waiting["step"]) >= count:
            block = b"".join(column[:count].astype("<f8").tobytes() for column in waiting.values())
            connection.execute("INSERT INTO blocks VALUES (?, ?, ?)", (first, count, block))
            waiting = {name: column[count:] for name, column in waiting.items()}
            first += count
        if news.events:
            numbered = map(_event_row, range(news.first_event, news.events_read), news.events)
            connection.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?)", numbered)
        if news.settings is not None:
            content = json.dumps(dataclasses.asdict(news.settings))
            connection.execute("INSERT INTO settings VALUES (?, ?, ?)", (news.events_read, news.cursor.appended, content))
        if news.layers is not None:
            layers = news.layers
            connection.execute("DELETE FROM layers")
            connection.executemany("INSERT INTO layers VALUES (?, ?, ?, ?, ?, ?)", map(_layer_row, range(len(layers)), layers))
        for number, one in enumerate(news.profiles, self._profiles_written):
            row = (number, one.step, _text(one.label), json.dumps(profile_to_json(one)))
            connection.execute("INSERT INTO profiles VALUES (?, ?, ?, ?)", row)
        connection.executemany("INSERT INTO gradients VALUES (NULL, ?, ?, ?, ?, ?, ?, ?)", gradients)
        connection.execute("COMMIT")
        self._waiting = waiting
        self._profiles_written += len(news.profiles)
        self._allowance.spend(gradients)

    def _put_facts(self, facts: Mapping[str, Any]) -> None:
        self._connection.executemany(
            "INSERT OR REPLACE INTO facts VALUES (?, ?)", [(name, json.dumps(value)) for name, value in facts.items()]
        )


_PATIENCE_S = 0.005
"""As long as training waits at most for another thread to have written steps, when there is an event."""


_LAST_PATIENCE_S = 2
"""The same when there is no other time for it."""


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    weak = weakref.WeakMethod(method)

    def call() -> None:
        held = weak()
        if held is not None:
            held()

    return call


def _make(path: Path, columns: Sequence[str]) -> tuple[sqlite3.Connection, tuple[int, int]]:
    """A new database at `path`, and which file that is."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))  # never through a symbolic link
    except FileExistsError:
        raise RecordingError(
            f"record: {path} exists already, expected the name of a new file; choose another one, or remove it first"
        ) from None
    except OSError as error:
        reason = why_not(error)
        raise RecordingError(f"record: {path}: {reason}; choose a folder that exists and can be written to") from error
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=_PATIENCE_S)
    try:
        schema.create(connection, columns)
    except sqlite3.Error as error:
        connection.close()
        for made in (path, *(path.with_name(path.name + companion) for companion in ("-wal", "-shm"))):
            made.unlink(missing_ok=True)
        reason = why_not(error)
        raise RecordingError(f"record: {path}: {reason}; choose another place") from error
    return connection, _identity_of(path)


def _identity_of(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _is_still(path: Path, identity: tuple[int, int]) -> bool:
    try:
        return _identity_of(path) == identity
    except OSError:
        return False


def _event_row(number: int, event: Event) -> tuple[Any, ...]:
    return number, event.step, _text(event.kind), _text(event.reason), json.dumps(dict(event.detail)), event.time_s


def _layer_row(position: int, layer: LayerRow) -> tuple[Any, ...]:
    why_not = None if layer.why_not is None else _text(layer.why_not)
    return position, _text(layer.name), _text(layer.type), layer.parameters, why_not, layer.structural


def _text(text: str) -> str:
    """As UTF-8 can have it: Python's strings may hold half a character."""
    return text.encode(errors="replace").decode()


def _utc_now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
