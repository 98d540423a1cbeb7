"""What torch's CUDA allocator counts, read within a step: nothing here waits for a device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from amp_widgets.core.memory.profile import KINDS, PHASES, AllocatorReadings, StepProfile, frozen_sums, memory_text, phases_of

Stats = Mapping[str, Any]
"""As ``torch.cuda.memory_stats_as_nested_dict`` returns them; empty while the allocator was not used."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """One reading of one device.

    Attributes
    ----------
    point
        How many points of the step there were before.
    allocated_bytes, inactive_bytes, reserved_bytes
        At that moment: in use, free in blocks that are split, and held by the allocator.
    peak_bytes
        The most in use since torch's peak counter was reset.
    rounding_bytes
        Of those in use, what was not asked for; NaN where that is not counted, as by ``cudaMallocAsync``, which counts
        neither fragmentation nor retries.
    retries, ooms
        Since torch was started.
    private_bytes
        Held in pools of their own, such as those of CUDA graphs.
    """

    point: int
    allocated_bytes: int
    inactive_bytes: int
    reserved_bytes: int
    peak_bytes: int
    rounding_bytes: float
    retries: int
    ooms: int
    private_bytes: int

    @classmethod
    def of(cls, stats: Stats, point: int) -> Counters:
        """What matters among the statistics."""
        allocated = int(stats["allocated_bytes"]["all"]["current"])
        requested = int(stats["requested_bytes"]["all"]["current"]) if "requested_bytes" in stats else 0
        pools = stats.get("reserved_bytes_by_private_pools", {})
        return cls(
            point=point,
            allocated_bytes=allocated,
            inactive_bytes=int(stats["inactive_split_bytes"]["all"]["current"]),
            reserved_bytes=int(stats["reserved_bytes"]["all"]["current"]),
            peak_bytes=int(stats["allocated_bytes"]["all"]["peak"]),
            rounding_bytes=allocated - requested if requested else math.nan,
            retries=int(stats["num_alloc_retries"]),
            ooms=int(stats["num_ooms"]),
            private_bytes=sum(int(pool["all"]["current"]) for pool in pools.values()),
        )


class AllocatorLog:
    """The statistics of some devices, read at points of one step.

    Parameters
    ----------
    devices
        Whose statistics are read.
    stats
        Gives them; nothing while a device's allocator was not used.
    was_reset
        Whether torch's peak counters were reset when the step began.
    """

    def __init__(self, devices: Iterable[torch.device], stats: Callable[[torch.device], Stats], *, was_reset: bool) -> None:
        self._stats = stats
        self._was_reset = was_reset
        self._rows: dict[torch.device, list[Counters]] = {device: [] for device in devices}
        self._unused: set[torch.device] = set()  # when the step began

    def read(self, point: int) -> None:
        """Read all devices now; a second reading at one point takes the first one's place."""
        for device, rows in self._rows.items():
            stats = self._stats(device)
            if not stats:
                if not rows:
                    self._unused.add(device)
                continue
            row = Counters.of(stats, point)
            if rows and rows[-1].point == point and len(rows) > 1:  # the very first says what there was before
                rows[-1] = row
            elif not rows or rows[-1].point < point:
                rows.append(row)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Whose statistics are read."""
        return tuple(self._rows)

    def rows(self, device: torch.device) -> list[Counters]:
        """The readings of a device, by ascending points."""
        return self._rows[device]

    def peak_bytes(self, device: torch.device) -> float:
        """The most bytes in use within the step by torch's counter; NaN where it does not tell."""
        rows = self._rows[device]
        if not rows:
            return math.nan
        # A counter that did not rise only says that the step stayed at or below an older peak.
        tells = self._was_reset or device in self._unused or rows[-1].peak_bytes > rows[0].peak_bytes
        return float(rows[-1].peak_bytes) if tells else math.nan

    def readings(self) -> tuple[AllocatorReadings, ...]:
        """One for each device that was read."""
        found = []
        for device, rows in self._rows.items():
            if not rows:
                continue
            allocated = _column([row.allocated_bytes for row in rows])
            peak = self.peak_bytes(device)
            found.append(
                AllocatorReadings(
                    device=str(device),
                    point=_column([row.point for row in rows], np.int32),
                    allocated_bytes=allocated,
                    inactive_bytes=_column([row.inactive_bytes for row in rows]),
                    reserved_bytes=_column([row.reserved_bytes for row in rows]),
                    peak_allocated_bytes=int(allocated.max()) if math.isnan(peak) else int(peak),
                    retries=self._within(device, "retries"),
                    ooms=self._within(device, "ooms"),
                )
            )
        return tuple(found)

    def notes(self) -> list[str]:
        """What is to be said of the readings, whatever else was measured."""
        notes = []
        unknown = [str(device) for device, rows in self._rows.items() if rows and math.isnan(self.peak_bytes(device))]
        if unknown:
            notes.append(
                f"torch's peak counter on {', '.join(unknown)} may not be reset, and did not rise in this step: the highest "
                f"of the readings stands for the peak, which may have been higher"
            )
        if any(rows[-1].allocated_bytes and math.isnan(rows[-1].rounding_bytes) for rows in self._rows.values() if rows):
            notes.append(
                "the allocator in use counts neither fragmentation nor retries: none are seen, whether there are any or not"
            )
        private = sum(rows[-1].private_bytes for rows in self._rows.values() if rows)
        if private:
            notes.append(
                f"{memory_text(private)} are held in private pools, such as those of CUDA graphs: what a graph makes "
                f"when it is replayed is not followed"
            )
        return notes

    def _within(self, device: torch.device, name: str) -> int:
        rows = self._rows[device]
        first = 0 if device in self._unused else getattr(rows[0], name)
        last: int = getattr(rows[-1], name)
        return last - first if last >= first else last  # the user has reset the counters


