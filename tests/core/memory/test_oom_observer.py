"""What is known when CUDA's allocator cannot give what was asked for: an op raises, having called the observer, as torch does."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amp_widgets.core.memory.cuda import CudaMeter
from amp_widgets.core.memory.oom_observer import OutOfMemoryObserver, place_by_frames
from amp_widgets.core.threads import this_thread

CUDA_0, CUDA_1 = torch.device("cuda:0"), torch.device("cuda:1")
IN_USE = 7_000


class Machine:
    """Whose memory runs out wherever `run_out` is called."""

    def __init__(self) -> None:
        self.observers: list[Callable[[int, int, int, int], None]] = []

    def attach(self, observe: Callable[[int, int, int, int], None]) -> None:
        self.observers[:] = [observe]

    def alarm(self, device: int = 0) -> None:
        for observe in self.observers:
            assert observe(device, 4096, 10_000, 3_000) is None

    def run_out(self) -> None:
        self.alarm()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 KiB. GPU 0 has a total capacity of ...")

    def stats(self, device: torch.device) -> Mapping[str, Any]:
        return {
            "allocated_bytes": {"all": {"current": IN_USE, "peak": IN_USE}},
            "inactive_split_bytes": {"all": {"current": 0}},
            "reserved_bytes": {"all": {"current": IN_USE}},
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }


MACHINE = Machine()


@torch.library.custom_op("amp_widgets_tests::oom", mutates_args=())
def oom(x: Tensor) -> Tensor:
    MACHINE.run_out()
    return x.clone()


class RunsOut(torch.autograd.Function):
    """Memory runs out in its backward pass, or in the forward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, in_forward: bool) -> Tensor:
        return oom(x) if in_forward else x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return oom(gradients[0]), None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.fails: str = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.fails == "forward" or (self.fails == "recompute" and torch._C._current_graph_task_id() != -1):
            x = RunsOut.apply(x, True)
        elif self.fails == "backward":
            x = RunsOut.apply(x, False)
        return x.tanh()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(3))
        self.checkpoints = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return x


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net()


def meter_on(model: nn.Module) -> CudaMeter:
    return CudaMeter(
        (CUDA_0,),
        model,
        stats=MACHINE.stats,
        reset=lambda device: None,
        counted=(torch.device("cpu"),),
        attach=MACHINE.attach,
    )


def train(model: Net) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        model(torch.ones(2, 3)).sum().backward()


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("where", ["forward", "backward", "recompute"])
def test_place(model: Net, where: str, tracked: bool) -> None:
    model.blocks[1].fails = where
    model.checkpoints = where == "recompute"
    meter = meter_on(model)
    told: list[str] = []
    meter.on_death = lambda: told.append("died")
    if tracked:
        meter.profile_next("test")
    meter.begin()
    train(model)
    assert told == ["died"]
    meter.abandon()
    death = meter.take_death()
    assert death is not None
    assert death.cause == "allocator"
    assert death.device == "cuda:0"
    assert (death.requested_bytes, death.limit_bytes, death.allocated_bytes) == (4096, 10_000, IN_USE)
    assert death.phase == where
    # Without a tracker the stack tells the layer, which in a backward pass it does not.
    assert death.layer == ("blocks.1" if tracked or where != "backward" else "")
    assert death.operator == ("amp_widgets_tests::oom" if tracked else "")
    assert death.thread == this_thread()
    if tracked:
        assert death.record is not None
        profile = death.record.profile(label="out of memory", step=3, device="cuda:0", source="test")
        assert profile.peak_bytes > 0
        (readings,) = profile.allocator
        assert readings.point[-1] == len(profile.bytes_by_kind) - 1  # the moment of death
    else:
        assert death.record is None
    assert meter.take_death() is None  # once


def test_within_the_step(model: Net) -> None:
    model.blocks[2].fails = "forward"
    meter = meter_on(model)
    meter.begin()
    train(model)
    death = meter.take_death()  # before anybody has left the step
    assert death is not None
    assert death.layer == "blocks.2"
    assert meter.end().allocated_bytes == IN_USE


def test_in_the_optimizer(model: Net) -> None:
    class Optimizer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            oom(torch.ones(1))

    optimizer = Optimizer(model.parameters(), lr=0.1)
    meter = meter_on(model)
    meter.begin()
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    death = meter.take_death()
    assert death is not None
    assert (death.phase, death.layer) == ("optimizer", "")


def test_nothing_outside_of_a_step_or_on_another_device(model: Net) -> None:
    meter = meter_on(model)
    MACHINE.alarm()
    meter.begin()
    MACHINE.alarm(device=1)
    other = threading.Thread(target=MACHINE.alarm)
    other.start()
    other.join()
    assert meter.take_death() is None
    meter.end()
    MACHINE.alarm()
    assert meter.take_death() is None


def test_what_torch_gets_over(model: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN in its benchmark mode tries one algorithm after the other, some of which need more than there is."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    meter = meter_on(model)
    told: list[str] = []
    meter.on_death = lambda: told.append("died")
    meter.begin()
    MACHINE.alarm()
    meter.end()
    assert meter.take_death() is None
    assert told == []
    meter.profile_next("test")
    meter.begin()
    MACHINE.alarm()  # no op has raised
    meter.end()
    assert meter.take_death() is None
    assert meter.take_profile() is not None, meter.unprofiled_because
    model.blocks[0].fails = "forward"
    meter.begin()
    train(model)
    meter.abandon()
    assert meter.take_death() is not None  # asked for by somebody who has the error in hand


def test_the_next_step_starts_without(model: Net) -> None:
    model.blocks[0].fails = "forward"
    meter = meter_on(model)
    meter.begin()
    train(model)
    meter.begin()
    assert meter.take_death() is None
    meter.end()


def test_no_exception_is_let_out(model: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = meter_on(model)

    def stats(device: torch.device) -> Any:
        raise ValueError("statistics")

    meter.begin()
    meter._stats = stats
    MACHINE.alarm()
    assert meter.take_death() is None


def test_attached_once_and_lazily(monkeypatch: pytest.MonkeyPatch, model: Net) -> None:
    attached: list[Any] = []
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", attached.append, raising=False)
    monkeypatch.setattr(OutOfMemoryObserver, "_attached", False)
    assert attached == []
    meters = [CudaMeter((CUDA_0,), model, stats=MACHINE.stats, reset=lambda device: None) for _ in range(3)]
    assert len(attached) == 1
    for meter in meters:
        meter.begin()
    attached[0](0, 1, 2, 1)
    assert [death is not None for death in (meter.take_death() for meter in meters)] == [True] * 3


def test_nobody_is_kept_alive() -> None:
    model = Net()
    meter = meter_on(model)
    gone = weakref.ref(meter)
    meter.close()
    MACHINE.alarm()
    del meter
    gc.collect()
    assert gone() is None
    other = meter_on(model)
    weak = weakref.ref(model)
    del model
    gc.collect()
    assert weak() is None
    MACHINE.alarm()
    del other
    gc.collect()
    MACHINE.alarm()  # inert


def test_place_of_nothing() -> None:
    assert place_by_frames(None) == ("", "")
