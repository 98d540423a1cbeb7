"""How runs differ: settings, what came of them, and on what they were made. A pure function of the runs, free of torch."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from amp_widgets.core.history import Event, History
from amp_widgets.core.memory.profile import memory_text
from amp_widgets.core.number_text import ratio_text, time_text
from amp_widgets.core.settings import FIELD_NAMES, Settings, describe_changes, format_scale
from amp_widgets.core.table import table_html, table_text, told_cell
from amp_widgets.errors import RunError
from amp_widgets.language import in_language, say
from amp_widgets.recording.beginning import began_s
from amp_widgets.recording.run_like import RunLike, facts_of, names_of, newest_history

MOST_LOSSES, PART_OF_LOSSES = 50, 10
"""The final loss is the mean of the last tenth of the losses, and of so many at most: a single one says more of its batch than
of the run."""
MOST_CHANGES = 8
"""Changes on the way that are listed for a run; of the others it is said how many there are."""
MOST_LAYERS = 6
"""Names of layers that are listed for a run."""
UNKNOWN = "–"


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One thing in which runs may differ.

    Attributes
    ----------
    name
        Such as ``"autocast"`` or ``"peak memory"``.
    values
        Of each run, for a program: sizes in bytes, times in seconds; NaN or None where it is not known.
    texts
        The same for people.
    """

    name: str
    values: tuple[Any, ...]
    texts: tuple[str, ...]

    @property
    def differs(self) -> bool:
        """Whether the values are not all the same. Two that are not known are the same."""
        first = self.values[0]
        return not all(_same(first, value) for value in self.values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Differences:
    """Several runs, row by row.

    Attributes
    ----------
    runs
        Their names.
    rows
        The settings at the end, the changes on the way, what came of the run, and on what it was made.
    """

    runs: tuple[str, ...]
    rows: tuple[Difference, ...]

    @property
    def differing(self) -> tuple[Difference, ...]:
        """The rows in which at least two runs differ."""
        return tuple(row for row in self.rows if row.differs)

    @property
    def equal(self) -> tuple[Difference, ...]:
        """The rows in which all runs are the same."""
        return tuple(row for row in self.rows if not row.differs)

    @property
    def obtained(self) -> str:
        """How the numbers were obtained."""
        return OBTAINED

    def row(self, name: str) -> Difference:
        """One of them.

        Raises
        ------
        RunError
            When there is none of this name.
        """
        for row in self.rows:
            if row.name == name:
                return row
        known = ", ".join(repr(row.name) for row in self.rows)
        raise RunError(f"differences: there is no row {name!r} here, expected one of {known}")

    def to_table(self) -> list[tuple[str, ...]]:
        """Rows of text, the first of them the headings; the rows that differ come before those that are equal."""
        return [("", *self.runs), *((row.name, *row.texts) for row in (*self.differing, *self.equal))]

    def __repr__(self) -> str:
        rows, differing = self._told_table(), len(self.differing)
        text = table_text(rows, words=range(len(rows[0])))
        if self.equal:
            runs = len(self.runs)
            text.insert(1 + differing, say("the same in all {runs}:", runs=runs) if runs > 2 else say("the same in both:"))
        return "\n".join([*text, in_language(self.obtained)])

    def _repr_html_(self) -> str:
        headings, *lines = self._told_table()
        words, differing = range(len(headings)), len(self.differing)
        shown = table_html([headings, *lines[:differing]], words=words)
        folded = ""
        if lines[differing:]:
            table = table_html([headings, *lines[differing:]], words=words)
            summary = html.escape(in_language(equal_text(len(lines) - differing, len(self.runs))))
            folded = f"<details><summary>{summary}</summary>{table}</details>"
        return f"<div>{shown}{folded}<div>{html.escape(in_language(self.obtained))}</div></div>"

    def _told_table(self) -> list[list[str]]:
        names, *rows = self.to_table()
        return [list(names), *([told_cell(cell) for cell in row] for row in rows)]


OBTAINED = (
    f"Final loss: the mean of the last tenth of the losses that are finite, {MOST_LOSSES} at most; it is nan where the very last "
    "one is not finite. Peak memory: the most in any step, by the run's own measurement. Step time: the median of the steps that "
    "were not skipped, in brackets the middle half. Ratios are to the first run. Time: from the beginning of the first step to "
    "the end of the last, pauses included."
)


def equal_text(rows: int, runs: int) -> str:
    """That so many rows are the same.

    >>> equal_text(1, 3), equal_text(12, 2)
    ('1 row is the same in all 3 runs', '12 rows are the same in both runs')
    """
    return f"{rows} {'row is' if rows == 1 else 'rows are'} the same in {'both' if runs == 2 else f'all {runs}'} runs"


def differences_of(runs: Sequence[RunLike], *, names: Sequence[str] | None = None) -> Differences:
    """How these runs differ, as they are now.

    Parameters
    ----------
    runs
        At least one.
    names
        What they are called; without them, as `names_of` has it.

    Raises
    ------
    RecordingError
        When the file of one cannot be read any more.
    """
    known = [_Known(run) for run in runs]
    rows = [_setting(name, [getattr(one.settings, name) for one in known]) for name in FIELD_NAMES]
    rows += [_row("changes on the way", [one.changes for one in known], _changes_text)]
    rows += _outcomes(known)
    rows += _made_on(known)
    return Differences(runs=tuple(names_of(runs) if names is None else names), rows=tuple(rows))


class _Known:
    """What is taken from one run."""

    def __init__(self, run: RunLike) -> None:
        history = newest_history(run)
        columns = history.columns("step", "time_s", "loss", "skipped", "step_s", "allocated_bytes", "peak_bytes")
        skipped = columns["skipped"] == 1
        events = history.events()
        self.settings: Settings = run.settings
        self.facts: Mapping[str, Any] = facts_of(run)
        self.changes = tuple((event.step, _changes_of(event)) for event in events if event.kind == "applied")
        self.steps = history.total_rows
        self.duration_s = _duration_s(columns)
        self.loss, self.loss_text = _final_loss(columns["loss"])
        self.not_finite = _not_finite(columns["loss"])
        self.skipped = _skipped_steps(history, columns["step"][skipped], events)
        self.peak_bytes = _most(columns["peak_bytes"])
        self.allocated_bytes = _last_known(columns["allocated_bytes"])
        times = columns["step_s"][~skipped]
        times = times[np.isfinite(times)]
        quartiles: list[float] = np.quantile(times, [0.25, 0.5, 0.75]).tolist() if times.size else [math.nan] * 3
        low, self.step_s, high = quartiles
        self.step_text = f"{time_text(self.step_s)} ({time_text(low)} to {time_text(high)})" if times.size else UNKNOWN


def _row(name: str, values: Sequence[Any], text: Callable[[Any], str]) -> Difference:
    return Difference(name=name, values=tuple(values), texts=tuple(map(text, values)))


def _outcomes(known: Sequence[_Known]) -> list[Difference]:
    times = [one.step_s for one in known]
    return [
        Difference(name="final loss", values=tuple(one.loss for one in known), texts=tuple(one.loss_text for one in known)),
        _row("losses inf or NaN", [one.not_finite for one in known], "{:,}".format),
        _row("skipped steps", [one.skipped for one in known], "{:,}".format),
        _sizes("peak memory", [one.peak_bytes for one in known]),
        _sizes("allocated at the end", [one.allocated_bytes for one in known]),
        Difference(
            name="step time",
            values=tuple(times),
            texts=tuple(_with_ratio(one.step_text, one.step_s, times[0], at) for at, one in enumerate(known)),
        ),
        _row("steps", [one.steps for one in known], "{:,}".format),
        _row("time", [one.duration_s for one in known], lambda value: UNKNOWN if math.isnan(value) else time_text(value)),
    ]


def _made_on(known: Sequence[_Known]) -> list[Difference]:
    """Of what was written down about machine and packages, what is there for any run."""
    facts = [{name: one.facts.get(name) for name in _FACTS} for one in known]
    for own, one in zip(facts, known, strict=True):
        packages = one.facts.get("packages")
        if isinstance(packages, Mapping):
            own |= {str(name): version for name, version in packages.items()}
    names = dict.fromkeys(name for own in facts for name in own)
    rows = [_row(_FACTS.get(name, name), [own.get(name) for own in facts], fact_text) for name in names]
    return [row for row in rows if any(value is not None for value in row.values)]


_FACTS = {
    "model": "model", "device": "device", "memory_source": "memory measured by", "began": "recording began", "python": "Python",
    "cuda": "CUDA", "system": "system", "processors": "processors",
}  # fmt: skip
"""Name of a fact in a run file → what it is called here."""


def _sizes(name: str, values: Sequence[float]) -> Difference:
    texts = (_with_ratio(UNKNOWN if math.isnan(v) else memory_text(v), v, values[0], at) for at, v in enumerate(values))
    return Difference(name=name, values=tuple(values), texts=tuple(texts))


def _with_ratio(text: str, value: float, first: float, at: int) -> str:
    return f"{text} {ratio_text(value / first)}" if at and first > 0 and not math.isnan(value) else text


def _setting(name: str, values: Sequence[Any]) -> Difference:
    layers = [set(value) for value in values if isinstance(value, tuple)]
    shared = set.intersection(*layers) if layers else set()

    def text(value: Any) -> str:
        match value:
            case None:
                return "none"
            case bool():
                return "on" if value else "off"
            case tuple():
                return _layers_text(value, shared)
            case float():
                return format_scale(value) if name.endswith("_scale") else f"{value:g}"
        return str(value)

    return _row(name, values, text)


def _layers_text(names: tuple[str, ...], shared: Collection[str]) -> str:
    """All of a few; of many how many, and those that not every run has."""
    if len(names) <= MOST_LAYERS:
        return ", ".join(names) or "none"
    own = [name for name in names if name not in shared]
    listed = ", ".join(own[:MOST_LAYERS]) + (f", and {len(own) - MOST_LAYERS} more" if len(own) > MOST_LAYERS else "")
    return f"{len(names)} layers" + (f", of which not in all runs: {listed}" if own else "")


def _changes_of(event: Event) -> str:
    return describe_changes({name: value for name, value in event.detail.items() if name in FIELD_NAMES}) or event.reason


def _changes_text(changes: Sequence[tuple[int, str]]) -> str:
    texts = [f"step {step:,}: {what}" for step, what in changes[:MOST_CHANGES]]
    if len(changes) > MOST_CHANGES:
        texts.append(f"{len(changes) - MOST_CHANGES:,} more")
    return "; ".join(texts) or "none"


def fact_text(value: Any) -> str:
    """A fact of a run for people: a moment without the letters of ISO 8601, and what is not known as such."""
    if value is None:
        return UNKNOWN
    text = str(value)
    return text.replace("T", " ").replace("+00:00", " UTC") if _MOMENT.fullmatch(text) else text


_MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00")


def _final_loss(loss: npt.NDArray[np.float64]) -> tuple[float, str]:
    """See `OBTAINED`."""
    finite = loss[np.isfinite(loss)]
    finite = finite[-max(1, min(MOST_LOSSES, finite.size // PART_OF_LOSSES)) :]
    mean = float(finite.mean()) if finite.size else math.nan
    recorded = bool((~np.isnan(loss)).any())
    if not recorded:
        return math.nan, UNKNOWN
    if math.isfinite(loss[-1]):
        return mean, f"{mean:#.4g}"
    return math.nan, f"nan, before it {mean:#.4g}" if finite.size else "nan"


def _not_finite(loss: npt.NDArray[np.float64]) -> int:
    """How many; before the first that is a number or inf none was recorded."""
    recorded = np.flatnonzero(~np.isnan(loss))
    return int((~np.isfinite(loss[recorded[0] :])).sum()) if recorded.size else 0


def _skipped_steps(history: History, flagged: npt.NDArray[Any], events: Sequence[Event]) -> int:
    """By the rows and by the events: rows may have been merged in a long run, events never are."""
    logged = [event.step for event in events if event.kind == "skipped"]
    return len({*flagged.tolist(), *logged})


def _duration_s(columns: Mapping[str, npt.NDArray[Any]]) -> float:
    time_s = columns["time_s"]
    return float(time_s[-1]) - began_s(columns) if time_s.size else math.nan


def _most(sizes: npt.NDArray[np.float64]) -> float:
    known = sizes[~np.isnan(sizes)]
    return float(known.max()) if known.size else math.nan


def _last_known(sizes: npt.NDArray[np.float64]) -> float:
    known = sizes[~np.isnan(sizes)]
    return float(known[-1]) if known.size else math.nan


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other):
        return True
    return bool(one == other)
