"""Going back to an earlier step of a session's run, and on from there in another way."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
from torch import nn

from amp_widgets.analysis.held_interrupt import interrupts_held
from amp_widgets.analysis.snapshot import Snapshot
from amp_widgets.analysis.training_state import Stateful, Trained, check_fits, put_back_state
from amp_widgets.background_run import BackgroundRun
from amp_widgets.core.batches import BatchStream, EpochStart, Place, refuse_once_only
from amp_widgets.core.history import History
from amp_widgets.core.loop import LiveLoop
from amp_widgets.core.random_states import RandomStates
from amp_widgets.core.requests import Request
from amp_widgets.core.run_state import ALIVE
from amp_widgets.core.settings import FIELD_NAMES, describe_changes
from amp_widgets.errors import ForkError, RunError, SessionClosedError, SnapshotError
from amp_widgets.left_branch import LeftBranch
from amp_widgets.on_demand import OnDemand
from amp_widgets.recording.settings_course import settings_in_force
from amp_widgets.run_recording import RunRecording, facts_of_loop
from amp_widgets.runner import Runner
from amp_widgets.snapshots import KEPT, Kept, Lap, Past, Snapshots


class Forks:
    """The snapshots and the courses of one session, which is passed as `loop` and not kept.

    Attributes
    ----------
    snapshots
        None before `keep`.
    branches
        The courses that were left, the newest last. What is taken out of the list is let go.
    course
        What the present one is called; None for the first.
    """

    def __init__(self, background: BackgroundRun, on_demand: OnDemand, recording: RunRecording) -> None:
        self.snapshots: Snapshots | None = None
        self.branches: list[LeftBranch] = []
        self.course: str | None = None
        self._background = background
        self._on_demand = on_demand
        self._recording = recording
        self._cell: CellLoop | None = None
        self._resume: _Resume | None = None
        self._busy: str | None = None  # what is being done, for people
        self._numbers = itertools.count(1)

    def remark(self) -> str | None:
        """What views say of it."""
        return self._busy or (None if self.snapshots is None else self.snapshots.notice)

    def close(self) -> None:
        """Let go of the model and the data, and of snapshots in memory."""
        self._cell = self._resume = None
        if self.snapshots is not None:
            self.snapshots.close()

    # ---- snapshots --------------------------------------------------------------------------------------------------

    def keep(
        self,
        loop: LiveLoop,
        *,
        every: int,
        folder: str | os.PathLike[str] | None,
        keep: int | None,
        also: Sequence[Stateful] | None,
    ) -> None:
        """As `amp_widgets.session.AmpSession.keep_snapshots`."""
        had = self.snapshots
        if had is None:
            had = Snapshots(every=every, folder=folder, keep=KEPT if keep is None else keep, also=also or ())
        elif folder is not None and had.folder != Path(folder).absolute():
            raise SnapshotError(
                f"keep_snapshots: got another folder, {folder}; the snapshots of this session are {had.where}, and stay there"
            )
        else:
            had.set(every=every, keep=had.keep if keep is None else keep, also=had.also if also is None else also)
        if self.snapshots is None:
            loop.on_boundary.append(functools.partial(_at_boundary, weakref.ref(self), weakref.ref(loop)))
        self.snapshots = had
        if self._background.runner is None and not loop.step_in_progress and not loop.trained_elsewhere and self._cell is None:
            had.between(loop, None, "plain")  # else with the next step, or when the run begins

    def before_batch(self, loop: LiveLoop, stream: BatchStream) -> None:
        """The background run is between two steps."""
        runner = self._background.runner
        if self.snapshots is not None and runner is not None:
            self.snapshots.between(loop, stream, "fit", runner.loss_fn)

    def at_boundary(self, loop: LiveLoop) -> None:
        """A step is over. Where it is of a loop of which nothing else is known, this is the time for a snapshot."""
        snapshots = self.snapshots
        if snapshots is None or self._busy is not None or (snapshots.lap_kind == "plain" and not snapshots.is_due(loop.step)):
            return  # hot
        if self._background.state in ALIVE or (self._cell is not None and self._cell.runs_here()):
            return
        snapshots.between(loop, None, "plain")

    # ---- a loop over session.steps(...) ------------------------------------------------------------------------------

    def cell_begins(self, loop: LiveLoop, stream: BatchStream, consumer: CodeType | None) -> CellLoop:
        """Such a loop begins; after a fork the data come to their place, where they are the same."""
        resume, self._resume = self._resume, None
        if resume is not None and resume.step == loop.step:
            if resume.lap.batches() is stream.batches and resume.lap.key is not None:
                stream.lap = resume.lap.key
                stream.go_to(resume.place, _nothing)
                resume.random.restore()
                loop.record_event("note", f"the data go on at epoch {resume.place.epoch}, batch {resume.place.given}")
            else:
                loop.record_event("note", "other data than before the fork: they begin at their beginning")
        self._cell = CellLoop(stream, consumer)
        return self._cell

    def cell_between(self, loop: LiveLoop, cell: CellLoop) -> None:
        """It is about to take a batch."""
        self._cell = cell
        if self.snapshots is not None and not loop.step_in_progress:
            self.snapshots.between(loop, cell.stream, "steps")

    def cell_ends(self, cell: CellLoop) -> None:
        """It is over."""
        if self._cell is cell:
            self._cell = None

    # ---- forks ------------------------------------------------------------------------------------------------------

    def fork(self, loop: LiveLoop, at_step: int, changes: Mapping[str, Any], *, model_type: str) -> LeftBranch:
        """As `amp_widgets.session.AmpSession.fork`."""
        runner = self._background.runner
        self._refuse(loop, runner)
        cancelled = threading.Event()
        fork = functools.partial(
            self._fork_now, loop, runner, at_step, dict(changes), model_type, functools.partial(_check, runner, cancelled)
        )
        if runner is None:
            with interrupts_held():
                return fork()
        done: Future[None] = Future()
        made: list[LeftBranch] = []
        failed: list[BaseException] = []  # not in `done`, which is known to the job's frame and so to its traceback: a cycle

        def job() -> None:
            try:
                made.append(fork())
            except BaseException as error:  # raised where it was asked for
                failed.append(error)
            done.set_result(None)

        runner.between_steps(job, takes_long=True)
        try:
            self._background.wait_for(done, _nothing)
        except KeyboardInterrupt:
            cancelled.set()
            self._background.wait_for(done, _nothing)
            if failed:  # else it was too late
                failed.clear()
                raise
        if failed:
            raise failed.pop()
        return made[0]

    def _refuse(self, loop: LiveLoop, runner: Runner | None) -> None:
        """Raise why it cannot be now."""
        if loop.closed:
            raise SessionClosedError("fork: the session was closed; make a new AmpSession")
        if self.snapshots is None:
            raise ForkError(
                "fork: no snapshots are kept of this session; keep some from now on, session.keep_snapshots(every=100), or from "
                "the beginning, AmpSession(model, optimizer, snapshot_every=100)"
            )
        self._on_demand.refuse_beside("fork")
        if self._busy is not None:
            raise RunError("fork: another fork is being made; wait for it")
        self._background.refuse_beside_a_cell(loop, "fork")
        alive = self._background.state in ALIVE
        if runner is not None and runner.is_here:
            raise RunError(
                "fork: got it called from within a step of the run, expected from outside; call it in a cell of its own"
            )
        if loop.in_cell or (not alive and self._cell is not None and self._cell.runs_here()):
            raise RunError("fork: your own loop is training this model; leave it first, or call fork in the next cell")
        if not alive and not loop.settle_step():
            raise RunError("fork: a step of your own loop is in progress; call its optimizer's step or scaler.update() first")

    def _fork_now(
        self,
        loop: LiveLoop,
        runner: Runner | None,
        at_step: int,
        changes: dict[str, Any],
        model_type: str,
        check: Callable[[], None],
    ) -> LeftBranch:
        """Between two steps, on the thread that trains."""
        snapshots = self.snapshots
        if snapshots is None or loop.model is None:
            raise SessionClosedError("fork: the session was closed; make a new AmpSession")
        if type(at_step) is not int or not 0 <= at_step <= loop.step:
            raise ForkError(
                f"fork: at_step: got {at_step!r}, expected a whole number from 0 to {loop.step}, the steps that there were; "
                f"{snapshots.choice()}"
            )
        way = _way(loop, runner, snapshots, at_step)
        history = loop.history
        if changes:
            in_force = settings_in_force((), history.events_since(0)[0], at_step)
            changes = loop.check_request(changes, in_force, source="fork")  # layers by their names
        self._busy = f"Going back to step {at_step}."
        try:
            with self._recording.held():
                with _put_back_after_error(loop, way):
                    stream, differs = self._go_back(loop, way, history, at_step, check)
                branch = self._leave(loop, history, at_step, changes, model_type)
        finally:
            self._busy = None
        snapshots.forget_after(at_step)
        self._resume = None
        if way.runner is not None and stream is not None:
            if way.kept.step != at_step:  # else it is there
                snapshots.take(loop, stream.place, way.trained.loss_fn)
            way.runner.go_on_with(stream)
        elif way.past.place is not None:
            self._resume = _Resume(at_step, way.lap, way.past.place, way.past.random)
        for sentence in filter(None, (differs, _what_is_left(way))):
            loop.record_event("note", sentence)
        if changes:
            loop.request(source="fork", **changes)
        loop.apply_pending()
        return branch

    def _go_back(
        self, loop: LiveLoop, way: _Way, history: History, at_step: int, check: Callable[[], None]
    ) -> tuple[BatchStream | None, str | None]:
        """To the snapshot, and from there to the step, as it was.

        Returns
        -------
        stream
            The data at their place; None where a loop of the user's own goes through them.
        differs
            What came out otherwise than then, for people; None where nothing did.
        """
        stream = None
        if way.runner is not None and way.past.place is not None and way.lap.key is not None:
            stream = way.runner.new_stream()
            stream.lap = way.lap.key
            stream.go_to(way.past.place, check)
        put_back_state(way.past.state, way.kept.shapes, way.trained)
        loop.go_to(way.past.standing)
        way.past.random.restore()
        applied_since = [
            Request(changes={name: event.detail[name] for name in FIELD_NAMES if name in event.detail}, at_step=event.step)
            for event in history.events_since(0)[0]
            if event.kind == "applied" and event.time_s > way.kept.time_s and event.step <= at_step
        ]
        with loop.rehearse(applied_since) as journal:
            while loop.step < at_step:
                assert way.runner is not None
                assert stream is not None
                check()
                self._busy = f"Going back: step {loop.step} is trained once more, and those up to step {at_step}."
                if not way.runner.train_from(stream):
                    raise ForkError(f"fork: the data came to their end at step {loop.step}, before step {at_step}")
            return stream, _difference(history, journal.history(wait=True))

    def _leave(self, loop: LiveLoop, history: History, at_step: int, changes: Mapping[str, Any], model_type: str) -> LeftBranch:
        """The course so far is over: it becomes a branch, and another begins."""
        file = self._recording.path
        name = self.course or ("run" if file is None else file.stem)
        facts = {**facts_of_loop(loop, model=model_type), "file": None if file is None else str(file)}
        branch = LeftBranch(name=name, history=history, left_at=at_step, facts=facts)
        self.branches.append(branch)
        self.course = f"fork-{next(self._numbers)}"
        loop.begin_course()
        what = f" with {describe_changes(changes)}" if changes else ", with nothing changed"
        whose = f" ({file.name})" if file is not None else ""
        loop.record_event("run", f"forked from {name}{whose} at step {at_step}{what}", state="forked", **{"from": name})
        more = {"forked_from": {"name": name, "file": None if file is None else file.name, "at_step": at_step}}
        self._recording.go_on_beside(loop, model=model_type, more_facts=more)
        return branch


class CellLoop:
    """A loop over ``session.steps(...)`` that has not ended as far as is known.

    Parameters
    ----------
    stream
        What it goes through.
    consumer
        The code that asks for the batches.
    """

    def __init__(self, stream: BatchStream, consumer: CodeType | None) -> None:
        self.stream = stream
        self._consumer = consumer

    def runs_here(self) -> bool:
        """Whether the caller is called from within the loop; one that an error has left does not come to its end."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code is self._consumer:
                return True
            frame = frame.f_back
        return False


