"""Two recorded runs of the digits model over each other in a real JupyterLab: alignment, plots, the table, a file that grows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import OpenNotebook

pytestmark = pytest.mark.browser

MAKE = """
import pathlib, tempfile
import numpy as np
import torch
import amp_widgets as aw
from amp_widgets.demos.digits import DigitsNet, digits_data
torch.set_num_threads(1)
folder = pathlib.Path(tempfile.mkdtemp())
images, labels = (part[:64] for part in digits_data())

def begin(name, **settings):
    torch.manual_seed(0)
    model = DigitsNet(channels=8, depth=2)
    session = aw.AmpSession(model, torch.optim.Adam(model.parameters(), lr=1e-3), record=folder / name)
    session.train_model = model
    session.request(**settings)
    return session

def train(session, steps):
    optimizer = session.optimizers[0]
    for _ in range(steps):
        optimizer.zero_grad()
        with session.autocast():
            loss = torch.nn.functional.cross_entropy(session.train_model(images), labels)
        session.scaler.scale(loss).backward()
        session.scaler.step(optimizer)
        session.scaler.update()

first = begin("fp32.db", autocast="fp32")
train(first, 40)
first.close()
second = begin("<b>bf16.db", autocast="bf16", checkpointed=["layers.*"])
train(second, 30)
"""
SHOW = """
compared = aw.compare_runs(folder / "fp32.db", folder / "<b>bf16.db")
view = compared.view()
view
"""
LINES = """root => Object.fromEntries((root.querySelector('.js-plotly-plot')?._fullData ?? [])
    .filter(one => one.meta.part === 'line').map(one => [`${one.meta.run} ${one.meta.series}`, [[...one.x], [...one.y]]]))"""
X_TITLE = "root => root.querySelector('.js-plotly-plot')?.layout.xaxis.title.text"
CELLS = "rows => rows.map(row => [...row.children].map(one => one.innerText.trim()))"


def test_two_runs_over_each_other_and_one_that_grows(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([MAKE, SHOW], height=2600)
    notebook.run_and_wait(0)
    notebook.run_and_wait(1)
    area = notebook.output(1)
    python = notebook.kernel.eval

    def wait(check: Any, what: str) -> None:
        notebook.wait_until(check, what=what)

    # every line is that of the history
    wait(lambda: len(area.evaluate(LINES)) == 10, "there is no figure")
    lines = area.evaluate(LINES)
    for run in (0, 1):
        for series, column in (("loss", "loss"), ("peak", "peak_bytes"), ("step_s", "step_s")):
            x, y = lines[f"{run} {series}"]
            assert x == python(f"compared.runs[{run}].history.columns('step')['step'].tolist()")
            assert y == python(f"compared.runs[{run}].history.columns({column!r})[{column!r}].tolist()")
    assert [len(lines[f"{run} loss"][0]) for run in (0, 1)] == [40, 30]

    # the table is that of Python, and says what differs
    table = area.locator(".ampw-runs-table table")
    wait(lambda: table.locator("tbody").first.locator("tr").count() > 0, "there is no table")
    shown = {name: texts for name, *texts in table.locator("tbody").first.locator("tr").evaluate_all(CELLS)}
    assert shown == python("{row.name: list(row.texts) for row in compared.table.differing}")
    assert shown["autocast"] == ["fp32", "bf16"]
    assert shown["checkpointed"] == ["none", "layers.0, layers.1"]
    assert shown["steps"] == ["40", "30"]
    peaks = python("[float(run.history.columns('peak_bytes')['peak_bytes'].max()) for run in compared.runs]")
    assert peaks[1] < peaks[0]
    assert shown["peak memory"] == [f"{peaks[0] / 1e6:.1f} MB", f"{peaks[1] / 1e6:.1f} MB ×{peaks[1] / peaks[0]:.2f}"]
    fold = table.get_by_role("button", name="the same in both runs")
    assert not table.get_by_role("rowheader", name="growth_interval").is_visible()
    fold.click()
    table.get_by_role("rowheader", name="growth_interval").wait_for()
    assert [*table.locator("thead th").all_inner_texts()] == ["fp32", "<b>bf16"]
    assert not notebook.scrolls_sideways(1)
    notebook.screenshot("runs-light", area)

    # along time, and averaged
    area.get_by_text("time since it began").click()
    wait(lambda: "since the run began" in area.evaluate(X_TITLE), "it is not along time")
    x, _ = area.evaluate(LINES)["1 loss"]
    time_s = python("(lambda c: (c['time_s'] - c['time_s'][0] + c['step_s'][0]).tolist())(compared.runs[1].history.columns())")
    assert x == pytest.approx(time_s, abs=1e-9)
    area.get_by_label("Smoothing").select_option("10")
    expected = python(
        "(lambda y: [float(np.sum(y[:i + 1] * .9 ** np.arange(i, -1, -1.)) / np.sum(.9 ** np.arange(i, -1, -1.)))"
        " for i in range(len(y))])(compared.runs[1].history.columns('loss')['loss'])"
    )
    wait(lambda: area.evaluate(LINES)["1 loss"][1] == pytest.approx(expected, rel=1e-9), "it is not averaged")

    # without one run and one plot
    area.get_by_role("checkbox", name="fp32").uncheck()
    area.get_by_role("checkbox", name="allocated memory").uncheck()
    left = {"1 loss", "1 scale", "1 peak", "1 step_s"}
    wait(lambda: set(area.evaluate(LINES)) == left, "what is not ticked is still drawn")
    area.get_by_role("checkbox", name="fp32").check()
    wait(lambda: len(area.evaluate(LINES)) == 8, "the run does not come back")
    notebook.set_theme("dark")
    notebook.page.set_viewport_size({"width": 900, "height": 2600})
    notebook.page.wait_for_timeout(500)
    notebook.screenshot("runs-dark-900", area)
    assert not notebook.scrolls_sideways(1)

    # the file grows
    area.get_by_text("step", exact=True).first.click()
    area.get_by_label("Smoothing").select_option("0")
    python("train(second, 15)")
    wait(lambda: len(area.evaluate(LINES)["1 loss"][0]) == 45, "the line does not grow")
    row = table.locator("tbody").first.locator("tr").filter(has=area.page.get_by_role("rowheader", name="steps", exact=True))
    wait(lambda: row.evaluate_all(CELLS) == [["steps", "40", "45"]], "the table is not renewed")
    assert python("view.close() or view.closed")
