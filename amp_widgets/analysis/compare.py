"""Several settings on one batch of the live model, measured in turn; the model is as before afterwards."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from amp_widgets.analysis.comparison import Comparison, Progress, Row
from amp_widgets.analysis.corners import Corner, Grid, LayerChoice, corners_of
from amp_widgets.analysis.held_interrupt import interrupts_noted, raise_lost_interrupt
from amp_widgets.analysis.relative_error import RelativeError
from amp_widgets.analysis.snapshot import Snapshot
from amp_widgets.analysis.training_step import TrainingStep
from amp_widgets.analysis.trial import (
    LossFunction,
    check_batch,
    check_hooks,
    check_idle,
    check_loss_fn,
    check_one_model,
    copy_of_batch,
    is_compiled_function,
    loss_scale,
    region,
)
from amp_widgets.analysis.unsupported import unsupported_text
from amp_widgets.core.batch_tree import batch_leaves
from amp_widgets.core.checkpointing import Checkpointing
from amp_widgets.core.deaths import out_of_memory_in
from amp_widgets.core.fp32_layers import Fp32Layers
from amp_widgets.core.layers import inner_model
from amp_widgets.core.loop import LiveLoop
from amp_widgets.core.memory.death import requested_bytes_of
from amp_widgets.core.memory.meter import meter_for
from amp_widgets.core.memory.profile import memory_text
from amp_widgets.core.memory.reading import MemoryMeter
from amp_widgets.core.memory.step_mode import keep_dynamo_out
from amp_widgets.core.models import devices_of
from amp_widgets.core.number_text import time_text
from amp_widgets.core.settings import Settings
from amp_widgets.errors import AmpWidgetsError, RunError, SettingsError

SLOW_STEP_S = 1.0
"""A step in fp16 or bf16 on a CPU may take this long, or `SLOWER` times as long as in fp32."""
SLOWER = 3.0


@interrupts_noted()
def compare(
    loop: LiveLoop,
    batch: tuple[Any, Any],
    loss_fn: LossFunction,
    *,
    grid: Grid | None = None,
    steps: int = 5,
    rounds: int = 3,
    planned: LayerChoice | None = None,
    slow_step_s: float = SLOW_STEP_S,
    on_progress: Callable[[Progress], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Comparison:
    """Train some steps with each of several settings, from the same start, and compare memory, time, loss and gradients.

    In every round each combination has its turn, in a rotated order: everything is put back to the start, a warm-up step is
    trained, then `steps` steps that are timed, all on `batch`. In the first round, the gradients of the warm-up step are
    compared with those of the reference, and after the timed steps one more is trained whose memory is measured: measuring takes
    time. The reference, fp32 without checkpointed layers, is always among them, and the first.

    Model, optimizers, random states and checkpointed layers are as before afterwards, bit for bit, as far as `Snapshot` knows
    them, also after an error or an interrupt; the loop has seen nothing. A combination that runs out of memory, or in which the
    model fails, says so in its row, and the others go on.

    Parameters
    ----------
    loop
        Whose model, optimizers and settings; between two steps. On the thread of a background run, if the run has lent it.
    batch
        ``(inputs, targets)``; copies on the model's device are used.
    loss_fn
        ``loss_fn(model(inputs), targets)``; several inputs are given as `amp_widgets.core.model_call.call_model` says.
    grid
        What to compare, see `amp_widgets.analysis.corners.corners_of`. None: fp32, fp16 and bf16, as far as the device has
        them, each with no layer checkpointed, all of them, those of `planned`, and those in force.
    steps, rounds
        Timed steps in a round, and rounds.
    planned
        A plan, or its layers.
    slow_step_s
        On a CPU a format in which a step takes longer than this, in seconds, and more than `SLOWER` times as long as in fp32, is
        left out: its first step is broken off. ``math.inf`` runs whatever it takes.
    on_progress
        Called after every step, on the calling thread.
    cancelled
        Asked before every step; True ends it, and what is complete is returned.
    clock
        Seconds, monotonic.

    Raises
    ------
    SessionClosedError
        When the session was closed.
    RunError
        When the session has no optimizer or several models, a step is in progress, a run is training, the model is compiled,
        the batch is no pair, or the loss is none that a backward pass can begin from.
    SettingsError
        When the grid is none, or names what is not there, or a number is none that can be.
    Exception
        What the model raises in the reference, other than that memory ran out.

    Notes
    -----
    Where the loss is scaled, the scale begins at the live one, or at the initial one where none is in force. Held in the CPU's
    memory meanwhile are copies of the model's and the optimizers' tensors, and of the reference's gradients.
    """
    verb = "compare"
    for name, number in (("steps", steps), ("rounds", rounds)):
        if type(number) is not int or number < 1:
            raise SettingsError(f"{name}: got {number!r}, expected a whole number, at least 1")
    limit: object = slow_step_s
    if not isinstance(limit, (int, float)) or not limit > 0:
        raise SettingsError(f"slow_step_s: got {slow_step_s!r}, expected seconds above 0, or math.inf for no limit")
    model = check_idle(loop, verb)
    if not loop.optimizers:
        raise RunError(f"{verb}: the session has no optimizer, expected AmpSession(model, optimizer)")
    pair = check_batch(batch, verb)
    check_loss_fn(loss_fn, verb)
    check_one_model(model, verb)
    check_hooks(model, verb)
    if loop.compiled or is_compiled_function(loss_fn):
        what = "the model" if loop.compiled else "loss_fn"
        raise RunError(
            f"{verb}: {what} is compiled by torch.compile, which compiles anew for every combination, and whose memory cannot be "
            "counted; call it on a model that is not compiled"
        )
    corners, left_out = corners_of(loop, grid, planned)
    live_scale = loss_scale(loop) if loop.scaler.is_enabled() else None
    courses = [_Course(corner, _start_scale(corner.settings, loop.settings, live_scale)) for corner in corners]
    with _kept(loop, model, loss_fn) as start:
        comparing = _Comparing(
            start, courses, pair, loss_fn, steps, rounds, loop.device, slow_step_s, on_progress, cancelled, clock
        )
        complete = comparing.run()
    formats = {corner.settings.autocast for corner in corners}
    about = [f"{name}: {support.note}." for name, support in loop.support.items() if name in formats and support.note]
    if loop.device.type == "cuda" and any(parameter.grad is not None for parameter in model.parameters()):
        about.append(
            "The gradients that were there before are kept meanwhile, and count in the peaks; without: zero_grad() first."
        )
    return Comparison(
        rows=_rows(courses, batch_size=(size := _batch_size(pair))),
        steps=steps,
        rounds=rounds,
        device=f"{_device_text(loop.device)} with torch {torch.__version__}",
        batch=_batch_text(pair),
        batch_size=size,
        memory_source=comparing.memory_source,
        notes=(*about, *left_out),
        cancelled=not complete,
    )


# ---- the state to go back to ------------------------------------------------------------------------------------------------


class _Start:
    """Everything as it is before, to be put back before each turn and in the end."""

    def __init__(self, loop: LiveLoop, model: nn.Module, loss_fn: LossFunction) -> None:
        self.model = model
        self.optimizers = loop.optimizers
        self.meter: MemoryMeter | None = None
        self._checkpointing = Checkpointing(model)
        self._fp32_layers = Fp32Layers(model)
        self._active = self._checkpointing.active, self._fp32_layers.active
        self._kinds = [type(module) for module in model.modules()]  # held: that of a switched layer is else made anew
        self._snapshot = Snapshot(model, self.optimizers, loss_fn=loss_fn)

    def begin(self, settings: Settings) -> None:
        """A turn with these settings."""
        self._snapshot.restore()
        self._checkpointing.apply(settings.checkpointed)
        self._fp32_layers.apply(settings.fp32_layers)

    def measure(self) -> MemoryMeter:
        """A meter for one step, which is closed with the next one, or in the end."""
        self._close_meter()
        self.meter = meter_for(self.model, self.optimizers)
        return self.meter

    def forget_turn(self) -> None:
        """Free what a turn that has failed has left."""
        self._close_meter()
        self._snapshot.restore()
        gc.collect()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # blocks of sizes that no other settings use

    def put_back(self) -> None:
        """As before; may be called again."""
        self._close_meter()
        self._checkpointing.apply(self._active[0])
        self._fp32_layers.apply(self._active[1])
        self._snapshot.restore()

    def _close_meter(self) -> None:
        if self.meter is not None:
            self.meter.close()
            self.meter = None


@contextlib.contextmanager
def _kept(loop: LiveLoop, model: nn.Module, loss_fn: LossFunction) -> Iterator[_Start]:
    with loop.set_aside(), region("fp32", loop.device.type):
        start = _Start(loop, model, loss_fn)
        try:
            try:
                yield start
            finally:
                start.put_back()
        finally:
            start.put_back()  # an interrupt may have come in the midst of the first


# ---- the turns --------------------------------------------------------------------------------------------------------------


class _Course:
    """One corner, and what is known of it so far."""

    def __init__(self, corner: Corner, scale: float) -> None:
        self.corner = corner
        self.scale = scale
        self.times_s: list[float] = []
        self.losses: list[float] = []
        self.peak_bytes = math.nan
        self.error = RelativeError()
        self.skipped = 0
        self.steps_a_round = 0
        self.rounds = 0
        self.why_not: str | None = None
        self.left = 0  # steps
        self.spent_s: list[float] = []  # for each step that was made, with all that was done around it

    def row(self, reference: Row | None, batch_size: int | None) -> Row:
        settings = self.corner.settings
        names: dict[str, Any] = {
            "label": self.corner.label,
            "autocast": settings.autocast,
            "layers_name": self.corner.layers_name,
            "checkpointed": settings.checkpointed,
            "reference": reference,
        }
        if self.why_not is not None:
            return Row(**names, why_not=self.why_not)
        low, middle, high = np.quantile(self.times_s, (0.25, 0.5, 0.75)).tolist() if self.times_s else (math.nan,) * 3
        return Row(
            **names,
            peak_bytes=self.peak_bytes,
            step_s=middle,
            step_s_low=low,
            step_s_high=high,
            samples_per_s=batch_size / middle if batch_size and middle > 0 else math.nan,
            loss=statistics.median(self.losses),
            gradient_error=0.0 if self.corner.is_reference and reference is None else self.error.value,
            nonfinite=self.error.nonfinite,
            skipped=self.skipped,
            steps=self.steps_a_round,
            rounds=self.rounds,
        )


class _Comparing:
    """Gives each course its turns."""

    def __init__(
        self,
        start: _Start,
        courses: list[_Course],
        batch: tuple[Any, Any],
        loss_fn: LossFunction,
        steps: int,
        rounds: int,
        device: torch.device,
        slow_step_s: float,
        on_progress: Callable[[Progress], None] | None,
        cancelled: Callable[[], bool] | None,
        clock: Callable[[], float],
    ) -> None:
        self.memory_source = "not measured: it was cancelled before"
        self._start = start
        self._courses = courses
        self._batch = batch
        self._loss_fn = loss_fn
        self._steps = steps
        self._rounds = rounds
        self._device = device
        self._slow_step_s = slow_step_s
        self._on_progress = on_progress
        self._cancelled = cancelled
        self._clock = clock
        self._devices = devices_of(start.model)
        self._gradients: dict[str, torch.Tensor] = {}  # of the reference
        self._too_slow: dict[str, str] = {}  # format → why it is not run
        self._done = 0
        self._last_s = math.nan
        for course in courses:
            course.left = rounds * (1 + steps) + 1

    def run(self) -> bool:
        """Whether all had their turns; False when it was cancelled."""
        self._last_s = self._clock()
        try:
            for round_ in range(self._rounds):
                at = round_ % len(self._courses)
                for course in self._courses[at:] + self._courses[:at]:
                    if course.why_not is None:
                        self._turn(course, round_)
        except _CancelledError:
            return False
        return True

    def _turn(self, course: _Course, round_: int) -> None:
        """One round of one course; what it gives counts only when it is complete."""
        first = round_ == 0
        because = self._too_slow.get(course.corner.settings.autocast)
        if because is not None:
            self._drop(course, because)
            return
        doing = f"round {round_ + 1} of {self._rounds}: {course.corner.label}"
        turn = _Turn(self, course)
        for number in itertools.count():
            timed = 1 <= number <= self._steps
            if number > self._steps and not (first and turn.measuring):
                break
            self._ask()
            because = turn.tried(turn.timed_step if timed else turn.warm_up if number == 0 else turn.measured_step, first)
            if because is not None:
                self._drop(course, because)
                return
            self._tell(course, doing, planned=number <= self._steps + 1)
        course.left = (self._rounds - 1 - round_) * (1 + self._steps)  # also where its memory needed no step of its own
        turn.keep(first)

    def _drop(self, course: _Course, because: str) -> None:
        course.why_not = because
        course.left = 0
        self._start.forget_turn()

    def _ask(self) -> None:
        raise_lost_interrupt()
        if self._cancelled is not None and self._cancelled():
            raise _CancelledError

    def _tell(self, course: _Course, doing: str, *, planned: bool) -> None:
        now_s = self._clock()
        course.spent_s.append(now_s - self._last_s)
        self._last_s = now_s
        self._done += 1
        if planned:
            course.left -= 1
        if self._on_progress is not None:
            left = sum(course.left for course in self._courses)
            self._on_progress(Progress(done=self._done, total=self._done + left, seconds_left=self._seconds_left(), doing=doing))
            self._last_s = self._clock()

    def _seconds_left(self) -> float:
        known = {id(course): statistics.fmean(course.spent_s) for course in self._courses if course.spent_s}
        usual = statistics.fmean(known.values())
        return sum(course.left * known.get(id(course), usual) for course in self._courses)

    # ---- what a turn needs ------------------------------------------------------------------------------------------

    @property
    def start(self) -> _Start:
        return self._start

    def begin(self, course: _Course) -> _Step:
        settings = course.corner.settings
        self._start.begin(settings)
        start = self._start
        scaler = torch.amp.GradScaler(
            self._device.type,
            init_scale=course.scale,
            growth_factor=settings.growth_factor,
            backoff_factor=settings.backoff_factor,
            growth_interval=settings.growth_interval,
            enabled=settings.scales_loss,
        )
        return _Step(start.model, start.optimizers, self._loss_fn, settings, self._device.type, scaler=scaler, verb="not run")

    def batch(self) -> tuple[Any, Any]:
        return copy_of_batch(self._batch, self._device)

    def now_s(self) -> float:
        """The time when all that was asked of the devices is done."""
        for device in self._devices:
            if device.type != "cpu":
                getattr(torch, device.type).synchronize(device)
        return self._clock()

    def see_gradients(self, course: _Course, scale: float) -> None:
        """Keep those of the reference, and compare the others'."""
        for name, parameter in inner_model(self._start.model).named_parameters():
            if parameter.grad is None:
                continue
            if course is self._courses[0]:
                self._gradients[name] = parameter.grad.detach().to("cpu", copy=True)
            elif name in self._gradients and self._gradients[name].shape == parameter.grad.shape:
                course.error.add(_unscaled(parameter.grad, scale), self._gradients[name])

    def limit_s(self, course: _Course) -> float:
        """How long its first step may take; no limit for the reference."""
        if self._device.type != "cpu" or course.corner.settings.autocast == "fp32":
            return math.inf
        return max(self._slow_step_s, SLOWER * self._reference_s())

    def failed(self, course: _Course, error: Exception) -> str:
        """Why a course has no numbers; raises what the reference has raised."""
        death = out_of_memory_in(error)
        if death is not None:
            asked = requested_bytes_of(death)
            return f"out of memory{'' if math.isnan(asked) else f': {memory_text(asked)} more did not fit'}"
        if course is self._courses[0]:
            raise error
        if isinstance(error, AmpWidgetsError):
            return str(error)
        unsupported = unsupported_text(error, course.corner.settings.autocast)
        if unsupported is not None:
            return unsupported
        return f"it fails: {type(error).__name__}: {error}".splitlines()[0].rstrip(".")

    def too_slow(self, course: _Course, taken_s: float) -> str:
        """Why a format is not run."""
        autocast, reference_s = course.corner.settings.autocast, self._reference_s()
        times = f", {taken_s / reference_s:,.0f} times as long as in fp32" if reference_s > 0 else ""
        because = f"not run: one step in {autocast} took more than {time_text(taken_s)}{times}; slow_step_s=… allows more"
        self._too_slow[autocast] = because
        return because

    def _reference_s(self) -> float:
        times = self._courses[0].times_s
        return statistics.median(times) if times else 0.0