@dataclasses.dataclass(frozen=True, slots=True)
class _Resume:
    """Where a loop over ``session.steps(...)`` is to go on."""

    step: int
    lap: Lap
    place: Place
    random: RandomStates


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Way:
    """How a step can be come to.

    Attributes
    ----------
    kept, past
        The snapshot, and what is in it.
    lap
        That it is in.
    runner
        Trains the steps of that lap; None where that is a loop of the user's own.
    trained
        What is to be put back.
    """

    kept: Kept
    past: Past
    lap: Lap
    runner: Runner | None
    trained: Trained


def _way(loop: LiveLoop, runner: Runner | None, snapshots: Snapshots, at_step: int) -> _Way:
    """Raise why there is none, if so."""
    model = loop.model
    assert model is not None
    kept, lap = snapshots.for_step(at_step)
    if lap.kind != "fit":
        runner = None
    elif runner is None or lap.batches() is not runner.batches:
        raise ForkError(
            f"fork: an earlier fit() on other data, which are not known any more, has trained the steps from {lap.first_step} "
            "on; fork at a later step"
        )
    past = snapshots.read(kept)
    if runner is not None and past.place is not None:
        begun_since = loop.step > lap.first_step or runner.newest_batch is not None
        if past.place.begun or begun_since:
            refuse_once_only(runner.batches)
    loss_fn = None if runner is None else runner.loss_fn
    trained = Trained(model=model, optimizers=loop.known_optimizers, loss_fn=loss_fn, also=snapshots.also)
    check_fits(past.state, trained, f"fork: the snapshot of step {kept.step}")
    return _Way(kept=kept, past=past, lap=lap, runner=runner, trained=trained)


