"""What precision costs: how far each layer's outputs and gradients are from a run in a wider format."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils import _pytree as pytree

from amp_widgets.analysis.autocast_lists import left_alone_text
from amp_widgets.analysis.held_interrupt import interrupts_noted
from amp_widgets.analysis.relative_error import RelativeError, error_text
from amp_widgets.analysis.trial import LossFunction, Outcome, Trial, loss_scale, trial
from amp_widgets.core.autocast import DTYPES
from amp_widgets.core.layers import inner_model, is_structural, named_layers
from amp_widgets.core.loop import LiveLoop
from amp_widgets.core.memory.death import is_out_of_memory
from amp_widgets.core.recompute import recomputing
from amp_widgets.core.settings import AUTOCAST_NAMES, AutocastName, format_scale
from amp_widgets.core.table import report_html, report_text
from amp_widgets.errors import RunError, SettingsError
from amp_widgets.language import marked_all


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPrecision:
    """How far one layer is off in one format.

    The errors are relative, as `RelativeError` has them: the norm of the difference over the norm of the reference, over the
    elements that are finite in both. They are what has come together up to there: of an output, in all layers before it; of a
    gradient, also in those behind it. NaN: there was nothing to compare.

    Attributes
    ----------
    name, type
        Of the layer; the model itself is ``"(model)"``.
    format
        Of autocast.
    calls
        How often it ran in the forward pass. The errors are of all its calls taken together.
    output_error
        Of what it returns, as it returns it, before anything overwrites it.
    gradient_error
        Of the gradients that reach its outputs. Within a reentrant checkpoint of the user's they are not seen.
    parameter_error
        Of the gradients of its own parameters.
    nonfinite
        Elements of all three that are inf or NaN where they are finite in the reference.
    """

    name: str
    type: str
    format: str
    calls: int
    output_error: float
    gradient_error: float
    parameter_error: float
    nonfinite: int

    @property
    def worst_error(self) -> float:
        """The largest of the three; NaN when none is known."""
        known = [e for e in (self.output_error, self.gradient_error, self.parameter_error) if not math.isnan(e)]
        return max(known, default=math.nan)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionReport:
    """What each format costs in precision, layer by layer.

    Attributes
    ----------
    reference
        The format that the others are compared with: ``"fp32"`` or ``"fp64"``.
    layers
        Of all formats, worst first: those with inf or NaN, then by the largest of their errors.
    loss_errors
        The relative error of the loss, by format.
    scales
        What the loss was multiplied by, by format. Gradients are divided by it before they are compared.
    skipped
        Formats that were not run, and why.
    fp32_layers
        What was kept in fp32 in all of them, as the settings in force say.
    notes
        Sentences on what is behind the numbers: gradients that overflow because of the scale, parameters that autocast leaves
        alone.
    """

    reference: str
    layers: tuple[LayerPrecision, ...]
    loss_errors: Mapping[str, float]
    scales: Mapping[str, float]
    skipped: Mapping[str, str]
    fp32_layers: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def sentences(self) -> tuple[str, ...]:
        """Of each format how far the loss is off, or why it was not run; then `notes`."""
        known = []
        for name, error in self.loss_errors.items():
            scale = self.scales[name]
            known.append(f"{name}: loss {error_text(error)}{f'; loss scaled by {format_scale(scale)}' if scale != 1.0 else ''}.")
        return (*known, *(f"{name} was not run: {reason}." for name, reason in self.skipped.items()), *self.notes)

    def of(self, name: str) -> tuple[LayerPrecision, ...]:
        """The layers in the format of this name, worst first."""
        return tuple(layer for layer in self.layers if layer.format == name)

    def layer(self, name: str, format: str) -> LayerPrecision:
        """The layer of this `name` in one `format`.

        Raises
        ------
        RunError
            When that is not in the report.
        """
        for layer in self.layers:
            if (layer.name, layer.format) == (name, format):
                return layer
        formats = ", ".join(self.loss_errors) or "no format"
        raise RunError(f"precision: there is no layer {name!r} in {format!r} here, expected a layer that was run, in {formats}")

    def __repr__(self) -> str:
        return report_text(self._title(), self._rows(), self._remarks(), words=_WORDS, sentences=())

    def _repr_html_(self) -> str:
        return report_html(self._title(), self._rows(), self._remarks(), words=_WORDS, sentences=())

    def _title(self) -> str:
        return f"relative errors against {self.reference}, worst first"

    def _rows(self) -> list[tuple[str, ...]]:
        rows = [
            (
                layer.name,
                layer.type,
                layer.format,
                error_text(layer.output_error),
                error_text(layer.gradient_error),
                error_text(layer.parameter_error),
                str(layer.nonfinite or ""),
            )
            for layer in self.layers[:_SHOWN]
        ]
        return [marked_all("layer", "type", "format", "output", "gradient of it", "of its parameters", "inf or NaN"), *rows]

    def _remarks(self) -> list[str]:
        hidden = len(self.layers) - _SHOWN
        return [*([f"… and {hidden} more: report.layers"] if hidden > 0 else []), *self.sentences]


@interrupts_noted()
def precision_cost(
    loop: LiveLoop,
    batch: tuple[Any, Any],
    loss_fn: LossFunction,
    formats: Sequence[str] = ("fp16", "bf16"),
    reference: Literal["fp32", "fp64"] = "fp32",
) -> PrecisionReport:
    """Run one batch in each format of autocast, and compare every layer with a run of the same weights in a wider format.

    All runs start from the same weights, buffers and random numbers. Checkpointed layers stay so. Where the settings scale the
    loss (fp16), it is scaled by the live scale, or by the initial one where none is in force.

    Parameters
    ----------
    loop
        Whose model and settings; between two steps. No optimizer steps, and everything is as before afterwards.
    batch
        ``(inputs, targets)``; copies on the model's device are used.
    loss_fn
        ``loss_fn(model(inputs), targets)``; several inputs are given as `amp_widgets.core.model_call.call_model` says.
    formats
        Of ``"fp16"``, ``"bf16"`` and ``"fp32"``. One that the device lacks, or in which the model fails, is skipped.
    reference
        ``"fp32"``: the model without autocast. ``"fp64"``: a deep copy of it in double precision, on a batch in double
        precision; the model itself is not changed.

    Raises
    ------
    SettingsError
        When a format or the reference is none of these.
    RunError
        When a step is in progress, a run is training, the model is compiled, the batch is no pair, or the model cannot be
        copied to or run in double precision.

    Notes
    -----
    The outputs and gradients of all layers in the reference are held in the CPU's memory meanwhile.
    """
    wanted: object = [formats] if isinstance(formats, str) else formats
    allowed = ", ".join(map(repr, AUTOCAST_NAMES))
    if not isinstance(wanted, Iterable):
        raise SettingsError(f"formats: got {formats!r}, expected a list with some of {allowed}")
    chosen: dict[AutocastName, None] = {}
    for name in wanted:
        if name not in AUTOCAST_NAMES:
            raise SettingsError(f"formats: got {name!r}, expected some of {allowed}")
        chosen[name] = None
    if reference not in ("fp32", "fp64"):
        raise SettingsError(f"reference: got {reference!r}, expected 'fp32' or 'fp64'")
    layers: list[LayerPrecision] = []
    loss_errors: dict[str, float] = {}
    scales: dict[str, float] = {}
    skipped: dict[str, str] = {}
    notes: list[str] = []
    with trial(loop, batch, loss_fn, verb="precision_cost") as tried:
        known = _run_reference(tried, reference)
        notes += left_alone_text(tried.model)
        for name in chosen:
            if not loop.support[name].available:
                skipped[name] = loop.support[name].note or "this device does not have it"
                continue
            scale = _scale(loop, name)
            try:
                errors, outcome = _compared(tried, known, name, scale)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                skipped[name] = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
                continue
            scales[name] = scale
            loss_errors[name] = errors.of_loss(outcome)
            layers += errors.rows(tried.model, name, outcome)
            if scale != 1.0 and errors.nonfinite("gradient", "parameter"):
                notes.append(_why_nonfinite(tried, known, name, errors, scale))
    layers.sort(key=lambda row: (row.nonfinite == 0, -row.worst_error if row.worst_error >= 0 else 1.0))  # those unknown last
    return PrecisionReport(
        reference=reference,
        layers=tuple(layers),
        loss_errors=loss_errors,
        scales=scales,
        skipped=skipped,
        fp32_layers=loop.settings.fp32_layers,
        notes=tuple(notes),
    )


_TRIES = 3
_SHOWN = 30
_WORDS = (0, 1, 2)
_MODEL = "(model)"

_Place = tuple[str, str, int, int]
"""Layer, ``"output"`` or ``"gradient"``, which call, which tensor of the output."""


class _Known:
    """The reference: what every layer gave, and the gradients."""

    def __init__(self) -> None:
        self.tensors: dict[_Place, torch.Tensor] = {}
        self.outcome: Outcome

    @property
    def largest_gradient(self) -> float:
        """Of all that reached a layer's output or a parameter, and are finite; 0 where there is none."""
        gradients = [tensor for (_, kind, _, _), tensor in self.tensors.items() if kind == "gradient"]
        gradients += [gradient.to_dense() for gradient in self.outcome.gradients.values() if gradient is not None]
        sizes = (gradient.abs().double() for gradient in gradients)
        return max((float(size[torch.isfinite(size)].max()) for size in sizes if torch.isfinite(size).any()), default=0.0)

    def see(self, place: _Place, tensor: torch.Tensor) -> None:
        self.tensors[place] = tensor.detach().to("cpu", copy=True)


