from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

from amp_widgets.charts.figures import training_figure
from amp_widgets.charts.flags import MOST_FLAGS
from amp_widgets.charts.labels import EventLike
from amp_widgets.charts.look import COLOURS, whole_dtick
from amp_widgets.core.history import Event

nan, inf = math.nan, math.inf


def event(step: int, kind: str = "applied", reason: str = "because", **detail: object) -> Event:
    return Event(step=step, kind=kind, reason=reason, detail=detail, time_s=0.0)


def figure(events: tuple[EventLike, ...] = (), **values: Any) -> go.Figure:
    options = {"memory_source": "counted"} | {
        name: values.pop(name) for name in ("theme", "memory_source", "limit") if name in values
    }
    rows = len(next(iter(values.values()), ()))
    columns = {"step": np.arange(rows), **{name: np.array(column, float) for name, column in values.items()}}
    return training_figure(columns, events, **options)


def trace(fig: go.Figure, series: str, part: str = "line") -> go.Scatter:
    (found,) = [one for one in fig.data if one.meta == {"series": series, "part": part}]
    return found


def texts(fig: go.Figure) -> list[str]:
    return [annotation.text for annotation in fig.layout.annotations if annotation.visible is not False]


def test_lines_are_the_columns() -> None:
    values: dict[str, Any] = {
        "loss": [3, 2, 1],
        "scale": [4, 4, 2],
        "allocated_bytes": [10, 20, 30],
        "peak_bytes": [11, nan, 31],
        "reserved_bytes": [40, 40, 40],
    }
    fig = figure(**values)
    for column in ("loss", "allocated_bytes", "peak_bytes", "reserved_bytes"):
        line = trace(fig, column.removesuffix("_bytes"))
        assert list(line.x) == [0, 1, 2]
        np.testing.assert_array_equal(line.y, values[column])
        assert line.connectgaps is False
        assert line.mode == "lines"
        assert line.type == "scatter"
    assert list(trace(fig, "scale").y) == [2, 2, 1]
    assert trace(fig, "scale").line.shape == "hv"
    assert list(trace(fig, "peak", "lone").x) == [0, 2]
    assert list(trace(fig, "loss", "lone").x) == []


def test_three_plots_share_the_axis_of_steps_and_one_lies_over_the_loss() -> None:
    fig = figure(loss=[1])
    axes: dict[str, list[str]] = {name: [] for name in ("y", "y2", "y3", "y4")}
    for one in fig.data:
        assert one.xaxis == "x"
        axes[one.yaxis].append(one.meta["series"])
    assert set(axes["y"]) == {"loss"}
    assert set(axes["y2"]) == {"scale", "skipped"}
    assert set(axes["y3"]) == {"allocated", "peak", "reserved"}
    assert set(axes["y4"]) == {"not_finite", "events"}
    assert fig.layout.yaxis4.overlaying == "y"
    domains = [fig.layout[name].domain for name in ("yaxis3", "yaxis2", "yaxis")]
    assert all(low[1] < high[0] for low, high in itertools.pairwise(domains))


def test_the_axis_of_the_scale_has_whole_powers_of_two() -> None:
    axis = figure(scale=[2.0**10, 2.0**16]).layout.yaxis2
    assert (axis.tickprefix, axis.ticksuffix, axis.dtick) == ("2<sup>", "</sup>", 1)
    assert axis.type in (None, "linear")
    assert whole_dtick(np.array([])) == whole_dtick(np.array([nan, 3.0])) == 1
    for span in range(1, 250):
        dtick = whole_dtick(np.array([0.0, span]))
        assert span / dtick <= 6
        assert math.log2(dtick).is_integer()


def test_every_skipped_step_has_a_mark() -> None:
    fig = figure((event(3, "skipped"),), scale=[8, 8, 4, 4], skipped=[0, 1, 0, 0])
    assert list(trace(fig, "skipped", "marks").x) == [1, 3]
    assert list(trace(fig, "skipped", "marks").y) == [3, 2]


def test_losses_that_are_not_finite_are_marked_at_the_top() -> None:
    fig = figure(loss=[1, nan, inf, -inf, 2])
    np.testing.assert_array_equal(trace(fig, "loss").y, [1, nan, nan, nan, 2])
    marks = trace(fig, "not_finite", "marks")
    assert list(marks.x) == [1, 2, 3]
    assert list(marks.text) == ["NaN, or not recorded", "+inf", "-inf"]
    assert all(0.9 < y < 1 for y in marks.y)
    assert fig.layout.yaxis4.range == (0, 1)


@pytest.mark.parametrize("losses", [[nan] * 3, [inf] * 3, [-inf, nan, inf], [1.7e308, -1.7e308, 0]])
def test_losses_of_any_kind_make_a_valid_figure(losses: list[float]) -> None:
    fig = figure(loss=losses)
    assert "Infinity" not in fig.to_json()
    finite = [y for y in trace(fig, "loss").y if math.isfinite(y)]
    assert all(abs(y) <= 1e300 for y in finite)
    assert ("no finite loss so far" in texts(fig)) == (not finite)


