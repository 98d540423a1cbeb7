"""The format lab in a real JupyterLab: numbers typed, dragged and flipped, as a class sees it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import OpenNotebook

pytestmark = pytest.mark.browser

EVIL = "<img src=x onerror='window.harmed = 1'>"
MAKE = f"""
from amp_widgets.widgets.format_lab import FormatLab

reads = []
def samples():
    reads.append(None)
    return [("blocks.0.mlp.weight[17]", 0.8123, 3.2e-3, 0.01), ({EVIL!r}, 1.0, 1.0, 1e-3)]

lab = FormatLab(weights=samples)
lab
"""


def test_a_number_in_every_format(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([MAKE], height=1500)
    notebook.run_and_wait(0)
    area = notebook.output(0)
    whole = area.locator(".ampw-formats")
    whole.wait_for()
    table = area.get_by_role("table", name="The number in each format")

    def row(name: str, of: Any = table) -> Any:
        return of.get_by_role("row", name=re.compile(rf"^{name} ?\b"))

    def wait(check: Any, what: str) -> None:
        notebook.wait_until(check, what=what)

    assert table.get_by_role("row").count() == 1 + 8
    notebook.screenshot("format-lab-light", whole)

    # typed: too small for fp16
    number = area.get_by_role("textbox", name="Number", exact=True)
    number.fill("2e-8")
    number.press("Enter")
    wait(lambda: "underflow to zero" in row("fp16").inner_text(), "2e-8 is not flushed to zero in fp16")
    assert notebook.kernel.eval("lab.value") == 2e-8
    assert "rounded" in row("bf16").inner_text()

    # a bit of the zero that fp16 has, clicked and by keyboard
    bit = row("fp16").get_by_role("button", name="fp16 bit 14, exponent, 0", exact=True)
    bit.click()
    wait(lambda: notebook.kernel.eval("lab.value") == 2.0, "the bit that was clicked did not flip")
    wait(lambda: number.input_value() == "2", "the number does not follow the bit")
    for key in ("ArrowRight", "End", "Home", "Space"):
        notebook.page.keyboard.press(key)
    wait(lambda: notebook.kernel.eval("lab.value") == -2.0, "the bit that was reached by keys did not flip")
    sign = row("fp16").get_by_role("button", name="fp16 bit 15, sign, 1", exact=True)
    assert sign.evaluate("bit => bit === document.activeElement")

    # refused, said, and mended
    number.fill("__import__('os')")
    number.press("Enter")
    wait(lambda: area.get_by_role("alert").filter(has_text="expected a number such as").count() == 1, "nothing is said")
    assert notebook.kernel.eval("lab.value") == -2.0
    area.get_by_role("button", name="2e-5 × 1000", exact=True).click()
    wait(lambda: notebook.kernel.eval("[lab.value, lab.state.scale]") == [2e-5, 1000.0], "the example was not taken")
    wait(lambda: area.get_by_role("alert").filter(has_text="expected").count() == 0, "what was wrong is still said")
    scaled = area.get_by_role("table", name="Scale, store, unscale")
    assert [cell.strip() for cell in row("fp16", scaled).inner_text().split("\t")][1:4] == [
        "0.02",
        "0.0200042725",
        "2.00042725e-5",
    ]
    notebook.screenshot("format-lab-scaled", whole)

    # dragged by the exponent
    slider = area.get_by_role("slider", name="Exponent", exact=True)
    slider.focus()
    for _ in range(5):
        notebook.page.keyboard.press("ArrowLeft")
    wait(lambda: notebook.kernel.eval("lab.value") == 2e-5 / 32, "the slider had no effect")

    # a weight, and the code of whoever made the lab
    area.get_by_role("button", name="Read again").click()
    wait(lambda: notebook.kernel.eval("len(reads)") == 2, "the weights were not read again")
    area.get_by_role("combobox", name="Weight").select_option(index=1)
    updates = area.get_by_role("table", name="Does the update change the weight")
    wait(lambda: "does not" not in row("fp16", updates).inner_text(), "the second weight is not shown")
    assert "does not change" in row("bf16", updates).inner_text()
    assert notebook.page.evaluate("window.harmed") is None
    assert area.locator("img").count() == 0

    # dark and narrow
    notebook.set_theme("dark")
    notebook.screenshot("format-lab-dark", whole)
    assert not notebook.scrolls_sideways(0)
    notebook.page.set_viewport_size({"width": 1000, "height": 1500})
    notebook.page.wait_for_timeout(200)
    assert not notebook.scrolls_sideways(0)
    assert table.evaluate("table => table.scrollWidth <= table.parentElement.clientWidth")
    notebook.screenshot("format-lab-1000px", whole)
    notebook.page.set_viewport_size({"width": 700, "height": 1500})
    notebook.page.wait_for_timeout(200)
    notebook.screenshot("format-lab-700px", whole)
    assert not notebook.scrolls_sideways(0)


RUNS_OUT = """table => [...table.querySelectorAll("td, th")].flatMap((cell) => {
    if (cell.closest("thead") && getComputedStyle(cell.closest("thead")).position === "absolute") return [];
    const edge = cell.getBoundingClientRect();
    return [...cell.querySelectorAll("*")].filter((part) => {
        const text = document.createRange();
        text.selectNodeContents(part);
        const last = Math.max(part.getBoundingClientRect().right, text.getBoundingClientRect().right);
        return part.getClientRects().length && last > edge.right + 1;
    }).map((part) => `${cell.dataset.label ?? cell.textContent}: ${part.textContent}`);
})"""


def test_what_is_in_a_cell_stays_in_it_in_every_size_of_type(open_notebook: OpenNotebook) -> None:
    lab = "from amp_widgets.language import set_language\nset_language('ko')\n" + MAKE
    notebook = open_notebook([lab, "lab.value = 0.1"], height=2600)
    for cell in range(2):
        notebook.run_and_wait(cell)
    whole = notebook.output(0).locator(".ampw-formats")
    whole.wait_for()
    html = notebook.page.locator("html")
    for size in ("normal", "large", "very-large"):
        html.evaluate("(root, size) => { root.dataset.ampType = size; }", size)
        for width in (1920, 1280, 1000):
            notebook.page.set_viewport_size({"width": width, "height": 2600})
            notebook.page.wait_for_timeout(300)
            notebook.screenshot(f"format-lab-{size}-{width}px", whole)
            tables = whole.locator("table:visible")
            assert tables.count() == 3
            for table in tables.all():
                assert table.evaluate(RUNS_OUT) == [], (size, width)
            assert not notebook.scrolls_sideways(0)


BESIDE = """
import ipywidgets
from amp_widgets.analysis.inspections import Inspection
from amp_widgets.widgets.checks_panel import ChecksPanel, ChecksState
from amp_widgets.widgets.dtype_panel import DtypePanel, DtypeState
from amp_widgets.widgets.format_lab import FormatLab
from amp_widgets.widgets.gradient_panel import GradientPanel
from amp_widgets.widgets.gradient_state import GradientState
from tests.charts.gradient_step import gpt_range
from tests.widgets.gpt_dtypes import gpt_map

