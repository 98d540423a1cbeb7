"""The live loop: where steps begin and end, when requests are applied, what is recorded, and what it leaves behind."""

from __future__ import annotations

import collections
import copy
import gc
import math
import pickle
import random
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from amp_widgets.core.loop import LiveLoop
from amp_widgets.core.settings import Settings
from amp_widgets.core.threads import this_thread
from amp_widgets.core.training_thread import NO_THREAD
from amp_widgets.errors import CheckpointingError, LayerError, ModelError, SessionClosedError, SettingsError


class Net(nn.Module):
    """Three small layers, with dropout and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2)) for _ in range(3)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Bench:
    """A model, its optimizer, a loop, and the classic training step."""

    def __init__(self, *, attach: bool = True, optimizer: str = "adam", **kwargs: Any) -> None:
        torch.manual_seed(0)
        self.model = Net()
        makers: dict[str, Any] = {
            "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
            "fused": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
            "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
        }
        self.optimizer = makers[optimizer](self.model.parameters())
        self.loop = LiveLoop(self.model, [self.optimizer], **kwargs) if attach else None
        self.plain = torch.amp.GradScaler("cpu", enabled=False)
        self.generator = torch.Generator().manual_seed(1)
        self.random = torch.get_rng_state()  # each bench draws its own dropout masks, whoever else trains

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(6, 8, generator=self.generator), torch.randint(4, (6,), generator=self.generator)

    def step(self, factor: float = 1.0) -> float:
        torch.set_rng_state(self.random)
        x, y = self.batch()
        self.optimizer.zero_grad()
        scaler = self.plain if self.loop is None else self.loop.scaler
        region = torch.autocast("cpu", enabled=False) if self.loop is None else self.loop.autocast()
        with region:
            loss = nn.functional.cross_entropy(self.model(x), y) * factor
        scaler.scale(loss).backward()
        scaler.step(self.optimizer)
        scaler.update()
        self.random = torch.get_rng_state()
        return loss.item()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    assert made.loop is not None
    made.loop.close()


def loop_of(bench: Bench) -> LiveLoop:
    assert bench.loop is not None
    return bench.loop


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def test_a_new_loop_changes_nothing() -> None:
    untouched, attached = Bench(attach=False), Bench()
    losses = [[b.step() for _ in range(10)] for b in (untouched, attached)]
    assert losses[0] == losses[1]
    assert_same(state_of(untouched.model), state_of(attached.model))
    history = loop_of(attached).history.columns("step", "loss", "scale", "skipped")
    assert history["step"].tolist() == list(range(10))
    assert history["loss"].tolist() == losses[1]
    assert history["scale"].tolist() == [1.0] * 10
    assert history["skipped"].tolist() == [0.0] * 10
    loop_of(attached).close()


def test_fp16_equals_torchs_own_loop_bit_for_bit() -> None:
    ours = Bench()
    loop_of(ours).request(autocast="fp16", init_scale=2.0**10, growth_interval=4)
    losses = [ours.step(math.inf if i == 5 else 1.0) for i in range(12)]

    plain = Bench(attach=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    expected, scales = [], []
    torch.set_rng_state(plain.random)
    for i in range(12):
        x, y = plain.batch()
        plain.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(plain.model(x), y) * (math.inf if i == 5 else 1.0)
        scales.append(scaler.get_scale() if i else 2.0**10)
        scaler.scale(loss).backward()
        scaler.step(plain.optimizer)
        scaler.update()
        expected.append(loss.item())
    assert losses == expected
    assert_same(state_of(ours.model), state_of(plain.model))
    columns = loop_of(ours).history.columns("loss", "scale", "skipped")
    assert columns["loss"].tolist() == expected  # the inf is recorded as such
    assert columns["scale"].tolist() == scales
    assert np.flatnonzero(columns["skipped"]).tolist() == [5]
    loop_of(ours).close()


def test_every_scale_change_is_an_event() -> None:
    bench = Bench(optimizer="sgd")
    loop = loop_of(bench)
    loop.request(autocast="fp16", init_scale=2.0**10, growth_interval=3)
    overflows = {2, 3, 8}
    scale, tracker, expected, skips = 2.0**10, 0, [], []
    for i in range(20):
        bench.step(math.inf if i in overflows else 1.0)
        before = scale
        if i in overflows:
            scale, tracker = scale * 0.5, 0
            skips.append(i)
        else:
            tracker += 1
            if tracker == 3:
                scale, tracker = scale * 2, 0
        if scale != before:
            expected.append((i + 1, before, scale))
    events = loop.history.events("scale_changed")
    assert [(e.step, e.detail["from"], e.detail["to"]) for e in events] == expected
    assert [e.step for e in loop.history.events("skipped")] == skips
    assert "3 steps without inf or NaN" in next(e.reason for e in events if e.detail["to"] > e.detail["from"])
    assert "inf or NaN in the gradients" in events[0].reason
    loop.close()


def test_request_before_the_first_step(bench: Bench) -> None:
    loop = loop_of(bench)
    loop.request(autocast="bf16", checkpointed=["layers.*"])
    assert loop.settings == Settings()
    assert loop.pending is not None
    assert loop.pending.changes == {"autocast": "bf16", "checkpointed": ("layers.0", "layers.1", "layers.2")}
    seen: list[Any] = []
    with loop.autocast():
        seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), loop.settings.autocast, loop.pending))
        bench.model(bench.batch()[0])
    assert seen == [(True, torch.bfloat16, "bf16", None)]
    assert [(e.step, e.kind) for e in loop.history.events()] == [(0, "applied")]


def test_requests_wait_for_the_boundary(bench: Bench) -> None:
    loop = loop_of(bench)
    bench.step()
    x, y = bench.batch()
    with loop.autocast():
        loop.request(autocast="fp16", init_scale=4.0)
        assert not torch.is_autocast_enabled("cpu")
        loss = nn.functional.cross_entropy(bench.model(x), y)
    with loop.autocast():  # a second region of the same step
        assert not torch.is_autocast_enabled("cpu")
    assert loop.scaler.scale(loss) is loss
    loss.backward()
    loop.scaler.step(bench.optimizer)
    assert loop.settings.autocast == "fp32"
    loop.scaler.update()
    assert loop.settings.autocast == "fp16"
    assert loop.history.events("applied")[0].step == 2
    bench.step()
    assert loop.history.columns("scale")["scale"].tolist() == [1.0, 1.0, 4.0]


def test_a_request_made_between_steps_is_in_force_for_the_next(bench: Bench) -> None:
    loop = loop_of(bench)
    for autocast in ("fp16", "bf16", "fp32", "fp16"):
        loop.request(autocast=autocast)
        bench.step()
        assert loop.settings.autocast == autocast
    events = loop.history.events("applied")
    assert [(e.step, e.detail["autocast"], e.detail["source"]) for e in events] == [
        (0, "fp16", "script"), (1, "bf16", "script"), (2, "fp32", "script"), (3, "fp16", "script"),
    ]  # fmt: skip


@pytest.mark.parametrize("start", ["forward", "scale"])
def test_other_ways_to_begin_a_step(bench: Bench, start: str) -> None:
    loop = loop_of(bench)
    loop.request(init_scale=2.0)
    x, y = bench.batch()
    if start == "scale":
        loss = bench.model.head.weight.sum()
    else:
        output = bench.model(x)
        assert loop.pending is None
        assert loop.step_in_progress
        loss = nn.functional.cross_entropy(output, y)
    loop.scaler.scale(loss).backward()
    assert loop.settings.init_scale == 2.0
    loop.scaler.step(bench.optimizer)
    loop.scaler.update()
    assert loop.history.columns("loss")["loss"].tolist() == [loss.item()]


def test_forward_of_a_wrapper_begins_a_step(bench: Bench) -> None:
    loop = loop_of(bench)
    wrapped = nn.DataParallel(bench.model)
    loop.request(init_scale=2.0)
    wrapped(bench.batch()[0])
    assert loop.step_in_progress


def test_validation_is_no_step(bench: Bench) -> None:
    loop = loop_of(bench)
    bench.step()
    loop.request(autocast="bf16")
    with torch.no_grad():
        bench.model(bench.batch()[0])
        with loop.autocast():
            bench.model(bench.batch()[0])
    with loop.autocast(), torch.no_grad():
        bench.model(bench.batch()[0])
    assert not loop.step_in_progress
    bench.step()
    assert loop.history.columns("step")["step"].tolist() == [0, 1]


def test_without_a_scaler_the_optimizers_step_is_the_boundary(bench: Bench) -> None:
    loop = loop_of(bench)
    for _ in range(3):
        x, y = bench.batch()
        bench.optimizer.zero_grad()
        with loop.autocast():
            loss = nn.functional.cross_entropy(bench.model(x), y)
        loop.record_loss(loss)
        loss.backward()
        bench.optimizer.step()
        assert not loop.step_in_progress
    loop.request(autocast="bf16")
    with loop.autocast():
        assert torch.is_autocast_enabled("cpu")
    columns = loop.history.columns("step", "loss")
    assert columns["step"].tolist() == [0, 1, 2]
    assert columns["loss"][2] == loss.item()


@pytest.mark.parametrize("scaled", [False, True], ids=["the optimizer itself is stepped", "the scaler steps it"])
def test_an_update_after_a_step_of_which_nothing_was_scaled_is_no_second_boundary(bench: Bench, scaled: bool) -> None:
    loop = bench.loop
    assert loop is not None
    for step in range(4):
        x, y = bench.batch()
        bench.optimizer.zero_grad()
        with loop.autocast():
            loss = nn.functional.cross_entropy(bench.model(x), y)
        loss.backward()
        if scaled:
            loop.scaler.step(bench.optimizer)
        else:
            bench.optimizer.step()
        loop.scaler.update()
        assert loop.history.columns("step")["step"].tolist() == list(range(step + 1))


def test_an_optimizer_that_asks_for_the_loss_many_times_makes_one_step(bench: Bench) -> None:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    loop = LiveLoop(model, [optimizer])
    x, y = bench.batch()
    asked = 0

    def closure() -> torch.Tensor:
        nonlocal asked
        asked += 1
        optimizer.zero_grad()
        with loop.autocast():
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
        loop.scaler.update()
    loop.close()
    assert asked > 3
    assert loop.history.columns("step")["step"].tolist() == [0, 1, 2]


def test_a_strangers_optimizer_is_no_boundary(bench: Bench) -> None:
    loop = loop_of(bench)
    other = nn.Parameter(torch.ones(2))
    other.sum().backward()
    torch.optim.SGD([other], lr=0.1).step()
    assert loop.status().step == 0


def test_without_an_optimizer_given_any_with_the_models_parameters_counts() -> None:
    model = Net()
    loop = LiveLoop(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    other = nn.Parameter(torch.ones(2))
    other.sum().backward()
    torch.optim.SGD([other], lr=0.1).step()
    assert loop.status().step == 1
    loop.close()


def test_two_optimizers_without_a_scaler_make_one_step() -> None:
    model = Net()
    optimizers = [torch.optim.SGD(model.layers.parameters(), lr=0.1), torch.optim.SGD(model.head.parameters(), lr=0.1)]
    loop = LiveLoop(model, optimizers)
    for _ in range(3):
        model(torch.randn(4, 8)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert loop.history.columns("step")["step"].tolist() == [0, 1, 2]
    loop.close()


def test_gradient_accumulation_is_one_step(bench: Bench) -> None:
    loop = loop_of(bench)
    loop.request(autocast="fp16")
    parts = []
    for _ in range(3):
        x, y = bench.batch()
        with loop.autocast():
            loss = nn.functional.cross_entropy(bench.model(x), y) / 3
        parts.append(loss.item())
        loop.scaler.scale(loss).backward()
        loop.request(init_scale=8.0)  # in mid-accumulation: must wait
        assert loop.settings.init_scale == 2.0**16
    loop.scaler.step(bench.optimizer)
    loop.scaler.update()
    columns = loop.history.columns("loss", "scale")
    assert columns["loss"].tolist() == [pytest.approx(sum(parts), rel=1e-6)]
    assert columns["scale"].tolist() == [2.0**16]
    assert loop.settings.init_scale == 8.0


def test_requests_are_validated_at_once_and_nothing_changes(bench: Bench) -> None:
    loop = loop_of(bench)
    for changes, kind, said in [
        ({"autocast": "fp8"}, SettingsError, "expected one of 'fp32', 'fp16', 'bf16'"),
        ({"init_scale": 0}, SettingsError, "positive finite"),
        ({"checkpointed": ["layer.*"]}, LayerError, "no layer matches 'layer.*'; did you mean 'layers.*' (3 layers)?"),
        ({"autocast": "fp16", "checkpointed": ["layers"]}, CheckpointingError, "layers"),
        ({}, SettingsError, "got no change"),
        ({"growth": 3}, SettingsError, "no such setting"),
    ]:
        with pytest.raises(kind) as caught:
            loop.request(**changes)
        assert said in str(caught.value)
        event = loop.history.events("rejected")[-1]
        assert event.reason == str(caught.value)
        assert event.detail == {**{k: list(v) if isinstance(v, tuple) else v for k, v in changes.items()}, "source": "script"}
        assert loop.status().last_rejection == str(caught.value)
    assert loop.pending is None
    bench.step()
    assert loop.settings == Settings()
    loop.request(autocast="bf16")
    bench.step()
    assert loop.status().last_rejection is None


def test_validation_sees_what_waits(bench: Bench) -> None:
    loop = loop_of(bench)
    loop.request(max_scale=2.0**20)
    with pytest.raises(SettingsError, match="above max_scale"):
        loop.request(init_scale=2.0**21)


def test_a_request_that_fails_at_the_boundary_is_rejected_whole(bench: Bench) -> None:
    loop = loop_of(bench)
    loop.request(autocast="bf16", checkpointed=["layers.0"])
    bench.model.layers[0].forward = lambda x: x  # type: ignore[method-assign]  # what a foreign library might do meanwhile
    try:
        bench.step()
    finally:
        del bench.model.layers[0].forward
    assert loop.settings == Settings()
    event = loop.history.events()[-1]
    assert (event.kind, event.detail["autocast"]) == ("rejected", "bf16")
    assert "layers.0" in event.reason
    assert loop.status().last_rejection == event.reason


def test_checkpointing_on_and_off_is_bit_identical() -> None:
    untouched, toggled = Bench(attach=False), Bench()
    plan: list[list[str]] = [["layers.*"], [], ["layers.1"], ["layers.0.0", "layers.2"], ["head"], []]
    for names in plan:
        loop_of(toggled).request(checkpointed=names)
        assert [untouched.step() for _ in range(2)] == [toggled.step() for _ in range(2)]
        assert_same(state_of(untouched.model), state_of(toggled.model))
    loop_of(toggled).close()


def test_requests_from_three_threads_equal_a_scripted_reference() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    live = Bench(optimizer="sgd")
    loop = loop_of(live)
    done = threading.Event()

    def ask(number: int) -> None:
        rng = random.Random(seed + number)
        for _ in range(60):
            loop.request(
                source=f"thread {number}",
                **rng.choice(
                    [
                        {"autocast": rng.choice(["fp32", "bf16", "fp16"])},
                        {"init_scale": 2.0 ** rng.randint(0, 12)},
                        {"checkpointed": rng.choice([[], ["layers.*"], ["layers.1"]])},
                        {"growth_interval": rng.randint(1, 5), "scaling": rng.random() < 0.7},
                    ]
                ),
            )
            done.wait(0.001)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    losses = []
    while any(thread.is_alive() for thread in threads):
        losses.append(live.step())
    losses += [live.step() for _ in range(3)]
    for thread in threads:
        thread.join()
    applied = loop.history.events("applied")
    assert len(applied) == 180
    assert loop.history.events("rejected") == []

    scripted = Bench(optimizer="sgd")
    again = []
    for step in range(len(losses)):
        for event in applied:
            if event.step == step:
                changes = {k: v for k, v in event.detail.items() if k != "source"}
                loop_of(scripted).request(**changes)
        again.append(scripted.step())
    assert losses == again
    assert_same(state_of(live.model), state_of(scripted.model))
    one, two = (loop_of(b).history.columns("loss", "scale", "skipped") for b in (live, scripted))
    for name in one:
        np.testing.assert_array_equal(one[name], two[name])
    loop.close()
    loop_of(scripted).close()


class CountOps(TorchDispatchMode):
    """Counts the operators that reach the dispatcher, by name: on a GPU ``aten::_local_scalar_dense`` waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.of: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.of[func.name().split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("optimizer", ["sgd", "fused"])
@pytest.mark.parametrize("autocast", ["fp32", "fp16"])
def test_no_sync_is_added_to_the_step(optimizer: str, autocast: str) -> None:
    counts = []
    for attach in (False, True):
        bench = Bench(attach=attach, optimizer=optimizer, **({"memory_every": 0} if attach else {}))
        if bench.loop is not None:
            bench.loop.request(autocast=autocast)
        bench.plain = torch.amp.GradScaler("cpu", enabled=autocast == "fp16")

        def run(bench: Bench = bench) -> None:
            for _ in range(50):
                x, y = bench.batch()
                bench.optimizer.zero_grad()
                scaler = bench.plain if bench.loop is None else bench.loop.scaler
                region = (
                    torch.autocast("cpu", dtype=torch.float16, enabled=autocast == "fp16")
                    if bench.loop is None
                    else bench.loop.autocast()
                )
                with region:
                    loss = nn.functional.cross_entropy(bench.model(x), y)
                scaler.scale(loss).backward()
                scaler.step(bench.optimizer)
                scaler.update()

        with CountOps() as count:
            run()
        counts.append(count.of["aten::_local_scalar_dense"])
        if bench.loop is not None:
            assert len(bench.loop.history) == 50
            bench.loop.close()
    assert counts[0] == counts[1]
    assert (counts[0] > 0) is (autocast == "fp16" and optimizer == "sgd")  # torch's own; so the count does count


def test_step_time_is_of_the_injected_clock() -> None:
    now = [100.0]
    bench = Bench(clock=lambda: now[0])
    loop = loop_of(bench)
    for duration in (0.5, 0.25, 1.0):
        x, y = bench.batch()
        now[0] += 2.0  # data loading is not the step's
        bench.optimizer.zero_grad()
        with loop.autocast():
            loss = nn.functional.cross_entropy(bench.model(x), y)
        loop.scaler.scale(loss).backward()
        loop.scaler.step(bench.optimizer)
        now[0] += duration
        loop.scaler.update()
    columns = loop.history.columns("step_s", "time_s")
    assert columns["step_s"].tolist() == [0.5, 0.25, 1.0]
    assert columns["time_s"].tolist() == [2.5, 4.75, 7.75]
    assert loop.status().step_s == 0.5
    assert loop.status().steps_per_s == pytest.approx(2 / 5.25)
    loop.close()


def test_memory_is_measured_every_nth_step() -> None:
    bench = Bench(memory_every=3)
    for _ in range(7):
        bench.step()
    columns = loop_of(bench).history.columns("peak_bytes", "allocated_bytes", "reserved_bytes")
    assert np.flatnonzero(~np.isnan(columns["peak_bytes"])).tolist() == [0, 3, 6]
    assert np.isnan(columns["reserved_bytes"]).all()  # a CPU reserves nothing
    assert columns["peak_bytes"][3] > columns["allocated_bytes"][3] > 0
    loop_of(bench).close()


def test_an_exception_in_the_step_leaves_the_loop_usable(bench: Bench) -> None:
    loop = loop_of(bench)
    bench.step()
    with pytest.raises(RuntimeError, match="shape"), loop.autocast():
        bench.model(torch.randn(3, 5))
    assert not loop.step_in_progress
    loop.request(autocast="fp16")
    with loop.autocast():
        loss = bench.model(bench.batch()[0]).sum()
    loop.scaler.scale(loss).backward()
    loop.scaler.unscale_(bench.optimizer)
    loop.abandon_step()  # as after an interrupt
    bench.step()
    assert loop.history.columns("step")["step"].tolist() == [0, 1]


def test_autocast_as_a_decorator(bench: Bench) -> None:
    loop = loop_of(bench)

    @loop.autocast()
    def forward(x: torch.Tensor) -> tuple[bool, torch.dtype]:
        """Doc."""
        return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    assert forward.__doc__ == "Doc."
    assert not forward(torch.ones(1))[0]
    loop.abandon_step()
    loop.request(autocast="bf16")
    assert forward(torch.ones(1)) == (True, torch.bfloat16)


def test_autocast_disabled_by_the_user_stays_disabled(bench: Bench) -> None:
    loop = loop_of(bench)
    loop.request(autocast="bf16")
    with loop.autocast(enabled=False):
        assert not torch.is_autocast_enabled("cpu")


def test_fp32_switches_off_an_outer_region(bench: Bench) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), loop_of(bench).autocast():
        assert not torch.is_autocast_enabled("cpu")


