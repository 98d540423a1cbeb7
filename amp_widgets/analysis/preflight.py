"""What will go wrong with mixed precision or checkpointing, found before it does."""

from __future__ import annotations

import dataclasses
import functools
import html
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from amp_widgets.analysis.held_interrupt import interrupts_noted
from amp_widgets.analysis.rehearsal import LOSS, MODEL, Rehearsal, rehearse
from amp_widgets.analysis.trial import LossFunction, check_batch, check_idle, check_loss_fn, is_compiled_function, trial
from amp_widgets.core.checkpointing import Checkpointing
from amp_widgets.core.fp32_layers import Fp32Layers
from amp_widgets.core.layers import inner_model, named_layers
from amp_widgets.core.loop import LiveLoop
from amp_widgets.core.memory.compiled import is_compiled
from amp_widgets.core.models import Together
from amp_widgets.core.settings import AutocastName, Settings
from amp_widgets.core.table import table_html, told
from amp_widgets.language import in_language, marked, marked_all, say

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that will go wrong, or is good to know.

    Attributes
    ----------
    severity
        ``"error"``: it fails, or gives wrong numbers. ``"warning"``: it may. ``"info"``: nothing is wrong.
    title, text, cure
        What it is, why it matters, what to do; the cure may be empty.
    where
        Names of layers or parameters.
    predicted
        It does not happen here and now: it would on another device, or with other settings, as the text says.
    """

    severity: Severity
    title: str
    text: str
    cure: str = ""
    where: tuple[str, ...] = ()
    predicted: bool = False

    def __str__(self) -> str:
        where = f" [{_shown(self.where)}]" if self.where else ""
        cure = f" → {in_language(self.cure)}" if self.cure else ""
        return f"{self.how_grave}: {in_language(self.title)}{where}. {in_language(self.text)}{cure}"

    @property
    def how_grave(self) -> str:
        """The severity for people, in their language, and whether it is predicted."""
        return in_language(_SEVERITIES[self.severity]) + (say(" (predicted)") if self.predicted else "")


class Findings(tuple[Finding, ...]):
    """A tuple of findings, the gravest first, that shows itself as a table."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n".join(map(str, self)) if self else say("nothing found")

    def _repr_html_(self) -> str:
        if not self:
            return f"<div>{html.escape(repr(self))}</div>"
        rows = [(finding.how_grave, finding.title, _shown(finding.where), finding.text, finding.cure) for finding in self]
        return table_html(told([_HEADINGS, *rows], sentences=(1, 3, 4)), words=range(5))


_SEVERITIES: Mapping[Severity, str] = {"error": marked("error"), "warning": marked("warning"), "info": marked("info")}
_HEADINGS = marked_all("severity", "finding", "where", "why", "cure")


@interrupts_noted()
def preflight(loop: LiveLoop, batch: tuple[Any, Any] | None = None, loss_fn: LossFunction | None = None) -> Findings:
    """Look for what mixed precision and checkpointing stumble over, also for what would only fail on CUDA.

    Without a batch, model, optimizers and settings are read. With one, a forward pass is watched besides, in autocast: in the
    format in force, else in bf16 on a CPU and in fp16 on a GPU. Everything is as before afterwards.

    Parameters
    ----------
    loop
        Whose model, optimizers and settings; between two steps.
    batch
        ``(inputs, targets)``; copies on the model's device are used.
    loss_fn
        ``loss_fn(model(inputs), targets)``.

    Returns
    -------
    Findings
        A tuple of `Finding`, errors first. What could not be looked at is a finding of severity ``"info"``.

    Raises
    ------
    RunError
        When a step is in progress, a run is training, the batch is no pair, or the loss is not one number.
    """
    model = check_idle(loop, "preflight")
    if batch is not None:
        check_batch(batch, "preflight")
    if loss_fn is not None:
        check_loss_fn(loss_fn, "preflight")
    subject = _Subject(
        loop=loop,
        model=model,
        settings=loop.settings,
        loss_fn=loss_fn,
        layers={MODEL: inner_model(model), **named_layers(model)},
        checkpointed=Checkpointing(model).active,
        kept=Fp32Layers(model).active,
        seen=None,
    )
    unseen = _why_not_watched(subject, batch)
    if unseen is None:
        assert batch is not None
        subject = _watched(subject, batch)
    found = [finding for check in _CHECKS for finding in check(subject)]
    if unseen is not None:
        found.append(Finding(severity="info", title="No forward pass was watched", text=unseen[0], cure=unseen[1]))
    return Findings(sorted(found, key=lambda finding: _GRAVITY.index(finding.severity)))


