"""Which number format autocast uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import traitlets

from amp_widgets.core.settings import AUTOCAST_NAMES
from amp_widgets.language import in_language, say
from amp_widgets.widgets.control import Control, page_script
from amp_widgets.widgets.state import DashboardState


class AutocastControl(Control):
    """fp32, fp16 or bf16; what the device lacks is disabled, with the reason.

    Asks with ``request(autocast=name)``.
    """

    _esm = page_script("autocast_control")

    options: traitlets.List[Any] = traitlets.List(help="Of each format: name, available, note.").tag(sync=True)
    in_force = traitlets.Unicode().tag(sync=True)
    waiting = traitlets.Unicode(help="The format that waits for the next step, or nothing.").tag(sync=True)

    def _traits_for(self, state: DashboardState) -> dict[str, Any]:
        options = []
        for name in AUTOCAST_NAMES:
            support = state.support.get(name)
            available = support is None or support.available
            note = "" if support is None else in_language(support.note)
            if not available:
                note = note or say("this device does not have it")
            options.append({"name": name, "available": available, "note": note})
        return {
            "options": options,
            "in_force": state.settings.autocast,
            "waiting": state.waiting.get("autocast", ""),
        }

    def _ask(self, message: Mapping[str, Any]) -> None:
        self._request(autocast=str(message["autocast"]))
