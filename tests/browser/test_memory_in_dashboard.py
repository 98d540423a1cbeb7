"""The memory within a step in the dashboard of a real run: what a user sees of checkpointing, and of running out of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import OpenNotebook

pytestmark = pytest.mark.browser

MAKE = """
import dataclasses
import torch
import amp_widgets as aw
torch.set_num_threads(1)
session = aw.demo("text")
"""
LONG = """
name = "a_layer_with_a_name_that_somebody_wrote_on_a_long_evening." * 6
profile = session.profiles[-1]
layers = tuple(dataclasses.replace(layer, name=name + layer.name, type="T" * 120) for layer in profile.layers)
names = tuple(name + one for one in profile.layer_names)
session.keep_profile(dataclasses.replace(profile, label="<b>" + name, layers=layers, layer_names=names))
"""

DRAWN = """root => {
    const plot = root.querySelector('.js-plotly-plot');
    return plot?.data && {
        highest: Object.fromEntries(plot._fullData.map(t => [`${t.meta.profile} ${t.meta.part}`, Math.max(...t.y)])),
        shapes: plot.layout.shapes.map(one => one.name),
        notes: plot.layout.annotations.map(one => one.text),
        background: plot.layout.paper_bgcolor,
    };
}"""


def test_checkpointing_and_out_of_memory_as_a_user_sees_them(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([MAKE], height=1400)
    notebook.run_and_wait(0)
    area = notebook.output(0)
    panel = area.locator(".ampw-memory-panel")
    figure = panel.locator(".amp-figure")
    sentence = panel.locator(".ampw-difference")
    python = notebook.kernel.eval

    def drawn() -> dict[str, Any]:
        found: dict[str, Any] | None = figure.evaluate(DRAWN)
        return found or {"highest": {}, "shapes": [], "notes": [], "background": ""}

    def wait(check: Any, what: str) -> None:
        notebook.wait_until(check, what=what)

    def press(name: str) -> None:
        area.get_by_role("button", name=name, exact=True).click()

    def asked_for() -> list[str]:
        """The layers that are checkpointed, or are to be from the next step on."""
        names: list[str] = python("session.dashboard_state().requested('checkpointed')")
        return names

    # a step is profiled by itself
    figure.get_by_text("No step has been profiled yet").wait_for()
    assert not panel.get_by_role("table").is_visible()
    press("Start")
    wait(lambda: "0 total" in drawn()["highest"], "no step was profiled by itself")
    assert python("[profile.label for profile in session.profiles]") == ["fp32"]
    assert drawn()["highest"]["0 total"] == python("session.profiles[0].peak_bytes")

    # layers ticked in the table: before and after, by itself
    notebook.kernel.exec("session.pause()")
    wait(lambda: python("session.run_state") == "paused", "the run did not pause")
    for block in range(4):
        panel.get_by_role("checkbox", name=f"checkpoint layers.{block}", exact=True).check()
    wait(lambda: len(asked_for()) == 4, "the ticks asked for nothing")
    press("Resume")
    wait(lambda: python("session.profiles[-1].label") == "fp32 + 4 layers checkpointed", "the change was not profiled")
    press("Pause")
    wait(lambda: "1 total" in drawn()["highest"], "before and after were not drawn")
    peaks = [python(f"session.profiles[{i}].peak_bytes") for i in (-2, -1)]
    assert [drawn()["highest"][part] for part in ("0 outline", "1 total")] == peaks
    assert peaks[1] < 0.7 * peaks[0]
    assert f"{peaks[0] / 1e6:.1f} MB → {peaks[1] / 1e6:.1f} MB" in sentence.inner_text()
    assert "computed again 4 times" in panel.locator(".ampw-notes").inner_text()
    wait(lambda: python("session.run_state") == "paused", "the run did not pause")
    press("Profile the next step")
    panel.get_by_role("button", name="The next step will be profiled when training goes on").wait_for()
    notebook.screenshot("dashboard-memory-light", area)
    light = drawn()["background"]
    notebook.set_theme("dark")
    wait(lambda: drawn()["background"] != light, "the figure did not follow the dark theme")
    notebook.page.wait_for_timeout(300)
    notebook.screenshot("dashboard-memory-dark", area)

    # a budget that is too small: the report and the picture of that moment
    notebook.kernel.exec("session.memory_budget = 100e6; session.request(checkpointed=[])")
    press("Resume")
    wait(lambda: panel.get_by_role("alert").count() == 1, "the report is not shown")
    wait(lambda: "requested 0" in drawn()["shapes"], "where memory ran out is not drawn")
    assert panel.get_by_role("alert").locator("p").all_inner_texts() == python("session.out_of_memory.report")[1:]
    assert "ceiling" in drawn()["shapes"]
    assert any("out of memory here" in note and "budget 100.0 MB" in note for note in drawn()["notes"])
    proposed = python("session.out_of_memory.layers_to_checkpoint")
    assert proposed
    error = area.locator(".ampw-error").inner_text()
    assert error == f"{python('session.out_of_memory.report')[0]}. See below what would have fitted."
    assert panel.locator(".ampw-caption").inner_text().endswith("until it ran out of memory")
    held = python(
        "dict(zip(['parameters', 'optimizer state'], map(int, session.out_of_memory.profile.bytes_by_kind[-1][[0, 3]])))"
    )
    for kind, size_bytes in held.items():
        assert f"{kind} {size_bytes / 1e6:.1f} MB" in panel.locator(".ampw-notes").inner_text()
    marked = panel.locator("tr.ampw-proposed")
    wait(lambda: 1 <= marked.count() <= len(proposed), "what is proposed is not marked")  # of those the ones that are in sight
    notebook.screenshot("dashboard-memory-death-dark", area)
    notebook.set_theme("light")
    wait(lambda: drawn()["background"] == light, "the figure did not follow the light theme")
    notebook.page.wait_for_timeout(300)
    notebook.screenshot("dashboard-memory-death-light", area)

    # what is proposed, and more; then it fits, and the report says so
    panel.locator(".ampw-report").get_by_role("button", name="Checkpoint").click()
    wait(lambda: asked_for() == proposed, "the proposal was not asked for")
    panel.get_by_text("requested; press Start to try again").wait_for()
    notebook.screenshot("dashboard-memory-requested", panel)
    notebook.kernel.exec("session.request(checkpointed=['layers.*'])")
    press("Start")
    summary = panel.locator(".ampw-report summary")
    wait(lambda: "since then" in summary.inner_text(), "the report does not say that steps fit")
    assert panel.get_by_role("alert").count() == 0
    wait(lambda: "it fits" in sentence.inner_text(), "the step that fits was not compared with the one that did not")
    notebook.kernel.exec("session.memory_budget = None")
    wait(lambda: "no budget is set now" in sentence.inner_text(), "the sentence is of a budget that is not in force")
    wait(lambda: "ceiling" not in drawn()["shapes"], "the budget that is no more is still drawn")
    notebook.screenshot("dashboard-memory-fits", area)
    press("Stop")

    # long names, and a narrow page
    notebook.kernel.exec(LONG)
    wait(lambda: any("a_layer_with" in note for note in drawn()["notes"]), "the long name is not shown")
    assert not notebook.scrolls_sideways(0)
    notebook.page.set_viewport_size({"width": 1000, "height": 1400})
    notebook.page.wait_for_timeout(500)
    assert not notebook.scrolls_sideways(0)
    assert panel.evaluate("panel => panel.scrollWidth <= panel.clientWidth + 1")
    assert panel.locator("p b, option b, th b").count() == 0
    notebook.screenshot("dashboard-memory-narrow", area)

    # what is left of it without a kernel
    notebook.page.set_viewport_size({"width": 1280, "height": 1400})
    notebook.kernel.exec("session.memory_budget = 30e6")
    press("Start")
    wait(lambda: "out of memory" in sentence.inner_text().lower(), "the last run did not run out of memory")
    heading = python("session.out_of_memory.report")[0]
    wait(lambda: any(heading in str(one) for one in notebook.outputs(0)), "the picture for the notebook has no report")
    notebook.save()
    notebook.expected.append("widget model not found")  # ipywidgets says so as soon as JupyterLab has started another kernel
    notebook.shut_down()
    notebook.reload(kernel=False)
    picture = notebook.output(0).get_by_role("img", name="Memory within a step")
    picture.wait_for()
    wait(lambda: picture.evaluate("one => one.complete && one.naturalWidth") == 900, "the picture is not an image")
    assert notebook.output(0).get_by_text(heading, exact=True).is_visible()
    notebook.screenshot("dashboard-memory-still", notebook.output(0))
