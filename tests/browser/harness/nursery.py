"""A process that has imported what the tests' kernels import, and forks itself for each: seconds of imports are spent once.

``kernel_client.py`` is what Jupyter starts in the place of a kernel. It tells the nursery over a socket which connection file
the kernel is to use, passes the signals on that it gets, and ends when the kernel ends; when it is killed, so is the kernel.
What is under test is not imported here, and nothing that asks when it is imported whether it is in a notebook (ipywidgets
registers its comm targets then, plotly chooses how to show figures): each kernel does that itself.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from typing import Any, NoReturn

IMPORTED = (
    "ipykernel.kernelapp",
    "ipykernel.zmqshell",
    "IPython.core.completer",
    "scipy.optimize",
    "sklearn.datasets",
    "torch",
    "torch._dynamo",
    "torch.utils.checkpoint",
    "torch.utils.data",
    "tsdownsample",
)


class Nursery:
    """Forks kernels for the clients that connect to a Unix socket; ends, with all of them, when its standard input does."""

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._kernels: dict[socket.socket, int] = {}  # client → process
        self._selector = selectors.DefaultSelector()
        woken, self._wake = socket.socketpair()
        for one in (woken, self._wake):
            one.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for source, act in ((self._listener, self._accept), (woken, self._reap), (sys.stdin.buffer, self._end)):
            self._selector.register(source, selectors.EVENT_READ, act)

    def serve(self) -> NoReturn:
        """Until standard input ends."""
        while True:
            for key, _ in self._selector.select():
                key.data(key.fileobj)

    def _accept(self, listener: socket.socket) -> None:
        client, _ = listener.accept()
        line = client.makefile("rb").readline()
        if not line:  # it was ended at once
            client.close()
            return
        order = json.loads(line)
        process = os.fork()
        if process == 0:
            self._become_kernel(order)
        self._kernels[client] = process
        self._selector.register(client, selectors.EVENT_READ, self._pass_on)

    def _become_kernel(self, order: dict[str, Any]) -> NoReturn:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.clear()
        os.environ.update(order["env"])
        os.chdir(order["directory"])
        sys.argv = ["ipykernel_launcher.py", "-f", order["connection_file"]]
        status = 1
        try:
            importlib.import_module("ipykernel.kernelapp").launch_new_instance()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 0
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.flush()
            os._exit(status)

    def _pass_on(self, client: socket.socket) -> None:
        """Signals, a byte each; none any more when the client is gone."""
        signals = client.recv(100)
        for number in signals or [signal.SIGKILL]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._kernels[client], number)
        if not signals:
            self._selector.unregister(client)

    def _reap(self, woken: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            woken.recv(4096)
        for client, process in list(self._kernels.items()):
            if os.waitpid(process, os.WNOHANG)[0]:
                del self._kernels[client]
                with contextlib.suppress(KeyError):
                    self._selector.unregister(client)
                client.close()

    def _end(self, _stdin: object) -> NoReturn:
        for process in self._kernels.values():
            os.kill(process, signal.SIGKILL)
        os._exit(0)


if __name__ == "__main__":
    del sys.path[0]  # this directory
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    too_early = {"amp_widgets", "ipywidgets", "plotly"} & set(sys.modules)
    assert not too_early, too_early
    gc.collect()
    gc.freeze()
    Nursery(sys.argv[1]).serve()