def test_each_applied_change_is_a_labelled_line_through_all_three() -> None:
    changes = event(0, autocast="fp16", source="dashboard"), event(2, checkpointed=["a", "b"])
    fig = figure((changes[0], event(1, "rejected"), changes[1], event(1, "note"), event(2, "out_of_memory")), loss=[1, 2, 3])
    assert [(line.x0, line.x1, line.y0, line.yref) for line in fig.layout.shapes] == [(2, 2, 0, "paper"), (0, 0, 0, "paper")]
    assert all(line.y1 > 1 for line in fig.layout.shapes)
    assert {"fp16", "2 layers"} <= set(texts(fig))
    marks = trace(fig, "events", "marks")
    assert list(marks.x) == [0, 1, 2, 1, 2]
    assert list(marks.text) == ["because"] * 5
    assert len(set(marks.marker.symbol)) == 4


def test_only_the_newest_lines_are_drawn_but_every_mark() -> None:
    fig = figure(tuple(event(i) for i in range(200)), loss=np.zeros(200))
    assert [line.x0 for line in fig.layout.shapes] == list(range(199, 199 - MOST_FLAGS, -1))
    assert list(trace(fig, "events", "marks").x) == list(range(200))


def test_what_the_user_wrote_is_shown_literally() -> None:
    bad = "<b>x</b> & <a href='javascript:alert(1)'>$y$</a>"
    events = (event(0, reason=bad), event(0, reason="r", autocast=bad), event(0, "rejected", reason=bad))
    fig = figure(events, memory_source=bad, loss=[1])
    text = json.dumps(json.loads(fig.to_json()), ensure_ascii=False)
    assert "<a" not in text
    assert "<b>x" not in text
    assert "$" not in text
    assert "&lt;b>x&lt;/b> &amp; " in text


def test_the_memory_title_says_how_it_was_measured() -> None:
    source = "torch.cuda.memory_stats on cuda:0"
    assert f"<b>memory</b> · {source}" in texts(figure(memory_source=source))


def test_what_is_empty_says_so_and_has_no_ticks() -> None:
    fig = figure(loss=[1.0], scale=[nan], peak_bytes=[nan])
    assert {"the loss is not scaled", "not measured"} <= set(texts(fig))
    assert "no finite loss so far" not in texts(fig)
    assert [fig.layout[axis].showticklabels for axis in ("yaxis", "yaxis2", "yaxis3")] == [True, False, False]
    assert len(trace(fig, "reserved").x) == 0
    nothing = training_figure({"step": np.empty(0)}, [], memory_source="x", theme="dark")
    assert {"no finite loss so far", "the loss is not scaled", "not measured"} <= set(texts(nothing))


def test_memory_axis_and_hover_have_units() -> None:
    fig = figure(peak_bytes=[1e9])
    assert (fig.layout.yaxis3.tickformat, fig.layout.yaxis3.ticksuffix, fig.layout.yaxis3.rangemode) == ("~s", "B", "tozero")
    assert "%{y:,d} bytes" in trace(fig, "peak").hovertemplate


def test_limit_reduces_lines_and_keeps_extremes() -> None:
    loss = np.sin(np.arange(50_000.0))
    loss[777] = 9
    fig = figure(loss=loss, limit=500)
    assert len(trace(fig, "loss").y) <= 500
    assert max(trace(fig, "loss").y) == 9
    assert len(trace(figure(loss=loss), "loss").y) == 50_000


def contrast(one: str, other: str) -> float:
    """WCAG 2.2, relative luminance."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_stand_out(theme) -> None:
    colours = COLOURS[theme]
    fig = figure(loss=[1], theme=theme)
    assert fig.layout.paper_bgcolor == fig.layout.plot_bgcolor == colours.background
    assert fig.layout.font.color == colours.text
    for line in ("loss", "scale", "alarm", "allocated", "peak", "reserved", "flag"):
        assert contrast(getattr(colours, line), colours.background) >= 3, line
    for text in ("text", "muted"):
        assert contrast(getattr(colours, text), colours.background) >= 4.5, text


def test_no_button_sends_the_data_away() -> None:
    assert "sendChartToCloud" in figure(loss=[1]).layout.modebar.remove


def test_a_user_can_go_on_with_it() -> None:
    fig = figure(loss=[1, 2])
    fig.add_scatter(x=[0, 1], y=[2, 1], name="mine")
    fig.update_layout(title="My run")
    assert "mine" in fig.to_json()


@pytest.mark.parametrize(
    ("module", "missing"),
    [
        ("figures", "plotly.graph_objects"),
        ("live", "anywidget"),
        ("live", "ipywidgets"),
        ("live", "tsdownsample"),
    ],
)
def test_a_missing_library_is_named_with_the_way_to_get_it(module: str, missing: str) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from amp_widgets.errors import MissingExtraError\n"
        f"try: import amp_widgets.charts.{module}\n"
        "except MissingExtraError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert missing in done.stdout
    assert 'pip install "amp-widgets[notebook]"' in done.stdout


def test_imports_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import amp_widgets.charts.live"
    subprocess.run([sys.executable, "-c", code], check=True)
