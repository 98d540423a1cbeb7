"""The dtype map: every format and every cast of small nets, written out by hand."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from amp_widgets.analysis.dtype_map import DtypeMap, OperatorDtypes, dtype_map
from amp_widgets.analysis.operator_watch import OperatorWatch, Seen
from amp_widgets.errors import RunError
from amp_widgets.session import AmpSession

Untouched = Callable[[AmpSession], contextlib.AbstractContextManager[None]]
F32, BF16 = ("fp32",), ("bf16",)
cross_entropy = nn.functional.cross_entropy


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def take(untouched: Untouched) -> Iterator[Callable[..., DtypeMap]]:
    """The map of a model with these settings, which must leave everything as it was."""
    made: list[AmpSession] = []

    def map_of(model: nn.Module, batch: Any, loss_fn: Any = cross_entropy, **settings: Any) -> DtypeMap:
        session = AmpSession(model, torch.optim.SGD(model.parameters(), lr=0.1))
        made.append(session)
        session.request(**{"autocast": "bf16", **settings})
        session.apply_pending()
        with untouched(session):
            return dtype_map(session, batch, loss_fn)

    yield map_of
    for session in made:
        session.close()


def formats(rows: DtypeMap | tuple[OperatorDtypes, ...]) -> list[tuple[Any, ...]]:
    rows = rows.rows if isinstance(rows, DtypeMap) else rows
    return [(row.layer, row.operator, row.calls, row.dtypes_in, row.compute, row.dtypes_out, row.reason) for row in rows]


def traffic(rows: DtypeMap | tuple[OperatorDtypes, ...]) -> list[tuple[Any, ...]]:
    rows = rows.rows if isinstance(rows, DtypeMap) else rows
    return [
        (row.layer, row.operator, row.casts, row.cast_bytes, row.backward_compute, row.backward_casts, row.backward_cast_bytes)
        for row in rows
    ]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 3, bias=False))


def batch(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(*(shape or (5, 4))), torch.randint(3, (5,))


def test_an_mlp_in_bf16_on_a_cpu(take: Callable[..., DtypeMap]) -> None:
    made = take(mlp(), batch())
    assert formats(made) == [
        ("0", "linear", 1, F32, BF16, BF16, "lower"),
        ("1", "layer_norm", 1, ("bf16", "fp32"), ("bf16", "fp32"), BF16, "through"),
        ("2", "gelu", 1, BF16, BF16, BF16, "through"),
        ("3", "linear", 1, ("bf16", "fp32"), BF16, BF16, "lower"),
        ("loss_fn", "cross_entropy_loss", 1, BF16, F32, F32, "fp32"),
    ]
    half, full = 2, 4
    assert traffic(made) == [
        # input, weight and bias; backward the gradients of weight and bias, the input asks for none
        ("0", "linear", 3, (5 * 4 + 6 * 4 + 6) * half, BF16, 2, (6 * 4 + 6) * full),
        ("1", "layer_norm", 0, 0, ("bf16", "fp32"), 0, 0),
        ("2", "gelu", 0, 0, BF16, 0, 0),
        ("3", "linear", 1, 3 * 6 * half, BF16, 1, 3 * 6 * full),
        ("loss_fn", "cross_entropy_loss", 1, 5 * 3 * full, F32, 1, 5 * 3 * half),
    ]
    assert made.casts == 5 + 4
    assert made.cast_bytes == 100 + 36 + 60 + 120 + 72 + 30
    assert made.layers == {
        "(model)": ("bf16", "fp32"), "0": BF16, "1": ("bf16", "fp32"), "2": BF16, "3": BF16, "loss_fn": F32,
    }  # fmt: skip
    assert [row.on_cuda for row in made.rows] == ["lower", "fp32", None, "lower", "fp32"]
    assert [row.why for row in made.rows] == [
        "linear is on CPU's lower-precision list",
        "on none of CPU's lists: it takes what comes",
        "on none of CPU's lists: it takes what comes",
        "linear is on CPU's lower-precision list",
        "cross_entropy_loss is on CPU's fp32 list",
    ]


def test_autocast_off_and_fp16(take: Callable[..., DtypeMap]) -> None:
    model, data = mlp(), batch()
    off = take(model, data, autocast="fp32")
    assert {(row.dtypes_in, row.compute, row.dtypes_out, row.reason) for row in off.rows} == {(F32, F32, F32, "off")}
    assert off.casts == off.cast_bytes == 0
    half = take(model, data, autocast="fp16")
    assert [row.compute for row in half.rows] == [("fp16",), ("fp16", "fp32"), ("fp16",), ("fp16",), F32]
    assert (half.casts, half.cast_bytes) == (9, 418)


class Attention(nn.Module):
    """One head, by hand, with the operators that people expect in FP32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.qkv = nn.Linear(4, 12, bias=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        weights = torch.softmax(q @ k.transpose(-1, -2), dim=-1)
        x = x + weights @ v
        return self.head(torch.cat([x, v], 1).mean(1))


def test_an_attention_block(take: Callable[..., DtypeMap]) -> None:
    made = take(Attention(), batch(5, 2, 4))
    mixed = ("fp32", "bf16")
    assert formats(made) == [
        ("norm", "layer_norm", 1, F32, F32, F32, "through"),
        ("qkv", "linear", 1, F32, BF16, BF16, "lower"),
        ("(model)", "matmul", 2, BF16, BF16, BF16, "lower"),
        ("(model)", "softmax", 1, BF16, BF16, BF16, "through"),  # on a CPU; CUDA has it in fp32
        ("(model)", "add", 1, mixed, mixed, F32, "through"),
        ("(model)", "cat", 1, mixed, F32, F32, "promote"),
        ("(model)", "mean", 1, F32, F32, F32, "through"),
        ("head", "linear", 1, F32, BF16, BF16, "lower"),
        ("loss_fn", "cross_entropy_loss", 1, BF16, F32, F32, "fp32"),
    ]
    of = {(row.layer, row.operator): row for row in made.rows}
    assert (of["qkv", "linear"].casts, of["qkv", "linear"].cast_bytes) == (2, (5 * 2 * 4 + 12 * 4) * 2)
    assert (of["(model)", "cat"].casts, of["(model)", "cat"].cast_bytes) == (1, 5 * 2 * 4 * 4)
    assert (of["(model)", "cat"].backward_casts, of["(model)", "cat"].backward_cast_bytes) == (1, 5 * 2 * 4 * 2)
    assert (of["(model)", "add"].casts, of["(model)", "add"].backward_casts) == (0, 1)  # torch promotes in the operator
    assert of["(model)", "softmax"].on_cuda == "fp32"
    assert of["(model)", "softmax"].backward_compute == BF16
    assert of["(model)", "cat"].why == "cat is on CPU's promote list: the widest of its inputs"


def test_functions_made_of_others_are_followed(take: Callable[..., DtypeMap]) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.pool = nn.MaxPool1d(2)
            self.head = nn.Linear(2, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x, _ = self.attention(x, x, x)
            x = torch.einsum("bij,bij->bj", x, x.float())
            return self.head(self.pool(x[:, None])[:, 0])

    made = take(Heads(), batch(5, 2, 4))
    assert formats(made) == [
        ("attention", "linear", 1, F32, BF16, BF16, "lower"),
        ("attention", "mul", 1, BF16, BF16, BF16, "through"),
        ("attention", "bmm", 2, BF16, BF16, BF16, "lower"),
        ("attention", "softmax", 1, BF16, BF16, BF16, "through"),
        ("attention", "linear", 1, ("bf16", "fp32"), BF16, BF16, "lower"),
        ("attention", "mean", 1, BF16, BF16, BF16, "through"),
        ("(model)", "float", 1, BF16, (), F32, "written"),
        ("(model)", "einsum", 1, ("bf16", "fp32"), BF16, BF16, "lower"),
        ("pool", "max_pool1d", 1, BF16, BF16, BF16, "through"),
        ("head", "linear", 1, ("bf16", "fp32"), BF16, BF16, "lower"),
        ("loss_fn", "cross_entropy_loss", 1, BF16, F32, F32, "fp32"),
    ]
    written, einsum = (next(row for row in made.rows if row.operator == name) for name in ("float", "einsum"))
    assert (written.casts, written.cast_bytes, written.backward_casts) == (1, 5 * 2 * 4 * 4, 1)
    assert made.casts == sum(row.casts + row.backward_casts for row in made.rows if row is not written)
    assert einsum.why == "bmm inside it is on CPU's lower-precision list"
    assert einsum.on_cuda == "lower"


def test_the_fp32_operators_of_the_tutorial(take: Callable[..., DtypeMap]) -> None:
    """They compute in fp32 in a region with autocast disabled; CUDA's lists, not the CPU's, have them there by themselves."""

    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.head(x)
            with torch.autocast("cpu", enabled=False):
                y = x.float()
                y = torch.softmax(y, -1).log().exp() + y.sum() + y.norm() + y.pow(2)
            return y.log_softmax(-1)

    made = take(Careful(), batch(), nn.functional.nll_loss)
    of = {row.operator: row for row in made.rows}
    names = ("softmax", "log", "exp", "sum", "linalg_vector_norm", "pow")
    assert {of[name].reason for name in names} == {"disabled"}
    assert of["softmax"].why == "in a region with autocast disabled"
    assert {of[name].compute for name in (*names, "log_softmax", "nll_loss_nd")} == {F32}
    assert [of[name].on_cuda for name in (*names, "log_softmax")] == ["fp32"] * 7
    assert of["nll_loss_nd"].reason == of["nll_loss_nd"].on_cuda == "fp32"
    assert [row.reason for row in made.rows if row.operator == "add"] == ["disabled"]


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight).tanh()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient.float() @ weight.T, x.T @ gradient.float()


class Cubed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(Cube.apply(x, self.weight).sin())


def test_a_custom_function(take: Callable[..., DtypeMap]) -> None:
    made = take(Cubed(), batch())
    rows = {row.text: row for row in made.rows}
    assert list(rows)[:3] == ["mm in Cube", "tanh in Cube", "sin"]
    assert rows["mm in Cube"].function == rows["tanh in Cube"].function == "Cube"
    assert (rows["mm in Cube"].reason, rows["mm in Cube"].compute, rows["mm in Cube"].casts) == ("lower", BF16, 2)
    assert rows["mm in Cube"].why == "inside Cube, a custom autograd.Function: mm is on CPU's lower-precision list"
    assert rows["mm in Cube"].backward_compute == ()  # that is the Function's
    whole = rows["Cube (autograd.Function)"]
    assert (whole.layer, whole.calls, whole.compute, whole.backward_compute) == ("(model)", 0, (), F32)
    assert (whole.backward_casts, whole.backward_cast_bytes) == (0, 0)
    written = rows["float in Cube"]
    assert (written.backward_casts, written.backward_cast_bytes, written.reason) == (2, 2 * 5 * 4 * 4, "written")
    assert written.why == "inside Cube, a custom autograd.Function: a conversion written in the code"
    assert whole.why == "the backward of Cube, a custom autograd.Function, runs without autocast unless it says otherwise"


def test_a_checkpointed_layer_is_not_counted_twice(take: Callable[..., DtypeMap]) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.inner(x) @ x.transpose(0, 1)) @ x

    model, data = nn.Sequential(nn.Linear(4, 4), Block(), nn.Linear(4, 3)), batch()
    plain = take(model, data)
    again = take(model, data, checkpointed=["1"])
    assert formats(again) == formats(plain)
    assert traffic(again) == traffic(plain)
    assert again.casts == plain.casts
    assert again.checkpointed == ("1",)
    assert {
        (row.layer, row.operator): (row.recompute_calls, row.recompute_casts) for row in plain.rows if row.recompute_calls
    } == {}
    assert {
        (row.layer, row.operator): (row.recompute_calls, row.recompute_casts) for row in again.rows if row.recompute_calls
    } == {
        ("1.inner", "linear"): (1, 2),
        ("1", "matmul"): (2, 0),
        ("1", "tanh"): (1, 0),
    }


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_of_the_users(take: Callable[..., DtypeMap], reentrant: bool) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
            self.on = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            x = checkpoint(self.inner, x, use_reentrant=reentrant) if self.on else self.inner(x)
            return self.last(x)

    model, data = Outer(), batch()
    plain = take(model, data)
    model.on = True
    again = take(model, data)
    assert formats(again) == formats(plain)
    assert traffic(again) == traffic(plain)
    assert [row.recompute_calls for row in again.rows if row.layer == "inner"] == [1]


