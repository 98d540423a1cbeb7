"""Texts that bring their languages with them, as those of lessons do, whose code is the same in all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from amp_widgets.language import wished_language

Text: TypeAlias = str | Mapping[str, str]
"""A text, or one in each language: ``{"en": "…", "ko": "…"}``."""


def spoken(text: Text) -> str:
    """The text in the language that is spoken here; in English, or else the first, where it has not that one.

    >>> spoken("2048"), spoken({"en": "yes"})
    ('2048', 'yes')
    """
    if isinstance(text, str):
        return text
    words = dict(text)
    return words.get(wished_language()) or words.get("en") or next(iter(words.values()), "")
