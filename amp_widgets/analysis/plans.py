"""Plans of one session for one budget after another: what was learned of model and batch serves for the next one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch

from amp_widgets.analysis.fake_step import FakeSteps
from amp_widgets.analysis.plan import Plan
from amp_widgets.analysis.planner import Planner
from amp_widgets.core.batch_tree import batch_form, batch_leaves
from amp_widgets.core.loop import LiveLoop


class Plans:
    """Plans, and keeps what it learned as long as the model, the form of the batch and the loss are the same.

    It holds the model until `forget` is called, and no batch between two plans. Where steps can only be measured, they may
    depend on the numbers in the batch: what was learned serves for the same one only. For one thread at a time.
    """

    def __init__(self) -> None:
        self._steps: FakeSteps | None = None
        self._planner: Planner | None = None
        self._learned_for: Hashable = None
        self._learned_on: list[weakref.ref[torch.Tensor]] = []

    def plan(
        self,
        loop: LiveLoop,
        batch: tuple[Any, Any],
        loss_fn: Callable[[Any, Any], torch.Tensor],
        *,
        budget_bytes: float,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Plan:
        """The plan for a budget; see `amp_widgets.analysis.planner.plan`."""
        learned_for = _signature(loop, batch, loss_fn)
        if self._planner is None or learned_for != self._learned_for or not self._serves_for(batch):
            self.forget()
            self._steps = FakeSteps(loop, batch, loss_fn, verb="plan")
            self._planner = Planner(loop, self._steps, batch, loss_fn)
            self._learned_for = learned_for
            self._learned_on = [weakref.ref(tensor) for tensor in _tensors(batch)]
        planner = self._planner
        try:
            planner.take(batch)
            return planner.plan(budget_bytes, cancelled=cancelled)
        except BaseException:  # it may have been left in the middle of something
            self.forget()
            raise
        finally:
            planner.take(None)

    def forget(self) -> None:
        """Let go of the model."""
        if self._steps is not None:
            self._steps.close()
        self._steps = self._planner = self._learned_for = None
        self._learned_on = []

    def _serves_for(self, batch: Any) -> bool:
        assert self._planner is not None
        if not self._planner.follows_numbers:
            return True
        learned_on = [reference() for reference in self._learned_on]
        return list(map(id, learned_on)) == list(map(id, _tensors(batch)))


def _signature(loop: LiveLoop, batch: Any, loss_fn: Callable[..., Any]) -> Hashable:
    """What a plan depends on, beside the settings, which a `Planner` looks at itself."""
    model = loop.model
    if model is None:
        return None
    parts = tuple(map(_form_of, batch_leaves(batch)))
    weights = tuple((tuple(one.shape), one.dtype, one.requires_grad) for one in model.parameters())
    modes = tuple((name, id(part), part.training) for name, part in model.named_modules())
    return id(model), parts, batch_form(batch), weights, modes, loss_fn, tuple(map(id, loop.optimizers)), loop.device


def _tensors(batch: Any) -> list[torch.Tensor]:
    return [leaf for leaf in batch_leaves(batch) if isinstance(leaf, torch.Tensor)]


def _form_of(leaf: Any) -> Hashable:
    """Of one value in a batch; a plain one, such as a length, is known to the model's code."""
    if isinstance(leaf, torch.Tensor):
        strides = leaf.stride() if leaf.layout == torch.strided else None
        return leaf.shape, leaf.dtype, leaf.layout, strides, leaf.requires_grad
    if isinstance(leaf, np.ndarray):
        return leaf.shape, leaf.dtype
    return type(leaf), leaf if isinstance(leaf, (bool, int, float, str, bytes)) else None
