"""Bytes of a step on a CPU, against sums made by hand and against torch's own tracker."""

from __future__ import annotations

import gc
import math
import random
import warnings
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from amp_widgets.core.memory.cpu import CpuMeter
from amp_widgets.core.memory.reading import MemoryReading

F32 = 4  # bytes


def measure(meter: CpuMeter, step: Callable[[], object]) -> MemoryReading:
    """One step measured. What it returns is freed before the step ends."""
    meter.begin()
    step()
    reading = meter.end()
    assert torch._C._len_torch_dispatch_stack() == 0
    return reading


def ends(reading: MemoryReading) -> tuple[float, float]:
    return reading.allocated_bytes, reading.peak_bytes


@pytest.fixture
def linear() -> nn.Linear:
    return nn.Linear(3, 2)  # 24 + 8 bytes


W, B, X, Y, LOSS = 24, 8, 48, 32, 4  # bytes of the weight, bias, batch of 4, output and loss


class TestByHand:
    """Linear(3, 2) on a batch of 4."""

    def test_forward(self, linear: nn.Linear) -> None:
        meter = CpuMeter(linear, [])
        x = torch.randn(4, 3)
        meter.begin()
        y = linear(x)
        assert ends(meter.end()) == (W + B + X + Y, W + B + X + Y)
        meter.begin()
        loss = y.sum()
        assert ends(meter.end()) == (W + B + X + Y + LOSS, W + B + X + Y + LOSS)
        del loss, y
        assert ends(measure(meter, lambda: None)) == (W + B + X, W + B + X)
        del x
        assert ends(measure(meter, lambda: None)) == (W + B, W + B)

    def test_backward(self, linear: nn.Linear) -> None:
        meter = CpuMeter(linear, [])
        x = torch.randn(4, 3)
        loss = linear(x).sum()
        meter.begin()
        loss.backward()
        # The graph keeps x. ones_like(loss), which becomes the (expanded) gradient of y; then those of weight and bias.
        assert ends(meter.end()) == (W + B + X + LOSS + W + B, W + B + X + 2 * LOSS + W + B)

    def test_whole_step_with_sgd(self, linear: nn.Linear) -> None:
        optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
        meter = CpuMeter(linear, [optimizer])
        x = torch.randn(4, 3)

        def step() -> None:
            optimizer.zero_grad()
            linear(x).sum().backward()
            optimizer.step()

        # Highest where the loss is made from y, as long as there are no gradients; nothing is allocated by SGD itself.
        expected = (W + B + X + W + B, max(W + B + X + Y + LOSS, W + B + X + 2 * LOSS + W + B))
        assert expected == (112, 120)
        assert [ends(measure(meter, step)) for _ in range(3)] == [expected] * 3

    def test_whole_step_with_adam(self, linear: nn.Linear) -> None:
        optimizer = torch.optim.Adam(linear.parameters())
        meter = CpuMeter(linear, [optimizer])
        x = torch.randn(4, 3)

        def step() -> None:
            optimizer.zero_grad()
            linear(x).sum().backward()
            optimizer.step()

        state = 2 * (W + B) + 2 * F32  # two averages and a step counter for each parameter
        kept = W + B + X + W + B + state
        # The first to be updated is the weight: sqrt of the second average, then that divided, both as large as the weight.
        assert [ends(measure(meter, step)) for _ in range(3)] == [(kept, kept + 2 * W)] * 3

    def test_gradients_that_are_kept_count_from_the_start(self, linear: nn.Linear) -> None:
        meter = CpuMeter(linear, [])
        linear(torch.randn(4, 3)).sum().backward()
        assert ends(measure(meter, lambda: None)) == (W + B + W + B,) * 2
        linear.zero_grad()
        assert ends(measure(meter, lambda: None)) == (W + B,) * 2

    def test_state_loaded_between_steps_counts_from_the_start(self, linear: nn.Linear) -> None:
        optimizer = torch.optim.Adam(linear.parameters())
        linear(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        saved = optimizer.state_dict()
        fresh = torch.optim.Adam(linear.parameters())
        meter = CpuMeter(linear, [fresh])
        assert ends(measure(meter, lambda: None))[0] == 2 * (W + B)
        fresh.load_state_dict(saved)  # shares the averages, copies nothing
        assert ends(measure(meter, lambda: None))[0] == 2 * (W + B) + 2 * (W + B) + 2 * F32

    def test_nested_optimizer_state(self, linear: nn.Linear) -> None:
        optimizer = torch.optim.LBFGS(linear.parameters(), max_iter=3)
        x = torch.randn(4, 3)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = linear(x).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        (state,) = optimizer.state.values()
        tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
        tensors += [item for value in state.values() if isinstance(value, list) for item in value if item is not None]
        expected = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}
        meter = CpuMeter(linear, [optimizer])
        assert len(expected) > 4
        assert ends(measure(meter, lambda: None))[0] == 2 * (W + B) + sum(expected.values())

    def test_parameters_added_and_tied(self, linear: nn.Linear) -> None:
        model = nn.Sequential(linear)
        meter = CpuMeter(model, [])
        assert ends(measure(meter, lambda: None))[0] == W + B
        model.append(nn.BatchNorm1d(2))
        assert ends(measure(meter, lambda: None))[0] == W + B + 4 * 8 + 8  # and int64 num_batches_tracked
        tied = nn.Linear(3, 2, bias=False)
        tied.weight = linear.weight
        model.append(tied)
        assert ends(measure(meter, lambda: None))[0] == W + B + 4 * 8 + 8

    def test_batch_and_labels_count_when_they_are_used(self, linear: nn.Linear) -> None:
        meter = CpuMeter(linear, [])
        x, labels = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
        meter.begin()
        F.cross_entropy(linear(x), labels)
        assert meter.end().allocated_bytes == W + B + X + 4 * 8

    def test_reading_has_the_device(self, linear: nn.Linear) -> None:
        reading = measure(CpuMeter(linear, []), lambda: None)
        assert math.isnan(reading.reserved_bytes)
        assert list(reading.per_device) == ["cpu"]
        assert reading.per_device["cpu"][:2] == (32.0, 32.0)

    def test_overall_peak(self, linear: nn.Linear) -> None:
        meter = CpuMeter(linear, [])
        assert math.isnan(meter.overall_peak_bytes)
        measure(meter, lambda: torch.empty(100))
        assert meter.overall_peak_bytes == W + B + 400
        measure(meter, lambda: torch.empty(10))
        assert meter.overall_peak_bytes == W + B + 400


