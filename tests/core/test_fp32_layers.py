"""Layers kept in FP32: the same bits as the layer written by hand, and no trace afterwards."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from amp_widgets.core import class_exchange
from amp_widgets.core.checkpointing import Checkpointing
from amp_widgets.core.fp32_layers import Fp32Layers
from amp_widgets.errors import LayerError, ModelError, SessionClosedError, SettingsError
from amp_widgets.session import AmpSession


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


class Scores(nn.Module):
    """Softmax of a product: what people keep in FP32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        scores = self.query(x) @ self.key(x).transpose(-1, -2) * scale
        return self.dropout(torch.softmax(scores, -1)) @ x


class ByHand(nn.Module):
    """The same layer as a user writes it to be in FP32."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return self.layer(x.float(), **kwargs)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.scores = Scores(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.scores(self.norm(self.embed(x)), scale=0.5))


def batch() -> torch.Tensor:
    return torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, dtype: torch.dtype = torch.bfloat16, *, enabled: bool = True) -> dict[str, torch.Tensor]:
    """Output, gradients and the random state after a step, in this order of layers."""
    torch.manual_seed(7)
    for parameter in model.parameters():
        parameter.grad = None
    with torch.autocast("cpu", dtype=dtype, enabled=enabled):
        output = model(batch())
        loss = output.float().square().mean()
    loss.backward()
    seen = {"output": output.detach(), "random": torch.get_rng_state()}
    return seen | {f"gradient {at}": p.grad.clone() for at, p in enumerate(model.parameters()) if p.grad is not None}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype, name
        assert torch.equal(one[name], other[name]), name


def formats(layer: nn.Module, run: Any) -> list[tuple[torch.dtype, torch.dtype]]:
    """Of inputs and outputs of the submodules that compute."""
    seen = []
    handles = [
        inner.register_forward_hook(lambda _m, args, out: seen.append((args[0].dtype, out.dtype)))
        for inner in layer.modules()
        if isinstance(inner, nn.Linear)
    ]
    run()
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layer_computes_what_the_same_layer_written_by_hand_does(dtype: torch.dtype) -> None:
    model = Net()
    by_hand = copy.deepcopy(model)
    by_hand.scores = ByHand(by_hand.scores)  # type: ignore[assignment]
    plain = step(model, dtype)
    Fp32Layers(model).apply(["scores"])
    kept = step(model, dtype)
    assert_same(kept, step(by_hand, dtype))
    assert not torch.equal(kept["output"], plain["output"])  # else the test could not fail


def test_inside_it_all_is_fp32_and_its_output_stays_so() -> None:
    model = Net()
    fp32 = Fp32Layers(model)
    outputs: list[torch.dtype] = []
    model.scores.register_forward_hook(lambda _m, _a, out: outputs.append(out.dtype))
    half, full = torch.bfloat16, torch.float32
    assert formats(model.scores, lambda: step(model)) == [(half, half), (half, half)]
    fp32.apply(["scores"])
    assert formats(model.scores, lambda: step(model)) == [(full, full), (full, full)]
    assert outputs == [half, full]


def test_layer_norm_in_fp32() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(batch()).dtype == torch.bfloat16  # on a CPU it takes what comes
        Fp32Layers(model).apply(["1"])
        assert model(batch()).dtype == torch.float32
        hidden = model[0](batch())
    assert torch.equal(model[1](hidden.float()), nn.functional.layer_norm(hidden.float(), (8,), model[1].weight, model[1].bias))


def test_without_autocast_nothing_changes() -> None:
    model = Net()
    plain = step(model, enabled=False)
    Fp32Layers(model).apply(["**"])
    assert_same(step(model, enabled=False), plain)
    assert model.norm.double()(torch.ones(8, dtype=torch.float64)).dtype == torch.float64


def test_off_again_there_is_no_trace() -> None:
    model = Net()
    never = step(copy.deepcopy(model))
    before = {name: (id(vars(m)), type(m), dict(vars(m))) for name, m in model.named_modules()}
    fp32 = Fp32Layers(model)
    fp32.apply(["scores", "norm"])
    assert fp32.active == ("norm", "scores")
    step(model)
    fp32.apply([])
    assert fp32.active == ()
    assert {name: (id(vars(m)), type(m), dict(vars(m))) for name, m in model.named_modules()} == before
    assert_same(step(model), never)


def test_names_repr_copies_and_pickles_are_as_before() -> None:
    model = Net()
    facts = repr(model), list(model.state_dict()), [name for name, _ in model.named_parameters()]
    Fp32Layers(model).apply(["scores", "norm"])
    assert (repr(model), list(model.state_dict()), [name for name, _ in model.named_parameters()]) == facts
    assert isinstance(model.scores, Scores)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)):
        assert type(other.scores) is Scores
        assert type(other.norm) is nn.LayerNorm
        assert Fp32Layers(other).active == ()


def test_an_input_given_several_times_stays_one_tensor() -> None:
    same: list[bool] = []

    class Attention(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, *, v: list[torch.Tensor]) -> torch.Tensor:
            same.append(q is k and k is v[0])
            assert (q.dtype, v[1].dtype, v[2].dtype) == (torch.float32, torch.int64, torch.float64)
            return q

    model = nn.Sequential(Attention())
    Fp32Layers(model).apply(["0"])
    x = torch.ones(2, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model[0](x, x, v=[x, torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.float64)]).dtype == torch.float32
    assert same == [True]


@pytest.mark.parametrize("order", ["fp32 first", "checkpoint first"])
@pytest.mark.parametrize("off_first", ["fp32", "checkpoint"])
def test_together_with_checkpointing_in_both_orders(order: str, off_first: str) -> None:
    model = Net()
    plain, by_hand = copy.deepcopy(model), copy.deepcopy(model)
    by_hand.scores = ByHand(by_hand.scores)  # type: ignore[assignment]
    expected = step(by_hand)
    fp32, checkpointing = Fp32Layers(model), Checkpointing(model)
    switches = [fp32, checkpointing] if order == "fp32 first" else [checkpointing, fp32]
    for switch in switches:
        switch.apply(["scores"])
    assert fp32.active == checkpointing.active == ("scores",)
    seen: list[torch.dtype] = []
    model.scores.query.register_forward_hook(lambda _m, _a, out: seen.append(out.dtype))
    assert_same(step(model), expected)
    assert seen == [torch.float32] * 2  # once more in the recompute
    assert type(copy.deepcopy(model).scores) is Scores
    if off_first == "fp32":
        fp32.close()
        assert checkpointing.active == ("scores",)
        assert_same(step(model), step(plain))
        checkpointing.close()
    else:
        checkpointing.close()
        assert fp32.active == ("scores",)
        assert_same(step(model), expected)
        fp32.close()
    assert type(model.scores) is Scores
    assert_same(step(model), step(plain))


@pytest.mark.parametrize(("checkpointed", "kept"), [("scores", "scores.query"), ("scores.query", "scores")])
def test_a_layer_around_a_checkpointed_one_and_inside_one(checkpointed: str, kept: str) -> None:
    model = Net()
    Fp32Layers(model).apply([kept])
    expected = step(model)
    Checkpointing(model).apply([checkpointed])
    assert_same(step(model), expected)


def test_switched_between_forward_and_backward_the_graph_is_not_affected() -> None:
    model = Net()
    expected = step(model)
    fp32, checkpointing = Fp32Layers(model), Checkpointing(model)
    checkpointing.apply(["scores"])
    torch.manual_seed(7)
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(batch())
        loss = output.float().square().mean()
    fp32.apply(["scores"])
    loss.backward()
    assert all(torch.equal(p.grad, expected[f"gradient {at}"]) for at, p in enumerate(model.parameters()) if p.grad is not None)
    assert fp32.active == ("scores",)


@pytest.mark.parametrize("on_first", [True, False])
def test_a_parametrized_layer(on_first: bool) -> None:
    model = Net()
    fp32, checkpointing = Fp32Layers(model), Checkpointing(model)
    if not on_first:
        parametrizations.weight_norm(model.head)
    plain_class = type(model.head)
    fp32.apply(["head"])
    checkpointing.apply(["head"])
    if on_first:
        parametrizations.weight_norm(model.head)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(batch()).dtype == torch.float32
    assert fp32.active == checkpointing.active == ("head",)
    fp32.apply([])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(batch()).dtype == torch.bfloat16
    assert checkpointing.active == ("head",)
    checkpointing.close()
    if not on_first:
        assert type(model.head) is plain_class
    parametrize.remove_parametrizations(model.head, "weight")
    assert type(model.head) is nn.Linear


def test_what_cannot_be_kept_is_refused_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleDict({"halved": nn.Linear(2, 2).bfloat16(), "list": nn.ModuleList([nn.ReLU()]), "lazy": nn.LazyLinear(2)})
    model["fine"] = nn.Linear(2, 2)
    fp32 = Fp32Layers(model)
    fp32.apply(["fine"])
    for name, words in {
        "halved": r"fp32_layers: cannot keep in FP32: layer 'halved' \(Linear\): its own parameters are bfloat16: convert them",
        "list": r"layer 'list' \(ModuleList\).* has no forward pass of its own; did you mean 'list\.\*'",
        "lazy": "a lazy module",
    }.items():
        with pytest.raises(SettingsError, match=words):
            fp32.apply(["list.0", name])
        assert fp32.active == ("fine",)
    with pytest.raises(LayerError, match="fp32_layers: no layer matches 'fein'; did you mean 'fine'"):
        fp32.resolve(["fein"])
    with pytest.raises(LayerError, match="names the whole model, for all of which autocast='fp32' does the same"):
        fp32.resolve([""])
    with pytest.raises(ModelError):
        Fp32Layers("model")  # type: ignore[arg-type]

    def interrupted(module: nn.Module, kind: type) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(class_exchange, "set_class", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fp32.apply(["list.0"])
    assert fp32.active == ("fine",)


def test_closed_it_switches_nothing_and_holds_no_model() -> None:
    model = Net()
    fp32 = Fp32Layers(model)
    fp32.apply(["norm"])
    layer = model.norm
    model.norm = nn.LayerNorm(8)  # it has left the model
    fp32.close()
    assert type(layer) is nn.LayerNorm
    gone = weakref.ref(model)
    del model
    assert gone() is None
    with pytest.raises(SessionClosedError, match="fp32_layers: the session was closed"):
        fp32.apply([])


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiled_model_can_be_switched() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8))
    compiled = torch.compile(model, backend="eager")
    fp32 = Fp32Layers(compiled)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compiled(batch()).dtype == torch.bfloat16
        fp32.apply(["1"])
        assert compiled(batch()).dtype == torch.float32
        fp32.close()
        assert compiled(batch()).dtype == torch.bfloat16


def test_requested_of_a_session_it_is_in_force_from_the_next_step_and_gone_after_close() -> None:
    model = Net()
    with AmpSession(model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
        session.request(autocast="bf16", fp32_layers="sc*", checkpointed=["scores", "norm"])
        assert session.pending is not None
        assert session.pending.changes["fp32_layers"] == ("scores",)
        assert session.settings.fp32_layers == ()
        session.apply_pending()
        assert session.settings.fp32_layers == Fp32Layers(model).active == ("scores",)
        assert session.settings.checkpointed == Checkpointing(model).active == ("norm", "scores")
        reason = session.history.events("applied")[-1].reason
        assert reason == "autocast bf16, 1 layer kept in FP32, 2 layers checkpointed"
        with pytest.raises(SettingsError, match="no layer matches"):
            session.request(fp32_layers=["nowhere"])
    assert Fp32Layers(model).active == Checkpointing(model).active == ()


def test_a_request_for_both_is_met_in_whole_or_not_at_all() -> None:
    model = Net()
    with AmpSession(model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
        session.request(fp32_layers=["norm"], checkpointed=["norm"])
        session.apply_pending()
        session.request(autocast="bf16", fp32_layers=["scores"], checkpointed=["scores"])
        model.scores.bfloat16()  # from now on it cannot be kept in FP32
        session.apply_pending()
        assert "its own parameters are bfloat16" in session.history.events("rejected")[-1].reason
        assert session.settings.autocast == "fp32"
        assert session.settings.fp32_layers == session.settings.checkpointed == ("norm",)
        assert Fp32Layers(model).active == Checkpointing(model).active == ("norm",)


# ---- what gets in otherwise than as a tensor ----


@dataclass
class Data:
    x: Any
    y: Any = None


@dataclass(frozen=True, slots=True)
class FrozenData:
    x: torch.Tensor


class Pair(NamedTuple):
    x: torch.Tensor
    y: int


class Plain:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class ReadsX(nn.Module):
    """Computes on what is in its input; without one, on its own attribute."""

    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.functional = functional
        self.x: Any = None

    def forward(self, holder: Any = None) -> torch.Tensor:
        x = (self if holder is None else holder).x
        return x @ self.inner.weight.T if self.functional else self.inner(x)


class Holding(nn.Module):
    def __init__(self, wrap: Callable[[torch.Tensor], Any] | None, functional: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.reads = ReadsX(functional)
        self.wrap = wrap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if self.wrap is None:
            self.reads.x = hidden
            return self.reads()  # type: ignore[no-any-return]
        return self.reads(self.wrap(hidden))  # type: ignore[no-any-return]


class PlainlyHeld(nn.Module):
    """The same by hand."""

    def __init__(self, model: Holding) -> None:
        super().__init__()
        self.first, self.reads = model.first, model.reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        with torch.autocast("cpu", enabled=False):
            return self.reads(Plain(hidden.float()))  # type: ignore[no-any-return]


WRAPS: dict[str, Callable[[torch.Tensor], Any] | None] = {
    "dataclass": Data,
    "frozen dataclass with slots": FrozenData,
    "dataclass in a dataclass": lambda x: SimpleNamespace(x=x, more=Data(Data(x))),
    "named tuple": lambda x: Pair(x, 1),
    "namespace": lambda x: SimpleNamespace(x=x),
    "plain object": Plain,
    "object with slots": Slotted,
    "attribute": None,
}


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wrap", WRAPS)
def test_half_tensors_are_cast_wherever_they_are(wrap: str, dtype: torch.dtype, functional: bool) -> None:
    model = Holding(WRAPS[wrap], functional)
    by_hand = PlainlyHeld(copy.deepcopy(model))
    Fp32Layers(model).apply(["reads"])
    kept = step(model, dtype)
    assert kept["output"].dtype == torch.float32
    assert_same(kept, step(by_hand, dtype))
    model.eval()
    assert_same(step(model, dtype), step(by_hand.eval(), dtype))


def test_containers_stay_what_they_are() -> None:
    seen: list[Any] = []

    class Looks(nn.Module):
        def forward(self, *args: Any) -> None:
            seen[:] = args

    model = nn.Sequential(Looks())
    Fp32Layers(model).apply(["0"])
    half, full = torch.ones(2, dtype=torch.bfloat16), torch.ones(2)
    held, untouched = Data(half, [half]), [{"x": full}, Data(full), "text", model]
    whole: list[Any] = [half]
    whole.append(whole)  # it holds itself
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model[0](held, held, untouched, half, whole)
    first, second, third, fourth, fifth = seen
    assert first is second  # one object stays one, and one tensor
    assert (type(first), first.x is first.y[0] is fourth, first.x.dtype) == (Data, True, torch.float32)
    assert third is untouched
    assert fifth[0] is fourth
    assert held.x is half  # the user's own are not touched
    assert held.y[0] is whole[0] is half


def test_what_a_layer_does_to_a_container_is_not_lost() -> None:
    class Writes(nn.Module):
        def forward(self, *, to_list: list[Any], to_dict: dict[str, Any], held: Data, seen: list[Any]) -> None:
            seen.append(1)
            to_list.append(to_list[0] * 2)
            to_dict["new"] = to_dict.pop("x") + to_dict["y"]
            held.y = held.x * 3

    model = nn.Sequential(Writes())
    Fp32Layers(model).apply(["0"])
    half = torch.ones(2, dtype=torch.bfloat16)
    to_list, to_dict, held, seen = [half], {"x": half, "y": half}, Data(half), list[int]()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model[0](to_list=to_list, to_dict=to_dict, held=held, seen=seen)
    assert seen == [1]
    assert (to_list[0] is half, to_list[1].tolist(), len(to_list)) == (True, [2, 2], 2)
    assert (list(to_dict), to_dict["y"] is half, to_dict["new"].tolist()) == (["y", "new"], True, [2, 2])
    assert (held.x is half, held.y.tolist(), held.y.dtype) == (True, [3, 3], torch.float32)


def test_what_is_overwritten_keeps_its_format_and_its_identity() -> None:
    class Caches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cache = torch.zeros(3, 2, dtype=torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.cache.index_add_(0, torch.tensor([1]), x)
            return x

    model = nn.Sequential(Caches())
    cache = model[0].cache
    Fp32Layers(model).apply(["0"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model[0](torch.ones(1, 2, dtype=torch.bfloat16))
    assert model[0].cache is cache
    assert cache.tolist() == [[0, 0], [1, 1], [0, 0]]


def test_evaluation_takes_the_fast_path_that_it_took_before() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)).eval()
    by_hand = nn.Sequential(model[0], ByHand(copy.deepcopy(model[1]))).eval()
    Fp32Layers(model).apply(["1"])
    called: list[str] = []
    model[1].linear1.register_forward_hook(lambda *_: called.append("linear1"))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(batch()), by_hand(batch()))
    assert called in ([], ["linear1"])
    calls: list[Any] = []
    with pytest.MonkeyPatch.context() as patch, torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        fast = torch._transformer_encoder_layer_fwd
        model[1].linear1._forward_hooks.clear()
        patch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *args: (calls.append(1), fast(*args))[1])
        model(batch())
    assert calls == [1]


def test_an_error_about_formats_names_the_layer_and_says_what_to_do() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 8)
            self.x: list[torch.Tensor] = []

        def forward(self) -> torch.Tensor:
            return self.lstm(self.x[0])[0]  # type: ignore[no-any-return]

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 8)
            self.block = nn.ModuleDict({"kept": Recurrent()})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = self.block["kept"]
            kept.x = [self.first(x)]
            return kept()  # type: ignore[no-any-return]

    model = Outer()
    with AmpSession(model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
        session.request(autocast="bf16", fp32_layers=["block.kept"])
        data = [(batch(), torch.zeros(4, 5, 8))]
        session.fit(data, nn.functional.mse_loss)
        with pytest.raises(ValueError, match="dtype") as caught:
            session.wait()
        notes = [note for note in caught.value.__notes__ if note.startswith("This comes from layer 'block.kept' (Recurrent)")]
        assert len(notes) == 1
        assert "take 'block.kept' out of fp32_layers" in notes[0]
        assert "which fp32_layers keeps in FP32" in (session.dashboard_state().error or "")
        session.request(fp32_layers=[])
        session.fit(data, nn.functional.mse_loss)
        session.wait()  # as before


def test_other_errors_are_left_alone() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ torch.ones(7, 7)

    model = nn.Sequential(Fails())
    Fp32Layers(model).apply(["0"])
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        model(batch().bfloat16())
    assert not hasattr(caught.value, "__notes__")


# ---- layers that are never called ----


def attention() -> nn.Module:
    return nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2), "mlp": nn.Linear(8, 8)})


def test_the_last_layer_of_attention_is_refused_and_globs_pass_over_it() -> None:
    model = attention()
    for switch in (Fp32Layers(model), Checkpointing(model)):
        with pytest.raises(
            SettingsError, match=r"layer 'attn\.out_proj' .* it is never called: nn\.MultiheadAttention computes with"
        ):
            switch.apply(["attn.out_proj"])
        with pytest.raises(SettingsError, match="it is never called"):
            switch.apply(["attn.*"])
        assert switch.resolve(["**"]) == ("attn", "mlp")
    assert next(layer for layer in Checkpointing(model).layers if layer.name == "attn.out_proj").why_not is not None


def test_a_layer_that_is_not_called_is_remarked_on() -> None:
    class Borrows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.called, self.borrowed = nn.Linear(6, 6), nn.Linear(6, 6)
            self.calls_it = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.called(x)
            return self.borrowed(x) if self.calls_it else nn.functional.linear(x, self.borrowed.weight)  # type: ignore[no-any-return]

    model = Borrows()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with AmpSession(model, optimizer) as session:

        def one_step() -> tuple[str, ...]:
            with session.autocast():
                loss = model(batch()).float().square().mean()
            session.scaler.scale(loss).backward()
            session.scaler.step(optimizer)
            session.scaler.update()
            return session.dashboard_state().notes

        assert one_step() == ()
        session.request(autocast="bf16", fp32_layers=["called", "borrowed"])
        session.apply_pending()
        assert session.dashboard_state().notes == ()  # no step with it yet
        (note,) = one_step()
        assert note.startswith("Kept in FP32, but not called in step 1: borrowed. ")
        model.calls_it = True
        assert one_step() == ()
        model.calls_it = False
        assert "step 3: borrowed" in one_step()[0]
        session.request(fp32_layers=["called"])
        session.apply_pending()
        assert session.dashboard_state().notes == ()


# ---- compiled ----


def test_the_compiler_has_nothing_to_warn_of() -> None:
    torch._dynamo.reset()
    model = Holding(Data)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    fp32 = Fp32Layers(compiled)
    fp32.apply(["reads"])
    by_hand = PlainlyHeld(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = step(compiled)
    fp32.close()
    assert_same(kept, step(by_hand))
