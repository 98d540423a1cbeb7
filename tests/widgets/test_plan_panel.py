"""The Plan tab: a budget, the plan for it and what came true of it, the largest batch, and what a GPU would need."""

from __future__ import annotations

import dataclasses
import gc
import math
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from amp_widgets.analysis.batch_size import BatchSize
from amp_widgets.analysis.batch_sizes import BatchSizeRow, BatchSizes
from amp_widgets.analysis.comparison import Progress
from amp_widgets.analysis.inspections import Inspection
from amp_widgets.analysis.on_cuda import CudaPrediction, CudaPredictions
from amp_widgets.analysis.plan import Alternative, Plan, PlanPoint
from amp_widgets.core.history import Event, History
from amp_widgets.core.settings import Settings
from amp_widgets.errors import RunError
from amp_widgets.widgets.dashboard import Dashboard
from amp_widgets.widgets.measured_settings import Measured, MeasuredSettings
from amp_widgets.widgets.plan_control import PlanControl
from amp_widgets.widgets.plan_panel import NOTHING_YET, PlanPanel
from amp_widgets.widgets.plan_state import PlanState, came_true_text, measured_points
from amp_widgets.widgets.plan_tables import BatchSizesControl, CudaControl
from amp_widgets.widgets.status_line import StatusLine
from amp_widgets.widgets.tab_bar import TabBar
from tests.widgets.conftest import state_of
from tests.widgets.test_page import View, one_page, page  # noqa: F401  # fixtures

EVIL = "<img src=x onerror='window.harmed = 1'>"
LAYERS = ("blocks.0", "blocks.1.mlp")


def point(label: str, layers: tuple[str, ...], peak_bytes: float, extra_s: float) -> PlanPoint:
    return PlanPoint(label=label, layers=layers, peak_bytes=peak_bytes, extra_s=extra_s, predicted=True, fits=peak_bytes <= 60e6)


def plan_of(**changes: Any) -> Plan:
    given: dict[str, Any] = {
        "layers": LAYERS, "budget_bytes": 60e6, "predicted_peak_bytes": 57.8e6, "predicted_extra_seconds": 0.02,
        "autocast": "fp32", "fits": True, "least_peak_bytes": 43e6, "obtained": "Peaks: predicted on fake tensors.",
        "chosen_by": "scipy milp", "candidates": 58,
        "points": (
            point("none", (), 124.8e6, 0.0), point("all", ("blocks.0", "blocks.1", "norm"), 43e6, 0.05),
            point("plan", LAYERS, 57.8e6, 0.02), point("curve", ("norm",), 110e6, 0.001),
        ),
    }  # fmt: skip
    return Plan(**(given | changes))


def infeasible() -> Plan:
    return plan_of(
        fits=False,
        budget_bytes=40e6,
        alternatives=(
            Alternative(
                label="bf16", changes={"autocast": "bf16", "checkpointed": LAYERS}, batch_size=None, peak_bytes=35e6, fits=True
            ),
            Alternative(label="batch 8", changes={"checkpointed": LAYERS}, batch_size=8, peak_bytes=39e6, fits=True),
        ),
    )


def planned(plan: Plan | None = None, **changes: Any) -> PlanState:
    return PlanState(plan=Inspection(result=plan or plan_of(), step=12), **changes)


def steps_with(layers: tuple[str, ...], peak_bytes: float, step_s: float, steps: int = 6, autocast: str = "fp32") -> Measured:
    return Measured(autocast=autocast, layers=layers, fp32_layers=(), peak_bytes=peak_bytes, step_s=step_s, steps=steps)


MEASURED = (steps_with((), 124.9e6, 0.4, 9), steps_with(LAYERS, 57.6e6, 0.43))


def sizes() -> BatchSizes:
    found = BatchSize(
        size=6,
        predicted_peak_bytes=56.3e6,
        budget_bytes=60e6,
        settings=Settings(),
        obtained="predicted",
        capped=False,
        tried={6: 56.3e6},
    )
    one = BatchSizeRow(label="fp32/none", layers_name="none", autocast="fp32", checkpointed=(), found=found)
    two = BatchSizeRow(
        label="fp32/all", layers_name="all", autocast="fp32", checkpointed=("norm",), found=dataclasses.replace(found, size=24)
    )
    three = BatchSizeRow(label="bf16/none", layers_name="none", autocast="bf16", checkpointed=(), why_not=f"ValueError: {EVIL}")
    return BatchSizes(rows=(one, two, three), budget_bytes=60e6, notes=("fp16 is left out.",))


