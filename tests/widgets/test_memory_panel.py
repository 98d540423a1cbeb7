from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import ipywidgets
import pytest

from amp_widgets.charts.reserved import EXPLAINED, RETRIES
from amp_widgets.widgets.memory_control import MOST_REPORT_LINES, MemoryControl
from amp_widgets.widgets.memory_panel import NOTHING_YET, MemoryPanel
from amp_widgets.widgets.memory_state import MemoryState, rounded_down
from tests.charts.gpt_step import StepProfile, Writer, dead_step, gpt_step, with_allocator
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
        ((), (FP32, LEAN)),
        (("fp32",), (FP32,)),
        (("fp32", LEAN.label), (FP32, LEAN)),
        ((LEAN.label, "fp32"), (LEAN, FP32)),
        (("gone", "fp32"), (FP32, LEAN)),
        (("fp32", "fp32"), (FP32,)),
        (("gone",), (FP32, LEAN)),
    ],
)
def test_the_chosen_steps(shown: tuple[str, ...], chosen: tuple[StepProfile, ...]) -> None:
    assert MemoryState(profiles=(FP32, LEAN), shown=shown).chosen == chosen
    assert MemoryState(shown=shown).chosen == ()


def again(profile: StepProfile, step: int) -> StepProfile:
    return dataclasses.replace(profile, label=f"{profile.label} (step {step})", step=step)


OTHER = gpt_step("fp16 + 4 layers checkpointed (step 50)", half=True, checkpointed=(2, 3, 4, 5))
DEAD = dead_step()
OF_CUDA = dataclasses.replace(DEAD, cause="allocator", device="cuda:0")


@pytest.mark.parametrize(
    ("profiles", "chosen"),
    [
        ((FP32,), (FP32,)),
        ((FP32, again(FP32, 9)), (1,)),  # the same settings: nothing to compare
        ((FP32, LEAN, again(LEAN, 9)), (0, 2)),
        ((FP32, LEAN, again(FP32, 9)), (1, 2)),
        ((LEAN, OTHER), (0, 1)),  # other layers are other settings, though their number is the same
    ],
)
def test_by_itself_the_newest_is_compared_with_the_last_of_other_settings(profiles: Any, chosen: Any) -> None:
    expected = tuple(profiles[i] if isinstance(i, int) else i for i in chosen)
    assert MemoryState(profiles=profiles).chosen == expected


def test_a_choice_holds_until_there_is_a_newer_step_and_of_two_the_first_stays() -> None:
    newest = again(FP32, 9)
    more = MemoryState(profiles=(FP32, LEAN, newest))
    for shown, after in (
        (("fp32", LEAN.label), ("fp32", newest.label)),
        ((LEAN.label, "fp32"), (LEAN.label, newest.label)),
        (("fp32",), ()),
        ((), ()),
    ):
        state = dataclasses.replace(more, shown=shown)
        assert state.shown_after((FP32, LEAN)) == after
        assert state.shown_after((LEAN, newest)) == shown  # only an old one was dropped


def test_a_step_that_ran_out_of_memory_is_shown_alone_and_then_as_before() -> None:
    early, late = dataclasses.replace(FP32, step=3), dataclasses.replace(LEAN, step=12)
    state = MemoryState(profiles=(early,), death=DEAD)
    assert state.offered == (early, DEAD.profile)
    assert state.chosen == (DEAD.profile,)
    assert list(state.deaths) == [DEAD.profile.label]
    assert state.deaths[DEAD.profile.label].place == "in forward of layers.3.mlp"
    state = MemoryState(profiles=(early, late), death=DEAD)  # the step is tried again under its number
    assert state.offered == (early, DEAD.profile, late)
    assert state.chosen == (DEAD.profile, late)
    assert MemoryState(profiles=(early,), death=dataclasses.replace(DEAD, profile=None)).chosen == (early,)


@pytest.mark.parametrize(
    ("budget", "death", "shown", "expected"),
    [
        (None, None, (), None),
        (2e8, None, (), ("budget", 2e8)),
        (2e8, DEAD, (), ("budget", 2e8)),
        (None, DEAD, (), ("budget then", 150e6)),
        (150e6, DEAD, (), ("budget", 150e6)),
        (None, DEAD, ("fp32",), None),
        (None, DEAD, ("fp32", DEAD.profile.label), ("budget then", 150e6)),
        (None, DEAD, (DEAD.profile.label, "fp32"), None),  # what is drawn beside it is a step of now
        (2e8, DEAD, (DEAD.profile.label, "fp32"), ("budget", 2e8)),
        (None, OF_CUDA, (DEAD.profile.label, "fp32"), ("memory of cuda:0", 150e6)),
        (None, OF_CUDA, (), ("memory of cuda:0", 150e6)),
        (None, dataclasses.replace(DEAD, limit_bytes=float("nan")), (), None),
    ],
)
def test_the_ceiling_is_the_budget_or_what_the_shown_step_died_of(budget: Any, death: Any, shown: Any, expected: Any) -> None:
    ceiling = MemoryState(profiles=(FP32,), budget_bytes=budget, death=death, shown=shown).ceiling
    assert (None if ceiling is None else (ceiling.name, ceiling.size_bytes)) == expected


