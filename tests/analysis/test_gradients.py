from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from amp_widgets.analysis.gradients import EXPONENTS, ZONES, GradientRange, overflow_text, percent
from amp_widgets.core.gradient_counts import BUCKETS, CountedGradients, GradientCounts
from amp_widgets.core.gradient_probe import SAMPLE_ELEMENTS, GradientProbe, bucket_of
from amp_widgets.errors import FormatError, LayerError
from amp_widgets.session import AmpSession

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def range_of(values: dict[str, Tensor], scale: float = 1.0, dtype: str = "fp32", family: Any = "output") -> GradientRange:
    rows = tuple(counted(layer, tensor, dtype=dtype, family=family) for layer, tensor in values.items())
    return GradientRange.of(GradientCounts(step=5, scale=scale, rows=rows))


def counted(layer: str, values: Tensor, *, looked_at: slice = slice(None), **facts: Any) -> CountedGradients:
    """Of all these values, some of which were looked at."""
    flat = values.flatten()
    sample = flat[looked_at]
    counts = np.bincount(bucket_of(sample).numpy(), minlength=BUCKETS) * (flat.numel() / sample.numel())
    usual = {"family": "output", "dtype": "fp32", "arrivals": 1, "elements": flat.numel(), "looked_at": sample.numel()}
    peaks = {"weight" if facts.get("family") == "parameter" else "": float(flat.abs().amax())}
    return CountedGradients(layer=layer, counts=counts, **usual | {"peaks": peaks} | facts)  # type: ignore[arg-type]


def both(outputs: GradientRange, parameters: GradientRange) -> GradientRange:
    return GradientRange(
        step=5, scale=outputs.scale, outputs=outputs.outputs, parameters=parameters.parameters
    )  # fmt: skip


def cast(values: Tensor, factor: float, format: str) -> tuple[float, float, float, float]:
    """The same by really multiplying and casting."""
    known = values[(values != 0) & values.isfinite()].double()
    stored = (known * factor).float().to(DTYPES[format]).double().abs()
    smallest_normal = torch.finfo(DTYPES[format]).smallest_normal
    flushed, overflow = stored == 0, stored.isinf()
    subnormal = (stored > 0) & (stored < smallest_normal)
    return tuple(float(part.double().mean()) for part in (flushed, subnormal, ~(flushed | subnormal | overflow), overflow))  # type: ignore[return-value]


def four(shares: Any) -> tuple[float, float, float, float]:
    return shares.flushed, shares.subnormal, shares.normal, shares.overflow


# ---- edges ----


@pytest.mark.parametrize(
    ("value", "scale", "expected"),
    [
        (2.0**-25, 1.0, "flushed"),  # a tie, to even
        (2.0**-25 * (1 + 2.0**-23), 1.0, "subnormal"),
        (2.0**-35, 2.0**10, "flushed"),
        (2.0**-35 * (1 + 2.0**-23), 2.0**10, "subnormal"),
        (2.0**-24, 1.0, "subnormal"),
        (2.0**-14, 1.0, "normal"),
        (65519.996, 1.0, "normal"),
        (65520.0, 1.0, "overflow"),
        (65520.0 / 1024, 1024.0, "overflow"),
        (65519.996 / 1024, 1024.0, "normal"),
        (65520.0 / 2**60, 2.0**60, "overflow"),
        (-(2.0**-25), 1.0, "flushed"),
        (2.0**-140, 1.0, "flushed"),
        (3e38, 2.0**-10, "overflow"),
    ],
)
def test_edges_of_fp16_are_exact(value: float, scale: float, expected: str) -> None:
    shares = range_of({"a": torch.tensor([value])}).shares(scale)
    assert {name: getattr(shares, name) for name in ("flushed", "subnormal", "normal", "overflow")} == {
        "flushed": 0.0, "subnormal": 0.0, "normal": 0.0, "overflow": 0.0, expected: 1.0,
    }  # fmt: skip
    really = float((torch.tensor(value, dtype=torch.float64) * scale).float().half())
    assert (really == 0, math.isinf(really)) == (expected == "flushed", expected == "overflow")


