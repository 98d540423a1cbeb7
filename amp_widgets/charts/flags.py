"""The labelled vertical lines of applied changes: where each label goes so that neighbours do not collide."""

from __future__ import annotations

import dataclasses
import html
import unicodedata
from collections.abc import Sequence
from typing import Any

LANES = 5
LANE_PX = 15
FIRST_LANE_PX = 20
"""Above the plot; the titles are below the lanes."""
FLAG_FONT_PX = 11
CHARACTER_PX = 6.1
"""Of that font, about how wide a letter is."""
MOST_FLAGS = 60


@dataclasses.dataclass(frozen=True, slots=True)
class Flag:
    """A line at a step; without a lane its label found no room."""

    step: float
    label: str
    lane: int | None
    leftwards: bool


def placed(
    steps: Sequence[float],
    labels: Sequence[str],
    short_labels: Sequence[str],
    *,
    first_step: float,
    last_step: float,
    width_px: float,
) -> list[Flag]:
    """The newest ``MOST_FLAGS`` lines, newest first, each with the lowest lane that is free: a newer label goes before an older.

    A label is right of its line; where there is no room left of it; where there is none either the short one is tried.

    Parameters
    ----------
    steps, labels, short_labels
        Of the applied changes, in ascending order of step.
    first_step, last_step, width_px
        The range that the plot shows, and its width in pixels.

    Notes
    -----
    live.js has the same rule, as its plot can be zoomed.
    """
    scale = width_px / max(last_step - first_step, 1e-9)
    taken: list[list[tuple[float, float]]] = [[] for _ in range(LANES)]
    flags = []
    for step, *texts in list(zip(steps, labels, short_labels, strict=True))[: -MOST_FLAGS - 1 : -1]:
        at = (step - first_step) * scale
        flags.append(_placed_one(step, at, texts, taken, width_px))
    return flags


def text_px(text: str) -> float:
    """About how wide a text is; letters of Hangul and the like are as wide as they are high.

    Parameters
    ----------
    text
        As it is read, without markup.
    """
    return CHARACTER_PX * sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def line_shape(flag: Flag, *, colour: str, plot_height_px: float) -> dict[str, Any]:
    """The line as a Plotly shape; it reaches up to its label."""
    above_px = 0 if flag.lane is None else FIRST_LANE_PX + flag.lane * LANE_PX + LANE_PX - 2
    return {
        "type": "line",
        "xref": "x",
        "yref": "paper",
        "x0": flag.step,
        "x1": flag.step,
        "y0": 0,
        "y1": 1 + above_px / plot_height_px,
        "layer": "above",
        "line": {"color": colour, "width": 1, "dash": "dot"},
    }


def label_annotation(flag: Flag, *, colour: str, background: str) -> dict[str, Any]:
    """The label as a Plotly annotation. `flag` has a lane."""
    assert flag.lane is not None
    return {
        "xref": "x",
        "yref": "paper",
        "x": flag.step,
        "y": 1,
        "xanchor": "right" if flag.leftwards else "left",
        "yanchor": "bottom",
        "xshift": -2 if flag.leftwards else 2,
        "yshift": FIRST_LANE_PX + flag.lane * LANE_PX,
        "text": flag.label,
        "showarrow": False,
        "font": {"size": FLAG_FONT_PX, "color": colour},
        "bgcolor": background,
        "borderpad": 0,
    }


def _placed_one(step: float, at: float, texts: Sequence[str], taken: list[list[tuple[float, float]]], width_px: float) -> Flag:
    for text in texts:
        size = text_px(html.unescape(text)) + 8
        sides = [leftwards for leftwards, fits in ((False, at + size <= width_px), (True, at > size)) if fits]
        for leftwards in sides or [False]:
            start = at - size if leftwards else at
            for lane, others in enumerate(taken):
                if all(start >= end or start + size <= begin for begin, end in others):
                    others.append((start, start + size))
                    return Flag(step, text, lane, leftwards)
    return Flag(step, texts[0], None, False)
