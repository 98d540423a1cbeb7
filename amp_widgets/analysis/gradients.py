"""What fp16 or bf16 makes of the gradients of a step, at the loss scale that it had or at any other: counted, not run."""

from __future__ import annotations

import dataclasses
import functools
import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from amp_widgets.core.globs import is_glob, parts_match
from amp_widgets.core.gradient_counts import (
    BUCKETS,
    HIGHEST_EXPONENT,
    INF_BUCKET,
    LOWEST_EXPONENT,
    MODEL,
    NAN_BUCKET,
    SUBNORMAL_BUCKET,
    ZERO_BUCKET,
    CountedGradients,
    Family,
    GradientCounts,
    larger,
)
from amp_widgets.core.settings import format_scale
from amp_widgets.core.table import table_html, table_text, told
from amp_widgets.errors import FormatError, LayerError
from amp_widgets.language import in_language, marked_all

HalfFormat = Literal["fp16", "bf16"]
EXPONENTS = tuple(range(LOWEST_EXPONENT - 1, HIGHEST_EXPONENT + 1))
"""Of `LayerRange.by_exponent`; the first stands for all that is smaller than 2^-126."""
MOST_EXPONENT = 40
"""Scales from 1 to 2 to this power are offered."""
HEADROOM = 8.0
"""How much larger gradients may become at the scale that is suggested, if that costs nothing: they differ from step to step."""
HIDDEN = 0.5
"""With a larger share of zeros that may have been something else, those that are left tell nothing of the scale."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Zones:
    """Where a format loses numbers, by their size.

    Attributes
    ----------
    flushed
        What is not larger becomes zero: half of the smallest number, which is a tie, and rounds to even.
    normal
        What is smaller, and not zero, keeps fewer bits.
    overflow
        What is not smaller becomes infinity: the largest number and half of a step, which is a tie, and rounds up.
    """

    flushed: float
    normal: float
    overflow: float


ZONES = MappingProxyType(
    {
        "fp16": Zones(flushed=2.0**-25, normal=2.0**-14, overflow=65520.0),
        "bf16": Zones(flushed=2.0**-134, normal=2.0**-126, overflow=2.0**128 * (1 - 2.0**-9)),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """What becomes of gradients in a format. The four are of those that are neither zero nor inf or NaN, and add up to 1.

    Attributes
    ----------
    flushed
        Become zero.
    subnormal
        Are kept with fewer bits.
    normal
        Are kept as well as the format can.
    overflow
        Become inf; one of them is enough to have the step skipped. 0 only where none of all gradients does, also where the other
        shares are of a sample.
    counted
        How many gradients these are shares of, about. 0: all shares are NaN.
    zeros
        The share of exact zeros among all gradients. They may have been zero from the beginning, or have become it already in
        the format in which they were stored: nobody can tell afterwards, and they are none of `flushed`.
    nonfinite
        The share of inf and NaN among all gradients.
    """

    flushed: float
    subnormal: float
    normal: float
    overflow: float
    counted: float
    zeros: float
    nonfinite: float

    @property
    def lost(self) -> float:
        """Flushed or overflowed."""
        return self.flushed + self.overflow


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerRange:
    """How large the gradients of a layer are, as they were stored in one format.

    Attributes
    ----------
    layer, family, dtype, arrivals, elements, looked_at, peaks, wide
        As in `CountedGradients`; where several rows were added, what they have in common or ``""``.
    scale
        The loss scale that they had been multiplied by.
    weights
        About how many there are, by bucket. Where only a sample was looked at, and the largest of all was not in it, that one is
        there nevertheless. Shape ``(BUCKETS,)``, float64.
    """

    layer: str
    family: Family | Literal[""]
    dtype: str
    arrivals: int
    elements: int
    looked_at: int
    scale: float
    weights: npt.NDArray[np.float64]
    peaks: Mapping[str, float]
    wide: bool = False

    def shares(self, scale: float | None = None, format: HalfFormat = "fp16") -> Shares:
        """What a format would make of these gradients at a loss scale.

        Parameters
        ----------
        scale
            Above 0; None for the one that they had.
        format
            ``"fp16"`` or ``"bf16"``.

        Notes
        -----
        Exact for what was looked at where `scale` differs by a power of two, but for two things: fp16 rounds the largest
        thousandth below 2^-14 up to it; and what is below 2^-126 is taken to be spread evenly there. With other factors, a bucket
        that an edge goes through is taken to be spread evenly over its exponents. Whether any overflow is exact in all cases.
        Where a sample was looked at, the standard error of a share is 0.28 percentage points at most (0.78 of parameters), less
        where few are meant: see `amp_widgets.core.gradient_probe.SAMPLE_ELEMENTS`.

        Raises
        ------
        FormatError
            When the format is none of these, or `scale` is no number above 0.
        """
        zones = _zones(format)
        factor = (self.scale if scale is None else _checked(scale)) / self.scale
        known = self.weights[SUBNORMAL_BUCKET:INF_BUCKET]
        total = float(known.sum())
        everything = float(self.weights.sum())
        zeros = float(self.weights[ZERO_BUCKET]) / everything if everything else math.nan
        nonfinite = float(self.weights[INF_BUCKET:].sum()) / everything if everything else math.nan
        if not total:
            return Shares(
                flushed=math.nan, subnormal=math.nan, normal=math.nan, overflow=math.nan,
                counted=0.0, zeros=zeros, nonfinite=nonfinite,
            )  # fmt: skip
        flushed = _part_below(zones.flushed / factor, included=True)
        small = np.maximum(_part_below(zones.normal / factor, included=False), flushed)
        stored = np.maximum(_part_below(zones.overflow / factor, included=False), small)
        if self.largest * factor < zones.overflow:
            stored[:] = 1.0  # also of a bucket that the edge goes through
        return Shares(
            flushed=float(known @ flushed) / total,
            subnormal=float(known @ (small - flushed)) / total,
            normal=float(known @ (stored - small)) / total,
            overflow=float(known @ (1 - stored)) / total,
            counted=total,
            zeros=zeros,
            nonfinite=nonfinite,
        )

    @property
    def by_exponent(self) -> npt.NDArray[np.float64]:
        """About how many there are of each of `EXPONENTS`, as stored: from 2^e to below 2^(e+1)."""
        found: npt.NDArray[np.float64] = self.weights[3:INF_BUCKET].reshape(-1, 3).sum(axis=1)
        return np.concatenate([[self.weights[SUBNORMAL_BUCKET:3].sum()], found])

    @property
    def peak(self) -> float:
        """The largest absolute value of all, as stored, exactly; inf where one is inf, NaN where one is NaN."""
        return functools.reduce(larger, self.peaks.values(), 0.0)

    @property
    def finite(self) -> bool:
        """Whether none of all is inf or NaN."""
        return math.isfinite(self.peak)

    @property
    def largest(self) -> float:
        """The largest absolute value, as stored; where one is inf or NaN, about the largest finite one that was looked at."""
        if self.finite:
            return self.peak
        places = np.flatnonzero(self.weights[:INF_BUCKET])
        return 0.0 if not places.size or places[-1] == ZERO_BUCKET else float(_edges()[places[-1]])

    @property
    def counted_text(self) -> str:
        """How many there are, and how many of them were looked at if these are fewer: ``32,768 of 1,048,576``."""
        return f"{self.elements:,}" if self.looked_at >= self.elements else f"{self.looked_at:,} of {self.elements:,}"

    def full_name(self, name: str) -> str:
        """Of a parameter in `peaks`, as the model calls it."""
        return name if self.layer == MODEL else f"{self.layer}.{name}"

    @property
    def zeros(self) -> float:
        """About how many exact zeros."""
        return float(self.weights[ZERO_BUCKET])

    @property
    def infs(self) -> float:
        """About how many infinities."""
        return float(self.weights[INF_BUCKET])

    @property
    def nans(self) -> float:
        """About how many NaN."""
        return float(self.weights[NAN_BUCKET])


@dataclass(frozen=True, kw_only=True, slots=True)
class SafeScale:
    """Loss scales, powers of two, that suit the gradients of a step.

    None: there is none between 1 and 2^40; or some gradients were inf or NaN, and how large they would have been is not known.

    Attributes
    ----------
    largest
        The largest at which nothing overflows, with the margin that was asked for.
    least_loss
        The one up to there at which the fewest become zero, then the fewest lose bits. Of equals the largest that leaves a factor
        of `HEADROOM` below overflow: a higher scale also saves the smaller gradients of later steps. Where none of them leaves
        so much, the smallest.
    """

    largest: float | None
    least_loss: float | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GradientRange:
    """How large the gradients of a step are, layer by layer.

    Attributes
    ----------
    step
        Its number.
    scale
        The loss scale that it had.
    outputs
        Gradients with respect to what layers return, in the order in which they were produced; a layer has a row for each format.
    parameters
        With respect to layers' parameters, likewise.
    notes
        What was not counted, in sentences.
    """

    step: int
    scale: float
    outputs: tuple[LayerRange, ...]
    parameters: tuple[LayerRange, ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, counts: GradientCounts) -> GradientRange:
        """What a `GradientProbe` has counted: its `counts`."""
        rows = [_layer_range(row, counts.scale) for row in counts.rows]
        return cls(
            step=counts.step,
            scale=counts.scale,
            outputs=tuple(row for row in rows if row.family == "output"),
            parameters=tuple(row for row in rows if row.family == "parameter"),
            notes=counts.notes,
        )

    @property
    def in_half(self) -> bool:
        """Whether some outputs' gradients were stored in fp16 or bf16; else all of them are taken for what would be."""
        return any(row.dtype in ZONES for row in self.outputs)

    @property
    def at_stake(self) -> tuple[LayerRange, ...]:
        """The outputs whose gradients a narrow format holds: those that are stored so, or in a step without such, all."""
        return tuple(row for row in self.outputs if row.dtype in ZONES) if self.in_half else self.outputs

    @property
    def parameters_at_stake(self) -> tuple[LayerRange, ...]:
        """The parameters whose gradients fp16 holds on their way, though they arrive in fp32.

        Not those which autocast leaves alone, of normalisations and embeddings; nor, in a step in 16 bits, those of a layer whose
        own outputs all have fp32 gradients: it is kept in fp32.
        """
        narrow = {row.layer for row in self.at_stake}
        kept = {row.layer for row in self.outputs} - narrow
        return tuple(row for row in self.parameters if not row.wide and row.layer not in kept)

    def overflowing(self, scale: float | None = None, format: HalfFormat = "fp16") -> tuple[str, ...]:
        """The parameters whose gradients would overflow at a loss scale, the largest first: one is enough for a skipped step.

        Parameters
        ----------
        scale, format
            As for `LayerRange.shares`. What had overflowed already is known to do so at the same scale and above, and not below.

        Raises
        ------
        FormatError
            When the format is none of those that are known, or `scale` is no number above 0.
        """
        zones = _zones(format)
        factor = (self.scale if scale is None else _checked(scale)) / self.scale
        found = [
            (peak if math.isfinite(peak) else math.inf, row.full_name(name))
            for row in self.parameters_at_stake
            for name, peak in row.peaks.items()
            if (peak * factor >= zones.overflow if math.isfinite(peak) else factor >= 1)
        ]
        return tuple(name for _, name in sorted(found, key=lambda pair: -pair[0]))

    @property
    def zeros_hide(self) -> bool:
        """Whether so many of the gradients were zero, and may have become it in fp16, that the others tell nothing of the scale.

        A layer's zeros are taken for true ones where of its other gradients hardly any is small enough to have lost bits.
        """
        rows = [row for row in self.at_stake if row.dtype == "fp16"]
        hidden = sum(row.zeros for row in rows if not row.shares().subnormal <= _FEW)
        return hidden > HIDDEN * sum(row.elements for row in self.at_stake)

    def matching(self, pattern: str) -> GradientRange:
        """Of layers that fit the `pattern`: a glob as it is used for checkpointing, or several with spaces between.

        Without ``*``, ``?`` and ``[`` a part of the name is enough. An empty one fits all.
        """
        patterns = pattern.replace(",", " ").split()
        if not patterns:
            return self
        return GradientRange(
            step=self.step,
            scale=self.scale,
            outputs=tuple(row for row in self.outputs if _fits(row.layer, patterns)),
            parameters=tuple(row for row in self.parameters if _fits(row.layer, patterns)),
            notes=self.notes,
        )

    def layer(self, name: str, family: Family = "output") -> LayerRange:
        """The layer of this `name`, its formats taken together; `family` says whether of its outputs or its parameters.

        Raises
        ------
        LayerError
            When nothing was counted of it.
        """
        rows = [row for row in (self.outputs if family == "output" else self.parameters) if row.layer == name]
        if not rows:
            raise LayerError(f"gradients: got the layer {name!r}, expected one that had gradients in step {self.step}")
        return together(rows, name)

    @property
    def total(self) -> LayerRange:
        """Of all outputs that are `at_stake` taken together."""
        return together(self.at_stake, "", scale=self.scale)

    def shares(self, scale: float | None = None, format: HalfFormat = "fp16") -> Shares:
        """Of all outputs that are `at_stake`, at a `scale` in a `format`; see `LayerRange.shares`."""
        return self.total.shares(scale, format)

    def safe_scale(self, *, margin: float = 2.0, format: HalfFormat = "fp16") -> SafeScale:
        """Loss scales that suit these gradients. Those of `parameters_at_stake` count for what overflows.

        Parameters
        ----------
        margin
            How much larger gradients may become without overflowing; at least 1.
        format
            ``"fp16"`` or ``"bf16"``.

        Raises
        ------
        FormatError
            When the format is none of those that are known, or the margin is below 1.
        """
        zones = _zones(format)
        if not _checked(margin, "margin") >= 1:
            raise FormatError(f"margin: got {margin!r}, expected 1 or more")
        rows = (*self.at_stake, *self.parameters_at_stake)
        largest = max((row.largest for row in rows), default=0.0)
        total = self.total
        if not largest or not all(row.finite for row in rows):
            return SafeScale(largest=None, least_loss=None)
        highest = min(_power_below(zones.overflow / margin / largest * self.scale), MOST_EXPONENT)
        if highest < 0:
            return SafeScale(largest=None, least_loss=None)
        found = {exponent: total.shares(2.0**exponent, format) for exponent in range(highest + 1)}
        best = min(found, key=lambda exponent: (found[exponent].flushed, found[exponent].subnormal, exponent))
        with_room = min(_power_below(zones.overflow / max(margin, HEADROOM) / largest * self.scale), MOST_EXPONENT)
        return SafeScale(largest=2.0**highest, least_loss=2.0 ** max(best, with_room))  # up to the highest, none is worse

    def first_nonfinite(self) -> LayerRange | None:
        """The output whose gradient, in the order of production, was the first with inf or NaN; None when none had any."""
        return next((row for row in self.outputs if not row.finite), None)

    def sentences(self, scale: float | None = None, format: HalfFormat = "fp16") -> tuple[str, ...]:
        """In words what a `format` makes of the gradients at a `scale` (None: the one that they had), in all."""
        return tuple(_sentences(self, self.scale if scale is None else scale, format))

    def worst(self, scale: float | None = None, format: HalfFormat = "fp16") -> tuple[tuple[LayerRange, Shares], ...]:
        """The outputs `at_stake` with their shares in a `format` at a `scale`.

        First come those that overflow most, or whose parameters do, then those that lose most.
        """
        rows = [(row, row.shares(scale, format)) for row in self.at_stake]
        too_large = {name.rpartition(".")[0] or MODEL for name in self.overflowing(scale, format)}
        return tuple(sorted(rows, key=lambda pair: _badness(pair[1], pair[0].layer in too_large), reverse=True))

    def _parameters_not_finite(self) -> list[str]:
        return [row.full_name(name) for row in self.parameters for name, peak in row.peaks.items() if not math.isfinite(peak)]

    def __repr__(self) -> str:
        table = table_text(told(self._rows(), sentences=_SENTENCES), words=(0, 1))
        return "\n".join([*map(in_language, self.sentences()), *table, *map(in_language, self.notes)])

    def _repr_html_(self) -> str:
        words = "".join(f"<div>{html.escape(in_language(sentence))}</div>" for sentence in self.sentences())
        return f"<div>{words}{table_html(told(self._rows(), sentences=_SENTENCES), words=(0, 1))}</div>"

    def _rows(self) -> list[tuple[str, ...]]:
        shown, too_large = self.worst()[:_SHOWN], self.overflowing()
        rows = [
            (
                row.layer, row.dtype, *(percent(share) for share in (s.flushed, s.subnormal, s.normal)),
                overflow_text(row.layer, s.overflow, too_large), percent(s.zeros), row.counted_text,
            )
            for row, s in shown
        ]  # fmt: skip
        return [marked_all("layer", "stored in", "to zero", "subnormal", "normal", "to inf", "zero already", "counted"), *rows]


