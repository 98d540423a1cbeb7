"""Inspections of a session: on the newest batch, between two steps, on the thread that trains if there is one."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from amp_widgets.analysis import inspections
from amp_widgets.analysis.dtype_map import DtypeMap
from amp_widgets.analysis.parity import ParityReport
from amp_widgets.analysis.precision import PrecisionReport
from amp_widgets.analysis.preflight import Findings
from amp_widgets.errors import RunError, SessionClosedError, SettingsError
from amp_widgets.language import set_language
from amp_widgets.session import AmpSession

PATIENCE_S = 60.0


def batches_of(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 3, generator=generator), torch.randint(2, (4,), generator=generator)) for _ in range(count)]


class Gated:
    """Batches that wait until the test lets them go on."""

    def __init__(self, count: int) -> None:
        self.batches = batches_of(count)
        self.allowed = threading.Semaphore(0)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for batch in self.batches:
            assert self.allowed.acquire(timeout=PATIENCE_S)
            yield batch

    def let(self, count: int) -> None:
        for _ in range(count):
            self.allowed.release()


def made(batches: Any = None, loss_fn: Any = nn.functional.cross_entropy) -> AmpSession:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.ReLU(), nn.Linear(5, 2))
    session = AmpSession(model, torch.optim.Adam(model.parameters(), lr=0.1))
    if batches is not None:
        session.fit(batches, loss_fn, start=False)
    return session


def wait_for(condition: Callable[[], bool], what: str) -> None:
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / 0.005)):
        if condition():
            return
        pause.wait(0.005)
    raise AssertionError(f"waited in vain for: {what}")


def wait_for_step(session: AmpSession, step: int) -> None:
    wait_for(lambda: session.step >= step, f"step {step}")


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What was inspected, and on which thread."""
    seen: list[tuple[str, int]] = []

    def recorded(kind: str, make: Any) -> Any:
        def on_thread(*args: Any) -> Any:
            seen.append((kind, threading.get_ident()))
            return make(*args)

        return on_thread

    monkeypatch.setattr(inspections, "_MAKE", {kind: recorded(kind, make) for kind, make in inspections._MAKE.items()})
    return seen


def test_a_run_is_inspected_at_its_boundary_on_its_thread(threads: list[tuple[str, int]]) -> None:
    gated = Gated(4)
    session = made(gated)
    session.request(autocast="bf16", checkpointed=["0"])
    session.start()
    gated.let(2)
    wait_for(lambda: session.step == 2, "two steps")
    for kind in ("dtype_map", "check", "preflight"):
        session.inspect(kind)
        assert session.inspection(kind).pending
        session.inspect(kind)  # is under way
    assert threads == []  # the run waits for a batch
    assert session.run_state == "running"
    gated.let(1)
    wait_for(lambda: not session.inspection("preflight").pending, "the inspections")
    (trainer,) = {thread for _, thread in threads}
    assert trainer != threading.get_ident()
    assert [kind for kind, _ in threads] == ["dtype_map", "check", "preflight"]
    taken, report, found = (session.inspection(kind).result for kind in ("dtype_map", "check", "preflight"))
    assert isinstance(taken, DtypeMap)
    assert taken.autocast == "bf16"
    assert isinstance(report, ParityReport)
    assert report.identical
    assert isinstance(found, Findings)
    assert session.inspection("check").step == 2
    assert session.inspection("check") is session.inspection("check")
    gated.let(1)
    assert session.wait(PATIENCE_S)
    session.close()


def test_a_run_that_is_inspected_trains_as_one_that_is_not() -> None:
    losses = []
    for inspected in (False, True):
        gated = Gated(6)
        session = made(gated)
        session.request(autocast="bf16", checkpointed=["0"])
        session.start()
        for step in range(6):
            if inspected and step:
                session.inspect("dtype_map")
                session.inspect("check")
            gated.let(1)
            wait_for_step(session, step + 1)
        assert session.wait(PATIENCE_S)
        losses.append(session.history.columns("loss", "step"))
        session.close()
    assert losses[0]["step"].tolist() == losses[1]["step"].tolist() == list(range(6))
    assert losses[0]["loss"].tolist() == losses[1]["loss"].tolist()


def test_a_paused_run_does_it_at_once_and_stays_paused(threads: list[tuple[str, int]]) -> None:
    session = made(batches_of(9))
    session.single_step()
    wait_for(lambda: session.step == 1 and session.run_state == "paused", "one step")
    session.inspect("check")
    wait_for(lambda: not session.inspection("check").pending, "the check")
    assert session.inspection("check").why_not is None
    assert (session.run_state, session.step) == ("paused", 1)
    assert threads[0][1] != threading.get_ident()
    session.close()


