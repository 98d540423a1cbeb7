"""What was measured with several settings on one batch, as a table and a picture, each number with its ratio to fp32."""

from __future__ import annotations

import html
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from amp_widgets.analysis.relative_error import error_text
from amp_widgets.core.memory.profile import memory_text
from amp_widgets.core.number_text import ratio_text, time_text
from amp_widgets.core.table import table_html, table_text, told
from amp_widgets.errors import AmpWidgetsError, RunError
from amp_widgets.language import in_language, marked, marked_all

if TYPE_CHECKING:
    import plotly.graph_objects as go


LEAST_STEPS = 5
"""Of fewer timed steps it is not said which is faster."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One combination of settings. NaN: not measured.

    Attributes
    ----------
    label
        Such as ``"bf16/all"``.
    autocast
        The format.
    layers_name
        What the set of checkpointed layers is called.
    checkpointed
        Their names.
    peak_bytes
        The most that was held at one time within a step.
    step_s, step_s_low, step_s_high
        The median of the timed steps, and the quartiles below and above it: half of the steps were within. Steps that were
        skipped do not count, as they do less.
    samples_per_s
        Of the median step; NaN where the batch does not say how many samples it has.
    loss
        After as many training steps on the batch as are timed in a round; the median over the rounds.
    gradient_error
        Of the first step's gradients against those of the reference: relative, as `RelativeError` has it, over the elements that
        are finite in both.
    nonfinite
        Elements of the first step's gradients that are inf or NaN where the reference's are finite.
    skipped, steps
        How many of the steps of one round were skipped because of inf or NaN, and how many there were, the warm-up included.
    rounds
        That were completed.
    why_not
        Why it was not measured; None where it was.
    reference
        The row that the ratios are to; None for that row itself.
    """

    label: str
    autocast: str
    layers_name: str
    checkpointed: tuple[str, ...]
    peak_bytes: float = math.nan
    step_s: float = math.nan
    step_s_low: float = math.nan
    step_s_high: float = math.nan
    samples_per_s: float = math.nan
    loss: float = math.nan
    gradient_error: float = math.nan
    nonfinite: int = 0
    skipped: int = 0
    steps: int = 0
    rounds: int = 0
    why_not: str | None = None
    reference: Row | None = None

    @property
    def peak_ratio(self) -> float:
        """Of the peaks: below 1 is less memory than the reference takes."""
        return self._ratio(lambda row: row.peak_bytes)

    @property
    def time_ratio(self) -> float:
        """Of the median step times: below 1 is faster than the reference."""
        return self._ratio(lambda row: row.step_s)

    @property
    def samples_ratio(self) -> float:
        """Of the samples a second."""
        return self._ratio(lambda row: row.samples_per_s)

    @property
    def loss_ratio(self) -> float:
        """Of the losses."""
        return self._ratio(lambda row: row.loss)

    @property
    def time_differs(self) -> bool:
        """Whether the middle halves of the step times, its own and the reference's, are apart from each other.

        Of a few steps that may be by chance: with fewer than `LEAST_STEPS` of either, nothing is said to differ.
        """
        other = self.reference
        if other is None or self.few_steps or other.few_steps:
            return False
        return self.step_s_low > other.step_s_high or self.step_s_high < other.step_s_low

    @property
    def few_steps(self) -> bool:
        """Whether fewer than `LEAST_STEPS` were timed, which the first one of a round is not, nor is one that was skipped."""
        return self.rounds * (self.steps - max(1, self.skipped)) < LEAST_STEPS

    def _ratio(self, number: Callable[[Row], float]) -> float:
        own, other = number(self), number(self if self.reference is None else self.reference)
        return own / other if other else math.nan


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a comparison is.

    Attributes
    ----------
    done, total
        Steps; `total` becomes less when a combination drops out.
    seconds_left
        An estimate from the steps so far; NaN before the first.
    doing
        For people: ``"round 2 of 3: bf16/all"``.
    """

    done: int
    total: int
    seconds_left: float
    doing: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Several settings on one batch of one model, measured in turn from the same start.

    Attributes
    ----------
    rows
        The reference first, which is fp32 without checkpointing, then the others in the grid's order.
    steps, rounds
        Steps that were timed in a round, and rounds that were asked for.
    device
        That it was measured on, with the version of torch.
    batch
        Shapes and types of the tensors in it.
    batch_size
        The first dimension of the first of them; None where there is none.
    memory_source
        How the peaks were obtained, or why they were not.
    notes
        What there is to know about the formats on this device, and what was left out.
    cancelled
        Whether it was ended early. Then there are rows only of what had completed a round, or had dropped out.
    """

    rows: tuple[Row, ...]
    steps: int
    rounds: int
    device: str
    batch: str
    batch_size: int | None
    memory_source: str
    notes: tuple[str, ...] = ()
    cancelled: bool = False

    def row(self, label: str) -> Row:
        """One of them.

        Raises
        ------
        RunError
            When there is none with this label.
        """
        for row in self.rows:
            if row.label == label:
                return row
        known = ", ".join(repr(row.label) for row in self.rows) or "a comparison with rows"
        raise RunError(f"comparison: there is no row {label!r} here, expected {known}")

    @property
    def obtained(self) -> str:
        """How the numbers were obtained, and on what."""
        rounds = f"in {self.rounds} rounds" if self.rounds > 1 else "in one round"
        steps = f"{self.steps} timed steps" if self.steps > 1 else "one timed step"
        return (
            f"Measured on {self.device}, {rounds}, all in turn: from the same start a warm-up step, then {steps}. Times are the "
            f"median, and in brackets the middle half of the steps. Peak: {self.memory_source}, in another step. "
            f"Batch: {self.batch}. "
            f"Gradients: relative error of the first step's against the reference. Loss: on this batch, after {self.steps} "
            f"training step{'s' * (self.steps != 1)} on it."
        )

    @property
    def verdict(self) -> tuple[str, ...]:
        """What the numbers say, in sentences; nothing that was not measured."""
        measured = [row for row in self.rows if row.why_not is None]
        sentences = [_sentence(row) for row in measured if row.reference is not None and row.reference.why_not is None]
        sentences += _best(measured)
        if self.cancelled:
            sentences.append("It was cancelled: what had not completed a round is not here.")
        return tuple(sentences)

    def to_table(self) -> list[tuple[str, ...]]:
        """Rows of text, the first of them the headings; ratios to the reference are in the cells."""
        return [_HEADINGS, *map(_cells, self.rows)]

    def to_figure(self, *, title: str | None = None, theme: Literal["light", "dark"] = "light") -> go.Figure:
        """Peak memory against step time, each row a point.

        Parameters
        ----------
        title
            In place of a sentence about what is shown; ``""`` for none.
        theme
            ``"light"`` or ``"dark"``.

        Raises
        ------
        AmpWidgetsError
            When there is no such theme.
        MissingExtraError
            When plotly is not installed.
        """
        if theme not in ("light", "dark"):
            raise AmpWidgetsError(f"to_figure: got {theme!r} as the theme, expected 'light' or 'dark'")
        from amp_widgets.charts.comparison import comparison_figure

        return comparison_figure(self.rows, title=title, theme=theme)

    def __repr__(self) -> str:
        sentences = map(in_language, (*self.verdict, *self.notes, self.obtained))
        return "\n".join([*table_text(self._told_table(), words=_WORDS), *sentences])

    def _repr_html_(self) -> str:
        verdict = "".join(f"<li>{html.escape(in_language(sentence))}</li>" for sentence in self.verdict)
        words = "".join(f"<div>{html.escape(in_language(sentence))}</div>" for sentence in (*self.notes, self.obtained))
        return f"<div>{table_html(self._told_table(), words=_WORDS)}<ul>{verdict}</ul>{words}</div>"

    def _told_table(self) -> list[list[str]]:
        return told(self.to_table(), sentences=_SENTENCES)


