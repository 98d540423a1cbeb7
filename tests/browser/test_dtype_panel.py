"""The dtype panel with a made-up map, in a real JupyterLab, as a user sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import OpenNotebook

pytestmark = pytest.mark.browser

EVIL = "<img src=x onerror='window.harmed = 1'>"

MAKE = f"""
import dataclasses as dc
from amp_widgets.core.settings import Settings
from amp_widgets.widgets.dtype_panel import DtypePanel, DtypeState
from amp_widgets.widgets.state import DashboardState
from tests.widgets.gpt_dtypes import gpt_map, layers_of, linear

asked = []
session = DashboardState(settings=Settings(autocast="bf16"), layers=layers_of(gpt_map()))
evil = linear({EVIL!r}, why={EVIL!r})

def command(name):
    asked.append(name)
    panel.show(DtypeState(pending=True))

def request(**changes):
    asked.append(changes)
    panel.render(dc.replace(session, pending=changes))

panel = DtypePanel(command, request, None, session)
"""


def test_a_map_is_taken_and_a_layer_kept_in_fp32(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([MAKE, "display(panel)"], height=1100)
    notebook.run_and_wait(0)
    notebook.run_and_wait(1)
    area = notebook.output(1)

    def wait(check: Any, what: str) -> None:
        notebook.wait_until(check, what=what)

    take = area.get_by_role("button", name="Take the map")
    wait(lambda: "No map was taken yet" in area.inner_text(), "the empty panel says nothing")
    notebook.screenshot("dtype-panel-empty", area)
    take.focus()
    notebook.page.keyboard.press("Enter")
    wait(lambda: area.get_by_role("button", name="Taking the map at the next step").count() == 1, "it does not say that it waits")
    assert area.get_by_role("button", name="Taking the map").evaluate("one => one === document.activeElement")
    notebook.page.keyboard.press("Space")  # it is asked for already
    notebook.kernel.exec("panel.show(DtypeState(map=gpt_map()))")
    wait(lambda: area.locator("tbody th").count() > 5, "the map is not shown")
    wait(lambda: "128 casts a step" in area.locator(".ampw-difference").inner_text(), "it is not said how many casts there are")
    row = area.locator("tbody tr", has_text="blocks.0.attention").first
    assert row.get_attribute("data-format") == "bf16"
    assert notebook.kernel.eval("asked") == ["dtype_map"]
    assert not notebook.scrolls_sideways(1)
    table = area.locator(".ampw-scroll", has=notebook.page.get_by_role("table"))
    assert table.evaluate("view => view.scrollWidth <= view.clientWidth")  # all columns are in sight
    notebook.screenshot("dtype-panel-light", area)

    # from the button to the table's filter it is not a Tab for each layer
    area.get_by_role("button", name="Take the map again").focus()
    for _ in range(3):  # what is shown, the layers, the filter
        notebook.page.keyboard.press("Tab")
    assert area.get_by_role("textbox", name="Filter").evaluate("one => one === document.activeElement")

    # the table
    casts = area.get_by_role("columnheader", name="casts").first
    casts.get_by_role("button").click()
    assert casts.get_attribute("aria-sort") == "descending"
    area.get_by_role("button", name="mlp").first.click()
    rows = area.locator("tbody tr:not([aria-hidden])")
    wait(lambda: rows.count() == 3, "a click on a layer does not filter the table")
    area.get_by_role("textbox", name="Filter").fill("blocks.*.norm")
    wait(lambda: rows.count() == 6, "the filter had no effect")
    area.get_by_role("textbox", name="Filter").fill("")
    wait(lambda: rows.count() > 20, "the filter is not gone")

    # a tick
    area.get_by_role("checkbox", name="keep blocks.0.attention in FP32").click()
    wait(lambda: {"fp32_layers": ["blocks.0.attention"]} in notebook.kernel.eval("asked"), "the tick asked for nothing")
    wait(lambda: area.locator("li.ampw-changed").count() == 1, "the waiting tick is not marked")
    notebook.screenshot("dtype-panel-pending", area)
    notebook.kernel.exec(
        "session = dc.replace(session, settings=Settings(autocast='bf16', fp32_layers=('blocks.0.attention',)))\n"
        "panel.render(session)"
    )
    wait(lambda: "other layers are kept in FP32" in area.inner_text(), "it does not say that the map is old")
    wait(lambda: area.locator("li.ampw-changed").count() == 0, "the tick in force is still marked")

    # dark, and what a user named
    notebook.kernel.exec("panel.show(DtypeState(map=gpt_map(rows=(evil, *gpt_map().rows)), why_not='a step is in progress'))")
    wait(lambda: "a step is in progress" in area.inner_text(), "why there is no new map is not said")
    casts.get_by_role("button").click()
    assert area.locator("img").count() == 0
    assert notebook.page.evaluate("window.harmed") is None
    notebook.set_theme("dark")
    notebook.page.wait_for_timeout(300)
    notebook.screenshot("dtype-panel-dark", area)
