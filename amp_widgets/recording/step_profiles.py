"""A step's memory profile as JSON, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from amp_widgets.core.memory.profile import KINDS, AllocatorReadings, LayerProfile, Phase, StepProfile, frozen_sums
from amp_widgets.errors import AmpWidgetsError, RecordingError
from amp_widgets.language import Said


def profile_to_json(profile: StepProfile) -> dict[str, Any]:
    """What ``json.dumps`` takes; floats of NaN become null."""
    content: dict[str, Any] = {name: getattr(profile, name) for name in (*_TEXTS, "step")}
    if isinstance(profile.label, Said):
        content[_OF_USER] = True
    content.update({name: getattr(profile, name).tolist() for name in _ARRAYS})
    content.update({name: list(getattr(profile, name)) for name in _LISTS})
    content["phases"] = [dataclasses.asdict(phase) for phase in profile.phases]
    content["layers"] = [_without_nan(dataclasses.asdict(layer)) for layer in profile.layers]
    content["peak_by_layer"] = {layer: dict(kinds) for layer, kinds in profile.peak_by_layer.items()}
    content["allocator"] = [
        {field.name: _plain(getattr(readings, field.name)) for field in dataclasses.fields(readings)}
        for readings in profile.allocator
    ]
    return content


def profile_from_json(content: Any) -> StepProfile:
    """The profile that `profile_to_json` was given.

    Raises
    ------
    RecordingError
        When it is none.
    """
    try:
        return _profile(content)
    except (AmpWidgetsError, AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise RecordingError(
            f"a profile of a step cannot be read ({type(error).__name__}: {error}); the file is damaged"
        ) from None


_TEXTS = ("label", "device", "source")
_OF_USER = "label_of_user"
"""There, and true, where the label is what a user wrote, which no language changes; files from before do not say so."""
_LISTS = ("layer_names", "operator_names", "notes")
_ARRAYS: Mapping[str, type[np.generic]] = {
    "bytes_by_kind": np.int64, "time_s": np.float64, "layer_index": np.int32, "operator_index": np.int32,
}  # fmt: skip
_READINGS: Mapping[str, type[np.generic]] = {
    "point": np.int32, "allocated_bytes": np.int64, "inactive_bytes": np.int64, "reserved_bytes": np.int64,
}  # fmt: skip
_SECONDS = ("forward_s", "backward_s", "recompute_s")


def _profile(content: Mapping[str, Any]) -> StepProfile:
    arrays: dict[str, Any] = {name: np.array(content[name], dtype=dtype) for name, dtype in _ARRAYS.items()}
    points = len(arrays["time_s"])
    shapes = {name: array.shape for name, array in arrays.items()}
    expected = {name: (points, len(KINDS)) if name == "bytes_by_kind" else (points,) for name in arrays}
    if shapes != expected or not points:
        raise ValueError(f"arrays of shape {shapes}")
    for index, names in (("layer_index", "layer_names"), ("operator_index", "operator_names")):
        if arrays[index].min() < -1 or arrays[index].max() >= len(content[names]):
            raise ValueError(f"{index} out of range")
    texts: dict[str, Any] = {name: _text(content[name]) for name in _TEXTS}
    if content.get(_OF_USER) is True:
        texts["label"] = Said(texts["label"])
    lists: dict[str, Any] = {name: tuple(map(_text, content[name])) for name in _LISTS}
    return StepProfile(
        step=_whole(content["step"]),
        phases=tuple(
            Phase(name=_text(one["name"]), start=_whole(one["start"]), stop=_whole(one["stop"])) for one in content["phases"]
        ),
        layers=tuple(map(_layer, content["layers"])),
        peak_by_layer=frozen_sums(
            {layer: {kind: _whole(size) for kind, size in kinds.items()} for layer, kinds in content["peak_by_layer"].items()}
        ),
        allocator=tuple(map(_readings, content["allocator"])),
        **texts,
        **lists,
        **arrays,
    )


def _layer(content: Mapping[str, Any]) -> LayerProfile:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(LayerProfile):
        value = content[field.name]
        if field.name in _SECONDS:
            values[field.name] = float("nan") if value is None else float(value)
        elif field.name in ("name", "type", "dtype"):
            values[field.name] = _text(value)
        elif field.name in ("checkpointed", "whole"):
            values[field.name] = bool(value)
        else:
            values[field.name] = _whole(value)
    return LayerProfile(**values)


def _readings(content: Mapping[str, Any]) -> AllocatorReadings:
    arrays: dict[str, Any] = {name: np.array(content[name], dtype=dtype) for name, dtype in _READINGS.items()}
    counts: dict[str, Any] = {name: _whole(content[name]) for name in ("peak_allocated_bytes", "retries", "ooms")}
    return AllocatorReadings(device=_text(content["device"]), **arrays, **counts)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _without_nan(layer: dict[str, Any]) -> dict[str, Any]:
    return {name: None if value != value else value for name, value in layer.items()}  # NaN


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} where a text belongs")
    return value


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{type(value).__name__} where a whole number belongs")
    return value
