from __future__ import annotations

import dataclasses
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ipywidgets.widgets.widget import _instances as REGISTRY  # every widget that is open

from amp_widgets.core.settings import Settings
from amp_widgets.language import set_language
from amp_widgets.widgets.autocast_control import AutocastControl
from amp_widgets.widgets.dashboard import CALM_S, COMPLAINT_S, IDLE_S, NUMBERS_S, PULL_S, QUIET_S, Dashboard
from amp_widgets.widgets.frame import Frame
from amp_widgets.widgets.layers_control import LayersControl
from amp_widgets.widgets.run_control import RunControl
from amp_widgets.widgets.scaler_control import ScalerControl
from amp_widgets.widgets.status_line import StatusLine


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def pass_(self, duration_s: float) -> None:
        self.now_s += duration_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(chart_of, clock: Clock) -> Iterator[Callable[..., Dashboard]]:
    """A dashboard that looks only when it is told to."""
    made: list[Dashboard] = []

    def dashboard(session: Any, **options: Any) -> Dashboard:
        made.append(Dashboard(session, **({"chart": chart_of(), "clock": clock, "live": False} | options)))
        return made[-1]

    yield dashboard
    for one in made:
        one.close()


def part(dashboard: Dashboard, kind: type) -> Any:
    [found] = [widget for widget in dashboard.widgets() if isinstance(widget, kind)]
    return found


def say(dashboard: Dashboard, kind: type, **message: Any) -> None:
    part(dashboard, kind)._handle_custom_msg({**message, "id": "1"}, [])


def test_shows_the_session_from_the_start(make, session_of) -> None:
    session = session_of(run="ready", autocast="bf16", checkpointed=("norm",))
    session.history_so_far.append(step=0, loss=1.0)
    dashboard = make(session)
    assert part(dashboard, AutocastControl).in_force == "bf16"
    assert part(dashboard, StatusLine).word == "ready"
    assert dashboard._chart.rows == 1
    assert session.asked == []


def test_an_idle_session_costs_no_message(make, session_of, messages, clock: Clock) -> None:
    dashboard = make(session_of(run="ready"))
    messages.clear()
    for _ in range(50):
        clock.pass_(PULL_S)
        dashboard.tick()
    assert messages.sent == []


def test_what_changes_is_sent_and_nothing_else(make, session_of, messages, clock: Clock) -> None:
    session = session_of(run="running")
    dashboard = make(session)
    clock.pass_(1)
    messages.clear()
    session.put(pending={"autocast": "fp16"})
    dashboard.tick()
    autocast, scaler, status = messages.updates[1], messages.updates[2], messages.updates[0]
    assert (autocast, status) == ({"waiting": "fp16"}, {"waiting": "autocast fp16"})
    assert set(scaler) == {"sentence"}
    assert len(messages.sent) == 3


def test_numbers_are_refreshed_four_times_a_second(make, session_of, messages, clock: Clock) -> None:
    session = session_of(run="running")
    dashboard = make(session)
    messages.clear()
    for step in range(1, 101):  # ten seconds
        session.put(step=step, loss=1 / step)
        clock.pass_(PULL_S)
        dashboard.tick()
    assert 30 <= len(messages.updates) <= 10 / NUMBERS_S
    clock.pass_(NUMBERS_S)
    dashboard.tick()
    assert part(dashboard, StatusLine).numbers[0][1] == "100"  # the last ones are shown too


def test_other_changes_do_not_wait_for_the_numbers(make, session_of, clock: Clock) -> None:
    session = session_of(run="running")
    dashboard = make(session)
    clock.pass_(1)
    session.put(step=1)
    dashboard.tick()
    session.put(step=2, run="paused")
    dashboard.tick()
    assert part(dashboard, StatusLine).word == "paused"


