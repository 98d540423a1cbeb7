"""The memory panel with made-up profiles, in a real JupyterLab: before and after checkpointing, as a user sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import OpenNotebook

pytestmark = pytest.mark.browser

EVIL = "<img src=x onerror='window.harmed = 1'> $x$ & %{y}"

MAKE = f"""
import dataclasses as dc
from amp_widgets.core.layers import Layer
from amp_widgets.core.settings import Settings
from amp_widgets.widgets.memory_panel import MemoryPanel
from amp_widgets.widgets.memory_state import MemoryState
from amp_widgets.widgets.state import DashboardState
from tests.charts.gpt_step import LayerProfile, dead_step, gpt_step, with_allocator

fp32 = gpt_step()
lean = gpt_step("fp16 + 4 layers checkpointed", half=True, checkpointed=(0, 1, 2, 3))
evil = dc.replace(fp32, label={EVIL!r}, layer_names=({EVIL!r},) * len(fp32.layer_names),
    layers=(LayerProfile(name={EVIL!r}, type={EVIL!r}), *fp32.layers))
asked = []
state = MemoryState()
session = DashboardState(settings=Settings(), layers=tuple(
    Layer(name=l.name, type=l.type, parameters=0, why_not=None, structural=l.type == "ModuleList") for l in fp32.layers))

def command(name, **values):
    global state
    asked.append([name, values])
    if name == "profile":
        keep({{"": fp32, "fp32": lean}}[state.profiles[-1].label if state.profiles else ""])
    elif name == "show":
        put(shown=values["labels"])

def request(**changes):
    asked.append(["settings", changes])
    panel.render(dc.replace(session, pending=changes))

def keep(profile):
    put(profiles=(*state.profiles, profile), shown=tuple(p.label for p in state.profiles[-1:]) + (profile.label,))

def put(**changes):
    global state
    state = dc.replace(state, **changes)
    panel.show(state)

