"""``%amp compare``: runs over each other, in one line. Free of torch."""

from __future__ import annotations

import os
from typing import Any

from amp_widgets.cell_views import CellViews
from amp_widgets.errors import MagicError
from amp_widgets.language import marked, say
from amp_widgets.runs_comparison import RunsComparison, compare_runs

HELP = marked(
    """\
%amp compare a.db b.db ...         runs over each other, and how they differ: files, and runs and sessions of this notebook"""
)


class Compare:
    """Compares runs for a shell, one comparison a cell.

    Parameters
    ----------
    shell
        IPython's; in its namespace the comparison is put under the name ``compared``, where that is free.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._views = CellViews(shell, ("compared", "compared_runs"), RunsComparison)

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
        told = say("{name} is the comparison behind this view: {name}.table has its numbers, {name}.to_figure() its charts")
        self._views.show(compared, view, told)

    def close(self) -> None:
        """Close the views and the files that were opened for them."""
        self._views.close()

    def _named(self, word: str) -> Any:
        value = self._shell.user_ns.get(word)
        if value is not None and not isinstance(value, type) and hasattr(value, "settings"):
            return value
        if value is not None and not os.path.exists(word):
            kind = type(value).__name__
            raise MagicError(f"%amp compare: got {word!r}, here a {kind}, expected a run or a session, or the path of a run file")
        return word
