"""A training thread around a live loop: start, pause, single step, stop, reset."""

from __future__ import annotations

import atexit
import copy
import dataclasses
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from amp_widgets.core.loop import LiveLoop
from amp_widgets.core.run_state import ALIVE, RunState
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
        ``loss_fn(model(inputs), targets)`` gives the loss.
    epochs
        How often to go through `batches`; None until stopped.
    """

    model: nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...]
    batches: Iterable[Any]
    loss_fn: Callable[[Any, Any], torch.Tensor]
    epochs: int | None


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
        Called on the training thread when a run has ended, however it did.
    """

    def __init__(self, loop: LiveLoop, training: Training, *, on_end: Callable[[], None] | None = None) -> None:
        self._loop = loop
        self._on_end = on_end
        self._training = training
        self._first = _snapshot(loop, training)
        self._changed = threading.Condition()
        self._state: RunState = "ready"
        self._pausing = False
        self._stopping = False
        self._steps_allowed = 0
        self._resetting = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.error_text: str | None = None
        self.samples = 0
        """Samples in the newest batch, 0 before the first."""

    @property
    def state(self) -> RunState:
        """``ready`` ``running`` ``paused`` ``stopped`` ``finished`` or ``failed``."""
        return self._state

    def start(self) -> None:
        """Start training from the present weights, or resume when paused.

        Raises
        ------
        RunError
            When it is running already.
        """
        with self._changed:
            if self._state == "paused":
                self._resume()
                return
            if self._state == "running":
                raise RunError("start: the run is running already; pause or stop it first")
            self._launch(steps_allowed=0, pausing=False)

    def pause(self) -> None:
        """Pause at the next boundary.

        Raises
        ------
        RunError
            When it is not running.
        """
        with self._changed:
            self._expect("pause", "running", "start it first")
            self._pausing = True

    def resume(self) -> None:
        """Go on after a pause.

        Raises
        ------
        RunError
            When it is not paused.
        """
        with self._changed:
            if self._state == "running" and self._pausing:
                self._pausing = False
                return
            self._expect("resume", "paused", "use start")
            self._resume()

    def single_step(self) -> None:
        """Train one step, then pause; starts the run when it is not."""
        with self._changed:
            if self._state == "running" and not self._pausing:
                raise RunError("single_step: the run is running; pause it first")
            if self._state in ALIVE:
                self._steps_allowed += 1
                self._changed.notify_all()
            else:
                self._launch(steps_allowed=1, pausing=True)

    def stop(self) -> None:
        """Stop at the next boundary; nothing happens when no run is alive."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def reset(self) -> None:
        """Put back the weights, the optimizers' and the scaler's state that the run was made with.

        While a run is alive it happens at the next boundary, on its thread. Steps and history go on counting.
        """
        with self._changed:
            if self._state in ALIVE:
                self._resetting = True
                self._changed.notify_all()
                return
        self._restore()

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
            On an interrupt, after the run was stopped.
        """
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            try:
                thread.join(timeout_s)
            except KeyboardInterrupt:
                self.stop()
                thread.join()
                raise
            if thread.is_alive():
                return False
        error, self._error = self._error, None
        if error is not None:
            raise error
        return True

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the thread has ended, whatever it raised; call `stop` before."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    # ---- on the training thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        loop = self._loop
        loop.own(threading.get_ident())
        ended: RunState = "finished"
        try:
            ended = self._train()
        except BaseException as error:  # the user's code may raise anything; it is kept for wait()
            ended = "failed"
            self.error_text = "".join(traceback.format_exception(error)).rstrip()
            self._error = _without_frames(error, self.error_text)
            del error
        finally:
            loop.abandon_step()
            loop.own(None)
            self._enter(ended)
            if self._on_end is not None:
                self._on_end()

    def _train(self) -> RunState:
        training = self._training
        device = self._loop.device
        for batch in self._all_batches():
            if not self._may_step():
                return "stopped"
            inputs, targets = _moved(batch, device)
            self.samples = _samples(inputs)
            self._one_step(training, inputs, targets)
        return "stopped" if self._stopping else "finished"

    def _one_step(self, training: Training, inputs: Any, targets: Any) -> None:
        loop = self._loop
        loop.begin_step()
        for optimizer in training.optimizers:
            optimizer.zero_grad()
        with loop.autocast():
            loss = training.loss_fn(training.model(inputs), targets)
        loop.scaler.scale(loss).backward()
        for optimizer in training.optimizers:
            loop.scaler.step(optimizer)
        loop.scaler.update()

    def _all_batches(self) -> Iterator[Any]:
        epoch = 0
        while self._training.epochs is None or epoch < self._training.epochs:
            count = 0
            for batch in self._training.batches:
                count += 1
                yield batch
            epoch += 1
            if count == 0:
                what = "no batch at all" if epoch == 1 else f"no batch in epoch {epoch}"
                raise RunError(
                    f"fit: got {what} from the data, expected (inputs, targets); an iterator can be used up only once: pass a "
                    "DataLoader or a list"
                )

    def _may_step(self) -> bool:
        """Whether to train a step now; waits here while paused. False when to stop."""
        while True:
            with self._changed:
                resetting, self._resetting = self._resetting, False
                if not resetting:
                    if self._stopping:
                        return False
                    if not self._pausing:
                        return True
                    if self._steps_allowed > 0:
                        self._steps_allowed -= 1
                        return True
            if resetting:
                self._restore()
                continue
            self._enter("paused")
            self._loop.apply_pending()  # between steps, on this thread: no need to let it wait for the resume
            with self._changed:
                if not (self._stopping or self._resetting or self._steps_allowed or not self._pausing):
                    self._changed.wait(_PAUSED_LOOK_S)  # a request does not notify: look now and then

    def _enter(self, state: RunState) -> None:
        with self._changed:
            if state == self._state:
                return
            self._state = state
        self._loop.record_event("run", _SENTENCES[state], state=state)

    # ---- with the lock held -----------------------------------------------------------------------------------------

    def _expect(self, verb: str, state: RunState, hint: str) -> None:
        if self._state != state:
            raise RunError(f"{verb}: the run is {self._state}, expected {state}; {hint}")

    def _resume(self) -> None:
        self._pausing = False
        self._state = "running"
        self._changed.notify_all()
        self._loop.record_event("run", "resumed", state="running")

    def _launch(self, *, steps_allowed: int, pausing: bool) -> None:
        if self._loop.closed:
            raise RunError("start: the session was closed; make a new AmpSession")
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()  # it has entered its last state and only has to return
        self._error = self.error_text = None
        self._stopping = False
        self._pausing = pausing
        self._steps_allowed = steps_allowed
        self._state = "running"
        self._loop.record_event("run", _SENTENCES["running"], state="running")
        self._thread = threading.Thread(target=self._run, name="amp_widgets training", daemon=True)
        _end_at_exit(self)
        self._thread.start()

    def _restore(self) -> None:
        _restore(self._loop, self._training, self._first)
        self._loop.record_event("run", "reset to the first weights", state="reset")


_PAUSED_LOOK_S = 0.05
_EXIT_S = 5.0

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


_SENTENCES: Mapping[str, str] = {
    "running": "started",
    "paused": "paused",
    "stopped": "stopped",
    "finished": "finished",
    "failed": "failed: an exception in the training loop",
}


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
        return type(value)(_on_cpu(item) for item in value)
    return copy.deepcopy(value)


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
    if isinstance(value, Mapping):
        return {key: _to(item, device) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_to(item, device) for item in value)
    return value


def _samples(inputs: Any) -> int:
    return len(inputs) if isinstance(inputs, torch.Tensor) and inputs.dim() > 0 else 0


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
