"""The combinations of settings that are compared: formats of autocast, each with several sets of checkpointed layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from amp_widgets.core.checkpointing import Checkpointing, Layer
from amp_widgets.core.fp32_layers import Fp32Layers
from amp_widgets.core.loop import LiveLoop
from amp_widgets.core.settings import AUTOCAST_NAMES, FIELD_NAMES, Settings
from amp_widgets.errors import SettingsError


class HasLayers(Protocol):
    """A plan."""

    @property
    def layers(self) -> Sequence[str]: ...


LayerChoice = HasLayers | Iterable[str]
Grid = Mapping[str, Any]
"""``{name: changes}``, or ``{"autocast": [...], "checkpointed": [...]}``."""

REFERENCE = "fp32/none"
"""What everything is compared with: no autocast, no layer checkpointed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Corner:
    """One combination.

    Attributes
    ----------
    label
        For people, such as ``"bf16/all"``; no two have the same.
    layers_name
        What its set of checkpointed layers is called.
    settings
        With names of layers, no globs.
    """

    label: str
    layers_name: str
    settings: Settings

    @property
    def is_reference(self) -> bool:
        """Whether it is what the others are compared with."""
        return self.settings.autocast == "fp32" and not self.settings.checkpointed


def corners_of(loop: LiveLoop, grid: Grid | None, planned: LayerChoice | None) -> tuple[tuple[Corner, ...], tuple[str, ...]]:
    """What a grid means for a loop.

    Parameters
    ----------
    loop
        Whose settings in force hold for all that the grid does not say.
    grid
        ``{name: changes}``, where changes are settings by name; or ``{"autocast": [...], "checkpointed": [...]}``, of which every
        combination is meant, and what is missing is as by default. Layers are names and globs, a plan, or one of the words
        ``"none"``, ``"all"``, ``"planned"`` and ``"chosen"``. None: every format, with each of the four that there is.
    planned
        The layers of a plan.

    Returns
    -------
    corners, left_out
        The reference first, and the others in the grid's order; sentences on what was left out.

    Raises
    ------
    SettingsError
        When the grid is none, names a setting or a layer that is not there, or nothing of it can be compared.
    """
    made = _Making(loop, planned)
    given: object = grid
    if given is not None and not (isinstance(given, Mapping) and given):
        got = "nothing in it" if isinstance(given, Mapping) else f"a {type(given).__name__}"
        raise SettingsError(f"grid: got {got}, expected {_EXPECTED}")
    grid = grid or {}
    if grid.keys() <= _AXES and not any(isinstance(value, (Mapping, Settings)) for value in grid.values()):
        made.product(grid)
    else:
        made.named(grid)
    if not made.corners:
        raise SettingsError(f"grid: nothing is left to compare. {' '.join(made.left_out)}".rstrip())
    reference = next((corner for corner in made.corners if corner.is_reference), None)
    if reference is None:
        label = f"{REFERENCE} (reference)" if REFERENCE in grid else REFERENCE  # their own may be called that
        made.add(label, "none", autocast="fp32", checkpointed=())
        reference = made.corners[-1]
    return (reference, *(corner for corner in made.corners if corner is not reference)), tuple(made.left_out)


def all_layers(layers: Sequence[Layer]) -> tuple[str, ...]:
    """Every part of a model that can be checkpointed, as a person would do it: block by block.

    Those are the outermost layers that can be. In place of one that holds a list of others (``nn.ModuleList``), or more than
    half of the model's parameters, its parts are taken: a checkpoint around most of a model frees next to nothing, as its
    recompute holds it all.
    """
    whole = sum(layer.parameters for layer in layers if "." not in layer.name)
    lists: set[str] = set()  # layers around one that is structural
    blocks: set[str] = set()  # layers around one that can be checkpointed
    for layer in layers:
        if not _is_parametrization(layer) and (layer.structural or layer.why_not is None):
            (lists if layer.structural else blocks).update(_around(layer.name))
    found: dict[str, None] = {}
    for layer in layers:
        if layer.structural or layer.why_not is not None or _is_parametrization(layer):
            continue
        in_parts = layer.name in blocks and (layer.name in lists or 2 * layer.parameters > whole)
        if not in_parts and not any(outer in found for outer in _around(layer.name)):
            found[layer.name] = None
    return tuple(found)


_AXES = {"autocast", "checkpointed"}
_WORDS = ("none", "all", "planned", "chosen")
_EXPECTED = (
    "{name: changes}, such as {'mixed': {'autocast': 'bf16'}}, or {'autocast': ['fp32', 'bf16'], 'checkpointed': ['none', 'all']}"
)


