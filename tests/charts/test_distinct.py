"""Colours of lines: against the background, and against each other for people who see fewer colours."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from amp_widgets.charts.distinct import DASH_PX, DASHES, LINE_COLOURS, line_look
from amp_widgets.charts.look import COLOURS, Theme

# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB
SIGHT = {
    "full": np.eye(3),
    "protanope": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    "deuteranope": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]),
    "tritanope": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]]),
}
LMS = np.array([[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
                [0.0883024619, 0.2817188376, 0.6299787005]])  # fmt: skip
LAB = np.array([[0.2104542553, 0.793617785, -0.0040720468], [1.9779984951, -2.428592205, 0.4505937099],
                [0.0259040371, 0.7827717662, -0.808675766]])  # fmt: skip


def linear(colour: str) -> np.ndarray:
    part = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """WCAG's."""
    darker, lighter = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (one, other))
    return (lighter + 0.05) / (darker + 0.05)


def oklab(colour: str, sight: str) -> np.ndarray:
    return LAB @ np.cbrt(LMS @ np.clip(SIGHT[sight] @ linear(colour), 0, 1))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_stand_out_and_are_told_apart(theme: Theme) -> None:
    colours = LINE_COLOURS[theme]
    assert min(contrast(colour, COLOURS[theme].background) for colour in colours) >= 3
    for sight in SIGHT:
        seen = [oklab(colour, sight) for colour in colours]
        nearest = min(float(np.linalg.norm(one - other)) for one, other in itertools.combinations(seen, 2))
        assert nearest >= 0.055, sight  # OKLab; 0.02 is just noticeable


def test_two_lines_have_never_both_the_same_colour_and_dash() -> None:
    looks = [line_look(place, "light") for place in range(42)]
    assert len(set(looks)) == 42
    for one, other in itertools.pairwise(looks):
        assert one[0] != other[0]
        assert one[1] != other[1]
    assert len({dash for _, dash in looks[:6]}) == 6
    assert line_look(0, "light")[1] == "solid"
    assert set(DASH_PX) == set(DASHES)
