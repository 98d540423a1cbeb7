"""How large the gradients of one step are: counted by powers of two on the device, layer by layer, without waiting for it."""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_forward_hook
from torch.utils import _pytree as pytree

from amp_widgets.core.array_readback import ArrayReadback
from amp_widgets.core.gradient_counts import BUCKETS, MODEL, CountedGradients, Family, GradientCounts, larger
from amp_widgets.core.layers import inner_model, named_layers
from amp_widgets.core.memory.compiled import frames_compiled, is_compiled
from amp_widgets.core.readback import Readback
from amp_widgets.core.unseen import unseen

KEPT = 16
SAMPLE_ELEMENTS = 1 << 15
"""A share among so many that were drawn has a standard error of 0.28 percentage points at most, of 0.05 where it is 1 percent."""
PARAMETER_PART = 8
"""Of a parameter's gradient the sample is a part of that: it takes time, and what matters of these is whether they overflow."""


def bucket_of(values: Tensor) -> Tensor:
    """The bucket of each number, int32; as finely as it takes to say of every power-of-two scale what fp16 would make of it.

    For the binary exponent e there are three, at ``3 * (e + 127)`` and after: the power of two itself, what is between, and what
    is so close to the next power of two that fp16 rounds to that (from ``2^(e+1) * (1 - 2^-12)`` on). So both edges are exact:
    2^-25 rounds to zero and the next larger number does not; 65520 rounds to infinity and the next smaller number does not.
    Before them are zero, and what fp32 has below 2^-126 in two more buckets, of which the second begins at 2^-126 * (1 - 2^-11);
    after them inf and NaN.

    Parameters
    ----------
    values
        Floating point, of any shape. fp64 is rounded to fp32 first.
    """
    bits = values.float().abs().view(torch.int32).clamp_(max=_A_NAN)
    buckets = (bits - 1).bitwise_right_shift_(23).add_(bits >> 23)
    return buckets.add_(bits.add_(_ROUNDS_UP).bitwise_right_shift_(23)).add_(1)