class _Turn:
    """One round of one course."""

    def __init__(self, comparing: _Comparing, course: _Course) -> None:
        self._comparing = comparing
        self._course = course
        self._step: _Step | None = None
        self._times_s: list[float] = []
        self._loss: torch.Tensor | None = None
        self._skipped = 0
        self._steps = 0
        self._measured = 0
        self._peak_bytes = math.nan
        self.measuring = True
        """Whether the memory is still to be measured."""

    def tried(self, act: Callable[[bool], None], first: bool) -> str | None:
        """Do it; why it was not possible, or None."""
        try:
            act(first)
        except _TooSlowError as slow:
            return self._comparing.too_slow(self._course, slow.taken_s)
        except Exception as error:  # what the user's model or loss raises, or the device
            because = self._comparing.failed(self._course, error)
        else:
            return None
        return because  # only now: the frames that the error has left are gone, with what they held

    def warm_up(self, first: bool) -> None:
        """The first step."""
        comparing, course = self._comparing, self._course
        step = self._step = comparing.begin(course)
        scale = step.scale
        inputs, targets = comparing.batch()
        if first:
            step.after_backward = lambda: comparing.see_gradients(course, scale)
        with _time_limit(comparing.limit_s(course) if first else math.inf, comparing.now_s):
            step.run(inputs, targets)
        self._count(step.scale < scale)

    def timed_step(self, first: bool) -> None:
        """A step as the loop makes it."""
        comparing, step = self._comparing, self._step
        assert step is not None
        scale = step.scale
        inputs, targets = comparing.batch()
        begun_s = comparing.now_s()
        step.run(inputs, targets)
        taken_s = comparing.now_s() - begun_s
        skipped = step.scale < scale
        self._loss = step.loss
        self._count(skipped)
        if not skipped:
            self._times_s.append(taken_s)

    def measured_step(self, first: bool) -> None:
        """A step whose memory is measured; once more after one that was skipped, as the optimizers' part is missing then."""
        comparing, step = self._comparing, self._step
        assert step is not None
        scale = step.scale
        inputs, targets = comparing.batch()
        meter = comparing.start.measure()
        meter.begin()
        step.run(inputs, targets)
        peak = meter.end().peak_bytes
        self._measured += 1
        comparing.memory_source = (meter.unmeasured_because or meter.source) if math.isnan(peak) else meter.source
        if math.isnan(peak) and not comparing.memory_source.startswith("not measured"):
            comparing.memory_source = f"not measured: {comparing.memory_source}"
        skipped = step.scale < scale
        self._peak_bytes = math.nan if skipped else peak
        self.measuring = skipped and self._measured < MOST_MEASURED

    def keep(self, first: bool) -> None:
        """It is complete."""
        course = self._course
        assert self._loss is not None
        course.times_s += self._times_s
        course.losses.append(float(self._loss))
        course.rounds += 1
        if first:
            course.peak_bytes = self._peak_bytes
            course.skipped, course.steps_a_round = self._skipped, self._steps

    def _count(self, skipped: bool) -> None:
        self._steps += 1
        self._skipped += skipped