def on_cuda() -> CudaPredictions:
    one = CudaPrediction(
        tensor_peak_bytes=124_800_000, allocated_peak_bytes=125_800_000, reserved_peak_bytes=138_400_000, autocast="fp32",
        checkpointed=(), batch_size=16, settings="fp32", left_out=("cuBLAS", EVIL),
    )  # fmt: skip
    return CudaPredictions([one])


@pytest.fixture
def asked() -> list[Any]:
    return []


@pytest.fixture
def ask(asked: list[Any]) -> Any:
    return lambda *name, **values: asked.append((*name, values) if name else values)


@pytest.fixture
def control(ask: Any, messages: Any) -> PlanControl:
    return PlanControl(ask, ask, state=planned(), dashboard=state_of(step=12))


def say(control: Any, **message: Any) -> None:
    control._handle_custom_msg({**message, "id": "1"}, [])


# ---- what the steps of a run came to ------------------------------------------------------------------------------------


def run_of(history: History, steps: range, peak_bytes: float, step_s: float = 0.1) -> None:
    for step in steps:
        history.append(step=step, peak_bytes=peak_bytes, step_s=step_s)


def applied(step: int, **detail: Any) -> Event:
    return Event(step=step, kind="applied", reason="", detail={**detail, "source": "widget"}, time_s=0.0)


def test_steps_are_grouped_by_what_was_in_force() -> None:
    history, measured = History(), MeasuredSettings()
    assert measured.pull(history) == ()
    run_of(history, range(3), 125e6)
    history.record(applied(3, checkpointed=["a"]))
    run_of(history, range(3, 5), 60e6, 0.3)
    history.record(applied(5, autocast="bf16", init_scale=8.0))
    run_of(history, range(5, 6), 40e6)
    history.append(step=6, peak_bytes=math.nan, step_s=0.2)
    history.record(applied(7, checkpointed=[], autocast="fp32"))
    run_of(history, range(7, 9), 126e6)
    none, some, half = measured.pull(history)
    assert (none.autocast, none.layers, none.steps, none.peak_bytes, none.step_s) == ("fp32", (), 5, 126e6, 0.1)
    assert (some.layers, some.steps, some.peak_bytes, some.step_s) == (("a",), 2, 60e6, 0.3)
    assert (half.autocast, half.layers, half.steps, half.peak_bytes) == ("bf16", ("a",), 2, 40e6)
    assert half.step_s == pytest.approx(0.15)


def test_only_what_is_worth_showing_makes_another_object() -> None:
    history, measured = History(), MeasuredSettings()
    run_of(history, range(12), 1e6)
    shown = measured.pull(history)
    run_of(history, range(12, 15), 1e6, 0.5)
    assert measured.pull(history) is shown
    run_of(history, range(15, 16), 2e6)  # a higher peak is
    assert measured.pull(history)[0].peak_bytes == 2e6


def test_a_history_that_was_thinned_is_counted_anew() -> None:
    history, measured = History(capacity=64), MeasuredSettings()
    for start in range(0, 320, 20):
        run_of(history, range(start, start + 20), 1e6 + start)
        measured.pull(history)
    (one,) = measured.pull(history)
    assert one.peak_bytes == 1e6 + 300
    assert one.steps <= 101


def test_measured_points_are_those_of_the_plan_with_the_time_against_none() -> None:
    others = (
        steps_with(("x",), 1.0, 1.0),
        steps_with(LAYERS, 1.0, 1.0, autocast="bf16"),
        steps_with(("norm",), math.nan, math.nan),
    )
    none, some, curve = measured_points(plan_of(), (*MEASURED, *others))
    assert (none.layers, none.extra_s, none.reference) == ((), 0.0, "none")
    assert (some.layers, some.peak_bytes, some.steps) == (LAYERS, 57.6e6, 6)
    assert some.extra_s == pytest.approx(0.03)
    assert math.isnan(curve.extra_s)
    assert measured_points(plan_of(), MEASURED, ("norm",)) == ()  # other layers are kept in FP32 now


def test_without_steps_of_none_the_time_is_against_another_set() -> None:
    one, two = measured_points(plan_of(), (MEASURED[1], steps_with(("norm",), 110e6, 0.405, 20)))
    assert math.isnan(two.extra_s)  # it is the one that the other is compared with
    assert one.extra_s == pytest.approx(0.001 + 0.43 - 0.405)
    (few,) = measured_points(plan_of(), (steps_with(LAYERS, 57e6, 0.4, 2),))
    assert math.isnan(few.extra_s)


