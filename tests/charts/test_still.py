from __future__ import annotations

import base64
import dataclasses
import itertools
import math
import re
import subprocess
import sys
import time
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from amp_widgets.charts.mountain import KIND_COLOURS
from amp_widgets.charts.still import FEWER_POINTS, LINE_POINTS, MOUNTAIN_PX, WIDTH_PX, memory_svg, picture_html, training_svg
from amp_widgets.core.history import Event
from amp_widgets.widgets.memory_state import MemoryState
from tests.charts.gpt_step import Phase, Writer, dead_step, gpt_step

MOST_BYTES = 40_000
MOST_MEMORY_BYTES = 9_000
nan, inf = math.nan, math.inf


def event(step: int, kind: str = "applied", reason: str = "because", **detail: object) -> Event:
    return Event(step=step, kind=kind, reason=reason, detail=detail, time_s=0.0)


def picture(*events: Event, memory_source: str = "counted", **values: Any) -> ElementTree.Element:
    rows = len(next(iter(values.values()), ()))
    columns = {"step": np.arange(rows), **{name: np.array(column, float) for name, column in values.items()}}
    return ElementTree.fromstring(training_svg(columns, events, memory_source=memory_source))


def texts(root: ElementTree.Element) -> list[str]:
    return ["".join(element.itertext()) for element in root.iter() if element.tag.endswith("text")]


def lines(root: ElementTree.Element) -> list[list[tuple[float, float]]]:
    """Points, in pixels, of every curve; a gap begins another."""
    found: list[list[tuple[float, float]]] = []
    for path in root.iter("{http://www.w3.org/2000/svg}path"):
        if path.get("stroke-width") != "3":
            continue
        x = y = 0
        for command, numbers in re.findall(r"([Mlhv])([-\d ]+)", path.get("d", "")):
            values = [int(number) for number in re.findall(r"-?\d+", numbers)]
            match command:
                case "M":
                    x, y = values
                    found.append([])
                case "l":
                    x, y = x + values[0], y + values[1]
                case "h":
                    x += values[0]
                case "v":
                    y += values[0]
            found[-1].append((x / 2, y / 2))
    return found


def test_without_a_row_it_says_so() -> None:
    root = picture(event(0), loss=[])
    assert texts(root) == ["No training step recorded yet."]
    assert float(root.get("height", "")) < 100


def test_four_plots_with_units_a_legend_and_steps() -> None:
    root = picture(
        loss=[3, 2, 1], scale=[4, 4, 2], skipped=[0, 1, 0], allocated_bytes=[1e6, 2e6, 3e6], peak_bytes=[4e6] * 3,
        reserved_bytes=[5e6] * 3, step_s=[0.004, 0.005, 0.004], memory_source="as counted",
    )  # fmt: skip
    shown = texts(root)
    for title in ("loss", "loss scale (powers of 2)", "memory (MB) · as counted", "step time (ms)", "step"):
        assert title in shown
    for entry in ("allocated", "peak", "reserved", "skipped step"):
        assert entry in shown
    assert {"0", "1", "2"} <= set(shown)
    assert "2^1" in shown
    assert "not finite" not in shown
    assert len(lines(root)) == 6


def test_thousands_have_no_exponent() -> None:
    assert {"500", "1000"} <= set(texts(picture(loss=[1.0, 1.0], peak_bytes=[952, 956])))
    assert "2e+07" in texts(picture(loss=[0.0, 2e7]))


def test_lines_go_through_the_values() -> None:
    loss = [4.0, nan, 1.0, 2.0, 4.0]
    first, second = lines(picture(loss=loss))
    ((x0, top),) = first
    (x2, bottom), (x3, middle), (x4, again) = second
    assert again == top
    assert bottom - middle == pytest.approx((top - middle) / -2, abs=1)
    assert [x2 - x0, x3 - x2, x4 - x3] == pytest.approx([2 * (x3 - x2), x3 - x2, x3 - x2], abs=1)
    assert 0 < x0 < x4 < WIDTH_PX


def test_the_scale_is_a_stair_and_an_unscaled_loss_is_said() -> None:
    (stair,) = lines(picture(scale=[8, 8, 4, 4, 16, 16]))
    assert len({y for _, y in stair}) == 3
    for (x, y), (next_x, next_y) in itertools.pairwise(stair):
        assert x == next_x or y == next_y
    assert "the loss is not scaled" in texts(picture(scale=[1, 1, 1]))
    assert "the loss is not scaled" in texts(picture(loss=[1]))


def test_what_is_not_there_is_said() -> None:
    shown = texts(picture(loss=[nan, inf]))
    assert "no finite loss so far" in shown
    assert shown.count("not measured") == 2
    assert "not finite" in shown