class _Step(TrainingStep):
    """A training step of which loss and gradients can be seen."""

    loss: torch.Tensor | None = None
    """Of the last step, neither scaled nor with a graph; of several passes in it, that of the first."""
    after_backward: Callable[[], None] | None = None
    """Called once, when the gradients are there, still multiplied by the scale."""

    @property
    def scale(self) -> float:
        """What the loss of the next step will be multiplied by; a step that is skipped lowers it. Waits for the device."""
        return float(self._scaler.get_scale())

    def run(self, inputs: Any, targets: Any) -> None:
        self.loss = None
        super().run(inputs, targets)

    def _passes(self, inputs: Any, targets: Any) -> torch.Tensor:
        loss = super()._passes(inputs, targets)
        if self.loss is None:
            self.loss = loss.detach()
        see, self.after_backward = self.after_backward, None
        if see is not None:
            see()
        return loss


MOST_MEASURED = 40
"""Steps in which memory is measured, until one is not skipped: so often a scale can be halved."""


class _CancelledError(Exception):
    """The user wants no more of it."""


class _TooSlowError(BaseException):  # no Exception, which the user's code may catch
    def __init__(self, taken_s: float) -> None:
        super().__init__()
        self.taken_s = taken_s


class _TimeLimit(TorchDispatchMode):
    """Breaks off what takes too long, at the next op."""

    def __init__(self, limit_s: float, clock: Callable[[], float]) -> None:
        super().__init__()
        keep_dynamo_out(_TimeLimit)  # type: ignore[arg-type]  # any mode will do
        self._limit_s = limit_s
        self._clock = clock
        self._begun_s = clock()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No wrapper around ``__torch_dispatch__``, which imports the compiler, for seconds that would count."""
        return False

    def check(self) -> None:
        taken_s = self._clock() - self._begun_s
        if taken_s > self._limit_s:
            raise _TooSlowError(taken_s)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.check()
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _time_limit(limit_s: float, clock: Callable[[], float]) -> Iterator[None]:
    if limit_s == math.inf:
        yield
        return
    limit = _TimeLimit(limit_s, clock)
    with limit:
        yield
    limit.check()


# ---- words and numbers ------------------------------------------------------------------------------------------------------


def _rows(courses: list[_Course], *, batch_size: int | None) -> tuple[Row, ...]:
    """Of those that are complete, or were dropped."""
    reference = courses[0].row(None, batch_size) if courses[0].rounds or courses[0].why_not else None
    if reference is None:
        return ()
    others = [course for course in courses[1:] if course.rounds or course.why_not]
    return (reference, *(course.row(reference, batch_size) for course in others))


def _start_scale(settings: Settings, in_force: Settings, live_scale: float | None) -> float:
    rules = ("init_scale", "min_scale", "max_scale")
    if live_scale is None or any(getattr(settings, name) != getattr(in_force, name) for name in rules):
        return settings.start_scale
    return live_scale


def _unscaled(gradient: torch.Tensor, scale: float) -> torch.Tensor:
    gradient = gradient.detach()
    if gradient.layout != torch.strided:
        gradient = gradient.to_dense()
    if scale == 1.0:
        return gradient
    return gradient / scale if gradient.is_complex() else gradient.double() / scale


def _tensors(batch: Any) -> list[torch.Tensor]:
    return [leaf for leaf in batch_leaves(batch) if isinstance(leaf, torch.Tensor)]


def _batch_size(batch: tuple[Any, Any]) -> int | None:
    return next((int(tensor.shape[0]) for tensor in _tensors(batch) if tensor.dim()), None)


def _batch_text(batch: tuple[Any, Any]) -> str:
    def text(part: Any) -> str:
        shapes = [f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in _tensors(part)]
        return " and ".join(shapes) or f"a {type(part).__name__}"

    return f"inputs {text(batch[0])}, targets {text(batch[1])}"


def _device_text(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
