"""The Compare tab: what is compared, how far that is, what it shows of a comparison, and what it asks for."""

from __future__ import annotations

import dataclasses
import gc
import math
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from amp_widgets.analysis.comparison import Comparison, Progress, Row
from amp_widgets.analysis.comparisons import ComparisonStatus
from amp_widgets.errors import RunError
from amp_widgets.language import set_language
from amp_widgets.widgets import compare_control
from amp_widgets.widgets.compare_control import CompareControl, CompareState
from amp_widgets.widgets.compare_panel import NOTHING_YET, ComparePanel
from amp_widgets.widgets.dashboard import Dashboard
from amp_widgets.widgets.status_line import StatusLine
from amp_widgets.widgets.tab_bar import TabBar
from tests.widgets.conftest import FakeLayer, FakeSupport, gpt_layers, state_of
from tests.widgets.test_page import View, one_page, page  # noqa: F401  # fixtures

EVIL = "<img src=x onerror='window.harmed = 1'>"
ALL = tuple(f"blocks.{i}" for i in range(6))
EVERY = ("token", "position", *ALL, "norm")


def compared(*more: Row, **changes: Any) -> Comparison:
    reference = Row(
        label="fp32/none", autocast="fp32", layers_name="none", checkpointed=(), peak_bytes=124_800_000.0, step_s=0.4,
        step_s_low=0.39, step_s_high=0.42, samples_per_s=40.0, loss=3.616, gradient_error=0.0, steps=6, rounds=3,
    )  # fmt: skip
    less = Row(
        label="fp32/all", autocast="fp32", layers_name="all", checkpointed=EVERY, peak_bytes=43_000_000.0, step_s=0.52,
        step_s_low=0.5, step_s_high=0.55, samples_per_s=30.769, loss=3.616, gradient_error=0.0, steps=6, rounds=3,
        reference=reference,
    )  # fmt: skip
    half = Row(
        label="bf16/chosen", autocast="bf16", layers_name="chosen", checkpointed=("norm",), peak_bytes=82_600_000.0, step_s=0.39,
        step_s_low=0.38, step_s_high=0.41, samples_per_s=41.026, loss=3.617, gradient_error=2.8e-3, skipped=2, nonfinite=1234,
        steps=6, rounds=3, reference=reference,
    )  # fmt: skip
    slow = Row(
        label="fp16/none", autocast="fp16", layers_name="none", checkpointed=(), why_not="not run: one step took more than 9 s",
        reference=reference,
    )  # fmt: skip
    given: dict[str, Any] = {
        "rows": (reference, less, half, slow, *more), "steps": 5, "rounds": 3, "device": "cpu", "batch": "inputs (16, 128)",
        "batch_size": 16, "memory_source": "counted", "notes": ("bf16: emulated.",),
    }  # fmt: skip
    return Comparison(**(given | changes))


def done(result: Comparison | None = None, **changes: Any) -> CompareState:
    return CompareState(status=ComparisonStatus(result=compared() if result is None else result, step=1234, **changes))


def running(progress: Progress | None = None, **changes: Any) -> CompareState:
    return CompareState(status=ComparisonStatus(pending=True, progress=progress, **changes))


@pytest.fixture
def asked() -> list[Any]:
    return []


@pytest.fixture
def korean() -> Iterator[None]:
    set_language("ko")
    yield
    set_language(None)


@pytest.fixture
def control(asked: list[Any], messages: Any) -> CompareControl:
    return CompareControl(
        lambda name, **values: asked.append((name, values)), lambda **changes: asked.append(changes), done(), state_of()
    )


def say(control: CompareControl, **message: Any) -> None:
    control._handle_custom_msg({**message, "id": "1"}, [])


# ---- Python's side ----------------------------------------------------------------------------------------------------------


