"""Starting, pausing and stopping a background run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import traitlets

from amp_widgets.core.run_state import RunState
from amp_widgets.language import marked, say
from amp_widgets.widgets.control import Control, page_script
from amp_widgets.widgets.state import DashboardState

Command = Literal["start", "pause", "resume", "single_step", "stop", "reset"]
COMMANDS: tuple[Command, ...] = get_args(Command)
"""Names of the methods of a `Controlled`."""

OWN_LOOP = marked("The loop runs in your cell; use session.fit(...) to start and pause it from here")

CLOSED = marked("The session is closed")


class RunControl(Control):
    """Start, Pause, Resume, Single step, Stop and Reset to first weights; enabled where they make sense.

    Asks with ``request(command)``. Without a prepared run a sentence stands in place of the buttons.
    """

    _esm = page_script("run_control")

    enabled: traitlets.List[Any] = traitlets.List(help="The commands that make sense now.").tag(sync=True)
    sentence = traitlets.Unicode(help="Shown in place of the buttons.").tag(sync=True)

    def _traits_for(self, state: DashboardState) -> dict[str, Any]:
        enabled = _ENABLED[state.run]
        if state.run == "ready" and state.step == 0:  # the first weights are in place
            enabled = tuple(command for command in enabled if command != "reset")
        return {"enabled": list(enabled), "sentence": say(OWN_LOOP) if state.run == "none" else ""}

    def lock(self, why: str = "") -> None:
        """Show that there is nothing left to start or stop."""
        super().lock(why)
        self._put({"sentence": say(CLOSED) if self.sentence else ""})

    def _ask(self, message: Mapping[str, Any]) -> None:
        command = message["command"]
        if command in COMMANDS:
            self._request(command)


_ENABLED: Mapping[RunState, tuple[Command, ...]] = {
    "none": (),
    "ready": ("start", "single_step", "reset"),
    "running": ("pause", "stop", "reset"),
    "paused": ("resume", "single_step", "stop", "reset"),
    "stopped": ("start", "single_step", "reset"),
    "finished": ("start", "single_step", "reset"),
    "failed": ("start", "single_step", "reset"),
}
