"""The tensor storages on the CPU, or on other devices, that are alive, and their bytes."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class LiveStorages:
    """Counts the bytes of every storage on some devices that it was shown, from then on until the storage is freed.

    A storage counts once, however many tensors view it. Only weak references are kept. A storage may be freed at any time
    and in any thread, also by the garbage collector in the middle of a method here; the news of it are therefore only
    queued, by the weak reference's callback. All methods belong to one thread at a time.

    Parameters
    ----------
    devices
        Whose storages count.

    Notes
    -----
    A storage is known by the identity of its Python object, which lives exactly as long as the memory. A freed storage's
    identity can come back, so `see` first works off what was freed: what it is shown was there before that, and cannot have
    an identity from among what is freed later. A weak reference is never followed: torch does not expect to be given a
    storage back this way.
    """

    __slots__ = ("_devices", "_freed", "_known", "bytes")

    def __init__(self, devices: Iterable[torch.device] = (torch.device("cpu"),)) -> None:
        self.bytes = 0
        self._devices = frozenset(devices)
        self._known: dict[int, Reference] = {}
        self._freed: deque[Reference] = deque()

    def settle(self) -> None:
        """Take off what was freed."""
        freed, known = self._freed, self._known
        while freed:
            reference = freed.popleft()
            if known.get(reference.key) is reference:
                del known[reference.key]
                self.bytes -= reference.nbytes

    def see(self, *values: Any) -> None:
        """Take off what was freed, and count the tensors among `values`, also those in lists, tuples and dicts."""
        if self._freed:
            self.settle()
        known = self._known
        for value in values:  # all in one place, as this runs at every op
            kind = type(value)
            if kind is Tensor or kind is Parameter:
                try:
                    storage = value.untyped_storage()
                except NotImplementedError:  # sparse and other layouts without a storage of their own
                    self._see_unusual(value)
                    continue
                reference = known.get(id(storage))
                if reference is None:
                    self._add(storage)
                elif reference.nbytes != (nbytes := storage.nbytes()):  # resize_, or out= of another shape
                    self._resize(reference, nbytes)
            elif kind in NO_TENSORS:
                continue
            elif kind is list or kind is tuple:
                self.see(*value)
            elif isinstance(value, Tensor):
                self._see_unusual(value)
            elif isinstance(value, (list, tuple)):
                self.see(*value)
            elif isinstance(value, dict):
                self.see(*value.values())

    def recount(self) -> None:
        """Sum up anew what is known, so that an interrupt in the middle of a method leaves no lasting error."""
        self.settle()
        self.bytes = sum(reference.nbytes for reference in self._known.values())

    def clear(self) -> None:
        """Forget every storage."""
        self._known.clear()
        self._freed.clear()
        self.bytes = 0

    def __len__(self) -> int:
        self.settle()
        return len(self._known)

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage.device not in self._devices:  # also fake tensors, whose storage is on "meta"
            return
        reference = Reference(storage, self._freed.append)
        reference.key = key = id(storage)
        reference.nbytes = nbytes = storage.nbytes()
        self._known[key] = reference
        self.bytes += nbytes

    def _resize(self, reference: Reference, nbytes: int) -> None:
        self.bytes += nbytes - reference.nbytes
        reference.nbytes = nbytes

    def _see_unusual(self, tensor: Tensor) -> None:
        try:
            storages = list(storages_of(tensor))
        except Exception:  # a foreign subclass may do anything here; what cannot be read is not counted
            return
        for storage in storages:
            if id(storage) not in self._known:
                self._add(storage)


class Reference(weakref.ref[torch.UntypedStorage]):
    """A weak reference that knows what to take off when it dies."""

    __slots__ = ("key", "nbytes")
    key: int
    nbytes: int


NO_TENSORS = frozenset((type(None), int, float, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format))


def state_of(model: nn.Module, optimizers: Iterable[Optimizer]) -> list[Any]:
    """Parameters, buffers, gradients and optimizer state that are there now, for `LiveStorages.see`."""
    tensors: list[Any] = []
    with torch._C.DisableTorchFunction():  # a function mode of the user's is not to hear of this
        for module in model.modules():
            if module._parameters:
                tensors += module._parameters.values()
            if module._buffers:
                tensors += module._buffers.values()
        tensors += [tensor.grad for tensor in tensors if tensor is not None and tensor.is_leaf]
        for optimizer in optimizers:
            for state in optimizer.state.values():
                if type(state) is dict:
                    tensors += state.values()
                else:
                    tensors.append(state)
    return tensors


def storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            inner = getattr(tensor, name)
            if isinstance(inner, Tensor):
                yield from storages_of(inner)
        return
    layout = tensor.layout
    with torch.no_grad():
        if layout is torch.sparse_coo:
            parts = [tensor._indices(), tensor._values()]
        elif layout in (torch.sparse_csr, torch.sparse_bsr):
            parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        elif layout in (torch.sparse_csc, torch.sparse_bsc):
            parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
        else:
            parts = [tensor]
    for part in parts:
        yield part.untyped_storage()
