"""Rows of text as a table: aligned for a terminal, escaped for a notebook, in the reader's language."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Collection, Sequence

from amp_widgets.language import in_language, say


def told(rows: Sequence[Sequence[str]], *, sentences: Collection[int]) -> list[list[str]]:
    """The rows with their headings, and the cells of these columns, in the language in force; all else is names and numbers."""
    headings, *lines = rows
    return [
        [in_language(heading) for heading in headings],
        *([told_cell(cell) if column in sentences else cell for column, cell in enumerate(line)] for line in lines),
    ]


def told_cell(text: str) -> str:
    """A cell in the language in force, which may have a spread in it: ``12 ms (11 ms to 14 ms) ×0.9``."""
    return _SPREAD.sub(lambda found: say("({low} to {high})", low=found[1], high=found[2]), in_language(text))


_SPREAD = re.compile(r"\(([\d.,]+ \w+) to ([\d.,]+ \w+)\)")


def table_text(rows: Sequence[Sequence[str]], *, words: Collection[int]) -> list[str]:
    """Aligned lines, the first of them the headings; `words` are the columns that start at the left."""
    widths = [max(_width(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell + " " * (width - _width(cell)) if column in words else " " * (width - _width(cell)) + cell
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def table_html(rows: Sequence[Sequence[str]], *, words: Collection[int]) -> str:
    """A ``<table>``, the first row its headings; everything is escaped."""

    def line(cells: Sequence[str], tag: str) -> str:
        aligned = (f' style="text-align:{"left" if column in words else "right"}"' for column in range(len(cells)))
        return f"<tr>{''.join(f'<{tag}{a}>{html.escape(c)}</{tag}>' for a, c in zip(aligned, cells, strict=True))}</tr>"

    return f"<table>{line(rows[0], 'th')}{''.join(line(row, 'td') for row in rows[1:])}</table>"


def report_text(
    title: str, rows: Sequence[Sequence[str]], remarks: Sequence[str], *, words: Collection[int], sentences: Collection[int]
) -> str:
    """A title, a table and remarks below it, all of them in English, as text in the language in force.

    Parameters
    ----------
    title, remarks
        Whole sentences, or what is told as such.
    rows, words
        As in `table_text`.
    sentences
        As in `told`.
    """
    lines = table_text(told(rows, sentences=sentences), words=words)
    return "\n".join([in_language(title), *lines, *map(in_language, remarks)])


def report_html(
    title: str, rows: Sequence[Sequence[str]], remarks: Sequence[str], *, words: Collection[int], sentences: Collection[int]
) -> str:
    """The same as a ``<div>``; everything is escaped.

    Parameters
    ----------
    title, rows, remarks, words, sentences
        As in `report_text`.
    """
    table = table_html(told(rows, sentences=sentences), words=words)
    below = "".join(f"<div>{html.escape(in_language(remark))}</div>" for remark in remarks)
    return f"<div><b>{html.escape(in_language(title))}</b>{table}{below}</div>"


def _width(text: str) -> int:
    """In columns of a terminal, where Hangul, as other wide characters, takes two."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)