def test_powers_of_two_at_every_scale() -> None:
    """What a loss that ends in a mean gives: all gradients are ties at some scale."""
    values = 2.0 ** torch.arange(-60, 20).float()
    found = range_of({"a": values})
    for exponent in range(-10, 41):
        for format in ("fp16", "bf16"):
            assert four(found.shares(2.0**exponent, format)) == pytest.approx(cast(values, 2.0**exponent, format), abs=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize("noted", [1.0, 2.0**16, 1000.0])
@pytest.mark.parametrize("format", ["fp16", "bf16"])
def test_random_gradients_at_every_scale(noted: float, format: str) -> None:
    seed = int(torch.randint(2**31, ()))
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(20_000, generator=generator) * torch.exp(torch.randn(20_000, generator=generator) * 6) * 1e-6
    found = range_of({"a": values * noted}, scale=noted)
    for scale in (1.0, 2.0**7, 3.0, 2.0**15, 2.0**24, 2.0**40):
        shares = found.shares(scale, format)  # type: ignore[arg-type]
        exact = math.frexp(scale / noted)[0] == 0.5
        assert four(shares) == pytest.approx(cast(values, scale, format), abs=0.0005 if exact else 0.005)
        assert sum(four(shares)) == pytest.approx(1)


def test_zeros_and_what_is_not_finite_are_counted_apart() -> None:
    shares = range_of({"a": torch.tensor([0.0, 0.0, math.inf, math.nan, -math.inf, 2.0**-30, 1.0, 1e9])}).shares()
    assert (shares.zeros, shares.nonfinite, shares.counted) == (2 / 8, 3 / 8, 3)
    assert four(shares) == pytest.approx((1 / 3, 0, 1 / 3, 1 / 3))
    assert shares.lost == pytest.approx(2 / 3)
    nothing = range_of({"a": torch.zeros(4)}).shares()
    assert math.isnan(nothing.flushed)
    assert (nothing.zeros, nothing.counted) == (1.0, 0)


def test_nothing_is_not_a_little() -> None:
    """Shares of what is not there are exactly 0, so that nobody reads of an overflow that is a rounding error."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(9_999, generator=generator) * 1e-3
    row = counted("a", values.repeat(13), looked_at=slice(0, 9_999))
    for exponent in range(14):
        assert GradientRange.of(GradientCounts(step=0, scale=1.0, rows=(row,))).shares(2.0**exponent).overflow == 0.0


# ---- three nets, against really casting ----


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend = nn.Linear(6, 16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head(self.norm(x + self.attend(x, x, x, need_weights=False)[0]))


def mlp() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(6, 64), nn.GELU(), nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 4)), torch.randn(64, 6)


def convolution() -> tuple[nn.Module, Tensor]:
    layers = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 4)]
    return nn.Sequential(*layers), torch.randn(32, 1, 6, 6)


def attention() -> tuple[nn.Module, Tensor]:
    return Attention(), torch.randn(16, 12, 6)


@pytest.mark.parametrize("make", [mlp, convolution, attention])
@pytest.mark.parametrize("sample", [None, SAMPLE_ELEMENTS])
def test_predicted_shares_are_those_of_really_casting(make: Callable[[], tuple[nn.Module, Tensor]], sample: int | None) -> None:
    torch.manual_seed(0)
    model, batch = make()
    gradients: dict[str, list[Tensor]] = {}

    def watch(name: str, module: nn.Module) -> None:
        def returned(_module: nn.Module, _args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.grad_fn is not None:
                output.register_hook(lambda g: gradients.setdefault(name, []).append(g.clone()))

        module.register_forward_hook(returned)

    probe = GradientProbe(model, sample=sample)
    probe.count_next_step()
    probe.begin(0)
    for name, module in model.named_modules():
        if name and not isinstance(module, nn.MultiheadAttention):
            watch(name, module)
    (model(batch).pow(2).mean() * 1e-4).backward()
    probe.end(None)
    counts = probe.newest()
    assert counts is not None
    found = GradientRange.of(counts)
    rows = {row.layer: row for row in found.outputs if row.layer in gradients}
    assert len(rows) >= 3
    everything = torch.cat([g.flatten() for name in rows for g in gradients[name]])
    for exponent in range(0, 41, 4):
        for name, row in rows.items():
            values = torch.cat([g.flatten() for g in gradients[name]])
            assert four(row.shares(2.0**exponent)) == pytest.approx(cast(values, 2.0**exponent, "fp16"), abs=0.01), name
            assert row.peak == float(values.abs().amax())
        if len(rows) == len(found.outputs):
            assert four(found.shares(2.0**exponent)) == pytest.approx(cast(everything, 2.0**exponent, "fp16"), abs=0.01)
    moved = [found.shares(2.0**exponent).flushed for exponent in range(0, 41, 4)]
    assert moved[0] > 0.1 > moved[-1]
    assert moved == sorted(moved, reverse=True)


def test_shares_of_layers_of_which_a_sample_is_looked_at() -> None:
    """A convolutional network with normalisation and ReLU, per layer, against all elements; other samples each step."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs in (1, 8, 16):
        layers += [nn.Conv2d(inputs, 16 if inputs > 1 else 8, 3, padding=1), nn.BatchNorm2d(16 if inputs > 1 else 8), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 64, 10))
    images, labels = torch.randn(128, 1, 8, 8), torch.randint(10, (128,))

    def found(sample: int | None, step: int) -> GradientRange:
        model.zero_grad()
        probe = GradientProbe(model, sample=sample)
        probe.count_next_step()
        probe.begin(step)
        nn.functional.cross_entropy(model(images), labels).backward()
        probe.end(None)
        return GradientRange.of(probe.counts[0])

    whole = found(None, 0)
    assert max(row.elements for row in whole.outputs) == 128 * 16 * 64
    for step in range(8):
        sampled = found(SAMPLE_ELEMENTS, step)
        assert [row.peaks for row in sampled.outputs] == [row.peaks for row in whole.outputs]
        for row, exact in zip(sampled.outputs, whole.outputs, strict=True):
            assert row.looked_at == min(SAMPLE_ELEMENTS, row.elements)
            for exponent in range(0, 25, 3):
                shares = row.shares(2.0**exponent)
                assert four(shares) == pytest.approx(four(exact.shares(2.0**exponent)), abs=0.01), (row.layer, step, exponent)
                assert shares.zeros == pytest.approx(exact.shares().zeros, abs=0.01)


