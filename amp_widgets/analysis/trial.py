"""Forward and backward passes that are only tried: model, optimizers and random states are as before afterwards."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from amp_widgets.analysis.snapshot import Snapshot
from amp_widgets.core.autocast import autocast_context
from amp_widgets.core.checkpointing import Checkpointing
from amp_widgets.core.layers import inner_model
from amp_widgets.core.loop import LiveLoop
from amp_widgets.core.memory.compiled import is_compiled
from amp_widgets.core.models import Together
from amp_widgets.core.settings import AutocastName
from amp_widgets.errors import RunError

LossFunction = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Outcome:
    """What a forward and a backward pass have left.

    Attributes
    ----------
    loss
        On the CPU, not scaled.
    gradients
        Of every parameter by its name, on the CPU, scaled as `scale` says; None where there is none.
    buffers
        By name, on the CPU.
    random_states
        By whose they are: ``torch``, ``cuda:0``, ``numpy``, ``python``.
    scale
        The loss was multiplied by it before the backward pass.
    """

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    random_states: dict[str, Any]
    scale: float


class Trial:
    """One batch for one model, to be run again and again from the same state; made by `trial`."""

    def __init__(
        self, loop: LiveLoop, model: nn.Module, batch: tuple[Any, Any], loss_fn: LossFunction, snapshot: _WholeSnapshot
    ) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self._device = loop.device
        self._batch = batch
        self._snapshot = snapshot
        self._checkpointing = Checkpointing(model)

    @property
    def checkpointed(self) -> tuple[str, ...]:
        """The layers that are checkpointed in the next run."""
        return self._checkpointing.active

    def checkpoint(self, names: Sequence[str]) -> None:
        """Checkpoint exactly these layers in the next run."""
        self._checkpointing.apply(names)

    def begin(self) -> None:
        """Put everything back to where the trial began, but with no gradients."""
        self._snapshot.restore()
        for parameter in self._snapshot.parameters():
            parameter.grad = None

    def run(
        self,
        autocast: AutocastName,
        *,
        scale: float = 1.0,
        model: nn.Module | None = None,
        loss_fn: LossFunction | None = None,
        dtype: torch.dtype | None = None,
    ) -> Outcome:
        """A forward pass in autocast, as the loop makes it, and a backward pass outside of it.

        Parameters
        ----------
        autocast
            The format; fp32 is none.
        scale
            The loss is multiplied by it.
        model, loss_fn
            In place of the user's own.
        dtype
            For the floating-point tensors of the batch; as they are without it.

        Raises
        ------
        RunError
            When the loss is none that a backward pass can begin from.
        """
        self.begin()
        model = self.model if model is None else model
        loss = self.forward(autocast, model=model, loss_fn=loss_fn, dtype=dtype)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.grad_fn is None:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
            got += " without a graph" if isinstance(loss, torch.Tensor) and loss.grad_fn is None else ""
            raise RunError(f"loss_fn: got {got}, expected one number that depends on the model's parameters")
        # As GradScaler does it: a scale in fp32 makes a scaled loss in fp32.
        scaled = loss if scale == 1.0 else loss * torch.full((), scale, dtype=torch.float32, device=loss.device)
        with _region("fp32", self._device.type):
            scaled.backward()
        inner = inner_model(model)
        return Outcome(
            loss=loss.detach().reshape(()).cpu(),
            gradients={name: None if p.grad is None else p.grad.cpu() for name, p in inner.named_parameters()},
            buffers={name: buffer.detach().to("cpu", copy=True) for name, buffer in inner.named_buffers()},
            random_states=_random_states(),
            scale=scale,
        )

    def forward(
        self,
        autocast: AutocastName,
        *,
        model: nn.Module | None = None,
        loss_fn: LossFunction | None = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        """The loss alone, with its graph, on a copy of the batch; nothing is put back before."""
        model = self.model if model is None else model
        loss_fn = self.loss_fn if loss_fn is None else loss_fn
        with _region(autocast, self._device.type):
            inputs, targets = pytree.tree_map(lambda leaf: self._copy(leaf, dtype), self._batch)
            return loss_fn(model(inputs), targets)

    def _copy(self, leaf: Any, dtype: torch.dtype | None) -> Any:
        """A model may overwrite its input, and leave a gradient in it."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        wanted = dtype if leaf.is_floating_point() else None
        return leaf.detach().to(device=self._device, dtype=wanted, copy=True).requires_grad_(leaf.requires_grad)


