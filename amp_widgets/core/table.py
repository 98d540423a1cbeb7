"""Rows of text as a table: aligned for a terminal, escaped for a notebook."""

from __future__ import annotations

import html
from collections.abc import Collection, Sequence


def table_text(rows: Sequence[Sequence[str]], *, words: Collection[int]) -> list[str]:
    """Aligned lines, the first of them the headings; `words` are the columns that start at the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column in words else cell.rjust(width)
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
