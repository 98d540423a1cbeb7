"""Where inf or NaN came from in a step that was skipped: its gradients are looked at while they are there, and no others."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils import _pytree as pytree

from amp_widgets.core.array_readback import ArrayReadback
from amp_widgets.core.gradient_probe import WatchedModels, gradient_node
from amp_widgets.core.layers import inner_model
from amp_widgets.core.memory.compiled import frames_compiled, is_compiled
from amp_widgets.core.readback import Readback, host_value
from amp_widgets.core.unseen import unseen

Seen = Literal["arriving", "stepping", "afterwards"]
Found = Literal["finite", "inf", "nan"]
NAMES_KEPT = 32
NOTES_KEPT = 10_000
FOLLOWED_AFTER = 8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SkipNote:
    """The gradients of a skipped step.

    Attributes
    ----------
    step
        Its number.
    scale
        The loss scale that was used.
    loss_finite
        Whether the loss, before it was scaled, was neither inf nor NaN; None where it is not known.
    parameters
        The parameters whose gradients have inf or NaN, the one whose gradient was produced first at the front; at most
        `NAMES_KEPT` of them.
    nonfinite, of
        How many such parameters there are, and of how many with a gradient.
    with_nan
        How many of them have NaN, with or without inf.
    seen
        ``"arriving"``: as each gradient was produced. ``"stepping"``: in the gradients as ``scaler.step`` found them, which has
        unscaled them itself. ``"afterwards"``: in the gradients as they were when the step was skipped, into which clipping may
        have carried NaN from others.
    order_of
        The step whose order of production this is; None: the model's own, from the end.
    output
        What was in the gradient of the model's own output, with which the backward pass enters the model; None where it was not
        looked at.
    """

    step: int
    scale: float
    loss_finite: bool | None
    parameters: tuple[str, ...]
    nonfinite: int
    of: int
    with_nan: int
    seen: Seen
    order_of: int | None
    output: Found | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NoChecksNote:
    """``scaler.step`` or ``scaler.update`` was refused in this step, as no gradient had been checked for inf.

    Attributes
    ----------
    reason
        What the error said.
    """

    step: int
    reason: str


class OverflowProbe:
    """Notes of each skipped step which gradients had inf or NaN, and which of them was produced first.

    In the other steps it does nothing at all. The order in which a backward pass produces gradients is learned in the first step,
    and again in the `FOLLOWED_AFTER` steps after each skip, which also look at each gradient as it arrives, and at that of the
    model's output: where skips come in a run, or every few steps, all but the first are seen exactly as they came about. Nothing
    waits for the device. Under torch.compile no step is followed, and skips are looked into afterwards.

    Parameters
    ----------
    model
        Whose parameters; only weakly referenced.
    every_step
        Look at the gradients of each step as they arrive, whether it is skipped or not. It takes that where only the device
        knows of a skip (a fused optimizer on CUDA); else such skips are noted from the moment on that one is known of.
    """

    def __init__(self, model: nn.Module, *, every_step: bool = False) -> None:
        self.every_step = every_step
        self._models = WatchedModels([("", model)])
        self._order: tuple[int, dict[int, int]] | None = None  # of which step, and the rank of each parameter by its id
        self._follow_steps = 1  # so many of the steps to come
        self._skipped_before = False
        self._following: _Followed | None = None
        self._looked: _Looked | None = None
        self._arriving: collections.deque[_Arriving] = collections.deque()
        self._notes: collections.deque[SkipNote] = collections.deque(maxlen=NOTES_KEPT)
        self._refused: collections.deque[NoChecksNote] = collections.deque(maxlen=NOTES_KEPT)
        self._lock = threading.Lock()

    @property
    def notes(self) -> tuple[SkipNote, ...]:
        """Of the skipped steps, as far as the numbers have arrived, the newest last. Never waits."""
        self._take_in(wait=False)
        return tuple(self._notes)

    @property
    def refused(self) -> tuple[NoChecksNote, ...]:
        """The steps in which the scaler has refused to go on, as no gradient had been checked."""
        return tuple(self._refused)

    # ---- told by the loop, on the training thread ---------------------------------------------------------------------

    def watch(self, models: Iterable[tuple[str, nn.Module]]) -> None:
        """Look at these models' parameters from now on; where they are several, their names come first."""
        self._models = WatchedModels(models)
        self._order, self._follow_steps = None, 1

    def begin(self, step: int) -> None:
        """A step begins, before its backward pass."""
        self._looked = None
        if self._following is not None:
            self._stop_following()
        if (self._follow_steps > 0 or self.every_step) and not frames_compiled():
            self._follow_steps = max(self._follow_steps - 1, 0)
            models = self._models.alive()
            outputs = self._skipped_before and not any(is_compiled(module) for _, model in models for module in model.modules())
            self._following = _Followed(models, step, outputs=outputs)

    def skipping(self, *, as_arrived: bool = False) -> None:
        """The scaler is skipping an optimizer's step: the gradients are still there.

        Parameters
        ----------
        as_arrived
            Whether they are as the backward pass has left them, but for the scale.
        """
        if self._looked is None:
            self._looked = self._look("stepping" if as_arrived else "afterwards")

    def refuse(self, step: int, reason: str) -> None:
        """The scaler has raised an error, as no gradient was checked for inf."""
        if not self._refused or self._refused[-1].step != step:
            self._refused.append(NoChecksNote(step=step, reason=reason))

    def end(
        self, step: int, scale: Tensor | float | None, skipped: bool | None, loss: Tensor | None, found_inf: Tensor | None = None
    ) -> None:
        """The step is over.

        Parameters
        ----------
        step
            Its number.
        scale
            The scale used, on the device perhaps; None where the loss was not scaled.
        skipped
            None where only the device knows; then `found_inf` is above 0 if it was.
        loss
            Not scaled, on the device perhaps; None where it is not known.
        """
        followed = self._stop_following()
        looked, self._looked = self._looked, None
        if followed is not None and followed.order:
            self._order = step, followed.order
        if skipped is None and found_inf is not None and found_inf.is_cpu:
            skipped = host_value(found_inf) > 0
        if skipped:
            self._skips_seen()
        elif self._order is None:
            self._follow_steps = max(self._follow_steps, 1)
        if skipped is False:
            return
        if followed is not None and followed.extremes:
            looked = followed.looked()
        elif looked is None and skipped:
            looked = self._look("afterwards")
        values = Readback([1.0 if scale is None else scale, loss, found_inf])
        self._arriving.append(_Arriving(step, looked, self._order, skipped, loss is not None, values))
        self._take_in(wait=False)

    def abandon(self) -> None:
        """The step will not end."""
        self._stop_following()
        self._looked = None

    def forget_from(self, step: int) -> None:
        """Let go of the notes of this step and later ones."""
        self._take_in(wait=True)
        with self._lock:
            for notes in (self._notes, self._refused):
                kept = [note for note in notes if note.step < step]
                notes.clear()
                notes.extend(kept)  # type: ignore[arg-type]  # of the deque that they come from

    def close(self) -> None:
        """Let go of the model; what was noted stays."""
        self.abandon()
        self._models, self._follow_steps, self.every_step, self._order = WatchedModels(()), 0, False, None
        self._take_in(wait=True)

    def _stop_following(self) -> _Followed | None:
        followed, self._following = self._following, None
        if followed is not None:
            followed.stop()
        return followed

    def _skips_seen(self) -> None:
        self._follow_steps = FOLLOWED_AFTER
        self._skipped_before = True

    def _look(self, seen: Seen) -> _Looked:
        known = [(name, one, one.grad) for name, one in _named_parameters(self._models.alive()) if one.grad is not None]
        with unseen():
            flags = _Flags([_extremes_of(gradient) for _, _, gradient in known])
        return _Looked(seen, [name for name, _, _ in known], [id(one) for _, one, _ in known], flags)

    def _take_in(self, *, wait: bool) -> None:
        with self._lock:
            while self._arriving and (wait or self._arriving[0].ready()):
                arrived = self._arriving.popleft()
                if not arrived.was_skipped():
                    continue
                if arrived.skipped is None:  # known of it only now
                    self._skips_seen()
                if arrived.looked is not None:
                    self._notes.append(arrived.note(arrived.looked))


