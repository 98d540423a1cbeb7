"""The panel of what precision costs: what it shows of a report, and what it asks for."""

from __future__ import annotations

import dataclasses
import gc
import math
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from amp_widgets.analysis.inspections import Inspection
from amp_widgets.analysis.precision import LayerPrecision, PrecisionReport
from amp_widgets.core.settings import Settings
from amp_widgets.widgets.precision_panel import PrecisionPanel, PrecisionState
from amp_widgets.widgets.state import DashboardState
from tests.widgets.gpt_dtypes import gpt_map, layers_of
from tests.widgets.test_page import View, one_page, page  # noqa: F401  # fixtures

EVIL = "<img src=x onerror='window.harmed = 1'>"
FORMATS = ("fp16", "bf16")


def layer(name: str, format: str, *errors: float, nonfinite: int = 0, kind: str = "Linear") -> LayerPrecision:
    """The errors are those of outputs, of the gradients that reach them, and of the parameters' gradients."""
    output, gradient, parameters = errors
    return LayerPrecision(
        name=name, type=kind, format=format, calls=1, output_error=output, gradient_error=gradient, parameter_error=parameters,
        nonfinite=nonfinite,
    )  # fmt: skip


LAYERS = (
    layer("head", "fp16", 1e-4, 2e-4, math.nan, nonfinite=1234),
    layer("norm", "bf16", 1e-3, 0.2, 0.1, kind="LayerNorm"),
    layer("blocks.0.mlp.0", "bf16", 4e-2, 0.05, 0.01),
    layer("norm", "fp16", 1e-8, 0.025, 0.012, kind="LayerNorm"),
    layer("head", "bf16", 1e-3, 2e-3, math.nan),
    layer("(model)", "bf16", 1e-3, 0.0, math.nan, kind="GPT"),
)


def report(layers: tuple[LayerPrecision, ...] = LAYERS, **changes: Any) -> PrecisionReport:
    given: dict[str, Any] = {
        "layers": layers, "reference": "fp32", "skipped": {}, "loss_errors": {"fp16": 1e-5, "bf16": 2e-4},
        "scales": {"fp32": 1.0, "fp16": 2.0**16, "bf16": 1.0},
    }  # fmt: skip
    return PrecisionReport(**(given | changes))


def dashboard(pending: dict[str, Any] | None = None, **settings: Any) -> DashboardState:
    return DashboardState(settings=Settings(**settings), layers=layers_of(gpt_map()), pending=pending)


@pytest.fixture
def asked() -> list[Any]:
    return []


@pytest.fixture
def panel(asked: list[Any], messages: Any) -> PrecisionPanel:
    return PrecisionPanel(
        lambda *command: asked.append(command),
        lambda **changes: asked.append(changes),
        PrecisionState(fp32=Inspection(result=report(), step=1234)),
        dashboard(),
    )


def say(panel: PrecisionPanel, **message: Any) -> None:
    panel._handle_custom_msg({**message, "id": "1"}, [])


def names(panel: PrecisionPanel, positions: list[int]) -> list[str]:
    return [panel.rows[i][0] for i in positions]


# ---- Python's side ----


def test_a_row_has_one_layer_in_all_formats_worst_first(panel: PrecisionPanel) -> None:
    assert names(panel, [0, 1, 2, 3]) == ["head", "norm", "blocks.0.mlp.0", "(model)"]
    assert panel.formats == [*FORMATS]
    head, norm, mlp, model = panel.rows
    assert head[3:5] == ["inf or NaN", "fp16: 1,234 inf or NaN"]
    assert head[5][0] == [1e-4, "1.0e-04", 50.0]  # half of the decades from 1e-8 to 1
    assert head[5][2] == [None, "–", 0]
    assert norm[1:5] == ["LayerNorm", norm[2], "2.0e-01", ""]
    assert [cell[1] for cell in norm[5]] == ["1.0e-08", "2.5e-02", "1.2e-02", "1.0e-03", "2.0e-01", "1.0e-01"]
    assert [cell[2] for cell in norm[5]][:2] == [0.0, pytest.approx(79.97, abs=0.04)]
    assert [cell[0] for cell in mlp[5]] == [None, None, None, 4e-2, 0.05, 0.01]  # it is not there in fp16
    assert model[5][4] == [0.0, "0", 0.0]
    assert (model[2], mlp[2] < norm[2] < head[2]) == (-1, True)  # in the model's order
    assert panel.reasons == ["", "", "", "the model itself: choose fp32 as autocast"]
    assert panel.caption == "Relative errors against fp32, before step 1,234"
    assert panel.sentences == ["fp16: loss 1.0e-05; loss scaled by 2^16.", "bf16: loss 2.0e-04."]


