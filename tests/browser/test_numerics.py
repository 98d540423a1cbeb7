"""The tabs of the dashboard in a real JupyterLab: what loss scaling is for, which formats compute, and whether all is right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import OpenNotebook

pytestmark = pytest.mark.browser

# The digits demo with a loss as small as a mean over very many numbers: at scale 1 its gradients are below what fp16 has.
MAKE = """
import torch
import amp_widgets as aw
torch.set_num_threads(1)
SMALL = 1e-5
session = aw.demo("digits")
def loss_fn(output, target):
    return torch.nn.functional.cross_entropy(output, target) * SMALL
session.fit(session._runner._training.batches, loss_fn, None, start=False)
session.request(autocast="fp16")
def fell(first, steps):
    loss = session.history.columns("loss")["loss"][first:first + steps] / SMALL
    return float(loss[:8].mean() - loss[-8:].mean())
"""
STEPS = 20
VANISHED = "session.gradient_range(wait=False).shares().zeros"


def test_loss_scaling_formats_and_checks_as_a_user_sees_them(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([MAKE], height=1800)
    notebook.run_and_wait(0)
    area = notebook.output(0)
    python = notebook.kernel.eval

    def wait(check: Any, what: str) -> None:
        notebook.wait_until(check, 20, what)

    def press(name: str) -> None:
        area.get_by_role("button", name=name, exact=True).click()

    def show(name: str) -> None:
        notebook.page.wait_for_timeout(300)
        notebook.screenshot(name, area)

    def sampled(after: int) -> bool:
        return bool(python(f"len(session.numerics.gradients.counts) > 0 and session.gradient_range(wait=False).step >= {after}"))

    # the first tab is that of memory; the others are there when they are chosen, also with the keys
    tabs = area.get_by_role("tab")
    tabs.first.wait_for()
    assert tabs.all_inner_texts() == ["Memory", "Gradients", "Formats", "Checks"]
    panels = area.get_by_role("tabpanel")
    wait(lambda: panels.count() == 1, "the first panel is no tabpanel")
    area.get_by_role("tabpanel", name="Memory").get_by_text("No step has been profiled yet").wait_for()
    assert area.locator(".ampw-gradient-panel, .ampw-dtypes, .ampw-checks").count() == 0
    tabs.nth(0).focus()
    notebook.page.keyboard.press("ArrowRight")
    gradients = area.get_by_role("tabpanel", name="Gradients")
    gradients.wait_for()
    assert panels.count() == 1  # the other one is hidden
    assert tabs.nth(1).evaluate("tab => tab === document.activeElement && tab.tabIndex === 0 && tab.ariaSelected === 'true'")

    # with loss scaling hardly a gradient vanishes, and the loss falls
    press("Start")
    wait(lambda: python("session.step") >= 4, "no step was made")
    press("Sample the next step")
    wait(lambda: sampled(4), "no step was sampled")
    gradients.locator(".amp-figure .main-svg").first.wait_for()
    vanished_before = python(VANISHED)
    wait(lambda: python("session.step") >= STEPS, "the run does not go on")
    press("Pause")
    wait(lambda: python("session.run_state") == "paused", "the run did not pause")
    gradients.get_by_text("at loss scale 2^16").wait_for()
    show("numerics-gradients-light")

    # without it nearly all vanish, and the loss stands still
    notebook.kernel.exec("session.reset()")
    area.get_by_role("checkbox", name="Scale the loss").uncheck()
    wait(lambda: python("session.settings.scaling") is False, "scaling is still on")
    first = python("session.step")
    press("Sample the next step")
    press("Resume")
    wait(lambda: sampled(first), "no step was sampled")
    wait(lambda: python("session.step") >= first + STEPS, "the run does not go on")
    vanished = python(VANISHED)
    assert vanished_before < 0.3 < 0.95 < vanished
    fell_before, fell = python(f"fell(0, {STEPS})"), python(f"fell({first}, {STEPS})")
    assert fell_before > 0.15
    assert abs(fell) < fell_before / 2
    gradients.get_by_text("without loss scaling").first.wait_for()
    gradients.locator(".ampw-difference").filter(has_text="were zero already; of the others").wait_for()
    show("numerics-gradients-vanished")

    # the map is taken while the run goes on
    notebook.kernel.exec("session.request(autocast='bf16')")
    wait(lambda: python("session.settings.autocast") == "bf16", "bf16 is not in force")
    tabs.nth(2).click()
    formats = area.get_by_role("tabpanel", name="Formats")
    formats.get_by_role("button", name="Take the map").click()
    formats.get_by_role("table").wait_for()
    assert python("session.run_state") == "running"
    assert formats.locator("tr", has_text="matmul").locator("[data-format=bf16]").count() > 0
    show("numerics-formats-light")
    formats.get_by_role("textbox", name="Filter").fill("loss_fn")
    formats.locator("tr[data-format=fp32]", has_text="cross_entropy").wait_for()
    formats.get_by_role("checkbox", name="keep layers.0 in FP32", exact=True).check()
    wait(lambda: python("session.settings.fp32_layers") == ["layers.0"], "the layer is not kept in fp32")

    # the checks, too
    tabs.nth(3).click()
    checks = area.get_by_role("tabpanel", name="Checks")
    checks.get_by_role("checkbox", name="check parity after each change").check()
    wait(lambda: python("session.check_changes") is True, "the tick had no effect")
    notebook.kernel.exec("session.request(checkpointed=['layers.*'])")
    checks.get_by_text("Bit-identical to a run without checkpointing").wait_for()
    press("Preflight")
    checks.get_by_role("region", name="Preflight").wait_for()
    press("Check parity")
    wait(lambda: python("session.inspection('check').pending") is False, "the check is not done")
    assert python("session.run_state") == "running"
    show("numerics-checks-light")

    # an error is said, and nothing else is lost
    notebook.kernel.exec("def broken(output, target):\n    raise ValueError('<b>of mine</b>')\nsession.stop(); session.wait()")
    notebook.kernel.exec(
        "session._runner._training = __import__('dataclasses').replace(session._runner._training, loss_fn=broken)"
    )
    press("Check parity")
    checks.get_by_text("The last check failed: ValueError: <b>of mine</b>").wait_for()
    assert area.locator(".ampw-rejection").inner_text() == "Rejected: check: ValueError: <b>of mine</b>"
    notebook.set_theme("dark")
    show("numerics-checks-dark")
    notebook.page.set_viewport_size({"width": 800, "height": 1800})
    for number, name in enumerate(("memory", "gradients", "formats", "checks")):
        tabs.nth(number).click()
        wait(lambda: panels.count() == 1, "several panels are shown")
        assert not notebook.scrolls_sideways(0), name
    show("numerics-checks-narrow")
