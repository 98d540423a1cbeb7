"""A loop instrumented by hand: plain ``torch.autocast`` and ``torch.amp.GradScaler``, told at each step what to do.

Nothing of amp_widgets is used here: it is what captured loops are compared with.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler

Script = Mapping[int, Mapping[str, Any]]
"""Step → the changes that are in force from it on, by name of the setting."""

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
SCALER_SETTINGS = {
    "init_scale": "scale",
    "growth_factor": "growth_factor",
    "backoff_factor": "backoff_factor",
    "growth_interval": "growth_interval",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """What happened in a step; `used` and `after` are the scale before and after ``update()``, None where none was in force."""

    loss: float
    used: float | None
    after: float | None

    @property
    def scale(self) -> float:
        return 1.0 if self.used is None else self.used

    @property
    def skipped(self) -> bool:
        return self.used is not None and self.after is not None and self.after < self.used


class Hand:
    """What a loop asks where it would have its own region, scaler, backward or step.

    With an empty script, every answer is what the loop does anyway.
    """

    def __init__(self, script: Script | None = None) -> None:
        self.script = dict(script or {})
        self.rows: list[Row] = []
        self.chosen: str | None = None
        self._loss: torch.Tensor | None = None
        self._passing = GradScaler("cpu", enabled=False)
        self._added = GradScaler("cpu")

    # ---- regions -----------------------------------------------------------------------------------------------------

    def region(self, dtype: torch.dtype = torch.bfloat16, *, enabled: bool = True) -> torch.autocast:
        """For a region of the loop's own: the format that was chosen, else the region's; what is off stays off."""
        if not enabled or self.chosen == "fp32":
            return torch.autocast("cpu", enabled=False)
        return torch.autocast("cpu", dtype=dtype if self.chosen is None else DTYPES[self.chosen])

    def forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """For an outermost forward of a loop without regions: in the format that was chosen, with fp32 outputs."""
        if self.chosen in (None, "fp32"):
            return module(*args, **kwargs)
        with self.region():
            out = module(*args, **kwargs)
        return _float(out)

    # ---- a loop with a scaler of its own -----------------------------------------------------------------------------

    def scaler(self, own: GradScaler) -> GradScaler:
        """The loop's own scaler, or one that passes through while the format that was chosen needs none."""
        return own if self.chosen in (None, "fp16") else self._passing

    def sees(self, loss: torch.Tensor) -> torch.Tensor:
        """Note what is backpropagated."""
        value = loss.detach()
        self._loss = value if self._loss is None else self._loss.float() + value
        return loss

    # ---- a loop without ----------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        self._in_force().scale(self.sees(loss)).backward(**kwargs)

    def backward_vector(self, losses: torch.Tensor, gradient: torch.Tensor) -> None:
        """Of a loss that is no one number; there is none to note."""
        self._in_force().scale(losses).backward(gradient=gradient)

    @property
    def factor(self) -> float:
        """What `backward` multiplies the loss by."""
        return self._added.get_scale() if self._in_force().is_enabled() else 1.0

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        self._in_force().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self._in_force().step(optimizer)

    # ---- the step's end ----------------------------------------------------------------------------------------------

    def end(self, own: GradScaler | None = None) -> None:
        """``update()`` of the scaler in force; what the script says for the next step is in force from here on."""
        scaler = self._in_force() if own is None else self.scaler(own)
        if scaler.is_enabled():
            used = scaler.get_scale()
            scaler.update()
            scales: tuple[float | None, float | None] = (used, scaler.get_scale())
        else:
            scales = (None, None)
        self.rows.append(Row(math.nan if self._loss is None else float(self._loss), *scales))
        self._loss = None
        self._change(self._added if own is None else own, self.script.get(len(self.rows), {}))

    def scale_events(self) -> list[tuple[int, float, float]]:
        """(step from which it holds, from, to) of every change of the scale."""
        events: list[tuple[int, float, float]] = []
        known: float | None = None
        for step, row in enumerate(self.rows):
            if row.used is None or row.after is None:
                continue
            if known is not None and known != row.used:
                events.append((step, known, row.used))
            if row.after != row.used:
                events.append((step + 1, row.used, row.after))
            known = row.after
        return events

    def skipped_steps(self) -> list[int]:
        return [step for step, row in enumerate(self.rows) if row.skipped]

    # ---- private -----------------------------------------------------------------------------------------------------

    def _in_force(self) -> GradScaler:
        return self._added if self.chosen == "fp16" else self._passing

    def _change(self, scaler: GradScaler, changes: Mapping[str, Any]) -> None:
        self.chosen = changes.get("autocast", self.chosen)
        state = {SCALER_SETTINGS[name]: value for name, value in changes.items() if name in SCALER_SETTINGS}
        if state:
            tracker = {"_growth_tracker": 0} if "scale" in state else {}
            scaler.load_state_dict({**scaler.state_dict(), **state, **tracker})


def _float(out: Any) -> Any:
    if isinstance(out, torch.Tensor):
        return out.float() if out.dtype in DTYPES.values() else out
    if isinstance(out, tuple):
        return tuple(_float(part) for part in out)
    if isinstance(out, dict):
        return {name: _float(part) for name, part in out.items()}
    return out
