"""`compare_runs`: files, runs and sessions, as table and figure, also without torch."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import amp_widgets as aw
from amp_widgets.compare_magic import Compare
from amp_widgets.core.history import Event, History
from amp_widgets.core.settings import Settings
from amp_widgets.errors import AmpWidgetsError, ExportError, MagicError, RecordingError
from amp_widgets.magics import HELP, AmpMagics
from amp_widgets.recording.branch import Branch
from amp_widgets.recording.recorder import Recorder
from amp_widgets.replay_magics import Replay, ReplayMagics
from amp_widgets.runs_comparison import RunsComparison
from tests.recording.recorded import Source


def recorded(path: Path, steps: int = 30, **settings: Any) -> Path:
    source = Source()
    recorder = Recorder(path, source, facts={"model": "Net", "device": "cpu"}, every_s=1e6)
    source.apply(**settings)
    source.train(steps, peak_bytes=2e6, step_s=0.01)
    recorder.close()
    return path


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    return recorded(tmp_path / "fp32.db", autocast="fp32"), recorded(tmp_path / "bf16.db", 20, autocast="bf16")


def train(session: aw.AmpSession, model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with session.autocast():
            loss = model(torch.ones(4, 2)).square().mean()
        session.scaler.scale(loss).backward()
        session.scaler.step(optimizer)
        session.scaler.update()
        losses.append(loss.item())
    return losses


def test_files_side_by_side(paths: tuple[Path, Path]) -> None:
    compared = aw.compare_runs(*paths)
    assert compared.names == ("fp32", "bf16")
    assert compared.table.row("autocast").texts == ("fp32", "bf16")
    assert compared.table.row("steps").values == (30, 20)
    assert compared.table.row("skipped steps").values == (4, 3)  # every seventh, from the fourth on
    losses = [np.mean([1 / (step + 1) for step in range(steps)][-steps // 10 :]) for steps in (30, 20)]
    assert compared.table.row("final loss").values == pytest.approx(losses, rel=1e-12)
    figure = compared.to_figure(metrics=["loss"])
    lines = [one for one in figure.data if one.meta["part"] == "line"]
    assert [len(line.x) for line in lines] == [30, 20]
    np.testing.assert_array_equal(lines[1].y, 1 / (np.arange(20) + 1.0))
    along_time = compared.to_figure(align="time", metrics=["loss"])
    x = [one.x for one in along_time.data if one.meta["part"] == "line"][1]
    np.testing.assert_allclose(x, np.arange(20) / 100 + 0.01, rtol=1e-9)  # the first step took 0.01 s
    assert "<table" in compared._repr_html_()
    assert "RunsComparison of fp32, bf16" in repr(compared)


def test_a_session_that_goes_on_beside_a_file(paths: tuple[Path, Path]) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with aw.AmpSession(model, optimizer) as session:
        losses = train(session, model, optimizer, 5)
        compared = aw.compare_runs(paths[0], session)
        assert compared.names == ("fp32", "session on Linear")
        assert compared.table.row("steps").values == (30, 5)
        assert compared.table.row("final loss").values[1] == pytest.approx(losses[-1], rel=1e-6)
        assert compared.table.row("model").values == ("Net", "Linear")
        assert compared.table.row("torch").values[1] == torch.__version__
        train(session, model, optimizer, 2)
        assert compared.table.row("steps").values == (30, 7)
    assert compared.table.row("steps").values == (30, 7)  # closed, its history stays


def test_a_file_that_grows(tmp_path: Path) -> None:
    source = Source()
    recorder = Recorder(tmp_path / "a.db", source, facts={}, every_s=1e6)
    compared = aw.compare_runs(tmp_path / "a.db")
    assert compared.table.row("steps").values == (0,)
    source.train(12)
    recorder.flush()
    assert compared.table.row("steps").values == (12,)
    recorder.close()
    compared.close()


def test_a_course_that_was_left(paths: tuple[Path, Path]) -> None:
    history = History()
    history.extend({"step": [0, 1, 2], "loss": [3, 2, 1], "peak_bytes": [5, 9, 7]})
    history.record(Event(step=1, kind="applied", reason="", detail={"autocast": "bf16"}))
    branch = Branch(name="run", history=history, left_at=2, facts={"model": "Net"})
    compared = aw.compare_runs(paths[0], branch)
    assert compared.names == ("fp32", "run")
    assert compared.table.row("autocast").values == ("fp32", "bf16")
    assert compared.table.row("peak memory").values == (2e6, 9)
    view = compared.view()
    assert view._control.runs[1]["state"] == "3 steps"
    view.close()


def test_what_cannot_be_compared_is_said(paths: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(AmpWidgetsError, match="got no run"):
        aw.compare_runs()
    with pytest.raises(RecordingError, match=r"compare_runs: open_run: .*expected a file"):
        aw.compare_runs(paths[0], tmp_path / "missing.db")
    with pytest.raises(RecordingError, match="compare_runs: got 3 in place of a run"):
        aw.compare_runs(3)  # type: ignore[arg-type]
    with pytest.raises(AmpWidgetsError, match="expected 'step' or 'time'"):
        aw.compare_runs(*paths, align="loss")  # type: ignore[arg-type]
    for names in (["a"], ["a", "a"]):
        with pytest.raises(AmpWidgetsError, match="expected one for each"):
            aw.compare_runs(*paths, names=names)
    compared = aw.compare_runs(*paths, names=["x", "y"])
    assert compared.table.runs == ("x", "y")
    for wrong in (
        {"metrics": ["speed"]},
        {"metrics": []},
        {"smoothing": -1},
        {"smoothing": True},
        {"theme": "blue"},
        {"align": ""},
    ):
        with pytest.raises(AmpWidgetsError, match="expected"):
            compared.to_figure(**wrong)


def test_files_opened_for_a_comparison_are_closed_with_it(paths: tuple[Path, Path]) -> None:
    with aw.open_run(paths[0]) as mine:
        compared = aw.compare_runs(mine, paths[1])
        opened = compared.runs[1]
        view = compared.view()
        gone = weakref.ref(compared)
        del compared
        gc.collect()
        assert gone() is not None  # the view needs it
        view.close()
        del view
        gc.collect()
        assert gone() is None
        with pytest.raises(RecordingError, match="closed"):
            opened.refresh()  # type: ignore[attr-defined]
        assert mine.refresh() == 0


def test_all_of_it_without_torch(paths: tuple[Path, Path]) -> None:
    code = f"""
