"""Which meter a model gets, and what it says when it cannot be measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from amp_widgets.core.memory.compiled import is_compiled, why_compiled
from amp_widgets.core.memory.cpu import CpuMeter
from amp_widgets.core.memory.cuda import CudaMeter
from amp_widgets.core.memory.meter import meter_for


class On(nn.Module):
    """A model that claims to be on the given devices."""

    def __init__(self, parameter: str | None, buffer: str | None = None) -> None:
        super().__init__()
        self.on = (parameter, buffer)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return iter([("p", _Claim(self.on[0]))] if self.on[0] else [])

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        return iter([("b", _Claim(self.on[1]))] if self.on[1] else [])


class _Claim:
    def __init__(self, device: str) -> None:
        self.device = torch.device(device)


def test_a_model_on_the_cpu() -> None:
    meter = meter_for(nn.Linear(2, 2), [])
    assert isinstance(meter, CpuMeter)
    assert meter.measured
    assert meter.source == "live tensor bytes on cpu, counted exactly (dispatch mode)"


def test_a_model_without_parameters_is_on_the_cpu() -> None:
    assert isinstance(meter_for(nn.ReLU(), []), CpuMeter)


@pytest.mark.parametrize("device", ["meta", "mps", "xpu:0"])
def test_other_devices(device: str) -> None:
    meter = meter_for(On("cpu", device), [])
    assert not meter.measured
    assert meter.source == f"not measured: only cuda and cpu devices can be measured, and the model is on {device}"


def test_cuda_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    meter = meter_for(On("cuda:0"), [])
    assert meter.source == "not measured: the model is on a cuda device, but torch finds no CUDA driver or GPU"


def test_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    meter = meter_for(On("cuda:1", "cuda:0"), [], reset_peak=False)
    assert isinstance(meter, CudaMeter)
    assert meter.source.startswith("torch.cuda.memory_stats on cuda:0, cuda:1; the peak within a step is known only when")
    assert "CPU" not in meter.source
    assert "bytes on the CPU are not counted" in meter_for(On("cuda:0", "cpu"), []).source


def test_a_compiled_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert why_compiled(model) is None
    model[1]._compiled_call_impl = lambda: None  # what model[1].compile() sets
    meter = meter_for(model, [])
    assert not meter.measured
    assert meter.source == (
        "not measured: layer '1' is compiled, and tensors inside of code made by torch.compile cannot be counted on a CPU"
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchs_own_ways_to_compile_are_recognised() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    assert not is_compiled(model)
    wrapped = torch.compile(model, backend="eager")
    assert isinstance(wrapped, nn.Module)
    assert is_compiled(wrapped)
    assert not is_compiled(model)
    assert meter_for(wrapped, []).source.startswith("not measured: the model is compiled")
    model.compile(backend="eager")
    assert is_compiled(model)


def test_a_torch_that_lacks_what_counting_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._C._dynamo import eval_frame

    monkeypatch.delattr(eval_frame, "set_guard_complete_hook")
    meter = meter_for(nn.Linear(2, 2), [])
    assert meter.source == (
        f"not measured: torch {torch.__version__} has no torch._C._dynamo.eval_frame.set_guard_complete_hook, "
        "which counting needs; torch 2.13 has"
    )
