"""What a session finds out on demand: inspections and comparisons, on the right thread, between two steps, one at a time."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as futures_wait
from typing import Any, TypeVar, get_args

import torch

from amp_widgets.analysis.compare import compare
from amp_widgets.analysis.comparison import Comparison
from amp_widgets.analysis.comparisons import Compare, Comparisons
from amp_widgets.analysis.corners import LayerChoice
from amp_widgets.analysis.inspections import TAKES_LONG, InspectionKind, Inspections, Result
from amp_widgets.analysis.plan import Plan
from amp_widgets.analysis.profiled_step import LayerProfiles, ProfiledStep
from amp_widgets.analysis.progress_bar import ProgressBar
from amp_widgets.analysis.step_profile import profile_step
from amp_widgets.background_run import BackgroundRun
from amp_widgets.core.loop import LiveLoop
from amp_widgets.core.run_state import ALIVE
from amp_widgets.errors import RunError, SettingsError
from amp_widgets.language import Said
from amp_widgets.runner import Runner

_Batch = tuple[Any, Any]
_LossFn = Callable[[Any, Any], torch.Tensor]
_R = TypeVar("_R", bound=Result)


class OnDemand:
    """Knows the background run, the inspections and the comparisons of one session, and keeps them out of each other's way.

    The methods do what those of the same name of `amp_widgets.session.AmpSession` say, which is passed as `loop`, and not kept.

    Parameters
    ----------
    background
        The session's; with it, work on its newest batch is done on its thread.

    Attributes
    ----------
    inspections, comparisons
        How each stands.
    check_changes
        Whether a background run does a ``"check"`` after each change of the checkpointed layers.
    """

    def __init__(self, background: BackgroundRun) -> None:
        self.inspections = Inspections()
        self.comparisons = Comparisons()
        self.check_changes = False
        self._background = background
        self._jobs: deque[Callable[[], None]] = deque()  # for the boundary of a loop of the user's own
        self._seen_checkpointed: tuple[str, ...] = ()

    # ---- inspections ------------------------------------------------------------------------------------------------

    def keep(self, kind: InspectionKind, result: _R, step: int) -> _R:
        """This is the newest of its kind, made when so many steps were complete. Returns it."""
        self.inspections.keep(kind, result, step)
        return result

    def planned(self, choice: LayerChoice | None) -> LayerChoice | None:
        """This choice of layers, or else the newest plan, if there is one."""
        newest = self.inspections.of("plan").result
        return choice or (newest if isinstance(newest, Plan) else None)

    def inspect(self, loop: LiveLoop, kind: InspectionKind, options: Mapping[str, Any]) -> None:
        """Ask for one on the newest batch of the background run, from any thread."""
        kinds = get_args(InspectionKind)
        if kind not in kinds:
            raise SettingsError(f"inspect: got {kind!r}, expected one of {', '.join(map(repr, kinds))}")
        why_no_batch = self.why_no_plan(loop) if kind in TAKES_LONG else self.why_no_batch(loop)
        if kind != "preflight" and why_no_batch is not None:
            raise RunError(f"{kind}: {why_no_batch}")
        runner = self._background.runner
        job = functools.partial(self._inspect_now, loop, runner, kind)
        if kind not in TAKES_LONG or runner is None:
            if self.inspections.ask(kind, **options):
                self.between_steps(loop, job)
            return
        self._background.refuse_beside_a_cell(loop, kind)
        if self.inspections.ask(kind, **options):
            runner.between_steps(job, takes_long=True)

    def look_for_change(self, loop: LiveLoop) -> None:
        """At a boundary of the background run, on its thread: where other layers are checkpointed now, they may be checked."""
        checkpointed = loop.settings.checkpointed
        if checkpointed == self._seen_checkpointed:
            return  # hot
        self._seen_checkpointed = checkpointed
        if self.check_changes:
            self.inspect(loop, "check", {})

    def profile_step(self, loop: LiveLoop, batch: _Batch, loss_fn: _LossFn, label: str | None = None) -> ProfiledStep:
        """Where the memory goes in one step on `batch`."""
        if self._background.state == "running":
            raise RunError("profile_step: a background run is training; pause it first: session.pause()")
        return profile_step(loop, batch, loss_fn, label=Said(label) if isinstance(label, str) else label)

    def layer_profile(self, loop: LiveLoop, batch: _Batch | None, loss_fn: _LossFn | None, layers: str) -> LayerProfiles:
        """What each layer holds and takes, in a step on `batch` or in the newest profiled one of the run."""
        if batch is not None and loss_fn is not None:
            return LayerProfiles.of(self.profile_step(loop, batch, loss_fn), layers)
        if batch is not None or loss_fn is not None:
            missing = "batch" if batch is None else "loss_fn"
            raise RunError(f"layer_profile: got no {missing}, expected layer_profile(batch, loss_fn), or none of both")
        if not loop.profiles:
            raise RunError(
                "layer_profile: no step was profiled yet; call session.profile_next_step() and train one, or pass a batch"
            )
        return LayerProfiles.of(loop.profiles[-1], layers)

    # ---- comparisons ------------------------------------------------------------------------------------------------

    def compare(self, loop: LiveLoop, batch: _Batch, loss_fn: _LossFn, **chosen: Any) -> Comparison:
        """Compare settings now, with a bar; beside a background run on its thread, at its next boundary."""
        make = functools.partial(compare, loop, batch, loss_fn, **chosen)
        runner = self._background.runner
        with ProgressBar() as bar:
            if not self.comparisons.ask():
                raise RunError("compare: settings are being compared already; wait for the end, or session.cancel_comparison()")
            if runner is None or runner.is_here:
                return self.comparisons.carry_out(make, loop.step, on_progress=bar.show)
            return self._compared_by(loop, runner, make, bar)

    def compare_on_newest(self, loop: LiveLoop, **chosen: Any) -> None:
        """Ask for a comparison on the newest batch of the background run, from any thread."""
        runner = self._background.runner
        why_not = self.why_no_comparison(loop)
        if runner is None or why_not is not None:
            raise RunError(f"compare: {why_not}")
        self._background.refuse_beside_a_cell(loop, "compare")
        if self.comparisons.ask():
            runner.between_steps(functools.partial(self._compare_newest, loop, runner, chosen), takes_long=True)

    # ---- when, and on what ------------------------------------------------------------------------------------------

    def between_steps(self, loop: LiveLoop, job: Callable[[], None]) -> None:
        """Call it when no step is in progress."""
        runner = self._background.runner
        if (runner is None or runner.state not in ALIVE) and loop.trained_elsewhere:
            self._jobs.append(job)
            if self.do_jobs not in loop.on_boundary:
                loop.on_boundary.append(self.do_jobs)
        elif runner is not None:
            runner.between_steps(job)
        else:
            job()

    def do_jobs(self) -> None:
        """What waits for a boundary of the user's loop."""
        with contextlib.suppress(IndexError):  # another thread does them too
            while True:
                self._jobs.popleft()()

    def do_left_jobs(self, loop: LiveLoop) -> None:
        """What waits for a boundary of a loop that has ended before it."""
        if self._jobs and not loop.trained_elsewhere:
            self.do_jobs()

    def why_no_batch(self, loop: LiveLoop) -> str | None:
        """Why there is no batch for what is quick; None when there is one."""
        return self._why_no_batch(loop, "dtype_map", "check")

    def why_no_plan(self, loop: LiveLoop) -> str | None:
        """Why there is no batch for what takes long."""
        return self._why_no_batch(loop, "plan(budget_bytes=8e9, batch=batch, loss_fn=loss_fn)")

    def why_no_comparison(self, loop: LiveLoop) -> str | None:
        """Why there is no batch to compare on."""
        return self._why_no_batch(loop, "compare")

    def refuse_beside(self, verb: str) -> None:
        """Raise a `RunError` while the model is lent to what takes long."""
        if self.comparisons.status.pending:
            raise RunError(f"{verb}: settings are being compared on this model; wait for the end, or session.cancel_comparison()")
        if self.inspections.busy:
            raise RunError(f"{verb}: steps of this model are being predicted (see Plan); wait for the end")

    # ---- private ----------------------------------------------------------------------------------------------------

    def _inspect_now(self, loop: LiveLoop, runner: Runner | None, kind: InspectionKind) -> None:
        if runner is None:
            self.inspections.carry_out(kind, loop, None, None)
        else:
            self.inspections.carry_out(kind, loop, runner.newest_batch, runner.loss_fn, stopping=lambda: runner.stopping)

    def _compare_newest(self, loop: LiveLoop, runner: Runner, chosen: Mapping[str, Any]) -> None:
        make = functools.partial(compare, loop, runner.newest_batch, runner.loss_fn, planned=self.planned(None), **chosen)
        with contextlib.suppress(Exception):  # it is kept as why there is none
            self.comparisons.carry_out(make, loop.step, stopping=lambda: runner.stopping)

    def _compared_by(self, loop: LiveLoop, runner: Runner, make: Compare, bar: ProgressBar) -> Comparison:
        """Have a runner compare, and wait for it."""
        loop.settle_step()  # of a cell that is over: only this thread can
        done: Future[Comparison] = Future()

        def job() -> None:
            try:
                done.set_result(self.comparisons.carry_out(make, loop.step, stopping=lambda: runner.stopping))
            except BaseException as error:  # raised where it was asked for
                done.set_exception(error)

        runner.between_steps(job, takes_long=True)
        try:
            self._background.wait_for(done, lambda: bar.show(self.comparisons.status.progress))
        except KeyboardInterrupt:
            self.comparisons.cancel()
            futures_wait([done])
            raise
        return done.result()

    def _why_no_batch(self, loop: LiveLoop, *methods: str) -> str | None:
        """The methods can be called with a batch."""
        runner = self._background.runner
        if runner is None:
            calls = " or ".join(f"session.{name if '(' in name else f'{name}(batch, loss_fn)'}" for name in methods)
            if loop.in_cell:
                return (
                    "there is no batch to work on, as the loop in the cell keeps its batches to itself; when the cell is over, "
                    f"make a session of the model, session = aw.AmpSession(model, optimizer), and call {calls}"
                )
            return (
                f"there is no batch to work on, as a loop of your own keeps its batches to itself; call {calls} in a cell, and "
                "the result is shown here"
            )
        return "there is no batch to work on yet; start the run first" if runner.newest_batch is None else None
