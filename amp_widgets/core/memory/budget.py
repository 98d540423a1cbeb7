"""A limit for the memory of a step, and the error of the step that goes above it."""

from __future__ import annotations

import math
import re

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


def typed_size(text: str) -> float | None:
    """``"200MB"``, ``"1.5GiB"`` or ``"200e6"`` → bytes; ``"off"`` → None.

    kB, MB, GB and TB are powers of 1000; KiB, MiB, GiB and TiB of 1024.

    Raises
    ------
    SettingsError
        When it is no size.
    """
    if text.strip().lower() in ("off", "none"):
        return None
    found = _SIZE.fullmatch(text.strip())
    unit = "" if found is None else found[2].lower()
    if found is None or unit not in _UNITS:
        raise SettingsError(
            f"got {text!r}, expected a size such as 200MB, 1.5GiB or 200e6 (bytes), or off; units: kB MB GB TB "
            "(powers of 1000) and KiB MiB GiB TiB (of 1024)"
        )
    return float(found[1]) * _UNITS[unit]


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


_SIZE = re.compile(r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)\s*([A-Za-z]*)")
_UNITS = {"": 1, "b": 1, "k": 1e3, "kb": 1e3, "mb": 1e6, "m": 1e6, "gb": 1e9, "g": 1e9, "tb": 1e12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
