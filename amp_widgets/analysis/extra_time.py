"""What checkpointing each layer of a model adds to a step: its forward pass once more, timed in real passes.

The first pass after other layers were checkpointed is not like those that follow: memory that was given back to the operating
system is asked for anew, page by page, which can take as long as what is to be measured. So passes of one kind follow each
other, and of each such row the first does not count.

Layers that are alike, in what they are made of and in the shapes that they get and give, take the same time: each gets that of
all of them. A choice among layers whose times differ by chance alone would take those that were timed too short.

What else a machine does changes its pace, by half and more, for seconds on end. What is computed again in a pass and the rest
of that pass have the same pace: so times are taken as shares of that rest, which is what a pass takes with no layer checkpointed,
and become seconds by the median of all of them. Who times again later, with the same `LayerTimer`, has all earlier passes, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from amp_widgets.analysis.checkpoint_calls import CheckpointCall, watching_checkpoints
from amp_widgets.analysis.layer_kinds import noting_kinds
from amp_widgets.analysis.trial import LossFunction, Trial, check_loss, trial
from amp_widgets.core.checkpointing import Checkpointing
from amp_widgets.core.layers import named_layers
from amp_widgets.core.loop import LiveLoop
from amp_widgets.core.recompute import Recomputable, recomputing


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExtraTimes:
    """How long the layers of a model take, and what checkpointing them adds to a step.

    Attributes
    ----------
    forward_s
        Of each layer, all its calls in a forward pass together: the median over some passes, and over layers that are alike. As
        all seconds here, at the usual pace: what it takes of its pass, times what passes usually take.
    calls
        Of each layer in a pass.
    again_s
        The same where it was computed again in a backward pass, as a checkpointed layer or in one; up to the last tensor that is
        needed, where that ends it. Layers that were not are not here.
    slower
        So many times its forward pass a layer takes when it is computed again, by those that were in full.
    call_s
        What one call of a checkpointed layer takes besides: keeping what it needs, and being called again.
    together_s
        What both passes take longer with `together` checkpointed; NaN if that was not tried.
    together
        Some layers.
    factor
        What is computed again takes so many times as long, all in all.
    obtained
        How: a few words.
    """

    forward_s: Mapping[str, float]
    calls: Mapping[str, int]
    call_s: float
    again_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    slower: float = 1.0
    together_s: float = math.nan
    together: tuple[str, ...] = ()
    factor: float = 1.0
    obtained: str = ""

    def cost_s(self, name: str, *, spared: Iterable[str] = ()) -> float:
        """What checkpointing a layer adds to a step, 0 if it is not called; `spared` are layers in it that are not run again."""
        if not self.calls.get(name):
            return 0.0
        if name in self.again_s:  # what is spared was not run again then, or was, as other layers came after it
            again = self.again_s[name] - sum(self.again_s.get(each, 0.0) for each in spared)
        else:
            again = self.slower * (self.forward_s[name] - sum(self.forward_s.get(each, 0.0) for each in spared))
        return self.factor * (max(0.0, again) + self.calls[name] * self.call_s)

    def scaled(self, spared: Callable[[str], Iterable[str]]) -> ExtraTimes:
        """With the factor by which the costs of the layers in `together` add up to what these took together.

        It is not 1, as a step that holds less gets its memory faster, and as the caches are in another state.
        """
        sum_s = sum(self.cost_s(name, spared=spared(name)) for name in self.together)
        if not (math.isfinite(self.together_s) and sum_s > 0):
            return self
        factor = self.factor * max(self.together_s / sum_s, _LEAST_FACTOR)
        text = f"{self.obtained}, times {factor:.2f}: so much these come to where {len(self.together)} of them are checkpointed"
        return dataclasses.replace(self, factor=factor, obtained=text)


class LayerTimer:
    """Times layers in some real forward and backward passes; model, optimizers and random states are as before afterwards.

    What is computed again with `together` checkpointed is timed where it is, in the backward pass. What it comes to in all is
    corrected by what whole passes with and without take, as far as these agree with each other.

    Parameters
    ----------
    loop, batch, loss_fn, verb
        As in `amp_widgets.analysis.trial.trial`.
    together
        Layers, none within another, to be checkpointed in every second row of passes.
    check
        Called before each pass; what it raises ends it.

    Attributes
    ----------
    batch
        The one that was given; another of the same form may be put in its place, and None between two calls of `time`.
    """

    def __init__(
        self,
        loop: LiveLoop,
        batch: Any,
        loss_fn: LossFunction,
        *,
        verb: str,
        together: Sequence[str] = (),
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop = loop
        self.batch = batch
        self._loss_fn = loss_fn
        self._verb = verb
        self._together = tuple(together)
        self._check = check
        self._pairs: list[tuple[_Pass, _Pass]] = []
        self._kinds: dict[str, Hashable] = {}  # of each layer; those that are alike have the same
        self._all_checkpointed = False  # without, memory has run out
        self.round_s = 0.0
        """What the last round took, with the passes that do not count; seconds."""

    @property
    def passes(self) -> int:
        """Passes that were timed, of each kind."""
        return len(self._pairs)

    @property
    def pass_s(self) -> float:
        """What a pass takes with no layer checkpointed: the median, without those that took much longer than the fastest."""
        rests_s = [one.rest_s() for pair in self._pairs for one in pair]
        return statistics.median(rest_s for rest_s in rests_s if rest_s <= _DISTURBED * min(rests_s))

    def time(self, *, limit_s: float = 1.0, longest_s: float = 0.0) -> ExtraTimes:
        """Time them, once more if they were timed before; all counts together.

        Parameters
        ----------
        limit_s
            About so long, in seconds. A row of passes of each kind there is always.
        longest_s
            So long it may take to have two rows of each kind.

        Raises
        ------
        RunError
            As `trial` does.
        """
        with trial(self._loop, self.batch, self._loss_fn, verb=self._verb) as tried:
            passes = _Passes(tried, self._loop, limit_s, longest_s, self._check, self._kinds)
            try:
                found = None if self._all_checkpointed else passes.pairs(self._together)
            except torch.OutOfMemoryError:
                found = None
            if found is None:
                self._all_checkpointed = True
                self._pairs = [pair for pair in self._pairs if pair[0] is pair[1]]
                found = passes.alike(self._together)
        self.round_s = passes.round_s
        self._pairs += found
        return self._times()

    def _times(self) -> ExtraTimes:
        loop, together, kinds, pairs, pass_s = self._loop, self._together, self._kinds, self._pairs, self.pass_s
        counted = [plain.calls.seconds(pass_s / plain.rest_s()) for plain, _ in pairs]
        names = dict.fromkeys(name for one in counted for name in one)
        broken_off = {name for _, other in pairs for name in other.again.broken_off}
        forward_s = _same_for_alike(counted, kinds)
        again_s = _same_for_alike(
            [other.again.seconds(pass_s / other.rest_s()) for _, other in pairs],
            {name: (kind, name in broken_off) for name, kind in kinds.items()},
        )
        in_full = again_s.keys() & forward_s.keys() - broken_off
        whole_s = sum(forward_s[name] for name in in_full)
        with torch.random.fork_rng(devices=[loop.device] if loop.device.type == "cuda" else []):
            call_s = _call_s(loop.device)
        return ExtraTimes(
            forward_s=forward_s,
            calls={name: max(len(one.get(name, ())) for one in counted) for name in names},
            call_s=call_s,
            again_s=again_s,
            slower=sum(again_s[name] for name in in_full) / whole_s if whole_s > 0 else 1.0,
            together_s=_together_s(pairs, call_s, pass_s) if together else math.nan,
            together=together,
            obtained=(
                f"layers timed on {loop.device} where they are computed again, or else in the forward pass, median of "
                f"{len(counted)} real pass{'es' * (len(counted) > 1)}, plus {1e3 * call_s:.2f} ms for each call"
            ),
        )


def _same_for_alike(passes: Sequence[Mapping[str, Sequence[float]]], kinds: Mapping[str, Hashable]) -> dict[str, float]:
    """Of each layer, what all its calls in a pass take: the median over all passes and all layers of its kind."""
    of_kind: dict[Hashable, list[float]] = {}
    names = dict.fromkeys(name for one in passes for name in one)
    for name in names:
        of_kind.setdefault(kinds.get(name, name), []).extend(sum(one[name]) for one in passes if name in one)
    return {name: statistics.median(of_kind[kinds.get(name, name)]) for name in names}


def _together_s(pairs: Sequence[tuple[_Pass, _Pass]], call_s: float, pass_s: float) -> float:
    """What passes with some layers checkpointed take more: what they compute again, and what the pairs differ by.

    Each counts by how sure it is, by the inverse of its variance. The pairs say what is asked for, with the noise of whole
    passes; what is computed again is nearly free of it, but misses what else changes: a step that holds less gets its memory
    faster, and the caches are in another state.
    """
    again_s = statistics.median(pass_s * other.again_s() / other.rest_s() + len(other.recomputes) * call_s for _, other in pairs)
    more_s = [pass_s * (other.whole_s() / plain.whole_s() - 1) for plain, other in pairs if plain is not other]
    if not more_s:
        return again_s or math.nan
    if again_s <= 0:
        return statistics.median(more_s)
    count = len(more_s)
    if count < _SAYING:
        return again_s
    missed_s2 = (_MISSED * again_s) ** 2
    error_s2 = statistics.variance(more_s) / count * (count - 1) / (count - 3)  # of Student's t, as the variance is not known
    weight = missed_s2 / (missed_s2 + error_s2)
    return again_s + weight * (statistics.median(more_s) - again_s)


_MOST_ROUNDS = 6
_IN_A_ROW = 2
"""Passes of a kind that count, one after the other, as long as there is time."""
_SAYING = 4
"""Of fewer pairs it cannot be told how sure they are."""
_MISSED = 0.2
"""What is computed again misses about so much of what a step takes more: a fifth, in both directions, on GPTs and ResNets."""
_DISTURBED = 2.0
"""A pass that took more than so many times the fastest one is not what passes take."""
_REPETITIONS = 12
_LEAST_FACTOR = 0.05
"""On a machine that is busy with something else, passes that do more may take less time; what costs nothing would be chosen."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Pass:
    """Moments of a forward and a backward pass: times, or events of a GPU, to be read when all is done."""

    begin: Any
    end: Any
    calls: _Calls
    again: _Calls
    recomputes: Sequence[tuple[Any, Any]]

    def whole_s(self) -> float:
        """Of both passes."""
        return _seconds(self.begin, self.end)

    def again_s(self) -> float:
        """Seconds of all calls of checkpointed layers that were computed again."""
        return sum(_seconds(*call) for call in self.recomputes)

    def rest_s(self) -> float:
        """Of both passes, without what was computed again: about what they take with no layer checkpointed."""
        return self.whole_s() - self.again_s()


