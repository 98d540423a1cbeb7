"""Single weights with their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from amp_widgets.analysis.weights import DEFAULT_RATE, MOST_WEIGHTS, weight_samples
from amp_widgets.session import AmpSession


def test_each_parameter_gives_the_weight_with_the_middle_gradient() -> None:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    with AmpSession(model, torch.optim.SGD(model.parameters(), lr=0.5)) as session:
        assert weight_samples(session) == []  # no gradients yet
        model.weight.grad = torch.tensor([[0.0, -0.3, 0.1], [float("inf"), 9.0, float("nan")]])
        model.bias.grad = torch.zeros(2)
        (sample,) = weight_samples(session)
        assert sample == ("weight[0, 1]", 2.0, pytest.approx(-0.3), 0.5)
    assert weight_samples(session) == []


def test_scalars_many_and_without_an_optimizer() -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList(nn.Parameter(torch.tensor(float(i + 1))) for i in range(MOST_WEIGHTS + 5))

    model = Scales()
    for parameter in model.parameters():
        parameter.grad = torch.tensor(2.0)
    with AmpSession(model) as session:
        samples = weight_samples(session)
    assert len(samples) == MOST_WEIGHTS
    assert samples[1] == ("scales.1", 2.0, 2.0, DEFAULT_RATE)
