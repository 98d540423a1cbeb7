from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import ipywidgets
import pytest

from amp_widgets.analysis.gradients import GradientRange, percent
from amp_widgets.analysis.overflow import Diagnosis, RepeatedSkips, SkippedStep, SkipRun
from amp_widgets.core.gradient_counts import INF_BUCKET, GradientCounts
from amp_widgets.widgets.gradient_control import MOST_SKIPS
from amp_widgets.widgets.gradient_panel import NOTHING_YET, GradientPanel
from amp_widgets.widgets.gradient_state import GradientState
from amp_widgets.widgets.gradient_table import MOST_ROWS
from tests.charts.gradient_step import gpt_range, row

SAMPLED = gpt_range()
STEP = SkippedStep(step=4, scale=2.0**16, loss_finite=True, layer="a", parameter="a.weight", nonfinite=1, of=2, nan=False)


@pytest.fixture
def asked() -> list[Any]:
    return []


@pytest.fixture
def panel(asked, state) -> GradientPanel:
    def command(name: str, /, **values: Any) -> None:
        asked.append((name, values))

    return GradientPanel(command, lambda **changes: asked.append(("settings", changes)), None, state(autocast="fp16"))


def say(part: Any, **message: Any) -> None:
    part._handle_custom_msg({**message, "id": "1"}, [])


def bars(panel: GradientPanel) -> int:
    return sum(len(trace["x"]) for trace in panel._figure.figure.get("data", ()))


def test_before_a_step_was_sampled(panel: GradientPanel) -> None:
    assert panel._figure.note == NOTHING_YET
    assert not panel._control.sampled
    assert panel._table.rows == []
    assert repr(panel) == "<amp_widgets gradient panel: no step sampled yet>"
    assert "nothing is run" in panel._control.explanation


def test_a_sampled_step(panel: GradientPanel) -> None:
    panel.show(GradientState(range=SAMPLED))
    control = panel._control
    shares = SAMPLED.shares(1.0)
    assert (control.sampled, control.exponent) == (True, 0)
    assert control.sentences[0].startswith(f"fp16 at scale 1 (no scaling): {shares.flushed:.0%}".replace("%", " %"))
    assert control.measured.startswith("Step 240, without loss scaling: 1,245,184 gradients")
    assert control.suggested == 18
    assert len(panel._table.rows) == 19
    assert panel._table.rows[0][:2] == ["layers.0.attention", "fp32"]
    assert "19 layers" in panel._table.summary
    assert panel._figure.figure["data"]
    assert "Gradients of step 240" in repr(panel)


def test_the_slider_is_a_matter_of_the_panel_alone(panel: GradientPanel, asked: list[Any]) -> None:
    panel.show(GradientState(range=SAMPLED))
    say(panel._control, exponent=12)
    assert asked == []
    assert (panel.exponent, panel._control.exponent) == (12, 12)
    assert "scale 2^12" in panel._control.sentences[0]
    assert panel._table.rows[0][2][0] != "51 %"
    say(panel._control, exponent=41)
    say(panel._control, exponent="12")
    assert panel.exponent == 12
    panel.show(GradientState(range=gpt_range(step=250, scale=2.0**4)))  # a choice holds
    assert panel.exponent == 12


def test_without_a_choice_the_scale_is_that_of_the_step(panel: GradientPanel) -> None:
    panel.show(GradientState(range=gpt_range(scale=2.0**10)))
    assert panel.exponent == 10
    panel.show(GradientState(range=gpt_range(scale=2.0**11)))
    assert panel._control.exponent == 11
    assert "at loss scale 2^11" in panel._control.measured
    panel.show(GradientState(range=gpt_range(scale=0.25)))
    assert panel.exponent == 0


def test_what_is_asked_for(panel: GradientPanel, asked: list[Any]) -> None:
    say(panel._control, use=True)  # nothing is shown that could be used
    say(panel._control, sample=True)
    say(panel._control, every=10)
    say(panel._control, every=-1)
    panel.show(GradientState(range=SAMPLED, pending=True, every=10))
    say(panel._control, sample=True)
    say(panel._control, every=10)
    say(panel._control, every=0)
    say(panel._control, exponent=16)
    say(panel._control, use=True)
    assert asked == [("sample", {}), ("every", {"steps": 10}), ("every", {"steps": 0}), ("settings", {"init_scale": 65536.0})]


def test_which_scale_is_set(panel: GradientPanel, state) -> None:
    panel.render(state(autocast="fp16", init_scale=2.0**12))
    assert (panel._control.requested, panel._control.usable) == (12, "In force from the next step")
    panel.render(state(autocast="fp16", init_scale=1000.0))
    assert panel._control.requested is None
    panel.render(state(autocast="bf16"))
    assert "bf16, which does not scale" in panel._control.usable
    panel.render(state(autocast="fp16", scaling=False))
    assert "off" in panel._control.usable


