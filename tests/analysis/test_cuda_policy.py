"""CUDA's autocast on a CPU: op by op what it gives, and that nothing of it stays behind."""

from __future__ import annotations

import contextlib
import re
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from amp_widgets.analysis.autocast_lists import LISTS
from amp_widgets.analysis.cuda_policy import APPENDS_DTYPE, SETS_DTYPE, _find_kernels, cuda_policy
from amp_widgets.errors import RunError

HALF, BF16, FULL, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
aten = torch.ops.aten


def t(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(sum(shape))) + 0.1


M, V, IMAGE, VOLUME = t(4, 4), t(4), t(1, 2, 6, 6), t(1, 2, 4, 4, 4)
LABELS = torch.tensor([0, 1, 2, 3])
ONES = torch.ones(4)

LOWER: dict[str, Callable[..., Any]] = {
    "conv1d": lambda x: F.conv1d(t(1, 2, 6).to(x), t(3, 2, 3)),
    "conv2d": lambda x: F.conv2d(IMAGE.to(x), t(3, 2, 3, 3)),
    "conv2d.padding": lambda x: F.conv2d(IMAGE.to(x), t(3, 2, 3, 3), padding="same"),
    "conv3d": lambda x: F.conv3d(VOLUME.to(x), t(3, 2, 2, 2, 2)),
    "conv_transpose2d": lambda x: F.conv_transpose2d(IMAGE.to(x), t(2, 3, 3, 3)),
    "prelu": lambda x: F.prelu(x, t(1)),
    "addmm": lambda x: torch.addmm(x, x, M),
    "addmv": lambda x: torch.addmv(V, x, V),
    "addr": lambda x: torch.addr(x, V, V),
    "matmul": lambda x: x @ M,
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, M),
    "mm": lambda x: torch.mm(x, M),
    "mv": lambda x: torch.mv(x, V),
    "linear": lambda x: F.linear(x, M, V),
    "bmm": lambda x: torch.bmm(x[None], M[None]),
    "baddbmm": lambda x: torch.baddbmm(x[None], x[None], M[None]),
    "chain_matmul": lambda x: aten.chain_matmul([x, M, M]),
    "linalg_multi_dot": lambda x: torch.linalg.multi_dot([x, M, M]),
    "lstm_cell": lambda x: aten.lstm_cell(x, [x, x], t(16, 4), t(16, 4))[0],
    "gru_cell": lambda x: aten.gru_cell(x, x, t(12, 4), t(12, 4)),
    "rnn_tanh_cell": lambda x: aten.rnn_tanh_cell(x, x, M, M),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(x[None, None], M[None, None], M[None, None]),
}
FP32: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "acos": lambda x: torch.acos(x / 2),
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": torch.log,
    "log1p": torch.log1p,
    "reciprocal": torch.reciprocal,
    "rsqrt": torch.rsqrt,
    "sinh": torch.sinh,
    "tan": torch.tan,
    "pow.Tensor_Scalar": lambda x: x**2,
    "pow.Tensor_Tensor": lambda x: x**x,
    "pow.Scalar": lambda x: 2.0**x,
    "softplus": F.softplus,
    "layer_norm": lambda x: F.layer_norm(x, (4,), ONES, ONES),
    "rms_norm": lambda x: F.rms_norm(x, (4,)),
    "group_norm": lambda x: F.group_norm(x, 2, ONES, ONES),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x),
    "nll_loss": lambda x: F.nll_loss(x, LABELS),
    "cross_entropy": lambda x: F.cross_entropy(x, LABELS),
    "kl_div": lambda x: F.kl_div(x, x, reduction="batchmean"),
    "l1_loss": lambda x: F.l1_loss(x, M),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, M),
    "huber_loss": lambda x: F.huber_loss(x, M),
    "mse_loss": lambda x: F.mse_loss(x, M),
    "soft_margin_loss": lambda x: F.soft_margin_loss(x, M),
    "binary_cross_entropy_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, M),
    "dist": lambda x: torch.dist(x, x),
    "cdist": lambda x: torch.cdist(x, x),
    "renorm": lambda x: torch.renorm(x, 2, 0, 1.0),
    "logsumexp": lambda x: torch.logsumexp(x, 0),
    "upsample_nearest2d": lambda x: F.interpolate(x[None, None], scale_factor=2, mode="nearest"),
    "upsample_bilinear2d": lambda x: F.interpolate(x[None, None], scale_factor=2, mode="bilinear"),
    "prod": lambda x: torch.prod(x),
    "prod.dim_int": lambda x: torch.prod(x, 0),
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "cumprod": lambda x: torch.cumprod(x, 0),
    "cumsum": lambda x: torch.cumsum(x, 0),
    "linalg_vector_norm": torch.linalg.vector_norm,
    "linalg_matrix_norm": torch.linalg.matrix_norm,
    "norm": lambda x: aten.norm(x, 2),
    "norm.dim": lambda x: aten.norm(x, 2, [0]),
    "norm.dim, keepdim": lambda x: aten.norm(x, 2, [0], True),
    "sum": torch.sum,
    "sum.dim_IntList": lambda x: torch.sum(x, 0, keepdim=True),
}
PROMOTE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "addcdiv": lambda x, y: torch.addcdiv(x, y, x),
    "addcmul": lambda x, y: torch.addcmul(x, y, x),
    "atan2": torch.atan2,
    "bilinear": lambda x, y: F.bilinear(x, x, y.reshape(1, 4, 4)),
    "cross": lambda x, y: torch.cross(x[:, :3], y[:, :3], dim=1),
    "dot": lambda x, y: torch.dot(x[0], y[0]),
    "vdot": lambda x, y: torch.vdot(x[0], y[0]),
    "grid_sampler": lambda x, y: F.grid_sample(x[None, None], y.reshape(1, 2, 4, 2), align_corners=False),
    "index_put": lambda x, y: torch.index_put(x, (LABELS,), y[0]),
    "tensordot": lambda x, y: torch.tensordot(x, y, dims=1),
    "scatter_add": lambda x, y: torch.scatter_add(x, 0, LABELS[None], y),
    "cat": lambda x, y: torch.cat([x, y]),  # on no list of CUDA's: torch promotes by itself
    "stack": lambda x, y: torch.stack([x, y]),
}
LEFT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "add": lambda x: x + x,
    "mean": torch.mean,
    "max_pool3d": lambda x: F.max_pool3d(x.reshape(1, 1, 1, 4, 4), (1, 2, 2)),
    "reflection_pad1d": lambda x: F.pad(x, (1, 1), mode="reflect"),
    "softmax with a dtype": lambda x: F.softmax(x, -1, dtype=x.dtype),
    "sum with a dtype": lambda x: torch.sum(x, dtype=x.dtype),
    "trace": torch.trace,
}
ON_THE_CPU: dict[str, Callable[[], torch.Tensor]] = {
    "mm": lambda: M @ M,
    "exp": lambda: torch.exp(M.half()),
    "softmax": lambda: F.softmax(M.half(), -1),
    "sum": lambda: torch.sum(M.bfloat16()),
    "norm": lambda: aten.norm(M.bfloat16(), 2),
    "prod": lambda: torch.prod(M.bfloat16()),
    "layer_norm": lambda: F.layer_norm(M.bfloat16(), (4,)),
    "addcmul": lambda: torch.addcmul(M, M.bfloat16(), M),
    "einsum": lambda: torch.einsum("ij,jk->ik", M, M),
    "mv": lambda: torch.mv(M, V),
    "avg_pool3d": lambda: F.avg_pool3d(t(1, 1, 2, 2, 2).bfloat16(), 2),
    "cat": lambda: torch.cat([M, M.bfloat16()]),
    "mse_loss": lambda: F.mse_loss(M.bfloat16(), M),
    "binary_cross_entropy": lambda: F.binary_cross_entropy(torch.sigmoid(M), torch.sigmoid(M)),
    "cross_entropy": lambda: F.cross_entropy(M.bfloat16(), LABELS),
    "trace": lambda: torch.trace(M.bfloat16()),
}


