"""The live loop: attached to a model and its optimizers, it holds requests until the step boundary and records every step."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from amp_widgets.core.attached import Attached, WeakCall
from amp_widgets.core.autocast import LiveAutocast, Support, autocast_support
from amp_widgets.core.checkpointing import Layer
from amp_widgets.core.controls import Controls
from amp_widgets.core.deaths import Deaths, out_of_memory_in
from amp_widgets.core.going_back import Rehearsal, Standing
from amp_widgets.core.gradient_counts import GradientCounts
from amp_widgets.core.history import DEFAULT_CAPACITY, History
from amp_widgets.core.hooks import Hooks
from amp_widgets.core.journal import DeviceTimer, Journal, LoopStatus, StepRecord
from amp_widgets.core.layer_switch import LayerSwitch
from amp_widgets.core.layers import is_compiled_wrapper
from amp_widgets.core.memory.autopsy import OutOfMemory
from amp_widgets.core.memory.compiled import frames_compiled
from amp_widgets.core.memory.death import is_of_torchscript, is_out_of_memory
from amp_widgets.core.memory.profile import StepProfile
from amp_widgets.core.memory.reading import MemoryMeter
from amp_widgets.core.memory.step_mode import files_running, modules_being_called
from amp_widgets.core.memory.whole_step import CompleteStep
from amp_widgets.core.models import Held, Watched, check_optimizers, devices_of
from amp_widgets.core.numerics import Numerics
from amp_widgets.core.open_step import OpenStep, graph_is_alive
from amp_widgets.core.optimizers import OptimizerSteps
from amp_widgets.core.readback import Readback
from amp_widgets.core.requests import Request, RequestQueue
from amp_widgets.core.scaler import LiveScaler, ScaledStep
from amp_widgets.core.settings import AutocastName, Settings, describe_changes
from amp_widgets.core.step_memory import StepMemory
from amp_widgets.core.threads import this_thread
from amp_widgets.core.training_thread import NO_THREAD, TrainingThread
from amp_widgets.errors import HistoryError, SessionClosedError, SettingsError
from amp_widgets.language import Said


class LiveLoop:
    """Makes precision, loss scale and checkpointed layers of a training loop changeable while it runs.

    A step begins with the first `autocast()`, forward in grad mode, or ``scaler.scale()`` after a boundary, and ends with
    ``scaler.update()``; where the scaler is not used, with the optimizers' step. Requests are applied between steps, on the
    thread that trains.

    Parameters
    ----------
    model
        The model; its own attributes, hooks and names stay as they are.
    optimizers
        The optimizers that make up one step, each with parameters of the model. Empty: any optimizer that has some.
    memory_every
        Measure memory on every n-th step; 0 never.
    reset_peak
        On CUDA, whether torch's peak counter may be reset at every step, without which a peak per step cannot be read.
    history_capacity
        Rows kept at full resolution.
    clock
        Seconds, monotonic.

    Raises
    ------
    ModelError
        When the model has no parameters, or an optimizer has none of the model's.

    Notes
    -----
    One model has one loop: attaching a second closes the first.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        *,
        memory_every: int = 1,
        reset_peak: bool = True,
        history_capacity: int = DEFAULT_CAPACITY,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        devices = devices_of(model)
        check_optimizers(model, optimizers)
        if type(memory_every) is not int or memory_every < 0:  # True is no number of steps
            raise SettingsError(f"memory_every: got {memory_every!r}, expected a whole number of steps, or 0 to measure nothing")
        if type(history_capacity) is not int or history_capacity < 4:
            raise SettingsError(f"history_capacity: got {history_capacity!r}, expected a whole number of steps, at least 4")
        previous = LiveLoop.of(model)
        if previous is not None:
            previous.close()

        self.device = devices[0]
        self.on_boundary: list[Callable[[], None]] = []
        """Called after every step, on the training thread."""
        self.at_boundary = False
        """Whether they are being called."""
        self.in_cell = False
        """Whether a cell that trains the model is known to be running."""
        self.lent_to: int | None = None
        """The thread to which a background run leaves the model for a while, between two steps: its own."""
        self.go_on = "make a new AmpSession"
        """What to do once it is closed."""
        self.remarks: list[Callable[[], str | None]] = []
        """Each may have a plain sentence to say beside the controls."""
        self._held = Held(model)
        self._optimizers = tuple(optimizers)
        self._optimizer_steps = OptimizerSteps(optimizers)
        self._clock = clock
        self._lock = threading.RLock()
        self._step_lock = threading.RLock()  # around the beginning and the end of a step; taken before the other one
        self._thread = TrainingThread()

        self._controls = Controls(model, self.device.type, listener=self)
        self._layers = self._controls.checkpointing.layers
        self._support = autocast_support(self.device)
        self.remarks.append(self._controls.fp32_layers.remark)
        self._queue = RequestQueue(self.device, self._support, self._controls.switches)
        self._memory = StepMemory(
            model, optimizers, self.device, every=memory_every, reset_peak=reset_peak, say=WeakCall(self._say)
        )
        self._journal = Journal(capacity=history_capacity, devices=devices, clock=clock)
        self._rehearsal: Rehearsal | None = None
        self._deaths = Deaths()
        self.release_later: Callable[[Callable[[], None]], bool] | None = None
        """Takes what frees the memory that an error holds, and calls it once that was shown; False: nobody will show it."""
        self._release_planned = False

        self._step = 0
        self._open: OpenStep | None = None
        self._ended_by_optimizers = False  # the last step, so that `update()`, where nothing was scaled, is no second boundary
        self._closed = False

        self._hooks = Hooks(self)
        self._watch_forwards = not self._controls.checkpointing.compiled
        self._memory.on_death(WeakCall(self._memory_ran_out))
        self.numerics = Numerics(model)
        """What is watched of the numbers."""
        switches = tuple(self._controls.switches.values())
        self._finalizer = weakref.finalize(self, _let_go, self._hooks, switches, self._memory.meter, self.numerics)
        self._finalizer.atexit = False
        self._arm()
        _attached.put(model, self)

    # ---- what the user's loop calls ---------------------------------------------------------------------------------

    def autocast(
        self,
        device_type: str | None = None,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> LiveAutocast:
        """Drop-in for ``torch.autocast(...)``: a region in the format in force when it is entered.

        Parameters
        ----------
        device_type
            Accepted as torch takes it; must be the model's.
        dtype
            Accepted as torch takes it; the format in force decides instead.
        enabled
            False makes a region without autocast, whatever is in force.
        cache_enabled
            As in ``torch.autocast``.

        Raises
        ------
        SettingsError
            When `device_type` is not the model's.
        """
        if device_type is not None and torch.device(device_type).type != self.device.type:
            raise SettingsError(f"autocast: got device_type {device_type!r}, expected {self.device.type!r}, where the model is")
        return LiveAutocast(self, self.device.type, enabled=enabled, cache_enabled=cache_enabled)

    @property
    def scaler(self) -> LiveScaler:
        """Drop-in for ``torch.amp.GradScaler``, also right while autocast is fp32 or bf16."""
        return self._controls.scaler

    def record_loss(self, loss: torch.Tensor) -> None:
        """Record the loss of the step in progress, in a loop that does not call ``scaler.scale(loss)``."""
        self._begin(trains=True)
        if self._open is not None:
            self._open.add_loss(loss)

    # ---- settings ---------------------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module | None:
        """The model; None after `close`."""
        return self._model

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers that were given."""
        return self._optimizers

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        return self._controls.settings

    @property
    def pending(self) -> Request | None:
        """What waits for the next boundary, all requests taken together, or None."""
        with self._lock:
            return self._queue.merged()

    @property
    def layers(self) -> tuple[Layer, ...]:
        """What may be checkpointed, read from the live model: name, type, parameters, and why not where it may not."""
        if not self._closed:
            self._layers = self._controls.checkpointing.layers
        return self._layers

    @property
    def layers_seen(self) -> tuple[Layer, ...]:
        """The layers as they were when last read: free of cost."""
        return self._layers

    @property
    def step(self) -> int:
        """Steps completed."""
        return self._step

    @property
    def support(self) -> Mapping[AutocastName, Support]:
        """Which autocast formats the device has."""
        return self._support

    def request(self, *, source: str = "script", **changes: Any) -> Request:
        """Ask for settings, from any thread; in force from the step that begins next.

        Parameters
        ----------
        source
            Who asks, for the event log.
        **changes
            Fields of `Settings`. ``init_scale`` sets the live scale; ``checkpointed`` takes names, globs or a plan.

        Raises
        ------
        SettingsError
            When the request cannot be met; nothing is changed, and the rejection is an event.
        SessionClosedError
            After `close`.
        """
        with self._lock:
            self._check_open("request")
            with self._telling_of_rejection(changes, source):
                return self._queue.add(changes, source, self._controls.settings)

    def schedule(self, *, at_step: int, source: str = "schedule", **changes: Any) -> Request:
        """Ask for settings from a later step on, from any thread; an event then, like every request.

        Parameters
        ----------
        at_step
            The first step with them; steps count from 0.
        source, **changes
            As in `request`. They are checked now, and again when their turn comes, before what is asked for meanwhile.

        Raises
        ------
        SettingsError
            When `at_step` has begun already, or the request cannot be met as far as is known now.
        SessionClosedError
            After `close`.
        """
        with self._lock:
            self._check_open("schedule")
            with self._telling_of_rejection(changes, source):
                first = self._step if self._open is None else self._step + 1
                if type(at_step) is not int or at_step < first:
                    raise SettingsError(f"at_step: got {at_step!r}, expected a whole number, at least {first}, which begins next")
                return self._queue.schedule(at_step, changes, source, self._controls.settings)

    @property
    def scheduled(self) -> tuple[Request, ...]:
        """What waits for a later step, by step."""
        with self._lock:
            return self._queue.scheduled

    def apply_pending(self) -> bool:
        """Apply what waits now, between two steps; for the thread that trains.

        Returns
        -------
        bool
            Whether that could be done. False: a step is in progress, also where a cell has only called the model and nothing
            more, and it waits for that step's end; `abandon_step` forgets the step. Or the loop is closed, or set aside.
        """
        if self._open is not None or self._closed or self._thread.owner == NO_THREAD:
            return False
        self._apply_queue()
        return True

    def restart_scale(self) -> None:
        """Set the live scale to the initial scale in force, between steps; for a run that starts over."""
        with self._lock:
            self._controls.restart_scale()
            self._journal.scale_was_set()

    # ---- what was recorded ------------------------------------------------------------------------------------------

    @property
    def history(self) -> History:
        """Every step so far; waits until the device has delivered the newest values."""
        self._look_for_death()
        return self._journal.history(wait=True)

    @property
    def history_so_far(self) -> History:
        """Every step whose values have arrived; never waits."""
        self._look_for_death()
        return self._journal.history(wait=False)

    def status(self) -> LoopStatus:
        """How the loop stands; never waits for the device."""
        return self._journal.status(
            step=self._step,
            scale=self._controls.settings.start_scale if self._controls.scales_loss else None,
            overall_peak_bytes=self._memory.meter.overall_peak_bytes,
        )

    @property
    def memory_source(self) -> str:
        """How the memory numbers are obtained, and on what; or why they are not."""
        return self._memory.source

    @property
    def memory_every(self) -> int:
        """Memory is measured on every n-th step; 0 never."""
        return self._memory.every

    @property
    def memory_gap(self) -> str | None:
        """Why the memory of the newest step is not known although it was to be measured; None when it is."""
        because = self._memory.meter.unmeasured_because
        if because is None or self.memory_every != 1 or not math.isnan(self._journal.history(wait=False).last("peak_bytes")):
            return None
        return because

    def profile_next_step(self, label: str = "") -> None:
        """Profile the memory of the step that begins next, by kind and by layer: see `profiles`.

        Parameters
        ----------
        label
            Of the profile, for people; what is in force without it.
        """
        self._check_open("profile_next_step")
        self._memory.profile_next(Said(label))

    @property
    def profile_changes(self) -> bool:
        """Whether a step after each change of autocast or checkpointed layers is profiled by itself."""
        return self._memory.profile_changes

    @profile_changes.setter
    def profile_changes(self, value: bool) -> None:
        self._memory.profile_changes = value

    def record_next_step(self, path: str | os.PathLike[str]) -> None:
        """Record every allocation of the step that begins next, as a snapshot for torch's own viewer; on CUDA only.

        The file is written when the step ends, or dies; an event says so. See https://pytorch.org/memory_viz.

        Parameters
        ----------
        path
            Of the file, such as ``"step.pickle"``; one that is there is replaced.

        Raises
        ------
        SettingsError
            When the model is not on CUDA, the allocator is not torch's own, or the file's folder does not exist.
        """
        self._check_open("record_next_step")
        self._memory.record_next(path)

    @property
    def profile_pending(self) -> bool:
        """Whether a profile was asked for, or begun, and is not there yet."""
        step = self._open
        return self._memory.profile_wanted or (step is not None and step.profiled)

    @property
    def profiles(self) -> tuple[StepProfile, ...]:
        """Of the steps that were profiled, the newest last, at most `amp_widgets.core.step_memory.PROFILES_KEPT`.

        The newest of each combination of settings goes last.
        """
        return self._memory.profiles

    @property
    def gradients(self) -> tuple[GradientCounts, ...]:
        """How large the gradients were in the newest steps in which they were counted, as far as that has arrived."""
        return self.numerics.gradients.counts

    def keep_profile(self, profile: StepProfile) -> None:
        """Put it among `profiles`."""
        self._memory.keep(profile)

    @property
    def why_not_profiled(self) -> str | None:
        """Why the last step that was to be profiled was not; None when it was."""
        return self._memory.meter.unprofiled_because

    # ---- out of memory ----------------------------------------------------------------------------------------------

    @property
    def memory_budget(self) -> float | None:
        """Bytes that a step may hold at a time; None for no budget. On a CPU only.

        An op that goes above it raises `MemoryBudgetError`, which is a ``torch.OutOfMemoryError``; what it has made is dropped.
        The first budget is in force from the next step on, and another one, or None, at once. What is neither forward,
        backward, optimizer step nor loss counts, and raises nothing.
        Every step is then followed op by op, which takes some time: see `out_of_memory`.

        Raises
        ------
        SettingsError
            When it is set to what is no number of bytes above 0, or the model's memory cannot be followed.
        """
        return self._memory.budget_bytes

    @memory_budget.setter
    def memory_budget(self, value: float | None) -> None:
        self._check_open("memory_budget")
        self._memory.budget_bytes = value

    @property
    def budget_gap(self) -> str | None:
        """That `memory_budget` was not watched in the newest step, and why; None when it was, or there is none."""
        return self._memory.budget_gap

    @property
    def complete_step(self) -> CompleteStep | None:
        """The newest step with the settings in force that was followed closely: what estimates for a later one go by."""
        return self._memory.complete_step(self._controls.settings)

    @property
    def out_of_memory(self) -> OutOfMemory | None:
        """The last step that ran out of memory, with what would have fitted; stays until the next one that does."""
        if self._deaths.pending:
            self._look_for_death()
            if not self._release_planned:
                self._deaths.release_if_asked()
        return self._deaths.last

    def clear_out_of_memory(self) -> None:
        """Forget it; a later one is seen again."""
        self._look_for_death()
        self._deaths.last = None

    def died(self, error: BaseException | None) -> bool:
        """The user's loop was left by the exception `error`; whether memory had run out.

        Then it is looked into, and memory freed. For the thread that trains; the exception may be seen more than once. Other
        exceptions are left alone.
        """
        noted = self._deaths.pending
        self._look_for_death(error)
        ran_out = is_out_of_memory(error) or (noted and is_of_torchscript(error))
        if not self._deaths.pending:
            return ran_out
        if self._open is not None and ran_out:
            self._open.die()
        self._release()
        return ran_out

    def release_after_death(self) -> None:
        """The user's loop is over: if memory ran out in its last step, free what that has left, and forget the step."""
        if self._open is not None and self._open.died_in is None and not self._memory.told_within_the_op:
            self.died(self._deaths.find())  # the meter may not have told of it
        if self._open is not None and self._open.died_in is not None:
            self.abandon_step()
        if self._deaths.pending:
            self._look_for_death()
            self._release()

    @property
    def compiled(self) -> bool:
        """Whether the model, or a part of it, goes through torch.compile."""
        return self._controls.checkpointing.compiled

    def record_event(self, kind: str, reason: str, **detail: Any) -> None:
        """Add an event of a `kind` at the present step; `reason` is for people, `detail` for programs, and JSON-able.

        Raises
        ------
        HistoryError
            When the kind or the reason is no text.
        """
        for text in (kind, reason):
            if not isinstance(text, str):
                raise HistoryError(f"{kind}: got {text!r}, expected a text, such as 'warm-up is over'")
        self._journal.put_event(self._step, kind, reason, detail)

    # ---- life -------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def recover(self) -> None:
        """Before a loop starts: forget a step that an interrupt has left between ``unscale_`` and ``update``."""
        self.release_after_death()
        if not self._memory.told_within_the_op:
            self._deaths.loop_begins()
        if self._controls.scaler.in_mid_step:
            self.abandon_step()
        self.break_off_step()

    @property
    def trained_elsewhere(self) -> bool:
        """Whether a loop that no background run owns seems to be training on another thread than this one.

        The end of a loop cannot be seen from here; it counts as over when nothing was heard of it for some steps' time.
        """
        return self._thread.is_heard_elsewhere(self._clock(), self._journal.step_s())

    def loop_ended(self) -> None:
        """The user's loop is over, and not just quiet."""
        self._thread.forget()

    @property
    def step_in_progress(self) -> bool:
        """Whether a step has begun and not ended."""
        return self._open is not None

    def settle_step(self) -> bool:
        """Be between two steps, if a step in progress is one that nobody goes on with.

        That is so where the code that began it is over, as a cell that has called the model or was left by an error; or where
        nothing was backpropagated as far as is known, and no graph is left to do so. Such a step is forgotten, or has ended
        where its optimizers have stepped. Not where a loss was scaled: its gradients are, and ``update()`` may come.

        Returns
        -------
        bool
            Whether no step is in progress now.
        """
        step = self._open
        if step is None:
            return True
        if not self._thread.may_train() or (step.scaler_used and self._controls.one_scales):
            return False
        with self._step_lock:
            here = step.thread == this_thread()
            if here and (torch._C._current_graph_task_id() != -1 or modules_being_called()):
                return False  # in the midst of a pass
            is_left = step.is_left
            if self._optimizer_steps.awaits_more:
                if is_left and not step.is_elsewhere:
                    self._complete()
            elif is_left or (here and step.loss is None and not self._may_go_on(step)):
                self.abandon_step()
        return self._open is None

    def _may_go_on(self, step: OpenStep) -> bool:
        """Whether a backward pass may follow; of a step begun by `begin_step` nothing is known."""
        if not (step.trained or step.by_autocast):
            return True
        self.numerics.abandon()  # it may hold on to the graph
        return graph_is_alive(self.parameters())

    def own(self, thread: int | None) -> None:
        """Let only this thread, by its number in `amp_widgets.core.threads`, begin steps (a background run); None lets any."""
        self._thread.owner = thread
        if thread is None:
            self._arm()
        else:
            self._hooks.disarm_forward()

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """For steps that are none of the loop's: it neither sees nor records what happens meanwhile, on any thread."""
        owner = self._thread.owner
        self.own(NO_THREAD)
        try:
            yield
        finally:
            self.own(owner)

    def begin_step(self) -> None:
        """Begin a step now, unless one is in progress; for loops that know where theirs begin."""
        self._begin()

    def abandon_step(self) -> None:
        """Forget a step that was broken off by an exception or an interrupt; it is not recorded."""
        if self._open is None:
            return
        self._open = None
        self._optimizer_steps.abandon()
        self._memory.abandon()
        self.numerics.abandon()
        self._controls.abandon_step()
        self._arm()

    def break_off_step(self) -> None:
        """A step in progress was interrupted: forget it, or, where it has left scaled gradients, only what was measured of it.

        Such a step may go on: it ends, and what waits is applied, with the user's ``update()``.
        """
        step = self._open
        if step is None:
            return
        if not step.scaler_used:
            self.abandon_step()
            return
        self._memory.abandon()
        self.numerics.abandon()
        step.measured = step.profiled = False
        step.begun_s = math.nan
        step.timer = None

    def close(self) -> None:
        """Let go of the model: no layer checkpointed, no hook left; the scaler goes on as a plain ``GradScaler``."""
        if self._closed:
            return
        if self._optimizer_steps.awaits_more:
            self._complete()
        self.release_after_death()
        self._memory.abandon()
        self._open = None
        with self._lock:
            self._closed = True
            self.in_cell = False
            for request in self._queue.all():
                when = "the next step" if request.at_step is None else f"step {request.at_step}"
                self._reject(f"the session was closed before {when}", request.changes, request.source)
            self._queue.clear()
            self._journal.write(wait=True)
            self._hooks.disarm_forward()
            self._layers = self._controls.checkpointing.layers
            self._finalizer()
            self._controls.release_scalers()
            _attached.forget(self)
            self._held.let_go()
            self._optimizers = ()
            self._optimizer_steps.clear()
            self._memory.forget()
            self.on_boundary.clear()
            self.remarks.clear()

    # ---- going back to an earlier step (fork), between two steps -----------------------------------------------------

    def standing(self) -> Standing:
        """How it stands now; waits for the device."""
        return Standing(step=self._step, settings=self._controls.settings, scalers=self._controls.progress)

    def go_to(self, standing: Standing) -> None:
        """Take the `standing` of then; the model and its optimizers are the caller's affair. On the thread that trains.

        Raises
        ------
        SettingsError
            When a layer is not there any more; it may stand half there then, and is to go back to where it was.
        """
        with self._step_lock, self._lock:
            self._controls.go_to(standing.settings, standing.scalers)
            self._step = standing.step

    def check_request(self, changes: Mapping[str, Any], in_force: Settings, *, source: str) -> dict[str, Any]:
        """The `changes` as they would be in force from `in_force` on; nothing waits.

        Raises
        ------
        SettingsError
            When they cannot be met; an event of `source` says so, too.
        """
        with self._lock, self._telling_of_rejection(changes, source):
            return self._queue.check(changes, in_force)

    @contextlib.contextmanager
    def rehearse(self, requests: Sequence[Request]) -> Iterator[Journal]:
        """Steps within are no news: they are recorded in the journal that this gives, and nothing is measured of them.

        Parameters
        ----------
        requests
            With their steps: they alone are applied meanwhile, those for the present step at once. What waits goes on waiting.
        """
        self._rehearsal = Rehearsal(self._queue.repeating(requests), self._journal.beside())
        try:
            self._apply_queue()
            yield self._rehearsal.journal
        finally:
            self._rehearsal = None

    def begin_course(self) -> None:
        """What comes is recorded in another history, which has in common with the one so far what is before the present step."""
        with self._lock:
            self._journal = self._journal.until(self._step, scales=self._controls.scales)
        self.numerics.forget_from(self._step)
        death = self._deaths.last
        if death is not None and death.step >= self._step:
            self._deaths.last = None

    @property
    def now_s(self) -> float:
        """Seconds since the history began, as events have them."""
        return self._journal.now_s()

    @property
    def known_optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """Those that were given; where none were, those that there are for the model, as far as is known."""
        if not self._optimizer_steps.given:
            self._seek_optimizers()
        return tuple(self._optimizer_steps.ours)

    # ---- a loop that knows nothing of it (capture) ------------------------------------------------------------------

    @classmethod
    def of(cls, model: nn.Module) -> LiveLoop | None:
        """The loop that is attached to a model, or None."""
        return _attached.of(model)

    def control_together(self, models: Mapping[str, nn.Module]) -> None:
        """Control models, the one it was made of among them, without keeping them alive; before anything was requested.

        Parameters
        ----------
        models
            By name. Where they are several they are the parts of one, and their names come before those of their layers.
        """
        for model in models.values():
            other = LiveLoop.of(model)
            if other is not None and other is not self:
                other.close()
            _attached.put(model, self)
        with self._lock:
            self._held = Watched(models)
            for switch in self._controls.switches.values():
                switch.watch(self._held)
            self._layers = self._controls.checkpointing.layers
        self._optimizer_steps.clear()
        self._memory.meter.watch(self._held)
        self.numerics.watch(models)
        if self._open is not None and self._open.measured:
            self._seek_optimizers()

    @property
    def model_is_gone(self) -> bool:
        """Whether the user has let go of the model."""
        return not self._closed and self._held.is_gone()

    def found(self, **settings: Any) -> None:
        """The user's own loop has these settings: they are in force where no request has overridden them; no event."""
        with self._lock:
            self._controls.found(settings)

    def adopt_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """Watch and control the user's own scaler, one of several perhaps; each ends steps with its ``update()``.

        Raises
        ------
        TypeError
            When its class cannot be extended.
        """
        with self._lock:
            self._controls.adopt_scaler(scaler, listener=self)

    @property
    def has_users_scaler(self) -> bool:
        """Whether the user's loop has a scaler of its own."""
        return self._controls.has_users_scaler

    @property
    def overrides_autocast(self) -> bool:
        """Whether autocast was asked for: the user's own regions take the format in force then."""
        return self._controls.overrides_autocast

    @property
    def adds_scaling(self) -> bool:
        """Whether the loss of a loop without a scaler is to be scaled, because that was asked for."""
        return self._controls.adds_scaling

    def backward_begins(self, tensors: Any, *, scale: bool) -> Any:
        """A backward pass from `tensors` is about to begin, in a loop without a scaler. Returns what it is to begin from.

        Parameters
        ----------
        tensors
            As ``torch.autograd.backward`` takes them.
        scale
            Whether they may be scaled.
        """
        if self._open is None and self._watch_forwards:
            return tensors  # of another model
        self._begin(trains=True)
        step = self._open
        if step is None or not self._thread.may_train() or (step.scaler_used and not step.scaling_added):
            return tensors
        if scale and self.adds_scaling:
            step.scaling_added = True
            return self._controls.scaler.scale(tensors)
        step.trained = True
        step.add_loss(tensors)
        return tensors

    @property
    def scaling_added(self) -> bool:
        """Whether the loss was scaled in the step in progress without the user's loop knowing of it."""
        return self._open is not None and self._open.scaling_added

    def count_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Let this optimizer's steps count, though it has none of the model's parameters."""
        self._optimizer_steps.count_as_ours(optimizer)

    def owns(self, module: nn.Module) -> bool:
        """Whether the module is the model or a part of it, or a wrapper around it (compiled, DDP, DataParallel)."""
        return self._held.owns(module)

    def parameters(self) -> list[nn.Parameter]:
        """Of the model, as long as it is there."""
        return self._held.parameters()

    def trains(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer's steps count as the model's."""
        return self._optimizer_steps.is_ours(optimizer, self._model)

    # ---- told by the autocast region (Autocasting) ------------------------------------------------------------------

    def enter_autocast(self) -> AutocastName:
        if torch.is_grad_enabled():
            self._begin(by_autocast=True)
        return self._controls.settings.autocast

    def exit_autocast(self, error: BaseException | None) -> None:
        if error is not None and self._thread.may_train():
            self.died(error)
        step = self._open
        if step is None or not self._thread.may_train():
            return
        if error is not None:
            self.break_off_step()
        elif step.is_validation:
            self.abandon_step()  # a validation pass under no_grad inside of it is no step

    # ---- told by the scaler (ScalerListener) ------------------------------------------------------------------------

    def scaling(self, outputs: object) -> None:
        self._begin(trains=True)
        step = self._open
        if step is not None:
            step.trained = step.scaler_used = True
            step.add_loss(outputs)

    def stepping(self) -> None:
        self._begin(trains=True)
        if self._open is not None:
            self._open.scaler_used = True

    def skipping(self, *, as_arrived: bool) -> None:
        if self._rehearsal is None:
            self.numerics.overflow.skipping(as_arrived=as_arrived)

    def refused(self, reason: str) -> None:
        self.numerics.overflow.refuse(self._step, reason)

    def updated(self, step: ScaledStep) -> None:
        ended_already, self._ended_by_optimizers = self._ended_by_optimizers, False
        if not (ended_already and self._open is None and step.used is None):
            self._end(step)

    def adopted(self, settings: Settings, changes: dict[str, Any]) -> None:
        with self._lock:
            self._controls.adopted(settings, changes)
            self.record_event("applied", describe_changes(changes), **changes, source="scaler")

    def parameter_names(self, optimizer: torch.optim.Optimizer) -> list[str]:
        return self._held.names_of([p for group in optimizer.param_groups for p in group["params"]])

    # ---- told by torch's hooks (HookListener) -------------------------------------------------------------------------------

    def forward_begins(self, module: nn.Module) -> None:
        if not self.owns(module):
            return
        if is_compiled_wrapper(module):
            self._watch_forwards = False  # torch warns of global hooks at every call of a compiled model
        if not torch.is_grad_enabled():
            if self._open is not None:
                self._open.inferred = True
            return
        if self._open is not None and self._open.died_in is not None and len(modules_being_called()) > 1:
            return  # the model itself has caught the error, and goes on
        self._begin()
        if self._open is not None and self._open.thread == this_thread():
            self._open.trained = True
            self._hooks.disarm_forward()

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        step = self._open
        self._ended_by_optimizers = False
        if not self._optimizer_steps.given and self._thread.may_train() and self.trains(optimizer):
            self._memory.meter.follow((optimizer,))
        if step is not None and step.scaler_used and not step.scaling_added:
            return  # the boundary is the scaler's update()
        if not self._thread.may_train() or not self.trains(optimizer):
            return
        with self._step_lock:
            step = self._open
            if step is not None:
                step.take(this_thread())  # another thread's forward pass may have begun it, and must not end it too
            completes = self._optimizer_steps.completes(optimizer, in_progress=step is not None)
        if completes:
            self._complete()
        elif self._optimizer_steps.awaits_more:
            self._arm()

    # ---- the step ---------------------------------------------------------------------------------------------------

    def _begin(self, *, by_autocast: bool = False, trains: bool = False) -> None:
        """Begin a step, unless one is in progress.

        Parameters
        ----------
        by_autocast
            An autocast region is entered, which alone makes no step.
        trains
            What happens belongs to training. A forward pass on another thread than the one that trains does not.
        """
        step = self._open
        if step is not None and not (trains or self._optimizer_steps.awaits_more or step.died_in is not None):
            return  # hot
        if self._closed or not self._thread.may_train():
            return
        with self._step_lock:
            self._begin_on(this_thread(), by_autocast, trains)

    def _begin_on(self, thread: int, by_autocast: bool, trains: bool) -> None:
        elsewhere = self._thread.last_is_another()
        if self._open is not None:
            if trains and self._open.thread != thread:
                self.abandon_step()  # another thread's forward pass, which was none of training
            elif self._open.died_in is not None and not trains and self._starts_over(thread):
                self.abandon_step()
            elif self._optimizer_steps.awaits_more and not elsewhere and not self._open.is_elsewhere:
                self._complete()  # by another thread it could be completed twice
            else:
                return
        elif elsewhere and not trains:
            return
        if self._deaths.pending:
            self._look_for_death()
            self._deaths.step_begins()
        if not elsewhere:  # else this step has begun before, unnoticed
            self._apply_queue()
        if not by_autocast:
            self._hooks.disarm_forward()
        rehearsed = self._rehearsal is not None
        measured, profiled = (False, False) if rehearsed else self._memory.plan(self._step, self._controls.settings)
        if measured:
            self._seek_optimizers()
            self._memory.begin()
        begun_s = self._clock()
        self._thread.note(begun_s)
        self._ended_by_optimizers = False
        self._open = OpenStep(
            thread=thread,
            by_autocast=by_autocast,
            measured=measured,
            profiled=profiled,
            begun_s=begun_s,
            timer=DeviceTimer.start(self.device),
        )
        if not rehearsed:
            self.numerics.begin(self._step)

    def _seek_optimizers(self) -> None:
        """Let the meter know the optimizers that there are already, so that their state counts from the first step on."""
        if not self._optimizer_steps.sought and (model := self._model) is not None:
            self._optimizer_steps.find(model)
            self._memory.meter.follow(self._optimizer_steps.ours)

    def _starts_over(self, thread: int) -> bool:
        """Whether a new step begins after one in which memory has run out; else the user has caught that, and goes on with it.

        As long as there are gradients of a scaled loss, the scale must not change, and the step goes on, unless the code is over
        that it began in.
        """
        step = self._open
        assert step is not None
        if step.thread != thread or torch._C._current_graph_task_id() != -1:
            return False
        if not step.scaler_used or (step.died_in or "") not in files_running():
            return True
        return all(p.grad is None or (not p.grad.is_sparse and not bool(p.grad.any())) for p in self.parameters())

    def _complete(self) -> None:
        """End a step that the optimizers have made."""
        if self.scaling_added:
            self._controls.scaler.update_after_steps()  # which tells its listener
        else:
            self._end(ScaledStep(None, None, False, None))
            self._ended_by_optimizers = True

    def _end(self, scaled: ScaledStep) -> None:
        if self._closed or not self._thread.may_train():
            return
        with self._step_lock:
            self._record(scaled)
        self._arm()
        self._records.write(wait=False)
        self.at_boundary = True
        try:
            for listener in tuple(self.on_boundary):
                listener()
        finally:
            self.at_boundary = False

    def _record(self, scaled: ScaledStep) -> None:
        self._look_for_death()  # the user has caught it, and gone on
        opened, self._open = self._open, None
        self._thread.last = this_thread()
        now_s = self._clock()
        self._thread.note(now_s)
        self._optimizer_steps.ended()
        if opened is not None and opened.timer is not None:
            opened.timer.stop()
        reading, profile = self._memory.end(self._controls.settings, measured=opened is not None and opened.measured)
        if profile is not None:
            self.keep_profile(profile)
        if self._rehearsal is None:
            self.numerics.end(self._step, scaled, None if opened is None else opened.loss)
        self._controls.fp32_layers.step_ended(self._step)
        self._records.put_step(
            StepRecord(
                step=self._step,
                time_s=self._journal.now_s(),
                duration_s=math.nan if opened is None else now_s - opened.begun_s,
                timer=None if opened is None else opened.timer,
                skipped=scaled.skipped,
                scaled=scaled.used is not None,
                growth_interval=self._controls.settings.growth_interval,
                by_rule=scaled.by_rule,
                scaler_id=scaled.scaler_id,
                memory=reading,
                values=Readback((None if opened is None else opened.loss, scaled.used, scaled.after, scaled.found_inf)),
            )
        )
        self._step += 1
        if not self.has_users_scaler:  # whose scale the user may compare with that of before update()
            self._apply_queue()

    def _memory_ran_out(self) -> None:
        """Told by the meter, within the op."""
        self._memory.end_recording()  # while what held the memory is there
        self._plan_release()  # nobody else may tell of the end of a plain loop
        self._deaths.note()
        if self._open is not None:
            self._open.die()
        self._arm()  # the next forward pass may begin another step

    def _release(self) -> None:
        """Free what the error holds: the graph now, the frames when it was shown, as what shows it reads them."""
        self._deaths.release(frames=not self._plan_release(), passing=True)

    def _plan_release(self) -> bool:
        """Whether what is left will be freed when the cell that is running is over."""
        if self.release_later is not None and not self._release_planned:
            self._release_planned = self.release_later(WeakCall(self._cell_ended))
        return self._release_planned

    def _cell_ended(self) -> None:
        self._release_planned = False
        self.release_after_death()

    def _look_for_death(self, error: BaseException | None = None) -> None:
        found = None if error is None else out_of_memory_in(error)
        if found is None and not self._deaths.pending:
            return
        with self._lock:
            death = self._memory.take_death()
            if death is not None or found is not None:
                self._deaths.see(found, death, self)
                self._journal.write(wait=False)

    def _say(self, text: str) -> None:
        self.record_event("note", text)

    @property
    def _model(self) -> nn.Module | None:
        return self._held()

    def _arm(self) -> None:
        # never where torch.compile is in use: it compiles anew for every global hook that comes or goes
        if self._watch_forwards and self._thread.owner is None and not self._closed and not frames_compiled():
            self._hooks.arm_forward()

    # ---- requests ---------------------------------------------------------------------------------------------------

    def _apply_queue(self) -> None:
        queue = self._queue if self._rehearsal is None else self._rehearsal.queue
        if not queue:
            return
        with self._lock:
            queue.call_up(self._step)
            while (request := queue.first()) is not None:
                self._apply(request)
                queue.drop_first()  # only now: an interrupt leaves it waiting

    def _apply(self, request: Request) -> None:
        detail = {**request.changes, "source": request.source}
        try:
            self._controls.apply(request.changes)
        except Exception as error:  # whatever it is, it is shown: a request is never half applied nor lost
            reason = str(error) if isinstance(error, SettingsError) else f"{type(error).__name__}: {error}"
            self._records.put_event(self._step, "rejected", reason, detail)
        else:
            if "init_scale" in request.changes:
                self._records.scale_was_set()
            self._records.put_event(self._step, "applied", describe_changes(request.changes), detail)

    @property
    def _records(self) -> Journal:
        """Where the steps go."""
        return self._journal if self._rehearsal is None else self._rehearsal.journal

    def _check_open(self, verb: str) -> None:
        if self._closed:
            raise SessionClosedError(f"{verb}: this session was closed, and no longer controls the model; {self.go_on}")

    @contextlib.contextmanager
    def _telling_of_rejection(self, changes: Mapping[str, Any], source: str) -> Iterator[None]:
        try:
            yield
        except SettingsError as error:
            self._reject(str(error), changes, source)
            raise

    def _reject(self, reason: str, changes: Mapping[str, Any], source: str) -> None:
        self._journal.put_event(self._step, "rejected", reason, {**changes, "source": source})


_attached: Attached[LiveLoop] = Attached()


def _let_go(hooks: Hooks, switches: Sequence[LayerSwitch], meter: MemoryMeter, numerics: Numerics) -> None:
    numerics.close()
    hooks.remove()
    for switch in switches:
        switch.close()
    meter.close()
