"""What a layer kept in FP32 is called with, in fp32: tensors, and the tensors in containers, which stay what they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree as pytree

HALF = (torch.float16, torch.bfloat16)


class CastInputs:
    """The arguments of a call with the fp16 and bf16 tensors in them cast. See `cast_inputs`.

    What is one tensor, or one container, stays one: attention asks whether its query is its key. Containers with such a tensor
    in them are copied, the others are passed as they are: lists, tuples, dicts, what is registered with torch's pytree,
    dataclasses and ``SimpleNamespace``, one within another; of other objects, only those with a plain ``__init__``, and only
    for the tensors among their attributes.

    Attributes
    ----------
    args, kwargs
        What to call with.
    changed
        Whether anything was cast.
    """

    def __init__(self, device_types: Sequence[str], to: torch.dtype, but: torch.Tensor | None) -> None:
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self._device_types = device_types
        self._to = to
        self._from = HALF if to == torch.float32 else (*HALF, torch.float32)
        self._but = but
        self._made: dict[int, tuple[Any, Any]] = {}  # by the id of the original: that, and what stands for it
        self._copies: list[tuple[Any, dict[Any, Any] | list[Any], Callable[[], dict[Any, Any] | list[Any]]]] = []

    @property
    def changed(self) -> bool:
        return any(original is not made for original, made in self._made.values())

    def settle(self) -> None:
        """After the call: what it has put into the copies of containers is put into the containers."""
        if not self._copies:
            return
        originals = {id(made): original for original, made in self._made.values()}

        def own(value: Any) -> Any:
            return originals.get(id(value), value)

        for original, before, contents in self._copies:
            now = contents()
            if isinstance(now, list):
                if len(now) != len(before) or any(one is not other for one, other in zip(now, before, strict=True)):
                    original[:] = map(own, now)
                continue
            assert isinstance(before, dict)
            put, remove = _access(original)
            for name in before.keys() - now.keys():
                remove(name)
            for name, value in now.items():
                if name not in before or before[name] is not value:
                    put(name, own(value))

    def cast(self, value: Any) -> Any:
        if isinstance(value, _LEAVES):  # hot
            return self._cast_tensor(value) if isinstance(value, torch.Tensor) else value
        known = self._made.get(id(value))
        if known is not None:
            return known[1]
        self._made[id(value)] = value, value  # one that holds itself is not followed further
        made = self._cast_container(value)
        self._made[id(value)] = value, made
        return made

    def _cast_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype not in self._from or tensor.device.type not in self._device_types or tensor is self._but:
            return tensor
        known = self._made.get(id(tensor))
        if known is None:
            known = self._made[id(tensor)] = tensor, tensor.float() if self._to == torch.float32 else tensor.to(self._to)
        cast: torch.Tensor = known[1]
        return cast

    def _cast_container(self, value: Any) -> Any:
        kind = type(value)
        if kind is list or kind is tuple:
            items = [self.cast(item) for item in value]
            if all(one is other for one, other in zip(items, value, strict=True)):
                return value
            if kind is tuple:
                return tuple(items)
            self._copies.append((value, list(items), lambda: items))
            return items
        if kind is dict:
            entries = {name: self.cast(item) for name, item in value.items()}
            if all(entries[name] is value[name] for name in value):
                return value
            self._copies.append((value, dict(entries), lambda: entries))
            return entries
        if kind in pytree.SUPPORTED_NODES or isinstance(value, tuple):
            return self._cast_registered(value)
        return self._cast_object(value)

    def _cast_registered(self, value: Any) -> Any:
        children, structure = pytree.tree_flatten(value, is_leaf=lambda one: one is not value)
        cast = [self.cast(child) for child in children]
        if all(one is other for one, other in zip(cast, children, strict=True)):
            return value
        made = pytree.tree_unflatten(cast, structure)
        if isinstance(made, dict):
            self._copies.append((value, dict(made), lambda: dict(made)))
        return made

    def _cast_object(self, value: Any) -> Any:
        kind = type(value)
        whole = isinstance(value, SimpleNamespace) or dataclasses.is_dataclass(kind)
        if isinstance(value, (type, torch.nn.Module)) or not (whole or _is_plain(kind)):
            return value
        before = _attributes(value)
        cast = {name: self.cast(item) if whole or isinstance(item, torch.Tensor) else item for name, item in before.items()}
        if all(cast[name] is before[name] for name in before):
            return value
        try:
            made = object.__new__(kind)
        except TypeError:  # what is made in C may only be made by itself
            return value
        for name, item in cast.items():
            object.__setattr__(made, name, item)
        self._copies.append((value, cast, lambda: _attributes(made)))
        return made


def cast_inputs(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device_types: Sequence[str],
    *,
    to: torch.dtype = torch.float32,
    but: torch.Tensor | None = None,
) -> CastInputs:
    """The same with fp16 and bf16 tensors cast.

    Parameters
    ----------
    args, kwargs
        Of a call.
    device_types
        Where tensors are cast; elsewhere they are left alone.
    to
        The format to cast to. Where it is not fp32, fp32 is cast too.
    but
        A tensor that is left alone.
    """
    inputs = CastInputs(device_types, to, but)
    inputs.args = tuple([inputs.cast(value) for value in args])
    inputs.kwargs = {name: inputs.cast(value) for name, value in kwargs.items()}
    return inputs


_LEAVES = (torch.Tensor, int, float, str, type(None))
_ABSENT = object()


def _is_plain(kind: Any) -> bool:
    """Whether its objects are nothing but their attributes."""
    return (
        kind.__new__ is object.__new__
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and kind.__module__ != "builtins"
        and not hasattr(kind, "__copy__")
    )


def _attributes(value: Any) -> dict[str, Any]:
    attributes = dict(getattr(value, "__dict__", ()))
    if dataclasses.is_dataclass(value):  # with slots
        for field in dataclasses.fields(value):
            item = attributes.get(field.name, _ABSENT)
            item = getattr(value, field.name, _ABSENT) if item is _ABSENT else item
            if item is not _ABSENT:
                attributes[field.name] = item
    return attributes


def _access(container: Any) -> tuple[Callable[[Any, Any], None], Callable[[Any], None]]:
    """How to put something into it by name, and how to take it out."""
    if isinstance(container, dict):
        return container.__setitem__, container.__delitem__
    return lambda name, value: object.__setattr__(container, name, value), lambda name: object.__delattr__(container, name)
