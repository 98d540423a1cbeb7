"""Steps as they are profiled, made up: a GPT of six blocks with Adam, plain or with blocks checkpointed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from amp_widgets.core.memory import profile

KINDS = ("parameter", "buffer", "gradient", "optimizer", "activation", "recompute", "temporary", "other")
BLOCKS = 6
PARTS = {"norm1": 2, "attention": 14, "norm2": 2, "mlp": 12}
"""Layers of a block, and the tensors that each keeps for backward."""
MEGA = 1_000_000


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    name: str
    start: int
    stop: int


def LayerProfile(**values: Any) -> profile.LayerProfile:  # stands in for the class
    """A layer of which only some numbers matter."""
    unknown = float("nan")
    times = {"forward_s": unknown, "backward_s": unknown, "recompute_s": unknown}
    sizes = {"parameter_bytes": 0, "activation_bytes": 0, "output_bytes": 0}
    rest = {"type": "Linear", "calls": 1, "dtype": "float32", "checkpointed": False}
    return profile.LayerProfile(**{**times, **sizes, **rest, **values})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepProfile:
    label: str
    step: int = 0
    device: str = "cpu"
    source: str = "live tensor bytes on cpu, counted exactly"
    bytes_by_kind: npt.NDArray[Any]
    time_s: npt.NDArray[Any]
    layer_index: npt.NDArray[Any]
    operator_index: npt.NDArray[Any]
    layer_names: tuple[str, ...]
    operator_names: tuple[str, ...]
    phases: tuple[Phase, ...]
    layers: tuple[profile.LayerProfile, ...] = ()
    peak_by_layer: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    allocator: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Readings:
    """What torch's allocator counts."""

    device: str = "cuda:0"
    point: npt.NDArray[Any]
    allocated_bytes: npt.NDArray[Any]
    inactive_bytes: npt.NDArray[Any]
    reserved_bytes: npt.NDArray[Any]
    peak_allocated_bytes: int = 0
    retries: int = 0
    ooms: int = 0
    text: str = "cuda:0: reserved 300.0 MB, of which 230.0 MB were allocated"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Death:
    """A step that ran out of memory."""

    step: int = 12
    cause: str = "budget"
    device: str = "cpu"
    requested_bytes: float = 8.0 * MEGA
    limit_bytes: float = 150.0 * MEGA
    phase: str = "forward"
    layer: str = "layers.3.mlp"
    profile: StepProfile | None = None
    report: tuple[str, ...] = ("Step 12 ran out of memory in the forward pass of layers.3.mlp", "Activations held 120.0 MB")
    layers_to_checkpoint: tuple[str, ...] = ("layers.0", "layers.1")


class Writer:
    """Writes a step down, point by point."""

    def __init__(self) -> None:
        self.live = dict.fromkeys(KINDS, 0)
        self.rows: list[list[int]] = []
        self.where: list[tuple[str, str, str]] = []
        self.times: list[float] = []
        self.now_s = 0.0

    def point(self, phase: str, layer: str, operator: str, *, took_s: float = 50e-6, **changes: int) -> None:
        for kind, change in changes.items():
            self.live[kind] += change
            assert self.live[kind] >= 0, (phase, layer, kind)
        self.now_s += took_s
        self.rows.append([self.live[kind] for kind in KINDS])
        self.where.append((phase, layer, operator))
        self.times.append(self.now_s)

    def profile(self, label: str, **more: Any) -> StepProfile:
        names = [sorted({row[i] for row in self.where} - {""}) for i in range(3)]
        at = [{name: k for k, name in enumerate(column)} | {"": -1} for column in names]
        starts = [i for i, (phase, _, _) in enumerate(self.where) if i == 0 or phase != self.where[i - 1][0]]
        ends = [*starts[1:], len(self.where)]
        return StepProfile(
            label=label,
            bytes_by_kind=np.array(self.rows, np.int64).reshape(-1, len(KINDS)),
            time_s=np.array(self.times),
            layer_index=np.array([at[1][layer] for _, layer, _ in self.where], np.int32),
            operator_index=np.array([at[2][operator] for _, _, operator in self.where], np.int32),
            layer_names=tuple(names[1]),
            operator_names=tuple(names[2]),
            phases=tuple(Phase(name=self.where[i][0], start=i, stop=end) for i, end in zip(starts, ends, strict=True)),
            **more,
        )


