"""Switching layers on and off: what of the model changes (nothing that can be seen), and what is refused."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from amp_widgets.core import class_exchange as module_under_test
from amp_widgets.core.checkpointing import Checkpointing
from amp_widgets.errors import CheckpointingError, LayerError, ModelError, SessionClosedError

T = TypeVar("T")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Block(nn.Module):
    """One of a user's own."""

    def __init__(self, width: int, *, slope: float = 0.1) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.slope = slope

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Says what it does."""
        return nn.functional.leaky_relu(self.norm(self.linear(x)), self.slope) * scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 6)
        self.layers = nn.ModuleList([Block(6) for _ in range(3)])
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Tanh(), nn.Linear(6, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


ALL = ["embed", "layers.*", "layers.*.norm", "head", "head.*"]


def net(*, on: bool = True) -> tuple[Net, Checkpointing]:
    torch.manual_seed(0)
    model = Net()
    checkpointing = Checkpointing(model)
    if on:
        checkpointing.apply(checkpointing.resolve(ALL))
    return model, checkpointing


def step(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    model(torch.randn(5, 4)).pow(2).mean().backward()
    return [*(p.grad.clone() for p in model.parameters() if p.grad is not None), *(b.clone() for b in model.buffers())]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(map(torch.equal, a, b))


def assert_untouched(model: nn.Module) -> None:
    """No class, attribute or hook of ours anywhere in it."""
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            assert not any("amp_widgets" in key for key in vars(kind)), name
            functions = [value for value in vars(kind).values() if isinstance(value, types.FunctionType)]
            assert not any(function.__globals__.get("__name__", "").startswith("amp_widgets") for function in functions), name
        assert not any("amp_widgets" in key for key in vars(module)), name


def test_a_model_looks_the_same_while_layers_are_on() -> None:
    model, checkpointing = net()
    plain, _ = net(on=False)
    assert len(checkpointing.active) == 11
    assert repr(model) == repr(plain)
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [set(vars(a)) for a in model.modules()] == [set(vars(b)) for b in plain.modules()]
    assert isinstance(model.layers[0], Block)
    kind = type(model.layers[0])
    assert (kind.__name__, kind.__qualname__, kind.__module__, kind.__doc__) == (
        "Block",
        "Block",
        Block.__module__,
        Block.__doc__,
    )
    assert inspect.signature(model.layers[0].forward) == inspect.signature(plain.layers[0].forward)
    assert inspect.signature(kind) == inspect.signature(Block)
    assert model.layers[0].forward.__doc__ == "Says what it does."


def test_close_leaves_no_trace() -> None:
    model, checkpointing = net()
    before = [sorted(vars(module)) for module in model.modules()]
    step(model)
    checkpointing.close()
    assert_untouched(model)
    assert [sorted(vars(module)) for module in model.modules()] == before
    assert type(model.layers[0]) is Block
    assert type(model.embed) is nn.Linear
    checkpointing.close()  # twice is no error
    assert checkpointing.active == ()
    assert checkpointing.layers == ()
    assert not checkpointing.compiled
    for use in (lambda: checkpointing.apply([]), lambda: checkpointing.resolve(["embed"])):
        with pytest.raises(SessionClosedError, match="closed"):
            use()


def test_close_reaches_layers_that_have_left_the_model() -> None:
    model, checkpointing = net()
    gone = model.embed
    model.embed = nn.Linear(4, 6)
    assert "embed" not in checkpointing.active
    checkpointing.apply(["layers.0"])
    assert type(gone) is nn.Linear
    checkpointing.apply(["embed"])
    second, model.embed = model.embed, nn.Linear(4, 6)
    checkpointing.close()
    assert type(second) is nn.Linear


def test_apply_changes_only_what_differs() -> None:
    model, checkpointing = net(on=False)
    checkpointing.apply(["layers.0", "head"])
    kinds = [type(module) for module in model.modules()]
    checkpointing.apply(["head", "layers.0"])
    assert [type(module) for module in model.modules()] == kinds
    checkpointing.apply(["head", "layers.1"])
    assert checkpointing.active == ("layers.1", "head")
    assert (
        type(model.layers[1]) is kinds[[name for name, _ in model.named_modules()].index("layers.0")]
    )  # one class for all Blocks
    assert type(model.layers[0]) is Block


def test_apply_is_all_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, checkpointing = net(on=False)
    checkpointing.apply(["head"])
    with pytest.raises(LayerError):
        checkpointing.apply(["embed", "nowhere"])
    assert checkpointing.active == ("head",)
    with pytest.raises(CheckpointingError):
        checkpointing.apply(["embed", "layers"])
    assert checkpointing.active == ("head",)
    model.layers[1].forward = lambda x: x
    with pytest.raises(CheckpointingError, match=r"layer 'layers\.1' \(Block\): its forward was replaced on the instance"):
        checkpointing.apply(["embed", "layers.1"])
    assert checkpointing.active == ("head",)
    del model.layers[1].forward

    change, changed = module_under_test.set_class, []

    def interrupted(module: nn.Module, kind: type) -> None:
        changed.append(module)
        if len(changed) == 3:
            raise KeyboardInterrupt
        change(module, kind)

    monkeypatch.setattr(module_under_test, "set_class", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpointing.apply(["embed", "layers.0", "layers.1"])
    assert checkpointing.active == ("head",)


def test_a_class_that_cannot_be_exchanged_is_refused_before_anything_changes() -> None:
    class Final(nn.Module):
        def __init_subclass__(cls, *, key: str) -> None:  # no matter: ours is not announced to it
            raise AssertionError(key)

        def forward(self, x):
            return x * 2

    class Fixed(nn.Module):
        def __setattr__(self, name: str, value: Any) -> None:
            assert name != "__class__"
            super().__setattr__(name, value)

        def forward(self, x):
            return x * 3

    class Slotted(nn.Module):
        __slots__ = ("extra",)

        def forward(self, x):
            return x * 5

    model = nn.Sequential(Final(), Fixed(), Slotted(), nn.Tanh())
    checkpointing = Checkpointing(model)
    x = torch.ones(2, requires_grad=True)
    checkpointing.apply(["0", "1", "3"])
    assert float(model(x).detach()[0]) == pytest.approx(1.0)
    with pytest.raises(CheckpointingError, match=r"layer '2' \(Slotted\): its class cannot be derived from"):
        checkpointing.apply(["2", "3"])
    assert checkpointing.active == ("0", "1", "3")
    checkpointing.close()
    assert_untouched(model)


def test_no_class_of_ours_reaches_a_users_registry() -> None:
    registry: dict[str, type] = {}

    class Meta(type):
        def __init__(cls, *args: Any) -> None:
            super().__init__(*args)
            registry[cls.__name__] = cls

    class Registered(nn.Module, metaclass=Meta):
        def forward(self, x):
            return x * 2

    class Announced(nn.Module):
        kinds: ClassVar[list[type]] = []

        def __init_subclass__(cls) -> None:
            Announced.kinds.append(cls)

        def forward(self, x):
            return x * 2

    class Child(Announced):
        pass

    class Typed(nn.Module, Generic[T]):
        def forward(self, x):
            return x * 2

    model = nn.Sequential(Registered(), Child(), Typed[int]())
    Checkpointing(model).apply(["*"])
    assert model(torch.ones(1, requires_grad=True)).tolist() == [8.0]
    assert registry == {"Registered": Registered}
    assert Announced.kinds == [Child]
    assert type(model[0]) is not Registered
    assert type(type(model[0])) is Meta


def test_a_deepcopy_is_plain_and_independent() -> None:
    model, checkpointing = net()
    copied = copy.deepcopy(model)
    assert_untouched(copied)
    assert equal(step(copied), step(model))
    with torch.no_grad():
        model.embed.weight.zero_()
    assert copied.embed.weight.abs().sum() > 0
    checkpointing.close()
    assert_untouched(copied)
    assert_untouched(copy.deepcopy(model))
    assert_untouched(copy.copy(model.layers[0]))


def test_a_shallow_copy_is_plain() -> None:
    model, _ = net()
    assert type(copy.copy(model.layers[0])) is Block
    assert copy.copy(model.layers[0]).linear is model.layers[0].linear


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickled_layer_is_plain(protocol: int) -> None:
    model, checkpointing = net()
    loaded = pickle.loads(pickle.dumps(model, protocol))
    assert_untouched(loaded)
    assert equal(step(loaded), step(model))
    assert len(checkpointing.active) == 11


class Peculiar(nn.Module):
    """With ways of its own to be made, copied and pickled."""

    def __new__(cls, width: int) -> Peculiar:
        self = super().__new__(cls)
        object.__setattr__(self, "made_by_new", width)
        return self

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def __getnewargs__(self) -> tuple[int]:
        return (self.linear.in_features,)

    def forward(self, x):
        return self.linear(x)


class Named(Peculiar):
    def __new__(cls, *, width: int) -> Any:  # type: ignore[misc]
        return super().__new__(cls, width)

    def __init__(self, *, width: int) -> None:
        super().__init__(width)

    def __getnewargs_ex__(self) -> tuple[tuple, dict[str, int]]:
        return (), {"width": self.linear.in_features}


class CopiesItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def __deepcopy__(self, memo: dict) -> CopiesItself:
        new = type(self)()
        new.load_state_dict(self.state_dict())
        new.copied = True  # type: ignore[assignment]
        return new

    def __reduce__(self) -> tuple:
        return type(self), ()

    def forward(self, x):
        return self.linear(x)


def test_own_ways_of_copying_and_pickling_are_kept() -> None:
    model: Any = nn.Sequential(Peculiar(3), Named(width=3), CopiesItself())
    Checkpointing(model).apply(["*"])
    for protocol in (2, pickle.HIGHEST_PROTOCOL):
        loaded = pickle.loads(pickle.dumps(model, protocol))
        assert_untouched(loaded)
        assert [type(module) for module in loaded] == [Peculiar, Named, CopiesItself]
        assert [module.made_by_new for module in loaded[:2]] == [3, 3]
        assert torch.equal(loaded[0].linear.weight, model[0].linear.weight)
    copied = copy.deepcopy(model)
    assert_untouched(copied)
    assert copied[2].copied
    assert [module.made_by_new for module in copied[:2]] == [3, 3]


def test_a_saved_model_loads_where_amp_widgets_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "users_code.py").write_text(
        textwrap.dedent(
            """
            from torch import nn

            class Mine(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.linear = nn.Linear(3, 3)

                def forward(self, x):
                    return self.linear(x)
            """
        )
    )
    sys.path.insert(0, str(tmp_path))
    try:
        import users_code  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(tmp_path))
    model = nn.Sequential(users_code.Mine(), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 2)))
    Checkpointing(model).apply(["0", "0.linear", "1", "2"])
    torch.save(model, tmp_path / "model.pt")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    code = textwrap.dedent(
        """
        import sys, torch
        class Refuse:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] == "amp_widgets":
                    raise AssertionError("amp_widgets was imported")
        sys.meta_path.insert(0, Refuse())
        model = torch.load("model.pt", weights_only=False)
        torch.load("state.pt", weights_only=True)
        model(torch.ones(4, 3)).sum().backward()
        print(*(f"{type(m).__module__}.{type(m).__name__}" for m in model.modules()))
        assert "amp_widgets" not in sys.modules
        """
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    module = "torch.nn.modules"
    assert done.stdout.split() == [
        f"{module}.container.Sequential",
        "users_code.Mine",
        f"{module}.linear.Linear",
        f"{module}.batchnorm.BatchNorm1d",
        f"{module}.container.Sequential",
        f"{module}.linear.Linear",
    ]


def test_a_module_made_of_a_layers_class_is_plain() -> None:
    model, checkpointing = net()
    assert checkpointing.active
    assert type(model.head[:2]) is nn.Sequential  # torch makes a slice by type(self)(…)
    assert type(type(model.layers[0])(6, slope=0.2)) is Block
    assert type(model.layers[0].__class__(6)) is Block
    assert "head" in checkpointing.active


def test_a_replica_for_data_parallel_recomputes_too() -> None:
    model, _ = net()
    replica = model.layers[0]._replicate_for_data_parallel()
    assert type(replica) is type(model.layers[0])
    assert "linear" in replica._modules


def test_a_changed_forward_of_the_class_is_used() -> None:
    """As when a notebook's cell that patches a class is run again."""

    class Patched(nn.Module):
        def forward(self, x):
            return x * 2

    model = nn.Sequential(Patched())
    Checkpointing(model).apply(["0"])
    x = torch.ones(1, requires_grad=True)
    assert model(x).tolist() == [2.0]
    Patched.forward = lambda self, x: x * 3  # type: ignore[method-assign]
    assert model(x).tolist() == [3.0]


