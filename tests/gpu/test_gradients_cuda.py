"""Gradients counted, and skips looked into, on a real device: the same numbers as on a CPU, and nothing waits."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from amp_widgets.analysis.gradients import GradientRange
from amp_widgets.core.gradient_probe import GradientProbe, bucket_of
from amp_widgets.core.overflow_probe import OverflowProbe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA driver or GPU"),
]


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8))


def loss_of(model: nn.Module, x: Tensor, factor: float = 1.0) -> Tensor:
    with torch.autocast("cuda", torch.float16):
        output = model(x)
    loss: Tensor = output.float().pow(2).mean() * factor
    return loss


def test_buckets_are_those_of_a_cpu() -> None:
    codes = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    values = codes.view(torch.float32)
    assert torch.equal(bucket_of(values), bucket_of(values.cuda()).cpu())


@pytest.mark.parametrize("sample", [None, 4096])
@pytest.mark.parametrize("deterministic", [False, True])
def test_counting_waits_for_nothing_and_changes_nothing(sample: int | None, deterministic: bool) -> None:
    x = torch.randn(512, 64, device="cuda")

    def run(watched: bool) -> list[Tensor]:
        model = net().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        probe = GradientProbe(model, every=1, sample=sample)
        scale = torch.full((), 2.0**10, device="cuda")
        loss_of(model, x).backward()  # what is set up at first may wait
        for step in range(3):
            optimizer.zero_grad()
            with no_waiting():
                if watched:
                    probe.begin(step)
                (loss_of(model, x) * scale).backward()
                if watched:
                    probe.end(scale)
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= 2.0**10
            optimizer.step()
        if watched:
            torch.cuda.synchronize()
            assert [counts.notes for counts in probe.counts] == [()] * 3
            found = GradientRange.of(probe.counts[-1])
            assert (found.scale, found.in_half) == (2.0**10, True)
            assert {row.layer for row in found.outputs} == {"0", "1", "2", "3", "4"}
            if sample is None:
                assert all(row.weights.sum() == row.elements for row in found.outputs)
            assert probe.why_not is None
        return [parameter.detach() for parameter in model.parameters()]

    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    try:
        assert all(torch.equal(one, other) for one, other in zip(run(True), run(False), strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_planted_underflow_is_predicted() -> None:
    model, x = net().cuda(), torch.randn(512, 64, device="cuda")

    def run(scale: float) -> GradientRange:
        probe = GradientProbe(model, sample=None)
        probe.count_next_step()
        probe.begin(0)
        (loss_of(model, x, 1e-3) * scale).backward()
        probe.end(scale)
        counts = probe.newest(wait=True)
        assert counts is not None
        return GradientRange.of(counts)

    high, low = run(2.0**20), run(1.0)
    predicted = high.layer("4").shares(1.0)
    assert predicted.flushed > 0.05
    assert low.layer("4").shares().zeros == pytest.approx(predicted.flushed, abs=0.01)


@pytest.mark.parametrize("fused", [False, True])
def test_skips_are_looked_into_and_nothing_waits(fused: bool) -> None:
    model, x = net().cuda(), torch.randn(64, 64, device="cuda")
    probe = OverflowProbe(model, every_step=fused)
    loss_of(model, x).backward()
    for step, factor in enumerate((1.0, math.nan, 1.0, math.inf)):
        model.zero_grad()
        found: Any = torch.full((), float(factor != 1.0), device="cuda")
        with no_waiting():
            probe.begin(step)
            loss = loss_of(model, x) * factor
            loss.backward()
            if not fused and factor != 1.0:
                probe.skipping()
            probe.end(step, 1.0, None if fused else factor != 1.0, loss.detach(), found if fused else None)
    torch.cuda.synchronize()
    notes = probe.notes
    assert [note.step for note in notes] == [1, 3]
    assert all(note.loss_finite is False and note.nonfinite == note.of == 6 for note in notes)
    assert notes[0].parameters[0].startswith("4.")
    assert np.isfinite(notes[0].scale)
