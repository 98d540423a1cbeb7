"""Other kernels for torch's operators, for a while and for one thread."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch

from amp_widgets.errors import RunError

Kernel = Callable[..., Any]
"""Called as ``kernel(keyset, *args, **kwargs)``, with the keys of torch's dispatcher for this call."""
Kernels = Mapping[Any, tuple[Kernel, Kernel]]
"""Overload of an operator → its kernel for the threads in which the overrides are in force, and the one for all others."""


class OperatorOverrides:
    """A context manager that can be entered again, also from several threads; each sees the overrides only while it is inside.

    Torch's registry of kernels belongs to the whole process. So what is registered asks which thread calls, and everything is
    taken out of the registry when the last one leaves. Torch does not guard the registry against calls that run at the same
    moment: no other thread should run these operators under this key while the first enters or the last leaves.

    Parameters
    ----------
    dispatch_key
        Under which the kernels are registered, such as ``"AutocastCPU"``.
    kernels
        Gives them; called when the first one enters.
    """

    def __init__(self, dispatch_key: str, kernels: Callable[[], Kernels]) -> None:
        self._dispatch_key = dispatch_key
        self._kernels = kernels
        self._lock = threading.RLock()
        self._own = threading.local()
        self._entered = 0  # by all threads
        self._library: torch.library.Library | None = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._entered:
                self._register()
            self._entered += 1
        self._own.depth = self._depth + 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._own.depth = self._depth - 1
        with self._lock:
            self._entered -= 1
            if not self._entered:
                self._unregister()

    @property
    def in_force(self) -> bool:
        """Whether this thread is inside."""
        return self._depth > 0

    @property
    def _depth(self) -> int:
        depth: int = getattr(self._own, "depth", 0)
        return depth

    def _register(self) -> None:
        kernels = self._kernels()
        self._library = library = torch.library.Library("aten", "IMPL")  # taken out below
        try:
            # Torch warns, once in a process, that a kernel takes the place of another one, which is the point.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for overload, (inside, outside) in kernels.items():
                    kernel = self._by_thread(inside, outside)
                    library.impl(_registered_name(overload), kernel, self._dispatch_key, with_keyset=True)
        except RuntimeError as error:
            self._unregister()
            raise RunError(
                f"torch refused other kernels for {self._dispatch_key}, probably because another library has overridden "
                f"the same operators: {error}"
            ) from error

    def _unregister(self) -> None:
        library, self._library = self._library, None
        if library is not None:
            library._destroy()

    def _by_thread(self, inside: Kernel, outside: Kernel) -> Kernel:
        own = self._own

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            return (inside if getattr(own, "depth", 0) else outside)(keyset, *args, **kwargs)

        return kernel


def overloads_of(name: str) -> list[Any]:
    """All overloads of an operator of ``torch.ops.aten`` that take tensors; none where this torch does not have it."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]
    return [overload for overload in overloads if torch._C._dispatch_has_kernel(overload.name())]  # not those of scripts alone


def has_kernel(overload: Any, dispatch_key: str) -> bool:
    """Whether torch has a kernel for an overload under a key, built for the device or not."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), dispatch_key))


def _registered_name(overload: Any) -> str:
    return str(overload.name()).removeprefix("aten::")