def test_what_is_infinite_can_be_sent_and_sorted(panel: PrecisionPanel) -> None:
    panel.show(PrecisionState(fp32=Inspection(result=report((layer("head", "bf16", math.inf, 1.5, math.nan),)))))
    assert panel.rows[0][5][3] == [1e300, "inf", 100.0]
    assert panel.rows[0][5][4] == [1.5, "1.5e+00", 100.0]
    assert panel.rows[0][3] == "inf"


def test_a_measurement_is_asked_for_once_and_of_the_chosen_reference(panel: PrecisionPanel, asked: list[Any]) -> None:
    say(panel, measure=True)
    panel.show(PrecisionState(fp32=Inspection(result=report(), pending=True)))
    say(panel, measure=True)
    assert asked == [("precision",)]
    say(panel, reference="fp64")
    assert (panel.rows, panel.caption, panel.pending) == ([], "", False)  # against fp64 nothing was measured yet
    say(panel, measure=True)
    assert asked[-1] == ("precision_fp64",)
    say(panel, reference="fp8")
    assert panel.reference == "fp64"
    say(panel, reference="fp32")
    assert (len(panel.rows), panel.pending) == (4, True)
    panel.show(PrecisionState(why_no_batch="there is no batch"))
    say(panel, measure=True)
    assert len(asked) == 2


def test_a_tick_asks_for_the_whole_set_in_the_models_order(panel: PrecisionPanel, asked: list[Any]) -> None:
    panel.render(dashboard(fp32_layers=("norm",)))
    say(panel, layer="head", on=True)
    say(panel, layer="blocks.0.mlp.0", on=True)
    say(panel, layer="norm", on=True)  # it is already
    say(panel, layer="norm", on=False)
    assert asked == [{"fp32_layers": ("norm", "head")}, {"fp32_layers": ("blocks.0.mlp.0", "norm")}, {"fp32_layers": ()}]


def test_ticks_are_what_is_in_force_and_what_waits(panel: PrecisionPanel) -> None:
    panel.render(dashboard(fp32_layers=("norm", "token"), pending={"fp32_layers": ["head", "norm", "token"]}))
    assert (names(panel, panel.in_force), names(panel, panel.requested)) == (["norm"], ["head", "norm"])


def test_what_is_kept_since_is_said_until_it_is_measured_again(panel: PrecisionPanel) -> None:
    assert panel.stale == ""
    panel.render(dashboard(fp32_layers=("head",)))
    assert panel.stale.startswith("Since this was measured other layers are kept in FP32")
    panel.show(PrecisionState(fp32=Inspection(result=report(fp32_layers=("head",)))))
    assert panel.stale == ""


def test_what_is_shown_already_is_not_sent_again(panel: PrecisionPanel, messages: Any) -> None:
    state = PrecisionState(fp32=Inspection(result=report(), step=5, why_not="precision_cost: the model is compiled"))
    panel.show(state)
    assert panel.why_not == "Precision not measured: the model is compiled"
    messages.clear()
    panel.show(dataclasses.replace(state))
    panel.render(dataclasses.replace(dashboard()))
    panel.show(PrecisionState(fp32=dataclasses.replace(state.fp32, result=report())))  # another object, the same to see
    assert messages.sent == []
    panel.show(PrecisionState(fp32=dataclasses.replace(state.fp32, pending=True)))
    assert [data["state"] for _, data in messages.sent] == [{"pending": True}]


