"""Watches which operators are called in a forward and a backward pass, in which formats, and what is cast for them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
import types
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from amp_widgets.analysis.autocast_lists import autocast_list, format_name, is_cast_in_code, is_left_alone
from amp_widgets.analysis.checkpoint_calls import CheckpointCall, watching_checkpoints
from amp_widgets.core.fp32_inputs import cast_inputs
from amp_widgets.core.layers import inner_model, named_layers

MODEL = "(model)"
LOSS = "loss_fn"

Reason = Literal["off", "lower", "fp32", "promote", "through", "disabled", "kept", "written", "unknown"]
"""Why an operator computes in the format it does:

``off``: autocast is off. ``lower``, ``fp32``, ``promote``: the list of autocast that it is on, or an operator that it is made
of. ``through``: it takes what comes, as it is on no list, or autocast leaves such formats alone. ``disabled``: it is in a region
with ``enabled=False``. ``kept``: in a layer that is kept in FP32. ``written``: a conversion that is written in the code.
``unknown``: it was called by compiled code, where what it was given before a cast cannot be seen.
"""


@dataclasses.dataclass(slots=True)
class Seen:
    """What was seen of an operator in a layer, over all calls with the same formats.

    Attributes
    ----------
    layer, operator, function
        The layer by its name; the operator as Python has it; the custom autograd Function that it was called in, or "".
    dtypes_in, compute, dtypes_out
        The formats of what it was given, of what it computed with after casts, and of what it returned.
    reason, inside
        Why; and the operator inside on whose behalf, where it is not on a list itself.
    ops
        What torch has it computed with.
    casts, cast_bytes
        Made in its forward pass, and the bytes that they wrote.
    """

    layer: str
    operator: str
    function: str
    dtypes_in: tuple[str, ...]
    compute: tuple[str, ...]
    dtypes_out: tuple[str, ...]
    reason: Reason
    inside: str
    ops: tuple[str, ...] = ()
    calls: int = 0
    casts: int = 0
    cast_bytes: int = 0
    backward_compute: tuple[str, ...] = ()
    backward_casts: int = 0
    backward_cast_bytes: int = 0
    recompute_calls: int = 0
    recompute_casts: int = 0
    recompute_cast_bytes: int = 0


class OperatorWatch:
    """Sees a forward and a backward pass from two sides of autocast, on this thread; a context manager.

    Above it, a function mode sees what an operator is called with; below it, a dispatch mode sees the casts and what is really
    computed. Nodes of the graph are told apart by torch's own numbers, so that an op of the backward pass belongs to the operator
    and the layer that made its node. Layers are followed by two global hooks. What a checkpoint of the user's computes again
    belongs to the layer that called it.

    Parameters
    ----------
    model
        Whose layers are told apart.
    device_type
        Of autocast.
    off
        Whether autocast is off altogether, so that a region without it is nothing worth a word.
    kept
        Names of layers that are kept in FP32.
    """

    def __init__(self, model: nn.Module, device_type: str, *, off: bool, kept: Iterable[str] = ()) -> None:
        layers = {MODEL: inner_model(model), **named_layers(model)}
        self.types = {name: type(module).__name__ for name, module in layers.items()}
        """Layer → its class, in the model's order."""
        self._names = {id(module): name for name, module in layers.items()}
        self._device_type = device_type
        self._off = off
        self._kept = tuple(kept)
        self._thread = threading.get_ident()
        self._seen: dict[Any, Seen] = {}
        self._inside: list[str] = []  # the layers that are being called
        self._depth: int | None = None  # how many were when the backward pass began
        self._task = -1  # torch's number of that pass; a reentrant checkpoint makes one of its own within it
        self._begun = False
        self._call: _Call | None = None  # of an operator
        self._written = ""  # the conversion that is being called in the backward pass
        self._makers = {self._thread: _Makers(torch._C._autograd._get_sequence_nr())}  # each thread numbers its nodes by itself
        self._above = _Above(self)
        self._below = _Below(self)

    def __enter__(self) -> OperatorWatch:
        with contextlib.ExitStack() as stack:
            for handle in (
                register_module_forward_pre_hook(self._layer_begins),
                register_module_forward_hook(self._layer_ends, always_call=True),
            ):
                stack.callback(handle.remove)
            stack.enter_context(watching_checkpoints(self._checkpoint_begins))
            stack.enter_context(self._below)
            stack.enter_context(self._above)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    @property
    def seen(self) -> tuple[Seen, ...]:
        """In the order of first calls."""
        return tuple(self._seen.values())

    # ---- layers -----------------------------------------------------------------------------------------------------

    def _layer_begins(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(id(module))
        if name is None or not self._is_ours():
            return
        self._begun = True
        self._look_at_pass()
        self._inside.append(name)
        self._mark(name)

    def _layer_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self._names.get(id(module))
        if name is None or name not in self._inside or not self._is_ours():
            return
        while self._inside.pop() != name:
            pass  # one that was left by an error
        self._mark(self._layer)

    @property
    def _layer(self) -> str:
        return self._inside[-1] if self._inside else LOSS

    def _is_ours(self) -> bool:
        """Whether this is the thread that was watched from the beginning, or one of autograd's."""
        return threading.get_ident() == self._thread or self._in_backward()

    def _layer_of_recompute(self) -> str:
        """A layer that checkpoints calls its own forward again, which no hook sees: the call stack tells."""
        if self._depth is not None and len(self._inside) > self._depth:
            return self._inside[-1]
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code.co_name == "forward" and code.co_argcount:
                name = self._names.get(id(frame.f_locals.get(code.co_varnames[0])))
                if name is not None:
                    return name
            frame = frame.f_back
        return self._layer

    def _checkpoint_begins(self, call: CheckpointCall) -> tuple[Callable[..., Any], Callable[[], None]]:
        layer = self._layer

        def run(*args: Any, **kwargs: Any) -> Any:
            if not self._in_backward():
                return call.function(*args, **kwargs)
            self._look_at_pass()
            depth = len(self._inside)
            self._inside.append(layer)
            try:
                return call.function(*args, **kwargs)
            finally:
                del self._inside[depth:]

        return run, lambda: None

    # ---- passes -----------------------------------------------------------------------------------------------------

    def _look_at_pass(self) -> None:
        if torch._C._current_graph_task_id() == -1:
            self._depth = None
        elif self._depth is None:
            self._depth = len(self._inside)
            self._task = torch._C._current_graph_task_id()

    def _in_backward(self) -> bool:
        return torch._C._current_graph_task_id() != -1

    def _recomputes(self) -> bool:
        """Whether what is called within a backward pass is a forward pass again.

        A recompute has gradients on, as has a backward pass that is to have a graph itself. In torch's checkpointing it has
        hooks for saved tensors in force, or is the backward of a Function, if it is the reentrant one.
        """
        if self._depth is not None and len(self._inside) > self._depth:
            return True
        if not torch.is_grad_enabled():
            return False
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return True
        function = getattr(type(torch._C._current_autograd_node()), "_forward_cls", None)
        return function is not None and function.__module__ == "torch.utils.checkpoint"

    # ---- operators --------------------------------------------------------------------------------------------------

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator, from above autocast."""
        self._look_at_pass()
        again = self._in_backward()
        name = getattr(function, "__name__", str(function))
        if self._call is not None or not self._begun:
            return function(*args, **kwargs)
        if again and not self._recomputes():  # in the code of a backward
            self._written = name if is_cast_in_code(name) else ""
            try:
                return function(*args, **kwargs)
            finally:
                self._written = ""
        call = self._call = _Call(
            operator=name,
            layer=self._layer_of_recompute() if again else self._layer,
            inputs=_formats((args, kwargs)),
            on=torch.is_autocast_enabled(self._device_type),
        )
        first = torch._C._autograd._get_sequence_nr()
        try:
            output = function(*args, **kwargs)
        except BaseException:
            if again:  # torch stops a recompute in the last operator that is needed
                _count(self._like(call), call, again=True)
            raise
        finally:
            self._call = None
        seen = self._note(call, _formats(output) or _formats(output, floating=False))
        _count(seen, call, again=again)
        if seen is not None and torch._C._autograd._get_sequence_nr() > first:
            self._mark(seen, first)
            self._mark(call.layer)
        return output

    def dispatched(self, op: Any, args: Any, kwargs: Any, output: Any) -> None:
        """An op was run, below autocast."""
        if self._call is not None:
            self._call.see(op, args, kwargs, output)
            return
        self._look_at_pass()
        if self._in_backward() and not self._recomputes():
            self._see_backward(op, args, kwargs, output)
        elif self._begun:  # by compiled code, as TorchScript's
            layer = self._layer_of_recompute() if self._in_backward() else self._layer
            call = _Call(operator=_name_of(op), layer=layer, inputs=_formats((args, kwargs)), on=False, known=False)
            call.see(op, args, kwargs, output)
            seen = self._note(call, _formats(output))
            _count(seen, call, again=self._in_backward())
            if seen is not None and not self._in_backward():
                self._mark(seen, torch._C._autograd._get_sequence_nr() - 1)
                self._mark(layer)

    def _note(self, call: _Call, outputs: tuple[str, ...]) -> Seen | None:
        """The record of a call, if it computed or cast anything in floating point."""
        if not call.inputs or not (call.computes or call.casts):
            return None
        reason, inside = self._reason(call)
        function = _function_around()
        key = (call.layer, call.operator, function, call.inputs, tuple(call.compute), outputs, reason)
        if key not in self._seen:
            self._seen[key] = Seen(
                layer=call.layer,
                operator=call.operator,
                function=function,
                dtypes_in=call.inputs,
                compute=tuple(call.compute),
                dtypes_out=outputs,
                reason=reason,
                inside=inside,
                ops=tuple(_INSIDE.get(op, op) for op in call.ops),
            )
        return self._seen[key]

    def _like(self, call: _Call) -> Seen | None:
        """What was seen of an earlier call with the same inputs."""
        wanted = (call.layer, call.operator, _function_around(), call.inputs)
        return next((seen for key, seen in self._seen.items() if key[:4] == wanted), None)

    def _reason(self, call: _Call) -> tuple[Reason, str]:
        if not call.known:
            return "unknown", ""
        if is_cast_in_code(call.operator):
            return ("kept" if _casts_to_keep() else "written"), ""
        if not call.on:
            if any(call.layer == name or call.layer.startswith(f"{name}.") for name in self._kept):
                return "kept", ""
            return ("off" if self._off else "disabled"), ""
        if all(map(is_left_alone, call.inputs)):
            return "through", ""
        own = autocast_list(call.operator, self._device_type)
        if own is not None:
            return own, ""
        for op in call.ops:  # it is made of others, which autocast sees too
            listed = autocast_list(_INSIDE.get(op, op), self._device_type)
            if listed is not None and listed != "promote":
                return listed, _INSIDE.get(op, op)
        if call.casts:
            target = call.cast_to[0]
            return ("fp32" if target == "fp32" else "lower"), call.ops[0] if call.ops else ""
        return "through", ""

    # ---- the backward pass ------------------------------------------------------------------------------------------

    def _see_backward(self, op: Any, args: Any, kwargs: Any, output: Any) -> None:
        node: Any = torch._C._current_autograd_node()
        if node is None or node._sequence_nr() >= _ACCUMULATES:
            return
        seen = self._maker_of(node)
        if seen is None:
            return
        if _is_cast(op, args, output):
            if self._written:
                seen = self._written_in(seen, node)
            seen.backward_casts += 1
            seen.backward_cast_bytes += output.nbytes
        elif _computes(op) and not _accumulates(op, node, args):
            formats = _formats((args, kwargs))
            seen.backward_compute += tuple(one for one in formats if one not in seen.backward_compute)

    def _written_in(self, around: Seen, node: Any) -> Seen:
        """The record of a conversion that is written in the code of a backward."""
        function = _function_of(node)
        key = (around.layer, function, self._written)
        if key not in self._seen:
            self._seen[key] = Seen(around.layer, self._written, function, (), (), (), "written", "")
        return self._seen[key]

    def _maker_of(self, node: Any) -> Seen | None:
        # the nodes of a pass within the pass were made on the thread that runs it, in a recompute
        thread = self._thread if torch._C._current_graph_task_id() == self._task else threading.get_ident()
        makers = self._makers.get(thread)
        owner = LOSS if makers is None else makers.of(node._sequence_nr())
        if isinstance(owner, Seen):
            return owner
        name = _function_of(node)
        if not name:
            return None
        key = (owner, name)
        if key not in self._seen:
            self._seen[key] = Seen(owner, name, name, (), (), (), "through", "")
        return self._seen[key]

    def _mark(self, owner: str | Seen, number: int | None = None) -> None:
        """The nodes that this thread makes from now on, or from a number on, are somebody's."""
        makers = self._makers.setdefault(threading.get_ident(), _Makers(0))
        makers.mark(owner, torch._C._autograd._get_sequence_nr() if number is None else number)


class _Makers:
    """Who made the nodes of a thread: an operator, or between two of them a layer."""

    def __init__(self, first: int) -> None:
        self._numbers = [first]  # of the first node made by ...
        self._owners: list[str | Seen] = [LOSS]

    def mark(self, owner: str | Seen, number: int) -> None:
        self._numbers.append(number)
        self._owners.append(owner)

    def of(self, number: int) -> str | Seen:
        return self._owners[max(bisect_right(self._numbers, number) - 1, 0)]


@dataclasses.dataclass(slots=True)
class _Call:
    """A call of an operator, while it runs."""

    operator: str
    layer: str
    inputs: tuple[str, ...]
    on: bool
    """Whether autocast was on as it was called."""
    known: bool = True
    """Whether its inputs are those before a cast."""
    compute: list[str] = dataclasses.field(default_factory=list)
    ops: list[str] = dataclasses.field(default_factory=list)
    cast_to: list[str] = dataclasses.field(default_factory=list)
    computes: bool = False
    cast_bytes: int = 0

    @property
    def casts(self) -> int:
        return len(self.cast_to)

    def see(self, op: Any, args: Any, kwargs: Any, output: Any) -> None:
        if _is_cast(op, args, output):
            self.cast_to.append(format_name(output.dtype))
            self.cast_bytes += output.nbytes
        elif _computes(op):
            self.computes = True
            self.ops.append(_name_of(op))
            self.compute += [one for one in _formats((args, kwargs)) if one not in self.compute]


def _count(seen: Seen | None, call: _Call, *, again: bool) -> None:
    if seen is None:
        return
    if again:
        seen.recompute_calls += 1
        seen.recompute_casts += call.casts
        seen.recompute_cast_bytes += call.cast_bytes
    else:
        seen.calls += 1
        seen.casts += call.casts
        seen.cast_bytes += call.cast_bytes


class _Above(TorchFunctionMode):
    """Sees what is called in Python, innermost: functions of torch that are written in Python are followed into."""

    def __init__(self, watch: OperatorWatch) -> None:
        super().__init__()
        self._watch = watch
        self._entered: list[Any] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        inner = None if any(function is one for one in self._entered) else _followed(function)
        if inner is None:
            return self._watch.call(function, args, kwargs)
        self._entered.append(function)
        try:
            with self:
                return inner(*args, **kwargs)
        finally:
            self._entered.pop()


class _Below(TorchDispatchMode):
    def __init__(self, watch: OperatorWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        output = op(*args, **kwargs)
        self._watch.dispatched(op, args, kwargs, output)
        return output


def _followed(function: Any) -> Any:
    """The body of a function of torch's, to be run with the mode on; None for others.

    Such a function asks first whether a mode is on, and hands itself over to it if so. In a copy of it, the answer is no.
    """
    if type(function) is not types.FunctionType or function.__module__ not in _IN_PYTHON:
        return None
    answers = {name: _never for name in function.__globals__ if name.startswith("has_torch_function")}
    copy = types.FunctionType(
        function.__code__, {**function.__globals__, **answers}, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _never(*_: Any) -> bool:
    return False


_IN_PYTHON = ("torch.nn.functional", "torch.functional", "torch._tensor", "torch.autograd")
_CALL = nn.Module._call_impl.__code__
_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
_CAST_INPUTS = cast_inputs.__code__
_ACCUMULATES = 2**63
_TO_COPY = torch.ops.aten._to_copy.default
_INSIDE = {
    "_log_softmax": "log_softmax", "_softmax": "softmax", "convolution": "_convolution", "nll_loss_forward": "nll_loss",
    "nll_loss2d_forward": "nll_loss2d",
}  # fmt: skip
"""What a composite operator calls, by what is seen of it below autocast."""
_MOVES_ONLY = frozenset({
    "clone", "copy_", "_unsafe_view", "detach", "alias", "lift_fresh", "lift_fresh_copy", "_to_copy", "empty", "empty_like",
    "empty_strided", "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "zeros", "zeros_like", "ones",
    "ones_like", "full", "full_like", "scalar_tensor", "fill_", "zero_", "resize_", "set_", "_local_scalar_dense",
    "select_backward", "slice_backward",
})  # fmt: skip


@functools.cache
def _computes(op: Any) -> bool:
    """Whether it does more than move, make or look at tensors."""
    returns = op._schema.returns
    is_view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    return not is_view and _name_of(op) not in _MOVES_ONLY


@functools.cache
def _name_of(op: Any) -> str:
    return str(op._schema.name).rpartition("::")[2]


def _is_cast(op: Any, args: Any, output: Any) -> bool:
    """From one floating-point format to another."""
    if op is not _TO_COPY or not isinstance(args[0], torch.Tensor):
        return False
    return bool(args[0].dtype != output.dtype and args[0].is_floating_point() and output.is_floating_point())


def _accumulates(op: Any, node: Any, args: Any) -> bool:
    """Whether autograd adds up the gradients that reach a tensor from several sides, which it does in the name of the last."""
    if _name_of(op) not in ("add", "add_") or hasattr(type(node), "_forward_cls"):
        return False
    return all(isinstance(arg, torch.Tensor) and arg.dtype == args[0].dtype and arg.shape == args[0].shape for arg in args)


def _formats(value: Any, *, floating: bool = True) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and (not floating or leaf.is_floating_point() or leaf.is_complex()):
            found[format_name(leaf.dtype)] = None
    return tuple(found)


def _function_of(node: Any) -> str:
    """The custom autograd Function of the user's whose backward a node is; empty for others."""
    function = getattr(type(node), "_forward_cls", None)
    return "" if function is None or function.__module__.startswith("torch.") else str(function.__name__)


def _function_around() -> str:
    """The custom autograd Function in whose code this is called, if no module is called in between."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _CALL:
        if frame.f_code is _APPLY:
            kind = frame.f_locals.get("cls")
            return "" if kind is None or kind.__module__.startswith("torch.") else str(kind.__name__)
        frame = frame.f_back
    return ""


def _casts_to_keep() -> bool:
    """Whether the cast is that of the inputs of a layer that is kept in FP32."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _CALL:
        if frame.f_code is _CAST_INPUTS:
            return True
        frame = frame.f_back
    return False
