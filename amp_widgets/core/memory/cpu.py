"""Memory of a step on a CPU: the bytes of the live tensors, counted op by op."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch._C._dynamo import eval_frame
from torch.optim import Optimizer

from amp_widgets.core.memory.compiled import REASON, is_compiled, why_compiled
from amp_widgets.core.memory.death import Death
from amp_widgets.core.memory.lives import RecordedStorages
from amp_widgets.core.memory.profile import StepProfile
from amp_widgets.core.memory.reading import NOT_MEASURED, MemoryReading
from amp_widgets.core.memory.state_profile import StateWatch
from amp_widgets.core.memory.step_mode import StepMode, keep_dynamo_out, push_below, remove_from_stack
from amp_widgets.core.memory.step_record import StepRecord
from amp_widgets.core.memory.storages import LiveStorages, state_of
from amp_widgets.core.memory.tracker import StepTracker
from amp_widgets.core.memory.whole_step import CompleteStep


class CpuMeter:
    """Counts the bytes of every CPU tensor that a step touches, exactly, by looking at each op (a dispatch mode).

    What counts, from its first sight until it is freed: parameters, buffers, gradients and optimizer state, the arguments
    and the results of every op in a step. Views count once. What a kernel allocates for itself and frees again is not seen,
    nor are ops inside of a higher-order operator (``torch.cond`` and the like); other threads' tensors count from the
    moment that they are used in a step. The model and the optimizers are not kept alive.

    A step is not measured, and reads NaN, when one of torch's own modes for tracing is active as it begins, when compiled code
    runs in it, and when it is left without an end; `unmeasured_because` says so. Other dispatch modes, the user's, come before
    this one: the ops that they run are what counts. A step that was left, by an exception in another
    notebook cell for instance, is noticed by the next op after a pause, which takes the mode off; nothing has to be called.

    Parameters
    ----------
    model, optimizers
        Whose tensors count from the start of a step.
    clock
        Seconds; for tests.
    """

    def __init__(self, model: nn.Module, optimizers: Iterable[Optimizer], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._step: StepMode | None = None
        self._model: Callable[[], nn.Module | None] | None = weakref.ref(model)
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._were_given = bool(self._optimizers)
        self._clock = clock
        self._storages = LiveStorages()
        self._profile_wanted: tuple[str, int] | None = None  # label and number of the step that begins next
        self._profiled_as: tuple[str, int] | None = None  # of the step in progress, if it is profiled
        self._profile: tuple[StepRecord, str, int] | StepProfile | None = None
        self._boundaries: StateWatch | None = None  # of a step that is profiled, and runs compiled code
        self._ran_compiled = False  # in the last step that ended
        self._why_not: str | None = None
        self.overall_peak_bytes = math.nan
        self.unmeasured_steps = 0
        self.unmeasured_because: str | None = None
        """Why the last step that was not measured was not."""
        self.unprofiled_because: str | None = None
        """Why the last step that was to be profiled was not; None when it was."""
        self._budget_bytes: float | None = None
        self.unlimited_because: str | None = None
        """Why the budget was not watched in the last step; None when it was, or there is none."""
        self.on_death: Callable[[], None] | None = None
        """Called when memory has run out in an op, within that op."""
        self._death: Death | None = None  # of a step that is over
        self.keeps_complete = False
        """Whether profiled steps are followed as closely as those with a budget; see `complete_step`."""
        self._complete: CompleteStep | None = None  # the last step that ended, if it was followed so
        keep_dynamo_out(StepMode)
        keep_dynamo_out(StepTracker)

    @property
    def measured(self) -> bool:
        """False while the model is compiled, or on another device than it was."""
        return self._why_not is None

    @property
    def source(self) -> str:
        """How the bytes are obtained, or why they are not, for people."""
        if self._why_not is not None:
            return f"not measured: {self._why_not}"
        return "live tensor bytes on cpu, counted exactly (dispatch mode)"

    @property
    def budget_bytes(self) -> float | None:
        """What a step may hold at a time; an op of the training that goes above it raises `MemoryBudgetError`.

        None, or another budget than there was, holds at once; the first one from the next step on.
        """
        return self._budget_bytes

    @budget_bytes.setter
    def budget_bytes(self, budget: float | None) -> None:
        self._budget_bytes = budget
        if isinstance(self._step, StepTracker):
            self._step.limit_bytes = math.inf if budget is None else budget

    def watch(self, model: Callable[[], nn.Module | None]) -> None:
        """Count this model's tensors from now on, by layer from the start of the next step on; it is asked for then."""
        self._model = model
        self._count_more()

    def follow(self, optimizers: Iterable[Optimizer]) -> None:
        """Count the state of these, besides those that were given."""
        known = [reference() for reference in self._optimizers]
        new = [weakref.ref(optimizer) for optimizer in optimizers if all(optimizer is not other for other in known)]
        if not new:
            return
        self._optimizers = [reference for reference in self._optimizers if reference() is not None] + new
        self._count_more()

    def profile_next(self, label: str, *, step: int = -1) -> None:
        """Profile the step that `begin` starts next, besides measuring it.

        Parameters
        ----------
        label
            Of the profile, for people.
        step
            Its number in the history; -1 for a step of its own.
        """
        self._profile_wanted = (label, step)

    def take_profile(self) -> StepProfile | None:
        """The profile of the last step that was profiled, once; None when there is none: see `unprofiled_because`."""
        taken, self._profile = self._profile, None
        if taken is None or isinstance(taken, StepProfile):
            return taken
        record, label, step = taken
        return record.profile(label=label, step=step, device="cpu", source=_PROFILE_SOURCE)

    @property
    def complete_step(self) -> CompleteStep | None:
        """The last step that has ended, if it was followed so closely that estimates can go by it; after it, only such as were
        broken off."""
        return self._complete

    def take_death(self) -> Death | None:
        """What is known of how memory ran out in the step in progress, or in the one before, once."""
        step = self._step
        if step is not None and step.death is not None:
            self._death, step.death = step.death, None
        death, self._death = self._death, None
        return death

    def picture(self, death: Death, *, label: str, step: int) -> StepProfile | None:
        """The step until memory ran out, if it was followed."""
        if death.record is None:
            return None
        return death.record.profile(label=label, step=step, device=death.device, source=_PROFILE_SOURCE)

    def begin(self) -> None:
        """Count what is there, and watch each op from now on."""
        self.abandon()
        self.unlimited_because = None
        model = self._model() if self._model is not None else None
        if model is None:
            return
        self._why_not = _why_no_longer(model)
        if self._why_not is not None:
            wanted = self._profile_wanted
            self._skip(self._why_not)
            if wanted is not None and is_compiled(model):
                self._only_boundaries(wanted, self._why_not)
            return
        remove_from_stack(lambda mode: isinstance(mode, StepMode) and mode.over)
        self._count_state(model)
        tracker = self._tracker(model) if self._profile_wanted is not None or self.budget_bytes is not None else None
        step = StepMode(self._storages, self._clock) if tracker is None else tracker
        step.on_death, step.model = self.on_death, self._model
        because = push_below(step)
        if because is not None:
            step.stop()
            if tracker is None:
                self._skip(because)
            else:
                self._skip(because, tracker)
                self._note_unfollowed(because)
            return
        self._step = step

    def end(self) -> MemoryReading:
        """Bytes alive now, and the most that were alive at one time since `begin`; NaN where that was not measured."""
        step, self._step = self._step, None
        boundaries, self._boundaries = self._boundaries, None
        if boundaries is not None:
            self._profile = boundaries.finish()
        self._complete = None
        if step is None:
            return NOT_MEASURED
        self._death = step.death
        tracker = step if isinstance(step, StepTracker) else None
        if not step.leave():
            self._skip("the step was interrupted, or did not end on the thread where it began", tracker)
            return NOT_MEASURED
        self._ran_compiled = step.compiled_code.stop()
        if self._ran_compiled:
            because = f"compiled code ran in the step, and {REASON}"
            self._skip(because, tracker)
            if tracker is not None and self._budget_bytes is not None:
                self.unlimited_because = because
            return NOT_MEASURED
        if tracker is not None:
            if self._profiled_as is not None or self._budget_bytes is not None:
                record = tracker.finish()
                if self._profiled_as is not None:
                    self._profile = (record, *self._profiled_as)
                if tracker.follows_values:
                    self._complete = tracker.complete(record)
            self._storages.recount()  # the tracker has kept its own sum
        self._storages.settle()
        peak = float(step.peak_bytes)
        if not self.overall_peak_bytes >= peak:  # also when it is NaN
            self.overall_peak_bytes = peak
        return MemoryReading.of({"cpu": (float(self._storages.bytes), peak, math.nan)})

    def abandon(self) -> None:
        """Leave the step in progress unmeasured. Called from another thread, the mode is taken off by the next op."""
        step, self._step = self._step, None
        boundaries, self._boundaries = self._boundaries, None
        if boundaries is not None:
            boundaries.stop()
            self.unprofiled_because = "the step did not end"
        if step is not None:
            self._death = step.death or self._death
            step.leave()
            self._skip("the step did not end", step)

    def close(self) -> None:
        """Abandon a step in progress and forget all storages, the model and the optimizers."""
        self.abandon()
        self._model = None
        self._optimizers = []
        self._storages.clear()
        self._profile_wanted = self._profile = self._death = self._complete = None
        self.on_death = None

    def __del__(self) -> None:
        step: StepMode | None = getattr(self, "_step", None)
        boundaries: StateWatch | None = getattr(self, "_boundaries", None)
        if step is not None:
            step.stop()
        if boundaries is not None:
            boundaries.stop()

    def _tracker(self, model: nn.Module) -> StepTracker | None:
        """What profiles the step that begins, or watches its budget, if that can be done."""
        because = why_compiled(model)
        if because is None and self._ran_compiled:
            because = f"compiled code ran in the step before, and {REASON}"
        self._profiled_as, self._profile_wanted = self._profile_wanted, None
        if because is not None:
            self._note_unfollowed(because)
            if self._profiled_as is not None:
                self._only_boundaries(self._profiled_as, because)
                self._profiled_as = None
            return None
        optimizers = [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]
        tracker = StepTracker(
            model, optimizers, RecordedStorages(self._storages), self._clock, learns_optimizers=not self._were_given
        )
        because = tracker.start()
        self._note_unfollowed(because)
        if because is not None:
            tracker.stop()
            return None
        if self.budget_bytes is not None:
            tracker.limit_bytes = self.budget_bytes
        tracker.follows_values = self.keeps_complete or self.budget_bytes is not None
        return tracker

    def _only_boundaries(self, wanted: tuple[str, int], because: str) -> None:
        """Profile what can be known of a step with compiled code."""
        label, step = wanted
        self.unprofiled_because = None
        self._profiled_as = None
        self._boundaries = StateWatch(
            lambda: None if self._model is None else self._model(),
            lambda: [optimizer for reference in self._optimizers if (optimizer := reference()) is not None],
            label=label,
            step=step,
            reason=because,
            clock=self._clock,
        )

    def _note_unfollowed(self, because: str | None) -> None:
        """Why the step that begins is not followed op by op; None when it is."""
        if self._profiled_as is not None:
            self._profile = None
            self.unprofiled_because = because
        if self.budget_bytes is not None:
            self.unlimited_because = because

    def _count_state(self, model: nn.Module) -> None:
        optimizers = [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]
        tensors = state_of(model, optimizers)
        with torch._C.DisableTorchFunction():  # a function mode of the user's is not to hear of this
            self._storages.recount()
            self._storages.see(*tensors)

    def _count_more(self) -> None:
        """More is known now of what belongs to the step in progress, if there is one."""
        step = self._step
        model = None if self._model is None else self._model()
        if step is None or step.over or model is None:
            return
        optimizers = [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]
        if isinstance(step, StepTracker):
            step.also(model, optimizers)
            return
        with torch._C.DisableTorchFunction():
            self._storages.see(*state_of(model, optimizers))

    def _skip(self, reason: str, step: StepMode | None = None) -> None:
        self.unmeasured_steps += 1
        self.unmeasured_because = reason
        if step is None:  # it has not even begun
            self._profiled_as, self._profile_wanted = self._profile_wanted, None
            self._note_unfollowed(reason)
        elif isinstance(step, StepTracker) and self._profiled_as is not None:
            self.unprofiled_because = reason


