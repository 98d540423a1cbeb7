"""One call of a checkpointed layer: run now, and run again in the backward pass from the very same state."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from amp_widgets.core.host_random import HostRandom, draws_on_host
from amp_widgets.core.layer_state import LayerState, Place, copy_of, modules_of
from amp_widgets.errors import RecomputeError


def recomputing() -> bool:
    """Whether this thread is within a backward pass, where a forward hook that fires means a recompute.

    It does not matter whose checkpointing it is.
    """
    return torch._C._current_graph_task_id() != -1 or getattr(_thread, "recomputing", False)


class Recomputable:
    """A call of a layer's forward pass that ``torch.utils.checkpoint`` can repeat without a trace.

    Parameters
    ----------
    layer
        The module, whose state is put back for the recompute.
    call
        Its bound forward method.
    args, kwargs
        What it was called with.

    Notes
    -----
    Arguments go to torch flattened: it looks for devices among positional tensors only, and only positional tensors are
    protected from being overwritten unnoticed.
    """

    __slots__ = ("_call", "_facts", "_host_random", "_inputs", "_pending", "_state")

    def __init__(self, layer: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        facts = _facts.get(layer)
        if facts is None:
            facts = _facts[layer] = _Facts(layer)
        self._call = call
        self._pending: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._inputs = _Inputs(facts, args, kwargs)
        self._facts = facts
        self._state = LayerState(layer, facts.writes_to)
        self._host_random = HostRandom() if facts.draws_on_host else None

    @property
    def layer(self) -> nn.Module:
        """Whose call it is."""
        layer: nn.Module = self._call.__self__  # type: ignore[attr-defined]  # of a bound method
        return layer

    def run(self) -> Any:
        """The layer's output, whose graph recomputes what it needs."""
        saved = self._inputs.for_torch()
        missing = self._state.devices - {value.device for value in saved if isinstance(value, torch.Tensor)}
        # torch rewinds the random state of those devices only that a tensor argument is on
        markers = [torch.empty(0, device=device) for device in missing]
        return checkpoint(self, *saved, *markers, use_reentrant=False)

    def __call__(self, *saved: Any) -> Any:
        """What torch calls: the first time for the forward pass, then for each recompute."""
        if self._pending is None:
            return self._recompute(saved)
        args, kwargs = self._pending
        self._pending = None
        output = self._call(*args, **kwargs)  # the caller's own objects: what is done to them in place is to be seen
        self._inputs.settle()
        try:
            self._state.settle()
        finally:
            self._facts.writes_to = self._state.writes_to
        if self._host_random is not None and not self._host_random.was_used():
            self._host_random = None
        return output

    def _recompute(self, saved: Sequence[Any]) -> Any:
        args, kwargs = self._inputs.rebuild(saved)
        was_recomputing = getattr(_thread, "recomputing", False)
        _thread.recomputing = True
        try:
            with self._state:
                if self._host_random is None:
                    return self._call(*args, **kwargs)
                with self._host_random:
                    return self._call(*args, **kwargs)
        finally:
            _thread.recomputing = was_recomputing


_thread = threading.local()


class _Facts:
    """What is known of a layer from its code and its first call."""

    __slots__ = ("draws_on_host", "kind", "overwrites_inputs", "writes_to")

    def __init__(self, layer: nn.Module) -> None:
        self.kind = type(layer).__name__
        self.draws_on_host = draws_on_host(modules_of(layer))
        self.overwrites_inputs: bool | None = None
        """None before the end of the first call."""
        self.writes_to: frozenset[Place] | None = None
        """The large tensors that it writes to; None before the end of the first call."""


_facts: weakref.WeakKeyDictionary[nn.Module, _Facts] = weakref.WeakKeyDictionary()


class _Inputs:
    """The arguments of a call, such that the recompute gets them as they were.

    Most layers leave their inputs alone; some overwrite them, as a ReLU with ``inplace=True`` does, which shows only
    afterwards. So copies are made in the first call of each layer, and later for those layers alone that need them. A tensor
    that is passed several times is the same tensor again in the recompute: attention asks whether its query is its key.
    """

    __slots__ = ("_copies", "_facts", "_held", "_learning", "_overwritten", "_positions", "_spec", "_values", "_versions")

    def __init__(self, facts: _Facts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, self._spec = pytree.tree_flatten((args, kwargs))
        places = {identity: place for place, identity in enumerate(dict.fromkeys(map(id, leaves)))}
        self._facts = facts
        self._positions = [places[id(leaf)] for leaf in leaves]
        self._values = list({id(leaf): leaf for leaf in leaves}.values())  # each object once
        self._versions = [_version(value) for value in self._values]
        self._overwritten: set[int] = set()
        self._learning = facts.overwrites_inputs is None
        self._copies = (
            None
            if facts.overwrites_inputs is False
            else [copy_of(value) if isinstance(value, torch.Tensor) else value for value in self._values]
        )
        self._held: list[Any] | None = None

    def for_torch(self) -> list[Any]:
        """What torch shall save; tensors of the same shapes each time, as a checkpoint around this one counts them."""
        if self._copies is None:
            return self._values
        return [_stand_in(copy) for copy in self._copies] if self._learning else self._copies

    def settle(self) -> None:
        """After the forward pass: remember what was overwritten, and let go of what is not needed."""
        values, self._values = self._values, []
        self._overwritten = {at for at, value in enumerate(values) if _version(value) != self._versions[at]}
        if self._copies is None and self._overwritten:
            self._facts.overwrites_inputs = True
            raise RecomputeError(
                f"a checkpointed {self._facts.kind} overwrote its input in place, which it had not done before, so that "
                "its forward pass cannot be recomputed: run this step again, or do not checkpoint this layer"
            )
        if self._learning:
            self._facts.overwrites_inputs = bool(self._overwritten)
            assert self._copies is not None
            self._held = [self._copies[at] if at in self._overwritten else value for at, value in enumerate(values)]
        self._copies = None

    def rebuild(self, saved: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``args, kwargs`` for a recompute."""
        values = list(saved if self._held is None else self._held)
        for at in self._overwritten:
            values[at] = values[at].clone()  # no leaf of the graph any more, so that it may be overwritten
        if self._held is not None and any(
            _version(value) != version
            for at, (value, version) in enumerate(zip(values, self._versions, strict=True))
            if at not in self._overwritten
        ):
            raise RecomputeError(
                f"an input of a checkpointed {self._facts.kind} was overwritten in place after its forward pass, which "
                "therefore cannot be recomputed: do not checkpoint this layer, or do not overwrite its input"
            )
        args, kwargs = pytree.tree_unflatten([values[place] for place in self._positions], self._spec)
        return args, kwargs


def _version(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else -1


def _stand_in(value: Any) -> Any:
    """Of the shape of a tensor, but with no memory of its own."""
    if isinstance(value, torch.Tensor):
        return torch.empty((), dtype=value.dtype, device=value.device).expand(value.shape)
    return value
