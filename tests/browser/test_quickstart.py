"""The user's path, in a real JupyterLab: the quickstart, Start, and every kind of switch; both sides are asserted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from playwright.sync_api import Locator

from harness.notebook import Notebook
from harness.server import REPOSITORY

if TYPE_CHECKING:
    from conftest import OpenNotebook

QUICKSTART = REPOSITORY / "notebooks" / "01_quickstart.ipynb"
SLOW_S = 60

OWN_LOOP = """
import torch
from torch import nn
import amp_widgets as aw
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)], nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, y = torch.randn(64, 16), torch.randint(2, (64,))
session = aw.AmpSession(model, optimizer)
session.dashboard()
"""
FIT = """
import time

def unhurried(output, target):
    time.sleep(0.03)  # the processor is the page's
    return nn.functional.cross_entropy(output, target)

session.fit([(x, y)], unhurried, None)
"""
UNHURRIED = """
import time
session.model.register_forward_pre_hook(lambda module, inputs: time.sleep(0.03))  # the processor is the page's
"""
BUSY_CELL = """
import time
finish = False
end = time.monotonic() + 170
while not finish and time.monotonic() < end:
    optimizer.zero_grad()
    with session.autocast():
        loss = nn.functional.cross_entropy(model(x), y)
    session.scaler.scale(loss).backward()
    session.scaler.step(optimizer)
    session.scaler.update()
    time.sleep(0.1)