_PROFILE_SOURCE = "live tensor bytes on cpu, counted exactly after each op (dispatch mode)"


def why_no_dispatch_modes() -> str | None:
    """Why `CpuMeter` cannot work with this version of torch, or None."""
    needed = (
        (torch._C, "_push_on_torch_dispatch_stack"),
        (torch._C, "_pop_torch_dispatch_stack"),
        (torch._C, "_len_torch_dispatch_stack"),
        (torch._C, "_get_dispatch_stack_at"),
        (torch._C, "_current_graph_task_id"),
        (torch._C, "_current_autograd_node"),
        (torch._C._autograd, "_get_sequence_nr"),
        (torch._C._autograd, "_top_saved_tensors_default_hooks"),
        (eval_frame, "set_code_exec_strategy"),
        (eval_frame, "set_guard_complete_hook"),
    )
    for owner, name in needed:
        if not hasattr(owner, name):
            return f"torch {torch.__version__} has no {owner.__name__}.{name}, which counting needs; torch 2.13 has"
    return None


def _why_no_longer(model: nn.Module) -> str | None:
    """What made the bytes of a model uncountable since its meter was made, as far as can be told in microseconds."""
    if is_compiled(model):
        return f"the model is compiled, and {REASON}"
    with torch._C.DisableTorchFunction():
        parameter = next(nn.Module.parameters(model), None)
        device = None if parameter is None else parameter.device
    if device is not None and device.type != "cpu":
        return f"the model was on the cpu, and is now on {device}"
    return None