def test_looks_often_while_something_moves_and_seldom_when_nothing_does(make, session_of, clock: Clock) -> None:
    session = session_of(run="running")
    dashboard = make(session)
    session.put(step=1)
    assert dashboard.tick() == PULL_S
    clock.pass_(CALM_S / 2)
    assert dashboard.tick() == PULL_S
    clock.pass_(CALM_S)
    assert dashboard.tick() == IDLE_S
    session.history_so_far.append(step=2)
    assert dashboard.tick() == PULL_S


@pytest.mark.parametrize(
    ("kind", "message", "expected"),
    [
        (AutocastControl, {"autocast": "fp16"}, ("widget", {"autocast": "fp16"})),
        (ScalerControl, {"setting": "init_scale", "value": 20}, ("widget", {"init_scale": 2.0**20})),
        (LayersControl, {"layer": "norm", "on": True}, ("widget", {"checkpointed": ("norm",)})),
        (RunControl, {"command": "start"}, ("start", {})),
        (RunControl, {"command": "single_step"}, ("single_step", {})),
        (RunControl, {"command": "reset"}, ("reset", {})),
    ],
)
def test_what_the_user_does_is_one_request(make, session_of, kind: type, message: dict, expected: tuple) -> None:
    session = session_of(run="ready")
    dashboard = make(session)
    say(dashboard, kind, **message)
    for _ in range(3):
        dashboard.tick()
        session.boundary()
    assert session.asked == [expected]


def test_a_request_shows_at_once_as_waiting_before_the_page_is_answered(make, session_of, messages) -> None:
    dashboard = make(session_of())
    messages.clear()
    say(dashboard, AutocastControl, autocast="fp16")
    kinds = [data["method"] for _, data in messages.sent]
    assert kinds == ["update", "update", "update", "custom"]
    assert part(dashboard, AutocastControl).waiting == "fp16"


def test_from_waiting_to_in_force(make, session_of, clock: Clock) -> None:
    session = session_of()
    dashboard = make(session)
    say(dashboard, LayersControl, choose="every_second")
    layers, status = part(dashboard, LayersControl), part(dashboard, StatusLine)
    assert (len(layers.in_force), len(layers.requested), status.waiting) == (0, 3, "3 layers checkpointed")
    session.boundary()
    dashboard.tick()
    assert (len(layers.in_force), len(layers.requested), status.waiting) == (3, 3, "")


def test_a_rejected_request_falls_back_and_says_why(make, session_of) -> None:
    session = session_of()
    dashboard = make(session)
    say(dashboard, AutocastControl, autocast="fp16")
    session.reject("fp16 is not possible here")
    dashboard.tick()
    assert part(dashboard, AutocastControl).waiting == ""
    assert part(dashboard, StatusLine).rejection == "fp16 is not possible here"


def test_a_settings_error_is_shown_and_goes_with_the_next_good_request(make, session_of, clock: Clock) -> None:
    session = session_of(autocast="fp16")
    dashboard = make(session)
    say(dashboard, LayersControl, pattern="layrs.*")
    status = part(dashboard, StatusLine)
    assert status.rejection == "checkpointed: there is no layer 'layrs.*'"
    clock.pass_(5)
    dashboard.tick()
    assert status.rejection == "checkpointed: there is no layer 'layrs.*'"
    say(dashboard, ScalerControl, setting="growth_factor", value="0.5")
    assert "growth_factor: got 0.5" in status.rejection
    say(dashboard, AutocastControl, autocast="bf16")
    assert status.rejection == ""


def test_a_run_error_is_shown(make, session_of) -> None:
    session = session_of(run="paused")
    dashboard = make(session)
    session.put(run="stopped")  # the page does not know yet
    say(dashboard, RunControl, command="resume")
    assert part(dashboard, StatusLine).rejection == "resume: the run is stopped, expected paused"


def test_a_button_pressed_twice_was_pressed_once(make, session_of, clock: Clock) -> None:
    session = session_of(run="running")
    dashboard = make(session)
    status = part(dashboard, StatusLine)
    say(dashboard, RunControl, command="pause")
    clock.pass_(0.3)
    say(dashboard, RunControl, command="pause")
    assert (status.word, status.rejection) == ("paused", "")
    clock.pass_(2)
    say(dashboard, RunControl, command="pause")
    assert status.rejection == "pause: the run is paused, expected running"


