from __future__ import annotations

import gc
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from IPython.display import HTML, clear_output, display

import amp_widgets as aw
from amp_widgets.errors import QuestionError
from amp_widgets.language import set_language
from amp_widgets.widgets import covered
from amp_widgets.widgets.dashboard import Dashboard
from amp_widgets.widgets.question import Answer, Question
from amp_widgets.widgets.question_text import (
    GUESSED,
    NO_GUESS,
    OTHER,
    RIGHT,
    SETTLED,
    WAITING,
    Possible,
    read_guess,
    value_text,
    verdict,
)

EVIL = "<img src=x onerror='harm()'>"


def say(question: Question, **message: object) -> None:
    question._handle_custom_msg({**message, "id": "1"}, [])


# ---- how far off ----


@pytest.mark.parametrize(
    ("guess", "measured", "unit", "sentence"),
    [
        (40.0, 88.0, "%", "Your guess is 2.2 times too low."),
        (100.0, 88.0, "%", "Your guess is 12 percentage points too high."),
        (80.0, 88.0, "%", "Your guess is 8.0 percentage points too low."),
        (0.0, 88.0, "%", "Your guess is 88 percentage points too low."),
        (87.0, 88.0, "%", RIGHT), (90.0, 87.8, "%", RIGHT), (90.0, 88, "%", RIGHT), (0.3, 0.0, "%", RIGHT),
        (93.0, 88.0, "%", "Your guess is 5.0 percentage points too high."),
        (2.6, 2.0, "%", "Your guess is 0.6 percentage points too high."),
        (5.0, 5, "steps", RIGHT), (6.0, 5, "steps", "Your guess is 1 too high."), (20.0, 25, "", "Your guess is 5 too low."),
        (1.0, 5, "steps", "Your guess is 5.0 times too low."), (3.0, 0, "", "Your guess is 3 too high."),
        (-4.0, 2.0, "", "Your guess is 6 too low."), (2600.0, 2.0, "MB", "Your guess is 1,300 times too high."),
        (1.04, 1.0, "", RIGHT), (1.06, 1.0, "", "Your guess is 0.06 too high."),
        (math.nan, math.nan, "", OTHER), (1.0, math.inf, "", OTHER), (math.inf, math.inf, "", RIGHT),
        ("once", "once", "", RIGHT), ("once", "twice", "", OTHER),
    ],
)  # fmt: skip
def test_how_far_off(guess: Any, measured: Any, unit: str, sentence: str) -> None:
    told = verdict(guess, measured, unit)
    assert told.sentence == sentence
    assert told.tone == ("good" if sentence == RIGHT else "warn")


def test_how_far_off_may_be_said_by_who_asks() -> None:
    assert verdict(20.0, 25, within=5).sentence == RIGHT
    assert verdict(19.0, 25, within=5).sentence == "Your guess is 6 too low."
    assert verdict(88.5, 88.0, "%", within=0.1).sentence == "Your guess is 0.5 percentage points too high."


@given(st.floats(0.01, 1e6), st.floats(0.01, 1e6), st.sampled_from(["", "%", "MB"]))
def test_low_and_high_are_never_taken_for_each_other(guess: float, measured: float, unit: str) -> None:
    told = verdict(guess, measured, unit)
    if told.sentence != RIGHT:
        assert ("too low" in told.sentence) == (guess < measured)
        assert "0.0 " not in told.sentence
        there = verdict(measured, guess, unit).sentence
        assert there == RIGHT or ("too low" in there) == (measured < guess)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (87.912, "%", "87.9 %"), (88.0, "%", "88 %"), (65536, "", "65,536"), (1234.5, "MB", "1,234 MB"), (999.6, "", "1,000"),
        (0.0001234, "", "0.000123"), (-3.0, "", "-3"), (math.inf, "", "inf"), (math.nan, "", "nan"), (1e20, "", "1e+20"),
        ("once", "", "once"),
    ],
)  # fmt: skip
def test_values_as_they_are_shown(value: Any, unit: str, text: str) -> None:
    assert value_text(value, unit) == text


