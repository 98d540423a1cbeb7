"""What a loop knows of the step in progress."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from typing import Any

import torch

from amp_widgets.core.journal import DeviceTimer
from amp_widgets.core.memory.step_mode import files_running
from amp_widgets.core.threads import is_alive, this_thread
from amp_widgets.core.unseen import unseen


class OpenStep:
    """A step that has begun.

    Parameters
    ----------
    thread
        That began it, by its number (`amp_widgets.core.threads`): this one.
    by_autocast
        Whether all that is known of it is an autocast region.
    measured, profiled
        What is known of its memory at its end.
    begun_s
        On the loop's clock.
    timer
        On the device, where that runs by itself.

    Attributes
    ----------
    begun_in
        The file or cell of the code that began it; empty where there is none, as on a thread of its own.
    inferred, trained
        Whether there was a forward pass without, or something of training.
    scaler_used
        Whether a loss was scaled, or a scaler asked to step; `scaling_added` where the user's loop knows nothing of it.
    loss
        The sum of what was backpropagated so far, on the device.
    died_in
        The file or cell of the code in which memory ran out.
    """

    __slots__ = (
        "_ident", "autograd_nodes", "begun_in", "begun_s", "by_autocast", "died_in", "inferred", "loss", "measured", "profiled",
        "scaler_used", "scaling_added", "thread", "timer", "trained",
    )  # fmt: skip

    def __init__(
        self, *, thread: int, by_autocast: bool, measured: bool, profiled: bool, begun_s: float, timer: DeviceTimer | None
    ) -> None:
        self._ident = 0
        self.take(thread)
        self.by_autocast = by_autocast
        self.measured = measured
        self.profiled = profiled
        self.begun_s = begun_s
        self.timer = timer
        self.autograd_nodes = _autograd_nodes()
        self.begun_in = next(files_running(), "")
        self.inferred = False
        self.trained = False
        self.scaler_used = False
        self.scaling_added = False
        self.loss: torch.Tensor | None = None
        self.died_in: str | None = None

    def take(self, thread: int) -> None:
        """From now on it is a step of `thread`, which is this one."""
        self.thread = thread
        self._ident = threading.get_ident()

    @property
    def is_validation(self) -> bool:
        """Whether all that happened in it is an autocast region in which nothing was recorded for a backward pass."""
        return self.by_autocast and not self.trained and (self.inferred or self.autograd_nodes == _autograd_nodes())

    @property
    def is_left(self) -> bool:
        """Whether the code that began it is over: its cell has ended or was left by an error, or its thread has ended.

        Asked on another thread, a cell that has ended is not enough: the next one there may go on with the step.
        """
        if self.thread != this_thread():
            return not is_alive(self.thread)
        return self.begun_in != "" and self.begun_in not in files_running()

    @property
    def is_elsewhere(self) -> bool:
        """Whether another thread than this one has begun it, and has not ended."""
        return self.thread != this_thread() and is_alive(self.thread)

    def add_loss(self, loss: object) -> None:
        """Sum up what is backpropagated in a step, a tensor or several: the quantity whose gradient the step applies."""
        if isinstance(loss, (list, tuple)):
            for part in loss:
                self.add_loss(part)
            return
        if not isinstance(loss, torch.Tensor) or type(loss) not in (torch.Tensor, torch.nn.Parameter) or loss.numel() != 1:
            return  # a subclass may mean anything by its operations
        value = loss.detach()
        if value.dim():
            value = value.reshape(())
        if self.loss is None:
            self.loss = value
        else:
            self.loss = self.loss.float() + value.to(self.loss.device, non_blocking=True)

    def die(self) -> None:
        """Memory ran out in it."""
        if self.died_in is None:  # told of it by a thread of torch's, perhaps
            self.died_in = next(files_running(sys._current_frames().get(self._ident)), "")


def graph_is_alive(parameters: Iterable[torch.nn.Parameter]) -> bool:
    """Whether there is a graph of a forward pass with one of these, which a backward pass may still go through.

    A parameter does not keep the node in which its gradient will be accumulated; only graphs do. So a mark on that node is
    there when the node is asked for again, or the node is a new one.
    """
    found = False
    with unseen(), torch.inference_mode(False), torch.enable_grad():
        for parameter in parameters:
            if parameter.requires_grad and not torch.nn.parameter.is_lazy(parameter):
                _notes_of(parameter)[_MARK] = True
                found |= _notes_of(parameter).pop(_MARK, False)
    return found


def _notes_of(parameter: torch.nn.Parameter) -> dict[str, bool]:
    node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
    notes: dict[str, bool] = node.metadata
    return notes


_MARK = "amp_widgets"


def _autograd_nodes() -> int:
    """How many nodes of autograd graphs this thread has recorded so far."""
    return int(torch._C._autograd._get_sequence_nr())
