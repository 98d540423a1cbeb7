"""What users hold of a course that a fork has left: the branch, and what can be made of it. Free of torch."""

from __future__ import annotations

from amp_widgets.export.exports import Exports
from amp_widgets.recording.branch import Branch


class LeftBranch(Branch, Exports):
    """A course that `amp_widgets.session.AmpSession.fork` has left: its history, for ``aw.compare_runs`` and for exports."""

    __slots__ = ()
