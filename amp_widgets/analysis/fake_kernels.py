"""Operators of which torch's fake tensors know too little: what their kernels make on a real device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from amp_widgets.errors import AmpWidgetsError


class UnfakeableError(AmpWidgetsError):
    """Something that does not run on fake tensors, or not as it would; the message completes "because …"."""


class FakeKernels(TorchDispatchMode):
    """Makes of some operators on fake tensors what they make of real ones, byte for byte; above the mode that fakes.

    Raises
    ------
    UnfakeableError
        At an operator that saves something for the backward pass whose size only the library behind it knows.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No wrapper around ``__torch_dispatch__`` that keeps ``torch.compile`` out: nothing is compiled here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kernel = _KERNELS.get(func)
        if kernel is None:
            return func(*args, **(kwargs or {}))
        return kernel(func, *args, **(kwargs or {}))


def _in_place(func: Any, *args: Any, **kwargs: Any) -> None:
    """A kernel of an optimizer that changes tensors and makes none."""


def _opaque(func: Any, *args: Any, **kwargs: Any) -> Any:
    raise UnfakeableError(f"torch's fake of {func} does not know how much memory it takes")


def _norm(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Statistics of an input in fp16 or bf16 are in fp32, if parameters are: see ``is_mixed_type`` in ATen/native/cpu."""
    out = func(*args, **kwargs)
    return (out[0], *(_in(torch.float32, each) for each in out[1:])) if _is_mixed(*args) else out


def _group_norm_backward(func: Any, *args: Any, **kwargs: Any) -> Any:
    return _norm_backward(func(*args, **kwargs), args[1], args[4])


def _layer_norm_backward(func: Any, *args: Any, **kwargs: Any) -> Any:
    return _norm_backward(func(*args, **kwargs), args[1], args[5])


def _norm_backward(gradients: Any, tensor: Tensor, weight: Tensor | None) -> Any:
    """Gradients have the formats of the input and of the parameters."""
    of_input, *of_parameters = gradients
    dtype = tensor.dtype if weight is None else weight.dtype
    return _in(tensor.dtype, of_input), *(_in(dtype, each) for each in of_parameters)


def _loss(func: Any, *args: Any, **kwargs: Any) -> Any:
    """One number in the memory of all differences: its kernel makes room for these first, as in ``TORCH_META_FUNC(mse_loss)``."""
    loss = func(*args, **kwargs)
    reduction = args[2] if len(args) > 2 else kwargs.get("reduction", _MEAN)
    if reduction == _NONE:
        return loss
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    return torch.empty(shape, dtype=loss.dtype, device=loss.device).as_strided((), ())


_NONE, _MEAN = 0, 1


def _is_mixed(tensor: Tensor, *others: Any) -> bool:
    in_half = tensor.dtype in (torch.float16, torch.bfloat16)
    return in_half and any(isinstance(other, Tensor) and other.dtype == torch.float32 for other in others)


def _in(dtype: torch.dtype, tensor: Tensor | None) -> Tensor | None:
    return tensor if tensor is None or tensor.dtype == dtype else torch.empty_like(tensor, dtype=dtype)


def _find_kernels() -> Iterator[tuple[Any, Callable[..., Any]]]:
    for name, kernel in _BY_NAME.items():
        overloads = getattr(torch.ops.aten, name, None)
        if overloads is not None and "default" in overloads.overloads():
            yield overloads.default, kernel


_BY_NAME: dict[str, Callable[..., Any]] = {
    "_fused_sgd_": _in_place,
    "_fused_adagrad_": _in_place,
    "mkldnn_rnn_layer": _opaque,
    "native_batch_norm": _norm,
    "native_group_norm": _norm,
    "native_group_norm_backward": _group_norm_backward,
    "native_layer_norm": _norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "mse_loss": _loss,
    "smooth_l1_loss": _loss,
}
_KERNELS = dict(_find_kernels())
