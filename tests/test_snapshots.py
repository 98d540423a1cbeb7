"""Snapshots: what they hold, how many are kept, what they refuse to be read from, and that training goes on without them."""

from __future__ import annotations

import dataclasses
import errno
import gc
import pickle
import random
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import amp_widgets as aw
from amp_widgets.analysis.training_state import Trained, check_fits, put_back_state, state_as_data
from amp_widgets.core.batches import EpochStart
from amp_widgets.core.random_states import RandomStates, generators_of
from amp_widgets.errors import ForkError, SessionClosedError, SettingsError, SnapshotError


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make(**options: Any) -> aw.AmpSession:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))
    options = {"memory_every": 0, **options}
    session = aw.AmpSession(model, torch.optim.Adam(model.parameters(), lr=0.01), **options)
    batches = [(torch.randn(5, 4), torch.randint(2, (5,))) for _ in range(6)]
    session.fit(batches, nn.functional.cross_entropy, None, start=False)
    return session


def train(session: aw.AmpSession, until: int) -> None:
    """In the background, up to a step."""

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


def weights(session: aw.AmpSession) -> list[torch.Tensor]:
    assert session.model is not None
    return [value.clone() for value in session.model.state_dict().values()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


# ---- what is in one -----------------------------------------------------------------------------------------------------


def test_random_states_go_through_a_file_of_data(tmp_path: Path) -> None:
    class Data:
        def __init__(self) -> None:
            self.mine = [np.random.default_rng(1), np.random.Generator(np.random.MT19937(2)), np.random.RandomState(3)]
            self.inner = {"torch": torch.Generator().manual_seed(4), "python": random.Random(5)}
            self.unknown = np.random.Generator(np.random.SFC64(6))

        def draw(self) -> list[float]:
            drawn = [float(one.random()) for one in (*self.mine, self.inner["python"], self.unknown)]
            return [*drawn, float(torch.rand((), generator=self.inner["torch"])), *self.draw_globally()]

        def draw_globally(self) -> list[float]:
            return [random.random(), random.gauss(), float(np.random.standard_normal()), float(torch.rand(()))]

    data = Data()
    assert len(generators_of(data)) == 6
    data.draw()  # so that gaussian halves are left over
    torch.save(EpochStart(data).as_data(), tmp_path / "start.pt")
    first = data.draw()
    assert data.draw() != first
    EpochStart.of_data(torch.load(tmp_path / "start.pt", weights_only=True)).put_back(data)
    assert data.draw() == first


@pytest.mark.parametrize("name", ["torch", "numpy", "python"])
def test_what_is_no_random_state_changes_none(name: str) -> None:
    data = RandomStates().as_data()
    data[name] = data["torch"][:-8] if name == "torch" else {**data[name], "version": "7", "state": None}
    before = torch.rand(()), torch.get_rng_state()
    with pytest.raises(ValueError, match="no states of random generators"):
        RandomStates.of_data(data)
    assert torch.equal(torch.get_rng_state(), before[1])


def test_state_comes_back_in_the_same_tensors_and_groups() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(torch.bfloat16)
    free = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*model.parameters(), free], lr=0.1, momentum=0.9)

    def step() -> None:
        (model(torch.randn(4, 3).to(torch.bfloat16)).float().square().sum() + free.sum()).backward()
        optimizer.step()

    step()
    parameter, group = model[0].weight, optimizer.param_groups[0]
    optimizer.state[parameter]["mine"] = torch.full((2,), 1 / 3)  # torch's own loading makes it bfloat16
    trained = Trained(model=model, optimizers=[optimizer])
    data, shapes = state_as_data(trained)
    then = [one.clone() for one in (*model.state_dict().values(), free, optimizer.state[parameter]["momentum_buffer"])]
    model.eval()
    parameter.requires_grad_(False)
    group["lr"] = 7.0
    step()
    put_back_state(data, shapes, trained)
    now = [*model.state_dict().values(), free, optimizer.state[parameter]["momentum_buffer"]]
    assert same(then, now)
    assert optimizer.state[parameter]["mine"].dtype == torch.float32
    assert model[0].weight is parameter
    assert optimizer.param_groups[0] is group
    assert (group["lr"], model.training, parameter.requires_grad, parameter.grad) == (0.1, True, True, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda model, _: model.__setitem__(0, nn.Linear(4, 2)),
            r"has float32 \(2, 3\) for the model tensor '0.weight', expected float32 \(2, 4\), as it is now",
        ),
        (lambda model, _: model.append(nn.Linear(2, 2)), r"has no model tensor '1\.(weight|bias)', expected one"),
        (lambda model, _: model.__setitem__(0, nn.Identity()), r"has a model tensor '0\.(weight|bias)', expected none"),
        (
            lambda _, optimizer: optimizer.param_groups[0]["params"].pop(),
            r"has groups of \[2\] parameters for optimizer 0 \(SGD\), expected \[1\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_was_got_and_expected(change: Any, message: str) -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    trained = Trained(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)])
    data, _ = state_as_data(trained)
    change(model, trained.optimizers[0])
    with pytest.raises(SnapshotError, match=message):
        check_fits(data, trained, "the snapshot of step 3")


# ---- how many, and where ------------------------------------------------------------------------------------------------


def test_the_first_and_the_newest_stay_and_old_ones_lie_farther_apart() -> None:
    with make() as session:
        session.keep_snapshots(every=1, keep=5)
        train(session, 40)
        stop(session)
        assert session.snapshots is not None
        steps = session.snapshots.steps
        assert len(steps) == 5
        assert (steps[0], steps[-1]) == (0, 40)
        gaps = np.diff(steps)
        assert (gaps[:-1] >= gaps[1:]).all(), steps
        said = [event.reason for event in session.history.events("note")]
        assert len(said) == 1
        assert said[0].startswith("snapshots every 1 steps: ")
        assert "at most 5 of them; the first took" in said[0]


def test_files_are_data_and_no_more_than_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "snapshots"
    with make(snapshot_every=2, snapshots_to=folder) as session:
        session.request(autocast="fp16", init_scale=2.0**20, checkpointed=["0"])
        train(session, 13)
        stop(session)
        assert session.snapshots is not None
        steps = session.snapshots.steps
        assert [path.name for path in sorted(folder.iterdir())] == [f"snapshot-{step:08d}.pt" for step in steps]
        data = torch.load(folder / "snapshot-00000012.pt", weights_only=True)
        assert session.model is not None
        session.model.load_state_dict(data["modules"]["model"]["tensors"])
        assert (data["step"], data["settings"]["autocast"], data["settings"]["checkpointed"]) == (12, "fp16", ("0",))
        assert (data["place"]["epoch"], data["place"]["given"]) == (1, 6)
        assert session.snapshots.bytes == sum(path.stat().st_size for path in folder.iterdir())
    assert len(list(folder.iterdir())) == len(steps)  # files are the user's


def test_they_can_be_switched_on_and_off_in_mid_run() -> None:
    with make() as session:
        assert session.snapshots is None
        train(session, 4)
        with pytest.raises(ForkError, match=r"no snapshots are kept of this session; keep some from now on"):
            session.fork(at_step=2)
        session.keep_snapshots(every=3)
        train(session, 10)
        assert session.snapshots is not None
        assert session.snapshots.steps == (5, 6, 9)  # a batch for step 4 had been taken when they were switched on
        session.keep_snapshots(every=0)
        train(session, 14)
        assert session.snapshots.steps == (5, 6, 9)
        with pytest.raises(ForkError, match=r"nothing leads to step 4; there are snapshots of the steps 5, 6, 9"):
            session.fork(at_step=4)
    with pytest.raises(SessionClosedError):
        session.keep_snapshots(every=3)


@pytest.mark.parametrize("wrong", [{"every": -1}, {"every": 1.5}, {"every": 1, "keep": 1}, {"every": 1, "also": [3]}])
def test_what_cannot_be_meant_is_refused(wrong: dict[str, Any]) -> None:
    with make() as session, pytest.raises(SettingsError, match="snapshots: "):
        session.keep_snapshots(**wrong)


def test_a_folder_that_is_taken_or_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "snapshot-00000000.pt").write_text("another session's")
    with pytest.raises(SnapshotError, match="of another session already; choose another folder"):
        make(snapshot_every=2, snapshots_to=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(SnapshotError, match="choose a folder that can be made"):
        make(snapshot_every=2, snapshots_to=tmp_path / "file" / "inside")
    with make(snapshot_every=2, snapshots_to=tmp_path / "one") as session:
        with pytest.raises(SnapshotError, match="got another folder"):
            session.keep_snapshots(every=2, folder=tmp_path / "two")
        session.keep_snapshots(every=3, folder=tmp_path / "one")


def test_training_goes_on_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(snapshot_every=2, snapshots_to=tmp_path) as session:
        train(session, 3)
        real = torch.save

        def full(data: Any, file: Any) -> None:
            file.write(b"as much as there was room for")
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(torch, "save", full)
        train(session, 9)
        assert session.snapshots is not None
        notice = session.snapshots.notice
        assert notice is not None
        assert "No space left on device" in notice
        assert notice in session.dashboard_state().notes
        assert len(session.history.events("note")) == 2  # the first snapshot, and the first that failed
        assert sorted(path.name for path in tmp_path.iterdir()) == ["snapshot-00000000.pt", "snapshot-00000002.pt"]
        monkeypatch.setattr(torch, "save", real)
        train(session, 11)
        assert session.snapshots.notice is None
        assert session.snapshots.steps == (0, 2, 10)


def test_what_is_no_data_is_said_and_training_goes_on() -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"function": print}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    with make() as session:
        session.keep_snapshots(every=2, also=[Odd()])
        train(session, 3)
        assert session.snapshots is not None
        assert session.snapshots.steps == ()
        assert "also.0 (Odd).function is a builtin_function_or_method, expected tensors" in str(session.snapshots.notice)
        with pytest.raises(ForkError, match=r"there is no snapshot yet \(No snapshot of step"):
            session.fork(at_step=1)


