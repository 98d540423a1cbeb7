"""Who writes a run file, as the file has it."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from amp_widgets.recording.recorder import Recorder
from amp_widgets.recording.run import open_run
from amp_widgets.recording.writer import state_of, this_process

sys.path.insert(0, str(Path(__file__).parent))
from recorded import Source


def test_this_process_is_there() -> None:
    here = json.loads(json.dumps(this_process()))
    assert here["process"] == os.getpid()
    assert state_of(here) == "there"


def test_one_that_has_ended_is_gone() -> None:
    code = "import json; from amp_widgets.recording.writer import this_process; print(json.dumps(this_process()))"
    ended = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert ended["machine"] == this_process()["machine"]
    assert state_of(ended) == "gone"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this system does not say when a process began")
def test_another_process_of_the_same_number_is_not_it() -> None:
    assert state_of(this_process() | {"began": this_process()["began"] - 1}) == "gone"


@pytest.mark.parametrize(
    "writer",
    [
        None, 5, [], {}, this_process() | {"machine": "another"}, this_process() | {"process": None},
        this_process() | {"process": -1}, this_process() | {"process": 0}, this_process() | {"process": 10**30},
    ],
)  # fmt: skip
def test_what_says_nothing_is_unknown(writer: Any) -> None:
    """Above all, no signal goes to a group of processes."""
    assert state_of(writer) == "unknown"


def test_the_file_says_when_it_was_closed(tmp_path: Path) -> None:
    source = Source()
    recorder = Recorder(tmp_path / "run.db", source, facts={}, every_s=1e6)
    with open_run(tmp_path / "run.db") as run:
        assert run.writer == "there"
        source.history_so_far.append(step=0)
        recorder.close()
        assert run.writer == "there"  # as it was read
        assert (run.refresh(), run.writer) == (1, "closed")
        assert "writer" not in run.facts


def test_a_file_of_old_does_not_say(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    Recorder(path, Source(), facts={}, every_s=1e6).close()
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM facts WHERE name IN ('writer', 'ended')")
    connection.close()
    with open_run(path) as run:
        assert run.writer == "unknown"