def test_planted_underflow_and_its_cure() -> None:
    """In fp16 itself: what is predicted from a step at a high scale happens at scale 1, where it cannot be seen any more."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))

    def run(scale: float) -> GradientRange:
        probe = GradientProbe(model, sample=None)
        probe.count_next_step()
        probe.begin(0)
        with torch.autocast("cpu", torch.float16):
            output = model(torch.linspace(-1, 1, 32).view(8, 4))
        (output.float() * torch.logspace(-9, -6, 16).view(8, 2)).sum().mul(scale).backward()
        probe.end(scale)
        counts = probe.newest()
        assert counts is not None
        return GradientRange.of(counts)

    high, low = run(2.0**20), run(1.0)
    predicted, real = high.layer("1").shares(1.0), low.layer("1").shares()
    assert predicted.flushed > 0.2
    assert real.zeros == pytest.approx(predicted.flushed, abs=0.001)
    assert real.flushed == 0.0  # they are gone
    assert any("cannot be told from true zeros" in sentence for sentence in low.sentences())
    assert not any("zero already" in sentence for sentence in high.sentences())
    assert high.safe_scale().least_loss is not None
    assert high.shares(high.safe_scale().least_loss).flushed == 0.0


# ---- scales that suit ----


def test_safe_scales() -> None:
    values = torch.tensor([2.0**-30, 2.0**-28, 0.5])
    safe = range_of({"a": values}).safe_scale()
    assert safe.largest == 2.0**15  # times 2, the margin, is 32768
    assert safe.least_loss == 2.0**14  # of 2^-28 all bits; of 2^-30 none up to 2^15 has; 2^13 would leave a factor of 8
    found = range_of({"a": values})
    assert found.shares(safe.largest).overflow == 0.0
    assert found.shares(safe.largest * 4).overflow > 0.0
    assert found.safe_scale(margin=1.0).largest == 2.0**16
    assert (
        range_of({"a": torch.tensor([2.0**-20])}).safe_scale().least_loss == 2.0**32
    )  # 2^6 loses no more, and 2^33 is above 8 x
    assert range_of({"a": torch.tensor([2.0**-6, 2.0**-25])}).safe_scale().least_loss == 2.0**18
    assert range_of({"a": torch.tensor([1e-9])}).safe_scale().least_loss == 2.0**40
    assert range_of({"a": values * 2.0**10}, scale=2.0**10).safe_scale() == safe


@pytest.mark.parametrize("largest", [65519.996, 65520.0, 65536.0, 1.0, 1.9995117, 1.99951172, 3e-5])
def test_nothing_overflows_at_the_safe_scale_and_something_at_twice_that(largest: float) -> None:
    found = range_of({"a": torch.tensor([largest / 2.0**16])})
    safe = found.safe_scale(margin=1.0).largest
    assert safe is not None
    value = torch.tensor(largest / 2.0**16, dtype=torch.float64)
    assert not (value * safe).float().half().isinf()
    if safe < 2.0**40:
        assert (value * safe * 2).float().half().isinf()


def test_parameters_count_for_what_is_safe() -> None:
    outputs = range_of({"a": torch.tensor([2.0**-10])})
    found = both(outputs, range_of({"a": torch.tensor([2.0**5])}, family="parameter"))
    assert outputs.safe_scale().largest == 2.0**24
    assert found.safe_scale().largest == 2.0**9
    assert found.safe_scale().least_loss == 2.0**7


def test_no_scale_is_safe_for_what_is_too_large_or_nothing() -> None:
    assert range_of({"a": torch.tensor([1e6])}).safe_scale().largest is None
    assert range_of({"a": torch.zeros(3)}).safe_scale().least_loss is None
    assert range_of({}).safe_scale().largest is None
    overflowed = range_of({"a": torch.tensor([1.0, math.inf])}, scale=2.0**10)
    assert overflowed.safe_scale().largest is None
    assert overflowed.sentences()[0].startswith("50 % of the gradients were inf or NaN at scale 2^10")
    assert "of the others: 0 % become zero" in overflowed.sentences()[1]
    assert range_of({"a": torch.tensor([math.nan, 0.0])}).sentences()[1] == "The others are zero"
    assert range_of({"a": torch.zeros(2)}).sentences() == ("All gradients are zero",)


# ---- what was not looked at ----


def test_one_large_gradient_that_the_sample_has_missed_overflows_all_the_same() -> None:
    values = torch.full((100_000,), 2.0**-32)
    values[77_777] = 1.0
    found = GradientRange.of(GradientCounts(step=5, scale=1.0, rows=(counted("a", values, looked_at=slice(0, 4096)),)))
    whole = range_of({"a": values})
    for exponent in range(41):
        assert (found.shares(2.0**exponent).overflow > 0) is (whole.shares(2.0**exponent).overflow > 0) is (exponent >= 16)
    assert found.shares(2.0**16).overflow == pytest.approx(1e-5)
    assert found.safe_scale() == whole.safe_scale()
    assert found.safe_scale().largest == 2.0**14
    assert found.outputs[0].weights.sum() == pytest.approx(100_000)
    assert "< 0.1 % overflow: the step would be skipped" in found.sentences(2.0**16)[0]
    assert "none overflows" in found.sentences(2.0**15)[0]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_that_is_not_finite_is_known_though_it_was_not_looked_at(bad: float) -> None:
    values = torch.ones(1000)
    values[500] = bad
    found = GradientRange.of(GradientCounts(step=5, scale=1.0, rows=(counted("a", values, looked_at=slice(0, 100)),)))
    assert found.first_nonfinite() is not None
    assert found.safe_scale().largest is None
    assert found.sentences()[0].startswith("0.1 % of the gradients were inf or NaN at scale 1")
    assert found.shares().nonfinite == pytest.approx(0.001)


def test_whether_any_overflows_is_exact_at_scales_that_are_no_power_of_two() -> None:
    found = range_of({"a": torch.tensor([1.0, 1.5])})
    for scale in (40_000.0, 43_679.0, 43_681.0, 60_000.0):
        really = bool((torch.tensor([1.0, 1.5], dtype=torch.float64) * scale).float().half().isinf().any())
        assert (found.shares(scale).overflow > 0) is really, scale


def test_a_sample_is_said_to_be_one() -> None:
    row = counted("a", torch.ones(300_000), looked_at=slice(0, 32_768))
    found = GradientRange.of(GradientCounts(step=5, scale=1.0, rows=(row, counted("b", torch.ones(10)))))
    said = [sentence for sentence in found.sentences() if "sample" in sentence]
    assert len(said) == 1
    assert said[0].startswith("Shares are from a sample of 32,778 of 300,010, each layer's right to within 1 percentage point")
    assert "32,768 of 300,000" in repr(found)
    assert "32,768 of 300,000" in found._repr_html_()
    assert not any("sample" in sentence for sentence in range_of({"a": torch.ones(10)}).sentences())


# ---- parameters ----


def test_a_weight_whose_gradient_would_overflow_is_told_everywhere() -> None:
    found = both(
        range_of({"stem": torch.ones(3), "head": torch.tensor([2.0**-10])}, dtype="fp16"),
        range_of({"stem": torch.ones(2), "head": torch.tensor([3.0, 30.0])}, family="parameter"),
    )
    assert found.overflowing(2.0**11) == ()
    assert found.overflowing(2.0**12) == ("head.weight",)
    assert found.overflowing(2.0**16) == ("head.weight", "stem.weight")
    assert found.sentences(2.0**11)[0].endswith("none overflows")
    assert found.sentences(2.0**12)[0].endswith(
        "none overflows, but the gradient of head.weight would: the step would be skipped"
    )
    assert found.sentences(2.0**17)[1] == ("fp16 at scale 2^17: the gradients of head.weight, stem.weight would overflow as well")
    assert [row.layer for row, _ in found.worst(2.0**11)] == ["stem", "head"]
    assert [row.layer for row, _ in found.worst(2.0**12)] == ["head", "stem"]
    assert found.safe_scale(margin=1.0).largest == 2.0**11
    assert overflow_text("head", 0.0, found.overflowing(2.0**12)) == "0 %, its weight"
    assert overflow_text("stem", 0.0, found.overflowing(2.0**12)) == "0 %"
    assert found.matching("stem").overflowing(2.0**12) == ()


def test_a_weight_whose_gradient_has_overflowed() -> None:
    outputs = range_of({"head": torch.tensor([2.0**-10])}, scale=2.0**10, dtype="fp16")
    found = both(outputs, range_of({"head": torch.tensor([1.0, math.inf])}, scale=2.0**10, family="parameter"))
    assert found.overflowing() == found.overflowing(2.0**20) == ("head.weight",)
    assert found.overflowing(2.0**9) == ()
    assert found.sentences(2.0**9)[1].startswith("The gradient of head.weight was inf or NaN at scale 2^10")
    assert found.safe_scale().largest is None


def test_parameters_that_autocast_leaves_in_fp32_do_not_overflow_fp16() -> None:
    outputs = range_of({"fc": torch.ones(2), "norm": torch.ones(2)}, dtype="fp16")
    kept = range_of({"kept": torch.ones(2)})
    large = torch.tensor([1e6])
    rows = (
        counted("norm", large, family="parameter", wide=True),
        counted("kept", large, family="parameter"),
        counted("fc", torch.ones(2), family="parameter"),
    )
    parameters = GradientRange.of(GradientCounts(step=5, scale=1.0, rows=rows)).parameters
    found = GradientRange(step=5, scale=1.0, outputs=outputs.outputs + kept.outputs, parameters=parameters)
    assert [row.layer for row in found.parameters_at_stake] == ["fc"]
    assert found.overflowing() == ()
    assert found.safe_scale(margin=1.0).largest == 2.0**15
    before = GradientRange(step=5, scale=1.0, outputs=kept.outputs, parameters=parameters)  # a step in fp32
    assert before.overflowing() == ("kept.weight",)


def test_a_parameter_of_the_model_itself_goes_by_its_own_name() -> None:
    found = both(range_of({"(model)": torch.ones(2)}), range_of({"(model)": torch.tensor([1e6])}, family="parameter"))
    assert found.overflowing() == ("weight",)
    assert [row.layer for row, _ in found.worst()] == ["(model)"]


class Spread(nn.Module):
    """A layer whose outputs' gradients are small and whose weight's gradient is their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@pytest.mark.parametrize("autocast", ["fp16", "fp32"])
