"""The states of random generators, to be put back: the global ones, and those that some object carries."""

from __future__ import annotations

import functools
import random
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn


class RandomStates:
    """Of torch on the CPU and on every CUDA device in use, of NumPy and of Python, as they are now."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
        self._numpy: Any = np.random.get_state(legacy=False)
        self._python: Any = random.getstate()

    def restore(self) -> None:
        """Put them back."""
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
        np.random.set_state(self._numpy)
        random.setstate(self._python)

    def as_data(self) -> dict[str, Any]:
        """Tensors and plain values only; see `of_data`."""
        return {
            "torch": self._torch.clone(),
            "cuda": None if self._cuda is None else [state.clone() for state in self._cuda],
            "numpy": _plain(self._numpy),
            "python": _plain_python(self._python),
        }

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> RandomStates:
        """What `as_data` has given.

        Raises
        ------
        ValueError
            When that is none of it; nothing has changed then.
        """
        states = cls.__new__(cls)
        try:
            states._torch, states._cuda = data["torch"].clone(), data["cuda"]
            states._numpy, states._python = _whole(data["numpy"]), _whole_python(data["python"])
            torch.Generator().set_state(states._torch)
            np.random.RandomState().set_state(states._numpy)
            random.Random().setstate(states._python)
        except (KeyError, TypeError, AttributeError, RuntimeError, ValueError, OverflowError) as error:
            raise ValueError(f"these are no states of random generators: {type(error).__name__}: {error}") from None
        return states


def generator_state(generator: object) -> Any:
    """The state of a random generator as plain values and tensors; None for other objects."""
    if isinstance(generator, random.Random):
        return None if isinstance(generator, random.SystemRandom) else _plain_python(generator.getstate())
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.RandomState):
        return _plain(generator.get_state(legacy=False))
    bits = generator.bit_generator if isinstance(generator, np.random.Generator) else generator
    return _plain(bits.state) if isinstance(bits, np.random.BitGenerator) else None


def set_generator_state(generator: Any, state: Any) -> None:
    """Put back what `generator_state` has given."""
    if isinstance(generator, random.Random):
        generator.setstate(_whole_python(state))
    elif isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_whole(state))
    else:
        bits = generator.bit_generator if isinstance(generator, np.random.Generator) else generator
        bits.state = _whole(state)


def generators_of(owner: object) -> dict[str, Any]:
    """The random generators that an object carries, by where they are: ``"sampler.generator"``.

    Looked at are attributes, and what is in short lists, tuples and dicts, `_MOST_OBJECTS` objects at most; nothing is looked
    for in modules, tensors and arrays.
    """
    return {path: one for path, one in _parts(owner) if generator_state_known(one)}


def generator_state_known(value: object) -> bool:
    """Whether it is a random generator that has a state."""
    return isinstance(value, _GENERATORS) and not isinstance(value, random.SystemRandom)


def counters_of(owner: object) -> dict[str, Any]:
    """What of an object, and of what it carries, counts epochs as ``DistributedSampler.epoch`` does, by where it is."""
    return {path: one for path, one in _parts(owner) if type(getattr(one, "__dict__", {}).get("epoch")) is int}


_GENERATORS = (random.Random, torch.Generator, np.random.RandomState, np.random.Generator, np.random.BitGenerator)
_ATOMS = (
    bool, int, float, complex, str, bytes, bytearray, type(None), type, types.FunctionType, types.BuiltinFunctionType,
    types.MethodType, types.ModuleType, torch.Tensor, np.ndarray, np.generic, nn.Module, torch.dtype, torch.device,
)  # fmt: skip
_MOST_OBJECTS = 256
_MOST_ITEMS = 64


def _parts(owner: object) -> Iterator[tuple[str, Any]]:
    """An object and what it carries, the nearest first."""
    waiting: deque[tuple[str, Any]] = deque([("", owner)])
    seen: dict[int, Any] = {}
    while waiting and len(seen) < _MOST_OBJECTS:
        path, value = waiting.popleft()
        if isinstance(value, _ATOMS) or id(value) in seen:
            continue
        seen[id(value)] = value  # held, so that an id means one object
        yield path, value
        if isinstance(value, _GENERATORS):
            continue
        items: Iterable[tuple[Any, Any]] = ()
        if isinstance(value, (list, tuple)):
            items = enumerate(value) if len(value) <= _MOST_ITEMS else ()
        elif isinstance(value, dict):
            items = value.items() if len(value) <= _MOST_ITEMS else ()
        else:
            items = getattr(value, "__dict__", {}).items()
        waiting.extend((f"{path}.{name}".lstrip("."), item) for name, item in items)


def _plain(value: Any) -> Any:
    """With a tensor of its bytes in place of each array."""
    if isinstance(value, np.ndarray):
        return {_ARRAY: value.dtype.str, "content": torch.from_numpy(np.frombuffer(value.tobytes(), np.uint8).copy())}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _whole(value: Any) -> Any:
    """The reverse of `_plain`."""
    if isinstance(value, dict) and _ARRAY in value:
        return np.frombuffer(value["content"].numpy().tobytes(), _dtype(value[_ARRAY])).copy()
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return value


def _plain_python(state: Any) -> dict[str, Any]:
    version, numbers, gauss = state
    return {"version": version, "numbers": torch.tensor(numbers), "gauss": gauss}


def _whole_python(data: Mapping[str, Any]) -> tuple[Any, ...]:
    return data["version"], tuple(data["numbers"].tolist()), data["gauss"]


@functools.cache
def _dtype(name: str) -> np.dtype[Any]:
    found = np.dtype(name)
    if found.kind not in "iuf":
        raise ValueError(f"got an array of {name}, expected numbers")
    return found


_ARRAY = "ndarray"
