"""Operators of which CUDA makes other tensors than a CPU does: what those of fake tensors on a CPU make in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from amp_widgets.analysis.operator_overrides import Kernel, Kernels, OperatorOverrides, has_kernel


def cuda_operators() -> OperatorOverrides:
    """A context manager: inside, and in this thread, some operators of *fake* tensors on the CPU make the tensors that CUDA's do.

    They are those of which the difference is large: dropout, whose mask has one byte an element on CUDA; attention, which does
    not hold the matrix of all pairs on CUDA, also with dropout; and softmax from float16 to float32, for which CUDA makes no
    copy of its input. An LSTM is taken step by step, as GRUs are: what the CPU's library, or cuDNN, keeps of it for the backward
    pass is not known. Tensors that are not fake are computed as ever.

    Notes
    -----
    Of ``scaled_dot_product_attention`` it is assumed that the device has a fused kernel, as it has from Ampere on: the one of
    FlashAttention or the memory-efficient one, where they are not switched off in ``torch.backends.cuda``. What stands for them
    is the CPU's fused kernel, which saves the same: inputs, output, and a float32 logarithm for each row.
    """
    return _OPERATORS


def _find_kernels() -> Iterator[tuple[Any, tuple[Kernel, Kernel]]]:
    for (name, overload_name), as_on_cuda in _AS_ON_CUDA.items():
        overload = getattr(getattr(torch.ops.aten, name), overload_name)
        if has_kernel(overload, "CompositeImplicitAutograd"):  # else another torch, with one of its own for each device
            yield overload, (_for_fakes(overload, as_on_cuda), _decomposing(overload))


def _for_fakes(op: Any, as_on_cuda: Callable[..., Any]) -> Kernel:
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(args[0], FakeTensor) and args[0].device.type == "cpu":
            result = as_on_cuda(*args, **kwargs)
            if result is not None:
                return result
        return _decompose(op, args, kwargs)

    return kernel


def _decomposing(op: Any) -> Kernel:
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return _decompose(op, args, kwargs)

    return kernel


def _decompose(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What torch does with an operator that has no kernel of its own; its ``decompose`` may take another way, in Python."""
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


# ---- as on CUDA; None where it is as on a CPU -----------------------------------------------------------------------


def _dropout(tensor: Any, p: float, train: bool) -> Any:
    """As ``at::dropout`` in ``aten/src/ATen/native/Dropout.cpp``."""
    if not train or not 0.0 < p < 1.0 or not tensor.numel():
        return None
    return torch.ops.aten.native_dropout(tensor, p, True)[0]


def _softmax(tensor: Any, dim: int, dtype: torch.dtype | None = None) -> Any:
    """As ``at::softmax`` in ``aten/src/ATen/native/SoftMax.cpp``."""
    fused = tensor.dtype == torch.float16 and dtype == torch.float32
    return torch.ops.aten._softmax(tensor, dim, True) if fused else None


def _log_softmax(tensor: Any, dim: int, dtype: torch.dtype | None = None) -> Any:
    """As ``at::log_softmax`` in ``aten/src/ATen/native/SoftMax.cpp``."""
    fused = tensor.dtype == torch.float16 and dtype == torch.float32
    return torch.ops.aten._log_softmax(tensor, dim, True) if fused else None


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """As the fused kernels of ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``, where they take such inputs."""
    tensors = (query, key, value)
    fused = (
        (torch.backends.cuda.flash_sdp_enabled() or torch.backends.cuda.mem_efficient_sdp_enabled())
        and all(tensor.dim() == 4 and tensor.dtype == query.dtype and tensor.numel() for tensor in tensors)
        and query.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and query.shape[:2] == key.shape[:2] == value.shape[:2]
        and query.shape[-1] == key.shape[-1] == value.shape[-1] <= _MOST_HEAD_DIMENSIONS
        and (attn_mask is None or not (is_causal or attn_mask.requires_grad or attn_mask.dim() not in (2, 4)))
    )
    if not fused:
        return None
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # as torch does it on every device
        zeros = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = zeros.masked_fill_(attn_mask.logical_not(), float("-inf"))
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return attend(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]


def _lstm(*args: Any, **kwargs: Any) -> Any:
    """As ``lstm`` in ``aten/src/ATen/native/RNN.cpp`` where no library does it."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # of the process, but for no longer than it takes to make some tensors without numbers
    try:
        return _decompose(torch.ops.aten.lstm.input, args, kwargs)
    finally:
        torch._C._set_mkldnn_enabled(enabled)


_MOST_HEAD_DIMENSIONS = 256
_AS_ON_CUDA: dict[tuple[str, str], Callable[..., Any]] = {
    ("dropout", "default"): _dropout,
    ("softmax", "int"): _softmax,
    ("log_softmax", "int"): _log_softmax,
    ("lstm", "input"): _lstm,
    ("scaled_dot_product_attention", "default"): _attention,
}


def _kernels() -> Kernels:
    return dict(_find_kernels())


_OPERATORS = OperatorOverrides("AutogradCPU", _kernels)
