"""A profiled step that can be drawn, and its layers as a table."""

from __future__ import annotations

import dataclasses
import html
import math
import statistics
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, overload

from amp_widgets.core.globs import is_glob, parts_match
from amp_widgets.core.memory.profile import LayerProfile, StepProfile, check_profile, memory_text
from amp_widgets.core.table import table_html, table_text, told
from amp_widgets.errors import AmpWidgetsError, LayerError
from amp_widgets.language import in_language, marked_all, say

if TYPE_CHECKING:
    import plotly.graph_objects as go


class ProfiledStep(StepProfile):
    """What a session gives: a `StepProfile` with a picture."""

    __slots__ = ()

    @classmethod
    def of(cls, profile: StepProfile) -> ProfiledStep:
        """The same profile; itself, where it is one."""
        if isinstance(profile, cls):
            return profile
        return cls(**{field.name: getattr(profile, field.name) for field in dataclasses.fields(profile)})

    def to_figure(
        self, before: StepProfile | None = None, *, title: str | None = None, theme: Literal["light", "dark"] = "light"
    ) -> go.Figure:
        """The memory of the step as areas stacked by kind, over its phases.

        Parameters
        ----------
        before
            Another step, drawn as an outline behind this one; the title then says what became of the peak.
        title
            In place of the sentence about the peak; ``""`` for none.
        theme
            ``"light"`` or ``"dark"``.

        Raises
        ------
        AmpWidgetsError
            When `before` is no profile, or there is no such theme.
        MissingExtraError
            When plotly is not installed.
        """
        if before is not None:
            check_profile(before, "to_figure")
        if theme not in ("light", "dark"):
            raise AmpWidgetsError(f"to_figure: got {theme!r} as the theme, expected 'light' or 'dark'")
        from amp_widgets.charts.mountain import mountain_figure

        return mountain_figure((self,) if before is None else (before, self), title=title, theme=theme)


class LayerProfiles(Sequence[LayerProfile]):
    """The model itself and its layers in a profiled step, in the model's order: a sequence that shows itself as a table.

    Layers that are alike have the same times, the median of theirs: one step measures each of them once, and what else the
    machine does meanwhile is in it.

    Parameters
    ----------
    layers
        What is kept of them.
    label
        Of the step, for people.
    """

    def __init__(self, layers: Sequence[LayerProfile], *, label: str) -> None:
        self._layers = tuple(layers)
        self.label = label

    @classmethod
    def of(cls, profile: StepProfile, pattern: str = "**") -> LayerProfiles:
        """Those of a `profile` whose name fits `pattern`, a name or glob.

        ``*`` stands for one part of a dotted name, ``**`` for any number of parts. The model itself is ``"(model)"``, and among
        globs in ``"**"`` alone.

        Raises
        ------
        LayerError
            When none does.
        """
        if not isinstance(pattern, str):
            raise LayerError(f"layer_profile: got {pattern!r} as layers, expected a name, or a glob such as '**'")
        kept = [layer for layer in _with_times_of_their_kind(profile.layers) if _fits(layer, pattern)]
        if not kept:
            names = [layer.name for layer in profile.layers if not layer.whole]
            such_as = f"one of {', '.join(names[:6])}{', …' * (len(names) > 6)}" if names else "a model with layers"
            raise LayerError(f"layer_profile: no layer matches {pattern!r}, expected {such_as}, or a glob such as '**'")
        return cls(kept, label=profile.label)

    @overload
    def __getitem__(self, index: int | str) -> LayerProfile: ...
    @overload
    def __getitem__(self, index: slice) -> LayerProfiles: ...
    def __getitem__(self, index: int | str | slice) -> LayerProfile | LayerProfiles:
        """By position, by name, or a part of them.

        Raises
        ------
        LayerError
            When there is no layer of that name.
        """
        if isinstance(index, slice):
            return LayerProfiles(self._layers[index], label=self.label)
        if isinstance(index, int):
            return self._layers[index]
        for layer in self._layers:
            if layer.name == index:
                return layer
        raise LayerError(f"layer_profile: there is no layer {index!r} here, expected one of [layer.name for layer in ...]")

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator[LayerProfile]:
        return iter(self._layers)

    def __repr__(self) -> str:
        title = say("layers of {label}", label=repr(in_language(self.label)))
        return "\n".join([title, *table_text(self._rows(), words=_WORDS), in_language(_ESTIMATES)])

    def _repr_html_(self) -> str:
        label, estimates = html.escape(in_language(self.label)), html.escape(in_language(_ESTIMATES))
        return f"<div><b>{label}</b>{table_html(self._rows(), words=_WORDS)}<div>{estimates}</div></div>"

    def _rows(self) -> list[list[str]]:
        return told([_HEADINGS, *map(_cells, self._layers)], sentences=())


_HEADINGS = marked_all("layer", "type", "dtype", "parameters", "held", "output", "forward", "backward", "saves ≈", "costs ≈")
_WORDS = (0, 1, 2)
_TIMES = ("forward_s", "backward_s", "recompute_s")
_ESTIMATES = (
    "Numbers include the layers inside a layer; (model) is the whole forward pass, without the loss. held: from forward to "
    "backward. saves ≈ and costs ≈ estimate what checkpointing the layer does: held without its output, and its forward pass "
    "once more; where it is checkpointed, costs is its recompute, measured. Times are of one step; of layers that are alike, the "
    "median."
)


def _with_times_of_their_kind(layers: Sequence[LayerProfile]) -> list[LayerProfile]:
    """Layers with the same class, sizes, format and calls as each other get the medians of their times."""
    alike: dict[Hashable, list[LayerProfile]] = {}
    for layer in layers:
        alike.setdefault(_kind(layer), []).append(layer)
    medians = {
        kind: {name: statistics.median(getattr(layer, name) for layer in same) for name in _TIMES} for kind, same in alike.items()
    }
    return [dataclasses.replace(layer, **medians[_kind(layer)]) for layer in layers]


def _kind(layer: LayerProfile) -> Hashable:
    """What layers that do the same have in common; also which of their times are known, so that a median is of numbers."""
    unknown = [math.isnan(getattr(layer, name)) for name in _TIMES]
    sizes = layer.parameter_bytes, layer.activation_bytes, layer.output_bytes
    return (layer.type, *sizes, layer.calls, layer.dtype, layer.checkpointed, layer.whole, *unknown)


def _cells(layer: LayerProfile) -> tuple[str, ...]:
    saves = "" if math.isnan(layer.saved_bytes) else memory_text(layer.saved_bytes)
    return (
        layer.name,
        layer.type,
        layer.dtype,
        memory_text(layer.parameter_bytes),
        memory_text(layer.activation_bytes),
        memory_text(layer.output_bytes),
        _milliseconds(layer.forward_s),
        _milliseconds(layer.backward_s),
        "checkpointed" if layer.checkpointed else saves,
        _milliseconds(layer.cost_s),
    )


def _milliseconds(duration_s: float) -> str:
    return "" if math.isnan(duration_s) else f"{1e3 * duration_s:.2f} ms"


def _fits(layer: LayerProfile, pattern: str) -> bool:
    if not is_glob(pattern):
        return layer.name == pattern
    return parts_match([] if layer.whole else layer.name.split("."), pattern.split("."))
