"""Single weights of a live model with their gradients, to be looked at by hand."""

from __future__ import annotations

import torch
from torch import nn

from amp_widgets.core.loop import LiveLoop

MOST_WEIGHTS = 40


def weight_samples(loop: LiveLoop) -> list[tuple[str, float, float, float]]:
    """Of each parameter one weight, the one whose gradient is in the middle by size.

    It waits for the device. Without gradients, as before the first step or after ``zero_grad``, there are none.

    Returns
    -------
    list
        Of ``(label, weight, gradient, learning rate)``, at most `MOST_WEIGHTS`, in the model's order; the label such as
        ``"layers.0.mlp.weight[3, 17]"``. The learning rate is that of the optimizer given to the session; 0.01 without one.
    """
    model = loop.model
    if model is None:
        return []
    groups = [group for optimizer in loop.optimizers for group in optimizer.param_groups]
    rates = {id(parameter): float(group["lr"]) for group in groups for parameter in group["params"]}
    samples: list[tuple[str, float, float, float]] = []
    for name, parameter in nn.Module.named_parameters(model):
        if len(samples) == MOST_WEIGHTS:
            break
        sample = _middle(parameter)
        if sample is not None:
            place, weight, gradient = sample
            samples.append((f"{name}{place}", weight, gradient, rates.get(id(parameter), DEFAULT_RATE)))
    return samples


DEFAULT_RATE = 0.01


def _middle(parameter: nn.Parameter) -> tuple[str, float, float] | None:
    gradient = parameter.grad
    if gradient is None or gradient.is_sparse or not gradient.numel() or not gradient.is_floating_point():
        return None
    flat = gradient.detach().flatten().float()
    finite = torch.where(torch.isfinite(flat) & (flat != 0), flat.abs(), torch.nan)
    if bool(torch.isnan(finite).all()):
        return None
    at = int(torch.nanmedian(finite, dim=0).indices)
    place = [int(index) for index in torch.unravel_index(torch.tensor(at), gradient.shape)]
    weight = float(parameter.detach().flatten()[at])
    return f"[{', '.join(map(str, place))}]" if place else "", weight, float(flat[at])
