"""What the memory panel shows: an immutable snapshot."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from amp_widgets.charts.peaks import StepLike
from amp_widgets.widgets.layer_table import LayerProfileLike


class StepProfileLike(StepLike, Protocol):
    """A profiled step with its layers."""

    @property
    def step(self) -> int: ...
    @property
    def source(self) -> str: ...
    @property
    def layers(self) -> Sequence[LayerProfileLike]: ...
    @property
    def notes(self) -> Sequence[str]: ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryState:
    """All that a memory panel shows, at one moment.

    Attributes
    ----------
    profiles
        The profiled steps that are kept, oldest first; each has a label of its own.
    shown
        Labels: of the one that is shown, or of two, before and after. Empty: the newest. Labels of none that is kept are passed
        over.
    report
        What to say of a step that ran out of memory, a sentence a line; the first is the heading. Empty without one.
    pending
        Whether the next step will be profiled.
    why_not
        Why no step can be profiled now, or None.
    """

    profiles: tuple[StepProfileLike, ...] = ()
    shown: tuple[str, ...] = ()
    report: tuple[str, ...] = ()
    pending: bool = False
    why_not: str | None = None

    @property
    def chosen(self) -> tuple[StepProfileLike, ...]:
        """What is drawn: no step, one, or two: before and after."""
        by_label = {profile.label: profile for profile in self.profiles}
        chosen = tuple(by_label[label] for label in dict.fromkeys(self.shown) if label in by_label)[:2]
        return chosen or self.profiles[-1:]
