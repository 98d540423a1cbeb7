from __future__ import annotations

import dataclasses
import itertools
import math
import re
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

from amp_widgets.charts import peaks
from amp_widgets.charts.ceiling import Ceiling, Death
from amp_widgets.charts.decimate import kept_points
from amp_widgets.charts.label_places import label_px
from amp_widgets.charts.look import COLOURS
from amp_widgets.charts.mountain import KIND_COLOURS, MOST_POINTS, mountain_figure, mountain_sentence
from amp_widgets.charts.phases import MOST_BANDS, WIDTH, aligned, recomputes_of
from amp_widgets.charts.reserved import together
from amp_widgets.core.memory import profile as core_profile
from tests.charts.gpt_step import Phase, Readings, StepProfile, Writer, dead_step, gpt_step, with_allocator

EVIL = "<b>x</b> & $y$ <a href='javascript:1'>"


@pytest.fixture(scope="module")
def fp32() -> StepProfile:
    return gpt_step()


@pytest.fixture(scope="module")
def lean() -> StepProfile:
    return gpt_step("fp16 + 4 layers checkpointed", half=True, checkpointed=(0, 1, 2, 3))


def small(label: str = "small", *, layer: str = "a", operator: str = "aten::mm", phase: str = "forward") -> StepProfile:
    """Four points; 100 bytes of parameters, at most 30 of activations."""
    write = Writer()
    write.live["parameter"] = 100
    write.point(phase, layer, operator, activation=10)
    write.point(phase, layer, operator, activation=20)
    write.point("backward", layer, operator, activation=-30, gradient=5)
    write.point("optimizer", "", "", gradient=-5)
    return write.profile(label)


def trace(figure: go.Figure, profile: int, part: str) -> Any:
    [found] = [one for one in figure.data if one.meta == {"profile": profile, "part": part}]
    return found


def parts(figure: go.Figure) -> list[tuple[int, str]]:
    return [(one.meta["profile"], one.meta["part"]) for one in figure.data]


def note(figure: go.Figure, name: str) -> Any:
    [found] = [one for one in figure.layout.annotations if one.name == name]
    return found


def shapes(figure: go.Figure, name: str) -> list[Any]:
    return [one for one in figure.layout.shapes if one.name.startswith(name)]


# ---- one step ----


def test_areas_are_the_bytes_by_kind_and_only_kinds_that_there_are() -> None:
    figure = mountain_figure([small()])
    assert parts(figure) == [(0, "parameter"), (0, "gradient"), (0, "activation"), (0, "total")]
    assert list(trace(figure, 0, "parameter").y) == [100] * 5  # the last value holds until the end of the step
    assert list(trace(figure, 0, "activation").y) == [10, 30, 0, 0, 0]
    assert list(trace(figure, 0, "gradient").y) == [0, 0, 5, 0, 0]
    assert list(trace(figure, 0, "total").y) == [110, 130, 105, 100, 100]
    stacked = [one for one in figure.data if one.stackgroup]
    assert len(stacked) == 3
    assert {one.line.shape for one in figure.data} == {"hv"}
    for one in figure.data:
        np.testing.assert_array_equal(one.x, trace(figure, 0, "total").x)


def test_the_areas_add_up_to_the_total(lean: StepProfile) -> None:
    figure = mountain_figure([lean])
    areas = [np.asarray(one.y) for one in figure.data if one.stackgroup]
    np.testing.assert_array_equal(np.sum(areas, axis=0), trace(figure, 0, "total").y)


def test_the_peak_is_marked_where_it_is() -> None:
    figure = mountain_figure([small()])
    mark, total = note(figure, "peak 0"), trace(figure, 0, "total")
    assert (mark.x, mark.y, mark.showarrow) == (total.x[1], 130, True)
    assert mark.text == "<b>peak 130 B</b><br>in forward of a"
    assert figure.layout.title.text == "<b>peak 130 B in forward of a</b>"


def test_what_is_read_on_pointing_names_layer_operator_phase_time_and_bytes() -> None:
    figure = mountain_figure([small()])
    assert trace(figure, 0, "total").hovertext[1] == (
        "<b>small</b><br>a · aten::mm · forward · at 0.10 ms<br><b>total 130 B (130 bytes)</b>"
        "<br>activations 30 B (30 bytes)<br>parameters 100 B (100 bytes)"
    )
    assert trace(figure, 0, "total").hovertext[3].startswith("<b>small</b><br>outside of any layer · optimizer · at 0.20 ms<br>")


