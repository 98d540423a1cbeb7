"""A run recorded from the dashboard and replayed in a real JupyterLab: slider, play, pause, speed, follow; page against file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import OpenNotebook

pytestmark = pytest.mark.browser

MAKE = """
%load_ext amp_widgets
import itertools, threading, time
import torch
import amp_widgets as aw
from amp_widgets.demos.batches import ShuffledBatches
from amp_widgets.demos.digits import DigitsNet, digits_data
torch.set_num_threads(1)
torch.manual_seed(0)
model = DigitsNet(channels=4, depth=2)
optimizer = torch.optim.Adam(model.parameters())
batches = itertools.cycle(ShuffledBatches(*digits_data(), batch_size=32, seed=0))
session = aw.AmpSession(model, optimizer)
changes = {20: {"autocast": "fp16"}, 45: {"init_scale": 2.0**40}, 75: {"autocast": "bf16", "checkpointed": ["layers.*"]}}
notes = {10: "<img src=x onerror=alert(1)>"}
def train(steps):
    for _ in range(steps):
        step = session.dashboard_state().step
        if step in notes: session.note(notes[step])
        if step in changes: session.request(**changes[step])
        if step in (30, 80): session.count_gradients()
        inputs, targets = next(batches)
        optimizer.zero_grad()
        with session.autocast():
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        session.scaler.scale(loss).backward()
        session.scaler.step(optimizer)
        session.scaler.update()