def test_hooks_stay_and_can_be_added_and_removed_while_a_layer_is_on() -> None:
    model, checkpointing = net(on=False)
    fired: list[str] = []
    handle = model.layers[0].register_forward_hook(lambda *_: fired.append("before"))
    checkpointing.apply(["layers.0"])
    later = model.layers[0].register_forward_pre_hook(lambda *_: fired.append("while on"))
    step(model)
    assert fired == ["while on", "before"]
    handle.remove()
    checkpointing.apply([])
    step(model)
    assert fired == ["while on", "before", "while on"]
    later.remove()
    step(model)
    assert len(fired) == 3


def test_an_optimizer_and_moves_of_the_model_work_while_layers_are_on() -> None:
    model, checkpointing = net()
    model.to(torch.float64)
    model.double().train(False).train()
    model.load_state_dict(model.state_dict())
    model.apply(lambda module: None)
    model.requires_grad_(True)
    assert len(checkpointing.active) == 11
    model.float()
    assert equal(step(model), step(copy.deepcopy(model))) is False  # BatchNorm's statistics went on: the comparison can fail
    plain, _ = net(on=False)
    fresh, _ = net()
    assert equal(step(fresh), step(plain))


class Double(nn.Module):
    def forward(self, x):
        return 2 * x


@pytest.mark.parametrize("on_first", [True, False])
def test_a_parametrization_can_be_registered_and_removed_while_a_layer_is_on(on_first: bool) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    model, plain = made(), made()
    checkpointing = Checkpointing(model)
    if on_first:
        checkpointing.apply(["0"])
    for each in (model, plain):
        torch.manual_seed(2)
        parametrizations.spectral_norm(each[0])  # type: ignore[index, arg-type]
        parametrize.register_parametrization(each[0], "weight", Double())  # type: ignore[index, arg-type]
    checkpointing.apply(["0"])
    assert checkpointing.active == ("0",)
    assert equal(step(model), step(plain))
    copied = copy.deepcopy(model)
    assert copied[0].weight.shape == (4, 4)  # type: ignore[index]
    if not on_first:
        assert_untouched(copied)
    with pytest.raises(RuntimeError, match="Serialization of parametrized modules"):
        pickle.dumps(model)  # torch's own answer
    for each in (model, plain):
        parametrize.remove_parametrizations(each[0], "weight")  # type: ignore[index]
    assert equal(step(model), step(plain))
    checkpointing.apply([])
    assert type(model[0]) is nn.Linear  # type: ignore[index]
    assert_untouched(model)
    assert equal(step(model), step(plain))
    pickle.dumps(model)


