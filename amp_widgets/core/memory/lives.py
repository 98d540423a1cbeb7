"""The lives of storages within a profiled step: from which point to which, what for, and where they were made."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from amp_widgets.core.memory.profile import KINDS
from amp_widgets.core.memory.storages import NO_TENSORS, LiveStorages, Reference, storages_of

PARAMETER, BUFFER, GRADIENT, OPTIMIZER, ACTIVATION, RECOMPUTE, TEMPORARY, OTHER = range(len(KINDS))
"""Positions in `KINDS`."""
NO_GRAD_FORWARD = len(KINDS)
"""Made in a forward pass without gradients: an activation if it outlives that, else temporary. Inside of a custom
autograd.Function gradients are off as well, and what it saves is an activation."""
NO_GRAD_LOSS = len(KINDS) + 1
"""The same between forward and backward: an activation if the backward pass finds it alive, else something of the user's."""


class Life:
    """One storage, or one size of a storage that is resized.

    Attributes
    ----------
    nbytes
        Its size in bytes.
    birth, death
        It is alive from point `birth` up to, not including, `death`; None while it lives.
    kind
        Position in `KINDS`, or `NO_GRAD_FORWARD` or `NO_GRAD_LOSS`, which are decided when the step is over.
    layer
        Position of the layer that it belongs to; -1 for none.
    before
        The same storage at its former size.
    """

    death: int | None = None
    kind = OTHER
    layer = -1
    before: Life | None = None

    def __init__(self, nbytes: int, birth: int) -> None:  # the rest are the class's, as this runs for every tensor that is made
        self.nbytes = nbytes
        self.birth = birth

    def identify(self, kind: int, layer: int) -> None:
        """Say what it has been from its birth on, unless that is known; parameters, gradients and the like are known for good."""
        life: Life | None = self
        while life is not None and life.kind > OPTIMIZER:
            life.kind = kind
            life.layer = layer
            life = life.before


class RecordedStorages(LiveStorages):
    """Goes on with what another one knows, and also writes down the life of each storage.

    Parameters
    ----------
    other
        Shares what it knows from now on. Its own sum of bytes is not kept up: `recount` it afterwards.
    """

    __slots__ = ("_now", "changed", "dead_gradients", "fresh", "lives", "others_died", "points")

    def __init__(self, other: LiveStorages) -> None:
        super().__init__(other._devices)
        other.settle()
        self._known = other._known
        self._freed = other._freed
        self.bytes = other.bytes
        self.points = 0
        """Of the step so far; changes count for the point that comes next."""
        self.changed = True
        """Whether there was a change since the last point."""
        self._now = {key: Life(reference.nbytes, 0) for key, reference in self._known.items()}
        self.lives = list(self._now.values())
        self.fresh: list[Life] = []
        """Born since this was cleared."""
        self.dead_gradients: list[Life] = []
        """Died since this was cleared; `others_died` tells of other storages."""
        self.others_died = False

    def settle(self) -> None:
        """Take off what was freed."""
        freed, known = self._freed, self._known
        while freed:
            reference = freed.popleft()
            if known.get(reference.key) is reference:
                del known[reference.key]
                self.bytes -= reference.nbytes
                life = self._now.pop(reference.key)
                life.death = self.points
                self.changed = True
                if life.kind == GRADIENT:
                    self.dead_gradients.append(life)
                else:
                    self.others_died = True

    def see_op(self, args: Iterable[Any], out: Any) -> None:
        """`see` the arguments of an op, then its results, of which those that it has made are in `fresh` afterwards."""
        known = self._known
        for value in args:  # as in `see`, for the same reason
            kind = type(value)
            if kind is Tensor or kind is Parameter:
                try:
                    storage = value.untyped_storage()
                except NotImplementedError:
                    self.see(value)
                    continue
                reference = known.get(id(storage))
                if reference is None:
                    self._add(storage)
                elif reference.nbytes != (nbytes := storage.nbytes()):
                    self._resize(reference, nbytes)
            elif kind not in NO_TENSORS:
                self.see(value)
        if self.fresh:  # what is seen for the first time as an argument was not made here
            self.fresh.clear()
        if type(out) is Tensor:
            try:
                storage = out.untyped_storage()
            except NotImplementedError:
                self.see(out)
                return
            reference = known.get(id(storage))
            if reference is None:
                self._add(storage)
            elif reference.nbytes != (nbytes := storage.nbytes()):
                self._resize(reference, nbytes)
        elif out is not None:
            self.see(out)

    def identify(self, tensor: Tensor, kind: int, layer: int) -> None:
        """Say what the storages of a tensor have been from their birth on, if they are known; `settle` first."""
        type_ = type(tensor)
        if type_ is Tensor or type_ is Parameter:
            try:
                life = self._now.get(id(tensor.untyped_storage()))
            except NotImplementedError:  # sparse
                pass
            else:
                if life is not None and life.kind > OPTIMIZER:
                    life.identify(kind, layer)
                return
        try:
            storages = list(storages_of(tensor))
        except Exception:  # as in `see`: what cannot be read is not known
            return
        for storage in storages:
            life = self._now.get(id(storage))
            if life is not None:
                life.identify(kind, layer)

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage.device not in self._devices:
            return
        key = id(storage)
        reference = Reference(storage, self._freed.append)
        reference.key = key
        reference.nbytes = nbytes = storage.nbytes()
        self._known[key] = reference
        self.bytes += nbytes
        self._now[key] = life = Life(nbytes, self.points)
        self.lives.append(life)
        self.fresh.append(life)
        self.changed = True

    def _resize(self, reference: Reference, nbytes: int) -> None:
        super()._resize(reference, nbytes)
        old = self._now[reference.key]
        old.death = self.points
        life = Life(nbytes, self.points)
        life.kind, life.layer, life.before = old.kind, old.layer, old
        self._now[reference.key] = life
        self.lives.append(life)
        self.changed = True


class SharedStorages(RecordedStorages):
    """Recorded storages that several threads may use at the same time: the backward pass of each device has one of its own.

    What is `fresh` is so for the thread that made it.
    """

    __slots__ = ("_own", "lock")

    def __init__(self, other: LiveStorages) -> None:
        self.lock = threading.RLock()  # reentrant, as the methods call each other, and the garbage collector may come between
        self._own = threading.local()
        super().__init__(other)

    @property
    def fresh(self) -> list[Life]:
        """Born in this thread since this was cleared."""
        own = self._own.__dict__
        fresh: list[Life] | None = own.get("fresh")
        if fresh is None:
            own["fresh"] = fresh = []
        return fresh

    @fresh.setter
    def fresh(self, fresh: list[Life]) -> None:
        self._own.fresh = fresh

    def settle(self) -> None:
        """Take off what was freed."""
        with self.lock:
            super().settle()

    def see(self, *values: Any) -> None:
        """As in `LiveStorages`."""
        with self.lock:
            super().see(*values)

    def see_op(self, args: Iterable[Any], out: Any) -> None:
        """As in `RecordedStorages`."""
        with self.lock:
            self.settle()  # another thread may have freed what had the identity of something that is new now
            super().see_op(args, out)
