"""One forward pass on a batch, watched for what mixed precision and checkpointing stumble over."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from amp_widgets.analysis.checkpoint_calls import CheckpointCall, watching_checkpoints
from amp_widgets.analysis.trial import Trial, check_loss
from amp_widgets.core.autocast import DTYPES
from amp_widgets.core.layers import inner_model, named_layers
from amp_widgets.core.memory.death import is_out_of_memory
from amp_widgets.core.settings import AutocastName

MODEL = "(model)"
LOSS = "loss_fn"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A call of ``torch.utils.checkpoint``, by the user's own code or by a checkpointed layer.

    Attributes
    ----------
    layer
        In whose forward pass.
    reentrant
        Of which kind.
    keeps_random_state
        ``preserve_rng_state``.
    draws
        Whether random numbers were drawn in it.
    has_gradient
        Whether one of its inputs asks for a gradient.
    """

    layer: str
    reentrant: bool
    keeps_random_state: bool
    draws: bool
    has_gradient: bool


@dataclass(kw_only=True, slots=True)
class Rehearsal:
    """What was seen.

    Attributes
    ----------
    autocast
        The format that it ran in.
    unsafe_losses
        Layers that called ``binary_cross_entropy`` while autocast was on; not where the code has switched it off for CUDA.
    functions
        Custom autograd Functions, with the layer that ran them and whether ``custom_fwd`` was on them.
    checkpoints
        In the order in which they ended.
    loss_dtype
        None where there was no loss.
    error
        How it failed with autocast, while it runs without; None where it did not.
    """

    autocast: AutocastName
    unsafe_losses: list[str] = field(default_factory=list)
    functions: list[tuple[str, str, bool]] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    loss_dtype: torch.dtype | None = None
    error: str | None = None


def rehearse(tried: Trial, autocast: AutocastName, device_type: str, *, with_loss: bool) -> Rehearsal:
    """Run a forward pass in a format, and the loss with it.

    Raises
    ------
    RunError
        When the loss is not one number.
    Exception
        What the user's code raises also without autocast.
    """
    seen = Rehearsal(autocast=autocast)
    try:
        loss = _run(tried, seen, device_type)
    except Exception as error:
        if is_out_of_memory(error) or autocast == "fp32":
            raise
        words = f"{type(error).__name__}: {error}".splitlines()[0]
        tried.begin()
        tried.forward("fp32")  # fails too where autocast is not to blame
        seen.error = words
    else:
        if with_loss:
            seen.loss_dtype = check_loss(loss, graph=False).dtype
    return seen


def _run(tried: Trial, seen: Rehearsal, device_type: str) -> Any:
    watch = _Watch(seen, device_type)
    tried.begin()
    with _also_on_cuda(seen.autocast), watch.layers(tried.model), watch.checkpoints(), watch:
        loss = tried.forward(seen.autocast)
    watch.claim(loss, LOSS)
    return loss


class _Watch(TorchFunctionMode):
    """Notes what is called, and in which layer."""

    def __init__(self, seen: Rehearsal, device_type: str) -> None:
        super().__init__()
        self._seen = seen
        self._device_type = device_type
        self._inside: list[str] = []
        self._nodes: dict[int, Any] = {}  # of the graph, held so that an id means one node

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _UNSAFE_LOSSES and all(map(torch.is_autocast_enabled, {self._device_type, "cuda"})):
            self._seen.unsafe_losses.append(self._layer)
        return function(*args, **(kwargs or {}))

    @property
    def _layer(self) -> str:
        return self._inside[-1] if self._inside else LOSS

    def claim(self, value: Any, layer: str) -> None:
        """Nodes of the graph behind tensors that are new belong to this layer."""
        waiting = [leaf.grad_fn for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        while waiting:
            node: Any = waiting.pop()
            if node is None or id(node) in self._nodes:
                continue
            self._nodes[id(node)] = node
            function = getattr(type(node), "_forward_cls", None)
            if function is not None and function.__name__ == "CheckpointFunction":  # torch's, also where it was called by itself
                self._seen.checkpoints.append(_reentrant_in(layer))
            elif function is not None and not function.__module__.startswith(("torch.", "amp_widgets.")):
                # what custom_fwd leaves on the context, which is the node
                self._seen.functions.append((function.__name__, layer, hasattr(node, "_fwd_used_autocast")))
            waiting += [following for following, _ in node.next_functions]

    @contextlib.contextmanager
    def layers(self, model: nn.Module) -> Iterator[None]:
        """Know which layer runs."""
        handles = []

        def begins(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._inside:
                self.claim((args, kwargs), self._layer)
            self._inside.append(name)

        def ends(module: nn.Module, args: Any, output: Any) -> None:
            self.claim(output, self._inside.pop())

        try:
            for name, module in {MODEL: inner_model(model), **named_layers(model)}.items():
                if not isinstance(module, torch.jit.ScriptModule):
                    handles.append(module.register_forward_pre_hook(functools.partial(begins, name), with_kwargs=True))
                    handles.append(module.register_forward_hook(ends))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def checkpoints(self) -> contextlib.AbstractContextManager[None]:
        """Note the checkpoints on this thread."""
        return watching_checkpoints(self._checkpoint_begins)

    def _checkpoint_begins(self, call: CheckpointCall) -> tuple[Callable[..., Any], Callable[[], None]]:
        before = _random_state()
        with_gradient = any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(call.args))

        def ends() -> None:
            self._seen.checkpoints.append(
                Checkpoint(
                    layer=self._layer,
                    reentrant=call.reentrant,
                    keeps_random_state=call.keeps_random_state,
                    draws=_random_state() != before,
                    has_gradient=with_gradient,
                )
            )

        def watched(*args: Any, **kwargs: Any) -> Any:
            with self._functions_without_nodes():
                return call.function(*args, **kwargs)

        return watched if call.reentrant else call.function, ends

    @contextlib.contextmanager
    def _functions_without_nodes(self) -> Iterator[None]:
        """Note custom autograd Functions where gradients are off, so that they leave no node in the graph."""

        def called(frame: types.FrameType, event: str, argument: Any) -> None:
            if event == "call" and frame.f_code is _APPLY:
                function = frame.f_locals.get("cls")
                if function is not None and not function.__module__.startswith(("torch.", "amp_widgets.")):
                    self._seen.functions.append((function.__name__, self._layer, _has_custom_fwd(function)))

        before = sys.getprofile()
        sys.setprofile(called)
        try:
            yield
        finally:
            sys.setprofile(before)


def _has_custom_fwd(function: Any) -> bool:
    """Whether torch's decorator is on its forward, by the name of the function that it returns."""
    forward = function.forward
    while forward is not None:
        if getattr(getattr(forward, "__code__", None), "co_name", "") == "decorate_fwd":
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


@contextlib.contextmanager
def _also_on_cuda(autocast: AutocastName) -> Iterator[None]:
    """Autocast for CUDA is on in the same format, without effect on a CPU: that a region switches it off is seen by that."""
    if autocast == "fp32":
        yield
        return
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", DTYPES[autocast])
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


def _reentrant_in(layer: str) -> Checkpoint:
    """A reentrant checkpoint of which only the node in the graph is known."""
    return Checkpoint(layer=layer, reentrant=True, keeps_random_state=True, draws=False, has_gradient=True)


_UNSAFE_LOSSES = (nn.functional.binary_cross_entropy, torch._C._nn.binary_cross_entropy)
_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


def _random_state() -> list[bytes]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    return [state.numpy().tobytes() for state in states]