@pytest.mark.parametrize(
    ("measured", "text"),
    [
        ((), ""),
        ((steps_with(LAYERS, math.nan, 0.1),), "The memory of the steps with these layers was not measured"),
        ((steps_with(LAYERS, 61e6, 0.4, 1),), "Predicted 57.8 MB, measured 61.0 MB: above the budget, in 1 step of the run"),
        (
            MEASURED,
            "Predicted 57.8 MB, measured 57.6 MB: within the budget, in 6 steps of the run. A step took 430 ms, 400 ms without "
            "checkpointing: 30.0 ms more, predicted 20.0 ms more",
        ),
        (
            (MEASURED[0], steps_with(LAYERS, 57.6e6, 0.39, 11)),
            "Predicted 57.8 MB, measured 57.6 MB: within the budget, in over 10 steps of the run. A step took 390 ms, 400 ms "
            "without checkpointing: 10.0 ms less, predicted 20.0 ms more",
        ),
    ],
)
def test_predicted_against_measured(measured: tuple[Measured, ...], text: str) -> None:
    points = measured_points(plan_of(), measured)
    assert came_true_text(points, LAYERS[::-1], predicted_bytes=57.8e6, extra_s=0.02, budget_bytes=60e6) == text


# ---- Python's side --------------------------------------------------------------------------------------------------------


def test_a_plan_is_shown_with_its_layers_and_its_budget(control: PlanControl) -> None:
    assert control.sentence.startswith("Plan for 60.0 MB in fp32: checkpoint 2 of 58 layers (blocks.0, blocks.1.mlp); predicted")
    assert control.layers == list(LAYERS)
    assert control.range == [43e6, 124.8e6, "43.0 MB", "124.8 MB"]
    assert (control.budget_bytes, control.budget_text, control.caption) == (60e6, "60.0 MB", "Planned before step 12")
    assert control.obtained == "Chosen by: scipy milp. Peaks: predicted on fake tensors."
    assert [row[0] for row in control.rows] == ["set", "none", "all", "plan", "curve"]
    assert (control.use, control.measured, control.alternatives) == ("", "", [])


def test_a_budget_is_typed_dragged_and_asked_for(control: PlanControl, asked: list[Any]) -> None:
    say(control, propose=True, text="8 GB")
    assert (control.budget_bytes, control.budget_text) == (8e9, "8.0 GB")
    say(control, text="55 MB")  # there is a plan already: another one
    say(control, budget=61_449_999.0)
    assert (control.budget_bytes, control.budget_text) == (61.4e6, "61.4 MB")  # what is asked for is what is read
    say(control, propose=True, text="61.4 MB")
    assert asked == [("plan", {"budget_bytes": one}) for one in (8e9, 55e6, 61.4e6, 61.4e6)]
    for wrong in ("8 apples", "", "off", "0 MB", "-5 MB", "1e999 GB"):
        say(control, propose=True, text=wrong)
        assert control.budget_error == f"Budget: got {wrong!r}, expected a size above 0, such as 8 GB or 60 MB"
        assert control.budget_text == wrong
        say(control, propose=True, text=wrong)
    for bare in ("8", " 60 ", "999", "1e2", "8000"):
        say(control, propose=True, text=bare)
        wanted = f"Budget: got {bare!r} without a unit, expected one with so small a number, such as {bare.strip()} MB"
        assert control.budget_error == wanted
    assert len(asked) == 4
    for given in ("8 B", "200e6"):
        say(control, text=given)
        assert control.budget_error == ""
    say(control, text="8 GB")
    asked[4:] = []
    say(control, propose=True, text="1 GB")
    assert control.budget_error == ""
    for message in (
        {"budget": math.nan},
        {"budget": -1.0},
        {"budget": "9"},
        {"use": 1},
        {"alternative": 5},
        {"propose": True},
        {},
    ):
        say(control, **message)
    assert len(asked) == 5


def test_a_budget_can_be_dragged_before_there_is_a_plan(ask: Any, asked: list[Any]) -> None:
    control = PlanControl(ask, ask, dashboard=state_of(overall_peak_bytes=124.8e6))
    assert control.range == [12e6, 124.8e6, "12.0 MB", "124.8 MB"]
    control.show(PlanState(why_no_batch="there is no batch to work on yet"))
    assert control.range == []
    control.show(PlanState())
    say(control, budget=60e6)
    assert asked == [("plan", {"budget_bytes": 60e6})]
    control.show(planned())
    assert control.range == [43e6, 124.8e6, "43.0 MB", "124.8 MB"]
    control.render(state_of(overall_peak_bytes=300e6))
    assert control.range == [43e6, 124.8e6, "43.0 MB", "124.8 MB"]