def test_a_complaint_goes_when_the_run_has_moved_on(make, session_of, clock: Clock) -> None:
    session = session_of(run="stopped")
    dashboard = make(session)
    status = part(dashboard, StatusLine)
    say(dashboard, RunControl, command="resume")
    for _ in range(5):
        clock.pass_(1)
        dashboard.tick()
    assert status.rejection == "resume: the run is stopped, expected paused"
    session.put(run="running", step=1)
    dashboard.tick()
    assert status.rejection == ""


def test_a_complaint_can_be_read_before_it_goes(make, session_of, clock: Clock) -> None:
    session = session_of(run="running")
    dashboard = make(session)
    status = part(dashboard, StatusLine)
    say(dashboard, LayersControl, pattern="layrs.*")
    session.put(run="paused")
    clock.pass_(COMPLAINT_S / 2)
    dashboard.tick()
    assert status.rejection
    clock.pass_(COMPLAINT_S / 2)
    dashboard.tick()
    assert status.rejection == ""


@pytest.mark.parametrize(("run", "before", "after"), [("none", "attached", "idle"), ("ready", "ready", "ready")])
def test_the_loop_in_a_cell_is_told_by_its_steps(make, session_of, clock: Clock, run: str, before: str, after: str) -> None:
    session = session_of(run=run)
    dashboard = make(session)
    status = part(dashboard, StatusLine)
    assert status.word == before
    clock.pass_(1)
    session.put(step=1, step_s=0.1)
    dashboard.tick()
    assert (status.word, status.tone) == ("your loop", "active")
    clock.pass_(QUIET_S * 0.9)
    dashboard.tick()
    assert status.word == "your loop"
    clock.pass_(QUIET_S * 0.2)
    dashboard.tick()  # nothing in the session has changed
    assert (status.word, status.tone) == (after, "idle")


def test_slow_steps_are_waited_for(make, session_of, clock: Clock) -> None:
    session = session_of()
    dashboard = make(session)
    session.put(step=1, step_s=10.0)
    dashboard.tick()
    clock.pass_(45)
    dashboard.tick()
    assert part(dashboard, StatusLine).word == "your loop"
    clock.pass_(6)
    dashboard.tick()
    assert part(dashboard, StatusLine).word == "idle"


def test_the_last_step_of_a_background_run_is_no_loop_in_a_cell(make, session_of, clock: Clock) -> None:
    session = session_of(run="running", step=1)
    dashboard = make(session)
    session.put(run="finished", step=2)
    clock.pass_(1)
    dashboard.tick()
    assert part(dashboard, StatusLine).word == "finished"


def test_an_unexpected_error_of_a_request_is_shown(make, session_of, monkeypatch) -> None:
    session = session_of(run="ready")

    def broken() -> None:
        raise ZeroDivisionError("of all things")

    monkeypatch.setattr(session, "start", broken)
    dashboard = make(session)
    say(dashboard, RunControl, command="start")
    assert part(dashboard, StatusLine).rejection == "ZeroDivisionError: of all things"


def test_a_session_that_cannot_be_read_is_no_end(make, session_of, clock: Clock, monkeypatch) -> None:
    session = session_of(run="running")
    dashboard = make(session)

    def broken() -> None:
        raise ZeroDivisionError("of all things")

    with monkeypatch.context() as patch:
        patch.setattr(session, "dashboard_state", broken)
        assert dashboard.tick() is not None
    assert "The session cannot be shown: ZeroDivisionError: of all things" in part(dashboard, StatusLine).complaint
    clock.pass_(1)
    session.put(run="paused")
    dashboard.tick()
    assert part(dashboard, StatusLine).word == "paused"