def test_layers_kept_in_fp32(take: Callable[..., DtypeMap]) -> None:
    model = mlp()
    made = take(model, batch(), fp32_layers=["1", "3"])
    assert made.fp32_layers == ("1", "3")
    assert formats(made) == [
        ("0", "linear", 1, F32, BF16, BF16, "lower"),
        ("1", "float", 1, BF16, (), F32, "kept"),
        ("1", "layer_norm", 1, F32, F32, F32, "kept"),
        ("2", "gelu", 1, F32, F32, F32, "through"),
        ("3", "linear", 1, F32, F32, F32, "kept"),
        ("loss_fn", "cross_entropy_loss", 1, F32, F32, F32, "fp32"),
    ]
    assert (made.rows[1].casts, made.rows[1].cast_bytes, made.rows[1].backward_casts) == (1, 5 * 6 * 4, 1)
    assert made.casts == 3 + 2 + 1 + 1
    assert made.rows[2].why == "in a layer that is kept in FP32"


def test_a_shared_layer_casts_its_weight_once(take: Callable[..., DtypeMap]) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.shared(x) + self.shared(x))

    made = take(Twice(), batch())
    assert formats(made.of("shared")) == [("shared", "linear", 2, F32, BF16, BF16, "lower")]
    assert made.rows[0].casts == 4  # the input twice, weight and bias once
    assert made.rows[0].backward_casts == 2  # their gradients are added up in bf16