def test_a_budget_is_suggested_until_somebody_says_one(ask: Any, asked: list[Any], messages: Any) -> None:
    control = PlanControl(ask, ask, dashboard=state_of())
    assert (control.budget_bytes, control.budget_text, control.range) == (0.0, "", [])
    control.render(state_of(overall_peak_bytes=115e6))
    assert control.budget_text == "69.0 MB"
    control.render(state_of(overall_peak_bytes=124.8e6))
    assert control.budget_text == "75.0 MB"
    control.show(PlanState(budget_bytes=50e6))
    assert control.budget_text == "50.0 MB"
    say(control, text="99 MB")
    assert asked == []  # nothing was planned yet
    control.render(state_of(overall_peak_bytes=300e6))
    assert control.budget_text == "99.0 MB"
    say(control, propose=True, text="bad")
    control.render(state_of(overall_peak_bytes=400e6))
    assert control.budget_error != ""
    control.show(planned())  # such as one that was made in a cell
    assert (control.budget_text, control.budget_error) == ("60.0 MB", "")
    control.show(PlanState(plan=Inspection(result=infeasible(), pending=True)))  # another one is under way
    assert control.budget_text == "60.0 MB"


def test_its_layers_are_used_once(control: PlanControl, asked: list[Any]) -> None:
    say(control, use=True)
    assert asked == [{"checkpointed": LAYERS}]
    control.render(state_of(pending={"checkpointed": list(LAYERS)}))
    assert control.use == "requested"
    say(control, use=True)
    control.render(state_of(checkpointed=LAYERS))
    assert (control.use, control.measured) == ("in force", "What is measured stands here after the next step")
    control.show(planned(measured=MEASURED))
    assert control.measured.startswith("Predicted 57.8 MB, measured 57.6 MB: within the budget")
    control.render(state_of(autocast="bf16", checkpointed=LAYERS))
    assert control.stale == "This was planned for fp32, and bf16 is in force now: propose a plan again"
    assert control.use == ""
    assert len(asked) == 1


def test_a_plan_for_another_format_is_not_used(control: PlanControl, asked: list[Any]) -> None:
    control.render(state_of(autocast="bf16"))
    say(control, use=True)
    assert asked == []
    control.render(state_of(pending={"autocast": "fp16"}))
    assert control.stale == "This was planned for fp32, and fp16 was asked for: propose a plan again then"
    say(control, use=True)
    assert asked == []
    control.render(state_of(autocast="bf16", pending={"autocast": "fp32"}))
    assert control.stale == ""
    say(control, use=True)
    assert asked == [{"checkpointed": LAYERS}]


def test_a_plan_is_for_the_layers_that_are_kept_in_fp32(ask: Any, asked: list[Any], messages: Any) -> None:
    half = steps_with(LAYERS, 57.6e6, 0.43, autocast="bf16")
    plan = plan_of(autocast="bf16", fp32_layers=("norm",))
    kept = dataclasses.replace(half, fp32_layers=("norm",))
    control = PlanControl(ask, ask, state=planned(plan, measured=(half, kept)), dashboard=state_of(autocast="bf16"))
    assert control.stale == "This was planned with other layers kept in FP32: propose a plan again"
    say(control, use=True)
    assert asked == []
    assert [one.peak_bytes for one in control.points] == [57.6e6]
    control.render(state_of(autocast="bf16", fp32_layers=("norm",), checkpointed=LAYERS))
    assert (control.stale, control.use) == ("", "in force")
    control.show(planned(plan_of(), measured=MEASURED))  # in fp32 they make no difference
    control.render(state_of(fp32_layers=("norm",), checkpointed=LAYERS))
    assert (control.stale, control.use) == ("", "in force")


def test_where_nothing_fits_alternatives_are_offered(ask: Any, asked: list[Any], messages: Any) -> None:
    control = PlanControl(ask, ask, state=planned(infeasible()), dashboard=state_of())
    assert not control.fits
    assert "no set of layers fits; the least is 43.0 MB" in control.sentence
    half, smaller = control.alternatives
    assert half == {"text": "bf16 with 2 layers checkpointed: predicted 35.0 MB, which fits", "label": "bf16", "use": ""}
    assert smaller["text"] == "batch 8 with 2 layers checkpointed: predicted 39.0 MB, which fits. Change it in your data loader"
    assert smaller["use"] is None
    say(control, alternative=1)  # no setting
    say(control, alternative=0)
    assert asked == [{"autocast": "bf16", "checkpointed": LAYERS}]
    control.render(state_of(autocast="bf16", checkpointed=LAYERS))
    assert control.alternatives[0]["use"] == "in force"
    control.show(planned(infeasible(), measured=(steps_with(LAYERS, 34.9e6, 0.3, autocast="bf16"),)))
    assert control.alternatives[0]["text"].endswith("predicted 35.0 MB, measured 34.9 MB, which fits")