class Casts(TorchDispatchMode):
    """The formats that floating-point tensors were cast to."""

    def __init__(self) -> None:
        super().__init__()
        self.to: list[torch.dtype] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = op(*args, **(kwargs or {}))
        if op is aten._to_copy.default and args[0].is_floating_point() and output.dtype != args[0].dtype:
            self.to.append(output.dtype)
        return output


def seen(run: Callable[[], torch.Tensor]) -> tuple[Any, ...]:
    """What autocast on the CPU makes of an operator: the format, the casts, and the numbers; or the error."""
    torch.clear_autocast_cache()
    with torch.autocast("cpu", dtype=BF16), Casts() as casts:
        try:
            output = run()
        except RuntimeError as error:
            return "raises", tuple(casts.to), str(error)
    return output.dtype, tuple(casts.to), output.tolist()


# ---- op by op -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lower", [HALF, BF16])
@pytest.mark.parametrize("name", LOWER)
def test_lower_precision(name: str, lower: torch.dtype) -> None:
    for x in (M, M.to(lower)):
        with cuda_policy(), torch.autocast("cpu", dtype=lower):
            assert LOWER[name](x).dtype == lower


@pytest.mark.parametrize("name", FP32)
def test_float32(name: str) -> None:
    for lower in (HALF, BF16):
        x = M.to(lower)
        with cuda_policy(), torch.autocast("cpu", dtype=lower):
            output = FP32[name](x)
        assert output.dtype == FULL
        expected = FP32[name](x.float())
        if name == "cross_entropy":  # torch tells log_softmax to stay in the format of the input, on every device
            expected = F.nll_loss(F.log_softmax(x, -1).float(), LABELS)
        assert torch.equal(output, expected)


