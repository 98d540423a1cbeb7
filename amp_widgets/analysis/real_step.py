"""One real step with given settings and batch size, its memory followed: model, optimizers and random states are as before."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from amp_widgets.analysis.fake_model import memory_order
from amp_widgets.analysis.held_interrupt import interrupts_noted, raise_lost_interrupt
from amp_widgets.analysis.snapshot import Snapshot
from amp_widgets.analysis.training_step import TrainingStep
from amp_widgets.analysis.trial import copy_of_batch, region
from amp_widgets.analysis.unsupported import unsupported_noted
from amp_widgets.core.batch_tree import batch_leaves, first_dimension, is_batched, map_batch
from amp_widgets.core.checkpointing import Checkpointing
from amp_widgets.core.fp32_layers import Fp32Layers
from amp_widgets.core.loop import LiveLoop
from amp_widgets.core.memory.cpu import CpuMeter
from amp_widgets.core.memory.meter import meter_for
from amp_widgets.core.memory.profile import StepProfile
from amp_widgets.core.memory.reading import MemoryMeter
from amp_widgets.core.memory.whole_step import CompleteStep
from amp_widgets.core.settings import Settings, describe_settings
from amp_widgets.errors import RunError


@interrupts_noted()
def real_step(
    loop: LiveLoop,
    model: nn.Module,
    batch: tuple[Any, Any],
    loss_fn: Callable[[Any, Any], Tensor],
    settings: Settings,
    *,
    batch_size: int | None = None,
    limit_bytes: float = math.inf,
    label: str | None = None,
    keeps_gradients: bool = False,
    verb: str,
) -> tuple[StepProfile, CompleteStep | None]:
    """Train one step, follow its memory, and take it back.

    Where an optimizer has no state yet, a layer is checkpointed that is not so in the run, or gradients are kept, one step that
    does not count comes before.

    Parameters
    ----------
    loop, model, batch, loss_fn
        Checked.
    settings
        For this step; those in force are so again afterwards.
    batch_size
        Rows of the batch, which are repeated where there are fewer; None for the batch as it is.
    limit_bytes
        An op that goes above it raises `MemoryBudgetError`; on a CPU.
    label
        Of the profile, for people.
    keeps_gradients
        Whether the step adds to the gradients of the one before.
    verb
        What is being done, for messages.

    Returns
    -------
    StepProfile
        What was measured.
    CompleteStep or None
        The same for estimates, on a CPU where it was followed op by op.

    Raises
    ------
    RunError
        When the loss is none that a backward pass can begin from, or the step cannot be profiled.
    """
    device, optimizers = loop.device, loop.optimizers
    step = TrainingStep(model, optimizers, loss_fn, settings, device.type, keeps_gradients=keeps_gradients, verb=verb)
    learns = not set(settings.checkpointed) <= set(Checkpointing(model).active)
    with (
        loop.set_aside(),
        switched(model, settings),
        Snapshot(model, optimizers, loss_fn=loss_fn) as snapshot,
        region("fp32", device.type),
        unsupported_noted(settings.autocast),
    ):
        snapshot.renew_gradients()
        if learns or keeps_gradients or not all(optimizer.state for optimizer in optimizers):
            _run(step, *real_batch(batch, device, batch_size), _meter(model, optimizers, limit_bytes))
        inputs, targets = real_batch(batch, device, batch_size)
        meter = _meter(model, optimizers, limit_bytes)
        meter.profile_next(label or describe_settings(settings))
        profile, complete = _run(step, inputs, targets, meter)
        because = meter.unprofiled_because or meter.unmeasured_because or meter.source
    if profile is None:
        raise RunError(f"{verb}: the step could not be profiled: {because}")
    return profile, complete


def real_batch(batch: Any, device: torch.device, size: int | None) -> tuple[Any, Any]:
    """A copy of a batch, with `size` rows: the first ones, or all and then the first ones again."""
    length = first_dimension(batch_leaves(batch))
    if size is None or length is None or size == length:
        return copy_of_batch(batch, device)

    def rows_of(leaf: Any) -> Any:
        if not is_batched(leaf, length):
            return leaf
        rows = np.arange(size) % length
        if isinstance(leaf, np.ndarray):
            return leaf[rows]
        taken = leaf.detach()[torch.from_numpy(rows).to(leaf.device)]
        if leaf.layout == torch.strided:  # in the memory format that the batch is in
            taken = torch.empty_permuted(taken.shape, memory_order(leaf), dtype=leaf.dtype, device=leaf.device).copy_(taken)
        return taken.requires_grad_(leaf.requires_grad)

    with torch.inference_mode(False), torch.no_grad():
        rows = map_batch(rows_of, batch)
    return copy_of_batch(rows, device)


def free_memory_bytes() -> float:
    """What is free on this machine, for new processes; infinite where that is not known."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return 1024.0 * int(line.split()[1])
    except (OSError, ValueError):
        pass
    return math.inf


@contextlib.contextmanager
def switched(model: nn.Module, settings: Settings) -> Iterator[None]:
    """Exactly the layers that the settings name are checkpointed and kept in FP32; afterwards those that were."""
    kinds = [type(module) for module in model.modules()]  # held: that of a checkpointed layer is else made anew
    wanted: list[tuple[Checkpointing | Fp32Layers, Sequence[str]]] = [
        (Checkpointing(model), settings.checkpointed),
        (Fp32Layers(model), settings.fp32_layers),
    ]
    before = [switch.active for switch, _ in wanted]
    try:
        for switch, names in wanted:
            switch.apply(names)
        yield
    finally:
        for (switch, _), names in zip(wanted, before, strict=True):
            switch.apply(names)
        del kinds


def _meter(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], limit_bytes: float) -> MemoryMeter:
    meter = meter_for(model, optimizers)
    if isinstance(meter, CpuMeter):
        meter.keeps_complete = True
        meter.budget_bytes = None if limit_bytes == math.inf else limit_bytes
    return meter


def _run(step: TrainingStep, inputs: Any, targets: Any, meter: MemoryMeter) -> tuple[StepProfile | None, CompleteStep | None]:
    try:
        raise_lost_interrupt()
        meter.begin()
        step.run(inputs, targets)
        meter.end()
        return meter.take_profile(), meter.complete_step if isinstance(meter, CpuMeter) else None
    finally:
        meter.close()
