"""What axe-core finds in our own elements, in each theme; dashboards for a projector; and a path with the keyboard alone."""

from __future__ import annotations

import importlib.resources
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from amp_widgets.export.html import export_html

sys.path.insert(0, str(Path(__file__).parent.parent.parent))
from harness.notebook import SCREENSHOTS
from tests.charts.gpt_step import gpt_step
from tests.export.exported import RunOf, long_history

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

    from conftest import OpenNotebook
    from harness.notebook import Notebook

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(importlib.util.find_spec("axe_playwright_python") is None, reason="needs axe-playwright-python"),
]

TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]
NOT_ASKED = {
    "heading-order": "a notebook has headings of its own around ours",
    "region": "the landmarks of a page are the notebook's",
    "page-has-heading-one": "it is the notebook's",
}
"""Rule of axe → why not."""
OURS = ".ampw, .ampw-dashboard, .ampw-scenarios, .amp-chart, .amp-figure"
TABS = ("Memory", "Gradients", "Formats", "Checks", "Plan", "Compare")
RUN_AXE = """async ([ours, runOnly, notAsked]) => {
    const seen = one => one.getClientRects().length && !one.parentElement.closest(ours);
    const include = [...document.querySelectorAll(ours)].filter(seen);
    if (!include.length) return ["nothing of ours is on the page"];
    const rules = Object.fromEntries(notAsked.map(rule => [rule, {enabled: false}]));
    const options = {runOnly, resultTypes: ["violations"], ...(runOnly.type === "tag" ? {rules} : {})};
    const found = await axe.run({include, exclude: [[".js-plotly-plot"]]}, options);
    return found.violations.flatMap(one => one.nodes.map(node =>
        `${one.id}: ${node.html.slice(0, 200)}: ${(node.any[0] ?? node.all[0] ?? node.none[0])?.message ?? ""}`));
}"""
MAKE = """
%load_ext amp_widgets
import torch, tempfile, pathlib
import amp_widgets as aw
torch.set_num_threads(1)
path = pathlib.Path(tempfile.mkdtemp()) / "run.db"
session = aw.demo("digits")
session.record(path)
session.count_gradients(every=4)
"""
OTHERS = (
    "aw.open_run(path).dashboard()",
    "aw.compare_runs(path, session)",
    "aw.FormatLab()",
    "aw.scenario('first-scale')",
    "%amp present",
)
TEXT_PX = "one => one.getBoundingClientRect().height"


