"""The figures of a whole run, as a page and a picture have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from amp_widgets.charts import flags
from amp_widgets.charts.figures import training_figure
from amp_widgets.charts.look import MARGIN_PX, Theme
from amp_widgets.charts.step_times import step_time_figure
from amp_widgets.core.history import Event

if TYPE_CHECKING:
    import plotly.graph_objects as go

LINE_POINTS = 4_000
"""Points that a line is reduced to: more than a screen has pixels, side by side."""


class RunFigures:
    """Training and step time over the same steps.

    Parameters
    ----------
    columns, events
        Of the history.
    memory_source
        How the memory numbers are obtained, for people.
    """

    def __init__(self, columns: Mapping[str, npt.NDArray[Any]], events: Sequence[Event], *, memory_source: str) -> None:
        self._columns, self._events, self._source = columns, events, memory_source
        step = columns["step"]
        self.limit = LINE_POINTS if step.size > LINE_POINTS else None
        """Points that a line is reduced to; None where all are drawn."""
        ends = [*step[[0, -1]].tolist(), *(event.step for event in events)] if step.size else [0, 1]
        length = max(max(ends) - min(ends), 1)
        self._across = [min(ends) - 0.06 * length, max(ends) + 0.02 * length]  # a mark at the first step is beside the titles

    def training(self, theme: Theme) -> go.Figure:
        """Loss, loss scale and memory; every skipped step and every change of the scale, however long the run is."""
        figure = training_figure(
            self._columns, self._events, memory_source=self._source, theme=theme, limit=self.limit, keep_scale=True
        )
        return _without_empty_lanes(figure).update_xaxes(range=self._across)

    def step_times(self, theme: Theme) -> go.Figure:
        """How long steps took."""
        figure = step_time_figure(self._columns["step"], self._columns["step_s"], theme=theme, limit=self.limit)
        return figure.update_xaxes(range=self._across)


def _without_empty_lanes(figure: go.Figure) -> go.Figure:
    """The chart without the room above it that no label of a change needs."""
    lanes_px = [note.yshift + flags.LANE_PX for note in figure.layout.annotations if note.yshift]
    unused_px = MARGIN_PX["t"] - 4 - max([flags.FIRST_LANE_PX + 4, *lanes_px])
    margin = figure.layout.margin
    return figure.update_layout(height=figure.layout.height - unused_px, margin={"t": margin.t - unused_px})
