"""The language in which texts are shown: which it is, what `say` makes of a text, what is recognized in sentences."""

from __future__ import annotations

import json
import locale
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from amp_widgets import language
from amp_widgets.errors import LanguageError
from amp_widgets.language import (
    Catalogue,
    in_language,
    page_script_in_language,
    say,
    say_number,
    set_language,
    words_script,
)

TEXTS = {
    "Step {step} of {steps}": "{steps} / {step}",
    ("{count} layer", 0): "<{count}>",
    "got {got}, expected one of {known}{hint}": "[{got}|{known}|{hint}]",
    "; did you mean {near}?": "; {near}?!",
    "in {phase} of {layer}": "{layer}@{phase}",
    "backward": "BACK",
    "stopped at {place}": "HALT {place}",
    "scaling off": "OFF",
    "{count} layers checkpointed": "CKPT {count}",
    "a {{brace}} and {name}": "{{}} {name}",
}


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A small language in place of Korean."""
    monkeypatch.setitem(language._catalogues, "ko", Catalogue(TEXTS))
    set_language("ko")
    yield
    set_language(None)


@pytest.fixture
def no_wish(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment that says nothing about the language."""
    monkeypatch.delenv("AMP_WIDGETS_LANG", raising=False)
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    monkeypatch.setattr(locale, "getlocale", lambda: (None, None))
    return monkeypatch


def test_the_environment_decides(no_wish: pytest.MonkeyPatch) -> None:
    assert language.language() == "en"
    no_wish.setattr(locale, "getlocale", lambda: ("ko_KR", "UTF-8"))
    assert language.language() == "ko"
    no_wish.setenv("JPY_SESSION_NAME", "/home/user/01_quickstart.en.ipynb")
    assert language.language() == "en"
    no_wish.setenv("JPY_SESSION_NAME", "/home/user/01_quickstart.ko.ipynb")
    assert language.language() == "ko"
    no_wish.setenv("AMP_WIDGETS_LANG", "en")
    assert language.language() == "en"
    no_wish.setenv("AMP_WIDGETS_LANG", "fr")  # there is no such catalogue
    assert (language.language(), language.wished_language()) == ("en", "fr")


def test_voila_says_it_with_the_address(no_wish: pytest.MonkeyPatch) -> None:
    no_wish.setenv("SCRIPT_NAME", "/voila/render/05_overflow.ko.ipynb")
    assert language.language() == "en"  # any server may have such an address
    no_wish.setenv("SERVER_SOFTWARE", "voila/0.5.13")
    assert language.language() == "ko"
    no_wish.setenv("JPY_SESSION_NAME", "/home/user/01_quickstart.en.ipynb")
    assert language.language() == "en"


@pytest.mark.parametrize(
    ("typed", "code"),
    [("KO", "ko"), ("한국어", "ko"), (unicodedata.normalize("NFD", "한국어"), "ko"), ("English", "en"), ("EN", "en")],
)
def test_a_language_by_its_own_name(typed: str, code: str) -> None:
    try:
        set_language(typed)
        assert language.language() == code
    finally:
        set_language(None)


def test_it_can_be_set(other: None) -> None:
    assert language.language() == "ko"
    set_language("en")
    assert language.language() == "en"
    with pytest.raises(LanguageError, match=r"language: got 'xx', expected one of en \(English\), ko \(한국어\)"):
        set_language("xx")
    assert language.language() == "en"


def test_what_is_said(other: None) -> None:
    assert say("Step {step} of {steps}", step=3, steps=20) == "20 / 3"
    assert say("not in the catalogue: {name}", name="x") == "not in the catalogue: x"
    assert say_number("{count} layer", "{count} layers", 1234) == "<1,234>"
    set_language("en")
    assert say("Step {step} of {steps}", step=3, steps=20) == "Step 3 of 20"
    assert [say_number("{count} layer", "{count} layers", count) for count in (1, 2, 1234)] == [
        "1 layer",
        "2 layers",
        "1,234 layers",
    ]


