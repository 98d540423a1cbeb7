"""The kernel module against a real ipykernel, spoken to with its protocol, as a page does.

``AMP_WIDGETS_KERNEL_PYTHON`` names the interpreter that runs the kernel, to try another ipykernel than this environment's.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from amp_widgets import kernel as kernel_module
from amp_widgets.kernel import CommPump, in_kernel, on_interrupt

ROOT = Path(__file__).parent.parent
KERNEL_PYTHON = os.environ.get("AMP_WIDGETS_KERNEL_PYTHON", sys.executable)
PATIENCE_S = 20.0  # only ever waited for in full by a test that fails

SETUP = """
    import asyncio, json, logging, os, signal, sys, threading, time, warnings
    import ipywidgets, zmq
    from IPython import get_ipython
    from amp_widgets import kernel as kernel_module
    from amp_widgets.kernel import CommPump, on_interrupt

    kernel = get_ipython().kernel
    slider = ipywidgets.IntSlider(min=0, max=10**6)
    cell = None       # what runs, for whom it may concern
    got = []          # (value, the cell in which it came): changes of the slider, and messages of other kinds
    slider.observe(lambda change: got.append((change.new, cell)), "value")
    slider.on_msg(lambda widget, content, buffers: got.append((content, cell)))
    ran = []          # names of cells, in the order in which they ran
    called = []       # by the stop button

    def told(name):
        # a callback for it, which says at once that it was called
        def callback():
            called.append(name)
            assert threading.current_thread() is threading.main_thread()
            print(f"called {name}", flush=True)
        return callback

    def until(condition, pump=None, limit_s=8.0):
        end_s = time.monotonic() + limit_s
        while not condition() and time.monotonic() < end_s:
            if pump is not None:
                pump.pump()
            time.sleep(0.001)
        return condition()

    def message_is_there():
        return bool(main_stream().socket.getsockopt(zmq.EVENTS) & zmq.POLLIN)

    def main_stream():
        thread = kernel.shell_channel_thread if hasattr(kernel, "shell_channel_thread") else None
        return thread.manager.get_shell_channel_to_subshell_pair(None).to_stream if thread else kernel.shell_stream