@pytest.mark.parametrize("name", PROMOTE)
def test_the_widest_of_the_inputs(name: str) -> None:
    for x, y, expected in ((M.half(), M.half(), HALF), (M.half(), M, FULL), (M, M.half(), FULL), (M, M, FULL)):
        with cuda_policy(), torch.autocast("cpu", dtype=HALF):
            assert PROMOTE[name](x, y).dtype == expected


@pytest.mark.parametrize("name", LEFT)
def test_the_rest_is_left_alone(name: str) -> None:
    for x in (M.bfloat16(), M):
        with cuda_policy(), torch.autocast("cpu", dtype=BF16), Casts() as casts:
            assert LEFT[name](x).dtype == x.dtype
        assert casts.to == [] or "dtype" in name


@pytest.mark.parametrize("name", [*LOWER, *FP32])
def test_double_is_never_cast(name: str) -> None:
    x = M.double()
    run = LOWER.get(name) or FP32[name]
    with cuda_policy(), torch.autocast("cpu", dtype=HALF), Casts() as casts, contextlib.suppress(RuntimeError):
        run(x)  # fails where the weights here are none in double
    assert FULL not in [dtype for dtype in casts.to if name not in ("l1_loss", "smooth_l1_loss", "huber_loss")]


def test_binary_cross_entropy_is_refused_as_on_cuda() -> None:
    probabilities = torch.sigmoid(M)
    with cuda_policy(), torch.autocast("cpu", dtype=HALF):
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(probabilities, probabilities)
        with torch.autocast("cpu", enabled=False):
            assert F.binary_cross_entropy(probabilities, probabilities).dtype == FULL
    with cuda_policy():
        assert F.binary_cross_entropy(probabilities, probabilities).dtype == FULL


def test_a_third_format_among_the_inputs_is_refused_as_on_cuda() -> None:
    with cuda_policy(), torch.autocast("cpu", dtype=HALF), pytest.raises(RuntimeError, match="Unexpected floating ScalarType"):
        torch.addcmul(M.half(), M.bfloat16(), M.half())


