"""A run to other tools: while it happens, forked, recorded, and when they fail."""

from __future__ import annotations

import errno
import gc
import os
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from amp_widgets.core.history import Event, History
from amp_widgets.errors import MissingExtraError
from amp_widgets.export.sink import Sink
from amp_widgets.export.sink_follower import SinkFollower, log_recorded

sys.path.insert(0, str(Path(__file__).parent.parent / "recording"))
sys.path.insert(0, str(Path(__file__).parent))
from exported import HOSTILE, RunOf, odd_history
from recorded import Source

NEVER_S = 1e6


class Notebook(Sink):
    """Keeps what it is told."""

    name = "a notebook"

    def __init__(self) -> None:
        self.courses: dict[str, dict[str, list[Any]]] = {}
        self.error: Exception | None = None
        self.closed = 0
        self.threads: set[str] = set()

    def begin(self, course: str, began_s: float, facts: Mapping[str, Any]) -> None:
        self.now = self.courses[course] = {"steps": [], "losses": [], "events": [], "facts": [facts]}

    def write(self, rows: Mapping[str, Any], events: Sequence[Event]) -> None:
        self.threads.add(threading.current_thread().name)
        if self.error is not None:
            raise self.error
        self.now["steps"] += rows["step"].tolist()
        self.now["losses"] += rows["loss"].tolist()
        self.now["events"] += [event.kind for event in events]

    def close(self) -> None:
        self.closed += 1
        if self.error is not None:
            raise self.error


class TestFollower:
    def test_everything_once_and_in_order(self) -> None:
        source, sink = Source(), Notebook()
        source.train(3)
        follower = SinkFollower(sink, source, facts={"model": "Net"}, every_s=NEVER_S)
        follower.flush()
        source.train(4)
        source.apply(autocast="bf16")
        follower.close()
        follower.close()
        assert sink.now == {
            "steps": list(range(7)), "losses": [1 / (step + 1) for step in range(7)], "events": ["applied"],
            "facts": [{"model": "Net"}],
        }  # fmt: skip
        assert sink.closed == 1

    def test_it_comes_by_itself_and_on_a_thread_of_its_own(self) -> None:
        source, sink, told = Source(), Notebook(), threading.Event()
        write = sink.write
        sink.write = lambda rows, events: (write(rows, events), told.set())  # type: ignore[method-assign,return-value,func-returns-value]
        follower = SinkFollower(sink, source, facts={}, every_s=0.01)
        source.train(1)
        assert told.wait(60)
        assert sink.threads == {"logging to a notebook"}
        follower.close()

    def test_what_fails_is_said_and_tried_again(self) -> None:
        source, sink = Source(), Notebook()
        follower = SinkFollower(sink, source, facts={}, every_s=NEVER_S)
        sink.error = OSError("no room")
        source.train(2)
        source.apply(autocast="bf16")  # does not raise
        follower.flush()
        assert follower.notice == (
            "Not logged at present to a notebook: OSError: no room. Training goes on; it is tried again every 5 s."
        )
        sink.error = None
        follower.flush()
        assert (sink.now["steps"], sink.now["events"], follower.notice) == ([0, 1], ["applied"], None)
        sink.error = OSError("no room")
        source.train(1)
        follower.close()  # does not raise either
        assert follower.notice == "The end of the run was not logged to a notebook: OSError: no room."

    def test_a_sink_that_cannot_be_closed(self) -> None:
        source, sink = Source(), Notebook()
        follower = SinkFollower(sink, source, facts={}, every_s=NEVER_S)
        source.train(1)
        follower.flush()
        sink.error = OSError("no room")  # there is nothing to write any more
        follower.close()
        assert follower.notice == "The end of the run was not logged to a notebook: OSError: no room."

    def test_a_fork_is_a_course_of_its_own(self) -> None:
        source, sink = Source(), Notebook()
        follower = SinkFollower(sink, source, facts={}, every_s=NEVER_S)
        source.train(5)
        before, source.history_so_far = source.history_so_far, History()
        before.append(step=5, loss=0.5)
        source.train(2)
        source.apply(autocast="bf16")
        follower.flush()
        source.train(1)
        follower.close()
        assert sink.courses[""]["steps"] == [0, 1, 2, 3, 4, 5]
        assert (sink.courses["fork-1"]["steps"], sink.courses["fork-1"]["events"]) == ([0, 1, 2], ["applied"])

    def test_the_source_is_not_kept_alive(self) -> None:
        source, sink = Source(), Notebook()
        follower = SinkFollower(sink, source, facts={}, every_s=0.01)
        source.train(2)
        gone = weakref.ref(source)
        del source
        gc.collect()
        assert gone() is None
        follower._thread.join(60)
        assert follower.closed
        assert sink.now["steps"] == [0, 1]

    def test_one_that_was_recorded(self) -> None:
        sink, history = Notebook(), odd_history(0)
        log_recorded(RunOf(history), sink)
        assert sink.now["steps"] == list(range(60))
        assert len(sink.now["events"]) == len(history.events())
        assert sink.closed == 1


