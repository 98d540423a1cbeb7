from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from amp_widgets.analysis.gradients import EXPONENTS, ZONES, GradientRange, percent
from amp_widgets.core.gradient_probe import BUCKETS, CountedGradients, GradientCounts, GradientProbe, bucket_of
from amp_widgets.errors import FormatError, LayerError

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def range_of(values: dict[str, Tensor], scale: float = 1.0, dtype: str = "fp32", family: Any = "output") -> GradientRange:
    rows = tuple(
        CountedGradients(
            layer=layer, family=family, dtype=dtype, arrivals=1, elements=tensor.numel(),
            counts=np.bincount(bucket_of(tensor).flatten().numpy(), minlength=BUCKETS).astype(np.int64),
        )
        for layer, tensor in values.items()
    )  # fmt: skip
    return GradientRange.of(GradientCounts(step=5, scale=scale, rows=rows))


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
    row = CountedGradients(
        layer="a", family="output", dtype="fp32", arrivals=1, elements=123_457,
        counts=np.bincount(bucket_of(values).numpy(), minlength=BUCKETS).astype(np.int64),
    )  # fmt: skip
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
@pytest.mark.parametrize("sample", [None, 4096])
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
            if sample is None or values.numel() <= sample:
                assert four(row.shares(2.0**exponent)) == pytest.approx(cast(values, 2.0**exponent, "fp16"), abs=0.01), name
        if len(rows) == len(found.outputs):
            assert four(found.shares(2.0**exponent)) == pytest.approx(cast(everything, 2.0**exponent, "fp16"), abs=0.01)
    moved = [found.shares(2.0**exponent).flushed for exponent in range(0, 41, 4)]
    assert moved[0] > 0.1 > moved[-1]
    assert moved == sorted(moved, reverse=True)


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
    assert safe.least_loss == 2.0**14  # of 2^-28 all bits; of 2^-30 none up to 2^15 has
    found = range_of({"a": values})
    assert found.shares(safe.largest).overflow == 0.0
    assert found.shares(safe.largest * 4).overflow > 0.0
    assert found.safe_scale(margin=1.0).largest == 2.0**16
    assert range_of({"a": torch.tensor([2.0**-20])}).safe_scale().least_loss == 2.0**6
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
    parameters = range_of({"a": torch.tensor([2.0**5])}, family="parameter")
    both = GradientRange(step=0, scale=1.0, outputs=outputs.outputs, parameters=parameters.parameters)
    assert outputs.safe_scale().largest == 2.0**24
    assert both.safe_scale().largest == 2.0**9


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


# ---- layers ----


def test_what_is_stored_in_fp16_is_at_stake_and_else_everything() -> None:
    wide, narrow = range_of({"norm": torch.ones(9)}), range_of({"fc": torch.full((3,), 2.0**-30)}, dtype="fp16")
    both = GradientRange(step=0, scale=1.0, outputs=wide.outputs + narrow.outputs, parameters=())
    assert [row.layer for row in both.at_stake] == ["fc"]
    assert both.shares().flushed == 1.0
    assert (both.in_half, wide.in_half) == (True, False)
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
        counts = np.zeros(BUCKETS, np.int64)
        counts[int(bucket_of(torch.tensor([value])))] = 10
        return CountedGradients(layer=layer, family="output", dtype="fp32", arrivals=1, elements=elements, counts=counts)

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
        with pytest.raises(FormatError, match="scale: got .*, expected a number above 0"):
            found.shares(wrong if wrong is not None else object())
    with pytest.raises(FormatError, match="fp8"):
        found.shares(1.0, "fp8")  # type: ignore[arg-type]
    for wrong in (None, ["fp16"], 16):
        with pytest.raises(FormatError, match="format: got .*, expected one of 'fp16', 'bf16'"):
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