_GRAVITY = ("error", "warning", "info")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Subject:
    """What is looked at; `seen` is None where no forward pass was watched."""

    loop: LiveLoop
    model: nn.Module
    settings: Settings
    loss_fn: LossFunction | None
    layers: Mapping[str, nn.Module]
    checkpointed: tuple[str, ...]
    kept: tuple[str, ...]
    seen: Rehearsal | None

    @property
    def on_cuda(self) -> bool:
        return self.loop.device.type == "cuda"


def _why_not_watched(subject: _Subject, batch: object) -> tuple[str, str] | None:
    """Why no forward pass can be watched, and what to do; None when one can."""
    if subject.loop.compiled or is_compiled_function(subject.loss_fn):
        what = "The model is compiled by torch.compile" if subject.loop.compiled else "loss_fn is compiled by torch.compile"
        return f"{what}, and compiled code cannot be watched. {_NEEDS_BATCH}", "Call it on a model that is not compiled."
    if isinstance(subject.model, Together):
        return f"Several models are controlled, and it is not known which of them takes the batch. {_NEEDS_BATCH}", ""
    if batch is None:
        return _NEEDS_BATCH, "session.preflight(batch, loss_fn)"
    return None


_NEEDS_BATCH = (
    "Not looked at: your own checkpoints (reentrant ones, dropout in them), custom autograd Functions, binary_cross_entropy in "
    "the code of a forward pass, and the format of the loss."
)


def _watched(subject: _Subject, batch: tuple[Any, Any]) -> _Subject:
    loop, loss_fn = subject.loop, subject.loss_fn
    name = subject.settings.autocast
    wanted: tuple[AutocastName, ...] = (name,) if name != "fp32" else ("fp16", "bf16") if subject.on_cuda else ("bf16", "fp16")
    autocast: AutocastName = next((format for format in wanted if loop.support[format].available), "fp32")
    with trial(loop, batch, _output if loss_fn is None else loss_fn, verb="preflight", backward=False) as tried:
        seen = rehearse(tried, autocast, loop.device.type, with_loss=loss_fn is not None)
    return dataclasses.replace(subject, seen=seen)


def _output(output: Any, targets: Any) -> Any:
    return output


# ---- the checks, one each ---------------------------------------------------------------------------------------------------


def _unsafe_losses(subject: _Subject) -> Iterator[Finding]:
    seen = subject.seen
    where = [] if seen is None else list(seen.unsafe_losses)
    if seen is None or seen.autocast == "fp32" or seen.error is not None:  # else what ran counts, in the region that it ran in
        where += [
            name
            for name, module in subject.layers.items()
            if isinstance(module, nn.BCELoss) and not _is_within(name, subject.kept)
        ]
        where += [LOSS] * _is_unsafe_loss(subject.loss_fn)
    if where:
        yield Finding(
            severity="error",
            title="BCELoss within autocast",
            text="On CUDA, binary_cross_entropy and BCELoss raise an error within autocast: the logarithm of a probability that "
            "was rounded to 16 bits is not safe. On a CPU they run.",
            cure="Leave out the last sigmoid and use binary_cross_entropy_with_logits or BCEWithLogitsLoss; or compute this "
            "loss in a region with autocast(enabled=False), on .float() inputs.",
            where=_once(where),
            predicted=not subject.on_cuda or subject.settings.autocast == "fp32",
        )


def _half_parameters(subject: _Subject) -> Iterator[Finding]:
    where = [
        name
        for name, parameter in inner_model(subject.model).named_parameters()
        if parameter.dtype == torch.float16 and parameter.requires_grad
    ]
    if where:
        scaled = subject.settings.scales_loss or subject.loop.has_users_scaler
        yield Finding(
            severity="error" if scaled else "warning",
            title="The model's own parameters are fp16",
            text="Updates smaller than 2^-11 of a weight are lost, and the scaler refuses fp16 gradients as soon as the loss is "
            "scaled: 'Attempting to unscale FP16 gradients'. Autocast needs parameters in fp32, and casts where it is safe.",
            cure="model.float() in place of model.half(), before the optimizer is made.",
            where=_once(where),
        )


