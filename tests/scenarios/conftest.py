from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from amp_widgets.demos.prepared_scenario import Measured, Scenario, play
from amp_widgets.demos.scenarios import SCENARIOS
from amp_widgets.session import AmpSession
from amp_widgets.widgets.question_text import Possible


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Played:
    """A scenario that was played on a CPU."""

    def __init__(self, scenario: Scenario, session: AmpSession, measured: Measured) -> None:
        self.scenario, self.session, self.measured = scenario, session, measured


@pytest.fixture
def played() -> Iterator[Callable[..., Played]]:
    """Plays a scenario; its texts must be complete, and what it measures must fit its question."""
    sessions: list[AmpSession] = []

    def run(name: str, **options: Any) -> Played:
        scenario = SCENARIOS[name]
        session = scenario.session(device="cpu", **options)
        sessions.append(session)
        measured = play(scenario, session)
        assert session.run_state == "paused"
        assert session.step >= scenario.steps
        for text in (scenario.why_text(measured), scenario.more_text(measured, "cpu"), scenario.more_text(measured, "cuda")):
            assert "{" not in text
            assert "–" not in text  # of a fact that is not known
        if not scenario.choices:  # what is measured is a guess that would be taken
            Possible(*scenario.between, whole=scenario.whole).check(float(measured.value), scenario.unit)
        assert (scenario.choice_text(measured.value) in scenario.choices.values()) == bool(scenario.choices)
        return Played(scenario, session, measured)

    yield run
    for session in sessions:
        session.close()
