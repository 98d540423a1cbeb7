"""From the columns of a history to the lines and marks of the training chart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from amp_widgets.charts.decimate import Points, decimated, evened, level_parts_removed

COLUMNS = ("step", "loss", "scale", "skipped", "allocated_bytes", "peak_bytes", "reserved_bytes")
"""The columns that are drawn."""

SERIES = ("loss", "not_finite", "scale", "skipped", "allocated", "peak", "reserved")
"""Lines: loss; scale (base-2 logarithm of the loss scale); allocated, peak and reserved (bytes). Marks: not_finite (steps whose
loss is not finite, with one of the codes below), skipped (skipped steps, with the logarithm of the scale used)."""
LINES = ("loss", "scale", "allocated", "peak", "reserved")

NAN, POSITIVE_INFINITY, NEGATIVE_INFINITY = 0.0, 1.0, -1.0
LARGEST_DRAWN = 1e300
"""Plotly adds a margin to the range of an axis, which must not overflow."""


def series_of(
    columns: Mapping[str, npt.NDArray[Any]],
    *,
    skipped_steps: npt.NDArray[Any] | None = None,
    loss_known: bool = False,
    last_log2_scale: float = np.nan,
) -> dict[str, Points]:
    """Every series of some rows.

    Parameters
    ----------
    columns
        Name → array of shape (rows,); what is missing counts as not measured.
    skipped_steps
        Skipped steps by the log of events, which may have more of them than the rows, or None.
    loss_known
        A loss was recorded before these rows. A NaN before the first recorded loss means that none was recorded, afterwards it
        is a loss that is NaN.
    last_log2_scale
        The logarithm of the last scale before these rows, NaN if there was none.
    """
    step = np.asarray(columns["step"], dtype=np.float64)
    unknown = np.full(step.shape, np.nan)
    raw = {name: np.asarray(columns.get(name, unknown), dtype=np.float64) for name in COLUMNS[1:]}
    with np.errstate(divide="ignore", invalid="ignore"):
        log2_scale = np.log2(raw["scale"])
    log2_scale[~np.isfinite(log2_scale)] = np.nan
    return {
        "loss": (step, drawable(raw["loss"])),
        "not_finite": _not_finite(step, raw["loss"], loss_known),
        "scale": (step, log2_scale),
        "skipped": _skipped(step, raw["skipped"] == 1, skipped_steps, log2_scale, last_log2_scale),
        "allocated": (step, drawable(raw["allocated_bytes"])),
        "peak": (step, drawable(raw["peak_bytes"])),
        "reserved": (step, drawable(raw["reserved_bytes"])),
    }


def drawable(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """The numbers that have a place on an axis: what is not finite is a gap."""
    return np.where(np.isfinite(values), np.clip(values, -LARGEST_DRAWN, LARGEST_DRAWN), np.nan)


def thinned(series: Mapping[str, Points], limit: int) -> dict[str, Points]:
    """Every series with about `limit` points at most, see :mod:`amp_widgets.charts.decimate`."""
    return {name: decimated(*essential(name, points), limit) for name, points in series.items()}


def thinned_to_extremes(series: Mapping[str, Points], limit: int) -> dict[str, Points]:
    """Every series with its lowest and its highest points, about `limit` at most: but the scale and skipped steps are all there.

    Of numpy alone, see :func:`amp_widgets.charts.decimate.evened`.
    """
    return {
        name: essential(name, points) if name in ("scale", "skipped") else evened(*points, limit)
        for name, points in series.items()
    }


def essential(name: str, points: Points) -> Points:
    """The points without those that can be left out without a trace."""
    return level_parts_removed(*points) if name == "scale" else points


def lone(points: Points) -> Points:
    """The points of a line that have a gap on both sides: a line alone would not show them."""
    x, y = points
    known = np.concatenate([[False], ~np.isnan(y), [False]])
    alone = known[1:-1] & ~known[:-2] & ~known[2:]
    return x[alone], y[alone]


def _not_finite(step: npt.NDArray[np.float64], loss: npt.NDArray[np.float64], loss_known: bool) -> Points:
    recorded = np.flatnonzero(~np.isnan(loss))
    first = 0 if loss_known else (recorded[0] if recorded.size else loss.size)
    at = first + np.flatnonzero(~np.isfinite(loss[first:]))
    value = loss[at]
    return step[at], np.where(np.isnan(value), NAN, np.where(value > 0, POSITIVE_INFINITY, NEGATIVE_INFINITY))


def _skipped(
    step: npt.NDArray[np.float64],
    flagged: npt.NDArray[np.bool_],
    logged: npt.NDArray[Any] | None,
    log2_scale: npt.NDArray[np.float64],
    last_log2_scale: float,
) -> Points:
    steps, at = step[flagged], np.flatnonzero(flagged)
    if logged is not None and step.size:
        steps = np.union1d(steps, logged[logged <= step[-1]])
        at = np.minimum(np.searchsorted(step, steps), step.size - 1)  # the row of the step, or the one that stands for it
    # A skip is never left out for want of a known scale: the last known one, else 2^0.
    known = np.maximum.accumulate(np.where(np.isnan(log2_scale), -1, np.arange(step.size)))
    before = 0.0 if np.isnan(last_log2_scale) else last_log2_scale
    return steps, np.where(known[at] >= 0, log2_scale[known[at]], before)
