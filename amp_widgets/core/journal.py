"""From the step to the history: what a loop records, in order, without waiting for the device."""

from __future__ import annotations

import collections
import dataclasses
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, takewhile
from typing import Any

import numpy as np
import torch

from amp_widgets.core.history import COLUMNS, Event, History
from amp_widgets.core.memory.reading import MemoryReading
from amp_widgets.core.readback import Readback
from amp_widgets.core.settings import Planned, format_scale

_RECENT_STEPS = 50
_PAUSE_S = 0.5
_PAUSE_GAPS = 10
_MEMORY_COLUMNS = tuple(name for name in COLUMNS if name.endswith("_bytes"))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoopStatus:
    """How a loop stands, without waiting for the device. Sizes in bytes, times in seconds; NaN where not measured.

    Parameters
    ----------
    step
        Steps completed.
    step_s
        Median duration of the recent steps, from the step's begin to its boundary.
    steps_per_s
        Of the recent steps, everything between them included (data loading, validation).
    scale
        The live loss scale; None while the loss is not scaled.
    allocated_bytes, peak_bytes
        Of the newest measured step.
    overall_peak_bytes
        The highest peak of all measured steps.
    last_rejection
        Why the last request was rejected; None when one has been applied since.
    """

    step: int
    loss: float
    step_s: float
    steps_per_s: float
    skipped_steps: int
    scale: float | None
    allocated_bytes: float
    peak_bytes: float
    overall_peak_bytes: float
    last_rejection: str | None


@dataclasses.dataclass(slots=True, kw_only=True)
class StepRecord:
    """A finished step whose numbers may still be on the device.

    Parameters
    ----------
    duration_s
        By the host's clock; `timer`, where there is one, knows better.
    skipped
        Whether an optimizer's step was skipped; None where only the device knows.
    scaled
        Whether the loss was scaled.
    growth_interval
        That was in force.
    scaler_id
        Of the scaler that scaled it.
    by_rule
        Whether the scale followed the update rule; else the user set it.
    values
        Loss, scale used, scale after the update, and the device's count of inf.
    """

    step: int
    time_s: float
    duration_s: float
    timer: DeviceTimer | None
    skipped: bool | None
    scaled: bool
    growth_interval: int
    by_rule: bool
    scaler_id: int = 0
    memory: MemoryReading | None
    values: Readback

    def ready(self) -> bool:
        """Whether every number has arrived."""
        return self.values.ready() and (self.timer is None or self.timer.ready())

    def step_s(self) -> float:
        """Duration of the step, in seconds."""
        return self.duration_s if self.timer is None else self.timer.seconds()


class DeviceTimer:
    """Times a step by CUDA's own clock: the host runs ahead of it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._first = torch.cuda.Event(enable_timing=True)
        self._last = torch.cuda.Event(enable_timing=True)
        self._first.record(self._stream)

    @classmethod
    def start(cls, device: torch.device) -> DeviceTimer | None:
        """A running timer, or None where the host's clock is right."""
        return cls(device) if device.type == "cuda" else None

    def stop(self) -> None:
        """Mark the end; does not wait."""
        self._last.record(self._stream)

    def ready(self) -> bool:
        """Whether `seconds` would return without waiting."""
        return bool(self._last.query())

    def seconds(self) -> float:
        """Seconds from start to stop; waits for the device if need be."""
        self._last.synchronize()
        return float(self._first.elapsed_time(self._last)) / 1000


