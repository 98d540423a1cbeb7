"""Bytes of a step on a CPU against malloc itself, which a small C library in front of it counts (malloc_peak.c).

The nets train one after the other in a process with that library preloaded. Truth is the most that was live at one time within
a step, above what was live just before the model was made. Of everything else that a process holds, this is left in or out:

- The step's batch is made after the model, so it counts on both sides, as do the parameters, gradients and Adam's averages.
- What libraries allocate once and keep is left out, by a first pass with the same shapes before the baseline is taken: MKL's
  packing buffers (11 MB for the GPT), oneDNN's primitives and their scratchpad, autograd's threads. They are not the step's.
- Python objects of more than 512 bytes, autograd nodes, and the 16 bytes to one page that malloc adds to a block are left in:
  0.3 to 0.6 MB here, which is why the tensors are to be far larger. Smaller Python objects come from mmap.
- What a kernel allocates and frees again is in the truth, and the meter cannot see it. In these nets it is that of oneDNN's
  convolutions: a copy, in a blocked layout, of the input and of the output's gradient. In a deep net that is little beside what
  is held for the backward pass. In a shallow one with few parameters it is not: `test_the_rest_is_within_kernels`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import gc
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from amp_widgets.core.checkpointing import Checkpointing
from amp_widgets.core.memory.cpu import CpuMeter
from amp_widgets.demos.text import TextGPT

SOURCE = Path(__file__).with_name("malloc_peak.c")
TOLERANCE = 0.03

pytestmark = pytest.mark.timeout(250)  # the first test of a worker waits for the child


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """Bytes of one step, by both."""

    malloc_peak: int
    malloc_end: int
    meter_peak: float
    meter_end: float
    unmetered_malloc_peak: int = 0
    """Of one more step, without the meter."""
    with_scratch: int = 0
    """The most that the meter counted at an op, together with what the op's kernel had allocated and freed again."""
    profile_peak: int = 0
    """Of the step's profile, by kind and layer."""


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("net", ["resnet", "gpt"])
class TestAgainstMalloc:
    def test_peak(self, net: str, checkpointed: bool) -> None:
        for step in trained(net)[checkpointed]:
            assert step.malloc_peak > 40e6, "too small a net to tell"
            assert step.meter_peak == pytest.approx(step.malloc_peak, rel=TOLERANCE)

    def test_peak_of_the_profile(self, net: str, checkpointed: bool) -> None:
        """It takes some 0.1 MB itself, which malloc counts and it does not: hence the malloc peak of the step before."""
        *_, metered, profiled = trained(net)[checkpointed]
        assert profiled.profile_peak == profiled.meter_peak
        assert profiled.profile_peak == pytest.approx(metered.malloc_peak, rel=TOLERANCE)

    def test_what_is_left_at_the_end(self, net: str, checkpointed: bool) -> None:
        for step in trained(net)[checkpointed]:
            assert step.meter_end == pytest.approx(step.malloc_end, rel=TOLERANCE)


@pytest.mark.parametrize("net", ["resnet", "gpt"])
def test_what_checkpointing_saves(net: str) -> None:
    plain, checkpointed = (trained(net)[on][1] for on in (False, True))
    saved = plain.malloc_peak - checkpointed.malloc_peak
    assert saved > 0.2 * plain.malloc_peak
    assert plain.meter_peak - checkpointed.meter_peak == pytest.approx(saved, rel=TOLERANCE)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
class TestShallowNet:
    def test_the_rest_is_within_kernels(self, checkpointed: bool) -> None:
        """The meter alone is 3 % (plain) and 8 % (checkpointed) below malloc here, by what kernels allocate and free again."""
        last = trained("shallow")[checkpointed][-1]
        assert last.meter_peak < last.malloc_peak
        assert last.with_scratch == pytest.approx(last.malloc_peak, rel=TOLERANCE)

    def test_the_meter_itself_takes_next_to_nothing(self, checkpointed: bool) -> None:
        last = trained("shallow")[checkpointed][-1]
        assert last.malloc_peak == pytest.approx(last.unmetered_malloc_peak, rel=0.001)


