"""The size of type and the theme: of all controls there are and of those to come."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import amp_widgets as aw
from amp_widgets.errors import SettingsError
from amp_widgets.widgets import presenting_control
from amp_widgets.widgets.presenting_control import Presenting, PresentingControl, present_in_cell


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    yield
    aw.present(type_size="normal", theme="notebook")


def shown(control: PresentingControl) -> tuple[str, str]:
    return control.type_size, control.theme


def test_it_holds_for_what_is_shown_and_for_what_comes() -> None:
    before = PresentingControl()
    assert shown(before) == ("normal", "notebook")
    assert aw.present(type_size="large") == Presenting(type_size="large", theme="notebook")
    assert aw.present(theme="high-contrast") == Presenting(type_size="large", theme="high-contrast")
    assert aw.present() == Presenting(type_size="large", theme="high-contrast")
    after = PresentingControl(opened=True)
    assert shown(before) == shown(after) == ("large", "high-contrast")
    before.close()
    aw.present(theme="dark")
    assert shown(after) == ("large", "dark")
    assert before not in presenting_control._controls


def test_a_click_is_for_all() -> None:
    one, other = PresentingControl(), PresentingControl()
    one._received(one, {"id": "1", "type_size": "very-large"}, [])
    assert shown(one) == shown(other) == ("very-large", "notebook")
    other._received(other, {"id": "2", "theme": "light"}, [])
    assert shown(one) == shown(other) == ("very-large", "light")


@pytest.mark.parametrize("wrong", [{"type_size": "huge"}, {"theme": "blue"}, {"type_size": "large", "theme": ""}])
def test_what_there_is_not_changes_nothing(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="expected one of"):
        aw.present(**wrong)
    assert aw.present() == Presenting()


def test_the_magic_takes_words_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    displayed: list[PresentingControl] = []
    monkeypatch.setattr("IPython.core.display_functions.display", displayed.append)
    present_in_cell(["high-contrast", "large"])
    assert aw.present() == Presenting(type_size="large", theme="high-contrast")
    present_in_cell([])
    assert [one.opened for one in displayed] == [True, True]
    assert shown(displayed[0]) == ("large", "high-contrast")
    for words in (["huge"], ["large", "normal"], ["dark", "light"]):
        with pytest.raises(SettingsError, match="%amp present"):
            present_in_cell(words)
    assert aw.present() == Presenting(type_size="large", theme="high-contrast")


def test_where_there_is_no_menu_the_choices_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    displayed: list[PresentingControl] = []
    monkeypatch.setattr("IPython.core.display_functions.display", displayed.append)
    for control in tuple(presenting_control._controls):  # of other tests
        control.close()
    aw.present(type_size="large")  # there is no page
    assert displayed == []
    monkeypatch.setattr("amp_widgets.kernel.in_kernel", lambda: True)
    assert aw.present() == Presenting(type_size="large")
    assert displayed == []
    aw.present(theme="dark")
    assert [shown(one) for one in displayed] == [("large", "dark")]
    aw.present(type_size="very-large")  # the same cell again, whose output is gone
    assert shown(displayed[-1]) == ("very-large", "dark")
    assert set(presenting_control._controls) == {displayed[1]}
    menu = PresentingControl()
    aw.present(type_size="normal")
    assert len(displayed) == 2
    assert shown(menu) == ("normal", "dark")
