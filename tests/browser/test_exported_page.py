"""An exported page as a plain file in a real Chromium without a network: both themes, zoomed, printed, without scripts."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from amp_widgets.core.gradient_counts import GradientCounts
from amp_widgets.core.history import Event
from amp_widgets.export.html import export_html

sys.path.insert(0, str(Path(__file__).parent.parent.parent))
from harness.notebook import SCREENSHOTS
from tests.charts.gpt_step import gpt_step
from tests.charts.gradient_step import row
from tests.export.exported import HOSTILE, RunOf, long_history

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Dialog, Page

pytestmark = pytest.mark.browser

INK = """() => [...document.querySelectorAll(".js-plotly-plot")].map(plot => plot.querySelectorAll(".trace path").length)"""
PAPER = """() => getComputedStyle(document.querySelector(".js-plotly-plot .main-svg")).backgroundColor"""
RANGES = """() => [...document.querySelectorAll(".js-plotly-plot")].slice(0, 2).map(plot => plot._fullLayout.xaxis.range)"""
NOTE_PRINT = f"""() => {{
    addEventListener("afterprint", () => {{ globalThis.printed = true; }});
    addEventListener("beforeprint", () => {{
        const plot = document.querySelector(".js-plotly-plot");
        const theme = document.documentElement.getAttribute("theme");
        globalThis.inPrint = [theme, ({PAPER})(), plot._fullLayout.width, document.querySelector("details").open];
    }});
}}"""


class Opened:
    """A file in a page that cannot reach anything, and what its console has said."""

    def __init__(self, browser: Browser, path: Path, **options: object) -> None:
        self.said: list[str] = []
        self.asked: list[str] = []
        self.context = browser.new_context(viewport={"width": 1280, "height": 2600}, offline=True, **options)  # type: ignore[arg-type]
        self.page: Page = self.context.new_page()
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", self._dialog)
        self.page.on("request", lambda request: self.asked.append(request.url.split(":")[0]))
        self.page.goto(path.as_uri())

    def _dialog(self, dialog: Dialog) -> None:
        self.said.append("a dialog")
        dialog.dismiss()

    def until(self, expression: str) -> None:
        """Wait until it is true; not by ``wait_for_function``, which the page's own policy stops."""
        end_s = time.monotonic() + 30
        while not self.page.evaluate(expression):
            assert time.monotonic() < end_s, f"never true: {expression}"
            self.page.wait_for_timeout(20)


@pytest.fixture(scope="module")
def run() -> RunOf:
    history = long_history(20_000, skipped=slice(4000, 4050))
    history.record(Event(step=9000, kind="note", reason=HOSTILE, time_s=90.0))
    made = RunOf(history)
    made.profiles = (gpt_step(label=HOSTILE), gpt_step(label="4 layers", checkpointed=(0, 1, 2, 3)))
    rows = tuple(row(f"{HOSTILE}.{i}", -12 - i) for i in range(4))
    made.gradients = (GradientCounts(step=40, scale=2.0**16, rows=rows),)
    return made


def test_the_page_is_read_anywhere(browser: Browser, run: RunOf, tmp_path: Path) -> None:
    opened = Opened(browser, export_html(run, tmp_path / "run.html"), color_scheme="light")
    page = opened.page
    opened.until("document.querySelectorAll('.amp-figure[data-draws]').length === 5")
    assert all(count > 0 for count in page.evaluate(INK))
    assert page.locator(".still:visible").count() == 0
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / "exported-light-1280.png", full_page=True)

    before = page.evaluate(RANGES)
    assert before[0] == before[1]
    box = page.locator(".js-plotly-plot .nsewdrag").first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.2 * box["width"], box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 42, steps=4)
    page.mouse.up()
    opened.until(f"({RANGES})()[1][0] > 1000")
    zoomed = page.evaluate(RANGES)
    assert zoomed[0] == zoomed[1]
    assert 3000 < zoomed[0][0] < 5000 < 7000 < zoomed[0][1] < 9000

    assert page.evaluate(PAPER) == "rgb(255, 255, 255)"
    page.get_by_role("button", name="dark").click()
    opened.until(f"({PAPER})() === 'rgb(17, 17, 17)'")
    assert page.evaluate(RANGES) == zoomed
    page.set_viewport_size({"width": 900, "height": 2600})
    opened.until("document.querySelector('.js-plotly-plot')._fullLayout.width < 860")
    assert page.evaluate("document.documentElement.scrollWidth") == 900
    page.screenshot(path=SCREENSHOTS / "exported-dark-900.png", full_page=True)

    page.evaluate(NOTE_PRINT)
    page.pdf(path=SCREENSHOTS / "exported.pdf", format="A4", print_background=True)
    opened.until("globalThis.printed")
    assert page.evaluate("globalThis.inPrint") == ["light", "rgb(255, 255, 255)", 690, True]
    opened.until(f"({PAPER})() === 'rgb(17, 17, 17)'")  # as it was
    assert page.locator("details[open]").count() == 0

    assert (opened.said, set(opened.asked)) == ([], {"file"})
    opened.context.close()


def test_without_the_library_or_without_scripts_there_are_pictures(browser: Browser, run: RunOf, tmp_path: Path) -> None:
    """A link without a network, and a reader that runs no scripts."""
    path = export_html(run, tmp_path / "run.html", plotly="link")
    for options in ({}, {"java_script_enabled": False}):
        opened = Opened(browser, path, color_scheme="dark", **options)
        assert opened.page.locator("img.still:visible").count() == 3
        assert opened.page.get_by_role("group", name="colours").is_visible() is not bool(options)
        assert opened.page.locator("h2").all_inner_texts()[-1] == "Environment"
        assert set(opened.asked) <= {"file", "https", "data"}
        assert opened.page.get_by_text("could not be loaded").count() == (not options)
        opened.page.screenshot(path=SCREENSHOTS / f"exported-pictures-{'no-scripts' if options else 'offline'}.png")
        opened.context.close()
    assert np.array_equal(np.unique(run.history.columns("skipped")["skipped"]), [0, 1])
