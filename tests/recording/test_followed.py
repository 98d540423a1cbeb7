from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np

from amp_widgets.core.history import Event, History
from amp_widgets.core.settings import Settings
from amp_widgets.errors import RecordingError
from amp_widgets.recording.followed import FollowedRun
from amp_widgets.recording.recorder import Recorder
from amp_widgets.recording.run import open_run

sys.path.insert(0, str(Path(__file__).parent))
from recorded import Source


class Known:
    settings = Settings()

    def __init__(self, capacity: int = 1000) -> None:
        self.history = self.history_so_far = History(capacity=capacity)


def test_along_time_a_run_begins_with_its_first_step() -> None:
    run = Known()
    followed = FollowedRun(run, align="time")
    assert not followed.pull()
    run.history.extend({"step": [5, 6], "time_s": [100.5, 102.0], "step_s": [0.5, 1.5], "loss": [2.0, 1.0]})
    run.history.record(Event(step=6, kind="applied", reason="", detail={"autocast": "bf16"}, time_s=100.7))
    run.history.record(Event(step=0, kind="applied", reason="said", detail={}, time_s=99.0))
    assert followed.pull()
    run.history.extend({"step": [7], "time_s": [104.0], "step_s": [2.0], "loss": [0.5]})
    assert followed.pull()
    assert not followed.pull()
    assert [part.tolist() for part in followed.course.lines["loss"]] == [[0.5, 2.0, 4.0], [2.0, 1.0, 0.5]]
    np.testing.assert_allclose([x for x, _ in followed.changes], [0.7, 0.0])  # what was set before it began
    assert [what for _, what in followed.changes] == ["autocast bf16", "said"]
    assert followed.steps == 3


def test_along_steps_changes_are_at_theirs() -> None:
    run = Known()
    run.history.record(Event(step=6, kind="applied", reason="", detail={"autocast": "bf16"}, time_s=math.nan))
    run.history.record(Event(step=7, kind="rejected", reason="", detail={"autocast": "fp16"}))
    followed = FollowedRun(run)
    assert followed.pull()
    assert followed.changes == [(6.0, "autocast bf16")]


def test_another_history_is_begun_anew() -> None:
    run = Known()
    run.history.extend({"step": [0, 1, 2], "loss": [1, 2, 3]})
    followed = FollowedRun(run)
    followed.pull()
    run.history = run.history_so_far = History()
    run.history.extend({"step": [0, 1], "loss": [1, 9]})
    assert followed.pull()
    assert followed.course.lines["loss"][1].tolist() == [1, 9]


def test_what_was_read_stays_better_than_a_history_that_was_thinned() -> None:
    run = Known(capacity=64)
    followed = FollowedRun(run)
    for step in range(200):
        run.history.append(step=step, loss=float(step))
        followed.pull()
    assert len(run.history) < 100
    assert followed.course.lines["loss"][1].tolist() == list(range(200))


def test_a_file_that_grows_and_then_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    source = Source()
    recorder = Recorder(path, source, facts={}, every_s=1e6)
    with open_run(path) as run:
        followed = FollowedRun(run)
        assert not followed.pull()
        assert followed.live
        source.train(10)
        recorder.flush()
        assert followed.pull()
        assert followed.steps == 10
        recorder.close()
    assert followed.pull()  # the run was closed, which is to be shown
    assert followed.why_not is not None
    assert "this run was closed" in followed.why_not
    assert not followed.pull()
    assert followed.course.lines["loss"][0].size == 10


def test_a_file_that_can_be_read_again_is_read_again() -> None:
    class File(Known):
        locked = False

        def refresh(self) -> None:
            if self.locked:
                raise RecordingError("database is locked")

    run = File()
    followed = FollowedRun(run)
    run.locked = True
    assert followed.pull()
    assert followed.why_not == "database is locked"
    assert followed.live
    run.locked = False
    run.history.extend({"step": [0], "loss": [1]})
    assert followed.pull()
    assert followed.why_not is None
    assert followed.steps == 1
