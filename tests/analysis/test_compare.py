"""``compare``: several settings on one batch, from the same start, and no trace of it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from amp_widgets.analysis.compare import compare
from amp_widgets.analysis.comparison import Comparison, Progress, Row
from amp_widgets.analysis.corners import all_layers, corners_of
from amp_widgets.analysis.parity import check
from amp_widgets.core.autocast import Support
from amp_widgets.core.layers import list_layers
from amp_widgets.core.number_text import time_text
from amp_widgets.demos.digits import DigitsNet
from amp_widgets.demos.text import TextGPT
from amp_widgets.errors import AmpWidgetsError, LayerError, RunError, SessionClosedError, SettingsError
from amp_widgets.session import AmpSession

Untouched = Callable[[AmpSession], contextlib.AbstractContextManager[None]]
cross_entropy = nn.functional.cross_entropy
WIDTH = 16
MIXED = {"autocast": ["fp32", "bf16"], "checkpointed": ["none", "all"]}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.body(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Clock:
    """Stands still but for what is spent."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


@pytest.fixture
def attach() -> Iterator[Callable[..., AmpSession]]:
    made: list[AmpSession] = []

    def session_of(model: nn.Module | None = None, *, trained: int = 1, **settings: Any) -> AmpSession:
        model = Net() if model is None else model
        session = AmpSession(model, torch.optim.Adam(model.parameters(), lr=0.01))
        made.append(session)
        if settings:
            session.request(**settings)
            session.apply_pending()
        train(session, trained)
        return session

    yield session_of
    for session in made:
        session.close()


