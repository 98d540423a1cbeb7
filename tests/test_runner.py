"""The background run: every control takes effect at a boundary, an exception ends it cleanly, nothing is kept alive."""

from __future__ import annotations

import collections
import gc
import os
import random
import signal
import sys
import threading
import time
import types
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from amp_widgets import runner as runner_module
from amp_widgets.errors import RunError, SessionClosedError
from amp_widgets.runner import Runner, Training
from amp_widgets.session import AmpSession

PATIENCE_S = 60.0


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
    case.session._background.runner.join()  # type: ignore[union-attr]
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
    with pytest.raises(SessionClosedError, match="closed"):
        case.session.start()


class Held:
    """A loss whose computation the test holds up."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.let_go = threading.Event()
        self.calls_done = 0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.entered.set()
        assert self.let_go.wait(PATIENCE_S)
        self.calls_done += 1
        return nn.functional.cross_entropy(output, target)


@pytest.mark.skipif(os.name == "nt", reason="signals are sent to this process")
@pytest.mark.parametrize("how", ["wait", "join"])
def test_an_interrupted_wait_waits_for_the_end_of_the_step(how: str) -> None:
    held = Held()
    case = Case(batches_of(50), held, epochs=None, start=True)
    assert held.entered.wait(PATIENCE_S)
    runner = case.session._background.runner
    assert runner is not None
    main = threading.get_ident()

    def interrupt() -> None:
        wait_for(lambda: _waits_in(main, how), "the main thread to wait")
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(0.3)  # time to return too early
        held.let_go.set()

    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        getattr(runner, how)()
    done, state = held.calls_done, case.session.run_state
    helper.join()
    case.session.close()
    assert (done, state) == (1, "stopped")
    assert held.calls_done == 1


def _waits_in(thread: int, name: str) -> bool:
    """Whether the thread is inside of `threading`, called from the runner's function `name`."""
    frame = sys._current_frames().get(thread)
    if frame is None or not frame.f_code.co_filename.endswith("threading.py"):
        return False
    while frame is not None:
        if frame.f_code.co_filename == runner_module.__file__ and frame.f_code.co_name == name:
            return True
        frame = frame.f_back
    return False


def test_wait_on_the_runs_own_thread_does_not_wait() -> None:
    said: list[bool] = []

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        said.append(case.session.wait())
        return nn.functional.cross_entropy(output, target)

    case = Case(batches_of(1), loss_fn)
    case.session.start()
    assert case.session.wait(PATIENCE_S)
    assert said == [False]
    case.session.close()


@pytest.mark.parametrize("fails", [False, True])
def test_reset_during_the_last_step_happens_at_its_end_and_once(fails: bool) -> None:
    held = Held()

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = held(output, target)
        return 1 // 0 if fails else loss  # type: ignore[return-value]

    case = Case(batches_of(1), loss_fn, start=True)
    first = {k: v.clone() for k, v in case.model.state_dict().items()}
    assert held.entered.wait(PATIENCE_S)
    case.session.reset()
    held.let_go.set()
    if fails:
        with pytest.raises(ZeroDivisionError):
            case.session.wait(PATIENCE_S)
    else:
        assert case.session.wait(PATIENCE_S)
    last = "failed" if fails else "finished"
    assert [e.detail["state"] for e in case.session.history.events("run")] == ["running", "reset", last]
    assert all(torch.equal(t, first[n]) for n, t in case.model.state_dict().items())
    if not fails:
        case.session.start()
        assert case.session.wait(PATIENCE_S)
        assert not all(torch.equal(t, first[n]) for n, t in case.model.state_dict().items())
        assert len(case.session.history.events("run")) == 5
    case.session.close()


def test_a_reset_that_fails_at_the_end_ends_the_run() -> None:
    held = Held()
    case = Case(batches_of(1), held, start=True)
    assert held.entered.wait(PATIENCE_S)
    case.session.reset()
    case.model.append(nn.Linear(2, 2))  # the first weights are no longer this model's
    held.let_go.set()
    with pytest.raises(RuntimeError, match="Missing key"):
        case.session.wait(PATIENCE_S)
    assert case.session.run_state == "failed"
    case.session.close()


def test_start_after_stop_begins_a_new_run() -> None:
    case = Case(batches_of(4), epochs=None, start=True)
    for begin in (case.session.start, case.session.single_step, case.session.start):
        case.session.stop()
        begin()
        assert case.session.run_state in ("running", "paused")
    case.session.stop()
    assert case.session.wait(PATIENCE_S)
    states = [e.detail["state"] for e in case.session.history.events("run")]
    assert states.count("stopped") == 4
    assert case.session.run_state == "stopped"
    case.session.close()


