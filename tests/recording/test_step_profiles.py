"""Profiles of steps, to a run file and back."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from amp_widgets.core.memory.profile import AllocatorReadings, StepProfile
from amp_widgets.errors import RecordingError
from amp_widgets.recording.step_profiles import profile_from_json, profile_to_json
from amp_widgets.session import AmpSession


@pytest.fixture(scope="module")
def profile() -> StepProfile:
    """Of a real step, with what only a GPU has added."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with AmpSession(model, torch.optim.Adam(model.parameters())) as session:
        session.request(checkpointed=["0"])
        session.apply_pending()
        taken = session.profile_step((torch.randn(5, 4), torch.randint(2, (5,))), nn.functional.cross_entropy, label="<b>층</b>")
    readings = AllocatorReadings(
        device="cuda:0",
        point=np.array([0, 2], dtype=np.int32),
        allocated_bytes=np.array([5, 7]),
        inactive_bytes=np.array([0, 1]),
        reserved_bytes=np.array([8, 2**40]),
        peak_allocated_bytes=9,
        retries=1,
        ooms=0,
    )
    plain = StepProfile(**{field.name: getattr(taken, field.name) for field in dataclasses.fields(StepProfile)})
    unmeasured = dataclasses.replace(plain.layers[0], recompute_s=math.nan)
    return dataclasses.replace(plain, allocator=(readings,), layers=(unmeasured, *plain.layers[1:]))


def test_it_comes_back_as_it_was(profile: StepProfile) -> None:
    back = profile_from_json(json.loads(json.dumps(profile_to_json(profile))))
    assert_equal(back, profile)
    assert math.isnan(back.layers[0].recompute_s)  # not measured, and still not
    assert back.peak_bytes == profile.peak_bytes


def assert_equal(one: Any, other: Any) -> None:
    for field in dataclasses.fields(other):
        ours, theirs = getattr(one, field.name), getattr(other, field.name)
        if isinstance(theirs, np.ndarray):
            assert ours.dtype == theirs.dtype
            assert np.array_equal(ours, theirs)
        elif theirs and isinstance(theirs, tuple) and dataclasses.is_dataclass(theirs[0]):
            assert len(ours) == len(theirs)
            for mine, yours in zip(ours, theirs, strict=True):
                assert_equal(mine, yours)
        else:
            assert ours == theirs or (ours != ours and theirs != theirs), field.name


DAMAGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "nothing": lambda content: content.clear(),
    "a text for bytes": lambda content: content["bytes_by_kind"].__setitem__(0, "many"),
    "too few kinds": lambda content: content.update(bytes_by_kind=[[1]] * len(content["time_s"])),
    "other lengths": lambda content: content["time_s"].pop(),
    "no points": lambda content: content.update(bytes_by_kind=[], time_s=[], layer_index=[], operator_index=[]),
    "a layer that is not there": lambda content: content["layer_index"].__setitem__(0, 1000),
    "bytes beyond all bounds": lambda content: content["bytes_by_kind"][0].__setitem__(0, 10**30),
    "a number for a name": lambda content: content["layer_names"].__setitem__(0, 5),
    "layers that are none": lambda content: content.update(layers=[{}]),
    "a step in words": lambda content: content.update(step="one"),
    "readings at points that there are not": lambda content: content["allocator"][0].update(point=[0, 10**6]),
    "a list for sums": lambda content: content.update(peak_by_layer=[]),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_is_no_profile_is_refused(profile: StepProfile, name: str) -> None:
    content = copy.deepcopy(json.loads(json.dumps(profile_to_json(profile))))
    DAMAGE[name](content)
    with pytest.raises(RecordingError, match="a profile of a step cannot be read"):
        profile_from_json(content)
