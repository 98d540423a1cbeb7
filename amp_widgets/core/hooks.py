"""torch's global hooks: how a loop sees forwards and optimizer steps without touching the user's model or optimizer."""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook


def within_another_step(frame: FrameType | None) -> bool:
    """Whether an optimizer's step is part of another's, as a subclass's ``super().step()`` and a wrapped optimizer's are.

    Parameters
    ----------
    frame
        That calls the optimizer's hooks.
    """
    own = frame
    while frame is not None:
        if frame.f_code is _STEP and frame is not own:
            return True
        frame = frame.f_back
    return False


class HookListener(Protocol):
    """Who is told."""

    def forward_begins(self, module: nn.Module) -> None:
        """Some module of the process is about to run forward; told only while the forward hook is armed."""

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Some optimizer of the process has stepped."""


class Hooks:
    """Tells a listener, which it does not keep alive, until it is removed.

    The forward hook is armed only between steps: while it is there, every module call of the process takes torch's slow path.
    """

    def __init__(self, listener: HookListener) -> None:
        reference = weakref.ref(listener)

        def forward(module: nn.Module, args: Any) -> None:
            live = reference()
            if live is not None and not is_compiling():
                live.forward_begins(module)

        def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            live = reference()
            if live is not None and not is_compiling() and not within_another_step(sys._getframe(1)):
                live.optimizer_stepped(optimizer)

        self._forward = forward
        self._forward_handle: Any = None
        self._optimizer_handle = register_optimizer_step_post_hook(stepped)

    def arm_forward(self) -> None:
        """Tell of forwards from now on."""
        if self._forward_handle is None:
            self._forward_handle = register_module_forward_pre_hook(self._forward)

    def disarm_forward(self) -> None:
        """Tell of forwards no more."""
        if self._forward_handle is not None:
            self._forward_handle.remove()
            self._forward_handle = None

    def remove(self) -> None:
        """Leave torch as it was."""
        self.disarm_forward()
        self._optimizer_handle.remove()


_STEP = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__
"""Of torch's wrapper around every optimizer's ``step``, which calls the hooks."""
