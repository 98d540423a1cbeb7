"""The dashboard: a status line, the controls, the charts and the memory within a step of one session, kept up to date."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol, get_args

import ipywidgets

from amp_widgets import kernel
from amp_widgets.analysis.inspections import InspectionKind
from amp_widgets.charts.live import TrainingChart
from amp_widgets.core.history import History
from amp_widgets.core.run_state import ALIVE
from amp_widgets.errors import AmpWidgetsError, RunError
from amp_widgets.language import in_language, language, marked, say
from amp_widgets.widgets.autocast_control import AutocastControl
from amp_widgets.widgets.control import Control
from amp_widgets.widgets.dashboard_box import DashboardBox, parts_of
from amp_widgets.widgets.layers_control import LayersControl
from amp_widgets.widgets.memory_panel import MemoryPanel
from amp_widgets.widgets.memory_state import MemoryState, rounded_down
from amp_widgets.widgets.panels import Panels, Tab
from amp_widgets.widgets.presenting_control import PresentingControl
from amp_widgets.widgets.record_control import RecordControl, RecordState
from amp_widgets.widgets.refresher import PULL_S, Refresher
from amp_widgets.widgets.run_control import Command, RunControl
from amp_widgets.widgets.scaler_control import ScalerControl
from amp_widgets.widgets.state import Controlled, DashboardState, only_numbers_differ, same_state
from amp_widgets.widgets.status_line import StatusLine
from amp_widgets.widgets.still import Still
from amp_widgets.widgets.text import in_force_text, not_done_text

NUMBERS_S = 0.25
"""Seconds between two refreshes of the status line's numbers: more often they cannot be read."""
IDLE_S = 0.5
"""Seconds between two looks at a session in which nothing has moved for `CALM_S`, or at one that nobody watches."""
CALM_S = 2.0
QUIET_S = 3.0
QUIET_STEPS = 5
"""The user's own loop counts as over when no step has ended for so many seconds, and for so many steps' time."""
SECOND_PRESS_S = 1.0
"""A button pressed twice within this was pressed once: the page did not know yet what the first press did."""
COMPLAINT_S = 2.0
"""A complaint is shown at least so long; then it goes when the run or what is in force has changed since."""
SEE_BELOW = marked("See below what would have fitted.")


class Chart(Protocol):
    """What a dashboard needs of its chart, which is a widget too."""

    memory_source: str

    def pull(self, history: Any, *, at_once: bool = False) -> object:
        """Show what is new in the history; `at_once` though the page may not keep up, for the last time."""

    def close(self) -> None:
        """Free it."""


