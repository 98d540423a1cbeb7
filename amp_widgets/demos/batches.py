"""Shuffled batches of tensors that fit in memory, in an order of their own."""

from __future__ import annotations

from collections.abc import Iterator

import torch


class ShuffledBatches:
    """Goes through paired tensors in a new order each epoch; the global random state is left alone.

    Parameters
    ----------
    inputs, targets
        Same length in dimension 0.
    batch_size
        Samples a batch; an incomplete last batch is left out.
    seed
        The order follows from it alone.
    """

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor, *, batch_size: int, seed: int = 0) -> None:
        self._inputs = inputs
        self._targets = targets
        self._batch_size = batch_size
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self._inputs) // self._batch_size

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order = torch.randperm(len(self._inputs), generator=self._generator)
        for i in range(len(self)):
            picked = order[i * self._batch_size : (i + 1) * self._batch_size]
            yield self._inputs[picked], self._targets[picked]
