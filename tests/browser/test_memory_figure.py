"""The notes in the picture of a step: within the plot, not on each other, and the legend above the plot, at every width."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import OpenNotebook

pytestmark = pytest.mark.browser

MAKE = """
import dataclasses as dc
from amp_widgets.charts.ceiling import Ceiling, Death
from amp_widgets.charts.figure_view import FigureView
from amp_widgets.charts.mountain import mountain_figure
from tests.charts.gpt_step import MEGA, Writer, dead_step, gpt_step

fp32 = gpt_step()
lean = gpt_step("fp16 + 4 layers checkpointed", half=True, checkpointed=(0, 1, 2, 3))

def deep_step(label, checkpointed):
    "Many small layers: with checkpointing, the peak is where all gradients are there."
    write = Writer()
    write.live |= {"parameter": 26 * MEGA}
    for block in range(50):
        write.point("forward", f"encoder_blocks_of_the_model.{block}", "aten::mm", activation=MEGA // (2 if checkpointed else 1))
    write.point("loss", "", "aten::nll_loss", temporary=0)
    for block in reversed(range(50)):
        name = f"encoder_blocks_of_the_model.{block}"
        write.point("backward", name, "aten::mm", activation=-MEGA // (2 if checkpointed else 1), gradient=MEGA * 52 // 100)
    write.point("optimizer", "", "aten::add_", temporary=0)
    return write.profile(label)

deep = [deep_step("fp32 (step 55)", False), deep_step("fp32 + 150 layers checkpointed", True)]
dead = dead_step(limit_bytes=40e6)
lower = gpt_step("fp32 + 2 layers checkpointed", checkpointed=(0, 1))
near = dc.replace(lower, bytes_by_kind=lower.bytes_by_kind * 39_000_000 // int(lower.bytes_by_kind.sum(1).max()))
died = {dead.profile.label: Death(requested_bytes=8e6, ceiling=Ceiling(size_bytes=40e6, name="budget"))}
view = FigureView()
def show(profiles, ceiling=None, deaths={}):
    view.show(lambda theme: mountain_figure(profiles, title="", theme=theme, ceiling=ceiling, deaths=deaths), label="x")
"""

LAID_OUT = """root => {
    const plot = root.querySelector('.js-plotly-plot');
    if (!plot?._fullLayout) return null;
    const origin = plot.getBoundingClientRect();
    const at = one => {
        const box = one.getBoundingClientRect();
        return [box.left - origin.left, box.top - origin.top, box.right - origin.left, box.bottom - origin.top];
    };
    const size = plot._fullLayout._size;
    return {
        draws: Number(root.dataset.draws), width: plot._fullLayout.width, legend: at(plot.querySelector('.legend .bg')),
        plot: [size.l, size.t, size.l + size.w, size.t + size.h], modebar: at(plot.querySelector('.modebar')),
        height: plot._fullLayout.height, range: plot._fullLayout.xaxis.range,
        notes: Object.fromEntries([...plot.querySelectorAll('.annotation')].map(one => {
            const note = plot._fullLayout.annotations[one.dataset.index];
            const box = one.querySelector('.bg');
            return [note.name, note.text.includes('✕') || !note.text || !box ? null : at(box)];
        }).filter(([, box]) => box)),
        arrows: Object.fromEntries([...plot.querySelectorAll('.annotation')].flatMap(one => {
            const note = plot._fullLayout.annotations[one.dataset.index];
            const line = one.querySelector('.annotation-arrow-g > path');
            if (!note.text || !line) return [];
            const [from, to] = [line.getPointAtLength(0), line.getPointAtLength(line.getTotalLength())];
            const matrix = line.getScreenCTM();
            const seen = (point) => {
                const { x, y } = point.matrixTransform(matrix);
                return [x - origin.left, y - origin.top];
            };
            return [[note.name, [...seen(from), ...seen(to)]]];
        })),
    };
}"""


def within(box: list[float], x: float, y: float) -> bool:
    return box[0] < x < box[2] and box[1] < y < box[3]


def overlap(one: list[float], other: list[float]) -> float:
    across = min(one[2], other[2]) - max(one[0], other[0])
    down = min(one[3], other[3]) - max(one[1], other[1])
    return across * down if across > 1 and down > 1 else 0.0


def problems(found: dict[str, Any]) -> list[str]:
    """What is on something else, or out of the plot."""
    left, top, right, bottom = found["plot"]
    complaints = []
    for name, box in found["notes"].items():
        if name.startswith(("peak", "death")) and not (
            box[0] >= left - 2 and box[1] >= top - 2 and box[2] <= right + 2 and box[3] <= bottom + 2
        ):
            complaints.append(f"{name} is out of the plot: {box}")
        complaints += [f"{name} is on the {part}" for part in ("legend", "modebar") if overlap(box, found[part])]
    complaints += [
        f"{one} is on {other}" for (one, a), (other, b) in itertools.combinations(found["notes"].items(), 2) if overlap(a, b)
    ]
    near = {name: [box[0] - 1, box[1] - 1, box[2] + 1, box[3] + 1] for name, box in found["notes"].items()}
    complaints += [f"{one} touches {other}" for (one, a), (other, b) in itertools.combinations(near.items(), 2) if overlap(a, b)]
    for name, (x0, y0, x1, y1) in found["arrows"].items():
        points = [(x0 + (x1 - x0) * i / 40, y0 + (y1 - y0) * i / 40) for i in range(41)]
        complaints += [
            f"the arrow of {name} crosses {other}"
            for other, box in found["notes"].items()
            if other != name and any(within(box, *point) for point in points)
        ]
        if name in found["notes"] and sum(not within(found["notes"][name], *point) for point in points) < 5:
            complaints.append(f"{name} has no arrow that is seen")
    if found["legend"][3] > top + 2:
        complaints.append(f"the legend is in the plot: {found['legend']}")
    if found["legend"][1] < -1:
        complaints.append(f"the legend is cut off: {found['legend']}")
    return complaints


def test_notes_are_where_they_can_be_read_at_every_width_and_zoom(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([MAKE, "display(view)"], height=900)
    notebook.run_and_wait(0)
    notebook.run_and_wait(1)
    page = notebook.page
    figure = notebook.output(1).locator(".amp-figure")

    def settled() -> dict[str, Any]:
        """When nothing moves any more."""
        found: dict[str, Any] = {}

        def same() -> bool:
            nonlocal found
            before, found = found, figure.evaluate(LAID_OUT) or {}
            return found != {} and found == before

        page.wait_for_timeout(300)
        notebook.wait_until(same, what="the figure does not come to rest")
        return found

    for name, shown in (
        ("two", "show([fp32, lean])"),
        ("deep", "show(deep)"),
        ("turned", "show(deep[::-1])"),
        ("one", "show([deep[1]], Ceiling(size_bytes=50e6, name='budget'))"),
        ("dead", "show([dead.profile], died[dead.profile.label].ceiling, died)"),
        ("dead-near", "show([dead.profile, near], died[dead.profile.label].ceiling, died)"),
        ("dead-then", "show([dead.profile, lean], Ceiling(size_bytes=20e6, name='budget'), died)"),
    ):
        notebook.kernel.exec(shown)
        heights = []
        for width in (1280, 800, 1280):
            page.set_viewport_size({"width": width, "height": 900})
            found = settled()
            notebook.screenshot(f"memory-figure-{name}-{width}", figure)
            assert problems(found) == [], (name, width, found)
            heights.append(found["height"])
        assert heights[0] == heights[2], name

    # what is zoomed into
    notebook.kernel.exec("show([fp32, lean])")
    found = settled()
    box = figure.locator(".draglayer .nsewdrag").first.bounding_box()
    assert box is not None
    for low, high in ((0.3, 0.6), (0.05, 0.9)):
        page.mouse.move(box["x"] + low * box["width"], box["y"] + 0.2 * box["height"])
        page.mouse.down()
        page.mouse.move(box["x"] + high * box["width"], box["y"] + 0.9 * box["height"], steps=5)
        page.mouse.up()
        page.mouse.move(2, 2)
        zoomed = settled()
        notebook.screenshot(f"memory-figure-zoom-{low:g}", figure)
        assert zoomed["range"] != found["range"]
        assert problems(zoomed) == [], zoomed
        found = zoomed
