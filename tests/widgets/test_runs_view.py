"""The view of several runs: what it shows, what can be asked of it, how it follows a run that goes on, and that it is freed."""

from __future__ import annotations

import gc
import json
import math
import weakref
from typing import Any

import numpy as np
import pytest

from amp_widgets.charts.course import METRICS
from amp_widgets.charts.distinct import DASH_PX, line_look
from amp_widgets.core.history import Event, History
from amp_widgets.core.settings import Settings
from amp_widgets.errors import RecordingError
from amp_widgets.widgets.runs_control import SMOOTHINGS
from amp_widgets.widgets.runs_view import CALM_S, IDLE_S, MOST_OF_TIME, PULL_S, TABLE_S, RunsView

EVIL = "<img src=x onerror='window.harmed = 1'>"


class Course:
    """A run that is over."""

    def __init__(self, name: str = "over", steps: int = 5, **settings: Any) -> None:
        self.name, self.settings, self.history = name, Settings(**settings), History()
        self.train(steps)

    def train(self, steps: int) -> None:
        first = self.history.total_rows
        at = np.arange(first, first + steps)
        self.history.extend({"step": at, "time_s": at / 10.0, "loss": 1 / (at + 1), "step_s": np.full(steps, 0.1)})


class Live(Course):
    """A run that goes on until it is closed."""

    closed = False

    @property
    def history_so_far(self) -> History:
        return self.history


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def view_of(clock: Clock, *runs: Course, **options: Any) -> RunsView:
    return RunsView(runs, clock=clock, live=False, **options)


def say(view: RunsView, /, **message: Any) -> None:
    view._control._handle_custom_msg({**message, "id": "1"}, [])


def lines(view: RunsView) -> dict[tuple[int, str], int]:
    """(run, series) → bytes of its encoded points."""
    found = [one for one in view._figure.figure["data"] if one["meta"]["part"] == "line"]
    return {(one["meta"]["run"], one["meta"]["series"]): len(json.dumps(one["y"])) for one in found}


def title(view: RunsView) -> str:
    return str(view._figure.figure["layout"]["xaxis"]["title"]["text"])


def test_it_shows_every_run_in_its_look(clock: Clock) -> None:
    view = view_of(clock, Course("a"), Course(EVIL, steps=1, autocast="bf16"))
    first, second = view._control.runs
    (light, dash), (dark, _) = line_look(1, "light"), line_look(1, "dark")
    assert (first["name"], first["shown"], first["state"], first["why_not"]) == ("a", True, "5 steps", "")
    assert (second["light"], second["dark"], second["dash"]) == (light, dark, list(DASH_PX[dash]))
    assert (second["name"], second["state"]) == (EVIL, "1 step")
    assert set(lines(view)) == {(run, metric) for run in (0, 1) for metric in METRICS}
    assert view._table.differing[0] == ["autocast", "fp32", "bf16"]
    assert [run["name"] for run in view._table.runs] == ["a", EVIL]
    assert view._table.equal_text == f"{len(view._table.equal)} rows are the same in both runs"
    assert EVIL not in json.dumps(view._figure.figure)
    assert EVIL not in view._repr_mimebundle_()["text/html"]
    view.close()


def test_what_is_asked_for_is_shown(clock: Clock) -> None:
    view = view_of(clock, Course("a"), Course("b"))
    say(view, align="time")
    assert (view._control.align, title(view)) == ("time", "seconds since the run began")
    say(view, align="step")
    assert title(view) == "step"
    say(view, run=0, on=False)
    assert {run for run, _ in lines(view)} == {1}
    assert [run["shown"] for run in view._control.runs] == [False, True]
    say(view, metric="scale", on=False)
    assert {metric for _, metric in lines(view)} == set(METRICS) - {"scale"}
    assert [on for _, _, on in view._control.metrics] == [True, False, True, True, True]
    say(view, run=1, on=False)
    assert (view._figure.figure, view._figure.note) == ({}, "No run is ticked.")
    say(view, run=1, on=True)
    for metric in METRICS:
        say(view, metric=metric, on=False)
    assert view._figure.note == "No plot is ticked."
    say(view, metric="loss", on=True)
    say(view, smoothing=10)
    assert view._control.smoothing == 10
    assert "moving average over about 10 steps" in json.dumps(view._figure.figure["layout"]["annotations"])
    view.close()


