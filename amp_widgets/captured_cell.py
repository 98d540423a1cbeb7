"""A ``%%amp`` cell: its code, run as it is, with a session around the loop in it and the dashboard above its output."""

from __future__ import annotations

import contextlib
import html
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from IPython.core.display_functions import DisplayHandle, display
from torch import nn

from amp_widgets import kernel
from amp_widgets.capture.capture import Capture
from amp_widgets.capture.on_cpu import on_cpu
from amp_widgets.cell import run_cell
from amp_widgets.core.loop import LiveLoop
from amp_widgets.core.settings import Settings
from amp_widgets.errors import MissingExtraError, RecordingError, SettingsError
from amp_widgets.language import in_language, say
from amp_widgets.session import AmpSession
from amp_widgets.widgets.picture import Picture

if TYPE_CHECKING:
    from amp_widgets.widgets.dashboard import Dashboard
    from amp_widgets.widgets.frame import Frame


class CapturedCell:
    """Runs one cell.

    Parameters
    ----------
    shell
        IPython's.
    model_name
        Which of several models to control.
    on_cpu
        Run CUDA-only code on the CPU.

    Attributes
    ----------
    session
        Of the model that is trained; None before it is known.
    frame
        Where the dashboard is shown.
    """

    def __init__(self, shell: Any, *, model_name: str | None, on_cpu: bool) -> None:
        self.session: AmpSession | None = None
        self.frame: Frame | None = None
        self._dashboard: Dashboard | None = None
        self._shell = shell
        self._model_name = model_name
        self._on_cpu = on_cpu
        self._mapped = False
        self._requests: list[tuple[Mapping[str, Any], int | None]] = []
        self._budget: float | None = None
        self._made: AmpSession | None = None  # the newest; whether it trains is not known yet
        self._places: list[DisplayHandle] = []  # above the cell's own output: for the dashboard, and for its picture
        self._record: str | None = None  # where to, once the model is known
        self._picture: Picture | None = None
        self._shown = False

    def run(self, source: str) -> None:
        """Run the cell's code; what it raises is raised."""
        __tracebackhide__ = True
        first = display(_Sentence("amp_widgets: waiting for this cell to train a model."), display_id=True)
        self._places = [first, display(_Sentence(""), display_id=True)]
        capture = Capture(self._make, on_found=self._found, model_name=self._model_name, namespace=self._shell.user_ns)
        ended = False
        try:
            with capture, on_cpu() if self._on_cpu else contextlib.nullcontext() as mapped:
                self._mapped = mapped is not None and mapped.active
                run_cell(self._shell, source)
            ended = True
        finally:
            self._show_end(capture, ended)

    def request(self, changes: Mapping[str, Any], at_step: int | None) -> Mapping[str, Any]:
        """Ask for settings from within the cell, also before its loop has begun. Returns the changes.

        Raises
        ------
        SettingsError
            When they cannot be met.
        """
        if self.session is not None:
            return _ask(self.session, changes, at_step)
        Settings().replace(**changes)  # names and values; the rest is seen when the model is known
        if at_step == 0:
            raise SettingsError("at_step: got 0, expected at least 1: the model is found in the first step of a %%amp cell")
        self._requests.append((changes, at_step))
        return changes

    @property
    def budget(self) -> float | None:
        """Bytes that a step may hold; None for no budget."""
        return self._budget if self.session is None else self.session.memory_budget

    def set_budget(self, budget: float | None) -> None:
        """Set the session's `memory_budget`, also before the loop has begun.

        Raises
        ------
        SettingsError
            When the model's memory cannot have one, as far as the model is known.
        """
        session = self.session or self._made
        if session is not None and not session.closed:
            session.memory_budget = budget
        self._budget = budget

    def record(self, path: str) -> None:
        """Record the run to a new file, also before the loop has begun.

        Raises
        ------
        RecordingError
            When that cannot be, as far as is known now.
        """
        if self.session is not None:
            self.session.record(path)
        else:
            self._record = path

    def _make(self, model: nn.Module) -> AmpSession:
        """A session on what may be the model."""
        self._made = session = AmpSession(model)
        if self._budget is not None:
            try:
                session.memory_budget = self._budget
            except SettingsError as error:
                print(say("%amp budget: refused: {why}", why=in_language(str(error))))
        return session

    def _found(self, loop: LiveLoop) -> None:
        """The model is known: show the dashboard."""
        assert isinstance(loop, AmpSession)
        self.session = loop
        loop.in_cell = True
        loop.go_on = "run the %%amp cell again"
        if self._mapped:
            loop.remarks.append(lambda: _ON_CPU)
        if self._record is not None:
            path, self._record = self._record, None
            try:
                loop.record(path)
            except RecordingError as error:
                print(say("%amp record: refused: {why}", why=in_language(str(error))))
        for changes, at_step in self._requests:
            try:
                _ask(loop, changes, at_step)
            except SettingsError as error:  # only now that the model is known; the dashboard says it too, until the next change
                print(say("%amp set: refused: {why}", why=in_language(str(error))))
        self._requests.clear()  # a second model in the cell is another story
        self._shown = True
        try:
            self._show(loop.dashboard())
        except MissingExtraError as error:
            self._picture = Picture(loop, f"{NO_DASHBOARD} {error}")
            self._places[0].update(self._picture)
        except Exception as error:  # the user's loop goes on without
            self._say(f"amp_widgets: the dashboard cannot be shown: {type(error).__name__}: {error}")

    def _show(self, dashboard: Dashboard) -> None:
        if self.frame is None:
            from amp_widgets.widgets.frame import Frame

            first, second = (str(place.display_id) for place in self._places)
            self.frame = Frame((first, second))
            for widget in (self.frame, self.frame.layout):
                kernel.answer_where_asked(widget.comm)
        before, self._dashboard = self._dashboard, dashboard
        self.frame.put(dashboard)
        if before is not None:
            before.close()

    def close(self) -> None:
        """Take what is shown off the page, and free it."""
        for shown in (self._dashboard, self.frame):
            if shown is not None:
                shown.close()
        self._dashboard = self.frame = None

    def _say(self, text: str) -> None:
        self._places[0].update(_Sentence(text))

    def _show_end(self, capture: Capture, ended: bool) -> None:
        if self._shown:
            if self._dashboard is not None:
                self._dashboard.tick()  # the last state and the picture of the whole run, before the cell is over
            if self._picture is not None:
                self._places[0].update(self._picture)
            return
        if not ended and capture.why_not is None:
            self._say("amp_widgets: the cell ended before it had trained a model.")
            return
        why = capture.why_not
        if why is None and self._model_name is not None:
            why = f"no model named {self._model_name!r} was trained, nor another one"
            if capture.names:
                why = f"no model named {self._model_name!r} was trained; these were: {', '.join(capture.names)}"
        self._say(f"amp_widgets: nothing to control in this cell: {why or 'no optimizer has stepped'}.")


NO_DASHBOARD = "The dashboard cannot be shown; %amp set and %amp work without it, and %amp shows this picture as it is then."
_ON_CPU = (
    "Runs on the CPU, as --cpu asks: .cuda(), 'cuda' devices, autocast and GradScaler of this cell mean the CPU. Times and "
    "memory are the CPU's."
)


class _Sentence:
    """One sentence as an output."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return in_language(self._text)

    def _repr_html_(self) -> str:
        return f"<div>{html.escape(repr(self))}</div>"


def _ask(session: AmpSession, changes: Mapping[str, Any], at_step: int | None) -> Mapping[str, Any]:
    if at_step is None:
        return session.request(source="magic", **changes).changes
    return session.schedule(at_step=at_step, source="magic", **changes).changes