class TestWhatIsSeen:
    def test_transients(self, linear: nn.Linear) -> None:
        def step() -> None:
            for count in (10, 1000, 100):
                torch.zeros(count) + 1  # both at once: the sum and what it is made from

        assert ends(measure(CpuMeter(linear, []), step)) == (W + B, W + B + 2 * 4000)

    def test_in_place_and_views_allocate_nothing(self, linear: nn.Linear) -> None:
        x = torch.zeros(100)
        assert measure(CpuMeter(linear, []), lambda: x.add_(1).view(10, 10).t().mul_(2)).peak_bytes == W + B + 400

    def test_lists_of_arguments_and_results(self, linear: nn.Linear) -> None:
        parts = [torch.zeros(1), torch.zeros(10)]

        def step() -> None:
            whole = torch.cat(parts)
            torch.split(whole, 5)  # views
            torch.sort(whole)  # values and int64 indices

        assert measure(CpuMeter(linear, []), step).peak_bytes == W + B + 44 + 44 + 44 + 88

    def test_keyword_arguments(self, linear: nn.Linear) -> None:
        x, out = torch.zeros(5), torch.zeros(5)
        assert measure(CpuMeter(linear, []), lambda: torch.add(x, x, out=out)).allocated_bytes == W + B + 20 + 20

    def test_resize(self, linear: nn.Linear) -> None:
        x = torch.zeros(5)
        meter = CpuMeter(linear, [])
        assert measure(meter, lambda: x.resize_(50)).allocated_bytes == W + B + 200
        out = torch.empty(0)
        assert measure(meter, lambda: torch.add(x, 1, out=out)).allocated_bytes == W + B + 400

    def test_state_resized_outside_of_a_step(self, linear: nn.Linear) -> None:
        meter = CpuMeter(linear, [])
        measure(meter, lambda: None)
        linear.weight.untyped_storage().resize_(0)
        assert measure(meter, lambda: None).allocated_bytes == B

    def test_other_devices_do_not_count(self, linear: nn.Linear) -> None:
        assert measure(CpuMeter(linear, []), lambda: torch.zeros(100, device="meta") + 1).peak_bytes == W + B

    def test_sparse_gradients(self) -> None:
        embedding = nn.Embedding(10, 3, sparse=True)  # 120 bytes
        optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
        index = torch.tensor([1, 5])

        def step() -> None:
            embedding(index).sum().backward()
            optimizer.step()

        reading = measure(CpuMeter(embedding, [optimizer]), step)
        assert reading.allocated_bytes >= 120 + 16 + (16 + 24)  # indices and values of the gradient
        assert measure(CpuMeter(embedding, [optimizer]), lambda: None).allocated_bytes == 120 + 16 + 24

    def test_storages_freed_between_steps_leave(self, linear: nn.Linear) -> None:
        meter = CpuMeter(linear, [])
        kept: list[torch.Tensor] = []
        measure(meter, lambda: kept.append(torch.zeros(1000)))
        assert measure(meter, lambda: None).allocated_bytes == W + B + 4000
        kept.clear()
        assert ends(measure(meter, lambda: None)) == (W + B, W + B)


