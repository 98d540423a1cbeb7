from __future__ import annotations

from typing import get_args

import pytest

from amp_widgets.core.run_state import RunState
from amp_widgets.widgets.run_control import COMMANDS, OWN_LOOP, RunControl
from amp_widgets.widgets.state import Controlled


@pytest.mark.parametrize(
    ("run", "step", "enabled"),
    [
        ("none", 5, []),
        ("ready", 0, ["start", "single_step"]),
        ("ready", 5, ["start", "single_step", "reset"]),
        ("running", 5, ["pause", "stop", "reset"]),
        ("paused", 5, ["resume", "single_step", "stop", "reset"]),
        ("stopped", 5, ["start", "single_step", "reset"]),
        ("finished", 5, ["start", "single_step", "reset"]),
        ("failed", 5, ["start", "single_step", "reset"]),
    ],
)
def test_enabled_where_it_makes_sense(state, run: RunState, step: int, enabled: list[str]) -> None:
    control = RunControl(lambda _: None, state(run=run, step=step))
    assert control.enabled == enabled
    assert control.sentence == (OWN_LOOP if run == "none" else "")


def test_every_state_of_a_run_is_known(state) -> None:
    for run in get_args(RunState):
        RunControl(lambda _: None, state(run=run))


def test_every_command_is_one_of_what_is_controlled() -> None:
    assert all(callable(getattr(Controlled, command)) for command in COMMANDS)


def test_the_user_asks_once(state) -> None:
    asked: list[str] = []
    control = RunControl(asked.append, state(run="ready"))
    for command in COMMANDS:
        control._handle_custom_msg({"command": command, "id": "1"}, [])
    assert asked == list(COMMANDS)
    control._handle_custom_msg({"command": "__init__", "id": "1"}, [])
    assert asked == list(COMMANDS)


def test_one_message_a_change_and_none_without(state, messages) -> None:
    asked: list[str] = []
    control = RunControl(asked.append, state(run="ready"))
    messages.clear()
    control.render(state(run="ready"))
    assert messages.sent == []
    control.render(state(run="running", step=1))
    assert messages.updates == [{"enabled": ["pause", "stop", "reset"]}]
    control.render(state(run="running", step=2, loss=0.1))
    assert len(messages.sent) == 1
    assert asked == []