"""


class Page:
    """A kernel and a client that does what a page does, and remembers every message."""

    def __init__(self, directory: Path) -> None:
        from jupyter_client.kernelspec import KernelSpec
        from jupyter_client.manager import KernelManager

        class Manager(KernelManager):
            @property
            def kernel_spec(self) -> KernelSpec:
                argv = [KERNEL_PYTHON, "-Xfrozen_modules=off", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
                return KernelSpec(argv=argv, display_name="under test", language="python")

        directories = {name: str(directory / name) for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR")}
        self.log = open(directory / "kernel.log", "w+", encoding="utf-8")  # noqa: SIM115
        self.manager = Manager(connection_file=str(directory / "connection.json"))
        self.manager.start_kernel(
            env=os.environ | directories | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, stdout=self.log, stderr=self.log
        )
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.slider = ""  # the id of its comm
        self.published: list[dict[str, Any]] = []
        self.replies: list[dict[str, Any]] = []

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.log.close()

    # ---- sending ----

    def execute(self, code: str, **options: Any) -> str:
        message_id: str = self.client.execute(textwrap.dedent(code), **options)
        return message_id

    def send(self, kind: str, content: dict[str, Any], *, subshell: str | None = None) -> str:
        message = self.client.session.msg(kind, content)
        if subshell is not None:
            message["header"]["subshell_id"] = subshell
        self.client.shell_channel.send(message)
        message_id: str = message["header"]["msg_id"]
        return message_id

    def set_slider(self, value: int, *, subshell: str | None = None) -> str:
        data = {"method": "update", "state": {"value": value}, "buffer_paths": []}
        return self.send("comm_msg", {"comm_id": self.slider, "data": data}, subshell=subshell)

    def tell_slider(self, value: int) -> str:
        """A message that is seen again when it is handled twice; a change to the same value is not."""
        return self.send("comm_msg", {"comm_id": self.slider, "data": {"method": "custom", "content": value}})

    def control(self, kind: str, content: dict[str, Any] | None = None) -> dict[str, Any]:
        message = self.client.session.msg(kind, content or {})
        self.client.control_channel.send(message)
        while True:
            reply: dict[str, Any] = self.client.get_control_msg(timeout=PATIENCE_S)
            if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                return reply

    # ---- receiving ----

    def receive(self) -> None:
        """Take in all that is there; wait a moment if nothing is."""
        found = False
        for get, store in ((self.client.get_iopub_msg, self.published), (self.client.get_shell_msg, self.replies)):
            while True:
                try:
                    store.append(get(timeout=0))
                    found = True
                except queue.Empty:
                    break
        if not found:
            time.sleep(0.005)

    def wait_for(self, condition: Callable[[], Any], what: str) -> Any:
        end_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < end_s:
            result = condition()
            if result:
                return result
            self.receive()
        heard = [(m["msg_type"], m["content"]) for m in self.published[-8:]]
        pytest.fail(f"no {what} within {PATIENCE_S} s; the last that the kernel published: {heard}")

    def reply(self, message_id: str) -> dict[str, Any]:
        """The reply to a request, once its work is done."""
        found = self.wait_for(lambda: _of(self.replies, message_id), f"reply to {message_id}")[0]
        self.idle(message_id)
        return dict(found)

    def idle(self, message_id: str) -> None:
        self.wait_for(lambda: "idle" in self.statuses(message_id), f"end of {message_id}")

    def statuses(self, message_id: str) -> list[str]:
        return [m["content"]["execution_state"] for m in _of(self.published, message_id) if m["msg_type"] == "status"]

    def output(self, message_id: str) -> str:
        return "".join(m["content"]["text"] for m in _of(self.published, message_id) if m["msg_type"] == "stream")

    def saw(self, message_id: str, text: str) -> None:
        """Wait until the cell has printed `text`."""
        self.wait_for(lambda: text in self.output(message_id), f"{text!r} from {message_id}")

    def run(self, code: str) -> str:
        """Run a cell that must not fail; returns what it printed."""
        message_id = self.execute(code)
        content = self.reply(message_id)["content"]
        assert content["status"] == "ok", "\n".join(content.get("traceback", [str(content)]))
        return self.output(message_id)

    def value(self, expression: str) -> Any:
        return json.loads(self.run(f"print(json.dumps({expression}))"))

    def interrupt(self) -> None:
        self.manager.interrupt_kernel()


def _of(messages: list[dict[str, Any]], message_id: str) -> list[dict[str, Any]]:
    return [message for message in messages if message["parent_header"].get("msg_id") == message_id]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    pytest.importorskip("jupyter_client")
    pytest.importorskip("ipykernel")
    page = Page(tmp_path_factory.mktemp("kernel"))
    try:
        page.run(SETUP)
        page.slider = page.value("slider.comm.comm_id")
        yield page
    finally:
        page.close()


@pytest.fixture
def page(running: Page) -> Iterator[Page]:
    """The kernel with a new pump; afterwards it is as ipykernel made it."""
    running.published.clear()
    running.replies.clear()
    running.run("slider.value = 0")  # ipykernel 7.4 sends messages of a comm to the shell that wrote last on it: the main one
    running.run("pump = CommPump(); cell = None; got.clear(); ran.clear(); called.clear()")
    yield running
    running.run("pump.close()")
    left = running.value(
        "[[name for name in ('should_handle', 'pre_handler_hook') if name in vars(kernel)],"
        " 'amp_widgets' in repr(main_stream()._recv_callback),"
        " repr(kernel.saved_sigint_handler)]"
    )
    assert left == [[], False, "<Handlers.SIG_IGN: 1>"]


# ---- without a kernel ---------------------------------------------------------------------------------------------------


def test_outside_a_kernel_nothing_happens() -> None:
    assert not in_kernel()
    pump = CommPump()
    pump.pump()
    assert not pump.available
    assert pump.why_not == ""
    pump.close()
    before = signal.getsignal(signal.SIGINT)
    uninstall = on_interrupt(lambda: pytest.fail("called"))
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    uninstall()
    uninstall()


@pytest.mark.parametrize("missing", [False, True])
def test_nothing_of_jupyter_is_imported(missing: bool) -> None:
    code = """
        import sys
        names = ("IPython", "ipykernel", "zmq", "tornado", "comm", "ipywidgets", "torch")
        if MISSING:
            sys.modules.update(dict.fromkeys(names))
        from amp_widgets.kernel import CommPump, in_kernel, on_interrupt
        assert not in_kernel()
        CommPump().pump()
        on_interrupt(print)()
        assert not [name for name in names if sys.modules.get(name)]
    """
    code = textwrap.dedent(code).replace("MISSING", str(missing))
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (SimpleNamespace(), "AttributeError"),
        (SimpleNamespace(shell_channel_thread=SimpleNamespace(manager=SimpleNamespace())), "get_shell_channel_to_subshell_pair"),
        (SimpleNamespace(shell_stream=SimpleNamespace(io_loop=1), io_loop=2), "another event loop"),
    ],
)
def test_an_unknown_kernel_is_left_alone_and_said_so(
    kernel: SimpleNamespace, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("zmq")
    monkeypatch.setattr(kernel_module, "_kernel", lambda: kernel)
    before = vars(kernel).copy()
    pump = CommPump()
    pump.pump()
    assert not pump.available
    assert pump.why_not.startswith("controls take effect when the cell ends; use Start, or %amp set")
    assert reason in pump.why_not
    handler = signal.getsignal(signal.SIGINT)
    on_interrupt(lambda: None)()
    assert signal.getsignal(signal.SIGINT) is handler
    assert vars(kernel) == before


# ---- messages during a cell ---------------------------------------------------------------------------------------------


def test_a_change_takes_effect_during_the_cell(page: Page) -> None:
    assert page.value("[kernel_module.in_kernel(), pump.available, pump.why_not]") == [True, True, ""]
    busy = page.execute("cell = 'busy'; print('started'); assert until(lambda: len(got) == 3, pump); cell = None")
    page.saw(busy, "started")
    for value in (1, 2, 3):
        page.set_slider(value)
    assert page.reply(busy)["content"]["status"] == "ok"
    assert page.value("got") == [[1, "busy"], [2, "busy"], [3, "busy"]]


def test_without_the_pump_it_waits_for_the_end_of_the_cell(page: Page) -> None:
    page.run("pump.close()")
    busy = page.execute("cell = 'busy'; print('started'); until(lambda: got, pump, limit_s=1); cell = None")
    page.saw(busy, "started")
    changes = [page.set_slider(value) for value in (101, 102, 103)]
    page.reply(busy)
    page.idle(changes[-1])
    assert page.value("got") == [[101, None], [102, None], [103, None]]


def test_two_hundred_messages_in_order(page: Page) -> None:
    busy = page.execute("cell = 'busy'; print('started'); assert until(lambda: len(got) == 200, pump); cell = None")
    page.saw(busy, "started")
    changes = [page.set_slider(value) for value in range(1001, 1201)]
    assert page.reply(busy)["content"]["status"] == "ok"
    assert page.value("got") == [[value, "busy"] for value in range(1001, 1201)]
    for change in changes:  # a page holds back the next change of a control until the last one's "idle"
        page.idle(change)
        assert page.statuses(change) == ["busy", "idle"]
    before_end = [m["content"]["execution_state"] for m in page.published if m["msg_type"] == "status"]
    assert page.statuses(busy)[-1] == "idle"
    assert set(page.statuses(busy)[:-1]) == {"busy"}  # said again after the messages, or the page would show an idle kernel
    assert page.statuses(busy).count("busy") >= 2
    assert before_end.count("idle") >= 201


def test_what_one_look_leaves_is_handled_after_the_cell(page: Page) -> None:
    """The loop is told of messages once; when the pump has looked, it has to be told again."""
    busy = page.execute(
        """
        cell = "busy"
        print("started")
        assert until(message_is_there)
        time.sleep(0.3)
        pump.pump()
        cell = None
        """
    )
    page.saw(busy, "started")
    changes = [page.set_slider(value) for value in range(22_001, 22_071)]
    page.idle(changes[-1])
    got = page.value("got")
    assert [value for value, _ in got] == list(range(22_001, 22_071))
    assert [cell for _, cell in got].count("busy") == kernel_module.MESSAGES_PER_PUMP


def test_messages_that_the_kernel_read_before_the_cell_began(page: Page) -> None:
    """As after *Run all*: the training cell and changes wait behind a cell that does not pump."""
    first = page.execute("print('started'); time.sleep(0.5)")
    page.saw(first, "started")
    changes = [page.tell_slider(2001)]
    page.execute("cell = 'busy'; until(lambda: len(got) == 5, pump, limit_s=3); cell = None")
    changes += [page.tell_slider(value) for value in (2002, 2003, 2004, 2005)]
    page.reply(page.execute("pass"))
    assert page.value("got") == [[2001, None], *([value, "busy"] for value in (2002, 2003, 2004, 2005))]
    for change in changes:
        assert "idle" in page.statuses(change)


def test_messages_of_a_cell_that_awaits(page: Page) -> None:
    """The loop is free while such a cell sleeps, so that it reads messages itself."""
    busy = page.execute(
        """
        cell = "busy"
        print("started")
        for _ in range(4000):
            pump.pump()
            await asyncio.sleep(0.001)
            if len(got) == 20:
                break
        cell = None
        """
    )
    page.saw(busy, "started")
    queued = page.execute("ran.append(len(got))")
    for value in range(3001, 3021):
        page.set_slider(value)
    assert page.reply(busy)["content"]["status"] == "ok"
    page.reply(queued)
    assert page.value("got") == [[value, "busy"] for value in range(3001, 3021)]
    assert page.value("ran") == [20]


def test_other_messages_wait_and_keep_their_order(page: Page) -> None:
    """Some are read before the pumping cell begins, some are taken off the socket by the pump, some come after its last look."""
    first = page.execute("print('started'); time.sleep(0.5)")
    page.saw(first, "started")
    busy = page.execute(
        """
        cell = "busy"
        print("started")
        assert until(lambda: len(got) == 4, pump)
        print("no more")
        time.sleep(0.5)
        ran.append("busy")
        cell = None
        """
    )
    requests = [page.execute(f"ran.append({name!r}); print({name!r})") for name in "ab"]
    page.saw(busy, "started")
    for number, name in enumerate("cdef"):
        requests.append(page.execute(f"ran.append({name!r}); print({name!r})"))
        page.set_slider(4001 + number)
    completion = page.client.complete("time.monoto")
    page.saw(busy, "no more")
    requests += [page.execute(f"ran.append({name!r}); print({name!r})") for name in "gh"]
    page.reply(requests[-1])
    assert page.value("got") == [[value, "busy"] for value in (4001, 4002, 4003, 4004)]
    assert page.value("ran") == ["busy", *"abcdefgh"]
    assert [page.output(request) for request in requests] == [f"{name}\n" for name in "abcdefgh"]
    assert "monotonic" in str(page.reply(completion)["content"]["matches"])
    replied = [reply["parent_header"]["msg_id"] for reply in page.replies]
    order = [replied.index(message) for message in (busy, *requests[:6], completion, *requests[6:])]
    assert order == sorted(order)


def test_a_failing_cell_aborts_what_waits_behind_it_as_ever(page: Page) -> None:
    busy = page.execute("print('started'); until(lambda: got, pump); raise ValueError('on purpose')")
    page.saw(busy, "started")
    behind = [page.execute(f"ran.append({name!r})") for name in "ab"]
    page.set_slider(5001)
    assert page.reply(busy)["content"]["ename"] == "ValueError"
    assert [page.reply(message)["content"]["status"] for message in behind] == ["aborted", "aborted"]
    assert page.value("[ran, got]") == [[], [[5001, None]]]


def test_a_page_that_is_loaded_again_gets_its_answers(page: Page) -> None:
    """It asks what kernel this is and which widgets there are, and opens a comm, before it shows anything."""
    page.run(
        """
        heard = []
        def on_open(comm, message):
            heard.append("open")
            comm.on_msg(lambda message: heard.append(message["content"]["data"]))
            comm.on_close(lambda message: heard.append("close"))
        kernel.comm_manager.register_target("mine", on_open)
        """
    )
    busy = page.execute("print('started'); assert until(lambda: 'close' in heard, pump)")
    page.saw(busy, "started")
    requests = [page.send("kernel_info_request", {}), page.send("comm_info_request", {"target_name": "jupyter.widget"})]
    page.wait_for(lambda: all(_of(page.replies, request) for request in requests), "answers")
    answers = [_of(page.replies, request)[0] for request in requests]
    assert [answer["msg_type"] for answer in answers] == ["kernel_info_reply", "comm_info_reply"]
    assert answers[0]["content"]["implementation"] == "ipython"
    assert page.slider in answers[1]["content"]["comms"]
    page.idle(page.send("comm_open", {"comm_id": "of-the-page", "target_name": "mine", "data": {}}))
    page.idle(page.send("comm_msg", {"comm_id": "of-the-page", "data": 7}))
    assert not _of(page.replies, busy)
    page.send("comm_close", {"comm_id": "of-the-page", "data": {}})
    assert page.reply(busy)["content"]["status"] == "ok"
    assert page.value("heard") == ["open", 7, "close"]


def test_what_the_cell_prints_stays_with_the_cell(page: Page) -> None:
    page.run("def tell(change): print('callback', change.new)\nslider.observe(tell, 'value')")
    busy = page.execute("print('before', end=''); assert until(lambda: got, pump); print(' and after'); display('shown'); 42")
    page.saw(busy, "before")
    change = page.set_slider(7001)
    page.reply(busy)
    page.run("slider.unobserve(tell, 'value')")
    assert page.output(busy) == "before and after\n"
    assert page.output(change) == "callback 7001\n"  # for the page to place, as it does without the pump
    assert [m["msg_type"] for m in _of(page.published, busy) if m["msg_type"] in ("display_data", "execute_result")] == [
        "display_data",
        "execute_result",
    ]


def test_a_callback_that_raises_or_pumps_itself(page: Page) -> None:
    page.run(
        """
        seen = []
        other = CommPump(interval_s=0)
        def awkward(change):
            seen.append(change.new)
            pump._next_look_s = 0
            other.pump()
            pump.pump()
            seen.append(-change.new)
            if change.new % 2:
                raise RuntimeError("on purpose")
        slider.observe(awkward, "value")
        """
    )
    busy = page.execute(
        """
        cell = "busy"
        print("started")
        assert until(message_is_there)
        time.sleep(0.3)  # for all of them to be there
        assert until(lambda: len(seen) == 120, pump)
        cell = None
        """
    )
    page.saw(busy, "started")
    for value in range(8001, 8061):
        page.set_slider(value)
    assert page.reply(busy)["content"]["status"] == "ok"
    page.run("slider.unobserve(awkward, 'value'); other.close()")
    assert page.value("seen") == [number for value in range(8001, 8061) for number in (value, -value)]
    assert page.value("got") == [[value, "busy"] for value in range(8001, 8061)]
    assert page.value("[pump.available, pump.why_not]") == [True, ""]


def test_a_message_does_not_count_as_a_cell(page: Page) -> None:
    """``post_execute`` in the middle of a cell would show and close the figures that it draws on."""
    page.run(
        """
        fired, late = [], []
        note = lambda: fired.append(cell)
        later = lambda: late.append(cell)
        register = lambda change: get_ipython().events.register("post_execute", later)
        get_ipython().events.register("post_execute", note)
        slider.observe(register, "value")
        """
    )
    busy = page.execute(
        """
        cell = "busy"
        fired.clear()
        print("started")
        assert until(lambda: got, pump)
        in_cell, cell = fired[:], 0
        """
    )
    page.saw(busy, "started")
    page.set_slider(9001)
    page.reply(busy)
    page.run("slider.unobserve(register, 'value'); get_ipython().events.unregister('post_execute', note)")
    assert page.value("[in_cell, fired[:1]]") == [[], [0]]
    assert page.value("0 in late")  # registered in a callback that was pumped, and kept
    page.run("get_ipython().events.unregister('post_execute', later)")


def test_an_interrupt_ends_the_cell_and_loses_no_message(page: Page) -> None:
    page.run("slow = lambda widget, content, buffers: time.sleep(0.2)\nslider.on_msg(slow)")
    busy = page.execute(
        """
        cell = "busy"
        try:
            print("started")
            until(lambda: False, pump)
        finally:
            cell = None
        """,
        stop_on_error=False,
    )
    page.saw(busy, "started")
    behind = page.execute("ran.append('behind')")
    changes = [page.tell_slider(value) for value in range(10_001, 10_011)]
    page.idle(changes[1])
    page.interrupt()
    assert page.reply(busy)["content"]["ename"] == "KeyboardInterrupt"
    assert page.reply(behind)["content"]["status"] == "ok"
    page.idle(page.tell_slider(10_011))
    page.run("slider.on_msg(slow, remove=True)")
    got = page.value("got")
    assert [value for value, _ in got] == list(range(10_001, 10_012))
    assert got[1] == [10_002, "busy"]
    assert got[-2:] == [[10_010, None], [10_011, None]]
    assert page.value("ran") == ["behind"]
    assert page.value("[pump.available, kernel.get_parent('shell')['header']['msg_type']]") == [True, "execute_request"]


def test_an_interrupt_at_the_worst_moment_loses_no_message(page: Page) -> None:
    """It comes whenever a message is off the socket and nowhere else yet: each is still handled, once, and in order."""
    busy = page.execute(
        """
        interrupts = 0
        def deserialize(*args, **kwargs):
            if threading.current_thread() is threading.main_thread():
                signal.raise_signal(signal.SIGINT)
            return type(kernel.session).deserialize(kernel.session, *args, **kwargs)
        kernel.session.deserialize = deserialize
        print("started")
        end_s = time.monotonic() + 8
        while len(got) < 60 and time.monotonic() < end_s:
            try:
                pump._next_look_s = 0
                pump.pump()
            except KeyboardInterrupt:
                interrupts += 1
        del kernel.session.deserialize
        """
    )
    page.saw(busy, "started")
    requests = []
    for value in range(11_001, 11_061):
        page.tell_slider(value)
        if value % 10 == 0:
            requests.append(page.execute(f"ran.append({value})"))
    for request in (busy, *requests):
        assert page.reply(request)["content"]["status"] == "ok"
    assert [value for value, _ in page.value("got")] == list(range(11_001, 11_061))
    assert page.value("interrupts") > 1
    assert page.value("ran") == [11_010, 11_020, 11_030, 11_040, 11_050, 11_060]
    assert page.value("pump.available") is True


def test_interrupts_at_any_moment_lose_no_message(page: Page) -> None:
    """The cell is hit again and again while messages pour in."""
    busy = page.execute(
        """
        import random
        rng = random.Random(11)
        interrupts, armed = 0, False
        def handler(number, frame):  # raises only where the cell is ready for it
            global armed
            if armed:
                armed = False
                raise KeyboardInterrupt
        def hit():
            for _ in range(60):
                time.sleep(rng.uniform(0.0002, 0.004))
                os.kill(os.getpid(), signal.SIGINT)
        signal.signal(signal.SIGINT, handler)
        thread = threading.Thread(target=hit)
        thread.start()
        print("started")
        end_s = time.monotonic() + 8
        while len(got) < 150 and time.monotonic() < end_s:
            try:
                armed = True
                pump._next_look_s = 0
                pump.pump()
                armed = False
            except KeyboardInterrupt:
                interrupts += 1
        thread.join()
        """
    )
    page.saw(busy, "started")
    for value in range(21_001, 21_151):
        page.tell_slider(value)
    assert page.reply(busy)["content"]["status"] == "ok"
    page.idle(page.tell_slider(21_151))
    values = [value for value, _ in page.value("got")]
    interrupts = page.value("interrupts")
    print(f"seed 11, {interrupts} interrupts")
    assert values == sorted(set(values))
    assert len(values) >= 151 - interrupts  # a callback that was called may have been ended before it noted that


def test_input_works_as_before(page: Page) -> None:
    asking = page.execute(
        """
        print("started")
        assert until(lambda: got, pump)
        name = input("who? ")
        assert until(lambda: len(got) > 1, pump)
        """
    )
    page.saw(asking, "started")
    page.set_slider(12_001)
    question = page.client.get_stdin_msg(timeout=PATIENCE_S)
    assert question["content"]["prompt"] == "who? "
    assert question["parent_header"]["msg_id"] == asking
    page.client.input("me")
    page.set_slider(12_002)
    page.reply(asking)
    assert page.value("[name, [value for value, _ in got]]") == ["me", [12_001, 12_002]]


def test_messages_sent_to_a_subshell(page: Page) -> None:
    """JupyterLab sends those of widgets to one; ipykernel 7.4 sends them on to the shell that wrote last on the comm."""
    information = page.reply(page.send("kernel_info_request", {}))["content"]
    if "kernel subshells" not in information.get("supported_features", ()):
        pytest.skip("this kernel has no subshells")
    subshell = page.control("create_subshell_request")["content"]["subshell_id"]
    try:
        busy = page.execute("cell = 'busy'; print('started'); assert until(lambda: len(got) == 20, pump); cell = None")
        page.saw(busy, "started")
        for value in range(13_001, 13_021):
            page.idle(page.set_slider(value, subshell=subshell))  # as a page does: one change of a control at a time
        assert page.reply(busy)["content"]["status"] == "ok"
        assert page.value("got") == [[value, "busy"] for value in range(13_001, 13_021)]
        busy = page.execute("print('started'); assert until(lambda: len(got) == 21, pump)")  # a request is the subshell's own
        page.saw(busy, "started")
        asked = page.send("kernel_info_request", {}, subshell=subshell)
        page.wait_for(lambda: _of(page.replies, asked), "answer of the subshell")
        assert not _of(page.replies, busy)
        page.set_slider(13_021, subshell=subshell)
        assert page.reply(busy)["content"]["status"] == "ok"
    finally:
        page.control("delete_subshell_request", {"subshell_id": subshell})


def test_other_threads_and_forked_children_keep_their_hands_off(page: Page) -> None:
    busy = page.execute(
        """
        cell = "busy"
        print("started")
        assert until(message_is_there)
        thread = threading.Thread(target=pump.pump); thread.start(); thread.join()
        alone = got[:]
        real, os.getpid = os.getpid, lambda: -1
        try:
            pump.pump()
        finally:
            os.getpid = real
        forked = got[:]
        assert until(lambda: got, pump)
        cell = None
        """
    )
    page.saw(busy, "started")
    page.set_slider(14_001)
    assert page.reply(busy)["content"]["status"] == "ok"
    assert page.value("[alone, forked, got]") == [[], [], [[14_001, "busy"]]]


def test_a_private_part_that_fails_later_ends_the_pump_not_the_shell(page: Page) -> None:
    busy = page.execute(
        """
        cell = "busy"
        def broken(*args, **kwargs):
            raise TypeError("not what it was")
        print("started")
        assert until(message_is_there)
        kernel._publish_status, real = broken, kernel._publish_status
        try:
            pump.pump()
        finally:
            del kernel._publish_status
        pump.pump()
        cell = None
        print([pump.available, pump.why_not])
        """
    )
    page.saw(busy, "started")
    change = page.set_slider(15_001)
    behind = page.execute("ran.append('behind')")
    page.reply(behind)
    page.idle(change)
    assert "[False, 'controls take effect when the cell ends; use Start, or %amp set (ipykernel" in page.output(busy)
    assert "TypeError: not what it was" in page.output(busy)
    assert page.value("[got, ran]") == [[[15_001, None]], ["behind"]]


def test_two_pumps_share_the_kernel(page: Page) -> None:
    page.run("second = CommPump(); third = CommPump(); third.close(); third.close()")
    busy = page.execute(
        """
        print("started")
        assert until(lambda: got, second)
        second.close()
        assert until(lambda: len(got) > 1, pump)
        """
    )
    page.saw(busy, "started")
    page.idle(page.set_slider(16_001))
    page.set_slider(16_002)
    assert page.reply(busy)["content"]["status"] == "ok"
    assert page.value("[second.available, pump.available]") == [False, True]


def test_closed_in_the_cell_in_which_it_handled_a_message_read_ahead(page: Page) -> None:
    first = page.execute("print('started'); time.sleep(0.3)")
    page.saw(first, "started")
    busy = page.execute("cell = 'busy'; until(lambda: got, pump, limit_s=3); pump.close(); cell = None")
    change = page.tell_slider(17_001)
    page.reply(busy)
    page.idle(change)
    assert page.value("got") == [[17_001, "busy"]]  # once


def test_made_on_another_thread(page: Page) -> None:
    """As in a widget's callback on a subshell."""
    page.run(
        """
        pump.close()
        box = []
        thread = threading.Thread(target=lambda: box.append(CommPump()))
        thread.start()
        thread.join()
        """
    )
    busy = page.execute("cell = 'busy'; [pump] = box; print('started'); assert until(lambda: got, pump); cell = None")
    page.saw(busy, "started")
    page.set_slider(18_001)
    assert page.reply(busy)["content"]["status"] == "ok"
    assert page.value("got") == [[18_001, "busy"]]


