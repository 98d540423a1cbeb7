"""The largest batch that fits into a budget: predicted, and on request confirmed by really running it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from amp_widgets.analysis.fake_step import NOT_COUNTED, PREDICTED, FakeSteps, PredictedStep, TooLargeError, settings_with
from amp_widgets.analysis.held_interrupt import interrupts_noted
from amp_widgets.analysis.real_step import free_memory_bytes, real_step
from amp_widgets.analysis.stoppable import CancelledError
from amp_widgets.analysis.trial import (
    check_batch,
    check_hooks,
    check_idle,
    check_loss_fn,
    check_not_compiled,
    check_one_model,
)
from amp_widgets.analysis.unsupported import unsupported_text
from amp_widgets.core.batch_tree import batch_leaves, first_dimension, is_batched
from amp_widgets.core.deaths import out_of_memory_in
from amp_widgets.core.loop import LiveLoop
from amp_widgets.core.memory.budget import MemoryBudgetError, checked_budget, told_apart
from amp_widgets.core.memory.death import clear_finished_frames, roots_of_dead_passes
from amp_widgets.core.memory.dissolve import dissolve
from amp_widgets.core.memory.profile import StepProfile, memory_text
from amp_widgets.core.settings import AutocastName, Settings, describe_settings
from amp_widgets.errors import AmpWidgetsError, RunError, SettingsError
from amp_widgets.language import in_language

LARGEST = 2**20
"""Rows; where the peak does not grow with the batch, no larger ones are looked for."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchSize:
    """The largest batch that fits.

    Attributes
    ----------
    size
        Rows; with one more it does not fit. 0 where not even one row fits, or the smallest that runs does not.
    multiple_of
        Where the model does not run with every number of rows: `size` is the largest of the multiples of this one.
    predicted_peak_bytes
        Of a step with it; where none fits, of the smallest one that was tried.
    budget_bytes
        What it has to fit into.
    settings
        With which.
    obtained
        How, see `amp_widgets.analysis.fake_step.PredictedStep`.
    fails_at, failure
        A larger size that was tried, at which a step fails, and how, where that is why no larger one was found: an error of the
        model or the loss function, or memory that ran out before a step came to the budget. None where it was the budget.
    capped
        Whether larger ones may fit too, and were not looked for: they are above `LARGEST`, or could only be measured and this
        machine has no memory for that.
    tried
        Batch sizes that were looked at → peak in bytes; infinite where a real step was ended by the budget.
    """

    size: int
    predicted_peak_bytes: float
    budget_bytes: float
    settings: Settings
    obtained: str
    capped: bool
    tried: dict[int, float]
    multiple_of: int = 1
    fails_at: int | None = None
    failure: str | None = None

    def __str__(self) -> str:
        return in_language(self.sentence)

    @property
    def sentence(self) -> str:
        """What it comes to."""
        what = describe_settings(self.settings)
        budget, peak = told_apart(self.budget_bytes, self.predicted_peak_bytes)
        if not self.size:
            needs = f"needs {peak}" if math.isfinite(self.predicted_peak_bytes) else "needs more"
            return f"{what}: no batch fits into {budget}; {min(self.tried)} {needs} ({self.obtained})"
        at_least = "at least " if self.capped else ""
        among = f" (of the multiples of {self.multiple_of}, as others do not run)" if self.in_multiples else ""
        fits = f"{what}: batch {at_least}{self.size}{among} fits into {budget}, with a peak of {peak} ({self.obtained})"
        return fits if self.failure is None else f"{fits}; with {self.fails_at} a step fails: {self.failure}"

    @property
    def in_multiples(self) -> bool:
        """Whether only multiples of `multiple_of` were looked at, and more than one of them is known to run."""
        return self.multiple_of > 1 and (self.failure is None or self.size > self.multiple_of)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Confirmation:
    """What a real step with a batch size came to.

    Attributes
    ----------
    size
        Rows of the batch.
    settings
        With which.
    profile
        Of the step; None where memory ran out.
    out_of_memory
        What was said as memory ran out; None where it did not.
    limit_bytes
        A step on a CPU that goes above it has run out of memory.
    """

    size: int
    settings: Settings
    profile: StepProfile | None
    out_of_memory: str | None
    limit_bytes: float

    @property
    def peak_bytes(self) -> float:
        """Measured; NaN where memory ran out."""
        return math.nan if self.profile is None else float(self.profile.peak_bytes)

    @property
    def fits(self) -> bool:
        """Whether the step came to its end, and its peak is not above the limit."""
        return self.profile is not None and self.profile.peak_bytes <= self.limit_bytes

    def __str__(self) -> str:
        return in_language(self.sentence)

    @property
    def sentence(self) -> str:
        """What it comes to."""
        what = f"{describe_settings(self.settings)}, batch {self.size}"
        if self.profile is None:
            return f"{what}: out of memory ({self.out_of_memory})"
        return f"{what}: peak {memory_text(self.peak_bytes)} (measured: one real step)"


