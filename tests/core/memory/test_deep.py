"""The deep mode: what it switches on and off, and what it writes, with a record of memory that is written down by hand."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from amp_widgets.core.loop import LiveLoop
from amp_widgets.core.memory.deep import MOST_ENTRIES, DeepRecording, TorchMemoryHistory
from amp_widgets.errors import SessionClosedError, SettingsError

SNAPSHOT = {"segments": [], "device_traces": [[{"action": "oom", "size": 12}]]}


class History:
    def __init__(self, *, on: bool = False) -> None:
        self.on = on
        self.calls: list[str] = []
        self.error: BaseException | None = None

    def why_not(self) -> str | None:
        return None

    def is_on(self) -> bool:
        return self.on

    def switch_on(self, most_entries: int) -> None:
        self.calls.append(f"on {most_entries}")
        self.on = True

    def switch_off(self) -> None:
        self.calls.append("off")
        self.on = False

    def snapshot(self) -> Any:
        self.calls.append("snapshot")
        if self.error is not None:
            raise self.error
        return SNAPSHOT


def written(path: Path) -> Any:
    return pickle.loads(path.read_bytes())


def test_one_step(tmp_path: Path) -> None:
    history = History()
    recording = DeepRecording(tmp_path / "step.pickle", history=history)
    assert history.calls == []
    recording.begin()
    assert history.calls == [f"on {MOST_ENTRIES}"]
    text = recording.end()
    assert history.calls == [f"on {MOST_ENTRIES}", "snapshot", "off"]
    assert written(tmp_path / "step.pickle") == SNAPSHOT
    assert str(tmp_path / "step.pickle") in text
    assert "https://pytorch.org/memory_viz" in text
    assert recording.end() == ""  # once
    assert len(history.calls) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["step.pickle"]


def test_the_users_recording_goes_on(tmp_path: Path) -> None:
    history = History(on=True)
    recording = DeepRecording(tmp_path / "step.pickle", history=history)
    recording.begin()
    text = recording.end()
    assert history.calls == ["snapshot"]
    assert history.on
    assert "was on already, and goes on" in text
    assert written(tmp_path / "step.pickle") == SNAPSHOT


@pytest.mark.parametrize("ours", [False, True])
def test_what_goes_wrong_is_said(tmp_path: Path, ours: bool) -> None:
    history = History(on=not ours)
    recording = DeepRecording(tmp_path / "step.pickle", history=history)
    (tmp_path / "step.pickle").write_text("before")
    recording.begin()
    history.error = RuntimeError("no snapshot")
    text = recording.end()
    assert "was recorded, but not written" in text
    assert "RuntimeError: no snapshot" in text
    assert history.on == (not ours)
    assert (tmp_path / "step.pickle").read_text() == "before"


def test_an_interrupt_switches_off(tmp_path: Path) -> None:
    history = History()
    recording = DeepRecording(tmp_path / "step.pickle", history=history)
    recording.begin()
    history.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        recording.end()
    assert not history.on
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = History()
    recording = DeepRecording(tmp_path / "step.pickle", history=history)
    (tmp_path / "step.pickle").write_text("before")
    recording.begin()

    def dump(snapshot: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(pickle, "dump", dump)
    assert "No space left on device" in recording.end()
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("step.pickle", "before")]
    assert not history.on


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="expected a file in a folder that exists; make"):
        DeepRecording(tmp_path / "none" / "step.pickle", history=History())


def test_on_a_cpu(tmp_path: Path) -> None:
    history = TorchMemoryHistory(available=lambda: False)
    with pytest.raises(SettingsError, match=r"expected a CUDA device.*on a CPU profile_next_step\(\) shows every tensor"):
        DeepRecording(tmp_path / "step.pickle", history=history)
    with pytest.raises(SettingsError, match="got a model on cpu, expected one on a CUDA device"):
        DeepRecording(tmp_path / "step.pickle", torch.device("cpu"), history=History())
    assert list(tmp_path.iterdir()) == []


def test_what_torch_refuses_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = History()

    def switch_on(most_entries: int) -> None:
        raise RuntimeError("does not support recordHistory")

    monkeypatch.setattr(history, "switch_on", switch_on)
    recording = DeepRecording(tmp_path / "step.pickle", history=history)
    recording.begin()
    assert recording.end() == "the memory of the step could not be recorded: RuntimeError: does not support recordHistory"
    assert list(tmp_path.iterdir()) == []


class TestLoop:
    """A loop on a CPU, with a record that is written down by hand in place of torch's."""

    def case(self, path: Path) -> tuple[LiveLoop, History, Callable[[], None]]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop = LiveLoop(model, [optimizer])

        def step() -> None:
            with loop.autocast():
                model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        history = History()
        step()
        loop._memory._recording_wanted = DeepRecording(path, history=history)
        return loop, history, step

    def test_one_step(self, tmp_path: Path) -> None:
        loop, history, step = self.case(tmp_path / "step.pickle")
        assert history.calls == []
        step()
        assert history.calls == [f"on {MOST_ENTRIES}", "snapshot", "off"]
        step()
        assert len(history.calls) == 3
        (event,) = loop.history.events("note")
        assert event.step == 1
        assert str(tmp_path / "step.pickle") in event.reason
        assert written(tmp_path / "step.pickle") == SNAPSHOT
        loop.close()

    @pytest.mark.parametrize("ends", ["abandon_step", "close"])
    def test_a_step_that_does_not_end(self, tmp_path: Path, ends: str) -> None:
        loop, history, _ = self.case(tmp_path / "step.pickle")
        with loop.autocast():
            model = loop.model
            assert model is not None
            model(torch.ones(1, 3))
        getattr(loop, ends)()
        assert history.calls == [f"on {MOST_ENTRIES}", "snapshot", "off"]
        assert written(tmp_path / "step.pickle") == SNAPSHOT
        loop.close()

    def test_a_step_that_dies(self, tmp_path: Path) -> None:
        loop, history, step = self.case(tmp_path / "step.pickle")
        loop.memory_budget = 1.0
        with pytest.raises(torch.OutOfMemoryError):
            step()
        assert history.calls == [f"on {MOST_ENTRIES}", "snapshot", "off"]  # at that moment, not later
        loop.memory_budget = None
        step()
        assert len(history.calls) == 3
        loop.close()

    def test_a_model_on_a_cpu(self, tmp_path: Path) -> None:
        loop, _, _ = self.case(tmp_path / "step.pickle")
        with pytest.raises(SettingsError, match="record_next_step: got a "):
            loop.record_next_step(tmp_path / "other.pickle")
        loop.close()
        with pytest.raises(SessionClosedError):
            loop.record_next_step(tmp_path / "other.pickle")


class TestTorchs:
    def test_another_backend(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "cudaMallocAsync")
        because = TorchMemoryHistory(available=lambda: True).why_not()
        assert because is not None
        assert "PYTORCH_ALLOC_CONF=backend:cudaMallocAsync" in because

    def test_calls(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[Any] = []
        monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "native")
        monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: True, raising=False)
        # The C++ functions' arguments, as torch's own Python makes them of ours.
        monkeypatch.setattr(torch._C, "_cuda_record_memory_history", lambda *args: calls.append(args), raising=False)
        history = TorchMemoryHistory(available=lambda: True)
        assert history.why_not() is None
        assert history.is_on()
        history.switch_on(1000)
        history.switch_off()
        assert [args[:5] for args in calls] == [("all", "all", "python", 1000, True), (None, "all", "all", calls[1][3], False)]

    def test_versions_that_do_not_tell(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(torch._C, "_cuda_isHistoryEnabled", raising=False)
        assert not TorchMemoryHistory(available=lambda: True).is_on()
