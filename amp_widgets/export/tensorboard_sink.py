"""Event files of TensorBoard."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from amp_widgets.core.history import Event
from amp_widgets.errors import MissingExtraError
from amp_widgets.export.sink import Sink


class TensorBoardSink(Sink):
    """Writes a run to an event file in a folder: each column of the history is a scalar, and events are texts by their kind.

    A fork gets a folder of its own in it, so that both courses lie over each other. Without torch and TensorFlow.

    Parameters
    ----------
    log_dir
        The folder, which may be a new one; ``tensorboard --logdir`` shows it, or the folder that it is in.

    Raises
    ------
    MissingExtraError
        When tensorboard is not installed.

    Notes
    -----
    TensorBoard has scalars of 32 bits. What was not measured is left out; a loss that is NaN is there.
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        _protocol()  # now, and not on a thread later
        self._folder = Path(log_dir).absolute()
        self._file: BinaryIO | None = None
        self._written = 0  # bytes that are whole records
        self._began_s = 0.0
        self._loss_known = False

    @property
    def name(self) -> str:
        return f"TensorBoard in {self._folder}"

    def begin(self, course: str, began_s: float, facts: Mapping[str, Any]) -> None:
        folder = self._folder / course if course else self._folder
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        opened = (folder / name).open("xb", buffering=0)
        self.close()
        self._file, self._written, self._began_s, self._loss_known = opened, 0, began_s, False
        event, *_ = _protocol()
        about = json.dumps(dict(facts), indent=2, default=str)
        records = [event.Event(wall_time=began_s, file_version="brain.Event:2"), self._text(0, 0.0, "run", f"```\n{about}\n```")]
        self._put(records)

    def write(self, rows: Mapping[str, npt.NDArray[Any]], events: Sequence[Event]) -> None:
        event, summary, _ = _protocol()
        names = [name for name in rows if name not in ("step", "time_s")]
        known = {name: ~np.isnan(rows[name]) for name in names}
        if not self._loss_known and known["loss"].any():
            known["loss"][np.argmax(known["loss"]) :] = True
        elif self._loss_known:
            known["loss"][:] = True
        records = []
        columns = [(name, rows[name].tolist(), known[name].tolist()) for name in names]
        for i, (step, time_s) in enumerate(zip(rows["step"].tolist(), rows["time_s"].tolist(), strict=True)):
            there = [(name, _single(values[i])) for name, values, measured in columns if measured[i]]
            values = [summary.Summary.Value(tag=name, simple_value=value) for name, value in there]
            if values:
                at_s = self._began_s + (time_s if math.isfinite(time_s) else 0.0)
                records.append(event.Event(wall_time=at_s, step=step, summary=summary.Summary(value=values)))
        for (step, kind), group in itertools.groupby(events, key=lambda one: (one.step, one.kind)):
            together = list(group)
            records.append(self._text(step, together[0].time_s, f"events/{kind}", "\n\n".join(one.reason for one in together)))
        if records:
            self._put(records)
        self._loss_known = self._loss_known or bool(known["loss"].any())

    def close(self) -> None:
        opened, self._file = self._file, None
        if opened is not None:
            opened.close()

    def _text(self, step: int, time_s: float, tag: str, text: str) -> Any:
        event, summary, tensor = _protocol()
        metadata = summary.SummaryMetadata(plugin_data=summary.SummaryMetadata.PluginData(plugin_name="text"))
        content = tensor.TensorProto(dtype=_STRING, string_val=[text.encode()], tensor_shape={"dim": [{"size": 1}]})
        value = summary.Summary.Value(tag=f"{tag}/text_summary", metadata=metadata, tensor=content)
        at_s = self._began_s + (time_s if math.isfinite(time_s) else 0.0)
        return event.Event(wall_time=at_s, step=step, summary=summary.Summary(value=[value]))

    def _put(self, records: Sequence[Any]) -> None:
        """All of these or none: after half a record a reader would find nothing more."""
        from tensorboard.summary.writer.record_writer import RecordWriter

        assert self._file is not None
        packed = io.BytesIO()
        writer = RecordWriter(packed)
        for record in records:
            writer.write(record.SerializeToString())
        content = memoryview(packed.getvalue())
        done = 0
        try:
            while done < len(content):
                done += self._file.write(content[done:]) or 0
        except OSError:
            self._file.truncate(self._written)
            self._file.seek(self._written)
            raise
        self._written += done


_numbers = itertools.count()
_STRING = 7
"""``DT_STRING`` of TensorFlow."""
_LARGEST = float(np.finfo(np.float32).max)


def _single(value: float) -> float:
    """What fits into 32 bits; what is larger becomes infinite, as it does on a GPU."""
    return value if abs(value) <= _LARGEST or not math.isfinite(value) else math.copysign(math.inf, value)


def _protocol() -> tuple[Any, Any, Any]:
    try:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
    except ImportError as error:
        raise MissingExtraError(
            f"TensorBoardSink: {error}; install TensorBoard with: pip install 'amp-widgets[tensorboard]'"
        ) from error
    return event_pb2, summary_pb2, tensor_pb2
