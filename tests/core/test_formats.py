"""Number formats, bit for bit against torch, ml_dtypes, numpy and exact fractions."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amp_widgets.core import formats
from amp_widgets.core.formats import FORMATS, FloatFormat, Format, fixed_point, format_of, int8, round_to
from amp_widgets.errors import AmpWidgetsError, FormatError

TORCH = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
ML = {
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
SEED = 20240607
SMALL = ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2")
TORCH_SATURATES = bool(torch.tensor(1e9).to(torch.float8_e4m3fn).float() == 448)
ANY_FLOAT = st.floats(allow_nan=True, allow_infinity=True, width=64)


def torch_codes(values: np.ndarray, name: str) -> np.ndarray:
    dtype = TORCH[name]
    codes = torch.from_numpy(values).to(dtype).view(INTEGERS[dtype.itemsize]).numpy()
    return codes.astype(np.int64) & ((1 << (8 * dtype.itemsize)) - 1)


def ml_codes(values: np.ndarray, name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        cast = values.astype(ML[name])
    return cast.view(np.uint16 if cast.itemsize == 2 else np.uint8).astype(np.int64)


def as_torch_here(name: str) -> FloatFormat:
    """With what the installed torch makes of numbers that are too large for e4m3fn: versions differ."""
    return with_nan(name) if name == "fp8_e4m3" and not TORCH_SATURATES else FORMATS[name]


def with_nan(name: str) -> FloatFormat:
    return dataclasses.replace(FORMATS[name], overflow="nan") if name == "fp8_e4m3" else FORMATS[name]


def assert_same_codes(got: np.ndarray, expected: np.ndarray, kind: Format) -> None:
    """Equal codes; any NaN equals any other."""
    both_nan = np.isnan(kind.decode(got)) & np.isnan(kind.decode(expected))
    wrong = np.flatnonzero((got != expected) & ~both_nan)
    assert wrong.size == 0, f"{kind.name}: {wrong.size} differ, first {got[wrong[0]]:#x} expected {expected[wrong[0]]:#x}"


def random_fp32() -> np.ndarray:
    """A million of all exponents, and half a million of those near fp16 and fp8."""
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    anything = rng.integers(0, 1 << 32, 1_000_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    near = np.ldexp(rng.uniform(-2, 2, 500_000), rng.integers(-28, 18, 500_000)).astype(np.float32)
    return np.concatenate([anything, near])


def exactly_rounded(value: float, kind: FloatFormat) -> float:
    """By fractions alone, without anything of what is tested."""
    if not math.isfinite(value) or value == 0:
        exact = value
    else:
        size = abs(Fraction(value))
        exponent = size.numerator.bit_length() - size.denominator.bit_length()
        if Fraction(2) ** exponent > size:
            exponent -= 1
        lowest = 2 - 2 ** (kind.exponent_width - 1)
        ulp = Fraction(2) ** (max(exponent, lowest) - kind.fraction_width)
        rounded = round(size / ulp) * ulp  # Python rounds a Fraction to nearest, ties to even
        highest = 2 ** (kind.exponent_width - 1) - 1 + (0 if kind.has_inf else 1)
        largest = (2 - Fraction(1 if kind.has_inf else 2, 2**kind.fraction_width)) * Fraction(2) ** highest
        exact = math.inf if rounded > largest else float(rounded)
        exact = math.copysign(exact, value)
    if math.isinf(exact) and kind.overflow == "saturate":
        return math.copysign(448.0, exact)
    return exact


def same(one: float, other: float) -> bool:
    return (math.isnan(one) and math.isnan(other)) or (one == other and math.copysign(1, one) == math.copysign(1, other))


# ---- bit for bit against others ----


@pytest.mark.parametrize("name", SMALL)
def test_every_code_decodes_as_in_torch_and_ml_dtypes(name: str) -> None:
    kind = FORMATS[name]
    codes = np.arange(1 << kind.bits)
    raw = codes.astype(np.uint16 if kind.bits == 16 else np.uint8)
    by_torch = torch.from_numpy(raw).view(TORCH[name]).double().numpy()
    with np.errstate(invalid="ignore"):
        by_ml = raw.view(ML[name]).astype(np.float64)
    got = kind.decode(codes)
    for expected in (by_torch, by_ml):
        np.testing.assert_array_equal(got, expected)
        number = ~np.isnan(expected)
        np.testing.assert_array_equal(np.signbit(got)[number], np.signbit(expected)[number])


@pytest.mark.parametrize("name", [*SMALL, "tf32"])
def test_every_code_comes_back(name: str) -> None:
    kind = FORMATS[name]
    codes = np.arange(1 << kind.bits)
    values = kind.decode(codes)
    assert_same_codes(kind.encode(values), codes, kind)
    finite = values[np.isfinite(values)]
    np.testing.assert_array_equal(kind.round(finite), finite)


@pytest.mark.parametrize("name", list(TORCH))
def test_random_fp32_values_are_stored_as_torch_stores_them(name: str) -> None:
    values = random_fp32()
    assert_same_codes(as_torch_here(name).encode(values), torch_codes(values, name), FORMATS[name])


@pytest.mark.parametrize("name", SMALL)
def test_random_fp32_values_are_stored_as_ml_dtypes_stores_them(name: str) -> None:
    values = random_fp32()
    if name == "fp8_e4m3":  # ml_dtypes has no other answer to inf than NaN either
        assert np.isnan(with_nan(name).round(math.inf))
    assert_same_codes(with_nan(name).encode(values), ml_codes(values, name), FORMATS[name])


def ties(name: str) -> np.ndarray:
    """All numbers of a format, the middles between them, and the fp32 numbers beside those."""
    kind = FORMATS[name]
    positive = kind.decode(np.arange(1 << (kind.bits - 1)))
    finite = np.append(positive[np.isfinite(positive)], kind.largest + kind.spacing(kind.largest))
    middles = (finite[:-1] + finite[1:]) / 2
    with np.errstate(over="ignore"):
        both = np.concatenate([finite, middles]).astype(np.float32)
    beside = [np.nextafter(both, np.float32(end)) for end in (math.inf, -math.inf)]
    all_of_them = np.concatenate([both, *beside])
    return np.concatenate([all_of_them, -all_of_them, np.float32([math.inf, -math.inf, math.nan])])


@pytest.mark.parametrize("name", SMALL)
def test_every_tie_and_what_is_beside_it(name: str) -> None:
    values = ties(name)
    assert_same_codes(as_torch_here(name).encode(values), torch_codes(values, name), FORMATS[name])
    if name != "fp8_e4m3":
        assert_same_codes(FORMATS[name].encode(values), ml_codes(values, name), FORMATS[name])


@given(ANY_FLOAT)
def test_fp16_of_a_float64_as_in_numpy(value: float) -> None:
    with np.errstate(over="ignore"):
        assert same(round_to(value, "fp16"), float(np.float64(value).astype(np.float16)))


@given(ANY_FLOAT)
def test_fp32_of_a_float64_as_in_numpy(value: float) -> None:
    with np.errstate(over="ignore"):
        assert same(round_to(value, "fp32"), float(np.float64(value).astype(np.float32)))


SPECIAL = [
    0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, -5e-324, 1.7976931348623157e308, 65519.99, 65520.0, 2.0**-24, 2.0**-25,
    math.nextafter(2.0**-25, 1), 3 * 2.0**-25, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 448.0, 464.0, math.nextafter(464.0, 500), 57344.0,
    61440.0, math.nextafter(61440.0, 0), 2.0**-133, 2.0**-134, 2.0**-136, 2.0**-137, 2.0**-149, 2.0**-150, 3.3961775292304601e38,
]  # fmt: skip


@pytest.mark.parametrize("name", list(FORMATS))
def test_special_values_and_random_float64_against_fractions(name: str) -> None:
    kind = FORMATS[name]
    rng = np.random.default_rng(SEED)
    print(f"seed {SEED}")
    low, high = kind.lowest_exponent - kind.fraction_width - 3, kind.highest_exponent + 3
    drawn = np.ldexp(rng.uniform(1, 2, 3000), rng.integers(low, high, 3000))
    # a tie of the format and a tiny bit more: what goes through fp32 first is rounded twice
    nearly = (kind.round(drawn[:500]) + np.vectorize(kind.spacing)(drawn[:500]) / 2) * (1 + 2.0**-45)
    values = np.concatenate([SPECIAL, [-value for value in SPECIAL], drawn, -drawn, nearly[np.isfinite(nearly)]])
    expected = np.array([exactly_rounded(float(value), kind) for value in values])
    got = kind.round(values)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(np.signbit(got)[~np.isnan(got)], np.signbit(expected)[~np.isnan(expected)])
    assert same(kind.round(float(values[7])), float(got[7]))


@given(ANY_FLOAT, st.sampled_from(list(FORMATS)))
def test_any_float64_against_fractions(value: float, name: str) -> None:
    assert same(round_to(value, name), exactly_rounded(value, FORMATS[name]))


def test_a_float64_is_rounded_once() -> None:
    value = 1 + 2.0**-11 + 2.0**-40
    assert round_to(value, "fp16") == 1 + 2.0**-10
    assert torch.tensor(value, dtype=torch.float64).half().item() == 1.0  # through fp32, where it is a tie


def test_tf32_against_the_bits_of_fp32() -> None:
    values = random_fp32()
    values = values[np.isfinite(values)]
    bits = values.view(np.uint32).astype(np.int64)
    top = (bits + 0xFFF + ((bits >> 13) & 1)) >> 13  # to nearest, ties to even, in whole numbers
    assert_same_codes(FORMATS["tf32"].encode(values), top, FORMATS["tf32"])


# ---- properties ----


@pytest.mark.parametrize("name", list(TORCH))
def test_properties_are_those_of_torch(name: str) -> None:
    kind, info = FORMATS[name], torch.finfo(TORCH[name])
    assert (kind.largest, kind.lowest, kind.smallest_normal, kind.spacing(1.0)) == (info.max, info.min, info.tiny, info.eps)
    assert kind.bits == info.bits
    assert kind.smallest == kind.decode(1)
    assert kind.bits == 1 + kind.exponent_bits + kind.fraction_bits


def test_properties_in_exact_numbers() -> None:
    assert {name: (kind.smallest, kind.smallest_normal, kind.largest) for name, kind in FORMATS.items()} == {
        "fp32": (2.0**-149, 2.0**-126, (2 - 2.0**-23) * 2.0**127),
        "tf32": (2.0**-136, 2.0**-126, (2 - 2.0**-10) * 2.0**127),
        "fp16": (2.0**-24, 2.0**-14, 65504.0),
        "bf16": (2.0**-133, 2.0**-126, (2 - 2.0**-7) * 2.0**127),
        "fp8_e4m3": (2.0**-9, 2.0**-6, 448.0),
        "fp8_e5m2": (2.0**-16, 2.0**-14, 57344.0),
    }
    assert FORMATS["fp16"].decades == pytest.approx(math.log10(65504 * 2.0**24), rel=1e-12)
    assert int8(0.5).decades == pytest.approx(math.log10(127))


@pytest.mark.parametrize("name", SMALL)
def test_neighbours_and_spacing_of_every_number(name: str) -> None:
    kind = FORMATS[name]
    values = np.unique(kind.decode(np.arange(1 << kind.bits)))  # sorted; one zero, one NaN at the end
    values = values[~np.isnan(values)]
    for index in range(0, len(values), 1 if kind.bits == 8 else 37):
        below, above = kind.neighbours(float(values[index]))
        assert same(below, float(values[index - 1]) if index else math.nan) or below == values[index - 1] == 0
        assert same(above, float(values[index + 1]) if index + 1 < len(values) else math.nan) or above == values[index + 1] == 0
        if 0 <= values[index] < kind.largest:
            assert kind.spacing(float(values[index])) == above - values[index]
    assert all(math.isnan(value) for value in kind.neighbours(math.nan))
    assert math.isnan(kind.spacing(math.nan))


def test_fields_and_flips() -> None:
    fp16 = FORMATS["fp16"]
    code = fp16.encode(-1.5)
    assert fp16.fields(code) == (1, 15, 512)
    assert fp16.decode(fp16.flip(code, 15)) == 1.5
    assert fp16.decode(fp16.flip(code, 9)) == -1.0
    assert fp16.decode(fp16.flip(fp16.encode(1.0), 14)) == math.inf
    assert int8(0.5).fields(0xFF) == (1, 0, 127)
    assert int8(0.5).decode(int8(0.5).flip(1, 7)) == -63.5


@pytest.mark.parametrize("name", [*FORMATS, "int8"])
def test_fields_are_the_code_and_a_flip_is_undone_by_another(name: str) -> None:
    kind = format_of(name)
    for value in (0.1, -3.0, 100.0):
        code = kind.encode(value)
        sign, exponent, fraction = kind.fields(code)
        assert code == (sign << (kind.bits - 1)) | (exponent << kind.fraction_bits) | fraction
        for bit in range(kind.bits):
            assert kind.flip(code, bit) != code
            assert kind.flip(kind.flip(code, bit), bit) == code


@pytest.mark.parametrize(
    ("value", "name", "word"),
    [
        (0.5, "fp16", "exact"), (0.1, "fp16", "rounded"), (2e-7, "fp16", "subnormal"), (2.0**-24, "fp16", "subnormal"),
        (2e-8, "fp16", "underflow"), (-2e-8, "fp16", "underflow"), (65519.99, "fp16", "rounded"), (65520.0, "fp16", "overflow"),
        (math.inf, "fp16", "exact"), (math.nan, "fp16", "nan"), (0.0, "fp16", "exact"), (-0.0, "fp16", "exact"),
        (math.nextafter(2.0**-14, 0), "fp16", "rounded"), (464.0, "fp8_e4m3", "rounded"), (465.0, "fp8_e4m3", "overflow"),
        (math.inf, "fp8_e4m3", "overflow"), (1e39, "bf16", "overflow"), (127.4, "int8", "rounded"), (128.0, "int8", "overflow"),
        (0.4, "int8", "underflow"), (-128.0, "int8", "exact"),
    ],
)  # fmt: skip
def test_what_becomes_of_a_value_in_one_word(value: float, name: str, word: str) -> None:
    assert format_of(name).verdict(value) == word


# ---- int8 and fixed point ----


@pytest.mark.parametrize("scale", [1.0, 0.5, 2.0**-7, 4.0])
def test_int8_is_stored_as_torch_quantizes(scale: float) -> None:
    rng = np.random.default_rng(SEED)
    values = (rng.uniform(-200, 200, 20_000) * scale).astype(np.float32)
    values = np.append(values, np.float32(scale) * np.arange(-140, 140) / 2)  # all ties
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this part of torch will move to another package
        stored = torch.quantize_per_tensor(torch.from_numpy(values.astype(np.float32)), scale, 0, torch.qint8)
    kind = int8(scale)
    np.testing.assert_array_equal(kind.decode(kind.encode(values)), stored.dequantize().double().numpy())
    np.testing.assert_array_equal(kind.encode(values), stored.int_repr().numpy().astype(np.int64) & 0xFF)


def test_every_int8_code_comes_back_whatever_the_scale() -> None:
    for scale in (1.0, 0.1, 1 / 3, 1e-300, 1e300, 2.0**-1022):
        kind = int8(scale)
        values = kind.decode(np.arange(256))
        np.testing.assert_array_equal(kind.encode(values), np.arange(256))
        np.testing.assert_array_equal(kind.round(values), values)
        assert (kind.largest, kind.lowest) == (127 * scale, -128 * scale)


@given(st.floats(-15, 15), st.sampled_from([0.1, 0.3, 1 / 3, 0.05]))
def test_int8_takes_the_nearest_multiple_of_the_float_that_the_scale_is(value: float, scale: float) -> None:
    multiple = min(max(round(Fraction(value) / Fraction(scale)), -128), 127)
    assert int8(scale).round(value) == multiple * scale


def test_int8_ties_are_decided_exactly() -> None:
    scale = 0.1  # a little more than a tenth: 0.25 is below the middle of 2 and 3 of it, 0.35 above or below that of 3 and 4
    values = np.array([[0.25, 0.35], [-0.25, 0.05]])
    exact = [[round(Fraction(float(value)) / Fraction(scale)) * scale for value in row] for row in values]
    np.testing.assert_array_equal(int8(scale).round(values), exact)
    np.testing.assert_array_equal(int8(scale).round(values.T), np.array(exact).T)


def test_int8_has_no_nan() -> None:
    assert math.isnan(round_to(math.nan, "int8"))
    with pytest.raises(FormatError, match="a number that it cannot store"):
        int8().encode(math.nan)
    assert round_to(math.inf, "int8", scale=2.0) == 254


@pytest.mark.parametrize("kind", [int8(), int8(0.1), fixed_point()])
def test_equally_spaced_numbers_have_one_zero(kind: Format) -> None:
    for value in (-0.0, -0.001, 0.001):
        assert math.copysign(1, kind.round(value)) == 1


@given(st.floats(-9999.99, 9999.99))
def test_fixed_point_takes_the_nearest_hundredth(value: float) -> None:
    nearest = round(Fraction(value) * 100)
    assert fixed_point(4, 2).round(value) == float(Fraction(nearest, 100))
    assert fixed_point(4, 2).encode(value) == nearest
    assert fixed_point(4, 2).decode(nearest) == nearest / 100


@pytest.mark.parametrize(("before", "after"), [(15, 0), (0, 15), (1, 14), (1, 0), (0, 1)])
def test_fixed_point_of_many_digits(before: int, after: int) -> None:
    kind = fixed_point(before, after)
    most = 10 ** (before + after) - 1
    rng = np.random.default_rng(SEED)
    codes = np.append(rng.integers(-most, most + 1, 50), [most, -most, 0])
    np.testing.assert_array_equal(kind.encode(kind.decode(codes)), codes)
    assert kind.largest == most / 10**after


# ---- the tutorial's numbers ----


def test_fixed_point_in_the_tutorial() -> None:
    kind = fixed_point(4, 2)
    assert (kind.round(1234.56), kind.verdict(1234.56)) == (1234.56, "exact")
    assert (kind.round(0.0001), kind.verdict(0.0001)) == (0.0, "underflow")
    assert math.isnan(kind.round(1234567.0))
    assert kind.verdict(1234567.0) == "overflow"
    assert kind.neighbours(1234.56) == (1234.55, 1234.57)


def test_scale_store_unscale_in_the_tutorial() -> None:
    scaled, stored, unscaled = formats.scaled_round_trip(0.00002, 1000, "fp16")
    assert scaled == 0.02
    assert stored == torch.tensor(0.02, dtype=torch.float16).item()
    assert unscaled == pytest.approx(0.00002, rel=2.0**-11)
    assert abs(unscaled - 0.00002) < abs(round_to(0.00002, "fp16") - 0.00002) / 5  # better than unscaled


def test_2e_7_is_a_subnormal_of_fp16_and_2e_8_is_zero() -> None:
    assert round_to(2e-7, "fp16") == 3 * 2.0**-24 == pytest.approx(1.788e-7, rel=1e-3)
    assert round_to(2e-7, "fp16") == torch.tensor(2e-7).half().item()
    assert round_to(2e-8, "fp16") == 0 == torch.tensor(2e-8).half().item()
    assert formats.scaled_round_trip(2e-8, 2.0**16, "fp16").unscaled == pytest.approx(2e-8, rel=2.0**-11)


def test_the_edge_of_fp16() -> None:
    assert (round_to(65519.99, "fp16"), round_to(65520.0, "fp16"), round_to(-65520.0, "fp16")) == (65504, math.inf, -math.inf)


# ---- updates ----


def test_whether_an_update_changes_a_weight() -> None:
    survives = {name: formats.update_survives(1.0, 1.0, 1e-3 / 3, name) for name in FORMATS}
    # the spacing below 1 is 2^-11 in fp16 and tf32, 2^-8 in bf16; more than half of it moves the weight
    assert survives == {"fp32": True, "tf32": True, "fp16": True, "bf16": False, "fp8_e4m3": False, "fp8_e5m2": False}
    assert formats.update_survives(1.0, 1.0, 1e-4, "fp16") is False
    assert formats.update_survives(1.0, 0.0, 1e-4, "fp32") is False
    assert formats.update_survives(1.0, 1.0, 0.6, int8(1.0)) is True
    assert formats.update_survives(1 + 0.4 * 2.0**-10, 1.0, 1e-6, "fp16") is False  # of the weight that is stored, 1
    assert formats.update_survives(math.nan, 1.0, 1.0, "fp16") is False
    assert formats.update_survives(1.0, math.nan, 1.0, "fp16") is False  # what is left is no number
    assert formats.update_survives(1.0, 1.0, math.nan, "fp16") is False
    assert formats.update_survives(1.0, math.nan, 1.0, "fp8_e4m3") is False
    assert formats.update_survives(1.0, math.inf, 1.0, "fp16") is True


def test_updates_as_sgd_in_fp16_and_bf16_makes_them() -> None:
    rng = np.random.default_rng(SEED)
    for name in ("fp16", "bf16"):
        weights = round_to(rng.normal(size=4000), name)
        gradients = round_to(rng.normal(size=4000), name)
        before = torch.from_numpy(weights).to(TORCH[name])
        after = before.add(torch.from_numpy(gradients).to(TORCH[name]), alpha=-(2.0**-9))
        got = formats.update_survives(weights, gradients, 2.0**-9, name)
        np.testing.assert_array_equal(got, (before != after).numpy())
        assert 0.05 < np.mean(got) < 0.95


# ---- the interface ----


def test_shapes_and_types() -> None:
    assert type(round_to(1, "fp16")) is float
    assert type(round_to(np.float32(0.1), "bf16")) is float
    assert type(FORMATS["fp16"].encode(0.1)) is int
    array = round_to(np.full((2, 3), 0.1, dtype=np.float32), "fp16")
    assert (array.shape, array.dtype) == ((2, 3), np.float64)
    assert round_to([], "fp16").shape == (0,)
    assert round_to(torch.tensor([0.1, 2e-8]), "fp16").tolist() == [0.0999755859375, 0.0]
    assert round_to(10**30, "fp32") == float(np.float32(1e30))
    assert round_to(np.array([1.5, 3.25]).astype(ml_dtypes.bfloat16), "fp8_e4m3").tolist() == [1.5, 3.25]
    values = np.array([0.1])
    round_to(values, "fp16")
    assert values[0] == 0.1  # not changed in place


def test_tensors_of_any_kind() -> None:
    assert round_to(torch.tensor(0.1, dtype=torch.float64, requires_grad=True), "fp16") == 0.0999755859375
    assert round_to(torch.nn.Parameter(torch.ones(2)), "fp16").tolist() == [1.0, 1.0]
    halves = torch.tensor([0.1, 3.0], dtype=torch.bfloat16)
    assert round_to(halves, "fp32").tolist() == halves.tolist()
    assert round_to(torch.tensor([1.75]).to(torch.float8_e4m3fn), "fp8_e5m2").tolist() == [1.75]
    assert round_to(torch.tensor([1, 2]), "fp16").tolist() == [1.0, 2.0]
    assert FORMATS["fp16"].encode(torch.tensor(1.0, requires_grad=True)) == 0x3C00
    weights = torch.tensor([1.0, 1.0], dtype=torch.bfloat16, requires_grad=True)
    assert formats.update_survives(weights, torch.tensor([1e-9, 1.0]), 0.1, "bf16").tolist() == [False, True]


def test_a_format_is_a_name_or_itself() -> None:
    assert format_of("fp16") is FORMATS["fp16"] is format_of(FORMATS["fp16"])
    assert format_of("int8", scale=0.25) == int8(0.25) != int8()
    assert formats.NAMES == ("fp32", "tf32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8")
    with pytest.raises(dataclasses.FrozenInstanceError):
        FORMATS["fp16"].name = "x"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: round_to(1.0, "fp17"), "got 'fp17', expected one of fp32, tf32"),
        (lambda: round_to(1.0, None), "got None, expected one of"),
        (lambda: round_to("0.1", "fp16"), "got '0.1', expected a real number"),
        (lambda: round_to(1j, "fp16"), "expected a real number"),
        (lambda: round_to([None], "fp16"), "expected a real number"),
        (lambda: round_to(10**400, "fp16"), "expected a real number"),
        (lambda: round_to(1.0, "fp16", scale=2.0), "scale: got 2.0 for fp16"),
        (lambda: int8(0.0), "got the scale 0.0, expected a finite number above 0"),
        (lambda: int8(math.nan), "got the scale nan"),
        (lambda: int8(1e308), "got the scale 1e"),
        (lambda: int8("x"), "got the scale 'x'"),
        (lambda: fixed_point(0, 0), "got 0 digits before the point and 0 after it, expected 1 to 15"),
        (lambda: fixed_point(10, 6), "expected 1 to 15"),
        (lambda: fixed_point(-1, 6), "expected 1 to 15"),
        (lambda: fixed_point(1.5, 6), "got 1.5 digits"),
        (lambda: FORMATS["fp16"].decode(1 << 16), "got the code 65536, expected 0 to 65535"),
        (lambda: FORMATS["fp16"].decode(-1), "got the code -1"),
        (lambda: FORMATS["fp16"].decode(1.5), "expected whole numbers"),
        (lambda: FORMATS["fp16"].flip(0, 16), "got bit 16, expected 0 to 15"),
        (lambda: FORMATS["fp16"].flip(0, -1), "got bit -1"),
        (lambda: FORMATS["fp16"].fields(1 << 20), "got the code"),
        (lambda: fixed_point().flip(3, 0), "expected a format with bits"),
        (lambda: fixed_point().encode(1e9), "expected -9999.99 to 9999.99"),
        (lambda: fixed_point().decode(1_000_000), "expected -999999 to 999999"),
        (lambda: formats.scaled_round_trip(1.0, 0.0, "fp16"), "scale: got 0.0"),
        (lambda: formats.scaled_round_trip(1.0, math.inf, "fp16"), "scale: got inf"),
        (lambda: formats.scaled_round_trip("x", 1.0, "fp16"), "value: got 'x'"),
        (lambda: formats.scaled_round_trip(1.0, "x", "fp16"), "scale: got 'x'"),
        (lambda: formats.update_survives(1, "x", 1, "fp16"), "g: got 'x', expected a real number"),
        (lambda: formats.update_survives(1, 1, None, "fp16"), "lr: got None"),
        (lambda: formats.update_survives([1, 2], [1, 2, 3], 1, "fp16"), r"got the shapes \(2,\), \(3,\) and \(\), expected such"),
        (lambda: round_to([torch.ones(1, requires_grad=True)], "fp16"), "expected a real number"),
        (lambda: round_to(torch.empty(2, device="meta"), "fp16"), "expected a real number"),
        (lambda: round_to(1.0, []), r"format: got \[\], expected one of"),
        (lambda: FORMATS["fp16"].decode([[1], [1, 2]]), "expected whole numbers"),
        (lambda: FORMATS["fp16"].verdict([1.0, 2.0]), r"got \[1.0, 2.0\], expected a single number"),
        (lambda: FORMATS["fp16"].neighbours([1.0, 2.0]), "expected a single number"),
        (lambda: int8().spacing([1.0, 2.0]), "expected a single number"),
    ],
)  # fmt: skip
def test_errors_say_what_was_got_and_what_was_expected(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        call()
    assert isinstance(caught.value, (AmpWidgetsError, ValueError))
