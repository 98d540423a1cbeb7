"""Which optimizers' steps end a training step, in a loop without a scaler."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import torch
from torch import nn


class OptimizerSteps:
    """Counts optimizers' steps until a training step is complete.

    With the optimizers given, it is complete when each has stepped, or one steps again. Without, they are learned: those that
    step one after the other, with no forward pass in between, go together.

    Parameters
    ----------
    given
        The optimizers that make up a step; empty: any that has parameters of the model.

    Attributes
    ----------
    sought
        Whether those that there were before the first step are known.
    """

    def __init__(self, given: Sequence[torch.optim.Optimizer]) -> None:
        self.given = tuple(given)
        self.sought = bool(given)
        self._stepped: set[int] = set()  # in the step in progress
        self._before: set[int] = set()  # in the one that has just ended
        self._together = 1
        self._known: dict[int, tuple[weakref.ref[torch.optim.Optimizer], bool]] = {}

    def is_ours(self, optimizer: torch.optim.Optimizer, model: nn.Module | None) -> bool:
        """Whether its steps train the model."""
        if self.given:
            return any(optimizer is ours for ours in self.given)
        known = self._known.get(id(optimizer))
        if known is None or known[0]() is not optimizer:
            ids = set() if model is None else {id(p) for p in nn.Module.parameters(model)}
            ours = any(id(p) in ids for group in optimizer.param_groups for p in group["params"])
            known = self._known[id(optimizer)] = (weakref.ref(optimizer), ours)
        return known[1]

    def find(self, model: nn.Module) -> None:
        """Get to know the optimizers that are there already; takes some milliseconds, as all objects are looked at."""
        self.sought = True
        for candidate in gc.get_objects():
            if issubclass(type(candidate), torch.optim.Optimizer) and "param_groups" in candidate.__dict__:
                self.is_ours(candidate, model)

    @property
    def ours(self) -> list[torch.optim.Optimizer]:
        """Those that are known to train the model."""
        if self.given:
            return list(self.given)
        known = [optimizer() for optimizer, is_ours in self._known.values() if is_ours]
        return [optimizer for optimizer in known if optimizer is not None]

    def count_as_ours(self, optimizer: torch.optim.Optimizer) -> None:
        """Count one that has none of the model's parameters: it optimizes an input, for example."""
        self._known[id(optimizer)] = (weakref.ref(optimizer), True)

    def completes(self, optimizer: torch.optim.Optimizer, *, in_progress: bool) -> bool:
        """One of ours has stepped: whether the training step is complete with it.

        Parameters
        ----------
        in_progress
            Whether a training step has begun; if not, this one belongs to the step that has just ended, which is learned.
        """
        again = id(optimizer) in self._stepped
        if not self.given and not in_progress and self._before and id(optimizer) not in self._before:
            self._before.add(id(optimizer))
            self._together = len(self._before)
            return False
        self._stepped.add(id(optimizer))
        return again or len(self._stepped) >= (len(self.given) or self._together)

    @property
    def awaits_more(self) -> bool:
        """Whether some of the learned optimizers have stepped and others have not: the next forward pass ends the step."""
        return not self.given and bool(self._stepped)

    def ended(self) -> None:
        """The training step is over."""
        self._before, self._stepped = self._stepped, set()

    def abandon(self) -> None:
        """It was broken off."""
        self._stepped = set()

    def clear(self) -> None:
        """Forget all optimizers."""
        self.given = ()
        self.sought = False
        self._known.clear()
        self._stepped = set()
        self._before = set()
