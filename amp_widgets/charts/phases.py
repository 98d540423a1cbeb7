"""Where in a picture the phases of a step are, so that the forward pass of one step lies over that of another."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

WIDTH = 100.0
"""A whole step goes from 0 to this."""
NARROWEST = 7.5
"""A phase that is worth its name is at least so wide: loss and zero_grad are a few points among thousands."""
MOST_BANDS = 60
"""With more phases, as in a step of many batches, none is drawn."""


class PhaseLike(Protocol):
    """A part of a step: the points from `start` up to, not including, `stop`. A step's phases follow each other without a gap."""

    @property
    def name(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Band:
    """A phase in the picture, from `start` to `stop` of `WIDTH`; `recomputes`: how often the last step did layers again in it."""

    name: str
    start: float
    stop: float
    recomputes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Positions:
    """Where the points of one step are: `x` has one more, the end of the last. `recomputes` are stretches of x."""

    x: npt.NDArray[np.float64]
    edges: tuple[int, ...]
    recomputes: tuple[tuple[float, float], ...]


def aligned(steps: Sequence[tuple[int, Sequence[PhaseLike]]]) -> tuple[list[Band], list[Positions]]:
    """One or two steps laid over each other, phase over phase.

    Parameters
    ----------
    steps
        Of each its number of points and its phases. Recompute counts as a part of the backward pass that it interrupts.

    Returns
    -------
    tuple
        The phases of all steps, and the positions of each step's points. A phase that a step does not have takes place all the
        same: the step has no point there. A phase is as wide as its part of the points, on average, and at least `NARROWEST`.
    """
    grouped = [_parts(points, phases) for points, phases in steps]
    rows = _merged(grouped)
    widths = np.array([_share(row, grouped) for row in rows])
    least = np.array([0.0 if _part_of(row).name == "other" else min(NARROWEST, WIDTH / 2 / len(rows)) for row in rows])
    widths = np.maximum(widths * WIDTH / widths.sum(), least)
    ends = np.cumsum(widths) * (WIDTH / widths.sum())
    starts = np.concatenate([[0.0], ends[:-1]])
    bands = [
        Band(_part_of(row).name, float(start), float(stop), len(row[-1].recomputes) if row[-1] is not None else 0)
        for row, start, stop in zip(rows, starts, ends, strict=True)
    ]
    positions = []
    for i, (points, _) in enumerate(steps):
        placed = [(row[i], band) for row, band in zip(rows, bands, strict=True)]
        positions.append(_positions(points, [(part, band) for part, band in placed if part is not None]))
    return (bands if len(bands) <= MOST_BANDS else []), positions


def recomputes_of(phases: Iterable[PhaseLike]) -> list[tuple[int, int]]:
    """From where to where layers were computed again; one time though a single point of the backward pass comes between."""
    found: list[tuple[int, int]] = []
    for phase in phases:
        if phase.name != "recompute" or phase.stop <= phase.start:
            continue
        start = found.pop()[0] if found and phase.start - found[-1][1] <= 1 else phase.start
        found.append((start, phase.stop))
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    name: str
    start: int
    stop: int
    recomputes: tuple[tuple[int, int], ...]


_Row = list[_Part | None]
"""Of each step the part that lies over those of the others."""


def _parts(points: int, phases: Sequence[PhaseLike]) -> list[_Part]:
    """The phases, the neighbours of one name as one, a backward pass with the recompute in it."""
    parts: list[_Part] = []
    stretches = recomputes_of(phases)
    for phase in phases:
        if phase.stop <= phase.start:
            continue
        again = phase.name == "recompute"
        name = "backward" if again else phase.name
        recomputes = tuple(one for one in stretches if one[0] == phase.start) if again else ()
        if parts and parts[-1].name == name:
            before = parts.pop()
            parts.append(_Part(name, before.start, phase.stop, before.recomputes + recomputes))
        else:
            parts.append(_Part(name, phase.start, phase.stop, recomputes))
    return parts or [_Part("other", 0, max(points, 1), ())]


def _merged(grouped: Sequence[list[_Part]]) -> list[_Row]:
    if len(grouped) == 1:
        return [[part] for part in grouped[0]]
    first, second = grouped
    matched = difflib.SequenceMatcher(a=[part.name for part in first], b=[part.name for part in second], autojunk=False)
    rows: list[_Row] = []
    for kind, i, i_end, j, j_end in matched.get_opcodes():
        if kind == "equal":
            rows += [[one, other] for one, other in zip(first[i:i_end], second[j:j_end], strict=True)]
        else:
            rows += [[part, None] for part in first[i:i_end]]
            rows += [[None, part] for part in second[j:j_end]]
    return rows


def _part_of(row: _Row) -> _Part:
    return next(part for part in row if part is not None)


def _share(row: _Row, grouped: Sequence[list[_Part]]) -> float:
    """The part of all points that a phase has, averaged over the steps."""
    shares = (
        (part.stop - part.start) / (parts[-1].stop - parts[0].start)
        for part, parts in zip(row, grouped, strict=True)
        if part is not None
    )
    return sum(shares) / len(grouped)


def _positions(points: int, placed: Sequence[tuple[_Part, Band]]) -> Positions:
    x = np.full(points + 1, WIDTH)
    edges: list[int] = []
    recomputes = []
    for part, band in placed:
        inside = np.arange(part.start, part.stop)
        x[part.start : part.stop] = band.start + (inside - part.start) * (band.stop - band.start) / (part.stop - part.start)
        edges += (part.start, part.stop - 1)
        for start, stop in part.recomputes:
            recomputes.append((float(x[start]), band.stop if stop == part.stop else float(x[stop])))
            edges += (start, stop - 1)
    bounded: Iterable[int] = edges if len(edges) <= 4 * MOST_BANDS else _even(edges)
    return Positions(x, tuple(sorted({edge for edge in bounded if edge < points})), tuple(recomputes[:MOST_BANDS]))


def _even(edges: Sequence[int]) -> Iterator[int]:
    """Some of very many edges."""
    return (edges[int(i)] for i in np.linspace(0, len(edges) - 1, 4 * MOST_BANDS))
