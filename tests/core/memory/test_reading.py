"""Sums over devices, and the meter that measures nothing."""

from __future__ import annotations

import math

import pytest

from amp_widgets.core.memory.reading import NOT_MEASURED, MemoryReading, NoMeter


def test_sums_over_devices() -> None:
    reading = MemoryReading.of({"cuda:0": (1.0, 10.0, 100.0), "cuda:1": (2.0, 20.0, 200.0)})
    assert (reading.allocated_bytes, reading.peak_bytes, reading.reserved_bytes) == (3.0, 30.0, 300.0)
    assert reading.per_device["cuda:1"] == (2.0, 20.0, 200.0)


def test_one_device_that_was_not_measured_makes_no_zero() -> None:
    reading = MemoryReading.of({"cuda:0": (1.0, math.nan, 100.0), "cuda:1": (2.0, 20.0, 200.0)})
    assert (reading.allocated_bytes, reading.reserved_bytes) == (3.0, 300.0)
    assert math.isnan(reading.peak_bytes)


def test_no_device() -> None:
    assert MemoryReading.of({}) is NOT_MEASURED


def test_a_reading_does_not_change() -> None:
    devices = {"cpu": (1.0, 2.0, math.nan)}
    reading = MemoryReading.of(devices)
    devices["cpu"] = (0.0, 0.0, 0.0)
    assert reading.per_device["cpu"][0] == 1.0
    with pytest.raises(TypeError):
        reading.per_device["cpu"] = (0.0, 0.0, 0.0)  # type: ignore[index]


def test_no_meter() -> None:
    meter = NoMeter("the model is on mars")
    meter.begin()
    reading = meter.end()
    meter.abandon()
    meter.close()
    assert meter.source == "not measured: the model is on mars"
    assert not meter.measured
    numbers = (reading.allocated_bytes, reading.peak_bytes, reading.reserved_bytes, meter.overall_peak_bytes)
    assert all(math.isnan(number) for number in numbers)
    assert reading.per_device == {}