def violations(page: Page, *, of: str = OURS, contrast_alone: bool = False) -> list[str]:
    """What axe finds in what is ours on the page. Plotly's pictures are left out: they have a label, and axe reads no SVG."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(importlib.resources.files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8"))
    run_only = {"type": "rule", "values": ["color-contrast"]} if contrast_alone else {"type": "tag", "values": TAGS}
    found: list[str] = page.evaluate(RUN_AXE, [of, run_only, list(NOT_ASKED)])
    return found


def tab_to(page: Page, target: Locator, key: str = "Tab") -> None:
    """Press Tab until the element has the focus."""
    for _ in range(60):
        if target.evaluate("one => one === document.activeElement"):
            return
        page.keyboard.press(key)
    raise AssertionError("it cannot be reached with Tab")


def by_keyboard_alone(notebook: Notebook, area: Locator, python: Any) -> None:
    """A format, a layer, start, pause."""
    page = notebook.page

    def wait(expression: str, what: str) -> None:
        notebook.wait_until(lambda: python(expression), 60, what)

    area.locator("summary").first.focus()
    tab_to(page, area.get_by_role("radio", name="fp32"))
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    focused = area.get_by_role("radio", name="bf16")
    assert focused.is_checked()
    ring = focused.locator("xpath=..").evaluate("one => getComputedStyle(one).outlineStyle + getComputedStyle(one).outlineWidth")
    assert ring == "solid2px"
    box = area.locator(".ampw-tree input").first
    tab_to(page, box)
    page.keyboard.press("Space")
    tab_to(page, area.get_by_role("button", name="Start", exact=True), "Shift+Tab")
    page.keyboard.press("Enter")
    wait("session.run_state == 'running' and session.status().step > 8", "Enter starts nothing")
    tab_to(page, area.get_by_role("button", name="Pause", exact=True))
    page.keyboard.press("Enter")
    wait("session.run_state == 'paused'", "Enter pauses nothing")
    assert python("[session.settings.autocast, [*session.settings.checkpointed]]") == ["bf16", ["stem"]]


def test_dashboards_for_everybody(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([MAKE, *OTHERS], height=2600, fresh=True)
    notebook.run_and_wait(0)
    area, page, python = notebook.output(0), notebook.page, notebook.kernel.eval
    area.locator(".amp-chart[data-draws]").wait_for(timeout=60_000)
    by_keyboard_alone(notebook, area, python)

    found = []
    for tab in TABS:
        area.get_by_role("tab", name=tab).click()
        area.locator(f".ampw-tab-{tab.lower()}").wait_for()
        found += [f"{tab}: {one}" for one in violations(page, of=OURS if tab == TABS[0] else ".ampw-tabs")]
    assert found == []

    # with the keyboard: the menu, from which it is larger; it holds for a dashboard to come, and for the kernel
    label, chart = area.locator(".ampw-label").first, area.locator(".amp-chart .main-svg").first
    before = label.evaluate(TEXT_PX), chart.evaluate(TEXT_PX)
    area.locator("summary").first.press("Enter")
    area.get_by_role("radio", name="normal").focus()
    page.keyboard.press("ArrowDown")
    notebook.wait_until(lambda: python("str(aw.present().type_size)") == "large", 10, "the kernel does not know")
    page.keyboard.press("Escape")
    assert area.get_by_role("radio", name="normal").is_hidden()
    notebook.wait_until(lambda: chart.evaluate(TEXT_PX) > 1.25 * before[1], 10, "the chart is no larger")
    assert label.evaluate(TEXT_PX) == pytest.approx(1.3 * before[0], rel=0.05)
    for width in (1280, 900):
        page.set_viewport_size({"width": width, "height": 2600})
        page.wait_for_timeout(300)
        assert not notebook.scrolls_sideways(0), width
    notebook.screenshot("present-large-900", area)
    page.set_viewport_size({"width": 1280, "height": 2600})

    for number in range(1, len(OTHERS) + 1):
        notebook.run_and_wait(number)
    notebook.output(4).locator(".amp-chart[data-draws]").wait_for(timeout=60_000)
    last = notebook.output(len(OTHERS))
    assert last.get_by_role("radio", name="large", exact=True).is_checked()
    assert notebook.output(3).locator("h3").first.evaluate(TEXT_PX) > 20  # the lab has no menu of its own
    several = "landmark-unique"  # three dashboards on a page have the same names for their parts
    assert [one for one in violations(page) if not one.startswith(several)] == []
    last.get_by_role("radio", name="normal").check()
    for theme in ("dark", "high contrast"):
        last.get_by_role("radio", name=theme).check()
        page.wait_for_timeout(1300)  # charts are drawn again, at last a second later
        assert violations(page, contrast_alone=True) == [], theme
        notebook.screenshot(f"present-{theme}", area)
    assert area.locator(".ampw").first.evaluate("one => getComputedStyle(one).color") == "rgb(0, 0, 0)"
    texts = "root => [...new Set([...root.querySelectorAll('.main-svg text')].map(one => getComputedStyle(one).fill))]"
    assert area.locator(".amp-chart").evaluate(texts) == ["rgb(0, 0, 0)"]
    python("aw.present(theme='notebook') and 1")
    notebook.wait_until(lambda: page.evaluate("document.documentElement.dataset.ampTheme === undefined"), 10, "it stays")
    assert python("[session.close(), True][1]")


def test_an_exported_page(browser: Browser, tmp_path: Path) -> None:
    run = RunOf(long_history(200, skipped=slice(20, 24)))
    run.profiles = (gpt_step(),)
    page = browser.new_context(viewport={"width": 1280, "height": 2600}, offline=True, bypass_csp=True).new_page()
    page.goto(export_html(run, tmp_path / "run.html").as_uri())
    page.locator(".amp-figure[data-draws]").first.wait_for(timeout=60_000)
    assert violations(page, of="main") == []
    for theme in ("dark", "high contrast"):
        page.get_by_role("button", name=theme).click()
        page.wait_for_timeout(1300)
        assert violations(page, of="main", contrast_alone=True) == [], theme
        page.screenshot(path=SCREENSHOTS / f"present-exported-{theme.split()[0]}.png")
    fill = page.locator(".main-svg text").first.evaluate("one => getComputedStyle(one).fill")
    assert fill == "rgb(0, 0, 0)"
    page.context.close()
