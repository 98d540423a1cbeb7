"""What a step would need on a GPU, from a machine that has none: under CUDA's autocast and in the blocks of its allocator."""

from __future__ import annotations

import contextlib
import dataclasses
import html
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from amp_widgets.analysis.cuda_operators import cuda_operators
from amp_widgets.analysis.cuda_policy import cuda_policy
from amp_widgets.analysis.fake_step import NOT_COUNTED, FakeSteps, PredictedStep, fake_steps
from amp_widgets.analysis.held_interrupt import interrupts_held, interrupts_noted
from amp_widgets.analysis.trial import check_idle, check_not_compiled
from amp_widgets.core.loop import LiveLoop
from amp_widgets.core.memory.caching_allocator import replay_training
from amp_widgets.core.memory.lives import BUFFER, GRADIENT, OPTIMIZER, PARAMETER
from amp_widgets.core.memory.profile import memory_text
from amp_widgets.core.memory.step_mode import operator_name
from amp_widgets.core.memory.step_record import StepRecord
from amp_widgets.core.settings import AutocastName, describe_settings
from amp_widgets.core.table import table_html, table_text, told
from amp_widgets.errors import RunError
from amp_widgets.language import in_language, marked, marked_all, say

LABEL = marked("predicted for CUDA, not measured")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CudaPrediction:
    """The memory of a training step on CUDA, as far as it can be known without one.

    Attributes
    ----------
    tensor_peak_bytes
        The most that the step's tensors come to at one time.
    allocated_peak_bytes
        The same in the allocator's blocks: to be compared with ``torch.cuda.max_memory_allocated``.
    reserved_peak_bytes
        What the allocator has taken of the device: to be compared with ``torch.cuda.max_memory_reserved``.
    autocast, checkpointed, batch_size
        With which format, checkpointed layers and first dimension of the batch; None where it has none.
    settings
        The same in a few words; of one of several the name of its set, as in ``"bf16/all"``.
    label
        How these numbers were obtained.
    left_out
        What is not in them: sentences.
    """

    tensor_peak_bytes: int
    allocated_peak_bytes: int
    reserved_peak_bytes: int
    autocast: AutocastName
    checkpointed: tuple[str, ...]
    batch_size: int | None
    settings: str
    label: str = LABEL
    left_out: tuple[str, ...] = ()

    def __str__(self) -> str:
        return CudaPredictions([self]).to_text()

    def _repr_html_(self) -> str:
        return CudaPredictions([self])._repr_html_()


class CudaPredictions(Sequence[CudaPrediction]):
    """Several of them, which show themselves as one table.

    Parameters
    ----------
    predictions
        At least one.
    """

    def __init__(self, predictions: Iterable[CudaPrediction]) -> None:
        self._predictions = tuple(predictions)

    def __getitem__(self, index: Any) -> Any:
        return CudaPredictions(self._predictions[index]) if isinstance(index, slice) else self._predictions[index]

    def __len__(self) -> int:
        return len(self._predictions)

    @property
    def left_out(self) -> tuple[str, ...]:
        """What is not in the numbers of any of them, each sentence once."""
        return tuple(dict.fromkeys(sentence for prediction in self for sentence in prediction.left_out))

    def to_rows(self) -> list[list[str]]:
        """Cells of a table, not escaped; the first row is its headings."""
        rows = [
            [
                prediction.settings,
                str(len(prediction.checkpointed)),
                "" if prediction.batch_size is None else str(prediction.batch_size),
                memory_text(prediction.tensor_peak_bytes),
                memory_text(prediction.allocated_peak_bytes),
                memory_text(prediction.reserved_peak_bytes),
            ]
            for prediction in self
        ]
        return [list(_HEADINGS), *rows]

    def to_text(self) -> str:
        """The table for a terminal, with what is left out below it."""
        left_out = (f"- {in_language(each)}" for each in self.left_out)
        return "\n".join([in_language(LABEL), *table_text(self._told_rows(), words=_WORDS), say("Left out:"), *left_out])

    def __repr__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        items = "".join(f"<li>{html.escape(in_language(each))}</li>" for each in self.left_out)
        table = table_html(self._told_rows(), words=_WORDS)
        label, left_out = html.escape(in_language(LABEL)), html.escape(say("Left out:"))
        return f"<div><b>{label}</b>{table}<div>{left_out}<ul>{items}</ul></div></div>"

    def _told_rows(self) -> list[list[str]]:
        return told(self.to_rows(), sentences=(0,))


@interrupts_noted()
def predict_on_cuda(
    loop: LiveLoop,
    batch: tuple[Any, Any],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    *,
    autocast: AutocastName | None = None,
    checkpointed: Iterable[str] | None = None,
    batch_size: int | None = None,
) -> CudaPrediction:
    """The memory that a training step would need on a GPU; see `CudaSteps`.

    Parameters
    ----------
    loop, batch, loss_fn
        As in `cuda_steps`.
    autocast, checkpointed, batch_size
        As in `CudaSteps.step`.
    """
    with cuda_steps(loop, batch, loss_fn) as steps:
        return steps.step(autocast=autocast, checkpointed=checkpointed, batch_size=batch_size)


