from __future__ import annotations

import base64
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

from amp_widgets.charts.still import LINE_POINTS, WIDTH_PX, picture_html, training_svg
from amp_widgets.core.history import Event

MOST_BYTES = 40_000
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
