from __future__ import annotations

from typing import Any

import pytest

from amp_widgets.core.settings import Settings
from amp_widgets.errors import SettingsError
from amp_widgets.widgets.scaler_control import ScalerControl


@pytest.fixture
def asked() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def control(asked, state) -> ScalerControl:
    return ScalerControl(lambda **changes: asked.append(changes), state(autocast="fp16", scale=2.0**14))


def say(control: ScalerControl, setting: str, value: object) -> None:
    control._handle_custom_msg({"setting": setting, "value": value, "id": "1"}, [])


def test_shows_the_scale_and_the_rule(control) -> None:
    assert (control.exponent, control.init_scale, control.live_scale) == (16, "2^16 = 65536", "2^14 = 16384")
    assert control.fields == {
        "growth_factor": "2",
        "backoff_factor": "0.5",
        "growth_interval": "2000",
        "min_scale": "",
        "max_scale": "",
    }
    assert (control.scaling, control.sentence, control.waiting) == (True, "", [])


@pytest.mark.parametrize("autocast", ["fp32", "bf16"])
def test_where_scaling_does_not_apply_a_sentence_says_so(state, autocast: str) -> None:
    control = ScalerControl(lambda **_: None, state(autocast=autocast))
    assert control.sentence == f"autocast is {autocast}: the loss is not scaled. What is set here holds for fp16"
    assert control.live_scale == ""


def test_scaling_that_is_off_can_be_put_on(state) -> None:
    control = ScalerControl(lambda **_: None, state(autocast="fp16", scaling=False))
    assert (control.scaling, control.sentence) == (False, "loss scaling is off: the loss is not scaled")


def test_what_waits_decides_whether_the_loss_is_scaled(state) -> None:
    control = ScalerControl(lambda **_: None, state(pending={"autocast": "fp16"}))
    assert control.sentence == ""


def test_a_scale_beside_the_slider_is_named_exactly(state) -> None:
    control = ScalerControl(lambda **_: None, state(autocast="fp16", init_scale=1000.0))
    assert (control.exponent, control.init_scale) == (10, "1000")
    control.render(state(autocast="fp16", init_scale=2.0**50))
    assert (control.exponent, control.init_scale) == (40, "2^50")
    control.render(state(autocast="fp16", init_scale=2.0**-5))
    assert (control.exponent, control.init_scale) == (0, "2^-5 = 0.03125")


def test_an_equal_state_sends_nothing(state, messages) -> None:
    control = ScalerControl(lambda **_: None, state(autocast="fp16", scale=4.0))
    messages.clear()
    control.render(state(autocast="fp16", scale=4.0, step=7))
    assert messages.sent == []
    control.render(state(autocast="fp16", scale=2.0))
    assert messages.updates == [{"live_scale": "2^1 = 2"}]


def test_a_waiting_value_is_shown_and_marked(state, messages) -> None:
    control = ScalerControl(lambda **_: None, state(autocast="fp16"))
    messages.clear()
    control.render(state(autocast="fp16", pending={"init_scale": 2.0**20, "growth_interval": 5}))
    [update] = messages.updates
    assert (update["exponent"], update["init_scale"], update["waiting"]) == (
        20,
        "2^20 = 1048576",
        ["init_scale", "growth_interval"],
    )
    assert update["fields"]["growth_interval"] == "5"
    control.render(state(autocast="fp16", last_rejection="no"))
    assert (control.exponent, control.waiting, control.fields["growth_interval"]) == (16, [], "2000")


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("scaling", False, False),
        ("init_scale", 40, 2.0**40),
        ("growth_factor", "3", 3.0),
        ("backoff_factor", " 0.25 ", 0.25),
        ("growth_interval", "100", 100.0),
        ("min_scale", "2^4", 16.0),
        ("max_scale", "2**24", 2.0**24),
        ("max_scale", "1e6", 1e6),
        ("growth_factor", "two", "two"),
    ],
)
def test_the_user_asks_once(control, asked, setting: str, value: object, expected: object) -> None:
    say(control, setting, value)
    assert asked == [{setting: expected}]


@pytest.mark.parametrize(
    ("setting", "value"), [("scaling", True), ("init_scale", 16), ("growth_factor", "2.0"), ("min_scale", "none")]
)
def test_what_is_so_already_is_not_asked_for(control, asked, setting: str, value: object) -> None:
    say(control, setting, value)
    assert asked == []


@pytest.mark.parametrize("text", ["", "  ", "none", "None"])
def test_an_emptied_field_means_none(asked, state, text: str) -> None:
    control = ScalerControl(lambda **changes: asked.append(changes), state(autocast="fp16", max_scale=2.0**24))
    assert control.fields["max_scale"] == "2^24"
    say(control, "max_scale", text)
    assert asked == [{"max_scale": None}]


def test_what_is_typed_wrongly_is_refused_by_the_settings_with_what_was_typed(control, asked) -> None:
    say(control, "growth_factor", "twice")
    with pytest.raises(SettingsError, match="got 'twice', expected a number"):
        Settings().replace(**asked[0])


@pytest.mark.parametrize("text", ["2^9999", "2**99999", "1e999"])
@pytest.mark.parametrize("setting", ["min_scale", "growth_factor", "growth_interval"])
def test_a_number_beyond_all_floats_is_refused_as_too_large(control, asked, setting: str, text: str) -> None:
    say(control, setting, text)
    with pytest.raises(SettingsError, match="too large"):
        Settings().replace(**asked[0])


def test_the_shown_text_of_a_field_reads_back_as_its_value(asked, state) -> None:
    settings = {"growth_factor": 1.0625, "backoff_factor": 0.1, "growth_interval": 7, "min_scale": 3.0, "max_scale": 2.0**40}
    control = ScalerControl(lambda **changes: asked.append(changes), state(autocast="fp16", **settings))
    for name, text in control.fields.items():
        say(control, name, text)
    assert asked == []


def test_rendering_never_asks(control, asked, state) -> None:
    for changes in ({"init_scale": 4.0}, {"scaling": False}, {"growth_factor": 3.0}, {"min_scale": 2.0}):
        control.render(state(autocast="fp16", pending=changes))
        control.render(state(autocast="fp16", **changes))
    assert asked == []