def test_the_step_is_skipped_exactly_from_the_scale_on_at_which_that_is_said(autocast: str) -> None:
    torch.manual_seed(0)
    model = Spread()
    x = torch.randn(256, 4).abs() + 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with AmpSession(model, optimizer) as session:

        def step(**settings: Any) -> bool:
            session.request(**settings)
            session.count_gradients()
            optimizer.zero_grad()
            with session.autocast():
                loss = model(x).float().mean()
            session.scaler.scale(loss).backward()
            session.scaler.step(optimizer)
            session.scaler.update()
            return bool(session.history.last("skipped"))

        assert not step(autocast=autocast, init_scale=1.0)
        found = session.gradient_range()
        assert found is not None
        first = next(k for k in range(41) if found.overflowing(2.0**k) or found.shares(2.0**k).overflow)
        assert found.shares(2.0**first).overflow == 0.0  # it is a weight
        assert not step(autocast="fp16", init_scale=2.0 ** (first - 1))
        assert step(init_scale=2.0**first)
        said = session.skip_report()[0]
        assert any(name in said for name in found.overflowing(2.0**first))


# ---- zeros ----


@pytest.mark.parametrize(("dtype", "told"), [("fp16", True), ("bf16", False), ("fp32", False)])
def test_only_of_fp16_is_it_said_that_zeros_may_have_become_it(dtype: str, told: bool) -> None:
    found = range_of({"a": torch.tensor([0.0, 1.0])}, dtype=dtype)
    assert any("cannot be told from true zeros" in sentence for sentence in found.sentences()) is told
    assert any("50 % were zero already" in sentence for sentence in found.sentences())


