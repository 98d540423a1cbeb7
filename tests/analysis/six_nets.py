"""Six small nets of different kinds, each with optimizers, a batch and a loss function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations


class Bench(NamedTuple):
    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    batch: tuple[Any, Any]
    loss_fn: Callable[[Any, Any], Tensor]


def mlp() -> Bench:
    """Peaks in the optimizer's step."""
    inner = nn.Sequential(nn.Linear(48, 48), nn.GELU(), nn.Dropout(0.1))
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(inplace=True), inner, nn.Linear(48, 10))
    return Bench(model, [torch.optim.Adam(model.parameters())], (torch.randn(16, 32), torch.randint(10, (16,))), F.cross_entropy)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.more = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels, momentum=None))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.relu(self.more(self.relu(self.norm(self.conv(x)))) + x)
        return y


def resnet() -> Bench:
    """BatchNorm, also with an average of all batches, in-place activations; a loss with weights of its own."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), Residual(8), nn.MaxPool2d(2), Residual(8),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
    ).to(memory_format=torch.channels_last)  # fmt: skip
    images = torch.randn(4, 3, 12, 12).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    loss_fn = nn.CrossEntropyLoss(weight=torch.rand(10), label_smoothing=0.1)
    return Bench(model, [optimizer], (images, torch.randint(10, (4,))), loss_fn)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.drop(self.out(y))
        return x + self.drop(self.mlp(x))


class Gpt(nn.Module):
    def __init__(self, words: int = 30, width: int = 32, length: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def gpt() -> Bench:
    """Tied weights, attention, a fused optimizer with groups."""
    model = Gpt()
    plain = [p for p in model.parameters() if p.ndim < 2]
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": plain}], fused=True)

    def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return Bench(model, [optimizer], (torch.randint(30, (4, 16)), torch.randint(30, (4, 16))), loss_fn)


def encoder() -> Bench:
    """torch's own transformer; a loss that is a mean."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 5))
    return Bench(
        model, [torch.optim.Adam(model.parameters(), foreach=True)], (torch.randn(4, 9, 8), torch.randn(4, 9, 5)), F.mse_loss
    )


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.Flatten(), nn.Linear(256, 16))
        self.text = nn.Sequential(nn.Linear(10, 16), nn.Tanh())
        self.shared = nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.out = nn.Linear(32, 3)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        image, text = self.frozen(self.shared(self.image(batch["image"]))), self.shared(self.text(batch["text"]))
        return {"logits": self.out(torch.cat([image, text], 1))}


def two_inputs() -> Bench:
    """A dict goes in and comes out, a layer is used twice, one is frozen; two optimizers; a loss with a closure."""
    model = TwoInputs()
    trained = [p for p in model.parameters() if p.requires_grad]
    weights = torch.rand(3)
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(trained[:4], lr=0.1), torch.optim.RMSprop(trained[4:])]
    batch = {"image": torch.randn(5, 1, 8, 8), "text": torch.randn(5, 10)}
    return Bench(
        model, optimizers, (batch, torch.randint(3, (5,))), lambda out, y: F.cross_entropy(out["logits"], y, weight=weights)
    )


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.InstanceNorm2d(8, affine=True), nn.LeakyReLU())
        self.pool = nn.AvgPool2d(2)
        self.middle = nn.Sequential(parametrizations.weight_norm(nn.Conv2d(8, 8, 3, padding=1)), nn.ReLU())
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.smooth = nn.Upsample(scale_factor=2, mode="bilinear")
        self.out = nn.Conv2d(24, 2, 1)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        x = self.down(torch.cat(pair, 1))
        y = self.middle(self.pool(x))
        out: Tensor = self.out(torch.cat([x, self.up(y), self.smooth(y)], 1))
        return out


def unet() -> Bench:
    """A tuple goes in; a parametrization, transposed convolutions, a loss of two parts."""
    model = UNet()
    pair = (torch.randn(3, 1, 8, 8), torch.randn(3, 1, 8, 8))

    def loss_fn(out: Tensor, target: Tensor) -> Tensor:
        return F.smooth_l1_loss(out, target) + 0.1 * (1 - torch.sigmoid(out)).square().mean()

    return Bench(model, [torch.optim.Adagrad(model.parameters())], (pair, torch.randn(3, 2, 8, 8)), loss_fn)


NETS: dict[str, Callable[[], Bench]] = {
    "mlp": mlp, "resnet": resnet, "gpt": gpt, "encoder": encoder, "two_inputs": two_inputs, "unet": unet,
}  # fmt: skip


class Recurrent(nn.Module):
    """What torch's fake tensors do not know the memory of on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 16, batch_first=True)
        self.head = nn.Linear(16, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(self.embedding(tokens))[0][:, -1])
        return out


def recurrent() -> Bench:
    model = Recurrent()
    return Bench(
        model, [torch.optim.Adam(model.parameters())], (torch.randint(20, (6, 7)), torch.randint(20, (6,))), F.cross_entropy
    )
