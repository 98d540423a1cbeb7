"""Ctrl-C during a fake step arrives after it, and torch's modes are in order then."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from amp_widgets.analysis.fake_step import fake_steps
from amp_widgets.analysis.held_interrupt import interrupts_held
from amp_widgets.analysis.on_cuda import predict_on_cuda
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
