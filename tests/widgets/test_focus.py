"""The place of the keyboard in the panels: a button that is pressed keeps it, and many rows are one tab stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from amp_widgets.analysis.inspections import Inspection
from amp_widgets.core.settings import Settings
from amp_widgets.widgets.checks_panel import ChecksPanel, ChecksState
from amp_widgets.widgets.control import Control
from amp_widgets.widgets.dtype_panel import DtypePanel, DtypeState
from amp_widgets.widgets.format_lab import FormatLab
from amp_widgets.widgets.gradient_control import GradientControl
from amp_widgets.widgets.layer_table import LayerTable
from amp_widgets.widgets.layers_control import LayersControl
from amp_widgets.widgets.memory_control import MemoryControl
from amp_widgets.widgets.plan_control import PlanControl
from amp_widgets.widgets.plan_state import PlanState
from amp_widgets.widgets.plan_tables import CudaControl
from amp_widgets.widgets.precision_panel import PrecisionPanel, PrecisionState
from amp_widgets.widgets.state import DashboardState
from tests.charts.gpt_step import LayerProfile
from tests.charts.gradient_step import gpt_range
from tests.widgets.gpt_dtypes import gpt_map, layers_of
from tests.widgets.test_page import View, one_page, page  # noqa: F401  # fixtures

Ask = Callable[..., None]


def dashboard(**settings: Any) -> DashboardState:
    given = Settings(**{"autocast": "fp16", **settings})
    return DashboardState(settings=given, layers=layers_of(gpt_map()), scale=given.init_scale)


def gradients(ask: Ask) -> Control:
    control = GradientControl(ask, dashboard())
    control.show_range(gpt_range(), 16)
    return control


def used(ask: Ask) -> Control:
    control = gradients(ask)
    assert isinstance(control, GradientControl)
    control.show_range(gpt_range(), 12)
    return control


def planning(ask: Ask) -> Control:
    return PlanControl(ask, ask, state=PlanState(budget_bytes=8e9), dashboard=dashboard())


PRESSED: list[tuple[str, Callable[[Ask], Control], Callable[[Any], None]]] = [
    ("Sample the next step", gradients, lambda control: control._put({"pending": True})),
    ("Use 2^12 as loss scale", used, lambda control: control.render(dashboard(init_scale=2.0**12))),
    (
        "Take the map",
        lambda ask: DtypePanel(ask, ask, None, dashboard()),
        lambda panel: panel.show(DtypeState(pending=True)),
    ),
    ("Preflight", ChecksPanel, lambda panel: panel.show(ChecksState(preflight=Inspection(pending=True)))),
    ("Check parity", ChecksPanel, lambda panel: panel.show(ChecksState(check=Inspection(pending=True)))),
    (
        "Measure precision",
        lambda ask: PrecisionPanel(ask, ask, dashboard=dashboard()),
        lambda panel: panel.show(PrecisionState(fp32=Inspection(pending=True))),
    ),
    (
        "Propose a plan",
        planning,
        lambda control: control.show(PlanState(plan=Inspection(pending=True))),
    ),
    (
        "Predict for CUDA",
        CudaControl,
        lambda control: control.show(PlanState(on_cuda=Inspection(pending=True))),
    ),
    ("Profile the next step", MemoryControl, lambda control: control._put({"pending": True})),
    ("All", lambda ask: LayersControl(ask, dashboard()), lambda control: control.lock()),
    ("1/3", lambda _: FormatLab(), lambda lab: lab.lock()),
]


@pytest.mark.parametrize("key", ["Enter", "Space"])
@pytest.mark.parametrize(("name", "make", "then"), PRESSED, ids=[name for name, *_ in PRESSED])
def test_a_button_that_is_pressed_keeps_the_focus_and_is_pressed_once(
    page: Any,  # noqa: F811
    messages: Any,
    name: str,
    make: Callable[[Ask], Control],
    then: Callable[[Any], None],
    key: str,
) -> None:
    asked: list[Any] = []
    view = View(page, make(lambda *command, **changes: asked.append((command, changes))), messages)
    view.role("button", name).focus()
    page.evaluate("window.pressed = document.activeElement")
    page.keyboard.press(key)
    sent = page.evaluate("window.sent.length")
    assert sent == 1
    view.sync()
    then(view.control)
    view.to_page()
    assert page.evaluate("document.activeElement === window.pressed && window.pressed.ariaDisabled") == "true"
    before = len(asked)
    page.keyboard.press(key)
    assert page.evaluate("window.sent.length") == 0
    assert len(asked) == before


def stops(page: Any, within: str) -> list[str]:  # noqa: F811
    """What the Tab key stops at, in the order of the page."""
    found: list[str] = page.evaluate(
        """(within) => [...document.querySelectorAll(within)].flatMap((one) => [...one.querySelectorAll(
            "button, input, select, [tabindex]")].filter((stop) => stop.tabIndex >= 0 && !stop.disabled && stop.offsetParent))
            .map((stop) => stop.ariaLabel || stop.textContent)""",
        within,
    )
    return found


@pytest.fixture
def formats(page: Any, messages: Any) -> tuple[View, list[Any]]:  # noqa: F811
    asked: list[Any] = []
    page.set_viewport_size({"width": 1280, "height": 900})
    panel = DtypePanel(asked.append, lambda **changes: asked.append(changes), DtypeState(map=gpt_map(30)), dashboard())
    return View(page, panel, messages), asked


def test_the_tree_of_layers_is_one_tab_stop(page: Any, formats: tuple[View, list[Any]]) -> None:  # noqa: F811
    view, asked = formats
    assert stops(page, ".ampw-half-tree") == ["keep token in FP32"]
    view.role("checkbox", "keep token in FP32").focus()
    page.keyboard.press("ArrowDown")  # a list of layers alone cannot be ticked: its name takes the focus
    assert page.evaluate("document.activeElement.textContent").startswith("blocks")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Space")
    view.sync()
    assert asked == [{"fp32_layers": ("blocks.0",)}]
    page.keyboard.press("Enter")  # shows its operators
    view.sync()
    assert view.control.pattern == "blocks.0.**"
    page.keyboard.press("End")
    assert page.evaluate("document.activeElement.textContent") == "loss_fn"
    page.keyboard.press("Home")
    assert page.evaluate("document.activeElement.ariaLabel") == "keep token in FP32"
    for _ in range(40):  # further than what was in the page
        page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.ariaLabel") == f"keep {view.control.layers[40][0]} in FP32"
    assert len(stops(page, ".ampw-half-tree")) == 1
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.placeholder") == "layers.*.mlp"  # the filter of the table
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.ariaLabel") == f"keep {view.control.layers[40][0]} in FP32"


def test_the_one_tab_stop_is_among_what_is_in_sight(page: Any, formats: tuple[View, list[Any]]) -> None:  # noqa: F811
    view, _ = formats
    page.locator(".ampw-half-tree .ampw-scroll").evaluate("view => { view.scrollTop = 1e6; }")
    page.locator(".ampw-half-tree").get_by_text("loss_fn").wait_for()
    (name,) = stops(page, ".ampw-half-tree")
    labels = [(f"keep {row[0]} in FP32", f"{row[0].rpartition('.')[2]}{row[1]}") for row in view.control.layers]
    at = next(at for at, either in enumerate(labels) if name in either)
    assert at > len(labels) - 18  # so many are in sight
    view.control.lock()
    view.to_page()
    assert len(stops(page, ".ampw-half-tree")) == 1  # names, which say why they show nothing


def test_a_closed_session_says_why_a_name_shows_nothing(page: Any, formats: tuple[View, list[Any]]) -> None:  # noqa: F811
    view, _ = formats
    view.control.lock()
    view.to_page()
    name = page.locator(".ampw-list-row button").first
    assert name.get_attribute("aria-disabled") == "true"
    assert name.get_attribute("title") == "token (Embedding): its operators cannot be shown: the session is closed"
    assert "the session is closed" in page.get_by_role("textbox", name="Filter").get_attribute("title")
    name.dispatch_event("click")
    assert page.evaluate("window.sent.length") == 0
    assert page.get_by_role("textbox", name="Filter").input_value() == ""


def test_the_layers_of_a_table_are_one_tab_stop(page: Any, messages: Any, state: Any, layer: Any) -> None:  # noqa: F811
    many = [LayerProfile(name=f"l{i}", parameter_bytes=i) for i in range(500)]
    table = LayerTable(lambda **_: None, state(layers=tuple(layer(name=one.name) for one in many)), many)
    view = View(page, table, messages)
    assert stops(page, "tbody") == ["checkpoint l0"]
    view.role("checkbox", "checkpoint l0").focus()
    page.keyboard.press("End")
    assert page.evaluate("document.activeElement.ariaLabel") == "checkpoint l499"
    assert stops(page, "tbody") == ["checkpoint l499"]
    page.keyboard.press("Home")
    page.keyboard.press("ArrowUp")
    assert page.evaluate("document.activeElement.ariaLabel") == "checkpoint l0"


def test_on_a_wide_page_no_name_in_the_tree_is_cut(page: Any, formats: tuple[View, list[Any]]) -> None:  # noqa: F811
    page.set_viewport_size({"width": 1816, "height": 900})  # what a cell's output has in a window of 1920 pixels
    page.evaluate("document.querySelector('.ampw-list-row button').textContent = 'feed_forward_networks'")
    cut = page.locator(".ampw-list-row button").evaluate_all("all => all.filter(one => one.scrollWidth > one.clientWidth).length")
    assert cut == 0


def test_all_columns_of_the_map_fit_beside_the_tree(page: Any, formats: tuple[View, list[Any]]) -> None:  # noqa: F811
    """In the width that a cell's output has in a window of 1280 pixels; where they do not fit, what is beyond fades."""
    view = page.locator(".ampw-half-table .ampw-scroll")
    page.set_viewport_size({"width": 1130, "height": 900})
    page.wait_for_timeout(100)
    assert view.evaluate("view => [view.scrollWidth - view.clientWidth, view.hasAttribute('data-more')]") == [0, False]
    page.set_viewport_size({"width": 700, "height": 900})
    page.wait_for_function("document.querySelector('.ampw-half-table .ampw-scroll').hasAttribute('data-more')")
    view.evaluate("view => { view.scrollLeft = 1e6; }")
    page.wait_for_function("!document.querySelector('.ampw-half-table .ampw-scroll').hasAttribute('data-more')")
