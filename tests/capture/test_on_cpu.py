"""CUDA-only code on a machine without CUDA: it runs, with the numbers of code written for the CPU, and leaves no trace."""

from __future__ import annotations

import io
import itertools
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from amp_widgets.capture.on_cpu import on_cpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA there is nothing to map")

ROOT = Path(__file__).parent.parent.parent
OWNERS: dict[str, Any] = {
    "torch": torch,
    "torch.cuda": torch.cuda,
    "torch.cuda.memory": torch.cuda.memory,
    "torch.amp.autocast_mode": torch.amp.autocast_mode,
    "autocast": torch.autocast,
    "cuda autocast": torch.cuda.amp.autocast,
    "GradScaler": torch.amp.GradScaler,
    "cuda GradScaler": torch.cuda.amp.GradScaler,
    "torch.serialization": torch.serialization,
    "torch.autograd": torch.autograd,
    "torch._C._nn": torch._C._nn,
    "Tensor": torch.Tensor,
    "Module": nn.Module,
    "DeviceContext": torch.utils._device.DeviceContext,
    "Event": torch.cuda.Event,
    "Stream": torch.cuda.Stream,
    "torch.cuda.random": torch.cuda.random,
    "torch.cuda.nvtx": torch.cuda.nvtx,
    "Thread": threading.Thread,
}


@pytest.fixture(scope="module", autouse=True)
def _the_compiler_has_run() -> None:
    """It leaves traces of its own on ``nn.Module`` when it first compiles one."""
    torch.compile(nn.Linear(1, 1), backend="eager")(torch.ones(1, 1))
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _leaves_no_trace() -> Iterator[None]:
    """After every test: each attribute is the same object, and the modes and the default device are as before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    before = everything()
    yield
    torch.set_num_threads(threads)
    assert changes(before, everything()) == []


def everything() -> dict[str, Any]:
    found = {f"{owner} {name}": value for owner, where in OWNERS.items() for name, value in vars(where).items()}
    modes = {f"mode {position}": mode for position, mode in enumerate(_get_current_function_mode_stack())}
    default = torch._GLOBAL_DEVICE_CONTEXT.__dict__.get("device_context")
    return found | modes | {"default device": default}


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What is another object or gone, and any new mode or entry of a class; modules get new entries by their own imports."""
    new = [key for key in after.keys() - before.keys() if not key.startswith("torch") and not key.endswith("__slotnames__")]
    return new + [key for key in before if after.get(key, before) is not before[key]]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)


# ---- tensors and modules ----

MOVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cuda()": lambda x: x.cuda(),
    "cuda(0)": lambda x: x.cuda(0),
    "cuda(device=)": lambda x: x.cuda(device="cuda:0", non_blocking=True, memory_format=torch.preserve_format),
    "to(str)": lambda x: x.to("cuda"),
    "to(str with index)": lambda x: x.to("cuda:0"),
    "to(index)": lambda x: x.to(0),
    "to(device)": lambda x: x.to(torch.device("cuda"), non_blocking=True),
    "to(device=)": lambda x: x.to(device="cuda", non_blocking=True),
    "to(device, dtype)": lambda x: x.to("cuda", torch.float32),
    "to(device, dtype=)": lambda x: x.to("cuda", dtype=torch.float32),
    "to(all by position)": lambda x: x.to("cuda", torch.float32, True, False),
    "to(copy=False)": lambda x: x.to("cuda", copy=False),
    "Tensor.to(x)": lambda x: torch.Tensor.to(x, "cuda"),
    "pinned": lambda x: x.pin_memory().cuda(non_blocking=True),
    "as_tensor": lambda x: torch.as_tensor(x, device="cuda"),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_a_move_is_a_copy_in_the_graph(move: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.arange(6.0).reshape(2, 3).t().requires_grad_()
    with on_cpu() as cpu:
        assert cpu.active
        y = move(x)
        assert same(y, x)
        assert y.stride() == x.stride()
        assert y.data_ptr() != x.data_ptr()
        (y * y).sum().backward()
        assert x.grad is not None
        assert same(x.grad, 2 * x.detach())
        with torch.no_grad():
            move(x).zero_()
        assert x.sum() == 15
    assert not cpu.active


def test_moves_with_another_dtype_or_format() -> None:
    x = torch.arange(16.0).reshape(1, 2, 2, 4)
    with on_cpu():
        assert x.to("cuda", torch.float64).dtype == torch.float64
        assert x.to(device="cuda", dtype=torch.bfloat16).dtype == torch.bfloat16
        assert x.cuda(memory_format=torch.channels_last).is_contiguous(memory_format=torch.channels_last)
        assert x.to("cuda", memory_format=torch.channels_last).is_contiguous(memory_format=torch.channels_last)


def test_what_names_no_cuda_device_is_left_alone() -> None:
    x = torch.ones(2)
    with on_cpu():
        assert x.to("cpu") is x
        assert x.to(torch.float32) is x
        assert x.to(x) is x
        assert x.to(x.device) is x
        assert x.to(torch.float64).dtype == torch.float64
        assert x.to("meta").device.type == "meta"
        assert torch.zeros(1, device="meta").device.type == "meta"
        assert torch.device("cuda").type == torch.device(device="cuda").type == "cuda"
        assert torch.as_tensor(x) is x


DEVICES = ["cuda", "cuda:0", "cuda:1", 0, torch.device("cuda"), torch.device("cuda", 1)]


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_functions_that_make_tensors(device: Any) -> None:
    makers: list[Callable[[Any], torch.Tensor]] = [
        lambda device: torch.zeros(2, 3, device=device),
        lambda device: torch.randn(2, 3, device=device, requires_grad=True),
        lambda device: torch.rand(4, device=device, dtype=torch.float64),
        lambda device: torch.tensor([1.0, 2.0], device=device, dtype=torch.float64),
        lambda device: torch.as_tensor([1.0, 2.0], device=device),
        lambda device: torch.as_tensor(np.arange(3), device=device),
        lambda device: torch.arange(5, device=device),
        lambda device: torch.full((2,), 7, device=device),
        lambda device: torch.randint(0, 9, (5,), device=device),
        lambda device: torch.randperm(5, device=device),
        lambda device: torch.eye(3, device=device),
        lambda device: torch.linspace(0, 1, 3, device=device),
        lambda device: torch.normal(0.0, 1.0, (3,), device=device),
        lambda device: torch.ones_like(torch.zeros(3), device=device),
        lambda device: torch.zeros(3).new_full((2,), 3.0, device=device),
    ]
    for make in makers:
        torch.manual_seed(0)
        expected = make("cpu")
        torch.manual_seed(0)
        with on_cpu():
            assert same(make(device), expected)


def test_memory_of_an_array_is_not_shared() -> None:
    array = np.ones(3)
    with on_cpu():
        torch.as_tensor(array, device="cuda").zero_()
        torch.asarray(array, device="cuda").zero_()
        torch.from_numpy(array).cuda().zero_()
        assert torch.rand(2, pin_memory=True).shape == (2,)
    assert array.sum() == 3


MODULE_MOVES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "cuda()": lambda m: m.cuda(),
    "cuda(0)": lambda m: m.cuda(0),
    "to(str)": lambda m: m.to("cuda"),
    "to(index)": lambda m: m.to(0),
    "to(device, dtype)": lambda m: m.to(torch.device("cuda:0"), torch.float32, non_blocking=True),
    "to(device=)": lambda m: m.to(device="cuda", memory_format=torch.channels_last),
}


@pytest.mark.parametrize("move", MODULE_MOVES.values(), ids=MODULE_MOVES)
def test_modules_move_and_keep_their_parameters(move: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.LSTM(4, 4))
    parameters = list(model.parameters())
    values = {name: value.clone() for name, value in model.state_dict().items()}
    with on_cpu():
        assert move(model) is model
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(same(value, values[name]) for name, value in model.state_dict().items())


def test_modules_made_on_the_device() -> None:
    def make(device: Any) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4, device=device), nn.BatchNorm1d(4, device=device), nn.Embedding(3, 2, device=device))

    expected = make("cpu").state_dict()
    with on_cpu():
        for device in DEVICES:
            assert all(same(value, expected[name]) for name, value in make(device).state_dict().items())
        empty = nn.Linear(2, 2, device="meta").to_empty(device="cuda")
        assert empty.weight.device.type == "cpu"


def test_default_devices() -> None:
    with on_cpu():
        with torch.device("cuda"):
            assert torch.zeros(1).device.type == "cpu"
            with torch.device("meta"):
                assert torch.zeros(1).device.type == "meta"
            assert nn.Linear(2, 2).weight.device.type == "cpu"
        torch.set_default_device("cuda")
        assert torch.zeros(1).device.type == "cpu"
        assert torch.zeros(1).cuda().device.type == "cpu"
    assert torch._GLOBAL_DEVICE_CONTEXT.device_context is None