def test_the_cost_of_a_look(page: Page) -> None:
    """Best of several runs: other programs can only make it slower."""
    page.run(
        """
        import timeit
        def cost_us(function, number=2000, repeats=15):
            return min(timeit.repeat(function, number=number, repeat=repeats)) / number * 1e6
        now_s = 0.0
        timed = CommPump(clock=lambda: now_s, interval_s=0.02)
        timed.pump()
        soon_us = cost_us(timed.pump)
        always = CommPump(interval_s=0)
        idle_us = cost_us(always.pump)
        costs = {}
        thread = threading.Thread(target=lambda: costs.update(thread=cost_us(always.pump))); thread.start(); thread.join()
        timed.close(); always.close()
        """
    )
    soon_us, idle_us, thread_us = page.value("[soon_us, idle_us, costs['thread']]")
    print(f"a pump: {soon_us:.2f} us within the interval, {idle_us:.2f} us idle, {thread_us:.2f} us on another thread")
    assert soon_us < 2
    assert thread_us < 2
    assert idle_us < 20


def test_the_interval_is_kept(page: Page) -> None:
    busy = page.execute(
        """
        now_s = 100.0
        timed = CommPump(clock=lambda: now_s, interval_s=0.02)
        timed.pump()
        print("started")
        assert until(message_is_there)
        timed.pump(); counts = [len(got)]
        now_s += 0.0199
        timed.pump(); counts.append(len(got))
        now_s += 0.0002
        timed.pump(); counts.append(len(got))
        timed.close()
        """
    )
    page.saw(busy, "started")
    page.set_slider(19_001)
    assert page.reply(busy)["content"]["status"] == "ok"
    assert page.value("counts") == [0, 0, 1]


