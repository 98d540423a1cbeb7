"""A scenario on the page: the situations to choose from, the question, what runs and measures it, and the dashboard below."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ipywidgets
from IPython.core.display_functions import display

from amp_widgets import kernel
from amp_widgets.demos.prepared_scenario import Measured, Scenario, play
from amp_widgets.demos.scenarios import SCENARIOS
from amp_widgets.errors import AmpWidgetsError, RunError
from amp_widgets.language import follow_language, in_language, say
from amp_widgets.widgets.question import Question
from amp_widgets.widgets.scenario_control import (
    BY_HAND,
    GUESS_FIRST,
    MEASURING,
    NOT_MEASURED,
    READY,
    STEP,
    MeasureControl,
    ScenarioControl,
)
from amp_widgets.widgets.spoken import Text, spoken
from amp_widgets.widgets.still import NOT_SHOWN

if TYPE_CHECKING:
    from amp_widgets.core.requests import Request
    from amp_widgets.session import AmpSession
    from amp_widgets.widgets.dashboard import Dashboard

JOIN_S = 10.0
"""A run that is being measured is given so long to notice that it is not wanted any more."""


class _Asked(Question):
    """A question whose texts are of the code: they are in the catalogue."""

    _spoken: Callable[[Text], str] = staticmethod(lambda text: say(text) if isinstance(text, str) else spoken(text))


class ScenarioPanel(ipywidgets.Box):  # type: ignore[misc]  # ipywidgets is untyped
    """A prepared situation to be played: guess, run, see how far off the guess was and why; the model's dashboard is below.

    The session is a live one like any other. Running it trains the scenario's steps on its background run, pauses it, and
    measures the answer; whatever was done with the session before, a new one is then made first. Guesses stay in this process.

    Parameters
    ----------
    name
        Of the situation to begin with, one of `amp_widgets.demos.scenarios.SCENARIOS`.

    Attributes
    ----------
    scenario
        The one that is played.
    session, question
        Of it; others from when it is chosen or run again.
    """

    def __init__(self, name: str) -> None:
        self._lock = threading.RLock()
        self._listeners: list[Callable[[AmpSession], None]] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._answered: Measured | None = None
        self._problem: Callable[[], str] = str  # said when it is shown
        self._closed = False
        self._place = f"ampw-scenario-{uuid.uuid4().hex}"
        self._displayed = False
        self.scenario: Scenario = SCENARIOS[name]
        self._choice = ScenarioControl(self.choose, [(one.name, say(one.title)) for one in SCENARIOS.values()])
        self._measure = MeasureControl(self.run)
        self._right = ipywidgets.Box((), _dom_classes=("ampw-play-right",))
        self._play = ipywidgets.Box((), _dom_classes=("ampw-play",))
        super().__init__((), _dom_classes=("ampw-scenarios",))
        self.question = self._asked()
        self.session, self._dashboard, self._prepared = self._made()
        self._show()
        for widget in (self._choice, self._measure):
            kernel.answer_where_asked(widget.comm)
        follow_language(self._speak)

    @property
    def running(self) -> bool:
        """Whether it runs or is being measured."""
        return self._thread is not None and self._thread.is_alive()

    def choose(self, name: str) -> None:
        """Play another situation; the session of the one before is closed.

        Raises
        ------
        KeyError
            When there is none of that name.
        RunError
            When the panel is closed.
        """
        self._check_open()
        scenario = SCENARIOS[name]
        self._end_run()
        with self._lock:
            before = self.question
            self.scenario, self._answered, self._problem = scenario, None, str
            self.question = self._asked()
            self._renew()
            before.close()

    def run(self) -> None:
        """Run it and measure the answer, on a thread of its own: see `wait`. Nothing happens while it runs already.

        Raises
        ------
        RunError
            When the panel is closed.
        """
        self._check_open()
        with self._lock:
            if self.running:
                return
            if not self._untouched():
                self._renew()
            self._problem = str
            self._stop = threading.Event()
            self._thread = threading.Thread(target=self._work, args=(self._stop,), name="amp_widgets scenario", daemon=True)
            self._tell(say(STEP, step=0, steps=self.scenario.steps), pending=True)
            self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is measured, at most `timeout_s`; whether it is."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return self._answered is not None

    def on_session(self, call: Callable[[AmpSession], None]) -> None:
        """Have `call` called with each session that takes the place of the one before."""
        self._listeners.append(call)

    def close(self) -> None:
        """Take it off the page, and close its session."""
        if "_play" not in self.__dict__ or self.comm is None:
            return
        self._closed = True
        self._end_run()
        with self._lock:
            self._listeners.clear()
            self.session.close()
            self._dashboard.tick()  # the picture that stays in the notebook is that of the whole run
            self._dashboard.close()
            for part in (self._choice, self._measure, self.question):
                part.close()
            for box in (self._right, self._play, self):
                if isinstance(box.layout, ipywidgets.Widget):
                    box.layout.close()
            self._right.close()
            self._play.close()
            super().close()

    def __repr__(self) -> str:
        return f"<amp_widgets scenario: {self.scenario.title}>"

    def _ipython_display_(self, **_options: Any) -> None:
        view = {"version_major": 2, "version_minor": 0, "model_id": self._model_id}
        display({"text/plain": say(NOT_SHOWN), "application/vnd.jupyter.widget-view+json": view}, raw=True)
        if not self._displayed:  # below it, the picture that stays in the notebook
            self._displayed = True
            display({"text/plain": ""}, raw=True, display_id=self._place)
            self._dashboard.show_picture_in(self._place)

    # ---- what is shown ----------------------------------------------------------------------------------------------

    def _asked(self) -> Question:
        scenario = self.scenario
        question = _Asked(
            scenario.question,
            unit=scenario.unit,
            choices=list(scenario.choices.values()) or None,
            within=scenario.within,
            between=scenario.between,
            whole=scenario.whole,
        )
        question.on_guess(self._guessed)
        kernel.answer_where_asked(question.comm)
        return question

    def _made(self) -> tuple[AmpSession, Dashboard, Request | None]:
        session = self.scenario.session()
        return session, session.dashboard(), session.pending

    def _renew(self) -> None:
        """A new session and its dashboard in place of the ones that are there."""
        session, dashboard = self.session, self._dashboard
        self.session, self._dashboard, self._prepared = self._made()
        self._show()
        dashboard.close()
        session.close()
        if self._displayed:
            self._dashboard.show_picture_in(self._place)
        for call in self._listeners:
            call(self.session)

    def _show(self) -> None:
        scenario = self.scenario
        self._choice.show(scenario.name, say(scenario.situation), say(scenario.watch))
        self._right.children = (self._measure, self.question.answer) if self._answered is not None else (self._measure,)
        self._play.children = (self.question, self._right)
        self.children = (self._choice, self._play, self._dashboard)
        self._tell()

    def _tell(self, note: str = "", *, pending: bool = False, fraction: float = 0.0) -> None:
        guessed = self.question.guessed is not None
        note = note or (say(READY, steps=self.scenario.steps) if guessed else say(GUESS_FIRST))
        told = {"ready": guessed, "pending": pending, "again": self._answered is not None, "fraction": fraction}
        self._measure.show(note, problem=self._problem(), **told)  # type: ignore[arg-type]  # each as it is to be

    def _guessed(self) -> None:
        if not self.running:
            self._tell()

    # ---- the run ----------------------------------------------------------------------------------------------------

    def _untouched(self) -> bool:
        """Whether the session is as it was prepared."""
        session = self.session
        fresh = not session.closed and session.step == 0 and session.run_state == "ready"
        return fresh and session.pending == self._prepared

    def _work(self, stop: threading.Event) -> None:
        scenario, session = self.scenario, self.session
        steps = scenario.steps

        def on_step(step: int) -> None:
            done = min(step, steps)
            note = say(MEASURING) if done == steps else say(STEP, step=done, steps=steps)
            self._tell(note, pending=True, fraction=done / steps)

        measured: Measured | None = None
        problem: Callable[[], str] = str
        try:
            measured = play(scenario, session, on_step=on_step, stop=stop)
        except AmpWidgetsError as error:
            refused = str(error)  # translated as it is, and its beginning left out afterwards: the catalogue has it whole
            problem = lambda: say(NOT_MEASURED, reason=in_language(refused).removeprefix("scenario: "))  # noqa: E731
        except Exception as error:  # a thread's traceback would go where nobody looks
            failed = f"{type(error).__name__}: {error}"
            problem = lambda: say(NOT_MEASURED, reason=failed)  # noqa: E731
        if stop.is_set():
            return
        with self._lock:
            if measured is not None:
                self._answered = measured
                self._reveal(measured)
                self._right.children = (self._measure, self.question.answer)
                by_hand = _changed_by_hand(session, steps)
                problem = lambda: say(BY_HAND) if by_hand else ""  # noqa: E731
            self._problem = problem
            self._tell()

    def _reveal(self, measured: Measured) -> None:
        scenario = self.scenario
        why, more = scenario.why_text(measured), scenario.more_text(measured, self.session.device.type)
        self.question.reveal(scenario.choice_text(measured.value), why=why, more=more)

    def _speak(self) -> None:
        """Say all of it in the language that is in force now; the dashboard does so by itself."""
        with self._lock:
            if self._closed:
                return
            self._choice.name_anew([(one.name, say(one.title)) for one in SCENARIOS.values()])
            fraction, pending = self._measure.fraction, self._measure.pending
            self._choice.speak()
            self._measure.speak()
            self.question.speak()
            if self._answered is not None:
                self._reveal(self._answered)
            scenario = self.scenario
            self._choice.show(scenario.name, say(scenario.situation), say(scenario.watch))
            note = say(STEP, step=round(fraction * scenario.steps), steps=scenario.steps) if pending else ""
            self._tell(say(MEASURING) if pending and fraction == 1 else note, pending=pending, fraction=fraction)

    def _check_open(self) -> None:
        if self._closed:
            raise RunError(f"scenario: it is closed; play it again with: %amp demo {self.scenario.name}")

    def _end_run(self) -> None:
        self._stop.set()
        self.session.cancel_inspection("largest_batch")  # it takes long
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(JOIN_S)
        self._thread = None


def _changed_by_hand(session: AmpSession, steps: int) -> bool:
    applied = session.history.events("applied")
    return any(event.detail.get("source") != "demo" and event.step < steps for event in applied)
