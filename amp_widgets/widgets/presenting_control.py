"""How dashboards look on this notebook's page: size of type and theme, for a projector or for weak eyes."""

from __future__ import annotations

import dataclasses
import re
import weakref
from collections.abc import Mapping
from typing import Any, Literal, get_args

import traitlets

from amp_widgets import kernel
from amp_widgets.errors import SettingsError
from amp_widgets.language import marked, say
from amp_widgets.widgets.control import Control, page_script, page_style
from amp_widgets.widgets.state import DashboardState

TypeSize = Literal["normal", "large", "very-large"]
ShownTheme = Literal["notebook", "light", "dark", "high-contrast"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Presenting:
    """What is in force.

    Parameters
    ----------
    type_size
        ``"normal"``, ``"large"`` or ``"very-large"``: of text, controls, charts and their lines.
    theme
        ``"notebook"`` for the one that the notebook has, ``"light"``, ``"dark"`` or ``"high-contrast"``.
    """

    type_size: TypeSize = "normal"
    theme: ShownTheme = "notebook"


def present(*, type_size: TypeSize | None = None, theme: ShownTheme | None = None) -> Presenting:
    """Make dashboards, labs and questions larger, or give them another theme: those on the page, and later ones of this kernel.

    It holds for the whole page of the notebook. Where no dashboard has a menu for it, as beside a format lab or a question alone,
    the choices are shown below the cell, as ``%amp present`` shows them.

    Parameters
    ----------
    type_size
        ``"normal"``, ``"large"`` or ``"very-large"``; None to leave it.
    theme
        ``"notebook"`` to follow the notebook's, ``"light"``, ``"dark"``, or ``"high-contrast"``: black on white, or white
        on black where the notebook is dark; None to leave it.

    Returns
    -------
    Presenting
        What is in force now.

    Raises
    ------
    SettingsError
        When there is no such size or theme; nothing is changed then.
    """
    _set(type_size, theme)
    has_menu = any(control is not _shown_alone() for control in _controls)
    if (type_size, theme) != (None, None) and kernel.in_kernel() and not has_menu:
        _show_alone()
    return _presenting


def _set(type_size: TypeSize | None, theme: ShownTheme | None) -> None:
    global _presenting
    for name, value, known in (("type_size", type_size, get_args(TypeSize)), ("theme", theme, get_args(ShownTheme))):
        if value is not None and value not in known:
            raise SettingsError(f"{name}: got {value!r}, expected one of {', '.join(map(repr, known))}")
    wanted: dict[str, Any] = {"type_size": type_size, "theme": theme}
    _presenting = dataclasses.replace(_presenting, **{name: value for name, value in wanted.items() if value is not None})
    for control in tuple(_controls):
        control.follow(_presenting)


class PresentingControl(Control):
    """Buttons for what :func:`present` sets. The page does what they say at once, also while the kernel is busy.

    Parameters
    ----------
    opened
        Whether the choices are shown, and not a button that shows them.
    """

    _esm = page_script("presenting_control")
    _css = page_style("presenting")

    type_size = traitlets.Unicode().tag(sync=True)
    theme = traitlets.Unicode().tag(sync=True)
    opened = traitlets.Bool(False, help="The choices are shown always.").tag(sync=True)

    def __init__(self, *, opened: bool = False) -> None:
        super().__init__(_ask_for)
        self._put({**_traits(_presenting), "opened": opened})
        _controls.add(self)

    def follow(self, presenting: Presenting) -> None:
        """Show what is in force."""
        self._put(_traits(presenting))

    def close(self) -> None:
        """Close it; what it has set stays."""
        _controls.discard(self)
        super().close()

    def __repr__(self) -> str:
        return f"<amp_widgets display: type size {self.type_size}, theme {self.theme}>"

    def _traits_for(self, state: DashboardState) -> dict[str, Any]:
        """Nothing: it is the same whatever the session does."""
        return {}

    def _ask(self, message: Mapping[str, Any]) -> None:
        self._request(type_size=message.get("type_size"), theme=message.get("theme"))


def present_in_cell(words: list[str]) -> None:
    """``%amp present``: set what is named, such as ``large`` and ``high-contrast``, and show the choices below the cell.

    Parameters
    ----------
    words
        Sizes and themes, in any order, also as the menu calls them, such as ``very large``; none to see the choices only.

    Raises
    ------
    SettingsError
        When one of them is neither.
    """
    wanted: dict[str, Any] = {}
    known = _known()
    left = _parts(" ".join(words))
    while left:
        # the longest first: "very large" is not "large"
        length = next((length for length in range(len(left), 0, -1) if tuple(left[:length]) in known), 0)
        name, value = known.get(tuple(left[:length]), ("", ""))
        if not name or name in wanted:
            sizes, themes = ", ".join(get_args(TypeSize)), ", ".join(get_args(ShownTheme))
            raise SettingsError(f"%amp present: got {' '.join(words)!r}, expected a size ({sizes}), a theme ({themes}), or both")
        wanted[name] = value
        del left[:length]
    _set(wanted.get("type_size"), wanted.get("theme"))
    _show()


def _known() -> dict[tuple[str, ...], tuple[str, str]]:
    """What can be typed, in parts, and what it sets: the names of sizes and themes, and what the menu calls them."""
    return {
        tuple(_parts(text)): (name, value)
        for name, values in (("type_size", get_args(TypeSize)), ("theme", get_args(ShownTheme)))
        for value in values
        for text in (value, _IN_MENU[value], say(_IN_MENU[value]))
    }


def _parts(text: str) -> list[str]:
    """Without what people join them with: ``very large``, ``very-large`` and ``Very_Large`` are the same."""
    return re.split(r"[\s_-]+", text.strip().lower()) if text.strip() else []


def _show() -> PresentingControl:
    """Show the choices below the cell: the page does what a control says that is on it."""
    from IPython.core.display_functions import display

    control = PresentingControl(opened=True)
    for widget in (control, control.layout):
        kernel.answer_where_asked(getattr(widget, "comm", None))
    display(control)
    return control


def _show_alone() -> None:
    """Show them for `present`, and take away those of its call before: the cell may be the same one, whose output is gone."""
    global _alone
    before = _shown_alone()
    if before is not None:
        before.close()
    _alone = weakref.ref(_show())


def _shown_alone() -> PresentingControl | None:
    return None if _alone is None else _alone()


def _ask_for(**wanted: Any) -> None:
    _set(wanted.get("type_size"), wanted.get("theme"))


def _traits(presenting: Presenting) -> dict[str, Any]:
    return {"type_size": presenting.type_size, "theme": presenting.theme}


_IN_MENU = {
    "normal": marked("normal size"), "large": marked("large"), "very-large": marked("very large"),
    "notebook": marked("as the notebook"), "light": marked("light"), "dark": marked("dark"),
    "high-contrast": marked("high contrast"),
}  # fmt: skip
"""What presenting_control.js calls them."""
_presenting = Presenting()
_controls: weakref.WeakSet[PresentingControl] = weakref.WeakSet()
_alone: weakref.ref[PresentingControl] | None = None
