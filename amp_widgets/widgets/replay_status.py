"""How a recorded run stood at the step that is shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from amp_widgets.language import say
from amp_widgets.widgets.state import DashboardState
from amp_widgets.widgets.status_line import StatusLine
from amp_widgets.widgets.transport import TransportState


class ReplayStatus(StatusLine):
    """A status line for a step of a run that was recorded.

    Parameters
    ----------
    watched, still
        As of every status line.
    state, stands
        What to show first.
    model
        The name of the model, for people.
    """

    def __init__(
        self, watched: Callable[[int], None], state: DashboardState, stands: TransportState, *, still: str, model: str
    ) -> None:
        self._stands = stands
        self._model = model
        super().__init__(watched, state, still=still)

    def show(self, state: DashboardState, stands: TransportState) -> None:
        """Show this step."""
        self._stands = stands
        self.render(state)

    def show_closed(self) -> None:
        """Show that there is nothing left to move through."""
        self._put({"word": say("closed"), "tone": "idle", "locked": True})

    def _traits_for(self, state: DashboardState) -> dict[str, Any]:
        traits = super()._traits_for(state)
        stands = self._stands
        number, *others = traits["numbers"]
        if stands.step >= 0:
            of = say("of {last}", last=f"{stands.last:,}")
            skipped = f" · {say('{count} skipped', count=f'{state.skipped_steps:,}')}" if state.skipped_steps else ""
            number = [say("Step"), f"{stands.step:,}", of + skipped]
        word, tone = _words(stands)
        return traits | {
            "word": word,
            "tone": tone,
            "in_force_label": say("In force in this step") if stands.step >= 0 else say("In force"),
            "machine": " · ".join(filter(None, (self._model, traits["machine"]))),
            "numbers": [number, *others],
        }


def _words(stands: TransportState) -> tuple[str, str]:
    if stands.mode == "playing":
        return say("replaying"), "active"
    if stands.mode == "following":
        return say("following"), "active"
    if stands.step < 0:
        return say("no steps"), "idle"
    return (say("replay, at the end"), "done") if stands.at_end else (say("replay, paused"), "waiting")
