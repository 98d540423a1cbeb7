"""The number formats of a step, by layer and operator, and which layers are kept in FP32."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import traitlets

from amp_widgets.core.settings import Settings
from amp_widgets.language import in_language, marked, say
from amp_widgets.widgets.control import Control, page_script, page_style
from amp_widgets.widgets.layer_table import matches
from amp_widgets.widgets.state import DashboardState
from amp_widgets.widgets.text import bytes_text, not_done_text
from amp_widgets.widgets.ticks import with_tick

if TYPE_CHECKING:
    from amp_widgets.analysis.dtype_map import DtypeMap, OperatorDtypes
    from amp_widgets.core.layers import Layer


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DtypeState:
    """What a dtype panel shows, beside a `DashboardState`.

    Parameters
    ----------
    map
        The map that was taken last, or None.
    pending
        Whether one was asked for and is not there yet.
    why_not
        Why the last one that was asked for could not be taken, or None.
    available
        Whether one can be asked for: there must be a batch to take it of.
    why_not_available
        The reason, where none can.
    """

    map: DtypeMap | None = None
    pending: bool = False
    why_not: str | None = None
    available: bool = True
    why_not_available: str = ""


class DtypePanel(Control):
    """Shows in which format each operator of each layer computes, and asks for layers to be kept in FP32.

    Asks with ``request(fp32_layers=names)``, always the whole set. The page holds only the rows that are in sight. `show` shows
    a map, `render` which layers are kept in FP32; neither sends anything when it is what is shown.

    Parameters
    ----------
    command
        Called with ``"dtype_map"`` when a map is asked for.
    request
        Called for settings, as by every control.
    state, dashboard
        What to show first.
    """

    _esm = page_script("dtype_panel", "virtual_table")
    _css = page_style("virtual_table", "dtype_panel")

    rows: traitlets.List[Any] = traitlets.List(help="Of each operator what `_row` says.").tag(sync=True)
    layers: traitlets.List[Any] = traitlets.List(help="Of each layer what `_layer` says.").tag(sync=True)
    in_force: traitlets.List[Any] = traitlets.List(help="Positions in `layers` of what is kept in FP32.").tag(sync=True)
    requested: traitlets.List[Any] = traitlets.List(help="Positions of what is to be.").tag(sync=True)
    pattern = traitlets.Unicode(help="The filter in force.").tag(sync=True)
    matching: traitlets.List[Any] | None = traitlets.List(None, allow_none=True, help="Rows that match; None: all.").tag(
        sync=True
    )
    sentence = traitlets.Unicode(help="What came out.").tag(sync=True)
    stale = traitlets.Unicode(help="What has changed since.").tag(sync=True)
    why_not = traitlets.Unicode().tag(sync=True)
    pending = traitlets.Bool(False).tag(sync=True)
    available = traitlets.Bool(True).tag(sync=True)
    predicts = traitlets.Bool(False, help="Whether CUDA's lists are shown beside those of the device.").tag(sync=True)

    def __init__(
        self,
        command: Callable[..., None],
        request: Callable[..., None],
        state: DtypeState | None = None,
        dashboard: DashboardState | None = None,
    ) -> None:
        self._command = command
        self._map: DtypeMap | None = None
        self._known: tuple[Layer, ...] = ()
        self._settings: Settings | None = None
        self._wanted: tuple[str, ...] = ()
        self._names: list[str] = []
        super().__init__(request, dashboard)
        self.show(DtypeState() if state is None else state)

    def show(self, state: DtypeState) -> None:
        """Show this map; nothing is sent when it is what is shown."""
        why_not = "" if state.why_not is None else not_done_text("dtype_map", state.why_not)
        if not state.available and state.why_not_available:
            why_not = say("No map can be taken here: {why}", why=state.why_not_available)
        values: dict[str, Any] = {"pending": state.pending, "available": state.available, "why_not": why_not}
        if state.map is not self._map:
            self._map = state.map
            rows = () if state.map is None else state.map.rows
            values |= {
                "rows": [_row(row) for row in rows],
                "matching": self._matching(self.pattern),
                "sentence": "" if state.map is None else _sentence(state.map),
                "predicts": state.map is not None and state.map.device_type != "cuda",
                **self._tree(),
            }
        self._put(values | {"stale": self._stale()})

    def close(self) -> None:
        """Close the panel, and forget whom it asks."""
        self._command = _nobody
        super().close()

    def _traits_for(self, state: DashboardState) -> dict[str, Any]:
        self._settings = state.settings
        self._wanted = tuple(state.requested("fp32_layers"))
        differ = self._known is not state.layers and self._known != state.layers
        if differ:
            self._known = state.layers
        return (self._tree() if differ else self._ticks()) | {"stale": self._stale()}

    def _ask(self, message: Mapping[str, Any]) -> None:
        match message:
            case {"map": True}:
                if self.available and not self.pending:
                    self._command("dtype_map")
            case {"filter": pattern}:
                pattern = str(pattern).strip()
                self._put({"pattern": pattern, "matching": self._matching(pattern)})
            case {"layer": name, "on": on}:
                order = {layer: i for i, layer in enumerate(self._names)}
                names = with_tick(self._wanted, str(name), bool(on), order)
                if names != self._wanted:
                    self._request(fp32_layers=names)

    def _tree(self) -> dict[str, Any]:
        """The layers of the model, and what of a map has no layer."""
        formats = {} if self._map is None else self._map.layers
        rows = [
            _layer(layer.name, layer.type, formats, say("it only holds other layers") * layer.structural) for layer in self._known
        ]
        names = {layer.name for layer in self._known}
        types = {} if self._map is None else self._map.types
        if not rows:
            rows = [_layer(name, kind, formats, say(_NOT_HERE)) for name, kind in types.items()]
        else:
            rows += [_layer(name, types.get(name, ""), formats, say(_NOT_HERE)) for name in formats if name not in names]
        self._names = [row[0] for row in rows]
        return {"layers": rows} | self._ticks()

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
        rows = () if self._map is None else self._map.rows
        return [i for i, row in enumerate(rows) if any(matches(row.layer, one) for one in patterns)]

    def _stale(self) -> str:
        taken, now = self._map, self._settings
        if taken is None or now is None:
            return ""
        changed = [
            words
            for words, before, after in (
                (say("autocast is {autocast}", autocast=now.autocast), taken.autocast, now.autocast),
                (say("other layers are checkpointed"), taken.checkpointed, now.checkpointed),
                (say("other layers are kept in FP32"), taken.fp32_layers, now.fp32_layers),
            )
            if before != after
        ]
        return say("Since this map was taken: {changes}", changes=", ".join(changed)) if changed else ""

    def __repr__(self) -> str:
        return f"<amp_widgets dtype panel: {self.sentence or 'no map taken yet'}>"


_WHY = {
    "off": marked("autocast off"),
    "lower": marked("lower-precision"),
    "fp32": marked("fp32 list"),
    "promote": marked("promote list"),
    "through": marked("as given"),
    "disabled": marked("autocast disabled"),
    "kept": marked("kept in FP32"),
    "written": marked("cast in the code"),
    "unknown": marked("compiled code"),
}
_ON_CUDA = (marked("lower"), marked("fp32"), marked("promote"))
_NOT_HERE = marked("it is no layer that can be switched")


def _row(row: OperatorDtypes) -> list[Any]:
    """Layer, operator, calls; formats in, of the computation, out, and backward; casts and bytes, forward, backward and in a
    recompute; why, in a word and as a sentence; CUDA's list."""
    return [
        row.layer,
        row.text,
        row.calls,
        *("+".join(formats) for formats in (row.dtypes_in, row.compute, row.dtypes_out, row.backward_compute)),
        *(row.casts, row.cast_bytes, row.backward_casts, row.backward_cast_bytes),
        *(row.recompute_calls, row.recompute_casts, row.recompute_cast_bytes),
        say(_WHY[row.reason]) if not row.function else say("in a Function; {why}", why=say(_WHY[row.reason])),
        in_language(row.why),
        in_language(row.on_cuda or ""),
    ]


def _layer(name: str, kind: str, formats: Mapping[str, Sequence[str]], why_not: str) -> list[Any]:
    """Name, class, the formats that it computes in, the most precise first, and why it cannot be kept in FP32."""
    return [name, kind, sorted(formats.get(name, ()), key=_precision), why_not]


def _precision(format: str) -> tuple[int, str]:
    return (_MOST_PRECISE.index(format) if format in _MOST_PRECISE else len(_MOST_PRECISE), format)


_MOST_PRECISE = ("fp64", "fp32", "fp16", "bf16")


def _sentence(taken: DtypeMap) -> str:
    off = taken.autocast == "fp32"
    values = {"autocast": taken.autocast, "device": taken.device_type}
    where = say("autocast off on {device}", **values) if off else say("autocast {autocast} on {device}", **values)
    if not taken.casts:
        return say("{where}: no casts", where=where)
    size = bytes_text(taken.cast_bytes)
    told = say("{where}: {casts} casts a step, which write {size}", where=where, casts=f"{taken.casts:,}", size=size)
    return told + (say(", and {casts} more in recomputes", casts=f"{taken.recompute_casts:,}") if taken.recompute_casts else "")


def _nobody(*_args: object, **_values: object) -> None:
    """Nobody is asked after `close`."""
