"""Activation checkpointing of single layers of a live model, switched on and off without a trace.

How a layer's forward pass is changed, see `amp_widgets.core.class_exchange`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from amp_widgets.core.class_exchange import Change
from amp_widgets.core.layer_switch import LayerSwitch
from amp_widgets.core.layers import CHECKPOINTED, Layer, is_compiled_wrapper, list_layers
from amp_widgets.core.recompute import Recomputable, recomputing

__all__ = ["Checkpointing", "Layer", "recomputing"]


def _run_checkpointed(layer: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not torch.is_grad_enabled():
        return call(*args, **kwargs)
    if torch.compiler.is_compiling():  # the compiler keeps buffers and random numbers right itself
        return checkpoint(call, *args, use_reentrant=False, **kwargs)
    if _is_transformed():
        return call(*args, **kwargs)
    return Recomputable(layer, call, args, kwargs).run()


def _is_transformed() -> bool:
    """Within ``torch.func`` or a tracer, neither of which can be checkpointed: the layer runs as it is."""
    return torch._C._get_tracing_state() is not None or torch._C._functorch.peek_interpreter_stack() is not None


class Checkpointing(LayerSwitch):
    """The checkpointed layers of one model.

    A checkpointed layer keeps its inputs alone for the backward pass and computes the rest again when it is needed. Loss,
    gradients, buffers and random numbers are the same, bit for bit: the recompute starts from the random state, autocast
    state, buffers, parameters and plain attributes (numbers, strings, tensors, small lists, tuples and dicts of them) that the
    forward pass started from, and what it does to them is undone. Without gradients (``torch.no_grad``) nothing changes.

    What cannot be seen, and happens twice: whatever else a forward pass does to Python objects that are not attributes of
    the layer's modules (a counter in a global variable, a cache object passed in), or to tensors behind autograd's back that
    are no buffers (``weight.data.clamp_()``); forward hooks of modules *inside* a checkpointed layer also fire in the
    recompute, where `recomputing` is true. A tensor that is passed to a checkpointed layer and overwritten in place *after*
    it, before the backward pass, raises torch's own error there, also where the layer alone would not have needed it.

    Parameters
    ----------
    model
        The model; wrappers around it (``torch.compile``, DataParallel, DistributedDataParallel) are seen through.

    Raises
    ------
    ModelError
        When `model` is not a module.
    """

    setting = CHECKPOINTED
    change = Change(word="checkpointed", run=_run_checkpointed, rank=0)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Every module inside the model, in its order, as it is now; empty after `close`."""
        model = self._model
        return () if model is None else list_layers(model)

    @property
    def compiled(self) -> bool:
        """Whether ``torch.compile`` was applied to the model or to a module in it: a switched layer is then compiled anew."""
        model = self._model
        return model is not None and any(
            is_compiled_wrapper(module) or getattr(module, "_compiled_call_impl", None) is not None for module in model.modules()
        )
