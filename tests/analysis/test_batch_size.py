"""The largest batch that fits: exact to one row, and confirmed by a real step that leaves nothing behind."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_widgets.analysis import batch_size as module
from amp_widgets.analysis.batch_size import BatchSize, confirm, max_batch_size
from amp_widgets.analysis.batch_sizes import largest_batch
from amp_widgets.analysis.fake_step import PREDICTED, TooLargeError, fake_steps, predict_step
from amp_widgets.analysis.on_cuda import predict_on_cuda
from amp_widgets.analysis.stoppable import CancelledError
from amp_widgets.core.memory.budget import MemoryBudgetError
from amp_widgets.core.memory.profile import memory_text
from amp_widgets.core.settings import Settings
from amp_widgets.errors import RunError, SessionClosedError, SettingsError
from amp_widgets.session import AmpSession
from tests.analysis.six_nets import NETS, Bench, mlp, recurrent, resnet

Untouched = Callable[[AmpSession], contextlib.AbstractContextManager[None]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@contextlib.contextmanager
def session(bench: Bench) -> Iterator[AmpSession]:
    with AmpSession(bench.model, bench.optimizers) as made:
        yield made


def rows(value: Any, size: int) -> Any:
    if isinstance(value, Tensor):
        taken = value[torch.arange(size) % len(value)]
        return taken.to(memory_format=torch.channels_last) if value.ndim == 4 and not value.is_contiguous() else taken
    return {key: rows(inner, size) for key, inner in value.items()}


def narrow(*layers: nn.Module) -> Bench:
    model = nn.Sequential(nn.Linear(4, 4), *layers)
    return Bench(model, [torch.optim.SGD(model.parameters(), lr=0.1)], (torch.randn(4, 4), torch.randn(4, 4)), F.mse_loss)


def live_tensors() -> int:
    """Bytes of the storages that Python can see."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if issubclass(type(each), Tensor) and each.device.type == "cpu":
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


# ---- the search ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.0, 1.7, 4.0])
@pytest.mark.parametrize(
    ("name", "settings"),
    [("mlp", {}), ("resnet", {"autocast": "bf16"}), ("two_inputs", {"checkpointed": ["image", "text"]})],
)
def test_a_real_step_fits_with_this_size_and_not_with_one_row_more(name: str, settings: dict[str, Any], factor: float) -> None:
    bench = NETS[name]()
    with session(bench) as ours:
        with fake_steps(ours, bench.batch, bench.loss_fn) as steps:
            budget = factor * steps.step(**settings).peak_bytes
            found = max_batch_size(steps, budget, **settings)
        assert found.obtained == PREDICTED
        assert not found.capped
        assert found.settings.autocast == settings.get("autocast", "fp32")
        if settings:
            ours.request(**settings)
            ours.apply_pending()
        peaks = []
        for size in (found.size, found.size + 1):
            batch = (rows(bench.batch[0], size), rows(bench.batch[1], size))
            ours.profile_step(batch, bench.loss_fn)
            peaks.append(ours.profile_step(batch, bench.loss_fn).peak_bytes)
    assert peaks == [found.tried[found.size], found.tried[found.size + 1]]
    assert found.predicted_peak_bytes == peaks[0] <= budget < peaks[1]
    assert len(found.tried) <= 10


class Line:
    """Stands for predictions: peaks by a formula."""

    batch_size = 16
    at_hand_bytes = math.inf
    because = None

    def __init__(self, peak: Callable[[int], float]) -> None:
        self.peak = peak
        self.asked: list[int] = []

    def check_not_compiled(self) -> None:
        pass

    def step(self, *, batch_size: int, **settings: Any) -> Any:
        self.asked.append(batch_size)
        step = type("Step", (), {})()
        step.peak_bytes, step.settings, step.obtained = self.peak(batch_size), None, PREDICTED
        return step


class Measured(Line):
    """Stands for steps that cannot be predicted, from some size on; memory runs out where the limit says so."""

    def __init__(self, peak: Callable[[int], float], predicted_below: int) -> None:
        super().__init__(peak)
        self.predicted_below = predicted_below
        self.ran: list[int] = []
        self.known = 16

    def step(self, *, batch_size: int, **settings: Any) -> Any:
        step = super().step(batch_size=batch_size)
        if batch_size >= self.predicted_below:
            if batch_size > settings["real_at_most"]:
                raise TooLargeError("test")
            assert batch_size <= max(16, 2 * self.known)
            self.ran.append(batch_size)
            if step.peak_bytes > settings["limit_bytes"]:
                raise MemoryBudgetError("test")
            step.obtained = "measured: test"
        if step.peak_bytes <= settings["limit_bytes"]:
            self.known = max(self.known, batch_size)
        return step


