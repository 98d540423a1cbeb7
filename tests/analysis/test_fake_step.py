"""Steps predicted on fake tensors: against real ones byte by byte, and without a trace."""

from __future__ import annotations

import contextlib
import gc
import math
import random
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_widgets.analysis import fake_step
from amp_widgets.analysis.fake_step import PREDICTED, PredictedStep, fake_steps, predict_step
from amp_widgets.core.memory.profile import StepProfile
from amp_widgets.errors import RunError, SessionClosedError, SettingsError
from amp_widgets.session import AmpSession
from tests.analysis.six_nets import NETS, Bench, mlp, recurrent, resnet, two_inputs

Untouched = Callable[[AmpSession], contextlib.AbstractContextManager[None]]
SEED = 20_240


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@contextlib.contextmanager
def session(bench: Bench) -> Iterator[AmpSession]:
    with AmpSession(bench.model, bench.optimizers) as made:
        yield made


def train(ours: AmpSession, bench: Bench, steps: int = 2) -> None:
    for _ in range(steps):
        for optimizer in bench.optimizers:
            optimizer.zero_grad()
        with ours.autocast():
            loss = bench.loss_fn(bench.model(bench.batch[0]), bench.batch[1])
        ours.scaler.scale(loss).backward()
        for optimizer in bench.optimizers:
            ours.scaler.step(optimizer)
        ours.scaler.update()


def measured(ours: AmpSession, bench: Bench, **settings: Any) -> StepProfile:
    """A real step with settings that are in force, and have been so: a layer's first checkpointed call holds somewhat more."""
    ours.request(**settings)
    ours.apply_pending()
    ours.profile_step(bench.batch, bench.loss_fn)
    return ours.profile_step(bench.batch, bench.loss_fn)


def layers_of(ours: AmpSession) -> list[str]:
    return [layer.name for layer in ours.layers if layer.why_not is None and not layer.structural]


def assert_same(predicted: PredictedStep, real: StepProfile) -> None:
    assert predicted.obtained == PREDICTED
    assert predicted.peak_bytes == real.peak_bytes
    assert predicted.profile.peak_bytes_by_kind == real.peak_bytes_by_kind
    assert predicted.profile.peak_by_layer == real.peak_by_layer
    assert predicted.profile.peak_where == real.peak_where


# ---- the numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("autocast", ["fp32", "bf16"])
def test_the_peak_is_that_of_a_real_step_to_the_byte(name: str, autocast: Any) -> None:
    """Required is 1 %."""
    bench = NETS[name]()
    print(f"random sets of layers: seed {SEED}")
    draw = random.Random(f"{SEED} {name}")
    with session(bench) as ours:
        layers = layers_of(ours)
        sets = [[], layers, *([each for each in layers if draw.random() < share] for share in (0.3, 0.6))]
        with fake_steps(ours, bench.batch, bench.loss_fn) as steps:
            predicted = [steps.step(autocast=autocast, checkpointed=each) for each in sets]
        for each, names in zip(predicted, sets, strict=True):
            assert_same(each, measured(ours, bench, autocast=autocast, checkpointed=names))


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_with_a_scaled_loss_too(name: str) -> None:
    bench = NETS[name]()
    with session(bench) as ours:
        predicted = predict_step(ours, bench.batch, bench.loss_fn, autocast="fp16", checkpointed=layers_of(ours))
        assert predicted.settings.scales_loss
        real = measured(ours, bench, autocast="fp16", checkpointed=layers_of(ours))
        assert abs(predicted.peak_bytes - real.peak_bytes) <= 8  # scale and growth tracker: two numbers of four bytes
        assert predicted.obtained == PREDICTED


@pytest.mark.parametrize("name", ["resnet", "two_inputs"])
def test_what_is_in_force_is_taken_where_nothing_else_is_said(name: str) -> None:
    """The live model has layers of exchanged classes, gradients, and optimizers with state."""
    bench = NETS[name]()
    with session(bench) as ours:
        train(ours, bench)
        layers = layers_of(ours)
        ours.request(autocast="bf16", checkpointed=layers[::2], fp32_layers=layers[:1])
        train(ours, bench)
        predicted = predict_step(ours, bench.batch, bench.loss_fn)
        assert predicted.settings == ours.settings
        assert_same(predicted, ours.profile_step(bench.batch, bench.loss_fn))
        plain = predict_step(ours, bench.batch, bench.loss_fn, checkpointed=[], fp32_layers=[])
        assert_same(plain, measured(ours, bench, checkpointed=[], fp32_layers=[]))
        assert plain.peak_bytes != predicted.peak_bytes


