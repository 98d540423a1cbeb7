"""A session that writes its run to a file."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import amp_widgets as aw
from amp_widgets.errors import HistoryError, RecordingError, SessionClosedError, SettingsError


def make(**options: object) -> aw.AmpSession:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return aw.AmpSession(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)  # type: ignore[arg-type]


def train(session: aw.AmpSession, steps: int) -> None:
    model, optimizer = session.model, session.optimizers[0]
    assert model is not None
    for _ in range(steps):
        optimizer.zero_grad()
        with session.autocast():
            loss = nn.functional.cross_entropy(model(torch.randn(5, 4)), torch.randint(2, (5,)))
        session.scaler.scale(loss).backward()
        session.scaler.step(optimizer)
        session.scaler.update()


def test_the_run_comes_back_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    session = make(record=path)
    assert session.recorded_to == path
    train(session, 3)
    session.request(autocast="bf16", checkpointed=["0"])
    session.profile_next_step("mine")
    train(session, 3)
    session.note("what I saw: <b>less</b>")
    with pytest.raises(SettingsError):
        session.request(autocast="fp7")
    session.close()
    assert session.recorded_to is None
    with aw.open_run(path) as run:
        ours, theirs = session.history.columns(), run.history.columns()
        assert all(np.array_equal(ours[name], theirs[name], equal_nan=True) for name in ours)
        assert run.events == session.history.events()
        assert [event.kind for event in run.events] == ["applied", "note", "rejected"]
        assert (run.settings_at(2).autocast, run.settings_at(3).autocast, run.settings.checkpointed) == ("fp32", "bf16", ("0",))
        assert [layer.name for layer in run.layers] == ["0", "1", "2"]
        assert run.profiles[0].label == "mine"
        assert run.facts["model"] == "Sequential"
        assert run.facts["packages"]["torch"] == torch.__version__


def test_recording_that_begins_in_mid_run_has_what_was_before(tmp_path: Path) -> None:
    session = make()
    train(session, 5)
    session.record(tmp_path / "run.db")
    with pytest.raises(RecordingError, match=r"being recorded to .*run\.db; session\.stop_recording\(\) ends"):
        session.record(tmp_path / "other.db")
    train(session, 5)
    session.stop_recording()
    train(session, 5)
    with aw.open_run(tmp_path / "run.db") as run:
        assert run.history.columns("step")["step"].tolist() == list(range(10))
    session.close()
    with pytest.raises(SessionClosedError):
        session.record(tmp_path / "late.db")


def test_a_file_that_cannot_be_made_leaves_the_model_alone(tmp_path: Path) -> None:
    with pytest.raises(RecordingError):
        make(record=tmp_path / "nowhere" / "run.db")


def test_the_dashboard_says_when_nothing_is_recorded_any_more(tmp_path: Path) -> None:
    with make(record=tmp_path / "run.db") as session:
        train(session, 1)
        (tmp_path / "run.db").unlink()
        session.note("noticed by this")
        assert "Recording has ended: run.db was deleted, moved or replaced." in session.dashboard_state().notes
        train(session, 2)
        assert session.step == 3
        assert session.recorded_to is None
        session.record(tmp_path / "again.db")
        assert session.recorded_to == tmp_path / "again.db"
        assert not any("Recording has ended" in note for note in session.dashboard_state().notes)
    with aw.open_run(tmp_path / "again.db") as run:
        assert run.history.columns("step")["step"].tolist() == [0, 1, 2]


def test_a_session_that_is_forgotten_has_its_last_steps_written(tmp_path: Path) -> None:
    session = make(record=tmp_path / "run.db")
    train(session, 3)
    del session
    gc.collect()
    assert [one.name for one in tmp_path.iterdir()] == ["run.db"]
    with aw.open_run(tmp_path / "run.db") as run:
        assert run.history.columns("step")["step"].tolist() == [0, 1, 2]


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[2])
from test_session_recording import make, train
session = make(record=sys.argv[1])
train(session, 3)
raise SystemExit(7)
"""


def test_a_script_that_ends_without_close_has_its_last_steps_written(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run.db"), str(Path(__file__).parent)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (7, "")
    assert [one.name for one in tmp_path.iterdir()] == ["run.db"]
    with aw.open_run(tmp_path / "run.db") as run:
        assert run.history.columns("step")["step"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("text", [5, None, ["a"], b"a"])
def test_a_note_is_a_text(text: Any, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with aw.AmpSession(model, torch.optim.SGD(model.parameters(), lr=0.1), record=tmp_path / "run.db") as session:
        with pytest.raises(HistoryError) as caught:
            session.note(text)
        assert str(caught.value) == f"note: got {text!r}, expected a text, such as 'warm-up is over'"
        session.note("a")
        session.stop_recording()
    with aw.open_run(tmp_path / "run.db") as run:
        assert [event.reason for event in run.events if event.kind == "note"] == ["a"]
