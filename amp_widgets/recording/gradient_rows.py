"""Counted gradients to rows of a run file, within an allowance, and back."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from amp_widgets.core.gradient_counts import BUCKETS, CountedGradients, GradientCounts, larger
from amp_widgets.errors import RecordingError

ALL_LAYERS = "(all layers)"
"""In place of the name of a layer, in the sum of them."""
BYTES_A_STEP = 40
"""What the gradients of a run may take in its file, for each step that it has had."""
BYTES_AT_FIRST = 1 << 16
"""And once more, so that of a short run they are all there."""

Row = tuple[int, float, str, str, int, int, bytes]
"""step, scale, layers, notes, first, buckets, content: see `amp_widgets.recording.schema`."""


class GradientAllowance:
    """Decides how much of counted gradients is written: all layers where there is room, else their sum, else nothing.

    One half of the allowance is for all layers, which may have to be saved up for, and one for sums, which come in between.
    """

    def __init__(self) -> None:
        self._spent = {True: 0, False: 0}  # whether all layers → bytes
        self._bytes_a_row = 0.0  # of those written last

    def rows_for(self, counted: Iterable[GradientCounts], *, steps: int) -> list[Row]:
        """What to write of them, when the run has had so many steps; `spend` it when it is written."""
        allowed = BYTES_A_STEP * steps / 2
        left = {True: BYTES_AT_FIRST + allowed - self._spent[True], False: allowed - self._spent[False]}
        rows: list[Row] = []
        for counts in counted:
            for whole in (True, False):
                if whole and len(counts.rows) * self._bytes_a_row > left[True]:
                    continue  # it is not even tried, which would take time
                row = to_row(counts if whole else summed(counts))
                if whole:
                    self._bytes_a_row = _size(row) / max(len(counts.rows), 1)
                if _size(row) <= left[whole]:
                    rows.append(row)
                    left[whole] -= _size(row)
                    break
        return rows

    def spend(self, rows: Iterable[Row]) -> None:
        """These were written."""
        for row in rows:
            self._spent[ALL_LAYERS not in row[2]] += _size(row)


def summed(counts: GradientCounts) -> GradientCounts:
    """All layers as one, for each family and format; of the peaks the largest one stays, under its full name."""
    groups: dict[tuple[str, str, bool], list[CountedGradients]] = {}
    for row in counts.rows:
        groups.setdefault((row.family, row.dtype, row.wide), []).append(row)
    return dataclasses.replace(counts, rows=tuple(map(_sum, groups.values())))


def to_row(counts: GradientCounts) -> Row:
    """As it is written; numbers of gradients are rounded to whole ones, which only estimated ones are not."""
    table = np.zeros((len(counts.rows), BUCKETS), dtype="<u8")
    for place, row in zip(table, counts.rows, strict=True):
        place[:] = np.rint(row.counts)
    there = np.flatnonzero(table.any(axis=0))
    first, stop = (int(there[0]), int(there[-1]) + 1) if there.size else (0, 0)
    layers = [
        {
            "layer": row.layer, "family": row.family, "dtype": row.dtype, "arrivals": row.arrivals, "elements": row.elements,
            "looked_at": row.looked_at, "wide": row.wide,
            "peaks": {name: peak if math.isfinite(peak) else str(peak) for name, peak in row.peaks.items()},
        }
        for row in counts.rows
    ]  # fmt: skip
    content = zlib.compress(np.ascontiguousarray(table[:, first:stop]).tobytes(), 6)
    return counts.step, counts.scale, _json(layers), _json(list(counts.notes)), first, stop - first, content


def from_row(row: Sequence[Any]) -> GradientCounts:
    """What `to_row` was given, but for the rounding.

    Raises
    ------
    RecordingError
        When it is no such row.
    """
    try:
        return _from_row(row)
    except (KeyError, OverflowError, RecursionError, TypeError, ValueError, zlib.error) as error:
        raise RecordingError(
            f"the gradients of a step cannot be read ({type(error).__name__}: {error}); the file is damaged"
        ) from None


_MOST_BYTES = 1 << 28


def _size(row: Row) -> int:
    _, _, layers, notes, _, _, content = row
    return 40 + len(layers) + len(notes) + len(content)  # ASCII


def _sum(rows: Sequence[CountedGradients]) -> CountedGradients:
    named = [(f"{row.layer}.{name}" if name else row.layer, peak) for row in rows for name, peak in row.peaks.items()]
    largest = functools.reduce(larger, (peak for _, peak in named), 0.0)
    name = next((name for name, peak in named if peak == largest or math.isnan(peak)), "")
    return dataclasses.replace(
        rows[0],
        layer=ALL_LAYERS,
        arrivals=sum(row.arrivals for row in rows),
        elements=sum(row.elements for row in rows),
        looked_at=sum(row.looked_at for row in rows),
        counts=np.sum([row.counts for row in rows], axis=0),
        peaks={name: largest},
    )


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _from_row(row: Sequence[Any]) -> GradientCounts:
    step, scale, layers, notes, first, buckets, content = row
    layers, notes = json.loads(_text(layers)), json.loads(_text(notes))
    if not isinstance(layers, list) or not isinstance(notes, list):
        raise TypeError("layers or notes are no list")
    first, buckets = _whole(first), _whole(buckets)
    if not 0 <= first <= first + buckets <= BUCKETS:
        raise ValueError(f"buckets {first} to {first + buckets}")
    size = 8 * len(layers) * buckets
    if size > _MOST_BYTES or not isinstance(content, bytes):
        raise ValueError(f"{size} bytes of {type(content).__name__}")
    unpacking = zlib.decompressobj()
    raw = unpacking.decompress(content, size + 1)  # never more than it should be
    if len(raw) != size or not unpacking.eof:
        raise ValueError("content has not the length that it should")
    table = np.zeros((len(layers), BUCKETS))
    table[:, first : first + buckets] = np.frombuffer(raw, dtype="<u8").reshape(len(layers), buckets)
    scale = _number(scale)
    if not 0 < scale < math.inf:
        raise ValueError(f"scale {scale}")
    return GradientCounts(
        step=_whole(step),
        scale=scale,
        rows=tuple(map(_counted, layers, table)),
        notes=tuple(map(_text, notes)),
    )


def _counted(content: Mapping[str, Any], counts: npt.NDArray[np.float64]) -> CountedGradients:
    family = _text(content["family"])
    if family not in ("output", "parameter"):
        raise ValueError(f"family {family!r}")
    arrivals, elements, looked_at = (_whole(content[name]) for name in ("arrivals", "elements", "looked_at"))
    if min(arrivals, elements, looked_at) < 0:
        raise ValueError("less than none")
    return CountedGradients(
        layer=_text(content["layer"]),
        family=family,  # type: ignore[arg-type]  # looked at
        dtype=_text(content["dtype"]),
        arrivals=arrivals,
        elements=elements,
        looked_at=looked_at,
        counts=counts,
        peaks={_text(name): _peak(peak) for name, peak in content["peaks"].items()},
        wide=bool(content["wide"]),
    )


def _peak(value: Any) -> float:
    if value == "inf" or value == "nan":
        return float(value)
    peak = _number(value)
    if not 0 <= peak < math.inf:
        raise ValueError(f"a peak of {peak}")
    return peak


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} where a text belongs")
    return value


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{type(value).__name__} where a whole number belongs")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{type(value).__name__} where a number belongs")
    return float(value)