def test_a_gradient_penalty_is_no_recompute(take: Callable[..., DtypeMap]) -> None:
    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.requires_grad_()
            y = self.head(torch.tanh(self.first(x)))
            (slope,) = torch.autograd.grad(y.float().sum(), x, create_graph=True)
            return y * slope.square().sum()

    made = take(Penalised(), batch())
    assert [row.operator for row in made.rows] == [
        "linear", "tanh", "linear", "float", "sum", "square", "mul", "cross_entropy_loss",
    ]  # fmt: skip
    assert not any(row.recompute_calls for row in made.rows)
    assert {row.reason for row in made.rows} == {"lower", "through", "written", "fp32"}


def test_an_implementation_that_computes_in_fp32_all_the_same(take: Callable[..., DtypeMap]) -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5).mean(1))

    row = take(Attends(), batch(5, 2, 4)).rows[0]
    assert (row.dtypes_in, row.compute, row.dtypes_out, row.reason) == (F32, F32, BF16, "lower")
    assert row.why.endswith("list; the implementation taken here casts to fp32 again")


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_code_of_torchscript_is_seen_after_its_casts(take: Callable[..., DtypeMap]) -> None:
    tanh = torch.jit.trace(lambda x: x.tanh(), torch.ones(5, 4))

    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(tanh(x))

    made = take(Scripted(), batch())
    assert formats(made)[0] == ("(model)", "tanh", 1, F32, F32, F32, "unknown")
    assert "compiled code" in made.rows[0].why


