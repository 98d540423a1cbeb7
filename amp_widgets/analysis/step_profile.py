"""The memory of one step on a batch of its own: model, optimizers and random states are as before afterwards."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch

from amp_widgets.analysis.profiled_step import ProfiledStep
from amp_widgets.analysis.snapshot import Snapshot
from amp_widgets.analysis.trial import (
    check_batch,
    check_hooks,
    check_idle,
    check_loss,
    check_loss_fn,
    check_one_model,
    copy_of_batch,
    kind_of,
    region,
)
from amp_widgets.core.loop import LiveLoop
from amp_widgets.core.memory.meter import meter_for
from amp_widgets.core.memory.profile import StepProfile, memory_text
from amp_widgets.core.settings import describe_settings
from amp_widgets.errors import RunError


def profile_step(
    loop: LiveLoop, batch: tuple[Any, Any], loss_fn: Callable[[Any, Any], torch.Tensor], *, label: str | None = None
) -> ProfiledStep:
    """Train one step with the settings in force, profile its memory, and take it back, as `Snapshot` does.

    An optimizer that has no state yet, as before its first step, gets one in a step before that is not profiled. One whose
    ``step`` cannot be without a closure, such as LBFGS, gets a closure that runs both passes. The session's memory budget is
    not enforced; when the peak is above it, a note says so.

    Parameters
    ----------
    loop
        Whose model, optimizers and settings; no step of its own may be in progress.
    batch
        ``(inputs, targets)``; copies on the model's device are used.
    loss_fn
        ``loss_fn(model(inputs), targets)``.
    label
        Of the profile, for people; what is in force without it.

    Raises
    ------
    RunError
        When the session has no optimizer or several models, a step is in progress, the batch is no pair, the loss is none that
        a backward pass can begin from, or the step cannot be profiled.
    """
    verb = "profile_step"
    optimizers, settings = loop.optimizers, loop.settings
    model = check_idle(loop, verb)
    if not optimizers:
        raise RunError(f"{verb}: the session has no optimizer, expected aw.AmpSession(model, optimizer)")
    if label is not None and not isinstance(label, str):
        raise RunError(f"{verb}: got {kind_of(label)} as the label, expected a text, or None for the settings in force")
    pair = check_batch(batch, verb)
    check_loss_fn(loss_fn, verb)
    check_one_model(model, verb)
    check_hooks(model, verb)
    with_closure = [optimizer for optimizer in optimizers if _needs_closure(optimizer)]
    if with_closure and settings.scales_loss:
        raise RunError(
            f"{verb}: {type(with_closure[0]).__name__} needs a closure, which torch's GradScaler does not support, and the "
            "settings in force scale the loss; train with session.request(scaling=False), or in bf16"
        )
    device = loop.device

    def passes(scaler: torch.amp.GradScaler, inputs: Any, targets: Any) -> torch.Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        with region(settings.autocast, device.type):
            loss = check_loss(loss_fn(model(inputs), targets))
        scaler.scale(loss).backward()
        return loss

    def step(inputs: Any, targets: Any) -> None:
        scaler = torch.amp.GradScaler(device.type, init_scale=settings.start_scale, enabled=settings.scales_loss)
        scaler.scale(torch.zeros((), device=device))  # makes its tensors, which the run's scaler has all along
        # the loss is alive to the end, as in most loops
        loss = passes(scaler, inputs, targets) if len(with_closure) < len(optimizers) else None
        for optimizer in optimizers:
            if optimizer in with_closure:
                optimizer.step(lambda: passes(scaler, inputs, targets))  # type: ignore[arg-type, return-value]
            else:
                scaler.step(optimizer)
        scaler.update()
        del loss

    with loop.set_aside(), Snapshot(model, optimizers, loss_fn=loss_fn) as snapshot, region("fp32", device.type):
        if not all(optimizer.state for optimizer in optimizers):
            step(*copy_of_batch(pair, device))
        else:
            snapshot.renew_gradients()
        inputs, targets = copy_of_batch(pair, device)
        meter = meter_for(model, optimizers)
        try:
            meter.profile_next(label or describe_settings(settings))
            meter.begin()
            step(inputs, targets)
            meter.end()
            profile = meter.take_profile()
            because = meter.unprofiled_because or meter.unmeasured_because or meter.source
        finally:
            meter.close()
    if profile is None:
        raise RunError(f"{verb}: the step could not be profiled: {because}")
    return ProfiledStep.of(_with_note_of_budget(profile, loop.memory_budget))


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its ``step`` cannot be called without one."""
    try:
        parameters = list(inspect.signature(optimizer.step).parameters.values())
    except (TypeError, ValueError):
        return False
    return any(each.name == "closure" and each.default is inspect.Parameter.empty for each in parameters)


def _with_note_of_budget(profile: StepProfile, budget: float | None) -> StepProfile:
    if budget is None or profile.peak_bytes <= budget:
        return profile
    note = (
        f"the peak of {memory_text(profile.peak_bytes)} is above the session's memory_budget of {memory_text(budget)}, which is "
        "not enforced here: in a step of the run, memory would run out"
    )
    return dataclasses.replace(profile, notes=(*profile.notes, note))
