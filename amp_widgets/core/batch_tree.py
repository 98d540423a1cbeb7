"""The tensors in a batch: in lists, tuples, dicts, what else torch's pytrees know, and other mappings, as tokenizers give."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils import _pytree as pytree


def batch_leaves(batch: Any) -> list[Any]:
    """All that is no container, in order.

    Parameters
    ----------
    batch
        Or a part of one.
    """
    leaves: list[Any] = pytree.tree_leaves(batch)
    if not any(isinstance(leaf, Mapping) for leaf in leaves):
        return leaves
    return [inner for leaf in leaves for inner in (batch_leaves(dict(leaf)) if isinstance(leaf, Mapping) else [leaf])]


def map_batch(function: Callable[[Any], Any], batch: Any) -> Any:
    """A batch of the same form with what a function gives for each of its leaves, in their order.

    Parameters
    ----------
    function
        Called with one leaf.
    batch
        Or a part of one; it is left as it is.
    """

    def mapped(leaf: Any) -> Any:
        if isinstance(leaf, Mapping):
            return mapping_like(leaf, map_batch(function, dict(leaf)))
        return function(leaf)

    return pytree.tree_map(mapped, batch)


def batch_form(batch: Any) -> str:
    """Its containers and their keys: equal for batches that differ in their leaves alone.

    Parameters
    ----------
    batch
        Or a part of one.
    """

    def form(leaf: Any) -> str:
        return str((type(leaf), batch_form(dict(leaf)))) if isinstance(leaf, Mapping) else "*"

    return str((pytree.tree_structure(batch), *map(form, pytree.tree_leaves(batch))))


def first_dimension(leaves: Iterable[Any]) -> int | None:
    """How long the first tensor or array in a batch that has a dimension is in the first one: the batch size.

    Parameters
    ----------
    leaves
        Of the batch.
    """
    return next((len(leaf) for leaf in leaves if isinstance(leaf, (Tensor, np.ndarray)) and leaf.ndim > 0), None)


def is_batched(leaf: Any, length: int | None) -> bool:
    """Whether a tensor or array in a batch has its first dimension over the examples.

    Parameters
    ----------
    leaf
        Of the batch.
    length
        The batch size.
    """
    return isinstance(leaf, (Tensor, np.ndarray)) and leaf.ndim > 0 and len(leaf) == length


def mapping_like(like: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    """A mapping of the same type with other items.

    Parameters
    ----------
    like
        Left as it is.
    items
        What it is to hold.
    """
    make: Any = type(like)
    try:
        made: Mapping[Any, Any] = make(items)
    except TypeError:  # made from something else, as a defaultdict is
        if not isinstance(like, dict):
            return items
        copied = copy.copy(like)
        copied.update(items)
        return copied
    return made
