"""When a run began, by its first row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt


def began_s(columns: Mapping[str, npt.NDArray[Any]]) -> float:
    """When the first step began, in seconds since the history did: a row's ``time_s`` is of its end. NaN without a row.

    Parameters
    ----------
    columns
        ``time_s`` and ``step_s``, from the first row on.
    """
    if not columns["time_s"].size:
        return math.nan
    first_s = float(columns["step_s"][0])
    return float(columns["time_s"][0]) - (first_s if math.isfinite(first_s) else 0.0)
