"""Recording from the dashboard."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from amp_widgets.charts.live import TrainingChart
from amp_widgets.core.history import Event, History
from amp_widgets.widgets.dashboard import NUMBERS_S, Dashboard
from amp_widgets.widgets.record_control import RecordControl, RecordState, free_name
from amp_widgets.widgets.status_line import StatusLine

TODAY = datetime.date(2030, 5, 17)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def part(dashboard: Dashboard, kind: type) -> Any:
    [found] = [widget for widget in dashboard.widgets() if isinstance(widget, kind)]
    return found


def say(control: Any, **message: Any) -> None:
    control._handle_custom_msg({**message, "id": "1"}, [])


def test_no_file_is_overwritten() -> None:
    assert free_name(TODAY) == "run-2030-05-17.db"
    Path("run-2030-05-17.db").touch()
    Path("run-2030-05-17-2.db").touch()
    assert free_name(TODAY) == "run-2030-05-17-3.db"


def test_a_name_is_offered_and_taken_where_none_is_typed(tmp_path: Path) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []
    control = RecordControl(lambda name, **values: asked.append((name, values)), RecordState(), today=lambda: TODAY)
    assert (control.recording, control.sentence, control.offered) == (False, "", "run-2030-05-17.db")
    Path("run-2030-05-17.db").write_bytes(bytes(1500))
    say(control, record=" ")
    say(control, record=" my run.db ")
    say(control, stop=True)
    say(control, record=7)
    assert asked == [("record", {"path": "run-2030-05-17-2.db"}), ("record", {"path": "my run.db"}), ("stop_recording", {})]
    path = tmp_path / "run-2030-05-17.db"
    state = RecordState().after(path)
    control.show(state)
    assert (control.recording, control.sentence, control.title) == (True, "to run-2030-05-17.db, 1.00 kB", str(path))
    (tmp_path / "run-2030-05-17.db-wal").write_bytes(bytes(2_000_000))
    control.show(state.after(path))
    assert control.sentence == "to run-2030-05-17.db, 2.00 MB"
    control.show(state.after(None))
    assert (control.recording, control.sentence) == (False, "run-2030-05-17.db is kept, 2.00 MB")
    path.unlink()
    control.show(state.after(None))
    assert (control.recording, control.sentence) == (False, "")
    assert RecordState().after(None) == RecordState()


def test_the_dashboard_records(session_of, chart_of, messages) -> None:
    session, clock = session_of(run="ready"), Clock()
    dashboard = Dashboard(session, chart=chart_of(), clock=clock, live=False)
    control, status = part(dashboard, RecordControl), part(dashboard, StatusLine)
    session.why_not_recorded = "a.db exists already"
    say(control, record="a.db")
    assert status.complaint == "Not recorded: a.db exists already"
    session.why_not_recorded = None
    say(control, record="b.db")
    assert (session.recorded_to, control.recording, status.complaint) == (Path("b.db"), True, "")
    messages.clear()
    for size in (0, 5000):
        Path("b.db").write_bytes(bytes(size))
        clock.now_s += NUMBERS_S
        dashboard.tick()
        dashboard.tick()
    assert messages.updates == [{"sentence": "to b.db, 5.00 kB"}]
    session.recorded_to = Path("b.fork-1.db")  # by a fork
    session.recorded_to.touch()
    dashboard.tick()
    assert control.sentence.startswith("to b.fork-1.db, ")
    say(control, stop=True)
    assert (session.recorded_to, control.sentence) == (None, "b.fork-1.db is kept, 0 B")
    session.record("c.db")
    Path("c.db").touch()
    dashboard.tick()
    session.closed, session.recorded_to = True, None
    dashboard.tick()
    assert (control.recording, control.locked, control.sentence) == (False, True, "c.db is kept, 0 B")
    dashboard.close()


def test_another_course_of_the_run_is_shown_from_its_beginning(session_of) -> None:
    """After a fork, the session has another history."""
    session, clock = session_of(run="paused"), Clock()
    for step in range(30):
        session.history_so_far.append(step=step, loss=1.0, step_s=0.1, peak_bytes=1e6)
    for step in (10, 20):
        session.history_so_far.record(Event(step=step, kind="applied", reason="", detail={"autocast": "fp16"}))
    dashboard = Dashboard(session, chart=TrainingChart(clock=clock), clock=clock, live=False)
    dashboard._panels.select("plan")
    dashboard._panels.select("gradients")
    forked = History()
    for step in range(15):
        forked.append(step=step, loss=2.0, step_s=0.1, peak_bytes=2e6)
    forked.record(Event(step=10, kind="applied", reason="", detail={"autocast": "bf16"}))
    session.history_so_far = forked
    clock.now_s += 10
    dashboard.tick()
    page = dashboard._chart._page
    x, y = page.series["loss"].points()
    assert (x.tolist(), set(y.tolist())) == ([float(step) for step in range(15)], {2.0})
    assert [(event["step"], event["label"]) for event in page.events] == [(10, "bf16")]
    measured = dashboard._panels._measured
    assert [(one.autocast, one.peak_bytes) for one in measured.pull(session.history_so_far)] == [("fp32", 2e6), ("bf16", 2e6)]
    dashboard.close()
