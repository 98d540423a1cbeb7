"""The picture that a notebook keeps of a dashboard, for when there is no kernel to make it live."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from IPython.core.display_functions import display, update_display

from amp_widgets.charts.labels import shortened
from amp_widgets.charts.mountain import KIND_COLOURS, mountain_sentence
from amp_widgets.charts.still import FEWER_POINTS, LINE_POINTS, memory_svg, picture_html, training_svg
from amp_widgets.core.history import Event
from amp_widgets.language import in_language, marked, say
from amp_widgets.widgets.memory_state import MemoryState
from amp_widgets.widgets.state import DashboardState
from amp_widgets.widgets.status_line import WORDS as RUN_WORDS
from amp_widgets.widgets.text import in_force_text

SOONEST_S, RAREST_S = 2.0, 600.0
"""Seconds between two pictures of a run that goes on, at first and after hours."""
PART_OF_AGE = 0.1
MOST_OF_TIME = 0.01
"""Drawing takes no more of the time than this."""
NOT_SHOWN = marked(
    "The amp_widgets dashboard is a widget, and none is shown here. To have it live, run this cell again in JupyterLab."
)
"""The plain text of the dashboard itself."""
MOST_REPORT_LINES, REPORT_CHARACTERS, LABEL_CHARACTERS = 12, 400, 80
COLUMNS = ("step", "loss", "scale", "skipped", "allocated_bytes", "peak_bytes", "reserved_bytes", "step_s")


class Drawn(Protocol):
    """What is read of a history."""

    def columns(self, *names: str) -> dict[str, npt.NDArray[Any]]: ...
    def events(self, *kinds: str) -> list[Event]: ...


class Still:
    """A second output below a dashboard, which the dashboard hides as long as it is on a page itself.

    JupyterLab shows neither the text nor a picture of a widget that the kernel does not know, only "model not found". So the
    picture has an output of its own. It is drawn anew when the run comes to a halt and now and then while it goes on.

    Parameters
    ----------
    clock
        Seconds, monotonic.

    Attributes
    ----------
    name
        A class that the picture has, by which the page finds it.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.name = f"ampw-still-{uuid.uuid4().hex}"
        self._display_id = self.name
        self._clock = clock
        self._since_s: float | None = None  # when it was put on the page
        self._next_s = -math.inf
        self._sentence = ""  # of the picture that is there
        self._stood: tuple[str, bool] | None = None  # the run then, and whether it went on

    def display(self, view: Mapping[str, Any], state: DashboardState, history: Drawn, memory: MemoryState) -> None:
        """Show the `view`, a bundle of MIME types, and the picture below it."""
        display(dict(view), raw=True)
        display(self._bundle(state, history, memory), raw=True, display_id=self._display_id)
        self._note_drawn(state)

    def display_in(self, display_id: str, state: DashboardState, history: Drawn, memory: MemoryState) -> None:
        """Show the picture in an output that is there already."""
        self._display_id = display_id
        update_display(self._bundle(state, history, memory), raw=True, display_id=display_id)
        self._note_drawn(state)

    def _note_drawn(self, state: DashboardState) -> None:
        self._since_s = self._clock()
        self._next_s = self._since_s + SOONEST_S
        self._sentence, self._stood = still_sentence(state), None

    def refresh(self, state: DashboardState, history: Drawn, memory: MemoryState, *, goes_on: bool) -> None:
        """Draw it anew where it is on a page, something has changed, and either it is time or the run `goes_on` no more."""
        now_s, sentence, stands = self._clock(), still_sentence(state), (state.run, goes_on)
        if self._since_s is None or sentence == self._sentence:
            return
        halts = not goes_on and stands != self._stood
        if now_s < self._next_s and not halts:
            return
        self._sentence, self._stood = sentence, stands
        update_display(self._bundle(state, history, memory), raw=True, display_id=self._display_id)
        cost_s = self._clock() - now_s
        rest_s = min(max((now_s - self._since_s) * PART_OF_AGE, SOONEST_S), RAREST_S)
        self._next_s = now_s + max(rest_s, cost_s / MOST_OF_TIME)

    def _bundle(self, state: DashboardState, history: Drawn, memory: MemoryState) -> dict[str, str]:
        columns = history.columns(*COLUMNS)
        caption = still_sentence(state)
        svg = ""
        if np.size(columns["step"]):
            points = FEWER_POINTS if memory.chosen else LINE_POINTS
            svg = training_svg(columns, history.events(), memory_source=state.memory_source, line_points=points)
        report: tuple[str, ...] = ()
        if memory.death is not None:
            lines = memory.death.report[:MOST_REPORT_LINES]
            report = (
                *([memory.fitted_text] if memory.fitted else []),
                *(shortened(in_language(line), REPORT_CHARACTERS) for line in lines),
            )
        picture = picture_html(svg, caption, class_=self.name, memory=_memory(memory), report=report)
        return {"text/plain": caption, "text/html": picture + _NOT_FOUND.format(self.name)}


def _memory(memory: MemoryState) -> tuple[str, str] | None:
    """The picture of the memory within a step, and its sentence."""
    if not memory.chosen:
        return None
    sentence = mountain_sentence(memory.chosen, memory.deaths, memory.ceiling)
    svg = memory_svg(memory.chosen, memory.deaths, memory.ceiling, KIND_COLOURS["light"])
    if len(memory.chosen) == 1 and memory.chosen[0].label in memory.deaths:  # its label says the same
        return svg, sentence[:1].upper() + sentence[1:]
    labels = " → ".join(shortened(in_language(profile.label), LABEL_CHARACTERS) for profile in memory.chosen)
    return svg, f"{labels}: {sentence}"


def still_sentence(state: DashboardState) -> str:
    """What a dashboard showed, and how to get it back."""
    run = "" if state.run == "none" else f"{say(RUN_WORDS[state.run][0])}, "
    return say(
        "An amp_widgets dashboard was here, at step {step} ({state}). "
        "To have it live, run this cell again, after the cells that it needs.",
        step=f"{state.step:,}",
        state=run + in_force_text(state),
    )


# In place of the output above, where JupyterLab says "model not found". It removes this from a notebook that is not trusted.
_NOT_FOUND = "<style>.jp-OutputArea-child:has(+ .jp-OutputArea-child .{}):not(:has(.ampw-dashboard)) {{ display: none; }}</style>"