def test_two_dashboards_agree(make, session_of, clock: Clock) -> None:
    session = session_of(run="ready")
    one, other = make(session), make(session)
    say(one, AutocastControl, autocast="fp16")
    say(other, ScalerControl, setting="init_scale", value=4)
    session.boundary()
    session.start()
    clock.pass_(1)
    for dashboard in (one, other):
        dashboard.tick()
    for kind in (StatusLine, RunControl, AutocastControl, ScalerControl, LayersControl):
        first, second = part(one, kind), part(other, kind)
        names = [name for name in first.keys if not name.startswith("_") and name not in ("layout", "still")]
        assert {name: getattr(first, name) for name in names} == {name: getattr(second, name) for name in names}
    assert part(one, AutocastControl).in_force == "fp16"
    assert part(one, ScalerControl).exponent == 4


def test_nobody_looks_and_nothing_is_sent_until_somebody_does(make, session_of, messages, clock: Clock) -> None:
    session = session_of(run="running")
    dashboard = make(session)
    say(dashboard, StatusLine, view="a", open=True)
    say(dashboard, StatusLine, view="a", open=False)
    messages.clear()
    pulls = dashboard._chart.pulls
    for step in range(1, 20):
        session.put(step=step)
        clock.pass_(IDLE_S)
        assert dashboard.tick() == IDLE_S
    assert (messages.sent, dashboard._chart.pulls) == ([], pulls)
    say(dashboard, StatusLine, view="b", open=True)
    dashboard.tick()
    assert part(dashboard, StatusLine).numbers[0][1] == "19"
    assert dashboard._chart.pulls == pulls + 1


def test_closing_frees_the_widgets_the_dashboard_and_the_session(session_of, chart_of) -> None:
    gc.collect()
    before = set(REGISTRY)
    session, chart = session_of(), chart_of()
    dashboard = Dashboard(session, chart=chart)
    say(dashboard, AutocastControl, autocast="fp16")
    refs = [weakref.ref(dashboard), weakref.ref(session), weakref.ref(part(dashboard, LayersControl))]
    thread = dashboard._refresher
    dashboard.close()
    dashboard.close()  # a second time does nothing
    assert chart.was_closed
    assert dashboard.closed
    assert set(REGISTRY) == before
    thread._thread.join(5)
    assert not thread.alive
    del dashboard, session
    gc.collect()
    assert [ref() for ref in refs] == [None, None, None]


def test_a_closed_dashboard_stops_looking(make, session_of) -> None:
    session = session_of()
    dashboard = make(session)
    control = part(dashboard, AutocastControl)
    dashboard.close()
    looks = session.looks
    assert dashboard.tick() is None
    control._handle_custom_msg({"autocast": "fp16", "id": "1"}, [])
    assert (session.looks, session.asked) == (looks, [])


def test_a_closed_session_is_shown_last_and_let_go(make, session_of) -> None:
    session = session_of(run="running")
    dashboard = make(session)
    session.history_so_far.append(step=0)
    session.put(step=7, run="none")
    session.closed = True
    assert dashboard.tick() is None
    status = part(dashboard, StatusLine)
    assert (status.word, status.numbers[0][1], dashboard._chart.rows) == ("closed", "7", 1)
    assert all(control.locked for control in dashboard._controls)
    ref = weakref.ref(session)
    del session
    gc.collect()
    assert ref() is None
    assert dashboard.tick() is None


def test_a_thread_keeps_it_up_to_date_and_ends_with_it(session_of, chart_of) -> None:
    session = session_of(run="running")
    dashboard = Dashboard(session, chart=chart_of())
    try:
        assert dashboard._refresher.alive
        session.put(run="paused")
        wait_until(lambda: part(dashboard, StatusLine).word == "paused")
        looks, started_s = session.looks, time.monotonic()
        wait_until(lambda: session.looks >= looks + 3)
        assert time.monotonic() - started_s > 2 * PULL_S * 0.9  # ten times a second at most
        session.closed = True
        wait_until(lambda: not dashboard._refresher.alive)
    finally:
        dashboard.close()