def against_tensors_text(log: AllocatorLog, profile: StepProfile) -> str:
    """Where the tensors' bytes and the allocator's are not the same, in a sentence with the numbers; nothing where they are."""
    allocated, tensors = math.fsum(map(log.peak_bytes, log.devices)), profile.peak_bytes
    if math.isnan(allocated) or allocated == tensors:
        return ""
    rows = [log.rows(device) for device in log.devices]
    text = (
        f"torch's allocator counted a peak of {memory_text(allocated)}, and the tensors that were followed come to "
        f"{memory_text(tensors)}, {memory_text(abs(allocated - tensors))} {'less' if tensors < allocated else 'more'}"
    )
    if tensors > allocated:
        return f"{text}: not all of them lie in memory of that allocator, or those of several devices peak at different times"
    before = sum(each[0].allocated_bytes for each in rows) - int(profile.total_bytes[0])
    rounding = math.fsum(each[-1].rounding_bytes for each in rows)
    parts = []
    if before > 0:
        parts.append(f"{memory_text(before)} of that lay between the two when the step began, in tensors it had not touched yet")
    if rounding > 0:
        parts.append(f"rounding to blocks of 512 B came to {memory_text(rounding)} at its end")
    parts.append("the rest is what operators allocate for themselves (workspaces)")
    return f"{text}: {', '.join(parts)}"


class Readable(Protocol):
    """What can be read at points of a step."""

    def read(self, point: int) -> None:
        """Read it now."""


