"""Which settings are compared and how often, how far that is, and what came out, as a table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import traitlets

from amp_widgets.analysis.comparison import LEAST_STEPS, Comparison, Progress, Row
from amp_widgets.analysis.comparisons import ComparisonStatus
from amp_widgets.analysis.corners import all_layers
from amp_widgets.analysis.relative_error import error_text
from amp_widgets.charts.comparison import SETS, set_name
from amp_widgets.core.memory.profile import memory_text
from amp_widgets.core.number_text import ratio_text, time_text
from amp_widgets.core.settings import AUTOCAST_NAMES, Settings
from amp_widgets.language import in_language, marked, say, say_number
from amp_widgets.widgets.control import Control, page_script, page_style
from amp_widgets.widgets.progress_text import progress_text
from amp_widgets.widgets.state import DashboardState
from amp_widgets.widgets.text import not_done_text

if TYPE_CHECKING:
    from amp_widgets.core.layers import Layer

EXPLAINED = marked(
    "Mixed precision keeps and computes much of a step in 16 bits; checkpointing keeps less of the forward pass, and computes "
    "it again in the backward pass. How much memory that saves and what it does to the time depends on the model, the batch and "
    "the device, so it is measured: each combination trains a few steps on the newest batch from the same start, in turns, so "
    "that a slow moment of the machine meets all of them. The peak is the most that is held within a step. The time is that of "
    "the median step, below it the middle half of the steps; a ratio is grey where that overlaps with fp32/none, or where "
    "too few steps were timed: which is faster is then not known. The error of the first gradients says what a format does to "
    "the numbers; checkpointing has to leave them as they are. The run waits meanwhile and goes on afterwards, and nothing that "
    "was trained here is kept."
)
EXAMPLE = marked(
    "In the text demo on a CPU: press Start, then Compare. The peak of a step is 124.8 MB in fp32, 82.6 MB in bf16, 43.0 MB with "
    "all layers checkpointed and 34.4 MB with both. The first gradients are off by about 3e-03 in bf16 and 4e-04 in fp16, and by "
    "nothing where layers are only checkpointed. What becomes of the step time differs from one CPU to the next: see yours."
)
STEPS = (3, 5, 10, 20)
ROUNDS = (1, 3, 5, 9)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CompareState:
    """What a panel of comparisons shows, beside a `DashboardState`.

    Attributes
    ----------
    status
        How the comparisons stand.
    why_no_batch
        Why there is no batch to compare on, or None.
    planned
        The layers of the newest plan; None where there is none.
    """

    status: ComparisonStatus = dataclasses.field(default_factory=ComparisonStatus)
    why_no_batch: str | None = None
    planned: tuple[str, ...] | None = None


class CompareControl(Control):
    """Asks with ``command("compare", grid=…, steps=…, rounds=…)`` and ``command("cancel")``; and with
    ``request(autocast=…, checkpointed=…)`` for what a row was measured with.

    `show` shows how the comparisons stand, `render` what can be compared and what is in force; neither sends anything when it is
    what is shown.

    Parameters
    ----------
    command
        Called for comparisons.
    request
        Called for settings, as by every control.
    state, dashboard
        What to show first.
    """

    _esm = page_script("compare_control", "virtual_table")
    _css = page_style("virtual_table", "compare_panel")

    explanation = traitlets.Unicode(EXPLAINED).tag(sync=True, said=True)
    example = traitlets.Unicode(EXAMPLE).tag(sync=True, said=True)
    formats: traitlets.List[Any] = traitlets.List(help="Name, label, whether ticked, why it cannot be.").tag(sync=True)
    sets: traitlets.List[Any] = traitlets.List(help="The same of sets of checkpointed layers.").tag(sync=True)
    all_steps: traitlets.List[Any] = traitlets.List([*STEPS]).tag(sync=True)
    all_rounds: traitlets.List[Any] = traitlets.List([*ROUNDS]).tag(sync=True)
    steps = traitlets.Int(5).tag(sync=True)
    rounds = traitlets.Int(3).tag(sync=True)
    size = traitlets.Unicode(help="How much that comes to.").tag(sync=True)
    why_no_batch = traitlets.Unicode().tag(sync=True)
    pending = traitlets.Bool(False).tag(sync=True)
    cancelling = traitlets.Bool(False).tag(sync=True)
    fraction = traitlets.Float(0.0, help="That is done.").tag(sync=True)
    progress = traitlets.Unicode(help="What is being done, and the time left.").tag(sync=True)
    why_not = traitlets.Unicode().tag(sync=True)
    caption = traitlets.Unicode(help="When it was measured.").tag(sync=True)
    rows: traitlets.List[Any] = traitlets.List(help="Of each row what `_row` says.").tag(sync=True)
    uses: traitlets.List[Any] = traitlets.List(help="Of each row whether it is in force or requested.").tag(sync=True)
    loss_head = traitlets.Unicode(marked("loss")).tag(sync=True, said=True)
    verdict: traitlets.List[Any] = traitlets.List(help="Sentences.").tag(sync=True)
    details: traitlets.List[Any] = traitlets.List(help="How it was obtained.").tag(sync=True)

    def __init__(
        self,
        command: Callable[..., None],
        request: Callable[..., None],
        state: CompareState | None = None,
        dashboard: DashboardState | None = None,
    ) -> None:
        self._command = command
        self._result: Comparison | None = None
        self._dashboard: DashboardState | None = None
        self._ticked: dict[str, list[str]] = {"format": [*AUTOCAST_NAMES], "set": [*SETS]}
        self._known: tuple[Layer, ...] = ()
        self._all: tuple[str, ...] = ()
        self._planned: tuple[str, ...] | None = None
        super().__init__(request, dashboard)
        self.show(CompareState() if state is None else state)

    def show(self, state: CompareState) -> None:
        """Show this; nothing is sent when it is what is shown."""
        status, values = state.status, dict[str, Any]()
        if status.result is not self._result:
            self._result = status.result
            values = {**_result_traits(status.result), **self._uses()}
        if state.planned != self._planned:
            self._planned = state.planned
            values |= self._choices()
        result, progress = status.result, status.progress
        self._put(
            values
            | {
                "pending": status.pending,
                "cancelling": status.cancelling,
                "fraction": 0.0 if progress is None else round(progress.done / progress.total, 3),
                "progress": progress_text(status, _done),
                "caption": "" if result is None else say(_when(result), step=f"{status.step:,}"),
                "why_not": _why_not(status),
                "why_no_batch": ""
                if state.why_no_batch is None
                else say("To compare, {why}.", why=in_language(state.why_no_batch)),
            }
        )

    def close(self) -> None:
        """Close it, and forget whom it asks and what it showed."""
        self._command = _nobody
        self._result = self._dashboard = None
        super().close()

    def _traits_for(self, state: DashboardState) -> dict[str, Any]:
        self._dashboard = state
        if self._known is not state.layers and self._known != state.layers:
            self._known, self._all = state.layers, all_layers(state.layers)
        return {**self._choices(), **self._uses()}

    def _ask(self, message: Mapping[str, Any]) -> None:
        match message:
            case {"compare": True}:
                grid = self._grid()
                if not self.pending and not self.why_no_batch and all(grid.values()):
                    self._command("compare", grid=grid, steps=self.steps, rounds=self.rounds)
            case {"cancel": True}:
                if self.pending:
                    self._command("cancel")
            case {"axis": ("format" | "set") as axis, "name": str(name), "on": bool(on)}:
                others = [one for one in self._ticked[axis] if one != name]
                self._ticked[axis] = [*others, name] if on else others
                self._put(self._choices())
            case {"steps": int(steps)} if steps in STEPS:
                self._put({"steps": steps} | self._choices(steps=steps))
            case {"rounds": int(rounds)} if rounds in ROUNDS:
                self._put({"rounds": rounds} | self._choices(rounds=rounds))
            case {"use": int(position)}:
                rows = () if self._result is None else self._result.rows
                if 0 <= position < len(rows) and rows[position].why_not is None and self.uses[position] == "":
                    self._request(autocast=rows[position].autocast, checkpointed=rows[position].checkpointed)

    def _grid(self) -> dict[str, list[str]]:
        """What is ticked and can be compared."""
        formats = [name for name, _, on, why_off in self._formats() if on and not why_off]
        return {"autocast": formats, "checkpointed": [name for name, _, on, why_off in self._sets() if on and not why_off]}

    def _choices(self, *, steps: int | None = None, rounds: int | None = None) -> dict[str, Any]:
        a_round = 1 + (self.steps if steps is None else steps)
        total = (self.rounds if rounds is None else rounds) * a_round + 1  # one more, of which the memory is measured
        return {"formats": self._formats(), "sets": self._sets(), "size": _size_text(self._grid(), total)}

    def _formats(self) -> list[list[Any]]:
        support = {} if self._dashboard is None else self._dashboard.support
        found: list[list[Any]] = []
        for name in AUTOCAST_NAMES:
            its = support.get(name)
            why_off = "" if its is None or its.available else in_language(its.note) or say("this device does not have it")
            found.append([name, name, name in self._ticked["format"], why_off])
        return found

    def _sets(self) -> list[list[Any]]:
        chosen = () if self._dashboard is None else self._dashboard.settings.checkpointed
        why_off = {
            "none": "",
            "all": "" if self._all else say("this model has no layer inside it that can be checkpointed"),
            "planned": self._why_not_planned(),
            "chosen": "" if chosen else say("no layer is checkpointed now: tick some under Layers"),
        }
        for name, its in (("all", self._all), ("planned", self._planned)):
            if chosen and its is not None and set(chosen) == set(its) and not why_off[name]:
                why_off["chosen"] = say("the layers that are checkpointed now are those of {name}", name=set_name(name))
        labels = {
            name: set_name(name, *([str(len(layers))] if layers else []))
            for name, layers in zip(SETS, ((), self._all, self._planned, chosen), strict=True)
        }
        return [[name, labels[name], name in self._ticked["set"], why_off[name]] for name in SETS]

    def _why_not_planned(self) -> str:
        if self._planned is None:
            return say("there is no plan yet: make one under Plan")
        if not self._planned:
            return say("the plan checkpoints no layer, as none does")
        return say("the plan's layers are those of all") if set(self._planned) == set(self._all) else ""

    def _uses(self) -> dict[str, Any]:
        rows: Sequence[Row] = () if self._result is None else self._result.rows
        if self._dashboard is None:
            return {"uses": ["" for _ in rows]}
        settings, waiting = self._dashboard.settings, self._dashboard.waiting
        names = {name: value for name, value in waiting.items() if name in ("autocast", "checkpointed")}
        wanted = settings.replace(**names) if names else settings
        return {"uses": [_use(row, settings, wanted) for row in rows]}

    def __repr__(self) -> str:
        return f"<amp_widgets compare control: {self.progress or self.caption or 'nothing compared yet'}>"


def _use(row: Row, settings: Settings, wanted: Settings) -> str:
    def is_of(one: Settings) -> bool:
        return one.autocast == row.autocast and set(one.checkpointed) == set(row.checkpointed)

    if is_of(wanted):
        return "in force" if is_of(settings) else "requested"
    return ""


def _result_traits(result: Comparison | None) -> dict[str, Any]:
    if result is None:
        return {"rows": [], "verdict": [], "details": [], "loss_head": say("loss")}
    return {
        "rows": [_row(row) for row in result.rows],
        "verdict": [in_language(one) for one in result.verdict],
        "details": [in_language(one) for one in (*result.notes, result.obtained)],
        "loss_head": say_number("loss after {count}\xa0step", "loss after {count}\xa0steps", result.steps),
    }


def _row(row: Row) -> dict[str, Any]:
    """Texts, by column."""
    count = len(row.checkpointed)
    named = {
        "label": in_language(row.label),
        "layers": say_number("{count} layer", "{count} layers", count) if count else "",
        "format": row.autocast,
        "title": ", ".join(row.checkpointed),
    }
    if row.why_not is not None:
        return named | {"why_not": in_language(row.why_not)}
    remarks = [say("{nonfinite} elements inf or NaN", nonfinite=f"{row.nonfinite:,}")] if row.nonfinite else []
    return named | {
        "why_not": "",
        "peak": _or_dash(memory_text(row.peak_bytes), row.peak_bytes),
        "peak_ratio": _or_dash(ratio_text(row.peak_ratio), row.peak_ratio),
        "time": _or_dash(time_text(row.step_s), row.step_s),
        "spread": _or_dash(
            say("{step_s_low} to {step_s_high}", step_s_low=time_text(row.step_s_low), step_s_high=time_text(row.step_s_high)),
            row.step_s,
        ),
        "time_ratio": _or_dash(ratio_text(row.time_ratio), row.time_ratio),
        "unsure": _unsure(row),
        "samples": _or_dash(f"{row.samples_per_s:,.4g}", row.samples_per_s),
        "loss": _or_dash(f"{row.loss:#.4g}", row.loss),
        "gradients": error_text(row.gradient_error) if row.reference is not None else say("reference"),
        "skipped": say("{skipped} of {steps}", skipped=row.skipped, steps=row.steps) if row.skipped else "0",
        "remark": "; ".join(remarks),
    }


# Of what a comparison says by itself, beside what its own sentences are.
_SAID = (
    marked("peak {ratio} of {other}"), marked("time {ratio} of {other}"), marked("time {ratio} (within the spread) of {other}"),
)  # fmt: skip


def _unsure(row: Row) -> str:
    """Why it is not known whether it is faster than the reference; nothing where it is."""
    other = row.reference
    if other is None or row.time_differs:
        return ""
    if row.few_steps or other.few_steps:
        return say("Fewer than {count} steps were timed: which is faster is not known", count=LEAST_STEPS)
    return say("Within the spread of {settings}: which is faster is not known", settings=other.label)


def _or_dash(text: str, number: float) -> str:
    return "–" if math.isnan(number) else text


def _size_text(grid: Mapping[str, Sequence[str]], steps: int) -> str:
    if not grid["autocast"]:
        return say("Tick at least one format")
    if not grid["checkpointed"]:
        return say("Tick at least one set of layers")
    count = len(grid["autocast"]) * len(grid["checkpointed"])
    reference = "fp32" in grid["autocast"] and "none" in grid["checkpointed"]
    count += not reference
    total = f"{count * steps:,}"
    if reference:
        return say_number(
            "{count} combination: {total} steps on one batch",
            "{count} combinations: {total} steps on one batch",
            count,
            total=total,
        )
    return say(
        "{count} combinations, with fp32/none, to which the ratios are: {total} steps on one batch", count=count, total=total
    )


def _done(progress: Progress) -> str:
    return say("step {step} of {last}", step=f"{progress.done:,}", last=f"{progress.total:,}")


def _why_not(status: ComparisonStatus) -> str:
    if status.cancelled:
        if status.result is None:
            return say("Cancelled before a round was complete")
        return say("Cancelled before a round was complete; what is shown was measured before")
    return "" if status.why_not is None else not_done_text("compare", status.why_not)


def _when(result: Comparison) -> str:
    return marked("Cancelled early, measured before step {step}") if result.cancelled else marked("Measured before step {step}")


def _nobody(*_args: object, **_values: object) -> None:
    """Nobody is asked after `close`."""
