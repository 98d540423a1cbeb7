"""How long steps took, as a Plotly figure."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from amp_widgets.charts import look
from amp_widgets.charts._extras import missing_extra
from amp_widgets.charts.decimate import Points, evened
from amp_widgets.charts.look import Theme
from amp_widgets.charts.series import drawable, lone
from amp_widgets.language import say

try:
    import plotly.graph_objects as go
except ImportError as error:
    raise missing_extra(error) from error

HEIGHT_PX = 250
MARGIN_PX = {"t": 40, "b": 46, "l": 64, "r": 34}
USUAL = 0.98
"""What is more than three times as long as this share of the steps is cut off: the first step alone may take a hundred times
as long as the others."""


def step_time_figure(
    step: npt.NDArray[Any], step_s: npt.NDArray[Any], *, theme: Theme = "light", limit: int | None = None
) -> go.Figure:
    """Seconds that each step took, over steps.

    Parameters
    ----------
    step, step_s
        Of shape (rows,); `step_s` in seconds, NaN where not measured.
    theme
        ``"light"`` or ``"dark"``.
    limit
        Points that the line is reduced to, with its extremes kept; None draws all.
    """
    colours = look.COLOURS[theme]
    points: Points = step.astype(np.float64), drawable(step_s)
    known = points[1][~np.isnan(points[1])]
    x, y = points if limit is None else evened(*points, limit)
    alone_x, alone_y = lone((x, y))
    usual_s = float(np.quantile(known, USUAL)) if known.size else 0.0
    cut = known.size > 0 and 0 < 3 * usual_s < known.max()
    axis = {"gridcolor": colours.grid, "zeroline": False, "linecolor": colours.muted}
    layout = look.framed(colours, height_px=HEIGHT_PX, margin_px=MARGIN_PX) | {
        "showlegend": False,
        "hovermode": "x",
        "xaxis": axis | {"tickformat": ",d", "hoverformat": ",d", "title": {"text": say("step"), "standoff": 8}},
        "yaxis": axis | {"rangemode": "tozero", "tickformat": "~s", "ticksuffix": "s", "exponentformat": "SI"},
    }
    if cut:
        layout["yaxis"] |= {"range": [0, 2 * usual_s]}
    words = ""
    if cut:
        longest = f"{known.max():.3g}"
        words = say(", up to {longest} s: what is above the plot is cut off, and is seen on zooming out", longest=longest)
    layout["title"]["text"] = f"<b>{say('step time')}</b>{words}"
    layout["title"]["font"] = {"size": 12}
    if not known.size:
        note = {"text": say("not measured"), "x": 0.5, "y": 0.5, "xref": "paper", "yref": "paper", "showarrow": False}
        layout["annotations"] = [note | {"font": {"color": colours.muted}}]
    hover = {"hovertemplate": "%{y:.4~s}s<extra></extra>"}
    traces = [
        {"type": "scatter", "mode": "lines", "x": x, "y": y, "line": {"color": colours.loss, "width": 1.5}} | hover,
        {"type": "scatter", "mode": "markers", "x": alone_x, "y": alone_y, "marker": {"color": colours.loss, "size": 5}}
        | {"hoverinfo": "skip"},
    ]
    return go.Figure(traces, layout | {"template": go.layout.Template()})