# ---- the stop button ----------------------------------------------------------------------------------------------------


def test_the_stop_button_reaches_a_run_between_cells(page: Page) -> None:
    page.run("uninstall = on_interrupt(told('a'))")
    _interrupt_when_idle(page, "a")
    _interrupt_when_idle(page, "a")
    page.run("uninstall(); uninstall()")
    _interrupt_when_idle(page)
    assert page.value("repr(kernel.saved_sigint_handler)") == "<Handlers.SIG_IGN: 1>"


def test_a_cell_is_interrupted_as_ever(page: Page) -> None:
    for code in ("uninstall = on_interrupt(told('a'))", "pass"):  # also the very cell that asks for it
        busy = page.execute(f"{code}; print('started'); time.sleep(10)")
        page.saw(busy, "started")
        page.interrupt()
        assert page.reply(busy)["content"]["ename"] == "KeyboardInterrupt"
    awaiting = page.execute("print('started')\nfor _ in range(200): await asyncio.sleep(0.05)")  # ipykernel waits for it to wake
    page.saw(awaiting, "started")
    page.interrupt()
    assert page.reply(awaiting)["content"]["status"] == "error"
    assert page.value("called") == []
    _interrupt_when_idle(page, "a")
    page.run("uninstall()")


def test_installed_from_a_thread_and_removed_from_one(page: Page) -> None:
    """As by a widget's callback on a subshell, and by a training run when it ends, while the kernel gets no message."""
    page.run(
        """
        def install_and_remove():
            time.sleep(0.2)
            uninstall = on_interrupt(told("a"))
            removal.wait(10)
            uninstall()
        removal = threading.Event()
        thread = threading.Thread(target=install_and_remove)
        thread.start()
        """
    )
    time.sleep(0.4)
    _interrupt_when_idle(page, "a")
    page.run("removal.set(); thread.join()")
    _interrupt_when_idle(page)


