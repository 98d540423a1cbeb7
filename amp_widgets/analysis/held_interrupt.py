"""Ctrl-C held back for as long as something must not be broken off in the middle, and noted where it may get lost."""

from __future__ import annotations

import contextlib
import inspect
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from amp_widgets.analysis.left_frames import frames_cleared


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """A SIGINT that comes within is given to the handler in force when it ends; on the main thread, which alone handles them.

    For fake steps: an exception that Python raises within a dispatch mode that autograd's engine has called leaves torch's record
    of the modes in disorder, and the next operator then ends the process.
    """
    handler = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if handler is None or handler == signal.SIG_IGN:  # another thread, or a handler that is not Python's
        yield
        return
    came: list[int] = []  # without the frames, which hold all that was at hand then

    def hold(number: int, frame: FrameType | None) -> None:
        came.append(number)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is hold:  # what ran within may have set one of its own
            signal.signal(signal.SIGINT, handler)
        if came and callable(handler):
            handler(came[-1], inspect.currentframe())
        elif came:
            signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def interrupts_noted() -> Iterator[None]:
    """A SIGINT that comes within is raised as ever, by the handler in force, and noted, so that it is not lost.

    Python drops what is raised in the callback of a weak reference, in ``__del__`` or while garbage is collected, and a
    ``KeyboardInterrupt`` that comes just then with it. `raise_lost_interrupt` raises it at the next place where it is called, or
    it is raised at the end; so is one that the user's code has caught. On other threads than the main one, which alone handles
    signals, and where the handler is not Python's, nothing is noted.

    Whatever is raised leaves nothing in the frames that it has left, see `frames_cleared`.
    """
    with frames_cleared(), _noted():
        yield


def raise_lost_interrupt() -> None:
    """To be called before what takes long.

    Raises
    ------
    KeyboardInterrupt
        When one was raised within `interrupts_noted` on this thread, and has not ended what is within.
    """
    noting = _here.noting
    if noting is not None and noting.came:
        noting.came = False
        raise KeyboardInterrupt


@contextlib.contextmanager
def _noted() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if not callable(handler):
        yield
        return
    around = _here.noting
    noting = _Noting(handler, came=around is not None and around.came)
    try:
        try:  # and no further one: an interrupt at its beginning would be outside of all of them
            _here.noting = noting
            signal.signal(signal.SIGINT, noting)
            yield
            raise_lost_interrupt()
        except Exception:
            raise_lost_interrupt()
            raise
        finally:
            noting.end(around)
    finally:
        noting.end(around)  # an interrupt may have come in the midst of the first


class _Noting:
    """A handler that calls another one."""

    def __init__(self, handler: Callable[[int, FrameType | None], object], *, came: bool) -> None:
        self._handler = handler
        self.came = came

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self._handler(number, frame)
        except KeyboardInterrupt:
            self.came = True
            raise

    def end(self, around: _Noting | None) -> None:
        """The handler of before is in force again, unless what ran within has set one of its own; may be called again."""
        in_force: object = signal.getsignal(signal.SIGINT)
        if in_force is self:
            signal.signal(signal.SIGINT, self._handler)
        _here.noting = around


class _Here(threading.local):
    noting: _Noting | None = None


_here = _Here()
