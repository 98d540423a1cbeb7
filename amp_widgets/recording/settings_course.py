"""Which settings were in force in which step, from what was written of them and from the events."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from amp_widgets.core.history import Event
from amp_widgets.core.settings import FIELD_NAMES, Settings
from amp_widgets.errors import SettingsError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WrittenSettings:
    """All settings at one moment.

    Attributes
    ----------
    after_events
        So many events had arrived.
    step
        The step that came next.
    settings
        What was in force.
    """

    after_events: int
    step: int
    settings: Settings


def settings_in_force(written: Sequence[WrittenSettings], events: Sequence[Event], step: int | None) -> Settings:
    """The settings in a step: those written last before it, and the changes applied since.

    Parameters
    ----------
    written
        In the order in which they were written.
    events
        All of them, in order of arrival.
    step
        Its number; None is the end.

    Raises
    ------
    SettingsError
        When what was applied cannot have been in force.
    """
    until = math.inf if step is None else step
    seen, settings = 0, Settings()
    for one in written:
        if one.step <= until:
            seen, settings = one.after_events, one.settings
    for event in events[seen:]:
        if event.kind == "applied" and event.step <= until:
            changes = {name: value for name, value in event.detail.items() if name in FIELD_NAMES}
            try:
                settings = settings.replace(**changes)
            except SettingsError as error:
                raise SettingsError(f"a change at step {event.step}: {error}") from None
    return settings
