"""The dtype panel: what it shows of a map, and what it asks for."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from amp_widgets.core.settings import Settings
from amp_widgets.widgets.dtype_panel import DtypePanel, DtypeState
from amp_widgets.widgets.state import DashboardState
from tests.widgets.gpt_dtypes import gpt_map, layers_of, linear
from tests.widgets.test_page import View, one_page, page  # noqa: F401  # fixtures

EVIL = "<img src=x onerror='window.harmed = 1'>"


@pytest.fixture
def asked() -> list[Any]:
    return []


def dashboard(pending: dict[str, Any] | None = None, **settings: Any) -> DashboardState:
    given = Settings(**{"autocast": "bf16", **settings})
    return DashboardState(settings=given, layers=layers_of(gpt_map()), pending=pending)


@pytest.fixture
def panel(asked: list[Any], messages: Any) -> DtypePanel:
    return DtypePanel(
        lambda *command: asked.append(command),
        lambda **changes: asked.append(changes),
        DtypeState(map=gpt_map()),
        dashboard(fp32_layers=("norm",)),
    )


def say(panel: DtypePanel, **message: Any) -> None:
    panel._handle_custom_msg({**message, "id": "1"}, [])


def layers(panel: DtypePanel, positions: list[int]) -> list[str]:
    return [panel.layers[i][0] for i in positions]


# ---- Python's side ----


def test_a_row_has_what_is_known_of_an_operator(panel: DtypePanel) -> None:
    rows = {(row[0], row[1]): row[2:] for row in panel.rows}
    assert rows["blocks.1.attention", "linear"] == [
        1, "fp32", "bf16", "bf16", "bf16", 3, 164_000, 3, 328_000, 1, 3, 164_000, "lower-precision",
        "linear is on CPU's lower-precision list", "lower",
    ]  # fmt: skip
    assert rows["blocks.1.attention", "rotate in Rotary"][:5] == [2, "bf16+fp32", "bf16+fp32", "fp32", ""]
    assert panel.sentence == "autocast bf16 on cpu: 128 casts a step, which write 9.46 MB, and 18 more in recomputes"
    assert panel.predicts
    panel.show(DtypeState(map=gpt_map(device_type="cuda")))
    assert not panel.predicts


def test_the_tree_has_the_formats_of_a_layer_and_of_those_inside(panel: DtypePanel) -> None:
    tree = {row[0]: row[1:] for row in panel.layers}
    assert tree["blocks.0.mlp"] == ["Sequential", ["bf16"], ""]
    assert tree["blocks.0"] == ["Block", ["fp32", "bf16"], ""]
    assert tree["blocks"][2] == "it only holds other layers"
    assert tree["loss_fn"] == ["", ["fp32"], "it is no layer that can be switched"]
    assert [*tree][:2] == ["token", "blocks"]


def test_ticks_are_what_is_in_force_and_what_waits(panel: DtypePanel) -> None:
    assert layers(panel, panel.in_force) == layers(panel, panel.requested) == ["norm"]
    panel.render(dashboard(fp32_layers=("norm",), pending={"fp32_layers": ["head", "norm"]}))
    assert (layers(panel, panel.in_force), layers(panel, panel.requested)) == (["norm"], ["norm", "head"])


def test_a_tick_asks_for_the_whole_set_in_the_models_order(panel: DtypePanel, asked: list[Any]) -> None:
    say(panel, layer="blocks.2.norm", on=True)
    say(panel, layer="norm", on=True)  # it is already
    say(panel, layer="norm", on=False)
    assert asked == [{"fp32_layers": ("blocks.2.norm", "norm")}, {"fp32_layers": ()}]


def test_a_map_is_asked_for_once(panel: DtypePanel, asked: list[Any]) -> None:
    say(panel, map=True)
    panel.show(DtypeState(map=gpt_map(), pending=True))
    say(panel, map=True)
    panel.show(DtypeState(map=gpt_map(), available=False))
    say(panel, map=True)
    assert asked == [("dtype_map",)]


def test_what_is_shown_already_is_not_sent_again(panel: DtypePanel, messages: Any) -> None:
    state, view = DtypeState(map=gpt_map(), why_not="a step is in progress"), dashboard(fp32_layers=("norm",))
    panel.show(state)
    messages.clear()
    panel.show(dataclasses.replace(state))
    panel.render(dataclasses.replace(view))
    panel.show(dataclasses.replace(state, map=gpt_map()))  # another object, the same to see
    assert messages.sent == []
    panel.show(dataclasses.replace(state, pending=True))
    assert [data["state"] for _, data in messages.sent] == [{"pending": True}]


def test_what_has_changed_since_is_said(panel: DtypePanel) -> None:
    assert panel.stale == "Since this map was taken: other layers are kept in FP32"
    panel.render(dashboard(autocast="fp16", checkpointed=("head",)))
    assert panel.stale == "Since this map was taken: autocast is fp16, other layers are checkpointed"
    panel.render(dashboard())
    assert panel.stale == ""


def test_the_filter_is_that_of_the_layer_table(panel: DtypePanel) -> None:
    say(panel, filter="blocks.*.mlp.** head")
    assert panel.matching is not None
    assert {panel.rows[i][0] for i in panel.matching} == {f"blocks.{i}.mlp.{j}" for i in range(6) for j in range(3)} | {"head"}
    say(panel, filter=" ")
    assert panel.matching is None


def test_closed_it_asks_nobody(panel: DtypePanel, asked: list[Any]) -> None:
    panel.close()
    panel._received(panel, {"map": True}, [])
    panel._received(panel, {"layer": "head", "on": True}, [])
    assert asked == []


def test_without_a_map_there_is_the_tree(asked: list[Any]) -> None:
    panel = DtypePanel(asked.append, asked.append, dashboard=dashboard())
    assert panel.rows == []
    assert len(panel.layers) == len(layers_of(gpt_map()))
    assert repr(panel) == "<amp_widgets dtype panel: no map taken yet>"


# ---- the page's side ----


def test_a_click_sorts_a_tick_asks_and_markup_stays_text(
    page: Any,  # noqa: F811
    panel: DtypePanel,
    asked: list[Any],
    messages: Any,
) -> None:
    evil = linear(EVIL, why=EVIL, casts=7, cast_bytes=999_000_000)
    panel.show(DtypeState(map=gpt_map(rows=(*gpt_map().rows, evil), types={**gpt_map().types, EVIL: EVIL})))
    view = View(page, panel, messages)
    rows = page.locator("tbody tr:not([aria-hidden])")
    assert rows.first.get_attribute("data-format") == "fp32"
    casts = page.get_by_role("columnheader", name="casts").first
    casts.get_by_role("button").click()
    assert casts.get_attribute("aria-sort") == "descending"
    assert rows.first.locator("th").inner_text() == EVIL
    assert page.evaluate("window.harmed") is None
    box = page.get_by_role("checkbox", name="keep blocks.0.norm in FP32")
    box.check()
    assert page.locator("li.ampw-changed").count() == 1
    view.sync()
    assert asked == [{"fp32_layers": ("blocks.0.norm", "norm")}]
    assert not box.is_checked()  # nothing waits, as nobody took the request


def test_only_rows_in_sight_are_in_the_page(page: Any, asked: list[Any], messages: Any) -> None:  # noqa: F811
    panel = DtypePanel(asked.append, asked.append, DtypeState(map=gpt_map(300)))
    assert len(panel.rows) > 2_400
    View(page, panel, messages)
    rows, tree = page.locator("tbody tr:not([aria-hidden])"), page.locator("li:not([aria-hidden])")
    assert rows.count() < 60
    assert tree.count() < 60
    page.locator(".ampw-half-table .ampw-scroll").evaluate("view => { view.scrollTop = 1e6; }")
    page.locator("tbody th", has_text="loss_fn").wait_for()
    assert rows.count() < 60
    page.locator(".ampw-half-tree .ampw-scroll").evaluate("view => { view.scrollTop = 1e6; }")
    page.get_by_role("checkbox", name="keep head in FP32").wait_for()
