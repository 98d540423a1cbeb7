"""The memory within a step: its mountain, before and after a change, and the table of the layers."""

from __future__ import annotations

from collections.abc import Callable

import ipywidgets

from amp_widgets.charts.figure_view import FigureView
from amp_widgets.charts.mountain import mountain_figure, mountain_sentence
from amp_widgets.widgets.layer_table import LayerTable
from amp_widgets.widgets.memory_control import Command, MemoryControl
from amp_widgets.widgets.memory_state import MemoryState, StepProfileLike
from amp_widgets.widgets.state import DashboardState

NOTHING_YET = "No step has been profiled yet. What is drawn then: the memory over one step, and which layers it is made of."


class MemoryPanel(ipywidgets.Box):
    """Shows profiled steps; asks for more, for others, and for layers to be checkpointed; changes nothing itself.

    Parameters
    ----------
    command
        Called for what concerns the panel: ``command("profile")``, ``command("show", labels=(before, after))``.
    request
        Called for settings, as by every control: ``request(checkpointed=names)``.
    state, dashboard
        What to show first.
    """

    def __init__(
        self,
        command: Command,
        request: Callable[..., None],
        state: MemoryState | None = None,
        dashboard: DashboardState | None = None,
    ) -> None:
        self._chosen: tuple[StepProfileLike, ...] = ()
        self._control = MemoryControl(command)
        self._figure = FigureView(note=NOTHING_YET)
        self._table = LayerTable(request, dashboard)
        super().__init__((self._control, self._figure, self._table), _dom_classes=("ampw-memory-panel",))
        if state is not None:
            self.show(state)

    def show(self, state: MemoryState) -> None:
        """Show this state; nothing is sent or drawn anew when it is what is shown."""
        self._control.show(state)
        chosen = state.chosen
        if len(chosen) == len(self._chosen) and all(one is other for one, other in zip(chosen, self._chosen, strict=True)):
            return
        self._chosen = chosen
        self._table.show(chosen[-1].layers if chosen else ())
        if chosen:
            self._figure.show(lambda theme: mountain_figure(chosen, title="", theme=theme), label=_spoken(chosen))
        else:
            self._figure.clear(NOTHING_YET)

    def render(self, dashboard: DashboardState) -> None:
        """Show which layers are checkpointed, and which are to be."""
        self._table.render(dashboard)

    def lock(self) -> None:
        """Show that there is nothing left to control; the pictures stay."""
        self._control.lock()
        self._table.lock()

    def close(self) -> None:
        """Close all that it is made of, and forget whom it asks."""
        if self.comm is None:
            return
        self._chosen = ()
        for part in (self._control, self._figure, self._table):
            part.close()
        if isinstance(self.layout, ipywidgets.Widget):
            self.layout.close()
        super().close()

    def __repr__(self) -> str:
        return f"<amp_widgets memory panel: {_spoken(self._chosen) if self._chosen else 'no step profiled yet'}>"


def _spoken(chosen: tuple[StepProfileLike, ...]) -> str:
    return f"Memory within a step, {' against '.join(profile.label for profile in chosen)}: {mountain_sentence(chosen)}"