def test_without_a_batch_nothing_is_asked_for(control: PlanControl, asked: list[Any]) -> None:
    control.show(planned(why_no_batch="there is no batch to work on yet; start the run first"))
    assert control.why_no_batch == "To plan, there is no batch to work on yet; start the run first."
    say(control, propose=True, text="8 GB")
    say(control, budget=50e6)
    assert asked == []
    control.show(PlanState(plan=Inspection(why_not="plan: the model is compiled")))
    assert control.why_not == "No plan made: the model is compiled"
    assert (control.sentence, control.layers, control.rows) == ("", [], [])


def test_what_is_shown_already_is_not_sent_again(ask: Any, messages: Any) -> None:
    state = PlanState(
        plan=Inspection(result=plan_of()), largest_batch=Inspection(result=sizes()), on_cuda=Inspection(result=on_cuda()),
        measured=MEASURED,
    )  # fmt: skip
    panel = PlanPanel(ask, ask, state, state_of(checkpointed=LAYERS))
    messages.clear()
    panel.show(state)
    panel.show(dataclasses.replace(state, measured=(*MEASURED,)))
    panel.render(state_of(checkpointed=LAYERS))
    panel.render(state_of(checkpointed=LAYERS, step=99, loss=3.0))
    assert messages.sent == []
    panel.show(dataclasses.replace(state, plan=Inspection(result=state.newest, pending=True)))
    assert messages.updates == [{"pending": True}]


def test_the_figure_is_drawn_for_another_plan_and_when_something_was_measured(ask: Any, messages: Any) -> None:
    panel = PlanPanel(ask, ask, dashboard=state_of())
    figure = panel.children[1]
    assert figure.note == NOTHING_YET
    state = planned()
    panel.show(state)
    first = figure.figure
    assert [trace["meta"]["part"] for trace in first["data"]] == ["curve", "point", "point", "point"]
    panel.show(dataclasses.replace(state))
    assert figure.figure is first
    panel.show(dataclasses.replace(state, measured=MEASURED))
    assert [trace["meta"]["part"] for trace in figure.figure["data"]][-2:] == ["measured", "measured"]
    assert figure.label.startswith("Peak memory and extra time of sets of layers. The plan: 57.8 MB")
    panel.show(PlanState())
    assert figure.figure == {}
    panel.close()


def test_the_largest_batch_is_asked_for_with_the_budget_and_confirmed(ask: Any, asked: list[Any], messages: Any) -> None:
    panel = PlanPanel(ask, ask, planned(), state_of())
    batches = panel.children[2]
    assert isinstance(batches, BatchSizesControl)
    assert batches.button == "Find the largest batch for 60.0 MB"
    say(panel.children[0], text="50 MB")
    assert batches.button == "Find the largest batch for 50.0 MB"
    asked.clear()
    say(batches, ask=True)
    assert asked == [("largest_batch", {"budget_bytes": 50e6})]
    say(batches, confirm=True)  # there is nothing yet
    found = sizes()
    panel.show(planned(largest_batch=Inspection(result=found, step=7)))
    assert batches.caption == "Predicted for 60.0 MB before step 7"
    assert [row[:4] for row in batches.rows[1:]] == [
        ["fp32/none", "0", "6", "×1.00"], ["fp32/all", "1", "24", "×4.00"], ["bf16/none", "0", "not known", ""],
    ]  # fmt: skip
    assert batches.rows[3][5] == f"ValueError: {EVIL}"
    assert (batches.notes, batches.confirm) == (["fp16 is left out."], "Confirm by running")
    say(batches, confirm=True)
    assert asked[1:] == [("largest_batch", {"confirm": True, "known": found})]
    progress = Progress(done=2, total=9, seconds_left=31.0, doing="predicting fp32/all")
    panel.show(planned(largest_batch=Inspection(result=found, pending=True, progress=progress)))
    assert (batches.progress, batches.fraction) == ("predicting fp32/all · 3 of 9 · about 31 s left", 0.222)
    say(batches, ask=True)
    say(batches, cancel=True)
    assert asked[2:] == [("cancel_inspection", {"kind": "largest_batch"})]
    panel.show(planned(largest_batch=Inspection(result=found, pending=True, progress=progress, cancelling=True)))
    assert batches.progress == "Ends after the step in progress …"
    panel.show(planned(largest_batch=Inspection(why_not="largest_batch: it fails")))
    assert (batches.why_not, batches.rows, batches.confirm) == ("Largest batch not found: it fails", [], "")