class Full:
    """A file on a disk that takes 50 bytes more, and then no more."""

    def __init__(self, file: Any) -> None:
        self._file, self._room = file, 50

    def write(self, content: memoryview) -> int:
        if not self._room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done, self._room = self._file.write(content[: self._room]), 0
        return int(done)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class TestTensorBoard:
    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'amp-widgets[tensorboard]'")

    def read(self, folder: Path) -> Any:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
        found.Reload()
        return found

    def sink(self, folder: Path) -> Sink:
        from amp_widgets.export.tensorboard_sink import TensorBoardSink

        return TensorBoardSink(folder)

    def test_every_number_and_every_event_is_there(self, tmp_path: Path) -> None:
        history = odd_history(3)
        log_recorded(RunOf(history), self.sink(tmp_path / "a"))
        found, columns = self.read(tmp_path / "a"), history.columns()
        for name in history.names[2:]:
            values = columns[name].copy()
            known = ~np.isnan(values)
            if name == "loss":  # NaN is a loss from the first one on
                known[np.argmax(known) :] = True
            with np.errstate(over="ignore"):
                expected = [(at, str(np.float32(one))) for at, one in zip(columns["step"][known], values[known], strict=True)]
            assert [(one.step, str(np.float32(one.value))) for one in found.Scalars(name)] == expected, name
        tensors = [(tag, one) for tag in found.Tags()["tensors"] for one in found.Tensors(tag)]
        told = [(one.step, tag, text) for tag, one in tensors for text in one.tensor_proto.string_val]
        for event in history.events():
            assert (event.step, f"events/{event.kind}/text_summary", event.reason.encode()) in told
        assert found.Scalars("loss")[0].wall_time == pytest.approx(1767323045.0)  # as in its facts

    def test_a_fork_is_a_folder(self, tmp_path: Path) -> None:
        source = Source()
        follower = SinkFollower(self.sink(tmp_path), source, facts={"model": HOSTILE}, every_s=NEVER_S)
        source.train(3)
        follower.flush()
        source.history_so_far = History()
        source.train(2)
        follower.close()
        assert follower.notice is None
        assert [one.step for one in self.read(tmp_path / "fork-1").Scalars("loss")] == [0, 1]
        assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 1

    def test_after_a_full_disk_the_file_can_be_read_to_its_end(self, tmp_path: Path) -> None:
        source, sink = Source(), self.sink(tmp_path)
        follower = SinkFollower(sink, source, facts={}, every_s=NEVER_S)
        source.train(10)
        follower.flush()
        opened = sink._file  # type: ignore[attr-defined]
        source.train(10)
        sink._file = Full(opened)  # type: ignore[attr-defined]
        follower.flush()
        assert "No space left on device" in (follower.notice or "")
        assert [one.step for one in self.read(tmp_path).Scalars("loss")] == list(range(10))
        sink._file = opened  # type: ignore[attr-defined]
        follower.close()
        assert [one.step for one in self.read(tmp_path).Scalars("loss")] == list(range(20))

    def test_without_it_the_extra_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
        with pytest.raises(MissingExtraError, match=r"pip install 'amp-widgets\[tensorboard\]'"):
            self.sink(tmp_path)


class TestTrackio:
    def test_every_number_and_every_event_is_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
        pytest.importorskip("trackio", reason="trackio is not installed: pip install 'amp-widgets[trackio]'")
        from trackio.sqlite_storage import SQLiteStorage

        from amp_widgets.export.trackio_sink import TrackioSink

        source = Source()
        follower = SinkFollower(TrackioSink("tests", "a"), source, facts={"_x": HOSTILE}, every_s=NEVER_S)
        source.train(30)
        source.apply(autocast="bf16")
        follower.close()
        assert follower.notice is None
        logged = SQLiteStorage.get_logs("tests", "a")
        assert [(one["step"], one["loss"]) for one in logged] == [(step, 1 / (step + 1)) for step in range(30)]
        assert [alert["title"] for alert in SQLiteStorage.get_alerts("tests")] == ["applied"]

    def test_without_it_the_extra_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from amp_widgets.export.trackio_sink import TrackioSink

        monkeypatch.setitem(sys.modules, "trackio", None)
        with pytest.raises(MissingExtraError, match=r"pip install 'amp-widgets\[trackio\]'"):
            TrackioSink("tests")
