"""The memory within a step: its mountain, before and after a change, and the table of the layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets

from amp_widgets.charts.ceiling import Ceiling, Death
from amp_widgets.charts.figure_view import FigureView
from amp_widgets.charts.mountain import NO_DEATHS, mountain_figure, mountain_sentence
from amp_widgets.core.profiling import without_step
from amp_widgets.language import in_language, marked, say
from amp_widgets.widgets.layer_table import LayerTable
from amp_widgets.widgets.memory_control import Command, MemoryControl
from amp_widgets.widgets.memory_state import MemoryState, StepProfileLike
from amp_widgets.widgets.state import DashboardState

NOTHING_RECORDED = marked("No step up to here was profiled.")
WHY_NO_TICKS = marked("a replay: what is ticked is what was in force")
NOTHING_YET = marked(
    "No step has been profiled yet. What is drawn then: the memory over one step, and which layers it is made of."
)


class MemoryPanel(ipywidgets.Box):
    """Shows profiled steps; asks for more, for others, and for layers to be checkpointed; changes nothing itself.

    Parameters
    ----------
    command
        Called for what concerns the panel: ``command("profile")``, ``command("show", labels=(before, after))``,
        ``command("dismiss")``.
    request
        Called for settings, as by every control: ``request(checkpointed=names)``.
    state, dashboard
        What to show first.
    recorded
        Whether it is of a run that was recorded: nothing can be profiled or ticked.
    """

    def __init__(
        self,
        command: Command,
        request: Callable[..., None],
        state: MemoryState | None = None,
        dashboard: DashboardState | None = None,
        *,
        recorded: bool = False,
    ) -> None:
        self._nothing_yet = say(NOTHING_RECORDED) if recorded else say(NOTHING_YET)
        self._chosen: tuple[StepProfileLike, ...] = ()
        self._ceiling: Ceiling | None = None
        self._deaths: Mapping[str, Death] = NO_DEATHS
        self._proposed: tuple[str, ...] = ()
        self._dashboard = dashboard
        self._command: Callable[..., None] = command
        self._request = request
        self._control = MemoryControl(self._asked, recorded=recorded)
        self._figure = FigureView(note=self._nothing_yet)
        self._table = LayerTable(request, dashboard, why_no_ticks=say(WHY_NO_TICKS) if recorded else "")
        super().__init__((self._control, self._figure, self._table), _dom_classes=("ampw-memory-panel",))
        if state is not None:
            self.show(state)

    def show(self, state: MemoryState) -> None:
        """Show this state; nothing is sent or drawn anew when it is what is shown."""
        self._control.show(state)
        self._proposed = () if state.death is None or state.fitted else tuple(state.death.layers_to_checkpoint)
        self._show_proposed()
        chosen, ceiling = state.chosen, state.ceiling
        deaths = {label: death for label, death in state.deaths.items() if any(label == profile.label for profile in chosen)}
        same = len(chosen) == len(self._chosen) and all(one is other for one, other in zip(chosen, self._chosen, strict=True))
        if same and ceiling == self._ceiling and deaths == self._deaths:
            return
        self._chosen, self._ceiling, self._deaths = chosen, ceiling, deaths
        self._show_table(state)
        if chosen:
            self._figure.show(
                lambda theme: mountain_figure(chosen, title="", theme=theme, ceiling=ceiling, deaths=deaths),
                label=_spoken(chosen, deaths, ceiling),
            )
        else:
            self._figure.clear(self._nothing_yet)

    def render(self, dashboard: DashboardState) -> None:
        """Show which layers are checkpointed, and which are to be."""
        self._dashboard = dashboard
        self._table.render(dashboard)
        self._show_proposed()

    def lock(self) -> None:
        """Show that there is nothing left to control; the pictures stay."""
        self._control.lock()
        self._table.lock()

    def close(self) -> None:
        """Close all that it is made of, and forget whom it asks."""
        if self.comm is None:
            return
        self._chosen, self._deaths = (), NO_DEATHS
        self._command = self._request = _nobody
        for part in (self._control, self._figure, self._table):
            part.close()
        if isinstance(self.layout, ipywidgets.Widget):
            self.layout.close()
        super().close()

    def _show_table(self, state: MemoryState) -> None:
        if not state.chosen:
            self._table.show(())
            return
        shown = state.chosen[-1]
        death = state.death if shown.label in self._deaths else None
        step = say("of a step of its own") if shown.step < 0 else say("of step {step}", step=f"{shown.step:,}")
        caption = (
            f"{step}: {in_language(without_step(shown.label))}"
            if death is None
            else say("{step}, until it ran out of memory", step=step)
        )
        self._table.show(shown.layers, caption=caption, died_in=None if death is None else (death.phase, death.layer))

    def _show_proposed(self) -> None:
        requested = () if self._dashboard is None else self._dashboard.requested("checkpointed")
        left = [name for name in self._proposed if name not in requested]
        asked_for = bool(self._proposed) and not left and self._dashboard is not None
        self._control.propose(left, _what_next(self._dashboard, self._proposed) if asked_for and self._dashboard else "")
        self._table.propose(self._proposed)

    def _asked(self, name: str, /, **values: Any) -> None:
        if name != "checkpoint":
            self._command(name, **values)
        elif self._dashboard is not None:
            wanted = {*self._dashboard.requested("checkpointed"), *self._proposed}
            known = [layer.name for layer in self._dashboard.layers if layer.name in wanted]
            self._request(checkpointed=(*known, *sorted(wanted - set(known))))

    def __repr__(self) -> str:
        shown = _spoken(self._chosen, self._deaths, self._ceiling) if self._chosen else "no step profiled yet"
        return f"<amp_widgets memory panel: {shown}>"


def _spoken(chosen: tuple[StepProfileLike, ...], deaths: Mapping[str, Death], ceiling: Ceiling | None) -> str:
    sentence = mountain_sentence(chosen, deaths, ceiling)
    steps = say(" against ").join(in_language(profile.label) for profile in chosen)
    return say("Memory within a step, {steps}: {sentence}", steps=steps, sentence=sentence)


def _what_next(dashboard: DashboardState, names: tuple[str, ...]) -> str:
    """What the user does when the proposed layers are asked for, and no step has fitted since."""
    layers = names[0] if len(names) == 1 else say("the {count} proposed layers", count=len(names))
    if set(names) <= set(dashboard.settings.checkpointed):
        done = say("Checkpointing of {layers} is in force", layers=layers)
    else:
        done = say("Checkpointing of {layers} is requested", layers=layers)
    if dashboard.run == "running" or dashboard.in_cell:
        return say("{done}: the next step tries again with it", done=done)
    if dashboard.run == "paused":
        return say("{done}; press Resume to try again", done=done)
    if dashboard.run == "none":
        return say("{done}; run the cell of your loop again", done=done)
    return say("{done}; press Start to try again", done=done)


def _nobody(*_args: object, **_values: object) -> None:
    """Nobody is asked after `close`."""
