"""A place on the page for one dashboard after the other."""

from __future__ import annotations

import ipywidgets
from IPython.core.display_functions import update_display

from amp_widgets.language import say
from amp_widgets.widgets.dashboard import Dashboard
from amp_widgets.widgets.still import NOT_SHOWN


class Frame(ipywidgets.Box):
    """Shows one dashboard at a time, in outputs that are there already.

    An output whose widget is replaced by another is hidden by JupyterLab when the first one is closed; the frame stays.

    Parameters
    ----------
    places
        Display ids of two outputs: for the dashboard, and for the picture that stays in the notebook.
    """

    def __init__(self, places: tuple[str, str]) -> None:
        super().__init__(layout={"display": "block"})
        self._place, self._picture_place = places
        self._shown = False

    def put(self, dashboard: Dashboard) -> None:
        """Show this one."""
        self.children = (dashboard,)
        if not self._shown:
            self._shown = True
            view = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
            bundle = {"text/plain": say(NOT_SHOWN), "application/vnd.jupyter.widget-view+json": view}
            update_display(bundle, raw=True, display_id=self._place)
        dashboard.show_picture_in(self._picture_place)

    def close(self) -> None:
        """Take it off the page."""
        if self.layout is not None:
            self.layout.close()
        super().close()
