"""``session.compare`` and what the Compare tab asks for: on the run's thread, with a bar, and broken off on request."""

from __future__ import annotations

import contextlib
import gc
import itertools
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import amp_widgets.on_demand as on_demand_module
from amp_widgets.analysis.comparison import Comparison, Progress
from amp_widgets.analysis.comparisons import Comparisons
from amp_widgets.analysis.progress_bar import ProgressBar
from amp_widgets.errors import RunError, SessionClosedError, SettingsError
from amp_widgets.session import AmpSession
from tests.test_inspections import PATIENCE_S, Gated, batches_of, made, wait_for, wait_for_step

GRID = {"autocast": ["fp32", "bf16"], "checkpointed": ["none", "all"]}
LABELS = ["fp32/none", "fp32/all", "bf16/none", "bf16/all"]
SMALL: dict[str, Any] = {"grid": GRID, "steps": 1, "rounds": 1}
cross_entropy = nn.functional.cross_entropy


class Held:
    """A loss that can be held for as long as a test wants, once it is armed."""

    def __init__(self) -> None:
        self.armed = False
        self.entered, self.let_go = threading.Event(), threading.Event()
        self.thread = 0
        self.calls = 0

        def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:  # what is in a closure is not put back afterwards
            self.calls += 1
            self.thread = threading.get_ident()
            if self.armed:
                self.entered.set()
                assert self.let_go.wait(PATIENCE_S)
            return cross_entropy(output, target)

        self.loss = loss


@contextlib.contextmanager
def held(batches: Any) -> Iterator[tuple[AmpSession, Held]]:
    hold = Held()
    session = made(batches, hold.loss)
    try:
        yield session, hold
    finally:
        hold.let_go.set()
        session.close()


def settled(session: AmpSession) -> None:
    wait_for(lambda: not session.comparison.pending, "the comparison")


def state_of(session: AmpSession) -> list[torch.Tensor]:
    assert session.model is not None
    return [value.clone() for value in session.model.state_dict().values()]


def labels(comparison: Comparison | None) -> list[str]:
    return [] if comparison is None else [row.label for row in comparison.rows]


# ---- in a cell ----------------------------------------------------------------------------------------------------------


def test_a_loop_of_the_users_own_is_compared_here_and_the_result_is_kept() -> None:
    session = made()
    (batch,) = batches_of(1)
    before = state_of(session)
    assert session.comparison.result is None
    compared = session.compare(batch, cross_entropy, **SMALL)
    assert labels(compared) == LABELS
    status = session.comparison
    assert (status.result, status.pending, status.progress, status.why_not) == (compared, False, None, None)
    assert session.comparison is status
    assert all(map(torch.equal, before, state_of(session)))
    session.close()
    assert session.comparison.result is compared
    with pytest.raises(SessionClosedError, match="compare: "):
        session.compare(batch, cross_entropy)


def test_everything_reaches_what_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def fake(*args: Any, **options: Any) -> Comparison:
        given.update(options, args=args)
        return Comparison(rows=(), steps=2, rounds=4, device="", batch="", batch_size=None, memory_source="")

    monkeypatch.setattr(on_demand_module, "compare", fake)
    session = made()
    session.compare("batch", "loss", grid=GRID, steps=2, rounds=4, planned=["0"], slow_step_s=9.0)  # type: ignore[arg-type]
    assert given.pop("args") == (session, "batch", "loss")
    assert given.pop("cancelled")() is False
    assert callable(given.pop("on_progress"))
    assert given == {"grid": GRID, "steps": 2, "rounds": 4, "planned": ["0"], "slow_step_s": 9.0}
    session.close()


@pytest.mark.parametrize("alive", [True, False], ids=["a paused run", "a run that was not started"])
def test_beside_a_run_it_is_done_on_a_thread_of_the_run(alive: bool) -> None:
    with held(batches_of(9)) as (session, hold):
        if alive:
            session.single_step()
            wait_for(lambda: session.run_state == "paused", "the pause")
        state = session.run_state
        compared = session.compare(batches_of(1)[0], hold.loss, **SMALL)
        assert labels(compared) == LABELS
        assert hold.thread != threading.get_ident()
        assert (session.run_state, session.step) == (state, int(alive))
        session.start()
        assert session.wait(PATIENCE_S)
        assert session.step == 9


