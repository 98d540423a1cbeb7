"""The CUDA meter on a real allocator. Needs torch, numpy and pytest only."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from amp_widgets.core.memory.cuda import CudaMeter
from amp_widgets.core.memory.meter import meter_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA driver or GPU"),
]

MIB = 2**20


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def model() -> nn.Linear:
    return nn.Linear(1024, 1024, bias=False, device="cuda")  # 4 MiB


def megabytes(count: int) -> torch.Tensor:
    """Of a size that the allocator does not round up."""
    return torch.empty(count * MIB, dtype=torch.uint8, device="cuda")


def test_current_peak_and_reserved(model: nn.Linear) -> None:
    meter = meter_for(model, [])
    assert isinstance(meter, CudaMeter)
    meter.begin()
    start = meter.end()
    assert start.allocated_bytes == torch.cuda.memory_allocated()
    meter.begin()
    kept = megabytes(32)
    passing = megabytes(64)
    del passing
    reading = meter.end()
    assert reading.allocated_bytes - start.allocated_bytes == 32 * MIB
    assert reading.peak_bytes - start.allocated_bytes == 96 * MIB
    assert reading.reserved_bytes == torch.cuda.memory_reserved() >= reading.peak_bytes
    assert list(reading.per_device) == ["cuda:0"]
    meter.begin()
    quiet = meter.end()
    assert quiet.peak_bytes == quiet.allocated_bytes
    assert meter.overall_peak_bytes >= reading.peak_bytes
    del kept


def test_users_counter_is_left_alone(model: nn.Linear) -> None:
    meter = meter_for(model, [], reset_peak=False)
    passing = megabytes(128)
    del passing
    before = torch.cuda.max_memory_allocated()
    meter.begin()
    kept = megabytes(16)
    assert math.isnan(meter.end().peak_bytes)
    assert torch.cuda.max_memory_allocated() == before
    meter.begin()
    more = megabytes(256)
    assert meter.end().peak_bytes == torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()
    del kept, more


def test_no_synchronisation(model: nn.Linear) -> None:
    meter = meter_for(model, [])
    x = torch.randn(256, 1024, device="cuda")
    model(x).sum().backward()
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            meter.begin()
            model(x).sum().backward()
            reading = meter.end()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert reading.peak_bytes > 0


def test_checkpointing_lowers_the_peak() -> None:
    block = nn.Sequential(*[nn.Tanh() for _ in range(3)])
    rest = nn.Sequential(*[nn.Tanh() for _ in range(6)])
    x = torch.randn(4 * MIB, device="cuda", requires_grad=True)  # 16 MiB
    meter = meter_for(nn.Linear(1, 1, device="cuda"), [])

    def peak(checkpointed: bool) -> float:
        x.grad = None
        meter.begin()
        y = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
        assert isinstance(y, torch.Tensor)
        rest(y).sum().backward()
        del y
        return meter.end().peak_bytes

    peak(False)  # the first time brings workspaces
    # y is held here, so of the block's three results two are freed.
    assert peak(False) - peak(True) == 2 * 16 * MIB


def test_steps_read_alike() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    meter = meter_for(model, [optimizer])
    x = torch.randn(64, 512, device="cuda")
    readings = []
    for _ in range(4):
        meter.begin()
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        del loss
        readings.append(meter.end())
    assert readings[2] == readings[3]
    assert readings[3].peak_bytes > readings[3].allocated_bytes


def test_overhead_of_a_step_is_small(model: nn.Linear) -> None:
    import time

    meter = meter_for(model, [])
    times_s = []
    for _ in range(50):
        start_s = time.perf_counter()
        meter.begin()
        meter.end()
        times_s.append(time.perf_counter() - start_s)
    print(f"begin and end: {sorted(times_s)[25] * 1e6:.0f} µs")
    assert sorted(times_s)[25] < 1e-3
