"""The memory of one step on a batch of its own: model, optimizers and random states are as before afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from amp_widgets.analysis.profiled_step import ProfiledStep
from amp_widgets.analysis.snapshot import Snapshot
from amp_widgets.core.autocast import autocast_context
from amp_widgets.core.loop import LiveLoop
from amp_widgets.core.memory import meter_for
from amp_widgets.core.settings import describe_settings
from amp_widgets.errors import RunError


def profile_step(
    loop: LiveLoop, batch: tuple[Any, Any], loss_fn: Callable[[Any, Any], torch.Tensor], *, label: str | None = None
) -> ProfiledStep:
    """Train one step with the settings in force, profile its memory, and take it back.

    An optimizer that has no state yet, as before its first step, gets one in a step before that is not profiled.

    Parameters
    ----------
    loop
        Whose model, optimizers and settings; no step of its own may be in progress.
    batch
        ``(inputs, targets)``; moved to the model's device.
    loss_fn
        ``loss_fn(model(inputs), targets)``.
    label
        Of the profile, for people; what is in force without it.

    Raises
    ------
    RunError
        When the session has no optimizer, a step is in progress, or the step cannot be profiled.
    """
    model, optimizers, settings = loop.model, loop.optimizers, loop.settings
    if model is None or not optimizers:
        raise RunError("profile_step: the session has no model and optimizer, expected AmpSession(model, optimizer), not closed")
    if loop.step_in_progress:
        raise RunError("profile_step: a step is in progress; call it between steps, or pause the run first")
    inputs, targets = pytree.tree_map(lambda x: x.to(loop.device) if isinstance(x, torch.Tensor) else x, tuple(batch))
    scaler = torch.amp.GradScaler(loop.device.type, init_scale=settings.start_scale, enabled=settings.scales_loss)

    def step() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        with autocast_context(settings.autocast, loop.device.type):
            loss = loss_fn(model(inputs), targets)
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()

    with loop.set_aside(), Snapshot(model, optimizers):
        if not all(optimizer.state for optimizer in optimizers):
            step()
        meter = meter_for(model, optimizers)
        try:
            meter.profile_next(label or describe_settings(settings))
            meter.begin()
            step()
            meter.end()
            profile = meter.take_profile()
            because = meter.unprofiled_because or meter.unmeasured_because or meter.source
        finally:
            meter.close()
    if profile is None:
        raise RunError(f"profile_step: the step could not be profiled: {because}")
    return ProfiledStep.of(profile)
