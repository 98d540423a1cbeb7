"""A step profiled where autograd works off a device's nodes on a thread of its own, as on CUDA, against the same on a CPU.

The device is fake_device.cpp, which is compiled for that (torch keeps it); it is torch's for a process for good, hence one of its
own. What it shows besides: bytes are counted on devices only, and on several.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amp_widgets.core.memory.cpu import CpuMeter
from amp_widgets.core.memory.cuda import CudaMeter
from amp_widgets.core.memory.profile import StepProfile

SOURCE = Path(__file__).with_name("fake_device.cpp")
BATCH, WIDTH = 5, 4

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not (shutil.which("c++") and shutil.which("ninja")), reason="needs c++ and ninja"),
]


@pytest.fixture(scope="module")
def found() -> Any:
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False)
    if "fake_device.cpp cannot be compiled" in done.stderr:
        pytest.skip(f"fake_device.cpp cannot be compiled here: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", ["plain", "recompute", "reentrant recompute"])
def test_as_on_a_cpu(found: Any, case: str) -> None:
    ours, on_cpu = found[case]["device"], found[case]["cpu"]
    assert ours["main"] not in ours["backward"]  # or this shows nothing
    assert on_cpu["backward"] == [on_cpu["main"]]
    for name in ("states", "phases", "peak", "peak_by_layer", "layers", "operators"):
        assert ours[name] == on_cpu[name], name
    assert ours["read_on"] == sorted([ours["main"], *ours["backward"]])  # the allocator, within backward as well
    backward_layers = {layer for phase, layer in ours["readings"] if phase == "backward"}
    assert {"first.0", "first.1", "second"} <= backward_layers


def test_two_devices(found: Any) -> None:
    ours, on_cpu = found["two devices"]["device"], found["plain"]["cpu"]
    assert len(ours["read_on"]) == 3
    copied = BATCH * WIDTH * 4  # the hidden values are there twice
    peak, expected = ours["peak"], on_cpu["peak"]
    assert peak["activation"] == expected["activation"] + copied
    assert {kind: size for kind, size in peak.items() if kind != "activation"} == {
        kind: size for kind, size in expected.items() if kind != "activation"
    }
    assert ours["devices"] == ["fake:0", "fake:1"]


@pytest.mark.parametrize("tracked", [False, True])
def test_memory_runs_out_on_that_thread(found: Any, tracked: bool) -> None:
    death = found["out of memory"]["tracked" if tracked else "untracked"]
    assert death["phase"] == "backward"
    assert death["layer"] == ("first.1" if tracked else "")
    assert death["asked_on"] != death["main"]
    assert death["requested"] == 77


# ---- the process ----------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, WIDTH), nn.ReLU())
        self.second = nn.Linear(WIDTH, 2)
        self.use_reentrant: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.use_reentrant is None:
            x = self.first(x)
        else:
            x = checkpoint(self.first, x, use_reentrant=self.use_reentrant)
        y: Tensor = self.second(x.to(self.second.weight.device))
        return y


class Training:
    def __init__(self, device: torch.device, second: torch.device, use_reentrant: bool | None) -> None:
        torch.manual_seed(0)
        x, t = torch.randn(BATCH, 3), torch.randn(BATCH, 2)
        self.model = Net()
        self.model.first.to(device)
        self.model.second.to(second)
        self.model.use_reentrant = use_reentrant
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        self.x, self.t = x.to(device).requires_grad_(), t.to(second)
        self.backward: set[int] = set()
        self.model.first[0].weight.register_hook(lambda gradient: self.backward.add(threading.get_ident()))
        self.step()

    def step(self) -> None:
        ((self.model(self.x) - self.t) ** 2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.x.grad = None


class Statistics:
    def __init__(self) -> None:
        self.threads: set[int] = set()

    def __call__(self, device: torch.device) -> Mapping[str, Any]:
        self.threads.add(threading.get_ident())
        size = {"all": {"current": 10**6, "peak": 10**6}}
        names = ("allocated_bytes", "reserved_bytes", "inactive_split_bytes")
        return {**dict.fromkeys(names, size), "num_alloc_retries": 0, "num_ooms": 0}


def main() -> None:
    try:
        make_device()
    except Exception as error:
        raise SystemExit(f"fake_device.cpp cannot be compiled: {error}") from error
    one, two, cpu = torch.device("fake:0"), torch.device("fake:1"), torch.device("cpu")
    cases: dict[str, bool | None] = {"plain": None, "recompute": False, "reentrant recompute": True}
    found: dict[str, Any] = {
        case: {"device": profiled(one, one, how), "cpu": profiled(cpu, cpu, how)} for case, how in cases.items()
    }
    found["two devices"] = {"device": profiled(one, two, None)}
    found["out of memory"] = {"tracked": dies(one, tracked=True), "untracked": dies(one, tracked=False)}
    print(json.dumps(found))


def make_device() -> None:
    from torch.utils import backend_registration, cpp_extension

    cpp_extension.load("amp_widgets_fake_device", [str(SOURCE)], extra_cflags=["-O0"], is_python_module=False)
    module = types.SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 2,
        current_device=lambda: 0,
        _is_in_bad_fork=lambda: False,
        _lazy_init=lambda: None,
        manual_seed_all=lambda seed: None,
        get_rng_state=lambda device=None: torch.zeros(1),
        set_rng_state=lambda state, device=None: None,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        device=NoDeviceGuard,
    )
    torch.utils.rename_privateuse1_backend("fake")
    torch._register_device_module("fake", module)
    torch._C._acc.register_python_privateuseone_hook(backend_registration._DummyPrivateUse1Hook())


class NoDeviceGuard:
    def __init__(self, device: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def meter_on(devices: tuple[torch.device, ...], training: Training, statistics: Statistics, **options: Any) -> CudaMeter:
    return CudaMeter(devices, training.model, [training.optimizer], stats=statistics, reset=lambda device: None, **options)


def profiled(device: torch.device, second: torch.device, use_reentrant: bool | None) -> dict[str, Any]:
    training = Training(device, second, use_reentrant)
    statistics = Statistics()
    devices = tuple(dict.fromkeys((device, second)))
    meter: CpuMeter | CudaMeter
    if device.type == "cpu":
        meter = CpuMeter(training.model, [training.optimizer])
    else:
        meter = meter_on(devices, training, statistics)
    meter.profile_next("test")
    meter.begin()
    training.step()
    meter.end()
    profile = meter.take_profile()
    assert profile is not None, meter.unprofiled_because
    phases = [phase.name for phase in profile.phases for _ in range(phase.start, phase.stop)]
    rows = [[int(size) for size in row] for row in profile.bytes_by_kind]
    return {
        "main": threading.get_ident(),
        "backward": sorted(training.backward),
        "read_on": sorted(statistics.threads),
        "states": [row for row, _ in itertools.groupby(rows)],
        "phases": [phase.name for phase in profile.phases],
        "operators": places(profile),
        "peak": dict(profile.peak_bytes_by_kind),
        "peak_by_layer": {name: dict(kinds) for name, kinds in profile.peak_by_layer.items()},
        "layers": [
            (layer.name, layer.activation_bytes, layer.output_bytes, layer.calls, layer.dtype, layer.checkpointed)
            for layer in profile.layers
        ],
        "readings": [
            (phases[point], layer_at(profile, point)) for point in (profile.allocator[0].point if profile.allocator else ())
        ],
        "devices": [readings.device for readings in profile.allocator],
    }


def places(profile: StepProfile) -> list[tuple[str, str]]:
    """Operator and layer of each point at which there is more than before."""
    rises = 1 + (profile.total_bytes[1:] > profile.total_bytes[:-1]).nonzero()[0]
    return [(profile.operator_names[profile.operator_index[point]], layer_at(profile, point)) for point in rises]


def layer_at(profile: StepProfile, point: int) -> str:
    index = profile.layer_index[point]
    return profile.layer_names[index] if index >= 0 else ""


def dies(device: torch.device, *, tracked: bool) -> dict[str, Any]:
    """Memory runs out in the backward pass, of the ReLU."""
    training = Training(device, device, None)
    observers: list[Callable[[int, int, int, int], None]] = []
    meter = meter_on((device,), training, Statistics(), attach=observers.append)
    asked_on: list[int] = []

    @torch.library.custom_op(f"amp_widgets_tests::oom_{tracked}".lower(), mutates_args=())
    def oom(gradient: Tensor) -> Tensor:
        asked_on.append(threading.get_ident())
        # torch calls every observer with the index of a CUDA device, for which this one stands in
        meter.ran_out_of_memory(device, 77, 100, 20)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 77 bytes.")

    class RunsOut(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            return oom(gradients[0])

    training.model.first[1].register_forward_pre_hook(lambda module, args: (RunsOut.apply(args[0]),))
    if tracked:
        meter.profile_next("test")
    meter.begin()
    try:
        training.step()
    except torch.OutOfMemoryError:
        meter.abandon()
    death = meter.take_death()
    assert death is not None
    assert (death.record is not None) == tracked
    return {
        "phase": death.phase,
        "layer": death.layer,
        "requested": death.requested_bytes,
        "main": threading.get_ident(),
        "asked_on": asked_on[0],
    }


if __name__ == "__main__":
    main()
