"""`AmpSession`: what users hold. A live loop, and the conveniences that live above the core, each one delegation long."""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amp_widgets import kernel
from amp_widgets.analysis.training_state import Stateful
from amp_widgets.background_run import BackgroundRun
from amp_widgets.cell_steps import cell_steps
from amp_widgets.core.history import DEFAULT_CAPACITY
from amp_widgets.core.run_state import RunState
from amp_widgets.errors import MissingExtraError
from amp_widgets.export.exports import Exports
from amp_widgets.export.sink import Sink
from amp_widgets.forks import Forks
from amp_widgets.left_branch import LeftBranch
from amp_widgets.on_demand import OnDemand
from amp_widgets.run_recording import RunRecording, facts_of_loop
from amp_widgets.run_sinks import RunSinks
from amp_widgets.session_analyses import SessionAnalyses
from amp_widgets.session_state import dashboard_state
from amp_widgets.snapshots import Snapshots
from amp_widgets.widgets.state import DashboardState

if TYPE_CHECKING:
    from amp_widgets.widgets.dashboard import Dashboard


class AmpSession(SessionAnalyses, Exports):
    """Mixed precision and activation checkpointing of a model, as switches that work while it trains.

    Parameters
    ----------
    model
        The model to control; the device is taken from its parameters.
    optimizer
        Its optimizer, or several that make up one step. None: any optimizer that has the model's parameters.
    memory_every
        Measure memory on every n-th step; 0 never. On a CPU a measured step is some percent slower.
    reset_peak
        On CUDA, whether torch's peak counter may be reset at every step (`overall peak` is kept by the session). False
        leaves the counter alone, and a step's peak is then known only when it is a new record.
    history_capacity
        Steps kept at full resolution; from then on the older half is thinned. Events are never dropped.
    record
        Write the run to this new file as it happens: see `record`.
    snapshot_every, snapshots_to
        Keep a snapshot every so many steps, to be able to `fork`; see `keep_snapshots`. 0 keeps none.

    Raises
    ------
    ModelError
        When the model has no parameters, or an optimizer has none of the model's.
    RecordingError
        When the file exists, or cannot be made.
    SnapshotError
        When the folder for snapshots cannot be made, or has snapshots of another session.

    Examples
    --------
    >>> session = AmpSession(model, optimizer)                        # doctest: +SKIP
    >>> session.request(autocast="fp16", checkpointed=["layers.*"])   # doctest: +SKIP
    >>> for inputs, labels in session.steps(loader, epochs=3):        # doctest: +SKIP
    ...     optimizer.zero_grad()
    ...     with session.autocast():
    ...         loss = criterion(model(inputs), labels)
    ...     session.scaler.scale(loss).backward()
    ...     session.scaler.step(optimizer)
    ...     session.scaler.update()

    Notes
    -----
    A new session changes nothing: autocast fp32, and torch's own scaler defaults. Making a second session of a model closes
    the first.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        memory_every: int = 1,
        reset_peak: bool = True,
        history_capacity: int = DEFAULT_CAPACITY,
        record: str | os.PathLike[str] | None = None,
        snapshot_every: int = 0,
        snapshots_to: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(
            model, _as_tuple(optimizer), memory_every=memory_every, reset_peak=reset_peak, history_capacity=history_capacity
        )
        self.model_type = type(model).__name__
        self.release_later = kernel.when_shown
        self._background = BackgroundRun()
        self._on_demand = OnDemand(self._background)
        self._recording = RunRecording()
        self._sinks = RunSinks()
        self._forks = Forks(self._background, self._on_demand, self._recording)
        self._last_scale = math.inf
        self.remarks.append(self._forks.remark)
        _sessions.append(weakref.ref(self))
        try:
            if record is not None:
                self.record(record)
            if snapshot_every or snapshots_to is not None:
                self.keep_snapshots(every=snapshot_every, folder=snapshots_to)
        except BaseException:
            self.close()
            raise

    # ---- the loop in a cell -----------------------------------------------------------------------------------------

    def steps(self, batches: Iterable[Any], epochs: int = 1) -> Iterator[Any]:
        """Go through `batches` with one progress bar; they are passed through untouched.

        Parameters
        ----------
        batches
            A DataLoader or another iterable, gone through once an epoch.
        epochs
            How often.

        Raises
        ------
        RunError
            When a background run is alive, or when `batches` can be gone through only once and `epochs` is above 1.
        """
        return cell_steps(self, self._background, self._on_demand, self._forks, batches, epochs)

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last step was skipped because of inf or NaN in the gradients.

        ``if not session.last_step_skipped: scheduler.step()``. With a fused optimizer on CUDA it waits for the device.
        """
        if not self.closed:
            return self.scaler.step_was_skipped()
        # the scaler is a plain one now, which does not tell; a skip lowers its scale
        before, self._last_scale = self._last_scale, self.scaler.get_scale()
        return self._last_scale < before

    # ---- the loop on a thread ---------------------------------------------------------------------------------------

    def fit(
        self,
        batches: Iterable[Any],
        loss_fn: Callable[[Any, Any], torch.Tensor],
        epochs: int | None = 1,
        *,
        start: bool = True,
    ) -> None:
        """Train on a background thread: the classic loop, with `start`, `pause`, `resume`, `single_step`, `stop`, `reset`.

        Parameters
        ----------
        batches
            Yields ``(inputs, targets)``; moved to the model's device. Inputs in a dict with the names of parameters of the
            model's ``forward`` are given as keywords, those in a tuple or list one after the other where ``forward`` needs more
            than one argument; anything else as it is.
        loss_fn
            ``loss_fn(model(inputs), targets)``, run inside autocast.
        epochs
            How often to go through `batches`; None until stopped.
        start
            Start at once; False only prepares, for the dashboard's Start.

        Raises
        ------
        RunError
            When a run is alive, or the session has no optimizer.
        SessionClosedError
            After `close`.
        """
        self._background.check_fit(self)
        self._on_demand.refuse_beside("fit")
        on_boundary = functools.partial(self._on_demand.look_for_change, self)
        before_batch = functools.partial(self._forks.before_batch, self)
        self._background.prepare(self, batches, loss_fn, epochs, on_boundary=on_boundary, before_batch=before_batch)
        if start:
            self.start()

    def start(self) -> None:
        """Start the run that `fit` prepared, or resume it when paused; from the present weights."""
        self._background.start(self)

    def pause(self) -> None:
        """Pause the run at the next boundary."""
        self._background.pause(self)

    def resume(self) -> None:
        """Go on after a pause."""
        self._background.resume(self)

    def single_step(self) -> None:
        """Train one step, then pause."""
        self._background.single_step(self)

    def stop(self) -> None:
        """Stop the run at the next boundary."""
        self._background.stop(self)

    def reset(self) -> None:
        """Put back the weights and optimizer state that the run was made with; at the next boundary when it is alive."""
        self._background.reset(self)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the run to end, at most `timeout_s`; raise what the training raised. Returns whether it has ended.

        Widgets go on working meanwhile. An interrupt stops the run.
        """
        return self._background.wait(self, timeout_s)

    @property
    def run_state(self) -> RunState:
        """``none`` before `fit`, then ``ready`` ``running`` ``paused`` ``stopped`` ``finished`` or ``failed``."""
        return self._background.state

    # ---- the run on disk --------------------------------------------------------------------------------------------

    def record(self, path: str | os.PathLike[str]) -> None:
        """Write the run to a new file, what it has so far and what comes; until `stop_recording` or `close`.

        Training goes on whatever happens to the file; the dashboard says when nothing can be written. The file is read with
        ``aw.open_run(path)``, also while it is written; see `amp_widgets.recording.schema` for what is in it.

        Parameters
        ----------
        path
            Of the file, such as ``"run.db"``; none that exists.

        Raises
        ------
        RecordingError
            When the file exists or cannot be made, or the run is being recorded already.
        SessionClosedError
            After `close`.
        """
        self._check_open("record")
        _end_with_the_program()
        self._recording.begin(path, self, model=self.model_type)

    def stop_recording(self) -> None:
        """Write what is left, and let go of the file."""
        _warn_of(self._recording.end())

    def log_to(self, sink: Sink) -> None:
        """Log the run to another tool too, what it has so far and what comes; until `stop_logging` or `close`.

        Training never waits for it, and goes on whatever happens to it; the dashboard says when nothing can be logged.

        Parameters
        ----------
        sink
            Such as ``amp_widgets.export.tensorboard_sink.TensorBoardSink("runs/a")`` or
            ``amp_widgets.export.trackio_sink.TrackioSink("project")``; there may be any number of them. `close` closes it.

        Raises
        ------
        SessionClosedError
            After `close`.
        """
        self._check_open("log_to")
        _end_with_the_program()
        self._sinks.add(sink, self, facts_of_loop(self, model=self.model_type))

    def stop_logging(self) -> None:
        """Log what is left, and close what `log_to` was given."""
        _warn_of(self._sinks.end())

    @property
    def recorded_to(self) -> Path | None:
        """The file that the run is being written to, or None."""
        return self._recording.path

    def note(self, text: str) -> None:
        """Put a text of yours among the events, as a note, at the present step.

        Parameters
        ----------
        text
            Kept as it is, and shown so in any language.

        Raises
        ------
        HistoryError
            When it is no text.
        """
        self.record_event("note", text, source="user")

    # ---- back to an earlier step ------------------------------------------------------------------------------------

    def keep_snapshots(
        self,
        *,
        every: int,
        folder: str | os.PathLike[str] | None = None,
        keep: int | None = None,
        also: Sequence[Stateful] | None = None,
    ) -> None:
        """Keep what training has come to every so many steps, so that the run can `fork`; also while it goes on.

        A snapshot is as large as the weights, the buffers and the optimizers' state; training waits while it is copied to the
        CPU, and written. An event says how large the first was, and how long it took; see also `snapshots`. Where one cannot
        be kept, as on a full disk, the dashboard says so and training goes on.

        Parameters
        ----------
        every
            Steps from one to the next; 0 takes no more.
        folder
            Write them to files in this folder, which may be a new one; see `amp_widgets.snapshots` for what is in them. None
            keeps them in the CPU's memory until `close`.
        keep
            At most so many, 5 where nothing was said: the first, the newest, and ever fewer of old ones.
        also
            What has a state of its own that belongs to the training: learning-rate schedulers, an average of the weights. A
            scheduler that is not named stays where it is in a fork; the optimizer has the rate of then again.

        Raises
        ------
        SettingsError
            When a number is none of steps.
        SnapshotError
            When the folder cannot be made, or has snapshots of another session.
        SessionClosedError
            After `close`.
        """
        self._check_open("keep_snapshots")
        self._forks.keep(self, every=every, folder=folder, keep=keep, also=also)

    @property
    def snapshots(self) -> Snapshots | None:
        """Those that are kept: ``steps``, ``bytes``, ``took_s``; None before `keep_snapshots`."""
        return self._forks.snapshots

    def fork(self, *, at_step: int, **changes: Any) -> LeftBranch:
        """Go back to an earlier step, and on from there with other settings. Without any, all comes out as it did, bit by bit.

        Weights, buffers, optimizers, scaler, settings, random states and the place in the data are as they were after `at_step`
        steps: from the snapshot before, and by training the steps from there once more. Only a background run can do that; of the
        steps of a loop of your own, it takes a snapshot of that very step. What was changed after that step is not repeated; what
        is scheduled for later steps still is. A background run that is alive goes on from there; one that is not
        is ready for `start`. Where a loop over `steps` trains the model, run its cell again with the same data: it goes on at the
        same place. Any other loop of your own finds the state of then, and begins its data itself.

        The course so far is kept in `branches`, and `history` starts anew from what both have in common. A recording goes on in
        a new file beside the one so far: ``run.fork-1.db``.

        What is not come back to: attributes of modules that are no tensors, generators that only your code knows, and the random
        numbers of a DataLoader's persistent workers after the first epoch. Where steps are trained once more and come out
        otherwise, an event says so.

        Parameters
        ----------
        at_step
            The first step that is trained anew; steps count from 0.
        **changes
            As in `request`, in force from that step on.

        Returns
        -------
        LeftBranch
            The course that was left, for ``aw.compare_runs(branch, session)``.

        Raises
        ------
        ForkError
            When nothing leads to that step, or the data cannot be gone through again; the run is as it was.
        SnapshotError
            When the snapshot is damaged, or does not fit the model any more.
        SettingsError
            When the changes cannot be met at that step.
        RunError
            While your own loop trains the model, or it is being analysed.
        SessionClosedError
            After `close`.
        """
        return self._forks.fork(self, at_step, changes, model_type=self.model_type)

    @property
    def branches(self) -> list[LeftBranch]:
        """The courses that `fork` has left, the newest last; what you take out of the list is let go."""
        return self._forks.branches

    @property
    def name(self) -> str | None:
        """What the present course is called: ``"fork-1"`` after the first fork; None before."""
        return self._forks.course

    # ---- the dashboard ----------------------------------------------------------------------------------------------

    def dashboard(self) -> Dashboard:
        """A view of this session, to be displayed; there may be any number of them.

        Raises
        ------
        MissingExtraError
            When ipywidgets, anywidget or plotly is not installed.
        """
        make = _dashboard_class()
        self._background.serve_busy_cells(self)
        self.profile_changes = True
        dashboard = make(self)
        for widget in dashboard.widgets():
            kernel.answer_where_asked(widget.comm)
        return dashboard

    def dashboard_state(self) -> DashboardState:
        """Everything that a view shows, as one snapshot; never waits for the device."""
        self._on_demand.do_left_jobs(self)
        notice = " ".join(filter(None, (self._recording.notice, self._sinks.notice))) or None
        return dashboard_state(self, self._background, self._on_demand, recording_notice=notice)

    # ---- life -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop a run, and let go of the model, which is as it was; history and a plain scaler remain."""
        self._on_demand.comparisons.cancel()
        self._background.close()
        self._on_demand.inspections.forget_model()
        self._forks.close()
        super().close()
        self._on_demand.do_jobs()  # to no effect but that they say so
        self._last_scale = self.scaler.get_scale()
        self._write_what_is_left()

    def __enter__(self) -> AmpSession:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # also of one that could not be made
            self._write_what_is_left()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.settings.autocast}, step {self._step}"
        return f"<AmpSession of {self.model_type} on {self.device}: {state}>"

    def _write_what_is_left(self) -> None:
        """To the file, and to other tools, which are let go; also where nobody has called `close`."""
        self._journal.write(wait=True)
        _warn_of(self._recording.end(), self._sinks.end(), stacklevel=4)


