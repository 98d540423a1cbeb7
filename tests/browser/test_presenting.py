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
    second.get_by_text("normal", exact=True).click()
    notebook.wait_until(lambda: chosen(first) == ["normal", "dark"], what="the first does not see the type size")
    first.get_by_text("very large", exact=True).click()  # as the first one's kernel has it all the time
    notebook.wait_until(lambda: chosen(second) == ["very-large", "dark"], what="it cannot be chosen again")
    assert notebook.page.evaluate("document.documentElement.dataset.ampType") == "very-large"
    second.get_by_text("normal", exact=True).click()
    second.get_by_text("as the notebook", exact=True).click()
    notebook.wait_until(lambda: chosen(first) == ["normal", "notebook"], what="it does not go back")