def together(rows: Sequence[LayerRange], layer: str, *, scale: float = 1.0) -> LayerRange:
    """Several rows of one step as one."""
    dtypes = {row.dtype for row in rows}
    families = {row.family for row in rows}
    return LayerRange(
        layer=layer,
        family=families.pop() if len(families) == 1 else "",
        dtype=dtypes.pop() if len(dtypes) == 1 else "",
        arrivals=sum(row.arrivals for row in rows),
        elements=sum(row.elements for row in rows),
        looked_at=sum(row.looked_at for row in rows),
        scale=rows[0].scale if rows else scale,
        weights=np.sum([row.weights for row in rows], axis=0) if rows else np.zeros(BUCKETS),
        peaks={
            name: functools.reduce(larger, (row.peaks[name] for row in rows if name in row.peaks))
            for name in dict.fromkeys(name for row in rows for name in row.peaks)
        },
        wide=bool(rows) and all(row.wide for row in rows),
    )


def overflow_text(layer: str, share: float, too_large: Iterable[str]) -> str:
    """The share of a layer's outputs that overflow, and its parameters among those that do.

    >>> overflow_text("head", 0.0, ["head.weight", "stem.weight"])
    '0 %, its weight'
    """
    names = [name.rpartition(".") for name in too_large]
    return ", its ".join([percent(share), *(name for inside, _, name in names if (inside or MODEL) == layer)])


