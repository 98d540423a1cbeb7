"""A real kernel, and a client that speaks to it with its protocol, as a page does."""

from __future__ import annotations

import json
import os
import queue
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent.parent
PATIENCE_S = 60.0  # only ever waited for in full by a test that fails


class Page:
    """A kernel and a client that does what a page does, and remembers every message."""

    def __init__(self, directory: Path, python: str = sys.executable) -> None:
        from jupyter_client.kernelspec import KernelSpec
        from jupyter_client.manager import KernelManager

        class Manager(KernelManager):
            @property
            def kernel_spec(self) -> KernelSpec:
                argv = [python, "-Xfrozen_modules=off", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
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

    def send(
        self, kind: str, content: dict[str, Any], *, subshell: str | None = None, metadata: dict[str, Any] | None = None
    ) -> str:
        message = self.client.session.msg(kind, content, metadata=metadata)
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
        found = self.wait_for(lambda: of(self.replies, message_id), f"reply to {message_id}")[0]
        self.idle(message_id)
        return dict(found)

    def idle(self, message_id: str) -> None:
        self.wait_for(lambda: "idle" in self.statuses(message_id), f"end of {message_id}")

    def statuses(self, message_id: str) -> list[str]:
        return [m["content"]["execution_state"] for m in of(self.published, message_id) if m["msg_type"] == "status"]

    def output(self, message_id: str) -> str:
        return "".join(m["content"]["text"] for m in of(self.published, message_id) if m["msg_type"] == "stream")

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


def of(messages: list[dict[str, Any]], message_id: str) -> list[dict[str, Any]]:
    return [message for message in messages if message["parent_header"].get("msg_id") == message_id]
