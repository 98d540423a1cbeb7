"""Profiling the next step, which steps are compared, and in words what came out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import traitlets

from amp_widgets.charts.ceiling import Death
from amp_widgets.charts.labels import shortened
from amp_widgets.charts.mountain import mountain_sentence
from amp_widgets.charts.peaks import KIND_NAMES, KINDS, memory_text, peak_of, peak_place, recompute_s
from amp_widgets.charts.phases import recomputes_of
from amp_widgets.charts.reserved import EXPLAINED, RETRIES
from amp_widgets.core.profiling import without_step
from amp_widgets.language import in_language, marked, say, say_number
from amp_widgets.size_text import pair_texts
from amp_widgets.widgets.control import Control, page_script
from amp_widgets.widgets.memory_state import MemoryState, StepProfileLike
from amp_widgets.widgets.state import DashboardState
from amp_widgets.widgets.text import seconds_text

MOST_REPORT_LINES = 40
PLACE_CHARACTERS = 60
SMALLEST_CHANGE = 0.02
"""Of the higher peak: what a kind has changed by less than this is not worth a word."""


class Command(Protocol):
    """What a memory panel asks for, beside settings: ``("profile")`` the next step; ``("show", labels=(before, after))``;
    ``("dismiss")`` the report of a step that ran out of memory; ``("checkpoint")`` the layers that it proposes."""

    def __call__(self, name: str, /, **values: Any) -> None: ...


class MemoryControl(Control):
    """The head of a memory panel. What it asks for, see `Command`."""

    _esm = page_script("memory_control")
    _css = Control._css + (Path(__file__).parent / "memory.css").read_text(encoding="utf-8")

    options: traitlets.List[Any] = traitlets.List(help="Of each kept profile its label and what is said of it.").tag(sync=True)
    shown: traitlets.List[Any] = traitlets.List(help="The labels of what is drawn.").tag(sync=True)
    pending = traitlets.Bool(False).tag(sync=True)
    trains = traitlets.Bool(True).tag(sync=True)
    recorded = traitlets.Bool(False, help="Of a run that was recorded: no step can be profiled.").tag(sync=True)
    why_not = traitlets.Unicode().tag(sync=True)
    sentence = traitlets.Unicode().tag(sync=True)
    details: traitlets.List[Any] = traitlets.List(help="Sentences.").tag(sync=True)
    report: traitlets.List[Any] = traitlets.List(help="Lines; the first is the heading.").tag(sync=True)
    proposed: traitlets.List[Any] = traitlets.List(help="Layers that are proposed, and not asked for yet.").tag(sync=True)
    what_next = traitlets.Unicode(help="What to do now that they are asked for.").tag(sync=True)
    fitted = traitlets.Unicode(help="That steps have fitted since.").tag(sync=True)

    def __init__(self, command: Command, state: MemoryState | None = None, *, recorded: bool = False) -> None:
        super().__init__(command)
        self._put({"recorded": recorded})
        self.show(MemoryState() if state is None else state)

    def show(self, state: MemoryState) -> None:
        """Show this; nothing is sent when it is what is shown."""
        chosen, deaths = state.chosen, state.deaths
        self._put(
            {
                "options": [[profile.label, _option_text(profile, deaths)] for profile in state.offered],
                "shown": [profile.label for profile in chosen],
                "pending": state.pending,
                "trains": state.trains,
                "why_not": ""
                if state.death is not None and not state.fitted
                else in_language(state.why_not or ""),  # the report says more
                "sentence": _capital(mountain_sentence(chosen, deaths, state.ceiling)) if chosen else "",
                "details": _details(chosen, deaths),
                "report": [] if state.death is None else [in_language(line) for line in state.death.report[:MOST_REPORT_LINES]],
                "fitted": state.fitted_text,
            }
        )

    def propose(self, names: Sequence[str], what_next: str = "") -> None:
        """Offer to checkpoint these layers; or say what comes next, when that was asked for."""
        self._put({"proposed": list(names), "what_next": what_next})

    def _traits_for(self, state: DashboardState) -> dict[str, Any]:
        return {}  # it shows a `MemoryState`

    def _ask(self, message: Mapping[str, Any]) -> None:
        match message:
            case {"profile": True}:
                if not (self.pending or self.recorded):
                    self._request("profile")
            case {"checkpoint": True}:
                if self.proposed:
                    self._request("checkpoint")
            case {"dismiss": True}:
                if self.report:
                    self._request("dismiss")
            case {"show": [*labels]}:
                known = [label for label, _ in self.options]
                wanted = tuple(label for label in dict.fromkeys(labels) if label in known)[:2]
                if wanted and list(wanted) != self.shown:
                    self._request("show", labels=wanted)


# Of what a report says, beside what its own sentences are.
_SAID = (
    marked("; the budget is {size}"), marked("; the memory of {device} is {size}"), marked("parameters {size}"),
    marked("buffers {size}"), marked("gradients {size}"), marked("optimizer state {size}"), marked("activations {size}"),
    marked("recomputed {size}"), marked("temporary {size}"), marked("other {size}"), marked("(activation)"), marked("(gradient)"),
    marked("(optimizer)"), marked("(parameter)"),
    marked("(buffer)"), marked("(recompute)"), marked("(temporary)"), marked("(other)"),
)  # fmt: skip


def _option_text(profile: StepProfileLike, deaths: Mapping[str, Death]) -> str:
    """The label, the step and the peak; of several profiles of one step with the same label, which one."""
    if profile.label in deaths:
        return in_language(profile.label)
    peak = say("peak {size}", size=memory_text(peak_of(profile)[1]))
    label = without_step(profile.label)
    added = profile.label.removeprefix(label)
    if profile.step < 0 or (added and not re.fullmatch(rf" \(step {profile.step}(, \d+)?\)", added)):
        return f"{in_language(profile.label)} ({peak})"  # of a step of its own, or a label that somebody wrote
    number = added.partition(", ")[2].removesuffix(")")
    values = {"label": in_language(label), "step": f"{profile.step:,}", "number": number, "peak": peak}
    return (
        say("{label} (step {step}, no. {number}, {peak})", **values) if number else say("{label} (step {step}, {peak})", **values)
    )


def _details(chosen: Sequence[StepProfileLike], deaths: Mapping[str, Death]) -> list[str]:
    """What the peaks consist of, or how that has changed; what recompute took; how it was counted."""
    if not chosen:
        return []
    newest = chosen[-1]
    made_of = [_made_of(profile, died=profile.label in deaths) for profile in chosen]
    if len(chosen) == 1:
        parts = sorted(((size, kind) for kind, size in made_of[0].items() if size), reverse=True)
        words = [f"{say(KIND_NAMES[kind])} {memory_text(size)}" for size, kind in parts]
        when = say("When memory ran out") if newest.label in deaths else say("At the peak")
        sentences = [f"{when}: {', '.join(words)}"] if words else []
    else:
        before, after = made_of
        least = SMALLEST_CHANGE * max(sum(before.values()), sum(after.values()))
        changed = [kind for kind in reversed(KINDS) if abs(after[kind] - before[kind]) > least]
        changed.sort(key=lambda kind: -abs(after[kind] - before[kind]))
        words = [f"{say(KIND_NAMES[kind])} {' → '.join(pair_texts(before[kind], after[kind]))}" for kind in changed]
        sentences = [f"{_when_compared(chosen, deaths)}: {', '.join(words)}"] if words else []
    above = [deaths[profile.label].above_before(profile) for profile in chosen if profile.label in deaths]
    sentences += [_capital(one) for one in above if one]
    again = len(recomputes_of(newest.phases))
    if again:
        time = seconds_text(recompute_s(newest))
        sentences.append(
            say_number(
                "The price: layers were computed again {count} time in the backward pass, {time}",
                "The price: layers were computed again {count} times in the backward pass, {time}",
                again,
                time=time,
            )
        )
    allocators = [(profile, readings) for profile in chosen for readings in profile.allocator]
    for profile, readings in allocators:
        text = in_language(readings.text)
        sentences.append(f"{in_language(profile.label)}, {text}" if len(chosen) == 2 else text)
    if allocators:
        sentences.append(say(EXPLAINED))
    if any(readings.retries for _, readings in allocators):
        sentences.append(say(RETRIES))
    sources = dict.fromkeys(profile.source for profile in chosen if profile is newest or profile.label not in deaths)
    notes = dict.fromkeys(note for profile in chosen for note in profile.notes)
    return [
        *sentences,
        *(say("Counted: {source}", source=in_language(source)) for source in sources if source),
        *map(in_language, notes),
    ]


def _when_compared(chosen: Sequence[StepProfileLike], deaths: Mapping[str, Death]) -> str:
    """The two moments that are compared, where they are not the same part of the step."""
    before, after = (
        say("when memory ran out") if profile.label in deaths else shortened(peak_place(profile), PLACE_CHARACTERS)
        for profile in chosen
    )
    if before == after or not (before and after):
        return say("At the peak")
    if chosen[0].label in deaths:
        return say("When memory ran out, and at the peak, which is {after}", after=after)
    if chosen[1].label in deaths:
        return say("At the peak, which was {before}, and when memory ran out", before=before)
    return say("At the peak, which was {before} and is now {after}", before=before, after=after)


def _made_of(profile: StepProfileLike, *, died: bool) -> dict[str, int]:
    """By kind, at the peak; of a step that `died`, at its end."""
    point = len(profile.bytes_by_kind) - 1 if died else peak_of(profile)[0]
    return {kind: int(profile.bytes_by_kind[point, i]) if point >= 0 else 0 for i, kind in enumerate(KINDS)}


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