_sessions: list[weakref.ref[AmpSession]] = []


@functools.cache
def _end_with_the_program() -> None:
    """A script that is over, or that an error has ended, has its last steps written too."""
    atexit.register(_write_all_that_is_left)


def _write_all_that_is_left() -> None:
    for reference in _sessions:
        session = reference()
        if session is not None:
            with contextlib.suppress(Exception):
                session._write_what_is_left()


def _warn_of(*missing: str | None, stacklevel: int = 3) -> None:
    """Of what is missing in a file or another tool at its end: a script has no dashboard that would say so."""
    for sentence in filter(None, missing):
        warnings.warn(sentence, RuntimeWarning, stacklevel=stacklevel)


def newest_session() -> AmpSession | None:
    """The session made last of those that are still there and open."""
    alive = [(reference, reference()) for reference in _sessions]
    _sessions[:] = [reference for reference, session in alive if session is not None and not session.closed]
    return _sessions[-1]() if _sessions else None


def _dashboard_class() -> type[Dashboard]:
    try:
        from amp_widgets.widgets.dashboard import Dashboard
    except ImportError as error:
        raise MissingExtraError(f"dashboard: {error}; install the widgets with: pip install 'amp-widgets[notebook]'") from error
    return Dashboard


def _as_tuple(optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None) -> tuple[torch.optim.Optimizer, ...]:
    if optimizer is None:
        return ()
    if isinstance(optimizer, (list, tuple)):
        return tuple(optimizer)
    return (optimizer,)  # type: ignore[return-value]  # checked by the loop, with a message
