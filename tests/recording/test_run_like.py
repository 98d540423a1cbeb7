from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from amp_widgets.core.history import History
from amp_widgets.core.settings import Settings
from amp_widgets.errors import RecordingError
from amp_widgets.recording.recorder import Recorder
from amp_widgets.recording.run import Run
from amp_widgets.recording.run_like import as_run, changes_still, facts_of, name_of, names_of, newest_history

sys.path.insert(0, str(Path(__file__).parent))
from recorded import Source


class Known:
    """A run by hand."""

    def __init__(self, **more: Any) -> None:
        self.history, self.settings = History(), Settings()
        vars(self).update(more)


class Waits(Known):
    """One whose history must not be asked for."""

    @property
    def history(self) -> History:
        raise AssertionError("this waits for a device")

    @history.setter
    def history(self, value: History) -> None:
        self.history_so_far = value


def at(path: str) -> Known:
    return Known(path=Path(path))


def test_a_path_is_opened_and_a_run_is_left_as_it_is(tmp_path: Path) -> None:
    Recorder(tmp_path / "run.db", Source(), facts={}, every_s=1e6).close()
    for path in (tmp_path / "run.db", str(tmp_path / "run.db")):
        run = as_run(path)
        assert isinstance(run, Run)
        run.close()
    for known in (Known(), Waits()):
        assert as_run(known) is known


@pytest.mark.parametrize("value", [None, 3, Known, SimpleNamespace(history=History()), object()])
def test_what_is_no_run_is_refused(value: object) -> None:
    with pytest.raises(RecordingError, match="in place of a run, expected the path of a run file"):
        as_run(value)


def test_names_are_those_of_the_files_as_long_as_they_differ() -> None:
    assert names_of([at("/x/fp32.db"), at("/x/bf16.db")]) == ("fp32", "bf16")
    assert names_of([at("/x/a/run.db"), at("/x/b/run.db"), at("/y/fp16.db")]) == ("a/run", "b/run", "fp16")
    assert names_of([at("/x/a/run.db"), at("/y/a/run.db")]) == ("x/a/run", "y/a/run")
    assert names_of([at("/x/run.db"), at("/x/run.db")]) == ("run", "run (2)")
    assert names_of([at("/a/run.db"), at("/a/run.db"), at("/b/run.db")]) == ("a/run", "a/run (2)", "b/run")


def test_other_names() -> None:
    class Branch(Known):
        pass

    assert name_of(Branch(name="<b>")) == "<b>"
    assert name_of(Known(model_type="Net")) == "session on Net"
    assert name_of(Branch()) == "Branch"
    assert names_of([Known(name="a"), Known(name="a"), Known(name="a (2)")]) == ("a", "a (3)", "a (2)")
    assert len(set(names_of([Known(name="a")] * 30))) == 30


def test_facts_are_those_written_or_those_of_here() -> None:
    assert facts_of(Known(facts={"model": "Net"})) == {"model": "Net"}
    live = facts_of(Known(model_type="Net", device="cpu", memory_source="counted"))
    assert live["model"] == "Net"
    assert live["device"] == "cpu"
    assert live["memory_source"] == "counted"
    assert live["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts_of(Known()) == {}


def test_the_newest_history_is_read_without_waiting() -> None:
    waits = Waits()
    assert newest_history(waits) is waits.history_so_far
    refreshed = []
    known = Known(refresh=lambda: refreshed.append(1))
    assert newest_history(known) is known.history
    assert refreshed == [1]


def test_what_may_still_change() -> None:
    assert not changes_still(Known())
    assert changes_still(Known(refresh=lambda: 0))
    assert changes_still(Waits())
    assert not changes_still(Waits(closed=True))
