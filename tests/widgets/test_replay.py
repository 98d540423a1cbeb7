"""Replays of recorded runs: what is shown at a step, and how one moves."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ipywidgets
import numpy as np
import pytest
from ipywidgets.widgets.widget import _instances as REGISTRY  # every widget that is open

from amp_widgets.charts.live import TrainingChart
from amp_widgets.core.history import COLUMNS, Event
from amp_widgets.core.memory.profile import KINDS, Phase, StepProfile, frozen_sums
from amp_widgets.core.settings import Settings
from amp_widgets.errors import MagicError, RecordingError
from amp_widgets.recorded_run import RecordedRun, open_run
from amp_widgets.recording.recorder import Recorder
from amp_widgets.recording.run import wal_of
from amp_widgets.widgets import replay_course
from amp_widgets.widgets.autocast_control import AutocastControl
from amp_widgets.widgets.events_table import EventsTable
from amp_widgets.widgets.layers_control import LayersControl
from amp_widgets.widgets.playback import SPEEDS
from amp_widgets.widgets.replay_course import LONGEST_WAIT_S, Course
from amp_widgets.widgets.replay_dashboard import FOLLOW_S, ReplayDashboard
from amp_widgets.widgets.replay_status import QUIET_S, ReplayStatus
from amp_widgets.widgets.scaler_control import ScalerControl
from amp_widgets.widgets.tab_bar import TabBar
from amp_widgets.widgets.transport import Transport

sys.path.insert(0, str(Path(__file__).parent.parent / "recording"))
from recorded import LayerOf, Source

HTML = "<img src=x onerror=alert(1)>"
STEPS = 300
STEP_S = 0.1


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def record_run(path: Path, steps: int = STEPS) -> tuple[Source, Recorder]:
    """A run with three changes, a rejection, skips and a note; it goes on being recorded."""
    source = Source()
    source.layers_seen = (LayerOf("layers.0"), LayerOf("head", why_not=HTML), LayerOf(HTML))
    facts = {"model": HTML, "device": "cuda:0 (a GPU)", "memory_source": "counted", "packages": {"torch": "9.8.7"}}
    recorder = Recorder(path, source, facts=facts, every_s=1e6)
    train(source, steps)
    history = source.history_so_far
    for step, changes in CHANGES:
        if step < steps:
            source.settings = source.settings.replace(**changes)
            history.record(Event(step=step, kind="applied", reason=f"applied {changes}", detail={**changes, "source": "widget"}))
            recorder.flush()
    history.record(Event(step=120, kind="rejected", reason=f"rejected {HTML}", detail={"autocast": "fp16", "source": "script"}))
    history.record(Event(step=250, kind="note", reason=HTML, detail={"source": "user"}))
    for step in range(3, steps, 50):
        history.record(Event(step=step, kind="skipped", reason="skipped", detail={}))
    recorder.flush()
    return source, recorder


CHANGES: tuple[tuple[int, dict[str, Any]], ...] = (
    (40, {"autocast": "fp16"}),
    (100, {"init_scale": 1024.0}),
    (200, {"checkpointed": ("layers.0",), "autocast": "bf16"}),
)


def train(source: Source, steps: int) -> None:
    history = source.history_so_far
    for step in range(history.total_rows, history.total_rows + steps):
        history.append(
            step=step, time_s=step * STEP_S, step_s=STEP_S, loss=1 / (step + 1), scale=2.0 ** (10 + step // 100),
            skipped=float(step % 50 == 3), allocated_bytes=1e6 + step, peak_bytes=2e6 + (step % 100), reserved_bytes=4e6,
        )  # fmt: skip


def profile_of(step: int) -> StepProfile:
    """Two points of a step."""
    memory = np.zeros((2, len(KINDS)), np.int64)
    memory[:, KINDS.index("activation")] = (step, 0)
    return StepProfile(
        label=str(step), device="cpu", source="counted", step=step, bytes_by_kind=memory, time_s=np.array([0.0, 1.0]),
        layer_index=np.array([-1, -1], np.int32), operator_index=np.array([-1, -1], np.int32), layer_names=(), operator_names=(),
        phases=(Phase(name="forward", start=0, stop=2),), layers=(), peak_by_layer=frozen_sums({}), allocator=(), notes=(),
    )  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.db"
    record_run(path)[1].close()
    return path


@pytest.fixture
def clock() -> Clock:
    return Clock()


class CountingChart(ipywidgets.Box):
    """Reads a history as a chart does, and draws nothing."""

    memory_source = ""

    def __init__(self) -> None:
        super().__init__()
        self.history: Any = None

    def pull(self, history: Any, *, at_once: bool = False) -> bool:
        new, self.history = history is not self.history, history
        return new


@pytest.fixture
def make(clock: Clock) -> Iterator[Callable[..., ReplayDashboard]]:
    """A replay that looks only when it is told to."""
    made: list[ReplayDashboard] = []

    def dashboard(run: RecordedRun, **options: Any) -> ReplayDashboard:
        made.append(ReplayDashboard(run, **({"chart": CountingChart(), "clock": clock, "live": False} | options)))
        return made[-1]

    yield dashboard
    for one in made:
        one.close()


def part(dashboard: ReplayDashboard, kind: type) -> Any:
    [found] = [widget for widget in dashboard.widgets() if isinstance(widget, kind)]
    return found


def say(dashboard: ReplayDashboard, kind: type = Transport, **message: Any) -> None:
    part(dashboard, kind)._handle_custom_msg({**message, "id": "1"}, [])


def settings_by_hand(step: int) -> Settings:
    settings = Settings()
    for at, changes in CHANGES:
        if at <= step:
            settings = settings.replace(**changes)
    return settings


# ---- what is shown --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 39, 40, 99, 100, 119, 120, 199, 200, 298, 299])
def test_a_step_is_shown_as_it_was(make, path: Path, step: int) -> None:
    run = open_run(path)
    dashboard = make(run)
    say(dashboard, step=step)
    assert dashboard.step == step
    settings, status = settings_by_hand(step), part(dashboard, ReplayStatus)
    assert run.settings_at(step) == settings
    assert part(dashboard, AutocastControl).in_force == settings.autocast
    assert part(dashboard, ScalerControl).exponent == np.log2(settings.init_scale)
    layers = part(dashboard, LayersControl)
    assert [layers.rows[i][0] for i in layers.in_force] == list(settings.checkpointed)
    skipped = len([at for at in range(3, STEPS, 50) if at <= step])
    numbers = {label: (value, small) for label, value, small, *_ in status.numbers}
    assert numbers["Step"] == (str(step), f"of 299 · {skipped} skipped" if skipped else "of 299")
    assert numbers["Loss"][0] == f"{1 / (step + 1):.4g}"
    assert numbers["Step time"] == ("100 ms", "10.0 steps/s" if step else "")
    assert numbers["Peak memory"][0] == "2.00 MB"
    scale = f"loss scale 2^{10 + step // 100}" if settings.autocast == "fp16" else "loss not scaled"
    assert status.in_force.startswith(f"{settings.autocast} · {scale} · ")
    assert status.rejection == (f"rejected {HTML}" if 120 <= step < 200 else "")
    assert status.machine == f"{HTML} · cuda:0 (a GPU) · torch 9.8.7"
    events = [event for event in run.events if event.step <= step]
    table = part(dashboard, EventsTable)
    assert [(row[0], row[2]) for row in table.rows] == [(event.step, event.reason) for event in reversed(events)]
    assert table.summary == (f"{len(events)} event{'s' * (len(events) != 1)} until here" if events else "none until here")
    history = dashboard._history
    assert history.events() == events
    for name, column in history.columns().items():
        np.testing.assert_array_equal(column, run.history.columns(name)[name][: step + 1])


def test_the_controls_are_not_live(make, path: Path, messages) -> None:
    dashboard = make(open_run(path))
    for kind, message in (
        (AutocastControl, {"autocast": "fp16"}),
        (ScalerControl, {"setting": "init_scale", "value": 3}),
        (LayersControl, {"layer": "layers.0", "on": True}),
    ):
        control = part(dashboard, kind)
        assert (control.locked, control.why_locked) == (True, "this is a replay")
        messages.clear()
        say(dashboard, kind, **message)
        assert messages.updates == []
    assert "not live" in part(dashboard, Transport).sentence


def test_events_can_be_told_apart_and_gone_to(make, path: Path) -> None:
    dashboard = make(open_run(path))
    table = part(dashboard, EventsTable)
    for group, kinds in {"changes": {"applied", "rejected"}, "scale": {"step skipped"}, "notes": {"note"}}.items():
        say(dashboard, EventsTable, group=group)
        assert {row[1] for row in table.rows} == kinds
    say(dashboard, EventsTable, group="nonsense")
    assert table.group == "notes"
    say(dashboard, EventsTable, step=120)
    assert dashboard.step == 120
    assert table.rows == []


def test_memory_until_the_step(make, path: Path, tmp_path: Path) -> None:
    source = Source()
    profiles = tuple(profile_of(step) for step in (10, 20))
    recorder = Recorder(tmp_path / "profiled.db", source, facts={}, every_s=1e6)
    source.train(30)
    source.profiles = profiles
    recorder.close()
    dashboard = make(open_run(tmp_path / "profiled.db"))
    say(dashboard, TabBar, tab="memory")
    control = dashboard._panel._control
    for step, labels in ((9, []), (10, ["10"]), (25, ["10", "20"]), (12, ["10"]), (29, ["10", "20"])):
        say(dashboard, step=step)
        assert [label for label, _ in control.options] == labels
    say(dashboard, type(control), show=["10"])
    assert control.shown == ["10"]
    say(dashboard, type(control), profile=True)
    assert not control.pending


# ---- moving ---------------------------------------------------------------------------------------------------------


def test_it_opens_at_the_end_and_plays_from_the_beginning(make, path: Path, clock: Clock) -> None:
    dashboard = make(open_run(path))
    transport, status = part(dashboard, Transport), part(dashboard, ReplayStatus)
    assert (dashboard.step, transport.at_end, transport.mode, status.word) == (299, True, "still", "replay, at the end")
    say(dashboard, speed=10)
    say(dashboard, move="play")
    assert (dashboard.step, transport.mode, status.word) == (0, "playing", "replaying")
    for passed_s in (0.055, 0.505, 1.005, 2.005):
        clock.now_s = 100 + passed_s
        dashboard.tick()
        assert dashboard.step == int(passed_s * 10 / STEP_S)
    say(dashboard, speed=1)  # from step 200 on
    clock.now_s += 1.05
    dashboard.tick()
    assert dashboard.step == 210
    say(dashboard, move="pause")
    clock.now_s += 10
    dashboard.tick()
    assert (dashboard.step, transport.mode, status.word) == (210, "still", "replay, paused")
    say(dashboard, move="play")
    clock.now_s += 1e6
    dashboard.tick()
    assert (dashboard.step, transport.mode, transport.time) == (299, "still", "29.9 s of 29.9 s")


def test_playing_costs_one_message_for_each_part(make, path: Path, clock: Clock, messages) -> None:
    dashboard = make(open_run(path), chart=TrainingChart(clock=clock))
    say(dashboard, step=0)
    clock.now_s += 1
    dashboard.tick()
    say(dashboard, move="play")
    parts = len([*dashboard.widgets()])
    for _ in range(20):
        clock.now_s += 0.101
        dashboard._chart._answer({"type": "drawn", "sequence": dashboard._chart._sequence})  # as a page does
        messages.clear()
        dashboard.tick()
        assert len(messages.customs) == 1  # the chart's
        assert messages.customs[0]["type"] == "append"
        assert len(messages.updates) <= 4 < parts
    assert dashboard.step == 20
    say(dashboard, move="pause")
    clock.now_s += 1
    dashboard.tick()
    messages.clear()
    for _ in range(5):
        clock.now_s += 1
        dashboard.tick()
    assert messages.sent == []


def test_the_slider_goes_back_and_forth(make, path: Path, clock: Clock) -> None:
    dashboard = make(open_run(path), chart=TrainingChart(clock=clock))
    for step in (200, 10, 11, 299, 0, 150, 149):
        clock.now_s += 1
        say(dashboard, step=step)
        page = dashboard._chart._page
        assert page.last_step == step
        assert [event["step"] for event in page.events] == [at for at in (40, 100, 120, 200, 250) if at <= step]
        x, y = page.series["loss"].points()
        np.testing.assert_array_equal(x, np.arange(step + 1))
        np.testing.assert_array_equal(y, 1 / (np.arange(step + 1) + 1))
        assert page.skipped == len([at for at in range(3, STEPS, 50) if at <= step])


@pytest.mark.parametrize(
    ("message", "step"),
    [
        ({"step": -5}, 0), ({"step": 1e9}, 299), ({"step": 17.9}, 17), ({"step": "17"}, 150), ({"step": float("nan")}, 150),
        ({"typed": " 1_7 "}, 17), ({"typed": "1e2"}, 100), ({"typed": "x"}, 150), ({"typed": "inf"}, 150),
        ({"move": "begin"}, 0), ({"move": "end"}, 299), ({"move": "before"}, 120), ({"move": "after"}, 200),
        ({"move": "explode"}, 150), ({"speed": 3}, 150), ({"speed": "fast"}, 150), ({}, 150),
    ],
)  # fmt: skip
def test_what_the_page_asks_for(make, path: Path, message: dict[str, Any], step: int) -> None:
    dashboard = make(open_run(path))
    say(dashboard, step=150)
    say(dashboard, **message)
    assert dashboard.step == step
    assert part(dashboard, Transport).speed in SPEEDS


def test_changes_are_gone_to_one_by_one(make, path: Path) -> None:
    dashboard = make(open_run(path))
    for move, steps in (("before", [250, 200, 120, 100, 40, 0, 0]), ("after", [40, 100, 120, 200, 250, 299, 299])):
        for step in steps:
            say(dashboard, move=move)
            assert dashboard.step == step
    assert [mark[0] for mark in part(dashboard, Transport).marks] == [40, 100, 120, 200, 250]


def test_pauses_of_the_run_are_passed_over(tmp_path: Path) -> None:
    source = Source()
    recorder = Recorder(tmp_path / "run.db", source, facts={}, every_s=1e6)
    times_s = [0.0, 1.0, 3601.0, 3602.0, 3600.0, float("nan"), 3610.0]
    for step, time_s in enumerate(times_s):
        source.history_so_far.append(step=step, time_s=time_s, step_s=30.0 if step == 6 else 1.0)
    recorder.close()
    course = Course(open_run(tmp_path / "run.db"))
    played_s = [course.played_s(row) for row in range(len(times_s))]
    untimed_s = replay_course.UNTIMED_S
    expected = np.cumsum([0, 1, LONGEST_WAIT_S, 1, 0, untimed_s, untimed_s])
    np.testing.assert_allclose(played_s, expected)
    assert [course.row_played(s) for s in (0, 0.99, 1, 2.99, 3, 3.99)] == [0, 0, 1, 1, 2, 2]


# ---- a file that grows ----------------------------------------------------------------------------------------------


def test_a_file_that_is_written_is_followed(make, tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "run.db"
    source, recorder = record_run(path, 60)
    dashboard = make(open_run(path))
    transport, status = part(dashboard, Transport), part(dashboard, ReplayStatus)
    assert (dashboard.step, transport.mode, status.word) == (59, "following", "following")
    for end in (100, 130):
        train(source, end - source.history_so_far.total_rows)
        recorder.flush()
        dashboard.tick()
        clock.now_s += FOLLOW_S
        dashboard.tick()
        assert (dashboard.step, transport.last) == (end - 1, end - 1)
        assert dashboard._history.columns("step")["step"].tolist() == list(range(end))
    source.apply(autocast="bf16")
    train(source, 1)
    recorder.flush()
    clock.now_s += FOLLOW_S
    dashboard.tick()
    assert part(dashboard, AutocastControl).in_force == "bf16"
    assert 130 in [mark[0] for mark in transport.marks]

    say(dashboard, step=20)  # a step that is chosen stays
    train(source, 10)
    recorder.flush()
    clock.now_s += 10
    dashboard.tick()
    assert (dashboard.step, transport.last, transport.mode) == (20, 130, "still")
    say(dashboard, move="follow")
    assert (dashboard.step, transport.last, transport.mode) == (140, 140, "following")
    say(dashboard, move="pause")
    assert transport.mode == "still"
    say(dashboard, move="follow")
    train(source, 5)
    recorder.close()
    clock.now_s += FOLLOW_S
    dashboard.tick()
    assert (dashboard.step, transport.mode, status.word, status.complaint) == (145, "still", "replay, at the end", "")
    say(dashboard, move="begin")
    say(dashboard, move="follow")  # nobody writes it any more: it goes to the end
    assert (dashboard.step, transport.mode) == (145, "still")


def test_that_nothing_is_written_is_said(make, tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "run.db"
    source, recorder = record_run(path, 60)
    dashboard = make(open_run(path))
    status = part(dashboard, ReplayStatus)
    known = list(status.notes)

    def rest(duration_s: float) -> tuple[str, str, list[str]]:
        clock.now_s += duration_s
        for written in (path, wal_of(path)):
            os.utime(written, (time.time() - duration_s,) * 2)
        dashboard.tick()
        assert status.notes[: len(known)] == known
        return status.word, status.tone, status.notes[len(known) :]

    assert rest(QUIET_S - 5) == ("following", "active", [])
    assert rest(QUIET_S + 5) == ("following", "waiting", ["Nothing was written to the file for 10 s."])
    assert rest(125)[2] == ["Nothing was written to the file for 2 min."]
    train(source, 1)
    recorder.flush()
    clock.now_s += FOLLOW_S
    for written in (path, wal_of(path)):
        os.utime(written, (1.0, 1.0))  # some file systems tell late of what is written
    dashboard.tick()
    assert (dashboard.step, status.tone, status.notes) == (60, "active", known)
    recorder.close()


def test_a_writer_that_was_killed_is_not_waited_for(make, tmp_path: Path, clock: Clock) -> None:
    """Neither where that is found on opening the file, nor while it is followed."""
    path = tmp_path / "run.db"
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent.parent / "recording")!r})
from recorded import Source
from amp_widgets.recording.recorder import Recorder
source = Source()
recorder = Recorder({str(path)!r}, source, facts={{}}, every_s=1e6)
source.history_so_far.append(step=0, time_s=0.1)
recorder.flush()
print("there", flush=True)
sys.stdin.readline()
"""
    gone = "Whoever wrote this file has ended without closing it: there is no more than this."
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "there\n"
        run = open_run(path)
        dashboard = make(run)
        transport, status = part(dashboard, Transport), part(dashboard, ReplayStatus)
        assert (run.writer, transport.mode) == ("there", "following")
        writer.kill()
        os.waitid(os.P_PID, writer.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has asked what came of it
        clock.now_s += FOLLOW_S
        dashboard.tick()
        assert (run.writer, transport.mode, dashboard.step) == ("gone", "still", 0)
        assert (status.word, status.notes[-1]) == ("replay, at the end", gone)
    later = make(open_run(path))
    assert (part(later, Transport).mode, part(later, ReplayStatus).notes[-1]) == ("still", gone)


def test_events_that_arrive_late_are_shown(make, tmp_path: Path, clock: Clock) -> None:
    """A chart that has the later ones already starts over."""
    path = tmp_path / "run.db"
    source, recorder = record_run(path, 60)
    dashboard = make(open_run(path), chart=TrainingChart(clock=clock))
    for step in (50, 30):
        source.history_so_far.record(Event(step=step, kind="note", reason=f"at {step}"))
        recorder.flush()
        clock.now_s += FOLLOW_S
        dashboard.tick()
    assert [event["step"] for event in dashboard._chart._page.events] == [30, 40, 50, 120, 250]
    recorder.close()


def test_a_run_that_is_closed_says_so_and_what_was_read_stays(make, path: Path, clock: Clock) -> None:
    run = open_run(path)
    dashboard = make(run)
    run.close()
    say(dashboard, step=45)
    assert (dashboard.step, part(dashboard, AutocastControl).in_force) == (45, "fp16")
    say(dashboard, move="follow")
    transport, status = part(dashboard, Transport), part(dashboard, ReplayStatus)
    assert (transport.mode, dashboard.step) == ("still", 45)
    assert "this run was closed; open it again" in status.complaint
    say(dashboard, step=46)
    assert status.complaint == ""
    with pytest.raises(RecordingError, match="this run was closed"):
        run.dashboard()


@pytest.mark.parametrize("events", [0, 3])
def test_a_run_without_steps(make, tmp_path: Path, clock: Clock, events: int) -> None:
    source = Source()
    recorder = Recorder(tmp_path / "run.db", source, facts={}, every_s=1e6)
    for number in range(events):
        source.apply(init_scale=2.0**number)
    recorder.close()
    dashboard = make(open_run(tmp_path / "run.db"), chart=TrainingChart(clock=clock))
    transport, status = part(dashboard, Transport), part(dashboard, ReplayStatus)
    for message in ({"move": "play"}, {"step": 3}, {"move": "before"}, {"move": "end"}, {"move": "after"}, {"move": "pause"}):
        say(dashboard, **message)
        clock.now_s += 1
        dashboard.tick()
        assert (dashboard.step, transport.last, transport.mode, status.word) == (-1, -1, "still", "no steps")
    assert len(part(dashboard, EventsTable).rows) == events
    assert part(dashboard, ScalerControl).exponent == (events - 1 if events else 16)
    assert len(dashboard._chart._page.events) == events


# ---- a long run -----------------------------------------------------------------------------------------------------


def test_of_a_long_run_a_chart_gets_what_shapes_it(make, tmp_path: Path, clock: Clock, monkeypatch) -> None:
    """With short blocks, so that a short run is a long one: extremes are there, and single steps where one zooms in."""
    monkeypatch.setattr(replay_course, "WHOLE_ROWS", 50_000)
    monkeypatch.setattr(replay_course, "BLOCK_ROWS", 8)
    seed = 7
    print("seed", seed)
    rng = np.random.default_rng(seed)
    n = 70_000
    loss = rng.random(n)
    spikes = rng.integers(0, n, 5)
    loss[spikes] = 10 + np.arange(5)
    source = Source()
    recorder = Recorder(tmp_path / "run.db", source, facts={}, every_s=1e6)
    columns = {"step": np.arange(n), "time_s": np.arange(n) * 1e-3, "loss": loss, "scale": np.ones(n), "peak_bytes": loss * 1e6}
    source.history_so_far.extend(columns)
    recorder.close()
    run = open_run(tmp_path / "run.db")
    dashboard = make(run, chart=TrainingChart(clock=clock))
    for step in (n - 1, 55_000, 56_000, 3000, n - 2):
        clock.now_s += 1
        say(dashboard, step=step)
        rows = dashboard._history.rows_since(None)[0]
        assert np.isin(spikes[spikes <= step], rows["step"]).all()
        assert rows["loss"].min() == loss[: step + 1].min()
        assert len(rows["step"]) <= 0.6 * step or step < 50_000
        page = dashboard._chart._page
        assert page.last_step == step
        assert (page.exact_from > -np.inf) == (step > 50_000)
        assert len(page.series["loss"]) <= 10_000
        np.testing.assert_array_equal(np.sort(page.series["loss"].points()[1])[-1], loss[: step + 1].max())
    assert dashboard._history.columns("loss")["loss"].size == n - 1
    state = dashboard._course.state_at(55_000)
    assert state.overall_peak_bytes == (loss * 1e6)[:55_001].max()
    assert state.loss == loss[55_000]


# ---- life -----------------------------------------------------------------------------------------------------------


def test_closing_frees_the_run_and_every_widget(path: Path, clock: Clock) -> None:
    before = set(REGISTRY)
    run = open_run(path)
    dashboard = ReplayDashboard(run, clock=clock, live=False)
    say(dashboard, TabBar, tab="memory")
    say(dashboard, TabBar, tab="gradients")
    say(dashboard, move="play")
    references = [weakref.ref(run), weakref.ref(dashboard), weakref.ref(dashboard._course), weakref.ref(dashboard._history)]
    references += [weakref.ref(widget) for widget in dashboard.widgets()]
    dashboard.close()
    dashboard.close()
    assert dashboard.closed
    assert dashboard.tick() is None
    say_to = dashboard._transport
    say_to._handle_custom_msg({"move": "play", "id": "2"}, [])  # was under way
    assert set(REGISTRY) - before - {dashboard._chart.asset.comm.comm_id} == set()
    del dashboard, run, say_to
    gc.collect()
    assert [reference() for reference in references if reference() is not None] == []


def test_a_thread_plays_and_ends_with_the_dashboard(path: Path) -> None:
    dashboard = open_run(path).dashboard()
    refresher = dashboard._refresher
    assert refresher.alive
    dashboard.close()
    refresher._thread.join(5)
    assert not refresher.alive


def test_without_torch(path: Path) -> None:
    """Reading, the whole dashboard, and the magic, where torch cannot be imported."""
    code = f"""
import sys, json
sys.modules["torch"] = None
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "amp_widgets")
shell.run_line_magic("amp", "replay {path}")
run = shell.user_ns["run"]
dashboard = run.dashboard()
for tab in ("memory", "gradients", "events"):
    dashboard._select(tab)
dashboard._move("seek", step=45)
said = [dashboard.step, repr(dashboard), len(run.history), sorted(name for name in sys.modules if name.startswith("torch."))]
try:
    shell.run_line_magic("amp", "demo digits")
except Exception as error:
    said.append(str(error))
shell.run_line_magic("unload_ext", "amp_widgets")
print(json.dumps(said))
"""
    root = str(Path(__file__).parent.parent.parent)
    said = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    step, shown, rows, torches, error = json.loads(said.stdout.splitlines()[-1])
    assert (step, rows, torches) == (45, STEPS, [])
    assert shown == "<amp_widgets replay: step 45 of 299, fp16 · loss scale 2^10 · no layer checkpointed>"
    assert "torch is not installed" in error


def test_the_run_that_is_kept_with_the_notebooks(make) -> None:
    path = Path(__file__).parent.parent.parent / "notebooks" / "runs" / "digits.db"
    assert path.stat().st_size < 300_000
    with open_run(path) as run:
        dashboard = make(run, chart=TrainingChart())
        changes = {event.step for event in run.history.events("applied")}
        kept = [profile.label for profile in run.profiles]
        for step in (0, *changes, 359):
            say(dashboard, step=step)
            assert dashboard._shown.settings == run.settings_at(step)
            for tab in ("memory", "gradients", "events"):
                say(dashboard, TabBar, tab=tab)
            assert part(dashboard, ReplayStatus).complaint == ""
        assert len(changes) == 5
        assert [label for label, _ in dashboard._panel._control.options] == kept
        assert dashboard._gradients._range is not None


@pytest.mark.parametrize("words", [[], ["a.db", "b.db"]])
def test_a_magic_needs_one_file(words: list[str]) -> None:
    from amp_widgets.replay_magics import Replay

    with pytest.raises(MagicError, match="expected that of a file"):
        Replay(None).show(words)


def test_columns_are_those_of_a_history() -> None:
    assert set(replay_course.COLUMNS) == set(COLUMNS)


def test_who_asked_is_said_in_the_language(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amp_widgets.language._chosen", "ko")
    table = EventsTable(lambda *asked, **changes: None)
    sources = ("script", "widget", "user", "somebody")
    table.show([Event(step=1, kind="applied", reason="x", detail={"source": source}) for source in sources], 1)
    assert [row[3] for row in table.rows] == ["somebody", "사용자", "대시보드", "스크립트"]
