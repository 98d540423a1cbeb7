"""What takes long and can be asked to end: predicted steps that are not begun any more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from amp_widgets.analysis.fake_step import FakeSteps
from amp_widgets.errors import AmpWidgetsError


class CancelledError(AmpWidgetsError):
    """It was asked to end."""


def stoppable(steps: FakeSteps, cancelled: Callable[[], bool], verb: str) -> FakeSteps:
    """The same, but that asking for a step raises `CancelledError` where it is cancelled."""
    return cast(FakeSteps, _Stoppable(steps, cancelled, verb))


def check_not_cancelled(cancelled: Callable[[], bool], verb: str) -> None:
    """Check that nobody has asked it to end.

    Raises
    ------
    CancelledError
        When somebody has; the message begins with the verb.
    """
    if cancelled():
        raise CancelledError(f"{verb}: it was cancelled")


class _Stoppable:
    def __init__(self, steps: FakeSteps, cancelled: Callable[[], bool], verb: str) -> None:
        self._steps = steps
        self._cancelled = cancelled
        self._verb = verb
        self.batch_size = steps.batch_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._steps, name)

    def step(self, **settings: Any) -> Any:
        check_not_cancelled(self._cancelled, self._verb)
        return self._steps.step(**settings)
