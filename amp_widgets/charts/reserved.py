"""What torch's allocator holds while a step runs, over the mountain of what the step uses: allocated, inactive, reserved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from amp_widgets.charts.look import Colours
from amp_widgets.charts.peaks import AllocatorLike, memory_text
from amp_widgets.language import marked, say

NAMES = {
    "allocated": marked("allocated"),
    "inactive": marked("inactive"),
    "reserved": marked("reserved"),
}
"""As they are called in torch's `memory_stats`."""
EXPLAINED = marked(
    "Reserved is what torch took from the driver: nvidia-smi shows this, and some more for CUDA itself. Allocated is what "
    "tensors use of it, by torch's counter; inactive is free, but in pieces between them (fragmentation); the rest is kept"
)
RETRIES = marked("A retry: torch found no room, gave back what it kept, and asked the driver again, which is slow")


def reserved_traces(allocator: Sequence[AllocatorLike], x: npt.NDArray[np.float64], number: int, colours: Colours) -> list[Any]:
    """The lines and bands of all devices together.

    Parameters
    ----------
    allocator
        Of each device; at least one.
    x
        Where each point of the step is in the picture, and the end of the last.
    number
        Of the profile.
    """
    points, (allocated, inactive, reserved) = together(allocator)
    places = np.append(x[points], x[-1])
    heights = [np.append(height, height[-1]) for height in (allocated, allocated + inactive, reserved)]
    looks: tuple[tuple[str, dict[str, Any]], ...] = (
        ("allocated", {"line": _line(colours.text, 1.5, "1px,2px")}),
        ("inactive", {"line": _line(colours.muted, 1, "5px,3px"), "fill": "tonexty"} | _hatched(colours)),
        ("reserved", {"line": _line(colours.muted, 2, "9px,3px,2px,3px"), "fill": "tonexty", "fillcolor": _faint(colours.muted)}),
    )
    traces = []
    for (part, look), y in zip(looks, heights, strict=True):
        trace = {"type": "scatter", "mode": "lines", "x": places, "y": y, "name": say(NAMES[part]), "hoverinfo": "skip"}
        traces.append(trace | look | {"meta": {"profile": number, "part": part}})
    texts = [_text(*sizes) for sizes in zip(allocated, inactive, reserved, strict=True)]
    traces[-1] |= {"hoverinfo": "text", "hovertext": [*texts, texts[-1]]}
    return traces


def highest_reserved(allocator: Sequence[AllocatorLike]) -> int:
    """The most bytes that were reserved, or 0 without readings."""
    return int(together(allocator)[1][2].max()) if allocator else 0


def together(allocator: Sequence[AllocatorLike]) -> tuple[npt.NDArray[Any], tuple[npt.NDArray[Any], ...]]:
    """The points at which any device was read; and allocated, inactive and reserved bytes of all of them, each as last read."""
    points = np.unique(np.concatenate([readings.point for readings in allocator]))
    sums = [np.zeros(len(points), np.int64) for _ in range(3)]
    for readings in allocator:
        last = np.maximum(np.searchsorted(readings.point, points, side="right") - 1, 0)  # before its first: that one
        for total, sizes in zip(sums, (readings.allocated_bytes, readings.inactive_bytes, readings.reserved_bytes), strict=True):
            total += sizes[last]
    return points, tuple(sums)


_NOTHING = "rgba(0,0,0,0)"


def _line(colour: str, width: float, dash: str) -> dict[str, Any]:
    return {"color": colour, "width": width, "dash": dash, "shape": "hv"}


def _hatched(colours: Colours) -> dict[str, Any]:
    pattern = {"shape": "/", "fgcolor": colours.alarm, "bgcolor": _NOTHING, "fillmode": "overlay", "size": 6, "solidity": 0.25}
    return {"fillpattern": pattern, "fillcolor": _NOTHING}


def _text(allocated: int, inactive: int, reserved: int) -> str:
    sizes = (("reserved", reserved), ("inactive", inactive), ("allocated", allocated))
    lines = (
        say("{name} {size} ({count} bytes)", name=say(NAMES[name]), size=memory_text(size), count=f"{size:,d}")
        for name, size in sizes
    )
    return "<br>".join(("<b>" + say("torch's allocator") + "</b>", *lines))


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.12)"
