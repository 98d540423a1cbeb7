"""The page's side of the controls, in a real browser without Jupyter: the real Python control talks with the real JavaScript."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from amp_widgets.charts.page_scripts import page_style as chart_style
from amp_widgets.core.autocast import Support
from amp_widgets.widgets.autocast_control import AutocastControl
from amp_widgets.widgets.control import Control, page_style
from amp_widgets.widgets.layers_control import LayersControl
from amp_widgets.widgets.run_control import RunControl
from amp_widgets.widgets.scaler_control import ScalerControl
from amp_widgets.widgets.status_line import StatusLine

sync_api = pytest.importorskip("playwright.sync_api")

ENABLED = "input:enabled, button:enabled:not(.ampw-twisty, [aria-disabled=true])"

# What anywidget gives to a control's JavaScript, with the messages kept for the test.
HOST = """
window.mount = async (esm, css, state) => {
  const style = document.createElement("style");
  style.textContent = css;
  const el = document.createElement("div");
  document.body.replaceChildren(style, el);
  const listeners = {};
  const emit = (name, value) => { for (const listener of listeners[name] ?? []) listener(value); };
  window.sent = [];
  const model = {
    get: (name) => state[name],
    on: (name, listener) => { (listeners[name] ??= []).push(listener); },
    send: (message) => {
      if (window.gone) throw new Error("Cannot send");
      window.sent.push(message);
    },
  };
  window.update = (changes) => { Object.assign(state, changes); emit("change"); };
  window.emit = emit;
  window.gone = false;
  window.tell = (message) => emit("msg:custom", message);
  const url = URL.createObjectURL(new Blob([esm], { type: "text/javascript" }));
  const module = await import(url);
  const start = performance.now();
  window.remove = module.default.render({ model, el });
  el.getBoundingClientRect();
  window.tookMs = performance.now() - start;
};
"""


class View:
    """A control in the page; `sync` carries the messages to and fro."""

    def __init__(self, page: Any, control: Control, messages: Any) -> None:
        self.page = page
        self.control = control
        self.messages = messages
        state = {name: value for name, value in control.get_state().items() if not name.startswith("_") and name != "layout"}
        page.add_script_tag(content=HOST)
        page.evaluate("([esm, css, state]) => window.mount(esm, css, state)", [control._esm, control._css, state])
        messages.clear()

    def render(self, state: Any) -> None:
        self.control.render(state)
        self.to_page()

    def to_page(self) -> None:
        for _, data in self.messages.sent:
            if data.get("method") == "update":
                self.page.evaluate("(changes) => window.update(changes)", data["state"])
            elif data.get("method") == "custom":
                self.page.evaluate("(message) => window.tell(message)", data["content"])
        self.messages.clear()

    def sync(self) -> None:
        for message in self.page.evaluate("() => window.sent.splice(0)"):
            self.control._handle_custom_msg(message, [])
        self.to_page()

    def role(self, role: str, name: str) -> Any:
        return self.page.get_by_role(role, name=name, exact=True)


@pytest.fixture(scope="module")
def one_page(in_ci: bool) -> Iterator[tuple[Any, list[str]]]:
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        (pytest.fail if in_ci else pytest.skip)("there is no chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        with playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"]) as browser:
            page = browser.new_page(viewport={"width": 312, "height": 900})
            page.set_default_timeout(10_000)
            errors: list[str] = []
            page.on("pageerror", lambda error: errors.append(str(error)))
            yield page, errors


@pytest.fixture
def page(one_page) -> Iterator[Any]:
    """An empty page as wide as the column of controls; an error in its JavaScript fails the test."""
    page, errors = one_page
    page.goto("about:blank")
    errors.clear()
    yield page
    assert errors == []


@pytest.fixture
def asked() -> list[Any]:
    return []


@pytest.fixture
def show(page, messages, asked):
    """Put a control into the page."""

    def put(kind: type[Control], state: Any, request: Any = None) -> View:
        def ask(*command: str, **changes: Any) -> None:
            asked.append(command[0] if command else changes)

        return View(page, kind(request or ask, state), messages)

    return put


# ---- Windows' high contrast ----

SYSTEM = """name => {
  const one = document.createElement("i");
  one.style.cssText = `forced-color-adjust: none; color: ${name}`;
  document.body.append(one);
  const found = getComputedStyle(one).color;
  one.remove();
  return found;
}"""


@pytest.fixture
def forced(page: Any) -> Iterator[None]:
    page.emulate_media(forced_colors="active")
    yield
    page.emulate_media(forced_colors="none")


@pytest.mark.usefixtures("forced")
def test_what_is_chosen_in_force_off_or_focused_is_seen_in_the_systems_colours(show, state) -> None:
    support = {"fp32": Support(available=True, note=""), "bf16": Support(available=True, note="")}
    support["fp16"] = Support(available=False, note="not here")
    view = show(AutocastControl, dataclasses.replace(state(pending={"autocast": "bf16"}), support=support))
    highlight, text, gray = (view.page.evaluate(SYSTEM, name) for name in ("Highlight", "HighlightText", "GrayText"))
    fp32, fp16, bf16 = (view.page.locator(".ampw-segment").nth(i) for i in range(3))

    def computed(one: Any, name: str) -> str:
        return str(one.evaluate("(one, name) => getComputedStyle(one).getPropertyValue(name)", name))

    assert [computed(one, "background-color") == highlight for one in (fp32, fp16, bf16)] == [False, False, True]
    assert computed(bf16.locator("span"), "color") == text
    assert (computed(fp32, "border-bottom-width"), computed(fp32, "border-bottom-color")) == ("3px", highlight)
    assert computed(fp16.locator("span"), "color") == gray
    assert computed(fp16.locator("span"), "opacity") == "1"
    view.page.keyboard.press("Tab")
    assert (computed(bf16, "outline-style"), computed(bf16, "outline-color")) == ("solid", highlight)


CHOSEN = {
    "ampw-tabs-list": ("aria-selected=true", "aria-selected=false"),
    "ampw-follow": ("aria-pressed=true", "aria-pressed=false"),
    "ampw-formats": ("class=ampw-bit data-bit=1", "class=ampw-bit data-bit=0"),
    "amp-chart-bar": ("aria-pressed=true", "aria-pressed=false"),
}
"""Around two buttons → what the one that is chosen has, and the other."""


@pytest.mark.usefixtures("forced")
def test_what_is_chosen_stands_out_in_the_systems_colours_also_under_the_mouse(page) -> None:
    style = page_style("tab_bar", "format_lab") + chart_style()
    pairs = [
        f"<div class='{name}'><button {on}>on</button><button {off}>off</button></div>" for name, (on, off) in CHOSEN.items()
    ]
    page.set_content(f"<style>{style}</style><div class='ampw'>{''.join(pairs)}</div>")
    highlight = page.evaluate(SYSTEM, "Highlight")
    buttons = page.locator("button")
    assert buttons.count() == 8
    for i in range(8):
        one = buttons.nth(i)
        one.hover()
        colour = one.evaluate("one => getComputedStyle(one).backgroundColor")
        assert (colour == highlight) == (one.inner_text() == "on"), one.evaluate("one => one.outerHTML")


# ---- autocast ----


def test_autocast_is_a_group_of_radio_buttons(show, state, asked) -> None:
    view = show(AutocastControl, state())
    assert view.role("radio", "fp32").is_checked()
    assert view.page.get_by_text("emulated on this CPU").is_visible()
    view.page.get_by_text("bf16", exact=True).first.click()
    view.sync()
    assert asked == [{"autocast": "bf16"}]


def test_autocast_with_the_keyboard(show, state, asked) -> None:
    view = show(AutocastControl, state())
    view.page.keyboard.press("Tab")
    view.page.keyboard.press("ArrowRight")
    view.sync()
    assert asked == [{"autocast": "fp16"}]


def test_what_the_device_lacks_cannot_be_chosen_and_says_why(show, state, support, asked) -> None:
    view = show(AutocastControl, state(support={"bf16": support(available=False, note="no <b>bf16</b> units")}))
    assert view.role("radio", "bf16").is_disabled()
    assert view.page.get_by_text("not available: no <b>bf16</b> units").is_visible()
    view.page.get_by_text("bf16", exact=True).first.click(force=True)
    view.sync()
    assert asked == []


def test_a_choice_waits_until_it_is_in_force_or_falls_back(show, state, asked) -> None:
    view = show(AutocastControl, state())
    chip = view.page.get_by_text("waiting", exact=True)
    assert not chip.is_visible()
    view.role("radio", "fp16").check()
    assert chip.is_visible()  # at once, also when the kernel is busy
    view.page.evaluate("() => window.update({})")  # anything else that happens does not take it back
    assert view.role("radio", "fp16").is_checked()
    view.render(state(pending={"autocast": "fp16"}))
    view.sync()
    assert view.role("radio", "fp16").is_checked()
    assert chip.is_visible()
    view.render(state(autocast="fp16"))
    assert view.role("radio", "fp16").is_checked()
    assert not chip.is_visible()


def test_a_refused_choice_falls_back_when_it_is_answered(show, state, asked) -> None:
    view = show(AutocastControl, state())
    view.role("radio", "fp16").check()
    view.sync()  # answered, and nothing waits
    assert view.role("radio", "fp32").is_checked()
    assert not view.page.get_by_text("waiting", exact=True).is_visible()


# ---- loss scaling ----


def test_the_scale_is_a_labelled_slider_with_a_readout(show, state, asked) -> None:
    view = show(ScalerControl, state(autocast="fp16", scale=2.0**14))
    slider = view.role("slider", "Initial scale")
    assert slider.get_attribute("aria-valuetext") == "2^16 = 65536"
    assert view.page.get_by_text("live scale 2^14 = 16384").is_visible()
    slider.focus()
    for _ in range(4):
        view.page.keyboard.press("ArrowRight")
    assert view.page.locator("output").inner_text() == "2^20 = 1048576"  # live, while nothing is asked yet
    view.page.wait_for_function("() => window.sent.length > 0")
    view.page.wait_for_timeout(250)
    view.sync()
    assert asked == [{"init_scale": 2.0**20}]


def test_dragging_the_slider_asks_when_it_is_let_go(show, state, asked) -> None:
    view = show(ScalerControl, state(autocast="fp16"))
    box = view.role("slider", "Initial scale").bounding_box()
    y = box["y"] + box["height"] / 2
    view.page.mouse.move(box["x"] + box["width"] * 0.4, y)
    view.page.mouse.down()
    for part in (0.5, 0.7, 0.9, 1.0):
        view.page.mouse.move(box["x"] + box["width"] * part, y)
    view.page.wait_for_timeout(300)
    assert view.page.evaluate("() => window.sent") == []
    view.page.mouse.up()
    view.page.wait_for_function("() => window.sent.length > 0")
    view.sync()
    assert asked == [{"init_scale": 2.0**40}]


def test_where_the_loss_is_not_scaled_a_sentence_says_why_and_all_can_be_set_before(show, state) -> None:
    view = show(ScalerControl, state())
    assert view.page.get_by_text("autocast is fp32: the loss is not scaled").is_visible()
    assert view.role("checkbox", "Scale the loss").is_enabled()
    assert view.role("slider", "Initial scale").is_enabled()
    for label in ("Growth factor", "Backoff factor", "Growth interval", "Floor", "Cap"):
        assert view.role("textbox", label).is_enabled()
    view.render(state(autocast="fp16"))
    assert not view.page.get_by_text("the loss is not scaled").is_visible()
    view.render(state(autocast="fp16", scaling=False))
    assert view.page.get_by_text("loss scaling is off").is_visible()


def test_typed_values_are_asked_for_with_enter_and_taken_back_with_escape(show, state, asked) -> None:
    view = show(ScalerControl, state(autocast="fp16"))
    field = view.role("textbox", "Cap")
    field.fill("2^24")
    view.render(state(autocast="fp16", scale=4.0))  # what happens meanwhile does not touch what is being typed
    assert field.input_value() == "2^24"
    field.press("Enter")
    view.sync()
    field = view.role("textbox", "Growth interval")
    field.fill("7")
    field.press("Escape")
    view.sync()
    assert field.input_value() == "2000"
    assert asked == [{"max_scale": 2.0**24}]


def test_a_refused_value_falls_back_to_the_one_in_force(show, state, asked) -> None:
    view = show(ScalerControl, state(autocast="fp16"))
    field = view.role("textbox", "Growth factor")
    field.fill("0.5")
    field.press("Enter")
    view.sync()
    assert (asked, field.input_value()) == ([{"growth_factor": 0.5}], "2")


def test_enter_asks_once_and_keeps_the_focus(show, state, asked) -> None:
    view = show(ScalerControl, state(autocast="fp16"))
    # a notebook may swallow what makes a browser take Enter for a change
    view.page.evaluate("() => document.addEventListener('keypress', (event) => event.preventDefault(), true)")
    field = view.role("textbox", "Cap")
    field.fill("2^24")
    field.press("Enter")
    field.press("Enter")
    assert field.evaluate("(field) => field === document.activeElement")
    field.blur()
    view.sync()
    assert asked == [{"max_scale": 2.0**24}]
    view.render(state(autocast="fp16", max_scale=2.0**24))
    field.focus()
    field.blur()
    field.fill("2^20")
    field.blur()  # leaving a field asks as well
    view.sync()
    assert asked == [{"max_scale": 2.0**24}, {"max_scale": 2.0**20}]


def test_escape_and_space_are_not_for_the_notebook(show, state, asked) -> None:
    view = show(ScalerControl, state(autocast="fp16"))
    view.page.evaluate("""() => {
        window.seen = [];
        document.body.addEventListener("keydown", (event) => window.seen.push([event.key, event.defaultPrevented]));
    }""")
    field = view.role("textbox", "Growth interval")
    field.fill("7")
    field.press("Escape")
    assert field.evaluate("(field) => field === document.activeElement")
    field.blur()
    view.role("slider", "Initial scale").press(" ")
    assert view.page.evaluate("() => window.seen") == [[" ", True]]
    view.sync()
    assert (asked, field.input_value()) == ([], "2000")


def test_a_scale_beside_the_slider_is_read_out_as_it_is(show, state) -> None:
    view = show(ScalerControl, state(autocast="fp16", init_scale=1000.0))
    assert view.role("slider", "Initial scale").get_attribute("aria-valuetext") == "1000"
    assert view.page.locator("output").inner_text() == "1000"


# ---- layers ----


def test_layers_are_tick_boxes_with_names_types_and_parameters(show, state, asked) -> None:
    view = show(LayersControl, state(checkpointed=("blocks.0",)))
    rows = view.page.locator(".ampw-row")
    assert rows.count() == 3 + 6 + 2  # the blocks are shown, what is within them is not
    assert view.role("checkbox", "0 Block").is_checked()
    assert "198 k" in rows.nth(3).inner_text()
    view.role("checkbox", "1 Block").check()
    view.sync()
    assert asked == [{"checkpointed": ("blocks.0", "blocks.1")}]


def test_what_cannot_be_checkpointed_is_disabled_with_the_reason(show, state) -> None:
    view = show(LayersControl, state())
    assert view.role("checkbox", "head ScriptedHead").is_disabled()
    assert view.page.get_by_text("a ScriptModule: its forward cannot be replaced").is_visible()
    assert view.role("checkbox", "blocks ModuleList").is_disabled()


def test_groups_open_and_close_and_count_what_is_ticked_within(show, state) -> None:
    view = show(LayersControl, state(checkpointed=("blocks.1.mlp", "blocks.1.norm")))
    row = view.page.locator(".ampw-row").nth(4)
    assert row.locator(".ampw-count").inner_text() == "2"
    row.locator("button").click()
    assert view.role("checkbox", "mlp Sequential").is_checked()
    assert not row.locator(".ampw-count").is_visible()
    row.locator("button").click()
    assert not view.role("checkbox", "mlp Sequential").is_visible()


def test_layers_with_the_keyboard(show, state, asked) -> None:
    view = show(LayersControl, state())
    keyboard = view.page.keyboard
    view.role("button", "Apply").focus()
    keyboard.press("Tab")  # one stop for the whole tree
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight", "ArrowDown", "ArrowDown", "Space"):
        keyboard.press(key)
    view.sync()
    assert asked == [{"checkpointed": ("blocks.0.attention",)}]
    for key in ("ArrowLeft", "ArrowLeft", "End", "ArrowUp", "Home", "Space"):
        keyboard.press(key)
    view.sync()
    assert asked[-1] == {"checkpointed": ("token",)}
    assert view.page.locator(".ampw-tree [tabindex='0']").count() == 1


def test_the_choices_and_the_pattern(show, state, asked) -> None:
    view = show(LayersControl, state(checkpointed=("norm",)))
    view.role("button", "None").click()
    view.role("button", "Every second").click()
    pattern = view.role("textbox", "Pattern")
    pattern.fill("blocks.*.mlp")
    pattern.press("Enter")
    view.role("button", "Apply").click()
    view.sync()
    expected = [(), ("blocks.0", "blocks.2", "blocks.4"), ("blocks.*.mlp",), ("blocks.*.mlp",)]
    assert asked == [{"checkpointed": names} for names in expected]


def test_a_model_without_blocks_has_no_every_second(show, state, layer) -> None:
    view = show(LayersControl, state(layers=(layer(name="a"), layer(name="b"))))
    assert view.role("button", "Every second").is_disabled()
    assert view.role("button", "Blocks").get_attribute("title") == "This model has no repeated blocks"


def test_a_waiting_tick_is_marked(show, state) -> None:
    view = show(LayersControl, state())
    view.render(state(pending={"checkpointed": ("norm",)}))
    assert view.role("checkbox", "norm LayerNorm").is_checked()
    assert view.page.locator(".ampw-row.ampw-changed").count() == 1
    assert view.page.get_by_text("waiting", exact=True).is_visible()
    view.render(state(last_rejection="no"))
    assert not view.role("checkbox", "norm LayerNorm").is_checked()
    assert view.page.locator(".ampw-row.ampw-changed").count() == 0


@pytest.mark.parametrize("flat", [False, True])
def test_a_thousand_layers_are_quick(show, state, layer, flat: bool) -> None:
    names = [f"l{i}" for i in range(1000)] if flat else [f"blocks.{i // 10}.part{i % 10}" for i in range(1000)]
    groups = [] if flat else ["blocks", *(f"blocks.{i}" for i in range(100))]
    layers = tuple(layer(name=name, type="Linear", parameters=1000) for name in [*groups, *names])
    view = show(LayersControl, state(layers=layers))
    assert view.page.locator(".ampw-row").count() == (1000 if flat else 1)
    assert view.page.evaluate("() => window.tookMs") < 300
    update = """(positions) => {
        const start = performance.now();
        window.update({ requested: positions, in_force: positions });
        return performance.now() - start;
    }"""
    took_ms = view.page.evaluate(update, list(range(1, len(layers), 2)))
    assert took_ms < 300


# ---- run ----


def test_buttons_that_make_sense_are_enabled(show, state, asked) -> None:
    view = show(RunControl, state(run="ready"))
    assert view.role("button", "Start").is_enabled()
    assert view.role("button", "Pause").is_disabled()
    view.role("button", "Start").click()
    view.sync()
    assert asked == ["start"]


def test_without_a_prepared_run_a_sentence_takes_the_buttons_place(show, state) -> None:
    view = show(RunControl, state(run="none"))
    assert view.page.get_by_text("The loop runs in your cell; use session.fit(...) to start and pause it from here").is_visible()
    assert view.page.get_by_role("button").count() == 0
    view.render(state(run="ready"))
    assert view.page.get_by_role("button").count() == 6


def test_the_keyboards_place_is_kept_when_a_button_is_disabled(show, state, asked) -> None:
    view = show(RunControl, state(run="paused", step=1))
    step = view.role("button", "Single step")
    step.focus()
    view.page.keyboard.press("Enter")
    view.render(state(run="running", step=1))  # for a moment
    view.render(state(run="paused", step=2))
    view.page.keyboard.press("Enter")
    view.sync()
    assert asked == ["single_step", "single_step"]
    view.render(state(run="finished", step=2))
    view.role("button", "Start").focus()
    view.render(state(run="running", step=3))
    view.page.wait_for_function("() => document.activeElement.textContent === 'Pause'")


def test_a_second_press_before_the_answer_is_none(show, state, asked) -> None:
    view = show(RunControl, state(run="running", step=1))
    pause = view.role("button", "Pause")
    pause.dblclick()
    assert pause.get_attribute("aria-disabled") == "true"
    view.sync()
    assert asked == ["pause"]
    assert pause.get_attribute("aria-disabled") == "false"
    for key in ("Enter", "Space"):
        pause.press(key)
        view.sync()
    assert asked == ["pause"] * 3


# ---- status ----


def test_status_says_all_as_text(show, state) -> None:
    evil = "<img src=x onerror='window.harmed = 1'><script>window.harmed = 1</script>"
    view = show(
        StatusLine,
        state(run="failed", step=3, loss=0.5, last_rejection=evil, error=evil, notes=(evil,), device=evil, memory_source=evil),
    )
    body = view.page.locator("section").inner_text()
    assert "failed" in body
    assert "fp32 · loss not scaled · no layer checkpointed" in body
    assert body.count(evil) == 4
    assert view.page.locator("body img, body script").count() == 0
    assert view.page.evaluate("() => window.harmed") is None
    assert view.page.get_by_role("alert").count() == 2


def test_layers_with_markup_in_their_names_are_text(show, state, layer) -> None:
    evil = "<img src=x onerror='window.harmed = 1'>"
    layers = (layer(name=evil, type=evil, why_not=evil), layer(name="<script>window.harmed = 1</script>"))
    view = show(LayersControl, state(layers=layers))
    assert view.page.locator("section").inner_text().count(evil) == 3
    assert view.page.locator("body img, body script").count() == 0
    assert view.page.evaluate("() => window.harmed") is None


def test_a_selection_survives_the_numbers(show, state) -> None:
    view = show(StatusLine, state(run="running", step=1, last_rejection="copy me"))
    view.page.evaluate("() => window.getSelection().selectAllChildren(document.querySelector('.ampw-rejection'))")
    view.render(state(run="running", step=2, loss=0.1, last_rejection="copy me"))
    assert view.page.evaluate("() => window.getSelection().toString()") == "Rejected: copy me"


def test_the_view_says_when_it_opens_and_closes(show, state) -> None:
    counts: list[int] = []
    view = show(StatusLine, state(), counts.append)
    view.sync()
    view.page.evaluate("() => window.remove()")
    view.sync()
    assert counts == [1, 0]


# ---- all ----


@pytest.mark.parametrize("kind", [AutocastControl, ScalerControl, RunControl, LayersControl, StatusLine])
def test_every_control_fits_and_is_labelled_and_can_be_locked(show, state, kind: type[Control]) -> None:
    pending = {"checkpointed": ("norm",), "autocast": "fp32"}
    view = show(kind, state(run="ready", autocast="fp16", scale=2.0**40, step=10**6, pending=pending))
    width, needed = view.page.evaluate("() => [document.body.clientWidth, document.body.scrollWidth]")
    assert needed <= width
    unlabelled = """() => [...document.querySelectorAll("input")].filter((input) => !input.labels.length).length"""
    assert view.page.evaluate(unlabelled) == 0
    view.control.lock()
    view.to_page()
    enabled = f"""() => document.querySelectorAll("{ENABLED}").length"""
    assert view.page.evaluate(enabled) == 0


@pytest.mark.parametrize("size", [13, 16, 20])
@pytest.mark.parametrize("em", [14, 18, 24])
@pytest.mark.parametrize("kind", [ScalerControl, RunControl, LayersControl])
def test_nothing_overlaps_in_larger_type(show, state, kind: type[Control], em: int, size: int) -> None:
    view = show(kind, state(run="ready", autocast="fp16", scale=2.0**40))
    style = f"width: {em}em; font-size: {size}px; --jp-ui-font-size1: {size}px"
    view.page.evaluate("(style) => document.querySelector('.ampw').setAttribute('style', style)", style)
    sticking_out = """() => {
        const right = document.querySelector(".ampw-panel").getBoundingClientRect().right + 0.5;
        const inner = [...document.querySelectorAll(".ampw button:not(.ampw-twisty), .ampw-field label, .ampw input")];
        const boxes = inner.filter((one) => !one.closest(".ampw-tree"));
        return boxes.filter((one) => one.getBoundingClientRect().right > right || one.scrollWidth > one.clientWidth + 1)
            .map((one) => one.textContent || one.id);
    }"""
    assert view.page.evaluate(sticking_out) == []


def test_the_chosen_format_can_be_read_under_the_mouse(show, state) -> None:
    view = show(AutocastControl, state())
    chosen = view.page.locator(".ampw-segment").first
    colours = "(one) => [getComputedStyle(one).color, getComputedStyle(one).backgroundColor]"
    before = chosen.evaluate(colours)
    chosen.hover()
    assert chosen.evaluate(colours) == before
    other = view.page.locator(".ampw-segment").nth(1)
    before = other.evaluate(colours)
    other.hover()
    assert other.evaluate(colours) != before


@pytest.mark.parametrize(
    ("kind", "element"),
    [(AutocastControl, "input:not(:checked)"), (ScalerControl, "input"), (RunControl, "button"), (LayersControl, "button")],
)
def test_without_a_kernel_a_control_says_so_and_is_locked(show, state, kind: type[Control], element: str) -> None:
    view = show(kind, state(run="ready", step=1))
    view.page.evaluate("() => { window.gone = true; }")
    view.page.locator(element).first.click()
    assert view.page.get_by_text("no kernel: run the cell again").is_visible()
    assert view.page.locator(ENABLED).count() == 0


def test_the_status_line_finds_out_by_itself_and_tells_the_dashboard(show, state) -> None:
    view = show(StatusLine, state(run="running", step=1), lambda _: None)
    view.page.evaluate("""() => {
        window.told = 0;
        document.addEventListener("amp-widgets-lost", () => window.told++);
        window.emit("comm_live_update"); // a network that was gone for a while
    }""")
    view.page.wait_for_function("() => window.sent.length === 2")
    assert view.page.get_by_text("running", exact=True).is_visible()
    view.page.evaluate("() => { window.gone = true; window.emit('comm_live_update'); }")
    view.page.wait_for_function("() => window.told === 1")
    assert view.page.locator(".ampw-word").inner_text() == "no kernel"
    assert view.page.get_by_text("To have it live, run this cell again, after the cells that it needs.").is_visible()
    assert view.page.locator(".ampw-word").get_attribute("data-tone") == "idle"
    view.page.evaluate("() => window.remove()")


def test_the_reason_in_a_row_keeps_off_its_edges(show, state) -> None:
    view = show(LayersControl, state())
    row = view.page.locator(".ampw-row").nth(2)
    outer, name = row.bounding_box(), row.locator(".ampw-name").bounding_box()
    why = row.locator(".ampw-why").bounding_box()
    assert name["y"] - outer["y"] >= 3
    assert outer["y"] + outer["height"] - why["y"] - why["height"] >= 2


@pytest.mark.parametrize("kind", [AutocastControl, ScalerControl, RunControl, LayersControl])
def test_one_key_shortcuts_of_the_notebook_are_kept_away(show, state, kind: type[Control]) -> None:
    view = show(kind, state(run="ready", autocast="fp16"))
    view.page.evaluate("""() => {
        window.seen = [];
        document.addEventListener("keydown", (event) => {
            window.seen.push([event.key, event.target.hasAttribute("data-lm-suppress-shortcuts")]);
        }, true);
        document.querySelector("input:enabled, button:enabled").focus();
    }""")
    for key in ("x", "ArrowDown", "Control+s", "Shift+Enter"):
        view.page.keyboard.press(key)
    seen = dict(view.page.evaluate("() => window.seen"))
    assert (seen["x"], seen["ArrowDown"], seen["s"]) == (True, True, False)
    assert seen["Enter"] is False