def test_the_default_device_of_before_is_back() -> None:
    torch.set_default_device("meta")
    try:
        with on_cpu():
            assert torch.zeros(1).device.type == "meta"
            assert torch.zeros(1, device="cuda").device.type == "cpu"
            torch.set_default_device("cuda:0")
            assert torch.zeros(1).device.type == "cpu"
        assert torch.get_default_device().type == "meta"
        with on_cpu():
            torch.set_default_device("cpu")  # the user's own wish, which holds without CUDA too
        assert torch.get_default_device().type == "cpu"
        assert len(_get_current_function_mode_stack()) == 1
    finally:
        torch.set_default_device(None)
        torch._GLOBAL_DEVICE_CONTEXT.__dict__.pop("device_context")


def test_generators() -> None:
    expected = torch.rand(3, generator=torch.Generator().manual_seed(3))
    with on_cpu():
        generator = torch.Generator(device="cuda").manual_seed(3)
        assert isinstance(generator, torch.Generator)
        assert not isinstance(3, torch.Generator)
        assert same(torch.rand(3, generator=generator, device="cuda"), expected)
        assert torch.Generator().device.type == torch.Generator("cuda:0").device.type == "cpu"
        batches = DataLoader(TensorDataset(torch.arange(6)), batch_size=2, shuffle=True, generator=generator)
        assert sorted(torch.cat([batch for [batch] in batches]).tolist()) == list(range(6))
    assert type(generator) is torch.Generator


def test_loading_what_was_saved_for_cuda(tmp_path: Path) -> None:
    state = {"weight": torch.arange(3.0)}
    torch.save(state, tmp_path / "state.pt")
    for_cuda = io.BytesIO()
    register = torch.serialization._package_registry
    before = list(register)
    torch.serialization.register_package(0, lambda storage: "cuda:0", lambda storage, location: None)
    try:
        torch.save(state, for_cuda)
    finally:
        register[:] = before
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(io.BytesIO(for_cuda.getvalue()))
    with on_cpu():
        for location in ("cuda", torch.device("cuda:0"), None, {"cpu": "cuda:0"}):
            assert same(torch.load(tmp_path / "state.pt", map_location=location)["weight"], state["weight"])
        assert same(torch.load(io.BytesIO(for_cuda.getvalue()))["weight"], state["weight"])


def test_calls_that_have_nothing_to_do() -> None:
    with on_cpu():
        torch.cuda.set_device(0)
        torch.cuda.synchronize()
        torch.cuda.synchronize("cuda:0")
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.memory.reset_peak_memory_stats()
        assert torch.cuda.current_device() == 0
        with pytest.warns(FutureWarning, match="reset_peak_memory_stats"):
            torch.cuda.reset_max_memory_allocated()  # of the classic recipe
        assert torch.cuda.max_memory_allocated() == 0
    with pytest.raises((AssertionError, RuntimeError, AttributeError)):
        torch.cuda.synchronize()


def test_events_measure_real_time() -> None:
    x = torch.ones(200, 200)
    with on_cpu():
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        outer_s = time.perf_counter()
        start.record()
        inner_s = time.perf_counter()
        for _ in range(20):
            x = x @ x * 0.001
        inner_s = time.perf_counter() - inner_s
        end.record(torch.cuda.current_stream())
        outer_s = time.perf_counter() - outer_s
        end.synchronize()
        end.wait()
        assert end.query()
        assert inner_s <= start.elapsed_time(end) / 1e3 <= outer_s
        assert end.elapsed_time(start) == -start.elapsed_time(end)
        first = start.elapsed_time(end)
        end.record()
        assert start.elapsed_time(end) > first  # it may be recorded again
    assert start.elapsed_time(end) > first  # it goes on working


def test_events_that_cannot_measure_say_so() -> None:
    with on_cpu():
        timed = torch.cuda.Event(True)
        timed.record()
        with pytest.raises(ValueError, match="must be recorded"):
            timed.elapsed_time(torch.cuda.Event(enable_timing=True))
        with pytest.raises(ValueError, match="enable_timing=True"):
            timed.elapsed_time(torch.cuda.Event(blocking=True))
    with pytest.raises(RuntimeError):
        torch.cuda.Event()


