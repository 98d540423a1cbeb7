"""A lesson as a page of Voilà: no code, and its dashboard works."""

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
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

LESSON = REPOSITORY / "notebooks" / "01_quickstart.ipynb"
TEXT, CODE = "A model that is ready to train", "mine.scaler.scale(loss).backward()"
START_S = 60
SLOW_MS = 90_000


@pytest.fixture
def page_of_lesson(tmp_path: Path, in_ci: bool) -> Iterator[str]:
    """The address at which a Voilà of its own shows the lesson."""
    if importlib.util.find_spec("voila") is None:
        (pytest.fail if in_ci else pytest.skip)("needs voila: pip install voila")
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
        server.wait(60)


@pytest.mark.timeout(240)
def test_the_dashboard_of_a_lesson_is_a_page(page_of_lesson: str, browser: Browser) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 2600}, color_scheme="light")
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    try:
        page.goto(page_of_lesson, timeout=SLOW_MS)
        dashboard = page.locator(".ampw-dashboard").first
        dashboard.wait_for(timeout=SLOW_MS)
        dashboard.locator(".js-plotly-plot").first.wait_for(timeout=SLOW_MS)
        assert page.locator(".jp-InputArea-editor").count() == 0
        shown = page.locator("body").inner_text()
        assert TEXT in shown
        assert CODE not in shown

        status = dashboard.locator(".ampw-status")
        dashboard.get_by_role("button", name="Start", exact=True).click()
        status.get_by_text("running", exact=True).wait_for(timeout=SLOW_MS)
        dashboard.get_by_text("fp16", exact=True).first.click()
        status.get_by_text("fp16 · loss scale").wait_for(timeout=SLOW_MS)  # the kernel says what is in force
        dashboard.get_by_role("button", name="Pause", exact=True).click()
        status.get_by_text("paused", exact=True).wait_for(timeout=SLOW_MS)
        assert _contrast(page, ".ampw-word") > 4.5
        assert _contrast(page, "p") > 4.5
        assert errors == []
        pictures = REPOSITORY / "artifacts" / "screenshots"
        pictures.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=pictures / "voila-light.png")
    finally:
        page.close()


def _contrast(page: Page, selector: str) -> float:
    """Of the text of an element to what is behind it, as WCAG has it."""
    colours = page.locator(selector).first.evaluate(
        """(element) => {
            const clear = "rgba(0, 0, 0, 0)", back = (one) => getComputedStyle(one).backgroundColor;
            let behind = element;
            while (behind.parentElement && back(behind) === clear) behind = behind.parentElement;
            return [getComputedStyle(element).color, back(behind) === clear ? "rgb(255, 255, 255)" : back(behind)];
        }"""
    )
    lights = []
    for colour in colours:
        parts = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        lights.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(lights) + 0.05) / (min(lights) + 0.05)


def _answers(address: str) -> bool:
    try:
        urlopen(address, timeout=2).close()
    except HTTPError:
        return True
    except (URLError, OSError):
        return False
    return True
