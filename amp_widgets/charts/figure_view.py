"""A Plotly figure in a notebook, light or dark as the page is, without a network and with one plotly.js a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from amp_widgets.charts._extras import missing_extra
from amp_widgets.charts.asset import PlotlyAsset, plotly_asset
from amp_widgets.charts.look import Theme
from amp_widgets.charts.page_scripts import page_script, page_style
from amp_widgets.charts.two_themes import two_themes
from amp_widgets.language import page_script_in_language, say

try:
    import anywidget
    import plotly.graph_objects as go
    import traitlets
    from ipywidgets import widget_serialization
except ImportError as error:
    raise missing_extra(error) from error


class FigureView(anywidget.AnyWidget):
    """Shows a figure that changes now and then, or a note while there is none.

    What it shows is its state, so that a page that is reloaded has it again. For a figure that grows with each step see
    :class:`amp_widgets.charts.live.TrainingChart`.

    Parameters
    ----------
    note
        What is said while there is no figure.
    """

    _esm = page_script("figure_view")
    _css = page_style()
    figure = traitlets.Dict(help="data, layout, and what is different in dark; empty without a figure.").tag(sync=True)
    note = traitlets.Unicode().tag(sync=True)
    label = traitlets.Unicode(help="What a screen reader says of the figure.").tag(sync=True)
    asset = traitlets.Instance(PlotlyAsset).tag(sync=True, **widget_serialization)

    def __init__(self, *, note: str = "") -> None:
        note = note or say("nothing to show yet")
        self._esm = page_script_in_language(type(self)._esm)
        super().__init__(note=note, label=note, asset=plotly_asset())

    def show(self, draw: Callable[[Theme], go.Figure], *, label: str, own: bool = False) -> None:
        """Show another figure; one that is equal to the one shown is not sent again.

        Parameters
        ----------
        draw
            Theme → figure; its colours may differ between the themes, and what else does costs a message's size.
        label
            The same in words.
        own
            It is one of the user's: but for colours, it is laid out as Plotly does it.
        """
        figure = two_themes(draw)
        self._put({**figure, "own": True} if own else figure, label)

    def clear(self, note: str) -> None:
        """Show `note` and no figure."""
        self.note = note
        self._put({}, note)

    def close(self) -> None:
        """Remove every view."""
        if self.comm is not None and self.layout is not None:
            self.layout.close()
        super().close()

    def __repr__(self) -> str:
        return f"<FigureView: {self.label}>"

    def _put(self, figure: Mapping[str, Any], label: str) -> None:
        with self.hold_sync():
            self.figure, self.label = dict(figure), label
