"""What would have fitted, where a complete step was known: every proposal is tried, and fits."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from amp_widgets.core.memory.autopsy import OutOfMemory
from amp_widgets.core.memory.budget import MemoryBudgetError
from amp_widgets.session import AmpSession


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return y


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        weights = ((q @ k.transpose(-2, -1)) / q.shape[-1] ** 0.5).softmax(-1)
        y: Tensor = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return y


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.layers = nn.ModuleList([nn.Sequential(Attention(32), Block(32)) for _ in range(4)])
        self.head = nn.Linear(32, 50)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for layer in self.layers:
            h = layer(h)
        y: Tensor = self.head(h)
        return y.transpose(1, 2)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), *(Block(64) for _ in range(4)), nn.Linear(64, 10))


def batch_of(kind: str, size: int) -> tuple[Tensor, Tensor]:
    if kind != "gpt":
        return torch.randn(size, 32), torch.randint(10, (size,))
    return torch.randint(50, (size, 24)), torch.randint(50, (size, 24))


def plain() -> nn.Module:
    inner = [layer for _ in range(6) for layer in (nn.ReLU(), nn.Linear(256, 256))]
    return nn.Sequential(nn.Linear(32, 256), *inner, nn.ReLU(), nn.Linear(256, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {"mlp": (mlp, 300), "gpt": (Gpt, 20), "plain": (plain, 2000)}


class Run:
    """Some steps, and what they came to."""

    def __init__(self, kind: str, *, batch: int | None = None, **request: Any) -> None:
        torch.manual_seed(0)
        make, self.batch = MODELS[kind]
        self.model = make()
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.session = AmpSession(self.model, self.optimizer)
        if request:
            self.session.request(**request)
        self.x, self.y = batch_of(kind, self.batch if batch is None else batch)

    def step(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            with self.session.autocast():
                loss = functional.cross_entropy(self.model(self.x), self.y)
            self.session.scaler.scale(loss).backward()
            self.session.scaler.step(self.optimizer)
            self.session.scaler.update()


def peak_of(kind: str, **request: Any) -> float:
    run = Run(kind, **request)
    try:
        run.session.memory_budget = 1e9
        run.step(3)
        return run.session.history.last("peak_bytes")
    finally:
        run.session.close()


def death_under(kind: str, budget: float, *, steps_before: int = 1) -> OutOfMemory:
    """Of a step after complete ones; the budget holds only then."""
    run = Run(kind)
    try:
        run.session.memory_budget = 1e9
        run.step(steps_before)
        run.session.memory_budget = budget
        with pytest.raises(MemoryBudgetError):
            run.step()
        found = run.session.out_of_memory
        assert found is not None
        return found
    finally:
        run.session.close()


def said_peak_bytes(text: str) -> float:
    found = re.search(r"the whole step would have had its peak at about ([\d.]+) (kB|MB)", text)
    assert found is not None, text
    return float(found[1]) * {"kB": 1e3, "MB": 1e6}[found[2]]


@pytest.mark.parametrize("steps_before", [1, 2])
@pytest.mark.parametrize("share", [0.98, 0.9, 0.8, 0.7, 0.6, 0.5])
@pytest.mark.parametrize("kind", ["mlp", "gpt"])
def test_what_is_said_to_fit_fits(kind: str, share: float, steps_before: int) -> None:
    peak = peak_of(kind)
    budget = share * peak
    found = death_under(kind, budget, steps_before=steps_before)
    text = "\n".join(found.report)
    assert "enough" not in text.replace("not enough", "").replace("small enough", "")
    assert said_peak_bytes(text) == pytest.approx(peak, rel=0.03)
    if found.layers_to_checkpoint:
        least = peak_of(kind, checkpointed=found.layers_to_checkpoint)
        assert least <= budget, text
    if re.search(r"with autocast bf16/fp16, the whole step fits", text):
        assert peak_of(kind, autocast="bf16") <= budget, text
    batch = re.search(r"with at most (\d+) % of this batch the whole step fits", text)
    if batch is not None:
        smaller = Run(kind, batch=MODELS[kind][1] * int(batch[1]) // 100)
        smaller.session.memory_budget = budget
        smaller.step(3)
        smaller.session.close()
    if share >= 0.8:
        assert found.layers_to_checkpoint, text
    if share >= 0.7:
        assert batch is not None, text
        assert int(batch[1]) >= 100 * share - 25, text


@pytest.mark.parametrize("kind", ["mlp", "gpt"])
def test_larger_batch_than_that_of_the_complete_step(kind: str) -> None:
    whole_peak = peak_of(kind)
    run = Run(kind)
    small = MODELS[kind][1] // 2
    x, y = run.x, run.y
    run.x, run.y = x[:small], y[:small]
    run.session.memory_budget = 0.9 * whole_peak
    run.step(2)
    run.x, run.y = x, y
    with pytest.raises(MemoryBudgetError):
        run.step()
    found = run.session.out_of_memory
    run.session.close()
    assert found is not None
    text = "\n".join(found.report)
    assert said_peak_bytes(text) == pytest.approx(whole_peak, rel=0.05)
    assert found.layers_to_checkpoint
    assert peak_of(kind, checkpointed=found.layers_to_checkpoint) <= 0.9 * whole_peak


def test_autocast_is_said_to_fit_where_it_does() -> None:
    peak = peak_of("plain")
    text = "\n".join(death_under("plain", 0.9 * peak).report)
    assert "with autocast bf16/fp16, the whole step fits" in text
    assert peak_of("plain", autocast="bf16") <= 0.9 * peak


@pytest.mark.parametrize("share", [0.9, 0.6])
def test_first_step(share: float) -> None:
    """Nothing is known of what comes later, and nothing is promised."""
    first = Run("mlp")
    first.step()
    peak = first.session.history.last("peak_bytes")
    first.session.close()
    run = Run("mlp")
    run.session.memory_budget = share * peak
    with pytest.raises(MemoryBudgetError):
        run.step()
    found = run.session.out_of_memory
    run.session.close()
    assert found is not None
    text = "\n".join(found.report)
    assert "enough" not in text.replace("not enough", "").replace("small enough", "")
    assert "whole step" not in text
    assert "got past this operator" in text
    assert "what comes later is not known" in text


def test_complete_step_under_other_settings() -> None:
    run = Run("mlp")
    run.session.memory_budget = 1e9
    run.step(2)
    run.session.request(checkpointed=["1"])
    run.session.memory_budget = 0.6 * run.session.history.last("peak_bytes")
    with pytest.raises(MemoryBudgetError):
        run.step()
    found = run.session.out_of_memory
    run.session.close()
    assert found is not None
    assert "whole step" not in "\n".join(found.report)


@pytest.mark.parametrize("kind", ["mlp", "gpt"])
def test_a_step_that_a_dashboard_had_profiled_will_do_also_after_other_settings(kind: str) -> None:
    run = Run(kind)
    run.session.profile_changes = True  # as a dashboard sets it
    run.step(4)
    peak = run.session.history.last("peak_bytes")
    run.session.request(checkpointed=["1"] if kind == "mlp" else ["layers.0"])
    run.step(4)
    run.session.request(checkpointed=[])
    run.session.memory_budget = 0.8 * peak
    with pytest.raises(MemoryBudgetError):
        run.step()
    found = run.session.out_of_memory
    assert found is not None
    assert said_peak_bytes("\n".join(found.report)) == pytest.approx(peak, rel=0.03)
    run.session.request(checkpointed=found.layers_to_checkpoint)
    run.step(3)
    assert 0 < run.session.history.last("peak_bytes") <= 0.8 * peak
    run.session.close()
