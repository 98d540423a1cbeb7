"""Python's and NumPy's global random generators, rewound for a recompute as torch rewinds its own."""

from __future__ import annotations

import pickle
import random
import types
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from torch import nn


class HostRandom:
    """The states of Python's and NumPy's global random generators when the forward pass began; entered, they are that again."""

    __slots__ = ("_now", "_then")

    def __init__(self) -> None:
        self._then = _host_random_state()

    def was_used(self) -> bool:
        """Whether anything was drawn since."""
        return pickle.dumps(self._then) != pickle.dumps(_host_random_state())

    def __enter__(self) -> None:
        self._now = _host_random_state()
        _set_host_random_state(self._then)

    def __exit__(self, *_: object) -> None:
        _set_host_random_state(self._now)


def draws_on_host(modules: Iterable[nn.Module]) -> bool:
    """Whether the code of the modules' classes names Python's or NumPy's global generator: reading their state takes 60 µs."""
    kinds = {kind for module in modules for kind in type(module).__mro__ if not kind.__module__.startswith("torch.")}
    functions = [value for kind in kinds for value in vars(kind).values() if isinstance(value, types.FunctionType)]
    seen: set[types.FunctionType] = set()
    while functions:
        function = functions.pop()
        if function in seen or (function.__module__ or "").startswith("torch."):
            continue
        seen.add(function)
        names = set(_names(function.__code__))
        used = [function.__globals__[name] for name in names if name in function.__globals__]
        if any(value is random or value is np.random or _is_method_of_generator(value) for value in used):
            return True
        if "random" in names and any(value is np for value in used):
            return True
        functions += [value for value in used if isinstance(value, types.FunctionType)]
    return False


def _host_random_state() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state(legacy=False)


def _set_host_random_state(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])


def _is_method_of_generator(value: Any) -> bool:
    return isinstance(getattr(value, "__self__", None), (random.Random, np.random.RandomState))


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
