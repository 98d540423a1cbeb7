"""The user's own loop in a cell: its batches, one progress bar, and what is to be put right before and after it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType
from typing import Any

from amp_widgets.background_run import BackgroundRun
from amp_widgets.core.batches import NO_MORE, BatchStream
from amp_widgets.core.loop import LiveLoop
from amp_widgets.core.run_state import ALIVE
from amp_widgets.errors import RunError
from amp_widgets.forks import Forks
from amp_widgets.on_demand import OnDemand


def cell_steps(
    loop: LiveLoop,
    background: BackgroundRun,
    on_demand: OnDemand,
    forks: Forks,
    batches: Iterable[Any],
    epochs: int,
) -> Iterator[Any]:
    """As `amp_widgets.session.AmpSession.steps`; what it raises, it raises when the first batch is asked for."""
    from tqdm.auto import tqdm

    if background.state in ALIVE:
        raise RunError("steps: a background run is alive; stop it first: session.stop(); session.wait()")
    on_demand.refuse_beside("steps")
    if epochs > 1 and isinstance(batches, Iterator):
        raise RunError(
            f"steps: got an iterator, which is used up after one epoch, and epochs={epochs}; pass a DataLoader or a list"
        )
    loop.recover()
    stream = BatchStream(batches, epochs)
    cell = forks.cell_begins(loop, stream, _consumer(sys._getframe(1)))
    try:
        length = _length(batches)
        done = stream.given + (0 if length is None else length * stream.epoch)
        with tqdm(total=None if length is None else length * epochs, initial=done, unit="step") as bar:
            while True:
                forks.cell_between(loop, cell)
                batch = stream.take()
                if batch is NO_MORE:
                    break
                yield batch
                bar.update()
    finally:
        forks.cell_ends(cell)
        loop.loop_ended()
        loop.release_after_death()
        loop.break_off_step()  # a last, incomplete accumulation may go on after the loop


def _consumer(frame: FrameType | None) -> CodeType | None:
    """The code of the loop, around which there may be a progress bar of the user's own."""
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("tqdm"):
        frame = frame.f_back
    return None if frame is None else frame.f_code


def _length(batches: Iterable[Any]) -> int | None:
    try:
        return len(batches)  # type: ignore[arg-type]  # asked, not assumed
    except TypeError:  # a generator, or a DataLoader over an IterableDataset
        return None
