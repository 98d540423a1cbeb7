"""A thousand requests from three threads during a run, against a loop that is told the same changes at the same steps.

The reference uses nothing of amp_widgets: plain ``torch.autocast`` and ``torch.amp.GradScaler``.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amp_widgets.capture.capture import Capture
from amp_widgets.core.history import Event, History
from amp_widgets.core.loop import LiveLoop
from amp_widgets.errors import SettingsError
from amp_widgets.session import AmpSession

REQUESTS = 1000
THREADS = 3
TIMEOUT_S = 60

Batch = tuple[torch.Tensor, torch.Tensor]


class Net(nn.Module):
    """Small layers with dropout and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1)) for _ in range(2)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


def make() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def batches() -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randn(4, 8, generator=generator), torch.randint(4, (4,), generator=generator)


# ---- what is asked for --------------------------------------------------------------------------------------------------


def some_changes(rng: random.Random) -> dict[str, Any]:
    """One setting or a few; powers of two, by which gradients are scaled without rounding."""
    kinds: list[Callable[[], dict[str, Any]]] = [
        lambda: {"autocast": rng.choice(["fp32", "bf16", "fp16", "fp16", "fp16"])},
        lambda: {"init_scale": 2.0 ** rng.choice([rng.randint(-4, 16), rng.randint(20, 60)])},
        lambda: {"autocast": "fp16", "init_scale": 2.0 ** rng.randint(0, 12), "scaling": True},
        lambda: {"growth_interval": rng.randint(1, 6), "growth_factor": 2.0 ** rng.randint(1, 3)},
        lambda: {"backoff_factor": 2.0 ** -rng.randint(1, 8), "scaling": rng.random() < 0.8},
        lambda: {"checkpointed": rng.choice([[], ["layers.*"], ["layers.1", "head"], ["layers.0.*"]])},
        lambda: {"min_scale": rng.choice([None, 2.0 ** rng.randint(-8, 8)])},
        lambda: {"max_scale": rng.choice([None, 2.0 ** rng.randint(2, 30)])},
    ]
    return rng.choice(kinds)()


def refused_changes(rng: random.Random) -> dict[str, Any]:
    return rng.choice(
        [
            {"autocast": "fp8"}, {"init_scale": 0.0}, {"init_scale": math.nan}, {"growth_interval": 0}, {"growth_factor": 1.0},
            {"backoff_factor": 1.5}, {"checkpointed": ["layers"]}, {"checkpointed": ["layer.*"]}, {"learning_rate": 0.1}, {},
            {"autocast": "bf16", "min_scale": -1.0}, {"min_scale": 64.0, "max_scale": 32.0},
        ]
    )  # fmt: skip


