"""The deep mode: torch's own record of every allocation of one step, written as the snapshot that torch's viewer opens."""

from __future__ import annotations

import inspect
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from amp_widgets.errors import SettingsError

MOST_ENTRIES = 200_000
"""Allocations and frees that are kept at most, the newest; torch needs up to some kilobytes for each."""
VIEWER = "https://pytorch.org/memory_viz"


class MemoryHistory(Protocol):
    """What torch has for it; for tests there is another one."""

    def why_not(self) -> str | None:
        """Why there is no such record here, and what to do; None where there is."""

    def is_on(self) -> bool:
        """Whether somebody has recording on."""

    def switch_on(self, most_entries: int) -> None:
        """Record allocations and frees, with the call stacks."""

    def switch_off(self) -> None:
        """Record no more."""

    def snapshot(self) -> Any:
        """What was recorded, and the state of all memory."""


class DeepRecording:
    """Records one step and writes the snapshot to a file, also when the step dies of it: then it says most.

    Where the user has recording on already it is left so, and the snapshot has what was recorded before, too. A snapshot is
    a pickle, as torch's viewer wants it; this package opens none.

    Parameters
    ----------
    path
        The file to be written, such as ``"step.pickle"``; one that is there is replaced.
    device
        Where the model is, if that is known.
    history
        What records; torch's own by default.
    most_entries
        Allocations and frees that are kept at most.

    Raises
    ------
    SettingsError
        When there is no CUDA allocator to record, or the file's folder does not exist.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        device: torch.device | None = None,
        *,
        history: MemoryHistory | None = None,
        most_entries: int = MOST_ENTRIES,
    ) -> None:
        self.path = Path(path).expanduser()
        self._history = history or TorchMemoryHistory()
        self._most_entries = most_entries
        self._ours = False  # what records was switched on here
        self._begun = False
        self._refused = ""
        reason = self._history.why_not()
        if device is not None and device.type != "cuda":
            reason = f"got a model on {device}, expected one on a CUDA device: {_ONLY_CUDA}"
        if reason is not None:
            raise SettingsError(f"record_next_step: {reason}")
        if not self.path.absolute().parent.is_dir():
            raise SettingsError(
                f"record_next_step: got {str(self.path)!r}, expected a file in a folder that exists; make "
                f"{str(self.path.absolute().parent)!r} first"
            )

    def begin(self) -> None:
        """The step begins; if torch refuses to record it, `end` says so."""
        self._begun = True
        try:
            self._ours = not self._history.is_on()
            if self._ours:
                self._history.switch_on(self._most_entries)
        except Exception as error:
            self._refused = f"the memory of the step could not be recorded: {type(error).__name__}: {error}"

    def end(self) -> str:
        """The step has ended, or died: write the snapshot, and record no more.

        Returns
        -------
        str
            What was done, in a sentence for people.

        Notes
        -----
        Whatever goes wrong is said in that sentence: it is no reason to stop the training.
        """
        if not self._begun:
            return ""
        self._begun = False
        if self._refused:
            return self._refused
        try:
            self._write()
        except Exception as error:
            return f"the memory of the step was recorded, but not written to {self.path}: {type(error).__name__}: {error}"
        finally:
            if self._ours:
                self._history.switch_off()
        already = "" if self._ours else "; recording was on already, and goes on"
        return f"every allocation of the step is in {self.path}: open it at {VIEWER}{already}"

    def _write(self) -> None:
        snapshot = self._history.snapshot()
        part = self.path.with_name(f"{self.path.name}.part")
        try:
            with part.open("wb") as file:
                pickle.dump(snapshot, file)  # as torch.cuda.memory._dump_snapshot
            part.replace(self.path)
        finally:
            part.unlink(missing_ok=True)


_ONLY_CUDA = "torch records the allocations of its CUDA allocator only; on a CPU profile_next_step() shows every tensor of a step"


class TorchMemoryHistory:
    """``torch.cuda.memory``'s own.

    Parameters
    ----------
    available
        Whether there is CUDA.
    """

    def __init__(self, available: Callable[[], bool] = torch.cuda.is_available) -> None:
        self._available = available

    def why_not(self) -> str | None:
        """There is only one for torch's own allocator on CUDA."""
        if not self._available():
            return f"got a process without CUDA, expected a CUDA device: {_ONLY_CUDA}"
        backend = torch.cuda.memory.get_allocator_backend()
        if backend != "native":
            return (
                f"got the allocator {backend!r}, expected torch's own, which alone is recorded; start without "
                f"PYTORCH_ALLOC_CONF=backend:{backend}"
            )
        return None

    def is_on(self) -> bool:
        """Told by torch; by versions that do not, taken to be off."""
        enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)
        return bool(enabled()) if enabled is not None else False

    def switch_on(self, most_entries: int) -> None:
        """From an empty record."""
        record = torch.cuda.memory._record_memory_history
        empty = {"clear_history": True} if "clear_history" in inspect.signature(record).parameters else {}  # of torch 2.7 on
        record("all", stacks="python", max_entries=most_entries, **empty)

    def switch_off(self) -> None:
        """The state of memory is no longer followed, either."""
        torch.cuda.memory._record_memory_history(None)

    def snapshot(self) -> Any:
        """Does not wait for the device."""
        return torch.cuda.memory._snapshot()