def test_without_a_run_that_is_alive_it_is_done_here_and_no_run_begins_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    session = made(batches_of(2))
    session.start()
    assert session.wait(PATIENCE_S)
    starters: list[threading.Thread] = []
    make = inspections._MAKE["check"]

    def while_started(*args: Any) -> Any:
        starters.append(threading.Thread(target=session.start))
        starters[0].start()
        starters[0].join(0.2)
        assert session.run_state == "finished"
        return make(*args)

    monkeypatch.setattr(inspections, "_MAKE", {"check": while_started})
    session.inspect("check")
    assert isinstance(session.inspection("check").result, ParityReport)
    starters[0].join(PATIENCE_S)
    assert session.wait(PATIENCE_S)
    assert session.step == 4
    session.close()


def test_what_was_asked_for_in_the_last_step_is_done_before_the_run_ends(threads: list[tuple[str, int]]) -> None:
    entered, let_go = threading.Event(), threading.Event()

    def held(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        entered.set()
        assert let_go.wait(PATIENCE_S)
        return nn.functional.cross_entropy(output, target)

    session = made(batches_of(1), held)
    session.start()
    assert entered.wait(PATIENCE_S)
    session.inspect("check")
    session.stop()
    let_go.set()
    assert session.wait(PATIENCE_S)
    assert isinstance(session.inspection("check").result, ParityReport)
    assert threads[0][1] != threading.get_ident()
    session.close()


def test_an_error_in_it_is_kept_and_the_run_goes_on() -> None:
    calls: list[int] = []

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:  # the inspection
            raise ZeroDivisionError("of the user's own\nsecond line")
        return nn.functional.cross_entropy(output, target)

    session = made(batches_of(3), loss_fn)
    session.single_step()
    wait_for(lambda: session.run_state == "paused" and session.step == 1, "one step")
    session.inspect("dtype_map")
    wait_for(lambda: not session.inspection("dtype_map").pending, "the map")
    assert session.inspection("dtype_map").why_not == "dtype_map: ZeroDivisionError: of the user's own"
    assert session.inspection("dtype_map").result is None
    session.resume()
    assert session.wait(PATIENCE_S)
    assert session.step == 3
    session.inspect("dtype_map")
    assert session.inspection("dtype_map").why_not is None
    session.close()


def test_without_a_batch_it_says_what_to_do() -> None:
    session = made()
    with pytest.raises(RunError, match=r"check: .*a loop of your own.*session\.check\(batch, loss_fn\)"):
        session.inspect("check")
    session.inspect("preflight")  # goes without
    assert isinstance(session.inspection("preflight").result, Findings)
    session.fit(batches_of(1), nn.functional.cross_entropy, start=False)
    with pytest.raises(RunError, match="dtype_map: there is no batch to work on yet; start the run first"):
        session.inspect("dtype_map")
    session.start()
    assert session.wait(PATIENCE_S)
    assert session.why_no_batch is None
    session.close()
    with pytest.raises(SessionClosedError, match="inspect: this session was closed"):
        session.inspect("check")


def test_the_batch_of_a_failed_run_is_let_go() -> None:
    def fail(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    batches: list[Any] = batches_of(1)
    kept = weakref.ref(batches[0][0])
    session = made((batches.pop() for _ in range(1)), fail)
    session.start()
    wait_for(lambda: session.run_state == "failed", "the failure")
    session._background.runner.join()  # type: ignore[union-attr]
    gc.collect()
    assert kept() is None
    assert session.why_no_batch is not None
    session.close()


def test_a_closed_session_holds_no_batch_and_keeps_its_results() -> None:
    batches: list[Any] = batches_of(1)
    kept = weakref.ref(batches[0][0])
    session = made(batches.pop() for _ in range(1))
    session.start()
    assert session.wait(PATIENCE_S)
    session.inspect("check")
    session.close()
    gc.collect()
    assert kept() is None
    assert isinstance(session.inspection("check").result, ParityReport)


def test_a_result_made_by_hand_is_the_newest() -> None:
    session = made()
    (batch,) = batches_of(1)
    assert session.inspection("check").result is session.inspection("dtype_map").result is None
    assert session.check(batch, nn.functional.cross_entropy) is session.inspection("check").result
    assert session.dtype_map(batch, nn.functional.cross_entropy) is session.inspection("dtype_map").result
    assert session.preflight() is session.inspection("preflight").result
    assert session.precision_cost(batch, nn.functional.cross_entropy) is session.inspection("precision").result
    against_fp64 = session.precision_cost(batch, nn.functional.cross_entropy, reference="fp64")
    assert session.inspection("precision_fp64").result is against_fp64
    session.close()


def test_what_precision_costs_is_measured_at_a_boundary_of_the_run(threads: list[tuple[str, int]]) -> None:
    gated = Gated(3)
    session = made(gated)
    session.request(autocast="bf16", fp32_layers=["3"])
    session.start()
    gated.let(1)
    wait_for_step(session, 1)
    for kind in ("precision", "precision_fp64"):
        session.inspect(kind)
    gated.let(1)
    wait_for(lambda: not session.inspection("precision_fp64").pending, "the reports")
    assert [kind for kind, _ in threads] == ["precision", "precision_fp64"]
    assert threads[0][1] != threading.get_ident()
    plain, exact = (session.inspection(kind).result for kind in ("precision", "precision_fp64"))
    assert isinstance(plain, PrecisionReport)
    assert isinstance(exact, PrecisionReport)
    assert (plain.reference, *plain.loss_errors) == ("fp32", "fp16", "bf16")
    assert (exact.reference, *exact.loss_errors) == ("fp64", "fp32", "fp16", "bf16")
    assert plain.fp32_layers == ("3",)
    assert 0 < exact.layer("0", "fp32").output_error < 1e-6 < exact.layer("0", "fp16").output_error
    gated.let(1)
    assert session.wait(PATIENCE_S)
    session.close()


@pytest.mark.parametrize("on", [True, False])
def test_a_check_after_each_change_of_the_checkpointed_layers_if_asked_for(on: bool, threads: list[tuple[str, int]]) -> None:
    gated = Gated(6)
    session = made(gated)
    session.check_changes = on
    session.start()
    changes: list[dict[str, Any]] = [{}, {"checkpointed": ["0"]}, {"autocast": "bf16"}, {"checkpointed": []}, {}, {}]
    for step, change in enumerate(changes):
        if change:
            session.request(**change)
        gated.let(1)
        wait_for_step(session, step + 1)
    assert session.wait(PATIENCE_S)
    assert [kind for kind, _ in threads] == ["check", "check"] * on
    session.close()


# ---- gradients and skips -----------------------------------------------------------------------------------------------


def test_gradients_are_counted_in_the_next_step_once() -> None:
    session = made(batches_of(8))
    assert session.gradient_range() is None
    session.count_gradients()
    session.start()
    assert session.wait(PATIENCE_S)
    found = session.gradient_range()
    assert found is not None
    assert (found.step, found.scale) == (0, 1.0)
    assert [row.layer for row in found.outputs] == ["3", "2", "1", "0"]
    session.close()
    assert session.gradient_range() is not None  # what was found stays


@pytest.mark.parametrize("every", [-1, 1.0, True, "10"])
def test_what_is_no_number_of_steps_is_refused(every: Any) -> None:
    session = made()
    with pytest.raises(SettingsError, match=r"every: got .*, expected a whole number of steps.*count_gradients\(every=10\)"):
        session.count_gradients(every)
    session.close()
    with pytest.raises(SessionClosedError):
        session.count_gradients()


def test_every_nth_step_until_it_is_switched_off() -> None:
    session = made(batches_of(7))
    session.count_gradients(3)
    session.start()
    assert session.wait(PATIENCE_S)
    assert [counts.step for counts in session.numerics.gradients.counts] == [0, 3, 6]
    session.count_gradients(0)
    session.start()
    assert session.wait(PATIENCE_S)
    assert session.gradient_range(wait=False).step == 6  # type: ignore[union-attr]
    session.close()


def test_the_skip_report_names_the_parameter_and_the_cause() -> None:
    def huge(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target) * 1e6

    session = made(batches_of(3))
    session.start()
    assert session.wait(PATIENCE_S)
    assert session.skip_report() == ()
    session.fit(batches_of(4), huge, start=False)
    session.request(autocast="fp16", init_scale=2.0**16)
    session.start()
    assert session.wait(PATIENCE_S)
    (said,) = session.skip_report()
    assert said.startswith("4 skips from step 3: scale 2^16 → 2^12; first overflow in ")
    set_language("ko")
    try:
        assert str(said).startswith(korean := "스텝 3부터 4번 건너뜀: 스케일 2^16 → 2^12; 처음 오버플로우: ")
        assert f"{said}".startswith(korean)
        assert repr(said)[1:].startswith(korean)
        assert said.startswith("4 skips")  # to programs it is what it was
    finally:
        set_language(None)
    session.request(init_scale=1.0)
    session.start()
    assert session.wait(PATIENCE_S)
    told = session.skip_report()
    assert any("has fallen to" in one and "below 1" in one for one in told)
    session.close()


def test_only_the_runs_own_thread_may_use_the_model_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    gated = Gated(2)
    session = made(gated)
    said: list[str] = []
    make = inspections._MAKE["check"]

    def with_another(loop: Any, batch: Any, loss_fn: Any) -> Any:
        def elsewhere() -> None:
            try:
                session.check(batch, loss_fn)
            except RunError as error:
                said.append(str(error))

        other = threading.Thread(target=elsewhere)
        other.start()
        other.join(PATIENCE_S)
        return make(loop, batch, loss_fn)

    monkeypatch.setattr(inspections, "_MAKE", {"check": with_another})
    session.start()
    gated.let(1)
    wait_for_step(session, 1)
    session.inspect("check")
    gated.let(1)
    assert session.wait(PATIENCE_S)
    assert said == ["check: a background run is training; pause it first: session.pause()"]
    assert isinstance(session.inspection("check").result, ParityReport)
    session.close()


# ---- a loop of the user's own -----------------------------------------------------------------------------------------------


def train_one(session: AmpSession, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    (optimizer,) = session.optimizers
    optimizer.zero_grad()
    with session.autocast():
        loss = nn.functional.cross_entropy(session.model(batch[0]), batch[1])  # type: ignore[misc]
    session.scaler.scale(loss).backward()
    session.scaler.step(optimizer)
    session.scaler.update()


def on_another_thread(call: Callable[[], Any]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_preflight_is_made_at_the_next_boundary_of_a_loop_in_a_cell(threads: list[tuple[str, int]]) -> None:
    session, (batch, *_) = made(), batches_of(1)
    train_one(session, batch)
    on_another_thread(lambda: session.inspect("preflight"))  # as a widget does while the cell is busy
    assert session.inspection("preflight").pending
    assert threads == []
    train_one(session, batch)
    assert threads == [("preflight", threading.get_ident())]
    inspection = session.inspection("preflight")
    assert (inspection.pending, inspection.why_not, inspection.step) == (False, None, 2)
    assert isinstance(inspection.result, Findings)
    train_one(session, batch)
    assert len(threads) == 1
    session.close()


def test_a_preflight_that_no_boundary_came_for_is_made_when_the_loop_is_over(threads: list[tuple[str, int]]) -> None:
    session, (batch, *_) = made(), batches_of(1)
    train_one(session, batch)
    on_another_thread(lambda: session.inspect("preflight"))
    on_another_thread(session.dashboard_state)
    assert session.inspection("preflight").pending
    session.loop_ended()
    on_another_thread(session.dashboard_state)  # as a view does by itself
    assert isinstance(session.inspection("preflight").result, Findings)
    assert len(threads) == 1
    train_one(session, batch)
    assert len(threads) == 1
    session.close()


def test_a_preflight_that_the_end_of_the_session_overtakes_says_so() -> None:
    session, (batch, *_) = made(), batches_of(1)
    train_one(session, batch)
    on_another_thread(lambda: session.inspect("preflight"))
    session.close()
    inspection = session.inspection("preflight")
    assert not inspection.pending
    assert inspection.why_not is not None
    assert "make one for it: aw.AmpSession(model, optimizer)" in inspection.why_not


def test_what_cannot_be_inspected_is_said() -> None:
    session = made()
    with pytest.raises(SettingsError, match="inspect: got 'zz', expected one of 'dtype_map', 'check', 'preflight', 'precision'"):
        session.inspect("zz")  # type: ignore[arg-type]
    with pytest.raises(RunError, match=r"call session.dtype_map\(batch, loss_fn\) or session.check\(batch, loss_fn\) in a cell"):
        session.inspect("check")
    session.in_cell = True  # of %%amp, which no other cell runs beside
    with pytest.raises(RunError, match=r"when the cell is over, make a session of the model, session = aw.AmpSession\(model"):
        session.inspect("check")
    session.close()
    for call in (session.check, session.dtype_map, session.precision_cost, session.preflight, session.profile_step):
        with pytest.raises(SessionClosedError, match=r"was closed, .*: aw.AmpSession\(model, optimizer\)"):
            call(batches_of(1)[0], nn.functional.cross_entropy)  # type: ignore[operator]


def test_a_cell_that_has_only_called_the_model_is_no_obstacle() -> None:
    session, (batch, *_) = made(), batches_of(1)
    names: dict[str, Any] = {"model": session.model, "inputs": batch[0]}
    exec(compile("output = model(inputs)", "<a cell>", "exec"), names)
    assert session.step_in_progress
    assert isinstance(session.preflight(), Findings)
    assert not session.step_in_progress
    assert session.check(batch, nn.functional.cross_entropy).identical
    session.close()