def test_layers_in_fp32() -> None:
    bench = NETS["gpt"]()
    with session(bench) as ours:
        names = ["blocks.0", "head"]
        predicted = predict_step(ours, bench.batch, bench.loss_fn, autocast="bf16", fp32_layers=names)
        assert_same(predicted, measured(ours, bench, autocast="bf16", fp32_layers=names))
        assert predicted.profile.layer("blocks.0").dtype == "float32"


def test_one_copy_predicts_many_steps_in_any_order() -> None:
    bench = NETS["gpt"]()
    with session(bench) as ours, fake_steps(ours, bench.batch, bench.loss_fn) as steps:
        settings: list[dict[str, Any]] = [
            {"checkpointed": ["blocks.*"]},
            {},
            {"checkpointed": ["blocks.1"], "autocast": "bf16"},
            {"batch_size": 9},
        ]
        first = [steps.step(**each).profile.peak_bytes_by_kind for each in settings]
        again = [steps.step(**each).profile.peak_bytes_by_kind for each in reversed(settings)]
        assert first == again[::-1]


def test_gradients_that_there_are_when_a_step_begins_are_seen() -> None:
    bench = mlp()
    with session(bench) as ours:
        train(ours, bench)
        with_gradients = predict_step(ours, bench.batch, bench.loss_fn).profile
        for optimizer in bench.optimizers:
            optimizer.zero_grad()
        without = predict_step(ours, bench.batch, bench.loss_fn).profile
        gradient = list(with_gradients.bytes_by_kind[0]).count(0), list(without.bytes_by_kind[0]).count(0)
        assert gradient[0] == gradient[1] - 1
        assert with_gradients.peak_bytes == without.peak_bytes


def test_the_record_is_that_of_a_step_that_was_followed() -> None:
    bench = NETS["gpt"]()
    with session(bench) as ours:
        predicted = predict_step(ours, bench.batch, bench.loss_fn)
    complete = predicted.complete
    assert complete is not None
    names = complete.record.facts.names
    assert {names[layer] for layer in complete.outputs} >= {"blocks.0", "blocks.1", "blocks.0.mlp", "head"}
    assert complete.record.profile(label="", step=-1, device="cpu", source="").peak_bytes == predicted.peak_bytes


def test_times_are_not_known_and_that_is_said() -> None:
    bench = mlp()
    with session(bench) as ours:
        predicted = predict_step(ours, bench.batch, bench.loss_fn)
    assert np.isnan(predicted.profile.time_s).all()
    assert all(math.isnan(layer.forward_s) and math.isnan(layer.cost_s) for layer in predicted.profile.layers)
    assert "predicted" in predicted.profile.source
    assert any("nothing was computed" in note for note in predicted.profile.notes)
    assert predicted.predicted


# ---- another batch size ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet", "two_inputs", "unet"])
@pytest.mark.parametrize("size", [2, 11])
def test_another_batch_size_is_as_with_a_batch_of_that_size(name: str, size: int) -> None:
    """Images stay in the memory format that they are in."""
    bench = NETS[name]()

    def rows(value: Any) -> Any:
        if isinstance(value, Tensor):
            taken = value[torch.arange(size) % len(value)]
            assert taken.shape[0] == size
            channels_last = value.ndim == 4 and not value.is_contiguous()
            return taken.to(memory_format=torch.channels_last) if channels_last else taken
        if isinstance(value, dict):
            return {key: rows(inner) for key, inner in value.items()}
        return tuple(map(rows, value))

    with session(bench) as ours:
        predicted = predict_step(ours, bench.batch, bench.loss_fn, batch_size=size)
        assert predicted.batch_size == size
        assert_same(predicted, ours.profile_step(rows(bench.batch), bench.loss_fn))


def test_tensors_without_the_batchs_first_dimension_stay_as_they_are() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, batch: dict[str, Any]) -> Tensor:
            assert batch["mask"].shape == (7, 4)
            assert batch["factor"].shape == ()
            assert batch["weights"].shape == (len(batch["x"]),)
            out: Tensor = self.linear(batch["x"]) * batch["mask"].sum(0) * batch["factor"]
            return out

    model = Masked()
    batch = {
        "x": torch.randn(3, 4),
        "mask": torch.ones(7, 4),
        "factor": torch.tensor(2.0),
        "weights": np.ones(3),
        "name": "x",
    }
    bench = Bench(model, [torch.optim.SGD(model.parameters(), lr=0.1)], (batch, torch.randn(3, 4)), F.mse_loss)
    with session(bench) as ours:
        assert predict_step(ours, bench.batch, bench.loss_fn, batch_size=50).obtained == PREDICTED
        assert batch["weights"].shape == (3,)  # type: ignore[attr-defined]


