"""Where a replay stands, and how it moves: by a clock, by hand, or with a file that grows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from amp_widgets.widgets.replay_course import Course

Mode = Literal["still", "playing", "following"]

SPEEDS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)
"""Times as fast as the run was."""
SHORTEST_PLAY_S = 20.0
"""A run is played at a speed, at first, at which it takes at least so long, if one of `SPEEDS` is fast enough."""


class Playback:
    """A position in a run, by rows. It moves when it is asked where it is; nothing happens between.

    Parameters
    ----------
    course
        Of the run.
    clock
        Seconds, monotonic.

    Attributes
    ----------
    row
        The row that is shown; -1 where the run has none.
    mode
        ``"playing"``: it moves with the clock. ``"following"``: it stays at the end, however far that moves.
    """

    def __init__(self, course: Course, clock: Callable[[], float]) -> None:
        self._course = course
        self._clock = clock
        self.row = course.rows - 1
        self.mode: Mode = "still"
        self._speed = _first_speed(course.duration_s)
        self._from = (0.0, 0.0)  # the clock when playing began or changed its speed, and seconds of the run then

    @property
    def speed(self) -> float:
        """Times as fast as the run was."""
        return self._speed

    def play(self) -> None:
        """Go on from here; from the end, from the beginning."""
        if self._course.is_end(self.row):
            self.row = min(0, self._course.rows - 1)
        self.mode = "playing"
        self._mark()

    def pause(self) -> None:
        """Stay here."""
        self.advance()
        self.mode = "still"

    def follow(self) -> None:
        """Go to the end, and stay there."""
        self.mode = "following"
        self.row = self._course.rows - 1

    def seek(self, row: int) -> None:
        """Go to a row. It plays on from there; but who follows a run stays with it no longer."""
        self.row = min(max(row, min(0, self._course.rows - 1)), self._course.rows - 1)
        if self.mode == "following":
            self.mode = "still"
        self._mark()

    def set_speed(self, speed: float) -> None:
        """Play so many times as fast as the run was; one of `SPEEDS`."""
        if speed in SPEEDS:
            self.advance()
            self._speed = speed
            self._mark()

    def advance(self) -> int:
        """Where it is now: it is moved there. At the end of the run it stops."""
        if self.mode == "following":
            self.row = self._course.rows - 1
        elif self.mode == "playing":
            began_s, played_s = self._from
            now_s = played_s + (self._clock() - began_s) * self._speed
            self.row = max(self.row, self._course.row_played(now_s))
            if self._course.is_end(self.row):
                self.mode = "still"
        return self.row

    def _mark(self) -> None:
        self._from = (self._clock(), self._course.played_s(self.row))


def _first_speed(duration_s: float) -> float:
    if duration_s <= 2 * SHORTEST_PLAY_S:
        return 1.0
    return max((speed for speed in SPEEDS if speed <= duration_s / SHORTEST_PLAY_S), default=1.0)
