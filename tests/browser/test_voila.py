"""A lesson as a page of Voilà: no code, and its dashboard works, in the language that the notebook's name says."""

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

LESSONS = REPOSITORY / "notebooks"
LESSON, KOREAN_LESSON = "01_quickstart.ipynb", "02_number_formats.ko.ipynb"
TEXT, CODE = "A model that is ready to train", "mine.scaler.scale(loss).backward()"
START_S = 60
SLOW_MS = 90_000


@pytest.fixture
def page_of_lesson(request: pytest.FixtureRequest, tmp_path: Path, in_ci: bool, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address at which a Voilà of its own shows a lesson: of a command for this lesson alone, or for its folder."""
    lesson, served = request.param
    monkeypatch.delenv("AMP_WIDGETS_LANG", raising=False)
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    if importlib.util.find_spec("voila") is None:
        (pytest.fail if in_ci else pytest.skip)("needs voila: pip install voila")
    shutil.copy(LESSONS / lesson, tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "voila", served, "--no-browser", f"--port={port}", "--Voila.ip=127.0.0.1"]
    address, log = f"http://127.0.0.1:{port}/", tmp_path / "voila.log"
    with log.open("wb") as output:
        server = subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + START_S
        while not _answers(f"{address}voila/static/"):
            if server.poll() is not None or time.monotonic() > end:
                pytest.fail(f"Voilà does not answer:\n{log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.2)
        yield address if served == lesson else f"{address}voila/render/{lesson}"
    finally:
        server.terminate()  # it ends its kernels
        server.wait(60)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("page_of_lesson", [(LESSON, LESSON)], indirect=True)
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


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "page_of_lesson", [(KOREAN_LESSON, KOREAN_LESSON), (KOREAN_LESSON, ".")], ids=["alone", "folder"], indirect=True
)
def test_the_name_of_the_notebook_says_the_language(page_of_lesson: str, browser: Browser) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 2600})
    try:
        page.goto(page_of_lesson, timeout=SLOW_MS)
        page.get_by_role("heading", name="수 형식", exact=True).first.wait_for(timeout=SLOW_MS)
        assert page.get_by_role("heading", name="Number formats", exact=True).count() == 0
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
