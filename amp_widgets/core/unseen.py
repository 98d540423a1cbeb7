"""Ops of our own within a step, which must be none of the step's."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes


class unseen:  # noqa: N801  # used like torch.no_grad, and no generator: it is on the step's path
    """Ops within are nobody's: not the graph's, not that of modes which count memory or look for casts."""

    __slots__ = ("_functions", "_grad", "_modes")

    def __enter__(self) -> None:
        self._grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        self._functions = torch._C.DisableTorchFunction()
        self._functions.__enter__()
        self._modes: Any = None
        if torch._C._len_torch_dispatch_stack():
            self._modes = _disable_current_modes()
            self._modes.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._modes is not None:
            self._modes.__exit__(None, None, None)
        self._functions.__exit__(kind, error, trace)
        torch._C._set_grad_enabled(self._grad)
