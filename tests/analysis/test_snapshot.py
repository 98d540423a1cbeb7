"""A step that is only tried leaves nothing behind."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from amp_widgets.analysis.snapshot import Snapshot


class Net(nn.Module):
    """With what a step may change: batch statistics, a counter, a buffer that is replaced, random numbers of three kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2))
        self.register_buffer("running", torch.zeros(2))
        self.calls = 0
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.last = self.calls  # an attribute that was not there
        self.running = self.running + 1
        noise = random.random() + float(np.random.rand())
        output: torch.Tensor = self.body(x) * noise
        return output


def step(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    model(torch.randn(5, 4)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def look(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Any:
    """Everything, with the identities of what must stay the same objects."""
    tensors = {name: (id(t), t.detach().clone()) for name, t in (*model.named_parameters(), *model.named_buffers())}
    gradients = [(None, None) if p.grad is None else (id(p.grad), p.grad.clone()) for p in model.parameters()]
    states = [
        [
            [(name, id(v) if isinstance(v, torch.Tensor) else 0, torch.as_tensor(v).clone()) for name, v in sorted(s.items())]
            for s in o.state.values()
        ]
        for o in optimizers
    ]
    groups = [[{k: v for k, v in g.items() if k != "params"} for g in o.param_groups] for o in optimizers]
    plain = {name: value for name, value in vars(model).items() if name in ("calls", "seen", "last", "training")}
    return tensors, gradients, states, groups, repr(plain), torch.get_rng_state(), np.random.get_state()[1], random.getstate()


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, np.ndarray):
        assert (one == other).all()
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


MAKERS = {
    "adam": lambda p: [torch.optim.Adam(p, lr=0.01)],
    "fused": lambda p: [torch.optim.AdamW(p, lr=0.01, fused=True)],
    "momentum": lambda p: [torch.optim.SGD(p, lr=0.1, momentum=0.9)],
    "two": lambda p: [torch.optim.SGD(list(p)[:2], lr=0.1), torch.optim.RMSprop(list(p)[2:], lr=torch.tensor(0.1))],
}


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("name", MAKERS)
def test_a_step_is_undone(name: str, steps_before: int) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizers = MAKERS[name](list(model.parameters()))
    for _ in range(steps_before):
        step(model, optimizers)
    before = look(model, optimizers)
    with Snapshot(model, optimizers) as snapshot:
        step(model, optimizers)
        model.eval()
        optimizers[0].param_groups[0]["lr"] = 7.0
        first = look(model, optimizers)
        with pytest.raises(AssertionError):
            assert_same(before, first)
        snapshot.restore()
        assert_same(before, look(model, optimizers))
        step(model, optimizers)
    assert_same(before, look(model, optimizers))


def test_training_goes_on_as_if_nothing_had_been_tried() -> None:
    def train(tries: bool) -> Any:
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        model = Net()
        optimizers = MAKERS["adam"](list(model.parameters()))
        for _ in range(5):
            if tries:
                with Snapshot(model, optimizers):
                    step(model, optimizers)
            step(model, optimizers)
        return {name: t.detach().clone() for name, t in model.state_dict().items()}

    assert_same(train(False), train(True))


def test_it_is_put_back_after_an_exception() -> None:
    model = Net()
    optimizers = MAKERS["adam"](list(model.parameters()))
    before = look(model, optimizers)

    def interrupted() -> None:
        with Snapshot(model, optimizers):
            step(model, optimizers)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert_same(before, look(model, optimizers))
