"""The panels below the charts, one in each tab: memory, gradients, number formats, checks, plans, settings side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, get_args

import ipywidgets

from amp_widgets import kernel
from amp_widgets.analysis.comparisons import ComparisonStatus
from amp_widgets.analysis.dtype_map import DtypeMap
from amp_widgets.analysis.inspections import Inspection, InspectionKind
from amp_widgets.analysis.plan import Plan
from amp_widgets.language import in_language, marked, say
from amp_widgets.widgets.checks_panel import ChecksState
from amp_widgets.widgets.checks_tab import ChecksTab
from amp_widgets.widgets.compare_control import CompareState
from amp_widgets.widgets.compare_panel import ComparePanel
from amp_widgets.widgets.dtype_panel import DtypePanel, DtypeState
from amp_widgets.widgets.gradient_panel import GradientPanel
from amp_widgets.widgets.gradient_source import GradientSource
from amp_widgets.widgets.measured_settings import MeasuredSettings
from amp_widgets.widgets.memory_panel import MemoryPanel
from amp_widgets.widgets.plan_panel import PlanPanel
from amp_widgets.widgets.plan_state import PlanState
from amp_widgets.widgets.precision_panel import KINDS, PrecisionState
from amp_widgets.widgets.state import Controlled, DashboardState
from amp_widgets.widgets.tab_bar import TabBar
from amp_widgets.widgets.text import not_done_text

Tab = Literal["memory", "gradients", "formats", "checks", "plan", "compare"]
TABS: tuple[Tab, ...] = get_args(Tab)
TITLES: Mapping[Tab, str] = {
    "memory": marked("Memory"),
    "gradients": marked("Gradients"),
    "formats": marked("Formats"),
    "checks": marked("Checks"),
    "plan": marked("Plan"),
    "compare": marked("Compare"),
}
Panel = MemoryPanel | PlanPanel | GradientPanel | DtypePanel | ChecksTab | ComparePanel
AnyPanel = TypeVar("AnyPanel", bound=Panel)


class Panels(ipywidgets.Box):
    """Tabs over panels, of which one is shown. A panel is made when it is shown first, and one that is hidden is left alone.

    Parameters
    ----------
    memory
        The panel of the first tab.
    command
        Called for what concerns a panel: ``command("sample")``, ``command("every", steps=n)``, ``command("automatic", on=True)``,
        ``command("compare", grid=…, steps=…, rounds=…)``, ``command("cancel")``, ``command(kind, …)`` with a kind of inspection
        and its options, and ``command("cancel_inspection", kind=kind)``.
    request
        Called for settings, as by every control.
    choose
        Called with the name of a tab that the user asks for: it is to be selected, and what is in it to be pulled.
    dashboard
        What to show first.
    clock
        Seconds, monotonic.
    """

    def __init__(
        self,
        memory: MemoryPanel,
        command: Callable[..., None],
        request: Callable[..., None],
        choose: Callable[[Tab], None],
        dashboard: DashboardState,
        clock: Callable[[], float],
    ) -> None:
        self._command = command
        self._request = request
        self._dashboard = dashboard
        self._source = GradientSource(clock)
        self._measured = MeasuredSettings()
        self._told: dict[str, Inspection | ComparisonStatus] = {}
        self._locked = False
        self._bar = TabBar(choose, [(name, say(title)) for name, title in TITLES.items()])
        self._panels: dict[Tab, Panel] = {"memory": _in_tab(memory, "memory")}
        super().__init__((self._bar, memory), _dom_classes=("ampw-tabs",))

    @property
    def shown(self) -> Tab:
        """The tab that is shown."""
        return next(name for name in TABS if name == self._bar.selected)

    def select(self, name: Tab) -> None:
        """Show this one."""
        if name not in self._panels:
            if self._locked:
                return
            self._panels[name] = self._made(name)
            self.children = (self._bar, *self._panels.values())
        self._bar.select(name)
        if not self._locked:
            self._panels[name].render(self._dashboard)

    def render(self, dashboard: DashboardState) -> None:
        """Show this state in the panel that is shown."""
        self._dashboard = dashboard
        self._panels[self.shown].render(dashboard)

    def pull(self, source: Controlled, *, trains: bool, everything: bool = False) -> str | None:
        """Show what is new in the panel that is shown, or in all there are; but for that of memory, which is told by others.

        Returns
        -------
        str or None
            That what was asked for could not be made, and why, once.
        """
        found = None
        for name in [*self._panels] if everything else [self.shown]:
            match self._panels[name]:
                case GradientPanel() as panel:
                    history = source.history_so_far
                    panel.show(self._source.state(source.numerics, history, trains=trains, at_once=everything))
                case PlanPanel() as panel:
                    plan, largest = source.inspection("plan"), source.inspection("largest_batch")
                    on_cuda = source.inspection("predict_on_cuda")
                    panel.show(
                        PlanState(
                            plan=plan,
                            largest_batch=largest,
                            on_cuda=on_cuda,
                            measured=self._measured.pull(source.history_so_far),
                            why_no_batch=source.why_no_plan,
                            budget_bytes=source.memory_budget,
                        )
                    )
                    found = self._news("plan", plan) or self._news("largest_batch", largest) or found
                    found = self._news("predict_on_cuda", on_cuda) or found
                case DtypePanel() as panel:
                    taken = source.inspection("dtype_map")
                    panel.show(_dtype_state(taken, source.why_no_batch))
                    found = self._news("dtype_map", taken) or found
                case ChecksTab() as panel:
                    check, preflight = source.inspection("check"), source.inspection("preflight")
                    why_no_batch = source.why_no_batch
                    costs = {reference: source.inspection(kind) for reference, kind in KINDS.items()}
                    panel.show(
                        ChecksState(check=check, preflight=preflight, automatic=source.check_changes, why_no_batch=why_no_batch),
                        PrecisionState(**costs, why_no_batch=why_no_batch),
                    )
                    found = self._news("check", check) or self._news("preflight", preflight) or found
                    for reference, kind in KINDS.items():
                        found = self._news(kind, costs[reference]) or found
                case ComparePanel() as panel:
                    compared = source.comparison
                    newest = source.inspection("plan").result
                    planned = newest.layers if isinstance(newest, Plan) else None
                    panel.show(CompareState(status=compared, why_no_batch=source.why_no_comparison, planned=planned))
                    found = self._news("compare", compared) or found
        return found

    def lock(self) -> None:
        """Show that there is nothing left to control; what has been shown can still be looked at."""
        self._locked = True
        for name, panel in self._panels.items():
            if name != self.shown:
                panel.render(self._dashboard)
            panel.lock()
        self._bar.close_tabs([name for name in TABS if name not in self._panels])

    def close(self) -> None:
        """Close all that it is made of, and forget whom it asks."""
        if self.comm is None:
            return
        self._command = self._request = _nobody
        for part in (self._bar, *self._panels.values()):
            part.close()
        self._panels.clear()
        if isinstance(self.layout, ipywidgets.Widget):
            self.layout.close()
        super().close()

    def _made(self, name: Tab) -> Panel:
        panel: Panel
        if name == "gradients":
            panel = GradientPanel(self._command, self._request, dashboard=self._dashboard)
        elif name == "formats":
            panel = DtypePanel(self._command, self._request, dashboard=self._dashboard)
        elif name == "plan":
            panel = PlanPanel(self._command, self._request, dashboard=self._dashboard)
        elif name == "compare":
            panel = ComparePanel(self._command, self._request, dashboard=self._dashboard)
        else:
            panel = ChecksTab(self._command, self._request, self._dashboard)
        for widget in _widgets_of(panel):
            kernel.answer_where_asked(widget.comm)
        return _in_tab(panel, name)

    def _news(self, kind: InspectionKind | Literal["compare"], now: Inspection | ComparisonStatus) -> str | None:
        """That it could not be made, and why, if that was not told yet."""
        before = self._told.get(kind)
        self._told[kind] = now
        if now is before or now.pending or now.why_not is None:
            return None
        return not_done_text(kind, now.why_not)

    def __repr__(self) -> str:
        return f"<amp_widgets panels: {self.shown} is shown>"


def _in_tab(panel: AnyPanel, name: Tab) -> AnyPanel:
    panel.add_class("ampw-tab")
    panel.add_class(f"ampw-tab-{name}")
    return panel


def _widgets_of(widget: Any) -> list[Any]:
    children = getattr(widget, "children", ())
    return [widget, widget.layout, *(one for child in children for one in _widgets_of(child))]


def _dtype_state(taken: Inspection, why_no_batch: str | None) -> DtypeState:
    return DtypeState(
        map=taken.result if isinstance(taken.result, DtypeMap) else None,
        pending=taken.pending,
        why_not=taken.why_not,
        available=why_no_batch is None,
        why_not_available="" if why_no_batch is None else in_language(why_no_batch),
    )


def _nobody(*_args: object, **_values: object) -> None:
    """Nobody is asked after `close`."""
