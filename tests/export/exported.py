"""A run to be exported, without torch: hostile names everywhere, and numbers of every kind."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from amp_widgets.core.gradient_counts import GradientCounts
from amp_widgets.core.history import Event, History
from amp_widgets.core.settings import Settings

HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>'\"`=cmd|' /C calc'!A0 $x$ \u2028 \x00\x1b \u5c42 ]]>-->"
HALF = "half a character: \ud800"


@dataclasses.dataclass(frozen=True)
class LayerOf:
    name: str
    type: str = "Linear"
    parameters: int = 6
    why_not: str | None = None
    structural: bool = False


class RunOf:
    """As `amp_widgets.recording.run_like.RunLike` describes one."""

    name = HOSTILE

    def __init__(self, history: History) -> None:
        self.history = history
        self.settings = Settings(autocast="fp16", checkpointed=(HOSTILE,))
        self.facts: dict[str, Any] = {
            "model": HOSTILE, "device": "cpu", "memory_source": HOSTILE, "began": "2026-01-02T03:04:05+00:00", HOSTILE: [HOSTILE],
            "half": HALF,
            "packages": {HOSTILE: HOSTILE, "torch": "2"},
        }  # fmt: skip
        self.layers = (LayerOf("layers.0"), LayerOf(HOSTILE, type=HOSTILE, why_not=HOSTILE))
        self.profiles: Sequence[Any] = ()
        self.gradients: Sequence[GradientCounts] = ()

    @property
    def events(self) -> list[Event]:
        return self.history.events()


def odd_history(seed: int, *, steps: int = 60, extra: tuple[str, ...] = (f"peak_bytes[{HOSTILE}]",)) -> History:
    """Of a number of steps with every kind of number, and events with every kind of detail."""
    chance = np.random.default_rng(seed)
    history = History(extra_columns=extra)
    odd = [math.nan, math.inf, -math.inf, 5e-324, 1.7e308, 0.1, -0.0, 2.0**53 + 2]
    for step in range(steps):
        row = {name: float(chance.choice([*odd, chance.standard_normal()])) for name in history.names[2:]}
        row["scale"] = float(2.0 ** chance.integers(-3, 40))
        row["skipped"] = float(step % 7 == 3)
        history.append(step=step, time_s=step / 7, **row)
        if step % 7 == 3:
            history.record(
                Event(step=step, kind="skipped", reason="skipped: inf", detail={"scale": row["scale"]}, time_s=step / 7)
            )
    details: list[dict[str, Any]] = [
        {}, {"autocast": "bf16", "source": HOSTILE}, {"from": 1.5, "to": None}, {"checkpointed": [HOSTILE, "b"], "n": 2**60},
        {HOSTILE: {"deep": [1, [2.5, {"x": math.inf}]]}},
    ]  # fmt: skip
    for number, kind in enumerate(("applied", "rejected", "note", "run", "out_of_memory")):
        time_s = math.nan if number == 2 else number / 3
        history.record(Event(step=steps - 9 * number - 1, kind=kind, reason=HOSTILE, detail=details[number], time_s=time_s))
    return history


def long_history(steps: int = 100_000, *, skipped: Any = slice(0, 0)) -> History:
    """A run as they are, with noise in every digit; `skipped` are the steps that were."""
    chance = np.random.default_rng(0)
    history = History()
    step = np.arange(steps)
    skips = np.zeros(steps)
    skips[skipped] = 1
    scale = 65536.0 * 2.0 ** ((step // 2000) % 4)
    columns = {
        "step": step, "time_s": np.cumsum(0.01 + 0.001 * chance.random(steps)), "scale": scale, "skipped": skips,
        "loss": (2 * np.exp(-step / 3e4) + 0.1 * chance.random(steps)).astype(np.float32).astype(float),
        "step_s": 0.01 + 0.001 * chance.random(steps), "allocated_bytes": chance.integers(10**9, 2 * 10**9, steps),
        "peak_bytes": chance.integers(2 * 10**9, 3 * 10**9, steps), "reserved_bytes": np.full(steps, 4e9),
    }  # fmt: skip
    history.extend(columns)
    changed = np.flatnonzero(np.diff(scale)) + 1
    for kind, steps_of_it in (("skipped", np.flatnonzero(skips)), ("scale_changed", changed), ("applied", step[::20_000])):
        for at in steps_of_it.tolist():
            detail = {
                "skipped": {"scale": scale[at]},
                "scale_changed": {"from": 1.0, "to": scale[at]},
                "applied": {"autocast": "bf16"},
            }
            reason = f"{kind}: at scale {scale[at]:g}"
            history.record(Event(step=at, kind=kind, reason=reason, detail=detail[kind], time_s=float(columns["time_s"][at])))
    return history
