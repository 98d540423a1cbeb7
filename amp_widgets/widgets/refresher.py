"""A thread that keeps a dashboard up to date, as long as there is one."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

PULL_S = 0.1
"""Seconds between two looks at something that moves."""


class Refresher:
    """A thread that calls a function again and again, after the time that it returned, until it returns None.

    Parameters
    ----------
    tick
        A weak reference to it: when it is gone, the thread ends.
    """

    def __init__(self, tick: weakref.WeakMethod[Callable[[], float | None]]) -> None:
        self._tick = tick
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="amp_widgets dashboard", daemon=True)

    def start(self) -> None:
        """Start calling."""
        self._thread.start()

    def wake(self) -> None:
        """Call soon, if the next call is further off than `PULL_S`."""
        self._wake.set()

    def stop(self) -> None:
        """Call no more; a call in progress ends by itself."""
        self._stop.set()
        self._wake.set()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        delay_s: float | None = PULL_S
        while delay_s is not None:
            if delay_s > PULL_S:
                self._wake.wait(delay_s - PULL_S)
            self._wake.clear()
            if self._stop.wait(PULL_S):
                return
            tick = self._tick()
            if tick is None:
                return
            delay_s = tick()
            del tick  # while it waits, the thread keeps nothing alive
