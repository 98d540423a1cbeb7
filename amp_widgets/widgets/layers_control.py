"""Which layers are checkpointed."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import traitlets

from amp_widgets.language import in_language, say
from amp_widgets.widgets.control import Control, page_script
from amp_widgets.widgets.state import DashboardState
from amp_widgets.widgets.text import count_text

if TYPE_CHECKING:
    from amp_widgets.core.checkpointing import Layer


class LayersControl(Control):
    """The model's layers as a tree with tick boxes: all, none, the blocks, every second block, or a pattern.

    Asks with ``request(checkpointed=names)``: always the whole set. The tree is built in the page, and a group of it only
    when it is opened: a model with a thousand layers is one widget.
    """

    _esm = page_script("layers_control")

    rows: traitlets.List[Any] = traitlets.List(help="Of each layer: name, type, parameters, why not.").tag(sync=True)
    in_force: traitlets.List[Any] = traitlets.List(help="Positions in `rows` of what is checkpointed.").tag(sync=True)
    requested: traitlets.List[Any] = traitlets.List(help="Positions of what is to be.").tag(sync=True)
    blocks = traitlets.Unicode(help="What the repeated blocks are, or nothing.").tag(sync=True)
    summary = traitlets.Unicode().tag(sync=True)

    def __init__(self, request: Callable[..., None], state: DashboardState | None = None) -> None:
        self._layers: tuple[Layer, ...] | None = None
        self._rows: list[list[str]] = []
        self._positions: dict[str, int] = {}
        self._blocks: tuple[str, ...] = ()
        self._requested: tuple[str, ...] = ()
        super().__init__(request, state)

    def _traits_for(self, state: DashboardState) -> dict[str, Any]:
        if self._layers is not state.layers and self._layers != state.layers:
            self._layers = state.layers
            self._rows = [[layer.name, layer.type, count_text(layer.parameters), _why_not(layer)] for layer in state.layers]
            self._positions = {layer.name: i for i, layer in enumerate(state.layers)}
            self._blocks = repeated_blocks(state.layers)
        self._requested = tuple(state.requested("checkpointed"))
        in_force = self._indices(state.settings.checkpointed)
        return {
            "rows": self._rows,
            "in_force": in_force,
            "requested": self._indices(self._requested),
            "blocks": self._block_text(),
            "summary": say("{shown} of {count}", shown=len(in_force), count=len(self._rows))
            if in_force
            else say("none of {count}", count=len(self._rows)),
        }

    def _ask(self, message: Mapping[str, Any]) -> None:
        if "pattern" in message:
            names = tuple(str(message["pattern"]).replace(",", " ").split())
            if not names:
                return
        elif "choose" in message:
            names = self._chosen(str(message["choose"]))
        else:
            layer, on = str(message["layer"]), bool(message["on"])
            wanted = {name for name in self._requested if name != layer} | ({layer} if on else set())
            names = tuple(sorted(wanted, key=lambda name: self._positions.get(name, len(self._positions))))
        if "pattern" in message or names != self._requested:
            self._request(checkpointed=names)

    def _chosen(self, choice: str) -> tuple[str, ...]:
        if choice == "all":
            return tuple(layer.name for layer in self._layers or () if not _why_not(layer))
        if choice == "blocks":
            return self._blocks
        if choice == "every_second":
            return self._blocks[::2]
        return ()

    def _indices(self, names: Sequence[str]) -> list[int]:
        return sorted(self._positions[name] for name in names if name in self._positions)

    def _block_text(self) -> str:
        if not self._blocks:
            return ""
        first = next(layer for layer in self._layers or () if layer.name == self._blocks[0])
        return say(
            "{count} × {type}: {first} to {last}",
            count=len(self._blocks),
            type=first.type,
            first=self._blocks[0],
            last=self._blocks[-1],
        )


def repeated_blocks(layers: Sequence[Layer]) -> tuple[str, ...]:
    """The layers that a model repeats: what "every second" means.

    These are the checkpointable layers of one type with numbered names (``blocks.0``, else ``block1``), at least two. Layers
    that have layers within go before those that have none; then those with the most parameters; of two that lie within each
    other, the outer.
    """
    parents = {layer.name.rpartition(".")[0] for layer in layers}
    candidates = [layer for layer in layers if not _why_not(layer)]
    for has_children in (True, False):
        for numbered in (re.compile(r"(?:.*\.)?\d+"), re.compile(r".*\d")):
            groups: dict[str, list[Layer]] = defaultdict(list)
            for layer in candidates:
                if (layer.name in parents) is has_children and numbered.fullmatch(layer.name):
                    groups[layer.type].append(layer)
            outer = [_outermost(group) for group in groups.values()]
            repeated = [group for group in outer if len(group) >= 2]
            if repeated:
                best = max(repeated, key=lambda group: sum(layer.parameters for layer in group))
                return tuple(layer.name for layer in best)
    return ()


def _outermost(group: Sequence[Layer]) -> list[Layer]:
    names = {layer.name for layer in group}
    return [layer for layer in group if not any(parent in names for parent in _ancestors(layer.name))]


def _ancestors(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts))]


def _why_not(layer: Layer) -> str:
    if layer.structural:
        return say("it only holds other layers")
    return "" if layer.why_not is None else in_language(layer.why_not) or say("it cannot be checkpointed")