_FINITE, _INF, _NAN = 0, 1, 2
_FOUND: tuple[Found, ...] = ("finite", "inf", "nan")


def _named_parameters(models: Sequence[tuple[str, nn.Module]]) -> Iterable[tuple[str, nn.Parameter]]:
    for prefix, model in models:
        for name, parameter in inner_model(model).named_parameters():
            yield f"{prefix}.{name}" if prefix else name, parameter


def _extremes_of(gradient: Tensor) -> tuple[Tensor, ...]:
    """The smallest and the largest number, which tell of inf and NaN in one go over the gradient; on the device."""
    gradient = gradient.detach()
    if gradient.layout != torch.strided:
        gradient = gradient._values()
    return tuple(torch.aminmax(gradient)) if gradient.numel() else ()


class _Flags:
    """What was found in some tensors each, on its way from the device."""

    def __init__(self, extremes: Sequence[Sequence[Tensor]]) -> None:
        together: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
        for at, found in enumerate(extremes):
            for one in found:
                together.setdefault((one.device, one.dtype), []).append((at, one))
        self._count = len(extremes)
        self._places = [at for pairs in together.values() for at, _ in pairs]
        self._readback = ArrayReadback([torch.stack([one for _, one in pairs]).double() for pairs in together.values()])

    def ready(self) -> bool:
        return self._readback.ready()

    def values(self) -> list[int]:
        """Of each `_FINITE`, `_INF` or `_NAN`."""
        flags = [_FINITE] * self._count
        found = (float(value) for array in self._readback.arrays() for value in array)
        for at, value in zip(self._places, found, strict=True):
            flags[at] = max(flags[at], _NAN if math.isnan(value) else _INF if math.isinf(value) else _FINITE)
        return flags


