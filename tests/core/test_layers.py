"""The list of layers, and names and globs resolved to them."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from amp_widgets.core.checkpointing import Checkpointing
from amp_widgets.core.layers import Layer, list_layers, resolve_layers
from amp_widgets.errors import CheckpointingError, LayerError, SettingsError


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)

    def forward(self, x):
        return self.out(self.qkv(x)[..., :4])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x):
        return self.mlp(self.attn(x))


class GPT(nn.Module):
    def __init__(self, depth: int = 12) -> None:
        super().__init__()
        self.wte = nn.Embedding(9, 4)
        self.layers = nn.ModuleList([Block() for _ in range(depth)])
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, x):
        x = self.wte(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_layers_have_names_types_and_counts_in_the_models_order() -> None:
    layers = list_layers(GPT(1))
    block = 4 * 12 + 12 + 4 * 4 + 4 + 4 * 8 + 8 + 8 * 4 + 4
    assert [(layer.name, layer.type, layer.parameters) for layer in layers] == [
        ("wte", "Embedding", 36),
        ("layers", "ModuleList", block),
        ("layers.0", "Block", block),
        ("layers.0.attn", "Attention", 80),
        ("layers.0.attn.qkv", "Linear", 60),
        ("layers.0.attn.out", "Linear", 20),
        ("layers.0.mlp", "Sequential", 76),
        ("layers.0.mlp.0", "Linear", 40),
        ("layers.0.mlp.1", "GELU", 0),
        ("layers.0.mlp.2", "Linear", 36),
        ("head", "Linear", 36),
    ]
    assert [layer.name for layer in layers if layer.structural] == ["layers"]
    assert [layer.name for layer in layers if layer.why_not is not None] == ["layers"]


def test_parameters_shared_within_a_layer_count_once() -> None:
    model = nn.Sequential(GPT(1), GPT(1))
    counts = {layer.name: layer.parameters for layer in list_layers(model)}
    assert counts["0"] == sum(p.numel() for p in model[0].parameters()) == counts["1"]
    model[1] = model[0]
    assert {layer.name: layer.parameters for layer in list_layers(model)}["0"] == counts["0"]


def test_the_list_is_read_anew_each_time() -> None:
    model = GPT(2)
    checkpointing = Checkpointing(model)
    assert "extra" not in {layer.name for layer in checkpointing.layers}
    model.extra = nn.Linear(4, 4)
    model.layers.append(Block())
    names = [layer.name for layer in checkpointing.layers]
    assert names[-1] == "extra"
    assert "layers.2" in names
    checkpointing.apply(["layers.2", "extra"])
    described = {layer.name: layer for layer in checkpointing.layers}
    assert described["layers.2"].type == "Block"  # not a class of ours
    checkpointing.close()


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["layers.0"], ["layers.0"]),
        ("layers.1", ["layers.1"]),
        (["layers.*"], ["layers.0", "layers.1"]),
        (["layers.1", "layers.*", "layers.0"], ["layers.0", "layers.1"]),
        (["head", "wte"], ["wte", "head"]),
        (["*"], ["wte", "head"]),
        (["layers.*.attn"], ["layers.0.attn", "layers.1.attn"]),
        (["*.*.a*"], ["layers.0.attn", "layers.1.attn"]),
        (["**.attn"], ["layers.0.attn", "layers.1.attn"]),
        (["**.mlp.[02]"], [f"layers.{i}.mlp.{j}" for i in (0, 1) for j in (0, 2)]),
        (["layers.[!0]"], ["layers.1"]),
        (["layers.?.mlp.1"], ["layers.0.mlp.1", "layers.1.mlp.1"]),
        (["layers.1.attn.**"], ["layers.1.attn", "layers.1.attn.qkv", "layers.1.attn.out"]),
        (["**.out", "h*"], ["layers.0.attn.out", "layers.1.attn.out", "head"]),
        (["**.**.wte"], ["wte"]),
        ([], []),
        (iter(["head"]), ["head"]),
    ],
)
def test_names_and_globs(patterns: Any, names: list[str]) -> None:
    assert resolve_layers(GPT(2), patterns) == tuple(names)


def test_two_stars_reach_every_layer_that_has_a_forward() -> None:
    model = GPT(2)
    assert resolve_layers(model, ["**"]) == tuple(name for name, _ in model.named_modules() if name not in ("", "layers"))


def test_a_name_with_glob_characters_in_it_is_taken_as_it_is() -> None:
    model = nn.Sequential()
    model.add_module("a*", nn.Linear(1, 1))
    model.add_module("ab", nn.Linear(1, 1))
    assert resolve_layers(model, ["a*"]) == ("a*",)
    assert resolve_layers(model, ["a[b]"]) == ("ab",)


def test_a_second_name_of_a_shared_module_means_the_first() -> None:
    model = nn.ModuleDict({"encoder": Block(), "decoder": Attention()})
    model["decoder"].shared = model["encoder"]
    assert "decoder.shared" not in {layer.name for layer in list_layers(model)}
    assert resolve_layers(model, ["decoder.shared"]) == ("encoder",)
    assert resolve_layers(model, ["decoder.shared.mlp.0"]) == ("encoder.mlp.0",)
    assert resolve_layers(model, ["decoder.*"]) == ("encoder", "decoder.qkv", "decoder.out")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("layer.*", "checkpointed: no layer matches 'layer.*'; did you mean 'layers.*' (12 layers)?"),
        ("layer.*.attn", "checkpointed: no layer matches 'layer.*.attn'; did you mean 'layers.*.attn' (12 layers)?"),
        ("layers.12", "checkpointed: no layer matches 'layers.12'; did you mean 'layers.2', 'layers.1' or 'layers.11'?"),
        ("heads", "checkpointed: no layer matches 'heads'; did you mean 'head'?"),
        ("zzz", "checkpointed: no layer matches 'zzz'; this model has 98 layers, such as 'wte', 'layers.0' and 'layers.0.attn'"),
        ("z?z", "checkpointed: no layer matches 'z?z'; this model has 98 layers, such as 'wte', 'layers.0' and 'layers.0.attn'"),
        ("laye*", "checkpointed: 'laye*' matches only layers that hold others and have no forward pass of their own, such as "
                  "'layers' (ModuleList); did you mean 'laye*.*'?"),
        ("", "checkpointed: '' names the whole model, which cannot be checkpointed: its recompute would hold all that was saved. "
             "Name layers inside it; this model has 98 layers, such as 'wte', 'layers.0' and 'layers.0.attn'"),
        (".", "checkpointed: '.' names the whole model"),
        (3, "checkpointed: got 3, expected the name of a layer or a glob, such as 'layers.*'"),
        (None, "checkpointed: got None, expected the name of a layer"),
    ],
)  # fmt: skip
def test_what_matches_nothing_is_explained(pattern: Any, message: str) -> None:
    with pytest.raises(LayerError) as caught:
        resolve_layers(GPT(), ["head", pattern])
    assert str(caught.value).startswith(message)
    assert isinstance(caught.value, SettingsError)


def test_a_model_without_layers_says_so() -> None:
    with pytest.raises(LayerError, match="this model has no layer inside it"):
        resolve_layers(nn.Linear(2, 2), ["linear"])
    assert list_layers(nn.Linear(2, 2)) == ()


class Holder(nn.Module):
    """With one layer, and calls it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


