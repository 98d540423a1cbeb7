"""Memory of a step on CUDA devices, from the statistics of torch's own allocator."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from amp_widgets.core.memory.profile import StepProfile
from amp_widgets.core.memory.reading import NOT_MEASURED, DeviceBytes, MemoryReading


class CudaMeter:
    """Reads ``torch.cuda.memory_stats`` at the step boundaries; never waits for a device.

    The allocator keeps one peak per device, since it was last reset. Its peak *within* a step is had by resetting that
    counter at the start of the step; the overall peak is then kept here.

    Parameters
    ----------
    devices
        The devices to read, with their index.
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
    """

    def __init__(
        self,
        devices: Iterable[torch.device],
        *,
        reset_peak: bool = True,
        also_on_cpu: bool = False,
        stats: Callable[[torch.device], Mapping[str, Any]] | None = None,
        reset: Callable[[torch.device], None] | None = None,
    ) -> None:
        self._devices = tuple(devices)
        self._resets = reset_peak
        self._stats = stats or torch.cuda.memory_stats_as_nested_dict
        self._reset = reset or torch.cuda.reset_peak_memory_stats
        self._before: dict[torch.device, float] | None = None  # of each device, the peak that is older than the step
        self._highest: dict[torch.device, float] = {}
        names = ", ".join(str(device) for device in self._devices)
        counter = (
            "torch's peak counter is reset at every step"
            if reset_peak
            else "the peak within a step is known only when it is a new maximum, as the peak counter may not be reset"
        )
        rest = "; bytes on the CPU are not counted" if also_on_cpu else ""
        self.source = f"torch.cuda.memory_stats on {names}; {counter}{rest}"
        self.measured = True
        self.unmeasured_because: str | None = None
        self.unprofiled_because: str | None = None

    @property
    def overall_peak_bytes(self) -> float:
        """Sum over the devices of each one's highest peak so far, whoever reset the counter; NaN before there is one."""
        return math.fsum(self._highest.values()) if self._highest else math.nan

    def profile_next(self, label: str, *, step: int = -1) -> None:
        """Note why not."""
        self.unprofiled_because = "not profiled: within a step, only the tensors on a CPU are followed yet"

    def take_profile(self) -> StepProfile | None:
        """There is none."""
        return None

    def watch(self, model: Callable[[], nn.Module | None]) -> None:
        """Nothing to do: the counters are the devices'."""

    def begin(self) -> None:
        """Note the peak counters, then reset them if that is allowed."""
        before = {}
        for device in self._devices:
            stats = self._stats(device)
            if not stats:
                before[device] = -math.inf  # nothing was ever allocated: what the counter shows later is of this step
                continue
            peak = self._note(device, stats)
            if self._resets:
                self._reset(device)
                peak = -math.inf
            before[device] = peak
        self._before = before

    def end(self) -> MemoryReading:
        """Bytes at the step boundary and the peak since `begin`; NaN without a `begin` or while there are no statistics."""
        before, self._before = self._before, None
        if before is None:
            return NOT_MEASURED
        per_device: dict[str, DeviceBytes] = {}
        for device in self._devices:
            stats = self._stats(device)
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

    def close(self) -> None:
        """Forget the step in progress. The meter holds no tensor and no model."""
        self._before = None

    def _note(self, device: torch.device, stats: Mapping[str, Any]) -> float:
        peak = float(stats["allocated_bytes"]["all"]["peak"])
        self._highest[device] = max(peak, self._highest.get(device, 0.0))
        return peak