def test_a_run_that_trains_waits_and_goes_on() -> None:
    def losses(*, compared: bool) -> list[float]:
        gated = Gated(5)
        session = made(gated)
        session.start()
        gated.let(2)
        wait_for_step(session, 2)
        seen: list[Comparison] = []
        asker = threading.Thread(target=lambda: seen.append(session.compare(batches_of(1)[0], cross_entropy, **SMALL)))
        if compared:
            asker.start()
            wait_for(lambda: session.comparison.pending, "the question")
            assert session.run_state == "running"
        gated.let(3)
        assert session.wait(PATIENCE_S)
        if compared:
            asker.join(PATIENCE_S)
            assert labels(seen[0]) == LABELS
        session.close()
        columns = session.history.columns("loss", "step")
        assert columns["step"].tolist() == list(range(5))
        return list(columns["loss"].tolist())

    assert losses(compared=False) == losses(compared=True)


def test_what_it_raises_is_raised_here_and_kept() -> None:
    for session in (made(), made(batches_of(2))):
        before = session.compare(batches_of(1)[0], cross_entropy, **SMALL)
        with pytest.raises(SettingsError, match="steps: got 0"):
            session.compare(batches_of(1)[0], cross_entropy, steps=0)
        assert session.comparison.why_not is not None
        assert session.comparison.why_not.startswith("steps: got 0")

        def fail(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError("of the user's own\nsecond line")

        with pytest.raises(ZeroDivisionError):
            session.compare(batches_of(1)[0], fail)
        status = session.comparison
        assert status.why_not == "compare: ZeroDivisionError: of the user's own"
        assert (status.result, status.pending) == (before, False)
        session.close()


def test_an_interrupt_ends_it_and_the_session_goes_on() -> None:
    def interrupted(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    session = made()
    with pytest.raises(KeyboardInterrupt):
        session.compare(batches_of(1)[0], interrupted)
    assert session.comparison.why_not == "compare: it was interrupted"
    assert not session.comparison.pending
    session.compare(batches_of(1)[0], cross_entropy, **SMALL)
    session.close()


def test_an_interrupt_of_the_cell_that_waits_ends_it_on_the_runs_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    with held(batches_of(2)) as (session, hold):
        hold.armed = True

        def interrupt(bar: ProgressBar, progress: Progress | None) -> None:
            assert hold.entered.wait(PATIENCE_S)
            hold.let_go.set()
            raise KeyboardInterrupt

        monkeypatch.setattr(ProgressBar, "show", interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.compare(batches_of(1)[0], hold.loss, **SMALL)
        assert not session.comparison.pending
        assert session.comparison.cancelled
        assert hold.calls == 1
        session.start()
        assert session.wait(PATIENCE_S)


# ---- asked for by a view ------------------------------------------------------------------------------------------------


def test_the_newest_batch_of_a_run_at_its_boundary_on_its_thread() -> None:
    gated = Gated(3)
    with held(gated) as (session, hold):
        session.start()
        gated.let(1)
        wait_for_step(session, 1)
        calls = hold.calls
        session.compare_on_newest(**SMALL)
        assert session.comparison.pending
        assert session.comparison.progress is None
        assert hold.calls == calls  # the run waits for a batch
        session.compare_on_newest(**SMALL)  # is under way
        gated.let(1)
        settled(session)
        assert labels(session.comparison.result) == LABELS
        assert session.comparison.step == 1
        gated.let(1)
        assert session.wait(PATIENCE_S)
        assert session.step == 3
        assert hold.calls == calls + 2 + 4 * 3  # one warm-up step, a timed one, and one that is measured


def test_progress_and_cancel() -> None:
    gated = Gated(3)
    with held(gated) as (session, hold):
        session.start()
        gated.let(1)
        wait_for_step(session, 1)
        session.cancel_comparison()  # there is none
        assert not session.comparison.cancelling
        hold.armed = True
        session.compare_on_newest(**SMALL)
        gated.let(1)
        assert hold.entered.wait(PATIENCE_S)
        assert not any("being compared" in note for note in session.dashboard_state().notes)
        session.cancel_comparison()
        assert session.comparison.cancelling
        hold.armed = False
        hold.let_go.set()
        settled(session)
        assert (session.comparison.cancelled, session.comparison.result, session.comparison.cancelling) == (True, None, False)
        wait_for_step(session, 2)  # it goes on
        gated.let(1)
        assert session.wait(PATIENCE_S)
        session.compare_on_newest(**SMALL)
        settled(session)
        assert not session.comparison.cancelled
        assert labels(session.comparison.result) == LABELS


def test_progress_is_told_while_it_goes_on() -> None:
    seen: list[tuple[Progress | None, bool]] = []
    session = made(batches_of(1))

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        noted = any("training waits" in note for note in session.dashboard_state().notes)
        seen.append((session.comparison.progress, noted))
        return cross_entropy(output, target)

    session.compare(batches_of(1)[0], loss_fn, **SMALL)
    told = [(progress.done, progress.total) if progress else None for progress, _ in seen]
    assert told == [None, *((done, 12) for done in range(1, 12))]
    assert [noted for _, noted in seen] == [False] + [True] * 11
    assert [progress.doing for progress, _ in seen if progress][-1] == "round 1 of 1: bf16/all"
    session.close()


@pytest.mark.parametrize("end", ["stop", "close"])
@pytest.mark.parametrize("alive", [True, False], ids=["a run that trains", "a run that has ended"])
def test_stopping_and_closing_cancel_it(end: str, alive: bool) -> None:
    with held(batches_of(1) if not alive else batches_of(1) * 1000) as (session, hold):
        session.start()
        if alive:
            wait_for(lambda: session.step > 0, "a step")
        else:
            assert session.wait(PATIENCE_S)
        before = None if alive else state_of(session)
        hold.armed = True
        session.compare_on_newest(grid=GRID, steps=50, rounds=50)
        assert hold.entered.wait(PATIENCE_S)
        calls = hold.calls
        model = session.model
        ender = threading.Thread(target=getattr(session, end))
        ender.start()
        runner = session._background.runner
        wait_for(lambda: runner is not None and runner.stopping, "the request to stop")
        hold.let_go.set()
        ender.join(PATIENCE_S)
        settled(session)
        assert hold.calls <= calls + 1 + alive
        assert session.comparison.result is None
        assert session.comparison.why_not is None
        if before is not None:
            assert model is not None
            assert all(map(torch.equal, before, model.state_dict().values()))
        if end == "stop" and alive:
            assert session.wait(PATIENCE_S)
            assert session.run_state == "stopped"


def test_while_a_run_is_not_alive_none_begins_meanwhile_and_nothing_else_is_measured() -> None:
    with held(batches_of(2)) as (session, hold):
        session.start()
        assert session.wait(PATIENCE_S)
        hold.armed = True
        session.compare_on_newest(**SMALL)
        assert hold.entered.wait(PATIENCE_S)
        assert session.run_state == "finished"
        (batch,) = batches_of(1)
        acts: list[Callable[[], object]] = [
            session.start, session.single_step, session.reset, lambda: session.fit(batches_of(1), cross_entropy),
            lambda: next(iter(session.steps([1]))), lambda: session.compare(batch, cross_entropy),
        ]  # fmt: skip
        for act in acts:
            with pytest.raises(RunError, match="settings are being compared"):
                act()
        with pytest.raises(RunError, match="check: another thread is measuring something"):
            session.check(batch, cross_entropy)
        session.inspect("check")  # waits for its turn
        assert session.inspection("check").pending
        session.request(autocast="bf16")
        assert not session.apply_pending()
        hold.armed = False
        hold.let_go.set()
        settled(session)
        wait_for(lambda: not session.inspection("check").pending, "the check")
        assert session.inspection("check").result is not None
        assert session.apply_pending()
        session.start()
        assert session.wait(PATIENCE_S)
        assert session.step == 4


def test_pausing_meanwhile_pauses_when_it_is_over() -> None:
    with held(batches_of(1) * 1000) as (session, hold):
        session.start()
        wait_for(lambda: session.step > 0, "a step")
        hold.armed = True
        session.compare_on_newest(**SMALL)
        assert hold.entered.wait(PATIENCE_S)
        wait_for(lambda: session.comparison.pending, "the comparison")
        session.pause()
        hold.armed = False
        hold.let_go.set()
        settled(session)
        wait_for(lambda: session.run_state == "paused", "the pause")
        assert labels(session.comparison.result) == LABELS


def test_without_a_batch_it_says_what_to_do() -> None:
    session = made()
    with pytest.raises(RunError, match=r"compare: there is no batch .*loop of your own.*session\.compare\(batch, loss_fn\) in a"):
        session.compare_on_newest()
    session.fit(batches_of(1), cross_entropy, start=False)
    with pytest.raises(RunError, match="compare: there is no batch to work on yet; start the run first"):
        session.compare_on_newest()
    session.close()
    with pytest.raises(SessionClosedError, match="compare: "):
        session.compare_on_newest()
    session.cancel_comparison()


def test_an_error_in_it_is_kept_and_the_run_goes_on() -> None:
    calls: list[int] = []

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError("of the user's own")
        return cross_entropy(output, target)

    session = made(batches_of(3), loss_fn)
    session.single_step()
    wait_for(lambda: session.run_state == "paused" and session.step == 1, "one step")
    session.compare_on_newest(**SMALL)
    settled(session)
    assert session.comparison.why_not == "compare: ZeroDivisionError: of the user's own"
    session.resume()
    assert session.wait(PATIENCE_S)
    session.close()


def test_a_session_that_is_closed_is_freed_with_its_batch() -> None:
    batches: list[Any] = batches_of(1)
    kept = weakref.ref(batches[0][0])
    session = made(batches.pop() for _ in range(1))
    session.start()
    assert session.wait(PATIENCE_S)
    session.compare_on_newest(**SMALL)
    settled(session)
    session.close()
    gone = weakref.ref(session)
    gc.collect()
    assert kept() is None
    assert labels(session.comparison.result) == LABELS
    del session
    gc.collect()
    assert gone() is None


# ---- how it stands, and the bar -------------------------------------------------------------------------------------------


def made_of(*names: str, cancelled: bool = False) -> Comparison:
    from amp_widgets.analysis.comparison import Row

    rows = tuple(Row(label=name, autocast="fp32", layers_name="none", checkpointed=()) for name in names)
    return Comparison(rows=rows, steps=1, rounds=1, device="cpu", batch="", batch_size=4, memory_source="", cancelled=cancelled)


def test_what_was_cancelled_with_something_complete_is_the_newest_and_else_the_former_stays() -> None:
    comparisons = Comparisons()
    first, part, nothing = made_of("a", "b"), made_of("a", cancelled=True), made_of(cancelled=True)
    for made_now, newest, cancelled in ((first, first, False), (part, part, False), (nothing, part, True), (first, first, False)):
        assert comparisons.ask()
        assert not comparisons.ask()
        assert comparisons.carry_out(lambda it=made_now, **_: it, 7) is made_now
        status = comparisons.status
        assert (status.result, status.cancelled, status.pending, status.step) == (newest, cancelled, False, 7)


class FakeBar:
    made: list[FakeBar] = []  # noqa: RUF012

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.drawn: list[tuple[int, int, str, str]] = []
        self.total = self.n = 0
        self.desc = self.postfix = ""
        self.closed = False
        FakeBar.made.append(self)

    def set_description_str(self, text: str, refresh: bool = True) -> None:
        self.desc = text

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        self.postfix = text

    def refresh(self) -> None:
        self.drawn.append((self.n, self.total, self.desc, self.postfix))

    def close(self) -> None:
        self.closed = True


def test_the_bar_shows_steps_what_is_done_and_the_time_left_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    import tqdm.auto

    monkeypatch.setattr(tqdm.auto, "tqdm", FakeBar)
    FakeBar.made.clear()
    now_s = [0.0]
    doing = "round 1 of 3: bf16/all"
    with ProgressBar(lambda: now_s[0]) as bar:
        bar.show(None)
        bar.show(Progress(done=1, total=9, seconds_left=79.6, doing=doing))
        now_s[0] = 0.05
        bar.show(Progress(done=2, total=9, seconds_left=7.0, doing=doing))
        now_s[0] = 0.15
        newest = Progress(done=3, total=8, seconds_left=float("nan"), doing=doing)
        bar.show(newest)
        now_s[0] = 9.0
        bar.show(newest)  # it is drawn
    [shown] = FakeBar.made
    assert shown.drawn == [(1, 9, doing, "about 1 min 20 s left"), (3, 8, doing, "")]
    assert shown.closed
    assert shown.options["leave"] is False
    bar.show(Progress(done=9, total=9, seconds_left=0.0, doing=doing))  # is over


@pytest.mark.parametrize("error", [None, KeyboardInterrupt()], ids=["the last step was not drawn", "interrupted"])
def test_no_bar_stays_in_a_notebook(error: BaseException | None, monkeypatch: pytest.MonkeyPatch) -> None:
    import tqdm.auto
    import tqdm.notebook

    made: list[Any] = []

    class Bar(tqdm.notebook.tqdm):  # type: ignore[type-arg, misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, display=False, **options)
            made.append(self)

    monkeypatch.setattr(tqdm.auto, "tqdm", Bar)
    with contextlib.suppress(KeyboardInterrupt), ProgressBar() as bar:
        bar.show(Progress(done=2, total=3, seconds_left=1.0, doing="fp32/none"))
        assert (made[0].container.children[1].value, made[0].container.children[1].max) == (2, 3)
        if error is not None:
            raise error
    [shown] = made
    assert shown.container.children[1].bar_style != "danger"
    assert shown.container.comm is None  # closed: it is taken away


DROPPED = [(16, 48), (17, 32), (18, 32)]
"""Steps that are done, of how many, as a format is dropped."""


def show_dropped() -> None:
    seconds = itertools.count()
    with ProgressBar(lambda: next(seconds)) as bar:
        for done, total in DROPPED:
            bar.show(Progress(done=done, total=total, seconds_left=1.0, doing="bf16/none"))


def test_the_bar_never_goes_back(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import tqdm.auto
    import tqdm.std

    monkeypatch.setattr(tqdm.auto, "tqdm", tqdm.std.tqdm)
    show_dropped()
    written = capsys.readouterr().err
    assert re.findall(r"(\d+)/(\d+) steps", written) == [("0", "1"), ("16", "48"), ("17", "32"), ("18", "32")]


def test_the_bar_never_goes_back_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    import tqdm.auto
    import tqdm.notebook

    drawn: list[tuple[float, float]] = []

    class Bar(tqdm.notebook.tqdm):  # type: ignore[type-arg, misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, display=False, **options)
            bar = self.container.children[1]
            bar.observe(lambda _: drawn.append((bar.value, bar.max)), "value")

    monkeypatch.setattr(tqdm.auto, "tqdm", Bar)
    show_dropped()
    assert drawn[: len(DROPPED)] == DROPPED
    assert all(value == most for value, most in drawn[len(DROPPED) :])  # full, as it is taken away


def test_the_bar_is_written_while_it_compares(capsys: pytest.CaptureFixture[str]) -> None:
    session = made()
    session.compare(batches_of(1)[0], cross_entropy, **SMALL)
    session.close()
    written = capsys.readouterr().err
    assert "round 1 of 1: fp32/none:" in written
    assert "steps, about 0 s left" in written
