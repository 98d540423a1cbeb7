"""The JavaScript of charts."""

from __future__ import annotations

import pathlib

from amp_widgets.language import words_script


def page_script(name: str) -> str:
    """The JavaScript of a chart, after what all of them share."""
    here = pathlib.Path(__file__).parent
    return words_script() + "".join((here / f"{part}.js").read_text(encoding="utf-8") for part in ("plotly_page", name))
