"""What a whole step would need under other settings, by the last complete step that was followed: estimates on the safe side."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from amp_widgets.core.memory.death import Death
from amp_widgets.core.memory.lives import ACTIVATION, BUFFER, GRADIENT, OPTIMIZER, OTHER, PARAMETER, RECOMPUTE, TEMPORARY, Life
from amp_widgets.core.memory.profile import PHASES
from amp_widgets.core.memory.step_mode import operator_name
from amp_widgets.core.memory.step_record import NO_LAYER, StepRecord

_Bytes = npt.NDArray[np.float64]
_Integers = npt.NDArray[np.int64]
_FORWARD, _BACKWARD, _RECOMPUTE, _OPTIMIZER = (PHASES.index(name) for name in ("forward", "backward", "recompute", "optimizer"))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CompleteStep:
    """A step that was followed from its beginning to its end.

    Attributes
    ----------
    record
        What was written down.
    inputs, outputs
        Of each layer that was called, by position.
    """

    record: StepRecord
    inputs: Mapping[int, Sequence[Life]]
    outputs: Mapping[int, Sequence[Life]]


class WholeStep:
    """The step that has died, as it would have gone on if it was like the last complete one.

    Held were, at each point, what the complete step held; besides, from the beginning on, the optimizer's state that it has
    made, and what there was more of at the death. Where the activations of the dead step were larger, all that depends on the
    batch is so by the same factor. Estimates keep to the safe side: what is not known to shrink does not.

    Parameters
    ----------
    death
        With a record, and a limit.
    complete
        Under the same settings.

    Raises
    ------
    ValueError
        When the dead step was not like the complete one, as far as it went.
    """

    def __init__(self, death: Death, complete: CompleteStep) -> None:
        assert death.record is not None
        self._death = death
        self._record = record = complete.record
        self._complete = complete
        born, died, size, kind, owner = record.lives_at_end()
        points = len(record.points)
        self._points = points
        self._phase = np.array([point[1] for point in record.points])
        self._layer = np.array([point[2] for point in record.points])
        stays = died >= points
        born = np.where((kind == OPTIMIZER) & stays, 0, born)

        dead = death.record
        dead_born, dead_died, dead_size, dead_kind, dead_owner = dead.lives_at_end()
        dead_phase = np.array([point[1] for point in dead.points])
        alive = dead_died >= len(dead.points) - 1
        alive &= dead_born < len(dead.points) - 1
        if (alive & (dead_born == 0) & (dead_kind == GRADIENT)).any() and not ((born == 0) & (kind == GRADIENT)).any():
            born = np.where((kind == GRADIENT) & stays, 0, born)  # they are not dropped before the forward pass

        made = _made_in_forward(born, kind, self._phase)
        dead_made = _made_in_forward(dead_born, dead_kind, dead_phase)
        steps = min(len(made), len(dead_made))
        if len(dead_made) > len(made) or (owner[made[:steps]] != dead_owner[dead_made[:steps]]).any():
            raise ValueError("the steps are not alike")
        ratios = [1.0, *(dead_size[dead_made[:steps]] / np.maximum(size[made[:steps]], 1)).tolist()]
        if death.phase == "forward" and len(dead_made) < len(made) and size[made[steps]]:
            ratios.append(death.requested_bytes / size[made[steps]])
        elif not steps:
            raise ValueError("nothing of the two can be compared")
        self._factor = max(ratios)

        parameters = set(size[kind == PARAMETER].tolist())
        of_weights = np.isin(size, [*parameters, *(each // 2 for each in parameters)])
        in_optimizer = self._phase[np.minimum(born, points - 1)] == _OPTIMIZER
        self._shrinks = np.isin(kind, (ACTIVATION, RECOMPUTE, TEMPORARY)) & ~of_weights & ~in_optimizer & (born > 0)
        grows = self._shrinks | (np.isin(kind, (ACTIVATION, OTHER)) & (born > 0))
        size = np.where(grows, np.ceil(size * self._factor), size).astype(np.float64)
        self._born, self._died, self._size, self._kind, self._owner = born, died, size, kind, owner

        now = int(born[made[steps - 1]]) if steps else 0
        others = (born > 0) & (kind == OTHER) & (born <= now) & (died > now)
        more = float(dead_size[alive & (dead_born == 0)].sum()) - float(size[(born == 0) & (died > now)].sum())
        more_others = float(dead_size[alive & (dead_born > 0) & (dead_kind == OTHER)].sum()) - float(size[others].sum())
        self._more_bytes = max(0.0, more) + max(0.0, more_others)
        self._held = self._sum(np.ones(len(size), dtype=bool)) + self._more_bytes
        self._within = _layers_within(record)
        self._places = {id(life): place for place, life in enumerate(record.lives)}
        self._slack_bytes = _SLACK * death.limit_bytes + _SLACK_BYTES
        self._changes: dict[str, _Change | None] = {}

    @property
    def peak_bytes(self) -> float:
        """About the most that the step would have held."""
        return float(self._held.max())

    def fits(self, peak_bytes: float) -> bool:
        """Whether an estimate is so far below the limit that it can be said to fit."""
        return peak_bytes + self._slack_bytes <= self._death.limit_bytes

    def batch_share(self) -> float:
        """The share of this batch with which the whole step would have fitted; below 0 where the rest alone is too much."""
        rest = self._sum(self._shrinks)
        fixed = self._held - rest
        room = self._death.limit_bytes - self._slack_bytes - fixed
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = np.where(rest > 0, room / np.maximum(rest, 1), np.where(room >= 0, math.inf, -1.0))
        return float(shares.min())

    # ---- checkpointing ----------------------------------------------------------------------------------------------

    def peak_with(self, names: Sequence[str]) -> float:
        """About the most that would have been held with these layers checkpointed besides; none within another."""
        changes = [change for name in names if (change := self._change(name)) is not None]
        held = self._held.copy()
        for change in changes:
            held += change.bytes
        return max([float(held.max()), *(float(held[change.before_backward]) + change.rise_bytes for change in changes)])

    def cost_s(self, name: str) -> float:
        """Seconds that computing a layer again takes."""
        names = self._record.facts.names
        return self._record.forward_s[names.index(name)] if name in names else 0.0

    def choose(self, candidates: Sequence[str], cost_s: Mapping[str, float]) -> tuple[tuple[str, ...], float]:
        """The few, and cheap, layers with which the whole step fits, and its peak; no layers, and the least, where none do."""
        usable = [name for name in candidates if self._change(name) is not None]
        singles = {name: self.peak_with([name]) for name in usable}
        fitting = [name for name in usable if self.fits(singles[name])]
        if fitting:
            best = min(fitting, key=lambda name: (cost_s[name], singles[name]))
            return (best,), singles[best]
        chosen: list[str] = []
        least = self.peak_bytes
        for _ in range(_MOST_LAYERS):
            more = [name for name in usable if not any(_nested(name, other) for other in chosen)]
            peaks = {name: self.peak_with([*chosen, name]) for name in more}
            if not peaks:
                break
            # Where no single one lowers the peak, as several moments are equally high, the one that frees most comes first.
            name = min(more, key=lambda name: (peaks[name], float(self._changed(name).bytes.sum()), cost_s[name]))
            chosen.append(name)
            least = min(least, peaks[name])
            if self.fits(peaks[name]):
                for name in sorted(chosen, key=lambda name: -cost_s[name]):
                    rest = [other for other in chosen if other != name]
                    if self.fits(self.peak_with(rest)):
                        chosen = rest
                order = {name: place for place, name in enumerate(candidates)}
                chosen.sort(key=lambda name: order[name])
                return tuple(chosen), self.peak_with(chosen)
        return (), least

    # ---- autocast ---------------------------------------------------------------------------------------------------

    def peak_in_half(self) -> float:
        """The most that would have been held with autocast to a format of half the size, at the worst.

        Only the results of matrix products and convolutions are taken to be half as large, and those of an activation function
        right after one. What autocast adds are casts of the
        weights and of the inputs of such layers, and, where an operator computes in float32, of its input.
        """
        points = self._points
        operators = [operator_name(point[3]).removeprefix("aten::") for point in self._record.points]
        at = np.minimum(self._born, points - 1)
        made = np.isin(self._kind, (ACTIVATION, TEMPORARY)) & (self._born > 0) & np.isin(self._phase[at], _FORWARD_OR_LOSS)
        halved = made & np.array([operators[point] in _IN_HALF for point in at])
        before = -1
        for now in np.flatnonzero(made):  # in the order in which they were made
            alike = before >= 0 and halved[before] and self._size[before] == self._size[now]
            if alike and operators[at[now]] in _AS_BEFORE:
                halved[now] = True
            before = int(now)
        in_full = made & np.array([operators[point] in _IN_FULL for point in at])
        held = self._held - self._sum(halved) / 2 + self._sum(in_full)
        weights = float(self._size[self._kind == PARAMETER].sum()) / 2
        inputs = 0.0
        for layer, lives in self._complete.inputs.items():
            if not halved[(self._owner == layer)].any():
                continue
            places = {place for life in lives if (place := self._places.get(id(life))) is not None}
            inputs += sum(float(self._size[place]) for place in places if not halved[place]) / 2
        backward = np.flatnonzero(np.isin(self._phase, (_BACKWARD, _RECOMPUTE)))
        forward = np.flatnonzero(self._phase == _FORWARD)
        if not len(backward) or not len(forward):
            return math.inf
        held[forward[0] : backward[-1] + 1] += weights + inputs
        passing = self._size[(self._kind != PARAMETER) & np.isin(self._phase[at], (_BACKWARD,)) & (self._born > 0)]
        held[backward[0] : backward[-1] + 1] += float(passing.max()) if len(passing) else 0.0
        return float(held.max())

    # ---- private ----------------------------------------------------------------------------------------------------

    def _sum(self, which: npt.NDArray[np.bool_]) -> _Bytes:
        """What those hold at each point."""
        changes = np.zeros(self._points + 1)
        np.add.at(changes, self._born[which], self._size[which])
        np.subtract.at(changes, self._died[which], self._size[which])
        sums: _Bytes = changes[: self._points].cumsum()
        return sums

    def _changed(self, name: str) -> _Change:
        change = self._change(name)
        assert change is not None
        return change

    def _change(self, name: str) -> _Change | None:
        if name not in self._changes:
            self._changes[name] = self._find_change(name)
        return self._changes[name]

    def _find_change(self, name: str) -> _Change | None:
        """What checkpointing a layer changes; None where that is not known, or nothing."""
        try:
            layer = self._record.facts.names.index(name)
        except ValueError:
            return None
        outputs = self._complete.outputs.get(layer)
        facts = self._record.facts
        if outputs is None or self._record.calls[layer] != 1 or any(facts.checkpointed[outer] for outer in facts.around[layer]):
            return None
        if self._record.recomputed & set(facts.around[layer]):
            return None
        own = np.isin(self._owner, self._within[layer]) & (self._born > 0)
        inside = own & (self._kind == ACTIVATION)
        at = np.minimum(self._born, self._points - 1)
        in_forward = own & (self._phase[at] == _FORWARD)
        backward = np.flatnonzero(np.isin(self._layer, self._within[layer]) & (self._phase == _BACKWARD))
        if not inside.any() or not in_forward.any() or not len(backward):
            return None
        begin, end = int(self._born[in_forward].min()), int(self._born[in_forward].max())
        first, last = int(backward[0]), int(backward[-1])
        if first <= end:
            return None
        changes = np.zeros(self._points + 1)
        kept = {self._places.get(id(life)) for life in outputs}
        for at_inside in np.flatnonzero(inside):
            until = min(int(self._died[at_inside]), first)
            if at_inside not in kept and until > end + 1:
                changes[end + 1] -= self._size[at_inside]
                changes[until] += self._size[at_inside]
        output_bytes = float(sum(self._size[place] for place in kept if place is not None))
        changes[first] += output_bytes  # computed again as well
        changes[last + 1] -= output_bytes
        inputs = {place for life in self._complete.inputs.get(layer, ()) if (place := self._places.get(id(life))) is not None}
        for at_input in inputs:
            if self._died[at_input] <= last:
                changes[self._died[at_input]] += self._size[at_input]
                changes[last + 1] -= self._size[at_input]
        changes[end + 1] += _STASH_BYTES
        changes[last + 1] -= _STASH_BYTES
        rise = float(self._held[begin : end + 1].max() - self._held[begin - 1])
        return _Change(bytes=changes[: self._points].cumsum(), before_backward=first - 1, rise_bytes=rise + output_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Change:
    bytes: _Bytes  # at each point
    before_backward: int
    rise_bytes: float  # while it is computed again, at that point


_SLACK = 0.005
_SLACK_BYTES = 4096
_STASH_BYTES = 3 * 5056  # what is kept of the state of the random numbers, and fetched again
_MOST_LAYERS = 64
_FORWARD_OR_LOSS = (PHASES.index("forward"), PHASES.index("loss"))
_IN_HALF = frozenset(
    ("mm", "addmm", "bmm", "baddbmm", "addbmm", "matmul", "linear", "convolution", "mkldnn_linear", "mkldnn_convolution")
)
_AS_BEFORE = frozenset(("gelu", "relu", "silu", "tanh", "sigmoid", "leaky_relu", "elu", "hardtanh", "hardswish", "mish"))
_IN_FULL = frozenset(
    (
        "native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit", "_softmax", "_log_softmax",
        "exp", "log", "pow", "sum", "mean", "nll_loss_forward", "mse_loss", "_fused_rms_norm", "rsqrt", "norm",
    )
)  # fmt: skip


def _made_in_forward(born: _Integers, kind: _Integers, phase: _Integers) -> npt.NDArray[np.intp]:
    """Which lives a forward pass has made, in their order."""
    at = np.minimum(born, len(phase) - 1)
    state = (PARAMETER, BUFFER, GRADIENT, OPTIMIZER, OTHER)
    return np.flatnonzero((born > 0) & (born < len(phase)) & (phase[at] == _FORWARD) & ~np.isin(kind, state))


def _layers_within(record: StepRecord) -> list[list[int]]:
    within: list[list[int]] = [[] for _ in record.facts.around]
    for layer, outer in enumerate(record.facts.around):
        for each in outer:
            if each != NO_LAYER:
                within[each].append(layer)
    return within


def _nested(one: str, other: str) -> bool:
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")
