"""Ctrl-C held back for as long as something must not be broken off in the middle."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


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
    came: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        came.append((number, frame))

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is hold:  # what ran within may have set one of its own
            signal.signal(signal.SIGINT, handler)
        if came and callable(handler):
            handler(*came[-1])
        elif came:
            signal.raise_signal(signal.SIGINT)
