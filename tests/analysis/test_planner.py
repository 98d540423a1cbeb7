"""Plans for a memory budget: what they promise is what is measured, and nothing that people would choose is cheaper."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_widgets.analysis import choice, extra_time, planner
from amp_widgets.analysis.extra_time import ExtraTimes, LayerTimer
from amp_widgets.analysis.fake_step import predict_step
from amp_widgets.analysis.loop_memory import EARLIER, MARGIN, Besides, Expected, NewestPeaks, besides_of
from amp_widgets.analysis.peak_model import outermost
from amp_widgets.analysis.plan import Plan
from amp_widgets.analysis.planner import Planner, plan, planning
from amp_widgets.analysis.stoppable import CancelledError
from amp_widgets.core.settings import Settings
from amp_widgets.errors import LayerError, RunError, SessionClosedError, SettingsError
from amp_widgets.session import AmpSession

UNTOUCHED = Callable[[AmpSession], contextlib.AbstractContextManager[None]]


def _memtracker_nets() -> types.ModuleType:
    """The six nets on which bytes are compared with torch's own tracker."""
    path = Path(__file__).parent.parent / "core" / "memory" / "test_memtracker.py"
    specification = importlib.util.spec_from_file_location("nets_of_memtracker", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


NETS = _memtracker_nets().NETS


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What only takes time is left out: points on which nothing depends are estimated, and layers timed in few passes."""
    monkeypatch.setattr(planner, "_PREDICTING_S", 0.0)
    monkeypatch.setattr(planner, "_CURVE", (0.3, 0.7))
    monkeypatch.setattr(planner, "_TIMED_UNTIL_S", 0.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def no_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing fits, what else would is not predicted: half of the time, where only the least peak is asked for."""
    monkeypatch.setattr(Planner, "_alternatives", lambda self, least: ())


class Bench:
    """A session on one of the nets, which has trained for a step."""

    def __init__(self, model: nn.Module, batch: tuple[Any, Any], autocast: str = "fp32") -> None:
        self.batch = batch
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, foreach=True)
        self.session = AmpSession(model, self.optimizer)
        self.session.request(autocast=autocast)
        self.train()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.session.close()

    @classmethod
    def of(cls, net: str, autocast: str = "fp32") -> Bench:
        torch.manual_seed(0)
        make, draw, _ = NETS[net]
        inputs = draw()
        return cls(make(), (inputs, torch.randint(4, (len(inputs),))), autocast)

    def train(self) -> None:
        model = self.session.model
        assert model is not None
        self.optimizer.zero_grad()
        with self.session.autocast():
            loss = F.cross_entropy(model(self.batch[0]), self.batch[1])
        self.session.scaler.scale(loss).backward()
        self.session.scaler.step(self.optimizer)
        self.session.scaler.update()

    def measured(self, checkpointed: Any = (), **changes: Any) -> int:
        before = self.session.settings
        self.session.request(checkpointed=checkpointed, **changes)
        self.session.apply_pending()
        peak = self.session.profile_step(self.batch, F.cross_entropy).peak_bytes
        self.session.request(checkpointed=before.checkpointed, autocast=before.autocast)
        self.session.apply_pending()
        return peak

    def plan(self, budget_bytes: float) -> Plan:
        return plan(self.session, budget_bytes=budget_bytes, batch=self.batch, loss_fn=F.cross_entropy)

    def planning(self) -> contextlib.AbstractContextManager[Planner]:
        return planning(self.session, self.batch, F.cross_entropy)


@pytest.fixture
def mlp() -> Iterator[Bench]:
    with Bench.of("mlp") as bench:
        yield bench


@pytest.mark.usefixtures("no_alternatives")
@pytest.mark.parametrize("autocast", ["fp32", "bf16"])
@pytest.mark.parametrize("net", NETS)
def test_what_is_promised_is_measured_and_nothing_usual_is_cheaper(net: str, autocast: str) -> None:
    with Bench.of(net, autocast) as bench, bench.planning() as planned:
        least = planned.plan(1.0).least_peak_bytes
        none = planned._peak(())
        assert none == pytest.approx(bench.measured(), rel=0.01)
        assert least < none
        usual = [planned._named[name] for name in ("all", "every second", "√n")]
        for share in (0.0, 0.5):
            budget = least + share * (none - least)
            found = planned.plan(budget)
            assert found.fits
            assert found.predicted_peak_bytes <= budget
            measured = bench.measured(found)
            assert measured <= budget
            assert found.predicted_peak_bytes == pytest.approx(measured, rel=0.01)
            for layers in (*usual, *greedy(planned, budget)):
                if planned._peak(layers) <= budget:
                    assert found.predicted_extra_s <= planned._cost_s(layers) + 1e-12, layers


def greedy(planned: Planner, budget: float) -> list[tuple[str, ...]]:
    """The first set that fits when those layers are taken first that save most for their cost."""
    order = planned._choice.by_bytes_per_second()
    for count in range(len(order) + 1):
        names = planned._names(order[:count])
        if planned._estimate(names) <= 1.03 * budget and planned._peak(names) <= budget:
            return [names]
    return []


