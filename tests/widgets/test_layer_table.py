from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import pytest

from amp_widgets.widgets.layer_table import NOT_KNOWN, LayerTable, matches
from amp_widgets.widgets.text import bytes_text, seconds_text
from tests.charts.gpt_step import LayerProfile
from tests.widgets.test_page import View, one_page, page  # noqa: F401  # fixtures

GPT = (
    LayerProfile(name="token", type="Embedding", parameter_bytes=98_304, activation_bytes=500, output_bytes=500, forward_s=2e-5),
    LayerProfile(name="blocks", type="ModuleList", parameter_bytes=6, calls=0, dtype=""),
    *(
        LayerProfile(
            name=f"blocks.{i}{part}", type=kind, parameter_bytes=1000 * (i + 1),
            activation_bytes=90_000 - 10_000 * i if kind == "Block" else 4_000,
            output_bytes=3_000, forward_s=1e-3 * (i + 1), backward_s=2e-3, dtype="mixed" if kind == "Block" else "float16",
        )
        for i in range(6)
        for part, kind in (("", "Block"), (".attention", "MultiheadAttention"), (".mlp", "Sequential"))
    ),
    LayerProfile(name="head", type="ScriptedHead", activation_bytes=4_000, output_bytes=7_000, forward_s=5e-4),
)  # fmt: skip


@pytest.fixture
def asked() -> list[Any]:
    return []


@pytest.fixture
def table(asked, state) -> LayerTable:
    return LayerTable(lambda **changes: asked.append(changes), state(checkpointed=("blocks.0", "blocks.3")), GPT)


def say(table: LayerTable, **message: Any) -> None:
    table._handle_custom_msg({**message, "id": "1"}, [])


def names(table: LayerTable, positions: list[int] | None) -> list[str]:
    return [table.rows[i][0] for i in positions or ()]


# ---- Python's side ----


def test_each_row_has_the_numbers_of_its_layer(table) -> None:
    rows = {row[0]: row[1:] for row in table.rows}
    assert list(rows) == [layer.name for layer in GPT]
    assert rows["blocks.1"] == ["Block", "mixed", False, "", 2000, 80_000, 3_000, 2e-3, 2e-3, 77_000, 2e-3]
    assert rows["token"] == ["Embedding", "float32", False, "", 98_304, 500, 500, 2e-5, None, 0, 2e-5]


def test_what_cannot_be_checkpointed_has_its_reason_and_no_price(table) -> None:
    rows = {row[0]: row for row in table.rows}
    assert rows["head"][4] == "a ScriptModule: its forward cannot be replaced"
    assert rows["blocks"][4] == "it only holds other layers"
    assert rows["head"][-2:] == rows["blocks"][-2:] == [None, None]


def test_what_a_step_that_died_did_not_get_to_was_not_measured(asked, state) -> None:
    reached = {"activation_bytes": 10, "output_bytes": 4, "forward_s": 0.5}
    profile = [
        LayerProfile(name="blocks", type="ModuleList", calls=0, activation_bytes=12, parameter_bytes=7),
        LayerProfile(name="blocks.0", **reached),
        LayerProfile(name="blocks.0.act", **(reached | {"activation_bytes": 0})),
        LayerProfile(name="blocks.1", activation_bytes=2, forward_s=0.0, parameter_bytes=5),
        LayerProfile(name="blocks.1.mlp", forward_s=0.0, parameter_bytes=5),
        LayerProfile(name="blocks.2", calls=0, parameter_bytes=5),
        LayerProfile(name="norm", forward_s=0.0),
    ]
    table = LayerTable(lambda **changes: asked.append(changes), state())
    unknown = [None] * 6
    table.show(profile, died_in=("forward", "blocks.1.mlp"))
    numbers = {row[0]: row[5:] for row in table.rows}
    assert numbers["blocks.0"] == [0, 10, 4, 0.5, None, 6, 0.5]
    assert numbers["blocks.0.act"] == [0, 0, 4, 0.5, None, 0, 0.5]  # measured, and none
    assert numbers["blocks.1"] == numbers["blocks.1.mlp"] == numbers["blocks.2"] == [5, *unknown]
    assert numbers["blocks"] == [7, *unknown]
    assert numbers["norm"] == [0, *unknown]
    died = [dataclasses.replace(layer, backward_s=1.0, forward_s=0.5) for layer in profile if layer.calls]
    table.show(died, died_in=("backward", "blocks.1.mlp"))
    assert [row[0] for row in table.rows if row[9] is None] == ["blocks.1", "blocks.1.mlp"]
    assert all(row[8] == 0.5 for row in table.rows)
    table.show(died, died_in=("optimizer", ""))
    assert all(row[9] == 1.0 for row in table.rows)


