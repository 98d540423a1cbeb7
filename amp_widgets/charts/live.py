"""The training chart in a notebook: a widget that streams a history to plotly.js (see live.js for the page's side)."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from amp_widgets.charts import flags, look
from amp_widgets.charts._extras import missing_extra
from amp_widgets.charts.asset import PlotlyAsset, plotly_asset
from amp_widgets.charts.decimate import Points
from amp_widgets.charts.figures import training_figure
from amp_widgets.charts.labels import EventLike
from amp_widgets.charts.look import Theme
from amp_widgets.charts.pace import Pace
from amp_widgets.charts.page_data import OVERVIEW_POINTS, PageData
from amp_widgets.charts.page_scripts import page_script, page_style
from amp_widgets.charts.series import COLUMNS, SERIES, series_of, thinned
from amp_widgets.errors import SessionClosedError
from amp_widgets.language import marked, page_script_in_language, say

try:
    import anywidget
    import plotly.graph_objects as go
    import traitlets
    import tsdownsample  # noqa: F401  # asked for here and not when a run has become long
    from ipywidgets import widget_serialization
except ImportError as error:
    raise missing_extra(error) from error


class HistoryLike(Protocol):
    """What a chart reads of a history; an ``amp_widgets.core.history.History`` is one."""

    def columns(self, *names: str) -> dict[str, npt.NDArray[Any]]: ...
    def events(self, *kinds: str) -> Sequence[EventLike]: ...
    def events_since(self, index: int) -> tuple[Sequence[EventLike], int]: ...
    def rows_since(self, cursor: Any, *names: str) -> tuple[dict[str, npt.NDArray[Any]], Any, bool]: ...


class TrainingChart(anywidget.AnyWidget):
    """Loss, loss scale and memory over steps, live.

    Parameters
    ----------
    memory_source
        How the memory numbers are obtained, for people. Can be set later.
    clock
        Seconds, monotonic.

    Notes
    -----
    The chart pulls: call :meth:`pull` about ten times a second, from any thread. A message goes to the page only when there is
    something new and pages keep up; its size and cost depend on what is new, not on the length of the run. What the page has is
    kept here too (bounded), so that a page that is opened or reloaded later starts from all of it.
    """

    # The text and not the path: for a path anywidget keeps every instance for ever, so as to reload it when the file changes.
    _esm = page_script("live")
    _css = page_style()
    spec = traitlets.Dict().tag(sync=True)
    asset = traitlets.Instance(PlotlyAsset).tag(sync=True, **widget_serialization)
    # Not a value but what a page that starts now needs: computed when the state is asked for.
    full = traitlets.Any(None, allow_none=True).tag(sync=True, to_json=lambda _, chart: chart._full_state())
    memory_source = traitlets.Unicode()

    def __init__(self, *, memory_source: str = marked("not measured"), clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.RLock()
        self._page = PageData()
        self._sequence = 0
        self._pace = Pace(clock)
        self._history: HistoryLike | None = None
        self._cursor: Any = None
        self._events_read = 0
        self._closed = False
        self._esm = page_script_in_language(type(self)._esm)
        super().__init__(memory_source=memory_source, spec=_spec(memory_source), asset=plotly_asset())
        self.on_msg(_received)

    def pull(self, history: HistoryLike, *, at_once: bool = False) -> bool:
        """Send what is new in `history`, in one message; does nothing on a closed chart.

        Parameters
        ----------
        history
            What to show; another one than before replaces it.
        at_once
            Do not wait for pages to keep up: for the last pull of a run that nobody will pull again.

        Returns
        -------
        bool
            Whether a message was sent. False also when it is too early for one: what is new then comes with a later one.
        """
        with self._lock:
            if self._closed:
                return False
            if history is not self._history:
                self._history, self._cursor, self._events_read = history, None, 0
            if not (at_once or self._pace.may_send()):
                return False
            was_empty = self._sequence == 0
            rows, cursor, start_over = history.rows_since(self._cursor, *COLUMNS)
            events, self._events_read = history.events_since(self._events_read)
            whole = start_over or self._cursor is None
            skipped_steps = None
            if whole:
                page = PageData()
                if start_over:
                    page.events = self._page.events
                self._page = page
                skipped_steps = np.array([event.step for event in history.events("skipped")], dtype=np.float64)
            self._cursor = cursor
            added = self._page.append(rows, skipped_steps)
            new_events, events_reduced = self._page.add_events(events)
            if not rows["step"].size and not new_events and (was_empty or not whole):
                return False
            if self._page.is_full:
                self._page.reduce()
                whole = True
            if whole or events_reduced:
                self._send_everything()
            else:
                self._send_data("append", added, new_events)
            return True

    def figure(self, *, theme: Theme = "light", limit: int | None = None) -> go.Figure:
        """All data so far as a figure of its own, see :func:`amp_widgets.charts.figures.training_figure`.

        Raises
        ------
        SessionClosedError
            When the chart was closed.
        """
        with self._lock:
            if self._closed:
                raise SessionClosedError("this chart is closed and holds no data any more; take its figure() before close()")
            history = self._history
        columns = history.columns(*COLUMNS) if history else {"step": np.empty(0)}
        events = history.events() if history else []
        return training_figure(columns, events, memory_source=self.memory_source, theme=theme, limit=limit)

    def close(self) -> None:
        """Remove every view of the chart and let go of the history and all data."""
        if getattr(self, "_closed", True):  # also when the constructor failed, as __del__ calls this
            return
        with self._lock:
            self._closed = True
            self._history = self._cursor = None
            self._page = PageData()
        self.on_msg(_received, remove=True)
        self.layout.close()
        super().close()

    def __repr__(self) -> str:
        page = self._page
        state = "closed" if self._closed else "no steps yet" if math.isnan(page.last_step) else f"up to step {page.last_step:.0f}"
        return f"<TrainingChart: {state}>"

    @traitlets.observe("memory_source")
    def _describe_again(self, change: Mapping[str, Any]) -> None:
        self.spec = _spec(change["new"])

    def _full_state(self) -> dict[str, Any]:
        with self._lock:
            head, data = self._data("full", self._page.everything(), self._page.events)
            return {"head": head, "data": data}

    def _send_everything(self) -> None:
        self._send_data("whole", self._page.everything(), self._page.events)

    def _send_data(self, kind: str, series: Mapping[str, Points], events: Sequence[Mapping[str, Any]]) -> None:
        self._sequence += 1
        head, data = self._data(kind, series, events)
        self._pace.sent(self._sequence)
        self.send(head, [data])

    def _data(self, kind: str, series: Mapping[str, Points], events: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], bytes]:
        exact_from = self._page.exact_from
        head = {
            "type": kind,
            "sequence": self._sequence,
            "events": list(events),
            "last_step": None if math.isnan(self._page.last_step) else self._page.last_step,
            "skipped": self._page.skipped,
            "exact_from": None if exact_from == -math.inf else exact_from,
        }
        return head | {"counts": _counts(series)}, _packed(series)

    def _answer(self, content: Mapping[str, Any]) -> None:
        """Act on what a page said. It may be anything: what is not understood is left alone."""
        match content:
            case {"type": "drawn", "sequence": int(sequence)}:
                with self._lock:
                    self._pace.acknowledged(sequence)
            case {"type": "missed"}:
                with self._lock:
                    if not self._closed:
                        self._send_everything()
            case {
                "type": "detail",
                "view": str(view),
                "request": int(request),
                "range": [int() | float() as first, int() | float() as last],
            }:
                self._send_detail(view, request, float(first), float(last))

    def _send_detail(self, view: str, request: int, first: float, last: float) -> None:
        """What lies between two steps, for one view."""
        with self._lock:
            history, first_loss_step = self._history, self._page.first_loss_step
        if history is None:
            return
        columns = history.columns(*COLUMNS)
        inside = (columns["step"] >= first) & (columns["step"] <= last)
        skipped_steps = np.array([event.step for event in history.events("skipped") if first <= event.step <= last], np.float64)
        rows = {name: column[inside] for name, column in columns.items()}
        series = series_of(rows, skipped_steps=skipped_steps, loss_known=first_loss_step < first)
        series = thinned(series, 2 * OVERVIEW_POINTS)
        head = {
            "type": "detail",
            "view": view,
            "request": request,
            "range": [first, last],
            "last_step": float(columns["step"][-1]) if columns["step"].size else None,
            "counts": _counts(series),
        }
        self.send(head, [_packed(series)])


def _received(chart: TrainingChart, content: Mapping[str, Any], _buffers: object) -> None:
    chart._answer(content)


def _counts(series: Mapping[str, Points]) -> list[int]:
    return [series[name][0].size for name in SERIES]


def _packed(series: Mapping[str, Points]) -> bytes:
    """x, then y of every series, little-endian float64."""
    return np.concatenate([part for name in SERIES for part in series[name]]).astype("<f8", copy=False).tobytes()


def _spec(memory_source: str) -> dict[str, Any]:
    """How the page draws: traces and layout in both themes, and the rule for flags."""
    flag = flags.Flag(0, "", 0, False)
    themes = {
        theme: {
            "traces": look.traces(colours),
            "layout": look.layout(colours, memory_source),
            "line": flags.line_shape(flag, colour=colours.flag, plot_height_px=look.PLOT_HEIGHT_PX),
            "label": flags.label_annotation(flag, colour=colours.text, background=colours.background),
        }
        for theme, colours in look.COLOURS.items()
    }
    return {
        "series": SERIES,
        "themes": themes,
        "plots": {name: dataclasses.asdict(plot) | {"empty_note": say(plot.empty_note)} for name, plot in look.PLOTS.items()},
        "event_symbols": look.EVENT_SYMBOLS,
        "top_edge": look.TOP_EDGE,
        "flags": {
            "lanes": flags.LANES,
            "lane_px": flags.LANE_PX,
            "first_lane_px": flags.FIRST_LANE_PX,
            "character_px": flags.CHARACTER_PX,
            "most": flags.MOST_FLAGS,
        },
    }
