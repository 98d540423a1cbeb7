"""What all controls have in common: state flows to the page in traits, requests flow back in messages."""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from amp_widgets.language import page_script_in_language, say, words_script
from amp_widgets.widgets.state import DashboardState

_HERE = Path(__file__).parent


def page_script(name: str, *shared: str) -> str:
    """The JavaScript of a control, after what all of them share and what some do, such as ``"virtual_table"``."""
    return words_script() + "".join((_HERE / f"{part}.js").read_text(encoding="utf-8") for part in ("page", *shared, name))


def page_style(*names: str) -> str:
    """The CSS of a control, after what all of them share."""
    themes = (_HERE.parent / "charts" / "themes.css").read_text(encoding="utf-8")
    return themes + "".join((_HERE / f"{name}.css").read_text(encoding="utf-8") for name in ("page", *names))


class _AbstractTraits(ABCMeta, traitlets.MetaHasTraits):
    """Of a class that has traits and methods to be written by others."""


class Control(anywidget.AnyWidget, metaclass=_AbstractTraits):
    """A control that shows a `DashboardState` and asks for changes, and changes nothing itself.

    Its traits are set by `render` alone and its page never sets them: what the user does arrives as a message. So rendering
    cannot come back as a request.

    A trait whose default are texts of the code, marked for the catalogue, is tagged `said`: a control has them in the language
    in force when it is made.

    Parameters
    ----------
    request
        Called with what the user asks for, on whatever thread the message arrives.
    state
        What to show first; without one, `render` is to be called.
    """

    _css = page_style()

    locked = traitlets.Bool(False, help="Nothing can be asked for any more.").tag(sync=True)
    why_locked = traitlets.Unicode().tag(sync=True)

    def __init__(self, request: Callable[..., None], state: DashboardState | None = None) -> None:
        self._request = request
        super().__init__(**self._texts(), **({} if state is None else self._traits_for(state)))
        self.on_msg(self._received)

    def render(self, state: DashboardState) -> None:
        """Show this state: one message with what differs from what is shown, none when nothing does."""
        self._put(self._traits_for(state))

    def lock(self, why: str = "") -> None:
        """Show that there is nothing left to control, and why not: the session is closed, if nothing else is said."""
        self._put({"locked": True, "why_locked": why or say("the session is closed")})

    def speak(self) -> None:
        """Have the texts of the code in the language that is in force now; what comes of a state is to be shown again."""
        self._put(self._texts())

    def _texts(self) -> dict[str, Any]:
        """Trait → text of the code, or several, in the language in force; with the words that the page's script says."""
        texts = {name: _said(trait.default(self)) for name, trait in self.traits(said=True).items()}
        # as it is written, and not anywidget's trait in its place, which has words in it
        scripts = (vars(kind).get("_esm") for kind in type(self).__mro__)
        script = next((one for one in scripts if isinstance(one, str)), None)
        return texts if script is None else {"_esm": page_script_in_language(script), **texts}

    def close(self) -> None:
        """Close the control and its layout, and forget whom it asks."""
        if self.comm is not None and self.layout is not None:
            self.layout.close()
        self._request = _nobody
        super().close()

    def _traits_for(self, state: DashboardState) -> dict[str, Any]:
        """Trait → value, a pure function of the state; of a control that shows nothing of it, none."""
        return {}

    @abstractmethod
    def _ask(self, message: Mapping[str, Any]) -> None:
        """Turn a message from the page into a request."""

    def _put(self, values: Mapping[str, Any]) -> None:
        with self.hold_sync():
            for name, value in values.items():
                setattr(self, name, value)

    def _received(self, _widget: object, message: Mapping[str, Any], _buffers: object) -> None:
        try:
            if not self.locked:
                self._ask(message)
        finally:  # the page shows what the user asked for until it is told that we have heard
            self.send({"answered": message.get("id")})


def _said(texts: Any) -> Any:
    """Texts of the code, alone or within lists and dictionaries, in the language in force."""
    if isinstance(texts, str):
        return say(texts)
    if isinstance(texts, Mapping):
        return {name: _said(text) for name, text in texts.items()}
    return [_said(text) for text in texts]


def _nobody(*_args: object, **_changes: object) -> None:
    """Nobody is asked after `close`."""
