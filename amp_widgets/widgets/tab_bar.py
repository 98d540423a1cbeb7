"""Tabs: which of several panels is shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import traitlets

from amp_widgets.widgets.control import Control, page_script
from amp_widgets.widgets.state import DashboardState


class TabBar(Control):
    """A row of tabs. Asks ``request(name)`` for the one to be shown; the page shows it at once.

    It stands in a box beside the panels, which have the class ``ampw-tab`` and that of their name, such as ``ampw-tab-memory``.

    Parameters
    ----------
    request
        Called with the name of a tab.
    tabs
        Name and label of each; the first one is shown.
    """

    _esm = page_script("tab_bar")
    _css = Control._css + (Path(__file__).parent / "tab_bar.css").read_text(encoding="utf-8")

    tabs: traitlets.List[Any] = traitlets.List(help="Name and label of each.").tag(sync=True)
    selected = traitlets.Unicode().tag(sync=True)
    closed: traitlets.List[Any] = traitlets.List(help="Names of those that can no longer be shown.").tag(sync=True)

    def __init__(self, request: Callable[..., None], tabs: Sequence[tuple[str, str]]) -> None:
        super().__init__(request)
        self._put({"tabs": [list(tab) for tab in tabs], "selected": tabs[0][0]})

    def select(self, name: str) -> None:
        """Show this one."""
        self._put({"selected": name})

    def close_tabs(self, names: Sequence[str]) -> None:
        """These can no longer be shown."""
        self._put({"closed": list(names)})

    def _traits_for(self, state: DashboardState) -> dict[str, Any]:
        return {}

    def _ask(self, message: Mapping[str, Any]) -> None:
        match message:
            case {"tab": str(name)}:
                if name != self.selected and name not in self.closed and any(name == tab[0] for tab in self.tabs):
                    self._request(name)