panel = MemoryPanel(command, request, state, session)
"""

DRAWN = """root => {
    const plot = root.querySelector('.js-plotly-plot');
    const part = trace => `${trace.meta.profile} ${trace.meta.part}`;
    return plot && {
        parts: plot.data.map(part),
        highest: Object.fromEntries(plot._fullData.map(trace => [part(trace), Math.max(...trace.y)])),
        notes: plot.layout.annotations.map(one => one.text),
        phases: plot.layout.xaxis.ticktext, background: plot.layout.paper_bgcolor, width: plot.layout.width,
        activation: plot.data.find(trace => trace.meta.part === 'activation')?.fillcolor,
        buttons: [...root.querySelectorAll('.modebar-btn')].map(one => one.dataset.title),
        range: plot._fullLayout.yaxis.range,
    };
}"""


def test_before_and_after_checkpointing(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([MAKE, "display(panel)"], height=1400)
    notebook.run_and_wait(0)
    notebook.run_and_wait(1)
    area = notebook.output(1)
    figure = area.locator(".amp-figure")

    def drawn() -> dict[str, Any]:
        found: dict[str, Any] | None = figure.evaluate(DRAWN)
        return found or {"parts": []}

    def wait(check: Any, what: str) -> None:
        notebook.wait_until(check, what=what)

    # nothing yet, then one step, then the second over the first
    wait(lambda: "No step has been profiled yet" in figure.inner_text(), "the empty panel says nothing")
    profile = area.get_by_role("button", name="Profile the next step")
    profile.click()
    wait(lambda: "0 total" in drawn()["parts"], "one step was not drawn")
    peaks = [int(notebook.kernel.eval(f"int({name}.bytes_by_kind.sum(1).max())")) for name in ("fp32", "lean")]
    assert drawn()["highest"]["0 total"] == peaks[0]
    assert "1 total" not in drawn()["parts"]
    profile.click()
    wait(lambda: "1 total" in drawn()["parts"], "two steps were not drawn")
    both = drawn()
    assert [both["highest"][part] for part in ("0 outline", "1 total")] == peaks
    sentence = notebook.kernel.eval("panel._control.sentence")
    assert "less (-" in sentence
    assert area.locator(".ampw-difference").inner_text() == sentence
    assert "fp32 against fp16 + 4 layers checkpointed" in (figure.get_attribute("aria-label") or "")
    assert [name for name in both["phases"] if name.startswith("backward")] == ["backward<br>with 4 recomputes"]
    assert any("after: peak" in note for note in both["notes"])
    assert not any("Cloud" in title or "Chart Studio" in title for title in both["buttons"])
    assert notebook.page.evaluate("typeof globalThis.Plotly") == "undefined"
    assert not notebook.scrolls_sideways(1)
    notebook.screenshot("memory-panel-light", area.locator(".ampw-memory-panel"))

    # what is read on pointing
    box = figure.locator(".draglayer .nsewdrag").first.bounding_box()
    assert box is not None
    notebook.page.mouse.move(box["x"] + 0.55 * box["width"], box["y"] + 0.8 * box["height"])
    figure.locator(".hoverlayer .hovertext").first.wait_for()
    hover = figure.locator(".hoverlayer").text_content() or ""
    assert "layers." in hover
    assert "aten::" in hover
    assert "bytes)" in hover
    notebook.screenshot("memory-panel-hover", figure)
    notebook.page.mouse.move(2, 2)

    # the table
    rows = area.locator(".ampw-layer-table tbody th")
    held = area.get_by_role("columnheader", name="held")
    held.get_by_role("button").click()
    assert held.get_attribute("aria-sort") == "descending"
    assert rows.first.inner_text() in ("layers.4", "layers.5")
    area.get_by_role("textbox", name="Filter").fill("layers.*")
    wait(lambda: rows.count() == 6, "the filter had no effect")
    area.get_by_role("checkbox", name="checkpoint layers.5", exact=True).click()
    wait(lambda: ["settings", {"checkpointed": ["layers.5"]}] in notebook.kernel.eval("asked"), "the tick asked for nothing")
    wait(lambda: area.locator("tr.ampw-changed").count() == 1, "the waiting tick is not marked")

    # dark, also after it was out of sight meanwhile; and the notebook closed and opened again
    light = both["activation"]
    figure.evaluate("root => { root.parentElement.style.display = 'none'; }")
    notebook.set_theme("dark")
    notebook.page.wait_for_timeout(1300)  # it looks at the theme for a second
    figure.evaluate("root => { root.parentElement.style.display = ''; }")
    wait(lambda: drawn()["activation"] != light, "the figure did not follow the dark theme")
    notebook.page.wait_for_timeout(300)
    notebook.screenshot("memory-panel-dark", area.locator(".ampw-memory-panel"))
    notebook.set_theme("light")
    notebook.reopen()
    figure = area.locator(".amp-figure")
    wait(lambda: "1 total" in drawn()["parts"], "the figure is not back")
    assert drawn()["highest"] == both["highest"]
    assert rows.count() == 6

    # one alone, a report, and what a user named
    area.get_by_role("combobox", name="Before").select_option(index=0)
    wait(lambda: "1 total" not in drawn()["parts"], "choosing one step alone had no effect")
    notebook.kernel.exec(
        "keep(evil); report = ('Out of memory in forward of ' + evil.label, 'It would have fitted with 2 layers')\n"
        "put(death=dc.replace(dead_step(), layer=evil.label, report=report), shown=('fp32', evil.label))"
    )
    wait(lambda: area.get_by_role("alert").count() == 1, "the report is not shown")
    wait(lambda: "1 total" in drawn()["parts"], "not drawn")
    assert EVIL in (area.get_by_role("alert").text_content() or "")
    assert notebook.page.evaluate("window.harmed") is None
    assert area.locator("img").count() == 0
    notebook.screenshot("memory-panel-report", area.locator(".ampw-memory-panel"))

    # what torch's allocator holds on CUDA
    notebook.kernel.exec("put(profiles=(fp32, with_allocator(lean, retries=2)), shown=(), death=None, budget_bytes=330e6)")
    wait(lambda: "1 reserved" in drawn()["parts"], "the allocator is not drawn")
    assert {"1 allocated", "1 inactive"} <= set(drawn()["parts"])
    assert "nvidia-smi" in area.locator(".ampw-notes").inner_text()
    notebook.screenshot("memory-panel-allocator-light", area.locator(".ampw-memory-panel"))
    notebook.set_theme("dark")
    wait(lambda: drawn()["activation"] != light, "the figure did not follow the dark theme again")
    notebook.page.wait_for_timeout(300)
    notebook.screenshot("memory-panel-allocator-dark", figure)