def test_a_long_first_step_does_not_flatten_the_others() -> None:
    step_s = np.full(200, 0.010)
    step_s[::2] = 0.008
    step_s[0] = 3.0
    root = picture(step_s=step_s)
    assert any("longest 3,000 ms" in text for text in texts(root)) or any("longest 3e+03 ms" in text for text in texts(root))
    ((line),) = lines(root)
    ys = [y for _, y in line[2:]]
    assert max(ys) - min(ys) > 5


def test_applied_changes_are_lines_with_labels_and_what_the_user_wrote_is_escaped() -> None:
    bad = "</text><script>alert('&\"')</script>\x00\x1b[0m ]]> $x$"
    root = picture(event(1, autocast=bad), event(2, "rejected", bad), loss=[1, 2, 3], memory_source=bad)
    shown = texts(root)
    assert any(text.startswith("</text><script>alert('&\"')") for text in shown)
    assert any(text.startswith("memory (B) · </text><script>") for text in shown)
    assert {element.tag.rpartition("}")[2] for element in root.iter()} <= {"svg", "rect", "path", "text"}
    dashed = [path for path in root.iter() if path.get("stroke-dasharray")]
    assert [path.get("d", "").count("M") for path in dashed] == [1]


@pytest.mark.parametrize(
    "values",
    [
        {"loss": [1.0]},
        {"loss": [2.5] * 9},
        {"loss": [1e300, -1e300, inf, -inf]},
        {"loss": [1.7e308, -1.7e308]},
        {"loss": [1.0, 1.0 + 1e-15]},
        {"loss": [5e-324, 0.0]},
        {"scale": [2.0**-140, 2.0**127]},
        {"scale": [0.0, inf, nan]},
        {"allocated_bytes": [0.0, 0.0]},
        {"step_s": [0.0, inf, nan]},
        {"step_s": [1e-9, 1e5]},
    ],
)  # fmt: skip
def test_values_that_break_an_axis_elsewhere(values: dict[str, list[float]]) -> None:
    root = picture(**values)
    for x, y in itertools.chain.from_iterable(lines(root)):
        assert 0 <= x <= WIDTH_PX
        assert 0 <= y <= float(root.get("height", ""))
    assert "nan" not in " ".join(texts(root)).lower().replace("not finite", "")