class _Errors:
    """A run in one format, compared with the reference while it runs."""

    def __init__(self, known: _Known, scale: float) -> None:
        self._known = known
        self._scale = scale
        self._errors: dict[tuple[str, str], RelativeError] = {}
        self._calls: dict[str, int] = {}

    def see(self, place: _Place, tensor: torch.Tensor) -> None:
        name, kind, call, _ = place
        self._calls[name] = max(call + 1, self._calls.get(name, 0))
        there = self._known.tensors.get(place)
        if there is not None and there.shape == tensor.shape:
            self._error(name, kind).add(tensor, there, scale=1.0 if kind == "output" else self._scale)

    def of_loss(self, outcome: Outcome) -> float:
        error = RelativeError()
        error.add(outcome.loss, self._known.outcome.loss)
        return error.value

    def rows(self, model: nn.Module, name: str, outcome: Outcome) -> list[LayerPrecision]:
        layers = _layers(model)
        for parameter, owner in _owners(model, layers).items():
            here, there = outcome.gradients[parameter], self._known.outcome.gradients[parameter]
            if here is not None and there is not None and here.shape == there.shape:
                self._error(owner, "parameter").add(here, there, scale=self._scale)
        return [
            LayerPrecision(
                name=layer,
                type=type(module).__name__,
                format=name,
                calls=self._calls.get(layer, 0),
                output_error=self._error(layer, "output").value,
                gradient_error=self._error(layer, "gradient").value,
                parameter_error=self._error(layer, "parameter").value,
                nonfinite=sum(self._error(layer, kind).nonfinite for kind in ("output", "gradient", "parameter")),
            )
            for layer, module in layers.items()
            if any((layer, kind) in self._errors for kind in ("output", "gradient", "parameter"))
        ]

    def nonfinite(self, *kinds: str) -> int:
        """Elements of these kinds that are inf or NaN where they are finite in the reference; once `rows` was called."""
        return sum(error.nonfinite for (_, kind), error in self._errors.items() if kind in kinds)

    def _error(self, layer: str, kind: str) -> RelativeError:
        return self._errors.setdefault((layer, kind), RelativeError())


