"""A limit for the memory of a step, and the error of the step that goes above it."""

from __future__ import annotations

import math

import torch

from amp_widgets.core.memory.profile import memory_text, phase_in_words
from amp_widgets.errors import AmpWidgetsError, SettingsError


class MemoryBudgetError(AmpWidgetsError, torch.OutOfMemoryError):
    """An op of a step went above ``memory_budget``; what it had made was dropped.

    Whoever catches ``torch.OutOfMemoryError`` catches this, too.
    """


def budget_in_bytes(value: object) -> float | None:
    """A number of bytes, checked; None for no budget.

    Raises
    ------
    SettingsError
        When it is no finite number above 0.
    """
    if value is None:
        return None
    if isinstance(value, (bool, str, bytes)):
        number = math.nan
    else:
        try:
            number = float(value)  # type: ignore[arg-type]  # of NumPy and torch, too
        except (TypeError, ValueError, OverflowError):
            number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise SettingsError(
            f"memory_budget: got {value!r}, expected a number of bytes above 0, such as 200e6 for 200 MB, or None for no budget"
        )
    return number


def above_budget_text(
    *,
    phase: str,
    layer: str,
    operator: str,
    requested_bytes: float,
    allocated_bytes: float,
    limit_bytes: float,
    state_alone: bool | None = None,
) -> str:
    """The message of a `MemoryBudgetError`: got, expected, what to do.

    Parameters
    ----------
    state_alone
        Whether nothing that is held was made by the step; None: that is so if too much is held already.
    """
    held = memory_text(allocated_bytes)
    limit = memory_text(limit_bytes)
    if allocated_bytes > limit_bytes if state_alone is None else state_alone:
        got = f"got {held} held before the step made anything: by model, gradients, optimizer state and batch alone"
        advice = "raise memory_budget, or free memory or take a smaller model: no batch size and no checkpointing can help here"
    else:
        where = f"{phase_in_words(phase)}{f' of {layer}' if layer else ''}{f' ({operator})' if operator else ''}"
        got = f"got {memory_text(requested_bytes)} more {where}, with {held} held already"
        advice = "checkpoint layers, use autocast or a smaller batch (session.out_of_memory.report says what would have fitted)"
        advice += ", or raise memory_budget"
    return f"memory_budget: {got}; expected at most {limit} at a time: {advice}"
