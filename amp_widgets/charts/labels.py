"""Texts in a chart: short names for events, and escaping of what the user wrote."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from amp_widgets.language import reason_in_language, say, say_number


class EventLike(Protocol):
    """What a chart reads of an event; an ``amp_widgets.core.history.Event`` is one."""

    @property
    def step(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def detail(self) -> Mapping[str, Any]: ...


MARKED_KINDS = ("applied", "rejected", "run", "note", "out_of_memory")
"""The kinds that get a mark of their own. A skip has its mark on the scale, whose line shows the changes of scale, too."""

LABEL_CHARACTERS = 60
SHORT_LABEL_CHARACTERS = 14
HOVER_CHARACTERS = 400


def escaped(text: str) -> str:
    """`text` as Plotly shows it literally: Plotly reads a part of HTML, entities, and TeX between dollar signs.

    >>> escaped("a<b> & $c$")
    'a&lt;b> &amp; &#36;c&#36;'
    """
    return " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace("$", "&#36;")


def shortened(text: str, characters: int) -> str:
    """`text` cut to so many characters, the last of them an ellipsis where something was cut."""
    text = " ".join(text.split())
    return text if len(text) <= characters else text[: characters - 1].rstrip() + "…"


def event_label(event: EventLike) -> str:
    """A few words for the line of an event: ``fp16, 4 layers``. Escaped."""
    return escaped(shortened(", ".join(_changes(event)) or reason_in_language(event), LABEL_CHARACTERS))


def short_event_label(event: EventLike) -> str:
    """The same for where there is little room, the first change and how many more: ``fp16 +1``. Escaped."""
    first, *others = _changes(event) or [reason_in_language(event)]
    more = f" +{len(others)}" if others else ""
    return escaped(shortened(first, SHORT_LABEL_CHARACTERS - len(more)) + more)


def event_text(event: EventLike) -> str:
    """What is read on pointing at the mark of an event. Escaped."""
    return escaped(shortened(reason_in_language(event), HOVER_CHARACTERS))


def _changes(event: EventLike) -> list[str]:
    return [_change(str(name), value) for name, value in event.detail.items() if name != "source"]


def _change(name: str, value: Any) -> str:
    match name:
        case "autocast":
            return str(value)
        case "scaling":
            return say("scaling on") if value else say("scaling off")
        case "init_scale":
            return say("scale {scale}", scale=_number(value))
        case "growth_factor":
            return say("growth ×{factor}", factor=_number(value))
        case "backoff_factor":
            return say("backoff ×{factor}", factor=_number(value))
        case "growth_interval":
            return say("growth every {count}", count=_number(value))
        case "min_scale":
            return say("no floor") if value is None else say("floor {scale}", scale=_number(value))
        case "max_scale":
            return say("no cap") if value is None else say("cap {scale}", scale=_number(value))
        case "checkpointed" if isinstance(value, (list, tuple)):
            return say_number("{count} layer", "{count} layers", len(value))
        case "fp32_layers" if isinstance(value, (list, tuple)):
            return say("{count} in fp32", count=len(value))
        case _:
            return f"{name} {_number(value)}"


def _number(value: Any) -> str:
    """A power of two from 2^10 on as such, other numbers in their shortest form."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if math.isfinite(value) and value >= 1024:
        mantissa, exponent = math.frexp(value)
        if mantissa == 0.5:
            return f"2^{exponent - 1}"
    return f"{value:g}"
