"""The dtype map: in which format every operator of every layer computes in a step, what is cast for it, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from amp_widgets.analysis.autocast_lists import AutocastList, autocast_list, is_left_alone, knows
from amp_widgets.analysis.held_interrupt import interrupts_noted
from amp_widgets.analysis.operator_watch import LOSS, MODEL, OperatorWatch, Reason, Seen
from amp_widgets.analysis.trial import LossFunction, trial
from amp_widgets.core.checkpointing import Checkpointing
from amp_widgets.core.fp32_layers import Fp32Layers
from amp_widgets.core.loop import LiveLoop
from amp_widgets.core.settings import AutocastName
from amp_widgets.core.table import report_html, report_text
from amp_widgets.language import marked, marked_all


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorDtypes:
    """An operator in a layer, in all calls with the same formats.

    In the backward pass a gradient has the format of the tensor it is of: what comes is in `dtypes_out`, what goes is in
    `dtypes_in`. Formats are ``"fp32"``, ``"fp16"``, ``"bf16"``, ``"fp64"``, or torch's names of others.

    Attributes
    ----------
    layer
        In whose forward pass it is called: a name, ``"(model)"`` for the model's own, ``"loss_fn"`` for the loss.
    operator
        As Python has it, such as ``"linear"``; several of torch's ops may be behind it.
    function
        The custom ``autograd.Function`` in whose forward it is called, or ``""``. An operator of that very name stands for
        the backward of the Function.
    calls
        In the forward pass.
    dtypes_in
        What it is called with, before autocast has cast anything.
    compute
        What it computes with, after the casts. Several: it takes mixed formats.
    dtypes_out
        What it returns.
    reason
        One of `Reason`.
    why
        The reason as a sentence, and whose list it is.
    casts, cast_bytes
        Casts made for it in the forward pass, and the bytes that they wrote. A weight is cast once a step and reused.
    backward_compute
        What its part of the backward pass computes with; empty where it has none.
    backward_casts, backward_cast_bytes
        Casts of gradients in that part.
    recompute_calls, recompute_casts, recompute_cast_bytes
        What a checkpointed layer repeats in the backward pass; not counted elsewhere.
    on_cuda
        The list that autocast for CUDA has it on, which is predicted, not run; None where it is on none, and on CUDA itself.
    """

    layer: str
    operator: str
    function: str
    calls: int
    dtypes_in: tuple[str, ...]
    compute: tuple[str, ...]
    dtypes_out: tuple[str, ...]
    reason: Reason
    why: str
    casts: int
    cast_bytes: int
    backward_compute: tuple[str, ...]
    backward_casts: int
    backward_cast_bytes: int
    recompute_calls: int
    recompute_casts: int
    recompute_cast_bytes: int
    on_cuda: AutocastList | None

    @property
    def text(self) -> str:
        """The operator, and the custom Function that it is in."""
        if not self.function:
            return self.operator
        return f"{self.function} (autograd.Function)" if self.function == self.operator else f"{self.operator} in {self.function}"

    @property
    def inserted(self) -> bool:
        """Whether its casts are autocast's: not written in the code, nor those of gradients where autocast is off."""
        return self.reason not in ("written", "off", "disabled")


@dataclass(frozen=True, kw_only=True, slots=True)
class DtypeMap:
    """In which formats a forward and a backward pass on a batch have computed.

    Attributes
    ----------
    rows
        By layer and operator, in the order of the first calls.
    types
        Layer → its class, of all layers in the model's order, whether or not they were called.
    autocast, checkpointed, fp32_layers
        What was in force.
    device_type, torch_version
        On what.
    """

    rows: tuple[OperatorDtypes, ...]
    types: dict[str, str]
    autocast: AutocastName
    checkpointed: tuple[str, ...]
    fp32_layers: tuple[str, ...]
    device_type: str
    torch_version: str

    def of(self, layer: str) -> tuple[OperatorDtypes, ...]:
        """The rows of a layer and of the layers inside it."""
        return tuple(row for row in self.rows if row.layer == layer or row.layer.startswith(f"{layer}."))

    @property
    def layers(self) -> dict[str, tuple[str, ...]]:
        """Layer → the formats that it and the layers inside it compute in, most calls first; of those that compute at all."""
        counts: dict[str, dict[str, int]] = {}
        for row in self.rows:
            for name in _with_parents(row.layer):
                of_layer = counts.setdefault(name, {})
                for one in row.compute:
                    of_layer[one] = of_layer.get(one, 0) + row.calls
        order = {name: at for at, name in enumerate((*self.types, LOSS))}
        known = sorted((name for name in counts if name in order), key=order.__getitem__)
        return {name: tuple(sorted(counts[name], key=lambda one, of=counts[name]: -of[one])) for name in known}  # type: ignore[misc]

    @property
    def casts(self) -> int:
        """How many casts autocast has inserted, forward and backward, without those of recomputes."""
        return sum(row.casts + row.backward_casts for row in self.rows if row.inserted)

    @property
    def cast_bytes(self) -> int:
        """The bytes that they have written."""
        return sum(row.cast_bytes + row.backward_cast_bytes for row in self.rows if row.inserted)

    @property
    def recompute_casts(self) -> int:
        """How many casts were repeated in recomputes."""
        return sum(row.recompute_casts for row in self.rows if row.inserted)

    def __repr__(self) -> str:
        return report_text(self._title(), self._table(), self._remarks(), words=_WORDS, sentences=_SENTENCES)

    def _repr_html_(self) -> str:
        return report_html(self._title(), self._table(), self._remarks(), words=_WORDS, sentences=_SENTENCES)

    def _title(self) -> str:
        autocast = "autocast off" if self.autocast == "fp32" else f"autocast {self.autocast}"
        return f"dtypes by layer and operator: {autocast} on {self.device_type}, torch {self.torch_version}"

    def _table(self) -> list[tuple[str, ...]]:
        predicts = self.device_type != "cuda"
        headings = marked_all("layer", "operator", "calls", "in", "computes in", "out", "casts", "backward", "casts", "why")
        lines = []
        for row in self.rows[:_SHOWN]:
            line = (
                row.layer,
                row.text,
                str(row.calls or ""),
                "+".join(row.dtypes_in),
                "+".join(row.compute),
                "+".join(row.dtypes_out),
                _casts_text(row.casts, row.cast_bytes),
                "+".join(row.backward_compute),
                _casts_text(row.backward_casts, row.backward_cast_bytes),
                row.why,
            )
            lines.append((*line, row.on_cuda or "") if predicts else line)
        return [(*headings, marked("list on CUDA (predicted)")) if predicts else headings, *lines]

    def _remarks(self) -> list[str]:
        hidden = len(self.rows) - _SHOWN
        remarks = [f"… and {hidden} more: .rows"] if hidden > 0 else []
        remarks.append(f"Casts inserted, forward and backward: {self.casts}, which write {self.cast_bytes:,} bytes.")
        if self.recompute_casts:
            remarks.append(f"Recomputes repeat {self.recompute_casts} casts.")
        return remarks


