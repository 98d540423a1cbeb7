"""What dashboards of all kinds are: a box of widgets, shown in a notebook."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ipywidgets

from amp_widgets.language import say
from amp_widgets.widgets.still import NOT_SHOWN


class DashboardBox(ipywidgets.Box):
    """A box that knows all that is in it."""

    def widgets(self) -> Iterator[ipywidgets.Widget]:
        """Every widget that the dashboard is made of, itself and the layouts included."""
        return parts_of(self)

    def _repr_mimebundle_(self, **_kwargs: Any) -> dict[str, Any]:
        return {
            "text/plain": say(NOT_SHOWN),
            "application/vnd.jupyter.widget-view+json": {"version_major": 2, "version_minor": 0, "model_id": self._model_id},
        }


def parts_of(widget: ipywidgets.Widget) -> Iterator[ipywidgets.Widget]:
    """A widget, all that is in it, and their layouts."""
    waiting: list[Any] = [widget]
    while waiting:
        widget = waiting.pop()
        yield widget
        waiting.extend(getattr(widget, "children", ()))
        layout = getattr(widget, "layout", None)
        if isinstance(layout, ipywidgets.Widget):
            yield layout
