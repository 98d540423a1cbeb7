"""One training step of a model on a batch: what is profiled, predicted and confirmed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from amp_widgets.analysis.trial import check_loss, region
from amp_widgets.core.batch_tree import batch_leaves
from amp_widgets.core.model_call import call_model
from amp_widgets.core.settings import Settings
from amp_widgets.errors import RunError


class TrainingStep:
    """``zero_grad``, a forward pass in autocast, a scaled backward pass, the optimizers' step and the scaler's ``update``.

    An optimizer whose ``step`` cannot be without a closure, such as LBFGS, gets one that runs both passes.

    Parameters
    ----------
    model, optimizers
        Whose.
    loss_fn
        ``loss_fn(model(inputs), targets)``; several inputs are given as `amp_widgets.core.model_call.call_model` says.
    settings
        What of them concerns autocast and loss scale is in force; the checkpointed layers are as they are.
    device_type
        Of the model.
    scaler
        For all steps; else each has a ``GradScaler`` of its own, made for the settings.
    keeps_gradients
        Whether gradients are added to those of the step before, as with gradient accumulation and ``set_to_none=False``.
    verb
        What is being done, for messages.

    Raises
    ------
    RunError
        When the settings scale the loss, and an optimizer needs a closure.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        loss_fn: Callable[[Any, Any], torch.Tensor],
        settings: Settings,
        device_type: str,
        *,
        scaler: torch.amp.GradScaler | None = None,
        keeps_gradients: bool = False,
        verb: str,
    ) -> None:
        self._model = model
        self._optimizers = tuple(optimizers)
        self._loss_fn = loss_fn
        self._settings = settings
        self._device_type = device_type
        self._keeps_gradients = keeps_gradients
        self._with_closure = [optimizer for optimizer in optimizers if needs_closure(optimizer)]
        if self._with_closure and settings.scales_loss:
            raise RunError(
                f"{verb}: {type(self._with_closure[0]).__name__} needs a closure, which torch's GradScaler does not support, and "
                "the settings in force scale the loss; train with session.request(scaling=False), or in bf16"
            )
        self._given = scaler
        self._scaler = self._new_scaler() if scaler is None else _ready(scaler, device_type)

    def run(self, inputs: Any, targets: Any) -> None:
        """Train on one batch, which the model may overwrite.

        Raises
        ------
        RunError
            When the loss is none that a backward pass can begin from.
        """
        if self._given is None:
            self._scaler = self._new_scaler()  # within the step, so that its tensors count as those of the run's scaler do
        for leaf in batch_leaves((inputs, targets)):
            if isinstance(leaf, torch.Tensor):
                leaf.detach()  # so that it is seen, and counted, from the beginning, as in a run that has had the batch before
        loss = None  # alive to the end, as in most loops
        if len(self._with_closure) < len(self._optimizers):
            loss = self._passes(inputs, targets)
        for optimizer in self._optimizers:
            if optimizer in self._with_closure:
                optimizer.step(lambda: self._passes(inputs, targets))  # type: ignore[arg-type, return-value]
            else:
                self._scaler.step(optimizer)
        self._scaler.update()
        del loss

    def _new_scaler(self) -> torch.amp.GradScaler:
        settings = self._settings
        scaler = torch.amp.GradScaler(self._device_type, init_scale=settings.start_scale, enabled=settings.scales_loss)
        return _ready(scaler, self._device_type)

    def _passes(self, inputs: Any, targets: Any) -> torch.Tensor:
        for optimizer in () if self._keeps_gradients else self._optimizers:
            optimizer.zero_grad()
        with region(self._settings.autocast, self._device_type):
            loss = check_loss(self._loss_fn(call_model(self._model, inputs), targets))
        self._scaler.scale(loss).backward()
        return loss


def _ready(scaler: torch.amp.GradScaler, device_type: str) -> torch.amp.GradScaler:
    """With its tensors, which are there in training that is under way."""
    if scaler.is_enabled():
        scaler.scale(torch.zeros((), device=device_type))
    return scaler


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its ``step`` cannot be called without one."""
    try:
        parameters = list(inspect.signature(optimizer.step).parameters.values())
    except (TypeError, ValueError):
        return False
    return any(each.name == "closure" and each.default is inspect.Parameter.empty for each in parameters)
