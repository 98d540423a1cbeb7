from __future__ import annotations

import time
from typing import Any

import pytest

from amp_widgets.widgets.layers_control import LayersControl, repeated_blocks


@pytest.fixture
def asked() -> list[tuple[str, ...]]:
    return []


@pytest.fixture
def control(asked, state) -> LayersControl:
    return LayersControl(lambda *, checkpointed: asked.append(checkpointed), state(checkpointed=("blocks.0", "blocks.3")))


def say(control: LayersControl, **message: Any) -> None:
    control._handle_custom_msg({**message, "id": "1"}, [])


def named(control: LayersControl, positions: list[int]) -> list[str]:
    return [control.rows[i][0] for i in positions]


def test_each_row_has_name_type_parameters_and_why_not(control, state) -> None:
    rows = {row[0]: row[1:] for row in control.rows}
    assert len(rows) == len(state().layers)
    assert rows["blocks.0"] == ["Block", "198 k", ""]
    assert rows["head"] == ["ScriptedHead", "24.8 k", "a ScriptModule: its forward cannot be replaced"]
    assert rows["blocks"] == ["ModuleList", "1.19 M", "it only holds other layers"]
    assert control.summary == "2 of 47"


def test_shows_what_is_in_force(control) -> None:
    assert named(control, control.in_force) == ["blocks.0", "blocks.3"]
    assert control.requested == control.in_force


def test_what_waits_is_shown_beside_what_is_in_force_and_a_rejection_falls_back(control, state, messages) -> None:
    control.render(state(checkpointed=("blocks.0",), pending={"checkpointed": ("blocks.1", "norm")}))
    assert (named(control, control.in_force), named(control, control.requested)) == (["blocks.0"], ["blocks.1", "norm"])
    control.render(state(checkpointed=("blocks.0",), last_rejection="no"))
    assert control.requested == control.in_force


def test_a_tick_asks_for_the_whole_set_in_the_models_order(control, asked) -> None:
    say(control, layer="blocks.1", on=True)
    say(control, layer="blocks.3", on=False)
    assert asked == [("blocks.0", "blocks.1", "blocks.3"), ("blocks.0",)]


def test_a_tick_adds_to_what_waits(control, asked, state) -> None:
    control.render(state(pending={"checkpointed": ("norm",)}))
    say(control, layer="token", on=True)
    assert asked == [("token", "norm")]


def test_parent_and_child_may_both_be_ticked(control, asked) -> None:
    say(control, layer="blocks.0.mlp", on=True)
    assert asked == [("blocks.0", "blocks.0.mlp", "blocks.3")]


def test_the_choices(control, asked, state) -> None:
    for choice in ("all", "none", "blocks", "every_second"):
        say(control, choose=choice)
    possible = tuple(layer.name for layer in state().layers if layer.why_not is None and not layer.structural)
    assert asked == [possible, (), tuple(f"blocks.{i}" for i in range(6)), ("blocks.0", "blocks.2", "blocks.4")]
    assert control.blocks == "6 × Block: blocks.0 to blocks.5"


def test_a_choice_that_is_so_already_is_not_asked_for(asked, state) -> None:
    control = LayersControl(lambda *, checkpointed: asked.append(checkpointed), state())
    say(control, choose="none")
    assert asked == []


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [("blocks.*", ("blocks.*",)), ("  token, **.mlp  norm ", ("token", "**.mlp", "norm")), ("<script>", ("<script>",))],
)
def test_a_pattern_is_passed_on_for_the_session_to_resolve(control, asked, pattern: str, expected: tuple[str, ...]) -> None:
    say(control, pattern=pattern)
    assert asked == [expected]


def test_an_empty_pattern_asks_nothing(control, asked) -> None:
    say(control, pattern="  ,")
    assert asked == []


def test_names_with_markup_travel_as_they_are(state, layer, asked) -> None:
    name = "<script>alert(1)</script>"
    layers = (layer(name=name, type="<b>", why_not="<img src=x>"),)
    control = LayersControl(lambda *, checkpointed: asked.append(checkpointed), state(layers=layers))
    assert control.rows == [[name, "<b>", "0", "<img src=x>"]]  # as data; the page makes text of it (test_page.py)