@contextlib.contextmanager
def _put_back_after_error(loop: LiveLoop, way: _Way) -> Iterator[None]:
    """After an error within, whatever it is, all is as it was before."""
    trained, data = way.trained, way.lap.batches()
    standing = loop.standing()
    also = [copy.deepcopy(other.state_dict()) for other in trained.also]
    of_data = None if data is None else EpochStart(data)
    loss_fn = trained.loss_fn if isinstance(trained.loss_fn, nn.Module) else None
    before = Snapshot(trained.model, trained.optimizers, loss_fn=loss_fn)
    try:
        yield
    except BaseException as error:
        try:
            loop.abandon_step()
            if of_data is not None:
                of_data.put_back(data)
                if way.runner is not None:
                    way.runner.find_place_again()
            for other, state in zip(trained.also, also, strict=True):
                other.load_state_dict(state)
            loop.go_to(standing)
            before.restore()
        except Exception as second:
            why = f"a fork has failed, and what was before could not be put back: {type(second).__name__}: {second}"
            loop.record_event("note", why)
            error.add_note(why)
        raise
    finally:
        del before  # not kept by the error's traceback


def _what_is_left(way: _Way) -> str | None:
    """What the user is to do, or is to know, after a fork; None where all is done."""
    left = []
    if way.lap.kind == "plain":
        left.append(
            "weights, optimizers, scaler, settings and random states are those of then, the data begin where your loop begins"
        )
    elif way.lap.kind == "steps":
        left.append("run your cell again: session.steps(...) goes on at the same place, if it gets the same data")
    schedulers = [other for other in way.trained.also if hasattr(other, "last_epoch")]
    if not schedulers and any(_has_scheduler(optimizer) for optimizer in way.trained.optimizers):
        left.append(
            "a learning-rate scheduler of yours stays where it is, only the rate is that of then: "
            "session.keep_snapshots(every=..., also=[scheduler]) brings it along"
        )
    return f"after the fork: {'; '.join(left)}" if left else None


