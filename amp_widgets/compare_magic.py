"""``%amp compare``: runs over each other, in one line. Free of torch."""

from __future__ import annotations

from typing import Any

from IPython.core.display_functions import display

from amp_widgets.cell import cell_id
from amp_widgets.errors import MagicError
from amp_widgets.runs_comparison import RunsComparison, compare_runs

HELP = """\
%amp compare a.db b.db ...         runs over each other, and how they differ: files, and runs and sessions of this notebook"""
NAMES = ("compared", "compared_runs")


class Compare:
    """Compares runs for a shell, one comparison a cell; where the front end does not say which cell it is, one at a time.

    Parameters
    ----------
    shell
        IPython's; in its namespace the comparison is put under the name ``compared``, where that is free.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._shown: dict[str, tuple[RunsComparison, Any]] = {}  # by cell

    def show(self, words: list[str]) -> None:
        """Display the comparison of these: names of files, or of runs and sessions in the shell's namespace.

        Raises
        ------
        MagicError
            When there is none.
        RecordingError
            When a file cannot be read.
        """
        if not words:
            raise MagicError("%amp compare: got no run, expected run files such as a.db b.db, or names of runs or sessions")
        compared = compare_runs(*(self._named(word) for word in words))
        try:
            view = compared.view()
        except BaseException:
            compared.close()
            raise
        place = cell_id(self._shell)
        self._close_one(place)  # a cell that is run again
        self._shown[place] = (compared, view)
        name = next(
            (one for one in NAMES if isinstance(self._shell.user_ns.get(one), (RunsComparison, type(None)))), f"{NAMES[0]}_"
        )
        self._shell.push({name: compared})
        print(f"{name} is the comparison behind this view: {name}.table has its numbers, {name}.to_figure() its charts")
        display(view)

    def close(self) -> None:
        """Close the views and the files that were opened for them."""
        for place in list(self._shown):
            self._close_one(place)

    def _close_one(self, place: str) -> None:
        for one in reversed(self._shown.pop(place, ())):
            one.close()

    def _named(self, word: str) -> Any:
        value = self._shell.user_ns.get(word)
        return word if value is None or isinstance(value, type) or not hasattr(value, "settings") else value
