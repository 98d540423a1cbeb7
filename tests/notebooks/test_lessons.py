"""The committed notebooks are what the lessons build, with the same code in both languages, and each asks, answers and checks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"
SOURCES = sorted((ROOT / "lessons").glob("[0-9][0-9]_*.md"))
HANGUL = re.compile("[가-힣]")

each_lesson = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)


def notebook_of(source: Path, ending: str) -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOKS / f"{source.stem}{ending}", as_version=4)


def code_of(source: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook_of(source, ".ipynb").cells if cell.cell_type == "code"]


def calls(source: Path, name: str) -> Iterator[tuple[int, ast.Call]]:
    """Of ``….name(…)``, with the number of the code cell."""
    for number, cell in enumerate(code_of(source)):
        python = "\n".join(line for line in cell.source.splitlines() if not line.startswith("%"))
        for node in ast.walk(ast.parse(python)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name:
                yield number, node


@each_lesson
def test_the_committed_notebooks_are_what_it_builds(source: Path, build_lessons: ModuleType) -> None:
    for language in build_lessons.SUFFIXES:
        built = build_lessons.text_of(build_lessons.notebook(source, language))
        path = build_lessons.notebook_path(source, language)
        assert path.read_text(encoding="utf-8") == built, "run: python tools/build_lessons.py"
        assert built == build_lessons.text_of(build_lessons.notebook(source, language))  # the same every time


def test_there_is_no_other_notebook(build_lessons: ModuleType) -> None:
    built = {build_lessons.notebook_path(source, language) for source in SOURCES for language in build_lessons.SUFFIXES}
    assert set(NOTEBOOKS.glob("*.ipynb")) == built
    assert [source.stem[:2] for source in SOURCES] == [f"{number:02}" for number in range(1, len(SOURCES) + 1)]


@each_lesson
def test_the_code_is_the_same_in_both_languages_and_the_text_is_not(source: Path) -> None:
    english, korean = notebook_of(source, ".ipynb").cells, notebook_of(source, ".ko.ipynb").cells
    assert [cell.id for cell in english] == [cell.id for cell in korean]
    assert len({cell.id for cell in english}) == len(english)
    assert [cell.cell_type for cell in english] == [cell.cell_type for cell in korean]
    for one, other in zip(english, korean, strict=True):
        if one.cell_type == "code":
            assert one == other
            continue
        assert HANGUL.search(other.source)
        assert not HANGUL.search(one.source.replace("[한국어]", ""))
        assert [line[: line.find(" ")] for line in one.source.splitlines() if line.startswith("#")] == [
            line[: line.find(" ")] for line in other.source.splitlines() if line.startswith("#")
        ]
        assert re.findall(r"^(?:- |\d+\. |\|)", one.source, re.M) == re.findall(r"^(?:- |\d+\. |\|)", other.source, re.M)


@each_lesson
def test_links_lead_somewhere(source: Path) -> None:
    for ending in (".ipynb", ".ko.ipynb"):
        for cell in notebook_of(source, ending).cells:
            for target in re.findall(r"\]\(([^)#:]+)\)", cell.source) if cell.cell_type == "markdown" else ():
                assert (NOTEBOOKS / target).exists(), target


@each_lesson
def test_a_lesson_asks_before_it_answers_and_checks_what_it_says(source: Path) -> None:
    cells = code_of(source)
    tags = [set(cell.metadata.get("tags", ())) for cell in cells]
    asked: dict[str, int] = {}
    for number, cell in enumerate(cells):
        found = re.search(r"^(\w+) = aw\.ask\(", cell.source, re.M)
        if found:
            assert "ask" in tags[number]
            assert cell.source.splitlines()[-1] == found[1], "the question is to be shown"
            asked[found[1]] = number
    assert asked
    answered = {}
    for number, call in calls(source, "reveal"):
        assert "ask" in tags[number]
        assert isinstance(call.func, ast.Attribute)
        assert isinstance(call.func.value, ast.Name)
        answered[call.func.value.id] = number
    assert answered.keys() == asked.keys()
    assert all(answered[name] > number for name, number in asked.items())

    checks = [cell for cell, its in zip(cells, tags, strict=True) if "check" in its]
    assert checks
    assert all("assert " in cell.source and cell.metadata.jupyter.source_hidden for cell in checks)
    assert max(answered.values()) < max(number for number, its in enumerate(tags) if "check" in its)


@each_lesson
def test_what_is_asked_and_answered_is_in_both_languages(source: Path) -> None:
    texts: list[Any] = [call.args[0] for _, call in calls(source, "ask")]
    texts += [word.value for _, call in calls(source, "reveal") for word in call.keywords if word.arg in ("why", "more")]
    for text in texts:
        words = ast.literal_eval(text)
        assert list(words) == ["en", "ko"]
        assert HANGUL.search(words["ko"])
        assert not HANGUL.search(words["en"])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            '<!-- #region lang="en" -->\n# A\n<!-- #endregion -->\n\n```python\nx = 1\n```\n',
            "expected the text before it in 'ko'",
        ),
        ('<!-- #region lang="en" -->\n# A\n<!-- #endregion -->\n', "is missing in 'ko'"),
        ('<!-- #region lang="ko" -->\n# A\n<!-- #endregion -->\n', "got text in 'ko', expected it in 'en'"),
        ("# A\n", "got text in None, expected it in 'en'"),
    ],
)
def test_a_lesson_without_one_of_the_languages_is_refused(
    wrong: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build_lessons: ModuleType
) -> None:
    monkeypatch.setattr(build_lessons, "LESSONS", tmp_path)
    source = tmp_path / "01_wrong.md"
    source.write_text(wrong, encoding="utf-8")
    with pytest.raises(build_lessons.LessonError, match=re.escape(message)):
        build_lessons.notebook(source, "en")
