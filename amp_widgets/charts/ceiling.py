"""What memory may not go above, and where a step ran out of it: as they are drawn, and in words."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from amp_widgets.charts.labels import escaped, shortened
from amp_widgets.charts.look import Colours
from amp_widgets.charts.peaks import StepLike, memory_text, peak_of, place_at
from amp_widgets.language import in_language, say

FAR = 3.0
"""A ceiling so many times as high as the mountain is named instead of drawn: the mountain would be too small to be read."""
NOTE_CHARACTERS = 44


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ceiling:
    """A height that memory may not go above, such as a ``budget``; the name is English, and shown in the reader's language."""

    size_bytes: float
    name: str

    @property
    def text(self) -> str:
        """``budget 120.0 MB``."""
        return f"{in_language(self.name)} {memory_text(self.size_bytes)}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Death:
    """How a step ran out of memory, at the last point of its profile. NaN for bytes that are not known.

    Attributes
    ----------
    requested_bytes
        Of the allocation that did not fit.
    ceiling
        What it did not fit into, or None.
    place
        Where, such as ``in backward of layers.3``; as the user named it, not escaped. Empty: where the profile ends.
    """

    requested_bytes: float
    ceiling: Ceiling | None = None
    place: str = ""

    def where(self, step: StepLike) -> str:
        """The place, not escaped."""
        return in_language(self.place) or place_at(step, len(step.time_s) - 1)

    def asked_bytes(self, step: StepLike) -> float:
        """In use then, and what was requested besides."""
        used = float(step.bytes_by_kind[-1].sum()) if len(step.bytes_by_kind) else 0.0
        return used + (self.requested_bytes if math.isfinite(self.requested_bytes) else 0.0)

    def needed_bytes(self, step: StepLike) -> float:
        """At least so many bytes the step would have needed."""
        return max(self.asked_bytes(step), float(peak_of(step)[1]))

    def above_before(self, step: StepLike) -> str:
        """That more than the budget was held earlier in the step, without a death; nothing where it was not."""
        highest = float(peak_of(step)[1])
        if self.ceiling is None or not self.ceiling.name.startswith("budget") or highest <= self.ceiling.size_bytes:
            return ""
        budget = memory_text(self.ceiling.size_bytes)
        return say(
            "earlier in the step {size} were held, more than the budget of {budget}: only what an operator "
            "asks for is measured against it, not what was there before",
            size=memory_text(highest),
            budget=budget,
        )


def death_text(step: StepLike, death: Death) -> str:
    """One step that ran out of memory, in a sentence; not escaped."""
    used = float(step.bytes_by_kind[-1].sum()) if len(step.bytes_by_kind) else 0.0
    values = {"place": death.where(step), "used": memory_text(used), "more": memory_text(death.requested_bytes)}
    if math.isfinite(death.requested_bytes):
        told = say("out of memory {place}: {used} in use and {more} more requested", **values)
    else:
        told = say("out of memory {place}: {used} in use", **values)
    told = told.replace(" :", ":")  # where the place is not known
    return told if death.ceiling is None else f"{told}, {death.ceiling.text}"


def deaths_text(
    before: StepLike, after: StepLike, before_death: Death | None, after_death: Death | None, ceiling: Ceiling | None
) -> str:
    """What became of a step that ran out of memory, or that one did; one of the two deaths at least. Not escaped.

    Parameters
    ----------
    ceiling
        What is in force now, which the second step is held against unless it died itself.
    """
    if after_death is not None:
        ceiling = after_death.ceiling or ceiling
    parts = []
    for step, death in ((before, before_death), (after, after_death)):
        if death is None:
            parts.append(say("peak {size}", size=memory_text(peak_of(step)[1])))
            continue
        other = death.ceiling is not None and death.ceiling != ceiling
        limit = f" ({death.ceiling.text})" if death.ceiling is not None and other else ""
        parts.append(say("out of memory at {size}", size=memory_text(death.asked_bytes(step))) + limit)
    if ceiling is None:
        end = say("; no budget is set now") if before_death is not None and before_death.ceiling is not None else ""
    elif after_death is not None:
        end = f": {say('it does not fit')} ({ceiling.text})"
    else:
        left = ceiling.size_bytes - peak_of(after)[1]
        verdict = say("it fits, {size} to spare", size=memory_text(left)) if left >= 0 else say("it does not fit")
        end = f": {verdict} ({ceiling.text})"
    return " → ".join(parts) + end


