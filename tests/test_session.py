"""AmpSession: the conveniences above the loop."""

from __future__ import annotations

import io
import math
from contextlib import redirect_stderr
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import amp_widgets as aw
from amp_widgets.errors import DemoError, RunError, SessionClosedError
from amp_widgets.session import AmpSession, newest_session


@pytest.fixture
def session() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    made = AmpSession(model, torch.optim.SGD(model.parameters(), lr=0.1))
    yield made
    made.close()


def train_step(session: AmpSession, model: nn.Module, optimizer: torch.optim.Optimizer, factor: float = 1.0) -> None:
    optimizer.zero_grad()
    with session.autocast():
        loss = model(torch.ones(2, 3)).float().sum() * factor
    session.scaler.scale(loss).backward()
    session.scaler.step(optimizer)
    session.scaler.update()


def test_steps_pass_batches_through_with_one_bar(session: AmpSession) -> None:
    batches = [object(), object(), object()]
    shown = io.StringIO()
    with redirect_stderr(shown):
        assert list(session.steps(batches, epochs=2)) == batches * 2
    last = shown.getvalue().rsplit("\r", 1)[-1]
    assert "6/6" in last
    assert shown.getvalue().count("\n") == 1


def test_steps_of_an_unsized_iterable(session: AmpSession) -> None:
    with redirect_stderr(io.StringIO()):
        assert list(session.steps(x for x in "abc")) == ["a", "b", "c"]
        with pytest.raises(RunError, match="used up after one epoch"):
            list(session.steps((x for x in "abc"), epochs=2))


def test_leaving_the_loop_early_closes_the_open_step(session: AmpSession) -> None:
    model = session._model
    assert model is not None
    with redirect_stderr(io.StringIO()):
        for _ in session.steps(range(3)):
            with session.autocast():
                model(torch.randn(2, 3))
            break
    assert not session.step_in_progress  # nothing was scaled: nothing is left of it


def test_last_step_skipped_guards_a_scheduler(session: AmpSession) -> None:
    (optimizer,) = session._optimizers
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    session.request(autocast="fp16", init_scale=2.0**8)
    model = session._model
    assert model is not None
    for factor in (1.0, math.inf, 1.0):
        train_step(session, model, optimizer, factor)
        assert session.last_step_skipped is (factor == math.inf)
        if not session.last_step_skipped:
            scheduler.step()
    assert scheduler.last_epoch == 2


def test_dashboard_state_is_whole(session: AmpSession) -> None:
    state = session.dashboard_state()
    assert (state.run, state.step, state.device, state.torch_version) == ("none", 0, "cpu", torch.__version__)
    assert [layer.name for layer in state.layers] == ["0", "1", "2"]
    assert state.pending is None
    session.request(autocast="bf16")
    assert session.dashboard_state().pending == {"autocast": "bf16"}
    assert math.isnan(state.loss)  # nothing was trained: not measured, not zero


def test_context_manager_and_repr() -> None:
    model = nn.Linear(2, 2)
    with AmpSession(model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
        assert repr(session) == "<AmpSession of Linear on cpu: fp32, step 0>"
        assert newest_session() is session
    assert session.closed
    assert repr(session) == "<AmpSession of Linear on cpu: closed>"
    assert newest_session() is None


def test_public_names() -> None:
    assert aw.AmpSession is AmpSession
    assert aw.Settings().autocast == "fp32"
    assert set(aw.__all__) <= set(dir(aw))
    with pytest.raises(AttributeError, match="no attribute 'Session'"):
        aw.Session  # noqa: B018


def test_an_unknown_demo_names_the_known() -> None:
    with pytest.raises(DemoError, match="got 'mnist', expected one of 'digits'"):
        aw.demo("mnist")


@pytest.mark.parametrize("name", ["digits", "text"])
def test_demos_learn_and_leave_the_random_state_alone(name: str) -> None:
    before = torch.get_rng_state()
    session = aw.demo(name)
    assert torch.equal(before, torch.get_rng_state())
    assert session.run_state == "ready"
    assert any(layer.name == "layers.0" and layer.why_not is None for layer in session.layers)
    session.request(checkpointed=["layers.*"])
    steps = 15 if name == "digits" else 4
    for _ in range(steps):
        session.single_step()
        while session.run_state != "paused" or session.dashboard_state().step == 0:
            session.wait(0.01)
    while session.dashboard_state().step < steps:
        session.wait(0.01)
    losses = session.history.columns("loss")["loss"]
    assert losses[-1] < losses[0]
    assert len(session.settings.checkpointed) >= 4
    session.close()


def test_a_step_that_could_not_be_measured_is_said(session: AmpSession) -> None:
    model = session._model
    assert model is not None
    (optimizer,) = session._optimizers

    train_step(session, model, optimizer)
    assert session.dashboard_state().notes == ()
    with FlopCounterMode(display=False):  # comes first, and ours sees what it runs
        train_step(session, model, optimizer)
    assert session.dashboard_state().notes == ()
    session.memory_budget = 1e9
    for _ in range(2):
        with FakeTensorMode(allow_non_fake_inputs=True):
            session.begin_step()
        train_step(session, model, optimizer)
        because = "torch's FakeTensorMode was active when the step began, under which ops are traced or faked"
        assert session.dashboard_state().notes == (
            f"The memory of the last step was not measured: {because}.",
            f"The memory budget is not watched: {because}.",
        )
    assert [event.reason for event in session.history.events("note")] == [f"The memory budget is not watched: {because}."]
    train_step(session, model, optimizer)
    assert session.dashboard_state().notes == ()


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.arange(4.0))


def test_steps_over_a_dataset_without_a_length(session: AmpSession) -> None:
    loader = torch.utils.data.DataLoader(Stream(), batch_size=None)
    with redirect_stderr(io.StringIO()):
        assert [x.item() for x in session.steps(loader, epochs=2)] == [0.0, 1.0, 2.0, 3.0] * 2


def test_steps_draw_no_random_number_of_their_own(session: AmpSession) -> None:
    loader = torch.utils.data.DataLoader(list(range(6)), shuffle=True)  # type: ignore[arg-type]  # a list is a dataset
    torch.manual_seed(3)
    expected = [int(x) for _ in range(2) for x in loader]
    torch.manual_seed(3)
    with redirect_stderr(io.StringIO()):
        assert [int(x) for x in session.steps(loader, epochs=2)] == expected


def test_last_step_skipped_goes_on_after_close(session: AmpSession) -> None:
    model = session._model
    assert model is not None
    (optimizer,) = session._optimizers
    session.request(autocast="fp16", init_scale=2.0**8)
    told = []
    for step, factor in enumerate((1.0, math.inf, 1.0, math.inf, 1.0)):
        if step == 2:
            session.close()
        train_step(session, model, optimizer, factor)
        told.append(session.last_step_skipped)
    assert told == [False, True, False, True, False]
    with pytest.raises(SessionClosedError, match="start: the session was closed"):
        session.start()
    with pytest.raises(SessionClosedError, match="fit: the session was closed"):
        session.fit([], nn.functional.cross_entropy)


def test_the_newest_open_session_is_found_when_a_newer_is_closed(session: AmpSession) -> None:
    other = nn.Linear(2, 2)
    newer = AmpSession(other, torch.optim.SGD(other.parameters(), lr=0.1))
    assert newest_session() is newer
    newer.close()
    assert newest_session() is session
