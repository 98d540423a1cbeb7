"""What can be made of a course that a fork has left."""

from __future__ import annotations

from pathlib import Path

import pytest

from amp_widgets.core.history import Event, History
from amp_widgets.left_branch import LeftBranch


@pytest.fixture
def branch() -> LeftBranch:
    history = History()
    for step in range(6):
        history.append(step=step, time_s=step / 10, loss=1.0 / (step + 1), step_s=0.1)
    history.record(Event(step=3, kind="note", reason="mine", detail={}, time_s=0.3))
    return LeftBranch(name="run", history=history, left_at=3, facts={"model": "Net"})


def test_a_page_has_it(branch: LeftBranch, tmp_path: Path) -> None:
    page = branch.export_html(tmp_path / "run.html", plotly="none").read_text()
    assert "Net" in page
    assert "mine" in page


def test_tables_have_it(branch: LeftBranch, tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="pandas is not installed: pip install 'amp-widgets[pandas]'")
    steps, events = branch.export_csv(tmp_path / "run.csv")
    assert len(steps.read_text().splitlines()) == 7
    assert "mine" in events.read_text()


def test_a_fork_gives_such() -> None:
    torch = pytest.importorskip("torch")
    from amp_widgets import AmpSession

    model = torch.nn.Linear(2, 2)
    with AmpSession(model, torch.optim.SGD(model.parameters(), lr=0.1), snapshot_every=1) as session:
        assert isinstance(session.fork(at_step=0), LeftBranch)
