"""Reading numbers back: at once on a CPU, and never through the operator that counts as a sync."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from amp_widgets.core.readback import Readback, host_value


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32])
def test_values_of_every_dtype(dtype: torch.dtype) -> None:
    assert host_value(torch.tensor(3, dtype=dtype)) == 3.0
    assert host_value(torch.full((1, 1), 3, dtype=dtype)) == 3.0


def test_a_cpu_has_them_at_once() -> None:
    value = torch.tensor(1.5)
    readback = Readback((value, None, torch.tensor(math.inf)))
    value.fill_(9.0)  # what happens later does not show
    assert readback.ready()
    assert readback.values()[0] == 1.5
    assert math.isnan(readback.values()[1])
    assert readback.values()[2] == math.inf


def test_nothing_that_counts_as_a_sync() -> None:
    class Seen(TorchDispatchMode):
        names: list[str] = []  # noqa: RUF012  # one test

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.names.append(func.name())
            return func(*args, **(kwargs or {}))

    with Seen():
        Readback((torch.tensor(1.0), torch.tensor(1.0, dtype=torch.bfloat16))).values()
    assert not [name for name in Seen.names if "_local_scalar_dense" in name]
    assert Seen.names
