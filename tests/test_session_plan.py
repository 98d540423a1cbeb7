"""``session.plan``, ``largest_batch``, ``predict_on_cuda``, and what the Plan tab asks for, on the thread of the run."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from amp_widgets.analysis import plans
from amp_widgets.analysis.batch_sizes import BatchSizes, largest_batch
from amp_widgets.analysis.on_cuda import CudaPredictions
from amp_widgets.analysis.plan import Plan
from amp_widgets.analysis.planner import Planner
from amp_widgets.analysis.step_profile import profile_step
from amp_widgets.core.memory.budget import typed_size
from amp_widgets.errors import RunError, SessionClosedError, SettingsError
from amp_widgets.session import AmpSession
from tests.test_inspections import PATIENCE_S, Gated, wait_for, wait_for_step

cross_entropy = nn.functional.cross_entropy
GRID = {"autocast": ["fp32", "bf16"], "checkpointed": ["none", "all"]}


class Block(nn.Module):
    """Holds a lot while it runs, gives little."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 256), nn.Linear(256, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.tanh(self.wide(x)))  # type: ignore[no-any-return]


def batches_of(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(64, 8, generator=generator), torch.randint(8, (64,), generator=generator)) for _ in range(count)]


def made(batches: Any = None) -> AmpSession:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    session = AmpSession(model, torch.optim.SGD(model.parameters(), lr=0.01))
    if batches is not None:
        session.fit(batches, cross_entropy, start=False)
    return session


@pytest.fixture
def session() -> Iterator[AmpSession]:
    one = made()
    yield one
    one.close()


@pytest.fixture
def run() -> Iterator[tuple[AmpSession, Gated]]:
    gated = Gated(20)
    gated.batches = batches_of(20)
    one = made(gated)
    one.start()
    gated.let(2)
    wait_for_step(one, 2)
    yield one, gated
    gated.let(20)
    one.close()


def peak_of(session: AmpSession) -> int:
    return profile_step(session, batches_of(1)[0], cross_entropy).peak_bytes


def state_of(session: AmpSession) -> list[torch.Tensor]:
    assert session.model is not None
    return [value.clone() for value in session.model.state_dict().values()]


# ---- in a cell ----------------------------------------------------------------------------------------------------------


def test_a_plan_is_requested_and_comes_true(session: AmpSession) -> None:
    (batch,) = batches_of(1)
    before, none = state_of(session), peak_of(session)
    plan = session.plan(budget_bytes=0.75 * none, batch=batch, loss_fn=cross_entropy)
    assert isinstance(plan, Plan)
    assert plan.fits
    assert plan.layers
    assert session.inspection("plan").result is plan
    assert all(map(torch.equal, before, state_of(session)))
    session.request(checkpointed=plan)
    session.apply_pending()
    assert session.settings.checkpointed == plan.layers
    measured = peak_of(session)
    assert measured <= 0.75 * none
    assert measured == pytest.approx(plan.predicted_peak_bytes, rel=0.01)


def test_what_is_no_budget_is_refused(session: AmpSession) -> None:
    (batch,) = batches_of(1)
    with pytest.raises(SettingsError, match="budget_bytes"):
        session.plan(budget_bytes=0, batch=batch, loss_fn=cross_entropy)
    assert session.inspection("plan").result is None
    session.close()
    for ask in (
        lambda: session.plan(budget_bytes=1e9, batch=batch, loss_fn=cross_entropy),
        lambda: session.largest_batch(batch=batch, loss_fn=cross_entropy, budget_bytes=1e9),
        lambda: session.predict_on_cuda(batch, cross_entropy),
    ):
        with pytest.raises(SessionClosedError, match="this session was closed, and no longer controls the model"):
            ask()
    with pytest.raises(SessionClosedError):
        session.inspect("plan", budget_bytes=1e9)