def test_a_batch_that_no_machine_could_hold_is_predicted() -> None:
    bench = resnet()
    with session(bench) as ours:
        predicted = predict_step(ours, bench.batch, bench.loss_fn, batch_size=10_000_000, checkpointed=["3"])
    assert predicted.obtained == PREDICTED
    assert predicted.peak_bytes > 1e11


# ---- no trace --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", ["resnet", "two_inputs"])
def test_nothing_of_the_users_changes(name: str, trained: bool, untouched: Untouched) -> None:
    bench = NETS[name]()
    with session(bench) as ours:
        if trained:
            train(ours, bench)
            ours.request(checkpointed=layers_of(ours)[:2])
            train(ours, bench)
        with untouched(ours), fake_steps(ours, bench.batch, bench.loss_fn) as steps:
            steps.step(autocast="bf16", checkpointed=layers_of(ours))
            steps.step(batch_size=3, checkpointed=[])


def test_training_goes_on_as_if_nothing_had_been_predicted() -> None:
    def weights(predicts: bool) -> list[Tensor]:
        torch.manual_seed(3)
        bench = resnet()
        with session(bench) as ours:
            for _ in range(2):
                train(ours, bench)
                if predicts:
                    predict_step(ours, bench.batch, bench.loss_fn, autocast="bf16", checkpointed=["3"])
            return [t.clone() for t in bench.model.state_dict().values()]

    assert all(torch.equal(one, two) for one, two in zip(weights(True), weights(False), strict=True))


def fake_tensors() -> list[Any]:
    """All that there are in this process."""
    return [each for each in gc.get_objects() if type(each).__name__ == "FakeTensor"]


