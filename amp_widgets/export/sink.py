"""Where else a run goes while it happens, or afterwards: files and services of other tools."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt

from amp_widgets.core.history import Event


class Sink(abc.ABC):
    """One tool. Its methods are called one after the other, mostly on a thread of its own, so that training does not wait.

    What one raises is told to people and tried again later; training goes on.
    """

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """For people, such as ``"TensorBoard in runs/a"``."""

    @abc.abstractmethod
    def begin(self, course: str, began_s: float, facts: Mapping[str, Any]) -> None:
        """A course of the run begins; what was begun before is over.

        Parameters
        ----------
        course
            ``""`` for the run itself; ``"fork-1"``, ... after forks, which begin anew with what they have in common with it.
        began_s
            When the history began, in seconds since 1970; rows and events count from there.
        facts
            About the run, JSON-able.
        """

    @abc.abstractmethod
    def write(self, rows: Mapping[str, npt.NDArray[Any]], events: Sequence[Event]) -> None:
        """Take `rows`, as columns by name, and `events`; and have them where they belong when it returns."""

    @abc.abstractmethod
    def close(self) -> None:
        """Nothing more comes."""
