"""What a dashboard shows and what it drives: an immutable snapshot, and the protocol that a session satisfies."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from amp_widgets.core.run_state import RunState
from amp_widgets.core.settings import AutocastName, Settings

if TYPE_CHECKING:
    from amp_widgets.analysis.comparisons import ComparisonStatus
    from amp_widgets.analysis.corners import Grid
    from amp_widgets.analysis.inspections import Inspection, InspectionKind
    from amp_widgets.core.autocast import Support
    from amp_widgets.core.checkpointing import Layer
    from amp_widgets.core.history import History
    from amp_widgets.core.numerics import Numerics
    from amp_widgets.widgets.memory_state import OutOfMemoryLike, StepProfileLike


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DashboardState:
    """A snapshot of a session: all that the controls show.

    Sizes are in bytes and times in seconds; NaN stands for what is not known.

    Parameters
    ----------
    settings
        What is in force.
    pending
        Setting → value of what waits for the next step boundary (names of layers, not globs), or None.
    layers
        The layers of the model, in the model's order.
    support
        For ``"fp32"``, ``"fp16"`` and ``"bf16"``: whether the device has it, and a note.
    run
        How the background run stands; ``"none"``: none was prepared, the loop runs in the user's own cell.
    in_cell
        Whether a cell that trains this model is known to be running, also while no step is made.
    step
        Steps completed.
    device, torch_version
        For people, such as ``"cuda:0 (NVIDIA H200)"`` and ``"2.13.0"``.
    scale
        The live loss scale; None while the loss is not scaled.
    last_rejection
        Why the last request was rejected, or None.
    complaint
        What else could not be done or shown, as a sentence of its own, or None.
    error
        The last lines of the traceback that ended a run, or None.
    step_s, steps_per_s, samples_per_s, loss, skipped_steps
        Of the newest steps; `skipped_steps` of the whole run.
    memory_source
        How the memory numbers are obtained, for people.
    allocated_bytes, peak_bytes, overall_peak_bytes
        At the end of the newest measured step, within it, and the highest of the whole run.
    notes
        Plain sentences worth knowing, such as what a compiled model cannot do.
    """

    settings: Settings
    pending: Mapping[str, Any] | None = None
    layers: tuple[Layer, ...] = ()
    support: Mapping[AutocastName, Support] = dataclasses.field(default_factory=dict)
    run: RunState = "none"
    in_cell: bool = False
    step: int = 0
    device: str = ""
    torch_version: str = ""
    scale: float | None = None
    last_rejection: str | None = None
    complaint: str | None = None
    error: str | None = None
    step_s: float = math.nan
    steps_per_s: float = math.nan
    samples_per_s: float = math.nan
    loss: float = math.nan
    skipped_steps: int = 0
    memory_source: str = ""
    allocated_bytes: float = math.nan
    peak_bytes: float = math.nan
    overall_peak_bytes: float = math.nan
    notes: tuple[str, ...] = ()

    def requested(self, name: str) -> Any:
        """The value of a setting that was asked for last: the waiting one, else the one in force."""
        if self.pending is not None and name in self.pending:
            return _plain(self.pending[name])
        return getattr(self.settings, name)

    @property
    def waiting(self) -> dict[str, Any]:
        """Setting → value of what waits and differs from what is in force."""
        asked = {name: _plain(value) for name, value in (self.pending or {}).items()}
        return {name: value for name, value in asked.items() if value != getattr(self.settings, name)}


class Controlled(Protocol):
    """What a dashboard drives. Every method may be called from any thread, and none waits for the device."""

    def dashboard_state(self) -> DashboardState:
        """A snapshot."""

    @property
    def closed(self) -> bool:
        """Whether there is nothing left to control: a dashboard then shows the last state and lets go."""

    @property
    def history_so_far(self) -> History:
        """Every step whose values have arrived."""

    @property
    def profiles(self) -> tuple[StepProfileLike, ...]:
        """The profiled steps that are kept, the newest last; the same objects every time."""

    @property
    def profile_pending(self) -> bool:
        """Whether the next step will be profiled."""

    @property
    def why_not_profiled(self) -> str | None:
        """Why the last step that was to be profiled was not, or None."""

    @property
    def out_of_memory(self) -> OutOfMemoryLike | None:
        """The last step that ran out of memory, until it is cleared; the same object every time."""

    @property
    def memory_budget(self) -> float | None:
        """Bytes that a step may not go above, or None."""

    def profile_next_step(self, label: str = "") -> None:
        """Profile the memory of the step that begins next."""

    def clear_out_of_memory(self) -> None:
        """Forget `out_of_memory`."""

    @property
    def numerics(self) -> Numerics:
        """What is watched of the numbers; it keeps what was found also when all is closed."""

    def count_gradients(self, every: int | None = None) -> None:
        """Count the sizes of gradients in the next step, or in every so many-th; 0: in none."""

    check_changes: bool
    """Whether a check is done after each change of the checkpointed layers."""

    @property
    def why_no_batch(self) -> str | None:
        """Why there is no batch that `inspect` could work on; None when there is one."""

    @property
    def why_no_plan(self) -> str | None:
        """Why there is no batch that what takes long could work on; None when there is one."""

    def inspect(self, kind: InspectionKind, **options: Any) -> None:
        """Ask for an inspection between two steps; without a run that trains it is made at once. Raises RunError."""

    def cancel_inspection(self, kind: InspectionKind) -> None:
        """End one that takes long as soon as can be; nothing happens where there is none."""

    def inspection(self, kind: InspectionKind) -> Inspection:
        """How that stands; the same object as long as nothing has changed."""

    @property
    def why_no_comparison(self) -> str | None:
        """Why there is no batch that `compare_on_newest` could work on; None when there is one."""

    def compare_on_newest(self, *, grid: Grid | None = None, steps: int = 5, rounds: int = 3) -> None:
        """Ask for a comparison between two steps, or now where no run is alive. Raises RunError."""

    def cancel_comparison(self) -> None:
        """End it at its next step; nothing happens where there is none."""

    @property
    def comparison(self) -> ComparisonStatus:
        """How that stands; the same object as long as nothing has changed."""

    @property
    def recorded_to(self) -> Path | None:
        """The file that the run is written to, or None."""

    def record(self, path: str) -> None:
        """Write the run to a new file. Raises RecordingError."""

    def stop_recording(self) -> None:
        """Let go of the file."""

    def request(self, *, source: str = "script", **changes: Any) -> object:
        """Ask for settings, in force from the next step. Raises SettingsError."""

    def start(self) -> None:
        """Start the prepared run. This and the others raise RunError."""

    def pause(self) -> None:
        """Pause at the next step boundary."""

    def resume(self) -> None:
        """Go on."""

    def single_step(self) -> None:
        """Run one step, then pause."""

    def stop(self) -> None:
        """End the run at the next step boundary."""

    def reset(self) -> None:
        """Give the model its first weights again."""


NUMBERS = (
    "step", "scale", "step_s", "steps_per_s", "samples_per_s", "loss", "skipped_steps",
    "allocated_bytes", "peak_bytes", "overall_peak_bytes",
)  # fmt: skip
"""The fields of a `DashboardState` that change with every step."""


def same_state(one: DashboardState, other: DashboardState) -> bool:
    """Whether both show the same; unlike ``==``, NaN is the same as NaN."""
    return one is other or all(_same(getattr(one, name), getattr(other, name)) for name in _FIELDS)


def only_numbers_differ(one: DashboardState, other: DashboardState) -> bool:
    """Whether the two differ in nothing but `NUMBERS`."""
    return all(_same(getattr(one, name), getattr(other, name)) for name in _FIELDS if name not in NUMBERS)


_FIELDS = tuple(field.name for field in dataclasses.fields(DashboardState))


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other):
        return True
    return bool(one == other)


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
