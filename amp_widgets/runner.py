"""A training thread around a live loop: start, pause, single step, stop, reset."""

from __future__ import annotations

import atexit
import collections
import copy
import dataclasses
import math
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from amp_widgets.core.batch_tree import batch_leaves, first_dimension, mapping_like
from amp_widgets.core.batches import NO_MORE, BatchStream, lasts
from amp_widgets.core.loop import LiveLoop
from amp_widgets.core.model_call import call_model
from amp_widgets.core.run_state import ALIVE, RunState
from amp_widgets.core.threads import this_thread
from amp_widgets.errors import RunError

_LAST_LINES = 6


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What one background run trains.

    Parameters
    ----------
    model, optimizers
        As in the loop.
    batches
        Yields ``(inputs, targets)``; iterated once an epoch.
    loss_fn
        ``loss_fn(model(inputs), targets)`` gives the loss; several inputs are given as `amp_widgets.core.model_call.call_model`
        says.
    epochs
        How often to go through `batches`; None until stopped.

    Raises
    ------
    RunError
        When `batches`, `loss_fn` or `epochs` cannot be what it is to be.
    """

    model: nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...]
    batches: Iterable[Any]
    loss_fn: Callable[[Any, Any], torch.Tensor]
    epochs: int | None

    def __post_init__(self) -> None:
        # not iter(batches): that would start a DataLoader's workers
        if not isinstance(self.batches, Iterable) and not hasattr(type(self.batches), "__getitem__"):
            raise RunError(
                f"fit: batches: got {_called(self.batches)}, expected something to iterate over that yields (inputs, targets); "
                "pass a DataLoader or a list"
            )
        if not callable(self.loss_fn):
            raise RunError(
                f"fit: loss_fn: got {_called(self.loss_fn)}, expected a function of (outputs, targets); pass for instance "
                "torch.nn.functional.cross_entropy"
            )
        epochs: object = self.epochs
        if epochs is not None and (not isinstance(epochs, int) or isinstance(epochs, bool) or epochs < 1):
            raise RunError(
                f"fit: epochs: got {_called(epochs)}, expected an int of at least 1, or None; pass None to train until stopped"
            )


class Runner:
    """Runs the classic loop on a thread of its own.

    Pause, single step, resume and stop take effect at the next step boundary. Construction keeps a copy of the weights, the
    optimizers' and the scaler's state on the CPU, for `reset`.

    Parameters
    ----------
    loop
        The loop that the steps go through.
    training
        What to train.
    on_end
        Called on the training thread when a run has ended, however it did; the next run waits for its return.
    on_boundary
        Called on the training thread before each step, and now and then while the run is paused.
    before_batch
        Called on the training thread between two steps, before a batch is taken from what it is given.

    Attributes
    ----------
    newest_batch
        What the data have given last, where they have it; None before the first, and after a failure.
    """

    def __init__(
        self,
        loop: LiveLoop,
        training: Training,
        *,
        on_end: Callable[[], None] | None = None,
        on_boundary: Callable[[], None] | None = None,
        before_batch: Callable[[BatchStream], None] | None = None,
    ) -> None:
        self._loop = loop
        self._on_end = on_end
        self._on_boundary = on_boundary
        self._before_batch = before_batch
        self._stream: BatchStream | None = None  # while it trains
        self._other_stream: BatchStream | None = None  # to go on with
        self.newest_batch: Any = None
        self._jobs: collections.deque[Callable[[], None]] = collections.deque()
        self._training = training
        self._first = _snapshot(loop, training)
        self._changed = threading.Condition()
        self._state: RunState = "ready"
        self._pausing = False
        self._stopping = False
        self._steps_allowed = 0
        self._resetting = False
        self._working = False  # on a thread of its own, while no run is alive
        self._thread: threading.Thread | None = None
        # Not Thread.join: up to Python 3.12 one that was interrupted takes the thread for dead ever after.
        self._over = threading.Event()
        self._over.set()
        self._error: BaseException | None = None
        self._sentence: str | None = None  # on how it failed
        self.error_text: str | None = None
        self.samples = 0
        """Samples in the newest batch, 0 before the first."""

    @property
    def state(self) -> RunState:
        """``ready`` ``running`` ``paused`` ``stopped`` ``finished`` or ``failed``."""
        return self._state

    def start(self) -> None:
        """Start training from the present weights, or go on when paused.

        A run that was asked to stop is first given a few seconds to end.

        Raises
        ------
        RunError
            When it is running already, or still in the step after which it stops.
        """
        self._let_it_stop()
        with self._changed:
            self._expect_not_stopping("start")
            self._expect_not_working("start")
            if self._state in ALIVE and self._pausing:
                self._resume()
            elif self._state == "running":
                raise RunError("start: the run is running already; pause or stop it first")
            else:
                self._launch("start", steps_allowed=0, pausing=False)

    def pause(self) -> None:
        """Pause at the next boundary; nothing happens when it is paused.

        Raises
        ------
        RunError
            When no run is alive.
        """
        with self._changed:
            if self._state not in ALIVE:
                raise RunError(f"pause: the run is {self._state}, expected running; start it first")
            self._pausing = True

    def resume(self) -> None:
        """Go on after a pause.

        Raises
        ------
        RunError
            When it is not paused, or was asked to stop.
        """
        with self._changed:
            self._expect_not_stopping("resume")
            if self._state not in ALIVE or not self._pausing:
                hint = "it goes on already" if self._state == "running" else "use start"
                raise RunError(f"resume: the run is {self._state}, expected paused; {hint}")
            self._resume()

    def single_step(self) -> None:
        """Train one step, then pause; starts the run when it is not.

        A run that was asked to stop is first given a few seconds to end.

        Raises
        ------
        RunError
            When it is running, or still in the step after which it stops.
        """
        self._let_it_stop()
        with self._changed:
            self._expect_not_stopping("single_step")
            self._expect_not_working("single_step")
            if self._state == "running" and not self._pausing:
                raise RunError("single_step: the run is running; pause it first")
            if self._state in ALIVE:
                self._steps_allowed += 1
                self._changed.notify_all()
            else:
                self._launch("single_step", steps_allowed=1, pausing=True)

    def stop(self) -> None:
        """Stop at the next boundary; nothing happens when no run is alive."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def reset(self) -> None:
        """Put back the weights, the optimizers' and the scaler's state that the run was made with.

        While a run is alive it happens at the next boundary or when it ends, on its thread. Steps and history go on counting.

        Raises
        ------
        RunError
            While something is done between two steps that takes long, and no run is alive.
        """
        with self._changed:
            self._expect_not_working("reset")
            if self._state in ALIVE:
                self._resetting = True
                self._changed.notify_all()
            else:
                self._other_stream = None
                self._restore()  # with the lock held: no run can begin meanwhile

    def between_steps(self, job: Callable[[], None], *, takes_long: bool = False) -> None:
        """Call it when no step is in progress: at once where no run is alive, and none begins meanwhile.

        While one is alive it is called at the next boundary or when the run ends, on the run's thread. It must raise nothing.

        Parameters
        ----------
        takes_long
            Where no run is alive it is called on a thread of its own, and this returns at once. Until it has returned a run
            can be neither started nor reset. It is to end soon when `stopping` says so.
        """
        with self._changed:
            if self._state in ALIVE or self._working:
                self._jobs.append(job)
                self._changed.notify_all()
            elif takes_long:
                self._jobs.append(job)
                self._work()
            else:
                job()  # with the lock held, like a reset

    @property
    def stopping(self) -> bool:
        """Whether it was asked to stop, and has not started since."""
        return self._stopping

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is the run's."""
        return self._thread is threading.current_thread()

    @property
    def loss_fn(self) -> Callable[[Any, Any], torch.Tensor]:
        """What makes the loss."""
        return self._training.loss_fn

    @property
    def batches(self) -> Iterable[Any]:
        """The data."""
        return self._training.batches

    # ---- for what is called by `between_steps` ----------------------------------------------------------------------

    def new_stream(self) -> BatchStream:
        """The data, from their beginning."""
        return BatchStream(self._training.batches, self._training.epochs, on_empty=_refuse_empty)

    def train_from(self, stream: BatchStream) -> bool:
        """Train one step on the next batch of other data than the run goes through; False where they have no more."""
        batch = stream.take()
        if batch is NO_MORE:
            return False
        inputs, targets = _moved(batch, self._loop.device)
        self._one_step(self._training, inputs, targets)
        return True

    def find_place_again(self) -> None:
        """Where something else has gone through the data meanwhile, and they have but one iterator."""
        stream = self._stream
        if stream is not None and lasts(stream.batches):
            stream.go_to(stream.place, lambda: None)

    def go_on_with(self, stream: BatchStream) -> None:
        """Go on with these data: at once where a run is alive, else with the next start, for which it is ready."""
        self._other_stream = stream
        with self._changed:
            if self._state not in ALIVE:
                self._error = self._sentence = self.error_text = None
                self._enter("ready")

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the run has ended.

        Parameters
        ----------
        timeout_s
            Give up after so many seconds; None waits for ever.

        Returns
        -------
        bool
            Whether it has ended.

        Raises
        ------
        BaseException
            What the user's model, data or loss raised in the run; once.
        KeyboardInterrupt
            On an interrupt, after the run was stopped and has ended; at once on a second one.
        """
        if not self._wait_until_over(timeout_s):
            return False
        error, self._error = self._error, None
        if error is not None:
            raise error
        return True

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the run has ended, whatever it raised; call `stop` before. Interrupts are as in `wait`."""
        if self._wait_until_over(timeout_s) and self._thread is not None:
            self._thread.join()  # it only has to return

    def _wait_until_over(self, timeout_s: float | None) -> bool:
        if self._thread is threading.current_thread():
            return self._over.is_set()
        try:
            return _wait_for(self._over, timeout_s)
        except KeyboardInterrupt:
            self.stop()
            _wait_for(self._over, None)
            raise

    def _let_it_stop(self) -> None:
        if self._stopping and self._state in ALIVE and self._thread is not threading.current_thread():
            _wait_for(self._over, _STOPPING_S)

    # ---- on the training thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._end(self._train_and_keep_the_error())
            if self._on_end is not None:
                self._on_end()
        finally:
            self._over.set()  # the very last: who waits for it may let go of the model

    def _train_and_keep_the_error(self) -> RunState:
        loop = self._loop
        loop.own(this_thread())
        try:
            try:
                return self._train()
            finally:
                loop.abandon_step()
        except BaseException as error:  # the user's code may raise anything; it is kept for wait()
            if loop.died(error):
                self._sentence = _OUT_OF_MEMORY
            return self._fail(error)

    def _end(self, ended: RunState) -> None:
        while True:
            with self._changed:
                # seen and entered under one lock: a reset, or a job, comes before the end or finds no run
                if not self._resetting and not self._jobs:
                    self._loop.own(None)
                    self._enter(ended, self._sentence if ended == "failed" else None)
                    return
            try:
                self._do_what_waits()
            except BaseException as error:
                ended = self._fail(error)
            if self._other_stream is not None and not self._stopping and ended != "failed":
                ended = self._train_and_keep_the_error()  # it was alive when it was asked to go back

    def _do_jobs(self) -> None:
        """While no run is alive."""
        self._loop.own(this_thread())
        try:
            while True:
                with self._changed:
                    if not self._jobs:
                        self._working = False  # under the lock that it was seen under: no job comes between
                        return
                self._do_what_waits()
        finally:
            self._loop.own(None)
            self._working = False
            self._over.set()

    def _fail(self, error: BaseException) -> RunState:
        self.newest_batch = None  # nothing of a run that has failed is kept
        if self._error is None:  # the first is what went wrong
            self.error_text = "".join(traceback.format_exception(error)).rstrip()
            self._error = _without_frames(error, self.error_text)
        return "failed"

    def _train(self) -> RunState:
        training = self._training
        device = self._loop.device
        self._stream = self._other_stream or self.new_stream()
        self._other_stream = None
        try:
            while True:
                if self._before_batch is not None:
                    self._before_batch(self._stream)
                batch = self._stream.take()
                if batch is NO_MORE:
                    return "stopped" if self._stopping else "finished"
                self.newest_batch = batch
                if not self._may_step():
                    return "stopped"
                if self._other_stream is not None:  # and this batch is of a course that is left
                    self._stream, self._other_stream = self._other_stream, None
                    continue
                inputs, targets = _moved(batch, device)
                self.samples = _samples(inputs, targets)
                self._one_step(training, inputs, targets)
        finally:
            self._stream = None

    def _one_step(self, training: Training, inputs: Any, targets: Any) -> None:
        loop = self._loop
        loop.begin_step()
        for optimizer in training.optimizers:
            optimizer.zero_grad()
        with loop.autocast():
            loss = training.loss_fn(call_model(training.model, inputs), targets)
        loop.scaler.scale(loss).backward()
        for optimizer in training.optimizers:
            loop.scaler.step(optimizer)
        loop.scaler.update()

    def _may_step(self) -> bool:
        """Whether to train a step now; waits here while paused. False when to stop."""
        while True:
            if self._on_boundary is not None:
                self._on_boundary()
            with self._changed:
                waits = self._resetting or bool(self._jobs)
                if not waits:
                    if self._stopping:
                        return False
                    if not self._pausing or self._other_stream is not None:
                        return True
                    if self._steps_allowed > 0:
                        self._steps_allowed -= 1
                        return True
                    self._enter("paused")  # under the lock that it was decided under: a resume comes before or after both
            if waits:
                self._do_what_waits()
                continue
            self._loop.apply_pending()  # between steps, on this thread: no need to let it wait for the resume
            with self._changed:
                if not (self._stopping or self._resetting or self._jobs or self._steps_allowed or not self._pausing):
                    self._changed.wait(_PAUSED_LOOK_S)  # a request does not notify: look now and then

    def _do_what_waits(self) -> None:
        with self._changed:
            resetting, self._resetting = self._resetting, False
        if resetting:
            self._restore()
        self._loop.lent_to = this_thread()
        try:
            while self._jobs:
                self._jobs.popleft()()
        finally:
            self._loop.lent_to = None

    # ---- with the lock held -----------------------------------------------------------------------------------------

    def _enter(self, state: RunState, sentence: str | None = None) -> None:
        if state != self._state:
            self._state = state
            self._loop.record_event("run", sentence or _SENTENCES[state], state=state)

    def _expect_not_stopping(self, verb: str) -> None:
        if self._stopping and self._state in ALIVE:
            raise RunError(f"{verb}: the run was asked to stop and is in its last step; wait for it: session.wait(), then start")

    def _expect_not_working(self, verb: str) -> None:
        if self._working:
            raise RunError(
                f"{verb}: settings are being compared, or steps predicted, on this model, or it goes back to a step; wait for "
                "it, or cancel"
            )

    def _resume(self) -> None:
        self._pausing = False
        self._steps_allowed = 0
        self._enter("running", "resumed")
        self._changed.notify_all()

    def _launch(self, verb: str, *, steps_allowed: int, pausing: bool) -> None:
        if self._loop.closed:
            raise RunError(f"{verb}: the session was closed; make a new AmpSession")
        self._over.wait()  # the last run has entered its last state and only has to return
        self._error = self._sentence = self.error_text = None
        self._stopping = self._resetting = False
        self._pausing = pausing
        self._steps_allowed = steps_allowed
        before = self._state
        self._over.clear()
        self._enter("running")
        try:
            self._begin(self._run)
        except RuntimeError:  # no more threads: nothing would ever end this run
            self._enter(before)
            self._over.set()
            raise

    def _work(self) -> None:
        """Do what waits, though no run is alive."""
        self._over.wait()
        self._stopping = False
        self._over.clear()
        self._working = True
        try:
            self._begin(self._do_jobs)
        except RuntimeError:
            self._jobs.clear()
            self._working = False
            self._over.set()
            raise

    def _begin(self, what: Callable[[], None]) -> None:
        """On a thread of its own."""
        self._thread = threading.Thread(target=what, name="amp_widgets training", daemon=True)
        _end_at_exit(self)
        try:
            self._thread.start()
        except RuntimeError:
            self._thread = None
            raise

    def _restore(self) -> None:
        _restore(self._loop, self._training, self._first)
        if self._stream is not None:
            self._stream.begin_lap()
        self._loop.record_event("run", "reset to the first weights", state="reset")


