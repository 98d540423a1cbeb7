"""What can be compared and exported: anything that has the history of a run. Free of torch."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any, Protocol, TypeGuard

from amp_widgets.core.history import History
from amp_widgets.core.settings import Settings
from amp_widgets.errors import RecordingError
from amp_widgets.recording.environment import environment
from amp_widgets.recording.run import open_run


class RunLike(Protocol):
    """A run: recorded, going on, or the course that one has left.

    A ``Run`` of a file, an ``AmpSession`` and a ``Branch`` are such. What else is known of one is asked for with `name_of`,
    `facts_of`, `newest_history` and `changes_still`.
    """

    @property
    def history(self) -> History:
        """Every step and every event."""

    @property
    def settings(self) -> Settings:
        """In force at the end."""


def as_run(run: object) -> RunLike:
    """A run as it is, or the one in the file of this path.

    Raises
    ------
    RecordingError
        When it is neither, or the file cannot be read.
    """
    if isinstance(run, (str, os.PathLike)):
        return open_run(run)
    if not _is_run(run):
        raise RecordingError(
            f"got {run!r} in place of a run, expected the path of a run file, what aw.open_run(path) gives, or a session"
        )
    return run


def name_of(run: RunLike) -> str:
    """What it is called: by its file, or by its model."""
    name, path, model = (getattr(run, key, None) for key in ("name", "path", "model_type"))
    if isinstance(name, str) and name:
        return name
    if isinstance(path, PurePath):
        return path.stem
    return f"session on {model}" if isinstance(model, str) else type(run).__name__


def names_of(runs: Sequence[RunLike]) -> tuple[str, ...]:
    """Their names, made distinct: by as many of the folders of their files as it takes, else by numbers."""
    names = [name_of(run) for run in runs]
    for clash in {name for name in names if names.count(name) > 1}:
        alike = [i for i, name in enumerate(names) if name == clash and isinstance(getattr(runs[i], "path", None), Path)]
        paths = {i: runs[i].path.with_suffix("").parts for i in alike}  # type: ignore[attr-defined]  # looked at above
        most = max((len(parts) for parts in paths.values()), default=0)
        for count in range(1, most + 1):
            longer = {i: "/".join(parts[-count:]) for i, parts in paths.items()}
            if len(set(longer.values())) == len(set(paths.values())):
                names = [longer.get(i, name) for i, name in enumerate(names)]
                break
    return _numbered(names)


def facts_of(run: RunLike) -> Mapping[str, Any]:
    """What is known of it: ``model``, ``device``, ``memory_source``, ``packages`` and more, as a run file has it."""
    facts = getattr(run, "facts", None)
    if isinstance(facts, Mapping):
        return facts
    known = {"model": getattr(run, "model_type", None), "memory_source": getattr(run, "memory_source", None)}
    device = getattr(run, "device", None)
    if device is not None:
        known |= {"device": str(device), **_environment()}  # it runs here
    return MappingProxyType({name: value for name, value in known.items() if value is not None})


def newest_history(run: RunLike) -> History:
    """Its history with what is new, as far as that is there: it never waits for a device.

    Raises
    ------
    RecordingError
        When its file cannot be read any more.
    """
    refresh = getattr(run, "refresh", None)
    if refresh is not None and getattr(run, "closed", False) is not True:
        refresh()
    history = getattr(run, "history_so_far", None)
    return history if isinstance(history, History) else run.history


def changes_still(run: RunLike) -> bool:
    """Whether steps may still be added to it."""
    if getattr(run, "closed", False) is True:
        return False
    return _has(run, "refresh") or _has(run, "history_so_far")


def _is_run(run: object) -> TypeGuard[RunLike]:
    """Whether it has what a run has; without asking for it, which may wait for a device."""
    return not isinstance(run, type) and all(_has(run, name) for name in ("history", "settings"))


def _has(run: object, name: str) -> bool:
    return inspect.getattr_static(run, name, None) is not None


@functools.cache
def _environment() -> Mapping[str, Any]:
    return MappingProxyType(environment())


def _numbered(names: Sequence[str]) -> tuple[str, ...]:
    """Those that are the same get a number, which none has already."""
    taken, numbered = set(names), list[str]()
    for name in names:
        distinct, number = name, 1
        while distinct in numbered or (number > 1 and distinct in taken):
            number += 1
            distinct = f"{name} ({number})"
        numbered.append(distinct)
    return tuple(numbered)
