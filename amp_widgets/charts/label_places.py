"""Where the labels of points go, so that they cover neither points nor each other, as far as there is room."""

from __future__ import annotations

Box = tuple[float, float, float, float]
"""Left, top, right, bottom, in pixels from the upper left of the plot."""
PLACES = (
    "top center", "bottom center", "middle right", "middle left", "top right", "bottom right", "top left", "bottom left",
)  # fmt: skip
"""Plotly's ``textposition``, the best first."""
LINE_PX = 15
_LABEL_WEIGHT = 20.0


class Places:
    """What is taken of a plot; labels are put where they cover the least of it.

    Parameters
    ----------
    width_px, height_px
        Of the plot.
    gap_px
        From the middle of a point to its label.
    """

    def __init__(self, width_px: float, height_px: float, gap_px: float) -> None:
        self._plot: Box = (0.0, 0.0, width_px, height_px)
        self._gap_px = gap_px
        self._taken: list[tuple[Box, float]] = []  # with how bad it is to cover it

    def take(self, box: Box, weight: float) -> None:
        """This is taken; covering a square pixel of it is as bad as `weight`, of a label 20."""
        self._taken.append((box, weight))

    def take_point(self, x: float, y: float, weight: float = 3.0) -> None:
        """There is a point here."""
        gap = self._gap_px
        self.take((x - gap, y - gap, x + gap, y + gap), weight)

    def put(self, x: float, y: float, width_px: float) -> str:
        """Take room for the label of the point there, and return its ``textposition``."""
        boxes = {place: label_box(x, y, place, width_px, self._gap_px) for place in PLACES}
        best = min(PLACES, key=lambda place: (self._covered(boxes[place]), PLACES.index(place)))
        self.take(boxes[best], _LABEL_WEIGHT)
        return best

    def _covered(self, box: Box) -> float:
        """Square pixels of the box that are taken, times how bad that is, or outside of the plot."""
        area = (box[2] - box[0]) * (box[3] - box[1])
        outside = area - common(box, self._plot)
        return _LABEL_WEIGHT * outside + sum(weight * common(box, other) for other, weight in self._taken)


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