_PAUSED_LOOK_S = 0.05
_EXIT_S = 5.0
_STOPPING_S = 5.0
_SLICE_S = 0.2

_started: weakref.WeakSet[Runner] = weakref.WeakSet()


def _end_at_exit(runner: Runner) -> None:
    # a daemon thread inside torch while the interpreter is taken down can crash it
    if not _started:
        atexit.register(_end_all)
    _started.add(runner)


def _end_all() -> None:
    for runner in list(_started):
        runner.stop()
    for runner in list(_started):
        runner.join(_EXIT_S)


def _wait_for(event: threading.Event, timeout_s: float | None) -> bool:
    # in slices, because on Windows Ctrl-C does not come through while a lock is waited for
    until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while not event.wait(min(_SLICE_S, max(0.0, until_s - time.monotonic()))):
        if time.monotonic() >= until_s:
            return False
    return True


_SENTENCES: Mapping[str, str] = {
    "ready": "ready",
    "running": "started",
    "paused": "paused",
    "stopped": "stopped",
    "finished": "finished",
    "failed": "failed: an exception in the training loop",
}
_OUT_OF_MEMORY = "failed: out of memory; change what is in force and start again, from the present weights"


@dataclasses.dataclass(frozen=True, slots=True)
class _Snapshot:
    model: dict[str, Any]
    optimizers: list[dict[str, Any]]
    scaler: dict[str, Any]


