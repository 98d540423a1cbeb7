"""One figure for light pages and dark ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from amp_widgets.charts._extras import missing_extra
from amp_widgets.charts.look import Theme

try:
    import plotly.graph_objects as go
except ImportError as error:
    raise missing_extra(error) from error


def two_themes(draw: Callable[[Theme], go.Figure]) -> dict[str, Any]:
    """A figure as plain JSON, as figure_view.js draws it.

    Parameters
    ----------
    draw
        Theme → figure; its colours may differ between the themes, and what else does takes room.

    Returns
    -------
    dict
        ``data`` and ``layout`` for light pages; ``dark``: pairs of a path, a list of keys from there on, and what is there on a
        dark page.
    """
    light, dark = (json.loads(draw(theme).to_json()) for theme in ("light", "dark"))
    changes = [[list(path), value] for path, value in _differences(light, dark)]
    return {"data": light["data"], "layout": light["layout"], "dark": changes}


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