def test_a_gpu_is_predicted_where_there_is_none(ask: Any, asked: list[Any], messages: Any) -> None:
    control = CudaControl(ask)
    assert "predicted for CUDA, not measured" in control.title
    say(control, ask=True)
    assert asked == [("predict_on_cuda", {})]
    control.show(PlanState(on_cuda=Inspection(result=on_cuda(), step=3)))
    assert control.rows[1] == ["fp32", "0", "16", "124.8 MB", "125.8 MB", "138.4 MB"]
    assert (control.notes, control.caption) == (["cuBLAS", EVIL], "Predicted before step 3")
    control.render(state_of(device="cuda:0 (NVIDIA H200)"))
    assert control.gone
    say(control, ask=True)
    assert len(asked) == 1


def test_closed_it_asks_nobody_and_is_freed(ask: Any, asked: list[Any]) -> None:
    panel = PlanPanel(ask, ask, planned(largest_batch=Inspection(result=sizes())), state_of())
    parts = panel.children
    kept = [weakref.ref(one) for one in (panel, *parts, panel.layout)]
    assert repr(panel).startswith("<amp_widgets plan panel: <amp_widgets plan control: Plan for 60.0 MB")
    panel.close()
    for message in ({"propose": True, "text": "1 GB"}, {"use": True}, {"ask": True}, {"confirm": True}):
        for part in (parts[0], parts[2], parts[3]):
            part._received(part, message, [])
    assert asked == []
    assert (parts[0]._plan, parts[0]._dashboard, panel._drawn, parts[2]._result) == (None, None, None, None)
    del panel, parts, part
    gc.collect()
    assert [one() for one in kept] == [None] * len(kept)


# ---- in the dashboard -----------------------------------------------------------------------------------------------------


@pytest.fixture
def dashboard(session_of: Any, chart_of: Any) -> Iterator[Dashboard]:
    session = session_of(run="running", overall_peak_bytes=124.8e6)
    made = Dashboard(session, chart=chart_of(), clock=lambda: 100.0, live=False)
    part(made, TabBar)._handle_custom_msg({"tab": "plan", "id": "1"}, [])
    session.asked.clear()
    yield made
    made.close()


def part(dashboard: Dashboard, kind: type) -> Any:
    [found] = [widget for widget in dashboard.widgets() if isinstance(widget, kind)]
    return found


def test_the_tab_asks_the_session_and_shows_what_came_true(dashboard: Dashboard) -> None:
    session: Any = dashboard._source
    control = part(dashboard, PlanControl)
    assert control.budget_text == "75.0 MB"
    say(control, propose=True, text="60 MB")
    assert session.asked == [("inspect", {"kind": "plan", "budget_bytes": 60e6})]
    assert control.pending  # at once
    session.inspections["plan"] = Inspection(result=plan_of(), step=7)
    run_of(session.history_so_far, range(6), 124.8e6, 0.4)
    dashboard.tick()
    assert (control.pending, control.layers) == (False, list(LAYERS))
    say(control, use=True)
    assert session.asked[-1] == ("widget", {"checkpointed": LAYERS})
    session.boundary()
    session.history_so_far.record(applied(6, checkpointed=list(LAYERS)))
    run_of(session.history_so_far, range(6, 12), 57.6e6, 0.42)
    dashboard.tick()
    assert control.use == "in force"
    assert control.measured.startswith(
        "Predicted 57.8 MB, measured 57.6 MB: within the budget, in 6 steps of the run. A step took"
    )
    data = part(dashboard, PlanPanel).children[1].figure["data"]
    assert [trace["meta"]["labels"] for trace in data if trace["meta"]["part"] == "measured"] == [["none"], ["plan"]]
    say(part(dashboard, BatchSizesControl), ask=True)
    assert session.asked[-1] == ("inspect", {"kind": "largest_batch", "budget_bytes": 60e6})
    say(part(dashboard, BatchSizesControl), cancel=True)
    assert session.asked[-1] == ("cancel_inspection", {"kind": "largest_batch"})


def test_why_it_could_not_be_done_is_in_the_status_line(dashboard: Dashboard) -> None:
    session: Any = dashboard._source
    control, status = part(dashboard, PlanControl), part(dashboard, StatusLine)

    def refuse(kind: str, **_options: Any) -> None:
        raise RunError("plan: your own loop is training this model in a cell")

    session.inspect = refuse
    say(control, propose=True, text="60 MB")
    assert status.complaint == "No plan made: your own loop is training this model in a cell"
    session.inspections["largest_batch"] = Inspection(why_not="largest_batch: the batch has no size")
    dashboard.tick()
    assert status.complaint == "Largest batch not found: the batch has no size"


