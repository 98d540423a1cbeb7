from __future__ import annotations

import pytest

from amp_widgets.charts.pace import Pace


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def sent_in(pace: Pace, clock: Clock, seconds: float, *, first: int, answer_after: int | None = None) -> list[float]:
    """Times of the messages, tried 100 times a second; with `answer_after` each is answered so many tries later."""
    times: list[float] = []
    due: list[tuple[int, int]] = []
    end = clock.now + seconds
    number = first
    while clock.now < end - 1e-9:
        for answer in [one for one in due if one[0] <= 0]:
            pace.acknowledged(answer[1])
        due = [(wait - 1, sequence) for wait, sequence in due if wait > 0]
        if pace.may_send():
            pace.sent(number)
            times.append(clock.now)
            if answer_after is not None:
                due.append((answer_after, number))
            number += 1
        clock.now += 0.01
    return times


def test_ten_a_second_when_pages_answer() -> None:
    clock = Clock()
    times = sent_in(Pace(clock), clock, 10, first=1, answer_after=5)
    assert 95 <= len(times) <= 106


def test_a_slow_page_gets_what_it_can_draw() -> None:
    clock = Clock()
    times = sent_in(Pace(clock), clock, 20, first=1, answer_after=40)  # 0.4 s each, two under way
    assert 80 <= len(times) <= 105


def test_without_an_answer_twice_a_second_for_a_minute_then_once_in_five_seconds() -> None:
    clock = Clock()
    pace = Pace(clock)
    first_minute = sent_in(pace, clock, 60, first=1)
    assert 118 <= len(first_minute) <= 124
    later = sent_in(pace, clock, 60, first=len(first_minute) + 1)
    assert 11 <= len(later) <= 13


def test_a_late_answer_brings_the_full_rate_back() -> None:
    clock = Clock()
    pace = Pace(clock)
    count = len(sent_in(pace, clock, 90, first=1))
    pace.acknowledged(count)
    assert len(sent_in(pace, clock, 1, first=count + 1, answer_after=2)) >= 9


def test_an_answer_to_an_old_message_shows_that_a_page_is_there() -> None:
    clock = Clock()
    pace = Pace(clock)
    sent_in(pace, clock, 90, first=1)
    pace.acknowledged(3)
    assert len(sent_in(pace, clock, 10, first=1000)) >= 19


@pytest.mark.parametrize("answer", [0, -5, 10**12])
def test_an_answer_that_makes_no_sense_does_no_harm(answer: int) -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.sent(1)
    pace.acknowledged(answer)
    assert len(sent_in(pace, clock, 5, first=2)) <= 12