def test_the_scale_that_is_set_is_the_live_one(panel: GradientPanel, state) -> None:
    panel.render(state(autocast="fp16", init_scale=2.0**19, scale=2.0**18))  # it has backed off
    assert panel._control.requested == 18
    panel.render(state(autocast="fp16", init_scale=2.0**19, scale=2.0**18, pending={"init_scale": 2.0**19}))
    assert panel._control.requested == 19
    panel.render(state(autocast="fp16", init_scale=2.0**19, scale=3.0))
    assert panel._control.requested is None
    panel.render(state(autocast="bf16", init_scale=2.0**19))  # there is no live one
    assert panel._control.requested == 19


def test_the_scale_for_the_model_does_not_depend_on_the_filter(panel: GradientPanel) -> None:
    panel.show(GradientState(range=SAMPLED))
    control = panel._control
    suggested, safe = control.suggested, control.safe
    say(panel._table, filter="head")
    assert control.suggested == suggested
    assert control.safe == f"For the whole model: {safe[0].lower()}{safe[1:]}"
    assert control.sentences[0].startswith("Layers that match head: fp16 at scale 1")
    say(panel._table, filter="nonsense")
    assert control.sentences == ["No layer matches nonsense"]
    assert panel._figure.note == "No layer matches nonsense"
    assert (control.suggested, control.sampled) == (suggested, True)
    say(panel._table, filter="")
    assert (control.suggested, control.safe) == (suggested, safe)


def test_a_filter_holds_for_all_of_it(panel: GradientPanel) -> None:
    panel.show(GradientState(range=SAMPLED))
    everything = panel._control.sentences
    say(panel._table, filter=" layers.*.mlp.fc1 ")
    assert len(panel._table.rows) == 6
    assert panel._table.summary == "6 of 19 layers"
    assert panel._control.sentences != everything
    say(panel._table, filter="nothing like it")
    assert panel._table.rows == []
    assert panel._figure.figure == {}
    say(panel._table, filter="")
    assert panel._control.sentences == everything


def test_many_layers_are_not_all_sent(panel: GradientPanel) -> None:
    panel.show(GradientState(range=gpt_range(blocks=100)))
    assert len(panel._table.rows) == MOST_ROWS
    assert panel._table.summary == f"the {MOST_ROWS} worst of 301 layers"


def test_overflow_stands_out(panel: GradientPanel) -> None:
    counts = GradientCounts(step=3, scale=2.0**10, rows=(row("a", 20), row("b", -40), row("c", 0, infs=7)))
    panel.show(GradientState(range=GradientRange.of(counts)))
    rows = {one[0]: one for one in panel._table.rows}
    assert [one[0] for one in panel._table.rows] == ["c", "a", "b"]
    assert rows["a"][4][3] is True
    assert rows["b"][4][0] is True
    assert rows["c"][5] == "0.2 % inf or NaN"
    assert counts.rows[2].counts[INF_BUCKET] > 0
    assert "sample a step at a lower one" in panel._control.safe
    assert panel._control.sentences[0].startswith("< 0.1 % of the gradients were inf or NaN")


def test_nothing_but_zeros_and_no_safe_scale(panel: GradientPanel) -> None:
    panel.show(GradientState(range=GradientRange.of(GradientCounts(step=3, scale=1.0, rows=(row("a", 40),)))))
    assert panel._control.suggested is None
    assert panel._control.safe.startswith("No loss scale")
    panel.show(GradientState(range=GradientRange.of(GradientCounts(step=4, scale=1.0, rows=()))))
    assert "no gradient" in panel._control.sentences[0]


def test_skips_and_what_is_wrong(panel: GradientPanel) -> None:
    runs = tuple(SkipRun(steps=(STEP,), scale_after=2.0**15) for _ in range(MOST_SKIPS + 3))
    wrong = Diagnosis(name="scale below 1", sentence="seen", cause="because")
    panel.show(GradientState(skips=runs, diagnoses=(wrong,), why_not="it is compiled", trains=False))
    assert len(panel._control.skips) == MOST_SKIPS + 1
    assert panel._control.skips[0] == "3 earlier skipped steps"
    assert panel._control.skips[1].startswith("Step 4 was skipped at scale 2^16: first overflow in a.weight")
    assert panel._control.diagnoses == [["seen", "because"]]
    assert (panel._control.why_not, panel._control.trains) == ("it is compiled", False)


