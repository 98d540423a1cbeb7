"""Whether, and where to, the run of a session is being written."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from amp_widgets.core.loop import LiveLoop
from amp_widgets.errors import RecordingError
from amp_widgets.recording.environment import environment
from amp_widgets.recording.recorder import Recorder
from amp_widgets.session_state import device_name


class RunRecording:
    """One file at a time."""

    def __init__(self) -> None:
        self._recorder: Recorder | None = None

    def begin(self, path: str | os.PathLike[str], loop: LiveLoop, *, model: str) -> None:
        """Write the run of `loop`, which is not kept alive, to a new file, until `end`.

        Parameters
        ----------
        model
            Its name, for people.

        Raises
        ------
        RecordingError
            When the file exists or cannot be made, or another is being written.
        """
        if self._recorder is not None:
            raise RecordingError(
                f"record: the run is being recorded to {self._recorder.path}; session.stop_recording() ends that"
            )
        facts = {
            "model": model,
            "device": device_name(loop.device),
            "memory_source": loop.memory_source,
            "cuda": torch.version.cuda,
            **environment(),
        }
        self._recorder = Recorder(path, loop, facts=facts)

    def end(self) -> None:
        """Write what is left, and let go of the file."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.close()

    @property
    def path(self) -> Path | None:
        """The file, or None."""
        return None if self._recorder is None else self._recorder.path

    @property
    def notice(self) -> str | None:
        """What is wrong with the file, as a sentence, or None."""
        return None if self._recorder is None else self._recorder.notice