def test_load_state_dict_on_the_scaler_is_in_the_settings(bench: Bench) -> None:
    loop = loop_of(bench)
    loop.request(autocast="fp16")
    bench.step()
    state = loop.scaler.state_dict()
    loop.scaler.load_state_dict({**state, "scale": 128.0, "growth_interval": 11})
    assert (loop.settings.init_scale, loop.settings.growth_interval, loop.settings.autocast) == (128.0, 11, "fp16")
    bench.step()
    assert loop.history.columns("scale")["scale"].tolist() == [2.0**16, 128.0]
    assert loop.history.events("applied")[-1].detail["source"] == "scaler"
    changed = loop.history.events("scale_changed")
    assert [(e.step, e.detail["from"], e.detail["to"]) for e in changed] == [(1, 2.0**16, 128.0)]


def hooks() -> tuple[int, int, int, int]:
    return (
        len(torch_module._global_forward_pre_hooks),
        len(torch_module._global_forward_hooks),
        len(torch_optimizer._global_optimizer_post_hooks),
        len(torch_optimizer._global_optimizer_pre_hooks),
    )


def test_nothing_of_the_users_is_touched_while_attached(bench: Bench) -> None:
    model, twin = bench.model, Bench(attach=False).model
    loop = loop_of(bench)
    loop.request(checkpointed=["layers.*"])
    bench.step()
    assert repr(model) == repr(twin)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in twin.named_parameters()]
    assert list(model.state_dict()) == list(twin.state_dict())
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._backward_hooks
    assert not bench.optimizer._optimizer_step_post_hooks
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same(state_of(model), state_of(other))