def test_streams_have_nothing_to_wait_for() -> None:
    x = torch.ones(3)
    with on_cpu():
        stream = torch.cuda.Stream(device="cuda:0", priority=-1)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            assert torch.cuda.current_stream() == stream
            y = x.cuda(non_blocking=True) * 2
        with torch.cuda.stream(None), stream:
            y.record_stream(torch.cuda.current_stream(0))
        event = stream.record_event()
        again = torch.cuda.Event(enable_timing=True)
        assert stream.record_event(again) is again
        torch.cuda.default_stream().wait_event(event)
        torch.cuda.set_stream(stream)
        stream.synchronize()
        assert stream.query()
        assert event.query()
        assert len({stream, torch.cuda.default_stream()}) == 1
        assert same(y, torch.full((3,), 2.0))
    with pytest.raises(RuntimeError):
        torch.cuda.Stream()


def test_the_current_device_is_the_only_one() -> None:
    with on_cpu():
        with torch.cuda.device(0), torch.cuda.device("cuda:1"), torch.cuda.device_of(torch.ones(1)):
            assert torch.ones(1, device="cuda").device.type == "cpu"
        torch.cuda.init()
        assert torch.cuda.get_device_name() == torch.cuda.get_device_name(0) == "cpu (no CUDA device: --cpu)"
        with pytest.raises((AssertionError, RuntimeError)):  # nothing about it is made up
            torch.cuda.get_device_properties(0)
        assert torch.cuda.device_count() == 0


def test_nvtx_does_nothing() -> None:
    with on_cpu():
        torch.cuda.nvtx.range_push("step")
        torch.cuda.nvtx.mark("here")
        with torch.cuda.nvtx.range("forward {}", 1):
            torch.cuda.nvtx.range_end(torch.cuda.nvtx.range_start("part"))
        torch.cuda.nvtx.range_pop()
    with pytest.raises(RuntimeError):
        torch.cuda.nvtx.range_push("step")


def test_the_random_state_is_that_of_the_cpu() -> None:
    torch.manual_seed(3)
    with on_cpu():
        assert torch.cuda.initial_seed() == 3
        state, states = torch.cuda.get_rng_state(), torch.cuda.get_rng_state_all()
        expected = torch.rand(3, device="cuda")
        torch.cuda.set_rng_state(state, device="cuda:0")
        assert same(torch.rand(3), expected)
        torch.cuda.random.set_rng_state_all(states)
        assert same(torch.rand(3), expected)
        torch.cuda.set_rng_state(state)
        with torch.random.fork_rng(devices=[0]):
            torch.rand(7)
        assert same(torch.rand(3), expected)


