"""A prepared situation: a demo, settings, a question, and how its answer is measured on the live model."""

from __future__ import annotations

import dataclasses
import math
import pkgutil
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from amp_widgets.core.run_state import ALIVE
from amp_widgets.demos import DEMOS
from amp_widgets.errors import RunError
from amp_widgets.language import say
from amp_widgets.widgets.question_text import Value

if TYPE_CHECKING:
    from amp_widgets.session import AmpSession

LOOK_S = 0.05
"""Seconds between two looks at a run that is to be measured."""
STOPPED = "scenario: the run was stopped after {step} of {steps} steps; run it again to have it measured"
FAILED = "scenario: the run ended after {step} of {steps} steps: {error}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What was measured, and what its explanation names.

    Attributes
    ----------
    value
        The answer: a number in the question's unit, or the key of one of its choices.
    facts
        For the placeholders in the scenario's sentences, as texts.
    more
        In place of the scenario's `more`, where what was measured wants another one.
    """

    value: Value
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    more: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """A situation, a few lines of data. Texts are whole sentences; those of the answer have named placeholders.

    Parameters
    ----------
    name, title
        For code, and for the list to choose from.
    demo
        The name of the demo that makes the model and its session.
    situation, watch
        What is going on, and what to look at while it runs.
    question, unit, choices, within, between, whole
        As of `amp_widgets.widgets.question.Question`; `choices` is key → text.
    steps
        So many steps are trained before it is measured.
    measure
        What finds the answer, from the session with its run paused.
    why, more
        Of the answer: why it is so, and what can be unfolded.
    on_cpu
        What a CPU cannot show, said where the model is on one.
    settings
        In force from the beginning.
    changes
        Step → settings in force from that step on.
    """

    name: str
    title: str
    demo: str
    situation: str
    watch: str
    question: str
    unit: str = ""
    choices: Mapping[str, str] = dataclasses.field(default_factory=dict)
    within: float | None = None
    between: tuple[float, float] = (-math.inf, math.inf)
    whole: bool = False
    steps: int
    measure: Callable[[AmpSession, Scenario], Measured]
    why: str
    more: str = ""
    on_cpu: str = ""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    changes: Mapping[int, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    def session(self, **options: Any) -> AmpSession:
        """The demo's session, prepared for this: not started.

        Parameters
        ----------
        options
            Of what makes the demo's session, such as ``device="cpu"``.
        """
        make = pkgutil.resolve_name(f"amp_widgets.demos.{DEMOS[self.demo].maker}")
        session: AmpSession = make(**options)
        if self.settings:
            session.request(source="demo", **self.settings)
        for step, changes in self.changes.items():
            session.schedule(at_step=step, source="demo", **changes)
        return session

    def choice_text(self, value: Value) -> Value:
        """A measured value as the question's choices have it; a number as it is."""
        return say(self.choices[value]) if isinstance(value, str) else value

    def why_text(self, measured: Measured) -> str:
        """Why it is so, in this run."""
        return say(self.why, **measured.facts)

    def more_text(self, measured: Measured, device_type: str) -> str:
        """What can be unfolded below."""
        more = self.more if measured.more is None else measured.more
        told = (more, self.on_cpu if device_type == "cpu" else "")
        return "\n".join(say(text, **measured.facts) for text in told if text)


def play(
    scenario: Scenario,
    session: AmpSession,
    *,
    on_step: Callable[[int], None] = lambda step: None,
    stop: threading.Event | None = None,
) -> Measured:
    """Train a prepared session as far as the scenario needs it, pause it, and measure the answer.

    Parameters
    ----------
    on_step
        Called now and then with the number of steps that are done.
    stop
        When it is set, the run is left as it is and the measuring ends.

    Raises
    ------
    RunError
        When the run ends before that, or `stop` was set.
    """
    stop = threading.Event() if stop is None else stop
    session.start()
    while session.step < scenario.steps:
        _check_alive(scenario, session)
        on_step(session.step)
        _wait(scenario, session, stop)
    on_step(session.step)
    session.pause()
    while session.run_state == "running":
        _wait(scenario, session, stop)
    _check_alive(scenario, session)
    return scenario.measure(session, scenario)


def _wait(scenario: Scenario, session: AmpSession, stop: threading.Event) -> None:
    if stop.wait(LOOK_S):
        raise RunError(STOPPED.format(step=_done(scenario, session), steps=scenario.steps))


def _check_alive(scenario: Scenario, session: AmpSession) -> None:
    if session.run_state in ALIVE:
        return
    error = None if session.closed else session.dashboard_state().error
    if error is None:
        raise RunError(STOPPED.format(step=_done(scenario, session), steps=scenario.steps))
    last = error.strip().splitlines()[-1]
    raise RunError(FAILED.format(step=_done(scenario, session), steps=scenario.steps, error=last))


def _done(scenario: Scenario, session: AmpSession) -> int:
    """How many of the scenario's steps are done: the run may be a few further when it is paused."""
    return min(session.step, scenario.steps)