def test_phases_are_named_bands_and_recompute_a_strip_within_backward(lean: StepProfile) -> None:
    figure = mountain_figure([lean])
    assert list(figure.layout.xaxis.ticktext) == [
        "forward", "loss", "backward<br>with 4 recomputes", "optimizer", "<br>zero_grad",
    ]  # fmt: skip
    bands = shapes(figure, "phase")
    assert [band.x0 for band in bands[1:]] == pytest.approx([band.x1 for band in bands[:-1]])
    assert (bands[0].x0, bands[-1].x1) == (0, pytest.approx(WIDTH))
    strips = shapes(figure, "recompute")
    assert len(strips) == 4
    assert all(bands[2].x0 < strip.x0 < strip.x1 < bands[2].x1 for strip in strips)


def test_text_of_the_user_is_text() -> None:
    profile = small(EVIL, layer=EVIL, operator=EVIL, phase=EVIL)
    for figure in (mountain_figure([profile]), mountain_figure([profile, profile]), mountain_figure([profile], title=EVIL)):
        text = str(figure.to_plotly_json())
        assert "&lt;b>x&lt;/b> &amp; &#36;y&#36;" in text
        for harmful in ("<a", "<b>x", "$"):
            assert harmful not in text


def test_another_title_or_none() -> None:
    assert mountain_figure([small()], title="mine").layout.title.text == "<b>mine</b>"
    without = mountain_figure([small()], title="")
    assert without.layout.title.text is None
    assert without.layout.height < mountain_figure([small()]).layout.height


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_both_themes(lean: StepProfile, theme: Any) -> None:
    figure = mountain_figure([lean], theme=theme)
    assert figure.layout.paper_bgcolor == COLOURS[theme].background
    for kind in ("activation", "recompute", "parameter"):
        assert trace(figure, 0, kind).fillcolor == KIND_COLOURS[theme][kind]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_neighbours_in_the_stack_differ_in_lightness(theme: Any) -> None:
    usual = ("parameter", "gradient", "optimizer", "activation", "recompute", "temporary")
    lightness = [luminance(KIND_COLOURS[theme][kind]) for kind in usual]
    assert all((max(pair) + 0.05) / (min(pair) + 0.05) > 1.2 for pair in itertools.pairwise(lightness))
    assert set(KIND_COLOURS[theme]) == set(peaks.KINDS)


def test_no_button_sends_the_data_away(lean: StepProfile) -> None:
    assert "sendChartToCloud" in mountain_figure([lean]).layout.modebar.remove


# ---- two steps ----


def test_before_is_an_outline_behind_after(fp32: StepProfile, lean: StepProfile) -> None:
    figure = mountain_figure([fp32, lean])
    assert parts(figure)[0] == (0, "fill")
    assert parts(figure)[-3:] == [(1, "total"), (0, "halo"), (0, "outline")]
    assert {number for number, part in parts(figure) if part in peaks.KINDS} == {1}
    for number, part, profile in ((0, "outline", fp32), (1, "total", lean)):
        assert max(trace(figure, number, part).y) == profile.bytes_by_kind.sum(axis=1).max()
    assert trace(figure, 0, "outline").name == "before: fp32"


def test_each_phase_lies_over_the_same_phase(fp32: StepProfile, lean: StepProfile) -> None:
    figure = mountain_figure([fp32, lean], limit=10_000)
    bands = shapes(figure, "phase")
    for number, part, profile in ((0, "outline", fp32), (1, "total", lean)):
        x = np.asarray(trace(figure, number, part).x)[:-1]
        assert np.all(np.diff(x) > 0)
        for band, names in zip(
            bands, (("forward",), ("loss",), ("backward", "recompute"), ("optimizer",), ("zero_grad",)), strict=True
        ):
            points = [i for phase in profile.phases if phase.name in names for i in range(phase.start, phase.stop)]
            assert x[points[0]] == pytest.approx(band.x0)
            assert x[points[-1]] < band.x1


def test_the_difference_in_words(fp32: StepProfile, lean: StepProfile) -> None:
    sentence = mountain_sentence([fp32, lean])
    assert sentence == "peak 221.0 MB → 74.2 MB, 146.8 MB less (-66.4 %)"
    figure = mountain_figure([fp32, lean])
    assert figure.layout.title.text == f"<b>{sentence}</b>"
    assert note(figure, "difference").text == "<b>-66 %</b><br>146.8 MB<br>less"
    arrow = note(figure, "distance")
    assert (arrow.ay, arrow.y) == (221_000_000, 74_200_000)
    assert note(figure, "peak 0").text.startswith("<b>before: peak 221.0 MB</b><br>fp32<br>")
    assert note(figure, "peak 1").text.startswith("<b>after: peak 74.2 MB</b><br>fp16 + 4 layers checkpointed<br>")
    assert note(mountain_figure([lean, fp32]), "difference").text == "<b>+198 %</b><br>146.8 MB<br>more"