def test_one_of_two_parametrizations_removed_and_another_added_while_a_layer_is_on() -> None:
    model, plain = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
    plain.load_state_dict(model.state_dict())
    for each in (model, plain):
        parametrize.register_parametrization(each[0], "weight", Double())
    original = type(model[0])
    checkpointing = Checkpointing(model)
    checkpointing.apply(["0"])
    for each in (model, plain):
        parametrize.register_parametrization(each[0], "bias", Double())
        parametrize.remove_parametrizations(each[0], "weight")
    assert equal(step(model), step(plain))
    checkpointing.close()
    assert type(model[0]) is original
    assert_untouched(model)
    assert isinstance(model[0].weight, nn.Parameter)
    assert parametrize.is_parametrized(model[0], "bias")
    assert equal(step(model), step(plain))
    assert_untouched(copy.deepcopy(model))


def test_an_instance_forward_that_comes_later_is_reported_and_survives() -> None:
    model, checkpointing = net(on=False)
    checkpointing.apply(["embed"])
    mine = lambda x: x.new_ones(5, 6)  # noqa: E731
    model.embed.forward = mine  # type: ignore[method-assign]
    assert {layer.name: layer.why_not for layer in checkpointing.layers}["embed"] is not None
    with pytest.raises(CheckpointingError, match="embed"):
        checkpointing.apply(["embed", "head"])
    checkpointing.apply(["head"])
    assert type(model.embed) is nn.Linear
    assert model.embed.forward is mine