import sys
sys.modules["torch"] = None
import amp_widgets as aw
import amp_widgets.compare_magic
compared = aw.compare_runs({str(paths[0])!r}, {str(paths[1])!r})
figure = compared.to_figure(align="time", smoothing=10, theme="dark")
view = compared.view()
print(len(figure.data) > 0, *compared.table.row("autocast").values, len(view._repr_mimebundle_()))
view.close()
"""
    root = str(Path(__file__).parent.parent)
    said = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True)
    assert said.stdout.split() == ["True", "fp32", "bf16", "3"], said.stderr


def test_as_a_page(paths: tuple[Path, Path], tmp_path: Path) -> None:
    compared = aw.compare_runs(*paths, names=["<b>one", "two"])
    page = compared.export_html(tmp_path / "runs.html", plotly="link", align="time").read_text(encoding="utf-8")
    assert "<b>one" not in page
    assert "&lt;b&gt;one, two over each other, along time" in page
    for row in compared.table.rows:
        assert f"<td>{row.name}</td>" in page
    assert page.index("<td>autocast</td>") < page.index("<summary>") < page.index("<td>growth_interval</td>")
    with pytest.raises(ExportError, match="exists already"):
        compared.export_html(tmp_path / "runs.html")


class Shell:
    def __init__(self, **names: Any) -> None:
        self.user_ns = dict(names)
        self.cell = ""

    def get_parent(self) -> dict[str, Any]:
        return {"metadata": {"cellId": self.cell}}

    def push(self, names: dict[str, Any]) -> None:
        self.user_ns |= names


def test_the_magic_takes_files_and_names(paths: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    class Course:
        history, settings, name = History(), Settings(), "mine"

    shell = Shell(course=Course(), other=3)
    compare = Compare(shell)
    with pytest.raises(MagicError, match="got no run"):
        compare.show([])
    with pytest.raises(RecordingError, match="nowhere"):
        compare.show(["nowhere"])
    with pytest.raises(MagicError, match="got 'other', here a int, expected a run or a session"):
        compare.show(["other"])
    compare.show([str(paths[0]), "course"])
    first = shell.user_ns["compared"]
    assert isinstance(first, RunsComparison)
    assert first.names == ("fp32", "mine")
    assert "compared.table" in capsys.readouterr().out
    compare.show([str(paths[1])])
    assert shell.user_ns["compared"].names == ("bf16",)
    with pytest.raises(RecordingError, match="closed"):
        first.runs[0].refresh()
    compare.close()


@pytest.mark.parametrize("kind", [Compare, Replay])
def test_each_cell_keeps_what_it_shows_until_it_is_run_again(paths: tuple[Path, Path], kind: type[Compare | Replay]) -> None:
    shell = Shell()
    magic = kind(shell)
    shown = []
    for cell, path in (("a", paths[0]), ("b", paths[1]), ("a", paths[1])):
        shell.cell = cell
        magic.show([str(path)])
        shown.append(shell.user_ns["compared"].runs[0] if kind is Compare else shell.user_ns["run"])
    with pytest.raises(RecordingError, match="closed"):
        shown[0].refresh()
    for run in shown[1:]:
        run.refresh()
    magic.close()
    for run in shown:
        with pytest.raises(RecordingError, match="closed"):
            run.refresh()


@pytest.mark.parametrize("kind", [AmpMagics, ReplayMagics])
def test_the_line_with_torch_and_without(
    paths: tuple[Path, Path], kind: type[AmpMagics | ReplayMagics], capsys: pytest.CaptureFixture[str]
) -> None:
    shell = Shell()
    magics = kind(shell)
    magics.amp(f"compare {paths[0]} {paths[1]}")
    compared = shell.user_ns["compared"]
    assert compared.names == ("fp32", "bf16")
    magics.close()
    with pytest.raises(RecordingError, match="closed"):
        compared.runs[0].refresh()
    assert any("%amp compare a.db b.db" in text for text in HELP)