def test_the_largest_batch_of_each_corner_is_predicted_and_confirmed(session: AmpSession) -> None:
    (batch,) = batches_of(1)
    before, budget = state_of(session), float(peak_of(session))
    found = session.largest_batch(batch=batch, loss_fn=cross_entropy, budget_bytes=budget, grid=GRID)
    assert [row.label for row in found] == ["fp32/none", "fp32/all", "bf16/none", "bf16/all"]
    sizes = {row.label: row.size for row in found}
    assert 62 <= sizes["fp32/none"] <= 66  # about as many as that peak was measured with
    assert sizes["fp32/all"] > 1.5 * sizes["fp32/none"]
    assert sizes["bf16/none"] > sizes["fp32/none"]
    assert found.confirmable
    confirmed = session.largest_batch(batch=batch, loss_fn=cross_entropy, budget_bytes=budget, grid=GRID, confirm=True)
    assert not confirmed.confirmable
    for row in confirmed:
        assert row.size == sizes[row.label]
        assert row.confirmed is not None
        assert row.confirmed.fits
        assert row.confirmed.peak_bytes == pytest.approx(row.found.predicted_peak_bytes, rel=0.01)
    assert session.inspection("largest_batch").result is confirmed
    assert all(map(torch.equal, before, state_of(session)))
    head, *rows = confirmed.to_table()
    assert head[2] == "largest batch"
    assert rows[0][2:4] == (str(sizes["fp32/none"]), "×1.00")
    assert "really run" in confirmed._repr_html_()
    assert "fp32/all" in repr(confirmed)
    assert str(confirmed) == repr(confirmed)


def test_the_newest_plan_is_a_corner(session: AmpSession) -> None:
    (batch,) = batches_of(1)
    plan = session.plan(budget_bytes=0.75 * peak_of(session), batch=batch, loss_fn=cross_entropy)
    found = session.largest_batch(
        batch=batch, loss_fn=cross_entropy, budget_bytes=2e6, grid={"autocast": ["fp32"], "checkpointed": ["none", "planned"]}
    )
    assert [(row.label, row.checkpointed) for row in found] == [("fp32/none", ()), ("fp32/planned", plan.layers)]


def test_without_a_budget_it_is_that_of_the_session(session: AmpSession) -> None:
    (batch,) = batches_of(1)
    session.memory_budget = 1e6
    grid = {"autocast": ["fp32"], "checkpointed": ["none"]}
    assert session.largest_batch(batch=batch, loss_fn=cross_entropy, grid=grid).budget_bytes == 1e6
    with pytest.raises(SettingsError, match="dimension"):
        session.largest_batch(batch=(1.0, 2.0), loss_fn=cross_entropy, grid=grid)  # type: ignore[arg-type]


def test_where_none_fits_it_says_so(session: AmpSession) -> None:
    (batch,) = batches_of(1)
    found = session.largest_batch(
        batch=batch, loss_fn=cross_entropy, budget_bytes=1000, grid={"autocast": ["fp32"], "checkpointed": ["none"]}, confirm=True
    )
    assert found.to_table()[1][2:] == ("none fits", "", "", "")


def test_it_is_cancelled_between_steps(session: AmpSession) -> None:
    (batch,) = batches_of(1)
    told: list[Any] = []
    found = largest_batch(
        session, batch, cross_entropy, budget_bytes=1e6, grid=GRID, on_progress=told.append, cancelled=lambda: len(told) > 2
    )
    assert found.cancelled
    assert [row.label for row in found] == ["fp32/none", "fp32/all"]
    assert [(one.done, one.total) for one in told] == [(0, 4), (1, 4), (2, 4)]
    assert told[0].doing == "predicting fp32/none"


def test_a_gpu_is_predicted(session: AmpSession) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    found = session.predict_on_cuda(batches_of(1)[0], cross_entropy, grid=GRID, batch_size=32)
    assert isinstance(found, CudaPredictions)
    assert [one.autocast for one in found] == ["fp32", "fp32", "bf16", "bf16"]
    assert {one.batch_size for one in found} == {32}
    assert [one.settings for one in found] == ["fp32/none", "fp32/all", "bf16/none", "bf16/all"]
    assert session.inspection("predict_on_cuda").result is found