def test_locked_it_keeps_the_plan(dashboard: Dashboard) -> None:
    session: Any = dashboard._source
    session.inspections["plan"] = Inspection(result=plan_of(), step=7)
    session.closed = True
    dashboard.tick()
    control = part(dashboard, PlanControl)
    assert (control.locked, control.layers) == (True, list(LAYERS))
    assert part(dashboard, CudaControl).locked


# ---- the page's side ------------------------------------------------------------------------------------------------------


@pytest.fixture
def view(page: Any, control: PlanControl, messages: Any) -> Iterator[View]:  # noqa: F811
    page.set_viewport_size({"width": 1100, "height": 1000})
    yield View(page, control, messages)
    page.set_viewport_size({"width": 312, "height": 900})


def show(view: View, state: PlanState) -> None:
    view.control.show(state)  # type: ignore[attr-defined]
    view.to_page()


def test_a_budget_is_typed_with_the_keyboard(view: View, asked: list[Any]) -> None:
    field = view.role("textbox", "Memory budget")
    assert field.input_value() == "60.0 MB"
    field.fill("8 apples")
    view.render(state_of(step=13))  # what is being typed is left alone
    assert field.input_value() == "8 apples"
    field.press("Escape")
    assert field.input_value() == "60.0 MB"
    field.fill("8 apples")
    field.press("Enter")
    view.sync()
    assert view.page.get_by_role("alert").inner_text().startswith("Budget: got '8 apples', expected a size above 0")
    assert (field.input_value(), field.get_attribute("aria-invalid")) == ("8 apples", "true")
    field.fill("55 MB")
    field.press("Enter")
    assert view.role("button", "Planning …").get_attribute("aria-busy") == "true"
    view.sync()
    assert asked == [("plan", {"budget_bytes": 55e6})]
    assert field.input_value() == "55.0 MB"
    assert view.page.evaluate("document.activeElement.type") == "text"


def test_the_slider_asks_once_it_rests(view: View, asked: list[Any]) -> None:
    slider = view.role("slider", "Memory budget")
    assert (slider.get_attribute("min"), slider.get_attribute("max")) == ("43000000", "124800000")
    slider.focus()
    view.page.keyboard.press("End")
    for _ in range(3):
        view.page.keyboard.press("ArrowLeft")
    assert view.role("textbox", "Memory budget").input_value() == "123.6 MB"
    assert slider.get_attribute("aria-valuetext") == "123.6 MB"
    assert view.page.evaluate("window.sent.length") == 0
    show(view, planned(plan_of(budget_bytes=61e6)))  # another one has come meanwhile: the slider stays
    assert view.role("textbox", "Memory budget").input_value() == "123.6 MB"
    view.page.wait_for_function("window.sent.length > 0")
    view.sync()
    assert asked == [("plan", {"budget_bytes": 123.6e6})]
    assert slider.evaluate("one => document.activeElement === one")


def test_a_plan_that_is_being_made_is_cancelled_with_the_keyboard(view: View, asked: list[Any]) -> None:
    cancel, propose = view.role("button", "Cancel"), view.role("button", "Propose a plan")
    assert not cancel.is_visible()
    propose.focus()
    view.page.keyboard.press("Enter")
    assert cancel.is_visible()  # at once
    view.sync()
    show(view, dataclasses.replace(planned(), plan=Inspection(result=planned().newest, pending=True)))
    cancel.focus()
    view.page.keyboard.press("Enter")
    view.sync()
    assert asked[1:] == [("cancel_inspection", {"kind": "plan"})]
    show(view, dataclasses.replace(planned(), plan=Inspection(result=planned().newest, pending=True, cancelling=True)))
    assert view.role("button", "Cancelling …").get_attribute("aria-disabled") == "true"
    ended = Inspection(result=planned().newest, why_not="plan: it was cancelled")
    show(view, dataclasses.replace(planned(), plan=ended))
    assert view.page.get_by_text("No plan made: it was cancelled").is_visible()
    assert propose.evaluate("one => document.activeElement === one")  # what had the focus is gone


def test_the_plan_is_used_with_the_keyboard(view: View, asked: list[Any]) -> None:
    assert view.page.locator(".ampw-plan-layers li").all_inner_texts() == list(LAYERS)
    use = view.role("button", "Use this plan")
    use.focus()
    view.page.keyboard.press("Enter")
    assert view.role("button", "Requested").evaluate("one => document.activeElement === one")
    view.sync()
    assert asked == [{"checkpointed": LAYERS}]
    view.render(state_of(checkpointed=LAYERS))
    show(view, planned(measured=MEASURED))
    assert view.role("button", "In force").get_attribute("aria-disabled") == "true"
    assert view.page.get_by_text("Predicted 57.8 MB, measured 57.6 MB: within the budget").is_visible()
    view.page.get_by_text("All sets on the curve").click()
    assert view.page.get_by_role("row").count() == 5


