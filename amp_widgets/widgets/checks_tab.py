"""What the tab of the checks holds: parity and preflight, and what precision costs."""

from __future__ import annotations

from collections.abc import Callable

import ipywidgets

from amp_widgets.widgets.checks_panel import ChecksPanel, ChecksState
from amp_widgets.widgets.precision_panel import PrecisionPanel, PrecisionState
from amp_widgets.widgets.state import DashboardState


class ChecksTab(ipywidgets.Box):
    """Two panels, one below the other.

    Parameters
    ----------
    command
        Called for what concerns the panels, see `ChecksPanel` and `PrecisionPanel`.
    request
        Called for settings, as by every control.
    dashboard
        What to show first.
    """

    def __init__(
        self, command: Callable[..., None], request: Callable[..., None], dashboard: DashboardState | None = None
    ) -> None:
        self._checks = ChecksPanel(command)
        self._precision = PrecisionPanel(command, request, dashboard=dashboard)
        super().__init__((self._checks, self._precision), _dom_classes=("ampw-checks-tab",))

    def show(self, checks: ChecksState, precision: PrecisionState) -> None:
        """Show these; nothing is sent when they are what is shown."""
        self._checks.show(checks)
        self._precision.show(precision)

    def render(self, dashboard: DashboardState) -> None:
        """Show which layers are kept in FP32, and which are to be."""
        self._precision.render(dashboard)

    def lock(self) -> None:
        """Show that there is nothing left to control; the reports stay."""
        self._checks.lock()
        self._precision.lock()

    def close(self) -> None:
        """Close both, and forget whom they ask."""
        if self.comm is None:
            return
        self._checks.close()
        self._precision.close()
        if isinstance(self.layout, ipywidgets.Widget):
            self.layout.close()
        super().close()

    def __repr__(self) -> str:
        return f"<amp_widgets checks: {self._checks!r}, {self._precision!r}>"
