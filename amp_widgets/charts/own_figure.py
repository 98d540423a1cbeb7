"""Any Plotly figure in the look of the notebook, light or dark: one of the user's own, or one that is made for each theme."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from typing import Any

from amp_widgets.charts._extras import missing_extra
from amp_widgets.charts.distinct import LINE_COLOURS
from amp_widgets.charts.figure_view import FigureView
from amp_widgets.charts.look import COLOURS, Theme
from amp_widgets.errors import AmpWidgetsError
from amp_widgets.language import say

try:
    import plotly.graph_objects as go
    import plotly.io as pio
except ImportError as error:
    raise missing_extra(error) from error

HEIGHT_PX = 360
"""Of a figure that says none, as JupyterLab has it."""


def figure_view(figure: go.Figure | Callable[..., go.Figure], /, *args: Any, **options: Any) -> FigureView:
    """Show a Plotly figure in the look of the notebook: light or dark as that is, and as `present` has it.

    A figure that is displayed by itself is white in a dark notebook, too.

    Parameters
    ----------
    figure
        One of yours; it is copied, and what says nothing of colours gets those of the theme. Or the ``to_figure`` of a profile or
        a comparison, which is called for each theme.
    *args, **options
        What ``to_figure`` is called with.

    Returns
    -------
    FigureView
        A widget, to be displayed by being the last expression of a cell.

    Raises
    ------
    AmpWidgetsError
        When it is neither a figure nor what makes one.
    MissingExtraError
        When plotly or anywidget is not installed.

    Examples
    --------
    >>> aw.figure_view(after.to_figure, before)                       # doctest: +SKIP
    >>> aw.figure_view(go.Figure(go.Scatter(y=losses)))               # doctest: +SKIP
    """
    view = FigureView()
    if callable(figure):
        draw, own = (lambda theme: _checked(figure(*args, **options, theme=theme))), False
    else:
        _checked(figure)
        draw, own = (lambda theme: in_theme(figure, theme)), True
    view.show(draw, label=figure_label(draw("light")), own=own)
    return view


def in_theme(figure: go.Figure, theme: Theme) -> go.Figure:
    """A copy of a figure in the colours of a theme, where it has none of its own.

    Parameters
    ----------
    figure
        Any; backgrounds and the colour of text are those of the theme in any case.
    theme
        ``"light"`` or ``"dark"``.
    """
    colours, made = COLOURS[theme], go.Figure(figure)
    if made.layout.template.to_plotly_json() in ({}, _default_template()):
        made.layout.template = _template(theme)
    made.layout.height = made.layout.height or HEIGHT_PX
    made.update_layout(
        paper_bgcolor=colours.background,
        plot_bgcolor=colours.background,
        font_color=colours.text,
        hoverlabel={"bgcolor": colours.background, "bordercolor": colours.muted, "font": {"color": colours.text}},
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": colours.muted, "activecolor": colours.text},
    )
    return made


def figure_label(figure: go.Figure) -> str:
    """A figure in words, for a screen reader: its title, or what is drawn over what, and the names of its traces."""
    layout = figure.layout
    title = layout.title.text
    if not title:
        axes = [layout[f"{axis}axis"].title.text for axis in "yx"]
        title = say("vertical: {y}, horizontal: {x}", y=axes[0], x=axes[1]) if all(axes) else ""
    names = dict.fromkeys(trace.name for trace in figure.data if trace.name)
    words = ": ".join(filter(None, (title, ", ".join(names)))) or say("Figure")
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", words))).strip()


def _checked(figure: Any) -> go.Figure:
    if not isinstance(figure, go.Figure):
        raise AmpWidgetsError(
            f"figure_view: got {type(figure).__name__}, expected a plotly Figure, or what makes one, such as profile.to_figure"
        )
    return figure


def _template(theme: Theme) -> go.layout.Template:
    """Plotly's own, with the grids of our charts, and lines that can be told apart on their background."""
    template = go.layout.Template(pio.templates["plotly_dark" if theme == "dark" else "plotly_white"])
    colours = COLOURS[theme]
    template.layout.colorway = LINE_COLOURS[theme]
    for axis in (template.layout.xaxis, template.layout.yaxis):
        axis.update(gridcolor=colours.grid, linecolor=colours.muted, zerolinecolor=colours.grid)
    return template


def _default_template() -> dict[str, Any]:
    """What Plotly gives to a figure for which nothing else was said."""
    made: dict[str, Any] = go.Figure().layout.template.to_plotly_json()
    return made