def test_a_layer_that_was_never_called_returned_nothing(asked, state) -> None:
    table = LayerTable(
        lambda **changes: asked.append(changes), state(), [LayerProfile(name="out_proj", calls=0, parameter_bytes=9)]
    )
    assert table.rows[0][5:] == [9, *[None] * 6]


def test_the_caption_is_sent_with_the_rows(messages, table) -> None:
    messages.clear()
    table.show(GPT[:3], caption="of step 3: fp32")
    [update] = messages.updates
    assert update["caption"] == "of step 3: fp32"
    table.show(GPT[:3], caption="of step 3: fp32")
    assert len(messages.updates) == 1


def test_a_checkpointed_layer_costs_its_recompute() -> None:
    layer = LayerProfile(name="a", activation_bytes=10, output_bytes=4, forward_s=1.0, recompute_s=1.25)
    assert (layer.saved_bytes, layer.cost_s) == (6, 1.0)
    layer = dataclasses.replace(layer, checkpointed=True)
    assert math.isnan(layer.saved_bytes)
    assert layer.cost_s == 1.25


def test_ticks_are_what_is_in_force_and_what_waits(table, state) -> None:
    assert names(table, table.in_force) == names(table, table.requested) == ["blocks.0", "blocks.3"]
    table.render(state(checkpointed=("blocks.0",), pending={"checkpointed": ("blocks.1",)}))
    assert (names(table, table.in_force), names(table, table.requested)) == (["blocks.0"], ["blocks.1"])


def test_a_tick_asks_for_the_whole_set_in_the_models_order(table, asked) -> None:
    say(table, layer="blocks.1", on=True)
    say(table, layer="blocks.3", on=False)
    say(table, layer="blocks.0", on=True)  # it is
    assert asked == [{"checkpointed": ("blocks.0", "blocks.1", "blocks.3")}, {"checkpointed": ("blocks.0",)}]


def test_a_tick_keeps_what_is_checkpointed_and_not_in_the_profile(asked, state) -> None:
    table = LayerTable(lambda **changes: asked.append(changes), state(checkpointed=("norm",)), GPT)
    say(table, layer="token", on=True)
    assert asked == [{"checkpointed": ("token", "norm")}]


def test_without_the_models_layers_nothing_can_be_asked_for(asked) -> None:
    table = LayerTable(lambda **changes: asked.append(changes), None, GPT)
    assert {row[4] for row in table.rows} == {NOT_KNOWN}
    say(table, layer="token", on=True)
    assert asked == []


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("blocks.*", [f"blocks.{i}" for i in range(6)]),
        ("**.mlp", [f"blocks.{i}.mlp" for i in range(6)]),
        ("blocks.[12].*, token", ["token", "blocks.1.attention", "blocks.1.mlp", "blocks.2.attention", "blocks.2.mlp"]),
        ("HEAD", ["head"]),
        ("<script>", []),
    ],
)
def test_the_filter(table, asked, pattern: str, expected: list[str]) -> None:
    say(table, filter=f" {pattern} ")
    assert (table.pattern, names(table, table.matching)) == (pattern, expected)
    say(table, filter=" ")
    assert (table.pattern, table.matching) == ("", None)
    assert asked == []


def test_globs_are_those_of_checkpointing() -> None:
    assert matches("blocks.0", "blocks.?")
    assert not matches("blocks.0.mlp", "blocks.*")
    assert matches("blocks.0.mlp", "blocks.**")
    assert not matches("xblocks.0", "blocks.*")


def test_the_filter_holds_for_the_next_profile(table) -> None:
    say(table, filter="**.mlp")
    table.show(GPT[:8])
    assert names(table, table.matching) == ["blocks.0.mlp", "blocks.1.mlp"]
    assert names(table, table.requested) == ["blocks.0"]


def test_one_message_a_change_and_none_without(state, messages, asked) -> None:
    table = LayerTable(lambda **changes: asked.append(changes), state(), GPT)
    messages.clear()
    table.render(state())  # equal layers, but other objects
    table.render(state(step=3, autocast="fp16"))
    table.show(GPT)
    table.show([dataclasses.replace(layer) for layer in GPT])
    assert messages.sent == []
    table.render(state(checkpointed=("token",)))
    assert messages.updates == [{"in_force": [0], "requested": [0]}]
    assert asked == []


