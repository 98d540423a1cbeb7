"""What is attached to models and must not keep them alive, nor be kept alive by them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import nn

_T = TypeVar("_T")


class Attached(Generic[_T]):
    """One thing for each of some models."""

    def __init__(self) -> None:
        # by id: a user's __eq__ may do anything
        self._known: dict[int, tuple[weakref.ref[nn.Module], weakref.ref[Any]]] = {}

    def put(self, model: nn.Module, thing: _T) -> None:
        """It belongs to this model from now on, in place of another."""
        key, known = id(model), self._known
        known[key] = (weakref.ref(model, lambda _: known.pop(key, None)), weakref.ref(thing))

    def of(self, model: nn.Module) -> _T | None:
        """What belongs to this model, as long as it is there."""
        found = self._known.get(id(model))
        return found[1]() if found is not None and found[0]() is model else None

    def forget(self, thing: _T) -> None:
        """It belongs to no model any more."""
        for key in [key for key, (_, other) in self._known.items() if other() is thing]:
            del self._known[key]


class WeakCall:
    """Calls a method of an object, as long as there is one."""

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, *arguments: Any) -> None:
        method = self._method()
        if method is not None:
            method(*arguments)
