"""Code that was written for CUDA only, run on the CPU."""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from amp_widgets.capture.patches import Patches


def on_cpu(*, cuda_available: Callable[[], bool] = torch.cuda.is_available) -> OnCpu:
    """For the duration of a ``with`` block, run the CUDA-only code in it on the CPU.

    ``with on_cpu() as cpu:`` maps, on the thread that entered it, on the threads that are started from there, and nowhere else:

    - ``Tensor.cuda``, ``Module.cuda``, ``.to("cuda")``: a copy on the CPU, in autograd's graph, as the transfer would be; a
      change in place never reaches the original.
    - ``device="cuda"`` (also ``"cuda:1"``, ``1``, ``torch.device("cuda")``) of every function that makes tensors and of modules;
      ``with torch.device("cuda")``, ``torch.set_default_device``, ``torch.Generator``, the devices in ``torch.load``.
    - ``autocast("cuda")`` in all its spellings, with CUDA's default dtype, fp16; ``GradScaler`` made for CUDA, enabled.
    - ``torch.cuda.Event``: it measures real time, on the clock of the CPU, in milliseconds as on CUDA. ``torch.cuda.Stream``: all
      streams are the same, since the CPU has done everything when a call returns; what waits has nothing to wait for.
    - ``torch.cuda.get_rng_state`` and ``set_rng_state``: those of the CPU's generator, which is the one that is used.
    - ``torch.cuda.FloatTensor(...)`` and its like, also in ``Tensor.type``.
    - ``torch.cuda.synchronize``, ``empty_cache``, ``set_device``, ``torch.cuda.device``, the resets of memory statistics, NVTX:
      they do nothing.

    ``torch.compile`` compiles for the CPU; what is not mapped there is a move in a checkpointed part of a compiled function, for
    which torch raises its own error. Properties of a device are not made up: asking for them fails as without the block,
    ``get_device_name`` says that there is none, and memory statistics are torch's own, zero.

    The numbers are bit for bit those of the same code written for ``"cpu"``. Tensors say of themselves what is true
    (``x.device`` is ``cpu``, ``x.is_cuda`` and ``torch.cuda.is_available()`` are false); thus ``y.to(x.device)`` and ``y.to(x)``
    are no copies. Objects made in the block (an autocast region that is kept, a scaler) go on working on the CPU after it.

    It is undone at the end, also after an exception or an interrupt. Where CUDA is available nothing is done at all.

    Parameters
    ----------
    cuda_available
        Whether there is a CUDA device, asked when the block is entered.

    Returns
    -------
    OnCpu
        The context manager; its `active` says whether the code runs on the CPU instead.
    """
    return OnCpu(cuda_available)


