"""``session.check``: what checkpointing must not change, what autocast does, and who is to blame."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from amp_widgets.analysis.parity import Difference, ParityReport, _same_bits, check
from amp_widgets.errors import RunError, SessionClosedError
from amp_widgets.session import AmpSession

Untouched = Callable[[AmpSession], contextlib.AbstractContextManager[None]]
cross_entropy = nn.functional.cross_entropy
WIDTH = 6


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)


@pytest.fixture
def attach() -> Iterator[Callable[..., AmpSession]]:
    made: list[AmpSession] = []

    def session_of(*layers: nn.Module, **settings: Any) -> AmpSession:
        model = nn.Sequential(nn.Linear(4, WIDTH), *layers, nn.Linear(WIDTH, 3))
        session = AmpSession(model, torch.optim.Adam(model.parameters(), lr=0.01))
        made.append(session)
        if settings:
            session.request(**settings)
            session.apply_pending()
        return session

    yield session_of
    for session in made:
        session.close()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    own = torch.Generator().manual_seed(1)
    return torch.randn(8, 4, generator=own), torch.randint(3, (8,), generator=own)


def train(session: AmpSession, steps: int) -> None:
    inputs, targets = batch()
    for _ in range(steps):
        session.optimizers[0].zero_grad()
        with session.autocast():
            loss = cross_entropy(session.model(inputs), targets)  # type: ignore[misc]
        session.scaler.scale(loss).backward()
        session.scaler.step(session.optimizers[0])
        session.scaler.update()


class Rolls(nn.Module):
    """Draws from a random generator that only it knows: another number in the recompute."""

    def __init__(self, dice: random.Random | None = None) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.dice = random.Random(0) if dice is None else dice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x) * self.dice.random())


class Borrows(nn.Module):
    """Uses a BatchNorm that is none of its children, so that a recompute updates its statistics once more."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.borrowed = [norm]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.borrowed[0](torch.sigmoid(self.inner(x)))
        return output


class Shape(nn.Module):
    """Computes something of another shape in the recompute: torch cannot use it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        again = torch._C._current_graph_task_id() != -1
        return torch.sigmoid(torch.cat([x, x] if again else [x])).sum() + torch.sigmoid(x)


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True), nn.Dropout(0.4))


# ---- nothing wrong ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", ["fp32", "bf16", "fp16"])
def test_checkpointing_batch_norm_and_dropout_is_bit_identical(attach: Any, untouched: Untouched, autocast: str) -> None:
    session = attach(block(), block(), autocast=autocast, checkpointed=["1", "2"])
    train(session, 2)
    made = batch()
    with untouched(session):
        report = check(session, made, cross_entropy)
    assert report.identical
    assert report.reproducible
    assert report.first is None
    assert report.blamed == ()
    assert report.loss == report.reference_loss
    assert report.compared == {"gradient": 12, "buffer": 6, "random state": 3}
    assert report.verdict == "Bit-identical to a run without checkpointing: the loss, 12 gradients, 6 buffers, 3 random states."
    assert made[0].grad is None
    train(session, 1)


def test_the_loss_is_that_of_the_step_that_comes_next(attach: Any) -> None:
    session = attach(block(), autocast="bf16", checkpointed=["1"])
    train(session, 1)
    made = batch()
    report = check(session, made, cross_entropy)
    with session.autocast():
        loss = cross_entropy(session.model(made[0]), made[1])
    assert report.loss == loss.item()
    session.abandon_step()


def test_without_anything_in_force_two_runs_are_compared(attach: Any, untouched: Untouched) -> None:
    session = attach(block())
    with untouched(session):  # before the first step: no gradients, no state of the optimizer
        report = check(session, batch(), cross_entropy)
    assert (report.identical, report.reproducible, report.autocast) == (True, True, None)
    assert report.verdict.startswith("No layer is checkpointed, and a second run gave the same, bit for bit: the loss, 8 grad")


def test_non_finite_values_are_equal_where_they_agree(attach: Any) -> None:
    session = attach(block(), checkpointed=["1"])
    inputs, targets = batch()
    inputs[0, 0], inputs[1, 1] = math.nan, math.inf
    report = check(session, (inputs, targets), cross_entropy)
    assert math.isnan(report.loss)
    assert report.identical


def test_nan_is_nan_but_minus_zero_is_not_zero() -> None:
    some = torch.tensor([1.0, math.nan, 0.0, math.inf])
    other = torch.tensor([1.0, -math.nan, -0.0, math.inf])
    assert some.view(torch.int32)[1] != other.view(torch.int32)[1]
    assert _same_bits(some, other).tolist() == [True, True, False, True]


def test_the_users_own_checkpoint_stays(attach: Any, untouched: Untouched) -> None:
    calls = []

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> Any:
            def part(x: torch.Tensor) -> torch.Tensor:
                calls.append(torch._C._current_graph_task_id() != -1)
                return torch.sigmoid(self.inner(x))

            return checkpoint(part, x, use_reentrant=False)

    session = attach(Own(), block(), checkpointed=["2"])
    with untouched(session):
        assert check(session, batch(), cross_entropy).identical
    assert calls == [False, True] * 2


# ---- planted faults ---------------------------------------------------------------------------------------------------------


def test_a_layer_that_draws_from_a_generator_of_its_own_is_named(attach: Any, untouched: Untouched) -> None:
    session = attach(block(), Rolls(), block(), checkpointed=["1", "2", "3"])
    dice = session.model[2].dice.getstate()
    with untouched(session):
        report = check(session, batch(), cross_entropy)
    assert session.model[2].dice.getstate() == dice
    assert not report.identical
    assert report.reproducible
    assert report.blamed == ("2",)
    # A backward pass comes from the end: what lies behind the layer is right, it and all before it is wrong.
    names = [name for name, _ in session.model.named_parameters()]
    wrong = {d.name for d in report.differences}
    assert report.first is not None
    assert report.first.name == "2.inner.bias"
    assert wrong == {name for name in names if name[0] in "012"}
    assert {d.kind for d in report.differences} == {"gradient"}
    assert "It comes from checkpointing '2'." in report.verdict


def test_how_large_a_difference_is(attach: Any) -> None:
    """The recompute of ``tanh(a·x)`` with ``b`` in place of ``a`` gives the gradient ``a·(1 − tanh²(b·x))``."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.tensor(0.5))
            self.dice = random.Random(1)

        def forward(self, y: torch.Tensor) -> torch.Tensor:
            return y.detach() * 0 + torch.tanh(self.x * self.dice.random())

    session = attach(Twice(), checkpointed=["1"])
    dice = random.Random(1)
    a, b = dice.random(), dice.random()
    targets = torch.ones(8, 3)
    report = check(session, (torch.randn(8, 4), targets), lambda output, target: (output * target).sum())
    off = next(d for d in report.differences if d.name == "1.x")
    factor = float(session.model[2].weight.detach().sum()) * 8
    expected = abs(factor * a * (math.tanh(0.5 * b) ** 2 - math.tanh(0.5 * a) ** 2))
    assert off.largest == pytest.approx(expected, rel=1e-4)
    assert off.relative == pytest.approx(expected / abs(factor * a * (1 - math.tanh(0.5 * a) ** 2)), rel=1e-4)
    assert off.text.count(" in place of ") == 1