def test_other_dtypes_and_devices_are_left_alone() -> None:
    with cuda_policy(), torch.autocast("cpu", dtype=HALF):
        assert torch.sum(LABELS).dtype == torch.int64
        assert torch.cumsum(LABELS, 0).dtype == torch.int64
        assert torch.exp(M.half().to("meta")).dtype == HALF
        assert torch.sum(M.half().to("meta")).dtype == HALF


def test_without_autocast_it_changes_nothing() -> None:
    with cuda_policy():
        assert (M @ M).dtype == FULL
        assert torch.exp(M.bfloat16()).dtype == BF16
        with torch.autocast("cpu", dtype=HALF), torch.autocast("cpu", enabled=False):
            assert torch.exp(M.bfloat16()).dtype == BF16


def test_casts_are_seen_by_autograd() -> None:
    x = M.clone().requires_grad_()
    with cuda_policy(), torch.autocast("cpu", dtype=BF16):
        y = torch.einsum("ij,jk->ik", x, x)
        loss = torch.exp(y).sum()
    assert loss.dtype == FULL
    loss.backward()
    assert x.grad is not None
    assert x.grad.dtype == FULL
    half = M.bfloat16().requires_grad_()
    torch.exp((half @ half).float()).sum().backward()
    assert torch.allclose(x.grad, half.grad.float(), rtol=2e-2)  # type: ignore[union-attr]


def test_weights_are_cast_once_as_on_cuda() -> None:
    layer = nn.Linear(4, 4)
    with cuda_policy(), torch.autocast("cpu", dtype=BF16), Casts() as casts:
        layer(layer(M))
    assert casts.to == [BF16] * 3  # weight, bias, and the first input


def test_recomputed_under_the_policy() -> None:
    x = M.clone().requires_grad_()
    with cuda_policy():
        with torch.autocast("cpu", dtype=BF16):
            y = torch.utils.checkpoint.checkpoint(lambda x: torch.exp(x @ x), x, use_reentrant=False)
        y.sum().backward()  # a recompute in another format would raise
    assert y.dtype == FULL


def test_fake_tensors() -> None:
    with FakeTensorMode(), cuda_policy(), torch.autocast("cpu", dtype=HALF):
        x = torch.empty(4, 4)
        assert (x @ x).dtype == HALF
        assert torch.exp(x @ x).dtype == FULL
        assert F.layer_norm(x @ x, (4,)).dtype == FULL
        assert torch.einsum("ij,jk->ik", x, x).dtype == HALF


# ---- where it comes from --------------------------------------------------------------------------------------------


def test_each_operator_of_cudas_lists_is_tested_or_shares_a_kernel_with_one_that_is() -> None:
    tested = {name.split(".")[0].split(",")[0] for name in (*LOWER, *FP32, *PROMOTE)}
    kinds = {which: {name for name in LISTS["cuda"] if LISTS["cuda"][name] == which} for which in ("lower", "fp32", "promote")}
    assert kinds["promote"] <= tested
    assert tested >= SETS_DTYPE | APPENDS_DTYPE
    assert len(kinds["lower"] & tested) > 15
    assert len(kinds["fp32"] & tested) > 35


