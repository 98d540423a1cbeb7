"""What a format lab shows: a number in every format, what scaling does for it, and whether an update moves a weight."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from amp_widgets.core.formats import (
    FORMATS,
    FloatFormat,
    Format,
    GridFormat,
    fixed_point,
    int8,
    scaled_round_trip,
    update_survives,
)
from amp_widgets.core.settings import format_scale
from amp_widgets.errors import FormatError
from amp_widgets.language import marked, say, say_number
from amp_widgets.widgets.text import UNKNOWN

LOWEST_EXPONENT, HIGHEST_EXPONENT = -150, 130
"""Of two, on the slider and on the bars of the ranges."""
WORDS = {
    "exact": marked("exact"), "rounded": marked("rounded"), "subnormal": marked("subnormal"),
    "underflow": marked("underflow to zero"), "overflow": marked("overflow"), "nan": marked("not a number"),
}  # fmt: skip
TONES = {"exact": "good", "subnormal": "warn", "underflow": "bad", "overflow": "bad"}


class Sample(NamedTuple):
    """One weight of a model.

    Attributes
    ----------
    label
        What it is called.
    w, g, lr
        The weight, its gradient, and the learning rate.
    optimizer
        By name, where its step is not ``lr * g``, as that of plain SGD is; None where the learning rate is only assumed.
    change
        By how much the last step changed the weight, where that is known.
    step
        Steps completed when it was read, where that is known.
    """

    label: str
    w: float
    g: float
    lr: float
    optimizer: str | None = ""
    change: float | None = None
    step: int | None = None


class Samples(Protocol):
    """Gives the weights to choose from as they are now; called when the lab is made and when the user reads them again."""

    def __call__(self) -> Iterable[tuple[Any, ...]]:
        """Of each ``(label, w, g, lr)``, and if known what else `Sample` has, in its order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatLabState:
    """All that a format lab shows.

    Parameters
    ----------
    value, text
        The number, and how it was typed.
    flipped
        Format and code of the number, where it was made by flipping a bit: a NaN, for one, has many codes.
    scale, scale_text
        By which the number is multiplied before it is stored, and how that was typed.
    int8_scale
        The step of int8.
    digits
        Of the fixed point, before and after the point.
    samples, picked
        Weights to choose from, and which is chosen.
    """

    value: float = 0.1
    text: str = "0.1"
    flipped: tuple[str, int] | None = None
    scale: float = 1024.0
    scale_text: str = "2^10 = 1024"
    int8_scale: float = 0.01
    digits: tuple[int, int] = (4, 2)
    samples: tuple[Sample, ...] = ()
    picked: int = 0

    @property
    def formats(self) -> tuple[Format, ...]:
        """One a row."""
        return (*FORMATS.values(), int8(self.int8_scale), fixed_point(*self.digits))

    @property
    def exponent(self) -> int:
        """Of two, on the slider."""
        return _exponent(self.value)

    def with_value(self, value: float, text: str | None = None) -> FormatLabState:
        """Another number."""
        return replace(self, value=value, text=plain(value) if text is None else text, flipped=None)

    def with_exponent(self, exponent: int) -> FormatLabState:
        """The number with the same sign and fraction, and another power of two."""
        usable = self.value != 0 and math.isfinite(self.value)
        significand = math.frexp(self.value)[0] * 2 if usable else math.copysign(1.0, self.value)
        return self.with_value(math.ldexp(significand, min(max(exponent, LOWEST_EXPONENT), HIGHEST_EXPONENT)))

    def with_flipped(self, name: str, bit: int) -> FormatLabState:
        """The number that a format has with one bit flipped.

        Raises
        ------
        FormatError
            When there is no such format or bit.
        """
        kind = next((kind for kind in self.formats if kind.name == name), None)
        if kind is None:
            raise FormatError(f"format: got {name!r}, expected one of {', '.join(kind.name for kind in self.formats)}")
        code = self.code_in(kind)
        if code is None:
            raise FormatError(f"{name}: got a bit of {plain(self.value)}, which it cannot store")
        flipped = kind.flip(code, bit)
        return replace(self.with_value(kind.decode(flipped)), flipped=(name, flipped))

    def code_in(self, kind: Format) -> int | None:
        """What the number is stored as; None where there is no code for it."""
        if self.flipped is not None and self.flipped[0] == kind.name:
            return self.flipped[1]
        try:
            return kind.encode(self.value)
        except FormatError:
            return None


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "2e-5 × 1000": {"value": 2e-5, "text": "2e-5", "scale": 1000.0, "scale_text": "1000"},
    "2e-7": {"value": 2e-7, "text": "2e-7"},
    "2e-8": {"value": 2e-8, "text": "2e-8"},
    "1/3": {"value": 1 / 3, "text": "1/3"},
    "65504": {"value": 65504.0, "text": "65504"},
    "65519.99": {"value": 65519.99, "text": "65519.99"},
    "65520": {"value": 65520.0, "text": "65520"},
    "1234.56 (4+2 digits)": {"value": 1234.56, "text": "1234.56", "digits": (4, 2)},
    "0.0001 (4+2 digits)": {"value": 0.0001, "text": "0.0001", "digits": (4, 2)},
    "1234567 (4+2 digits)": {"value": 1234567.0, "text": "1234567", "digits": (4, 2)},
}
"""Button → what it sets."""


