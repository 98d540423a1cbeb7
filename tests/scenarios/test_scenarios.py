"""The scenarios as data, how one is played on a page, and how it is reached."""

from __future__ import annotations

import re
import string
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from torch import nn

import amp_widgets as aw
from amp_widgets.core.settings import Settings
from amp_widgets.demos import DEMOS, is_scenario
from amp_widgets.demos.prepared_scenario import Measured, Scenario, play
from amp_widgets.demos.scenario_panel import ScenarioPanel
from amp_widgets.demos.scenarios import SCENARIOS
from amp_widgets.errors import DemoError, QuestionError, RunError
from amp_widgets.language import in_language, set_language
from amp_widgets.session import AmpSession
from amp_widgets.widgets.scenario_control import BY_HAND, GUESS_FIRST, READY

ANSWER_TEXTS = ("why", "more", "on_cpu")
PLAIN_TEXTS = ("title", "situation", "watch", "question", "unit")


def test_their_names_are_no_demos_and_their_demos_are() -> None:
    assert not set(SCENARIOS) & set(DEMOS)
    assert {scenario.demo for scenario in SCENARIOS.values()} == set(DEMOS)
    assert len({scenario.title for scenario in SCENARIOS.values()}) == len(SCENARIOS)
    assert all(name == scenario.name for name, scenario in SCENARIOS.items())


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=lambda scenario: scenario.name)
def test_each_is_whole(scenario: Scenario) -> None:
    for changes in (scenario.settings, *scenario.changes.values()):
        Settings().replace(**changes)
    assert all(0 < step < scenario.steps for step in scenario.changes)
    assert len(set(scenario.choices.values())) == len(scenario.choices)
    assert scenario.question.endswith("?")
    for name in PLAIN_TEXTS:
        assert not set("{}<>") & set(getattr(scenario, name)), name
    for name in ANSWER_TEXTS:
        fields = [field for _, field, _, _ in string.Formatter().parse(getattr(scenario, name)) if field is not None]
        assert all(field.isidentifier() for field in fields)  # named, for translators


# ---- playing ----


def sleepless(scenario: Scenario, **changes: Any) -> Scenario:
    return Scenario(**{name: getattr(scenario, name) for name in Scenario.__slots__} | changes)


def test_a_run_that_fails_or_is_stopped_is_not_measured() -> None:
    def broken(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such <b>loss</b>")

    scenario = SCENARIOS["first-scale"]
    with scenario.session(device="cpu") as session:
        session.fit([(torch.rand(2, 64), torch.tensor([0, 1]))], broken, None, start=False)
        with pytest.raises(RunError, match="ended after 0 of 20 steps: ValueError: no such <b>loss</b>"):
            play(scenario, session)
    with scenario.session(device="cpu") as session:
        with pytest.raises(RunError, match=r"stopped after \d+ of 20 steps"):
            play(scenario, session, on_step=lambda _: session.stop())
    with scenario.session(device="cpu") as session:
        stop = threading.Event()
        stop.set()
        with pytest.raises(RunError, match="stopped after"):
            play(scenario, session, stop=stop)


@pytest.fixture
def panel_of() -> Iterator[Callable[[str], ScenarioPanel]]:
    made: list[ScenarioPanel] = []

    def make(name: str) -> ScenarioPanel:
        made.append(aw.scenario(name))
        return made[-1]

    yield make
    for panel in made:
        panel.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "amp_widgets scenario"]


def press(panel: ScenarioPanel) -> None:
    panel._measure._handle_custom_msg({"run": True, "id": "1"}, [])


def choose(panel: ScenarioPanel, name: str) -> None:
    panel._choice._handle_custom_msg({"choose": name, "id": "1"}, [])


