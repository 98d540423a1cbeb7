"""What precision costs, in the dashboard of the digits demo in a real JupyterLab, as its example says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import OpenNotebook

pytestmark = pytest.mark.browser

MAKE = """
import time
import torch
import amp_widgets as aw
torch.set_num_threads(1)
session = aw.demo("digits")
_ = session.model.register_forward_pre_hook(lambda module, inputs: time.sleep(0.03))  # the processor is the page's
"""


def test_precision_is_measured_and_a_layer_kept_in_fp32(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([MAKE], height=2000)
    notebook.run_and_wait(0)
    area = notebook.output(0)
    python = notebook.kernel.eval

    def wait(check: Any, what: str) -> None:
        notebook.wait_until(check, what=what)

    area.get_by_role("tab", name="Checks").click()
    panel = area.get_by_role("region", name="What precision costs").first
    button = panel.get_by_role("button", name="Measure precision")
    button.wait_for()
    assert button.is_disabled()  # there is no batch yet
    panel.get_by_text("start the run first").wait_for()
    area.get_by_role("button", name="Start", exact=True).click()
    wait(button.is_enabled, "it cannot be measured")
    button.click()
    rows = panel.locator("tbody tr:not([aria-hidden])")
    wait(lambda: rows.count() > 20, "there is no table")
    assert python("session.run_state") == "running"

    def outputs(layer: str) -> list[str]:
        cells = rows.filter(has=notebook.page.get_by_role("rowheader", name=layer, exact=True)).locator(".ampw-error-bar")
        return [cells.nth(i).inner_text() for i in (0, 3)]  # in fp16 and bf16

    def sort(name: str) -> None:
        header = panel.get_by_role("columnheader", name=name, exact=True)
        header.get_by_role("button").click()
        assert header.get_attribute("aria-sort") != "none"

    sort("layer")
    in_half, in_bf16 = map(float, outputs("layers.0"))
    assert 0 < in_half < in_bf16 / 4 < 0.01
    notebook.page.wait_for_timeout(300)
    notebook.screenshot("precision-light", panel)

    for layer in ("stem", "layers.0"):
        panel.get_by_role("checkbox", name=f"keep {layer} in FP32", exact=True).check()
    wait(lambda: python("session.settings.fp32_layers") == ["stem", "layers.0"], "the layers are not kept in FP32")
    panel.get_by_text("Since this was measured other layers are kept in FP32").wait_for()
    panel.get_by_role("button", name="Measure precision again").click()
    wait(lambda: outputs("layers.0") == ["0", "0"], "what the layer gives is not exact")
    assert min(map(float, outputs("layers.1"))) > 0

    panel.get_by_role("combobox", name="compared with").select_option("fp64")
    panel.get_by_role("button", name="Measure precision").click()
    panel.get_by_role("columnheader", name="fp32 output").wait_for()
    assert area.locator(".ampw-rejection:visible").count() == 0
    assert not notebook.scrolls_sideways(0)
    notebook.set_theme("dark")
    notebook.page.wait_for_timeout(300)
    notebook.screenshot("precision-dark", panel)
    notebook.screenshot("checks-tab-dark", area)
