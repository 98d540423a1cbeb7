from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_widgets.analysis import extra_time
from amp_widgets.analysis.extra_time import LayerTimer
from amp_widgets.analysis.layer_kinds import module_kind, noting_kinds
from amp_widgets.core.checkpointing import Checkpointing
from amp_widgets.core.layers import named_layers
from amp_widgets.session import AmpSession


class Block(nn.Module):
    def __init__(self, width: int, repeats: int = 1) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.repeats = repeats

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.repeats):
            x = torch.tanh(self.norm(self.inner(x)))
        return x


def kinds_of(model: nn.Module, inputs: Tensor) -> dict[str, Any]:
    kinds: dict[str, Any] = {}
    with noting_kinds({id(module): name for name, module in named_layers(model).items()}, kinds):
        model(inputs)
    return kinds


def test_alike_are_those_that_compute_the_same_on_the_same_shapes() -> None:
    model = nn.Sequential(Block(4), Block(4), Block(4, repeats=2), nn.Linear(4, 6), Block(6), nn.Dropout(0.1), nn.Dropout(0.2))
    kinds = kinds_of(model, torch.zeros(2, 4))
    assert kinds["0"] == kinds["1"]
    assert kinds["0.inner"] == kinds["1.inner"] != kinds["2.inner"]  # which is called twice
    assert len({kinds[name] for name in "023456"}) == 6
    assert kinds_of(model, torch.zeros(3, 4))["0"] != kinds["0"]


def test_what_is_no_setting_is_the_same_only_if_it_is_the_same_object() -> None:
    one, two, three = nn.Tanh(), nn.Tanh(), nn.Tanh()
    shared = {"rank": 4}
    one.config, two.config, three.config = shared, shared, {"rank": 4}  # type: ignore[assignment]
    assert module_kind(one) == module_kind(two) != module_kind(three)
    frozen = nn.Linear(2, 2)
    frozen.weight.requires_grad_(False)
    assert module_kind(frozen) != module_kind(nn.Linear(2, 2)) == module_kind(nn.Linear(2, 2))


def test_nothing_stays_on_a_model() -> None:
    model = nn.Sequential(Block(4), Block(4))
    kinds = kinds_of(model, torch.zeros(2, 4))
    hooks = len(torch.nn.modules.module._global_forward_hooks)
    kinds_of(model, torch.zeros(2, 4))
    assert len(torch.nn.modules.module._global_forward_hooks) == hooks
    checkpointing = Checkpointing(model)
    checkpointing.apply(["0"])
    checkpointing.close()
    assert kinds_of(model, torch.zeros(2, 4)) == kinds


def test_layers_that_are_alike_take_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes faster with each look, so that later layers seem to take longer."""
    looks = iter(range(10**6))
    run = extra_time._Passes._run

    def by_that_clock(self: Any) -> Any:
        self._now = lambda: float(next(looks)) ** 2
        return run(self)

    monkeypatch.setattr(extra_time._Passes, "_run", by_that_clock)
    model = nn.Sequential(*(Block(4, repeats=repeats) for repeats in (1, 1, 3, 1)))
    with AmpSession(model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
        batch = torch.randn(2, 4), torch.zeros(2, dtype=torch.long)
        timer = LayerTimer(session, batch, nn.functional.cross_entropy, verb="plan", together=("0", "1", "2", "3"))
        times = timer.time(limit_s=0.0)
    assert times.forward_s["0"] == times.forward_s["1"] == times.forward_s["3"] < times.forward_s["2"]
    assert times.again_s["0"] == times.again_s["1"] == times.again_s["3"] != times.again_s["2"]
    assert times.cost_s("0") == times.cost_s("3")