def test_a_model_that_changes_is_shown_anew(table, state, layer) -> None:
    table.render(state(layers=(layer(name="head"),)))
    rows = {row[0]: row for row in table.rows}
    assert (rows["head"][4], rows["token"][4]) == ("", NOT_KNOWN)


def test_two_thousand_layers_are_quick(state, layer, messages, asked) -> None:
    many = [LayerProfile(name=f"blocks.{i // 10}.part{i % 10}", parameter_bytes=i, forward_s=1e-3) for i in range(2000)]
    shown = state(layers=tuple(layer(name=one.name) for one in many))
    table = LayerTable(lambda **changes: asked.append(changes), shown)
    start_s = time.perf_counter()
    table.show(many)
    say(table, filter="**.part3")
    took_s = time.perf_counter() - start_s
    assert len(table.matching) == 200
    assert len(str(table.rows)) < 250_000
    assert took_s < 1
    start_s = time.perf_counter()
    for _ in range(10):
        table.render(shown)
    assert time.perf_counter() - start_s < 0.1


WHOLE = LayerProfile(
    name="(model)", type="Net", parameter_bytes=7, activation_bytes=600_000, output_bytes=7_000, forward_s=1.0, whole=True
)


def test_the_model_itself_is_a_row_without_a_tick(asked, state) -> None:
    table = LayerTable(lambda **changes: asked.append(changes), state(checkpointed=("blocks.0",)), (WHOLE, *GPT))
    assert table.whole == 0
    assert table.rows[0] == ["(model)", "Net", "float32", False, "the model itself", 7, 600_000, 7_000, 1.0, None, None, None]
    assert names(table, table.in_force) == ["blocks.0"]
    for pattern, found in (("**", 22), ("*", 3), ("model", 1), ("(model)", 1), ("blocks.**", 19)):
        say(table, filter=pattern)
        assert len(table.matching) == found, pattern
    table.show(GPT)
    assert table.whole == -1


def test_a_layer_with_the_name_of_the_model_itself(asked, state, layer) -> None:
    named = LayerProfile(name="(model)", type="Linear")
    shown = state(layers=(layer(name="(model)"),), checkpointed=("(model)",))
    table = LayerTable(lambda **changes: asked.append(changes), shown, (WHOLE, named))
    assert [row[4] for row in table.rows] == ["the model itself", ""]
    assert table.in_force == [1]


# ---- the page's side ----


@pytest.fixture
def show(page, messages, asked, state):  # noqa: F811
    """Put a table into a page 900 pixels wide."""
    page.set_viewport_size({"width": 900, "height": 700})

    def put(profile: Any = GPT, shown: Any = None) -> View:
        table = LayerTable(lambda **changes: asked.append(changes), shown or state(checkpointed=("blocks.0",)), profile)
        return View(page, table, messages)

    yield put
    page.set_viewport_size({"width": 312, "height": 900})


def column(view: View, index: int) -> list[str]:
    return list(
        view.page.locator("tbody tr:not([aria-hidden])").evaluate_all(
            f"rows => rows.map(row => row.children[{index}].textContent)"
        )
    )


def sort(view: View, name: str) -> Any:
    header = view.page.get_by_role("columnheader", name=name, exact=True)
    header.get_by_role("button").click()
    return header


def test_numbers_are_written_as_elsewhere(show) -> None:
    values = [0, 999, 1000, 99_940, 99_960, 999_499, 999_500, 12_345_678, 5 * 10**12, 3 * 10**15]
    times = [0.0, 2e-5, 9.99e-4, 0.001, 0.01234, 0.9994, 0.9996, 2.5, 123.4, 4567.8]
    view = show([LayerProfile(name=f"l{i}", parameter_bytes=values[i], forward_s=times[i]) for i in range(10)])
    assert column(view, 3) == [bytes_text(value) for value in values]
    assert column(view, 6) == [seconds_text(value) for value in times]
    assert view.page.locator("tbody td[title='12,345,678 bytes']").count() == 1


def test_names_are_indented_by_depth_in_the_models_order(show) -> None:
    view = show()
    assert column(view, 1)[:5] == ["token", "blocks", "0", "attention", "mlp"]
    indents = view.page.locator("tbody .ampw-name").evaluate_all(
        "all => all.slice(0, 4).map(one => parseInt(one.style.paddingLeft))"
    )
    assert indents == [0, 0, 12, 24]
    assert view.page.get_by_role("columnheader", name="layer").get_attribute("aria-sort") == "ascending"


