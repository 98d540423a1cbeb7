"""The CUDA meter on an allocator that is written down by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from amp_widgets.core.memory.cuda import CudaMeter
from amp_widgets.core.memory.reading import MemoryReading

CUDA_0, CUDA_1 = torch.device("cuda:0"), torch.device("cuda:1")


class Allocator:
    """What torch's allocator counts, for one or more devices. It counts nothing before its first use."""

    def __init__(self) -> None:
        self.devices: dict[torch.device, dict[str, int]] = {}
        self.calls: list[tuple[str, torch.device]] = []

    def allocate(self, size: int, device: torch.device = CUDA_0) -> None:
        counts = self.devices.setdefault(device, {"current": 0, "peak": 0, "reserved": 0})
        counts["current"] += size
        counts["peak"] = max(counts["peak"], counts["current"])
        counts["reserved"] = max(counts["reserved"], counts["current"])

    def stats(self, device: torch.device) -> Mapping[str, Any]:
        self.calls.append(("stats", device))
        if device not in self.devices:
            return {}
        counts = self.devices[device]
        pools = {"current": counts["current"], "peak": counts["peak"], "allocated": 10**9, "freed": 10**9}
        small = {"current": 7, "peak": 7, "allocated": 7, "freed": 7}
        return {
            "allocated_bytes": {"all": pools, "small_pool": small, "large_pool": small},
            "reserved_bytes": {"all": {**small, "current": counts["reserved"]}, "small_pool": small, "large_pool": small},
            "active_bytes": {"all": small, "small_pool": small, "large_pool": small},
            "num_ooms": 0,
        }

    def reset(self, device: torch.device) -> None:
        self.calls.append(("reset", device))
        self.devices[device]["peak"] = self.devices[device]["current"]


@pytest.fixture
def allocator() -> Allocator:
    return Allocator()


def meter_on(allocator: Allocator, *devices: torch.device, **options: Any) -> CudaMeter:
    return CudaMeter(devices or (CUDA_0,), stats=allocator.stats, reset=allocator.reset, **options)


def ends(reading: MemoryReading) -> tuple[float, float, float]:
    return reading.allocated_bytes, reading.peak_bytes, reading.reserved_bytes


def test_peaks_within_each_step(allocator: Allocator) -> None:
    meter = meter_on(allocator)
    allocator.allocate(1000)
    meter.begin()
    allocator.allocate(500)
    allocator.allocate(-400)
    assert ends(meter.end()) == (1100, 1500, 1500)
    meter.begin()
    allocator.allocate(50)
    allocator.allocate(-50)
    assert ends(meter.end()) == (1100, 1150, 1500)
    meter.begin()
    assert ends(meter.end()) == (1100, 1100, 1500)
    assert meter.overall_peak_bytes == 1500


def test_overall_peak_has_what_was_before_and_between_the_steps(allocator: Allocator) -> None:
    meter = meter_on(allocator)
    allocator.allocate(9000)
    allocator.allocate(-8000)
    meter.begin()
    assert meter.overall_peak_bytes == 9000
    assert ends(meter.end()) == (1000, 1000, 9000)
    allocator.allocate(19000)
    allocator.allocate(-19000)
    meter.begin()
    assert ends(meter.end()) == (1000, 1000, 20000)
    assert meter.overall_peak_bytes == 20000
    assert allocator.devices[CUDA_0]["peak"] == 1000  # what the user would see: hence the overall peak


def test_overall_peak_has_steps_that_did_not_end(allocator: Allocator) -> None:
    meter = meter_on(allocator)
    meter.begin()
    allocator.allocate(5000)
    allocator.allocate(-5000)
    meter.abandon()
    assert math.isnan(meter.end().peak_bytes)
    meter.begin()
    assert ends(meter.end())[:2] == (0, 0)
    assert meter.overall_peak_bytes == 5000


def test_before_the_first_use_nothing_is_measured_and_nothing_reset(allocator: Allocator) -> None:
    meter = meter_on(allocator)
    meter.begin()
    reading = meter.end()
    assert all(math.isnan(number) for number in ends(reading))
    assert math.isnan(meter.overall_peak_bytes)
    assert allocator.calls == [("stats", CUDA_0)] * 2
    meter.begin()
    allocator.allocate(300)  # the first use of all
    allocator.allocate(-100)
    assert ends(meter.end()) == (200, 300, 300)


def test_the_users_counter_is_left_alone(allocator: Allocator) -> None:
    meter = meter_on(allocator, reset_peak=False)
    allocator.allocate(1000)
    allocator.allocate(-500)
    meter.begin()
    allocator.allocate(400)
    allocated, peak, _ = ends(meter.end())
    assert allocated == 900
    assert math.isnan(peak)  # somewhere from 900 to 1000
    meter.begin()
    allocator.allocate(300)
    allocator.allocate(-300)
    assert ends(meter.end())[:2] == (900, 1200)  # a new maximum
    meter.begin()
    allocator.allocate(300)
    allocator.allocate(-300)
    assert math.isnan(meter.end().peak_bytes)  # reached, not passed: it may have been a little less
    meter.begin()
    allocator.reset(CUDA_0)  # by the user, within the step
    assert math.isnan(meter.end().peak_bytes)
    assert meter.overall_peak_bytes == 1200
    assert [call for call in allocator.calls if call[0] == "reset"] == [("reset", CUDA_0)]
    assert "may not be reset" in meter.source


def test_several_devices(allocator: Allocator) -> None:
    meter = meter_on(allocator, CUDA_0, CUDA_1)
    allocator.allocate(100, CUDA_0)
    allocator.allocate(1000, CUDA_1)
    meter.begin()
    allocator.allocate(-50, CUDA_0)
    allocator.allocate(500, CUDA_1)
    reading = meter.end()
    assert ends(reading) == (1550, 1600, 1600)
    assert reading.per_device == {"cuda:0": (50, 100, 100), "cuda:1": (1500, 1500, 1500)}
    assert meter.overall_peak_bytes == 1600


def test_one_of_two_devices_not_yet_used(allocator: Allocator) -> None:
    meter = meter_on(allocator, CUDA_0, CUDA_1)
    allocator.allocate(100, CUDA_1)
    meter.begin()
    reading = meter.end()
    assert math.isnan(reading.allocated_bytes)
    assert reading.per_device["cuda:1"] == (100, 100, 100)


def test_calls_per_step(allocator: Allocator) -> None:
    allocator.allocate(1)
    meter = meter_on(allocator)
    meter.begin()
    meter.end()
    assert allocator.calls == [("stats", CUDA_0), ("reset", CUDA_0), ("stats", CUDA_0)]


def test_end_without_begin_and_close(allocator: Allocator) -> None:
    allocator.allocate(1)
    meter = meter_on(allocator)
    assert math.isnan(meter.end().allocated_bytes)
    meter.begin()
    meter.close()
    meter.close()
    assert math.isnan(meter.end().allocated_bytes)
    assert allocator.calls.count(("reset", CUDA_0)) == 1


def test_source(allocator: Allocator) -> None:
    assert meter_on(allocator).source == "torch.cuda.memory_stats on cuda:0; torch's peak counter is reset at every step"
    assert meter_on(allocator, CUDA_0, CUDA_1, also_on_cpu=True).source == (
        "torch.cuda.memory_stats on cuda:0, cuda:1; torch's peak counter is reset at every step; bytes on the CPU are not counted"
    )
    assert meter_on(allocator).measured
