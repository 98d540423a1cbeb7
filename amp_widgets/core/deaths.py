"""The steps of a loop that ran out of memory: noticed once each, looked into, and their memory freed as early as can be."""

from __future__ import annotations

import collections
import dataclasses
import math
import threading
import time
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from amp_widgets.core.autocast import Support
from amp_widgets.core.checkpointing import Layer
from amp_widgets.core.history import History
from amp_widgets.core.memory.autopsy import OutOfMemory, autopsy
from amp_widgets.core.memory.death import (
    Death,
    ErrorReference,
    clear_finished_frames,
    errors_around,
    is_out_of_memory,
    roots_of_dead_passes,
)
from amp_widgets.core.memory.dissolve import dissolve
from amp_widgets.core.memory.whole_step import CompleteStep
from amp_widgets.core.settings import AutocastName, Settings, describe_settings
from amp_widgets.core.threads import is_alive, this_thread


class Owner(Protocol):
    """Whose steps they are: a `LiveLoop`."""

    device: torch.device

    @property
    def model(self) -> nn.Module | None: ...

    @property
    def settings(self) -> Settings: ...

    @property
    def support(self) -> Mapping[AutocastName, Support]: ...

    @property
    def layers(self) -> tuple[Layer, ...]: ...

    @property
    def memory_source(self) -> str: ...

    @property
    def step(self) -> int: ...

    @property
    def history_so_far(self) -> History: ...

    @property
    def complete_step(self) -> CompleteStep | None: ...

    def record_event(self, kind: str, reason: str, **detail: Any) -> None: ...


class Deaths:
    """Those of one loop.

    An exception keeps alive what the frames hold that it has left, as long as somebody keeps the exception: a notebook does
    so for the last one. A backward pass that has died leaves its graph to ``loss`` and ``outputs`` in the user's variables. So
    the frames are cleared, and the graph is dissolved; only for errors by which memory ran out. What this costs: a debugger
    finds no local variables in the frames that were left, and that graph cannot be used any more. Frames that are still
    running are not touched, nor is a graph that no backward pass has died in, or one that was to be kept (``retain_graph``).

    Attributes
    ----------
    last
        The last step that ran out of memory.
    pending
        Whether one has died of whose exception there may be frames left to be cleared, or that was not looked into yet.
    """

    def __init__(self) -> None:
        self.last: OutOfMemory | None = None
        self.pending = False
        self._errors: list[_Left] = []
        self._seen: collections.deque[ErrorReference] = collections.deque(maxlen=4)
        self._old: list[ErrorReference] = []
        self._asked_s = -math.inf
        self._lock = threading.RLock()

    def note(self) -> None:
        """Memory has run out in an op just now."""
        self.pending = True

    def see(self, error: BaseException | None, death: Death | None, owner: Owner) -> None:
        """Look into a step that has died, if that was not done.

        Parameters
        ----------
        error
            The exception by which memory ran out, where somebody has it in hand.
        death
            What the meter knows; perhaps of an earlier one, which the user has caught.
        owner
            In whose step; its history gets an event.
        """
        with self._lock:
            found = error
            if found is None and death is not None and death.error is None:
                found = self.find()
            known = found is not None and any(reference() is found for reference in self._seen)
            if death is not None and found is not None and not known and _may_be_of(death, found):
                death = dataclasses.replace(death, error=ErrorReference(found))
                known = True
            if death is not None:
                self._keep(death)
                self.last = _look_into(death, owner)
            if found is not None and not known:
                death = Death.told_by(found, str(owner.device), owner.model)
                self._keep(death)
                self.last = _look_into(death, owner)

    def loop_begins(self) -> None:
        """From now on, `find` does not mean the exceptions that are around already."""
        with self._lock:
            self._old = [ErrorReference(error) for error in errors_around()]

    def find(self) -> BaseException | None:
        """An exception by which memory ran out and that nobody has handed over."""
        with self._lock:
            known = [reference() for reference in (*self._old, *self._seen)]
        found = [error for error in errors_around() if not any(error is other for other in known)]
        return found[-1] if found else None

    def release(self, *, frames: bool = True, passing: bool = False) -> None:
        """Free what can be freed by now.

        Parameters
        ----------
        frames
            Also what is held by frames that have finished; else only graphs.
        passing
            The exception is on its way, and has not left all frames that it will leave.
        """
        if torch._C._current_graph_task_id() != -1:
            return  # within a backward pass, which may be the one that dies
        with self._lock:
            self._errors = [left for left in self._errors if not left.free(frames) or (passing and left.reference.is_weak)]
            self.pending = bool(self._errors)

    def release_if_asked(self) -> None:
        """As `release`, from any thread and as often as one likes."""
        now_s = time.monotonic()
        if now_s - self._asked_s >= _ASKED_EVERY_S:
            self._asked_s = now_s
            self.release()

    def step_begins(self) -> None:
        """Free what can be freed before the next step, and look no more for exceptions that are costly to find."""
        self.release()
        with self._lock:
            self._errors = [left for left in self._errors if left.reference.is_weak]
            self.pending = bool(self._errors)

    def _keep(self, death: Death) -> None:
        self.pending = True
        if death.error is not None:
            self._errors.append(_Left(death.error, death.thread))
            self._seen.append(death.error)


_ASKED_EVERY_S = 1.0


def _look_into(death: Death, owner: Owner) -> OutOfMemory:
    settings = owner.settings
    formats: tuple[AutocastName, ...] = ("bf16", "fp16")
    known_peak_bytes = _known_peak_bytes(owner.history_so_far)
    found = autopsy(
        death,
        step=owner.step,
        settings_text=describe_settings(settings),
        autocast=settings.autocast,
        formats=[name for name in formats if owner.support[name].available],
        layers=owner.layers,
        source=owner.memory_source,
        known_peak_bytes=known_peak_bytes,
        complete=owner.complete_step,
    )
    sizes = {name: getattr(found, name) for name in ("requested_bytes", "limit_bytes", "allocated_bytes")}
    owner.record_event(
        "out_of_memory",
        found.report[0],
        **{name: None if math.isnan(size) else size for name, size in sizes.items()},  # JSON has no NaN
        cause=found.cause,
        device=found.device,
        phase=found.phase,
        layer=found.layer,
        operator=found.operator,
    )
    return found


def _known_peak_bytes(history: History) -> float:
    """Of the newest step, if nothing was changed since; NaN else."""
    applied = history.events("applied")
    if applied and not history.last("step") >= applied[-1].step:
        return math.nan
    return history.last("peak_bytes")


class _Left:
    """What an exception has left behind, raised in some thread."""

    def __init__(self, reference: ErrorReference, thread: int) -> None:
        self.reference = reference
        self._thread = thread
        self._dissolved = False

    def free(self, frames: bool) -> bool:
        """Free it; whether all is done."""
        error = self.reference()
        if error is None:
            return True
        if not self._dissolved:
            roots = roots_of_dead_passes(error)
            if roots and not self._is_here():
                return False  # the thread may be using the tensors this very moment
            if roots:
                dissolve(roots)
                self._dissolved = True
        return frames and clear_finished_frames(error)

    def _is_here(self) -> bool:
        return self._thread == this_thread() or not is_alive(self._thread)


def _may_be_of(death: Death, error: BaseException) -> bool:
    if death.error is not None:
        return death.error() is error
    return math.isnan(death.requested_bytes) or death.thread == this_thread()


def out_of_memory_in(error: BaseException | None) -> BaseException | None:
    """By which memory ran out: the exception itself, or the one that it was raised from or while handling; None if none."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if is_out_of_memory(error):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None
