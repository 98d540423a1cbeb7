"""The gradients in a run file, read one by one as they are looked at: a long run has many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

from amp_widgets.core.gradient_counts import GradientCounts


class RecordedGradients(Sequence[GradientCounts]):
    """Of the steps that were counted, the newest last; of those looked at of late, the same objects every time.

    Attributes
    ----------
    steps
        Their numbers.
    """

    def __init__(self, steps: Sequence[int], read: Callable[[int], GradientCounts]) -> None:
        self.steps = tuple(steps)
        self._read = read

    def __len__(self) -> int:
        return len(self.steps)

    @overload
    def __getitem__(self, index: int) -> GradientCounts: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[GradientCounts, ...]: ...

    def __getitem__(self, index: int | slice) -> GradientCounts | tuple[GradientCounts, ...]:
        if isinstance(index, slice):
            return tuple(self._read(number) for number in range(len(self))[index])
        return self._read(range(len(self))[index])

    def __repr__(self) -> str:
        return f"<RecordedGradients of {len(self)} steps>"
