from __future__ import annotations

import pytest

from amp_widgets.widgets.autocast_control import AutocastControl


def test_shows_what_is_in_force_and_the_notes(state) -> None:
    control = AutocastControl(lambda **_: None, state(autocast="fp16"))
    assert (control.in_force, control.waiting) == ("fp16", "")
    assert [(option["name"], option["available"]) for option in control.options] == [
        ("fp32", True),
        ("fp16", True),
        ("bf16", True),
    ]
    assert "emulated on this CPU" in control.options[2]["note"]


def test_what_the_device_lacks_is_disabled_with_the_reason(state, support) -> None:
    lacking = {"fp32": support(), "fp16": support(), "bf16": support(available=False, note="GTX 1080 does not support bf16")}
    control = AutocastControl(lambda **_: None, state(support=lacking))
    assert control.options[2] == {"name": "bf16", "available": False, "note": "GTX 1080 does not support bf16"}
    control.render(state(support={"fp16": support(available=False)}))
    assert control.options[1] == {"name": "fp16", "available": False, "note": "this device does not have it"}


def test_an_equal_state_sends_nothing(state, messages) -> None:
    control = AutocastControl(lambda **_: None, state())
    messages.clear()
    control.render(state())
    control.render(state(step=5, loss=0.5))
    assert messages.sent == []


def test_a_change_sends_one_message_with_what_changed(state, messages) -> None:
    control = AutocastControl(lambda **_: None, state())
    messages.clear()
    control.render(state(pending={"autocast": "bf16"}))
    assert messages.updates == [{"waiting": "bf16"}]
    messages.clear()
    control.render(state(autocast="bf16"))
    assert messages.updates == [{"waiting": "", "in_force": "bf16"}]


def test_a_rejected_request_falls_back(state) -> None:
    control = AutocastControl(lambda **_: None, state(autocast="fp16", pending={"autocast": "bf16"}))
    assert control.waiting == "bf16"
    control.render(state(autocast="fp16", last_rejection="no"))
    assert (control.waiting, control.in_force) == ("", "fp16")


def test_the_user_asks_once_and_is_answered(state, messages) -> None:
    asked: list[dict] = []
    control = AutocastControl(lambda **changes: asked.append(changes), state())
    messages.clear()
    control._handle_custom_msg({"autocast": "fp16", "id": "amp-1"}, [])
    assert asked == [{"autocast": "fp16"}]
    assert messages.customs == [{"answered": "amp-1"}]
    assert messages.updates == []  # asking changes nothing by itself


def test_the_page_is_answered_also_when_asking_fails(state, messages) -> None:
    def refuse(**_: object) -> None:
        raise RuntimeError("broken")

    control = AutocastControl(refuse, state())
    messages.clear()
    with pytest.raises(RuntimeError, match="broken"):
        control._received(control, {"autocast": "fp16", "id": "amp-2"}, [])
    assert messages.customs == [{"answered": "amp-2"}]


def test_rendering_never_asks(state) -> None:
    asked: list[dict] = []
    control = AutocastControl(lambda **changes: asked.append(changes), state())
    for name in ("fp16", "bf16", "fp32"):
        control.render(state(pending={"autocast": name}))
        control.render(state(autocast=name))
    assert asked == []


def test_a_locked_control_asks_nothing(state) -> None:
    asked: list[dict] = []
    control = AutocastControl(lambda **changes: asked.append(changes), state())
    control.lock()
    control._handle_custom_msg({"autocast": "fp16", "id": "1"}, [])
    assert asked == []
    assert control.locked
