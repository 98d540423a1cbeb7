"""A number in every format: its bits, to be flipped, and what rounding, scaling and updating do to it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import traitlets

from amp_widgets.core.formats import fixed_point, int8
from amp_widgets.errors import FormatError
from amp_widgets.language import follow_language, in_language
from amp_widgets.widgets.control import Control, page_script
from amp_widgets.widgets.format_state import (
    HIGHEST_EXPONENT,
    LOWEST_EXPONENT,
    PRESETS,
    FormatLabState,
    Sample,
    Samples,
    format_rows,
    optimizer_sentence,
    picked_sentence,
    plain,
    preset_text,
    samples_of,
    scaled_rows,
    update_rows,
)
from amp_widgets.widgets.state import DashboardState
from amp_widgets.widgets.text import scale_text
from amp_widgets.widgets.typed_number import typed_number

LARGEST_SCALE_EXPONENT = 40


class FormatLab(Control):
    """What fp32, tf32, fp16, bf16, fp8, int8 and decimal fixed point store of a number.

    It belongs to no session and needs no torch.

    Parameters
    ----------
    value
        The number to begin with, or a text such as ``"2**-24"``.
    weights
        Weights of a model to try updates on: called without arguments it gives ``(label, w, g, lr)`` of each, now and whenever
        the user reads them again; or a mapping of label → ``(w, g)``.
    lr
        The learning rate for a mapping.

    Attributes
    ----------
    value
        The number; may be set.
    state
        All that is shown.

    Raises
    ------
    FormatError
        When the value or the weights cannot be read.
    """

    _esm = page_script("format_lab")
    _css = Control._css + (Path(__file__).parent / "format_lab.css").read_text(encoding="utf-8")

    value = traitlets.Float(help="Not sent: JSON has neither inf nor NaN.")

    text = traitlets.Unicode(help="The number as it was typed.").tag(sync=True)
    float64 = traitlets.Unicode(help="What was typed as a float64, where that reads otherwise.").tag(sync=True)
    exponent = traitlets.Int(help="Of two, on the slider.").tag(sync=True)
    exponents: traitlets.List[Any] = traitlets.List([LOWEST_EXPONENT, HIGHEST_EXPONENT], help="The ends.").tag(sync=True)
    presets: traitlets.List[Any] = traitlets.List(help="Name and text of each.").tag(sync=True)
    rows: traitlets.List[Any] = traitlets.List(help="One a format, see `format_rows`.").tag(sync=True)
    scale = traitlets.Unicode().tag(sync=True)
    scale_exponent = traitlets.Int(help="Of two: the nearest on the slider.").tag(sync=True)
    scaled: traitlets.List[Any] = traitlets.List(help="One a format, see `scaled_rows`.").tag(sync=True)
    int8_scale = traitlets.Unicode().tag(sync=True)
    digits: traitlets.List[Any] = traitlets.List(help="Before and after the point.").tag(sync=True)
    has_weights = traitlets.Bool(False).tag(sync=True)
    samples: traitlets.List[Any] = traitlets.List(help="Labels.").tag(sync=True)
    picked = traitlets.Int(0).tag(sync=True)
    picked_numbers = traitlets.Unicode().tag(sync=True)
    optimizer = traitlets.Unicode(help="What it does instead of taking lr·g, or nothing.").tag(sync=True)
    updates: traitlets.List[Any] = traitlets.List(help="One a format, see `update_rows`.").tag(sync=True)
    problems: traitlets.Dict[str, Any] = traitlets.Dict(help="Field → what is wrong with what was typed.").tag(sync=True)

    def __init__(
        self, value: float | str = 0.1, *, weights: Samples | Mapping[str, Sequence[float]] | None = None, lr: float = 0.01
    ) -> None:
        try:
            text = value if isinstance(value, str) else plain(value)
        except (TypeError, ValueError, OverflowError):
            raise FormatError(f"value: got {value!r}, expected a number or a text such as '2**-24'") from None
        if not (weights is None or isinstance(weights, Mapping) or callable(weights)):
            raise FormatError(f"weights: got {weights!r}, expected a callable, or a mapping of label → (w, g)")
        for label, pair in weights.items() if isinstance(weights, Mapping) else ():
            if not hasattr(pair, "__len__") or len(pair) != 2:
                raise FormatError(f"weights: got {pair!r} for {label!r}, expected (w, g)")
        self._weights, self._lr = weights, lr
        samples = () if weights is None else self._read()
        self._state = FormatLabState(value=typed_number(text), text=text, samples=samples)
        super().__init__(_nobody)
        self._put({"has_weights": weights is not None})
        self.speak()
        follow_language(self.speak)

    def speak(self) -> None:
        """Have all texts in the language that is in force now."""
        self._put({"presets": [[name, preset_text(name)] for name in PRESETS]})
        self.show(self._state)
        super().speak()  # the page's script last: it is drawn anew with it, and reads the others once

    @property
    def state(self) -> FormatLabState:
        """All that is shown."""
        return self._state

    def show(self, state: FormatLabState, problems: Mapping[str, str] | None = None) -> None:
        """Show this state; nothing is sent when it is what is shown.

        Parameters
        ----------
        state
            A number and how it is looked at.
        problems
            Field → what is wrong with what was typed into it.
        """
        self._state = state
        number = plain(state.value)
        self._put(
            {
                "value": state.value,
                "text": state.text,
                "float64": "" if number == state.text.strip() else number,
                "exponent": state.exponent,
                "rows": format_rows(state),
                "scale": state.scale_text,
                "scale_exponent": _nearest_exponent(state.scale),
                "scaled": scaled_rows(state),
                "int8_scale": plain(state.int8_scale),
                "digits": list(state.digits),
                "samples": [sample.label for sample in state.samples],
                "picked": state.picked,
                "picked_numbers": picked_sentence(state),
                "optimizer": optimizer_sentence(state),
                "updates": update_rows(state),
                "problems": dict(problems or {}),
            }
        )

    def close(self) -> None:
        """Close it, and forget the weights."""
        self._weights = None
        super().close()

    def __repr__(self) -> str:
        return f"<amp_widgets format lab: {plain(self.value)}>"

    @traitlets.observe("value")
    def _value_was_set(self, change: Mapping[str, Any]) -> None:
        if plain(change["new"]) != plain(self._state.value):
            self.show(self._state.with_value(change["new"]))

    def _traits_for(self, state: DashboardState) -> dict[str, Any]:
        return {}  # it shows a `FormatLabState`

    def _ask(self, message: Mapping[str, Any]) -> None:
        field = next((name for name in _FIELDS if name in message), "")
        try:
            self.show(self._after(message))
        except FormatError as error:
            self.show(self._state, {field: in_language(str(error))})

    def _after(self, message: Mapping[str, Any]) -> FormatLabState:
        """The state after what the user did; raises FormatError where that cannot be."""
        state = self._state
        match message:
            case {"text": str(text)}:
                return state.with_value(typed_number(text), text.strip())
            case {"exponent": int(exponent)}:
                return state.with_exponent(exponent)
            case {"flip": [str(name), int(bit)]}:
                return state.with_flipped(name, bit)
            case {"scale": str(text)}:
                return _with_scale(state, _scale_of(text), text)
            case {"scale_exponent": int(exponent)}:
                return _with_scale(state, 2.0 ** min(max(exponent, 0), LARGEST_SCALE_EXPONENT))
            case {"int8_scale": str(text)}:
                scale = typed_number(text)
                int8(scale)
                return replace(state, int8_scale=scale, flipped=None)
            case {"digits": [before, after]}:
                before, after = _count(before), _count(after)
                fixed_point(before, after)
                return replace(state, digits=(before, after))
            case {"preset": str(name)} if name in PRESETS:
                return replace(state, **{"flipped": None, **PRESETS[name]})
            case {"pick": int(index)} if 0 <= index < len(state.samples):
                return replace(state, picked=index)
            case {"look": "w" | "g" as which} if state.samples:
                return state.with_value(getattr(state.samples[state.picked], which))
            case {"read": True} if self._weights is not None:
                samples = self._read()
                return replace(state, samples=samples, picked=_same(state, samples))
        return state

    def _read(self) -> tuple[Any, ...]:
        assert self._weights is not None
        try:
            return samples_of(self._weights, self._lr)
        except FormatError:
            raise
        except Exception as error:  # it is the code of whoever made the lab, and a page cannot show a traceback
            raise FormatError(f"the weights could not be read: {type(error).__name__}: {error}") from error


_FIELDS = ("text", "scale", "int8_scale", "digits", "read", "flip")


def _count(typed: Any) -> Any:
    """A whole number where one was typed; anything else as it is, to be refused by name."""
    return int(typed) if isinstance(typed, str) and typed.isdecimal() and len(typed) < 4 else typed


def _same(state: FormatLabState, samples: Sequence[Sample]) -> int:
    """Where the chosen weight is among others: by its label, or else one of the same parameter."""
    if not state.samples:
        return 0
    label = state.samples[state.picked].label
    labels = [sample.label for sample in samples]
    if label in labels:
        return labels.index(label)
    names = [one.partition("[")[0] for one in labels]
    name = label.partition("[")[0]
    return names.index(name) if name in names else 0


def _scale_of(text: str) -> float:
    """A number, also as it is shown: ``2^10 = 1024``."""
    first, *others = (typed_number(part) for part in text.split("="))
    for other in others:
        if other != first:
            raise FormatError(f"got {text.strip()!r}, expected one number: {plain(first)} is not {plain(other)}")
    return first


def _with_scale(state: FormatLabState, scale: float, text: str | None = None) -> FormatLabState:
    if not 0 < scale < math.inf:
        raise FormatError(f"got {plain(scale)}, expected a finite number above 0, such as 1000 or 2^16")
    return replace(state, scale=scale, scale_text=scale_text(scale) if text is None else text.strip())


def _nearest_exponent(scale: float) -> int:
    return min(max(round(math.log2(scale)), 0), LARGEST_SCALE_EXPONENT)


def _nobody(**_changes: Any) -> None:
    """A lab asks nobody: it works on its own."""