def test_a_click_on_a_heading_sorts_and_a_second_turns_round(show) -> None:
    view = show()
    header = sort(view, "held")
    assert column(view, 1)[:3] == ["blocks.0", "blocks.1", "blocks.2"]  # whole names: the tree is not in sight
    assert header.get_attribute("aria-sort") == "descending"
    assert view.page.locator("th[aria-sort=none]").count() == 9
    sort(view, "held")
    assert header.get_attribute("aria-sort") == "ascending"
    assert column(view, 4)[:2] == ["500 B", "4.00 kB"]
    assert column(view, 4)[-1] == "–"  # what only holds other layers, and nothing is known of
    sort(view, "backward")
    assert column(view, 7)[-3:] == ["–"] * 3  # what is not known comes last
    sort(view, "backward")
    assert column(view, 7)[-3:] == ["–"] * 3
    sort(view, "type")
    assert column(view, 2) == sorted(column(view, 2))


def test_sorting_and_ticking_with_the_keyboard(show, asked) -> None:
    view = show()
    view.page.get_by_role("button", name="output").focus()
    view.page.keyboard.press("Enter")
    assert view.page.get_by_role("columnheader", name="output").get_attribute("aria-sort") == "descending"
    sort(view, "layer")
    view.role("checkbox", "checkpoint blocks.1").focus()
    view.page.keyboard.press("ArrowDown")
    view.page.keyboard.press("ArrowDown")
    assert view.page.evaluate("document.activeElement.getAttribute('aria-label')") == "checkpoint blocks.1.mlp"
    view.page.keyboard.press("Space")
    view.sync()
    assert asked == [{"checkpointed": ("blocks.0", "blocks.1.mlp")}]


def test_a_tick_waits_until_it_is_in_force_or_falls_back(show, asked, state) -> None:
    view = show()
    box = view.role("checkbox", "checkpoint blocks.1")
    box.click()
    assert box.is_checked()
    assert view.page.get_by_text("waiting").is_visible()
    view.sync()
    assert not box.is_checked()  # the answer came, and nothing has changed
    view.render(state(checkpointed=("blocks.0", "blocks.1")))
    assert box.is_checked()
    assert not view.page.get_by_text("waiting").is_visible()


def test_what_cannot_be_checkpointed_is_disabled_with_the_reason(show) -> None:
    view = show()
    head = view.role("checkbox", "checkpoint head")
    assert head.is_disabled()
    assert head.get_attribute("title") == "a ScriptModule: its forward cannot be replaced"


def test_the_headings_of_times_say_which_they_are(show) -> None:
    view = show()
    for pass_ in ("forward", "backward"):
        title = view.page.get_by_role("button", name=pass_, exact=True).get_attribute("title")
        assert "in this step alone" in title
        assert "session.layer_profile()" in title
        assert "median" in title


def test_the_filter_in_the_page(show) -> None:
    view = show()
    field = view.page.get_by_role("textbox", name="Filter")
    field.fill("**.mlp")
    field.press("Enter")
    view.sync()
    assert column(view, 1) == [f"blocks.{i}.mlp" for i in range(6)]
    assert view.page.get_by_role("status").inner_text() == "6 of 21 layers"
    field.fill("nothing<b>")
    field.press("Enter")
    view.sync()
    assert view.page.get_by_text("No layer matches nothing<b>").is_visible()
    field.press("Escape")
    view.sync()
    assert len(column(view, 1)) == 21
    assert field.input_value() == ""


def test_of_two_thousand_layers_only_those_in_sight_are_in_the_page(show, state, layer) -> None:
    many = [LayerProfile(name=f"l{i}", parameter_bytes=i) for i in range(2000)]
    view = show(many, state(layers=tuple(layer(name=one.name) for one in many)))
    rows = view.page.locator("tbody tr:not([aria-hidden])")
    assert rows.count() < 60
    assert view.page.evaluate("window.tookMs") < 400
    scroll = view.page.locator(".ampw-scroll")
    assert scroll.evaluate("one => one.scrollHeight") == pytest.approx(2000 * 24, rel=0.01)
    scroll.evaluate("one => { one.scrollTop = 1000 * 24; }")
    view.page.wait_for_function(
        "() => [...document.querySelectorAll('tbody .ampw-name')].some(one => one.textContent === 'l1005')"
    )
    assert rows.count() < 60
    assert view.page.locator("tr[aria-rowindex='1002'] .ampw-name").inner_text() == "l1000"
    view.role("checkbox", "checkpoint l1005").focus()
    scroll.evaluate("one => { one.scrollTop = 0; }")
    view.page.wait_for_function("() => [...document.querySelectorAll('tbody .ampw-name')].some(one => one.textContent === 'l0')")
    assert view.page.evaluate("document.activeElement.className") == "ampw-scroll"  # the place of the keyboard is not lost
    sort(view, "parameter bytes")
    assert column(view, 1)[0] == "l1999"