def _check(runner: Runner | None, cancelled: threading.Event) -> None:
    if cancelled.is_set() or (runner is not None and runner.stopping):
        raise ForkError("fork: it was broken off; the run is as it was")


def _difference(history: History, again: History) -> str | None:
    """Where steps that were trained again came out otherwise, for people; None where all are the same, bit by bit."""
    names = ("step", "loss", "scale", "skipped")
    then, now = history.columns(*names), again.columns(*names)
    _, here, there = np.intersect1d(then["step"], now["step"], return_indices=True)
    for name in names[1:]:
        old, new = then[name][here], now[name][there]
        other = np.flatnonzero((old != new) & ~(np.isnan(old) & np.isnan(new)))
        if other.size:
            step = then["step"][here][other[0]]
            return (
                f"the steps up to here were trained once more, and came out otherwise from step {step} on: {name} "
                f"{new[other[0]]:.9g} for {old[other[0]]:.9g}; something in the loop is not repeatable, or was changed by hand"
            )
    return None


def _has_scheduler(optimizer: Any) -> bool:
    step = getattr(optimizer, "step", None)
    return bool(getattr(step, "_wrapped_by_lr_sched", False) or getattr(step, "_with_counter", False))


def _at_boundary(forks: weakref.ref[Forks], loop: weakref.ref[LiveLoop]) -> None:
    held, trained = forks(), loop()
    if held is not None and trained is not None:
        held.at_boundary(trained)


def _nothing() -> None:
    return None
