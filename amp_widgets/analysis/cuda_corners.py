"""What steps with each of several settings would need on a GPU, as one table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from amp_widgets.analysis.comparison import Progress
from amp_widgets.analysis.corners import Grid, LayerChoice, corners_of
from amp_widgets.analysis.held_interrupt import interrupts_noted
from amp_widgets.analysis.on_cuda import CudaPrediction, CudaPredictions, cuda_steps
from amp_widgets.analysis.stoppable import CancelledError
from amp_widgets.analysis.trial import check_idle
from amp_widgets.core.loop import LiveLoop

VERB = "predict_on_cuda"


@interrupts_noted()
def predict_corners_on_cuda(
    loop: LiveLoop,
    batch: tuple[Any, Any],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    *,
    grid: Grid | None = None,
    planned: LayerChoice | None = None,
    batch_size: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> CudaPredictions:
    """Predict a step with each of several settings; see `amp_widgets.analysis.on_cuda.CudaSteps`.

    Parameters
    ----------
    loop, batch, loss_fn
        As in `amp_widgets.analysis.on_cuda.cuda_steps`.
    grid, planned
        Which settings, as in `amp_widgets.analysis.corners.corners_of`. None: every format with every set of layers there is.
    batch_size
        The first dimension of the batch; None for the batch as it is.
    on_progress
        Called before each combination.
    cancelled
        Asked before each; when it says so, what is complete is returned.

    Raises
    ------
    RunError
        As `cuda_steps` does, and when it was cancelled before anything was complete.
    SettingsError
        When the grid, or the batch size, is none.
    """
    check_idle(loop, VERB)
    corners, _ = corners_of(loop, grid, planned)
    found: list[CudaPrediction] = []
    with cuda_steps(loop, batch, loss_fn, verb=VERB) as steps:
        for at, corner in enumerate(corners):
            if cancelled():
                break
            if on_progress is not None:
                told = Progress(done=at, total=len(corners), seconds_left=math.nan, doing=f"predicting {corner.label}")
                on_progress(told)
            one = steps.step(autocast=corner.settings.autocast, checkpointed=corner.settings.checkpointed, batch_size=batch_size)
            found.append(dataclasses.replace(one, settings=corner.label))  # two sets may have as many layers
    if not found:
        raise CancelledError(f"{VERB}: it was cancelled")
    return CudaPredictions(found)
