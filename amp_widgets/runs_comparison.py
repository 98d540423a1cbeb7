"""Several runs compared: their differences as a table, and their lines over each other."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from amp_widgets import kernel
from amp_widgets.charts.course import METRICS, Align
from amp_widgets.charts.look import Theme
from amp_widgets.errors import AmpWidgetsError, MissingExtraError, RecordingError
from amp_widgets.recording.differences import Differences, differences_of, equal_text
from amp_widgets.recording.followed import FollowedRun
from amp_widgets.recording.run import Run
from amp_widgets.recording.run_like import RunLike, as_run, names_of

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from amp_widgets.widgets.runs_view import RunsView


def compare_runs(
    *runs: RunLike | str | os.PathLike[str], align: Align = "step", names: Sequence[str] | None = None
) -> RunsComparison:
    """Any number of runs, side by side.

    Parameters
    ----------
    runs
        Paths of run files, what ``aw.open_run`` gives, sessions, also ones that go on, and branches.
    align
        Along which they are laid over each other: ``"step"``, or ``"time"`` since the first step of each began.
    names
        What they are called; without them, by their files.

    Raises
    ------
    AmpWidgetsError
        When there is no run, or not one name for each, or `align` is neither.
    RecordingError
        When a file cannot be read.

    Examples
    --------
    >>> compared = compare_runs("fp32.db", "bf16.db", session)       # doctest: +SKIP
    >>> compared.table.row("peak memory").values                     # doctest: +SKIP
    >>> compared.view()                                              # doctest: +SKIP
    """
    return RunsComparison(runs, align=align, names=names)


class RunsComparison:
    """Made by `compare_runs`. The runs are read anew each time something is asked for.

    Attributes
    ----------
    runs
        In the order in which they were given.
    names
        What they are called now, no two alike.
    align
        ``"step"`` or ``"time"``.
    """

    def __init__(
        self, runs: Sequence[RunLike | str | os.PathLike[str]], *, align: Align = "step", names: Sequence[str] | None = None
    ) -> None:
        if not runs:
            raise AmpWidgetsError("compare_runs: got no run, expected paths of run files, runs or sessions")
        if names is not None and (len(names) != len(runs) or len(set(names)) != len(names)):
            raise AmpWidgetsError(f"compare_runs: got the names {list(names)!r} for {len(runs)} runs, expected one for each")
        self.align = _checked_align(align)
        opened: list[Run] = []
        self._close = weakref.finalize(self, _close_all, opened)
        found = []
        try:
            for run in runs:
                known = as_run(run)
                if known is not run:
                    opened.append(known)  # type: ignore[arg-type]  # of a path
                found.append(known)
        except RecordingError as error:
            self._close()
            raise RecordingError(f"compare_runs: {error}") from None
        self.runs: tuple[RunLike, ...] = tuple(found)
        self._given_names = None if names is None else tuple(names)

    @property
    def names(self) -> tuple[str, ...]:
        """As given; else of the runs as they are now: a fork changes the name of a session."""
        return names_of(self.runs) if self._given_names is None else self._given_names

    @property
    def table(self) -> Differences:
        """How they differ, as they are now."""
        return differences_of(self.runs, names=self.names)

    def to_figure(
        self,
        *,
        align: Align | None = None,
        metrics: Sequence[str] = METRICS,
        smoothing: int = 0,
        theme: Literal["light", "dark"] = "light",
    ) -> go.Figure:
        """Their lines over each other, as they are now.

        Parameters
        ----------
        align
            ``"step"`` or ``"time"``; None: as the comparison has it.
        metrics
            Which plots, of ``"loss"``, ``"scale"``, ``"peak"``, ``"allocated"`` and ``"step_s"``.
        smoothing
            Steps over which loss and step time are averaged (an exponential moving average); 0 shows each as it is.
        theme
            ``"light"`` or ``"dark"``.

        Raises
        ------
        AmpWidgetsError
            When one of them is none of these.
        MissingExtraError
            When plotly or tsdownsample is not installed.
        """
        align = self.align if align is None else _checked_align(align)
        unknown = [metric for metric in metrics if metric not in METRICS]
        if unknown or not metrics:
            raise AmpWidgetsError(f"to_figure: got {list(metrics)!r} as metrics, expected one or more of {', '.join(METRICS)}")
        if type(smoothing) is not int or smoothing < 0:
            raise AmpWidgetsError(f"to_figure: got {smoothing!r} as smoothing, expected a number of steps, or 0")
        if theme not in ("light", "dark"):
            raise AmpWidgetsError(f"to_figure: got {theme!r} as the theme, expected 'light' or 'dark'")
        return self._drawn(align, metrics, smoothing)(theme)

    def view(self) -> RunsView:
        """Charts and table as a widget, which follows runs that go on.

        Raises
        ------
        MissingExtraError
            When ipywidgets, anywidget or plotly is not installed.
        """
        try:
            from amp_widgets.widgets.runs_view import RunsView
        except ImportError as error:
            raise MissingExtraError(f"view: {error}; install the widgets with: pip install 'amp-widgets[notebook]'") from error
        view = RunsView(self.runs, names=self._given_names, align=self.align, keep=self)
        for widget in view.widgets():
            kernel.answer_where_asked(widget.comm)
        return view

    dashboard = view

    def export_html(
        self,
        path: str | os.PathLike[str],
        *,
        align: Align | None = None,
        smoothing: int = 0,
        plotly: Literal["inline", "link", "none"] = "inline",
        overwrite: bool = False,
    ) -> Path:
        """Write charts and table to one page that shows them anywhere.

        Parameters
        ----------
        path
            Of the file, such as ``"runs.html"``.
        align, smoothing
            As of `to_figure`.
        plotly, overwrite
            As of `amp_widgets.export.html.export_html`.

        Returns
        -------
        Path
            Of the file, absolute.

        Raises
        ------
        ExportError
            When there is a file and it may not be replaced, or it cannot be written.
        MissingExtraError
            When plotly is not installed.
        """
        from amp_widgets.export.page import Page

        align = self.align if align is None else _checked_align(align)
        table = self.table
        headings, words = ("", *table.runs), f"{', '.join(self.names)} over each other, along {align}"
        page = Page(f"Runs compared: {', '.join(self.names)}", plotly=plotly)
        page.figure(self._drawn(align, METRICS, smoothing), label=words)
        page.heading("Differences")
        page.table(headings, [(row.name, *row.texts) for row in table.differing])
        if table.equal:
            folded = equal_text(len(table.equal), len(table.runs))
            page.table(headings, [(row.name, *row.texts) for row in table.equal], folded=folded)
        page.paragraph(table.obtained, note=True)
        return page.write(path, overwrite=overwrite)

    def _drawn(self, align: Align, metrics: Sequence[str], smoothing: int) -> Callable[[Theme], go.Figure]:
        """What draws the runs as they are now, in a theme."""
        from amp_widgets.charts.overlay import OverlaidRun, overlay_figure

        drawn = []
        for place, (run, name) in enumerate(zip(self.runs, self.names, strict=True)):
            followed = FollowedRun(run, align=align, smoothing=smoothing)
            followed.pull()
            drawn.append(OverlaidRun(name=name, place=place, lines=followed.course.lines, changes=followed.changes))
        return lambda theme: overlay_figure(drawn, align=align, metrics=metrics, smoothing=smoothing, theme=theme)

    def close(self) -> None:
        """Let go of the files that were opened for this comparison; without it, that happens when it is forgotten."""
        self._close()

    def __repr__(self) -> str:
        return f"<RunsComparison of {', '.join(self.names)}>\n{self.table!r}"

    def _repr_html_(self) -> str:
        return self.table._repr_html_()


def _checked_align(align: object) -> Align:
    for known in get_args(Align):
        if align == known:
            return known  # type: ignore[no-any-return]
    raise AmpWidgetsError(f"compare_runs: got {align!r} as align, expected 'step' or 'time'")


def _close_all(runs: Sequence[Run]) -> None:
    for run in runs:
        run.close()
