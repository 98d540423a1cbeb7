"""The user's own loop in a cell: its batches, one progress bar, and what is to be put right before and after it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from amp_widgets.background_run import BackgroundRun
from amp_widgets.core.loop import LiveLoop
from amp_widgets.core.run_state import ALIVE
from amp_widgets.errors import RunError
from amp_widgets.on_demand import OnDemand


def cell_steps(
    loop: LiveLoop, background: BackgroundRun, on_demand: OnDemand, batches: Iterable[Any], epochs: int
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
    try:
        with tqdm(total=_length(batches, epochs), unit="step") as bar:
            for _ in range(epochs):
                for batch in batches:
                    yield batch
                    bar.update()
    finally:
        loop.loop_ended()
        loop.release_after_death()
        loop.break_off_step()  # a last, incomplete accumulation may go on after the loop


def _length(batches: Iterable[Any], epochs: int) -> int | None:
    try:
        return len(batches) * epochs  # type: ignore[arg-type]  # asked, not assumed
    except TypeError:  # a generator, or a DataLoader over an IterableDataset
        return None
