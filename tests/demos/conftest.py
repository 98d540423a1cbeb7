from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from amp_widgets.session import AmpSession

Train = Callable[[AmpSession, int], None]


@pytest.fixture
def train() -> Iterator[Train]:
    """Runs a prepared session for so many steps, or a few more, and stops it; all are closed in the end."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    trained: list[AmpSession] = []

    def run(session: AmpSession, steps: int) -> None:
        trained.append(session)
        session.start()
        while session.step < steps and session.run_state == "running":
            session.wait(0.005)
        session.stop()
        session.wait()
        assert session.dashboard_state().error is None

    yield run
    for session in trained:
        session.close()
    torch.set_num_threads(threads)
