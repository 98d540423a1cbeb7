"""Reading arrays back: at once on a CPU, unseen by modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from amp_widgets.core.array_readback import ArrayReadback
from amp_widgets.core.unseen import unseen


def test_arrays_in_the_order_of_the_tensors() -> None:
    tensors = [torch.arange(6, dtype=torch.int32).view(2, 3), torch.tensor([0.5], dtype=torch.float64), torch.empty(0)]
    readback = ArrayReadback(tensors)
    assert readback.ready()
    for array, tensor in zip(readback.arrays(), tensors, strict=True):
        assert array.shape == tuple(tensor.shape)
        assert array.tolist() == tensor.tolist()
    assert ArrayReadback([]).arrays() == []


def test_ops_that_nobody_sees() -> None:
    class Seen(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(func.name())
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    with Seen() as seen:
        readback = ArrayReadback([torch.ones(2)])
        before = list(seen.names)
        readback.arrays()
        with unseen():
            assert not (x * 2).requires_grad
        assert seen.names == before
        assert (x * 2).requires_grad
    assert torch.is_grad_enabled()
    assert seen.names[-1] == "aten::mul.Tensor"


def test_what_is_raised_within_comes_out_and_leaves_no_trace() -> None:
    with pytest.raises(ZeroDivisionError):
        with unseen():
            raise ZeroDivisionError
    assert torch.is_grad_enabled()
    with torch.no_grad():
        with unseen():
            pass
        assert not torch.is_grad_enabled()
