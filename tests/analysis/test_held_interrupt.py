"""Ctrl-C during a fake step arrives after it, and torch's modes are in order then; elsewhere it is not lost."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from amp_widgets.analysis import held_interrupt
from amp_widgets.analysis.batch_sizes import largest_batch
from amp_widgets.analysis.compare import compare
from amp_widgets.analysis.cuda_corners import predict_corners_on_cuda
from amp_widgets.analysis.fake_step import fake_steps
from amp_widgets.analysis.held_interrupt import interrupts_held, interrupts_noted, raise_lost_interrupt
from amp_widgets.analysis.on_cuda import predict_on_cuda
from amp_widgets.analysis.planner import plan
from amp_widgets.session import AmpSession


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    GONE_ON.clear()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Interrupted(nn.Module):
    """Ctrl-C comes in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.presses = 0

    def forward(self, x: Tensor) -> Tensor:
        middle = self.layers[0](x)
        middle.register_hook(self.press)
        out: Tensor = self.layers[1:](middle)
        return out

    def press(self, gradient: Tensor) -> None:
        if self.presses:
            signal.raise_signal(signal.SIGINT)
            GONE_ON.append(True)


GONE_ON: list[bool] = []


def session() -> tuple[AmpSession, tuple[Tensor, Tensor]]:
    model = Interrupted()
    return AmpSession(model, torch.optim.SGD(model.parameters(), lr=0.1)), (torch.randn(2, 4), torch.randn(2, 4))


def press(ours: AmpSession, on: bool) -> None:
    model: Any = ours.model
    model.presses = int(on)


def test_it_arrives_after_the_fake_step_and_leaves_no_mode() -> None:
    ours, batch = session()
    with ours:
        with fake_steps(ours, batch, F.mse_loss) as steps:
            press(ours, on=True)
            with pytest.raises(KeyboardInterrupt):
                steps.step()
            assert GONE_ON
            assert steps._training is None
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            assert not _get_current_dispatch_mode_stack()
            assert not torch.overrides._get_current_function_mode_stack()
            press(ours, on=False)
            assert steps.step().predicted
        GONE_ON.clear()
        press(ours, on=True)
        with pytest.raises(KeyboardInterrupt):
            predict_on_cuda(ours, batch, F.mse_loss)
        assert GONE_ON
        assert not _get_current_dispatch_mode_stack()
        assert not torch.overrides._get_current_function_mode_stack()
        press(ours, on=False)
        F.mse_loss(ours.model(batch[0]), batch[1]).backward()  # type: ignore[misc]


def test_a_handler_that_does_not_raise_is_called_after_the_step_which_goes_on() -> None:
    ours, batch = session()
    came: list[int] = []

    def mine(number: int, frame: FrameType | None) -> None:
        assert not _get_current_dispatch_mode_stack()
        came.append(number)

    signal.signal(signal.SIGINT, mine)
    with ours, fake_steps(ours, batch, F.mse_loss) as steps:
        press(ours, on=True)
        assert steps.step().predicted
    assert came == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is mine


def test_one_within_another_hands_it_on_to_the_end() -> None:
    said: list[str] = []

    def nested() -> None:
        with interrupts_held():
            with interrupts_held():
                signal.raise_signal(signal.SIGINT)
                said.append("inner")
            said.append("outer")

    with pytest.raises(KeyboardInterrupt):
        nested()
    assert said == ["inner", "outer"]


def test_an_error_of_the_step_does_not_hide_it() -> None:
    def failing() -> None:
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("test")

    with pytest.raises(KeyboardInterrupt) as caught:
        failing()
    assert isinstance(caught.value.__context__, ValueError)


def test_where_signals_are_ignored_or_on_another_thread_nothing_changes() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts_held():
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)
    seen: list[Any] = []

    def elsewhere() -> None:
        with interrupts_held():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


# ---- one that is lost -------------------------------------------------------------------------------------------------------


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What Python has dropped, as it says itself."""
    errors: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: errors.append(args.exc_type))
    return errors


class Thing:
    pass


def lose_one() -> None:
    """Ctrl-C comes within the callback of a weak reference, from which no exception gets out."""
    thing = Thing()
    reference = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
    del thing
    assert reference() is None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        first, last = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.3), nn.ReLU()), nn.Sequential(nn.Linear(16, 4), nn.Tanh())
        self.layers = nn.Sequential(first, nn.BatchNorm1d(16), last)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class Loses:
    """Loses an interrupt when it is called for the n-th time; then it must not be called any more."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            lose_one()


