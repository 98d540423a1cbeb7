"""What happens around a dashboard in a real JupyterLab: reloads, tabs, saved notebooks, kernels that end, %reload_ext, memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Locator

from harness.notebook import Notebook
from harness.server import Lab
from test_quickstart import OWN_LOOP, SLOW_S, Dashboard

if TYPE_CHECKING:
    from conftest import OpenNotebook, Pages

SAVED_KB = 40
REDRAWS = int(os.environ.get("AMP_WIDGETS_REDRAWS", "100"))
"""How many times the chart is drawn in the test of memory; 2,000 take minutes."""
MOST_S = 600
FIT = """
import time

def loss_fn(output, target):
    time.sleep(0.2)  # few enough steps that each is a point of the chart, however long the page takes
    return nn.functional.cross_entropy(output, target)

session.fit([(x, y)], loss_fn, None)
"""
AGAIN = "To have it live, run this cell again, after the cells that it needs."
NOT_FOUND = "widget model not found"
"""ipywidgets says so in the console, of any widget, when the kernel is another than the one that the notebook was saved with."""

# What a second set of patches, hooks, callbacks or threads would change.
COUNTS = """
def counts():
    import signal, threading, torch
    module, scaler = torch.nn.modules.module, torch.amp.GradScaler
    events = get_ipython().events.callbacks
    return {
        "patched": [repr(one) for one in (torch.amp.autocast_mode.autocast.__enter__, torch.amp.autocast_mode.autocast.__exit__,
            torch.autograd.backward, torch.Tensor.backward, torch.utils.checkpoint.checkpoint, torch.optim.Optimizer.step,
            module.Module.__call__, scaler.scale, scaler.unscale_, scaler.step, scaler.update)],
        "global hooks": {name: len(vars(module)[name]) for name in vars(module)
            if name.startswith("_global_") and isinstance(vars(module)[name], dict)},
        "modes": [torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()],
        "events": {name: len(callbacks) for name, callbacks in events.items()},
        "signal": repr(signal.getsignal(signal.SIGINT)),
        "dashboards": sum(thread.name == "amp_widgets dashboard" for thread in threading.enumerate()),
        "magics": sum("amp" in names for names in get_ipython().magics_manager.magics.values()),
    }

import torch, torch.utils.checkpoint
before = counts()
"""


# A step is a row here: what draws is of interest, not what trains.
FEED = """
import threading, ipywidgets
stop = threading.Event()

