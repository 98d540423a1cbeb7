"""How a recorded run stood at the step that is shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from amp_widgets.language import say
from amp_widgets.recording.writer import WriterState
from amp_widgets.widgets.state import DashboardState
from amp_widgets.widgets.status_line import StatusLine
from amp_widgets.widgets.transport import TransportState

QUIET_S = 10.0
"""When nothing was written to a file that is followed for so long, it is said."""


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
        self._writer: WriterState = "unknown"
        self._silent_s = 0.0
        self._model = model
        super().__init__(watched, state, still=still)

    def show(self, state: DashboardState, stands: TransportState, *, writer: WriterState, silent_s: float) -> None:
        """Show this step.

        Parameters
        ----------
        state, stands
            What was in force in it, and which it is.
        writer
            Of the file.
        silent_s
            Seconds since it wrote something; of a file that is followed.
        """
        self._stands, self._writer, self._silent_s = stands, writer, silent_s
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
        notes = list(traits["notes"])
        if self._writer == "gone":
            notes.append(say("Whoever wrote this file has ended without closing it: there is no more than this."))
        elif stands.mode == "following" and self._silent_s >= QUIET_S:
            tone = "waiting"
            notes.append(say("Nothing was written to the file for {duration}.", duration=_rough(self._silent_s)))
        return traits | {
            "notes": notes,
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


def _rough(duration_s: float) -> str:
    """So rough that it does not change all the time, which a screen reader may read out."""
    if duration_s < 60:
        return f"{duration_s // 10 * 10:.0f} s"
    return f"{duration_s // 60:.0f} min" if duration_s < 3600 else f"{duration_s // 3600:.0f} h"
