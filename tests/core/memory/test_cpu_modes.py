"""The meter's dispatch mode among others, in steps that never end, under torch.compile and on several threads."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from amp_widgets.core.memory.cpu import CpuMeter
from amp_widgets.core.memory.step_mode import PAUSE_S, StepMode


@pytest.fixture
def model() -> nn.Linear:
    return nn.Linear(3, 2)


class Clock:
    """Stands still until it is told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def pause(self) -> None:
        self.now_s += 2 * PAUSE_S


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def meter(model: nn.Linear, clock: Clock) -> CpuMeter:
    return CpuMeter(model, [], clock=clock)


class Names(TorchDispatchMode):
    """A mode of the user's: the names of the ops it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def stack() -> list[Any]:
    return _python_dispatch._get_current_dispatch_mode_stack()


def cell(name: str, source: str, **names: Any) -> None:
    """Run like a cell of a notebook: module-level code with a file name of its own."""
    exec(compile(source, name, "exec"), names)


FLOPS = 2 * 4 * 3 * 2  # of Linear(3, 2) on a batch of 4


class TestNesting:
    def test_inside(self, meter: CpuMeter, model: nn.Linear) -> None:
        meter.begin()
        with FlopCounterMode(display=False) as flops:
            y = model(torch.zeros(4, 3))
        assert meter.end().allocated_bytes == 32 + y.nbytes + 48  # the graph of y keeps the batch
        assert flops.get_total_flops() == FLOPS
        assert stack() == []

    def test_around(self, meter: CpuMeter, model: nn.Linear) -> None:
        with FlopCounterMode(display=False) as flops:
            meter.begin()
            y = model(torch.zeros(4, 3))
            assert meter.end().allocated_bytes == 32 + y.nbytes + 48
            assert len(stack()) == 1
        assert flops.get_total_flops() == FLOPS
        assert meter.unmeasured_because is None
        assert meter.unmeasured_steps == 0
        assert stack() == []

    def test_entered_before_and_left_within(self, meter: CpuMeter, model: nn.Linear) -> None:
        names = Names()
        with names:
            meter.begin()
            a = torch.zeros(3)
        y = model(torch.zeros(4, 3))
        assert meter.end().allocated_bytes == 32 + a.nbytes + y.nbytes + 48
        assert names.names == ["zeros"]
        assert stack() == []
        assert not _python_dispatch.is_in_torch_dispatch_mode()

    def test_entered_within_and_left_in_the_next_step(self, meter: CpuMeter, model: nn.Linear) -> None:
        names = Names()
        meter.begin()
        names.__enter__()
        first = torch.zeros(2)
        assert meter.end().allocated_bytes == 32 + first.nbytes
        meter.begin()
        second = torch.zeros(3)
        names.__exit__(None, None, None)
        third = torch.zeros(4)
        assert meter.end().allocated_bytes == 32 + first.nbytes + second.nbytes + third.nbytes
        assert names.names == ["zeros", "zeros"]
        assert stack() == []

    @pytest.mark.parametrize("mode", [FakeTensorMode, FunctionalTensorMode])
    def test_torchs_own_modes_around(self, meter: CpuMeter, mode: type[Any]) -> None:
        with mode() as own:
            meter.begin()
            assert stack() == [own]
            assert math.isnan(meter.end().peak_bytes)
        assert stack() == []
        assert meter.unmeasured_because is not None
        assert mode.__name__ in meter.unmeasured_because
        meter.begin()
        assert meter.end().peak_bytes == 32

    def test_torchs_own_mode_below_another(self, meter: CpuMeter) -> None:
        with FakeTensorMode() as own, Names() as names:
            meter.begin()
            assert stack() == [own, names]
            assert math.isnan(meter.end().peak_bytes)

    def test_profile_under_a_mode(self, meter: CpuMeter, model: nn.Linear) -> None:
        def profile() -> Any:
            meter.profile_next("profile")
            meter.begin()
            model(torch.zeros(4, 3)).sum().backward()
            meter.end()
            model.zero_grad()
            taken = meter.take_profile()
            assert taken is not None
            return taken

        plain = profile()
        with FlopCounterMode(display=False) as flops, Names():
            under = profile()
        assert flops.get_total_flops() == 2 * FLOPS
        assert under.bytes_by_kind.tolist() == plain.bytes_by_kind.tolist()
        assert under.phases == plain.phases
        assert under.operator_names == plain.operator_names

    def test_entered_within_and_left_after(self, meter: CpuMeter, model: nn.Linear) -> None:
        meter.begin()
        with Names() as one, Names() as two:
            y = model(torch.zeros(4, 3))
            assert meter.end().allocated_bytes == 32 + y.nbytes + 48
            assert stack() == [one, two]
            y.sum()
            meter.begin()  # they are still there
            assert meter.end().peak_bytes == 32 + y.nbytes + 48
        assert stack() == []
        assert one.names == two.names
        assert one.names[-1] == "sum"
        assert not _python_dispatch.is_in_torch_dispatch_mode()
        meter.begin()
        assert meter.end().peak_bytes == 32 + y.nbytes + 48

    def test_abandoned_below_another(self, meter: CpuMeter) -> None:
        meter.begin()
        with Names() as names:
            meter.abandon()
            assert stack() == [names]
        assert stack() == []

    def test_fake_tensors_within(self, meter: CpuMeter) -> None:
        meter.begin()
        with FakeTensorMode() as fakes:
            torch.zeros(1000) + 1
            assert len(stack()) == 2
            assert meter.end().peak_bytes == 32
            assert stack() == [fakes]
        assert stack() == []

    def test_selective_checkpointing(self, meter: CpuMeter) -> None:
        def save_exp(context: object, op: object, *args: object, **kwargs: object) -> bool:
            return op is torch.ops.aten.exp.default

        def step() -> float:
            x = torch.ones(1000, requires_grad=True)
            meter.begin()
            y = checkpoint(
                lambda x: x.exp().sigmoid().tanh(),
                x,
                use_reentrant=False,
                context_fn=lambda: create_selective_checkpoint_contexts(save_exp),
            )
            y.sum().backward()
            return meter.end().peak_bytes

        assert step() == step() > 32 + 3 * 4000
        assert stack() == []

    def test_two_meters_on_one_thread(self, meter: CpuMeter, model: nn.Linear) -> None:
        other = CpuMeter(model, [])
        meter.begin()
        other.begin()
        torch.zeros(10)
        assert other.end().peak_bytes == 32 + 40
        torch.zeros(20)
        assert meter.end().peak_bytes == 32 + 80
        assert stack() == []

    def test_set_aside_while_it_ends(self, meter: CpuMeter) -> None:
        meter.begin()
        with _python_dispatch._disable_current_modes():
            assert math.isnan(meter.end().peak_bytes)  # some ops were not seen
        torch.zeros(1)  # puts right what the exit of that context put back
        assert stack() == []


class TestStepsThatDoNotEnd:
    CELL_1 = """
