"""What checkpointing would have freed at the moment when memory ran out: estimates from the lives of the storages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from amp_widgets.core.memory.death import Death
from amp_widgets.core.memory.lives import ACTIVATION, BUFFER, GRADIENT, OPTIMIZER, PARAMETER, RECOMPUTE
from amp_widgets.core.memory.step_record import NO_LAYER, StepRecord


class Savings:
    """Estimates for one moment.

    A checkpointed layer frees, until its own backward pass, the activations that were made in it, but for its outputs; its
    inputs are kept in their place. In its backward pass all of them are there again.

    Parameters
    ----------
    death
        With a record.
    """

    def __init__(self, death: Death) -> None:
        record = death.record
        assert record is not None
        self._death = death
        self._record: StepRecord = record
        now = len(record.points) - 1
        born, died, size, kind, owner = record.lives_at_end()
        alive = (born <= now) & (died > now)
        self._alive = alive
        self._born, self._size, self._kind, self._owner = born, size, kind, owner
        self._dead_pending = self._around(death.pending)
        self.activation_bytes = int(size[alive & (kind == ACTIVATION)].sum())
        """Held at that moment."""
        self.fixed_bytes = int(size[alive & np.isin(kind, (PARAMETER, BUFFER, GRADIENT, OPTIMIZER))].sum())
        """Held at that moment, whatever the batch."""
        parameters = int(size[alive & (kind == PARAMETER)].sum())
        gradients = int(size[alive & (kind == GRADIENT)].sum())
        self.missing_gradient_bytes = max(0, parameters - gradients) if death.phase not in ("optimizer", "zero_grad") else 0
        """Of parameters that have no gradient yet."""
        self._within = self._layers_within()
        self._known: dict[int, int] = {}  # what each layer frees

    def bytes_by_layer(self) -> dict[str, int]:
        """Held at that moment, the largest first; layers do not include those inside them, ``""`` is what belongs to none."""
        sums: dict[str, int] = {}
        for place in np.flatnonzero(self._alive):
            owner = self._owner[place]
            name = "" if owner == NO_LAYER else self._record.facts.names[owner]
            sums[name] = sums.get(name, 0) + int(self._size[place])
        return dict(sorted(((name, size) for name, size in sums.items() if size), key=lambda item: -item[1]))

    def saved_bytes(self, names: Iterable[str]) -> int:
        """What would not have been held, had these been checkpointed; none within another."""
        return sum(self._saved(layer) for layer in map(self._position, names))

    def cost_s(self, names: Iterable[str]) -> float:
        """Seconds that computing them again takes."""
        return sum(self._record.forward_s[layer] for layer in map(self._position, names))

    def most(self, candidates: Sequence[str]) -> int:
        """The most that any choice of them frees."""
        return self.saved_bytes(self._greedy(self._usable(candidates), math.inf))

    def choose(self, candidates: Sequence[str], *, short_bytes: float, limit_bytes: float) -> tuple[str, ...]:
        """The few, and cheap, layers that free enough; empty where none do.

        Parameters
        ----------
        candidates
            Names of the layers that may be checkpointed.
        short_bytes
            What is to be freed at the moment.
        limit_bytes
            What may be held while one of them is computed again.
        """
        usable = self._usable(candidates)
        for _ in range(len(usable) + 1):
            single = [name for name in usable if self.saved_bytes([name]) >= short_bytes]
            if single:
                chosen = [min(single, key=lambda name: (self.cost_s([name]), self.saved_bytes([name])))]
            else:
                chosen = self._pruned(self._greedy(usable, short_bytes), short_bytes)
            if self.saved_bytes(chosen) < short_bytes or not chosen:
                return ()
            too_large = [name for name in chosen if self._while_recomputed(name, chosen) > limit_bytes]
            if not too_large:
                order = {name: place for place, name in enumerate(candidates)}
                return tuple(sorted(chosen, key=lambda name: order[name]))
            usable = [name for name in usable if name not in too_large]
        return ()

    def most_while_recomputed(self, chosen: Sequence[str]) -> float:
        """About the most that is held while one of them is computed again."""
        return max(self._while_recomputed(name, chosen) for name in chosen)

    # ---- private ----------------------------------------------------------------------------------------------------

    def _usable(self, candidates: Sequence[str]) -> list[str]:
        facts = self._record.facts
        usable = []
        for name in candidates:
            layer = self._position(name)
            on = any(facts.checkpointed[outer] for outer in facts.around[layer]) if layer != NO_LAYER else True
            if on or self._record.recomputed & set(facts.around[layer]) or layer in self._dead_pending:
                continue
            if self._saved(layer) > 0:
                usable.append(name)
        return usable

    def _greedy(self, usable: Sequence[str], short_bytes: float) -> list[str]:
        """The ones that free most first, none within another, until it is enough."""
        chosen: list[str] = []
        freed = 0
        # of the same bytes, the inner one: it costs less
        for name in sorted(usable, key=lambda name: (-self.saved_bytes([name]), self.cost_s([name]))):
            if freed >= short_bytes:
                break
            if not any(_one_within_the_other(name, other) for other in chosen):
                chosen.append(name)
                freed += self.saved_bytes([name])
        return chosen

    def _pruned(self, chosen: list[str], short_bytes: float) -> list[str]:
        """Without those that are not needed, the costliest first."""
        for name in sorted(chosen, key=lambda name: -self.cost_s([name])):
            rest = [other for other in chosen if other != name]
            if self.saved_bytes(rest) >= short_bytes:
                chosen = rest
        return chosen

    def _saved(self, layer: int) -> int:
        if layer == NO_LAYER:
            return 0
        if layer not in self._known:
            self._known[layer] = self._count_saved(layer)
        return self._known[layer]

    def _count_saved(self, layer: int) -> int:
        inside = self._inside(layer)
        held = int(self._size[inside].sum())
        outputs = self._death.outputs.get(layer)
        if outputs is None:  # not followed
            return max(0, held - self._record.output_bytes[layer] * max(1, self._record.calls[layer]))
        places = np.flatnonzero(inside)
        kept = int(self._size[[place for place in places if place in outputs]].sum())
        inputs = [place for place in self._death.inputs.get(layer, ()) if not self._alive[place]]
        return held - kept - int(self._size[inputs].sum())

    def _while_recomputed(self, name: str, chosen: Sequence[str]) -> float:
        """About what is held while a layer is computed again for its backward pass, with as much in passing as at the death."""
        layer = self._position(name)
        inside = self._inside(layer)
        first = int(self._born[inside].min())
        activations = self._alive & (self._kind == ACTIVATION)
        held = int(self._size[activations & (self._born < first)].sum()) + int(self._size[inside].sum())
        held -= sum(
            self._saved(other) for other in map(self._position, chosen) if other != layer and self._first_birth(other) < first
        )
        recomputed = int(self._size[self._alive & (self._kind == RECOMPUTE)].sum())
        rest = int(self._size[self._alive].sum()) - self.activation_bytes - recomputed
        return rest + self._death.requested_bytes + self.missing_gradient_bytes + held

    def _first_birth(self, layer: int) -> int:
        inside = self._inside(layer)
        return int(self._born[inside].min()) if inside.any() else 0

    def _inside(self, layer: int) -> npt.NDArray[np.bool_]:
        """The activations that are alive and were made in a layer or in the layers inside it."""
        inside: npt.NDArray[np.bool_] = self._alive & (self._kind == ACTIVATION) & np.isin(self._owner, self._within[layer])
        return inside

    def _layers_within(self) -> list[list[int]]:
        around = self._record.facts.around
        within: list[list[int]] = [[] for _ in around]
        for layer, outer in enumerate(around):
            for each in outer:
                within[each].append(layer)
        return within

    def _around(self, layers: Iterable[int]) -> set[int]:
        around = self._record.facts.around
        return {outer for layer in layers for outer in around[layer]}

    def _position(self, name: str) -> int:
        try:
            return self._record.facts.names.index(name)
        except ValueError:
            return NO_LAYER


def _one_within_the_other(one: str, other: str) -> bool:
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")
