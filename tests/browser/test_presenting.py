"""Type size and theme of a page on which several kernels have dashboards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Locator

    from conftest import OpenNotebook

pytestmark = pytest.mark.browser

# The second one is told nothing of the first, as if another kernel had made it.
CELL = """
from amp_widgets.widgets import presenting_control
first, second = (presenting_control.PresentingControl(opened=True) for _ in range(2))
presenting_control._controls.discard(second)
display(first, second)
"""


def chosen(control: Locator) -> list[str]:
    values: list[str] = control.locator("input:checked").evaluate_all("all => all.map((one) => one.value)")
    return values


def test_controls_of_several_kernels_say_what_the_page_has(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([CELL], height=2600)
    notebook.run_and_wait(0)
    controls = notebook.output(0).locator(".ampw-presenting")
    first, second = controls.nth(0), controls.nth(1)
    second.wait_for()
    assert chosen(first) == chosen(second) == ["normal", "notebook"]
    first.get_by_text("very large", exact=True).click()
    notebook.wait_until(lambda: chosen(second) == ["very-large", "notebook"], what="the other does not see the type size")
    second.get_by_text("dark", exact=True).click()
    notebook.wait_until(lambda: chosen(first) == ["very-large", "dark"], what="a theme changes the type size")
    second.get_by_text("normal size", exact=True).click()
    notebook.wait_until(lambda: chosen(first) == ["normal", "dark"], what="the first does not see the type size")
    first.get_by_text("very large", exact=True).click()  # as the first one's kernel has it all the time
    notebook.wait_until(lambda: chosen(second) == ["very-large", "dark"], what="it cannot be chosen again")
    assert notebook.page.evaluate("document.documentElement.dataset.ampType") == "very-large"
    second.get_by_text("normal size", exact=True).click()
    second.get_by_text("as the notebook", exact=True).click()
    notebook.wait_until(lambda: chosen(first) == ["normal", "notebook"], what="it does not go back")


LAB = """
from amp_widgets.widgets.format_lab import FormatLab
display(FormatLab())
"""
CALL = "import amp_widgets as aw\n_ = aw.present(type_size='very-large', theme='dark')"


def test_a_call_from_code_is_in_force_on_a_page_with_a_lab_alone(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([LAB, CALL], height=2600)
    notebook.run_and_wait(0)
    notebook.output(0).locator(".ampw-formats").wait_for()
    on_page = "[document.documentElement.dataset.ampType, document.documentElement.dataset.ampTheme]"
    for _ in range(2):  # run again, the output of before is gone
        notebook.run_and_wait(1)
        notebook.wait_until(lambda: notebook.page.evaluate(on_page) == ["very-large", "dark"], what="nothing has changed")
        notebook.page.wait_for_timeout(500)
        assert notebook.page.evaluate(on_page) == ["very-large", "dark"]
        assert notebook.output(1).locator(".ampw-presenting").count() == 1


DASHBOARD = """
import torch
from torch import nn
import amp_widgets as aw
torch.set_num_threads(1)
model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), nn.Linear(16, 3))
optimizer = torch.optim.Adam(model.parameters())
session = aw.AmpSession(model, optimizer)
session.profile_next_step()
for inputs in session.steps([torch.randn(4, 5, 16)] * 2):
    optimizer.zero_grad()
    session.scaler.scale(model(inputs).sum()).backward()
    session.scaler.step(optimizer)
    session.scaler.update()
session.dashboard()
"""
CUT = """area => [...area.querySelectorAll(".ampw-type, .ampw-scroll thead th")].filter(
    (one) => one.clientWidth && one.scrollWidth > one.clientWidth + 1).map((one) => one.textContent)"""
LONGEST = "NonDynamicallyQuantizableLinear"  # of torch's layers that are met often


def test_types_of_layers_are_not_cut(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([DASHBOARD], height=2600)
    notebook.page.set_viewport_size({"width": 1280, "height": 2600})
    notebook.run_and_wait(0)
    area = notebook.output(0)
    area.get_by_role("tab", name="Memory").click()
    table = area.locator(".ampw-layer-table")
    table.locator(".ampw-type", has_text=LONGEST).wait_for()
    assert area.locator(".ampw-tree .ampw-type").count() > 5
    for size in ("large", "very-large"):
        notebook.page.locator("html").evaluate("(root, size) => { root.dataset.ampType = size; }", size)
        notebook.page.wait_for_timeout(300)
        notebook.screenshot(f"present-layers-{size}", area)
        assert area.evaluate(CUT) == []
        view = table.locator(".ampw-scroll")
        view.evaluate("view => view.scrollTo(view.scrollWidth, 0)")
        right = "one => one.getBoundingClientRect().right"
        assert table.locator("thead th").last.evaluate(right) <= view.evaluate(right)
        assert not notebook.scrolls_sideways(0)
