"""What would have fitted: the bytes of an estimate against sums made by hand, and what the report says in each case."""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from amp_widgets.core.layers import list_layers
from amp_widgets.core.memory.autopsy import OutOfMemory, autopsy
from amp_widgets.core.memory.budget import MemoryBudgetError
from amp_widgets.core.memory.cpu import CpuMeter
from amp_widgets.core.memory.death import Death, ErrorReference
from amp_widgets.core.memory.savings import Savings

F32 = 4  # bytes
WIDTH, BATCH = 16, 64
NARROW, WIDE = BATCH * WIDTH * F32, BATCH * 4 * WIDTH * F32


class Block(nn.Module):
    """Of each call, `up`'s output is saved by gelu, and gelu's by `down`; its own output by the next layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.nn.functional.gelu(self.up(x)))
        return y


class Rectified(nn.Module):
    """Its ReLU does not save what it is given, which a checkpointed layer does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(torch.relu(x))
        return y


def died(model: nn.Module, budget: float, *, backward: bool = True) -> Death:
    meter = CpuMeter(model, [])
    meter.budget_bytes = budget
    meter.begin()
    try:
        loss = model(torch.ones(BATCH, WIDTH)).square().mean()
        if backward:
            loss.backward()
    except MemoryBudgetError:
        pass
    meter.abandon()
    death = meter.take_death()
    assert death is not None
    return death


def peak_of(model: nn.Module) -> float:
    meter = CpuMeter(model, [])
    meter.begin()
    model(torch.ones(BATCH, WIDTH)).square().mean().backward()
    model.zero_grad()
    return meter.end().peak_bytes


def look_into(death: Death, model: nn.Module, **changes: Any) -> OutOfMemory:
    facts: dict[str, Any] = {
        "step": 7,
        "settings_text": "fp32",
        "autocast": "fp32",
        "formats": ["bf16", "fp16"],
        "layers": list_layers(model),
        "source": "counted",
    }
    return autopsy(death, **{**facts, **changes})


class TestSavings:
    def test_of_a_block(self) -> None:
        model = nn.Sequential(Block(), Block(), Block())
        savings = Savings(died(model, peak_of(model) - 1))
        assert savings.saved_bytes(["1"]) == 2 * WIDE
        assert savings.saved_bytes(["0", "1"]) == 4 * WIDE
        assert savings.saved_bytes(["1.up"]) == 0  # its output alone, which stays
        assert savings.saved_bytes(["1.down"]) == 0

    def test_an_input_that_nobody_else_holds_is_held_then(self) -> None:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Rectified(), Block(), Block())
        savings = Savings(died(model, peak_of(model) - 1))
        # saves the ReLU's result, and holds what the first layer gave it
        assert savings.saved_bytes(["1"]) == 0

    def test_fixed_bytes(self) -> None:
        model = nn.Sequential(Block(), Block())
        parameters = sum(p.numel() * F32 for p in model.parameters())
        savings = Savings(died(model, parameters + NARROW + 3 * WIDE, backward=False))
        assert savings.fixed_bytes == parameters
        assert savings.missing_gradient_bytes == parameters

    def test_the_cheapest_that_is_enough(self) -> None:
        model = nn.Sequential(Block(), Block(), Block(), Block())
        death = died(model, peak_of(model) - 1)
        savings = Savings(death)
        names = [layer.name for layer in list_layers(model)]
        one = savings.choose(names, short_bytes=1, limit_bytes=math.inf)
        two = savings.choose(names, short_bytes=2 * WIDE + 1, limit_bytes=math.inf)
        assert len(one) == 1
        assert len(two) == 2
        assert savings.cost_s(one) == min(savings.cost_s([name]) for name in ("0", "1", "2") if savings.saved_bytes([name]) > 0)
        assert savings.choose(names, short_bytes=1e9, limit_bytes=math.inf) == ()
        assert savings.choose(names, short_bytes=1, limit_bytes=1.0) == ()  # there is no room to compute it again

    def test_not_the_layer_that_dies(self) -> None:
        model = nn.Sequential(Block())
        death = died(model, peak_of(model) - 1)
        assert death.layer.startswith("0")
        assert Savings(death).choose(["0"], short_bytes=1, limit_bytes=math.inf) == ()


