"""The journal: how fast steps come, and what is written when."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from amp_widgets.core.journal import Journal, StepRecord
from amp_widgets.core.readback import Readback


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Late(Readback):
    """Values that arrive when the test says so."""

    arrived = False

    def ready(self) -> bool:
        return self.arrived


def record(step: int, time_s: float, values: Any = None, **changes: Any) -> StepRecord:
    parts: dict[str, Any] = {
        "step": step, "time_s": time_s, "duration_s": 0.5, "timer": None, "skipped": False, "scaled": False,
        "growth_interval": 10, "by_rule": True, "memory": None, "values": values or Readback((1.0, None, None, None)),
    }  # fmt: skip
    return StepRecord(**{**parts, **changes})


def journal() -> tuple[Journal, Clock]:
    clock = Clock()
    return Journal(capacity=100, devices=[torch.device("cpu")], clock=clock), clock


def rate_after(times_s: list[float]) -> float:
    made, _ = journal()
    for step, time_s in enumerate(times_s):
        made.put_step(record(step, time_s))
    return made.status(step=len(times_s), scale=None, overall_peak_bytes=math.nan).steps_per_s


def test_steps_per_second() -> None:
    assert rate_after([0.0, 0.25, 0.5, 0.75]) == 4.0
    assert math.isnan(rate_after([1.0]))
    assert math.isnan(rate_after([]))


def test_a_pause_does_not_count() -> None:
    assert rate_after([0.0, 0.25, 0.5, 8.5, 8.75, 9.0]) == 4.0
    assert math.isnan(rate_after([0.0, 0.25, 0.5, 8.5]))  # not known yet
    assert rate_after([0.0, 10.0, 20.0]) == pytest.approx(0.1)  # slow steps are no pause


def test_what_comes_later_waits_for_what_came_before() -> None:
    made, _ = journal()
    late = Late((2.0, 8.0, 4.0, None))
    made.put_step(record(0, 1.0, late, scaled=True, skipped=True))
    made.put_event(1, "applied", "something", {"autocast": "fp16"})
    made.put_step(record(1, 2.0))
    assert len(made.history(wait=False)) == 0
    assert made.history(wait=False).events() == []
    late.arrived = True
    history = made.history(wait=False)
    assert history.columns("loss", "scale")["scale"].tolist() == [8.0, 1.0]
    assert [(e.step, e.kind) for e in history.events()] == [(0, "skipped"), (1, "scale_changed"), (1, "applied")]


def test_waiting_brings_everything() -> None:
    made, _ = journal()
    made.put_step(record(0, 1.0, Late((2.0, None, None, None))))
    assert len(made.history(wait=True)) == 1


def test_details_of_events_are_plain() -> None:
    made, _ = journal()
    made.put_event(0, "rejected", "no", {"checkpointed": ("a", "b"), "autocast": torch.float16, "scaling": True})
    (event,) = made.history(wait=False).events()
    assert event.detail == {"checkpointed": ["a", "b"], "autocast": "torch.float16", "scaling": True}