@interrupts_noted()
def dtype_map(loop: LiveLoop, batch: tuple[Any, Any], loss_fn: LossFunction) -> DtypeMap:
    """Run a forward and a backward pass with the settings in force, and see in which formats every operator computes.

    Parameters
    ----------
    loop
        Whose model and settings; between two steps. No optimizer steps, and everything is as before afterwards.
    batch
        ``(inputs, targets)``; copies on the model's device are used.
    loss_fn
        ``loss_fn(model(inputs), targets)``; several inputs are given as `amp_widgets.core.model_call.call_model` says.

    Raises
    ------
    RunError
        When a step is in progress, a run is training, the model is compiled, or the batch is no pair.

    Notes
    -----
    Nothing is looked up that can be seen: casts, formats and the region are observed, above and below autocast. A table of
    torch's lists says which list an operator is on. The loss is not scaled, which changes no format.
    """
    settings, device_type = loop.settings, loop.device.type
    with trial(loop, batch, loss_fn, verb="dtype_map") as tried:
        checkpointed = Checkpointing(tried.model).active
        kept = Fp32Layers(tried.model).active
        with OperatorWatch(tried.model, device_type, off=settings.autocast == "fp32", kept=kept) as watch:
            tried.run(settings.autocast)
    return DtypeMap(
        rows=tuple(_row(seen, device_type) for seen in watch.seen),
        types=watch.types,
        autocast=settings.autocast,
        checkpointed=checkpointed,
        fp32_layers=kept,
        device_type=device_type,
        torch_version=torch.__version__,
    )


_SHOWN = 60
_WORDS = (0, 1, 3, 4, 5, 7, 9, 10)
_SENTENCES = (9, 10)


def _with_parents(layer: str) -> Iterator[str]:
    yield layer
    while "." in layer:
        layer = layer.rpartition(".")[0]
        yield layer
    if layer not in (MODEL, LOSS):
        yield MODEL


def _casts_text(count: int, nbytes: int) -> str:
    return f"{count} ({nbytes:,} B)" if count else ""


def _row(seen: Seen, device_type: str) -> OperatorDtypes:
    fields = {field.name: getattr(seen, field.name) for field in dataclasses.fields(seen) if field.name not in ("inside", "ops")}
    no_prediction = device_type == "cuda" or all(map(is_left_alone, seen.dtypes_in))
    predicted = None if no_prediction else _list_of(seen, "cuda")
    return OperatorDtypes(**fields, why=_why(seen, device_type), on_cuda=predicted)


def _list_of(seen: Seen, device_type: str) -> AutocastList | None:
    lists = (autocast_list(operator, device_type) for operator in (seen.operator, *seen.ops))
    return next((one for one in lists if one is not None), None)


def _why(seen: Seen, device_type: str) -> str:
    whose = device_type.upper()
    name = f"{seen.inside} inside it" if seen.inside else seen.operator
    match seen.reason:
        case "off":
            text = "autocast is off"
        case "lower":
            text = f"{name} is on {whose}'s lower-precision list"
            if seen.compute == ("fp32",):
                text += "; the implementation taken here casts to fp32 again"
        case "fp32":
            text = f"{name} is on {whose}'s fp32 list"
        case "promote":
            text = f"{name} is on {whose}'s promote list: the widest of its inputs"
        case "disabled":
            text = "in a region with autocast disabled"
        case "kept":
            text = "in a layer that is kept in FP32"
        case "written":
            text = "a conversion written in the code"
        case "unknown":
            text = "called by compiled code, where only what comes after a cast is seen"
        case "through" if all(map(is_left_alone, seen.dtypes_in)) and _list_of(seen, device_type) is not None:
            text = f"autocast leaves {' and '.join(seen.dtypes_in)} alone, whatever list of {whose}'s {name} is on"
        case "through":
            text = f"on none of {whose}'s lists: it takes what comes" if knows(device_type) else "it takes what comes"
    if seen.function == seen.operator != "":
        return f"the backward of {seen.function}, a custom autograd.Function, runs without autocast unless it says otherwise"
    if seen.function:
        return f"inside {seen.function}, a custom autograd.Function: {text}"
    return text