def test_two_sets_with_as_many_layers_have_names_of_their_own_on_a_gpu(session: AmpSession) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    grid = {"autocast": ["fp32"], "checkpointed": [["0"], ["1"]]}
    found = session.predict_on_cuda(batches_of(1)[0], cross_entropy, grid=grid)
    assert [row[:2] for row in found.to_rows()[1:]] == [["fp32/none", "0"], ["fp32/1 layer", "1"], ["fp32/1 layer (2)", "1"]]


def test_a_plan_for_another_format_is_refused(session: AmpSession) -> None:
    (batch,) = batches_of(1)
    session.request(autocast="bf16")
    session.apply_pending()
    plan = session.plan(budget_bytes=0.85 * peak_of(session), batch=batch, loss_fn=cross_entropy)
    assert plan.layers
    session.request(checkpointed=plan)
    session.apply_pending()
    assert session.settings.checkpointed == plan.layers
    session.request(checkpointed=[])
    session.request(autocast="fp32")  # waits: that is what will be in force
    for ask in (
        lambda: session.request(checkpointed=plan),
        lambda: session.schedule(at_step=10, checkpointed=plan),
        lambda: session.request(checkpointed=plan, autocast="fp16"),
    ):
        with pytest.raises(SettingsError, match=r"got a plan for bf16, expected one for fp(32|16), .* checkpointed=plan\.layers"):
            ask()
        session.apply_pending()
        assert (session.settings.autocast, session.settings.checkpointed) == ("fp32", ())
    session.request(checkpointed=plan.layers)
    session.apply_pending()
    assert session.settings.checkpointed == plan.layers
    session.request(checkpointed=plan, autocast="bf16")
    session.apply_pending()
    assert session.settings.autocast == "bf16"
    session.request(fp32_layers=["1"])
    with pytest.raises(SettingsError, match="got a plan made with other layers kept in FP32"):
        session.request(checkpointed=plan)
    session.request(checkpointed=plan, fp32_layers=plan.fp32_layers)


def test_layers_kept_in_fp32_make_no_difference_to_a_plan_in_fp32(session: AmpSession) -> None:
    (batch,) = batches_of(1)
    plan = session.plan(budget_bytes=0.85 * peak_of(session), batch=batch, loss_fn=cross_entropy)
    session.request(fp32_layers=["1"])
    session.request(checkpointed=plan)
    session.request(autocast="bf16", fp32_layers=["1"])
    session.apply_pending()
    kept = session.plan(budget_bytes=0.85 * peak_of(session), batch=batch, loss_fn=cross_entropy)
    assert (kept.autocast, kept.fp32_layers) == ("bf16", ("1",))


ONE_ROW = {"autocast": ["fp32"], "checkpointed": ["none"]}


def only(fits: Callable[[int], bool], error: Exception) -> Callable[[Any, Any], torch.Tensor]:
    """A loss that some sizes have."""

    def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if not fits(len(targets)):
            raise error
        return cross_entropy(outputs, targets)

    return loss_fn


@pytest.mark.parametrize("times", [1.6, 8.0])  # twice the rows are too much for the budget, or are not
@pytest.mark.parametrize("error", [ValueError("only 64"), torch.OutOfMemoryError("none left")])
def test_a_step_that_fails_is_no_batch_that_is_too_large(session: AmpSession, error: Exception, times: float) -> None:
    (batch,) = batches_of(1)
    budget = times * peak_of(session)
    fits = (lambda size: size == 64) if isinstance(error, ValueError) else (lambda size: size <= 64)
    table = session.largest_batch(batch=batch, loss_fn=only(fits, error), budget_bytes=budget, grid=GRID, confirm=True)
    for row in table:
        assert row.why_not is None
        assert row.found is not None
        assert (row.size, row.found.failure) == (64, f"{type(error).__name__}: {error}")
        assert row.found.fails_at is not None
        assert row.found.fails_at > 64
        assert row.confirmed is not None
        assert row.confirmed.fits
    sizes = [line[2] for line in table.to_table()[1:]]
    for row, size in zip(table, sizes, strict=True):
        assert size == f"64; with {row.found.fails_at} a step fails: {type(error).__name__}: {error}"
        assert str(row.found).endswith(size[2:])