def batch(size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    own = torch.Generator().manual_seed(1)
    return torch.randn(size, 8, generator=own), torch.randint(3, (size,), generator=own)


def train(session: AmpSession, steps: int) -> None:
    inputs, targets = batch()
    for _ in range(steps):
        session.optimizers[0].zero_grad()
        with session.autocast():
            loss = cross_entropy(session.model(inputs), targets)  # type: ignore[misc]
        session.scaler.scale(loss).backward()
        session.scaler.step(session.optimizers[0])
        session.scaler.update()


def is_autocast(dtype: torch.dtype) -> bool:
    return torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is dtype


# ---- what is measured -------------------------------------------------------------------------------------------------------


def test_the_corners_and_their_order(attach: Any, untouched: Untouched) -> None:
    session = attach(checkpointed=["layers.1"])
    told: list[Progress] = []
    with untouched(session):
        made = compare(
            session, batch(), cross_entropy, steps=2, rounds=2, planned=["layers.0", "layers.2"], on_progress=told.append,
            slow_step_s=math.inf,
        )  # fmt: skip
    layers = ["none", "all", "planned", "chosen"]
    labels = [f"{autocast}/{name}" for autocast in ("fp32", "fp16", "bf16") for name in layers]
    assert [row.label for row in made.rows] == labels
    assert made.row("bf16/all").checkpointed == ("stem", "layers.0", "layers.1", "layers.2", "head")
    assert made.row("fp16/planned").checkpointed == ("layers.0", "layers.2")
    assert made.row("fp32/chosen").checkpointed == ("layers.1",)
    assert {row.why_not for row in made.rows} == {None}
    assert {(row.rounds, row.steps) for row in made.rows} == {(2, 3)}
    assert not made.cancelled
    # in turn: warm-up, two timed, one measured; in the second round it begins with the second, and nothing is measured
    first = [f"round 1 of 2: {label}" for label in labels for _ in range(4)]
    second = [f"round 2 of 2: {label}" for label in [*labels[1:], labels[0]] for _ in range(3)]
    assert [one.doing for one in told] == first + second
    assert [one.done for one in told] == list(range(1, 85))
    assert {one.total for one in told} == {84}
    assert told[-1].seconds_left == 0
    assert all(one.seconds_left > 0 for one in told[:-1])
    train(session, 1)


def test_times_are_those_of_the_steps(attach: Any) -> None:
    """By a clock that stands still but in the model: 10 ms a forward pass, more in every step, and 4 ms with bf16."""
    clock = Clock()
    calls: list[None] = []

    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(None)
            clock.now_s += 0.004 if is_autocast(torch.bfloat16) else 0.010
            return torch.sigmoid(x)

    net = nn.Sequential(nn.Linear(8, 3), Slow())
    session = attach(net, trained=0)
    spent = iter([0.0, 0.001, 0.003, 0.002, 0.0, 0.0])  # of fp32/none alone: warm-up, three timed steps, the measured one

    def loss_fn(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if not is_autocast(torch.bfloat16) and len(calls) <= 5:
            clock.now_s += next(spent)
        return cross_entropy(output, targets)

    told: list[Progress] = []
    made = compare(
        session, batch(20), loss_fn, grid={"autocast": ["fp32", "bf16"], "checkpointed": ["none", ["1"]]}, steps=3, rounds=1,
        clock=clock, on_progress=told.append,
    )  # fmt: skip
    none, ticked, bf16 = (made.row(label) for label in ("fp32/none", "fp32/1 layer", "bf16/none"))
    assert none.step_s == pytest.approx(0.012)
    assert (none.step_s_low, none.step_s_high) == (pytest.approx(0.0115), pytest.approx(0.0125))
    assert ticked.step_s == pytest.approx(0.020)  # forward twice
    assert bf16.step_s == pytest.approx(0.004)
    assert made.row("bf16/1 layer").step_s == pytest.approx(0.008)
    assert none.samples_per_s == pytest.approx(20 / 0.012)
    assert bf16.samples_ratio == pytest.approx(3.0)
    assert ticked.time_ratio == pytest.approx(0.020 / 0.012)
    assert (none.time_ratio, none.peak_ratio) == (1.0, 1.0)
    assert not any(row.time_differs for row in made.rows)  # three steps say little
    assert made.verdict[0].startswith("fp32/1 layer: peak ")
    assert "time ×1.67 (too few steps to tell)" in made.verdict[0]
    few = "too few steps were timed to tell it from fp32/none, fp32/1 layer and bf16/1 layer"
    assert f"No step is clearly the shortest. Least median: bf16/none, 4 ms; {few}." in made.verdict
    enough = [dataclasses.replace(row, rounds=2, reference=None) for row in made.rows]  # as if there had been another one
    for row in enough[1:]:
        assert dataclasses.replace(row, reference=enough[0]).time_differs
    assert not dataclasses.replace(enough[1], reference=none).time_differs
    assert not dataclasses.replace(enough[1], reference=enough[0], skipped=3).time_differs
    # the first progress knows one step of 10 ms, and 19 are left
    assert told[0].seconds_left == pytest.approx(19 * 0.010)


def test_the_spread_is_over_all_rounds(attach: Any) -> None:
    clock = Clock()
    durations = iter([0, 1, 2, 99, 0, 3, 4])  # warm-up, two timed, one measured; warm-up, two timed

    def loss_fn(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        clock.now_s += next(durations)
        return cross_entropy(output, targets)

    made = compare(attach(), batch(), loss_fn, grid={"autocast": "fp32", "checkpointed": "none"}, steps=2, rounds=2, clock=clock)
    (row,) = made.rows
    assert (row.step_s_low, row.step_s, row.step_s_high) == tuple(np.quantile([1, 2, 3, 4], [0.25, 0.5, 0.75]))


@pytest.mark.parametrize("trained", [0, 2])
def test_peaks_are_those_of_a_profiled_step(attach: Any, trained: int) -> None:
    session = attach(trained=trained)
    made = compare(session, batch(), cross_entropy, grid=MIXED, steps=1, rounds=1)
    assert made.memory_source == "live tensor bytes on cpu, counted exactly (dispatch mode)"
    for row in made.rows:
        session.request(autocast=row.autocast, checkpointed=row.checkpointed)
        session.apply_pending()
        assert row.peak_bytes == session.profile_step(batch(), cross_entropy).peak_bytes, row.label
    assert made.row("fp32/all").peak_ratio < 1
    assert made.row("bf16/all").peak_bytes == min(row.peak_bytes for row in made.rows)


def test_gradients_and_losses(attach: Any) -> None:
    session = attach(trained=2)
    started = copy.deepcopy((session.model, session.optimizers[0].state_dict())), torch.get_rng_state()
    made = compare(session, batch(), cross_entropy, grid=MIXED, steps=3, rounds=2)
    none, ticked, bf16 = (made.row(label) for label in ("fp32/none", "fp32/all", "bf16/none"))
    assert (none.gradient_error, ticked.gradient_error) == (0.0, 0.0)
    assert ticked.loss == none.loss
    assert made.row("bf16/all").gradient_error == bf16.gradient_error > 0
    session.request(autocast="bf16")
    session.apply_pending()
    report = check(session, batch(), cross_entropy)
    assert report.autocast is not None
    assert bf16.gradient_error == report.autocast.gradients
    # by hand: after a warm-up and two more steps, the loss of the third timed one
    for row in (none, bf16):
        model, state = copy.deepcopy(started[0])
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizer.load_state_dict(state)
        torch.set_rng_state(started[1])
        for _ in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=row.autocast == "bf16"):
                loss = cross_entropy(model(batch()[0]), batch()[1])
            loss.backward()
            optimizer.step()
        assert row.loss == loss.item(), row.label


def test_skipped_steps(attach: Any) -> None:
    """2^40 is far too much for fp16: the scale is halved step by step, until it fits."""
    session = attach(init_scale=2.0**30)
    grid = {"far": {"autocast": "fp16", "init_scale": 2.0**40}, "fits": {"autocast": "fp16", "init_scale": 2.0**8}}
    made = compare(session, batch(), cross_entropy, grid=grid, steps=2, rounds=2, slow_step_s=math.inf)
    assert [row.label for row in made.rows] == ["fp32/none", "far", "fits"]
    far, fits = made.row("far"), made.row("fits")
    assert (far.skipped, far.steps) == (3, 3)
    assert math.isnan(far.step_s)
    assert far.nonfinite > 0
    assert far.peak_bytes == fits.peak_bytes  # of a step in which the optimizer has its part
    assert (fits.skipped, fits.nonfinite) == (0, 0)
    assert far.loss == pytest.approx(made.row("fp32/none").loss, rel=1.0)
    text = str(made)
    assert "3 of 3" in text
    assert "every timed step was skipped, which says nothing of the time" in text
    assert any(sentence.startswith("far: peak ×") and "3 of 3 steps skipped" in sentence for sentence in made.verdict)


def test_the_live_scale_is_where_it_begins(attach: Any) -> None:
    session = attach(autocast="fp16", init_scale=2.0**40, trained=0)
    train(session, 40)  # until it fits
    assert session.scaler.get_scale() < 2.0**40
    made = compare(session, batch(), cross_entropy, grid={"as is": {}}, steps=2, rounds=1, slow_step_s=math.inf)
    assert made.row("as is").skipped <= 1


def test_an_optimizer_that_needs_a_closure() -> None:
    model = nn.Linear(8, 3)
    with AmpSession(model, torch.optim.LBFGS(model.parameters(), max_iter=2)) as session:
        made = compare(
            session, batch(), cross_entropy, grid={"autocast": ["fp32", "fp16"], "checkpointed": "none"}, steps=1, rounds=1
        )
    assert made.row("fp32/none").why_not is None
    assert str(made.row("fp16/none").why_not).startswith("not run: LBFGS needs a closure")


def test_several_optimizers_and_a_dict_for_a_batch(untouched: Untouched) -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 3), nn.Linear(8, 3)

        def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
            x["a"].mul_(2.0)  # the caller's own is not touched
            return self.one(x["a"]) + self.two(x["a"])

    model = Takes()
    optimizers = torch.optim.Adam(model.one.parameters()), torch.optim.SGD(model.two.parameters(), lr=0.1, momentum=0.9)
    inputs = {"a": torch.ones(4, 8)}
    with AmpSession(model, optimizers) as session:
        with untouched(session):
            made = compare(session, (inputs, torch.zeros(4, dtype=torch.long)), cross_entropy, grid=MIXED, steps=1, rounds=1)
    assert torch.equal(inputs["a"], torch.ones(4, 8))
    assert made.batch_size == 4
    assert made.batch == "inputs (4, 8) float32, targets (4,) int64"


# ---- what cannot be measured ------------------------------------------------------------------------------------------------


class Fails(nn.Module):
    """Raises with bf16, in the forward or the backward pass."""

    def __init__(self, error: Exception, *, backward: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)
        self.raising = (error, backward)
        self.saved: list[weakref.ref[torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        error, backward = self.raising
        hidden = self.linear(x)
        activation = torch.sigmoid(hidden)
        self.saved.append(weakref.ref(activation))
        result = activation * activation
        if is_autocast(torch.bfloat16):
            if not backward:
                raise error

            def fail(gradient: torch.Tensor) -> None:
                raise error

            hidden.register_hook(fail)
        return result


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("Tried to allocate 2.00 GiB"), "out of memory: 2.1 GB more did not fit"),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: not enough memory: you tried to allocate 800 bytes"
            ),
            "out of memory: 800 B more did not fit",
        ),
        (ValueError("not in <b>bf16</b>.\nmore"), "it fails: ValueError: not in <b>bf16</b>"),
    ],
    ids=["device", "cpu", "other"],
)
def test_a_corner_that_fails(attach: Any, untouched: Untouched, error: Exception, expected: str, backward: bool) -> None:
    model = Fails(error, backward=backward)
    session = attach(model)
    with untouched(session):
        made = compare(
            session, batch(), cross_entropy, grid={"autocast": ["fp32", "bf16", "fp16"], "checkpointed": "none"},
            steps=1, rounds=2, slow_step_s=math.inf,
        )  # fmt: skip
    assert [row.why_not for row in made.rows] == [None, expected, None]
    assert math.isnan(made.row("bf16/none").step_s)
    assert made.row("fp16/none").rounds == 2
    assert not any(sentence.startswith("bf16") for sentence in made.verdict)
    error.__traceback__ = None  # else this test's own would hold what the frames held
    assert [tensor for kept in model.saved if (tensor := kept()) is not None] == []
    assert "<b>bf16" not in made._repr_html_()