# ---- files that are not what was written ----------------------------------------------------------------------------------


class Code:
    ran = False

    def __reduce__(self) -> tuple[Any, ...]:
        return (Code.run, ())

    @staticmethod
    def run() -> None:
        Code.ran = True


def hostile(path: Path) -> None:
    path.write_bytes(pickle.dumps({"format": Code()}))


def hostile_archive(path: Path) -> None:
    torch.save({"format": Code()}, path)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def damaged(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3 :] = bytes(len(content) - len(content) // 3)
    path.write_bytes(content)


def foreign(path: Path) -> None:
    torch.save({**torch.load(path, weights_only=True), "session": "another"}, path)


def other_step(path: Path) -> None:
    path.write_bytes(path.with_name("snapshot-00000002.pt").read_bytes())


def other_shape(path: Path) -> None:
    data = torch.load(path, weights_only=True)
    data["modules"]["model"]["tensors"]["0.weight"] = torch.zeros(9, 4)
    torch.save(data, path)


def other_optimizer(path: Path) -> None:
    data = torch.load(path, weights_only=True)
    data["optimizers"][0]["state"][0]["exp_avg"] = torch.zeros(8, 4, dtype=torch.float64)
    torch.save(data, path)


def other_things(path: Path) -> None:
    torch.save([1, 2, 3], path)


def removed(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (hostile, r"cannot be read as data"),
        (hostile_archive, r"cannot be read as data"),
        (truncated, r"cannot be read as data"),
        (damaged, r"cannot be read as data"),
        (foreign, r"is a snapshot of another session or step, expected the one of step 4"),
        (other_step, r"is a snapshot of another session or step, expected the one of step 4"),
        (other_shape, r"modules\.model\.tensors\.0\.weight: got float32 \(9, 4\), expected float32 \(8, 4\)"),
        (other_optimizer, r"optimizers\.0\.state\.0\.exp_avg: got float64 \(8, 4\), expected float32"),
        (other_things, r"is no snapshot, expected a file that this session has written"),
        (removed, r"the snapshot was removed; there are snapshots of the steps 0, 2, 4"),
    ],
)
def test_a_file_that_is_not_what_was_written(tmp_path: Path, spoil: Any, message: str) -> None:
    with make(snapshot_every=2, snapshots_to=tmp_path) as session:
        train(session, 5)
        path = tmp_path / "snapshot-00000004.pt"
        size = path.stat().st_size
        spoil(path)
        assert session.snapshots is not None
        if spoil is not removed and path.stat().st_size != size:
            with pytest.raises(SnapshotError, match=rf"got {path.stat().st_size} bytes, expected {size}; it is damaged"):
                session.fork(at_step=4)
            kept = session.snapshots._kept  # as if somebody had taken care of the size
            kept[-1] = dataclasses.replace(kept[-1], bytes=path.stat().st_size)
        before, rows = weights(session), session.history.columns()
        with pytest.raises(SnapshotError, match=message):
            session.fork(at_step=4)
        assert not Code.ran
        assert same(before, weights(session))
        assert (session.step, session.branches, session.run_state) == (5, [], "paused")
        assert np.array_equal(session.history.columns()["loss"], rows["loss"])
        train(session, 6)


def test_a_model_that_has_changed_since_is_left_alone() -> None:
    with make(snapshot_every=2) as session:
        train(session, 5)
        model = session.model
        assert isinstance(model, nn.Sequential)
        model[3].register_buffer("new", torch.zeros(2))
        before = weights(session)
        with pytest.raises(SnapshotError, match=r"fork: the snapshot of step 4 has no model tensor '3.new', expected one"):
            session.fork(at_step=4)
        assert same(before, weights(session))


def test_nothing_of_the_model_is_kept_after_the_end() -> None:
    session = make(snapshot_every=1)
    train(session, 4)
    stop(session)
    session.fork(at_step=2)
    model = weakref.ref(session.model)
    assert session.snapshots is not None
    data = weakref.ref(session.snapshots._kept[0].data["modules"]["model"]["tensors"]["0.weight"])  # type: ignore[index]
    session.close()
    gc.collect()
    assert data() is None
    assert model() is None
    assert session.snapshots.steps == ()
    with pytest.raises(SessionClosedError):
        session.fork(at_step=1)
    dropped = make(snapshot_every=1)
    train(dropped, 2)
    stop(dropped)
    model = weakref.ref(dropped.model)
    del dropped
    gc.collect()
    assert model() is None
