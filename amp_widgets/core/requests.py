"""Requests for settings: validated when they are made, and held until the step boundary."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from amp_widgets.core.autocast import Support
from amp_widgets.core.layer_switch import LayerSwitch
from amp_widgets.core.settings import AutocastName, Planned, Settings, check_made_for, format_scale
from amp_widgets.errors import SettingsError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Changes that wait for the next step boundary.

    Parameters
    ----------
    changes
        Setting → value, validated; layer names instead of globs.
    source
        Who asked: ``"script"``, ``"widget"``, ``"magic"``, ...
    at_step
        The step from which on it shall be in force; None: the one that begins next.
    """

    changes: Mapping[str, Any]
    source: str = "script"
    at_step: int | None = None


class RequestQueue:
    """Requests in the order in which they were made. Its owner holds a lock around every call.

    Parameters
    ----------
    device
        For messages.
    support
        Which autocast formats the device has.
    switches
        Know the layers, by the setting that is made of them.
    """

    def __init__(
        self, device: torch.device, support: Mapping[AutocastName, Support], switches: Mapping[str, LayerSwitch]
    ) -> None:
        self._device = device
        self._support = support
        self._switches = switches
        self._waiting: collections.deque[Request] = collections.deque()
        self._scheduled: list[Request] = []  # by step; of one step, in the order in which they were made

    def __bool__(self) -> bool:
        return bool(self._waiting) or bool(self._scheduled)

    def add(self, changes: Mapping[str, Any], source: str, in_force: Settings) -> Request:
        """Validate changes against what will be in force when their turn comes, and let them wait.

        Raises
        ------
        SettingsError
            When they cannot be met; nothing waits then.
        """
        request = Request(changes=self._validated(changes, in_force, self._waiting), source=source)
        self._waiting.append(request)
        return request

    def schedule(self, at_step: int, changes: Mapping[str, Any], source: str, in_force: Settings) -> Request:
        """The same for a later step.

        Raises
        ------
        SettingsError
            As `add` does, judged by what is known now.
        """
        earlier = [*self._waiting, *(other for other in self._scheduled if _step_of(other) <= at_step)]
        request = Request(changes=self._validated(changes, in_force, earlier), source=source, at_step=at_step)
        self._scheduled.append(request)
        self._scheduled.sort(key=_step_of)
        return request

    def check(self, changes: Mapping[str, Any], in_force: Settings) -> dict[str, Any]:
        """The changes as they would be in force from `in_force` on; nothing waits.

        Raises
        ------
        SettingsError
            When they cannot be met.
        """
        return self._validated(changes, in_force, ())

    def repeating(self, requests: Iterable[Request]) -> RequestQueue:
        """Another queue for the same loop, in which only these wait, each for its step; they were validated once."""
        other = RequestQueue(self._device, self._support, self._switches)
        other._scheduled = sorted(requests, key=_step_of)
        return other

    @property
    def scheduled(self) -> tuple[Request, ...]:
        """Those that wait for a later step, by step."""
        return tuple(self._scheduled)

    def call_up(self, step: int) -> None:
        """The turn of those scheduled for `step` has come: before what was asked for meanwhile, which has the last word."""
        due = [request for request in self._scheduled if _step_of(request) <= step]
        del self._scheduled[: len(due)]
        self._waiting.extendleft(reversed(due))

    def merged(self) -> Request | None:
        """All that wait, taken together; None when none does."""
        if not self._waiting:
            return None
        changes: dict[str, Any] = {}
        for request in self._waiting:
            changes.update(request.changes)
        return Request(changes=changes, source=self._waiting[-1].source)

    def first(self) -> Request | None:
        """The one whose turn it is; it goes on waiting."""
        return self._waiting[0] if self._waiting else None

    def drop_first(self) -> None:
        """It was applied or rejected."""
        self._waiting.popleft()

    def all(self) -> list[Request]:
        """Those that wait for the next step, then those for later ones."""
        return [*self._waiting, *self._scheduled]

    def clear(self) -> None:
        """Nothing waits any more."""
        self._waiting.clear()
        self._scheduled.clear()

    def _validated(self, changes: Mapping[str, Any], in_force: Settings, before: Iterable[Request]) -> dict[str, Any]:
        if not changes:
            raise SettingsError("request: got no change, expected settings by name, such as autocast='fp16'")
        changes, planned = dict(changes), changes.get("checkpointed")
        prospective = in_force
        for request in before:
            with contextlib.suppress(SettingsError):  # two that do not go together: the later one is rejected in its turn
                prospective = prospective.replace(**request.changes)
        for name, switch in self._switches.items():
            if name in changes:
                changes[name] = switch.resolve(getattr(prospective.replace(**{name: changes[name]}), name))
        settings = prospective.replace(**changes)
        if isinstance(planned, Planned):
            check_made_for(planned, settings)
        if "init_scale" in changes:
            _check_bounds(settings)
        support = self._support[settings.autocast]
        if "autocast" in changes and not support.available:
            usable = ", ".join(repr(name) for name, s in self._support.items() if s.available)
            raise SettingsError(
                f"autocast: got {settings.autocast!r}, expected one of {usable} on {self._device}: {support.note}"
            )
        return {name: getattr(settings, name) for name in changes}


def _step_of(request: Request) -> int:
    return -1 if request.at_step is None else request.at_step


def _check_bounds(settings: Settings) -> None:
    """Refuse to set the live scale to what the floor or the cap would change at once."""
    scale, low, high = settings.init_scale, settings.min_scale, settings.max_scale
    if low is not None and scale < low:
        raise SettingsError(
            f"init_scale: got {format_scale(scale)}, which is below min_scale {format_scale(low)}; raise it or lower min_scale"
        )
    if high is not None and scale > high:
        raise SettingsError(
            f"init_scale: got {format_scale(scale)}, which is above max_scale {format_scale(high)}; lower it or raise max_scale"
        )
