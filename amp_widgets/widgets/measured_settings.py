"""What the steps of a run came to with each of the settings that it had in force: read from its history."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from amp_widgets.core.history import Cursor, Event, History
from amp_widgets.core.settings import Settings
from amp_widgets.widgets.memory_state import EXACT, rounded_down

MOST_TIMES = 200
"""The newest so many steps with the same settings are what the median is of."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Steps with the same settings.

    Attributes
    ----------
    autocast, layers, fp32_layers
        The settings.
    peak_bytes
        The highest of all; NaN where none was measured.
    step_s
        The median of the newest; NaN where none is known.
    steps
        How many there were, as `rounded_down` has it.
    """

    autocast: str
    layers: tuple[str, ...]
    fp32_layers: tuple[str, ...]
    peak_bytes: float
    step_s: float
    steps: int


class MeasuredSettings:
    """Goes through a history as it grows; what it gives is the same object as long as nothing worth showing has changed."""

    def __init__(self) -> None:
        self._history: History | None = None
        self._cursor: Cursor | None = None
        self._rows = -1
        self._groups: dict[_Key, _Group] = {}
        self._shown: tuple[Measured, ...] = ()
        self._known: object = None

    def pull(self, history: History) -> tuple[Measured, ...]:
        """With each of the settings so far, in the order in which they came into force first."""
        if history is not self._history:  # another course of the run
            self._history, self._cursor, self._rows = history, None, -1
            self._groups.clear()
        if history.total_rows == self._rows:
            return self._shown
        self._rows = history.total_rows
        rows, self._cursor, start_over = history.rows_since(self._cursor, "step", "peak_bytes", "step_s")
        if start_over:
            self._groups.clear()
        events = history.events("applied")
        keys = _keys(events)
        position = np.searchsorted([event.step for event in events], rows["step"], side="right")
        for at in np.unique(position):
            mine = position == at
            self._groups.setdefault(keys[at], _Group()).add(rows["peak_bytes"][mine], rows["step_s"][mine])
        known = {key: (group.peak_bytes, _milestone(group.steps)) for key, group in self._groups.items()}
        if repr(known) != repr(self._known):  # NaN is not equal to itself
            self._known = known
            self._shown = tuple(group.measured(key) for key, group in self._groups.items())
        return self._shown


def _milestone(steps: int) -> int:
    """When this changes, a median may have changed by what is worth showing."""
    return steps if steps <= EXACT else 1 << steps.bit_length()


_Key = tuple[str, tuple[str, ...], tuple[str, ...]]


class _Group:
    def __init__(self) -> None:
        self.steps = 0
        self.peak_bytes = math.nan
        self._times_s: collections.deque[float] = collections.deque(maxlen=MOST_TIMES)

    def add(self, peaks: npt.NDArray[Any], times_s: npt.NDArray[Any]) -> None:
        self.steps += len(peaks)
        self.peak_bytes = float(np.fmax.reduce(peaks, initial=self.peak_bytes))
        self._times_s.extend(times_s[np.isfinite(times_s)].tolist())

    def measured(self, key: _Key) -> Measured:
        autocast, layers, fp32_layers = key
        return Measured(
            autocast=autocast,
            layers=layers,
            fp32_layers=fp32_layers,
            peak_bytes=self.peak_bytes,
            step_s=float(np.median(self._times_s)) if self._times_s else math.nan,
            steps=rounded_down(self.steps),
        )


def _keys(events: Sequence[Event]) -> list[_Key]:
    """What was in force before the first event, and after each. A new session begins with the defaults."""
    now: Mapping[str, Any] = {name: getattr(Settings(), name) for name in ("autocast", "checkpointed", "fp32_layers")}
    found = [_key(now)]
    for event in events:
        now = {name: event.detail.get(name, value) for name, value in now.items()}
        found.append(_key(now))
    return found


def _key(values: Mapping[str, Any]) -> _Key:
    return str(values["autocast"]), tuple(values["checkpointed"]), tuple(values["fp32_layers"])
