"""What looking at a step's numbers costs: python tests/benchmarks/numerics.py [--rounds N] [--threads N]

All in one run, on nets of their own made from the same seed. The ways take turns step by step, so that a machine that slows
down slows all of them. Times are of the processor, which on one thread are those of the step, but for what others on the
machine take of it; the ratio is of medians, and of the fastest steps. It never fails on a time. The sampled form of the
histograms is "every 10th step", which is what a dashboard switches on: at most 1.05 of a step, and the ratio is of the mean
step. "This step" is what one step that is counted takes. A skipped step is compared with a skipped one.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_widgets.core.gradient_probe import SAMPLE_ELEMENTS, GradientProbe
from amp_widgets.core.overflow_probe import OverflowProbe
from amp_widgets.demos.text import TextGPT

UNCOUNTED = 3


class Way:
    """One way to run a step: as it is, or watched."""

    name = "plain step"
    group = "step"

    def __init__(self, make: Callable[[], nn.Module], batch: tuple[Tensor, Tensor]) -> None:
        torch.manual_seed(0)
        self.model = make()
        self.inputs, self.targets = batch
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.times_s: list[float] = []
        self.at = 0

    def backward(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = self.model(self.inputs)
        F.cross_entropy(output.float().flatten(0, -2), self.targets.flatten()).backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()

    def timed(self) -> None:
        begun_s = time.process_time()
        self.step()
        self.times_s.append(time.process_time() - begun_s)
        self.at += 1


class Counted(Way):
    name = "gradient histograms, sampled, this step"
    sample: int | None = SAMPLE_ELEMENTS
    every = 1

    def __init__(self, make: Callable[[], nn.Module], batch: tuple[Tensor, Tensor]) -> None:
        super().__init__(make, batch)
        self.probe = GradientProbe(self.model, every=self.every, sample=self.sample)

    def step(self) -> None:
        self.probe.begin(self.at)
        super().step()
        self.probe.end(1.0)


class CountedInFull(Counted):
    name = "gradient histograms, all elements, this step"
    sample = None


class CountedNowAndThen(Counted):
    name = "gradient histograms, sampled, every 10th step"
    every = 10


class Followed(Way):
    name = "overflow probe, each gradient as it arrives"

    def __init__(self, make: Callable[[], nn.Module], batch: tuple[Tensor, Tensor]) -> None:
        super().__init__(make, batch)
        self.probe = OverflowProbe(self.model, every_step=True)

    def step(self) -> None:
        self.probe.begin(self.at)
        super().step()
        self.probe.end(self.at, 1.0, False, None)


class Quiet(Followed):
    name = "overflow probe, a step that is not skipped"

    def __init__(self, make: Callable[[], nn.Module], batch: tuple[Tensor, Tensor]) -> None:
        super().__init__(make, batch)
        self.probe = OverflowProbe(self.model)


class Skipped(Way):
    name = "plain skipped step"
    group = "skipped step"

    def step(self) -> None:
        self.backward()


class SkippedAndLookedAt(Skipped):
    name = "overflow probe, a skipped step, looked at afterwards"

    def __init__(self, make: Callable[[], nn.Module], batch: tuple[Tensor, Tensor]) -> None:
        super().__init__(make, batch)
        self.probe = OverflowProbe(self.model)

    def step(self) -> None:
        super().step()
        self.probe.skipping()
        self.probe.end(self.at, 1.0, True, None)


WAYS = (Way, Counted, CountedInFull, CountedNowAndThen, Quiet, Followed, Skipped, SkippedAndLookedAt)


def measure(name: str, make: Callable[[], nn.Module], batch: tuple[Tensor, Tensor], rounds: int) -> None:
    ways = [kind(make, batch) for kind in WAYS]
    for way in ways:
        for _ in range(UNCOUNTED):
            way.timed()
        way.times_s.clear()
    for _ in range(rounds):
        for way in ways:
            Way.step(way)  # each finds the caches as full of its own as it leaves them
            way.timed()
        gc.collect()  # else one of them pays for what another has left
    print(f"\n{name}: {rounds} steps each, on {torch.get_num_threads()} thread(s), torch {torch.__version__}")
    plain = {way.group: way for way in reversed(ways)}
    for way in ways:
        against = plain[way.group]
        if isinstance(way, CountedNowAndThen):  # one in ten is dearer, and the mean is what counts
            ratio, fastest_ratio = (_mean_ratio(way, against, of) for of in (statistics.median, min))
        else:
            ratio, fastest_ratio = (of(way.times_s) / of(against.times_s) for of in (statistics.median, min))
        print(
            f"  {way.name:<53} {statistics.median(way.times_s) * 1e3:9.2f} ms   "
            f"ratio {ratio:5.3f}, of the fastest {fastest_ratio:5.3f}"
        )


def _mean_ratio(way: CountedNowAndThen, against: Way, of: Callable[[Sequence[float]], float]) -> float:
    """Of the mean step: those that are counted and those that are not, each kind by a middle that no other process shifts."""
    counted = {at for at in range(len(way.times_s)) if (at + UNCOUNTED) % way.every == 0}
    kinds = ([time_s for at, time_s in enumerate(way.times_s) if (at in counted) is wanted] for wanted in (True, False))
    one, others = (of(times_s) for times_s in kinds)
    return (one + (way.every - 1) * others) / way.every / of(against.times_s)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="at least 10")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    measure("MLP, batch 256", mlp, (torch.randn(256, 1, 256), torch.randint(10, (256, 1))), options.rounds)
    tokens = torch.randint(256, (8, 64))
    measure("GPT, 8 sequences of 64", lambda: TextGPT(128, 6, 4, 64), (tokens, tokens), options.rounds)


if __name__ == "__main__":
    main()