GRID = {"autocast": ["fp32", "bf16"], "checkpointed": ["none", "all"]}
IN_THE_LOSS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "compare": (lambda s, b, f: s.compare(b, f, grid=GRID, steps=2, rounds=2), (1, 2, 4, 5, 9, 16, 28)),  # 28 is the last step
    "check": (lambda s, b, f: s.check(b, f), (1, 2)),
    "precision_cost": (lambda s, b, f: s.precision_cost(b, f), (1, 2)),
    "dtype_map": (lambda s, b, f: s.dtype_map(b, f), (1,)),
    "preflight": (lambda s, b, f: s.preflight(b, f), (1,)),
    "profile_step": (lambda s, b, f: s.profile_step(b, f), (1, 2)),  # the second one is that which counts
}
BETWEEN: dict[str, Callable[..., Any]] = {
    "plan": lambda s, b, f, act: plan(s, budget_bytes=1e4, batch=b, loss_fn=f, cancelled=act),
    "largest_batch": lambda s, b, f, act: largest_batch(s, b, f, budget_bytes=1e5, cancelled=act),
    "predict_on_cuda": lambda s, b, f, act: predict_corners_on_cuda(s, b, f, grid=GRID, on_progress=act),
    "compare": lambda s, b, f, act: compare(s, b, f, grid=GRID, steps=1, rounds=1, on_progress=act),
}
CASES = [(verb, at) for verb, (_, ats) in IN_THE_LOSS.items() for at in ats]


@pytest.mark.parametrize(("verb", "at"), CASES)
def test_it_is_raised_before_the_next_pass_or_at_the_end(verb: str, at: int, untouched: Any, dropped: list[Any]) -> None:
    torch.manual_seed(0)
    model = Net()
    run = IN_THE_LOSS[verb][0]
    loses = Loses(at)
    batch = torch.randn(8, 4), torch.randn(8, 4)

    def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
        loses()
        return F.mse_loss(output, targets)

    with AmpSession(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)) as ours:
        with untouched(ours), pytest.raises(KeyboardInterrupt):
            run(ours, batch, loss_fn)
        assert dropped == [KeyboardInterrupt]
        assert loses.calls == at
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with untouched(ours):  # it is over
            run(ours, batch, loss_fn)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("verb", BETWEEN)
def test_also_between_predicted_steps(verb: str, at: int, untouched: Any, dropped: list[Any]) -> None:
    torch.manual_seed(0)
    model = Net()
    loses = Loses(at)
    batch = torch.randn(8, 4), torch.randn(8, 4)
    after: list[bool] = []

    def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
        after.append(loses.calls >= at)
        return F.mse_loss(output, targets)

    def act(*args: Any) -> bool:
        loses()
        return False

    with AmpSession(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)) as ours:
        with untouched(ours), pytest.raises(KeyboardInterrupt):
            BETWEEN[verb](ours, batch, loss_fn, act)
    assert dropped == [KeyboardInterrupt]
    assert not any(after)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_one_that_is_not_lost_is_raised_once(dropped: list[Any]) -> None:
    with pytest.raises(KeyboardInterrupt), interrupts_noted():
        signal.raise_signal(signal.SIGINT)
    raise_lost_interrupt()
    with interrupts_noted():
        raise_lost_interrupt()
    assert not dropped


@pytest.mark.parametrize("checks", [False, True])
def test_one_context_within_another(checks: bool, dropped: list[Any]) -> None:
    """One that was lost before the inner one began, and one that was lost in it."""

    def nested(before: bool) -> None:
        with interrupts_noted():
            if before:
                lose_one()
            with interrupts_noted():
                if not before:
                    lose_one()
                if checks:
                    raise_lost_interrupt()
            pytest.fail("it goes on")

    for before in (True, False):
        with pytest.raises(KeyboardInterrupt):
            nested(before)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert dropped == [KeyboardInterrupt] * 2
    raise_lost_interrupt()


def test_an_error_does_not_hide_one_that_was_lost(dropped: list[Any]) -> None:
    def failing() -> None:
        with interrupts_noted():
            lose_one()
            raise ValueError("test")

    with pytest.raises(KeyboardInterrupt) as caught:
        failing()
    assert isinstance(caught.value.__context__, ValueError)


def test_a_handler_that_raises_nothing_is_called_and_nothing_is_noted(dropped: list[Any]) -> None:
    came: list[int] = []

    def mine(number: int, frame: FrameType | None) -> None:
        came.append(number)

    signal.signal(signal.SIGINT, mine)
    with interrupts_noted():
        lose_one()
        raise_lost_interrupt()
    assert came == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is mine


def test_a_handler_that_was_set_within_stays() -> None:
    def mine(number: int, frame: FrameType | None) -> None:
        pass

    with interrupts_noted():
        signal.signal(signal.SIGINT, mine)
    assert signal.getsignal(signal.SIGINT) is mine


def test_on_another_thread_or_where_signals_are_ignored_nothing_is_noted() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts_noted():
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)
    seen: list[Any] = []

    def elsewhere() -> None:
        with interrupts_noted():
            raise_lost_interrupt()
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_an_interrupt_at_any_line_of_it_leaves_the_handler() -> None:
    def tracing(at: int) -> Callable[[FrameType, str, Any], Any]:
        def local(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal lines
            if event == "line":
                lines += 1
                if lines == at:
                    interrupted.append(at)
                    raise KeyboardInterrupt
            return local

        lines = 0
        return lambda frame, event, argument: local if frame.f_code.co_filename == held_interrupt.__file__ else None

    interrupted: list[int] = []
    outside = sys.gettrace()
    for at in range(1, 200):
        sys.settrace(tracing(at))
        try:
            with contextlib.suppress(KeyboardInterrupt), interrupts_noted(), interrupts_noted():
                pass
        finally:
            sys.settrace(outside)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, at
        raise_lost_interrupt()
        if len(interrupted) < at:
            break
    assert 30 < len(interrupted) < 199
