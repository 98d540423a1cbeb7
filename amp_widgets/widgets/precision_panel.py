"""What precision costs: how far each layer is off in fp16 and bf16, worst first, and which layers are kept in FP32."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

import traitlets

from amp_widgets.analysis.inspections import Inspection, InspectionKind
from amp_widgets.analysis.precision import LayerPrecision, PrecisionReport
from amp_widgets.analysis.relative_error import error_text
from amp_widgets.core.settings import Settings
from amp_widgets.language import in_language, marked, say
from amp_widgets.widgets.control import Control, page_script, page_style
from amp_widgets.widgets.layer_table import matches
from amp_widgets.widgets.state import DashboardState
from amp_widgets.widgets.text import not_done_text
from amp_widgets.widgets.ticks import with_tick

if TYPE_CHECKING:
    from amp_widgets.core.layers import Layer

Reference = Literal["fp32", "fp64"]
KINDS: Mapping[Reference, InspectionKind] = {"fp32": "precision", "fp64": "precision_fp64"}
"""What is asked for, by the format of the reference."""
EXPLAINED = marked(
    "fp16 has 11 significant bits and bf16 has 8, so that each rounding is off by up to 2^-11 and 2^-8 of a number; fp32 has 24. "
    "What that comes to is measured on the newest batch: with the same weights and random numbers it is run in each format and "
    "once in a wider one, and every layer is compared. An error of 1e-2 says that the difference is as large as 1 % of the "
    "numbers themselves. It is what has come together up to there: outputs bring errors from the layers before, gradients also "
    "from those behind. Where a layer has inf or NaN, or gives an output that is much further off than what it was given, "
    "precision is lost in it: ticked on the left, it is kept in FP32 from the next step on. Measure again to see what it helps. "
    "Nothing is trained by it, and all is as before afterwards."
)
EXAMPLE = marked(
    "In the digits demo: press Start, then Measure precision. Outputs in bf16 are some eight times as far off as in fp16: it has "
    "three bits less. Sorted by layer, the errors of outputs grow from the stem to the last block; those of gradients the other "
    "way. Tick stem and layers.0 and measure again: what these two give is exact now, and the errors begin behind them."
)
SMALLEST_SHOWN = 1e-8
"""Where the bars begin; they end at 1."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionState:
    """What a precision panel shows, beside a `DashboardState`.

    Attributes
    ----------
    fp32, fp64
        How the measurements against these stand.
    why_no_batch
        Why there is no batch to measure on, or None.
    """

    fp32: Inspection = dataclasses.field(default_factory=Inspection)
    fp64: Inspection = dataclasses.field(default_factory=Inspection)
    why_no_batch: str | None = None


