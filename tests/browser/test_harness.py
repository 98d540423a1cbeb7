"""The harness itself: a widget in a real page and its Python side, also while a cell runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import OpenNotebook
    from harness.server import Lab

SLIDER = """
import ipywidgets
slider = ipywidgets.IntSlider(value=3, min=0, max=10, description="power")
slider
"""
BUSY = """
import time
end = time.monotonic() + 170
while time.monotonic() < end:
    time.sleep(0.05)
"""


def test_a_slider_moved_in_the_page_arrives_in_the_kernel(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([SLIDER, "print(slider.value)"])
    notebook.run_and_wait(0)
    assert notebook.kernel.eval("slider.value") == 3

    handle = notebook.output(0).get_by_role("slider")
    handle.focus()
    handle.press("ArrowRight")
    handle.press("ArrowRight")

    notebook.wait_until(lambda: notebook.kernel.eval("slider.value") == 5, what="the slider's value did not arrive")
    notebook.run_and_wait(1)
    assert notebook.text(1) == "5\n"
    assert not notebook.scrolls_sideways(0)
    assert notebook.screenshot("harness-slider").stat().st_size > 5_000


def test_the_kernel_answers_while_a_cell_runs_and_can_be_interrupted(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([SLIDER, BUSY])
    notebook.run_and_wait(0)
    notebook.run(1)
    notebook.wait_until(lambda: notebook.kernel.eval("'end' in globals()"), what="the cell did not start")

    notebook.kernel.exec("slider.value = 8")
    assert notebook.kernel.eval("[slider.value, {1, 2}, float('nan')]")[:2] == [8, [1, 2]]
    notebook.wait_until(lambda: notebook.output(0).get_by_text("8", exact=True).count() == 1, what="the page does not show 8")
    assert notebook.is_running(1)

    notebook.interrupt()
    with pytest.raises(AssertionError, match="KeyboardInterrupt"):
        notebook.wait_cell(1)


def test_a_reload_and_the_theme(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([SLIDER])
    notebook.run_and_wait(0)
    notebook.reload()
    notebook.output(0).get_by_role("slider").wait_for()

    background = "() => getComputedStyle(document.body).getPropertyValue('--jp-layout-color0').trim()"
    colours = {}
    for theme in ("light", "dark"):
        notebook.set_theme(theme)
        colours[theme] = notebook.page.evaluate(background)
    assert colours["light"] != colours["dark"]


def test_a_page_starts_light_whatever_the_test_before_has_left(open_notebook: OpenNotebook, lab: Lab) -> None:
    notebook = open_notebook()
    assert notebook.page.evaluate("document.body.dataset.jpThemeLight") == "true"
    notebook.set_theme("dark")
    lab.forget_theme()
    assert open_notebook().page.evaluate("document.body.dataset.jpThemeLight") == "true"


def test_a_wide_output_two_pages_and_a_restart(open_notebook: OpenNotebook) -> None:
    wide = "from IPython.display import HTML\nHTML('<div style=\"width: 2000px\">wide</div>')"
    first = open_notebook([wide, SLIDER])
    for index in (0, 1):
        first.run_and_wait(index)
    assert first.scrolls_sideways(0)
    first.save()

    second = open_notebook(name=first.name)  # the same notebook on the same kernel, in another tab
    assert second.kernel.process_id == first.kernel.process_id
    second.output(1).get_by_role("slider").wait_for()
    second.kernel.exec("slider.value = 9")
    for page in (first, second):
        page.output(1).get_by_text("9", exact=True).wait_for()

    former = first.kernel.process_id
    first.restart()
    assert first.kernel.process_id != former
    assert first.kernel.eval("'slider' in globals()") is False
    said = "Comm not found for comm id"  # JupyterLab does, in the other tab, of a slider whose kernel has ended
    second.wait_until(lambda: any(error.startswith(said) for error in second.errors), what="nothing is said of the slider")
    second.errors[:] = [error for error in second.errors if not error.startswith(said)]


def test_errors_of_the_page_are_collected(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook(["1"])
    notebook.page.evaluate("() => { console.error('from the page'); setTimeout(() => { throw new Error('nobody catches') }) }")
    notebook.wait_until(lambda: len(notebook.errors) == 2)
    assert "from the page" in notebook.errors[0]
    assert "nobody catches" in notebook.errors[1]
    notebook.errors.clear()