def test_a_row_has_the_texts_of_its_columns(control: CompareControl) -> None:
    first, less, half, slow = control.rows
    assert first == {
        "label": "fp32/none", "layers": "", "format": "fp32", "title": "", "why_not": "", "peak": "124.8 MB",
        "peak_ratio": "×1.00", "time": "400 ms", "spread": "390 ms to 420 ms", "time_ratio": "×1.00", "unsure": "",
        "samples": "40", "loss": "3.616", "gradients": "reference", "skipped": "0", "remark": "",
    }  # fmt: skip
    assert (less["layers"], less["peak_ratio"], less["time_ratio"], less["unsure"]) == ("9 layers", "×0.34", "×1.30", "")
    assert (less["gradients"], less["title"]) == ("0", "token, position, " + ", ".join(ALL) + ", norm")
    assert (half["layers"], half["time_ratio"], half["samples"]) == ("1 layer", "×0.97", "41.03")
    assert half["unsure"] == "Within the spread of fp32/none: which is faster is not known"
    assert (half["gradients"], half["skipped"], half["remark"]) == ("2.8e-03", "2 of 6", "1,234 elements inf or NaN")
    assert slow["why_not"] == "not run: one step took more than 9 s"
    assert control.caption == "Measured before step 1,234"
    assert control.loss_head == "loss after 5\N{NO-BREAK SPACE}steps"
    result = compared()
    assert control.verdict == list(result.verdict)
    assert control.details == ["bf16: emulated.", result.obtained]


def test_the_texts_are_those_of_the_table_that_a_cell_shows(control: CompareControl) -> None:
    for row, cells in zip(control.rows, compared().to_table()[1:], strict=True):
        if row["why_not"]:
            assert (row["label"], row["why_not"]) == (cells[0], cells[-1])
            continue
        assert [row["label"], row["layers"].split(" ")[0]] == [*cells[:2]]
        assert f"{row['peak']} {row['peak_ratio']}" == cells[2]
        assert f"{row['time']} ({row['spread']}) {row['time_ratio']}" == cells[3]
        assert cells[4].startswith(f"{row['samples']} ×")
        assert cells[5].startswith(f"{row['loss']} ×")
        assert [row["gradients"], row["skipped"]] == [*cells[6:8]]


def test_what_was_not_measured_is_a_dash() -> None:
    row = dataclasses.replace(compared().rows[1], peak_bytes=math.nan, step_s=math.nan, samples_per_s=math.nan)
    shown = CompareControl(print, print, done(compared(row))).rows[-1]
    assert {shown[name] for name in ("peak", "peak_ratio", "time", "spread", "time_ratio", "samples")} == {"–"}


def test_it_asks_for_what_is_ticked_and_can_be(control: CompareControl, asked: list[Any]) -> None:
    assert control.formats == [["fp32", "fp32", True, ""], ["fp16", "fp16", True, ""], ["bf16", "bf16", True, ""]]
    no_chosen = "no layer is checkpointed now: tick some under Layers"
    no_plan = "there is no plan yet: make one under Plan"
    assert control.sets == [
        ["none", "none", True, ""],
        ["all", "all (9)", True, ""],
        ["planned", "planned", True, no_plan],
        ["chosen", "chosen", True, no_chosen],
    ]
    assert control.size == "6 combinations: 114 steps on one batch"
    say(control, compare=True)
    say(control, axis="format", name="fp16", on=False)
    say(control, axis="set", name="none", on=False)
    say(control, steps=3)
    say(control, rounds=1)
    assert control.size == "3 combinations, with fp32/none, to which the ratios are: 15 steps on one batch"
    say(control, compare=True)
    assert asked == [
        ("compare", {"grid": {"autocast": ["fp32", "fp16", "bf16"], "checkpointed": ["none", "all"]}, "steps": 5, "rounds": 3}),
        ("compare", {"grid": {"autocast": ["fp32", "bf16"], "checkpointed": ["all"]}, "steps": 3, "rounds": 1}),
    ]
    say(control, axis="set", name="all", on=False)
    say(control, compare=True)
    assert len(asked) == 2
    assert control.size == "Tick at least one set of layers"
    for name in ("fp32", "bf16"):
        say(control, axis="format", name=name, on=False)
    assert control.size == "Tick at least one format"
    for wrong in ({"steps": 4}, {"steps": "5"}, {"rounds": 2}, {"axis": "row", "name": "all", "on": True}, {"use": 99}, {}):
        say(control, **wrong)
    assert (control.steps, control.rounds, len(asked)) == (3, 1, 2)


def test_what_the_device_or_the_model_lacks_is_off_with_the_reason(control: CompareControl, asked: list[Any]) -> None:
    support = {"fp32": FakeSupport(), "fp16": FakeSupport(available=False, note="no fp16 here"), "bf16": FakeSupport()}
    alone = (FakeLayer(name="x", why_not="scripted"),)
    control.render(dataclasses.replace(state_of(), support=support, layers=alone))
    assert control.formats[1] == ["fp16", "fp16", True, "no fp16 here"]
    assert control.sets[1] == ["all", "all", True, "this model has no layer inside it that can be checkpointed"]
    say(control, compare=True)
    assert asked == [("compare", {"grid": {"autocast": ["fp32", "bf16"], "checkpointed": ["none"]}, "steps": 5, "rounds": 3})]


