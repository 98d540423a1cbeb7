"""The loss scale, and the rule by which it changes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import traitlets

from amp_widgets.language import say
from amp_widgets.widgets.control import Control, page_script
from amp_widgets.widgets.state import DashboardState
from amp_widgets.widgets.text import number_text, scale_text

LARGEST_EXPONENT = 40


class ScalerControl(Control):
    """Loss scaling on or off, the initial scale as a power of two, growth and backoff, floor and cap.

    Asks with ``request(name=value)`` for one field of `Settings` at a time. What is no number is passed on as it was typed,
    so that whoever is asked says what is wrong with it.
    """

    _esm = page_script("scaler_control")

    scaling = traitlets.Bool().tag(sync=True)
    sentence = traitlets.Unicode(help="Why the loss is not scaled, or nothing.").tag(sync=True)
    exponent = traitlets.Int(help="The initial scale on the slider, 0 to 40: the nearest power of two.").tag(sync=True)
    init_scale = traitlets.Unicode().tag(sync=True)
    live_scale = traitlets.Unicode(help="The scale of the newest step, or nothing.").tag(sync=True)
    fields: traitlets.Dict[str, Any] = traitlets.Dict(help="Setting → text, of those that are typed.").tag(sync=True)
    waiting: traitlets.List[Any] = traitlets.List(help="The settings that wait for the next step.").tag(sync=True)

    def __init__(self, request: Callable[..., None], state: DashboardState | None = None) -> None:
        self._shown: dict[str, Any] = {}
        super().__init__(request, state)

    def _traits_for(self, state: DashboardState) -> dict[str, Any]:
        self._shown = {name: state.requested(name) for name in _NAMES}
        init_scale = float(self._shown["init_scale"])
        autocast = state.requested("autocast")
        scaling = bool(self._shown["scaling"])
        if autocast != "fp16":
            sentence = say("autocast is {autocast}: the loss is not scaled. What is set here holds for fp16", autocast=autocast)
        else:
            sentence = "" if scaling else say("loss scaling is off: the loss is not scaled")
        return {
            "scaling": scaling,
            "sentence": sentence,
            "exponent": _nearest_exponent(init_scale),
            "init_scale": scale_text(init_scale),
            "live_scale": "" if state.scale is None else scale_text(state.scale),
            "fields": {name: _field_text(name, self._shown[name]) for name in _TYPED},
            "waiting": [name for name in _NAMES if name in state.waiting],
        }

    def _ask(self, message: Mapping[str, Any]) -> None:
        name, value = str(message["setting"]), message["value"]
        if name == "scaling":
            value = bool(value)
        elif name == "init_scale":
            value = 2.0 ** int(value)
        elif name in ("min_scale", "max_scale") and str(value).strip().lower() in ("", "none"):
            value = None
        else:
            value = _number(str(value))
        if value != self._shown.get(name, _NOTHING):
            self._request(**{name: value})


_TYPED = ("growth_factor", "backoff_factor", "growth_interval", "min_scale", "max_scale")
_NAMES = ("scaling", "init_scale", *_TYPED)
_NOTHING = object()
_TOO_LARGE = 2**1024
"""No float: the settings say that it is too large, which of ``inf`` or of the text they would not."""


def _nearest_exponent(scale: float) -> int:
    return min(max(round(math.log2(scale)), 0), LARGEST_EXPONENT)


def _field_text(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name in ("min_scale", "max_scale"):
        return scale_text(float(value)).partition(" ")[0]
    return number_text(value)


def _number(text: str) -> float | str:
    """``65536``, ``2^16``, ``2**16`` or ``1e4`` as a number; anything else as it is."""
    power = re.fullmatch(r"\s*([\d.]+)\s*(?:\^|\*\*)\s*([+-]?\d+)\s*", text)
    try:
        if power is not None:
            return math.pow(float(power[1]), int(power[2]))
        number = float(text)
    except OverflowError:
        return _TOO_LARGE
    except ValueError:
        return text.strip()
    return _TOO_LARGE if math.isinf(number) and any(map(str.isdigit, text)) else number
