"""A step of a compiled model on a CPU: what is known at its boundaries, and nothing that disturbs the compiled code."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_widgets.core.layers import inner_model, named_layers
from amp_widgets.core.memory.allocator import BoundaryWatch
from amp_widgets.core.memory.lives import BUFFER, GRADIENT, OPTIMIZER, PARAMETER
from amp_widgets.core.memory.profile import KINDS, PHASES, StepProfile, frozen_sums, phases_of
from amp_widgets.core.memory.reading import NOT_MEASURED, MemoryReading, NoMeter
from amp_widgets.core.memory.storages import storages_of


class StateWatch:
    """Reads the bytes of parameters, buffers, gradients and optimizer state as a step begins, around optimizers' steps, and at
    the end. No op is looked at, and no module hooked.

    Parameters
    ----------
    model
        Asked for at each reading.
    optimizers
        Whose state is read, and whose steps are watched; all optimizers' steps, if there are none.
    label, step
        Of the profile.
    reason
        Why there is no more, as a sentence without its end.
    clock
        Seconds.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module | None],
        optimizers: Callable[[], Sequence[Optimizer]],
        *,
        label: str,
        step: int,
        reason: str,
        clock: Callable[[], float],
    ) -> None:
        self._model = model
        self._optimizers = optimizers
        self._label, self._step, self._reason = label, step, reason
        self._rows: list[dict[str, dict[str, int]]] = []  # layer → kind → bytes
        self._names: tuple[str, ...] = ()
        self._watch = BoundaryWatch(self, optimizers(), clock)

    def read(self, point: int) -> None:
        """Read what is there now."""
        model = self._model()
        sums: dict[str, dict[str, int]] = {}
        if model is not None:
            with torch._C.DisableTorchFunction():
                self._count(inner_model(model), named_layers(model), sums)
        self._rows.append(sums)

    def stop(self) -> None:
        """Watch no more."""
        self._watch.stop()

    def finish(self) -> StepProfile:
        """The profile, at the end of the step."""
        self._watch.finish()
        points = self._watch.points
        bytes_by_kind = np.zeros((len(self._rows), len(KINDS)), dtype=np.int64)
        for place, sums in enumerate(self._rows):
            for kinds in sums.values():
                for kind, size in kinds.items():
                    bytes_by_kind[place, KINDS.index(kind)] += size
        phases = [phase for _, phase in points]
        phases[0] = phases[1]
        none = np.full(len(points), -1, dtype=np.int32)
        time_s = np.array([seconds for seconds, _ in points])
        for array in (bytes_by_kind, none, time_s):
            array.flags.writeable = False
        return StepProfile(
            label=self._label,
            step=self._step,
            device="cpu",
            source="parameters, buffers, gradients and optimizer state on cpu, counted at the boundaries of the step",
            bytes_by_kind=bytes_by_kind,
            time_s=time_s,
            layer_index=none,
            operator_index=none,
            layer_names=self._names,
            operator_names=(),
            phases=phases_of([PHASES[phase] for phase in phases]),
            layers=(),
            peak_by_layer=frozen_sums(self._rows[int(bytes_by_kind.sum(axis=1).argmax())]),
            notes=(
                f"{self._reason}: what is held at the boundaries of the step and around the optimizer's step was read; what "
                f"comes and goes in between, activations above all, is not counted",
            ),
        )

    def _count(self, root: nn.Module, layers: dict[str, nn.Module], sums: dict[str, dict[str, int]]) -> None:
        self._names = tuple(layers)
        seen: set[int] = set()

        def add(value: Any, kind: int, layer: str) -> None:
            if isinstance(value, dict):
                for inner in value.values():
                    add(inner, kind, layer)
            elif isinstance(value, (list, tuple)):
                for inner in value:
                    add(inner, kind, layer)
            elif isinstance(value, Tensor):
                try:
                    storages = list(storages_of(value))
                except Exception:  # a foreign subclass may do anything
                    return
                for storage in storages:
                    if id(storage) not in seen and storage.device.type == "cpu" and storage.nbytes():
                        seen.add(id(storage))
                        alive.append(storage)
                        kinds = sums.setdefault(layer, {})
                        kinds[KINDS[kind]] = kinds.get(KINDS[kind], 0) + storage.nbytes()

        alive: list[Any] = []  # so that no identity comes again meanwhile
        modules = [("", root), *layers.items()]
        layer_of: dict[int, str] = {}
        for name, module in modules:
            for parameter in module._parameters.values():
                if parameter is not None:
                    layer_of.setdefault(id(parameter), name)
            add(dict(module._parameters), PARAMETER, name)
            add(dict(module._buffers), BUFFER, name)
        for name, module in modules:
            add([own.grad for own in module._parameters.values() if own is not None and own.is_leaf], GRADIENT, name)
        for optimizer in self._optimizers():
            for tensor, state in optimizer.state.items():
                add(state, OPTIMIZER, layer_of.get(id(tensor), ""))


class StateMeter(NoMeter):
    """The meter of a compiled model on a CPU: no step is measured, and profiles say what is known at a step's boundaries.

    Parameters
    ----------
    reason
        Why nothing is measured, for people.
    model, optimizers
        Whose state is read; both are weakly referenced by the caller's functions.
    """

    def __init__(
        self,
        reason: str,
        model: Callable[[], nn.Module | None],
        optimizers: Callable[[], Sequence[Optimizer]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(reason)
        self._reason = reason
        self._model = model
        self._given = optimizers
        self._followed: list[Callable[[], Optimizer | None]] = []
        self._clock = clock
        self._wanted: tuple[str, int] | None = None
        self._state_watch: StateWatch | None = None
        self._profile: StepProfile | None = None

    def watch(self, model: Callable[[], nn.Module | None]) -> None:
        """Read this model's state from the next profile on."""
        self._model = model

    def follow(self, optimizers: Iterable[Optimizer]) -> None:
        """Read the state of these as well."""
        known = self._optimizers()
        self._followed += [weakref.ref(each) for each in optimizers if all(each is not other for other in known)]

    def profile_next(self, label: str, *, step: int = -1) -> None:
        """Profile the boundaries of the step that `begin` starts next."""
        self._wanted = (label, step)
        self.unprofiled_because = None

    def take_profile(self) -> StepProfile | None:
        """The profile of the last step that was profiled, once."""
        profile, self._profile = self._profile, None
        return profile

    def begin(self) -> None:
        """Begin a profile, if one was asked for."""
        self.abandon()
        wanted, self._wanted = self._wanted, None
        if wanted is not None:
            self.unprofiled_because = None
            label, step = wanted
            self._state_watch = StateWatch(
                self._model, self._optimizers, label=label, step=step, reason=self._reason, clock=self._clock
            )

    def end(self) -> MemoryReading:
        """All NaN; a profile is there."""
        watch, self._state_watch = self._state_watch, None
        if watch is not None:
            self._profile = watch.finish()
        return NOT_MEASURED

    def abandon(self) -> None:
        """The step will not end."""
        watch, self._state_watch = self._state_watch, None
        if watch is not None:
            watch.stop()
            self.unprofiled_because = "the step did not end"

    def close(self) -> None:
        """Forget the model and the optimizers."""
        self.abandon()
        self._model = lambda: None
        self._given = lambda: ()
        self._followed = []
        self._wanted = self._profile = None

    def _optimizers(self) -> list[Optimizer]:
        return [*self._given(), *(each for reference in self._followed if (each := reference()) is not None)]
