"""What checkpointing each layer of a model adds to a step: its forward pass once more, timed in real passes."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from amp_widgets.analysis.trial import LossFunction, Trial, check_loss, trial
from amp_widgets.core.checkpointing import Checkpointing
from amp_widgets.core.layers import named_layers
from amp_widgets.core.loop import LiveLoop
from amp_widgets.core.recompute import recomputing


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExtraTimes:
    """How long the layers of a model take, and what checkpointing them adds to a step.

    Attributes
    ----------
    forward_s
        Of each layer, all its calls in a forward pass together: the median over some passes.
    calls
        Of each layer in a pass.
    call_s
        What one call of a checkpointed layer takes besides: keeping what it needs, and being called again.
    together_s
        What both passes took longer with `together` checkpointed: the median over some pairs of runs; NaN if that was not tried.
    together
        Some layers.
    factor
        A layer that is computed again takes so many times its forward pass.
    obtained
        How: a few words.
    """

    forward_s: Mapping[str, float]
    calls: Mapping[str, int]
    call_s: float
    together_s: float = math.nan
    together: tuple[str, ...] = ()
    factor: float = 1.0
    obtained: str = ""

    def cost_s(self, name: str, *, spared: Iterable[str] = ()) -> float:
        """What checkpointing a layer adds to a step, 0 if it is not called; `spared` are layers in it that are not run again."""
        if not self.calls.get(name):
            return 0.0
        again = self.forward_s[name] - sum(self.forward_s.get(each, 0.0) for each in spared)
        return self.factor * (max(0.0, again) + self.calls[name] * self.call_s)

    def scaled(self, spared: Callable[[str], Iterable[str]]) -> ExtraTimes:
        """With the factor by which the costs of the layers in `together` add up to what these took together.

        It is not 1, as a step that holds less gets its memory faster, and as the caches are in another state.
        """
        sum_s = sum(self.cost_s(name, spared=spared(name)) for name in self.together)
        if not (math.isfinite(self.together_s) and sum_s > 0):
            return self
        factor = self.factor * min(max(self.together_s / sum_s, 1 / _MOST_FACTOR), _MOST_FACTOR)
        text = (
            f"{self.obtained}, times {factor:.2f}: so much longer these passes took with {len(self.together)} layers checkpointed"
        )
        return dataclasses.replace(self, factor=factor, obtained=text)


def extra_times(loop: LiveLoop, batch: Any, loss_fn: LossFunction, *, verb: str, together: Sequence[str] = ()) -> ExtraTimes:
    """Time the layers in some real forward and backward passes; model, optimizers and random states are as before afterwards.

    Parameters
    ----------
    loop, batch, loss_fn, verb
        As in `amp_widgets.analysis.trial.trial`.
    together
        Layers, none within another, to be checkpointed in every second pass.

    Raises
    ------
    RunError
        As `trial` does.
    """
    together = tuple(together)
    with trial(loop, batch, loss_fn, verb=verb) as tried:
        passes = _Passes(tried, loop)
        try:
            pairs = passes.pairs(together)
        except torch.OutOfMemoryError:  # without checkpointing
            pairs = [(one, None) for one in passes.alike(together)]
    counted = [plain.layers_s() for plain, _ in pairs]
    names = dict.fromkeys(name for one in counted for name in one)
    more = [other.whole_s() - plain.whole_s() for plain, other in pairs if other is not None]
    with torch.random.fork_rng(devices=[loop.device] if loop.device.type == "cuda" else []):
        call_s = _call_s(loop.device)
    return ExtraTimes(
        forward_s={name: statistics.median(sum(one.get(name, ())) for one in counted) for name in names},
        calls={name: max(len(one.get(name, ())) for one in counted) for name in names},
        call_s=call_s,
        together_s=statistics.median(more) if more else math.nan,
        together=together if more else (),
        obtained=(
            f"each layer's forward pass timed on {loop.device}, median of {len(counted)} real passes, plus {1e3 * call_s:.2f} ms "
            "for each call"
        ),
    )


_FEWEST_PAIRS, _MOST_PAIRS = 3, 9
_PASSES_S = 1.0
"""After this time there are no more passes, if there were enough."""
_REPETITIONS = 12
_MOST_FACTOR = 3.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Pass:
    """Moments of a forward and a backward pass: times, or events of a GPU, to be read when all is done."""

    begin: Any
    end: Any
    calls: Mapping[str, Sequence[tuple[Any, Any]]]

    def layers_s(self) -> dict[str, list[float]]:
        """Seconds of each call of each layer in the forward pass."""
        return {name: [_seconds(*call) for call in calls] for name, calls in self.calls.items()}

    def whole_s(self) -> float:
        """Of both passes."""
        return _seconds(self.begin, self.end)


class _Passes:
    """Runs passes, the first of which, with cold memory and caches, do not count."""

    def __init__(self, tried: Trial, loop: LiveLoop) -> None:
        self._tried = tried
        self._autocast = loop.settings.autocast
        self._names = {id(module): name for name, module in named_layers(tried.model).items()}
        self._now: Callable[[], Any] = _event if loop.device.type == "cuda" else time.perf_counter

    def pairs(self, names: Sequence[str]) -> list[tuple[_Pass, _Pass | None]]:
        """Passes with no layer checkpointed, each followed by one with these, if there are any."""

        def pair() -> tuple[_Pass, _Pass | None]:
            return self._run(()), self._run(names) if names else None

        return self._some(pair)

    def alike(self, names: Sequence[str]) -> list[_Pass]:
        """Passes with these checkpointed."""
        return self._some(lambda: self._run(names))

    def _some(self, run: Callable[[], _T]) -> list[_T]:
        begun_s = time.perf_counter()
        found = [run()]
        while len(found) <= _FEWEST_PAIRS or (len(found) <= _MOST_PAIRS and time.perf_counter() - begun_s < _PASSES_S):
            found.append(run())
        return found[1:]

    def _run(self, names: Sequence[str]) -> _Pass:
        self._tried.checkpoint(names)
        self._tried.begin()
        with _timed(self._names, self._now) as calls:
            begin = self._now()
            check_loss(self._tried.forward(self._autocast)).backward()
            end = self._now()
        return _Pass(begin=begin, end=end, calls=calls)


_T = TypeVar("_T")


@contextlib.contextmanager
def _timed(names: Mapping[int, str], now: Callable[[], Any]) -> Iterator[dict[str, list[tuple[Any, Any]]]]:
    """The beginning and the end of each call of a layer in a forward pass within."""
    calls: dict[str, list[tuple[Any, Any]]] = {}
    open_calls: list[tuple[int, Any]] = []

    def before(module: nn.Module, args: Any) -> None:
        if id(module) in names and not recomputing():
            open_calls.append((id(module), now()))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if open_calls and open_calls[-1][0] == id(module):
            ended = now()
            calls.setdefault(names[id(module)], []).append((open_calls.pop()[1], ended))

    handles = [register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _call_s(device: torch.device) -> float:
    """What a checkpointed layer takes more than its computation, by one that computes next to nothing."""
    layer = nn.Sequential(nn.Tanh(), nn.Tanh())
    model = nn.Sequential(layer)
    checkpointing = Checkpointing(model)
    numbers = torch.zeros(8, device=device, requires_grad=True)

    def pass_s() -> float:
        begun_s = time.perf_counter()
        with torch.inference_mode(False), torch.enable_grad():
            model(numbers).sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begun_s

    medians = []
    for names in ((), ("0",)):
        checkpointing.apply(names)
        pass_s()
        medians.append(statistics.median(pass_s() for _ in range(_REPETITIONS)))
    checkpointing.close()
    return max(0.0, medians[1] - medians[0])
