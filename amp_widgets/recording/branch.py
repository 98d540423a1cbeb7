"""The course of a run that was left for another: what it was up to its end. Free of torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from amp_widgets.core.history import Event, History
from amp_widgets.core.settings import Settings
from amp_widgets.recording.settings_course import settings_in_force


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Branch:
    """A course that `amp_widgets.session.AmpSession.fork` has left; nothing is added to it any more.

    Attributes
    ----------
    name
        Of its file, or ``"run"``, ``"fork-1"``, ``"fork-2"``, ...
    history
        Every step and every event, also those that it has in common with the course that was taken instead.
    left_at
        The step at which it was left: of these and later ones, only this course has the numbers in `history`.
    facts
        As a run file has them, and ``file``, where it was recorded.
    """

    name: str
    history: History
    left_at: int
    facts: Mapping[str, Any]

    @property
    def events(self) -> list[Event]:
        """Every event, by step."""
        return self.history.events()

    @property
    def settings(self) -> Settings:
        """The settings in force at the end."""
        return self.settings_at(None)

    def settings_at(self, step: int | None) -> Settings:
        """The settings in force in a step; None is the end."""
        return settings_in_force((), self.history.events_since(0)[0], step)

    def __repr__(self) -> str:
        return f"<Branch {self.name}: {self.history.total_rows} steps, left at step {self.left_at}>"
