"""Single weights with their gradients, read between two steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from amp_widgets.analysis import weights
from amp_widgets.analysis.weights import DEFAULT_RATE, MOST_WEIGHTS, WeightReader
from amp_widgets.session import AmpSession


def reader_of(session: AmpSession) -> WeightReader:
    return WeightReader(session, session.between_steps)


def test_each_parameter_gives_the_weight_with_the_middle_gradient() -> None:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    with AmpSession(model, torch.optim.SGD(model.parameters(), lr=0.5)) as session:
        read = reader_of(session)
        assert read() == ()  # no gradients yet
        model.weight.grad = torch.tensor([[0.0, -0.3, 0.1], [float("inf"), 9.0, float("nan")]])
        model.bias.grad = torch.zeros(2)
        (sample,) = read()
        assert sample == ("weight[0, 1]", 2.0, pytest.approx(-0.3), 0.5, "", None, 0)
        # the same weight is read again, whatever its gradient is by then; without gradients the last reading stays
        model.weight.grad = torch.tensor([[5.0, 7.0, 0.1], [1.0, 2.0, 3.0]])
        assert [one.gradient for one in read()] == [7.0]
        model.zero_grad()
        assert [one.gradient for one in read()] == [7.0]


def test_scalars_many_and_without_an_optimizer() -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList(nn.Parameter(torch.tensor(float(i + 1))) for i in range(MOST_WEIGHTS + 5))

    model = Scales()
    for parameter in model.parameters():
        parameter.grad = torch.tensor(2.0)
    with AmpSession(model) as session:
        samples = reader_of(session)()
    assert len(samples) == MOST_WEIGHTS
    assert samples[1] == ("scales.1", 2.0, 2.0, DEFAULT_RATE, None, None, 0)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), ""),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1), "SGD with momentum and weight decay"),
        (lambda p: torch.optim.Adam(p, lr=0.1), "Adam"),
    ],
)
def test_the_optimizer_is_named_and_its_last_change_is_what_was_seen(make: Callable[..., Any], name: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = make(model.parameters())
    inputs = torch.randn(8, 4)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    with AmpSession(model, optimizer) as session:
        read = reader_of(session)
        step()
        first = read()[0]
        assert (first.optimizer, first.change, first.step) == (name, None, 1)
        step()
        second = read()[0]
        assert (second.label, second.change) == (first.label, second.weight - first.weight)
        assert second.change != 0
        if not name:
            assert second.change == pytest.approx(-0.1 * second.gradient, rel=1e-4)
        assert read()[0] == second  # and again the same
        step()
        step()
        assert read()[0].change is None  # of two steps together


@pytest.fixture
def running() -> Iterator[tuple[AmpSession, dict[int, dict[str, torch.Tensor]]]]:
    """A background run in fp16 with loss scaling, and by number of steps completed the true gradients."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batch = (torch.randn(16, 8), torch.randn(16, 1))
    true: dict[int, dict[str, torch.Tensor]] = {}
    with AmpSession(model, optimizer) as session:
        session.request(autocast="fp16", init_scale=2.0**12)

        def keep() -> None:
            true[session.step] = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}

        trains = threading.Event()
        session.on_boundary += [keep, trains.set]
        session.fit([batch] * 5, nn.functional.mse_loss, epochs=None)
        assert trains.wait(20)
        yield session, true
        session.stop()
        session.wait()


def test_while_a_run_trains_the_numbers_are_those_between_two_steps(running: Any) -> None:
    session, true = running
    read = reader_of(session)
    labels = None
    for _ in range(20):
        samples = read()
        assert len(samples) == 4  # never a part of them
        assert labels in (None, [one.label for one in samples])
        labels = [one.label for one in samples]
        (step,) = {one.step for one in samples}
        for one in samples:
            name, _, place = one.label.partition("[")
            index = tuple(int(part) for part in place.rstrip("]").split(", "))
            assert one.gradient == float(true[step][name][index])  # not multiplied by 4096
            assert one.optimizer == "Adam"
            assert one.change is not None  # of one step of Adam, about as large as the learning rate
            assert 1e-5 < abs(one.change) < 1.1e-2
    session.pause()


def test_a_loop_of_the_users_own_on_another_thread_is_read_between_its_steps() -> None:
    torch.set_num_threads(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    trains, ends = threading.Event(), threading.Event()

    def loop() -> None:
        while not ends.is_set():
            optimizer.zero_grad()
            with session.autocast():
                loss = model(torch.ones(2, 4)).square().mean()
            session.scaler.scale(loss).backward()
            session.scaler.step(optimizer)
            session.scaler.update()
            trains.set()

    with AmpSession(model, optimizer) as session:
        session.request(autocast="fp16", init_scale=2.0**12)
        asked_on: set[int] = set()
        read = WeightReader(session, lambda job: session.between_steps(lambda: (asked_on.add(threading.get_ident()), job())[1]))
        thread = threading.Thread(target=loop)
        thread.start()
        try:
            assert trains.wait(20)
            for _ in range(5):
                samples = read()
                assert len(samples) == 2
                assert max(abs(one.gradient) for one in samples) < 100  # 4096 times less than what is scaled
            assert asked_on == {thread.ident}
        finally:
            ends.set()
            thread.join()


def test_what_a_fused_optimizer_left_scaled_in_a_skipped_step_is_unscaled() -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    with AmpSession(model, optimizer) as session:
        session.request(autocast="fp16", init_scale=2.0**10)
        with session.autocast():
            loss = model(torch.tensor([[0.5, 1e4]])).sum()
        session.scaler.scale(loss).backward()
        session.scaler.step(optimizer)
        session.scaler.update()
        assert session.history.last("skipped") == 1
        (sample,) = reader_of(session)()
    assert sample.gradient == pytest.approx(0.5)


def test_a_step_that_takes_long_is_not_waited_for(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    session, _ = running
    read = reader_of(session)
    before = read()
    monkeypatch.setattr(weights, "PATIENCE_S", 0.05)
    here, go_on = threading.Event(), threading.Event()

    def long_step(*_: Any) -> None:
        here.set()
        go_on.wait(20)

    hook = session.model.register_forward_hook(long_step)
    try:
        assert here.wait(20)
        assert read() == before  # those of the reading before
    finally:
        go_on.set()
        hook.remove()


def test_a_step_left_half_done_is_not_shown_with_its_scaled_gradients() -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with AmpSession(model, optimizer) as session:
        session.request(autocast="fp16", init_scale=2.0**10)
        with session.autocast():
            loss = model(torch.tensor([[0.5, 1.0]])).sum()
        session.scaler.scale(loss).backward()
        assert reader_of(session)() == ()
        session.scaler.step(optimizer)
        session.scaler.update()
        assert reader_of(session)()[0].gradient in (0.5, 1.0)
