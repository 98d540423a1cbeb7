"""The training chart alone, in a real JupyterLab in a real Chromium."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Locator

    from conftest import OpenNotebook
    from harness.notebook import Notebook

pytestmark = pytest.mark.browser

# A history that is filled by hand, so that the page can be compared with it exactly.
MAKE = """
import math, threading, time
from amp_widgets.charts.live import TrainingChart
from amp_widgets.core.history import Event, History

history = History()
chart = TrainingChart(memory_source="live tensor bytes on cpu, <counted> & exact")

def add(count):
    for step in range(history.total_rows, history.total_rows + count):
        skipped = step % 50 == 20
        history.append(
            step=step, loss=math.nan if step % 200 == 7 else 2 * math.exp(-step / 500) + 0.05 * math.sin(step),
            scale=2.0 ** (16 - step // 50 % 3), skipped=skipped, allocated_bytes=60e6 + 1e5 * (step % 7),
            peak_bytes=150e6 if step < 600 else 110e6)
        if skipped:
            history.record(Event(step=step, kind="skipped", reason="inf in the gradients", time_s=0.0, detail={}))

def change(step, **changes):
    history.record(Event(step=step, kind="applied", reason=f"asked for <b>{changes}</b>", time_s=0.0, detail=changes))

def live(steps_a_pull):
    def run():
        while not stop.wait(0.1):
            add(steps_a_pull)
            chart.pull(history)
    global stop, thread
    stop = threading.Event()
    thread = threading.Thread(target=run)
    thread.start()

def end():
    stop.set()
    thread.join()
    time.sleep(0.2)
    while not chart.pull(history) and chart._page.last_step < history.last("step"):
        time.sleep(0.1)
"""
SHOW = "display(chart)"

STATE = """root => {
    const plot = root.querySelector('.amp-chart-plot');
    const of = (series, part) => plot.data.find(trace => trace.meta.series === series && trace.meta.part === part);
    const size = (series, part) => of(series, part)?.x.length ?? 0;
    return {
        draws: Number(root.dataset.draws), drawMs: Number(root.dataset.drawMs), details: Number(root.dataset.details ?? 0),
        lossX: Array.from(of('loss', 'line')?.x ?? []), lossY: Array.from(of('loss', 'line')?.y ?? []).map(String),
        skipped: Array.from(of('skipped', 'marks')?.x ?? []), notFinite: size('not_finite', 'marks'),
        scale: size('scale', 'line'), peak: size('peak', 'line'),
        events: Array.from(of('events', 'marks')?.x ?? []), eventTexts: of('events', 'marks')?.text ?? [],
        shapes: (plot.layout.shapes ?? []).map(shape => shape.x0),
        annotations: plot.layout.annotations.filter(one => one.visible !== false).map(one => one.text),
        range: plot._fullLayout.xaxis.range, background: plot.layout.paper_bgcolor, width: plot.layout.width,
        follow: root.querySelector('button').getAttribute('aria-pressed') === 'true',
        label: root.getAttribute('aria-label'),
    };
}"""


def state(root: Locator) -> dict[str, Any]:
    found: dict[str, Any] = root.evaluate(STATE)
    return found


def shown(notebook: Notebook, step: int, root: Locator | None = None) -> dict[str, Any]:
    """The state of a chart once it has drawn this step."""
    root = root or notebook.page.locator(".amp-chart").first
    root.locator(".main-svg").first.wait_for()
    notebook.wait_until(
        lambda: f" {step + 1:,} step" in (root.get_attribute("aria-label") or ""), what=f"step {step} was not drawn"
    )
    return state(root)


def drag(notebook: Notebook, root: Locator, start: float, end: float) -> None:
    """Zoom in: drag over a part of the width of the loss plot."""
    area = root.locator(".draglayer .nsewdrag").first
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    assert box is not None
    mouse, y = notebook.page.mouse, box["y"] + box["height"] / 2
    mouse.move(box["x"] + start * box["width"], y)
    mouse.down()
    mouse.move(box["x"] + (start + end) / 2 * box["width"], y, steps=3)
    mouse.move(box["x"] + end * box["width"], y, steps=3)
    mouse.up()
    mouse.move(2, 2)


def test_it_shows_what_the_history_has_in_light_and_dark(open_notebook: OpenNotebook) -> None:
    fill = "add(1000); change(300, autocast='fp16'); change(600, checkpointed=['a', 'b']); chart.pull(history)"
    notebook = open_notebook([MAKE, SHOW, fill])
    for cell in range(3):
        notebook.run_and_wait(cell)
    root = notebook.page.locator(".amp-chart")
    seen = shown(notebook, 999)
    loss = notebook.kernel.eval("[str(v) for v in history.columns('loss')['loss']]")
    drawn = dict(zip(seen["lossX"], seen["lossY"], strict=True))
    assert all(float(drawn[step]) == float(value) for step, value in enumerate(loss) if value != "nan")
    assert seen["notFinite"] == 5
    assert seen["skipped"] == list(range(20, 1000, 50))
    assert seen["scale"] == seen["peak"] == 1000
    assert sorted(seen["shapes"]) == [300, 600]
    title = "<b>memory</b> · live tensor bytes on cpu, &lt;counted> &amp; exact"
    assert {"fp16", "2 layers", title} <= set(seen["annotations"])
    newest = 2 * math.exp(-999 / 500) + 0.05 * math.sin(999)
    summary = f"1,000 steps, loss {newest:.4g}, loss scale 2^15, peak memory 110 MB, 20 skipped steps"
    assert seen["label"] == f"Training charts: {summary}"
    # The text of the user is text.
    assert root.locator("text=live tensor bytes on cpu, <counted> & exact").count() == 1
    assert notebook.page.evaluate("typeof globalThis.Plotly") == "undefined"
    buttons = root.evaluate("root => [...root.querySelectorAll('.modebar-btn')].map(one => one.dataset.title)")
    assert "Download plot as a PNG" in buttons
    assert not [title for title in buttons if "hare" in title or "loud" in title]
    assert not notebook.scrolls_sideways(1)
    assert seen["width"] <= notebook.output(1).evaluate("area => area.clientWidth")
    light = seen["background"]
    notebook.screenshot("live-chart-light", root)
    notebook.set_theme("dark")
    notebook.wait_until(lambda: state(root)["background"] != light, what="the chart did not follow the dark theme")
    assert state(root)["background"].replace("#", "").lower() in ("111", "111111", "rgb(17, 17, 17)", "black", "000")
    notebook.screenshot("live-chart-dark", root)


def test_zoom_survives_redraws_and_follow_lets_go_of_it(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([MAKE, f"{SHOW}\nadd(1000); chart.pull(history)", "live(5)", "end()"])
    notebook.run_and_wait(0)
    notebook.run_and_wait(1)
    root = notebook.page.locator(".amp-chart")
    assert shown(notebook, 999)["follow"]
    notebook.run_and_wait(2)
    drag(notebook, root, 0.3, 0.5)
    notebook.wait_until(lambda: not state(root)["follow"], what="zooming did not turn follow off")
    zoomed = state(root)
    low, high = zoomed["range"]
    assert 100 < low < high < 900
    notebook.wait_until(lambda: state(root)["draws"] > zoomed["draws"] + 3, what="it was not redrawn while zoomed in")
    assert state(root)["range"] == zoomed["range"]
    notebook.screenshot("live-chart-zoomed", root)
    button = root.get_by_role("button", name="Follow")
    button.focus()
    notebook.page.keyboard.press("Enter")
    notebook.wait_until(
        lambda: state(root)["follow"] and state(root)["range"][1] > 1000, what="follow did not go to the newest step"
    )
    # A double click is the way out that Plotly offers.
    drag(notebook, root, 0.3, 0.5)
    notebook.wait_until(lambda: not state(root)["follow"])
    area = root.locator(".draglayer .nsewdrag").first.bounding_box()
    assert area is not None
    spot = area["x"] + 400, area["y"] + 60

    def followed() -> bool:
        """Where a redraw comes between the two clicks, Plotly takes them for two."""
        if not state(root)["follow"]:
            notebook.page.mouse.dblclick(*spot)
            notebook.page.wait_for_timeout(500)
        return bool(state(root)["follow"])

    notebook.wait_until(followed, what="a double click did not turn follow on")
    root.get_by_role("button", name="Log loss").click()
    axis = "root => root.querySelector('.amp-chart-plot')._fullLayout.yaxis.type"
    notebook.wait_until(lambda: root.evaluate(axis) == "log", what="the axis of the loss did not become logarithmic")
    notebook.run_and_wait(3)


def test_every_view_has_the_same_data_and_survives_the_others_and_a_notebook_opened_again(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([MAKE, SHOW, SHOW, "live(7)", "end()", "chart.close()"])
    for cell in range(4):
        notebook.run_and_wait(cell)
    notebook.page.wait_for_timeout(1500)
    notebook.run_and_wait(1)  # again: its first view goes, the other must live on
    notebook.page.wait_for_timeout(1000)
    assert notebook.page.locator(".amp-chart").count() == 2
    notebook.run_and_wait(4)
    last = int(notebook.kernel.eval("history.last('step')"))
    one, other = (notebook.output(cell).locator(".amp-chart") for cell in (1, 2))
    for root in (one, other):
        root.scroll_into_view_if_needed()
        seen = shown(notebook, last, root)
        assert seen["skipped"] == [step for step in range(last + 1) if step % 50 == 20]
        assert seen["lossX"][-1] == last
    assert state(one)["lossX"] == state(other)["lossX"]
    before = state(one)
    notebook.reopen()
    notebook.kernel.exec("add(3); chart.pull(history)")
    one, other = (notebook.output(cell).locator(".amp-chart") for cell in (1, 2))
    for root in (one, other):
        root.scroll_into_view_if_needed()
        seen = shown(notebook, last + 3, root)
        assert seen["skipped"][: len(before["skipped"])] == before["skipped"]
        assert seen["lossX"][-1] == last + 3
        assert len(set(seen["lossX"])) == len(seen["lossX"])
    notebook.run_and_wait(5)
    notebook.wait_until(lambda: notebook.page.locator(".amp-chart").count() == 0, what="the views outlived the chart")


def test_a_long_run_is_an_overview_and_zooming_in_fetches_every_step(open_notebook: OpenNotebook) -> None:
    fill = "add(60_000); change(30_000, autocast='fp16'); chart.pull(history)"
    notebook = open_notebook([MAKE, f"{SHOW}\n{fill}", "add(50); chart.pull(history)"])
    notebook.run_and_wait(0)
    notebook.run_and_wait(1)
    root = notebook.page.locator(".amp-chart")
    seen = shown(notebook, 59_999)
    assert len(seen["lossX"]) < 5000
    assert "overview" in root.inner_text()
    drag(notebook, root, 0.500, 0.515)
    notebook.wait_until(lambda: state(root)["details"] == 1, what="no detail came")
    notebook.wait_until(lambda: "overview" not in root.inner_text(), what="the detail is not drawn")
    seen = state(root)
    low, high = seen["range"]
    assert high - low < 2000
    inside = [step for step in seen["lossX"] if low <= step <= high]
    # The gaps of NaN losses have a point of their own.
    assert inside == list(range(int(inside[0]), int(inside[-1]) + 1))
    assert len(inside) >= high - low - 2
    notebook.run_and_wait(2)
    notebook.wait_until(lambda: " 60,050 steps," in (root.get_attribute("aria-label") or ""))
    assert state(root)["range"] == seen["range"]
    root.get_by_role("button", name="Follow").click()
    notebook.wait_until(lambda: "overview" in root.inner_text(), what="the zoom's detail was kept")
    assert len(state(root)["lossX"]) < 5000


def test_it_goes_on_while_a_cell_keeps_the_kernel_busy(open_notebook: OpenNotebook) -> None:
    busy = "finish = False\nwhile not finish: add(2); chart.pull(history); time.sleep(0.03)"
    notebook = open_notebook([MAKE, f"{SHOW}\nadd(10); chart.pull(history)", busy])
    notebook.run_and_wait(0)
    notebook.run_and_wait(1)
    root = notebook.page.locator(".amp-chart")
    first = shown(notebook, 9)["draws"]
    notebook.run(2)
    notebook.wait_until(lambda: state(root)["draws"] >= first + 4 and state(root)["lossX"][-1] > 50, what="it stands still")
    assert notebook.is_running(2)
    notebook.kernel.exec("finish = True")
    notebook.wait_cell(2)


def test_losses_that_break_an_axis_elsewhere(open_notebook: OpenNotebook) -> None:
    losses = "[1.0, math.nan, math.inf, -math.inf, 1.7e308, -1.7e308, 2.0]"
    rows = f"for i, loss in enumerate({losses}): history.append(step=i, loss=loss)\nchart.pull(history)"
    notebook = open_notebook([MAKE, SHOW, rows])
    for cell in range(3):
        notebook.run_and_wait(cell)
    root = notebook.page.locator(".amp-chart")
    seen = shown(notebook, 6)
    assert seen["notFinite"] == 3
    assert root.evaluate("root => root.querySelector('.amp-chart-plot')._fullLayout.yaxis.range.every(Number.isFinite)")
    assert "the loss is not scaled" in seen["annotations"]
    notebook.screenshot("live-chart-not-finite", root)


def test_a_page_that_missed_a_message_asks_for_everything(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([MAKE, f"{SHOW}\nadd(10); chart.pull(history)"])
    notebook.run_and_wait(0)
    notebook.run_and_wait(1)
    shown(notebook, 9)
    send = "add(5); chart.send, kept = (lambda *message: None), chart.send; chart.pull(history, at_once=True); chart.send = kept"
    notebook.kernel.exec(send)
    notebook.kernel.exec("add(5); chart.pull(history, at_once=True)")
    root = notebook.page.locator(".amp-chart")
    notebook.wait_until(lambda: state(root)["lossX"] == list(range(20)), what="the missed steps never came")


def test_keys_typed_on_its_buttons_leave_the_notebook_alone(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([MAKE, f"{SHOW}\nadd(10); chart.pull(history)", "pass"])
    notebook.run_and_wait(0)
    notebook.run_and_wait(1)
    root = notebook.page.locator(".amp-chart")
    shown(notebook, 9)
    cells = notebook.cell_sources()
    root.hover()
    buttons = [root.get_by_role("button", name=name) for name in ("Follow", "Log loss", "Pan", "Reset axes")]
    for button in buttons:
        button.click()
        for key in ("b", "x", "d", "d", "m", "ArrowDown", "x"):
            notebook.page.keyboard.press(key)
        notebook.page.wait_for_timeout(200)
        assert notebook.cell_sources() == cells
        assert notebook.page.locator(".jp-MarkdownCell").count() == 0
    # A tool that was chosen stays chosen, whoever resets the axes.
    draws = state(root)["draws"]
    buttons[0].click()
    notebook.wait_until(lambda: state(root)["draws"] > draws, what="it was not drawn again")
    assert root.evaluate("root => root.querySelector('.amp-chart-plot')._fullLayout.dragmode") == "pan"


def test_tool_icons_stand_out_in_both_themes(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([MAKE, f"{SHOW}\nadd(10); chart.pull(history)"])
    notebook.run_and_wait(0)
    notebook.run_and_wait(1)
    root = notebook.page.locator(".amp-chart")
    shown(notebook, 9)
    fills = """root => [...root.querySelectorAll('.modebar-btn')].map(
        one => [one.dataset.title, getComputedStyle(one.querySelector('path')).fill])"""

    def filled(active: str, others: str) -> bool:
        drawn = root.evaluate(fills)
        return {fill for title, fill in drawn if title == "Zoom"} == {active} and {
            fill for title, fill in drawn if title != "Zoom"
        } == {others}

    root.hover()
    light, dark = "rgba(0, 0, 0, 0.87)", "rgba(255, 255, 255, 0.87)"  # JupyterLab's text
    for theme, active, others in (("light", light, "107, 107, 107"), ("dark", dark, "160, 160, 160")):
        notebook.set_theme(theme)  # type: ignore[arg-type]
        notebook.wait_until(partial(filled, active, f"rgb({others})"), what=f"the icons are not those of {theme}")
        root.get_by_role("button", name="Pan").hover()
        pan = partial(lambda fill: dict(root.evaluate(fills))["Pan"] == fill, active)
        notebook.wait_until(pan, what="the icon under the pointer does not stand out")
        notebook.screenshot(f"live-chart-tools-{theme}", root)
        root.locator(".amp-chart-bar").hover()


def test_changes_close_together_are_labelled_and_a_loss_of_1_is_not_scaled(open_notebook: OpenNotebook) -> None:
    rows = """
for step in range(60): history.append(step=step, loss=30 * math.exp(-step / 20), scale=1.0, peak_bytes=1e6)
change(17, autocast="fp16")
change(27, init_scale=2.0**40)
change(37, checkpointed=["a"] * 4)
change(38, autocast="fp16", init_scale=2.0**40, checkpointed=["a"])
change(39, checkpointed=["a"] * 2)
change(41, checkpointed=[])
chart.pull(history)
"""
    notebook = open_notebook([MAKE, SHOW, rows, "history = History()\nhistory.append(step=0, loss=-1.0)\nchart.pull(history)"])
    for cell in range(3):
        notebook.run_and_wait(cell)
    root = notebook.page.locator(".amp-chart")
    seen = shown(notebook, 59)
    labels = {"fp16", "scale 2^40", "4 layers", "fp16, scale 2^40, 1 layer", "2 layers", "0 layers"}
    assert labels <= set(seen["annotations"])
    assert "60 steps, loss 1.570, loss not scaled" in seen["label"]
    root.get_by_role("button", name="Log loss").click()
    ticks = root.locator(".ytick text")
    notebook.wait_until(lambda: ticks.all_text_contents() == ["2", "5", "10", "20"], what="the labels are not of a log axis")
    sizes = "root => [...new Set([...root.querySelectorAll('.ytick text')].map(one => one.style.fontSize))]"
    assert root.evaluate(sizes) == ["12px"]
    notebook.screenshot("live-chart-labels", root)
    notebook.run_and_wait(3)
    shown(notebook, 0)
    notebook.wait_until(lambda: "no loss above 0" in state(root)["annotations"], what="nothing said why the plot is empty")
    assert root.locator(".ytick text").count() == 0