class Askers:
    """Threads that make their requests when the loop lets them, wherever it is just then.

    A step gives a few permits in several places, so that the requests fall into all of its parts, without waiting for time.
    """

    def __init__(self, session: LiveLoop, seed: int) -> None:
        self.refused = 0
        self.errors: list[BaseException] = []
        self._session = session
        self._permits = threading.Semaphore(0)
        self._lock = threading.Lock()
        counts = [REQUESTS // THREADS + (n < REQUESTS % THREADS) for n in range(THREADS)]
        self._threads = [
            threading.Thread(target=self._run, args=(n, random.Random(seed + n), count), daemon=True)
            for n, count in enumerate(counts)
        ]
        for thread in self._threads:
            thread.start()

    def let_some_ask(self, rng: random.Random) -> None:
        permits = rng.choice([0, 0, 1, 2, 5])
        if permits:
            self._permits.release(permits)

    @property
    def at_work(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(TIMEOUT_S)
        assert not self.at_work
        assert self.errors == []

    def _run(self, number: int, rng: random.Random, count: int) -> None:
        try:
            for _ in range(count):
                assert self._permits.acquire(timeout=TIMEOUT_S)
                refusable = rng.random() < 0.15
                changes = refused_changes(rng) if refusable else some_changes(rng)
                try:
                    if rng.random() < 0.15:
                        at_step = self._session.status().step + rng.randint(2, 6)
                        self._session.schedule(at_step=at_step, source=f"thread {number}", **changes)
                    else:
                        self._session.request(source=f"thread {number}", **changes)
                except SettingsError:
                    with self._lock:
                        self.refused += 1
                else:
                    assert not refusable, changes
        except BaseException as error:  # the test's thread raises it
            self.errors.append(error)


# ---- two loops under control, and one by hand ---------------------------------------------------------------------------


class Outcome:
    """What a loop computed, and what it did to its model."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.scales: list[float] = []
        self.skipped: list[float] = []
        self.state: dict[str, torch.Tensor] = {}


def run_drop_ins(seed: int) -> tuple[Outcome, History, Askers]:
    """A loop that uses the session's autocast and scaler."""
    rng = random.Random(seed - 1)
    outcome = Outcome()
    model, optimizer = make()
    with AmpSession(model, optimizer) as session:
        askers = Askers(session, seed)
        after = 0
        for x, y in batches():
            optimizer.zero_grad()
            askers.let_some_ask(rng)
            with session.autocast():
                loss = F.cross_entropy(model(x), y)
            askers.let_some_ask(rng)
            session.scaler.scale(loss).backward()
            session.scaler.step(optimizer)
            askers.let_some_ask(rng)
            session.scaler.update()
            outcome.losses.append(loss.item())
            after += not askers.at_work
            if after > 8:  # every scheduled one has had its turn
                break
        askers.join()
        assert session.pending is None
        assert session.scheduled == ()
        history = session.history
    outcome.state = model.state_dict()
    return outcome, history, askers


def plain_loop(model: nn.Module, optimizer: torch.optim.Optimizer, data: Iterable[Batch]) -> list[float]:
    """A loop that knows nothing of autocast."""
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def run_captured(seed: int) -> tuple[Outcome, History, Askers]:
    """The plain loop, captured; its data and its model let the others ask."""
    rng = random.Random(seed - 1)
    outcome = Outcome()
    model, optimizer = make()
    found: list[Askers] = []

    def data() -> Iterator[Batch]:
        after = 0
        for batch in batches():
            yield batch
            if found:
                found[0].let_some_ask(rng)
                after += not found[0].at_work
                if after > 8:
                    return

    def ask(*_: Any) -> None:
        if found:
            found[0].let_some_ask(rng)

    hooks = [model.head.register_forward_hook(ask), optimizer.register_step_pre_hook(ask)]
    with Capture(AmpSession, on_found=lambda session: found.append(Askers(session, seed))) as capture:
        outcome.losses = plain_loop(model, optimizer, data())
        found[0].join()
    for hook in hooks:
        hook.remove()
    assert capture.session is not None
    outcome.state = model.state_dict()
    return outcome, capture.session.history, found[0]


def run_by_hand(steps: int, applied: list[Event]) -> Outcome:
    """The same changes at the same steps.

    The scale's rule: setting it counts the growth interval anew; a lowered interval that was reached already starts anew, as
    torch would never meet it; floor and cap hold the scale at all times, or else the range in which its reciprocal is normal.
    """
    outcome = Outcome()
    model, optimizer = make()
    settings: dict[str, Any] = {
        "autocast": "fp32", "scaling": True, "init_scale": 2.0**16, "growth_factor": 2.0, "backoff_factor": 0.5,
        "growth_interval": 2000, "min_scale": None, "max_scale": None, "checkpointed": [],
    }  # fmt: skip
    scale, tracker = 2.0**16, 0
    dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16}

    def held(value: float) -> float:
        low, high = settings["min_scale"], settings["max_scale"]
        return min(max(value, 2.0**-126 if low is None else low), 2.0**126 if high is None else high)

    for step, (x, y) in zip(range(steps), batches(), strict=False):
        for event in applied:
            if event.step == step:
                changes = {name: value for name, value in event.detail.items() if name != "source"}
                settings.update(changes)
                if "init_scale" in changes:
                    scale, tracker = changes["init_scale"], 0
                if tracker >= settings["growth_interval"]:
                    tracker = 0
                scale = held(scale)

        optimizer.zero_grad()
        dtype = dtypes.get(settings["autocast"])
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = F.cross_entropy(model(x), y)
        outcome.losses.append(loss.item())
        if settings["autocast"] == "fp16" and settings["scaling"]:
            scaler = torch.amp.GradScaler("cpu")
            rules = {name: settings[name] for name in ("growth_factor", "backoff_factor", "growth_interval")}
            scaler.load_state_dict({"scale": scale, "_growth_tracker": tracker, **rules})
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            state = scaler.state_dict()
            outcome.scales.append(scale)
            outcome.skipped.append(float(state["scale"] < scale))
            scale, tracker = held(state["scale"]), state["_growth_tracker"]
        else:
            loss.backward()
            optimizer.step()
            outcome.scales.append(1.0)
            outcome.skipped.append(0.0)
    outcome.state = model.state_dict()
    return outcome


@pytest.mark.parametrize("run", [run_drop_ins, run_captured])
def test_a_thousand_requests_equal_a_scripted_reference(run: Callable[[int], tuple[Outcome, History, Askers]]) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    outcome, history, askers = run(seed)
    applied, rejected = history.events("applied"), history.events("rejected")
    assert len(applied) + len(rejected) == REQUESTS  # each has its event
    assert len(rejected) >= askers.refused > REQUESTS / 10
    assert len({event.step for event in applied}) > 30  # they were spread over the run
    assert {event.detail["source"] for event in applied} == {f"thread {n}" for n in range(THREADS)}

    steps = len(outcome.losses)
    expected = run_by_hand(steps, applied)
    assert outcome.losses == expected.losses
    columns = history.columns("step", "loss", "scale", "skipped")
    assert columns["step"].tolist() == list(range(steps))
    np.testing.assert_array_equal(columns["loss"], expected.losses)
    assert columns["scale"].tolist() == expected.scales
    assert columns["skipped"].tolist() == expected.skipped
    for name, value in expected.state.items():
        assert torch.equal(outcome.state[name], value), name
    assert len(set(expected.scales)) > 10  # otherwise the comparison says little
    assert {0.0, 1.0} == set(expected.skipped)