class _Calls:
    """The beginning and the end of each call of each layer, as moments."""

    def __init__(self) -> None:
        self.broken_off: set[str] = set()
        """Layers in which something has ended the pass."""
        self._moments: dict[str, list[tuple[Any, Any]]] = {}

    def add(self, name: str, begun: Any, ended: Any) -> None:
        """One more."""
        self._moments.setdefault(name, []).append((begun, ended))

    def seconds(self, pace: float) -> dict[str, list[float]]:
        """Of each call of each layer, times `pace`."""
        return {name: [pace * _seconds(*call) for call in calls] for name, calls in self._moments.items()}


class _Passes:
    """Runs passes of a kind, the first of which does not count."""

    def __init__(
        self,
        tried: Trial,
        loop: LiveLoop,
        limit_s: float,
        longest_s: float,
        check: Callable[[], None],
        kinds: dict[str, Hashable],
    ) -> None:
        self._tried = tried
        self._limit_s = limit_s
        self._longest_s = max(limit_s, longest_s)
        self._begun_s = time.perf_counter()
        self._check = check
        self._autocast = loop.settings.autocast
        self._names = {id(module): name for name, module in named_layers(tried.model).items()}
        self._kinds = kinds
        self.round_s = 0.0
        self._now: Callable[[], Any] = _event if loop.device.type == "cuda" else time.perf_counter

    def pairs(self, names: Sequence[str]) -> list[tuple[_Pass, _Pass]]:
        """Passes with no layer checkpointed, each with one with these; with the same again if there are none."""

        def pairs() -> list[tuple[_Pass, _Pass]]:
            plain = self._row(())
            return list(zip(plain, self._row(names) if names else plain, strict=False))  # there may be no time for a whole row

        return self._rounds(pairs)

    def alike(self, names: Sequence[str]) -> list[tuple[_Pass, _Pass]]:
        """Passes with these checkpointed, each twice."""
        return self._rounds(lambda: [(each, each) for each in self._row(names)])

    def _rounds(self, run: Callable[[], list[tuple[_Pass, _Pass]]]) -> list[tuple[_Pass, _Pass]]:
        """One, and more while at least half of the next is within the limit, which is a longer one for the second."""
        found = run()
        self.round_s = self._passed_s
        for done in range(1, _MOST_ROUNDS):
            if self._passed_s * (1 + 0.5 / done) > (self._limit_s if done > 1 else self._longest_s):
                break
            found += run()
        return found

    def _row(self, names: Sequence[str]) -> list[_Pass]:
        self._tried.checkpoint(names)
        self._run()
        row = [self._run()]
        while len(row) < _IN_A_ROW and self._passed_s < self._longest_s:
            row.append(self._run())
        return row

    @property
    def _passed_s(self) -> float:
        return time.perf_counter() - self._begun_s

    def _run(self) -> _Pass:
        self._check()
        self._tried.begin()
        calls, again = _Calls(), _Calls()
        first = not self._kinds  # which does not count
        noted = noting_kinds(self._names, self._kinds) if first else contextlib.nullcontext()
        with noted, _timed(self._names, self._now, calls, again), _timed_again(self._names, self._now, again) as recomputes:
            begin = self._now()
            check_loss(self._tried.forward(self._autocast)).backward()
            end = self._now()
        return _Pass(begin=begin, end=end, calls=calls, again=again, recomputes=recomputes)