def test_steps_with_other_phases_can_be_compared() -> None:
    other = small()
    phases = (("forward", 0, 1), ("zero_grad", 1, 2), ("backward", 2, 4))
    accumulated = dataclasses.replace(other, phases=tuple(Phase(name=name, start=a, stop=b) for name, a, b in phases))
    bands, (one, two) = aligned([(4, other.phases), (4, accumulated.phases)])
    assert sorted(band.name for band in bands) == ["backward", "forward", "optimizer", "zero_grad"]
    starts = {band.name: band.start for band in bands}
    assert [one.x[0], one.x[2], one.x[3]] == [starts["forward"], starts["backward"], starts["optimizer"]]
    assert [two.x[0], two.x[1], two.x[2]] == [starts["forward"], starts["zero_grad"], starts["backward"]]
    mountain_figure([other, accumulated])


def test_recomputes_are_those_of_the_step_that_is_drawn_as_areas(fp32: StepProfile, lean: StepProfile) -> None:
    figure = mountain_figure([lean, fp32])
    assert shapes(figure, "recompute") == []
    assert "backward" in figure.layout.xaxis.ticktext


@pytest.mark.parametrize("count", [0, 3])
def test_one_or_two(count: int) -> None:
    with pytest.raises(ValueError, match=f"got {count} profiles, expected one, or two"):
        mountain_figure([small()] * count)


# ---- many points ----


@pytest.mark.parametrize("seed", range(3))
def test_long_steps_are_reduced_and_the_peak_stays(seed: int) -> None:
    print(f"seed {seed}")
    random = np.random.default_rng(seed)
    points = 100_000
    kinds = random.integers(0, 1000, (points, len(peaks.KINDS)))
    peak = int(random.integers(points))
    kinds[peak, 4] = 10**6
    cuts = [0, 30_000, 30_010, 90_000, points]
    names = ("forward", "loss", "backward", "optimizer")
    profile = dataclasses.replace(
        small(), bytes_by_kind=kinds, time_s=np.arange(points) / 1e6,
        layer_index=np.full(points, -1), operator_index=np.full(points, -1),
        phases=tuple(Phase(name=name, start=a, stop=b) for name, a, b in zip(names, cuts, cuts[1:], strict=False)),
    )  # fmt: skip
    figure = mountain_figure([profile])
    y = np.asarray(trace(figure, 0, "total").y)
    assert y.size <= MOST_POINTS + 2 * len(names) + 4
    assert y.max() == kinds[peak].sum() == note(figure, "peak 0").y
    assert y.min() == kinds.sum(axis=1).min()
    x = np.asarray(trace(figure, 0, "total").x)
    assert {band.x0 for band in shapes(figure, "phase")} <= set(x)


def test_kept_points_are_all_where_there_are_few() -> None:
    assert kept_points(np.arange(5), 8, set()).tolist() == [0, 1, 2, 3, 4]
    total = np.zeros(1000, int)
    total[777] = 5
    kept = kept_points(total, 20, {123}).tolist()
    assert {123, 777} <= set(kept)
    assert len(kept) <= 21
    assert kept == sorted(set(kept))


def test_a_step_of_very_many_batches_is_bounded() -> None:
    phases = [Phase(name=name, start=i, stop=i + 1) for i, name in enumerate(["forward", "recompute", "backward"] * 1000)]
    bands, [place] = aligned([(3000, phases)])
    assert bands == []
    assert len(place.edges) <= 4 * MOST_BANDS
    assert len(place.recomputes) <= MOST_BANDS
    assert np.all(np.diff(place.x) > 0)


@pytest.mark.parametrize("profiles", [1, 2])
def test_a_step_without_points_is_an_empty_picture(profiles: int) -> None:
    empty = dataclasses.replace(
        small(), bytes_by_kind=np.zeros((0, len(peaks.KINDS)), np.int64), time_s=np.zeros(0), layer_index=np.zeros(0, int),
        operator_index=np.zeros(0, int), phases=(),
    )  # fmt: skip
    figure = mountain_figure([empty, small()][:profiles])
    assert max(trace(figure, 0, "total" if profiles == 1 else "outline").y) == 0
    assert math.isnan(peaks.recompute_s(empty)) or peaks.recompute_s(empty) == 0


