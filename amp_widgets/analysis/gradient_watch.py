"""What a loop has seen of its gradients, and what it is to look at: see `amp_widgets.session.AmpSession`."""

from __future__ import annotations

from amp_widgets.analysis.gradients import GradientRange
from amp_widgets.analysis.overflow import diagnose, skip_runs, summarised
from amp_widgets.core.loop import LiveLoop
from amp_widgets.errors import SettingsError
from amp_widgets.language import Sentence


def gradient_range(loop: LiveLoop, *, wait: bool) -> GradientRange | None:
    """How large the gradients of the newest counted step are; None when no step was counted."""
    counts = loop.numerics.gradients.newest(wait=wait)
    return None if counts is None else GradientRange.of(counts)


def count_gradients(loop: LiveLoop, every: int | None) -> None:
    """Count them in the next step (None), in every so many-th, or in none (0).

    Raises
    ------
    SettingsError
        When `every` is no whole number of steps.
    """
    if every is None:
        loop.numerics.gradients.count_next_step()
    elif type(every) is int and every >= 0:
        loop.numerics.gradients.every = every
    else:
        raise SettingsError(
            f"every: got {every!r}, expected a whole number of steps, 0 for none, or None; call count_gradients() for the "
            "next step, and count_gradients(every=10) for every tenth"
        )


def skip_report(loop: LiveLoop) -> tuple[str, ...]:
    """Why steps were skipped, oldest first, and then what is wrong with how the loss scale behaves."""
    history, overflow = loop.history, loop.numerics.overflow
    ranges = tuple(map(GradientRange.of, loop.numerics.gradients.counts))
    runs = summarised(skip_runs(history, overflow.notes, ranges))
    wrong = diagnose(history, overflow.notes, overflow.refused, ranges)
    said = (*(f"{run.sentence}." for run in runs), *(f"{one.sentence}. {one.cause}." for one in wrong))
    return tuple(map(Sentence, said))