def test_the_library_counts_what_is_asked_for() -> None:
    """malloc, calloc, realloc, posix_memalign, memalign, aligned_alloc; threads; a tensor."""
    checked = in_child()["library"]
    assert checked == {"live": True, "freed": True, "peak": True, "threads": True, "tensor": True}


# ---- the child -----------------------------------------------------------------------------------------------------------


@functools.cache
def trained(net: str) -> dict[bool, list[Step]]:
    """The steps of a net, plain and with its blocks checkpointed."""
    result = in_child()[net]
    return {on: [Step(**step) for step in result[name]] for on, name in ((False, "plain"), (True, "checkpointed"))}


@functools.cache
def in_child() -> Any:
    library, why_not = built()
    if library is None:
        pytest.skip(why_not)
    environment = {**os.environ, "LD_PRELOAD": library, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    for name in ("PYTHONMALLOC", "MKL_DISABLE_FAST_MM"):  # small objects by malloc; packing buffers not kept
        environment.pop(name, None)
    child = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


@functools.cache
def built() -> tuple[str | None, str]:
    """The library, or None and why not."""
    libc = platform.libc_ver()[0] or "another libc"
    if platform.system() != "Linux" or libc != "glibc":
        return None, f"malloc_peak.c stands in for glibc's malloc, and this is {platform.system()} with {libc}"
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        return None, "no C compiler (cc, gcc or clang) to build malloc_peak.c with"
    _directories.append(directory := tempfile.TemporaryDirectory(prefix="malloc_peak"))
    library = str(Path(directory.name, "malloc_peak.so"))
    build = [compiler, "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", library, str(SOURCE)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return library, ""


_directories: list[tempfile.TemporaryDirectory[str]] = []  # until the interpreter ends


def main() -> None:
    torch.set_num_threads(1)
    malloc = Malloc()
    result: dict[str, Any] = {}
    for net, made in NETS.items():
        make, draw = made()
        number, explained = (2, True) if net == "shallow" else (3, False)
        train(malloc, make, draw, checkpointed=False, number=0)  # what is allocated once and kept
        result[net] = {}
        for name, on in (("plain", False), ("checkpointed", True)):
            steps = train(malloc, make, draw, checkpointed=on, number=number, explained=explained)
            result[net][name] = [dataclasses.asdict(step) for step in steps]
    result["library"] = self_check(malloc)
    print(json.dumps(result))


class Malloc:
    def __init__(self) -> None:
        process = ctypes.CDLL(None)  # the library is in the process already, in front of all others
        self.live: Callable[[], int] = process.malloc_peak_live
        self.peak: Callable[[], int] = process.malloc_peak_peak
        self.reset: Callable[[], None] = process.malloc_peak_reset
        process.malloc_peak_live.restype = process.malloc_peak_peak.restype = ctypes.c_int64
        process.malloc_peak_reset.restype = None


def train(
    malloc: Malloc,
    make: Callable[[], nn.Module],
    draw: Callable[[], tuple[torch.Tensor, ...]],
    *,
    checkpointed: bool,
    number: int,
    explained: bool = False,
) -> list[Step]:
    gc.collect()
    baseline = malloc.live()
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.Adam(model.parameters())
    inputs, targets = draw()
    checkpointing = Checkpointing(model)
    checkpointing.apply(checkpointing.resolve(["layers.*"]) if checkpointed else ())
    meter = CpuMeter(model, [optimizer])

    def step() -> None:
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = F.cross_entropy(outputs.flatten(0, -2), targets.flatten())
        del outputs
        loss.backward()
        optimizer.step()

    done = []
    if number == 0:
        step()
    for index in range(number):
        profiled = index == number - 1 and not explained
        if profiled:
            meter.profile_next("the last step")
        malloc.reset()
        meter.begin()
        step()
        reading = meter.end()
        done.append(
            Step(
                malloc_peak=malloc.peak() - baseline,
                malloc_end=malloc.live() - baseline,
                meter_peak=reading.peak_bytes,
                meter_end=reading.allocated_bytes,
            )
        )
        if profiled:
            profile = meter.take_profile()
            assert profile is not None, meter.unprofiled_because
            done[-1] = dataclasses.replace(done[-1], profile_peak=profile.peak_bytes)
    if explained:
        malloc.reset()
        step()
        unmetered = malloc.peak() - baseline
        meter.begin()
        with Scratch(malloc, meter) as scratch:
            step()
        meter.end()
        done[-1] = dataclasses.replace(done[-1], unmetered_malloc_peak=unmetered, with_scratch=scratch.highest)
    checkpointing.close()
    meter.close()
    return done


class Scratch(TorchDispatchMode):
    """Adds to what the meter counts, at each op, by how much malloc was higher within the op than before and after it."""

    def __init__(self, malloc: Malloc, meter: CpuMeter) -> None:
        super().__init__()
        self.highest = 0
        self._malloc = malloc
        self._storages = meter._storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        malloc, storages = self._malloc, self._storages
        storages.settle()
        before, counted = malloc.live(), storages.bytes
        malloc.reset()
        out = func(*args, **(kwargs or {}))
        scratch = malloc.peak() - max(before, malloc.live())
        storages.settle()
        self.highest = max(self.highest, max(counted, storages.bytes) + scratch)
        return out


def self_check(malloc: Malloc) -> dict[str, bool]:
    """Whether the library counts right, for calls of known size."""
    libc = ctypes.CDLL(None)
    size, number = 1 << 20, ctypes.c_size_t
    for name in ("malloc", "calloc", "realloc", "memalign", "aligned_alloc"):
        getattr(libc, name).restype = ctypes.c_void_p
    slack = 8 * 8192  # a page and a header for each block, and a few Python objects
    before = malloc.live()
    malloc.reset()
    block = ctypes.c_void_p()
    assert libc.posix_memalign(ctypes.byref(block), number(64), number(size)) == 0
    blocks = [
        libc.malloc(number(size)),
        libc.calloc(number(2), number(size)),
        libc.realloc(ctypes.c_void_p(libc.malloc(number(size))), number(3 * size)),
        libc.memalign(number(64), number(size)),
        libc.aligned_alloc(number(64), number(size)),
        block.value,
    ]
    live = malloc.live() - before
    for address in blocks:
        libc.free(ctypes.c_void_p(address))
    freed, peak = malloc.live() - before, malloc.peak() - before

    before = malloc.live()
    tensor = torch.empty(size, dtype=torch.uint8)
    of_tensor = malloc.live() - before
    del tensor
    threads = in_threads(malloc)
    return {
        "live": 0 <= live - 9 * size <= slack,
        "freed": abs(freed) <= slack,
        "peak": 0 <= peak - 9 * size <= slack,
        "threads": threads,
        "tensor": 0 <= of_tensor - size <= slack,
    }


def in_threads(malloc: Malloc) -> bool:
    """Whether nothing is lost when threads allocate and free at once; they do it in C, without the interpreter's lock."""
    from concurrent.futures import ThreadPoolExecutor

    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p

    def work(_: int) -> None:
        for _ in range(1000):
            libc.free(ctypes.c_void_p(libc.malloc(ctypes.c_size_t(5000))))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
        gc.collect()
        before = malloc.live()
        list(pool.map(work, range(4)))
        gc.collect()
        return abs(malloc.live() - before) < 5000  # not the size of one block, in 4,000


class ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """The residual net for CIFAR images: three stages of `depth` blocks."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.layers = nn.ModuleList()
        inputs = width
        for stage in range(3):
            for index in range(depth):
                outputs = width << stage
                self.layers.append(ResidualBlock(inputs, outputs, 2 if stage and not index else 1))
                inputs = outputs
        self.head = nn.Linear(inputs, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3)))


Net = tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]]]


def resnet(depth: int, batch: int) -> Net:
    return lambda: ResNet(32, depth), lambda: (torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,)))


def gpt() -> Net:
    return lambda: TextGPT(192, 6, 4, 128), lambda: (torch.randint(256, (8, 128)), torch.randint(256, (8, 128)))


NETS: dict[str, Callable[[], Net]] = {
    "resnet": lambda: resnet(depth=9, batch=5),  # ResNet-56, twice as wide
    "shallow": lambda: resnet(depth=2, batch=16),
    "gpt": gpt,
}


if __name__ == "__main__":
    main()
