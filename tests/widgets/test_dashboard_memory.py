"""The memory panel in the dashboard: it follows the session, and what is compared is a matter of each view."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ipywidgets.widgets.widget import _instances as REGISTRY

from amp_widgets.core.profiling import ProfilePlan
from amp_widgets.widgets.dashboard import PULL_S, Dashboard
from amp_widgets.widgets.layer_table import LayerTable
from amp_widgets.widgets.memory_control import MemoryControl
from amp_widgets.widgets.memory_panel import MemoryPanel
from amp_widgets.widgets.status_line import StatusLine
from tests.charts.gpt_step import dead_step, gpt_step

FP32 = gpt_step()
LEAN = gpt_step("fp16 + 4 layers checkpointed", half=True, checkpointed=(0, 1, 2, 3))
THIRD = dataclasses.replace(gpt_step("bf16", half=True), step=50)
DEAD = dead_step()


@pytest.fixture
def now() -> list[float]:
    return [100.0]


@pytest.fixture
def make(chart_of, now: list[float]) -> Iterator[Callable[..., Dashboard]]:
    made: list[Dashboard] = []

    def dashboard(session: Any, **options: Any) -> Dashboard:
        made.append(Dashboard(session, **({"chart": chart_of(), "clock": lambda: now[0], "live": False} | options)))
        return made[-1]

    yield dashboard
    for one in made:
        one.close()


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The labels of what was drawn, light."""
    from amp_widgets.widgets import memory_panel

    found: list[tuple[str, ...]] = []
    draw = memory_panel.mountain_figure

    def recorded(profiles: Any, **options: Any) -> Any:
        if options["theme"] == "light":
            found.append(tuple(profile.label for profile in profiles))
        return draw(profiles, **options)

    monkeypatch.setattr(memory_panel, "mountain_figure", recorded)
    return found


def part(dashboard: Dashboard, kind: type) -> Any:
    [found] = [widget for widget in dashboard.widgets() if isinstance(widget, kind)]
    return found


def say(dashboard: Dashboard, kind: type = MemoryControl, **message: Any) -> None:
    part(dashboard, kind)._handle_custom_msg({**message, "id": "1"}, [])


def tick(dashboard: Dashboard, now: list[float], duration_s: float = PULL_S) -> None:
    now[0] += duration_s
    dashboard.tick()


def test_what_is_there_is_shown_from_the_start(make, session_of) -> None:
    session = session_of(step=3)
    session.profiles = (FP32,)
    dashboard = make(session)
    assert part(dashboard, MemoryControl).shown == ["fp32"]
    assert [row[0] for row in part(dashboard, LayerTable).rows] == [layer.name for layer in FP32.layers]
    assert part(dashboard, MemoryPanel) in dashboard.children[-1].children


def test_profiles_that_come_are_compared_by_themselves_and_drawn_once(make, session_of, now, drawn, messages) -> None:
    session = session_of(run="running")
    dashboard = make(session)
    session.profiles = (FP32,)
    tick(dashboard, now)
    session.profiles = (FP32, LEAN)
    tick(dashboard, now)
    assert drawn == [("fp32",), ("fp32", LEAN.label)]
    assert part(dashboard, MemoryControl).shown == ["fp32", LEAN.label]
    messages.clear()
    for _ in range(20):
        session.profiles = (*session.profiles,)  # another tuple of the same
        tick(dashboard, now)
    assert (len(drawn), messages.sent) == (2, [])


def test_numbers_that_move_draw_nothing_anew(make, session_of, now, drawn, messages) -> None:
    session = session_of(run="running")
    session.profiles = (FP32,)
    dashboard = make(session)
    drawn.clear()
    messages.clear()
    for step in range(1, 20):
        session.put(step=step)
        tick(dashboard, now, 1.0)
    assert drawn == []
    assert {name for update in messages.updates for name in update} == {"numbers"}


def test_a_new_profile_is_one_message_a_part(make, session_of, now, messages) -> None:
    session = session_of(run="running")
    session.profiles = (FP32,)
    dashboard = make(session)
    session.profiles = (FP32, LEAN)
    messages.clear()
    tick(dashboard, now)
    assert [set(update) & {"options", "figure", "rows"} for update in messages.updates] == [{"options"}, {"rows"}, {"figure"}]


def test_the_button_asks_the_session_and_says_what_will_happen(make, session_of, now) -> None:
    session = session_of(run="running")
    dashboard = make(session)
    say(dashboard, profile=True)
    control = part(dashboard, MemoryControl)
    assert session.asked == [("profile", {})]
    assert (control.pending, control.trains) == (True, True)  # before the page is answered
    session.put(run="paused")
    tick(dashboard, now)
    assert (control.pending, control.trains) == (True, False)


