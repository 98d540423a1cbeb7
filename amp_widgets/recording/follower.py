"""Reads what is new of a run some times a second, on a thread of its own, and hands it on."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy.typing as npt

from amp_widgets.core.gradient_counts import GradientCounts
from amp_widgets.core.history import Cursor, Event, History
from amp_widgets.core.memory.profile import StepProfile
from amp_widgets.core.settings import Settings

RETRY_S = 5.0
"""When what could not be handed on, as on a full disk, is tried again."""


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


class Followed(Protocol):
    """Whose run it is: a session."""

    @property
    def history_so_far(self) -> History: ...

    @property
    def settings(self) -> Settings: ...

    @property
    def layers_seen(self) -> Sequence[LayerRow]: ...

    @property
    def profiles(self) -> Sequence[StepProfile]: ...

    @property
    def gradients(self) -> Sequence[GradientCounts]: ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class News:
    """What is new of a run since it was read last, and how far it has been read with that.

    Attributes
    ----------
    first_row
        How many rows there were before, of all that were ever appended.
    rows
        Column → one number a row.
    first_event
        How many events there were before.
    events
        In order of arrival.
    settings, layers
        In force now; None as long as they are those that were read before.
    profiles, gradients
        Those that are new.
    cursor, events_read, profiles_read, gradients_read
        Where to go on.
    """

    first_row: int
    rows: Mapping[str, npt.NDArray[Any]]
    first_event: int
    events: Sequence[Event]
    settings: Settings | None
    layers: Sequence[LayerRow] | None
    profiles: Sequence[StepProfile]
    gradients: Sequence[GradientCounts]
    cursor: Cursor
    events_read: int
    profiles_read: Sequence[StepProfile]
    gradients_read: Sequence[GradientCounts]

    @property
    def row_count(self) -> int:
        """How many rows are new."""
        return len(self.rows["step"])

    def __bool__(self) -> bool:
        told = (self.settings, self.layers)
        return bool(self.row_count or self.events or self.profiles or self.gradients) or any(one is not None for one in told)


class Follower(abc.ABC):
    """Hands on what a run has and gets. Training never waits for it.

    What cannot be handed on stays where it is, in the history, and is tried again; `notice` says so meanwhile.

    Parameters
    ----------
    source
        Whose run; it is not kept alive, and when it is gone, so is the follower's work.
    every_s
        How often the run is read.
    name
        Of the thread.

    Notes
    -----
    A subclass calls `_follow` at the end of its own ``__init__``.
    """

    def __init__(self, source: Followed, *, every_s: float, name: str) -> None:
        self._source = weakref.ref(source)
        self._every_s = every_s
        self._history = source.history_so_far
        self._cursor = Cursor()
        self._events = 0
        self._settings: Settings | None = None
        self._layers: Sequence[LayerRow] | None = None
        self._profiles: Sequence[StepProfile] = ()
        self._gradients: Sequence[GradientCounts] = ()
        self._lock = threading.RLock()  # around what it is handed to
        self._wake = threading.Event()
        self._closed = False
        self._closing = False
        self._held = False
        self._lost: str | None = None
        self._failing: str | None = None
        self._process = os.getpid()
        # It knows this object by a weak reference only: one that nobody holds ends its thread.
        self._thread = threading.Thread(target=_go_on, args=(weakref.ref(self), self._wake, every_s), name=name, daemon=True)

    @property
    def notice(self) -> str | None:
        """Why nothing is handed on at present, for people; None while all is well. Once closed: what is missing at the end."""
        return self._lost or self._failing

    @property
    def lost(self) -> bool:
        """Whether nothing is handed on any more, and nothing will be; `notice` says why."""
        return self._lost is not None

    @property
    def closed(self) -> bool:
        """Whether it is over."""
        return self._closed

    def flush(self) -> None:
        """Hand on all that there is now, and do not return before."""
        self._tick(self._source())

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hand on all that there is, and nothing within: the source is for a while what its history does not say.

        What is closed within ends with what it was before.
        """
        self.flush()
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def close(self) -> None:
        """Hand on what is left, and let go."""
        if os.getpid() != self._process:  # a copy, by os.fork(), that has neither the thread nor a claim to what it writes to
            return
        held, self._held = self._held, False
        self._closing = True
        self._tick(None if held else self._source())
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._release()
        self._wake.set()
        if self._thread is not threading.current_thread() and self._thread.ident is not None:
            self._thread.join()

    # ---- what a subclass says ---------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _write(self, news: News) -> None:
        """Hand on what is new, all of it or nothing. The lock is held."""

    @abc.abstractmethod
    def _failure(self, error: Exception) -> str | None:
        """After an error in `_write`: put all as it was before; what to tell people. None: the error is not to be held back.

        While `_closing` there is no other time for it.
        """

    @abc.abstractmethod
    def _release(self) -> None:
        """Let go. The lock is held."""

    def _why_lost(self) -> str | None:
        """Why it makes no sense to go on, for people; None while it does. The lock is held."""
        return None

    # ---- for subclasses ---------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """From now on, read it regularly."""
        self._thread.start()

    def _tick(self, source: Followed | None) -> None:
        if source is not None:
            source.history_so_far  # noqa: B018  # brings what the device has delivered; not under the lock: it may record events
        with self._lock:
            if self._closed or self._held or self._lost is not None:
                return
            self._lost = self._why_lost()
            if self._lost is not None:
                return
            try:
                self._hand_on(source)
            except Exception as error:
                self._failing = self._failure(error)
                if self._failing is None:
                    raise
            else:
                self._failing = None

    def _hand_on(self, source: Followed | None) -> None:
        news = self._news(source)
        if not news:
            return
        self._write(news)
        self._cursor, self._events = news.cursor, news.events_read
        self._profiles, self._gradients = news.profiles_read, news.gradients_read
        if news.settings is not None:
            self._settings = news.settings
        if news.layers is not None:
            self._layers = news.layers

    def _news(self, source: Followed | None) -> News:
        rows, cursor = self._history.rows_appended_since(self._cursor)
        events, events_read = self._history.events_since(self._events)
        profiles = self._profiles if source is None else source.profiles
        gradients = self._gradients if source is None else source.gradients
        return News(
            first_row=self._cursor.appended,
            rows=rows,
            first_event=self._events,
            events=events,
            settings=None if source is None or source.settings == self._settings else source.settings,
            layers=None if source is None or source.layers_seen is self._layers else source.layers_seen,
            profiles=_those_not_in(self._profiles, profiles),
            gradients=_those_not_in(self._gradients, gradients),
            cursor=cursor,
            events_read=events_read,
            profiles_read=profiles,
            gradients_read=gradients,
        )


_Item = TypeVar("_Item")


def _those_not_in(known: Sequence[_Item], items: Sequence[_Item]) -> list[_Item]:
    return [one for one in items if not any(one is other for other in known)]


def _go_on(follower: weakref.ref[Follower], wake: threading.Event, every_s: float) -> None:
    """What the thread does."""
    wait_s = every_s
    while True:
        wake.wait(wait_s)
        wake.clear()
        held = follower()
        if held is None or held.closed:
            return
        source = held._source()
        if source is None:
            held.close()
            return
        held._tick(source)
        wait_s = every_s if held.notice is None else RETRY_S
        del held, source
