"""The text demo: a small GPT on the source text of Python's own standard library, byte by byte."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from amp_widgets.errors import DemoError
from amp_widgets.session import AmpSession

_BYTES = 256


class Block(nn.Module):
    """A pre-norm transformer block; shape (batch, time, width) is kept."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]  # a Tensor


class TextGPT(nn.Module):
    """(batch, time) bytes → (batch, time, 256) logits of the next byte."""

    def __init__(self, width: int = 128, depth: int = 6, heads: int = 4, context: int = 128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_BYTES, width)
        self.positions = nn.Embedding(context, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _BYTES, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class TextWindows:
    """Random windows of a text: (batch, time) bytes and the same shifted by one, `steps` batches an epoch."""

    def __init__(self, text: torch.Tensor, *, context: int, batch_size: int, steps: int, seed: int = 0) -> None:
        self._text = text
        self._context = context
        self._batch_size = batch_size
        self._steps = steps
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        offsets = torch.arange(self._context)
        for _ in range(self._steps):
            starts = torch.randint(len(self._text) - self._context - 1, (self._batch_size, 1), generator=self._generator)
            yield self._text[starts + offsets].long(), self._text[starts + offsets + 1].long()


def standard_library_text(limit_bytes: int = 2_000_000) -> torch.Tensor:
    """The source of Python's standard library, file after file by name: uint8, at most `limit_bytes` long.

    Raises
    ------
    DemoError
        When this Python carries no source files.
    """
    parts: list[bytes] = []
    size = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= limit_bytes:
            break
    if size < 100_000:
        raise DemoError(
            f"demo text: got {size} bytes of standard library source, expected some 100,000; this Python was installed without it"
        )
    return torch.frombuffer(bytearray(b"".join(parts)[:limit_bytes]), dtype=torch.uint8)


def next_byte_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats; logits (batch, time, 256), targets (batch, time)."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def text_session(*, batch_size: int = 16, context: int = 128, seed: int = 0, device: str | None = None) -> AmpSession:
    """A prepared session; on a GPU where there is one."""
    text = standard_library_text()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = TextGPT(context=context)
    model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    session = AmpSession(model, optimizer)
    session.fit(
        TextWindows(text, context=context, batch_size=batch_size, steps=500, seed=seed), next_byte_loss, None, start=False
    )
    return session
