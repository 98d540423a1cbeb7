"""A session that exports its run, and logs it to other tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import amp_widgets as aw
from amp_widgets.core.history import Event
from amp_widgets.errors import ExportError, SessionClosedError
from amp_widgets.export.blocks import read_block
from amp_widgets.export.run_block import run_of_page
from amp_widgets.export.sink import Sink

MISSING = "The end of the run was not logged to a tool: OSError: it is down."


class Failing(Sink):
    name = "a tool"
    closed = False

    def begin(self, course: str, began_s: float, facts: Mapping[str, Any]) -> None:
        self.facts = facts

    def write(self, rows: Mapping[str, Any], events: Sequence[Event]) -> None:
        raise OSError("it is down")

    def close(self) -> None:
        self.closed = True


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> aw.AmpSession:
    """Of a run that has everything, recorded to ``recorded_in``, and closed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    path = tmp_path_factory.mktemp("run") / "run.db"
    session = aw.AmpSession(model, torch.optim.SGD(model.parameters(), lr=0.1), record=path)
    session.recorded_in = path  # type: ignore[attr-defined]
    session.count_gradients(every=2)
    sink = session.sink = Failing()  # type: ignore[attr-defined]
    session.log_to(sink)
    for step in range(12):
        if step == 5:
            session.request(autocast="fp16", init_scale=2.0**40, checkpointed=["0"])
            session.profile_next_step("mine <b>")
        session.optimizers[0].zero_grad()
        with session.autocast():
            loss = nn.functional.cross_entropy(model(torch.randn(5, 4)), torch.randint(2, (5,)))
        session.scaler.scale(loss).backward()
        session.scaler.step(session.optimizers[0])
        session.scaler.update()
    session.note("what I <b>saw</b>")
    for follower in session._sinks._followers:
        follower.flush()
    session.said = session.dashboard_state().notes  # type: ignore[attr-defined]
    with pytest.warns(RuntimeWarning, match=f"^{MISSING}$") as warned:
        session.close()
    assert [warning.filename for warning in warned] == [__file__]
    return session


def test_a_closed_session_exports_all_that_it_has(session: aw.AmpSession, tmp_path: Path) -> None:
    page = session.export_html(tmp_path / "run.html", plotly="link").read_text(encoding="utf-8")
    ours, theirs = session.history.columns(), run_of_page(page).columns()
    assert all(np.array_equal(ours[name], theirs[name], equal_nan=True) for name in ours)
    labels = [figure["label"] for figure in read_block(page, "figures")]
    assert [label.split()[0] for label in labels] == ["Loss,", "Steps", "mine", "Gradients"]
    assert "what I &lt;b&gt;saw&lt;/b&gt;" in page
    assert "<td>checkpointed</td>" in page
    with pytest.raises(ExportError, match="exists already"):
        session.export_html(tmp_path / "run.html")


def test_the_file_has_the_gradients_that_the_session_had(session: aw.AmpSession, tmp_path: Path) -> None:
    with aw.open_run(session.recorded_in) as run:  # type: ignore[attr-defined]
        assert run.gradients.steps == tuple(range(0, 12, 2))
        for one, other in zip(run.gradients, session.gradients, strict=True):
            assert one.scale == other.scale
            for mine, yours in zip(one.rows, other.rows, strict=True):
                assert np.array_equal(mine.counts, yours.counts)
                assert (mine.layer, mine.family, mine.dtype, mine.wide) == (yours.layer, yours.family, yours.dtype, yours.wide)
                assert np.array_equal(list(mine.peaks.values()), list(yours.peaks.values()), equal_nan=True)
        page = run.export_html(tmp_path / "run.html", plotly="none").read_text(encoding="utf-8")
        assert run_of_page(page).events() == session.history.events()
        sink = Failing()
        with pytest.raises(OSError, match="it is down"):
            run.log_to(sink)
        assert sink.closed


def test_a_tool_that_fails_is_told_and_training_goes_on(session: aw.AmpSession) -> None:
    said = [note for note in session.said if note.startswith("Not logged")]  # type: ignore[attr-defined]
    assert said == ["Not logged at present to a tool: OSError: it is down. Training goes on; it is tried again every 5 s."]
    assert session.step == 12
    sink = session.sink  # type: ignore[attr-defined]
    assert sink.closed
    assert sink.facts["model"] == "Sequential"
    assert MISSING in session.dashboard_state().notes
    with pytest.raises(SessionClosedError):
        session.log_to(Failing())
