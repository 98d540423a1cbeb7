"""A step profiled on CUDA: the tracker follows tensors on the CPU in their place, and the allocator is written down by hand."""

from __future__ import annotations

import gc
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from amp_widgets.core.memory.cpu import CpuMeter
from amp_widgets.core.memory.cuda import CudaMeter
from amp_widgets.core.memory.lives import RecordedStorages, SharedStorages
from amp_widgets.core.memory.profile import KINDS, MOST_POINTS, StepProfile
from amp_widgets.core.memory.storages import LiveStorages

CPU, CUDA_0, CUDA_1 = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")


_newest: list[SharedStorages] = []  # of the step that is or was profiled


@pytest.fixture(autouse=True)
def newest_storages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def made(other: LiveStorages) -> SharedStorages:
        _newest[:] = [SharedStorages(other)]
        return _newest[0]

    monkeypatch.setattr("amp_widgets.core.memory.cuda.SharedStorages", made)
    _newest.clear()
    yield
    _newest.clear()


class Allocator:
    """Has as many bytes in use as the tensors have that are followed, each device some more, and says so whenever asked.

    Its peak counter sees what it had in use whenever it was asked, and `passing` bytes more at a time that is to be chosen.
    """

    def __init__(self, more: Mapping[torch.device, int]) -> None:
        self.more = dict(more)
        self.peaks = dict.fromkeys(more, 0)
        self.retries = self.ooms = 5  # before the step
        self.private = 0
        self.calls: list[tuple[str, torch.device]] = []
        self.follows = True

    def in_use(self, device: torch.device) -> int:
        tensors = 0
        if self.follows and _newest:
            _newest[0].settle()
            tensors = _newest[0].bytes
        return tensors + self.more[device]

    def allocate(self, device: torch.device, size: int) -> None:
        """And free it at once."""
        self.peaks[device] = max(self.peaks[device], self.in_use(device) + size)

    def stats(self, device: torch.device) -> Mapping[str, Any]:
        self.calls.append(("stats", device))
        current = self.in_use(device)
        self.peaks[device] = max(self.peaks[device], current)

        def pools(size: int, peak: int = -1) -> dict[str, Any]:
            wrong = {"current": -1, "peak": -1, "allocated": -1, "freed": -1}
            return {"all": {**wrong, "current": size, "peak": peak}, "small_pool": wrong, "large_pool": wrong}

        return {
            "allocated_bytes": pools(current, self.peaks[device]),
            "requested_bytes": pools(current - 12),
            "inactive_split_bytes": pools(64),
            "reserved_bytes": pools(2**20),
            "reserved_bytes_by_private_pools": {(0, 1): pools(self.private)} if self.private else {},
            "num_alloc_retries": self.retries,
            "num_ooms": self.ooms,
        }

    def reset(self, device: torch.device) -> None:
        self.calls.append(("reset", device))
        self.peaks[device] = self.in_use(device)


def meter_on(allocator: Allocator, model: nn.Module, *optimizers: torch.optim.Optimizer, **options: Any) -> CudaMeter:
    return CudaMeter(
        tuple(allocator.more),
        model,
        optimizers,
        stats=allocator.stats,
        reset=allocator.reset,
        counted=(CPU,),
        attach=lambda observe: None,
        **options,
    )


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
        self.second = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x))
        return y


