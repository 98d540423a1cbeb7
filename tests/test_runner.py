"""The background run: every control takes effect at a boundary, an exception ends it cleanly, nothing is kept alive."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from amp_widgets.errors import RunError
from amp_widgets.session import AmpSession

PATIENCE_S = 20.0


class Gate:
    """Batches that are handed out one by one, when the test says so."""

    def __init__(self, *, endless: bool = True, total: int = 1000) -> None:
        self.asked = threading.Semaphore(0)
        self.allowed = threading.Semaphore(0)
        self.open = threading.Event()
        self.total = total

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(self.total):
            self.asked.release()
            while not self.open.is_set() and not self.allowed.acquire(timeout=0.01):
                pass
            yield torch.randn(4, 3, generator=generator), torch.randint(2, (4,), generator=generator)

    def let(self, count: int) -> None:
        """Hand out `count` batches and wait until the next is asked for: all of them are trained."""
        for _ in range(count):
            self.allowed.release()
        for _ in range(count):
            assert self.asked.acquire(timeout=PATIENCE_S)


class Case:
    def __init__(self, batches: Any = None, loss_fn: Any = nn.functional.cross_entropy, **fit: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.session = AmpSession(self.model, self.optimizer)
        self.gate = Gate()
        self.session.fit(self.gate if batches is None else batches, loss_fn, **{"epochs": 1, "start": False, **fit})

    def begin(self) -> None:
        self.session.start()
        assert self.gate.asked.acquire(timeout=PATIENCE_S)

    def until(self, state: str) -> None:
        wait_for(lambda: self.session.run_state == state, state)


def wait_for(condition: Any, what: str) -> None:
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / 0.005)):
        if condition():
            return
        pause.wait(0.005)
    raise AssertionError(f"waited in vain for: {what}")


@pytest.fixture
def case() -> Iterator[Case]:
    made = Case()
    yield made
    made.gate.open.set()
    made.session.close()


def batches_of(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 3, generator=generator), torch.randint(2, (4,), generator=generator)) for _ in range(count)]


def test_a_run_equals_the_loop_in_a_cell() -> None:
    batches = batches_of(7)
    background = Case(batches, epochs=2, start=True)
    assert background.session.wait(PATIENCE_S)
    assert background.session.run_state == "finished"

    cell = Case(batches)
    train_in_cell(cell, batches, epochs=2)
    one, two = (c.session.history.columns("step", "loss") for c in (background, cell))
    assert one["step"].tolist() == two["step"].tolist() == list(range(14))
    assert one["loss"].tolist() == two["loss"].tolist()
    for first, second in zip(background.model.parameters(), cell.model.parameters(), strict=True):
        assert torch.equal(first, second)
    background.session.close()
    cell.session.close()


def test_pause_single_step_resume_stop(case: Case) -> None:
    session = case.session
    assert session.run_state == "ready"
    case.begin()
    assert session.run_state == "running"
    case.gate.let(2)
    session.pause()
    case.gate.allowed.release()  # the batch that is being waited for
    case.until("paused")
    paused_at = session.status().step
    assert paused_at == 2
    session.single_step()
    wait_for(lambda: session.status().step == 3, "one step")
    case.until("paused")
    assert session.status().step == 3
    session.resume()
    case.gate.let(2)
    wait_for(lambda: session.status().step == 5, "two more steps")
    session.stop()
    case.gate.allowed.release()
    assert session.wait(PATIENCE_S)
    assert session.run_state == "stopped"
    assert session.status().step == 5
    states = [e.detail["state"] for e in session.history.events("run")]
    assert states[0] == "running"
    assert states[-1] == "stopped"
    assert "paused" in states


def test_a_request_during_a_pause_is_in_force_at_once(case: Case) -> None:
    case.begin()
    case.session.pause()
    case.gate.allowed.release()
    case.until("paused")
    case.session.request(autocast="bf16")
    wait_for(lambda: case.session.settings.autocast == "bf16", "the request")
    assert case.session.run_state == "paused"


def test_single_step_from_ready() -> None:
    case = Case(batches_of(5))
    case.session.single_step()
    case.until("paused")
    wait_for(lambda: case.session.status().step == 1, "one step")
    case.session.start()
    assert case.session.wait(PATIENCE_S)
    assert case.session.status().step == 5
    case.session.close()


def test_started_again_it_goes_on_from_the_present_weights() -> None:
    case = Case(batches_of(3))
    for expected in (3, 6):
        case.session.start()
        assert case.session.wait(PATIENCE_S)
        assert case.session.status().step == expected
    case.session.close()


def test_reset_restores_weights_and_optimizer_but_not_the_history() -> None:
    case = Case(batches_of(4))
    first = {k: v.clone() for k, v in case.model.state_dict().items()}
    case.session.request(autocast="fp16", init_scale=2.0**8, growth_interval=2)
    case.session.start()
    case.session.wait(PATIENCE_S)
    losses = case.session.history.columns("loss", "scale")
    case.session.reset()
    for name, tensor in case.model.state_dict().items():
        assert torch.equal(tensor, first[name])
    assert case.session.settings.autocast == "fp16"  # what is in force stays
    case.session.start()
    case.session.wait(PATIENCE_S)
    again = case.session.history.columns("loss", "scale")
    assert again["loss"][4:].tolist() == losses["loss"].tolist()
    assert again["scale"][4:].tolist() == losses["scale"].tolist()
    assert "reset" in [e.detail["state"] for e in case.session.history.events("run")]
    case.session.close()


def test_reset_of_a_running_run_happens_on_its_thread(case: Case) -> None:
    first = {k: v.clone() for k, v in case.model.state_dict().items()}
    case.begin()
    case.gate.let(2)
    case.session.pause()
    case.gate.allowed.release()
    case.until("paused")
    case.session.reset()
    wait_for(lambda: all(torch.equal(t, first[n]) for n, t in case.model.state_dict().items()), "the first weights")
    assert case.session.run_state == "paused"


class Canary:
    """Fails at the third loss, holding on to nothing."""

    def __init__(self) -> None:
        self.calls = 0
        self.tensors: list[weakref.ref[torch.Tensor]] = []

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.tensors += [weakref.ref(output), weakref.ref(target)]
        if self.calls == 3:
            large = torch.zeros(1000)
            self.tensors.append(weakref.ref(large))
            raise ZeroDivisionError("<b>of the user's own</b>")
        return nn.functional.cross_entropy(output, target)


def test_an_exception_ends_the_run_and_keeps_no_tensors() -> None:
    canary = Canary()
    generated = ((torch.randn(4, 3), torch.randint(2, (4,))) for _ in range(9))
    case = Case(generated, canary, start=True)
    case.until("failed")
    state = case.session.dashboard_state()
    assert state.error is not None
    assert "ZeroDivisionError: <b>of the user's own</b>" in state.error
    assert "raise ZeroDivisionError" in state.error
    case.session._runner.join()  # type: ignore[union-attr]
    gc.collect()
    assert [ref() is None for ref in canary.tensors] == [True] * 7
    with pytest.raises(ZeroDivisionError, match="of the user's own") as caught:
        case.session.wait(PATIENCE_S)
    assert any("in __call__" in note for note in caught.value.__notes__)
    assert case.session.wait(PATIENCE_S)  # it is raised once
    assert not case.session.step_in_progress
    assert case.session.status().step == 2
    case.session.close()


def test_a_failed_run_can_be_started_again() -> None:
    canary = Canary()
    case = Case(batches_of(4), canary, start=True)
    case.until("failed")
    case.session.start()
    assert case.session.wait(PATIENCE_S)
    assert case.session.run_state == "finished"
    assert case.session.dashboard_state().error is None
    case.session.close()


def test_wrong_moments_are_refused_with_the_reason(case: Case) -> None:
    session = case.session
    with pytest.raises(RunError, match="pause: the run is ready"):
        session.pause()
    with pytest.raises(RunError, match="resume: the run is ready"):
        session.resume()
    case.begin()
    with pytest.raises(RunError, match="running already"):
        session.start()
    with pytest.raises(RunError, match="pause it first"):
        session.single_step()
    with pytest.raises(RunError, match="a run is running; stop it first"):
        session.fit(case.gate, nn.functional.cross_entropy)
    with pytest.raises(RunError, match="a background run is alive"):
        next(iter(session.steps([1, 2])))
    assert not session.wait(0.01)


@pytest.mark.parametrize(
    ("batches", "said"),
    [([torch.ones(4, 3)], "got a batch of a Tensor"), ([], "no batch at all"), ([(1, 2, 3)], "got a batch of 3 parts")],
)
def test_batches_that_do_not_fit(batches: Any, said: str) -> None:
    case = Case(batches, start=True)
    with pytest.raises(RunError, match=said):
        case.session.wait(PATIENCE_S)
    case.session.close()


def test_an_iterator_used_up_is_said() -> None:
    case = Case(iter(batches_of(2)), epochs=2, start=True)
    with pytest.raises(RunError, match="no batch in epoch 2"):
        case.session.wait(PATIENCE_S)
    case.session.close()


def test_close_stops_the_run_and_frees_the_model(case: Case) -> None:
    case.begin()
    case.gate.let(1)
    case.gate.open.set()
    case.session.close()
    assert case.session.run_state == "none"
    model = weakref.ref(case.model)
    del case.model, case.optimizer
    gc.collect()
    assert model() is None
    with pytest.raises(RunError, match="no background run"):
        case.session.start()


def test_without_an_optimizer_there_is_no_fit() -> None:
    model = nn.Linear(2, 2)
    session = AmpSession(model)
    with pytest.raises(RunError, match="no optimizer"):
        session.fit([], nn.functional.cross_entropy)
    session.close()


def test_start_beside_a_loop_in_a_cell_is_refused() -> None:
    case = Case(batches_of(2))
    refused = []

    def press_start() -> None:  # as the pump does, at a boundary
        try:
            case.session.start()
        except RunError as error:
            refused.append(str(error))

    case.session.on_boundary.append(press_start)
    train_in_cell(case, batches_of(1))
    assert refused == ["start: your own loop is training this model in a cell; wait for its end or interrupt it first"]
    case.session.on_boundary.clear()
    case.session.start()
    assert case.session.wait(PATIENCE_S)
    case.session.close()


def train_in_cell(case: Case, batches: list[tuple[torch.Tensor, torch.Tensor]], epochs: int = 1) -> None:
    for inputs, targets in case.session.steps(batches, epochs=epochs):
        case.optimizer.zero_grad()
        with case.session.autocast():
            loss = nn.functional.cross_entropy(case.model(inputs), targets)
        case.session.scaler.scale(loss).backward()
        case.session.scaler.step(case.optimizer)
        case.session.scaler.update()