def _run_reference(tried: Trial, reference: str) -> _Known:
    known = _Known()
    if reference == "fp32":
        with _watching(tried.model, known.see):
            known.outcome = tried.run("fp32")
        return known
    tried.begin()  # without gradients, which would be copied too
    try:
        model, loss_fn = _in_double(inner_model(tried.model)), tried.loss_fn
        if isinstance(loss_fn, nn.Module):
            loss_fn = _in_double(loss_fn)
    except Exception as error:
        raise RunError(
            "precision_cost: the model cannot be copied to double precision, "
            f"{type(error).__name__}: {error}; use reference='fp32'"
        ) from error
    try:
        with _watching(model, known.see):
            known.outcome = tried.run("fp32", model=model, loss_fn=loss_fn, dtype=torch.float64)
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, RunError):
            raise
        raise RunError(
            f"precision_cost: the model does not run in double precision, {type(error).__name__}: {error}; use reference='fp32'"
        ) from error
    return known


def _compared(tried: Trial, known: _Known, name: AutocastName, scale: float) -> tuple[_Errors, Outcome]:
    errors = _Errors(known, scale)
    with _watching(tried.model, errors.see):
        return errors, tried.run(name, scale=scale)


def _why_nonfinite(tried: Trial, known: _Known, name: AutocastName, errors: _Errors, scale: float) -> str:
    """Whether gradients are inf or NaN because of the scale: that is tried, with scales at which the largest should fit."""
    count = errors.nonfinite("gradient", "parameter")
    said = f"{name}: at a loss scale of {format_scale(scale)} {count:,} elements of gradients are inf or NaN"
    if errors.nonfinite("output"):
        return f"{said}, and so are outputs of layers in the forward pass, which no scale changes."
    fits = torch.finfo(DTYPES[name]).max / known.largest_gradient if known.largest_gradient else scale
    power = math.floor(math.log2(min(fits, scale / 2)))
    for lower in (2.0 ** (power - 2 * at) for at in range(_TRIES)):
        again, outcome = _compared(tried, known, name, lower)
        again.rows(tried.model, name, outcome)
        left = again.nonfinite("gradient", "parameter")
        if not left:
            return f"{said}, at {format_scale(lower)} none: the scale is too large for these gradients."
    return f"{said}, and at {format_scale(lower)} there are {left:,}: it is not the scale alone."


