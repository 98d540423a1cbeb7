"""What a question and its answer say: how a guess is read, and how far it is from what was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from amp_widgets.errors import FormatError, QuestionError
from amp_widgets.language import marked, say
from amp_widgets.widgets.typed_number import EXPECTED, number_in, typed_number

Value = float | str
"""A number, or one of the choices."""
Tone = Literal["good", "warn"]

# Every sentence for people is one of these, whole, with named placeholders.
PAGE_WORDS: Mapping[str, str] = {
    "question_title": marked("Predict first"),
    "number_label": marked("Your guess"),
    "guess": marked("Guess"),
    "change": marked("Change the guess"),
    "answer_title": marked("Measured"),
    "more": marked("More about it"),
}
"""What the page writes by itself."""
NO_GUESS = marked("Give a guess; then the answer is shown.")
GUESSED = marked("Your guess: {guess}. You can change it until the answer is shown.")
SETTLED = marked("Your guess: {guess}.")
WAITING = marked("Give a guess above, then the answer is shown here.")
SAID = marked("You said {guess}; measured: {measured}.")
RIGHT = marked("Right.")
OTHER = marked("Your guess is not what was measured.")
TIMES_LOW = marked("Your guess is {times} times too low.")
TIMES_HIGH = marked("Your guess is {times} times too high.")
POINTS_LOW = marked("Your guess is {points} percentage points too low.")
POINTS_HIGH = marked("Your guess is {points} percentage points too high.")
LOW = marked("Your guess is {difference} too low.")
HIGH = marked("Your guess is {difference} too high.")
QUANTITY = "{number} {unit}"
RULE = marked("A guess is right within 5 % of what is measured.")
RULE_SHARE = marked("A guess is right within 5 % of what is measured, or within half a percentage point where that is more.")
RULE_EXACT = marked("A guess is right when it is exactly what is measured.")
RULE_WITHIN = marked("A guess is right when it is at most {distance} off.")
POINTS = marked("{points} percentage points")
EMPTY = marked("type a number first, such as 12 or 2^8")
NOT_CHOSEN = marked("choose one of the answers first")
AT_LEAST = marked("got {got}, expected {least} or more: nothing below that is possible here")
FROM_TO = marked("got {got}, expected a number from {least} to {most}: nothing else is possible here")
NO_NUMBER = marked("got {got}, expected a number")
NOT_WHOLE = marked("got {got}, expected a whole number: it is counted")
NO_FIGURES = marked("got {got}, expected a whole number in figures, such as 12 or 2^8")
NO_CHOICE = marked("got {got}, expected one of {choices}")
MEASURED_NO_CHOICE = marked("measured: got {got}, expected one of the question's choices: {choices}")
MEASURED_NO_NUMBER = marked("measured: got {got}, expected a number, as the question asks for one")
SHOWN_ALREADY = marked("the answer is shown already: a guess can be changed until then")

PERCENT = "%"
TIMES_FROM = 2.0
"""From this ratio on it is said how many times too low or too high a guess is, below it by how much."""
RIGHT_WITHIN = 0.05
"""Of what was measured: a guess that is not further off is right."""
LEAST_POINTS = 0.5
"""Percentage points: so far off a guess at a share may always be."""


class Possible(NamedTuple):
    """Which numbers a guess may be: from `least` to `most`, and only `whole` ones or others, too."""

    least: float = -math.inf
    most: float = math.inf
    whole: bool = False

    def check(self, guess: float, unit: str) -> None:
        """Refuse a guess that cannot be right.

        Parameters
        ----------
        guess
            What was guessed.
        unit
            Of it, for the reason.

        Raises
        ------
        QuestionError
            With the reason.
        """
        got = value_text(guess, unit)
        if self.whole and not float(guess).is_integer():
            raise QuestionError(NOT_WHOLE.format(got=got))
        if self.most < math.inf and not self.least <= guess <= self.most:
            raise QuestionError(FROM_TO.format(got=got, least=value_text(self.least, ""), most=value_text(self.most, "")))
        if self.least > -math.inf and not guess >= self.least:
            raise QuestionError(AT_LEAST.format(got=got, least=value_text(self.least, "")))
        if math.isnan(guess):
            raise QuestionError(NO_NUMBER.format(got=got))


ANY_NUMBER = Possible()


class Verdict(NamedTuple):
    """How far off a guess is, as a sentence, and whether that is good."""

    sentence: str
    tone: Tone


def read_guess(value: Value, unit: str, choices: Sequence[str], possible: Possible = ANY_NUMBER) -> Value:
    """What was guessed: one of the choices where there are some, else a number, also typed with its unit.

    >>> read_guess("40 %", "%", ()), read_guess("2^11", "", ()), read_guess("once", "", ("once", "twice"))
    (40.0, 2048.0, 'once')

    Raises
    ------
    QuestionError
        When it is neither, or a number that is not possible.
    """
    if choices:
        if value == "":
            raise QuestionError(NOT_CHOSEN)
        if value not in choices:
            raise QuestionError(NO_CHOICE.format(got=repr(value), choices=", ".join(map(repr, choices))))
        return value
    guess = _typed(value, unit, whole=possible.whole) if isinstance(value, str) else _number(value)
    possible.check(guess, unit)
    return guess


def read_measured(value: object, choices: Sequence[str], *, whole: bool = False) -> Value:
    """What was measured: a choice, or a number as it is (an int stays one).

    Parameters
    ----------
    value
        What was measured.
    choices
        Of the question, if it has some.
    whole
        It is counted: a whole number is an int then, whatever it came as, so that it must be hit.

    Raises
    ------
    QuestionError
        When it does not fit the question.
    """
    if choices:
        if not isinstance(value, str) or value not in choices:
            raise QuestionError(MEASURED_NO_CHOICE.format(got=repr(value), choices=", ".join(map(repr, choices))))
        return value
    try:
        number = _number(value)
        return int(number) if whole and float(number).is_integer() else number
    except QuestionError:
        raise QuestionError(MEASURED_NO_NUMBER.format(got=repr(value))) from None


def value_text(value: Value, unit: str) -> str:
    """Three digits, whole numbers in full, and the unit.

    >>> value_text(87.912, "%"), value_text(65536, "bytes"), value_text(0.00012345, ""), value_text("twice", "")
    ('87.9 %', '65,536 bytes', '0.000123', 'twice')
    """
    if isinstance(value, str):
        return value
    if math.isfinite(value) and (isinstance(value, int) or float(value).is_integer()) and abs(value) < 1e15:
        number = f"{int(value):,}"
    else:
        number = f"{value:.3g}" if not 999.5 <= abs(value) < 1e15 else f"{value:,.0f}"
    return say(QUANTITY, number=number, unit=unit) if unit else number


def verdict(guess: Value, measured: Value, unit: str = "", *, within: float | None = None) -> Verdict:
    """How far off a guess is.

    Parameters
    ----------
    within
        A guess that is so far off at most, in the unit, is right. None: one within 5 % of what was `measured`, or, of a
        share, within half a percentage point where that is more.

    >>> verdict(40.0, 88.0, "%").sentence, verdict(100.0, 88.0, "%").sentence, verdict(6.0, 5).sentence
    ('Your guess is 2.2 times too low.', 'Your guess is 12 percentage points too high.', 'Your guess is 1 too high.')
    """
    if isinstance(guess, str) or isinstance(measured, str):
        return Verdict(say(RIGHT), "good") if guess == measured else Verdict(say(OTHER), "warn")
    if guess == measured:
        return Verdict(say(RIGHT), "good")
    difference = abs(guess - measured)
    if not math.isfinite(difference):
        return Verdict(say(OTHER), "warn")
    if difference <= _allowed(measured, unit, within):
        return Verdict(say(RIGHT), "good")
    low = guess < measured
    small, large = sorted((guess, measured))
    if small > 0 and large >= TIMES_FROM * small:
        return Verdict(say(TIMES_LOW if low else TIMES_HIGH, times=_short(large / small)), "warn")
    if unit == PERCENT:
        return Verdict(say(POINTS_LOW if low else POINTS_HIGH, points=_short(difference)), "warn")
    return Verdict(say(LOW if low else HIGH, difference=value_text(_whole(difference), "")), "warn")


def rule_text(unit: str, within: float | None) -> str:
    """What counts as right, which a question says before there is a guess.

    Parameters
    ----------
    unit
        Of the number.
    within
        As of `verdict`.

    >>> rule_text("%", 5), rule_text("steps", 2)
    ('A guess is right when it is at most 5 percentage points off.', 'A guess is right when it is at most 2 steps off.')
    """
    if within is None:
        return say(RULE_SHARE if unit == PERCENT else RULE)
    if within == 0:
        return say(RULE_EXACT)
    distance = say(POINTS, points=value_text(within, "")) if unit == PERCENT else value_text(within, unit)
    return say(RULE_WITHIN, distance=distance)


def _allowed(measured: float, unit: str, within: float | None) -> float:
    if within is not None:
        return within
    relative = RIGHT_WITHIN * abs(measured)
    return max(relative, LEAST_POINTS) if unit == PERCENT else relative


def _whole(value: float) -> float:
    return round(value) if abs(value - round(value)) < 1e-9 else value


def _short(value: float) -> str:
    """Two digits: ``2.2``, ``12``, ``1,300``."""
    if value < 9.95:
        text = f"{value:.1f}"
        return f"{value:.1g}" if text == "0.0" else text
    return f"{float(f'{value:.2g}'):,.0f}" if value < 1e15 else f"{value:.2g}"


def _typed(value: str, unit: str, *, whole: bool) -> float:
    """A number as it was typed, also with its unit."""
    if not value.strip():
        raise QuestionError(EMPTY)
    try:
        return typed_number(number_in(value, unit))
    except FormatError as error:
        if whole and EXPECTED in str(error):  # it could not be read; fractions are no example where it is counted
            raise QuestionError(NO_FIGURES.format(got=repr(value.strip()))) from None
        raise QuestionError(str(error)) from None


def _number(value: object) -> float:
    """An int or a float, also of numpy or of a tensor with one element."""
    item = getattr(value, "item", None)  # not `__index__`: a tensor has it whatever it is of
    try:
        found: Any = item() if callable(item) else value
        if isinstance(found, (bool, str, bytes)):
            raise TypeError
        as_float = float(found)  # refuses what is complex, and an int that no float64 can be
        return found if isinstance(found, int) else as_float
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last is torch's, of a tensor with several elements
        raise QuestionError(NO_NUMBER.format(got=repr(value))) from None
