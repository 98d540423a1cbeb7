from __future__ import annotations

import dataclasses
import math

import pytest

from amp_widgets.widgets.state import NUMBERS, DashboardState, only_numbers_differ, same_state


def test_what_waits_is_what_differs_from_what_is_in_force(state) -> None:
    shown = state(autocast="fp16", pending={"autocast": "fp16", "init_scale": 8.0, "checkpointed": ["norm"]})
    assert shown.waiting == {"init_scale": 8.0, "checkpointed": ("norm",)}
    assert shown.requested("init_scale") == 8.0
    assert shown.requested("checkpointed") == ("norm",)
    assert shown.requested("growth_interval") == 2000


def test_nothing_waits_without_a_request(state) -> None:
    assert state().waiting == {}


def test_nan_is_the_same_as_nan(state) -> None:
    one = state(loss=float("nan"), step_s=float("nan"))
    assert same_state(one, dataclasses.replace(one, loss=float("nan")))
    assert not same_state(one, dataclasses.replace(one, loss=1.0))


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(DashboardState)])
def test_every_field_counts(state, name: str) -> None:
    one = state(scale=1.0)
    other = dataclasses.replace(one, **{name: object()})
    assert not same_state(one, other)
    assert only_numbers_differ(one, other) == (name in NUMBERS)


def test_unknown_is_the_default(state) -> None:
    shown = state()
    assert all(math.isnan(value) for value in (shown.loss, shown.step_s, shown.peak_bytes, shown.samples_per_s))
