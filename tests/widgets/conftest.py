"""A session that only pretends, and a chart that only counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comm
import ipywidgets
import pytest
from comm.base_comm import BaseComm

from amp_widgets.analysis.comparisons import ComparisonStatus
from amp_widgets.analysis.inspections import Inspection
from amp_widgets.core.history import History
from amp_widgets.core.run_state import RunState
from amp_widgets.core.settings import Settings
from amp_widgets.errors import RecordingError, RunError, SettingsError
from amp_widgets.widgets.state import DashboardState


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FakeSupport:
    available: bool = True
    note: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FakeLayer:
    name: str
    type: str = "Linear"
    parameters: int = 0
    why_not: str | None = None
    structural: bool = False


def gpt_layers(blocks: int = 6) -> tuple[FakeLayer, ...]:
    """The layers of a small GPT, as a model lists them."""
    layers = [
        FakeLayer(name="token", type="Embedding", parameters=24_576),
        FakeLayer(name="position", type="Embedding", parameters=8_192),
    ]
    layers.append(FakeLayer(name="blocks", type="ModuleList", parameters=blocks * 198_272, structural=True))
    for i in range(blocks):
        layers.append(FakeLayer(name=f"blocks.{i}", type="Block", parameters=198_272))
        layers.append(FakeLayer(name=f"blocks.{i}.norm", type="LayerNorm", parameters=256))
        layers.append(FakeLayer(name=f"blocks.{i}.attention", type="MultiheadAttention", parameters=66_048))
        layers.append(FakeLayer(name=f"blocks.{i}.mlp", type="Sequential", parameters=131_712))
        layers.append(FakeLayer(name=f"blocks.{i}.mlp.0", type="Linear", parameters=66_048))
        layers.append(FakeLayer(name=f"blocks.{i}.mlp.1", type="GELU"))
        layers.append(FakeLayer(name=f"blocks.{i}.mlp.2", type="Linear", parameters=65_664))
    layers.append(FakeLayer(name="norm", type="LayerNorm", parameters=256))
    layers.append(
        FakeLayer(name="head", type="ScriptedHead", parameters=24_768, why_not="a ScriptModule: its forward cannot be replaced")
    )
    return tuple(layers)


def state_of(**changes: Any) -> DashboardState:
    """A state, with changes; names of settings change the settings."""
    names = {field.name for field in dataclasses.fields(Settings)}
    settings = Settings(**{name: changes.pop(name) for name in names & set(changes)})
    support = {
        "fp32": FakeSupport(),
        "fp16": FakeSupport(note="very slow on this CPU: keep the model tiny"),
        "bf16": FakeSupport(note="emulated on this CPU: the rounding is real, the speed is not"),
    }
    given: dict[str, Any] = {"layers": gpt_layers(), "support": support, "device": "cpu", "torch_version": "2.13.0"}
    return DashboardState(settings=settings, **(given | changes))


@dataclasses.dataclass
class FakeGradients:
    counts: tuple[Any, ...] = ()
    pending: bool = False
    every: int = 0
    why_not: str | None = None


@dataclasses.dataclass
class FakeOverflow:
    notes: tuple[Any, ...] = ()
    refused: tuple[Any, ...] = ()


class FakeNumerics:
    def __init__(self) -> None:
        self.gradients = FakeGradients()
        self.overflow = FakeOverflow()


class FakeSession:
    """Settings that wait for `boundary`, a run that does what it is told, and numbers that the test sets."""

    def __init__(self, **state: Any) -> None:
        self.state = state_of(**state)
        self.history_so_far = History()
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.closed = False
        self.looks = 0
        self.profiles: tuple[Any, ...] = ()
        self.profile_pending = False
        self.why_not_profiled: str | None = None
        self.out_of_memory: Any = None
        self.memory_budget: float | None = None
        self.probes = FakeNumerics()
        self.looks_at_numerics = 0
        self.check_changes = False
        self.why_no_batch: str | None = None
        self.inspections: dict[str, Inspection] = {}
        self.why_no_plan: str | None = None
        self.why_no_comparison: str | None = None
        self.comparison = ComparisonStatus()
        self.recorded_to: Path | None = None
        self.why_not_recorded: str | None = None

    def record(self, path: str) -> None:
        self.asked.append(("record", {"path": path}))
        if self.why_not_recorded is not None:
            raise RecordingError(f"record: {self.why_not_recorded}")
        self.recorded_to = Path(path)

    def stop_recording(self) -> None:
        self.asked.append(("stop_recording", {}))
        self.recorded_to = None

    def dashboard_state(self) -> DashboardState:
        self.looks += 1
        return self.state

    def put(self, **changes: Any) -> None:
        self.state = dataclasses.replace(self.state, **changes)

    def request(self, *, source: str = "script", **changes: Any) -> None:
        self.asked.append((source, dict(changes)))
        names = changes.get("checkpointed", ())
        known = {layer.name for layer in self.state.layers}
        for name in names:
            if name not in known:
                raise SettingsError(f"checkpointed: there is no layer {name!r}")
        self.state.settings.replace(**changes)
        self.put(pending={**(self.state.pending or {}), **changes})

    def profile_next_step(self, label: str = "") -> None:
        self.asked.append(("profile", {}))
        self.profile_pending = True

    def count_gradients(self, every: int | None = None) -> None:
        self.asked.append(("count", {"every": every}))
        if every is None:
            self.probes.gradients.pending = True
        else:
            self.probes.gradients.every = every

    @property
    def numerics(self) -> Any:
        self.looks_at_numerics += 1
        return self.probes

    def inspection(self, kind: str) -> Inspection:
        return self.inspections.setdefault(kind, Inspection())

    def inspect(self, kind: str, **options: Any) -> None:
        self.asked.append(("inspect", {"kind": kind, **options}))
        if kind != "preflight" and self.why_no_batch is not None:
            raise RunError(f"{kind}: {self.why_no_batch}")
        self.inspections[kind] = dataclasses.replace(self.inspection(kind), pending=True)

    def cancel_inspection(self, kind: str) -> None:
        self.asked.append(("cancel_inspection", {"kind": kind}))

    def compare_on_newest(self, **chosen: Any) -> None:
        self.asked.append(("compare", chosen))
        if self.why_no_comparison is not None:
            raise RunError(f"compare: {self.why_no_comparison}")
        self.comparison = dataclasses.replace(self.comparison, pending=True)

    def cancel_comparison(self) -> None:
        self.asked.append(("cancel", {}))

    def clear_out_of_memory(self) -> None:
        self.asked.append(("clear", {}))
        self.out_of_memory = None

    def boundary(self) -> None:
        """A step ends: what waits is in force."""
        if self.state.pending:
            self.put(settings=self.state.settings.replace(**self.state.pending), pending=None)
        self.put(step=self.state.step + 1)

    def reject(self, reason: str) -> None:
        self.put(pending=None, last_rejection=reason)

    def _run(self, command: str, run: RunState, *when: RunState) -> None:
        self.asked.append((command, {}))
        if when and self.state.run not in when:
            raise RunError(f"{command}: the run is {self.state.run}, expected {when[0]}")
        self.put(run=run)

    def start(self) -> None:
        self._run("start", "running")

    def pause(self) -> None:
        self._run("pause", "paused", "running")

    def resume(self) -> None:
        self._run("resume", "running", "paused")

    def single_step(self) -> None:
        self._run("single_step", "paused")

    def stop(self) -> None:
        self._run("stop", "stopped")

    def reset(self) -> None:
        self._run("reset", self.state.run)


class FakeChart(ipywidgets.Box):
    """Counts the rows that it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.memory_source = ""
        self.rows = 0
        self.pulls = 0
        self.was_closed = False

    def pull(self, history: History, *, at_once: bool = False) -> bool:
        self.pulls += 1
        new = history.total_rows != self.rows
        self.rows = history.total_rows
        return new

    def close(self) -> None:
        self.was_closed = True
        super().close()


