"""Single weights of a live model with their gradients, to be looked at by hand."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from amp_widgets.core.loop import LiveLoop

MOST_WEIGHTS = 40
DEFAULT_RATE = 0.01
"""Assumed where no optimizer has the weight."""
PATIENCE_S = 2.0
"""So long a step in progress is waited for."""


class WeightSample(NamedTuple):
    """One weight between two steps.

    Attributes
    ----------
    label
        Such as ``"layers.0.mlp.weight[3, 17]"``.
    weight, gradient
        The gradient is that of the last step, without the loss scale.
    rate
        The learning rate; `DEFAULT_RATE` where there is no optimizer.
    optimizer
        Whose step is not ``rate * gradient``, by name, such as ``"SGD with momentum"``; empty for plain SGD; None where there is
        none.
    change
        By how much the last step has changed the weight; None where that was not seen.
    step
        Steps completed when it was read.
    """

    label: str
    weight: float
    gradient: float
    rate: float
    optimizer: str | None
    change: float | None
    step: int


class WeightReader:
    """Of each parameter one weight, the one whose gradient was in the middle by size when the parameter was first read.

    Parameters
    ----------
    loop
        Whose model's weights are read.
    between_steps
        Calls what it is given when no step is in progress, on whatever thread that can be said.
    """

    def __init__(self, loop: LiveLoop, between_steps: Callable[[Callable[[], None]], None]) -> None:
        self._loop = loop
        self._between_steps = between_steps
        self._places: dict[str, tuple[torch.Size, int]] = {}
        self._seen: dict[str, tuple[int, float]] = {}  # label → step and weight, of the newest reading
        self._newest: tuple[WeightSample, ...] = ()

    def __call__(self) -> tuple[WeightSample, ...]:
        """The weights as they are between two steps. It waits for the device, and up to `PATIENCE_S` for a step to end.

        Returns
        -------
        tuple of WeightSample
            At most `MOST_WEIGHTS`, in the model's order. Where there are no gradients now, as after ``zero_grad``, or no step
            has ended in time, those of the reading before, whose `step` says so; without one, none.
        """
        caller = threading.get_ident()
        boundaries = self._loop.on_boundary
        read, read_later = threading.Event(), threading.Event()
        raised: list[Exception] = []

        def look(done: threading.Event) -> None:
            try:
                self._read_now()
                unknown = any(one.optimizer and one.change is None for one in self._newest)
                if done is read and unknown and threading.get_ident() != caller:
                    boundaries.append(a_step_later)  # of two readings one step apart the change is known
            except Exception as error:  # it is no matter of the training
                raised.append(error)
            finally:
                done.set()

        def a_step_later() -> None:
            boundaries.remove(a_step_later)
            look(read_later)

        self._between_steps(lambda: look(read))
        if read.wait(PATIENCE_S) and a_step_later in boundaries:
            read_later.wait(self._about_a_step_s())
            with contextlib.suppress(ValueError):  # it has come meanwhile
                boundaries.remove(a_step_later)
        if raised:
            raise raised[0]
        return self._newest

    def _about_a_step_s(self) -> float:
        """A run that has paused is not waited for long."""
        step_s = self._loop.status().step_s
        return min(PATIENCE_S, _A_MOMENT_S + (0.0 if math.isnan(step_s) else _STEPS * step_s))

    def _read_now(self) -> None:
        loop, model = self._loop, self._loop.model
        if model is None or (loop.step_in_progress and loop.scaler.is_enabled()):
            return  # nobody can say whether the gradients of a step that was left half done are scaled
        groups = {
            id(parameter): (optimizer, group)
            for optimizer in loop.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        scale = _scale_left(loop)
        samples: list[WeightSample] = []
        for name, parameter in nn.Module.named_parameters(model):
            if len(samples) == MOST_WEIGHTS:
                break
            at = self._place(name, parameter)
            if at is None or parameter.grad is None:
                continue
            optimizer, group = groups.get(id(parameter), (None, {}))
            weight = float(parameter.detach().flatten()[at])
            gradient = float(parameter.grad.detach().flatten()[at])
            if getattr(optimizer, "_step_supports_amp_scaling", False):
                gradient /= scale
            label = f"{name}{_indices(parameter.shape, at)}"
            samples.append(
                WeightSample(
                    label=label,
                    weight=weight,
                    gradient=gradient,
                    rate=float(group.get("lr", DEFAULT_RATE)),
                    optimizer=None if optimizer is None else _rule(optimizer, group),
                    change=self._change(label, weight, loop.step),
                    step=loop.step,
                )
            )
        if samples:
            self._newest = tuple(samples)
            self._seen = {sample.label: (sample.step, sample.weight) for sample in samples}

    def _place(self, name: str, parameter: nn.Parameter) -> int | None:
        """The same of a parameter as long as it has the same shape."""
        known = self._places.get(name)
        if known is not None and known[0] == parameter.shape:
            return known[1]
        at = _middle(parameter)
        if at is not None:
            self._places[name] = (parameter.shape, at)
        return at

    def _change(self, label: str, weight: float, step: int) -> float | None:
        if label not in self._seen:
            return None
        before, old = self._seen[label]
        if before == step - 1:
            return weight - old
        same = next((one for one in self._newest if one.label == label), None)
        return same.change if same is not None and same.step == step and same.weight == weight else None


_A_MOMENT_S = 0.1
_STEPS = 2


def _scale_left(loop: LiveLoop) -> float:
    """By what gradients are still multiplied after a skipped step, where the optimizer itself unscales as it steps."""
    history = loop.history
    if not len(history) or history.last("skipped") != 1:
        return 1.0
    return history.last("scale")


def _rule(optimizer: torch.optim.Optimizer, group: dict[str, object]) -> str:
    """By what name an optimizer is told from plain SGD; nothing for that."""
    if type(optimizer) is not torch.optim.SGD:
        return type(optimizer).__name__
    more = [option.replace("_", " ") for option in ("momentum", "weight_decay", "maximize") if group.get(option)]
    return f"SGD with {' and '.join(more)}" if more else ""


def _middle(parameter: nn.Parameter) -> int | None:
    gradient = parameter.grad
    if gradient is None or gradient.is_sparse or not gradient.numel() or not gradient.is_floating_point():
        return None
    flat = gradient.detach().flatten().float()
    finite = torch.where(torch.isfinite(flat) & (flat != 0), flat.abs(), torch.nan)
    if bool(torch.isnan(finite).all()):
        return None
    return int(torch.nanmedian(finite, dim=0).indices)


def _indices(shape: torch.Size, at: int) -> str:
    place = [int(index) for index in torch.unravel_index(torch.tensor(at), shape)]
    return f"[{', '.join(map(str, place))}]" if place else ""
