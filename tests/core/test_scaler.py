"""The live scaler against torch's own, and against a replay of the update rule in plain Python."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import random
import subprocess
import sys
from typing import Any

import pytest
import torch

from amp_widgets.core.scaler import LiveScaler, ScaledStep
from amp_widgets.core.settings import SMALLEST_SAFE_SCALE, Settings
from amp_widgets.errors import HalfParametersError, NoGradientsError, ScalerError, SettingsError

FP16 = Settings(autocast="fp16")


@dataclasses.dataclass
class Listener:
    """Keeps what it is told."""

    steps: list[ScaledStep] = dataclasses.field(default_factory=list)
    scaled: int = 0
    adoptions: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def scaling(self, outputs: object) -> None:
        self.scaled += 1

    def stepping(self) -> None: ...

    def skipping(self, *, as_arrived: bool) -> None:
        pass

    def refused(self, reason: str) -> None:
        pass

    def updated(self, step: ScaledStep) -> None:
        self.steps.append(step)

    def adopted(self, settings: Settings, changes: dict[str, Any]) -> None:
        self.adoptions.append(changes)

    def parameter_names(self, optimizer: torch.optim.Optimizer) -> list[str]:
        return [f"p{i}" for i, _ in enumerate(p for g in optimizer.param_groups for p in g["params"])]


def make(settings: Settings = FP16) -> tuple[LiveScaler, Listener]:
    scaler, listener = LiveScaler("cpu", settings), Listener()
    scaler.listen(listener)
    return scaler, listener


def one_step(scaler: torch.amp.GradScaler, weight: torch.nn.Parameter, optimizer: torch.optim.Optimizer, factor: float) -> None:
    optimizer.zero_grad()
    scaler.scale((weight * factor).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


def parameter(value: float = 1.0) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full((3,), value))


def replay(scale: float, tracker: int, overflow: bool, settings: Settings) -> tuple[float, int]:
    """The update rule of torch's documentation, in plain Python, and the floor and cap of ours."""
    if overflow:
        scale, tracker = scale * settings.backoff_factor, 0
    else:
        tracker += 1
        if tracker == settings.growth_interval:
            scale, tracker = scale * settings.growth_factor, 0
    low = settings.min_scale if settings.min_scale is not None else 2.0**-126
    high = settings.max_scale if settings.max_scale is not None else 2.0**126
    return min(max(scale, low), high), tracker


@pytest.mark.parametrize("fused", [False, True])
def test_scale_history_equals_a_plain_replay_under_live_changes(fused: bool) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    settings = dataclasses.replace(FP16, growth_interval=5)
    scaler, listener = make(settings)
    weight = parameter()
    optimizer = torch.optim.SGD([weight], lr=1e-3, fused=fused)
    scale, tracker = settings.init_scale, 0
    for step in range(600):
        if rng.random() < 0.1:
            changes: dict[str, Any] = rng.choice(
                [
                    {"init_scale": 2.0 ** rng.randint(-10, 30), "min_scale": None, "max_scale": None},
                    {"growth_interval": rng.randint(1, 9)},
                    {"growth_factor": rng.choice([2.0, 4.0, 1.5])},
                    {"backoff_factor": rng.choice([0.5, 0.25])},
                    {"init_scale": 2.0**10, "min_scale": 2.0**8, "max_scale": 2.0**12},
                ]
            )
            settings = settings.replace(**changes)
            scaler.configure(settings, set_scale="init_scale" in changes)
            if "init_scale" in changes:
                scale, tracker = settings.init_scale, 0
            if tracker >= settings.growth_interval:
                tracker = 0
        overflow = rng.random() < 0.2
        one_step(scaler, weight, optimizer, math.inf if overflow else 1.0)
        told = listener.steps[-1]
        assert told.used is not None
        assert float(told.used) == pytest.approx(scale, rel=1e-6), f"step {step}"
        assert scaler.step_was_skipped() is overflow
        assert scaler.step_was_skipped(optimizer) is overflow
        assert (told.skipped if told.skipped is not None else bool(told.found_inf)) is overflow
        scale, tracker = replay(scale, tracker, overflow, settings)
        assert told.after is not None
        assert float(told.after) == pytest.approx(scale, rel=1e-6), f"step {step}"
        scale = float(told.after)  # fp32 rounding of 1.5^n must not add up


def test_identical_to_torchs_own() -> None:
    ours, _ = make(dataclasses.replace(FP16, growth_interval=4))
    plain = torch.amp.GradScaler("cpu", growth_interval=4)
    results = []
    for scaler in (ours, plain):
        weight = parameter()
        optimizer = torch.optim.Adam([weight], lr=0.1)
        scales = []
        for step in range(40):
            one_step(scaler, weight, optimizer, math.nan if step % 7 == 3 else 0.3 * step)
            scales.append(scaler.get_scale())
        results.append((scales, weight.detach().clone(), scaler.state_dict()))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]