@contextlib.contextmanager
def _timed(names: Mapping[int, str], now: Callable[[], Any], calls: _Calls, again: _Calls) -> Iterator[None]:
    """Note the calls of layers in a forward pass within, and those that are parts of a recompute."""
    open_calls: list[tuple[int, Any]] = []

    def before(module: nn.Module, args: Any) -> None:
        if id(module) in names:
            open_calls.append((id(module), now()))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if open_calls and open_calls[-1][0] == id(module):
            ended, name = now(), names[id(module)]
            kept = again if recomputing() else calls
            kept.add(name, open_calls.pop()[1], ended)
            if output is None:  # also when a recompute has all that it needs
                kept.broken_off.add(name)

    handles = [register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _timed_again(names: Mapping[int, str], now: Callable[[], Any], again: _Calls) -> Iterator[list[tuple[Any, Any]]]:
    """Note the calls of checkpointed layers that are computed again within; gives the moments of all of them."""
    recomputes: list[tuple[Any, Any]] = []

    def begins(call: CheckpointCall) -> tuple[Callable[..., Any], Callable[[], None]]:
        recomputable = call.function
        if not isinstance(recomputable, Recomputable):  # the user's own, which is there without these, too
            return recomputable, _nothing
        name = names.get(id(recomputable.layer))

        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = now()
            try:
                output = recomputable(*args, **kwargs)
            except BaseException:  # most end so, when the last tensor that is needed is there
                again.broken_off.add(str(name))
                raise
            else:
                return output
            finally:
                recomputes.append((begun, now()))
                if name is not None:
                    again.add(name, *recomputes[-1])

        return timed, _nothing

    with watching_checkpoints(begins):
        yield recomputes


def _nothing() -> None:
    """Nothing is to be done at the end of a forward pass."""


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

    shortest = []  # as a pass this short is only ever made longer
    for names in ((), ("0",)):
        checkpointing.apply(names)
        pass_s()
        shortest.append(min(pass_s() for _ in range(_REPETITIONS)))
    checkpointing.close()
    return max(0.0, shortest[1] - shortest[0])
