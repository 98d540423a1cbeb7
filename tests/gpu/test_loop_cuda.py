"""The live loop on CUDA: the same checks as on a CPU. Needs torch, numpy and pytest only."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from amp_widgets.session import AmpSession

if not torch.cuda.is_available():
    pytest.skip("needs CUDA; torch sees none", allow_module_level=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.2)) for _ in range(4)
        )
        self.head = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Case:
    def __init__(self, *, attach: bool = True, fused: bool = False, batch: int = 512, **kwargs: Any) -> None:
        torch.manual_seed(0)
        torch.cuda.manual_seed(0)
        self.model = Net().cuda()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3, fused=fused)
        self.session = AmpSession(self.model, self.optimizer, **kwargs) if attach else None
        self.generator = torch.Generator("cuda").manual_seed(1)
        self.batch = batch

    def step(self, scaler: Any, region: Any, factor: float = 1.0) -> torch.Tensor:
        x = torch.randn(self.batch, 256, device="cuda", generator=self.generator)
        y = torch.randint(10, (self.batch,), device="cuda", generator=self.generator)
        self.optimizer.zero_grad()
        with region:
            loss = nn.functional.cross_entropy(self.model(x), y) * factor
        scaler.scale(loss).backward()
        scaler.step(self.optimizer)
        scaler.update()
        return loss.detach()

    def live_step(self, factor: float = 1.0) -> torch.Tensor:
        assert self.session is not None
        return self.step(self.session.scaler, self.session.autocast(), factor)


@pytest.fixture(autouse=True)
def deterministic() -> Any:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("fused", [False, True])
def test_fp16_equals_torchs_own_loop(fused: bool) -> None:
    overflows = {3, 9}
    ours = Case(fused=fused)
    assert ours.session is not None
    ours.session.request(autocast="fp16", init_scale=2.0**10, growth_interval=4)
    losses = [ours.live_step(math.inf if i in overflows else 1.0) for i in range(15)]

    plain = Case(attach=False, fused=fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=4)
    expected, scales = [], []
    for i in range(15):
        scales.append(scaler.get_scale())
        expected.append(plain.step(scaler, torch.autocast("cuda", dtype=torch.float16), math.inf if i in overflows else 1.0))
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    for one, two in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, two)
    columns = ours.session.history.columns("loss", "scale", "skipped", "step_s")
    np.testing.assert_array_equal(columns["loss"].astype(np.float32), torch.stack(expected).cpu().numpy())
    assert columns["scale"].tolist() == scales
    assert set(np.flatnonzero(columns["skipped"])) == overflows
    assert [e.step for e in ours.session.history.events("skipped")] == sorted(overflows)
    assert (columns["step_s"] > 0).all()
    ours.session.close()


@pytest.mark.parametrize("autocast", ["fp32", "bf16", "fp16"])
def test_checkpointing_on_and_off_is_bit_identical(autocast: str) -> None:
    results = []
    for plan in ([[]] * 3, [["layers.*"], [], ["layers.1", "layers.1.0"]]):
        case = Case()
        assert case.session is not None
        for names in plan:
            case.session.request(autocast=autocast, checkpointed=names)
            for _ in range(2):
                loss = case.live_step()
        results.append((loss, [p.clone() for p in case.model.parameters()], [b.clone() for b in case.model.buffers()]))
        case.session.close()
    assert torch.equal(results[0][0], results[1][0])
    for one, two in zip(results[0][1] + results[0][2], results[1][1] + results[1][2], strict=True):
        assert torch.equal(one, two)


def test_checkpointing_lowers_the_measured_peak() -> None:
    case = Case(batch=16384)
    assert case.session is not None
    for _ in range(3):
        case.live_step()
    case.session.request(checkpointed=["layers.*"])
    for _ in range(3):
        case.live_step()
    peaks = case.session.history.columns("peak_bytes")["peak_bytes"]
    assert "torch.cuda.memory_stats" in case.session.memory_source
    assert peaks[5] < peaks[2]
    assert case.session.status().overall_peak_bytes == np.nanmax(peaks)
    case.session.close()


@pytest.mark.parametrize("fused", [False, True])
def test_no_sync_is_added_to_the_step(fused: bool) -> None:
    counts = []
    for attach in (False, True):
        case = Case(attach=attach, fused=fused)
        scaler = torch.amp.GradScaler("cuda")
        if case.session is not None:
            case.session.request(autocast="fp16")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(50):
                if case.session is not None:
                    case.live_step()
                else:
                    case.step(scaler, torch.autocast("cuda", dtype=torch.float16))
        counts.append({name: _count(profile, name) for name in ("aten::_local_scalar_dense", "cudaDeviceSynchronize")})
        if case.session is not None:
            assert len(case.session.history) == 50
            case.session.close()
    assert counts[0]["aten::_local_scalar_dense"] == counts[1]["aten::_local_scalar_dense"]


def _count(profile: Any, name: str) -> int:
    return sum(event.count for event in profile.key_averages() if event.key == name)


def test_nothing_on_the_steps_path_waits() -> None:
    case = Case(fused=True)
    assert case.session is not None
    case.session.request(autocast="fp16")
    for _ in range(3):
        case.live_step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            case.live_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(case.session.history) == 8
    case.session.close()