def replaced(*, accelerate: bool) -> nn.Module:
    module = nn.Linear(2, 2)
    module.forward = lambda *args: args[0]  # type: ignore[method-assign]
    if accelerate:
        module._hf_hook = object()  # type: ignore[assignment]
    return module


class FSDPLinear(nn.Linear):
    """Looks like what ``fully_shard`` makes of a module: a class with FSDPModule among its bases."""


class DTensor(torch.Tensor):
    """Looks like torch's."""


def distributed() -> nn.Module:
    linear = nn.Linear(2, 2)
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(DTensor))
    return linear


FSDPLinear.__bases__ = (type("FSDPModule", (nn.Linear,), {"__module__": "torch.distributed.fsdp._fully_shard._fully_shard"}),)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "reason", "around"),
    [
        (lambda: torch.jit.script(nn.Linear(2, 2)), "it is a TorchScript module", True),
        (lambda: torch.jit.script(nn.BatchNorm1d(2)), "it is a TorchScript module", False),
        (lambda: torch.fx.symbolic_trace(nn.Linear(2, 2)), "it is a torch.fx GraphModule", True),
        (lambda: replaced(accelerate=True), "its forward was replaced on the instance (by accelerate)", True),
        (lambda: replaced(accelerate=False), "its forward was replaced on the instance (by other code)", True),
        (lambda: nn.LazyLinear(2), "it has parameters without a shape yet (a lazy module)", False),
        (lambda: nn.LazyBatchNorm1d(), "it has parameters without a shape yet (a lazy module)", False),
        (distributed, "its parameters are sharded over several processes", False),
        (lambda: FSDPLinear(2, 2), "its parameters are sharded by FSDP", False),
        (lambda: nn.DataParallel(nn.Linear(2, 2)), "it is a DataParallel wrapper: choose layers inside it", True),
    ],
)  # fmt: skip
def test_what_cannot_be_recomputed_safely_is_refused_with_the_reason(make: Any, reason: str, around: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Holder(make()))
    layers = {layer.name: layer for layer in list_layers(model)}
    assert (layers["1.layer"].why_not or "").startswith(reason)
    assert not layers["1.layer"].structural
    assert (layers["1"].why_not is None) == around  # whether a layer around it can be
    checkpointing = Checkpointing(model)
    for patterns in (["1.layer"], ["0", "1.*"], ["**"]):
        with pytest.raises(CheckpointingError) as caught:
            checkpointing.apply(patterns)
        assert f"layer '1.layer' ({layers['1.layer'].type}): {reason}" in str(caught.value)
        assert str(caught.value).startswith("checkpointed: cannot checkpoint layer ")
    assert checkpointing.active == ()