@pytest.mark.parametrize("predicted_below", [1, 17, 100, 700])
@pytest.mark.parametrize("peak", [lambda size: 500 + 3 * size, lambda size: 2000 if size < 300 else 4 * size + 2000])
def test_real_steps_are_approached_by_no_more_than_twice_what_is_known_to_fit(
    peak: Callable[[int], float], predicted_below: int
) -> None:
    for budget in range(2500, 40_000, 3333):
        line: Any = Measured(peak, predicted_below)
        found = max_batch_size(line, budget, at_most=20_000)
        assert found.size == max(size for size in range(1, 20_001) if peak(size) <= budget)
        assert len(line.asked) <= 40


def test_real_steps_stay_within_the_memory_there_is() -> None:
    line: Any = Measured(lambda size: 500 + 3 * size, 1)
    line.at_hand_bytes = 1500
    found = max_batch_size(line, 1e9)
    assert (found.size, found.capped) == (333, True)
    assert max(line.ran) == 334
    assert "at least 333 fits" in str(_with_settings(found))
    alone: Any = Measured(lambda size: 500 + 3 * size, 1)
    alone.at_hand_bytes = 400
    with pytest.raises(RunError, match="no batch that runs fits into 400 B"):
        max_batch_size(alone, 1e9)


def test_one_known_peak_is_continued_in_proportion() -> None:
    line: Any = Measured(lambda size: 10 * size, 1)
    assert max_batch_size(line, 250).size == 25
    assert line.ran == [16, 25, 26]


def test_a_compiled_model_runs_no_step() -> None:
    bench = narrow()
    bench.model.compile(backend="eager")
    loss_fn = torch.compile(F.mse_loss, backend="eager")
    calls: list[int] = []
    bench.model.register_forward_hook(lambda *_: calls.append(1))
    plain = narrow()
    for each, loss in ((bench, F.mse_loss), (plain, loss_fn)):
        with session(each) as ours:
            for ask in (
                lambda: largest_batch(ours, each.batch, loss, budget_bytes=1e9),  # noqa: B023
                lambda: confirm(ours, each.batch, loss, batch_size=4),  # noqa: B023
                lambda: predict_on_cuda(ours, each.batch, loss),  # noqa: B023
            ):
                with pytest.raises(RunError, match=r"(the model|loss_fn) is compiled by torch\.compile"):
                    ask()
            with fake_steps(ours, each.batch, loss) as steps, pytest.raises(RunError, match=r"compiled by torch\.compile"):
                max_batch_size(steps, 1e9)
    assert not calls


def test_every_way_to_say_a_budget() -> None:
    bench = narrow()
    with session(bench) as ours:
        grid = {"autocast": ["fp32"], "checkpointed": ["none"]}
        said: list[Any] = ["2 kB", 2000, torch.tensor(2000), np.int64(2000), np.float32(2000)]
        tables = [largest_batch(ours, bench.batch, F.mse_loss, budget_bytes=each, grid=grid) for each in said]
        assert len({table[0].size for table in tables}) == 1
        assert {table.budget_bytes for table in tables} == {2000.0}
        for wrong in (0, -1, math.nan, True, "2 kilos", 10**400):
            with pytest.raises(SettingsError, match="largest_batch: budget_bytes: got") as caught:
                largest_batch(ours, bench.batch, F.mse_loss, budget_bytes=wrong)  # type: ignore[arg-type]
            assert len(str(caught.value)) < 220
    with pytest.raises(SessionClosedError, match="largest_batch: this session was closed"):
        largest_batch(ours, bench.batch, F.mse_loss, budget_bytes=2000)
    with pytest.raises(SessionClosedError, match="predict_on_cuda: this session was closed"):
        predict_on_cuda(ours, bench.batch, F.mse_loss)


