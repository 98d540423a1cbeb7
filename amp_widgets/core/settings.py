"""The settings of a session: frozen, validated, and free of torch."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from amp_widgets.errors import SettingsError

AutocastName = Literal["fp32", "fp16", "bf16"]
AUTOCAST_NAMES: tuple[AutocastName, ...] = get_args(AutocastName)

SMALLEST_SAFE_SCALE = 2.0**-126
"""Below this, the reciprocal that unscales the gradients leaves fp32's normal range: from 2^-128 on it is inf, no step is
skipped and the parameters become NaN."""
LARGEST_SAFE_SCALE = 2.0**126
"""Above this, the reciprocal is subnormal in fp32, which a device may flush to zero: the gradients would vanish."""


@runtime_checkable
class Planned(Protocol):
    """What names layers to be checkpointed, and is more than their names."""

    @property
    def layers(self) -> Iterable[str]:
        """Names, or globs."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What a session has in force.

    Parameters
    ----------
    autocast
        Number format of autocast regions: ``"fp32"`` (autocast disabled), ``"fp16"`` or ``"bf16"``.
    scaling
        Scale the loss when autocast is fp16. For fp32 and bf16 the scaler passes through, whatever this says.
    init_scale
        The loss scale that the scaler starts from, or was last set to.
    growth_factor
        The scale is multiplied by this after `growth_interval` steps in a row without inf or NaN; above 1.
    backoff_factor
        The scale is multiplied by this after a step with inf or NaN in the gradients; between 0 and 1, both excluded.
    growth_interval
        Steps, at least 1.
    min_scale, max_scale
        Floor and cap of the live scale, or None; an initial scale outside of them is held to them.
    checkpointed
        Names of the checkpointed layers, in the model's order. In a request, globs too: ``*`` stands for one part of a
        dotted name, ``**`` for any number of parts. A `Planned`, such as a plan for a memory budget, stands for its layers;
        one that does not fit its budget is refused, and in a request one for another format, too.
    fp32_layers
        Names of the layers that are kept in FP32 while autocast is on, in the model's order. In a request, globs too.

    Raises
    ------
    SettingsError
        On construction, when a value is not one that can be in force.

    Notes
    -----
    The defaults are what the user had before: no autocast, and the defaults of ``torch.amp.GradScaler``.
    """

    autocast: AutocastName = "fp32"
    scaling: bool = True
    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float | None = None
    max_scale: float | None = None
    checkpointed: tuple[str, ...] = ()
    fp32_layers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        put = object.__setattr__  # the class is frozen to others
        put(self, "autocast", _autocast_name(self.autocast))
        if not isinstance(self.scaling, bool):
            raise SettingsError(f"scaling: got {self.scaling!r}, expected True or False")
        put(self, "init_scale", _scale("init_scale", self.init_scale))
        put(self, "growth_factor", _number("growth_factor", self.growth_factor))
        put(self, "backoff_factor", _number("backoff_factor", self.backoff_factor))
        if not (1.0 < self.growth_factor < math.inf):
            raise SettingsError(f"growth_factor: got {self.growth_factor!r}, expected a finite number above 1, such as 2.0")
        if not (0.0 < self.backoff_factor < 1.0):
            raise SettingsError(f"backoff_factor: got {self.backoff_factor!r}, expected a number between 0 and 1, such as 0.5")
        put(self, "growth_interval", _positive_int("growth_interval", self.growth_interval))
        for name in ("min_scale", "max_scale"):
            value = getattr(self, name)
            if value is not None:
                put(self, name, _scale(name, value))
        if self.min_scale is not None and self.max_scale is not None and self.min_scale > self.max_scale:
            raise SettingsError(
                f"min_scale: got {format_scale(self.min_scale)}, which is above max_scale {format_scale(self.max_scale)}; "
                "expected min_scale <= max_scale"
            )
        planned: object = self.checkpointed
        put(self, "checkpointed", _names("checkpointed", _planned_layers(planned) if isinstance(planned, Planned) else planned))
        put(self, "fp32_layers", _names("fp32_layers", self.fp32_layers))

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled with these settings: scaling is on and autocast is fp16."""
        return self.scaling and self.autocast == "fp16"

    @property
    def start_scale(self) -> float:
        """The initial scale, held to the floor and the cap."""
        return self.held(self.init_scale)

    def held(self, scale: float) -> float:
        """A scale, held to the floor and the cap, and to the safe range where there is none."""
        low = SMALLEST_SAFE_SCALE if self.min_scale is None else self.min_scale
        high = LARGEST_SAFE_SCALE if self.max_scale is None else self.max_scale
        return min(max(scale, low), high)

    def replace(self, **changes: Any) -> Settings:
        """These settings with some `changes`.

        Raises
        ------
        SettingsError
            When a name is unknown or a value cannot be in force.
        """
        for name in changes:
            if name not in FIELD_NAMES:
                near = difflib.get_close_matches(name, FIELD_NAMES, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(FIELD_NAMES)}"
                raise SettingsError(f"{name}: there is no such setting; {hint}")
        return dataclasses.replace(self, **changes)

    def differences(self, other: Settings) -> dict[str, tuple[Any, Any]]:
        """Name → (value here, value in `other`) of every setting that differs."""
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in FIELD_NAMES}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


FIELD_NAMES: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(Settings))