def _half_batch_norms(subject: _Subject) -> Iterator[Finding]:
    where = []
    for name, module in subject.layers.items():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            tensors = (module.weight, module.bias, module.running_mean, module.running_var)
            if any(tensor is not None and tensor.dtype in _HALVES for tensor in tensors):
                where.append(name)
    if where:
        yield Finding(
            severity="warning",
            title="BatchNorm in 16 bits",
            text="The module was converted, by .half() for example, and its running statistics with it: small updates of them "
            "are lost in rounding, and a variance above 65504 is inf in fp16.",
            cure="Keep the model in fp32 and use autocast, which leaves BatchNorm's statistics in fp32; or norm.float().",
            where=tuple(where),
        )


def _fused_optimizers(subject: _Subject) -> Iterator[Finding]:
    fused = [type(o).__name__ for o in subject.loop.optimizers if getattr(o, "_step_supports_amp_scaling", False)]
    if fused:
        scaled = subject.settings.scales_loss or subject.loop.has_users_scaler
        yield Finding(
            severity="info",
            title="A fused optimizer unscales the gradients in its own step",
            text=f"With {_listed(_once(fused))} the gradients are multiplied by the loss scale until scaler.step(optimizer), so "
            "that clipping or logging them before it sees scaled ones; some trainers (Lightning) refuse to clip with it. "
            "Whether a step was skipped is known to the device alone: hooks after the step run also when it was.",
            cure="To clip, call scaler.unscale_(optimizer) first, which is right with fused optimizers too; step schedulers with "
            "`if not session.last_step_skipped`.",
            predicted=not scaled,
        )


def _emulated_bf16(subject: _Subject) -> Iterator[Finding]:
    support = subject.loop.support["bf16"]
    if not support.available or "emulated" in support.note:
        in_force = subject.settings.autocast == "bf16"
        yield Finding(
            severity="warning" if in_force else "info",
            title="bf16 is emulated on this device" if support.available else "This device does not have bf16",
            text=f"{subject.loop.device}: {support.note}." if support.note else f"{subject.loop.device} does not support it.",
            cure="Use fp16 with a scaled loss." if subject.on_cuda else "Use it to see the rounding, not for speed.",
            predicted=not in_force,
        )


def _tied_weights(subject: _Subject) -> Iterator[Finding]:
    model = inner_model(subject.model)
    on = {id(subject.layers[name]) for name in subject.checkpointed}
    modules = dict(model.named_modules(remove_duplicate=False))
    regions: dict[int, set[str]] = {}
    names: dict[int, list[str]] = {}
    for path, module in modules.items():
        parts = path.split(".")
        prefixes = (".".join(parts[: count + 1]) for count in range(len(parts)))
        region = next((prefix for prefix in prefixes if id(modules.get(prefix)) in on), "")
        for name, parameter in module._parameters.items():
            if parameter is not None:
                regions.setdefault(id(parameter), set()).add(region)
                names.setdefault(id(parameter), []).append(f"{path}.{name}" if path else name)
    tied = [name for key, found in regions.items() if len(found) > 1 for name in names[key]]
    if tied:
        reentrant = subject.seen is not None and any(seen.reentrant for seen in subject.seen.checkpoints)
        yield Finding(
            severity="warning" if reentrant else "info",
            title="Weights are shared across checkpointed regions",
            text="Their gradients are added up over all uses and stay right. With reentrant checkpoints such a weight gets its "
            "gradient in several backward passes, which DistributedDataParallel refuses ('marked as ready twice').",
            cure="Checkpoint with use_reentrant=False, as the layers of this session do.",
            where=tuple(tied),
            predicted=True,
        )


def _compiled_parts(subject: _Subject) -> Iterator[Finding]:
    where = [name.replace("_orig_mod.", "") or MODEL for name, module in subject.model.named_modules() if is_compiled(module)]
    if where:
        yield Finding(
            severity="info",
            title="Parts go through torch.compile",
            text="Every change of autocast or of checkpointed layers compiles them anew in the next step. Memory on a CPU, "
            "checks and profiles of single layers are switched off for them.",
            cure="Choose the settings on a model that is not compiled, and compile it then.",
            where=_once(where),
        )