class TestReport:
    def test_backward(self) -> None:
        model = nn.Sequential(Block(), Block(), Block())
        limit = peak_of(model) - 1
        found = look_into(died(model, limit), model, known_peak_bytes=math.nan)
        text = "\n".join(found.report)
        assert found.report[0].startswith("Out of memory at step 7 (fp32) in the backward pass of ")
        assert found.report[0].endswith(f", above the budget of {limit / 1000:.1f} kB")
        assert "Held at that moment: activations " in text
        assert "checkpointed besides, 32.8 kB less would have been held at that moment: the step would have got past" in text
        assert "Estimate: with autocast bf16/fp16, at best " in text
        assert "which is enough" not in text
        assert "What the optimizer's step needs is not known" in text
        assert "optimizer.zero_grad()" in text
        assert len(found.layers_to_checkpoint) == 1

    def test_estimates_say_so(self) -> None:
        model = nn.Sequential(Block(), Block(), Block())
        found = look_into(died(model, peak_of(model) - 1), model)
        for sentence in found.report:
            if "would have" in sentence or "about" in sentence:
                assert sentence.startswith("Estimate: ")

    def test_not_in_half_precision_again(self) -> None:
        model = nn.Sequential(Block(), Block())
        death = died(model, peak_of(model) - 1)
        assert "autocast bf16" not in "\n".join(look_into(death, model, autocast="bf16").report)
        assert "autocast fp16," in "\n".join(look_into(death, model, formats=["fp16"]).report)

    def test_known_peak(self) -> None:
        model = nn.Sequential(Block(), Block())
        death = died(model, 40_000, backward=False)
        text = "\n".join(look_into(death, model, known_peak_bytes=90_000.0).report)
        assert "had its peak at 90.0 kB, as measured, 50.0 kB above 40.0 kB" in text
        assert "is not known: it was not reached" not in text

    def test_no_batch_is_small_enough(self) -> None:
        model = nn.Sequential(nn.Linear(WIDTH, 256), nn.Linear(256, 256), nn.Linear(256, WIDTH))
        parameters = sum(p.numel() * F32 for p in model.parameters())
        death = died(model, 2 * parameters - 1)
        text = "\n".join(look_into(death, model).report)
        assert f"no batch is small enough. The least possible is more than {2 * parameters / 1000:.1f} kB" in text

    def test_what_only_an_exception_tells(self) -> None:
        error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has")
        death = Death.told_by(error, "cuda:0")
        found = look_into(death, nn.Sequential(Block()))
        assert found.report[0] == "Out of memory at step 7 (fp32) on cuda:0"
        assert found.report[1] == "An operator asked for 21.0 MB."
        assert found.profile is None
        assert found.cause == "allocator"
        assert math.isnan(found.limit_bytes)
        assert math.isnan(found.allocated_bytes)

    def test_of_a_device(self) -> None:
        """A limit and what was held are known, the picture is not."""
        sizes = {"requested_bytes": 2e9, "limit_bytes": 8e9, "allocated_bytes": 7.5e9}
        death = Death(cause="allocator", device="cuda:0", phase="forward", layer="2", **sizes)
        found = look_into(death, nn.Sequential(Block()))
        assert found.report[0] == "Out of memory at step 7 (fp32) in the forward pass of 2 on cuda:0"
        held = "An operator asked for 2.0 GB with 7.5 GB held already; the memory of cuda:0 is 8.0 GB, 1.5 GB too little."
        assert held in found.report
        assert "not known, as the step was not followed" in found.report[2]

    def test_holds_nothing(self) -> None:
        model = nn.Sequential(Block(), Block())
        references = [weakref.ref(p) for p in model.parameters()]
        death = died(model, peak_of(model) - 1)
        found = look_into(death, model)
        del model
        assert all(reference() is None for reference in references)
        assert found.profile is not None
        assert "OutOfMemory: Out of memory at step 7" in repr(found)


def test_error_reference() -> None:
    error = MemoryBudgetError("x")
    reference = ErrorReference(error)
    assert reference.is_weak
    assert reference() is error
    del error
    assert reference() is None
