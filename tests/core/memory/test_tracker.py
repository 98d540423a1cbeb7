"""A profiled step: its bytes by kind and by layer against sums made by hand, and that it changes nothing."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from amp_widgets.core.checkpointing import Checkpointing
from amp_widgets.core.memory.cpu import CpuMeter
from amp_widgets.core.memory.profile import KINDS, StepProfile
from amp_widgets.core.memory.reading import MemoryReading
from amp_widgets.core.memory.step_mode import PAUSE_S, StepMode
from amp_widgets.core.memory.tracker import StepTracker

F32 = 4  # bytes


def profiled(meter: CpuMeter, step: Callable[[], object]) -> tuple[StepProfile, MemoryReading]:
    """One step profiled. What it returns is freed before the step ends."""
    meter.profile_next("test", step=3)
    meter.begin()
    step()
    reading = meter.end()
    assert torch._C._len_torch_dispatch_stack() == 0
    profile = meter.take_profile()
    assert profile is not None, meter.unprofiled_because
    assert meter.unprofiled_because is None
    assert meter.take_profile() is None  # once
    check(profile, reading)
    return profile, reading


def check(profile: StepProfile, reading: MemoryReading) -> None:
    """What holds for every profile."""
    total = profile.total_bytes
    points = len(total)
    assert total.max() == profile.peak_bytes == reading.peak_bytes
    assert total[-1] == reading.allocated_bytes
    assert (profile.bytes_by_kind >= 0).all()
    assert profile.bytes_by_kind.dtype == np.int64
    assert profile.bytes_by_kind.shape == (points, len(KINDS))
    assert not profile.bytes_by_kind.flags.writeable
    assert profile.time_s.shape == profile.layer_index.shape == profile.operator_index.shape == (points,)
    assert (np.diff(profile.time_s) >= 0).all()
    assert profile.phases[0].start == 0
    assert profile.phases[-1].stop == points
    assert all(one.stop == other.start and one.name != other.name for one, other in itertools.pairwise(profile.phases))
    assert (profile.layer_index >= -1).all()
    assert (profile.layer_index < len(profile.layer_names)).all()
    assert (profile.operator_index < len(profile.operator_names)).all()
    assert sum(profile.peak_bytes_by_layer.values()) == profile.peak_bytes
    by_kind = {kind: sum(kinds.get(kind, 0) for kinds in profile.peak_by_layer.values()) for kind in KINDS}
    assert by_kind == profile.peak_bytes_by_kind
    check_layers(profile)
    assert "test" in repr(profile)


def check_layers(profile: StepProfile) -> None:
    """The model itself comes first, and agrees with the picture."""
    whole, *layers = profile.layers
    assert (whole.name, whole.whole) == ("(model)", True)
    assert tuple(layer.name for layer in layers) == profile.layer_names
    assert not any(layer.whole for layer in layers)
    activations = profile.bytes_by_kind[:, KINDS.index("activation")]
    assert whole.activation_bytes <= activations.max()
    assert whole.activation_bytes >= max((layer.activation_bytes for layer in layers), default=0)
    assert whole.parameter_bytes >= max((layer.parameter_bytes for layer in layers), default=0)


def states(profile: StepProfile) -> list[tuple[str, dict[str, int]]]:
    """Phase and bytes by kind of each point, without those where nothing changes."""
    found: list[tuple[str, dict[str, int]]] = []
    for phase in profile.phases:
        for point in range(phase.start, phase.stop):
            sizes = {kind: int(size) for kind, size in zip(KINDS, profile.bytes_by_kind[point], strict=True) if size}
            if not found or found[-1] != (phase.name, sizes):
                found.append((phase.name, sizes))
    return found


def ends(reading: MemoryReading) -> tuple[float, float]:
    return reading.allocated_bytes, reading.peak_bytes


def phase_names(profile: StepProfile) -> list[str]:
    return [phase.name for phase in profile.phases]


# The two-layer network: every tensor of a step with Adam.
W1, B1, W2, B2 = 4 * 3 * F32, 4 * F32, 2 * 4 * F32, 2 * F32
PARAMETERS = W1 + B1 + W2 + B2
STATE = 2 * PARAMETERS + 4 * F32  # two averages of each parameter, and a counter
X, T = 5 * 3 * F32, 5 * 2 * F32  # batch of 5, targets
Z1 = A1 = 5 * 4 * F32  # before and after the ReLU, which saves its result
Y = 5 * 2 * F32
LOSS = Y  # a number, in the memory of the squares that it is the mean of
G = F32  # the gradient of the loss
GY, GA1, GZ1 = Y, A1, Z1  # gradients of the above


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
        self.second = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x))
        return y


class Training:
    """The network trained for one step, so that there is an optimizer's state; its gradients are None."""

    def __init__(self, *checkpointed: str) -> None:
        torch.manual_seed(0)
        self.model = Mlp()
        Checkpointing(self.model).apply(checkpointed)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.x, self.t = torch.randn(5, 3), torch.randn(5, 2)
        self.meter = CpuMeter(self.model, [self.optimizer])
        self.meter.begin()
        self.step()
        self.meter.end()

    def step(self) -> None:
        loss = F.mse_loss(self.model(self.x), self.t)
        loss.backward()
        del loss
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def state(phase: str, *, gradient: int = 0, activation: int = 0, recompute: int = 0, temporary: int = 0) -> Any:
    sizes = {"parameter": PARAMETERS, "gradient": gradient, "optimizer": STATE, "activation": activation}
    sizes |= {"recompute": recompute, "temporary": temporary, "other": X + T}
    return phase, {kind: size for kind, size in sizes.items() if size}