def test_what_really_does_not_fit(attach: Any) -> None:
    class Grows(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.empty(2**58 if is_autocast(torch.bfloat16) else 1).sum() * 0.0

    session = attach(nn.Sequential(nn.Linear(8, 3), Grows()), trained=0)
    made = compare(
        session, batch(), cross_entropy, grid={"autocast": ["bf16", "fp32"], "checkpointed": "none"}, steps=1, rounds=1
    )
    assert [row.label for row in made.rows] == ["fp32/none", "bf16/none"]
    assert str(made.row("bf16/none").why_not).startswith("out of memory: ")


def test_a_reference_that_does_not_fit(attach: Any, untouched: Untouched) -> None:
    class Grows(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not is_autocast(torch.bfloat16):
                raise torch.OutOfMemoryError("no")
            return torch.sigmoid(x)

    session = attach(nn.Sequential(nn.Linear(8, 3), Grows()), trained=0)
    with untouched(session):
        made = compare(session, batch(), cross_entropy, grid={"autocast": ["fp32", "bf16"], "checkpointed": "none"}, rounds=1)
    assert made.row("fp32/none").why_not == "out of memory"
    bf16 = made.row("bf16/none")
    assert bf16.step_s > 0
    assert math.isnan(bf16.time_ratio)
    assert math.isnan(bf16.gradient_error)
    assert made.verdict == ()


def test_a_model_that_fails_in_the_reference(attach: Any, untouched: Untouched) -> None:
    session = attach()

    def fails(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    with untouched(session):
        with pytest.raises(ZeroDivisionError):
            compare(session, batch(), fails)
        with pytest.raises(RunError, match=r"tensor of shape \(32, 3\)"):
            compare(session, batch(), lambda output, targets: output)


@pytest.mark.parametrize("limit_s", [2.0, math.inf])
def test_a_format_that_is_too_slow(attach: Any, untouched: Untouched, limit_s: float) -> None:
    """3 s for each of two layers in fp16, and 20 ms in fp32."""
    clock = Clock()
    called: list[str] = []

    class Slow(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            slow = is_autocast(torch.float16)
            if slow:
                called.append(self.name)
            clock.now_s += 3.0 if slow else 0.010
            return torch.sigmoid(x)

    session = attach(nn.Sequential(nn.Linear(8, 3), Slow("one"), Slow("two")), trained=0)
    with untouched(session):
        made = compare(session, batch(), cross_entropy, steps=1, rounds=2, slow_step_s=limit_s, clock=clock)
    rows = [made.row(f"fp16/{name}") for name in ("none", "all")]
    if limit_s == math.inf:
        assert [row.why_not for row in rows] == [None, None]
        return
    because = "not run: one step in fp16 took more than 3 s, 150 times as long as in fp32; slow_step_s=… allows more"
    assert [row.why_not for row in rows] == [because] * 2
    assert called == ["one"]  # and broken off at the next op
    assert made.row("bf16/all").rounds == 2


def test_a_step_may_be_as_slow_as_in_fp32(attach: Any) -> None:
    clock = Clock()

    def loss_fn(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        clock.now_s += 5.0
        return cross_entropy(output, targets)

    made = compare(session := attach(), batch(), loss_fn, grid=MIXED, steps=1, rounds=1, clock=clock)
    assert {row.why_not for row in made.rows} == {None}
    session.close()


# ---- no trace of it ---------------------------------------------------------------------------------------------------------


class Interrupting:
    """Raises when it is called for the n-th time."""

    def __init__(self, at: int, error: type[BaseException]) -> None:
        self.left = at
        self.error = error

    def __call__(self, *args: Any) -> bool:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return False


@pytest.mark.parametrize("where", ["forward", "backward", "loss", "optimizer", "progress", "cancelled", "clock"])
@pytest.mark.parametrize("at", [1, 2, 4, 7, 11])
def test_everything_is_put_back_wherever_it_is_interrupted(attach: Any, untouched: Untouched, where: str, at: int) -> None:
    session = attach(checkpointed=["layers.1"], fp32_layers=["head"])
    interrupting = Interrupting(at, KeyboardInterrupt)
    handles = []

    def loss_fn(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if where == "loss":
            interrupting()
        if where == "backward":
            output.register_hook(lambda gradient: interrupting() or None)
        return cross_entropy(output, targets)

    if where == "forward":
        handles.append(session.model.layers[2].register_forward_hook(lambda *args: interrupting() or None))
    if where == "optimizer":
        handles.append(session.optimizers[0].register_step_pre_hook(lambda *args: interrupting() or None))
    with untouched(session), pytest.raises(KeyboardInterrupt):
        compare(
            session, batch(), loss_fn, grid=MIXED, steps=2, rounds=2,
            on_progress=interrupting if where == "progress" else None,
            cancelled=interrupting if where == "cancelled" else None,
            clock=(lambda: 1.0 + interrupting()) if where == "clock" else Clock(),
        )  # fmt: skip
    for handle in handles:
        handle.remove()
    before = len(session.history)
    train(session, 1)
    assert len(session.history) == before + 1


def test_an_interrupt_at_any_line(attach: Any, untouched: Untouched) -> None:
    """At lines all over what runs in the modules of the comparison, also while everything is put back."""
    net = nn.Sequential(nn.Linear(8, 3), nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5)))
    session = attach(net, checkpointed=["1"])
    grid = {"autocast": ["bf16"], "checkpointed": [["0"]]}
    ours = {"compare.py": 0, "training_step.py": 0, "snapshot.py": 0}
    interrupted: list[str] = []

    def tracing(at: int) -> Callable[[FrameType, str, Any], Any]:
        def local(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal lines
            if event == "line":
                lines += 1
                if lines == at:
                    interrupted.append(frame.f_code.co_name)
                    raise KeyboardInterrupt
            return local

        lines = 0
        return lambda frame, event, argument: local if frame.f_code.co_filename.rpartition("/")[2] in ours else None

    outside = sys.gettrace()
    for at in [*range(10, 60, 9), *range(60, 1000, 67), *range(1000, 10_000, 211)]:
        before = len(interrupted)
        with untouched(session):
            sys.settrace(tracing(at))
            try:
                compare(session, batch(4), cross_entropy, grid=grid, steps=1, rounds=1)
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(outside)
        if len(interrupted) == before:
            break
    else:
        pytest.fail("it has more lines than that")
    assert len(interrupted) > 30
    assert {"put_back", "_put_back_storage"} & set(interrupted)


@pytest.mark.parametrize("at", [1, 3, 4, 5, 8, 9, 12, 13, 20])
def test_cancelling(attach: Any, untouched: Untouched, at: int) -> None:
    """Four corners; in the first round four steps each, then three."""
    session = attach()
    asked = iter(range(1, 1000))
    with untouched(session):
        made = compare(session, batch(), cross_entropy, grid=MIXED, steps=2, rounds=2, cancelled=lambda: next(asked) == at)
    assert made.cancelled
    complete = min((at - 1) // 4, 4)
    assert [row.label for row in made.rows] == ["fp32/none", "fp32/all", "bf16/none", "bf16/all"][:complete]
    assert all(row.step_s > 0 and row.peak_bytes > 0 for row in made.rows)
    if at == 20:  # 16 steps of the first round, three of the second: fp32/all, which has its turn first
        assert [row.rounds for row in made.rows] == [1, 2, 1, 1]
    assert made.verdict[-1] == "It was cancelled: what had not completed a round is not here."
    assert str(made)
    assert made.to_figure() is not None


def test_after_it_the_run_goes_on_as_if_nothing_had_been(attach: Any) -> None:
    weights = []
    for compares in (False, True):
        torch.manual_seed(3)
        session = attach(trained=2, autocast="bf16")
        if compares:
            compare(session, batch(), cross_entropy, steps=1, rounds=1, grid=MIXED)
        train(session, 2)
        weights.append([tensor.clone() for tensor in session.model.state_dict().values()])
    for one, two in zip(*weights, strict=True):
        assert torch.equal(one, two)


def test_on_the_thread_of_a_run_that_lends_the_model() -> None:
    model = Net()
    session = AmpSession(model, torch.optim.Adam(model.parameters()))
    made: list[Any] = []
    over = threading.Event()
    session.fit([batch()], cross_entropy, epochs=None, start=False)
    runner = session._background.runner
    assert runner is not None

    def job() -> None:
        try:
            steps = session.step
            made.append(compare(session, runner.newest_batch, cross_entropy, grid=MIXED, steps=1, rounds=1))
            made.append((steps, session.step))
        except BaseException as error:
            made.append(error)
        over.set()

    session.start()
    with pytest.raises(RunError, match="pause it first"):
        compare(session, batch(), cross_entropy)
    runner.between_steps(job)
    assert over.wait(30)
    session.stop()
    session.wait()
    assert isinstance(made[0], Comparison), made[0]
    assert len(made[0].rows) == 4
    assert made[1][0] == made[1][1]
    assert np.array_equal(session.history.columns("step")["step"], np.arange(session.step))
    session.close()


# ---- what is refused --------------------------------------------------------------------------------------------------------


def test_what_is_refused(attach: Any) -> None:
    session = attach()
    for wrong in ({"steps": 0}, {"rounds": True}, {"steps": 2.0}, {"slow_step_s": 0}, {"slow_step_s": "1"}):
        with pytest.raises(SettingsError, match=next(iter(wrong))):
            compare(session, batch(), cross_entropy, **wrong)
    with pytest.raises(RunError, match="expected \\(inputs, targets\\)"):
        compare(session, batch()[0], cross_entropy)
    with pytest.raises(RunError, match="as loss_fn"):
        compare(session, batch(), None)
    session.begin_step()
    with pytest.raises(RunError, match="a step is in progress"):
        compare(session, batch(), cross_entropy)
    session.abandon_step()
    other = nn.Linear(8, 3)
    with AmpSession(other) as alone, pytest.raises(RunError, match="the session has no optimizer"):
        compare(alone, batch(), cross_entropy)
    with AmpSession(torch.compile(other, backend="eager"), torch.optim.SGD(other.parameters(), lr=0.1)) as compiled:  # type: ignore[arg-type]
        with pytest.raises(RunError, match=r"compiled by torch\.compile"):
            compare(compiled, batch(), cross_entropy)
    session.close()
    with pytest.raises(SessionClosedError, match="compare: this session was closed"):
        compare(session, batch(), cross_entropy)


@pytest.mark.parametrize(
    ("grid", "error", "words"),
    [
        ({}, SettingsError, "nothing in it"),
        ([], SettingsError, "got a list"),
        ({"one": 3}, SettingsError, "'one': 3"),
        ({"one": {"autocst": "bf16"}}, SettingsError, "did you mean 'autocast'"),
        ({"autocast": ["fp8"], "checkpointed": ["none"]}, SettingsError, "fp8"),
        ({"checkpointed": ["planned"]}, SettingsError, "no plan"),
        ({"checkpointed": []}, SettingsError, "no layers"),
        ({"checkpointed": [3]}, SettingsError, "got 3"),
        ({"one": {"checkpointed": ["nowhere"]}}, LayerError, "nowhere"),
    ],
)
def test_grids_that_are_none(attach: Any, grid: Any, error: type[AmpWidgetsError], words: str) -> None:
    with pytest.raises(error, match=words):
        corners_of(attach(), grid, None)


# ---- the grid ---------------------------------------------------------------------------------------------------------------


class Plan:
    layers = ("layers.0",)


def labels(session: AmpSession, grid: Any, planned: Any = None) -> list[str]:
    return [corner.label for corner in corners_of(session, grid, planned)[0]]


def test_grids(attach: Any) -> None:
    session = attach(checkpointed=["layers.1"])
    assert labels(session, {"autocast": "bf16"}, Plan()) == [
        "fp32/none", "bf16/none", "bf16/all", "bf16/planned", "bf16/chosen",
    ]  # fmt: skip
    own = {"autocast": ["fp32"], "checkpointed": ["none", "layers.*", ["layers.0"], ["layers.1"], Plan()]}
    assert labels(session, own) == ["fp32/none", "fp32/layers.*", "fp32/1 layer", "fp32/1 layer (2)", "fp32/1 layer (3)"]
    named = {
        "fp32/none": {"autocast": "bf16"},
        "plan": {"checkpointed": Plan()},
        "plain": {"checkpointed": (), "autocast": "fp32"},
    }
    corners, _ = corners_of(session, named, None)
    assert [corner.label for corner in corners] == ["plain", "fp32/none", "plan"]
    assert corners[0].is_reference
    assert corners[1].settings.checkpointed == ("layers.1",)  # as in force
    assert corners[2].settings.checkpointed == ("layers.0",)
    assert labels(session, {"fp32/none": {"autocast": "bf16"}}) == ["fp32/none (reference)", "fp32/none"]
    kept = corners_of(session, {"kept": {"autocast": "bf16", "fp32_layers": ["layers.*.norm"]}}, None)[0][1]
    assert kept.settings.fp32_layers == tuple(f"layers.{at}.norm" for at in range(3))
    assert labels(session, {"as set": session.settings})[1] == "as set"


def test_what_is_the_same_is_not_run_twice(attach: Any) -> None:
    session = attach()
    corners, left_out = corners_of(session, None, ["stem", "layers.*", "head"])
    assert [corner.layers_name for corner in corners] == ["none", "all"] * 3
    assert left_out == ("planned is left out: its layers are those of all.",)
    corners, left_out = corners_of(attach(nn.Linear(8, 3)), None, None)
    assert [corner.label for corner in corners] == ["fp32/none", "fp16/none", "bf16/none"]
    assert left_out == ("all is left out: this model has no layer inside it that can be checkpointed.",)


def test_a_format_that_the_device_lacks(attach: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    session = attach()
    support = {**session.support, "fp16": Support(available=False, note="this device does not support it")}
    monkeypatch.setattr(session, "_support", support)
    made = compare(session, batch(), cross_entropy, steps=1, rounds=1)
    assert {row.autocast for row in made.rows} == {"fp32", "bf16"}
    assert "fp16 is left out: this device does not support it." in made.notes
    assert "fp16 is left out: this device does not support it." in str(made)
    with pytest.raises(SettingsError, match=r"nothing is left to compare\. fp16 is left out"):
        compare(session, batch(), cross_entropy, grid={"autocast": "fp16"})


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.out = nn.Linear(2, 2)


def test_all_layers_are_the_blocks() -> None:
    blocks = tuple(f"layers.{at}" for at in range(4))
    assert all_layers(list_layers(DigitsNet())) == ("stem", *blocks, "head")
    assert all_layers(list_layers(TextGPT(width=8, depth=4))) == ("tokens", "positions", *blocks, "norm", "head")
    inside = tuple(f"inner.{name}" for name in ("stem", *blocks, "head"))
    assert all_layers(list_layers(Wrapper(DigitsNet()))) == (*inside, "out")
    two = nn.Sequential(nn.Linear(9, 9), nn.ReLU())
    assert all_layers(list_layers(Wrapper(two))) == ("inner.0", "inner.1", "out")
    parametrized = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), nn.Linear(3, 3))
    assert all_layers(list_layers(parametrized)) == ("0", "1")
    assert all_layers(()) == ()


# ---- what is shown ----------------------------------------------------------------------------------------------------------


def comparison(*rows: Row, **more: Any) -> Comparison:
    return Comparison(
        rows=rows, steps=5, rounds=3, device="cpu", batch="inputs (4,)", batch_size=4, memory_source="counted", **more
    )  # fmt: skip


def row(label: str, **numbers: Any) -> Row:
    autocast, _, layers = label.partition("/")
    middle = numbers.pop("step_s", 0.1)
    spread = {"step_s_low": 0.9 * middle, "step_s_high": 1.1 * middle}
    given = {"peak_bytes": 100e6, "step_s": middle, **spread, "loss": 2.0, "gradient_error": 0.0, "rounds": 3, "steps": 6}
    return Row(label=label, autocast=autocast, layers_name=layers, checkpointed=(), **(given | numbers))


def test_the_verdict_says_what_was_measured() -> None:
    base = row("fp32/none")
    made = comparison(
        base,
        row("fp32/all", reference=base, peak_bytes=48e6, step_s=0.15),
        row("bf16/none", reference=base, peak_bytes=72e6, step_s=0.061, loss=2.5, gradient_error=1.2e-3),
        row("fp16/none", reference=base, peak_bytes=48e6, step_s=0.062, loss=2.5, gradient_error=0.5, nonfinite=3, skipped=2),
        row("near", reference=base, step_s=0.105, loss=2.5),
        row("blind", reference=base, peak_bytes=math.nan, step_s=math.nan, gradient_error=math.nan),
        row("gone", reference=base, why_not="out of memory"),
    )
    assert made.verdict == (
        "fp32/all: peak ×0.48, time ×1.50 of fp32/none; the first gradients and the loss are the same.",
        "bf16/none: peak ×0.72, time ×0.61 of fp32/none; first gradients off by 1.2e-03.",
        "fp16/none: peak ×0.48, time ×0.62 of fp32/none; first gradients off by 5.0e-01, 3 of their elements inf or NaN; 2 of 6 "
        "steps skipped.",
        "near: peak ×1.00, time ×1.05 (within the spread) of fp32/none; the first gradients are the same.",
        "blind: neither peak nor time is known.",
        "Least memory: fp32/all and fp16/none, 48.0 MB.",
        "No step is clearly the shortest. Least median: bf16/none, 61 ms; within the spread of it: fp16/none.",
    )
    assert comparison(base).verdict == ()
    with pytest.raises(RunError, match="'fp32/none', 'fp32/all'"):
        made.row("nowhere")


def test_the_table() -> None:
    base = row("fp32/none", samples_per_s=320.0)
    evil = row("<script>/x", reference=base, peak_bytes=48e6, step_s=2.0, samples_per_s=math.nan, loss=math.nan)
    made = comparison(base, evil, row("gone/none", reference=base, why_not="out of <memory>"), notes=("a <note>",))
    headings, first, second, third = made.to_table()
    assert headings[2:8] == ("peak", "step time", "samples a second", "loss", "gradients", "skipped")
    assert first[2:8] == ("100.0 MB ×1.00", "100 ms (90 ms to 110 ms) ×1.00", "320 ×1.00", "2.000 ×1.00", "reference", "0")
    assert second[2:8] == ("48.0 MB ×0.48", "2 s (1.8 s to 2.2 s) ×20", "–", "–", "0", "0")
    assert third[2:] == ("–",) * 6 + ("out of <memory>",)
    page = made._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;/x" in page
    assert "out of &lt;memory&gt;" in page
    assert "a &lt;note&gt;" in page
    assert str(made) == repr(made)
    assert "in 3 rounds, all in turn: from the same start a warm-up step, then 5 timed steps." in made.obtained


def test_a_figure_of_it() -> None:
    base = row("fp32/none")
    made = comparison(base, row("bf16/all", reference=base, step_s=0.05))
    assert [trace.name for trace in made.to_figure().data if trace.x[0] is not None] == ["fp32/none", "bf16/all"]
    assert made.to_figure(theme="dark").layout.paper_bgcolor != made.to_figure().layout.paper_bgcolor
    with pytest.raises(AmpWidgetsError, match="'light' or 'dark'"):
        made.to_figure(theme="blue")  # type: ignore[arg-type]


def test_durations() -> None:
    texts = [time_text(duration_s) for duration_s in (0.01234, 2.5, 0.000_04, 123.0, 0.0, 1e-7, 1234.5)]
    assert texts == ["12.3 ms", "2.5 s", "40 µs", "123 s", "0 µs", "0.1 µs", "1,234 s"]
