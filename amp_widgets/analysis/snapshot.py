"""How a model, its optimizers and the random states are, to be put back after a step that is only tried."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import nn


class Snapshot:
    """What a training step changes, as it is now; `restore` puts it back, bit for bit and in the same objects.

    Kept are parameters, buffers, gradients, the plain attributes of modules (numbers, strings, flags, and small containers of
    them), the state and the hyperparameters of the optimizers, and the random states of torch, NumPy and Python. What else a
    forward pass may do, to a cache or a file for example, is not known.

    Parameters
    ----------
    model, optimizers
        Of whom.

    Notes
    -----
    The copies are held in the CPU's memory, so that those of a model on a GPU do not add to what is measured there.
    """

    def __init__(self, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the user's own, and what it held
        self._modules = [self._keep_module(module) for module in model.modules()]
        self._optimizers = [self._keep_optimizer(optimizer) for optimizer in optimizers]
        parameters = {id(p): p for p in model.parameters()}
        parameters |= {id(p): p for _, groups, _ in self._optimizers for group in groups for p in group["params"]}
        self._gradients = [(p, self._keep(p.grad)) for p in map(self._keep, parameters.values())]
        self._random = _RandomStates()

    def restore(self) -> None:
        """Put everything back; may be called again, after another try."""
        with torch.no_grad():
            for tensor, held in self._tensors.values():
                if not tensor.is_sparse and tensor.shape != held.shape:
                    tensor.resize_(held.shape)
                tensor.copy_(held)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for module, registries, attributes in self._modules:
            for name, registry in registries.items():
                _refill(module.__dict__[name], registry)
            for name in [name for name in module.__dict__ if name not in attributes and _is_plain(module.__dict__[name])]:
                del module.__dict__[name]
            module.__dict__.update({name: copy.deepcopy(value) for name, value in attributes.items() if value is not _OTHER})
        for optimizer, groups, states in self._optimizers:
            for group, kept in zip(optimizer.param_groups, groups, strict=True):
                _refill(group, kept)
            optimizer.state.clear()
            for parameter, (state, entries) in states.items():
                _refill(state, entries)
                optimizer.state[parameter] = state
        self._random.restore()

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.restore()

    def _keep(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and id(value) not in self._tensors:
            self._tensors[id(value)] = (value, value.detach().to("cpu", copy=True))
        return value

    def _keep_module(self, module: nn.Module) -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
        registries = {name: dict(module.__dict__[name]) for name in ("_parameters", "_buffers")}
        for registry in registries.values():
            for tensor in registry.values():
                self._keep(tensor)
        attributes = {name: copy.deepcopy(value) if _is_plain(value) else _OTHER for name, value in module.__dict__.items()}
        return module, registries, attributes

    def _keep_optimizer(self, optimizer: torch.optim.Optimizer) -> tuple[Any, list[dict[str, Any]], dict[Any, Any]]:
        groups = []
        for group in optimizer.param_groups:
            groups.append({**group, "params": list(group["params"])})
            for value in group.values():
                self._keep(value)  # a learning rate that is a tensor
        states = {}
        for parameter, state in optimizer.state.items():
            for value in state.values():
                self._keep(value)
            states[parameter] = (state, {k: copy.deepcopy(v) if _is_plain(v) else v for k, v in state.items()})
        return optimizer, groups, states


class _RandomStates:
    """Of torch on the CPU and on every CUDA device in use, of NumPy and of Python."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
        self._numpy = np.random.get_state()
        self._python = random.getstate()

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
        np.random.set_state(self._numpy)
        random.setstate(self._python)


_OTHER = object()
"""Stands for an attribute that is left as it is."""

_SMALL = 100


def _is_plain(value: Any) -> bool:
    """Whether a copy of the value is as good as itself."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return True
    if type(value) in (list, tuple) and len(value) <= _SMALL:
        return all(_is_plain(item) for item in value)
    return type(value) is dict and len(value) <= _SMALL and all(map(_is_plain, (*value, *value.values())))


def _refill(target: dict[Any, Any], entries: dict[Any, Any]) -> None:
    target.clear()
    target.update(entries)