TYPES = {"Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16, "Double": torch.float64, "Long": torch.int64}


@pytest.mark.parametrize("name", TYPES)
def test_classes_of_tensors(name: str) -> None:
    before = getattr(torch.cuda, f"{name}Tensor")
    x = torch.tensor([1, 2], dtype=TYPES[name])
    with on_cpu():
        kind = getattr(torch.cuda, f"{name}Tensor")
        assert same(kind([1, 2]), x)
        assert kind(2, 3).shape == (2, 3)
        assert kind(2, 3).dtype == kind.dtype == TYPES[name]
        assert not isinstance(x, kind)  # x.is_cuda is false, too
        for wanted in (kind, before, f"torch.cuda.{name}Tensor"):
            assert same(torch.ones(2).type(wanted), torch.ones(2, dtype=TYPES[name]))
            assert same(x.type(dtype=wanted), x)
            x.type(wanted).zero_()  # a copy, as it is on CUDA
        assert x.tolist() == [1, 2]
        assert x.type() == f"torch.{name}Tensor"
        assert x.type(f"torch.{name}Tensor") is x.type(TYPES[name]) is x
        if x.is_floating_point():
            assert nn.Linear(2, 2).type(kind).weight.dtype == TYPES[name]
    with pytest.raises(TypeError):
        kind([1, 2])


def test_a_change_of_type_is_in_the_graph() -> None:
    x = torch.ones(2, requires_grad=True)
    with on_cpu():
        y: Any = x.type("torch.cuda.DoubleTensor")
        (y * 3).sum().backward()
    assert x.grad is not None
    assert same(x.grad, torch.full((2,), 3.0))


# ---- autocast and the scaler ----


def region_dtypes() -> list[tuple[str, Any, torch.dtype | None]]:
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        return [
            ("autocast", torch.autocast("cuda"), torch.float16),
            ("by name", torch.autocast(device_type="cuda", cache_enabled=False), torch.float16),
            ("amp.autocast", torch.amp.autocast("cuda"), torch.float16),
            ("None", torch.autocast("cuda", None), torch.float16),
            ("bf16", torch.autocast("cuda", torch.bfloat16), torch.bfloat16),
            ("dtype=", torch.autocast("cuda", dtype=torch.bfloat16), torch.bfloat16),
            ("cuda.amp", torch.cuda.amp.autocast(), torch.float16),
            ("cuda.amp bf16", torch.cuda.amp.autocast(dtype=torch.bfloat16), torch.bfloat16),
            ("disabled", torch.autocast("cuda", enabled=False), None),
            ("cuda.amp disabled", torch.cuda.amp.autocast(False), None),
            ("cpu", torch.autocast("cpu"), torch.bfloat16),
            ("cpu fp16", torch.autocast("cpu", dtype=torch.float16), torch.float16),
        ]


def test_regions_have_cudas_dtypes() -> None:
    x = torch.ones(2, 2)
    with on_cpu():
        for name, region, dtype in region_dtypes():
            for _ in range(2):  # a kept object is entered again
                with region:
                    assert torch.mm(x, x).dtype == (dtype or torch.float32), name
                    assert torch.is_autocast_enabled("cuda") == (dtype is not None), name
                    if dtype is not None:
                        assert torch.get_autocast_dtype("cuda") == dtype, name
            assert not torch.is_autocast_enabled("cpu")

            @region
            def decorated() -> torch.Tensor:
                return torch.mm(x, x)

            assert decorated().dtype == (dtype or torch.float32), name
        with torch.autocast("cuda", dtype=torch.bfloat16):
            with torch.autocast("cuda"):  # without a dtype of its own it has that of the region around it, on CUDA as well
                assert torch.mm(x, x).dtype == torch.bfloat16
        assert torch.get_autocast_dtype("cuda") == torch.float16


def test_no_warning_but_those_of_what_is_deprecated() -> None:
    with on_cpu(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.autocast("cuda")
        torch.GradScaler()
        torch.cuda.amp.autocast()
        torch.cuda.amp.GradScaler()
    assert [(warning.category, Path(warning.filename).name) for warning in caught] == [(FutureWarning, "test_on_cpu.py")] * 2


def test_scalers_are_enabled_and_on_the_cpu() -> None:
    with on_cpu():
        with pytest.warns(FutureWarning):
            old = torch.cuda.amp.GradScaler(init_scale=8.0)
        scalers = [torch.amp.GradScaler(), torch.GradScaler("cuda", init_scale=4.0), torch.GradScaler(device="cuda:0"), old]
        assert [scaler.get_scale() for scaler in scalers] == [65536, 4, 65536, 8]
        assert {scaler._device for scaler in scalers} == {"cpu"}
        assert all(scaler.is_enabled() for scaler in scalers)
        assert not torch.GradScaler("cuda", enabled=False).is_enabled()
    loss = old.scale(torch.ones(1, requires_grad=True))  # it goes on working
    assert loss.item() == 8


# ---- threads ----


def what_a_thread_sees() -> list[Any]:
    found: list[Any] = []
    for attempt in (lambda: torch.zeros(1).cuda(), lambda: torch.cuda.synchronize(), lambda: torch.Generator("cuda")):
        try:
            found.append(attempt())
        except (AssertionError, RuntimeError) as error:
            found.append(type(error))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found.extend([torch.autocast("cuda").device, torch.GradScaler().is_enabled(), len(caught)])
    found.append(len(_get_current_function_mode_stack()))
    return found


def is_mapped(seen: list[Any]) -> bool:
    """Whether all of `what_a_thread_sees` was mapped; it must not be a part."""
    if seen[3:] == ["cuda", False, 2, 0]:
        assert all(isinstance(value, type) for value in seen[:3])
        return False
    assert torch.equal(seen[0], torch.zeros(1))
    assert seen[1] is None
    assert seen[2].device.type == "cpu"
    assert seen[3:] == ["cpu", True, 0, 1]
    return True


def test_threads_of_before_are_left_alone() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        with on_cpu():
            assert not is_mapped(pool.submit(what_a_thread_sees).result())
            # it may start threads, which are none of those in the block
            with ThreadPoolExecutor(1) as other:
                assert is_mapped(other.submit(what_a_thread_sees).result())
            assert not is_mapped(pool.submit(lambda: run_in(threading.Thread)).result())


def run_in(kind: Any) -> Any:
    """What a new thread sees."""
    seen: list[Any] = []
    thread = kind(target=lambda: seen.append(what_a_thread_sees()))
    thread.start()
    thread.join()
    assert "run" not in vars(thread)
    return seen[0]


def test_threads_that_are_started_in_the_block_are_mapped() -> None:
    class Own(threading.Thread):
        def run(self) -> None:
            super().run()

    with on_cpu() as cpu:
        assert is_mapped(run_in(threading.Thread))
        assert is_mapped(run_in(Own))
        with ThreadPoolExecutor(1) as pool:
            assert is_mapped(pool.submit(run_in, threading.Thread).result())  # by a thread that was started there
        x = torch.ones(1, requires_grad=True)
        backward = threading.Thread(target=lambda: checkpoint(lambda x: x.cuda() * 2, x, use_reentrant=False).backward())
        backward.start()
        backward.join()
        assert x.grad is not None
        assert cpu._thread_ids == {threading.get_ident()}
    assert not is_mapped(run_in(threading.Thread))


def test_a_thread_that_goes_on_is_mapped_until_the_end() -> None:
    with ThreadPoolExecutor(1) as pool:
        with on_cpu():
            assert is_mapped(pool.submit(what_a_thread_sees).result())
        seen = pool.submit(what_a_thread_sees).result()
        assert seen.pop() == 1  # the mode is still there, doing nothing
        assert not is_mapped([*seen, 0])


def test_a_thread_that_cannot_start_is_as_before() -> None:
    def own() -> None:
        pass

    with on_cpu():
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()
        with pytest.raises(RuntimeError, match="only be started once"):
            thread.start()
        assert "run" not in vars(thread)
        thread.run = own  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="only be started once"):
            thread.start()
        assert vars(thread)["run"] is own


# ---- torch.compile ----


class Regions(nn.Module):
    """Moves data, has a region of its own and asks for its state, in one graph or in several."""

    def __init__(self, device: str, breaks: bool) -> None:
        super().__init__()
        self.device, self.breaks = device, breaks
        self.first = nn.Linear(4, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x.to(self.device) + torch.ones(4, device=self.device)))
        with torch.autocast(self.device, dtype=torch.bfloat16):
            x = self.head(x)
            if self.breaks:
                torch._dynamo.graph_break()  # type: ignore[no-untyped-call]
            return x * 2 if torch.is_autocast_enabled(self.device) else x * 3


