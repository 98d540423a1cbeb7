"""Settings side by side: what is compared and what came out, and its picture, peak memory against step time."""

from __future__ import annotations

from collections.abc import Callable

import ipywidgets

from amp_widgets.analysis.comparison import Comparison
from amp_widgets.charts.comparison import comparison_sentence
from amp_widgets.charts.figure_view import FigureView
from amp_widgets.language import marked, say
from amp_widgets.widgets.compare_control import CompareControl, CompareState
from amp_widgets.widgets.state import DashboardState

NOTHING_YET = marked(
    "Nothing was compared yet. What is drawn then: the peak memory and the step time of each combination, as a point."
)


class ComparePanel(ipywidgets.Box):
    """Shows the newest comparison, and asks for others and for the settings of a row; changes nothing itself.

    Parameters
    ----------
    command, request
        As of `CompareControl`.
    state, dashboard
        What to show first.
    """

    def __init__(
        self,
        command: Callable[..., None],
        request: Callable[..., None],
        state: CompareState | None = None,
        dashboard: DashboardState | None = None,
    ) -> None:
        self._drawn: Comparison | None = None
        self._control = CompareControl(command, request, dashboard=dashboard)
        self._figure = FigureView(note=say(NOTHING_YET))
        super().__init__((self._control, self._figure), _dom_classes=("ampw-compare-panel",))
        if state is not None:
            self.show(state)

    def show(self, state: CompareState) -> None:
        """Show this; nothing is sent or drawn anew when it is what is shown."""
        self._control.show(state)
        result = state.status.result
        if result is self._drawn:
            return
        self._drawn = result
        if result is None:
            self._figure.clear(say(NOTHING_YET))
        else:
            sentence = comparison_sentence(result.rows)
            self._figure.show(
                lambda theme: result.to_figure(title="", theme=theme),
                label=say("Settings compared. {sentence}", sentence=sentence),
            )

    def render(self, dashboard: DashboardState) -> None:
        """Show what can be compared, and what is in force."""
        self._control.render(dashboard)

    def lock(self) -> None:
        """Show that there is nothing left to control; what was compared stays."""
        self._control.lock()

    def close(self) -> None:
        """Close all that it is made of, and forget whom it asks."""
        if self.comm is None:
            return
        self._drawn = None
        self._control.close()
        self._figure.close()
        if isinstance(self.layout, ipywidgets.Widget):
            self.layout.close()
        super().close()

    def __repr__(self) -> str:
        return f"<amp_widgets compare panel: {self._control!r}>"
