"""Which runs are overlaid, along what, how smooth, and which plots; and the table of their differences."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import traitlets

from amp_widgets.charts.course import METRICS, Align
from amp_widgets.charts.distinct import DASH_PX, line_look
from amp_widgets.charts.overlay import NAMES
from amp_widgets.core.table import told_cell
from amp_widgets.language import in_language, marked, say, say_number
from amp_widgets.recording.differences import Differences, equal_text
from amp_widgets.widgets.control import Control, page_script, page_style
from amp_widgets.widgets.state import DashboardState

SMOOTHINGS = (0, 10, 100, 1000)
"""Steps that are averaged over."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ListedRun:
    """A run in the list.

    Parameters
    ----------
    name
        For people.
    shown
        Whether it is drawn.
    steps
        How many it has so far.
    why_not
        Why nothing new is read any more; None while it is.
    """

    name: str
    shown: bool
    steps: int
    why_not: str | None


class RunsControl(Control):
    """Asks for another view of the runs: ``request(align="time")``, ``(smoothing=100)``, ``(metric=…, on=…)``, ``(run=…, on=…)``.

    Parameters
    ----------
    request
        Called with these, and with ``views=`` the number of views in pages when one opens or closes.
    """

    _esm = page_script("runs_control", "line_sample")
    _css = page_style("runs_view")

    align = traitlets.Unicode().tag(sync=True)
    smoothing = traitlets.Int().tag(sync=True)
    smoothings: traitlets.List[Any] = traitlets.List(help="Of each: steps and text.").tag(sync=True)
    metrics: traitlets.List[Any] = traitlets.List(help="Of each: name, text, whether it is shown.").tag(sync=True)
    runs: traitlets.List[Any] = traitlets.List(help="Of each: its name, look and state.").tag(sync=True)

    def __init__(self, request: Callable[..., None]) -> None:
        self._views: set[str] = set()
        super().__init__(request)
        self.smoothings = [
            [steps, say("average over {steps} steps", steps=f"{steps:,}") if steps else say("off")] for steps in SMOOTHINGS
        ]

    def show(self, *, align: Align, smoothing: int, metrics: Sequence[str], runs: Sequence[ListedRun]) -> None:
        """Show this: one message with what differs from what is shown."""
        self._put(
            {
                "align": align,
                "smoothing": smoothing,
                "metrics": [[name, say(NAMES[name]), name in metrics] for name in METRICS],
                "runs": [_listed(place, run) for place, run in enumerate(runs)],
            }
        )

    def _traits_for(self, state: DashboardState) -> dict[str, Any]:
        return {}  # it shows runs, and no session

    def _ask(self, message: Mapping[str, Any]) -> None:
        match message:
            case {"align": str(align)} if align in get_args(Align):
                self._request(align=align)
            case {"smoothing": int(steps)} if steps in SMOOTHINGS and not isinstance(steps, bool):
                self._request(smoothing=steps)
            case {"metric": str(metric), "on": bool(on)} if metric in METRICS:
                self._request(metric=metric, on=on)
            case {"run": int(place), "on": bool(on)} if 0 <= place < len(self.runs) and not isinstance(place, bool):
                self._request(run=place, on=on)
            case {"view": str(view), "open": bool(is_open)}:
                (self._views.add if is_open else self._views.discard)(view)
                self._request(views=len(self._views))


# Words of the table of differences that are in no sentence.
_NAMES = (
    marked("step time"), marked("time"), marked("steps"), marked("model"), marked("device"), marked("system"),
    marked("processors"), marked("changes on the way"), marked("on"), marked("off"),
    marked("{count} row is the same in both runs"), marked("{count} rows are the same in both runs"),
    marked("{count} row is the same in all {runs} runs"), marked("{count} rows are the same in all {runs} runs"),
)  # fmt: skip


class RunsTable(Control):
    """The differences of the runs, those rows first in which they differ; the others are folded. It asks for nothing."""

    _esm = page_script("runs_table", "line_sample")
    _css = page_style("runs_view")

    runs: traitlets.List[Any] = traitlets.List(help="As of RunsControl.").tag(sync=True)
    differing: traitlets.List[Any] = traitlets.List(help="Rows of texts.").tag(sync=True)
    equal: traitlets.List[Any] = traitlets.List(help="Rows of texts.").tag(sync=True)
    equal_text = traitlets.Unicode().tag(sync=True)
    obtained = traitlets.Unicode().tag(sync=True)
    why_not = traitlets.Unicode(help="Why there is no newer table.").tag(sync=True)

    def __init__(self) -> None:
        super().__init__(_nobody)

    def show(self, differences: Differences) -> None:
        """Show these."""
        rows = {
            key: [[told_cell(text) for text in (row.name, *row.texts)] for row in getattr(differences, key)]
            for key in ("differing", "equal")
        }
        self._put(
            {
                **rows,
                "runs": [_look(place) | {"name": name} for place, name in enumerate(differences.runs)],
                "equal_text": in_language(equal_text(len(rows["equal"]), len(differences.runs))) if rows["equal"] else "",
                "obtained": in_language(differences.obtained),
                "why_not": "",
            }
        )

    def fail(self, why_not: str) -> None:
        """Say why there is no newer table; the last one stays."""
        self._put({"why_not": why_not})

    def _traits_for(self, state: DashboardState) -> dict[str, Any]:
        return {}  # it shows runs, and no session

    def _ask(self, message: Mapping[str, Any]) -> None:
        """Nothing can be asked for."""


def _listed(place: int, run: ListedRun) -> dict[str, Any]:
    return _look(place) | {
        "name": run.name,
        "shown": run.shown,
        "state": say_number("{count} step", "{count} steps", run.steps),
        "why_not": in_language(run.why_not or ""),
    }


def _look(place: int) -> dict[str, Any]:
    (light, dash), (dark, _) = line_look(place, "light"), line_look(place, "dark")
    return {"light": light, "dark": dark, "dash": list(DASH_PX[dash])}


def _nobody(*_args: object, **_changes: object) -> None:
    """A table asks for nothing."""
