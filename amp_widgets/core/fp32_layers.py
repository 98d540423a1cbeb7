"""Single layers of a live model kept in FP32 under autocast, switched on and off without a trace.

How a layer's forward pass is changed, see `amp_widgets.core.class_exchange`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from amp_widgets.core.class_exchange import Change
from amp_widgets.core.layer_switch import LayerSwitch
from amp_widgets.core.layers import LayerSetting, why_not_exchanged
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
        if parameter.dtype in _HALF:
            return f"its own parameters are {str(parameter.dtype).removeprefix('torch.')}: convert them with .float() first"
    return None


def _run_in_fp32(layer: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    device_types = [device_type for device_type in _device_types() if torch.is_autocast_enabled(device_type)]
    if not device_types:
        return call(*args, **kwargs)
    args, kwargs = cast_inputs(args, kwargs, device_types)
    with contextlib.ExitStack() as regions:
        for device_type in device_types:
            regions.enter_context(torch.autocast(device_type, enabled=False))
        return call(*args, **kwargs)


class Fp32Layers(LayerSwitch):
    """The layers of one model that are kept in FP32.

    Such a layer runs with autocast disabled, on its fp16 and bf16 inputs cast to fp32, and so do the layers inside it; its
    outputs stay fp32. That is what a ``with torch.autocast(..., enabled=False)`` around its code and a ``.float()`` on its
    inputs would do, bit for bit, also in the recompute of a checkpoint. Where autocast is off anyway, nothing changes. A layer
    that overwrites its input in place overwrites the cast.

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


def cast_inputs(args: Any, kwargs: Any, device_types: list[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same in fp32. What is one tensor stays one: attention asks whether its query is its key."""
    made: dict[int, torch.Tensor] = {}

    def cast(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dtype not in _HALF or leaf.device.type not in device_types:
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = leaf.float()
        return made[id(leaf)]

    def cast_all(value: Any) -> Any:
        return cast(value) if isinstance(value, _LEAVES) else pytree.tree_map(cast, value)  # which takes some 30 µs

    return tuple(map(cast_all, args)), {name: cast_all(value) for name, value in kwargs.items()}


_LEAVES = (torch.Tensor, int, float, str, type(None))
_HALF = (torch.float16, torch.bfloat16)


@functools.cache
def _device_types() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ("cpu",) if accelerator is None or accelerator.type == "cpu" else ("cpu", accelerator.type)