def test_planned_are_the_layers_of_the_newest_plan_unless_that_is_another_set(control: CompareControl, asked: list[Any]) -> None:
    control.show(dataclasses.replace(done(), planned=("blocks.0",)))
    assert control.sets[2] == ["planned", "planned (1)", True, ""]
    say(control, compare=True)
    assert asked[-1][1]["grid"]["checkpointed"] == ["none", "all", "planned"]
    control.render(state_of(checkpointed=("blocks.0",)))
    assert control.sets[3] == ["chosen", "chosen (1)", True, "the layers that are checkpointed now are those of planned"]
    control.show(dataclasses.replace(done(), planned=EVERY))
    assert control.sets[2] == ["planned", "planned (9)", True, "the plan's layers are those of all"]
    control.show(dataclasses.replace(done(), planned=()))
    assert control.sets[2][3] == "the plan checkpoints no layer, as none does"


def test_chosen_is_what_is_in_force_unless_that_is_all(control: CompareControl) -> None:
    control.render(state_of(checkpointed=("blocks.0", "norm")))
    assert control.sets[3] == ["chosen", "chosen (2)", True, ""]
    assert control.size.startswith("9 combinations")
    control.render(state_of(checkpointed=EVERY[::-1]))
    assert control.sets[3] == ["chosen", "chosen (9)", True, "the layers that are checkpointed now are those of all"]


def test_in_another_language_a_set_has_beside_it_what_rows_call_it(asked: list[Any], korean: None) -> None:
    control = CompareControl(lambda *_, **__: None, lambda **_: None, done(), state_of(checkpointed=("norm",)))
    labels = [label for _, label, _, _ in control.sets]
    assert labels == ["없음 (none)", "전체 (all, 9)", "계획 (planned)", "지금 고른 것 (chosen, 1)"]
    control.render(state_of(checkpointed=EVERY))
    assert control.sets[3][3] == "지금 체크포인팅된 레이어가 ‘전체 (all)’의 레이어와 같습니다"


def test_the_settings_of_a_row_are_asked_for_once(control: CompareControl, asked: list[Any]) -> None:
    assert control.uses == ["in force", "", "", ""]
    say(control, use=0)  # in force
    say(control, use=3)  # was not run
    say(control, use=1)
    assert asked == [{"autocast": "fp32", "checkpointed": EVERY}]
    control.render(state_of(pending={"autocast": "fp32", "checkpointed": list(EVERY)}))
    assert control.uses == ["", "requested", "", ""]
    say(control, use=1)
    control.render(state_of(checkpointed=EVERY))
    assert control.uses == ["", "in force", "", ""]
    assert len(asked) == 1
    control.render(state_of(autocast="bf16", checkpointed=("norm",), pending={"init_scale": 8.0}))
    assert control.uses == ["", "", "in force", ""]


def test_progress_is_what_is_done_and_the_time_left(control: CompareControl, asked: list[Any]) -> None:
    say(control, cancel=True)  # there is nothing
    control.show(running())
    assert (control.pending, control.fraction, control.progress) == (True, 0.0, "Begins when the step in progress is over …")
    progress = Progress(done=40, total=114, seconds_left=79.6, doing="round 2 of 3: bf16/all")
    control.show(running(progress))
    assert control.progress == "round 2 of 3: bf16/all · step 40 of 114 · about 1 min 20 s left"
    assert control.fraction == 0.351
    say(control, compare=True)
    say(control, cancel=True)
    assert asked == [("cancel", {})]
    control.show(running(progress, cancelling=True))
    assert (control.cancelling, control.progress) == (True, "Ends after the step in progress …")
    control.show(running(dataclasses.replace(progress, seconds_left=math.nan)))
    assert control.progress.endswith("step 40 of 114")


def test_why_there_is_none_is_said(control: CompareControl, asked: list[Any]) -> None:
    control.show(done(why_not="compare: the model is compiled"))
    assert control.why_not == "Settings not compared: the model is compiled"
    control.show(done(cancelled=True))
    assert control.why_not == "Cancelled before a round was complete; what is shown was measured before"
    control.show(CompareState(status=ComparisonStatus(cancelled=True), why_no_batch="start the run first"))
    assert control.why_not == "Cancelled before a round was complete"
    assert (control.rows, control.uses, control.caption) == ([], [], "")
    assert control.why_no_batch == "To compare, start the run first."
    say(control, compare=True)
    assert asked == []
    control.show(done(dataclasses.replace(compared(), cancelled=True)))
    assert control.caption == "Cancelled early, measured before step 1,234"


