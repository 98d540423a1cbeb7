"""Going back to a step and on from there: with nothing changed, all comes out as it did, bit by bit."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import amp_widgets as aw
from amp_widgets.core.loop import LiveLoop
from amp_widgets.demos.batches import ShuffledBatches
from amp_widgets.errors import ForkError, RunError, SessionClosedError, SettingsError

COLUMNS = ("step", "loss", "scale", "skipped")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class Net(nn.Module):
    """Dropout, BatchNorm, and a gradient that is too large for fp16 at large scales."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3)) for _ in range(2)
        )
        self.head = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Noisy(torch.utils.data.Dataset[Any]):
    """Draws from every global generator as augmentations do."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, i: int) -> Any:
        noise = torch.rand(6) + random.random() + float(np.random.standard_normal())
        return self.inputs[i] + 0.1 * noise, self.targets[i]


def inputs_and_targets() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(24, 6, generator=generator), torch.randint(3, (24,), generator=generator)


def shuffled() -> Any:
    return DataLoader(TensorDataset(*inputs_and_targets()), batch_size=5, shuffle=True)


def shuffled_by_a_generator() -> Any:
    return DataLoader(Noisy(*inputs_and_targets()), batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(3))


def by_workers() -> Any:
    return DataLoader(Noisy(*inputs_and_targets()), batch_size=5, shuffle=True, num_workers=2)


def by_lasting_workers() -> Any:
    return DataLoader(
        TensorDataset(*inputs_and_targets()), batch_size=5, shuffle=True, num_workers=1, persistent_workers=True,
        generator=torch.Generator().manual_seed(3),
    )  # fmt: skip


def of_a_demo() -> Any:
    return ShuffledBatches(*inputs_and_targets(), batch_size=5, seed=2)


def a_list() -> Any:
    inputs, targets = inputs_and_targets()
    return list(zip(inputs.split(5), targets.split(5), strict=True))


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def make(optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adam, **options: Any) -> aw.AmpSession:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = Net()
    return aw.AmpSession(model, optimizer(model), memory_every=0, **options)


def fit(session: aw.AmpSession, data: Any, epochs: int | None = None) -> None:
    session.fit(data, nn.functional.cross_entropy, epochs, start=False)


def train(session: aw.AmpSession, until: int) -> None:
    """In the background, up to a step, and pause there."""

    def look() -> None:
        if session.step >= until:
            session.pause()

    session.on_boundary.append(look)
    session.start()
    while session.run_state != "paused":
        session.wait(0.01)
    session.on_boundary.remove(look)


def stop(session: aw.AmpSession) -> None:
    session.stop()
    assert session.wait(20)


def state_of(session: aw.AmpSession) -> dict[str, Any]:
    """All of what a step changes, as it is now."""
    model, optimizer = session.model, session.optimizers[0]
    assert model is not None
    tensors = {f"model {name}": value.clone() for name, value in [*model.named_parameters(), *model.named_buffers()]}
    for number, state in optimizer.state_dict()["state"].items():
        tensors |= {f"{number} {name}": value.clone() for name, value in state.items() if isinstance(value, torch.Tensor)}
    numpy_state: Any = np.random.get_state()
    return {
        **tensors,
        "lr": optimizer.param_groups[0]["lr"],
        "scaler": session.scaler.progress(),
        "settings": session.settings,
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": numpy_state[1].tolist() + list(numpy_state[2:]),
    }


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        equal = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        assert equal, name


def rows(session: aw.AmpSession) -> dict[str, np.ndarray]:
    return session.history.columns(*COLUMNS)


def assert_same_rows(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    for name in COLUMNS:
        assert np.array_equal(one[name], other[name], equal_nan=True), name


# ---- nothing changed ------------------------------------------------------------------------------------------------------

CASES = [
    ("fp32", shuffled, momentum),
    ("fp32", by_workers, adam),
    ("fp32", by_lasting_workers, fused),
    ("bf16", shuffled_by_a_generator, adam),
    ("bf16", a_list, momentum),
    ("fp16", shuffled, fused),
    ("fp16", shuffled_by_a_generator, momentum),
    ("fp16", of_a_demo, adam),
]


@pytest.mark.parametrize(("autocast", "data", "optimizer"), CASES, ids=lambda one: getattr(one, "__name__", one))
def test_a_fork_with_nothing_changed_comes_out_bit_by_bit(autocast: str, data: Any, optimizer: Any, tmp_path: Path) -> None:
    to = tmp_path if optimizer is momentum else None
    with make(optimizer, snapshot_every=5, snapshots_to=to) as session:
        session.request(autocast=autocast, init_scale=2.0**21, growth_interval=3, checkpointed=["layers.0"])
        fit(session, data())
        train(session, 17)
        then, state = rows(session), state_of(session)
        events = [(event.step, event.kind, event.reason) for event in session.history.events("scale_changed", "skipped")]
        if autocast == "fp16":
            assert 0 < then["skipped"].sum() < 9
            assert len(set(then["scale"])) > 2
        for at_step in (15, 12, 0, 10):  # on a snapshot, between two, the first, and in the middle of an epoch
            session.fork(at_step=at_step)
            assert (session.step, session.run_state) == (at_step, "paused")
            assert rows(session)["step"].tolist() == list(range(at_step))
            train(session, 17)
            assert_same_rows(then, rows(session))
            assert_same(state, state_of(session))
            again = [(event.step, event.kind, event.reason) for event in session.history.events("scale_changed", "skipped")]
            assert again == events
        assert [branch.name for branch in session.branches] == ["run", "fork-1", "fork-2", "fork-3"]
        assert not [event for event in session.history.events("note") if "otherwise" in event.reason]


def test_while_it_runs_and_when_it_is_over() -> None:
    with make(snapshot_every=4) as session:
        fit(session, shuffled(), epochs=3)
        session.start()
        session.wait(20)
        then, state = rows(session), state_of(session)
        assert session.run_state == "finished"
        session.fork(at_step=6)
        assert (session.run_state, session.step) == ("ready", 6)
        reached, runner = threading.Event(), session._background.runner
        assert runner is not None

        until: list[int] = []

        def hold() -> None:
            if session.step in until:
                until.clear()
                reached.set()
                while not runner._jobs:  # until it was asked for
                    threading.Event().wait(0.001)

        session.on_boundary.append(hold)
        for step in (9, 15):  # while it runs: at the next boundary, or at its end
            until.append(step)
            reached.clear()
            session.start()
            assert reached.wait(20)
            session.fork(at_step=5)
            assert session.wait(20)
            assert session.step == 15
            session.fork(at_step=7)
        session.on_boundary.remove(hold)
        session.start()
        assert session.wait(20)
        assert_same_rows(then, rows(session))
        assert_same(state, state_of(session))
        assert session.run_state == "finished"
        session.fork(at_step=15)  # its end
        session.start()
        assert session.wait(20)
        assert session.step == 15


def test_what_was_changed_on_the_way_to_the_step_is_repeated_and_what_came_after_is_not() -> None:
    with make(snapshot_every=10) as session:
        session.schedule(at_step=3, autocast="bf16")
        session.schedule(at_step=6, checkpointed=["layers.*"], growth_interval=7)
        session.schedule(at_step=9, autocast="fp16", init_scale=2.0**10)
        session.schedule(at_step=14, autocast="fp32")
        fit(session, shuffled())
        train(session, 12)
        then = rows(session)
        first = session.fork(at_step=8)
        assert (session.settings.autocast, session.settings.checkpointed) == ("bf16", ("layers.0", "layers.1"))
        assert [first.settings_at(step).autocast for step in (2, 3, 9)] == ["fp32", "bf16", "fp16"]
        assert first.settings == first.settings_at(11)
        train(session, 12)
        assert rows(session)["scale"][9:].tolist() == [1.0] * 3  # the change at 9 is of the course that was left
        compared = aw.compare_runs(first, session)
        assert compared.names == compared.table.runs == ("run", "fork-1")
        second = session.fork(at_step=9, autocast="fp16", init_scale=2.0**10)
        assert second.name == "fork-1"
        assert compared.names == compared.table.runs == ("run", "fork-2")
        train(session, 12)
        assert_same_rows(then, rows(session))
        assert [request.at_step for request in session.scheduled] == [14]  # that is still to come
        train(session, 16)
        assert session.settings.autocast == "fp32"


def test_a_branch_and_the_new_course_have_in_common_what_was_before(tmp_path: Path) -> None:
    with make(snapshot_every=4, record=tmp_path / "run.db") as session:
        fit(session, a_list())
        train(session, 10)
        session.note("seen here")
        before = session.history
        branch = session.fork(at_step=6, autocast="bf16", checkpointed=["layers.*"])
        assert branch is session.branches[0]
        assert branch.history is before
        assert session.history is not before
        assert (branch.name, branch.left_at, session.name) == ("run", 6, "fork-1")
        assert session.settings.autocast == "bf16"
        train(session, 12)
        assert len(before) == 10  # nothing is added to it
        assert [event.reason for event in branch.events if event.kind == "note"][-1] == "seen here"
        old, new = before.columns(), session.history.columns()
        assert all(np.array_equal(old[name][:6], new[name][:6], equal_nan=True) for name in old)
        assert new["step"].tolist() == list(range(12))
        assert not np.array_equal(old["loss"][6:10], new["loss"][6:10])
        forked = next(event for event in session.history.events("run") if event.detail["state"] == "forked")
        assert (forked.step, forked.detail["from"]) == (6, "run")
        assert forked.reason == "forked from run (run.db) at step 6 with autocast bf16, 2 layers checkpointed"
        session.fork(at_step=8)
        train(session, 9)
        assert session.recorded_to == tmp_path / "run.fork-2.db"
        state = session.history.columns(), session.history.events()
    with aw.open_run(tmp_path / "run.db") as run:
        ours = before.columns()
        assert all(np.array_equal(ours[name], run.history.columns()[name], equal_nan=True) for name in ours)
        assert run.events == branch.events
        assert run.settings == branch.settings
        assert "forked_from" not in run.facts
    with aw.open_run(tmp_path / "run.fork-1.db") as run:
        assert run.facts["forked_from"] == {"name": "run", "file": "run.db", "at_step": 6}
        assert (run.settings_at(5).autocast, run.settings_at(6).autocast) == ("fp32", "bf16")
        assert run.history.columns("step")["step"].tolist() == list(range(12))
    with aw.open_run(tmp_path / "run.fork-2.db") as run:
        assert run.facts["forked_from"] == {"name": "fork-1", "file": "run.fork-1.db", "at_step": 8}
        assert all(np.array_equal(state[0][name], run.history.columns()[name], equal_nan=True) for name in state[0])
        assert run.events[: len(state[1])] == state[1]


def test_recording_that_cannot_go_on_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(snapshot_every=4, record=tmp_path / "run.db") as session:
        fit(session, a_list())
        train(session, 5)
        monkeypatch.setattr("amp_widgets.run_recording._beside", lambda path: path / "nowhere" / "run.db")
        session.fork(at_step=4)
        assert session.recorded_to is None
        assert any(note.startswith("Recording has ended with the fork: ") for note in session.dashboard_state().notes)
        train(session, 6)


# ---- loops of the user's own ------------------------------------------------------------------------------------------------


def cell(session: aw.AmpSession, batches: Iterator[Any], scheduler: Any = None, until: int | None = None) -> None:
    model, optimizer = session.model, session.optimizers[0]
    assert model is not None
    for inputs, targets in batches:
        optimizer.zero_grad()
        with session.autocast():
            loss = nn.functional.cross_entropy(model(inputs), targets)
        session.scaler.scale(loss).backward()
        session.scaler.step(optimizer)
        session.scaler.update()
        if scheduler is not None:
            scheduler.step()
        torch.rand(3)  # after the boundary, as a metric may
        if session.step == until:
            break


def test_a_cell_that_is_run_again_goes_on_at_the_same_place() -> None:
    with make() as session:
        scheduler = torch.optim.lr_scheduler.MultiStepLR(session.optimizers[0], [4, 9, 13], gamma=0.5)
        session.keep_snapshots(every=4, also=[scheduler])
        loader = shuffled_by_a_generator()
        cell(session, session.steps(loader, epochs=3), scheduler)
        then, state = rows(session), state_of(session)
        for at_step in (8, 0, 12):
            session.fork(at_step=at_step)
            random.seed(), torch.rand(9)  # what the user does meanwhile
            cell(session, session.steps(loader, epochs=3), scheduler)
            assert_same_rows(then, rows(session))
            assert_same(state, state_of(session))
        with pytest.raises(ForkError, match=r"no snapshot of step 7, and a loop of your own has trained .* 0, 4, 8, 12"):
            session.fork(at_step=7)
        session.fork(at_step=12)
        cell(session, session.steps(a_list()), scheduler)
        assert session.step == 17  # all five batches
        assert "other data than before the fork" in session.history.events("note")[-1].reason


def test_a_scheduler_that_was_not_named_is_spoken_of() -> None:
    with make(snapshot_every=2) as session:
        scheduler = torch.optim.lr_scheduler.StepLR(session.optimizers[0], 1, gamma=0.5)
        cell(session, session.steps(a_list()), scheduler)
        session.fork(at_step=2)
        assert scheduler.last_epoch == 5
        assert session.optimizers[0].param_groups[0]["lr"] == 0.01 * 0.5**2
        assert "a learning-rate scheduler of yours stays where it is" in session.history.events("note")[-1].reason


def test_a_plain_loop_finds_the_state_of_then() -> None:
    with make(snapshot_every=3) as session:
        data = a_list()
        cell(session, iter(data))
        cell(session, iter(data))
        then, state = rows(session), state_of(session)
        session.fork(at_step=3)
        assert "the data begin where your loop begins" in session.history.events("note")[-1].reason
        torch.rand(3)  # the rest of the third round of the loop
        cell(session, iter(data[3:]))
        cell(session, iter(data))
        assert_same_rows(then, rows(session))
        assert_same(state, state_of(session))


def test_within_a_loop_of_the_users_own_it_is_refused() -> None:
    with make(snapshot_every=1) as session:
        model, optimizer = session.model, session.optimizers[0]
        assert model is not None
        for inputs, targets in session.steps(a_list()):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            session.scaler.scale(loss).backward()
            session.scaler.step(optimizer)
            session.scaler.update()
            with pytest.raises(RunError, match="your own loop is training this model"):
                session.fork(at_step=0)
        session.on_boundary.append(lambda: refused.append(refusal(session)))
        refused: list[str] = []
        cell(session, iter(a_list()[:1]))
        assert "your own loop is training this model" in refused[0]
        session.on_boundary.pop()
        assert (session.step, session.branches) == (6, [])
        session.fork(at_step=2)
        abandoned = session.steps(a_list())
        with pytest.raises(RuntimeError, match="broken off"):  # an error leaves the loop, and its generator is still there
            cell(session, fails_after(abandoned, 2))
        session.fork(at_step=4)
        assert session.step == 4


def refusal(session: aw.AmpSession) -> str:
    with pytest.raises(RunError) as refused:
        session.fork(at_step=1)
    return str(refused.value)


def fails_after(batches: Iterator[Any], count: int) -> Iterator[Any]:
    for i, batch in enumerate(batches):
        if i == count:
            raise RuntimeError("broken off")
        yield batch


# ---- what cannot be ---------------------------------------------------------------------------------------------------------


def test_steps_that_there_were_not_and_settings_that_cannot_be() -> None:
    with make() as session:
        fit(session, a_list())
        session.keep_snapshots(every=4)
        with pytest.raises(ForkError, match="there is no snapshot yet; train a step first"):
            session.fork(at_step=0)
        train(session, 6)
        session.on_boundary.append(lambda: refused.append(refusal(session)))
        refused: list[str] = []
        session.single_step()
        while not refused:
            session.wait(0.01)
        assert "called from within a step of the run" in refused[0]
        session.on_boundary.pop()
        session.fork(at_step=6)
        state, history = state_of(session), session.history
        for wrong in (-1, 7, 2.0, True):
            with pytest.raises(ForkError, match=r"at_step: got .*, expected a whole number from 0 to 6"):
                session.fork(at_step=wrong)  # type: ignore[arg-type]
        with pytest.raises(SettingsError, match="there is no such setting"):
            session.fork(at_step=4, autocas="bf16")
        with pytest.raises(SettingsError, match=r"matches no layer|no layer"):
            session.fork(at_step=4, checkpointed=["nowhere"])
        assert_same(state, state_of(session))
        assert session.history is history
        assert session.history.events("rejected")[-1].detail == {"checkpointed": ["nowhere"], "source": "fork"}
    with pytest.raises(SessionClosedError):
        session.fork(at_step=4)


def test_data_that_are_used_up_or_not_known_any_more() -> None:
    with make(snapshot_every=2) as session:
        fit(session, iter(a_list() * 4))
        train(session, 5)
        state = state_of(session)
        with pytest.raises(ForkError, match=r"can be gone through only once \(a list_iterator\)"):
            session.fork(at_step=3)
        assert_same(state, state_of(session))
        stop(session)
        fit(session, a_list())
        train(session, 7)
        with pytest.raises(ForkError, match=r"an earlier fit\(\) on other data, which are not known any more"):
            session.fork(at_step=3)
        session.fork(at_step=6)
        assert session.step == 6


def test_data_that_were_begun_since_the_snapshot_do_not_begin_anew_either() -> None:
    with make(snapshot_every=2) as session:
        fit(session, iter(a_list()))
        train(session, 3)
        state = state_of(session)
        with pytest.raises(ForkError, match="can be gone through only once"):
            session.fork(at_step=0)
        assert_same(state, state_of(session))
        assert not session.branches


def test_data_that_have_become_fewer_leave_everything_as_it_was() -> None:
    with make(snapshot_every=4) as session:
        data = a_list()
        fit(session, data)
        train(session, 5)
        state, history = state_of(session), session.history
        data[2:] = []
        with pytest.raises(
            ForkError, match=r"got 2 batches when epoch 0 of the data was gone through again, expected at least .* 4"
        ):
            session.fork(at_step=4)
        assert_same(state, state_of(session))
        assert (session.step, session.history) == (5, history)


@pytest.mark.parametrize("data", [shuffled_by_a_generator, by_lasting_workers])
def test_an_error_on_the_way_leaves_everything_as_it_was(tmp_path: Path, data: Any) -> None:
    fails = False

    def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if fails:
            raise ZeroDivisionError("of the user's own")
        return nn.functional.cross_entropy(outputs, targets)

    with make(snapshot_every=10, record=tmp_path / "run.db") as session:
        session.request(autocast="fp16", init_scale=2.0**21, checkpointed=["layers.0"])
        loader = data()
        session.fit(loader, loss_fn, None, start=False)
        train(session, 8)
        session.request(autocast="bf16")
        train(session, 12)
        state, history, generator = state_of(session), session.history, loader.generator.get_state()
        gradients = [parameter.grad for parameter in session.model.parameters()]  # type: ignore[union-attr]
        fails = True
        with pytest.raises(ZeroDivisionError, match="of the user's own"):
            session.fork(at_step=5)
        fails = False
        assert_same(state, state_of(session))
        assert torch.equal(generator, loader.generator.get_state())
        kept = [parameter.grad for parameter in session.model.parameters()]  # type: ignore[union-attr]
        assert all(one is other for one, other in zip(gradients, kept, strict=True))
        assert (session.step, session.run_state, session.branches, session.name) == (12, "paused", [], None)
        assert session.history is history
        assert session.recorded_to == tmp_path / "run.db"
        train(session, 17)
        then = rows(session)
        session.fork(at_step=11)
        train(session, 17)
        assert_same_rows(then, rows(session))


def test_stop_breaks_a_long_way_off() -> None:
    with make(snapshot_every=100) as session:
        fit(session, a_list())
        train(session, 9)
        state = state_of(session)
        session.on_boundary.append(lambda: session.stop() if session.step == 3 else None)
        with pytest.raises(ForkError, match="it was broken off; the run is as it was"):
            session.fork(at_step=6)
        assert_same(state, state_of(session))
        assert session.wait(20)
        assert (session.step, session.run_state) == (9, "stopped")


def test_an_interrupt_breaks_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    with make(snapshot_every=100) as session:
        fit(session, a_list())
        train(session, 9)
        state, on_the_way, go_on = state_of(session), threading.Event(), threading.Event()
        waits_for = session._background.wait_for

        def hold() -> None:
            on_the_way.set()
            go_on.wait(20)

        def interrupted(done: Any, meanwhile: Any) -> None:
            if on_the_way.is_set():  # the second time: for the end
                go_on.set()
                return waits_for(done, meanwhile)
            on_the_way.wait(20)
            raise KeyboardInterrupt

        session.on_boundary.append(hold)
        monkeypatch.setattr(session._background, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.fork(at_step=6)
        session.on_boundary.remove(hold)
        assert_same(state, state_of(session))
        assert (session.step, session.run_state, session.branches) == (9, "paused", [])
        train(session, 11)


def test_steps_that_come_out_otherwise_are_spoken_of() -> None:
    with make(snapshot_every=10) as session:
        fit(session, a_list())

        def by_hand() -> None:
            if session.step == 4 and not session.branches:
                session.optimizers[0].param_groups[0]["lr"] = 1.0

        session.on_boundary.append(by_hand)
        train(session, 8)
        session.on_boundary.remove(by_hand)
        session.fork(at_step=7)
        [said] = [event.reason for event in session.history.events("note") if "otherwise" in event.reason]
        assert "came out otherwise from step 5 on: loss" in said


# ---- what is around it ------------------------------------------------------------------------------------------------------


def test_each_start_of_the_run_is_come_back_to_by_itself() -> None:
    with make(snapshot_every=3) as session:
        fit(session, shuffled())
        train(session, 4)
        stop(session)
        train(session, 9)  # the data have begun anew
        then, state = rows(session), state_of(session)
        session.fork(at_step=7)
        train(session, 9)
        assert_same_rows(then, rows(session))
        assert_same(state, state_of(session))
        session.reset()
        train(session, 12)
        then = rows(session)
        session.fork(at_step=10)
        train(session, 12)
        assert_same_rows(then, rows(session))


def test_views_show_the_new_course() -> None:
    pytest.importorskip("anywidget")
    from amp_widgets.charts.live import TrainingChart
    from amp_widgets.widgets.measured_settings import MeasuredSettings

    with make(snapshot_every=4) as session:
        chart, measured, sent = TrainingChart(), MeasuredSettings(), []
        chart.send = lambda content, buffers: sent.append(content)  # type: ignore[method-assign]
        fit(session, a_list())
        train(session, 10)
        chart.pull(session.history_so_far, at_once=True)
        measured.pull(session.history_so_far)
        session.fork(at_step=5, autocast="bf16")
        assert chart.pull(session.history_so_far, at_once=True)
        assert (sent[-1]["type"], sent[-1]["last_step"]) == ("whole", 4)
        assert [event["kind"] for event in sent[-1]["events"]][-2:] == ["run", "applied"]
        assert [(one.autocast, one.steps) for one in measured.pull(session.history_so_far)] == [("fp32", 5)]
        train(session, 7)
        chart.pull(session.history_so_far, at_once=True)
        assert (sent[-1]["type"], sent[-1]["last_step"]) == ("append", 6)
        assert session.dashboard_state().step == 7
        chart.close()


def test_many_forks_leave_nothing_behind() -> None:
    class Data(list[Any]):
        pass

    with make(snapshot_every=2) as session:
        data = Data(a_list())
        fit(session, data)
        train(session, 6)

        def count() -> tuple[int, ...]:
            gc.collect()
            objects = gc.get_objects()
            kinds = (LiveLoop, torch.Tensor, threading.Thread)
            return tuple(sum(issubclass(type(one), kind) for one in objects) for kind in kinds)  # isinstance() asks the object

        for _ in range(2):
            session.fork(at_step=3)
            train(session, 6)
        before, listeners = count(), (len(session.on_boundary), len(session.remarks))
        for _ in range(8):
            session.fork(at_step=3)
            train(session, 6)
        session.branches.clear()
        assert count() == before
        assert (len(session.on_boundary), len(session.remarks)) == listeners
        assert session.snapshots is not None
        assert len(session.snapshots.steps) <= 5
    alive = weakref.ref(data)
    del data
    gc.collect()
    assert alive() is None


def test_it_waits_for_no_analysis_and_none_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with make(snapshot_every=2) as session:
        fit(session, a_list())
        train(session, 5)
        monkeypatch.setattr(type(session._on_demand.inspections), "busy", property(lambda _: True))
        with pytest.raises(RunError, match=r"fork: steps of this model are being predicted \(see Plan\)"):
            session.fork(at_step=2)


@pytest.mark.parametrize("seed", range(3))
def test_any_step_of_any_run(seed: int) -> None:
    """Requests at random steps, by other threads' hands in effect; forks to random steps; always as it was."""
    rng = random.Random(seed)
    print(f"seed {seed}")
    with make(rng.choice([adam, momentum]), snapshot_every=rng.randint(2, 6)) as session:
        fit(session, rng.choice([shuffled, of_a_demo, shuffled_by_a_generator])())
        changes = [
            {"autocast": "bf16"}, {"autocast": "fp16"}, {"autocast": "fp32"}, {"checkpointed": ["layers.*"]},
            {"checkpointed": []},
            {"init_scale": 2.0**20}, {"growth_interval": 2}, {"fp32_layers": ["head"]}, {"scaling": False},
        ]  # fmt: skip
        for _ in range(6):
            session.schedule(at_step=rng.randint(0, 19), **rng.choice(changes))
        train(session, 20)
        asked = session.history.events("applied")
        then, state = rows(session), state_of(session)
        for _ in range(3):
            at_step = rng.randint(0, 20)
            session.fork(at_step=at_step)
            for event in asked:
                if event.step > at_step:
                    session.schedule(
                        at_step=event.step, **{name: value for name, value in event.detail.items() if name != "source"}
                    )
            train(session, 20)
            assert_same_rows(then, rows(session))
            assert_same(state, state_of(session))