def test_the_thread_ends_when_the_session_closed_the_dashboard_from_it(session_of, chart_of) -> None:
    session = session_of(run="running")
    dashboard = Dashboard(session, chart=chart_of())
    refresher = dashboard._refresher
    look = session.dashboard_state

    def close_while_looking() -> object:
        dashboard.close()
        return look()

    session.dashboard_state = close_while_looking
    wait_until(lambda: not refresher.alive)
    assert dashboard.closed


def test_requests_from_many_threads_lose_nothing(make, session_of) -> None:
    session = session_of(autocast="fp16")
    dashboard = make(session)
    names = [layer.name for layer in session.state.layers if layer.why_not is None and not layer.structural][:8]
    threads = [threading.Thread(target=say, args=(dashboard, LayersControl), kwargs={"pattern": name}) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(request["checkpointed"][0] for _, request in session.asked) == sorted(names)


def test_its_text_is_short_and_says_how_it_stands(make, session_of) -> None:
    dashboard = make(session_of(autocast="fp16", scale=4.0, step=7))
    assert repr(dashboard) == "<amp_widgets dashboard: step 7, fp16 · loss scale 2^2 · no layer checkpointed>"
    bundle = dashboard._repr_mimebundle_()
    assert "run this cell again" in bundle["text/plain"]
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] == dashboard.model_id


def test_every_widget_is_listed_once(make, session_of) -> None:
    before = set(REGISTRY)
    dashboard = make(session_of())
    listed = [widget.model_id for widget in dashboard.widgets()]
    assert len(listed) == len(set(listed))
    made = set(REGISTRY) - before
    assert set(listed) == made


def test_the_real_chart_goes_with_it(session_of, clock: Clock) -> None:
    gc.collect()
    before = set(REGISTRY)
    session = session_of(memory_source="counted")
    for step in range(5):
        session.history_so_far.append(step=step, loss=1.0)
    dashboard = Dashboard(session, clock=clock, live=False)
    assert dashboard._chart.memory_source == "counted"
    session.put(memory_source="not measured: memory_every is 0")
    dashboard.tick()
    assert dashboard._chart.memory_source == "not measured: memory_every is 0"
    dashboard.close()
    left = {type(widget).__name__ for key, widget in REGISTRY.items() if key not in before}
    assert left <= {"PlotlyAsset", "Layout"}  # plotly.js itself stays for the next chart


def test_settings_are_compared_by_value(make, session_of, messages) -> None:
    session = session_of()
    dashboard = make(session)
    messages.clear()
    session.put(
        settings=Settings(),
        layers=tuple(dataclasses.replace(layer) for layer in session.state.layers),
        support=dict(session.state.support),
    )
    dashboard.tick()
    assert messages.sent == []


