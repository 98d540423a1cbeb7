"""What torch's CUDA allocator would make of a sequence of allocations: its blocks and segments, without a device.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/AllocatorConfig.h`` in torch 2.13, with the default
settings of ``PYTORCH_CUDA_ALLOC_CONF``, on one stream, and with a device on which everything fits.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import defaultdict
from typing import Any

import numpy as np
import numpy.typing as npt

from amp_widgets.core.memory.lives import GRADIENT, OPTIMIZER
from amp_widgets.core.memory.profile import PHASES
from amp_widgets.core.memory.step_record import StepRecord

MIN_BLOCK_BYTES = 512
"""Every size is rounded up to a multiple of this (``kMinBlockSize``)."""
SMALL_BYTES = 1 << 20
"""The largest size that comes from the pool of small blocks (``kSmallSize``)."""
SMALL_SEGMENT_BYTES = 2 << 20
"""What is asked of the device for small blocks (``kSmallBuffer``)."""
MIN_LARGE_BYTES = 10 << 20
"""From this size on, a segment is made for the one block (``kMinLargeAlloc``)."""
LARGE_SEGMENT_BYTES = 20 << 20
"""What is asked of the device for blocks between the two (``large_segment_size``)."""
ROUND_LARGE_BYTES = 2 << 20
"""The segment of one large block is a multiple of this (``kRoundLarge``)."""


def rounded_bytes(nbytes: int) -> int:
    """What an allocation of `nbytes` takes of a block: nothing for nothing, else at least `MIN_BLOCK_BYTES`."""
    return -(-nbytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES


def segment_bytes(block_bytes: int) -> int:
    """What is asked of the device where no free block is large enough for one of `block_bytes`, which is rounded already."""
    if block_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < MIN_LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-block_bytes // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES


@dataclasses.dataclass(slots=True, eq=False)
class Block:
    """A part of a segment, in use or free.

    Attributes
    ----------
    segment, offset_bytes
        Where it lies; segments are numbered in the order in which they were made.
    nbytes
        Its size, rounded.
    small
        Which of the two pools it belongs to.
    free
        Whether it waits in its pool.
    before, after
        Its neighbours in the segment.
    """

    segment: int
    offset_bytes: int
    nbytes: int
    small: bool
    free: bool = False
    before: Block | None = None
    after: Block | None = None


class CachingAllocator:
    """Blocks are found, split and joined as torch's allocator does it.

    The smallest free block that is large enough is taken, of equal ones that with the lowest address, where addresses are
    taken to ascend from segment to segment. What is left of it becomes a free block of its own: in the small pool always, in
    the large one where it is more than `SMALL_BYTES`. A freed block is joined with free neighbours. Nothing is given back to
    the device.

    Attributes
    ----------
    allocated_bytes, reserved_bytes
        Of all blocks in use, and of all segments.
    peak_allocated_bytes, peak_reserved_bytes
        The most that there were.
    """

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self._segments = 0
        self._free: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}  # of each pool: size, segment, offset; sorted
        self._blocks: dict[tuple[int, int], Block] = {}  # the free ones, by segment and offset

    @property
    def peak_reserved_bytes(self) -> int:
        """The same as `reserved_bytes`, as nothing is given back."""
        return self.reserved_bytes

    def allocate(self, nbytes: int) -> Block | None:
        """A block for so many bytes; None for none, for which torch takes no memory."""
        if nbytes <= 0:
            return None
        size = rounded_bytes(nbytes)
        small = size <= SMALL_BYTES
        block = self._take(size, small) or self._new_segment(size, small)
        rest = block.nbytes - size
        if rest >= MIN_BLOCK_BYTES if small else rest > SMALL_BYTES:
            self._split(block, size)
        self.allocated_bytes += block.nbytes  # the whole block, with what was too little to be split off
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block | None) -> None:
        """Give a block back.

        Raises
        ------
        ValueError
            When it is free already.
        """
        if block is None:
            return
        if block.free:
            raise ValueError(f"got a block of {block.nbytes} bytes that is free already, expected one in use")
        self.allocated_bytes -= block.nbytes
        after, before = block.after, block.before
        if after is not None and after.free:
            self._remove(after)
            _absorb(block, after)
        if before is not None and before.free:
            self._remove(before)
            _absorb(before, block)
            block.free = True  # whoever still has it cannot free it again
            block = before
        self._insert(block)

    def reset_peak(self) -> None:
        """As ``torch.cuda.reset_peak_memory_stats``, of what is allocated."""
        self.peak_allocated_bytes = self.allocated_bytes

    # ---- private ----------------------------------------------------------------------------------------------------

    def _take(self, size: int, small: bool) -> Block | None:
        """The smallest free block that is large enough, out of its pool."""
        free = self._free[small]
        at = bisect.bisect_left(free, (size, -1, -1))
        if at == len(free):
            return None
        _, segment, offset = free.pop(at)
        block = self._blocks.pop((segment, offset))
        block.free = False
        return block

    def _new_segment(self, size: int, small: bool) -> Block:
        block = Block(segment=self._segments, offset_bytes=0, nbytes=segment_bytes(size), small=small)
        self._segments += 1
        self.reserved_bytes += block.nbytes
        return block

    def _split(self, block: Block, size: int) -> None:
        rest = Block(
            segment=block.segment,
            offset_bytes=block.offset_bytes + size,
            nbytes=block.nbytes - size,
            small=block.small,
            before=block,
            after=block.after,
        )
        if rest.after is not None:
            rest.after.before = rest
        block.after, block.nbytes = rest, size
        self._insert(rest)

    def _insert(self, block: Block) -> None:
        block.free = True
        bisect.insort(self._free[block.small], (block.nbytes, block.segment, block.offset_bytes))
        self._blocks[block.segment, block.offset_bytes] = block

    def _remove(self, block: Block) -> None:
        free = self._free[block.small]
        del free[bisect.bisect_left(free, (block.nbytes, block.segment, block.offset_bytes))]
        del self._blocks[block.segment, block.offset_bytes]
        block.free = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedPeaks:
    """What a step takes of the allocator.

    Attributes
    ----------
    tensor_bytes
        The most that its tensors come to, as asked for.
    allocated_bytes
        The same in the allocator's blocks, in a step of training that is under way: ``torch.cuda.max_memory_allocated``.
    reserved_bytes
        What the allocator has taken of the device for it: ``torch.cuda.max_memory_reserved``.
    """

    tensor_bytes: int
    allocated_bytes: int
    reserved_bytes: int


def replay_training(record: StepRecord, *, counted: npt.NDArray[np.bool_] | None = None) -> ReplayedPeaks:
    """Training from its beginning, each step of which is like one that was recorded.

    How much is reserved depends on what came before: the state of an optimizer comes into the free blocks that the first step's
    activations have left, and those of the second step do not all fit between. So the first step is without gradients from a
    step before, and makes the optimizer's state in its optimizer phase; then steps follow until no more is reserved.
    Within a point of the record, which is an operator, what dies does so before its results are made.

    Parameters
    ----------
    record
        A complete step of training that is under way.
    counted
        Which of its lives lie in the memory of the device; all without it.
    """
    training = _Training(record, counted)
    for first in (True, *[False] * _MOST_STEPS):
        reserved_bytes = training.allocator.reserved_bytes
        training.allocator.reset_peak()
        training.step(first=first)
        if not first and training.allocator.reserved_bytes == reserved_bytes:
            break
    return ReplayedPeaks(
        tensor_bytes=training.tensor_bytes,
        allocated_bytes=training.allocator.peak_allocated_bytes,
        reserved_bytes=training.allocator.reserved_bytes,
    )


_MOST_STEPS = 5


class _Training:
    """The blocks that a recorded step's storages have, step after step."""

    def __init__(self, record: StepRecord, counted: npt.NDArray[np.bool_] | None) -> None:
        self.allocator = CachingAllocator()
        born, died, size, kind, _ = record.lives_at_end()
        keep = np.ones(len(size), dtype=bool) if counted is None else counted
        born, died, size, kind = born[keep], died[keep], size[keep], kind[keep]
        self._points = points = len(record.points)
        self._size: list[int] = size.tolist()
        before, stays = born == 0, died >= points
        optimizer = np.flatnonzero([point[1] == PHASES.index("optimizer") for point in record.points])
        self._state_comes = int(optimizer[0]) if len(optimizer) else 0
        self._state = np.flatnonzero(before & stays & (kind == OPTIMIZER)).tolist()
        self._always = np.flatnonzero(before & stays & (kind != OPTIMIZER)).tolist()
        self._renewed = np.flatnonzero(before & ~stays).tolist()  # there when the step begins, and not when it ends
        self._gradients = set(np.flatnonzero(before & ~stays & (kind == GRADIENT)).tolist())
        self._left = np.flatnonzero(~before & stays).tolist()  # the other way round
        self._born = _by_point(born, np.flatnonzero(~before))
        self._died = _by_point(died, np.flatnonzero(~stays))
        self._blocks: dict[int, Block | None] = {}
        changes = np.zeros(points + 1, dtype=np.int64)
        np.add.at(changes, np.minimum(born, points), size)
        np.subtract.at(changes, died, size)
        self.tensor_bytes = int(changes[:points].cumsum().max(initial=0))

    def step(self, *, first: bool) -> None:
        """One more."""
        if first:
            self._allocate(self._always)
            self._allocate(place for place in self._renewed if place not in self._gradients)
        else:
            self._take_over()
        for point in range(self._points):
            for place in self._died[point]:
                self.allocator.free(self._blocks.pop(place, None))
            if first and point == self._state_comes:
                self._allocate(self._state)
            self._allocate(self._born[point])

    def _take_over(self) -> None:
        """What the step before has left is what this one begins with, as far as it is alike."""
        left = defaultdict[int, list[int]](list)
        for place in reversed(self._left):
            left[self._size[place]].append(place)
        missing = []
        for place in self._renewed:
            same = left[self._size[place]]
            if same:
                self._blocks[place] = self._blocks.pop(same.pop())
            else:
                missing.append(place)
        for places in left.values():
            for place in places:
                self.allocator.free(self._blocks.pop(place))
        self._allocate(missing)

    def _allocate(self, places: Any) -> None:
        for place in places:
            self._blocks[place] = self.allocator.allocate(self._size[place])


def _by_point(moments: npt.NDArray[np.int64], places: npt.NDArray[np.intp]) -> dict[int, list[int]]:
    found = defaultdict[int, list[int]](list)
    for place in places.tolist():
        found[int(moments[place])].append(place)
    return found


def _absorb(block: Block, after: Block) -> None:
    """Join a block with the one right after it."""
    block.nbytes += after.nbytes
    block.after = after.after
    if block.after is not None:
        block.after.before = block
