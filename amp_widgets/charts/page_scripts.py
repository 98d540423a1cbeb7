"""The JavaScript of charts."""

from __future__ import annotations

import pathlib


def page_script(name: str) -> str:
    """The JavaScript of a chart, after what all of them share."""
    here = pathlib.Path(__file__).parent
    return "".join((here / f"{part}.js").read_text(encoding="utf-8") for part in ("plotly_page", name))