class GradientProbe:
    """Counts the gradients of some steps, and leaves no trace in the others.

    Gradients with respect to the outputs of layers are what fp16 really stores; they are seen where they enter the node of the
    graph that made the output, in the format of the output and summed up over all its uses. Each is counted once, for the
    innermost layer that returned it. No hook is put on a tensor, a module or a parameter of the user's: one global forward hook,
    for the step alone, tells which nodes to watch. A layer that is recomputed is counted once, as gradients flow through only one
    of its two graphs. Outputs that are complex are left out, as no format of 16 bits holds them.

    Of each tensor the largest absolute value is taken over all elements, so that inf, NaN and what would overflow are never
    missed. How many there are of each size is estimated from a random sample where a tensor is large.

    Parameters
    ----------
    model
        Whose layers; only weakly referenced.
    every
        Count in every n-th step; 0 only on request.
    sample
        How many elements of a large tensor are put into buckets, see `places_among`; None for all. Of
        parameters it is one `PARAMETER_PART` of that. A tensor with no more is counted in full.

    Notes
    -----
    Nothing waits for the device. Neither the user's tensors nor the random state are touched: a step comes out bit by bit as it
    would without.

    A share that is estimated from a sample of n has a standard error of ``sqrt(p (1 - p) / n)`` at most: 0.28 percentage points
    with `SAMPLE_ELEMENTS`, where half of the elements are meant, and less where few are; 0.78 for parameters.

    A step that is counted takes longer by some 0.1 to 0.3 ms on a CPU for each tensor that is looked at: by 40 to 60 percent
    where the step is small. So a dashboard counts every tenth step, which takes 3 to 6 percent of the time on the whole;
    `tests/benchmarks/numerics.py` prints both.
    """

    def __init__(self, model: nn.Module, *, every: int = 0, sample: int | None = SAMPLE_ELEMENTS) -> None:
        self.every = every
        self.sample = sample
        self._models = WatchedModels([("", model)])
        self._wanted = False
        self._open: _OpenCount | None = None
        self._arriving: collections.deque[_Arriving] = collections.deque()
        self._counts: collections.deque[GradientCounts] = collections.deque(maxlen=KEPT)
        self._lock = threading.Lock()
        self._why_not: str | None = None

    # ---- what is asked of it, from any thread -------------------------------------------------------------------------

    def count_next_step(self) -> None:
        """Count the gradients of the step that begins next."""
        self._wanted = True

    @property
    def pending(self) -> bool:
        """Whether a step was asked for, or is being counted, or its numbers have not arrived."""
        if self._arriving:
            self._take_in(wait=False)
        return self._wanted or self._open is not None or bool(self._arriving)

    @property
    def counts(self) -> tuple[GradientCounts, ...]:
        """Of the steps whose numbers have arrived, the newest last, at most `KEPT`; the same objects every time. Never waits."""
        self._take_in(wait=False)
        return tuple(self._counts)

    def newest(self, *, wait: bool = False) -> GradientCounts | None:
        """The newest of `counts`; with `wait`, of the last step that was counted, waiting for the device if need be."""
        self._take_in(wait=wait)
        return self._counts[-1] if self._counts else None

    @property
    def why_not(self) -> str | None:
        """Why the last step that was to be counted was not; None when it was."""
        return self._why_not

    # ---- told by the loop, on the training thread ---------------------------------------------------------------------

    def watch(self, models: Iterable[tuple[str, nn.Module]]) -> None:
        """Count in these models from now on; where they are several, their names come before those of their layers."""
        self._models = WatchedModels(models)

    def begin(self, step: int) -> bool:
        """A step begins, before its first forward pass. Whether it is counted."""
        if not self._wanted and (self.every <= 0 or step % self.every):
            return False  # hot
        self.abandon()
        self._wanted = False
        self._why_not = self._why_compiled()
        if self._why_not is not None:
            return False
        self._open = _OpenCount(self._models.alive(), step, self.sample)
        return True

    def end(self, scale: Tensor | float | None) -> None:
        """The step is over.

        Parameters
        ----------
        scale
            The loss scale that was used, on the device perhaps; None where the loss was not scaled.
        """
        opened, self._open = self._open, None
        if opened is None:
            return
        opened.stop()
        if opened.compiled:
            self._why_not = _COMPILED
            return
        self._arriving.append(opened.arriving(1.0 if scale is None else scale))
        if len(self._arriving) > KEPT:  # else it is left to who asks, off the step's path
            self._take_in(wait=False)

    def abandon(self) -> None:
        """The step will not end."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.stop()

    def forget_from(self, step: int) -> None:
        """Let go of what was counted in this step and in later ones."""
        self._take_in(wait=True)
        with self._lock:
            kept = [counts for counts in self._counts if counts.step < step]
            self._counts.clear()
            self._counts.extend(kept)

    def close(self) -> None:
        """Let go of the model; what was counted stays."""
        self.abandon()
        self._wanted, self.every, self._models = False, 0, WatchedModels(())
        self._take_in(wait=True)

    def _why_compiled(self) -> str | None:
        # a global hook would have everything compiled anew
        if frames_compiled() or any(is_compiled(module) for _, model in self._models.alive() for module in model.modules()):
            return _COMPILED
        return None

    def _take_in(self, *, wait: bool) -> None:
        with self._lock:
            while self._arriving and (wait or self._arriving[0].ready()):
                self._counts.append(self._arriving.popleft().counts())


class WatchedModels:
    """Models with names, which it does not keep alive."""

    def __init__(self, models: Iterable[tuple[str, nn.Module]]) -> None:
        self._models = [(name, weakref.ref(model)) for name, model in models]

    def alive(self) -> list[tuple[str, nn.Module]]:
        """Those that are there."""
        return [(name, model) for name, reference in self._models if (model := reference()) is not None]


def gradient_node(parameter: Tensor) -> Any:
    """The node of the graph through which a leaf gets its gradient, to be kept while it is used; None for what gets none."""
    if not parameter.requires_grad or not parameter.is_leaf:
        return None
    return torch.autograd.graph.get_gradient_edge(parameter).node


def drawn(gradient: Tensor, chosen: Tensor) -> Tensor:
    """The elements at these places, as they come when a tensor is flattened; of shape (n,)."""
    if gradient.is_contiguous():
        return gradient.view(-1).index_select(0, chosen)  # twice as fast as take
    return gradient.take(chosen)


def places_among(elements: int, where: Tensor) -> Tensor:
    """For `drawn`: one from each of n equal parts, int64 of shape (n,).

    Each element is as likely as any other, so that no layout of the tensor can agree with the sample's, as it can with every
    n-th element.

    Parameters
    ----------
    where
        Of shape (n,), fp64: the i-th is a random number from i to below i + 1. See `random_places`.
    """
    return (where * (elements / where.numel())).to(torch.int64).clamp_(max=elements - 1)


def random_places(count: int, seed: int, device: torch.device) -> Tensor:
    """For `places_among`: others for every seed. The user's random state is left alone."""
    generator = torch.Generator(device).manual_seed(seed)
    parts = torch.arange(count, dtype=torch.float64, device=device)
    return parts.add_(torch.rand(count, generator=generator, dtype=torch.float64, device=device))


