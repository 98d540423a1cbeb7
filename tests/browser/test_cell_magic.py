"""``%%amp`` over loops that know nothing of it, in a real JupyterLab: seen on the page, asserted in the kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from test_quickstart import SLOW_S, Dashboard

if TYPE_CHECKING:
    from conftest import OpenNotebook

SETUP = """
%load_ext amp_widgets
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
net = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)], nn.Linear(16, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
dataset = TensorDataset(torch.randn(64, 16), torch.randint(2, (64,)))
finish = False
"""
PLAIN = """%%amp
print("before the loop")
end = time.monotonic() + 170
while not finish and time.monotonic() < end:
    for inputs, labels in DataLoader(dataset, batch_size=16):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(inputs), labels)
        loss.backward()
        optimizer.step()
        time.sleep(0.1)
print("after the loop")
"""
CUDA_ONLY = """%%amp --cpu
from torch.cuda.amp import autocast, GradScaler
model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)).cuda()
optimizer2 = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = GradScaler()
end = time.monotonic() + 170
while not finish and time.monotonic() < end:
    for inputs, labels in DataLoader(dataset, batch_size=16):
        inputs, labels = inputs.cuda(), labels.cuda()
        optimizer2.zero_grad()
        with autocast():
            loss = nn.functional.cross_entropy(model(inputs), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer2)
        scaler.update()
        time.sleep(0.1)
"""
NEWEST = "__import__('amp_widgets.session', fromlist=['_']).newest_session()"


def finish(board: Dashboard, cell: int) -> None:
    board.notebook.kernel.exec("finish = True")
    board.wait(lambda: board.notebook.kernel.eval(f"{NEWEST} is None"), "the session is not closed")  # a new page cannot tell
    board.notebook.wait_cell(cell, SLOW_S)
    board.notebook.kernel.exec("finish = False")


def events(board: Dashboard, kind: str) -> list[Any]:
    return list(board.notebook.kernel.eval(f"[(e.reason, e.detail['source']) for e in {board.session}.history.events({kind!r})]"))


def test_an_untouched_plain_loop_under_live_control(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([SETUP, PLAIN, "type(net), session.closed, session.status().step > 5"], height=2600)
    notebook.run_and_wait(0, SLOW_S)
    notebook.run(1)
    board = Dashboard(notebook, 1, NEWEST)
    board.wait_for_plot()
    board.wait(lambda: board.points("loss line") >= 5, "the charts do not move while the cell runs")

    board.area.get_by_text("fp16", exact=True).first.click()
    board.wait(lambda: board.python("settings.autocast") == "fp16", "fp16 did not come into force during the cell")
    board.area.get_by_text("Added by amp_widgets: autocast around the model's forward and loss scaling").first.wait_for()
    for name in ("0", "2"):
        board.layer(name).click()
    board.wait(lambda: board.python("settings.checkpointed") == ["0", "2"], "the layers did not come into force")
    slider = board.area.get_by_role("slider", name="Initial scale")
    slider.focus()
    slider.press("End")
    board.wait(lambda: board.python("status().skipped_steps") >= 2, "nothing overflowed at 2^40")
    board.wait(lambda: board.points("skipped marks") >= 2, "skipped steps are not marked")
    assert notebook.is_running(1)
    assert {source for _, source in events(board, "applied")} == {"widget"}

    # the dashboard is above what the cell printed before it
    chart = board.area.locator(".ampw-dashboard").first.bounding_box()
    printed = board.area.get_by_text("before the loop").first.bounding_box()
    assert chart is not None
    assert printed is not None
    assert chart["y"] + chart["height"] <= printed["y"]
    notebook.screenshot("cell-magic-light")
    notebook.set_theme("dark")
    notebook.page.wait_for_timeout(1000)
    notebook.screenshot("cell-magic-dark")
    notebook.set_theme("light")

    # a page that is loaded again while the cell runs
    notebook.reload(kernel=False)
    board.wait_for_plot()
    before = board.points("loss line")
    board.wait(lambda: board.points("loss line") > before, "the chart does not go on after a reload")

    # the end: the last state is shown, and the model is as it was
    finish(board, 1)
    board.area.get_by_text("This session is closed").first.wait_for()
    notebook.run_and_wait(2, SLOW_S)
    assert "(torch.nn.modules.container.Sequential, True, True)" in notebook.output(2).inner_text()
    assert not notebook.scrolls_sideways(1)


def test_cuda_only_code_on_the_cpu_says_so(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([SETUP, CUDA_ONLY, CUDA_ONLY.replace(" --cpu", "")], height=2600)
    notebook.run_and_wait(0, SLOW_S)
    notebook.run(1)
    board = Dashboard(notebook, 1, NEWEST)
    board.wait_for_plot()
    board.area.get_by_text("Runs on the CPU, as --cpu asks").first.wait_for()
    assert board.area.get_by_role("radio", name="fp16").is_checked()
    board.area.get_by_text("bf16", exact=True).first.click()
    board.wait(lambda: board.python("settings.autocast") == "bf16", "bf16 did not come into force during the cell")
    assert not notebook.kernel.eval("scaler.is_enabled()")
    notebook.screenshot("cell-magic-cpu")
    finish(board, 1)
    assert notebook.kernel.eval("(type(scaler).__module__, scaler.is_enabled())") == ["torch.cuda.amp.grad_scaler", True]
    # without the flag the cell fails as it always did
    notebook.run(2)
    notebook.output(2).get_by_text("Torch not compiled with CUDA enabled").first.wait_for()
    notebook.output(2).get_by_text("the cell ended before it had trained a model").first.wait_for()


SWEEP = """%%amp
for lr in (0.1, 0.01, 0.001):
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    sgd = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(10):
        for inputs, labels in DataLoader(dataset, batch_size=16):
            sgd.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            sgd.step()
            time.sleep(0.03)
    print("trained with", lr)
"""
DASHBOARDS = "sum(type(w).__name__ == 'Dashboard' for w in __import__('ipywidgets').Widget.widgets.values())"


def test_the_dashboard_follows_a_sweep_and_is_freed_when_the_cell_runs_again(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([SETUP, SWEEP], height=2600)
    notebook.run_and_wait(0, SLOW_S)
    board = Dashboard(notebook, 1, NEWEST)
    for _ in range(2):
        notebook.run(1)
        board.area.get_by_text("trained with 0.1").first.wait_for()
        board.wait_for_plot()
        board.wait(lambda: board.points("loss line") >= 3, "no chart of the second model")
        board.area.get_by_text("trained with 0.001").first.wait_for()
        notebook.wait_cell(1, SLOW_S)
        board.area.get_by_text("This session is closed").first.wait_for()
        board.wait(lambda: board.points("loss line") == 40, "the chart of the last model is not whole")
        assert board.area.locator(".ampw-dashboard:visible").count() == 1
        assert notebook.kernel.eval(DASHBOARDS) <= 2