print("finished at step", session.status().step)
"""


class Dashboard:
    """A dashboard in the page, as a user sees it, and the session behind it."""

    def __init__(self, notebook: Notebook, cell: int, session: str = "session") -> None:
        self.notebook = notebook
        self.area = notebook.output(cell)
        self.session = session

    def python(self, expression: str) -> Any:
        """The value of ``session.<expression>`` in the kernel."""
        return self.notebook.kernel.eval(f"{self.session}.{expression}")

    def chart(self) -> dict[str, Any]:
        """What plotly.js has drawn: points by series and part, vertical lines, labels, the range of x."""
        drawn: dict[str, Any] = self.area.locator(".js-plotly-plot").first.evaluate(
            """plot => ({
                points: Object.fromEntries((plot.data ?? []).map(t => [`${t.meta.series} ${t.meta.part}`,
                    Array.from(t.y).filter(v => v !== null && !Number.isNaN(v)).length])),
                lines: (plot.layout?.shapes ?? []).filter(s => s.visible !== false && s.x0 === s.x1).map(s => s.x0),
                labels: (plot.layout?.annotations ?? []).filter(a => a.visible !== false).map(a => a.text),
                range: plot._fullLayout?.xaxis.range,
                width: plot.getBoundingClientRect().width })"""
        )
        return drawn

    def points(self, series: str) -> int:
        return int(self.chart()["points"].get(series, 0))  # a series without points is not drawn

    def has_plot(self) -> bool:
        return self.area.locator(".js-plotly-plot").count() > 0

    def wait_for_plot(self) -> None:
        self.notebook.wait_until(self.has_plot, SLOW_S, "no chart was drawn")

    def press(self, name: str) -> None:
        self.area.get_by_role("button", name=name, exact=True).click()

    def layer(self, name: str) -> Locator:
        return self.area.locator(f'li[aria-label^="{name}, "] > .ampw-row input[type=checkbox]')

    def wait(self, check: Any, what: str) -> None:
        self.notebook.wait_until(check, SLOW_S, what)


def test_the_quickstart_with_the_background_run(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook(path=QUICKSTART, height=2600)
    code = [i for i, text in enumerate(notebook.cell_sources()) if text.startswith(("%load_ext", "%amp demo"))]
    for index in code:
        notebook.run_and_wait(index, SLOW_S)
    board = Dashboard(notebook, code[1])
    board.wait_for_plot()
    assert board.python("run_state") == "ready"
    notebook.kernel.exec(UNHURRIED)

    # Start: the three charts gain points
    board.press("Start")
    board.wait(lambda: board.python("status().step") >= 5, "no steps after Start")
    board.wait(lambda: min(board.points(f"{s} line") for s in ("loss", "scale", "peak")) >= 5, "the charts gained no points")
    before = board.points("loss line")
    board.wait(lambda: board.points("loss line") > before, "the chart does not go on")

    # the dtype
    board.area.get_by_text("fp16", exact=True).first.click()
    board.wait(lambda: board.python("settings.autocast") == "fp16", "fp16 did not come into force")
    board.wait(lambda: any("fp16" in label for label in board.chart()["labels"]), "no labelled line for fp16")

    # the scale, dragged to its end by the keyboard
    slider = board.area.get_by_role("slider", name="Initial scale")
    slider.focus()
    slider.press("End")
    board.wait(lambda: board.python("settings.init_scale") == 2.0**40, "the initial scale did not come into force")
    board.wait(lambda: board.python("status().skipped_steps") >= 2, "nothing overflowed at 2^40")
    board.wait(lambda: board.points("skipped marks") >= 2, "skipped steps are not marked")

    # two layers
    for name in ("layers.0", "layers.2"):
        board.layer(name).click()
    board.wait(lambda: board.python("settings.checkpointed") == ["layers.0", "layers.2"], "the layers are not checkpointed")
    board.wait(lambda: len(board.chart()["lines"]) >= 3, "no line for each applied change")

    applied = board.python("history.events('applied')")
    asked = notebook.kernel.eval(
        "[(e.detail['source'], sorted(set(e.detail) - {'source'})) for e in session.history.events('applied')]"
    )
    assert len(applied) == len(asked) >= 4
    assert {source for source, _ in asked} == {"widget"}
    steps = notebook.kernel.eval("sorted({e.step for e in session.history.events('applied')})")
    board.wait(lambda: sorted({int(x) for x in board.chart()["lines"]}) == steps, "lines and events differ")
    assert not notebook.scrolls_sideways(code[1])
    notebook.screenshot("quickstart-light")
    notebook.set_theme("dark")
    notebook.page.wait_for_timeout(1500)
    notebook.screenshot("quickstart-dark")
    notebook.set_theme("light")

    # reload in mid-run: the dashboard is back, with what happened before and meanwhile
    shown, done = board.points("loss line"), board.python("status().step")
    notebook.reload_until(board.has_plot, "after a reload there is no chart")
    board.wait(lambda: board.points("loss line") >= shown, "the history is not back after a reload")
    board.wait(lambda: board.points("loss line") > done, "the chart does not go on after a reload")
    board.wait(board.area.get_by_role("radio", name="fp16").is_checked, "the dtype is not back after a reload")
    board.wait(board.layer("layers.2").is_checked, "the layers are not back after a reload")

    # pause, single step, stop
    board.press("Pause")
    board.wait(lambda: board.python("run_state") == "paused", "Pause has no effect")
    at = board.python("status().step")
    board.press("Single step")
    board.wait(lambda: board.python("status().step") == at + 1, "Single step has no effect")
    board.press("Stop")
    board.wait(lambda: board.python("run_state") == "stopped", "Stop has no effect")
    board.press("Reset")
    board.wait(lambda: "reset" in notebook.kernel.eval("[e.detail.get('state') for e in session.history.events('run')]"), "Reset")


def test_the_loop_in_a_busy_cell(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([OWN_LOOP, BUSY_CELL], height=2600)
    notebook.run_and_wait(0, SLOW_S)
    board = Dashboard(notebook, 0)
    board.wait_for_plot()
    notebook.run(1)
    board.wait(lambda: board.points("loss line") >= 5, "the charts do not move while the cell runs")

    board.area.get_by_text("fp16", exact=True).first.click()
    board.wait(lambda: board.python("settings.autocast") == "fp16", "fp16 did not come into force during the cell")
    slider = board.area.get_by_role("slider", name="Initial scale")
    slider.focus()
    slider.press("End")
    board.wait(lambda: board.python("settings.init_scale") == 2.0**40, "the scale did not come into force during the cell")
    for name in ("0", "1"):
        board.layer(name).click()
    board.wait(lambda: board.python("settings.checkpointed") == ["0", "1"], "the layers did not come into force during the cell")
    assert notebook.is_running(1)
    board.wait(lambda: board.points("skipped marks") >= 1, "no skipped step is marked while the cell runs")
    board.wait(lambda: len(board.chart()["lines"]) >= 3, "no lines while the cell runs")
    notebook.screenshot("busy-cell")

    # a page that is reloaded while the cell runs
    notebook.reload(kernel=False)
    board.wait_for_plot()
    before = board.points("loss line")
    board.wait(lambda: board.points("loss line") > before, "the chart does not go on after a reload in a busy cell")
    assert notebook.kernel.eval("not finish")
    notebook.kernel.exec("finish = True")
    notebook.wait_cell(1, SLOW_S)


def test_two_views_agree_and_a_late_one_is_whole(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook(
        ["%load_ext amp_widgets\n%amp demo digits", "session.dashboard()", "session.dashboard()"], height=4000
    )
    notebook.run_and_wait(0, SLOW_S)
    first = Dashboard(notebook, 0)
    first.wait_for_plot()
    notebook.kernel.exec(UNHURRIED)
    first.press("Start")
    first.wait(lambda: first.points("loss line") >= 10, "no points")
    notebook.run_and_wait(1, SLOW_S)
    second = Dashboard(notebook, 1)
    second.wait_for_plot()
    second.area.get_by_text("bf16", exact=True).first.click()
    first.wait(lambda: first.area.get_by_role("radio", name="bf16").is_checked(), "the first view does not follow")
    first.press("Pause")
    second.wait(lambda: second.python("run_state") == "paused", "not paused")
    steps = second.python("status().step")
    for board in (first, second):
        board.wait(lambda board=board: board.points("loss line") == steps, "the views differ")
        board.wait(lambda board=board: len(board.chart()["lines"]) == 1, "the views differ in lines")
    # a cell that is run again: its own view is new and whole, the other is unharmed
    notebook.run_and_wait(1, SLOW_S)
    second.wait_for_plot()
    second.wait(lambda: second.points("loss line") == steps, "a view made again is not whole")
    first.press("Single step")
    for board in (first, second):
        board.wait(lambda board=board: board.points("loss line") == steps + 1, "a view stopped")


def test_the_stop_button_ends_a_background_run_and_a_loop_in_a_cell(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([OWN_LOOP, BUSY_CELL, FIT, "1 + 1"])
    notebook.run_and_wait(0, SLOW_S)
    board = Dashboard(notebook, 0)
    notebook.run(1)
    board.wait(lambda: board.python("status().step") >= 3, "no steps in the cell")
    notebook.interrupt()
    try:
        notebook.wait_cell(1, SLOW_S)
    except AssertionError as error:
        assert "KeyboardInterrupt" in str(error)  # noqa: PT017  # the text is what a user sees
    notebook.run_and_wait(2, SLOW_S)
    at = board.python("status().step")
    board.wait(lambda: board.python("status().step") > at + 5, "no steps in the background")
    notebook.interrupt()
    board.wait(lambda: board.python("run_state") == "stopped", "the stop button does not reach the background run")
    notebook.run_and_wait(3, SLOW_S)


def test_zoom_survives_and_follow_goes_back(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([OWN_LOOP, FIT], height=2600)
    notebook.run_and_wait(0, SLOW_S)
    board = Dashboard(notebook, 0)
    board.wait_for_plot()
    notebook.run_and_wait(1, SLOW_S)
    board.wait(lambda: board.points("loss line") >= 20, "no points")
    box = board.area.locator(".js-plotly-plot .nsewdrag").first.bounding_box()
    assert box is not None
    mouse = notebook.page.mouse
    mouse.move(box["x"] + box["width"] * 0.2, box["y"] + box["height"] * 0.5)
    mouse.down()
    mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * 0.5, steps=5)
    mouse.up()
    follow = board.area.get_by_role("button", name="Follow")
    board.wait(lambda: follow.get_attribute("aria-pressed") == "false", "a zoom does not end following")
    zoomed = board.chart()["range"]
    at = board.python("status().step")
    board.wait(lambda: board.python("status().step") > at + 30, "no more steps")
    notebook.page.wait_for_timeout(500)
    assert board.chart()["range"] == zoomed
    follow.click()
    board.wait(lambda: board.chart()["range"][1] >= at + 30, "Follow does not go back to the newest step")


def test_a_rejected_request_and_a_failed_run_are_shown(open_notebook: OpenNotebook) -> None:
    failing = (
        "def fails(output, target):\n"
        "    if session.status().step == 3: raise ValueError('<img src=x onerror=alert(1)> of mine')\n"
        "    return nn.functional.cross_entropy(output, target)\n"
        "session.fit([(x, y)] * 9, fails)"
    )
    notebook = open_notebook([OWN_LOOP, failing])
    notebook.run_and_wait(0, SLOW_S)
    board = Dashboard(notebook, 0)
    pattern = board.area.get_by_role("textbox", name="Pattern")
    pattern.fill("layer.*")
    pattern.press("Enter")
    board.area.get_by_text("no layer matches 'layer.*'").first.wait_for()
    notebook.run_and_wait(1, SLOW_S)
    board.area.get_by_text("ValueError: <img src=x onerror=alert(1)> of mine").first.wait_for()
    assert board.area.locator("img[src=x]").count() == 0
    assert board.python("run_state") == "failed"
    notebook.screenshot("failed-run")


def test_a_background_run_is_controlled_while_other_cells_are_busy(open_notebook: OpenNotebook) -> None:
    sleeps = (
        "import time\nfinish = False\nend = time.monotonic() + 170\n"
        "while not finish and time.monotonic() < end:\n    time.sleep(0.05)"
    )
    notebook = open_notebook([OWN_LOOP, FIT, sleeps, "session.wait()"])
    notebook.run_and_wait(0, SLOW_S)
    board = Dashboard(notebook, 0)
    board.wait_for_plot()
    notebook.run_and_wait(1, SLOW_S)
    notebook.run(2)
    board.wait(lambda: board.python("status().step") > 5, "no steps")
    board.press("Pause")
    board.wait(lambda: board.python("run_state") == "paused", "Pause waits for the end of a cell that sleeps")
    board.area.get_by_text("bf16", exact=True).first.click()
    board.wait(lambda: board.python("settings.autocast") == "bf16", "a dtype waits for the end of a cell that sleeps")
    board.press("Resume")
    board.wait(lambda: board.python("run_state") == "running", "Resume waits for the end of a cell that sleeps")
    assert notebook.is_running(2)
    notebook.kernel.exec("finish = True")
    notebook.wait_cell(2, SLOW_S)
    notebook.run(3)
    board.wait(lambda: notebook.is_running(3), "the cell that waits does not run")
    board.press("Pause")
    board.wait(lambda: board.python("run_state") == "paused", "Pause waits for the end of session.wait()")
    board.press("Stop")
    notebook.wait_cell(3, SLOW_S)
    assert board.python("run_state") == "stopped"


def test_typing_in_the_fields_reaches_the_session_and_not_the_notebook(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([OWN_LOOP, "1 + 1"])
    notebook.run_and_wait(0, SLOW_S)
    board = Dashboard(notebook, 0)
    cells = len(notebook.cell_sources())
    field = board.area.get_by_role("textbox", name="Growth factor")
    field.fill("3")
    field.press("Enter")
    board.wait(
        lambda: board.python("dashboard_state().requested('growth_factor')") == 3.0, "Enter does not ask for what was typed"
    )
    field.fill("4")
    field.press("Escape")
    board.wait(lambda: field.input_value() == "3", "Escape does not take back what was typed")
    slider = board.area.get_by_role("slider", name="Initial scale")
    for key in ("x", "d", "d", "b", "a", "Space"):
        notebook.page.keyboard.press(key)
        slider.press(key)
    board.area.get_by_role("radio", name="bf16").press("Space")
    board.wait(lambda: board.python("dashboard_state().requested('autocast')") == "bf16", "Space does not choose a dtype")
    assert len(notebook.cell_sources()) == cells
    assert notebook.cell_sources()[1] == "1 + 1"
