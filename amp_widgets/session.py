"""`AmpSession`: what users hold. A live loop, and the conveniences that live above the core, each one delegation long."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as futures_wait
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import nn

from amp_widgets import kernel
from amp_widgets.analysis.batch_sizes import BatchSizes, largest_batch
from amp_widgets.analysis.compare import SLOW_STEP_S, compare
from amp_widgets.analysis.comparison import Comparison
from amp_widgets.analysis.comparisons import Compare, Comparisons, ComparisonStatus
from amp_widgets.analysis.corners import Grid, LayerChoice
from amp_widgets.analysis.cuda_corners import predict_corners_on_cuda
from amp_widgets.analysis.dtype_map import DtypeMap, dtype_map
from amp_widgets.analysis.gradients import GradientRange
from amp_widgets.analysis.inspections import TAKES_LONG, Inspection, InspectionKind, Inspections
from amp_widgets.analysis.on_cuda import CudaPredictions
from amp_widgets.analysis.overflow import diagnose, skip_runs, summarised
from amp_widgets.analysis.parity import ParityReport, check
from amp_widgets.analysis.plan import Plan
from amp_widgets.analysis.planner import plan
from amp_widgets.analysis.precision import PrecisionReport, precision_cost
from amp_widgets.analysis.preflight import Findings, preflight
from amp_widgets.analysis.profiled_step import LayerProfiles, ProfiledStep
from amp_widgets.analysis.progress_bar import ProgressBar
from amp_widgets.analysis.step_profile import profile_step
from amp_widgets.core.history import DEFAULT_CAPACITY
from amp_widgets.core.loop import LiveLoop
from amp_widgets.core.memory.profile import StepProfile
from amp_widgets.core.run_state import ALIVE, RunState
from amp_widgets.core.settings import describe_changes
from amp_widgets.errors import MissingExtraError, RecordingError, RunError, SessionClosedError, SettingsError
from amp_widgets.recording.environment import environment
from amp_widgets.recording.recorder import Recorder
from amp_widgets.runner import Runner, Training, last_lines
from amp_widgets.widgets.state import DashboardState

if TYPE_CHECKING:
    from amp_widgets.widgets.dashboard import Dashboard


class AmpSession(LiveLoop):
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

    Raises
    ------
    ModelError
        When the model has no parameters, or an optimizer has none of the model's.
    RecordingError
        When the file exists, or cannot be made.

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
    ) -> None:
        super().__init__(
            model, _as_tuple(optimizer), memory_every=memory_every, reset_peak=reset_peak, history_capacity=history_capacity
        )
        self.model_type = type(model).__name__
        self.release_later = kernel.when_shown
        self._runner: Runner | None = None
        self._inspections = Inspections()
        self._jobs: deque[Callable[[], None]] = deque()
        self._comparisons = Comparisons()
        self.check_changes = False
        """Whether a background run does a `check` by itself after each change of the checkpointed layers."""
        self._seen_checkpointed = self.settings.checkpointed
        self._last_scale = math.inf
        self._uninstall_interrupt: Callable[[], None] | None = None
        self._pump: kernel.CommPump | None = None
        self._recorder: Recorder | None = None
        _sessions.append(weakref.ref(self))
        if record is not None:
            try:
                self.record(record)
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
        from tqdm.auto import tqdm

        if self.run_state in ALIVE:
            raise RunError("steps: a background run is alive; stop it first: session.stop(); session.wait()")
        self._refuse_beside_a_comparison("steps")
        if epochs > 1 and isinstance(batches, Iterator):
            raise RunError(
                f"steps: got an iterator, which is used up after one epoch, and epochs={epochs}; pass a DataLoader or a list"
            )
        self.recover()
        try:
            with tqdm(total=_length(batches, epochs), unit="step") as bar:
                for _ in range(epochs):
                    for batch in batches:
                        yield batch
                        bar.update()
        finally:
            self.loop_ended()
            self.release_after_death()
            self.break_off_step()  # a last, incomplete accumulation may go on after the loop

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
            Yields ``(inputs, targets)``; moved to the model's device.
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
        if self._model is None:
            raise SessionClosedError("fit: the session was closed; make a new AmpSession")
        if not self._optimizers:
            raise RunError("fit: the session has no optimizer, expected AmpSession(model, optimizer)")
        if self.run_state in ALIVE:
            raise RunError(f"fit: a run is {self.run_state}; stop it first: session.stop(); session.wait()")
        self._refuse_beside_a_comparison("fit")
        training = Training(model=self._model, optimizers=self._optimizers, batches=batches, loss_fn=loss_fn, epochs=epochs)
        self._runner = Runner(self, training, on_end=self._release_interrupt, on_boundary=self._look_for_change)
        if start:
            self.start()

    def start(self) -> None:
        """Start the run that `fit` prepared, or resume it when paused; from the present weights."""
        runner = self._prepared("start")
        self._refuse_beside_a_cell("start")
        runner.start()
        self._take_interrupts(runner)

    def pause(self) -> None:
        """Pause the run at the next boundary."""
        self._prepared("pause").pause()

    def resume(self) -> None:
        """Go on after a pause."""
        self._prepared("resume").resume()

    def single_step(self) -> None:
        """Train one step, then pause."""
        runner = self._prepared("single_step")
        self._refuse_beside_a_cell("single_step")
        runner.single_step()
        self._take_interrupts(runner)

    def stop(self) -> None:
        """Stop the run at the next boundary."""
        self._prepared("stop").stop()

    def reset(self) -> None:
        """Put back the weights and optimizer state that the run was made with; at the next boundary when it is alive."""
        runner = self._prepared("reset")
        self._refuse_beside_a_cell("reset")
        runner.reset()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the run to end; raise what the training raised. Returns whether it has ended.

        Widgets go on working meanwhile. An interrupt stops the run.
        """
        runner = self._prepared("wait")
        if self._pump is None or threading.current_thread() is not threading.main_thread():
            return runner.wait(timeout_s)
        until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        try:
            while not runner.wait(max(0.0, min(_WAIT_S, until_s - time.monotonic()))):
                self._pump.pump()
                if time.monotonic() >= until_s:
                    return False
        except KeyboardInterrupt:
            runner.stop()
            runner.join()
            raise
        return True

    @property
    def run_state(self) -> RunState:
        """``none`` before `fit`, then ``ready`` ``running`` ``paused`` ``stopped`` ``finished`` or ``failed``."""
        return "none" if self._runner is None else self._runner.state

    # ---- memory within a step ---------------------------------------------------------------------------------------

    def profile_step(
        self, batch: tuple[Any, Any], loss_fn: Callable[[Any, Any], torch.Tensor], *, label: str | None = None
    ) -> ProfiledStep:
        """Where the memory goes in one step on `batch`, by kind and by layer; everything is as before afterwards.

        See `amp_widgets.analysis.step_profile.profile_step`. For a step of the run itself: `profile_next_step`, `profiles`.
        """
        if self.run_state == "running":
            raise RunError("profile_step: a background run is training; pause it first: session.pause()")
        return profile_step(self, batch, loss_fn, label=label)

    def layer_profile(
        self,
        batch: tuple[Any, Any] | None = None,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        *,
        layers: str = "**",
    ) -> LayerProfiles:
        """What each layer holds and takes in a step, and about what checkpointing it would save and cost.

        Parameters
        ----------
        batch, loss_fn
            As in `profile_step`. Without them, the newest profiled step of the run.
        layers
            A name or glob.

        Raises
        ------
        LayerError
            When no layer matches.
        RunError
            As in `profile_step`, and without a batch when no step of the run was profiled.
        """
        if batch is not None and loss_fn is not None:
            return LayerProfiles.of(self.profile_step(batch, loss_fn), layers)
        if batch is not None or loss_fn is not None:
            missing = "batch" if batch is None else "loss_fn"
            raise RunError(f"layer_profile: got no {missing}, expected layer_profile(batch, loss_fn), or none of both")
        if not self.profiles:
            raise RunError(
                "layer_profile: no step was profiled yet; call session.profile_next_step() and train one, or pass a batch"
            )
        return LayerProfiles.of(self.profiles[-1], layers)

    @property
    def profiles(self) -> tuple[ProfiledStep, ...]:
        """Of the steps that were profiled, the newest last, at most `amp_widgets.core.step_memory.PROFILES_KEPT`."""
        return tuple(map(ProfiledStep.of, super().profiles))

    def keep_profile(self, profile: StepProfile) -> None:
        """Put it among `profiles`, with a picture."""
        super().keep_profile(ProfiledStep.of(profile))

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
        if self._recorder is not None:
            raise RecordingError(
                f"record: the run is being recorded to {self._recorder.path}; session.stop_recording() ends that"
            )
        facts = {
            "model": self.model_type,
            "device": _device_name(self.device),
            "memory_source": self.memory_source,
            "cuda": torch.version.cuda,
            **environment(),
        }
        self._recorder = Recorder(path, self, facts=facts)

    def stop_recording(self) -> None:
        """Write what is left, and let go of the file."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.close()

    @property
    def recorded_to(self) -> Path | None:
        """The file that the run is being written to, or None."""
        return None if self._recorder is None else self._recorder.path

    def note(self, text: str) -> None:
        """Put a note of yours among the events, at the present step."""
        self.record_event("note", text, source="user")

    # ---- are the numbers still right --------------------------------------------------------------------------------

    def check(self, batch: tuple[Any, Any], loss_fn: Callable[[Any, Any], torch.Tensor]) -> ParityReport:
        """Whether loss, gradients, buffers and random states are those without checkpointing, and how far autocast is from fp32.

        Nothing is trained; everything is as before afterwards. See `amp_widgets.analysis.parity.check`.
        """
        report = check(self, batch, loss_fn)
        self._inspections.keep("check", report, self.step)
        return report

    def precision_cost(
        self,
        batch: tuple[Any, Any],
        loss_fn: Callable[[Any, Any], torch.Tensor],
        *,
        formats: Sequence[str] = ("fp16", "bf16"),
        reference: Literal["fp32", "fp64"] = "fp32",
    ) -> PrecisionReport:
        """The relative error of each layer's outputs and gradients in these formats, worst first.

        Everything is as before afterwards. See `amp_widgets.analysis.precision.precision_cost`.
        """
        report = precision_cost(self, batch, loss_fn, formats=formats, reference=reference)
        self._inspections.keep("precision" if reference == "fp32" else "precision_fp64", report, self.step)
        return report

    def dtype_map(self, batch: tuple[Any, Any], loss_fn: Callable[[Any, Any], torch.Tensor]) -> DtypeMap:
        """Which format each operator takes, computes in and gives, which casts autocast inserts, and why.

        Everything is as before afterwards. See `amp_widgets.analysis.dtype_map.dtype_map`.
        """
        taken = dtype_map(self, batch, loss_fn)
        self._inspections.keep("dtype_map", taken, self.step)
        return taken

    def preflight(
        self, batch: tuple[Any, Any] | None = None, loss_fn: Callable[[Any, Any], torch.Tensor] | None = None
    ) -> Findings:
        """What will go wrong, or may, with mixed precision and checkpointing of this model, also on a GPU; and the cures.

        With a batch, one forward pass is watched, too. See `amp_widgets.analysis.preflight.preflight`.
        """
        found = preflight(self, batch, loss_fn)
        self._inspections.keep("preflight", found, self.step)
        return found

    def inspect(self, kind: InspectionKind, **options: Any) -> None:
        """Ask for one on the newest batch of the background run, from any thread; the result is in `inspection`.

        While a run is alive, or a loop of your own trains on another thread, it is made at the next boundary, on the thread that
        trains; else at once, on the calling one, or what takes long on a thread of its own, and no run can be started meanwhile.

        Parameters
        ----------
        kind
            ``"dtype_map"``, ``"check"``, ``"preflight"``, ``"precision"`` or, against fp64, ``"precision_fp64"``; and, what
            takes long, ``"plan"``, ``"largest_batch"`` and ``"predict_on_cuda"``.
        options
            What the method of that name takes beside the batch and the loss.

        Raises
        ------
        SettingsError
            When there is no such kind.
        RunError
            When there is no batch to do it on; a preflight goes without. And when what takes long cannot begin, because a loop
            of your own is training.
        SessionClosedError
            After `close`.
        """
        self._check_open("inspect")
        kinds = get_args(InspectionKind)
        if kind not in kinds:
            raise SettingsError(f"inspect: got {kind!r}, expected one of {', '.join(map(repr, kinds))}")
        why_no_batch = self.why_no_plan if kind in TAKES_LONG else self.why_no_batch
        if kind != "preflight" and why_no_batch is not None:
            raise RunError(f"{kind}: {why_no_batch}")
        runner = self._runner
        job = functools.partial(self._inspect_now, runner, kind)
        if kind not in TAKES_LONG or runner is None:
            if self._inspections.ask(kind, **options):
                self.between_steps(job)
            return
        self._refuse_beside_a_cell(kind)
        if self._inspections.ask(kind, **options):
            runner.between_steps(job, takes_long=True)

    def cancel_inspection(self, kind: InspectionKind) -> None:
        """End one that takes long as soon as can be, from any thread; nothing happens where there is none."""
        self._inspections.cancel(kind)

    def inspection(self, kind: InspectionKind) -> Inspection:
        """How that stands: the newest result, also of the methods above, or why there is none."""
        return self._inspections.of(kind)

    def between_steps(self, job: Callable[[], None]) -> None:
        """Call it when no step is in progress: now, or where a loop is training, at its next boundary on its thread.

        It must raise nothing, and be quick.
        """
        runner = self._runner
        if (runner is None or runner.state not in ALIVE) and self.trained_elsewhere:
            self._jobs.append(job)
            if self._do_jobs not in self.on_boundary:
                self.on_boundary.append(self._do_jobs)
        elif runner is not None:
            runner.between_steps(job)
        else:
            job()

    @property
    def why_no_batch(self) -> str | None:
        """Why `inspect` has no batch to work on; None when it has one."""
        return self._why_no_batch("dtype_map", "check")

    def gradient_range(self, *, wait: bool = True) -> GradientRange | None:
        """How large the gradients of the newest counted step are, and what another loss scale would make of them.

        Parameters
        ----------
        wait
            Wait for the device, if the numbers have not arrived; False takes the newest that have.

        Returns
        -------
        GradientRange or None
            None when no step was counted yet: see `count_gradients`.
        """
        counts = self.numerics.gradients.newest(wait=wait)
        return None if counts is None else GradientRange.of(counts)

    def count_gradients(self, every: int | None = None) -> None:
        """Count the sizes of the gradients in steps to come: see `gradient_range`.

        A step that is counted takes some half longer on a CPU; with ``every=10`` that is 3 to 6 percent of the time.
        The other steps cost nothing, and none is changed. ``tests/benchmarks/numerics.py`` prints what it costs.

        Parameters
        ----------
        every
            None: in the step that begins next. Else in every so many-th step; 0: in none.

        Raises
        ------
        SettingsError
            When `every` is no whole number of steps.
        SessionClosedError
            After `close`.
        """
        self._check_open("count_gradients")
        if every is None:
            self.numerics.gradients.count_next_step()
        elif type(every) is int and every >= 0:
            self.numerics.gradients.every = every
        else:
            raise SettingsError(
                f"every: got {every!r}, expected a whole number of steps, 0 for none, or None; call count_gradients() for the "
                "next step, and count_gradients(every=10) for every tenth"
            )

    def skip_report(self) -> tuple[str, ...]:
        """Why steps were skipped, skips that belong together told together, and what is wrong with how the loss scale behaves.

        Returns
        -------
        tuple of str
            Sentences, the skips first, oldest first; empty when no step was skipped and nothing is wrong.
        """
        history, overflow = self.history, self.numerics.overflow
        ranges = tuple(map(GradientRange.of, self.numerics.gradients.counts))
        runs = summarised(skip_runs(history, overflow.notes, ranges))
        wrong = diagnose(history, overflow.notes, overflow.refused, ranges)
        return (*(f"{run.sentence}." for run in runs), *(f"{one.sentence}. {one.cause}." for one in wrong))

    # ---- from a budget to a decision --------------------------------------------------------------------------------

    def plan(self, *, budget_bytes: float, batch: tuple[Any, Any], loss_fn: Callable[[Any, Any], torch.Tensor]) -> Plan:
        """Which layers to checkpoint so that a step stays within a budget, at least extra time: `request(checkpointed=plan)`.

        Everything is as before afterwards. See `amp_widgets.analysis.planner.plan`.
        """
        made = plan(self, budget_bytes=budget_bytes, batch=batch, loss_fn=loss_fn)
        self._inspections.keep("plan", made, self.step)
        return made

    def largest_batch(
        self,
        *,
        batch: tuple[Any, Any],
        loss_fn: Callable[[Any, Any], torch.Tensor],
        budget_bytes: float | None = None,
        grid: Grid | None = None,
        planned: LayerChoice | None = None,
        confirm: bool = False,
    ) -> BatchSizes:
        """The largest batch that fits a budget with each of several settings: predicted, and with `confirm` really run.

        Everything is as before afterwards. See `amp_widgets.analysis.batch_sizes.largest_batch`; `planned` is by default the
        newest plan, if there is one.
        """
        found = largest_batch(
            self, batch, loss_fn, budget_bytes=budget_bytes, grid=grid, planned=planned or self._newest_plan, confirm=confirm
        )
        self._inspections.keep("largest_batch", found, self.step)
        return found

    def predict_on_cuda(
        self,
        batch: tuple[Any, Any],
        loss_fn: Callable[[Any, Any], torch.Tensor],
        *,
        grid: Grid | None = None,
        planned: LayerChoice | None = None,
        batch_size: int | None = None,
    ) -> CudaPredictions:
        """What a step with each of several settings would need on a GPU, predicted on a machine without one.

        Everything is as before afterwards. See `amp_widgets.analysis.cuda_corners.predict_corners_on_cuda`; `planned` is by
        default the newest plan, if there is one.
        """
        found = predict_corners_on_cuda(
            self, batch, loss_fn, grid=grid, planned=planned or self._newest_plan, batch_size=batch_size
        )
        self._inspections.keep("predict_on_cuda", found, self.step)
        return found

    @property
    def why_no_plan(self) -> str | None:
        """Why `inspect` has no batch to plan on; None when it has one."""
        return self._why_no_batch("plan(budget_bytes=8e9, batch=batch, loss_fn=loss_fn)")

    @property
    def _newest_plan(self) -> Plan | None:
        newest = self._inspections.of("plan").result
        return newest if isinstance(newest, Plan) else None

    # ---- which settings are worth it --------------------------------------------------------------------------------

    def compare(
        self,
        batch: tuple[Any, Any],
        loss_fn: Callable[[Any, Any], torch.Tensor],
        *,
        grid: Grid | None = None,
        steps: int = 5,
        rounds: int = 3,
        planned: LayerChoice | None = None,
        slow_step_s: float = SLOW_STEP_S,
    ) -> Comparison:
        """Memory, time, loss and gradients with each of several settings, measured in turn from the same start, with a bar.

        Everything is as before afterwards, also after an interrupt. A background run does it on its thread, at its next boundary,
        and goes on. See `amp_widgets.analysis.compare.compare`; `planned` is the newest plan where none is given.

        Raises
        ------
        RunError
            Also while another comparison is being made.
        SessionClosedError
            After `close`.
        """
        self._check_open("compare")
        planned = planned or self._newest_plan
        make = functools.partial(
            compare, self, batch, loss_fn, grid=grid, steps=steps, rounds=rounds, planned=planned, slow_step_s=slow_step_s
        )
        runner = self._runner
        with ProgressBar() as bar:
            if not self._comparisons.ask():
                raise RunError("compare: settings are being compared already; wait for the end, or session.cancel_comparison()")
            if runner is None or runner.is_here:
                return self._comparisons.carry_out(make, self.step, on_progress=bar.show)
            return self._compared_by(runner, make, bar)

    @property
    def why_no_comparison(self) -> str | None:
        """Why `compare_on_newest` has no batch to work on; None when it has one."""
        return self._why_no_batch("compare")

    def compare_on_newest(self, *, grid: Grid | None = None, steps: int = 5, rounds: int = 3) -> None:
        """Ask for a comparison on the newest batch of the background run, from any thread; see `comparison`.

        While a run is alive it is made at the run's next boundary, on its thread; else at once, on a thread of its own, and
        no run can be started meanwhile. Nothing happens while another is being made.

        Raises
        ------
        RunError
            When there is no batch, or a loop of the user's own is training.
        SessionClosedError
            After `close`.
        """
        self._check_open("compare")
        runner = self._runner
        if runner is None or self.why_no_comparison is not None:
            raise RunError(f"compare: {self.why_no_comparison}")
        self._refuse_beside_a_cell("compare")
        if self._comparisons.ask():
            job = functools.partial(self._compare_newest, runner, grid=grid, steps=steps, rounds=rounds)
            runner.between_steps(job, takes_long=True)

    def cancel_comparison(self) -> None:
        """End the comparison that is being made at its next step, from any thread; what is complete of it is kept."""
        self._comparisons.cancel()

    @property
    def comparison(self) -> ComparisonStatus:
        """How the comparisons stand: the newest result, how far the one is that is being made, or why there is none."""
        return self._comparisons.status

    # ---- the dashboard ----------------------------------------------------------------------------------------------

    def dashboard(self) -> Dashboard:
        """A view of this session, to be displayed; there may be any number of them.

        Raises
        ------
        MissingExtraError
            When ipywidgets, anywidget or plotly is not installed.
        """
        try:
            from amp_widgets.widgets.dashboard import Dashboard
        except ImportError as error:
            raise MissingExtraError(
                f"dashboard: {error}; install the widgets with: pip install 'amp-widgets[notebook]'"
            ) from error

        self._serve_busy_cells()
        self.profile_changes = True
        dashboard = Dashboard(self)
        for widget in dashboard.widgets():
            kernel.answer_where_asked(widget.comm)
        return dashboard

    def dashboard_state(self) -> DashboardState:
        """Everything that a view shows, as one snapshot; never waits for the device."""
        if self._jobs and not self.trained_elsewhere:
            self._do_jobs()
        status = self.status()
        pending = self.pending
        runner = self._runner
        samples_per_s = runner.samples * status.steps_per_s if runner is not None and runner.samples else math.nan
        return DashboardState(
            settings=self.settings,
            pending=None if pending is None else pending.changes,
            layers=self.layers_seen,
            support=self.support,
            run=self.run_state,
            in_cell=self.in_cell,
            step=status.step,
            device=_device_name(self.device),
            torch_version=torch.__version__,
            scale=status.scale,
            last_rejection=status.last_rejection,
            error=None if runner is None else last_lines(runner.error_text),
            step_s=status.step_s,
            steps_per_s=status.steps_per_s,
            samples_per_s=samples_per_s,
            loss=status.loss,
            skipped_steps=status.skipped_steps,
            memory_source=self.memory_source,
            allocated_bytes=status.allocated_bytes,
            peak_bytes=status.peak_bytes,
            overall_peak_bytes=status.overall_peak_bytes,
            notes=self._notes(),
        )

    # ---- life -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop a run, and let go of the model, which is as it was; history and a plain scaler remain."""
        self.cancel_comparison()
        if self._runner is not None:
            self._runner.stop()
            self._runner.join()
            self._runner = None
        self._inspections.forget_model()
        if self._pump is not None:
            self._pump.close()
            self._pump = None
        super().close()
        self._do_jobs()  # to no effect but that they say so
        self.stop_recording()
        self._last_scale = self.scaler.get_scale()

    def __enter__(self) -> AmpSession:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.settings.autocast}, step {self._step}"
        return f"<AmpSession of {self.model_type} on {self.device}: {state}>"

    # ---- private ----------------------------------------------------------------------------------------------------

    def _prepared(self, verb: str) -> Runner:
        if self.closed:
            raise SessionClosedError(f"{verb}: the session was closed; make a new AmpSession")
        if self._runner is None:
            raise RunError(f"{verb}: there is no background run; prepare one with session.fit(dataloader, loss_fn)")
        return self._runner

    def _inspect_now(self, runner: Runner | None, kind: InspectionKind) -> None:
        if runner is None:
            self._inspections.carry_out(kind, self, None, None)
        else:
            self._inspections.carry_out(kind, self, runner.newest_batch, runner.loss_fn, stopping=lambda: runner.stopping)

    def _do_jobs(self) -> None:
        """What waits for a boundary; where the loop has ended before it, as soon as that is noticed."""
        with contextlib.suppress(IndexError):  # another thread does them too
            while True:
                self._jobs.popleft()()

    def _why_no_batch(self, *methods: str) -> str | None:
        """The methods can be called with a batch."""
        if self._runner is None:
            calls = " or ".join(f"session.{name if '(' in name else f'{name}(batch, loss_fn)'}" for name in methods)
            if self.in_cell:
                return (
                    "there is no batch to work on, as the loop in the cell keeps its batches to itself; when the cell is over, "
                    f"make a session of the model, session = aw.AmpSession(model, optimizer), and call {calls}"
                )
            return (
                f"there is no batch to work on, as a loop of your own keeps its batches to itself; call {calls} in a cell, and "
                "the result is shown here"
            )
        return "there is no batch to work on yet; start the run first" if self._runner.newest_batch is None else None

    def _compare_newest(self, runner: Runner, **chosen: Any) -> None:
        make = functools.partial(compare, self, runner.newest_batch, runner.loss_fn, planned=self._newest_plan, **chosen)
        with contextlib.suppress(Exception):  # it is kept as why there is none
            self._comparisons.carry_out(make, self.step, stopping=lambda: runner.stopping)

    def _compared_by(self, runner: Runner, make: Compare, bar: ProgressBar) -> Comparison:
        """Have a runner compare, and wait for it, while widgets go on working."""
        self.settle_step()  # of a cell that is over: only this thread can
        done: Future[Comparison] = Future()

        def job() -> None:
            try:
                done.set_result(self._comparisons.carry_out(make, self.step, stopping=lambda: runner.stopping))
            except BaseException as error:  # raised where it was asked for
                done.set_exception(error)

        runner.between_steps(job, takes_long=True)
        pump = self._pump if threading.current_thread() is threading.main_thread() else None
        try:
            while not futures_wait([done], _WAIT_S).done:
                bar.show(self.comparison.progress)
                if pump is not None:
                    pump.pump()
        except KeyboardInterrupt:
            self.cancel_comparison()
            futures_wait([done])
            raise
        return done.result()

    def _refuse_beside_a_comparison(self, verb: str) -> None:
        if self.comparison.pending:
            raise RunError(f"{verb}: settings are being compared on this model; wait for the end, or session.cancel_comparison()")
        if self._inspections.busy:
            raise RunError(f"{verb}: steps of this model are being predicted (see Plan); wait for the end")

    def _look_for_change(self) -> None:
        """At a boundary of the run, on its thread."""
        checkpointed = self.settings.checkpointed
        if checkpointed == self._seen_checkpointed:
            return  # hot
        self._seen_checkpointed = checkpointed
        if self.check_changes:
            self.inspect("check")

    def _refuse_beside_a_cell(self, verb: str) -> None:
        # two loops would train one model at once, or one would find its weights changed in mid-step
        if self.run_state not in ALIVE and (self.at_boundary or self.trained_elsewhere):
            raise RunError(f"{verb}: your own loop is training this model in a cell; wait for its end or interrupt it first")

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

    def _serve_busy_cells(self) -> None:
        if self._pump is None and kernel.in_kernel():
            self._pump = kernel.CommPump()
            self.on_boundary.append(self._pump.pump)

    def _notes(self) -> tuple[str, ...]:
        notes = []
        if self.closed:
            notes.append(f"This session is closed and no longer controls the model: {self.go_on} to have it live.")
        if self.compiled:
            notes.append(
                "The model is compiled: changing checkpointed layers or autocast compiles it anew at the next step, and live "
                "tensor bytes on a CPU are not counted."
            )
        gap = self.memory_gap
        if gap is not None:
            notes.append(f"The memory of the last step was not measured: {gap}.")
        if self.budget_gap is not None:
            notes.append(self.budget_gap)
        if self._recorder is not None and self._recorder.notice is not None:
            notes.append(self._recorder.notice)
        if self._pump is not None and self._pump.why_not:
            notes.append(self._pump.why_not)
        if self.comparison.progress is not None:
            notes.append("Settings are being compared (see Compare): training waits for that.")
        if self._inspections.busy and self.run_state == "running":
            notes.append("Steps are being predicted (see Plan): training waits for that.")
        notes += [f"From step {request.at_step} on: {describe_changes(request.changes)}." for request in self.scheduled]
        notes += [said for remark in tuple(self.remarks) if (said := remark())]
        return tuple(notes)


_WAIT_S = 0.05

_sessions: list[weakref.ref[AmpSession]] = []


def newest_session() -> AmpSession | None:
    """The session made last of those that are still there and open."""
    alive = [(reference, reference()) for reference in _sessions]
    _sessions[:] = [reference for reference, session in alive if session is not None and not session.closed]
    return _sessions[-1]() if _sessions else None


def _length(batches: Iterable[Any], epochs: int) -> int | None:
    try:
        return len(batches) * epochs  # type: ignore[arg-type]  # asked, not assumed
    except TypeError:  # a generator, or a DataLoader over an IterableDataset
        return None


def _as_tuple(optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None) -> tuple[torch.optim.Optimizer, ...]:
    if optimizer is None:
        return ()
    if isinstance(optimizer, (list, tuple)):
        return tuple(optimizer)
    return (optimizer,)  # type: ignore[return-value]  # checked by the loop, with a message


@functools.cache
def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return str(device)
