"""Texts that bring their languages with them, as those of lessons do, whose code is the same in all of them."""

from __future__ import annotations

import locale
import os
from collections.abc import Mapping
from typing import TypeAlias

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
    return words.get(_language()) or words.get("en") or next(iter(words.values()), "")


def _language() -> str:
    """``AMP_WIDGETS_LANG``, or that of the notebook's name (``name.ko.ipynb``), or the locale's."""
    chosen = os.environ.get("AMP_WIDGETS_LANG", "")
    named = os.path.basename(os.environ.get("JPY_SESSION_NAME", "")).removesuffix(".ipynb").rpartition(".")[2]
    return (chosen or (named if len(named) == 2 else "") or locale.getlocale()[0] or "en")[:2].lower()
