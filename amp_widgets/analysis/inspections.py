"""What can be found out about a model on one batch, between two steps: each kind with its newest result."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from amp_widgets.analysis.dtype_map import DtypeMap, dtype_map
from amp_widgets.analysis.parity import ParityReport, check
from amp_widgets.analysis.precision import PrecisionReport, precision_cost
from amp_widgets.analysis.preflight import Findings, preflight
from amp_widgets.core.loop import LiveLoop
from amp_widgets.errors import AmpWidgetsError

InspectionKind = Literal["dtype_map", "check", "preflight", "precision", "precision_fp64"]
"""The last two are what precision costs: fp16 and bf16 against fp32; and these two and fp32 against fp64."""

Result = DtypeMap | ParityReport | Findings | PrecisionReport


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
    """

    result: Result | None = None
    step: int = 0
    pending: bool = False
    why_not: str | None = None


class Inspections:
    """The newest dtype map, parity report, preflight and report on precision of one loop. May be asked from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: dict[InspectionKind, Inspection] = {}

    def of(self, kind: InspectionKind) -> Inspection:
        """How it stands."""
        return self._newest.get(kind, _NONE)

    def ask(self, kind: InspectionKind) -> bool:
        """Note that one is asked for; False where one is already."""
        with self._lock:
            earlier = self.of(kind)
            if earlier.pending:
                return False
            self._newest[kind] = dataclasses.replace(earlier, pending=True)
            return True

    def keep(self, kind: InspectionKind, result: Result, step: int) -> None:
        """This is the newest."""
        with self._lock:
            self._newest[kind] = Inspection(result=result, step=step)

    def carry_out(self, kind: InspectionKind, loop: LiveLoop, batch: Any, loss_fn: Callable[[Any, Any], Any] | None) -> None:
        """Make one, between two steps, on the calling thread. What it raises is kept as `Inspection.why_not`.

        Parameters
        ----------
        batch, loss_fn
            As `amp_widgets.analysis.parity.check` takes them; both None where they are not known, which will do for a preflight.
        """
        why_not: str | None = f"{kind}: it was interrupted"
        try:
            self.keep(kind, _MAKE[kind](loop, batch, loss_fn), loop.step)
            why_not = None
        except AmpWidgetsError as error:
            why_not = str(error)
        except Exception as error:  # what the user's model or loss raises; it must not end the run
            words = str(error).splitlines()
            why_not = f"{kind}: {type(error).__name__}: {words[0] if words else ''}"
        finally:
            if why_not is not None:
                with self._lock:
                    self._newest[kind] = dataclasses.replace(self.of(kind), pending=False, why_not=why_not)


_NONE = Inspection()
_MAKE: Mapping[InspectionKind, Callable[[LiveLoop, Any, Any], Result]] = {
    "dtype_map": dtype_map,
    "check": check,
    "preflight": preflight,
    "precision": precision_cost,
    "precision_fp64": partial(precision_cost, formats=("fp32", "fp16", "bf16"), reference="fp64"),
}
