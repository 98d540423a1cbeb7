"""Which thread this is, by a number that no other thread ever has.

``threading.get_ident`` gives a new thread the number of one that has ended, often at once: who compares with a number that was
noted earlier may take the one for the other. For what is noted and compared within one step, that does no harm.
"""

from __future__ import annotations

import itertools
import threading
import weakref


class _Thread:
    """Alive as long as the thread whose it is."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        _alive[self.number] = self


class _Local(threading.local):
    """Made anew on each thread, and freed with it."""

    def __init__(self) -> None:
        self.thread = _Thread()


_numbers = itertools.count(1)
_alive: weakref.WeakValueDictionary[int, _Thread] = weakref.WeakValueDictionary()
_local = _Local()


def this_thread() -> int:
    """The number of the calling thread, above 0; the same one each time."""
    return _local.thread.number


def is_alive(thread: int | None) -> bool:
    """Whether a thread has not ended.

    Parameters
    ----------
    thread
        Its number; None and numbers that no thread has had are those of none.
    """
    return thread in _alive