ADAM = [  # of each parameter: the root of the second average, that divided in `denom`, which lives until the next one's
    state("optimizer", gradient=PARAMETERS, temporary=size)
    for size in (
        *(0, W1, W1 + W1, W1),
        *(W1 + B1, W1 + B1 + B1, W1 + B1, B1),
        *(B1 + W2, B1 + W2 + W2, B1 + W2, W2),
        *(W2 + B2, W2 + B2 + B2, W2 + B2, B2, 0),
    )
]


class TestByHand:
    def test_step_with_adam(self) -> None:
        training = Training()
        profile, _ = profiled(training.meter, training.step)
        assert states(profile) == [
            state("forward"),
            state("forward", activation=Z1),
            state("forward", activation=Z1 + A1),
            state("forward", activation=A1),
            state("forward", activation=A1 + Y),
            state("loss", activation=A1 + Y + LOSS),
            state("backward", activation=A1 + Y + LOSS, temporary=G),
            state("backward", activation=A1 + Y + LOSS, temporary=G + GY),
            state("backward", activation=A1 + LOSS, temporary=G + GY),
            state("backward", activation=A1 + LOSS, temporary=G + GY + GA1),
            state("backward", activation=A1 + LOSS, temporary=G + GY + GA1, gradient=W2),
            state("backward", activation=A1 + LOSS, temporary=G + GY + GA1, gradient=W2 + B2),
            state("backward", activation=A1 + LOSS, temporary=G + GA1, gradient=W2 + B2),
            state("backward", activation=A1 + LOSS, temporary=G + GA1 + GZ1, gradient=W2 + B2),
            state("backward", activation=LOSS, temporary=G + GZ1, gradient=W2 + B2),
            state("backward", activation=LOSS, temporary=G + GZ1, gradient=W2 + B2 + W1),
            state("backward", activation=LOSS, temporary=G + GZ1, gradient=W2 + B2 + W1 + B1),
            state("backward", activation=LOSS, temporary=G, gradient=PARAMETERS),
            *ADAM,
            state("zero_grad", gradient=PARAMETERS),
            state("zero_grad"),
        ]
        assert profile.peak_where == "in the backward pass of first.1 (aten::threshold_backward)"
        assert profile.peak_by_layer == {
            "": {"other": X + T, "activation": LOSS, "temporary": G},
            "first.0": {"parameter": W1 + B1, "optimizer": 2 * (W1 + B1) + 2 * F32},
            "first.1": {"activation": A1, "temporary": GZ1},
            "second": {"parameter": W2 + B2, "optimizer": 2 * (W2 + B2) + 2 * F32, "temporary": GA1, "gradient": W2 + B2},
        }
        assert (profile.label, profile.step, profile.device) == ("test", 3, "cpu")

    def test_step_with_the_first_layer_checkpointed(self) -> None:
        training = Training("first")
        profile, _ = profiled(training.meter, training.step)
        again = Z1 + A1  # recomputed
        assert states(profile) == [
            state("forward"),
            state("forward", activation=Z1),
            state("forward", activation=Z1 + A1),
            state("forward", activation=A1),
            state("forward", activation=A1 + Y),
            state("loss", activation=A1 + Y + LOSS),
            state("backward", activation=A1 + Y + LOSS, temporary=G),
            state("backward", activation=A1 + Y + LOSS, temporary=G + GY),
            state("backward", activation=A1 + LOSS, temporary=G + GY),
            state("backward", activation=A1 + LOSS, temporary=G + GY + GA1),
            state("backward", activation=A1 + LOSS, temporary=G + GY + GA1, gradient=W2),
            state("backward", activation=A1 + LOSS, temporary=G + GY + GA1, gradient=W2 + B2),
            state("backward", activation=LOSS, temporary=G + GA1, gradient=W2 + B2),  # the only one to hold A1 was `second`
            state("recompute", activation=LOSS, temporary=G + GA1, gradient=W2 + B2),
            state("recompute", activation=LOSS, temporary=G + GA1, gradient=W2 + B2, recompute=Z1),
            state("recompute", activation=LOSS, temporary=G + GA1, gradient=W2 + B2, recompute=again),
            state("recompute", activation=LOSS, temporary=G + GA1, gradient=W2 + B2, recompute=A1),  # handed over, detached
            state("backward", activation=LOSS, temporary=G + GA1 + GZ1, gradient=W2 + B2, recompute=A1),
            state("backward", activation=LOSS, temporary=G + GZ1, gradient=W2 + B2),
            state("backward", activation=LOSS, temporary=G + GZ1, gradient=W2 + B2 + W1),
            state("backward", activation=LOSS, temporary=G + GZ1, gradient=W2 + B2 + W1 + B1),
            state("backward", activation=LOSS, temporary=G, gradient=PARAMETERS),
            *ADAM,
            state("zero_grad", gradient=PARAMETERS),
            state("zero_grad"),
        ]
        layers = {layer.name: layer for layer in profile.layers}
        assert [name for name, layer in layers.items() if layer.checkpointed] == ["first"]
        assert layers["first"].recompute_s >= layers["first.0"].recompute_s > 0
        assert layers["second"].recompute_s == 0

    def test_layers(self) -> None:
        training = Training()
        profile, _ = profiled(training.meter, training.step)
        found = [
            (layer.name, layer.type, layer.parameter_bytes, layer.activation_bytes, layer.output_bytes, layer.calls, layer.dtype)
            for layer in profile.layers
        ]
        held = profile.bytes_by_kind[profile.phases[0].stop - 1]
        assert held[KINDS.index("activation")] == A1 + Y
        assert found == [
            ("(model)", "Mlp", PARAMETERS, A1 + Y, Y, 1, "float32"),
            ("first", "Sequential", W1 + B1, A1, A1, 1, "float32"),
            ("first.0", "Linear", W1 + B1, 0, Z1, 1, "float32"),
            ("first.1", "ReLU", 0, A1, A1, 1, "float32"),
            ("second", "Linear", W2 + B2, Y, Y, 1, "float32"),
        ]
        whole, first, linear, relu, second = profile.layers
        assert whole.forward_s > first.forward_s + second.forward_s
        assert whole.backward_s > first.backward_s + second.backward_s  # with that of the loss
        assert whole.recompute_s == 0
        assert first.forward_s > linear.forward_s + relu.forward_s
        assert first.backward_s == pytest.approx(linear.backward_s + relu.backward_s)
        assert min(layer.backward_s for layer in profile.layers) > 0
        assert second.recompute_s == 0
        assert sum(layer.activation_bytes for layer in (first, second)) == whole.activation_bytes
        assert math.isnan(whole.saved_bytes)
        assert math.isnan(whole.cost_s)

    def test_what_the_models_own_code_holds(self) -> None:
        """No layer does; the loss, which is made outside of the model, is not among it."""

        class Own(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(3, 4)
                self.scale = nn.Parameter(torch.ones(4))

            def forward(self, x: Tensor) -> Tensor:
                return torch.tanh(torch.tanh(self.layer(x)) * self.scale)

        model = Own()
        x = torch.randn(5, 3)

        def step() -> None:
            loss = torch.exp(model(x)).sum()
            assert loss.numel() == 1
            loss.backward()

        profile, _ = profiled(CpuMeter(model, []), step)
        whole, layer = profile.layers
        assert (whole.activation_bytes, layer.activation_bytes) == (2 * Z1, 0)
        end = next(phase.stop for phase in profile.phases if phase.name == "forward") - 1
        assert profile.bytes_by_kind[end, KINDS.index("activation")] == 2 * Z1
        assert profile.bytes_by_kind[:, KINDS.index("activation")].max() > 2 * Z1  # with the loss
        assert whole.parameter_bytes == W1 + B1 + 4 * F32 == profile.bytes_by_kind[0, KINDS.index("parameter")]
        assert (whole.output_bytes, whole.calls, whole.dtype) == (Z1, 1, "float32")

    @pytest.mark.parametrize("checkpointed", [False, True])
    def test_a_model_without_layers(self, checkpointed: bool) -> None:
        model = nn.Linear(3, 4)
        x = torch.randn(5, 3, requires_grad=True)

        def step() -> None:
            (checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)).sum().backward()

        profile, _ = profiled(CpuMeter(model, []), step)
        (whole,) = profile.layers
        assert (whole.type, whole.parameter_bytes, whole.activation_bytes) == ("Linear", W1 + B1, Z1)
        assert whole.checkpointed is checkpointed

    def test_a_layer_may_have_the_name_of_the_model_itself(self) -> None:
        model = nn.Sequential()
        model.add_module("(model)", nn.Linear(3, 4))
        profile, _ = profiled(CpuMeter(model, []), lambda: model(torch.ones(5, 3)).sum().backward())
        assert [(layer.name, layer.type) for layer in profile.layers] == [("(model)", "Sequential"), ("(model)", "Linear")]
        assert profile.layer("(model)").whole

    def test_first_step_makes_the_state(self) -> None:
        training = Training()
        training.optimizer.state.clear()
        profile, _ = profiled(training.meter, training.step)
        assert profile.bytes_by_kind[0, KINDS.index("optimizer")] == 0
        assert profile.bytes_by_kind[-1, KINDS.index("optimizer")] == STATE

    def test_optimizer_that_the_meter_was_not_told_of(self) -> None:
        training = Training()
        training.meter = CpuMeter(training.model, [])
        profile, _ = profiled(training.meter, training.step)
        assert profile.bytes_by_kind[-1, KINDS.index("optimizer")] == STATE
        assert "optimizer" in phase_names(profile)

    def test_next_step_is_only_measured(self) -> None:
        training = Training()
        _, reading = profiled(training.meter, training.step)
        training.meter.begin()
        assert type(training.meter._step) is StepMode
        training.step()
        assert ends(training.meter.end()) == ends(reading)
        assert training.meter.take_profile() is None

    def test_gradients_are_kept_and_zeroed_in_place(self) -> None:
        training = Training()

        def step() -> None:
            training.optimizer.zero_grad(set_to_none=False)
            F.mse_loss(training.model(training.x), training.t).backward()
            training.optimizer.step()

        profiled(training.meter, step)
        profile, _ = profiled(training.meter, step)
        assert (profile.bytes_by_kind[:, KINDS.index("gradient")] == PARAMETERS).all()
        assert phase_names(profile) == ["zero_grad", "forward", "loss", "backward", "optimizer"]

    def test_zero_grad_between_loss_and_backward(self) -> None:
        training = Training()

        def step() -> None:
            loss = F.mse_loss(training.model(training.x), training.t)
            training.optimizer.zero_grad()
            loss.backward()
            training.optimizer.step()

        profiled(training.meter, step)
        profile, _ = profiled(training.meter, step)
        assert phase_names(profile) == ["forward", "loss", "zero_grad", "backward", "optimizer"]

    def test_step_that_begins_within_a_forward(self) -> None:
        """As a session's does: in a hook of the outermost module."""
        training = Training()
        meter = training.meter

        def begin(module: nn.Module, args: Any) -> None:
            if module is training.model:
                meter.profile_next("test")
                meter.begin()

        handle = nn.modules.module.register_module_forward_pre_hook(begin)
        training.step()
        handle.remove()
        reading = meter.end()
        profile = meter.take_profile()
        assert profile is not None
        check(profile, reading)
        assert phase_names(profile) == ["forward", "loss", "backward", "optimizer", "zero_grad"]
        assert [layer.calls for layer in profile.layers] == [1, 1, 1, 1, 1]
        assert profile.layer("second").activation_bytes == Y

    def test_step_that_ends_within_the_optimizers_hooks(self) -> None:
        """As a session's does that was not given a scaler."""
        training = Training()
        meter = training.meter
        readings = []
        handle = register_optimizer_step_post_hook(lambda *_: readings.append(meter.end()))
        meter.profile_next("test")
        meter.begin()
        training.step()
        handle.remove()
        profile = meter.take_profile()
        assert profile is not None
        check(profile, readings[0])
        assert phase_names(profile) == ["forward", "loss", "backward", "optimizer"]
        assert profile.bytes_by_kind[-1, KINDS.index("gradient")] == PARAMETERS

    def test_forward_that_no_backward_follows(self) -> None:
        training = Training()

        def step() -> None:
            F.mse_loss(training.model(training.x), training.t).backward()
            training.model(training.x)
            training.optimizer.step()

        profile, _ = profiled(training.meter, step)
        assert phase_names(profile) == ["forward", "loss", "backward", "forward", "optimizer"]

    def test_several_models_as_one(self) -> None:
        """The tree that holds them is there for a moment only."""
        one, other = nn.Linear(3, 4), nn.Linear(4, 2)
        x = torch.randn(5, 3)
        meter = CpuMeter(one, [])
        meter.watch(lambda: nn.ModuleDict({"one": one, "other": other}))
        profile, _ = profiled(meter, lambda: other(one(x)).sum().backward())
        assert [(layer.name, layer.calls, layer.activation_bytes) for layer in profile.layers] == [
            ("(model)", 2, 5 * (4 + 2) * F32),
            ("one", 1, 5 * 4 * F32),
            ("other", 1, 5 * 2 * F32),
        ]
        whole, *models = profile.layers
        assert whole.parameter_bytes == sum(model.parameter_bytes for model in models)
        assert whole.output_bytes == sum(model.output_bytes for model in models)
        assert whole.forward_s == pytest.approx(sum(model.forward_s for model in models))
        assert profile.peak_by_layer["one"]["parameter"] == W1 + B1

    def test_many_points_are_thinned(self) -> None:
        training = Training()

        def step() -> None:
            for size in range(6000):
                torch.empty(size % 7)
            training.step()

        profile, _ = profiled(training.meter, step)
        assert len(profile.time_s) <= 4000
        assert "thinned" in profile.notes[0]
        assert phase_names(profile) == ["other", "forward", "loss", "backward", "optimizer", "zero_grad"]
        whole, _ = profiled(training.meter, training.step)
        assert profile.peak_by_layer == whole.peak_by_layer
        assert profile.peak_where == whole.peak_where


