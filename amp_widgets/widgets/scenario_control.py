"""The head of a scenario: which situation is played, and the button that runs and measures it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import traitlets

from amp_widgets.language import marked
from amp_widgets.widgets.control import Control, page_script
from amp_widgets.widgets.state import DashboardState

_STYLE = Control._css + (Path(__file__).parent / "scenario.css").read_text(encoding="utf-8")

# Every sentence for people is one of these, whole, with named placeholders.
PAGE_WORDS: Mapping[str, str] = {
    "situation_title": marked("Situation"),
    "choose": marked("Choose a situation"),
    "measure_title": marked("Then measure"),
    "run": marked("Run and measure"),
    "again": marked("Run it again"),
    "progress": marked("How far the run is"),
}
"""What the page writes by itself."""
GUESS_FIRST = marked("Give a guess first.")
READY = marked("Trains {steps} steps on this machine, or a few more until it has paused, and measures the answer.")
STEP = marked("Step {step} of {steps}")
MEASURING = marked("Measuring …")
NOT_MEASURED = marked("It was not measured: {reason}")
BY_HAND = marked("Settings were changed by hand while it ran. The explanation is about the run as it was prepared.")


class ScenarioControl(Control):
    """The situations to choose from, what the chosen one is about, and what to watch.

    Parameters
    ----------
    choose
        Called with the name of the situation that the user chooses.
    titles
        Name and title of each.
    """

    _esm = page_script("scenario_control")
    _css = _STYLE

    words: traitlets.Dict[str, Any] = traitlets.Dict(dict(PAGE_WORDS)).tag(sync=True, said=True)
    titles: traitlets.List[Any] = traitlets.List(help="[name, title] of each.").tag(sync=True)
    chosen = traitlets.Unicode().tag(sync=True)
    situation = traitlets.Unicode().tag(sync=True)
    watch = traitlets.Unicode().tag(sync=True)

    def __init__(self, choose: Callable[[str], None], titles: Sequence[tuple[str, str]]) -> None:
        super().__init__(choose)
        self.name_anew(titles)

    def name_anew(self, titles: Sequence[tuple[str, str]]) -> None:
        """Have these titles, in another language."""
        self._put({"titles": [list(pair) for pair in titles]})

    def show(self, chosen: str, situation: str, watch: str) -> None:
        """Show this one."""
        self._put({"chosen": chosen, "situation": situation, "watch": watch})

    def _traits_for(self, state: DashboardState) -> dict[str, Any]:
        return {}

    def _ask(self, message: Mapping[str, Any]) -> None:
        name = message.get("choose")
        if name in [known for known, _ in self.titles] and name != self.chosen:
            self._request(name)


class MeasureControl(Control):
    """The button that runs and measures, how far that is, and what has gone wrong.

    Parameters
    ----------
    run
        Called, without arguments, when the user wants it run.
    """

    _esm = page_script("measure_control")
    _css = _STYLE

    words: traitlets.Dict[str, Any] = traitlets.Dict(dict(PAGE_WORDS)).tag(sync=True, said=True)
    ready = traitlets.Bool(False, help="Whether it may be run.").tag(sync=True)
    pending = traitlets.Bool(False, help="It runs, or is being measured.").tag(sync=True)
    again = traitlets.Bool(False, help="It was measured before.").tag(sync=True)
    note = traitlets.Unicode(GUESS_FIRST, help="Beside the button.").tag(sync=True, said=True)
    fraction = traitlets.Float(0.0).tag(sync=True)
    problem = traitlets.Unicode().tag(sync=True)

    def __init__(self, run: Callable[[], None]) -> None:
        super().__init__(run)

    def show(
        self,
        note: str,
        *,
        ready: bool = False,
        pending: bool = False,
        again: bool = False,
        fraction: float = 0.0,
        problem: str = "",
    ) -> None:
        """Show how it stands; see the traits."""
        told = {"note": note, "ready": ready, "pending": pending, "again": again, "fraction": fraction, "problem": problem}
        self._put(told)

    def _traits_for(self, state: DashboardState) -> dict[str, Any]:
        return {}

    def _ask(self, message: Mapping[str, Any]) -> None:
        if message.get("run") is True and self.ready and not self.pending:
            self._request()