def ceiling_height(ceiling: Ceiling | None, highest: float) -> float:
    """The height that is to be in the picture because of a ceiling; 0 where it is only named."""
    return ceiling.size_bytes if ceiling is not None and ceiling.size_bytes <= FAR * max(highest, 1.0) else 0.0


def ceiling_parts(ceiling: Ceiling, highest: float, stop: float, colours: Colours) -> tuple[list[Any], list[Any]]:
    """Shapes and annotations of a ceiling over x from 0 to `stop`."""
    font = {"size": 12, "color": colours.alarm}
    note: dict[str, Any] = {"text": f"<b>{escaped(ceiling.text)}</b>", "showarrow": False, "font": font, "name": "ceiling"}
    note |= {"align": "left", "bgcolor": colours.background, "borderpad": 1}
    if not ceiling_height(ceiling, highest):
        above = {
            "text": say("{ceiling}, far above ↑", ceiling=escaped(ceiling.text)),
            "xref": "paper",
            "yref": "paper",
            "x": 1,
            "y": 1,
            "xshift": -6,
        }
        return [], [note | above | {"xanchor": "right", "yanchor": "top"}]
    line = {
        "type": "line", "xref": "x", "yref": "y", "x0": 0, "x1": stop, "y0": ceiling.size_bytes, "y1": ceiling.size_bytes,
        "line": {"color": colours.alarm, "width": 2, "dash": "10px,4px"}, "name": "ceiling",
    }  # fmt: skip
    place = {"xref": "paper", "x": 0, "y": ceiling.size_bytes, "xanchor": "left", "yanchor": "bottom", "xshift": 6, "yshift": 2}
    return [line], [note | place]


def death_parts(
    step: StepLike, death: Death, x: float, number: int, colours: Colours, *, left: bool, word: str = ""
) -> tuple[list[Any], list[Any]]:
    """Shapes and annotations where a step ran out of memory: what was requested more, and a note, `left` of it or right, which
    begins with a `word`."""
    used = float(step.bytes_by_kind[-1].sum()) if len(step.bytes_by_kind) else 0.0
    known = math.isfinite(death.requested_bytes)
    top = used + (death.requested_bytes if known else 0.0)
    line = {
        "type": "line", "xref": "x", "yref": "y", "x0": x, "x1": x, "y0": used, "y1": top,
        "line": {"color": colours.alarm, "width": 3, "dash": "2px,2px"}, "name": f"requested {number}",
    }  # fmt: skip
    cross = {
        "x": x, "y": top, "text": "<b>✕</b>", "showarrow": False, "font": {"size": 18, "color": colours.alarm},
        "name": f"cross {number}",
    }  # fmt: skip
    lines = [f"<b>{word}{say('out of memory here')}</b>"]
    asked = [say("{size} requested", size=memory_text(death.requested_bytes))] if known else []
    lines.append(escaped(", ".join([*asked, *([death.ceiling.text] if death.ceiling is not None else [])])))
    lines.append(escaped(shortened(death.where(step), NOTE_CHARACTERS)))
    note = {
        "x": x, "y": top, "ax": -56 if left else 56, "ay": -24, "xanchor": "right" if left else "left",
        "text": "<br>".join(one for one in lines if one), "align": "right" if left else "left", "showarrow": True, "arrowhead": 2,
        "arrowwidth": 1.5, "arrowcolor": colours.alarm, "standoff": 8, "font": {"size": 12, "color": colours.text},
        "bgcolor": colours.background, "opacity": 0.92, "borderpad": 2, "name": f"death {number}",
    }  # fmt: skip
    return ([line] if known else []), [cross, note]