def test_installed_and_removed_while_a_cell_awaits(page: Page) -> None:
    page.run(
        """
        def on_thread(function):
            thread = threading.Thread(target=function); thread.start(); thread.join()
        async def soon():
            await asyncio.sleep(0.05)
        box = []
        """
    )
    page.run("on_thread(lambda: box.append(on_interrupt(told('a')))); await soon()")
    _interrupt_when_idle(page, "a")
    page.run("on_thread(box.pop()); await soon()")
    _interrupt_when_idle(page)
    page.run("on_thread(lambda: box.append(on_interrupt(told('b')))); await soon(); on_thread(box.pop()); await soon()")
    page.run("on_interrupt(told('c'))()")
    _interrupt_when_idle(page)


def test_several_runs_in_any_order(page: Page) -> None:
    page.run("a = on_interrupt(told('a')); b = on_interrupt(told('b'))")
    _interrupt_when_idle(page, "a", "b")
    page.run("a(); a()")
    _interrupt_when_idle(page, "b")
    page.run("b()")
    _interrupt_when_idle(page)


def test_a_callback_that_raises_does_not_end_the_kernel(page: Page) -> None:
    page.run("a = on_interrupt(lambda: 1 / 0); b = on_interrupt(told('b'))")
    _interrupt_when_idle(page, "b")
    page.run("a(); b()")


