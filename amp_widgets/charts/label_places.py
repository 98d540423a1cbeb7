"""Where the labels of points go, so that they cover neither points nor each other, as far as there is room."""

from __future__ import annotations

from collections.abc import Sequence

from amp_widgets.charts.flags import FLAG_FONT_PX, text_px

Box = tuple[float, float, float, float]
"""Left, top, right, bottom, in pixels from the upper left of the plot."""
PLACES = (
    "top center", "bottom center", "middle right", "middle left", "top right", "bottom right", "top left", "bottom left",
)  # fmt: skip
"""Plotly's ``textposition``, the best first."""
LINE_PX = 15
FONT_PX, BOLD = 12, 1.1
"""Of labels; and how much wider bold letters are."""
_LABEL_WEIGHT = 20.0
_PARTS = (1.0, 0.55)
"""Of the assumed width, that of a plot beside which there is much else, or in very large type."""


class Places:
    """What is taken of a plot; labels are put where they cover the least of it.

    A figure is drawn as wide as its place, and labels keep their size then: what is taken is judged in a narrow plot, too.

    Parameters
    ----------
    width_px, height_px
        Of the plot, as wide as it is assumed to be; all places are given in these.
    gap_px
        From the middle of a point to its label.
    """

    def __init__(self, width_px: float, height_px: float, gap_px: float) -> None:
        self._plots: list[Box] = [(0.0, 0.0, part * width_px, height_px) for part in _PARTS]
        self._gap_px = gap_px
        self._taken: list[list[tuple[Box, float]]] = [[] for _ in _PARTS]  # with how bad it is to cover it

    def take(self, box: Box, weight: float) -> None:
        """This is taken; covering a square pixel of it is as bad as `weight`, of a label 20."""
        left, top, right, bottom = box
        for part, taken in zip(_PARTS, self._taken, strict=True):
            taken.append(((part * left, top, part * right, bottom), weight))

    def take_point(self, x: float, y: float, weight: float = 3.0) -> None:
        """There is a point here."""
        gap = self._gap_px
        for part, taken in zip(_PARTS, self._taken, strict=True):
            taken.append(((part * x - gap, y - gap, part * x + gap, y + gap), weight))

    def put(self, x: float, y: float, width_px: float) -> str:
        """Take room for the label of the point there, which is so wide, and return its ``textposition``."""

        def boxes(place: str) -> list[Box]:
            return [label_box(part * x, y, place, width_px, self._gap_px) for part in _PARTS]

        best = min(PLACES, key=lambda place: sum(map(self._covered, boxes(place), self._plots, self._taken)))
        for box, taken in zip(boxes(best), self._taken, strict=True):
            taken.append((box, _LABEL_WEIGHT))
        return best

    @staticmethod
    def _covered(box: Box, plot: Box, taken: Sequence[tuple[Box, float]]) -> float:
        """Square pixels of the box that are taken, times how bad that is, or outside of the plot."""
        area = (box[2] - box[0]) * (box[3] - box[1])
        outside = area - common(box, plot)
        return _LABEL_WEIGHT * outside + sum(weight * common(box, other) for other, weight in taken)


def label_px(text: str, *, bold: bool = False) -> float:
    """About how wide a label is.

    Parameters
    ----------
    text
        Without markup.
    bold
        Whether it is in bold letters.
    """
    return text_px(text) * FONT_PX / FLAG_FONT_PX * (BOLD if bold else 1.0)


def label_box(x: float, y: float, place: str, width_px: float, gap_px: float) -> Box:
    """The room that the label of a point takes at a ``textposition``."""
    vertical, horizontal = place.split()
    beside = gap_px if vertical == "middle" else 0.0
    left = {"left": x - width_px - beside, "center": x - width_px / 2, "right": x + beside}[horizontal]
    top = {"top": y - gap_px - LINE_PX, "middle": y - LINE_PX / 2, "bottom": y + gap_px}[vertical]
    return left, top, left + width_px, top + LINE_PX


def common(one: Box, other: Box) -> float:
    """Square pixels that both have."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return max(0.0, width) * max(0.0, height)