class BoundaryWatch:
    """Reads the allocator, or something else, where that does not disturb compiled code: around each optimizer's step.

    Parameters
    ----------
    log
        Where the readings go.
    optimizers
        Whose steps are watched; all, if there are none.
    clock
        Seconds.
    """

    def __init__(self, log: Readable, optimizers: Sequence[Optimizer], clock: Callable[[], float]) -> None:
        self._log = log
        self._clock = clock
        self._begun_s = clock()
        self.points: list[tuple[float, int]] = []  # time and phase, as far as it goes
        self._handles: list[RemovableHandle] = []
        self._read(_OTHER)
        if optimizers:
            for optimizer in optimizers:
                self._handles.append(optimizer.register_step_pre_hook(self._before_step))
                self._handles.append(optimizer.register_step_post_hook(self._after_step))
        else:
            self._handles += [
                register_optimizer_step_pre_hook(self._before_step),
                register_optimizer_step_post_hook(self._after_step),
            ]

    def stop(self) -> None:
        """Watch no more; may be called more than once."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def finish(self) -> None:
        """The end of the step."""
        self.stop()
        self._read(_OTHER)

    def _before_step(self, *_: object) -> None:
        self._read(_OTHER)

    def _after_step(self, *_: object) -> None:
        self._read(_OPTIMIZER)

    def _read(self, phase: int) -> None:
        self._log.read(len(self.points))
        self.points.append((self._clock() - self._begun_s, phase))


def boundary_profile(
    log: AllocatorLog, points: Sequence[tuple[float, int]], *, label: str, step: int, reason: str
) -> StepProfile:
    """A profile of nothing but the allocator's readings.

    Parameters
    ----------
    points
        Time in seconds, and phase (position in `PHASES`) of what came before, of each point.
    reason
        Why there is no more, as a sentence without its end.

    Notes
    -----
    Between two readings torch's peak counter may rise. Then there is a point with that peak in the middle between them;
    where it really was is not known. Over several devices it is the sum of each one's highest, as in `MemoryReading`.
    """
    devices = log.devices
    at = sorted({row.point for device in devices for row in log.rows(device)})
    total: list[int] = []
    times_s: list[float] = []
    phases: list[int] = []
    places: dict[int, int] = {}
    before: dict[torch.device, Counters] = {}
    for point in at:
        time_s, phase = points[point]
        now = {**before, **{device: row for device in devices for row in log.rows(device) if row.point == point}}
        highest = sum(
            row.peak_bytes
            if device in before and row.peak_bytes > before[device].peak_bytes
            else max(row.allocated_bytes, before[device].allocated_bytes if device in before else 0)
            for device, row in now.items()
        )
        allocated = sum(row.allocated_bytes for row in now.values())
        if total and highest > max(total[-1], allocated):
            total.append(highest)
            times_s.append((times_s[-1] + time_s) / 2)
            phases.append(phase)
        places[point] = len(total)
        total.append(allocated)
        times_s.append(time_s)
        phases.append(phase)
        before = now
    if len(phases) > 1:
        phases[0] = phases[1]
    bytes_by_kind = np.zeros((len(total), len(KINDS)), dtype=np.int64)
    bytes_by_kind[:, _OTHER_KIND] = total
    none = np.full(len(total), -1, dtype=np.int32)
    arrays = (bytes_by_kind, np.array(times_s), none)
    for array in arrays:
        array.flags.writeable = False
    names = ", ".join(str(device) for device in devices)
    return StepProfile(
        label=label,
        step=step,
        device=names,
        source=f"torch.cuda.memory_stats on {names}, at the boundaries of the step",
        bytes_by_kind=bytes_by_kind,
        time_s=arrays[1],
        layer_index=none,
        operator_index=none,
        layer_names=(),
        operator_names=(),
        phases=phases_of([PHASES[phase] for phase in phases]),
        layers=(),
        peak_by_layer=frozen_sums({"": {KINDS[_OTHER_KIND]: max(total)}}),
        notes=(
            f"{reason}: only what torch's allocator counts was read, at the boundaries of the step; nothing is known of kinds "
            f"and layers, nor where between two readings the peak was",
            *log.notes(),
        ),
        allocator=tuple(
            dataclasses.replace(readings, point=_column([places[int(point)] for point in readings.point], np.int32))
            for readings in log.readings()
        ),
    )


_OTHER, _OPTIMIZER = PHASES.index("other"), PHASES.index("optimizer")
_OTHER_KIND = KINDS.index("other")


def _column(values: Sequence[int], dtype: type[np.integer[Any]] = np.int64) -> Any:
    column = np.array(values, dtype=dtype)
    column.flags.writeable = False
    return column
