"""What was written down of a profiled step: it becomes the profile later, when somebody asks for that."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from amp_widgets.core.memory.lives import ACTIVATION, NO_GRAD_FORWARD, NO_GRAD_LOSS, OTHER, TEMPORARY, Life
from amp_widgets.core.memory.profile import (
    KINDS,
    MODEL,
    PHASES,
    AllocatorReadings,
    LayerProfile,
    StepProfile,
    frozen_sums,
    phases_of,
    points_kept,
)

NO_LAYER = -1
"""The position of what is outside of any layer with a name."""


class LayerFacts:
    """What is known of a model's layers without running it. Holds no module; what it takes time to find out is found out later.

    Parameters
    ----------
    layers
        Name → module, in the model's order; a position in it stands for a layer.
    switched
        Names of those that are checkpointed.
    model
        The one that they are in.
    """

    def __init__(self, layers: dict[str, nn.Module], switched: Sequence[str], model: nn.Module) -> None:
        self.names = tuple(layers)
        self.model_type = type(model).__name__
        self.types = [type(layer).__name__ for layer in layers.values()]
        self._switched = frozenset(switched)
        self._ids = [id(layer) for layer in layers.values()]
        self._children_ids = [[id(child) for child in layer._modules.values()] for layer in layers.values()]
        with torch._C.DisableTorchFunction():
            self._own_parameters = [
                {
                    id(parameter): parameter.numel() * parameter.element_size()
                    for parameter in layer._parameters.values()
                    if parameter is not None and not nn.parameter.is_lazy(parameter)
                }
                for layer in (*layers.values(), model)
            ]

    @functools.cached_property
    def around(self) -> list[list[int]]:
        """Of each layer the positions of the layers around it and of itself, the outermost first."""
        positions = {name: index for index, name in enumerate(self.names)}
        found = []
        for name in self.names:
            parts = name.split(".")
            outer = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
            found.append([positions[each] for each in outer if each in positions])
        return found

    @functools.cached_property
    def checkpointed(self) -> list[bool]:
        """Whether each layer is switched on."""
        return [name in self._switched for name in self.names]

    @functools.cached_property
    def checkpointed_around(self) -> list[int]:
        """Of each layer the outermost around it, or itself, that is switched on; itself where there is none."""
        return [next((outer for outer in around if self.checkpointed[outer]), around[-1]) for around in self.around]

    @functools.cached_property
    def parameter_bytes(self) -> list[int]:
        """Of each layer with the layers inside it, also those whose name is elsewhere; each parameter once."""
        positions = {identity: index for index, identity in enumerate(self._ids)}
        found: dict[int, dict[int, int]] = {}

        def collect(index: int) -> dict[int, int]:
            if index not in found:
                found[index] = own = dict(self._own_parameters[index])
                for child in self._children_ids[index]:
                    if child in positions:
                        own.update(collect(positions[child]))
            return found[index]

        return [sum(collect(index).values()) for index in range(len(self.names))]

    @property
    def model_parameter_bytes(self) -> int:
        """Of the whole model, each parameter once."""
        sizes: dict[int, int] = {}
        for own in self._own_parameters:
            sizes.update(own)
        return sum(sizes.values())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One step, as `amp_widgets.core.memory.tracker.StepTracker` saw it. Holds neither tensors nor modules.

    Attributes
    ----------
    points
        Time in seconds, phase (position in `PHASES`), layer and operator.
    forward_ends
        Points at which an outermost forward pass was over.
    dtypes
        Of the results of ops in the forward pass, with the layer.
    calls, forward_s, output_bytes
        One item a layer, and a last one of the model itself, at `NO_LAYER`.
    recomputed
        Layers that were the outermost to be called in a backward pass.
    allocator
        What torch's allocator counted at some of the points, on CUDA.
    """

    facts: LayerFacts
    lives: list[Life]
    points: list[tuple[float, int, int, Any]]
    forward_ends: list[int]
    dtypes: set[tuple[int, torch.dtype]]
    calls: list[int]
    forward_s: list[float]
    output_bytes: list[int]
    recomputed: set[int]
    allocator: tuple[AllocatorReadings, ...] = ()

    def profile(self, *, label: str, step: int, device: str, source: str, notes: Sequence[str] = ()) -> StepProfile:
        """What it comes to."""
        points = len(self.points)
        phase = np.array([point[1] for point in self.points])
        if points > 1:  # the beginning is the beginning of something
            phase[0] = phase[1]
        layer_index = np.array([point[2] for point in self.points], dtype=np.int32)
        operators = _Names()
        operator_index = np.array([operators.index_of(point[3]) for point in self.points], dtype=np.int32)
        time_s = np.array([point[0] for point in self.points])
        born, died, size, kind, owner = self._lives(phase)

        changes = np.zeros((points + 1, len(KINDS)), dtype=np.int64)
        np.add.at(changes, (born, kind), size)
        np.subtract.at(changes, (died, kind), size)
        bytes_by_kind = changes[:points].cumsum(axis=0)
        peak = int(bytes_by_kind.sum(axis=1).argmax())
        phases = phases_of([PHASES[index] for index in phase])
        allocator = self.allocator
        kept = points_kept(bytes_by_kind, phases)
        position = {int(point): place for place, point in enumerate(kept)}
        if len(kept) < points:
            allocator = tuple(_thinned(readings, kept) for readings in allocator)
            phases = phases_of([PHASES[index] for index in phase[kept]])
            notes = (*notes, f"{points} points were thinned to {len(position)}, with the peak and the ends of phases among them")
        return StepProfile(
            label=label,
            step=step,
            device=device,
            source=source,
            bytes_by_kind=_read_only(bytes_by_kind[kept]),
            time_s=_read_only(time_s[kept]),
            layer_index=_read_only(layer_index[kept]),
            operator_index=_read_only(operator_index[kept]),
            layer_names=self.facts.names,
            operator_names=tuple(operators.names),
            phases=phases,
            layers=self._layers(born, died, size, kind, owner, phase, layer_index, time_s),
            peak_by_layer=self._by_layer((born <= peak) & (died > peak), size, kind, owner),
            notes=tuple(notes),
            allocator=allocator,
        )

    def lives_at_end(self) -> tuple[_Integers, _Integers, _Integers, _Integers, _Integers]:
        """Of each storage its birth and death, as points, its size in bytes, its kind and layer, as positions."""
        return self._lives(np.array([point[1] for point in self.points]))

    def _lives(self, phase: _Integers) -> tuple[_Integers, _Integers, _Integers, _Integers, _Integers]:
        """Birth, death, size, kind and layer of each storage, the preliminary kinds decided."""
        points = len(self.points)
        born = np.array([life.birth for life in self.lives], dtype=np.int64)
        died = np.array([points if life.death is None else life.death for life in self.lives], dtype=np.int64)
        size = np.array([life.nbytes for life in self.lives], dtype=np.int64)
        kind = np.array([life.kind for life in self.lives], dtype=np.int64)
        owner = np.array([life.layer for life in self.lives], dtype=np.int64)
        backward = np.flatnonzero(phase == PHASES.index("backward"))
        for preliminary, moments, outlives, else_ in (
            (NO_GRAD_FORWARD, np.array(self.forward_ends, dtype=np.int64), ACTIVATION, TEMPORARY),
            (NO_GRAD_LOSS, backward, ACTIVATION, OTHER),
        ):
            at = np.flatnonzero(kind == preliminary)
            next_moment = np.append(moments, points)[np.searchsorted(moments, born[at])]
            kind[at] = np.where(died[at] > next_moment, outlives, else_)
        born, died = np.minimum(born, points), np.minimum(died, points)
        return born, died, size, kind, owner

    def _by_layer(self, alive: npt.NDArray[np.bool_], size: _Integers, kind: _Integers, owner: _Integers) -> Any:
        sums: dict[str, dict[str, int]] = {}
        for at in np.flatnonzero(alive):
            if size[at]:
                name = self.facts.names[owner[at]] if owner[at] != NO_LAYER else ""
                kinds = sums.setdefault(name, {})
                kinds[KINDS[kind[at]]] = kinds.get(KINDS[kind[at]], 0) + int(size[at])
        order = {name: index for index, name in enumerate(self.facts.names)}
        return frozen_sums({name: sums[name] for name in sorted(sums, key=lambda name: order.get(name, -1))})

    def _layers(
        self,
        born: _Integers,
        died: _Integers,
        size: _Integers,
        kind: _Integers,
        owner: _Integers,
        phase: _Integers,
        layer_index: npt.NDArray[np.int32],
        time_s: npt.NDArray[np.float64],
    ) -> tuple[LayerProfile, ...]:
        facts = self.facts
        count = len(facts.names)
        held = np.zeros(count, dtype=np.int64)
        held_by_model = 0
        activations = kind == ACTIVATION
        made_in_forward = phase[np.minimum(born, len(phase) - 1)] == PHASES.index("forward")
        most = 0
        for end in self.forward_ends:
            at = activations & (born <= end) & (died > end)
            if size[at].sum() > most:
                most = size[at].sum()
                held_by_model = int(size[at & made_in_forward].sum())
                inside = at & (owner != NO_LAYER)
                held = np.bincount(owner[inside], weights=size[inside], minlength=count).astype(np.int64)
        lasted_s = np.diff(time_s, prepend=0.0)
        in_backward = (phase == PHASES.index("backward")) & (layer_index != NO_LAYER)
        in_recompute = (phase == PHASES.index("recompute")) & (layer_index != NO_LAYER)
        backward_s = np.bincount(layer_index[in_backward], weights=lasted_s[in_backward], minlength=count)
        recompute_s = np.bincount(layer_index[in_recompute], weights=lasted_s[in_recompute], minlength=count)
        with_backward = np.bincount(layer_index[in_backward], minlength=count)
        held, with_backward, backward_s, recompute_s = (
            _with_inner_layers(facts, own) for own in (held, with_backward, backward_s, recompute_s)
        )
        dtypes: list[set[str]] = [set() for _ in range(count + 1)]
        for layer, dtype in self.dtypes:
            if dtype.is_floating_point or dtype.is_complex:
                for outer in (*(facts.around[layer] if layer != NO_LAYER else ()), NO_LAYER):
                    dtypes[outer].add(str(dtype).removeprefix("torch."))
        called = self._called_first()
        went_back = [(phase == PHASES.index(name)) for name in ("backward", "recompute")]
        model = LayerProfile(
            name=MODEL,
            type=facts.model_type,
            parameter_bytes=facts.model_parameter_bytes,
            activation_bytes=held_by_model,
            output_bytes=sum(self.output_bytes[index] for index in called),
            forward_s=sum(self.forward_s[index] for index in called) if called else math.nan,
            backward_s=float(lasted_s[went_back[0]].sum()) if went_back[0].any() else math.nan,
            recompute_s=float(lasted_s[went_back[1]].sum()) if went_back[0].any() or went_back[1].any() else math.nan,
            calls=sum(self.calls[index] for index in called),
            dtype=_dtype_text(dtypes[NO_LAYER]),
            checkpointed=NO_LAYER in self.recomputed,
            whole=True,
        )
        return model, *(
            LayerProfile(
                name=facts.names[index],
                type=facts.types[index],
                parameter_bytes=facts.parameter_bytes[index],
                activation_bytes=int(held[index]),
                output_bytes=self.output_bytes[index],
                forward_s=self.forward_s[index] if self.calls[index] else math.nan,
                backward_s=float(backward_s[index]) if with_backward[index] else math.nan,
                recompute_s=float(recompute_s[index]) if with_backward[index] or recompute_s[index] else math.nan,
                calls=self.calls[index],
                dtype=_dtype_text(dtypes[index]),
                checkpointed=facts.checkpointed[index]
                or (index in self.recomputed and facts.checkpointed_around[index] == index),
            )
            for index in range(count)
        )

    def _called_first(self) -> list[int]:
        """The model, if it was called; else the layers, or models of several, that were not called by another one."""
        if self.calls[NO_LAYER]:
            return [NO_LAYER]
        calls = self.calls
        around = enumerate(self.facts.around)
        return [index for index, outer in around if calls[index] and not any(calls[each] for each in outer[:-1])]


