"""The dashboard of a run that was recorded, or is being recorded by another kernel: read-only, and free of torch."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, get_args

import ipywidgets

from amp_widgets import kernel
from amp_widgets.charts.live import TrainingChart
from amp_widgets.errors import AmpWidgetsError
from amp_widgets.language import follow_language, in_language, marked, say
from amp_widgets.recording.run import Run, wal_of
from amp_widgets.widgets.autocast_control import AutocastControl
from amp_widgets.widgets.control import Control
from amp_widgets.widgets.dashboard_box import DashboardBox, parts_of
from amp_widgets.widgets.events_table import EventsTable
from amp_widgets.widgets.gradient_panel import GradientPanel
from amp_widgets.widgets.gradient_state import GradientState
from amp_widgets.widgets.layers_control import LayersControl
from amp_widgets.widgets.memory_panel import MemoryPanel
from amp_widgets.widgets.memory_state import MemoryState
from amp_widgets.widgets.playback import Playback
from amp_widgets.widgets.presenting_control import PresentingControl
from amp_widgets.widgets.refresher import PULL_S, Refresher
from amp_widgets.widgets.replay_course import Course, HistoryUpTo, Outline
from amp_widgets.widgets.replay_status import ReplayStatus
from amp_widgets.widgets.scaler_control import ScalerControl
from amp_widgets.widgets.state import same_state
from amp_widgets.widgets.still import Still
from amp_widgets.widgets.tab_bar import TabBar
from amp_widgets.widgets.text import in_force_text
from amp_widgets.widgets.transport import MARKED, Transport, TransportState

FOLLOW_S = 0.5
"""Seconds between two looks into a file that is followed; it is written four times a second."""
REST_S = 0.5
"""Seconds between two looks when nothing has moved for `CALM_S`: until then, the chart may have been too busy to be told."""
CALM_S = 2.0
WHY_LOCKED = marked("this is a replay")
SENTENCE = marked(
    "A replay of {file}, not live: what the controls show was in force in the step that is shown, and cannot be changed. "
    "Pauses of the run are passed over."
)

Tab = Literal["events", "memory", "gradients"]
TABS: tuple[Tab, ...] = get_args(Tab)
TITLES: Mapping[Tab, str] = {
    "events": marked("Events"),
    "memory": marked("Memory"),
    "gradients": marked("Gradients"),
}


class Chart(Protocol):
    """What a replay needs of its chart, which is a widget too."""

    memory_source: str

    def pull(self, history: Any, *, at_once: bool = False) -> object:
        """Show what is new in the history; another one than before replaces it."""

    def close(self) -> None:
        """Free it."""


class ReplayDashboard(DashboardBox):
    """A view of a recorded run, at a step. Any number of them may show one run, each at a step of its own.

    It opens at the end of the run. A file that another kernel seems to be writing is followed from the start.

    Parameters
    ----------
    run
        An open one; it is not closed with the dashboard.
    chart
        The chart; a new one without it. It is closed with the dashboard.
    clock
        Seconds, monotonic.
    live
        Whether a thread calls `tick`; without it, the caller does.

    Raises
    ------
    RecordingError
        When the run is closed, or its file is damaged.
    """

    def __init__(
        self,
        run: Run,
        *,
        chart: Chart | None = None,
        clock: Callable[[], float] = time.monotonic,
        live: bool = True,
    ) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._course: Course | None = Course(run)
        course = self._course
        self._playback = Playback(course, clock)
        self._refreshed_s = self._moved_s = clock()
        self._news_s = -math.inf
        if not _is_over(course) and wal_of(run.path).exists():  # a file of old may have it and nobody who writes, too
            self._playback.follow()
        self._watched = True
        self._complaint: str | None = None
        self._tab: Tab = "events"
        self._history: HistoryUpTo = course.history_at(self._playback.row)
        self._stands = TransportState.of(course, self._playback)
        self._shown = course.state_at(self._playback.row)
        self._memory = MemoryState(trains=False, profiles=course.profiles_at(self._playback.row))
        self._still = Still(clock)
        self._file, self._model = run.path.name, _model_of(run)
        self._own_chart = chart is None
        self._chart: Chart = TrainingChart(memory_source=self._shown.memory_source) if chart is None else chart
        super().__init__(self._made(course), _dom_classes=("ampw-dashboard",))
        self._show()
        self._refresher = Refresher(weakref.WeakMethod(self.tick))
        if live:
            self._refresher.start()
        follow_language(self._speak)

    def _made(self, course: Course) -> tuple[ipywidgets.Widget, ...]:
        """What the dashboard is made of, in the language in force."""
        self._status = ReplayStatus(self._views_changed, self._shown, self._stands, still=self._still.name, model=self._model)
        self._transport = Transport(self._move, self._stands, sentence=say(SENTENCE, file=self._file))
        self._transport.mark(course.events(course.events_at(course.rows - 1)))
        self._controls: tuple[Control, ...] = tuple(
            kind(_nothing, self._shown) for kind in (AutocastControl, ScalerControl, LayersControl)
        )
        for control in self._controls:
            control.lock(say(WHY_LOCKED))
        add_class = getattr(self._chart, "add_class", None)
        if add_class is not None:
            add_class("ampw-chart")
        column = ipywidgets.VBox(self._controls, _dom_classes=("ampw-controls",))
        columns = ipywidgets.Box((column, self._chart), _dom_classes=("ampw-columns",))
        self._bar = TabBar(self._select, [(name, say(title)) for name, title in TITLES.items()])
        self._events = EventsTable(self._move)
        self._panel = MemoryPanel(self._memory_command, _nothing, self._memory, self._shown, recorded=True)
        self._gradients = GradientPanel(_nothing, _nothing, dashboard=self._shown, recorded=True)
        panels: tuple[Any, ...] = (self._events, self._panel, self._gradients)
        for name, panel in zip(TABS, panels, strict=True):
            panel.add_class("ampw-tab")
            panel.add_class(f"ampw-tab-{name}")
        tabs = ipywidgets.Box((self._bar, *panels), _dom_classes=("ampw-tabs",))
        return PresentingControl(), self._status, self._transport, columns, tabs

    def _speak(self) -> None:
        """Make all parts anew, in the language that is in force now. The step and the tab that are shown stay."""
        with self._lock:
            course = self._course
            if course is None:
                return
            before = [widget for widget in self.widgets() if widget not in (self, self.layout)]
            chart = self._chart
            if self._own_chart:
                self._chart = TrainingChart(memory_source=self._shown.memory_source)
            made = self._made(course)
            for widget in made:
                for part in parts_of(widget):
                    kernel.answer_where_asked(getattr(part, "comm", None))
            self.children = made
            for widget in before:
                if widget is not chart or self._own_chart:
                    widget.close()
            self._bar.select(self._tab)
            self._chart.pull(self._history, at_once=True)
            self._show()

    def tick(self) -> float | None:
        """Show where the replay is now.

        Returns
        -------
        float or None
            Seconds until the next look; None when there will be none, because the dashboard was closed.
        """
        with self._lock:
            if self._course is None:
                return None
            if not self._watched:
                return REST_S
            now_s, before = self._clock(), self._playback.row
            moves = self._playback.mode != "still"
            self._follow_file()
            if self._playback.advance() != before or moves:
                self._moved_s = now_s
            self._show()
            return PULL_S if now_s - self._moved_s < CALM_S else REST_S

    @property
    def closed(self) -> bool:
        """Whether the dashboard has let go of the run."""
        return self._course is None

    @property
    def step(self) -> int:
        """The step that is shown; -1 where the run has none."""
        return self._stands.step

    def close(self) -> None:
        """Take the dashboard off the page and free it; the run stays open."""
        if "_refresher" not in self.__dict__:  # it was never finished, or is closed
            return
        self._refresher.stop()
        with self._lock:
            parts = list(self.widgets())
            self._course = None
            self._memory = MemoryState()
            for name in ("_refresher", "_playback", "_history"):
                delattr(self, name)
        self._chart.close()
        for widget in parts:
            if widget is not self:
                widget.close()
        super().close()

    def __repr__(self) -> str:
        stands = self._stands
        return f"<amp_widgets replay: step {stands.step} of {stands.last}, {in_force_text(self._shown)}>"

    def _ipython_display_(self, **_kwargs: Any) -> None:
        with self._lock:
            if self._course is not None:
                self._still.display(self._repr_mimebundle_(), self._shown, Outline(self._history), self._memory)

    # ---- from the run to the page -----------------------------------------------------------------------------------

    def _show(self) -> None:
        """Render what has changed; one message for each part that it has changed in."""
        course = self._course
        if course is None:
            return
        row = self._playback.row
        self._stands = stands = TransportState.of(course, self._playback)
        try:
            state = course.state_at(row)
        except AmpWidgetsError as error:
            self._complaint = in_language(str(error))
            state = self._shown
        try:
            if not self._history.grow(row):
                self._history = course.history_at(row)
            self._chart.pull(self._history)
        except Exception as error:  # shown, not lost: this runs on a thread of ours
            self._complaint = say(
                "The chart cannot be drawn: {name}: {error}", name=type(error).__name__, error=in_language(str(error))
            )
        self._show_tab()
        if self._complaint is not None:
            state = dataclasses.replace(state, complaint=self._complaint)
        self._transport.show(stands)
        silent_s = min(course.silent_s, self._clock() - self._news_s) if stands.mode == "following" else 0.0
        self._status.show(state, stands, writer=course.writer, silent_s=silent_s)
        if not same_state(state, self._shown):
            self._shown = state
            for control in self._controls:
                control.render(state)
            self._panel.render(state)
        if stands.mode == "still":
            self._still.refresh(state, Outline(self._history), self._memory, goes_on=False)

    def _show_tab(self) -> None:
        course, row = self._course, self._playback.row
        if course is None:
            return
        if self._tab == "events":
            self._events.show(self._history.all_events, self._stands.step)
        profiles = course.profiles_at(row)
        if profiles != self._memory.profiles:
            memory = dataclasses.replace(self._memory, profiles=profiles)
            self._memory = dataclasses.replace(memory, shown=memory.shown_after(self._memory.offered))
        try:
            if self._tab == "memory":
                self._panel.show(self._memory)
            elif self._tab == "gradients":
                self._gradients.show(GradientState(range=course.gradients_at(row), trains=False))
        except AmpWidgetsError as error:
            self._complaint = in_language(str(error))
        except Exception as error:
            self._complaint = say(
                "What is in the tab cannot be shown: {name}: {error}", name=type(error).__name__, error=in_language(str(error))
            )

    def _follow_file(self) -> None:
        """Read what was written since, when it is time and the file is followed."""
        course, now_s = self._course, self._clock()
        if course is None or self._playback.mode != "following" or now_s - self._refreshed_s < FOLLOW_S:
            return
        self._refreshed_s = now_s
        self._read_file(course)
        if _is_over(course):
            self._playback.pause()

    def _read_file(self, course: Course) -> None:
        try:
            if course.refresh():
                self._news_s = self._clock()
                self._transport.mark(course.events(course.events_at(course.rows - 1)))
        except AmpWidgetsError as error:
            self._complaint = in_language(str(error))
            self._playback.pause()

    # ---- from the page ----------------------------------------------------------------------------------------------

    def _move(self, move: str, **values: Any) -> None:
        with self._lock:
            course = self._course
            if course is None:
                return
            playback, refresher = self._playback, self._refresher
            self._complaint = None
            self._moved_s = self._clock()
            playback.advance()
            if move == "play":
                playback.play()
            elif move == "pause":
                playback.pause()
            elif move == "follow":
                self._read_file(course)
                if self._complaint is None:
                    playback.follow()
                if _is_over(course):
                    playback.pause()
            elif move == "speed":
                playback.set_speed(values["speed"])
            elif move == "seek":
                playback.seek(course.row_of(values["step"]))
            elif move == "begin":
                playback.seek(0)
            elif move == "end":
                playback.seek(course.rows - 1)
            elif move in ("before", "after"):
                playback.seek(self._change(course, move))
            self._show()
        refresher.wake()

    def _change(self, course: Course, move: str) -> int:
        """The row of the change before the step that is shown, or after it; where there is none, the first or the last."""
        steps = {event.step for event in course.events(course.events_at(course.rows - 1)) if event.kind in MARKED}
        now = self._stands.step
        if move == "before":
            return course.row_of(max((step for step in steps if step < now), default=course.first_step))
        return course.row_of(min((step for step in steps if step > now), default=course.last_step))

    def _memory_command(self, name: str, /, **values: Any) -> None:
        if name != "show":
            return
        with self._lock:
            self._memory = dataclasses.replace(self._memory, shown=tuple(values["labels"]))
            self._panel.show(self._memory)

    def _select(self, name: str) -> None:
        with self._lock:
            if self._course is None:
                return
            self._tab = next(tab for tab in TABS if tab == name)
            self._bar.select(self._tab)
            self._show()

    def _views_changed(self, count: int) -> None:
        """Nobody looks: nothing is sent until somebody does."""
        self._watched = count > 0
        if self._watched and "_refresher" in self.__dict__:
            self._refresher.wake()


def _is_over(course: Course) -> bool:
    """Whether nothing more comes, as nobody writes the file any more."""
    return course.writer in ("closed", "gone")


def _model_of(run: Run) -> str:
    model = run.facts.get("model")
    return model[:200] if isinstance(model, str) else ""


def _nothing(*_args: object, **_values: object) -> None:
    """In a replay, nothing is asked for."""
