"""What each layer holds and takes in a profiled step, and which are checkpointed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import traitlets

from amp_widgets.core import globs
from amp_widgets.language import in_language, marked, say
from amp_widgets.widgets.control import Control, page_script, page_style
from amp_widgets.widgets.state import DashboardState
from amp_widgets.widgets.ticks import with_tick


class LayerProfileLike(Protocol):
    """What is read of a layer of a profiled step; sizes and times include its children, NaN where not known."""

    @property
    def name(self) -> str: ...
    @property
    def type(self) -> str: ...
    @property
    def parameter_bytes(self) -> int: ...
    @property
    def activation_bytes(self) -> int: ...
    @property
    def output_bytes(self) -> int: ...
    @property
    def forward_s(self) -> float: ...
    @property
    def backward_s(self) -> float: ...
    @property
    def recompute_s(self) -> float: ...
    @property
    def calls(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def checkpointed(self) -> bool: ...
    @property
    def whole(self) -> bool: ...
    @property
    def saved_bytes(self) -> float: ...
    @property
    def cost_s(self) -> float: ...


NOT_KNOWN = marked("the model's layers are not known here")
THE_MODEL = marked("the model itself")


class LayerTable(Control):
    """The layers of a profiled step as a table: sorted by a click on a heading, filtered by a glob, ticked to be checkpointed.

    The model itself, with what no layer in it holds, stays the first row however the others are sorted; it has no tick.

    Asks with ``request(checkpointed=names)``, always the whole set, as the layer tree does. The page holds only the rows that
    are in sight: a model with thousands of layers is one widget. `render` shows which layers are checkpointed, `show` the
    numbers of a step.

    Parameters
    ----------
    request
        Called with the layers that are to be checkpointed.
    state, profile
        What to show first.
    why_no_ticks
        Why no layer can be ticked at all; nothing where they can.
    """

    _esm = page_script("layer_table", "virtual_table")
    _css = page_style("virtual_table", "memory")

    rows: traitlets.List[Any] = traitlets.List(help="Of each layer what `_row` says.").tag(sync=True)
    whole = traitlets.Int(-1, help="Position in `rows` of the model itself; -1: it is not there.").tag(sync=True)
    in_force: traitlets.List[Any] = traitlets.List(help="Positions in `rows` of what is checkpointed.").tag(sync=True)
    requested: traitlets.List[Any] = traitlets.List(help="Positions of what is to be.").tag(sync=True)
    proposed: traitlets.List[Any] = traitlets.List(help="Positions of what is proposed.").tag(sync=True)
    caption = traitlets.Unicode(help="Of which step the numbers are.").tag(sync=True)
    pattern = traitlets.Unicode(help="The filter in force.").tag(sync=True)
    matching: traitlets.List[Any] | None = traitlets.List(None, allow_none=True, help="Positions that match; None: all.").tag(
        sync=True
    )

    def __init__(
        self,
        request: Callable[..., None],
        state: DashboardState | None = None,
        profile: Sequence[LayerProfileLike] = (),
        *,
        why_no_ticks: str = "",
    ) -> None:
        self._why_no_ticks = why_no_ticks
        self._profile: tuple[LayerProfileLike, ...] = ()
        self._state: DashboardState | None = None
        self._why_not: dict[str, str] = {}
        self._order: dict[str, int] = {}
        self._positions: dict[str, int] = {}
        self._proposed: tuple[str, ...] = ()
        self._died_in: tuple[str, str] | None = None
        super().__init__(request, state)
        self.show(profile)

    def show(self, profile: Sequence[LayerProfileLike], *, caption: str = "", died_in: tuple[str, str] | None = None) -> None:
        """Show the numbers of these layers, in the model's order; nothing is sent when they are those shown.

        Parameters
        ----------
        profile
            Of each layer.
        caption
            Of which step.
        died_in
            Phase and layer in which that step broke off: what was not measured because of that is not known. None: it ended.
        """
        profile = tuple(profile)
        if profile == self._profile and died_in == self._died_in:
            self._put({"caption": caption})
            return
        self._profile, self._died_in = profile, died_in
        self._positions = {layer.name: i for i, layer in enumerate(profile) if not layer.whole}
        whole = next((i for i, layer in enumerate(profile) if layer.whole), -1)
        ticks = {} if self._state is None else self._ticks(self._state)
        proposed = {"proposed": self._indices(self._proposed)}
        rows = {"rows": self._all_rows(), "whole": whole, "matching": self._matching(self.pattern), "caption": caption}
        self._put(rows | proposed | ticks)

    def propose(self, names: Sequence[str]) -> None:
        """Mark these layers."""
        self._proposed = tuple(names)
        self._put({"proposed": self._indices(self._proposed)})

    def _traits_for(self, state: DashboardState) -> dict[str, Any]:
        layers_differ = self._state is None or (self._state.layers is not state.layers and self._state.layers != state.layers)
        self._state = state
        if layers_differ:
            self._order = {layer.name: i for i, layer in enumerate(state.layers)}
            self._why_not = {layer.name: _why_not(layer) for layer in state.layers}
        return ({"rows": self._all_rows()} if layers_differ else {}) | self._ticks(state)

    def _ticks(self, state: DashboardState) -> dict[str, Any]:
        return {
            "in_force": self._indices(state.settings.checkpointed),
            "requested": self._indices(state.requested("checkpointed")),
        }

    def _ask(self, message: Mapping[str, Any]) -> None:
        if "filter" in message:
            pattern = str(message["filter"]).strip()
            self._put({"pattern": pattern, "matching": self._matching(pattern)})
        elif "layer" in message and self._state is not None and not self._why_no_ticks:
            before = tuple(self._state.requested("checkpointed"))
            names = with_tick(before, str(message["layer"]), bool(message["on"]), self._order)
            if names != before:
                self._request(checkpointed=names)

    def _all_rows(self) -> list[list[Any]]:
        why_not, died_in = self._why_not, self._died_in
        rows = [
            _row(one, say(THE_MODEL) if one.whole else why_not.get(one.name, say(NOT_KNOWN)), died_in) for one in self._profile
        ]
        for row in rows:
            row[_WHY_NOT] = self._why_no_ticks or row[_WHY_NOT]
        return rows

    def _matching(self, pattern: str) -> list[int] | None:
        patterns = pattern.replace(",", " ").split()
        if not patterns:
            return None
        return [i for i, layer in enumerate(self._profile) if any(_matches(layer, one) for one in patterns)]

    def _indices(self, names: Sequence[str]) -> list[int]:
        return sorted(self._positions[name] for name in names if name in self._positions)


def matches(name: str, pattern: str) -> bool:
    """Whether a layer's name fits a glob as it is used for checkpointing; without ``*``, ``?`` and ``[`` a part of it is enough.

    >>> matches("layers.3.mlp", "layers.*"), matches("layers.3.mlp", "**.mlp"), matches("layers.3.mlp", "ML")
    (False, True, True)
    """
    if not globs.is_glob(pattern):
        return pattern.lower() in name.lower()
    return globs.parts_match(name.split("."), pattern.split("."))


def _matches(layer: LayerProfileLike, pattern: str) -> bool:
    if layer.whole and globs.is_glob(pattern):  # it has no name in itself
        return globs.parts_match([], pattern.split("."))
    return matches(layer.name, pattern)


def _row(layer: LayerProfileLike, why_not: str, died_in: tuple[str, str] | None) -> list[Any]:
    """Name, type, dtype, whether it was checkpointed, why it cannot be, and numbers: bytes and seconds, None where not known."""
    held, output, forward_s, backward_s = _measured(layer, died_in)
    possible = why_not in ("", say(NOT_KNOWN)) and not math.isnan(held + output)
    trade = (layer.saved_bytes, layer.cost_s) if possible else (math.nan, math.nan)
    numbers = (layer.parameter_bytes, held, output, forward_s, backward_s, *trade)
    known = [number if math.isfinite(number) else None for number in numbers]
    dtype = say("mixed") if layer.dtype == "mixed" else layer.dtype
    return [layer.name, layer.type, dtype, layer.checkpointed, why_not, *known]


_WHY_NOT = 4
"""Its place in a row."""


def _measured(layer: LayerProfileLike, died_in: tuple[str, str] | None) -> tuple[float, float, float, float]:
    """Held and output bytes, seconds forward and backward; NaN for what was not measured, as where a step did not get to."""
    held: float = layer.activation_bytes
    output: float = layer.output_bytes
    forward_s, backward_s = layer.forward_s, layer.backward_s
    phase, inner = died_in or ("", "")
    if layer.whole or layer.name == inner or inner.startswith(f"{layer.name}."):  # it was in this one that the step broke off
        if phase == "forward":
            return math.nan, math.nan, math.nan, math.nan
        if phase in ("backward", "recompute"):
            backward_s = math.nan
    if not layer.calls:  # what only holds other layers holds what they hold
        return held or math.nan, math.nan, math.nan, backward_s
    if died_in is not None and not forward_s:  # called, and never left
        return math.nan, math.nan, math.nan, math.nan
    return held, output, forward_s, backward_s


def _why_not(layer: Any) -> str:
    if layer.structural:
        return say("it only holds other layers")
    return "" if layer.why_not is None else in_language(layer.why_not) or say("it cannot be checkpointed")
