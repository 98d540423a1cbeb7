"""A step profiled on a real allocator, memory that really runs out, and torch's own record of a step."""

from __future__ import annotations

import gc
import math
import pickle
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from amp_widgets.core.memory.cuda import CudaMeter
from amp_widgets.core.memory.deep import DeepRecording
from amp_widgets.core.memory.meter import meter_for
from amp_widgets.core.memory.profile import KINDS, StepProfile
from amp_widgets.session import AmpSession

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA driver or GPU"),
]

MIB = 2**20
WIDTH = 1024


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    yield
    gc.collect()
    torch.cuda.empty_cache()


class Net(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 8)
        self.checkpoints: bool | None = None  # use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) if self.checkpoints is None else checkpoint(block, x, use_reentrant=self.checkpoints)
        y: torch.Tensor = self.head(x)
        return y


class Training:
    def __init__(self, *, batch: int = 4096, fused: bool = False) -> None:
        torch.manual_seed(0)
        self.model = Net().cuda()
        self.optimizer = torch.optim.Adam(self.model.parameters(), fused=fused)
        self.x = torch.randn(batch, WIDTH, device="cuda")
        self.step()  # brings the workspaces, and the optimizer's state
        self.step()

    def step(self) -> None:
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def profiled(meter: CudaMeter, step: Callable[[], object]) -> StepProfile:
    meter.profile_next("test", step=3)
    meter.begin()
    step()
    meter.end()
    assert torch._C._len_torch_dispatch_stack() == 0
    profile = meter.take_profile()
    assert profile is not None, meter.unprofiled_because
    return profile


def cuda_meter(training: Training, **options: bool) -> CudaMeter:
    meter = meter_for(training.model, [training.optimizer], **options)
    assert isinstance(meter, CudaMeter)
    return meter


def by_kind(profile: StepProfile, kind: str) -> np.ndarray:
    return profile.bytes_by_kind[:, KINDS.index(kind)]


