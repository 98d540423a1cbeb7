"""Forward and backward passes that are only tried: model, optimizers and random states are as before afterwards."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from amp_widgets.analysis.held_interrupt import interrupts_noted, raise_lost_interrupt
from amp_widgets.analysis.snapshot import Snapshot
from amp_widgets.core.autocast import autocast_context
from amp_widgets.core.batch_tree import map_batch
from amp_widgets.core.checkpointing import Checkpointing
from amp_widgets.core.layers import inner_model
from amp_widgets.core.loop import LiveLoop
from amp_widgets.core.memory.compiled import is_compiled
from amp_widgets.core.model_call import call_model
from amp_widgets.core.models import Together
from amp_widgets.core.settings import AutocastName
from amp_widgets.core.threads import this_thread
from amp_widgets.errors import RunError, SessionClosedError

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
        self, loop: LiveLoop, model: nn.Module, batch: tuple[Any, Any], loss_fn: LossFunction, snapshot: Snapshot
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
        """Put everything back to where the trial began, but with no gradients; where an interrupt got lost, raise it."""
        raise_lost_interrupt()
        self._snapshot.restore()
        self._snapshot.clear_gradients()

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
        check_loss(loss)
        with region("fp32", self._device.type):
            # as GradScaler does it: a scale in fp32 makes a scaled loss in fp32
            scaled = loss if scale == 1.0 else loss * torch.full((), scale, dtype=torch.float32, device=loss.device)
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
        with region(autocast, self._device.type):
            inputs, targets = copy_of_batch(self._batch, self._device, dtype)
            return loss_fn(call_model(model, inputs), targets)


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
        ``loss_fn(model(inputs), targets)``; several inputs are given as `amp_widgets.core.model_call.call_model` says.
    verb
        What is being done, for messages.
    backward
        Whether there will be backward passes.

    Raises
    ------
    RunError
        When it cannot be done now, or with this model.
    """
    model, pair = check_idle(loop, verb), check_batch(batch, verb)
    check_loss_fn(loss_fn, verb)
    check_one_model(model, verb)
    check_not_compiled(loop, loss_fn, verb, "cannot be followed layer by layer, nor does it draw the same random numbers")
    if backward:
        check_hooks(model, verb)
    with interrupts_noted(), loop.set_aside(), Snapshot(model, loop.optimizers, loss_fn=loss_fn) as snapshot:
        made = Trial(loop, model, pair, loss_fn, snapshot)
        active = made.checkpointed
        kinds = [type(module) for module in model.modules()]  # held: that of a checkpointed layer is else made anew
        try:
            yield made
        finally:
            made.checkpoint(active)
            del kinds


def check_idle(loop: LiveLoop, verb: str) -> nn.Module:
    """The model of a loop that is between two steps; a step that nobody goes on with is forgotten for it.

    Raises
    ------
    SessionClosedError
        When the loop is closed.
    RunError
        When it trains.
    """
    model = loop.model
    if model is None:
        raise SessionClosedError(
            f"{verb}: this session was closed, and no longer controls the model; make one for it: aw.AmpSession(model, optimizer)"
        )
    if getattr(loop, "run_state", "none") == "running" and loop.lent_to != this_thread():  # a session's
        raise RunError(f"{verb}: a background run is training; pause it first: session.pause()")
    if loop.lent_to not in (None, this_thread()):
        raise RunError(f"{verb}: another thread is measuring something on this model between two steps; wait for its end")
    if not loop.settle_step():
        raise RunError(
            f"{verb}: a step is in progress; call it between steps, or pause the run first. A step that was broken off and will "
            "not end is forgotten with session.abandon_step(), and its gradients with optimizer.zero_grad()"
        )
    if loop.trained_elsewhere:
        raise RunError(f"{verb}: your own loop is training this model in a cell; wait for its end or interrupt it first")
    return model


def check_one_model(model: nn.Module, verb: str) -> None:
    """Check that it can be called, and has parameters of which the shape is known.

    Raises
    ------
    RunError
        When not.
    """
    if isinstance(model, Together):
        raise RunError(f"{verb}: this session controls several models, and it is not known which of them takes the batch")
    if any(map(nn.parameter.is_lazy, (*nn.Module.parameters(model), *nn.Module.buffers(model)))):
        raise RunError(f"{verb}: the model has parameters without a shape yet (a lazy module); run it once first: model(inputs)")


def check_not_compiled(loop: LiveLoop, loss_fn: object, verb: str, why: str) -> None:
    """Check that neither the model nor the loss function goes through ``torch.compile``; `why` follows "compiled code".

    Raises
    ------
    RunError
        When one does.
    """
    if loop.compiled or is_compiled_function(loss_fn):
        what = "the model" if loop.compiled else "loss_fn"
        raise RunError(
            f"{verb}: {what} is compiled by torch.compile, and compiled code {why}; call it on "
            f"{'a model' if loop.compiled else 'one'} that is not compiled"
        )


