"""Which steps are profiled by themselves, and what their profiles are called."""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Sequence

from amp_widgets.core.settings import Settings, describe_settings

PROFILED = 2
"""Of the steps with one combination the second: the first one compiles, and makes the optimizer's state."""
MOST_TRIES = 3
"""A step may break off before it has a profile, or cannot be profiled: then the next ones are tried, up to so many."""


class ProfilePlan:
    """Chooses the steps to be profiled by themselves: one after each change of autocast or of the checkpointed layers.

    A combination that was in force before is profiled again when it comes back: what one compares is before and after a change.
    Nothing else of the settings makes a difference to memory.
    """

    def __init__(self) -> None:
        self._settings: Settings | None = None
        self._combination: object = None
        self._done = False
        self._begun = 0
        self._last_step = -1
        self._tries: list[str] = []

    def label_for(self, step: int, settings: Settings, taken: Collection[str]) -> str | None:
        """Ask at the beginning of each step.

        Parameters
        ----------
        step
            Its number in the history.
        settings
            What is in force for it.
        taken
            The labels of the profiles that are kept.

        Returns
        -------
        str or None
            None: do not profile this step. Else a label for the profile, which is not in `taken`.
        """
        if settings is not self._settings:
            self._settings = settings
            combination = settings.autocast, frozenset(settings.checkpointed), frozenset(settings.fp32_layers)
            if combination != self._combination:
                self._combination, self._done = combination, False
                self._begun, self._last_step, self._tries = 0, -1, []
        if self._done:
            return None
        if step != self._last_step:  # else the one before has broken off, and counts as none
            self._begun += 1
            self._last_step = step
        if self._begun < PROFILED:
            return None
        self._done = len(self._tries) >= MOST_TRIES or any(label in taken for label in self._tries)
        if self._done:
            return None
        label = free_label(describe_settings(settings), step, taken)
        self._tries.append(label)
        return label


def free_label(label: str, step: int, taken: Collection[str]) -> str:
    """`label`, with the step where it is `taken` already; what a user wrote, a `Said`, stays one.

    >>> free_label("fp32", 240, {"fp16"}), free_label("fp32", 240, {"fp32"}), free_label("fp32", 7, {"fp32", "fp32 (step 7)"})
    ('fp32', 'fp32 (step 240)', 'fp32 (step 7, 2)')
    """
    if label not in taken:
        return label
    stepped = f"{label} (step {step})"
    number = 1
    while stepped in taken:
        number += 1
        stepped = f"{label} (step {step}, {number})"
    return type(label)(stepped)


def without_step(label: str) -> str:
    """`label` without what `free_label` has added; what a user wrote, a `Said`, stays one.

    >>> without_step("fp32"), without_step("fp32 (step 240)"), without_step("fp32 (step 7, 2)")
    ('fp32', 'fp32', 'fp32')
    """
    return type(label)(_STEP.sub("", label))


def combination_of(label: str, checkpointed: Iterable[str]) -> tuple[str, tuple[str, ...]]:
    """What is the same for profiles of the same settings: the label without its step, and the layers."""
    return without_step(label), tuple(checkpointed)


def positions_kept(combinations: Sequence[Hashable], most: int) -> list[int]:
    """Which profiles to keep, by their positions.

    The newest of each combination is what the others are compared with: it goes last. First goes the oldest of those that have
    a newer one of the same combination, and when there is none, the oldest.

    Parameters
    ----------
    combinations
        Of each profile, the oldest first, see `combination_of`.
    most
        So many are kept at most.

    >>> positions_kept(["fp32", "bf16", "bf16", "bf16"], 3), positions_kept(["fp32", "bf16", "fp16"], 2)
    ([0, 2, 3], [1, 2])
    """
    left = list(range(len(combinations)))
    while len(left) > most:
        newest = {combinations[position]: position for position in left}
        left.remove(next((position for position in left if newest[combinations[position]] != position), left[0]))
    return left


_STEP = re.compile(r" \(step \d+(, \d+)?\)$")