@contextlib.contextmanager
def trial(loop: LiveLoop, batch: Any, loss_fn: LossFunction, *, verb: str, backward: bool = True) -> Iterator[Trial]:
    """Try passes of a loop's model; all is as before afterwards, and the loop has seen nothing.

    Parameters
    ----------
    loop
        Between two steps.
    batch
        ``(inputs, targets)``; copies on the model's device are used.
    loss_fn
        ``loss_fn(model(inputs), targets)``.
    verb
        What is being done, for messages.
    backward
        Whether there will be backward passes.

    Raises
    ------
    RunError
        When it cannot be done now, or with this model.
    """
    model = check_idle(loop, verb)
    if isinstance(model, Together):
        raise RunError(f"{verb}: this session controls several models, and it is not known which of them takes the batch")
    if loop.compiled or is_compiled_function(loss_fn):
        what = "the model" if loop.compiled else "loss_fn"
        raise RunError(
            f"{verb}: {what} is compiled by torch.compile, and compiled code cannot be followed layer by layer, nor does it draw "
            "the same random numbers; call it on a model that is not compiled"
        )
    if backward and any(getattr(p, "_post_accumulate_grad_hooks", None) for p in nn.Module.parameters(model)):
        raise RunError(
            f"{verb}: parameters have hooks that run when their gradient is there and may step an optimizer, which could not be "
            "taken back; remove them first"
        )
    pair = tuple(batch) if isinstance(batch, (tuple, list)) else ()
    if len(pair) != 2:
        got = f"{len(batch)} items" if isinstance(batch, (tuple, list)) else f"a {type(batch).__name__}"
        raise RunError(f"{verb}: got {got} as the batch, expected (inputs, targets)")
    with loop.set_aside(), _WholeSnapshot(model, loss_fn, loop.optimizers) as snapshot:
        made = Trial(loop, model, (pair[0], pair[1]), loss_fn, snapshot)
        active = made.checkpointed
        try:
            yield made
        finally:
            made.checkpoint(active)


def check_idle(loop: LiveLoop, verb: str) -> nn.Module:
    """The model of a loop that is between two steps.

    Raises
    ------
    RunError
        When the loop is closed, or trains.
    """
    model = loop.model
    if model is None:
        raise RunError(f"{verb}: the session has no model any more, expected one that is not closed")
    if getattr(loop, "run_state", "none") == "running":  # a session's
        raise RunError(f"{verb}: a background run is training; pause it first: session.pause()")
    if loop.step_in_progress:
        raise RunError(f"{verb}: a step is in progress; call it between steps, or pause the run first")
    if loop.trained_elsewhere:
        raise RunError(f"{verb}: your own loop is training this model in a cell; wait for its end or interrupt it first")
    return model


def is_compiled_function(function: object) -> bool:
    """Whether ``torch.compile`` made it, or a module in it."""
    if isinstance(function, nn.Module):
        return any(map(is_compiled, function.modules()))
    return hasattr(function, "_torchdynamo_orig_callable")


def loss_scale(loop: LiveLoop) -> float:
    """The scale that the loss would be multiplied by in the next step; 1 where it is not scaled. Waits for the device."""
    return float(loop.scaler.get_scale()) if loop.scaler.is_enabled() else 1.0


@contextlib.contextmanager
def _region(autocast: AutocastName, device_type: str) -> Iterator[None]:
    """An autocast region of its own, with gradients, also within one of the user's: neither finds casts that the other made."""
    torch.clear_autocast_cache()
    try:
        with torch.inference_mode(False), torch.enable_grad(), autocast_context(autocast, device_type):
            yield
    finally:
        torch.clear_autocast_cache()


class _WholeSnapshot:
    """A `Snapshot` that also covers what a loss function has, and random generators that modules own."""

    def __init__(self, model: nn.Module, loss_fn: object, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._whole = Together({"model": model, "loss": loss_fn}) if isinstance(loss_fn, nn.Module) else model
        self._snapshot = Snapshot(self._whole, optimizers)
        self._optimizers = optimizers
        owned = {id(value): value for module in self._whole.modules() for value in vars(module).values()}
        self._generators = [put_back for value in owned.values() if (put_back := _rewind(value)) is not None]

    def parameters(self) -> list[torch.Tensor]:
        """Of the model, of the loss function and of the optimizers."""
        theirs = [p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]]
        return [*nn.Module.parameters(self._whole), *theirs]

    def restore(self) -> None:
        self._snapshot.restore()
        for put_back in self._generators:
            put_back()

    def __enter__(self) -> _WholeSnapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()


def _rewind(generator: object) -> Callable[[], None] | None:
    """What sets a random generator to its state of now; None for other objects."""
    if isinstance(generator, random.Random):
        state = generator.getstate()
        return lambda: generator.setstate(state)
    if isinstance(generator, torch.Generator):
        tensor = generator.get_state()
        return functools.partial(_set_generator, generator, tensor)
    if isinstance(generator, np.random.Generator):
        bits, kept = generator.bit_generator, generator.bit_generator.state
        return lambda: setattr(bits, "state", kept)
    if isinstance(generator, np.random.RandomState):
        old = generator.get_state()
        return lambda: generator.set_state(old)
    return None


def _set_generator(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.get_rng_state().numpy().tobytes()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states |= {f"cuda:{at}": state.numpy().tobytes() for at, state in enumerate(torch.cuda.get_rng_state_all())}
    name, keys, *rest = np.random.get_state(legacy=True)
    states["numpy"] = (name, np.asarray(keys).tobytes(), *rest)
    states["python"] = random.getstate()
    return states
