"""The memory of a step with other settings or another batch size, predicted on a copy that has shapes and no numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.utils._pytree import tree_leaves

from amp_widgets.analysis.fake_kernels import UnfakeableError
from amp_widgets.analysis.fake_model import FakeScaler, FakeTraining
from amp_widgets.analysis.held_interrupt import interrupts_held, raise_lost_interrupt
from amp_widgets.analysis.real_step import free_memory_bytes, real_step
from amp_widgets.analysis.snapshot import Snapshot
from amp_widgets.analysis.training_step import TrainingStep
from amp_widgets.analysis.trial import (
    check_batch,
    check_hooks,
    check_idle,
    check_loss_fn,
    check_not_compiled,
    check_one_model,
    region,
)
from amp_widgets.core.batch_tree import batch_leaves, first_dimension
from amp_widgets.core.checkpointing import Checkpointing
from amp_widgets.core.fp32_layers import Fp32Layers
from amp_widgets.core.loop import LiveLoop
from amp_widgets.core.memory.death import is_out_of_memory
from amp_widgets.core.memory.lives import RecordedStorages
from amp_widgets.core.memory.profile import PHASES, LayerProfile, StepProfile
from amp_widgets.core.memory.step_record import NO_LAYER, StepRecord
from amp_widgets.core.memory.storages import LiveStorages, state_of
from amp_widgets.core.memory.tracker import StepTracker
from amp_widgets.core.memory.whole_step import CompleteStep
from amp_widgets.core.model_call import call_model
from amp_widgets.core.settings import AutocastName, Settings, describe_settings
from amp_widgets.errors import RunError, SettingsError

PREDICTED = "predicted on fake tensors"
NOT_COUNTED = "is not followed op by op, so that its memory can neither be predicted nor limited"


class TooLargeError(RunError):
    """A step can only be measured, and has more rows than real steps are run with."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerCall:
    """One call of a layer.

    Attributes
    ----------
    begin, end
        First and last point of its forward pass; the latter is before the first where nothing is made in it.
    first, last
        First and last point of its backward pass; None where there is none.
    """

    begin: int
    end: int
    first: int | None
    last: int | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FollowedStep(CompleteStep):
    """A complete step of which it is known, too, where each call of a layer begins and ends; another may come right after it.

    Attributes
    ----------
    calls
        Of each layer that was called, by position, in their order.
    first_input_bytes
        Of each of them, what copies take of the tensors that go into its first call with gradients, by position or by name.
    """

    calls: Mapping[int, Sequence[LayerCall]]
    first_input_bytes: Mapping[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PredictedStep:
    """What a step would need.

    Attributes
    ----------
    profile
        As of a real step, made by the same tracker. Of a predicted one, times are NaN: nothing was computed.
    complete
        The same step for estimates; None where it could only be measured, and not be followed op by op.
    obtained
        How: ``"predicted on fake tensors"``, or ``"measured: one real step, because …"``.
    settings
        With which.
    batch_size
        The first dimension of the batch; None where it has none.
    """

    profile: StepProfile
    complete: CompleteStep | None
    obtained: str
    settings: Settings
    batch_size: int | None

    @property
    def peak_bytes(self) -> int:
        """The most that is held at one time in the step."""
        return self.profile.peak_bytes

    @property
    def predicted(self) -> bool:
        """Whether nothing was computed."""
        return self.obtained == PREDICTED


def predict_step(
    loop: LiveLoop,
    batch: tuple[Any, Any],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    *,
    autocast: AutocastName | None = None,
    checkpointed: Iterable[str] | None = None,
    fp32_layers: Iterable[str] | None = None,
    batch_size: int | None = None,
) -> PredictedStep:
    """The memory of a training step with other settings, without running it; see `FakeSteps`.

    Parameters
    ----------
    loop, batch, loss_fn
        As in `fake_steps`.
    autocast, checkpointed, fp32_layers, batch_size
        As in `FakeSteps.step`.
    """
    with fake_steps(loop, batch, loss_fn) as steps:
        return steps.step(autocast=autocast, checkpointed=checkpointed, fp32_layers=fp32_layers, batch_size=batch_size)


@contextlib.contextmanager
def fake_steps(
    loop: LiveLoop,
    batch: tuple[Any, Any],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    *,
    verb: str = "predict_step",
    measures: bool = True,
    prepare: Callable[[nn.Module, Sequence[torch.optim.Optimizer]], None] | None = None,
) -> Iterator[FakeSteps]:
    """Predict steps of one model on one batch, for several settings.

    Parameters
    ----------
    loop
        Whose model, optimizers and settings; no step of its own may be in progress.
    batch
        ``(inputs, targets)``.
    loss_fn
        ``loss_fn(model(inputs), targets)``.
    verb
        What is being done, for messages.
    measures
        Whether a step that does not run on fake tensors is measured; else it raises `RunError`.
    prepare
        Called with the copies of model and optimizers, before they take a step.

    Raises
    ------
    RunError
        When the session has no optimizer or several models, a step is in progress, or the batch is no pair.
    """
    steps = FakeSteps(loop, batch, loss_fn, verb=verb, measures=measures, prepare=prepare)
    try:
        yield steps
    finally:
        steps.close()


class FakeSteps:
    """Predicts steps on fake tensors, and where they do not run so, measures real ones that are taken back; see `fake_steps`.

    A predicted step is that of training that is under way: an optimizer without state gets one in a step before that does not
    count, and layers know from a forward pass before what they have to keep. Nothing of the user's model, optimizers and
    random states is changed, and no memory for a tensor is taken.
    """

    def __init__(
        self,
        loop: LiveLoop,
        batch: Any,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        *,
        verb: str,
        measures: bool = True,
        prepare: Callable[[nn.Module, Sequence[torch.optim.Optimizer]], None] | None = None,
    ) -> None:
        model = check_idle(loop, verb)
        if not loop.optimizers:
            raise RunError(f"{verb}: the session has no optimizer, expected AmpSession(model, optimizer)")
        self._batch = check_batch(batch, verb)
        check_loss_fn(loss_fn, verb)
        check_one_model(model, verb)
        check_hooks(model, verb)
        self._verb = verb
        self._measures = measures
        self._prepare = prepare
        self._loop = loop
        self._model: nn.Module | None = model
        self._loss_fn: Callable[[Any, Any], torch.Tensor] | None = loss_fn
        self._length = first_dimension(batch_leaves(self._batch))
        self._training: FakeTraining | None = None
        self._learned: set[str] = set()  # checkpointed layers whose first call is over
        self.because: str | None = None
        """Why steps are not predicted on fake tensors; None as long as they are."""
        self.keeps_gradients = False
        """Whether steps begin with the gradients of one before, and add to them."""

    def take(self, batch: Any) -> None:
        """Go on with another batch of the same form; None is none, so that the one before is not held between two steps.

        Raises
        ------
        RunError
            When it is no pair.
        """
        self._batch = (None, None) if batch is None else check_batch(batch, self._verb)

    @property
    def batch_size(self) -> int | None:
        """Of the batch that was given; None where nothing in it has a dimension."""
        return self._length

    def step(
        self,
        *,
        autocast: AutocastName | None = None,
        checkpointed: Iterable[str] | None = None,
        fp32_layers: Iterable[str] | None = None,
        scaling: bool | None = None,
        batch_size: int | None = None,
        limit_bytes: float = math.inf,
        real_at_most: int | None = None,
    ) -> PredictedStep:
        """One step.

        Parameters
        ----------
        autocast
            The format; None for the one in force.
        checkpointed, fp32_layers
            Names of layers, globs, or for the first a plan; exactly these are on. None for those in force.
        scaling
            Whether the loss is scaled in fp16; None for as it is.
        batch_size
            The first dimension of every tensor in the batch that is as long there as the batch; None for the batch as it is.
            For a real step, rows of the batch are repeated.
        limit_bytes
            A real step that goes above it ends with a `MemoryBudgetError`, on a CPU.
        real_at_most
            The largest batch size that a real step is run with; None for any.

        Raises
        ------
        TooLargeError
            When a real step was needed with more rows than `real_at_most`.
        SettingsError
            When the settings cannot be in force, or the batch size is none.
        RunError
            When the loss is none that a backward pass can begin from, or the real step cannot be profiled.
        Exception
            What the user's code raises in a real step.
        """
        raise_lost_interrupt()
        model = self._open_model()
        settings = settings_with(
            self._loop, model, autocast=autocast, checkpointed=checkpointed, fp32_layers=fp32_layers, scaling=scaling
        )
        size = self._size(batch_size)
        if self.because is None:
            try:
                return self._predict(settings, size)
            except Exception as error:  # whatever it is: the real step has the last word
                because = because_of(error)
            except BaseException:
                self._training = None
                raise
            self._training = None  # it was left in the middle of a step
            self._check_real(size, real_at_most, because)
            try:
                step = self._measure(model, settings, size, limit_bytes, because)
            except Exception as error:
                if is_out_of_memory(error):
                    self.because = because
                raise  # what the user is to see; else the next step may run on fake tensors
            self.because = because
            return step
        self._check_real(size, real_at_most, self.because)
        return self._measure(model, settings, size, limit_bytes, self.because)

    def check_not_compiled(self) -> None:
        """Check that real steps can be followed op by op, so that a limit ends them.

        Raises
        ------
        RunError
            When model or loss function are compiled.
        """
        check_not_compiled(self._loop, self._loss_fn, self._verb, NOT_COUNTED)

    @property
    def at_hand_bytes(self) -> float:
        """What a real step may come to here: what model, gradients and optimizers hold and what is free; on a GPU infinite.

        There the allocator refuses what is too much; on a CPU the process may be ended for it.
        """
        if self._loop.device.type != "cpu":
            return math.inf
        tensors = [each for each in state_of(self._open_model(), self._loop.optimizers) if isinstance(each, torch.Tensor)]
        with torch._C.DisableTorchFunction():
            return sum(each.nbytes for each in {id(each): each for each in tensors}.values()) + free_memory_bytes()

    def close(self) -> None:
        """Let go of the model and its copy, and of what it was given."""
        self._model = self._training = self._prepare = None
        self._batch, self._loss_fn = (None, None), None

    # ---- private ----------------------------------------------------------------------------------------------------

    def _check_real(self, size: int | None, at_most: int | None, because: str) -> None:
        rows = self._length if size is None else size
        if at_most is not None and rows is not None and rows > at_most:
            raise TooLargeError(
                f"{self._verb}: a step with batch {rows} cannot be predicted, because {because}; and with more than {at_most} "
                "none is run"
            )

    def _predict(self, settings: Settings, size: int | None) -> PredictedStep:
        with interrupts_held(), self._loop.set_aside(), Snapshot(nn.Module(), ()):  # of the random states alone
            if self._training is None:
                assert self._loss_fn is not None
                self._training = FakeTraining(self._open_model(), self._loop.optimizers, self._loss_fn)
                self._learned = set()
                if self._prepare is not None:
                    self._prepare(self._training.model, self._training.optimizers)
            complete = self._follow(self._training, settings, size)
        notes = (_NO_TIMES,)
        profile = complete.record.profile(
            label=describe_settings(settings), step=-1, device=str(self._loop.device), source=_SOURCE, notes=notes
        )
        layers = tuple(_without_times(layer) for layer in profile.layers)
        return PredictedStep(
            profile=dataclasses.replace(profile, layers=layers),
            complete=complete,
            obtained=PREDICTED,
            settings=settings,
            batch_size=self._length if size is None else size,
        )

    def _follow(self, training: FakeTraining, settings: Settings, size: int | None) -> CompleteStep:
        device = self._loop.device
        model, optimizers = training.model, training.optimizers
        Checkpointing(model).apply(settings.checkpointed)
        Fp32Layers(model).apply(settings.fp32_layers)
        with training.active(), region("fp32", device.type):
            step = TrainingStep(
                model,
                optimizers,
                training.loss_fn,
                settings,
                device.type,
                scaler=FakeScaler(device.type, init_scale=settings.start_scale, enabled=settings.scales_loss),
                keeps_gradients=self.keeps_gradients,
                verb=self._verb,
            )
            if not all(optimizer.state for optimizer in optimizers):
                step.run(*training.batch(self._batch, device, size))
                training.keep_gradients()
            elif not set(settings.checkpointed) <= self._learned:
                with region(settings.autocast, device.type):
                    call_model(model, training.batch(self._batch, device, size)[0])
            self._learned.update(settings.checkpointed)
            if not self.keeps_gradients:
                training.begin()
            inputs, targets = training.batch(self._batch, device, size)
            return followed(model, optimizers, lambda: step.run(inputs, targets), device)

    def _measure(self, model: nn.Module, settings: Settings, size: int | None, limit_bytes: float, because: str) -> PredictedStep:
        if not self._measures:
            raise RunError(f"{self._verb}: the step cannot be predicted, because {because}")
        assert self._loss_fn is not None
        profile, complete = real_step(
            self._loop,
            model,
            self._batch,
            self._loss_fn,
            settings,
            batch_size=size,
            limit_bytes=limit_bytes,
            keeps_gradients=self.keeps_gradients,
            verb=self._verb,
        )
        return PredictedStep(
            profile=profile,
            complete=complete,
            obtained=f"measured: one real step, because {because}",
            settings=settings,
            batch_size=self._length if size is None else size,
        )

    def _size(self, batch_size: int | None) -> int | None:
        if batch_size is None or batch_size == self._length:
            return None
        if self._length is None:
            raise SettingsError(f"batch_size: got {batch_size!r}, expected None, as the batch has no tensor with a dimension")
        if type(batch_size) is not int or batch_size < 1:
            raise SettingsError(f"batch_size: got {batch_size!r}, expected a whole number, at least 1")
        return batch_size

    def _open_model(self) -> nn.Module:
        if self._model is None:
            raise RunError(f"{self._verb}: these predictions were closed, expected a step within `with fake_steps(...)`")
        return self._model


def settings_with(
    loop: LiveLoop,
    model: nn.Module,
    *,
    autocast: AutocastName | None,
    checkpointed: Any,
    fp32_layers: Iterable[str] | None,
    scaling: bool | None = None,
) -> Settings:
    """The settings in force with some replaced; names and globs are resolved.

    Raises
    ------
    SettingsError
        When they cannot be in force.
    """
    changes: dict[str, Any] = {}
    if autocast is not None:
        changes["autocast"] = autocast
    if checkpointed is not None:
        changes["checkpointed"] = Checkpointing(model).resolve(getattr(checkpointed, "layers", checkpointed))
    if fp32_layers is not None:
        changes["fp32_layers"] = Fp32Layers(model).resolve(fp32_layers)
    if scaling is not None:
        changes["scaling"] = scaling
    settings = loop.settings.replace(**changes)
    support = loop.support[settings.autocast]
    if not support.available:
        raise SettingsError(f"autocast: got {settings.autocast!r}, which {loop.device} does not have: {support.note}")
    return settings


def followed(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], run: Callable[[], None], device: torch.device
) -> CompleteStep:
    """Follow a step on fake tensors, as `CpuMeter` follows one on real tensors; times are NaN.

    Raises
    ------
    RunError
        When it was left before its end, or cannot be followed.
    """
    storages = LiveStorages({device, torch.device("cpu"), torch.device("meta")})  # fakes have their storage on meta
    with torch._C.DisableTorchFunction():
        storages.see(*state_of(model, optimizers))
        tracker = _FakeTracker(model, optimizers, RecordedStorages(storages), _no_clock)
    tracker.follows_values = True
    because = tracker.start()
    if because is not None:
        tracker.stop()
        raise RunError(because)
    torch._C._push_on_torch_dispatch_stack(tracker)
    try:
        run()
    finally:
        left = tracker.leave()
    if not left:
        raise RunError("the step did not end on the thread where it began")
    return _timeless(tracker, tracker.finish())


