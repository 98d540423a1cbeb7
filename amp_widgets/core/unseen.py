"""Ops of our own within a step, which must be none of the step's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Ops within are nobody's: not the graph's, not that of modes which count memory or look for casts."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        if torch._C._len_torch_dispatch_stack():
            with _disable_current_modes():
                yield
        else:
            yield