@pytest.mark.parametrize(
    ("typed", "unit", "value"),
    [("40", "%", 40.0), (" 40 % ", "%", 40.0), ("40%", "%", 40.0), ("2^11", "", 2048.0), ("1/3", "", 1 / 3),
     ("5 steps", "steps", 5.0), (7, "", 7.0), (np.float32(0.5), "", 0.5), ("-2", "", -2.0),
     ("25번", "steps", 25.0), ("25번", "", 25.0), ("25번쯤", "번째 스텝", 25.0), ("30퍼센트", "%", 30.0), ("0.5배", "×", 0.5),
     ("10만", "", 100_000.0), ("10만 개", "", 100_000.0), ("2천", "", 2000.0), ("약 30", "%", 30.0), ("about 30 %", "%", 30.0),
     ("2 gb", "GB", 2.0), ("12GB", "", 12.0), ("2 × 3", "×", 6.0), ("2^3 steps", "steps", 8.0)],
)  # fmt: skip
def test_guesses_as_they_are_typed(typed: Any, unit: str, value: float) -> None:
    assert read_guess(typed, unit, ()) == value


@pytest.mark.parametrize("typed", ["about", "40 MB", "40 times", "40배", "만", "__import__('os')", EVIL, "%", None, True, [1, 2]])
def test_what_is_no_number_is_refused(typed: Any) -> None:
    with pytest.raises(QuestionError, match="a number"):
        read_guess(typed, "%", ())


@pytest.mark.parametrize("typed", ["스물", "십", "twenty", "5 apples"])
def test_the_hint_where_it_is_counted_is_of_whole_numbers(typed: str) -> None:
    with pytest.raises(QuestionError) as caught:
        read_guess(typed, "steps", (), Possible(0, whole=True))
    assert str(caught.value) == f"got {typed!r}, expected a whole number in figures, such as 12 or 2^8"
    with pytest.raises(QuestionError, match="division by zero"):
        read_guess("1/0", "steps", (), Possible(0, whole=True))


def test_the_hint_in_korean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMP_WIDGETS_LANG", "ko")
    question = aw.ask("?", whole=True)
    say(question, guess="스물")
    assert question.problem == "받은 값: '스물', 필요한 값: 숫자로 쓴 정수. 예: 12, 2^8"
    question.close()


@pytest.mark.parametrize("typed", ["", "  "])
def test_nothing_is_no_guess(typed: str) -> None:
    with pytest.raises(QuestionError, match="type a number first"):
        read_guess(typed, "%", ())
    with pytest.raises(QuestionError, match="choose one of the answers first"):
        read_guess("", "", ("a", "b"))


@pytest.mark.parametrize(
    ("guess", "between", "whole", "reason"),
    [
        ("-3", (1, math.inf), True, "got -3 windows, expected 1 or more: nothing below that is possible here"),
        (0, (1, math.inf), True, "got 0 windows, expected 1 or more"),
        ("120", (0, 100), False, "got 120 windows, expected a number from 0 to 100: nothing else is possible here"),
        ("-0.5", (0, 100), False, "got -0.5 windows, expected a number from 0 to 100"),
        ("2.5", (1, math.inf), True, "got 2.5 windows, expected a whole number: it is counted"),
        ("nan", (0, 100), False, "got nan windows, expected a number from 0 to 100"),
        ("nan", (0, math.inf), False, "got nan windows, expected 0 or more"),
        ("inf", (0, math.inf), True, "expected a whole number"),
        ("nan", (-math.inf, math.inf), False, "got nan windows, expected a number"),
    ],
)
def test_what_is_impossible_is_refused_with_the_reason(guess: Any, between: Any, whole: bool, reason: str) -> None:
    question = aw.ask("How many?", unit="windows", between=between, whole=whole)
    with pytest.raises(QuestionError, match=re.escape(reason)):
        question.guess(guess)
    assert question.guessed is None
    say(question, guess=str(guess))
    assert reason in question.problem
    assert (question.guessed, question.typed) == (None, "")
    question.guess(17)
    assert question.problem == ""