def percent(share: float) -> str:
    """A share for people; what is not zero is never shown as zero.

    >>> [percent(share) for share in (0.0, 0.00001, 0.0372, 0.5, 0.99999, 1.0, math.nan)]
    ['0 %', '< 0.1 %', '3.7 %', '50 %', '> 99.9 %', '100 %', '–']
    """
    if math.isnan(share):
        return "–"
    if share <= 0.0 or share >= 1.0:
        return f"{share:.0%}".replace("%", " %")
    if share < 0.001:
        return "< 0.1 %"
    if share > 0.999:
        return "> 99.9 %"
    return f"{100 * share:.1f} %" if share < 0.0995 or share > 0.9905 else f"{100 * share:.0f} %"


_SHOWN = 30
_SENTENCES = (5, 7)
_FEW = 0.01
_NAMED = 3


def _layer_range(row: CountedGradients, scale: float) -> LayerRange:
    found = LayerRange(
        layer=row.layer, family=row.family, dtype=row.dtype, arrivals=row.arrivals, elements=row.elements,
        looked_at=row.looked_at, scale=scale, weights=row.counts, peaks=row.peaks, wide=row.wide,
    )  # fmt: skip
    bucket = _bucket(found.peak)
    if row.counts[bucket] or not row.elements:
        return found
    weights = row.counts * ((row.elements - 1) / row.elements)
    weights[bucket] = 1.0
    return dataclasses.replace(found, weights=weights)


