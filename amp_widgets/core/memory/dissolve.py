"""The graph of a backward pass that ran out of memory, taken off the tensors that still hold it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from amp_widgets.errors import AmpWidgetsError


class DissolvedGraphError(AmpWidgetsError, RuntimeError):
    """A backward pass was begun from a tensor whose graph was dissolved, because a backward pass had run out of memory in it."""


def dissolve(roots: Iterable[Any]) -> int:
    """Let go of a graph whose backward pass has died, so that what it has saved is freed.

    Every tensor that leads into it (``loss``, ``outputs`` and what else the user has in a variable) keeps its value, and is in
    a graph of one node from now on, which raises in a backward pass: as after a backward pass that was completed, the forward
    pass has to be run again. Tensors made of it after a ``detach()`` are untouched, and so are the parameters.

    Parameters
    ----------
    roots
        Nodes of the graph from which the pass began.

    Returns
    -------
    int
        How many tensors were taken out of it.

    Notes
    -----
    The tensors are found among all objects that Python knows, which takes some milliseconds. A graph that is held as a node
    (``loss.grad_fn`` in a variable) stays. Only for the thread that trains, outside of a backward pass: nobody may be using
    the tensors meanwhile.
    """
    dead = _reachable(roots)
    leads: dict[Any, bool] = dict.fromkeys(dead, True)
    found = [tensor for tensor in _tensors_with_graph() if _leads_there(_node_of(tensor), leads)]
    devices = {torch.device("cpu"), *(tensor.device for tensor in found)}
    with torch._C.DisableTorchFunction():
        for tensor in found:
            _sever(tensor)
    for device in devices:
        _clear_ready_queue(device)
    return len(found)


def _clear_ready_queue(device: torch.device) -> None:
    """Let torch's engine drop the nodes of the dead pass that were about to be worked off.

    They stay in the queue of the thread, with all that they have saved, until a backward pass works off nodes that were made
    before them. Nodes are numbered in each thread by itself, so that one of a new thread comes last.
    """
    made: list[Tensor] = []

    def make() -> None:
        with torch.enable_grad():
            made.append(torch.zeros((), device=device, requires_grad=True) * 1.0)

    try:
        thread = threading.Thread(target=make, name="amp_widgets graph")
        thread.start()
        thread.join()
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            torch.autograd.Variable._execution_engine.run_backward(
                (made[0],), (torch.ones_like(made[0]),), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
    except Exception:  # without memory for even that: the next backward pass does it
        return


def _reachable(roots: Iterable[Any]) -> set[Any]:
    """Nodes of the graph below, but for the leaves, which other graphs share."""
    seen: set[Any] = set()
    waiting = [root for root in roots if not _is_leaf(root)]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions if following is not None and not _is_leaf(following)]
    return seen


def _leads_there(node: Any, leads: dict[Any, bool]) -> bool:
    """Whether a node is known to be dead or one below it is; what is found out goes into `leads`."""
    path: list[tuple[Any, Any]] = [(node, None)]
    while path:
        current, following = path.pop()
        if following is None:
            if current in leads:
                continue
            leads[current] = False
            following = [below for below, _ in current.next_functions if below is not None]
            path.append((current, following))
            path += [(below, None) for below in following]
        else:
            leads[current] = any(leads.get(below, False) for below in following)
    return leads[node]


def _tensors_with_graph() -> list[Tensor]:
    found = []
    for candidate in gc.get_objects():
        if issubclass(type(candidate), Tensor) and _node_of(candidate) is not None:
            found.append(candidate)
    return found


def _node_of(tensor: Tensor) -> Any:
    with torch._C.DisableTorchFunction():
        try:
            return tensor.grad_fn
        except Exception:  # of another thread that is at it, or of torch.func
            return None


def _sever(tensor: Tensor) -> None:
    try:
        plain = tensor.detach()
        if type(plain) is not type(tensor) and type(plain) is not Tensor:
            return
        with torch.enable_grad():
            torch._C._swap_tensor_impl(tensor, _Dissolved.apply(torch.zeros((), requires_grad=True), [plain]))
    except Exception:  # a foreign subclass may do anything; its graph then lives as long as it does
        return


class _Dissolved(torch.autograd.Function):
    """The last node of a graph that is no more."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, held: list[Tensor]) -> Tensor:
        return held.pop()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise DissolvedGraphError(
            "backward: got a tensor whose graph was dissolved after its backward pass had run out of memory, to free what it "
            "held; expected a new one. Run the forward pass again"
        )


def _is_leaf(node: Any) -> bool:
    return bool(node.name() == "torch::autograd::AccumulateGrad")