class TestCheckpointing:
    def test_lowers_the_peak_by_what_is_no_longer_saved(self) -> None:
        first, second = Tanhs(3), Tanhs(6)
        model = nn.Sequential(first, second)
        x = torch.randn(1000, requires_grad=True)
        meter = CpuMeter(model, [])

        def plain() -> None:
            second(first(x)).sum().backward()

        def checkpointed() -> None:
            second(checkpoint(first, x, use_reentrant=False)).sum().backward()

        measure(meter, plain)  # x.grad is there from now on, and known
        without, with_ = measure(meter, plain), measure(meter, checkpointed)
        # Each tanh saves its result. The second block's are gone before the first is recomputed.
        assert without.peak_bytes - with_.peak_bytes == 3 * 4000
        assert without.allocated_bytes == with_.allocated_bytes

    def test_recomputed_tensors_count(self) -> None:
        block = Tanhs(6)
        x = torch.randn(1000, requires_grad=True)
        x.grad = torch.zeros(1000)
        meter = CpuMeter(block, [])
        plain = measure(meter, lambda: block(x).sum().backward())
        all_of_it = measure(meter, lambda: checkpoint(block, x, use_reentrant=False).sum().backward())
        # The first result lives on through the sum, to no avail: its copy is recomputed while the gradient is there.
        assert all_of_it.peak_bytes >= plain.peak_bytes

    def test_saves_nothing_where_the_optimizer_is_the_peak(self) -> None:
        net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        optimizer = torch.optim.Adam(net.parameters())
        x = torch.randn(2, 64)
        meter = CpuMeter(net, [optimizer])

        def step(forward: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], None]:
            def run() -> None:
                optimizer.zero_grad()
                forward(x).sum().backward()
                optimizer.step()

            return run

        weight, bias = 64 * 64 * F32, 64 * F32
        kept = 4 * 2 * (weight + bias) + 4 * F32 + 2 * 64 * F32  # parameter, gradient, two averages; counters; the batch
        # At the second weight: sqrt, that divided, and the same of the bias before it, which the loop's variable still holds.
        expected = (kept, kept + 2 * weight + bias)
        readings = [measure(meter, step(net)) for _ in range(2)]
        readings += [measure(meter, step(lambda x: checkpoint(net, x, use_reentrant=False))) for _ in range(2)]
        assert [ends(reading) for reading in readings] == [expected] * 4