@pytest.mark.parametrize("net", ["cnn", "tied"])
def test_estimates_are_close_for_sets_drawn_at_random(net: str) -> None:
    seed = 0
    generator = torch.Generator().manual_seed(seed)
    with Bench.of(net) as bench, bench.planning() as planned:
        planned.plan(1e12)
        names = planned._model.names
        for _ in range(4):
            picked = torch.rand(len(names), generator=generator) < 0.4
            some = outermost([name for name, one in zip(names, picked.tolist(), strict=True) if one])
            assert planned._estimate(some) == pytest.approx(planned._peak(some), rel=0.03), f"seed {seed}: {some}"


def test_a_plan_is_requested_as_it_is_and_holds_in_the_run(mlp: Bench) -> None:
    none = mlp.measured()
    found = mlp.plan(0.8 * none)
    mlp.session.request(checkpointed=found)
    mlp.train()
    mlp.train()
    assert mlp.session.settings.checkpointed == found.layers != ()
    peaks = mlp.session.history.columns("peak_bytes")["peak_bytes"]
    assert peaks[0] > found.budget_bytes
    assert max(peaks[-2:]) <= found.budget_bytes
    assert max(peaks[-2:]) == pytest.approx(found.predicted_peak_bytes, rel=0.01)
    assert Settings(checkpointed=found).checkpointed == found.layers  # type: ignore[arg-type]
    with pytest.raises(SettingsError):
        Settings(fp32_layers=found)  # type: ignore[arg-type]
    other = dataclasses.replace(found, layers=("not.there",))
    with pytest.raises(LayerError):
        mlp.session.request(checkpointed=other)


def test_everything_is_left_as_it_was(mlp: Bench, untouched: UNTOUCHED) -> None:
    mlp.session.request(checkpointed=["1"])
    mlp.session.apply_pending()
    mlp.train()
    none = 289_392
    with untouched(mlp.session):
        found = mlp.plan(0.7 * none)
    assert {point.label for point in found.points} >= {"none", "all", "every second", "√n", "yours", "plan"}
    assert next(point.layers for point in found.points if point.label == "yours") == ("1",)


def test_where_it_fits_already_nothing_is_checkpointed(mlp: Bench) -> None:
    found = mlp.plan(1e9)
    assert (found.layers, found.fits, found.predicted_extra_s) == ((), True, 0.0)
    assert "fits as it is" in str(found)


def test_what_does_not_fit_names_the_least_and_what_else_would_help(mlp: Bench) -> None:
    none = mlp.measured()
    with mlp.planning() as planned:
        least = planned.plan(1.0).least_peak_bytes
        found = planned.plan(0.99 * least)
        assert planned.plan(least).fits
        usual = min(planned._peak(planned._named[name]) for name in ("all", "every second", "√n"))
    assert not found.fits
    assert mlp.measured(found.layers) <= found.predicted_peak_bytes == found.least_peak_bytes == least
    assert mlp.measured(found.layers) == pytest.approx(least, rel=0.01)
    with pytest.raises(SettingsError, match=r"does not keep within its budget, .* the least is .* checkpointed=plan\.layers"):
        mlp.session.request(checkpointed=found)
    assert mlp.session.pending is None
    assert 0.99 * least < found.least_peak_bytes <= usual < none
    half = next(each for each in found.alternatives if each.batch_size is None)
    assert half.label == "bf16"
    assert half.peak_bytes == pytest.approx(mlp.measured(half.changes["checkpointed"], autocast="bf16"), rel=0.01)
    assert half.fits
    smaller = next(each for each in found.alternatives if each.batch_size is not None)
    assert smaller.fits
    assert 1 <= smaller.batch_size < 96
    assert smaller.label == f"batch {smaller.batch_size}"
    cut = Bench(mlp.session.model, tuple(each[: smaller.batch_size] for each in mlp.batch))  # type: ignore[arg-type]
    assert smaller.peak_bytes == pytest.approx(cut.measured(found.layers), rel=0.01)
    assert "no set of layers fits" in str(found)
    assert "bf16: " in str(found)


