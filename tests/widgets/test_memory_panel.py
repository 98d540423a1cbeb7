from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import ipywidgets
import pytest

from amp_widgets.widgets.memory_control import MOST_REPORT_LINES, MemoryControl
from amp_widgets.widgets.memory_panel import NOTHING_YET, MemoryPanel
from amp_widgets.widgets.memory_state import MemoryState
from tests.charts.gpt_step import StepProfile, gpt_step
from tests.widgets.test_page import View, one_page, page  # noqa: F401  # fixtures

FP32 = gpt_step()
LEAN = gpt_step("fp16 + 4 layers checkpointed", half=True, checkpointed=(0, 1, 2, 3))
BOTH = MemoryState(profiles=(FP32, LEAN), shown=("fp32", LEAN.label))


@pytest.fixture
def asked() -> list[Any]:
    return []


@pytest.fixture
def panel(asked, state) -> MemoryPanel:
    return panel_of(asked, MemoryState(), state())


def panel_of(asked: list[Any], shown: MemoryState, dashboard: Any = None) -> MemoryPanel:
    def command(name: str, /, **values: Any) -> None:
        asked.append((name, values))

    return MemoryPanel(command, lambda **changes: asked.append(("settings", changes)), shown, dashboard)


def say(panel: MemoryPanel, **message: Any) -> None:
    panel._control._handle_custom_msg({**message, "id": "1"}, [])


def parts(panel: MemoryPanel) -> set[tuple[int, str]]:
    return {(trace["meta"]["profile"], trace["meta"]["part"]) for trace in panel._figure.figure.get("data", ())}


# ---- which steps ----


@pytest.mark.parametrize(
    ("shown", "chosen"),
    [
        ((), (LEAN,)),
        (("fp32",), (FP32,)),
        (("fp32", LEAN.label), (FP32, LEAN)),
        ((LEAN.label, "fp32"), (LEAN, FP32)),
        (("gone", "fp32"), (FP32,)),
        (("fp32", "fp32"), (FP32,)),
        (("gone",), (LEAN,)),
    ],
)
def test_the_chosen_steps(shown: tuple[str, ...], chosen: tuple[StepProfile, ...]) -> None:
    assert MemoryState(profiles=(FP32, LEAN), shown=shown).chosen == chosen
    assert MemoryState(shown=shown).chosen == ()


# ---- the panel ----


def test_without_a_profile_it_says_what_will_be_there(panel) -> None:
    assert panel._figure.figure == {}
    assert panel._figure.note == NOTHING_YET
    assert panel._table.rows == []
    assert repr(panel) == "<amp_widgets memory panel: no step profiled yet>"


def test_two_steps_are_compared_in_the_figure_in_words_and_the_table_is_of_the_second(panel) -> None:
    panel.show(BOTH)
    assert {(0, "outline"), (1, "total"), (1, "recompute")} <= parts(panel)
    assert panel._control.sentence == "Peak 221.0 MB → 74.2 MB: 146.8 MB less (-66.4 %)"
    assert panel._control.details == [
        "At the peak: activations 189.0 MB → 43.8 MB",
        "The price: layers were computed again 4 times in the backward pass, 6.00 ms",
        "Counted: live tensor bytes on cpu, counted exactly",
    ]
    assert [row[0] for row in panel._table.rows] == [layer.name for layer in LEAN.layers]
    assert (
        panel._figure.label
        == "Memory within a step, fp32 against fp16 + 4 layers checkpointed: peak 221.0 MB → 74.2 MB: 146.8 MB less (-66.4 %)"
    )
    panel.show(dataclasses.replace(BOTH, shown=("fp32",)))
    assert {number for number, _ in parts(panel)} == {0}
    assert panel._control.sentence == "Peak 221.0 MB in backward"
    assert panel._control.details[0].startswith("At the peak: activations 189.0 MB, optimizer state 18.0 MB, parameters 9.0 MB")
    panel.show(MemoryState())
    assert (parts(panel), panel._table.rows, panel._control.sentence) == (set(), [], "")


def test_an_equal_state_is_neither_drawn_nor_sent_again(state, messages, asked, monkeypatch) -> None:
    panel = panel_of(asked, BOTH, state())
    messages.clear()
    drawn: list[Any] = []
    monkeypatch.setattr("amp_widgets.widgets.memory_panel.mountain_figure", lambda *args, **options: drawn.append(args))
    panel.show(dataclasses.replace(BOTH))
    panel.render(state(step=7))
    assert (messages.sent, drawn) == ([], [])
    panel.show(dataclasses.replace(BOTH, pending=True))
    assert (messages.updates, drawn) == ([{"pending": True}], [])


def test_ticks_ask_for_settings_as_the_layer_tree_does(asked, state, layer) -> None:
    panel = panel_of(asked, BOTH, state(layers=tuple(layer(name=one.name) for one in LEAN.layers)))
    panel._table._handle_custom_msg({"layer": "layers.5", "on": True, "id": "1"}, [])
    assert asked == [("settings", {"checkpointed": ("layers.5",)})]


