"""From a budget to a plan in the dashboard of the text demo in a real JupyterLab: drag, propose, use, predicted and measured."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import OpenNotebook

pytestmark = pytest.mark.browser

MAKE = """
import torch
import amp_widgets as aw
torch.set_num_threads(1)
session = aw.demo("text")
"""
PARTS = """root => (root.querySelector(".js-plotly-plot")?.data ?? [])
    .map(one => [one.meta.part, one.meta.labels ?? [], [...one.y]])"""
SLIDE = """(one, value) => { one.value = value; one.dispatchEvent(new Event('input', {bubbles: true})); }"""


def test_a_budget_is_dragged_planned_for_and_kept(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([MAKE], height=2600)
    notebook.run_and_wait(0)
    area = notebook.output(0)
    python = notebook.kernel.eval

    def wait(check: Any, what: str) -> None:
        notebook.wait_until(check, what=what)

    area.get_by_role("tab", name="Plan").click()
    panel = area.locator(".ampw-plan-panel")
    propose = panel.get_by_role("button", name="Propose a plan", exact=True)
    panel.get_by_text("To plan, there is no batch to work on yet; start the run first.").wait_for()
    assert propose.get_attribute("aria-disabled") == "true"
    area.get_by_role("button", name="Start", exact=True).click()
    field = panel.get_by_role("textbox", name="Memory budget")
    wait(lambda: field.input_value() == "75.0 MB", "no budget is suggested")
    wait(lambda: propose.get_attribute("aria-disabled") == "false", "it cannot be planned")

    # a first plan, for a budget that is typed
    field.fill("8 apples")
    field.press("Enter")
    panel.get_by_text("Budget: got '8 apples', expected a size").wait_for()
    field.fill("90 MB")
    field.press("Enter")
    wait(lambda: python("session.inspection('plan').result is not None"), "there is no plan")
    panel.get_by_text("Plan for 90.0 MB in fp32: checkpoint").wait_for()
    assert panel.locator(".ampw-plan-layers li").all_inner_texts() == python("session.inspection('plan').result.layers")

    # drag the budget: another one
    slider = panel.get_by_role("slider", name="Memory budget")
    slider.evaluate(SLIDE, "61400000")
    wait(lambda: python("session.inspection('plan').result.budget_bytes") < 70e6, "it is not planned anew")
    budget = python("session.inspection('plan').result.budget_bytes")
    panel.get_by_text(f"Plan for {budget / 1e6:.1f} MB in fp32: checkpoint").wait_for()

    def points() -> dict[str, list[float]]:
        return {label: y for part, labels, y in panel.evaluate(PARTS) if part == "point" for label in labels}

    predicted_bytes = python("session.inspection('plan').result.predicted_peak_bytes")
    wait(lambda: points().get("plan") == [predicted_bytes], "the picture is not that of the plan")
    assert {"none", "all", "every second", "√n"} <= points().keys()
    notebook.screenshot("plan-light", panel)

    # use it: predicted and measured are read from the page
    before = python("session.step")
    panel.get_by_role("button", name="Use this plan").click()
    wait(lambda: python("session.settings.checkpointed == session.inspection('plan').result.layers"), "it is not used")
    panel.get_by_role("button", name="In force", exact=True).wait_for()
    said = panel.locator(".ampw-plan-measured")
    wait(lambda: "measured" in said.inner_text() and "Predicted" in said.inner_text(), "nothing was measured")
    numbers = re.search(r"Predicted ([\d.]+) MB, measured ([\d.]+) MB: within the budget", said.inner_text())
    assert numbers is not None, said.inner_text()
    predicted, measured = map(float, numbers.groups())
    assert abs(measured - predicted) <= 0.01 * predicted
    assert measured * 1e6 <= budget
    wait(lambda: any(part == "measured" and "plan" in labels for part, labels, _ in panel.evaluate(PARTS)), "it is not drawn")
    drawn = next(y for part, labels, y in panel.evaluate(PARTS) if part == "measured" and "plan" in labels)
    assert drawn[0] <= budget
    wait(lambda: python("session.step") > before + 2, "the run does not go on")
    assert python("session.run_state") == "running"
    assert area.locator(".ampw-rejection:visible").count() == 0
    assert not notebook.scrolls_sideways(0)
    notebook.set_theme("dark")
    notebook.page.set_viewport_size({"width": 900, "height": 2600})
    notebook.screenshot("plan-dark-900", panel)
    assert not notebook.scrolls_sideways(0)
