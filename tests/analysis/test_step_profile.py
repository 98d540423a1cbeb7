"""``session.profile_step`` and ``profile_next_step``: the numbers of a step, and no trace of it."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from amp_widgets.errors import RunError
from amp_widgets.session import AmpSession


class Bench:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(32, 64),
            nn.Sequential(nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 64), nn.ReLU()),
            nn.Linear(64, 4),
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.session = AmpSession(self.model, self.optimizer)
        self.batch = torch.randn(128, 32), torch.randint(4, (128,))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            with self.session.autocast():
                loss = nn.functional.cross_entropy(self.model(self.batch[0]), self.batch[1])
            self.session.scaler.scale(loss).backward()
            self.session.scaler.step(self.optimizer)
            self.session.scaler.update()

    def weights(self) -> list[torch.Tensor]:
        return [t.detach().clone() for t in self.model.state_dict().values()]


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.session.close()


def test_a_profiled_step_is_as_if_it_had_not_happened(bench: Bench) -> None:
    other = Bench()
    for each in (bench, other):
        torch.manual_seed(1)
        each.train(2)
        if each is bench:
            before = copy.deepcopy(each.optimizer.state_dict())
            each.session.profile_step(each.batch, nn.functional.cross_entropy)
            assert str(each.optimizer.state_dict()) == str(before)
        each.train(2)
    for one, two in zip(bench.weights(), other.weights(), strict=True):
        assert torch.equal(one, two)
    assert len(bench.session.history) == 4
    other.session.close()


def test_before_the_first_step_too(bench: Bench) -> None:
    before = bench.weights()
    profile = bench.session.profile_step(bench.batch, nn.functional.cross_entropy)
    assert all(torch.equal(one, two) for one, two in zip(before, bench.weights(), strict=True))
    assert not bench.optimizer.state
    assert all(p.grad is None for p in bench.model.parameters())
    assert profile.peak_bytes_by_kind["optimizer"] > 0  # as in every later step
    assert len(bench.session.history) == 0


def test_what_checkpointing_does_is_seen(bench: Bench) -> None:
    plain = bench.session.profile_step(bench.batch, nn.functional.cross_entropy)
    bench.session.request(checkpointed=["1"])
    bench.session.apply_pending()
    ticked = bench.session.profile_step(bench.batch, nn.functional.cross_entropy)
    assert (plain.label, ticked.label) == ("fp32", "fp32 + 1 layer checkpointed")
    assert ticked.layer("1").activation_bytes < plain.layer("1").activation_bytes
    assert "recompute" in [phase.name for phase in ticked.phases]
    assert "recompute" not in [phase.name for phase in plain.phases]
    assert plain.peak_bytes_by_kind["recompute"] == 0 < ticked.peak_bytes_by_kind["recompute"]
    assert plain.difference_text(ticked).startswith("fp32 → fp32 + 1 layer checkpointed: peak ")


def test_a_step_of_the_run(bench: Bench) -> None:
    bench.train(2)
    bench.session.profile_next_step()
    bench.train(2)
    (profile,) = bench.session.profiles
    assert profile.step == 2
    peaks = bench.session.history.columns("peak_bytes")["peak_bytes"]
    assert profile.peak_bytes == peaks[2]
    assert bench.session.why_not_profiled is None


def test_what_cannot_be_profiled_is_said(bench: Bench) -> None:
    bench.session.begin_step()
    with pytest.raises(RunError, match="a step is in progress"):
        bench.session.profile_step(bench.batch, nn.functional.cross_entropy)
    alone = AmpSession(nn.Linear(2, 2))
    with pytest.raises(RunError, match="no model and optimizer"):
        alone.profile_step((torch.ones(1, 2), torch.ones(1, 2)), nn.functional.mse_loss)
    alone.close()


def test_an_error_in_the_loss_leaves_everything_as_it_was(bench: Bench) -> None:
    before = bench.weights()

    def fails(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        bench.session.profile_step(bench.batch, fails)
    assert all(torch.equal(one, two) for one, two in zip(before, bench.weights(), strict=True))
    bench.train(1)
    assert len(bench.session.history) == 1