@pytest.mark.parametrize("autocast", ["fp32", "bf16"])
def test_passes_through_without_fp16(autocast: str) -> None:
    scaler, listener = make(Settings(autocast=autocast))  # type: ignore[arg-type]
    weight = parameter()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    loss = (weight * 2).sum()
    assert scaler.scale(loss) is loss
    assert not scaler.is_enabled()
    assert scaler.get_scale() == 1.0
    one_step(scaler, weight, optimizer, 2.0)
    assert torch.equal(weight.detach(), torch.full((3,), -1.0))
    told = listener.steps[-1]
    assert (told.used, told.after, told.skipped) == (None, None, False)


def test_scale_is_kept_through_formats() -> None:
    scaler, _ = make(dataclasses.replace(FP16, growth_interval=3))
    weight = parameter()
    optimizer = torch.optim.SGD([weight], lr=0.0)
    one_step(scaler, weight, optimizer, math.inf)
    one_step(scaler, weight, optimizer, 1.0)
    before = scaler.state_dict()
    assert (before["scale"], before["_growth_tracker"]) == (2.0**15, 1)
    for autocast in ("bf16", "fp32", "bf16"):
        scaler.configure(Settings(autocast=autocast, growth_interval=3), set_scale=False)  # type: ignore[arg-type]
        one_step(scaler, weight, optimizer, 1.0)
        assert scaler.state_dict() == before
    scaler.configure(dataclasses.replace(FP16, growth_interval=3), set_scale=False)
    assert scaler.get_scale() == 2.0**15
    one_step(scaler, weight, optimizer, 1.0)
    one_step(scaler, weight, optimizer, 1.0)
    assert scaler.get_scale() == 2.0**16


def test_init_scale_before_first_use() -> None:
    scaler, listener = make()
    scaler.configure(dataclasses.replace(FP16, init_scale=8.0), set_scale=True)
    weight = parameter()
    one_step(scaler, weight, torch.optim.SGD([weight], lr=0.0), 1.0)
    assert listener.steps[0].used is not None
    assert float(listener.steps[0].used) == 8.0


def test_interval_lowered_below_the_tracker_still_grows() -> None:
    scaler, _ = make(dataclasses.replace(FP16, growth_interval=100))
    weight = parameter()
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for _ in range(10):
        one_step(scaler, weight, optimizer, 1.0)
    scaler.configure(dataclasses.replace(FP16, growth_interval=4), set_scale=False)
    for _ in range(4):
        assert scaler.get_scale() == 2.0**16
        one_step(scaler, weight, optimizer, 1.0)
    assert scaler.get_scale() == 2.0**17


def test_interval_lowered_above_the_tracker_goes_on_counting() -> None:
    scaler, _ = make(dataclasses.replace(FP16, growth_interval=100))
    weight = parameter()
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for _ in range(3):
        one_step(scaler, weight, optimizer, 1.0)
    scaler.configure(dataclasses.replace(FP16, growth_interval=4), set_scale=False)
    one_step(scaler, weight, optimizer, 1.0)
    assert scaler.get_scale() == 2.0**17


def test_scale_never_falls_to_where_steps_are_no_longer_skipped() -> None:
    scaler, _ = make(dataclasses.replace(FP16, backoff_factor=2.0**-40))
    weight = parameter()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(8):
        one_step(scaler, weight, optimizer, math.inf)
        assert scaler.step_was_skipped()
    assert scaler.get_scale() == SMALLEST_SAFE_SCALE
    assert torch.equal(weight.detach(), torch.ones(3))


def test_state_dict_round_trip_and_into_torchs_own() -> None:
    scaler, listener = make(dataclasses.replace(FP16, growth_interval=7))
    weight = parameter()
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for factor in (1.0, math.inf, 1.0, 1.0):
        one_step(scaler, weight, optimizer, factor)
    state = scaler.state_dict()
    plain = torch.amp.GradScaler("cpu")
    plain.load_state_dict(state)
    assert plain.state_dict() == state
    for settings in (FP16, Settings()):  # scaling, and passing through
        other, told = make(settings)
        other.load_state_dict(state)
        assert other.state_dict() == state
        assert told.adoptions == [{"init_scale": 2.0**15, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 7}]
    assert listener.adoptions == []


