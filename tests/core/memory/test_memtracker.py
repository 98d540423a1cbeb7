"""Bytes of a step against torch's own ``MemTracker``: the same to the byte, at the peak and at the end, there also by kind.

Both look at every op by a dispatch mode and count storages, once each, by their size; on a CPU neither rounds (MemTracker does
on CUDA only, to 512 bytes). What they see differs in one thing: MemTracker looks at the results of ops, the meter at their
arguments too. A tensor that was made before the step and is neither the model's nor the optimizer's, such as the batch, must
therefore be named to MemTracker; it counts there from the start, and with the meter from its first use. Both are told of it
beforehand here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_widgets.core.checkpointing import Checkpointing
from amp_widgets.core.memory.cpu import CpuMeter
from amp_widgets.core.memory.profile import KINDS, StepProfile
from amp_widgets.core.memory.reading import MemoryReading

try:
    from torch.distributed._tools.mem_tracker import MemTracker
except ImportError as error:
    pytest.skip(f"torch {torch.__version__} has no MemTracker: {error}", allow_module_level=True)

CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Bytes:
    end: int
    peak: int
    kinds_at_end: dict[str, int] | None = None
    """Parameters, buffers, gradients and optimizer state; None where they are not told apart."""

    @property
    def total(self) -> tuple[int, int]:
        return self.end, self.peak


class Training:
    """A net that has been trained for one step, with AdamW."""

    def __init__(self, net: str, dtype: torch.dtype | None, *, checkpointed: bool) -> None:
        torch.manual_seed(0)
        make, draw, layers = NETS[net]
        self.model, self.batch = make(), draw()
        self.targets = torch.randint(4, (len(self.batch),))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.dtype = dtype
        self.checkpointing = Checkpointing(self.model)
        self.checkpointing.apply(self.checkpointing.resolve(layers) if checkpointed else ())
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast("cpu", self.dtype) if self.dtype else contextlib.nullcontext():
            loss = F.cross_entropy(self.model(self.batch), self.targets)
        loss.backward()
        self.optimizer.step()


@functools.cache
def by_meter(net: str, dtype: torch.dtype | None, checkpointed: bool) -> Bytes:
    reading, _ = measured(Training(net, dtype, checkpointed=checkpointed), profiled=False)
    return Bytes(int(reading.allocated_bytes), int(reading.peak_bytes))


def by_profile(net: str, dtype: torch.dtype | None, checkpointed: bool) -> Bytes:
    reading, profile = measured(Training(net, dtype, checkpointed=checkpointed), profiled=True)
    assert profile is not None
    assert (profile.total_bytes[-1], profile.peak_bytes) == (reading.allocated_bytes, reading.peak_bytes)
    assert sum(profile.peak_bytes_by_kind.values()) == profile.peak_bytes == sum(profile.peak_bytes_by_layer.values())
    at_end = dict(zip(KINDS, profile.bytes_by_kind[-1].tolist(), strict=True))
    return Bytes(int(profile.total_bytes[-1]), profile.peak_bytes, {kind: at_end[kind] for kind in THEIR_NAMES})


def measured(training: Training, *, profiled: bool) -> tuple[MemoryReading, StepProfile | None]:
    meter = CpuMeter(training.model, [training.optimizer])
    meter._storages.see(training.batch, training.targets)
    if profiled:
        meter.profile_next("a step")
    meter.begin()
    training.step()
    reading = meter.end()
    profile = meter.take_profile()
    meter.close()
    return reading, profile


@functools.cache
def by_torch(net: str, dtype: torch.dtype | None, checkpointed: bool) -> Bytes:
    training = Training(net, dtype, checkpointed=checkpointed)
    tracker = MemTracker()
    tracker.track_external(training.model, training.optimizer, training.batch, training.targets)
    with tracker:
        training.step()
    end, peak = (tracker.get_tracker_snapshot(moment)[CPU] for moment in ("current", "peak"))
    return Bytes(end["Total"], peak["Total"], {kind: end[name] for kind, name in THEIR_NAMES.items()})


THEIR_NAMES = {"parameter": "Parameter", "buffer": "Buffer", "gradient": "Gradient", "optimizer": "Optstate"}


class Residual(nn.Module):
    """Convolutions with BatchNorm, nothing in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
            )
            for _ in range(3)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = F.relu(x + layer(x))
        return self.head(x.mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(size, 12, batch_first=True) for size in (6, 12))
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x[:, -1])


class InPlace(nn.Module):
    """In-place ReLU and additions, on results and on views of them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 32)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(32, 64), nn.ReLU(inplace=True), nn.Unflatten(1, (8, 8)), Transposed(), nn.Flatten(), nn.Linear(64, 32)
            )
            for _ in range(3)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x).add_(x).relu_()
        left, right = x.view(-1, 2, 16).unbind(1)
        return self.head((left * right).squeeze().expand_as(left))


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.clone().transpose(1, 2)
        y[:, 0].mul_(2)
        y.grad_fn  # noqa: B018  # MemTracker hooks it; unread, that crashes Python up to torch 2.14 (pytorch/pytorch#196459)
        return y


class Tied(nn.Module):
    """Words in and words out by one matrix, with a table of positions that is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 16)
        self.register_buffer("positions", torch.randn(10, 16))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)
        )
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.positions
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)[:, -1, :4]


def mlp() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 32), nn.GELU()) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(32, 4))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten(), nn.Linear(12 * 16, 4))


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], list[str]]] = {
    "mlp": (mlp, lambda: torch.randn(96, 32), ["0", "1", "2"]),
    "cnn": (Residual, lambda: torch.randn(6, 3, 12, 12), ["layers.*"]),
    "lstm": (Recurrent, lambda: torch.randn(16, 12, 6), ["layers.*"]),
    "encoder": (encoder, lambda: torch.randn(8, 12, 16), ["0.layers.*"]),
    "in-place": (InPlace, lambda: torch.randn(128, 16), ["layers.*"]),
    "tied": (Tied, lambda: torch.randint(40, (24, 10)), ["layers.*"]),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("net", NETS)
class TestTheSameToTheByte:
    @pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
    def test_meter(self, net: str, dtype: torch.dtype | None, checkpointed: bool) -> None:
        assert by_meter(net, dtype, checkpointed).total == by_torch(net, dtype, checkpointed).total

    @pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
    def test_profile(self, net: str, dtype: torch.dtype | None, checkpointed: bool) -> None:
        assert by_profile(net, dtype, checkpointed) == by_torch(net, dtype, checkpointed)

    def test_the_nets_are_such_that_checkpointing_matters(self, net: str, dtype: torch.dtype | None) -> None:
        plain, checkpointed = by_meter(net, dtype, False), by_meter(net, dtype, True)
        assert plain.end == checkpointed.end < checkpointed.peak < 0.9 * plain.peak
