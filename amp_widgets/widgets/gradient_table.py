"""What a loss scale makes of the gradients of each layer, worst first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import traitlets

from amp_widgets.analysis.gradients import GradientRange, LayerRange, Shares, overflow_text, percent
from amp_widgets.language import in_language, marked, say
from amp_widgets.widgets.control import Control, page_script, page_style
from amp_widgets.widgets.state import DashboardState

MOST_ROWS = 60
LOST_SHARE = 0.01
"""More than this becoming zero, or anything overflowing, stands out."""


class GradientTable(Control):
    """The layers of a sampled step; asks ``request(pattern=text)`` for a filter."""

    _esm = page_script("gradient_table", "virtual_table")
    _css = page_style("virtual_table", "gradient")

    rows: traitlets.List[Any] = traitlets.List(help="Of each layer what `_row` says.").tag(sync=True)
    summary = traitlets.Unicode().tag(sync=True)
    pattern = traitlets.Unicode(help="The filter in force.").tag(sync=True)
    sampled = traitlets.Bool(False).tag(sync=True)

    def __init__(self, request: Callable[..., None], state: DashboardState | None = None) -> None:
        super().__init__(request, state)

    def show(self, found: GradientRange | None, pattern: str, scale: float) -> None:
        """Show the layers that fit the pattern, at a scale; nothing is sent when they are those shown."""
        if found is None:
            self._put({"rows": [], "summary": "", "pattern": pattern, "sampled": False})
            return
        told = found.matching(pattern)
        worst, too_large = told.worst(scale), told.overflowing(scale)
        count, at_stake = len(worst), len(found.at_stake)
        summary = (
            say("{count} layers", count=count)
            if count == at_stake
            else say("{shown} of {count} layers", shown=count, count=at_stake)
        )
        if count > MOST_ROWS:
            summary = say("the {most} worst of {layers}", most=MOST_ROWS, layers=summary)
        rows = [
            _row(layer, shares, in_language(overflow_text(layer.layer, shares.overflow, too_large)))
            for layer, shares in worst[:MOST_ROWS]
        ]
        self._put({"rows": rows, "summary": summary, "pattern": pattern, "sampled": True})

    def _traits_for(self, state: DashboardState) -> dict[str, Any]:
        return {}  # it shows a `GradientRange`

    def _ask(self, message: Mapping[str, Any]) -> None:
        if "filter" in message:
            pattern = str(message["filter"]).strip()
            if pattern != self.pattern:
                self._request(pattern=pattern)


# Words of `overflow_text`.
_SAID = (marked("its weight"), marked("its bias"), marked("its {parameter}"))


def _row(layer: LayerRange, shares: Shares, overflow: str) -> list[Any]:
    """Name, format, texts of the shares and of the count, and whether each share stands out."""
    flushed, subnormal, normal, zeros = map(percent, (shares.flushed, shares.subnormal, shares.normal, shares.zeros))
    lost = [shares.flushed > LOST_SHARE, False, False, shares.overflow > 0 or overflow != percent(shares.overflow), False]
    nonfinite = say("{share} inf or NaN", share=percent(shares.nonfinite)) if shares.nonfinite else ""
    return [
        layer.layer,
        layer.dtype,
        [flushed, subnormal, normal, overflow, zeros],
        in_language(layer.counted_text),
        lost,
        nonfinite,
    ]