class Journal:
    """Takes finished steps and events in order, and writes them to the history as soon as their numbers have arrived.

    Parameters
    ----------
    capacity
        Rows of the history.
    devices
        Where the model is: with more than one, each has memory columns of its own, ``peak_bytes[cuda:1]`` for example.
    clock
        Seconds, monotonic.
    """

    def __init__(self, *, capacity: int, devices: Sequence[torch.device], clock: Callable[[], float]) -> None:
        self._per_device = len(devices) > 1
        extra = [f"{name}[{device}]" for device in devices for name in _MEMORY_COLUMNS] if self._per_device else []
        self._begin(History(capacity=capacity, extra_columns=extra), clock, clock())

    def _begin(self, history: History, clock: Callable[[], float], started_s: float) -> None:
        self._history = history
        self._clock = clock
        self._started_s = started_s
        self._waiting: collections.deque[StepRecord | Event] = collections.deque()
        self._lock = threading.RLock()
        self._totals = _Totals()

    def until(self, step: int, *, scales: Mapping[int, float] | None = None) -> Journal:
        """Another journal with what was before a step, from which on it goes its own way; the time goes on.

        Parameters
        ----------
        step
            The first of which nothing is taken over, but for what was in force when it began.
        scales
            Of each scaler, by id, the scale that the step begins with.
        """
        other = Journal.__new__(Journal)
        other._per_device = self._per_device
        other._begin(history_until(self.history(wait=True), step), self._clock, self._started_s)
        other._totals.take_over(other._history, scales or {})
        return other

    def beside(self) -> Journal:
        """Another journal for the same loop, with nothing in it; the time goes on."""
        return self.until(0)

    def now_s(self) -> float:
        """Seconds since the journal began."""
        return self._clock() - self._started_s

    def put_step(self, record: StepRecord) -> None:
        """Take a finished step."""
        self._waiting.append(record)

    def put_event(self, step: int, kind: str, reason: str, detail: Mapping[str, Any]) -> None:
        """Take an event; `detail` becomes what JSON can keep.

        It is in the history at once, unless the device still owes numbers of an earlier step.
        """
        kept = {name: _plain(value) for name, value in detail.items()}
        if kind == "rejected":
            self._totals.last_rejection = reason
        elif kind == "applied":
            self._totals.last_rejection = None
        self._waiting.append(Event(step=step, kind=kind, reason=reason, detail=kept, time_s=self.now_s()))
        self.write(wait=False)

    def history(self, *, wait: bool) -> History:
        """The history with every step whose numbers have arrived, or with all of them, after waiting for the device."""
        self.write(wait=wait)
        return self._history

    def write(self, *, wait: bool) -> None:
        """Write what has arrived to the history; with `wait`, everything."""
        if not self._waiting:
            return
        with self._lock:
            while self._waiting:
                item = self._waiting[0]
                if isinstance(item, Event):
                    self._history.record(item)
                elif wait or item.ready():
                    self._write_step(item)
                else:
                    return
                self._waiting.popleft()

    def scale_was_set(self) -> None:
        """The live scale was set from outside: the newest step's is no longer it."""
        with self._lock:
            self._totals.scale = None

    def step_s(self) -> float:
        """Median duration of the recent steps, in seconds; 0 before the first."""
        with self._lock:
            median_s = _median(self._totals.durations_s)
        return 0.0 if math.isnan(median_s) else median_s

    def status(self, *, step: int, scale: float | None, overall_peak_bytes: float) -> LoopStatus:
        """The newest numbers.

        Parameters
        ----------
        step
            Steps completed.
        scale
            The initial scale in force, shown until a step has told the live one; None while the loss is not scaled.
        overall_peak_bytes
            As the meter knows it, or NaN.
        """
        self.write(wait=False)
        with self._lock:
            totals = self._totals
            return LoopStatus(
                step=step,
                loss=totals.loss,
                step_s=_median(totals.durations_s),
                steps_per_s=_rate(totals.boundaries_s),
                skipped_steps=totals.skipped_steps,
                scale=scale if scale is None or totals.scale is None else totals.scale,
                allocated_bytes=totals.allocated_bytes,
                peak_bytes=totals.peak_bytes,
                overall_peak_bytes=_larger(totals.overall_peak_bytes, overall_peak_bytes),
                last_rejection=totals.last_rejection,
            )

    # ---- with the lock held -----------------------------------------------------------------------------------------

    def _write_step(self, record: StepRecord) -> None:
        loss, used, after, found_inf = record.values.values()
        skipped = record.skipped if record.skipped is not None else found_inf > 0
        row = {
            "step": record.step,
            "time_s": record.time_s,
            "loss": loss,
            "scale": used if record.scaled else 1.0,  # the factor that the loss was multiplied by
            "skipped": float(skipped),
            "step_s": record.step_s(),
        }
        if record.memory is not None:
            row.update(self._memory_columns(record.memory))
        self._history.append(**row)
        self._totals.add(row)
        if skipped:
            reason = f"skipped: inf or NaN in the gradients at scale {format_scale(row['scale'])}"
            self._record(record.step, record.time_s, "skipped", reason, {"scale": row["scale"]})
        if record.scaled:
            self._follow_scale(record, used, after, skipped)

    def _follow_scale(self, record: StepRecord, used: float, after: float, skipped: bool) -> None:
        known = self._totals.last_after.get(record.scaler_id)
        if known is not None and known != used:
            self._record_scale(record.step, record.time_s, known, used, f"set to {format_scale(used)}")
        if after != used and not record.by_rule:
            self._record_scale(record.step + 1, record.time_s, used, after, f"set to {format_scale(after)}")
        elif after != used:
            why = "inf or NaN in the gradients" if skipped else f"{record.growth_interval} steps without inf or NaN"
            verb = "backed off" if after < used else "grew"
            self._record_scale(record.step + 1, record.time_s, used, after, f"{verb}: {why}")
        self._totals.last_after[record.scaler_id] = self._totals.scale = after

    def _record_scale(self, step: int, time_s: float, before: float, after: float, reason: str) -> None:
        text = f"scale {format_scale(before)} → {format_scale(after)} ({reason})"
        self._record(step, time_s, "scale_changed", text, {"from": before, "to": after})

    def _record(self, step: int, time_s: float, kind: str, reason: str, detail: Mapping[str, Any]) -> None:
        self._history.record(Event(step=step, kind=kind, reason=reason, detail=detail, time_s=time_s))

    def _memory_columns(self, reading: MemoryReading) -> dict[str, float]:
        columns = {name: getattr(reading, name) for name in _MEMORY_COLUMNS}
        if self._per_device:
            for device, parts in reading.per_device.items():
                columns.update({f"{name}[{device}]": part for name, part in zip(_MEMORY_COLUMNS, parts, strict=True)})
        return columns


