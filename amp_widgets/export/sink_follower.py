"""Hands a run on to a sink: as it happens, or one that was recorded."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Mapping
from typing import Any

from amp_widgets.core.history import Cursor
from amp_widgets.export.sink import Sink
from amp_widgets.recording.follower import RETRY_S, Followed, Follower, News
from amp_widgets.recording.run_like import RunLike, facts_of, newest_history

EVERY_S = 1.0
AT_ONCE = 10_000
"""Rows that a sink gets together, of a run that was recorded."""


class SinkFollower(Follower):
    """What a run has and gets, to a sink; until `close`, which also closes the sink.

    Where the run is forked, the sink begins another course with the new history.

    Parameters
    ----------
    sink
        Not to be used for anything else meanwhile.
    source
        Whose run; not kept alive.
    facts
        About the run.
    every_s
        How often.
    """

    def __init__(self, sink: Sink, source: Followed, *, facts: Mapping[str, Any], every_s: float = EVERY_S) -> None:
        super().__init__(source, every_s=every_s, name=f"logging to {sink.name}")
        self._sink = sink
        self._facts = facts
        newest_s = self._history.last("time_s")
        self._began_s = time.time() - (newest_s if math.isfinite(newest_s) else 0.0)
        self._forks = 0
        sink.begin("", self._began_s, facts)
        self._follow()

    def _tick(self, source: Followed | None) -> None:
        super()._tick(source)
        history = None if source is None else source.history_so_far
        with self._lock:
            if history is None or history is self._history or self._closed or self._failing is not None:
                return
            self._forks += 1
            self._history, self._cursor, self._events = history, Cursor(), 0
            try:
                self._sink.begin(f"fork-{self._forks}", self._began_s, self._facts)
            except Exception as error:
                self._failing = self._failure(error)
                return
        super()._tick(source)

    def _write(self, news: News) -> None:
        if news.row_count or news.events:
            self._sink.write(news.rows, news.events)

    def _failure(self, error: Exception) -> str:
        if self._closing:
            return f"The end of the run was not logged to {self._sink.name}: {type(error).__name__}: {error}."
        return (
            f"Not logged at present to {self._sink.name}: {type(error).__name__}: {error}. Training goes on; it is tried again "
            f"every {RETRY_S:g} s."
        )

    def _release(self) -> None:
        try:
            self._sink.close()
        except Exception as error:
            self._failing = self._failure(error)


def log_recorded(run: RunLike, sink: Sink) -> None:
    """All of a run that was recorded, to a sink, which is closed then."""
    history, facts = newest_history(run), facts_of(run)
    sink.begin("", _began_s(facts), facts)
    try:
        columns, events = history.columns(), history.events_since(0)[0]
        total = len(columns["step"])
        for first in range(0, total, AT_ONCE):
            sink.write({name: column[first : first + AT_ONCE] for name, column in columns.items()}, ())
        sink.write({name: column[:0] for name, column in columns.items()}, events)
    finally:
        sink.close()


def _began_s(facts: Mapping[str, Any]) -> float:
    """When recording began, as far as that is known: then mostly the run did, too."""
    try:
        return datetime.datetime.fromisoformat(str(facts.get("began"))).timestamp()
    except ValueError:
        return time.time()