@contextlib.contextmanager
def cuda_steps(
    loop: LiveLoop, batch: tuple[Any, Any], loss_fn: Callable[[Any, Any], torch.Tensor], *, verb: str = "predict_on_cuda"
) -> Iterator[CudaSteps]:
    """Predict steps on CUDA of one model on one batch, for several settings.

    Parameters
    ----------
    loop
        Whose model, optimizers and settings; no step of its own may be in progress.
    batch
        ``(inputs, targets)``.
    loss_fn
        ``loss_fn(model(inputs), targets)``.
    verb
        What is being done, for messages.

    Raises
    ------
    RunError
        When torch has a GPU, so that it can be measured; when the model is not on the CPU; and as `fake_steps` does.
    """
    if torch.cuda.is_available():
        raise RunError(
            f"{verb}: torch has a GPU here, so measure instead: with the model on it, session.profile_step(batch, loss_fn) reads "
            "its allocator"
        )
    if loop.device.type != "cpu":
        raise RunError(f"{verb}: got a model on {loop.device}, expected one on the CPU, from which CUDA is predicted")
    check_idle(loop, verb)
    check_not_compiled(loop, loss_fn, verb, NOT_COUNTED)
    with fake_steps(loop, batch, loss_fn, verb=verb, measures=False, prepare=_as_on_cuda) as steps:
        yield CudaSteps(steps)


class CudaSteps:
    """Predicts steps on CUDA on fake tensors on the CPU; see `cuda_steps`.

    What is known of CUDA is taken into account: which operators its autocast casts, and to what; that its dropout, attention
    and softmax make other tensors; that its optimizers take kernels for many tensors at once by default; and the blocks and
    segments of torch's allocator, from the beginning of training on. The rest is named in `CudaPrediction.left_out`.
    """

    def __init__(self, steps: FakeSteps) -> None:
        self._steps = steps

    @property
    def batch_size(self) -> int | None:
        """Of the batch that was given; None where nothing in it has a dimension."""
        return self._steps.batch_size

    def step(
        self,
        *,
        autocast: AutocastName | None = None,
        checkpointed: Iterable[str] | None = None,
        batch_size: int | None = None,
    ) -> CudaPrediction:
        """One step of training that is under way.

        Parameters
        ----------
        autocast
            The format; None for the one in force.
        checkpointed
            Names of layers, globs, or a plan; exactly these are on. None for those in force.
        batch_size
            The first dimension of every tensor in the batch that is as long there as the batch; None for the batch as it is.

        Raises
        ------
        SettingsError
            When the settings cannot be in force, or the batch size is none.
        RunError
            When the step does not run on fake tensors, or would not run on CUDA; the message says why.
        """
        with interrupts_held(), cuda_policy(), cuda_operators():
            predicted = self._steps.step(autocast=autocast, checkpointed=checkpointed, batch_size=batch_size)
        return _prediction(predicted)


def _prediction(predicted: PredictedStep) -> CudaPrediction:
    complete = predicted.complete
    assert complete is not None  # nothing was measured
    peaks = replay_training(complete.record, counted=_on_device(complete.record))
    return CudaPrediction(
        tensor_peak_bytes=peaks.tensor_bytes,
        allocated_peak_bytes=peaks.allocated_bytes,
        reserved_peak_bytes=peaks.reserved_bytes,
        autocast=predicted.settings.autocast,
        checkpointed=tuple(predicted.settings.checkpointed),
        batch_size=predicted.batch_size,
        settings=describe_settings(predicted.settings),
        left_out=_left_out(complete.record),
    )


def _as_on_cuda(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Optimizers choose by the device whether they take the kernels for many tensors; as in ``torch/optim/optimizer.py``."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        if group.get("foreach", False) is None and group.get("fused") is None and not group.get("differentiable"):
            learning_rate_on_device = isinstance(group.get("lr"), torch.Tensor) and not group.get("capturable")
            group["foreach"] = not learning_rate_on_device


def _on_device(record: StepRecord) -> npt.NDArray[np.bool_]:
    """Which of a record's storages lie on the device: not the counters of steps, nor the state of the CPU's random numbers."""
    _, _, size, kind, _ = record.lives_at_end()
    counters = (kind == OPTIMIZER) & (size <= _COUNTER_BYTES)
    random_states = (size == torch.get_rng_state().numel()) & ~np.isin(kind, (PARAMETER, BUFFER, GRADIENT, OPTIMIZER))
    on_device: npt.NDArray[np.bool_] = ~(counters | random_states)
    return on_device


def _left_out(record: StepRecord) -> tuple[str, ...]:
    operators = {operator_name(point[3]) for point in record.points if point[3] is not None}
    found = [
        "the workspace of cuBLAS, which comes from the same allocator: about 8.1 MiB on most GPUs, 32 MiB on Hopper, "
        "for each stream that multiplies matrices",
    ]
    if any("convolution" in name for name in operators):
        found.append("the workspaces of cuDNN's convolutions, which can be as large as a layer's output, within the operator")
    if any("attention" in name for name in operators):
        found.append(
            "the scratch of attention's backward pass; attention itself is taken to run in a fused kernel, as from Ampere on, "
            "and not to hold the matrix of all pairs"
        )
    if _RECURRENT & {*record.facts.types, record.facts.model_type}:
        found.append(
            "how cuDNN keeps recurrent layers: their weights and reserve space are laid out in another way; what they keep is "
            "taken to be what torch's own formulas keep of each time step"
        )
    found += [
        "what operators allocate for themselves while they run, and give back",
        "the CUDA context and the code of its libraries: some hundred MB of the device, which torch does not count",
        "fragmentation beyond this replay, which repeats the same step from the beginning of training on one stream, with the "
        "default settings of PYTORCH_CUDA_ALLOC_CONF: other batch sizes, evaluation and several streams add to it",
        "optimizers that were not told which kernels to use are taken to use those for many tensors (foreach), the default on "
        "CUDA; fused=True needs less",
    ]
    return tuple(found)


_RECURRENT = {"LSTM", "GRU", "RNN"}
_HEADINGS = marked_all("settings", "layers", "batch", "tensors", "allocated", "reserved")
_WORDS = (0,)
_COUNTER_BYTES = 8
