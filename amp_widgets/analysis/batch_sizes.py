"""The largest batch that fits a budget with each of several settings, as a table: predicted, and on request really run."""

from __future__ import annotations

import contextlib
import dataclasses
import html
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from amp_widgets.analysis.batch_size import BatchSize, Confirmation, confirm, first_line, max_batch_size
from amp_widgets.analysis.comparison import Progress
from amp_widgets.analysis.corners import Corner, Grid, LayerChoice, corners_of
from amp_widgets.analysis.fake_step import NOT_COUNTED, FakeSteps, fake_steps
from amp_widgets.analysis.held_interrupt import interrupts_noted
from amp_widgets.analysis.real_step import free_memory_bytes
from amp_widgets.analysis.stoppable import CancelledError, stoppable
from amp_widgets.analysis.trial import check_idle, check_not_compiled
from amp_widgets.core.loop import LiveLoop
from amp_widgets.core.memory.budget import checked_budget, told_apart
from amp_widgets.core.memory.profile import memory_text
from amp_widgets.core.settings import AutocastName
from amp_widgets.core.table import table_html, table_text, told
from amp_widgets.errors import AmpWidgetsError, SettingsError
from amp_widgets.language import in_language, marked_all, say

VERB = "largest_batch"
MOST_SMALLER = 6
"""Sizes that are tried where memory runs out with the one that was predicted to fit."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BatchSizeRow:
    """One combination of settings.

    Attributes
    ----------
    label, layers_name
        As of a `Corner`.
    autocast, checkpointed
        The settings; the others were as in force.
    found
        The largest batch that is predicted to fit; None where `why_not` says why that is not known.
    confirmed
        What a real step with it came to; where memory ran out, of the largest smaller one that was tried and fits, or else of the
        smallest that was tried. None where none was made.
    ran_out_at
        The smallest size with which a real step was too much; None where none was.
    why_not
        Why something is missing, or None.
    """

    label: str
    layers_name: str
    autocast: AutocastName
    checkpointed: tuple[str, ...]
    found: BatchSize | None = None
    confirmed: Confirmation | None = None
    ran_out_at: int | None = None
    why_not: str | None = None

    @property
    def size(self) -> int:
        """Rows of the largest batch that is predicted to fit, or, where memory ran out with it, of the one that really ran.

        0 where none fits, or it is not known.
        """
        if self.confirmed is not None and self.ran_out_at is not None:
            return self.confirmed.size if self.confirmed.fits else 0
        return 0 if self.found is None else self.found.size


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BatchSizes(Sequence[BatchSizeRow]):
    """The largest batch that fits, for each of several settings; shows itself as a table.

    Attributes
    ----------
    rows
        ``fp32/none`` first.
    budget_bytes
        What a step may hold at a time.
    notes
        Sentences: what was left out.
    cancelled
        Whether it was ended before all was done.
    """

    rows: tuple[BatchSizeRow, ...]
    budget_bytes: float
    notes: tuple[str, ...] = ()
    cancelled: bool = False

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def confirmable(self) -> bool:
        """Whether there is a size that was not really run yet."""
        return any(row.size and row.confirmed is None and row.why_not is None for row in self.rows)

    def to_table(self) -> list[tuple[str, ...]]:
        """Rows of text, the first of them the headings."""
        return [_HEADINGS, *(self._cells(row) for row in self.rows)]

    @property
    def headline(self) -> str:
        """What the table shows, in the language in force."""
        return say("the largest batch that fits into {budget_bytes}", budget_bytes=memory_text(self.budget_bytes))

    def __str__(self) -> str:
        return "\n".join([self.headline, *table_text(self._told_table(), words=_WORDS), *map(in_language, self.notes)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        notes = "".join(f"<div>{html.escape(in_language(note))}</div>" for note in self.notes)
        return f"<div><b>{html.escape(self.headline)}</b>{table_html(self._told_table(), words=_WORDS)}{notes}</div>"

    def _told_table(self) -> list[list[str]]:
        return told(self.to_table(), sentences=_SENTENCES)

    def _peak_text(self, peak_bytes: float) -> str:
        """As long as it is another one than that of the budget."""
        return told_apart(peak_bytes, self.budget_bytes)[0]

    def _cells(self, row: BatchSizeRow) -> tuple[str, ...]:
        first = self.rows[0].size
        ratio = f"×{row.size / first:.2f}" if first and row.size else ""
        found = row.found
        predicted = math.nan if found is None or not row.size else found.tried.get(row.size, math.nan)
        if found is not None and row.size == found.size > 0:
            predicted = found.predicted_peak_bytes
        text = "" if math.isnan(predicted) else self._peak_text(predicted)
        return row.label, str(len(row.checkpointed)), _size_text(row), ratio, text, self._confirmed_text(row)

    def _confirmed_text(self, row: BatchSizeRow) -> str:
        done = row.confirmed
        if row.why_not is not None:
            return row.why_not
        if done is None:
            return ""
        if done.profile is None:
            smaller = row.ran_out_at is not None and row.found is not None and row.ran_out_at < row.found.size
            return f"ran out of memory, also with {row.ran_out_at:,}" if smaller else "ran out of memory"
        ran = f"{self._peak_text(done.peak_bytes)}{'' if done.fits else ', too much'}"
        return f"{ran}; {row.ran_out_at:,} is too much" if done.fits and row.ran_out_at is not None else ran


@interrupts_noted()
def largest_batch(
    loop: LiveLoop,
    batch: tuple[Any, Any],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    *,
    budget_bytes: float | None = None,
    grid: Grid | None = None,
    planned: LayerChoice | None = None,
    confirm: bool = False,
    known: BatchSizes | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> BatchSizes:
    """Find the largest batch that fits, by predicting steps on fake tensors, for which nothing is allocated.

    Parameters
    ----------
    loop, batch, loss_fn
        As in `amp_widgets.analysis.fake_step.fake_steps`.
    budget_bytes
        What a step may hold: a number, or a text such as ``"8 GB"``. None: the session's memory budget; without one what the
        GPU has, or what is free on this machine.
    grid, planned
        Which settings, as in `amp_widgets.analysis.corners.corners_of`. None: every format with every set of layers there is.
    confirm
        Also train a step of each size, and take it back; one that runs out of memory leaves nothing behind.
    known
        Sizes that were found before: only to be confirmed.
    on_progress
        Called before each combination.
    cancelled
        Asked before every step; when it says so, what is complete is returned.

    Raises
    ------
    SettingsError
        When the budget or the grid is none, or the batch has no size.
    SessionClosedError
        When the session was closed.
    RunError
        As `fake_steps` does, and when the model or the loss function is compiled.
    """
    check_idle(loop, VERB)
    check_not_compiled(loop, loss_fn, VERB, NOT_COUNTED)
    teller = _Teller(on_progress)
    table = known
    if table is None:
        table = _predicted(loop, batch, loss_fn, budget_bytes, grid, planned, teller, cancelled)
    if confirm and not table.cancelled:
        table = _confirmed(loop, batch, loss_fn, table, teller, cancelled)
    return table


class _Teller:
    """Tells how far it is; the time that is left goes by the steps that are done."""

    def __init__(self, on_progress: Callable[[Progress], None] | None) -> None:
        self._on_progress = on_progress

    def over(self, labels: Sequence[str], doing: str) -> Iterator[int]:
        begun_s = time.monotonic()
        for at, label in enumerate(labels):
            if self._on_progress is not None:
                left_s = (time.monotonic() - begun_s) / at * (len(labels) - at) if at else math.nan
                self._on_progress(Progress(done=at, total=len(labels), seconds_left=left_s, doing=f"{doing} {label}"))
            yield at


def _predicted(
    loop: LiveLoop,
    batch: tuple[Any, Any],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    budget_bytes: float | None,
    grid: Grid | None,
    planned: LayerChoice | None,
    teller: _Teller,
    cancelled: Callable[[], bool],
) -> BatchSizes:
    budget = budget_of(loop, budget_bytes)
    corners, left_out = corners_of(loop, grid, planned)
    rows: list[BatchSizeRow] = []
    stopped = False
    with fake_steps(loop, batch, loss_fn, verb=VERB) as steps:
        if steps.batch_size is None:
            raise SettingsError(
                f"{VERB}: got a batch without a tensor that has a dimension, expected one whose size can be changed"
            )
        watched = stoppable(steps, cancelled, VERB)
        for at in teller.over([corner.label for corner in corners], "predicting"):
            try:
                rows.append(_row(corners[at], watched, budget))
            except CancelledError:
                stopped = True
                break
    notes = (*left_out, *_own_budget(loop, budget))
    return BatchSizes(rows=tuple(rows), budget_bytes=budget, notes=notes, cancelled=stopped)


def _row(corner: Corner, steps: FakeSteps, budget: float) -> BatchSizeRow:
    autocast, checkpointed = corner.settings.autocast, corner.settings.checkpointed
    row = BatchSizeRow(label=corner.label, layers_name=corner.layers_name, autocast=autocast, checkpointed=checkpointed)
    try:
        return dataclasses.replace(
            row,
            found=max_batch_size(
                steps, budget, autocast=autocast, checkpointed=checkpointed, fp32_layers=corner.settings.fp32_layers
            ),
        )
    except CancelledError:
        raise
    except Exception as error:  # the user's code with another size or format; the other rows may be fine
        return dataclasses.replace(row, why_not=first_line(error, row.autocast))


def _confirmed(
    loop: LiveLoop,
    batch: tuple[Any, Any],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    table: BatchSizes,
    teller: _Teller,
    cancelled: Callable[[], bool],
) -> BatchSizes:
    rows = list(table.rows)
    waiting = [at for at, row in enumerate(rows) if row.size and row.confirmed is None]
    for position in teller.over([f"{rows[at].label}, batch {rows[at].size:,}" for at in waiting], "running"):
        if cancelled():
            break
        at = waiting[position]
        row = rows[at]
        with contextlib.suppress(CancelledError):
            rows[at] = _confirmed_row(loop, batch, loss_fn, row, table.budget_bytes, cancelled)
    notes = tuple(dict.fromkeys((*table.notes, *_own_budget(loop, table.budget_bytes))))
    return dataclasses.replace(table, rows=tuple(rows), notes=notes)


def _confirmed_row(
    loop: LiveLoop,
    batch: tuple[Any, Any],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    row: BatchSizeRow,
    budget: float,
    cancelled: Callable[[], bool],
) -> BatchSizeRow:
    """The row with what a real step came to; where memory ran out, with what smaller ones came to, of which a few are tried."""
    assert row.found is not None
    unit = row.found.multiple_of
    low, high, size, tries = 0, row.size, row.size, 0
    best: Confirmation | None = None
    while tries <= MOST_SMALLER:
        try:
            done = confirm(
                loop,
                batch,
                loss_fn,
                batch_size=size,
                autocast=row.autocast,
                checkpointed=row.checkpointed,
                fp32_layers=row.found.settings.fp32_layers,
                budget_bytes=budget,
            )
        except AmpWidgetsError:
            raise
        except Exception as error:  # the user's code with another size
            if tries:
                break
            return dataclasses.replace(row, why_not=first_line(error, row.autocast))
        tries += 1
        if done.fits:
            low, best = size, done
            if size == row.size:
                break
        else:
            high = size
            best = done if best is None or not best.fits else best
        # a little less at first, as a prediction may be off by little; then half way
        size = high - max(unit, high // 16) if tries == 1 else (low + high) // 2
        size -= size % unit
        if size <= low or cancelled():
            break
    return dataclasses.replace(row, confirmed=best, ran_out_at=high if low < row.size else None)


def budget_of(loop: LiveLoop, budget_bytes: float | None) -> float:
    """What a step may hold where nothing else is said.

    Raises
    ------
    SettingsError
        When what is said is no budget, or nothing is said and nothing known.
    """
    if budget_bytes is not None:
        return checked_budget(budget_bytes, VERB)
    if loop.memory_budget is not None:
        return loop.memory_budget
    found = float(torch.cuda.mem_get_info(loop.device)[1]) if loop.device.type == "cuda" else free_memory_bytes()
    if not math.isfinite(found):
        raise SettingsError(f"{VERB}: got no budget, and what is free is not known here; pass budget_bytes, such as 8e9 for 8 GB")
    return found


def _size_text(row: BatchSizeRow) -> str:
    found = row.found
    if found is None:
        return _NOT_KNOWN
    if row.ran_out_at is not None and row.size != found.size:  # not so many, whatever was predicted
        untried = row.ran_out_at - row.size > found.multiple_of
        return f"{'at least ' * untried}{row.size:,}" if row.size else _NONE_RAN
    if not row.size:
        return _NONE_FITS
    text = f"{'at least ' * found.capped}{found.size:,}"
    if found.in_multiples:
        text += f" (of multiples of {found.multiple_of})"
    return text if found.failure is None else f"{text}; with {found.fails_at} a step fails: {found.failure}"


def _own_budget(loop: LiveLoop, budget_bytes: float) -> tuple[str, ...]:
    """A sentence, where steps of the run may hold less than what was asked about."""
    own = loop.memory_budget
    if own is None or own >= budget_bytes:
        return ()
    smaller, larger = told_apart(own, budget_bytes)
    return (
        f"The session's memory budget is {smaller}: steps of the run that hold more run out of memory. Found and confirmed here "
        f"is what fits into {larger}, which was asked for.",
    )


_HEADINGS = marked_all("settings", "layers", "largest batch", "× fp32/none", "predicted peak", "really run")
_NOT_KNOWN, _NONE_FITS, _NONE_RAN = marked_all("not known", "none fits", "none that was tried ran")
_WORDS = (0, 5)
_SENTENCES = (2, 5)
