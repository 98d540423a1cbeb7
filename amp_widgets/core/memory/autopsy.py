"""Why a step ran out of memory: what held it at that moment, and what would have fitted, as far as that can be told."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Literal

from amp_widgets.core.layers import Layer
from amp_widgets.core.memory.death import Death
from amp_widgets.core.memory.profile import KINDS, StepProfile, memory_text, place_in_words
from amp_widgets.core.memory.savings import Savings
from amp_widgets.core.memory.whole_step import CompleteStep, WholeStep
from amp_widgets.language import in_language


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OutOfMemory:
    """A step that ran out of memory. Holds no tensor.

    Attributes
    ----------
    step
        Its number in the history. The step is recorded only if the user's loop went on with it.
    cause
        ``"budget"``: `memory_budget`; ``"allocator"``: the device's, or the operating system's, memory.
    device
        Whose memory.
    requested_bytes
        Of the allocation that did not fit; NaN where not known.
    limit_bytes
        The budget, or the device's memory; NaN where not known.
    allocated_bytes
        Held before it; NaN where not known.
    phase, layer, operator, kind
        Where, and what for; ``""`` where not known.
    settings_text
        What was in force.
    profile
        The step up to that moment, without what was asked for; None where it was not followed op by op.
    report
        Sentences for people, the first a heading; estimates say that they are.
    layers_to_checkpoint
        Layers that, had they been checkpointed besides, would have freed enough by the estimate; empty where there are none.
    """

    step: int
    cause: Literal["budget", "allocator"]
    device: str
    requested_bytes: float
    limit_bytes: float
    allocated_bytes: float
    phase: str
    layer: str
    operator: str
    kind: str
    settings_text: str
    profile: StepProfile | None
    report: tuple[str, ...]
    layers_to_checkpoint: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<OutOfMemory: {self.report[0]}>"

    def __str__(self) -> str:
        return "\n".join(map(in_language, self.report))


def autopsy(
    death: Death,
    *,
    step: int,
    settings_text: str,
    autocast: str,
    formats: Sequence[str],
    layers: Iterable[Layer],
    source: str,
    known_peak_bytes: float = math.nan,
    complete: CompleteStep | None = None,
) -> OutOfMemory:
    """Look into it.

    Parameters
    ----------
    death
        What is known.
    step
        Its number.
    settings_text, autocast
        What was in force.
    formats
        The autocast formats of half the size that the device has.
    layers
        Of the model.
    source
        How the memory is measured.
    known_peak_bytes
        Of an earlier complete step with the same settings; NaN where there is none.
    complete
        That step, where it was followed: proposals are for the whole step then, and else only for the moment of the death.
    """
    profile = None
    if death.record is not None:
        label = f"out of memory at step {step} ({settings_text})"
        profile = death.record.profile(label=label, step=step, device=death.device, source=source)
    writer = _Report(death, step, settings_text, profile, known_peak_bytes, complete)
    writer.write(autocast, formats, [layer.name for layer in layers if layer.why_not is None and not layer.structural])
    return OutOfMemory(
        step=step,
        cause=death.cause,
        device=death.device,
        requested_bytes=death.requested_bytes,
        limit_bytes=death.limit_bytes,
        allocated_bytes=death.allocated_bytes,
        phase=death.phase,
        layer=death.layer,
        operator=death.operator,
        kind=death.kind,
        settings_text=settings_text,
        profile=profile,
        report=tuple(writer.sentences),
        layers_to_checkpoint=writer.chosen,
    )


class _Report:
    def __init__(
        self,
        death: Death,
        step: int,
        settings_text: str,
        profile: StepProfile | None,
        known_peak_bytes: float,
        complete: CompleteStep | None,
    ) -> None:
        self.sentences: list[str] = []
        self.chosen: tuple[str, ...] = ()
        self._death = death
        self._step = step
        self._settings_text = settings_text
        self._profile = profile
        self._known_peak_bytes = known_peak_bytes
        self._whole: WholeStep | None = None
        if complete is not None and death.record is not None and not math.isnan(death.limit_bytes):
            with contextlib.suppress(ValueError):  # it was another kind of step
                self._whole = WholeStep(death, complete)
        self._needed_bytes = death.allocated_bytes + death.requested_bytes
        self._short_bytes = self._needed_bytes - death.limit_bytes
        if math.isnan(self._short_bytes):  # what the device had left is not known
            self._short_bytes = death.requested_bytes
        self._state_alone = death.allocated_bytes > death.limit_bytes and not death.made_something

    def write(self, autocast: str, formats: Sequence[str], candidates: Sequence[str]) -> None:
        self._heading()
        self._asked_for()
        if self._profile is not None:
            self._held(self._profile)
        if self._state_alone:
            self.sentences.append(
                f"No batch size, autocast or checkpointing can change that: the least is {memory_text(self._needed_bytes)}."
                if self._profile is None
                else "No batch size, autocast or checkpointing can change that: what is held is there before the step computes "
                "anything."
            )
        elif self._profile is not None and self._death.record is not None and not math.isnan(self._short_bytes):
            savings = Savings(self._death)
            if self._whole is not None:
                self._of_the_whole_step(self._whole, savings, candidates, autocast, formats)
            else:
                self._checkpointing(savings, candidates)
                self._half(savings, autocast, formats)
                self._batch(savings)
                self._later()
        else:
            self.sentences.append(
                "What held the memory is not known, as the step was not followed op by op; checkpoint layers, use autocast or a "
                "smaller batch."
            )
        self._afterwards()

    def _heading(self) -> None:
        death = self._death
        limit = memory_text(death.limit_bytes) if not math.isnan(death.limit_bytes) else ""
        if self._state_alone:
            self.sentences.append(
                f"Out of memory at step {self._step}: the model, its gradients, the optimizer's state and the batch alone need "
                f"{memory_text(death.allocated_bytes)}, and the budget is {limit}"
            )
            return
        where = f" {place_in_words(death.phase, death.layer)}" if death.phase or death.layer else ""
        self.sentences.append(
            f"Out of memory at step {self._step} ({self._settings_text}){where}, above the budget of {limit}"
            if death.cause == "budget"
            else f"Out of memory at step {self._step} ({self._settings_text}){where} on {death.device}"
        )

    def _asked_for(self) -> None:
        death = self._death
        operator = death.operator or "An operator"
        if math.isnan(death.requested_bytes):
            self.sentences.append(f"{operator} asked for more than there was.")
            return
        purpose = f" ({death.kind})" if death.kind else ""
        text = f"{operator} asked for {memory_text(death.requested_bytes)}{purpose}"
        if not math.isnan(death.allocated_bytes):
            text += f" with {memory_text(death.allocated_bytes)} held already"
        if not math.isnan(death.limit_bytes):
            what = "the budget" if death.cause == "budget" else f"the memory of {death.device}"
            text += f"; {what} is {memory_text(death.limit_bytes)}"
            if self._short_bytes > 0:
                text += f", {memory_text(self._short_bytes)} too little"
        self.sentences.append(f"{text}.")

    def _held(self, profile: StepProfile) -> None:
        kinds = {kind: int(size) for kind, size in zip(KINDS, profile.bytes_by_kind[-1], strict=True) if size}
        whole = sum(kinds.values())
        if not whole:
            return
        parts = [
            f"{_PLURALS.get(kind, kind)} {memory_text(size)} ({100 * size / whole:.0f} %)"
            for kind, size in sorted(kinds.items(), key=lambda item: -item[1])
        ]
        self.sentences.append(f"Held at that moment: {', '.join(parts)}.")
        layers = [item for item in Savings(self._death).bytes_by_layer().items() if item[0]][:_LAYERS_NAMED]
        if layers:
            named = ", ".join(f"{name} {memory_text(size)}" for name, size in layers)
            inner = any(other.startswith(f"{name}.") for name, _ in layers for other in profile.layer_names)
            self.sentences.append(
                "The layers that took up most at that moment, parameters and optimizer state included"
                f"{', without the layers inside them' if inner else ''}: {named}."
            )

    def _of_the_whole_step(
        self, whole: WholeStep, savings: Savings, candidates: Sequence[str], autocast: str, formats: Sequence[str]
    ) -> None:
        limit = memory_text(self._death.limit_bytes)
        self.sentences.append(
            f"By the last complete step, with these settings, the whole step would have had its peak at about "
            f"{memory_text(whole.peak_bytes)}; the estimates below are for all of it, and assume that it goes on like that one."
        )
        cost_s = {name: savings.cost_s([name]) or whole.cost_s(name) for name in candidates}
        chosen, peak = whole.choose(candidates, cost_s)
        if chosen:
            self.chosen = chosen
            cost = sum(cost_s[name] for name in chosen)
            cost_text = f", for about {cost * 1000:.1f} ms more" if cost > 0 else ""
            self.sentences.append(
                f"Estimate: with {_listed(chosen)} checkpointed besides, the whole step fits: at most about {memory_text(peak)}"
                f"{cost_text}."
            )
        elif peak < whole.peak_bytes:
            self.sentences.append(
                f"Estimate: checkpointing alone is not enough: at best, the peak is about {memory_text(peak)}, and the budget is "
                f"{limit}."
            )
        else:
            self.sentences.append("Estimate: checkpointing does not lower the peak of the whole step.")
        if autocast == "fp32" and formats:
            in_half = whole.peak_in_half()
            names = "/".join(formats)
            if whole.fits(in_half):
                most = memory_text(in_half)
                self.sentences.append(f"Estimate: with autocast {names}, the whole step fits: at most about {most}.")
            else:
                self.sentences.append(
                    f"With autocast {names}, activations shrink, at best to half; that the whole step fits cannot be told."
                )
        share = math.floor(100 * whole.batch_share())
        if share >= 1:
            self.sentences.append(
                f"Estimate: with at most {min(share, 99)} % of this batch the whole step fits, its gradients and the optimizer's "
                "state included."
            )
        else:
            self.sentences.append("Estimate: no batch is small enough: what does not depend on it is too much for the budget.")

    def _checkpointing(self, savings: Savings, candidates: Sequence[str]) -> None:
        limit = self._death.limit_bytes
        if math.isnan(limit):
            limit = self._death.allocated_bytes
        chosen = savings.choose(candidates, short_bytes=self._short_bytes, limit_bytes=limit)
        passing = chosen or savings.choose(candidates, short_bytes=self._short_bytes, limit_bytes=math.inf)
        if chosen:
            self.chosen = chosen
            freed = memory_text(savings.saved_bytes(chosen))
            names = _listed(chosen)
            cost_s = savings.cost_s(chosen)
            cost = f", for about {cost_s * 1000:.1f} ms more" if cost_s > 0 else ""
            self.sentences.append(
                f"Estimate: with {names} checkpointed besides, {freed} less would have been held at that moment: the step would "
                f"have got past this operator{cost}; {self._unknown}."
            )
            return
        most = savings.most(candidates)
        if passing:
            less = memory_text(savings.saved_bytes(passing))
            again = memory_text(savings.most_while_recomputed(passing))
            self.sentences.append(
                f"Estimate: with {_listed(passing)} checkpointed besides, {less} less would have been held at that moment, but "
                f"about {again} while it is computed again for the backward pass, which is too much."
            )
        elif most > 0:
            self.sentences.append(
                f"Estimate: checkpointing alone is not enough: it frees at most {memory_text(most)} of the "
                f"{memory_text(self._short_bytes)} that were missing at that moment."
            )
        else:
            self.sentences.append("Checkpointing would have freed nothing: no layer that can be switched on held activations.")

    def _half(self, savings: Savings, autocast: str, formats: Sequence[str]) -> None:
        half = savings.activation_bytes / 2
        if autocast != "fp32" or not formats or not half:
            return
        if half < self._short_bytes:
            verdict = "which alone is not enough"
        else:
            verdict = f"which may have got past this operator; {self._unknown}"
        self.sentences.append(
            f"Estimate: with autocast {'/'.join(formats)}, at best {memory_text(half)} less, {verdict}. Assumed is that it "
            "halves the activations, which holds where they come from matrix products and convolutions."
        )

    def _batch(self, savings: Savings) -> None:
        fixed, limit = savings.fixed_bytes, self._death.limit_bytes
        later = savings.missing_gradient_bytes
        kinds = "parameters, gradients, optimizer state, buffers"
        text = f"{memory_text(fixed)} of what was held do not depend on the batch ({kinds})"
        if later:
            text += f", and gradients of {memory_text(later)} were still to come"
        if math.isnan(limit):
            self.sentences.append(f"{text}; the rest shrinks with it.")
        elif fixed + later >= limit:
            self.sentences.append(
                f"{text}: no batch is small enough. The least possible is more than {memory_text(fixed + later)}; the budget is "
                f"{memory_text(limit)}."
            )
        else:
            share = math.floor(100 * (limit - fixed - later) / (self._needed_bytes - fixed))
            self.sentences.append(
                f"Estimate: at most {share} % of this batch would have got past this operator, and the gradients: {text}; the "
                f"rest shrinks with it; {self._unknown}."
            )

    @property
    def _unknown(self) -> str:
        return "what comes later is not known"

    def _later(self) -> None:
        limit, peak = self._death.limit_bytes, self._known_peak_bytes
        if not math.isnan(peak):
            over = f", {memory_text(peak - limit)} above {memory_text(limit)}" if peak > limit else ""
            self.sentences.append(
                f"The step before, with these settings, had its peak at {memory_text(peak)}, as measured{over}; its batch may "
                "have been another."
            )
        elif self._death.phase in ("forward", "loss", ""):
            self.sentences.append("What the rest of the step needs, backward above all, is not known: it was not reached.")
        elif self._death.phase in ("backward", "recompute"):
            self.sentences.append("What the optimizer's step needs is not known: it was not reached.")

    def _afterwards(self) -> None:
        phase = self._death.phase
        if phase in ("backward", "recompute"):
            self.sentences.append(
                "The gradients made until then are still there, and incomplete: optimizer.zero_grad() drops them. The graph was "
                "dissolved to free its memory; run the forward pass again."
            )
        elif phase == "optimizer":
            self.sentences.append("The optimizer's step was broken off: some parameters may have been stepped and others not.")


_PLURALS = {
    "parameter": "parameters",
    "buffer": "buffers",
    "gradient": "gradients",
    "optimizer": "optimizer state",
    "activation": "activations",
}
_LAYERS_NAMED = 3
_NAMES_LISTED = 6


def _listed(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    if len(names) <= _NAMES_LISTED:
        return f"{', '.join(names[:-1])} and {names[-1]}"
    return f"{', '.join(names[:_NAMES_LISTED])} and {len(names) - _NAMES_LISTED} more layers"