def because_of(error: Exception) -> str:
    """Why a step does not run on fake tensors, to follow "because"."""
    if isinstance(error, UnfakeableError):
        return str(error)
    operator = getattr(error, "func", None)
    if isinstance(error, DataDependentOutputException):
        if _is_in(error, "_detect_is_causal_mask"):
            return (
                "torch looks at the numbers in a mask to see whether it is causal, and fake tensors have none; the model can say "
                "so: pass tgt_is_causal=True or False (in an encoder is_causal) beside the mask"
            )
        return f"the step asks for a number in a tensor ({operator}), and fake tensors have none"
    if isinstance(error, DynamicOutputShapeException):
        return f"the size of what {operator} gives depends on the numbers in a tensor, and fake tensors have none"
    if isinstance(error, UnsupportedOperatorException):
        return f"torch has no fake of the operator {operator}"
    lines = str(error).strip().splitlines()
    return f"on fake tensors it raises {type(error).__name__}{f': {lines[0]}' if lines else ''}"


def _is_in(error: Exception, function: str) -> bool:
    """Whether it was raised in a function, or in what that called."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_name != function:
        trace = trace.tb_next
    return trace is not None


_SOURCE = "predicted: live bytes of fake tensors, counted exactly after each op (dispatch mode)"
_NO_TIMES = "predicted on fake tensors: nothing was computed, and times are not known"


class _FakeTracker(StepTracker):
    """Passes over what is asked of fakes alone, and tells the calls of a layer apart."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Iterable[torch.optim.Optimizer],
        storages: RecordedStorages,
        clock: Callable[[], float],
    ) -> None:
        self._stretch = _NOWHERE  # of the graph's nodes, between two changes of the layer: where the backward pass is
        self._stretches: list[int] = []  # of each point
        self._begun: dict[int, tuple[int, int, int]] = {}  # at each depth: layer, point and stretch with which a call began
        self._called: list[tuple[int, int, int, int, int]] = []  # layer, first and last point, first and last stretch
        self._first_input_bytes: dict[int, int] = {}
        super().__init__(model, optimizers, storages, clock)

    def start(self) -> str | None:
        """As of every step; besides, what goes into the layers by name is looked at."""
        because = super().start()
        if because is None:  # on each module: of one for all with names, torch's remove() leaves something behind
            for reference, _ in self._modules:
                if (module := reference()) is not None:
                    self._handles.append(module.register_forward_hook(self._look_at_inputs, with_kwargs=True))
        return because

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:  # asked a few times for each op: answered as the modes below would
            fake = args[0]
            return _META if fake.fake_mode.in_kernel_invocation else fake.fake_device
        with torch._C.DisableTorchFunction():  # which would look for real tensors in what torch's modes do themselves
            return super().__torch_dispatch__(func, types, args, kwargs)

    def complete(self, record: StepRecord) -> FollowedStep:
        """What `finish` has given, with what went into the layers and came out of them, and their calls."""
        points = len(record.points)
        at, stretch = np.arange(points), np.array(self._stretches)
        known = stretch != _NOWHERE
        first, last = np.full(len(self._node_numbers), points), np.full(len(self._node_numbers), -1)
        np.minimum.at(first, stretch[known], at[known])
        np.maximum.at(last, stretch[known], at[known])
        calls: dict[int, list[LayerCall]] = {}
        for layer, begin, end, begins_with, ends_with in sorted(self._called, key=lambda call: call[3]):
            back = _extremes(first[begins_with : ends_with + 1], last[begins_with : ends_with + 1])
            calls.setdefault(layer, []).append(LayerCall(begin=begin, end=end, first=back[0], last=back[1]))
        return FollowedStep(
            record=record,
            inputs=self._inputs,
            outputs=self._outputs,
            calls=calls,
            first_input_bytes=self._first_input_bytes,
        )

    def _add_point(self, phase: int, layer: int, op: Any, time_s: float) -> None:
        super()._add_point(phase, layer, op, time_s)
        self._stretches.append(_NOWHERE if layer == NO_LAYER or phase not in _GOING_BACK else self._stretch)

    def _layer_of_node(self) -> int:
        node: torch.autograd.graph.Node | None = torch._C._current_autograd_node()
        if node is not None and (number := node._sequence_nr()) <= _MOST_NODES:
            self._stretch = bisect_right(self._node_numbers, number) - 1
        return super()._layer_of_node()

    def _call_begins(self, module: nn.Module, layer: int) -> None:
        super()._call_begins(module, layer)
        depth = len(self._calls_open)
        self._begun.pop(depth, None)
        if self._task == _NO_PASS:
            self._begun[depth] = layer, self._recorded.points, len(self._node_numbers) - 1

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        end, ends_with, depth = self._recorded.points - 1, len(self._node_numbers) - 1, len(self._calls_open)
        super()._after_forward(module, args, output)
        if len(self._calls_open) < depth and (begun := self._begun.pop(len(self._calls_open) + 1, None)) is not None:
            layer, begin, begins_with = begun
            self._called.append((layer, begin, end, begins_with, ends_with))

    def _look_at_inputs(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        layer = self._layer_of.get(id(module), NO_LAYER)
        if layer == NO_LAYER or self._task != _NO_PASS or not torch.is_grad_enabled() or self.over or not self._is_ours():
            return
        if kwargs:
            self._inputs.setdefault(layer, []).extend(self._lives_of(kwargs))
        if layer not in self._first_input_bytes:
            tensors = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
            self._first_input_bytes[layer] = sum(each.nbytes for each in tensors.values())


_NOWHERE = _NO_PASS = -1
_GOING_BACK = (PHASES.index("backward"), PHASES.index("recompute"))
_MOST_NODES = 2**63 - 1
"""The numbers of the graph's nodes end here; above it are those that add to the gradient of a leaf."""


def _extremes(first: npt.NDArray[np.int64], last: npt.NDArray[np.int64]) -> tuple[int | None, int | None]:
    """The lowest and the highest of some stretches; None where the backward pass has been in none of them."""
    end = int(last.max(initial=-1))
    return (None, None) if end < 0 else (int(first.min()), end)


_DEVICE = torch.ops.prim.device.default
_META = torch.device("meta")


def _no_clock() -> float:
    return 0.0


def _timeless(tracker: StepTracker, record: StepRecord) -> CompleteStep:
    record = dataclasses.replace(
        record,
        points=[(math.nan, *point[1:]) for point in record.points],
        forward_s=[math.nan] * len(record.forward_s),
    )
    return tracker.complete(record)


def _without_times(layer: LayerProfile) -> LayerProfile:
    return dataclasses.replace(layer, forward_s=math.nan, backward_s=math.nan, recompute_s=math.nan)
