"""Colours and dashes by which many lines are told apart, with full sight of colours, without, and in print."""

from __future__ import annotations

from amp_widgets.charts.look import Theme

LINE_COLOURS: dict[Theme, tuple[str, ...]] = {
    "light": ("#0072b2", "#c94f00", "#212121", "#b5399a", "#004d40", "#8b1a4a", "#4b2e83"),
    "dark": ("#56b4e9", "#ff8c42", "#ffe14d", "#9f7bff", "#1f9e78", "#f5f5f5", "#e0433a"),
}
"""3:1 or more against the background, and no two alike for protanopes, deuteranopes or tritanopes."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
"""One fewer than colours: two lines have the same dash or the same colour at most, and never both before the 43rd."""
DASH_PX = {
    "solid": (), "dash": (9, 9), "dot": (3, 3), "dashdot": (9, 3, 3, 3), "longdash": (15, 15), "longdashdot": (15, 6, 3, 6),
}  # fmt: skip
"""What Plotly makes of them: pixels of line and gap in turn."""


def line_look(place: int, theme: Theme) -> tuple[str, str]:
    """Colour and dash of the line at this place among all, counted from 0."""
    colours = LINE_COLOURS[theme]
    return colours[place % len(colours)], DASHES[place % len(DASHES)]