def train_compiled(device: str, breaks: bool, dtype: torch.dtype | None) -> list[torch.Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(1)
    model = Regions(device, breaks).to(device)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=not breaks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for _ in range(2):
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            y = compiled(torch.randn(3, 4).to(device))
        y.float().pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(y.detach())
    return [*seen, *(parameter.detach() for parameter in model.parameters())]


def autocast_state() -> list[Any]:
    return [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cuda", "cpu")]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # after a graph break, also without us
@pytest.mark.parametrize(("breaks", "dtype"), [(False, torch.float16), (True, None)], ids=["one graph", "graph breaks"])
def test_a_compiled_model_has_the_bits_of_one_written_for_the_cpu(breaks: bool, dtype: torch.dtype | None) -> None:
    expected = train_compiled("cpu", breaks, dtype)
    before = autocast_state()
    with on_cpu():
        found = train_compiled("cuda", breaks, dtype)
    assert autocast_state() == before
    torch._dynamo.reset()
    assert found[0].dtype == torch.bfloat16
    assert all(map(same, found, expected))


def test_what_was_compiled_in_the_block_is_compiled_again_after_it() -> None:
    torch._dynamo.reset()

    @torch.compile(backend="eager")
    def enabled(x: torch.Tensor) -> torch.Tensor:
        return x + torch.is_autocast_enabled("cuda")

    with on_cpu(), torch.autocast("cuda"):
        assert enabled(torch.zeros(1)) == 1
        assert enabled(torch.zeros(1)) == 1
    with torch.autocast("cpu"):
        assert enabled(torch.zeros(1)) == 0
    torch._dynamo.reset()


def test_the_state_of_autocast_can_be_set() -> None:
    before = autocast_state()
    with on_cpu():
        torch.set_autocast_dtype("cuda", torch.bfloat16)  # the default of the regions to come
        assert torch.autocast("cuda").fast_dtype == torch.bfloat16
        torch.set_autocast_dtype("cuda", torch.float16)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            torch.set_autocast_enabled("cuda", False)
            assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype == torch.float32
            torch.set_autocast_enabled("cuda", True)
            torch.set_autocast_dtype("cuda", torch.float16)
            assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype == torch.float16
    assert autocast_state() == before


# ---- whole loops: the same bits as when written for the CPU ----


class Net(nn.Module):
    """Moves data in its forward, as pasted code does, also in a part that is recomputed."""

    def __init__(self, device: Any, kind: str) -> None:
        super().__init__()
        self.kind, self.device = kind, device
        self.first = nn.Linear(4, 8, device=device)
        self.second = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        bias = torch.full((8,), 0.5, device=self.device)
        x = torch.dropout(torch.relu(self.second(x) + bias), 0.5, self.training)
        return x + torch.ones(8).to(self.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        if self.kind == "none":
            x = self.part(x)
        else:
            x = checkpoint(self.part, x, use_reentrant=self.kind == "reentrant")
        return self.head(x)


def train(device: Any, kind: str, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model = Net(device, kind).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    name = torch.device(device).type
    scaler = torch.amp.GradScaler(name, init_scale=2.0**10, growth_interval=2, enabled=dtype == torch.float16)
    data = TensorDataset(torch.randn(8, 4), torch.randint(0, 3, (8,)))
    seen = {}
    for epoch in range(2):
        for step, (x, y) in enumerate(DataLoader(data, batch_size=4, shuffle=True)):
            x, y = x.to(device, non_blocking=True), y.to(device)
            optimizer.zero_grad()
            with torch.autocast(name, dtype=dtype, enabled=dtype is not None):
                loss = nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            seen[f"loss {epoch} {step}"] = loss.detach()
    seen["scale"] = torch.tensor(scaler.get_scale())
    return seen | {key: value.clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("kind", ["none", "plain", "reentrant"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
def test_a_loop_has_the_bits_of_one_written_for_the_cpu(kind: str, dtype: torch.dtype | None) -> None:
    expected = train("cpu", kind, dtype)
    with on_cpu():
        for device in ("cuda", torch.device("cuda:0")):
            found = train(device, kind, dtype)
            assert found.keys() == expected.keys()
            assert [key for key in expected if not same(found[key], expected[key])] == []


def test_gradients_of_gradients_and_hooks_move_data() -> None:
    def penalty(device: str) -> torch.Tensor:
        torch.manual_seed(0)
        model = Net(device, "plain").to(device)
        x = torch.randn(2, 4).to(device).requires_grad_()
        x.register_hook(lambda gradient: gradient * torch.full((), 2.0, device=device))
        [gradient] = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (gradient**2).sum().backward()
        assert model.first.weight.grad is not None
        return model.first.weight.grad

    expected = penalty("cpu")
    with on_cpu():
        assert same(penalty("cuda"), expected)


class Square(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.mm(x, x)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        [x] = ctx.saved_tensors
        return torch.mm(gradient, x.t()) + torch.mm(x.t(), gradient)


def test_functions_of_the_users_own_know_the_region() -> None:
    x = torch.eye(2, requires_grad=True)
    with on_cpu(), torch.autocast("cuda"):
        half = torch.mm(x, x)
        assert half.dtype == torch.float16
        y = Square.apply(half)
        assert y.dtype == torch.float32  # cast_inputs
        y.sum().backward()
    assert x.grad is not None


def test_workers_of_a_loader() -> None:
    data = TensorDataset(torch.arange(8.0))
    with on_cpu():
        seen = [batch.cuda(non_blocking=True) for [batch] in DataLoader(data, batch_size=4, num_workers=1)]
    assert torch.equal(torch.cat(seen), torch.arange(8.0))


# ---- the end ----


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_undone_after(error: type[BaseException]) -> None:
    def broken_off() -> None:
        with on_cpu():
            torch.zeros(1).cuda()
            raise error

    with pytest.raises(error):
        broken_off()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1).cuda()


def test_undone_after_an_error_in_a_recomputed_layer() -> None:
    calls = 0

    def part(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return (x * x).cuda()

    with pytest.raises(KeyboardInterrupt), on_cpu():
        checkpoint(part, torch.ones(1, requires_grad=True), use_reentrant=False).backward()
    assert _get_current_function_mode_stack() == []


def test_an_interrupt_at_any_line_of_the_end_is_raised_when_all_is_undone() -> None:
    functions = {"_deactivate", "_remove_mode", "_restore_default_device", "_default_device_context", "undo", "_own"}
    before = everything()
    for line in itertools.count(1):
        seen = 0

        def trace(frame: Any, event: str, argument: Any, line: int = line) -> Any:
            nonlocal seen
            if frame.f_code.co_name not in functions or not frame.f_globals["__name__"].startswith("amp_widgets.capture."):
                return None
            if event == "line":
                seen += 1
                if seen == line:
                    raise KeyboardInterrupt
            return trace

        cpu = on_cpu()
        cpu.__enter__()
        torch.set_default_device("cuda")
        tracing = sys.gettrace()
        sys.settrace(trace)
        try:
            cpu.__exit__(None, None, None)
            raised = False
        except KeyboardInterrupt:
            raised = True
        finally:
            sys.settrace(tracing)
        assert changes(before, everything() | {"default device": before["default device"]}) == [], line
        assert torch._GLOBAL_DEVICE_CONTEXT.device_context is None
        del torch._GLOBAL_DEVICE_CONTEXT.device_context  # as it is until a default device is first set
        assert raised == (seen >= line)
        if not raised:
            break
    assert line > 60


def test_an_error_while_entering_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = on_cpu()
    monkeypatch.setattr(type(cpu._mode), "__enter__", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError), cpu:
        pass
    assert not cpu.active


def test_modes_of_others_stay() -> None:
    class Counting(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Counting.calls += 1
            return func(*args, **(kwargs or {}))

    with Counting() as outer:
        with on_cpu():
            with Counting():
                assert torch.zeros(1, device="cuda").device.type == "cpu"
            left_behind = Counting()
            left_behind.__enter__()  # never taken off by who put it there
        assert list(map(id, _get_current_function_mode_stack())) == [id(outer), id(left_behind)]
        left_behind.__exit__(None, None, None)
    assert Counting.calls >= 3


def test_one_inside_another() -> None:
    with on_cpu():
        with on_cpu() as inner:
            assert inner.active
            assert torch.zeros(1).cuda().device.type == "cpu"
        with torch.autocast("cuda"):
            assert torch.mm(torch.ones(1, 1), torch.ones(1, 1).cuda()).dtype == torch.float16
        torch.cuda.synchronize()


def test_what_is_kept_and_replaced_by_others_is_harmless() -> None:
    with on_cpu():
        synchronize, init = torch.cuda.synchronize, torch.autocast.__init__
    with pytest.raises((AssertionError, RuntimeError)):
        synchronize()  # type: ignore[no-untyped-call]
    region = torch.autocast.__new__(torch.autocast)
    with pytest.warns(UserWarning, match="CUDA is not available"):
        init(region, "cuda")
    assert region.device == "cuda"


def test_nobody_keeps_a_replacement() -> None:
    # in a process of its own, since torch imports its compiler only once, by default with the first optimizer
    program = """
        import gc, weakref
        import torch
        from amp_widgets.capture.on_cpu import on_cpu

        with on_cpu():
            torch.optim.SGD(torch.nn.Linear(1, 1).cuda().parameters(), lr=0.1)
            torch.compile(lambda x: x.cuda() + torch.is_autocast_enabled("cuda"), backend="eager")(torch.ones(1))
            torch._dynamo.reset()
            kept = {name: weakref.ref(vars(owner)[name]) for owner, name in (
                (torch, "is_autocast_enabled"), (torch, "Generator"), (torch.autocast, "__init__"), (torch.cuda, "synchronize"),
                (torch.autograd, "_engine_run_backward"), (torch.GradScaler, "__init__"),
                (torch, "set_autocast_enabled"), (torch.cuda, "_exchange_device"), (torch.cuda, "FloatTensor"))}
        gc.collect()
        print([name for name, reference in kept.items() if reference() is not None])
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.stdout.strip() == "[]", ran.stderr


def test_nothing_is_done_where_cuda_is_available() -> None:
    before = everything()
    with on_cpu(cuda_available=lambda: True) as cpu:
        assert not cpu.active
        assert changes(before, everything()) == []
        with pytest.raises((AssertionError, RuntimeError)):
            torch.zeros(1).cuda()