def test_sizes_that_differ_are_told_apart() -> None:
    line: Any = Line(lambda size: 8_000_000 + 4 * size)
    assert str(_with_settings(max_batch_size(line, 8e6))) == (
        "fp32: no batch fits into 8.000000 MB; 1 needs 8.000004 MB (predicted on fake tensors)"
    )


def _with_settings(found: BatchSize) -> BatchSize:
    return dataclasses.replace(found, settings=Settings(autocast="fp32"))


@pytest.mark.parametrize("budget", [*range(1000, 20_000, 1937), 10**5, 10**6])
@pytest.mark.parametrize(
    ("peak", "most"),
    [
        (lambda size: 500 + 3 * size, 6),
        (lambda size: max(3000, 10 * size, 50 * size - 20_000), 14),
        (lambda size: 900 + size * size / 7, 14),
        (lambda size: 64 * math.ceil(size / 8) + 100 * math.ceil(size / 100), 20),
        (lambda size: 2000 if size < 300 else 4 * size + 2000, 40),
    ],
    ids=["line", "kinks", "square", "stairs", "jump"],
)
def test_any_peak_that_grows_is_searched_to_the_last_row_in_few_steps(
    peak: Callable[[int], float], most: int, budget: int
) -> None:
    line: Any = Line(peak)
    found = max_batch_size(line, budget, at_most=20_000)
    fitting = [size for size in range(1, 20_001) if peak(size) <= budget]
    assert found.size == (fitting[-1] if fitting else 0)
    assert found.capped == (found.size == 20_000)
    assert len(line.asked) == len(set(line.asked))
    assert len(line.asked) <= most


def test_where_no_row_fits_it_says_what_one_row_needs() -> None:
    bench = mlp()
    with session(bench) as ours, fake_steps(ours, bench.batch, bench.loss_fn) as steps:
        found = max_batch_size(steps, 10_000)
        one = steps.step(batch_size=1).peak_bytes
    assert (found.size, found.predicted_peak_bytes) == (0, one)
    assert "no batch fits into 10.0 kB; 1 needs" in str(found)


def test_sizes_at_which_the_model_does_not_run_are_no_answer() -> None:
    bench = narrow(nn.BatchNorm1d(4))
    with session(bench) as ours, fake_steps(ours, bench.batch, bench.loss_fn) as steps:
        least = steps.step(batch_size=2).peak_bytes
        assert max_batch_size(steps, least).size == 2
        assert max_batch_size(steps, least - 1).size == 0  # one row does not run
        assert max_batch_size(steps, least - 1).predicted_peak_bytes == least


class Picky(Line):
    """Of a model that runs with some sizes alone."""

    batch_size = 12

    def __init__(self, runs: Callable[[int], bool]) -> None:
        super().__init__(lambda size: 1000 + 10 * size)
        self._runs = runs

    def step(self, *, batch_size: int, **settings: Any) -> Any:
        if not self._runs(batch_size):
            self.asked.append(batch_size)
            raise ValueError(f"cannot take {batch_size} rows")
        return super().step(batch_size=batch_size, **settings)


@pytest.mark.parametrize("budget", [*range(1005, 3000, 37), 10**5])
@pytest.mark.parametrize("unit", [1, 2, 3, 4, 6, 12])
def test_a_model_that_takes_rows_in_groups_gets_the_most_groups_that_fit(unit: int, budget: int) -> None:
    picky: Any = Picky(lambda size: size % unit == 0)
    found = max_batch_size(picky, budget)
    most = (budget - 1000) // 10 // unit * unit
    assert found.size == most
    assert len(picky.asked) <= 25
    assert most % found.multiple_of == 0


def test_a_model_that_takes_no_other_size_says_so() -> None:
    found = max_batch_size(Picky(lambda size: size == 12), 10_000)  # type: ignore[arg-type]
    assert (found.size, found.capped, found.fails_at, found.failure) == (12, False, 24, "ValueError: cannot take 24 rows")
    assert "with a peak of 1.1 kB (predicted on fake tensors); with 24 a step fails: ValueError" in str(_with_settings(found))
    with pytest.raises(ValueError, match="cannot take 12 rows"):
        max_batch_size(Picky(lambda size: size == 13), 10_000)  # type: ignore[arg-type]
    found = max_batch_size(Picky(lambda size: size == 12), 1100)  # type: ignore[arg-type]
    assert (found.size, found.tried) == (0, {12: 1120.0})
    least = max_batch_size(Picky(lambda size: size >= 5), 1060)  # type: ignore[arg-type]
    assert least.size in (5, 6)


