"""That a step ran out of memory: how it is recognised, what was known at that moment, and how the memory is really freed."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import math
import re
import sys
import types
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from amp_widgets.core.layers import named_layers
from amp_widgets.core.memory.budget import MemoryBudgetError
from amp_widgets.core.memory.step_record import StepRecord
from amp_widgets.core.threads import this_thread


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Death:
    """What was known when memory ran out. Holds no tensor.

    Attributes
    ----------
    cause
        ``"budget"``: a budget of ours; ``"allocator"``: the device's, or the operating system's, memory.
    requested_bytes
        What did not fit; NaN where not known.
    limit_bytes
        The budget, or the device's memory; NaN where not known.
    allocated_bytes
        Held before that; NaN where not known.
    phase, layer, operator, kind
        Where, and what for; ``""`` where not known.
    record
        The step until then.
    pending
        The layers in whose forward or backward pass it was, by position.
    inputs, outputs
        Of each layer that was called, by position: which lives of the record they are; empty where that was not followed.
    made_something
        Whether something is held that the step itself has made, gradients aside.
    error
        The exception, as a weak reference where it has any.
    """

    cause: Literal["budget", "allocator"]
    device: str
    requested_bytes: float = math.nan
    limit_bytes: float = math.nan
    allocated_bytes: float = math.nan
    phase: str = ""
    layer: str = ""
    operator: str = ""
    kind: str = ""
    record: StepRecord | None = None
    pending: frozenset[int] = frozenset()
    inputs: Mapping[int, frozenset[int]] = dataclasses.field(default_factory=dict)
    outputs: Mapping[int, frozenset[int]] = dataclasses.field(default_factory=dict)
    made_something: bool = False
    thread: int = dataclasses.field(default_factory=this_thread)
    error: ErrorReference | None = None

    @classmethod
    def told_by(cls, error: BaseException, device: str, model: nn.Module | None = None) -> Death:
        """What the exception alone tells, and the functions that it has left."""
        budget = isinstance(error, MemoryBudgetError)
        phase, layer = _place_by_traceback(error, model)
        return cls(
            cause="budget" if budget else "allocator",
            device=device,
            requested_bytes=requested_bytes_of(error),
            phase=phase,
            layer=layer,
            error=ErrorReference(error),
        )


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception says that memory ran out: torch's own class, or what its allocator on a CPU raises."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _ON_CPU.search(str(error)) is not None


def is_of_torchscript(error: BaseException | None) -> bool:
    """Whether an exception is what TorchScript makes of any error in a scripted function, which says nothing of its kind."""
    return type(error) is RuntimeError and "failed in the TorchScript interpreter" in str(error)


def requested_bytes_of(error: BaseException) -> float:
    """What an allocator could not give, by its message; NaN where that does not say."""
    text = str(error)
    on_cpu = _ON_CPU.search(text)
    if on_cpu is not None:
        return float(on_cpu[1])
    asked = _ASKED.search(text)
    return float(asked[1]) * _UNITS[asked[2].lower()] if asked is not None else math.nan


def errors_around() -> list[BaseException]:
    """The exceptions of torch's own by which memory ran out that somebody still keeps; takes some milliseconds."""
    return [
        candidate
        for candidate in gc.get_objects()
        if issubclass(type(candidate), torch.OutOfMemoryError) and candidate.__traceback__ is not None
    ]


class ErrorReference:
    """An exception that is not kept alive: what its frames hold is to be freed.

    torch's own class can be referenced weakly. A plain RuntimeError cannot, and is looked for among all objects, which takes
    some milliseconds.
    """

    def __init__(self, error: BaseException) -> None:
        self._weak: weakref.ref[BaseException] | None = None
        self._text = str(error)
        self._type = type(error)
        try:
            self._weak = weakref.ref(error)
        except TypeError:
            pass

    @property
    def is_weak(self) -> bool:
        """Whether asking for it costs nothing."""
        return self._weak is not None

    def __call__(self) -> BaseException | None:
        if self._weak is not None:
            return self._weak()
        for candidate in gc.get_objects():
            if type(candidate) is self._type and str(candidate) == self._text and candidate.__traceback__ is not None:
                return candidate
        return None