@pytest.mark.parametrize("net", ["convolutions", "transformer", "lstm", "shared"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_equal_to_torchs_own_tracker(net: str, checkpointed: bool) -> None:
    from torch.distributed._tools.mem_tracker import MemTracker

    def run(measured: Callable[[nn.Module, torch.optim.Optimizer, torch.Tensor, Callable[[], None]], object]) -> object:
        torch.manual_seed(0)
        model, x = NETS[net]()
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            optimizer.zero_grad()
            y = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
            y.square().mean().backward()
            optimizer.step()

        step()
        return measured(model, optimizer, x, step)

    def ours(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, step: Callable[[], None]) -> object:
        meter = CpuMeter(model, [optimizer])
        meter._storages.see(x)  # the tracker is told of it beforehand, too
        return ends(measure(meter, step))

    def theirs(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, step: Callable[[], None]) -> object:
        tracker = MemTracker()
        tracker.track_external(model, optimizer, x)
        with tracker:
            step()
        cpu = torch.device("cpu")
        return (
            float(tracker.get_tracker_snapshot("current")[cpu]["Total"]),
            float(tracker.get_tracker_snapshot("peak")[cpu]["Total"]),
        )

    assert run(ours) == run(theirs)


class TestNoHarm:
    @pytest.mark.parametrize("dtype", [None, torch.bfloat16])
    @pytest.mark.parametrize("net", ["convolutions", "transformer", "lstm", "shared"])
    def test_results_are_the_same_to_the_bit(self, net: str, dtype: torch.dtype | None) -> None:
        def run(measured: bool) -> list[torch.Tensor]:
            torch.manual_seed(0)
            model, x = NETS[net]()
            optimizer = torch.optim.AdamW(model.parameters())
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
            meter = CpuMeter(model, [optimizer])
            losses = []
            for _ in range(3):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                    if measured:
                        meter.begin()
                    loss = model(x).float().square().mean()
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                if measured:
                    reading = meter.end()
                    assert reading.peak_bytes > reading.allocated_bytes > 0
                losses.append(loss.detach())
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            return [*losses, *grads, *model.state_dict().values(), torch.rand(1), torch.get_rng_state()]

        for plain, seen in zip(run(False), run(True), strict=True):
            assert torch.equal(plain, seen)

    def test_second_step_equals_the_third(self) -> None:
        model, x = NETS["transformer"]()
        optimizer = torch.optim.AdamW(model.parameters())
        meter = CpuMeter(model, [optimizer])

        def step() -> None:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

        _, second, third = (ends(measure(meter, step)) for _ in range(3))
        assert second == third

    def test_every_second_step_measured_reads_the_same(self) -> None:
        model, x = NETS["convolutions"]()
        optimizer = torch.optim.AdamW(model.parameters())
        meter = CpuMeter(model, [optimizer])

        def step() -> None:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

        measure(meter, step)
        expected = ends(measure(meter, step))
        step()
        step()
        assert ends(measure(meter, step)) == expected

    def test_nothing_is_kept_alive(self) -> None:
        model, x = NETS["convolutions"]()
        optimizer = torch.optim.AdamW(model.parameters())
        meter = CpuMeter(model, [optimizer])
        gc.collect()
        gc.disable()
        try:
            meter.begin()
            y = model(x)
            y.sum().backward()
            optimizer.step()
            meter.end()
            alive = [weakref.ref(thing) for thing in (y, x, next(model.parameters()))]
            del x, y
            assert [reference() is None for reference in alive] == [True, True, False]
        finally:
            gc.enable()
        gone = weakref.ref(model)
        del model, optimizer
        gc.collect()  # an optimizer is in a cycle with itself
        assert gone() is None
        assert alive[2]() is None
        meter.begin()  # the model is gone: nothing to measure, nothing to fail on
        assert math.isnan(meter.end().peak_bytes)
        assert len(meter._storages) == 0

    def test_close(self, linear: nn.Linear) -> None:
        meter = CpuMeter(linear, [])
        meter.begin()
        kept = linear(torch.zeros(4, 3))
        meter.close()
        meter.close()
        assert torch._C._len_torch_dispatch_stack() == 0
        assert len(meter._storages) == 0
        del kept
        meter.begin()
        assert torch._C._len_torch_dispatch_stack() == 0
        assert math.isnan(meter.end().allocated_bytes)

    def test_a_model_that_is_moved(self, linear: nn.Linear) -> None:
        meter = CpuMeter(linear, [])
        linear.to("meta")
        assert math.isnan(measure(meter, lambda: None).peak_bytes)
        assert not meter.measured
        assert meter.source == "not measured: the model was on the cpu, and is now on meta"
        linear.to_empty(device="cpu")
        assert measure(meter, lambda: None).allocated_bytes == W + B
        assert meter.measured

    def test_function_modes_of_the_user_hear_nothing(self, linear: nn.Linear) -> None:
        from torch.overrides import TorchFunctionMode

        heard = []

        class Listener(TorchFunctionMode):
            def __torch_function__(self, func: object, types: object, args: object = (), kwargs: object = None) -> object:
                heard.append(getattr(func, "__name__", func))
                return func(*args, **(kwargs or {}))  # type: ignore[operator,misc,arg-type]

        linear(torch.zeros(4, 3)).sum().backward()
        meter = CpuMeter(linear, [torch.optim.Adam(linear.parameters())])
        with Listener():
            meter.begin()
            torch.zeros(3).add(1)
            meter.end()
        assert heard == ["zeros", "add"]

    def test_errors_of_ops_pass_through(self, linear: nn.Linear) -> None:
        meter = CpuMeter(linear, [])
        meter.begin()
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            linear(torch.zeros(4, 4))
        assert meter.end().allocated_bytes == W + B

    def test_no_warnings_for_parameters_that_are_no_leaves(self) -> None:
        model = nn.Linear(2, 2)
        model._parameters["weight"] = model.weight * 2  # type: ignore[assignment]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert measure(CpuMeter(model, []), lambda: None).allocated_bytes == 16 + 8


def test_random_programs_against_torchs_own_tracker() -> None:
    from torch.distributed._tools.mem_tracker import MemTracker

    seed = random.randrange(2**32)
    print(f"seed {seed}")
    model = nn.Linear(1, 1)

    def program(choose: random.Random) -> None:
        held = [torch.zeros(8)]
        for _ in range(150):
            x = choose.choice(held)
            action = choose.randrange(7)
            if action == 0:
                held.append(torch.ones(choose.randrange(1, 40)))
            elif action == 1:
                held.append(x.exp())
            elif action == 2:
                held.append(x[: choose.randrange(1, 5)])
            elif action == 3:
                x.mul_(0)
            elif action == 4:
                held.append(torch.cat([x, x]) if x.numel() < 100 else x.sum())
            elif action == 5:
                leaf = x.detach().clone().requires_grad_()
                leaf.tanh().sigmoid().sum().backward()
                held.append(leaf.grad)  # type: ignore[arg-type]
            else:
                held.pop(choose.randrange(len(held)))
                held = held or [torch.zeros(8)]
            held = [t if t.dim() else t.reshape(1) for t in held]  # so that each can be sliced

    ours = ends(measure(CpuMeter(model, []), lambda: program(random.Random(seed))))
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        program(random.Random(seed))
    assert ours == (8.0, float(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]))


class Tanhs(nn.Module):
    """So many times tanh, which saves its result and needs nothing else."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = x.tanh()
        return x


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Conv2d(4, 2, 3), nn.Flatten()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 5, num_layers=2, batch_first=True, dropout=0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]


class Shared(nn.Module):
    """One layer three times, residual, with its weight tied to another's."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.two.weight = self.one.weight
        self.norm = nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = x + F.gelu(self.two(F.dropout(self.one(self.norm(x)), 0.1)))
        return x


NETS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "convolutions": lambda: (Convolutions(), torch.randn(3, 1, 8, 8)),
    "transformer": lambda: (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 5, 8)),
    "lstm": lambda: (LSTM(), torch.randn(2, 4, 3)),
    "shared": lambda: (Shared(), torch.randn(4, 6)),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