def _snapshot(loop: LiveLoop, training: Training) -> _Snapshot:
    return _Snapshot(
        model=_on_cpu(training.model.state_dict()),
        optimizers=[_on_cpu(optimizer.state_dict()) for optimizer in training.optimizers],
        scaler=loop.scaler.state_dict(),
    )


def _restore(loop: LiveLoop, training: Training, first: _Snapshot) -> None:
    training.model.load_state_dict(first.model)
    for optimizer, state in zip(training.optimizers, first.optimizers, strict=True):
        optimizer.load_state_dict(copy.deepcopy(state))
    for parameter in training.model.parameters():
        parameter.grad = None
    # the scale starts anew from what the user last asked for; the factors in force stay
    loop.restart_scale()


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        copied = type(value)((key, _on_cpu(item)) for key, item in value.items())
        if hasattr(value, "_metadata"):  # a model's state_dict carries its modules' versions there
            copied._metadata = value._metadata  # type: ignore[attr-defined]
        return copied
    if isinstance(value, (list, tuple)):
        return _sequence_like(value, [_on_cpu(item) for item in value])
    return copy.deepcopy(value)


def _refuse_empty(epoch: int) -> None:
    what = "no batch at all" if epoch == 1 else f"no batch in epoch {epoch}"
    raise RunError(
        f"fit: got {what} from the data, expected (inputs, targets); an iterator can be used up only once: pass a DataLoader or "
        "a list"
    )