def clear_finished_frames(error: BaseException, *, packages: Collection[str] | None = None) -> bool:
    """Drop what the frames hold that an exception has left, as ``traceback.clear_frames`` does; whether it has left all.

    Frames that are running are passed over, and so is a generator's that only waits to go on: clearing it would end it.

    Parameters
    ----------
    packages
        Only frames of code in these packages, such as ``("torch",)``; None for all.
    """
    done = True
    cleared = []
    for frame in _frames(error):
        if packages is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] not in packages:
            continue
        if frame.f_code.co_flags & _GENERATOR and _is_suspended(frame):
            done = False
            continue
        try:
            frame.clear()
        except RuntimeError:  # it is running, or in Python 3.13 a generator's that waits
            done = False
        else:
            if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                frame.f_locals  # noqa: B018  # up to Python 3.12, whoever asked for them has left a copy, renewed by asking again
            cleared.append(frame)
    for frame in reversed(cleared):
        _clear_closure(frame)
    return done


def _clear_closure(frame: types.FrameType) -> None:
    """Drop the variables around a function that ran in a finished frame, where nobody else has the function or the variable.

    A frame keeps its function, and that the variables around it: of every module with hooks, for one, what it was called with.
    """
    held = gc.get_referents(frame)
    for place in range(len(held)):
        if type(held[place]) is not types.FunctionType or held[place].__code__ is not frame.f_code:
            continue
        if _references(held, place) > 2:  # the list's and the frame's
            continue
        closure = held[place].__closure__ or ()
        for at in range(len(closure)):
            if _references(closure, at) == 1:
                try:
                    del closure[at].cell_contents
                except ValueError:  # it is empty
                    continue


def _references(container: Sequence[Any], place: int) -> int:
    """How many references there are to an item, with the container's."""
    return sys.getrefcount(container[place]) - _COUNTING


def _frames(error: BaseException) -> Iterator[types.FrameType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def roots_of_dead_passes(error: BaseException) -> list[Any]:
    """The graph nodes from which those backward passes began that the exception has ended; not those with ``retain_graph``."""
    roots: list[Any] = []
    for frame in _frames(error):
        if frame.f_code is _RUN_BACKWARD:
            variables = frame.f_locals
            arguments = variables.get("args", ())
            if len(arguments) > 1 and arguments[1]:  # retain_graph
                continue
            roots += [getattr(root, "grad_fn", None) or getattr(root, "node", None) for root in variables.get("t_outputs", ())]
    return [root for root in roots if root is not None]


def _place_by_traceback(error: BaseException, model: nn.Module | None) -> tuple[str, str]:
    """Phase and layer, as far as the calls tell them that the exception has left; ``""`` for what they do not."""
    names = {} if model is None else {id(module): name for name, module in named_layers(model).items()}
    phase = layer = ""
    for frame in _frames(error):
        if frame.f_code is _RUN_BACKWARD:
            phase = "backward"
        elif frame.f_code is _STEP:
            phase = "optimizer"
        elif frame.f_code is _CALL:
            phase = "recompute" if phase in ("backward", "recompute") else "forward"
            layer = names.get(id(frame.f_locals.get("self")), layer)
    return phase, layer


def _is_suspended(frame: types.FrameType) -> bool:
    for candidate in gc.get_objects():
        for kind, name in _GENERATORS:
            if type(candidate) is kind and getattr(candidate, name) is frame:
                return True
    return False


_ON_CPU = re.compile(r"DefaultCPUAllocator: .*?you tried to allocate (\d+) bytes")
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|[kmgt]ib)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_CALL = nn.Module._call_impl.__code__
_STEP = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__
_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
_COUNTING = sys.getrefcount([object()][0])  # of an item that nobody has any more
_GENERATOR = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_GENERATORS: tuple[tuple[type, str], ...] = (
    (types.GeneratorType, "gi_frame"),
    (types.CoroutineType, "cr_frame"),
    (types.AsyncGeneratorType, "ag_frame"),
)