@functools.lru_cache(maxsize=32)  # up to 8 MB; finding them takes as long as all that is done with them in a step
def _places_on_cpu(elements: int, count: int, seed: int) -> Tensor:
    return places_among(elements, random_places(count, seed, torch.device("cpu")))


@functools.lru_cache(maxsize=2)
def _buckets_of_codes(dtype: torch.dtype) -> Tensor:
    """The bucket of each number of 16 bits, by its bits but for the sign; int32 of shape (2**15,)."""
    return bucket_of(torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(dtype))


_SAMPLES = 3
"""So many samples take turns on a CPU; no divisor of the intervals at which steps are mostly counted."""
_HELD_ELEMENTS = 1 << 15
"""At most so many, about, are put into buckets together: many small ops cost their start, large ones miss the cache."""
_A_NAN = 0x7F800001
_ROUNDS_UP = 0x1000
_COMPILED = "code made by torch.compile is in use, which hooks cannot look into without having it compiled anew"
_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
_HALF = frozenset({torch.float16, torch.bfloat16})
_DISABLED = torch._C._disabled_torch_dispatch_impl


def _each(total: int, sizes: Sequence[int], device: torch.device) -> Tensor:
    """Where the buckets of each sample begin, once for every element of it; int32 of shape (total,)."""
    repeats = torch.tensor(sizes)
    if device.type == "cuda":
        repeats = repeats.pin_memory().to(device, non_blocking=True)  # else the copy would wait for the device
    begins = torch.arange(0, len(sizes) * BUCKETS, BUCKETS, dtype=torch.int32, device=device)
    return begins.repeat_interleave(repeats, output_size=total)


_WIDE_LAYERS: tuple[type[nn.Module], ...] = (
    nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.Embedding, nn.EmbeddingBag,
)  # fmt: skip
"""None of their operators is in autocast's list for 16 bits, nor do they cast their parameters."""

_Key = tuple[str, Family, torch.dtype, torch.device]


class _Row:
    __slots__ = ("arrivals", "at", "elements", "looked_at", "wide")

    def __init__(self, at: int, wide: bool) -> None:
        self.at = at
        self.wide = wide
        self.arrivals = 0
        self.elements = 0
        self.looked_at = 0


_Line = tuple[int, float]
"""A row, and how many elements each one stands for that was looked at."""


class _Held:
    """Samples on one device that are not in buckets yet, and those that are: each tensor has a line for each of its rows."""

    __slots__ = ("buckets", "elements", "lines", "one", "peak_of", "peaks", "places", "samples", "where")

    def __init__(self, device: torch.device) -> None:
        self.one = torch.ones((), dtype=torch.int32, device=device)
        self.where: dict[int, Tensor] = {}  # random numbers, the same for all tensors of the step, by the size of the sample
        self.places: dict[tuple[int, int], Tensor] = {}  # of a sample, by the number of elements and its size
        self.samples: list[tuple[_Line, Tensor]] = []
        self.elements = 0
        self.buckets: list[Tensor] = []
        self.lines: list[list[_Line]] = []
        self.peaks: list[Tensor] = []  # the smallest and the largest element of each tensor in turn
        self.peak_of: list[tuple[int, str]] = []  # a row and the name of a parameter