_HEADINGS = marked_all("settings", "layers", "peak", "step time", "samples a second", "loss", "gradients", "skipped", "")
_WORDS = (0, 8)
_SENTENCES = (3, 6, 7, 8)


def _cells(row: Row) -> tuple[str, ...]:
    layers = str(len(row.checkpointed) or "")
    if row.why_not is not None:
        return row.label, layers, "–", "–", "–", "–", "–", "–", row.why_not
    times = f"{time_text(row.step_s)} ({time_text(row.step_s_low)} to {time_text(row.step_s_high)})"
    remarks = []
    if row.nonfinite:
        remarks.append(f"{row.nonfinite:,} gradient elements inf or NaN in the first step")
    if math.isnan(row.step_s):
        remarks.append("every timed step was skipped, which says nothing of the time")
    return (
        row.label,
        layers,
        _with_ratio(memory_text(row.peak_bytes), row.peak_ratio),
        _with_ratio(times, row.time_ratio),
        _with_ratio(f"{row.samples_per_s:,.4g}", row.samples_ratio),
        _with_ratio(f"{row.loss:#.4g}", row.loss_ratio),
        error_text(row.gradient_error) if row.reference is not None else marked("reference"),
        f"{row.skipped} of {row.steps}" if row.skipped else "0",
        "; ".join(remarks),
    )


