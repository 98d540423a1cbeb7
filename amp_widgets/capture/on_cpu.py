"""Code that was written for CUDA only, run on the CPU."""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from amp_widgets.capture.patches import Patches


def on_cpu(*, cuda_available: Callable[[], bool] = torch.cuda.is_available) -> OnCpu:
    """For the duration of a ``with`` block, run the CUDA-only code in it on the CPU.

    ``with on_cpu() as cpu:`` maps, on the thread that entered it and only there:

    - ``Tensor.cuda``, ``Module.cuda``, ``.to("cuda")``: a copy on the CPU, in autograd's graph, as the transfer would be; a
      change in place never reaches the original.
    - ``device="cuda"`` (also ``"cuda:1"``, ``1``, ``torch.device("cuda")``) of every function that makes tensors and of modules;
      ``with torch.device("cuda")``, ``torch.set_default_device``, ``torch.Generator``, the devices in ``torch.load``.
    - ``autocast("cuda")`` in all its spellings, with CUDA's default dtype, fp16; ``GradScaler`` made for CUDA, enabled.
    - ``torch.cuda.synchronize``, ``empty_cache``, ``set_device``, the resets of memory statistics: they do nothing.

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
        self._mode = _CpuMode(self._applies)
        self._thread_id: int | None = None
        self._default_device: Any = None  # the DeviceContext of torch.set_default_device at entry
        self._mapped_contexts: list[DeviceContext] = []

    def __enter__(self) -> OnCpu:
        if self._cuda_available():
            return self
        # torch imports its compiler when the first optimizer is made; its tables of functions must not get ours
        with contextlib.suppress(ImportError):
            importlib.import_module("torch._dynamo")
        try:
            self._thread_id = threading.get_ident()
            self._default_device = _default_device_context()
            self._replace_all()
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
        _remove_mode(self._mode)
        self._thread_id = None  # from now on, every replacement that is still around behaves like the original

    def _restore_default_device(self) -> None:
        if any(context is _default_device_context() for context in self._mapped_contexts):
            before = self._default_device
            torch.set_default_device(None if before is None else before.device)
        self._mapped_contexts.clear()
        self._default_device = None

    def _applies(self) -> bool:
        return threading.get_ident() == self._thread_id

    # ---- what is replaced ----

    def _replace_all(self) -> None:
        amp = torch.amp.autocast_mode
        self._replace(amp.autocast, "__init__", self._autocast_init)
        self._replace(torch.amp.grad_scaler.GradScaler, "__init__", self._scaler_init)
        # custom_fwd and custom_bwd ask for the state of the region they are in
        self._replace(torch, "is_autocast_enabled", self._is_autocast_enabled)
        self._replace(torch, "get_autocast_dtype", self._get_autocast_dtype)
        self._replace(amp, "_cast", _cast)
        self._replace(DeviceContext, "__init__", self._device_context_init)
        self._replace(torch.serialization, "default_restore_location", _restore_location)
        self._replace(torch._C._nn, "_parse_to", _parse_to)  # what Module.to reads its arguments with
        self._replace(torch.autograd, "_engine_run_backward", self._run_backward)
        self._patches.replace(torch, "Generator", _generator_class(torch.Generator, self._applies))
        for name in _NOTHING_TO_DO:
            for module in (torch.cuda, torch.cuda.memory):
                if name in vars(module):
                    self._replace(module, name, _do_nothing)
        self._replace(torch.cuda, "current_device", _first_device)

    def _replace(self, owner: Any, name: str, mapped: Callable[..., Any]) -> None:
        """Replace a function by ``mapped(original, *args, **kwargs)``, which is called only where the mapping applies."""
        original = getattr(owner, name, None)
        if original is None:  # another version of torch; what depends on it fails as it does without CUDA
            return

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            if not self._applies():
                return original(*args, **kwargs)
            return mapped(original, *args, **kwargs)

        self._patches.replace(owner, name, replacement)

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

    def _get_autocast_dtype(self, original: Any, device_type: str) -> Any:
        # inside a region CUDA's dtype is that of the region; outside it is fp16, or what torch.set_autocast_dtype made it
        inside = device_type == "cuda" and torch.is_autocast_enabled("cpu")
        return original("cpu" if inside else device_type)

    def _device_context_init(self, original: Any, context: DeviceContext, device: Any) -> None:
        original(context, _mapped(device))
        if _is_cuda(device):
            self._mapped_contexts.append(context)

    def _run_backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        # Tensor.backward and torch.autograd.grad run with all function modes suspended, but recomputed layers and hooks run in it
        with self._mode:
            return original(*args, **kwargs)


class _CpuMode(TorchFunctionMode):
    """Maps devices in the arguments of torch's functions and of the methods of tensors."""

    def __init__(self, applies: Callable[[], bool]) -> None:
        super().__init__()
        self._applies = applies

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._applies():  # left on the stack by an interrupt
            return func(*args, **kwargs)
        if func is torch.Tensor.cuda:
            return _cuda(*args, **kwargs)
        if func is torch.Tensor.to:
            return _to(args, kwargs)
        if func is torch.Tensor.pin_memory:
            return args[0].clone()
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
)  # fmt: skip


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


def _first_device(original: Any) -> int:
    return 0


def _generator_class(original: type, applies: Callable[[], bool]) -> type:
    """Stands in for ``torch.Generator``: makes generators of that class, which pass for its own."""

    class Meta(type(original)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

    class Generator(original, metaclass=Meta):  # type: ignore[misc]
        def __new__(cls, device: Any = "cpu") -> Any:
            return original(_mapped(device) if applies() else device)

    return Generator


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