session.dashboard()
"""
LAST = 99
DRAWN = """root => {
    const plot = root.querySelector('.amp-chart .js-plotly-plot');
    const one = plot?.data?.find(trace => trace.meta?.series === 'loss' && trace.meta.part === 'line');
    return one ? {x: [...one.x], y: [...one.y], background: plot.layout.paper_bgcolor} : {x: [], y: [], background: ''};
}"""
SLIDE = """(one, value) => { one.value = value; one.dispatchEvent(new Event('input', {bubbles: true})); }"""


def test_a_recorded_run_is_replayed(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([MAKE, f"train({LAST + 1})", "%amp replay {name}".replace("{name}", "run.db")], height=2600)
    notebook.run_and_wait(0)
    live = notebook.output(0)
    python = notebook.kernel.eval

    def wait(check: Any, what: str) -> None:
        notebook.wait_until(check, what=what)

    # recorded from the dashboard
    record = live.locator(".ampw-record")
    field = record.get_by_role("textbox", name="File")
    wait(lambda: re.fullmatch(r"run-\d{4}-\d\d-\d\d\.db", field.input_value()), "no name is offered")
    field.fill("/nowhere/at/all/run.db")
    record.get_by_role("button", name="Record", exact=True).click()
    live.get_by_text("Not recorded: /nowhere/at/all/run.db: there is no such file or folder").wait_for()
    field.fill("run.db")
    field.press("Enter")
    where = record.locator(".ampw-where")
    wait(lambda: where.inner_text().startswith("to run.db, "), "it does not say where the run goes")
    notebook.run_and_wait(1)
    notebook.screenshot("record-on", live.locator(".ampw-controls"))

    # a file that is being written is followed
    notebook.run_and_wait(2)
    area = notebook.output(2)
    status, transport = area.locator(".ampw-status"), area.locator(".ampw-transport")
    slider = transport.get_by_role("slider", name="Step")
    step_field = transport.get_by_role("textbox", name="Step")
    follow = transport.get_by_role("button", name="Follow the file")

    def look() -> None:
        """What is not in sight is not drawn."""
        status.evaluate("one => one.scrollIntoView({block: 'start'})")

    def word() -> str:
        return status.locator(".ampw-word").inner_text()

    def drawn() -> dict[str, Any]:
        found: dict[str, Any] = area.evaluate(DRAWN)
        return found

    def shown() -> list[str]:
        return [value.strip() for value in status.locator(".ampw-value").all_inner_texts()]

    def at(step: int, what: str) -> None:
        """The page shows a step as the file has it."""
        wait(lambda: step_field.input_value() == str(step), f"{what}: step {step_field.input_value()}, expected {step}")
        wait(lambda: len(drawn()["x"]) and drawn()["x"][-1] == step, f"{what}: the chart ends at {drawn()['x'][-1:]}")
        loss = python(f"run.history.columns('loss')['loss'][:{step + 1}]")
        assert [round(one, 12) for one in drawn()["y"]] == [round(one, 12) for one in loss]
        settings = python(f"[run.settings_at({step}).autocast, list(run.settings_at({step}).checkpointed)]")
        wait(lambda: area.locator(".ampw-segment.ampw-in-force").inner_text() == settings[0], f"{what}: autocast")
        assert area.locator(".ampw-autocast input:checked").get_attribute("value") == settings[0]
        wait(lambda: area.locator(".ampw-layers input:checked").count() == len(settings[1]), f"{what}: layers")
        wait(lambda: slider.input_value() == str(step), f"{what}: slider")
        wait(lambda: shown()[:2] == [str(step), f"{loss[-1]:.4g}"], f"{what}: status")

    wait(lambda: word() == "following", "the file is not followed")
    look()
    at(LAST, "followed")
    notebook.kernel.exec("train(20)")
    at(LAST + 20, "followed on")
    wait(lambda: follow.get_attribute("aria-pressed") == "true", "it does not follow")
    notebook.screenshot("replay-following-light-1280", area)
    record.get_by_role("button", name="Stop recording").click()
    wait(lambda: where.inner_text().startswith("run.db is kept, "), "it does not say that the file is kept")
    record.get_by_text(re.compile(r"%amp replay /\S+/run\.db")).wait_for()
    notebook.screenshot("record-kept", record)

    look()

    # by slider, number, keys and changes; nothing can be set
    slider.evaluate(SLIDE, "50")
    at(50, "slider")
    wait(lambda: word() == "replay, paused", "it follows after a move")
    wait(lambda: follow.get_attribute("aria-pressed") == "false", "the button is still pressed")
    for value in ("90", "5", "60", "7", "33"):
        slider.evaluate(SLIDE, value)
    at(33, "dragged")
    step_field.fill("78")
    step_field.press("Enter")
    at(78, "typed")
    slider.focus()
    slider.press("ArrowLeft")
    slider.press("ArrowLeft")
    at(76, "arrow keys")
    transport.get_by_role("button", name="To the change before").click()
    at(75, "change before")
    transport.get_by_role("button", name="To the beginning").press("Enter")
    at(0, "beginning")
    transport.get_by_role("button", name="To the next change").click()
    at(10, "next change")
    events = area.locator(".ampw-events")
    events.get_by_text("<img src=x onerror=alert(1)>", exact=True).wait_for()
    assert area.locator("img[src=x]").count() == 0
    for part in (".ampw-autocast", ".ampw-scaler", ".ampw-layers"):
        enabled = f"{part} :is(input, button:not(.ampw-twisty, [aria-disabled='true'])):enabled"
        assert area.locator(enabled).count() == 0
    assert transport.get_by_text("A replay of run.db, not live").is_visible()

    # played: pause, speed, end
    speed = transport.get_by_role("combobox", name="Speed")
    speed.select_option("0.5")
    transport.get_by_role("button", name="Play", exact=True).click()
    wait(lambda: word() == "replaying" and int(step_field.input_value()) > 12, "it does not play")
    transport.get_by_role("button", name="Pause", exact=True).click()
    wait(lambda: word() == "replay, paused", "it does not pause")
    paused = int(step_field.input_value())
    at(paused, "paused")
    slider.press(" ")
    wait(lambda: word() == "replaying", "the space bar does not play")
    speed.select_option("1000")
    at(LAST + 20, "played to the end")
    wait(lambda: word() == "replay, at the end", "it is not said that it is at the end")
    assert shown()[0] == str(python("int(run.history.last('step'))"))

    # what else is recorded, in both themes and a narrow page
    slider.evaluate(SLIDE, "60")
    at(60, "back")
    light = drawn()["background"]
    notebook.screenshot("replay-light-1280", area)
    area.get_by_role("tab", name="Gradients").click()
    area.get_by_text("Step 30, at loss scale 2^16").wait_for()
    notebook.screenshot("replay-gradients-light-1280", area)
    area.get_by_role("tab", name="Memory").click()
    panel = area.locator(".ampw-memory-panel")
    labels = python("[profile.label for profile in run.profiles if profile.step <= 60]")
    wait(
        lambda: panel.locator("select").last.locator("option").count() == len(labels) > 1, "the profiles are not those until then"
    )
    wait(lambda: panel.locator(".js-plotly-plot").count() == 1, "the memory is not drawn")
    assert panel.get_by_role("button", name="Profile the next step").count() == 0
    notebook.set_theme("dark")
    wait(lambda: drawn()["background"] != light, "the chart did not follow the dark theme")
    notebook.page.wait_for_timeout(300)
    notebook.screenshot("replay-memory-dark-1280", area)
    notebook.page.set_viewport_size({"width": 900, "height": 2600})
    notebook.page.wait_for_timeout(500)
    assert not notebook.scrolls_sideways(2)
    notebook.screenshot("replay-memory-dark-900", area)
    notebook.set_theme("light")
    area.get_by_role("tab", name="Events").click()
    notebook.page.wait_for_timeout(500)
    notebook.screenshot("replay-light-900", area)

    # a page that is loaded again shows the present position
    notebook.page.set_viewport_size({"width": 1280, "height": 2600})
    notebook.reload_until(status.is_visible, "after a reload there is no replay")
    look()
    at(60, "reloaded")
    slider.evaluate(SLIDE, "61")
    at(61, "after the reload")

    # what the notebook keeps
    notebook.kernel.exec("get_ipython().run_line_magic('unload_ext', 'amp_widgets')")
    wait(lambda: area.locator(".ampw-dashboard").count() == 0, "the dashboard is not closed")