class _OpenCount:
    """The step that is being counted."""

    def __init__(self, models: Sequence[tuple[str, nn.Module]], step: int, sample: int | None) -> None:
        self.step = step
        self.compiled = False
        self._frames = frames_compiled()
        self._sample = sample
        self._over = False
        self._rows: dict[_Key, _Row] = {}
        self._notes: dict[str, None] = {}
        self._seen: set[tuple[int, int, int]] = set()
        self._layer_of: dict[int, str] = {}
        self._nodes: list[Any] = []
        self._held: dict[torch.device, _Held] = {}
        self._handles: list[Any] = []
        with unseen():  # finding a node takes an op
            for prefix, model in models:
                self._watch_parameters(prefix, model)
        self._handles.append(register_module_forward_hook(self._returned))

    def stop(self) -> None:
        """Count no more, and take off all hooks."""
        self._over = True
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes = [], []
        self._layer_of.clear()
        self.compiled = self.compiled or frames_compiled() != self._frames

    def arriving(self, scale: Tensor | float) -> _Arriving:
        held = list(self._held.values())
        with unseen():
            for one in held:
                self._add_held(one)
            peaks = [torch.stack(one.peaks) for one in held if one.peaks]
        return _Arriving(
            step=self.step,
            keys=list(self._rows),
            rows=list(self._rows.values()),
            lines=[line for one in held for lines in one.lines for line in lines],
            arrays=ArrayReadback([buckets for one in held for buckets in one.buckets]),
            peak_of=[of for one in held for of in one.peak_of],
            peaks=ArrayReadback(peaks),
            scale=Readback([scale]),
            notes=tuple(self._notes),
        )

    def _watch_parameters(self, prefix: str, model: nn.Module) -> None:
        root = inner_model(model)
        model_name = prefix or MODEL
        for name, module in ((model_name, root), *named_layers(model).items()):
            layer = f"{prefix}.{name}" if prefix and module is not root else name
            if id(module) in self._layer_of:
                continue
            self._layer_of[id(module)] = layer
            for own_name, parameter in module._parameters.items():
                node = None if parameter is None else gradient_node(parameter)
                if parameter is not None and node is not None:
                    wide = parameter.is_complex() or (parameter.dtype == torch.float32 and isinstance(module, _WIDE_LAYERS))
                    arrived = functools.partial(self._arrived, layer, "parameter", own_name, wide, 0)
                    self._handles.append(node.register_prehook(arrived))
                    self._nodes.append(node)

    def _returned(self, module: nn.Module, args: Any, output: Any) -> None:
        if is_compiling():
            self.compiled = True
            return
        layer = self._layer_of.get(id(module))
        if layer is None or self._over or not torch.is_grad_enabled():
            return
        try:
            self._watch_output(layer, output)
        except Exception as error:  # of what is only watched, never of the training
            self._leave_out(layer, error)

    def _watch_output(self, layer: str, output: Any) -> None:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return  # within torch.func a gradient is no number yet
        for tensor in (output,) if isinstance(output, Tensor) else pytree.tree_leaves(output):
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                continue
            node = tensor.grad_fn
            if node is None:
                continue
            key = (threading.get_ident(), node._sequence_nr(), tensor.output_nr)
            if key not in self._seen:  # an outer layer may return what an inner one has made
                self._seen.add(key)
                arrived = functools.partial(self._arrived, layer, "output", "", False, tensor.output_nr)
                self._handles.append(node.register_prehook(arrived))

    def _arrived(self, layer: str, family: Family, name: str, wide: bool, at: int, gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[at]
        if gradient is None or self._over or not gradient.numel():
            return
        try:
            with unseen():
                self._count(layer, family, name, wide, gradient)
        except Exception as error:
            self._leave_out(layer, error)

    def _count(self, layer: str, family: Family, name: str, wide: bool, gradient: Tensor) -> None:
        if type(gradient).__torch_dispatch__ is not _DISABLED:
            raise TypeError(f"its gradient is a {type(gradient).__name__}")
        if gradient.layout != torch.strided:
            gradient = gradient._values()
        key = (layer, family, gradient.dtype, gradient.device)
        if gradient.is_complex():
            gradient = torch.view_as_real(gradient.resolve_conj())
        held = self._held.get(gradient.device)
        if held is None:
            held = self._held[gradient.device] = _Held(gradient.device)
        peak = torch.stack(torch.aminmax(gradient)).float()
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = _Row(len(self._rows), wide)
        elements = gradient.numel()
        row.arrivals += 1
        row.elements += elements
        held.peaks.append(peak)
        held.peak_of.append((row.at, name))
        sample = elements if self._sample is None else self._sample
        if family == "parameter" and self._sample is not None:
            sample = -(-sample // PARAMETER_PART)
        picked = gradient.reshape(-1) if elements <= sample else drawn(gradient, self._places(held, elements, sample))
        row.looked_at += picked.numel()
        line = (row.at, elements / picked.numel())
        if self._sample is None or picked.numel() >= _HELD_ELEMENTS:
            for part in picked.split(_HELD_ELEMENTS) if picked.is_cpu else (picked,):
                self._add(held, [(line, part)])
            return
        held.samples.append((line, picked.to(torch.float32, copy=True)))  # the gradient itself is to be free again
        held.elements += picked.numel()
        if held.elements >= _HELD_ELEMENTS:
            self._add_held(held)

    def _places(self, held: _Held, elements: int, sample: int) -> Tensor:
        device = held.one.device
        if device.type == "cpu":
            return _places_on_cpu(elements, sample, self.step % _SAMPLES)
        places = held.places.get((elements, sample))
        if places is None:
            if sample not in held.where:
                held.where[sample] = random_places(sample, self.step, device)
            places = held.places[elements, sample] = places_among(elements, held.where[sample])
        return places

    def _add_held(self, held: _Held) -> None:
        samples, held.samples, held.elements = held.samples, [], 0
        try:
            if samples:
                self._add(held, samples)
        except Exception as error:
            self._leave_out("one part of the gradients", error)

    def _add(self, held: _Held, samples: list[tuple[_Line, Tensor]]) -> None:
        """Put into buckets, all of these in one go."""
        if len(samples) == 1:
            values = samples[0][1]
            if values.is_cpu and values.dtype in _HALF:  # looked up they take half the time
                codes = values.view(torch.int16).bitwise_and(0x7FFF).to(torch.int32)
                places = _buckets_of_codes(values.dtype).index_select(0, codes)
            else:
                places = bucket_of(values)
        else:
            places = bucket_of(torch.cat([numbers for _, numbers in samples]))
            places.add_(_each(places.numel(), [numbers.numel() for _, numbers in samples], places.device))
        if places.is_cpu:
            buckets = torch.bincount(places, minlength=len(samples) * BUCKETS)  # half the time, but elsewhere it waits
        else:
            buckets = torch.zeros(len(samples) * BUCKETS, dtype=torch.int32, device=places.device)
            buckets.index_add_(0, places, held.one.expand(places.numel()))
        held.buckets.append(buckets.view(-1, BUCKETS))
        held.lines.append([line for line, _ in samples])

    def _leave_out(self, layer: str, error: Exception) -> None:
        words = str(error).splitlines()
        self._notes[f"{layer} was not counted: {type(error).__name__}: {words[0] if words else ''}"] = None


@dataclasses.dataclass(kw_only=True, slots=True)
class _Arriving:
    """A step that was counted, its numbers perhaps still on the device."""

    step: int
    keys: list[_Key]
    rows: list[_Row]
    lines: list[_Line]  # of the arrays, one after the other
    arrays: ArrayReadback
    peak_of: list[tuple[int, str]]
    peaks: ArrayReadback
    scale: Readback
    notes: tuple[str, ...]

    def ready(self) -> bool:
        return self.arrays.ready() and self.peaks.ready() and self.scale.ready()

    def counts(self) -> GradientCounts:
        found = np.zeros((len(self.rows), BUCKETS))
        for (at, weight), line in zip(self.lines, (line for array in self.arrays.arrays() for line in array), strict=True):
            found[at] += weight * line
        peaks: list[dict[str, float]] = [{} for _ in self.rows]
        values = (float(peak) for array in self.peaks.arrays() for peak in np.abs(array).max(axis=1))
        for (at, name), peak in zip(self.peak_of, values, strict=True):
            peaks[at][name] = larger(peak, peaks[at].get(name, 0.0))
        rows = tuple(
            CountedGradients(
                layer=layer,
                family=family,
                dtype=_NAMES.get(dtype, str(dtype).removeprefix("torch.")),
                arrivals=row.arrivals,
                elements=row.elements,
                looked_at=row.looked_at,
                counts=found[row.at],
                peaks=peaks[row.at],
                wide=row.wide,
            )
            for (layer, family, dtype, _), row in zip(self.keys, self.rows, strict=True)
        )
        return GradientCounts(step=self.step, scale=self.scale.values()[0], rows=rows, notes=self.notes)
