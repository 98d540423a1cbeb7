"""What a loop needs to go back to an earlier step, and to come from there to a later one once more."""

from __future__ import annotations

import dataclasses

from amp_widgets.core.journal import Journal
from amp_widgets.core.requests import RequestQueue
from amp_widgets.core.settings import Settings


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """How a loop stands between two steps.

    Attributes
    ----------
    step
        Steps completed.
    settings
        In force.
    scalers
        Of each scaler, the live scale and its growth tracker.
    """

    step: int
    settings: Settings
    scalers: tuple[tuple[float, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Rehearsal:
    """Steps that were trained before are trained again.

    Attributes
    ----------
    queue
        The requests that were applied then.
    journal
        Where they are recorded.
    """

    queue: RequestQueue
    journal: Journal
