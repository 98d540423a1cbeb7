"""What the loop of a run holds besides what a plain training step does, by the peaks of its newest steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from amp_widgets.core.history import Event
from amp_widgets.core.loop import LiveLoop
from amp_widgets.core.memory.profile import memory_text
from amp_widgets.core.settings import FIELD_NAMES, Settings
from amp_widgets.language import marked

MARGIN, MOST_MARGIN_BYTES = 1e-3, 4000.0
"""What is promised besides a predicted peak, as a share of it, and at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewestPeaks:
    """Of the newest measured steps, all of them with the same settings.

    Attributes
    ----------
    settings
        Those that were in force then.
    peak_bytes
        The highest.
    end_bytes
        The most that was held at the end of one.
    first
        Whether there is only the first step with these settings.
    """

    settings: Settings
    peak_bytes: float
    end_bytes: float
    first: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Besides:
    """What every step of a loop holds more.

    Attributes
    ----------
    keeps_gradients
        Whether those of the step before are there from the beginning to the end of a step.
    more_bytes
        What is held in addition.
    note
        A sentence about it; empty where there is nothing to say.
    """

    keeps_gradients: bool
    more_bytes: float
    note: str

    def promised(self, peak_bytes: float) -> float:
        """Of a predicted peak: with what the loop holds besides, and the margin."""
        peak = peak_bytes + self.more_bytes
        return peak + min(MARGIN * peak, MOST_MARGIN_BYTES)

    def room(self, budget_bytes: float) -> float:
        """The highest predicted peak of which what is promised is within a budget; 0 where there is none."""
        return max(0.0, max(budget_bytes / (1 + MARGIN), budget_bytes - MOST_MARGIN_BYTES) - self.more_bytes)


NOTHING_BESIDES = Besides(keeps_gradients=False, more_bytes=0.0, note="")


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """Of a predicted step: its peak, that of the first one with its layers, and what is held at its end."""

    peak_bytes: float
    first_peak_bytes: float
    end_bytes: float


def newest_peaks(loop: LiveLoop) -> NewestPeaks | None:
    """What was measured of the newest steps, with the settings of then; None where nothing was, or it is counted otherwise."""
    if loop.device.type != "cpu":
        return None  # peaks of an allocator, in which other things are, too
    history = loop.history_so_far
    rows = history.columns("step", "peak_bytes", "allocated_bytes")
    which = np.flatnonzero(np.isfinite(rows["peak_bytes"]))
    if not len(which):
        return None
    newest = int(rows["step"][which].max())
    applied = [event for event in history.events("applied") if event.step <= newest]
    begun = max((event.step for event in applied), default=0)
    which = which[rows["step"][which] >= begun]
    later = which[rows["step"][which] > begun]
    first = not len(later)
    which = (which if first else later)[-_STEPS:]
    ends = rows["allocated_bytes"][which]
    return NewestPeaks(
        settings=_settings_after(applied),
        peak_bytes=float(rows["peak_bytes"][which].max()),
        end_bytes=float(np.fmax.reduce(ends)),
        first=first,
    )


def besides_of(measured: NewestPeaks, plain: Expected, keeping: Callable[[], Expected]) -> Besides:
    """Compare measured steps with predicted ones.

    What is above the prediction has to be explained by gradients that are kept, and by what is held when a step is over.
    More than that is taken for another batch, which the history does not tell from this one, and does not count.

    Parameters
    ----------
    plain
        The step as it is mostly written, in which gradients are set to None before.
    keeping
        Predicts the same step with gradients kept.
    """
    more = _above(measured, plain)
    if more <= _SLACK_BYTES:
        return NOTHING_BESIDES
    held = measured.end_bytes - plain.end_bytes
    held = held if math.isfinite(held) and held > 0 else 0.0
    tolerance = _SLACK * plain.peak_bytes
    kept_note = (
        f"your loop holds {memory_text(more)} more than a plain step, such as outputs, losses or an average of the weights that "
        "are kept; counted in every peak"
    )
    if more <= held + _SLACK_BYTES:  # an average of the weights is as large as the gradients, but is there at the end besides
        return Besides(keeps_gradients=False, more_bytes=more, note=kept_note)
    kept = keeping()
    gradients = max(0.0, kept.peak_bytes - plain.peak_bytes)
    if more > held + gradients + tolerance:
        note = (
            f"the newest steps held {memory_text(more)} more than is predicted for this batch: they had another one, or keep "
            "something within the step; that is not counted"
        )
        return Besides(keeps_gradients=False, more_bytes=0.0, note=note)
    if (rest := _above(measured, kept)) >= -MARGIN * kept.peak_bytes and gradients > _SLACK_BYTES:
        rest = rest if rest > _SLACK_BYTES else 0.0
        also = f", and {memory_text(rest)} of other things" if rest else ""
        note = (
            f"your loop holds {memory_text(more)} more than a plain step: gradients kept from one step to the next{also}; "
            "counted in every peak"
        )
        return Besides(keeps_gradients=True, more_bytes=rest, note=note)
    return Besides(keeps_gradients=False, more_bytes=more, note=kept_note)


EARLIER = marked("what your loop holds was seen in steps with other settings: none was measured with those in force")
"""A note where it was."""
_STEPS = 16
"""So many of the newest are looked at: those of accumulation are not alike."""
_SLACK_BYTES = 256.0
"""A loss that is alive in the next step is nothing to talk about."""
_SLACK = 0.01


def _settings_after(applied: Iterable[Event]) -> Settings:
    """A session begins with the defaults."""
    changes = {name: value for event in applied for name, value in event.detail.items() if name in FIELD_NAMES}
    return Settings(**changes)


def _above(measured: NewestPeaks, expected: Expected) -> float:
    return measured.peak_bytes - (expected.first_peak_bytes if measured.first else expected.peak_bytes)