def test_where_a_real_step_runs_out_of_memory_smaller_ones_are_tried(session: AmpSession) -> None:
    (batch,) = batches_of(1)
    real_budget = float(peak_of(session))
    before = state_of(session)

    def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if not isinstance(targets, FakeTensor) and len(targets) > limit:
            raise torch.OutOfMemoryError("more than was predicted")
        return cross_entropy(outputs, targets)

    limit = 64
    table = session.largest_batch(batch=batch, loss_fn=loss_fn, budget_bytes=4 * real_budget, grid=ONE_ROW, confirm=True)
    (row,) = table
    assert row.found is not None
    assert row.confirmed is not None
    assert row.found.size > 200
    assert row.ran_out_at is not None
    assert row.size == row.confirmed.size <= limit < row.ran_out_at <= row.size + row.found.size // 32
    cells = table.to_table()[1]
    assert cells[2] == f"{'at least ' * (row.ran_out_at > row.size + 1)}{row.size}"
    assert (cells[4] == "") == (row.size not in row.found.tried)
    assert cells[5].endswith(f"; {row.ran_out_at} is too much")
    limit = row.found.size - 1  # predicted with one row too many
    (row,) = session.largest_batch(batch=batch, loss_fn=loss_fn, budget_bytes=4 * real_budget, grid=ONE_ROW, confirm=True)
    assert (row.size, row.ran_out_at) == (limit, limit + 1)
    limit = 0
    table = session.largest_batch(batch=batch, loss_fn=loss_fn, budget_bytes=4 * real_budget, grid=ONE_ROW, confirm=True)
    (row,) = table
    assert (row.size, row.confirmed.fits, table.confirmable) == (0, False, False)
    assert table.to_table()[1][2:] == ("none that was tried ran", "", "", f"ran out of memory, also with {row.ran_out_at}")
    assert all(map(torch.equal, before, state_of(session)))


def test_a_budget_of_the_session_that_is_smaller_is_named(session: AmpSession) -> None:
    (batch,) = batches_of(1)
    budget = float(peak_of(session))
    session.memory_budget = 0.5 * budget
    table = session.largest_batch(batch=batch, loss_fn=cross_entropy, budget_bytes=budget, grid=ONE_ROW)
    assert "The session's memory budget is" in repr(table)
    assert len(table.notes) == 1
    own = session.largest_batch(batch=batch, loss_fn=cross_entropy, grid=ONE_ROW, confirm=True)
    assert own.notes == ()
    assert own[0].confirmed is not None
    assert own[0].confirmed.limit_bytes == own.budget_bytes == 0.5 * budget
    session.memory_budget = None
    larger = largest_batch(session, batch, cross_entropy, budget_bytes=budget, grid=ONE_ROW)
    assert larger.notes == ()
    session.memory_budget = 0.5 * budget  # said later than it was found
    again = largest_batch(session, batch, cross_entropy, confirm=True, known=larger)
    assert again.notes == table.notes


# ---- beside a run --------------------------------------------------------------------------------------------------------


