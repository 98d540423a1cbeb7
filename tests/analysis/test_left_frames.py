"""Whoever keeps the exception that has ended an analysis, as a notebook does, keeps no tensors with it but the user's own."""

from __future__ import annotations

import gc
import signal
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_widgets.analysis.batch_size import confirm
from amp_widgets.analysis.fake_step import fake_steps
from amp_widgets.analysis.held_interrupt import interrupts_held
from amp_widgets.analysis.left_frames import frames_cleared
from amp_widgets.core.memory.budget import MemoryBudgetError
from amp_widgets.session import AmpSession

GRID = {"autocast": ["fp32", "bf16"], "checkpointed": ["none", "all"]}
Job = Callable[[AmpSession, Any, Any], Any]
JOBS: dict[str, Job] = {
    "compare": lambda s, b, f: s.compare(b, f, grid=GRID, steps=1, rounds=1),
    "plan": lambda s, b, f: s.plan(budget_bytes=1e4, batch=b, loss_fn=f),
    "largest_batch": lambda s, b, f: s.largest_batch(batch=b, loss_fn=f, budget_bytes=1e5, grid=GRID, confirm=True),
    "confirm": lambda s, b, f: confirm(s, b, f, batch_size=16),
    "check": lambda s, b, f: s.check(b, f),
    "precision_cost": lambda s, b, f: s.precision_cost(b, f),
    "dtype_map": lambda s, b, f: s.dtype_map(b, f),
    "preflight": lambda s, b, f: s.preflight(b, f),
    "profile_step": lambda s, b, f: s.profile_step(b, f),
}


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    """What is freed is freed because nobody has it, as soon as that is so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    signal.signal(signal.SIGINT, before)


class Net(nn.Module):
    """Does something in its n-th forward pass, or in the backward pass of that; not where numbers are fake."""

    def __init__(self, act: Callable[[], None], *, backward: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))
        self.act = act
        self.backward = backward
        self.at = 0

    def forward(self, x: Tensor) -> Tensor:
        middle: Tensor = self.layers[:2](x)
        if type(x) is Tensor:
            counted.append(None)
            if len(counted) == self.at and self.backward and middle.requires_grad:
                middle.register_hook(lambda _: self.act())
            elif len(counted) == self.at:
                self.act()
        out: Tensor = self.layers[2](middle)
        return out


counted: list[None] = []


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def fail() -> None:
    raise ValueError("test")


CASES = [
    (verb, act, backward)
    for verb in JOBS
    for act in (press, fail)
    for backward in (False, True)
    if not (backward and verb == "preflight")  # it has no backward pass
    and not (act is fail and verb in ("largest_batch", "preflight"))  # they go on, and say what has failed
]


@pytest.mark.parametrize(("verb", "act", "backward"), CASES)
def test_the_gradients_are_free_with_the_next_step(verb: str, act: Callable[[], None], backward: bool) -> None:
    counted.clear()
    model = Net(act, backward=backward)
    batch = torch.randn(8, 4), torch.randn(8, 4)
    optimizer = torch.optim.Adam(model.parameters())
    with AmpSession(model, optimizer) as ours:
        for _ in range(2):
            optimizer.zero_grad()
            F.mse_loss(model(batch[0]), batch[1]).backward()
            optimizer.step()
        gradients = [weakref.ref(p.grad) for p in model.parameters()]
        model.at = len(counted) + 1
        with pytest.raises((KeyboardInterrupt, ValueError)) as kept:
            JOBS[verb](ours, batch, F.mse_loss)
        assert all(p.grad is reference() for p, reference in zip(model.parameters(), gradients, strict=True))
        optimizer.zero_grad()
        assert [reference() for reference in gradients] == [None] * 4
        frames = [entry.frame for entry in kept.traceback]
        assert any(frame.code.name == "forward" and "middle" in frame.f_locals for frame in frames) or backward
    assert kept.value.__traceback__ is not None


def test_steps_of_ones_own_free_them_too() -> None:
    counted.clear()
    model = Net(fail, backward=False)
    batch = torch.randn(8, 4), torch.randn(8, 4)
    with AmpSession(model, torch.optim.SGD(model.parameters(), lr=0.1)) as ours:
        F.mse_loss(model(batch[0]), batch[1]).backward()
        gradient = weakref.ref(model.layers[0].weight.grad)  # type: ignore[arg-type]
        model.at = len(counted) + 1
        with fake_steps(ours, batch, F.mse_loss, verb="test") as steps:
            steps.because = "test"
            with pytest.raises(ValueError, match="test"):
                steps.step()
        model.zero_grad()
        assert gradient() is None


class Thing:
    pass


def test_only_its_own_frames_are_cleared_and_not_those_of_an_error_that_is_being_handled() -> None:
    references: list[weakref.ref[Thing]] = []
    names: dict[str, Any] = {"references": references, "weakref": weakref, "Thing": Thing}
    code = "def run(inner):\n    thing = Thing()\n    references.append(weakref.ref(thing))\n    inner()"
    runs = {}
    for module in ("amp_widgets.analysis.test", "torch.test", "mine", "torchvision.test"):
        there = {**names, "__name__": module}
        exec(code, there)
        runs[module] = there["run"]

    def outside() -> None:
        raise LookupError("outside")

    def inside(error: BaseException) -> None:
        raise error

    def analysis(error: BaseException) -> None:
        def nest(left: list[Any]) -> None:
            if left:
                left[0](lambda: nest(left[1:]))
            else:
                inside(error)

        with frames_cleared():
            nest(list(runs.values()))

    def while_one_is_handled(error: BaseException) -> None:
        try:
            runs["amp_widgets.analysis.test"](outside)
        except LookupError:
            analysis(error)

    for error, cleared in ((KeyboardInterrupt(), 2), (ValueError("test"), 2), (MemoryBudgetError("test"), 1)):
        references.clear()
        with pytest.raises(type(error)) as kept:
            while_one_is_handled(error)
        alive = [reference() is not None for reference in references]
        assert alive == [True, *(at >= cleared for at in range(4))]
        assert isinstance(kept.value.__context__, LookupError)


def test_what_it_was_raised_from_is_cleared_too() -> None:
    there: dict[str, Any] = {"__name__": "amp_widgets.analysis.test", "references": (references := [])}
    there |= {"weakref": weakref, "Thing": Thing}
    exec("def run():\n    thing = Thing()\n    references.append(weakref.ref(thing))\n    raise ValueError('first')", there)

    def second() -> None:
        with frames_cleared():
            try:
                there["run"]()
            except ValueError as error:
                raise RuntimeError("second") from error

    with pytest.raises(RuntimeError, match="second"):
        second()
    assert references[0]() is None


def test_an_interrupt_that_was_held_keeps_no_frame() -> None:
    references: list[weakref.ref[Thing]] = []

    def work() -> None:
        thing = Thing()
        references.append(weakref.ref(thing))
        press()

    def held() -> None:
        with interrupts_held():
            work()

    with pytest.raises(KeyboardInterrupt):
        held()
    assert references[0]() is None
