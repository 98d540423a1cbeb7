"""The digits demo: a small residual convolutional network on scikit-learn's handwritten digits."""

from __future__ import annotations

import torch
from torch import nn

from amp_widgets.demos.batches import ShuffledBatches
from amp_widgets.errors import MissingExtraError
from amp_widgets.session import AmpSession


class Conv3x3(nn.Module):
    """A 3x3 convolution written as a matrix product: (batch, inputs, height, width) → (batch, outputs, height, width).

    ``nn.Conv2d`` would do, but for fp16 on a CPU torch computes its gradient some hundred times slower than for fp32, and a
    classroom of laptops would wait for every step.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(9 * inputs, outputs))
        nn.init.normal_(self.weight, std=(2 / (9 * inputs)) ** 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, _, height, width = x.shape
        patches = nn.functional.unfold(x, 3, padding=1).transpose(1, 2).flatten(0, 1)
        return (patches @ self.weight).view(batch, height * width, -1).transpose(1, 2).reshape(batch, -1, height, width)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with batch norm around a skip connection; shape (batch, channels, height, width) is kept."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            Conv3x3(channels, channels),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Dropout2d(0.05),
            Conv3x3(channels, channels),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.body(x))


class DigitsNet(nn.Module):
    """(batch, 1, 8, 8) images → (batch, 10) logits."""

    def __init__(self, channels: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(Conv3x3(1, channels), nn.ReLU())
        self.layers = nn.ModuleList(ResidualBlock(channels) for _ in range(depth))
        self.head = nn.Linear(channels, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


def digits_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Images (1797, 1, 8, 8) from 0 to 1, and labels (1797,).

    Raises
    ------
    MissingExtraError
        When scikit-learn, whose package carries the data, is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingExtraError(f"demo: {error}; install the data with: pip install 'amp-widgets[demos]'") from error
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(digits.target, dtype=torch.int64)


def digits_session(*, batch_size: int = 64, seed: int = 0, device: str | None = None) -> AmpSession:
    """A prepared session; on a GPU where there is one."""
    images, labels = digits_data()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = DigitsNet()
    model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    session = AmpSession(model, optimizer)
    session.fit(ShuffledBatches(images, labels, batch_size=batch_size, seed=seed), nn.functional.cross_entropy, None, start=False)
    return session