class TestProfile:
    def test_kinds_and_layers(self) -> None:
        training = Training()
        profile = profiled(cuda_meter(training), training.step)
        parameters = sum(p.numel() * p.element_size() for p in training.model.parameters())
        assert (by_kind(profile, "parameter") == parameters).all()
        state = sum(
            value.numel() * value.element_size()
            for values in training.optimizer.state.values()
            for value in values.values()
            if value.is_cuda
        )
        assert (by_kind(profile, "optimizer") == state).all()
        assert by_kind(profile, "gradient").max() == parameters
        names = [phase.name for phase in profile.phases]
        for name in ("forward", "loss", "backward", "optimizer", "zero_grad"):
            assert name in names
        held = 2 * 4096 * WIDTH * 4  # what the GELU is given, for its own gradient, and what it makes, for the next layer's
        assert [profile.layer(f"blocks.{index}").activation_bytes for index in range(4)] == [held] * 4
        # Backward runs on a thread of torch's own, and is told apart by layer nevertheless.
        assert all(not math.isnan(layer.backward_s) for layer in profile.layers if layer.type in ("Linear", "GELU"))
        assert profile.peak_by_layer[""]["other"] == training.x.numel() * 4

    def test_points_against_the_allocator(self) -> None:
        training = Training()
        profile = profiled(cuda_meter(training), training.step)
        (readings,) = profile.allocator
        assert readings.device == "cuda:0"
        tensors = profile.total_bytes[readings.point]
        beyond = readings.allocated_bytes - tensors
        print("allocated beyond the tensors:", beyond.min(), "to", beyond.max())
        # Workspaces and rounding are there all the time; nothing else comes or goes between two readings.
        assert (beyond >= 0).all()
        assert np.ptp(beyond) < 2 * MIB
        assert (readings.reserved_bytes >= readings.allocated_bytes + readings.inactive_bytes).all()
        assert (np.diff(readings.point) > 0).all()
        assert readings.peak_allocated_bytes >= readings.allocated_bytes.max()
        assert readings.retries == readings.ooms == 0
        layers = {profile.layer_names[index] for index in profile.layer_index[readings.point] if index >= 0}
        assert {"blocks.0.0", "blocks.3.1", "head"} <= layers

    def test_peak_is_torchs_own(self) -> None:
        training = Training()
        meter = cuda_meter(training)
        meter.profile_next("test")
        meter.begin()
        training.step()
        own = torch.cuda.max_memory_allocated()
        reading = meter.end()
        profile = meter.take_profile()
        assert profile is not None
        assert profile.allocator[0].peak_allocated_bytes == reading.peak_bytes == own
        assert meter.overall_peak_bytes >= own
        assert any("torch's allocator counted a peak of" in note for note in profile.notes) == (own != profile.peak_bytes)
        meter.begin()
        training.step()
        after = meter.end()
        assert after.peak_bytes == pytest.approx(reading.peak_bytes, abs=2 * MIB)

    def test_the_users_counter_is_left_alone(self) -> None:
        training = Training()
        passing = torch.empty(2**30, dtype=torch.uint8, device="cuda")
        del passing
        before = torch.cuda.max_memory_allocated()
        profile = profiled(cuda_meter(training, reset_peak=False), training.step)
        assert torch.cuda.max_memory_allocated() == before
        assert any("may not be reset, and did not rise" in note for note in profile.notes)

    def test_nothing_waits(self) -> None:
        training = Training(fused=True)
        meter = cuda_meter(training)
        torch.cuda.synchronize()
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            profile = profiled(meter, training.step)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        assert profile.peak_bytes > 0

    def test_nothing_changes(self) -> None:
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            plain, ours = Training(), Training()
            meter = cuda_meter(ours)
            plain.step()
            profiled(meter, ours.step)
        finally:
            torch.use_deterministic_algorithms(False)
        for one, two in zip(plain.model.parameters(), ours.model.parameters(), strict=True):
            assert torch.equal(one, two)

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_recompute(self, use_reentrant: bool) -> None:
        training = Training()
        training.x.requires_grad_()
        plain = profiled(cuda_meter(training), training.step)
        training.model.checkpoints = use_reentrant
        training.step()
        profile = profiled(cuda_meter(training), training.step)
        assert "recompute" in [phase.name for phase in profile.phases]
        assert profile.peak_bytes < plain.peak_bytes
        assert all(profile.layer(f"blocks.{index}").checkpointed for index in range(4))
        assert all(profile.layer(f"blocks.{index}").calls == 1 for index in range(4))

    def test_fragmentation_is_seen(self) -> None:
        training = Training()
        blocks = [torch.empty(12 * MIB, dtype=torch.uint8, device="cuda") for _ in range(8)]
        del blocks[::2]
        profile = profiled(cuda_meter(training), training.step)
        expected = torch.cuda.memory_stats()["inactive_split_bytes.all.current"]
        assert profile.allocator[0].inactive_bytes[-1] == expected

    def test_pinned_memory_does_not_count(self) -> None:
        training = Training()
        pinned = torch.empty(64 * MIB, dtype=torch.uint8).pin_memory()
        plain = profiled(cuda_meter(training), training.step)

        def step() -> None:
            pinned.add_(1)
            training.step()

        assert profiled(cuda_meter(training), step).peak_bytes == plain.peak_bytes

    def test_another_stream(self) -> None:
        training = Training()
        side = torch.cuda.Stream()
        plain = profiled(cuda_meter(training), training.step)

        def step() -> None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                training.step()
            torch.cuda.current_stream().wait_stream(side)

        assert profiled(cuda_meter(training), step).peak_bytes == plain.peak_bytes

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
    def test_two_devices(self) -> None:
        class Split(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first = nn.Linear(WIDTH, WIDTH, device="cuda:0")
                self.second = nn.Linear(WIDTH, WIDTH, device="cuda:1")

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y: torch.Tensor = self.second(self.first(x).relu().to("cuda:1"))
                return y

        model = Split()
        meter = meter_for(model, [])
        assert isinstance(meter, CudaMeter)
        x = torch.randn(64, WIDTH, device="cuda:0")

        def step() -> None:
            model(x).sum().backward()
            model.zero_grad()

        step()
        profile = profiled(meter, step)
        assert [readings.device for readings in profile.allocator] == ["cuda:0", "cuda:1"]
        parameters = sum(p.numel() * p.element_size() for p in model.parameters())
        assert (by_kind(profile, "parameter") == parameters).all()
        assert by_kind(profile, "gradient").max() == parameters


class TestCompiled:
    def test_boundaries_only(self) -> None:
        training = Training()
        calls: list[int] = []

        def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
            def run(*args: object) -> object:
                calls.append(torch._C._len_torch_dispatch_stack())
                return graph(*args)

            return run

        training.model.compile(backend=backend)
        training.step()
        profile = profiled(cuda_meter(training), training.step)
        assert len(calls) >= 2
        assert calls[-1] == 0
        assert profile.layers == ()
        assert profile.peak_bytes == profile.allocator[0].peak_allocated_bytes
        assert "nothing is known of kinds and layers" in profile.notes[0]


class TestOutOfMemory:
    @pytest.fixture(autouse=True)
    def little_memory(self) -> Iterator[None]:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        limit = torch.cuda.memory_allocated() + 1024 * MIB
        torch.cuda.set_per_process_memory_fraction(limit / total)
        yield
        torch.cuda.set_per_process_memory_fraction(1.0)

    @pytest.mark.parametrize("tracked", [False, True])
    @pytest.mark.parametrize("where", ["forward", "backward"])
    def test_what_is_known(self, where: str, tracked: bool) -> None:
        training = Training(batch=64)
        handles = []
        asked = 4096 * MIB

        def too_much(*_: object) -> None:
            torch.empty(asked, dtype=torch.uint8, device="cuda")

        class InBackward(torch.autograd.Function):
            @staticmethod
            def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
                too_much()
                return gradients[0]

        block = training.model.blocks[2][1]
        if where == "forward":
            handles.append(block.register_forward_pre_hook(lambda module, args: too_much()))
        else:
            handles.append(block.register_forward_pre_hook(lambda module, args: (InBackward.apply(args[0]),)))
        meter = cuda_meter(training)
        if tracked:
            meter.profile_next("test")
        before = torch.cuda.memory_stats()["num_ooms"]
        meter.begin()
        with pytest.raises(torch.OutOfMemoryError):
            training.step()
        assert torch.cuda.memory_stats()["num_ooms"] == before + 1
        meter.abandon()
        death = meter.take_death()
        assert death is not None
        assert (death.cause, death.device, death.phase) == ("allocator", "cuda:0", where)
        assert death.requested_bytes == asked
        assert 0 < death.limit_bytes <= torch.cuda.get_device_properties(0).total_memory
        assert 0 < death.allocated_bytes < death.limit_bytes
        if tracked or where == "forward":
            assert death.layer == "blocks.2.1"
        if tracked:
            assert death.record is not None
            assert death.record.profile(label="x", step=0, device="cuda:0", source="test").allocator[0].ooms == 1
        for handle in handles:
            handle.remove()
        training.optimizer.zero_grad()
        training.step()

    def test_nothing_is_kept_alive(self) -> None:
        training = Training(batch=64)
        meter = cuda_meter(training)
        seen = weakref.WeakSet[torch.Tensor]()

        def step() -> None:
            y = training.model(training.x)
            seen.add(y)
            torch.empty(4096 * MIB, dtype=torch.uint8, device="cuda")

        meter.begin()
        try:
            step()
        except torch.OutOfMemoryError:
            pass
        meter.abandon()
        assert meter.take_death() is not None
        gc.collect()
        assert not seen


class TestSession:
    def test_a_step_that_dies_and_the_next(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        model = Net().cuda()
        optimizer = torch.optim.Adam(model.parameters())
        session = AmpSession(model, optimizer)
        x = torch.randn(64, WIDTH, device="cuda")
        too_much = [False]

        def step() -> None:
            with session.autocast():
                loss = model(x).float().square().mean()
                if too_much[0]:
                    torch.empty(2**50, dtype=torch.uint8, device="cuda")
            session.scaler.scale(loss).backward()
            session.scaler.step(optimizer)
            session.scaler.update()
            optimizer.zero_grad()

        step()
        session.profile_next_step("profiled")
        step()
        assert session.profiles[-1].label == "profiled", session.why_not_profiled
        assert session.profiles[-1].allocator[0].device == "cuda:0"
        too_much[0] = True
        session.record_next_step(tmp_path / "step.pickle")
        with pytest.raises(torch.OutOfMemoryError):
            step()
        death = session.out_of_memory
        assert death is not None
        assert (death.cause, death.device, death.requested_bytes) == ("allocator", "cuda:0", 2**50)
        assert (tmp_path / "step.pickle").exists()
        too_much[0] = False
        session.request(autocast="bf16")
        step()
        assert session.settings.autocast == "bf16"
        assert len(session.history) == 3
        session.close()


class TestDeep:
    def test_one_step(self, tmp_path: Path) -> None:
        training = Training(batch=64)
        path = tmp_path / "step.pickle"
        recording = DeepRecording(path)
        assert not torch._C._cuda_isHistoryEnabled()
        recording.begin()
        assert torch._C._cuda_isHistoryEnabled()
        training.step()
        text = recording.end()
        assert not torch._C._cuda_isHistoryEnabled()
        assert str(path) in text
        snapshot = pickle.loads(path.read_bytes())  # made by this very test
        trace = snapshot["device_traces"][0]
        assert any(entry["action"] == "alloc" for entry in trace)
        assert any(frame["name"] == "step" for entry in trace for frame in entry.get("frames", ()))

    def test_a_step_that_dies(self, tmp_path: Path) -> None:
        training = Training(batch=64)
        path = tmp_path / "step.pickle"
        recording = DeepRecording(path)
        recording.begin()
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2**50, dtype=torch.uint8, device="cuda")
        recording.end()
        del training
        trace = pickle.loads(path.read_bytes())["device_traces"][0]
        assert any(entry["action"] == "oom" for entry in trace)

    def test_the_users_recording_goes_on(self, tmp_path: Path) -> None:
        torch.cuda.memory._record_memory_history(max_entries=1000)
        try:
            recording = DeepRecording(tmp_path / "step.pickle")
            recording.begin()
            assert "goes on" in recording.end()
            assert torch._C._cuda_isHistoryEnabled()
        finally:
            torch.cuda.memory._record_memory_history(None)