@pytest.mark.parametrize(
    ("fitted", "text"),
    [
        (0, ""),
        (1, "Step 12 ran out of memory; since then 1 step fitted"),
        (10, "Step 12 ran out of memory; since then 10 steps fitted"),
        (11, "Step 12 ran out of memory; since then more than 10 steps fitted"),
        (5000, "Step 12 ran out of memory; since then more than 1,000 steps fitted"),
    ],
)
def test_steps_that_fitted_since_are_counted_in_ever_larger_numbers(fitted: int, text: str) -> None:
    assert MemoryState(death=DEAD, fitted=rounded_down(fitted)).fitted_text == text


# ---- the panel ----


def test_without_a_profile_it_says_what_will_be_there(panel) -> None:
    assert panel._figure.figure == {}
    assert panel._figure.note == NOTHING_YET
    assert panel._table.rows == []
    assert repr(panel) == "<amp_widgets memory panel: no step profiled yet>"


def test_two_steps_are_compared_in_the_figure_in_words_and_the_table_is_of_the_second(panel) -> None:
    panel.show(BOTH)
    assert {(0, "outline"), (1, "total"), (1, "recompute")} <= parts(panel)
    assert panel._control.sentence == "Peak 221.0 MB → 74.2 MB, 146.8 MB less (-66.4 %)"
    assert panel._control.details == [
        "At the peak: activations 189.0 MB → 43.8 MB",
        "The price: layers were computed again 4 times in the backward pass, 6.00 ms",
        "Counted: live tensor bytes on cpu, counted exactly",
    ]
    assert [row[0] for row in panel._table.rows] == [layer.name for layer in LEAN.layers]
    assert (
        panel._figure.label
        == "Memory within a step, fp32 against fp16 + 4 layers checkpointed: peak 221.0 MB → 74.2 MB, 146.8 MB less (-66.4 %)"
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
    panel.show(MemoryState(why_not="the step broke off"))  # the next one may not
    say(panel, profile=True)
    assert asked == [("profile", {})] * 2


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


def test_a_report_is_shown_and_bounded_until_it_is_dismissed(panel, asked) -> None:
    say(panel, dismiss=True)
    panel.show(MemoryState(death=dataclasses.replace(DEAD, report=tuple(f"line {i}" for i in range(1000)))))
    assert panel._control.report == [f"line {i}" for i in range(MOST_REPORT_LINES)]
    say(panel, dismiss=True)
    assert asked == [("dismiss", {})]
    panel.show(MemoryState())
    assert panel._control.report == []


def test_a_death_is_drawn_with_its_ceiling_and_steps_that_fit_draw_nothing_anew(panel, messages, monkeypatch) -> None:
    panel.show(MemoryState(profiles=(FP32,), death=DEAD, budget_bytes=150e6))
    assert panel._control.sentence == (
        "Out of memory in forward of layers.3.mlp: 143.0 MB in use and 8.0 MB more requested, budget 150.0 MB"
    )
    assert panel._control.details[0].startswith("When memory ran out: activations 115.0 MB")
    assert {shape.get("name") for shape in panel._figure.figure["layout"]["shapes"]} >= {"ceiling", "requested 0"}
    assert panel._control.options[-1] == [DEAD.profile.label] * 2
    drawn: list[Any] = []
    monkeypatch.setattr("amp_widgets.widgets.memory_panel.mountain_figure", lambda *args, **options: drawn.append(args))
    panel.show(MemoryState(profiles=(FP32,), death=DEAD, budget_bytes=150e6, fitted=1))
    assert drawn == []
    assert panel._control.fitted == "Step 12 ran out of memory; since then 1 step fitted"


def test_proposed_layers_are_marked_and_asked_for_with_those_that_are_ticked(asked, state, layer) -> None:
    dashboard = state(layers=tuple(layer(name=one.name) for one in FP32.layers), checkpointed=("layers.3",))
    panel = panel_of(asked, MemoryState(death=DEAD), dashboard)
    assert panel._control.proposed == ["layers.0", "layers.1"]
    assert [panel._table.rows[i][0] for i in panel._table.proposed] == ["layers.0", "layers.1"]
    say(panel, checkpoint=True)
    assert asked == [("settings", {"checkpointed": ("layers.0", "layers.1", "layers.3")})]
    panel.render(dataclasses.replace(dashboard, pending={"checkpointed": ("layers.0", "layers.1", "layers.3")}))
    assert panel._control.proposed == []
    assert panel._control.what_next == "Checkpointing of the 2 proposed layers is requested; run the cell of your loop again"
    say(panel, checkpoint=True)
    assert len(asked) == 1
    panel.show(MemoryState())
    assert panel._table.proposed == []


@pytest.mark.parametrize(
    ("run", "in_cell", "then"),
    [
        ("failed", False, "; press Start to try again"),
        ("stopped", False, "; press Start to try again"),
        ("paused", False, "; press Resume to try again"),
        ("running", False, ": the next step tries again with it"),
        ("none", True, ": the next step tries again with it"),
        ("none", False, "; run the cell of your loop again"),
    ],
)
def test_when_the_proposal_was_asked_for_it_says_what_next(asked, state, run: Any, in_cell: bool, then: str) -> None:
    death = dataclasses.replace(DEAD, layers_to_checkpoint=("layers.1",))
    shown = MemoryState(death=death)
    panel = panel_of(asked, shown, state(run=run, in_cell=in_cell))
    assert panel._control.what_next == ""
    panel.render(state(run=run, in_cell=in_cell, pending={"checkpointed": ("layers.1",)}))
    assert (panel._control.proposed, panel._control.what_next) == ([], f"Checkpointing of layers.1 is requested{then}")
    panel.render(state(run=run, in_cell=in_cell, checkpointed=("layers.1",)))
    assert panel._control.what_next == f"Checkpointing of layers.1 is in force{then}"
    panel.show(dataclasses.replace(shown, fitted=1))
    assert panel._control.what_next == ""


def test_what_a_step_that_died_is_made_of_is_that_of_its_end(panel) -> None:
    write = Writer()
    write.live |= {"parameter": 30_000, "gradient": 30_000}
    write.point("zero_grad", "", "", temporary=0)
    write.point("zero_grad", "", "", gradient=-30_000)
    write.point("forward", "a", "aten::mm", activation=5_000)
    step = write.profile("out of memory at step 12 (fp32)", step=12)
    death = dataclasses.replace(DEAD, profile=step, requested_bytes=10_000.0, limit_bytes=42_000.0, layer="a")
    panel.show(MemoryState(profiles=(dataclasses.replace(FP32, step=3),), death=death, budget_bytes=42e3))
    assert panel._control.details[:2] == [
        "When memory ran out: parameters 30.0 kB, activations 5.0 kB",
        "Earlier in the step 60.0 kB were held, more than the budget of 42.0 kB: only what an operator asks for is measured "
        "against it, not what was there before",
    ]
    later = dataclasses.replace(LEAN, step=13)
    panel.show(MemoryState(profiles=(later,), death=death, budget_bytes=None))
    assert panel._control.sentence == "Out of memory at 45.0 kB (budget then 42.0 kB) → peak 74.2 MB; no budget is set now"
    assert panel._control.details[0].startswith(
        "When memory ran out, and at the peak, which is in backward: activations 5.0 kB → 43.8 MB"
    )
    assert "ceiling" not in {shape.get("name") for shape in panel._figure.figure["layout"]["shapes"]}


def test_a_peak_that_has_moved_elsewhere_is_said_to(panel) -> None:
    def step(label: str, optimizer: int) -> StepProfile:
        write = Writer()
        write.live["parameter"] = 1000
        write.point("forward", "a", "aten::mm", activation=15_000)
        write.point("backward", "a", "aten::mm", activation=-14_996)
        write.point("optimizer", "", "aten::add_", temporary=optimizer)
        return write.profile(label)

    panel.show(MemoryState(profiles=(step("one", 5), step("two", 17_000)), shown=("one", "two")))
    assert panel._control.details[0] == (
        "At the peak, which was in forward of a and is now in optimizer: temporary 0 B → 17.0 kB, activations 15.0 kB → 4 B"
    )


@pytest.mark.parametrize(
    ("label", "step", "text"),
    [
        ("fp32", 2, "fp32 (step 2, peak 221.0 MB)"),
        ("fp32 (step 55)", 55, "fp32 (step 55, peak 221.0 MB)"),
        ("fp32 (step 55, 2)", 55, "fp32 (step 55, no. 2, peak 221.0 MB)"),
        ("mine (step 3)", 55, "mine (step 3) (peak 221.0 MB)"),
        ("fp32", -1, "fp32 (peak 221.0 MB)"),
        ("fp32", 12345, "fp32 (step 12,345, peak 221.0 MB)"),
    ],
)
def test_profiles_are_offered_in_one_form(panel, label: str, step: int, text: str) -> None:
    panel.show(MemoryState(profiles=(dataclasses.replace(FP32, label=label, step=step),)))
    assert panel._control.options == [[label, text]]


def test_the_table_says_of_which_step_it_is(panel) -> None:
    panel.show(MemoryState(profiles=(FP32, dataclasses.replace(again(LEAN, 12)))))
    assert panel._table.caption == "of step 12: fp16 + 4 layers checkpointed"
    panel.show(MemoryState(profiles=(dataclasses.replace(FP32, step=-1),)))
    assert panel._table.caption == "of a step of its own: fp32"
    panel.show(MemoryState(death=DEAD))
    assert panel._table.caption == "of step 12, until it ran out of memory"
    panel.show(MemoryState())
    assert panel._table.caption == ""


def test_another_budget_is_drawn(panel) -> None:
    panel.show(MemoryState(profiles=(FP32,)))
    assert "ceiling" not in {shape.get("name") for shape in panel._figure.figure["layout"]["shapes"]}
    panel.show(MemoryState(profiles=(FP32,), budget_bytes=2e8))
    assert "ceiling" in {shape.get("name") for shape in panel._figure.figure["layout"]["shapes"]}


def test_the_allocator_is_explained_where_it_is_seen(panel) -> None:
    step = with_allocator(FP32, retries=2)
    panel.show(MemoryState(profiles=(step,)))
    [readings] = step.allocator
    assert panel._control.details[1:4] == [readings.text, EXPLAINED, RETRIES]
    panel.show(MemoryState(profiles=(step, with_allocator(LEAN))))
    assert [text for text in panel._control.details if readings.text in text] == [
        f"fp32, {readings.text}", f"{LEAN.label}, {readings.text}",
    ]  # fmt: skip


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
    view.control.show(MemoryState(pending=True, trains=False))
    view.to_page()
    assert view.role("button", "The next step will be profiled when training goes on").is_disabled()
    view.control.show(MemoryState(why_not="the model is compiled: <b>only</b> boundaries are read"))
    view.to_page()
    assert view.role("button", "Profile the next step").is_enabled()
    text = "The last one was not profiled: the model is compiled: <b>only</b> boundaries are read"
    assert view.page.get_by_text(text).is_visible()


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
    assert view.page.get_by_role("combobox", name="Step").is_visible()
    view.control.show(MemoryState())
    view.to_page()
    assert view.page.get_by_role("combobox").count() == 0


def test_the_report_is_an_alert_and_text(show) -> None:
    evil = "<img src=x onerror='window.harmed = 1'>"
    death = dataclasses.replace(DEAD, profile=None, report=("Out of memory", evil))
    view = show(MemoryState(profiles=(dataclasses.replace(FP32, label=evil, notes=(evil,)),), death=death))
    alert = view.page.get_by_role("alert")
    assert alert.locator("summary").inner_text() == "Out of memory"
    assert alert.locator("p").all_inner_texts() == [evil]
    assert alert.locator("p").is_visible()
    assert view.page.locator("body img").count() == 0
    assert view.page.evaluate("window.harmed") is None
    view.control.show(MemoryState())
    view.to_page()
    assert view.page.get_by_role("alert").count() == 0
    assert not view.page.locator(".ampw-report").is_visible()


def test_when_steps_fit_again_the_report_is_folded_away_and_can_be_read(show, asked) -> None:
    view = show(MemoryState(death=DEAD))
    view.control.show(MemoryState(death=DEAD, fitted=2))
    view.to_page()
    summary, lines = view.page.locator(".ampw-report summary"), view.page.locator(".ampw-report p")
    assert view.page.get_by_role("alert").count() == 0
    assert summary.inner_text() == "Step 12 ran out of memory; since then 2 steps fitted"
    assert not lines.first.is_visible()
    summary.click()
    assert lines.all_inner_texts() == list(DEAD.report)
    view.control.show(MemoryState(death=DEAD, fitted=3))
    view.to_page()
    assert lines.first.is_visible()  # who opened it wants to read it
    another = dataclasses.replace(DEAD, report=("Step 15 ran out of memory", "Again"))
    view.control.show(MemoryState(death=another))
    view.to_page()
    assert view.page.get_by_role("alert").locator("p").all_inner_texts() == ["Again"]
    assert not view.page.get_by_role("button", name="Checkpoint", exact=False).is_visible()
    view.control.propose(["layers.1", "layers.2"])
    view.to_page()
    view.role("button", "Checkpoint the 2 proposed layers").click()
    view.role("button", "Dismiss").click()
    view.sync()
    assert asked == [("checkpoint", {}), ("dismiss", {})]


def test_why_a_step_was_not_profiled_is_not_said_beside_its_death(panel) -> None:
    panel.show(MemoryState(death=DEAD, why_not="the step did not end"))
    assert panel._control.why_not == ""
    panel.show(MemoryState(death=DEAD, fitted=1, why_not="the step did not end"))
    assert panel._control.why_not == "the step did not end"
    assert panel._control.proposed == []  # what is proposed is over when steps fit
