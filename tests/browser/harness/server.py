"""A real ``jupyter lab`` on this machine, with configuration, data and kernels of its own."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HARNESS = Path(__file__).parent
REPOSITORY = HARNESS.parents[2]
START_S = 60
STOP_S = 15

QUIET = (
    "--no-browser",
    "--ip=127.0.0.1",
    "--allow-root",
    "--LabApp.expose_app_in_browser=True",  # the page object drives JupyterLab by its commands
    "--LabApp.extension_manager=readonly",
)


class Lab:
    """A JupyterLab server whose every file lies under `home`; ended by its own process id.

    Parameters
    ----------
    home
        An empty directory. Notebooks go to ``home/notebooks``, the server's log to ``home/server.log``.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self.notebooks = home / "notebooks"
        self.token = secrets.token_hex(16)
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._nursery: subprocess.Popen[bytes] | None = None
        for name in ("notebooks", "config", "data", "runtime", "home", "settings", "workspaces"):
            (home / name).mkdir(parents=True)
        startup = home / "ipython" / "profile_default" / "startup"
        startup.mkdir(parents=True)
        shutil.copy(Path(__file__).parent / "probe.py", startup / "00-probe.py")
        self._socket = home / "nursery.socket"
        spec = home / "kernelspecs" / "kernels" / "python3" / "kernel.json"
        spec.parent.mkdir(parents=True)
        client = [sys.executable, "-I", "-S", str(HARNESS / "kernel_client.py"), str(self._socket), "{connection_file}"]
        spec.write_text(json.dumps({"argv": client, "display_name": "Python 3", "language": "python"}))
        self.set_setting("@jupyterlab/apputils-extension/notification", fetchNews="false", checkForUpdates=False)

    def start(self) -> None:
        """Start the server and wait until it answers.

        Raises
        ------
        RuntimeError
            When it ends or does not answer within a minute; with the end of its log.
        """
        self.port = _free_port()
        command = [
            sys.executable, "-m", "jupyterlab", *QUIET, f"--port={self.port}", "--ServerApp.port_retries=0",
            f"--IdentityProvider.token={self.token}", f"--ServerApp.root_dir={self.notebooks}",
        ]  # fmt: skip
        with (self.home / "server.log").open("ab") as log:
            files: dict[str, Any] = {"cwd": self.home, "stdout": log, "stderr": subprocess.STDOUT}
            environment = self._environment()
            nursery = [sys.executable, str(HARNESS / "nursery.py"), str(self._socket)]
            self._nursery = subprocess.Popen(nursery, env=environment, stdin=subprocess.PIPE, **files)
            self._process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, **files)
        end = time.monotonic() + START_S
        while time.monotonic() < end and self._process.poll() is None:
            try:
                self.api("status")
                return
            except OSError:
                time.sleep(0.2)
        self.stop()
        raise RuntimeError(f"JupyterLab did not start within {START_S} s:\n{self.log()}")

    def stop(self) -> None:
        """End the kernels and the server."""
        process, self._process = self._process, None
        nursery, self._nursery = self._nursery, None
        if process is not None:
            process.send_signal(signal.SIGTERM)  # the server ends its kernels
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if nursery is not None:
            nursery.communicate()  # it ends with its standard input, and the kernels that are left with it

    def log(self, characters: int = 4000) -> str:
        """The end of the server's log, which has what the kernels wrote to their terminal."""
        return (self.home / "server.log").read_text(errors="replace")[-characters:]

    def set_setting(self, plugin: str, **values: Any) -> None:
        """Set values of one of JupyterLab's plug-ins, as its settings editor does; pages opened afterwards see them."""
        path = self.home / "settings" / f"{plugin}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values), encoding="utf-8")

    def url(self, notebook: str) -> str:
        """The notebook alone in the page, without JupyterLab's side bars, in an empty workspace."""
        return f"http://127.0.0.1:{self.port}/doc/tree/{notebook}?token={self.token}&reset"

    def api(self, path: str, method: str = "GET") -> Any:
        """One call of Jupyter's REST interface."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/api/{path}", method=method, headers={"Authorization": f"token {self.token}"}
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            body = reply.read()
        return json.loads(body) if body else None

    def write_notebook(self, cells: Sequence[str], name: str | None = None) -> str:
        """Write a notebook of code cells; its name."""
        name = name or f"test-{secrets.token_hex(4)}.ipynb"
        content = {
            "cells": [
                {"cell_type": "code", "execution_count": None, "id": f"cell-{i}", "metadata": {}, "outputs": [], "source": cell}
                for i, cell in enumerate(cells)
            ],
            "metadata": {
                "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
                "language_info": {"name": "python"},
            },
            "nbformat": 4,
            "nbformat_minor": 5,
        }
        (self.notebooks / name).write_text(json.dumps(content), encoding="utf-8")
        return name

    def copy_notebook(self, path: Path) -> str:
        """Copy a notebook of the repository into the server's folder; its name there."""
        name = f"{secrets.token_hex(4)}-{path.name}"
        shutil.copy(path, self.notebooks / name)
        return name

    def forget_theme(self) -> None:
        """Pages opened afterwards are light: JupyterLab keeps the theme that a page has chosen."""
        (self.home / "settings" / "@jupyterlab" / "apputils-extension" / "themes.jupyterlab-settings").unlink(missing_ok=True)

    def end_kernels(self, notebook: str) -> None:
        """End the kernel of a notebook, also a busy one."""
        for session in self.api("sessions"):
            if session["path"] == notebook:
                self.api(f"sessions/{session['id']}", "DELETE")

    def _environment(self) -> dict[str, str]:
        home = self.home
        path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
        return {
            **os.environ,
            "HOME": str(home / "home"),
            "IPYTHONDIR": str(home / "ipython"),
            "JUPYTER_CONFIG_DIR": str(home / "config"),
            "JUPYTER_DATA_DIR": str(home / "data"),
            "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
            "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
            "JUPYTER_PATH": str(home / "kernelspecs"),  # before all others: the kernels of the nursery
            "JUPYTER_PREFER_ENV_PATH": "1",  # for the rest this environment, whatever the user has
            "PYTHONPATH": path,
        }


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
