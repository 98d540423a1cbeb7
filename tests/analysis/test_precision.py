"""What precision costs, layer by layer: against the same numbers computed by hand."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from amp_widgets.analysis.precision import LayerPrecision, PrecisionReport, precision_cost
from amp_widgets.analysis.relative_error import RelativeError, error_text
from amp_widgets.core.autocast import Support
from amp_widgets.errors import RunError, SettingsError
from amp_widgets.session import AmpSession

Untouched = Callable[[AmpSession], contextlib.AbstractContextManager[None]]
cross_entropy = nn.functional.cross_entropy
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def attach() -> Iterator[Callable[..., AmpSession]]:
    made: list[AmpSession] = []

    def session_of(model: nn.Module, **settings: Any) -> AmpSession:
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


def net() -> nn.Module:
    block = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Dropout(0.4))
    return nn.Sequential(nn.Linear(4, 6), block, nn.Linear(6, 3))


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    return float((value.double() - reference.double()).norm() / reference.double().norm())


# ---- the numbers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reference", ["fp32", "fp64"])
@pytest.mark.parametrize("name", HALVES)
def test_errors_are_those_of_the_same_net_by_hand(attach: Any, name: str, reference: str) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    inputs, targets = batch()[0], torch.randn(8, 3)

    def by_hand(dtype: torch.dtype, wide: torch.dtype, scale: float) -> list[torch.Tensor]:
        w1, b1, w2, b2 = copies = [p.detach().to(wide).requires_grad_() for p in model.parameters()]
        first = nn.functional.linear(inputs.to(dtype), w1.to(dtype), b1.to(dtype))
        second = nn.functional.linear(first, w2.to(dtype), b2.to(dtype))
        first.retain_grad()
        second.retain_grad()
        loss = (second.to(wide) * targets.to(wide)).sum()
        (loss * scale).backward()
        grads = [tensor.grad.double() / scale for tensor in (first, second, *copies)]  # type: ignore[union-attr]
        return [loss.detach(), first.detach(), second.detach(), *grads]

    wide = torch.float32 if reference == "fp32" else torch.float64
    scale = 64.0 if name == "fp16" else 1.0
    exact, rounded = by_hand(wide, wide, 1.0), by_hand(HALVES[name], torch.float32, scale)
    session = attach(model, init_scale=64.0)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e3)  # of another step: not to be added
    loss_fn = lambda output, target: (output.to(target.dtype) * target).sum()  # noqa: E731
    report = precision_cost(session, (inputs, targets), loss_fn, formats=(name,), reference=reference)

    first, second = report.layer("0", name), report.layer("1", name)
    approx = lambda value: pytest.approx(value, rel=1e-5)  # noqa: E731
    assert report.scales == {name: scale}
    assert report.loss_errors[name] == approx(relative(rounded[0], exact[0]))
    assert first.output_error == approx(relative(rounded[1], exact[1]))
    assert second.output_error == approx(relative(rounded[2], exact[2]))
    assert first.gradient_error == approx(relative(rounded[3], exact[3]))
    assert second.gradient_error == approx(relative(rounded[4], exact[4]))
    for layer, (weight, bias) in ((first, (5, 6)), (second, (7, 8))):
        both = [torch.cat([run[weight].flatten(), run[bias].flatten()]) for run in (rounded, exact)]
        assert layer.parameter_error == approx(relative(*both))
        assert layer.calls == 1
        assert layer.nonfinite == 0
    assert 0 < first.output_error < 0.01


def test_fp32_against_itself_is_exact_and_against_fp64_nearly(attach: Any, untouched: Untouched) -> None:
    session, made = attach(net()), batch()
    with untouched(session):
        same = precision_cost(session, made, cross_entropy, formats=("fp32",))
        near = precision_cost(session, made, cross_entropy, formats=("fp32",), reference="fp64")
    assert {layer.name for layer in same.layers} == {"(model)", "0", "1", "1.0", "1.1", "1.2", "1.3", "2"}
    assert {layer.worst_error for layer in same.layers} == {0.0}
    assert all(0 < layer.output_error < 1e-6 for layer in near.layers)
    assert {p.dtype for p in session.model.parameters()} == {torch.float32}


def test_one_layer_that_loses_everything_comes_first(attach: Any, untouched: Untouched) -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((6, 6), 1e-3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            big = torch.full((1, 6), 64.0)
            return (big @ (self.weight + 1.0) - big.sum()) * x[:, :6].mean()  # 1.001 is 1 in bf16

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.good, self.bad = nn.Linear(4, 6), Small()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            good = self.good(x)
            bad: torch.Tensor = self.bad(good.detach())
            return torch.cat([good.sum().reshape(1), bad.sum().reshape(1)])

    session = attach(Net())
    with untouched(session):
        report = precision_cost(session, batch(), lambda output, _: output.float().sum(), formats=("bf16",))
    assert report.layers[0].name == "bad"
    assert report.layers[0].output_error == pytest.approx(1.0, abs=0.05)
    assert report.layer("good", "bf16").output_error < 0.01
    assert [layer.worst_error for layer in report.layers] == sorted((x.worst_error for x in report.layers), reverse=True)


def test_all_calls_of_a_layer_count(attach: Any) -> None:
    class Thrice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = self.inner(x)
            return x

    model = Thrice()
    session, made = attach(model), (batch()[0], torch.randn(8, 4))
    report = precision_cost(session, made, lambda output, target: (output.float() * target).sum(), formats=("bf16",))
    outputs: dict[torch.dtype, list[torch.Tensor]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        x = made[0].to(dtype)
        weight, bias = (p.detach().to(dtype) for p in model.inner.parameters())
        outputs[dtype] = [x := nn.functional.linear(x, weight, bias) for _ in range(3)]
    whole = [torch.cat(outputs[dtype]) for dtype in (torch.bfloat16, torch.float32)]
    layer = report.layer("inner", "bf16")
    assert layer.calls == 3
    assert layer.output_error == pytest.approx(relative(*whole), rel=1e-6)


def test_dropout_has_the_same_mask_in_all_formats(attach: Any) -> None:
    report = precision_cost(attach(net()), batch(), cross_entropy, formats=("bf16",), reference="fp64")
    assert report.layer("1.3", "bf16").output_error < 0.05


def test_checkpointed_layers_stay_and_count_once(attach: Any, untouched: Untouched) -> None:
    session, made = attach(net()), batch()
    plain = precision_cost(session, made, cross_entropy)
    session.request(checkpointed=["1"])
    session.apply_pending()
    with untouched(session):
        ticked = precision_cost(session, made, cross_entropy)
    assert ticked == plain
    assert ticked.layer("1.0", "bf16").calls == 1


def test_a_layer_kept_in_fp32_is_exact_and_errors_begin_behind_it(attach: Any) -> None:
    session = attach(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 3)), fp32_layers=["0"])
    report = precision_cost(session, batch(), cross_entropy)
    assert report.fp32_layers == ("0",)
    for name in HALVES:
        errors = [report.layer(layer, name).output_error for layer in ("0", "1", "2")]
        assert errors[0] == 0
        assert min(errors[1:]) > 0
    assert report.sentences == tuple(repr(report).splitlines()[-2:])


def test_parameters_belong_to_the_layer_they_are_in(attach: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.ones(4))
            self.first = weight_norm(nn.Linear(4, 4))
            self.second = nn.Linear(4, 3)
            self.never = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.second(self.first(x + self.shift))
            return output

    report = precision_cost(attach(Net()), batch(), cross_entropy, formats=("bf16",))
    assert {layer.name for layer in report.layers} == {"(model)", "first", "second"}
    assert all(layer.parameter_error > 0 for layer in report.layers)


def test_a_layer_that_returns_its_own_parameter_keeps_no_hook(attach: Any, untouched: Untouched) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.randn(8, 3))

        def forward(self) -> torch.Tensor:
            return self.rows

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.table = nn.Linear(4, 3), Table()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.first(x) + self.table()
            return output

    session, made = attach(Net()), batch()
    with untouched(session):
        report = precision_cost(session, made, cross_entropy, formats=("bf16",))
    assert report.layer("table", "bf16").output_error == 0.0
    assert report.layer("table", "bf16").parameter_error > 0


def test_overflow_is_counted_apart_and_comes_first(attach: Any) -> None:
    session = attach(net(), init_scale=2.0**40)
    report = precision_cost(session, batch(), cross_entropy, formats=("bf16", "fp16"))
    assert report.layers[0].format == "fp16"
    assert report.layers[0].nonfinite > 0
    assert all(layer.nonfinite == 0 for layer in report.of("bf16"))
    assert math.isfinite(report.layer("0", "fp16").output_error)
    assert f"fp16: loss {error_text(report.loss_errors['fp16'])}; loss scaled by 2^40." in repr(report)
    (note,) = report.notes
    count = sum(layer.nonfinite for layer in report.of("fp16"))
    assert (
        note == f"fp16: at a loss scale of 2^40 {count} elements of gradients are inf or NaN, at 2^17 none: the scale is too "
        "large for these gradients."
    )
    session.request(init_scale=2.0**17)
    session.apply_pending()
    at_that = precision_cost(session, batch(), cross_entropy, formats="fp16")
    assert at_that.notes == ()
    assert all(layer.nonfinite == 0 for layer in at_that.layers)


def test_what_no_scale_cures_is_not_blamed_on_it(attach: Any) -> None:
    class Overflows(nn.Module):
        def __init__(self, backward: bool) -> None:
            super().__init__()
            self.backward = backward

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.backward:
                return x * 1e4 * 1e4 * 1e-8
            return torch.where(x > 1e9, 1.0, x) * 1e-30 * 1e30  # 0 times inf

    model = nn.Sequential(nn.Linear(4, 6), Overflows(False), nn.Linear(6, 3))
    (note,) = precision_cost(attach(model), batch(), cross_entropy, formats="fp16").notes
    assert note.endswith("inf or NaN, and so are outputs of layers in the forward pass, which no scale changes.")

    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.half = x.dtype == torch.float16
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient / 0 if ctx.half else gradient

    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return Breaks.apply(x)

    model = nn.Sequential(nn.Linear(4, 6), Broken(), nn.Linear(6, 3))
    (note,) = precision_cost(attach(model), batch(), cross_entropy, formats="fp16").notes
    assert note.endswith(": it is not the scale alone.")


class Complex(nn.Module):
    """A parameter that is complex, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.inner = Turned()
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(self.first(x)).abs())  # type: ignore[no-any-return]


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.complex64) @ self.weight