class Messages:
    """Every message that widgets send while it records."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, dict[str, Any]]] = []

    def clear(self) -> None:
        self.sent.clear()

    @property
    def updates(self) -> list[dict[str, Any]]:
        """The states of the update messages."""
        return [data["state"] for kind, data in self.sent if kind == "comm_msg" and data.get("method") == "update"]

    @property
    def customs(self) -> list[Any]:
        """The contents of the custom messages."""
        return [data["content"] for kind, data in self.sent if kind == "comm_msg" and data.get("method") == "custom"]


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> Messages:
    """What widgets made in this test send."""
    recorded = Messages()

    class RecordingComm(BaseComm):
        def publish_msg(self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **keys: Any) -> None:
            recorded.sent.append((msg_type, data or {}))

    monkeypatch.setattr(comm, "create_comm", lambda *args, **options: RecordingComm(*args, **options))
    return recorded


@pytest.fixture
def state() -> Callable[..., DashboardState]:
    return state_of


@pytest.fixture
def layer() -> type[FakeLayer]:
    return FakeLayer


@pytest.fixture
def support() -> type[FakeSupport]:
    return FakeSupport


@pytest.fixture
def session_of() -> type[FakeSession]:
    return FakeSession


@pytest.fixture
def chart_of() -> type[FakeChart]:
    return FakeChart
