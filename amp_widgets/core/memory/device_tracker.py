"""Profiles one step on CUDA devices: the live bytes after each op, and what the allocator counts at the boundaries of layers."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from amp_widgets.core.memory.allocator import AllocatorLog
from amp_widgets.core.memory.lives import SharedStorages
from amp_widgets.core.memory.profile import PHASES
from amp_widgets.core.memory.step_record import NO_LAYER, StepRecord
from amp_widgets.core.memory.tracker import StepTracker

Numbers = tuple[list[int], list[int]]


class DeviceTracker(StepTracker):
    """A `StepTracker` that also reads the allocator, and copes with the threads of a backward pass on CUDA.

    Autograd works off the nodes of each CUDA device on a thread of its own, where the dispatch mode is in force as well:
    torch takes it along with the thread-local state of the call of ``backward``. Layers that are recomputed there are seen by
    the hooks there. Nodes are numbered by thread.

    Parameters
    ----------
    model, optimizers, clock, learns_optimizers
        As in `StepTracker`.
    storages
        Of the devices in question.
    log
        Where the allocator's statistics go. They are read when the step begins and ends, a module is called or returns, the
        phase changes, and within a backward pass or a recompute when the layer does.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Iterable[Optimizer],
        storages: SharedStorages,
        clock: Callable[[], float],
        log: AllocatorLog,
        *,
        learns_optimizers: bool | None = None,
    ) -> None:
        self._log = log
        self._shared = storages
        self._layer_read = NO_LAYER
        self._ends = False
        self._outermost = -1  # torch's number of the backward pass within which there may be others
        self._nodes_of_thread: dict[int, Numbers] = {}  # of other threads than the one that trains
        super().__init__(model, optimizers, storages, clock, learns_optimizers=learns_optimizers)

    @property
    def points(self) -> list[tuple[float, int]]:
        """Time and phase of each point."""
        return [(time_s, phase) for time_s, phase, _, _ in self._points]

    def finish(self) -> StepRecord:
        """What was written down, at the end of a step that was left."""
        self._ends = True
        return super().finish()

    def _written(self) -> StepRecord:
        # Of a step whose memory has run out, one point is still to come.
        self._log.read(len(self._points) - 1 if self._ends else len(self._points))
        return dataclasses.replace(super()._written(), allocator=self._log.readings())

    def _add_point(self, phase: int, layer: int, op: Any, time_s: float) -> None:
        with self._shared.lock:
            inside = phase in _IN_BACKWARD and layer != self._layer_read
            boundary = inside or phase != self._phase or not self._points
            super()._add_point(phase, layer, op, time_s)
            if boundary:
                self._layer_read = layer
                self._log.read(len(self._points) - 1)

    def _call_begins(self, module: nn.Module, layer: int) -> None:
        super()._call_begins(module, layer)
        self._read_between()

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        before = len(self._calls_open)
        super()._after_forward(module, args, output)
        if len(self._calls_open) != before:
            self._read_between()

    def _read_between(self) -> None:
        """Read at a moment between two ops: what was freed since the last point makes a point of its own."""
        storages = self._shared
        with storages.lock:
            storages.settle()
            if storages.changed:
                self._add_point(self._phase, self._calls_open[-1][1] if self._calls_open else NO_LAYER, None, self._clock())
            self._log.read(len(self._points) - 1)

    def _is_ours(self) -> bool:
        if super()._is_ours():
            return True
        task = torch._C._current_graph_task_id()
        return task != -1 and (task == self._task or self._is_in_force())

    def _is_in_force(self) -> bool:
        """On this thread."""
        depth = torch._C._len_torch_dispatch_stack()
        return any(torch._C._get_dispatch_stack_at(index) is self for index in range(depth))

    def _pass_changes(self, task: int) -> None:
        if self._task == -1:
            self._outermost = task
        super()._pass_changes(task)

    def _nodes_follow(self, layer: int) -> None:
        thread = threading.get_ident()
        if thread == self._thread_id:
            super()._nodes_follow(layer)
            return
        number = torch._C._autograd._get_sequence_nr()
        numbers, layers = self._nodes_of_thread.setdefault(thread, ([], []))
        numbers.append(number)
        layers.append(layer)

    def _nodes(self) -> Numbers:
        # A pass within another, as in a recompute of torch's reentrant checkpointing, works off what the same thread has made.
        if torch._C._current_graph_task_id() != self._outermost:
            own = self._nodes_of_thread.get(threading.get_ident())
            if own is not None:
                return own
        return super()._nodes()


_IN_BACKWARD = (PHASES.index("backward"), PHASES.index("recompute"))