def test_load_state_dict_is_all_or_nothing() -> None:
    scaler, listener = make()
    before = scaler.state_dict()
    with pytest.raises(ScalerError, match="without growth_factor"):
        scaler.load_state_dict({"scale": 4.0, "backoff_factor": 0.1, "growth_interval": 3, "_growth_tracker": 0})
    with pytest.raises(SettingsError, match="positive finite"):
        scaler.load_state_dict({**before, "scale": 0.0})
    assert scaler.state_dict() == before
    assert listener.adoptions == []


def test_empty_state_of_a_disabled_scaler_is_taken_while_passing_through() -> None:
    scaler, _ = make(Settings())
    before = scaler.state_dict()
    scaler.load_state_dict({})
    assert scaler.state_dict() == before


def test_setters_validate() -> None:
    scaler, listener = make()
    with pytest.raises(SettingsError):
        scaler.set_growth_factor(0.5)
    with pytest.raises(SettingsError):
        scaler.set_backoff_factor(2.0)
    with pytest.raises(SettingsError):
        scaler.set_growth_interval(0)
    scaler.set_growth_interval(3)
    assert scaler.get_growth_interval() == 3
    assert listener.adoptions == [{"growth_interval": 3}]


def test_update_with_a_value() -> None:
    scaler, listener = make()
    weight = parameter()
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update(1024)  # torch's own raises AttributeError for an int
    assert scaler.get_scale() == 1024.0
    with pytest.raises(SettingsError):
        scaler.update(0.0)
    assert len(listener.steps) == 1


@pytest.mark.parametrize("fused", [False, True])
def test_two_optimizers_skip_each_on_its_own_inf_and_back_off_once(fused: bool) -> None:
    scaler, listener = make()
    first, second = parameter(), parameter()
    optimizers = [torch.optim.SGD([first], lr=0.1, fused=fused), torch.optim.SGD([second], lr=0.1)]
    scaler.scale(first.sum() + (second * math.inf).sum()).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert not scaler.step_was_skipped(optimizers[0])
    assert scaler.step_was_skipped(optimizers[1])
    assert scaler.step_was_skipped()
    assert scaler.get_scale() == 2.0**15
    assert torch.equal(first.detach(), torch.full((3,), 0.9))
    assert torch.equal(second.detach(), torch.ones(3))
    assert len(listener.steps) == 1


def test_unscale_and_clipping() -> None:
    scaler, _ = make()
    weight = parameter()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale((weight * 4).sum()).backward()
    scaler.unscale_(optimizer)
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((3,), 4.0))
    torch.nn.utils.clip_grad_norm_([weight], 1.0)
    clipped = weight.grad.clone()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight.detach(), 1.0 - clipped)


def test_fp16_parameters_are_explained() -> None:
    scaler, _ = make()
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    scaler.scale(weight.float().sum()).backward()
    with pytest.raises(HalfParametersError, match=r"got fp16 parameters \(p0\), expected fp32 ones.*model.float\(\)") as caught:
        scaler.step(torch.optim.SGD([weight], lr=0.1))
    assert isinstance(caught.value, ValueError)  # what torch raises


def test_missing_gradients_are_explained() -> None:
    scaler, _ = make()
    used, unused = parameter(), parameter()
    scaler.scale(used.sum()).backward()
    with pytest.raises(NoGradientsError, match=r"no gradient in any of its parameters \(p0\)") as caught:
        scaler.step(torch.optim.SGD([unused], lr=0.1))
    assert isinstance(caught.value, AssertionError)  # what torch raises


def test_update_without_a_step_is_explained() -> None:
    scaler, listener = make()
    weight = parameter()
    scaler.scale(weight.sum()).backward()
    with pytest.raises(NoGradientsError, match=r"without a scaler\.step"):
        scaler.update()
    assert listener.steps == []


def test_other_errors_come_through_untouched() -> None:
    scaler, _ = make()
    weight = parameter()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer)