@pytest.mark.parametrize("guess", [0, 1, 99.5, 100])
def test_what_is_possible_is_taken(guess: float) -> None:
    question = aw.ask("Which share?", unit="%", between=(0, 100))
    question.guess(guess)
    assert question.guessed == guess
    question.close()


@pytest.mark.parametrize("between", [(1, 1), (2, 1), (math.nan, 1)])
def test_something_must_be_possible(between: tuple[float, float]) -> None:
    with pytest.raises(QuestionError, match="between: got"):
        aw.ask("?", between=between)


@pytest.mark.parametrize("text", ["", "  ", {"en": "How many?", "ko": ""}, {}])
def test_a_question_has_a_text(text: Any) -> None:
    with pytest.raises(QuestionError, match=r"text: got .*, expected a text"):
        aw.ask(text)
    with pytest.raises(QuestionError, match="choices: got"):
        aw.ask("?", choices=["a", text])


def test_choices_in_several_languages(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"en": "all three", "ko": "셋 다"}
    monkeypatch.setenv("AMP_WIDGETS_LANG", "ko")
    question = aw.ask("?", choices=["bf16", both])
    assert question.choices == ["bf16", "셋 다"]
    question.guess("셋 다")
    monkeypatch.setenv("AMP_WIDGETS_LANG", "en")  # it was asked in the other
    assert question.reveal(both).tone == "good"
    with pytest.raises(QuestionError, match="one of the question's choices"):
        question.reveal({"en": "none", "ko": "없음"})


# ---- what is covered ----


class Page(DisplayPublisher):
    """The outputs of cells as a front end keeps them: an update, and a new output, change all of the same display id."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[tuple[str | None, dict[str, Any]]] = []
        self.lost: list[dict[str, Any]] = []

    def publish(self, data: Any, metadata: Any = None, *_: Any, transient: Any = None, update: bool = False, **__: Any) -> None:
        place = (transient or {}).get("display_id")
        known = [at for at, (other, _) in enumerate(self.outputs) if place is not None and other == place]
        for at in known:
            self.outputs[at] = place, data
        if not update:
            self.outputs.append((place, data))
        elif not known:
            self.lost.append(data)

    @property
    def texts(self) -> list[str]:
        return [data.get("text/html", data["text/plain"]) for _, data in self.outputs]


@pytest.fixture
def page() -> Iterator[Page]:
    covered._gate._entered.clear()  # those of other tests, whose questions nobody has answered
    shell = InteractiveShell.instance()
    shell.display_pub = Page()
    yield shell.display_pub
    InteractiveShell.clear_instance()


class Bold:
    """It is displayed as this text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def _repr_html_(self) -> str:
        return self.text