def format_scale(scale: float) -> str:
    """A loss scale for people: ``2^16`` for a power of two, else the shortest decimal.

    >>> format_scale(65536.0), format_scale(3.0)
    ('2^16', '3')
    """
    if scale > 0 and math.isfinite(scale):
        mantissa, exponent = math.frexp(scale)
        if mantissa == 0.5:
            return f"2^{exponent - 1}"
    return f"{scale:g}"


def describe_changes(changes: Mapping[str, Any]) -> str:
    """One line for people: ``autocast fp16, init_scale 2^16, 4 layers checkpointed``."""
    return ", ".join(_describe(name, value) for name, value in changes.items())


def describe_settings(settings: Settings) -> str:
    """What is in force, in a few words: ``fp16 + 4 layers checkpointed``."""
    layers = [_describe(name, getattr(settings, name)) for name in _LAYERS if getattr(settings, name)]
    return " + ".join([settings.autocast, *layers])


def _describe(name: str, value: Any) -> str:
    if name in _LAYERS:
        count = len(value)
        return f"no layer {_LAYERS[name]}" if count == 0 else f"{count} layer{'s' if count > 1 else ''} {_LAYERS[name]}"
    if name == "scaling":
        return "scaling on" if value else "scaling off"
    if name in ("init_scale", "min_scale", "max_scale"):
        return f"{name} {'none' if value is None else format_scale(value)}"
    if isinstance(value, float):
        return f"{name} {value:g}"
    return f"{name} {value}"


_LAYERS = {"checkpointed": "checkpointed", "fp32_layers": "kept in FP32"}
"""Settings that consist of layers, and what is said of these."""


def _autocast_name(value: object) -> AutocastName:
    for name in AUTOCAST_NAMES:
        if value == name:
            return name
    allowed = ", ".join(repr(name) for name in AUTOCAST_NAMES)
    near = _AUTOCAST_ALIASES.get(str(value).removeprefix("torch.").lower())
    hint = f"; did you mean {near!r}?" if near else ""
    raise SettingsError(f"autocast: got {value!r}, expected one of {allowed}{hint}")


_AUTOCAST_ALIASES: dict[str, AutocastName] = {
    "float32": "fp32", "float": "fp32", "f32": "fp32", "float16": "fp16", "half": "fp16", "f16": "fp16",
    "bfloat16": "bf16", "none": "fp32", "off": "fp32", "fp_16": "fp16", "bf_16": "bf16",
}  # fmt: skip


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        try:
            if isinstance(value, (bool, str, bytes)):
                raise TypeError
            value = float(value)  # type: ignore[arg-type]  # numpy and torch scalars
        except (TypeError, ValueError):
            raise SettingsError(f"{name}: got {value!r}, expected a number") from None
    try:
        return float(value)
    except OverflowError:
        raise SettingsError(f"{name}: got a number too large for a float, expected a finite number") from None


def _scale(name: str, value: object) -> float:
    number = _number(name, value)
    if not (math.isfinite(number) and number > 0):
        raise SettingsError(f"{name}: got {value!r}, expected a positive finite number, such as 2**16")
    if not (SMALLEST_SAFE_SCALE <= number <= LARGEST_SAFE_SCALE):
        raise SettingsError(
            f"{name}: got {format_scale(number)}, expected a scale from 2^-126 to 2^126: outside of it the scale or its "
            "reciprocal leaves fp32's normal range, and the gradients with it"
        )
    return number


def _positive_int(name: str, value: object) -> int:
    number = _number(name, value)
    if not number.is_integer() or not 1 <= number <= 2**31 - 1:
        raise SettingsError(f"{name}: got {value!r}, expected a whole number of steps from 1 to 2147483647")
    return int(number)


def check_made_for(planned: Planned, settings: Settings) -> None:
    """Check that a plan was made for what will be in force with it: a step holds more, or less, in another format.

    Raises
    ------
    SettingsError
        When it says that it was made for something else.
    """
    autocast = getattr(planned, "autocast", settings.autocast)
    kept = tuple(getattr(planned, "fp32_layers", settings.fp32_layers))
    if autocast != settings.autocast:
        raise SettingsError(
            f"checkpointed: got a plan for {autocast}, expected one for {settings.autocast}, which will be in force. Plan again "
            f"in {settings.autocast}, or request autocast={autocast!r} with it; to checkpoint its layers all the same, request "
            "checkpointed=plan.layers"
        )
    if autocast != "fp32" and set(kept) != set(settings.fp32_layers):
        raise SettingsError(
            "checkpointed: got a plan made with other layers kept in FP32, expected one made with those that will be so with it. "
            "Plan again, or request fp32_layers=plan.fp32_layers with it; to checkpoint its layers all the same, request "
            "checkpointed=plan.layers"
        )


def _planned_layers(planned: Planned) -> Iterable[str]:
    if not getattr(planned, "fits", True):
        sentence = getattr(planned, "sentence", planned)
        raise SettingsError(
            f"checkpointed: got a plan that does not keep within its budget, expected one that fits. {sentence}. To checkpoint "
            "its layers all the same, request checkpointed=plan.layers"
        )
    return planned.layers


def _names(setting: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Iterable):
        raise SettingsError(f"{setting}: got {value!r}, expected layer names or globs, such as ['layers.*']")
    names = tuple(value)
    for name in names:
        if not isinstance(name, str):
            raise SettingsError(f"{setting}: got {name!r} in the list, expected layer names or globs, such as 'layers.*'")
    return names
