"""What measuring a step's memory costs, against torch's own tools: python tests/benchmarks/memory.py [--rounds N] [--threads N]

All in one run, on nets of their own made from the same seed. The ways take turns step by step, so that a machine that slows
down slows all of them; the ratio is of medians, and of the whole step: with what is done before and after it, though not with
making a picture of it afterwards, whose time stands apart. On a busy machine the ratio of the fastest steps is the better one.
It never fails on a time. More threads make the step shorter and the measuring no faster. The peaks are there to see that all of
them count the same.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_widgets.core.memory.cpu import CpuMeter
from amp_widgets.demos.text import TextGPT

try:
    from torch.distributed._tools.mem_tracker import MemTracker
except ImportError:  # of this build of torch
    MemTracker = None  # type: ignore[assignment,misc]

UNCOUNTED = 3


class Way:
    """One way to run a step: as it is, or measured."""

    name = "plain step"

    def __init__(self, make: Callable[[], nn.Module], batch: tuple[Tensor, Tensor]) -> None:
        torch.manual_seed(0)
        self.model = make()
        self.inputs, self.targets = batch
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.peak_bytes = math.nan
        self.times_s: list[float] = []
        self.picture_s: list[float] = []

    def train(self) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(self.inputs).flatten(0, -2), self.targets.flatten()).backward()
        self.optimizer.step()

    def step(self) -> None:
        self.train()

    def make_picture(self) -> None:
        """What is made of the measurement when the step is over."""

    def timed(self) -> None:
        begun_s = time.perf_counter()
        self.step()
        ended_s = time.perf_counter()
        self.make_picture()
        self.times_s.append(ended_s - begun_s)
        self.picture_s.append(time.perf_counter() - ended_s)


class Metered(Way):
    name = "CpuMeter: total and peak"

    def __init__(self, make: Callable[[], nn.Module], batch: tuple[Tensor, Tensor]) -> None:
        super().__init__(make, batch)
        self.meter = CpuMeter(self.model, [self.optimizer])

    def step(self) -> None:
        self.meter.begin()
        self.train()
        self.peak_bytes = self.meter.end().peak_bytes


class Profiled(Metered):
    name = "CpuMeter.profile_next: by kind and layer"

    def step(self) -> None:
        self.meter.profile_next("benchmark")
        super().step()

    def make_picture(self) -> None:
        profile = self.meter.take_profile()
        if profile is None:
            raise SystemExit(f"{self.name}: not profiled, {self.meter.unprofiled_because}")
        self.peak_bytes = profile.peak_bytes


class Tracked(Way):
    name = "torch's MemTracker"

    def __init__(self, make: Callable[[], nn.Module], batch: tuple[Tensor, Tensor]) -> None:
        super().__init__(make, batch)
        self.tracker = MemTracker()
        self.tracker.track_external(self.model, self.optimizer, *batch)

    def step(self) -> None:
        self.tracker.reset_mod_stats()
        with self.tracker:
            self.train()
        self.peak_bytes = self.tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


class TorchProfiled(Way):
    name = "torch.profiler(profile_memory=True)"  # which tells of allocations, but keeps no total

    def step(self) -> None:
        cpu = torch.profiler.ProfilerActivity.CPU
        with no_errors_shown(), torch.profiler.profile(activities=[cpu], profile_memory=True) as self.profiler:
            self.train()

    def make_picture(self) -> None:
        self.profiler.key_averages()


@contextlib.contextmanager
def no_errors_shown() -> Iterator[None]:
    """Without the two lines that the profiler writes for each step."""
    shown = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(shown, 2)
        os.close(nowhere)
        os.close(shown)


def measure(name: str, make: Callable[[], nn.Module], batch: tuple[Tensor, Tensor], rounds: int) -> None:
    kinds = [Way, Metered, Profiled, *([] if MemTracker is None else [Tracked]), TorchProfiled]
    ways = [kind(make, batch) for kind in kinds]
    for way in ways:
        for _ in range(UNCOUNTED):
            way.timed()
        way.times_s.clear()
        way.picture_s.clear()
    for _ in range(rounds):
        for way in ways:
            way.timed()
        gc.collect()  # else one of them pays for what another has left
    plain_s, fastest_s = statistics.median(ways[0].times_s), min(ways[0].times_s)
    print(f"\n{name}: {rounds} steps each, on {torch.get_num_threads()} thread(s), torch {torch.__version__}")
    for way in ways:
        median_s, picture_s = statistics.median(way.times_s), statistics.median(way.picture_s)
        print(
            f"  {way.name:<41} {median_s * 1e3:9.2f} ms   "
            f"ratio {median_s / plain_s:5.3f}, of the fastest {min(way.times_s) / fastest_s:5.3f}   "
            + (f"peak {way.peak_bytes / 1e6:8.3f} MB" if math.isfinite(way.peak_bytes) else " " * 16)
            + (f"   picture {picture_s * 1e3:7.1f} ms" if type(way).make_picture is not Way.make_picture else "")
        )
    if MemTracker is None:
        print("  this torch has no MemTracker")


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


def mlp() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(512, 10))


def cnn() -> nn.Module:
    blocks = [Residual(32) for _ in range(6)]
    return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def gpt() -> nn.Module:
    return TextGPT(256, 6, 8, 128)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="steps of each way on the MLP; a tenth of that on the others")
    parser.add_argument("--threads", type=int, default=1, help="numerical threads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    few = max(3, options.rounds // 10)
    measure("MLP", mlp, (torch.randn(64, 512), torch.randint(10, (64,))), options.rounds)
    measure("CNN", cnn, (torch.randn(16, 3, 32, 32), torch.randint(10, (16,))), few)
    measure("GPT", gpt, (torch.randint(256, (8, 128)), torch.randint(256, (8, 128))), few)
