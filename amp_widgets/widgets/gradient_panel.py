"""How large the gradients of a step are, what another loss scale would make of them, and why steps were skipped."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import ipywidgets

from amp_widgets.analysis.gradients import GradientRange
from amp_widgets.charts.exponents import exponent_figure, exponent_sentence
from amp_widgets.charts.figure_view import FigureView
from amp_widgets.language import in_language, marked, say
from amp_widgets.widgets.gradient_control import GradientCommand, GradientControl, no_match_text
from amp_widgets.widgets.gradient_state import GradientState, nearest_exponent
from amp_widgets.widgets.gradient_table import GradientTable
from amp_widgets.widgets.state import DashboardState

NOTHING_RECORDED = marked("The gradients of no step up to here were recorded.")
NOTHING_YET = marked(
    "No step has been sampled yet. What is drawn then: how many gradients there are of each size, over the zones of fp16."
)


class GradientPanel(ipywidgets.Box):
    """Shows the gradients of a sampled step; asks for more and for a loss scale; changes nothing itself.

    Parameters
    ----------
    command
        Called for what concerns the panel: ``command("sample")`` the next step; ``command("every", steps=n)``, 0 for none.
    request
        Called for settings, as by every control: ``request(init_scale=2.0**k)``.
    state, dashboard
        What to show first.
    recorded
        Whether it is of a run that was recorded: nothing can be sampled.
    """

    def __init__(
        self,
        command: GradientCommand,
        request: Callable[..., None],
        state: GradientState | None = None,
        dashboard: DashboardState | None = None,
        *,
        recorded: bool = False,
    ) -> None:
        self._nothing_yet = say(NOTHING_RECORDED) if recorded else say(NOTHING_YET)
        self._command: Callable[..., None] = command
        self._request = request
        self._range: GradientRange | None = None
        self._pattern = ""
        self._chosen: int | None = None  # by the user, on the slider; else the scale that the step had
        self._drawn: tuple[Any, ...] | None = None
        self._drawing = threading.Lock()
        self._control = GradientControl(self._asked, dashboard, recorded=recorded)
        self._figure = FigureView(note=self._nothing_yet)
        self._table = GradientTable(self._filter)
        super().__init__((self._control, self._figure, self._table), _dom_classes=("ampw-gradient-panel",))
        self.show(GradientState() if state is None else state)

    @property
    def exponent(self) -> int:
        """The loss scale that is shown, as a power of two."""
        if self._chosen is not None:
            return self._chosen
        return 0 if self._range is None else nearest_exponent(self._range.scale)

    def show(self, state: GradientState) -> None:
        """Show this state; nothing is sent or drawn anew when it is what is shown."""
        self._range = state.range
        self._control.show(state)
        self._draw()

    def render(self, dashboard: DashboardState) -> None:
        """Show which loss scale is set, and whether it is in force."""
        self._control.render(dashboard)

    def lock(self) -> None:
        """Show that there is nothing left to control; the pictures stay."""
        self._control.lock()
        self._table.lock()

    def close(self) -> None:
        """Close all that it is made of, and forget whom it asks."""
        if self.comm is None:
            return
        self._range = None
        self._command = self._request = _nobody
        for part in (self._control, self._figure, self._table):
            part.close()
        if isinstance(self.layout, ipywidgets.Widget):
            self.layout.close()
        super().close()

    def _draw(self) -> None:
        with self._drawing:  # the slider moves on another thread than the one that brings a new step
            self._draw_now()

    def _draw_now(self) -> None:
        wanted = (self._range, self.exponent, self._pattern)
        if self._drawn is not None and self._drawn[0] is wanted[0] and self._drawn[1:] == wanted[1:]:
            return
        self._drawn = wanted
        found, exponent, pattern = wanted
        scale = 2.0**exponent
        self._table.show(found, pattern, scale)
        matching = None if found is None else found.matching(pattern)
        self._control.show_range(found, exponent, pattern)
        if matching is None:
            self._figure.clear(self._nothing_yet)
        elif not matching.at_stake:
            self._figure.clear(no_match_text(pattern) if pattern else say("No layer to be drawn"))
        else:
            self._figure.show(
                lambda theme: exponent_figure(matching, scale=scale, title="", theme=theme), label=_spoken(matching, scale)
            )

    def _asked(self, name: str, /, **values: Any) -> None:
        if name == "scale":
            self._chosen = int(values["exponent"])
            self._draw()
        elif name == "use":
            self._request(init_scale=2.0**self.exponent)
        else:
            self._command(name, **values)

    def _filter(self, *, pattern: str) -> None:
        self._pattern = pattern
        self._draw()

    def __repr__(self) -> str:
        what = "no step sampled yet" if self._range is None else _spoken(self._range, 2.0**self.exponent)
        return f"<amp_widgets gradient panel: {what}>"


def _spoken(found: GradientRange, scale: float) -> str:
    return ". ".join([exponent_sentence(found, scale), *map(in_language, found.sentences(scale))])


def _nobody(*_args: object, **_values: object) -> None:
    """Nobody is asked after `close`."""