def wait_until(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "it did not come to pass"
        time.sleep(0.01)


# ---- the picture that the notebook keeps -------------------------------------------------------------------------------


@pytest.fixture
def stills(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What was displayed, and by which name."""
    shown: list[tuple[str, dict[str, Any]]] = []

    def record(bundle: dict[str, Any], *, raw: bool, display_id: str = "") -> None:
        assert raw
        shown.append((display_id, bundle))

    monkeypatch.setattr("amp_widgets.widgets.still.display", record)
    monkeypatch.setattr("amp_widgets.widgets.still.update_display", record)
    return shown


def train(session: Any, steps: int) -> None:
    for _ in range(steps):
        session.history_so_far.append(step=session.state.step, loss=1.0)
        session.boundary()


def test_a_displayed_dashboard_has_a_picture_below_it_which_its_page_can_find(make, session_of, stills) -> None:
    dashboard = make(session_of(run="ready"))
    dashboard._ipython_display_()
    (_, view), (name, still) = stills
    assert view["application/vnd.jupyter.widget-view+json"]["model_id"] == dashboard.model_id
    assert part(dashboard, StatusLine).still == name
    assert f'class="{name}"' in still["text/html"]
    assert "<img" not in still["text/html"]
    assert "at step 0 (ready, fp32" in still["text/plain"]
    assert "run this cell again" in still["text/plain"]


def test_the_picture_is_drawn_anew_when_a_run_halts_and_seldom_while_it_goes_on(make, session_of, stills, clock: Clock) -> None:
    session = session_of(run="running")
    dashboard = make(session)
    dashboard._ipython_display_()
    stills.clear()
    while clock.now_s < 100 + 4 * 3600:
        clock.pass_(1.0 if clock.now_s < 1000 else 5.0)
        train(session, 1)
        dashboard.tick()
    assert 20 < len(stills) < 100
    assert all("<img" in still["text/html"] for _, still in stills)
    (name,) = {name for name, _ in stills}
    assert name == part(dashboard, StatusLine).still
    stills.clear()
    clock.pass_(0.1)
    session.put(run="stopped")
    dashboard.tick()
    ((_, still),) = stills
    assert f"at step {session.state.step:,} (stopped" in still["text/plain"]
    for _ in range(50):
        clock.pass_(100.0)
        dashboard.tick()
    assert len(stills) == 1


def test_the_last_picture_is_of_the_closed_session(make, session_of, stills, clock: Clock) -> None:
    session = session_of(run="running")
    dashboard = make(session)
    dashboard._ipython_display_()
    train(session, 3)
    session.closed = True
    clock.pass_(0.1)
    dashboard.tick()
    assert "at step 3" in stills[-1][1]["text/plain"]
    assert "<img" in stills[-1][1]["text/html"]


def test_no_picture_without_display_and_a_failing_one_is_said(make, session_of, stills, clock: Clock, monkeypatch) -> None:
    session = session_of(run="running")
    dashboard = make(session)
    train(session, 3)
    clock.pass_(10.0)
    dashboard.tick()
    assert stills == []
    dashboard._ipython_display_()
    monkeypatch.setattr("amp_widgets.widgets.still.update_display", lambda *args, **options: 1 / 0)
    for _ in range(2):
        train(session, 1)
        clock.pass_(10.0)
        dashboard.tick()
    assert "The picture for the notebook cannot be drawn: ZeroDivisionError" in part(dashboard, StatusLine).complaint


def test_shown_in_outputs_that_are_there_its_picture_stays_in_the_second(
    make, session_of, stills, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    framed: list[Any] = []
    monkeypatch.setattr(
        "amp_widgets.widgets.frame.update_display", lambda data, *, raw, display_id: framed.append((display_id, data))
    )
    session = session_of(run="running")
    dashboard, other = make(session), make(session)
    frame = Frame(("first", "second"))
    frame.put(dashboard)
    assert frame.children == (dashboard,)
    assert [name for name, _ in stills] == ["second"]
    frame.put(other)
    assert frame.children == (other,)
    ((name, bundle),) = framed  # shown once, whatever is in it
    assert name == "first"
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] == frame.model_id
    frame.close()
    train(session, 2)
    clock.pass_(10.0)
    dashboard.tick()
    assert [name for name, _ in stills] == ["second", "second", "second"]
    assert f'class="{part(dashboard, StatusLine).still}"' in stills[-1][1]["text/html"]


def test_an_open_dashboard_changes_its_language(session_of, chart_of) -> None:
    session = session_of(run="running", step=3)
    dashboard = Dashboard(session, live=False, chart=chart_of())
    chart = dashboard._chart
    dashboard._select_tab("checks")
    english = [widget for widget in dashboard.widgets() if widget is not dashboard]
    set_language("ko")
    try:
        dashboard.tick()
        assert dashboard._status.word == "실행 중"
        assert dashboard._panels.shown == "checks"
        assert "const WORDS = {}" not in dashboard._status._esm
        left = [widget for widget in english if widget.comm is not None and widget not in (chart, chart.layout, dashboard.layout)]
        assert left == []  # of the former parts
        now = dashboard._status
        dashboard.tick()
        assert dashboard._status is now  # once
        session.closed = True
        dashboard.tick()
        assert dashboard._status.word == "닫힘"
        set_language("en")
        dashboard.tick()  # it has let go of its session, and stays as it is
        assert dashboard._status.word == "닫힘"
    finally:
        set_language(None)
        dashboard.close()
