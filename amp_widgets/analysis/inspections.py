"""What can be found out about a model on one batch, between two steps: each kind with its newest result."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from amp_widgets.analysis.batch_sizes import BatchSizes, largest_batch
from amp_widgets.analysis.comparison import Progress
from amp_widgets.analysis.cuda_corners import predict_corners_on_cuda
from amp_widgets.analysis.dtype_map import DtypeMap, dtype_map
from amp_widgets.analysis.on_cuda import CudaPredictions
from amp_widgets.analysis.parity import ParityReport, check
from amp_widgets.analysis.plan import Plan
from amp_widgets.analysis.plans import Plans
from amp_widgets.analysis.precision import PrecisionReport, precision_cost
from amp_widgets.analysis.preflight import Findings, preflight
from amp_widgets.analysis.unsupported import unsupported_text
from amp_widgets.core.loop import LiveLoop
from amp_widgets.errors import AmpWidgetsError

InspectionKind = Literal[
    "dtype_map", "check", "preflight", "precision", "precision_fp64", "plan", "largest_batch", "predict_on_cuda"
]
"""``precision`` is what fp16 and bf16 cost against fp32, ``precision_fp64`` what these two and fp32 cost against fp64."""
TAKES_LONG: frozenset[InspectionKind] = frozenset({"plan", "largest_batch", "predict_on_cuda"})
"""Seconds, or minutes; they can be cancelled."""

Result = DtypeMap | ParityReport | Findings | PrecisionReport | Plan | BatchSizes | CudaPredictions


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Inspection:
    """How one kind of inspection stands; the same object as long as nothing has changed.

    Attributes
    ----------
    result
        The newest there is, or None.
    step
        Steps completed when that was made.
    pending
        Whether one was asked for and is not there yet.
    why_not
        Why the last one that was asked for could not be made, or None; begins with the kind, as errors do.
    progress
        How far the one is that is being made, where that is known.
    cancelling
        Whether that is to be ended early.
    """

    result: Result | None = None
    step: int = 0
    pending: bool = False
    why_not: str | None = None
    progress: Progress | None = None
    cancelling: bool = False


class Inspections:
    """The newest of each kind of one loop. May be asked from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: dict[InspectionKind, Inspection] = {}
        self._asked: dict[InspectionKind, Mapping[str, Any] | None] = {}  # how, of what has not begun; None: not to be made
        self._begun: dict[InspectionKind, Mapping[str, Any]] = {}
        self._plans = Plans()

    def of(self, kind: InspectionKind) -> Inspection:
        """How it stands."""
        return self._newest.get(kind, _NONE)

    def ask(self, kind: InspectionKind, **options: Any) -> bool:
        """Note that one is asked for; whether `carry_out` has to be called for it.

        It has not while another of its kind has not begun, in whose place it is made, or while the same is being made.
        """
        with self._lock:
            if kind in self._asked or (self._begun.get(kind) == options and not self.of(kind).cancelling):
                if kind in self._asked:
                    self._asked[kind] = options
                    self._put(kind, pending=True, cancelling=kind in self._begun and self.of(kind).cancelling)
                return False
            self._asked[kind] = options
            self._put(kind, pending=True)
            return True

    def cancel(self, kind: InspectionKind) -> None:
        """End the one that is being made as soon as can be, and make none that waits; nothing happens where there is none."""
        with self._lock:
            if kind in self._asked and kind in self._begun:
                self._asked[kind] = None
            if self.of(kind).pending:
                self._put(kind, cancelling=True)

    @property
    def busy(self) -> bool:
        """Whether one that takes long is being made, or asked for."""
        return any(self.of(kind).pending for kind in TAKES_LONG)

    def keep(self, kind: InspectionKind, result: Result, step: int) -> None:
        """This is the newest."""
        with self._lock:
            earlier = self.of(kind)
            self._newest[kind] = dataclasses.replace(earlier, result=result, step=step, why_not=None)

    def forget_model(self) -> None:
        """Let go of the model; the results stay."""
        self._plans.forget()

    def carry_out(
        self,
        kind: InspectionKind,
        loop: LiveLoop,
        batch: Any,
        loss_fn: Callable[[Any, Any], Any] | None,
        *,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """Make one, between two steps, on the calling thread. What it raises is kept as `Inspection.why_not`.

        Parameters
        ----------
        batch, loss_fn
            As `amp_widgets.analysis.parity.check` takes them; both None where they are not known, which will do for a preflight.
        stopping
            Asked now and then by what takes long; True cancels it.
        """
        why_not: str | None = f"{kind}: it was interrupted"
        with self._lock:
            options = self._asked.pop(kind, {})
            if options is None:
                return
            self._begun[kind] = options
        try:
            self.keep(kind, self._maker(kind, stopping)(loop, batch, loss_fn, **options), loop.step)
            why_not = None
        except AmpWidgetsError as error:
            why_not = str(error)
        except Exception as error:  # what the user's model or loss raises; it must not end the run
            words = str(error).splitlines()
            why_not = f"{kind}: {type(error).__name__}: {words[0] if words else ''}"
            if (unsupported := unsupported_text(error, loop.settings.autocast)) is not None:
                why_not = f"{kind}: {unsupported}"
        finally:
            with self._lock:
                del self._begun[kind]
                self._put(kind, pending=self._asked.get(kind) is not None, why_not=why_not, progress=None, cancelling=False)

    def _maker(self, kind: InspectionKind, stopping: Callable[[], bool]) -> Callable[..., Result]:
        if kind not in TAKES_LONG:
            return _MAKE[kind]

        def cancelled() -> bool:
            return self.of(kind).cancelling or stopping()

        if kind == "plan":
            return partial(self._plans.plan, cancelled=cancelled)
        newest = self.of("plan").result
        return partial(
            _MAKE[kind],
            planned=newest if isinstance(newest, Plan) else None,
            on_progress=partial(self._tell, kind),
            cancelled=cancelled,
        )

    def _tell(self, kind: InspectionKind, progress: Progress) -> None:
        with self._lock:
            self._put(kind, progress=progress)

    def _put(self, kind: InspectionKind, **changes: Any) -> None:
        self._newest[kind] = dataclasses.replace(self.of(kind), **changes)


_NONE = Inspection()
_MAKE: Mapping[InspectionKind, Callable[..., Result]] = {
    "dtype_map": dtype_map,
    "check": check,
    "preflight": preflight,
    "precision": precision_cost,
    "precision_fp64": partial(precision_cost, formats=("fp32", "fp16", "bf16"), reference="fp64"),
    "largest_batch": largest_batch,
    "predict_on_cuda": predict_corners_on_cuda,
}
