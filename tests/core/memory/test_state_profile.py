"""A compiled model on a CPU: a profile of what is known at a step's boundaries, and compiled code that stays compiled."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from amp_widgets.core.memory.cpu import CpuMeter
from amp_widgets.core.memory.meter import meter_for
from amp_widgets.core.memory.profile import KINDS, StepProfile
from amp_widgets.core.memory.reading import MemoryMeter
from amp_widgets.core.memory.state_profile import StateMeter
from amp_widgets.session import AmpSession

F32 = 4
PARAMETERS = (3 * 4 + 4 + 4 * 2 + 2) * F32
BUFFERS = 5 * F32
STATE = 2 * PARAMETERS + 4 * F32  # Adam: two moments, and a count for each of the four


class Mlp(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:  # what is torch's own is not compiled alone
            x = layer(x)
        return x


class Training:
    """A compiled model, and how often its compiled code has run."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Mlp(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        self.model.register_buffer("scale", torch.ones(5))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.x = torch.randn(6, 3)
        self.stacks: list[int] = []  # how many modes the compiled code has seen

    def compile(self) -> None:
        def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                self.stacks.append(torch._C._len_torch_dispatch_stack())
                return graph(*args)

            return run

        self.model.compile(backend=backend)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.x).sum().backward()
        self.optimizer.step()


def profiled(meter: MemoryMeter, training: Training) -> StepProfile:
    meter.profile_next("compiled", step=7)
    meter.begin()
    training.step()
    assert math.isnan(meter.end().peak_bytes)
    profile = meter.take_profile()
    assert profile is not None
    assert meter.take_profile() is None
    assert meter.unprofiled_because is None
    return profile


def kinds_at(profile: StepProfile, point: int) -> dict[str, int]:
    row = profile.bytes_by_kind[point]
    return {kind: int(size) for kind, size in zip(KINDS, row, strict=True) if size}


@pytest.mark.parametrize("later", [False, True])
def test_what_is_known(later: bool) -> None:
    training = Training()
    if not later:
        training.compile()
    meter = meter_for(training.model, [training.optimizer])
    if later:
        training.compile()
    assert isinstance(meter, CpuMeter if later else StateMeter)
    training.step()
    training.optimizer.zero_grad()
    frames = torch._dynamo.utils.counters["frames"]["total"]
    ran = len(training.stacks)

    profile = profiled(meter, training)
    assert (profile.label, profile.step, profile.device, profile.layers) == ("compiled", 7, "cpu", ())
    assert kinds_at(profile, 0) == {"parameter": PARAMETERS, "buffer": BUFFERS, "optimizer": STATE}
    assert profile.peak_bytes == 2 * PARAMETERS + BUFFERS + STATE
    assert [phase.name for phase in profile.phases] == ["other", "optimizer", "other"]
    assert kinds_at(profile, -1) == {"parameter": PARAMETERS, "buffer": BUFFERS, "gradient": PARAMETERS, "optimizer": STATE}
    first = profile.peak_by_layer["0"]
    assert first == {"parameter": 64, "gradient": 64, "optimizer": 2 * 64 + 2 * F32}
    assert sum(sum(kinds.values()) for kinds in profile.peak_by_layer.values()) == profile.peak_bytes
    (note,) = profile.notes
    assert "compiled" in note
    assert "not counted" in note
    assert "compiled" in repr(profile)
    assert profile._repr_html_()

    assert torch._dynamo.utils.counters["frames"]["total"] == frames  # nothing was compiled anew
    assert training.stacks[ran:] == [0]  # nor turned eager, nor under a mode
    assert not _global_optimizer_pre_hooks
    assert not _global_optimizer_post_hooks
    assert not training.optimizer._optimizer_step_pre_hooks
    meter.close()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own
def test_compiled_code_that_shows_only_in_the_step() -> None:
    """A loss function, or a wrapped model, leaves no mark on the original; the step after the first has its boundaries."""
    training = Training()
    meter = CpuMeter(training.model, [training.optimizer])
    compiled = torch.compile(lambda y: (y * y).sum(), backend="eager")

    def step() -> StepProfile | None:
        meter.profile_next("test")
        meter.begin()
        compiled(training.model(training.x)).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        meter.end()
        return meter.take_profile()

    assert step() is None
    assert meter.unprofiled_because is not None
    profile = step()
    assert profile is not None
    assert profile.peak_bytes == 2 * PARAMETERS + BUFFERS + STATE
    meter.close()


def test_a_step_that_does_not_end() -> None:
    training = Training()
    training.compile()
    meter = meter_for(training.model, [])
    meter.profile_next("test")
    meter.begin()
    assert _global_optimizer_pre_hooks
    meter.abandon()
    assert not _global_optimizer_pre_hooks
    assert meter.take_profile() is None
    assert meter.unprofiled_because == "the step did not end"
    meter.close()


def test_in_a_session() -> None:
    training = Training()
    training.compile()
    session = AmpSession(training.model, training.optimizer)
    assert session.memory_source.startswith("not measured: the model is compiled")

    def step() -> None:
        training.optimizer.zero_grad()
        with session.autocast():
            loss = training.model(training.x).sum()
        session.scaler.scale(loss).backward()
        session.scaler.step(training.optimizer)
        session.scaler.update()

    step()
    session.profile_next_step("compiled")
    assert session.profile_pending
    step()
    assert session.why_not_profiled is None
    (profile,) = session.profiles
    assert profile.peak_bytes_by_kind["optimizer"] == STATE
    assert profile.peak_bytes_by_kind["gradient"] == PARAMETERS
    session.close()


def test_nothing_is_kept_alive() -> None:
    training = Training()
    training.compile()
    meter = meter_for(training.model, [training.optimizer])
    profiled(meter, training)
    references = weakref.ref(training.model), weakref.ref(training.optimizer)
    del training
    torch._dynamo.reset()
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    meter.close()
