"""Plans of one session for one budget after another: what was learned of model and batch serves for the next one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from amp_widgets.analysis.plan import Plan
from amp_widgets.analysis.planner import Planner, planning
from amp_widgets.core.loop import LiveLoop


class Plans:
    """Plans, and keeps what it learned as long as the model, the shapes in the batch and the loss are the same.

    It holds the model and one batch until `forget` is called. For one thread at a time.
    """

    def __init__(self) -> None:
        self._open = contextlib.ExitStack()
        self._planner: Planner | None = None
        self._learned_for: Hashable = None

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
        if self._planner is None or learned_for != self._learned_for:
            self.forget()
            self._planner = self._open.enter_context(planning(loop, batch, loss_fn))
            self._learned_for = learned_for
        try:
            return self._planner.plan(budget_bytes, cancelled=cancelled)
        except BaseException:  # it may have been left in the middle of something
            self.forget()
            raise

    def forget(self) -> None:
        """Let go of model and batch."""
        self._planner = self._learned_for = None
        self._open.close()


def _signature(loop: LiveLoop, batch: Any, loss_fn: Callable[..., Any]) -> Hashable:
    """What a plan depends on, beside the settings, which a `Planner` looks at itself."""
    model = loop.model
    if model is None:
        return None
    leaves, form = pytree.tree_flatten(batch)
    parts = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf) for leaf in leaves)
    weights = tuple((tuple(one.shape), one.dtype, one.requires_grad) for one in model.parameters())
    modes = tuple((name, id(part), part.training) for name, part in model.named_modules())
    return id(model), parts, str(form), weights, modes, loss_fn, tuple(map(id, loop.optimizers)), loop.device
