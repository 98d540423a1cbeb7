"""Number formats: which numbers can be stored, in which bits, and what becomes of the others. Free of torch.

Rounding is to nearest, ties to even, from float64 in one step. A value that torch casts from float64 goes through fp32 on the
way and can be rounded twice; a value that is an fp32 number comes out bit for bit as torch stores it.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from amp_widgets.errors import FormatError

Floats: TypeAlias = npt.NDArray[np.float64]
Codes: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]
Overflow = Literal["inf", "nan", "saturate"]
"""What stands for a number that is too large: an infinity, NaN, or the largest number."""
Verdict = Literal["exact", "rounded", "subnormal", "underflow", "overflow", "nan"]

MOST_DIGITS = 15
"""Of a decimal fixed-point number: float64, which the values are held in, keeps no more."""


class Fields(NamedTuple):
    """The parts of a code, each as an unsigned number."""

    sign: int
    exponent: int
    fraction: int


class Neighbours(NamedTuple):
    """The stored numbers next to one; NaN where there is none."""

    below: float
    above: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Format(abc.ABC):
    """What a number format can store. Its methods take a number or an array of them, and give the same.

    Parameters
    ----------
    name
        As in `format_of`.
    overflow
        What a number beyond the largest becomes.
    """

    name: str
    overflow: Overflow

    @property
    @abc.abstractmethod
    def exponent_bits(self) -> int:
        """Bits of the exponent field; 0 where there is none."""

    @property
    @abc.abstractmethod
    def fraction_bits(self) -> int:
        """Bits below the exponent field; those below the sign where there is none."""

    @property
    @abc.abstractmethod
    def bits(self) -> int:
        """Bits of a code; 0 for decimal fixed point."""

    @property
    @abc.abstractmethod
    def largest(self) -> float:
        """The largest number."""

    @property
    @abc.abstractmethod
    def lowest(self) -> float:
        """The most negative finite number."""

    @property
    @abc.abstractmethod
    def smallest(self) -> float:
        """The smallest number above 0."""

    @property
    @abc.abstractmethod
    def smallest_normal(self) -> float:
        """The smallest number above 0 with all of its fraction bits."""

    @property
    def decades(self) -> float:
        """Powers of ten from the smallest number above 0 to the largest."""
        return math.log10(self.largest) - math.log10(self.smallest)

    @overload
    def round(self, value: float) -> float: ...
    @overload
    def round(self, value: npt.ArrayLike) -> Floats | float: ...
    def round(self, value: npt.ArrayLike) -> Floats | float:
        """What is stored for these values, as float64."""
        values, scalar = _floats(value)
        rounded = self._overflowed(self._rounded(values))
        return float(rounded[()]) if scalar else rounded

    @overload
    def encode(self, value: float) -> int: ...
    @overload
    def encode(self, value: npt.ArrayLike) -> Codes | int: ...
    def encode(self, value: npt.ArrayLike) -> Codes | int:
        """The codes that these values are stored as; NaN has one code, although several codes may be NaN.

        Raises
        ------
        FormatError
            When there is no code for one of the values: NaN in int8, or what does not fit a fixed point.
        """
        values, scalar = _floats(value)
        codes = self._codes(self._overflowed(self._rounded(values)))
        return int(codes[()]) if scalar else codes

    @overload
    def decode(self, code: int) -> float: ...
    @overload
    def decode(self, code: npt.ArrayLike) -> Floats | float: ...
    def decode(self, code: npt.ArrayLike) -> Floats | float:
        """The values of these codes.

        Raises
        ------
        FormatError
            When one is no code of the format.
        """
        try:
            codes = np.asarray(code)
        except (ValueError, RuntimeError):
            raise FormatError(f"{self.name}: got the code {code!r}, expected whole numbers") from None
        if codes.dtype.kind not in "iu":
            raise FormatError(f"{self.name}: got the code {code!r}, expected whole numbers")
        lowest, highest = self._code_range()
        if codes.size and not (lowest <= int(codes.min()) and int(codes.max()) <= highest):
            raise FormatError(f"{self.name}: got the code {code!r}, expected {lowest} to {highest}")
        values = self._values(codes.astype(np.int64))
        return float(values[()]) if codes.ndim == 0 else values

    @abc.abstractmethod
    def spacing(self, value: float) -> float:
        """From the number stored for this value to the next larger in size (one ulp); NaN beyond the range."""

    @abc.abstractmethod
    def neighbours(self, value: float) -> Neighbours:
        """The stored numbers below and above the one that is stored for this value."""

    def fields(self, code: int) -> Fields:
        """Sign, exponent and fraction of a code; an int8 has no exponent, and its fraction is the seven bits after the sign.

        Raises
        ------
        FormatError
            When it is no code of the format, or the format has no bits.
        """
        code = self._bits_of(code)
        fraction, exponent = self.fraction_bits, self.exponent_bits
        return Fields(code >> (fraction + exponent), (code >> fraction) & ((1 << exponent) - 1), code & ((1 << fraction) - 1))

    def flip(self, code: int, bit: int) -> int:
        """The `code` with one `bit` flipped; bit 0 is the last of the fraction.

        Raises
        ------
        FormatError
            When it is no code of the format, or there is no such bit.
        """
        code = self._bits_of(code)
        if bit not in range(self.bits):
            raise FormatError(f"{self.name}: got bit {bit!r}, expected 0 to {self.bits - 1}")
        return code ^ (1 << bit)

    def verdict(self, value: float) -> Verdict:
        """What becomes of a value. ``underflow``: to zero; ``subnormal``: stored, with fewer bits, rounded or not."""
        wanted = _one_number(value)
        rounded = float(self._rounded(np.asarray(wanted))[()])  # as if there were no largest number
        stored = float(self._overflowed(np.asarray(rounded))[()])
        if math.isnan(wanted):
            return "nan"
        if stored == wanted:
            return "subnormal" if 0 < abs(stored) < self.smallest_normal else "exact"
        if stored != rounded:
            return "overflow"
        if stored == 0:
            return "underflow"
        return "subnormal" if abs(stored) < self.smallest_normal else "rounded"

    def _overflowed(self, rounded: Floats) -> Floats:
        if self.overflow == "saturate":
            return np.clip(rounded, self.lowest, self.largest)
        above, below = rounded > self.largest, rounded < self.lowest
        high, low = (math.inf, -math.inf) if self.overflow == "inf" else (math.nan, math.nan)
        return np.where(above, high, np.where(below, low, rounded))

    def _bits_of(self, code: int) -> int:
        if not self.bits:
            raise FormatError(f"{self.name}: got the bits of {code!r}, expected a format with bits; this one has decimal digits")
        self.decode(code)
        return int(code)

    @abc.abstractmethod
    def _rounded(self, values: Floats) -> Floats:
        """Rounded as if there were no largest number."""

    @abc.abstractmethod
    def _codes(self, stored: Floats) -> Codes: ...

    @abc.abstractmethod
    def _values(self, codes: Codes) -> Floats: ...

    def _code_range(self) -> tuple[int, int]:
        return 0, (1 << self.bits) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class FloatFormat(Format):
    """A floating-point format: sign, exponent, fraction, with subnormals.

    Parameters
    ----------
    exponent_width, fraction_width
        Bits of the two fields.
    has_inf
        Whether the highest exponent stands for inf and NaN, as in IEEE 754. If not, only the code with all bits 1 is NaN, and
        the others of that exponent are numbers ("fn").
    nan_fraction
        The fraction that NaN is stored with.
    """

    exponent_width: int
    fraction_width: int
    nan_fraction: int
    has_inf: bool = True

    @property
    def exponent_bits(self) -> int:
        return self.exponent_width

    @property
    def fraction_bits(self) -> int:
        return self.fraction_width

    @property
    def bits(self) -> int:
        return 1 + self.exponent_width + self.fraction_width

    @property
    def bias(self) -> int:
        """What is subtracted from the exponent field."""
        return (1 << (self.exponent_width - 1)) - 1

    @property
    def lowest_exponent(self) -> int:
        """Of a normal number."""
        return 1 - self.bias

    @property
    def highest_exponent(self) -> int:
        """Of the largest number."""
        return self.bias + (0 if self.has_inf else 1)

    @property
    def largest(self) -> float:
        missing = 1 if self.has_inf else 2  # the highest fraction of all is NaN
        return math.ldexp((2 << self.fraction_width) - missing, self.highest_exponent - self.fraction_width)

    @property
    def lowest(self) -> float:
        return -self.largest

    @property
    def smallest(self) -> float:
        return math.ldexp(1.0, self.lowest_exponent - self.fraction_width)

    @property
    def smallest_normal(self) -> float:
        return math.ldexp(1.0, self.lowest_exponent)

    def spacing(self, value: float) -> float:
        stored = self.round(_one_number(value))
        return math.ldexp(1.0, self._exponent_of_ulp(stored)) if math.isfinite(stored) else math.nan

    def neighbours(self, value: float) -> Neighbours:
        stored = self.round(_one_number(value))
        if math.isnan(stored):
            return Neighbours(math.nan, math.nan)
        sign_bit = 1 << (self.bits - 1)
        code = self.encode(stored)
        place = -(code ^ sign_bit) if code & sign_bit else code  # in the order of the values; 0 for both zeros
        end = self.encode(math.inf if self.has_inf else self.largest)

        def at(place: int) -> float:
            return math.nan if abs(place) > end else self.decode(place if place >= 0 else -place | sign_bit)

        return Neighbours(at(place - 1), at(place + 1))

    def _exponent_of_ulp(self, value: float) -> int:
        exponent = math.frexp(value)[1] - 1 if value else self.lowest_exponent
        return max(exponent, self.lowest_exponent) - self.fraction_width

    def _rounded(self, values: Floats) -> Floats:
        exponents = np.frexp(values)[1] - 1  # of a zero -1, of inf and NaN arbitrary: both stay what they are
        ulps = np.maximum(exponents, self.lowest_exponent) - self.fraction_width
        with np.errstate(over="ignore", invalid="ignore"):
            units = np.ldexp(values, -ulps)  # exact
            rounded: Floats = np.ldexp(np.rint(units), ulps)
        return rounded

    def _codes(self, stored: Floats) -> Codes:
        finite = np.isfinite(stored)
        size = np.where(finite, np.abs(stored), 0.0)
        exponents = np.maximum(np.frexp(size)[1] - 1, self.lowest_exponent)
        exponents = np.where(size == 0, self.lowest_exponent, exponents)
        units = np.ldexp(size, self.fraction_width - exponents).astype(np.int64)  # the bit before the point raises the exponent
        codes = ((exponents.astype(np.int64) - self.lowest_exponent) << self.fraction_width) + units
        top = ((1 << self.exponent_width) - 1) << self.fraction_width
        codes = np.where(np.isinf(stored), top, codes)
        signed: Codes = codes | (np.signbit(stored).astype(np.int64) << (self.bits - 1))
        return np.where(np.isnan(stored), top | self.nan_fraction, signed)

    def _values(self, codes: Codes) -> Floats:
        fractions = codes & ((1 << self.fraction_width) - 1)
        fields = (codes >> self.fraction_width) & ((1 << self.exponent_width) - 1)
        normal = fields > 0
        units = fractions + (normal.astype(np.int64) << self.fraction_width)
        exponents = np.where(normal, fields, 1) - self.bias - self.fraction_width
        sizes = np.ldexp(units.astype(np.float64), exponents.astype(np.int32))
        top = fields == (1 << self.exponent_width) - 1
        if self.has_inf:
            sizes = np.where(top, np.where(fractions == 0, math.inf, math.nan), sizes)
        else:
            sizes = np.where(top & (fractions == (1 << self.fraction_width) - 1), math.nan, sizes)
        return np.where(codes >> (self.bits - 1) == 1, -sizes, sizes)


@dataclass(frozen=True, kw_only=True, slots=True)
class GridFormat(Format):
    """Equally spaced numbers: whole multiples of a step.

    Parameters
    ----------
    step
        The exact distance of two numbers.
    lowest_code, highest_code
        The multiples that can be stored.
    code_bits
        Bits of a code in two's complement; 0: the codes are signed whole numbers.
    digits
        Digits before and after the point; none for a format with bits.
    """

    step: Fraction
    lowest_code: int
    highest_code: int
    code_bits: int = 0
    digits: tuple[int, int] | None = None

    @property
    def exponent_bits(self) -> int:
        return 0

    @property
    def fraction_bits(self) -> int:
        return max(self.code_bits - 1, 0)

    @property
    def bits(self) -> int:
        return self.code_bits

    @property
    def largest(self) -> float:
        return float(self.highest_code * self.step)

    @property
    def lowest(self) -> float:
        return float(self.lowest_code * self.step)

    @property
    def smallest(self) -> float:
        return float(self.step)

    @property
    def smallest_normal(self) -> float:
        return float(self.step)

    def spacing(self, value: float) -> float:
        return float(self.step) if math.isfinite(self.round(_one_number(value))) else math.nan

    def neighbours(self, value: float) -> Neighbours:
        stored = self.round(_one_number(value))
        if math.isnan(stored):
            return Neighbours(math.nan, math.nan)
        multiple = int(self._multiples(np.asarray(stored))[()])

        def at(multiple: int) -> float:
            return float(multiple * self.step) if self.lowest_code <= multiple <= self.highest_code else math.nan

        return Neighbours(at(multiple - 1), at(multiple + 1))

    def _multiples(self, values: Floats) -> Floats:
        """The nearest whole multiples of the step; exact in the range."""
        with np.errstate(over="ignore", invalid="ignore"):
            quotients = values / float(self.step) if self._float_step else values * float(self.step.denominator)
            size = np.abs(quotients)
            # The quotient is itself rounded. Where that may decide between two multiples, it is decided exactly.
            unsure = (np.abs(size - np.floor(size) - 0.5) <= 1e-15 * size) & (size <= 2 * self.highest_code + 2)
        multiples = np.array(np.rint(quotients))
        for place in np.flatnonzero(unsure):
            multiples.flat[place] = round(Fraction(float(values.flat[place])) / self.step)
        return multiples + 0.0  # there is no -0

    def _rounded(self, values: Floats) -> Floats:
        return self._times_step(self._multiples(values))

    def _times_step(self, multiples: Floats) -> Floats:
        with np.errstate(over="ignore", invalid="ignore"):
            return multiples * float(self.step) if self._float_step else multiples / float(self.step.denominator)

    @property
    def _float_step(self) -> bool:
        """Whether the step is a float; else it is one part of a power of ten."""
        return Fraction(float(self.step)) == self.step

    def _codes(self, stored: Floats) -> Codes:
        if not np.isfinite(stored).all():
            raise FormatError(
                f"{self.name}: got a number that it cannot store, expected {self.lowest:.15g} to {self.largest:.15g}, and not NaN"
            )
        multiples = self._multiples(stored).astype(np.int64)
        return multiples & ((1 << self.code_bits) - 1) if self.code_bits else multiples

    def _values(self, codes: Codes) -> Floats:
        if self.code_bits:
            half = 1 << (self.code_bits - 1)
            codes = (codes ^ half) - half
        return self._times_step(codes.astype(np.float64))

    def _code_range(self) -> tuple[int, int]:
        return (0, (1 << self.code_bits) - 1) if self.code_bits else (self.lowest_code, self.highest_code)


def int8(scale: float = 1.0) -> GridFormat:
    """Whole multiples of `scale` from -128 to 127 times; what is beyond is stored as the nearest of them (it saturates).

    As ``torch.quantize_per_tensor`` with zero point 0, but divided exactly. There is no -0, and no code for NaN.

    Raises
    ------
    FormatError
        When the scale is not a finite number above 0, or 127 times it is none.
    """
    try:
        number = float(scale)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (number >= 2.0**-1022 and math.isfinite(128.0 * number)):
        raise FormatError(f"int8: got the scale {scale!r}, expected a finite number above 0, such as 0.05")
    return GridFormat(name="int8", overflow="saturate", step=Fraction(number), lowest_code=-128, highest_code=127, code_bits=8)


def fixed_point(before: int = 4, after: int = 2) -> GridFormat:
    """A sign, `before` decimal digits before the point and `after` after it; what is larger does not fit (NaN).

    >>> money = fixed_point(4, 2)
    >>> money.round(1234.56), money.round(0.0001), money.round(1234567.0)
    (1234.56, 0.0, nan)

    Raises
    ------
    FormatError
        When a count is no whole number from 0 on, or there are none or more than 15 in all.
    """
    digits = range(MOST_DIGITS + 1)
    if before not in digits or after not in digits or before + after not in digits[1:]:
        raise FormatError(
            f"fixed point: got {before!r} digits before the point and {after!r} after it, expected 1 to {MOST_DIGITS} in all"
        )
    before, after = int(before), int(after)
    most = 10 ** (before + after) - 1
    return GridFormat(
        name=f"fixed {before}+{after}", overflow="nan", step=Fraction(1, 10**after), lowest_code=-most, highest_code=most,
        digits=(before, after),
    )  # fmt: skip


FORMATS: Mapping[str, FloatFormat] = MappingProxyType(
    {
        # as torch.float32
        "fp32": FloatFormat(name="fp32", exponent_width=8, fraction_width=23, nan_fraction=1 << 22, overflow="inf"),
        # what tensor cores multiply when TF32 is allowed, in the top 19 bits of an fp32: nearest-even here; a GPU may truncate
        "tf32": FloatFormat(name="tf32", exponent_width=8, fraction_width=10, nan_fraction=1 << 9, overflow="inf"),
        # as torch.float16: inf from 65520 on, the middle between the largest number and the next that there would be
        "fp16": FloatFormat(name="fp16", exponent_width=5, fraction_width=10, nan_fraction=1 << 9, overflow="inf"),
        # as torch.bfloat16: the upper half of an fp32
        "bf16": FloatFormat(name="bf16", exponent_width=8, fraction_width=7, nan_fraction=1 << 6, overflow="inf"),
        # as torch.float8_e4m3fn. torch (2.13: CPU seen; CUDA has the same source) stores what is too large, and inf too, as 448;
        # its earlier versions and ml_dtypes make it NaN: dataclasses.replace(FORMATS["fp8_e4m3"], overflow="nan")
        "fp8_e4m3": FloatFormat(
            name="fp8_e4m3", exponent_width=4, fraction_width=3, nan_fraction=7, has_inf=False, overflow="saturate"
        ),
        # as torch.float8_e5m2: inf from 61440 on
        "fp8_e5m2": FloatFormat(name="fp8_e5m2", exponent_width=5, fraction_width=2, nan_fraction=3, overflow="inf"),
    }
)
"""The floating-point formats by name."""
NAMES = (*FORMATS, "int8")


def format_of(name: str | Format, *, scale: float | None = None) -> Format:
    """The format of a name: one of ``fp32 tf32 fp16 bf16 fp8_e4m3 fp8_e5m2 int8``; a `Format` is given back.

    Parameters
    ----------
    name
        One of these, or a `Format`.
    scale
        Of ``"int8"``, by default 1.

    Raises
    ------
    FormatError
        When there is no such format, or a scale is given for one that has none.
    """
    if name == "int8":
        return int8(1.0 if scale is None else scale)
    if scale is not None:
        raise FormatError(f"scale: got {scale!r} for {name if isinstance(name, str) else name.name}, expected it for 'int8' only")
    if isinstance(name, Format):
        return name
    given: object = name  # whatever it is, a list perhaps
    if not isinstance(given, str) or given not in FORMATS:
        raise FormatError(f"format: got {name!r}, expected one of {', '.join(NAMES)}, or fixed_point(before, after)")
    return FORMATS[name]


@overload
def round_to(value: float, name: str | Format, *, scale: float | None = None) -> float: ...
@overload
def round_to(value: npt.ArrayLike, name: str | Format, *, scale: float | None = None) -> Floats | float: ...
def round_to(value: npt.ArrayLike, name: str | Format, *, scale: float | None = None) -> Floats | float:
    """What a format stores for a value, or for each of an array: the nearest number, of two equally near the even one.

    Parameters
    ----------
    value
        float64, or what becomes that exactly.
    name, scale
        As in `format_of`.

    Returns
    -------
    float or ndarray of float64
        Of the shape of `value`. Too large numbers are what torch's cast makes of them: inf in fp16 from 65520 on; see `FORMATS`.

    Raises
    ------
    FormatError
        When there is no such format or no such number.

    Examples
    --------
    >>> round_to(0.1, "fp16"), round_to(2e-8, "fp16"), round_to(65520.0, "fp16"), round_to(7.0, "int8", scale=0.5)
    (0.0999755859375, 0.0, inf, 7.0)
    >>> round_to(2e-7, "fp16") == 3 * 2**-24  # a subnormal
    True
    """
    return format_of(name, scale=scale).round(value)


class RoundTrip(NamedTuple):
    """A value times a scale, what is stored of it, and that divided by the scale."""

    scaled: float
    stored: float
    unscaled: float


def scaled_round_trip(value: float, scale: float, name: str | Format) -> RoundTrip:
    """Scale, store, unscale, as loss scaling does with gradients; the arithmetic is that of float64.

    Parameters
    ----------
    value
        Of the gradient.
    scale
        What it is multiplied by before it is stored.
    name
        As in `format_of`.

    Raises
    ------
    FormatError
        When the value is no number, the scale is not a finite number above 0, or there is no such format.
    """
    factor = _one_number(scale, "scale")
    if not 0 < factor < math.inf:
        raise FormatError(f"scale: got {scale!r}, expected a finite number above 0, such as 2**16")
    scaled = _one_number(value) * factor
    stored = format_of(name).round(scaled)
    return RoundTrip(scaled, stored, stored / factor)


@overload
def update_survives(w: float, g: float, lr: float, name: str | Format) -> bool: ...
@overload
def update_survives(w: npt.ArrayLike, g: npt.ArrayLike, lr: npt.ArrayLike, name: str | Format) -> Bools | bool: ...
def update_survives(w: npt.ArrayLike, g: npt.ArrayLike, lr: npt.ArrayLike, name: str | Format) -> Bools | bool:
    """Whether a weight that is kept in a format is another after ``w - lr * g``.

    The weight is stored first, the update is computed in float64 from the gradient as it is, and what comes out is stored. What
    is less than half of the weight's spacing is lost. Where one of the three is NaN, nothing survives.

    Parameters
    ----------
    w, g, lr
        The weight, its gradient and the learning rate, numbers or arrays.
    name
        As in `format_of`.

    Raises
    ------
    FormatError
        When there is no such format, one of the three is no number, or their shapes do not fit together.
    """
    kept = format_of(name)
    before = np.asarray(kept.round(w))
    gradient, _ = _floats(g, "g")
    rate, _ = _floats(lr, "lr")
    with np.errstate(over="ignore", invalid="ignore"):
        try:
            wanted = before - rate * gradient
        except ValueError:
            shapes = f"{before.shape}, {gradient.shape} and {rate.shape}"
            raise FormatError(f"w, g, lr: got the shapes {shapes}, expected such as can be broadcast together") from None
        after = np.asarray(kept.round(wanted))
    differs = np.asarray((before != after) & ~np.isnan(before) & ~np.isnan(wanted))
    return bool(differs) if differs.ndim == 0 else differs


def _floats(value: Any, name: str = "value") -> tuple[Floats, bool]:
    """As float64, and whether it is a single number."""
    try:
        values = np.asarray(_out_of_torch(value))
        if values.dtype.kind in "fiub":
            with np.errstate(invalid="ignore"):  # some NaNs are said to be invalid
                floats = values.astype(np.float64)
        elif values.dtype.kind == "O" and values.ndim == 0:
            floats = np.asarray(float(value))  # a large int, a Fraction
        else:
            floats = values.astype(np.float64, casting="safe")  # number types of other packages
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last: a tensor without numbers, or among others in a list
        raise FormatError(f"{name}: got {value!r}, expected a real number or an array of them") from None
    return floats, floats.ndim == 0


def _one_number(value: Any, name: str = "value") -> float:
    floats, scalar = _floats(value, name)
    if not scalar:
        raise FormatError(f"{name}: got {value!r}, expected a single number")
    return float(floats[()])


def _out_of_torch(value: Any) -> Any:
    """A tensor, known by its methods, as what numpy can read: without a graph, on the host, in float64 where it has fractions."""
    if not (hasattr(value, "detach") and hasattr(value, "is_floating_point")):
        return value
    value = value.detach().cpu()
    return value.double() if value.is_floating_point() else value