def test_the_filter_is_that_of_the_layer_table(panel: PrecisionPanel) -> None:
    say(panel, filter="blocks.** NORM")
    assert names(panel, panel.matching or []) == ["norm", "blocks.0.mlp.0"]
    panel.show(PrecisionState(fp32=Inspection(result=report(LAYERS[1:]))))
    assert names(panel, panel.matching or []) == ["norm", "blocks.0.mlp.0"]
    say(panel, filter=" ")
    assert panel.matching is None


def test_other_messages_ask_for_nothing(panel: PrecisionPanel, asked: list[Any]) -> None:
    for message in ({"measure": False}, {"measure": 1.5}, {"layer": "head"}, {"reference": None}, {}):
        say(panel, **message)
    assert asked == []


def test_closed_it_asks_nobody_and_is_freed(asked: list[Any]) -> None:
    measured = report()
    panel = PrecisionPanel(asked.append, asked.append, PrecisionState(fp32=Inspection(result=measured)), dashboard())
    kept = [weakref.ref(panel), weakref.ref(panel.layout)]
    assert repr(panel) == "<amp_widgets precision panel: Relative errors against fp32, before step 0>"
    panel.close()
    panel._received(panel, {"measure": True}, [])
    panel._received(panel, {"layer": "head", "on": True}, [])
    assert asked == []
    assert (panel._report, panel._state.fp32.result) == (None, None)
    del panel
    gc.collect()
    assert [one() for one in kept] == [None, None]


def test_without_a_report_it_says_so(asked: list[Any]) -> None:
    assert repr(PrecisionPanel(asked.append, asked.append)) == "<amp_widgets precision panel: nothing measured yet>"


# ---- the page's side ----


def rows_of(view: View, index: int) -> list[str]:
    rows = view.page.locator("tbody tr:not([aria-hidden])")
    return list(rows.evaluate_all(f"rows => rows.map(row => row.children[{index}].textContent)"))


def sort(view: View, name: str) -> Any:
    header = view.page.get_by_role("columnheader", name=name, exact=True)
    header.get_by_role("button").click()
    return header


@pytest.fixture
def view(page: Any, panel: PrecisionPanel, messages: Any) -> Iterator[View]:  # noqa: F811
    page.set_viewport_size({"width": 1000, "height": 900})
    yield View(page, panel, messages)
    page.set_viewport_size({"width": 312, "height": 900})


def test_worst_first_and_sorted_by_any_column(view: View) -> None:
    worst = view.page.get_by_role("columnheader", name="worst")
    assert worst.get_attribute("aria-sort") == "descending"
    assert rows_of(view, 1) == ["head", "norm", "blocks.0.mlp.0", "(model)"]
    assert rows_of(view, 3)[:2] == ["inf or NaN", "2.0e-01"]
    header = sort(view, "bf16 output")
    assert header.get_attribute("aria-sort") == "descending"
    assert rows_of(view, 1)[0] == "blocks.0.mlp.0"
    sort(view, "fp16 gradient")
    assert rows_of(view, 1)[:2] == ["norm", "head"]  # the others are not known
    sort(view, "fp16 gradient")
    assert rows_of(view, 1)[:2] == ["head", "norm"]
    sort(view, "layer")
    assert rows_of(view, 1) == ["(model)", "blocks.0.mlp.0", "norm", "head"]
    sort(view, "worst")
    sort(view, "worst")
    assert rows_of(view, 1)[-1] == "head"


def test_a_bar_is_as_long_as_the_error_on_a_logarithmic_scale_and_has_its_number(view: View) -> None:
    cells = view.page.locator("tbody tr", has_text="norm").locator(".ampw-error-bar")
    assert cells.all_inner_texts() == ["1.0e-08", "2.5e-02", "1.2e-02", "1.0e-03", "2.0e-01", "1.0e-01"]
    lengths = cells.evaluate_all("all => all.map(one => parseFloat(getComputedStyle(one).backgroundSize))")
    assert lengths == pytest.approx([100 * (8 + math.log10(e)) / 8 for e in (1e-8, 0.025, 0.012, 1e-3, 0.2, 0.1)], abs=0.06)