def feed():
    history, chart, step = session.history, board._chart, 0
    while not stop.wait(0.003):
        if chart._pace._sent - chart._pace._acknowledged < 2:  # the page keeps up
            history.append(step=step, loss=0.99**step, scale=2.0 ** (16 - step // 50 % 3), skipped=step % 50 == 20,
                allocated_bytes=6e7, peak_bytes=1.5e8 + 1e5 * (step % 7), step_s=0.01)
            step += 1
            chart.pull(history, at_once=True)

threading.Thread(target=feed, daemon=True).start()
"""


def test_reload_tabs_and_leaving_while_a_run_goes_on(open_notebook: OpenNotebook, pages: Pages) -> None:
    notebook = open_notebook([OWN_LOOP, FIT], height=2600)
    notebook.run_and_wait(0, SLOW_S)
    board = Dashboard(notebook, 0)
    board.wait_for_plot()
    notebook.run_and_wait(1, SLOW_S)
    board.wait(lambda: board.points("loss line") >= 10, "no points")

    done = board.python("status().step")
    notebook.reload_until(board.has_plot, "after a reload there is no chart")
    board.wait(lambda: board.points("loss line") > done, "after a reload the chart is not whole, or does not go on")
    assert notebook.output(0).locator(".ampw-dashboard").count() == 1

    # two tabs on one notebook
    tab = open_notebook(name=notebook.name, height=2600)
    other = Dashboard(tab, 0)
    other.wait_for_plot()
    other.area.get_by_text("bf16", exact=True).first.click()
    board.wait(lambda: board.area.get_by_role("radio", name="bf16").is_checked(), "the first tab does not follow the second")
    board.layer("1").click()
    other.wait(lambda: other.layer("1").is_checked(), "the second tab does not follow the first")
    shown = board.points("loss line"), other.points("loss line")
    board.wait(lambda: board.points("loss line") > shown[0], "the first tab stands still")
    other.wait(lambda: other.points("loss line") > shown[1], "the second tab stands still")

    # nobody looks for a while
    tab.page.close()
    pages.give_back(notebook)
    late = open_notebook(name=notebook.name, height=2600)
    back = Dashboard(late, 0)
    back.wait_for_plot()
    done = back.python("status().step")
    back.wait(lambda: back.points("loss line") > done, "what happened while no page was open is not there")
    back.press("Stop")
    back.wait(lambda: back.python("run_state") == "stopped", "Stop has no effect after coming back")
    back.wait(lambda: back.points("loss line") == back.python("status().step"), "the chart is not whole after coming back")
    assert len(back.chart()["lines"]) == 2
    back.wait(back.area.get_by_role("radio", name="bf16").is_checked, "what was chosen is not there after coming back")


def test_a_saved_notebook_with_its_kernel_another_and_none(open_notebook: OpenNotebook, lab: Lab, pages: Pages) -> None:
    finite = "session.fit([(x, y)] * 300, nn.functional.cross_entropy)\nsession.wait()"
    notebook = open_notebook([OWN_LOOP, finite], height=2600)
    notebook.run_and_wait(0, SLOW_S)
    board = Dashboard(notebook, 0)
    board.wait_for_plot()
    _wait_for_no_picture(board)
    notebook.run_and_wait(1, SLOW_S)
    board.wait(lambda: "at step 300" in notebook.text(0), "the picture in the notebook is not of the end of the run")
    _wait_for_no_picture(board)
    notebook.save()
    path = lab.notebooks / notebook.name
    assert path.stat().st_size < SAVED_KB * 1000
    saved = path.read_text()
    assert "plotly" not in saved.lower()
    assert "widget-state" not in saved

    # its kernel is alive
    pages.give_back(notebook)
    notebook = open_notebook(name=notebook.name, height=2600)
    board = Dashboard(notebook, 0)
    board.wait_for_plot()
    board.wait(lambda: board.points("loss line") == 300, "not live with its kernel alive")
    _wait_for_no_picture(board)
    board.area.get_by_text("fp16", exact=True).first.click()
    board.wait(lambda: board.python("dashboard_state().requested('autocast')") == "fp16", "a control has no effect")

    # no kernel at all, trusted and not
    pages.give_back(notebook)
    lab.end_kernels(notebook.name)
    content = json.loads(saved)
    gone = {"name": "gone", "display_name": "gone", "language": "gone"}
    content["metadata"] |= {"kernelspec": gone, "language_info": {"name": "gone"}}
    for name in ("trusted.ipynb", "not-trusted.ipynb"):
        content["metadata"]["title"] = name
        (lab.notebooks / name).write_text(json.dumps(content))
        if name == "trusted.ipynb":
            _trust(lab, lab.notebooks / name)
        without = open_notebook(name=name, height=2600, kernel=False)
        without.page.locator(".jp-Dialog button:has-text('No Kernel')").click()
        _assert_still(Dashboard(without, 0))
        without.screenshot(f"no-kernel-{name.removesuffix('.ipynb')}")
        pages.give_back(without)

    # another kernel
    notebook = open_notebook(name=notebook.name, height=2600)
    board = Dashboard(notebook, 0)
    _assert_still(board)
    notebook.wait_until(lambda: _only_not_found(notebook), SLOW_S, "ipywidgets did not look for the widget")
    assert notebook.output(0).get_by_text("model not found").is_visible() is False
    notebook.screenshot("another-kernel-light")
    notebook.set_theme("dark")
    notebook.screenshot("another-kernel-dark")
    notebook.set_theme("light")
    notebook.run_and_wait(0, SLOW_S)
    board.wait_for_plot()
    _wait_for_no_picture(board)
    assert board.python("status().step") == 0
    board.area.get_by_text("bf16", exact=True).first.click()
    board.wait(lambda: board.python("dashboard_state().requested('autocast')") == "bf16", "the new dashboard is not live")


def test_a_kernel_that_ends_and_an_extension_that_is_loaded_again(open_notebook: OpenNotebook) -> None:
    load = "%load_ext amp_widgets\n"
    attach = OWN_LOOP.partition("session =")[0] + f"{load}%amp model optimizer\n{FIT}"
    notebook = open_notebook([COUNTS + load, attach, "%reload_ext amp_widgets\n" * 3, "%amp"], height=2600)
    board = Dashboard(notebook, 1)

    def run_and_see_it_live() -> None:
        notebook.run_and_wait(1, SLOW_S)
        board.wait_for_plot()
        board.wait(lambda: board.area.locator(".ampw-word").inner_text() == "running", "the dashboard is not live")
        board.wait(lambda: board.points("loss line") >= 2, "the dashboard shows no steps")
        board.press("Pause")
        board.wait(lambda: board.python("run_state") == "paused", "the dashboard does not reach its session")
        board.press("Resume")

    notebook.run_and_wait(0, SLOW_S)
    loaded = notebook.kernel.eval("counts()")
    assert loaded["patched"] == notebook.kernel.eval("before['patched']")
    run_and_see_it_live()
    once = notebook.kernel.eval("counts()")
    assert once["dashboards"] == 1

    # %reload_ext, three times, during a run: the session of the magic is closed, and everything is as it was
    notebook.run_and_wait(2, SLOW_S)
    assert board.python("closed")
    board.area.get_by_text("closed: the model is as it was").wait_for()
    board.wait(lambda: notebook.kernel.eval("counts()") == loaded, "something is left behind")
    run_and_see_it_live()
    board.wait(lambda: notebook.kernel.eval("counts()") == once, "something is there twice")
    assert notebook.output(1).locator(".ampw-dashboard").count() == 1
    notebook.run_and_wait(3, SLOW_S)
    assert "AmpSession" in notebook.text(3)

    # in each case the page says so by itself, and the cell brings a live dashboard
    for end in ("restart", "shut down", "die"):
        match end:
            case "restart":
                notebook.restart()
            case "shut down":
                notebook.shut_down()
            case "die":
                process = notebook.kernel.process_id
                notebook.kernel.forget()
                os.kill(process, signal.SIGKILL)
        board.area.get_by_text(AGAIN).first.wait_for(timeout=SLOW_S * 1000)
        board.wait(lambda: board.area.locator(".ampw-word").inner_text() == "no kernel", "it is not said that there is no kernel")
        enabled = board.area.locator(".ampw:not(.ampw-presenting) input:enabled")  # type and theme are the page's own
        board.wait(lambda enabled=enabled: enabled.count() == 0, "what does nothing can be changed")
        _wait_for_no_picture(board)
        notebook.screenshot(f"kernel-gone-{end}")
        if end == "die":  # JupyterLab says so in a dialog, and starts another
            assert notebook.kernel.process_id != process
            notebook.page.get_by_role("button", name="Ok").click()
        run_and_see_it_live()


@pytest.mark.timeout(2 * MOST_S)
def test_redraws_grow_neither_the_kernel_nor_the_page(open_notebook: OpenNotebook) -> None:
    cells = [OWN_LOOP.replace("session.dashboard()", "board = session.dashboard()\nboard"), FEED]
    notebook = open_notebook(cells, height=2600, fresh=True)  # whose timers are changed below
    notebook.run_and_wait(0, SLOW_S)
    Dashboard(notebook, 0).wait_for_plot()
    # The page waits between redraws so as to leave the processor to others: not here.
    notebook.page.evaluate(
        """() => { const real = window.setTimeout;
            window.setTimeout = (call, ms, ...more) => real(call, ms < 1000 ? 0 : ms, ...more); }"""
    )
    notebook.run_and_wait(1, SLOW_S)
    chart = notebook.output(0).locator(".amp-chart")
    devtools = notebook.page.context.new_cdp_session(notebook.page)
    devtools.send("Performance.enable")

    def measured(redraws: int) -> dict[str, float]:
        """After so many redraws, or whatever else there was in the time."""
        notebook.wait_until(lambda: int(chart.get_attribute("data-draws") or 0) >= redraws, MOST_S, f"no {redraws} redraws")
        devtools.send("HeapProfiler.collectGarbage")
        metrics = {one["name"]: one["value"] for one in devtools.send("Performance.getMetrics")["metrics"]}
        return {
            "kernel_mb": _resident_mb(notebook.kernel.process_id),
            "widgets": notebook.kernel.eval("len(ipywidgets.widgets.widget._instances)"),
            "threads": notebook.kernel.eval("sum(thread.name != 'test probe' for thread in threading.enumerate())"),
            "page_mb": metrics["JSHeapUsedSize"] / 1e6,
            "nodes": metrics["Nodes"],
            "listeners": metrics["JSEventListeners"],
        }

    first = measured(REDRAWS // 4)
    sent = notebook.kernel.eval("board._chart._sequence")
    last = measured(REDRAWS)
    notebook.kernel.exec("stop.set()")
    sent = notebook.kernel.eval("board._chart._sequence") - sent
    grown = {name: last[name] - first[name] for name in first}
    print(f"{REDRAWS} redraws, {sent} messages after the first quarter: {first}, grown by {grown}")
    assert grown["widgets"] == grown["threads"] == 0
    assert grown["kernel_mb"] < 6
    assert grown["page_mb"] < 6
    assert grown["nodes"] < 1500
    assert grown["listeners"] < 1500


def _picture(board: Dashboard) -> Locator:
    """What the notebook keeps of a dashboard."""
    return board.area.locator("[class^=ampw-still]")


def _wait_for_no_picture(board: Dashboard) -> None:
    """The dashboard hides it when it is on the page."""
    board.wait(lambda: not _picture(board).is_visible(), "the picture is shown beside the live dashboard")


def _assert_still(board: Dashboard) -> None:
    """There is no live dashboard, and its picture is there, with what to run."""
    picture = _picture(board)
    picture.wait_for(timeout=SLOW_S * 1000)
    assert "at step 300" in picture.inner_text()
    assert AGAIN in picture.inner_text()
    drawn = "images => images.length > 0 && images.every(one => one.complete && one.naturalWidth > 500)"
    board.wait(lambda: picture.locator("img").evaluate_all(drawn), "a picture is not an image")
    assert board.area.locator(".ampw-dashboard").count() == 0


def _only_not_found(notebook: Notebook) -> bool:
    """Whether ipywidgets has said that it does not know the widget; takes that from the errors, which must be no others."""
    said = [error for error in notebook.errors if NOT_FOUND in error]
    for error in said:
        notebook.errors.remove(error)
    return bool(said)


def _trust(lab: Lab, path: Path) -> None:
    subprocess.run([sys.executable, "-m", "jupyter", "trust", str(path)], env=lab._environment(), check=True, capture_output=True)


def _resident_mb(process: int) -> float:
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