def preset_text(name: str) -> str:
    """What the button of a preset says."""
    number, digits, _ = name.partition(" (4+2 digits)")
    return say("{number} (4+2 digits)", number=number) if digits else name


def format_rows(state: FormatLabState) -> list[dict[str, Any]]:
    """Of each format: its bits, what it stores of the number, how far off that is, what is beside it, and the range; as text."""
    return [_row(state, kind) for kind in state.formats]


def scaled_rows(state: FormatLabState) -> list[dict[str, Any]]:
    """Of each format: the number times the scale, what is stored of it, and that divided by the scale."""
    rows = []
    for kind in state.formats:
        trip = scaled_round_trip(state.value, state.scale, kind)
        word, tone = _word(kind, trip.scaled)
        if math.isfinite(state.value) and math.isinf(trip.scaled):  # already as a float64
            word, tone = say(WORDS["overflow"]), TONES["overflow"]
        elif state.value != 0 and trip.scaled == 0:
            word, tone = say(WORDS["underflow"]), TONES["underflow"]
        rows.append(
            {
                "name": kind.name,
                "cells": [_number(trip.scaled), _stored(kind, trip.stored), _number(trip.unscaled)],
                "error": _percent(trip.unscaled, state.value),
                "without": _percent(kind.round(state.value), state.value),
                "word": word,
                "tone": tone,
            }
        )
    return rows


def update_rows(state: FormatLabState) -> list[dict[str, Any]]:
    """Of each format: the chosen weight, that less its update, and whether these differ."""
    if not state.samples:
        return []
    _, w, g, lr, *_ = state.samples[state.picked]
    rows = []
    for kind in state.formats:
        kept = kind.round(w)
        survives = update_survives(w, g, lr, kind)
        rows.append(
            {
                "name": kind.name,
                "cells": [_stored(kind, kept), _number(kind.spacing(w)), _stored(kind, kind.round(kept - lr * g))],
                "word": say("changes") if survives else say("does not change"),
                "tone": "good" if survives else "bad",
            }
        )
    return rows


def picked_sentence(state: FormatLabState) -> str:
    """The chosen weight in numbers."""
    if not state.samples:
        return ""
    _, w, g, lr, _, _, step = state.samples[state.picked]
    when = "" if step is None else say_number(", after {count} step", ", after {count} steps", step)
    return f"w = {_number(w)},  g = {_number(g)},  lr = {_number(lr)}:  lr·g = {_number(lr * g)}{when}"