def test_the_operators_that_are_told_a_dtype_are_those_in_torchs_header() -> None:
    header = (Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h").read_text(encoding="utf-8")
    for macro, names in {"FP32_SET_OPT_DTYPE": SETS_DTYPE, "DIFFERENT_REDISPATCH_SIGNATURE": APPENDS_DTYPE}.items():
        body = re.search(rf"#define AT_FORALL_{macro}\(_\)((?:.*\\\n)*.*)", header)
        assert body is not None
        found = re.findall(r"_\((\w+)", body[1]) if macro.startswith("FP32") else re.findall(r"_\(ADD_NS\((\w+)\)", body[1])
        assert set(found) == names


def test_it_knows_the_overloads_in_torchs_header() -> None:
    header = (Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h").read_text(encoding="utf-8")
    in_header = set()
    for macro in ("LOWER_PRECISION_FP", "FP32", "FP32_SET_OPT_DTYPE", "PROMOTE"):
        body = re.search(rf"#define AT_FORALL_{macro}\(_\)((?:.*\\\n)*.*)", header)
        assert body is not None
        in_header |= {"aten::" + ".".join(re.split(r",\s*", each)) for each in re.findall(r"_\(([\w, ]+)\)", body[1])}
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    overridden = {overload.name() for overload, _ in _find_kernels()}
    missing = in_header - overridden
    assert {name for name in missing if not has(name, "AutocastCPU")} == set()
    which = {name: LISTS["cuda"][name.removeprefix("aten::").split(".")[0]] for name in missing}
    assert {name: LISTS["cpu"][name.removeprefix("aten::").split(".")[0]] for name in missing} == which  # the same on both


# ---- nothing stays behind -------------------------------------------------------------------------------------------


def kernels() -> set[str]:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return {name for name in torch._C._dispatch_get_all_op_names() if has(name, "AutocastCPU")}


def dumps() -> dict[str, str]:
    return {name: torch._C._dispatch_dump(name) for name in sorted({o.name() for o, _ in _find_kernels()})}


def test_torch_is_as_before() -> None:
    before = {name: seen(run) for name, run in ON_THE_CPU.items()}
    registry, text = kernels(), dumps()
    with cuda_policy():
        within = {name: seen(run) for name, run in ON_THE_CPU.items()}
        assert kernels() != registry
    after = {name: seen(run) for name, run in ON_THE_CPU.items()}
    assert after == before
    assert kernels() == registry
    assert dumps() == text
    assert {name for name in before if within[name][:2] != before[name][:2]} >= {
        "softmax", "sum", "norm", "layer_norm", "mv", "avg_pool3d", "cat", "binary_cross_entropy", "trace", "exp"
    }  # fmt: skip


def test_also_after_an_exception_and_when_nested() -> None:
    before = seen(ON_THE_CPU["softmax"])
    with cuda_policy():
        with pytest.raises(KeyError), cuda_policy():
            raise KeyError("x")
        assert seen(ON_THE_CPU["softmax"])[0] == FULL
        with cuda_policy():
            assert seen(ON_THE_CPU["softmax"])[0] == FULL
        assert seen(ON_THE_CPU["softmax"])[0] == FULL
    assert seen(ON_THE_CPU["softmax"]) == before
    assert before[0] == HALF


def test_no_warnings() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with cuda_policy(), torch.autocast("cpu", dtype=HALF):
            torch.exp(M)
    assert caught == []


def test_other_threads_go_on_with_the_cpus_lists() -> None:
    before = {name: seen(run) for name, run in ON_THE_CPU.items()}
    found: dict[str, Any] = {}

    def elsewhere() -> None:
        found.update({name: seen(run) for name, run in ON_THE_CPU.items()})

    with cuda_policy():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert found == before


def test_several_threads_at_a_time() -> None:
    first_in, second_out = threading.Event(), threading.Event()
    formats: list[torch.dtype] = []

    def first() -> None:
        with cuda_policy():
            first_in.set()
            assert second_out.wait(20)
            formats.append(seen(ON_THE_CPU["softmax"])[0])

    thread = threading.Thread(target=first)
    thread.start()
    assert first_in.wait(20)
    with cuda_policy():
        assert seen(ON_THE_CPU["softmax"])[0] == FULL
    assert seen(ON_THE_CPU["softmax"])[0] == HALF  # here, while the other one is still inside
    second_out.set()
    thread.join()
    assert formats == [FULL]
    assert seen(ON_THE_CPU["softmax"])[0] == HALF


def test_another_librarys_overrides_are_a_reason_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("already overridden")

    before = kernels()
    with monkeypatch.context() as patch:
        patch.setattr(torch.library.Library, "impl", refuse)
        with pytest.raises(RunError, match="already overridden"), cuda_policy():
            raise AssertionError
    assert kernels() == before
    with cuda_policy():
        assert seen(ON_THE_CPU["softmax"])[0] == FULL
    assert kernels() == before
