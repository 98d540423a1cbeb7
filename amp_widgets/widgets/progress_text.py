"""How far something is that takes long, in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from amp_widgets.analysis.comparison import Progress
from amp_widgets.analysis.progress_bar import left_text
from amp_widgets.language import in_language, say


class Awaited(Protocol):
    """How something stands that was asked for; an `Inspection` or a `ComparisonStatus` is one."""

    @property
    def pending(self) -> bool: ...
    @property
    def cancelling(self) -> bool: ...
    @property
    def progress(self) -> Progress | None: ...


def progress_text(status: Awaited, done: Callable[[Progress], str]) -> str:
    """What is being done, how far that is and the time left; nothing where nothing is awaited.

    Parameters
    ----------
    status
        How it stands.
    done
        How far, in words.
    """
    if not status.pending:
        return ""
    progress = status.progress
    if status.cancelling:
        return say("Ends after the step in progress …")
    if progress is None:
        return say("Begins when the step in progress is over …")
    return " · ".join(filter(None, (in_language(progress.doing), done(progress), in_language(left_text(progress.seconds_left)))))
