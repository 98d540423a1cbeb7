from __future__ import annotations

import pytest

from amp_widgets.widgets.question import ask
from amp_widgets.widgets.spoken import spoken

BOTH = {"en": "How many?", "ko": "몇 개?"}


@pytest.fixture(autouse=True)
def no_language(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AMP_WIDGETS_LANG", "JPY_SESSION_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("locale.getlocale", lambda: (None, None))


def test_the_chosen_language_comes_before_the_notebooks_and_that_before_the_locales(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spoken(BOTH) == BOTH["en"]
    monkeypatch.setattr("locale.getlocale", lambda: ("ko_KR", "UTF-8"))
    assert spoken(BOTH) == BOTH["ko"]
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/kim/lessons/02_number_formats.en.ipynb")
    assert spoken(BOTH) == BOTH["en"]
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/kim/lessons/02_number_formats.ko.ipynb")
    assert spoken(BOTH) == BOTH["ko"]
    monkeypatch.setenv("AMP_WIDGETS_LANG", "en")
    assert spoken(BOTH) == BOTH["en"]


@pytest.mark.parametrize("name", ["/home/kim/02_number_formats.ipynb", "untitled", "", "a.b.ipynb"])
def test_a_name_without_a_language_says_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("locale.getlocale", lambda: ("ko_KR", "UTF-8"))
    monkeypatch.setenv("JPY_SESSION_NAME", name)
    assert spoken(BOTH) == BOTH["ko"]


def test_what_has_not_the_language_is_in_english_or_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMP_WIDGETS_LANG", "fr")
    assert spoken(BOTH) == BOTH["en"]
    assert spoken({"ko": "몇 개?"}) == "몇 개?"
    assert spoken({}) == ""
    assert spoken("2^16") == "2^16"


def test_questions_and_answers_are_in_that_language(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMP_WIDGETS_LANG", "ko")
    question = ask(BOTH)
    assert question.text == BOTH["ko"]
    question.guess(3)
    answer = question.reveal(3, why={"en": "So many.", "ko": "그만큼."}, more={"en": "More.", "ko": "더."})
    assert (answer.why, answer.more) == ("그만큼.", "더.")
    question.close()