def test_the_next_step_is_asked_for_once_and_where_it_can_be(panel, asked) -> None:
    say(panel, profile=True)
    panel.show(MemoryState(pending=True))
    say(panel, profile=True)
    panel.show(MemoryState(why_not="the model is compiled"))
    say(panel, profile=True)
    assert asked == [("profile", {})]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([LEAN.label, "fp32"], [("show", {"labels": (LEAN.label, "fp32")})]),
        (["fp32"], [("show", {"labels": ("fp32",)})]),
        (["fp32", LEAN.label], []),  # is shown
        (["unknown"], []),
        ([], []),
        ("fp32", []),
    ],
)
def test_what_is_chosen_is_asked_for_by_label(panel, asked, labels: Any, expected: list[Any]) -> None:
    panel.show(BOTH)
    say(panel, show=labels)
    assert asked == expected


def test_a_report_is_shown_and_bounded(panel) -> None:
    panel.show(MemoryState(report=tuple(f"line {i}" for i in range(1000))))
    assert panel._control.report == [f"line {i}" for i in range(MOST_REPORT_LINES)]
    panel.show(MemoryState())
    assert panel._control.report == []


def test_locked_it_asks_for_nothing(panel, asked) -> None:
    panel.show(BOTH)
    panel.lock()
    say(panel, profile=True)
    assert asked == []
    assert parts(panel)


def test_closing_frees_the_profiles_and_every_widget(asked, state) -> None:
    before = set(ipywidgets.widgets.widget._instances)
    profile = gpt_step()
    panel = panel_of(asked, MemoryState(profiles=(profile,)), state())
    kept = weakref.ref(panel), weakref.ref(profile.bytes_by_kind)
    assert set(ipywidgets.widgets.widget._instances) - before
    panel.close()
    panel.close()
    left = set(ipywidgets.widgets.widget._instances) - before
    assert {type(ipywidgets.widgets.widget._instances[one]).__name__ for one in left} <= {"PlotlyAsset", "Layout"}
    del panel, profile
    gc.collect()
    assert [one() for one in kept] == [None, None]


# ---- the head in a page ----


@pytest.fixture
def show(page, messages, asked):  # noqa: F811
    def put(shown: MemoryState) -> View:
        return View(page, MemoryControl(lambda name, /, **values: asked.append((name, values)), shown), messages)

    return put


def test_the_button_says_what_will_happen(show, asked) -> None:
    view = show(MemoryState())
    view.role("button", "Profile the next step").click()
    assert view.role("button", "Profiling the next step …").is_disabled()
    view.sync()
    assert asked == [("profile", {})]
    view.control.show(MemoryState(pending=True))
    view.to_page()
    assert view.role("button", "Profiling the next step …").is_disabled()
    view.control.show(MemoryState(why_not="the model is compiled: <b>only</b> boundaries are read"))
    view.to_page()
    assert view.role("button", "Profile the next step").is_disabled()
    assert view.page.get_by_text("<b>only</b>").is_visible()


def test_before_and_after_are_chosen_and_exchanged(show, asked) -> None:
    view = show(BOTH)
    before, after = view.page.get_by_role("combobox", name="Before"), view.page.get_by_role("combobox", name="After")
    assert (before.input_value(), after.input_value()) == ("=fp32", f"={LEAN.label}")
    assert before.locator("option").all_inner_texts()[1:] == [
        "fp32 (step 0, peak 221.0 MB)", "fp16 + 4 layers checkpointed (step 0, peak 74.2 MB)",
    ]  # fmt: skip
    view.role("button", "Exchange before and after").click()
    assert after.input_value() == "=fp32"  # at once, also where the kernel is busy
    view.sync()
    before.select_option(index=0)
    view.sync()
    assert asked == [("show", {"labels": (LEAN.label, "fp32")}), ("show", {"labels": (LEAN.label,)})]


def test_a_label_may_be_called_none(show, asked) -> None:
    view = show(MemoryState(profiles=(dataclasses.replace(FP32, label="none"), LEAN), shown=("none", LEAN.label)))
    assert view.page.get_by_role("combobox", name="Before").input_value() == "=none"


def test_one_step_needs_no_choice(show) -> None:
    view = show(MemoryState(profiles=(FP32,)))
    assert not view.page.get_by_role("combobox", name="Before").is_visible()
    view.control.show(MemoryState())
    view.to_page()
    assert not view.page.get_by_role("combobox", name="After").is_visible()


def test_the_report_is_an_alert_and_text(show) -> None:
    evil = "<img src=x onerror='window.harmed = 1'>"
    view = show(MemoryState(profiles=(dataclasses.replace(FP32, label=evil, notes=(evil,)),), report=("Out of memory", evil)))
    assert view.page.get_by_role("alert").locator("p").all_inner_texts() == ["Out of memory", evil]
    assert view.page.locator("body img").count() == 0
    assert view.page.evaluate("window.harmed") is None
    view.control.show(MemoryState())
    view.to_page()
    assert view.page.get_by_role("alert").count() == 0
