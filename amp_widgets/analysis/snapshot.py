"""How a model, its optimizers and the random states are, to be put back after a step that is only tried."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import nn

from amp_widgets.core.memory.storages import storages_of
from amp_widgets.core.random_states import RandomStates, generator_state, generator_state_known, set_generator_state


class Snapshot:
    """What a training step changes, as it is now; `restore` puts it back, bit for bit and in the same objects.

    Kept are parameters, buffers, gradients, submodules, the attributes of modules and of optimizers, the state and the
    hyperparameters of optimizers, the random states of torch, NumPy and Python, and what the loss function has, where it is
    a module, a method of one, an object that can be called, or a ``functools.partial``. Of an attribute that is a tensor, an
    array, a random generator, a module, an optimizer, a dataclass, or one of Python's containers, the content is kept too,
    and that of what is in it. An attribute that was not there is removed again.

    Notes
    -----
    What is in other objects, in closures, in global variables, in iterators or outside of Python (a file, a log) is not
    known: an attribute that holds such an object holds the same one afterwards, in the state that it has come to.

    The copies are held in the CPU's memory, so that those of a model on a GPU do not add to what is measured there.

    Parameters
    ----------
    model, optimizers
        Of whom.
    loss_fn
        What else is called in a step.
    """

    def __init__(self, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], *, loss_fn: object = None) -> None:
        self._seen: dict[int, Any] = {}
        self._tensors: list[_TensorThen] = []
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # the user's own, and what it held
        self._undo: list[Callable[[], None]] = []
        with torch.inference_mode(False), torch.no_grad():
            self._keep([model, *_attributes_of_callable(loss_fn)])
            for optimizer in optimizers:
                self._keep(self._of_optimizer(optimizer))
            self._versions = _Versions([kept.tensor for kept in self._tensors])
        self._random = RandomStates()

    def restore(self) -> None:
        """Put everything back; may be called again, after another try."""
        with torch.inference_mode(False), torch.no_grad():
            for kept in self._tensors:
                kept.put_back()
            for storage, held in self._storages.values():
                _put_back_storage(storage, held)
            self._versions.put_back()
        for put_back in self._undo:
            put_back()
        self._random.restore()

    def clear_gradients(self) -> None:
        """Take the gradients off whatever may get one in a backward pass."""
        for kept in self._tensors:
            if kept.tensor.is_leaf:
                kept.tensor.grad = None

    def renew_gradients(self) -> None:
        """Put copies in the place of gradients, which are free when the step lets go of them, as its own would be."""
        with torch.inference_mode(False), torch.no_grad():
            for kept in self._tensors:
                if kept.gradient is not None:
                    kept.tensor.grad = kept.gradient.clone()

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.restore()

    @staticmethod
    def _of_optimizer(optimizer: Any) -> Iterable[Any]:
        if isinstance(optimizer, torch.optim.Optimizer):
            return [optimizer]
        return [vars(optimizer), optimizer.param_groups, getattr(optimizer, "state", None)]  # something around one

    def _keep(self, values: Iterable[Any]) -> None:
        waiting = list(values)
        while waiting:
            value = waiting.pop()
            if type(value) in _ATOMS or id(value) in self._seen:
                continue
            self._seen[id(value)] = value  # held, so that an id means one object
            if isinstance(value, torch.Tensor):
                waiting += self._keep_tensor(value)
            elif (put_back := _rewind(value)) is not None:
                self._undo.append(put_back)
            elif isinstance(value, np.ndarray):
                self._undo.append(functools.partial(_put_back_array, value, value.copy()))
            else:
                waiting += self._keep_object(value)

    def _keep_tensor(self, tensor: torch.Tensor) -> Iterator[Any]:
        if nn.parameter.is_lazy(tensor) or tensor.device.type == "meta":  # holds no numbers
            return
        kept = _TensorThen(tensor)
        self._tensors.append(kept)
        if kept.gradient is not None:
            yield kept.gradient
        for storage in storages_of(tensor):
            if id(storage) not in self._storages and storage.device.type != "meta":
                self._storages[id(storage)] = (storage, storage.clone() if storage.device.type == "cpu" else storage.cpu())

    def _keep_object(self, value: Any) -> Iterable[Any]:
        """Something that has others in it."""
        kind = type(value)
        if isinstance(value, torch.jit.ScriptModule):
            attributes = _attributes_of_script(value)
            self._undo.append(functools.partial(_put_back_script, value, attributes))
            return (*nn.Module.parameters(value), *nn.Module.buffers(value), *nn.Module.children(value), *attributes.values())
        if isinstance(value, (nn.Module, torch.optim.Optimizer, types.SimpleNamespace)) or (
            dataclasses.is_dataclass(kind) and hasattr(value, "__dict__")
        ):
            return self._keep_attributes(value)
        if kind in _DICTS:
            self._undo.append(functools.partial(_put_back_dict, value, dict(value)))
            return tuple(value.values())
        if kind in (list, collections.deque, bytearray):
            self._undo.append(functools.partial(_put_back_sequence, value, list(value)))
            return () if kind is bytearray else tuple(value)
        if kind is set:
            self._undo.append(functools.partial(_put_back_set, value, set(value)))
            return tuple(value)
        if isinstance(value, (tuple, functools.partial, types.MethodType)):
            return value if isinstance(value, tuple) else _attributes_of_callable(value)
        return ()

    def _keep_attributes(self, owner: Any) -> Iterable[Any]:
        attributes = {name: value for name, value in vars(owner).items() if not _is_left(name)}
        self._undo.append(functools.partial(_put_back_attributes, owner, attributes))
        return attributes.values()


_ATOMS = frozenset(
    {bool, int, float, complex, str, bytes, type(None), types.FunctionType, types.BuiltinFunctionType, type}
    | {torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format}
)
_DICTS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
_HOOKS = frozenset(name for name in vars(nn.Module()) if "hook" in name)
"""They are put on and taken off while something is tried."""


def _is_left(name: str) -> bool:
    """Whether an attribute of a module or an optimizer is none of the user's."""
    return name in _HOOKS or name.startswith("_optimizer_")