def test_start_while_the_run_takes_long_to_stop_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "_STOPPING_S", 0.01, raising=False)
    held = Held()
    case = Case(batches_of(4), held, epochs=None, start=True)
    assert held.entered.wait(PATIENCE_S)
    case.session.stop()
    for verb in ("start", "resume", "single_step"):
        with pytest.raises(RunError, match=f"{verb}: the run was asked to stop and is in its last step"):
            getattr(case.session, verb)()
    held.let_go.set()
    assert case.session.wait(PATIENCE_S)
    assert case.session.run_state == "stopped"
    case.session.close()


def test_pausing_twice_is_pausing_and_start_takes_it_back(case: Case) -> None:
    case.begin()
    case.session.pause()
    case.session.pause()
    case.gate.allowed.release()
    case.until("paused")
    case.session.pause()
    assert case.session.run_state == "paused"
    case.session.start()
    assert case.session.run_state == "running"
    case.session.pause()  # it waits for a batch: not paused yet
    case.session.start()
    case.gate.let(2)
    assert case.session.run_state == "running"
    with pytest.raises(RunError, match="expected paused; it goes on already"):
        case.session.resume()


def test_no_single_step_is_left_over_for_the_next_pause(case: Case) -> None:
    case.begin()
    case.session.pause()
    for _ in range(3):
        case.session.single_step()
    case.session.resume()
    case.gate.let(2)
    before = case.session.status().step
    case.session.pause()
    case.gate.open.set()
    case.until("paused")
    assert case.session.status().step == before


def test_without_a_thread_the_run_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    case = Case(batches_of(2))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            case.session.start()
    assert case.session.run_state == "ready"
    assert case.session.wait(0.0)
    case.session.start()
    assert case.session.wait(PATIENCE_S)
    assert case.session.run_state == "finished"
    case.session.close()


def test_random_calls_from_three_threads_never_confuse_it() -> None:
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    case = Case(batches_of(3), epochs=None)
    session = case.session
    first = {k: v.clone() for k, v in case.model.state_dict().items()}
    runner = session._background.runner
    assert runner is not None
    calls = ("start", "pause", "resume", "single_step", "stop", "reset")
    until_s = time.monotonic() + 1.0
    wrong: list[str] = []

    def press(own_seed: int) -> None:
        chance = random.Random(own_seed)
        while time.monotonic() < until_s:
            try:
                getattr(session, chance.choice(calls))()
            except RunError:
                pass
            except BaseException as error:
                wrong.append(repr(error))
            with runner._changed:
                if runner.state == "paused" and not runner._pausing:
                    wrong.append("paused, and training")
            if chance.random() < 0.3:
                time.sleep(chance.random() * 0.002)

    threads = [threading.Thread(target=press, args=(seed + i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    session.reset()
    session.stop()
    assert session.wait(PATIENCE_S)
    assert wrong == []
    assert session.run_state in ("ready", "stopped")
    assert not session.step_in_progress
    assert all(torch.equal(t, first[n]) for n, t in case.model.state_dict().items())
    follow = {"ready": {"running"}, "running": {"paused", "stopped"}, "paused": {"running", "stopped"}, "stopped": {"running"}}
    state = "ready"
    for event in session.history.events("run"):
        if event.detail["state"] != "reset":
            assert event.detail["state"] in follow[state]
            state = event.detail["state"]
    assert state == session.run_state
    session.close()


class Pair(NamedTuple):
    left: Any
    right: Any


class Movable:
    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def to(self, device: torch.device) -> Movable:
        return Movable(str(device))


class MovedInPlace:
    device = "cpu"

    def to(self, device: torch.device) -> None:
        self.device = str(device)


def test_every_kind_of_batch_is_moved_as_what_it_is() -> None:
    one = torch.ones(2)
    counts: collections.defaultdict[str, Any] = collections.defaultdict(list, a=one)
    batch = {
        "pair": Pair(one, [one, "text"]),
        "ordered": collections.OrderedDict(a=one),
        "default": counts,
        "user": collections.UserDict(a=one),
        "proxy": types.MappingProxyType({"a": one}),
        "packed": pack_sequence([torch.ones(3, 2), torch.ones(1, 2)]),
        "movable": Movable(),
        "in_place": MovedInPlace(),
        "rest": ("text", 3, 2.5, None, b"bytes", torch.Size([1, 2])),
    }
    moved, target = runner_module._moved([batch, one], torch.device("meta"))
    assert target.is_meta
    assert isinstance(moved["pair"], Pair)
    assert moved["pair"].left.is_meta
    assert moved["pair"].right[0].is_meta
    for name in ("ordered", "default", "user", "proxy"):
        assert type(moved[name]) is type(batch[name])
        assert moved[name]["a"].is_meta
        assert not batch[name]["a"].is_meta  # type: ignore[index]
    assert moved["default"]["missing"] == []
    assert isinstance(moved["packed"], PackedSequence)
    assert moved["packed"].data.is_meta
    assert moved["movable"].device == moved["in_place"].device == "meta"
    assert moved["pair"].right[1] == "text"
    assert moved["rest"] == batch["rest"]


def test_fit_with_packed_and_named_inputs() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 4)

        def forward(self, inputs: Pair) -> torch.Tensor:
            return self.lstm(inputs.left)[1][0][0] * inputs.right

    model = Model()
    packed = pack_sequence([torch.randn(3, 8), torch.randn(2, 8)])
    session = AmpSession(model, torch.optim.SGD(model.parameters(), lr=0.1))
    session.fit([(Pair(packed, torch.ones(2, 1)), torch.tensor([0, 1]))] * 2, nn.functional.cross_entropy)
    assert session.wait(PATIENCE_S)
    assert session.status().step == 2
    session.close()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"epochs": 0}, "epochs: got 0, expected an int of at least 1, or None"),
        ({"epochs": -1}, "epochs: got -1, "),
        ({"epochs": 1.5}, "epochs: got 1.5, "),
        ({"epochs": True}, "epochs: got True, "),
        ({"epochs": "3"}, "epochs: got '3', "),
        ({"loss_fn": torch.ones(2)}, "loss_fn: got a Tensor, expected a function"),
        ({"batches": 3}, "batches: got 3, expected something to iterate over"),
        ({"batches": nn.functional.cross_entropy}, "batches: got a function, "),
    ],
)
def test_what_cannot_be_trained_is_refused_at_once(wrong: dict[str, Any], said: str) -> None:
    fit = {"batches": batches_of(1), "loss_fn": nn.functional.cross_entropy, "epochs": 1, **wrong}
    with pytest.raises(RunError, match=said):
        Training(model=nn.Linear(2, 2), optimizers=(), **fit)  # type: ignore[arg-type]


