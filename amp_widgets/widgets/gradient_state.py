"""What the gradient panel shows: an immutable snapshot."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from amp_widgets.analysis.gradients import GradientRange

if TYPE_CHECKING:
    from amp_widgets.analysis.overflow import Diagnosis, RepeatedSkips, SkipRun

LARGEST_EXPONENT = 40


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GradientState:
    """All that a gradient panel shows, at one moment.

    Attributes
    ----------
    range
        The gradients of the newest step that was sampled, or None; the same object as long as it is the same step.
    pending
        Whether the next step will be sampled.
    every
        Every how many steps one is sampled by itself; 0: none.
    trains
        Whether steps are being made, as far as is known.
    why_not
        Why the last step that was to be sampled was not, or None.
    skips
        Skipped steps, runs of them and repeated ones together, oldest first.
    diagnoses
        What is wrong with how the loss scale behaves.
    """

    range: GradientRange | None = None
    pending: bool = False
    every: int = 0
    trains: bool = True
    why_not: str | None = None
    skips: tuple[SkipRun | RepeatedSkips, ...] = ()
    diagnoses: tuple[Diagnosis, ...] = ()


def nearest_exponent(scale: float) -> int:
    """Of a loss scale on the slider.

    >>> nearest_exponent(65536.0), nearest_exponent(1000.0), nearest_exponent(0.25)
    (16, 10, 0)
    """
    return min(max(round(math.log2(scale)), 0), LARGEST_EXPONENT)
