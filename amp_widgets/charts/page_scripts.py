"""The JavaScript and the CSS of charts."""

from __future__ import annotations

import pathlib

from amp_widgets.language import words_script

_HERE = pathlib.Path(__file__).parent


def page_script(name: str) -> str:
    """The JavaScript of a chart, after what all of them share."""
    return words_script() + "".join((_HERE / f"{part}.js").read_text(encoding="utf-8") for part in ("plotly_page", name))


def page_style() -> str:
    """The CSS of a chart."""
    return "".join((_HERE / f"{part}.css").read_text(encoding="utf-8") for part in ("themes", "live"))