def test_a_plan_is_made_at_a_boundary_on_the_runs_thread(run: tuple[AmpSession, Gated], monkeypatch: pytest.MonkeyPatch) -> None:
    session, gated = run
    threads: list[int] = []
    learned: list[int] = []
    real, learn = Planner.plan, Planner._learn
    monkeypatch.setattr(
        Planner, "plan", lambda self, budget, **how: threads.append(threading.get_ident()) or real(self, budget, **how)
    )
    monkeypatch.setattr(Planner, "_learn", lambda self: learned.append(1) or learn(self))
    for budget in (1e6, 2e6, 9e6):  # the newest question counts
        session.inspect("plan", budget_bytes=budget)
    assert session.inspection("plan").pending
    gated.let(1)
    wait_for(lambda: not session.inspection("plan").pending, "the plan")
    first = session.inspection("plan").result
    assert isinstance(first, Plan)
    assert first.budget_bytes == 9e6
    assert (len(threads), threads[0] != threading.get_ident()) == (1, True)
    session.inspect("plan", budget_bytes=1e6)
    gated.let(1)
    wait_for(lambda: not session.inspection("plan").pending, "the second plan")
    assert session.inspection("plan").result.budget_bytes == 1e6  # type: ignore[union-attr]
    assert learned == [1]  # what was learned of the model serves again
    assert session.run_state == "running"


class Fresh(Gated):
    """Each batch is made when it is asked for, and nothing here holds it."""

    def __init__(self, count: int) -> None:
        super().__init__(0)
        self.count = count
        self.newest: list[weakref.ref[torch.Tensor]] = []

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(self.count):
            assert self.allowed.acquire(timeout=PATIENCE_S)
            batch = batches_of(1)[0]
            self.newest = [weakref.ref(each) for each in batch]
            yield batch
            del batch


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("plan", {"budget_bytes": 9e6}),
        ("plan", {"budget_bytes": 1e6}),  # for which other sets, formats and batches are tried
        ("largest_batch", {"budget_bytes": 2e6}),
        ("predict_on_cuda", {"grid": GRID}),
        ("check", {}),
        ("dtype_map", {}),
        ("preflight", {}),
        ("precision", {}),
        ("compare", {"grid": {"autocast": ["fp32", "bf16"]}, "steps": 2, "rounds": 2}),
    ],
)
def test_what_is_found_out_in_a_run_adds_nothing_to_what_its_steps_hold(kind: Any, options: dict[str, Any]) -> None:
    fresh = Fresh(20)
    session = made(fresh)
    try:
        session.start()
        fresh.let(4)
        wait_for_step(session, 4)
        if kind == "predict_on_cuda" and torch.cuda.is_available():
            pytest.skip("there is a GPU")
        batch = list(fresh.newest)
        if kind == "compare":
            session.compare_on_newest(**options)
        else:
            session.inspect(kind, **options)
        fresh.let(1)
        wait_for(lambda: (session.comparison if kind == "compare" else session.inspection(kind)).result is not None, kind)
        fresh.let(4)
        wait_for_step(session, 9)
        gc.collect()
        assert [each() for each in batch] == [None, None]
        rows = session.history.columns("peak_bytes", "allocated_bytes")
        for name in ("peak_bytes", "allocated_bytes"):
            assert set(rows[name][5:].tolist()) == {rows[name][3]}
    finally:
        fresh.let(20)
        session.close()


