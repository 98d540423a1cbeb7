"""The calls of ``torch.utils.checkpoint`` on this thread, by whichever name the code that makes them has the function."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils import checkpoint as torch_checkpoint


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CheckpointCall:
    """One that is about to run its function for the first time.

    Attributes
    ----------
    function
        What is checkpointed.
    args
        What it is called with, and how else the call was made.
    reentrant
        Of which kind.
    keeps_random_state
        ``preserve_rng_state``.
    """

    function: Callable[..., Any]
    args: Any
    reentrant: bool
    keeps_random_state: bool


Begins = Callable[[CheckpointCall], tuple[Callable[..., Any], Callable[[], None]]]
"""Told of a call. Returns the function to be run in the recompute, by reentrant ones also before, and what to call after that."""


@contextlib.contextmanager
def watching_checkpoints(begins: Begins) -> Iterator[None]:
    """Tell of the calls on this thread; with another torch, in which they are made in another way, of none."""
    if not all(hasattr(torch_checkpoint, name) for name in _NAMES):
        yield
        return
    thread = threading.get_ident()

    def told(call: CheckpointCall) -> tuple[Callable[..., Any], Callable[[], None]]:
        return begins(call) if threading.get_ident() == thread else (call.function, _nothing)

    reentrant, other = _NAMES
    with _PATCHING:
        kept = {name: getattr(torch_checkpoint, name) for name in _NAMES}
        try:
            setattr(torch_checkpoint, reentrant, _Reentrant(kept[reentrant], told))
            setattr(torch_checkpoint, other, _told_of(kept[other], told))
            yield
        finally:
            for name, original in kept.items():
                setattr(torch_checkpoint, name, original)


_NAMES = ("CheckpointFunction", "_checkpoint_without_reentrant_generator")
_PATCHING = threading.RLock()


class _Reentrant:
    """Stands in for torch's Function, as far as ``checkpoint`` calls it."""

    def __init__(self, original: Any, begins: Begins) -> None:
        self._original = original
        self._begins = begins

    def apply(self, function: Any, preserve: bool, *args: Any) -> Any:
        call = CheckpointCall(function=function, args=args, reentrant=True, keeps_random_state=preserve)
        function, ends = self._begins(call)
        output = self._original.apply(function, preserve, *args)
        ends()
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _told_of(original: Any, begins: Begins) -> Callable[..., Any]:
    """Torch's generator around a checkpointed function, which runs while it waits."""

    @functools.wraps(original)
    def generate(function: Any, preserve: bool = True, *args: Any, **kwargs: Any) -> Any:
        call = CheckpointCall(function=function, args=(args, kwargs), reentrant=False, keeps_random_state=preserve)
        function, ends = begins(call)
        result = yield from original(function, preserve, *args, **kwargs)
        ends()
        return result

    return generate


def _nothing() -> None:
    pass