def _bucket(value: float) -> int:
    """The same as `amp_widgets.core.gradient_probe.bucket_of`, of one number of fp32."""
    if math.isnan(value):
        return NAN_BUCKET
    bits = int(np.float32(value).view(np.int32))
    return ((bits - 1) >> 23) + (bits >> 23) + ((bits + 0x1000) >> 23) + 1


def _zones(format: object) -> Zones:
    if not isinstance(format, str) or format not in ZONES:
        raise FormatError(f"format: got {format!r}, expected one of {', '.join(map(repr, ZONES))}")
    return ZONES[format]


def _power_below(value: float) -> int:
    """The largest exponent whose power of two is below a positive number."""
    mantissa, power = math.frexp(value)
    return power - 2 if mantissa == 0.5 else power - 1


def _checked(scale: object, name: str = "scale") -> float:
    try:
        number = math.nan if isinstance(scale, (bool, str)) else float(scale)  # type: ignore[arg-type]  # numpy and torch scalars
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 < number < math.inf:
        raise FormatError(f"{name}: got {scale!r}, expected a number above 0")
    return number


def _edges() -> npt.NDArray[np.float64]:
    """The largest fp32 number in each bucket up to the last before inf."""
    powers = 2.0 ** np.arange(LOWEST_EXPONENT, HIGHEST_EXPONENT + 2, dtype=np.float64)
    normal = np.stack([powers[:-1], powers[1:] * (1 - _TOP - _STEP), powers[1:] * (1 - _STEP)], axis=1).ravel()
    return np.concatenate([[0.0, powers[0] * (1 - _TOP), powers[0]], normal])


