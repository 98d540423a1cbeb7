"""Numbers as people type them: ``2e-8``, ``2**-24``, ``1/3``, ``10만``, ``about 30 %``. Read, never evaluated."""

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
    >>> typed_number("10만"), typed_number("2 천")
    (100000.0, 2000.0)

    Raises
    ------
    FormatError
        When it cannot be read, or is no float64.
    """
    written = text.strip().lower().replace("−", "-").replace("×", "*")
    written = _THOUSANDS.sub(lambda found: found[0].replace(",", ""), written)
    written = re.sub(r"\s*(\*\*?|/|\^)\s*", r"\1", written)
    written = _MYRIADS.sub(lambda found: f"*{_KOREAN[found[1]]}", written)
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
_KOREAN = {"천": "1000", "만": "10000", "억": "100000000"}
_MYRIADS = re.compile(r"(?<=[\d.])\s*([천만억])$")
_ABOUT = re.compile(r"^(?:약|대략|한|about|around|roughly|approximately|ca\.|≈|~)\s*(?=[\d.+−-])", re.IGNORECASE)
_WITH_UNIT = re.compile(r"(.*[\d.](?:\s*[천만억])?)\s*([^\W\d_]\D*|[%×])")
_COUNTED = frozenset(
    ("steps", "step", "스텝", "단계", "번", "회", "차례", "개", "가지", "layers", "layer", "레이어", "windows", "window")
)
_SAME = (_COUNTED, frozenset(("%", "percent", "per cent", "퍼센트", "프로")), frozenset(("×", "x", "times", "배")))
"""Words that stand for the same unit."""
_MEASURED = frozenset(("b", "kb", "mb", "gb", "tb", "bytes", "바이트", "s", "ms", "초"))
"""Units that are never taken for another one."""
_LARGEST_EXPONENT = 4400
"""Of two: a power beyond this is not worked out, since neither it nor its product with another of them is of use."""


def number_in(text: str, unit: str = "") -> str:
    """What is typed without "about" in front of it, and without its `unit`: that of the question, or a word for the same.

    Another unit stays, so that it is refused: 2 GB are not 2 MB.

    >>> number_in("약 25번", "steps"), number_in("about 30퍼센트", "%"), number_in("2 GB", "MB"), number_in("0.5배")
    ('25', '30', '2 GB', '0.5')
    """
    number = re.sub(r"\s*(?:쯤|정도)$", "", _ABOUT.sub("", text.strip(), count=1))
    found = _WITH_UNIT.fullmatch(number)
    if found is None:
        return number.removesuffix(unit).strip() if unit else number
    typed, asked = found[2].strip().casefold(), unit.strip().casefold()
    kind = next((kind for kind in _SAME if typed in kind), frozenset())
    if asked in _MEASURED or any(asked in one for one in _SAME):
        same = typed == asked or asked in kind
    else:  # no unit, or one that we do not know
        same = typed == asked or kind == _COUNTED or (asked == "" and (bool(kind) or typed in _MEASURED))
    return found[1].strip() if same else number


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