def _dtype_text(names: set[str]) -> str:
    return "mixed" if len(names) > 1 else next(iter(names), "")


_Integers = npt.NDArray[np.int64]


def _with_inner_layers(facts: LayerFacts, own: Any) -> Any:
    """What each layer has of its own → what it has with the layers inside it."""
    sums = np.zeros_like(own)
    for layer, outer in enumerate(facts.around):
        sums[outer] += own[layer]
    return sums


class _Names:
    """Operators and their positions among those that were seen."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._positions: dict[str, int] = {}

    def index_of(self, operator: Any) -> int:
        if operator is None:
            return -1
        schema = getattr(operator, "_schema", None)
        name = str(schema.name) if schema is not None else str(operator)
        if name.startswith("profiler::"):  # marks the beginning and the end of something, and makes no tensor
            return -1
        if name not in self._positions:
            self._positions[name] = len(self.names)
            self.names.append(name)
        return self._positions[name]


def _thinned(readings: AllocatorReadings, kept: npt.NDArray[np.intp]) -> AllocatorReadings:
    """The readings at the points that are kept: the last of those that come to lie on one."""
    places = np.searchsorted(kept, readings.point, side="right") - 1
    last = np.append(np.diff(places) > 0, True)
    return dataclasses.replace(
        readings,
        point=_read_only(places[last].astype(np.int32)),
        allocated_bytes=_read_only(readings.allocated_bytes[last]),
        inactive_bytes=_read_only(readings.inactive_bytes[last]),
        reserved_bytes=_read_only(readings.reserved_bytes[last]),
    )


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flags.writeable = False
    return array