def test_many_refusals_are_cut_short() -> None:
    model = nn.Sequential(*(nn.LazyLinear(2) for _ in range(9)))
    with pytest.raises(CheckpointingError, match=r"layer '2' \(LazyLinear\): .*; and 6 more; leave them out$"):
        resolve_layers(model, ["*"])


def test_a_lazy_layer_can_be_checkpointed_once_it_has_a_shape() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.Tanh())
    model(torch.ones(2, 5))
    assert [(layer.type, layer.parameters, layer.why_not) for layer in list_layers(model)] == [
        ("Linear", 18, None),
        ("Tanh", 0, None),
    ]


def test_containers_and_torchs_machinery_are_structural() -> None:
    model = nn.Module()
    model.list = nn.ModuleList([nn.ModuleDict({"a": nn.Tanh()})])
    model.weights = nn.ParameterList([nn.Parameter(torch.ones(2))])
    model.normed = parametrizations.spectral_norm(nn.Linear(2, 2))
    layers = {layer.name: layer for layer in list_layers(model)}
    assert [name for name, layer in layers.items() if layer.structural] == [
        "list",
        "list.0",
        "weights",
        "normed.parametrizations",
        "normed.parametrizations.weight",
    ]
    assert layers["weights"].parameters == 2
    assert layers["normed"].type == "ParametrizedLinear"
    assert resolve_layers(model, ["*"]) == ("normed",)
    with pytest.raises(CheckpointingError, match=r"layer 'list' \(ModuleList\): it only holds other modules .*mean 'list\.\*'\?"):
        resolve_layers(model, ["list"])


def test_wrappers_of_the_model_are_seen_through() -> None:
    inner = GPT(2)
    names = [layer.name for layer in list_layers(inner)]
    parallel = nn.DataParallel(inner)
    compiled = torch.compile(inner, backend="eager")
    both = torch.compile(parallel, backend="eager")
    assert isinstance(compiled, nn.Module)
    assert isinstance(both, nn.Module)
    for model, prefixes in ((parallel, ["module."]), (compiled, ["_orig_mod."]), (both, ["_orig_mod.module.", "module."])):
        assert [layer.name for layer in list_layers(model)] == names
        for prefix in ["", *prefixes]:
            assert resolve_layers(model, [f"{prefix}layers.*", f"{prefix}head"]) == ("layers.0", "layers.1", "head")
    with pytest.raises(LayerError, match=r"no layer matches 'module\.head'; this model has 18 layers"):
        resolve_layers(inner, ["module.head"])


def test_a_compiled_layer_is_seen_through() -> None:
    model = GPT(2)
    names = [layer.name for layer in list_layers(model)]
    model.layers[1] = cast(nn.Module, torch.compile(model.layers[1], backend="eager"))
    assert [layer.name for layer in list_layers(model)] == names
    assert list_layers(model)[names.index("layers.1")].type == "Block"
    assert resolve_layers(model, ["layers.1._orig_mod.attn", "layers.1"]) == ("layers.1", "layers.1.attn")


def test_a_users_own_layer_called_module_keeps_its_name() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Sequential(nn.Linear(2, 2))

    assert resolve_layers(Own(), ["module", "module.0"]) == ("module", "module.0")
    assert resolve_layers(nn.DataParallel(Own()), ["module.0"]) == ("module.0",)


def test_a_layer_is_a_plain_value() -> None:
    a, b = (list_layers(nn.Sequential(nn.Linear(2, 3)))[0] for _ in range(2))
    assert a == b == Layer(name="0", type="Linear", parameters=9, why_not=None, structural=False)
    assert hash(a) == hash(b)