def test_an_interrupt_request_message_does_the_same(page: Page) -> None:
    page.run("uninstall = on_interrupt(told('a'))")
    time.sleep(0.1)
    assert page.control("interrupt_request")["content"]["status"] == "ok"
    page.wait_for(lambda: _told(page) == ["a"], "call")
    page.run("uninstall()")


def test_an_interrupt_during_a_widgets_callback_is_not_lost(page: Page) -> None:
    page.run(
        """
        uninstall = on_interrupt(told("a"))
        def slow(change):
            print("in the callback", flush=True)
            time.sleep(10)
        slider.observe(slow, "value")
        """
    )
    change = page.set_slider(20_001)
    page.saw(change, "in the callback")
    page.interrupt()
    page.idle(change)
    page.wait_for(lambda: _told(page) == ["a"], "call")
    page.run("slider.unobserve(slow, 'value'); uninstall()")


def test_someone_elses_handler_is_left_in_place(page: Page) -> None:
    page.run("uninstall = on_interrupt(told('a')); theirs = lambda *args: called.append('theirs')")
    page.run("kernel.saved_sigint_handler = theirs")  # in place from the end of this cell on
    page.run("uninstall()")
    _interrupt_when_idle(page)
    page.run("uninstall = on_interrupt(told('b'))")
    _interrupt_when_idle(page, "b")
    page.run("uninstall()")
    _interrupt_when_idle(page)
    assert page.value("called") == ["theirs", "theirs", "b", "theirs"]
    page.run("kernel.saved_sigint_handler = signal.SIG_IGN")


def _interrupt_when_idle(page: Page, *expected: str) -> None:
    """Interrupt between messages, and see these callbacks called, and no others, while the kernel gets no further message."""
    page.idle(page.send("comm_info_request", {}))
    time.sleep(0.1)  # "idle" is sent a moment before the handler is put back
    page.published.clear()
    page.interrupt()
    if expected:
        page.wait_for(lambda: len(_told(page)) >= len(expected), f"calls of {expected}")
    else:
        time.sleep(0.1)
        page.receive()
    assert _told(page) == list(expected)


def _told(page: Page) -> list[str]:
    text = "".join(m["content"]["text"] for m in page.published if m["msg_type"] == "stream")
    return [line.removeprefix("called ") for line in text.splitlines() if line.startswith("called ")]
