"""How often a chart may send: no faster than a page draws, and hardly ever when no page answers."""

from __future__ import annotations

import math
from collections.abc import Callable

FASTEST_S = 0.095
"""A little under 0.1 s, so that a timer of 10 Hz that comes early now and then does not lose every second turn."""
UNANSWERED_S = 0.5
SILENT_S = 5.0
SILENT_AFTER_S = 60.0
MOST_IN_FLIGHT = 2
"""Messages that may be under way unanswered at full speed: one being drawn, one on the wire."""


class Pace:
    """Whether it is time for the next message, from when pages acknowledged the last ones.

    Without an answer there may be no page, or a busy cell that keeps answers from being read while a page is watching; the two
    cannot be told apart. So a chart goes on at 2 Hz for a minute, then at 0.2 Hz.

    Parameters
    ----------
    clock
        Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sent = self._acknowledged = 0
        self._last_sent_s = self._silent_since_s = -math.inf

    def may_send(self) -> bool:
        """Whether the next message may be sent now."""
        now = self._clock()
        if self._sent - self._acknowledged < MOST_IN_FLIGHT:
            wait = FASTEST_S
        else:
            wait = UNANSWERED_S if now - self._silent_since_s < SILENT_AFTER_S else SILENT_S
        return now - self._last_sent_s >= wait

    def sent(self, sequence: int) -> None:
        """Message number `sequence` was sent."""
        self._last_sent_s = self._clock()
        if self._sent == self._acknowledged:
            self._silent_since_s = self._last_sent_s
        self._sent = sequence

    def acknowledged(self, sequence: int) -> None:
        """A page has drawn what it knows up to message number `sequence`."""
        self._acknowledged = max(self._acknowledged, min(sequence, self._sent))
        self._silent_since_s = self._clock()