def test_measuring_and_ticking_with_the_keyboard(view: View, asked: list[Any]) -> None:
    opened = view.page
    opened.get_by_role("button", name="Measure precision again").focus()
    opened.keyboard.press("Enter")
    assert opened.get_by_role("button", name="Measuring at the next step …").is_disabled()
    view.sync()
    assert asked == [("precision",)]
    opened.get_by_role("columnheader", name="bf16 weights").get_by_role("button").focus()
    opened.keyboard.press("Enter")
    assert rows_of(view, 1)[0] == "norm"
    view.role("checkbox", "keep norm in FP32").focus()
    opened.keyboard.press("ArrowDown")
    opened.keyboard.press("Space")
    assert opened.locator("tr.ampw-changed").count() == 1
    view.sync()
    assert asked[-1] == {"fp32_layers": ("blocks.0.mlp.0",)}
    assert opened.get_by_role("checkbox").count() == 3  # the model itself has none
    opened.get_by_role("combobox", name="compared with").select_option("fp64")
    view.sync()
    assert opened.get_by_text("Nothing was measured yet").is_visible()
    view.control.show(PrecisionState(fp64=Inspection(result=report(reference="fp64", loss_errors={"fp32": 0.0, "bf16": 0.1}))))
    view.to_page()
    assert opened.get_by_role("columnheader", name="fp32 output").count() == 1
    assert opened.get_by_role("columnheader", name="fp16 output").count() == 0


def test_markup_stays_text_and_reasons_are_said(view: View) -> None:
    evil = report((layer(EVIL, "bf16", 0.1, 0.2, 0.3, nonfinite=1, kind=EVIL),), skipped={"fp16": EVIL})
    view.control.show(
        PrecisionState(fp32=Inspection(result=evil, why_not=f"precision_cost: {EVIL}"), why_no_batch=f"there is no {EVIL}")
    )
    view.to_page()
    assert rows_of(view, 1) == rows_of(view, 2) == [EVIL]
    assert view.page.get_by_text(f"fp16 was not run: {EVIL}.").is_visible()
    assert view.page.get_by_text(f"Precision not measured: {EVIL}").is_visible()
    button = view.page.get_by_role("button", name="Measure precision again")
    assert button.is_disabled()
    assert view.page.locator(f"#{button.get_attribute('aria-describedby')}").inner_text().startswith("To measure precision")
    assert view.page.locator("tbody td.ampw-check").first.get_attribute("title") == "it is no layer that can be switched"
    assert view.page.locator("img").count() == 0
    assert view.page.evaluate("window.harmed") is None


def test_locked_and_equal_state(view: View) -> None:
    view.page.evaluate("document.querySelector('tbody tr:not([aria-hidden])').kept = 1")
    view.control.show(PrecisionState(fp32=Inspection(result=report(), step=1235)))
    view.control.lock()
    view.to_page()
    assert view.page.evaluate("document.querySelector('tbody tr:not([aria-hidden])').kept") == 1
    assert view.page.locator("input:enabled, select:enabled").count() == 0
    assert view.page.get_by_role("button", name="Measure").is_disabled()
    sort(view, "type")
    assert rows_of(view, 2) == ["GPT", "LayerNorm", "Linear", "Linear"]  # it can still be looked at


def test_of_two_thousand_layers_only_those_in_sight_are_in_the_page(page: Any, messages: Any, asked: list[Any]) -> None:  # noqa: F811
    many = tuple(layer(f"l{i}", name, 1.0 / (i + 1), 0.0, math.nan) for i in range(2000) for name in FORMATS)
    View(page, PrecisionPanel(asked.append, asked.append, PrecisionState(fp32=Inspection(result=report(many)))), messages)
    rows = page.locator("tbody tr:not([aria-hidden])")
    assert rows.count() < 60
    assert page.evaluate("window.tookMs") < 400
    page.locator(".ampw-scroll").evaluate("one => { one.scrollTop = 1000 * 24; }")
    page.locator("tbody th", has_text="l1005").wait_for()
    assert rows.count() < 60
    assert page.locator("tr[aria-rowindex='1002'] th").inner_text() == "l1000"