@pytest.mark.parametrize(
    ("english", "expected"),
    [
        ("Step 3 of 20", "20 / 3"),
        ("got 'fp8', expected one of 'fp16', 'bf16'", "['fp8'|'fp16', 'bf16'|]"),
        ("got 'fp8', expected one of 'fp16', 'bf16'; did you mean 'fp16'?", "['fp8'|'fp16', 'bf16'|; 'fp16'?!]"),
        ("in backward of layers.3", "layers.3@BACK"),
        ("in backward of backward", "backward@BACK"),  # a layer of that name
        ("stopped at in backward of layers.3", "HALT layers.3@BACK"),
        ("scaling off, autocast fp16, 3 layers checkpointed", "OFF, autocast fp16, CKPT 3"),
        ("what nobody says", "what nobody says"),
        (
            "somebody's own note: scaling off, as we said, in backward of it all",
            "somebody's own note: scaling off, as we said, in backward of it all",
        ),
        ("a {brace} and x", "{} x"),
        ("Step 3 of 20. It is late.\nscaling off", "20 / 3. It is late.\nOFF"),
        ("", ""),
        ("got {0}, expected one of {name}", "[{0}|{name}|]"),
    ],
)
def test_finished_sentences(other: None, english: str, expected: str) -> None:
    assert in_language(english) == expected


def test_english_is_left_alone() -> None:
    assert in_language("Step 3 of 20") == "Step 3 of 20"
    assert page_script_in_language(words_script() + 'say("Step {step} of {steps}")').startswith(words_script())


def test_the_words_of_a_script(other: None) -> None:
    script = words_script() + 'const a = say("Step {step} of {steps}", { step }); say("unknown"); say("a {{brace}} and {name}");'
    words = json.loads(page_script_in_language(script).partition("const WORDS = ")[2].partition(";\n")[0])
    assert words == {key: TEXTS[key] for key in ("Step {step} of {steps}", "a {{brace}} and {name}")}
    assert page_script_in_language(script).count("const WORDS") == 1


def test_what_a_page_would_run_is_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(language._catalogues, "ko", Catalogue({"x y": '"; alert(1); // \\ </script>'}))
    set_language("ko")
    try:
        script = page_script_in_language(words_script() + 'say("x y")')
    finally:
        set_language(None)
    assert json.loads(script.partition("const WORDS = ")[2].partition(";\n")[0]) == {"x y": '"; alert(1); // \\ </script>'}


def test_it_costs_an_import_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; from amp_widgets import language; before = {'gettext'} & set(sys.modules);"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'numpy', 'babel')), language._catalogues)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] {'en': None}"


def test_many_sentences_are_not_kept_for_ever(other: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "MOST_KNOWN", 10)
    catalogue: Any = language._catalogues["ko"]
    for step in range(100):
        assert in_language(f"Step {step} of 100") == f"100 / {step}"
    assert len(catalogue._known) <= 10


class Listener:
    def __init__(self) -> None:
        self.heard: list[str] = []

    def speak(self) -> None:
        self.heard.append(language.language())


def test_who_follows_the_language_is_called_when_it_changes(other: None) -> None:
    listener, gone = Listener(), Listener()
    heard = gone.heard
    language.follow_language(listener.speak)
    language.follow_language(gone.speak)
    del gone
    set_language("ko")  # as it is
    set_language("en")
    set_language("ko")
    assert listener.heard == ["en", "ko"]
    assert heard == []


def test_short_texts_are_recognized_with_figures_only(monkeypatch: pytest.MonkeyPatch) -> None:
    catalogue = Catalogue({"{shown} of {count}": "{count}>{shown}"})
    assert catalogue.sentences("1,024 of 4,096") == "4,096>1,024"
    assert catalogue.sentences("weights of layers") is None


@pytest.mark.parametrize(
    ("english", "korean"),
    [
        (
            "Bit-identical to a run without checkpointing: the loss, 27 gradients, 24 buffers, 3 random states.",
            "체크포인팅 없는 실행과 비트까지 같습니다: 손실, 그래디언트 27개, 버퍼 24개, 난수 상태 3개.",
        ),
        (
            "15.3 MB of what was held do not depend on the batch (parameters, gradients, optimizer state, buffers)",
            "차지한 것 중 15.3 MB는 배치와 상관없습니다 (파라미터, 그래디언트, 옵티마이저 상태, 버퍼)",
        ),
    ],
)
def test_parts_of_a_list_stay_apart(english: str, korean: str) -> None:
    set_language("ko")
    try:
        assert in_language(english) == korean
    finally:
        set_language(None)


