"""Gradients of a step, made up: what a transformer's look like in fp16 or before."""

from __future__ import annotations

import math

import numpy as np

from amp_widgets.analysis.gradients import GradientRange
from amp_widgets.core.gradient_counts import BUCKETS, INF_BUCKET, ZERO_BUCKET, CountedGradients, GradientCounts


def row(
    layer: str, middle: float, width: float = 3.5, *, elements: int = 65_536, dtype: str = "fp16", zeros: int = 0, infs: int = 0
) -> CountedGradients:
    """Sizes spread normally in their exponents, around 2^middle."""
    exponents = np.arange(-126, 128)
    weights = np.exp(-((exponents - middle) ** 2) / (2 * width**2))
    each = np.rint(4096 * weights / weights.sum()).astype(np.int64)
    counts = np.zeros(BUCKETS)
    counts[4:INF_BUCKET:3] = each  # between the powers of two
    counts[ZERO_BUCKET], counts[INF_BUCKET] = zeros, infs
    looked_at = int(counts.sum())
    elements = max(elements, looked_at)
    peak = math.inf if infs else float(2.0 ** exponents[np.flatnonzero(each)[-1]] * 1.5)
    return CountedGradients(
        layer=layer, family="output", dtype=dtype, arrivals=1, elements=elements, looked_at=looked_at,
        counts=counts * (elements / looked_at), peaks={"": peak},
    )  # fmt: skip


def gpt_range(
    *, step: int = 240, scale: float = 1.0, blocks: int = 6, dtype: str = "fp32", name: str = "layers"
) -> GradientRange:
    """A GPT whose gradients get smaller towards its input; at scale 1 a good part of them would be below fp16's lower edge."""
    shift = np.log2(scale)
    rows = [row("head", -16 + shift, dtype=dtype)]
    for block in reversed(range(blocks)):
        rows += [
            row(f"{name}.{block}.mlp.fc2", -20 - 0.6 * (blocks - block) + shift, dtype=dtype),
            row(f"{name}.{block}.mlp.fc1", -21 - 0.6 * (blocks - block) + shift, dtype=dtype, zeros=90),
            row(f"{name}.{block}.attention", -22 - 0.6 * (blocks - block) + shift, dtype=dtype),
        ]
    return GradientRange.of(GradientCounts(step=step, scale=scale, rows=tuple(rows)))