class OnCpu:
    """What `on_cpu` returns.

    Attributes
    ----------
    active
        Whether CUDA-only code runs on the CPU at the moment.
    """

    def __init__(self, cuda_available: Callable[[], bool]) -> None:
        self.active = False
        self._cuda_available = cuda_available
        self._patches = Patches()
        self._mode = _CpuMode()
        self._thread_ids: set[int] = set()  # where the mapping applies
        self._default_device: Any = None  # the DeviceContext of torch.set_default_device at entry
        self._mapped_contexts: list[DeviceContext] = []

    def __enter__(self) -> OnCpu:
        if self._cuda_available():
            return self
        _load_compiler()
        try:
            self._thread_ids.add(threading.get_ident())
            self._default_device = _default_device_context()
            self._replace_all()
            self._mode.on = True
            self._mode.__enter__()
            self.active = True
        except BaseException:
            self._undo()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._undo()

    def _undo(self) -> None:
        interrupt: KeyboardInterrupt | None = None
        for undo in (self._deactivate, self._restore_default_device, self._patches.restore):
            while True:  # each of them may be broken off by an interrupt and done again
                try:
                    undo()
                    break
                except KeyboardInterrupt as error:
                    interrupt = error
        if interrupt is not None:
            raise interrupt

    def _deactivate(self) -> None:
        self.active = False
        self._mode.on = False  # it stays on the stacks of threads that go on
        _remove_mode(self._mode)
        self._thread_ids.clear()  # from now on, every replacement that is still around behaves like the original

    def _restore_default_device(self) -> None:
        if any(context is _default_device_context() for context in self._mapped_contexts):
            before = self._default_device
            torch.set_default_device(None if before is None else before.device)
        self._mapped_contexts.clear()
        self._default_device = None

    def _applies(self) -> bool:
        return threading.get_ident() in self._thread_ids

    # ---- what is replaced ----

    def _replace_all(self) -> None:
        amp = torch.amp.autocast_mode
        self._replace(amp.autocast, "__init__", self._autocast_init)
        self._replace(torch.amp.grad_scaler.GradScaler, "__init__", self._scaler_init)
        # custom_fwd and custom_bwd ask for the state of the region they are in
        self._replace(torch, "is_autocast_enabled", self._is_autocast_enabled)
        self._replace(torch, "get_autocast_dtype", self._get_autocast_dtype)
        # the compiler saves the state with those two and puts it back with these
        self._replace(torch, "set_autocast_enabled", self._set_autocast_enabled)
        self._replace(torch, "set_autocast_dtype", self._set_autocast_dtype)
        self._replace(amp, "_cast", _cast)
        self._replace(DeviceContext, "__init__", self._device_context_init)
        self._replace(torch.serialization, "default_restore_location", _restore_location)
        self._replace(torch._C._nn, "_parse_to", _parse_to)  # what Module.to reads its arguments with
        self._replace(torch.autograd, "_engine_run_backward", self._run_backward)
        self._patches.replace(torch, "Generator", _generator_class(torch.Generator, self._applies))
        self._replace(threading.Thread, "start", self._start_thread)
        for name in _NOTHING_TO_DO:
            for module in (torch.cuda, torch.cuda.memory, torch.cuda.nvtx):
                if name in vars(module):
                    self._replace(module, name, _do_nothing)
        for name in ("current_device", "_exchange_device", "_maybe_exchange_device"):  # the last two: what torch.cuda.device does
            self._replace(torch.cuda, name, _first_device)
        self._replace(torch.cuda, "get_device_name", _device_name)
        self._replace(torch.cuda.Event, "__new__", _new_event)
        self._replace(torch.cuda.Stream, "__new__", _new_stream)
        for name in ("current_stream", "default_stream"):
            self._replace(torch.cuda, name, _the_stream)
        self._replace(torch.Tensor, "record_stream", _do_nothing)
        for name, mapped in _RANDOM_STATE.items():
            for module in (torch.cuda, torch.cuda.random):
                self._replace(module, name, mapped)
        for name, original in list(vars(torch.cuda).items()):
            if type(original) is type(torch.FloatTensor) and hasattr(torch, name):
                self._patches.replace(torch.cuda, name, _TensorType(original, getattr(torch, name), self._applies))

    def _replace(self, owner: Any, name: str, mapped: Callable[..., Any]) -> None:
        """Replace a function by ``mapped(original, *args, **kwargs)``, which is called only where the mapping applies."""
        original = getattr(owner, name, None)
        if original is None:  # another version of torch; what depends on it fails as it does without CUDA
            return

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            # what is being compiled runs where the mode is on the stack; get_ident cannot be compiled
            if not torch.compiler.is_dynamo_compiling() and not self._applies():
                return original(*args, **kwargs)
            return mapped(original, *args, **kwargs)

        # between the graphs of a compiled function these are called as they are; they would be compiled like the user's code
        self._patches.replace(owner, name, torch.compiler.disable(replacement) if name in _NEVER_COMPILED else replacement)

    def _autocast_init(self, original: Any, region: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type = "cpu"
            given = args[0] if args else kwargs.get("dtype")
            if given is None:
                dtype = torch.get_autocast_dtype("cuda")  # replaced as well
                if args:
                    args = (dtype, *args[1:])
                else:
                    kwargs["dtype"] = dtype
        original(region, device_type, *args, **kwargs)

    def _scaler_init(self, original: Any, scaler: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        original(scaler, _mapped(device), *args, **kwargs)

    def _is_autocast_enabled(self, original: Any, *args: Any, **kwargs: Any) -> bool:
        # only where CUDA is named: without an argument torch means CUDA too, and decides by it which kernels to take on the CPU
        return bool(original(*map(_mapped, args), **kwargs))

    def _set_autocast_enabled(self, original: Any, *args: Any) -> None:
        if len(args) == 2:  # without a device torch means CUDA, see above
            args = (_mapped(args[0]), args[1])
        original(*args)

    def _get_autocast_dtype(self, original: Any, device_type: str) -> Any:
        # inside a region CUDA's dtype is that of the region; outside it is fp16, or what torch.set_autocast_dtype made it
        inside = device_type == "cuda" and torch.is_autocast_enabled("cpu")
        return original("cpu" if inside else device_type)

    def _set_autocast_dtype(self, original: Any, device_type: str, dtype: Any) -> None:
        inside = device_type == "cuda" and torch.is_autocast_enabled("cpu")
        original("cpu" if inside else device_type, dtype)

    def _device_context_init(self, original: Any, context: DeviceContext, device: Any) -> None:
        original(context, _mapped(device))
        if _is_cuda(device):
            self._mapped_contexts.append(context)

    def _run_backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        # Tensor.backward and torch.autograd.grad run with all function modes suspended, but recomputed layers and hooks run in it
        with self._mode:
            return original(*args, **kwargs)

    def _start_thread(self, original: Any, thread: threading.Thread) -> None:
        # function modes belong to a thread, so that ours has to be entered on the new one
        had = vars(thread).get("run")
        run = thread.run

        def put_back() -> None:
            if had is None:
                vars(thread).pop("run", None)
            else:
                vars(thread)["run"] = had

        def mapped_run() -> None:
            put_back()
            self._run_mapped(run)

        vars(thread)["run"] = mapped_run
        try:
            original(thread)
        except BaseException:
            put_back()
            raise

    def _run_mapped(self, run: Callable[[], None]) -> None:
        thread_id = threading.get_ident()
        self._thread_ids.add(thread_id)
        try:
            if not self.active:  # the block ended before the thread came to run
                self._thread_ids.discard(thread_id)
            with self._mode:
                run()
        finally:
            self._thread_ids.discard(thread_id)  # the next thread may get the same


class _CpuMode(TorchFunctionMode):
    """Maps devices in the arguments of torch's functions and of the methods of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.on = False  # it may be on a stack without being wanted: on that of a thread that goes on, or after an interrupt

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # torch.compile traces this function too: nothing in it may be what it cannot trace
        kwargs = kwargs or {}
        if not self.on:
            return func(*args, **kwargs)
        if func is torch.Tensor.cuda:
            return _cuda(*args, **kwargs)
        if func is torch.Tensor.to:
            return _to(args, kwargs)
        if func is torch.Tensor.pin_memory:
            return args[0].clone()
        if func is torch.Tensor.type:
            return _type(args, kwargs)
        if not kwargs or func is torch.device:  # torch.device("cuda") stays what it is; who uses it is mapped
            return func(*args, **kwargs)
        if kwargs.get("pin_memory") is True:
            kwargs = kwargs | {"pin_memory": False}
        if _is_cuda(kwargs.get("device")):
            kwargs = kwargs | {"device": "cpu"}
            if func is torch.as_tensor:
                return func(*args, **kwargs).clone()  # on the CPU it may share the memory of its argument
            if func is torch.asarray and kwargs.get("copy") is None:
                kwargs["copy"] = True
        return func(*args, **kwargs)


_NOTHING_TO_DO = (
    "synchronize",
    "empty_cache",
    "ipc_collect",
    "set_device",
    "reset_peak_memory_stats",
    "reset_accumulated_memory_stats",
    "init",
    "set_stream",
    "mark", "range_push", "range_pop", "range_start", "range_end",
)  # fmt: skip


_NEVER_COMPILED = ("__init__", "__new__", "set_autocast_enabled", "set_autocast_dtype", "_engine_run_backward", "start")


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool) and device >= 0  # an index means a CUDA device


def _mapped(device: Any) -> Any:
    return "cpu" if _is_cuda(device) else device


def _cuda(
    tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, *, memory_format: Any = torch.preserve_format
) -> torch.Tensor:
    return tensor.to("cpu", copy=True, memory_format=memory_format)


def _to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``Tensor.to(device, dtype, non_blocking, copy)``, each by position or by name."""
    if len(args) > 1 and _is_cuda(args[1]):
        args = (args[0], "cpu", *args[2:])
    elif _is_cuda(kwargs.get("device")):
        kwargs = kwargs | {"device": "cpu"}
    else:
        return torch.Tensor.to(*args, **kwargs)
    if len(args) > 4:
        args = (*args[:4], True, *args[5:])
    else:
        kwargs = kwargs | {"copy": True}
    return torch.Tensor.to(*args, **kwargs)


def _type(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``Tensor.type(dtype, non_blocking)``, the type by its class, its name or its dtype."""
    wanted: Any = args[1] if len(args) > 1 else kwargs.get("dtype")
    if isinstance(wanted, str) and wanted.startswith("torch.cuda."):
        wanted = getattr(torch.cuda, wanted.removeprefix("torch.cuda."), wanted)
    if getattr(wanted, "is_cuda", False) and wanted.layout is torch.strided:
        return torch.Tensor.to(args[0], "cpu", wanted.dtype, copy=True)
    return torch.Tensor.type(*args, **kwargs)


def _cast(original: Any, value: Any, device_type: str, dtype: Any) -> Any:
    return original(value, _mapped(device_type), dtype)


def _restore_location(original: Any, storage: Any, location: str) -> Any:
    return original(storage, _mapped(location))


def _parse_to(original: Any, *args: Any, **kwargs: Any) -> Any:
    # an index alone asks torch for the accelerator that is not there; what comes out goes to Tensor.to
    if args and isinstance(args[0], int) and _is_cuda(args[0]):
        args = (f"cuda:{args[0]}", *args[1:])
    return original(*args, **kwargs)


def _do_nothing(original: Any, *args: Any, **kwargs: Any) -> None:
    pass


def _first_device(original: Any, *args: Any) -> int:
    return 0


def _device_name(original: Any, device: Any = None) -> str:
    return "cpu (no CUDA device: --cpu)"


def _get_rng_state(original: Any, device: Any = "cuda") -> torch.Tensor:
    return torch.get_rng_state()


def _get_rng_state_all(original: Any) -> list[torch.Tensor]:
    return [torch.get_rng_state()]


def _set_rng_state(original: Any, new_state: torch.Tensor, device: Any = "cuda") -> None:
    torch.set_rng_state(new_state)


def _set_rng_state_all(original: Any, new_states: Iterable[torch.Tensor]) -> None:
    for state in new_states:
        torch.set_rng_state(state)


def _initial_seed(original: Any) -> int:
    return torch.initial_seed()


_RANDOM_STATE: dict[str, Callable[..., Any]] = {
    "get_rng_state": _get_rng_state,
    "get_rng_state_all": _get_rng_state_all,
    "set_rng_state": _set_rng_state,
    "set_rng_state_all": _set_rng_state_all,
    "initial_seed": _initial_seed,
}


class _HostEvent:
    """Stands in for ``torch.cuda.Event``: the CPU has done everything before it when it is recorded."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._enable_timing = enable_timing
        self._recorded_s: float | None = None

    def record(self, stream: Any = None) -> None:
        self._recorded_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: _HostEvent) -> float:
        """Milliseconds from this event to `end_event`; the errors are those of ``torch.cuda.Event``."""
        if not (self._enable_timing and end_event._enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._recorded_s is None or end_event._recorded_s is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event._recorded_s - self._recorded_s) * 1e3


class _HostStream:
    """Stands in for ``torch.cuda.Stream``: there is only one order in which the CPU does things, so all of them are equal."""

    device = torch.device("cpu")

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        event = _HostEvent() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> _HostStream:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _HostStream)

    def __hash__(self) -> int:
        return hash(_HostStream)


def _new_event(original: Any, kind: type, enable_timing: bool = False, *args: Any, **kwargs: Any) -> _HostEvent:
    return _HostEvent(enable_timing)


def _new_stream(original: Any, kind: type, *args: Any, **kwargs: Any) -> _HostStream:
    return _HostStream()


def _the_stream(original: Any, device: Any = None) -> _HostStream:
    return _HostStream()


class _TensorType:
    """Stands in for a class like ``torch.cuda.FloatTensor``: makes tensors of the one for the CPU."""

    def __init__(self, original: Any, on_cpu: Any, applies: Callable[[], bool]) -> None:
        self._original = original
        self._on_cpu = on_cpu
        self._applies = applies

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._on_cpu if self._applies() else self._original)(*args, **kwargs)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self._original)

    def __getattr__(self, name: str) -> Any:  # dtype, layout, is_cuda
        return getattr(self._original, name)

    def __repr__(self) -> str:
        return repr(self._original)


