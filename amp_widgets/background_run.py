"""The background run of a session, and what the kernel has to do with it: the stop button, and widgets that work meanwhile."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import wait as futures_wait
from typing import Any

import torch

from amp_widgets import kernel
from amp_widgets.core.batches import BatchStream
from amp_widgets.core.loop import LiveLoop
from amp_widgets.core.run_state import ALIVE, RunState
from amp_widgets.errors import RunError, SessionClosedError
from amp_widgets.runner import Runner, Training, last_lines


class BackgroundRun:
    """The run that was prepared last, if any. A session that has none is not kept alive by this: it is passed to what needs it.

    Attributes
    ----------
    runner
        None before `prepare` and after `close`.
    pump
        Handles what widgets send while a cell is busy; None before `serve_busy_cells` and after `close`, and outside a kernel.
    """

    def __init__(self) -> None:
        self.runner: Runner | None = None
        self.pump: kernel.CommPump | None = None
        self._uninstall_interrupt: Callable[[], None] | None = None

    @property
    def state(self) -> RunState:
        """``none`` before `prepare`, then as `Runner.state`."""
        runner = self.runner
        return "none" if runner is None else runner.state

    @property
    def error_text(self) -> str | None:
        """The last lines of what ended the run, or None."""
        runner = self.runner
        return None if runner is None else last_lines(runner.error_text)

    @property
    def samples(self) -> int:
        """Samples in the newest batch, 0 where none is known."""
        runner = self.runner
        return 0 if runner is None else runner.samples

    # ---- the run ----------------------------------------------------------------------------------------------------

    def check_fit(self, loop: LiveLoop) -> None:
        """Raise why no run can be prepared now, if so."""
        if loop.model is None:
            raise SessionClosedError("fit: the session was closed; make a new AmpSession")
        if not loop.optimizers:
            raise RunError("fit: the session has no optimizer, expected AmpSession(model, optimizer)")
        if self.state in ALIVE:
            raise RunError(f"fit: a run is {self.state}; stop it first: session.stop(); session.wait()")

    def prepare(
        self,
        loop: LiveLoop,
        batches: Iterable[Any],
        loss_fn: Callable[[Any, Any], torch.Tensor],
        epochs: int | None,
        *,
        on_boundary: Callable[[], None],
        before_batch: Callable[[BatchStream], None],
    ) -> None:
        """As `amp_widgets.session.AmpSession.fit`, after `check_fit`; the last two as `Runner` takes them."""
        model = loop.model
        assert model is not None
        training = Training(model=model, optimizers=loop.optimizers, batches=batches, loss_fn=loss_fn, epochs=epochs)
        self.runner = Runner(loop, training, on_end=self._release_interrupt, on_boundary=on_boundary, before_batch=before_batch)

    def start(self, loop: LiveLoop) -> None:
        """Start it, or resume it when paused."""
        runner = self._prepared(loop, "start")
        self.refuse_beside_a_cell(loop, "start")
        runner.start()
        self._take_interrupts(runner)

    def pause(self, loop: LiveLoop) -> None:
        """Pause it at the next boundary."""
        self._prepared(loop, "pause").pause()

    def resume(self, loop: LiveLoop) -> None:
        """Go on after a pause."""
        self._prepared(loop, "resume").resume()

    def single_step(self, loop: LiveLoop) -> None:
        """Train one step, then pause."""
        runner = self._prepared(loop, "single_step")
        self.refuse_beside_a_cell(loop, "single_step")
        runner.single_step()
        self._take_interrupts(runner)

    def stop(self, loop: LiveLoop) -> None:
        """Stop it at the next boundary."""
        self._prepared(loop, "stop").stop()

    def reset(self, loop: LiveLoop) -> None:
        """Put back what it was made with."""
        runner = self._prepared(loop, "reset")
        self.refuse_beside_a_cell(loop, "reset")
        runner.reset()

    def wait(self, loop: LiveLoop, timeout_s: float | None) -> bool:
        """As `Runner.wait`, while widgets go on working."""
        runner = self._prepared(loop, "wait")
        pump = self._pump_here()
        if pump is None:
            return runner.wait(timeout_s)
        until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        try:
            while not runner.wait(max(0.0, min(_WAIT_S, until_s - time.monotonic()))):
                pump.pump()
                if time.monotonic() >= until_s:
                    return False
        except KeyboardInterrupt:
            runner.stop()
            runner.join()
            raise
        return True

    def wait_for(self, done: Future[Any], meanwhile: Callable[[], None]) -> None:
        """Wait for what a thread is doing, calling `meanwhile` now and then, while widgets go on working."""
        pump = self._pump_here()
        while not futures_wait([done], _WAIT_S).done:
            meanwhile()
            if pump is not None:
                pump.pump()

    def refuse_beside_a_cell(self, loop: LiveLoop, verb: str) -> None:
        """Raise a `RunError` while a loop of the user's own is training the model."""
        # two loops would train one model at once, or one would find its weights changed in mid-step
        if self.state not in ALIVE and (loop.at_boundary or loop.trained_elsewhere):
            raise RunError(f"{verb}: your own loop is training this model in a cell; wait for its end or interrupt it first")

    # ---- widgets, and the end ---------------------------------------------------------------------------------------

    def serve_busy_cells(self, loop: LiveLoop) -> None:
        """From now on widgets work in cells that train, at every boundary."""
        if self.pump is None and kernel.in_kernel():
            self.pump = kernel.CommPump()
            loop.on_boundary.append(self.pump.pump)

    def close(self) -> None:
        """Stop the run, and let go of it and of the kernel."""
        if self.runner is not None:
            self.runner.stop()
            self.runner.join()
            self.runner = None
        if self.pump is not None:
            self.pump.close()
            self.pump = None

    def _prepared(self, loop: LiveLoop, verb: str) -> Runner:
        if loop.closed:
            raise SessionClosedError(f"{verb}: the session was closed; make a new AmpSession")
        if self.runner is None:
            raise RunError(f"{verb}: there is no background run; prepare one with session.fit(dataloader, loss_fn)")
        return self.runner

    def _pump_here(self) -> kernel.CommPump | None:
        return self.pump if threading.current_thread() is threading.main_thread() else None

    def _take_interrupts(self, runner: Runner) -> None:
        # an idle kernel ignores the stop button: while a run is alive, the button means the run
        if self._uninstall_interrupt is None:
            self._uninstall_interrupt = kernel.on_interrupt(runner.stop)
        if runner.state not in ALIVE:  # it has ended meanwhile
            self._release_interrupt()

    def _release_interrupt(self) -> None:
        uninstall, self._uninstall_interrupt = self._uninstall_interrupt, None
        if uninstall is not None:
            uninstall()


_WAIT_S = 0.05
