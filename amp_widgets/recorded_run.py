"""What users hold of a run file: the run, and the conveniences that live above it, each one delegation long. Free of torch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from amp_widgets import kernel
from amp_widgets.errors import MissingExtraError
from amp_widgets.export.exports import Exports
from amp_widgets.export.sink import Sink
from amp_widgets.export.sink_follower import log_recorded
from amp_widgets.recording.run import Run

if TYPE_CHECKING:
    from amp_widgets.widgets.replay_dashboard import ReplayDashboard


class RecordedRun(Run, Exports):
    """What is in a run file, and its views; made by `open_run`."""

    def dashboard(self) -> ReplayDashboard:
        """The run as it was at any of its steps: to be displayed, played, and moved through. There may be any number of them.

        A file that another kernel is writing is followed.

        Raises
        ------
        MissingExtraError
            When ipywidgets, anywidget or plotly is not installed.
        RecordingError
            When the run is closed, or its file is damaged.
        """
        make = _dashboard_class()
        dashboard = make(self)
        for widget in dashboard.widgets():
            kernel.answer_where_asked(widget.comm)
        return dashboard

    def log_to(self, sink: Sink) -> None:
        """Log the whole run to another tool, such as ``amp_widgets.export.tensorboard_sink.TensorBoardSink("runs/a")``.

        The sink is closed then. What it raises is raised here.
        """
        log_recorded(self, sink)


def open_run(path: str | os.PathLike[str]) -> RecordedRun:
    """The run in the file at `path`, also one that is being written.

    Raises
    ------
    RecordingError
        When there is no such file, it is none of a run, it is damaged, or a newer amp_widgets wrote it.
    """
    return RecordedRun(path)


def _dashboard_class() -> type[ReplayDashboard]:
    try:
        from amp_widgets.widgets.replay_dashboard import ReplayDashboard
    except ImportError as error:
        raise MissingExtraError(f"dashboard: {error}; install the widgets with: pip install 'amp-widgets[notebook]'") from error
    return ReplayDashboard
