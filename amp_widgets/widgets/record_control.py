"""Recording the run to a file."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import traitlets

from amp_widgets.language import say
from amp_widgets.widgets.control import Control, page_script
from amp_widgets.widgets.state import DashboardState
from amp_widgets.widgets.text import bytes_text

MOST_NAMES = 1000


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecordState:
    """All that a record control shows.

    Attributes
    ----------
    path
        The file that is written, or None.
    size_bytes
        Of the file, and of what is beside it.
    kept
        The file that was written last, when none is now; or None.
    """

    path: Path | None = None
    size_bytes: int = 0
    kept: Path | None = None

    def after(self, path: Path | None) -> RecordState:
        """How it stands when this file is written."""
        if path is not None:
            return RecordState(path=path, size_bytes=_size_bytes(path))
        if self.path is None:
            return self
        return RecordState(kept=self.path, size_bytes=_size_bytes(self.path)) if self.path.exists() else RecordState()


class RecordControl(Control):
    """The name of a new file, and whether the run is written to it.

    Asks with ``request("record", path=name)`` and ``request("stop_recording")``.

    Parameters
    ----------
    request
        Called with what the user asks for.
    today
        Gives the date, for the name that is offered.
    """

    _esm = page_script("record_control")

    recording = traitlets.Bool(False).tag(sync=True)
    sentence = traitlets.Unicode(help="Where it is recorded to, or was.").tag(sync=True)
    title = traitlets.Unicode(help="The file with its folder.").tag(sync=True)
    offered = traitlets.Unicode(help="A name for a new file.").tag(sync=True)

    def __init__(
        self,
        request: Callable[..., None],
        state: RecordState,
        *,
        today: Callable[[], datetime.date] = datetime.date.today,
    ) -> None:
        self._today = today
        super().__init__(request)
        self._shown: RecordState | None = None
        self.show(state)

    def show(self, state: RecordState) -> None:
        """Show this; nothing is sent when it is what is shown."""
        if state == self._shown:
            return
        before, self._shown = self._shown, state
        path = state.path or state.kept
        size = bytes_text(state.size_bytes)
        sentence = ""
        if path is not None:
            values = {"file": path.name, "size": size}
            sentence = say("to {file}, {size}", **values) if state.path else say("{file} is kept, {size}", **values)
        traits: dict[str, Any] = {
            "recording": state.path is not None,
            "sentence": sentence,
            "title": "" if path is None else str(path),
        }
        if before is None or before.path != state.path:
            traits["offered"] = free_name(self._today())
        self._put(traits)

    def _traits_for(self, state: DashboardState) -> dict[str, Any]:
        return {}  # it shows a `RecordState`

    def _ask(self, message: Mapping[str, Any]) -> None:
        match message:
            case {"record": str(name)}:
                self._put({"offered": free_name(self._today())})  # by now, there may be such a file
                self._request("record", path=name.strip() or self.offered)
            case {"stop": True}:
                self._request("stop_recording")


def free_name(date: datetime.date) -> str:
    """A name for a file that does not exist in the present folder: ``run-2030-05-17.db``, ``run-2030-05-17-2.db``."""
    stem = f"run-{date:%Y-%m-%d}"
    names = (f"{stem}.db" if number == 1 else f"{stem}-{number}.db" for number in range(1, MOST_NAMES))
    return next((name for name in names if not Path(name).exists()), f"{stem}.db")


def _size_bytes(path: Path) -> int:
    """Of the file and of what is beside it, in whole kB where there is so much: the last digits are not worth a message."""
    total = 0
    for one in (path, path.with_name(f"{path.name}-wal")):
        try:
            total += one.stat().st_size
        except OSError:
            continue
    return total // 1000 * 1000 if total >= 1000 else total
