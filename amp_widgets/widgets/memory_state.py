"""What the memory panel shows: an immutable snapshot."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from amp_widgets.charts.ceiling import Ceiling, Death
from amp_widgets.charts.peaks import StepLike, place_text
from amp_widgets.core.profiling import combination_of
from amp_widgets.language import marked, say, say_number
from amp_widgets.widgets.layer_table import LayerProfileLike


class StepProfileLike(StepLike, Protocol):
    """A profiled step with its layers."""

    @property
    def step(self) -> int: ...
    @property
    def source(self) -> str: ...
    @property
    def layers(self) -> Sequence[LayerProfileLike]: ...
    @property
    def notes(self) -> Sequence[str]: ...


class OutOfMemoryLike(Protocol):
    """What is read of a step that ran out of memory. NaN for bytes, and ``""`` for names, that are not known.

    Attributes
    ----------
    cause
        ``"budget"`` or ``"allocator"``.
    profile
        The step until then, or None.
    report
        Sentences, the first one the heading.
    layers_to_checkpoint
        What is proposed: with these checkpointed besides it would have fitted, about.
    """

    @property
    def step(self) -> int: ...
    @property
    def cause(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def requested_bytes(self) -> float: ...
    @property
    def limit_bytes(self) -> float: ...
    @property
    def phase(self) -> str: ...
    @property
    def layer(self) -> str: ...
    @property
    def profile(self) -> StepProfileLike | None: ...
    @property
    def report(self) -> Sequence[str]: ...
    @property
    def layers_to_checkpoint(self) -> Sequence[str]: ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryState:
    """All that a memory panel shows, at one moment.

    Attributes
    ----------
    profiles
        The profiled steps that are kept, oldest first; each has a label of its own.
    shown
        Labels: of the one that is shown, or of two, before and after. Empty, or when one of them is not kept: the newest, and
        before it the last one with other settings, if there is one.
    death
        The last step that ran out of memory, or None.
    fitted
        How many steps have ended since, as `rounded_down` has it.
    budget_bytes
        The budget that is set, or None.
    pending
        Whether the next step will be profiled.
    trains
        Whether steps are being made, as far as is known.
    why_not
        Why the last step that was to be profiled was not, or None.
    """

    profiles: tuple[StepProfileLike, ...] = ()
    shown: tuple[str, ...] = ()
    death: OutOfMemoryLike | None = None
    fitted: int = 0
    budget_bytes: float | None = None
    pending: bool = False
    trains: bool = True
    why_not: str | None = None

    @property
    def offered(self) -> tuple[StepProfileLike, ...]:
        """Those that are kept, and that of the step that ran out of memory, in the order in which they were made."""
        died = None if self.death is None else self.death.profile
        if died is None or any(profile.label == died.label for profile in self.profiles):
            return self.profiles
        at = next((i for i, profile in enumerate(self.profiles) if profile.step >= died.step >= 0), len(self.profiles))
        return (*self.profiles[:at], died, *self.profiles[at:])

    @property
    def chosen(self) -> tuple[StepProfileLike, ...]:
        """What is drawn: no step, one, or two: before and after."""
        offered = self.offered
        by_label = {profile.label: profile for profile in offered}
        shown = tuple(dict.fromkeys(self.shown))[:2]
        if shown and all(label in by_label for label in shown):
            return tuple(by_label[label] for label in shown)
        newest = offered[-1:]
        if not newest or newest[0].label in self.deaths:
            return newest
        others = [one for one in offered[:-1] if settings_of(one) != settings_of(newest[0])]
        return (*others[-1:], *newest)

    @property
    def deaths(self) -> Mapping[str, Death]:
        """Label → how that step ran out of memory."""
        died = self.death
        if died is None or died.profile is None:
            return {}
        place = place_text(died.phase, died.layer)
        return {died.profile.label: Death(requested_bytes=died.requested_bytes, ceiling=self._limit, place=place)}

    @property
    def ceiling(self) -> Ceiling | None:
        """What is drawn as the height that memory may not go above: the budget that is set; else what the step that is shown died
        of, where that is the device's memory, or nothing newer is shown beside it."""
        if self.budget_bytes is not None:
            return Ceiling(size_bytes=self.budget_bytes, name=marked("budget"))
        deaths, died, chosen = self.deaths, self.death, self.chosen
        if died is None or not any(profile.label in deaths for profile in chosen):
            return None
        return self._limit if died.cause != "budget" or chosen[-1].label in deaths else None

    @property
    def _limit(self) -> Ceiling | None:
        died = self.death
        if died is None or not math.isfinite(died.limit_bytes):
            return None
        budget = marked("budget") if died.limit_bytes == self.budget_bytes else marked("budget then")
        return Ceiling(
            size_bytes=died.limit_bytes,
            name=budget if died.cause == "budget" else marked("memory of {device}").format(device=died.device),
        )

    @property
    def fitted_text(self) -> str:
        """That steps have fitted since one ran out of memory; nothing when none has."""
        if self.death is None or not self.fitted:
            return ""
        step = f"{self.death.step:,}"
        if self.fitted > EXACT:
            count = f"{self.fitted - 1:,}"
            return say("Step {step} ran out of memory; since then more than {count} steps fitted", step=step, count=count)
        return say_number(
            "Step {step} ran out of memory; since then {count} step fitted",
            "Step {step} ran out of memory; since then {count} steps fitted",
            self.fitted,
            step=step,
        )

    def shown_after(self, before: Sequence[StepProfileLike]) -> tuple[str, ...]:
        """What is to be shown when those `before` were offered until now. A choice holds until there is a newer step; of two the
        one chosen as before then stays, and the newest is compared with it."""
        offered = self.offered
        if not offered or not before or offered[-1] is before[-1]:
            return self.shown
        newest = offered[-1].label
        return (self.shown[0], newest) if len(self.shown) == 2 and self.shown[0] != newest else ()


EXACT = 10
"""More steps than this are not counted one by one: a sentence that changes all the time cannot be read."""


def rounded_down(steps: int) -> int:
    """A count as `MemoryState.fitted` has it: up to `EXACT` itself, beyond that the next lower of 11, 101, 1001, ...

    >>> [rounded_down(steps) for steps in (0, 10, 11, 100, 101, 5000)]
    [0, 10, 11, 11, 101, 1001]
    """
    if steps <= EXACT:
        return max(steps, 0)
    return int(10 ** (len(str(steps - 1)) - 1)) + 1


def settings_of(profile: StepProfileLike) -> tuple[str, tuple[str, ...]]:
    """What tells whether two profiles are of the same settings: the label without its step, and the layers."""
    return combination_of(profile.label, (layer.name for layer in profile.layers if layer.checkpointed))
