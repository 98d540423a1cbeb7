"""Two checks on the newest batch: whether the settings in force give the right numbers, and what will go wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import traitlets

from amp_widgets.analysis.inspections import Inspection
from amp_widgets.widgets.control import Control, page_script
from amp_widgets.widgets.state import DashboardState

Check = Literal["check", "preflight"]
CHECKS: tuple[Check, ...] = ("check", "preflight")
EXPLAINED = (
    "Parity runs a forward and a backward pass on the newest batch with the settings in force, and again without checkpointing. "
    "Loss, gradients, buffers and random numbers have to agree bit for bit, as checkpointing only computes again what is known. "
    "Autocast does change the numbers: how far they are from fp32 is measured. Preflight reads the model, the optimizer and the "
    "settings, watches a forward pass, and lists what fails or gives wrong numbers, also what would do so only on a GPU. Nothing "
    "is trained by either of them, and weights, gradients, buffers and random numbers are as before afterwards."
)
EXAMPLE = (
    "In the digits demo: choose bf16, press Start, tick some layers as checkpointed and press Check parity. Checkpointing "
    "changes nothing, and the gradients in bf16 are off by some percent."
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
    _css = Control._css + (Path(__file__).parent / "checks_panel.css").read_text(encoding="utf-8")

    explanation = traitlets.Unicode(EXPLAINED).tag(sync=True)
    example = traitlets.Unicode(EXAMPLE).tag(sync=True)
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
                "why_no_batch": "" if state.why_no_batch is None else f"For parity {state.why_no_batch}.",
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


def _shown(one: Inspection, kind: Check) -> dict[str, Any]:
    """``html`` of the report, in which everything is escaped, ``caption``, ``why_not`` and ``pending``."""
    return {
        "html": "" if one.result is None else one.result._repr_html_(),
        "caption": "" if one.result is None else f"Before step {one.step:,}",
        "why_not": "" if one.why_not is None else f"The last {kind} failed: {one.why_not.removeprefix(f'{kind}: ')}",
        "pending": one.pending,
    }
