"""How the memory of a step changes with each layer that is checkpointed: a linear model, made of one step that was followed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from amp_widgets.analysis.fake_step import FollowedStep
from amp_widgets.core.memory.lives import ACTIVATION, BUFFER, PARAMETER, RECOMPUTE, TEMPORARY
from amp_widgets.core.memory.profile import PHASES, StepProfile
from amp_widgets.core.memory.step_mode import operator_name
from amp_widgets.core.memory.whole_step import CompleteStep

Bytes = npt.NDArray[np.float64]


class PeakModel:
    """Estimates of the peak with sets of layers checkpointed, from a step in which none was.

    A checkpointed layer lets go of what was made in it, but for its outputs, from the end of its forward pass until its own
    backward pass begins; there all of it is made again, at once. Its inputs are held until its backward pass is over. So what
    is held at a moment is what was held, and for each layer a number that is mostly negative: the sum over its calls. Two layers
    of which one is inside the other, or called by the other, do not add up like that.

    Attributes
    ----------
    names
        Those of the candidates for which the model has numbers, and which save something at some moment.
    held_bytes
        At each moment, with no layer checkpointed; shape (moments,). The first are the points of the step; then for each call
        of a layer in `names` the moment when it is computed again.
    change_bytes
        Of each layer at each moment; shape (names, moments).
    """

    def __init__(
        self,
        names: Sequence[str],
        held_bytes: Bytes,
        change_bytes: Bytes,
        *,
        spared: Mapping[str, tuple[str, ...]] | None = None,
        called_by: Iterable[tuple[str, str]] = (),
    ) -> None:
        self.names = tuple(names)
        self.held_bytes = held_bytes
        self.change_bytes = change_bytes
        self._rows = {name: row for row, name in enumerate(self.names)}
        self._spared = spared or {}
        self._called_by = [(outer, name) for outer, name in called_by if outer in self._rows and name in self._rows]

    @classmethod
    def of_step(cls, complete: CompleteStep, candidates: Iterable[str]) -> PeakModel:
        """By a step with no layer checkpointed.

        Parameters
        ----------
        complete
            Calls of ``torch.utils.checkpoint`` by the user's own code stay as they are.
        candidates
            Names of layers, in the model's order.
        """
        step = _Step(complete)
        changes = {name: change for name in candidates if (change := step.change_of(name)) is not None}
        names = [name for name, change in changes.items() if change.bytes.min() < 0]
        kept = [changes[name] for name in names]
        rises = [(row, at, rise) for row, change in enumerate(kept) for at, rise in change.rises]
        before = np.array([at for _, at, _ in rises], dtype=np.int64)
        at_points = np.array([change.bytes for change in kept]).reshape(len(kept), len(step.held))
        again = at_points[:, before]
        for column, (row, _, rise) in enumerate(rises):
            again[row, column] += rise
        return cls(
            names,
            np.concatenate([step.held, step.before[before]]),
            np.concatenate([at_points, again], axis=1),
            spared={name: change.spared for name, change in changes.items()},
            called_by=step.called_by(),
        )

    @classmethod
    def of_profile(cls, profile: StepProfile, candidates: Iterable[str]) -> PeakModel:
        """By a step that was not followed op by op: as if its peak were at the end of the forward pass."""
        saved = {layer.name: layer.saved_bytes for layer in profile.layers if not layer.whole}
        names = [name for name in candidates if saved.get(name, 0.0) > 0]
        change = np.array([[-saved[name]] for name in names]).reshape(len(names), 1)
        return cls(names, np.array([float(profile.peak_bytes)]), change)

    def spared(self, name: str) -> tuple[str, ...]:
        """Layers at the end of a layer that are not computed again with it, as nothing that is made in them is saved."""
        return self._spared.get(name, ())

    def peak_bytes(self, names: Iterable[str]) -> float:
        """About the most that is held with these checkpointed.

        Of them, a layer inside another one counts for nothing, and one that calls another one from elsewhere.
        """
        names = outermost(tuple(names))
        callers = {outer for outer, name in self._called_by if name in names}
        rows = [self._rows[name] for name in names if name in self._rows and name not in callers]
        return float((self.held_bytes + self.change_bytes[rows].sum(axis=0)).max())

    def saved_bytes(self, name: str) -> float:
        """The most that one layer saves at one moment; 0 where it is not in `names`."""
        return float(-self.change_bytes[self._rows[name]].min()) if name in self._rows else 0.0

    def nested(self) -> list[tuple[int, int]]:
        """Pairs of positions in `names`, the second inside the first, or called by it."""
        rows = self._rows
        inside = [(rows[outer], rows[name]) for name in self.names for outer in _around(name) if outer in rows]
        return inside + [(rows[outer], rows[name]) for outer, name in self._called_by]


def first_step_peak(complete: CompleteStep, names: Iterable[str]) -> float:
    """The most that the first step with these layers checkpointed holds, by one after it.

    In a layer's first call it is not known yet whether it overwrites its inputs and large buffers: copies are held while it
    runs, and for its inputs one number each until its backward pass is over. In its further calls it is known. See
    `amp_widgets.core.recompute`.
    """
    return _Step(complete).first_step_peak(names)


def outermost(names: Sequence[str]) -> tuple[str, ...]:
    """Those that are not inside another one of them."""
    known = set(names)
    return tuple(name for name in names if not any(outer in known for outer in _around(name)))


def _around(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


_IN_FORWARD, _IN_BACKWARD, _IN_RECOMPUTE = (PHASES.index(name) for name in ("forward", "backward", "recompute"))
_STAND_IN_BYTES = 64
"""Of what torch keeps in the place of a layer's inputs in the first step: one number each."""
_SMALL_TENSOR_BYTES = 2**20
"""Buffers up to this size are copied when a layer's forward pass begins, as `amp_widgets.core.layer_state` does it."""


