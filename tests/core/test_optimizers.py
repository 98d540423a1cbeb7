"""Which optimizers' steps end a training step: the given ones, or those that are learned."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from amp_widgets.core.loop import LiveLoop
from amp_widgets.core.optimizers import OptimizerSteps


class Two:
    """A model in two halves, with an optimizer each, trained without a scaler and with a loop that was given neither."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        self.first, self.second = (torch.optim.SGD(half.parameters(), lr=0.1) for half in self.model)
        self.loop = LiveLoop(self.model)

    def step(self, *optimizers: torch.optim.Optimizer) -> None:
        self.model.zero_grad()
        self.model(torch.ones(3, 4)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()

    @property
    def rows(self) -> int:
        return len(self.loop.history)


def test_two_that_step_together_make_one_step_from_the_first_on() -> None:
    two = Two()
    for done in range(1, 6):
        two.step(two.first, two.second)
        assert two.rows == done
    two.loop.close()
    assert two.rows == 5


def test_one_that_steps_now_and_then() -> None:
    two = Two()
    for step in range(9):
        two.step(two.first, *([two.second] if step % 3 == 2 else []))
    two.loop.close()
    assert two.rows == 9  # the last incomplete ones end with the next forward pass, or with the loop
    assert two.loop.history.columns("step")["step"].tolist() == list(range(9))


def test_a_change_never_comes_between_two_that_step_together() -> None:
    two = Two()
    two.step(two.first, two.second)
    two.step(two.first)  # the other one is still to come
    two.loop.request(checkpointed=["0"])
    assert two.loop.settings.checkpointed == ()
    two.second.step()
    assert two.loop.settings.checkpointed == ("0",)
    two.loop.close()


def test_optimizers_with_forward_passes_of_their_own_make_steps_of_their_own() -> None:
    two = Two()
    for _ in range(3):
        two.step(two.first)
        two.step(two.second)
    two.loop.close()
    assert two.rows == 6


def test_given_ones_make_a_step_together_whatever_comes_between() -> None:
    two = Two()
    two.loop.close()
    loop = LiveLoop(two.model, [two.first, two.second])
    for _ in range(3):
        two.step(two.first)
        two.step(two.second)
    assert len(loop.history) == 3
    loop.close()


def test_another_models_optimizer_is_none_of_ours() -> None:
    steps = OptimizerSteps(())
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    stranger = torch.optim.SGD(other.parameters(), lr=0.1)
    assert steps.is_ours(torch.optim.SGD(model.parameters(), lr=0.1), model)
    assert not steps.is_ours(stranger, model)
    steps.count_as_ours(stranger)
    assert steps.is_ours(stranger, model)


class Twice(torch.optim.SGD):
    """Its step is a call of another one's, as is usual."""

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[no-untyped-def]
        return super().step(closure)


class Lookahead(torch.optim.Optimizer):
    """An optimizer around an optimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        self.inner = inner

    def step(self, closure=None):  # type: ignore[no-untyped-def]
        self.inner.step()


@pytest.mark.parametrize("kind", ["subclass", "wrapper"])
def test_a_step_within_a_step_counts_once(kind: str) -> None:
    model = nn.Linear(4, 2)
    inner = Twice(model.parameters(), lr=0.1)
    optimizer = inner if kind == "subclass" else Lookahead(inner)
    loop = LiveLoop(model)
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    assert len(loop.history) == 3
    loop.close()
