"""The memory of one step on a batch of its own: model, optimizers and random states are as before afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from amp_widgets.analysis.held_interrupt import interrupts_noted
from amp_widgets.analysis.profiled_step import ProfiledStep
from amp_widgets.analysis.real_step import real_step
from amp_widgets.analysis.trial import (
    check_batch,
    check_hooks,
    check_idle,
    check_loss_fn,
    check_one_model,
    kind_of,
)
from amp_widgets.core.loop import LiveLoop
from amp_widgets.core.memory.profile import StepProfile, memory_text
from amp_widgets.errors import RunError


@interrupts_noted()
def profile_step(
    loop: LiveLoop, batch: tuple[Any, Any], loss_fn: Callable[[Any, Any], torch.Tensor], *, label: str | None = None
) -> ProfiledStep:
    """Train one step with the settings in force, profile its memory, and take it back, as `Snapshot` does.

    An optimizer that has no state yet, as before its first step, gets one in a step before that is not profiled, and so does a
    layer that is not checkpointed yet in the run. One whose
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
    model = check_idle(loop, verb)
    if not loop.optimizers:
        raise RunError(f"{verb}: the session has no optimizer, expected aw.AmpSession(model, optimizer)")
    if label is not None and not isinstance(label, str):
        raise RunError(f"{verb}: got {kind_of(label)} as the label, expected a text, or None for the settings in force")
    pair = check_batch(batch, verb)
    check_loss_fn(loss_fn, verb)
    check_one_model(model, verb)
    check_hooks(model, verb)
    profile, _ = real_step(loop, model, pair, loss_fn, loop.settings, label=label, verb=verb)
    return ProfiledStep.of(_with_note_of_budget(profile, loop.memory_budget))


def _with_note_of_budget(profile: StepProfile, budget: float | None) -> StepProfile:
    if budget is None or profile.peak_bytes <= budget:
        return profile
    note = (
        f"the peak of {memory_text(profile.peak_bytes)} is above the session's memory_budget of {memory_text(budget)}, which is "
        "not enforced here: in a step of the run, memory would run out"
    )
    return dataclasses.replace(profile, notes=(*profile.notes, note))