def test_a_buffer_that_is_updated_twice_is_found(attach: Any, untouched: Untouched) -> None:
    norm = nn.BatchNorm1d(WIDTH)
    session = attach(norm, Borrows(norm), checkpointed=["2"])
    with untouched(session):
        report = check(session, batch(), cross_entropy)
    assert [(d.kind, d.name) for d in report.differences] == [
        ("buffer", "1.running_mean"), ("buffer", "1.running_var"), ("buffer", "1.num_batches_tracked"),
    ]  # fmt: skip
    counted = report.differences[2]
    assert counted.largest == 1.0
    assert counted.text == "3 in place of 2"
    assert report.blamed == ("2",)


def test_a_layer_that_cannot_be_recomputed_at_all(attach: Any, untouched: Untouched) -> None:
    session = attach(Shape(), block(), checkpointed=["1", "2"])
    with untouched(session):
        report = check(session, batch(), cross_entropy)
    assert report.first is not None
    assert report.first.kind == "error"
    assert "CheckpointError" in report.first.text
    assert report.blamed == ("1",)
    assert math.isnan(report.loss)
    assert not math.isnan(report.reference_loss)


def test_a_model_that_does_not_give_the_same_twice_is_not_blamed_on_checkpointing(attach: Any) -> None:
    dice = random.Random(0)

    class Hidden(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * dice.random()

    for names in (["1"], []):
        report = check(attach(Hidden(), block(), checkpointed=names), batch(), cross_entropy)
        assert not report.reproducible
        assert report.noise
        assert report.blamed == ()
        assert report.verdict.startswith("It cannot be told: this model does not give the same twice, also without checkpoint")


def test_random_states_are_compared(attach: Any) -> None:
    """A recompute's own draws are undone; a hook in the backward pass is not."""

    class Hooked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.sigmoid(x)
            if type(self) is not Hooked:  # checkpointed
                y.register_hook(lambda gradient: torch.manual_seed(7) and None)
            return y

    report = check(attach(block(), Hooked(), checkpointed=["1", "2"]), batch(), cross_entropy)
    assert [(d.kind, d.name) for d in report.differences] == [("random", "torch")]
    assert report.blamed == ("2",)


# ---- autocast ---------------------------------------------------------------------------------------------------------------


def test_the_error_of_autocast_is_that_of_rounding_by_hand(attach: Any) -> None:
    session = attach(autocast="bf16")
    for parameter in session.model.parameters():
        parameter.grad = torch.full_like(parameter, 1e3)  # of another step: not to be added
    inputs, targets = torch.randn(8, 4), torch.randn(8, 3)
    report = check(session, (inputs, targets), lambda output, target: (output.float() * target).sum())
    model = session.model
    exact, rounded = (_by_hand(model, inputs, targets, dtype) for dtype in (torch.float32, torch.bfloat16))
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in exact[1]))
    off = math.sqrt(sum(float((a - b).double().square().sum()) for a, b in zip(rounded[1], exact[1], strict=True)))
    assert report.autocast is not None
    assert report.autocast.gradients == pytest.approx(off / norm, rel=1e-6)
    assert report.autocast.loss == pytest.approx(abs(rounded[0] - exact[0]) / abs(exact[0]), rel=1e-6)
    assert report.autocast.worst[0][1] >= report.autocast.worst[-1][1] > 0
    assert report.identical


