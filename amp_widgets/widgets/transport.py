"""Moving through a recorded run: play, pause, speed, a step by slider or number, follow."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import traitlets

from amp_widgets.charts.labels import shortened
from amp_widgets.core.history import Event
from amp_widgets.language import reason_in_language, say
from amp_widgets.widgets.control import Control, page_script, page_style
from amp_widgets.widgets.playback import SPEEDS, Mode, Playback
from amp_widgets.widgets.replay_course import Course
from amp_widgets.widgets.state import DashboardState

Move = Literal["play", "pause", "follow", "begin", "end", "before", "after"]
MOVES: tuple[Move, ...] = get_args(Move)
MARKED = ("applied", "rejected", "note", "run", "out_of_memory")
"""Kinds of events that the slider has a mark for, and that `"before"` and `"after"` go to."""
MOST_MARKS = 300
LABEL_CHARACTERS = 200


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TransportState:
    """All that a transport shows.

    Attributes
    ----------
    first, last, step
        Of the run, and that which is shown; -1 where there is no step.
    mode
        How it moves.
    at_end
        Whether it is at the end of the run.
    speed
        Times as fast as the run was.
    played_s, duration_s
        Of the run, without its pauses.
    """

    first: int
    last: int
    step: int
    mode: Mode
    at_end: bool
    speed: float
    played_s: float
    duration_s: float

    @classmethod
    def of(cls, course: Course, playback: Playback) -> TransportState:
        """How things stand."""
        row = playback.row
        return cls(
            first=course.first_step,
            last=course.last_step,
            step=course.step_at(row),
            mode=playback.mode,
            at_end=course.is_end(row),
            speed=playback.speed,
            played_s=course.played_s(row),
            duration_s=course.duration_s,
        )


class Transport(Control):
    """Asks with ``request(move)``, ``request("seek", step=n)`` and ``request("speed", speed=x)``.

    Parameters
    ----------
    request
        Called with what the user asks for.
    state
        What to show first.
    sentence
        What it is that is moved through.
    """

    _esm = page_script("transport")
    _css = page_style("replay")

    first = traitlets.Int().tag(sync=True)
    last = traitlets.Int(help="-1: the run has no step.").tag(sync=True)
    step = traitlets.Int().tag(sync=True)
    mode = traitlets.Unicode().tag(sync=True)
    at_end = traitlets.Bool().tag(sync=True)
    speed = traitlets.Float().tag(sync=True)
    speeds: traitlets.List[Any] = traitlets.List(list(SPEEDS)).tag(sync=True)
    time = traitlets.Unicode(help="How far into the run, and how long it is.").tag(sync=True)
    marks: traitlets.List[Any] = traitlets.List(help="Of each: step and label, ascending.").tag(sync=True)
    sentence = traitlets.Unicode().tag(sync=True)

    def __init__(self, request: Callable[..., None], state: TransportState, *, sentence: str) -> None:
        super().__init__(request)
        self._put({"sentence": sentence})
        self.show(state)

    def show(self, state: TransportState) -> None:
        """Show this; nothing is sent when it is what is shown."""
        self._put(
            {
                "first": state.first,
                "last": state.last,
                "step": state.step,
                "mode": state.mode,
                "at_end": state.at_end,
                "speed": state.speed,
                "time": _time_text(state.played_s, state.duration_s),
            }
        )

    def mark(self, events: Sequence[Event]) -> None:
        """Mark these on the slider, as far as they are of a kind that has marks."""
        marked: dict[int, list[Event]] = {}
        for event in events:
            if event.kind in MARKED:
                marked.setdefault(event.step, []).append(event)
        steps = sorted(marked)
        every = math.ceil(len(steps) / MOST_MARKS) or 1
        self._put({"marks": [[step, "; ".join(map(_label, marked[step][:3]))] for step in steps[::every]]})

    def _traits_for(self, state: DashboardState) -> dict[str, Any]:
        return {}  # it shows a `TransportState`

    def _ask(self, message: Mapping[str, Any]) -> None:
        match message:
            case {"move": str(move)} if move in MOVES:
                self._request(move)
            case {"speed": int() | float() as speed} if speed in SPEEDS:
                self._request("speed", speed=float(speed))
            case {"step": int() | float() as step} if math.isfinite(step):
                self._request("seek", step=step)
            case {"typed": str(text)}:
                step_typed = _number(text)
                if step_typed is not None:
                    self._request("seek", step=step_typed)


def _label(event: Event) -> str:
    return shortened(reason_in_language(event), LABEL_CHARACTERS)


def _number(text: str) -> int | None:
    """A step as it is typed: ``1200``, ``1,200``, ``1e5``."""
    try:
        number = float(text.replace(",", "").replace("_", "").strip())
        return int(number) if math.isfinite(number) else None
    except ValueError:
        return None


def _time_text(played_s: float, duration_s: float) -> str:
    """How far, and how long in all, alike.

    >>> _time_text(3.25, 8.0), _time_text(61.0, 125.0), _time_text(61.0, 7200.0)
    ('3.2 s of 8.0 s', '1:01 of 2:05', '0:01:01 of 2:00:00')
    """
    if duration_s < 60:
        return say("{played_s} s of {duration_s} s", played_s=f"{played_s:.1f}", duration_s=f"{duration_s:.1f}")
    return say("{played_s} of {duration_s}", played_s=_clock(played_s, duration_s), duration_s=_clock(duration_s, duration_s))


def _clock(seconds: float, longest_s: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    if longest_s < 3600:
        return f"{minutes}:{rest:02}"
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