def test_close_leaves_the_model_as_it_was() -> None:
    before = hooks()
    bench = Bench()
    loop = loop_of(bench)
    types = [type(m) for m in bench.model.modules()]
    attributes = [sorted(vars(m)) for m in bench.model.modules()]
    loop.request(autocast="fp16", checkpointed=["layers.*", "head"], init_scale=4.0)
    bench.step()
    scaler = loop.scaler
    loop.close()
    loop.close()
    assert [type(m) for m in bench.model.modules()] == types
    assert [sorted(vars(m)) for m in bench.model.modules()] == attributes
    assert hooks() == before
    assert type(scaler) is torch.amp.GradScaler
    assert scaler.get_scale() == 4.0
    bench.step()  # the user's loop goes on
    assert len(loop.history) == 1
    with pytest.raises(SessionClosedError, match="closed"):
        loop.request(autocast="fp32")


def test_close_frees_model_and_loop() -> None:
    bench = Bench()
    loop_of(bench).request(checkpointed=["layers.*"])
    bench.step()
    loop = loop_of(bench)
    loop.close()
    model = weakref.ref(bench.model)
    del bench.model, bench.optimizer
    gc.collect()
    assert model() is None
    assert len(loop.history) == 1


def test_a_forgotten_loop_lets_go() -> None:
    before = hooks()
    bench = Bench()
    loop_of(bench).request(checkpointed=["layers.*"])
    bench.step()
    types = {type(m) for m in Net().modules()}
    bench.loop = None
    gc.collect()
    assert hooks() == before
    assert {type(m) for m in bench.model.modules()} == types