@pytest.mark.parametrize("format", ["fp16", "bf16"])
def test_complex_parameters_and_outputs(attach: Any, untouched: Untouched, format: Any) -> None:
    torch.manual_seed(0)
    session, made = attach(Complex(), init_scale=2.0**8), batch()
    with untouched(session):
        report = precision_cost(session, made, cross_entropy, formats=format)
    model, kept = session.model, {}
    handle = model.inner.register_forward_hook(lambda module, args, output: kept.update(output=output.detach()))
    values = []
    for dtype in (HALVES[format], None):
        model.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = cross_entropy(model(made[0]), made[1])
        loss.backward()
        session.abandon_step()
        values.append((kept["output"], model.inner.weight.grad.clone()))
    handle.remove()
    output, gradient = (float((one - two).norm() / two.norm()) for one, two in zip(*map(list, values), strict=True))
    row = report.layer("inner", format)
    assert row.output_error == pytest.approx(output)
    # in fp16 the loss was scaled here, which changes what is flushed to zero
    assert row.parameter_error == pytest.approx(gradient, rel=0.05 if format == "fp16" else 1e-6)
    assert row.gradient_error > 0
    assert report.notes == (
        "1 of 5 parameters, inner.weight the first, are complex64, which autocast leaves alone: with and without it, what they "
        "are used in is not cast.",
    )