def _with_ratio(text: str, ratio: float) -> str:
    if "nan" in text:
        return "–"
    return text if math.isnan(ratio) else f"{text} {ratio_text(ratio)}"


def _sentence(row: Row) -> str:
    """What became of everything, in one sentence."""
    other = row.reference
    assert other is not None
    parts = []
    if not math.isnan(row.peak_ratio):
        parts.append(f"peak {ratio_text(row.peak_ratio)}")
    if not math.isnan(row.time_ratio):
        few = row.few_steps or other.few_steps
        unsure = "" if row.time_differs else " (too few steps to tell)" if few else " (within the spread)"
        parts.append(f"time {ratio_text(row.time_ratio)}{unsure}")
    compared = f"{', '.join(parts)} of {other.label}" if parts else "neither peak nor time is known"
    if row.gradient_error == 0 and not row.nonfinite:
        same = " and the loss" if row.loss == other.loss else ""
        compared += f"; the first gradients{same} are the same"
    elif not math.isnan(row.gradient_error):
        compared += f"; first gradients off by {error_text(row.gradient_error)}"
    if row.nonfinite:
        compared += f", {row.nonfinite:,} of their elements inf or NaN"
    if row.skipped:
        compared += f"; {row.skipped} of {row.steps} steps skipped"
    return f"{row.label}: {compared}."


def _best(rows: list[Row]) -> list[str]:
    """Which needs the least, and which is the fastest."""
    sentences = []
    known = [row for row in rows if not math.isnan(row.peak_bytes)]
    if len(known) > 1:
        least = min(row.peak_bytes for row in known)
        names = [row.label for row in known if row.peak_bytes == least]
        sentences.append(f"Least memory: {_listed(names)}, {memory_text(least)}.")
    timed = [row for row in rows if not math.isnan(row.step_s)]
    if len(timed) > 1:
        fastest = min(timed, key=lambda row: row.step_s)
        others = [row for row in timed if row is not fastest]
        few = [row.label for row in others if row.few_steps or fastest.few_steps]
        near = [row.label for row in others if row.label not in few and row.step_s_low <= fastest.step_s_high]
        if near or few:
            beside = f"; within the spread of it: {_listed(near)}" if near else ""
            beside += f"; too few steps were timed to tell it from {_listed(few)}" if few else ""
            least_s = time_text(fastest.step_s)
            sentences.append(f"No step is clearly the shortest. Least median: {fastest.label}, {least_s}{beside}.")
        else:
            sentences.append(f"Shortest step: {fastest.label}, {time_text(fastest.step_s)}.")
    return sentences


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
