"""What a memory meter is and what it reports."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Protocol

from torch import nn
from torch.optim import Optimizer

from amp_widgets.core.memory.death import Death
from amp_widgets.core.memory.profile import StepProfile

DeviceBytes = tuple[float, float, float]
"""Allocated, peak and reserved bytes of one device; NaN where not measured."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReading:
    """Memory of one step, summed over the devices that were measured. NaN means "not measured", never "none".

    Parameters
    ----------
    allocated_bytes
        Bytes of tensors alive at the end of the step.
    peak_bytes
        The most bytes that were alive at one time within the step. Over several devices, the sum of each one's own peak.
    reserved_bytes
        Bytes the allocator holds at the end of the step, in use or cached; NaN on a CPU, which has no such allocator.
    per_device
        Device name, such as ``"cuda:0"`` → (allocated, peak, reserved) bytes.
    """

    allocated_bytes: float
    peak_bytes: float
    reserved_bytes: float
    per_device: Mapping[str, DeviceBytes]

    @classmethod
    def of(cls, per_device: Mapping[str, DeviceBytes]) -> MemoryReading:
        """The reading of these devices; one that was not measured makes the sum NaN, too."""
        if not per_device:
            return NOT_MEASURED
        allocated, peak, reserved = (math.fsum(values) for values in zip(*per_device.values(), strict=True))
        return cls(
            allocated_bytes=allocated,
            peak_bytes=peak,
            reserved_bytes=reserved,
            per_device=MappingProxyType(dict(per_device)),
        )


NOT_MEASURED = MemoryReading(
    allocated_bytes=math.nan, peak_bytes=math.nan, reserved_bytes=math.nan, per_device=MappingProxyType({})
)
"""The reading of a step that was not measured."""


class MemoryMeter(Protocol):
    """Measures the memory of training steps, one after the other, on the training thread."""

    @property
    def source(self) -> str:
        """How the numbers are obtained, for people; ``"not measured: …"`` with the reason where they are not."""

    @property
    def measured(self) -> bool:
        """Whether the meter can measure this model at all; single steps may still be NaN."""

    @property
    def overall_peak_bytes(self) -> float:
        """The highest peak that was seen so far, or NaN."""

    @property
    def unmeasured_because(self) -> str | None:
        """Why the last step that was to be measured and was not; None when there is none."""

    def watch(self, model: Callable[[], nn.Module | None]) -> None:
        """Measure the steps of this model from the next one on; it is on the same devices. It is asked for at each step."""

    def follow(self, optimizers: Iterable[Optimizer]) -> None:
        """Count the state of these, besides those that were given; they are not kept alive. Holds for a step in progress."""

    @property
    def unprofiled_because(self) -> str | None:
        """Why the last step that was to be profiled was not; None when it was."""

    def profile_next(self, label: str, *, step: int = -1) -> None:
        """Profile the step that `begin` starts next, besides measuring it."""

    def take_profile(self) -> StepProfile | None:
        """The profile of the last step that was profiled, once."""

    def take_death(self) -> Death | None:
        """What is known of how memory ran out in the step in progress, or in the one before, once."""

    def begin(self) -> None:
        """Start of a step, on the training thread. A step that was not ended is abandoned."""

    def end(self) -> MemoryReading:
        """The step boundary, on the training thread."""

    def abandon(self) -> None:
        """The step will not end. Nothing is left behind; may be called from any thread, and more than once."""

    def close(self) -> None:
        """Abandon a step in progress and drop every reference to the model; may be called more than once."""


class NoMeter:
    """The meter where memory cannot be measured.

    Parameters
    ----------
    reason
        Why not, for people.
    """

    def __init__(self, reason: str) -> None:
        self.source = f"not measured: {reason}"
        self.measured = False
        self.overall_peak_bytes = math.nan
        self.unmeasured_because: str | None = None
        self.unprofiled_because: str | None = None

    def profile_next(self, label: str, *, step: int = -1) -> None:
        """Note why not."""
        self.unprofiled_because = self.source

    def take_profile(self) -> StepProfile | None:
        """There is none."""
        return None

    def take_death(self) -> Death | None:
        """There is none."""
        return None

    def watch(self, model: Callable[[], nn.Module | None]) -> None:
        """Do nothing."""

    def follow(self, optimizers: Iterable[Optimizer]) -> None:
        """Do nothing."""

    def begin(self) -> None:
        """Do nothing."""

    def end(self) -> MemoryReading:
        """All NaN."""
        return NOT_MEASURED

    def abandon(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