def _by_hand(
    model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, dtype: torch.dtype
) -> tuple[float, list[torch.Tensor]]:
    copies = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    w1, b1, w2, b2 = (p.to(dtype) for p in copies)
    output = nn.functional.linear(nn.functional.linear(inputs.to(dtype), w1, b1), w2, b2)
    loss = (output.float() * targets).sum()
    loss.backward()
    return loss.item(), [p.grad for p in copies if p.grad is not None]


def test_dropout_has_the_same_mask_in_both_formats(attach: Any) -> None:
    report = check(attach(nn.Dropout(0.5), autocast="bf16"), batch(), cross_entropy)
    assert report.autocast is not None
    assert report.autocast.gradients < 0.05


def test_overflow_at_the_scale_in_force_is_counted(attach: Any) -> None:
    session = attach(autocast="fp16", init_scale=2.0**30)
    report = check(session, batch(), cross_entropy)
    assert report.autocast is not None
    assert report.autocast.scale == 2.0**30
    assert report.autocast.nonfinite > 0
    assert "this step would be skipped" in repr(report)
    session.request(init_scale=2.0**3)
    session.apply_pending()
    calm = check(session, batch(), cross_entropy)
    assert calm.autocast is not None
    assert calm.autocast.nonfinite == 0
    assert calm.autocast.gradients < 0.01


def test_within_the_users_own_region_neither_sees_the_others_casts(attach: Any, untouched: Untouched) -> None:
    session = attach(block(), autocast="bf16", checkpointed=["1"])
    made = batch()
    outside = check(session, made, cross_entropy)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            session.model.eval()
            session.model(made[0])  # weights cast without gradients, in torch's cache
            session.model.train()
        with untouched(session):
            inside = check(session, made, cross_entropy)
        session.optimizers[0].zero_grad()
        loss = cross_entropy(session.model(made[0]), made[1])
        session.abandon_step()
    loss.backward()
    session.abandon_step()
    assert all(p.grad is not None for p in session.model.parameters())
    assert (inside.loss, inside.identical, inside.autocast) == (outside.loss, True, outside.autocast)
    with torch.inference_mode():
        assert check(session, batch(), cross_entropy).identical


# ---- what cannot be checked -------------------------------------------------------------------------------------------------


def test_what_cannot_be_checked_is_said(attach: Any) -> None:
    session = attach(block())
    session.begin_step()
    with pytest.raises(RunError, match="a step is in progress"):
        check(session, batch(), cross_entropy)
    session.abandon_step()
    for wrong, got in (((1, 2, 3), "3 items"), (torch.ones(2), "a Tensor")):
        with pytest.raises(RunError, match=f"got {got} as the batch"):
            check(session, wrong, cross_entropy)  # type: ignore[arg-type]
    with pytest.raises(RunError, match=r"loss_fn: got a tensor of shape \(8, 3\), expected one number"):
        check(session, batch(), lambda output, target: output)
    with pytest.raises(RunError, match=r"of shape \(\) without a graph"):
        check(session, batch(), lambda output, target: torch.tensor(1.0))
    with pytest.raises(ZeroDivisionError):
        check(session, batch(), lambda output, target: 1 / 0)  # type: ignore[arg-type,return-value]
    session.fit([batch()] * 3, cross_entropy, start=False)
    assert check(session, batch(), cross_entropy).identical  # ready, not running
    handle = next(session.model.parameters()).register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(RunError, match="may step an optimizer"):
        check(session, batch(), cross_entropy)
    handle.remove()
    session.close()
    with pytest.raises(SessionClosedError, match="this session was closed, and no longer controls the model"):
        check(session, batch(), cross_entropy)