def test_a_second_loop_takes_over() -> None:
    bench = Bench()
    first = loop_of(bench)
    first.request(checkpointed=["layers.*"])
    bench.step()
    second = LiveLoop(bench.model, [bench.optimizer])
    assert first.closed
    assert second.settings == Settings()
    bench.loop = second
    bench.step()
    assert (len(first.history), len(second.history)) == (1, 1)
    second.close()


def test_models_and_optimizers_that_do_not_fit() -> None:
    with pytest.raises(ModelError, match=r"got a ReLU without parameters"):
        LiveLoop(nn.ReLU())
    stranger = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ModelError, match="none of them the model's"):
        LiveLoop(Net(), [stranger])
    with pytest.raises(ModelError, match=r"expected a torch\.optim\.Optimizer"):
        LiveLoop(Net(), ["adam"])  # type: ignore[list-item]
    with pytest.raises(ModelError, match="meta device"):
        LiveLoop(nn.Linear(2, 2, device="meta"))
    with pytest.raises(SettingsError, match="memory_every"):
        LiveLoop(Net(), memory_every=-1)


def test_a_background_owner_keeps_others_out(bench: Bench) -> None:
    loop = loop_of(bench)
    loop.own(NO_THREAD)
    bench.step()  # another thread's training: none of this run's business
    assert loop.status().step == 0
    loop.own(None)
    bench.step()
    assert loop.status().step == 1