@dataclasses.dataclass(slots=True)
class _Looked:
    """What was seen in a step's gradients, by parameter; the flags perhaps still on the device."""

    seen: Seen
    names: list[str]
    ids: list[int]
    flags: _Flags
    output: bool = False
    """Whether one more flag follows those of the parameters: that of the model's output."""


class _Followed:
    """A step in which each gradient is looked at as it arrives; with `outputs`, also those of what the models return."""

    def __init__(self, models: Sequence[tuple[str, nn.Module]], step: int, *, outputs: bool = False) -> None:
        self.step = step
        self.order: dict[int, int] = {}
        self.extremes: dict[int, list[Tensor]] = {}  # of each parameter, of all that has arrived
        self._names: dict[int, str] = {}
        self._outputs: list[Tensor] = []  # the extremes of their gradients
        self._handles: list[Any] = []
        self._nodes: list[Any] = []
        self._over = False
        with unseen():  # finding a node takes an op
            for name, parameter in _named_parameters(models):
                node = gradient_node(parameter)
                if node is not None:
                    self._names[id(parameter)] = name
                    self._handles.append(node.register_prehook(functools.partial(self._arrived, id(parameter))))
                    self._nodes.append(node)
        if outputs:
            self._roots = {id(inner_model(model)) for _, model in models}
            self._seen: set[tuple[int, int, int]] = set()
            self._handles.append(register_module_forward_hook(self._returned))

    def stop(self) -> None:
        self._over = True
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes = [], []

    def looked(self) -> _Looked:
        with_outputs = bool(self._outputs)
        with unseen():
            flags = _Flags([*self.extremes.values(), *([self._outputs] if with_outputs else [])])
        names = [self._names[one] for one in self.extremes]
        return _Looked("arriving", names, list(self.extremes), flags, with_outputs)

    def _returned(self, module: nn.Module, args: Any, output: Any) -> None:
        if id(module) not in self._roots or self._over or not torch.is_grad_enabled():
            return
        for tensor in (output,) if isinstance(output, Tensor) else pytree.tree_leaves(output):
            node = tensor.grad_fn if isinstance(tensor, Tensor) and tensor.is_floating_point() else None
            if node is None:
                continue
            key = (threading.get_ident(), node._sequence_nr(), tensor.output_nr)
            if key not in self._seen:  # the model may be within another of the models
                self._seen.add(key)
                self._handles.append(node.register_prehook(functools.partial(self._output_arrived, tensor.output_nr)))

    def _output_arrived(self, at: int, gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[at]
        if gradient is None or self._over:
            return
        try:
            with unseen():
                self._outputs.extend(_extremes_of(gradient))
        except Exception:  # as below
            return

    def _arrived(self, one: int, gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[0]
        if gradient is None or self._over:
            return
        try:
            with unseen():
                extremes = _extremes_of(gradient)
        except Exception:  # a foreign tensor may do anything; it is not looked at then
            return
        self.order.setdefault(one, len(self.order))
        self.extremes.setdefault(one, []).extend(extremes)


@dataclasses.dataclass(slots=True)
class _Arriving:
    step: int
    looked: _Looked | None
    order: tuple[int, dict[int, int]] | None
    skipped: bool | None
    loss_known: bool
    values: Readback

    def ready(self) -> bool:
        return self.values.ready() and (self.looked is None or self.looked.flags.ready())

    def was_skipped(self) -> bool:
        return self.skipped if self.skipped is not None else self.values.values()[2] > 0

    def note(self, looked: _Looked) -> SkipNote:
        scale, loss, _ = self.values.values()
        flags = looked.flags.values()
        ranks = {} if self.order is None else self.order[1]
        count = len(looked.names)
        # what was not seen then comes last, from the end of the model on
        places = sorted(range(count), key=lambda at: (ranks.get(looked.ids[at], len(ranks)), -at))
        found = [looked.names[at] for at in places if flags[at] != _FINITE]
        return SkipNote(
            step=self.step,
            scale=scale,
            loss_finite=math.isfinite(loss) if self.loss_known else None,
            parameters=tuple(found[:NAMES_KEPT]),
            nonfinite=len(found),
            of=count,
            with_nan=flags[:count].count(_NAN),
            seen=looked.seen,
            order_of=None if self.order is None else self.order[0],
            output=_FOUND[flags[count]] if looked.output else None,
        )