def test_a_running_run_is_not_disturbed(attach: Any) -> None:
    session = attach(block())
    seen: list[str] = []

    def batches() -> Iterator[Any]:
        yield batch()
        try:
            check(session, batch(), cross_entropy)
        except RunError as error:
            seen.append(str(error))
        yield batch()

    session.fit(batches(), cross_entropy)
    session.wait(30)
    assert seen == ["check: a background run is training; pause it first: session.pause()"]


def test_compiled_models_are_refused(attach: Any) -> None:
    session = attach(block())
    session.model[1]._compiled_call_impl = lambda *args: None  # what module.compile() leaves
    with pytest.raises(RunError, match=r"check: the model is compiled by torch\.compile"):
        check(session, batch(), cross_entropy)
    del session.model[1]._compiled_call_impl
    loss_fn = nn.CrossEntropyLoss()
    loss_fn._compiled_call_impl = lambda *args: None
    with pytest.raises(RunError, match=r"check: loss_fn is compiled"):
        check(session, batch(), loss_fn)


def test_a_loss_with_state_is_put_back_too(attach: Any, untouched: Untouched) -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return cross_entropy(output * self.weight, target)

    session, loss_fn = attach(block(), checkpointed=["1"]), Loss()
    with untouched(session):
        assert check(session, batch(), loss_fn).identical
    assert float(loss_fn.calls) == 0
    assert loss_fn.weight.grad is None


# ---- how it shows itself ----------------------------------------------------------------------------------------------------


def test_it_is_escaped_and_frozen(attach: Any) -> None:
    evil = "<img src=x onerror=alert(1)>"
    made = check(attach(block(), autocast="bf16", checkpointed=["1"]), batch(), cross_entropy)
    off = Difference(kind="gradient", name=evil, largest=0.5, relative=0.25, text=evil)
    report = ParityReport(
        settings=made.settings, reproducible=True, differences=(off,) * 12, noise=(), blamed=(evil,), autocast=made.autocast,
        loss=1.0, reference_loss=1.0, compared=made.compared,
    )  # fmt: skip
    shown = report._repr_html_()
    assert "<img" not in shown
    assert shown.count("&lt;img") == 22
    assert "… and 2 more: report.differences" in repr(report)
    assert report.verdict == (
        f"Checkpointing changes 12 gradients; first the gradient of {evil}, off by 5.0e-01. It comes from checkpointing {evil!r}."
    )
    assert "bf16 against fp32, relative error: loss" in repr(made)
    with pytest.raises(AttributeError):
        made.loss = 1.0  # type: ignore[misc]


# ---- formats, scales and regions --------------------------------------------------------------------------------------------


class Turned(nn.Module):
    """Its parameter is complex."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


@pytest.mark.parametrize("autocast", ["bf16", "fp16"])
def test_complex_parameters(attach: Any, untouched: Untouched, autocast: str) -> None:
    session = attach(Turned(), autocast=autocast, init_scale=2.0**4, checkpointed=["1"])
    with untouched(session):
        report = check(session, batch(), cross_entropy)
    assert report.identical
    assert report.autocast is not None
    assert 0 < report.autocast.gradients < 0.1
    assert "1.weight" in dict(report.autocast.worst)
    assert "1 of 5 parameters, 1.weight the first, are complex64, which autocast leaves alone" in repr(report)
    assert "complex64" in report._repr_html_()


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("autocast", ["fp32", "bf16", "fp16"])
def test_within_a_region_without_gradients(attach: Any, untouched: Untouched, around: Any, autocast: str) -> None:
    session = attach(block(), autocast=autocast, checkpointed=["1"])
    expected = check(session, batch(), cross_entropy)
    with around(), untouched(session):
        report = check(session, batch(), cross_entropy)
    assert report == expected
    assert report.identical


def test_when_all_has_overflowed_nothing_is_said_of_the_error(attach: Any) -> None:
    torch.manual_seed(0)
    session = attach(nn.ReLU(), autocast="fp16", init_scale=2.0**60)
    report = check(session, batch(), cross_entropy)
    assert report.autocast is not None
    assert math.isnan(report.autocast.gradients)
    shown = repr(report)
    assert "no gradient to compare." in shown
    assert f"{report.autocast.nonfinite} gradient elements are inf or NaN with the loss scaled by 2^60: this step" in shown
