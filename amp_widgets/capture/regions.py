"""The autocast regions of an unmodified loop: noticed when they are entered, and given the format in force."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import torch

from amp_widgets.core.autocast import DTYPES
from amp_widgets.core.settings import AutocastName

Region = torch.autocast


class RegionListener(Protocol):
    """Who is told of the regions."""

    def region_begins(self, device_type: str, name: AutocastName, *, outermost: bool) -> AutocastName | None:
        """An enabled region is about to be entered. Returns the format that it is to have instead, or None."""

    def region_in_backward(self, device_type: str) -> AutocastName | None:
        """The same in a backward pass, where a forward pass is run once more."""

    def region_ended(self, error: BaseException | None) -> None:
        """A region is left that `region_begins` has told of, by an exception perhaps."""


class Regions:
    """What stands in for ``torch.autocast``'s own ``__enter__`` and ``__exit__``.

    A region that is disabled stays so. One that torch enters to restore the state of a forward pass, to recompute it, is left
    alone: another format there than in the forward pass would be an error.

    Parameters
    ----------
    listener
        Is asked and told.
    is_here
        Whether this thread runs the code that is watched.
    """

    def __init__(self, listener: RegionListener, is_here: Callable[[], bool]) -> None:
        self._listener = listener
        self._is_here = is_here
        self._open = _OpenRegions()

    def depth(self, device_type: str) -> int:
        """How many regions of a device type this thread is in."""
        return sum(region.device == device_type for region, _ in self._open.stack)

    def keep_up(self, name: AutocastName, device_type: str) -> None:
        """Give the enabled region that this thread is in the format in force: it may have been entered long before.

        What torch keeps for its exit, and thus what it restores, is not touched.
        """
        region = next((region for region, _ in reversed(self._open.stack) if region.device == device_type), None)
        if region is None or not region._enabled:
            return
        enabled, dtype = name != "fp32", DTYPES.get(name, torch.get_autocast_dtype(device_type))
        if (torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)) != (enabled, dtype):
            torch.set_autocast_enabled(device_type, enabled)
            torch.set_autocast_dtype(device_type, dtype)
            torch.clear_autocast_cache()  # of weights in the former format

    def entering(self, original: Callable[[Region], Any]) -> Callable[[Region], Any]:
        """The stand-in for ``__enter__``."""

        def enter(region: Region) -> Any:
            __tracebackhide__ = True
            frame = _caller(sys._getframe(1))
            if frame.f_globals.get("__name__", "").startswith("amp_widgets.") or not self._is_here():
                return original(region)
            instead, told = None, False
            name = _name(region)
            if torch._C._current_graph_task_id() != -1:
                if name is not None and not _restores_state(frame):
                    instead = self._listener.region_in_backward(region.device)
            elif name is not None:
                told = True
                instead = self._listener.region_begins(region.device, name, outermost=not self.depth(region.device))
            self._open.stack.append((region, told))
            try:
                return _enter_as(region, instead, original)
            except BaseException:
                self._open.stack.pop()
                raise

        return enter

    def leaving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The stand-in for ``__exit__``."""

        def leave(region: Region, kind: Any = None, error: Any = None, trace: Any = None) -> Any:
            __tracebackhide__ = True
            stack, told = self._open.stack, False
            if stack and stack[-1][0] is region:
                told = stack.pop()[1]
            try:
                return original(region, kind, error, trace)
            finally:
                if told:
                    self._listener.region_ended(error)

        return leave


class _OpenRegions(threading.local):
    def __init__(self) -> None:
        self.stack: list[tuple[Region, bool]] = []


NAMES: dict[torch.dtype, AutocastName] = {dtype: name for name, dtype in DTYPES.items()}


def _name(region: Region) -> AutocastName | None:
    """Of the format of an enabled region; None where it is disabled, or of another format."""
    return NAMES.get(region.fast_dtype) if region._enabled else None


def _enter_as(region: Region, name: AutocastName | None, original: Callable[[Region], Any]) -> Any:
    if name is None:
        return original(region)
    kept = region._enabled, region.fast_dtype
    region._enabled = name != "fp32"
    region.fast_dtype = DTYPES.get(name, region.fast_dtype)
    try:
        return original(region)
    finally:
        region._enabled, region.fast_dtype = kept  # it may be entered again, also when nobody watches


def _caller(frame: FrameType) -> FrameType:
    """The frame of the ``with`` statement: subclasses in torch call the base class."""
    while frame.f_code.co_name == "__enter__" and frame.f_globals.get("__name__", "").startswith("torch.") and frame.f_back:
        frame = frame.f_back
    return frame


def _restores_state(frame: FrameType) -> bool:
    """Whether torch itself enters the region, with what was in force in the forward pass."""
    module = frame.f_globals.get("__name__", "")
    return module.startswith("torch.") and frame.f_code.co_name != "decorate_autocast"
