"""The tabs of the dashboard in a real JupyterLab: what loss scaling is for, which formats compute, and whether all is right."""

from __future__ import annotations

import re
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
session = aw.demo("{name}")
_ = session.model.register_forward_pre_hook(lambda module, inputs: time.sleep(0.03))  # the processor is the page's
def fell(first, steps):
    loss = session.history.columns("loss")["loss"][first:first + steps]
    return float(loss[:5].mean() - loss[-5:].mean()) / float(loss[:5].mean())
"""
STEPS = 30
VANISHED = re.compile(r"^([\d.]+) % of the gradients were zero already")


def test_without_loss_scaling_gradients_vanish_and_the_loss_stalls(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([MAKE.format(name="underflow")], height=2600)
    notebook.run_and_wait(0)
    area = notebook.output(0)
    python = notebook.kernel.eval
    gradients = area.get_by_role("tabpanel", name="Gradients")
    sentence = gradients.locator(".ampw-difference")
    measured = gradients.get_by_text(re.compile(r"^Step [\d,]+, (at|without) loss scal"))

    def wait(check: Any, what: str) -> None:
        notebook.wait_until(check, what=what)

    def show(name: str) -> None:
        notebook.page.wait_for_timeout(300)
        notebook.screenshot(name, area)

    def sampled() -> int:
        """The step that the tab shows; the demo samples every tenth by itself."""
        found = re.search(r"Step ([\d,]+)", measured.inner_text()) if measured.count() else None
        return -1 if found is None else int(found[1].replace(",", ""))

    def vanished_share() -> float:
        """As the tab says it; it says nothing of zeros where they are few."""
        found = VANISHED.match(sentence.inner_text())
        return 0.0 if found is None else float(found[1]) / 100

    def steps_from(first: int) -> float:
        """How far the loss has fallen in `STEPS` steps, as a part of what it was, when the tab shows one near their end."""
        wait(lambda: sampled() >= first + STEPS - 10 and python("session.step") >= first + STEPS, "the run does not go on")
        return float(python(f"fell({first}, {STEPS})"))

    def pause() -> None:
        area.get_by_role("button", name="Pause", exact=True).click()
        wait(lambda: python("session.run_state") == "paused", "the run did not pause")

    def scale_the_loss(on: bool) -> int:
        """By the control, in a paused run, from the state that it began in; the first step for which it holds."""
        area.get_by_role("button", name="Reset", exact=True).click()
        area.get_by_role("checkbox", name="Scale the loss").set_checked(on)
        area.get_by_role("button", name="Resume", exact=True).click()
        wait(lambda: python("session.settings.scaling") is on, "scaling is not as the control says")
        return int(python("[event.step for event in session.history.events('applied')][-1]"))

    area.get_by_role("tab", name="Gradients").click()
    gradients.wait_for()
    area.get_by_role("button", name="Start", exact=True).click()
    fell_scaled = steps_from(0)
    assert python("session.settings.autocast") == "fp16"
    assert "at loss scale 2^16" in measured.inner_text()
    assert vanished_share() < 0.02

    pause()
    fell_bare = steps_from(scale_the_loss(False))
    wait(lambda: "without loss scaling" in measured.inner_text(), "no step without scaling was sampled")
    share = vanished_share()
    assert share > 0.8
    assert share == pytest.approx(python("session.gradient_range(wait=False).shares().zeros"), abs=0.02)
    assert fell_scaled > 0.4
    assert abs(fell_bare) < 0.1 * fell_scaled
    pause()
    show("underflow-bare-light")

    fell_again = steps_from(scale_the_loss(True))
    assert vanished_share() < 0.02
    assert fell_again == pytest.approx(fell_scaled, rel=0.2)
    pause()
    notebook.set_theme("dark")
    show("underflow-scaled-dark")


def test_tabs_formats_and_checks_as_a_user_sees_them(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([MAKE.format(name="digits")], height=2600)
    notebook.run_and_wait(0)
    area = notebook.output(0)
    python = notebook.kernel.eval

    def wait(check: Any, what: str) -> None:
        notebook.wait_until(check, what=what)

    def press(name: str) -> None:
        area.get_by_role("button", name=name, exact=True).click()

    def show(name: str) -> None:
        notebook.page.wait_for_timeout(300)
        notebook.screenshot(name, area)

    # the first tab is that of memory; the others are there when they are chosen, also with the keys
    tabs = area.get_by_role("tab")
    tabs.first.wait_for()
    assert tabs.all_inner_texts() == ["Memory", "Gradients", "Formats", "Checks", "Plan", "Compare"]
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

    # a step is sampled when asked for, and none by itself
    press("Start")
    wait(lambda: python("session.step") >= 2, "no step was made")
    assert python("len(session.numerics.gradients.counts)") == 0
    press("Sample the next step")
    gradients.locator(".amp-figure .main-svg").first.wait_for()
    gradients.get_by_text("without loss scaling").first.wait_for()
    assert python("len(session.numerics.gradients.counts)") == 1

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
        "runner = session._background.runner\n"
        "runner._training = __import__('dataclasses').replace(runner._training, loss_fn=broken)"
    )
    press("Check parity")
    checks.get_by_text("Check not run: ValueError: <b>of mine</b>").wait_for()
    assert area.locator(".ampw-complaint").inner_text() == "Check not run: ValueError: <b>of mine</b>"
    notebook.set_theme("dark")
    show("numerics-checks-dark")
    notebook.page.set_viewport_size({"width": 800, "height": 2600})
    for number, name in enumerate(("memory", "gradients", "formats", "checks")):
        tabs.nth(number).click()
        wait(lambda: panels.count() == 1, "several panels are shown")
        assert not notebook.scrolls_sideways(0), name
    show("numerics-checks-narrow")
