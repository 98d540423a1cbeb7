"""A limit for the memory of a step, and the error of the step that goes above it."""

from __future__ import annotations

import math
import re

import numpy as np
import torch

from amp_widgets.core.memory.profile import memory_text, place_in_words
from amp_widgets.errors import AmpWidgetsError, SettingsError

LEAST_BARE = 1e6
"""Bytes: of a smaller number that is written without a unit, that is taken to be forgotten."""


class MemoryBudgetError(AmpWidgetsError, torch.OutOfMemoryError):
    """An op of a step went above ``memory_budget``; what it had made was dropped.

    Whoever catches ``torch.OutOfMemoryError`` catches this, too.
    """


def checked_budget(value: object, verb: str) -> float:
    """A number of bytes to fit into: a number, of NumPy and torch, too, or a text that `typed_size` can read, as ``"8 GB"``.

    Parameters
    ----------
    value
        What was given.
    verb
        What is being done, for messages.

    Raises
    ------
    SettingsError
        When it is no finite number above 0, or a text without a unit.
    """
    number = _positive(value)
    if number is None:
        if (bare := without_unit(value)) is not None:
            raise SettingsError(f"{verb}: budget_bytes: {bare}")
        raise SettingsError(
            f'{verb}: budget_bytes: got {_shown(value)}, expected a number of bytes above 0, such as 8e9 for 8 GB, or "8 GB"'
        )
    return number


def budget_in_bytes(value: object) -> float | None:
    """A limit for steps in bytes, checked as by `checked_budget`; None for none.

    Raises
    ------
    SettingsError
        When it is no finite number above 0, or a text without a unit.
    """
    number = None if value is None else _positive(value)
    if value is not None and number is None:
        if (bare := without_unit(value)) is not None:
            raise SettingsError(f"memory_budget: {bare}")
        raise SettingsError(
            f"memory_budget: got {_shown(value)}, expected a number of bytes above 0, such as 200e6 for 200 MB, "
            'a text such as "200 MB", or None for no budget'
        )
    return number


def typed_size(text: str) -> float | None:
    """``"200MB"``, ``"1.5GiB"`` or ``"200e6"`` → bytes; ``"off"`` → None.

    kB, MB, GB and TB are powers of 1000; KiB, MiB, GiB and TiB of 1024.

    Raises
    ------
    SettingsError
        When it is no size, or a number below `LEAST_BARE` without a unit.
    """
    if text.strip().lower() in ("off", "none"):
        return None
    if (bare := without_unit(text)) is not None:
        raise SettingsError(bare)
    found = _SIZE.fullmatch(text.strip())
    unit = "" if found is None else found[2].lower()
    if found is None or unit not in _UNITS:
        raise SettingsError(
            f"got {text!r}, expected a size such as 200MB, 1.5GiB or 200e6 (bytes), or off; units: kB MB GB TB "
            "(powers of 1000) and KiB MiB GiB TiB (of 1024)"
        )
    return float(found[1]) * _UNITS[unit]


def without_unit(value: object) -> str | None:
    """What is wrong with a text that is a number below `LEAST_BARE` without a unit; None for everything else.

    >>> without_unit("60")
    "got '60' without a unit, expected one with so small a number, such as 60 MB"
    """
    if not isinstance(value, str) or (found := _SIZE.fullmatch(value.strip())) is None or found[2]:
        return None
    if not 0 < float(found[1]) < LEAST_BARE:
        return None
    return f"got {value!r} without a unit, expected one with so small a number, such as {value.strip()} MB"


def told_apart(*sizes_bytes: float) -> tuple[str, ...]:
    """As `memory_text`, with as many more decimals as sizes need that differ.

    >>> told_apart(8e6, 8_000_004), told_apart(8e6, 9e6)
    (('8.000000 MB', '8.000004 MB'), ('8.0 MB', '9.0 MB'))
    """
    texts = tuple(map(memory_text, sizes_bytes))
    for decimals in range(2, 10):
        if len(set(texts)) == len(set(sizes_bytes)):
            break
        texts = tuple(_with_decimals(size, decimals) for size in sizes_bytes)
    return texts


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
    held, limit = told_apart(allocated_bytes, limit_bytes)
    if allocated_bytes > limit_bytes if state_alone is None else state_alone:
        got = f"got {held} held before the step made anything: by model, gradients, optimizer state and batch alone"
        advice = "raise memory_budget, or free memory or take a smaller model: no batch size and no checkpointing can help here"
    else:
        got = f"got {memory_text(requested_bytes)} more {place_in_words(phase, layer, operator)}, with {held} held already"
        advice = "checkpoint layers, use autocast or a smaller batch (session.out_of_memory.report says what would have fitted)"
        advice += ", or raise memory_budget"
    return f"memory_budget: {got}; expected at most {limit} at a time: {advice}"


def _positive(value: object) -> float | None:
    """A finite number of bytes above 0; None where it is none."""
    try:
        if isinstance(value, str):
            number = typed_size(value)
        elif isinstance(value, (bool, np.bool_, bytes, bytearray)) or getattr(value, "dtype", None) == torch.bool:
            return None
        else:
            number = float(value)  # type: ignore[arg-type]  # of NumPy and torch, too
    except Exception:  # whatever an object does that is no number
        return None
    return number if number is not None and math.isfinite(number) and number > 0 else None


def _with_decimals(size_bytes: float, decimals: int) -> str:
    """In the unit that `memory_text` takes."""
    unit = memory_text(size_bytes).rsplit(" ")[-1]
    factor = _UNITS[unit.lower()]
    return f"{size_bytes / factor:,.{decimals if factor > 1 else 0}f} {unit}"


def _shown(value: object) -> str:
    """Its repr, if that can be had and is short."""
    try:
        text = repr(value)
    except Exception:  # an int of too many digits, or the object's own
        return f"an object of type {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({type(value).__name__})"


_SHOWN = 60  # characters
_SIZE = re.compile(r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)\s*([A-Za-z]*)")
_UNITS = {"": 1, "b": 1, "k": 1e3, "kb": 1e3, "mb": 1e6, "m": 1e6, "gb": 1e9, "g": 1e9, "tb": 1e12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
