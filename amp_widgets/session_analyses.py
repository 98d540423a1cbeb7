"""The methods of a session that find something out about its model; each is one delegation long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from amp_widgets.analysis.batch_sizes import BatchSizes, largest_batch
from amp_widgets.analysis.compare import SLOW_STEP_S
from amp_widgets.analysis.comparison import Comparison
from amp_widgets.analysis.comparisons import ComparisonStatus
from amp_widgets.analysis.corners import Grid, LayerChoice
from amp_widgets.analysis.cuda_corners import predict_corners_on_cuda
from amp_widgets.analysis.dtype_map import DtypeMap, dtype_map
from amp_widgets.analysis.gradient_watch import count_gradients, gradient_range, skip_report
from amp_widgets.analysis.gradients import GradientRange
from amp_widgets.analysis.inspections import Inspection, InspectionKind
from amp_widgets.analysis.on_cuda import CudaPredictions
from amp_widgets.analysis.parity import ParityReport, check
from amp_widgets.analysis.plan import Plan
from amp_widgets.analysis.planner import plan
from amp_widgets.analysis.precision import PrecisionReport, precision_cost
from amp_widgets.analysis.preflight import Findings, preflight
from amp_widgets.analysis.profiled_step import LayerProfiles, ProfiledStep
from amp_widgets.core.loop import LiveLoop
from amp_widgets.core.memory.profile import StepProfile
from amp_widgets.on_demand import OnDemand


class SessionAnalyses(LiveLoop):
    """The part of `amp_widgets.session.AmpSession`, which is the class to use, that asks and leaves the training alone."""

    _on_demand: OnDemand  # the session makes it

    # ---- memory within a step ---------------------------------------------------------------------------------------

    def profile_step(
        self, batch: tuple[Any, Any], loss_fn: Callable[[Any, Any], torch.Tensor], *, label: str | None = None
    ) -> ProfiledStep:
        """Where the memory goes in one step on `batch`, by kind and by layer; everything is as before afterwards.

        See `amp_widgets.analysis.step_profile.profile_step`. For a step of the run itself: `profile_next_step`, `profiles`.
        """
        return self._on_demand.profile_step(self, batch, loss_fn, label)

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
        return self._on_demand.layer_profile(self, batch, loss_fn, layers)

    @property
    def profiles(self) -> tuple[ProfiledStep, ...]:
        """Of the steps that were profiled, the newest last, at most `amp_widgets.core.step_memory.PROFILES_KEPT`."""
        return tuple(map(ProfiledStep.of, super().profiles))

    def keep_profile(self, profile: StepProfile) -> None:
        """Put it among `profiles`, with a picture."""
        super().keep_profile(ProfiledStep.of(profile))

    # ---- are the numbers still right --------------------------------------------------------------------------------

    def check(self, batch: tuple[Any, Any], loss_fn: Callable[[Any, Any], torch.Tensor]) -> ParityReport:
        """Whether loss, gradients, buffers and random states are those without checkpointing, and how far autocast is from fp32.

        Nothing is trained; everything is as before afterwards. See `amp_widgets.analysis.parity.check`.
        """
        return self._on_demand.keep("check", check(self, batch, loss_fn), self.step)

    @property
    def check_changes(self) -> bool:
        """Whether a background run does a `check` by itself after each change of the checkpointed layers."""
        return self._on_demand.check_changes

    @check_changes.setter
    def check_changes(self, value: bool) -> None:
        self._on_demand.check_changes = value

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
        return self._on_demand.keep("precision" if reference == "fp32" else "precision_fp64", report, self.step)

    def dtype_map(self, batch: tuple[Any, Any], loss_fn: Callable[[Any, Any], torch.Tensor]) -> DtypeMap:
        """Which format each operator takes, computes in and gives, which casts autocast inserts, and why.

        Everything is as before afterwards. See `amp_widgets.analysis.dtype_map.dtype_map`.
        """
        return self._on_demand.keep("dtype_map", dtype_map(self, batch, loss_fn), self.step)

    def preflight(
        self, batch: tuple[Any, Any] | None = None, loss_fn: Callable[[Any, Any], torch.Tensor] | None = None
    ) -> Findings:
        """What will go wrong, or may, with mixed precision and checkpointing of this model, also on a GPU; and the cures.

        With a batch, one forward pass is watched, too. See `amp_widgets.analysis.preflight.preflight`.
        """
        return self._on_demand.keep("preflight", preflight(self, batch, loss_fn), self.step)

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
        return gradient_range(self, wait=wait)

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
        count_gradients(self, every)

    def skip_report(self) -> tuple[str, ...]:
        """Why steps were skipped, skips that belong together told together, and what is wrong with how the loss scale behaves.

        Returns
        -------
        tuple of str
            Sentences, the skips first, oldest first; empty when no step was skipped and nothing is wrong. Printed they are in the
            language in force; for programs they are English.
        """
        return skip_report(self)

    # ---- on the newest batch, between two steps ---------------------------------------------------------------------

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
        self._on_demand.inspect(self, kind, options)

    def cancel_inspection(self, kind: InspectionKind) -> None:
        """End one of this `kind`, which takes long, as soon as can be, from any thread; where there is none, nothing happens."""
        self._on_demand.inspections.cancel(kind)

    def inspection(self, kind: InspectionKind) -> Inspection:
        """How one of this `kind` stands: the newest result, also of the methods above, or why there is none."""
        return self._on_demand.inspections.of(kind)

    def between_steps(self, job: Callable[[], None]) -> None:
        """Call `job` when no step is in progress: now, or where a loop is training, at its next boundary on its thread.

        It must raise nothing, and be quick.
        """
        self._on_demand.between_steps(self, job)

    @property
    def why_no_batch(self) -> str | None:
        """Why `inspect` has no batch to work on; None when it has one."""
        return self._on_demand.why_no_batch(self)

    # ---- from a budget to a decision --------------------------------------------------------------------------------

    def plan(self, *, budget_bytes: float, batch: tuple[Any, Any], loss_fn: Callable[[Any, Any], torch.Tensor]) -> Plan:
        """Which layers to checkpoint so that a step stays within a budget, at least extra time: `request(checkpointed=plan)`.

        Everything is as before afterwards. Several inputs in the batch, in a dict or a tuple, are given to the model as `fit`
        does it. See `amp_widgets.analysis.planner.plan`.
        """
        made = plan(self, budget_bytes=budget_bytes, batch=batch, loss_fn=loss_fn)
        return self._on_demand.keep("plan", made, self.step)

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
        planned = self._on_demand.planned(planned)
        found = largest_batch(self, batch, loss_fn, budget_bytes=budget_bytes, grid=grid, planned=planned, confirm=confirm)
        return self._on_demand.keep("largest_batch", found, self.step)

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
        planned = self._on_demand.planned(planned)
        found = predict_corners_on_cuda(self, batch, loss_fn, grid=grid, planned=planned, batch_size=batch_size)
        return self._on_demand.keep("predict_on_cuda", found, self.step)

    @property
    def why_no_plan(self) -> str | None:
        """Why `inspect` has no batch to plan on; None when it has one."""
        return self._on_demand.why_no_plan(self)

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
        and goes on. Several inputs in the batch, in a dict or a tuple, are given to the model as `fit` does it.
        See `amp_widgets.analysis.compare.compare`; `planned` is the newest plan where none is given.

        Raises
        ------
        RunError
            Also while another comparison is being made.
        SessionClosedError
            After `close`.
        """
        self._check_open("compare")
        planned = self._on_demand.planned(planned)
        return self._on_demand.compare(
            self, batch, loss_fn, grid=grid, steps=steps, rounds=rounds, planned=planned, slow_step_s=slow_step_s
        )

    @property
    def why_no_comparison(self) -> str | None:
        """Why `compare_on_newest` has no batch to work on; None when it has one."""
        return self._on_demand.why_no_comparison(self)

    def compare_on_newest(self, *, grid: Grid | None = None, steps: int = 5, rounds: int = 3) -> None:
        """Ask for a comparison on the newest batch of the background run, from any thread; see `comparison`.

        While a run is alive it is made at the run's next boundary, on its thread; else at once, on a thread of its own, and
        no run can be started meanwhile. Nothing happens while another is being made.

        Parameters
        ----------
        grid, steps, rounds
            As in `amp_widgets.analysis.compare.compare`.

        Raises
        ------
        RunError
            When there is no batch, or a loop of the user's own is training.
        SessionClosedError
            After `close`.
        """
        self._check_open("compare")
        self._on_demand.compare_on_newest(self, grid=grid, steps=steps, rounds=rounds)

    def cancel_comparison(self) -> None:
        """End the comparison that is being made at its next step, from any thread; what is complete of it is kept."""
        self._on_demand.comparisons.cancel()

    @property
    def comparison(self) -> ComparisonStatus:
        """How the comparisons stand: the newest result, how far the one is that is being made, or why there is none."""
        return self._on_demand.comparisons.status