def test_alternatives_have_buttons_where_they_are_settings(view: View, asked: list[Any]) -> None:
    show(view, planned(infeasible()))
    assert view.page.locator(".ampw-plan-others li").count() == 2
    assert view.page.locator(".ampw-plan-others button").count() == 1
    button = view.role("button", "Use: bf16")
    button.focus()
    view.page.keyboard.press("Enter")
    view.sync()
    assert asked == [{"autocast": "bf16", "checkpointed": LAYERS}]
    view.render(state_of(autocast="bf16", checkpointed=LAYERS))
    assert view.role("button", "In force: bf16").evaluate("one => document.activeElement === one")
    assert view.role("button", "In force").count() == 0
    use = view.role("button", "Use these layers")  # these were chosen for another format
    assert use.get_attribute("aria-disabled") == "true"
    reason = view.page.locator(f"[id='{use.get_attribute('aria-describedby')}']")
    assert reason.inner_text() == "This was planned for fp32, and bf16 is in force now: propose a plan again"


def test_markup_stays_text(view: View) -> None:
    plan = plan_of(layers=(EVIL,), obtained=EVIL, points=(point("none", (), 1e8, 0.0), point(EVIL, (EVIL,), 5e7, 0.1)))
    show(view, dataclasses.replace(planned(plan, why_no_batch=EVIL), plan=Inspection(result=plan, why_not=f"plan: {EVIL}")))
    assert view.page.locator(".ampw-plan-layers li").inner_text() == EVIL
    assert view.page.get_by_text(f"No plan made: {EVIL}").is_visible()
    assert view.page.get_by_text(f"To plan, {EVIL}.").is_visible()
    assert view.page.locator("img").count() == 0
    assert view.page.evaluate("window.harmed") is None


def test_locked_nothing_can_be_asked_for(view: View) -> None:
    view.control.lock()
    view.to_page()
    assert view.role("textbox", "Memory budget").get_attribute("readonly") is not None
    assert view.page.locator("button:not([aria-disabled=true])").count() == 0
    assert view.role("slider", "Memory budget").is_disabled()


def test_a_table_with_progress_cancel_and_confirm(page: Any, ask: Any, asked: list[Any], messages: Any) -> None:  # noqa: F811
    page.set_viewport_size({"width": 1100, "height": 1000})
    view = View(page, BatchSizesControl(ask, lambda: 60e6), messages)
    button = view.role("button", "Find the largest batch for 60.0 MB")
    button.focus()
    page.keyboard.press("Enter")
    view.sync()
    assert asked == [("largest_batch", {"budget_bytes": 60e6})]
    progress = Progress(done=2, total=9, seconds_left=31.0, doing="predicting fp32/all")
    show(view, PlanState(largest_batch=Inspection(pending=True, progress=progress)))
    assert page.get_by_role("progressbar", name="Largest batch").get_attribute("aria-valuenow") == "22"
    assert page.get_by_text("predicting fp32/all · 3 of 9 · about 31 s left").is_visible()
    cancel = view.role("button", "Cancel")
    cancel.focus()
    page.keyboard.press("Enter")
    view.sync()
    assert asked[1:] == [("cancel_inspection", {"kind": "largest_batch"})]
    show(view, PlanState(largest_batch=Inspection(result=sizes(), step=7)))
    assert button.evaluate("one => document.activeElement === one")  # what had the focus is gone
    texts = page.locator("tbody tr").evaluate_all("rows => rows.map(row => [...row.children].map(one => one.innerText))")
    assert texts[1] == ["fp32/all", "1", "24", "×4.00", "56.3 MB", ""]
    assert texts[2][5] == f"ValueError: {EVIL}"
    assert page.locator("img").count() == 0
    view.role("button", "Confirm by running").click()
    view.sync()
    assert asked[2][1]["confirm"] is True
    page.set_viewport_size({"width": 312, "height": 900})


def test_on_a_gpu_the_prediction_is_hidden(page: Any, ask: Any, messages: Any) -> None:  # noqa: F811
    view = View(page, CudaControl(ask, PlanState(on_cuda=Inspection(result=on_cuda()))), messages)
    assert page.get_by_text("On a GPU (predicted for CUDA, not measured)").is_visible()
    assert page.get_by_text(EVIL).is_visible()
    assert page.locator("img").count() == 0
    view.render(state_of(device="cuda:0"))
    assert not page.get_by_text("On a GPU").is_visible()