def test_what_is_covered_is_shown_with_the_guess(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = aw.ask("One?"), aw.ask("Two?")
    with first.covered(second):
        print("42")
        display(HTML("<b>43</b>"))
    assert page.texts == [WAITING, ""]
    assert "text/html" not in str(page.outputs)
    first.guess(1)
    assert page.texts == [WAITING, ""]
    second.guess(1)
    assert page.texts == ["42", "<b>43</b>"]
    second.guess(2)  # it is shown once
    with first.covered():
        print("at once")
        display(Bold("this, too"))
    assert page.texts[2:] == ["this, too"]
    assert capsys.readouterr().out == "at once\n"
    with first.covered():
        pass
    assert len(page.outputs) == 3
    assert page.lost == []


def test_nothing_is_left_in_the_shell_afterwards(page: Page) -> None:
    question, never = aw.ask("One?"), aw.ask("Two?")
    with question.covered():
        display(Bold("a"), display_id="a")
    assert "publish" in vars(page)
    question.guess(1)
    assert "publish" not in vars(page)
    with pytest.raises(ZeroDivisionError), never.covered():
        print(1 / 0)
    assert "publish" not in vars(page)


def test_a_cover_is_gone_with_its_questions(page: Page) -> None:
    question = aw.ask("One?")
    with question.covered():
        display(Bold("a"), display_id="a")
    question.close()
    gc.collect()
    display(Bold("b"), display_id="a", update=True)
    assert page.texts == ["b"]
    assert "publish" not in vars(page)


def test_a_handle_within_what_is_covered_updates_what_it_shows(page: Page) -> None:
    question = aw.ask("One?")
    with question.covered():
        handle = display(Bold("first"), display_id=True)
        handle.update(Bold("second"))
        display(Bold("other"))
    assert page.texts == [WAITING, ""]
    handle.update(Bold("third"))  # it would tell the answer
    assert page.texts == [WAITING, ""]
    question.guess(1)
    assert page.texts == ["third", "other"]
    handle.update(Bold("fourth"))
    assert page.texts == ["fourth", "other"]
    assert page.lost == []


def test_an_update_of_what_is_elsewhere_waits_unless_there_is_a_newer_one(page: Page) -> None:
    question = aw.ask("One?")
    above, other = display(Bold("above"), display_id=True), display(Bold("other"), display_id=True)
    with question.covered():
        above.update(Bold("the answer"))
        other.update(Bold("the answer"))
    assert page.texts == ["above", "other"]
    other.update(Bold("newer"))
    assert page.texts == ["above", "newer"]
    question.guess(1)
    assert page.texts == ["the answer", "newer"]


@pytest.mark.parametrize("inner_first", [True, False])
def test_what_is_covered_twice_is_shown_when_both_have_a_guess(page: Page, inner_first: bool) -> None:
    outer, inner = aw.ask("One?"), aw.ask("Two?")
    with outer.covered():
        print("outer")
        with inner.covered():
            print("inner")
            handle = display(Bold("bold"), display_id=True)
    assert page.texts == [WAITING, "", ""]
    (inner if inner_first else outer).guess(1)
    assert page.texts == ([WAITING, "", ""] if inner_first else ["outer", WAITING, ""])
    handle.update(Bold("bolder"))
    assert "bolder" not in page.texts
    (outer if inner_first else inner).guess(1)
    assert page.texts == ["outer", "inner", "bolder"]
    assert page.lost == []


def test_an_inner_guess_given_within_the_outer_cover(page: Page) -> None:
    outer, inner = aw.ask("One?"), aw.ask("Two?")
    with outer.covered():
        with inner.covered():
            print("inner")
        inner.guess(1)
    assert page.texts == [WAITING]
    outer.guess(1)
    assert page.texts == ["inner"]


def test_a_cell_that_is_run_again_covers_anew(page: Page) -> None:
    def cell(question: Question, text: str) -> Any:
        with question.covered():
            return display(Bold(text), display_id="figure")

    before, after = aw.ask("One?"), aw.ask("One?")
    cell(before, "before")
    page.outputs.clear()  # as the page does
    handle = cell(after, "after")
    handle.update(Bold("newer"))
    before.guess(1)
    assert page.texts == [WAITING]
    after.guess(1)
    assert page.texts == ["newer"]


def test_a_dashboard_in_what_is_covered_keeps_its_picture_up_to_date(page: Page, session_of: Any, chart_of: Any) -> None:
    question = aw.ask("One?")
    session = session_of(run="ready")
    now = [100.0]
    dashboard = Dashboard(session, chart=chart_of(), live=False, clock=lambda: now[0])
    with question.covered():
        display(dashboard)
    pictures = [place for place, _ in page.outputs if str(place).startswith("ampw-still")]
    assert len(pictures) == 1
    assert page.texts == [WAITING, ""]
    session.put(step=7, run="finished")
    now[0] += 100.0
    dashboard.tick()
    assert page.texts == [WAITING, ""]
    question.guess(1)
    assert "at step 7" in dict(page.outputs)[pictures[0]]["text/plain"]
    session.put(step=8, run="stopped")
    now[0] += 100.0
    dashboard.tick()
    assert "at step 8" in dict(page.outputs)[pictures[0]]["text/plain"]
    assert page.lost == []
    dashboard.close()


def test_clearing_the_output_in_what_is_covered(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    question = aw.ask("One?")
    display(Bold("above"))
    with question.covered():
        print("10 %")
        display(Bold("half"))
        clear_output(wait=True)
        print("100 %")
        display(Bold("whole"))
    question.guess(1)
    assert page.texts == ["above", "100 %", "whole"]
    assert capsys.readouterr().out == ""


def test_what_shows_outputs_is_the_shells_own_while_they_are_covered(page: Page) -> None:
    """For whoever tells it, in the meantime, where they belong."""
    with aw.ask("One?").covered():
        assert InteractiveShell.instance().display_pub is page
        with aw.ask("Two?").covered():
            assert InteractiveShell.instance().display_pub is page


def test_an_error_in_what_is_covered_is_not(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    question = aw.ask("One?")

    def fails() -> None:
        with question.covered():
            print("before it")
            handle = display(Bold("first"), display_id=True)
            handle.update(Bold("second"))
            print(1 / 0)

    with pytest.raises(ZeroDivisionError):
        fails()
    assert capsys.readouterr().out == "before it\n"
    assert page.texts == ["second"]


# ---- a question ----


def test_a_guess_first_then_the_answer() -> None:
    question = aw.ask("Which share of the gradients is stored as zero?", unit="%")
    assert (question.guessed, question.note, question.settled) == (None, NO_GUESS, False)
    say(question, guess="10")
    say(question, guess="40 %")  # another one
    assert (question.guessed, question.typed, question.note) == (40.0, "40 %", GUESSED.format(guess="40 %"))
    answer = question.reveal(88, why="They are below 2^-25.", more="More.")
    assert isinstance(answer, Answer)
    assert (answer.shown, answer.said) == (True, "You said 40 %; measured: 88 %.")
    assert (answer.verdict, answer.tone, answer.why, answer.more) == (
        "Your guess is 2.2 times too low.", "warn", "They are below 2^-25.", "More.",
    )  # fmt: skip
    assert (question.settled, question.note) == (True, SETTLED.format(guess="40 %"))

    # from now on it stands
    say(question, guess="88")
    assert (question.guessed, question.problem) == (40.0, "")
    with pytest.raises(QuestionError, match="is shown already"):
        question.guess(88)

    # measured again
    assert question.reveal(39.0) is answer
    assert (answer.verdict, answer.tone, answer.why, answer.more) == (RIGHT, "good", "", "")


def test_run_all_shows_no_answer_until_there_is_a_guess(messages: Any) -> None:
    question = aw.ask("Which is faster?", choices=["checkpointing", "neither"])
    answer = question.reveal("neither", why="Layers are computed twice.")
    assert (answer.shown, answer.text, question.settled) == (False, WAITING, False)
    assert "neither" not in str([one for one in messages.updates if "said" in one])  # the page is not told
    sent = {name: value for name, value in answer.get_state().items() if not name.startswith("_") and name != "words"}
    assert "neither" not in str(sent) + repr(answer)
    say(question, guess="checkpointing")
    assert answer.text == "You said checkpointing; measured: neither. " + OTHER + "\nLayers are computed twice."
    assert question.settled


def test_a_question_is_told_of_each_guess() -> None:
    heard = []
    question = Question("How many?")
    question.on_guess(lambda: heard.append(question.guessed))
    question.guess(3)
    say(question, guess="x")
    say(question, guess="2^2")
    assert heard == [3, 4.0]
    assert question.typed == "2^2"


def test_what_is_refused_is_said_on_the_page_and_changes_nothing() -> None:
    question = aw.ask("How many?")
    question.guess(3)
    for wrong in ("many", "1+1"):
        say(question, guess=wrong)
        assert "expected a number such as" in question.problem
        assert (question.guessed, question.typed) == (3, "3")
    say(question, guess=5)  # no text: not from our page
    say(question, other="5")
    assert question.guessed == 3
    say(question, guess="4")
    assert (question.guessed, question.problem) == (4.0, "")
    choice = aw.ask("Which?", choices=["a", "b"])
    say(choice, guess="c")
    assert (choice.guessed, choice.problem) == (None, "got 'c', expected one of 'a', 'b'")


@pytest.mark.parametrize(
    ("choices", "measured", "message"),
    [
        (["a", "b"], "c", "measured: got 'c', expected one of the question's choices: 'a', 'b'"),
        (["a", "b"], 1, "got 1, expected one"),
        (None, "much", "measured: got 'much', expected a number"),
        (None, None, "got None"),
    ],
)
def test_what_was_measured_must_fit(choices: Any, measured: Any, message: str) -> None:
    question = aw.ask("?", choices=choices)
    with pytest.raises(QuestionError, match=message):
        question.reveal(measured)
    assert question.answer.text == WAITING


@pytest.mark.parametrize("choices", [[], ["a"], ["a", "a"]])
def test_choices_to_choose_from(choices: list[str]) -> None:
    with pytest.raises(QuestionError, match="expected two or more that differ"):
        aw.ask("?", choices=choices)


@pytest.mark.parametrize("measured", [np.float32(88.0), np.int64(88), Fraction(88)])
def test_numbers_of_all_kinds(measured: Any) -> None:
    question = aw.ask("?", unit="%")
    question.guess(88)
    assert question.reveal(measured).text == "You said 88 %; measured: 88 %. Right."


@pytest.mark.parametrize("measured", [np.array(87.6), np.array([87.6]), np.float64(87.6)])
def test_an_array_with_one_element_is_its_number(measured: Any) -> None:
    question = aw.ask("?", unit="%")
    question.guess(measured)
    assert question.guessed == 87.6
    assert question.reveal(measured).said == "You said 87.6 %; measured: 87.6 %."


def test_a_tensor_is_its_number() -> None:
    torch = pytest.importorskip("torch")
    for value in (torch.tensor(0.25), torch.tensor([0.25]), torch.nn.Parameter(torch.tensor(0.25))):
        question = aw.ask("?")
        question.guess(value)
        assert question.guessed == 0.25
        assert question.reveal(value).said == "You said 0.25; measured: 0.25."
    assert isinstance(read_guess(torch.tensor(3), "", ()), int)
    for value in (torch.tensor(1j), torch.tensor([1.0, 2.0]), torch.tensor(True)):
        with pytest.raises(QuestionError, match="expected a number"):
            aw.ask("?").reveal(value)


@pytest.mark.parametrize("value", [10**400, 1j, np.complex64(1), np.True_, np.zeros(2)])
def test_what_is_no_number_is_refused_as_guess_and_as_measured(value: Any) -> None:
    for call in (aw.ask("?").guess, aw.ask("?").reveal):
        with pytest.raises(QuestionError, match="expected a number"):
            call(value)


@pytest.mark.parametrize(
    ("typed", "number"), [("65,536", 65536.0), ("1,000", 1000.0), ("-1,234,567.5", -1234567.5), ("2 * 1,024", 2048.0)]
)
def test_thousands_are_read_as_they_are_shown(typed: str, number: float) -> None:
    assert read_guess(typed, "", ()) == number


@pytest.mark.parametrize("typed", ["1,5", "0,125", "12,34", "1,0000", "1.5,000"])
def test_other_commas_are_refused(typed: str) -> None:
    with pytest.raises(QuestionError, match="expected a number"):
        read_guess(typed, "", ())


def test_what_is_counted_must_be_hit_whatever_it_came_as() -> None:
    question = aw.ask("How many?", whole=True)
    question.guess(100)
    assert question.reveal(101.0).verdict == "Your guess is 1 too low."


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"text": None}, "text: got None"),
        ({"text": {"en": 1}}, "text: got"),
        ({"unit": 5}, "unit: got 5"),
        ({"choices": [1, 2]}, "choices: got .1, 2., expected a list of texts"),
        ({"choices": "ab"}, "choices: got 'ab'"),
        ({"within": "a"}, "within: got 'a'"),
        ({"within": -1}, "within: got -1"),
        ({"between": (0,)}, "between: got"),
        ({"between": 5}, "between: got 5"),
        ({"between": ("a", "b")}, "between: got"),
    ],
)
def test_what_cannot_be_asked_is_said(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(QuestionError, match=message):
        aw.ask(**{"text": "?", **arguments})


def test_an_open_question_follows_the_language(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amp_widgets.language._chosen", "en")
    yes, no = {"en": "yes", "ko": "예"}, {"en": "no", "ko": "아니요"}
    question = aw.ask({"en": "Why?", "ko": "왜?"}, choices=[yes, no])
    question.guess("no")
    answer = question.reveal(yes, why={"en": "So.", "ko": "그래서."})
    number = aw.ask("?")
    number._ask({"guess": ""})
    set_language("ko")
    assert (question.text, question.choices, question.guessed, question.typed) == ("왜?", ["예", "아니요"], "아니요", "아니요")
    assert (answer.why, "예" in answer.said, "yes" in answer.said, answer.waiting) == ("그래서.", True, False, "")
    assert not re.search("[A-Za-z]{2}", question.note + answer.verdict + number.note)
    assert "type a number" not in number.problem
    set_language("en")
    assert (question.text, question.guessed, answer.why, number.note) == ("Why?", "no", "So.", NO_GUESS)
    assert answer.said == "You said no; measured: yes."


def test_the_page_gets_all_texts_of_another_language_at_once(messages: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is drawn anew when its script comes: what came later would be shown in the language before."""
    monkeypatch.setattr("amp_widgets.language._chosen", "en")
    question = aw.ask({"en": "Why?", "ko": "왜?"}, unit="%")
    messages.clear()
    set_language("ko")
    [sent] = [one for one in messages.updates if "text" in one]
    assert sent["text"] == "왜?"
    assert "%" in sent["rule"]
    assert "_esm" in sent
    question.close()


@pytest.mark.parametrize(
    ("asked", "rule", "right", "wrong"),
    [
        ({}, "within 5 % of what is measured.", 104.9, 105.1),
        ({"unit": "%"}, "within 5 % of what is measured, or within half a percentage point", 104.9, 105.1),
        ({"unit": "%", "within": 5}, "at most 5 percentage points off", 105, 105.1),
        ({"unit": "MB", "within": 2}, "at most 2 MB off", 102, 102.1),
        ({"whole": True}, "exactly what is measured", 100, 101),
        ({"whole": True, "within": 1}, "at most 1 off", 101, 102),
    ],
)
def test_the_question_says_what_counts_as_right(asked: dict[str, Any], rule: str, right: float, wrong: float) -> None:
    for measured in (100, 100.0):  # it does not depend on what it comes as
        for guess, tone in ((right, "good"), (wrong, "warn")):
            question = aw.ask("?", **asked)
            assert rule in question.rule
            question.guess(guess)
            assert question.reveal(measured).tone == tone
            question.close()
    assert aw.ask("?", choices=["a", "b"]).rule == ""


def test_markup_is_shown_as_text_where_there_is_no_widget() -> None:
    question = aw.ask(EVIL, choices=[EVIL, "b"])
    bundle, _ = question._repr_mimebundle_()
    assert "<img" not in bundle["text/html"]
    assert re.fullmatch(r"(<p>.*</p>){2}<ul>(<li>.*</li>){2}</ul>", bundle["text/html"])
    assert "<ul>" not in aw.ask("How many?")._repr_mimebundle_()[0]["text/html"]
    question.guess(EVIL)
    bundle, _ = question.reveal("b", why=EVIL, more=EVIL)._repr_mimebundle_()
    assert "<img" not in bundle["text/html"]
    assert bundle["text/html"].startswith("<details open>")
    assert bundle["text/plain"] == question.answer.text
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] == question.answer.model_id


def test_a_notebook_that_is_only_read_has_the_answer_folded_away() -> None:
    answer = aw.ask("How many?").reveal(5, why="Because.")
    bundle, _ = answer._repr_mimebundle_()
    assert bundle["text/html"] == "<details><summary>Measured</summary><p>5</p><p>Because.</p></details>"
    assert bundle["text/plain"] == WAITING


def test_an_equal_guess_sends_nothing(messages: Any) -> None:
    question = aw.ask("?", unit="%")
    question.guess("40")
    messages.clear()
    question.guess("40")
    assert messages.updates == []


def test_it_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None\n"
    code += "import amp_widgets as aw; q = aw.ask('?'); q.guess(1); print(q.reveal(1))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "You said 1; measured: 1. Right.\n"


def test_closing_closes_the_answer_too() -> None:
    question = aw.ask("?")
    answer = question.answer
    question.close()
    assert question.comm is None
    assert answer.comm is None
