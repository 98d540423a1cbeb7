"""From a budget to a decision: the plan and its picture, the largest batch that fits, and what a GPU would need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ipywidgets

from amp_widgets.charts.figure_view import FigureView
from amp_widgets.charts.pareto import pareto_figure, pareto_sentence
from amp_widgets.language import marked, say
from amp_widgets.widgets.plan_control import PlanControl
from amp_widgets.widgets.plan_state import PlanState
from amp_widgets.widgets.plan_tables import BatchSizesControl, CudaControl
from amp_widgets.widgets.state import DashboardState

NOTHING_YET = marked(
    "Nothing was planned yet. What is drawn then: the peak memory of a step with each set of layers, and its extra time."
)


class PlanPanel(ipywidgets.Box):
    """Shows plans and predictions, and asks for others and for the settings they propose; changes nothing itself.

    Parameters
    ----------
    command
        As of `PlanControl` and `TableControl`.
    request
        Called for settings, as by every control.
    state, dashboard
        What to show first.
    """

    def __init__(
        self,
        command: Callable[..., None],
        request: Callable[..., None],
        state: PlanState | None = None,
        dashboard: DashboardState | None = None,
    ) -> None:
        self._drawn: Any = None
        self._control = PlanControl(command, request, self._budget_changed, dashboard=dashboard)
        self._figure = FigureView(note=say(NOTHING_YET))
        self._batches = BatchSizesControl(command, self._budget)
        self._cuda = CudaControl(command)
        self._parts = (self._control, self._batches, self._cuda)
        super().__init__((self._control, self._figure, self._batches, self._cuda), _dom_classes=("ampw-plan-panel",))
        if dashboard is not None:
            self.render(dashboard)
        if state is not None:
            self.show(state)

    def show(self, state: PlanState) -> None:
        """Show this; nothing is sent or drawn anew when it is what is shown."""
        for part in self._parts:
            part.show(state)
        self._batches.show_budget()
        self._draw(state)

    def render(self, dashboard: DashboardState) -> None:
        """Show what is in force."""
        for part in self._parts:
            part.render(dashboard)
        self._batches.show_budget()

    def lock(self) -> None:
        """Show that there is nothing left to control; what was found stays."""
        for part in self._parts:
            part.lock()

    def close(self) -> None:
        """Close all that it is made of, and forget whom it asks."""
        if self.comm is None:
            return
        self._drawn = None
        for part in (*self._parts, self._figure):
            part.close()
        if isinstance(self.layout, ipywidgets.Widget):
            self.layout.close()
        super().close()

    def _budget(self) -> float | None:
        return self._control.budget_bytes or None

    def _budget_changed(self) -> None:
        self._batches.show_budget()

    def _draw(self, state: PlanState) -> None:
        plan = state.newest
        points = self._control.points
        drawn = (plan, repr(points))  # NaN is not equal to itself
        if self._drawn is not None and self._drawn[0] is plan and self._drawn[1] == drawn[1]:
            return
        self._drawn = drawn
        if plan is None:
            self._figure.clear(say(NOTHING_YET))
            return
        sentence = pareto_sentence(plan.points, budget_bytes=plan.budget_bytes)
        self._figure.show(
            lambda theme: pareto_figure(plan.points, budget_bytes=plan.budget_bytes, measured=points, title="", theme=theme),
            label=say("Peak memory and extra time of sets of layers. {sentence}", sentence=sentence),
        )

    def __repr__(self) -> str:
        return f"<amp_widgets plan panel: {self._control!r}>"
