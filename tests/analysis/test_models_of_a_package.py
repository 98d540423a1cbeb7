"""A budget is kept by models that were not written here: GPT-2 and a ResNet of ``transformers``, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_widgets.analysis.planner import Planner, plan
from amp_widgets.core.settings import AutocastName
from amp_widgets.session import AmpSession

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'amp-widgets[models]'")


def gpt2() -> tuple[nn.Module, tuple[Any, Any], Callable[[Any, Any], Tensor]]:
    configuration = transformers.GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=128, n_positions=32, use_cache=False)
    tokens = torch.randint(128, (4, 32))
    return transformers.GPT2LMHeadModel(configuration), (tokens, tokens.roll(-1, 1)), of_tokens


def resnet() -> tuple[nn.Module, tuple[Any, Any], Callable[[Any, Any], Tensor]]:
    configuration = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 32], depths=[2, 2, 2], layer_type="basic", num_labels=10
    )
    images = torch.randn(8, 3, 64, 64)
    return transformers.ResNetForImageClassification(configuration), (images, torch.randint(10, (8,))), of_images


def of_tokens(output: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1).float(), targets.flatten())


def of_images(output: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.float(), targets)


@pytest.mark.parametrize(("make", "autocast"), [(gpt2, "bf16"), (resnet, "fp32")])
def test_the_measured_peak_of_a_plan_is_the_predicted_one(
    make: Any, autocast: AutocastName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Planner, "_alternatives", lambda self, least: ())  # of the plan that does not fit only the least is asked
    torch.manual_seed(0)
    model, batch, loss_fn = make()
    with AmpSession(model, torch.optim.AdamW(model.parameters(), lr=1e-3)) as session:
        session.request(autocast=autocast)
        train(session, batch, loss_fn)
        whole = session.profile_step(batch, loss_fn).peak_bytes
        least = plan(session, budget_bytes=1, batch=batch, loss_fn=loss_fn).least_peak_bytes
        assert least < 0.95 * whole
        budget = (least + whole) / 2
        chosen = plan(session, budget_bytes=budget, batch=batch, loss_fn=loss_fn)
        assert chosen.fits
        assert chosen.layers
        session.request(checkpointed=chosen)
        for _ in range(2):
            train(session, batch, loss_fn)
            assert session.settings.checkpointed == chosen.layers
            measured = session.history.last("peak_bytes")
            assert measured <= budget
            assert measured == pytest.approx(chosen.predicted_peak_bytes, rel=0.01)


def train(session: AmpSession, batch: tuple[Any, Any], loss_fn: Callable[[Any, Any], Tensor]) -> None:
    assert session.model is not None
    optimizer = session.optimizers[0]
    optimizer.zero_grad()
    with session.autocast():
        loss = loss_fn(session.model(batch[0]), batch[1])
    session.scaler.scale(loss).backward()
    session.scaler.step(optimizer)
    session.scaler.update()
