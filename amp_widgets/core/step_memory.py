"""The memory of a loop's steps: which of them are measured, profiled, limited or recorded, and what is kept of that."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Sequence

import torch
from torch import nn

from amp_widgets.core.memory.budget import budget_in_bytes
from amp_widgets.core.memory.cpu import CpuMeter
from amp_widgets.core.memory.cuda import CudaMeter
from amp_widgets.core.memory.death import Death
from amp_widgets.core.memory.deep import DeepRecording
from amp_widgets.core.memory.meter import meter_for
from amp_widgets.core.memory.profile import StepProfile, memory_text
from amp_widgets.core.memory.reading import MemoryMeter, MemoryReading
from amp_widgets.core.memory.whole_step import CompleteStep
from amp_widgets.core.profiling import ProfilePlan, combination_of, free_label, positions_kept
from amp_widgets.core.settings import Settings, describe_settings
from amp_widgets.errors import SettingsError

PROFILES_KEPT = 8
COMPLETE_STEPS_KEPT = 4


class StepMemory:
    """Of one loop, which says when a step begins and ends.

    Parameters
    ----------
    model, optimizers, device
        Whose steps, and where the model is.
    every
        Measure memory on every n-th step; 0 never.
    reset_peak
        On CUDA, whether torch's peak counter may be reset at every step.
    say
        Takes a sentence for the event log.

    Attributes
    ----------
    meter
        What measures.
    profile_changes
        Whether a step after each change of autocast or checkpointed layers is profiled by itself.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        device: torch.device,
        *,
        every: int,
        reset_peak: bool,
        say: Callable[[str], None],
    ) -> None:
        self.every = every
        self.meter: MemoryMeter = meter_for(model, optimizers, reset_peak=reset_peak)
        self.profile_changes = False
        self._device = device
        self._say = say
        self._profile_wanted: str | None = None  # label of the profile of the next step
        self._profiles: collections.deque[StepProfile] = collections.deque(maxlen=PROFILES_KEPT)
        self._plan = ProfilePlan()
        self._complete_steps: dict[object, CompleteStep] = {}  # by settings, the newest last
        self._budget_gap_told: str | None = None
        self._recording_wanted: DeepRecording | None = None  # of the step that begins next
        self._recording: DeepRecording | None = None  # of the step in progress

    # ---- what is known ----------------------------------------------------------------------------------------------

    @property
    def source(self) -> str:
        """How the numbers are obtained, and on what; or why they are not."""
        if self.every == 0:
            return "not measured: memory_every is 0"
        return self.meter.source if self.every == 1 else f"{self.meter.source}, every {self.every} steps"

    @property
    def told_within_the_op(self) -> bool:
        """Whether the meter tells of running out of memory in the op in which it does."""
        return isinstance(self.meter, CpuMeter)

    def on_death(self, listener: Callable[[], None]) -> None:
        """Call it when the meter sees that memory has run out."""
        if isinstance(self.meter, (CpuMeter, CudaMeter)):
            self.meter.on_death = listener

    def take_death(self) -> Death | None:
        """What the meter knows of a step that has died, once."""
        return self.meter.take_death()

    def complete_step(self, settings: Settings) -> CompleteStep | None:
        """The newest step with these settings that was followed closely."""
        return self._complete_steps.get(_of_memory(settings))

    # ---- profiles ---------------------------------------------------------------------------------------------------

    @property
    def profiles(self) -> tuple[StepProfile, ...]:
        """The newest last; the newest of each combination of settings is dropped last."""
        return tuple(self._profiles)

    @property
    def profile_wanted(self) -> bool:
        """Whether the step that begins next is to be profiled because somebody has asked for it."""
        return self._profile_wanted is not None

    def profile_next(self, label: str) -> None:
        """Profile the step that begins next; an empty label stands for what is in force then."""
        self._profile_wanted = label

    def keep(self, profile: StepProfile) -> None:
        """Put it among `profiles`."""
        profiles = [*self._profiles, profile]
        combinations = [combination_of(one.label, (layer.name for layer in one.layers if layer.checkpointed)) for one in profiles]
        left = positions_kept(combinations, PROFILES_KEPT)
        self._profiles = collections.deque(profiles[position] for position in left)  # at once: others may be reading them

    # ---- the budget -------------------------------------------------------------------------------------------------

    @property
    def budget_bytes(self) -> float | None:
        """What a step may hold at a time; None for no budget."""
        return self.meter.budget_bytes if isinstance(self.meter, CpuMeter) else None

    @budget_bytes.setter
    def budget_bytes(self, value: float | None) -> None:
        budget = budget_in_bytes(value)
        if isinstance(self.meter, CpuMeter) and self.meter.measured:
            self.meter.budget_bytes = budget
        elif budget is not None:
            why = f"the model is on {self._device}" if self.meter.measured else self.meter.source
            raise SettingsError(f"memory_budget: got {memory_text(budget)}, expected None, as it works on a CPU only, and {why}")

    @property
    def budget_gap(self) -> str | None:
        """That the budget was not watched in the newest step, and why; None when it was, or there is none."""
        because = self.meter.unlimited_because if isinstance(self.meter, CpuMeter) else None
        return None if because is None else f"The memory budget is not watched: {because}."

    # ---- recording --------------------------------------------------------------------------------------------------

    def record_next(self, path: str | os.PathLike[str]) -> None:
        """Record every allocation of the step that begins next."""
        self._recording_wanted = DeepRecording(path, self._device)

    def end_recording(self) -> None:
        """Write what was recorded, if something was."""
        recording, self._recording = self._recording, None
        if recording is not None:
            self._say(recording.end())

    # ---- the step ---------------------------------------------------------------------------------------------------

    def plan(self, step: int, settings: Settings) -> tuple[bool, bool]:
        """Before a step begins: whether it is to be measured, and whether it is to be profiled."""
        profiled = self._profiles_this(step, settings)
        measured = profiled or (self.every > 0 and step % self.every == 0) or self.budget_bytes is not None
        self._recording, self._recording_wanted = self._recording_wanted, None
        if self._recording is not None:
            self._recording.begin()
        return measured, profiled

    def begin(self) -> None:
        """A step that is to be measured begins."""
        self.meter.begin()
        self._tell_of_budget_gap()

    def end(self, settings: Settings, *, measured: bool) -> tuple[MemoryReading | None, StepProfile | None]:
        """A step has ended: its numbers, and its profile, where there are any."""
        self.end_recording()
        reading = profile = None
        if measured:
            reading = self.meter.end()
            self._tell_of_budget_gap()
            profile = self.meter.take_profile()
        self._keep_complete_step(settings)
        return reading, profile

    def abandon(self) -> None:
        """The step will not end."""
        self.end_recording()
        self.meter.abandon()

    def forget(self) -> None:
        """The loop is over: keep no step."""
        self._complete_steps.clear()

    # ---- private ----------------------------------------------------------------------------------------------------

    def _profiles_this(self, step: int, settings: Settings) -> bool:
        label, self._profile_wanted = self._profile_wanted, None
        if label is None and not self.profile_changes:
            return False
        taken = {profile.label for profile in self._profiles}
        if label is not None:
            label = free_label(label or describe_settings(settings), step, taken)
        else:
            label = self._plan.label_for(step, settings, taken)
        if label is None:
            return False
        self.meter.profile_next(label, step=step)
        if isinstance(self.meter, CpuMeter):
            self.meter.keeps_complete = self.profile_changes
        return True

    def _keep_complete_step(self, settings: Settings) -> None:
        complete = self.meter.complete_step if isinstance(self.meter, CpuMeter) else None
        if complete is None:
            return
        key = _of_memory(settings)
        self._complete_steps.pop(key, None)
        self._complete_steps[key] = complete
        if len(self._complete_steps) > COMPLETE_STEPS_KEPT:
            del self._complete_steps[next(iter(self._complete_steps))]

    def _tell_of_budget_gap(self) -> None:
        """An event, if the budget is not watched, and it was not for this reason that it was not before."""
        gap = self.budget_gap
        if gap is not None and gap != self._budget_gap_told:
            self._say(gap)
        self._budget_gap_told = gap


def _of_memory(settings: Settings) -> object:
    """What of the settings makes a difference to memory."""
    return settings.autocast, frozenset(settings.checkpointed), frozenset(settings.fp32_layers)