class _TensorThen:
    """A tensor's memory, shape and flags, but for the numbers in its memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.gradient = tensor.grad if tensor.is_leaf else None
        self._alias = tensor.detach()  # of the same memory, in any layout
        self._is_leaf = tensor.is_leaf
        self._requires_grad = tensor.requires_grad

    def put_back(self) -> None:
        tensor = self.tensor
        if self._is_leaf and not tensor.is_leaf:  # something with a graph was added to it
            with contextlib.suppress(RuntimeError):  # a view cannot be
                tensor.detach_()
        if not _same_memory(tensor, self._alias):
            tensor.data = self._alias
        if tensor.is_leaf:
            if tensor.requires_grad != self._requires_grad:
                tensor.requires_grad_(self._requires_grad)
            if tensor.grad is not self.gradient:
                tensor.grad = self.gradient


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout != torch.strided or type(one.data) is not type(other):
        return False
    return (
        one.dtype == other.dtype
        and one.device == other.device
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.storage_offset() == other.storage_offset()
        and one.untyped_storage() is other.untyped_storage()
    )


def _put_back_storage(storage: torch.UntypedStorage, held: torch.UntypedStorage) -> None:
    if storage.nbytes() != held.nbytes():
        storage.resize_(held.nbytes())
    # What has not changed is not written to: it may be memory that cannot be, such as that of a mapped file.
    if storage.device.type != "cpu" or not torch.equal(_numbers(storage), _numbers(held)):
        storage.copy_(held)


def _numbers(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


class _Versions:
    """By which autograd tells whether a tensor was written to since it was saved: in the end, it was not."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        preserve = getattr(torch.autograd, "_unsafe_preserve_version_counter", None)
        counted = tuple(tensor for tensor in tensors if not tensor.is_inference())
        self._kept = None if preserve is None or not counted else preserve(counted)

    def put_back(self) -> None:
        if self._kept is not None:
            self._kept.__exit__()


def _rewind(generator: object) -> Callable[[], None] | None:
    """What sets a random generator to its state of now; None for other objects."""
    if not generator_state_known(generator):
        return None
    return functools.partial(set_generator_state, generator, generator_state(generator))


def _put_back_array(array: np.ndarray[Any, Any], held: np.ndarray[Any, Any]) -> None:
    if array.dtype.hasobject or array.tobytes() != held.tobytes():  # as with storages
        np.copyto(array, held)


def _put_back_dict(target: dict[Any, Any], entries: dict[Any, Any]) -> None:
    if len(target) != len(entries) or any(
        one is not other or target[one] is not entries[other] for one, other in zip(target, entries, strict=True)
    ):
        target.clear()
        target.update(entries)


def _put_back_sequence(target: Any, items: list[Any]) -> None:
    if len(target) != len(items) or any(one is not other for one, other in zip(target, items, strict=True)):
        target.clear()
        target.extend(items)


def _put_back_set(target: set[Any], items: set[Any]) -> None:
    if target != items:
        target.clear()
        target.update(items)


def _put_back_attributes(owner: Any, kept: dict[str, Any]) -> None:
    attributes = vars(owner)
    for name in [name for name in attributes if name not in kept and not _is_left(name)]:
        del attributes[name]
    for name, value in kept.items():
        if name not in attributes or attributes[name] is not value:
            attributes[name] = value


def _attributes_of_callable(function: Any) -> list[Any]:
    """What is kept of something that is called, apart from what its code refers to."""
    if isinstance(function, functools.partial):
        return [*_attributes_of_callable(function.func), *function.args, *function.keywords.values()]
    if isinstance(function, types.MethodType):
        return [function.__self__] if isinstance(function.__self__, nn.Module) else []
    if function is None or isinstance(function, (types.FunctionType, types.BuiltinFunctionType, type)):
        return []
    if isinstance(function, nn.Module) or not hasattr(function, "__dict__"):
        return [function]
    return [vars(function)]


def _attributes_of_script(module: torch.jit.ScriptModule) -> dict[str, Any]:
    """Numbers and tensors that TorchScript code may assign, of the module and not of those inside it."""
    kind = getattr(module, "_concrete_type", None)
    names = [] if kind is None else kind.get_attributes()
    values = {name: module._c.getattr(name) for name in names if module._c.hasattr(name)}
    return {name: value for name, value in values.items() if isinstance(value, (bool, int, float, str, torch.Tensor))}


def _put_back_script(module: torch.jit.ScriptModule, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        if module._c.getattr(name) is not value:
            module._c.setattr(name, value)
