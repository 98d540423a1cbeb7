"""The overflow demo: handwritten digits as bags of pixels, summed up, so that one layer's gradient is too large for FP16."""

from __future__ import annotations

import torch
from torch import nn

from amp_widgets.demos.batches import ShuffledBatches
from amp_widgets.demos.digits import digits_data
from amp_widgets.session import AmpSession


class BagOfPixels(nn.Module):
    """(batch, 64) pixels → (batch, 10) logits: each pixel is looked at by itself, and what was seen is summed up.

    A sum, as over the nodes of a graph, is larger than a mean by the number of its parts, and so is the gradient of the weight
    that it meets: `readout`.
    """

    def __init__(self, width: int = 32, depth: int = 1) -> None:
        super().__init__()
        self.ink = nn.Linear(1, width)
        self.places = nn.Parameter(torch.randn(64, width))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width, bias=False), nn.Sigmoid()) for _ in range(depth))
        self.readout = nn.Linear(width, 10)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.ink(pixels.unsqueeze(2)) * self.places)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.readout(x.sum(dim=1))
        return logits


def overflow_session(*, batch_size: int = 64, seed: int = 0, device: str | None = None) -> AmpSession:
    """A prepared session that begins in fp16, at the usual loss scale of 2^16; on a GPU where there is one.

    Its first steps are skipped, one after the other, and all for one layer: the loss, the outputs and all other gradients are
    finite, but in the gradient of ``readout.weight`` are numbers of 30, which are above 65504 at a scale of more than 2^11. The
    scale is halved until they fit, and then it trains. Without a skip it does so from the beginning with that one layer kept in
    FP32, with a mean instead of the sum, or with an initial scale of 2^10.
    """
    images, labels = digits_data()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = BagOfPixels()
    model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    session = AmpSession(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    session.request(autocast="fp16", source="demo")
    batches = ShuffledBatches(images.flatten(1), labels, batch_size=batch_size, seed=seed)
    session.fit(batches, nn.functional.cross_entropy, None, start=False)
    return session
