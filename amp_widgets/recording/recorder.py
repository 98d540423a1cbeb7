"""Writes a run to a file while it happens, from a thread of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import sqlite3
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from amp_widgets.core.history import Cursor, Event, History
from amp_widgets.core.memory.profile import StepProfile
from amp_widgets.core.settings import Settings
from amp_widgets.errors import RecordingError
from amp_widgets.recording import schema
from amp_widgets.recording.step_profiles import profile_to_json

EVERY_S = 0.25
"""How often steps are written; well below the second that a killed kernel may cost."""
RETRY_S = 5.0
"""When it is tried again after the disk was full."""


class LayerRow(Protocol):
    """What of a layer is kept."""

    @property
    def name(self) -> str: ...

    @property
    def type(self) -> str: ...

    @property
    def parameters(self) -> int: ...

    @property
    def why_not(self) -> str | None: ...

    @property
    def structural(self) -> bool: ...


class Recorded(Protocol):
    """Whose run it is: a session."""

    @property
    def history_so_far(self) -> History: ...

    @property
    def settings(self) -> Settings: ...

    @property
    def layers_seen(self) -> Sequence[LayerRow]: ...

    @property
    def profiles(self) -> Sequence[StepProfile]: ...


class Recorder:
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
        self, path: str | os.PathLike[str], source: Recorded, *, facts: Mapping[str, Any], every_s: float = EVERY_S
    ) -> None:
        self.path = Path(path).absolute()
        self._every_s = every_s
        self._source = weakref.ref(source)
        self._history = history = source.history_so_far
        self._columns = history.names
        self._cursor = Cursor()  # of the rows that are written
        self._waiting: dict[str, npt.NDArray[Any]] = {name: np.empty(0) for name in self._columns}  # for the next block
        self._events = 0
        self._settings: Settings | None = None
        self._layers: Sequence[LayerRow] | None = None
        self._profiles: Sequence[StepProfile] = ()
        self._profiles_written = 0
        self._lock = threading.RLock()  # around the connection
        self._wake = threading.Event()
        self._closed = False
        self._lost: str | None = None
        self._failing: str | None = None
        self._connection, self._identity = _make(self.path, self._columns)
        try:
            self._put_facts({"began": _utc_now(), "columns": list(self._columns), **facts})
            self._write(source)
        except sqlite3.Error as error:
            self._connection.close()
            raise RecordingError(f"record: {self.path}: {error}; choose another place") from error
        history.on_event = _weakly(self._event_arrived)
        self._thread = threading.Thread(
            target=_go_on, args=(weakref.ref(self), self._wake, every_s), name="recording", daemon=True
        )
        self._thread.start()

    @property
    def notice(self) -> str | None:
        """Why nothing is written at present, for people; None while all is well."""
        return self._lost or self._failing

    @property
    def closed(self) -> bool:
        """Whether recording is over."""
        return self._closed

    def flush(self) -> None:
        """Write all that there is now, and do not return before."""
        self._tick(self._source())

    def close(self) -> None:
        """Write what is left, and let go of the file."""
        self._tick(self._source())
        with self._lock:
            if self._closed:
                return
            self._closed = True
            with contextlib.suppress(sqlite3.Error):  # another kernel reads it
                self._connection.execute("PRAGMA journal_mode = DELETE")  # one file, which opens anywhere
            self._connection.close()
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

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

    def _tick(self, source: Recorded | None) -> None:
        if source is not None:
            source.history_so_far  # noqa: B018  # brings what the device has delivered; not under the lock: it may record events
        with self._lock:
            if self._closed or self._lost is not None:
                return
            if not _is_still(self.path, self._identity):
                self._lost = f"Recording has ended: {self.path.name} was deleted, moved or replaced."
                return
            try:
                self._write(source)
            except sqlite3.Error as error:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                self._failing = (
                    f"Not recorded at present: {self.path.name}: {error}. Training goes on; it is tried again every "
                    f"{RETRY_S:g} s, and nothing is lost as long as this kernel lives."
                )
            else:
                self._failing = None

    def _write(self, source: Recorded | None) -> None:
        """One transaction with what is new."""
        columns, cursor = self._history.rows_appended_since(self._cursor)
        rows = _rows_of(columns)
        events, events_now = self._history.events_since(self._events)
        settings = None if source is None or source.settings == self._settings else source.settings
        layers = None if source is None or source.layers_seen is self._layers else source.layers_seen
        profiles = self._profiles if source is None else source.profiles
        new_profiles = [one for one in profiles if not any(one is other for other in self._profiles)]
        if not rows and not events and settings is None and layers is None and not new_profiles:
            return
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        if rows:
            connection.executemany(f"INSERT INTO steps VALUES ({', '.join('?' * len(self._columns))})", rows)
        waiting = {name: np.concatenate([self._waiting[name], column]) for name, column in columns.items()}
        first, count = self._cursor.appended - len(self._waiting["step"]), schema.BLOCK_ROWS
        while len(waiting["step"]) >= count:
            block = b"".join(column[:count].astype("<f8").tobytes() for column in waiting.values())
            connection.execute("INSERT INTO blocks VALUES (?, ?, ?)", (first, count, block))
            waiting = {name: column[count:] for name, column in waiting.items()}
            first += count
        if events:
            first = self._events
            connection.executemany(
                "INSERT INTO events VALUES (?, ?, ?, ?, ?, ?)", map(_event_row, range(first, events_now), events)
            )
        if settings is not None:
            content = json.dumps(dataclasses.asdict(settings))
            connection.execute("INSERT INTO settings VALUES (?, ?, ?)", (events_now, cursor.appended, content))
        if layers is not None:
            connection.execute("DELETE FROM layers")
            connection.executemany("INSERT INTO layers VALUES (?, ?, ?, ?, ?, ?)", map(_layer_row, range(len(layers)), layers))
        for number, one in enumerate(new_profiles, self._profiles_written):
            row = (number, one.step, one.label, json.dumps(profile_to_json(one)))
            connection.execute("INSERT INTO profiles VALUES (?, ?, ?, ?)", row)
        connection.execute("COMMIT")
        self._profiles, self._profiles_written = profiles, self._profiles_written + len(new_profiles)
        self._cursor, self._events, self._waiting = cursor, events_now, waiting
        if settings is not None:
            self._settings = settings
        if layers is not None:
            self._layers = layers

    def _put_facts(self, facts: Mapping[str, Any]) -> None:
        self._connection.executemany(
            "INSERT OR REPLACE INTO facts VALUES (?, ?)", [(name, json.dumps(value)) for name, value in facts.items()]
        )


_PATIENCE_S = 0.005
"""As long as training waits at most for another thread to have written steps, when there is an event."""


def _go_on(recorder: weakref.ref[Recorder], wake: threading.Event, every_s: float) -> None:
    """What the thread does."""
    wait_s = every_s
    while True:
        wake.wait(wait_s)
        wake.clear()
        held = recorder()
        if held is None or held.closed:
            return
        source = held._source()
        if source is None:
            held.close()
            return
        held._tick(source)
        wait_s = every_s if held.notice is None else RETRY_S
        del held, source


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
        raise RecordingError(f"record: {path}: {error.strerror}; choose a folder that exists and can be written to") from error
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=_PATIENCE_S)
    try:
        schema.create(connection, columns)
    except sqlite3.Error as error:
        connection.close()
        path.unlink(missing_ok=True)
        raise RecordingError(f"record: {path}: {error}; choose another place") from error
    return connection, _identity_of(path)


def _identity_of(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _is_still(path: Path, identity: tuple[int, int]) -> bool:
    try:
        return _identity_of(path) == identity
    except OSError:
        return False


def _rows_of(columns: Mapping[str, npt.NDArray[Any]]) -> list[tuple[Any, ...]]:
    """As SQLite takes them; it makes NULL of NaN by itself."""
    return list(zip(*(column.tolist() for column in columns.values()), strict=True))


def _event_row(number: int, event: Event) -> tuple[Any, ...]:
    return number, event.step, event.kind, event.reason, json.dumps(dict(event.detail)), event.time_s


def _layer_row(position: int, layer: LayerRow) -> tuple[Any, ...]:
    return position, layer.name, layer.type, layer.parameters, layer.why_not, layer.structural


def _utc_now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