def gpt_step(label: str = "fp32", *, half: bool = False, checkpointed: tuple[int, ...] = ()) -> StepProfile:
    """One step of training. In half precision an activation takes half; a checkpointed block keeps only its input."""
    size = MEGA * 6 // 10 if half else MEGA
    write = Writer()
    write.live |= {"parameter": 9 * MEGA, "optimizer": 18 * MEGA, "other": MEGA}
    block_parameters = 9 * MEGA // (BLOCKS + 1)

    def forward(block: int, phase: str, kind: str, *, keep: bool) -> None:
        for part, tensors in PARTS.items():
            for _ in range(tensors):
                write.point(phase, f"layers.{block}.{part}", "aten::mm", **{kind: size if keep else 0, "temporary": 0})
                if not keep:
                    write.point(phase, f"layers.{block}.{part}", "aten::add", temporary=size)
                    write.point(phase, f"layers.{block}.{part}", "aten::mul", temporary=-size)

    for block in range(BLOCKS):
        forward(block, "forward", "activation", keep=block not in checkpointed)
        if block in checkpointed:
            write.point("forward", f"layers.{block}", "aten::clone", activation=size)
    write.point("forward", "head", "aten::mm", activation=8 * size)
    write.point("loss", "", "aten::cross_entropy_loss", activation=size)
    write.point("loss", "", "aten::nll_loss", temporary=0)
    write.point("backward", "", "aten::nll_loss_backward", temporary=4 * size)
    write.point("backward", "head", "aten::mm", temporary=-4 * size, activation=-9 * size, gradient=block_parameters)
    for block in reversed(range(BLOCKS)):
        kind = "activation"
        if block in checkpointed:
            kind = "recompute"
            forward(block, "recompute", kind, keep=True)
        for part, tensors in reversed(PARTS.items()):
            for _ in range(tensors):
                write.point("backward", f"layers.{block}.{part}", "aten::mm", temporary=2 * size)
                write.point("backward", f"layers.{block}.{part}", "aten::mul", temporary=-2 * size, **{kind: -size})
        write.point("backward", f"layers.{block}.mlp", "aten::t", gradient=block_parameters)
        if block in checkpointed:
            write.point("backward", f"layers.{block}", "aten::detach", activation=-size)
    for _ in range(12):
        write.point("optimizer", "", "aten::addcdiv_", temporary=MEGA // 2)
        write.point("optimizer", "", "aten::sqrt", temporary=-MEGA // 2)
    for _ in range(BLOCKS + 1):
        write.point("zero_grad", "", "", gradient=-block_parameters)
    return write.profile(label, layers=layers(size, half, checkpointed))


def layers(size: int, half: bool, checkpointed: tuple[int, ...]) -> tuple[profile.LayerProfile, ...]:
    dtype = "float16" if half else "float32"
    found = [
        LayerProfile(name="token", type="Embedding", parameter_bytes=MEGA, activation_bytes=size, output_bytes=size, dtype="")
    ]
    found.append(LayerProfile(name="layers", type="ModuleList", parameter_bytes=8 * MEGA, calls=0, dtype=""))
    for block in range(BLOCKS):
        off = block in checkpointed
        for name, kind, tensors in (
            ("", "Block", sum(PARTS.values())),
            *((f".{part}", part.title(), n) for part, n in PARTS.items()),
        ):
            held = 0 if off else tensors * size
            found.append(
                LayerProfile(
                    name=f"layers.{block}{name}", type=kind, parameter_bytes=8 * MEGA // BLOCKS * tensors // 30,
                    activation_bytes=size if off and not name else held, output_bytes=size, forward_s=tensors * 0.31e-3,
                    backward_s=tensors * 0.58e-3, recompute_s=tensors * 0.31e-3 if off else 0.0,
                    dtype="mixed" if half and not name else dtype, checkpointed=off and not name,
                )
            )  # fmt: skip
    return tuple(found)


def dead_step(step: int = 12, limit_bytes: float = 150.0 * MEGA) -> Death:
    """One that broke off in the forward pass."""
    whole = gpt_step(f"out of memory at step {step} (fp32)")
    end = int(np.argmax(whole.bytes_by_kind.sum(axis=1) + 8 * MEGA > limit_bytes)) + 1
    arrays = {name: getattr(whole, name)[:end] for name in ("bytes_by_kind", "time_s", "layer_index", "operator_index")}
    profile = dataclasses.replace(whole, step=step, phases=(Phase(name="forward", start=0, stop=end),), **arrays)
    return Death(step=step, limit_bytes=limit_bytes, profile=profile)


def with_allocator(profile: StepProfile, **more: Any) -> StepProfile:
    """Read at every seventh point: a little more than is used, and what the allocator never gives back."""
    point = np.arange(0, len(profile.time_s), 7, dtype=np.int32)
    allocated = profile.bytes_by_kind.sum(axis=1)[point] + 3 * MEGA
    reserved = np.maximum.accumulate(allocated * 5 // 4)
    inactive = (reserved - allocated) // 3
    readings = Readings(point=point, allocated_bytes=allocated, inactive_bytes=inactive, reserved_bytes=reserved, **more)
    return dataclasses.replace(profile, allocator=(readings,))
