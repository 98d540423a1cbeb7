"""Sampling the gradients of a step, what another loss scale would make of them, and why steps were skipped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import traitlets

from amp_widgets.analysis.gradients import GradientRange, percent
from amp_widgets.core.settings import format_scale
from amp_widgets.widgets.control import Control, page_script
from amp_widgets.widgets.gradient_state import LARGEST_EXPONENT, GradientState, nearest_exponent
from amp_widgets.widgets.state import DashboardState

EXPLAINED = (
    "In the backward pass each layer hands a gradient to the one before it. FP16 stores these down to 2^-24 and up to 65504: "
    "smaller ones become zero, larger ones infinity. The loss scale multiplies all of them by the same number, which moves the "
    "histogram to the right, and is divided out before the optimizer steps. The slider shows what another scale would make "
    "of the gradients of the sampled step, by counting: nothing is run. What is zero already cannot be counted this way."
)
EXAMPLE = (
    "In the digits demo: choose fp16, press Start and sample a step. At 2^16 hardly anything is lost. Move the slider to 2^0: of "
    "most gradients bits are lost. Switch loss scaling off and sample again: now it is so. With a loss 100,000 times smaller, as "
    "a mean over very many numbers can be, hardly anything but zeros would be left then, and the model would learn no more."
)
SKIPS_EXPLAINED = (
    "A step is skipped when a gradient is inf or NaN: the weights stay as they were, and the loss scale is halved. A skip now "
    "and then is how the largest scale that fits is found. Skips in a row are told together: the scales, the parameter in which "
    "the backward pass met inf or NaN first, and whether the loss itself was so already, which no scale can help. Skips that do "
    "not end, and a scale that falls below 1 or grows without bound, get a sentence with the likely cause."
)
SKIPS_EXAMPLE = (
    "In the digits demo: choose fp16, set the initial scale to 2^40 and press Start. Some 20 steps are skipped until the scale "
    "has come down to about 2^18; the first overflow is in head.weight, where the backward pass begins."
)
MOST_SKIPS = 5
MANY_ZEROS, NEARLY_ALL = 0.5, 0.9
"""Above the first share, zeros are the news; above the other, those that are left tell nothing of those that were."""


class GradientCommand(Protocol):
    """What a gradient panel asks for, beside settings: ``("sample")`` the next step; ``("every", steps=n)``, 0 for none;
    and of the panel itself ``("scale", exponent=k)`` and ``("use")``."""

    def __call__(self, name: str, /, **values: Any) -> None: ...


class GradientControl(Control):
    """The head of a gradient panel. What it asks for, see `GradientCommand`."""

    _esm = page_script("gradient_control")
    _css = Control._css + (Path(__file__).parent / "gradient.css").read_text(encoding="utf-8")

    explanation = traitlets.Unicode(EXPLAINED).tag(sync=True)
    example = traitlets.Unicode(EXAMPLE).tag(sync=True)
    skips_explained: traitlets.List[Any] = traitlets.List([SKIPS_EXPLAINED, SKIPS_EXAMPLE]).tag(sync=True)
    sampled = traitlets.Bool(False, help="Whether there is a step to be shown.").tag(sync=True)
    exponent = traitlets.Int(0, help="The scale that is shown, as a power of two.").tag(sync=True)
    measured = traitlets.Unicode(help="The scale that the sampled step had.").tag(sync=True)
    sentences: traitlets.List[Any] = traitlets.List(help="The first is the main one.").tag(sync=True)
    safe = traitlets.Unicode().tag(sync=True)
    suggested = traitlets.Int(None, allow_none=True, help="The scale that is suggested, as a power of two.").tag(sync=True)
    pending = traitlets.Bool(False).tag(sync=True)
    every = traitlets.Int(0).tag(sync=True)
    trains = traitlets.Bool(True).tag(sync=True)
    why_not = traitlets.Unicode().tag(sync=True)
    usable = traitlets.Unicode(help="What becomes of the scale when it is used, or nothing.").tag(sync=True)
    requested = traitlets.Int(None, allow_none=True, help="The initial scale that is set, if a power of two.").tag(sync=True)
    skips: traitlets.List[Any] = traitlets.List(help="Sentences.").tag(sync=True)
    diagnoses: traitlets.List[Any] = traitlets.List(help="What was seen, and the likely cause.").tag(sync=True)

    def __init__(self, command: GradientCommand, state: DashboardState | None = None) -> None:
        super().__init__(command, state)

    def show(self, state: GradientState) -> None:
        """Show this; nothing is sent when it is what is shown."""
        earlier = len(state.skips) - MOST_SKIPS
        skips = [run.sentence for run in state.skips[-MOST_SKIPS:]]
        self._put(
            {
                "pending": state.pending,
                "every": state.every,
                "trains": state.trains,
                "why_not": state.why_not or "",
                "skips": ([f"{earlier:,} earlier"] if earlier > 0 else []) + skips,
                "diagnoses": [[diagnosis.sentence, diagnosis.cause] for diagnosis in state.diagnoses],
            }
        )

    def show_range(self, found: GradientRange | None, exponent: int) -> None:
        """Show what a scale makes of the gradients of a step."""
        if found is None:
            self._put({"sampled": False, "exponent": exponent, "measured": "", "sentences": [], "safe": "", "suggested": None})
            return
        scale = 2.0**exponent
        sentences = list(found.sentences(scale))
        shares = found.shares(scale)
        if shares.zeros > MANY_ZEROS and shares.counted:  # else the main sentence would be of a few that are left
            others = sentences[0].replace(" of the gradients become", " become")
            sentences[0] = f"{percent(shares.zeros)} of the gradients were zero already; of the others, {others}"
        safe = found.safe_scale()
        words, suggested = "No loss scale from 1 on suits these gradients", None
        if any(row.infs or row.nans for row in (*found.at_stake, *found.parameters)):
            words = "Which scale would suit is not known, as some had overflowed: sample a step at a lower one"
        elif found.in_half and shares.zeros > NEARLY_ALL:
            words = "Which scale would suit is not known, as so many were zero: sample a step at a higher one, or in bf16"
        elif safe.least_loss is not None and safe.largest is not None:
            suggested = nearest_exponent(safe.least_loss)
            words = (
                f"At {format_scale(safe.least_loss)} the fewest are lost; up to {format_scale(safe.largest)} nothing overflows, "
                "with a factor of 2 to spare"
            )
        stored = "stored in 16 bits" if found.in_half else "none of them stored in 16 bits"
        had = "without loss scaling" if found.scale == 1 else f"at loss scale {format_scale(found.scale)}"
        count = found.total.elements
        self._put(
            {
                "sampled": True,
                "exponent": exponent,
                "measured": f"Step {found.step:,}, {had}: {count:,} gradients of layers' outputs, {stored}",
                "sentences": sentences,
                "safe": words,
                "suggested": suggested,
            }
        )

    def _traits_for(self, state: DashboardState) -> dict[str, Any]:
        init_scale = float(state.requested("init_scale"))
        exponent = nearest_exponent(init_scale)
        autocast, scaling = state.requested("autocast"), state.requested("scaling")
        usable = "In force from the next step"
        if autocast != "fp16":
            usable = f"Autocast is {autocast}, which does not scale the loss: it holds when that is fp16"
        elif not scaling:
            usable = "Loss scaling is off: it holds when that is on"
        return {"requested": exponent if 2.0**exponent == init_scale else None, "usable": usable}

    def _ask(self, message: Mapping[str, Any]) -> None:
        match message:
            case {"sample": True}:
                if not self.pending:
                    self._request("sample")
            case {"every": int(steps)} if steps != self.every and 0 <= steps <= 1_000_000:
                self._request("every", steps=int(steps))
            case {"exponent": int(exponent)} if 0 <= exponent <= LARGEST_EXPONENT:
                self._request("scale", exponent=int(exponent))
            case {"use": True}:
                if self.sampled:
                    self._request("use")