def test_nothing_is_kept_alive() -> None:
    others = fake_tensors()  # of tests before this one, in whatever torch keeps of them; held, so that an id means one object
    bench = two_inputs()
    ours = AmpSession(bench.model, bench.optimizers)
    steps = fake_step.FakeSteps(ours, bench.batch, bench.loss_fn, verb="test")
    predicted = steps.step(checkpointed=layers_of(ours))
    training = steps._training
    assert training is not None
    copies = [weakref.ref(each) for each in (training.model, next(training.model.parameters()))]
    live = [weakref.ref(each) for each in (bench.model, *bench.model.parameters(), *bench.optimizers)]
    del training
    steps.close()
    gc.collect()
    assert [reference() for reference in copies] == [None, None]
    assert not [each for each in fake_tensors() if not any(each is other for other in others)]
    ours.close()
    del bench, ours
    gc.collect()
    assert not [reference for reference in live if reference() is not None]
    assert predicted.peak_bytes  # it has none of them
    with pytest.raises(RunError, match="were closed"):
        steps.step()


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's counter of the largest resident memory")
def test_no_memory_is_taken() -> None:
    """A model of 100 MB, which takes 400 MB to train with Adam, besides 150 MB of activations."""
    model = nn.Sequential(nn.Linear(64, 8000), nn.ReLU(), nn.Linear(8000, 3000), nn.ReLU(), nn.Linear(3000, 10))
    bench = Bench(model, [torch.optim.Adam(model.parameters())], (torch.randn(8, 64), torch.randint(10, (8,))), F.cross_entropy)
    small = mlp()
    with session(small) as ours:
        predict_step(ours, small.batch, small.loss_fn)  # what torch imports for it is not to count
    with session(bench) as ours:
        gc.collect()
        before = _resident_mb("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        predicted = predict_step(ours, bench.batch, bench.loss_fn, batch_size=5000, checkpointed=["2"])
        grown = _resident_mb("VmHWM") - before
    assert predicted.obtained == PREDICTED
    assert predicted.peak_bytes > 500e6
    assert grown < 25


def _resident_mb(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1000


# ---- what the user's code refers to ----------------------------------------------------------------------------------

GLOBAL_WEIGHTS = torch.rand(10)
GLOBAL_MODEL: nn.Module | None = None
SEEN: list[Tensor] = []


def penalty() -> Tensor:
    assert GLOBAL_MODEL is not None
    return torch.stack([p.square().sum() for p in GLOBAL_MODEL.parameters()]).sum()


def loss_of_globals(out: Tensor, targets: Tensor) -> Tensor:
    SEEN.append(out.detach())
    return F.cross_entropy(out, targets, weight=GLOBAL_WEIGHTS) + 1e-4 * penalty()


def test_a_loss_function_may_refer_to_the_model_and_tensors_by_global_names(
    monkeypatch: pytest.MonkeyPatch, untouched: Untouched
) -> None:
    bench = mlp()._replace(loss_fn=loss_of_globals)
    monkeypatch.setitem(globals(), "GLOBAL_MODEL", bench.model)
    with session(bench) as ours:
        with untouched(ours):
            predicted = predict_step(ours, bench.batch, bench.loss_fn, checkpointed=["2"])
        assert SEEN == []
        assert_same(predicted, measured(ours, bench, checkpointed=["2"]))
    SEEN.clear()


def test_and_in_closures(untouched: Untouched) -> None:
    bench = mlp()
    seen: list[Tensor] = []
    head = bench.model[3]
    weights = {"of": torch.rand(10)}

    def total(out: Tensor, targets: Tensor) -> Tensor:
        seen.append(out)
        return F.cross_entropy(out, targets, weight=weights["of"]) + head.weight.abs().sum()

    bench = bench._replace(loss_fn=lambda out, targets: total(out, targets))
    with session(bench) as ours:
        with untouched(ours):
            predicted = predict_step(ours, bench.batch, bench.loss_fn)
        assert not seen
        assert_same(predicted, ours.profile_step(bench.batch, bench.loss_fn))


def test_hooks_run_on_the_copy(untouched: Untouched) -> None:
    bench = mlp()
    kept: dict[str, Tensor] = {}

    def keep(module: nn.Module, args: Any, out: Tensor) -> None:
        kept["out"] = out.clone()

    bench.model[2].register_forward_hook(keep)
    with session(bench) as ours:
        with untouched(ours):
            predicted = predict_step(ours, bench.batch, bench.loss_fn)
        assert not kept
        real = ours.profile_step(bench.batch, bench.loss_fn)
        assert_same(predicted, real)
        assert kept


def test_a_learning_rate_scheduler_does_not_lead_to_the_users_optimizer(untouched: Untouched) -> None:
    bench = mlp()
    scheduler = torch.optim.lr_scheduler.StepLR(bench.optimizers[0], 1)
    with session(bench) as ours:
        with untouched(ours):
            predicted = predict_step(ours, bench.batch, bench.loss_fn)
        assert_same(predicted, ours.profile_step(bench.batch, bench.loss_fn))
    assert scheduler.last_epoch == 0


def test_numbers_that_count_are_known() -> None:
    """Adam asks for the number of its step, and a model may do so for its own."""

    class Counts(nn.Module):
        steps: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("steps", torch.tensor(3))

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            out: Tensor = self.linear(x)
            return torch.cat([out] * 2) if self.steps.item() > 3 else out

    model = Counts()
    bench = Bench(model, [torch.optim.Adam(model.parameters())], (torch.randn(3, 4), torch.ones(1)), lambda o, y: (o * y).sum())
    with session(bench) as ours:
        train(ours, bench, steps=3)
        assert model.steps == 6
        assert_same(predict_step(ours, bench.batch, bench.loss_fn), ours.profile_step(bench.batch, bench.loss_fn))
        assert model.steps == 6


class Odd(nn.Module):
    """Has tensors where nobody would look for them, and draws random numbers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.ones(8)
        self.tables = {"of": [torch.rand(8), nn.Parameter(torch.rand(8))]}
        self.view = torch.rand(4, 8)[1]
        self.generator = torch.Generator().manual_seed(1)
        self.last: Tensor | None = None
        self.calls = 0
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        kept = torch.rand(8, generator=self.generator) > 0.1
        out: Tensor = self.linear(x) * self.mask * kept * random.random() + self.tables["of"][0] * np.random.rand()
        out = out + self.tables["of"][1] + self.view + torch.randn_like(out)
        self.last = out  # with its graph
        return out


def test_tensors_in_odd_places_and_random_numbers(untouched: Untouched) -> None:
    model = Odd()
    bench = Bench(model, [torch.optim.Adam(model.parameters())], (torch.randn(4, 8), torch.randn(4, 8)), F.mse_loss)
    with session(bench) as ours:
        train(ours, bench)
        last, state = model.last, model.generator.get_state()
        with untouched(ours):
            predicted = predict_step(ours, bench.batch, bench.loss_fn)
        assert model.last is last
        assert model.calls == 2
        assert torch.equal(model.generator.get_state(), state)
        assert model.tables["of"][1].grad is not None  # of training, and not of the prediction
        assert type(model.tables["of"][1].grad) is Tensor
        real = ours.profile_step(bench.batch, bench.loss_fn)
    assert predicted.obtained == PREDICTED
    assert predicted.peak_bytes == pytest.approx(real.peak_bytes, rel=0.01)


# ---- what does not run on fake tensors -------------------------------------------------------------------------------


class Looks(nn.Module):
    """Looks at the numbers in a tensor, in one way or another."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if self.way == "item":
            return x * x.sum().item()
        if self.way == "flow":
            return x if x.mean() > 0 else -x
        if self.way == "shape":
            return x[x > -1e9].view(-1, 8)
        if self.way == "numpy":
            return x + float(np.mean(x.detach().float().numpy()))
        doubled: Tensor = Doubled.apply(x)
        return doubled


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return torch.ops.amp_widgets_test.doubled(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 2


@pytest.mark.parametrize(
    ("way", "because"),
    [
        ("item", "asks for a number in a tensor"),
        ("flow", "asks for a number in a tensor"),
        ("shape", "depends on the numbers in a tensor"),
        ("numpy", "on fake tensors it raises RuntimeError"),
        ("custom", "amp_widgets_test.doubled"),
    ],
)
def test_then_a_real_step_is_measured(way: str, because: str, untouched: Untouched, doubled: None) -> None:
    model = Looks(way)
    bench = Bench(model, [torch.optim.Adam(model.parameters())], (torch.randn(4, 8), torch.randn(4, 8)), F.mse_loss)
    with session(bench) as ours:
        with untouched(ours), fake_steps(ours, bench.batch, bench.loss_fn) as steps:
            predicted = steps.step(autocast="bf16", checkpointed=["inner"])
            again = steps.step()
            larger = steps.step(batch_size=6)
        assert predicted.obtained.startswith("measured: one real step, because ")
        assert because in predicted.obtained
        assert again.obtained == predicted.obtained
        assert not predicted.predicted
        assert predicted.complete is not None
        assert (
            predicted.profile.peak_bytes_by_kind
            == measured(ours, bench, autocast="bf16", checkpointed=["inner"]).peak_bytes_by_kind
        )
        assert again.profile.peak_bytes_by_kind == measured(ours, bench, autocast="fp32", checkpointed=[]).peak_bytes_by_kind
        rows = torch.arange(6) % 4
        wider = ours.profile_step((bench.batch[0][rows], bench.batch[1][rows]), bench.loss_fn)
        assert larger.profile.peak_bytes_by_kind == wider.peak_bytes_by_kind


@pytest.fixture
def doubled() -> Iterator[None]:
    """An operator as of somebody's own kernel."""
    library = torch.library.Library("amp_widgets_test", "FRAGMENT")
    library.define("doubled(Tensor x) -> Tensor")
    library.impl("doubled", lambda x: x * 2, "CPU")
    yield
    library._destroy()


def test_a_layer_whose_memory_only_its_library_knows_is_measured() -> None:
    bench = recurrent()
    with session(bench) as ours:
        predicted = predict_step(ours, bench.batch, bench.loss_fn)
        assert "mkldnn_rnn_layer" in predicted.obtained
        assert predicted.profile.peak_bytes_by_kind == ours.profile_step(bench.batch, bench.loss_fn).peak_bytes_by_kind


def test_compiled_and_scripted_models_are_measured_at_once() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(nn.Linear(8, 8))
    model = nn.Sequential(scripted, nn.Linear(8, 8))
    bench = Bench(model, [torch.optim.SGD(model.parameters(), lr=0.1)], (torch.randn(2, 8), torch.randn(2, 8)), F.mse_loss)
    with session(bench) as ours:
        assert "TorchScript module (Linear)" in predict_step(ours, bench.batch, bench.loss_fn).obtained
    compiled = nn.Sequential(nn.Linear(8, 8))
    compiled.compile(backend="eager")
    bench = bench._replace(model=compiled, optimizers=[torch.optim.SGD(compiled.parameters(), lr=0.1)])
    with session(bench) as ours:
        assert "compiled by torch.compile" in predict_step(ours, bench.batch, bench.loss_fn).obtained


def test_what_cannot_be_copied_or_would_be_seen_elsewhere_is_measured() -> None:
    bench = mlp()
    bench.model.lock = threading.Lock()  # type: ignore[assignment]
    with session(bench) as ours:
        assert "it cannot be copied: TypeError" in predict_step(ours, bench.batch, bench.loss_fn).obtained
    bench = mlp()
    seen: list[type] = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(type(out)))
    try:
        with session(bench) as ours:
            assert "global forward hook" in predict_step(ours, bench.batch, bench.loss_fn).obtained
    finally:
        handle.remove()
    assert set(seen) == {Tensor}


def test_an_optimizer_that_looks_at_numbers_is_measured(untouched: Untouched) -> None:
    model = nn.Linear(4, 4)
    bench = Bench(model, [torch.optim.LBFGS(model.parameters())], (torch.randn(4, 4), torch.randn(4, 4)), F.mse_loss)
    with session(bench) as ours:
        with untouched(ours):
            predicted = predict_step(ours, bench.batch, bench.loss_fn)
        assert predicted.obtained.startswith("measured")
        assert predicted.peak_bytes == ours.profile_step(bench.batch, bench.loss_fn).peak_bytes


def test_where_measuring_is_not_wanted_it_is_refused() -> None:
    model = Looks("item")
    bench = Bench(model, [torch.optim.Adam(model.parameters())], (torch.randn(4, 8), torch.randn(4, 8)), F.mse_loss)
    with session(bench) as ours, fake_steps(ours, bench.batch, bench.loss_fn, measures=False) as steps:
        with pytest.raises(RunError, match="cannot be predicted, because the step asks for a number"):
            steps.step()


def test_the_copies_can_be_prepared() -> None:
    bench = mlp()
    given: list[Any] = []
    with session(bench) as ours, fake_steps(ours, bench.batch, bench.loss_fn, prepare=lambda *both: given.extend(both)) as steps:
        steps.step()
        steps.step()
    model, optimizers = given
    assert type(model) is type(bench.model)
    assert model is not bench.model
    assert optimizers[0].param_groups[0]["params"] == list(model.parameters())


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_errors_of_the_users_are_those_of_a_real_step(untouched: Untouched) -> None:
    bench = resnet()
    with session(bench) as ours, untouched(ours), fake_steps(ours, bench.batch, bench.loss_fn) as steps:
        assert steps.step().predicted
    narrow = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    bench = Bench(narrow, [torch.optim.SGD(narrow.parameters(), lr=0.1)], (torch.randn(4, 4), torch.randn(4, 4)), F.mse_loss)
    with session(bench) as ours, untouched(ours), fake_steps(ours, bench.batch, bench.loss_fn) as steps:
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            steps.step(batch_size=1)
        assert steps.step(batch_size=2).obtained == PREDICTED  # that one failed says nothing of fake tensors
    bench = mlp()
    with session(bench) as ours, untouched(ours), pytest.raises(RunError, match="loss_fn: got a float, expected one number"):
        predict_step(ours, bench.batch, lambda out, targets: 1.0)  # type: ignore[arg-type, return-value]


def test_what_cannot_be_asked_for_is_refused() -> None:
    bench = mlp()
    with session(bench) as ours, fake_steps(ours, bench.batch, bench.loss_fn) as steps:
        for wrong in (0, -1, 2.0, True):
            with pytest.raises(SettingsError, match="batch_size: got"):
                steps.step(batch_size=wrong)  # type: ignore[arg-type]
        with pytest.raises(SettingsError, match="no layer matches"):
            steps.step(checkpointed=["nowhere"])
        with pytest.raises(SettingsError, match="autocast: got 'fp8'"):
            steps.step(autocast="fp8")  # type: ignore[arg-type]
        with pytest.raises(RunError, match="expected \\(inputs, targets\\)"):
            predict_step(ours, bench.batch[0], bench.loss_fn)  # type: ignore[arg-type]
        ours.begin_step()
        with pytest.raises(RunError, match="a step is in progress"):
            predict_step(ours, bench.batch, bench.loss_fn)
    with pytest.raises(SessionClosedError, match="predict_step: this session was closed"):
        predict_step(ours, bench.batch, bench.loss_fn)


def test_a_plan_is_a_set_of_layers() -> None:
    class Plan:
        layers = ("2",)

    bench = mlp()
    with session(bench) as ours:
        assert predict_step(ours, bench.batch, bench.loss_fn, checkpointed=Plan()).settings.checkpointed == ("2",)  # type: ignore[arg-type]