# ---- words ----


@pytest.mark.parametrize("peak_at", [2, 5, 10, 20, 30, 40])
@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("width_px", [640, 760, 1200])
def test_no_note_covers_the_ticks_of_the_axis(peak_at: int, other: bool, width_px: int) -> None:
    def step(label: str, size: int) -> StepProfile:
        write = Writer()
        for at in range(80):
            more = {"activation": size} if at == peak_at else {"activation": -size} if at == peak_at + 1 else {}
            write.point("forward" if at < 50 else "backward", "encoder.layers.11.attention", "aten::mm", temporary=0, **more)
        return write.profile(label)

    figure = mountain_figure([step("fp32 (step 123)", 15_000_000), *([step("bf16", 7_000_000)] if other else [])])
    plot_px = width_px - figure.layout.margin.l - figure.layout.margin.r
    low, high = figure.layout.xaxis.range
    for note in (one for one in figure.layout.annotations if one.name.startswith("peak")):
        x_px = (note.x - low) / (high - low) * plot_px + note.ax
        widest = max(label_px(re.sub("<.*?>", "", line), bold="<b>" in line) for line in note.text.split("<br>"))
        assert note.xanchor == "left" or x_px - widest >= 0, note.text


def test_kinds_are_those_of_the_core() -> None:
    assert peaks.KINDS == core_profile.KINDS


def test_how_long_recompute_took(lean: StepProfile, fp32: StepProfile) -> None:
    stretches = [phase for phase in lean.phases if phase.name == "recompute"]
    points = sum(phase.stop - phase.start for phase in stretches)
    assert peaks.recompute_s(lean) == pytest.approx(points * 50e-6)
    assert peaks.recompute_s(fp32) == 0