@pytest.mark.parametrize("normalized", [False, True], ids=["batch of 1", "which cannot be run"])
def test_with_many_layers_the_smallest_batch_is_tried_first(normalized: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prediction takes long then, and where a batch of 1 does not fit, nothing else need be tried."""
    tried: list[int] = []
    peak_of = Planner._peak_of

    def noted(self: Planner, layers: Any, *, batch_size: int | None = None, **other: Any) -> float | None:
        if batch_size is not None:
            tried.append(batch_size)
        return peak_of(self, layers, batch_size=batch_size, **other)

    monkeypatch.setattr(Planner, "_peak_of", noted)
    monkeypatch.setattr(planner, "_MANY", 0)
    monkeypatch.setattr(planner, "_ALTERNATIVES_S", math.inf)
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(64) if normalized else nn.LayerNorm(64) for _ in range(4)]
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), norm, nn.GELU()) for norm in norms), nn.Linear(64, 4))
    with Bench(model, (torch.randn(96, 64), torch.randint(4, (96,)))) as bench, bench.planning() as planned:
        least = planned.plan(1.0)
        assert tried[:2] == ([1, 48] if normalized else [1])
        tried.clear()
        smaller = next(each for each in planned.plan(0.9 * least.least_peak_bytes).alternatives if each.batch_size)
    assert smaller.fits
    assert smaller.batch_size is not None
    assert 1 < smaller.batch_size < 96
    assert tried[0] == 1


class Wide(nn.Module):
    """Of a few rows each of which is large; blocks in blocks, which need other layers in each format for the lowest peak."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(*(nn.Sequential(Residue(), nn.Sequential(Residue(), Residue())) for _ in range(3)))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.stages(x).mean(1))
        return y


class Residue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.narrow(F.gelu(self.wide(self.norm(x))))
        return y


def test_another_format_is_offered_with_the_layers_that_need_least_in_it_and_with_a_smaller_batch_if_need_be() -> None:
    torch.manual_seed(0)
    with Bench(Wide(), (torch.randn(2, 400, 16), torch.randint(4, (2,)))) as bench, bench.planning() as planned:
        first = planned.plan(1.0)
        half, smaller, both = first.alternatives
        assert (half.label, smaller.label, both.label) == ("bf16", "batch 1", "bf16 + batch 1")
        assert half.peak_bytes < (planned._peak_of(first.layers, autocast="bf16") or 0.0)
        assert planned.plan(first.least_peak_bytes - 1).alternatives[0].fits
        assert len(planned.plan(max(half.peak_bytes, smaller.peak_bytes)).alternatives) == 2
        found = planned.plan(min(half.peak_bytes, smaller.peak_bytes) - 1)
        assert [each.fits for each in found.alternatives] == [False, False, True]
        bench.session.request(autocast="bf16")
        bench.session.apply_pending()
        assert planned.plan(1.0).least_peak_bytes == half.peak_bytes
        assert planned.plan(half.peak_bytes).fits
        bench.session.request(autocast="fp32")
        bench.session.apply_pending()
        assert both.changes == {"autocast": "bf16", "checkpointed": half.changes["checkpointed"]}
        assert half.peak_bytes >= bench.measured(half.changes["checkpointed"], autocast="bf16") > 0.98 * half.peak_bytes
        model = bench.session.model
        assert model is not None
        bench.session.close()
        cut = Bench(model, (bench.batch[0][:1], bench.batch[1][:1]))
        assert both.peak_bytes >= cut.measured(both.changes["checkpointed"], autocast="bf16") > 0.98 * both.peak_bytes


@pytest.mark.usefixtures("no_alternatives")
def test_the_least_peak_is_that_of_a_step_also_where_the_budget_is_larger(mlp: Bench) -> None:
    with mlp.planning() as planned:
        found = planned.plan(0.8 * mlp.measured())
        layers = next(names for names, peak in planned._peaks.items() if peak == found.least_peak_bytes)
        assert planned.plan(1.0).least_peak_bytes == pytest.approx(found.least_peak_bytes, rel=0.01)
    assert mlp.measured(layers) <= found.least_peak_bytes == pytest.approx(mlp.measured(layers), rel=0.01)


def test_it_is_cancelled_before_its_next_step_or_pass(mlp: Bench, untouched: UNTOUCHED) -> None:
    asked = 0

    def after(count: int) -> Callable[[], bool]:
        def cancelled() -> bool:
            nonlocal asked
            asked += 1
            return asked > count

        return cancelled

    plan(mlp.session, budget_bytes=2e5, batch=mlp.batch, loss_fn=F.cross_entropy, cancelled=after(10**6))
    in_all = asked
    assert in_all > 8
    for count in (0, 3, in_all - 1):
        asked = 0
        with untouched(mlp.session), pytest.raises(CancelledError, match="plan: it was cancelled"):
            plan(mlp.session, budget_bytes=2e5, batch=mlp.batch, loss_fn=F.cross_entropy, cancelled=after(count))
        assert asked == count + 1


def test_without_scipy_the_greedy_plan_fits_too(mlp: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    none = mlp.measured()
    with mlp.planning() as planned:
        best = planned.plan(0.7 * none)
        monkeypatch.setattr(choice, "_milp", lambda: None)
        found = planned.plan(0.7 * none)
        best_s = planned._cost_s(best.layers)  # as the layers were timed once more meanwhile
    assert (best.chosen_by, found.chosen_by) == ("scipy milp", "greedy")
    assert found.fits
    assert mlp.measured(found) <= 0.7 * none
    assert found.predicted_extra_s >= best_s * 0.998


@pytest.mark.parametrize("budget", [0, -1, math.nan, math.inf, "8 apples", b"8", True, None, [1], 1j])
def test_a_budget_is_a_number_of_bytes(mlp: Bench, budget: Any) -> None:
    with pytest.raises(SettingsError, match=r"budget_bytes: got .*, expected a number of bytes above 0"):
        mlp.plan(budget)


def test_a_budget_may_be_said_in_words(mlp: Bench) -> None:
    assert mlp.plan("8 GB").budget_bytes == 8e9  # type: ignore[arg-type]


def test_what_cannot_be_planned_for(mlp: Bench) -> None:
    with pytest.raises(RunError, match="plan: got 3 items as the batch"):
        plan(mlp.session, budget_bytes=1e6, batch=(1, 2, 3), loss_fn=F.cross_entropy)  # type: ignore[arg-type]
    mlp.session.close()
    with pytest.raises(SessionClosedError, match="plan: this session was closed"):
        mlp.plan(1e6)


# ---- loops that hold more than a plain step --------------------------------------------------------------------------------


def accumulating(bench: Bench, model: nn.Module, kept: dict[str, Any]) -> None:
    for last in (False, True):
        with bench.session.autocast():
            loss = F.cross_entropy(model(bench.batch[0]), bench.batch[1]) / 2
        bench.session.scaler.scale(loss).backward()
        del loss
        if last:
            bench.session.scaler.step(bench.optimizer)
            bench.session.scaler.update()
            bench.optimizer.zero_grad()


def with_zeros(bench: Bench, model: nn.Module, kept: dict[str, Any]) -> None:
    bench.optimizer.zero_grad(set_to_none=False)
    with bench.session.autocast():
        loss = F.cross_entropy(model(bench.batch[0]), bench.batch[1])
    bench.session.scaler.scale(loss).backward()
    bench.session.scaler.step(bench.optimizer)
    bench.session.scaler.update()


def averaging(bench: Bench, model: nn.Module, kept: dict[str, Any]) -> None:
    average = kept.setdefault("average", [p.detach().clone() for p in model.parameters()])
    bench.optimizer.zero_grad()
    loss = F.cross_entropy(model(bench.batch[0]), bench.batch[1])
    bench.session.scaler.scale(loss).backward()
    bench.session.scaler.step(bench.optimizer)
    with torch.no_grad():
        for one, parameter in zip(average, model.parameters(), strict=True):
            one.lerp_(parameter, 0.1)
    bench.session.scaler.update()


def keeping(bench: Bench, model: nn.Module, kept: dict[str, Any]) -> None:
    """Something that was made in the first step, and is added to in each."""
    bench.optimizer.zero_grad()
    with bench.session.autocast():
        loss = F.cross_entropy(model(bench.batch[0]), bench.batch[1])
    bench.session.scaler.scale(loss).backward()
    if not kept:
        kept["sums"] = torch.zeros(30, 32, 8)
    kept["sums"] += 1
    bench.session.scaler.step(bench.optimizer)
    bench.session.scaler.update()


@pytest.mark.usefixtures("no_alternatives")
@pytest.mark.parametrize(
    ("loop", "words"), [(accumulating, "gradients kept"), (with_zeros, "gradients kept"), (averaging, "average of the weights")]
)
def test_what_the_loop_of_the_run_holds_besides_is_counted(mlp: Bench, loop: Callable[..., None], words: str) -> None:
    model, kept = mlp.session.model, dict[str, Any]()
    plain = mlp.plan(1e12)
    assert plain.notes == ()
    for _ in range(3):
        loop(mlp, model, kept)
    none = max(mlp.session.history.columns("peak_bytes")["peak_bytes"])
    assert none > 1.05 * plain.predicted_peak_bytes
    with mlp.planning() as planned:
        least = planned.plan(1.0).least_peak_bytes
        assert least < 0.95 * none
        for budget in (least, (least + none) / 2):
            found = planned.plan(budget)
            assert found.fits
            mlp.session.request(checkpointed=found)
            before = len(mlp.session.history)
            for _ in range(2):
                loop(mlp, model, kept)
            measured = max(mlp.session.history.columns("peak_bytes")["peak_bytes"][before:])
            assert 0.98 * found.predicted_peak_bytes < measured <= budget
            assert words in found.notes[0]
            assert found.notes[0] in repr(found)


@pytest.mark.usefixtures("no_alternatives")
@pytest.mark.parametrize(
    "changes",
    [
        {"checkpointed": ["0"]},
        {"autocast": "bf16"},
        {"autocast": "bf16", "fp32_layers": ["2"], "checkpointed": ["1"]},
        {"autocast": "fp16", "scaling": False},
        {"growth_interval": 7},
    ],
    ids=str,
)
@pytest.mark.parametrize(("loop", "words"), [(accumulating, "gradients kept"), (keeping, "that are kept")])
def test_what_the_loop_holds_besides_is_counted_before_a_step_with_the_settings_in_force(
    mlp: Bench, changes: dict[str, Any], loop: Callable[..., None], words: str
) -> None:
    model, kept = mlp.session.model, dict[str, Any]()
    for _ in range(3):
        loop(mlp, model, kept)
    plain = mlp.measured((), autocast=changes.get("autocast", "fp32"))
    mlp.session.request(**changes)
    mlp.session.apply_pending()
    found = mlp.plan(1.02 * plain)
    assert found.fits
    assert found.layers
    assert words in found.notes[0]
    assert found.notes[1:] == (() if "growth_interval" in changes else (EARLIER,))
    mlp.session.request(checkpointed=found)
    before = len(mlp.session.history)
    for _ in range(3):
        loop(mlp, model, kept)
    measured = max(mlp.session.history.columns("peak_bytes")["peak_bytes"][before:])
    assert 0.98 * found.predicted_peak_bytes < measured <= found.predicted_peak_bytes <= found.budget_bytes
    again = mlp.plan(1.02 * plain)  # with steps in which it was in force
    assert words in again.notes[0]
    assert len(again.notes) == 1


def test_settings_of_then_that_cannot_be_in_force_any_more_are_no_reason_to_fail(
    mlp: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = NewestPeaks(settings=Settings(checkpointed=("gone",)), peak_bytes=1e9, end_bytes=1e9, first=False)
    monkeypatch.setattr(planner, "newest_peaks", lambda loop: gone)
    assert mlp.plan(1e9).notes == ()


def test_gradients_that_are_kept_are_counted_where_steps_can_only_be_measured() -> None:
    make, draw, _ = NETS["lstm"]
    torch.manual_seed(0)
    inputs = draw()
    with Bench(make(), (inputs, torch.randint(4, (len(inputs),)))) as bench:
        for _ in range(3):
            accumulating(bench, bench.session.model, {})
        none = max(bench.session.history.columns("peak_bytes")["peak_bytes"])
        with bench.planning() as planned:
            least = planned.plan(1.0).least_peak_bytes
            found = planned.plan((least + none) / 2)
        assert "real steps, measured and taken back" in found.obtained
        assert "gradients kept" in found.notes[0]
        bench.session.request(checkpointed=found)
        before = len(bench.session.history)
        for _ in range(2):
            accumulating(bench, bench.session.model, {})
        measured = max(bench.session.history.columns("peak_bytes")["peak_bytes"][before:])
        assert 0.98 * found.predicted_peak_bytes < measured <= found.predicted_peak_bytes <= found.budget_bytes


def test_steps_with_another_batch_are_not_taken_for_a_loop_that_holds_more(mlp: Bench) -> None:
    small = tuple(each[:24] for each in mlp.batch)
    cut = plan(mlp.session, budget_bytes=1e12, batch=small, loss_fn=F.cross_entropy)  # type: ignore[arg-type]
    assert cut.predicted_peak_bytes < 0.9 * mlp.plan(1e12).predicted_peak_bytes


def test_what_is_held_besides_has_to_be_explained() -> None:
    plain, keeping = (Expected(peak_bytes=peak, first_peak_bytes=peak + 50, end_bytes=4e5) for peak in (1e6, 1.2e6))

    def found(peak: float, end: float, *, first: bool = False) -> tuple[bool, float, bool]:
        measured = NewestPeaks(settings=Settings(), peak_bytes=peak, end_bytes=end, first=first)
        besides = besides_of(measured, plain, lambda: keeping)
        return besides.keeps_gradients, besides.more_bytes, bool(besides.note)

    assert found(1e6, 4e5) == (False, 0.0, False)
    assert found(1e6 + 50, 4e5, first=True) == (False, 0.0, False)
    assert found(1.2e6, 4e5) == (True, 0.0, True)
    assert found(1.2e6, 6e5) == (False, 2e5, True)
    assert found(1.3e6, 5e5) == (True, pytest.approx(1e5), True)
    assert found(2e6, 5e5) == (False, 0.0, True)


def test_what_is_promised_is_within_the_room() -> None:
    for more in (0.0, 5e4):
        besides = Besides(keeps_gradients=False, more_bytes=more, note="")
        for budget in (1e5, 1e9):
            assert besides.promised(besides.room(budget)) == pytest.approx(budget)
    assert besides.room(1.0) == 0.0


# ---- models of other kinds ----------------------------------------------------------------------------------------------


class Shared(nn.Module):
    """One module that is called three times, and again inside another; blocks with parts; a frozen part; several inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(16, 32)
        self.frozen.requires_grad_(False)
        self.shared = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 96), nn.Tanh(), nn.Linear(96, 32)) for _ in range(2))
        self.last = nn.Sequential(nn.LayerNorm(32), self.shared)
        self.head = nn.Linear(32, 4)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.frozen(batch["left"]) * batch["right"]
        for block in self.blocks:
            x = x + self.shared(x)
            x = x + block(x)
        y: Tensor = self.head(self.last(x))
        return y


def shared() -> Bench:
    torch.manual_seed(0)
    rows = 200
    return Bench(Shared(), ({"left": torch.randn(rows, 16), "right": torch.randn(rows, 32)}, torch.randint(4, (rows,))))


@pytest.mark.usefixtures("no_alternatives")
def test_shared_modules_nested_layers_frozen_parts_and_dicts() -> None:
    with shared() as bench, bench.planning() as planned:
        none = planned.plan(1e12).predicted_peak_bytes
        least = planned.plan(1.0).least_peak_bytes
        assert least < 0.8 * none
        for share in (0.05, 0.5):
            budget = least + share * (none - least)
            found = planned.plan(budget)
            measured = bench.measured(found)
            assert found.fits
            assert measured <= budget
            assert found.predicted_peak_bytes == pytest.approx(measured, rel=0.01)
            assert found.layers == outermost(found.layers)


class Repeated(nn.Module):
    """One block that is called several times, one call right after the other."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls
        self.first = nn.Linear(16, 64)
        self.block = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.last = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.calls):
            x = self.block(x)
        y: Tensor = self.last(x)
        return y


class Encoder(nn.Module):
    """The same with a block that has attention and dropout."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls
        self.first = nn.Linear(16, 32)
        self.block = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        self.last = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.calls):
            x = self.block(x)
        y: Tensor = self.last(x.mean(1))
        return y


def repeated(kind: type[nn.Module], calls: int, autocast: str) -> Bench:
    torch.manual_seed(0)
    rows, *more = (1000,) if kind is Repeated else (40, 20)
    return Bench(kind(calls), (torch.randn(rows, *more, 16), torch.randint(4, (rows,))), autocast)


@pytest.mark.usefixtures("no_alternatives")
@pytest.mark.parametrize("autocast", ["fp32", "bf16"])
@pytest.mark.parametrize("calls", [3, 12])
@pytest.mark.parametrize("kind", [Repeated, Encoder])
def test_a_layer_that_is_called_several_times_is_planned_with_in_each_of_its_calls(
    kind: type[nn.Module], calls: int, autocast: str
) -> None:
    with repeated(kind, calls, autocast) as bench, bench.planning() as planned:
        none = planned.plan(1e12).predicted_peak_bytes
        least = planned.plan(1.0).least_peak_bytes
        parts = [name for name in planned._usable if name.startswith("block.")]
        peaks = {names: planned._peak(names) for names in (("block",), ("first", "block"), ("block", "last"), tuple(parts[:1]))}
        assert planned._estimate(["block"]) == pytest.approx(peaks["block",], rel=0.03)
        assert least == min(planned._peaks.values())
        assert least <= min(peaks.values()) < none
        without = min(planned._model.peak_bytes(planned._names(found)) for found in lowest_without_the_block(planned))
        budget = (least + min(without, none)) / 2
        assert least < budget < min(without, none)
        found = planned.plan(budget)
    assert found.fits
    assert "block" in found.layers
    assert found.predicted_peak_bytes <= budget
    bench = repeated(kind, calls, autocast)  # in which no layer was checkpointed before
    with bench:
        bench.session.request(checkpointed=found)
        for _ in range(3):
            bench.train()
        measured = bench.session.history.columns("peak_bytes")["peak_bytes"][-3:]
    assert max(measured) <= found.predicted_peak_bytes
    assert found.predicted_peak_bytes == pytest.approx(measured[0], rel=0.01)
    assert found.predicted_peak_bytes == pytest.approx(measured[2], rel=0.01)


def lowest_without_the_block(planned: Planner) -> list[frozenset[int]]:
    """The set with the lowest peak by estimate that leaves out the layer that is called several times."""
    block = planned._model.names.index("block")
    change = planned._choice.change_bytes.copy()
    change[block] = 0.0
    return [dataclasses.replace(planned._choice, change_bytes=change).least()]


@pytest.mark.parametrize("names", [("block",), ("block.self_attn",), ("block.norm1", "block.dropout"), ("first", "block")])
def test_what_is_promised_of_layers_that_are_called_several_times_is_what_their_first_and_later_steps_need(
    names: tuple[str, ...],
) -> None:
    with repeated(Encoder, 3, "fp32") as bench, bench.planning() as planned:
        planned.plan(1e12)
        promised = planned._peak(names)
    with repeated(Encoder, 3, "fp32") as bench:
        bench.session.request(checkpointed=names)
        for _ in range(3):
            bench.train()
        measured = bench.session.history.columns("peak_bytes")["peak_bytes"][-3:]
    assert max(measured) <= promised
    assert promised == pytest.approx(measured[0], rel=0.01)
    assert promised == pytest.approx(measured[2], rel=0.01)


class Named(nn.Module):
    """A block that is given its input by name, and a view of one row as if it were many."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls
        self.block = Scaled()
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = sum((self.block(x=x, scale=x[:1].expand(len(x), -1)) for _ in range(self.calls)), torch.zeros(()))
        y: Tensor = self.last(x)
        return y


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(128, 8), nn.Linear(8, 16)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        y: Tensor = self.wide(torch.tanh(self.narrow(x))) * scale.mean(-1, keepdim=True)
        return y


@pytest.mark.parametrize("calls", [1, 3])
def test_copies_of_what_goes_in_by_name_and_of_views_are_counted_for_the_first_step(calls: int) -> None:
    torch.manual_seed(0)
    with Bench(Named(calls), (torch.randn(1000, 128), torch.randint(4, (1000,)))) as bench:
        with bench.planning() as planned:
            planned.plan(1e12)
            promised = planned._peak(("block",))
        bench.session.request(checkpointed=["block"])
        bench.train()
        bench.train()
        first, later = bench.session.history.columns("peak_bytes")["peak_bytes"][-2:]
    assert first > 1.2 * later  # by the copies
    assert first <= promised == pytest.approx(first, rel=0.01)


def test_a_layer_and_one_that_calls_it_from_elsewhere_do_not_go_together() -> None:
    with shared() as bench, bench.planning() as planned:
        planned.plan(1e12)
        model = planned._model
        assert (model.names.index("last"), model.names.index("shared")) in model.nested()
        assert model.peak_bytes(["last", "shared"]) == model.peak_bytes(["shared"])
        for names in (["shared"], ["last"], ["last", "shared"]):
            assert planned._estimate(names) == pytest.approx(planned._peak(names), rel=0.03), names


class Capricious(nn.Module):
    """Asks for a number, which fake tensors do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(3)))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blocks(x)
        return self.head(y if float(y.detach().sum()) > -1e9 else -y)  # type: ignore[no-any-return]


def test_what_fake_tensors_cannot_run_is_measured_and_says_so() -> None:
    torch.manual_seed(0)
    with Bench(Capricious(), (torch.randn(300, 16), torch.randint(4, (300,)))) as bench:
        none = bench.measured()
        found = bench.plan(0.8 * none)
        assert found.fits
        assert "measured and taken back, because the step asks for a number in a tensor" in found.obtained
        assert bench.measured(found) <= found.predicted_peak_bytes <= 0.8 * none
        assert bench.measured(found) == pytest.approx(found.predicted_peak_bytes, rel=0.01)
    assert {"none", "plan"} <= {point.label for point in found.points if point.predicted}
    assert any(not point.predicted for point in found.points)


# ---- what is shown ------------------------------------------------------------------------------------------------------


def test_how_a_plan_shows_itself(mlp: Bench) -> None:
    none = mlp.measured()
    found = dataclasses.replace(mlp.plan(0.7 * none), layers=("<b>0</b>", "1"))
    assert str(found).startswith("plan for 202.6 kB in fp32: checkpoint 2 of 19 layers (<b>0</b>, 1); predicted peak ")
    assert "<b>0</b>" not in found._repr_html_()
    assert "&lt;b&gt;0" in found._repr_html_()
    headings, *rows = found.to_table()
    assert headings[0] == "set"
    assert [row[0] for row in rows][:4] == ["none", "all", "every second", "√n"]
    assert {len(row) for row in rows} == {len(headings)}
    assert "predicted on fake tensors" in repr(found)


def test_a_planner_notices_another_format(mlp: Bench) -> None:
    with mlp.planning() as planned:
        full = planned.plan(1e12)
        mlp.session.request(autocast="bf16")
        mlp.session.apply_pending()
        half = planned.plan(1e12)
    assert (full.autocast, half.autocast) == ("fp32", "bf16")
    assert half.predicted_peak_bytes == pytest.approx(mlp.measured() * (1 + MARGIN))
    assert half.predicted_peak_bytes < full.predicted_peak_bytes


# ---- time ---------------------------------------------------------------------------------------------------------------


def test_what_is_not_run_again_costs_nothing() -> None:
    times = ExtraTimes(forward_s={"a": 0.5, "a.2": 0.2, "b": 0.3}, calls={"a": 1, "a.2": 1, "b": 3}, call_s=0.01)
    assert times.cost_s("a") == pytest.approx(0.51)
    assert times.cost_s("a", spared=("a.2", "not there")) == pytest.approx(0.31)
    assert times.cost_s("b") == pytest.approx(0.33)
    assert times.cost_s("never called") == 0.0
    timed = dataclasses.replace(times, again_s={"a": 0.6, "b": 0.9, "b.1": 0.5}, slower=1.5, factor=2.0)
    assert timed.cost_s("a", spared=("a.2",)) == pytest.approx(2 * 0.61)  # that part was not run again
    assert timed.cost_s("b", spared=("b.1",)) == pytest.approx(2 * 0.43)
    assert dataclasses.replace(timed, again_s={}).cost_s("a", spared=("a.2",)) == pytest.approx(2 * (1.5 * 0.3 + 0.01))


def test_costs_add_up_to_what_was_measured_of_some_layers_together() -> None:
    times = ExtraTimes(
        forward_s={"a": 0.5, "a.2": 0.2, "b": 0.3}, calls={"a": 1, "b": 1}, call_s=0.05, together=("a", "b"), together_s=0.35
    )
    scaled = times.scaled({"a": ("a.2",), "b": ()}.__getitem__)
    assert scaled.factor == pytest.approx(0.5)
    assert scaled.cost_s("a", spared=("a.2",)) + scaled.cost_s("b") == pytest.approx(0.35)
    assert "times 0.50" in scaled.obtained
    beyond = dataclasses.replace(times, together_s=-1.0).scaled(lambda name: ())  # the machine was busy
    assert 0 < beyond.factor < 1
    assert dataclasses.replace(times, together_s=math.nan).scaled(lambda name: ()).factor == 1.0


def test_layers_are_timed_in_each_of_their_calls() -> None:
    with shared() as bench:
        timer = LayerTimer(bench.session, bench.batch, F.cross_entropy, verb="plan", together=["blocks.0"])
        times = timer.time(limit_s=math.inf)
    assert times.calls["shared"] == 3
    assert times.calls["blocks.1"] == 1
    assert 0 < times.forward_s["blocks.1.1"] < times.forward_s["blocks.1"]
    assert {name.partition("blocks.0")[1] for name in times.again_s} == {"blocks.0"}
    assert 0 < times.again_s["blocks.0.1"] < times.again_s["blocks.0"]  # up to the input of its last part
    assert times.slower > 0
    assert times.call_s >= 0
    assert times.together == ("blocks.0",)
    assert math.isfinite(times.together_s)
    assert timer.passes == 12
    assert re.search(r"median of \d+ real pass", times.obtained)


def passed(whole_s: float, again_s: float = 0.0) -> extra_time._Pass:
    recomputes = [(0.0, again_s)] if again_s else []
    return extra_time._Pass(begin=0.0, end=whole_s, calls=extra_time._Calls(), again=extra_time._Calls(), recomputes=recomputes)


def pairs_of(*more_s: float) -> list[tuple[extra_time._Pass, extra_time._Pass]]:
    """One second without checkpointing, and so much more with; three tenths of the rest are computed again."""
    return [(passed(1.0), passed(1.0 + more, again_s=(1.0 + more) * 0.3 / 1.3)) for more in more_s]


def test_whole_passes_correct_what_is_computed_again_as_far_as_they_agree() -> None:
    def together_s(*more_s: float) -> float:
        return extra_time._together_s(pairs_of(*more_s), 0.01, 1.0)

    assert together_s(0.5, 0.5, 0.5, 0.5) == pytest.approx(0.5)
    assert together_s(0.2, 0.2, 0.2, 0.2) == pytest.approx(0.2)
    # Here the variance is 0.02; of the mean it is 0.005 with a factor of 3, of four unknown ones.
    weight = (0.2 * 0.31) ** 2 / ((0.2 * 0.31) ** 2 + 0.015)
    off = math.sqrt(0.015)
    assert together_s(0.5 - off, 0.5 - off, 0.5 + off, 0.5 + off) == pytest.approx(0.31 + weight * 0.19)
    few, many = (together_s(*times * (0.3, 0.7, 0.4, 0.6)) for times in (1, 25))
    assert 0.31 < few < 0.35
    assert 0.45 < many < 0.5
    assert together_s(0.5, 0.5, 0.5) == pytest.approx(0.31)  # of three it is not known whether they agree


def test_where_memory_runs_out_without_checkpointing_what_is_computed_again_counts() -> None:
    alone = [(other, other) for _, other in pairs_of(0.5, 0.5, 0.5, 0.5)]
    assert extra_time._together_s(alone, 0.01, 1.0) == pytest.approx(0.31)


def test_what_is_computed_again_is_a_share_of_the_pass_that_it_was_in(mlp: Bench) -> None:
    """Whatever the pace of the machine was in that pass: one of them here was five times as slow."""
    timer = LayerTimer(mlp.session, mlp.batch, F.cross_entropy, verb="plan", together=["0"])
    paces = 1.0, 5.0, 1.1
    timer._pairs = [(passed(pace), passed(1.25 * at, again_s=0.25 * at)) for pace, at in zip(paces, (0.9, 0.9, 5.0), strict=True)]
    assert timer.pass_s == pytest.approx(0.95)  # of 0.9, 0.9, 1.0 and 1.1
    times = timer._times()
    assert times.together_s - times.call_s == pytest.approx(0.25 * 0.95)


def test_layers_that_were_timed_while_the_machine_was_busy_are_timed_again(mlp: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that is made in such a moment says what steps take otherwise, and the next one goes by the later passes, too."""
    clock, pace, until_s = 0.0, 4.0, 10.0

    def now() -> float:
        nonlocal clock
        clock += pace if clock < until_s else 1.0
        return clock

    run = extra_time._Passes._run

    def by_that_clock(self: Any) -> Any:
        self._now = now
        return run(self)

    def timed(pass_at_once: float) -> tuple[float, list[float]]:
        nonlocal clock, until_s
        clock, until_s = 0.0, pass_at_once
        with mlp.planning() as planned:
            first = planned.plan(1e4).predicted_extra_s
            until_s = 0.0
            return first, [planned.plan(1e4).predicted_extra_s for _ in range(2)]

    monkeypatch.setattr(extra_time._Passes, "_run", by_that_clock)
    monkeypatch.setattr(extra_time, "_call_s", lambda device: 0.0)
    monkeypatch.setattr(extra_time, "_SAYING", 10**6)
    monkeypatch.setattr(planner, "_TIMED_UNTIL_S", 0.0)
    monkeypatch.setattr(planner, "_TIMED_TWICE_S", 0.0)
    quiet, quiet_later = timed(0.0)
    assert quiet_later == [quiet, quiet]
    monkeypatch.setattr(planner, "_WHOLE_S", 0.0)  # no time to look once more
    busy, busy_later = timed(math.inf)
    assert busy == pytest.approx(pace * quiet)
    assert busy_later == [quiet, quiet]


def test_a_plan_is_made_by_what_its_last_passes_say_of_the_machine(mlp: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with mlp.planning() as planned:
        planned.plan(1e4)
        before, factor = planned._pass_s, planned._times.factor
        monkeypatch.setattr(LayerTimer, "pass_s", property(lambda self: before / 3))
        monkeypatch.setattr(planner, "_ENOUGH_PASSES", 10**6)
        monkeypatch.setattr(planner, "_WHOLE_S", math.inf)
        planned._time_once_more()
        assert planned._times.factor == pytest.approx(factor / 3)
        assert planned._pass_s == before / 3
        monkeypatch.setattr(planner, "_WHOLE_S", 0.0)
        monkeypatch.setattr(LayerTimer, "pass_s", property(lambda self: before / 9))
        planned._time_once_more()
        assert planned._pass_s == before / 3


def test_the_first_pass_after_other_layers_were_checkpointed_does_not_count(mlp: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, ...]] = []
    run = extra_time._Passes._run

    def counted(self: Any) -> Any:
        made.append(self._tried.checkpointed)
        return dataclasses.replace(run(self), begin=0.0, end=float(len(made)))

    monkeypatch.setattr(extra_time._Passes, "_run", counted)

    def pairs(limit_s: float) -> list[tuple[float, float]]:
        made.clear()
        timer = LayerTimer(mlp.session, mlp.batch, F.cross_entropy, verb="plan", together=["0"])
        timer.time(limit_s=limit_s)
        return [(plain.end, other.end) for plain, other in timer._pairs]

    monkeypatch.setattr(extra_time._Passes, "_passed_s", property(lambda self: 0.1 * len(made)))
    assert pairs(limit_s=0.0) == [(2, 4)]
    assert made == 2 * [()] + 2 * [("0",)]
    assert pairs(limit_s=1.05) == [(2, 5), (3, 6), (8, 11)]
    assert made == 3 * [()] + 3 * [("0",)] + 3 * [()] + 2 * [("0",)]  # at 1.1 s there was no time for a second one


def test_the_last_part_of_a_layer_is_not_run_again() -> None:
    with shared() as bench, bench.planning() as planned:
        planned.plan(1e12)
        assert planned._model.spared("blocks.0") == ("blocks.0.2",)


def test_predicted_is_what_a_single_prediction_says(mlp: Bench) -> None:
    none = mlp.measured()
    found = mlp.plan(0.75 * none)
    later = predict_step(mlp.session, mlp.batch, F.cross_entropy, checkpointed=found).peak_bytes
    assert later <= found.predicted_peak_bytes == pytest.approx(later, rel=0.01)
