"""What the views of a session show of it: one snapshot, and the sentences worth knowing."""

from __future__ import annotations

import functools
import math

import torch

from amp_widgets.background_run import BackgroundRun
from amp_widgets.core.loop import LiveLoop
from amp_widgets.core.settings import describe_changes
from amp_widgets.on_demand import OnDemand
from amp_widgets.widgets.state import DashboardState


def dashboard_state(
    loop: LiveLoop, background: BackgroundRun, on_demand: OnDemand, *, recording_notice: str | None
) -> DashboardState:
    """A snapshot; never waits for the device. `recording_notice` is what is wrong with the file that is written, or None."""
    status = loop.status()
    pending = loop.pending
    samples = background.samples
    return DashboardState(
        settings=loop.settings,
        pending=None if pending is None else pending.changes,
        layers=loop.layers_seen,
        support=loop.support,
        run=background.state,
        in_cell=loop.in_cell,
        step=status.step,
        device=device_name(loop.device),
        torch_version=torch.__version__,
        scale=status.scale,
        last_rejection=status.last_rejection,
        error=background.error_text,
        step_s=status.step_s,
        steps_per_s=status.steps_per_s,
        samples_per_s=samples * status.steps_per_s if samples else math.nan,
        loss=status.loss,
        skipped_steps=status.skipped_steps,
        memory_source=loop.memory_source,
        allocated_bytes=status.allocated_bytes,
        peak_bytes=status.peak_bytes,
        overall_peak_bytes=status.overall_peak_bytes,
        notes=_notes(loop, background, on_demand, recording_notice),
    )


@functools.cache
def device_name(device: torch.device) -> str:
    """For people, such as ``"cuda:0 (NVIDIA H200)"``."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return str(device)


def _notes(loop: LiveLoop, background: BackgroundRun, on_demand: OnDemand, recording_notice: str | None) -> tuple[str, ...]:
    notes = []
    if loop.closed:
        notes.append(f"This session is closed and no longer controls the model: {loop.go_on} to have it live.")
    if loop.compiled:
        notes.append(
            "The model is compiled: changing checkpointed layers or autocast compiles it anew at the next step, and live "
            "tensor bytes on a CPU are not counted."
        )
    gap = loop.memory_gap
    if gap is not None:
        notes.append(f"The memory of the last step was not measured: {gap}.")
    if loop.budget_gap is not None:
        notes.append(loop.budget_gap)
    if recording_notice is not None:
        notes.append(recording_notice)
    if background.pump is not None and background.pump.why_not:
        notes.append(background.pump.why_not)
    if on_demand.comparisons.status.progress is not None:
        notes.append("Settings are being compared (see Compare): training waits for that.")
    if on_demand.inspections.busy and background.state == "running":
        notes.append("Steps are being predicted (see Plan): training waits for that.")
    notes += [f"From step {request.at_step} on: {describe_changes(request.changes)}." for request in loop.scheduled]
    notes += [said for remark in tuple(loop.remarks) if (said := remark())]
    return tuple(notes)
