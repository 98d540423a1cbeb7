"""What a profiled step says: its memory point by point, by kind and by layer."""

from __future__ import annotations

import dataclasses
import html
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from amp_widgets.errors import AmpWidgetsError
from amp_widgets.language import in_language, marked_all, say
from amp_widgets.size_text import difference_text
from amp_widgets.size_text import memory_text as memory_text

KINDS = marked_all("parameter", "buffer", "gradient", "optimizer", "activation", "recompute", "temporary", "other")
"""What memory is for, in the order of the columns of `StepProfile.bytes_by_kind`; in a stacked picture the first is lowest."""
PHASES = ("forward", "loss", "backward", "recompute", "optimizer", "zero_grad", "other")
"""The parts of a step. Recompute interrupts backward."""
MODEL = "(model)"
"""The name of the model itself among its layers."""
MOST_POINTS = 4000
"""A profile has about so many points at most."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A part of a step: the points from `start` up to, not including, `stop`. A step's phases follow each other without a gap."""

    name: str
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerProfile:
    """One layer in a profiled step; all numbers include the layers inside it.

    Attributes
    ----------
    name, type
        Its dotted name in the model, and the name of its class.
    parameter_bytes
        Of its parameters, each once.
    activation_bytes
        Of the activations that were made within it and are alive when the forward pass ends, which are held for the backward
        pass. With several forward passes in the step, at the end of the one that holds most.
    output_bytes
        Of the storages of its outputs, in its last call.
    forward_s, backward_s, recompute_s
        Seconds, the measuring included, over all calls; NaN where it was not called, or had no part in a backward pass.
    calls
        Of its forward, those of a recompute not counted.
    dtype
        Of the numbers it computed: ``"float32"``, ``"float16"``, ``"bfloat16"``, ``"mixed"``; nothing where it ran no op.
    checkpointed
        Whether it was switched on, or was recomputed by the user's own checkpointing.
    whole
        Whether it is the model itself, with all that its layers and its own code make. What is made outside of its forward
        pass, as the loss is, does not count; but to its time backward, that of the loss does. Where not the model is called but
        layers in it, or where there are several models, it is the sum of those that are called.
    """

    name: str
    type: str
    parameter_bytes: int
    activation_bytes: int
    output_bytes: int
    forward_s: float
    backward_s: float
    recompute_s: float
    calls: int
    dtype: str
    checkpointed: bool
    whole: bool = False

    @property
    def saved_bytes(self) -> float:
        """About what checkpointing it would free from forward to backward: what it holds without its output, which the next
        layer needs in any case. NaN where it is checkpointed already, and for the model itself: its recompute holds it all."""
        return math.nan if self.checkpointed or self.whole else max(0, self.activation_bytes - self.output_bytes)

    @property
    def cost_s(self) -> float:
        """What checkpointing it costs in a step: its recompute where it is checkpointed, else its forward pass once more."""
        return self.recompute_s if self.checkpointed else math.nan if self.whole else self.forward_s


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AllocatorReadings:
    """``torch.cuda.memory_stats`` of one device, read at the boundaries of layers within a step.

    Attributes
    ----------
    device
        Such as ``"cuda:0"``.
    point
        Of each reading, its position among the profile's points, ascending; int32, shape (readings,).
    allocated_bytes
        In use: ``allocated_bytes.all.current``; int64, like the next two.
    inactive_bytes
        Free, but in blocks that are split, which only what is small enough can use: ``inactive_split_bytes.all.current``.
        Always 0 with expandable segments and with ``cudaMallocAsync``, which do not count it.
    reserved_bytes
        Held by the allocator, in use or not: ``reserved_bytes.all.current``.
    peak_allocated_bytes
        The most that were in use within the step, by torch's own counter. Where that counter may not be reset and did not
        rise, the highest of the readings, and a note of the profile says so.
    retries, ooms
        How often within the step the allocator freed its cache to try again, and how often that did not help.

    Raises
    ------
    AmpWidgetsError
        When the arrays are not of one length, or the points not ascending.
    """

    device: str
    point: npt.NDArray[np.int32]
    allocated_bytes: npt.NDArray[np.int64]
    inactive_bytes: npt.NDArray[np.int64]
    reserved_bytes: npt.NDArray[np.int64]
    peak_allocated_bytes: int
    retries: int
    ooms: int

    def __reduce__(self) -> tuple[Any, ...]:
        return _reduced(self)

    def __post_init__(self) -> None:
        names = ("point", "allocated_bytes", "inactive_bytes", "reserved_bytes")
        arrays = {name: getattr(self, name) for name in names}
        lengths = {name: array.shape for name, array in arrays.items()}
        if len(set(lengths.values())) != 1 or self.point.ndim != 1 or not self.point.size:
            raise AmpWidgetsError(f"readings of the allocator: got arrays of shape {lengths}, expected one length, at least 1")
        expected = {name: np.int32 if name == "point" else np.int64 for name in names}
        wrong = {name: array.dtype for name, array in arrays.items() if array.dtype != expected[name]}
        if wrong:
            raise AmpWidgetsError(f"readings of the allocator: got {wrong}, expected int32 points and int64 bytes")
        if self.point[0] < 0 or (np.diff(self.point) <= 0).any():
            raise AmpWidgetsError(f"readings of the allocator: got points {self.point}, expected them ascending from 0 on")
        if min(array.min() for array in arrays.values()) < 0 or min(self.peak_allocated_bytes, self.retries, self.ooms) < 0:
            raise AmpWidgetsError("readings of the allocator: got a number below 0, expected bytes and counts")
        _make_read_only(self)

    @property
    def text(self) -> str:
        """What reserved memory was used for when most was in use; not escaped.

        Returns
        -------
        str
            Such as ``cuda:0: reserved 4.1 GB, of which 3.2 GB were allocated, 0.6 GB free but split (fragmentation) and
            0.3 GB cached; 2 retries``.
        """
        at = int(self.allocated_bytes.argmax())
        allocated, inactive, reserved = (
            int(each[at]) for each in (self.allocated_bytes, self.inactive_bytes, self.reserved_bytes)
        )
        parts = [f"{memory_text(allocated)} were allocated"]
        if inactive:
            parts.append(f"{memory_text(inactive)} free but split (fragmentation)")
        if reserved - allocated - inactive > 0:
            parts.append(f"{memory_text(reserved - allocated - inactive)} cached")
        *first, last = parts
        before_last = f"{', '.join(first)} and " if first else ""
        counts = [f"{count} {word if count == 1 else words}" for count, word, words in self._counts() if count]
        return (
            f"{self.device}: reserved {memory_text(reserved)}, of which {before_last}{last}"
            f"{'; ' if counts else ''}{', '.join(counts)}"
        )

    def _counts(self) -> tuple[tuple[int, str, str], ...]:
        return (
            (self.retries, "retry after freeing the cache", "retries after freeing the cache"),
            (self.ooms, "allocation that did not fit", "allocations that did not fit"),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepProfile:
    """The memory within one step: live bytes after each op that changed them, by kind, and who made them.

    Attributes
    ----------
    label
        For people, such as ``"fp16 + 4 layers checkpointed"``.
    step
        Its number in the history; -1 for a step of its own.
    device, source
        What was measured, and how: a sentence.
    bytes_by_kind
        Live bytes after each point, int64, shape (points, len(KINDS)); read only, like the other arrays.
    time_s
        Seconds since the step began, float64, shape (points,).
    layer_index, operator_index
        Of each point, positions in `layer_names` and `operator_names`; -1 for none. int32, shape (points,).
    layer_names, operator_names
        Such as ``"layers.3.mlp"`` and ``"aten::mm"``.
    phases
        Of the whole step.
    layers
        The model itself, named ``"(model)"``, then every layer of it, in its order; nothing where layers were not followed.
    peak_by_layer
        At the peak: layer → kind → bytes; ``""`` is what belongs to no layer. Layers do *not* include the layers inside them
        here: the bytes add up to the peak.
    notes
        What should be known of these numbers: sentences.
    allocator
        What torch's allocator counted meanwhile, one a CUDA device; nothing on a CPU.

    Raises
    ------
    AmpWidgetsError
        When the allocator was read at points that there are not.
    """

    label: str
    step: int
    device: str
    source: str
    bytes_by_kind: npt.NDArray[np.int64]
    time_s: npt.NDArray[np.float64]
    layer_index: npt.NDArray[np.int32]
    operator_index: npt.NDArray[np.int32]
    layer_names: tuple[str, ...]
    operator_names: tuple[str, ...]
    phases: tuple[Phase, ...]
    layers: tuple[LayerProfile, ...]
    peak_by_layer: Mapping[str, Mapping[str, int]]
    notes: tuple[str, ...] = ()
    allocator: tuple[AllocatorReadings, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reduced(self)

    def __post_init__(self) -> None:
        _make_read_only(self)
        points = len(self.bytes_by_kind)
        for readings in self.allocator:
            if readings.point[-1] >= points:
                raise AmpWidgetsError(
                    f"readings of the allocator of {readings.device}: got point {readings.point[-1]}, expected one of the "
                    f"profile's {points}"
                )

    @property
    def total_bytes(self) -> npt.NDArray[np.int64]:
        """Live bytes after each point, shape (points,)."""
        return np.asarray(self.bytes_by_kind.sum(axis=1), dtype=np.int64)

    @property
    def peak_point(self) -> int:
        """The first point with the most bytes."""
        return int(self.total_bytes.argmax())

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were alive at one time."""
        return int(self.total_bytes.max())

    @property
    def peak_bytes_by_kind(self) -> dict[str, int]:
        """What the peak is made of, by kind."""
        return dict(zip(KINDS, map(int, self.bytes_by_kind[self.peak_point]), strict=True))

    @property
    def peak_bytes_by_layer(self) -> dict[str, int]:
        """What the peak is made of, by layer, the largest first; ``""`` is what belongs to no layer."""
        sums = {layer: sum(kinds.values()) for layer, kinds in self.peak_by_layer.items()}
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    @property
    def peak_where(self) -> str:
        """Where the peak was, such as ``in the backward pass of layers.3.mlp (aten::mm)``; not escaped."""
        return self.where(self.peak_point)

    def where(self, point: int) -> str:
        """Where in the step a point is, for people; not escaped."""
        if point == 0:
            return "at the start of the step"
        phase = next((phase.name for phase in self.phases if phase.start <= point < phase.stop), "other")
        layer = _named(self.layer_names, int(self.layer_index[point]))
        operator = _named(self.operator_names, int(self.operator_index[point]))
        return place_in_words(phase, layer, operator)

    def layer(self, name: str) -> LayerProfile:
        """The layer of that name.

        Raises
        ------
        KeyError
            When there is none.
        """
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(name)

    def difference_text(self, other: StepProfile) -> str:
        """What became of the peak from this step to the other, in bytes and per cent.

        Returns
        -------
        str
            Such as ``fp32 → bf16: peak 185.1 MB → 104.4 MB, 80.7 MB less (-43.6 %)``; not escaped.

        Raises
        ------
        AmpWidgetsError
            When the other is no profile.
        """
        check_profile(other, "difference_text")
        what = difference_text(self.peak_bytes, other.peak_bytes)
        return f"{in_language(self.label)} → {in_language(other.label)}: {what}"

    def __repr__(self) -> str:
        return (
            f"<StepProfile {self.label!r}: peak {memory_text(self.peak_bytes)} {self.peak_where}; "
            f"{', '.join(f'{kind} {memory_text(size)}' for kind, size in self.peak_bytes_by_kind.items() if size)}"
            f"{''.join(f'; {readings.text}' for readings in self.allocator)}>"
        )

    def _repr_html_(self) -> str:
        kinds = [(in_language(kind), size) for kind, size in self.peak_bytes_by_kind.items() if size]
        layers = list(self.peak_bytes_by_layer.items())
        more = len(layers) - _LAYERS_SHOWN
        shown = [(name or say("outside of any layer"), size) for name, size in layers[:_LAYERS_SHOWN]]
        if more > 0:
            shown.append((say("{count} more", count=more), sum(size for _, size in layers[_LAYERS_SHOWN:])))
        allocator = "".join(f"<div>{html.escape(in_language(readings.text))}</div>" for readings in self.allocator)
        notes = "".join(f"<li>{html.escape(in_language(note))}</li>" for note in self.notes)
        peak = say("peak {size} {place}", size=memory_text(self.peak_bytes), place=in_language(self.peak_where))
        return (
            f"<div><b>{html.escape(in_language(self.label))}</b>: {html.escape(peak)}"
            f'<div style="display:flex;gap:2em;align-items:flex-start">'
            f"{_table(say('at the peak'), kinds, self.peak_bytes)}{_table(say('layer'), shown, self.peak_bytes)}</div>{allocator}"
            f"{f'<ul>{notes}</ul>' if notes else ''}</div>"
        )


def check_profile(value: object, name: str) -> None:
    """Check that it is a profile.

    Raises
    ------
    AmpWidgetsError
        When not; it is told who asks.
    """
    if not isinstance(value, StepProfile):
        got = "None" if value is None else f"an object of type {type(value).__name__}"
        raise AmpWidgetsError(f"{name}: got {got}, expected a StepProfile, as session.profile_step and session.profiles give")


def phases_of(names: Sequence[str]) -> tuple[Phase, ...]:
    """The phase of each point → the phases: stretches of the same name."""
    starts = [point for point, name in enumerate(names) if point == 0 or names[point - 1] != name]
    stops = [*starts[1:], len(names)] if starts else []
    return tuple(Phase(name=names[start], start=start, stop=stop) for start, stop in zip(starts, stops, strict=True))


def points_kept(
    bytes_by_kind: npt.NDArray[np.int64], phases: Iterable[Phase], *, most: int = MOST_POINTS
) -> npt.NDArray[np.intp]:
    """Which points are enough to draw a step: all, if they are few.

    Returns
    -------
    ndarray
        Indices of points in ascending order: the first and the last of each phase, the peak, and for the rest the lowest and
        the highest total of every stretch of equal length, so that no summit or valley is cut off.
    """
    points = len(bytes_by_kind)
    if points <= most:
        return np.arange(points)
    total = bytes_by_kind.sum(axis=1)
    edges = {edge for phase in phases for edge in (phase.start, phase.stop - 1)}
    keep = {0, points - 1, int(total.argmax()), *edges}
    stretches = max(1, (most - len(keep)) // 2)
    bounds = np.linspace(0, points, stretches + 1).astype(int)
    for start, stop in itertools.pairwise(bounds):
        if stop > start:
            keep.add(int(start + total[start:stop].argmin()))
            keep.add(int(start + total[start:stop].argmax()))
    return np.array(sorted(keep), dtype=np.intp)


def frozen_sums(sums: Mapping[str, Mapping[str, int]]) -> Mapping[str, Mapping[str, int]]:
    """`sums` such that nobody changes it."""
    return MappingProxyType({name: MappingProxyType(dict(inner)) for name, inner in sums.items()})


def place_in_words(phase: str, layer: str = "", operator: str = "") -> str:
    """``in the backward pass of layers.3 (aten::mm)``; ``in the step`` where the phase is not known.

    Parameters
    ----------
    phase, layer, operator
        Their names; ``""`` where not known.
    """
    phase = _IN_WORDS.get(phase, "the step")
    place = f"in {phase} of {layer}" if layer else f"in {phase}"
    return f"{place} ({operator})" if operator else place


_IN_WORDS = {
    "forward": "the forward pass",
    "loss": "the loss",
    "backward": "the backward pass",
    "recompute": "the recompute",
    "optimizer": "the optimizer step",
    "zero_grad": "zero_grad",
    "other": "the rest of the step",
}
_PLACES = marked_all(  # as `StepProfile.where` puts them together, for the catalogue
    "in the forward pass", "in the loss", "in the backward pass", "in the recompute", "in the optimizer step", "in zero_grad",
    "in the rest of the step", "in the step", "in the forward pass ({operator})", "in the loss ({operator})",
    "in the backward pass ({operator})", "in the recompute ({operator})", "in the optimizer step ({operator})",
    "in zero_grad ({operator})", "in the rest of the step ({operator})", "in the step ({operator})",
    "in {phase} of {layer} ({operator})",
)  # fmt: skip
_LAYERS_SHOWN = 10


def _make_read_only(instance: Any) -> None:
    """Nobody is to change the arrays through it."""
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        if isinstance(value, np.ndarray) and value.flags.writeable:
            seen = value.view()
            seen.flags.writeable = False
            object.__setattr__(instance, field.name, seen)


def _reduced(instance: Any) -> tuple[Any, ...]:
    """As ``__reduce__`` gives it: a copy is made by the class, so that its arrays and mappings are read only as well."""
    values = {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}
    return _made_again, (type(instance), {name: _thawed(value) for name, value in values.items()})


def _made_again(kind: type[Any], values: dict[str, Any]) -> Any:
    return kind(**{name: frozen_sums(value) if isinstance(value, dict) else value for name, value in values.items()})


def _thawed(value: Any) -> Any:
    """Mappings that nobody changes cannot be pickled."""
    return {name: _thawed(inner) for name, inner in value.items()} if isinstance(value, Mapping) else value


def _named(names: Sequence[str], index: int) -> str:
    return names[index] if 0 <= index < len(names) else ""


def _table(title: str, rows: Iterable[tuple[str, int]], whole: int) -> str:
    body = "".join(
        f'<tr><td style="text-align:left">{html.escape(name)}</td><td>{memory_text(size)}</td>'
        f"<td>{100 * size / whole if whole else 0:.1f} %</td></tr>"
        for name, size in rows
    )
    return f'<table><tr><th style="text-align:left">{html.escape(title)}</th><th></th><th></th></tr>{body}</table>'
