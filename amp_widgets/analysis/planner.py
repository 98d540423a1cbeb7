"""From a memory budget to the layers to checkpoint: the cheapest set with which a step fits, verified by predicting that step."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from amp_widgets.analysis.choice import Choice, ChosenBy, chosen_by
from amp_widgets.analysis.corners import all_layers
from amp_widgets.analysis.extra_time import ExtraTimes, LayerTimer
from amp_widgets.analysis.fake_step import FakeSteps, PredictedStep, fake_steps
from amp_widgets.analysis.held_interrupt import interrupts_noted
from amp_widgets.analysis.loop_memory import EARLIER, NOTHING_BESIDES, Expected, besides_of, newest_peaks
from amp_widgets.analysis.peak_model import PeakModel, first_step_peak
from amp_widgets.analysis.plan import CURVE, PLAN, Alternative, Plan, PlanPoint
from amp_widgets.analysis.stoppable import CancelledError, check_not_cancelled
from amp_widgets.core.loop import LiveLoop
from amp_widgets.core.memory.budget import checked_budget
from amp_widgets.core.settings import AutocastName, Settings
from amp_widgets.errors import SettingsError

Layers = tuple[str, ...]
_Known = tuple[bool, AutocastName, Layers, bool, Layers]
"""Of a predicted step: whether gradients are kept, the format, layers in FP32, whether the loss is scaled, those checkpointed."""


def plan(
    loop: LiveLoop,
    *,
    budget_bytes: float,
    batch: tuple[Any, Any],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    cancelled: Callable[[], bool] = lambda: False,
) -> Plan:
    """Choose the layers to checkpoint so that a step stays within a budget and takes as little longer as can be.

    A step without checkpointing is predicted on fake tensors, with the other settings as they are in force. It tells what each
    layer holds and when, and so what checkpointing it would change at each moment. The cheapest set that is within the budget
    at all of them is looked for, and the step with that set is predicted, too: what is promised is the peak of that step, with
    what the first one with these layers needs besides, and a margin of 0.1 %, at most 4 kB. Where it is above the budget, the
    search goes on with less. A set that people would choose, such as all layers or every second, is taken instead if it fits and
    is cheaper.

    The newest steps of the run are compared with what is predicted for them: a loop that accumulates gradients, or keeps outputs
    or an average of the weights, holds more, and so will steps with other layers. See `amp_widgets.analysis.loop_memory`.

    Model, optimizers, random states and the settings in force are as before afterwards. Real forward and backward passes are run
    to time the layers.

    Parameters
    ----------
    loop
        Whose model, optimizers and settings; no step of its own may be in progress.
    budget_bytes
        What a step may hold at a time, by the count of `profile_step`: tensors, without what the allocator adds.
    batch
        ``(inputs, targets)``.
    loss_fn
        ``loss_fn(model(inputs), targets)``; several inputs are given as `amp_widgets.core.model_call.call_model` says.
    cancelled
        Asked before every step, pass and search; True ends it.

    Raises
    ------
    SettingsError
        When the budget is no number of bytes above 0.
    CancelledError
        When it was cancelled.
    RunError
        When the session has no optimizer or several models, a step is in progress, the model is compiled, the batch is no pair,
        or the loss is none that a backward pass can begin from.
    """
    budget = checked_budget(budget_bytes, "plan")
    with planning(loop, batch, loss_fn) as planner:
        return planner.plan(budget, cancelled=cancelled)


@contextlib.contextmanager
def planning(loop: LiveLoop, batch: tuple[Any, Any], loss_fn: Callable[[Any, Any], torch.Tensor]) -> Iterator[Planner]:
    """Plan for several budgets: what is learned for one serves for the others, as long as the format in force is the same.

    Parameters
    ----------
    loop, batch, loss_fn
        As in `plan`.

    Raises
    ------
    RunError
        As `plan` does.
    """
    with fake_steps(loop, batch, loss_fn, verb="plan") as steps:
        yield Planner(loop, steps, batch, loss_fn)


_ATTEMPTS = 8
"""Sets that are predicted until one fits."""
_CURVE = (0.05, 0.12, 0.2, 0.3, 0.42, 0.55, 0.7, 0.85)
"""Budgets of the curve, as shares of the way from the least peak to that with no layer checkpointed."""
_SEARCH_S, _LEAST_S, _CURVE_S = 1.0, 1.0, 0.1
"""For one choice."""
_TIMED_UNTIL_S, _MANY_TIMED_UNTIL_S = 1.5, 1.0
"""So long after the beginning, layers are timed. With many layers each prediction takes long, and there is less time for it."""
_TIMED_TWICE_S = 6.0
"""Where steps take long, they are timed for so long: a machine that does something else may do so for seconds."""
_ENOUGH_PASSES, _ROUND_S, _WHOLE_S = 16, 2.5, 4.5
"""With each plan they are timed once more until there are so many passes, if that takes no longer, and the plan no longer."""
_PREDICTING_S = 3.0
"""So long after the beginning, peaks on which nothing depends are estimated and no longer predicted; timing beyond that for
which there is always time does not count."""
_LIKELY = 1.02
"""A set whose estimate is above the budget by more than this factor is not tried."""
_HALF: tuple[AutocastName, ...] = ("bf16", "fp16")
_BATCHES, _ALTERNATIVES_S = 5, 1.5
"""Batch sizes that are tried; and when there is one that fits, no other after this time."""
_MANY = 100
"""With more layers, each prediction takes long: nothing is done that only makes a time or an alternative better."""


class Planner:
    """Plans for one model and batch; made by `planning`."""

    def __init__(self, loop: LiveLoop, steps: FakeSteps, batch: Any, loss_fn: Any) -> None:
        self._loop = loop
        self._cancelled: Callable[[], bool] = lambda: False
        self._steps = steps
        self._batch = batch
        self._loss_fn = loss_fn
        self._learned_for: object = None
        self._step_s = 0.0  # for predicting one
        self._budget = math.nan
        self._begun_s = self._timed_s = 0.0
        self._besides = NOTHING_BESIDES
        self._notes: tuple[str, ...] = ()
        self._known: dict[_Known, Expected] = {}

    def take(self, batch: Any) -> None:
        """Plan on another batch of the same form; None is none, so that the one before is not held between two plans."""
        self._batch = batch
        self._steps.take(batch)
        if self._learned_for is not None:
            self._timer.batch = batch

    @property
    def follows_numbers(self) -> bool:
        """Whether steps are run for their peaks, which may depend on the numbers in the batch."""
        return self._steps.because is not None

    @interrupts_noted()
    def plan(self, budget_bytes: float, *, cancelled: Callable[[], bool] = lambda: False) -> Plan:
        """The plan for a budget; see `plan`. After it was cancelled, this planner is not to be used any more.

        Raises
        ------
        SettingsError
            When the budget is no number of bytes above 0.
        CancelledError
            When it was cancelled.
        RunError
            As `plan` does.
        """
        self._budget = checked_budget(budget_bytes, "plan")
        self._cancelled = cancelled
        self._begun_s = time.perf_counter()
        self._timed_s = 0.0
        settings = self._loop.settings
        learned_for = settings.autocast, settings.fp32_layers, settings.scales_loss
        if self._learned_for != learned_for:
            self._learn()
            self._learned_for = learned_for
        elif self._timer.passes < _ENOUGH_PASSES and self._timer.round_s < _ROUND_S:
            self._time()
        self._compare_with_run()
        self._named["yours"] = settings.checkpointed
        self._chosen_by: ChosenBy = chosen_by()
        best = self._search()
        by = self._chosen_by
        if best is None:
            least = self._least()
            best = least if self._peaks[least] <= self._budget else None
        else:
            self._peak(self._least_by_estimate())
        if best is not None:
            best = self._improved(best)
        chosen = least if best is None else best
        self._time_once_more()
        points = self._points(chosen)
        return Plan(
            layers=chosen,
            budget_bytes=self._budget,
            predicted_peak_bytes=self._peaks[chosen],
            predicted_extra_seconds=self._cost_s(chosen),
            autocast=settings.autocast,
            fits=best is not None,
            least_peak_bytes=min(self._peaks.values()),
            obtained=self._obtained(),
            chosen_by=by,
            candidates=self._candidates,
            points=points,
            alternatives=self._alternatives(chosen) if best is None else (),
            notes=self._notes,
            fp32_layers=settings.fp32_layers,
        )

    def _learn(self) -> None:
        """Predict a step with no layer checkpointed, and time the layers."""
        loop = self._loop
        layers = loop.layers
        self._order = {layer.name: at for at, layer in enumerate(layers)}
        self._usable = [layer.name for layer in layers if layer.why_not is None and not layer.structural]
        self._candidates = len(self._usable)
        self._besides = NOTHING_BESIDES
        self._learn_peaks()
        everything = all_layers(layers)
        self._timer = LayerTimer(loop, self._batch, self._loss_fn, verb="plan", together=everything, check=self._check)
        until_s, longest_s = (_MANY_TIMED_UNTIL_S, 0.0) if self._candidates > _MANY else (_TIMED_UNTIL_S, _TIMED_TWICE_S)
        self._time(limit_s=max(self._begun_s + until_s - time.perf_counter(), 0.0), longest_s=longest_s)
        parts = [name for name in everything if name in self._model.names]
        root = max(2, math.ceil(math.sqrt(len(parts))))
        self._named: dict[str, Layers] = {
            "none": (),
            "all": everything,
            "every second": tuple(parts[::2]),
            "√n": tuple(part for at, part in enumerate(parts) if at % root),  # every √n-th keeps what it holds
        }

    def _time(self, *, limit_s: float = 0.0, longest_s: float = 0.0) -> None:
        """Time the layers, once more if they were timed before."""
        begun_s = time.perf_counter()
        self._times: ExtraTimes = self._timer.time(limit_s=limit_s, longest_s=longest_s).scaled(self._model.spared)
        self._timed_s += time.perf_counter() - begun_s
        self._pass_s = self._timer.pass_s
        self._learn_choice()

    def _time_once_more(self) -> None:
        """If there is time for it: where all passes before were slow, for what else the machine did, the layers were, too.

        All by the same factor, so that what was chosen as the cheapest still is.
        """
        passed_s = time.perf_counter() - self._begun_s
        too_late = passed_s + self._timer.round_s > _WHOLE_S
        if too_late or self._timer.passes >= _ENOUGH_PASSES or self._candidates > _MANY:
            return
        self._timer.time(limit_s=0.0)
        self._timed_s += self._timer.round_s
        faster = self._timer.pass_s / self._pass_s
        self._pass_s = self._timer.pass_s
        self._times = dataclasses.replace(self._times, factor=self._times.factor * faster)

    def _learn_peaks(self) -> None:
        """Predict a step with no layer checkpointed, with gradients kept or not."""
        self._steps.keeps_gradients = self._besides.keeps_gradients
        base = self._predict(checkpointed=())
        self._known[_known_as(self._besides.keeps_gradients, self._loop.settings, ())] = _expected(base)
        self._peaks: dict[Layers, float] = {(): self._besides.promised(base.peak_bytes)}
        self._model = _model_of(base, self._usable)
        self._least_known: Layers | None = None

    def _learn_choice(self) -> None:
        self._choice = self._choice_of(self._model)

    def _choice_of(self, model: PeakModel) -> Choice:
        return Choice(
            held_bytes=model.held_bytes,
            change_bytes=model.change_bytes,
            cost_s=np.array([self._cost_s([name]) for name in model.names]),
            exclusive=model.nested(),
            check=self._check,
        )

    def _predict(self, **settings: Any) -> PredictedStep:
        self._check()
        return self._steps.step(**settings)

    def _check(self) -> None:
        check_not_cancelled(self._cancelled, "plan")

    def _compare_with_run(self) -> None:
        """Find what the loop holds besides a plain step, and count it in all peaks."""
        measured = newest_peaks(self._loop)
        besides = self._besides
        if measured is not None:
            then = measured.settings
            with contextlib.suppress(SettingsError):  # a layer or a format of then, which is not there any more
                besides = besides_of(measured, self._expect(False, then), lambda: self._expect(True, then))
        counts = besides.keeps_gradients or besides.more_bytes > 0
        earlier = counts and measured is not None and _of_peak(measured.settings) != _of_peak(self._loop.settings)
        self._notes = (besides.note, *((EARLIER,) * earlier)) if besides.note else ()
        if besides == self._besides:
            return
        again = besides.keeps_gradients != self._besides.keeps_gradients
        self._besides = besides
        if again:
            self._learn_peaks()
            self._learn_choice()
        self._steps.keeps_gradients = besides.keeps_gradients
        plain = _known_as(besides.keeps_gradients, self._loop.settings, ())[:-1]
        known = {names: step.first_peak_bytes for (*how, names), step in self._known.items() if tuple(how) == plain}
        self._peaks = {names: besides.promised(peak) for names, peak in known.items()}

    def _expect(self, keeps_gradients: bool, settings: Settings, layers: Layers | None = None) -> Expected:
        """Of a step with the layers of these settings checkpointed, or with others, predicted once."""
        layers = self._ordered(settings.checkpointed) if layers is None else layers
        key = _known_as(keeps_gradients, settings, layers)
        if key not in self._known:
            before, self._steps.keeps_gradients = self._steps.keeps_gradients, keeps_gradients
            how = {name: getattr(settings, name) for name in ("autocast", "fp32_layers", "scaling")}
            try:
                self._known[key] = _expected(self._predict(checkpointed=layers, **how))
            finally:
                self._steps.keeps_gradients = before
        return self._known[key]

    # ---- sets of layers ---------------------------------------------------------------------------------------------

    def _peak(self, names: Iterable[str]) -> float:
        """Of the first step with these checkpointed: predicted, each set once."""
        key = self._ordered(names)
        if key not in self._peaks:
            begun_s = time.perf_counter()
            expected = self._expect(self._besides.keeps_gradients, self._loop.settings, key)
            self._peaks[key] = self._besides.promised(expected.first_peak_bytes)
            self._step_s = time.perf_counter() - begun_s
        return self._peaks[key]

    def _estimate(self, names: Iterable[str]) -> float:
        return self._besides.promised(self._model.peak_bytes(names))

    def _cost_s(self, names: Iterable[str]) -> float:
        """One inside another is computed again twice."""
        return sum(self._times.cost_s(name, spared=self._model.spared(name)) for name in names)

    def _ordered(self, names: Iterable[str]) -> Layers:
        return tuple(sorted(names, key=lambda name: self._order.get(name, len(self._order))))

    def _names(self, positions: Iterable[int]) -> Layers:
        return self._ordered(self._model.names[at] for at in positions)

    # ---- search -----------------------------------------------------------------------------------------------------

    def _search(self) -> Layers | None:
        """The cheapest set that is found to fit."""
        if self._estimate(self._least_by_estimate()) > _LIKELY * self._budget:
            return None
        limit = self._budget
        tried: list[frozenset[int]] = []
        for _ in range(_ATTEMPTS):
            found = self._cheapest(limit, tried, _SEARCH_S)
            if found is None:
                return None
            names = self._names(found)
            peak = self._peak(names)
            if peak <= self._budget:
                return names
            tried.append(found)
            # What it was estimated too low by now comes off, so that the next one is not above for the same reason.
            limit = min(limit, self._budget - (peak - self._estimate(names)))
        return None

    def _cheapest(self, limit: float, without: Sequence[frozenset[int]], time_limit_s: float) -> frozenset[int] | None:
        """The cheapest set by estimate; greedily where the solver finds none in time."""
        self._chosen_by = chosen_by()
        limit = self._besides.room(limit)
        found = self._choice.cheapest(limit, without=without, time_limit_s=time_limit_s)
        if found is None and (found := self._choice.greedily(limit, without=without)) is not None:
            self._chosen_by = "greedy"
        return found

    def _least(self) -> Layers:
        """About the set with the lowest peak: that of the sets that were predicted, with the one that is lowest by estimate.

        Where there are few layers, also of those that people would choose.
        """
        self._peak(self._least_by_estimate())
        for names in self._named.values() if self._candidates <= _MANY else ():
            if self._estimate(names) <= _LIKELY * min(self._peaks.values()):
                self._peak(names)
        return min(self._peaks, key=lambda each: (self._peaks[each], self._cost_s(each)))

    def _least_by_estimate(self) -> Layers:
        if self._least_known is None:
            self._least_known = self._names(self._choice.least(time_limit_s=_LEAST_S))
        return self._least_known

    def _improved(self, best: Layers) -> Layers:
        """That set, or one that fits, too, and is cheaper."""
        for names in (*self._named.values(), *self._prefixes(best)):
            if self._cost_s(names) < self._cost_s(best) and self._estimate(names) <= _LIKELY * self._budget:
                best = self._better(best, names)
        # Where estimates are too high, some layer may not be needed.
        excess = self._peaks[best] - self._estimate(best)
        for name in sorted(best, key=lambda name: -self._cost_s([name])):
            if self._candidates > _MANY and time.perf_counter() - self._begun_s + self._step_s > _PREDICTING_S:
                break
            rest = tuple(other for other in best if other != name)
            if self._estimate(rest) + min(0.0, excess) <= self._budget:
                best = self._better(best, rest)
        return best

    def _better(self, best: Layers, names: Layers) -> Layers:
        names = self._ordered(names)
        return names if self._cost_s(names) < self._cost_s(best) and self._peak(names) <= self._budget else best

    def _prefixes(self, best: Layers) -> list[Layers]:
        """Those that save most for their cost, taken one after the other while that is cheaper than `best`: the longest first."""
        limit, found, order = self._cost_s(best), [], self._choice.by_bytes_per_second()
        for count in range(1, len(order) + 1):
            names = self._names(order[:count])
            if self._cost_s(names) >= limit:
                break
            found.append(names)
        return found[: -_ATTEMPTS - 1 : -1]

    # ---- points and alternatives ------------------------------------------------------------------------------------

    def _points(self, chosen: Layers) -> tuple[PlanPoint, ...]:
        named = {label: names for label, names in self._named.items() if names or label == "none"} | {PLAN: chosen}
        least = self._least_by_estimate()
        low, high = self._estimate(least), self._peaks[()]
        curve: list[Layers] = [least]
        for share in _CURVE if high > low else ():
            found = self._cheapest(low + share * (high - low), (), _CURVE_S)
            if found is not None:
                curve.append(self._names(found))
        known = {self._ordered(names) for names in named.values()}
        points = [self._point(label, names) for label, names in named.items()]
        return tuple(points + [self._point(CURVE, names) for names in dict.fromkeys(curve) if names not in known])

    @property
    def _feasible(self) -> bool:
        return any(peak <= self._budget for peak in self._peaks.values())

    def _point(self, label: str, names: Layers) -> PlanPoint:
        key = self._ordered(names)
        passed_s = time.perf_counter() - self._begun_s - max(0.0, self._timed_s - _TIMED_UNTIL_S)
        limit_s = _PREDICTING_S if self._feasible else _PREDICTING_S / 2  # the rest is for what else would help
        if key not in self._peaks and passed_s + self._step_s < limit_s and self._steps.because is None:
            self._peak(key)
        predicted = key in self._peaks
        peak = self._peaks[key] if predicted else self._estimate(key)
        return PlanPoint(
            label=label,
            layers=key,
            peak_bytes=peak,
            extra_s=self._cost_s(key),
            predicted=predicted,
            fits=peak <= self._budget,
        )

    def _alternatives(self, least: Layers) -> tuple[Alternative, ...]:
        """A format of half the size, and the largest batch that fits, with the layers that need least; both if neither does."""
        batch = self._smaller_batch(least, self._peaks[least])
        half = next((name for name in _HALF if self._loop.support[name].available), None)
        in_half = None if half is None or self._loop.settings.autocast != "fp32" else self._least_in(half, least)
        found = [each for each in (in_half, batch) if each is not None]
        if in_half is not None and batch is not None and not (in_half.fits or batch.fits or self._candidates > _MANY):
            begin = batch.batch_size  # the smallest that runs: of what is too large even so, no more is to be known
            both = self._smaller_batch(in_half.changes["checkpointed"], in_half.peak_bytes, half, begin)
            found += [] if both is None else [both]
        return tuple(found)

    def _least_in(self, autocast: AutocastName, least: Layers) -> Alternative | None:
        """With the lowest peak that is found in another format: by a step in that format, or with what is least in force.

        The latter alone where there are many layers.
        """
        if self._candidates > _MANY:
            peak = self._peak_of(least, autocast=autocast)
            return None if peak is None else self._alternative_in(autocast, least, peak)
        try:
            base = self._predict(autocast=autocast, checkpointed=())
        except CancelledError:
            raise
        except Exception:  # the user's own code may raise anything in another format
            return None
        model = _model_of(base, self._usable)
        choice = self._choice_of(model)
        best = self._ordered(model.names[at] for at in choice.least(time_limit_s=_LEAST_S))
        peaks = {best: self._peak_of(best, autocast=autocast)}
        if self._besides.promised(model.peak_bytes(least)) < (peaks[best] or math.inf):
            peaks[least] = self._peak_of(least, autocast=autocast)
        lowest = min(((peak, names) for names, peak in peaks.items() if peak is not None), default=None)
        if lowest is None:
            return None
        peak, layers = lowest
        return self._alternative_in(autocast, layers, peak)

    def _alternative_in(self, autocast: AutocastName, layers: Layers, peak: float) -> Alternative:
        changes = {"autocast": autocast, "checkpointed": layers}
        return Alternative(label=autocast, changes=changes, batch_size=None, peak_bytes=peak, fits=peak <= self._budget)

    def _smaller_batch(
        self, layers: Layers, whole_bytes: float, autocast: AutocastName | None = None, begin: int | None = None
    ) -> Alternative | None:
        """The largest one that fits, among a few that are tried; else the smallest. The whole one is known not to."""
        size = self._steps.batch_size
        if size is None or size < 2:
            return None
        begun_s = time.perf_counter()
        peaks: dict[int, float] = {size: whole_bytes}
        trying = begin or (size // 2 if self._candidates <= _MANY else 1)  # where that does not fit, nothing else need be tried
        for _ in range(_BATCHES):
            peak = self._peak_of(layers, batch_size=trying, autocast=autocast)
            if peak is None and trying == 1 < size // 2 and len(peaks) == 1:
                trying = size // 2
                continue
            if peak is None:
                break
            peaks[trying] = peak
            fitting = max((each for each in peaks if peaks[each] <= self._budget), default=0)
            above = min(each for each in peaks if peaks[each] > self._budget)
            row_bytes = (peaks[above] - peaks[fitting or trying]) / max(above - (fitting or trying), 1)
            start = fitting or above
            guess = start + math.floor((self._budget - peaks[start]) / row_bytes) if row_bytes > 0 else fitting + 1
            trying = min(max(guess, fitting + 1), above - 1)
            if above - fitting < 2 or trying in peaks or (fitting and time.perf_counter() - begun_s > _ALTERNATIVES_S):
                break
        tried = [each for each in peaks if each != size]
        if not tried:
            return None
        best = max((each for each in tried if peaks[each] <= self._budget), default=min(tried))
        return Alternative(
            label=f"batch {best}" if autocast is None else f"{autocast} + batch {best}",
            changes={"checkpointed": layers} | ({} if autocast is None else {"autocast": autocast}),
            batch_size=best,
            peak_bytes=peaks[best],
            fits=peaks[best] <= self._budget,
        )

    def _peak_of(self, layers: Layers, **other: Any) -> float | None:
        """Of a step that is not the one in question; None where it cannot be run, as one with a batch of 1 often cannot."""
        try:
            return self._besides.promised(_first_peak(self._predict(checkpointed=layers, **other)))
        except CancelledError:
            raise
        except Exception:  # the user's own code may raise anything with other sizes
            return None

    def _obtained(self) -> str:
        count = len(self._peaks)
        because = self._steps.because
        if because is None:
            peaks = f"Peaks: {count} step{'s' * (count > 1)} predicted on fake tensors"
        else:
            peaks = f"Peaks: {count} real step{'s' * (count > 1)}, measured and taken back, because {because}"
        return f"{peaks}; estimates: by what each storage of the first of them holds, and when; times: {self._times.obtained}."


def _known_as(keeps_gradients: bool, settings: Settings, layers: Layers) -> _Known:
    return keeps_gradients, settings.autocast, settings.fp32_layers, settings.scales_loss, layers


def _of_peak(settings: Settings) -> _Known:
    return _known_as(False, settings, settings.checkpointed)


def _model_of(base: PredictedStep, names: Sequence[str]) -> PeakModel:
    if base.complete is None:
        return PeakModel.of_profile(base.profile, names)
    return PeakModel.of_step(base.complete, names)


def _first_peak(step: PredictedStep) -> float:
    """Of the first step with its layers checkpointed; predicted was one after it."""
    return step.peak_bytes if step.complete is None else first_step_peak(step.complete, step.settings.checkpointed)


def _expected(step: PredictedStep) -> Expected:
    end = step.profile.total_bytes[-1] if len(step.profile.total_bytes) else math.nan
    return Expected(peak_bytes=step.peak_bytes, first_peak_bytes=_first_peak(step), end_bytes=float(end))
