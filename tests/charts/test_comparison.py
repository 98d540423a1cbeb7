"""The scatter of several settings: where the points and their labels are, and what is said beside them."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import plotly.graph_objects as go
import pytest

from amp_widgets.charts import comparison
from amp_widgets.charts.comparison import FORMAT_COLOURS, comparison_figure, comparison_sentence
from amp_widgets.charts.label_places import common, label_box, label_px
from amp_widgets.charts.look import COLOURS


@dataclasses.dataclass(frozen=True)
class Row:
    label: str
    autocast: str = "fp32"
    layers_name: str = "none"
    peak_bytes: float = 100e6
    step_s: float = 0.1
    step_s_low: float = 0.09
    step_s_high: float = 0.12
    peak_ratio: float = 1.0
    time_ratio: float = 1.0
    loss: float = 2.0
    gradient_error: float = 0.0
    skipped: int = 0
    why_not: str | None = None
    few_steps: bool = False


def rows() -> list[Row]:
    made = []
    for autocast, layers in itertools.product(("fp32", "fp16", "bf16"), ("none", "all", "planned", "chosen")):
        peak = 100e6 * (0.7 if autocast != "fp32" else 1.0) * (0.5 if layers != "none" else 1.0)
        step_s = 0.1 + 0.03 * (layers != "none") - 0.02 * (autocast == "bf16")
        made.append(
            Row(f"{autocast}/{layers}", autocast, layers, peak, step_s, 0.95 * step_s, 1.1 * step_s, peak / 100e6, step_s / 0.1)
        )
    return made


def points(figure: go.Figure) -> list[go.Scatter]:
    return [trace for trace in figure.data if trace.mode == "markers+text"]


def test_each_row_is_a_labelled_point() -> None:
    drawn = points(comparison_figure(rows()))
    assert [trace.text[0] for trace in drawn] == [row.label for row in rows()]
    for trace, row in zip(drawn, rows(), strict=True):
        assert trace.x[0] == pytest.approx(1e3 * row.step_s)
        assert trace.y[0] == row.peak_bytes
        assert trace.error_x.array[0] == pytest.approx(1e3 * (row.step_s_high - row.step_s))
        assert trace.error_x.arrayminus[0] == pytest.approx(1e3 * (row.step_s - row.step_s_low))
        assert trace.meta == {"format": row.autocast, "layers": row.layers_name}


def test_nothing_is_told_by_colour_alone() -> None:
    """Formats differ in colour and label, sets of layers in shape and label; a legend says which is which."""
    figure = comparison_figure(rows())
    looks = {(trace.marker.color, trace.marker.symbol) for trace in points(figure)}
    assert len(looks) == 12
    assert len({trace.marker.symbol for trace in points(figure)}) == 4
    entries = {trace.name: trace.marker for trace in figure.data if trace.showlegend is not False}
    assert list(entries) == [
        "fp32", "fp16", "bf16", "none checkpointed", "all checkpointed", "planned checkpointed", "chosen checkpointed",
    ]  # fmt: skip
    for trace in points(figure):
        assert entries[trace.meta["format"]].color == trace.marker.color
        assert entries[f"{trace.meta['layers']} checkpointed"].symbol == trace.marker.symbol


def luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_stand_out(theme: str) -> None:
    background = luminance(COLOURS[theme].background)
    for colour in FORMAT_COLOURS[theme].values():
        low, high = sorted((background, luminance(colour)))
        assert (high + 0.05) / (low + 0.05) >= 3


def test_both_themes_are_alike_but_for_colours() -> None:
    light, dark = (comparison_figure(rows(), theme=theme).to_dict() for theme in ("light", "dark"))
    assert light["layout"]["paper_bgcolor"] != dark["layout"]["paper_bgcolor"]
    assert [trace["name"] for trace in light["data"]] == [trace["name"] for trace in dark["data"]]
    assert light["layout"]["xaxis"]["range"] == dark["layout"]["xaxis"]["range"]


def boxes(made: list[Row]) -> list[tuple[float, float, float, float]]:
    scale = comparison._Scale(made)
    return [
        label_box(*scale.pixels(row), trace.textposition, label_px(row.label), comparison._GAP_PX)
        for row, trace in zip(made, points(comparison_figure(made)), strict=True)
    ]


def test_labels_do_not_cover_each_other() -> None:
    found = boxes(rows())
    for one, other in itertools.combinations(found, 2):
        assert common(one, other) == 0
    for left, top, right, bottom in found:
        assert left >= 0
        assert top >= 0
        assert right <= comparison._WIDTH_PX
        assert bottom <= comparison._PLOT_PX


def test_labels_of_points_that_fall_together_are_told_apart() -> None:
    made = [Row(f"corner {at}", peak_bytes=50e6) for at in range(4)] + [Row("high")]
    found = boxes(made)
    assert sum(common(one, other) for one, other in itertools.combinations(found, 2)) == 0


def test_axes() -> None:
    near = comparison_figure(rows()).layout
    assert (near.xaxis.type, near.xaxis.range[0], near.yaxis.range[0]) == ("linear", 0, 0)
    assert near.xaxis.range[1] > 143
    assert near.yaxis.range[1] > 100e6
    far = comparison_figure([Row("fp32/none"), Row("fp16/none", "fp16", step_s=5.0, step_s_low=4.0, step_s_high=6.0)]).layout
    assert far.xaxis.type == "log"
    assert far.xaxis.range[0] < math.log10(90)
    assert far.xaxis.range[1] > math.log10(6000)
    assert "logarithmic" in far.xaxis.title.text
    assert "logarithmic" not in near.xaxis.title.text


def test_lines_through_the_reference() -> None:
    shapes = comparison_figure(rows()).layout.shapes
    assert {(shape.x0, shape.y0) for shape in shapes} == {(0, 100e6), (100.0, 0)}
    gone = [Row("fp32/none", why_not="out of memory"), *rows()[1:]]
    assert not comparison_figure(gone).layout.shapes


def test_what_is_not_drawn_is_said() -> None:
    made = [
        *rows()[:2], Row("slow", why_not="not run: one step took <b>long</b>"), Row("blind", peak_bytes=math.nan),
        Row("skips", step_s=math.nan),
    ]  # fmt: skip
    figure = comparison_figure(made)
    assert len(points(figure)) == 2
    notes = [note.text for note in figure.layout.annotations if note.name == "not drawn"]
    assert notes == [
        "slow: not run: one step took &lt;b>long&lt;/b>", "blind: its memory was not measured", "skips: its time is not known",
    ]  # fmt: skip
    assert figure.layout.height == comparison_figure(rows()).layout.height + 3 * comparison.NOTE_PX


@pytest.mark.parametrize("made", [[], [Row("fp32/none", why_not="out of memory")]])
def test_nothing_to_draw(made: list[Row]) -> None:
    figure = comparison_figure(made)
    assert not figure.data
    assert "nothing was measured" in [note.text for note in figure.layout.annotations]


def test_words() -> None:
    assert comparison_sentence(rows()) == "Least memory: fp16/all (×0.35); shortest step: bf16/none (×0.80)"
    unclear = "Least memory: fp16/all (×0.35); no step clearly the shortest"
    others = [row for row in rows() if row.label != "bf16/none"]
    fastest = next(row for row in rows() if row.label == "bf16/none")
    near = dataclasses.replace(fastest, step_s_high=min(row.step_s_low for row in others))
    assert comparison_sentence([*others, near]) == unclear
    assert comparison_sentence([*others, dataclasses.replace(fastest, few_steps=True)]) == unclear
    assert comparison_sentence([dataclasses.replace(others[0], few_steps=True), *others[1:], fastest]) == unclear
    assert comparison_sentence(rows()[:1]) == "Peak memory and step time"
    assert comparison_figure(rows(), title="").layout.title.text is None
    assert comparison_figure(rows(), title="").layout.height < comparison_figure(rows()).layout.height
    assert comparison_figure(rows(), title="<i>$x$").layout.title.text == "<b>&lt;i>&#36;x&#36;</b>"


def test_what_the_user_named_is_escaped() -> None:
    evil = "<b>$x$</b>%{y}"
    figure = comparison_figure([Row(evil, layers_name=evil), Row("other")])
    trace = points(figure)[0]
    assert trace.text[0] == trace.name == "&lt;b>&#36;x&#36;&lt;/b>%{y}"
    assert "%{" not in trace.hovertemplate
    assert "<b>&#36;" not in trace.hovertemplate
    assert "<b>$" not in figure.to_json()


def test_pointing_tells_the_numbers() -> None:
    row = dataclasses.replace(rows()[5], gradient_error=1.2e-3, skipped=2)
    text = points(comparison_figure([rows()[0], row]))[1].hovertemplate
    for part in ("fp16/all", "peak 35.0 MB (×0.35)", "step 130 ms (×1.30)", "loss 2", "gradients 1.2e-03", "skipped steps 2"):
        assert part in text


def test_in_another_language_the_legend_names_sets_as_the_labels_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amp_widgets.language._chosen", "ko")
    own = Row("fp32/layers.*", layers_name="layers.*")
    named = {trace.meta["layers"]: trace.name for trace in comparison_figure([*rows(), own]).data if trace.legend == "legend2"}
    assert named["none"] == "체크포인팅: 없음 (none)"
    assert named["planned"] == "체크포인팅: 계획 (planned)"
    assert named["layers.*"] == "체크포인팅: layers.*"