@pytest.mark.parametrize("given", [None, ("left", "mine")])
def test_after_another_fork_it_has_the_name_of_the_new_course(clock: Clock, given: tuple[str, str] | None) -> None:
    session = Live("fork-1")
    view = view_of(clock, Course("run"), session, names=given)
    session.name, session.history = "fork-2", History()
    session.train(3)
    clock.now_s += 60
    view.tick()
    names = ["run", "fork-2"] if given is None else ["left", "mine"]
    assert [run["name"] for run in view._control.runs] == [run["name"] for run in view._table.runs] == names
    assert view._control.runs[1]["state"] == "3 steps"
    view.close()


def test_what_is_not_understood_changes_nothing(clock: Clock, messages: Any) -> None:
    view = view_of(clock, Course("a"), Course("b"))
    before = (view._control.get_state(), view._figure.figure)
    for message in (
        {"align": "loss"}, {"smoothing": 7}, {"smoothing": True}, {"metric": "speed", "on": True}, {"metric": "loss", "on": 1},
        {"run": 2, "on": False}, {"run": -1, "on": False}, {"run": True, "on": False}, {"run": 0}, {"other": 1}, {"view": 3},
    ):  # fmt: skip
        say(view, **message)
    assert (view._control.get_state(), view._figure.figure) == before
    assert SMOOTHINGS[0] == 0
    view.close()


def test_a_run_that_goes_on_is_followed_with_one_message_a_part(clock: Clock, messages: Any) -> None:
    run = Live("live")
    view = view_of(clock, Course("over"), run)
    clock.now_s += 60
    messages.sent.clear()
    assert view.tick() == IDLE_S  # nothing new for long
    assert messages.sent == []
    run.train(4)
    assert view.tick() == PULL_S
    changed = [set(data["state"]) for kind, data in messages.sent if kind == "comm_msg" and data["method"] == "update"]
    assert changed == [{"runs"}, {"figure"}, {"differing", "equal", "equal_text"}]
    assert len(messages.sent) == 3
    assert view._control.runs[1]["state"] == "9 steps"
    assert ["steps", "5", "9"] in view._table.differing
    messages.sent.clear()
    clock.now_s += CALM_S / 2
    assert view.tick() == PULL_S
    assert messages.sent == []
    clock.now_s += CALM_S
    assert view.tick() == IDLE_S
    view.close()


def test_it_draws_no_more_often_than_it_may(clock: Clock) -> None:
    run = Live("live")
    view = view_of(clock, run)
    clock.now_s += 60
    run.train(1)
    view.tick()
    run.train(1)
    clock.now_s += PULL_S / 2
    view.tick()
    assert view._control.runs[0]["state"] == "6 steps"  # too early
    clock.now_s += PULL_S
    view.tick()
    assert view._control.runs[0]["state"] == "7 steps"  # also without a newer step
    assert view._table.equal[-1] != ["steps", "7"]
    assert ["steps", "6"] in view._table.equal
    clock.now_s += TABLE_S
    view.tick()
    assert ["steps", "7"] in view._table.equal
    view.close()