def test_zeros_hide_the_rest_where_it_is_small_or_nothing() -> None:
    zeros = torch.zeros(70)
    small, large = torch.full((30,), 2.0**-20), torch.ones(30)
    assert range_of({"a": torch.cat([zeros, small])}, dtype="fp16").zeros_hide
    assert not range_of({"a": torch.cat([zeros, large])}, dtype="fp16").zeros_hide  # a ReLU's
    assert range_of({"a": zeros, "b": large}, dtype="fp16").zeros_hide  # of a layer all have vanished
    assert not range_of({"a": torch.cat([zeros[:20], small])}, dtype="fp16").zeros_hide
    assert not range_of({"a": torch.cat([zeros, small])}, dtype="bf16").zeros_hide
    assert not range_of({}).zeros_hide


# ---- layers ----


def test_what_is_stored_in_fp16_is_at_stake_and_else_everything() -> None:
    wide, narrow = range_of({"norm": torch.ones(9)}), range_of({"fc": torch.full((3,), 2.0**-30)}, dtype="fp16")
    mixed = GradientRange(step=0, scale=1.0, outputs=wide.outputs + narrow.outputs, parameters=())
    assert [row.layer for row in mixed.at_stake] == ["fc"]
    assert mixed.shares().flushed == 1.0
    assert (mixed.in_half, wide.in_half) == (True, False)
    assert wide.shares().normal == 1.0