class Training:
    """Trained for one step already, so that there is an optimizer's state."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Mlp()
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.x, self.t = torch.randn(5, 3), torch.randn(5, 2)
        self.step()

    def step(self) -> None:
        ((self.model(self.x) - self.t) ** 2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def profiled(meter: CudaMeter, step: Callable[[], object]) -> StepProfile:
    meter.profile_next("test", step=3)
    meter.begin()
    step()
    meter.end()
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks
    profile = meter.take_profile()
    assert profile is not None, meter.unprofiled_because
    assert meter.unprofiled_because is None
    assert meter.take_profile() is None  # once
    return profile


def places(profile: StepProfile) -> list[tuple[str, str]]:
    """Phase and layer of each reading."""
    found = []
    for point in profile.allocator[0].point:
        phase = next(phase.name for phase in profile.phases if phase.start <= point < phase.stop)
        index = profile.layer_index[point]
        found.append((phase, profile.layer_names[index] if index >= 0 else ""))
    return found


class TestReadings:
    def test_at_the_boundaries_of_layers_and_phases(self) -> None:
        training = Training()
        allocator = Allocator({CUDA_0: 0})
        profile = profiled(meter_on(allocator, training.model, training.optimizer), training.step)
        assert places(profile) == [
            ("forward", ""),  # the step begins
            ("forward", "first.0"),  # the first op
            ("forward", "first.0"),  # returns
            ("forward", "first.1"),
            ("forward", ""),  # "first" returns, and what only it has held is freed
            ("forward", "second"),
            ("forward", ""),  # the model returns
            ("loss", ""),
            ("backward", ""),
            ("backward", "second"),
            ("backward", "first.1"),
            ("backward", "first.0"),
            ("optimizer", ""),
            ("zero_grad", ""),
            ("zero_grad", ""),  # the step ends
        ]
        (readings,) = profile.allocator
        assert readings.device == "cuda:0"
        assert (np.diff(readings.point) > 0).all()
        assert not readings.point.flags.writeable
        # What the allocator had in use is what the tensors come to at that point.
        assert readings.allocated_bytes.tolist() == profile.total_bytes[readings.point].tolist()
        assert (readings.inactive_bytes == 64).all()
        assert (readings.reserved_bytes == 2**20).all()
        assert profile.device == "cuda:0"
        assert "cuda:0: reserved 1.0 MB, of which" in repr(profile)
        assert "cuda:0: reserved 1.0 MB, of which" in profile._repr_html_()

    def test_kinds_are_those_of_a_cpu(self) -> None:
        ours, plain = Training(), Training()
        profile = profiled(meter_on(Allocator({CUDA_0: 0}), ours.model, ours.optimizer), ours.step)
        meter = CpuMeter(plain.model, [plain.optimizer])
        meter.profile_next("test")
        meter.begin()
        plain.step()
        meter.end()
        on_cpu = meter.take_profile()
        assert on_cpu is not None
        batch = 5 * 3 * 4 + 5 * 2 * 4

        def states(of: StepProfile) -> list[list[int]]:
            distinct = [list(map(int, row)) for row in of.bytes_by_kind]
            return [row for row, _ in itertools.groupby(distinct)]

        assert states(profile) == states(on_cpu)
        held = [layer.activation_bytes for layer in profile.layers]
        assert held == [layer.activation_bytes for layer in on_cpu.layers]
        assert [layer.output_bytes for layer in profile.layers] == [layer.output_bytes for layer in on_cpu.layers]
        assert {name: dict(kinds) for name, kinds in profile.peak_by_layer.items()} == {
            name: dict(kinds) for name, kinds in on_cpu.peak_by_layer.items()
        }
        assert batch == profile.peak_by_layer[""]["other"]

    def test_counts_are_those_of_the_step(self) -> None:
        training = Training()
        allocator = Allocator({CUDA_0: 0})

        def step() -> None:
            training.step()
            allocator.retries += 3
            allocator.ooms += 1

        (readings,) = profiled(meter_on(allocator, training.model), step).allocator
        assert (readings.retries, readings.ooms) == (3, 1)
        assert "3 retries after freeing the cache, 1 allocation that did not fit" in readings.text

    def test_counts_that_the_user_has_reset(self) -> None:
        training = Training()
        allocator = Allocator({CUDA_0: 0})

        def step() -> None:
            training.step()
            allocator.retries, allocator.ooms = 2, 0

        (readings,) = profiled(meter_on(allocator, training.model), step).allocator
        assert (readings.retries, readings.ooms) == (2, 0)

    def test_private_pools_are_said(self) -> None:
        training = Training()
        allocator = Allocator({CUDA_0: 0})
        allocator.private = 3_000_000
        profile = profiled(meter_on(allocator, training.model), training.step)
        assert any("3.0 MB are held in private pools, such as those of CUDA graphs" in note for note in profile.notes)

    def test_what_is_not_counted_is_said(self) -> None:
        training = Training()
        allocator = Allocator({CUDA_0: 0})
        plain = profiled(meter_on(allocator, training.model), training.step)
        assert not any("counts neither fragmentation nor retries" in note for note in plain.notes)
        stats = allocator.stats
        meter = meter_on(allocator, training.model)
        none = {"all": {"current": 0, "peak": 0}}
        meter._stats = lambda device: {**stats(device), "requested_bytes": none, "inactive_split_bytes": none}
        profile = profiled(meter, lambda: (training.step(), allocator.allocate(CUDA_0, 10**6)))
        assert any("counts neither fragmentation nor retries" in note for note in profile.notes)
        assert not any("rounding" in note for note in profile.notes)
        assert any("counted a peak" in note for note in profile.notes)

    def test_times_and_what_is_on_the_cpu(self) -> None:
        training = Training()
        profile = profiled(meter_on(Allocator({CUDA_0: 0}), training.model, also_on_cpu=True), training.step)
        assert "times are those at which ops were given to the device, which works them off later" in profile.notes
        assert "tensors on the CPU are not counted" in profile.notes

    def test_a_device_that_is_not_in_use_has_none(self) -> None:
        training = Training()
        allocator = Allocator({CUDA_0: 0, CUDA_1: 0})
        stats = allocator.stats
        meter = meter_on(allocator, training.model)
        meter._stats = lambda device: {} if device == CUDA_1 else stats(device)
        profile = profiled(meter, training.step)
        assert [readings.device for readings in profile.allocator] == ["cuda:0"]

    def test_thinned_with_the_points(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(1000)])
        allocator = Allocator({CUDA_0: 0})
        x = torch.randn(2, 4)
        profile = profiled(meter_on(allocator, model), lambda: model(x).sum().backward())
        assert len(profile.bytes_by_kind) <= MOST_POINTS
        assert any("were thinned" in note for note in profile.notes)
        (readings,) = profile.allocator
        assert (np.diff(readings.point) > 0).all()
        assert 1000 < len(readings.point) <= len(profile.bytes_by_kind)

    def test_recompute(self) -> None:
        training = Training()
        model = training.model

        def step() -> None:
            y = model.second(checkpoint(model.first, training.x, use_reentrant=False))
            y.sum().backward()
            model.zero_grad()

        training.x.requires_grad_()
        profile = profiled(meter_on(Allocator({CUDA_0: 0}), model), step)
        assert ("recompute", "first.0") in places(profile)
        assert ("recompute", "first.1") in places(profile)


class TestPeak:
    def test_by_torchs_own_counter(self) -> None:
        training = Training()
        allocator = Allocator({CUDA_0: 1000})
        meter = meter_on(allocator, training.model)
        tensors = []

        def step() -> None:
            training.step()
            tensors.append(allocator.in_use(CUDA_0) - 1000)
            allocator.allocate(CUDA_0, 10_000)  # of which no tensor is seen: an operator's workspace

        profile = profiled(meter, step)
        (readings,) = profile.allocator
        assert readings.peak_allocated_bytes == tensors[0] + 11_000
        assert readings.allocated_bytes.max() < readings.peak_allocated_bytes
        assert profile.peak_bytes < readings.peak_allocated_bytes
        note = profile.notes[-1]
        assert f"a peak of {(tensors[0] + 11_000) / 1000:.1f} kB" in note
        assert f"come to {profile.peak_bytes} B" in note
        assert "rounding to blocks of 512 B came to 12 B at its end" in note

    def test_equal_bytes_need_no_note(self) -> None:
        training = Training()
        profile = profiled(meter_on(Allocator({CUDA_0: 0}), training.model, training.optimizer), training.step)
        allocator = profile.allocator[0]
        assert allocator.allocated_bytes.max() <= allocator.peak_allocated_bytes
        said = any("counted a peak" in note for note in profile.notes)
        assert (allocator.peak_allocated_bytes != profile.peak_bytes) == said

    def test_books_are_kept_as_without_a_profile(self) -> None:
        readings = []
        for profiles in (False, True):
            training = Training()
            allocator = Allocator({CUDA_0: 5000})
            allocator.follows = False
            allocator.allocate(CUDA_0, 90_000)  # before any step
            meter = meter_on(allocator, training.model)
            found = []
            for step in range(3):
                if profiles and step == 1:
                    meter.profile_next("test")
                meter.begin()
                allocator.allocate(CUDA_0, 1_000_000 * step)
                reading = meter.end()
                found.append((reading.allocated_bytes, meter.overall_peak_bytes))
                assert reading.peak_bytes >= 5000 + 1_000_000 * step
            resets = [call for call in allocator.calls if call[0] == "reset"]
            assert len(resets) == 3  # one a step: the profile has added none
            readings.append(found)
        assert readings[0] == [(5000, 95_000), (5000, 1_005_000), (5000, 2_005_000)]
        assert readings[1][2] == readings[0][2]
        assert readings[1][1][1] >= 1_005_000

    @pytest.mark.parametrize("rises", [False, True])
    def test_the_users_counter_is_left_alone(self, rises: bool) -> None:
        training = Training()
        allocator = Allocator({CUDA_0: 0})
        allocator.peaks[CUDA_0] = 50_000
        meter = meter_on(allocator, training.model, reset_peak=False)

        def step() -> None:
            training.step()
            if rises:
                allocator.allocate(CUDA_0, 80_000)

        profile = profiled(meter, step)
        assert ("reset", CUDA_0) not in allocator.calls
        (readings,) = profile.allocator
        said = any("may not be reset, and did not rise" in note for note in profile.notes)
        if rises:
            assert readings.peak_allocated_bytes > 80_000
            assert not said
        else:
            assert readings.peak_allocated_bytes == readings.allocated_bytes.max() < 50_000
            assert said
            assert not any("counted a peak" in note for note in profile.notes)

    def test_each_device_has_its_own(self) -> None:
        training = Training()
        allocator = Allocator({CUDA_0: 0, CUDA_1: 700})
        profile = profiled(meter_on(allocator, training.model), training.step)
        assert [readings.device for readings in profile.allocator] == ["cuda:0", "cuda:1"]
        one, two = profile.allocator
        assert (two.allocated_bytes - one.allocated_bytes == 700).all()
        assert profile.device == "cuda:0, cuda:1"


class TestCompiled:
    """Nothing but boundary readings, and it goes on being compiled."""

    def compiled(self, training: Training) -> list[int]:
        calls: list[int] = []

        def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                calls.append(torch._C._len_torch_dispatch_stack())
                return graph(*args)

            return run

        training.model.compile(backend=backend)
        return calls

    def test_boundaries_only(self) -> None:
        training = Training()
        calls = self.compiled(training)
        training.step()
        frames = torch._dynamo.utils.counters["frames"]["total"]
        allocator = Allocator({CUDA_0: 1000})
        meter = meter_on(allocator, training.model, training.optimizer)
        at: list[int] = []

        def step() -> None:
            ((training.model(training.x) - training.t) ** 2).mean().backward()
            allocator.allocate(CUDA_0, 9000)
            allocator.more[CUDA_0] = 1500
            training.optimizer.step()
            allocator.more[CUDA_0] = 1200
            at.append(len(calls))

        profile = profiled(meter, step)
        assert calls[-1] == 0  # no mode
        assert len(calls) >= 2
        assert torch._dynamo.utils.counters["frames"]["total"] == frames  # nor was anything compiled anew
        assert profile.bytes_by_kind.shape[1] == len(KINDS)
        # The step begins, the peak somewhere before the optimizer, before it, after it, the step ends.
        assert profile.total_bytes.tolist() == [1000, 10_000, 1500, 1500, 1200]
        assert profile.bytes_by_kind[:, KINDS.index("other")].tolist() == [1000, 10_000, 1500, 1500, 1200]
        assert [(phase.name, phase.start, phase.stop) for phase in profile.phases] == [
            ("other", 0, 3),
            ("optimizer", 3, 4),
            ("other", 4, 5),
        ]
        (readings,) = profile.allocator
        assert readings.point.tolist() == [0, 2, 3, 4]
        assert readings.allocated_bytes.tolist() == [1000, 1500, 1500, 1200]
        assert readings.peak_allocated_bytes == profile.peak_bytes == 10_000
        assert (np.diff(profile.time_s) >= 0).all()
        assert dict(profile.peak_by_layer[""]) == {"other": 10_000}
        assert profile.notes[0].startswith("the model is compiled, and")
        assert "nothing is known of kinds and layers" in profile.notes[0]
        assert "10.0 kB" in repr(profile)
        assert profile._repr_html_()
        assert not training.optimizer._optimizer_step_pre_hooks
        assert not training.optimizer._optimizer_step_post_hooks

    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own
    def test_compiled_behind_the_meters_back(self) -> None:
        training = Training()
        calls: list[int] = []

        def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                calls.append(1)
                return graph(*args)

            return run

        loss = torch.compile(lambda y, t: ((y - t) ** 2).mean(), backend=backend)

        def step() -> None:
            loss(training.model(training.x), training.t).backward()
            training.optimizer.step()
            training.optimizer.zero_grad()

        step()
        before = len(calls)
        meter = meter_on(Allocator({CUDA_0: 1000}), training.model, training.optimizer)
        for number in range(2):
            profile = profiled(meter, step)
            assert len(calls) == before + number + 1
            assert "nothing is known of kinds and layers" in profile.notes[0]
            assert profile.layers == ()
            assert (profile.allocator[0].allocated_bytes >= 1000).all()

    def test_without_known_optimizers(self) -> None:
        training = Training()
        self.compiled(training)
        meter = meter_on(Allocator({CUDA_0: 10}), training.model)
        profile = profiled(meter, training.step)
        assert [phase.name for phase in profile.phases] == ["other", "optimizer", "other"]
        assert not _global_optimizer_pre_hooks
        assert not _global_optimizer_post_hooks


class TestLife:
    def test_a_step_that_does_not_end(self) -> None:
        training = Training()
        meter = meter_on(Allocator({CUDA_0: 10}), training.model)
        meter.profile_next("test")
        meter.begin()
        training.model(training.x)
        meter.abandon()
        meter.abandon()
        assert torch._C._len_torch_dispatch_stack() == 0
        assert meter.take_profile() is None
        assert meter.unprofiled_because == "the step did not end"
        profiled(meter, training.step)

    def test_another_mode(self) -> None:
        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                return func(*args, **(kwargs or {}))

        training = Training()
        meter = meter_on(Allocator({CUDA_0: 10}), training.model)
        meter.profile_next("test")
        with Mode():
            meter.begin()
            training.step()
            reading = meter.end()
        assert reading.allocated_bytes > 0
        profile = meter.take_profile()
        assert profile is not None
        assert meter.unprofiled_because is None

    def test_a_mode_of_torchs_own(self) -> None:
        training = Training()
        meter = meter_on(Allocator({CUDA_0: 10}), training.model)
        meter.profile_next("test")
        with FakeTensorMode():
            meter.begin()
            assert meter.end().allocated_bytes > 0  # measured nevertheless
        assert meter.take_profile() is None
        assert meter.unprofiled_because is not None
        assert "FakeTensorMode" in meter.unprofiled_because

    def test_a_model_that_is_gone(self) -> None:
        training = Training()
        meter = meter_on(Allocator({CUDA_0: 10}), training.model)
        del training
        gc.collect()
        meter.profile_next("test")
        meter.begin()
        assert meter.end().allocated_bytes == 10
        assert meter.take_profile() is None
        assert meter.unprofiled_because == "the model is no longer there"

    def test_nothing_is_read_without_a_profile(self) -> None:
        training = Training()
        allocator = Allocator({CUDA_0: 10})
        meter = meter_on(allocator, training.model, training.optimizer)
        profiled(meter, training.step)
        allocator.calls.clear()
        meter.begin()
        training.step()
        meter.end()
        assert allocator.calls == [("stats", CUDA_0), ("reset", CUDA_0), ("stats", CUDA_0)]

    def test_nothing_changes(self) -> None:
        ours, plain = Training(), Training()
        meter = meter_on(Allocator({CUDA_0: 10}), ours.model, ours.optimizer)
        for _ in range(2):
            profiled(meter, ours.step)
            plain.step()
        for one, two in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
            assert torch.equal(one, two)

    def test_an_allocator_without_statistics(self) -> None:
        training = Training()
        meter = meter_on(Allocator({CUDA_0: 10}), training.model)

        def stats(device: torch.device) -> Mapping[str, Any]:
            raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

        meter._stats = stats
        meter.begin()
        assert math.isnan(meter.end().peak_bytes)
        assert meter.unmeasured_because == "the allocator in use on cuda:0 has no statistics"
        profile = profiled(meter, training.step)
        assert profile.allocator == ()
        assert profile.peak_bytes > 0


class TestSharedStorages:
    def test_threads_at_the_same_time(self) -> None:
        storages = SharedStorages(LiveStorages())
        start = threading.Barrier(4)
        kept: list[list[Tensor]] = [[] for _ in range(4)]
        errors: list[BaseException] = []

        def work(number: int) -> None:
            try:
                start.wait()
                for index in range(300):
                    tensor = torch.empty(10)
                    storages.see_op((), tensor)
                    assert [life.nbytes for life in storages.fresh] == [40]  # this thread's own
                    if index % 3 == 0:
                        kept[number].append(tensor)
                    del tensor
                    storages.settle()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        storages.settle()
        assert storages.bytes == 4 * 100 * 40 == sum(life.nbytes for life in storages.lives if life.death is None)

    def test_devices(self) -> None:
        storages = RecordedStorages(LiveStorages((CUDA_0,)))
        storages.see_op((torch.empty(3), torch.empty(3, device="meta")), torch.empty(4))
        assert (storages.bytes, storages.lives) == (0, [])