def check_hooks(model: nn.Module, verb: str) -> None:
    """Check that a backward pass steps no optimizer.

    Raises
    ------
    RunError
        When it may.
    """
    if any(getattr(p, "_post_accumulate_grad_hooks", None) for p in nn.Module.parameters(model)):
        raise RunError(
            f"{verb}: parameters have hooks that run when their gradient is there and may step an optimizer, which could not be "
            "taken back; remove them first"
        )


def check_batch(batch: object, verb: str) -> tuple[Any, Any]:
    """The inputs and the targets.

    Raises
    ------
    RunError
        When it is no pair.
    """
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        got = f"{len(batch)} items" if isinstance(batch, (tuple, list)) else kind_of(batch)
        raise RunError(f"{verb}: got {got} as the batch, expected (inputs, targets), for loss_fn(model(inputs), targets)")
    return batch[0], batch[1]


def check_loss_fn(loss_fn: object, verb: str) -> None:
    """Check that it can be called.

    Raises
    ------
    RunError
        When not.
    """
    if not callable(loss_fn):
        raise RunError(
            f"{verb}: got {kind_of(loss_fn)} as loss_fn, expected a function for loss_fn(model(inputs), targets), such as "
            "torch.nn.functional.cross_entropy"
        )
    if isinstance(loss_fn, type):
        raise RunError(f"{verb}: got the class {loss_fn.__name__} as loss_fn, expected an object of it: {loss_fn.__name__}()")


def check_loss(loss: object, *, graph: bool = True) -> torch.Tensor:
    """The loss, if it is one that a backward pass can begin from.

    Raises
    ------
    RunError
        When not; without `graph`, also a number that depends on no parameter will do.
    """
    if not isinstance(loss, torch.Tensor):
        problem = kind_of(loss)
    elif loss.numel() != 1 or loss.is_complex():
        problem = f"a {'complex ' * loss.is_complex()}tensor of shape {tuple(loss.shape)}"
    elif graph and loss.grad_fn is None:
        problem = f"a tensor of shape {tuple(loss.shape)} without a graph"
    else:
        return loss
    raise RunError(
        f"loss_fn: got {problem}, expected one number that depends on the model's parameters: a tensor with one element, such as "
        "cross_entropy(output, targets) gives, without .item() and .detach()"
    )


def copy_of_batch(batch: tuple[Any, Any], device: torch.device, dtype: torch.dtype | None = None) -> tuple[Any, Any]:
    """A batch of its own, as a model may overwrite its input and leave a gradient in it.

    Parameters
    ----------
    batch
        Its tensors and arrays are copied, also those in lists, tuples, dicts and what else `amp_widgets.core.batch_tree` knows.
    device
        Where the copies of tensors are put.
    dtype
        Of those with floating-point numbers; as they are without it.
    """

    def copy_of(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            return leaf.copy()
        if not isinstance(leaf, torch.Tensor):
            return leaf
        wanted = dtype if leaf.is_floating_point() else None
        return leaf.detach().to(device=device, dtype=wanted, copy=True).requires_grad_(leaf.requires_grad)

    with torch.inference_mode(False):
        inputs, targets = map_batch(copy_of, batch)
    return inputs, targets


def is_compiled_function(function: object) -> bool:
    """Whether ``torch.compile`` made it, or a module in it."""
    if isinstance(function, nn.Module):
        return any(map(is_compiled, function.modules()))
    return hasattr(function, "_torchdynamo_orig_callable")


def loss_scale(loop: LiveLoop) -> float:
    """The scale that the loss would be multiplied by in the next step; 1 where it is not scaled. Waits for the device."""
    return float(loop.scaler.get_scale()) if loop.scaler.is_enabled() else 1.0


def kind_of(value: object) -> str:
    """What it is, for messages: ``"a Tensor"``, ``"an int"``, ``"None"``."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


@contextlib.contextmanager
def region(autocast: AutocastName, device_type: str) -> Iterator[None]:
    """An autocast region of its own, with gradients, also within one of the user's: neither finds casts that the other made.

    For fp32 it is none where there is none around it: casts live until the outermost region is left, and with one around the
    whole step those of a recompute would live longer than in a step of the run.
    """
    torch.clear_autocast_cache()
    around = autocast != "fp32" or torch.is_autocast_enabled(device_type)
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            autocast_context(autocast, device_type) if around else contextlib.nullcontext(),
        ):
            yield
    finally:
        torch.clear_autocast_cache()


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.get_rng_state().numpy().tobytes()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states |= {f"cuda:{at}": state.numpy().tobytes() for at, state in enumerate(torch.cuda.get_rng_state_all())}
    name, keys, *rest = np.random.get_state(legacy=True)
    states["numpy"] = (name, np.asarray(keys).tobytes(), *rest)
    states["python"] = random.getstate()
    return states