def test_what_is_shown_already_is_not_sent_again(control: CompareControl, messages: Any) -> None:
    state = done()
    control.show(state)
    messages.clear()
    control.show(dataclasses.replace(state))
    control.show(done())  # another object, the same to see
    control.render(dataclasses.replace(state_of()))
    assert messages.sent == []
    control.show(done(pending=True))
    assert [data["state"] for _, data in messages.sent] == [
        {"pending": True, "progress": "Begins when the step in progress is over …"}
    ]


def test_the_figure_is_drawn_when_there_is_another_result(asked: list[Any], messages: Any, monkeypatch: Any) -> None:
    drawn: list[str] = []
    real = Comparison.to_figure
    monkeypatch.setattr(Comparison, "to_figure", lambda self, **how: drawn.append(how["theme"]) or real(self, **how))
    panel = ComparePanel(asked.append, asked.append, dashboard=state_of())
    figure = panel.children[1]
    assert figure.note == NOTHING_YET
    state = done()
    panel.show(state)
    panel.show(dataclasses.replace(state))
    assert drawn == ["light", "dark"]
    assert len([trace for trace in figure.figure["data"] if trace["x"] != [None]]) == 3
    assert figure.label.startswith("Settings compared. Least memory: fp32/all (×0.34)")
    panel.show(CompareState())
    assert figure.figure == {}
    panel.close()


def test_closed_it_asks_nobody_and_is_freed(asked: list[Any]) -> None:
    panel = ComparePanel(asked.append, asked.append, done(), state_of())
    control = panel.children[0]
    kept = [weakref.ref(one) for one in (panel, control, panel.children[1], panel.layout)]
    assert repr(panel) == "<amp_widgets compare panel: <amp_widgets compare control: Measured before step 1,234>>"
    panel.close()
    for message in ({"compare": True}, {"use": 1}, {"cancel": True}):
        control._received(control, message, [])
    assert asked == []
    assert (control._result, control._dashboard, panel._drawn) == (None, None, None)
    del panel, control
    gc.collect()
    assert [one() for one in kept] == [None] * 4


def test_without_a_result_it_says_so(asked: list[Any]) -> None:
    assert repr(CompareControl(asked.append, asked.append)) == "<amp_widgets compare control: nothing compared yet>"


# ---- in the dashboard -------------------------------------------------------------------------------------------------------


@pytest.fixture
def dashboard(session_of: Any, chart_of: Any) -> Iterator[Dashboard]:
    session = session_of(run="running")
    made = Dashboard(session, chart=chart_of(), clock=lambda: 100.0, live=False)
    part(made, TabBar)._handle_custom_msg({"tab": "compare", "id": "1"}, [])
    session.asked.clear()
    yield made
    made.close()


def part(dashboard: Dashboard, kind: type) -> Any:
    [found] = [widget for widget in dashboard.widgets() if isinstance(widget, kind)]
    return found


def test_the_tab_asks_the_session_and_shows_how_it_stands(dashboard: Dashboard) -> None:
    session: Any = dashboard._source
    control = part(dashboard, CompareControl)
    say(control, steps=10)
    say(control, compare=True)
    grid = {"autocast": ["fp32", "fp16", "bf16"], "checkpointed": ["none", "all"]}
    assert session.asked == [("compare", {"grid": grid, "steps": 10, "rounds": 3})]
    assert control.pending  # at once
    say(control, cancel=True)
    assert session.asked[-1] == ("cancel", {})
    session.comparison = ComparisonStatus(result=compared(), step=7)
    dashboard.tick()
    assert (control.pending, len(control.rows)) == (False, 4)
    assert part(dashboard, ComparePanel).children[1].figure != {}
    say(control, use=2)
    assert session.asked[-1] == ("widget", {"autocast": "bf16", "checkpointed": ("norm",)})


def test_why_it_could_not_be_done_is_in_the_status_line_once(dashboard: Dashboard) -> None:
    session: Any = dashboard._source
    control, status = part(dashboard, CompareControl), part(dashboard, StatusLine)

    def refuse(**_chosen: Any) -> None:
        raise RunError("compare: your own loop is training this model in a cell")

    session.compare_on_newest = refuse
    say(control, compare=True)
    assert status.complaint == "Settings not compared: your own loop is training this model in a cell"
    session.comparison = ComparisonStatus(why_not="compare: the model is compiled")
    dashboard.tick()
    assert status.complaint == "Settings not compared: the model is compiled"


