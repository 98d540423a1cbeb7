"""The kernel module against a real ipykernel, spoken to with its protocol, as a page does.

``AMP_WIDGETS_KERNEL_PYTHON`` names the interpreter that runs the kernel, to try another ipykernel than this environment's.
"""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from amp_widgets import kernel as kernel_module
from amp_widgets.kernel import CommPump, in_kernel, on_interrupt
from harness.kernel_page import PATIENCE_S, Page, of

ROOT = Path(__file__).parent.parent
KERNEL_PYTHON = os.environ.get("AMP_WIDGETS_KERNEL_PYTHON", sys.executable)

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


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    pytest.importorskip("jupyter_client")
    pytest.importorskip("ipykernel")
    page = Page(tmp_path_factory.mktemp("kernel"), KERNEL_PYTHON)
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
    assert pump.why_not.startswith("Controls take effect when the cell ends; use Start, or %amp set … --at STEP (")
    assert pump.why_not.endswith(").")
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
    page.wait_for(lambda: all(of(page.replies, request) for request in requests), "answers")
    answers = [of(page.replies, request)[0] for request in requests]
    assert [answer["msg_type"] for answer in answers] == ["kernel_info_reply", "comm_info_reply"]
    assert answers[0]["content"]["implementation"] == "ipython"
    assert page.slider in answers[1]["content"]["comms"]
    page.idle(page.send("comm_open", {"comm_id": "of-the-page", "target_name": "mine", "data": {}}))
    page.idle(page.send("comm_msg", {"comm_id": "of-the-page", "data": 7}))
    assert not of(page.replies, busy)
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
    assert [m["msg_type"] for m in of(page.published, busy) if m["msg_type"] in ("display_data", "execute_result")] == [
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
            if change.new % 10 == 0:  # a traceback takes its time
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
    page.run(
        """
        def slow(widget, content, buffers):
            if content == 10_003:
                print("in the callback", flush=True)
                time.sleep(10)
        slider.on_msg(slow)
        """
    )
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
    page.saw(changes[2], "in the callback")
    page.interrupt()
    assert page.reply(busy)["content"]["ename"] == "KeyboardInterrupt"
    assert page.reply(behind)["content"]["status"] == "ok"
    page.idle(page.tell_slider(10_011))
    page.run("slider.on_msg(slow, remove=True)")
    got = page.value("got")
    assert [value for value, _ in got] == list(range(10_001, 10_012))
    assert got[2] == [10_003, "busy"]
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
    with _subshell(page) as subshell:
        busy = page.execute("cell = 'busy'; print('started'); assert until(lambda: len(got) == 20, pump); cell = None")
        page.saw(busy, "started")
        for value in range(13_001, 13_021):
            page.idle(page.set_slider(value, subshell=subshell))  # as a page does: one change of a control at a time
        assert page.reply(busy)["content"]["status"] == "ok"
        assert page.value("got") == [[value, "busy"] for value in range(13_001, 13_021)]
        busy = page.execute("print('started'); assert until(lambda: len(got) == 21, pump)")  # a request is the subshell's own
        page.saw(busy, "started")
        asked = page.send("kernel_info_request", {}, subshell=subshell)
        page.wait_for(lambda: of(page.replies, asked), "answer of the subshell")
        assert not of(page.replies, busy)
        page.set_slider(13_021, subshell=subshell)
        assert page.reply(busy)["content"]["status"] == "ok"


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
    assert "[False, 'Controls take effect when the cell ends; use Start, or %amp set … --at STEP (ipykernel" in page.output(busy)
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


# ---- front ends: each sends other messages, in another manner -----------------------------------------------------------


@pytest.mark.parametrize("one_at_a_time", [True, False], ids=["one at a time", "all at once"])
@pytest.mark.parametrize("on_subshell", [False, True], ids=["main shell", "subshell"])
def test_a_page_that_comes_during_a_cell(page: Page, on_subshell: bool, one_at_a_time: bool) -> None:
    """It asks for the comms and for all state, opens a comm, sends changes, closes the comm.

    JupyterLab and Notebook 7 send on a subshell where the kernel has them; VS Code and Colab, and the others of ipykernel 6, on
    the main shell. A page holds back a control's next change until the last one's "idle"; a script does not.
    """
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
    with _subshell(page, wanted=on_subshell) as subshell:
        busy = page.execute("cell = 'busy'; print('started'); assert until(lambda: 'close' in heard, pump); cell = None")
        page.saw(busy, "started")

        def send(kind: str, comm_id: str, **content: object) -> str:
            version = {"version": "1.0.0"} if kind == "comm_open" else {}
            message_id = page.send(kind, {"comm_id": comm_id, **content}, subshell=subshell, metadata=version)
            if one_at_a_time:
                page.idle(message_id)
            return message_id

        comms = page.send("comm_info_request", {"target_name": "jupyter.widget"}, subshell=subshell)
        page.wait_for(lambda: of(page.replies, comms), "the comms")
        send("comm_open", "all-state", target_name="jupyter.widget.control", data={})
        states = send("comm_msg", "all-state", data={"method": "request_states"})
        send("comm_close", "all-state", data={})
        send("comm_open", "of-the-page", target_name="mine", data={})
        for value in range(23_001, 23_006):
            send("comm_msg", page.slider, data={"method": "update", "state": {"value": value}, "buffer_paths": []})
            send("comm_msg", "of-the-page", data=value)
        page.wait_for(lambda: len(_echoes(page)) == 5, "echoes")  # by which a page knows that its change was taken
        assert not of(page.replies, busy)
        send("comm_close", "of-the-page", data={})
        assert page.reply(busy)["content"]["status"] == "ok"
    assert page.slider in of(page.replies, comms)[0]["content"]["comms"]
    [sent] = [m["content"]["data"] for m in of(page.published, states) if m["msg_type"] == "comm_msg"]
    assert sent["method"] == "update_states"
    assert sent["states"][page.slider]["model_name"] == "IntSliderModel"
    assert page.value("got") == [[value, "busy"] for value in range(23_001, 23_006)]
    assert page.value("heard") == ["open", *range(23_001, 23_006), "close"]


def test_two_pages_each_get_their_own_answers(page: Page) -> None:
    other = page.manager.blocking_client()
    other.start_channels()
    try:
        busy = page.execute("print('started'); assert until(lambda: got, pump)")
        page.saw(busy, "started")
        theirs = [other.session.msg(kind, {}) for kind in ("kernel_info_request", "comm_info_request")]
        for message in theirs:
            other.shell_channel.send(message)
        ours = page.send("comm_info_request", {})
        for message in theirs:
            assert other.get_shell_msg(timeout=PATIENCE_S)["parent_header"]["msg_id"] == message["header"]["msg_id"]
        page.wait_for(lambda: of(page.replies, ours), "answer")
        assert not [message for message in theirs if of(page.replies, message["header"]["msg_id"])]
        page.set_slider(24_001)
        assert page.reply(busy)["content"]["status"] == "ok"
        with pytest.raises(queue.Empty):
            other.get_shell_msg(timeout=0)
    finally:
        other.stop_channels()


def test_cells_run_by_nbclient(page: Page) -> None:
    """It sends no widget messages itself, and each cell only when the last one is over; a page may look on."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    from jupyter_client.asynchronous import AsyncKernelClient

    cells = ["print('started'); assert until(lambda: got, pump); print(got)", "print('next')", "1 / 0"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    runner = nbclient.NotebookClient(notebook, km=page.manager, allow_errors=True, timeout=PATIENCE_S)

    async def run() -> None:
        runner.kc = AsyncKernelClient()
        runner.kc.load_connection_file(page.manager.connection_file)
        runner.kc.start_channels()
        try:
            for index, cell in enumerate(notebook.cells):
                await runner.async_execute_cell(cell, index)
        finally:
            runner.kc.stop_channels()

    running = threading.Thread(target=lambda: asyncio.run(run()))
    running.start()
    page.wait_for(lambda: any(m["content"].get("text") == "started\n" for m in page.published), "start of the cell")
    page.set_slider(25_001)
    running.join()
    outputs = ["".join(out.get("text", out.get("ename", "")) for out in cell.outputs) for cell in notebook.cells]
    assert outputs == ["started\n[(25001, None)]\n", "next\n", "ZeroDivisionError"]


def test_messages_that_mean_nothing(page: Page) -> None:
    """To a comm that is closed, without data, of a kind that only another kernel knows, of no kind: the cell goes on."""
    busy = page.execute("print('started'); assert until(lambda: got, pump)")
    page.saw(busy, "started")
    handled = [
        page.send("comm_msg", {"comm_id": "closed", "data": {}}),
        page.send("comm_msg", {}),
        page.send("comm_msg", {"comm_id": page.slider, "data": {"method": "none of ours"}}),
        page.send("comm_open", {"comm_id": "x", "target_name": "nobody's", "data": {}}),
        page.send("comm_close", {"comm_id": "closed", "data": {}}),
    ]
    later = [page.send("colab_request", {}), page.send("", {})]
    page.client.shell_channel.socket.send_multipart([b"not", b"a", b"message"])
    for message in handled:
        page.idle(message)
    assert not [message for message in later if page.statuses(message)]
    page.set_slider(26_001)
    assert page.reply(busy)["content"]["status"] == "ok"
    assert page.value("[pump.available, pump.why_not]") == [True, ""]


def test_the_control_channel_goes_its_own_way(page: Page) -> None:
    """It has a thread of its own, and no comms."""
    busy = page.execute("print('started'); assert until(lambda: len(got) == 20, pump)")
    page.saw(busy, "started")
    for value in range(27_001, 27_020):
        page.set_slider(value)
        assert page.control("kernel_info_request")["content"]["implementation"] == "ipython"
        assert page.slider in page.control("comm_info_request")["content"]["comms"]
    assert not of(page.replies, busy)
    page.set_slider(27_020)
    assert page.reply(busy)["content"]["status"] == "ok"
    assert page.value("[value for value, _ in got]") == [*range(27_001, 27_021)]


def test_an_interrupt_request_message_ends_a_cell_that_pumps(page: Page) -> None:
    busy = page.execute("print('started'); until(lambda: False, pump)")
    page.saw(busy, "started")
    page.idle(page.set_slider(28_001))
    page.control("interrupt_request")
    assert page.reply(busy)["content"]["ename"] == "KeyboardInterrupt"
    page.idle(page.set_slider(28_002))
    assert page.value("[value for value, _ in got]") == [28_001, 28_002]


@pytest.mark.parametrize("on_subshell", [False, True], ids=["main shell", "subshell"])
def test_completion_and_inspection_as_before(page: Page, on_subshell: bool) -> None:
    """Behind the cell on the main shell, at once on a subshell."""
    page.run("remarkable = 1\ndef documented():\n    'a docstring'")
    with _subshell(page, wanted=on_subshell) as subshell:
        busy = page.execute("print('started'); assert until(lambda: len(got) == 2, pump)")
        page.saw(busy, "started")
        asked = [
            page.send("complete_request", {"code": "remark", "cursor_pos": 6}, subshell=subshell),
            page.send("inspect_request", {"code": "documented", "cursor_pos": 10, "detail_level": 0}, subshell=subshell),
            page.send("is_complete_request", {"code": "for _ in ()"}, subshell=subshell),
        ]
        page.idle(page.set_slider(29_001))
        if on_subshell:
            page.wait_for(lambda: all(of(page.replies, message) for message in asked), "answers")
        assert [bool(of(page.replies, message)) for message in (busy, *asked)] == [False, *[on_subshell] * 3]
        page.set_slider(29_002)
        assert page.reply(busy)["content"]["status"] == "ok"
        answers = [page.reply(message)["content"] for message in asked]
    assert "remarkable" in answers[0]["matches"]
    assert "a docstring" in answers[1]["data"]["text/plain"]
    assert answers[2]["status"] == "invalid"
    if not on_subshell:
        replied = [reply["parent_header"]["msg_id"] for reply in page.replies]
        assert [message for message in replied if message in (busy, *asked)] == [busy, *asked]


def test_a_cell_on_a_subshell_beside_the_busy_one(page: Page) -> None:
    with _subshell(page) as subshell:
        busy = page.execute("cell = 'busy'; print('started'); assert until(lambda: len(got) == 2, pump); cell = None; print(7)")
        page.saw(busy, "started")
        page.idle(page.set_slider(30_001))
        beside = page.send("execute_request", {"code": "pump.pump(); print(cell)", "silent": False}, subshell=subshell)
        page.saw(beside, "busy\n")
        page.wait_for(lambda: of(page.replies, beside), "reply")
        assert not of(page.replies, busy)
        page.set_slider(30_002)
        assert page.reply(busy)["content"]["status"] == "ok"
    assert page.output(busy) == "started\n7\n"
    assert page.value("got") == [[30_001, "busy"], [30_002, "busy"]]


def test_the_page_decides_on_the_shell_of_a_comm(page: Page) -> None:
    """With that, controls live during a cell also where no training loop pumps."""
    page.run("pump.close()")
    with _subshell(page) as subshell:
        page.run("kernel_module.answer_where_asked(slider.comm); slider.value = -1; slider.value = 0")
        try:
            busy = page.execute("cell = 'busy'; print('started'); assert until(lambda: len(got) == 5); cell = None")
            page.saw(busy, "started")
            for value in range(31_001, 31_006):
                page.idle(page.set_slider(value, subshell=subshell))
            assert page.reply(busy)["content"]["status"] == "ok"
            page.idle(page.set_slider(31_006))  # and on the main shell for a page that has no subshell
        finally:
            page.run("vars(slider.comm).pop('_reply_subshell_for', None)")
    assert page.value("got") == [*([value, "busy"] for value in range(31_001, 31_006)), [31_006, None]]
    page.run("kernel_module.answer_where_asked(None)")


# ---- a cell whose outputs are covered ------------------------------------------------------------------------------------

COVERED = """
    from amp_widgets.widgets import covered

    class Asked:
        def __init__(self):
            self.guessed, self.listeners = None, []
        def on_guess(self, call):
            self.listeners.append(call)
        def guess(self, value):
            self.guessed = value
            for call in self.listeners:
                call()

    earlier, asked, failures = Asked(), Asked(), []

    class Failures(logging.Handler):
        def emit(self, record):
            failures.append(record.getMessage())
    failing = Failures(logging.ERROR)
    logging.getLogger().addHandler(failing); kernel.log.addHandler(failing)
"""


@pytest.fixture
def covering(page: Page) -> Iterator[Page]:
    page.run(COVERED)
    yield page
    page.run("logging.getLogger().removeHandler(failing); kernel.log.removeHandler(failing)")


@pytest.mark.parametrize("on_subshell", [False, True])
def test_messages_during_a_covered_cell_are_handled(covering: Page, on_subshell: bool) -> None:
    """As with `%%amp --cover` after "Run All": the page tells its views' sizes while the loop runs."""
    page = covering
    with _subshell(page, wanted=on_subshell) as subshell:
        page.run("kernel_module.answer_where_asked(slider.comm)")
        try:
            busy = page.execute(
                f"""
                cell = "busy"
                with covered.cover([asked]):
                    print("started", file=sys.stderr)
                    print("forty", "two")
                    assert until(lambda: len(got) == 5, {None if on_subshell else "pump"})
                    display("shown")
                cell = None
                """
            )
            page.saw(busy, "started")
            for value in range(40_001, 40_006):
                page.idle(page.set_slider(value, subshell=subshell))
            assert page.reply(busy)["content"]["status"] == "ok"
        finally:
            page.run("vars(slider.comm).pop('_reply_subshell_for', None)")
    assert page.value("[got, failures, pump.why_not]") == [[[value, "busy"] for value in range(40_001, 40_006)], [], ""]
    assert "forty two" not in str(of(page.published, busy))
    page.published.clear()
    guessed = page.execute("asked.guess(1)")
    page.reply(guessed)
    uncovered = [
        m["content"]["data"]["text/plain"] for m in of(page.published, guessed) if m["msg_type"] == "update_display_data"
    ]
    assert uncovered == ["forty two", "'shown'"]
    assert page.value("[name for name in ('publish', 'clear_output') if name in vars(get_ipython().display_pub)]") == []


def test_what_the_page_is_shown_with_belongs_to_the_covered_cell_after_a_message(covering: Page) -> None:
    page = covering
    busy = page.execute(
        "cell = 'busy'\nwith covered.cover([asked]):\n    print('started', file=sys.stderr)\n    print(1)\n"
        "    assert until(lambda: got, pump)\ndisplay('after it')\ncell = None"
    )
    page.saw(busy, "started")
    page.set_slider(41_001)
    assert page.reply(busy)["content"]["status"] == "ok"
    shown = [m["content"]["data"]["text/plain"] for m in of(page.published, busy) if m["msg_type"] == "display_data"]
    assert shown == ["Give a guess above, then the answer is shown here.", "'after it'"]
    assert page.value("failures") == []


def test_a_guess_that_comes_during_a_covered_cell_shows_what_was_covered_before(covering: Page) -> None:
    page = covering
    page.run("with covered.cover([earlier]):\n    print('forty', 'two')")
    page.run("slider.observe(lambda change: change.new == 42_001 and earlier.guess(1), 'value')")
    busy = page.execute(
        "cell = 'busy'\nwith covered.cover([asked]):\n    print('started', file=sys.stderr)\n    print('sixty', 'four')\n"
        "    assert until(lambda: got, pump)\ncell = None"
    )
    page.saw(busy, "started")
    guessed = page.set_slider(42_001)
    assert page.reply(busy)["content"]["status"] == "ok"
    told = str([m for m in page.published if m["msg_type"] == "update_display_data"])
    assert "forty two" in told
    assert "sixty four" not in told
    assert of(page.published, guessed)
    assert page.value("failures") == []


def test_an_output_widget_in_a_covered_cell(covering: Page) -> None:
    """Entering one tells the shell what its outputs belong to."""
    page = covering
    page.run("with covered.cover([asked]):\n    with ipywidgets.Output():\n        print('in it')")
    assert page.value("failures") == []


# ---- what it says -------------------------------------------------------------------------------------------------------


def test_no_version_decides(page: Page) -> None:
    page.run("import ipykernel; real = ipykernel.__version__, ipykernel.version_info; pump.close()")
    page.run("ipykernel.__version__, ipykernel.version_info = 'unheard of', (0, 0, 0); pump = CommPump()")
    try:
        busy = page.execute("cell = 'busy'; print('started'); assert until(lambda: got, pump); cell = None")
        page.saw(busy, "started")
        page.set_slider(32_001)
        assert page.reply(busy)["content"]["status"] == "ok"
    finally:
        page.run("ipykernel.__version__, ipykernel.version_info = real")
    assert page.value("[got, pump.why_not]") == [[[32_001, "busy"]], ""]


def test_a_cell_with_an_event_loop_of_its_own_is_told(page: Page) -> None:
    """As nest_asyncio makes possible. The messages wait, and the next cell is served again."""
    busy = page.execute(
        """
        cell = "busy"
        async def train():
            print("started")
            time.sleep(0.3)
            pump.pump()
            return pump.why_not
        running, own = asyncio._get_running_loop(), asyncio.new_event_loop()
        asyncio._set_running_loop(None)
        try:
            reasons = [own.run_until_complete(train())]
            pump._next_look_s = 0
            pump.pump()
            reasons.append(pump.why_not)
        finally:
            asyncio._set_running_loop(running)
            own.close()
        cell = None
        """
    )
    page.saw(busy, "started")
    page.idle(page.set_slider(33_001))
    sentence = f"{kernel_module.AFTER_THE_CELL} (the cell runs an event loop of its own)."
    assert page.value("[reasons, got]") == [[sentence, sentence], [[33_001, None]]]
    busy = page.execute("cell = 'busy'; print('started'); assert until(lambda: len(got) == 2, pump); cell = None")
    page.saw(busy, "started")
    page.set_slider(33_002)
    assert page.reply(busy)["content"]["status"] == "ok"
    assert page.value("[pump.why_not, got[-1]]") == ["", [33_002, "busy"]]


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
    assert page.control("interrupt_request")["msg_type"] == "interrupt_reply"
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


@contextmanager
def _subshell(page: Page, *, wanted: bool = True) -> Iterator[str | None]:
    """A subshell of the kernel, as JupyterLab makes one for the widgets of a notebook."""
    if not wanted:
        yield None
        return
    information = page.reply(page.send("kernel_info_request", {}))["content"]
    if "kernel subshells" not in information.get("supported_features", ()):
        pytest.skip("this kernel has no subshells")
    subshell: str = page.control("create_subshell_request")["content"]["subshell_id"]
    try:
        yield subshell
    finally:
        page.control("delete_subshell_request", {"subshell_id": subshell})


def _echoes(page: Page) -> list[Any]:
    sent = [m["content"]["data"] for m in page.published if m["msg_type"] == "comm_msg"]
    return [data["state"]["value"] for data in sent if data.get("method") == "echo_update"]
