"""Predict first: a question to which a guess is given before the measured answer is shown."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeGuard

import traitlets

from amp_widgets import kernel
from amp_widgets.errors import QuestionError
from amp_widgets.language import follow_language, in_language, say
from amp_widgets.widgets import question_text as says
from amp_widgets.widgets.control import Control, page_script
from amp_widgets.widgets.covered import cover
from amp_widgets.widgets.question_text import Possible, Value, read_guess, read_measured, rule_text, value_text, verdict
from amp_widgets.widgets.spoken import Text, spoken
from amp_widgets.widgets.state import DashboardState

_STYLE = Control._css + (Path(__file__).parent / "question.css").read_text(encoding="utf-8")


class Answer(Control):
    """What was measured, how far off the guess is, and why: shown once there is a guess, and asking for one until then.

    It is what `Question.reveal` gives.
    """

    _esm = page_script("answer")
    _css = _STYLE

    words: traitlets.Dict[str, Any] = traitlets.Dict(dict(says.PAGE_WORDS)).tag(sync=True, said=True)
    waiting = traitlets.Unicode(says.WAITING, help="In place of the answer, or nothing.").tag(sync=True, said=True)
    said = traitlets.Unicode(help="The guess, and what was measured.").tag(sync=True)
    verdict = traitlets.Unicode(help="How far off the guess is.").tag(sync=True)
    tone = traitlets.Unicode(help="good or warn: goes with the verdict, which says it in words.").tag(sync=True)
    why = traitlets.Unicode().tag(sync=True)
    more = traitlets.Unicode(help="Folded away.").tag(sync=True)

    def __init__(self) -> None:
        super().__init__(_nobody)
        self._kept: tuple[str, ...] = ()  # the answer, when it is not to be shown yet

    @property
    def shown(self) -> bool:
        """Whether the answer is shown: there is a guess."""
        return self.waiting == ""

    @property
    def text(self) -> str:
        """What is shown, as plain text."""
        return self.waiting or "\n".join(filter(None, (f"{self.said} {self.verdict}", self.why, self.more)))

    def put(self, guess: Value | None, measured: Value, unit: str, within: float | None, why: str, more: str) -> None:
        """Show the answer to this `guess`: what was `measured`, in the `unit`, `why`, and `more`; without one, ask for it.

        A number at most `within` off counts as right; without it, as `ask` says.
        """
        self._kept = tuple(filter(None, (value_text(measured, unit), why, more)))
        if guess is None:
            self._put({"waiting": say(says.WAITING), "said": "", "verdict": "", "tone": "", "why": "", "more": ""})
            return
        far = verdict(guess, measured, unit, within=within)
        said = say(says.SAID, guess=value_text(guess, unit), measured=value_text(measured, unit))
        self._put({"waiting": "", "said": said, "verdict": far.sentence, "tone": far.tone, "why": why, "more": more})

    def _traits_for(self, state: DashboardState) -> dict[str, Any]:
        return {}

    def _ask(self, message: Mapping[str, Any]) -> None:
        """There is nothing to ask for here."""

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """The widget; and where none can be shown, as in a notebook read without a kernel, the answer to be unfolded."""
        lines = "".join(f"<p>{html.escape(line)}</p>" for line in (self.text.splitlines() if self.shown else self._kept))
        folded = f"<details{' open' * self.shown}><summary>{html.escape(self.words['answer_title'])}</summary>{lines}</details>"
        return _with_texts(super()._repr_mimebundle_(**options), repr(self), folded)


class Question(Control):
    """A question to be answered with a guess, a number or a choice, before the answer is measured.

    It is displayed by being the last expression of a cell, any number of times. The guess stays in this Python process.

    Parameters
    ----------
    text
        The question, or ``{"en": "…", "ko": "…"}``.
    unit
        Of the number, such as ``"%"`` or ``"steps"``.
    choices
        What to choose from, each as the `text`; without them a number is asked for.
    within
        How far off a number may be, in the unit, and still be right; the question says it. By default 5 % of what was
        measured, where the unit is ``"%"`` half a percentage point at least; and nothing where it is `whole`.
    between
        The least and the most that a number can be; a guess outside is refused. `math.inf` where there is no end.
    whole
        Only whole numbers are possible: it is counted.

    Raises
    ------
    QuestionError
        When there is only one choice, or one is there twice; when nothing is between what is possible; when a text is no
        text or empty, or a number no number.
    """

    _esm = page_script("question")
    _css = _STYLE
    _spoken: Callable[[Text], str] = staticmethod(spoken)
    """What puts a text into the language."""

    words: traitlets.Dict[str, Any] = traitlets.Dict(dict(says.PAGE_WORDS)).tag(sync=True, said=True)
    text = traitlets.Unicode().tag(sync=True)
    unit = traitlets.Unicode().tag(sync=True)
    choices: traitlets.List[Any] = traitlets.List().tag(sync=True)
    typed = traitlets.Unicode(help="The guess as it was typed or chosen.").tag(sync=True)
    note = traitlets.Unicode(help="What the guess is.").tag(sync=True)
    rule = traitlets.Unicode(help="How far off a number may be.").tag(sync=True)
    problem = traitlets.Unicode(help="What is wrong with what was typed.").tag(sync=True)
    settled = traitlets.Bool(False, help="The answer is shown.").tag(sync=True)

    def __init__(
        self,
        text: Text,
        *,
        unit: str = "",
        choices: Sequence[Text] | None = None,
        within: float | None = None,
        between: tuple[float, float] = (-math.inf, math.inf),
        whole: bool = False,
    ) -> None:
        _check_texts(text, unit, choices)
        _check_numbers(within, between)
        chosen = [self._spoken(choice) for choice in choices or ()]
        if choices is not None and (len(chosen) < 2 or len(set(chosen)) < len(chosen)):
            raise QuestionError(f"choices: got {chosen!r}, expected two or more that differ")
        if not between[0] < between[1]:
            raise QuestionError(f"between: got {between!r}, expected the least that is possible and then the most")
        super().__init__(_nobody)
        self._within = 0.0 if whole and within is None else within
        self._offered = [] if choices is None else list(choices)
        self._asks, self._unit = text, unit
        self._refused = ""
        self._possible = Possible(*between, whole=whole)
        self._guess: Value | None = None
        self._measured: tuple[Value, Text, Text] | None = None
        self._answer = Answer()
        self._listeners: list[Callable[[], None]] = []
        self._put({**self._asked(), "note": say(says.NO_GUESS)})
        follow_language(self.speak)

    @property
    def guessed(self) -> Value | None:
        """The guess: a number or one of the choices; None as long as there is none."""
        return self._guess

    @property
    def answer(self) -> Answer:
        """What `reveal` gives; it asks for a guess, or waits for what is measured, until then."""
        return self._answer

    def guess(self, value: Value) -> None:
        """Give a guess, or another one: a number, or one of the choices, as the `value`; the page calls it, too.

        Raises
        ------
        QuestionError
            When it is no number or an impossible one, or none of the choices; and when the answer is shown already.
        """
        if self.settled:
            raise QuestionError(says.SHOWN_ALREADY)
        self._guess = read_guess(value, self.unit, self.choices, self._possible)
        typed = value if isinstance(value, str) else value_text(self._guess, "").replace(",", "")
        self._refused = ""
        self._put({"typed": str(typed).strip(), "problem": ""})
        self._show()
        for listener in self._listeners:
            listener()

    def reveal(self, measured: object, why: Text = "", more: Text | None = None) -> Answer:
        """Hand over what was measured: the answer shows it as soon as there is a guess.

        Parameters
        ----------
        measured
            A number in the question's unit, or one of its choices, as it was given.
        why
            A sentence or two, or these in several languages, as the question.
        more
            What can be unfolded below.

        Returns
        -------
        Answer
            To be displayed, by being the last expression of a cell; the same one every time.

        Raises
        ------
        QuestionError
            When `measured` does not fit the question.
        """
        if isinstance(measured, Mapping) and measured in self._offered:
            measured = self.choices[self._offered.index(measured)]
        self._measured = read_measured(measured, self.choices, whole=self._possible.whole), why, more or ""
        self._show()
        return self._answer

    def covered(self, *others: Question) -> AbstractContextManager[None]:
        """A ``with`` block whose output is kept until there is a guess: what is printed and displayed in it tells the answer.

        Parameters
        ----------
        others
            More questions that it tells the answer of: they must have a guess, too.
        """
        return cover((self, *others))

    def on_guess(self, call: Callable[[], None]) -> None:
        """Have `call` called after each guess."""
        self._listeners.append(call)

    def close(self) -> None:
        """Close it and its answer."""
        if "_answer" in self.__dict__:  # it was made to its end
            self._listeners.clear()
            self._answer.close()
        super().close()

    def _show(self) -> None:
        settled = self._guess is not None and self._measured is not None
        note = say(says.NO_GUESS)
        if self._guess is not None:
            note = say(says.SETTLED if settled else says.GUESSED, guess=value_text(self._guess, self.unit))
        self._put({"note": note, "settled": settled})
        if self._measured is not None:
            measured, why, more = self._measured
            self._answer.put(self._guess, measured, self.unit, self._within, self._spoken(why), self._spoken(more))

    def _asked(self) -> dict[str, Any]:
        """What is asked, in the language in force."""
        unit, choices = self._spoken(self._unit), [self._spoken(choice) for choice in self._offered]
        rule = "" if choices else rule_text(unit, self._within)
        return {"text": self._spoken(self._asks), "unit": unit, "choices": choices, "rule": rule}

    def speak(self) -> None:
        """Say it, and its answer, in the language that is in force now; a guess that was given stays."""
        if self.comm is None:  # closed
            return
        with self.hold_sync():  # the page draws it anew when its script comes: the texts are to come with it
            self._speak()

    def _speak(self) -> None:
        super().speak()
        self._answer.speak()
        now = [self._spoken(choice) for choice in self._offered]
        anew = dict(zip(self.choices, now, strict=True))
        typed = anew.get(self.typed, self.typed)
        if isinstance(self._guess, str):
            self._guess = anew[self._guess]
        if self._measured is not None and isinstance(self._measured[0], str):
            self._measured = anew[self._measured[0]], *self._measured[1:]
        self._put({**self._asked(), "typed": typed, "problem": in_language(self._refused)})
        self._show()

    def _traits_for(self, state: DashboardState) -> dict[str, Any]:
        return {}

    def _ask(self, message: Mapping[str, Any]) -> None:
        value = message.get("guess")
        if not isinstance(value, str) or self.settled:
            return
        try:
            self.guess(value)
        except QuestionError as error:
            self._refused = str(error)
            self._put({"problem": in_language(self._refused)})

    def __repr__(self) -> str:
        return f"{self.text} {self.note}"

    def _repr_mimebundle_(self, **options: Any) -> Any:
        lines = f"<p><b>{html.escape(self.words['question_title'])}</b></p><p>{html.escape(self.text)}</p>"
        choices = "".join(f"<li>{html.escape(choice)}</li>" for choice in self.choices)
        lines += f"<ul>{choices}</ul>" if choices else ""
        return _with_texts(super()._repr_mimebundle_(**options), repr(self), lines)


def ask(
    text: Text,
    *,
    unit: str = "",
    choices: Sequence[Text] | None = None,
    within: float | None = None,
    between: tuple[float, float] = (-math.inf, math.inf),
    whole: bool = False,
) -> Question:
    """A question to guess at before it is measured: `Question.guess`, then `Question.reveal` in a later cell.

    Parameters
    ----------
    text
        The question, or ``{"en": "…", "ko": "…"}``.
    unit
        Of the number, such as ``"%"``.
    choices
        What to choose from, each as the `text`; without them a number is asked for.
    within
        How far off a number may be, in the unit, and still be right; the question says it. By default 5 % of what was
        measured, where the unit is ``"%"`` half a percentage point at least; and nothing where it is `whole`.
    between
        The least and the most that a number can be; a guess outside is refused. `math.inf` where there is no end.
    whole
        Only whole numbers are possible: it is counted.

    Raises
    ------
    QuestionError
        When there is only one choice, or one is there twice; when nothing is between what is possible; when a text is no
        text or empty, or a number no number.
    """
    question = Question(text, unit=unit, choices=choices, within=within, between=between, whole=whole)
    kernel.answer_where_asked(question.comm)  # a guess is taken also while a cell runs
    return question


def _check_texts(text: object, unit: object, choices: object) -> None:
    """Refuse what is no text, or an empty one, where one is expected."""
    if not _is_text(text):
        raise QuestionError(f"text: got {text!r}, expected a text, or one in each language such as {{'en': '…', 'ko': '…'}}")
    if not isinstance(unit, str):
        raise QuestionError(f"unit: got {unit!r}, expected a text such as '%'")
    if choices is None:
        return
    if isinstance(choices, (str, Mapping)) or not isinstance(choices, Sequence) or not all(map(_is_text, choices)):
        raise QuestionError(f"choices: got {choices!r}, expected a list of texts")


def _is_text(text: object) -> bool:
    texts = list(text.values()) if isinstance(text, Mapping) else [text]
    return bool(texts) and all(isinstance(one, str) and one.strip() for one in texts)


def _check_numbers(within: object, between: object) -> None:
    """Refuse what is no number where one is expected."""
    if within is not None and not (_is_number(within) and within >= 0):
        raise QuestionError(f"within: got {within!r}, expected a number, 0 or more, or None")
    if not (isinstance(between, (tuple, list)) and len(between) == 2 and all(map(_is_number, between))):
        raise QuestionError(f"between: got {between!r}, expected two numbers: the least that is possible and then the most")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _with_texts(bundle: Any, plain: str, markup: str) -> Any:
    """A bundle of MIME types, alone or with its metadata, with these for where no widget is shown."""
    texts = {"text/plain": plain, "text/html": markup}
    return ({**bundle[0], **texts}, bundle[1]) if isinstance(bundle, tuple) else {**bundle, **texts}


def _nobody(*_args: object, **_changes: object) -> None:
    """A question asks nobody: it works on its own."""