def test_a_broken_off_step_leaves_no_trace() -> None:
    scaler, _ = make()
    weight = parameter()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale((weight * math.inf).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.abandon_step()
    one_step(scaler, weight, optimizer, 1.0)
    assert scaler.get_scale() == 2.0**16
    assert not scaler.step_was_skipped()


def test_released_it_is_a_plain_scaler() -> None:
    scaler, listener = make(dataclasses.replace(FP16, growth_interval=2))
    weight = parameter()
    optimizer = torch.optim.SGD([weight], lr=0.0)
    one_step(scaler, weight, optimizer, math.inf)
    state = scaler.state_dict()
    scaler.release()
    assert type(scaler) is torch.amp.GradScaler
    assert vars(scaler).keys() == vars(torch.amp.GradScaler("cpu")).keys()
    assert scaler.state_dict() == state
    one_step(scaler, weight, optimizer, 1.0)
    one_step(scaler, weight, optimizer, 1.0)
    assert scaler.get_scale() == 2.0**16
    assert len(listener.steps) == 1


def test_the_scaler_does_not_keep_its_listener_alive() -> None:
    scaler, listener = make()
    del listener
    weight = parameter()
    one_step(scaler, weight, torch.optim.SGD([weight], lr=0.0), 1.0)
    assert scaler._listener_ref() is None


def test_copies_are_plain_scalers(tmp_path: Any) -> None:
    scaler, _ = make()
    weight = parameter()
    one_step(scaler, weight, torch.optim.SGD([weight], lr=0.0), math.inf)
    for other in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert type(other) is torch.amp.GradScaler
        assert other.state_dict() == scaler.state_dict()
    file = tmp_path / "scaler.pickle"
    file.write_bytes(pickle.dumps(scaler))
    code = "import pickle, sys; s = pickle.load(open(sys.argv[1], 'rb')); print(s.get_scale(), 'amp_widgets' in sys.modules)"
    run = subprocess.run([sys.executable, "-I", "-c", code, str(file)], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["32768.0", "False"]


def test_a_loaded_tracker_past_the_interval_still_grows() -> None:
    scaler, _ = make()
    scaler.load_state_dict({**scaler.state_dict(), "scale": 8.0, "growth_interval": 3, "_growth_tracker": 10})
    weight = parameter()
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for _ in range(3):
        one_step(scaler, weight, optimizer, 1.0)
    assert scaler.get_scale() == 16.0


@pytest.mark.parametrize(
    ("entry", "value", "kind"),
    [
        ("_growth_tracker", None, ScalerError),
        ("_growth_tracker", -1, ScalerError),
        ("_growth_tracker", 1.5, ScalerError),
        ("scale", "a", SettingsError),
        ("scale", None, SettingsError),
        ("growth_interval", 0, SettingsError),
    ],
)
def test_a_state_that_cannot_be_is_refused_whole(entry: str, value: object, kind: type[Exception]) -> None:
    scaler, listener = make()
    before = scaler.state_dict()
    with pytest.raises(kind):
        scaler.load_state_dict({**before, "scale": 4.0, entry: value})
    assert scaler.state_dict() == before
    assert listener.adoptions == []


def test_after_a_refusal_the_next_right_step_works() -> None:
    scaler, _ = make()
    weight = parameter()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale(weight.sum())
    with pytest.raises(NoGradientsError, match=r"no gradient in any of its parameters \(p0\)"):
        scaler.step(optimizer)
    with pytest.raises(NoGradientsError, match=r"without a scaler\.step"):
        scaler.update()
    one_step(scaler, weight, optimizer, 1.0)
    assert torch.equal(weight.detach(), torch.full((3,), 0.9))


def test_after_a_refused_update_gradients_can_be_unscaled() -> None:
    scaler, _ = make()
    weight = parameter()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale(weight.sum())
    scaler.unscale_(optimizer)  # of nothing
    with pytest.raises(NoGradientsError, match=r"without a scaler\.step"):
        scaler.update()
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.ones(3))


def test_a_refusal_of_one_optimizer_leaves_the_others() -> None:
    scaler, _ = make()
    one, other = parameter(), parameter()
    optimizers = [torch.optim.SGD([one], lr=0.1), torch.optim.SGD([other], lr=0.1)]
    scaler.scale(one.sum()).backward()
    scaler.step(optimizers[0])
    with pytest.raises(NoGradientsError):
        scaler.step(optimizers[1])
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizers[0])
    scaler.update()
    assert torch.equal(one.detach(), torch.full((3,), 0.9))


def test_unscaling_before_there_are_gradients_is_what_the_message_says() -> None:
    scaler, _ = make()
    weight = parameter()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    loss = scaler.scale(weight.sum())
    scaler.unscale_(optimizer)
    loss.backward()
    with pytest.raises(NoGradientsError, match=r"got scaler\.unscale_\(optimizer\) before any of its parameters had a gradient"):
        scaler.step(optimizer)


@pytest.mark.parametrize("unscale", [False, True])
def test_a_listener_is_told_whether_gradients_are_as_they_arrived(unscale: bool) -> None:
    told: list[bool] = []

    class Asking(Listener):
        def skipping(self, *, as_arrived: bool) -> None:
            told.append(as_arrived)

    scaler, listener = LiveScaler("cpu", FP16), Asking()
    scaler.listen(listener)
    weight = parameter()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(2):
        scaler.scale((weight * math.inf).sum()).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert told == [not unscale] * 2