def max_batch_size(
    steps: FakeSteps,
    budget_bytes: float,
    *,
    autocast: AutocastName | None = None,
    checkpointed: Iterable[str] | None = None,
    fp32_layers: Iterable[str] | None = None,
    at_most: int = LARGEST,
) -> BatchSize:
    """The largest batch whose predicted peak fits into a budget: it does with this size, and does not with one row more.

    Between sizes the peak is taken to grow, as it does but for operators that change their algorithm.

    Parameters
    ----------
    steps
        Predicts them; where it measures real steps, none goes above the budget, or what there is on this machine, by more than
        one operator's result, and none has more than twice the rows of the largest batch of which the peak is known.
    budget_bytes
        Bytes; or a text such as ``"8 GB"``.
    autocast, checkpointed, fp32_layers
        As in `FakeSteps.step`.
    at_most
        The largest size to look for.

    Raises
    ------
    SettingsError
        When the budget is no number above 0, the batch has no size, or the settings cannot be in force.
    RunError
        When the model is compiled.
    Exception
        What the user's code raises with the batch as it is. What it raises with another size is no reason to end: the largest
        that runs is found, and `BatchSize.failure` says so.
    """
    budget = checked_budget(budget_bytes, "largest_batch")
    steps.check_not_compiled()
    given = steps.batch_size
    if given is None:
        raise SettingsError("batch: got no tensor with a dimension, expected a batch whose size can be changed")
    if type(at_most) is not int or at_most < 1:
        raise SettingsError(f"at_most: got {at_most!r}, expected a whole number of rows, at least 1")

    real_limit = min(budget, steps.at_hand_bytes)

    def step_of(size: int, real_at_most: int) -> PredictedStep:
        return steps.step(
            autocast=autocast,
            checkpointed=checkpointed,
            fp32_layers=fp32_layers,
            batch_size=size,
            limit_bytes=real_limit,
            real_at_most=real_at_most,
        )

    search = _Search(step_of, budget, real_limit, given, at_most)
    search.run()
    size = search.fitting
    last = search.last
    if last is None:
        raise RunError(
            f"largest_batch: no batch that runs fits into {memory_text(real_limit)}, and none can be predicted"
            + (f", because {steps.because}" if steps.because else "")
        )
    fails_at, failure = search.ended_by() or (None, None)
    return BatchSize(
        size=size,
        predicted_peak_bytes=search.peaks[size] if size else search.peaks[min(search.peaks)],
        budget_bytes=budget,
        settings=last.settings,
        obtained=last.obtained,
        multiple_of=search.unit,
        capped=failure is None and (size + search.unit > at_most or (search.real and real_limit < budget)),
        fails_at=fails_at,
        failure=failure,
        tried=dict(sorted(search.peaks.items())),
    )


