"""The underflow demo: a small heat-map network on handwritten digits whose gradients are too small for FP16."""

from __future__ import annotations

import torch
from torch import nn

from amp_widgets.demos.batches import ShuffledBatches
from amp_widgets.demos.digits import digits_data
from amp_widgets.session import AmpSession

_NOISE = 0.25
_COPIES = 4


class HeatMapNet(nn.Module):
    """(batch, 64) noisy pixels → (batch, 64) shares of the ink, which sum to one over the pixels.

    A softmax over places and the mean squared error to a map is how networks learn to say where something is: joints in a
    picture of a person, for example.
    """

    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(64, width), nn.Tanh())
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth - 1))
        self.head = nn.Linear(width, 64)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.stem(pixels)
        for layer in self.layers:
            x = layer(x)
        return torch.softmax(self.head(x), dim=1)


def heat_maps(*, copies: int = _COPIES, noise: float = _NOISE, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy digits (1797 * `copies`, 64), and of each the share of its ink in every pixel, of the same shape.

    Parameters
    ----------
    copies
        Of each digit, with noise of its own.
    noise
        Its standard deviation; ink goes from 0 to 1.
    seed
        The noise follows from it alone.

    Raises
    ------
    MissingExtraError
        When scikit-learn, whose package carries the data, is not installed.
    """
    pixels = digits_data()[0].flatten(1).repeat(copies, 1)
    generator = torch.Generator().manual_seed(seed)
    return pixels + noise * torch.randn(pixels.shape, generator=generator), pixels / pixels.sum(dim=1, keepdim=True)


def underflow_session(*, batch_size: int = 1024, seed: int = 0, device: str | None = None) -> AmpSession:
    """A prepared session that begins in fp16, with the loss scaled, and samples every tenth step; on a GPU where there is one.

    No factor makes its gradients small: they are those of a mean over 1024 x 64 numbers of which each is a 64th or so. An error
    of 2^-7, doubled and divided by 2^16, is 2^-22, and what the softmax hands on to its inputs is a 64th of that again, 2^-28:
    fp16 makes zero of what is not above 2^-25. In fp32, in bf16, or at a loss scale of 2^16, it trains well.

    Notes
    -----
    Adam divides a gradient by its own size, so that small gradients do no harm as long as they are there: it trains in fp32
    without further ado. Here what vanishes is exactly zero, and zero divided by its size is zero still: the weights stand. SGD
    would show the same at a learning rate of 1000, which nobody would believe.
    """
    inputs, maps = heat_maps(seed=seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = HeatMapNet()
    model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    session = AmpSession(model, torch.optim.Adam(model.parameters(), lr=3e-3))
    session.request(autocast="fp16", source="demo")
    session.count_gradients(every=10)
    session.fit(ShuffledBatches(inputs, maps, batch_size=batch_size, seed=seed), nn.functional.mse_loss, None, start=False)
    return session
