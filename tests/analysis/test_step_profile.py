"""``session.profile_step`` and ``profile_next_step``: the numbers of a step, and no trace of it."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from amp_widgets.analysis.trial import check_one_model
from amp_widgets.core.memory.profile import memory_text
from amp_widgets.core.models import Together
from amp_widgets.errors import AmpWidgetsError, LayerError, RunError
from amp_widgets.session import AmpSession


class Bench:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(32, 64),
            nn.Sequential(nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 64), nn.ReLU()),
            nn.Linear(64, 4),
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.session = AmpSession(self.model, self.optimizer)
        self.batch = torch.randn(128, 32), torch.randint(4, (128,))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            with self.session.autocast():
                loss = nn.functional.cross_entropy(self.model(self.batch[0]), self.batch[1])
            self.session.scaler.scale(loss).backward()
            self.session.scaler.step(self.optimizer)
            self.session.scaler.update()

    def weights(self) -> list[torch.Tensor]:
        return [t.detach().clone() for t in self.model.state_dict().values()]


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.session.close()


def test_a_profiled_step_is_as_if_it_had_not_happened(bench: Bench) -> None:
    other = Bench()
    for each in (bench, other):
        torch.manual_seed(1)
        each.train(2)
        if each is bench:
            before = copy.deepcopy(each.optimizer.state_dict())
            each.session.profile_step(each.batch, nn.functional.cross_entropy)
            assert str(each.optimizer.state_dict()) == str(before)
        each.train(2)
    for one, two in zip(bench.weights(), other.weights(), strict=True):
        assert torch.equal(one, two)
    assert len(bench.session.history) == 4
    other.session.close()


def test_before_the_first_step_too(bench: Bench) -> None:
    before = bench.weights()
    profile = bench.session.profile_step(bench.batch, nn.functional.cross_entropy)
    assert all(torch.equal(one, two) for one, two in zip(before, bench.weights(), strict=True))
    assert not bench.optimizer.state
    assert all(p.grad is None for p in bench.model.parameters())
    assert profile.peak_bytes_by_kind["optimizer"] > 0  # as in every later step
    assert len(bench.session.history) == 0


def test_what_checkpointing_does_is_seen(bench: Bench) -> None:
    plain = bench.session.profile_step(bench.batch, nn.functional.cross_entropy)
    bench.session.request(checkpointed=["1"])
    bench.session.apply_pending()
    ticked = bench.session.profile_step(bench.batch, nn.functional.cross_entropy)
    assert (plain.label, ticked.label) == ("fp32", "fp32 + 1 layer checkpointed")
    assert ticked.layer("1").activation_bytes < plain.layer("1").activation_bytes
    assert "recompute" in [phase.name for phase in ticked.phases]
    assert "recompute" not in [phase.name for phase in plain.phases]
    assert plain.peak_bytes_by_kind["recompute"] == 0 < ticked.peak_bytes_by_kind["recompute"]
    assert plain.difference_text(ticked).startswith("fp32 → fp32 + 1 layer checkpointed: peak ")


def test_a_step_of_the_run(bench: Bench) -> None:
    bench.train(2)
    bench.session.profile_next_step()
    bench.train(2)
    (profile,) = bench.session.profiles
    assert profile.step == 2
    peaks = bench.session.history.columns("peak_bytes")["peak_bytes"]
    assert profile.peak_bytes == peaks[2]
    assert bench.session.why_not_profiled is None


def test_what_cannot_be_profiled_is_said(bench: Bench) -> None:
    bench.session.begin_step()
    with pytest.raises(RunError, match="a step is in progress"):
        bench.session.profile_step(bench.batch, nn.functional.cross_entropy)
    alone = AmpSession(nn.Linear(2, 2))
    with pytest.raises(RunError, match="no optimizer"):
        alone.profile_step((torch.ones(1, 2), torch.ones(1, 2)), nn.functional.mse_loss)
    alone.close()


def test_an_error_in_the_loss_leaves_everything_as_it_was(bench: Bench) -> None:
    before = bench.weights()

    def fails(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        bench.session.profile_step(bench.batch, fails)
    assert all(torch.equal(one, two) for one, two in zip(before, bench.weights(), strict=True))
    bench.train(1)
    assert len(bench.session.history) == 1


def test_the_peak_is_that_of_a_step_of_the_run(bench: Bench) -> None:
    """Also when gradients are there from a step before, which a step lets go of first."""
    bench.train(2)
    bench.session.profile_next_step()
    bench.train(2)
    own = bench.session.profile_step(bench.batch, nn.functional.cross_entropy)
    gradient = bench.model[0].weight.grad
    assert gradient is not None
    assert own.peak_bytes_by_kind == bench.session.profiles[0].peak_bytes_by_kind
    assert bench.model[0].weight.grad is gradient


def test_the_batch_is_not_touched() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
            x["plain"].add_(1)
            return self.linear(x["plain"] + x["leaf"])  # type: ignore[no-any-return]

    model = InPlace()
    with AmpSession(model, torch.optim.Adam(model.parameters())) as session:
        inputs = {"plain": torch.zeros(4, 3), "leaf": torch.ones(4, 3, requires_grad=True)}
        session.profile_step((inputs, torch.zeros(4, 2)), nn.functional.mse_loss)
    assert inputs["plain"].sum() == 0
    assert inputs["leaf"].grad is None


def test_of_a_large_tensor_only_the_batch_counts() -> None:
    model = nn.Linear(10, 2)
    rows = torch.randn(10_000, 10)
    with AmpSession(model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
        profile = session.profile_step((rows[:4], torch.zeros(4, 2)), nn.functional.mse_loss)
    assert profile.peak_by_layer[""]["other"] == 4 * (4 * 10 + 4 * 2)


def test_a_bare_layer_is_a_model() -> None:
    model = nn.Linear(8, 8)
    batch = torch.randn(4, 8), torch.zeros(4, 8)
    with AmpSession(model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
        profile = session.profile_step(batch, nn.functional.mse_loss)
        (layer,) = session.layer_profile(batch, nn.functional.mse_loss)
        assert (layer.name, layer.type, layer.parameter_bytes, layer.activation_bytes) == ("(model)", "Linear", 288, 128)
        assert session.layer_profile(batch, nn.functional.mse_loss, layers="(model)")[0].name == "(model)"
        with pytest.raises(LayerError, match="expected a model with layers"):
            session.layer_profile(batch, nn.functional.mse_loss, layers="*")
        assert profile.to_figure().data
        assert "(model)" in repr(session.layer_profile(batch, nn.functional.mse_loss))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_where_gradients_are_off(bench: Bench, mode: Any) -> None:
    expected = bench.session.profile_step(bench.batch, nn.functional.cross_entropy)
    before = bench.weights()
    with mode():
        made = bench.session.profile_step((bench.batch[0] + 0, bench.batch[1]), nn.functional.cross_entropy)
        assert torch.is_grad_enabled() is False
    assert made.peak_bytes == expected.peak_bytes
    assert all(torch.equal(one, two) for one, two in zip(before, bench.weights(), strict=True))
    bench.train(1)


def test_within_a_region_of_the_users_the_settings_count(bench: Bench) -> None:
    expected = bench.session.profile_step(bench.batch, nn.functional.cross_entropy)
    with torch.autocast("cpu", torch.bfloat16):
        made = bench.session.profile_step(bench.batch, nn.functional.cross_entropy)
    assert made.peak_bytes == expected.peak_bytes
    assert made.layer("0").dtype == "float32"


def test_an_optimizer_that_needs_a_closure(bench: Bench) -> None:
    optimizer = torch.optim.LBFGS(bench.model.parameters(), max_iter=2)
    before = bench.weights()
    with AmpSession(bench.model, optimizer) as session:
        profile = session.profile_step(bench.batch, nn.functional.cross_entropy)
        assert {"forward", "backward", "optimizer"} <= {phase.name for phase in profile.phases}
        assert profile.layer("(model)").calls >= 2
        assert not optimizer.state
        assert all(torch.equal(one, two) for one, two in zip(before, bench.weights(), strict=True))
        session.request(autocast="fp16")
        session.apply_pending()
        with pytest.raises(RunError, match=r"LBFGS needs a closure.*scaling=False"):
            session.profile_step(bench.batch, nn.functional.cross_entropy)
        session.request(scaling=False)
        session.apply_pending()
        session.profile_step(bench.batch, nn.functional.cross_entropy)


def test_the_budget_is_not_enforced_but_named(bench: Bench) -> None:
    bench.session.memory_budget = 10_000_000
    assert bench.session.profile_step(bench.batch, nn.functional.cross_entropy).notes == ()
    bench.session.memory_budget = 20_000
    profile = bench.session.profile_step(bench.batch, nn.functional.cross_entropy)
    (note,) = profile.notes
    assert note.startswith(f"the peak of {memory_text(profile.peak_bytes)} is above the session's memory_budget of 20.0 kB")
    assert bench.session.memory_budget == 20_000
    assert bench.session.out_of_memory is None


def _raise(*_: object) -> torch.Tensor:
    raise AssertionError("was called")


@pytest.mark.parametrize("name", ["profile_step", "layer_profile", "check", "precision_cost", "preflight"])
def test_what_is_no_batch_and_no_loss(bench: Bench, name: str) -> None:
    """Told the same way by everything that tries a step, and nothing has changed."""
    call = getattr(bench.session, name)
    inputs, targets = bench.batch
    before = bench.weights()

    def told(words: str, *given: object) -> None:
        with pytest.raises(RunError, match=words) as caught:
            call(*given)
        assert "expected" in str(caught.value)

    told("got a Tensor as the batch", inputs, _raise)
    told("got 3 items as the batch", (inputs, targets, 1), _raise)
    told("got a dict as the batch", {"x": inputs, "y": targets}, _raise)
    told("got an int as the batch", 3, _raise)
    told("got a str as loss_fn", bench.batch, "mse")
    told("got the class MSELoss as loss_fn, expected an object", bench.batch, nn.MSELoss)
    told("loss_fn: got a float", bench.batch, lambda output, targets: 1.0)
    told("loss_fn: got None", bench.batch, lambda output, targets: None)
    told(r"loss_fn: got a tensor of shape \(128, 4\)", bench.batch, lambda output, targets: output)
    told("loss_fn: got a complex tensor", bench.batch, lambda output, targets: output.sum() * 1j)
    if name != "preflight":
        told("got None as loss_fn|got no loss_fn", bench.batch, None)
        told("got None as the batch|got no batch", None, _raise)
        told("without a graph", bench.batch, lambda output, targets: output.detach().sum())
    assert all(torch.equal(one, two) for one, two in zip(before, bench.weights(), strict=True))
    call([inputs, targets], nn.functional.cross_entropy)


@pytest.mark.parametrize("name", ["profile_step", "check", "precision_cost", "preflight"])
def test_everything_that_tries_a_step_takes_the_same_back(name: str) -> None:
    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.average = torch.zeros(8)
            self.generator = torch.Generator().manual_seed(1)
            self.counts = {"calls": 0}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.counts["calls"] += 1
            self.average.mul_(0.9).add_(1)
            self.last = x
            x.add_(torch.rand(1, generator=self.generator))
            return self.linear(x)  # type: ignore[no-any-return]

    model = nn.Sequential(Remembering())
    inside = model[0]
    x = torch.zeros(4, 8)
    state = inside.generator.get_state()
    counts = inside.counts
    with AmpSession(model, torch.optim.Adam(model.parameters())) as session:
        getattr(session, name)((x, torch.zeros(4, 8)), nn.functional.mse_loss)
    assert torch.equal(inside.generator.get_state(), state)
    assert inside.counts is counts
    assert (counts, inside.average.sum(), x.sum(), hasattr(inside, "last")) == ({"calls": 0}, 0, 0, False)


def test_what_else_cannot_be_profiled(bench: Bench) -> None:
    with pytest.raises(RunError, match="got an int as the label"):
        bench.session.profile_step(bench.batch, nn.functional.cross_entropy, label=3)  # type: ignore[arg-type]
    handle = bench.model[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(RunError, match="profile_step: parameters have hooks that run when their gradient is there"):
        bench.session.profile_step(bench.batch, nn.functional.cross_entropy)
    handle.remove()
    with pytest.raises(LayerError, match="layer_profile: got 3 as layers"):
        bench.session.layer_profile(bench.batch, nn.functional.cross_entropy, layers=3)  # type: ignore[arg-type]
    profile = bench.session.profile_step(bench.batch, nn.functional.cross_entropy)
    for call in (lambda: profile.to_figure(3), lambda: profile.difference_text(None)):  # type: ignore[arg-type]
        with pytest.raises(AmpWidgetsError, match="expected a StepProfile"):
            call()
    with pytest.raises(AmpWidgetsError, match="got 'blue' as the theme"):
        profile.to_figure(theme="blue")  # type: ignore[arg-type]


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda value: pickle.loads(pickle.dumps(value))])
def test_what_is_given_can_be_copied_and_pickled(bench: Bench, copied: Callable[[Any], Any]) -> None:
    session, loss_fn = bench.session, nn.functional.cross_entropy
    session.request(autocast="bf16", checkpointed=["1"])
    session.apply_pending()
    one = session.profile_step(bench.batch, loss_fn)
    two = copied(one)
    assert (type(two), repr(two), two.layers, two.phases) == (type(one), repr(one), one.layers, one.phases)
    assert two.peak_by_layer == one.peak_by_layer
    for field in dataclasses.fields(one):
        value = getattr(two, field.name)
        if isinstance(value, np.ndarray):
            assert not value.flags.writeable
            assert np.array_equal(value, getattr(one, field.name))
    with pytest.raises(TypeError):
        two.peak_by_layer[""]["other"] = 0
    assert two.to_figure(one).data
    for other in (
        session.layer_profile(bench.batch, loss_fn),
        session.check(bench.batch, loss_fn),
        session.precision_cost(bench.batch, loss_fn),
        session.preflight(bench.batch, loss_fn),
    ):
        again = copied(other)
        assert (type(again), repr(again)) == (type(other), repr(other))


@pytest.mark.parametrize("name", ["profile_step", "check", "precision_cost", "preflight"])
def test_a_model_whose_shapes_are_not_known_yet(name: str) -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
    with AmpSession(model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
        with pytest.raises(RunError, match=f"{name}: the model has parameters without a shape yet.*run it once first"):
            getattr(session, name)((torch.ones(2, 4), torch.zeros(2, 2)), nn.functional.mse_loss)


def test_of_several_models_none_takes_the_batch() -> None:
    several = Together({"one": nn.Linear(2, 2), "other": nn.Linear(2, 2)})
    with pytest.raises(RunError, match="profile_step: this session controls several models"):
        check_one_model(several, "profile_step")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norms[0](x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norms[1](x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("optimizer", "autocast", "checkpointed"),
    [
        ("AdamW", "bf16", ("1", "2")),  # with a region around the whole step, the casts of a recompute would stay to its end
        ("SGD", "bf16", ("1", "2")),
        ("AdamW", "fp16", ("1",)),  # the tensors of the scaler are there all along
        ("SGD", "fp16", ("1",)),
        ("SGD", "fp16", ()),
        ("AdamW", "fp32", ()),
    ],
)
def test_its_peak_is_that_of_the_next_step_of_the_run(optimizer: str, autocast: str, checkpointed: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 16), Block(16), Block(16), nn.Linear(16, 20), nn.Flatten(0, 1))
    steps: Any = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01)
    batch = torch.randint(20, (4, 8)), torch.randint(20, (32,))
    with AmpSession(model, steps) as session:
        session.request(autocast=autocast, checkpointed=checkpointed)

        def train() -> float:
            steps.zero_grad()
            with session.autocast():
                loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
            session.scaler.scale(loss).backward()
            session.scaler.step(steps)
            session.scaler.update()
            return float(session.history.last("peak_bytes"))

        train()
        train()
        profile = session.profile_step(batch, nn.functional.cross_entropy)
        assert profile.peak_bytes == train()