_TOP = 2.0**-12
"""The part of a power of two below it from which on fp16 rounds up to it."""
_STEP = 2.0**-24
"""The same for the fp32 number below it."""


def _part_below(bound: float, *, included: bool) -> npt.NDArray[np.float64]:
    """The part of each bucket between zero and inf that is below a bound, or at most it."""
    parts = np.zeros(INF_BUCKET - SUBNORMAL_BUCKET)
    if bound >= 2.0 ** (HIGHEST_EXPONENT + 1):
        parts[:] = 1.0
    elif bound < 2.0**LOWEST_EXPONENT:
        parts[:2] = bound / 2.0**LOWEST_EXPONENT
    else:
        mantissa, power = math.frexp(bound)
        way = 2 * mantissa - 1  # from 2^(power - 1) to the next power of two
        first = 3 * (power - 1 - LOWEST_EXPONENT) + 2
        parts[:first] = 1.0
        parts[first] = 1.0 if way else float(included)
        cut = 1 - 2 * _TOP
        parts[first + 1] = min(math.log2(1 + way) / math.log2(1 + cut), 1.0)  # even in the exponent, as gradients mostly are
        parts[first + 2] = max((way - cut) / (1 - cut), 0.0)
    return parts


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(parts_match(name.split("."), one.split(".")) if is_glob(one) else one.lower() in name.lower() for one in patterns)


