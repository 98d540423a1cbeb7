"""Memory of a step on CUDA devices, from the statistics of torch's own allocator."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from amp_widgets.core.memory.allocator import AllocatorLog, BoundaryWatch, against_tensors_text, boundary_profile
from amp_widgets.core.memory.compiled import why_compiled
from amp_widgets.core.memory.cpu import why_no_dispatch_modes
from amp_widgets.core.memory.death import Death
from amp_widgets.core.memory.device_tracker import DeviceTracker
from amp_widgets.core.memory.lives import SharedStorages
from amp_widgets.core.memory.oom_observer import Attach, OutOfMemoryObserver, place_by_frames
from amp_widgets.core.memory.profile import StepProfile
from amp_widgets.core.memory.reading import NOT_MEASURED, DeviceBytes, MemoryReading
from amp_widgets.core.memory.step_mode import StepMode, keep_dynamo_out, push_below, remove_from_stack
from amp_widgets.core.memory.step_record import StepRecord
from amp_widgets.core.memory.storages import LiveStorages, state_of
from amp_widgets.core.memory.tracker import StepTracker
from amp_widgets.core.threads import this_thread


class CudaMeter:
    """Reads ``torch.cuda.memory_stats`` at the step boundaries; never waits for a device.

    The allocator keeps one peak per device, since it was last reset. Its peak *within* a step is had by resetting that
    counter at the start of the step; the overall peak is then kept here.

    In a step that is profiled each op is looked at as well, as on a CPU, and the statistics are read at the boundaries of
    layers: see `DeviceTracker`. Of a compiled model only the statistics are read, around the optimizers' steps.

    Parameters
    ----------
    devices
        The devices to read, with their index.
    model, optimizers
        Whose steps are profiled; not kept alive.
    reset_peak
        Whether torch's peak counters may be reset at each step. Otherwise they are left to the user, and the peak within
        a step is known only when it is a new maximum, else NaN.
    also_on_cpu
        Whether the model has tensors on the CPU as well; `source` then says that they are not counted.
    stats
        The statistics of a device, nested as ``torch.cuda.memory_stats_as_nested_dict`` returns them; empty while the
        allocator was not used.
    reset
        Resets the peak counters of a device.
    counted
        The devices whose tensors count in a profile, if those are others than the ones to read; for tests.
    attach
        Attaches the observer of allocations that do not fit; for tests.
    clock
        Seconds; for tests.
    """

    def __init__(
        self,
        devices: Iterable[torch.device],
        model: nn.Module | None = None,
        optimizers: Iterable[Optimizer] = (),
        *,
        reset_peak: bool = True,
        also_on_cpu: bool = False,
        stats: Callable[[torch.device], Mapping[str, Any]] | None = None,
        reset: Callable[[torch.device], None] | None = None,
        counted: Iterable[torch.device] | None = None,
        attach: Attach | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._devices = tuple(devices)
        self._model: Callable[[], nn.Module | None] | None = None if model is None else weakref.ref(model)
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._were_given = bool(self._optimizers)
        self._resets = reset_peak
        self._stats = stats or torch.cuda.memory_stats_as_nested_dict
        self._reset = reset or torch.cuda.reset_peak_memory_stats
        self._counted = self._devices if counted is None else tuple(counted)
        self._clock = clock
        self._before: dict[torch.device, float] | None = None  # of each device, the peak that is older than the step
        self._thread = -1  # of the step in progress
        self._highest: dict[torch.device, float] = {}
        self._profile_wanted: tuple[str, int] | None = None  # label and number of the step that begins next
        self._profiled_as = ("", -1)  # of the step in progress, if it is profiled
        self._log: AllocatorLog | None = None
        self._tracker: DeviceTracker | None = None
        self._boundaries: BoundaryWatch | None = None
        self._because = ""  # only the boundaries are watched
        self._finished: Callable[[], StepProfile] | None = None  # makes the profile
        self._ran_compiled = False  # in the last step that was tracked
        self.on_death: Callable[[], None] | None = None
        """Called when memory has run out in an op, within that op; it need not be the end of the step."""
        self._death: Death | None = None  # what the allocator tells
        self._was_tracked = False  # the step in progress or before, so that the tracker tells
        self._tracked_death: Death | None = None  # what the tracker does, of a step that is over
        self._names = names = ", ".join(str(device) for device in self._devices)
        counter = (
            "torch's peak counter is reset at every step"
            if reset_peak
            else "the peak within a step is known only when it is a new maximum, as the peak counter may not be reset"
        )
        rest = "; bytes on the CPU are not counted" if also_on_cpu else ""
        self.source = f"torch.cuda.memory_stats on {names}; {counter}{rest}"
        self._notes = ["times are those at which ops were given to the device, which works them off later"]
        if also_on_cpu:
            self._notes.append("tensors on the CPU are not counted")
        self.measured = True
        self.unmeasured_because: str | None = None
        self.unprofiled_because: str | None = None
        OutOfMemoryObserver.listen(self, attach)

    @property
    def overall_peak_bytes(self) -> float:
        """Sum over the devices of each one's highest peak so far, whoever reset the counter; NaN before there is one."""
        return math.fsum(self._highest.values()) if self._highest else math.nan

    def profile_next(self, label: str, *, step: int = -1) -> None:
        """Profile the step that `begin` starts next, besides measuring it; see `CpuMeter.profile_next`."""
        self._profile_wanted = (label, step)

    def take_profile(self) -> StepProfile | None:
        """The profile of the last step that was profiled, once; None when there is none: see `unprofiled_because`."""
        finished, self._finished = self._finished, None
        return None if finished is None else finished()

    def take_death(self) -> Death | None:
        """What is known of how memory ran out in the step in progress, or in the one before, once."""
        told, self._death = self._death, None
        tracked, self._tracked_death = self._tracked_death, None
        if self._tracker is not None:
            tracked, self._tracker.death = self._tracker.death, None
        if told is None or tracked is None:
            return tracked if self._was_tracked else told
        return dataclasses.replace(
            tracked,
            device=told.device,
            requested_bytes=told.requested_bytes,
            limit_bytes=told.limit_bytes,
            allocated_bytes=told.allocated_bytes,
            phase=tracked.phase or told.phase,
            layer=tracked.layer or told.layer,
        )

    def watch(self, model: Callable[[], nn.Module | None]) -> None:
        """Profile this model's steps; the counters are the devices'."""
        self._model = model

    def follow(self, optimizers: Iterable[Optimizer]) -> None:
        """Tell the state of these from other tensors in profiles, from the next one on."""
        known = [reference() for reference in self._optimizers]
        new = [weakref.ref(optimizer) for optimizer in optimizers if all(optimizer is not other for other in known)]
        self._optimizers = [reference for reference in self._optimizers if reference() is not None] + new

    def begin(self) -> None:
        """Note the peak counters, then reset them if that is allowed."""
        self._leave_profile()
        self._death = self._tracked_death = None
        self._was_tracked = False
        self._thread = this_thread()
        before = {}
        for device in self._devices:
            stats = self._read(device)
            if not stats:
                before[device] = -math.inf  # nothing was ever allocated: what the counter shows later is of this step
                continue
            peak = self._note(device, stats)
            if self._resets:
                self._reset(device)
                peak = -math.inf
            before[device] = peak
        self._before = before
        if self._profile_wanted is not None:
            self._begin_profile()

    def end(self) -> MemoryReading:
        """Bytes at the step boundary and the peak since `begin`; NaN without a `begin` or while there are no statistics."""
        before, self._before = self._before, None
        if not _surely_raises():
            self._death = None
        if self._log is not None:
            self._end_profile(self._log)
        if before is None:
            return NOT_MEASURED
        per_device: dict[str, DeviceBytes] = {}
        for device in self._devices:
            stats = self._read(device)
            if not stats:
                per_device[str(device)] = (math.nan, math.nan, math.nan)
                continue
            peak = self._note(device, stats)
            allocated = float(stats["allocated_bytes"]["all"]["current"])
            reserved = float(stats["reserved_bytes"]["all"]["current"])
            # A counter that did not rise only says that the step stayed at or below an older peak.
            per_device[str(device)] = (allocated, peak if peak > before[device] else math.nan, reserved)
        return MemoryReading.of(per_device)

    def abandon(self) -> None:
        """Forget the step in progress; its peak still counts towards the overall one."""
        self._before = None
        self._leave_profile()

    def close(self) -> None:
        """Forget the step in progress, the model and the optimizers."""
        self.abandon()
        OutOfMemoryObserver.forget(self)
        self._model = None
        self._optimizers = []
        self._profile_wanted = self._finished = self._death = self._tracked_death = None
        self.on_death = None

    def __del__(self) -> None:
        tracker: DeviceTracker | None = getattr(self, "_tracker", None)
        boundaries: BoundaryWatch | None = getattr(self, "_boundaries", None)
        if tracker is not None:
            tracker.stop()
        if boundaries is not None:
            boundaries.stop()

    # ---- told by torch's allocator (OutOfMemoryListener) ------------------------------------------------------------

    def ran_out_of_memory(self, device: torch.device, requested_bytes: int, limit_bytes: int, free_bytes: int) -> None:
        """Note what is known: the step may die of it, or torch may find another way."""
        if self._before is None or device not in self._devices:
            return
        if this_thread() != self._thread and torch._C._current_graph_task_id() == -1:
            return  # somebody else's, on another thread
        model = None if self._model is None else self._model()
        phase, layer = place_by_frames(model)
        stats = self._read(device)
        self._death = Death(
            cause="allocator",
            device=str(device),
            requested_bytes=float(requested_bytes),
            limit_bytes=float(limit_bytes),
            allocated_bytes=float(stats["allocated_bytes"]["all"]["current"]) if stats else math.nan,
            phase=phase,
            layer=layer,
            thread=self._thread,
        )
        if self._tracker is None and self.on_death is not None and _surely_raises():
            self.on_death()

    # ---- profiles ---------------------------------------------------------------------------------------------------

    def _begin_profile(self) -> None:
        assert self._profile_wanted is not None
        self._profiled_as, self._profile_wanted, self._finished = self._profile_wanted, None, None
        model = None if self._model is None else self._model()
        if model is None:
            self.unprofiled_because = "the model is no longer there"
            return
        log = AllocatorLog(self._devices, self._read, was_reset=self._resets)
        optimizers = [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]
        self.unprofiled_because = None
        because = why_compiled(model) or (_COMPILED_BEFORE if self._ran_compiled else None)
        if because is not None:
            self._only_boundaries(log, optimizers, because)
            return
        self.unprofiled_because = why_no_dispatch_modes()
        if self.unprofiled_because is not None:
            return
        remove_from_stack(lambda mode: isinstance(mode, StepMode) and mode.over)
        keep_dynamo_out(StepTracker)
        storages = LiveStorages(self._counted)
        with torch._C.DisableTorchFunction():  # a function mode of the user's is not to hear of this
            storages.see(*state_of(model, optimizers))
        tracker = DeviceTracker(
            model, optimizers, SharedStorages(storages), self._clock, log, learns_optimizers=not self._were_given
        )
        because = tracker.start()
        if because is not None:
            tracker.stop()
            self._only_boundaries(AllocatorLog(self._devices, self._read, was_reset=self._resets), optimizers, because)
            return
        tracker.on_death, tracker.model = self.on_death, self._model
        because = push_below(tracker)
        if because is not None:
            tracker.stop()
            self.unprofiled_because = because
            return
        self._log, self._tracker, self._was_tracked = log, tracker, True

    def _only_boundaries(self, log: AllocatorLog, optimizers: list[Optimizer], because: str) -> None:
        self._log = log
        self._boundaries = BoundaryWatch(log, optimizers, self._clock)
        self._because = because

    def _end_profile(self, log: AllocatorLog) -> None:
        label, step = self._profiled_as
        tracker, boundaries = self._tracker, self._boundaries
        self._log = self._tracker = self._boundaries = None
        points: list[tuple[float, int]] = []
        because = ""
        if boundaries is not None:
            boundaries.finish()
            self._ran_compiled = False  # if it was that, whether it still does is found out the next time
            points, because = boundaries.points, self._because
        elif tracker is not None:
            self._tracked_death = tracker.death
            if not tracker.leave():
                self.unprofiled_because = "the step was interrupted, or did not end on the thread where it began"
                return
            self._ran_compiled = tracker.compiled_code.stop()
            record = tracker.finish()
            if not self._ran_compiled:
                self._finished = lambda: self._profile(record, log, label, step)
                return
            points, because = tracker.points, "compiled code ran in the step, and tensors inside of it cannot be counted"
        if not any(log.rows(device) for device in log.devices):
            self.unprofiled_because = "torch's allocator has no statistics"
            return
        self._finished = lambda: boundary_profile(log, points, label=label, step=step, reason=because)

    def _profile(self, record: StepRecord, log: AllocatorLog, label: str, step: int) -> StepProfile:
        source = self._profile_source
        notes = [*log.notes(), *self._notes]
        profile = record.profile(label=label, step=step, device=self._names, source=source, notes=notes)
        against = against_tensors_text(log, profile)
        return dataclasses.replace(profile, notes=(*profile.notes, against)) if against else profile

    @property
    def _profile_source(self) -> str:
        return (
            f"live tensor bytes on {self._names}, counted after each op (dispatch mode); torch.cuda.memory_stats at the "
            f"boundaries of layers"
        )

    def _leave_profile(self) -> None:
        """The step in progress, if it is profiled, will not end."""
        tracker, boundaries = self._tracker, self._boundaries
        self._log = self._tracker = self._boundaries = None
        if boundaries is not None:
            boundaries.stop()
        if tracker is not None:
            self._tracked_death = tracker.death or self._tracked_death
            tracker.leave()
        if boundaries is not None or tracker is not None:
            self.unprofiled_because = "the step did not end"

    # ---- statistics -------------------------------------------------------------------------------------------------

    def _read(self, device: torch.device) -> Mapping[str, Any]:
        with contextlib.suppress(RuntimeError):  # what an allocator raises that was plugged in
            return self._stats(device)
        self.unmeasured_because = f"the allocator in use on {device} has no statistics"
        return {}

    def _note(self, device: torch.device, stats: Mapping[str, Any]) -> float:
        peak = float(stats["allocated_bytes"]["all"]["peak"])
        self._highest[device] = max(peak, self._highest.get(device, 0.0))
        return peak


_COMPILED_BEFORE = "compiled code ran in the step that was to be profiled before"


def _surely_raises() -> bool:
    """Whether what does not fit raises an error: cuDNN in its benchmark mode tries what needs less."""
    return not torch.backends.cudnn.benchmark
