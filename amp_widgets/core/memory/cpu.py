"""Memory of a step on a CPU: the bytes of the live tensors, counted op by op."""

from __future__ import annotations

import inspect
import math
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._C._dynamo import eval_frame
from torch._ops import OpOverload
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from amp_widgets.core.memory.compiled import REASON, CompiledCode, is_compiled
from amp_widgets.core.memory.reading import NOT_MEASURED, MemoryReading
from amp_widgets.core.memory.storages import LiveStorages


class CpuMeter:
    """Counts the bytes of every CPU tensor that a step touches, exactly, by looking at each op (a dispatch mode).

    What counts, from its first sight until it is freed: parameters, buffers, gradients and optimizer state, the arguments
    and the results of every op in a step. Views count once. What a kernel allocates for itself and frees again is not seen,
    nor are ops inside of a higher-order operator (``torch.cond`` and the like); other threads' tensors count from the
    moment that they are used in a step. The model and the optimizers are not kept alive.

    A step is not measured, and reads NaN, when another dispatch mode is active as it begins, when compiled code runs in it,
    and when it is left without an end; `unmeasured_because` says so. A step that was left, by an exception in another
    notebook cell for instance, is noticed by the next op after a pause, which takes the mode off; nothing has to be called.

    Parameters
    ----------
    model, optimizers
        Whose tensors count from the start of a step.
    clock
        Seconds; for tests.
    """

    def __init__(self, model: nn.Module, optimizers: Iterable[Optimizer], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._step: _StepMode | None = None
        self._model: weakref.ref[nn.Module] | None = weakref.ref(model)
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._clock = clock
        self._storages = LiveStorages()
        self._why_not: str | None = None
        self.overall_peak_bytes = math.nan
        self.unmeasured_steps = 0
        self.unmeasured_because: str | None = None
        """Why the last step that was not measured was not."""
        _keep_dynamo_out()

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

    def watch(self, model: nn.Module) -> None:
        """Count this model's tensors from the start of the next step on."""
        self._model = weakref.ref(model)

    def begin(self) -> None:
        """Count what is there, and watch each op from now on."""
        self.abandon()
        model = self._model() if self._model is not None else None
        if model is None:
            return
        self._why_not = _why_no_longer(model)
        if self._why_not is not None:
            self._skip(self._why_not)
            return
        _remove_from_stack(lambda mode: isinstance(mode, _StepMode) and mode.over)
        if torch._C._len_torch_dispatch_stack() > 0:
            # Ours would come to lie on top of it, and its exit would take off ours.
            self._skip("another dispatch mode was active when the step began")
            return
        self._count_state(model)
        self._step = step = _StepMode(self._storages, self._clock)
        torch._C._push_on_torch_dispatch_stack(step)

    def end(self) -> MemoryReading:
        """Bytes alive now, and the most that were alive at one time since `begin`; NaN where that was not measured."""
        step, self._step = self._step, None
        if step is None:
            return NOT_MEASURED
        if not step.leave():
            self._skip("the step was interrupted, or did not end on the thread where it began")
            return NOT_MEASURED
        if step.compiled_code.stop():
            self._skip(f"compiled code ran in the step, and {REASON}")
            return NOT_MEASURED
        self._storages.settle()
        peak = float(step.peak_bytes)
        if not self.overall_peak_bytes >= peak:  # also when it is NaN
            self.overall_peak_bytes = peak
        return MemoryReading.of({"cpu": (float(self._storages.bytes), peak, math.nan)})

    def abandon(self) -> None:
        """Leave the step in progress unmeasured. Called from another thread, the mode is taken off by the next op."""
        step, self._step = self._step, None
        if step is not None:
            step.leave()
            self._skip("the step did not end")

    def close(self) -> None:
        """Abandon a step in progress and forget all storages, the model and the optimizers."""
        self.abandon()
        self._model = None
        self._optimizers = []
        self._storages.clear()

    def __del__(self) -> None:
        step: _StepMode | None = getattr(self, "_step", None)
        if step is not None:
            step.over = True  # the next op takes it off
            step.compiled_code.stop()

    def _count_state(self, model: nn.Module) -> None:
        tensors: list[Any] = []
        with torch._C.DisableTorchFunction():  # a function mode of the user's is not to hear of this
            for module in model.modules():
                if module._parameters:
                    tensors += module._parameters.values()
                if module._buffers:
                    tensors += module._buffers.values()
            tensors += [tensor.grad for tensor in tensors if tensor is not None and tensor.is_leaf]
            for reference in self._optimizers:
                optimizer = reference()
                if optimizer is not None:
                    for state in optimizer.state.values():
                        if type(state) is dict:
                            tensors += state.values()
                        else:
                            tensors.append(state)
            self._storages.recount()
            self._storages.see(*tensors)

    def _skip(self, reason: str) -> None:
        self.unmeasured_steps += 1
        self.unmeasured_because = reason


def why_no_dispatch_modes() -> str | None:
    """Why `CpuMeter` cannot work with this version of torch, or None."""
    needed = (
        (torch._C, "_push_on_torch_dispatch_stack"),
        (torch._C, "_pop_torch_dispatch_stack"),
        (torch._C, "_len_torch_dispatch_stack"),
        (torch._C, "_get_dispatch_stack_at"),
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
        parameter = next(model.parameters(), None)
        device = None if parameter is None else parameter.device
    if device is not None and device.type != "cpu":
        return f"the model was on the cpu, and is now on {device}"
    return None


PAUSE_S = 0.005
"""After a pause between two ops longer than this, the call stack is looked at for whether the step is still going on. That
takes some microseconds, hence at most 0.1 % of the time."""


class _StepMode(TorchDispatchMode):
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
        self._file = next(iter(_files_running()), None)

    def leave(self) -> bool:
        """End the step; whether it was watched until now."""
        was_over, self.over = self.over, True
        self.compiled_code.stop()
        if self._thread_id != threading.get_ident():
            return False  # the next op of that thread takes it off
        return self._take_off() and not was_over

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions go on running compiled; the default would turn them eager, without a word."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No wrapper around ``__torch_dispatch__``, which costs 1 µs an op: `_keep_dynamo_out` does the same for nothing."""
        return False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the op, then count its arguments and results."""
        now_s = self._clock()
        if self.over or (now_s - self._last_op_s > PAUSE_S and not self._goes_on()):
            return self._run_last(func, args, kwargs)
        self._last_op_s = now_s
        if func is _ITEM and type(args[0]) is torch.Tensor and args[0].is_cpu:
            return _item(args[0])  # makes no tensor, and run from here a profiler would count it twice: once more than the user's
        op = func._op if type(func) is OpOverload else func  # what its __call__ calls
        storages = self._storages
        if kwargs:
            out = op(*args, **kwargs)
            storages.see(out, *args, *kwargs.values())
        else:
            out = op(*args)
            storages.see(out, *args)
        if storages.bytes > self.peak_bytes:
            self.peak_bytes = storages.bytes
        return out

    def _goes_on(self) -> bool:
        """Whether the cell or script in which the step began is still on the call stack."""
        if self._file is None or self._thread_id != threading.get_ident():
            return True  # there is nothing to tell it by
        return self._file in _files_running()

    def _run_last(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Run an op after the end of the step, and take the mode off.

        While a mode is in ``__torch_dispatch__``, torch has it off the stack, and puts it back unconditionally. It can thus
        only be taken off afterwards: by what is left in the dictionary of arguments, which torch frees a moment later.
        """
        self.over = True
        self.compiled_code.stop()
        kwargs = {} if kwargs is None else kwargs
        out = func(*args, **kwargs)
        kwargs["amp_widgets"] = _Farewell(self._take_off)
        return out

    def _take_off(self) -> bool:
        return _remove_from_stack(lambda mode: mode is self)


_ITEM = torch.ops.aten._local_scalar_dense.default


def _item(tensor: torch.Tensor) -> Any:
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


def _remove_from_stack(unwanted: Callable[[Any], bool]) -> bool:
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


def _stack() -> list[Any]:
    return [torch._C._get_dispatch_stack_at(index) for index in range(torch._C._len_torch_dispatch_stack())]


def _files_running() -> list[str]:
    """File names of the module-level code on this thread's call stack, innermost first.

    Each statement of a notebook cell is run for itself; what they have in common, and no two cells have, is the file name.
    """
    files = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_flags & _FUNCTION:
            files.append(code.co_filename)
        frame = frame.f_back
    return files


_FUNCTION = inspect.CO_NEWLOCALS | inspect.CO_OPTIMIZED


def _keep_dynamo_out() -> None:
    """Tell ``torch.compile`` not to compile `_StepMode` when an op is run between two compiled pieces of a function."""
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(_StepMode.__torch_dispatch__.__code__, strategy)
