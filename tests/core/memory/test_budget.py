"""A budget: the op that goes above it raises, what it made is free again, and the error says what, where and what to do."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amp_widgets.core.memory.budget import MemoryBudgetError, above_budget_text, budget_in_bytes, checked_budget, told_apart
from amp_widgets.core.memory.cpu import CpuMeter
from amp_widgets.core.memory.death import Death
from amp_widgets.errors import AmpWidgetsError, SettingsError

F32 = 4  # bytes
# a step of the two-layer network, written out
W1, B1, W2, B2 = 4 * 3 * F32, 4 * F32, 2 * 4 * F32, 2 * F32
PARAMETERS = W1 + B1 + W2 + B2  # 104
X = 5 * 3 * F32  # 60
Z1 = A1 = 5 * 4 * F32  # 80: before and after the ReLU, which saves its result
Y = 5 * 2 * F32  # 40


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
        self.second = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x))
        return y


class Case:
    """One step of the network under a budget."""

    def __init__(self, budget_bytes: float | None, *, optimizer: bool = False) -> None:
        torch.manual_seed(0)
        self.model = Mlp()
        self.optimizer = torch.optim.Adam(self.model.parameters()) if optimizer else None
        self.meter = CpuMeter(self.model, [] if self.optimizer is None else [self.optimizer])
        self.meter.budget_bytes = budget_bytes
        self.x = torch.randn(5, 3)

    def run(self, step: Callable[[], Any] | None = None) -> MemoryBudgetError | None:
        self.meter.begin()
        try:
            (self.step if step is None else step)()
        except MemoryBudgetError as error:
            self.meter.abandon()
            return error
        finally:
            if self.meter.take_profile() is not None:
                raise AssertionError("nobody has asked for a profile")
        self.meter.end()
        return None

    def step(self) -> None:
        self.model(self.x).square().mean().backward()
        if self.optimizer is not None:
            self.optimizer.step()

    def death(self) -> Death:
        death = self.meter.take_death()
        assert death is not None
        assert self.meter.take_death() is None  # once
        return death


def where(death: Death) -> tuple[str, str, str, str, float, float]:
    return death.phase, death.layer, death.operator, death.kind, death.requested_bytes, death.allocated_bytes


HELD = PARAMETERS + X
# from every op that allocates: what is held before it, and what it asks for. The last is the first op above its budget.
OPS = [
    (HELD, ("forward", "first.0", "aten::addmm", "activation", Z1)),
    (HELD + Z1, ("forward", "first.1", "aten::relu", "activation", A1)),
    (HELD + A1, ("forward", "second", "aten::addmm", "activation", Y)),
    (HELD + A1 + Y, ("loss", "", "aten::pow", "activation", Y)),
    (HELD + A1 + Y + Y, ("loss", "", "aten::mean", "activation", F32)),
]


# but for those before which more was held than at them
TRIED = [place for place, (held, op) in enumerate(OPS) if all(held + op[4] > h + o[4] for h, o in OPS[:place])]


class TestWhichOp:
    @pytest.mark.parametrize("op", TRIED)
    def test_first_op_above_the_budget(self, op: int) -> None:
        held, (phase, layer, operator, kind, requested) = OPS[op]
        budget = held + requested - 1
        case = Case(budget)
        error = case.run()
        assert error is not None
        death = case.death()
        assert where(death) == (phase, layer, operator, kind, requested, held)
        assert (death.limit_bytes, death.cause, death.device) == (budget, "budget", "cpu")
        assert death.error is not None
        assert death.error() is error

    def test_budget_of_the_peak_fits(self) -> None:
        case = Case(None)
        case.run()
        peak = case.meter.overall_peak_bytes
        assert Case(peak).run() is None
        assert isinstance(Case(peak - 1).run(), MemoryBudgetError)

    def test_backward(self) -> None:
        case = Case(HELD + A1 + Y + Y + F32 + F32)  # the loss's gradient fits, and no more
        error = case.run()
        death = case.death()
        assert error is not None
        assert (death.phase, death.limit_bytes) == ("backward", HELD + A1 + 2 * Y + 2 * F32)
        assert death.allocated_bytes + death.requested_bytes > death.limit_bytes >= death.allocated_bytes

    def test_optimizer(self) -> None:
        case = Case(None, optimizer=True)
        for p in case.model.parameters():
            p.grad = torch.zeros_like(p)
        case.meter.budget_bytes = 2 * PARAMETERS + W1
        assert case.optimizer is not None
        error = case.run(case.optimizer.step)
        death = case.death()
        assert error is not None
        assert (death.phase, death.kind) == ("optimizer", "")
        assert "in the optimizer step" in str(error)

    def test_recompute(self) -> None:
        case = Case(None)

        def step() -> None:
            y = checkpoint(case.model, case.x, use_reentrant=False)
            y.square().mean().backward()

        case.meter.profile_next("whole")
        case.meter.begin()
        step()
        case.meter.end()
        profile = case.meter.take_profile()
        assert profile is not None
        start = next(phase.start for phase in profile.phases if phase.name == "recompute")
        needed = int(profile.total_bytes[: start + 3].max())
        case.model.zero_grad()
        case.meter.budget_bytes = needed - 1
        error = case.run(step)
        assert error is not None
        death = case.death()
        assert (death.phase, death.kind) == ("recompute", "recompute")
        assert death.layer in ("first.0", "first.1", "second")
        assert "in the recompute of" in str(error)


class TestTheStateAlone:
    def test_it_is_said(self) -> None:
        case = Case(PARAMETERS - 1)
        error = case.run()
        assert "got 104 B held before the step made anything" not in str(error)  # the batch counts, too
        assert f"got {HELD} B held before the step made anything" in str(error)
        death = case.death()
        assert death.allocated_bytes == HELD
        assert death.operator == "aten::addmm"

    def test_gradients_that_zero_grad_drops_do_not_count(self) -> None:
        case = Case(None)
        case.run()
        case.meter.budget_bytes = case.meter.overall_peak_bytes

        def step() -> None:
            case.model.zero_grad()
            case.step()

        assert case.run(step) is None

    def test_ops_that_need_nothing_go_on(self) -> None:
        case = Case(1)

        def step() -> None:
            with torch.no_grad():
                for parameter in case.model.parameters():
                    parameter.zero_()
                    parameter.view(-1)

        assert case.run(step) is None


class TestItIsFreeAgain:
    def test_what_the_op_made(self) -> None:
        case = Case(HELD + 1000)
        storages = case.meter._storages
        larger = torch.randn(500, 3)
        case.meter._storages.see(larger)
        case.meter.budget_bytes = HELD + 6000 + 1000
        before = 0

        def step() -> None:
            nonlocal before
            case.model(case.x)
            before = storages.bytes
            kept = len(storages), storages.bytes
            for _ in range(3):
                with pytest.raises(MemoryBudgetError):
                    case.model(larger)
                step = case.meter._step
                assert step is not None
                step._storages.settle()
                assert (len(storages), step._storages.bytes) == (kept[0], step._storages.bytes)
            case.model(case.x)  # and one that fits goes on

        assert case.run(step) is None
        assert before > 0

    def test_nothing_is_kept_by_the_error_once_it_is_gone(self) -> None:
        case = Case(HELD + Z1 + A1 - 1)
        references: list[weakref.ref[Any]] = []
        case.model.first[0].register_forward_hook(lambda module, args, out: references.append(weakref.ref(out)))
        case.run()
        gc.collect()
        assert references
        assert references[0]() is None
        case.death()

    def test_user_halves_the_batch_in_the_same_step(self) -> None:
        case = Case(HELD + 2 * 80)

        def step() -> None:
            for size in (20, 5):
                try:
                    case.model(torch.ones(size, 3)).square().mean().backward()
                except torch.OutOfMemoryError:
                    continue  # what the frames hold is free after this, not before
                break

        case.meter.budget_bytes = 560
        assert case.run(step) is None
        assert case.meter.overall_peak_bytes <= 560
        assert all(p.grad is not None for p in case.model.parameters())


class TestResize:
    def test_in_place(self) -> None:
        case = Case(HELD + 100)

        def step() -> None:
            def resize(*_: Any) -> None:
                tensor = torch.empty(0)
                tensor.resize_(20)
                tensor.resize_(5)
                tensor.resize_(1000)

            case.model.register_forward_pre_hook(resize)
            case.model(case.x)

        error = case.run(step)
        assert error is not None
        death = case.death()
        assert (death.operator, death.requested_bytes) == ("aten::resize_", 4000 - 80)


class TestNoBudget:
    def test_no_step_is_followed_without_one(self) -> None:
        case = Case(None)
        case.meter.begin()
        assert type(case.meter._step).__name__ == "StepMode"
        case.meter.end()
        case.meter.budget_bytes = 1e9
        case.meter.begin()
        assert type(case.meter._step).__name__ == "StepTracker"
        case.meter.end()
        case.meter.budget_bytes = None
        case.meter.begin()
        assert type(case.meter._step).__name__ == "StepMode"
        case.meter.end()

    def test_profile_under_a_budget(self) -> None:
        case = Case(1e9)
        case.meter.profile_next("asked for")
        case.meter.begin()
        case.step()
        case.meter.end()
        profile = case.meter.take_profile()
        assert profile is not None
        assert profile.label == "asked for"

    def test_why_it_is_not_watched(self) -> None:
        case = Case(1.0)
        case.meter._ran_compiled = True
        assert case.run() is None
        assert "compiled code ran" in str(case.meter.unlimited_because)
        assert case.meter.unprofiled_because is None
        case.meter._ran_compiled = False
        assert case.run() is not None
        assert case.meter.unlimited_because is None


class TestError:
    def test_what_it_is(self) -> None:
        error = MemoryBudgetError("too much")
        assert isinstance(error, torch.OutOfMemoryError)
        assert isinstance(error, AmpWidgetsError)
        assert isinstance(error, RuntimeError)
        for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert type(again) is MemoryBudgetError
            assert str(again) == "too much"
        assert weakref.ref(error)() is error

    def test_text(self) -> None:
        text = above_budget_text(
            phase="backward", layer="b.1", operator="aten::mm", requested_bytes=2e6, allocated_bytes=9e6, limit_bytes=10e6
        )
        assert text.startswith(
            "memory_budget: got 2.0 MB more in the backward pass of b.1 (aten::mm), with 9.0 MB held already; "
            "expected at most 10.0 MB at a time: "
        )
        assert "raise memory_budget" in text

    @pytest.mark.parametrize("value", [0, -1, math.inf, math.nan, True, torch.tensor(True), "much", "off", b"1", [], 10**400])
    def test_no_budget(self, value: object) -> None:
        with pytest.raises(SettingsError, match=r"memory_budget: got .*expected a number of bytes above 0"):
            budget_in_bytes(value)

    def test_budgets(self) -> None:
        assert budget_in_bytes(None) is None
        assert budget_in_bytes(200e6) == budget_in_bytes("200 MB") == checked_budget("200MB", "plan") == 200e6
        with pytest.raises(SettingsError, match="plan: budget_bytes: got None, expected a number of bytes above 0"):
            checked_budget(None, "plan")
        with pytest.raises(SettingsError, match="got an object of type int"):  # its repr cannot be had
            checked_budget(10**5000, "plan")

    @pytest.mark.parametrize("text", ["60", " 60 ", "8000", "1e2", ".5"])
    def test_a_text_without_a_unit(self, text: str) -> None:
        wanted = f"got {text!r} without a unit, expected one with so small a number, such as {text.strip()} MB"
        for budget, asked in (
            (lambda: checked_budget(text, "plan"), "plan: budget_bytes"),
            (lambda: budget_in_bytes(text), "memory_budget"),
        ):
            with pytest.raises(SettingsError) as caught:
                budget()
            assert str(caught.value) == f"{asked}: {wanted}"
        assert (
            checked_budget(60, "plan")
            == checked_budget("60 B", "plan")
            == budget_in_bytes(60.0)
            == budget_in_bytes("60B")
            == 60.0
        )
        assert checked_budget("200e6", "plan") == 200e6

    def test_told_apart(self) -> None:
        assert told_apart(8e6, 8e6) == ("8.0 MB", "8.0 MB")
        assert told_apart(8e6, 9e6) == ("8.0 MB", "9.0 MB")
        assert told_apart(8e6, 8_000_004, 1.0, math.inf) == ("8.000000 MB", "8.000004 MB", "1 B", "inf TB")

    def test_numbers(self) -> None:
        assert budget_in_bytes(torch.tensor(5)) == 5.0