def test_a_model_in_double_precision(attach: Any) -> None:
    session, (inputs, targets) = attach(net().double()), batch()
    report = precision_cost(session, (inputs.double(), targets), cross_entropy)
    assert {row.parameter_error for row in report.layers if row.name == "0"} == {0.0}
    assert report.sentences[-1].startswith("All parameters are fp64, which autocast leaves alone: ")


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_within_a_region_without_gradients(attach: Any, untouched: Untouched, around: Any) -> None:
    session, made = attach(net()), batch()
    expected = [precision_cost(session, made, cross_entropy, reference=reference) for reference in ("fp32", "fp64")]
    with around(), untouched(session):
        found = [precision_cost(session, made, cross_entropy, reference=reference) for reference in ("fp32", "fp64")]
    assert repr(found) == repr(expected)


def test_nothing_is_left_behind(attach: Any, untouched: Untouched) -> None:
    session, made = attach(net(), autocast="bf16", checkpointed=["1"]), batch()
    for _ in range(2):
        session.optimizers[0].zero_grad()
        with session.autocast():
            loss = cross_entropy(session.model(made[0]), made[1])
        session.scaler.scale(loss).backward()
        session.scaler.step(session.optimizers[0])
        session.scaler.update()
    with untouched(session):
        precision_cost(session, made, cross_entropy)
        precision_cost(session, made, cross_entropy, reference="fp64")


# ---- what cannot be run -----------------------------------------------------------------------------------------------------


def test_a_format_that_the_device_lacks_is_skipped(attach: Any) -> None:
    session = attach(net())
    session._support = {**session.support, "fp16": Support(available=False, note="no such units")}
    report = precision_cost(session, batch(), cross_entropy)
    assert report.skipped == {"fp16": "no such units"}
    assert report.of("fp16") == ()
    assert report.of("bf16")
    assert "fp16 was not run: no such units." in repr(report)