def test_it_reads_and_is_escaped(take: Callable[..., DtypeMap]) -> None:
    model = nn.Sequential()
    model.add_module("<b>x</b>", nn.Linear(4, 3))
    made = take(model, batch())
    text, page = repr(made), made._repr_html_()
    assert text.splitlines()[0].startswith("dtypes by layer and operator: autocast bf16 on cpu, torch 2.")
    assert "<b>x</b>  linear" in text
    assert "3 (70 B)" in text
    assert text.endswith("Casts inserted, forward and backward: 7, which write 220 bytes.")
    assert '<td style="text-align:left">&lt;b&gt;x&lt;/b&gt;</td>' in page
    assert "<b>x" not in page
    with pytest.raises(AttributeError):
        made.autocast = "fp16"  # type: ignore[misc]


def test_an_error_of_the_models_leaves_nothing_behind(untouched: Untouched) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.inner(x)
            raise ZeroDivisionError

    model, data = Broken(), batch()
    with AmpSession(model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
        with untouched(session), pytest.raises(ZeroDivisionError):
            dtype_map(session, data, cross_entropy)
        assert not torch.overrides._get_current_function_mode_stack()
        assert torch._C._len_torch_dispatch_stack() == 0
        with pytest.raises(RunError, match="dtype_map: got 1 items as the batch"):
            dtype_map(session, (torch.ones(1),), cross_entropy)  # type: ignore[arg-type]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_lambda_is_of_the_layer_that_calls_it(take: Callable[..., DtypeMap], reentrant: bool) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
            self.on = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def part(a: torch.Tensor) -> torch.Tensor:
                return torch.softmax(self.inner(a), -1).exp() * 2

            x = self.first(x)
            return self.last(checkpoint(part, x, use_reentrant=reentrant) if self.on else part(x))  # type: ignore[no-any-return]

    def twice(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """With a checkpoint of its own."""
        loss = checkpoint(lambda a: cross_entropy(a.tanh(), targets), output, use_reentrant=reentrant) if model.on else None
        return cross_entropy(output.tanh(), targets) if loss is None else loss

    model, data = Outer(), batch()
    plain = take(model, data, twice)
    model.on = True
    again = take(model, data, twice)
    assert formats(again) == formats(plain)
    assert traffic(again) == traffic(plain)
    repeated = {(row.layer, row.operator) for row in again.rows if row.recompute_calls}
    assert repeated >= {("inner", "linear"), ("(model)", "softmax"), ("(model)", "exp"), ("loss_fn", "tanh")}
    assert {layer for layer, _ in repeated} == {"inner", "(model)", "loss_fn"}


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_backward_pass_on_a_thread_of_its_own(reentrant: bool) -> None:
    """As on CUDA, where that thread numbers the nodes of a recompute by itself."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(lambda a: self.inner(a).exp(), self.first(x), use_reentrant=reentrant)
            return self.last(x)  # type: ignore[no-any-return]

    def watch(elsewhere: bool) -> list[Seen]:
        model, (inputs, targets) = Outer(), batch()
        with OperatorWatch(model, "cpu", off=False) as watch:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = cross_entropy(model(inputs), targets)

            def backward() -> None:
                with watch._below, watch._above:  # which torch takes to the threads of a device
                    loss.backward()

            if elsewhere:
                thread = threading.Thread(target=backward)
                thread.start()
                thread.join()
            else:
                loss.backward()
        return list(watch.seen)

    for _ in range(2):  # the new thread counts from 0 again, this one goes on
        assert watch(elsewhere=True) == watch(elsewhere=False)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return (gradient.double() * 2).to(gradient.dtype)


def test_conversions_that_are_written_in_a_backward_are_not_inserted(take: Callable[..., DtypeMap]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inner(x)
            x.register_hook(lambda gradient: gradient.double().to(gradient.dtype))
            return Doubled.apply(x)  # type: ignore[no-any-return]

    model, data = Net(), batch()
    off = take(model, data, autocast="fp32")
    assert (off.casts, off.cast_bytes) == (0, 0)
    rows = {row.text: row for row in off.rows}
    wide, narrow = 5 * 3 * 8, 5 * 3 * 4
    assert [(rows[name].backward_casts, rows[name].backward_cast_bytes) for name in ("double in Doubled", "to in Doubled")] == [
        (1, wide), (1, narrow),
    ]  # fmt: skip
    assert {rows[name].reason for name in ("double in Doubled", "to in Doubled", "double", "to")} == {"written"}
    on = take(model, data)
    assert on.casts == 3 + 1 + 1 + 2  # the linear layer's three and their gradients' two, the loss's and its gradient's
    assert rows["Doubled (autograd.Function)"].backward_compute == ("fp64",)


def test_casts_of_gradients_where_autocast_is_off_are_not_autocasts(take: Callable[..., DtypeMap]) -> None:
    model = nn.Linear(4, 3)
    made = take(model, batch(), lambda output, target: (output * torch.ones(3, dtype=torch.float64)).sum(), autocast="fp32")
    assert sum(row.backward_casts for row in made.rows) == 1
    assert made.casts == made.cast_bytes == 0


def test_what_autocast_leaves_alone(take: Callable[..., DtypeMap]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4).double()
            self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inner(x.double()).sin()
            return (x.to(torch.complex64) @ self.weight).abs()

    made = take(Net(), batch())
    rows = {row.operator: row for row in made.rows}
    assert (rows["linear"].compute, rows["linear"].reason, rows["linear"].on_cuda) == (("fp64",), "through", None)
    assert rows["linear"].why == "autocast leaves fp64 alone, whatever list of CPU's linear is on"
    assert (rows["matmul"].compute, rows["matmul"].reason, rows["matmul"].on_cuda) == (("complex64",), "through", None)
    assert rows["matmul"].why == "autocast leaves complex64 alone, whatever list of CPU's matmul is on"
    assert rows["sin"].why == "on none of CPU's lists: it takes what comes"