def luminance(colour: str) -> float:
    """Relative luminance as in WCAG 2.2."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


# ---- what torch's allocator holds ----


def test_the_allocator_is_three_lines_and_two_bands_over_the_step(fp32: StepProfile) -> None:
    step = with_allocator(fp32)
    [readings] = step.allocator
    figure = mountain_figure([step])
    assert [part for _, part in parts(figure)][-3:] == ["allocated", "inactive", "reserved"]
    allocated, inactive, reserved = (trace(figure, 0, part) for part in ("allocated", "inactive", "reserved"))
    np.testing.assert_array_equal(allocated.y[:-1], readings.allocated_bytes)
    np.testing.assert_array_equal(inactive.y[:-1], readings.allocated_bytes + readings.inactive_bytes)
    np.testing.assert_array_equal(reserved.y[:-1], readings.reserved_bytes)
    x = aligned([(len(fp32.time_s), fp32.phases)])[1][0].x
    np.testing.assert_array_equal(allocated.x, [*x[readings.point], WIDTH])
    assert (allocated.fill, inactive.fill, reserved.fill) == (None, "tonexty", "tonexty")
    assert len({one.line.dash for one in (allocated, inactive, reserved)}) == 3  # told apart without colours
    assert inactive.fillpattern.shape == "/"
    assert figure.layout.yaxis.range[1] > readings.reserved_bytes.max()
    assert [name in reserved.hovertext[0] for name in ("reserved", "inactive", "allocated")] == [True] * 3


def test_of_two_steps_the_allocator_of_the_second_is_drawn(fp32: StepProfile, lean: StepProfile) -> None:
    assert (1, "reserved") in parts(mountain_figure([with_allocator(fp32), with_allocator(lean)]))
    assert not {"reserved"} & {part for _, part in parts(mountain_figure([with_allocator(fp32), lean]))}


def test_several_devices_are_added_up_each_as_it_was_last_read() -> None:
    def readings(point: list[int], sizes: list[int]) -> Readings:
        array = np.array(sizes, np.int64)
        places = np.array(point, np.int32)
        return Readings(point=places, allocated_bytes=array, inactive_bytes=array * 0, reserved_bytes=array * 2)

    points, (allocated, inactive, reserved) = together([readings([0, 4, 9], [1, 2, 3]), readings([2, 4], [10, 20])])
    assert points.tolist() == [0, 2, 4, 9]
    assert allocated.tolist() == [11, 11, 22, 23]
    assert reserved.tolist() == [22, 22, 44, 46]
    assert inactive.tolist() == [0, 0, 0, 0]


def test_a_real_reading_has_what_is_drawn() -> None:
    names = {field.name for field in dataclasses.fields(core_profile.AllocatorReadings)}
    assert {field.name for field in dataclasses.fields(Readings)} - {"text"} == names
    assert isinstance(core_profile.AllocatorReadings.text, property)


# ---- out of memory ----

BUDGET = Ceiling(size_bytes=150e6, name="budget")


def died(step: StepProfile, requested_bytes: float = 8e6, ceiling: Ceiling | None = BUDGET) -> dict[str, Death]:
    return {step.label: Death(requested_bytes=requested_bytes, ceiling=ceiling)}


def test_a_step_that_ran_out_of_memory_ends_there_with_what_was_requested_above_it() -> None:
    step = dead_step().profile
    figure = mountain_figure([step], ceiling=BUDGET, deaths=died(step))
    total = trace(figure, 0, "total")
    used = int(step.bytes_by_kind[-1].sum())
    assert total.x[-1] == total.x[-2] < WIDTH
    [requested] = shapes(figure, "requested")
    assert (requested.x0, requested.x1) == (total.x[-1], total.x[-1])
    assert (requested.y0, requested.y1) == (used, used + 8e6)
    assert note(figure, "death 0").text == (
        "<b>out of memory here</b><br>8.0 MB requested, budget 150.0 MB<br>in forward of layers.3.mlp"
    )
    assert not [one for one in figure.layout.annotations if one.name.startswith("peak")]
    [line] = shapes(figure, "ceiling")
    assert (line.y0, line.y1) == (150e6, 150e6)
    assert note(figure, "ceiling").text == "<b>budget 150.0 MB</b>"
    assert figure.layout.yaxis.range[1] > used + 8e6
    assert mountain_sentence([step], died(step)) == (
        "out of memory in forward of layers.3.mlp: 143.0 MB in use and 8.0 MB more requested, budget 150.0 MB"
    )


def test_what_is_not_known_of_a_death_is_not_said() -> None:
    step = dead_step().profile
    deaths = died(step, math.nan, None)
    figure = mountain_figure([step], deaths=deaths)
    assert shapes(figure, "requested") == []
    assert note(figure, "death 0").text == "<b>out of memory here</b><br>in forward of layers.3.mlp"
    assert mountain_sentence([step], deaths) == "out of memory in forward of layers.3.mlp: 143.0 MB in use"


def test_before_and_after_a_death(lean: StepProfile) -> None:
    step = dead_step().profile
    figure = mountain_figure([step, lean], ceiling=BUDGET, deaths=died(step))
    assert {(0, "outline"), (1, "total")} <= set(parts(figure))
    assert note(figure, "death 0").text.startswith("<b>before: out of memory here</b>")
    assert trace(figure, 0, "outline").name == "before"  # a long name would push the legend apart
    assert note(figure, "peak 1").text.startswith("<b>after: peak")
    assert shapes(figure, "height") == []  # not two peaks: there is no distance
    peak = peaks.peak_of(lean)[1]
    left = peaks.memory_text(150e6 - peak)
    assert mountain_sentence([step, lean], died(step), BUDGET) == (
        f"out of memory at 151.0 MB → peak {peaks.memory_text(peak)}: it fits, {left} to spare (budget 150.0 MB)"
    )
    assert mountain_sentence([lean, step], died(step), BUDGET) == (
        f"peak {peaks.memory_text(peak)} → out of memory at 151.0 MB: it does not fit (budget 150.0 MB)"
    )


def test_a_step_after_a_death_is_held_against_what_is_in_force_now(lean: StepProfile) -> None:
    step = dead_step().profile
    then = died(step, ceiling=Ceiling(size_bytes=150e6, name="budget then"))
    peak = "peak 74.2 MB"
    assert mountain_sentence([step, lean], then) == (
        f"out of memory at 151.0 MB (budget then 150.0 MB) → {peak}; no budget is set now"
    )
    for size_bytes, verdict in ((80e6, "it fits, 5.8 MB to spare (budget 80.0 MB)"), (70e6, "it does not fit (budget 70.0 MB)")):
        now = Ceiling(size_bytes=size_bytes, name="budget")
        sentence = mountain_sentence([step, lean], then, now)
        assert sentence == f"out of memory at 151.0 MB (budget then 150.0 MB) → {peak}: {verdict}"
        assert mountain_figure([step, lean], deaths=then, ceiling=now).layout.title.text == f"<b>{sentence}</b>"
    assert mountain_sentence([lean, step], then, BUDGET).endswith(": it does not fit (budget then 150.0 MB)")


def test_more_that_was_held_earlier_in_a_step_that_died_is_explained() -> None:
    write = Writer()
    write.live |= {"parameter": 30, "gradient": 30}
    write.point("zero_grad", "", "", temporary=0)
    write.point("zero_grad", "", "", gradient=-30)
    write.point("forward", "a", "aten::mm", activation=0)
    step = write.profile("dead")
    death = Death(requested_bytes=20, ceiling=Ceiling(size_bytes=42, name="budget"))
    assert death.above_before(step).startswith("earlier in the step 60 B were held, more than the budget of 42 B: ")
    assert (death.asked_bytes(step), death.needed_bytes(step)) == (50, 60)
    assert mountain_sentence([step, small()], {"dead": death}).startswith("out of memory at 50 B (budget 42 B) → ")
    assert Death(requested_bytes=20, ceiling=Ceiling(size_bytes=60, name="budget")).above_before(step) == ""
    assert Death(requested_bytes=20).above_before(step) == ""


def test_a_low_peak_far_to_the_right_is_noted_on_its_left_and_not_on_the_note_of_the_other() -> None:
    def step(label: str, backward: int) -> StepProfile:
        write = Writer()
        write.live["parameter"] = 50
        for _ in range(40):
            write.point("forward", "a", "aten::mm", activation=1)
        for _ in range(40):
            write.point("backward", "a", "aten::mm", activation=-1, gradient=backward)
        return write.profile(label)

    figure = mountain_figure([step("high", 1), step("low", 2)])
    before, after = note(figure, "peak 0"), note(figure, "peak 1")
    assert (after.y, before.y) == (130, 90)
    turned = mountain_figure([step("low", 2), small()])
    right = note(turned, "peak 0")
    assert right.x > 80
    assert (right.xanchor, right.ax < 0) == ("right", True)
    same_side = mountain_figure([dataclasses.replace(step("low", 2), label="x"), step("low", 2)])
    one, other = note(same_side, "peak 0"), note(same_side, "peak 1")
    assert (one.xanchor, other.xanchor) == ("right", "right")
    assert one.ay < 0 < other.ay or other.ay < 0 < one.ay


def test_the_name_of_a_ceiling_is_legible_on_any_area_and_stays_when_one_zooms(lean: StepProfile) -> None:
    for theme in ("light", "dark"):
        name = note(mountain_figure([lean], ceiling=Ceiling(size_bytes=5e6, name="budget"), theme=theme), "ceiling")
        assert (name.bgcolor, name.xref) == (COLOURS[theme].background, "paper")


def test_a_ceiling_far_above_is_named_and_does_not_press_the_mountain_flat(fp32: StepProfile) -> None:
    far = Ceiling(size_bytes=141e9, name="memory of <cuda:0>")
    figure = mountain_figure([fp32], ceiling=far)
    assert shapes(figure, "ceiling") == []
    assert note(figure, "ceiling").text == "memory of &lt;cuda:0> 141.0 GB, far above ↑"
    assert figure.layout.yaxis.range == mountain_figure([fp32]).layout.yaxis.range


def test_a_dead_step_without_points_is_drawn() -> None:
    step = dataclasses.replace(
        small("dead"), phases=(), time_s=np.zeros(0), layer_index=np.zeros(0, np.int32), operator_index=np.zeros(0, np.int32),
        bytes_by_kind=np.zeros((0, 8), np.int64),
    )  # fmt: skip
    figure = mountain_figure([step], ceiling=BUDGET, deaths=died(step))
    assert note(figure, "death 0").text == "<b>out of memory here</b><br>8.0 MB requested, budget 150.0 MB"


def test_a_point_of_the_backward_pass_within_a_recompute_does_not_make_two_of_it() -> None:
    names = ("backward", "recompute", "backward", "recompute", "backward", "recompute", "backward")
    starts = (0, 5, 8, 9, 12, 14, 16)
    stops = (*starts[1:], 20)
    phases = [Phase(name=name, start=start, stop=stop) for name, start, stop in zip(names, starts, stops, strict=True)]
    assert recomputes_of(phases) == [(5, 12), (14, 16)]
    [bands], [positions] = (aligned([(20, phases)])[i] for i in range(2))
    assert bands.recomputes == 2
    assert positions.recomputes == ((25.0, 60.0), (70.0, 80.0))