def test_a_loop_in_a_cell_trains_too(make, session_of, now) -> None:
    session = session_of()
    dashboard = make(session)
    assert not part(dashboard, MemoryControl).trains
    session.put(in_cell=True)
    tick(dashboard, now)
    assert part(dashboard, MemoryControl).trains


def test_what_the_session_refuses_is_shown(make, session_of, monkeypatch) -> None:
    from amp_widgets.errors import SessionClosedError

    session = session_of()
    dashboard = make(session)

    def refuse(label: str = "") -> None:
        raise SessionClosedError("profile_next_step: the session was closed")

    monkeypatch.setattr(session, "profile_next_step", refuse)
    say(dashboard, profile=True)
    assert part(dashboard, StatusLine).complaint == "Step not profiled: the session was closed"


def test_why_a_step_was_not_profiled_is_shown(make, session_of, now) -> None:
    session = session_of()
    dashboard = make(session)
    session.why_not_profiled = "the model is compiled"
    tick(dashboard, now)
    assert part(dashboard, MemoryControl).why_not == "the model is compiled"


def test_what_is_compared_is_of_one_view_and_what_was_before_stays_when_another_comes(make, session_of, now) -> None:
    session = session_of(run="running")
    session.profiles = (FP32, LEAN)
    one, other = make(session), make(session)
    say(one, show=["fp32"])
    assert part(one, MemoryControl).shown == ["fp32"]
    assert part(other, MemoryControl).shown == ["fp32", LEAN.label]
    say(one, show=["fp32", LEAN.label])
    session.profiles = (FP32, LEAN, THIRD)
    tick(one, now)
    tick(other, now)
    assert part(one, MemoryControl).shown == ["fp32", "bf16"]
    assert part(other, MemoryControl).shown == [LEAN.label, "bf16"]
    assert session.asked == []


def test_ticks_in_the_table_are_requests_like_those_in_the_tree(make, session_of, layer) -> None:
    session = session_of(layers=tuple(layer(name=one.name) for one in FP32.layers))
    session.profiles = (FP32,)
    dashboard = make(session)
    say(dashboard, LayerTable, layer="layers.5", on=True)
    assert session.asked == [("widget", {"checkpointed": ("layers.5",)})]
    table = part(dashboard, LayerTable)
    assert [table.rows[i][0] for i in table.requested] == ["layers.5"]


def test_out_of_memory_is_reported_drawn_followed_and_dismissed(make, session_of, now, drawn) -> None:
    session = session_of(run="running", step=12)
    session.profiles = (FP32,)
    session.memory_budget = 150e6
    dashboard = make(session)
    control = part(dashboard, MemoryControl)
    session.out_of_memory = DEAD
    session.put(run="failed")
    tick(dashboard, now)
    assert control.report == list(DEAD.report)
    assert (control.fitted, drawn[-1]) == ("", (DEAD.profile.label,))
    draws = len(drawn)
    session.put(run="running", step=17)
    tick(dashboard, now)
    assert control.fitted == "Step 12 ran out of memory; since then 5 steps fitted"
    assert len(drawn) == draws
    lean = dataclasses.replace(LEAN, step=13)
    session.profiles = (FP32, lean)
    tick(dashboard, now)
    assert drawn[-1] == (DEAD.profile.label, LEAN.label)
    assert control.sentence.startswith("Out of memory at 151.0 MB → peak 74.2 MB: it fits")
    say(dashboard, dismiss=True)
    assert session.asked == [("clear", {})]
    assert (control.report, control.shown) == ([], ["fp32", LEAN.label])


TRACEBACK = """  File "/x/amp_widgets/core/memory/tracker.py", line 207, in __torch_dispatch__
    raise self._above_limit(func, phase, before)
amp_widgets.core.memory.budget.MemoryBudgetError: memory_budget: got 8.0 MB more in the forward pass of layers.3.mlp"""


def test_a_death_is_one_line_above_and_not_a_traceback(make, session_of, now) -> None:
    session = session_of(run="running", step=12)
    dashboard = make(session)
    status = part(dashboard, StatusLine)
    session.out_of_memory = DEAD
    session.put(run="failed", error=TRACEBACK)
    tick(dashboard, now)
    heading = DEAD.report[0]
    assert status.error == f"{heading}. See below what would have fitted."
    assert part(make(session), StatusLine).error == status.error  # in a dashboard that is opened later, at once
    session.out_of_memory = None  # dismissed
    tick(dashboard, now)
    assert status.error == heading
    session.put(error="ValueError: another run, another error")
    tick(dashboard, now)
    assert status.error == "ValueError: another run, another error"


