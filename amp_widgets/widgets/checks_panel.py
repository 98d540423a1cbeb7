"""Two checks on the newest batch: whether the settings in force give the right numbers, and what will go wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import traitlets

from amp_widgets.analysis.inspections import Inspection
from amp_widgets.language import in_language, marked, say
from amp_widgets.widgets.control import Control, page_script, page_style
from amp_widgets.widgets.state import DashboardState
from amp_widgets.widgets.text import html_in_language, not_done_text

Check = Literal["check", "preflight"]
CHECKS: tuple[Check, ...] = ("check", "preflight")
PARITY_EXPLAINED = marked(
    "Parity runs a forward and a backward pass on the newest batch with the settings in force, and again without checkpointing. "
    "Loss, gradients, buffers and random numbers have to agree bit for bit, as checkpointing only computes again what is known. "
    "Autocast does change the numbers: how far they are from fp32 is measured. Nothing is trained by it, and weights, gradients, "
    "buffers and random numbers are as before afterwards."
)
PARITY_EXAMPLE = marked(
    "In the digits demo: choose bf16, press Start, tick some layers as checkpointed and press Check parity. Checkpointing "
    "changes nothing, and the gradients in bf16 are off by some percent; in the text demo by some tenths of a percent."
)
PREFLIGHT_EXPLAINED = marked(
    "Preflight reads the model, the optimizer and the settings, watches one forward pass, and lists what fails or gives wrong "
    "numbers, also what would do so only on a GPU; with each the cure. Nothing is trained by it either."
)
PREFLIGHT_EXAMPLE = marked(
    "In the digits demo it finds nothing. Convert the model by mistake, session.model.half() in a cell, and press Preflight: its "
    "parameters and BatchNorm are in fp16 then, and the optimizer's state is not. session.model.float() puts it right. In the "
    "text demo it tells what the fused optimizer means for clipping gradients."
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChecksState:
    """What a panel of checks shows.

    Attributes
    ----------
    check, preflight
        How they stand.
    automatic
        Whether a check is done after each change of the checkpointed layers.
    why_no_batch
        Why there is no batch to check on, or None.
    """

    check: Inspection = dataclasses.field(default_factory=Inspection)
    preflight: Inspection = dataclasses.field(default_factory=Inspection)
    automatic: bool = False
    why_no_batch: str | None = None


class ChecksPanel(Control):
    """Shows the reports; asks with ``command("check")``, ``command("preflight")`` and ``command("automatic", on=True)``."""

    _esm = page_script("checks_panel")
    _css = page_style("checks_panel")

    explanations: traitlets.List[Any] = traitlets.List(
        [[PARITY_EXPLAINED, PARITY_EXAMPLE], [PREFLIGHT_EXPLAINED, PREFLIGHT_EXAMPLE]], help="With each an example."
    ).tag(sync=True, said=True)
    check = traitlets.Dict(help="What `_shown` says.").tag(sync=True)
    preflight = traitlets.Dict(help="The same.").tag(sync=True)
    automatic = traitlets.Bool(False).tag(sync=True)
    why_no_batch = traitlets.Unicode().tag(sync=True)

    def __init__(self, command: Callable[..., None], state: ChecksState | None = None) -> None:
        super().__init__(command)
        self.show(ChecksState() if state is None else state)

    def show(self, state: ChecksState) -> None:
        """Show this; nothing is sent when it is what is shown."""
        self._put(
            {
                "check": _shown(state.check, "check"),
                "preflight": _shown(state.preflight, "preflight"),
                "automatic": state.automatic,
                "why_no_batch": ""
                if state.why_no_batch is None
                else say("For parity {why}.", why=in_language(state.why_no_batch)),
            }
        )

    def _traits_for(self, state: DashboardState) -> dict[str, Any]:
        return {}

    def _ask(self, message: Mapping[str, Any]) -> None:
        match message:
            case {"inspect": ("check" | "preflight") as kind}:
                if not getattr(self, kind)["pending"]:
                    self._request(kind)
            case {"automatic": bool(on)} if on != self.automatic:
                self._request("automatic", on=on)

    def __repr__(self) -> str:
        done = [kind for kind in CHECKS if getattr(self, kind)["html"]]
        return f"<amp_widgets checks panel: {', '.join(done) or 'nothing checked yet'}>"


# Words of a report that are in no sentence.
_SAID = (
    marked("nothing found"), marked("{count} gradients"), marked("{count} gradient"), marked("{count} buffers"),
    marked("{count} buffer"), marked("what"), marked("name"), marked("off by"), marked("relative"), marked("gradient"),
    marked("buffer"), marked("random"), marked("error"), marked("loss"), marked("the loss"), marked("(predicted)"),
    marked("warning"), marked("note"),
)  # fmt: skip


def _shown(one: Inspection, kind: Check) -> dict[str, Any]:
    """``html`` of the report, in which everything is escaped, ``caption``, ``why_not`` and ``pending``."""
    return {
        "html": "" if one.result is None else html_in_language(one.result._repr_html_()),
        "caption": "" if one.result is None else say("Before step {step}", step=f"{one.step:,}"),
        "why_not": "" if one.why_not is None else not_done_text(kind, one.why_not),
        "pending": one.pending,
    }