def test_layers_by_glob_and_by_name() -> None:
    found = range_of({name: torch.ones(2) for name in ("layers.0.mlp.fc", "layers.1.mlp.fc", "head")})
    names = lambda pattern: [row.layer for row in found.matching(pattern).outputs]  # noqa: E731
    assert names("layers.*.mlp.*") == ["layers.0.mlp.fc", "layers.1.mlp.fc"]
    assert names("HEAD 0.mlp") == ["layers.0.mlp.fc", "head"]
    assert names("layers.*") == []
    assert len(names(" ")) == 3
    assert found.matching("layers.*").shares().counted == 0
    assert found.layer("head").elements == 2
    with pytest.raises(LayerError, match="'tail'"):
        found.layer("tail")


def test_worst_first() -> None:
    found = range_of(
        {
            "fine": torch.ones(4),
            "some": torch.tensor([2.0**-30, 1.0, 1.0, 1.0]),
            "most": torch.tensor([2.0**-30, 2.0**-30, 1.0, 1.0]),
            "large": torch.tensor([1e6, 1.0, 1.0, 1.0]),
            "broken": torch.tensor([math.nan, 1.0, 1.0, 1.0]),
        }
    )
    assert [row.layer for row, _ in found.worst()] == ["broken", "large", "most", "some", "fine"]
    assert found.first_nonfinite() is not None
    assert found.first_nonfinite().layer == "broken"  # type: ignore[union-attr]
    assert range_of({"fine": torch.ones(4)}).first_nonfinite() is None


