"""The comparisons of one session, one at a time: how the one that is being made stands, and the newest result."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from amp_widgets.analysis.comparison import Comparison, Progress
from amp_widgets.errors import AmpWidgetsError


class Compare(Protocol):
    """`amp_widgets.analysis.compare.compare` of a loop, a batch and a grid."""

    def __call__(self, *, on_progress: Callable[[Progress], None], cancelled: Callable[[], bool]) -> Comparison: ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ComparisonStatus:
    """How the comparisons of a session stand; the same object as long as nothing has changed.

    Attributes
    ----------
    result
        The newest there is, or None.
    step
        Steps completed when that was made.
    pending
        Whether one was asked for and is not there yet.
    progress
        How far that is; None before its first step.
    cancelling
        Whether that is to be ended early.
    cancelled
        Whether the last one that was asked for was ended before anything in it was complete.
    why_not
        Why the last one that was asked for could not be made, or None; begins with ``compare:``.
    """

    result: Comparison | None = None
    step: int = 0
    pending: bool = False
    progress: Progress | None = None
    cancelling: bool = False
    cancelled: bool = False
    why_not: str | None = None


class Comparisons:
    """Makes comparisons, and keeps the newest. May be asked from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._status = ComparisonStatus()
        self._cancel = threading.Event()

    @property
    def status(self) -> ComparisonStatus:
        """How they stand."""
        return self._status

    def ask(self) -> bool:
        """Note that one is asked for; False where one is already."""
        with self._lock:
            if self._status.pending:
                return False
            self._cancel.clear()
            self._put(pending=True, progress=None, cancelling=False)
            return True

    def cancel(self) -> None:
        """End the one that was asked for, at its next step; nothing happens where there is none."""
        with self._lock:
            if self._status.pending:
                self._cancel.set()
                self._put(cancelling=True)

    def carry_out(
        self,
        make: Compare,
        step: int,
        *,
        stopping: Callable[[], bool] = lambda: False,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Comparison:
        """Make the one that was asked for, on the calling thread. What it raises is raised, and kept as `why_not`.

        Parameters
        ----------
        step
            Steps that the session has completed.
        stopping
            Asked before every step; True cancels.
        on_progress
            Called after every step.
        """

        def tell(progress: Progress) -> None:
            with self._lock:
                self._put(progress=progress)
            if on_progress is not None:
                on_progress(progress)

        made: Comparison | None = None
        why_not: str | None = "compare: it was interrupted"
        try:
            made = make(on_progress=tell, cancelled=lambda: self._cancel.is_set() or stopping())
            why_not = None
        except AmpWidgetsError as error:
            why_not = str(error)
            raise
        except Exception as error:  # what the user's model or loss raises
            words = str(error).splitlines()
            why_not = f"compare: {type(error).__name__}: {words[0] if words else ''}"
            raise
        finally:
            with self._lock:
                ended = ComparisonStatus(result=self._status.result, step=self._status.step, why_not=why_not)
                if made is not None and made.rows:
                    ended = ComparisonStatus(result=made, step=step)
                elif made is not None:
                    ended = dataclasses.replace(ended, cancelled=True)
                self._status = ended
        return made

    def _put(self, **changes: object) -> None:
        self._status = dataclasses.replace(self._status, **changes)  # type: ignore[arg-type]  # by name
