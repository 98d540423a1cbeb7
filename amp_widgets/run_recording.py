"""Whether, and where to, the run of a session is being written."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
        self._why_ended: str | None = None

    def begin(
        self, path: str | os.PathLike[str], loop: LiveLoop, *, model: str, more_facts: Mapping[str, Any] | None = None
    ) -> None:
        """Write the run of `loop`, which is not kept alive, to a new file, until `end`.

        Parameters
        ----------
        model
            Its name, for people.
        more_facts
            About the run, JSON-able, beside what is known here.

        Raises
        ------
        RecordingError
            When the file exists or cannot be made, or another is being written.
        """
        if self.path is not None:
            raise RecordingError(f"record: the run is being recorded to {self.path}; session.stop_recording() ends that")
        self.end()
        self._recorder = Recorder(path, loop, facts={**facts_of_loop(loop, model=model), **(more_facts or {})})
        self._why_ended = None

    def held(self) -> contextlib.AbstractContextManager[None]:
        """What is there now is written, and nothing within; see `Recorder.held`."""
        return contextlib.nullcontext() if self._recorder is None else self._recorder.held()

    def go_on_beside(self, loop: LiveLoop, *, model: str, more_facts: Mapping[str, Any]) -> None:
        """End the file, and go on in a new one beside it: ``run.db``, ``run.fork-1.db``, ``run.fork-2.db``, ...

        Where that one cannot be made recording ends, and `notice` says so.
        """
        before = self.path
        if before is None:
            return
        self.end()
        try:
            self.begin(_beside(before), loop, model=model, more_facts=more_facts)
        except RecordingError as error:
            self._why_ended = f"Recording has ended with the fork: {error}"

    def end(self) -> str | None:
        """Write what is left, and let go of the file; that this has failed, as a sentence that `notice` has, too, or None."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            self._why_ended = None
            return None
        known = recorder.lost
        recorder.close()
        self._why_ended = None if known else recorder.notice
        return self._why_ended

    @property
    def path(self) -> Path | None:
        """The file that is written, or None; also once it was deleted, of which `notice` tells."""
        return None if self._recorder is None or self._recorder.lost else self._recorder.path

    @property
    def notice(self) -> str | None:
        """What is wrong with the file, as a sentence, or None."""
        return self._why_ended if self._recorder is None else self._recorder.notice


def facts_of_loop(loop: LiveLoop, *, model: str) -> dict[str, Any]:
    """What is known of a run here, JSON-able."""
    return {
        "model": model,
        "device": device_name(loop.device),
        "memory_source": loop.memory_source,
        "cuda": torch.version.cuda,
        **environment(),
    }


def _beside(path: Path) -> Path:
    """The first name that is free."""
    stem = re.sub(r"\.fork-\d+$", "", path.stem)
    names = (path.with_name(f"{stem}.fork-{number}{path.suffix}") for number in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))
