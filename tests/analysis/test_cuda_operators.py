"""What operators of fake tensors on the CPU make, as on CUDA; and that real ones are computed as ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from amp_widgets.analysis.cuda_operators import cuda_operators
from amp_widgets.analysis.cuda_policy import cuda_policy

HALF, FULL = torch.float16, torch.float32


class Made(TorchDispatchMode):
    """Names of operators, and of each result its format and shape."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []
        self.tensors: list[tuple[torch.dtype, tuple[int, ...]]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = op(*args, **(kwargs or {}))
        if not op.name().startswith("prim::"):
            self.ops.append(op.name())
            leaves = torch.utils._pytree.tree_leaves(output)
            self.tensors += [(leaf.dtype, tuple(leaf.shape)) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return output


def test_dropout_has_a_mask_of_one_byte_an_element() -> None:
    with FakeTensorMode(), cuda_operators():
        x = torch.empty(10, 20, requires_grad=True)
        with Made() as made:
            F.dropout(x, 0.1, training=True)
        assert made.ops == ["aten::native_dropout"]
        assert made.tensors == [(FULL, (10, 20)), (torch.bool, (10, 20))]
        for p, training in ((0.0, True), (1.0, True), (0.5, False)):
            with Made() as made:
                F.dropout(x, p, training=training)
            assert "aten::native_dropout" not in made.ops


@pytest.mark.parametrize("softmax", [F.softmax, F.log_softmax])
def test_softmax_from_float16_makes_no_copy_of_its_input(softmax: Callable[..., torch.Tensor]) -> None:
    with FakeTensorMode(), cuda_policy(), cuda_operators(), torch.autocast("cpu", dtype=HALF):
        x = torch.empty(10, 20, dtype=HALF, requires_grad=True)
        with Made() as made:
            loss = softmax(x, -1).sum()
        assert made.tensors[0] == (FULL, (10, 20))
        assert "aten::_to_copy" not in made.ops
        with Made() as made:
            loss.backward()  # type: ignore[no-untyped-call]
        assert made.tensors[-1] == (HALF, (10, 20)) or (HALF, (10, 20)) in made.tensors
        assert "aten::_to_copy" not in made.ops


def test_softmax_from_bfloat16_does() -> None:
    with FakeTensorMode(), cuda_policy(), cuda_operators(), torch.autocast("cpu", dtype=torch.bfloat16):
        x = torch.empty(10, 20, dtype=torch.bfloat16)
        with Made() as made:
            F.softmax(x, -1)
    assert made.ops == ["aten::_to_copy", "aten::_softmax"]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("mask", [None, torch.bool, FULL])
def test_attention_does_not_hold_the_matrix_of_all_pairs(dropout: float, mask: torch.dtype | None) -> None:
    with FakeTensorMode(), cuda_operators():
        q, k, v = (torch.empty(2, 4, 64, 32, requires_grad=True) for _ in range(3))
        given = None if mask is None else torch.ones(64, 64).to(mask)
        with Made() as made:
            output = F.scaled_dot_product_attention(q, k, v, attn_mask=given, dropout_p=dropout)
            output.sum().backward()
    assert output.shape == q.shape
    assert (2, 4, 64, 64) not in [shape for _, shape in made.tensors]
    assert "aten::bmm" not in made.ops
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None


def test_attention_that_no_fused_kernel_takes_is_made_of_products() -> None:
    with FakeTensorMode(), cuda_operators():
        q = torch.empty(2, 64, 32)
        with Made() as made:
            F.scaled_dot_product_attention(q, q, q)  # without heads
        assert "aten::bmm" in made.ops
        q = torch.empty(1, 2, 64, 32)
        backends = [torch.nn.attention.SDPBackend.MATH]
        with torch.nn.attention.sdpa_kernel(backends), Made() as made:
            F.scaled_dot_product_attention(q, q, q)
        assert "aten::bmm" in made.ops


def test_within_layers_too() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    with FakeTensorMode(allow_non_fake_inputs=True), cuda_operators(), Made() as made:
        layer(torch.empty(2, 64, 32)).sum().backward()
    assert made.ops.count("aten::native_dropout") == 3
    assert "aten::bernoulli_.float" not in made.ops
    assert "aten::bmm" not in made.ops


def real() -> list[torch.Tensor]:
    torch.manual_seed(0)
    x = torch.rand(2, 3, 8, 4, requires_grad=True)
    outputs = [F.dropout(x, 0.5, training=True), F.softmax(x, -1), F.log_softmax(x.half(), -1, dtype=FULL)]
    outputs += [F.scaled_dot_product_attention(x, x, x, is_causal=True), F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)]
    torch.stack([output.sum() for output in outputs]).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return [*(output.detach() for output in outputs), x.grad]


def test_real_tensors_are_computed_as_ever() -> None:
    before = real()
    with cuda_operators():
        within = real()
        with torch.inference_mode():
            assert F.softmax(torch.rand(3), -1).shape == (3,)
    for one, other, after in zip(before, within, real(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, after)


def registry() -> dict[str, str]:
    names = ("dropout", "softmax.int", "log_softmax.int", "scaled_dot_product_attention")
    return {name: torch._C._dispatch_dump(f"aten::{name}") for name in names}


def test_nothing_stays_behind() -> None:
    before = registry()
    with cuda_operators():
        assert registry() != before
        with pytest.raises(KeyError), cuda_operators():
            raise KeyError("x")
        assert registry() != before
    assert registry() == before


def test_in_this_thread_alone() -> None:
    made = Made()

    def elsewhere() -> None:
        with FakeTensorMode(), made:
            F.dropout(torch.empty(3), 0.5, training=True)

    with cuda_operators():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert "aten::bernoulli_.float" in made.ops
