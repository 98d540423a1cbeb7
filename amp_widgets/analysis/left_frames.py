"""What an exception that goes through an analysis would keep alive, dropped."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from amp_widgets.core.deaths import out_of_memory_in
from amp_widgets.core.memory.death import clear_finished_frames


@contextlib.contextmanager
def frames_cleared() -> Iterator[None]:
    """Of an exception or interrupt that ends what is within, the frames hold nothing of this package and of torch any more.

    A notebook keeps the last exception, and with it the frames that it has left and their variables: gradients and other tensors
    of the user's that were kept to be put back, and those of steps that were only tried. Steps of the run would be measured
    with them. The frames of the user's own code keep what they have, for a debugger, and so do those that are still running.
    """
    around = sys.exc_info()[1]  # what is being handled outside is none of ours
    try:
        yield
    except BaseException as error:
        _clear(error, around)
        raise


def _clear(error: BaseException | None, around: BaseException | None) -> None:
    seen: set[int] = set()
    while error is not None and error is not around and id(error) not in seen:
        seen.add(id(error))
        # where memory ran out, torch's frames tell whose graph is to be dissolved, and in which layer it was
        clear_finished_frames(error, packages=_OURS if out_of_memory_in(error) is not None else (*_OURS, "torch"))
        error = error.__cause__ or error.__context__


_OURS = ("amp_widgets",)
