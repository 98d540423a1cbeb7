"""What happened in a run up to the step that is shown: changes, skips, notes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import traitlets

from amp_widgets.charts.labels import shortened
from amp_widgets.core.history import Event
from amp_widgets.language import marked, reason_in_language, say, say_number
from amp_widgets.widgets.control import Control, page_script, page_style
from amp_widgets.widgets.state import DashboardState

Group = Literal["all", "changes", "scale", "notes"]
GROUPS: tuple[Group, ...] = get_args(Group)
MOST_ROWS = 200
REASON_CHARACTERS = 600


class EventsTable(Control):
    """The newest events of a group, the newest first. Asks ``request("seek", step=n)``."""

    _esm = page_script("events_table", "virtual_table")
    _css = page_style("virtual_table", "replay")

    rows: traitlets.List[Any] = traitlets.List(help="Of each: step, kind, a sentence, who asked, and its tone.").tag(sync=True)
    groups: traitlets.List[Any] = traitlets.List(help="Name and label of each.").tag(sync=True)
    group = traitlets.Unicode("all").tag(sync=True)
    summary = traitlets.Unicode().tag(sync=True)
    step = traitlets.Int(-1, help="That which is shown.").tag(sync=True)

    def __init__(self, request: Callable[..., None]) -> None:
        self._events: Sequence[Event] = ()
        super().__init__(request)
        self._put({"groups": [[group, say(label)] for group, label in _LABELS.items()]})
        self.show((), -1)

    def show(self, events: Sequence[Event], step: int) -> None:
        """Show the newest of these, which are in order of their steps, as of a step."""
        same = len(events) == len(self._events) and (events is self._events or events == self._events)
        self._events = events
        self._put({"step": step} if same and self.summary else {"step": step, **self._newest(self.group)})

    def _newest(self, group: str) -> dict[str, Any]:
        kinds = _KINDS.get(group, ())
        found = [event for event in reversed(self._events) if not kinds or event.kind in kinds]
        rows = [_row(event) for event in found[:MOST_ROWS]]
        if len(found) > MOST_ROWS:
            summary = say("the newest {most} of {count} events until here", most=MOST_ROWS, count=f"{len(found):,}")
        else:
            summary = (
                say_number("{count} event until here", "{count} events until here", len(found))
                if found
                else say("none until here")
            )
        return {"rows": rows, "summary": summary, "group": group}

    def _traits_for(self, state: DashboardState) -> dict[str, Any]:
        return {}  # it shows events

    def _ask(self, message: Mapping[str, Any]) -> None:
        match message:
            case {"group": str(group)} if group in GROUPS:
                self._put(self._newest(group))
            case {"step": int(step)}:
                self._request("seek", step=step)


_LABELS: Mapping[Group, str] = {
    "all": marked("all events"),
    "changes": marked("changes of settings"),
    "scale": marked("skips and scale"),
    "notes": marked("notes and runs"),
}
_KINDS: Mapping[str, tuple[str, ...]] = {
    "changes": ("applied", "rejected"),
    "scale": ("skipped", "scale_changed"),
    "notes": ("note", "run", "out_of_memory"),
}
_WORDS = {
    "applied": marked("applied"),
    "rejected": marked("rejected"),
    "skipped": marked("step skipped"),
    "scale_changed": marked("loss scale"),
    "run": marked("run"),
    "note": marked("note"),
    "out_of_memory": marked("out of memory"),
}
# Reasons of one word.
_REASONS = (
    marked("started"), marked("paused"), marked("resumed"), marked("stopped"), marked("finished"), marked("reset"),
    marked("failed"), marked("ready"), marked("running"), marked("closed"),
)  # fmt: skip
# Who asked, of those that are ours; another name is that of whoever gave it.
_SOURCES = {
    "script": marked("script"),
    "schedule": marked("schedule"),
    "magic": marked("magic"),
    "widget": marked("dashboard"),
    "fork": marked("fork"),
    "scaler": marked("scaler"),
    "user": marked("user"),
}
_BAD = ("rejected", "skipped", "out_of_memory")


def _row(event: Event) -> list[Any]:
    source = event.detail.get("source", "")
    who = "" if not isinstance(source, str) else say(_SOURCES[source]) if source in _SOURCES else shortened(source, 40)
    tone = "bad" if event.kind in _BAD else ""
    what = say(_WORDS[event.kind]) if event.kind in _WORDS else shortened(event.kind, 40)
    return [event.step, what, shortened(reason_in_language(event), REASON_CHARACTERS), who, tone]
