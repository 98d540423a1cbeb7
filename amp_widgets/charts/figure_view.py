"""A Plotly figure in a notebook, light or dark as the page is, without a network and with one plotly.js a page."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from amp_widgets.charts._extras import missing_extra
from amp_widgets.charts.asset import PlotlyAsset, page_script, plotly_asset
from amp_widgets.charts.look import Theme

try:
    import anywidget
    import plotly.graph_objects as go
    import traitlets
    from ipywidgets import widget_serialization
except ImportError as error:
    raise missing_extra(error) from error

_HERE = pathlib.Path(__file__).parent


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
    _css = (_HERE / "live.css").read_text(encoding="utf-8") + ".amp-figure-note { margin: 0; padding: 2px 0; font-size: 13px; }"
    figure = traitlets.Dict(help="data, layout, and what is different in dark; empty without a figure.").tag(sync=True)
    note = traitlets.Unicode().tag(sync=True)
    label = traitlets.Unicode(help="What a screen reader says of the figure.").tag(sync=True)
    asset = traitlets.Instance(PlotlyAsset).tag(sync=True, **widget_serialization)

    def __init__(self, *, note: str = "nothing to show yet") -> None:
        super().__init__(note=note, label=note, asset=plotly_asset())

    def show(self, draw: Callable[[Theme], go.Figure], *, label: str) -> None:
        """Show another figure; one that is equal to the one shown is not sent again.

        Parameters
        ----------
        draw
            Theme → figure; its colours may differ between the themes, and what else does costs a message's size.
        label
            The same in words.
        """
        light, dark = (json.loads(draw(theme).to_json()) for theme in ("light", "dark"))
        changes = [[list(path), value] for path, value in _differences(light, dark)]
        self._put({"data": light["data"], "layout": light["layout"], "dark": changes}, label)

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


def _differences(one: Any, other: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Where `other`, of plain JSON, differs from `one`, and what it has there."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key in one:
            yield from _differences(one[key], other[key], (*path, key))
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for i, (here, there) in enumerate(zip(one, other, strict=True)):
            yield from _differences(here, there, (*path, i))
    elif one != other:
        yield path, other