class _Change:
    """What checkpointing one layer changes."""

    def __init__(self, points: int) -> None:
        self._steps = np.zeros(points + 1)
        self._points = points
        self.rises: list[tuple[int, float]] = []  # point right after a recompute, and what is more then
        self.spared: tuple[str, ...] = ()

    def add(self, nbytes: float, start: int, stop: int) -> None:
        """So much more from point `start` up to, not including, `stop`."""
        if start < stop:
            self._steps[start] += nbytes
            self._steps[stop] -= nbytes

    @property
    def bytes(self) -> Bytes:
        """At each point."""
        sums: Bytes = self._steps[: self._points].cumsum()
        return sums


class _Step:
    """A complete step, as arrays."""

    def __init__(self, complete: CompleteStep) -> None:
        self._complete = complete
        self._record = record = complete.record
        self._facts = record.facts
        self._born, self._died, self._size, self._kind, self._owner = record.lives_at_end()
        self._points = points = len(record.points)
        self._phase = np.array([point[1] for point in record.points])
        self._layer = np.array([point[2] for point in record.points])
        changes = np.zeros(points + 1)
        np.add.at(changes, self._born, self._size)
        np.subtract.at(changes, self._died, self._size)
        self.held: Bytes = changes[:points].cumsum()
        made = np.zeros(points)
        np.add.at(made, self._born[self._born < points], self._size[self._born < points])
        self.before: Bytes = self.held - made  # what the operator at each point has found
        self._places = {id(life): place for place, life in enumerate(record.lives)}
        self._within: list[list[int]] = [[] for _ in self._facts.around]
        for layer, outer in enumerate(self._facts.around):
            for each in outer:
                self._within[each].append(layer)
        # A layer that is called from several places is in each of them: its points do not tell where one of these begins.
        self._once = np.array([*(calls == 1 for calls in record.calls[:-1]), False])
        # Casts of weights are held by autocast, too, until its region is left.
        of_parameters = set((self._size[self._kind == PARAMETER] // 2).tolist())
        at = np.minimum(self._born, points - 1)
        casts = np.array([operator_name(point[3]).endswith("_to_copy") for point in record.points], dtype=bool)
        self._is_cast = casts[at] & (self._phase[at] == _IN_FORWARD) & np.isin(self._size, sorted(of_parameters))
        changes_layer = np.diff(self._layer, prepend=self._layer[0]) != 0
        self._run = changes_layer.cumsum()  # stretches of points of one layer
        self._run_begins = np.append(0, np.flatnonzero(changes_layer))
        backward = np.flatnonzero(self._phase == _IN_BACKWARD)
        self._backward_begins = int(backward[0]) if len(backward) else points

    def change_of(self, name: str) -> _Change | None:
        """What checkpointing a layer changes; None where that is not known."""
        try:
            layer = self._facts.names.index(name)
        except ValueError:
            return None
        outputs = self._complete.outputs.get(layer)
        if outputs is None or not self._record.calls[layer] or self._record.recomputed & set(self._facts.around[layer]):
            return None
        calls = self._calls_of(layer)
        if not calls:
            return None
        kept = {place for life in outputs if (place := self._places.get(id(life))) is not None}
        inputs = self._inputs_of(layer)
        change = _Change(self._points)
        buffers = self._size[(self._kind == BUFFER) & np.isin(self._owner, self._within[layer])]
        copied = float(buffers[buffers <= _SMALL_TENSOR_BYTES].sum())
        made_in_calls = np.zeros(len(self._born), dtype=bool)
        for there, back in calls:
            (begin, end), (first, last) = there, back
            inside = np.flatnonzero((self._born >= begin) & (self._born <= end) & (self._kind == ACTIVATION))
            for place in inside.tolist():
                if place not in kept:
                    start = self._backward_begins if self._is_cast[place] else min(self._let_go(place), end + 1)
                    change.add(-float(self._size[place]), start, min(int(self._died[place]), first))
            # The first call after an input was made is the one whose backward pass comes last.
            for place in inputs:
                if self._born[place] < begin:
                    change.add(float(self._size[place]), int(self._died[place]), last + 1)
            inputs = {place for place in inputs if self._born[place] >= begin}
            change.add(copied, begin, last + 1)
            # Casts of weights that a call before has made are made again for the backward pass of each call.
            casts = float(self._size[self._is_cast & made_in_calls].sum())
            change.add(casts, first, last + 1)
            made_in_calls[inside] = True
            died = self._died[inside]
            # What only the layer itself holds of its outputs by now is gone before they are computed again.
            again = np.isin(inside, list(kept)) & (died > last + 1)
            gone = float(self._size[inside[(died > first) & ~again]].sum())
            rise, until = self._recompute(begin, end, first)
            change.rises.append((first, rise - gone + copied))
            if len(calls) == self._record.calls[layer] == 1:
                change.spared = self._called_after(layer, until)
        return change

    def first_step_peak(self, names: Iterable[str]) -> float:
        """The most that the first step holds, by one after it; see `first_step_peak`."""
        held = self.held.copy()
        for name in names:
            layer = self._facts.names.index(name)
            buffers = self._size[(self._kind == BUFFER) & np.isin(self._owner, self._within[layer])]
            for (begin, end), (_, last) in self._calls_of(layer)[:1]:
                copied = buffers[buffers > _SMALL_TENSOR_BYTES].sum()
                held[begin : end + 1] += self._first_input_bytes(layer, begin) + float(copied)
                held[begin : last + 1] += _STAND_IN_BYTES
        return float(held.max())

    def called_by(self) -> set[tuple[str, str]]:
        """Pairs of layers, the second called by the first, in which it is not by its name: it is called from elsewhere, too."""
        names = self._facts.names
        calls = [
            (begin, -end, layer)
            for layer in (self._complete.calls if isinstance(self._complete, FollowedStep) else ())
            for (begin, end), _ in (self._calls_of(layer) if layer >= 0 else ())
        ]
        found: set[tuple[str, str]] = set()
        around: list[tuple[int, int]] = []  # last point and layer of the calls that are not over
        for begin, less_end, layer in sorted(calls):
            while around and around[-1][0] < begin:
                around.pop()
            found.update((names[outer], names[layer]) for _, outer in around if outer != layer)
            around.append((-less_end, layer))
        return {(outer, name) for outer, name in found if outer not in _around(name) and name not in _around(outer)}

    def _let_go(self, place: int) -> int:
        """When what a layer holds only for its backward pass would be free: when the layer after the next one has begun."""
        run = int(self._run[min(int(self._born[place]), self._points - 1)])
        return int(self._run_begins[run + 2]) if run + 2 < len(self._run_begins) else self._points

    def _inputs_of(self, layer: int) -> set[int]:
        lives = self._complete.inputs.get(layer, ())
        return {place for life in lives if (place := self._places.get(id(life))) is not None}

    def _first_input_bytes(self, layer: int, begin: int) -> float:
        """Of what goes into the first call of a layer, which begins there."""
        if isinstance(self._complete, FollowedStep):
            return float(self._complete.first_input_bytes.get(layer, 0))
        inputs = [place for place in self._inputs_of(layer) if self._born[place] < begin < self._died[place]]
        return float(self._size[inputs].sum())

    def _recompute(self, begin: int, end: int, first: int) -> tuple[float, int]:
        """By how much computing it again rises above what is held before, and until which point it goes.

        It stops when the last tensor is there that is saved.
        """
        born, died, size = self._born, self._died, self._size
        made = (born >= begin) & (born <= end) & np.isin(self._kind, (ACTIVATION, RECOMPUTE, TEMPORARY))
        saved = born[made & (died > first)]
        until = max(saved.tolist(), default=begin)
        made &= born <= until
        changes = np.zeros(until - begin + 2)
        np.add.at(changes, born[made] - begin, size[made])
        np.subtract.at(changes, np.minimum(died[made], until + 1) - begin, size[made])
        return float(changes[:-1].cumsum().max()), until

    def _called_after(self, layer: int, point: int) -> tuple[str, ...]:
        """Layers inside a layer, none inside another, that begin after a point of the forward pass."""
        names = []
        for inner in self._within[layer]:
            if inner != layer and self._once[inner]:
                at = np.flatnonzero(np.isin(self._layer, self._within[inner]) & (self._phase == _IN_FORWARD))
                if len(at) and at[0] > point:
                    names.append(self._facts.names[inner])
        return outermost(names)

    def _calls_of(self, layer: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """First and last point of the forward pass, and of the backward pass, of each call; nothing where they are not known."""
        if isinstance(self._complete, FollowedStep):
            return [
                ((call.begin, call.end), (call.first, call.last))
                for call in self._complete.calls.get(layer, ())
                if call.end >= call.begin and call.first is not None and call.last is not None
            ]
        within = self._within[layer]
        count = self._record.calls[layer]
        if count == 1:
            within = [each for each in within if self._once[each]]
        ours = np.isin(self._layer, within)
        forward = np.flatnonzero(ours & (self._phase == _IN_FORWARD))
        backward = np.flatnonzero(ours & ((self._phase == _IN_BACKWARD) | (self._phase == _IN_RECOMPUTE)))
        if not len(forward) or not len(backward):
            return []
        if count > 1:
            there, back = self._runs(forward, _IN_FORWARD), self._runs(backward, _IN_BACKWARD)
            if len(there) == len(back) == count:
                return list(zip(there, reversed(back), strict=True))
        whole = (int(forward[0]), int(forward[-1])), (int(backward[0]), int(backward[-1]))
        return [whole] if whole[1][0] > whole[0][1] else []

    def _runs(self, at: npt.NDArray[np.intp], phase: int) -> list[tuple[int, int]]:
        """Stretches of points that no other layer's interrupt."""
        of_phase = np.flatnonzero(self._phase == phase)
        places = np.searchsorted(of_phase, at)
        breaks = np.flatnonzero(np.diff(places) > 1) + 1
        bounds = [0, *breaks.tolist(), len(at)]
        return [(int(at[start]), int(at[stop - 1])) for start, stop in itertools.pairwise(bounds)]
