"""A bar in a cell's output that shows how far a comparison is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from amp_widgets.analysis.comparison import Progress

EVERY_S = 0.1
"""More often it is not drawn."""


class ProgressBar:
    """Shows `Progress` with tqdm; taken away in the end. For the thread that the cell runs on.

    Parameters
    ----------
    clock
        Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._drawn_s = -math.inf
        self._drawn: Progress | None = None
        self._bar: Any = None

    def show(self, progress: Progress | None) -> None:
        """Show this, unless it is shown, or another was drawn a moment ago."""
        now_s = self._clock()
        if progress is None or progress is self._drawn or self._bar is None or now_s - self._drawn_s < EVERY_S:
            return
        self._drawn_s, self._drawn = now_s, progress
        bar = self._bar
        bar.total, bar.n = progress.total, progress.done
        if hasattr(bar, "container"):  # in a notebook, the bar's length follows only reset(), which would show 0 steps
            bar.container.children[1].max = progress.total
        bar.set_description_str(progress.doing, refresh=False)
        bar.set_postfix_str(left_text(progress.seconds_left), refresh=False)
        bar.refresh()

    def __enter__(self) -> ProgressBar:
        from tqdm.auto import tqdm

        words = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps{postfix}"  # tqdm's own time left is another one
        self._bar = tqdm(total=1, desc="compare", leave=False, bar_format=words)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        bar, self._bar = self._bar, None
        bar.total = bar.n  # one that is not full a notebook leaves there, in red
        bar.close()


def left_text(seconds: float) -> str:
    """The time that is left, as far as it is known.

    >>> left_text(3.4), left_text(200.0), left_text(float("nan"))
    ('about 3 s left', 'about 3 min 20 s left', '')
    """
    if math.isnan(seconds):
        return ""
    minutes, rest = divmod(round(seconds), 60)
    return f"about {f'{minutes} min ' if minutes else ''}{rest} s left"