@pytest.mark.parametrize("budget", [1200, 1400, 3000, 10**6])
@pytest.mark.parametrize("most", [12, 13, 40, 200])
def test_a_model_that_takes_no_more_than_so_many_rows_says_what_failed_with_one_more(most: int, budget: int) -> None:
    picky: Any = Picky(lambda size: size <= most)
    found = max_batch_size(picky, budget)
    fitting = (budget - 1000) // 10
    assert found.size <= min(most, fitting)
    assert found.size % found.multiple_of == 0
    if fitting < most:
        assert (found.size, found.failure) == (fitting, None)
    else:
        assert found.fails_at == found.size + found.multiple_of
        assert found.failure == f"ValueError: cannot take {found.fails_at} rows"
    assert len(picky.asked) <= 25


def test_to_be_cancelled_is_no_failure_of_the_model() -> None:
    class Cancelled(Picky):
        def step(self, *, batch_size: int, **settings: Any) -> Any:
            if self.asked:
                raise CancelledError("it was cancelled")
            return super().step(batch_size=batch_size, **settings)

    with pytest.raises(CancelledError):
        max_batch_size(Cancelled(lambda size: True), 10**6)  # type: ignore[arg-type]


def test_larger_ones_than_asked_for_are_not_looked_at() -> None:
    bench = narrow()
    with session(bench) as ours, fake_steps(ours, bench.batch, bench.loss_fn) as steps:
        found = max_batch_size(steps, 1e12, at_most=1000)
    assert (found.size, found.capped) == (1000, True)
    assert "batch at least 1000 fits" in str(found)


def test_what_cannot_be_predicted_is_measured_under_the_budget() -> None:
    bench = recurrent()
    with session(bench) as ours, fake_steps(ours, bench.batch, bench.loss_fn) as steps:
        budget = 1.5 * steps.step().peak_bytes
        found = max_batch_size(steps, budget)
        assert found.obtained.startswith("measured: one real step, because")
        assert math.isinf(found.tried[found.size + 1])
        assert found.size > 6
        batch = (rows(bench.batch[0], found.size), rows(bench.batch[1], found.size))
        assert ours.profile_step(batch, bench.loss_fn).peak_bytes == found.predicted_peak_bytes <= budget


def test_what_cannot_be_asked_for_is_refused() -> None:
    bench = narrow()
    with session(bench) as ours, fake_steps(ours, bench.batch, bench.loss_fn) as steps:
        for wrong in (0, -1, math.nan, math.inf, "much", True, 10**400):
            with pytest.raises(SettingsError, match="budget_bytes: got"):
                max_batch_size(steps, wrong)  # type: ignore[arg-type]
        with pytest.raises(SettingsError, match="at_most: got 0"):
            max_batch_size(steps, 1e6, at_most=0)
        with pytest.raises(SettingsError, match="batch_size: got 0"):
            confirm(ours, bench.batch, bench.loss_fn, batch_size=0)
    line: Any = Line(lambda size: size)
    line.batch_size = None
    with pytest.raises(SettingsError, match="no tensor with a dimension"):
        max_batch_size(line, 1e6)


# ---- confirmed -------------------------------------------------------------------------------------------------------


def test_confirmed_it_is_what_was_predicted(untouched: Untouched) -> None:
    bench = resnet()
    with session(bench) as ours:
        with fake_steps(ours, bench.batch, bench.loss_fn) as steps:
            predicted = max_batch_size(steps, 3e6, autocast="bf16", checkpointed=["3"])
        with untouched(ours):
            real = confirm(
                ours, bench.batch, bench.loss_fn, batch_size=predicted.size, autocast="bf16", checkpointed=["3"], budget_bytes=3e6
            )
            more = confirm(
                ours,
                bench.batch,
                bench.loss_fn,
                batch_size=predicted.size + 1,
                autocast="bf16",
                checkpointed=["3"],
                budget_bytes=3e6,
            )
        assert real.fits
        assert real.peak_bytes == predicted.predicted_peak_bytes
        assert not more.fits
        assert more.out_of_memory is not None
        assert math.isnan(more.peak_bytes)
        assert "out of memory" in str(more)
        assert "(measured: one real step)" in str(real)


