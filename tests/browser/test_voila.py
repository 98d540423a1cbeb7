"""A lesson as a page of Voilà: no cells, and its dashboard works. Where Voilà is not installed it is skipped."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest

from harness.server import REPOSITORY

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser

LESSON = REPOSITORY / "notebooks" / "01_quickstart.ipynb"
START_S = 60
SLOW_MS = 90_000


@pytest.fixture
def page_of_lesson(tmp_path: Path) -> Iterator[str]:
    """The address at which a Voilà of its own shows the lesson."""
    if importlib.util.find_spec("voila") is None:
        pytest.skip("needs voila: pip install voila")
    shutil.copy(LESSON, tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "voila", LESSON.name, "--no-browser", f"--port={port}", "--Voila.ip=127.0.0.1"]
    address, log = f"http://127.0.0.1:{port}/", tmp_path / "voila.log"
    with log.open("wb") as output:
        server = subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + START_S
        while not _answers(f"{address}voila/static/"):
            if server.poll() is not None or time.monotonic() > end:
                pytest.fail(f"Voilà does not answer:\n{log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.2)
        yield address
    finally:
        server.terminate()  # it ends its kernels
        server.wait(30)


@pytest.mark.timeout(240)
def test_the_dashboard_of_a_lesson_is_a_page(page_of_lesson: str, browser: Browser) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 2600})
    try:
        page.goto(page_of_lesson, timeout=SLOW_MS)
        dashboard = page.locator(".ampw-dashboard").first
        dashboard.wait_for(timeout=SLOW_MS)
        dashboard.locator(".js-plotly-plot").first.wait_for(timeout=SLOW_MS)
        assert page.locator(".jp-Cell-inputWrapper:visible .jp-InputArea-editor").count() == 0
        dashboard.get_by_role("button", name="Start", exact=True).click()
        dashboard.get_by_text("running", exact=True).first.wait_for(timeout=SLOW_MS)
        dashboard.get_by_text("fp16", exact=True).first.click()
        dashboard.get_by_text("fp16 · loss scale").first.wait_for(timeout=SLOW_MS)
        pictures = REPOSITORY / "artifacts" / "screenshots"
        pictures.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=pictures / "voila-light.png")
    finally:
        page.close()


def _answers(address: str) -> bool:
    try:
        urlopen(address, timeout=2).close()
    except HTTPError:
        return True
    except (URLError, OSError):
        return False
    return True
