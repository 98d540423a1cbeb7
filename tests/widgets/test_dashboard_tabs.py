"""The tabs below the charts: made when they are shown, left alone while they are hidden, and asking for nothing by themselves."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from ipywidgets.widgets.widget import _instances as REGISTRY

from amp_widgets.analysis.inspections import Inspection
from amp_widgets.analysis.parity import ParityReport
from amp_widgets.analysis.precision import LayerPrecision, PrecisionReport
from amp_widgets.analysis.preflight import Finding, Findings
from amp_widgets.core.gradient_counts import BUCKETS, CountedGradients, GradientCounts
from amp_widgets.core.history import Event
from amp_widgets.core.overflow_probe import SkipNote
from amp_widgets.core.settings import Settings
from amp_widgets.errors import SessionClosedError
from amp_widgets.widgets.checks_panel import ChecksPanel
from amp_widgets.widgets.checks_tab import ChecksTab
from amp_widgets.widgets.compare_panel import ComparePanel
from amp_widgets.widgets.dashboard import Dashboard
from amp_widgets.widgets.dtype_panel import DtypePanel
from amp_widgets.widgets.gradient_control import GradientControl
from amp_widgets.widgets.gradient_panel import GradientPanel
from amp_widgets.widgets.gradient_source import REST, GradientSource
from amp_widgets.widgets.gradient_table import GradientTable
from amp_widgets.widgets.memory_control import MemoryControl
from amp_widgets.widgets.memory_panel import MemoryPanel
from amp_widgets.widgets.panels import TABS
from amp_widgets.widgets.plan_panel import PlanPanel
from amp_widgets.widgets.precision_panel import PrecisionPanel
from amp_widgets.widgets.status_line import StatusLine
from amp_widgets.widgets.tab_bar import TabBar
from tests.charts.gpt_step import dead_step, gpt_step
from tests.charts.gradient_step import row
from tests.widgets.gpt_dtypes import gpt_map, layers_of

EVIL = "<img src=x onerror='window.harmed = 1'>"
MAP = gpt_map()
NO_BATCH = "there is no batch yet; start the run first"


def counts(step: int = 5, scale: float = 1.0) -> GradientCounts:
    rows = (row("head", -16.0), row("layers.0", -30.0))
    return GradientCounts(step=step, scale=scale, rows=rows)


def report(**changes: Any) -> ParityReport:
    given: dict[str, Any] = {
        "settings": Settings(), "reproducible": True, "differences": (), "noise": (), "blamed": (), "autocast": None, "loss": 1.0,
        "reference_loss": 1.0, "compared": {"gradient": 4},
    }  # fmt: skip
    return ParityReport(**(given | changes))


def precision(**changes: Any) -> PrecisionReport:
    given: dict[str, Any] = {
        "layers": (
            LayerPrecision(
                name="head", type="Linear", format="bf16", calls=1, output_error=1e-2, gradient_error=2e-2, parameter_error=3e-2,
                nonfinite=0,
            ),
        ),
        "reference": "fp32", "loss_errors": {"bf16": 1e-3}, "scales": {"bf16": 1.0}, "skipped": {},
    }  # fmt: skip
    return PrecisionReport(**(given | changes))


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


def parts(dashboard: Dashboard, kind: type) -> list[Any]:
    return [widget for widget in dashboard.widgets() if isinstance(widget, kind)]


def part(dashboard: Dashboard, kind: type) -> Any:
    [found] = parts(dashboard, kind)
    return found


def say(dashboard: Dashboard, kind: type, **message: Any) -> None:
    part(dashboard, kind)._handle_custom_msg({**message, "id": "1"}, [])


def tick(dashboard: Dashboard, now: list[float], duration_s: float = 1.0) -> None:
    now[0] += duration_s
    dashboard.tick()


# ---- tabs --------------------------------------------------------------------------------------------------------------


def test_memory_is_shown_first_and_the_others_are_not_there_until_they_are_chosen(make, session_of) -> None:
    session = session_of()
    dashboard = make(session)
    bar = part(dashboard, TabBar)
    assert [label for _, label in bar.tabs] == ["Memory", "Gradients", "Formats", "Checks", "Plan", "Compare"]
    assert bar.selected == "memory"
    kinds = {"gradients": GradientPanel, "formats": DtypePanel, "checks": ChecksTab, "plan": PlanPanel, "compare": ComparePanel}
    for name, kind in kinds.items():
        assert parts(dashboard, kind) == []
        say(dashboard, TabBar, tab=name)
        assert bar.selected == name
        assert {"ampw-tab", f"ampw-tab-{name}"} <= set(part(dashboard, kind)._dom_classes)
    panels = dashboard.children[-1].children
    say(dashboard, TabBar, tab="gradients")
    assert dashboard.children[-1].children == panels  # they stay, so that what was filtered and sorted stays
    assert session.asked == []


def test_a_tab_that_does_not_exist_is_not_chosen(make, session_of) -> None:
    dashboard = make(session_of())
    for wrong in ("status", "", 3, None):
        say(dashboard, TabBar, tab=wrong)
    assert part(dashboard, TabBar).selected == "memory"
    assert len(dashboard.children[-1].children) == 2


def test_hidden_tabs_are_neither_asked_for_nor_sent_anything(make, session_of, now, messages, monkeypatch) -> None:
    session = session_of(run="running")
    dashboard = make(session)
    for name in TABS:
        say(dashboard, TabBar, tab=name)
    looks = session.looks_at_numerics
    inspected: list[str] = []
    monkeypatch.setattr(session, "inspection", lambda kind: inspected.append(kind) or Inspection())
    say(dashboard, TabBar, tab="memory")
    messages.clear()
    session.probes.gradients.counts = (counts(),)
    session.put(settings=Settings(autocast="fp16"))
    tick(dashboard, now)
    session.put(step=1)
    tick(dashboard, now)
    assert (session.looks_at_numerics, inspected) == (looks, [])
    told = {name for update in messages.updates for name in update}
    assert "numbers" in told
    assert not told & {"usable", "sentences", "stale"}
    say(dashboard, TabBar, tab="gradients")  # then all of it
    control = part(dashboard, GradientControl)
    assert control.usable == "In force from the next step"
    assert control.measured.startswith("Step 5")


def test_hidden_memory_draws_nothing(make, session_of, now, monkeypatch) -> None:
    drawn: list[str] = []
    monkeypatch.setattr(MemoryPanel, "show", lambda self, state: drawn.append(state.chosen))
    session = session_of(run="running")
    dashboard = make(session)
    say(dashboard, TabBar, tab="checks")
    drawn.clear()
    session.profiles = (gpt_step(),)
    tick(dashboard, now)
    assert drawn == []
    say(dashboard, TabBar, tab="memory")
    assert drawn == [session.profiles]


def test_nothing_is_sent_while_nothing_changes(make, session_of, now, messages) -> None:
    session = session_of(run="running")
    session.probes.gradients.counts = (counts(),)
    session.history_so_far.append(step=0, loss=1.0, scale=1.0)
    dashboard = make(session)
    for name in TABS:
        say(dashboard, TabBar, tab=name)
        tick(dashboard, now)
        messages.clear()
        for _ in range(5):
            tick(dashboard, now)
        assert messages.sent == [], name


def test_a_step_that_runs_out_of_memory_brings_its_tab(make, session_of, now) -> None:
    session = session_of(run="running", step=12)
    dashboard = make(session)
    say(dashboard, TabBar, tab="gradients")
    session.out_of_memory = dead_step()
    session.put(run="failed")
    tick(dashboard, now)
    assert part(dashboard, TabBar).selected == "memory"
    assert part(dashboard, MemoryControl).report == list(session.out_of_memory.report)
    say(dashboard, TabBar, tab="gradients")
    tick(dashboard, now)
    assert part(dashboard, TabBar).selected == "gradients"  # once


def test_a_closed_session_locks_what_is_there_and_offers_no_more(make, session_of, now) -> None:
    session = session_of(run="running")
    dashboard = make(session)
    say(dashboard, TabBar, tab="gradients")
    say(dashboard, TabBar, tab="memory")
    session.probes.gradients.counts = (counts(),)
    session.closed = True
    tick(dashboard, now)
    bar, control = part(dashboard, TabBar), part(dashboard, GradientControl)
    assert (control.locked, part(dashboard, MemoryControl).locked, part(dashboard, GradientTable).locked) == (True, True, True)
    assert control.measured.startswith("Step 5")  # the last state, also of the tab that was hidden
    assert bar.closed == ["formats", "checks", "plan", "compare"]
    say(dashboard, TabBar, tab="formats")
    assert bar.selected == "memory"
    say(dashboard, TabBar, tab="gradients")
    assert bar.selected == "gradients"
    say(dashboard, GradientControl, sample=True)
    assert session.asked == []


def test_closing_frees_every_widget_the_session_and_what_was_shown(session_of, chart_of) -> None:
    gc.collect()
    before = set(REGISTRY)
    session = session_of()
    counted, taken = counts(), gpt_map()
    session.probes.gradients.counts = (counted,)
    session.inspections["dtype_map"] = Inspection(result=taken)
    session.inspections["check"] = Inspection(result=report())
    measured = precision()
    session.inspections["precision"] = Inspection(result=measured)
    dashboard = Dashboard(session, chart=chart_of(), live=False)
    for name in TABS:
        say(dashboard, TabBar, tab=name)
    kept = [
        weakref.ref(one)
        for one in (
            dashboard, session, counted.rows[0].counts, part(dashboard, DtypePanel), part(dashboard, PrecisionPanel),
            dashboard._panels,
        )
    ]  # fmt: skip
    assert len({id(widget) for widget in dashboard.widgets()}) == len(list(dashboard.widgets()))
    dashboard.close()
    assert {type(REGISTRY[one]).__name__ for one in set(REGISTRY) - before} <= {"PlotlyAsset", "Layout"}
    del dashboard, session, counted, measured
    gc.collect()
    assert [one() for one in kept] == [None] * 6


# ---- gradients ---------------------------------------------------------------------------------------------------------


def test_gradients_are_asked_for_shown_and_their_scale_used(make, session_of, now) -> None:
    session = session_of(run="running", autocast="fp16", init_scale=4.0)
    dashboard = make(session)
    say(dashboard, TabBar, tab="gradients")
    control = part(dashboard, GradientControl)
    say(dashboard, GradientControl, sample=True)
    assert (session.asked, control.pending, control.trains) == ([("count", {"every": None})], True, True)
    say(dashboard, GradientControl, every=10)
    assert (session.asked[-1], control.every) == (("count", {"every": 10}), 10)
    session.probes.gradients.pending = False
    session.probes.gradients.counts = (counts(step=7),)
    tick(dashboard, now)
    assert control.measured.startswith("Step 7, without loss scaling")
    assert not control.pending
    say(dashboard, GradientControl, exponent=12)
    say(dashboard, GradientControl, use=True)
    assert session.asked[-1] == ("widget", {"init_scale": 4096.0})


def test_what_the_session_refuses_is_in_the_status_line(make, session_of, monkeypatch) -> None:
    session = session_of()
    dashboard = make(session)
    say(dashboard, TabBar, tab="gradients")

    def refuse(every: int | None = None) -> None:
        raise SessionClosedError("count_gradients: this session was closed")

    monkeypatch.setattr(session, "count_gradients", refuse)
    say(dashboard, GradientControl, sample=True)
    assert part(dashboard, StatusLine).complaint == "Gradients not sampled: this session was closed"


def test_what_cannot_be_shown_is_said_and_the_rest_goes_on(make, session_of, now, monkeypatch) -> None:
    session = session_of(run="running")
    dashboard = make(session)
    say(dashboard, TabBar, tab="gradients")
    monkeypatch.setattr(GradientPanel, "show", lambda self, state: 1 / 0)
    session.put(step=9)
    tick(dashboard, now)
    status = part(dashboard, StatusLine)
    assert status.complaint == "What is in the tab cannot be shown: ZeroDivisionError: division by zero"
    assert status.rejection == ""
    assert status.numbers[0][1] == "9"


def skip(session: Any, step: int, scale: float = 8.0) -> None:
    session.history_so_far.append(step=step, loss=1.0, scale=scale, skipped=1.0)
    session.history_so_far.record(Event(step=step, kind="skipped", reason="inf", detail={"scale": scale}, time_s=float(step)))
    note = SkipNote(
        step=step, scale=scale, loss_finite=True, parameters=(f"{EVIL}.weight",), nonfinite=1, of=4, with_nan=0, seen="arriving",
        order_of=0,
    )  # fmt: skip
    session.probes.overflow.notes = (*session.probes.overflow.notes, note)


def test_skips_are_told_in_the_gradients_tab(make, session_of, now) -> None:
    session = session_of(run="running")
    dashboard = make(session)
    say(dashboard, TabBar, tab="gradients")
    control = part(dashboard, GradientControl)
    assert control.skips == []
    skip(session, 3)
    tick(dashboard, now)
    [told] = control.skips
    assert told.startswith("Step 3 was skipped at scale 2^3: first overflow in <img")


def test_skips_are_looked_into_only_when_there_is_news_and_not_all_the_time(session_of, monkeypatch) -> None:
    now = [0.0]
    looks: list[float] = []

    def slow(*args: Any) -> tuple[()]:
        looks.append(now[0])
        now[0] += 0.5
        return ()

    monkeypatch.setattr("amp_widgets.widgets.gradient_source.skip_runs", slow)
    session = session_of()
    source = GradientSource(lambda: now[0])

    def look(at_once: bool = False) -> None:
        source.state(session.probes, session.history_so_far, trains=True, at_once=at_once)

    look()
    assert len(looks) == 1
    now[0] += 100.0
    for step in range(50):
        session.history_so_far.append(step=step, loss=1.0, scale=1.0)
        look()
    assert len(looks) == 1  # steps alone are no news
    for step in range(50, 150):
        skip(session, step)
        now[0] += 0.1
        look()
    assert len(looks) == 2  # it has taken 0.5 s, and rests for 30 times that
    look(at_once=True)
    assert len(looks) == 3
    now[0] += 0.5 * REST
    look()
    assert len(looks) == 3


def test_the_range_of_a_step_is_made_once(session_of) -> None:
    session = session_of()
    source = GradientSource(lambda: 0.0)
    first, second = counts(1), counts(2)
    session.probes.gradients.counts = (first,)
    one = source.state(session.probes, session.history_so_far, trains=False)
    session.probes.gradients.counts = (first, second)
    source.state(session.probes, session.history_so_far, trains=False)
    session.probes.gradients.counts = (first,)
    assert source.state(session.probes, session.history_so_far, trains=False).range is one.range


def test_a_step_without_gradients_can_be_shown(make, session_of) -> None:
    session = session_of()
    nothing = CountedGradients(
        layer="head", family="output", dtype="fp16", arrivals=0, elements=0, looked_at=0, counts=np.zeros(BUCKETS), peaks={}
    )
    session.probes.gradients.counts = (
        GradientCounts(step=1, scale=1.0, rows=()), GradientCounts(step=2, scale=1.0, rows=(nothing,)),
    )  # fmt: skip
    dashboard = make(session)
    say(dashboard, TabBar, tab="gradients")
    assert part(dashboard, StatusLine).rejection == ""
    assert part(dashboard, GradientControl).measured.startswith("Step 2")


# ---- formats -----------------------------------------------------------------------------------------------------------


def test_a_map_is_asked_for_waited_for_and_shown(make, session_of, now) -> None:
    session = session_of(run="running", layers=layers_of(MAP))
    dashboard = make(session)
    say(dashboard, TabBar, tab="formats")
    panel = part(dashboard, DtypePanel)
    assert panel.available
    say(dashboard, DtypePanel, map=True)
    assert (session.asked, panel.pending, panel.rows) == ([("inspect", {"kind": "dtype_map"})], True, [])
    session.inspections["dtype_map"] = Inspection(result=MAP, step=4)
    tick(dashboard, now)
    assert (panel.pending, len(panel.rows)) == (False, len(MAP.rows))
    say(dashboard, DtypePanel, layer="head", on=True)
    assert session.asked[-1] == ("widget", {"fp32_layers": ("head",)})


def test_without_a_batch_it_says_why_and_asks_for_nothing(make, session_of, now) -> None:
    session = session_of()
    session.why_no_batch = NO_BATCH
    dashboard = make(session)
    say(dashboard, TabBar, tab="formats")
    say(dashboard, TabBar, tab="checks")
    say(dashboard, TabBar, tab="formats")
    panel, checks = part(dashboard, DtypePanel), part(dashboard, ChecksPanel)
    assert (panel.available, panel.why_not) == (False, f"No map can be taken here: {NO_BATCH}")
    assert NO_BATCH in checks.why_no_batch
    say(dashboard, DtypePanel, map=True)
    assert session.asked == []
    session.why_no_batch = None
    tick(dashboard, now)
    assert (panel.available, panel.why_not) == (True, "")


def test_what_could_not_be_taken_is_in_the_panel_and_once_in_the_status_line(make, session_of, now) -> None:
    session = session_of(run="running", last_rejection=None)
    dashboard = make(session)
    say(dashboard, TabBar, tab="formats")
    status = part(dashboard, StatusLine)
    session.inspections["dtype_map"] = Inspection(why_not="dtype_map: the model is compiled")
    tick(dashboard, now)
    assert (status.complaint, status.rejection) == ("Map not taken: the model is compiled", "")
    assert part(dashboard, DtypePanel).why_not == "Map not taken: the model is compiled"
    session.put(run="paused")
    tick(dashboard, now, 10.0)
    tick(dashboard, now, 10.0)
    assert status.complaint == ""


# ---- checks ------------------------------------------------------------------------------------------------------------


def test_checks_are_asked_for_and_their_reports_shown_escaped(make, session_of, now) -> None:
    session = session_of(run="running")
    dashboard = make(session)
    say(dashboard, TabBar, tab="checks")
    panel = part(dashboard, ChecksPanel)
    for kind in ("check", "preflight"):
        say(dashboard, ChecksPanel, inspect=kind)
        assert session.asked[-1] == ("inspect", {"kind": kind})
        assert getattr(panel, kind)["pending"]
        say(dashboard, ChecksPanel, inspect=kind)  # it waits already
    assert len(session.asked) == 2
    session.inspections["check"] = Inspection(result=report(differences=(), blamed=()), step=1234)
    session.inspections["preflight"] = Inspection(
        result=Findings([Finding(severity="error", title="A loss", text=EVIL, cure="&", where=(EVIL,))])
    )
    tick(dashboard, now)
    assert "No layer is checkpointed" in panel.check["html"]
    assert panel.check["caption"] == "Before step 1,234"
    assert "<img" not in panel.preflight["html"]
    assert "&lt;img" in panel.preflight["html"]


def test_the_tick_is_the_sessions_and_all_dashboards_show_it(make, session_of, now) -> None:
    session = session_of(run="running")
    one, other = make(session), make(session)
    for dashboard in (one, other):
        say(dashboard, TabBar, tab="checks")
    say(one, ChecksPanel, automatic=True)
    assert session.check_changes is True
    tick(other, now)
    assert (part(one, ChecksPanel).automatic, part(other, ChecksPanel).automatic) == (True, True)
    say(other, ChecksPanel, automatic=False)
    assert session.check_changes is False


def test_other_messages_ask_for_nothing(make, session_of) -> None:
    session = session_of(run="running")
    dashboard = make(session)
    say(dashboard, TabBar, tab="checks")
    for message in ({"inspect": "close"}, {"inspect": None}, {"automatic": 1}, {"automatic": False}, {}):
        say(dashboard, ChecksPanel, **message)
    assert session.asked == []
    assert not math.isnan(session.looks)


# ---- precision ---------------------------------------------------------------------------------------------------------


def test_precision_is_measured_shown_and_a_layer_kept_in_fp32(make, session_of, now) -> None:
    session = session_of(run="running", layers=layers_of(MAP))
    dashboard = make(session)
    say(dashboard, TabBar, tab="checks")
    panel = part(dashboard, PrecisionPanel)
    say(dashboard, PrecisionPanel, measure=True)
    assert (session.asked, panel.pending) == ([("inspect", {"kind": "precision"})], True)
    say(dashboard, PrecisionPanel, measure=True)
    assert len(session.asked) == 1  # it waits already
    session.inspections["precision"] = Inspection(result=precision(), step=7)
    tick(dashboard, now)
    assert (panel.pending, panel.caption) == (False, "Relative errors against fp32, before step 7")
    say(dashboard, PrecisionPanel, layer="head", on=True)
    assert session.asked[-1] == ("widget", {"fp32_layers": ("head",)})
    assert panel.requested == [0]  # it waits, and is shown at once
    say(dashboard, PrecisionPanel, reference="fp64")
    say(dashboard, PrecisionPanel, measure=True)
    assert session.asked[-1] == ("inspect", {"kind": "precision_fp64"})


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("check", "check", "Check not run"), ("preflight", "preflight", "Preflight not run"),
        ("precision", "precision_cost", "Precision not measured"), ("precision_fp64", "precision_fp64", "Precision not measured"),
    ],
)  # fmt: skip
def test_what_was_not_made_is_no_rejection_and_is_told_once_and_beside_the_button(
    make, session_of, now, kind: str, name: str, said: str
) -> None:
    session = session_of(run="running")
    dashboard = make(session)
    say(dashboard, TabBar, tab="checks")
    status, checks, panel = (part(dashboard, one) for one in (StatusLine, ChecksPanel, PrecisionPanel))
    if kind == "precision_fp64":
        say(dashboard, PrecisionPanel, reference="fp64")
    sentence = f"{said}: ValueError: {EVIL}"
    session.inspections[kind] = Inspection(why_not=f"{name}: ValueError: {EVIL}")
    tick(dashboard, now)
    assert (status.complaint, status.rejection) == (sentence, "")
    assert (panel.why_not if "precision" in kind else getattr(checks, kind)["why_not"]) == sentence
    session.reject("init_scale: no")
    tick(dashboard, now)
    assert (status.complaint, status.rejection) == (sentence, "init_scale: no")  # one does not hide the other
    session.put(run="paused")
    tick(dashboard, now, 10.0)
    assert status.complaint == ""


def test_without_a_batch_precision_is_not_asked_for(make, session_of, now) -> None:
    session = session_of()
    session.why_no_batch = NO_BATCH
    dashboard = make(session)
    say(dashboard, TabBar, tab="checks")
    say(dashboard, PrecisionPanel, measure=True)
    assert session.asked == []
    assert part(dashboard, PrecisionPanel).why_no_batch == f"To measure precision {NO_BATCH}."
