"""What is drawn of the memory within one step, and the words for its peak and for what a change made of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from amp_widgets.charts.phases import PhaseLike
from amp_widgets.language import marked, say
from amp_widgets.size_text import difference_text as difference_text
from amp_widgets.size_text import memory_text as memory_text
from amp_widgets.size_text import sizes_texts as sizes_texts

KINDS = ("parameter", "buffer", "gradient", "optimizer", "activation", "recompute", "temporary", "other")
"""What memory is for, in the order of the columns of `StepLike.bytes_by_kind`; at the bottom of the picture the first."""
KIND_NAMES = {
    "parameter": marked("parameters"),
    "buffer": marked("buffers"),
    "gradient": marked("gradients"),
    "optimizer": marked("optimizer state"),
    "activation": marked("activations"),
    "recompute": marked("recomputed"),
    "temporary": marked("temporary"),
    "other": marked("other"),
}
"""As they are called in a picture."""
KIND_PATTERNS = {
    "parameter": "+", "buffer": "-", "gradient": "/", "optimizer": "x", "activation": "", "recompute": "|", "temporary": "\\",
    "other": ".",
}  # fmt: skip
"""Kind → Plotly's name of the pattern of its area, by which it is told apart without colours."""
_PHASES = {
    "forward": marked("forward"), "loss": marked("loss"), "backward": marked("backward"), "optimizer": marked("optimizer"),
    "recompute": marked("recompute"), "other": marked("other"),
}  # fmt: skip
_SAYS_NO_PASS = {"recompute": marked("the recompute"), "other": marked("the step")}


class AllocatorLike(Protocol):
    """What torch's allocator of one CUDA device counted within a step, read at some of the step's points.

    Attributes
    ----------
    point
        Of each reading, ascending; shape (readings,), like the three of bytes.
    allocated_bytes, inactive_bytes, reserved_bytes
        In use; free, but in blocks that are split; held by the allocator in all.
    retries, ooms
        How often it freed its cache to try again, and how often that did not help.
    text
        The same in a sentence.
    """

    @property
    def device(self) -> str: ...
    @property
    def point(self) -> npt.NDArray[Any]: ...
    @property
    def allocated_bytes(self) -> npt.NDArray[Any]: ...
    @property
    def inactive_bytes(self) -> npt.NDArray[Any]: ...
    @property
    def reserved_bytes(self) -> npt.NDArray[Any]: ...
    @property
    def retries(self) -> int: ...
    @property
    def ooms(self) -> int: ...
    @property
    def text(self) -> str: ...


class StepLike(Protocol):
    """What is read of a profiled step.

    Attributes
    ----------
    label
        For people, such as ``"fp16 + 4 layers checkpointed"``.
    bytes_by_kind
        Live bytes after each point of the step, shape (points, len(KINDS)), integers.
    time_s
        Seconds since the step began, shape (points,).
    layer_index, operator_index
        Of each point, positions in `layer_names` and `operator_names`; -1 for none. Shape (points,).
    phases
        Of the whole step, see :class:`amp_widgets.charts.phases.PhaseLike`.
    allocator
        One a CUDA device; empty on a CPU.
    """

    @property
    def label(self) -> str: ...
    @property
    def bytes_by_kind(self) -> npt.NDArray[Any]: ...
    @property
    def time_s(self) -> npt.NDArray[Any]: ...
    @property
    def layer_index(self) -> npt.NDArray[Any]: ...
    @property
    def operator_index(self) -> npt.NDArray[Any]: ...
    @property
    def layer_names(self) -> Sequence[str]: ...
    @property
    def operator_names(self) -> Sequence[str]: ...
    @property
    def phases(self) -> Sequence[PhaseLike]: ...
    @property
    def allocator(self) -> Sequence[AllocatorLike]: ...


def peak_of(step: StepLike) -> tuple[int, int]:
    """The first point with the most bytes, and how many they are; (-1, 0) without points."""
    total = step.bytes_by_kind.sum(axis=1)
    if not total.size:
        return -1, 0
    point = int(np.argmax(total))
    return point, int(total[point])


def peak_place(step: StepLike) -> str:
    """Where the peak is: ``in backward of layers.3``; nothing where it is not known. As the user named it, not escaped."""
    return place_at(step, peak_of(step)[0])


def place_at(step: StepLike, point: int) -> str:
    """Where a point is, like `peak_place`."""
    return place_text(phase_at(step, point), layer_at(step, point))


def place_text(phase: str, layer: str) -> str:
    """``in backward of layers.3``; nothing where there is no phase. Not escaped."""
    if not phase:
        return ""
    name = say(_SAYS_NO_PASS[phase]) if phase in _SAYS_NO_PASS else phase_name(phase)
    return say("in {phase} of {layer}", phase=name, layer=layer) if layer else say("in {phase}", phase=name)


def phase_name(phase: str) -> str:
    """A phase as it is called in a picture."""
    return say(_PHASES[phase]) if phase in _PHASES else phase


def peak_text(step: StepLike) -> str:
    """``peak 104.4 MB in backward of layers.3``."""
    return say("peak {size} {place}", size=memory_text(peak_of(step)[1]), place=peak_place(step)).strip()


def recompute_s(step: StepLike) -> float:
    """How long layers were computed again within the step, in seconds."""
    ends = [*(float(time_s) for time_s in step.time_s), *([float(step.time_s[-1])] if len(step.time_s) else [math.nan])]
    return sum(ends[phase.stop] - ends[phase.start] for phase in step.phases if phase.name == "recompute")


def phase_at(step: StepLike, point: int) -> str:
    """The name of the phase that a point is in, or nothing."""
    return next((phase.name for phase in step.phases if phase.start <= point < phase.stop), "")


def layer_at(step: StepLike, point: int) -> str:
    """The name of the layer that a point is in, or nothing."""
    return _named(step.layer_names, step.layer_index, point)


def operator_at(step: StepLike, point: int) -> str:
    """The name of the operator at a point, or nothing."""
    return _named(step.operator_names, step.operator_index, point)


def _named(names: Sequence[str], indices: npt.NDArray[Any], point: int) -> str:
    index = int(indices[point]) if 0 <= point < len(indices) else -1
    return names[index] if 0 <= index < len(names) else ""
