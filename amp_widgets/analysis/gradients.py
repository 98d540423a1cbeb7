"""What fp16 or bf16 makes of the gradients of a step, at the loss scale that it had or at any other: counted, not run."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from amp_widgets.analysis.table import table_html, table_text
from amp_widgets.core.gradient_probe import (
    BUCKETS,
    HIGHEST_EXPONENT,
    INF_BUCKET,
    LOWEST_EXPONENT,
    NAN_BUCKET,
    SUBNORMAL_BUCKET,
    ZERO_BUCKET,
    CountedGradients,
    Family,
    GradientCounts,
)
from amp_widgets.core.layers import is_glob, parts_match
from amp_widgets.core.settings import format_scale
from amp_widgets.errors import FormatError, LayerError

HalfFormat = Literal["fp16", "bf16"]
EXPONENTS = tuple(range(LOWEST_EXPONENT - 1, HIGHEST_EXPONENT + 1))
"""Of `LayerRange.by_exponent`; the first stands for all that is smaller than 2^-126."""
MOST_EXPONENT = 40
"""Scales from 1 to 2 to this power are offered."""


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
        Become inf; one of them is enough to have the step skipped.
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
    layer, family, dtype, arrivals, elements
        As in `CountedGradients`; where several rows were added, what they have in common or ``""``.
    scale
        The loss scale that they had been multiplied by.
    weights
        About how many there are, by bucket, also where not all were looked at. Shape ``(BUCKETS,)``, float64.
    """

    layer: str
    family: Family | Literal[""]
    dtype: str
    arrivals: int
    elements: int
    scale: float
    weights: npt.NDArray[np.float64]

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
        that an edge goes through is taken to be spread evenly over its exponents.

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
    def largest(self) -> float:
        """A number that the largest finite one that was looked at, as stored, is not above; 0 where all were zero."""
        places = np.flatnonzero(self.weights[:INF_BUCKET])
        return 0.0 if not places.size or places[-1] == ZERO_BUCKET else float(_edges()[places[-1]])

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
        The one up to there at which the fewest become zero, then the fewest lose bits; of equals the smallest.
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
        """What a `GradientProbe` has counted."""
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

    def matching(self, pattern: str) -> GradientRange:
        """Of layers that fit a glob as it is used for checkpointing, or several with spaces between; without ``*``, ``?`` and
        ``[`` a part of the name is enough. An empty one fits all."""
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
        """One layer, its formats taken together.

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
        """Of all outputs that are `at_stake`; see `LayerRange.shares`."""
        return self.total.shares(scale, format)

    def safe_scale(self, *, margin: float = 2.0, format: HalfFormat = "fp16") -> SafeScale:
        """Loss scales that suit these gradients. The parameters' count for what overflows: fp16 holds theirs as well, at first.

        Parameters
        ----------
        margin
            How much larger gradients may become without overflowing; at least 1.

        Raises
        ------
        FormatError
            When the format is none of those that are known, or the margin is below 1.
        """
        zones = _zones(format)
        if not margin >= 1:
            raise FormatError(f"margin: got {margin!r}, expected 1 or more")
        rows = (*self.at_stake, *self.parameters)
        largest = max((row.largest for row in rows), default=0.0)
        total = self.total
        if not largest or any(row.infs or row.nans for row in rows):
            return SafeScale(largest=None, least_loss=None)
        highest = min(_power_below(zones.overflow / margin / largest * self.scale), MOST_EXPONENT)
        if highest < 0:
            return SafeScale(largest=None, least_loss=None)
        found = {exponent: total.shares(2.0**exponent, format) for exponent in range(highest + 1)}
        best = min(found, key=lambda exponent: (found[exponent].flushed, found[exponent].subnormal, exponent))
        return SafeScale(largest=2.0**highest, least_loss=2.0**best)

    def first_nonfinite(self) -> LayerRange | None:
        """The output whose gradient, in the order of production, was the first with inf or NaN; None when none had any."""
        return next((row for row in self.outputs if row.infs or row.nans), None)

    def sentences(self, scale: float | None = None, format: HalfFormat = "fp16") -> tuple[str, ...]:
        """In words what a format makes of the gradients at a scale, in all."""
        return tuple(_sentences(self, self.scale if scale is None else scale, format))

    def worst(self, scale: float | None = None, format: HalfFormat = "fp16") -> tuple[tuple[LayerRange, Shares], ...]:
        """The outputs `at_stake` with their shares: first those that overflow most, then those that lose most."""
        rows = [(row, row.shares(scale, format)) for row in self.at_stake]
        return tuple(sorted(rows, key=lambda pair: _badness(pair[1]), reverse=True))

    def __repr__(self) -> str:
        return "\n".join([*self.sentences(), *table_text(self._rows(), words=(0, 1)), *self.notes])

    def _repr_html_(self) -> str:
        words = "".join(f"<div>{html.escape(sentence)}</div>" for sentence in self.sentences())
        return f"<div>{words}{table_html(self._rows(), words=(0, 1))}</div>"

    def _rows(self) -> list[tuple[str, ...]]:
        shown = self.worst()[:_SHOWN]
        rows = [
            (row.layer, row.dtype, *(percent(share) for share in (s.flushed, s.subnormal, s.normal, s.overflow, s.zeros)))
            for row, s in shown
        ]
        return [("layer", "stored in", "to zero", "subnormal", "normal", "to inf", "zero already"), *rows]


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
        scale=rows[0].scale if rows else scale,
        weights=np.sum([row.weights for row in rows], axis=0) if rows else np.zeros(BUCKETS),
    )


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


def _layer_range(row: CountedGradients, scale: float) -> LayerRange:
    counted = int(row.counts.sum())
    weights = row.counts.astype(np.float64) * (row.elements / counted if counted else 0.0)
    return LayerRange(
        layer=row.layer, family=row.family, dtype=row.dtype, arrivals=row.arrivals, elements=row.elements, scale=scale,
        weights=weights,
    )  # fmt: skip


def _zones(format: str) -> Zones:
    if format not in ZONES:
        raise FormatError(f"format: got {format!r}, expected one of {', '.join(map(repr, ZONES))}")
    return ZONES[format]


def _power_below(value: float) -> int:
    """The largest exponent whose power of two is below a positive number."""
    mantissa, power = math.frexp(value)
    return power - 2 if mantissa == 0.5 else power - 1


def _checked(scale: float) -> float:
    if not 0 < scale < math.inf:
        raise FormatError(f"scale: got {scale!r}, expected a number above 0")
    return float(scale)


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


def _badness(shares: Shares) -> tuple[Any, ...]:
    known = [0.0 if math.isnan(share) else share for share in (shares.overflow, shares.flushed, shares.subnormal)]
    return shares.nonfinite > 0, known[0] > 0, known[0], known[1], known[2]


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
    if shares.counted:
        who = "" if shares.nonfinite else " of the gradients"
        loses = f"{percent(shares.flushed)}{who} become zero, {percent(shares.subnormal)} keep fewer bits"
        too_large = "none overflows" if not shares.overflow else f"{percent(shares.overflow)} overflow: the step would be skipped"
        yield f"{format} at {_at(scale)}{', of the others' if shares.nonfinite else ''}: {loses}, {too_large}"
    else:
        yield "The others are zero" if shares.nonfinite else "All gradients are zero"
    if shares.zeros and shares.counted:
        said = f"{percent(shares.zeros)} were zero already when they were counted, and are not in these shares"
        because = ""
        if found.in_half:
            because = (
                f": those that had become zero at {_at(found.scale)} are among them and cannot be told from true "
                "zeros; a step in fp32 or bf16, or one at a higher scale, shows them"
            )
        yield said + because


def _at(scale: float) -> str:
    return f"scale {format_scale(scale)}" if scale != 1 else "scale 1 (no scaling)"
