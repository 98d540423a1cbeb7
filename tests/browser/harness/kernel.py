"""Asking a kernel about its Python side, also while a cell runs; the other end of ``probe.py``."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any


class KernelCodeError(AssertionError):
    """The code that a test sent to the kernel raised; the message is the kernel's traceback."""


class Kernel:
    """The Python side of one kernel.

    Parameters
    ----------
    runtime
        The server's runtime directory.
    kernel_id
        Jupyter's id of the kernel.
    """

    def __init__(self, runtime: Path, kernel_id: str) -> None:
        self._file = runtime / f"kernel-{kernel_id}.probe"

    def eval(self, expression: str, timeout_s: float = 60) -> Any:
        """The value of an expression in the notebook's namespace, evaluated in a thread beside the running cell.

        What JSON has not comes as near as it can: arrays and tuples as lists, sets as sorted lists, other things as their repr.

        Raises
        ------
        KernelCodeError
            With the traceback, when the expression raises.
        """
        return self._ask("eval", expression, timeout_s)

    def exec(self, code: str, timeout_s: float = 60) -> None:
        """Run statements in the notebook's namespace, in a thread beside the running cell.

        Raises
        ------
        KernelCodeError
            With the traceback, when the code raises.
        """
        self._ask("exec", code, timeout_s)

    def forget(self) -> None:
        """Before a restart: let the next question wait for the new process."""
        self._file.unlink(missing_ok=True)

    @property
    def process_id(self) -> int:
        """The kernel's process."""
        return int(self._address()["pid"])

    def _ask(self, mode: str, code: str, timeout_s: float) -> Any:
        address = self._address()
        with socket.create_connection(("127.0.0.1", address["port"]), timeout=timeout_s) as sock, sock.makefile("rwb") as stream:
            stream.write(json.dumps({"token": address["token"], "mode": mode, "code": code}).encode() + b"\n")
            stream.flush()
            answer = json.loads(stream.readline())
        if "error" in answer:
            raise KernelCodeError(f"in the kernel: {code}\n{answer['error']}")
        return answer.get("value")

    def _address(self) -> dict[str, Any]:
        end = time.monotonic() + 60
        while not self._file.exists():
            if time.monotonic() > end:
                raise TimeoutError(f"the kernel did not write {self._file.name}: did it start?")
            time.sleep(0.1)
        address: dict[str, Any] = json.loads(self._file.read_text())
        return address