def test_only_a_module_can_have_layers() -> None:
    with pytest.raises(ModelError, match=r"got dict, expected a torch\.nn\.Module"):
        Checkpointing({})  # type: ignore[arg-type]


def test_two_switchers_on_one_model_agree() -> None:
    model, first = net(on=False)
    second = Checkpointing(model)
    first.apply(["embed", "head"])
    assert second.active == ("embed", "head")
    second.apply(["embed"])
    assert first.active == ("embed",)
    second.close()
    assert_untouched(model)
    first.close()


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_tracing_gives_the_plain_graph() -> None:
    model, _ = net()
    plain, _ = net(on=False)
    model.eval()
    plain.eval()
    x = torch.randn(3, 4)
    traced = torch.jit.trace(model, x)
    buffer = io.BytesIO()
    torch.jit.save(traced, buffer)
    buffer.seek(0)
    assert torch.equal(torch.jit.load(buffer)(x), plain(x))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_scripting_says_that_layers_must_be_off() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    checkpointing = Checkpointing(model)
    checkpointing.apply(["0"])
    with pytest.raises(CheckpointingError, match="a Linear in this model is checkpointed, which TorchScript cannot compile"):
        torch.jit.script(model)
    checkpointing.close()
    torch.jit.script(model)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("how", ["wrapped", "in place", "one block"])
