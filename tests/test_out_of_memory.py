"""A step runs out of memory: the report, the memory that is free again, and the session that goes on."""

from __future__ import annotations

import contextlib
import gc
import json
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from amp_widgets.capture.capture import Capture
from amp_widgets.core.memory.budget import MemoryBudgetError
from amp_widgets.core.memory.death import ErrorReference, clear_finished_frames, is_out_of_memory, requested_bytes_of
from amp_widgets.core.memory.dissolve import DissolvedGraphError
from amp_widgets.core.memory.reading import NoMeter
from amp_widgets.errors import SessionClosedError, SettingsError
from amp_widgets.session import AmpSession


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.nn.functional.gelu(self.up(x)))
        return y


class Case:
    """A model, a session, and weak references to every activation that its layers return."""

    def __init__(self, *, optimizer: str = "Adam", width: int = 16, batch: int = 128) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, width), Block(width), Block(width), Block(width), nn.Linear(width, 4))
        self.optimizer = getattr(torch.optim, optimizer)(self.model.parameters(), lr=1e-3)
        self.session = AmpSession(self.model, self.optimizer)
        self.x, self.y = torch.randn(batch, 8), torch.randint(4, (batch,))
        self.references: list[weakref.ref[Any]] = []
        _cases.append(self)
        for module in self.model.modules():
            module.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.references.append(weakref.ref(output.untyped_storage()))

    def alive(self) -> int:
        """How many activations of the last step are alive."""
        gc.collect()
        return len({id(storage) for reference in self.references if (storage := reference()) is not None})

    def step(self, *, zero_grad: bool = True) -> None:
        if zero_grad:
            self.optimizer.zero_grad()
        with self.session.autocast():
            loss = nn.functional.cross_entropy(self.model(self.x), self.y)
        self.session.scaler.scale(loss).backward()
        self.session.scaler.step(self.optimizer)
        self.session.scaler.update()

    def peaks(self) -> dict[str, float]:
        """Bytes at which each phase of a step after the first is at its highest."""
        self.step()
        self.session.profile_next_step()
        self.step()
        profile = self.session.profiles[-1]
        found: dict[str, float] = {}
        for phase in profile.phases:
            found[phase.name] = max(found.get(phase.name, 0), float(profile.total_bytes[phase.start : phase.stop].max()))
        self.references.clear()
        return found

    def die(self, budget: float) -> None:
        self.session.memory_budget = budget
        with pytest.raises(MemoryBudgetError):
            self.step()
        assert torch._C._len_torch_dispatch_stack() in (0, 1)  # the mode of a step that is in progress


_cases: list[Case] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while _cases:
        _cases.pop().session.close()
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.fixture
def case() -> Case:
    return Case()


