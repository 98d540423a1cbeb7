"""Which meter measures the memory of a model's steps: CUDA's allocator statistics, or live tensor bytes on a CPU."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from amp_widgets.core.memory.compiled import why_compiled
from amp_widgets.core.memory.cpu import CpuMeter, why_no_dispatch_modes
from amp_widgets.core.memory.cuda import CudaMeter
from amp_widgets.core.memory.reading import MemoryMeter, NoMeter
from amp_widgets.core.memory.state_profile import StateMeter


def meter_for(model: nn.Module, optimizers: Iterable[Optimizer], *, reset_peak: bool = True) -> MemoryMeter:
    """The meter for the devices that a model's parameters and buffers are on now.

    Parameters
    ----------
    model
        Is not kept alive by the meter.
    optimizers
        Their state counts on a CPU, and in profiles; not kept alive either.
    reset_peak
        Whether torch's own peak counters (CUDA) may be reset at each step, which a peak *within* the step needs.

    Returns
    -------
    MemoryMeter
        One that measures nothing, and says why, where the device or the model does not allow it.
    """
    devices = {tensor.device for tensors in (nn.Module.parameters(model), nn.Module.buffers(model)) for tensor in tensors}
    kinds = {device.type for device in devices}
    others = sorted(str(device) for device in devices if device.type not in ("cpu", "cuda"))
    if others:
        return NoMeter(f"only cuda and cpu devices can be measured, and the model is on {', '.join(others)}")
    if "cuda" in kinds:
        if not torch.cuda.is_available():
            return NoMeter("the model is on a cuda device, but torch finds no CUDA driver or GPU")
        cuda_devices = sorted((device for device in devices if device.type == "cuda"), key=str)
        return CudaMeter(cuda_devices, model, optimizers, reset_peak=reset_peak, also_on_cpu="cpu" in kinds)
    compiled = why_compiled(model)
    if compiled is not None:
        references = [weakref.ref(optimizer) for optimizer in optimizers]
        return StateMeter(
            compiled,
            weakref.ref(model),
            lambda: [optimizer for reference in references if (optimizer := reference()) is not None],
        )
    reason = why_no_dispatch_modes()
    return NoMeter(reason) if reason else CpuMeter(model, optimizers)