class PrecisionPanel(Control):
    """Shows a `PrecisionReport` as a table with bars, and asks for others and for layers to be kept in FP32.

    Asks with ``command("precision")`` or ``command("precision_fp64")``, and with ``request(fp32_layers=names)``, always the
    whole set. `show` shows a report, `render` which layers are kept; neither sends anything when it is what is shown.

    Parameters
    ----------
    command
        Called with the kind of inspection that is asked for.
    request
        Called for settings, as by every control.
    state, dashboard
        What to show first.
    """

    _esm = page_script("precision_panel", "virtual_table")
    _css = page_style("virtual_table", "precision_panel")

    explanation = traitlets.Unicode(EXPLAINED).tag(sync=True, said=True)
    example = traitlets.Unicode(EXAMPLE).tag(sync=True, said=True)
    reference = traitlets.Unicode("fp32", help="Against what is measured, and what is shown.").tag(sync=True)
    formats: traitlets.List[Any] = traitlets.List(help="Of the columns.").tag(sync=True)
    rows: traitlets.List[Any] = traitlets.List(help="Of each layer what `_row` says, worst first.").tag(sync=True)
    reasons: traitlets.List[Any] = traitlets.List(help="Of each row why it cannot be ticked, or nothing.").tag(sync=True)
    in_force: traitlets.List[Any] = traitlets.List(help="Positions in `rows` of what is kept in FP32.").tag(sync=True)
    requested: traitlets.List[Any] = traitlets.List(help="Positions of what is to be.").tag(sync=True)
    pattern = traitlets.Unicode(help="The filter in force.").tag(sync=True)
    matching: traitlets.List[Any] | None = traitlets.List(None, allow_none=True, help="Rows that match; None: all.").tag(
        sync=True
    )
    caption = traitlets.Unicode(help="Against what, and when.").tag(sync=True)
    sentences: traitlets.List[Any] = traitlets.List(help="Of each format.").tag(sync=True)
    stale = traitlets.Unicode(help="What has changed since.").tag(sync=True)
    why_not = traitlets.Unicode().tag(sync=True)
    pending = traitlets.Bool(False).tag(sync=True)
    why_no_batch = traitlets.Unicode().tag(sync=True)

    def __init__(
        self,
        command: Callable[..., None],
        request: Callable[..., None],
        state: PrecisionState | None = None,
        dashboard: DashboardState | None = None,
    ) -> None:
        self._command = command
        self._state = PrecisionState() if state is None else state
        self._report: PrecisionReport | None = None
        self._known: tuple[Layer, ...] = ()
        self._order: dict[str, int] = {}
        self._settings: Settings | None = None
        self._wanted: tuple[str, ...] = ()
        self._names: list[str] = []
        super().__init__(request, dashboard)
        self.show(self._state)

    def show(self, state: PrecisionState) -> None:
        """Show the measurement against the chosen reference; nothing is sent when it is what is shown."""
        self._state = state
        inspection = state.fp64 if self.reference == "fp64" else state.fp32
        kind = KINDS[cast(Reference, self.reference)]
        report = inspection.result if isinstance(inspection.result, PrecisionReport) else None
        values: dict[str, Any] = {
            "pending": inspection.pending,
            "why_not": "" if inspection.why_not is None else not_done_text(kind, inspection.why_not),
            "why_no_batch": ""
            if state.why_no_batch is None
            else say("To measure precision {why}.", why=in_language(state.why_no_batch)),
            "caption": ""
            if report is None
            else say(
                "Relative errors against {reference}, before step {step}", reference=report.reference, step=f"{inspection.step:,}"
            ),
        }
        if report is not self._report:
            self._report = report
            values |= self._table()
        self._put(values | {"stale": self._stale()})

    def close(self) -> None:
        """Close the panel, and forget whom it asks and what it showed."""
        self._command = _nobody
        self._report, self._state = None, PrecisionState()
        super().close()

    def _traits_for(self, state: DashboardState) -> dict[str, Any]:
        self._settings = state.settings
        self._wanted = tuple(state.requested("fp32_layers"))
        differ = self._known is not state.layers and self._known != state.layers
        if differ:
            self._known = state.layers
            self._order = {layer.name: i for i, layer in enumerate(state.layers)}
        return (self._table() if differ else self._ticks()) | {"stale": self._stale()}

    def _ask(self, message: Mapping[str, Any]) -> None:
        match message:
            case {"measure": True}:
                if not (self.pending or self.why_no_batch):
                    self._command(KINDS[cast(Reference, self.reference)])
            case {"reference": ("fp32" | "fp64") as reference}:
                self._put({"reference": reference})
                self.show(self._state)
            case {"filter": pattern}:
                pattern = str(pattern).strip()
                self._put({"pattern": pattern, "matching": self._matching(pattern)})
            case {"layer": name, "on": on}:
                names = with_tick(self._wanted, str(name), bool(on), self._order)
                if names != self._wanted:
                    self._request(fp32_layers=names)

    def _table(self) -> dict[str, Any]:
        """The rows, and all that goes by their positions."""
        report = self._report
        layers: dict[str, dict[str, LayerPrecision]] = {}  # of the same layer in all formats, worst first
        for layer in () if report is None else report.layers:
            layers.setdefault(layer.name, {})[layer.format] = layer
        formats = [] if report is None else list(report.loss_errors)
        self._names = list(layers)
        order = {_MODEL: -1, **self._order}
        return {
            "formats": formats,
            "rows": [_row(found, formats, order.get(name, len(order))) for name, found in layers.items()],
            "reasons": [
                "" if name in self._order else say(_THE_MODEL) if name == _MODEL else say(_NOT_HERE) for name in self._names
            ],
            "matching": self._matching(self.pattern),
            "sentences": [] if report is None else [in_language(one) for one in report.sentences],
            **self._ticks(),
        }

    def _ticks(self) -> dict[str, Any]:
        in_force = () if self._settings is None else self._settings.fp32_layers
        return {"in_force": self._positions(in_force), "requested": self._positions(self._wanted)}

    def _positions(self, names: Iterable[str]) -> list[int]:
        wanted = set(names)
        return [i for i, name in enumerate(self._names) if name in wanted]

    def _matching(self, pattern: str) -> list[int] | None:
        patterns = pattern.replace(",", " ").split()
        if not patterns:
            return None
        return [i for i, name in enumerate(self._names) if any(matches(name, one) for one in patterns)]

    def _stale(self) -> str:
        report, now = self._report, self._settings
        if report is None or now is None or report.fp32_layers == now.fp32_layers:
            return ""
        return say("Since this was measured other layers are kept in FP32: measure again to see what that changes")

    def __repr__(self) -> str:
        return f"<amp_widgets precision panel: {self.caption or 'nothing measured yet'}>"


_MODEL = "(model)"
_THE_MODEL = marked("the model itself: choose fp32 as autocast")
_NOT_HERE = marked("it is no layer that can be switched")
_WORST_POSSIBLE = 1e300  # JSON has no inf


def _row(found: Mapping[str, LayerPrecision], formats: Iterable[str], position: int) -> list[Any]:
    """Name, type, position in the model, the worst error as a text and what is not finite as a sentence; and of each format
    the errors of outputs, their gradients and the parameters' gradients as ``[number or None, text, length of the bar]``."""
    one = next(iter(found.values()))
    errors = {
        name: (layer.output_error, layer.gradient_error, layer.parameter_error) if (layer := found.get(name)) else (math.nan,) * 3
        for name in formats
    }
    broken = [
        say("{format}: {count} inf or NaN", format=layer.format, count=f"{layer.nonfinite:,}")
        for layer in found.values()
        if layer.nonfinite
    ]
    worst = max((layer.worst_error for layer in found.values() if layer.worst_error >= 0), default=math.nan)
    cells = [_cell(error) for name in formats for error in errors[name]]
    return [one.name, one.type, position, say("inf or NaN") if broken else error_text(worst), "; ".join(broken), cells]


def _cell(error: float) -> list[Any]:
    """A number that can be sorted, its text, and the length of its bar in percent, on a logarithmic scale."""
    if math.isnan(error):
        return [None, error_text(error), 0]
    decades = math.log10(max(error, SMALLEST_SHOWN) / SMALLEST_SHOWN) / -math.log10(SMALLEST_SHOWN)
    return [min(error, _WORST_POSSIBLE), error_text(error), round(100 * min(decades, 1.0), 1)]


def _nobody(*_args: object, **_values: object) -> None:
    """Nobody is asked after `close`."""