def _called(value: object) -> str:
    return repr(value) if isinstance(value, (int, float, str)) else f"a {type(value).__name__}"


def _moved(batch: Any, device: torch.device) -> tuple[Any, Any]:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        got = f"{len(batch)} parts" if isinstance(batch, (tuple, list)) else f"a {type(batch).__name__}"
        raise RunError(
            f"fit: got a batch of {got}, expected (inputs, targets); for others use session.steps(loader) and your own loop"
        )
    return _to(batch[0], device), _to(batch[1], device)


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    move = getattr(value, "to", None)
    if callable(move):  # a PackedSequence, a BatchEncoding: they know best
        moved = move(device)
        return value if moved is None else moved
    if isinstance(value, Mapping):
        return mapping_like(value, {key: _to(item, device) for key, item in value.items()})
    if isinstance(value, (tuple, list)):
        return _sequence_like(value, [_to(item, device) for item in value])
    return value


def _sequence_like(like: Any, items: list[Any]) -> Any:
    return type(like)._make(items) if hasattr(like, "_fields") else type(like)(items)


def _samples(inputs: Any, targets: Any) -> int:
    """In this batch; 0 where that is not known."""
    if isinstance(inputs, torch.Tensor):
        return len(inputs) if inputs.dim() > 0 else 0
    length = first_dimension(batch_leaves(inputs))
    return length if length and length == first_dimension(batch_leaves(targets)) else 0


def _without_frames(error: BaseException, text: str) -> BaseException:
    """The exception without the frames, which would keep the step's tensors alive; their text goes along as a note."""
    seen: set[int] = set()
    stack: list[BaseException | None] = [error]
    while stack:
        one = stack.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = None
        stack += [one.__cause__, one.__context__]
    lines = text.splitlines()
    error.add_note("In the training thread:\n" + "\n".join(lines[-20:]))
    return error


def last_lines(text: str | None) -> str | None:
    """The end of a traceback: what a status line has room for."""
    return None if text is None else "\n".join(text.splitlines()[-_LAST_LINES:])