def _reentrant_checkpoints(subject: _Subject) -> Iterator[Finding]:
    seen = [] if subject.seen is None else [found for found in subject.seen.checkpoints if found.reentrant]
    without = [found.layer for found in seen if not found.has_gradient]
    if without:
        yield Finding(
            severity="error",
            title="A reentrant checkpoint cuts the gradient off",
            text="None of its inputs asks for a gradient, so that the parameters used in it get none and are never trained.",
            cure="checkpoint(..., use_reentrant=False)",
            where=_once(without),
        )
    others = [found.layer for found in seen if found.has_gradient]
    if others:
        yield Finding(
            severity="warning",
            title="Reentrant checkpoints in your own code",
            text="They work only with .backward() and not with autograd.grad, pass no gradients on through keyword arguments or "
            "nested containers, and fail in DistributedDataParallel with unused or shared parameters.",
            cure="checkpoint(..., use_reentrant=False)",
            where=_once(others),
        )


def _half_loss(subject: _Subject) -> Iterator[Finding]:
    seen = subject.seen
    if seen is None or seen.loss_dtype not in _HALVES:
        return
    in_force = subject.settings.autocast == seen.autocast
    fp16 = seen.loss_dtype == torch.float16
    yield Finding(
        severity="warning",
        title=f"The loss is returned in {'fp16' if fp16 else 'bf16'}",
        text=f"Seen on {subject.loop.device} in {seen.autocast}. "
        + ("" if fp16 else "It keeps two to three decimal digits, and with fp16 in force the same code returns it in fp16. ")
        + "In fp16 a loss above 65504 is inf, and so is the gradient it starts from at a loss scale of 2^16, the usual one: the "
        "first steps are skipped whatever the model.",
        cure="Compute the loss in fp32: loss_fn(outputs.float(), targets), or use torch's own loss functions, which do.",
        where=(LOSS,),
        predicted=not (in_force and fp16),
    )


def _bare_functions(subject: _Subject) -> Iterator[Finding]:
    bare = [] if subject.seen is None else [(name, layer) for name, layer, wrapped in subject.seen.functions if not wrapped]
    if bare:
        yield Finding(
            severity="warning",
            title="Custom autograd Functions without custom_fwd",
            text=f"{_listed(_once(name for name, _ in bare))}: forward runs within autocast and backward does not, so that the "
            "two may meet tensors of different formats, which is an error in a matrix product, or wrong precision elsewhere.",
            cure="Put @torch.amp.custom_fwd(device_type=...) on forward (with cast_inputs=torch.float32 where it needs fp32) and "
            "@torch.amp.custom_bwd(device_type=...) on backward.",
            where=_once(layer for _, layer in bare),
            predicted=subject.settings.autocast == "fp32",
        )


def _lost_random_states(subject: _Subject) -> Iterator[Finding]:
    seen = [] if subject.seen is None else subject.seen.checkpoints
    where = [found.layer for found in seen if found.draws and not found.keeps_random_state]
    if where:
        yield Finding(
            severity="error",
            title="Dropout in a checkpoint that does not preserve the random state",
            text="The recompute draws other random numbers than the forward pass did (another dropout mask): the gradients are "
            "wrong, and nothing says so.",
            cure="Leave out preserve_rng_state=False.",
            where=_once(where),
        )


