"""Layers kept in FP32: the same bits as the layer written by hand, and no trace afterwards."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

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
