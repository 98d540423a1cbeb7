"""The gradients of one step, counted by size, layer by layer: what a `GradientProbe` makes. Free of torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt

Family = Literal["output", "parameter"]

LOWEST_EXPONENT, HIGHEST_EXPONENT = -126, 127
"""Of the normal numbers of fp32."""
BUCKETS = 767
"""See `amp_widgets.core.gradient_probe.bucket_of`."""
ZERO_BUCKET, SUBNORMAL_BUCKET, INF_BUCKET, NAN_BUCKET = 0, 1, 765, 766
MODEL = "(model)"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CountedGradients:
    """The gradients of one layer in one format.

    Attributes
    ----------
    layer
        Its name; the model itself is ``"(model)"``.
    family
        ``"output"``: gradients with respect to what the layer returns. ``"parameter"``: with respect to its own parameters, as
        they arrive, before they are added to those that are there.
    dtype
        The format that they are stored in, ``"fp16"`` for example. The gradient of an fp32 parameter is fp32, also where
        autocast has computed it in fp16.
    arrivals
        How many tensors they were.
    elements
        Of all of them; a complex number is two, its real and its imaginary part.
    looked_at
        How many of the elements were put into buckets: fewer than all are a sample.
    counts
        How many of all elements there are, by bucket: see `amp_widgets.core.gradient_probe.bucket_of`. Estimated where only a
        sample was looked at, each tensor with the weight of all its elements. Shape ``(BUCKETS,)``, float64.
    peaks
        The largest absolute value among *all* elements, also where only a sample was put into buckets: inf where one is inf, NaN
        where one is NaN. By the name of the parameter in its layer; that of outputs is ``""``.
    wide
        Whether autocast leaves it as it is, so that no fp16 is on its way: of the fp32 parameters of torch's normalisations and
        embeddings, and of complex ones.
    """

    layer: str
    family: Family
    dtype: str
    arrivals: int
    elements: int
    looked_at: int
    counts: npt.NDArray[np.float64]
    peaks: Mapping[str, float]
    wide: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GradientCounts:
    """The gradients of one step as they were stored: the true ones times the loss scale.

    Attributes
    ----------
    step
        Its number.
    scale
        The loss scale that was used; 1 where the loss was not scaled.
    rows
        In the order in which their first gradients were produced.
    notes
        What was not counted, in sentences.
    """

    step: int
    scale: float
    rows: tuple[CountedGradients, ...]
    notes: tuple[str, ...] = ()


def larger(one: float, other: float) -> float:
    """The larger of two; NaN where one is NaN."""
    return math.nan if math.isnan(one) or math.isnan(other) else max(one, other)