def test_one_message_a_change_and_none_without(state, messages, asked) -> None:
    control = LayersControl(lambda *, checkpointed: asked.append(checkpointed), state())
    messages.clear()
    control.render(state())  # equal layers, but other objects
    control.render(state(step=3, autocast="fp16"))
    assert messages.sent == []
    control.render(state(checkpointed=("norm",)))
    assert messages.updates == [{"in_force": [45], "requested": [45], "summary": "1 of 47"}]
    assert asked == []


def test_a_model_that_changes_is_shown_anew(state, layer, messages, asked) -> None:
    control = LayersControl(lambda *, checkpointed: asked.append(checkpointed), state())
    messages.clear()
    control.render(state(layers=(layer(name="a"), layer(name="b")), checkpointed=("b",)))
    [update] = messages.updates
    assert (update["rows"], update["in_force"]) == ([["a", "Linear", "0", ""], ["b", "Linear", "0", ""]], [1])


def test_a_thousand_layers_are_one_small_widget_made_quickly(state, layer, messages, asked) -> None:
    layers = tuple(layer(name=f"blocks.{i // 10}.part{i % 10}", type="Linear", parameters=1000) for i in range(1000))
    shown = state(layers=layers)
    start_s = time.perf_counter()
    control = LayersControl(lambda *, checkpointed: asked.append(checkpointed), shown)
    control.render(state(layers=layers, checkpointed=tuple(one.name for one in layers[::2])))
    took_s = time.perf_counter() - start_s
    opened = [data for kind, data in messages.sent if kind == "comm_open"]
    assert len(opened) == 2  # itself and its layout
    assert len(str(opened[1]["state"]["rows"])) < 60_000
    [update] = messages.updates
    assert len(str(update)) < 8_000
    assert took_s < 0.3


# ---- what the repeated blocks are ----


def layers_of(layer, *rows: tuple[str, str, int], why_not: dict[str, str] | None = None):
    return tuple(layer(name=name, type=kind, parameters=count, why_not=(why_not or {}).get(name)) for name, kind, count in rows)


def test_blocks_of_a_resnet_are_its_basic_blocks(layer) -> None:
    rows = [("conv1", "Conv2d", 9)]
    for stage in (1, 2):
        rows.append((f"layer{stage}", "Sequential", 200))
        for i in (0, 1):
            rows += [(f"layer{stage}.{i}", "BasicBlock", 100), (f"layer{stage}.{i}.conv1", "Conv2d", 50)]
    assert repeated_blocks(layers_of(layer, *rows)) == ("layer1.0", "layer1.1", "layer2.0", "layer2.1")


def test_blocks_with_numbered_names(layer) -> None:
    rows = [
        ("block1", "Block", 9),
        ("block1.conv", "Conv2d", 9),
        ("block2", "Block", 9),
        ("block2.conv", "Conv2d", 9),
        ("head", "Linear", 50),
    ]
    assert repeated_blocks(layers_of(layer, *rows)) == ("block1", "block2")


def test_of_leaves_the_ones_with_the_most_parameters(layer) -> None:
    rows = [("0", "Conv2d", 90), ("1", "ReLU", 0), ("2", "Conv2d", 900), ("3", "ReLU", 0), ("4", "Linear", 10)]
    assert repeated_blocks(layers_of(layer, *rows)) == ("0", "2")


def test_blocks_within_blocks_are_left_out(layer) -> None:
    rows = [
        ("0", "Block", 9),
        ("0.0", "Block", 4),
        ("0.0.0", "Linear", 4),
        ("1", "Block", 9),
        ("1.0", "Block", 4),
        ("1.0.0", "Linear", 4),
    ]
    assert repeated_blocks(layers_of(layer, *rows)) == ("0", "1")


def test_blocks_that_cannot_be_checkpointed_are_none(layer) -> None:
    rows = [("0", "Block", 9), ("1", "Block", 9), ("norm", "LayerNorm", 2)]
    assert repeated_blocks(layers_of(layer, *rows, why_not={"0": "no", "1": "no"})) == ()
    assert repeated_blocks(layers_of(layer, ("norm", "LayerNorm", 2))) == ()
    assert repeated_blocks(()) == ()