def test_guess_run_answer_again_and_another(panel_of: Callable[[str], ScenarioPanel]) -> None:
    panel = panel_of("first-scale")
    measure, first, question = panel._measure, panel.session, panel.question
    heard: list[AmpSession] = []
    panel.on_session(heard.append)
    assert (measure.ready, measure.note) == (False, GUESS_FIRST)
    press(panel)
    assert not panel.running
    question.guess(3)
    assert (measure.ready, measure.note) == (True, READY.format(steps=20))
    assert question.answer not in panel._right.children
    press(panel)
    assert measure.pending
    assert panel.wait(60)
    assert panel.session is first  # it was as it was prepared
    assert question.answer.text.startswith("You said 3 steps; measured: 5 steps. Your guess is 2 too low.\n")
    assert question.answer in panel._right.children
    assert (measure.pending, measure.again, measure.problem) == (False, True, "")
    with pytest.raises(QuestionError):
        question.guess(5)

    # again: a session that was trained is no prepared one
    press(panel)
    assert panel.wait(60)
    assert panel.session is not first
    assert first.closed
    assert heard == [panel.session]
    assert question.answer.said == "You said 3 steps; measured: 5 steps."

    # another one
    choose(panel, "no such")
    choose(panel, "growth")
    assert panel.scenario.name == panel._choice.chosen == "growth"
    assert heard[0].closed
    assert heard[1] is panel.session
    assert panel.question is not question
    assert (measure.ready, measure.again, measure.note) == (False, False, GUESS_FIRST)
    assert panel.children[-1].closed is False


def test_settings_changed_by_hand_are_told_of(panel_of: Callable[[str], ScenarioPanel]) -> None:
    panel = panel_of("first-scale")
    panel.question.guess(0)
    panel.session.schedule(at_step=10, growth_interval=100)  # not in `pending`: it comes while it runs
    panel.run()
    panel.wait(60)
    assert panel._measure.problem == BY_HAND
    panel.run()
    panel.wait(60)
    assert panel._measure.problem == ""

    # what was asked for before the run goes with the session
    panel.choose("first-scale")
    panel.question.guess(0)
    panel.session.request(init_scale=2.0)
    panel.run()
    panel.wait(60)
    assert panel.question.answer.said == "You said 0 steps; measured: 5 steps."


def test_what_cannot_be_measured_is_said(panel_of: Callable[[str], ScenarioPanel]) -> None:
    def measure(session: AmpSession, scenario: Scenario) -> Measured:
        raise RunError("scenario: it is <b>not</b> there")

    panel = panel_of("first-scale")
    panel.scenario = sleepless(panel.scenario, steps=2, measure=measure)
    panel.question.guess(3)
    panel.run()
    assert not panel.wait(60)
    assert panel._measure.problem == "It was not measured: it is <b>not</b> there"
    assert (panel._measure.ready, panel._measure.pending, panel._measure.again) == (True, False, False)
    assert not panel.question.answer.shown
    panel.scenario = sleepless(panel.scenario, measure=lambda *_: 1 / 0)
    panel.run()
    panel.wait(60)
    assert panel._measure.problem == "It was not measured: ZeroDivisionError: division by zero"


def test_choosing_while_it_runs_ends_the_run(panel_of: Callable[[str], ScenarioPanel]) -> None:
    panel = panel_of("scaling-off")
    panel.scenario = sleepless(panel.scenario, steps=10**6)
    panel.question.guess(3)
    panel.run()
    before = panel.session
    panel.choose("growth")
    assert before.closed
    assert not panel.running
    assert (panel._measure.problem, panel._measure.note) == ("", GUESS_FIRST)