@pytest.mark.parametrize(
    "whole",
    [True, pytest.param(False, marks=pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning"))],  # once, torch's own
)
def test_a_compiled_model_is_compiled_once_a_change(whole: bool) -> None:
    torch._dynamo.reset()
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    twin = copy.deepcopy(model)
    fast: Any = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(twin.parameters(), lr=0.1)
    loop = LiveLoop(fast if whole else model, [optimizer])
    assert loop.compiled is whole
    x = torch.randn(3, 4)
    counts = []
    for names in ([], [], ["0", "2"], ["0", "2"], [], []):
        loop.request(checkpointed=names)
        losses = []
        for run, used, scaler in ((fast, optimizer, loop.scaler), (twin, other, torch.amp.GradScaler("cpu", enabled=False))):
            used.zero_grad()
            with loop.autocast() if run is fast else torch.autocast("cpu", enabled=False):
                loss = run(x).square().sum()
            scaler.scale(loss).backward()
            scaler.step(used)
            scaler.update()
            losses.append(loss.item())
        assert losses[0] == losses[1]
        counts.append(len(compiled))
    assert counts[0] == counts[1]  # nothing is compiled for the session's own sake
    assert counts[2] == counts[3]
    assert counts[4] == counts[5]
    columns = loop.history.columns("peak_bytes")
    assert np.isnan(columns["peak_bytes"]).all()
    if whole:
        assert "compile" in loop.memory_source
    loop.close()
    torch._dynamo.reset()


def accumulate(bench: Bench, count: int) -> None:
    loop = loop_of(bench)
    torch.set_rng_state(bench.random)
    for _ in range(count):
        x, y = bench.batch()
        with loop.autocast():
            loss = nn.functional.cross_entropy(bench.model(x), y)
        loop.scaler.scale(loss).backward()
    bench.random = torch.get_rng_state()


def update(bench: Bench) -> None:
    loop_of(bench).scaler.step(bench.optimizer)
    loop_of(bench).scaler.update()
    bench.optimizer.zero_grad()


@pytest.mark.parametrize("break_in", ["exception", "recover", "break_off"])
def test_a_break_in_mid_accumulation_lets_nothing_take_effect(break_in: str) -> None:
    states = []
    for disturbed in (False, True):
        bench = Bench(optimizer="sgd")
        loop = loop_of(bench)
        loop.request(autocast="fp16", init_scale=2.0**10)
        accumulate(bench, 2)
        if disturbed:
            loop.request(init_scale=2.0**4, checkpointed=["layers.*"])
            if break_in == "exception":
                with pytest.raises(ZeroDivisionError), loop.autocast():
                    raise ZeroDivisionError
            elif break_in == "recover":  # a next session.steps(...)
                loop.recover()
            else:
                loop.break_off_step()
            assert loop.pending is not None
        accumulate(bench, 1)
        update(bench)
        assert loop.history.columns("scale")["scale"].tolist() == [2.0**10]
        assert math.isfinite(loop.history.columns("loss")["loss"][0])
        states.append(state_of(bench.model))
        if disturbed:
            assert loop.settings.init_scale == 2.0**4
            assert np.isnan(loop.history.columns("step_s")["step_s"]).all()
        loop.close()
    assert_same(*states)


def test_an_interrupt_between_unscale_and_update_is_recovered_from(bench: Bench) -> None:
    loop = loop_of(bench)
    loop.request(autocast="fp16", init_scale=4.0)
    accumulate(bench, 1)
    loop.scaler.unscale_(bench.optimizer)
    loop.recover()
    assert not loop.step_in_progress
    bench.step()
    assert len(loop.history) == 1


def test_a_layer_that_left_the_model_does_not_stop_the_loop(bench: Bench) -> None:
    loop = loop_of(bench)
    loop.request(checkpointed=["layers.2", "head"])
    bench.step()
    del bench.model.layers[2]
    loop.request(autocast="bf16")
    bench.step()
    assert loop.settings.autocast == "bf16"
    with pytest.raises(LayerError):
        loop.request(checkpointed=["layers.2"])
    loop.request(checkpointed=["layers.1"])
    loop.request(checkpointed=[])
    bench.step()
    assert loop.settings.checkpointed == ()
    assert loop.pending is None
    assert [e.kind for e in loop.history.events("applied", "rejected")] == [
        "applied",
        "applied",
        "rejected",
        "applied",
        "applied",
    ]


def test_a_layer_that_becomes_impossible_is_rejected_and_the_loop_goes_on(bench: Bench) -> None:
    loop = loop_of(bench)
    loop.request(checkpointed=["layers.1"])
    bench.step()
    loop.request(checkpointed=["layers.1", "layers.0"], autocast="bf16")
    bench.model.layers[1].forward = bench.model.layers[1].forward  # type: ignore[method-assign]  # a foreign library
    try:
        bench.step()
        assert loop.history.events()[-1].kind == "rejected"
        assert loop.settings.autocast == "fp32"
        bench.step()
    finally:
        del bench.model.layers[1].forward
    loop.request(checkpointed=[])
    bench.step()
    assert loop.settings.checkpointed == ()


def test_a_step_that_another_threads_forward_pass_has_begun_ends_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    call, called, over = threading.Event(), threading.Event(), threading.Event()

    def infer() -> None:
        while not over.is_set():
            loop.forward_begins(model)  # with gradients on, as people forget; told by one who listens all the time
            called.set()
            call.wait(20)
            call.clear()

    def infer_once_more() -> None:
        called.clear()
        call.set()
        assert called.wait(20)

    complete = LiveLoop._complete

    def complete_after_another_pass(loop: LiveLoop) -> None:
        if threading.current_thread() is threading.main_thread():
            infer_once_more()  # between the optimizer's step and the end that it makes
        complete(loop)

    monkeypatch.setattr(LiveLoop, "_complete", complete_after_another_pass)
    loop = LiveLoop(model)
    thread = threading.Thread(target=infer)
    thread.start()
    try:
        assert called.wait(20)
        assert loop.step_in_progress
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        for done in (1, 2):
            optimizer.step()
            assert loop.step == done
    finally:
        over.set()
        call.set()
        thread.join()
        loop.close()


def test_another_threads_region_does_not_disturb_the_owner(bench: Bench) -> None:
    loop = loop_of(bench)
    loop.own(this_thread())
    loop.request(autocast="fp16", init_scale=8.0)
    accumulate(bench, 1)

    def look() -> None:
        with pytest.raises(ValueError, match="mine"), torch.no_grad(), loop.autocast():
            raise ValueError("mine")
        with pytest.raises(ValueError, match="mine"), loop.autocast():
            raise ValueError("mine")

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    update(bench)
    assert len(loop.history) == 1
    loop.own(None)


def test_a_scale_given_to_update_is_said_to_be_set(bench: Bench) -> None:
    loop = loop_of(bench)
    loop.request(autocast="fp16")
    accumulate(bench, 1)
    loop.scaler.step(bench.optimizer)
    loop.scaler.update(2.0**10)
    bench.step()
    assert [e.reason for e in loop.history.events("scale_changed")] == ["scale 2^16 → 2^10 (set to 2^10)"]


def test_a_cap_alone_holds_the_live_scale(bench: Bench) -> None:
    loop = loop_of(bench)
    loop.request(autocast="fp16", max_scale=2.0**5)
    bench.step()
    assert loop.history.columns("scale")["scale"].tolist() == [2.0**5]
    with pytest.raises(SettingsError, match="above max_scale 2\\^5"):
        loop.request(init_scale=2.0**6)
    loop.request(max_scale=None, min_scale=2.0**20)
    bench.step()
    assert loop.scaler.state_dict()["scale"] >= 2.0**20


def test_closing_between_unscale_and_step_leaves_a_scaler_that_knows(bench: Bench) -> None:
    loop = loop_of(bench)
    loop.request(autocast="fp16", init_scale=2.0**10)
    accumulate(bench, 1)
    scaler = loop.scaler
    scaler.unscale_(bench.optimizer)
    gradient = bench.model.head.weight.grad
    assert gradient is not None
    before = gradient.clone()
    loop.close()
    scaler.step(bench.optimizer)
    assert torch.equal(gradient, before)
    scaler.update()


def test_autocast_takes_what_torchs_own_takes(bench: Bench) -> None:
    loop = loop_of(bench)
    loop.request(autocast="bf16")
    with loop.autocast("cpu", dtype=torch.float16):
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16  # what is in force decides
    with pytest.raises(SettingsError, match="got device_type 'cuda', expected 'cpu'"):
        loop.autocast(device_type="cuda")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda m, o: LiveLoop(o, [o]), "got a SGD, expected a torch.nn.Module"),
        (lambda m, o: LiveLoop("net"), "got a str, expected a torch.nn.Module"),
        (lambda m, o: LiveLoop(m, [o], memory_every="2"), "memory_every: got '2'"),
        (lambda m, o: LiveLoop(m, [o], memory_every=2.5), "memory_every: got 2.5"),
        (lambda m, o: LiveLoop(m, [o], history_capacity=2), "history_capacity: got 2"),
    ],
)
def test_wrong_arguments_are_said_and_leave_the_former_loop(make: Any, said: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    former = LiveLoop(model, [optimizer])
    with pytest.raises((ModelError, SettingsError)) as caught:
        make(model, optimizer)
    assert said in str(caught.value)
    assert not former.closed
    former.close()


class Shell(nn.Module):
    """Of one's own code: torch.compile skips modules that are torch's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return y * 1


@pytest.mark.parametrize("part", ["whole", "layer"])
def test_a_session_alone_compiles_nothing_anew(part: str) -> None:
    counts = []
    for attach in (False, True):
        torch._dynamo.reset()
        compiled: list[Any] = []

        def backend(graph: Any, inputs: Any, compiled: list[Any] = compiled) -> Any:
            compiled.append(graph)
            return graph.forward

        model = Net()
        model.layers[0] = Shell(model.layers[0])
        (model if part == "whole" else model.layers[0]).compile(backend=backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop = LiveLoop(model, [optimizer]) if attach else None
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
        counts.append(len(compiled))
        if loop is not None:
            assert loop.status().step == 5
            loop.close()
    assert counts[0] == counts[1] > 0
    torch._dynamo.reset()


def test_of_a_plan_that_is_refused_the_event_has_the_layers(bench: Bench) -> None:
    class Plan:
        layers = ("nowhere",)

        def __repr__(self) -> str:
            return "a whole table"

    with pytest.raises(SettingsError):
        bench.loop.request(checkpointed=Plan())
    assert bench.loop.history.events("rejected")[-1].detail["checkpointed"] == ["nowhere"]
