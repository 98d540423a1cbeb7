"""The gradient panel in a real JupyterLab, with made-up gradients: sampled, moved to another scale, used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import OpenNotebook

pytestmark = pytest.mark.browser

EVIL = "<img src=x onerror='window.harmed = 1'>"
MAKE = """
from tests.charts.gradient_step import gpt_range
from amp_widgets.analysis.overflow import Diagnosis, SkippedStep, SkipRun
from amp_widgets.core.settings import Settings
from amp_widgets.widgets.gradient_panel import GradientPanel
from amp_widgets.widgets.gradient_state import GradientState
from amp_widgets.widgets.state import DashboardState

asked = []
def command(name, **values):
    asked.append([name, values])
panel = GradientPanel(command, lambda **changes: asked.append(["settings", changes]),
                      GradientState(), DashboardState(settings=Settings(autocast="fp16", init_scale=1.0)))
panel
"""
SKIPS = f"""
step = SkippedStep(step=41, scale=2.0**39, loss_finite=True, layer="layers.3.mlp.fc2", parameter="layers.3.mlp.fc2.weight",
                   nonfinite=3, of=80, nan=False)
runs = (SkipRun(steps=(step,) * 12, scale_after=2.0**28), SkipRun(steps=(step,), scale_after=2.0**27))
wrong = Diagnosis(name="scale below 1", sentence="The loss scale has fallen to 2^-3, below 1",
    cause="Gradients overflow in fp16 even without being scaled up, first in {EVIL}: they are too large, or sums of them are. "
    "Take the mean and not the sum in the loss, clip the gradients, or use bf16.")
panel.show(GradientState(range=gpt_range(name={EVIL!r}), every=10, skips=runs, diagnoses=(wrong,)))
"""


def test_a_panel_of_made_up_gradients(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([MAKE], height=1700)
    notebook.run_and_wait(0)
    area = notebook.output(0)
    whole = area.locator(".ampw-gradient-panel")
    whole.wait_for()
    kernel = notebook.kernel

    def wait(check: Any, what: str) -> None:
        notebook.wait_until(check, what=what)

    area.get_by_text("No step has been sampled yet").wait_for()
    notebook.screenshot("gradients-empty", whole)
    area.get_by_role("button", name="Sample the next step").click()
    area.get_by_role("checkbox", name="every 10 steps").click()
    wait(lambda: kernel.eval("asked") == [["sample", {}], ["every", {"steps": 10}]], "what was asked for did not arrive")

    kernel.exec("panel.show(GradientState(range=gpt_range(), every=10))")
    area.locator(".amp-figure .main-svg").first.wait_for()
    sentence = area.locator(".ampw-difference")
    wait(lambda: "scale 1" in sentence.inner_text() and "become zero" in sentence.inner_text(), "the shares are not told")
    notebook.page.wait_for_timeout(300)
    notebook.screenshot("gradients-light", whole)

    table = area.get_by_role("table", name="Gradients by layer")
    assert table.get_by_role("row").count() == 1 + 19
    assert "layers.0.attention" in table.get_by_role("row").nth(1).inner_text()

    slider = area.get_by_role("slider", name="What if the loss scale were")
    slider.focus()
    for _ in range(12):
        notebook.page.keyboard.press("ArrowRight")
    wait(lambda: kernel.eval("panel.exponent") == 12, "the slider had no effect")
    wait(lambda: "scale 2^12" in sentence.inner_text(), "the shares do not follow the slider")
    use = area.get_by_role("button", name="Use 2^12 as loss scale")
    use.click()
    wait(lambda: kernel.eval("asked[-1]") == ["settings", {"init_scale": 4096.0}], "the scale was not asked for")
    kernel.exec("panel.render(DashboardState(settings=Settings(autocast='fp16', init_scale=4096.0)))")
    area.get_by_role("button", name="2^12 is set").wait_for()
    area.get_by_role("button", name="Suggested").click()
    wait(lambda: kernel.eval("panel.exponent") > 12, "the suggestion was not taken")

    filter_field = area.get_by_role("textbox", name="Filter")
    filter_field.fill("layers.*.mlp.fc1")
    filter_field.press("Enter")
    wait(lambda: table.get_by_role("row").count() == 1 + 6, "the filter had no effect")
    filter_field.press("Escape")
    wait(lambda: table.get_by_role("row").count() == 1 + 19, "the filter is still there")

    kernel.exec(SKIPS)
    area.get_by_role("alert").filter(has_text="below 1").wait_for()
    area.get_by_text("12 skips from step 41").wait_for()
    assert notebook.page.evaluate("window.harmed") is None
    assert area.locator("img").count() == 0
    notebook.page.wait_for_timeout(300)
    notebook.screenshot("gradients-skips", whole)
    notebook.set_theme("dark")
    kernel.exec("panel.show(GradientState(range=gpt_range(), every=10, skips=runs))")
    notebook.page.wait_for_timeout(400)
    notebook.screenshot("gradients-dark", whole)
    notebook.page.set_viewport_size({"width": 700, "height": 1700})
    notebook.page.wait_for_timeout(300)
    notebook.screenshot("gradients-700px", whole)
    assert not notebook.scrolls_sideways(0)
