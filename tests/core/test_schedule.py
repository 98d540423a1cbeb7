"""Requests for a later step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from amp_widgets.core.loop import LiveLoop
from amp_widgets.errors import LayerError, SessionClosedError, SettingsError


@pytest.fixture
def loop() -> Iterator[LiveLoop]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    made = LiveLoop(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    made.kept = model  # type: ignore[attr-defined]
    yield made
    made.close()


def train(loop: LiveLoop, steps: int) -> list[str]:
    """Train; the format of each step's output."""
    model, optimizer = loop._model, loop._optimizers[0]
    assert model is not None
    dtypes = []
    for _ in range(steps):
        optimizer.zero_grad()
        with loop.autocast():
            output = model(torch.ones(3, 4))
        dtypes.append(str(output.dtype).removeprefix("torch."))
        loop.scaler.scale(output.float().sum()).backward()
        loop.scaler.step(optimizer)
        loop.scaler.update()
    return dtypes


def applied(loop: LiveLoop) -> list[tuple[int, object, str]]:
    return [(e.step, e.detail.get("autocast"), e.detail["source"]) for e in loop.history.events("applied")]


def test_it_is_in_force_from_its_step_on_and_an_event(loop: LiveLoop) -> None:
    loop.schedule(at_step=3, autocast="bf16")
    loop.schedule(at_step=5, autocast="fp32", source="magic")
    assert [request.at_step for request in loop.scheduled] == [3, 5]
    assert loop.pending is None
    assert train(loop, 7) == ["float32"] * 3 + ["bfloat16"] * 2 + ["float32"] * 2
    assert applied(loop) == [(3, "bf16", "schedule"), (5, "fp32", "magic")]
    assert loop.scheduled == ()


def test_the_first_step_of_all(loop: LiveLoop) -> None:
    loop.schedule(at_step=0, autocast="bf16")
    assert train(loop, 1) == ["bfloat16"]
    assert applied(loop) == [(0, "bf16", "schedule")]


def test_of_one_step_the_order_and_what_is_asked_for_meanwhile_has_the_last_word(loop: LiveLoop) -> None:
    loop.schedule(at_step=2, autocast="bf16", init_scale=8.0)
    loop.schedule(at_step=1, init_scale=2.0)
    loop.schedule(at_step=2, init_scale=16.0)
    train(loop, 1)
    assert loop.settings.init_scale == 2.0  # its turn came with the end of the step before
    loop.on_boundary.append(lambda: loop.request(autocast="fp32") if loop.status().step == 2 else None)
    assert train(loop, 2) == ["float32", "float32"]
    assert [(e.step, set(e.detail) - {"source"}) for e in loop.history.events("applied")] == [
        (1, {"init_scale"}), (2, {"autocast", "init_scale"}), (2, {"init_scale"}), (2, {"autocast"}),
    ]  # fmt: skip
    assert loop.settings.init_scale == 16.0


@pytest.mark.parametrize("at_step", [0, 1, -1, True, 2.0, "3"])
def test_a_step_that_has_begun_or_is_none_is_refused(loop: LiveLoop, at_step: object) -> None:
    train(loop, 2)
    with pytest.raises(SettingsError, match=r"at_step: got .*, expected a whole number, at least 2"):
        loop.schedule(at_step=at_step, autocast="bf16")  # type: ignore[arg-type]
    assert [event.kind for event in loop.history.events()] == ["rejected"]


def test_within_a_step_the_next_is_the_first_possible(loop: LiveLoop) -> None:
    loop.begin_step()
    with pytest.raises(SettingsError, match="at least 1"):
        loop.schedule(at_step=0, autocast="bf16")
    loop.schedule(at_step=1, autocast="bf16")


def test_what_cannot_be_is_refused_at_once(loop: LiveLoop) -> None:
    with pytest.raises(SettingsError, match="did you mean 'bf16'"):
        loop.schedule(at_step=5, autocast="bfloat16")
    with pytest.raises(LayerError):
        loop.schedule(at_step=5, checkpointed=["layers.*"])
    loop.schedule(at_step=5, max_scale=4.0)
    with pytest.raises(SettingsError, match="above max_scale"):
        loop.schedule(at_step=6, init_scale=8.0)  # judged by what will be in force then
    loop.schedule(at_step=4, init_scale=8.0)


def test_what_can_be_no_more_is_rejected_then(loop: LiveLoop) -> None:
    loop.schedule(at_step=2, checkpointed=["2"])
    assert isinstance(loop._model, nn.Sequential)
    train(loop, 1)
    del loop._model[2]
    train(loop, 2)
    assert [(e.step, e.kind) for e in loop.history.events()] == [(2, "rejected")]
    assert loop.settings.checkpointed == ()


def test_after_close(loop: LiveLoop) -> None:
    loop.schedule(at_step=3, autocast="bf16")
    loop.close()
    assert loop.scheduled == ()
    with pytest.raises(SessionClosedError, match="schedule"):
        loop.schedule(at_step=3, autocast="bf16")
