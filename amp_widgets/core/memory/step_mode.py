"""The dispatch mode that counts the live bytes of one step, op by op, and torch's stack of such modes."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._C._dynamo import eval_frame
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from amp_widgets.core.layers import named_layers
from amp_widgets.core.memory.compiled import CompiledCode
from amp_widgets.core.memory.death import Death, ErrorReference, is_out_of_memory, requested_bytes_of
from amp_widgets.core.memory.storages import LiveStorages

PAUSE_S = 0.005
"""After a pause between two ops longer than this, the call stack is looked at for whether the step is still going on. That
takes some microseconds, hence at most 0.1 % of the time."""


class StepMode(TorchDispatchMode):
    """Sees each op of one step, and is thrown away with it.

    It is pushed and popped without its ``__enter__`` and ``__exit__``: those keep flags that are only right when modes are
    left in the reverse order of their entering, which cannot be promised here.
    """

    supports_higher_order_operators = True

    def __init__(self, storages: LiveStorages, clock: Callable[[], float]) -> None:
        super().__init__()
        self.over = False
        self.peak_bytes = storages.bytes
        self.compiled_code = CompiledCode()
        self._storages = storages
        self._thread_id = threading.get_ident()
        self._clock = clock
        self._last_op_s = clock()
        self._file = next(files_running(), None)
        self.death: Death | None = None
        """What is known, if memory ran out in an op."""
        self.on_death: Callable[[], None] | None = None
        self.model: Callable[[], nn.Module | None] | None = None
        """Whose layers are named then."""

    def stop(self) -> None:
        """Count no more; the next op takes the mode off. From any thread."""
        self.over = True
        self.compiled_code.stop()

    def leave(self) -> bool:
        """End the step; whether it was watched until now."""
        was_over = self.over
        self.stop()
        if self._thread_id != threading.get_ident():
            return False  # the next op of that thread takes it off
        return self._take_off() and not was_over

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions go on running compiled; the default would turn them eager, without a word."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No wrapper around ``__torch_dispatch__``, which costs 1 µs an op: `keep_dynamo_out` does the same for nothing."""
        return False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the op, then count its arguments and results."""
        now_s = self._clock()
        if self.over or (now_s - self._last_op_s > PAUSE_S and not self._goes_on()):
            return self._run_last(func, args, kwargs)
        self._last_op_s = now_s
        if func is ITEM and type(args[0]) is torch.Tensor and args[0].is_cpu:
            return item(args[0])  # makes no tensor, and run from here a profiler would count it twice: once more than the user's
        op = func._op if type(func) is OpOverload else func  # what its __call__ calls
        storages = self._storages
        try:  # costs nothing while nothing is raised
            if kwargs:
                out = op(*args, **kwargs)
                storages.see(out, *args, *kwargs.values())
            else:
                out = op(*args)
                storages.see(out, *args)
        except RuntimeError as error:
            if is_out_of_memory(error):
                self._die(self._death(func, error))
            raise
        if storages.bytes > self.peak_bytes:
            self.peak_bytes = storages.bytes
        return out

    def _die(self, death: Death) -> None:
        """Memory ran out; the step may go on, if the user catches the error."""
        self.death = death
        if self.on_death is not None:
            self.on_death()

    def _death(self, op: Any, error: BaseException) -> Death:
        """What can be told of an allocator's error in an op by looking at the call stack."""
        in_backward = torch._C._current_graph_task_id() != -1
        modules = modules_being_called()
        return Death(
            cause="allocator",
            device="cpu",
            requested_bytes=requested_bytes_of(error),
            allocated_bytes=float(self._storages.bytes),
            phase="recompute" if in_backward and modules else "backward" if in_backward else "forward" if modules else "",
            layer=self._name_of(modules[-1]) if modules else "",
            operator=operator_name(op),
            error=ErrorReference(error),
        )

    def _name_of(self, module: nn.Module) -> str:
        model = None if self.model is None else self.model()
        layers = {} if model is None else named_layers(model)
        return next((name for name, layer in layers.items() if layer is module), "")

    def _goes_on(self) -> bool:
        """Whether the cell or script in which the step began is still on the call stack."""
        if self._file is None or self._thread_id != threading.get_ident():
            return True  # there is nothing to tell it by
        return self._file in files_running()

    def _run_last(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Run an op after the end of the step, and take the mode off.

        While a mode is in ``__torch_dispatch__``, torch has it off the stack, and puts it back unconditionally. It can thus
        only be taken off afterwards: by what is left in the dictionary of arguments, which torch frees a moment later.
        """
        self.stop()
        kwargs = {} if kwargs is None else kwargs
        out = func(*args, **kwargs)
        kwargs["amp_widgets"] = _Farewell(self._take_off)
        return out

    def _take_off(self) -> bool:
        return remove_from_stack(lambda mode: mode is self)


ITEM = torch.ops.aten._local_scalar_dense.default


def item(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:  # which NumPy does not have
        tensor = tensor.float()
    return tensor.resolve_conj().resolve_neg().numpy().item()


class _Farewell:
    """Calls a function when it is freed."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def __del__(self) -> None:
        self._call()


def remove_from_stack(unwanted: Callable[[Any], bool]) -> bool:
    """Take modes off this thread's stack, from below others if need be; whether there was one."""
    above = []
    found = False
    while any(unwanted(mode) for mode in _stack()):
        mode = torch._C._pop_torch_dispatch_stack(None)
        if unwanted(mode):
            found = True
        else:
            above.append(mode)
    for mode in reversed(above):
        torch._C._push_on_torch_dispatch_stack(mode)
    return found


def push_below(mode: TorchDispatchMode) -> str | None:
    """Put a mode on this thread's stack, below those that are there; why that cannot be, else.

    An op comes to the modes above first, and to this one with what they make of it. Each of them finds itself at the top when
    it is left. Torch's own modes for tracing lie below all others: what runs under them makes no tensors of its own.
    """
    stack = _stack()
    own = next((type(other).__name__ for other in stack if getattr(other, "_mode_key", None) is not None), None)
    if own is not None:
        return f"torch's {own} was active when the step began, under which ops are traced or faked"
    above = [torch._C._pop_torch_dispatch_stack(None) for _ in stack]
    torch._C._push_on_torch_dispatch_stack(mode)
    for other in reversed(above):
        torch._C._push_on_torch_dispatch_stack(other)
    return None


def _stack() -> list[Any]:
    return [torch._C._get_dispatch_stack_at(index) for index in range(torch._C._len_torch_dispatch_stack())]


def files_running(frame: FrameType | None = None) -> Iterator[str]:
    """File names of the module-level code on this thread's call stack, or from a frame on, innermost first.

    Each statement of a notebook cell is run for itself; what they have in common, and no two cells have, is the file name.
    """
    frame = frame or sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_flags & _FUNCTION:
            yield code.co_filename
        frame = frame.f_back


def modules_being_called() -> list[nn.Module]:
    """Modules on this thread's call stack, the outermost first."""
    modules = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module):
                modules.append(module)
        frame = frame.f_back
    return modules[::-1]


def operator_name(op: Any) -> str:
    """Such as ``aten::mm``."""
    schema = getattr(op, "_schema", None)
    return str(schema.name) if schema is not None else str(op)


_CALL = nn.Module._call_impl.__code__
_FUNCTION = inspect.CO_NEWLOCALS | inspect.CO_OPTIMIZED


def keep_dynamo_out(mode: type[StepMode]) -> None:
    """Tell ``torch.compile`` not to compile a mode when an op is run between two compiled pieces of a function."""
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(mode.__torch_dispatch__.__code__, strategy)
