"""What a loop without autocast or without a scaler is given when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from amp_widgets.core.autocast import DTYPES, autocast_context
from amp_widgets.core.scaler import LiveScaler
from amp_widgets.core.settings import AutocastName


def call_in_autocast(name: AutocastName, device_type: str, call: Callable[[], Any]) -> Any:
    """Run a model's forward pass in autocast; what it returns in that format is cast back to fp32.

    The loss, which the loop computes outside, is then computed in fp32, as autocast does with the usual losses.
    """
    with autocast_context(name, device_type):
        output = call()
    dtype = DTYPES.get(name)
    return pytree.tree_map(lambda leaf: leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype == dtype else leaf, output)


def backward_scaled(scaler: LiveScaler, backward: Callable[[], Any], parameters: Iterable[torch.Tensor]) -> Any:
    """Run a backward pass from a scaled loss, and unscale the gradients as soon as it is over.

    So whoever looks at a gradient next, clips or accumulates it, finds it as without scaling. Gradients that were there
    before are scaled first, because the new ones are added to them; for a power of two that is exact.

    Parameters
    ----------
    scaler
        Has scaled the loss.
    backward
        The backward pass.
    parameters
        All that may get a gradient.
    """
    parameters = list(parameters)
    scaler.scale_gradients(parameters)
    try:
        return backward()
    finally:
        scaler.unscale_gradients(parameters)


def leaves_of(tensors: Any) -> Iterator[torch.Tensor]:
    """The tensors that a backward pass from `tensors` gives gradients to, but for those hidden in a graph of its own.

    Reentrant checkpointing hides them, and so does whatever else runs a backward pass within one.
    """
    roots = [t for t in (tensors if isinstance(tensors, (list, tuple)) else [tensors]) if isinstance(t, torch.Tensor)]
    yield from (root for root in roots if root.is_leaf and root.requires_grad)
    waiting: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        variable = getattr(node, "variable", None)  # of AccumulateGrad
        if variable is not None:
            yield variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


class HiddenGradients:
    """Makes an optimizer's step do nothing, by taking the gradients away for as long as it lasts: optimizers pass over those
    parameters that have none, and their state with them."""

    def __init__(self) -> None:
        self._taken: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        """Take them away; at the beginning of a step."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._taken[id(optimizer)] = [(p, p.grad) for p in parameters]
        for parameter in parameters:
            parameter.grad = None

    def give_back(self, optimizer: torch.optim.Optimizer) -> None:
        """Put them back; at its end."""
        for parameter, gradient in self._taken.pop(id(optimizer), ()):
            parameter.grad = gradient

    def give_back_all(self) -> None:
        """Also those of steps that did not end."""
        while self._taken:
            for parameter, gradient in self._taken.popitem()[1]:
                parameter.grad = gradient
