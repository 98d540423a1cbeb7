"""Which list of autocast an operator is on, which is not the same on every device."""

from __future__ import annotations

import functools
from typing import Literal

import torch
from torch import nn

from amp_widgets.core.layers import inner_model

AutocastList = Literal["lower", "fp32", "promote"]


def autocast_list(operator: str, device_type: str) -> AutocastList | None:
    """The list that torch's autocast has an operator on; None where it leaves the operator as it is.

    Parameters
    ----------
    operator
        As it is called in Python, such as ``"linear"``, ``"softmax"`` or ``"__matmul__"``; or as torch's dispatcher has it.
    device_type
        ``"cpu"`` and ``"cuda"`` are known; the lists differ.

    Notes
    -----
    The names are those of ``aten/src/ATen/autocast_mode.{h,cpp}`` in torch 2.13. Whether the torch that runs has autocast for
    an operator at all is asked of its dispatcher; an operator that it has dropped is on no list.
    """
    name = _plain(operator)
    found = LISTS.get(device_type, {}).get(name)
    return found if found is not None and _has_kernel(name, device_type) else None


def knows(device_type: str) -> bool:
    """Whether the lists of a device are known here."""
    return device_type in LISTS


def is_left_alone(format: str) -> bool:
    """Whether autocast casts no tensor of this format, whatever list the operator is on; as in ``"fp64"`` or ``"complex64"``.

    ``is_eligible`` and ``is_autocast_eligible`` in ``aten/src/ATen/autocast_mode.h``.
    """
    return format == "fp64" or format.startswith("complex")


def left_alone_text(model: nn.Module) -> list[str]:
    """A sentence on the parameters that autocast leaves alone because of their format; none where there are none."""
    formats: dict[str, list[str]] = {}
    total = 0
    for name, parameter in inner_model(model).named_parameters():
        total += 1
        format = format_name(parameter.dtype)
        if is_left_alone(format):
            formats.setdefault(format, []).append(name)
    found = [name for names in formats.values() for name in names]
    if not found:
        return []
    which = "All parameters" if len(found) == total else f"{len(found)} of {total} parameters, {found[0]} the first,"
    named = " and ".join(formats)
    return [f"{which} are {named}, which autocast leaves alone: with and without it, what they are used in is not cast."]


def format_name(dtype: torch.dtype) -> str:
    """``"fp32"``, ``"fp16"``, ``"bf16"``, ``"fp64"``, or torch's name of another.

    >>> format_name(torch.float64), format_name(torch.complex64)
    ('fp64', 'complex64')
    """
    return _FORMATS.get(dtype, str(dtype).removeprefix("torch."))


def is_cast_in_code(operator: str) -> bool:
    """Whether it is a conversion that somebody wrote down, not one that autocast put in."""
    return _plain(operator) in _CASTS


def _plain(operator: str) -> str:
    name = operator.removeprefix("aten::")
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        if name in _REFLECTED:
            return _REFLECTED[name]
        if name[:1] in ("i", "r") and name[1:] in _ARITHMETIC:
            return name[1:]
    return name.split(".", maxsplit=1)[0]


@functools.cache
def _has_kernel(name: str, device_type: str) -> bool:
    overloads = getattr(torch.ops.aten, name, None)
    if overloads is None:
        return False
    key = f"Autocast{device_type.upper()}"
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = (f"aten::{name}" if overload == "default" else f"aten::{name}.{overload}" for overload in overloads.overloads())
    return any(has(overload, key) for overload in names)


_FORMATS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}
_ARITHMETIC = ("add", "sub", "mul", "matmul", "pow", "truediv", "floordiv", "mod")
_REFLECTED = {"rdiv": "div", "rpow": "pow", "truediv": "div", "rtruediv": "div", "itruediv": "div"}
_CASTS = {"to", "float", "half", "bfloat16", "double", "type", "type_as"}

_CPU: dict[AutocastList, str] = {
    "lower": """
        conv1d conv2d conv3d _convolution conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d prelu
        bmm mm addmm _addmm_activation addbmm baddbmm linear matmul linalg_vecdot scaled_dot_product_attention
        mkldnn_rnn_layer _native_multi_head_attention
    """,
    "fp32": """
        avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d max_pool3d fractional_max_pool2d fractional_max_pool3d
        max_unpool2d max_unpool3d reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d
        grid_sampler grid_sampler_2d grid_sampler_3d _grid_sampler_2d_cpu_fallback
        binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy_loss ctc_loss
        hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss
        multilabel_margin_loss multilabel_margin_loss_forward nll_loss nll_loss2d poisson_nll_loss smooth_l1_loss
        soft_margin_loss triplet_margin_loss
        cdist polar prod quantile nanquantile trace view_as_complex fake_quantize_per_tensor_affine stft
        fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2 fft_irfftn
        fft_rfft fft_rfft2 fft_rfftn
        cholesky cholesky_inverse cholesky_solve geqrf inverse lu_solve orgqr ormqr pinverse qr svd triangular_solve
        _lu_with_info linalg_cholesky linalg_cholesky_ex linalg_cond linalg_eig linalg_eigh linalg_eigvals
        linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq linalg_matrix_rank linalg_qr
        linalg_solve linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve
    """,
    "promote": "cat stack index_copy",
}
_CUDA: dict[AutocastList, str] = {
    "lower": """
        _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution prelu
        addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
        _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
        _scaled_dot_product_flash_attention scaled_dot_product_attention cudnn_convolution cudnn_convolution_transpose
    """,
    "fp32": """
        acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm
        native_layer_norm rms_norm group_norm frobenius_norm nuclear_norm cosine_similarity poisson_nll_loss
        cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss
        margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
        binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
        upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
        _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
        upsample_bicubic2d _upsample_bicubic2d_aa
        prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum norm
    """,
    "promote": "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add",
}


def _by_operator(lists: dict[AutocastList, str]) -> dict[str, AutocastList]:
    return {name: which for which, names in lists.items() for name in names.split()}


LISTS: dict[str, dict[str, AutocastList]] = {"cpu": _by_operator(_CPU), "cuda": _by_operator(_CUDA)}
"""Device type → operator → the list that it is on."""
