"""Hears of it when torch's CUDA allocator cannot give what was asked for, and says in which phase and layer that was."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from amp_widgets.core.layers import named_layers
from amp_widgets.core.memory.step_mode import modules_being_called

Attach = Callable[[Callable[[int, int, int, int], None]], object]


class OutOfMemoryListener(Protocol):
    """Who wants to hear of it."""

    def ran_out_of_memory(self, device: torch.device, requested_bytes: int, limit_bytes: int, free_bytes: int) -> None:
        """Called in the thread that asked for memory, before the exception; may be called where torch then finds another way."""


class OutOfMemoryObserver:
    """torch's observer, one per process: it cannot be taken off again, and does nothing while nobody listens.

    Torch calls it with the device's index, the bytes that it tried to allocate, the device's memory (or the part of it that
    the process may use) and what is free of it. It has let go of the allocator's lock by then, so that statistics may be
    read. An exception of ours would take the place of torch's own, so none is let out.
    """

    _listeners: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()
    _lock: ClassVar[threading.Lock] = threading.Lock()
    _attached: ClassVar[bool] = False

    @classmethod
    def listen(cls, listener: OutOfMemoryListener, attach: Attach | None = None) -> None:
        """Tell `listener`, which is only weakly referenced, from now on.

        Parameters
        ----------
        attach
            In place of torch's function; for tests.
        """
        with cls._lock:
            cls._listeners.add(listener)
            if attach is None:
                if cls._attached or not hasattr(torch._C, "_cuda_attach_out_of_memory_observer"):
                    return
                attach = torch._C._cuda_attach_out_of_memory_observer
                cls._attached = True
        attach(cls._observe)

    @classmethod
    def forget(cls, listener: OutOfMemoryListener) -> None:
        """Tell `listener` no more."""
        with cls._lock:
            cls._listeners.discard(listener)

    @classmethod
    def _observe(cls, device: int, requested_bytes: int, limit_bytes: int, free_bytes: int) -> None:
        if not cls._listeners:
            return
        for listener in tuple(cls._listeners):
            try:
                listener.ran_out_of_memory(torch.device("cuda", device), requested_bytes, limit_bytes, free_bytes)
            except Exception:  # whatever it is: torch is about to raise what matters
                continue


def place_by_frames(model: nn.Module | None) -> tuple[str, str]:
    """Phase and layer, as far as this thread's call stack tells them; ``""`` for what it does not.

    The layer is the innermost module of the model that is being called. Within a backward pass, unless it is a recompute,
    no module is, and the layer is not known.
    """
    names = {} if model is None else {id(module): name for name, module in named_layers(model).items()}
    called = modules_being_called()
    layer = next((names[id(module)] for module in reversed(called) if id(module) in names), "")
    if torch._C._current_graph_task_id() != -1:
        return "recompute" if called else "backward", layer
    if called:
        return "forward", layer
    return "optimizer" if _within_a_step() else "", layer


_STEP = Optimizer.profile_hook_step(lambda: None).__code__


def _within_a_step() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _STEP:
            return True
        frame = frame.f_back
    return False