def test_asked_while_one_is_made_another_is_made_afterwards(
    run: tuple[AmpSession, Gated], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, gated = run
    entered, let_go = threading.Event(), threading.Event()
    real = plans.Plans.plan
    budgets: list[float] = []

    def held(self: Any, *args: Any, budget_bytes: float, **how: Any) -> Plan:
        budgets.append(budget_bytes)
        entered.set()
        assert let_go.wait(PATIENCE_S)
        return real(self, *args, budget_bytes=budget_bytes, **how)

    monkeypatch.setattr(plans.Plans, "plan", held)
    session.inspect("plan", budget_bytes=1e6)
    gated.let(1)
    assert entered.wait(PATIENCE_S)
    session.inspect("plan", budget_bytes=1e6)  # is under way
    session.inspect("plan", budget_bytes=2e6)
    session.inspect("plan", budget_bytes=3e6)
    assert "training waits for that" in " ".join(session.dashboard_state().notes)
    let_go.set()
    wait_for(lambda: not session.inspection("plan").pending, "the plans")
    assert budgets == [1e6, 3e6]
    assert session.inspection("plan").result.budget_bytes == 3e6  # type: ignore[union-attr]


def test_what_goes_wrong_is_kept_and_the_run_goes_on(run: tuple[AmpSession, Gated]) -> None:
    session, gated = run
    session.inspect("plan", budget_bytes=-1.0)
    gated.let(1)
    wait_for(lambda: not session.inspection("plan").pending, "the refusal")
    assert "budget_bytes" in str(session.inspection("plan").why_not)
    step = session.step
    gated.let(1)
    wait_for_step(session, step + 1)
    session.inspect("plan", budget_bytes=1e7)
    gated.let(1)
    wait_for(lambda: session.inspection("plan").result is not None, "the plan")
    assert session.inspection("plan").why_not is None


def test_largest_batch_beside_a_run_has_progress_and_is_cancelled(run: tuple[AmpSession, Gated]) -> None:
    session, gated = run
    session.inspect("largest_batch", budget_bytes=1e6, grid=GRID)
    session.cancel_inspection("largest_batch")
    assert session.inspection("largest_batch").cancelling
    gated.let(1)
    wait_for(lambda: not session.inspection("largest_batch").pending, "the end")
    ended = session.inspection("largest_batch")
    assert isinstance(ended.result, BatchSizes)
    assert (ended.result.cancelled, len(ended.result), ended.cancelling, ended.progress) == (True, 0, False, None)
    session.inspect("largest_batch", budget_bytes=1e6, grid={"autocast": ["fp32"], "checkpointed": ["none"]})
    gated.let(1)
    wait_for(lambda: not session.inspection("largest_batch").pending, "the sizes")
    found = session.inspection("largest_batch").result
    assert isinstance(found, BatchSizes)
    session.inspect("largest_batch", known=found, confirm=True)  # what is shown is confirmed, and not found again
    gated.let(1)
    wait_for(lambda: not session.inspection("largest_batch").pending, "the confirmation")
    confirmed = session.inspection("largest_batch").result
    assert isinstance(confirmed, BatchSizes)
    assert confirmed.rows[0].found is found.rows[0].found
    assert confirmed.rows[0].confirmed is not None


class Held:
    """Predicted steps of plans, of which each waits until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self._let_go = threading.Semaphore(0), threading.Semaphore(0)
        self.count = 0
        real = Planner._predict

        def predict(planner: Planner, **settings: Any) -> Any:
            self.count += 1
            self.entered.release()
            assert self._let_go.acquire(timeout=PATIENCE_S)
            return real(planner, **settings)

        monkeypatch.setattr(Planner, "_predict", predict)

    def wait(self) -> None:
        assert self.entered.acquire(timeout=PATIENCE_S)

    def go(self, steps: int = 1) -> None:
        self._let_go.release(steps)


def test_a_plan_beside_a_run_is_cancelled_with_what_waits_behind_it(
    run: tuple[AmpSession, Gated], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, gated = run
    held = Held(monkeypatch)
    session.cancel_inspection("plan")  # there is none
    session.inspect("plan", budget_bytes=1e6)
    gated.let(1)
    held.wait()
    session.inspect("plan", budget_bytes=2e6)
    session.cancel_inspection("plan")
    assert session.inspection("plan").cancelling
    held.go()
    wait_for(lambda: not session.inspection("plan").pending, "the end")
    ended = session.inspection("plan")
    assert (held.count, ended.result, ended.why_not, ended.cancelling) == (1, None, "plan: it was cancelled", False)
    held.go(1000)
    step = session.step
    gated.let(1)
    wait_for(lambda: session.step > step, "another step")
    assert not session.inspection("plan").pending
    assert held.count == 1
    session.inspect("plan", budget_bytes=3e6)
    gated.let(1)
    wait_for(lambda: session.inspection("plan").result is not None, "a plan")
    assert session.inspection("plan").result.budget_bytes == 3e6  # type: ignore[union-attr]


def test_the_same_plan_asked_for_again_while_a_cancelled_one_ends_is_made(
    run: tuple[AmpSession, Gated], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, gated = run
    held = Held(monkeypatch)
    session.inspect("plan", budget_bytes=1e6)
    gated.let(1)
    held.wait()
    session.cancel_inspection("plan")
    session.inspect("plan", budget_bytes=1e6)
    held.go(1000)
    gated.let(1)
    wait_for(lambda: session.inspection("plan").result is not None, "a plan")
    assert session.inspection("plan").why_not is None


@pytest.mark.parametrize("end", [AmpSession.stop, AmpSession.close])
def test_stop_and_close_do_not_wait_for_a_plan(
    run: tuple[AmpSession, Gated], monkeypatch: pytest.MonkeyPatch, end: Callable[[AmpSession], None]
) -> None:
    session, gated = run
    held = Held(monkeypatch)
    session.inspect("plan", budget_bytes=1e6)
    gated.let(1)
    held.wait()
    ending = threading.Thread(target=end, args=(session,))
    ending.start()
    runner = session._background.runner
    wait_for(lambda: runner is not None and runner.stopping, "the request")
    held.go()
    ending.join(PATIENCE_S)
    assert not ending.is_alive()
    wait_for(lambda: not session.inspection("plan").pending, "the end")
    assert held.count == 1
    assert session.inspection("plan").why_not == "plan: it was cancelled"


def test_after_a_run_it_is_made_on_another_thread_and_none_starts_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    session = made(batches_of(2))
    assert "start the run first" in str(session.why_no_plan)
    with pytest.raises(RunError, match="plan: there is no batch to work on yet"):
        session.inspect("plan", budget_bytes=1e6)
    session.start()
    assert session.wait(PATIENCE_S)
    entered, let_go = threading.Event(), threading.Event()
    real = plans.Plans.plan

    def held(self: Any, *args: Any, **options: Any) -> Plan:
        entered.set()
        assert let_go.wait(PATIENCE_S)
        return real(self, *args, **options)

    monkeypatch.setattr(plans.Plans, "plan", held)
    session.inspect("plan", budget_bytes=1e6)
    assert entered.wait(PATIENCE_S)
    for refused in (session.start, session.reset, lambda: session.fit(batches_of(1), cross_entropy)):
        with pytest.raises(RunError, match="predicted"):
            refused()
    let_go.set()
    wait_for(lambda: not session.inspection("plan").pending, "the plan")
    wait_for(lambda: _starts(session), "the run")
    assert session.wait(PATIENCE_S)
    session.close()


def _starts(session: AmpSession) -> bool:
    try:
        session.start()
    except RunError:
        return False
    return True


def test_a_loop_of_the_users_own_is_told_what_to_call(session: AmpSession) -> None:
    told = str(session.why_no_plan)
    assert "session.plan(budget_bytes=8e9, batch=batch, loss_fn=loss_fn)" in told
    assert "the result is shown here" in told
    with pytest.raises(RunError, match="plan: there is no batch"):
        session.inspect("plan", budget_bytes=1e6)


def test_closed_it_lets_go_of_the_model(run: tuple[AmpSession, Gated]) -> None:
    session, gated = run
    session.inspect("plan", budget_bytes=1e6)
    gated.let(1)
    wait_for(lambda: session.inspection("plan").result is not None, "the plan")
    model = weakref.ref(session.model)
    gated.let(20)
    session.close()
    gc.collect()
    assert model() is None
    assert isinstance(session.inspection("plan").result, Plan)


# ---- sizes as people type them -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"), [("8 GB", 8e9), (" 60MB ", 60e6), ("1.5GiB", 1.5 * 2**30), ("200e6", 200e6), ("off", None)]
)
def test_typed_sizes(text: str, size: float | None) -> None:
    assert typed_size(text) == size


@pytest.mark.parametrize("text", ["", "MB", "8 apples", "-5"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(SettingsError, match="expected a size such as 200MB"):
        typed_size(text)