def test_locked_it_keeps_what_was_compared(dashboard: Dashboard) -> None:
    session: Any = dashboard._source
    session.comparison = ComparisonStatus(result=compared(), step=7)
    session.closed = True
    dashboard.tick()
    control = part(dashboard, CompareControl)
    assert (control.locked, len(control.rows)) == (True, 4)


# ---- the page's side --------------------------------------------------------------------------------------------------------


@pytest.fixture
def view(page: Any, control: CompareControl, messages: Any) -> Iterator[View]:  # noqa: F811
    page.set_viewport_size({"width": 1100, "height": 1000})
    yield View(page, control, messages)
    page.set_viewport_size({"width": 312, "height": 900})


def test_the_table_and_the_verdict(view: View) -> None:
    texts = view.page.locator("tbody tr").evaluate_all("rows => rows.map(row => [...row.children].map(one => one.innerText))")
    assert texts[0][:3] == ["fp32/none\nno layer", "124.8 MB", "×1.00"]
    assert texts[1] == [
        "fp32/all\n9 layers", "43.0 MB", "×0.34", "520 ms\n500 ms to 550 ms", "×1.30", "30.77", "3.616", "0", "0", "Use",
    ]  # fmt: skip
    assert texts[2][7:9] == ["2.8e-03\n1,234 elements inf or NaN", "2 of 6"]
    assert texts[3] == ["fp16/none\nno layer", "not run: one step took more than 9 s"]
    unsure = view.page.locator("td.ampw-unsure")
    assert unsure.all_inner_texts() == ["×0.97"]
    assert "not known" in str(unsure.get_attribute("title"))
    assert view.page.get_by_role("columnheader", name="loss after 5 steps").is_visible()
    assert view.page.get_by_text("fp32/all: peak ×0.34, time ×1.30 of fp32/none").is_visible()
    assert view.page.get_by_text("Measured before step 1,234").is_visible()
    view.page.get_by_text("How it was measured").click()
    assert view.page.get_by_text("bf16: emulated.").is_visible()


@pytest.mark.parametrize("width", [400, 700])
def test_the_buttons_of_a_wide_table_are_in_sight_on_a_narrow_page(view: View, asked: list[Any], width: int) -> None:
    view.page.set_viewport_size({"width": width, "height": 1000})
    scrolled = view.page.locator(".ampw-scroll")
    assert scrolled.evaluate("one => one.scrollWidth > one.clientWidth + 50")
    use = view.role("button", "Use these settings: bf16/chosen")
    middle = "one => { const box = one.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; }"
    at = use.evaluate(middle)
    assert use.evaluate("(one, [x, y]) => one.contains(document.elementFromPoint(x, y))", at)
    view.page.mouse.click(*at)
    view.sync()
    assert asked == [{"autocast": "bf16", "checkpointed": ("norm",)}]
    assert scrolled.evaluate("one => one.scrollLeft") == 0


def test_choices_and_comparing_with_the_keyboard(view: View, asked: list[Any]) -> None:
    opened = view.page
    opened.get_by_role("checkbox", name="fp16").focus()
    opened.keyboard.press("Space")
    assert not opened.get_by_role("checkbox", name="fp16").is_checked()
    view.sync()
    off = opened.get_by_role("checkbox", name="chosen")
    assert off.get_attribute("aria-disabled") == "true"
    off.focus()
    opened.keyboard.press("Space")
    assert not off.is_checked()
    assert opened.locator(f"#{off.get_attribute('aria-describedby')}").inner_text().startswith("no layer is checkpointed")
    opened.get_by_role("combobox", name="rounds", exact=True).select_option("1")
    view.sync()
    assert opened.get_by_text("4 combinations: 28 steps on one batch").is_visible()
    button = opened.get_by_role("button", name="Compare again")
    assert "28 steps" in opened.locator(f"#{str(button.get_attribute('aria-describedby')).split()[0]}").inner_text()
    button.focus()
    opened.keyboard.press("Enter")
    assert opened.get_by_text("Asked for …").is_visible()
    view.sync()
    assert asked == [
        ("compare", {"grid": {"autocast": ["fp32", "bf16"], "checkpointed": ["none", "all"]}, "steps": 5, "rounds": 1})
    ]
    view.control.show(running(Progress(done=7, total=28, seconds_left=21.0, doing="round 1 of 1: bf16/all")))  # type: ignore[attr-defined]
    view.to_page()
    bar = opened.get_by_role("progressbar", name="Comparison")
    assert bar.get_attribute("aria-valuenow") == "25"
    assert bar.locator("div").evaluate("one => one.style.width") == "25%"
    assert opened.get_by_text("round 1 of 1: bf16/all · step 7 of 28 · about 21 s left").is_visible()
    busy = opened.get_by_role("button", name="Comparing …")
    assert busy.evaluate("one => document.activeElement === one")  # it was not lost
    opened.keyboard.press("Tab")
    opened.keyboard.press("Enter")
    assert opened.get_by_role("button", name="Cancel").get_attribute("aria-disabled") == "true"
    opened.keyboard.press("Enter")
    view.sync()
    assert asked[1:] == [("cancel", {})]
    view.control.show(done())  # type: ignore[attr-defined]
    view.to_page()
    assert not bar.is_visible()
    assert opened.get_by_role("button", name="Compare again").evaluate("one => document.activeElement === one")