def told(texts: dict[Any, str], english: str, plurals: dict[str, str] | None = None) -> str | None:
    return Catalogue(texts, plurals=plurals or {}).sentences(english)


def test_placeholders_in_a_row_stay_in_a_row() -> None:
    texts = {
        "Out of memory at step {step}{where}{against}": "<{step}{where}{against}>", "in {phase} of {layer}": "{layer}@{phase}",
        ", above the budget of {limit}": ", > {limit}", "backward": "BACK",
    }  # fmt: skip
    assert told(texts, "Out of memory at step 3 in backward of 3, above the budget of 5 kB") == "<3 3@BACK, > 5 kB>"
    assert told(texts, "Out of memory at step 3, above the budget of 5 kB") == "<3, > 5 kB>"


def test_what_looks_like_nothing_else_ends_where_it_ends() -> None:
    texts = {"{operator} asked for {requested_bytes}{purpose}": "{operator}: {requested_bytes} !{purpose}", "(buffer)": "(BUF)"}
    assert told(texts, "aten::mm asked for 1.5 MB (buffer)") == "aten::mm: 1.5 MB ! (BUF)"
    assert told(texts, "aten::mm asked for 1.5 MB") == "aten::mm: 1.5 MB !"


@pytest.mark.parametrize(
    ("english", "expected"),
    [
        ("value: got normal, expected one of normal, loss", "value: [normal|normal, loss]"),
        ("loss: got normal, expected one of loss and normal or x", "loss: [normal|loss & normal | x]"),
        ("the kind is loss", "KIND LOSS"),
        ("the name is loss", "NAME loss"),
        ("the name is loss, normal", "NAME loss, normal"),
        ("loss: the kind is normal", "loss: KIND NORMAL"),
        ("the kind is loss, big loss, normal", "KIND LOSS, BIG, NORMAL"),
        ("the kind is x: got normal, expected one of normal, loss", "KIND x: [normal|normal, loss]"),
        ("loss", "LOSS"),
        ("loss, normal", "LOSS, NORMAL"),
    ],
)
def test_names_are_no_words(english: str, expected: str) -> None:
    texts = {
        "{name}: got {value}, expected one of {names}": "{name}: [{value}|{names}]", "loss": "LOSS", "normal": "NORMAL",
        "big loss": "BIG", "the kind is {kind}": "KIND {kind}",
        "the name is {name}": "NAME {name}", " and ": " & ", " or ": " | ",
    }  # fmt: skip
    assert told(texts, english) == expected


def test_one_long_text_says_more_than_several_short_ones() -> None:
    texts = {"{skipped} of {steps} steps skipped": "[{steps}/{skipped}]", "{what} skipped": "{what}?", "{n} steps": "{n}!"}
    assert told(texts, "2 of 6 steps skipped") == "[6/2]"


def test_the_plural_is_recognized() -> None:
    texts = {("{count} layer", 0): "<{count}>"}
    assert told(texts, "3 layers", {"{count} layers": "{count} layer"}) == "<3>"
    assert told(texts, "1 layer", {"{count} layers": "{count} layer"}) == "<1>"
    korean = language._read("ko")
    assert korean.sentences("12 layers checkpointed") == "레이어 12개 체크포인팅"
    assert "{count} layers checkpointed" in korean._plurals


def test_what_is_said_already_is_left_alone(other: None) -> None:
    assert in_language("scaling off") == "OFF"
    assert in_language(language.Said("scaling off")) == "scaling off"


@pytest.mark.parametrize("name", ["lesson.v2.ipynb", "01.ipynb", "2026.03.ipynb"])
def test_a_part_of_a_name_that_is_no_language_is_no_wish(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AMP_WIDGETS_LANG", raising=False)
    monkeypatch.setenv("JPY_SESSION_NAME", name)
    monkeypatch.setattr("locale.getlocale", lambda *category: (None, None))
    monkeypatch.setenv("LC_ALL", "ko_KR.UTF-8")  # of which nothing is installed
    assert language.language() == "ko"
