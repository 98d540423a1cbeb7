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

from amp_widgets.analysis.batch_size import BatchSize, Confirmation, confirm, max_batch_size
from amp_widgets.analysis.comparison import Progress
from amp_widgets.analysis.corners import Corner, Grid, LayerChoice, corners_of
from amp_widgets.analysis.fake_step import NOT_COUNTED, FakeSteps, fake_steps
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
        What a real step with it came to; None where none was made.
    why_not
        Why something is missing, or None.
    """

    label: str
    layers_name: str
    autocast: AutocastName
    checkpointed: tuple[str, ...]
    found: BatchSize | None = None
    confirmed: Confirmation | None = None
    why_not: str | None = None

    @property
    def size(self) -> int:
        """Rows of the largest batch that is predicted to fit; 0 where none does, or it is not known."""
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

    def __str__(self) -> str:
        return say("the largest batch that fits into {budget_bytes}", budget_bytes=memory_text(self.budget_bytes))

    def __repr__(self) -> str:
        return "\n".join([str(self), *table_text(self._told_table(), words=_WORDS), *map(in_language, self.notes)])

    def _repr_html_(self) -> str:
        notes = "".join(f"<div>{html.escape(in_language(note))}</div>" for note in self.notes)
        return f"<div><b>{html.escape(str(self))}</b>{table_html(self._told_table(), words=_WORDS)}{notes}</div>"

    def _told_table(self) -> list[list[str]]:
        return told(self.to_table(), sentences=_SENTENCES)

    def _peak_text(self, peak_bytes: float) -> str:
        """As long as it is another one than that of the budget."""
        return told_apart(peak_bytes, self.budget_bytes)[0]

    def _cells(self, row: BatchSizeRow) -> tuple[str, ...]:
        first = self.rows[0].size
        ratio = f"×{row.size / first:.2f}" if first and row.size else ""
        found, done = row.found, row.confirmed
        size = _NOT_KNOWN if found is None else _NONE_FITS if not row.size else f"{'at least ' * found.capped}{found.size:,}"
        if found is not None and row.size and found.multiple_of > 1:
            size += f" (of multiples of {found.multiple_of})"
        predicted = "" if found is None or not row.size else self._peak_text(found.predicted_peak_bytes)
        if row.why_not is not None:
            confirmed = row.why_not
        elif done is None:
            confirmed = ""
        elif done.profile is None:
            confirmed = "ran out of memory"
        else:
            confirmed = f"{self._peak_text(done.peak_bytes)}{'' if done.fits else ', too much'}"
        return row.label, str(len(row.checkpointed)), size, ratio, predicted, confirmed


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
    return BatchSizes(rows=tuple(rows), budget_bytes=budget, notes=left_out, cancelled=stopped)


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
        return dataclasses.replace(row, why_not=_first_line(error))


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
            rows[at] = _confirmed_row(loop, batch, loss_fn, row, table.budget_bytes)
    return dataclasses.replace(table, rows=tuple(rows))


def _confirmed_row(
    loop: LiveLoop, batch: tuple[Any, Any], loss_fn: Callable[[Any, Any], torch.Tensor], row: BatchSizeRow, budget: float
) -> BatchSizeRow:
    try:
        done = confirm(
            loop,
            batch,
            loss_fn,
            batch_size=row.size,
            autocast=row.autocast,
            checkpointed=row.checkpointed,
            budget_bytes=budget,
        )
    except AmpWidgetsError:
        raise
    except Exception as error:  # the user's code with another size
        return dataclasses.replace(row, why_not=_first_line(error))
    return dataclasses.replace(row, confirmed=done)


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


def _first_line(error: BaseException) -> str:
    words = str(error).splitlines()
    text = words[0] if words else ""
    return text if isinstance(error, AmpWidgetsError) else f"{type(error).__name__}: {text}"


_HEADINGS = marked_all("settings", "layers", "largest batch", "× fp32/none", "predicted peak", "really run")
_NOT_KNOWN, _NONE_FITS = marked_all("not known", "none fits")
_WORDS = (0, 5)
_SENTENCES = (2, 5)
