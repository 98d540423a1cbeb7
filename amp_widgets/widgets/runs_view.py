"""Runs over each other, and the table of their differences; runs that go on are followed. Free of torch."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ipywidgets

from amp_widgets import kernel
from amp_widgets.charts.course import METRICS, Align
from amp_widgets.charts.figure_view import FigureView
from amp_widgets.charts.overlay import OverlaidRun, overlay_figure
from amp_widgets.errors import AmpWidgetsError
from amp_widgets.language import follow_language, in_language, say
from amp_widgets.recording.differences import Differences, differences_of
from amp_widgets.recording.followed import FollowedRun
from amp_widgets.recording.run_like import RunLike, names_of
from amp_widgets.widgets.presenting_control import PresentingControl
from amp_widgets.widgets.refresher import Refresher
from amp_widgets.widgets.runs_control import ListedRun, RunsControl, RunsTable

PULL_S, IDLE_S, CALM_S = 0.5, 2.0, 10.0
"""Seconds between two looks at runs that go on, and at ones in which nothing was new for `CALM_S`, or that nobody watches."""
TABLE_S = 2.0
"""Seconds between two tables."""
MOST_OF_TIME = 0.05
"""Drawing takes no more of the time than this."""


class RunsView(ipywidgets.Box):
    """A view of several runs. It changes none of them.

    Runs that go on are pulled by a thread, which ends when none does any more. Closing the view ends it, too, and lets go of
    the runs.

    Parameters
    ----------
    runs
        What is compared.
    names
        What they are called; without them, as `names_of` has it at any time: with a fork, the name of a session changes.
    align
        ``"step"`` or ``"time"``, at first.
    clock
        Seconds, monotonic.
    live
        Whether a thread calls `tick`; without it, the caller does.
    keep
        What is to be kept as long as the view is open: who has opened the files.
    """

    def __init__(
        self,
        runs: Sequence[RunLike],
        *,
        names: Sequence[str] | None = None,
        align: Align = "step",
        clock: Callable[[], float] = time.monotonic,
        live: bool = True,
        keep: object = None,
    ) -> None:
        self._runs: tuple[RunLike, ...] = tuple(runs)
        self._given_names = None if names is None else tuple(names)
        self._names = self._names_now()
        self._keep = keep
        self._clock = clock
        self._lock = threading.RLock()
        self._align: Align = align
        self._smoothing = 0
        self._metrics: tuple[str, ...] = METRICS
        self._hidden: set[int] = set()
        self._watched = True
        self._moved_s = clock()
        self._figure_due_s = self._table_due_s = clock()
        self._figure_old = self._table_old = False  # whether there is something newer than what is shown
        self._differences: Differences | None = None
        self._followed: list[FollowedRun] = []
        super().__init__(self._made(), _dom_classes=("ampw-dashboard", "ampw-runs-view"))
        self._follow_anew()
        self._draw_table()
        self._refresher = Refresher(weakref.WeakMethod(self.tick))
        if live and any(run.live for run in self._followed):
            self._refresher.start()
        follow_language(self._speak)

    def _made(self) -> tuple[Any, ...]:
        """What the view is made of, in the language in force."""
        self._control = RunsControl(self._asked)
        self._figure = FigureView(note=say("No step was recorded so far."))
        self._table = RunsTable()
        self._presenting = PresentingControl()
        return self._presenting, self._control, self._figure, self._table

    def _speak(self) -> None:
        """Make all parts anew, in the language that is in force now."""
        with self._lock:
            if not self._followed:
                return
            before = (self._presenting, self._control, self._figure, self._table)
            self.children = made = self._made()
            for widget in made:
                kernel.answer_where_asked(widget.comm)
            for widget in before:
                widget.close()
            self._draw()
            self._draw_table()

    def tick(self) -> float | None:
        """Look at the runs once, and show what is new.

        Returns
        -------
        float or None
            Seconds until the next look; None when there will be none, because the view was closed or no run goes on.
        """
        with self._lock:
            if not self._followed:
                return None
            if not self._watched:
                return IDLE_S
            goes_on = any(run.live for run in self._followed)  # asked first: what was new until then is pulled now
            pulled = [run.pull() for run in self._followed]  # each of them, and not up to the first
            moved = any(pulled)
            now_s = self._clock()
            if moved:
                self._moved_s = now_s
                self._names = self._names_now()
                self._figure_old = self._table_old = True
            if self._figure_old and (now_s >= self._figure_due_s or not goes_on):
                self._draw()
            if self._table_old and (now_s >= self._table_due_s or not goes_on):
                self._draw_table()
            if not goes_on:
                return None
            return PULL_S if now_s - self._moved_s < CALM_S else IDLE_S

    @property
    def closed(self) -> bool:
        """Whether the view has let go of its runs."""
        return not self._followed

    def widgets(self) -> Iterator[ipywidgets.Widget]:
        """Every widget that the view is made of, itself and the layouts included."""
        for widget in (self, self._presenting, self._control, self._figure, self._table):
            yield widget
            if isinstance(widget.layout, ipywidgets.Widget):
                yield widget.layout

    def close(self) -> None:
        """Take the view off the page and free it; the runs stay as they are."""
        if "_refresher" not in self.__dict__:  # it was never finished, or is closed
            return
        self._refresher.stop()
        with self._lock:
            self._runs, self._followed, self._keep = (), [], None
            del self._refresher
        for widget in (self._presenting, self._control, self._figure, self._table):
            widget.close()
        if isinstance(self.layout, ipywidgets.Widget):
            self.layout.close()
        super().close()

    def __repr__(self) -> str:
        return f"<amp_widgets view of the runs {', '.join(self._names)}>"

    def _repr_mimebundle_(self, **_kwargs: Any) -> dict[str, Any]:
        bundle: dict[str, Any] = {
            "text/plain": repr(self),
            "application/vnd.jupyter.widget-view+json": {"version_major": 2, "version_minor": 0, "model_id": self._model_id},
        }
        if self._differences is not None:  # for where no widget is shown
            bundle |= {"text/plain": repr(self._differences), "text/html": self._differences._repr_html_()}
        return bundle

    # ---- private ----------------------------------------------------------------------------------------------------

    def _asked(self, **changes: Any) -> None:
        """What the user wants to see, or how many look."""
        with self._lock:
            if not self._followed:
                return
            match changes:
                case {"views": views}:
                    self._watched = views > 0
                    if self._watched:
                        self._refresher.wake()
                    return
                case {"align": align}:
                    self._align = align
                    self._follow_anew()
                    return
                case {"smoothing": steps}:
                    self._smoothing = steps
                    self._follow_anew()
                    return
                case {"metric": metric, "on": on}:
                    self._metrics = tuple(name for name in METRICS if (on if name == metric else name in self._metrics))
                case {"run": place, "on": on}:
                    (self._hidden.discard if on else self._hidden.add)(place)
            self._draw()

    def _follow_anew(self) -> None:
        """Read every run from its beginning: where its points are, or what they are, has changed."""
        self._followed = [FollowedRun(run, align=self._align, smoothing=self._smoothing) for run in self._runs]
        for run in self._followed:
            run.pull()
        self._draw()

    def _names_now(self) -> tuple[str, ...]:
        return names_of(self._runs) if self._given_names is None else self._given_names

    def _draw(self) -> None:
        began_s = self._clock()
        listed = [
            ListedRun(name=name, shown=place not in self._hidden, steps=run.steps, why_not=run.why_not)
            for place, (run, name) in enumerate(zip(self._followed, self._names, strict=True))
        ]
        self._control.show(align=self._align, smoothing=self._smoothing, metrics=self._metrics, runs=listed)
        drawn = [
            OverlaidRun(name=name, place=place, lines=run.course.lines, changes=run.changes)
            for place, (run, name) in enumerate(zip(self._followed, self._names, strict=True))
            if place not in self._hidden
        ]
        if not drawn or not self._metrics:
            self._figure.clear(say("No run is ticked.") if not drawn else say("No plot is ticked."))
        else:
            along = say("steps") if self._align == "step" else say("time since each began")
            self._figure.show(
                lambda theme: overlay_figure(
                    drawn, align=self._align, metrics=self._metrics, smoothing=self._smoothing, theme=theme, legend=False
                ),
                label=say("{drawn} over each other, along {along}", drawn=", ".join(run.name for run in drawn), along=along),
            )
        self._figure_old = False
        self._figure_due_s = self._due_s(began_s, PULL_S)

    def _draw_table(self) -> None:
        began_s = self._clock()
        try:
            self._differences = differences_of(self._runs, names=self._names)
        except AmpWidgetsError as error:
            self._table.fail(say("The table is as it was before: {error}", error=in_language(str(error))))
        else:
            self._table.show(self._differences)
        self._table_old = False
        self._table_due_s = self._due_s(began_s, TABLE_S)

    def _due_s(self, began_s: float, soonest_s: float) -> float:
        now_s = self._clock()
        return now_s + max(soonest_s, (now_s - began_s) / MOST_OF_TIME)