def test_a_compiled_model_can_be_switched(how: str) -> None:
    torch._dynamo.reset()
    model, checkpointing = net(on=False)
    plain, _ = net(on=False)
    run: nn.Module = model
    if how == "wrapped":
        run = cast(nn.Module, torch.compile(model, backend="aot_eager"))
    elif how == "in place":
        model.compile(backend="aot_eager")
    else:
        model.layers[1] = cast(nn.Module, torch.compile(model.layers[1], backend="aot_eager"))
    checkpointing = Checkpointing(run)
    assert checkpointing.compiled
    assert not Checkpointing(plain).compiled
    assert [layer.name for layer in checkpointing.layers] == [layer.name for layer in Checkpointing(plain).layers]
    names = ["layers.1", "layers.0", "layers.1.norm", "embed"]
    for wanted in (names, [], names[:1]):
        checkpointing.apply(wanted)
        assert set(checkpointing.active) == set(wanted)
        assert equal(step(run), step(plain))
    checkpointing.close()
    assert_untouched(model)
    torch._dynamo.reset()


def test_a_foreign_checkpoint_around_a_layer_works_from_the_first_step_on() -> None:
    """As a model has that checkpoints its blocks itself."""
    from torch.utils.checkpoint import checkpoint

    model, _ = net()
    plain, _ = net(on=False)

    class Around(nn.Module):
        def __init__(self, inner: nn.Module, reentrant: bool) -> None:
            super().__init__()
            self.inner, self.reentrant = inner, reentrant

        def forward(self, x):
            return checkpoint(self.inner, x.requires_grad_(), use_reentrant=self.reentrant)

    for reentrant in (False, True):
        for _ in range(2):
            a, b = step(Around(model, reentrant)), step(Around(plain, reentrant))
            assert all(map(torch.equal, a[: len(list(plain.parameters()))], b))
