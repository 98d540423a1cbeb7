"""Arrays that a device computes, read without making the training thread wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch

from amp_widgets.core.unseen import unseen


class ArrayReadback:
    """Tensors on their way from a device to the host; `Readback` for more than one number each.

    On a CPU the values are there at once. On CUDA they are copied to pinned memory by the device's own stream, and `ready` asks
    an event whether the copy is done; nothing waits, unless `arrays` is called before.

    Parameters
    ----------
    tensors
        Of any shape and dtype that numpy has, on any devices. They are not to be written to afterwards.
    """

    __slots__ = ("_arrays", "_events", "_sources")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._sources = list(tensors)  # their memory is not to be used again before the copy is done
        self._events: list[torch.cuda.Event] = []
        self._arrays: list[torch.Tensor] = []
        streams = set()
        for tensor in tensors:
            if tensor.device.type == "cuda":
                place = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                place.copy_(tensor, non_blocking=True)
                streams.add(torch.cuda.current_stream(tensor.device))
                self._arrays.append(place)
            else:  # other devices offer no event that can be asked: the copy is made when asked for, off the step's path
                self._arrays.append(tensor)
        for stream in streams:
            event = torch.cuda.Event()
            event.record(stream)
            self._events.append(event)

    def ready(self) -> bool:
        """Whether `arrays` would return without waiting."""
        return all(event.query() for event in self._events)

    def arrays(self) -> list[npt.NDArray[Any]]:
        """The values, in the order of the tensors, waiting for the device if need be."""
        for event in self._events:
            event.synchronize()
        self._events, self._sources = [], []
        with unseen():  # numpy() detaches
            return [array.cpu().numpy() for array in self._arrays]