class Dashboard(DashboardBox):
    """A view of a session, and its switches. Any number of them may show one session.

    The dashboard pulls: a thread of its own looks at the session ten times a second at most and sends what has changed.
    Requests go to the session, which decides; what it refuses is shown in the status line. Closing the dashboard, or the
    session, ends the thread and lets go of the session.

    Parameters
    ----------
    source
        The session, or what else is `Controlled`.
    chart
        The chart; a new one without it. It is closed with the dashboard.
    clock
        Seconds, monotonic.
    live
        Whether a thread calls `tick`; without it, the caller does.
    """

    def __init__(
        self,
        source: Controlled,
        *,
        chart: Chart | None = None,
        clock: Callable[[], float] = time.monotonic,
        live: bool = True,
    ) -> None:
        self._source: Controlled | None = source
        self._clock = clock
        self._lock = threading.RLock()
        self._complaint: str | None = None
        self._rejected = False  # whether it is why a request or a command was rejected
        self._complained: tuple[float, object] | None = None  # when it was first shown, and how things stood
        self._pressed: tuple[Command, float] | None = None  # the last one that was carried out
        self._stepped_s = -math.inf  # when a loop of the user's own was last seen to go on
        self._watched = True
        self._moved_s = self._numbers_s = self._measured_s = clock()
        self._told_error: tuple[str, str] | None = None  # of a step that ran out of memory: the error, and what is shown of it
        self._shown = self._seen = self._without_traceback(source.dashboard_state())
        self._own_chart = chart is None
        self._chart: Chart = TrainingChart(memory_source=self._shown.memory_source) if chart is None else chart
        self._still = Still(clock)
        self._recording = RecordState().after(source.recorded_to)
        self._memory = MemoryState()
        super().__init__(self._made(), _dom_classes=("ampw-dashboard",))
        self._pull_chart()
        self._pull_memory(self._shown, trains=self._shown.run == "running" or self._shown.in_cell)
        self._refresher = Refresher(weakref.WeakMethod(self.tick))
        if live:
            self._refresher.start()

    def _made(self) -> tuple[ipywidgets.Widget, ...]:
        """What the dashboard is made of, in the language in force."""
        self._language = language()
        self._status = StatusLine(self._views_changed, self._shown, still=self._still.name)
        self._controls: tuple[Control, ...] = (
            RunControl(self._command, self._shown),
            AutocastControl(self._request, self._shown),
            ScalerControl(self._request, self._shown),
            LayersControl(self._request, self._shown),
        )
        self._recorder = RecordControl(self._record_command, self._recording)
        column = ipywidgets.VBox((*self._controls, self._recorder), _dom_classes=("ampw-controls",))
        add_class = getattr(self._chart, "add_class", None)
        if add_class is not None:
            add_class("ampw-chart")
        columns = ipywidgets.Box((column, self._chart), _dom_classes=("ampw-columns",))
        self._memory_panel = MemoryPanel(self._memory_command, self._request, self._memory, self._shown)
        self._panels = Panels(self._memory_panel, self._panel_command, self._request, self._select_tab, self._shown, self._clock)
        self._renderers: tuple[Control | Panels, ...] = (*self._controls, self._panels)
        return PresentingControl(), self._status, columns, self._panels

    def _speak(self) -> None:
        """Make all parts anew where the language is another one than the one they were made in. The tab that is shown stays."""
        if self._source is None or language() == self._language:
            return
        before = [widget for widget in self.widgets() if widget not in (self, self.layout)]
        tab, chart = self._panels.shown, self._chart
        if self._own_chart:
            self._chart = TrainingChart(memory_source=self._shown.memory_source)
        made = self._made()
        for widget in made:
            for part in parts_of(widget):
                kernel.answer_where_asked(getattr(part, "comm", None))
        self.children = made
        for widget in before:
            if widget is not chart or self._own_chart:
                widget.close()
        self._panels.select(tab)
        self._pull_chart(at_once=True)
        self._pull_panels(trains=self._shown.run == "running", everything=True)

    def tick(self) -> float | None:
        """Look at the session once, and show what has changed.

        Returns
        -------
        float or None
            Seconds until the next look; None when there will be none, because the dashboard or the session was closed.
        """
        with self._lock:
            self._speak()
            moved = self._pull_chart() if self._watched else False  # before the state, which may say that it is closed
            moved = self._refresh() or moved
            if self._source is None:
                return None
            now_s = self._clock()
            if moved:
                self._moved_s = now_s
            return PULL_S if self._watched and now_s - self._moved_s < CALM_S else IDLE_S

    @property
    def closed(self) -> bool:
        """Whether the dashboard has let go of its session."""
        return self._source is None

    def close(self) -> None:
        """Take the dashboard off the page and free it; the session goes on."""
        if "_refresher" not in self.__dict__:  # it was never finished, or is closed
            return
        self._refresher.stop()
        with self._lock:
            self._source = None
            self._memory = MemoryState()
            parts = list(self.widgets())
            del self._refresher
        self._chart.close()
        for widget in parts:
            if widget is not self:
                widget.close()
        super().close()

    def __repr__(self) -> str:
        state = self._shown
        return f"<amp_widgets dashboard: step {state.step}, {in_force_text(state)}>"

    def _ipython_display_(self, **_kwargs: Any) -> None:
        with self._lock:
            self._still.display(self._repr_mimebundle_(), self._shown, self._history(), self._memory)

    def show_picture_in(self, display_id: str) -> None:
        """Keep the picture for the notebook in an output that is there already; the dashboard itself is shown elsewhere."""
        with self._lock:
            self._still.display_in(display_id, self._shown, self._history(), self._memory)

    def _history(self) -> History:
        return History() if self._source is None else self._source.history_so_far

    # ---- from the session to the page -------------------------------------------------------------------------------

    def _refresh(self) -> bool:
        """Render the session's state where it differs from the one shown; whether it did."""
        if self._source is None:
            return False
        closed = self._source.closed  # asked first: the state is then the last one
        try:
            state = self._without_traceback(self._source.dashboard_state())
        except Exception as error:  # shown, not lost: this runs on a thread of ours
            self._complain(
                say("The session cannot be shown: {name}: {error}", name=type(error).__name__, error=in_language(str(error)))
            )
            state = dataclasses.replace(self._shown, last_rejection=None, complaint=None)
        now_s = self._clock()
        loop_runs = self._loop_runs(state, now_s)
        trains = state.run == "running" or loop_runs
        moved = self._pull_memory(state, trains=trains, everything=closed) if self._watched or closed else False
        if self._watched or closed:
            self._pull_panels(trains=trains, everything=closed)
        self._pull_recording()
        self._let_complaint_go(state, now_s)
        if self._complaint is not None and self._rejected:
            state = dataclasses.replace(state, last_rejection=self._complaint)
        elif self._complaint is not None:
            state = dataclasses.replace(state, complaint=self._complaint)
        loop_same = loop_runs == self._status.loop_runs
        if same_state(state, self._shown) and loop_same and not closed:
            return moved
        if not (self._watched or closed):
            return True
        soon = now_s - self._numbers_s < NUMBERS_S
        if soon and loop_same and not closed and only_numbers_differ(state, self._shown):
            return True  # they are shown a little later
        self._numbers_s = now_s
        self._shown = state
        if state.memory_source != self._chart.memory_source:
            self._chart.memory_source = state.memory_source
        self._status.loop_runs = loop_runs
        self._status.render(state)
        for part in self._renderers:
            part.render(state)
        self._refresh_still(state, goes_on=(state.run == "running" or loop_runs) and not closed)
        if closed:
            self._let_go()
        return True

    def _without_traceback(self, state: DashboardState) -> DashboardState:
        """One line in place of the traceback of a run that has ended because memory ran out: the report says more."""
        death = None if self._source is None else self._source.out_of_memory
        error = state.error
        if error is None:
            return state
        if death is not None and state.run == "failed" and death.step == state.step and death.report and _tells_of_memory(error):
            self._told_error = error, str(death.report[0])
        if self._told_error is None or self._told_error[0] != error:
            return state
        heading = self._told_error[1]
        return dataclasses.replace(state, error=heading if death is None else f"{in_language(heading)}. {say(SEE_BELOW)}")

    def _pull_chart(self, *, at_once: bool = False) -> bool:
        """Show the newest rows; whether there were any."""
        if self._source is None:
            return False
        try:
            history = self._source.history_so_far
            return bool(self._chart.pull(history, at_once=at_once))
        except Exception as error:
            self._complain(
                say("The chart cannot be drawn: {name}: {error}", name=type(error).__name__, error=in_language(str(error)))
            )
        return True

    def _pull_memory(self, state: DashboardState, *, trains: bool, everything: bool = False) -> bool:
        """Show the profiled steps where there is a new one, or other things have changed; whether they have.

        Where another tab is shown it is left alone, unless a step has run out of memory, or `everything` is to be shown.
        """
        source = self._source
        if source is None:
            return False
        try:
            death = source.out_of_memory
            if not everything and self._panels.shown != "memory" and death is self._memory.death:
                return False
            memory = MemoryState(
                profiles=source.profiles,
                shown=self._memory.shown,
                death=death,
                fitted=0 if death is None else rounded_down(state.step - death.step),
                budget_bytes=source.memory_budget,
                pending=source.profile_pending,
                trains=trains,
                why_not=source.why_not_profiled,
            )
            if memory == self._memory:
                return False
            if death is not None and death is not self._memory.death:
                self._panels.select("memory")  # the status line says that there is more below
            memory = dataclasses.replace(memory, shown=memory.shown_after(self._memory.offered))
            self._memory = memory  # first, so that what cannot be drawn is not tried again and again
            self._memory_panel.show(memory)
        except Exception as error:
            self._complain(
                say(
                    "The memory within a step cannot be shown: {name}: {error}",
                    name=type(error).__name__,
                    error=in_language(str(error)),
                )
            )
        return True

    def _pull_recording(self) -> None:
        """Show where the run is recorded to, if anywhere; the size of the file as often as the numbers."""
        if self._source is None or not self._watched:
            return
        path, now_s = self._source.recorded_to, self._clock()
        if path == self._recording.path and now_s - self._measured_s < NUMBERS_S:
            return
        self._measured_s = now_s
        self._recording = self._recording.after(path)
        self._recorder.show(self._recording)

    def _pull_panels(self, *, trains: bool, everything: bool) -> None:
        if self._source is None:
            return
        try:
            why_not = self._panels.pull(self._source, trains=trains, everything=everything)
        except Exception as error:
            why_not = say(
                "What is in the tab cannot be shown: {name}: {error}", name=type(error).__name__, error=in_language(str(error))
            )
        if why_not is not None:
            self._complain(why_not)

    def _refresh_still(self, state: DashboardState, *, goes_on: bool) -> None:
        if self._source is None:
            return
        try:
            self._still.refresh(state, self._source.history_so_far, self._memory, goes_on=goes_on)
        except Exception as error:
            self._complain(
                say(
                    "The picture for the notebook cannot be drawn: {name}: {error}",
                    name=type(error).__name__,
                    error=in_language(str(error)),
                )
            )

    def _loop_runs(self, state: DashboardState, now_s: float) -> bool:
        """Whether steps go on although no background run is alive; the end of a cell shows only in that none comes."""
        before, self._seen = self._seen, state
        if state.run in ALIVE:
            self._stepped_s = -math.inf
        elif state.step > before.step and before.run not in ALIVE:
            self._stepped_s = now_s
        if state.in_cell:
            return True
        step_s = state.step_s if math.isfinite(state.step_s) else 0.0
        return now_s - self._stepped_s < max(QUIET_S, QUIET_STEPS * step_s)

    def _complain(self, reason: str | None, *, rejected: bool = False) -> None:
        if reason is None or reason != self._complaint:
            self._complained = None
        self._complaint, self._rejected = reason, rejected

    def _let_complaint_go(self, state: DashboardState, now_s: float) -> None:
        if self._complaint is None:
            return
        stands = (state.run, state.settings)
        if self._complained is None:
            self._complained = (now_s, stands)
        elif stands != self._complained[1] and now_s - self._complained[0] >= COMPLAINT_S:
            self._complain(None)

    def _let_go(self) -> None:
        """The session is closed: keep what was shown last, and nothing else."""
        self._pull_chart(at_once=True)
        self._source = None
        self._status.show_closed()
        self._recording = self._recording.after(None)
        self._recorder.show(self._recording)
        for part in (*self._renderers, self._recorder):
            part.lock()

    # ---- from the page to the session -------------------------------------------------------------------------------

    def _request(self, **changes: Any) -> None:
        self._carry_out(lambda source: source.request(source="widget", **changes))

    def _command(self, command: Command) -> None:
        self._carry_out(lambda source: self._press(source, command))

    def _record_command(self, name: str, /, **values: Any) -> None:
        if name == "record":
            self._carry_out(lambda source: source.record(values["path"]), "record")
        else:
            self._carry_out(lambda source: source.stop_recording(), "record")

    def _memory_command(self, name: str, /, **values: Any) -> None:
        if name == "profile":
            self._carry_out(lambda source: source.profile_next_step(), "profile_next_step")
        elif name == "dismiss":
            self._carry_out(lambda source: source.clear_out_of_memory())
        elif name == "show":
            with self._lock:  # what is compared is a matter of this view alone
                self._memory = dataclasses.replace(self._memory, shown=tuple(values["labels"]))
                self._memory_panel.show(self._memory)

    def _panel_command(self, name: str, /, **values: Any) -> None:
        if name == "sample":
            self._carry_out(lambda source: source.count_gradients(), "count_gradients")
        elif name == "every":
            self._carry_out(lambda source: source.count_gradients(every=values["steps"]), "count_gradients")
        elif name == "automatic":
            self._carry_out(lambda source: setattr(source, "check_changes", values["on"]))
        elif name == "compare":
            self._carry_out(lambda source: source.compare_on_newest(**values), "compare")
        elif name == "cancel":
            self._carry_out(lambda source: source.cancel_comparison())
        elif name == "cancel_inspection":
            self._carry_out(lambda source: source.cancel_inspection(values["kind"]))
        else:
            kind = _KINDS[name]
            self._carry_out(lambda source: source.inspect(kind, **values), kind)

    def _select_tab(self, name: Tab) -> None:
        with self._lock:
            self._panels.select(name)
            self._refresh()
        self._refresher.wake()

    def _press(self, source: Controlled, command: Command) -> None:
        before, now_s = self._pressed, self._clock()
        try:
            getattr(source, command)()
        except RunError:
            if before is None or before[0] != command or now_s - before[1] > SECOND_PRESS_S:
                raise
        else:
            self._pressed = command, now_s

    def _carry_out(self, act: Callable[[Controlled], object], what: str = "") -> None:
        """Act; what hinders it is shown as why a request was rejected, or as why this was not done: see `not_done_text`."""
        source = self._source
        if source is None:
            return
        complaint = None
        try:
            act(source)
        except AmpWidgetsError as error:
            complaint = str(error)
        except Exception as error:  # a callback's traceback would go to a log that nobody reads
            complaint = f"{type(error).__name__}: {error}"
        self._complained = None
        if complaint is not None and what:
            complaint = not_done_text(what, complaint)
        self._complain(complaint, rejected=not what)
        with self._lock:
            self._refresh()
        self._refresher.wake()

    def _views_changed(self, count: int) -> None:
        """Nobody looks: nothing is sent until somebody does."""
        self._watched = count > 0
        if self._watched:
            self._refresher.wake()


_KINDS: Mapping[str, InspectionKind] = {kind: kind for kind in get_args(InspectionKind)}


def _tells_of_memory(error: str) -> bool:
    """Whether the last lines of a traceback end with an error of memory that ran out."""
    return any("memory" in line.lower() for line in error.splitlines() if line[:1].strip())
