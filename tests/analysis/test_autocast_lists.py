"""The table of autocast's lists, against what this torch really does and what its own headers say."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from amp_widgets.analysis.autocast_lists import LISTS, autocast_list, is_cast_in_code

aten = torch.ops.aten


class Casts(TorchDispatchMode):
    """The formats that floating-point tensors were cast to."""

    def __init__(self) -> None:
        super().__init__()
        self.to: set[torch.dtype] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = op(*args, **(kwargs or {}))
        if op is aten._to_copy.default and args[0].is_floating_point() and output.dtype != args[0].dtype:
            self.to.add(output.dtype)
        return output


def casts(run: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> set[torch.dtype]:
    """Made by autocast for an operator; that it fails afterwards, or below, does not matter."""
    torch.clear_autocast_cache()
    with torch.autocast("cpu", dtype=torch.bfloat16), Casts() as seen:
        try:
            run(*inputs)
        except (RuntimeError, NotImplementedError):  # as there is no kernel for a format or a device
            if not seen.to:
                raise
    return seen.to


def t(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


def spd(n: int = 3) -> torch.Tensor:
    return t(n, n) @ t(n, n).T + 3 * torch.eye(n)


ONE, SIX, IMAGE, VOLUME = t(4), t(6), t(1, 2, 4, 4), t(1, 2, 4, 4, 4)
LABELS = torch.tensor([0, 1, 2])

OPERATORS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    # a function of the floating-point inputs alone, and these
    "conv1d": (aten.conv1d, (t(1, 2, 5), t(3, 2, 3))),
    "conv2d": (aten.conv2d, (IMAGE, t(3, 2, 3, 3))),
    "conv3d": (aten.conv3d, (VOLUME, t(3, 2, 3, 3, 3))),
    "_convolution": (
        lambda x, w: aten._convolution.deprecated(x, w, None, [1], [0], [1], False, [0], 1, False, False, False),
        (t(1, 2, 5), t(3, 2, 3)),
    ),
    "conv_tbc": (aten.conv_tbc, (t(5, 1, 2), t(3, 2, 3), t(3))),
    "conv_transpose1d": (aten.conv_transpose1d, (t(1, 2, 5), t(2, 3, 3))),
    "conv_transpose2d": (aten.conv_transpose2d, (IMAGE, t(2, 3, 3, 3))),
    "conv_transpose3d": (aten.conv_transpose3d, (VOLUME, t(2, 3, 3, 3, 3))),
    "prelu": (aten.prelu, (t(2, 3), t(1))),
    "bmm": (aten.bmm, (t(2, 3, 4), t(2, 4, 5))),
    "mm": (aten.mm, (t(3, 4), t(4, 5))),
    "addmm": (aten.addmm, (t(3, 5), t(3, 4), t(4, 5))),
    "_addmm_activation": (aten._addmm_activation, (t(5), t(3, 4), t(4, 5))),
    "addbmm": (aten.addbmm, (t(3, 5), t(2, 3, 4), t(2, 4, 5))),
    "baddbmm": (aten.baddbmm, (t(2, 3, 5), t(2, 3, 4), t(2, 4, 5))),
    "linear": (aten.linear, (t(3, 4), t(5, 4))),
    "matmul": (aten.matmul, (t(3, 4), t(4, 5))),
    "linalg_vecdot": (aten.linalg_vecdot, (ONE, ONE)),
    "scaled_dot_product_attention": (aten.scaled_dot_product_attention, (t(1, 1, 3, 4), t(1, 1, 3, 4), t(1, 1, 3, 4))),
    "mkldnn_rnn_layer": (
        lambda x, *w: aten.mkldnn_rnn_layer(x, *w, False, [], 2, 4, 1, True, False, False, True),
        (t(3, 1, 4), t(16, 4), t(16, 4), t(16), t(16), t(1, 4), t(1, 4)),
    ),
    "_native_multi_head_attention": (
        lambda x, w, b, pw, pb: aten._native_multi_head_attention(x, x, x, 4, 2, w, b, pw, pb),
        (t(1, 3, 4), t(12, 4), t(12), t(4, 4), t(4)),
    ),
    "avg_pool3d": (lambda x: aten.avg_pool3d(x, [2]), (VOLUME,)),
    "adaptive_avg_pool3d": (lambda x: aten.adaptive_avg_pool3d(x, [2, 2, 2]), (VOLUME,)),
    "adaptive_max_pool3d": (lambda x: aten.adaptive_max_pool3d(x, [2, 2, 2]), (VOLUME,)),
    "max_pool3d": (lambda x: aten.max_pool3d(x, [2]), (VOLUME,)),
    "fractional_max_pool2d": (lambda x, r: aten.fractional_max_pool2d(x, [2, 2], [2, 2], r), (IMAGE, t(1, 2, 2))),
    "fractional_max_pool3d": (lambda x, r: aten.fractional_max_pool3d(x, [2, 2, 2], [2, 2, 2], r), (VOLUME, t(1, 2, 3))),
    "max_unpool2d": (lambda x: aten.max_unpool2d(x, torch.zeros(1, 2, 2, 2, dtype=torch.int64), [4, 4]), (t(1, 2, 2, 2),)),
    "max_unpool3d": (
        lambda x: aten.max_unpool3d(x, torch.zeros(1, 2, 2, 2, 2, dtype=torch.int64), [4, 4, 4], [2, 2, 2], [0, 0, 0]),
        (t(1, 2, 2, 2, 2),),
    ),
    "reflection_pad1d": (lambda x: aten.reflection_pad1d(x, [1, 1]), (t(1, 2, 5),)),
    "reflection_pad2d": (lambda x: aten.reflection_pad2d(x, [1, 1, 1, 1]), (IMAGE,)),
    "replication_pad1d": (lambda x: aten.replication_pad1d(x, [1, 1]), (t(1, 2, 5),)),
    "replication_pad2d": (lambda x: aten.replication_pad2d(x, [1] * 4), (IMAGE,)),
    "replication_pad3d": (lambda x: aten.replication_pad3d(x, [1] * 6), (VOLUME,)),
    "grid_sampler": (lambda x, g: aten.grid_sampler(x, g, 0, 0, False), (IMAGE, t(1, 4, 4, 2))),
    "grid_sampler_2d": (lambda x, g: aten.grid_sampler_2d(x, g, 0, 0, False), (IMAGE, t(1, 4, 4, 2))),
    "grid_sampler_3d": (lambda x, g: aten.grid_sampler_3d(x, g, 0, 0, False), (VOLUME, t(1, 4, 4, 4, 3))),
    "_grid_sampler_2d_cpu_fallback": (
        lambda x, g: aten._grid_sampler_2d_cpu_fallback(x, g, 0, 0, False),
        (IMAGE, t(1, 4, 4, 2)),
    ),
    "binary_cross_entropy": (aten.binary_cross_entropy, (ONE, ONE)),
    "binary_cross_entropy_with_logits": (aten.binary_cross_entropy_with_logits, (ONE, ONE)),
    "cosine_embedding_loss": (aten.cosine_embedding_loss, (t(3, 4), t(3, 4), t(3))),
    "cross_entropy_loss": (lambda x: aten.cross_entropy_loss(x, LABELS), (t(3, 4),)),
    "ctc_loss": (
        lambda x: aten.ctc_loss.Tensor(x, torch.tensor([[1, 2]]), torch.tensor([5]), torch.tensor([2])),
        (t(5, 1, 4).log_softmax(-1),),
    ),
    "hinge_embedding_loss": (aten.hinge_embedding_loss, (ONE, ONE)),
    "huber_loss": (aten.huber_loss, (ONE, ONE)),
    "kl_div": (aten.kl_div, (ONE, ONE)),
    "l1_loss": (aten.l1_loss, (ONE, ONE)),
    "margin_ranking_loss": (aten.margin_ranking_loss, (ONE, ONE, ONE)),
    "mse_loss": (aten.mse_loss, (ONE, ONE)),
    "multi_margin_loss": (lambda x: aten.multi_margin_loss(x, LABELS), (t(3, 4),)),
    "multilabel_margin_loss": (lambda x: aten.multilabel_margin_loss(x, torch.zeros(3, 4, dtype=torch.int64)), (t(3, 4),)),
    "multilabel_margin_loss_forward": (
        lambda x: aten.multilabel_margin_loss_forward(x, torch.zeros(3, 4, dtype=torch.int64), 1),
        (t(3, 4),),
    ),
    "nll_loss": (lambda x: aten.nll_loss(x, LABELS), (t(3, 4),)),
    "nll_loss2d": (lambda x: aten.nll_loss2d(x, torch.zeros(1, 4, 4, dtype=torch.int64)), (IMAGE,)),
    "poisson_nll_loss": (lambda x, y: aten.poisson_nll_loss(x, y, True, False, 1e-8, 1), (ONE, ONE)),
    "smooth_l1_loss": (aten.smooth_l1_loss, (ONE, ONE)),
    "soft_margin_loss": (aten.soft_margin_loss, (ONE, ONE)),
    "triplet_margin_loss": (aten.triplet_margin_loss, (t(3, 4), t(3, 4), t(3, 4))),
    "cdist": (aten.cdist, (t(3, 4), t(5, 4))),
    "polar": (aten.polar, (ONE, ONE)),
    "prod": (aten.prod, (ONE,)),
    "quantile": (lambda x: aten.quantile.scalar(x, 0.5), (ONE,)),
    "nanquantile": (lambda x: aten.nanquantile.scalar(x, 0.5), (ONE,)),
    "trace": (aten.trace, (t(3, 3),)),
    "view_as_complex": (aten.view_as_complex, (t(3, 2),)),
    "fake_quantize_per_tensor_affine": (lambda x: aten.fake_quantize_per_tensor_affine(x, 0.1, 0, 0, 255), (ONE,)),
    "stft": (lambda x: torch.stft(x, 8, return_complex=True), (t(32),)),
    "cholesky_solve": (aten.cholesky_solve, (t(3, 1), spd())),
    "lu_solve": (lambda b, lu: aten.lu_solve(b, lu, torch.tensor([1, 2, 3], dtype=torch.int32)), (t(3, 1), spd())),
    "orgqr": (aten.orgqr, (t(3, 3), t(3))),
    "ormqr": (aten.ormqr, (t(3, 3), t(3), t(3, 3))),
    "triangular_solve": (aten.triangular_solve, (t(3, 1), spd())),
    "linalg_cond": (aten.linalg_cond, (spd(),)),
    "linalg_householder_product": (aten.linalg_householder_product, (t(3, 3), t(3))),
    "linalg_lstsq": (aten.linalg_lstsq, (spd(), t(3, 1))),
    "linalg_matrix_rank": (aten.linalg_matrix_rank, (spd(),)),
    "linalg_solve": (aten.linalg_solve, (spd(), t(3, 1))),
    "linalg_tensorinv": (lambda x: aten.linalg_tensorinv(x, 1), (spd(),)),
    "linalg_tensorsolve": (aten.linalg_tensorsolve, (spd(), t(3))),
    "cat": (lambda *x: aten.cat(x), (ONE, SIX)),
    "stack": (lambda *x: aten.stack(x), (ONE, ONE)),
    "index_copy": (lambda x, y: aten.index_copy(x, 0, torch.tensor([0]), y), (ONE, t(1))),
}
OPERATORS |= {  # of a square matrix
    name: (functools.partial(_call, name), (spd(),))
    for _call in [lambda name, x: getattr(aten, name)(x)]
    for name in """cholesky cholesky_inverse geqrf inverse pinverse qr svd _lu_with_info linalg_cholesky linalg_cholesky_ex
        linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_inv linalg_inv_ex linalg_qr linalg_svd
        linalg_svdvals""".split()  # noqa: SIM905
}
OPERATORS |= {  # of a vector or a matrix
    f"fft_{name}": (functools.partial(_call, f"fft_{name}"), (t(4, 4),))
    for _call in [lambda name, x: getattr(aten, name)(x)]
    for name in "fft fft2 fftn hfft ifft ifft2 ifftn ihfft irfft irfft2 irfftn rfft rfft2 rfftn".split()  # noqa: SIM905
}
OPERATORS["linalg_eig"] = (aten.linalg_eig, (t(3, 3),))


@pytest.mark.filterwarnings("ignore")  # deprecated ones say so
@pytest.mark.parametrize("operator", sorted(LISTS["cpu"]))
def test_every_operator_of_the_cpu_is_treated_as_its_list_says(operator: str) -> None:
    run, inputs = OPERATORS[operator]
    which = autocast_list(operator, "cpu")
    half = tuple(one.bfloat16() for one in inputs)
    mixed = (half[0], *inputs[1:])
    if which == "lower":
        assert casts(run, inputs) == {torch.bfloat16}
    elif which == "fp32":
        assert torch.float32 in casts(run, half)
        assert torch.bfloat16 not in casts(run, inputs)
    else:
        assert which == "promote"
        assert casts(run, mixed) == {torch.float32}
        assert casts(run, half) == casts(run, inputs) == set()


OTHERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "softmax": lambda x: aten.softmax(x, -1),
    "log_softmax": lambda x: aten.log_softmax(x, -1),
    "log": aten.log,
    "exp": aten.exp,
    "sum": aten.sum,
    "norm": aten.norm,
    "pow": lambda x: aten.pow(x, 2),
    "layer_norm": lambda x: aten.layer_norm(x, [4]),
    "gelu": aten.gelu,
    "add": lambda x: aten.add(x, x),
    "rsqrt": aten.rsqrt,
    "mean": aten.mean,
}


@pytest.mark.parametrize("operator", OTHERS)
def test_others_are_left_alone_on_a_cpu_also_where_cuda_has_them_in_fp32(operator: str) -> None:
    assert autocast_list(operator, "cpu") is None
    for x in (ONE, ONE.bfloat16()):
        assert casts(OTHERS[operator], (x,)) == set()
    on_cuda = operator not in ("gelu", "add", "mean")
    assert autocast_list(operator, "cuda") == ("fp32" if on_cuda else None)


@pytest.mark.parametrize("device", ["CPU", "CUDA"])
def test_no_operator_is_missing_that_torch_has_autocast_for(device: str) -> None:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    known = {name.removeprefix("aten::").split(".")[0] for name in names if has(name, f"Autocast{device}")}
    refused = {"binary_cross_entropy"} if device == "CUDA" else set()  # raises there
    assert known - refused == LISTS[device.lower()].keys()


def test_the_lists_of_cuda_are_those_in_torchs_header() -> None:
    header = (Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h").read_text(encoding="utf-8")
    found: dict[str, str] = {}
    for macro, which in {
        "LOWER_PRECISION_FP": "lower",
        "FP32": "fp32",
        "FP32_SET_OPT_DTYPE": "fp32",
        "PROMOTE": "promote",
    }.items():
        body = re.search(rf"#define AT_FORALL_{macro}\(_\)((?:.*\\\n)*.*)", header)
        assert body is not None, macro
        found |= dict.fromkeys(re.findall(r"_\((\w+)", body[1]), which)
    assert len(found) > 80
    extra = {"cudnn_convolution": "lower", "cudnn_convolution_transpose": "lower", "norm": "fp32"}  # elsewhere in the source
    assert found | extra == LISTS["cuda"]


def test_names_as_python_has_them() -> None:
    assert autocast_list("__matmul__", "cpu") == autocast_list("__rmatmul__", "cpu") == "lower"
    assert autocast_list("__pow__", "cuda") == autocast_list("__rpow__", "cuda") == "fp32"
    assert autocast_list("aten::softmax.int", "cuda") == "fp32"
    assert autocast_list("no_such_operator", "cpu") is None
    assert autocast_list("linear", "xpu") is None
    assert is_cast_in_code("to")
    assert is_cast_in_code("float")
    assert not is_cast_in_code("add")
