"""Writes the notebooks from the lessons: ``python tools/build_lessons.py``.

A lesson is one Markdown file, ``lessons/NN_name.md``, as jupytext reads it: its code once, and each piece of its text in English
and then in Korean. It becomes two notebooks, ``notebooks/NN_name.ipynb`` and ``notebooks/NN_name.ko.ipynb``, with the same code
cells, without outputs, and the same whenever it is built. ``lessons/README.md`` tells how a lesson is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

ROOT = Path(__file__).parents[1]
LESSONS = ROOT / "lessons"
NOTEBOOKS = ROOT / "notebooks"
SUFFIXES: Mapping[str, str] = {"en": ".ipynb", "ko": ".ko.ipynb"}
"""Language → how the names of its notebooks end."""
FOLDED = frozenset(("ask", "check"))
"""Tags of cells whose code is folded away: a question or its answer, and what asserts that the lesson says what is so."""

_OTHER = {"en": "[한국어]({ko})", "ko": "[English]({en}) · 위젯이 영어로 나오면 `%amp lang ko`"}
_NEXT = {"en": "Next: [{title}]({file})", "ko": "다음: [{title}]({file})"}


class LessonError(ValueError):
    """A lesson that is not as `lessons/README.md` says; the message has its name and the cell."""


def sources() -> list[Path]:
    """The lessons, in their order."""
    return sorted(LESSONS.glob("[0-9][0-9]_*.md"))


def notebook_path(source: Path, language: str) -> Path:
    """Where the notebook of a lesson belongs."""
    return NOTEBOOKS / f"{source.stem}{SUFFIXES[language]}"


def notebook(source: Path, language: str) -> NotebookNode:
    """The notebook of a lesson in one language.

    Raises
    ------
    LessonError
        When the lesson lacks a language, or has text that belongs to none.
    """
    prefix = source.stem.partition("_")[2].replace("_", "-")
    cells = []
    for number, cell in enumerate(_cells(source, language)):
        cell.id = f"{prefix}-{number:02}"
        cells.append(cell)
    cells[0].source += "\n\n" + _OTHER[language].format(**{each: notebook_path(source, each).name for each in SUFFIXES})
    following = _after(source)
    if following is not None:
        cells[-1].source += "\n\n" + _NEXT[language].format(
            title=_title(following, language), file=notebook_path(following, language).name
        )
    metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return new_notebook(cells=cells, metadata=metadata)


def text_of(made: NotebookNode) -> str:
    """What is written to the file."""
    return f"{nbformat.writes(made, version=4)}\n"


def main() -> None:
    for source in sources():
        for language in SUFFIXES:
            path = notebook_path(source, language)
            text = text_of(notebook(source, language))
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                path.write_text(text, encoding="utf-8")
                print(path.relative_to(ROOT))


def _cells(source: Path, language: str) -> Iterator[NotebookNode]:
    """The cells in one language: each piece of text must come in all of them, in their order."""
    languages = list(SUFFIXES)
    expected = 0
    for cell in jupytext.read(source).cells:
        if cell.cell_type == "markdown":
            found = cell.metadata.get("lang")
            if found != languages[expected]:
                raise LessonError(
                    f"{source.name}: got text in {found!r}, expected it in {languages[expected]!r}: {cell.source[:80]!r}"
                )
            expected = (expected + 1) % len(languages)
            if found == language:
                yield new_markdown_cell(cell.source)
            continue
        if expected:
            raise LessonError(
                f"{source.name}: got code, expected the text before it in {languages[expected]!r}: {cell.source[:80]!r}"
            )
        tags = list(cell.metadata.get("tags", []))
        metadata = {"jupyter": {"source_hidden": True}, "tags": [*tags, "hide-input"]} if FOLDED & {*tags} else {}
        yield new_code_cell(cell.source, metadata=metadata)
    if expected:
        raise LessonError(f"{source.name}: the last piece of text is missing in {languages[expected]!r}")


def _after(source: Path) -> Path | None:
    everything = sources()
    place = everything.index(source)
    return everything[place + 1] if place + 1 < len(everything) else None


def _title(source: Path, language: str) -> str:
    first = next(_cells(source, language))
    found = re.match(r"# (.+)", first.source)
    if found is None:
        raise LessonError(f"{source.name}: got {first.source[:80]!r}, expected a title first: '# …'")
    return found[1]


if __name__ == "__main__":
    main()
