"""Fewer points that look the same: extremes and gaps are kept."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from amp_widgets.charts._extras import missing_extra

Floats = npt.NDArray[np.floating[Any]]
Points = tuple[Floats, Floats]
"""x and y of one line, shape (points,) each; a NaN in y is a gap."""
_Indices = npt.NDArray[np.intp]
_Pick = Callable[[Floats, Floats, int], _Indices]
"""Of ascending x, y without gaps and a count: which points to keep, at most about that many."""


def decimated(x: Floats, y: Floats, limit: int) -> Points:
    """At most ``2 * limit`` of the points: the first, the last, the lowest and the highest, and those that shape the line most.

    Parameters
    ----------
    x, y
        The line, shape (points,); NaN in `y` where it has a gap.
    limit
        Points to keep, gaps not counted; at least 8.

    Returns
    -------
    tuple
        x and y. A gap narrower than the mean distance of `limit` points is closed, every other is one NaN.

    Raises
    ------
    MissingExtraError
        When tsdownsample is not installed.

    Notes
    -----
    MinMaxLTTB (Van Der Donckt et al. 2023, arXiv:2305.00332) as in tsdownsample. It picks one point a bucket, so that the
    lowest and the highest are added to what it picks.
    """
    return _reduced(x, y, limit, _shaping)


def evened(x: Floats, y: Floats, limit: int) -> Points:
    """As :func:`decimated`, but the lowest and the highest point of each of ``limit / 2`` stretches of equal width.

    Where some parts of a line are denser than others this makes them even, and may be repeated as the line grows: the extremes
    of a stretch are among those of its parts. MinMaxLTTB would leave the older parts fewer points each time. It needs numpy only.
    """
    return _reduced(x, y, limit, _extreme)


def level_parts_removed(x: Floats, y: Floats) -> Points:
    """A line that is level between changes, such as the loss scale, by the ends of its level parts alone: it looks the same."""
    if x.size <= 2:
        return x, y
    differs = y[1:] != y[:-1]  # NaN differs from everything, so that gaps stay
    edge = np.ones(y.size, dtype=bool)
    edge[1:-1] = differs[1:] | differs[:-1]
    return without_long_gaps(x[edge], y[edge])


def without_long_gaps(x: Floats, y: Floats) -> Points:
    """The same line with one NaN for each run of them."""
    gap = np.isnan(y)
    keep = ~gap
    keep[1:] |= ~gap[:-1]
    keep[:1] = True
    return (x, y) if keep.all() else (x[keep], y[keep])


def _reduced(x: Floats, y: Floats, limit: int, pick: _Pick) -> Points:
    known = np.flatnonzero(~np.isnan(y))
    if not known.size:
        return x[:0], y[:0]
    if known.size <= limit:
        kept = known
    else:
        kept = known[_picks(np.ascontiguousarray(x[known]), np.ascontiguousarray(y[known]), limit, pick)]
    # A hole lies after the i-th known point when the next known point is not its neighbour in the array.
    holes = np.flatnonzero(np.diff(known) > 1)
    width = np.abs(x[known[holes + 1]] - x[known[holes]])
    span = abs(float(x[known[-1]] - x[known[0]]))
    before_hole = known[holes[width > span / limit]]
    breaks = np.searchsorted(kept, before_hole, side="right")  # where in `kept` the hole lies
    breaks, first = np.unique(breaks, return_index=True)
    inner = (breaks > 0) & (breaks < kept.size)
    breaks, gap_x = breaks[inner], x[before_hole[first[inner]] + 1]
    new_x, new_y = np.insert(x[kept], breaks, gap_x), np.insert(y[kept], breaks, np.nan)
    if np.isnan(y[-1]):  # what is appended later does not join on
        new_x, new_y = np.append(new_x, x[-1]), np.append(new_y, np.nan)
    return new_x, new_y


def _picks(x: Floats, y: Floats, limit: int, pick: _Pick) -> _Indices:
    """Which points to keep, in ascending order; at most `limit`."""
    # Buckets of equal width need x to ascend; otherwise they are of equal count.
    picked = pick(x if np.all(x[1:] >= x[:-1]) else np.arange(x.size, dtype=np.float64), y, (limit - 4) // 2 * 2)
    ends = np.array([0, y.size - 1, np.argmin(y), np.argmax(y)], dtype=np.intp)
    return np.unique(np.concatenate([picked.astype(np.intp), ends]))


def _shaping(x: Floats, y: Floats, count: int) -> _Indices:
    try:
        from tsdownsample import MinMaxLTTBDownsampler
    except ImportError as error:
        raise missing_extra(error) from error

    picked: _Indices = MinMaxLTTBDownsampler().downsample(x, y, n_out=count).astype(np.intp)
    return picked


def _extreme(x: Floats, y: Floats, count: int) -> _Indices:
    """The first lowest and the first highest point of each of ``count / 2`` stretches of equal width."""
    stretches = count // 2
    span = float(x[-1] - x[0]) or 1.0
    stretch = np.minimum((x - x[0]) / span * stretches, stretches - 1).astype(np.intp)
    starts = np.flatnonzero(np.diff(stretch, prepend=-1))
    sizes = np.diff(np.append(starts, y.size))
    found = []
    for extremes in (np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)):
        at = np.flatnonzero(y == np.repeat(extremes, sizes))
        found.append(at[np.unique(stretch[at], return_index=True)[1]])
    return np.concatenate(found)


def kept_points(total: npt.NDArray[Any], limit: int, always: set[int]) -> npt.NDArray[np.intp]:
    """About `limit` points by their positions: the lowest and the highest of stretches of equal length, and those `always`."""
    if total.size <= limit:
        return np.arange(total.size)
    ends = np.linspace(0, total.size, max(limit // 2, 4) + 1).astype(np.intp)
    extremes = [start + int(pick(total[start:end])) for start, end in itertools.pairwise(ends) for pick in (np.argmin, np.argmax)]
    return np.array(sorted({*extremes, *always}), np.intp)