def test_a_model_that_fails_in_a_format_is_skipped_with_its_error(attach: Any, untouched: Untouched) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.inner(x)
            if y.dtype == torch.bfloat16:
                raise ValueError("no <b>bf16</b> here.\nreally")
            return y

    session = attach(Net())
    with untouched(session):
        report = precision_cost(session, batch(), cross_entropy)
    assert report.skipped == {"bf16": "ValueError: no <b>bf16</b> here"}
    assert report.of("fp16")
    assert "<b>bf16" not in report._repr_html_()


def test_a_model_that_cannot_be_copied_or_run_in_double_precision(attach: Any, untouched: Untouched) -> None:
    class Uncopied(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("I am <one>")

    class Narrow(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.float())

    uncopied = "cannot be copied to double precision, TypeError: I am <one>"
    for layer, words in ((Uncopied(4, 3), uncopied), (Narrow(4, 3), "does not run in double precision, RuntimeError")):
        session, made = attach(nn.Sequential(layer)), batch()
        with untouched(session), pytest.raises(RunError, match=f"{words}.*; use reference='fp32'"):
            precision_cost(session, made, cross_entropy, reference="fp64")
        assert precision_cost(session, made, cross_entropy, formats="bf16").of("bf16")


def test_what_is_asked_for_is_checked(attach: Any) -> None:
    session = attach(net())
    with pytest.raises(SettingsError, match="formats: got 'tf32'"):
        precision_cost(session, batch(), cross_entropy, formats=("tf32",))
    wrong: Any
    for wrong, got in ((None, "None"), (16, "16"), ([["fp16"]], r"\['fp16'\]"), ((None,), "None")):
        with pytest.raises(SettingsError, match=f"formats: got {got}, expected"):
            precision_cost(session, batch(), cross_entropy, formats=wrong)
    with pytest.raises(SettingsError, match="reference: got 'bf16'"):
        precision_cost(session, batch(), cross_entropy, reference="bf16")  # type: ignore[arg-type]
    session.begin_step()
    with pytest.raises(RunError, match="precision_cost: a step is in progress"):
        precision_cost(session, batch(), cross_entropy)
    session.abandon_step()
    session.model[1]._compiled_call_impl = lambda *args: None
    with pytest.raises(RunError, match="precision_cost: the model is compiled"):
        precision_cost(session, batch(), cross_entropy)
    del session.model[1]._compiled_call_impl
    with pytest.raises(RunError, match="no layer 'x' in 'bf16' here"):
        precision_cost(session, batch(), cross_entropy, formats=("bf16",)).layer("x", "bf16")


# ---- how it shows itself ----------------------------------------------------------------------------------------------------


def test_it_is_escaped_and_cut_short() -> None:
    evil = "<img src=x onerror=alert(1)>"
    row = LayerPrecision(
        name=evil, type=evil, format="bf16", calls=1, nonfinite=3,
        output_error=0.25, gradient_error=math.nan, parameter_error=math.inf,
    )  # fmt: skip
    report = PrecisionReport(
        reference="fp32", layers=(row,) * 40, loss_errors={"bf16": 0.0}, scales={"bf16": 1.0}, skipped={"fp16": evil}
    )
    shown = report._repr_html_()
    assert "<img" not in shown
    assert shown.count("&lt;img") == 61
    lines = repr(report).splitlines()
    assert lines[2].split()[-4:] == ["2.5e-01", "–", "inf", "3"]
    assert lines[-3:] == ["… and 10 more: report.layers", "bf16: loss 0.", f"fp16 was not run: {evil}."]
    assert row.worst_error == math.inf


def test_relative_errors() -> None:
    error = RelativeError()
    assert math.isnan(error.value)
    error.add(torch.tensor([3.0, math.nan, math.inf, 1.0]), torch.tensor([2.0, 1.0, 1.0, math.inf]))
    assert (error.value, error.nonfinite, error.reference_norm) == (0.5, 2, 2.0)
    error.add(torch.tensor([[1.0 + 1j]]), torch.tensor([[1.0 + 1j]]))
    assert error.value == pytest.approx(1 / math.sqrt(6))
    zeros = RelativeError()
    zeros.add(torch.zeros(2), torch.zeros(2))
    assert zeros.value == 0.0
    zeros.add(torch.ones(2), torch.zeros(2))
    assert zeros.value == math.inf
    scaled = RelativeError()
    scaled.add(torch.tensor([4.0 + 8j]), torch.tensor([1.0 + 1j]), scale=4.0)
    assert scaled.value == pytest.approx(math.sqrt(0.5))
    overflowed = RelativeError()  # all but a zero
    overflowed.add(torch.tensor([math.inf, 0.0]), torch.tensor([2.0, 0.0]))
    assert math.isnan(overflowed.value)
    assert overflowed.nonfinite == 1
    assert [error_text(value) for value in (0.0, 0.00123, math.nan, math.inf)] == ["0", "1.2e-03", "–", "inf"]