def _generator_class(original: type, applies: Callable[[], bool]) -> type:
    """Stands in for ``torch.Generator``: makes generators of that class, which pass for its own."""

    class Meta(type(original)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

    class Generator(original, metaclass=Meta):  # type: ignore[misc]
        def __new__(cls, device: Any = "cpu") -> Any:
            return original(_mapped(device) if applies() else device)

    return Generator


def _load_compiler() -> None:
    """Have ``torch.compile`` make its tables of torch's functions, which must not get ours. (Optimizers import it too.)"""
    with contextlib.suppress(ImportError, AttributeError):  # another version of torch
        rules = importlib.import_module("torch._dynamo.trace_rules")
        variables = importlib.import_module("torch._dynamo.variables.torch")
        torch.overrides.resolve_name(torch.add)
        rules.get_torch_obj_rule_map()
        rules.get_tensor_method()
        variables.get_overridable_functions()
        variables.TorchInGraphFunctionVariable._get_handlers()


def _default_device_context() -> Any:
    """The ``DeviceContext`` that ``torch.set_default_device`` made on this thread, if any."""
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


def _remove_mode(mode: TorchFunctionMode) -> None:
    """Take `mode` off the stack wherever it is, leaving the others."""
    above: list[Any] = []
    try:
        while any(other is mode for other in torch.overrides._get_current_function_mode_stack()):
            above.append(torch.overrides._pop_mode())
    finally:
        for other in reversed(above):
            if other is not mode:
                torch.overrides._push_mode(other)
