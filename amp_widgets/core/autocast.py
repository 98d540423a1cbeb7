"""Autocast as a setting: the context manager for a format, and what a device supports."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, TypeVar

import torch

from amp_widgets.core.settings import AutocastName

_F = TypeVar("_F", bound=Callable[..., Any])

DTYPES: dict[AutocastName, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Support:
    """Whether a device can run autocast in a format.

    Parameters
    ----------
    available
        Whether the format can be chosen.
    note
        For people: why it cannot be chosen, or what to expect of it ("emulated on this CPU"); may be empty.
    """

    available: bool
    note: str = ""


def autocast_support(device: torch.device) -> dict[AutocastName, Support]:
    """What `device` supports, by asking torch: fp32 always, fp16 and bf16 with a note where they are emulated."""
    fp16, bf16 = _PROBES.get(device.type, _probe_other)(device)
    return {"fp32": Support(available=True), "fp16": fp16, "bf16": bf16}


def autocast_context(
    name: AutocastName, device_type: str, *, enabled: bool = True, cache_enabled: bool | None = None
) -> torch.autocast:
    """The ``torch.autocast`` for a format; fp32 is a region in which autocast is disabled."""
    if name == "fp32" or not enabled:
        return torch.autocast(device_type, enabled=False)
    return torch.autocast(device_type, dtype=DTYPES[name], cache_enabled=cache_enabled)


class Autocasting(Protocol):
    """What a `LiveAutocast` asks when it is entered and tells when it is left."""

    def enter_autocast(self) -> AutocastName: ...

    def exit_autocast(self, error: BaseException | None) -> None: ...


class LiveAutocast:
    """Drop-in for ``torch.autocast(...)`` whose format is the one in force when it is entered.

    A context manager and a decorator, like the original; it can be entered again, also within itself.
    """

    def __init__(self, loop: Autocasting, device_type: str, *, enabled: bool = True, cache_enabled: bool | None = None) -> None:
        self._loop = loop
        self._device_type = device_type
        self._enabled = enabled
        self._cache_enabled = cache_enabled
        self._entered: list[torch.autocast] = []

    def __enter__(self) -> LiveAutocast:
        name = self._loop.enter_autocast()
        region = autocast_context(name, self._device_type, enabled=self._enabled, cache_enabled=self._cache_enabled)
        region.__enter__()
        self._entered.append(region)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._entered.pop().__exit__(kind, error, trace)
        self._loop.exit_autocast(error)

    def __call__(self, function: _F) -> _F:
        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with LiveAutocast(self._loop, self._device_type, enabled=self._enabled, cache_enabled=self._cache_enabled):
                return function(*args, **kwargs)

        return inside  # type: ignore[return-value]  # functools.wraps keeps the signature


def _probe_cpu(device: torch.device) -> tuple[Support, Support]:
    # oneDNN's own word for matrix products; the gradient of an fp16 convolution goes through slow reference code on every CPU
    fp16 = (
        "slow on a CPU, convolutions above all"
        if _ask("_is_mkldnn_fp16_supported")
        else "very slow on this CPU: keep the model tiny"
    )
    bf16 = "" if _ask("_is_mkldnn_bf16_supported") else "emulated on this CPU: the rounding is real, the speed is not"
    return Support(available=True, note=fp16), Support(available=True, note=bf16)


def _ask(name: str) -> bool:
    try:
        return bool(getattr(torch.ops.mkldnn, name)())
    except (AttributeError, RuntimeError):  # a build without oneDNN
        return False


def _probe_cuda(device: torch.device) -> tuple[Support, Support]:
    with torch.cuda.device(device):
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        emulated = native or torch.cuda.is_bf16_supported(including_emulation=True)
    name = torch.cuda.get_device_name(device)
    if native:
        bf16 = Support(available=True)
    elif emulated:
        bf16 = Support(available=True, note=f"emulated: {name} has no bf16 units, so it is slower than fp16")
    else:
        bf16 = Support(available=False, note=f"{name} does not support bf16")
    return Support(available=True), bf16


def _probe_other(device: torch.device) -> tuple[Support, Support]:
    found: list[Support] = []
    for dtype in (torch.float16, torch.bfloat16):
        try:
            torch.zeros(1, dtype=dtype, device=device)
            ok = torch.amp.is_autocast_available(device.type)
            found.append(Support(available=ok, note="" if ok else f"torch has no autocast for {device.type}"))
        except (RuntimeError, TypeError) as error:
            found.append(Support(available=False, note=f"{device.type} refuses it: {error}"))
    return found[0], found[1]


_PROBES: dict[str, Callable[[torch.device], tuple[Support, Support]]] = {"cpu": _probe_cpu, "cuda": _probe_cuda}