meter.begin()
y = model(torch.zeros(4, 3))
clock.pause()
y = y * 2  # the cell is still there: the step goes on
raise KeyboardInterrupt
"""

    def test_noticed_in_the_next_cell(self, meter: CpuMeter, model: nn.Linear, clock: Clock) -> None:
        names = {"meter": meter, "model": model, "clock": clock, "torch": torch, "stack": stack}
        with pytest.raises(KeyboardInterrupt):
            cell("cell 1", self.CELL_1, **names)
        assert len(stack()) == 1
        clock.pause()
        cell("cell 2", "assert (torch.ones(3) + 1).tolist() == [2, 2, 2]; assert stack() == []", **names)
        assert math.isnan(meter.end().peak_bytes)
        assert meter.unmeasured_steps == 1
        assert meter.unmeasured_because is not None
        assert "interrupted" in meter.unmeasured_because
        meter.begin()
        assert meter.end().allocated_bytes == 32

    def test_noticed_by_any_kind_of_op(self, meter: CpuMeter, model: nn.Linear, clock: Clock) -> None:
        leaf = torch.ones(3, requires_grad=True)
        loss = leaf.exp().sum()
        out = torch.empty(3)
        ops = {
            "keyword arguments": lambda: torch.zeros(3, dtype=torch.float64),
            "no arguments": lambda: torch.rand(()),
            "out": lambda: torch.add(leaf.detach(), 1, out=out),
            "backward": loss.backward,
            "view": lambda: out[1:],
        }
        for name, op in ops.items():
            cell("cell 1", "meter.begin(); torch.zeros(1)", meter=meter, torch=torch)
            clock.pause()
            op()
            assert stack() == [], name

    def test_noticed_below_another_mode(self, meter: CpuMeter, clock: Clock) -> None:
        cell("cell 1", "meter.begin()", meter=meter)
        clock.pause()
        with Names() as names:
            assert len(stack()) == 2
            torch.zeros(3)
            assert stack() == [names]
        assert names.names == ["zeros"]
        assert stack() == []

    def test_an_op_that_fails_is_not_the_last(self, meter: CpuMeter, clock: Clock) -> None:
        cell("cell 1", "meter.begin()", meter=meter)
        clock.pause()
        with pytest.raises(RuntimeError):
            torch.zeros(2) @ torch.zeros(3)
        torch.zeros(1)
        assert stack() == []

    def test_the_statements_of_a_cell_are_one_step(self, meter: CpuMeter, model: nn.Linear, clock: Clock) -> None:
        names = {"meter": meter, "model": model, "clock": clock, "torch": torch, "kept": []}
        for statement in ("meter.begin()", "kept.append(model(torch.zeros(4, 3)))", "clock.pause()", "kept[0].sum().backward()"):
            cell("cell 1", statement, **names)  # IPython runs each by itself
        cell("cell 1", "reading = meter.end(); assert reading.allocated_bytes == 3 * 32, reading", **names)

    def test_a_loop_in_a_function_is_part_of_the_cell_that_calls_it(self, meter: CpuMeter, clock: Clock) -> None:
        names: dict[str, Any] = {"meter": meter, "clock": clock, "torch": torch}
        source = "def train():\n meter.begin()\n clock.pause()\n torch.zeros(5)\n return meter.end()"
        exec(compile(source, "cell 1", "exec"), names)
        cell("cell 2", "assert train().peak_bytes == 32 + 20", **names)

    def test_the_next_step_clears_up(self, meter: CpuMeter) -> None:
        meter.begin()
        torch.zeros(1000)
        meter.begin()
        torch.zeros(1)
        assert meter.end().peak_bytes == 36
        assert stack() == []
        assert meter.unmeasured_because == "the step did not end"

    def test_abandon(self, meter: CpuMeter) -> None:
        meter.abandon()
        assert meter.unmeasured_steps == 0
        meter.begin()
        meter.abandon()
        meter.abandon()
        assert stack() == []
        assert meter.unmeasured_steps == 1
        assert math.isnan(meter.end().peak_bytes)

    def test_end_without_begin(self, meter: CpuMeter) -> None:
        assert math.isnan(meter.end().peak_bytes)
        assert meter.unmeasured_steps == 0

    def test_a_meter_that_is_dropped(self, model: nn.Linear) -> None:
        meter = CpuMeter(model, [])
        meter.begin()
        del meter
        torch.zeros(1)
        assert stack() == []

    def test_nothing_waits_for_a_pause_while_the_cell_runs(self, meter: CpuMeter, clock: Clock) -> None:
        meter.begin()
        for _ in range(5):
            clock.pause()
            torch.zeros(10)
        assert meter.end().peak_bytes == 32 + 40


class TestThreads:
    def test_abandoned_from_another_thread(self, meter: CpuMeter) -> None:
        meter.begin()
        in_thread(meter.abandon)
        assert len(stack()) == 1
        torch.zeros(1)
        assert stack() == []
        assert math.isnan(meter.end().peak_bytes)

    def test_closed_from_another_thread(self, meter: CpuMeter) -> None:
        meter.begin()
        in_thread(meter.close)
        torch.zeros(1)
        assert stack() == []

    def test_ended_on_another_thread(self, meter: CpuMeter) -> None:
        meter.begin()
        readings: list[float] = []
        in_thread(lambda: readings.append(meter.end().peak_bytes))
        assert math.isnan(readings[0])
        torch.zeros(1)
        assert stack() == []

    def test_left_here_and_begun_there(self, meter: CpuMeter) -> None:
        meter.begin()
        torch.zeros(1000)

        def step() -> None:
            meter.begin()
            torch.zeros(1)
            assert meter.end().peak_bytes == 36
            assert stack() == []

        in_thread(step)
        torch.zeros(1)
        assert stack() == []

    def test_on_a_background_thread(self, meter: CpuMeter, model: nn.Linear, clock: Clock) -> None:
        def steps() -> None:
            for _ in range(2):
                meter.begin()
                clock.pause()
                model(torch.zeros(4, 3))
                assert meter.end().peak_bytes == 32 + 48 + 32

        in_thread(steps)

    def test_ops_on_other_threads_are_not_seen(self, meter: CpuMeter) -> None:
        meter.begin()
        kept: list[torch.Tensor] = []
        in_thread(lambda: kept.append(torch.zeros(1000)))
        assert meter.end().peak_bytes == 32
        meter.begin()
        kept[0].add_(1)
        assert meter.end().peak_bytes == 32 + 4000

    def test_two_meters_on_two_threads(self, model: nn.Linear) -> None:
        barrier = threading.Barrier(2, timeout=60)

        def run(count: int) -> None:
            meter = CpuMeter(model, [])
            for _ in range(20):
                meter.begin()
                barrier.wait()
                torch.zeros(count)
                barrier.wait()
                assert meter.end().peak_bytes == 32 + 4 * count

        in_thread(lambda: run(10), lambda: run(1000))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # of dynamo's own
class TestCompiled:
    def test_compiled_code_keeps_running_compiled_and_the_step_is_not_measured(self, meter: CpuMeter, model: nn.Linear) -> None:
        calls = []

        def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
            def run(*args: Any) -> Any:
                calls.append(1)
                return graph.forward(*args)

            return run

        loss = torch.compile(lambda y: y.square().mean(), backend=backend)
        x = torch.zeros(4, 3)

        def step() -> float:
            meter.begin()
            y = model(x)
            loss(y).backward()
            return meter.end().peak_bytes

        assert math.isnan(step())  # compiles
        assert math.isnan(step())
        assert len(calls) == 2
        assert meter.unmeasured_because is not None
        assert "compile" in meter.unmeasured_because
        assert meter.measured
        loss(model(x))
        assert len(calls) == 3
        meter.begin()
        model(x)
        assert meter.end().peak_bytes > 0  # no compiled code in this one
        torch._dynamo.reset()

    def test_the_mode_itself_is_not_compiled(self, meter: CpuMeter) -> None:
        from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

        @torch._dynamo.disable(recursive=False)
        def plain(x: torch.Tensor) -> torch.Tensor:
            return x.exp()

        compiled = torch.compile(lambda x: plain(x.sin()).cos(), backend="eager")
        compiled(torch.zeros(3))
        meter.begin()
        compiled(torch.zeros(3))
        meter.end()
        assert _debug_get_cache_entry_list(StepMode.__torch_dispatch__.__code__) == []
        torch._dynamo.reset()

    def test_a_hook_of_the_user_stays(self, meter: CpuMeter) -> None:
        from torch._C._dynamo.eval_frame import set_guard_complete_hook

        def theirs(cache_hit: bool) -> bool:
            return True

        set_guard_complete_hook(theirs)
        try:
            meter.begin()
            assert math.isnan(meter.end().peak_bytes)
        finally:
            assert set_guard_complete_hook(None) is theirs
        meter.begin()
        set_guard_complete_hook(theirs)
        meter.end()
        assert set_guard_complete_hook(None) is theirs

    def test_no_hook_is_left(self, meter: CpuMeter, clock: Clock) -> None:
        from torch._C._dynamo.eval_frame import set_guard_complete_hook

        meter.begin()
        meter.end()
        assert set_guard_complete_hook(None) is None
        meter.begin()
        in_thread(meter.abandon)
        assert set_guard_complete_hook(None) is None
        torch.zeros(1)
        cell("cell 1", "meter.begin()", meter=meter)
        clock.pause()
        torch.zeros(1)
        assert set_guard_complete_hook(None) is None

    def test_a_model_that_is_compiled_later(self, meter: CpuMeter, model: nn.Linear) -> None:
        model.compile()
        meter.begin()
        assert stack() == []
        assert math.isnan(meter.end().peak_bytes)
        assert not meter.measured
        assert meter.source.startswith("not measured: the model is compiled")
        model._compiled_call_impl = None
        meter.begin()
        assert meter.end().peak_bytes == 32
        assert meter.source == "live tensor bytes on cpu, counted exactly (dispatch mode)"


def test_higher_order_operators_run(meter: CpuMeter) -> None:
    from torch._higher_order_ops.wrap import wrap  # the simplest there is

    meter.begin()
    result = wrap(lambda x: x + 1, torch.zeros(10))
    assert meter.end().allocated_bytes == 32 + 40
    assert result.tolist() == [1.0] * 10


def in_thread(*calls: Any) -> None:
    """Run each on a thread of its own, and raise what they raise."""
    errors: list[BaseException] = []

    def guarded(call: Any) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    if errors:
        raise errors[0]


@pytest.fixture(autouse=True)
def flags_left_alone() -> Iterator[None]:
    yield
    assert not _python_dispatch.is_in_torch_dispatch_mode()
    assert not _python_dispatch.is_in_any_mode_without_ignore_compile_internals()


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(1.1), torch.tensor(1.1, dtype=torch.float64), torch.tensor(1.1, dtype=torch.bfloat16),
        torch.tensor(1.1, dtype=torch.float16), torch.tensor(3), torch.tensor(True), torch.tensor(1 + 2j),
        torch.tensor(1 + 2j).conj(), torch.tensor(2.5, requires_grad=True), torch.tensor([[7]]), torch.tensor(math.nan),
    ],
)  # fmt: skip
def test_item_is_as_without_the_meter_and_counts_once(value: torch.Tensor) -> None:
    model = nn.Linear(1, 1)
    meter = CpuMeter(model, [])
    expected = value.item()
    meter.begin()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        got = value.item()
    meter.end()
    assert type(got) is type(expected)
    assert got == expected or (got != got and expected != expected)
    assert sum(e.count for e in profile.key_averages() if e.key == "aten::_local_scalar_dense") == 1