def test_another_error_in_the_step_that_died_is_shown_whole(make, session_of, now) -> None:
    error = """  File "/x/amp_widgets/core/memory/tracker.py", line 207, in __torch_dispatch__
ValueError: wrong shape"""
    session = session_of(run="running", step=12)
    dashboard = make(session)
    session.out_of_memory = DEAD
    session.put(run="failed", error=error)
    tick(dashboard, now)
    assert part(dashboard, StatusLine).error == error


def test_nothing_is_drawn_while_nobody_watches(make, session_of, now, drawn, messages) -> None:
    session = session_of(run="running")
    dashboard = make(session)
    status = part(dashboard, StatusLine)
    status._handle_custom_msg({"view": "1", "open": True}, [])
    status._handle_custom_msg({"view": "1", "open": False}, [])
    messages.clear()
    session.profiles = (FP32,)
    tick(dashboard, now)
    assert (drawn, messages.updates) == ([], [])
    status._handle_custom_msg({"view": "2", "open": True}, [])
    tick(dashboard, now)
    assert drawn == [("fp32",)]


def test_a_profile_that_cannot_be_drawn_is_said_once_and_the_rest_goes_on(make, session_of, now, monkeypatch) -> None:
    tries = []

    def broken(*args: Any, **options: Any) -> None:
        tries.append(args)
        raise ValueError("no such kind")

    monkeypatch.setattr("amp_widgets.widgets.memory_panel.mountain_figure", broken)
    session = session_of(run="running")
    dashboard = make(session)
    session.profiles = (FP32,)
    session.put(step=7)
    for _ in range(5):
        tick(dashboard, now, 1.0)
    status = part(dashboard, StatusLine)
    assert status.complaint == "The memory within a step cannot be shown: ValueError: no such kind"
    assert status.numbers[0][1] == "7"
    assert len(tries) == 1


def test_a_closed_session_keeps_the_picture_and_locks_the_rest(make, session_of, now) -> None:
    session = session_of(run="running")
    dashboard = make(session)
    session.profiles = (FP32,)
    session.closed = True
    tick(dashboard, now)
    control, table = part(dashboard, MemoryControl), part(dashboard, LayerTable)
    assert (control.shown, control.locked, table.locked) == (["fp32"], True, True)
    say(dashboard, profile=True)
    assert session.asked == []


def test_closing_frees_the_profiles_and_every_widget(session_of, chart_of) -> None:
    before = set(REGISTRY)
    session = session_of()
    session.profiles = (gpt_step(), LEAN)
    dashboard = Dashboard(session, chart=chart_of(), live=False)
    kept = weakref.ref(dashboard), weakref.ref(session), weakref.ref(session.profiles[0].bytes_by_kind)
    dashboard.close()
    assert {type(REGISTRY[one]).__name__ for one in set(REGISTRY) - before} <= {"PlotlyAsset", "Layout"}
    del dashboard, session
    gc.collect()
    assert [one() for one in kept] == [None, None, None]


def test_flipping_a_switch_brings_before_and_after_without_a_press(make, session_of, now) -> None:
    """As a session profiles by itself: the second step with each combination."""
    session = session_of(run="running")
    dashboard = make(session)
    plan = ProfilePlan()
    steps = {"fp32": FP32, "bf16": THIRD}

    def train(count: int) -> None:
        for _ in range(count):
            number = session.state.step
            session.boundary()
            label = plan.label_for(number, session.state.settings, [one.label for one in session.profiles])
            if label is not None:
                session.profiles = (*session.profiles, dataclasses.replace(steps[label], label=label, step=number))
            tick(dashboard, now)

    control = part(dashboard, MemoryControl)
    train(4)
    assert control.shown == ["fp32"]
    session.request(autocast="bf16")
    train(4)
    assert control.shown == ["fp32", "bf16"]


def test_the_picture_that_the_notebook_keeps_has_the_memory_and_the_report(make, session_of, now, monkeypatch) -> None:
    shown: list[str] = []
    for name in ("display", "update_display"):
        monkeypatch.setattr(f"amp_widgets.widgets.still.{name}", lambda data, **options: shown.append(data.get("text/html", "")))
    session = session_of(run="running", step=12)
    session.memory_budget = 150e6
    session.profiles = (FP32, LEAN)
    dashboard = make(session)
    dashboard._ipython_display_()
    assert f"<b>fp32 → {LEAN.label}: peak 221.0 MB → 74.2 MB, 146.8 MB less (-66.4 %)</b>" in shown[-1]
    assert 'alt="Memory within a step"' in shown[-1]
    session.out_of_memory = DEAD
    session.put(run="failed")
    tick(dashboard, now, 5.0)
    assert f"<b>{DEAD.report[0]}</b>" in shown[-1]
    assert f"<p>{DEAD.report[1]}</p>" in shown[-1]
    assert "<b>Out of memory in forward of layers.3.mlp: 143.0 MB in use" in shown[-1]
    assert len(shown[-1].encode()) < 40_000