def test_exponents_and_largest() -> None:
    row = range_of({"a": torch.tensor([0.0, 1.0, -1.5, 1.9999, 2.0, 1e-42, 3.9, math.inf])}).outputs[0]
    by_exponent = dict(zip(EXPONENTS, row.by_exponent, strict=True))
    assert {exponent: count for exponent, count in by_exponent.items() if count} == {-127: 1, 0: 3, 1: 2}
    assert (row.zeros, row.infs, row.nans) == (1, 1, 0)
    assert 3.9 <= row.largest <= 4.0
    assert range_of({"a": torch.zeros(2)}).outputs[0].largest == 0.0


def test_samples_weigh_as_much_as_what_they_stand_for() -> None:
    def row(layer: str, elements: int, value: float) -> CountedGradients:
        return counted(layer, torch.full((elements,), value), looked_at=slice(0, 10))

    found = GradientRange.of(GradientCounts(step=0, scale=1.0, rows=(row("a", 900, 2.0**-30), row("b", 100, 1.0))))
    assert found.shares().flushed == pytest.approx(0.9)
    assert found.total.elements == 1000


# ---- words ----


def test_words_and_tables() -> None:
    found = range_of({"<b>fc</b>": torch.tensor([2.0**-30, 2.0**-20, 1.0, 0.0])})
    text = repr(found)
    assert "33 % of the gradients become zero, 33 % keep fewer bits, none overflows" in text
    assert "25 % were zero already" in text
    assert "cannot be told" not in text  # in fp32 they are true zeros
    assert "<b>fc" not in found._repr_html_()
    assert "the step would be skipped" in found.sentences(2.0**20)[0]
    assert "no gradient" in range_of({}).sentences()[0]
    assert found.sentences(2.0**4)[0].startswith("fp16 at scale 2^4: ")


def test_what_is_no_format_or_scale_is_refused() -> None:
    found = range_of({"a": torch.ones(2)})
    for scale in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(FormatError, match="scale"):
            found.shares(scale)
    wrong: Any
    for wrong in ("a", "2", None, [], True, 10**400):
        with pytest.raises(FormatError, match=r"scale: got .*, expected a number above 0"):
            found.shares(wrong if wrong is not None else object())
    with pytest.raises(FormatError, match="fp8"):
        found.shares(1.0, "fp8")  # type: ignore[arg-type]
    for wrong in (None, ["fp16"], 16):
        with pytest.raises(FormatError, match=r"format: got .*, expected one of 'fp16', 'bf16'"):
            found.shares(1.0, wrong)
    for wrong in (0.5, math.nan, "2", None):
        with pytest.raises(FormatError, match="margin: got "):
            found.safe_scale(margin=wrong)


def test_shares_for_people() -> None:
    assert [percent(share) for share in (0.0, 1e-9, 0.0123, 0.42, 0.9912, 1 - 1e-9, 1.0)] == [
        "0 %", "< 0.1 %", "1.2 %", "42 %", "99.1 %", "> 99.9 %", "100 %",
    ]  # fmt: skip


def test_zones_are_those_of_torchs_own_types() -> None:
    for name, dtype in DTYPES.items():
        zones, info = ZONES[name], torch.finfo(dtype)
        assert zones.flushed == info.smallest_normal * info.eps / 2
        assert zones.normal == info.smallest_normal
        step = 2.0 ** math.floor(math.log2(info.max)) * info.eps
        assert zones.overflow == info.max + step / 2