def _in_double(module: nn.Module) -> Any:
    with torch.inference_mode(False):
        return copy.deepcopy(module).double()


def _scale(loop: LiveLoop, name: AutocastName) -> float:
    settings = loop.settings.replace(autocast=name)
    if not settings.scales_loss:
        return 1.0
    return loss_scale(loop) if loop.scaler.is_enabled() else settings.start_scale


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """The model itself and everything in it that has a forward pass, but for what makes a parametrized weight."""
    inside = {
        name: module
        for name, module in named_layers(model).items()
        if not is_structural(module) and "parametrizations" not in name.split(".")
    }
    return {_MODEL: inner_model(model), **inside}


def _owners(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """Name of each parameter → the layer it belongs to; a parametrization's belong to the layer it is for."""
    owners = {}
    for name, _ in inner_model(model).named_parameters():
        owner = name.rpartition(".")[0]
        while owner and owner not in layers:
            owner = owner.rpartition(".")[0]
        owners[name] = owner or _MODEL
    return owners


@contextlib.contextmanager
def _watching(model: nn.Module, see: Callable[[_Place, torch.Tensor], None]) -> Iterator[None]:
    """Show `see` what every layer returns and the gradients that reach it, not in a recompute."""
    calls: dict[str, int] = {}

    def returned(name: str, module: nn.Module, args: Any, output: Any) -> None:
        if recomputing():
            return
        call = calls[name] = calls.get(name, -1) + 1
        for at, tensor in enumerate(pytree.tree_leaves(output)):
            if not isinstance(tensor, torch.Tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
                continue
            see((name, "output", call, at), tensor)
            if tensor.grad_fn is not None:  # else the hook would stay with a tensor of the user's
                tensor.register_hook(partial(see, (name, "gradient", call, at)))

    handles = []
    try:
        for name, module in _layers(model).items():
            if not isinstance(module, torch.jit.ScriptModule):
                handles.append(module.register_forward_hook(partial(returned, name)))
        yield
    finally:
        for handle in handles:
            handle.remove()
