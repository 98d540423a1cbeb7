"""The training charts as they stand, as one picture: where the packages for the widgets are missing."""

from __future__ import annotations

import html
from typing import Protocol

import numpy as np

from amp_widgets.charts.still import picture_html, training_svg
from amp_widgets.core.history import History
from amp_widgets.language import in_language
from amp_widgets.widgets.still import COLUMNS


class Pictured(Protocol):
    """Of whom a picture is made."""

    @property
    def history_so_far(self) -> History:
        """Every step whose values have arrived."""

    @property
    def memory_source(self) -> str:
        """How the memory numbers are obtained."""


class Picture:
    """A sentence, and a picture of the charts as they are when it is displayed; needs neither ipywidgets, anywidget nor plotly.

    Parameters
    ----------
    session
        Whose history is drawn.
    sentence
        What is said above it.
    """

    def __init__(self, session: Pictured, sentence: str) -> None:
        self._session = session
        self._sentence = sentence

    def __repr__(self) -> str:
        return in_language(self._sentence)

    def _repr_html_(self) -> str:
        history = self._session.history_so_far
        columns = history.columns(*COLUMNS)
        if not np.size(columns["step"]):
            return f"<p>{html.escape(repr(self))}</p>"
        return picture_html(training_svg(columns, history.events(), memory_source=self._session.memory_source), repr(self))
