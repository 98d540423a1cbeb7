"""A session as far as a recorder knows one, without torch."""

from __future__ import annotations

import dataclasses
from typing import Any

from amp_widgets.core.gradient_counts import GradientCounts
from amp_widgets.core.history import Event, History
from amp_widgets.core.memory.profile import StepProfile
from amp_widgets.core.settings import Settings


@dataclasses.dataclass(frozen=True)
class LayerOf:
    name: str
    type: str = "Linear"
    parameters: int = 6
    why_not: str | None = None
    structural: bool = False


class Source:
    def __init__(self, *, capacity: int = 1_000_000, extra_columns: tuple[str, ...] = ()) -> None:
        self.history_so_far = History(capacity=capacity, extra_columns=extra_columns)
        self.settings = Settings()
        self.profiles: tuple[StepProfile, ...] = ()
        self.gradients: tuple[GradientCounts, ...] = ()
        self.layers_seen: tuple[LayerOf, ...] = (
            LayerOf("layers.0"),
            LayerOf("head", why_not="it is <b>tied</b>", structural=True),
        )

    def train(self, steps: int, **more: float) -> None:
        history = self.history_so_far
        for step in range(history.total_rows, history.total_rows + steps):
            history.append(step=step, time_s=step / 100, loss=1 / (step + 1), scale=65536.0, skipped=float(step % 7 == 3), **more)

    def apply(self, **changes: Any) -> None:
        self.settings = self.settings.replace(**changes)
        detail = {**changes, "source": "script"}
        self.history_so_far.record(
            Event(step=self.history_so_far.total_rows, kind="applied", reason="", detail=detail, time_s=0.5)
        )