def _stale_optimizers(subject: _Subject) -> Iterator[Finding]:
    model = inner_model(subject.model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    theirs = {id(p): p for optimizer in subject.loop.optimizers for group in optimizer.param_groups for p in group["params"]}
    idle = [parameter for parameter in model.parameters() if parameter.requires_grad and id(parameter) not in theirs]
    known = names.keys() | {id(parameter) for parameter in _parameters_of_function(subject.loss_fn)}
    strangers = [parameter for key, parameter in theirs.items() if key not in known]
    if idle and strangers:
        # a model that was converted or copied has left behind one for each of its own
        left_behind = not Counter(p.shape for p in idle) - Counter(p.shape for p in strangers)
        counts = (
            f"{len(strangers)} of its parameters are none of the model's, while {len(idle)} of the model's are in no optimizer "
            "and are never updated. "
        )
        yield Finding(
            severity="error" if left_behind else "warning",
            title="The optimizer has parameters that are not the model's",
            text=counts + "The optimizer was made before they were replaced, or the model was converted."
            if left_behind
            else f"{counts}Nothing is wrong if they are those of another module that is trained with it, and the others are to "
            "stay as they are; else the optimizer was made before a part of the model was replaced.",
            cure="Make the optimizer from model.parameters() after the model is complete, on its device and in its format."
            + ("" if left_behind else " Parameters that are not to be trained: parameter.requires_grad_(False)."),
            where=tuple(names[id(parameter)] for parameter in idle),
        )
    moved, converted = [], []
    for optimizer in subject.loop.optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if not isinstance(value, torch.Tensor) or key == "step" or value.shape != parameter.shape:
                    continue
                if value.device != parameter.device:
                    moved.append(names.get(id(parameter), key))
                elif type(optimizer).__module__.startswith("torch.optim") and value.dtype != parameter.dtype:
                    converted.append(names.get(id(parameter), key))
    if moved or converted:
        yield Finding(
            severity="error",
            title="The optimizer's state is from before the model was moved or converted",
            text="Its averages are "
            + " and ".join(["on another device"] * bool(moved) + ["in another format"] * bool(converted))
            + " than the parameters they belong to: the next step fails, or mixes formats.",
            cure="Move and convert the model first, then make the optimizer; optimizer.load_state_dict(optimizer.state_dict()) "
            "converts a state that is worth keeping.",
            where=_once([*moved, *converted]),
        )


def _failure(subject: _Subject) -> Iterator[Finding]:
    seen = subject.seen
    if seen is not None and seen.error is not None and not (seen.unsafe_losses and subject.on_cuda):
        yield Finding(
            severity="error",
            title=f"The forward pass fails in {seen.autocast}",
            text=f"Without autocast it runs; with it: {seen.error}",
            cure="Run the part that fails in a region with autocast(enabled=False), on .float() inputs.",
            predicted=seen.autocast != subject.settings.autocast,
        )


_CHECKS: tuple[Callable[[_Subject], Iterator[Finding]], ...] = (
    _failure,
    _unsafe_losses,
    _half_parameters,
    _lost_random_states,
    _stale_optimizers,
    _reentrant_checkpoints,
    _bare_functions,
    _half_loss,
    _half_batch_norms,
    _emulated_bf16,
    _fused_optimizers,
    _tied_weights,
    _compiled_parts,
)

_HALVES = (torch.float16, torch.bfloat16)


def _is_unsafe_loss(function: object) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, nn.Module):
        return any(isinstance(module, nn.BCELoss) for module in function.modules())
    return function is nn.functional.binary_cross_entropy


def _parameters_of_function(function: object) -> Iterator[nn.Parameter]:
    """Of the modules that it is, is bound to, or has in its own variables and in the global ones that it names."""
    while isinstance(function, functools.partial):
        yield from _parameters_in((*function.args, *function.keywords.values()))
        function = function.func
    owner = getattr(function, "__self__", None)
    code = getattr(function, "__code__", None)
    named = getattr(function, "__globals__", {})
    cells = getattr(function, "__closure__", None) or ()
    globals_named = (named[name] for name in getattr(code, "co_names", ()) if name in named)
    yield from _parameters_in((function, owner, *map(_content_of, cells), *globals_named))


def _parameters_in(values: Iterable[object]) -> Iterator[nn.Parameter]:
    for value in values:
        if isinstance(value, nn.Module):
            yield from value.parameters()


def _content_of(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was put in it yet
        return None


def _is_within(name: str, layers: Iterable[str]) -> bool:
    return any(name == layer or name.startswith(f"{layer}.") for layer in layers)


def _once(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")


def _shown(names: tuple[str, ...]) -> str:
    """The same in the language in force."""
    listed, more = ", ".join(names[:_LISTED]), len(names) - _LISTED
    return say("{shown} and {count} more", shown=listed, count=more) if more > 0 else listed


_LISTED = 5
