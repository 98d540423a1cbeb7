"""How the session stands, at one glance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import traitlets

from amp_widgets.core.run_state import ALIVE, RunState
from amp_widgets.core.settings import describe_changes
from amp_widgets.language import in_language, marked, say
from amp_widgets.widgets.control import Control, page_script
from amp_widgets.widgets.state import DashboardState
from amp_widgets.widgets.text import UNKNOWN, bytes_text, in_force_text, loss_text, rate_text, seconds_text


class StatusLine(Control):
    """State, step, speed, memory, what is in force and what waits, why a request was rejected, what
    else could not be done, and the end of an error.

    It asks for nothing. Everything is sent as text, and the page makes text of it.

    Parameters
    ----------
    watched
        Called with the number of views in pages each time one opens or closes. A page that went away without saying so still
        counts.
    state
        What to show first.
    still
        A class of elements that are hidden as long as there is a view of this on their page.
    """

    _esm = page_script("status_line")

    word = traitlets.Unicode(help="The state in a word.").tag(sync=True)
    tone = traitlets.Unicode(help="Colour of the word: active, waiting, idle, done or bad.").tag(sync=True)
    numbers: traitlets.List[Any] = traitlets.List(help="Of each: label, value, and small print.").tag(sync=True)
    machine = traitlets.Unicode().tag(sync=True)
    in_force_label = traitlets.Unicode().tag(sync=True)
    in_force = traitlets.Unicode().tag(sync=True)
    waiting = traitlets.Unicode().tag(sync=True)
    rejection = traitlets.Unicode(help="Why a request was rejected.").tag(sync=True)
    complaint = traitlets.Unicode(help="What else could not be done or shown, a whole sentence.").tag(sync=True)
    error = traitlets.Unicode().tag(sync=True)
    notes: traitlets.List[Any] = traitlets.List().tag(sync=True)
    still = traitlets.Unicode().tag(sync=True)

    def __init__(self, watched: Callable[[int], None], state: DashboardState | None = None, *, still: str = "") -> None:
        self._views: set[str] = set()
        self.loop_runs = False
        super().__init__(watched, state)
        self._put({"still": still, "in_force_label": say("In force")})

    loop_runs: bool
    """Whether a loop of the user's own trains: steps go on, and no background run is alive. Shown with the next `render`."""

    def show_closed(self) -> None:
        """Show that the session is closed."""
        label = say("closed: the model is as it was; last in force")
        self._put({"word": say("closed"), "tone": "idle", "waiting": "", "in_force_label": label, "locked": True})

    def _traits_for(self, state: DashboardState) -> dict[str, Any]:
        word, tone = say(WORDS[state.run][0]), WORDS[state.run][1]
        if self.loop_runs and state.run not in ALIVE:
            word, tone = say("your loop"), "active"
        elif state.run == "none" and state.step == 0:
            word = say("attached")
        return {
            "word": word,
            "tone": tone,
            "numbers": _numbers(state),
            "machine": " · ".join(
                filter(
                    None,
                    (
                        state.device,
                        say("torch {torch_version}", torch_version=state.torch_version) if state.torch_version else "",
                    ),
                )
            ),
            "in_force": in_force_text(state),
            "waiting": in_language(describe_changes(state.waiting)),
            "rejection": in_language(state.last_rejection or ""),
            "complaint": in_language(state.complaint or ""),
            "error": in_language(state.error or ""),
            "notes": [in_language(note) for note in state.notes],
        }

    def _ask(self, message: Mapping[str, Any]) -> None:
        view = str(message.get("view", ""))
        if message.get("open"):
            self._views.add(view)
        else:
            self._views.discard(view)
        self._request(len(self._views))


WORDS: Mapping[RunState, tuple[str, str]] = {
    "none": (marked("idle"), "idle"),
    "ready": (marked("ready"), "idle"),
    "running": (marked("running"), "active"),
    "paused": (marked("paused"), "waiting"),
    "stopped": (marked("stopped"), "idle"),
    "finished": (marked("finished"), "done"),
    "failed": (marked("failed"), "bad"),
}


def _numbers(state: DashboardState) -> list[list[str]]:
    known = state.step > 0
    rates = [say("{steps_per_s} steps/s", steps_per_s=rate_text(state.steps_per_s))]
    if rate_text(state.samples_per_s) != UNKNOWN:
        rates.append(say("{samples_per_s} samples/s", samples_per_s=rate_text(state.samples_per_s)))
    after, highest = bytes_text(state.allocated_bytes), bytes_text(state.overall_peak_bytes)
    memory = (
        ""
        if bytes_text(state.peak_bytes) == UNKNOWN
        else say("{after} after the step · highest {highest}", after=after, highest=highest)
    )
    return [
        [
            say("Step"),
            f"{state.step:,}",
            say("{skipped_steps} skipped", skipped_steps=f"{state.skipped_steps:,}") if known else "",
        ],
        [say("Loss"), loss_text(state.loss) if known else UNKNOWN, ""],
        [say("Step time"), seconds_text(state.step_s), " · ".join(rates) if rate_text(state.steps_per_s) != UNKNOWN else ""],
        [say("Peak memory"), bytes_text(state.peak_bytes), memory, in_language(state.memory_source)],
    ]