def test_an_open_panel_follows_the_language(panel_of: Callable[[str], ScenarioPanel], monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(session: AmpSession, scenario: Scenario) -> Measured:
        raise RunError("scenario: the scale was not doubled in 2 steps")

    monkeypatch.setattr("amp_widgets.language._chosen", "en")
    panel = panel_of("first-scale")
    asked = panel.question.text
    panel.question.guess(3)
    panel.scenario = sleepless(panel.scenario, steps=2, measure=measure)
    panel.run()
    assert not panel.wait(60)
    set_language("ko")
    control = panel._choice
    shown = (panel.question.text, panel.question.note, panel._measure.note, control.situation, control.watch)
    assert all(re.search("[가-힣]", text) for text in shown)
    assert panel._measure.problem.endswith("2스텝 동안 스케일이 두 배가 되지 않았습니다")
    assert "scenario" not in panel._measure.problem
    set_language("en")
    assert panel.question.text == asked
    assert panel._measure.problem == "It was not measured: the scale was not doubled in 2 steps"
    assert panel._measure.note == READY.format(steps=2)


def test_steps_done_are_never_more_than_there_are() -> None:
    scenario = sleepless(SCENARIOS["first-scale"], steps=2)
    with SCENARIOS["first-scale"].session(device="cpu") as session:

        def on_step(step: int) -> None:
            if step >= 2:
                while session.step < 4:
                    time.sleep(0.01)
                session.stop()

        with pytest.raises(RunError, match="stopped after 2 of 2 steps"):
            play(scenario, session, on_step=on_step)


def test_a_closed_panel_runs_no_more(panel_of: Callable[[str], ScenarioPanel], monkeypatch: pytest.MonkeyPatch) -> None:
    panel = panel_of("first-scale")
    session = panel.session
    panel.close()
    for call in (panel.run, lambda: panel.choose("growth")):
        with pytest.raises(RunError, match="it is closed") as refused:
            call()
    monkeypatch.setattr("amp_widgets.language._chosen", "ko")
    assert in_language(str(refused.value)) == "scenario: 닫혔습니다. 다시 하려면: %amp demo first-scale"
    assert panel.session is session
    assert not panel.running


# ---- how it is reached ----


def test_a_demo_or_a_situation_by_its_name() -> None:
    with aw.demo("first-scale", display=False) as session:
        assert isinstance(session, AmpSession)
        assert session.run_state == "ready"
        assert type(session.model).__name__ == "BagOfPixels"
    with aw.demo("underflow", scenarios=True, display=False) as session:
        assert session.pending is not None
        assert session.pending.changes["scaling"] is False
    for name in ("mnist", ""):
        with pytest.raises(DemoError) as caught:
            aw.demo(name)
        for known in SCENARIOS:
            assert repr(known) in str(caught.value)
        with pytest.raises(DemoError):
            aw.scenario(name)
    assert [is_scenario(name) for name in ("growth", "digits", "mnist")] == [True, False, False]


def test_a_name_in_the_notebook_goes_on_with_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = InteractiveShell.instance()
    shell.reset(new_session=False)
    monkeypatch.setattr("amp_widgets.kernel.in_kernel", lambda: True)
    shown: list[ScenarioPanel] = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    try:
        session = aw.demo("first-scale")
        other = aw.demo("growth")
        panel = shown[0]
        shell.push({"session": session, "mine": session, "other": other, "number": 3})
        panel.choose("speed")
        assert session.closed
        assert shell.user_ns["session"] is shell.user_ns["mine"] is panel.session
        assert shell.user_ns["other"] is other
        assert shell.user_ns["number"] == 3
        shell.user_ns["session"] = other  # the user has given the name to something else
        panel.choose("growth")
        assert shell.user_ns["session"] is other
        assert shell.user_ns["mine"] is panel.session
        assert not other.closed
        for one in shown:
            one.close()
    finally:
        InteractiveShell.clear_instance()


@pytest.mark.parametrize(
    ("name", "guess", "reason"),
    [("memory-wall", "-3", "1 or more"), ("first-scale", "2.5", "whole number"), ("scaling-off", "120 %", "from 0 to 100"),
     ("both", "-1", "0 or more"), ("growth", "", "type a number"), ("batchnorm", "", "choose one")],
)  # fmt: skip
def test_a_guess_that_is_impossible_is_refused(
    panel_of: Callable[[str], ScenarioPanel], name: str, guess: str, reason: str
) -> None:
    panel = panel_of(name)
    panel.question._handle_custom_msg({"guess": guess, "id": "1"}, [])
    assert reason in panel.question.problem
    assert panel.question.guessed is None
    assert not panel._measure.ready


def test_the_magic_plays_one_and_knows_its_session() -> None:
    shell = InteractiveShell.instance()
    shell.reset(new_session=False)
    shell.run_line_magic("load_ext", "amp_widgets")
    shown: list[Any] = []
    import amp_widgets.magics

    original, amp_widgets.magics.display = amp_widgets.magics.display, shown.append
    try:
        shell.run_line_magic("amp", "demo first-scale")
        [panel] = shown
        first = shell.user_ns["session"]
        assert panel.session is first
        panel.choose("growth")
        assert shell.user_ns["session"] is panel.session is not first
        shell.run_line_magic("amp", "demo overflow --scenarios")
        assert panel.session.closed
        assert shown[1].scenario.demo == "overflow"
        second = shell.user_ns["session"]
        shell.push({"net": nn.Linear(2, 2)})
        shell.run_line_magic("amp", "net")
        assert second.closed
        own = shell.user_ns["session"]
        shown[1].choose("growth")  # its session was closed for another one, which stays
        assert shell.user_ns["session"] is own
        assert not own.closed
        for one in shown[:2]:
            one.close()
    finally:
        amp_widgets.magics.display = original
        shell.run_line_magic("unload_ext", "amp_widgets")
        InteractiveShell.clear_instance()