def test_the_model_itself_stays_on_top(show) -> None:
    view = show((WHOLE, *GPT))
    first = view.page.locator("tbody tr:not([aria-hidden])").first
    assert column(view, 1)[:3] == ["(model)", "token", "blocks"]
    assert first.locator("input").count() == 0
    assert first.locator("td").first.get_attribute("title") == "the model itself"
    assert view.page.get_by_role("status").inner_text() == "21 layers"
    for heading in ("held", "held", "type", "layer", "layer"):
        sort(view, heading)
        assert column(view, 1)[0] == "(model)"
    assert column(view, 1)[1] == "head"  # turned round
    field = view.page.get_by_role("textbox", name="Filter")
    field.fill("**")
    field.press("Enter")
    view.sync()
    assert view.page.get_by_role("status").inner_text() == "21 of 21 layers"
    view.role("checkbox", "checkpoint token").focus()
    view.page.keyboard.press("ArrowUp")  # there is no box above


def test_markup_in_names_is_text(show, state, layer) -> None:
    evil = "<img src=x onerror='window.harmed = 1'>"
    view = show([LayerProfile(name=evil, type=evil, dtype=evil)], state(layers=(layer(name=evil, why_not=evil),)))
    assert column(view, 2) == [evil]
    assert view.page.locator("body img").count() == 0
    assert view.page.evaluate("window.harmed") is None


def test_locked_and_equal_state(show, messages, state) -> None:
    view = show()
    marked = "document.querySelector('tbody tr:not([aria-hidden])').kept = 1"
    view.page.evaluate(marked)
    view.render(state(checkpointed=("blocks.0",), step=4))
    view.control.lock()
    view.to_page()
    assert view.page.evaluate("document.querySelector('tbody tr:not([aria-hidden])').kept") == 1
    assert view.page.locator("input:enabled").count() == 0  # the filter, too: the names are matched by Python


def test_it_says_of_which_step_and_what_was_in_force_then(show, state) -> None:
    view = show([dataclasses.replace(GPT[0], checkpointed=True), *GPT[1:]])
    assert column(view, 8)[0] == "in force then"
    assert not view.page.locator(".ampw-caption").is_visible()
    view.control.show(GPT, caption="of step 12: <b>fp32</b>")
    view.to_page()
    assert view.page.locator(".ampw-caption").inner_text() == "of step 12: <b>fp32</b>"


def test_long_names_leave_room_for_the_last_column(show) -> None:
    long = tuple(dataclasses.replace(layer, name="a_layer_with_a_long_name_" * 3 + layer.name, type="Type" * 9) for layer in GPT)
    view = show(long)
    view.page.set_viewport_size({"width": 1130, "height": 700})
    scroll = view.page.locator(".ampw-scroll")
    assert scroll.evaluate("one => one.scrollWidth <= one.clientWidth")
    assert scroll.locator("tbody th").last.evaluate("one => one.offsetWidth") > 100


def test_other_numbers_keep_the_place_and_fill_it(show) -> None:
    many = tuple(LayerProfile(name=f"layers.{i}") for i in range(59))
    view = show(many)
    scroll = view.page.locator(".ampw-scroll")
    scroll.evaluate("one => { one.scrollTop = 24 * 24; }")
    view.page.wait_for_timeout(50)
    view.control.show(tuple(dataclasses.replace(layer, activation_bytes=7) for layer in many))
    view.to_page()
    assert scroll.evaluate("one => one.scrollTop") == 24 * 24
    filled = """one => { const box = one.getBoundingClientRect();
        const at = y => document.elementFromPoint(box.left + 60, box.top + y)?.closest('tr')?.getAttribute('aria-rowindex');
        return [40, box.height / 2, box.height - 20].map(at); }"""
    assert all(scroll.evaluate(filled)), scroll.evaluate(filled)