class _Making:
    def __init__(self, loop: LiveLoop, planned: LayerChoice | None) -> None:
        model = loop.model
        assert model is not None
        self.corners: list[Corner] = []
        self.left_out: list[str] = []
        self._loop = loop
        self._checkpointing = Checkpointing(model)
        self._fp32_layers = Fp32Layers(model)
        self._sets: dict[str, tuple[str, ...]] = {"none": (), "all": all_layers(loop.layers)}
        if planned is not None:
            self._sets["planned"] = self._resolved(planned)
        self._sets["chosen"] = loop.settings.checkpointed

    def product(self, grid: Grid) -> None:
        """Every format with every set of layers."""
        formats = _as_list(grid.get("autocast", AUTOCAST_NAMES))
        choices = self._own_choices(grid["checkpointed"]) if "checkpointed" in grid else self._default_choices()
        for autocast in formats:
            for name, layers in choices.items():
                if not self.add(f"{autocast}/{name}", name, autocast=autocast, checkpointed=layers):
                    break

    def named(self, grid: Mapping[Any, Any]) -> None:
        """Corners with names of their own."""
        for label, given in grid.items():
            if not isinstance(label, str) or not isinstance(given, (Mapping, Settings)):
                raise SettingsError(f"grid: got {label!r}: {given!r}, expected {_EXPECTED}")
            changes = {name: getattr(given, name) for name in FIELD_NAMES} if isinstance(given, Settings) else dict(given)
            name = "chosen" if self._loop.settings.checkpointed else "none"
            if "checkpointed" in changes:
                ((name, layers),) = self._own_choices([changes["checkpointed"]]).items()
                changes["checkpointed"] = layers
            self.add(label, name, **changes)

    def add(self, label: str, layers_name: str, **changes: Any) -> bool:
        """Whether the device can do it."""
        settings = self._loop.settings.replace(**changes)
        if "fp32_layers" in changes:
            settings = settings.replace(fp32_layers=self._fp32_layers.resolve(settings.fp32_layers))
        support = self._loop.support[settings.autocast]
        if not support.available:
            sentence = f"{settings.autocast} is left out: {support.note or f'{self._loop.device} does not have it'}."
            if sentence not in self.left_out:
                self.left_out.append(sentence)
            return False
        self.corners.append(Corner(label=label, layers_name=layers_name, settings=settings))
        return True

    def _default_choices(self) -> dict[str, tuple[str, ...]]:
        """Those of the four that there are, each set of layers once."""
        choices: dict[str, tuple[str, ...]] = {}
        for name, layers in self._sets.items():
            same = next((other for other, its in choices.items() if its == layers), None)
            if same is None:
                choices[name] = layers
            elif name == "all":
                self.left_out.append("all is left out: this model has no layer inside it that can be checkpointed.")
            elif name == "planned":
                self.left_out.append(f"planned is left out: its layers are those of {same}.")
        return choices

    def _own_choices(self, given: Any) -> dict[str, tuple[str, ...]]:
        """Sets of layers by what they are called."""
        choices: dict[str, tuple[str, ...]] = {}
        for choice in [given] if isinstance(given, str) or hasattr(given, "layers") else given:
            if isinstance(choice, str) and choice in _WORDS:
                if choice not in self._sets:
                    raise SettingsError(f"grid: got {choice!r}, but no plan; pass one: compare(..., planned=plan)")
                name, layers = choice, self._sets[choice]
            else:
                layers = self._resolved(choice)
                count = f"{len(layers)} layer{'s' * (len(layers) != 1)}"
                name = choice if isinstance(choice, str) else count if layers else "none"
            known = sum(other == name or other.startswith(f"{name} (") for other in choices)
            choices[f"{name} ({known + 1})" if known else name] = layers
        if not choices:
            raise SettingsError(f"grid: got no layers for checkpointed, expected {_EXPECTED}")
        return choices

    def _resolved(self, choice: LayerChoice) -> tuple[str, ...]:
        wanted: Any = getattr(choice, "layers", choice)
        if not isinstance(wanted, Iterable):
            raise SettingsError(
                f"checkpointed: got {wanted!r}, expected layer names or globs, such as ['layers.*'], a plan, or one of "
                f"{', '.join(map(repr, _WORDS))}"
            )
        return self._checkpointing.resolve(wanted)


def _as_list(value: Any) -> list[Any]:
    return [value] if isinstance(value, str) else list(dict.fromkeys(value))


def _is_parametrization(layer: Layer) -> bool:
    return "parametrizations" in layer.name.split(".")


def _around(name: str) -> list[str]:
    """The names of the layers that it is in."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]