def test_drawing_takes_no_more_than_its_part_of_the_time(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Live("live")
    view = view_of(clock, run)
    clock.now_s += 60
    cost_s = 1.0
    show = view._figure.show

    def slow(*args: Any, **options: Any) -> None:
        clock.now_s += cost_s
        show(*args, **options)

    monkeypatch.setattr(view._figure, "show", slow)
    run.train(1)
    view.tick()
    run.train(1)
    clock.now_s += cost_s / MOST_OF_TIME - 1
    view.tick()
    assert view._control.runs[0]["state"] == "6 steps"
    clock.now_s += 1.5
    view.tick()
    assert view._control.runs[0]["state"] == "7 steps"
    view.close()


def test_nobody_looks_and_nothing_is_read(clock: Clock) -> None:
    run = Live("live")
    view = view_of(clock, run)
    say(view, view="one", open=True)
    say(view, view="two", open=True)
    say(view, view="one", open=False)
    clock.now_s += 60
    run.train(1)
    view.tick()
    assert view._control.runs[0]["state"] == "6 steps"
    say(view, view="two", open=False)
    clock.now_s += 60
    run.train(1)
    assert view.tick() == IDLE_S
    assert view._control.runs[0]["state"] == "6 steps"
    say(view, view="three", open=True)
    view.tick()
    assert view._control.runs[0]["state"] == "7 steps"
    view.close()


def test_the_last_step_is_shown_before_it_is_left_alone(clock: Clock) -> None:
    run = Live("live")
    view = view_of(clock, run)
    run.train(2)
    run.closed = True
    assert view.tick() is None  # and at once, however early
    assert view._control.runs[0]["state"] == "7 steps"
    assert ["steps", "7"] in view._table.equal
    view.close()
    assert view.tick() is None


def test_another_history_is_drawn_anew(clock: Clock) -> None:
    run = Live("live")
    view = view_of(clock, run)
    clock.now_s += 60
    run.history = History()
    run.train(3)
    run.history.record(Event(step=1, kind="applied", reason="", detail={"autocast": "bf16"}, time_s=0.1))
    view.tick()
    assert view._control.runs[0]["state"] == "3 steps"
    marks = [one for one in view._figure.figure["data"] if one["meta"]["series"] == "changes"]
    assert marks[0]["text"] == ["autocast bf16"]
    view.close()


def test_a_file_that_cannot_be_read_any_more_is_said_and_the_rest_goes_on(clock: Clock) -> None:
    class File(Course):
        fails = False

        def refresh(self) -> int:
            if self.fails:
                raise RecordingError(f"{EVIL} is gone")
            return 0

    file, run = File("file"), Live("live")
    view = view_of(clock, file, run)
    clock.now_s += 60
    file.fails = True
    run.train(1)
    assert view.tick() == PULL_S
    assert view._control.runs[0]["why_not"] == f"{EVIL} is gone"
    assert view._control.runs[1]["state"] == "6 steps"
    assert view._table.why_not == f"The table is as it was before: {EVIL} is gone"
    assert next(row for row in view._table.equal if row[0] == "steps")[1] == "5"
    assert (0, "loss") in lines(view)
    file.fails = False
    clock.now_s += 60
    view.tick()
    assert (view._control.runs[0]["why_not"], view._table.why_not) == ("", "")
    view.close()


def test_a_thread_runs_only_while_a_run_goes_on() -> None:
    view = RunsView([Course()])
    assert not view._refresher.alive
    view.close()
    view = RunsView([Live()])
    refresher = view._refresher
    assert refresher.alive
    view.close()
    refresher._thread.join(10)
    assert not refresher.alive


def test_closing_frees_everything(messages: Any) -> None:
    run = Live("live")
    keep = Course()
    view = RunsView([run, Course()], keep=keep)
    gone = [weakref.ref(one) for one in (view, run, run.history, keep, *view.widgets())]
    view.close()
    view.close()
    assert view.closed
    closed = [kind for kind, _ in messages.sent].count("comm_close")
    assert closed == 10  # the box, four parts, and the layout of each
    view._asked(align="time")  # of a page that has not heard
    del view, run, keep
    gc.collect()
    assert [one() for one in gone if one() is not None] == []


def test_runs_without_a_step(clock: Clock) -> None:
    view = view_of(clock, Course(steps=0), Course(steps=0))
    assert view._control.runs[0]["state"] == "0 steps"
    assert "no loss was recorded" in json.dumps(view._figure.figure)
    assert not any(isinstance(text, float) and math.isnan(text) for row in view._table.equal for text in row)
    view.close()
