"""A training loop in a busy cell, and its dashboard driven with the messages that its page sends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from harness.kernel_page import Page, of

SETUP = """
    import json, threading, time, torch
    from torch import nn
    import amp_widgets as aw

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Sequential(nn.Linear(16, 16), nn.ReLU()), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    session = aw.AmpSession(model, optimizer)
    dashboard = session.dashboard()
    dashboard
"""
CELL = """
    print("started", flush=True)
    applied, end_s = len(session.history_so_far.events("applied")), time.monotonic() + 30
    data = torch.randn(4, 8)
    while not over() and time.monotonic() < end_s:
        optimizer.zero_grad()
        with session.autocast():
            loss = model(data).float().pow(2).mean()
        session.scaler.scale(loss).backward()
        session.scaler.step(optimizer)
        session.scaler.update()
        if len(session.history_so_far.events("applied")) > applied:
            applied += 1
            print("applied", applied, flush=True)
        time.sleep(0.002)
    steps_at_end = session.status().step
    assert over()
"""


class DashboardPage(Page):
    """It learns of the widgets from what the kernel publishes, as a page does."""

    def comm_of(self, widget: str) -> str:
        opened = [m["content"] for m in self.published if m["msg_type"] == "comm_open"]
        [found] = [o["comm_id"] for o in opened if o["data"]["state"].get("_anywidget_id", "").endswith(f".{widget}")]
        return str(found)

    def ask(self, widget: str, content: dict[str, Any], subshell: str | None) -> str:
        """What ``asking().ask`` in page.js sends; `content` has the id by which the answer is known."""
        data = {"method": "custom", "content": content}
        return self.send("comm_msg", {"comm_id": self.comms[widget], "data": data}, subshell=subshell)

    def heard(self, widget: str, method: str) -> list[Any]:
        sent = [m["content"] for m in self.published if m["msg_type"] == "comm_msg"]
        key = {"custom": "content", "update": "state"}[method]
        return [c["data"][key] for c in sent if c["comm_id"] == self.comms[widget] and c["data"]["method"] == method]

    comms: dict[str, str]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DashboardPage]:
    pytest.importorskip("jupyter_client")
    pytest.importorskip("anywidget")
    page = DashboardPage(tmp_path_factory.mktemp("busy"))
    try:
        page.run(SETUP)
        names = ("StatusLine", "RunControl", "AutocastControl", "ScalerControl", "LayersControl")
        page.comms = {name: page.comm_of(name) for name in names}
        yield page
    finally:
        page.close()


@pytest.fixture(params=[False, True], ids=["main shell", "subshell"])
def subshell(running: DashboardPage, request: pytest.FixtureRequest) -> Iterator[str | None]:
    """None, or the subshell on which JupyterLab and Notebook 7 send the messages of widgets."""
    if not request.param:
        yield None
        return
    made: str = running.control("create_subshell_request")["content"]["subshell_id"]
    yield made
    running.control("delete_subshell_request", {"subshell_id": made})


def test_every_switch_is_in_force_while_the_cell_runs(running: DashboardPage, subshell: str | None) -> None:
    page = running
    page.published.clear()
    exponent = 10 if subshell is None else 11
    changes: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("AutocastControl", {"autocast": "bf16"}, {"autocast": "bf16"}),
        ("ScalerControl", {"setting": "scaling", "value": False}, {"scaling": False}),
        ("ScalerControl", {"setting": "scaling", "value": True}, {"scaling": True}),
        ("ScalerControl", {"setting": "init_scale", "value": exponent}, {"init_scale": 2.0**exponent}),
        ("LayersControl", {"layer": "2", "on": True}, {"checkpointed": ["2"]}),
        ("LayersControl", {"layer": "2", "on": False}, {"checkpointed": []}),
        ("AutocastControl", {"autocast": "fp32"}, {"autocast": "fp32"}),
    ]
    before = int(page.value("len(session.history.events('applied'))"))
    page.run(f"over = lambda: len(session.history_so_far.events('applied')) >= {before + len(changes)}")
    busy = page.execute(CELL)
    page.saw(busy, "started")
    queued = page.execute("print(steps_at_end)")
    page.ask("StatusLine", {"view": "a page's", "open": True}, subshell)
    for number, (widget, content, _) in enumerate(changes):
        asked = {**content, "id": f"amp-{number}-{subshell}"}
        message = page.ask(widget, asked, subshell)
        page.idle(message)
        page.wait_for(lambda asked=asked, widget=widget: {"answered": asked["id"]} in page.heard(widget, "custom"), "answer")
        if number == 0:
            page.wait_for(lambda: {"in_force": "bf16"}.items() <= _shown(page, "AutocastControl").items(), "update of the page")
        if number < len(changes) - 1:
            page.saw(busy, f"applied {before + number + 1}\n")
            assert not of(page.replies, busy)
    assert page.reply(busy)["content"]["status"] == "ok"
    page.reply(queued)
    steps_at_end = int(page.output(queued))
    assert page.value("len(session.history.events('rejected'))") == 0
    events = page.value("[[event.step, event.detail] for event in session.history.events('applied')]")[before:]
    for (step, detail), (_, _, wanted) in zip(events, changes, strict=True):
        assert detail.pop("source") == "widget"
        assert {key: detail.get(key) for key in wanted} == wanted
        assert step <= steps_at_end
    steps = [step for step, _ in events]
    assert steps == sorted(steps)  # two that come between the same two steps are in force from the same one


def test_without_the_pump_the_page_gets_no_answer_on_the_main_shell(running: DashboardPage) -> None:
    """What the above would look like if it did not work."""
    page = running
    page.published.clear()
    page.run("session._background.pump.close(); end_at_s = time.monotonic() + 0.6; over = lambda: time.monotonic() > end_at_s")
    busy = page.execute(CELL)
    page.saw(busy, "started")
    page.ask("AutocastControl", {"autocast": "bf16", "id": "late"}, None)
    page.reply(busy)
    assert json.loads(page.run("print(json.dumps(session.settings.autocast))")) == "fp32"
    page.wait_for(lambda: {"answered": "late"} in page.heard("AutocastControl", "custom"), "answer")


def _shown(page: DashboardPage, widget: str) -> dict[str, Any]:
    """What the page shows of what it was told since the cell began."""
    state: dict[str, Any] = {}
    for update in page.heard(widget, "update"):
        state.update(update)
    return state