class Scaled(torch.autograd.Function):
    """Saves a tensor that it makes while gradients are off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        twice = x * 2
        saved = twice + 1
        ctx.save_for_backward(saved)
        return saved * 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (saved,) = ctx.saved_tensors
        return grad * saved


class WithFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Scaled.apply(x)
        return y


class Wide(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float() * 2


class TestKinds:
    def test_custom_function(self) -> None:
        model, x = nn.Sequential(nn.Linear(4, 4), WithFunction()), torch.ones(2, 4)
        profile, _ = profiled(CpuMeter(model, []), lambda: model(x).sum().backward())
        # At the end of the forward pass: what the function saves, and its result. `twice` was temporary.
        assert profile.layer("1").activation_bytes == 2 * 2 * 4 * F32
        temporaries = profile.bytes_by_kind[: profile.phases[0].stop, KINDS.index("temporary")]
        assert temporaries.max() == 2 * 4 * F32

    def test_buffers(self) -> None:
        model = nn.Sequential(nn.BatchNorm1d(4))
        profile, _ = profiled(CpuMeter(model, []), lambda: model(torch.ones(2, 4)).sum().backward())
        assert (profile.bytes_by_kind[:, KINDS.index("buffer")] == 2 * 4 * F32 + 8).all()
        assert profile.peak_by_layer["0"]["buffer"] == 2 * 4 * F32 + 8

    def test_autocast(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Sequential(Wide(), nn.Linear(4, 4)), nn.Identity())

        def step() -> None:
            with torch.autocast("cpu", torch.bfloat16):
                y = model(torch.ones(2, 4))
            y.float().sum().backward()

        profile, _ = profiled(CpuMeter(model, []), step)
        whole, *layers = profile.layers
        assert whole.dtype == "mixed"
        found = {layer.name: layer.dtype for layer in layers}
        assert found == {"0": "bfloat16", "1": "bfloat16", "2": "mixed", "2.0": "float32", "2.1": "bfloat16", "3": ""}
        assert profile.layer("0").output_bytes == 2 * 4 * 2

    def test_users_own_checkpointing(self) -> None:
        for reentrant in (False, True):
            training = Training()

            def step(training: Training = training, reentrant: bool = reentrant) -> None:
                hidden = checkpoint(training.model.first, training.x.clone().requires_grad_(), use_reentrant=reentrant)
                F.mse_loss(training.model.second(hidden), training.t).backward()
                training.optimizer.step()

            profile, _ = profiled(training.meter, step)
            assert profile.bytes_by_kind[:, KINDS.index("recompute")].max() == Z1 + A1
            assert [layer.checkpointed for layer in profile.layers] == [False, True, False, False, False]
            assert profile.layer("(model)").calls == 2  # of two layers in place of the model
            assert profile.layer("(model)").recompute_s >= profile.layer("first").recompute_s > 0
            assert profile.layer("first").calls == 1

    def test_checkpointed_function_without_modules(self) -> None:
        training = Training()

        def step() -> None:
            y = training.model(training.x)
            z = checkpoint(lambda y: y.sin().exp(), y, use_reentrant=False)
            z.sum().backward()

        profile, _ = profiled(training.meter, step)
        assert profile.bytes_by_kind[:, KINDS.index("recompute")].max() == 2 * Y

    def test_gradients_with_a_graph_are_no_recompute(self) -> None:
        training = Training()
        x = training.x.clone().requires_grad_()

        def step() -> None:
            (slope,) = torch.autograd.grad(training.model(x).sum(), x, create_graph=True)
            slope.square().sum().backward()
            training.optimizer.step()

        profile, _ = profiled(training.meter, step)
        assert "recompute" not in phase_names(profile)

    def test_optimizer_within_the_backward_pass(self) -> None:
        training = Training()
        optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1, momentum=0.9) for parameter in training.model.parameters()}

        def step_and_free(parameter: Tensor) -> None:
            optimizers[parameter].step()
            parameter.grad = None

        for parameter in optimizers:
            parameter.register_post_accumulate_grad_hook(step_and_free)
        meter = CpuMeter(training.model, optimizers.values())
        for _ in range(2):  # the first makes the optimizers' state, the second makes nothing
            profile, _ = profiled(meter, lambda: F.mse_loss(training.model(training.x), training.t).backward())
            assert profile.bytes_by_kind[-1, KINDS.index("optimizer")] == PARAMETERS  # momentum
            assert profile.bytes_by_kind[-1, KINDS.index("gradient")] == 0
            assert profile.bytes_by_kind[:, KINDS.index("gradient")].max() == W1 + B1


# ---- all sorts of steps: exact, and the same to the bit with and without a profile -----------------------------------

Step = Callable[[], object]


def gan() -> tuple[nn.Module, list[torch.optim.Optimizer], Step]:
    model = nn.ModuleDict({"g": nn.Linear(3, 4), "d": nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))})
    g = torch.optim.Adam(model["g"].parameters())
    d = torch.optim.SGD(model["d"].parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        fake = model["g"](torch.randn(5, 3))
        d.zero_grad()
        (model["d"](fake.detach()).mean() - model["d"](torch.randn(5, 4)).mean()).backward()
        d.step()
        g.zero_grad()
        (-model["d"](fake).mean()).backward()
        g.step()

    return model, [g, d], step


def accumulation() -> tuple[nn.Module, list[torch.optim.Optimizer], Step]:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(3):
            (model(torch.randn(6, 4)).square().mean() / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    return model, [optimizer], step


def tied() -> tuple[nn.Module, list[torch.optim.Optimizer], Step]:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 10, bias=False))
    model[2].weight = model[0].weight
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randint(10, (6,))), torch.randint(10, (6,))).backward()
        optimizer.step()

    return model, [optimizer], step


def in_place_and_views() -> tuple[nn.Module, list[torch.optim.Optimizer], Step]:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Unflatten(1, (2, 4)), nn.Flatten())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model.zero_grad()
        y = model(torch.randn(3, 4).t().contiguous().t())
        y[:, ::2].mul(2).add_(1).sum().backward()
        optimizer.step()

    return model, [optimizer], step


def sparse() -> tuple[nn.Module, list[torch.optim.Optimizer], Step]:
    model = nn.Sequential(nn.Embedding(20, 4, sparse=True))
    optimizer = torch.optim.SparseAdam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randint(20, (6,))).square().sum().backward()
        optimizer.step()

    return model, [optimizer], step


class Odd(nn.Module):
    """Called many times, also within itself; outputs that are no tensors; a parameter without gradient and one unused."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x: Tensor, deep: bool = True) -> dict[str, Any]:
        hidden = torch.zeros(x.shape[1], 5)
        for one in x:
            hidden = self.cell(one, hidden)
        self.seen = self.seen + hidden.detach().sum(0)
        inner = self(x[:1], deep=False)["hidden"] if deep else 0
        return {"hidden": (self.frozen(hidden) + inner), "parts": [hidden, None, "text"], "count": 3}


