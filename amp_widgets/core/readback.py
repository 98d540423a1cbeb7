"""Numbers that a device computes, read without making the training thread wait for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch


class Readback:
    """Scalars on their way from a device to the host.

    On a CPU the values are there at once. On CUDA they are copied to pinned memory by the device's own stream, and `ready`
    asks an event whether the copy is done; nothing waits, unless `values` is called before.

    Parameters
    ----------
    tensors
        One-element tensors on any devices, numbers that the host knows already, or None for what was not measured.
    """

    __slots__ = ("_events", "_parts", "_values")

    def __init__(self, tensors: Sequence[torch.Tensor | float | None]) -> None:
        self._values: list[float] | None = None
        self._events: list[torch.cuda.Event] = []
        self._parts: list[Callable[[], float]] = []
        if all(not isinstance(tensor, torch.Tensor) or tensor.is_cpu for tensor in tensors):
            self._values = [_at_once(tensor) for tensor in tensors]
            return
        for tensor in tensors:
            self._parts.append(self._start(tensor))

    def ready(self) -> bool:
        """Whether `values` would return without waiting."""
        return self._values is not None or all(event.query() for event in self._events)

    def values(self) -> list[float]:
        """The values, in the order of the tensors, waiting for the device if need be; NaN where not measured."""
        if self._values is None:
            for event in self._events:
                event.synchronize()
            self._values = [part() for part in self._parts]
            self._parts, self._events = [], []
        return self._values

    def _start(self, tensor: torch.Tensor | float | None) -> Callable[[], float]:
        if not isinstance(tensor, torch.Tensor) or tensor.is_cpu:
            value = _at_once(tensor)
            return lambda: value
        if tensor.device.type == "cuda":
            host = torch.empty((), dtype=torch.float64, pin_memory=True)
            host.copy_(tensor.reshape(()).double(), non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(tensor.device))
            self._events.append(event)
            return lambda: host_value(host)
        kept = tensor.reshape(
            ()
        ).clone()  # other devices offer no event that can be asked: read when asked for, off the step's path
        return lambda: host_value(kept.cpu())


def host_value(tensor: torch.Tensor) -> float:
    """The value of a one-element CPU tensor, without ``aten::_local_scalar_dense`` (what a profiler counts as a sync)."""
    if tensor.dtype not in _NUMPY_FLOATS:
        tensor = tensor.float()
    return float((tensor.reshape(()) if tensor.dim() else tensor).numpy())


def _at_once(value: torch.Tensor | float | None) -> float:
    return math.nan if value is None else host_value(value) if isinstance(value, torch.Tensor) else value


_NUMPY_FLOATS = frozenset({torch.float32, torch.float64})
