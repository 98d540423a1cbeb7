"""What a session gives of a profiled step: its picture, and its layers as a table."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from amp_widgets.analysis.profiled_step import LayerProfiles, ProfiledStep
from amp_widgets.core.memory.profile import LayerProfile
from amp_widgets.errors import LayerError, RunError
from amp_widgets.session import AmpSession

BATCH, WIDTH = 64, 32


@pytest.fixture
def session() -> Iterator[AmpSession]:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    model = nn.Sequential(nn.Linear(8, WIDTH), block, nn.Linear(WIDTH, 4))
    with AmpSession(model, torch.optim.SGD(model.parameters(), lr=0.1)) as made:
        yield made


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(BATCH, 8), torch.randint(4, (BATCH,))


def train(session: AmpSession, steps: int = 1) -> None:
    inputs, targets = batch()
    for _ in range(steps):
        session.optimizers[0].zero_grad()
        with session.autocast():
            loss = nn.functional.cross_entropy(session.model(inputs), targets)  # type: ignore[misc]
        session.scaler.scale(loss).backward()
        session.scaler.step(session.optimizers[0])
        session.scaler.update()


def test_a_step_draws_itself_and_over_another(session: AmpSession) -> None:
    before = session.profile_step(batch(), nn.functional.cross_entropy)
    session.request(checkpointed=["1"])
    session.apply_pending()
    after = session.profile_step(batch(), nn.functional.cross_entropy)
    alone, over = before.to_figure(), after.to_figure(before)
    lines = [trace for trace in over.data if trace.meta["part"] in ("total", "outline")]
    highest = {(trace.meta["profile"], trace.meta["part"]): max(trace.y) for trace in lines}
    assert highest[1, "total"] == after.peak_bytes
    assert highest[0, "outline"] == before.peak_bytes
    assert max(next(trace for trace in alone.data if trace.meta["part"] == "total").y) == before.peak_bytes
    assert after.to_figure(title="mine").layout.title.text == "<b>mine</b>"


def test_steps_of_a_run_are_the_same_objects_each_time(session: AmpSession) -> None:
    session.profile_next_step()
    train(session)
    (one,) = session.profiles
    assert isinstance(one, ProfiledStep)
    assert session.profiles[0] is one
    assert ProfiledStep.of(one) is one
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.label = "mine"  # type: ignore[misc]


def test_layers_hold_what_was_counted_by_hand(session: AmpSession) -> None:
    layers = session.layer_profile(batch(), nn.functional.cross_entropy)
    hidden = 4 * BATCH * WIDTH
    # Linear keeps its input, Tanh its output; the outputs of the inner Linears die with the next op.
    first = [(layer.name, layer.output_bytes) for layer in layers][:3]
    assert first == [("(model)", 4 * BATCH * 4), ("0", hidden), ("1", hidden)]
    block = layers["1"]
    assert block.activation_bytes == 2 * hidden
    assert block.saved_bytes == hidden
    assert block.cost_s == block.forward_s > 0
    assert [layer.name for layer in session.layer_profile(batch(), nn.functional.cross_entropy, layers="1.*")] == [
        "1.0", "1.1", "1.2", "1.3",
    ]  # fmt: skip


def test_what_checkpointing_was_said_to_save_is_what_it_saves(session: AmpSession) -> None:
    made = batch()
    plain = session.profile_step(made, nn.functional.cross_entropy)
    session.request(checkpointed=["1"])
    session.apply_pending()
    lean = session.profile_step(made, nn.functional.cross_entropy)
    said = plain.layer("1").saved_bytes
    held = plain.layer("1").activation_bytes - lean.layer("1").activation_bytes
    assert held == said > 0
    assert lean.layer("1").checkpointed
    assert lean.layer("1").cost_s == lean.layer("1").recompute_s > 0


def test_the_newest_step_of_the_run_without_a_batch(session: AmpSession) -> None:
    with pytest.raises(RunError, match=r"no step was profiled yet; call session.profile_next_step\(\)"):
        session.layer_profile()
    with pytest.raises(RunError, match="got no loss_fn"):
        session.layer_profile(batch())
    session.profile_next_step("mine")
    train(session)
    layers = session.layer_profile()
    assert layers.label == "mine"
    assert len(layers) - 1 == len(session.layers) == 7


def test_as_a_table_it_is_aligned_escaped_and_says_what_is_an_estimate() -> None:
    evil = "<img src=x onerror=alert(1)>"
    common = {"parameter_bytes": 4_000, "activation_bytes": 30_000, "output_bytes": 10_000, "calls": 1, "dtype": "float32"}
    times = {"forward_s": 0.002, "backward_s": float("nan"), "recompute_s": 0.003}
    layers = LayerProfiles(
        [
            LayerProfile(name=evil, type="Linear", checkpointed=False, **common, **times),  # type: ignore[arg-type]
            LayerProfile(name="b", type="Block", checkpointed=True, **common, **times),  # type: ignore[arg-type]
        ],
        label=evil,
    )
    shown = layers._repr_html_()
    assert "<img" not in shown
    assert shown.count("&lt;img") == 2
    assert "estimate" in shown
    _, heading, first, second, words = repr(layers).splitlines()
    sizes = ["4.0 kB", "30.0 kB", "10.0 kB"]
    assert re.split(r" {2,}", first) == [evil, "Linear", "float32", *sizes, "2.00 ms", "20.0 kB", "2.00 ms"]
    assert second.split()[-3:] == ["checkpointed", "3.00", "ms"]
    assert len(heading) == len(first) == len(second)
    assert "estimate" in words
    assert isinstance(layers[:1], LayerProfiles)
    with pytest.raises(LayerError, match="no layer 'c'"):
        layers["c"]


def test_a_pattern_that_fits_nothing_names_layers(session: AmpSession) -> None:
    with pytest.raises(LayerError, match=r"no layer matches 'layer.\*', expected one of 0, 1, 1.0"):
        session.layer_profile(batch(), nn.functional.cross_entropy, layers="layer.*")


def test_layers_that_are_alike_have_one_time() -> None:
    sizes = {"parameter_bytes": 4, "activation_bytes": 8, "output_bytes": 8, "recompute_s": math.nan}
    layer = LayerProfile(name="", type="Linear", forward_s=0, backward_s=0, calls=1, dtype="float32", checkpointed=False, **sizes)  # type: ignore[arg-type]
    times_s = {"a": (0.01, 0.02), "b": (0.09, 0.03), "c": (0.02, 0.01)}
    alike = [dataclasses.replace(layer, name=name, forward_s=one, backward_s=two) for name, (one, two) in times_s.items()]
    other = dataclasses.replace(alike[0], name="d", output_bytes=alike[0].output_bytes + 1, forward_s=0.5)
    made = LayerProfiles.of(SimpleNamespace(layers=[*alike, other], label="x"))  # type: ignore[arg-type]
    assert [(layer.name, layer.forward_s, layer.backward_s) for layer in made] == [
        ("a", 0.02, 0.02),
        ("b", 0.02, 0.02),
        ("c", 0.02, 0.02),
        ("d", 0.5, 0.02),
    ]