def test_an_equal_state_is_neither_drawn_nor_sent_again(state, messages, asked, monkeypatch) -> None:
    shown = GradientState(range=SAMPLED, every=10, skips=(SkipRun(steps=(STEP,), scale_after=1.0),))
    panel = GradientPanel(lambda *_, **__: None, lambda **_: None, shown, state())
    drawn: list[Any] = []
    monkeypatch.setattr(panel._figure, "show", lambda *_args, **_values: drawn.append(None))
    messages.sent.clear()
    panel.show(GradientState(range=SAMPLED, every=10, skips=(SkipRun(steps=(STEP,), scale_after=1.0),)))
    panel.render(state())
    assert (messages.sent, drawn) == ([], [])
    panel.show(GradientState(range=gpt_range(step=250), every=10))
    assert len(drawn) == 1


def test_locked_and_closed(panel: GradientPanel, asked: list[Any]) -> None:
    panel.show(GradientState(range=SAMPLED))
    panel.lock()
    say(panel._control, sample=True)
    say(panel._table, filter="head")
    assert asked == []
    assert len(panel._table.rows) == 19
    before = len(ipywidgets.widgets.widget._instances)
    panel.close()
    panel.close()
    assert len(ipywidgets.widgets.widget._instances) < before - 3


def test_a_closed_panel_keeps_nobody_alive(state) -> None:
    class Owner:
        def command(self, *_args: Any, **_values: Any) -> None: ...
        def request(self, **_changes: Any) -> None: ...

    owner = Owner()
    panel = GradientPanel(owner.command, owner.request, GradientState(range=SAMPLED), state())
    gone = weakref.ref(owner)
    panel.close()
    del owner
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(("zeros", "first", "suggests"), [(2000, False, True), (9000, True, False), (10**6, True, False)])
def test_where_most_had_vanished_that_is_said_first_and_where_nearly_all_no_scale_is_suggested(
    panel, zeros: int, first: bool, suggests: bool
) -> None:
    rows = (row("head", -16.0, zeros=zeros),)
    found = GradientRange.of(GradientCounts(step=3, scale=1.0, rows=rows))
    panel.show(GradientState(range=found))
    control = panel._control
    said = f"{percent(found.shares().zeros)} of the gradients were zero already; of the others, fp16 at scale 1 (no scaling): "
    assert control.sentences[0].startswith(said) is first
    assert ("of the gradients become" in control.sentences[0]) is not first
    assert (control.suggested is not None) is suggests
    assert control.safe.startswith("Which scale would suit is not known, as so many were zero") is not suggests
    assert ("sample one in fp32 or bf16" in control.safe) is not suggests


def test_a_weight_that_would_overflow_is_told_in_the_sentence_and_in_the_table(panel: GradientPanel) -> None:
    one = row("head", -16.0)
    weight = dataclasses.replace(one, family="parameter", dtype="fp32", peaks={"weight": 30.0, "bias": 1.0})
    found = GradientRange.of(GradientCounts(step=3, scale=1.0, rows=(row("stem", -12.0), one, weight)))
    panel.show(GradientState(range=found))
    say(panel._control, exponent=11)
    assert panel._control.sentences[0].endswith("none overflows")
    assert [shown[0] for shown in panel._table.rows] == ["head", "stem"]  # of head more lose bits
    say(panel._control, exponent=12)
    assert panel._control.sentences[0].endswith("but the gradient of head.weight would: the step would be skipped")
    shown = {shown[0]: shown for shown in panel._table.rows}
    assert shown["head"][2][3] == "0 %, its weight"
    assert (shown["head"][4][3], shown["stem"][4][3]) == (True, False)
    assert panel._control.suggested == 10  # 30 x 2^11 fits, and half of that is what is asked for


def test_a_sample_is_said_to_be_one(panel: GradientPanel) -> None:
    panel.show(GradientState(range=SAMPLED))
    total = SAMPLED.total
    assert panel._control.measured.endswith(f"shares from a sample of {total.looked_at:,} of 1,245,184")
    assert panel._table.rows[0][3] == f"{SAMPLED.worst()[0][0].looked_at:,} of 65,536"


def test_repeated_skips_are_one_line(panel: GradientPanel) -> None:
    steps = tuple(dataclasses.replace(STEP, step=3 * i) for i in range(30))
    panel.show(GradientState(skips=(RepeatedSkips(steps=steps),)))
    assert panel._control.skips == [
        "30 single skips from step 0 to 87, every third step, at scale 2^16: first overflow in a.weight"
    ]


def test_the_examples_are_of_the_demos_that_show_it(panel: GradientPanel) -> None:
    assert "%amp demo underflow" in panel._control.example
    assert "%amp demo overflow" in panel._control.skips_explained[1]
