"""Two tables of predictions: the largest batch that fits with each of several settings, and what a GPU would need."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import traitlets

from amp_widgets.analysis.batch_sizes import BatchSizes
from amp_widgets.analysis.comparison import Progress
from amp_widgets.analysis.inspections import Inspection, InspectionKind
from amp_widgets.analysis.on_cuda import CudaPredictions
from amp_widgets.core.memory.profile import memory_text
from amp_widgets.language import in_language, marked, say
from amp_widgets.widgets.control import Control, page_script, page_style
from amp_widgets.widgets.plan_state import PlanState
from amp_widgets.widgets.progress_text import progress_text
from amp_widgets.widgets.state import DashboardState
from amp_widgets.widgets.text import not_done_text

BATCH_EXPLAINED = marked(
    "What a step holds grows with the batch, but for the parameters, their gradients and the optimizer's state. For each "
    "format and set of checkpointed layers the largest batch is looked for with which a step stays within the budget above:"
    " steps with other batch sizes are predicted, for which nothing is allocated, until one more row is known to be too "
    "much. To confirm, a real step of each size is trained and taken back; one that runs out of memory is freed and leaves "
    "the run as it was. The run waits meanwhile; it goes on with its own batches, as how large these are is up to your data"
    " loader."
)
BATCH_EXAMPLE = marked(
    "In the text demo the batch is 16. With a budget of 60 MB, 6 fit in fp32, 10 in bf16, and about four times as many "
    "where most layers are checkpointed, too: that is what checkpointing is for where a larger batch is wanted."
)
CUDA_EXPLAINED = marked(
    "There is no GPU here, but much of what a step would need on one is known: which operators CUDA's autocast casts, what "
    "its kernels for attention and dropout keep, and in which blocks its caching allocator hands out memory. Steps are "
    "followed with these rules on tensors without numbers. Allocated is to be compared with "
    "torch.cuda.max_memory_allocated, reserved with torch.cuda.max_memory_reserved. None of it was measured; what is left "
    "out is said below."
)
CUDA_EXAMPLE = marked(
    "In the text demo: press Start, then Predict for CUDA. A step in fp32 comes to 124.8 MB of tensors, 125.8 MB in the "
    "allocator's blocks, and 138.4 MB taken of the device; then compare fp16 with it, with and without checkpointing."
)


class TableControl(Control):
    """Asks for a table that takes long, and shows it; with ``command(kind, …)`` and ``command("cancel_inspection", kind=kind)``.

    Parameters
    ----------
    command
        Called for it.
    state
        What to show first.
    """

    kind: InspectionKind
    explained: str
    exemplified: str

    _esm = page_script("plan_table", "plain_table")
    _css = page_style("plan_panel")

    title = traitlets.Unicode().tag(sync=True)
    name = traitlets.Unicode(help="Of its class in the page.").tag(sync=True)
    explanation = traitlets.Unicode().tag(sync=True)
    example = traitlets.Unicode().tag(sync=True)
    button = traitlets.Unicode(help="What the button says.").tag(sync=True)
    confirm = traitlets.Unicode(help="What a second one says; empty where there is none.").tag(sync=True)
    gone = traitlets.Bool(False, help="There is no use for it here.").tag(sync=True)
    why_no_batch = traitlets.Unicode().tag(sync=True)
    pending = traitlets.Bool(False).tag(sync=True)
    cancelling = traitlets.Bool(False).tag(sync=True)
    fraction = traitlets.Float(0.0, help="That is done.").tag(sync=True)
    progress = traitlets.Unicode(help="What is being done, and the time left.").tag(sync=True)
    why_not = traitlets.Unicode().tag(sync=True)
    caption = traitlets.Unicode(help="When it was made.").tag(sync=True)
    rows: traitlets.List[Any] = traitlets.List(help="Texts; the first row are the headings.").tag(sync=True)
    words: traitlets.List[Any] = traitlets.List(help="Columns that are no numbers.").tag(sync=True)
    notes: traitlets.List[Any] = traitlets.List(help="Sentences below it.").tag(sync=True)
    notes_title = traitlets.Unicode().tag(sync=True)

    def __init__(self, command: Callable[..., None], state: PlanState | None = None) -> None:
        self._command = command
        self._result: Any = None
        super().__init__(_nobody)
        self._put({"explanation": say(self.explained), "example": say(self.exemplified)})
        self.show(PlanState() if state is None else state)

    def show(self, state: PlanState) -> None:
        """Show this; nothing is sent when it is what is shown."""
        inspection = self._inspection(state)
        result, progress = inspection.result, inspection.progress
        values: dict[str, Any] = {}
        if result is not self._result:
            self._result = result
            values = self._table(result)
        self._put(
            values
            | {
                "pending": inspection.pending,
                "cancelling": inspection.cancelling,
                "fraction": 0.0 if progress is None else round(progress.done / progress.total, 3),
                "progress": progress_text(inspection, _done),
                "why_not": "" if inspection.why_not is None else not_done_text(self.kind, inspection.why_not),
                "why_no_batch": ""
                if state.why_no_batch is None
                else say("For this, {why}.", why=in_language(state.why_no_batch)),
                "caption": "" if result is None else self._caption(inspection),
            }
        )

    def close(self) -> None:
        """Close it, and forget whom it asks and what it showed."""
        self._command = _nobody
        self._result = None
        super().close()

    def _ask(self, message: Mapping[str, Any]) -> None:
        match message:
            case {"ask": True}:
                if not (self.pending or self.why_no_batch or self.gone):
                    self._command(self.kind, **self._options())
            case {"cancel": True}:
                if self.pending:
                    self._command("cancel_inspection", kind=self.kind)

    @abstractmethod
    def _inspection(self, state: PlanState) -> Inspection:
        """How it stands."""

    def _options(self) -> dict[str, Any]:
        return {}

    @abstractmethod
    def _table(self, result: Any) -> dict[str, Any]:
        """Trait → value for the table and what belongs to it; also where there is no result."""

    def _caption(self, inspection: Inspection) -> str:
        return say("Predicted before step {step}", step=f"{inspection.step:,}")

    def __repr__(self) -> str:
        return f"<amp_widgets {self.name} table: {self.progress or self.caption or 'nothing asked for yet'}>"


class BatchSizesControl(TableControl):
    """The largest batch that fits.

    Parameters
    ----------
    budget
        What a step may hold, or None where nobody has said.
    """

    kind = "largest_batch"
    explained, exemplified = BATCH_EXPLAINED, BATCH_EXAMPLE

    def __init__(
        self, command: Callable[..., None], budget: Callable[[], float | None] = lambda: None, state: PlanState | None = None
    ) -> None:
        self._budget = budget
        super().__init__(command, state)
        self._put({"title": say("Largest batch"), "name": "batches", "words": [0, 5], "notes_title": say("Notes")})
        self.show_budget()

    def show_budget(self) -> None:
        """The budget is another one."""
        budget = self._budget()
        button = say("Find the largest batch")
        if budget is not None:
            button = say("Find the largest batch for {size}", size=memory_text(budget))
        self._put({"button": button})

    def close(self) -> None:
        """Close it, and forget whom it asks and what it showed."""
        self._budget = lambda: None
        super().close()

    def _ask(self, message: Mapping[str, Any]) -> None:
        match message:
            case {"confirm": True}:
                if self.confirm and not (self.pending or self.why_no_batch):
                    self._command(self.kind, confirm=True, known=self._result)
            case _:
                super()._ask(message)

    def _inspection(self, state: PlanState) -> Inspection:
        return state.largest_batch

    def _options(self) -> dict[str, Any]:
        return {"budget_bytes": self._budget()}

    def _table(self, result: Any) -> dict[str, Any]:
        if not isinstance(result, BatchSizes):
            return {"rows": [], "notes": [], "confirm": ""}
        return {
            "rows": [[in_language(cell) for cell in row] for row in result.to_table()],
            "notes": [in_language(note) for note in result.notes],
            "confirm": say("Confirm by running") if result.confirmable else "",
        }

    def _caption(self, inspection: Inspection) -> str:
        result = inspection.result
        assert isinstance(result, BatchSizes)
        values = {"size": memory_text(result.budget_bytes), "step": f"{inspection.step:,}"}
        if result.cancelled:
            return say("Cancelled early, predicted for {size} before step {step}", **values)
        return say("Predicted for {size} before step {step}", **values)


class CudaControl(TableControl):
    """What a GPU would need; of no use where there is one."""

    kind = "predict_on_cuda"
    explained, exemplified = CUDA_EXPLAINED, CUDA_EXAMPLE

    def __init__(self, command: Callable[..., None], state: PlanState | None = None) -> None:
        super().__init__(command, state)
        title = say("On a GPU (predicted for CUDA, not measured)")
        self._put(
            {"title": title, "name": "cuda", "button": say("Predict for CUDA"), "words": [0], "notes_title": say("Left out")}
        )

    def _traits_for(self, state: DashboardState) -> dict[str, Any]:
        return {"gone": state.device.startswith("cuda")}

    def _inspection(self, state: PlanState) -> Inspection:
        return state.on_cuda

    def _table(self, result: Any) -> dict[str, Any]:
        if not isinstance(result, CudaPredictions):
            return {"rows": [], "notes": []}
        rows = [[in_language(cell) for cell in row] for row in result.to_rows()]
        return {"rows": rows, "notes": [in_language(one) for one in result.left_out]}


# Words of one of these tables that are in no sentence.
_HEADINGS = (
    marked("settings"), marked("batch"), marked("tensors"), marked("allocated"), marked("reserved"), marked("layers"),
    marked("confirmed"), marked("at least {count}"), marked("with"), marked("by"),
)  # fmt: skip


def _done(progress: Progress) -> str:
    return say("{shown} of {count}", shown=progress.done + 1, count=progress.total)


def _nobody(*_args: object, **_values: object) -> None:
    """Nobody is asked after `close`."""
