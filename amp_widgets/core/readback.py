"""Numbers that a device computes, read without making the training thread wait for them."""

from __future__ import annotations

import math
from collections.abc import Sequence

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

    __slots__ = ("_events", "_values", "_waiting")

    def __init__(self, tensors: Sequence[torch.Tensor | float | None]) -> None:
        self._values: list[float] = []
        self._waiting: dict[int, torch.Tensor] = {}  # position → where the value will be
        self._events: list[torch.cuda.Event] = []
        for tensor in tensors:
            if tensor is None:
                self._values.append(math.nan)
            elif isinstance(tensor, float):
                self._values.append(tensor)
            elif tensor.is_cpu:
                self._values.append(host_value(tensor))
            else:
                self._waiting[len(self._values)] = tensor.detach().reshape(())
                self._values.append(math.nan)
        if self._waiting:
            self._start_copies()

    def ready(self) -> bool:
        """Whether `values` would return without waiting."""
        return not self._waiting or all(event.query() for event in self._events)

    def values(self) -> list[float]:
        """The values, in the order of the tensors, waiting for the device if need be; NaN where not measured."""
        if self._waiting:
            for event in self._events:
                event.synchronize()
            for position, place in self._waiting.items():
                self._values[position] = host_value(place.cpu())
            self._waiting, self._events = {}, []
        return self._values

    def _start_copies(self) -> None:
        streams = set()
        for position, tensor in self._waiting.items():
            if tensor.device.type == "cuda":
                place = torch.empty((), dtype=torch.float64, pin_memory=True)
                place.copy_(tensor, non_blocking=True)
                streams.add(torch.cuda.current_stream(tensor.device))
            else:  # other devices offer no event that can be asked: a copy is read when asked for, off the step's path
                place = tensor.clone()
            self._waiting[position] = place
        for stream in streams:
            event = torch.cuda.Event()
            event.record(stream)
            self._events.append(event)


def host_value(tensor: torch.Tensor) -> float:
    """The value of a one-element CPU tensor, without ``aten::_local_scalar_dense`` (what a profiler counts as a sync)."""
    if tensor.dtype not in _NUMPY_FLOATS:
        tensor = tensor.float()
    return float((tensor.reshape(()) if tensor.dim() else tensor).numpy())


_NUMPY_FLOATS = frozenset({torch.float32, torch.float64})