def test_batches_may_be_a_dataset_and_are_not_begun_early() -> None:
    class Indexed:
        def __init__(self) -> None:
            self.asked = 0

        def __getitem__(self, index: int) -> Any:
            self.asked += 1
            return batches_of(2)[index]

    indexed = Indexed()
    case = Case(indexed, epochs=None)
    assert isinstance(case.session._background.runner, Runner)
    assert indexed.asked == 0
    case.session.close()


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


def test_reset_from_another_thread_during_a_loop_in_a_cell_is_refused() -> None:
    case = Case(batches_of(2))
    refused: list[str] = []

    def press_reset() -> None:  # as a widget's callback on a subshell thread
        for verb in (case.session.reset, case.session.start, case.session.single_step):
            try:
                verb()
            except RunError as error:
                refused.append(str(error).partition(":")[0])

    for inputs, targets in case.session.steps(batches_of(1)):
        case.optimizer.zero_grad()
        with case.session.autocast():
            loss = nn.functional.cross_entropy(case.model(inputs), targets)
        thread = threading.Thread(target=press_reset)
        thread.start()
        thread.join()
        case.session.scaler.scale(loss).backward()
        case.session.scaler.step(case.optimizer)
        case.session.scaler.update()
    assert refused == ["reset", "start", "single_step"]
    thread = threading.Thread(target=case.session.reset)  # the loop is over
    thread.start()
    thread.join()
    assert case.session.history.events("run")[-1].detail["state"] == "reset"
    case.session.close()


def test_the_stop_button_is_taken_while_a_run_is_alive_however_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    from amp_widgets import kernel

    installed: list[Any] = []

    def on_interrupt(callback: Any) -> Any:
        installed.append(callback)
        return lambda: installed.remove(callback)

    monkeypatch.setattr(kernel, "on_interrupt", on_interrupt)
    case = Case(batches_of(3))
    case.session.single_step()
    case.until("paused")
    assert len(installed) == 1
    installed[0]()
    assert case.session.wait(PATIENCE_S)
    assert case.session.run_state == "stopped"
    assert installed == []
    case.session.start()
    assert case.session.wait(PATIENCE_S)
    assert installed == []
    case.session.close()


def test_waiting_serves_widgets(case: Case) -> None:
    pumped = threading.Event()

    class Pump:
        available = True
        why_not = ""

        def pump(self) -> None:
            pumped.set()

        def close(self) -> None: ...

    case.session._background.pump = Pump()  # type: ignore[assignment]
    case.begin()
    assert not case.session.wait(0.2)
    assert pumped.is_set()
