"""From what a session's probes have found to what a gradient panel shows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from amp_widgets.analysis.gradients import GradientRange
from amp_widgets.analysis.overflow import Diagnosis, RepeatedSkips, SkipRun, diagnose, skip_runs, summarised
from amp_widgets.core.gradient_counts import GradientCounts
from amp_widgets.core.history import History
from amp_widgets.core.numerics import Numerics
from amp_widgets.widgets.gradient_state import GradientState

REST = 30
"""Why steps were skipped is looked into anew at most so often that it takes one part in so many of the time."""


class GradientSource:
    """Makes a `GradientState` at a time; what has not changed is not worked out again.

    Parameters
    ----------
    clock
        Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ranges: list[tuple[GradientCounts, GradientRange]] = []
        self._known: tuple[Any, ...] | None = None  # what skips and diagnoses were made of
        self._rests_until_s = -float("inf")
        self._history: History | None = None
        self._events = 0
        self._newest_step = -1  # of what a diagnosis may wait for the end of
        self._skips: tuple[SkipRun | RepeatedSkips, ...] = ()
        self._diagnoses: tuple[Diagnosis, ...] = ()

    def state(self, numerics: Numerics, history: History, *, trains: bool, at_once: bool = False) -> GradientState:
        """How things stand; waits for nothing.

        Parameters
        ----------
        trains
            Whether steps are being made.
        at_once
            Look into skips now, even if that was done a moment ago: there will be no other time.
        """
        gradients = numerics.gradients
        counts = gradients.counts
        ranges = dict(self._ranges)
        self._ranges = [(one, ranges.get(one) or GradientRange.of(one)) for one in counts]
        self._look_into_skips(numerics, history, at_once)
        return GradientState(
            range=self._ranges[-1][1] if self._ranges else None,
            pending=gradients.pending,
            every=gradients.every,
            trains=trains,
            why_not=gradients.why_not,
            skips=self._skips,
            diagnoses=self._diagnoses,
        )

    def _look_into_skips(self, numerics: Numerics, history: History, at_once: bool) -> None:
        notes, refused = numerics.overflow.notes, numerics.overflow.refused
        if history is not self._history:  # another course of the run
            self._history, self._events, self._newest_step = history, 0, -1
        new, events = history.events_since(self._events)
        last_step = history.last("step") if len(history) else -1.0
        newest = max((self._newest_step, *(event.step for event in new), *(note.step for note in refused[-1:])))
        ranges = [found for _, found in self._ranges]
        known = (
            id(history), events, len(notes), notes[-1:], len(refused), min(last_step, newest), tuple(map(id, ranges)),
        )  # fmt: skip
        started_s = self._clock()
        if known == self._known or (started_s < self._rests_until_s and not at_once):
            return
        self._known, self._events, self._newest_step = known, events, newest
        self._skips = summarised(skip_runs(history, notes, ranges))
        self._diagnoses = diagnose(history, notes, refused, ranges)
        ended_s = self._clock()
        self._rests_until_s = ended_s + REST * (ended_s - started_s)