def _badness(shares: Shares, parameters_overflow: bool) -> tuple[Any, ...]:
    known = [0.0 if math.isnan(share) else share for share in (shares.overflow, shares.flushed, shares.subnormal)]
    return shares.nonfinite > 0, known[0] > 0 or parameters_overflow, known[0], known[1], known[2]


def _sentences(found: GradientRange, scale: float, format: HalfFormat) -> Iterable[str]:
    shares = found.shares(scale, format)
    if not found.outputs:
        yield f"Step {found.step:,}: no gradient with respect to a layer's output was seen"
        return
    if shares.nonfinite:
        yield (
            f"{percent(shares.nonfinite)} of the gradients were inf or NaN at {_at(found.scale)}: how large they would have been "
            "is not known"
        )
    too_large = found.overflowing(scale, format)
    if shares.counted:
        who = "" if shares.nonfinite else " of the gradients"
        loses = f"{percent(shares.flushed)}{who} become zero, {percent(shares.subnormal)} keep fewer bits"
        overflow = "none overflows"
        if shares.overflow:
            overflow = f"{percent(shares.overflow)} overflow: the step would be skipped"
        elif too_large:
            overflow = f"none overflows, but {_gradients_of(too_large)} would: the step would be skipped"
        yield f"{format} at {_at(scale)}{', of the others' if shares.nonfinite else ''}: {loses}, {overflow}"
    else:
        yield "The others are zero" if shares.nonfinite else "All gradients are zero"
    if too_large and (shares.overflow or not shares.counted):
        verb = "overflow as well" if shares.overflow else "overflow: the step would be skipped"
        yield f"{format} at {_at(scale)}: {_gradients_of(too_large)} would {verb}"
    gone = [] if scale >= found.scale else found._parameters_not_finite()
    if gone:
        at = _at(found.scale)
        yield (
            f"The gradient of {gone[0]} was inf or NaN at {at}: whether that is so at this one is not known"
            if len(gone) == 1
            else f"The gradients of {_some(gone)} were inf or NaN at {at}: whether that is so at this one is not known"
        )
    total = found.total
    if total.looked_at < total.elements:
        yield (
            f"Shares are from a sample of {total.counted_text}, each layer's right to within 1 percentage point; what overflows, "
            "and what was inf or NaN, was looked for in all"
        )
    if shares.zeros and shares.counted:
        said = f"{percent(shares.zeros)} were zero already when they were counted, and are not in these shares"
        because = ""
        if any(row.dtype == "fp16" for row in found.outputs):
            because = (
                f": those that had become zero at {_at(found.scale)} are among them and cannot be told from true zeros, so that "
                "no scale is seen to save them; a step in fp32 or bf16, or one at a higher scale, shows them"
            )
        yield said + because


def _gradients_of(names: Sequence[str]) -> str:
    listed, more = ", ".join(names[:_NAMED]), len(names) - _NAMED
    if more > 0:
        return f"the gradients of {listed} and {more} more"
    return f"the gradient{'s' if len(names) > 1 else ''} of {listed}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def _at(scale: float) -> str:
    return f"scale {format_scale(scale)}" if scale != 1 else "scale 1 (no scaling)"
