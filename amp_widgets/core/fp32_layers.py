"""Single layers of a live model kept in FP32 under autocast, switched on and off without a trace.

How a layer's forward pass is changed, see `amp_widgets.core.class_exchange`.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from amp_widgets.core.class_exchange import Change
from amp_widgets.core.fp32_inputs import HALF, CastInputs, cast_inputs
from amp_widgets.core.layer_switch import LayerSwitch
from amp_widgets.core.layers import LayerSetting, why_not_exchanged
from amp_widgets.core.memory.compiled import frames_compiled
from amp_widgets.errors import SettingsError


def why_not_in_fp32(module: nn.Module) -> str | None:
    """The reason why `module` cannot be kept in FP32, or None."""
    reason = why_not_exchanged(module)
    if reason is not None:
        return reason
    if any(kind.__module__.startswith("torch.distributed") and "FSDP" in kind.__name__ for kind in type(module).__mro__):
        return "its parameters are sharded by FSDP, whose own mixed precision decides"
    for parameter in module.parameters():
        if nn.parameter.is_lazy(parameter):
            return "it has parameters without a shape yet (a lazy module): run the model once first"
        if parameter.dtype in HALF:
            return f"its own parameters are {str(parameter.dtype).removeprefix('torch.')}: convert them with .float() first"
    return None


def _run_in_fp32(layer: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    compiling = torch.compiler.is_compiling()
    if not compiling:
        _called.add(layer)
    device_types = [device_type for device_type in _device_types() if torch.is_autocast_enabled(device_type)]
    if not device_types:
        return call(*args, **kwargs)
    inputs = cast_inputs(args, kwargs, device_types)
    if compiling:
        output = _without_autocast(call, inputs, device_types)
    else:
        with _explained(layer):
            output = _run_watched(layer, call, inputs, device_types)
    inputs.settle()
    return output


class Fp32Layers(LayerSwitch):
    """The layers of one model that are kept in FP32.

    Such a layer runs with autocast disabled, on its fp16 and bf16 inputs cast to fp32, and so do the layers inside it; its
    outputs stay fp32. That is what a ``with torch.autocast(..., enabled=False)`` around its code and a ``.float()`` on its
    inputs would do, bit for bit, also in the recompute of a checkpoint. Where autocast is off anyway, nothing changes. A layer
    that overwrites its input in place overwrites the cast.

    Inputs are also the tensors in lists, tuples, dicts, dataclasses and other containers, see
    `amp_widgets.core.fp32_inputs.CastInputs`. What gets in by another way, as an attribute or a global variable, is cast where
    an operator refuses it.

    Parameters
    ----------
    model
        The model; wrappers around it (``torch.compile``, DataParallel, DistributedDataParallel) are seen through.

    Raises
    ------
    ModelError
        When `model` is not a module.
    """

    setting = LayerSetting(
        name="fp32_layers",
        verb="keep in FP32:",
        not_whole="for all of which autocast='fp32' does the same",
        why_not=why_not_in_fp32,
        error=SettingsError,
    )
    change = Change(word="kept in FP32", run=_run_in_fp32, rank=1)  # inside a checkpoint, which then saves the smaller inputs

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._uncalled: tuple[int, list[weakref.ref[nn.Module]]] = (0, [])

    def step_ended(self, step: int) -> None:
        """A step is over, in which no layer was switched: see `remark`."""
        on = [module for module in self._switched if self._is_on(module)]
        self._uncalled = step, [weakref.ref(module) for module in on if module not in _called]
        _called.difference_update(on)

    def remark(self) -> str | None:
        """That layers which are on were not called in the newest step, where that is so: they are in FP32 to no effect."""
        step, references = self._uncalled
        if isinstance(self._model, nn.DataParallel):  # it calls copies of them
            return None
        missed = [module for reference in references if (module := reference()) is not None and self._is_on(module)]
        if not missed or frames_compiled():  # in compiled code a call is not seen
            return None
        names = sorted(_names.get(module, type(module).__name__) for module in missed)
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return (
            f"Kept in FP32, but not called in step {step:,}: {shown}. Where another layer takes the weights and computes with "
            "them itself, keep that one in FP32 instead."
        )

    def _switch_on(self, name: str, module: nn.Module) -> None:
        _device_types()  # before torch.compile traces what asks for them
        super()._switch_on(name, module)
        _names[module] = name


_names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
_called: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The layers kept in FP32 that were called since the end of a step."""


class _CastWhereRefused(TorchFunctionMode):
    """An operator that raises an error and was given fp16 or bf16 is called again with fp32."""

    def __init__(self, device_types: list[str]) -> None:
        super().__init__()
        self._device_types = device_types

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if type(error) is not RuntimeError or "out" in kwargs:  # out of memory is another matter
                raise
            # what is overwritten stays what it is, and the others become like it
            kept = args[0] if args and _overwrites(func) and isinstance(args[0], torch.Tensor) else None
            to = torch.float32 if kept is None else kept.dtype
            if not to.is_floating_point:
                raise
            inputs = cast_inputs(args, kwargs, self._device_types, to=to, but=kept)
            if not inputs.changed:
                raise
            with contextlib.suppress(RuntimeError):
                return func(*inputs.args, **inputs.kwargs)
            raise


def _run_watched(layer: nn.Module, call: Callable[..., Any], inputs: CastInputs, device_types: list[str]) -> Any:
    if not layer.training and any(isinstance(module, _WITH_FAST_PATH) for module in layer.modules()):
        # a mode would keep them from taking it; in evaluation a second call leaves no more behind than the first
        try:
            return _without_autocast(call, inputs, device_types)
        except RuntimeError as error:
            if type(error) is not RuntimeError or not _ABOUT_DTYPES.search(str(error)):
                raise
    with _CastWhereRefused(device_types):
        return _without_autocast(call, inputs, device_types)


def _without_autocast(call: Callable[..., Any], inputs: CastInputs, device_types: list[str]) -> Any:
    if not device_types:
        return call(*inputs.args, **inputs.kwargs)
    with torch.autocast(device_types[0], enabled=False):  # the only way that torch.compile can trace any number of them
        return _without_autocast(call, inputs, device_types[1:])


@contextlib.contextmanager
def _explained(layer: nn.Module) -> Iterator[None]:
    """Have an error about dtypes say that it is a layer kept in FP32 which it comes from."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        if _ABOUT_DTYPES.search(str(error)) and not any(_KEPT in note for note in getattr(error, "__notes__", ())):
            name = _names.get(layer, "")
            error.add_note(
                f"This comes from layer {name!r} ({type(layer).__name__}), {_KEPT}: autocast is off inside of it, and its inputs "
                "are cast to fp32, but an fp16 or bf16 tensor may have got in by another way, such as an attribute. Convert that "
                f"one with .float(), or take {name!r} out of fp32_layers."
            )
        raise


def _overwrites(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


_WITH_FAST_PATH = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)
_ABOUT_DTYPES = re.compile(r"dtype|scalar type|data type|same type|type should|should be the same|BFloat16|Half|float16", re.I)
_KEPT = "which fp32_layers keeps in FP32"

_known_device_types: tuple[str, ...] = ()


def _device_types() -> tuple[str, ...]:
    global _known_device_types  # a cache of functools is what torch.compile warns of
    if not _known_device_types:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        _known_device_types = ("cpu",) if accelerator is None or accelerator.type == "cpu" else ("cpu", accelerator.type)
    return _known_device_types