def optimizer_sentence(state: FormatLabState) -> str:
    """What the model's optimizer does instead of taking ``lr * g``, as far as it is known; nothing where it does that."""
    if not state.samples:
        return ""
    sample = state.samples[state.picked]
    if sample.optimizer is None:
        return say("No optimizer is known that has this weight: lr = {lr} is assumed.", lr=_number(sample.lr))
    if not sample.optimizer:
        return ""
    said = say(
        "Your optimizer is {optimizer}, whose step is not lr·g: the table is what plain SGD would do.", optimizer=sample.optimizer
    )
    if sample.change is None:
        told = say("By how much it has really changed this weight was not seen; read again when one more step is made.")
    else:
        change = _signed(sample.change) if sample.change else "0"
        told = say("Its last step really changed this weight by {change}.", change=change)
    return f"{said} {told}"


def samples_of(weights: Samples | Mapping[str, Sequence[float]], lr: float) -> tuple[Sample, ...]:
    """The weights to choose from.

    Raises
    ------
    FormatError
        When they are not what `FormatLab` expects.
    """
    entries: Iterable[Any]
    if isinstance(weights, Mapping):
        entries = [(label, *pair, lr) for label, pair in weights.items()]
    else:
        entries = weights()
    samples = []
    for entry in entries:
        try:
            label, w, g, rate, *more = entry
            samples.append(Sample(str(label), float(w), float(g), float(rate), *more))
        except (TypeError, ValueError):
            raise FormatError(
                f"weights: got {entry!r}, expected (label, w, g, lr) from a callable, or a mapping of label → (w, g)"
            ) from None
    return tuple(samples)


def plain(value: float) -> str:
    """The shortest text that reads back as the same number.

    >>> plain(0.1), plain(65504.0), plain(2e-8), plain(1e22)
    ('0.1', '65504', '2e-8', '1e22')
    """
    return _tidy(repr(float(value)))


def _row(state: FormatLabState, kind: Format) -> dict[str, Any]:
    code = state.code_in(kind)
    stored = kind.round(state.value)
    word, tone = _word(kind, state.value)
    below, above = kind.neighbours(stored)
    spacing = kind.spacing(stored)
    return {
        "name": kind.name,
        "layout": _layout(kind),
        "groups": [kind.exponent_bits, kind.fraction_bits],
        "bits": "" if code is None or not kind.bits else format(code, f"0{kind.bits}b"),
        "digits": _digits(kind, code),
        "meaning": _meaning(kind, code),
        "stored": _stored(kind, stored),
        "word": word,
        "tone": tone,
        "error": _error(kind, state.value, stored),
        "above": _number(above),
        "below": _number(below),
        "spacing": UNKNOWN if math.isnan(spacing) else _spacing(spacing),
        "range": _range(kind),
        "decades": say("{decades} decades", decades=f"{kind.decades:.1f}"),
        "bar": _bar(kind, state.value),
    }


def _word(kind: Format, value: float) -> tuple[str, str]:
    verdict = kind.verdict(value)
    return say(WORDS[verdict]), TONES.get(verdict, "")


def _layout(kind: Format) -> str:
    if isinstance(kind, FloatFormat):
        return say("{layout} bits", layout=f"1+{kind.exponent_bits}+{kind.fraction_bits}")
    if isinstance(kind, GridFormat) and kind.digits is not None:
        return say("digits")
    return say("8 bits")


def _digits(kind: Format, code: int | None) -> list[str]:
    """Sign, and the digits before and after the point; dashes where the number does not fit."""
    if not isinstance(kind, GridFormat) or kind.digits is None:
        return []
    before, after = kind.digits
    if code is None:
        return [UNKNOWN, UNKNOWN * before, UNKNOWN * after]
    text = f"{abs(code):0{before + after}d}"
    return ["-" if code < 0 else "+", text[:before], text[before:]]


