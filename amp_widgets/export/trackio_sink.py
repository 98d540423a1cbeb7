"""A run in trackio."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt

from amp_widgets.core.history import Event
from amp_widgets.errors import MissingExtraError
from amp_widgets.export.sink import Sink


class TrackioSink(Sink):
    """Logs a run to trackio, on this machine unless `options` say otherwise; ``trackio show`` shows it.

    Each column of the history is a metric; events are alerts, those of skipped steps and of changes of the loss scale excepted,
    which are in the metrics. A fork is a run of its own.

    Parameters
    ----------
    project
        The project in which it is.
    name
        Of the run; None for one that trackio makes up.
    **options
        For ``trackio.init``, such as ``space_id``.

    Raises
    ------
    MissingExtraError
        When trackio is not installed.
    """

    def __init__(self, project: str, name: str | None = None, **options: Any) -> None:
        try:
            import trackio
        except ImportError as error:
            raise MissingExtraError(f"TrackioSink: {error}; install trackio with: pip install 'amp-widgets[trackio]'") from error
        self._trackio = trackio
        self._project, self._run_name, self._options = project, name, options
        self._run: Any = None

    @property
    def name(self) -> str:
        return f"trackio in the project {self._project}"

    def begin(self, course: str, began_s: float, facts: Mapping[str, Any]) -> None:
        self.close()
        name = "-".join(filter(None, (self._run_name, course))) or None
        config = {key.lstrip("_") or "fact": value for key, value in json.loads(json.dumps(dict(facts), default=str)).items()}
        options = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False} | self._options
        self._run = self._trackio.init(project=self._project, name=name, config=config, **options)
        if self._run_name is None:
            self._run_name = self._run.name

    def write(self, rows: Mapping[str, npt.NDArray[Any]], events: Sequence[Event]) -> None:
        names = [name for name in rows if name != "step"]
        for step, *values in zip(rows["step"].tolist(), *(rows[name].tolist() for name in names), strict=True):
            measured = {name: value for name, value in zip(names, values, strict=True) if not math.isnan(value)}
            self._run.log(measured, step=step)
        for event in events:
            if event.kind not in ("skipped", "scale_changed"):
                self._run.alert(title=event.kind, text=event.reason or None, level=self._trackio.AlertLevel.INFO, step=event.step)

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish()