@pytest.mark.parametrize("rows", [10, 3_000, 300_000])
def test_its_size_does_not_grow_with_the_run(rows: int) -> None:
    rng = np.random.default_rng(7)  # the worst: nothing but noise, events and marks everywhere
    noise = rng.standard_normal(rows)
    noise[rng.random(rows) < 0.1] = nan
    noise[rng.random(rows) < 0.1] = inf
    columns = {"step": np.arange(rows), "loss": noise, "scale": 2.0 ** rng.integers(0, 30, rows), "skipped": noise > 0}
    columns |= {name: 1e9 * rng.random(rows) for name in ("allocated_bytes", "peak_bytes", "reserved_bytes", "step_s")}
    kinds = ("applied", "applied", "rejected", "run", "note", "out_of_memory", "skipped")
    changes = ({"autocast": "f&"}, {"checkpointed": ["x"] * 9, "init_scale": 2.0**16}, {"autocast": "ü<" * 40})
    steps = range(0, rows, max(1, rows // 3_000))
    events = [event(step, kinds[i % 6], "&" * 500, **changes[i % 3]) for i, step in enumerate(steps)]
    start_s = time.perf_counter()
    svg = training_svg(columns, events, memory_source="<&>" * 200)
    assert time.perf_counter() - start_s < 5
    ElementTree.fromstring(svg)
    assert len(svg.encode()) <= MOST_BYTES
    fewer = training_svg(columns, events, memory_source="<&>" * 200, line_points=FEWER_POINTS)
    assert len(fewer.encode()) <= MOST_BYTES - MOST_MEMORY_BYTES


def test_extremes_survive() -> None:
    loss = np.zeros(100_000)
    loss[12_345] = 1.0
    ((line),) = lines(picture(loss=loss))
    assert len(line) <= 2 * LINE_POINTS
    ys = [y for _, y in line]
    assert ys.count(min(ys)) == 1
    assert max(ys) - min(ys) > 100


def test_as_html_it_is_an_image_with_an_escaped_sentence() -> None:
    svg = training_svg({"step": np.arange(3), "loss": np.ones(3)}, [], memory_source="ü")
    html = picture_html(svg, "a <b> & c", class_="mine")
    assert "<p>a &lt;b&gt; &amp; c</p>" in html
    assert 'class="mine"' in html
    data = re.search(r"data:image/svg\+xml;base64,([^\"]+)", html)
    assert data is not None
    assert base64.b64decode(data[1]).decode() == svg


def test_it_needs_numpy_only() -> None:
    code = (
        "import sys\n"
        "missing = ('torch', 'plotly', 'anywidget', 'ipywidgets', 'tsdownsample', 'IPython', 'traitlets')\n"
        "sys.modules.update(dict.fromkeys(missing))\n"
        "import numpy as np\n"
        "from amp_widgets.charts.still import training_svg\n"
        "print(len(training_svg({'step': np.arange(5000), 'loss': np.arange(5000.)}, [], memory_source='')))\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, capture_output=True, text=True)
    assert int(done.stdout) > 1000


# ---- the memory within a step ----


def memory(state: MemoryState) -> ElementTree.Element:
    return ElementTree.fromstring(memory_svg(state.chosen, state.deaths, state.ceiling, KIND_COLOURS["light"]))


def areas(root: ElementTree.Element) -> dict[str, list[float]]:
    """Colour → heights in pixels above the bottom, the areas below included."""
    bottom = 2.0 * (26 + MOUNTAIN_PX)
    name = "{http://www.w3.org/2000/svg}"
    patterns = {f"url(#{one.get('id')})": one.find(f"{name}path").get("fill") for one in root.iter(f"{name}pattern")}  # type: ignore[union-attr]
    found = {}
    for path in root.iter("{http://www.w3.org/2000/svg}path"):
        d = path.get("d", "")
        if path.get("fill") in patterns and not d.endswith("h-24z"):  # that is the legend's
            heights = [float(d.split()[1].split("H")[0]), *(float(number) for number in re.findall(r"V(\d+)", d))]
            found[str(patterns[path.get("fill", "")])] = [(bottom - height) / 2 for height in heights[:-1]]
    return found


def test_the_memory_within_a_step_is_areas_stacked_by_kind() -> None:
    write = Writer()
    write.live["parameter"] = 100
    write.point("forward", "a", "aten::mm", activation=100)
    write.point("backward", "a", "aten::mm", activation=-50, gradient=150)
    root = memory(MemoryState(profiles=(write.profile("<b>"),)))
    colours, per_byte = KIND_COLOURS["light"], MOUNTAIN_PX / (1.1 * 300)
    found = areas(root)
    assert set(found) == {colours[kind] for kind in ("parameter", "gradient", "activation")}
    assert found[colours["parameter"]] == pytest.approx([100 * per_byte], abs=0.5)
    assert found[colours["activation"]] == pytest.approx([200 * per_byte, 300 * per_byte], abs=0.5)
    assert found[colours["gradient"]] == pytest.approx([100 * per_byte, 250 * per_byte], abs=0.5)
    assert {"forward", "backward", "parameters", "activations", "memory within a step (B)"} <= set(texts(root))


def test_before_and_after_the_budget_and_a_death_are_in_the_small_picture() -> None:
    fp32, lean = gpt_step(), gpt_step("fp16", half=True, checkpointed=(0, 1, 2, 3))
    root = memory(MemoryState(profiles=(fp32, lean), budget_bytes=150e6))
    assert {"before (outline)", "budget 150.0 MB", "recomputed"} <= set(texts(root))
    dead = dead_step()
    root = memory(MemoryState(death=dead, budget_bytes=150e6))
    assert {"out of memory here", "budget 150.0 MB"} <= set(texts(root))
    empty = dataclasses.replace(
        fp32, bytes_by_kind=np.zeros((0, 8), np.int64), time_s=np.zeros(0), phases=(), layer_index=np.zeros(0, int)
    )
    memory(MemoryState(profiles=(empty,)))
    memory(MemoryState(death=dataclasses.replace(dead, profile=dataclasses.replace(empty, label="dead"))))


@pytest.mark.parametrize("seed", range(2))
def test_the_small_picture_of_a_long_step_keeps_its_peak_and_is_small(seed: int) -> None:
    print(f"seed {seed}")
    random = np.random.default_rng(seed)
    steps = []
    for label in ("one", "two"):
        kinds = random.integers(0, 10**9, (4000, 8))
        kinds[int(random.integers(4000))] = 2 * 10**9
        phases = tuple(Phase(name=("forward", "backward")[i % 2], start=100 * i, stop=100 * i + 100) for i in range(40))
        steps.append(
            dataclasses.replace(
                gpt_step(label), bytes_by_kind=kinds, time_s=np.arange(4000) / 1e3, phases=phases,
                layer_index=np.full(4000, -1), operator_index=np.full(4000, -1),
            )
        )  # fmt: skip
    svg = memory_svg(steps, {}, None, KIND_COLOURS["light"])
    assert len(svg.encode()) <= MOST_MEMORY_BYTES
    highest = max(height for heights in areas(ElementTree.fromstring(svg)).values() for height in heights)
    assert highest == pytest.approx(MOUNTAIN_PX / 1.1, abs=0.5)


def test_the_sentence_and_the_report_are_below_as_text() -> None:
    html = picture_html("<svg/>", "caption", memory=("<svg/>", "peak <b>"), report=("Out of memory", "<img src=x>"))
    assert html.count("<img") == 2
    assert "<p><b>peak &lt;b&gt;</b></p>" in html
    assert html.endswith("<p><b>Out of memory</b></p><p>&lt;img src=x&gt;</p></div>")
    assert "<img" not in picture_html("", "caption")