class TestBudget:
    def test_setting(self, case: Case) -> None:
        session = case.session
        assert session.memory_budget is None
        session.memory_budget = 5e6
        assert session.memory_budget == 5e6
        with pytest.raises(SettingsError, match="memory_budget: got -1"):
            session.memory_budget = -1
        assert session.memory_budget == 5e6
        session.memory_budget = None
        assert session.memory_budget is None
        session.close()
        with pytest.raises(SessionClosedError):
            session.memory_budget = 1e6

    def test_not_where_memory_is_not_measured(self) -> None:
        model = nn.Linear(2, 2)
        model.compile(backend="eager")
        session = AmpSession(model)
        with pytest.raises(SettingsError, match=r"memory_budget: got 1.0 MB, expected None.*compiled"):
            session.memory_budget = 1e6
        session.memory_budget = None
        session.close()

    def test_every_step_also_without_memory_every(self) -> None:
        case = Case()
        session = AmpSession(case.model, case.optimizer, memory_every=0)
        case.session = session
        case.step()
        case.die(1000)
        assert session.out_of_memory is not None
        session.close()

    def test_a_step_that_fits_is_bit_identical(self) -> None:
        one, other = Case(), Case()
        other.session.memory_budget = 1e9
        for _ in range(3):
            one.step()
            other.step()
        for p, q in zip(one.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(p, q)
        assert other.session.profiles == ()
        one.session.close()
        other.session.close()


class TestReport:
    def test_forward(self, case: Case) -> None:
        forward = case.peaks()["forward"]
        case.die(forward - 1)
        found = case.session.out_of_memory
        assert found is not None
        assert (found.step, found.cause, found.device, found.phase) == (2, "budget", "cpu", "forward")
        assert found.limit_bytes == forward - 1
        assert found.allocated_bytes <= found.limit_bytes < found.allocated_bytes + found.requested_bytes
        assert found.settings_text == "fp32"
        assert found.profile is not None
        assert found.profile.label == "out of memory at step 2 (fp32)"
        assert found.profile.total_bytes[-1] == found.allocated_bytes
        assert found.report[0].startswith("Out of memory at step 2 (fp32) in the forward pass of ")
        assert "the rest of the step needs" in "\n".join(found.report) or "The step before" in "\n".join(found.report)
        assert any(sentence.startswith("Held at that moment: ") for sentence in found.report)
        assert all(not sentence.endswith("..") for sentence in found.report)
        assert str(found).splitlines()[0] == found.report[0]

    def test_event(self, case: Case) -> None:
        case.step()
        case.die(20_000)
        found = case.session.out_of_memory
        assert found is not None
        events = case.session.history.events("out_of_memory")
        assert [event.reason for event in events] == [found.report[0]]
        assert events[0].step == 1
        detail = json.loads(json.dumps(dict(events[0].detail)))
        assert detail["limit_bytes"] == 20_000
        assert detail["layer"] == found.layer
        assert detail["cause"] == "budget"

    def test_kinds_and_layers_are_those_of_the_picture(self, case: Case) -> None:
        backward = case.peaks()["backward"]
        case.die(backward - 1)
        found = case.session.out_of_memory
        assert found is not None
        assert found.profile is not None
        kinds = found.profile.bytes_by_kind[-1]
        assert int(kinds.sum()) == found.allocated_bytes
        assert kinds[0] == sum(p.numel() * 4 for p in case.model.parameters())
        assert kinds[3] == 2 * kinds[0] + 4 * len(list(case.model.parameters()))

    def test_clear(self, case: Case) -> None:
        case.step()
        case.die(20_000)
        assert case.session.out_of_memory is not None
        case.session.clear_out_of_memory()
        assert case.session.out_of_memory is None
        case.die(20_000)
        assert case.session.out_of_memory is not None

    def test_the_state_alone(self, case: Case) -> None:
        case.step()
        case.die(1000)
        found = case.session.out_of_memory
        assert found is not None
        assert "the model, its gradients, the optimizer's state and the batch alone need" in found.report[0]
        assert found.layers_to_checkpoint == ()
        assert "No batch size, autocast or checkpointing can change that" in "\n".join(found.report)


class TestWhatWouldHaveFitted:
    @pytest.mark.parametrize("share", [0.97, 0.9, 0.8, 0.7])
    @pytest.mark.parametrize("phase", ["backward", "forward"])
    def test_proposal_fits(self, phase: str, share: float) -> None:
        case = Case(batch=512)
        peak = case.peaks()[phase]
        case.die(peak * share)
        found = case.session.out_of_memory
        assert found is not None
        text = "\n".join(found.report)
        if not found.layers_to_checkpoint:
            assert share <= 0.8, text
            assert "Estimate: with " in text or "Checkpointing " in text or "checkpointing alone is not enough" in text
            case.session.close()
            return
        assert f"Estimate: with {' and '.join(found.layers_to_checkpoint)} checkpointed" in text
        case.session.request(checkpointed=found.layers_to_checkpoint)
        try:
            case.step()
        except MemoryBudgetError:
            again = case.session.out_of_memory
            assert again is not None
            assert (found.phase, again.phase) != ("backward", "backward"), text
            if again.phase == "forward":  # it has come further
                assert int(again.layer.split(".")[0]) > int(found.layer.split(".")[0]), text
        else:
            assert case.session.history.last("peak_bytes") <= peak * share
        case.session.close()

    def test_backward_death_fits_fully(self) -> None:
        case = Case(batch=512)
        peak = case.peaks()["backward"]
        case.die(0.95 * peak)
        found = case.session.out_of_memory
        assert found is not None
        assert found.layers_to_checkpoint
        case.session.request(checkpointed=found.layers_to_checkpoint)
        case.step()
        assert case.session.history.last("peak_bytes") <= 0.95 * peak
        case.session.close()

    def test_only_what_can_be_checkpointed(self) -> None:
        case = Case(batch=512)
        case.model[2].forward = case.model[2].forward  # hides the class's, so that it cannot be switched on
        peak = case.peaks()["backward"]
        case.die(0.97 * peak)
        found = case.session.out_of_memory
        assert found is not None
        assert found.layers_to_checkpoint
        assert "2" not in found.layers_to_checkpoint
        case.session.request(checkpointed=found.layers_to_checkpoint)
        case.step()
        case.session.close()

    def test_not_what_is_on_already(self) -> None:
        case = Case(batch=512)
        case.session.request(checkpointed=["1", "2"])
        peak = case.peaks()["forward"]
        case.die(0.99 * peak)
        found = case.session.out_of_memory
        assert found is not None
        assert not {"1", "2", "1.up", "2.up", "1.down", "2.down"} & set(found.layers_to_checkpoint)
        case.session.close()


def run_as_a_cell(source: str, namespace: dict[str, Any]) -> BaseException:
    """As a notebook does, which keeps the last exception."""
    try:
        exec(compile(source, f"<cell {len(source)}>", "exec"), namespace)
    except BaseException as error:
        return error
    raise AssertionError("the cell did not fail")


LOOP = """
for batch in {batches}:
    optimizer.zero_grad()
    with session.autocast():
        outputs = model(batch)
        loss = nn.functional.cross_entropy(outputs, y)
    session.scaler.scale(loss).backward()
    session.scaler.step(optimizer)
    session.scaler.update()
"""


class TestFreed:
    @pytest.mark.parametrize("phase", ["forward", "backward"])
    def test_module_level_loop_with_steps(self, case: Case, phase: str) -> None:
        case.session.memory_budget = case.peaks()[phase] - 1
        namespace: dict[str, Any] = {
            "nn": nn, "model": case.model, "optimizer": case.optimizer, "session": case.session, "y": case.y,
        }  # fmt: skip
        namespace["loader"] = [case.x] * 3
        kept = run_as_a_cell(LOOP.format(batches="session.steps(loader)"), namespace)
        assert isinstance(kept, MemoryBudgetError)
        assert torch._C._len_torch_dispatch_stack() == 0
        if phase == "backward":
            loss, outputs = namespace["loss"], namespace["outputs"]
            assert outputs.shape == (128, 4)
            assert loss.item() == pytest.approx(nn.functional.cross_entropy(outputs.detach(), case.y).item())
            assert case.alive() == 1  # the outputs
            with pytest.raises(DissolvedGraphError, match="run out of memory"):
                loss.backward()
        else:
            assert case.alive() == 0
        assert case.session.out_of_memory is not None
        assert not case.session.step_in_progress
        assert not case.session.scaler.in_mid_step
        case.session.memory_budget = None
        before = len(case.session.history)
        exec(LOOP.format(batches="session.steps(loader)"), namespace)
        assert len(case.session.history) == before + 3
        assert kept.__traceback__ is not None

    @pytest.mark.parametrize("phase", ["forward", "backward"])
    def test_module_level_loop_without_steps(self, case: Case, phase: str) -> None:
        case.session.memory_budget = case.peaks()[phase] - 1
        namespace: dict[str, Any] = {
            "nn": nn, "model": case.model, "optimizer": case.optimizer, "session": case.session, "y": case.y,
        }  # fmt: skip
        namespace["loader"] = [case.x] * 3
        kept = run_as_a_cell(LOOP.format(batches="loader"), namespace)
        assert case.session.out_of_memory is not None  # asked on the thread of the loop, which frees
        if phase == "backward":
            assert case.alive() == 1
            assert namespace["loss"].item() > 0
        else:
            assert case.alive() == 0
        case.session.memory_budget = None
        case.session.request(autocast="bf16")
        before = len(case.session.history)
        exec(compile(LOOP.format(batches="loader"), "<another cell>", "exec"), namespace)
        assert torch._C._len_torch_dispatch_stack() == 0
        history = case.session.history
        assert len(history) == before + 3
        assert [event.step for event in history.events("applied")] == [before]  # at the next step's begin
        assert not any(event.kind == "rejected" for event in history.events())
        assert history.last("peak_bytes") > 0
        assert isinstance(kept, MemoryBudgetError)

    def test_before_the_next_step_begins(self, case: Case) -> None:
        """Nothing has asked: the next step frees what the last has left, before it begins."""
        case.session.memory_budget = case.peaks()["backward"] - 1
        namespace: dict[str, Any] = {
            "nn": nn, "model": case.model, "optimizer": case.optimizer, "session": case.session, "y": case.y,
        }  # fmt: skip
        namespace["loader"] = [case.x]
        kept = run_as_a_cell(LOOP.format(batches="loader"), namespace)
        assert case.alive() > 1
        case.session.memory_budget = None
        case.optimizer.zero_grad()
        with case.session.autocast():
            assert case.alive() == 1  # the outputs
        assert isinstance(kept, MemoryBudgetError)

    def test_loop_in_a_function(self, case: Case) -> None:
        case.session.memory_budget = case.peaks()["backward"] - 1

        def train() -> None:
            for batch in case.session.steps([case.x] * 3):
                case.optimizer.zero_grad()
                with case.session.autocast():
                    outputs = case.model(batch)
                    hidden = outputs.view(-1)[:2]
                    loss = nn.functional.cross_entropy(outputs, case.y) + hidden.sum()
                case.session.scaler.scale(loss).backward()
                raise AssertionError

        try:
            train()
        except MemoryBudgetError as error:
            kept = error
        assert case.session.out_of_memory is not None
        assert case.alive() == 0
        assert traceback.format_exception(kept)  # can still be shown
        assert "train" in "".join(traceback.format_exception(kept))

    def test_fit(self, case: Case) -> None:
        peak = case.peaks()["backward"]
        kept: list[Tensor] = []

        def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
            loss = nn.functional.cross_entropy(outputs, targets)
            kept[:] = [outputs, outputs.view(-1), loss]  # as a user's variable does
            return loss

        case.session.memory_budget = peak - 1
        case.session.fit([(case.x, case.y)] * 3, loss_fn)
        with pytest.raises(MemoryBudgetError) as raised:
            case.session.wait(60)
        assert case.session.run_state == "failed"
        assert case.alive() == 1
        found = case.session.out_of_memory
        assert found is not None
        assert found.phase == "backward"
        run = case.session.history.events("run")[-1]
        assert run.detail["state"] == "failed"
        assert "out of memory" in run.reason
        assert torch.equal(kept[1], kept[0].reshape(-1))
        assert raised.value is not None
        weights = [p.detach().clone() for p in case.model.parameters()]
        case.session.request(checkpointed=found.layers_to_checkpoint or ["1", "2", "3"])
        case.session.start()
        assert case.session.wait(60)
        assert case.session.run_state == "finished"
        assert case.session.settings.checkpointed
        assert case.session.status().step == 6  # one has fitted before what the variables held was added
        assert any(not torch.equal(p, w) for p, w in zip(case.model.parameters(), weights, strict=True))

    def test_fit_goes_on_from_the_present_weights(self) -> None:
        case, other = Case(optimizer="SGD"), Case(optimizer="SGD")
        case.session.memory_budget = 1000
        case.session.fit([(case.x, case.y)] * 2, nn.functional.cross_entropy)
        with pytest.raises(MemoryBudgetError):
            case.session.wait(60)
        case.session.memory_budget = None
        case.session.start()
        assert case.session.wait(60)
        for _ in range(2):
            other.step()
        for p, q in zip(case.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(p, q)
        case.session.close()
        other.session.close()

    def test_another_error_is_left_alone(self, case: Case) -> None:
        case.step()
        found: list[Any] = []

        def train() -> None:
            case.optimizer.zero_grad()
            with case.session.autocast():
                outputs = case.model(case.x)
                found.append(weakref.ref(outputs))
                raise ValueError("of the user's own")

        with pytest.raises(ValueError, match="own") as raised:
            train()
        case.step()
        assert raised.value.__traceback__ is not None
        assert found[0]() is not None  # a debugger finds it in the frame
        assert case.session.out_of_memory is None

    def test_a_graph_of_the_users_that_no_pass_has_died_in(self, case: Case) -> None:
        other = nn.Linear(8, 8)
        legitimate = other(case.x).square().mean()
        case.die(case.peaks()["backward"] - 1)
        assert case.session.out_of_memory is not None
        legitimate.backward()
        assert other.weight.grad is not None

    def test_retained_graph_stays(self, case: Case) -> None:
        limit = case.peaks()["backward"] - 1
        case.session.memory_budget = limit
        case.optimizer.zero_grad()
        with case.session.autocast():
            loss = nn.functional.cross_entropy(case.model(case.x), case.y)
        with pytest.raises(MemoryBudgetError):
            loss.backward(retain_graph=True)
        case.session.memory_budget = None
        assert case.session.out_of_memory is not None
        case.session.abandon_step()
        loss.backward()

    def test_detached_copies_go_on(self, case: Case) -> None:
        """A discriminator's loss on detached outputs of a generator whose own backward pass has died."""
        limit = case.peaks()["backward"] - 1
        head = nn.Linear(4, 1)
        case.session.memory_budget = limit
        case.optimizer.zero_grad()
        with case.session.autocast():
            outputs = case.model(case.x)
            loss = nn.functional.cross_entropy(outputs, case.y)
        others = head(outputs.detach()).mean()
        with pytest.raises(MemoryBudgetError):
            case.session.scaler.scale(loss).backward()
        assert case.session.out_of_memory is not None
        case.session.abandon_step()
        others.backward()
        assert head.weight.grad is not None

    def test_generator_of_the_users_that_waits_is_not_ended(self, case: Case) -> None:
        limit = case.peaks()["forward"] - 1

        def training() -> Iterator[str]:
            while True:
                try:
                    case.step()
                except MemoryBudgetError as error:
                    kept.append(error)
                    case.session.memory_budget = None
                    yield "died"
                else:
                    yield "trained"

        kept: list[BaseException] = []
        case.session.memory_budget = limit
        going = training()
        assert next(going) == "died"
        assert case.session.out_of_memory is not None
        assert not clear_finished_frames(kept[0])
        assert next(going) == "trained"
        going.close()


class TestItGoesOn:
    def test_several_deaths_in_a_row(self, case: Case) -> None:
        limit = case.peaks()["backward"] - 1
        for _ in range(3):
            case.die(limit)
        assert len(case.session.history.events("out_of_memory")) == 3
        assert case.session.status().step == 2
        case.session.memory_budget = None
        case.step()
        assert case.session.status().step == 3
        assert case.alive() == 0

    def test_death_in_the_optimizer(self) -> None:
        case = Case(batch=2)
        case.session.profile_next_step()
        case.step()
        profile = case.session.profiles[-1]
        by_phase = {p.name: float(profile.total_bytes[p.start : p.stop].max()) for p in profile.phases}
        case = Case(batch=2)
        assert by_phase["optimizer"] > by_phase["backward"]
        case.session.request(autocast="fp16")
        case.session.request(autocast="fp32")
        case.die(by_phase["optimizer"] - 1)
        found = case.session.out_of_memory
        assert found is not None
        assert found.phase == "optimizer"
        assert "some parameters may have been stepped" in "\n".join(found.report)
        case.session.memory_budget = None
        case.step()
        assert not case.session.scaler.in_mid_step
        assert len(case.session.history) == 1
        case.session.close()

    @pytest.mark.parametrize("phase", ["forward", "backward"])
    def test_with_a_loss_scale(self, phase: str) -> None:
        """The scaler is not left in mid-step, and the next steps are those of a run that has not died."""
        case, other = Case(optimizer="SGD"), Case(optimizer="SGD")
        for each in (case, other):
            each.session.request(autocast="fp16", init_scale=2.0**10)
            each.step()
            each.session.profile_next_step()
            each.step()
        profile = case.session.profiles[-1]
        peak = max(float(profile.total_bytes[p.start : p.stop].max()) for p in profile.phases if p.name == phase)
        case.die(peak - 1)
        case.session.memory_budget = None
        case.session.request(init_scale=2.0**8)
        other.session.request(init_scale=2.0**8)
        for each in (case, other):
            each.step()
            assert each.session.history.last("scale") == 2.0**8
        for p, q in zip(case.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(p, q)
        case.session.close()
        other.session.close()

    def test_users_own_except_goes_on_with_the_accumulation(self) -> None:
        """As long as there are gradients of a scaled loss, the scale stays: what is asked for waits for ``update()``."""
        case = Case(optimizer="SGD")
        session = case.session
        session.request(autocast="fp16", init_scale=2.0**10)
        case.peaks()
        session.memory_budget = session.history.last("peak_bytes") + 30_000
        case.optimizer.zero_grad()
        for inputs in (case.x, case.x.repeat(20, 1), case.x):
            try:
                with session.autocast():
                    loss = nn.functional.cross_entropy(case.model(inputs), case.y.repeat(len(inputs) // len(case.y)))
                session.scaler.scale(loss).backward()
            except torch.OutOfMemoryError:
                session.request(init_scale=2.0**4)
        assert session.scaler.get_scale() == 2.0**10
        session.scaler.step(case.optimizer)
        session.scaler.update()
        assert session.history.last("scale") == 2.0**10
        assert len(session.history.events("out_of_memory")) == 1
        session.memory_budget = None
        case.step()
        assert session.history.last("scale") == 2.0**4
        session.close()

    def test_skipping_loop_gets_its_requests(self, case: Case) -> None:
        """A loop that catches the error and goes on with the next batch: a request made meanwhile is applied there."""
        case.session.memory_budget = case.peaks()["backward"] - 1
        died = 0
        for _ in range(3):
            try:
                case.step()
            except torch.OutOfMemoryError:
                died += 1
                case.session.request(checkpointed=["1", "2", "3"])
        assert died == 1
        assert case.session.status().step == 4

    def test_plain_loop_without_regions_and_scaler(self) -> None:
        case = Case()
        case.session.close()
        session = AmpSession(case.model, case.optimizer)

        def step() -> None:
            case.optimizer.zero_grad()
            nn.functional.cross_entropy(case.model(case.x), case.y).backward()
            case.optimizer.step()

        step()
        step()
        peak = session.history.last("peak_bytes")
        session.memory_budget = peak - 1
        died = 0
        for _ in range(3):
            try:
                step()
            except torch.OutOfMemoryError:
                died += 1
                session.request(checkpointed=["1", "2", "3"])
        assert died == 1
        assert session.status().step == 4
        assert [event.step for event in session.history.events("applied")] == [2]
        session.close()

    def test_model_that_catches_the_error_itself(self) -> None:
        class Careful(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.wide, self.narrow, self.last = nn.Linear(8, 4096), nn.Linear(8, 8), nn.Linear(8, 4)

            def forward(self, x: Tensor) -> Tensor:
                try:
                    y = self.wide(x)[:, :8]
                except torch.OutOfMemoryError:
                    y = self.narrow(x)
                last: Tensor = self.last(y)
                return last

        model = Careful()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = AmpSession(model, optimizer)
        session.memory_budget = 400_000
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(64, 8)).sum().backward()
            optimizer.step()
        assert session.status().step == 2
        assert [event.step for event in session.history.events("out_of_memory")] == [0, 1]
        assert model.narrow.weight.grad is not None
        session.close()
        assert torch._C._len_torch_dispatch_stack() == 0


class TestRealErrors:
    TEXT = (
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
        "281474976710656 bytes. Error code 12 (Cannot allocate memory)"
    )

    def test_recognised(self) -> None:
        assert is_out_of_memory(RuntimeError(self.TEXT))
        assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has"))
        assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
        assert not is_out_of_memory(ValueError(self.TEXT))
        assert not is_out_of_memory(None)
        assert requested_bytes_of(RuntimeError(self.TEXT)) == 2.0**48
        assert requested_bytes_of(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.50 GiB. GPU")) == 20.5 * 2**30
        assert requested_bytes_of(torch.OutOfMemoryError("Tried to allocate 12 bytes")) == 12

    @pytest.mark.parametrize("profiled", [False, True])
    def test_of_the_cpu(self, case: Case, profiled: bool) -> None:
        class Huge(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x + torch.empty(2**46)

        case.model[2].register_module("huge", Huge())
        case.session.close()
        session = AmpSession(case.model, case.optimizer)
        case.session = session
        if profiled:
            session.profile_next_step()
        before = [True]

        def grows(module: nn.Module, args: Any) -> None:
            if before:
                case.model[2].huge(args[0])

        handle = case.model[2].register_forward_pre_hook(grows)
        with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as raised:
            case.step()
        assert type(raised.value) is RuntimeError  # torch's own, unchanged
        found = session.out_of_memory
        assert found is not None
        assert (found.cause, found.requested_bytes, found.layer) == ("allocator", 2.0**48, "2.huge")
        assert found.operator == "aten::empty"
        assert found.phase == "forward"
        assert (found.profile is not None) is profiled
        assert case.alive() == 0
        handle.remove()
        case.step()
        assert len(session.history) == 1
        assert len(session.history.events("out_of_memory")) == 1

    def test_of_torch(self, case: Case) -> None:
        """As on a CUDA device, where no op is looked at: what the exception says."""
        case.session.close()
        session = AmpSession(case.model, case.optimizer, memory_every=0)
        case.session = session

        def fails(*args: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of ...")

        handle = case.model[3].register_forward_pre_hook(fails)
        with pytest.raises(torch.OutOfMemoryError):
            case.step()
        found = session.out_of_memory
        assert found is not None
        assert (found.cause, found.requested_bytes) == ("allocator", 2.0**21)
        assert len(session.history.events("out_of_memory")) == 1
        assert case.alive() == 0
        handle.remove()
        case.step()
        assert len(session.history) == 1

    @pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
    def test_where_no_step_is_measured(self, case: Case, phase: str) -> None:
        """What the calls tell that the exception has left."""
        case.session.close()
        session = case.session = AmpSession(case.model, case.optimizer, memory_every=0)

        def fails(*args: Any) -> None:
            raise RuntimeError(self.TEXT)

        if phase == "forward":
            handle: Any = case.model[3].down.register_forward_pre_hook(fails)
        elif phase == "backward":
            handle = case.model[3].down.weight.register_hook(fails)
        else:
            handle = case.optimizer.register_step_pre_hook(fails)
        with pytest.raises(RuntimeError) as raised:
            case.step()
        session.died(raised.value)
        handle.remove()
        found = session.out_of_memory
        assert found is not None
        assert (found.phase, found.layer) == (phase, "3.down" if phase == "forward" else "")
        assert found.requested_bytes == 2.0**48

    def test_in_a_scripted_function(self, case: Case) -> None:
        """It arrives as a RuntimeError without a word of memory; what the meter has noted tells it from others."""

        class Doubled(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x * 2

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case.model[1] = torch.jit.script(Doubled())
        case.session.close()
        session = case.session = AmpSession(case.model, case.optimizer)
        case.step()
        session.memory_budget = 7_000
        other = RuntimeError("The following operation failed in the TorchScript interpreter.")
        assert not session.died(other)
        case.optimizer.state.clear()
        session.memory_budget = 1.5 * sum(p.nbytes for p in case.model.parameters())
        with pytest.raises(RuntimeError) as raised:
            case.step()
        found = session.out_of_memory
        assert found is not None
        assert session.out_of_memory is found
        assert raised.value is not None

    def test_an_old_error_is_none_of_this_loops(self, case: Case) -> None:
        """An interrupt of a loop whose meter tells of no death, with an earlier loop's error still in ``sys.last_exc``."""
        case.session.memory_budget = 1000
        with pytest.raises(MemoryBudgetError) as old:
            case.step()
        case.session.close()
        session = AmpSession(case.model, case.optimizer)
        case.session = session
        session._memory.meter.close()
        session._memory.meter = NoMeter("for the test")

        def interrupted() -> None:
            for _ in session.steps([1]):
                with session.autocast():
                    loss = case.model(case.x).sum()
                session.scaler.scale(loss).backward()
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        session.release_after_death()
        assert session.out_of_memory is None
        assert old.value is not None

    def test_where_no_meter_tells_of_it(self, case: Case) -> None:
        """The end of the loop finds the error that is on its way, and the step is forgotten."""
        case.session.close()
        session = AmpSession(case.model, case.optimizer)
        case.session = session
        session._memory.meter.close()
        session._memory.meter = NoMeter("for the test")

        def fails(gradient: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of ...")

        def loop() -> Iterator[None]:
            try:
                yield
            finally:
                session.release_after_death()  # as at the end of `steps`

        def train() -> None:
            for _ in loop():
                with session.autocast():
                    outputs = case.model(case.x)
                    loss = outputs.sum()
                case.model[1].down.weight.register_hook(fails)
                session.scaler.scale(loss).backward()

        session.recover()  # as at the beginning of `steps`
        with pytest.raises(torch.OutOfMemoryError):
            train()
        assert not session.step_in_progress
        assert session.out_of_memory is not None
        assert session.out_of_memory.requested_bytes == 2.0**21
        assert case.alive() == 0

    def test_raised_from_it(self, case: Case) -> None:
        case.session.memory_budget = 1000

        def fails() -> None:
            try:
                case.step()
            except torch.OutOfMemoryError as error:
                raise ValueError("batch too large") from error

        case.session.fit([(case.x, case.y)], lambda outputs, targets: outputs.sum())
        with pytest.raises(MemoryBudgetError):
            case.session.wait(60)
        with pytest.raises(ValueError, match="too large"):
            fails()
        assert len(case.session.history.events("out_of_memory")) == 2

    def test_reference_to_a_plain_error(self) -> None:
        def fails() -> None:
            raise RuntimeError(self.TEXT)

        with pytest.raises(RuntimeError) as raised:
            fails()
        reference = ErrorReference(raised.value)
        assert not reference.is_weak
        assert reference() is raised.value
        del raised
        gc.collect()
        assert reference() is None


class TestCapturedCode:
    SOURCE = """
for _ in range(3):
    optimizer.zero_grad()
    outputs = model(x)
    loss = nn.functional.cross_entropy(outputs, y)
    loss.backward()
    optimizer.step()
"""

    def test_error_reaches_the_user_and_the_report_is_kept(self) -> None:
        case = Case()
        peak = case.peaks()["backward"]
        case.session.close()
        namespace: dict[str, Any] = {"nn": nn, "model": case.model, "optimizer": case.optimizer, "x": case.x, "y": case.y}

        def budget(session: Any) -> None:
            session.memory_budget = peak - 1

        capture = Capture(AmpSession, on_found=budget)
        with pytest.raises(MemoryBudgetError), capture:
            exec(compile(self.SOURCE, "<captured>", "exec"), namespace)
        session = capture.session
        assert session is not None
        assert session.closed
        assert session.out_of_memory is not None
        assert session.out_of_memory.phase == "backward"
        assert len(session.history) == 1  # the first, without a budget
        assert case.alive() == 1
        assert namespace["loss"].item() > 0
        again = Capture(AmpSession)
        with again:
            exec(compile(self.SOURCE, "<captured>", "exec"), namespace)
        assert again.session is not None
        assert len(again.session.history) == 3

    def test_caught_by_the_code(self) -> None:
        case = Case()
        peak = case.peaks()["backward"]
        case.session.close()

        def budget(session: Any) -> None:
            session.memory_budget = peak - 1

        died = 0
        with Capture(AmpSession, on_found=budget) as capture:
            for _ in range(4):
                case.optimizer.zero_grad()
                try:
                    loss = nn.functional.cross_entropy(case.model(case.x), case.y)
                    loss.backward()
                except torch.OutOfMemoryError:
                    died += 1
                    assert capture.session is not None
                    capture.session.request(checkpointed=["1", "2", "3"])
                    continue
                case.optimizer.step()
        assert died == 1
        assert capture.session is not None
        assert len(capture.session.history) == 3


class TestWhatIsKnownOfOptimizers:
    """Sessions to which none was given."""

    def test_state_from_before_counts_from_the_first_step_on(self) -> None:
        case = Case()
        case.step()
        case.session.close()
        state = sum(t.nbytes for values in case.optimizer.state.values() for t in values.values())
        loss = nn.functional.cross_entropy

        def loop() -> None:
            for _ in range(3):
                case.optimizer.zero_grad()
                loss(case.model(case.x), case.y).backward()
                case.optimizer.step()

        def session_of(model: nn.Module) -> AmpSession:
            session = AmpSession(model)
            session.memory_budget = budget
            return session

        budget = 1e9
        with Capture(session_of, on_found=lambda session: session.profile_next_step()) as capture:
            loop()
        session = capture.session
        assert session is not None
        peaks = session.history.columns("peak_bytes")["peak_bytes"]
        assert peaks[0] == pytest.approx(peaks[1], rel=1e-3)
        assert peaks[1] == peaks[2]
        (profile,) = session.profiles
        assert profile.peak_bytes_by_kind["optimizer"] == state
        assert profile.bytes_by_kind[0][3] == state

        budget = peaks[1] - 1
        with pytest.raises(MemoryBudgetError), Capture(session_of) as capture:
            loop()
        session = capture.session
        assert session is not None
        found = session.out_of_memory
        assert found is not None
        assert found.step == 0
        assert found.profile is not None
        assert found.profile.bytes_by_kind[-1][3] == state

    def test_state_that_the_loop_makes(self) -> None:
        case = Case()
        case.session.close()
        case.optimizer.state.clear()
        session = case.session = AmpSession(case.model)
        session.memory_budget = 1e9
        optimizers = [torch.optim.Adam(layer.parameters()) for layer in case.model]  # after the session
        for step in range(3):
            session.profile_next_step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            with session.autocast():
                loss = nn.functional.cross_entropy(case.model(case.x), case.y)
            session.scaler.scale(loss).backward()
            for optimizer in optimizers:
                session.scaler.step(optimizer)
            session.scaler.update()
            state = sum(t.nbytes for each in optimizers for values in each.state.values() for t in values.values())
            profile = session.profiles[-1]
            assert profile.bytes_by_kind[-1][3] == state
            assert profile.bytes_by_kind[0][3] == (0 if step == 0 else state)

    def test_several_models(self) -> None:
        torch.manual_seed(0)
        first, second = nn.Linear(8, 256), nn.Linear(256, 8)
        optimizers = [torch.optim.Adam(model.parameters()) for model in (first, second)]

        def loop() -> None:
            for _ in range(3):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                second(first(torch.ones(4, 8)).relu()).sum().backward()
                for optimizer in optimizers:
                    optimizer.step()

        loop()
        state = sum(t.nbytes for each in optimizers for values in each.state.values() for t in values.values())
        with Capture(AmpSession, on_found=lambda session: session.profile_next_step()) as capture:
            loop()
        session = capture.session
        assert session is not None
        peaks = session.history.columns("peak_bytes")["peak_bytes"]
        assert peaks[0] == pytest.approx(peaks[2], rel=2e-3)
        assert session.profiles[0].bytes_by_kind[0][3] == state

    def test_they_are_not_kept_alive(self) -> None:
        case = Case()
        case.session.close()
        case.session = AmpSession(case.model)
        case.session.begin_step()
        reference = weakref.ref(case.optimizer)
        case.optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)
        gc.collect()
        assert reference() is None


class Plain(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class TestModesOfTheUsers:
    @pytest.mark.parametrize("mode", [Plain, lambda: FlopCounterMode(display=False)])
    @pytest.mark.parametrize("phase", ["forward", "backward"])
    def test_budget_holds_under_them(self, case: Case, mode: Callable[[], Any], phase: str) -> None:
        peak = case.peaks()[phase]
        places = []
        for around in (contextlib.nullcontext, mode):
            case.session.memory_budget = peak - 1
            with around(), pytest.raises(MemoryBudgetError):
                case.step()
            found = case.session.out_of_memory
            assert found is not None
            assert case.session.budget_gap is None
            places.append((found.phase, found.layer, found.operator, found.requested_bytes, found.allocated_bytes))
            case.session.memory_budget = None
            case.session.abandon_step()
        assert places[0] == places[1]
        assert places[0][0] == phase

    def test_left_within_the_step(self, case: Case) -> None:
        peak = max(case.peaks().values())
        case.session.memory_budget = peak - 1
        mode = Plain()
        mode.__enter__()
        with case.session.autocast():
            loss = nn.functional.cross_entropy(case.model(case.x), case.y)
        mode.__exit__(None, None, None)
        with pytest.raises(MemoryBudgetError):
            case.session.scaler.scale(loss).backward()

    def test_a_gap_is_told(self, case: Case) -> None:
        case.session.memory_budget = 1000
        with FakeTensorMode(allow_non_fake_inputs=True):
            case.session.begin_step()
        case.step()
        assert case.session.budget_gap is not None
        assert "FakeTensorMode" in case.session.budget_gap
        (event,) = case.session.history.events("note")
        assert event.reason == case.session.budget_gap
        case.die(1000)
        assert case.session.budget_gap is None


class TestUnrelatedCode:
    """What has nothing to do with training is not what the budget is for, wherever a step was left."""

    BIG = 2_000_000

    @pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
    @pytest.mark.parametrize("where", ["in forward", "after forward", "after backward", "after step"])
    def test_after_an_exception(self, case: Case, where: str, error: type[BaseException]) -> None:
        case.session.memory_budget = 3e6
        case.step()

        def fails(*args: Any) -> None:
            raise error

        def step() -> None:
            case.optimizer.zero_grad()
            handle = case.model[2].down.register_forward_pre_hook(fails) if where == "in forward" else None
            try:
                with case.session.autocast():
                    loss = nn.functional.cross_entropy(case.model(case.x), case.y)
            finally:
                if handle is not None:
                    handle.remove()
            if where == "after forward":
                fails()
            case.session.scaler.scale(loss).backward()
            if where == "after backward":
                fails()
            case.session.scaler.step(case.optimizer)
            fails()

        with pytest.raises(error) as kept:
            step()
        other = nn.Linear(10, 10)
        for _ in range(3):
            big = torch.ones(self.BIG)
            assert other(big[:100].view(10, 10) * 2).sum() != 0
            del big
        assert kept.value is not None
        assert case.session.out_of_memory is None
        case.step()
        assert len(case.session.history) == 2
        assert case.session.out_of_memory is None

    def test_after_a_death_in_an_optimizers_step(self) -> None:
        case = Case(optimizer="SGD")
        case.session.close()
        optimizer = torch.optim.LBFGS(case.model.parameters(), max_iter=3)
        session = case.session = AmpSession(case.model, optimizer)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(case.model(case.x), case.y)
            loss.backward()
            return loss

        session.memory_budget = 1e9
        optimizer.step(closure)
        session.memory_budget = 0.7 * session.history.last("peak_bytes")
        with pytest.raises(MemoryBudgetError):
            optimizer.step(closure)
        torch.ones(self.BIG)
        torch.ones(self.BIG)
        session.memory_budget = None
        optimizer.step(closure)

    def test_what_the_loop_makes_besides_counts(self, case: Case) -> None:
        """It raises nothing; the next op of the training does, if too much is held."""
        case.session.memory_budget = 3e6
        with case.session.autocast():
            outputs = case.model(case.x)
            big = torch.ones(self.BIG)
            with pytest.raises(MemoryBudgetError, match="more in the loss"):
                nn.functional.cross_entropy(outputs, case.y)
        found = case.session.out_of_memory
        assert found is not None
        assert found.phase == "loss"
        assert found.allocated_bytes > big.nbytes
        assert "the batch alone need" not in found.report[0]

    def test_loss_of_a_function_of_the_users(self, case: Case) -> None:
        peaks = []
        for budget in (1e9, None):
            case.session.memory_budget = budget or peaks[0] - 1
            with case.session.autocast():
                outputs = case.model(case.x)
                step = case.session._memory.meter._step  # type: ignore[attr-defined]
                if budget is None:
                    with pytest.raises(MemoryBudgetError, match="in the loss"):
                        (outputs[:, None] - outputs[None]).square().mean()
                    break
                loss = (outputs[:, None] - outputs[None]).square().mean()
            peaks.append(step.peak_bytes)
            del outputs, loss
            case.session.abandon_step()

    def test_another_budget_holds_at_once(self, case: Case) -> None:
        case.session.memory_budget = 1e9
        with case.session.autocast():
            case.model(case.x)
            case.session.memory_budget = 1000
            with pytest.raises(MemoryBudgetError):
                case.model(case.x)
            case.session.memory_budget = None
            loss = case.model(case.x).sum()
        case.session.scaler.scale(loss).backward()
        assert case.session.memory_budget is None


class TestThreads:
    def test_a_thread_that_asks_touches_only_what_has_finished(self, case: Case) -> None:
        """A dashboard asks while the error is still on its way; the graph is the training thread's affair."""
        case.session.memory_budget = case.peaks()["backward"] - 1
        namespace: dict[str, Any] = {
            "nn": nn, "model": case.model, "optimizer": case.optimizer, "session": case.session, "y": case.y,
        }  # fmt: skip
        namespace["loader"] = [case.x]
        kept = run_as_a_cell(LOOP.format(batches="loader"), namespace)
        loss = namespace["loss"]
        node = loss.grad_fn
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(case.session.out_of_memory))
        thread.start()
        thread.join()
        assert found[0] is not None
        assert loss.grad_fn is node
        del node
        case.session.release_after_death()
        assert case.alive() == 1
        assert isinstance(kept, MemoryBudgetError)

    def test_asked_all_the_time(self, case: Case) -> None:
        limit = case.peaks()["backward"] - 1
        over = threading.Event()
        errors: list[BaseException] = []

        def ask() -> None:
            while not over.wait(0.001):
                try:
                    case.session.out_of_memory  # noqa: B018
                    case.session.history_so_far.events("out_of_memory")
                except BaseException as error:
                    errors.append(error)
                    return

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            for _ in range(10):
                case.session.memory_budget = limit
                with pytest.raises(MemoryBudgetError):
                    case.step()
                case.session.memory_budget = None
                case.step()
        finally:
            over.set()
            thread.join()
        assert errors == []
        assert len(case.session.history.events("out_of_memory")) == 10
        assert case.session.status().step == 12


class TestFrames:
    def test_locals_that_somebody_has_looked_at(self) -> None:
        """Up to Python 3.12, a frame keeps a copy of them for whoever has asked."""

        class Big:
            pass

        references = []

        def fails() -> None:
            big = Big()
            references.append(weakref.ref(big))
            raise MemoryBudgetError("here")

        try:
            fails()
        except MemoryBudgetError as error:
            trace = error.__traceback__
            assert trace is not None
            assert trace.tb_next is not None
            assert "big" in trace.tb_next.tb_frame.f_locals
            done = clear_finished_frames(error)
            kept = error
        assert not done  # this very frame is running
        gc.collect()
        assert references[0]() is None
        assert kept.__traceback__ is not None

    def test_not_the_frames_that_run(self) -> None:
        value = "here"
        done = True
        try:
            raise MemoryBudgetError("here")
        except MemoryBudgetError as error:
            done = clear_finished_frames(error)
        assert value == "here"
        assert not done

    def test_closures(self) -> None:
        """What is around a function that nobody else has is freed with its frame; what others have is not."""

        class Big:
            pass

        references, kept = [], []

        def fails(shared: bool) -> None:
            big = Big()
            references.append(weakref.ref(big))

            def inner() -> None:
                raise MemoryBudgetError(str(big))

            if shared:
                kept.append(lambda: big)
            inner()

        errors = []
        for shared in (False, True):
            with pytest.raises(MemoryBudgetError) as raised:
                fails(shared)
            errors.append(raised.value)
            clear_finished_frames(raised.value)
        gc.collect()
        assert references[0]() is None
        assert kept[0]() is references[1]()
        assert len(errors) == 2