@interrupts_noted()
def confirm(
    loop: LiveLoop,
    batch: tuple[Any, Any],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    *,
    batch_size: int,
    autocast: AutocastName | None = None,
    checkpointed: Iterable[str] | None = None,
    fp32_layers: Iterable[str] | None = None,
    budget_bytes: float | None = None,
) -> Confirmation:
    """Train one step with a batch of this size, and take it back; if memory runs out, that is free again afterwards.

    Parameters
    ----------
    loop, batch, loss_fn
        As in `amp_widgets.analysis.fake_step.fake_steps`.
    batch_size
        Rows of the batch, which are repeated where there are fewer.
    autocast, checkpointed, fp32_layers
        As in `FakeSteps.step`.
    budget_bytes
        On a CPU an op that goes above it ends the step; without it, the session's memory budget, or without that what is free
        on this machine, which a real allocation could have ended the process for.

    Raises
    ------
    SettingsError
        When the settings cannot be in force.
    SessionClosedError
        When the session was closed.
    RunError
        When there is no optimizer, a step is in progress, model or loss function are compiled, or the loss is none.
    """
    verb = "confirm"
    model, pair = check_idle(loop, verb), check_batch(batch, verb)
    if not loop.optimizers:
        raise RunError(f"{verb}: the session has no optimizer, expected AmpSession(model, optimizer)")
    check_loss_fn(loss_fn, verb)
    check_one_model(model, verb)
    check_not_compiled(loop, loss_fn, verb, NOT_COUNTED)
    check_hooks(model, verb)
    length = first_dimension(batch_leaves(pair))
    if length is None or type(batch_size) is not int or batch_size < 1:
        raise SettingsError(f"batch_size: got {batch_size!r}, expected a whole number, at least 1, and a batch that has a size")
    settings = settings_with(loop, model, autocast=autocast, checkpointed=checkpointed, fp32_layers=fp32_layers)
    limit_bytes = _limit(loop, budget_bytes)
    profile, because = None, None
    nbytes = sum(leaf.nbytes for leaf in batch_leaves(pair) if is_batched(leaf, length))
    if nbytes / length * batch_size > limit_bytes:
        alone, limit = told_apart(nbytes / length * batch_size, limit_bytes)
        because = f"the batch alone takes {alone}, of {limit}"
    else:
        try:
            profile, _ = real_step(
                loop, model, pair, loss_fn, settings, batch_size=batch_size, limit_bytes=limit_bytes, verb=verb
            )
        except Exception as error:
            ran_out = out_of_memory_in(error)
            if ran_out is None:
                raise
            because = str(ran_out)
            free_after(ran_out)
    return Confirmation(size=batch_size, settings=settings, profile=profile, out_of_memory=because, limit_bytes=limit_bytes)


def first_line(error: BaseException, autocast: AutocastName = "fp32") -> str:
    """An error in one line; with its type, but where it is one of this package, or the CPU does not have the format for that.

    Parameters
    ----------
    autocast
        The format in which it came.
    """
    if (unsupported := unsupported_text(error, autocast)) is not None:
        return unsupported
    words = str(error).splitlines()
    text = words[0] if words else ""
    return text if isinstance(error, AmpWidgetsError) else f"{type(error).__name__}: {text}".removesuffix(": ")


def free_after(error: BaseException) -> None:
    """Free what a step holds that has run out of memory: its graph, and the frames that the exception has left."""
    roots = roots_of_dead_passes(error)
    if roots:
        dissolve(roots)
    del roots
    clear_finished_frames(error)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


# ---- private ---------------------------------------------------------------------------------------------------------


