"""What functions that only try something must leave alone."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from amp_widgets.session import AmpSession


@pytest.fixture
def untouched() -> Callable[[AmpSession], contextlib.AbstractContextManager[None]]:
    """A context in which model, optimizers, scaler, history and random states of a session must not change, bit for bit."""
    return _untouched


@contextlib.contextmanager
def _untouched(session: AmpSession) -> Iterator[None]:
    before = _look(session)
    yield
    _assert_same(before, _look(session), "")


def _look(session: AmpSession) -> dict[str, Any]:
    model = session.model
    assert model is not None
    return {
        "tensors": {name: (id(t), t.detach().clone()) for name, t in (*model.named_parameters(), *model.named_buffers())},
        "gradients": {n: (id(p.grad), None if p.grad is None else p.grad.clone()) for n, p in model.named_parameters()},
        "parameters' hooks": {n: (p._backward_hooks, p._post_accumulate_grad_hooks) for n, p in model.named_parameters()},
        "modules": {
            name: (id(module), id(type(module)), module.training, sorted(vars(module)), _hooks(module))
            for name, module in model.named_modules()
        },
        "plain": {
            f"{name}.{key}": copy.copy(value)
            for name, module in model.named_modules()
            for key, value in vars(module).items()
            if isinstance(value, (int, float, str, list))
        },
        "optimizers": [copy.deepcopy(optimizer.state_dict()) for optimizer in session.optimizers],
        "scaler": session.scaler.state_dict(),
        "settings": session.settings,
        "layers": session._controls.checkpointing.active,
        "steps": len(session.history),
        "events": len(session.history.events()),
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1].tolist(),  # type: ignore[index]
        "python": random.getstate(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()),
        "checkpoint": {name: id(value) for name, value in vars(torch.utils.checkpoint).items()},
    }


def _hooks(module: nn.Module) -> list[int]:
    return [len(value) for key, value in sorted(vars(module).items()) if "hooks" in key and isinstance(value, dict)]


def _assert_same(one: Any, other: Any, where: str) -> None:
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            _assert_same(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for at, (a, b) in enumerate(zip(one, other, strict=True)):
            _assert_same(a, b, f"{where}/{at}")
    else:
        assert one == other, where
