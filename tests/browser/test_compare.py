"""Settings side by side in the dashboard of the digits demo in a real JupyterLab: progress, the table, its settings, Cancel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import OpenNotebook

pytestmark = pytest.mark.browser

MAKE = """
import torch
import amp_widgets as aw
torch.set_num_threads(1)
session = aw.demo("digits")
"""
# A comparison takes a second and the page may take several: its steps wait for what the page is to show.
HOLD = """
import threading
import amp_widgets.analysis.compare
amp_widgets.analysis.compare.SLOWER = float("inf")  # a moment in which the machine is slow says nothing of a format
go_on = threading.Event()

def wait_in_a_comparison(module, inputs):
    if session.comparison.progress is not None:
        go_on.wait(120)

_ = session.model.register_forward_pre_hook(wait_in_a_comparison)
"""
TABLE = "rows => rows.map(row => [...row.children].map(one => one.innerText))"
POINTS = """root => {
    const plot = root.querySelector('.js-plotly-plot');
    return (plot?.data ?? []).filter(one => one.x[0] !== null).map(one => [one.x[0], one.y[0]]);
}"""


def test_settings_are_compared_and_used_and_cancel_leaves_the_run_training(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([MAKE, HOLD], height=2600)
    notebook.run_and_wait(0)
    notebook.run_and_wait(1)
    area = notebook.output(0)
    python = notebook.kernel.eval

    def wait(check: Any, what: str) -> None:
        notebook.wait_until(check, what=what)

    area.get_by_role("tab", name="Compare").click()
    panel = area.locator(".ampw-compare-panel")
    button = panel.get_by_role("button", name="Compare", exact=True)
    panel.get_by_text("To compare, there is no batch to work on yet; start the run first.").wait_for()
    assert button.get_attribute("aria-disabled") == "true"
    area.get_by_role("button", name="Start", exact=True).click()
    wait(lambda: button.get_attribute("aria-disabled") == "false", "it cannot be compared")
    panel.get_by_role("checkbox", name="fp16").uncheck()
    panel.get_by_role("combobox", name="timed steps a round").select_option("3")
    panel.get_by_role("combobox", name="rounds", exact=True).select_option("1")
    panel.get_by_text("4 combinations: 20 steps on one batch").wait_for()
    button.click()

    # progress
    bar = panel.get_by_role("progressbar", name="Comparison")
    panel.get_by_text("round 1 of 1: fp32/none · step 1 of 20 · about ").wait_for()
    assert bar.get_attribute("aria-valuenow") == "5"
    spoken_and_shown = "one => [one.ariaValueText, one.closest('.ampw-progress').querySelector('span').innerText]"
    assert len(set(bar.evaluate(spoken_and_shown))) == 1  # at one time: what is left grows less
    area.get_by_text("Settings are being compared (see Compare)").wait_for()
    assert python("session.run_state") == "running"
    notebook.kernel.exec("go_on.set()")

    # the table is that of the session, and so is the picture
    rows = panel.locator("tbody tr")
    wait(lambda: rows.count() == 4, "there is no table")
    step = python("session.comparison.step")
    wait(lambda: python("session.step") > step, "the run does not go on")
    shown = rows.evaluate_all(TABLE)
    table = python("session.comparison.result.to_table()")[1:]
    assert [row[0].split("\n")[0] for row in shown] == ["fp32/none", "fp32/all", "bf16/none", "bf16/all"]
    for row, cells in zip(shown, table, strict=True):
        assert row[0].split("\n")[0] == cells[0]
        assert f"{row[1]} {row[2]}" == cells[2]
        assert f"{row[3].splitlines()[0]} ({row[3].splitlines()[1]}) {row[4]}" == cells[3]
        assert row[7] == cells[6]
    peaks = python("[row.peak_bytes for row in session.comparison.result.rows]")
    assert min(peaks) == peaks[3] < peaks[1] < peaks[2] < peaks[0]
    for sentence in python("session.comparison.result.verdict"):
        assert panel.get_by_text(sentence).is_visible()
    wait(lambda: len(panel.evaluate(POINTS)) == 4, "there is no picture")
    assert [y for _, y in panel.evaluate(POINTS)] == peaks
    assert not notebook.scrolls_sideways(0)
    notebook.screenshot("compare-light", panel)

    # the settings of a row
    assert panel.locator("tr[data-use='in force'] b").inner_text() == "fp32/none"
    panel.get_by_role("button", name="Use these settings: bf16/all", exact=True).click()
    wait(lambda: python("session.settings.autocast") == "bf16", "the settings are not used")
    assert python("session.settings.checkpointed") == python("session.comparison.result.row('bf16/all').checkpointed")
    panel.get_by_role("button", name="In force: bf16/all", exact=True).wait_for()

    # cancel
    panel.get_by_role("combobox", name="timed steps a round").select_option("20")
    notebook.kernel.exec("go_on.clear()")
    panel.get_by_role("button", name="Compare again").click()
    panel.get_by_text("round 1 of 1: fp32/none · step 1 of 88 · about ").wait_for()
    notebook.set_theme("dark")
    notebook.page.set_viewport_size({"width": 900, "height": 2600})
    notebook.screenshot("compare-dark-900", panel)
    panel.get_by_role("button", name="Cancel").click()
    panel.get_by_text("Ends after the step in progress …").wait_for()
    notebook.kernel.exec("go_on.set()")
    panel.get_by_text("Cancelled before a round was complete; what is shown was measured before").wait_for()
    step = python("session.step")
    wait(lambda: python("session.step") > step + 1, "the run does not go on")
    assert python("session.run_state") == "running"
    assert rows.count() == 4
    assert area.locator(".ampw-rejection:visible").count() == 0
    assert not notebook.scrolls_sideways(0)
