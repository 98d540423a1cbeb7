"""Numbers of some fake tensors: of square matrices such as masks, into which torch looks to see whether they are causal."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

MOST_NUMBERS = 1 << 22
"""Of a matrix whose numbers are followed: a mask of 2048 positions."""


class KnownNumbers:
    """The numbers that some fake tensors would have.

    Known are those of square matrices that stand for the user's, such as a mask in the batch or in a buffer, and of those that a
    few functions make of them or of plain numbers, as masks are made in a forward pass. They are worked out beside the fakes,
    on the CPU. What is changed in a way that is not followed is not known any more.
    """

    def __init__(self) -> None:
        self._known: MutableMapping[Tensor, tuple[int, Tensor | TensorWeakRef]] = WeakIdKeyDictionary()

    def note(self, fake: Tensor, real: Tensor) -> None:
        """Let `fake` have the numbers of `real`, which is not kept alive; where they are worth it."""
        if _is_square(real) and not real.requires_grad and real.layout == torch.strided:
            self._known[fake] = fake._version, TensorWeakRef(real)

    def of(self, fake: Tensor) -> Tensor | None:
        """Its numbers, on any device; None where they are not known."""
        version, numbers = self._known.get(fake, (-1, None))
        if numbers is None or version != fake._version:
            return None
        return numbers() if isinstance(numbers, TensorWeakRef) else numbers

    def call(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a function of torch with fakes, and follow the numbers."""
        if function is Tensor.__bool__:
            known = self.of(args[0])
            return function(*args, **kwargs) if known is None else _beside(bool, known)
        if function not in _FOLLOWED:
            return function(*args, **kwargs)
        given = self._given(function, args, kwargs)  # before one of them is changed in place
        result = function(*args, **kwargs)
        if given is not None and (_is_square(result) or (function in _REDUCTIONS and result.numel() == 1)):
            self._known[result] = result._version, _beside(_worked_out, function, *given, result)
        return result

    def _given(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any] | None:
        """The arguments with numbers in place of fakes; None where those of one are not known."""
        if function in _LIKE:
            args = args[1:]  # of the first, the shape
        elif function in _CASTS:
            args, kwargs = args[:1], {}
        others = {name: value for name, value in kwargs.items() if name not in _OF_THE_RESULT}
        leaves, spec = pytree.tree_flatten((args, others))
        known = [self.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if any(isinstance(leaf, Tensor) and numbers is None for leaf, numbers in zip(leaves, known, strict=True)):
            return None
        given: tuple[Any, Any] = pytree.tree_unflatten(known, spec)
        return given


def _is_square(tensor: Any) -> bool:
    if not isinstance(tensor, Tensor) or tensor.dim() != 2:
        return False
    return tensor.shape[0] == tensor.shape[1] and tensor.numel() <= MOST_NUMBERS


def _beside(call: Any, *args: Any) -> Any:
    """Call it on real tensors, unseen by all that follows the step."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        return call(*args)


def _worked_out(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Tensor:
    args, kwargs = pytree.tree_map_only(Tensor, Tensor.cpu, (args, kwargs))
    if function in _LIKE:
        made: Any = _LIKE[function](tuple(result.shape), *args, **kwargs)
    elif function in _CASTS:
        made = args[0].clone()
    else:
        made = _NOT_IN_PLACE.get(function, function)(*args, **kwargs)
    return torch.as_tensor(made).to(result.dtype)


_LIKE: Mapping[Any, Any] = {torch.zeros_like: torch.zeros, torch.ones_like: torch.ones, torch.full_like: torch.full}
_CASTS = frozenset((Tensor.to, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.bool, Tensor.type_as, Tensor.cuda, Tensor.cpu,
                    Tensor.clone, Tensor.detach, Tensor.contiguous))  # fmt: skip
_REDUCTIONS = frozenset((Tensor.all, Tensor.any, torch.all, torch.any))
_NOT_IN_PLACE = {Tensor.masked_fill_: Tensor.masked_fill, Tensor.triu_: Tensor.triu, Tensor.tril_: Tensor.tril}
_TURNED: tuple[Any, ...] = tuple(getattr(Tensor, name).__get__ for name in ("T", "mT"))
_FOLLOWED = frozenset((
    *_LIKE, *_CASTS, *_REDUCTIONS, *_NOT_IN_PLACE, torch.full, torch.ones, torch.zeros, torch.eye, torch.triu, torch.tril,
    torch.masked_fill, Tensor.masked_fill, Tensor.triu, Tensor.tril, Tensor.__getitem__, Tensor.t, torch.t, Tensor.transpose,
    torch.transpose, *_TURNED, Tensor.eq, Tensor.ne, Tensor.lt, Tensor.le, Tensor.gt, Tensor.ge,
    Tensor.__eq__, Tensor.__ne__, Tensor.logical_not, torch.logical_not, Tensor.__invert__, Tensor.bitwise_not, torch.bitwise_not,
))  # fmt: skip
_OF_THE_RESULT = frozenset(("dtype", "device", "layout", "pin_memory", "requires_grad", "memory_format"))
"""Arguments that change no number, or are seen in the result."""