def test_nothing_ticked_compares_nothing(view: View, asked: list[Any]) -> None:
    for name in ("none", "all (9)"):
        view.role("checkbox", name).uncheck()
        view.sync()
    button = view.page.get_by_role("button", name="Compare again")
    assert button.get_attribute("aria-disabled") == "true"
    button.click(force=True)
    view.sync()
    assert asked == []
    assert view.page.get_by_text("Tick at least one set of layers").is_visible()


def test_use_these_settings(view: View, asked: list[Any]) -> None:
    assert view.page.locator("tr[data-use='in force'] b").inner_text() == "fp32/none"
    button = view.role("button", "Use these settings: bf16/chosen")
    button.focus()
    view.page.keyboard.press("Enter")
    assert view.page.get_by_role("button", name="Requested: bf16/chosen").evaluate("one => document.activeElement === one")
    view.sync()
    assert asked == [{"autocast": "bf16", "checkpointed": ("norm",)}]
    view.render(state_of(autocast="bf16", checkpointed=("norm",)))
    assert view.page.get_by_role("button", name="In force: bf16/chosen").get_attribute("aria-disabled") == "true"
    assert view.page.get_by_role("button", name="Use these settings: fp32/none").count() == 1


def test_markup_stays_text_and_reasons_are_said(view: View) -> None:
    row = Row(label=EVIL, autocast="fp32", layers_name=EVIL, checkpointed=(EVIL,), why_not=f"it fails: {EVIL}")
    result = compared(dataclasses.replace(row, reference=compared().rows[0]), notes=(EVIL,))
    state = done(result, why_not=f"compare: {EVIL}")
    view.control.show(dataclasses.replace(state, why_no_batch=EVIL))  # type: ignore[attr-defined]
    view.to_page()
    assert view.page.locator("tbody tr").last.inner_text().startswith(EVIL)
    assert view.page.get_by_text(f"Settings not compared: {EVIL}").is_visible()
    assert view.page.get_by_text(f"To compare, {EVIL}.").is_visible()
    assert view.page.get_by_role("button", name="Compare again").get_attribute("aria-disabled") == "true"
    assert view.page.locator("img").count() == 0
    assert view.page.evaluate("window.harmed") is None


def test_locked_and_equal_state(view: View) -> None:
    view.page.evaluate("document.querySelector('tbody tr').kept = 1")
    view.control.show(running(Progress(done=1, total=2, seconds_left=1.0, doing="x"), result=view.control._result, step=1234))  # type: ignore[attr-defined]
    view.control.lock()
    view.to_page()
    assert view.page.evaluate("document.querySelector('tbody tr').kept") == 1
    assert not view.page.get_by_role("progressbar").is_visible()
    buttons = view.page.locator("tbody button, .ampw-choices button")
    assert set(buttons.evaluate_all("all => all.map(one => one.getAttribute('aria-disabled'))")) == {"true"}
    assert view.page.locator("select:enabled").count() == 0
    assert view.page.get_by_role("checkbox", name="fp32").get_attribute("aria-disabled") == "true"


def test_the_layers_of_a_model_are_looked_at_once(control: CompareControl, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    monkeypatch.setattr(compare_control, "all_layers", lambda layers: looks.append(len(layers)) or ())
    control.render(state_of(pending={"init_scale": 2.0}))  # other objects, the same layers
    assert looks == []
    control.render(state_of(layers=gpt_layers(2)))
    control.render(state_of(layers=gpt_layers(2)))
    assert looks == [len(gpt_layers(2))]