class _Totals:
    """What the status line needs, kept as rows are written."""

    def __init__(self) -> None:
        self.loss = math.nan
        self.durations_s: collections.deque[float] = collections.deque(maxlen=_RECENT_STEPS)
        self.boundaries_s: collections.deque[float] = collections.deque(maxlen=_RECENT_STEPS)
        self.skipped_steps = 0
        self.scale: float | None = None
        self.last_after: dict[int, float] = {}  # by scaler
        self.allocated_bytes = math.nan
        self.peak_bytes = math.nan
        self.overall_peak_bytes = math.nan
        self.last_rejection: str | None = None

    def take_over(self, history: History, scales: Mapping[int, float]) -> None:
        """Be as after all that is in a history."""
        columns = history.columns()
        recent = {name: column[-_RECENT_STEPS:].tolist() for name, column in columns.items()}
        for values in zip(*recent.values(), strict=True):
            self.add(dict(zip(recent, values, strict=True)))
        known = columns["peak_bytes"][~np.isnan(columns["peak_bytes"])]
        self.overall_peak_bytes = float(known.max()) if known.size else math.nan
        self.skipped_steps = len(history.events("skipped"))
        if (columns["scale"] != 1.0).any():  # it was scaled before
            self.last_after = dict(scales)
            self.scale = next(iter(scales.values()), None)

    def add(self, row: Mapping[str, float]) -> None:
        self.loss = row["loss"]
        self.durations_s.append(row["step_s"])
        self.boundaries_s.append(row["time_s"])
        self.skipped_steps += int(row["skipped"])
        peak_bytes = row.get("peak_bytes", math.nan)
        if not math.isnan(peak_bytes):
            self.peak_bytes = peak_bytes
            self.overall_peak_bytes = _larger(self.overall_peak_bytes, peak_bytes)
        allocated_bytes = row.get("allocated_bytes", math.nan)
        if not math.isnan(allocated_bytes):
            self.allocated_bytes = allocated_bytes


def history_until(history: History, step: int) -> History:
    """A history with the rows before a step, and the events up to its beginning."""
    columns = history.columns()
    before = columns["step"] < step
    other = History(capacity=history.capacity, extra_columns=history.names[len(COLUMNS) :])
    other.extend({name: column[before] for name, column in columns.items()})
    for event in history.events_since(0)[0]:
        if event.step < step or (event.step == step and event.kind in _BEFORE_A_STEP):
            other.record(event)
    return other


_BEFORE_A_STEP = ("applied", "rejected", "scale_changed", "run", "note")
"""The kinds of event that happen as a step begins; others are of the step itself."""


def _larger(one: float, other: float) -> float:
    """The larger of two, where NaN is not known."""
    return other if math.isnan(one) else one if math.isnan(other) else max(one, other)


def _plain(value: Any) -> Any:
    """As JSON can keep it; what was asked for may be anything."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Planned):  # of all that a plan says, what was asked for
        return _plain(tuple(value.layers))
    return repr(value)


def _median(values: Sequence[float]) -> float:
    known = sorted(value for value in values if not math.isnan(value))
    return known[len(known) // 2] if known else math.nan


def _rate(times_s: Sequence[float]) -> float:
    """Boundaries a second since the last pause: a gap far longer than the usual one is none of the training's."""
    times = list(times_s)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    longest_s = max(_PAUSE_S, _PAUSE_GAPS * _median(gaps)) if gaps else 0.0
    going = list(takewhile(lambda gap: gap <= longest_s, reversed(gaps)))
    return len(going) / sum(going) if sum(going) > 0 else math.nan