def test_layers_that_are_checkpointed_for_the_first_time_are_confirmed_beside_gradients_of_the_run() -> None:
    bench = resnet()
    with session(bench) as ours:
        for _ in range(2):
            bench.loss_fn(bench.model(bench.batch[0]), bench.batch[1]).backward()
            bench.optimizers[0].step()  # and the gradients stay, as a run leaves them
        predicted = predict_step(ours, bench.batch, bench.loss_fn, checkpointed=["3", "5"]).peak_bytes
        real = confirm(ours, bench.batch, bench.loss_fn, batch_size=4, checkpointed=["3", "5"], budget_bytes=predicted + 100)
        assert real.fits, str(real)
        assert real.peak_bytes == predicted


@pytest.mark.parametrize("share", [0.35, 0.6, 0.9, 0.99])
def test_after_memory_has_run_out_all_is_free_and_training_goes_on(share: float, untouched: Untouched) -> None:
    """In the forward pass, in the backward pass, and in the optimizer's step."""
    bench = NETS["gpt"]()
    with session(bench) as ours:
        peak = confirm(ours, bench.batch, bench.loss_fn, batch_size=64).peak_bytes
        before = live_tensors()
        with untouched(ours):
            ended = confirm(ours, bench.batch, bench.loss_fn, batch_size=64, budget_bytes=share * peak)
        assert ended.out_of_memory is not None
        assert live_tensors() == before
        assert ours.out_of_memory is None  # nothing of the run's
        (optimizer,) = bench.optimizers
        for _ in range(2):
            optimizer.zero_grad()
            with ours.autocast():
                loss = bench.loss_fn(bench.model(bench.batch[0]), bench.batch[1])
            ours.scaler.scale(loss).backward()
            ours.scaler.step(optimizer)
            ours.scaler.update()
        assert len(ours.history) == 2
        assert confirm(ours, bench.batch, bench.loss_fn, batch_size=64).peak_bytes == pytest.approx(peak, rel=0.01)


def test_an_allocator_that_refuses_is_out_of_memory_too(untouched: Untouched) -> None:
    bench = mlp()

    def loss_fn(out: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(out, targets) + torch.empty(10**15)[0]

    with session(bench) as ours, untouched(ours):
        ended = confirm(ours, bench.batch, loss_fn, batch_size=8, budget_bytes=1e18)
    assert ended.out_of_memory is not None
    assert "allocate" in ended.out_of_memory


def test_a_batch_that_is_too_large_alone_is_not_even_made() -> None:
    bench = mlp()
    with session(bench) as ours:
        ended = confirm(ours, bench.batch, bench.loss_fn, batch_size=10**12)
    assert ended.out_of_memory is not None
    assert "the batch alone takes" in ended.out_of_memory


def test_without_a_budget_the_sessions_holds_and_else_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = mlp()
    with session(bench) as ours:
        ours.memory_budget = 123456.0
        assert confirm(ours, bench.batch, bench.loss_fn, batch_size=1).limit_bytes == 123456.0
        ours.memory_budget = None
        monkeypatch.setattr(module, "free_memory_bytes", lambda: 54321.0)
        assert confirm(ours, bench.batch, bench.loss_fn, batch_size=1).limit_bytes == 54321.0


def test_other_errors_are_the_users(untouched: Untouched) -> None:
    bench = narrow(nn.BatchNorm1d(4))
    with session(bench) as ours:
        with untouched(ours), pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            confirm(ours, bench.batch, bench.loss_fn, batch_size=1)
        with pytest.raises(RunError, match="expected \\(inputs, targets\\)"):
            confirm(ours, bench.batch[0][:3], bench.loss_fn, batch_size=1)
    with pytest.raises(SessionClosedError, match="confirm: this session was closed"):
        confirm(ours, bench.batch, bench.loss_fn, batch_size=1)


def test_it_reads_as_a_sentence() -> None:
    bench = narrow()
    with session(bench) as ours, fake_steps(ours, bench.batch, bench.loss_fn) as steps:
        found = max_batch_size(steps, 2000)
    assert isinstance(found, BatchSize)
    peak = memory_text(found.predicted_peak_bytes)
    assert str(found) == f"fp32: batch {found.size} fits into 2.0 kB, with a peak of {peak} (predicted on fake tensors)"