def odd() -> tuple[nn.Module, list[torch.optim.Optimizer], Step]:
    model = Odd()
    optimizer = torch.optim.RMSprop(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 2, 3))["hidden"].square().mean().backward()
        optimizer.step()

    return model, [optimizer], step


def offloaded() -> tuple[nn.Module, list[torch.optim.Optimizer], Step]:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autograd.graph.save_on_cpu():
            loss = model(torch.randn(3, 4)).square().mean()
        loss.backward()
        optimizer.step()

    return model, [optimizer], step


def closure() -> tuple[nn.Module, list[torch.optim.Optimizer], Step]:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x = torch.randn(8, 4)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = model(x).square().mean()
        value.backward()
        return value

    def step() -> None:
        optimizer.step(loss)

    return model, [optimizer], step


def scaled() -> tuple[nn.Module, list[torch.optim.Optimizer], Step]:
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.GELU(), nn.Linear(8, 8)), nn.Linear(8, 2))
    Checkpointing(model).apply(["1"])
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(torch.randn(4, 4)), torch.randint(2, (4,)))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return model, [optimizer], step


def attention() -> tuple[nn.Module, list[torch.optim.Optimizer], Step]:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        with torch.no_grad():
            model.eval()
            model(torch.randn(2, 5, 8))
            model.train()
        model(torch.randn(2, 5, 8)).square().mean().backward()
        optimizer.step()

    return model, [optimizer], step