class _Search:
    """Finds the last size that fits, by lines through the peaks that are known."""

    def __init__(
        self, step_of: Callable[[int, int], PredictedStep], budget: float, real_limit: float, given: int, at_most: int
    ) -> None:
        self._step_of = step_of
        self._budget = budget
        self._real_limit = real_limit
        self.real = False  # whether real steps are run, which are approached with care
        self._given = given
        self._at_most = at_most
        self.peaks: dict[int, float] = {}
        self.last: PredictedStep | None = None
        self.fitting = 0  # the largest known to fit
        self.unit = 1  # multiples of this are looked at
        self._low = 0  # up to this, nothing is to be looked at
        self._too_large = at_most + 1  # the smallest known not to
        self.failure: tuple[int, str] | None = None  # that size, and what failed there, where it is not that it is too much
        self._left_out: dict[int, str] = {}  # sizes that do not run, while others may
        self._rounds = 0  # of looking between the two

    def run(self) -> None:
        """Look at sizes until no other is left."""
        self._look_at(min(self._given, self._at_most))
        while self._lowest < self._too_large:
            size = self._next()
            self._look_at(max(size - size % self.unit, self._lowest))

    def _look_at(self, size: int) -> None:
        try:
            step = self._step_of(size, self._real_at_most)
        except TooLargeError:
            self._run_real()
            return  # another size is looked at instead
        except CancelledError:
            raise
        except Exception as error:
            ran_out = out_of_memory_in(error)
            if ran_out is not None:
                self._run_real()
                self.peaks[size] = math.inf
                if not isinstance(ran_out, MemoryBudgetError):  # before the budget was reached
                    self._ends_at(size, ran_out)
                free_after(ran_out)
            elif self._leave_out(size):
                self._left_out[size] = first_line(error)
                return
            elif self.fitting:
                self._ends_at(size, error)
                return
            else:
                raise
        else:
            self.last = step
            self.peaks[size] = float(step.peak_bytes)
            if step.obtained != PREDICTED:
                self._run_real()
        if self.peaks[size] <= self._budget:
            self.fitting = max(self.fitting, size)
            self._low = max(self._low, size)
        elif size < self._too_large:
            self._too_large, self.failure = size, None

    def ended_by(self) -> tuple[int, str] | None:
        """A size larger than what fits, and what fails there, where that is why no larger one was found."""
        if self.failure is None and self.unit > 1 and sum(map(math.isfinite, self.peaks.values())) < 2:
            return next(((size, text) for size, text in sorted(self._left_out.items()) if size > self.fitting > 0), None)
        return self.failure if self.fitting else None

    def _ends_at(self, size: int, error: BaseException) -> None:
        """With this size a step fails for another reason than the budget: no larger ones are looked at."""
        if size < self._too_large:
            self._too_large, self.failure = size, (size, first_line(error))

    def _leave_out(self, size: int) -> bool:
        """A size does not run, as one row with BatchNorm; whether there are others to look at.

        Where more rows do not run, it may be that they have to be in pairs, or in fours: as those that were given.
        """
        running = (self._given, *(each for each, peak in self.peaks.items() if math.isfinite(peak)))
        larger = range(self.unit + 1, self._given + 1)
        unit = next((each for each in larger if size % each and not any(ran % each for ran in running)), None)
        if unit is not None and size > 1:
            self.unit = unit
        elif size < self._given:
            self._low = max(self._low, size)
        else:
            return False
        return True

    @property
    def _lowest(self) -> int:
        """The smallest size that may be looked at."""
        return self._low + self.unit - self._low % self.unit

    @property
    def _real_at_most(self) -> int:
        """What is run for the first time is no more than twice what is known to fit, or the batch that the user has given."""
        return max(self._given, 2 * self.fitting)

    def _run_real(self) -> None:
        self.real = True
        self._budget = self._real_limit

    def _next(self) -> int:
        """A size between what fits and what does not; a real step's no larger than `_real_at_most`."""
        size = self._guess()
        if self.real:
            low = max(self.fitting, self._low)
            size = min(size, max(self._real_at_most, low + 1))
            if [each for each, peak in self.peaks.items() if math.isfinite(peak)] == [
                low
            ]:  # no line: in proportion, which is above it
                size = min(size, max(low + 1, math.floor(low * self._budget / max(self.peaks[low], 1.0))))
        return size

    def _guess(self) -> int:
        """A size between what fits and what does not.

        The peak is the largest of many sums, each of which grows with the batch along a line: a line through two peaks is
        above it in between, and below it outside, so that the last size that fits lies between where such lines reach the budget.
        """
        low, high = max(self.fitting, self._low), self._too_large
        known = sorted(size for size, peak in self.peaks.items() if math.isfinite(peak))
        below = [size for size in known if size <= low][-2:]
        above = [size for size in known if size >= high][:2]
        outside = [size for pair in (below, above) if (size := self._by_line(pair)) is not None]
        if high > self._at_most:  # nothing is known to be too large
            return min(max(low + 1, *outside, 0 if outside else 8 * low), self._at_most)
        self._rounds += 1
        if self._rounds % 4 == 0:  # where it is not like that
            return (low + high) // 2
        last = max(min([high - 1, *outside]), low + 1)
        between = self._by_line([*below[-1:], *above[:1]])
        first = low + 1 if between is None else min(max(between, low + 1), last)
        return (last, first, (first + last) // 2)[self._rounds % 4 - 1]

    def _by_line(self, sizes: list[int]) -> int | None:
        """The last size that fits on the line through the peaks of two; None where there is no such line."""
        if len(sizes) < 2:
            return None
        one, two = sizes
        rise = (self.peaks[two] - self.peaks[one]) / (two - one)
        if rise <= 0:
            return None
        return math.floor(min(one + (self._budget - self.peaks[one]) / rise, self._at_most))


def _limit(loop: LiveLoop, budget_bytes: float | None) -> float:
    if budget_bytes is not None:
        return checked_budget(budget_bytes, "confirm")
    if loop.memory_budget is not None:
        return loop.memory_budget
    return free_memory_bytes() if loop.device.type == "cpu" else math.inf
