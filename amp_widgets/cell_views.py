"""What a magic has opened and shows: one view a cell, closed when the cell is run again. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from IPython.core.display_functions import display

from amp_widgets.cell import cell_id


class Viewed(Protocol):
    """What can be looked at in a view."""

    def close(self) -> None:
        """Let go of its files."""


class CellViews:
    """Shows something in the cell that is running, and closes what it had shown before.

    Where the front end does not say which cell it is, one is shown at a time.

    Parameters
    ----------
    shell
        IPython's; what is shown is put into its namespace.
    names
        Under which: the first that is free, or has something of `kind`.
    kind
        Of what is shown.
    """

    def __init__(self, shell: Any, names: Sequence[str], kind: type[Viewed]) -> None:
        self._shell = shell
        self._names = names
        self._kind = kind
        self._shown: dict[str, tuple[Any, Viewed]] = {}  # by cell: the view, and what it is of

    def show(self, viewed: Viewed, view: Any, sentence: str) -> None:
        """Display the `view`, below a `sentence`, in which ``{name}`` is the name of what is `viewed`."""
        place = cell_id(self._shell)
        self._close_one(place)  # a cell that is run again
        self._shown[place] = (view, viewed)
        name = self._free_name()
        self._shell.push({name: viewed})
        print(sentence.format(name=name))
        display(view)

    def close(self) -> None:
        """Close the views, and what they are of."""
        for place in list(self._shown):
            self._close_one(place)

    def _close_one(self, place: str) -> None:
        for one in self._shown.pop(place, ()):
            one.close()

    def _free_name(self) -> str:
        for name in self._names:
            if isinstance(self._shell.user_ns.get(name), (self._kind, type(None))):
                return name
        return f"{self._names[-1]}_"