def functional() -> tuple[nn.Module, list[torch.optim.Optimizer], Step]:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    def step() -> None:
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        slopes = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, torch.randn(5, 4))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= 0.1 * slopes[name].mean(0)

    return model, [], step


STEPS = {
    make.__name__: make
    for make in (functional, gan, accumulation, tied, in_place_and_views, sparse, odd, offloaded, closure, scaled, attention)
}


def hooks_of(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> list[Any]:
    """Every hook and mode that a profile could have left."""
    module = nn.modules.module
    found: list[Any] = [
        dict(module._global_forward_hooks),
        dict(module._global_forward_pre_hooks),
        dict(module._global_backward_hooks),
        dict(module._global_forward_hooks_always_called),
        torch._C._len_torch_dispatch_stack(),
        torch.is_grad_enabled(),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
    ]
    for part in model.modules():
        found += [dict(part._forward_hooks), dict(part._forward_pre_hooks), dict(part._backward_hooks), part.training, type(part)]
    for parameter in model.parameters():
        found += [parameter._backward_hooks, parameter._post_accumulate_grad_hooks, parameter.requires_grad]
    for optimizer in optimizers:
        found += [dict(optimizer._optimizer_step_pre_hooks), dict(optimizer._optimizer_step_post_hooks)]
    return found


def tensors_of(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> list[Tensor]:
    found = [*model.state_dict().values()]
    found += [parameter.grad.to_dense() for parameter in model.parameters() if parameter.grad is not None]
    for optimizer in optimizers:
        for state in optimizer.state.values():
            found += [value for value in state.values() if isinstance(value, Tensor)]
    return [tensor.detach().clone() for tensor in found]


class TestAllSorts:
    @pytest.mark.parametrize("name", list(STEPS))
    def test_exact_and_neutral(self, name: str) -> None:
        def run(measured: Callable[[CpuMeter, Step], MemoryReading]) -> tuple[list[tuple[float, float]], list[Tensor]]:
            torch.manual_seed(0)
            model, optimizers, step = STEPS[name]()
            meter = CpuMeter(model, optimizers)
            readings = []
            for _ in range(3):
                before = hooks_of(model, optimizers)
                readings.append(ends(measured(meter, step)))
                assert hooks_of(model, optimizers) == before
            return readings, [*tensors_of(model, optimizers), torch.get_rng_state()]

        def plainly(meter: CpuMeter, step: Step) -> MemoryReading:
            meter.begin()
            step()
            return meter.end()

        with_profile, without = run(lambda meter, step: profiled(meter, step)[1]), run(plainly)
        assert with_profile[0] == without[0]
        assert len(with_profile[1]) == len(without[1])
        for one, other in zip(with_profile[1], without[1], strict=True):
            assert torch.equal(one, other)

    def test_phases_of_a_gan(self) -> None:
        model, optimizers, step = gan()
        meter = CpuMeter(model, optimizers)
        profiled(meter, step)
        profile, _ = profiled(meter, step)
        names = [name for name in phase_names(profile) if name in ("backward", "optimizer", "zero_grad")]
        assert names == ["zero_grad", "backward", "optimizer"] * 2
        assert profile.layer("d").calls == 3
        assert profile.layer("g").calls == 1

    def test_calls_and_recursion(self) -> None:
        model, optimizers, step = odd()
        profile, _ = profiled(CpuMeter(model, optimizers), step)
        assert profile.layer("cell").calls == 5
        assert profile.layer("frozen").calls == 2
        assert profile.layer("unused").calls == 0
        assert math.isnan(profile.layer("unused").forward_s)
        assert profile.layer("unused").dtype == ""

    def test_accumulated_activations_are_of_one_batch(self) -> None:
        model, optimizers, step = accumulation()
        profile, _ = profiled(CpuMeter(model, optimizers), step)
        one_batch = 6 * 8 * F32
        assert profile.layer("0").activation_bytes == 0  # dropout saves its mask, and not its input
        assert profile.layer("1").activation_bytes == 2 * one_batch  # the mask of numbers, and the result
        assert profile.layer("3").activation_bytes == 6 * 2 * F32
        whole, *layers = profile.layers
        assert whole.activation_bytes == sum(layer.activation_bytes for layer in layers)  # without the loss of the batch before

    def test_tied_weight_counts_once(self) -> None:
        model, optimizers, step = tied()
        profile, _ = profiled(CpuMeter(model, optimizers), step)
        assert profile.bytes_by_kind[0, 0] == (10 * 4 + 4 * 4 + 4) * F32
        assert profile.layer("2").parameter_bytes == 10 * 4 * F32  # has it, too
        assert "parameter" not in profile.peak_by_layer.get("2", {})

    def test_sparse_gradients(self) -> None:
        model, optimizers, step = sparse()
        profile, _ = profiled(CpuMeter(model, optimizers), step)
        assert profile.bytes_by_kind[-1, KINDS.index("gradient")] == 6 * 4 * F32 + 6 * 8  # values, and indices of int64


# ---- steps that go wrong ---------------------------------------------------------------------------------------------


class Failing(nn.Module):
    def __init__(self, error: BaseException | None) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.error is not None:
            raise self.error
        z: Tensor = self.linear(y)
        return z


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class TestAborted:
    @pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
    def test_exception(self, error: BaseException) -> None:
        model = Failing(error)
        meter = CpuMeter(model, [])
        before = hooks_of(model, [])
        meter.profile_next("test")
        meter.begin()
        with pytest.raises(type(error)):
            model(torch.ones(2, 3))
        meter.abandon()
        assert hooks_of(model, []) == before
        assert meter.take_profile() is None
        assert meter.unprofiled_because == "the step did not end"
        model.error = None
        profiled(meter, lambda: model(torch.ones(2, 3)).sum().backward())

    def test_exception_that_the_step_survives(self) -> None:
        model = Failing(ValueError("no"))
        meter = CpuMeter(model, [])

        x = torch.ones(2, 3)

        def step() -> None:
            with contextlib.suppress(ValueError):
                model(x)
            model.error = None
            model(x).sum().backward()

        profile, _ = profiled(meter, step)
        assert phase_names(profile) == ["forward", "loss", "backward"]

    def test_exception_in_backward(self) -> None:
        training = Training()

        def fail(grad: Tensor) -> None:
            raise ValueError("no")

        def step() -> None:
            y = training.model(training.x)
            y.register_hook(fail)
            with pytest.raises(ValueError):
                y.sum().backward()
            training.step()

        profile, _ = profiled(training.meter, step)
        assert phase_names(profile)[-4:] == ["loss", "backward", "optimizer", "zero_grad"]

    def test_left_step_is_noticed_by_the_next_op(self) -> None:
        model = nn.Linear(3, 2)
        clock = Clock()
        meter = CpuMeter(model, [], clock=clock)
        before = hooks_of(model, [])
        meter.profile_next("test")
        exec(compile("meter.begin()", "<cell 1>", "exec"), {"meter": meter})
        model(torch.ones(2, 3))
        clock.now_s += 2 * PAUSE_S
        exec(compile("torch.ones(3).add(1)", "<cell 2>", "exec"), {"torch": torch})
        assert hooks_of(model, []) == before
        assert math.isnan(meter.end().peak_bytes)
        assert meter.take_profile() is None
        assert meter.unprofiled_because is not None

    def test_meter_dropped_in_mid_step(self) -> None:
        model = nn.Linear(3, 2)
        before = hooks_of(model, [])
        meter = CpuMeter(model, [])
        meter.profile_next("test")
        meter.begin()
        model(torch.ones(2, 3))
        del meter
        gc.collect()
        model(torch.ones(2, 3))
        assert hooks_of(model, []) == before

    def test_ended_on_another_thread(self) -> None:
        model = nn.Linear(3, 2)
        before = hooks_of(model, [])
        meter = CpuMeter(model, [])
        meter.profile_next("test")
        meter.begin()
        readings: list[MemoryReading] = []
        thread = threading.Thread(target=lambda: readings.append(meter.end()))
        thread.start()
        thread.join()
        assert math.isnan(readings[0].peak_bytes)
        model(torch.ones(2, 3))
        assert hooks_of(model, []) == before
        assert meter.take_profile() is None

    def test_other_threads_do_not_mix_in(self) -> None:
        training = Training()
        other = nn.Sequential(nn.Linear(100, 100))
        seen: list[int] = []

        def step() -> None:
            thread = threading.Thread(target=lambda: seen.append(training.model(torch.ones(50, 3)).shape[0] + len(other)))
            thread.start()
            thread.join()
            training.step()

        profile, _ = profiled(training.meter, step)
        assert seen == [51]
        assert [layer.calls for layer in profile.layers] == [1, 1, 1, 1, 1]


class Names(TorchDispatchMode):
    """A mode of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class TestNotProfiled:
    def test_within_a_mode_of_torchs_own(self) -> None:
        training = Training()
        with FakeTensorMode():
            training.meter.profile_next("test")
            training.meter.begin()
            assert math.isnan(training.meter.end().peak_bytes)
        assert training.meter.take_profile() is None
        assert training.meter.unprofiled_because is not None
        assert "FakeTensorMode" in training.meter.unprofiled_because
        profiled(training.meter, training.step)

    def test_within_a_mode_of_the_users(self) -> None:
        training = Training()
        training.meter.profile_next("test")
        with Names() as names:
            training.meter.begin()
            training.step()
            assert training.meter.end().peak_bytes > 0
        profile = training.meter.take_profile()
        assert profile is not None
        assert "addmm" in names.names
        assert "aten::addmm" in profile.operator_names

    def test_mode_of_the_users_within_a_step(self) -> None:
        training = Training()
        names = Names()

        def step() -> None:
            with names:
                training.step()

        profile, _ = profiled(training.meter, step)
        assert "addmm" in names.names
        assert phase_names(profile) == ["forward", "loss", "backward", "optimizer", "zero_grad"]

    def test_old_profile_goes_when_a_new_one_is_asked_for(self) -> None:
        training = Training()
        training.meter.profile_next("test")
        training.meter.begin()
        training.step()
        training.meter.end()
        training.meter.profile_next("test")
        training.meter.begin()
        training.meter.abandon()
        assert training.meter.take_profile() is None


class TestCompiled:
    @pytest.fixture(autouse=True)
    def _reset(self) -> Iterator[None]:
        yield
        torch._dynamo.reset()

    @pytest.fixture
    def compiles(self) -> list[int]:
        return []

    def backend(self, runs: list[int]) -> Any:
        def compile_(graph: Any, inputs: Any) -> Any:
            def run(*args: Any) -> Any:
                runs.append(1)
                return graph(*args)

            return run

        return compile_

    def test_part_of_the_model(self, compiles: list[int]) -> None:
        training = Training()
        training.model.first = torch.compile(training.model.first, backend=self.backend(compiles))
        training.meter.profile_next("test")
        training.meter.begin()
        training.step()
        training.meter.end()
        assert compiles == [1]
        profile = training.meter.take_profile()  # of the boundaries
        assert profile is not None
        assert profile.layers == ()
        assert "layer 'first' is compiled" in profile.notes[0]

    def test_behind_the_meters_back(self, compiles: list[int]) -> None:
        """What ``torch.compile(model)`` returns is another module, of which the model does not know."""
        training = Training()
        compiled = torch.compile(training.model, backend=self.backend(compiles))
        frames = torch._dynamo.utils.counters["frames"]

        def step() -> None:
            F.mse_loss(compiled(training.x), training.t).backward()

        step()  # compiled before the step that is to be profiled
        made, runs = frames["total"], len(compiles)
        for _ in range(2):
            training.meter.begin()
            step()
            training.meter.end()
            training.meter.profile_next("test")
        training.meter.begin()
        assert type(training.meter._step) is StepMode
        step()
        training.meter.end()
        profile = training.meter.take_profile()  # of the boundaries
        assert profile is not None
        assert profile.layers == ()
        assert "compiled code ran in the step" in profile.notes[0]
        assert len(compiles) == runs + 3
        assert frames["total"] == made  # and never compiled anew

    @pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks")
    def test_in_the_very_first_step(self, compiles: list[int]) -> None:
        training = Training()
        compiled = torch.compile(training.model, backend=self.backend(compiles))
        before = hooks_of(training.model, [])
        training.meter.profile_next("test")
        training.meter.begin()
        compiled(training.x)
        assert hooks_of(training.model, [])[:4] == before[:4]  # taken off before the compiler saw them
        training.meter.end()
        assert compiles == [1]
        assert training.meter.take_profile() is None
        compiled(training.x)
        assert compiles == [1, 1]
        assert torch._dynamo.utils.counters["frames"]["total"] == 1

    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # read by the compiler
    def test_compiled_function(self, compiles: list[int]) -> None:
        training = Training()
        loss = torch.compile(lambda y, t: (y - t).square().mean(), backend=self.backend(compiles))

        def step() -> None:
            loss(training.model(training.x), training.t).backward()

        step()
        training.meter.profile_next("test")
        training.meter.begin()
        step()
        training.meter.end()
        assert len(compiles) == 2
        assert training.meter.take_profile() is None
        assert training.meter.unprofiled_because is not None

    def test_the_mode_itself_is_not_compiled(self) -> None:
        from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

        @torch._dynamo.disable(recursive=False)
        def plain(x: Tensor) -> Tensor:
            return x.exp()

        compiled = torch.compile(lambda x: plain(x.sin()).cos(), backend="eager")
        compiled(torch.zeros(3))
        training = Training()
        training.meter.profile_next("test")
        training.meter.begin()
        compiled(torch.zeros(3))
        training.meter.end()
        assert _debug_get_cache_entry_list(StepTracker.__torch_dispatch__.__code__) == []


class TestNothingIsKept:
    def test_model_and_tensors_can_go(self) -> None:
        training = Training()
        meter = training.meter
        profile, _ = profiled(meter, training.step)
        references = [weakref.ref(part) for part in (training, training.model, training.model.first, training.optimizer)]
        references += [weakref.ref(tensor.untyped_storage()) for tensor in (training.x, *training.model.parameters())]
        del training
        gc.collect()
        assert [reference() is None for reference in references] == [True] * len(references)
        assert profile.peak_bytes > 0
        assert len(meter._storages) == 0

    def test_before_the_profile_is_taken(self) -> None:
        training = Training()
        meter = training.meter
        meter.profile_next("test")
        meter.begin()
        training.step()
        meter.end()
        references = [weakref.ref(training.model), weakref.ref(training.x.untyped_storage())]
        del training
        gc.collect()
        assert [reference() for reference in references] == [None, None]
        assert meter.take_profile() is not None

    def test_abandoned_step(self) -> None:
        training = Training()
        meter = training.meter
        meter.profile_next("test")
        meter.begin()
        loss = F.mse_loss(training.model(training.x), training.t)
        tracker = weakref.ref(meter._step)
        meter.abandon()
        references = [weakref.ref(training.model), weakref.ref(loss.untyped_storage())]
        del training, loss
        gc.collect()
        assert [reference() for reference in references] == [None, None]
        assert tracker() is None

    def test_model_goes_in_mid_step(self) -> None:
        training = Training()
        meter = training.meter
        meter.profile_next("test")
        meter.begin()
        training.model(training.x)
        reference = weakref.ref(training.model)
        del training
        gc.collect()
        assert reference() is None
        meter.end()
        assert meter.take_profile() is not None
        meter.close()
        assert meter.take_profile() is None


def test_each_recompute_is_one_phase() -> None:
    from amp_widgets.demos.text import TextGPT

    torch.manual_seed(0)
    model = TextGPT()
    optimizer = torch.optim.Adam(model.parameters())
    checkpointing = Checkpointing(model)
    checkpointing.apply(("layers.0", "layers.2", "layers.5"))
    tokens = torch.randint(0, 64, (2, 32))
    meter = CpuMeter(model, [optimizer])
    meter.profile_next("gpt")
    meter.begin()
    nn.functional.cross_entropy(model(tokens).flatten(0, -2), tokens.flatten()).backward()
    meter.end()
    profile = meter.take_profile()
    assert profile is not None
    recomputes = [phase for phase in profile.phases if phase.name == "recompute"]
    assert len(recomputes) == 3
    layers = [{profile.layer_names[i] for i in profile.layer_index[phase.start : phase.stop] if i >= 0} for phase in recomputes]
    assert [{name.split(".")[1] for name in names} for names in layers] == [{"5"}, {"2"}, {"0"}]
    checkpointing.close()