def _meaning(kind: Format, code: int | None) -> str:
    """What the bits say, in the way that one computes it."""
    if code is None:
        return say("no code for it")
    value = kind.decode(code)
    if isinstance(kind, GridFormat):
        if kind.digits is not None:
            return f"{code} / {10 ** kind.digits[1]}"
        return f"{code - 256 if code > 127 else code} × {_number(float(kind.step))}"
    sign, exponent, fraction = kind.fields(code)
    minus = "-" if sign else ""
    if math.isnan(value):
        return say("exponent all ones: NaN") if isinstance(kind, FloatFormat) and kind.has_inf else say("all ones: NaN")
    if math.isinf(value):
        return say("exponent all ones, fraction 0: {value}", value=f"{minus}inf")
    if not isinstance(kind, FloatFormat) or value == 0:
        return f"{minus}0"
    if exponent == 0:
        return say("{value} (subnormal)", value=f"{minus}{fraction} × 2^{kind.lowest_exponent - kind.fraction_bits}")
    significand = 1 + math.ldexp(fraction, -kind.fraction_bits)
    return f"{minus}{significand:.8g} × 2^({exponent}-{kind.bias})"


def _stored(kind: Format, stored: float) -> str:
    if math.isnan(stored):
        return say("does not fit") if isinstance(kind, GridFormat) else "nan"
    return _number(stored)


def _error(kind: Format, value: float, stored: float) -> list[str]:
    """Absolute, relative, and in units of the last place; nothing where there is no error."""
    if not (math.isfinite(value) and math.isfinite(stored)):
        return []
    error = stored - value
    if error == 0:
        return ["0"]
    ulps = abs(error) / kind.spacing(stored)
    return [f"{_signed(error)}", _percent(stored, value), say("{count} ulp", count=_two_digits(ulps))]


def _percent(stored: float, value: float) -> str:
    if stored == value:
        return "0 %"
    if not (math.isfinite(stored) and math.isfinite(value)) or value == 0:
        return UNKNOWN
    return f"{_two_digits(abs(stored - value) / abs(value) * 100)} %"


def _spacing(spacing: float) -> str:
    power = format_scale(spacing)
    return f"{power} = {_short(spacing)}" if power.startswith("2^") else _number(spacing)


def _range(kind: Format) -> str:
    if isinstance(kind, GridFormat):
        return f"{_number(kind.lowest)} … {_number(kind.largest)}"
    return f"±{_short(kind.smallest)} … {_short(kind.largest)}"


def _bar(kind: Format, value: float) -> dict[str, float | None]:
    """Where the range lies on a line of powers of two, in percent: its ends, where its subnormals end, and the number."""
    return {
        "from": _place(math.log2(kind.smallest)),
        "normal": _place(math.log2(kind.smallest_normal)),
        "to": _place(math.log2(kind.largest)),
        "at": _place(math.log2(abs(value))) if value != 0 and math.isfinite(value) else None,
    }


def _place(exponent: float) -> float:
    share = (exponent - LOWEST_EXPONENT) / (HIGHEST_EXPONENT - LOWEST_EXPONENT)
    return round(100 * min(max(share, 0.0), 1.0), 2)


def _exponent(value: float) -> int:
    if value == 0:
        return LOWEST_EXPONENT
    if not math.isfinite(value):
        return HIGHEST_EXPONENT
    return min(max(math.frexp(value)[1] - 1, LOWEST_EXPONENT), HIGHEST_EXPONENT)


def _number(value: float) -> str:
    """Nine digits, by which any two numbers of fp32 differ."""
    return UNKNOWN if math.isnan(value) else _tidy(f"{value:.9g}")


def _short(value: float) -> str:
    """Two digits, but whole numbers as they are."""
    return _tidy(f"{value:.7g}") if value.is_integer() and abs(value) < 1e7 else _tidy(f"{value:.2g}")


def _signed(value: float) -> str:
    return _tidy(f"{value:+.3g}")


def _two_digits(value: float) -> str:
    return _tidy(f"{value:.2g}") if value < 99.5 else _tidy(f"{value:.3g}")


def _tidy(text: str) -> str:
    """Without the zeros of an exponent: ``2e-08`` → ``2e-8``; without ``.0``."""
    digits, e, exponent = text.partition("e")
    digits = digits.removesuffix(".0")
    return f"{digits}e{int(exponent)}" if e else digits
