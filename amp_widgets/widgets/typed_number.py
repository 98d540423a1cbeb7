"""Numbers as people type them: ``2e-8``, ``2**-24``, ``1/3``. Read, never evaluated."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from amp_widgets.errors import FormatError
from amp_widgets.language import marked

MOST_CHARACTERS = 80
BEYOND = marked("got {text}, expected a number within float64: 0, or from 4.9e-324 to 1.8e308 in size")
EXPECTED = marked("expected a number such as 0.1, 2e-8, 2**-24 or 1/3")


def typed_number(text: str) -> float:
    """Numbers and powers, multiplied and divided from left to right, exactly; then the nearest float64.

    >>> typed_number("2e-8"), typed_number("2**-3"), typed_number("1/4"), typed_number("3 * 2^-2"), typed_number("-inf")
    (2e-08, 0.125, 0.25, 0.75, -inf)

    Raises
    ------
    FormatError
        When it cannot be read, or is no float64.
    """
    written = text.strip().lower().replace("−", "-").replace("×", "*")
    written = _THOUSANDS.sub(lambda found: found[0].replace(",", ""), written)
    written = re.sub(r"\s*(\*\*?|/|\^)\s*", r"\1", written)
    special = re.fullmatch(r"([+-]?)(inf|infinity|nan)", written)
    if special is not None:
        return float(written)
    if len(written) > MOST_CHARACTERS:
        raise FormatError(f"got {len(written)} characters, {EXPECTED}")
    sign, size = 1.0, Fraction(1)
    pieces = re.split(r"(/|(?<!\*)\*(?!\*))", written)
    for operator, factor in zip(["*", *pieces[1::2]], pieces[::2], strict=True):
        read = _FACTOR.fullmatch(factor)
        if read is None:
            raise FormatError(f"got {text.strip()!r}, {EXPECTED}")
        base, exponent = read["base"], int(read["exponent"] or 1)
        sign = -sign if read["sign"] == "-" else sign  # of the whole power, as in Python
        power = _power(base, exponent, text)
        if operator == "/" and power == 0:
            raise FormatError(f"got {text.strip()!r}, expected something else than a division by zero")
        size = size * power if operator == "*" else size / power
    try:
        number = float(size)
    except OverflowError:
        number = math.inf
    if math.isinf(number) or (number == 0 and size != 0):
        raise FormatError(_beyond(text))
    return math.copysign(number, sign)


_FACTOR = re.compile(r"(?P<sign>[+-]?)(?P<base>(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d{1,4})?)(?:(?:\*\*|\^)(?P<exponent>[+-]?\d{1,5}))?")
_THOUSANDS = re.compile(r"(?<![\w.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")
"""Whole numbers as they are shown, ``65,536``; not ``0,125`` or ``1,5``, whose comma may be meant as a point."""
_LARGEST_EXPONENT = 4400
"""Of two: a power beyond this is not worked out, since neither it nor its product with another of them is of use."""


def _power(base: str, exponent: int, text: str) -> Fraction:
    number = Fraction(base)
    if number == 0:
        if exponent < 0:
            raise FormatError(f"got {text.strip()!r}, expected something else than a division by zero")
        return number**exponent
    if abs(exponent * (math.log2(number.numerator) - math.log2(number.denominator))) > _LARGEST_EXPONENT:
        raise FormatError(_beyond(text))
    return number**exponent


def _beyond(text: str) -> str:
    return BEYOND.format(text=repr(text.strip()))
