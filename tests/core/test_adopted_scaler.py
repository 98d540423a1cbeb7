"""A user's own scaler made live, and let go again."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from amp_widgets.core.scaler import LiveScaler
from amp_widgets.core.settings import Settings

GradScaler = torch.amp.GradScaler


class Theirs(GradScaler):
    """A user's subclass."""

    seen: list[str] = []  # noqa: RUF012  # of the class on purpose

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        Theirs.seen.append("step")
        return super().step(optimizer, *args, **kwargs)


class Run:
    """A few steps, one of them with an overflow, and the scales after each."""

    def __init__(self, scaler: GradScaler) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scaler = scaler
        self.scales: list[float] = []

    def steps(self, count: int, *, overflow_at: int = -1) -> Run:
        for step in range(count):
            self.optimizer.zero_grad()
            loss = self.model(torch.ones(3, 4)).sum() * (float("inf") if step == overflow_at else 1.0)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scales.append(self.scaler.get_scale())
        return self


@pytest.mark.parametrize("kind", [GradScaler, Theirs, torch.cuda.amp.GradScaler])
@pytest.mark.parametrize("scale", [2.0**10, 3.0, 2.0**-140, 2.0**127], ids=str)
@pytest.mark.filterwarnings("ignore:`torch.cuda.amp.GradScaler:FutureWarning")
def test_it_computes_what_it_did_before(kind: Any, scale: float) -> None:
    def make() -> GradScaler:
        if kind is torch.cuda.amp.GradScaler:
            return torch.cuda.amp.GradScaler(init_scale=scale, enabled=False)
        made: GradScaler = kind("cpu", init_scale=scale, growth_interval=3)
        return made

    plain, live = Run(make()).steps(8, overflow_at=4), Run(make())
    LiveScaler.adopt(live.scaler, Settings())
    live.steps(8, overflow_at=4)
    assert plain.scales == live.scales
    for one, other in zip(plain.model.parameters(), live.model.parameters(), strict=True):
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))
    assert plain.scaler.is_enabled() == live.scaler.is_enabled()
    if plain.scaler.is_enabled():
        assert plain.scaler.state_dict() == live.scaler.state_dict()


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("used", [True, False])
def test_release_leaves_its_rules_and_attributes_as_they_were(enabled: bool, used: bool) -> None:
    scaler = Theirs("cpu", growth_interval=5, backoff_factor=0.25, enabled=enabled)
    run = Run(scaler)
    if used:
        run.steps(2)
    keys = set(scaler.__dict__)
    rules = {name: scaler.__dict__[name] for name in keys & {"_growth_factor", "_growth_interval", "_backoff_factor", "_enabled"}}
    live = LiveScaler.adopt(scaler, Settings())
    assert scaler is live  # type: ignore[comparison-overlap]
    live.configure(Settings(autocast="fp16", init_scale=2.0**5, growth_interval=100, growth_factor=4.0), set_scale=True)
    run.steps(3)
    assert scaler.get_scale() == 2.0**5
    live.configure(Settings(autocast="bf16"), set_scale=False)
    assert not scaler.is_enabled()
    live.release()
    assert type(scaler) is Theirs
    assert set(scaler.__dict__) == keys
    assert {name: scaler.__dict__[name] for name in rules} == rules
    run.steps(1)
    if enabled:
        assert scaler.get_scale() == 2.0**5  # the state that its steps led to is its own


def test_a_users_override_is_called_once_a_step() -> None:
    Theirs.seen.clear()
    run = Run(Theirs("cpu"))
    LiveScaler.adopt(run.scaler, Settings())
    run.steps(4)
    assert Theirs.seen == ["step"] * 4


def test_what_the_user_sets_meanwhile_stays() -> None:
    scaler = GradScaler("cpu")
    live = LiveScaler.adopt(scaler, Settings())
    scaler.set_growth_interval(7)
    live.configure(Settings(autocast="fp16", growth_interval=9), set_scale=False)
    assert scaler.get_growth_interval() == 9
    live.release()
    assert scaler.get_growth_interval() == 7


def test_a_copy_and_a_pickle_are_of_its_own_class() -> None:
    scaler = Theirs("cpu", init_scale=8.0)
    LiveScaler.adopt(scaler, Settings())
    Run(scaler).steps(1)
    for twin in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert type(twin) is Theirs
        assert twin.get_scale() == 8.0
        assert not set(twin.__dict__) & {"_settings", "_theirs", "_ruled"}


def test_a_disabled_ones_state_is_loaded_as_ever() -> None:
    scaler = GradScaler("cpu", enabled=False)
    LiveScaler.adopt(scaler, Settings())
    scaler.load_state_dict({"scale": 4.0})  # torch ignores it, whatever it is
    assert scaler.get_scale() == 1.0


class TestScalingThatTheLoopDoesNotKnowOf:
    def make(self, scale: float) -> LiveScaler:
        return LiveScaler("cpu", Settings(autocast="fp16", init_scale=scale))

    def test_gradients_are_true_right_after_backward_also_accumulated_ones(self) -> None:
        scaler, model = self.make(2.0**12), nn.Linear(3, 2)
        twin = copy.deepcopy(model)
        for batch in (torch.ones(1, 3), torch.full((1, 3), 0.3)):
            twin(batch).sum().backward()
            scaled = scaler.scale(model(batch).sum())
            scaler.scale_gradients(model.parameters())
            scaled.backward()
            scaler.unscale_gradients(model.parameters())
            for one, other in zip(model.parameters(), twin.parameters(), strict=True):
                assert one.grad is not None
                assert other.grad is not None
                assert torch.equal(one.grad, other.grad)

    def test_each_optimizer_is_skipped_for_its_own_inf_and_the_scale_backs_off_once(self) -> None:
        scaler = self.make(2.0**12)
        first, second = nn.Linear(3, 2), nn.Linear(3, 2)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
        loss = scaler.scale(first(torch.ones(1, 3)).sum() + second(torch.ones(1, 3)).sum() * float("inf"))
        parameters = [*first.parameters(), *second.parameters()]
        scaler.scale_gradients(parameters)
        loss.backward()
        scaler.unscale_gradients(parameters)
        assert [scaler.must_skip(optimizer) for optimizer in optimizers] == [False, True]
        scaler.update()
        assert scaler.get_scale() == 2.0**11
        assert [scaler.step_was_skipped(optimizer) for optimizer in optimizers] == [False, True]

    def test_sparse_gradients(self) -> None:
        scaler, table = self.make(2.0**12), nn.Embedding(5, 2, sparse=True)
        for _ in range(2):
            scaled = scaler.scale(table(torch.tensor([1, 1, 3])).sum())
            scaler.scale_gradients(table.parameters())
            scaled.backward()
            scaler.unscale_gradients(table.parameters())
        assert table.weight.grad is not None
        dense = table.weight.grad.to_dense()
        assert dense.sum(1).tolist() == [0, 8, 0, 4, 0]
        assert not scaler.must_skip(torch.optim.SparseAdam(table.parameters()))
