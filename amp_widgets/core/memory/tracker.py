"""Profiles one step on a CPU: the live bytes after each op, by kind and by layer, without leaving a trace."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import sys
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd import Variable
from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer

from amp_widgets.core.checkpointing import Checkpointing
from amp_widgets.core.layers import inner_model, named_layers
from amp_widgets.core.memory.budget import MemoryBudgetError, above_budget_text
from amp_widgets.core.memory.compiled import is_compiled
from amp_widgets.core.memory.death import Death, ErrorReference, is_out_of_memory, requested_bytes_of
from amp_widgets.core.memory.lives import (
    ACTIVATION,
    BUFFER,
    GRADIENT,
    NO_GRAD_FORWARD,
    NO_GRAD_LOSS,
    OPTIMIZER,
    OTHER,
    PARAMETER,
    RECOMPUTE,
    TEMPORARY,
    Life,
    RecordedStorages,
)
from amp_widgets.core.memory.profile import KINDS, PHASES
from amp_widgets.core.memory.step_mode import ITEM, PAUSE_S, StepMode, item, modules_being_called, operator_name
from amp_widgets.core.memory.step_record import NO_LAYER, LayerFacts, StepRecord
from amp_widgets.core.memory.storages import state_of, storages_of
from amp_widgets.core.memory.whole_step import CompleteStep

_FORWARD, _LOSS, _BACKWARD, _RECOMPUTE, _OPTIMIZER, _ZERO_GRAD, _OTHER = range(len(PHASES))
"""Positions in `PHASES`."""


class StepTracker(StepMode):
    """Counts like `StepMode`, and writes down what changed at which op, in which phase and layer.

    Layers are followed by two global module hooks, which are there for this step alone. Ops of the backward pass belong to
    the layer in which the graph's node was made, told by torch's own numbers of nodes; no hook is put on a tensor or a
    parameter. That a storage is a gradient or an optimizer's state is seen when the pass or the step is over; it then
    counts as that from its birth on. An optimizer's step is recognised on the call stack.

    Parameters
    ----------
    model
        Whose layers are told apart; only weakly referenced, like the optimizers.
    optimizers
        Whose state is theirs; if there are none, the ones that are seen to step.
    storages
        Where the bytes are counted.
    clock
        Seconds.
    learns_optimizers
        Whether those that are seen to step count besides; None: if there are no others.

    Notes
    -----
    With a limit, what counts is the training: ops in a forward pass of the model, in a backward pass and in an optimizer's
    step, and other ops with what these have made, such as a loss function's. What else the user's code allocates is
    counted, and raises nothing: the code may be anybody's, if the step was left by an exception.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Iterable[Optimizer],
        storages: RecordedStorages,
        clock: Callable[[], float],
        *,
        learns_optimizers: bool | None = None,
    ) -> None:
        super().__init__(storages, clock)
        self._recorded = storages
        self.limit_bytes = math.inf
        """An op of the training that goes above it raises `MemoryBudgetError`."""
        self._limit_rests = False  # memory has run out, and no forward or backward pass nor an optimizer's step has begun since
        self._begun_s = self._last_op_s
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._learns_optimizers = not self._optimizers if learns_optimizers is None else learns_optimizers
        root = inner_model(model)
        layers = named_layers(model)
        self._facts = LayerFacts(layers, Checkpointing(model).active, root)
        self._layer_of = {id(module): index for index, module in enumerate(layers.values())}
        self._layer_of[id(root)] = NO_LAYER
        self._root = weakref.ref(root)
        self._modules = [(self._root, NO_LAYER)]
        self._modules += [(weakref.ref(module), index) for index, module in enumerate(layers.values())]
        self._handles: list[Any] = []

        self._calls_open: list[tuple[int, int, float]] = []  # of each module being called: its id, layer and when it began
        self._task = -1  # torch's number of the backward pass in progress
        self._depth = 0  # how many modules were being called as it began
        self._creates_graph = False
        self._outside = _OTHER  # the phase while there is no backward pass
        self._expects_backward = False
        self._forward_in_step = False  # an optimizer's, as its closure
        self._hops = 0  # how far an optimizer's step was above the last op that it called; 0 where it is not known
        self._phase = _OTHER  # of the last point
        self._layer = NO_LAYER  # of the last op of the backward pass
        self._node_numbers = [torch._C._autograd._get_sequence_nr()]  # from which node on ...
        self._node_layers = [NO_LAYER]  # ... they belong to which layer

        self._points: list[tuple[float, int, int, Any]] = []  # time, phase, layer, op
        self._forward_ends: list[int] = []
        self._layer_of_parameter: dict[int, int] = {}
        self._dtypes: set[tuple[int, torch.dtype]] = set()
        self._calls = [0] * (len(layers) + 1)  # the last one, at NO_LAYER, is the model's own
        self._forward_s = [0.0] * (len(layers) + 1)
        self._output_bytes = [0] * (len(layers) + 1)
        self._recomputed: set[int] = set()
        self.follows_values = False
        """Whether to note what goes into the layers and comes out of them, which estimates for other settings need."""
        self._inputs: dict[int, list[Life]] = {}  # of each layer
        self._outputs: dict[int, list[Life]] = {}

        self._mark_all()
        self._add_point(_OTHER, NO_LAYER, None, self._begun_s)

    def start(self) -> str | None:
        """Watch the modules from now on, if no compiled one is being called; why not, else."""
        called = modules_being_called()
        if any(is_compiled(module) for module in called):
            return "a module that was compiled is being called"
        for module in called:
            layer = self._layer_of.get(id(module))
            if layer is not None:
                self._call_begins(module, layer)
        self._handles = [
            register_module_forward_pre_hook(self._before_forward),
            register_module_forward_hook(self._after_forward, always_call=True),
        ]
        return None

    def also(self, model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        """More belongs to the step than was known when it began; layers that are new are not told apart."""
        known = {id(module) for reference, _ in self._modules if (module := reference()) is not None}
        self._modules += [(weakref.ref(module), NO_LAYER) for module in model.modules() if id(module) not in known]
        optimizers = list(optimizers)
        for optimizer in optimizers:
            self._learn(optimizer)
        storages = self._recorded
        with torch._C.DisableTorchFunction():
            storages.see(*state_of(model, optimizers))
        storages.fresh.clear()
        self._mark_all()

    def stop(self) -> None:
        """Count no more, and take off the hooks."""
        super().stop()
        self._unhook()

    def finish(self) -> StepRecord:
        """What was written down, at the end of a step that was left."""
        storages = self._recorded
        storages.settle()
        self._mark_all()
        now_s = self._clock()
        self._tell_of_dead_gradients(now_s)
        self._add_point(self._phase, NO_LAYER, None, now_s)
        self._modules = []
        return self._written()

    def complete(self, record: StepRecord) -> CompleteStep:
        """What `finish` has given, with what went into the layers and came out of them; see `follows_values`."""
        return CompleteStep(record=record, inputs=self._inputs, outputs=self._outputs)

    def _written(self) -> StepRecord:
        storages = self._recorded
        return StepRecord(
            facts=self._facts,
            lives=storages.lives,
            points=self._points,
            forward_ends=self._forward_ends,
            dtypes=self._dtypes,
            calls=self._calls,
            forward_s=self._forward_s,
            output_bytes=self._output_bytes,
            recomputed=self._recomputed,
        )

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the op, then count its arguments and results, and say what is new."""
        now_s = self._clock()
        if self.over or (now_s - self._last_op_s > PAUSE_S and not self._goes_on()):
            return self._run_last(func, args, kwargs)
        self._last_op_s = now_s
        if func is ITEM and type(args[0]) is Tensor and args[0].is_cpu:
            return item(args[0])
        op = func._op if type(func) is OpOverload else func
        storages = self._recorded
        try:  # costs nothing while nothing is raised
            out = op(*args, **kwargs) if kwargs else op(*args)
        except RuntimeError as error:
            if is_out_of_memory(error):
                self._die(self._death(func, error))
            raise

        task = _graph_task()
        if task != self._task:
            self._pass_changes(task)
        if storages._freed:
            storages.settle()
        if task != -1:
            if _grad_enabled() or len(self._calls_open) > self._depth:
                phase = self._phase_in_backward()
            elif self._phase == _RECOMPUTE and func is _DETACH:
                phase = _RECOMPUTE  # checkpointing takes a tensor that is to be saved, and gradients are off while it does
            else:
                phase = _BACKWARD
        else:
            if storages.dead_gradients:
                self._tell_of_dead_gradients(now_s)
            phase = self._outside
            if phase != _FORWARD or func is _ONES_LIKE:
                phase = self._phase_by_frame(func)

        before = storages.bytes
        storages.see_op((*args, *kwargs.values()) if kwargs else args, out)
        if before < storages.bytes > self.limit_bytes:
            phase = self._surely(phase)
            if phase in _TRAINING or self._is_training((*args, *kwargs.values()) if kwargs else args):
                out = None  # it is to be free again when the error is caught
                raise self._above_limit(func, phase, before)
        if func is _DETACH and phase == _BACKWARD:
            self._note_taken_over(args[0])
        if storages.changed or phase != self._phase:
            self._note(func, phase, out)
        elif phase == _FORWARD and args and out is args[0]:  # in place
            self._note_dtype(self._calls_open[-1][1], out)
        if storages.bytes > self.peak_bytes:
            self.peak_bytes = storages.bytes
        return out

    # ---- points -----------------------------------------------------------------------------------------------------

    def _add_point(self, phase: int, layer: int, op: Any, time_s: float) -> None:
        storages = self._recorded
        self._points.append((time_s - self._begun_s, phase, layer, op))
        self._phase = phase
        storages.points += 1
        storages.changed = storages.others_died = False

    def _note(self, op: Any, phase: int, out: Any) -> None:
        """Something has changed with an op."""
        storages = self._recorded
        layer, kind = self._place(phase)
        if phase == _FORWARD and storages.fresh and op is not _TO_COPY:
            self._note_dtype(layer, out)
        for life in storages.fresh:
            life.kind = kind
            life.layer = layer
        storages.fresh.clear()
        storages.dead_gradients.clear()
        self._add_point(phase, layer, op, self._clock())

    def _place(self, phase: int) -> tuple[int, int]:
        """To which layer what an op makes belongs, and its kind."""
        if phase == _BACKWARD:
            return self._layer_of_node(), TEMPORARY
        if phase == _FORWARD:
            return self._calls_open[-1][1], ACTIVATION if _grad_enabled() else NO_GRAD_FORWARD
        if phase == _RECOMPUTE:
            return self._layer_recomputed(), RECOMPUTE
        if phase == _OPTIMIZER:
            return NO_LAYER, TEMPORARY
        if phase == _LOSS:
            return NO_LAYER, ACTIVATION if _grad_enabled() else NO_GRAD_LOSS
        return NO_LAYER, OTHER

    def _note_dtype(self, layer: int, out: Any) -> None:
        if type(out) is tuple and out:
            out = out[0]
        if isinstance(out, Tensor):
            self._dtypes.add((layer, out.dtype))

    def _note_taken_over(self, gradient: Tensor) -> None:
        """A tensor becomes a leaf's gradient, if it is detached for a leaf; a hook may take it away before the pass is over."""
        node = torch._C._current_autograd_node()
        if node is None:
            return
        if node._sequence_nr() >= _ACCUMULATES:
            layer = self._layer_of_parameter.get(id(getattr(node, "variable", None)), NO_LAYER)
            self._recorded.identify(gradient, GRADIENT, layer)

    def _tell_of_dead_gradients(self, now_s: float) -> None:
        """Make a point of its own of gradients that have died since the last one, outside of a backward pass: zero_grad."""
        storages = self._recorded
        gradients = storages.dead_gradients
        if not gradients:
            return
        if storages.others_died:
            self._add_point(self._phase, NO_LAYER, None, now_s)
        for life in gradients:
            life.death = storages.points
        gradients.clear()
        self._add_point(_ZERO_GRAD, NO_LAYER, None, now_s)

    # ---- memory that has run out ------------------------------------------------------------------------------------

    def _above_limit(self, op: Any, phase: int, before: int) -> MemoryBudgetError:
        """The error for an op whose results, dropped by now, went above the limit."""
        storages = self._recorded
        requested = sum(life.nbytes for life in storages.fresh)
        allocated = storages.bytes - requested
        if not requested:  # a tensor from outside that was not known yet, or one that has grown
            requested, allocated = storages.bytes - before, before
        storages.fresh.clear()
        storages.settle()
        made = any(life.death is None and life.kind in _MADE for life in storages.lives)
        death = self._describe_death(
            op,
            phase,
            cause="budget",
            requested_bytes=requested,
            allocated_bytes=allocated,
            limit_bytes=self.limit_bytes,
            made_something=made,
        )
        error = MemoryBudgetError(
            above_budget_text(
                phase=death.phase,
                layer=death.layer,
                operator=death.operator,
                requested_bytes=requested,
                allocated_bytes=allocated,
                limit_bytes=self.limit_bytes,
                state_alone=allocated > self.limit_bytes and not made,
            )
        )
        self._die(dataclasses.replace(death, error=ErrorReference(error)))
        return error

    def _die(self, death: Death) -> None:
        self._limit_rests = True
        super()._die(death)

    def _surely(self, phase: int) -> int:
        """The phase, where a forward pass may have been left without a word, as by an interrupt."""
        if phase != _FORWARD or any(id(module) in self._layer_of for module in modules_being_called()):
            return phase
        self._calls_open.clear()
        self._expects_backward = False
        self._set_outside()
        return self._outside

    def _is_training(self, values: Iterable[Any]) -> bool:
        """Whether an op outside of forward, backward and the optimizer's step belongs to them, by what it works with."""
        return not self._limit_rests and any(self._is_of_step(value) for value in values)

    def _is_of_step(self, value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return any(self._is_of_step(inner) for inner in value)
        if not isinstance(value, Tensor):
            return False
        if value.requires_grad and self._leads_to_ours(value):
            return True
        return any(life.kind in (GRADIENT, OPTIMIZER) for life in self._lives_of(value))

    def _leads_to_ours(self, tensor: Tensor) -> bool:
        """Whether a gradient of this tensor would come to a parameter of ours."""
        ours = self._layer_of_parameter
        if id(tensor) in ours:
            return True
        waiting, seen = [tensor.grad_fn], set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if id(getattr(node, "variable", None)) in ours:
                return True
            waiting += [following for following, _ in node.next_functions]
        return False

    def _death(self, op: Any, error: BaseException) -> Death:
        task = _graph_task()
        if task != self._task:
            self._pass_changes(task)
        self._recorded.settle()
        if task != -1:
            phase = self._phase_in_backward() if _grad_enabled() or len(self._calls_open) > self._depth else _BACKWARD
        else:
            phase = self._outside if self._outside == _FORWARD else self._phase_by_frame(op)
            self._hops = 0  # counted from here
        death = self._describe_death(
            op,
            phase,
            cause="allocator",
            requested_bytes=requested_bytes_of(error),
            allocated_bytes=self._recorded.bytes,
        )
        return dataclasses.replace(death, error=ErrorReference(error))

    def _lives_of(self, value: Any) -> list[Life]:
        sizes: dict[int, int] = {}
        _add_sizes(value, sizes)
        return [life for key in sizes if (life := self._recorded._now.get(key)) is not None]

    def _describe_death(self, op: Any, phase: int, **facts: Any) -> Death:
        layer, kind = self._place(phase)
        self._mark_all()
        points = [*self._points, (self._clock() - self._begun_s, phase, layer, op)]
        in_forward = bool(self._calls_open) and self._task == -1
        record = dataclasses.replace(
            self._written(),
            lives=[copy.copy(life) for life in self._recorded.lives],
            points=points,
            forward_ends=[*self._forward_ends, len(points) - 1] if in_forward else list(self._forward_ends),
            dtypes=set(self._dtypes),
            calls=list(self._calls),
            forward_s=list(self._forward_s),
            output_bytes=list(self._output_bytes),
            recomputed=set(self._recomputed),
        )
        pending = {call[1] for call in self._calls_open} | {layer}
        places = {id(life): place for place, life in enumerate(self._recorded.lives)}
        return Death(
            device=", ".join(sorted(map(str, self._recorded._devices))),
            phase="" if phase == _OTHER else PHASES[phase],
            layer="" if layer == NO_LAYER else self._facts.names[layer],
            operator=operator_name(op),
            kind="" if phase == _OPTIMIZER else KINDS[_UNDECIDED.get(kind, kind)],
            record=record,
            pending=frozenset(pending - {NO_LAYER}),
            inputs={of: frozenset(places[id(life)] for life in lives) for of, lives in self._inputs.items()},
            outputs={of: frozenset(places[id(life)] for life in lives) for of, lives in self._outputs.items()},
            **facts,
        )

    # ---- phases -----------------------------------------------------------------------------------------------------

    def _pass_changes(self, task: int) -> None:
        """A backward pass begins, ends, begins within another, or goes on after that."""
        if self._task == -1:
            self._depth = len(self._calls_open)
            self._layer = NO_LAYER
            Variable._execution_engine.queue_callback(self._pass_ends)
        self._task = task
        if task == -1:
            self._expects_backward = False
            self._set_outside()
        else:
            self._limit_rests = False
            # A recompute runs with gradients on; so do all ops if the gradients are to have a graph themselves. In torch's
            # checkpointing, a recompute has hooks for saved tensors in force.
            self._creates_graph = (
                _grad_enabled()
                and len(self._calls_open) == self._depth
                and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
            )

    def _pass_ends(self) -> None:
        """Called by torch at the end of an outermost backward pass, before the user goes on."""
        if self.over or not self._is_ours():
            return
        storages = self._recorded
        storages.settle()
        storages.dead_gradients.clear()
        self._mark_gradients()
        if storages.changed:
            self._add_point(_BACKWARD, NO_LAYER, None, self._clock())

    def _phase_in_backward(self) -> int:
        if len(self._calls_open) > self._depth:
            return _RECOMPUTE
        return _BACKWARD if self._creates_graph else _RECOMPUTE

    def _phase_by_frame(self, op: Any) -> int:
        """The phase as only the calling code tells it: an optimizer's step, ``zero_grad``, or the very first gradient."""
        if self._hops and self._outside == _OTHER and not self._learns_optimizers:
            try:  # from where the op before was called, most often
                if sys._getframe(self._hops).f_code is _STEP:
                    return _OPTIMIZER
            except ValueError:
                pass
        self._hops = 0
        frame = sys._getframe(1).f_back
        hops = 2
        while frame is not None:
            code = frame.f_code
            if code is _MAKE_GRADS and op is _ONES_LIKE:
                self._expects_backward = self._limit_rests = False
                self._set_outside()
                return _BACKWARD
            if code is _ZERO_GRAD_OF_OPTIMIZER or code is _ZERO_GRAD_OF_MODULE:
                return _ZERO_GRAD
            if code is _STEP:
                if self._learns_optimizers:
                    self._learn(frame.f_locals.get("self"))
                self._hops = hops
                self._limit_rests = False
                if self._outside == _LOSS and not self._forward_in_step:
                    self._expects_backward = False  # the last forward pass was not for a backward pass
                    self._set_outside()
                return _OPTIMIZER if self._outside == _OTHER else self._outside  # else in a closure
            hops, frame = hops + 1, frame.f_back
        return self._outside

    def _learn(self, optimizer: Any) -> None:
        if isinstance(optimizer, Optimizer) and all(known() is not optimizer for known in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))

    def _set_outside(self) -> None:
        self._outside = _FORWARD if self._calls_open else _LOSS if self._expects_backward else _OTHER

    # ---- layers -----------------------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if is_compiling() or self.over or not self._is_ours():
            return
        layer = self._layer_of.get(id(module))
        if layer is not None and (layer != NO_LAYER or module is self._root()):
            self._call_begins(module, layer)
            if self.follows_values and self._task == -1:
                self._inputs.setdefault(layer, []).extend(self._lives_of(args))
        elif is_compiled(module):
            self._unhook()  # before the compiler sees them

    def _call_begins(self, module: nn.Module, layer: int) -> None:
        task = _graph_task()
        if task != self._task:
            self._pass_changes(task)
        now_s = self._clock()
        if task == -1:
            if not self._calls_open:
                self._limit_rests = False
                self._settle_outside(now_s)
            self._calls[layer] += 1
        elif len(self._calls_open) == self._depth:
            self._recomputed.add(layer)
        self._calls_open.append((id(module), layer, now_s))
        self._nodes_follow(layer)
        self._set_outside()

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if is_compiling() or self.over or id(module) not in self._layer_of or not self._is_ours():
            return
        calls = self._calls_open
        at = next((at for at in range(len(calls) - 1, -1, -1) if calls[at][0] == id(module)), None)
        if at is None:
            return
        _, layer, begun_s = calls[at]
        del calls[at:]
        now_s = self._clock()
        self._nodes_follow(calls[-1][1] if calls else NO_LAYER)
        if _graph_task() == -1:
            self._forward_s[layer] += now_s - begun_s
            self._output_bytes[layer] = _bytes_of(output)
            if layer != NO_LAYER and self.follows_values:
                self._outputs.setdefault(layer, []).extend(self._lives_of(output))
            if not calls:
                self._expects_backward = _grad_enabled() and output is not None  # it is None after an exception
                self._forward_in_step = _within_a_step()
                self._settle_outside(now_s)
                self._add_point(_FORWARD, NO_LAYER, None, now_s)
                self._forward_ends.append(self._recorded.points - 1)
        self._set_outside()

    def _is_ours(self) -> bool:
        """Whether what happens on this thread belongs to the step."""
        return threading.get_ident() == self._thread_id

    def _nodes_follow(self, layer: int) -> None:
        """The graph's nodes that this thread makes from now on belong to a layer."""
        self._node_numbers.append(torch._C._autograd._get_sequence_nr())
        self._node_layers.append(layer)

    def _nodes(self) -> tuple[list[int], list[int]]:
        """From which node on they belong to which layer, of the nodes that are being worked off."""
        return self._node_numbers, self._node_layers

    def _settle_outside(self, now_s: float) -> None:
        storages = self._recorded
        storages.settle()
        self._tell_of_dead_gradients(now_s)
        if storages.changed:
            self._add_point(self._phase, NO_LAYER, None, now_s)

    def _layer_of_node(self) -> int:
        """In which layer the node of the graph was made that is being worked off."""
        node = torch._C._current_autograd_node()
        if node is None:
            return NO_LAYER
        number = node._sequence_nr()
        if number < _ACCUMULATES:
            numbers, layers = self._nodes()
            at = bisect_right(numbers, number) - 1
            self._layer = layers[at] if at >= 0 else NO_LAYER
        else:  # a leaf's has no number: it belongs to the node before it
            leaf: Tensor | None = getattr(node, "variable", None)
            if leaf is not None and leaf.grad is not None:
                self._recorded.identify(leaf.grad, GRADIENT, self._layer_of_parameter.get(id(leaf), NO_LAYER))
        return self._layer

    def _layer_recomputed(self) -> int:
        if len(self._calls_open) > self._depth:
            return self._calls_open[-1][1]
        # Of a layer that was switched on, only what it calls is seen in the recompute.
        layer = self._layer_of_node()
        return self._facts.checkpointed_around[layer] if layer != NO_LAYER else NO_LAYER

    def _unhook(self) -> None:
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    # ---- kinds ------------------------------------------------------------------------------------------------------

    def _mark_all(self) -> None:
        """Say which storages are parameters, buffers, gradients and optimizer state."""
        identify = self._recorded.identify
        layer_of_parameter = self._layer_of_parameter
        layer_of_parameter.clear()
        tensor: Tensor | None
        with torch._C.DisableTorchFunction():
            for reference, layer in self._modules:
                module = reference()
                if module is None:
                    continue
                for tensor in module._parameters.values():
                    if tensor is not None:
                        layer_of_parameter.setdefault(id(tensor), layer)
                        identify(tensor, PARAMETER, layer)
                for tensor in module._buffers.values():
                    if tensor is not None:
                        identify(tensor, BUFFER, layer)
            self._mark_gradients()
            for reference_to_optimizer in self._optimizers:
                optimizer = reference_to_optimizer()
                if optimizer is None:
                    continue
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        if id(parameter) not in layer_of_parameter and parameter.is_leaf:  # not the model's, but optimized
                            identify(parameter, PARAMETER, NO_LAYER)
                            if parameter.grad is not None:
                                identify(parameter.grad, GRADIENT, NO_LAYER)
                for parameter, state in optimizer.state.items():
                    self._mark_inside(state, OPTIMIZER, layer_of_parameter.get(id(parameter), NO_LAYER))

    def _mark_gradients(self) -> None:
        identify = self._recorded.identify
        with torch._C.DisableTorchFunction():
            for reference, layer in self._modules:
                module = reference()
                if module is None:
                    continue
                for tensors in (module._parameters, module._buffers):
                    for tensor in tensors.values():
                        if tensor is not None and tensor.is_leaf and tensor.grad is not None:
                            identify(tensor.grad, GRADIENT, layer)

    def _mark_inside(self, value: Any, kind: int, layer: int) -> None:
        if isinstance(value, Tensor):
            self._recorded.identify(value, kind, layer)
        elif isinstance(value, dict):
            for inner in value.values():
                self._mark_inside(inner, kind, layer)
        elif isinstance(value, (list, tuple)):
            for inner in value:
                self._mark_inside(inner, kind, layer)


_ACCUMULATES = 2**63
_TRAINING = frozenset((_FORWARD, _BACKWARD, _RECOMPUTE, _OPTIMIZER))
_MADE = frozenset((ACTIVATION, RECOMPUTE, TEMPORARY, NO_GRAD_FORWARD, NO_GRAD_LOSS))
_UNDECIDED = {NO_GRAD_FORWARD: TEMPORARY, NO_GRAD_LOSS: OTHER}
_graph_task = torch._C._current_graph_task_id
_grad_enabled = torch.is_grad_enabled
_ONES_LIKE = torch.ops.aten.ones_like.default
_DETACH = torch.ops.aten.detach.default
_TO_COPY = torch.ops.aten._to_copy.default
_MAKE_GRADS = torch.autograd._make_grads.__code__
_STEP = Optimizer.profile_hook_step(lambda: None).__code__
"""Of torch's wrapper around every optimizer's ``step``."""
_ZERO_GRAD_OF_OPTIMIZER = inspect.unwrap(Optimizer.zero_grad).__code__
_ZERO_GRAD_OF_MODULE = nn.Module.zero_grad.__code__


def _within_a_step() -> bool:
    """Whether an optimizer's step is on this thread's call stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _STEP:
            return True
        frame = frame.f_back
    return False


def _bytes_of(output: Any) -> int:
    """Of the storages of the tensors in an output, each once."""
    if type(output) is Tensor:
        try:
            return output.untyped_storage().nbytes()
        except (NotImplementedError, RuntimeError):  # sparse, and what torch.func wraps
            pass
    sizes: dict[int, int] = {}
    _add_sizes(output, sizes)
    return sum(sizes.values())


def _add_sizes(value: Any, sizes: dict[int, int]) -> None:
    if isinstance(value, Tensor):
        try:
            sizes.update((id(storage), storage.nbytes()) for storage in storages_of(value))
        except Exception:  # a foreign subclass may do anything
            return
    elif isinstance(value, dict):
        for inner in value.values():
            _add_sizes(inner, sizes)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _add_sizes(inner, sizes)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _add_sizes(getattr(value, field.name, None), sizes)