ask = lambda *_, **__: None
gradients = GradientPanel(ask, ask, GradientState(range=gpt_range()))
"""
LAYOUT = """area => [...area.querySelectorAll(".ampw-panel *")].filter((one) => one.offsetParent).map((one) => {
    const { x, y, width, height } = one.getBoundingClientRect();
    const style = getComputedStyle(one);
    const top = one.closest(".ampw-panel").getBoundingClientRect().y;
    return [one.className, x, y - top, width, height, style.display, style.padding, style.background, style.font].join();
})"""


def test_no_widget_on_a_page_changes_the_look_of_another(open_notebook: OpenNotebook) -> None:
    panels = ["FormatLab(weights={'w': (1.0, 1.0)})", "DtypePanel(ask, ask, DtypeState(map=gpt_map()))", "ChecksPanel(ask)"]
    cells = [BESIDE, "gradients", *panels]
    notebook = open_notebook(cells, height=3000)
    notebook.run_and_wait(0)
    looks: dict[int, list[str]] = {}

    def look(index: int) -> list[str]:
        found: list[str] = notebook.output(index).evaluate(LAYOUT)
        return found

    for index in range(1, len(cells)):
        notebook.run_and_wait(index)
        notebook.output(index).locator(".ampw-panel").first.wait_for()
        notebook.page.wait_for_timeout(500)
        for before, known in looks.items():
            now = look(before)
            assert [pair for pair in zip(known, now, strict=True) if pair[0] != pair[1]][:3] == [], (before, index)
        looks[index] = look(index)

    # heads stand over their columns, whichever styles the page has
    heads = notebook.output(1).locator(".ampw-gradient-table thead th")
    cells_below = notebook.output(1).locator(".ampw-gradient-table tbody tr:first-child > *")
    inner = "one => { const text = document.createRange(); text.selectNodeContents(one); return text.getBoundingClientRect(); }"
    for at in range(heads.count()):
        side = "right" if at > 1 else "left"
        assert abs(heads.nth(at).evaluate(inner)[side] - cells_below.nth(at).evaluate(inner)[side]) < 1.5, at
