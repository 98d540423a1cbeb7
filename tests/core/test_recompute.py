"""A checkpointed layer computes what the layer computes, bit for bit: loss, gradients, buffers, random states.

Each case is a small model and its inputs. Two equal copies of it are trained side by side, one with layers switched as the
mode says, one never touched; whatever they have must be equal after each step.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from amp_widgets.core import layer_state, recompute
from amp_widgets.core.checkpointing import Checkpointing, recomputing
from amp_widgets.errors import RecomputeError

STEPS = 3


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Case:
    """A model, what is switched on in it, and the arguments of one step."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        layers: list[str],
        arguments: Callable[[], tuple[tuple, dict[str, Any]]] | None = None,
        after: Callable[[nn.Module], None] = lambda model: None,
        dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16"),
    ) -> None:
        self.make = make
        self.layers = layers
        self.arguments = arguments or (lambda: ((torch.randn(3, 6),), {}))
        self.after = after
        self.dtypes = dtypes


def images(channels: int = 2) -> Callable[[], tuple[tuple, dict[str, Any]]]:
    return lambda: ((torch.randn(3, channels, 5, 5),), {})


def tokens() -> tuple[tuple, dict[str, Any]]:
    return (torch.randint(0, 7, (2, 4)),), {}


def sequences() -> tuple[tuple, dict[str, Any]]:
    return (torch.randn(2, 4, 8),), {}


class Block(nn.Module):
    """Residual, with dropout, and an inner block that can be switched too."""

    def __init__(self, width: int = 6, depth: int = 1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.drop = nn.Dropout(0.3)
        self.down = nn.Linear(2 * width, width)
        self.inner = Block(width, depth - 1) if depth else None

    def forward(self, x):
        h = self.down(self.drop(F.gelu(self.up(self.norm(x)))))
        return x + (h if self.inner is None else self.inner(h))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.body = Block()
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.body(self.embedding(x)))


@dataclasses.dataclass
class Result:
    hidden: torch.Tensor
    extra: torch.Tensor | None = None


class DataclassInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return Result(torch.tanh(self.linear(x)))


class DataclassOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = DataclassInside(), DataclassInside()

    def forward(self, x):
        result = self.first(x)
        assert result.extra is None
        return self.second(result.hidden).hidden


class NoneInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.loss = torch.zeros(())

    def forward(self, x, collect=None):
        y = self.linear(x)
        if collect is None:
            return None, y.sigmoid()
        collect.append(y * y)  # its only result is what it appends
        return None


class NoneOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = NoneInside(), NoneInside()

    def forward(self, x):
        nothing, y = self.first(x)
        assert nothing is None
        collected: list[torch.Tensor] = []
        assert self.second(y, collect=collected) is None
        assert len(collected) == 1
        return y, collected[0]


class KeywordsInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, *, query, masks, context_fn=None, debug=False):  # two names that torch's checkpoint has as well
        assert (context_fn, debug) == ("mine", True)
        y = self.linear(query["x"] + masks[0]) * masks[1]
        query["x"].mul_(2.0)  # a keyword argument changed in place
        return {"y": y, "z": (y.exp(), 3)}


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = KeywordsInside()

    def forward(self, x, masks):
        x = x * 1.0
        out = self.inside(query={"x": x}, masks=masks, context_fn="mine", debug=True)
        assert out["z"][1] == 3
        return out["y"], out["z"][0], x


class Shared(nn.Module):
    """One block used three times, with BatchNorm inside."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.ReLU())
        self.again = self.block

    def forward(self, x):
        return self.block(self.again(self.block(x)) + x)


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(8, 5, num_layers=2, dropout=0.3, batch_first=True, **options)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        out, _ = self.rnn(x)
        return self.head(out)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=True)


class CausalAttention(nn.Module):
    """With a mask in a buffer, as in a small GPT."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.register_buffer("mask", torch.ones(4, 4).tril().bool(), persistent=False)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(1, 2)).masked_fill(~self.mask, float("-inf"))
        return x + self.out(F.dropout(scores.softmax(-1), 0.1, self.training) @ v)


class AddsInPlace(nn.Module):
    """Overwrites its own input, with nothing about it that shows it before."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(6))

    def forward(self, x):
        x += self.position
        return x.sin() * x


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.relu = nn.ReLU(inplace=True)
        self.adds = AddsInPlace()
        self.block = nn.Sequential(nn.Sequential(nn.ELU(inplace=True), nn.Linear(6, 6)), nn.Dropout(0.1, inplace=True))

    def forward(self, x):
        h = self.first(x)
        y = self.relu(h)
        z = self.adds(y * h)
        w = z * 1.0
        return self.block(w) + w  # w as the block left it


class SeveralOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fork = Fork()
        self.join = Join()

    def forward(self, x):
        a, (b, c) = self.fork(x)
        return self.join(a, b), c


class Join(nn.Module):
    def forward(self, a, b):
        return a @ b.t()


class Fork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return torch.relu(self.left(x)), (self.right(x), x.detach())  # the last needs no gradient


class Sine(nn.Module):
    """No parameters."""

    def forward(self, x):
        return torch.sin(x) * torch.cos(x)


class Counting(nn.Module):
    """Python-side state that the result depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.calls = 0
        self.log: list[int] = []
        self.seen = {"total": 0.0}
        self.count = torch.zeros(())
        self.last: torch.Tensor | None = None

    def forward(self, x):
        self.calls += 1
        self.log.append(self.calls)
        self.seen["total"] += 0.5
        self.count += 1
        self.last = self.linear(x) * self.calls * self.seen["total"] * self.count
        return self.last.tanh()


class Stateful(nn.Module):
    """Carries its hidden state from step to step (truncated backpropagation through time)."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 5)
        self.hidden: tuple[torch.Tensor, ...] | None = None

    def forward(self, x):
        out, hidden = self.rnn(x, self.hidden)
        self.hidden = tuple(h.detach() for h in hidden)
        return out


class Codebook(nn.Module):
    """A running average written through ``.data``, which autograd's version counter does not show."""

    codes: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("codes", torch.randn(6, 6))

    def forward(self, x):
        h = self.linear(x)
        out = h @ self.codes.clone()
        if self.training:
            self.codes.data.mul_(0.9).add_(0.1 * h.detach().mean(0))
        return out


class Queue(nn.Module):
    """A buffer above the size whose copy is kept only when it was written to, and a second that is only read."""

    queue: torch.Tensor
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        assert layer_state._SMALL_TENSOR_BYTES < 4 * 6 * 50_000
        self.register_buffer("queue", torch.randn(6, 50_000))
        self.register_buffer("table", torch.randn(6, 50_000))

    def forward(self, x):
        keys = self.linear(x)
        out = keys @ self.queue[:, :4].clone() + keys @ self.table[:, :4]
        with torch.no_grad():
            self.queue[:, :3] = keys.t().to(self.queue.dtype)
        return out


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.generator = torch.Generator()
        self.seed = 3
        self.generator.manual_seed(self.seed)

    def forward(self, x):
        return self.linear(x) * torch.bernoulli(torch.full((6,), 0.5), generator=self.generator)

    def __deepcopy__(self, memo):  # a generator has no deepcopy
        new = type(self)()
        new.load_state_dict(self.state_dict())
        new.generator.set_state(self.generator.get_state())
        return new


class DropsWithPython(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return self.linear(x).tanh() if random.random() < 0.5 else x * 2


def drop_path(x):
    return (x * float(np.random.binomial(1, 0.5))).exp()


class DropsWithNumPy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return drop_path(self.linear(x).tanh()) + x


class Frozen(nn.Module):
    """Nothing before it needs a gradient, and nothing in it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).requires_grad_(False)
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.frozen(x))


class NoGradInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        with torch.no_grad():
            target = self.teacher(x)
        return (self.student(x) - target).pow(2)


class AutocastInside(nn.Module):
    """Its own autocast region, disabled, inside the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        h = self.first(x)
        with torch.autocast("cpu", enabled=False):
            return self.second(h.float()).exp()


def weights_hook_layer(add: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    """With the older weight_norm or spectral_norm, which set a plain attribute in a hook."""

    def make() -> nn.Module:
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated, and still in use
            layer = add(nn.Linear(6, 6))
        return Twice(layer)

    return make


class Twice(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(self.layer(x).tanh())


def evaluated(model: nn.Module) -> None:
    model.eval()


def batch_norm_net(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3),
        nn.Sequential(nn.BatchNorm2d(3, **options), nn.ReLU(inplace=True), nn.Conv2d(3, 3, 2)),
        nn.BatchNorm2d(3, **options),
        nn.Dropout2d(0.2),
        nn.Flatten(),
        nn.Linear(12, 4),
    )


NO_FP16 = ("fp32", "bf16")  # torch has no LSTM in fp16 on a CPU

CASES: dict[str, Case] = {
    "mlp with dropout": Case(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.Tanh(), nn.AlphaDropout(0.1), nn.Linear(8, 2)), ["*"]
    ),
    "nested blocks": Case(lambda: nn.Sequential(Block(depth=2), Block(depth=1)), ["*", "*.inner", "*.inner.inner", "*.up"]),
    "everything": Case(lambda: nn.Sequential(Block(depth=1), nn.BatchNorm1d(6), Block()), ["**"]),
    "batch norm": Case(batch_norm_net(), ["*"], images()),
    "batch norm inside": Case(batch_norm_net(), ["1", "1.0"], images()),
    "batch norm, cumulative": Case(batch_norm_net(momentum=None), ["*"], images()),
    "batch norm, no statistics": Case(batch_norm_net(track_running_stats=False), ["*", "1.*"], images()),
    "batch norm in eval mode": Case(batch_norm_net(), ["*"], images(), evaluated),
    "instance norm": Case(
        lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.InstanceNorm2d(3, affine=True, track_running_stats=True)), ["*"], images()
    ),
    "group norm": Case(
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.Sequential(nn.GroupNorm(2, 4), nn.SiLU()), nn.MaxPool2d(2)), ["*"], images()
    ),
    "transposed convolution": Case(
        lambda: nn.Sequential(nn.ConvTranspose2d(2, 3, 2), nn.PReLU(3), nn.AvgPool2d(2)), ["*"], images()
    ),
    "spectral norm": Case(
        lambda: nn.Sequential(
            parametrizations.spectral_norm(nn.Conv2d(2, 3, 2)),
            nn.Flatten(),
            Twice(parametrizations.spectral_norm(nn.Linear(48, 48))),
        ),
        ["0", "2", "2.layer"],
        images(),
    ),
    "spectral norm, older": Case(weights_hook_layer(torch.nn.utils.spectral_norm), ["layer"]),
    "spectral norm, older, around": Case(lambda: nn.Sequential(weights_hook_layer(torch.nn.utils.spectral_norm)()), ["0"]),
    "weight norm": Case(lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 4)), nn.Tanh()), ["*"]),
    "weight norm, older": Case(weights_hook_layer(torch.nn.utils.weight_norm), ["layer"]),
    "tied weights": Case(Tied, ["embedding", "body", "head"], tokens),
    "embedding with max_norm": Case(lambda: nn.Sequential(nn.Embedding(7, 6, max_norm=0.5), nn.Linear(6, 2)), ["*"], tokens),
    "dataclass output": Case(DataclassOutput, ["first", "second"]),
    "None output": Case(NoneOutput, ["first", "second"]),
    "keywords": Case(Keywords, ["inside"], lambda: ((torch.randn(3, 6),), {"masks": [torch.randn(3, 1), torch.randn(6)]})),
    "shared": Case(Shared, ["block", "again.0"]),
    "LSTM": Case(lambda: Recurrent(nn.LSTM, bidirectional=False), ["rnn"], sequences, dtypes=NO_FP16),
    "GRU": Case(lambda: Recurrent(nn.GRU), ["rnn", "head"], sequences),
    "TransformerEncoderLayer": Case(
        lambda: nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True) for _ in range(2))), ["*"], sequences
    ),
    "TransformerEncoder": Case(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), 2, enable_nested_tensor=False),
        ["layers.*", "layers.*.self_attn", "layers.0.linear1"],
        sequences,
    ),
    "MultiheadAttention": Case(SelfAttention, ["attention"], sequences),
    "causal attention": Case(lambda: nn.Sequential(CausalAttention(), CausalAttention()), ["*"], sequences),
    "in place": Case(InPlace, ["relu", "adds", "block", "first"]),
    "in place, parent and child": Case(InPlace, ["block", "block.0", "block.0.0", "block.1"]),
    "several outputs": Case(SeveralOutputs, ["fork", "fork.left", "join"]),
    "no parameters": Case(lambda: nn.Sequential(nn.Linear(6, 6), Sine(), nn.Identity(), nn.Flatten(0)), ["*"]),
    "Python state": Case(lambda: nn.Sequential(nn.Linear(6, 6), Counting(), Counting()), ["*"]),
    "stateful": Case(Stateful, ["rnn"], dtypes=NO_FP16),
    "stateful, around": Case(lambda: nn.Sequential(Stateful(), nn.Linear(5, 2)), ["0"], dtypes=NO_FP16),
    "codebook": Case(lambda: nn.Sequential(Codebook()), ["0"]),
    "large buffers": Case(lambda: nn.Sequential(Queue()), ["0"]),
    "own generator": Case(lambda: nn.Sequential(OwnGenerator(), OwnGenerator()), ["*"]),
    "Python's random": Case(lambda: nn.Sequential(*(DropsWithPython() for _ in range(6))), ["*"]),
    "NumPy's random": Case(lambda: nn.Sequential(*(DropsWithNumPy() for _ in range(4))), ["*"]),
    "frozen": Case(Frozen, ["frozen"]),
    "no_grad inside": Case(lambda: nn.Sequential(nn.Linear(6, 6), NoGradInside()), ["1"]),
    "autocast inside": Case(lambda: nn.Sequential(AutocastInside(), nn.Linear(6, 2)), ["*"]),
}


MACHINERY = vars(nn.Module()).keys() - {"training"}


class Twin:
    """One of two equal models under training."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(self, seed: int, arguments: tuple[tuple, dict[str, Any]], dtype: torch.dtype | None) -> dict[str, Any]:
        """All that can be seen of one training step."""
        torch.default_generator.manual_seed(seed)  # torch.manual_seed formats a stack trace each time
        random.seed(seed)
        np.random.seed(seed)
        args, kwargs = copy.deepcopy(arguments)
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = loss_of(self.model(*args, **kwargs))
        loss.backward()
        seen: dict[str, Any] = {"loss": loss.detach(), "torch's random state": torch.get_rng_state()}
        seen |= {f"gradient of {name}": None if p.grad is None else p.grad.clone() for name, p in self.model.named_parameters()}
        self.optimizer.step()
        seen |= {f"parameter {name}": parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        seen |= {f"buffer {name}": buffer.clone() for name, buffer in self.model.named_buffers()}
        seen["Python's random state"] = pickle.dumps(random.getstate())
        seen["NumPy's random state"] = pickle.dumps(np.random.get_state())
        for name, module in self.model.named_modules():
            plain = {key: value for key, value in vars(module).items() if key not in MACHINERY}
            leaves, _ = pytree.tree_flatten(plain)
            seen[f"attributes of {name}"] = [leaf for leaf in leaves if isinstance(leaf, (int, float, str, torch.Tensor))]
        return seen


def loss_of(output: Any) -> torch.Tensor:
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return sum((tensor.float().pow(2).mean() for tensor in tensors), start=torch.zeros(()))


def same(a: Any, b: Any) -> bool:
    """Equal to the bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(bits(a), bits(b))
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return [name for name in a if name not in b or not same(a[name], b[name])] + [name for name in b if name not in a]


@pytest.fixture
def checkpoints(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every checkpoint that torch is asked for."""
    calls: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return checkpoint(*args, **kwargs)

    monkeypatch.setattr(recompute, "checkpoint", counted)
    return calls


DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
MODES = {"on": (True, True, True), "off": (False, False, False), "on-off-on": (True, False, True)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name, case in CASES.items() for dtype in case.dtypes])
def test_bit_identical_to_an_untouched_twin(name: str, dtype: str, mode: str, checkpoints: list[int]) -> None:
    case = CASES[name]
    models = []
    for _ in range(2):  # not by deepcopy, which the older weight_norm does not survive
        torch.manual_seed(5)
        models.append(case.make())
        case.after(models[-1])
    model = models[0]
    touched, untouched = map(Twin, models)
    classes = [type(module) for module in model.modules()]
    checkpointing = Checkpointing(model)
    layers = checkpointing.resolve(case.layers)
    checkpointing.apply(layers)
    for step, on in enumerate(MODES[mode]):
        checkpointing.apply(layers if on else ())
        assert checkpointing.active == (layers if on else ())
        checkpoints.clear()
        torch.manual_seed(100 + step)
        arguments = case.arguments()
        seen = touched.step(step, arguments, DTYPES[dtype])
        assert len(checkpoints) >= (len(layers) if on else 0), "the layers were not checkpointed"
        assert on or not checkpoints
        assert differences(seen, untouched.step(step, arguments, DTYPES[dtype])) == []
    checkpointing.close()
    assert [type(module) for module in model.modules()] == classes


def test_the_comparison_sees_what_plain_checkpointing_gets_wrong() -> None:
    """torch's own checkpoint updates BatchNorm's statistics twice, and counts Python state twice."""
    for name, changed in (("batch norm", "buffer 0.running_mean"), ("Python state", "attributes of 0")):
        torch.manual_seed(5)
        model = nn.Sequential(nn.BatchNorm1d(6) if name == "batch norm" else Counting(), nn.Tanh())
        wrapped = copy.deepcopy(model)
        inner = wrapped[0].forward
        wrapped[0].forward = lambda *args, inner=inner: checkpoint(inner, *args, use_reentrant=False)
        arguments: tuple[tuple, dict[str, Any]] = ((torch.randn(3, 6, requires_grad=True),), {})
        assert changed in differences(Twin(model).step(0, arguments, None), Twin(wrapped).step(0, arguments, None))


@pytest.mark.parametrize("seed", range(12))
def test_any_order_and_nesting_of_switching(seed: int) -> None:
    print(f"seed {seed}")
    chooser = random.Random(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(Block(depth=1), nn.Sequential(nn.BatchNorm1d(6), nn.ReLU(inplace=True), Block(depth=1)), Counting())
    touched, untouched = Twin(model), Twin(copy.deepcopy(model))
    checkpointing = Checkpointing(model)
    every = checkpointing.resolve(["**"])
    for step in range(6):
        checkpointing.apply([name for name in every if chooser.random() < 0.4])
        arguments: tuple[tuple, dict[str, Any]] = ((torch.randn(3, 6),), {})
        dtype = chooser.choice(list(DTYPES.values()))
        assert differences(touched.step(step, arguments, dtype), untouched.step(step, arguments, dtype)) == []


def test_switching_between_forward_and_backward_changes_nothing_for_the_older_graph() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(Block(), nn.BatchNorm1d(6), nn.Dropout(0.5)), nn.Linear(6, 6), Block())
    twin = copy.deepcopy(model)
    checkpointing = Checkpointing(model)
    x = torch.randn(4, 6)
    sequence = [["0", "0.0", "0.1"], [], ["0.0.inner", "1"], ["0", "2"], ["**"], []]
    losses = []
    for step, names in enumerate(sequence):
        checkpointing.apply(checkpointing.resolve(names))
        pair = []
        for net in (model, twin):
            torch.manual_seed(step)
            pair.append(net(x).pow(2).mean())
        losses.append(pair)
    model.eval()  # the recompute is to see the training flags of the forward pass, too
    twin.eval()
    for ours, theirs in reversed(losses):
        ours.backward()
        theirs.backward()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert same(p.grad, q.grad), name
    assert all(map(same, model.buffers(), twin.buffers()))
    assert not any(module.training for module in model.modules())


def small_model() -> Any:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Tanh()), nn.Tanh()
    )


def both(names: list[str], act: Callable[[Any], Any], make: Callable[[], nn.Module] = small_model) -> tuple[Any, Any]:
    """What `act` gives for a model with layers switched on, and for one without."""
    results = []
    for on in (True, False):
        torch.manual_seed(3)
        model = make()
        if on:
            Checkpointing(model).apply(names)
        torch.manual_seed(8)
        results.append((act(model), [p.grad for p in model.parameters()], list(model.buffers()), torch.get_rng_state()))
    return results[0], results[1]


def assert_same(pair: tuple[Any, Any]) -> None:
    a, b = (pytree.tree_leaves(result) for result in pair)
    assert len(a) == len(b)
    assert all(map(same, a, b))


def test_second_backward_through_a_retained_graph() -> None:
    def act(model: Any) -> list[torch.Tensor]:
        loss = model(torch.randn(4, 6)).pow(2).mean()
        loss.backward(retain_graph=True)
        first = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        loss.backward(retain_graph=True)
        loss.backward()
        return first

    assert_same(both(["0", "1", "1.1"], act))
    assert_same(both(["relu", "block.0", "block"], act, InPlace))
    assert_same(both(["*"], act, lambda: nn.Sequential(*(parametrizations.spectral_norm(nn.Linear(6, 6)) for _ in range(2)))))
    assert_same(both(["*"], act, lambda: nn.Sequential(Counting(), Stateful(), nn.Linear(5, 5))))


def test_double_backward() -> None:
    def act(model: Any) -> torch.Tensor:
        x = torch.randn(4, 6, requires_grad=True)
        out = model(x).pow(2).mean()
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        penalty = grad.pow(2).sum() + out
        penalty.backward()
        assert x.grad is not None
        return x.grad

    assert_same(both(["0", "1", "1.0"], act))
    assert_same(both(["relu", "block"], act, InPlace))


def test_gradient_only_for_the_input_and_only_for_a_part() -> None:
    def act(model: Any) -> list[torch.Tensor]:
        x = torch.randn(4, 6, requires_grad=True)
        hidden = model[0](x)
        loss = model[2](model[1](hidden)).sum()
        return [*torch.autograd.grad(loss, [hidden, x], retain_graph=True), *torch.autograd.grad(loss, [model[1][0].weight])]

    assert_same(both(["0", "1"], act))


def test_gradient_accumulation_with_two_graphs_alive() -> None:
    def act(model: Any) -> None:
        first = model(torch.randn(4, 6)).pow(2).mean()
        second = model(torch.randn(5, 6)).pow(2).mean()
        first.backward()
        second.backward()

    assert_same(both(["0", "1", "1.1"], act))


def test_a_backward_inside_a_forward() -> None:
    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x):
            x = x.detach().requires_grad_()
            (grad,) = torch.autograd.grad(self.linear(x).tanh().sum(), x, create_graph=True)
            return grad.pow(2)

    assert_same(both(["0"], lambda model: model(torch.randn(3, 6)).mean().backward(), lambda: nn.Sequential(Penalised())))


def test_functional_call_gets_the_gradients_of_the_parameters_it_was_given() -> None:
    def act(model: Any) -> list[torch.Tensor]:
        mine = {name: (p.detach() * 1.5).requires_grad_() for name, p in model.named_parameters()}
        loss = torch.func.functional_call(model, mine, (torch.randn(4, 6),)).pow(2).mean()
        loss.backward()
        return [p.grad for p in mine.values() if p.grad is not None]

    pair = both(["0", "1", "1.0"], act)
    assert len(pair[0][0]) == 6
    assert_same(pair)
    assert_same(both(["rnn"], act, lambda: Stateful()))


def test_under_transforms_of_torch_func_the_layer_runs_as_it_is() -> None:
    def act(model: Any) -> list[torch.Tensor]:
        parameters = dict(model.named_parameters())
        x = torch.randn(4, 6)
        model[1][1].eval()  # BatchNorm's statistics cannot be written under a transform
        grads = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).pow(2).mean())(parameters)
        jacobian = torch.func.jacrev(lambda one: model[2](model[0](one)))(x[0])
        return [*grads.values(), jacobian]

    assert_same(both(["0", "1", "2"], act))


def test_no_effect_without_gradients(checkpoints: list[int]) -> None:
    def act(model: Any) -> list[torch.Tensor]:
        with torch.no_grad():
            out = [model(torch.randn(4, 6))]
        with torch.inference_mode():
            out.append(model(torch.randn(4, 6)).clone())
        model.eval()
        with torch.no_grad():
            return [*out, model(torch.randn(4, 6))]

    assert_same(both(["0", "1", "1.1"], act))
    assert checkpoints == []


def test_python_containers_passed_in_are_the_callers_own() -> None:
    class Collects(nn.Module):
        def forward(self, x, into):
            into.append(x.exp())
            into[0] = x.sin()
            return x

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.collects = Collects()

        def forward(self, x):
            into = [x]
            self.collects(x * 1.0, into)
            assert len(into) == 2
            return into[0] * into[1]

    assert_same(both(["collects"], lambda model: model(torch.randn(2, 3, requires_grad=True)).sum().backward(), Outer))


def test_forwards_are_counted_once_or_twice_and_recomputing_tells_which() -> None:
    model = small_model()
    calls: list[tuple[str, bool]] = []
    for name in ("0", "1", "1.0", "2"):
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: calls.append((name, recomputing())))

    def count() -> dict[str, list[bool]]:
        calls.clear()
        model(torch.randn(4, 6)).sum().backward()
        return {name: [again for called, again in calls if called == name] for name in ("0", "1", "1.0", "2")}

    checkpointing = Checkpointing(model)
    assert count() == {"0": [False], "1": [False], "1.0": [False], "2": [False]}
    checkpointing.apply(["1"])
    assert count() == {"0": [False], "1": [False], "1.0": [False, True], "2": [False]}  # a layer's own hooks fire once
    checkpointing.apply(["0", "1.0"])
    assert count() == {"0": [False], "1": [False], "1.0": [False], "2": [False]}
    checkpointing.apply([])
    assert count() == {"0": [False], "1": [False], "1.0": [False], "2": [False]}
    assert not recomputing()


def test_hooks_of_a_layer_fire_once_and_see_the_same() -> None:
    def act(model: Any) -> list[Any]:
        fired: list[Any] = []
        layer = model[1]
        layer.register_forward_pre_hook(lambda module, args: fired.append(("pre", args[0].detach())))
        layer.register_forward_hook(lambda module, args, out: out * 2)
        layer.register_full_backward_hook(lambda module, gi, go: fired.append(("backward", gi[0], go[0])))
        layer[0].register_full_backward_hook(lambda module, gi, go: fired.append(("inner backward", gi[0], go[0])))
        layer.register_full_backward_pre_hook(lambda module, go: fired.append(("backward pre", go[0])))
        model(torch.randn(4, 6)).sum().backward()
        return fired

    pair = both(["1"], act)
    assert [entry[0] for entry in pair[0][0]] == ["pre", "backward pre", "inner backward", "backward"]
    assert_same(pair)


def flops(model: nn.Module, x: torch.Tensor) -> tuple[int, int]:
    """Of the forward pass, and of the backward pass with what is recomputed in it."""
    from torch.utils.flop_counter import FlopCounterMode

    with torch.utils.checkpoint.set_checkpoint_early_stop(False):  # else the last operation need not be repeated
        with FlopCounterMode(display=False) as forward:
            loss = model(x).sum()
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


def test_flops_of_a_checkpointed_layer_count_twice() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), nn.Linear(4, 2))
    x = torch.randn(5, 6)
    first, inner, last = 2 * 5 * 6 * 8, 2 * 5 * (8 * 16 + 16 * 4), 2 * 5 * 4 * 2
    plain = first + 2 * inner + 2 * last  # the weights' gradients, and the inputs' but for the first layer's
    checkpointing = Checkpointing(model)
    total = first + inner + last
    assert flops(model, x) == (total, plain + inner + last - inner - last + inner + last - inner - last)
    checkpointing.apply(["1"])
    assert flops(model, x) == (total, plain + inner)
    checkpointing.apply(["0", "1", "2"])
    assert flops(model, x) == (total, plain + total)
    checkpointing.apply([])
    assert flops(model, x) == (total, plain)
    with torch.no_grad():
        checkpointing.apply(["1"])
        with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
            model(x)
        assert counter.get_total_flops() == total


def saved_bytes(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes of the storages that are alive after the forward pass because the graph needs them."""
    alive: dict[int, tuple[weakref.ref[Any], int]] = {}

    class Storages(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in pytree.tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    alive[id(storage)] = weakref.ref(storage), storage.nbytes()
            return out

    with Storages():
        out = model(x)
    held = sum(size for ref, size in alive.values() if ref() is not None)
    del out
    return held


def test_a_checkpointed_layer_keeps_its_input_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 16), nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4))), nn.Tanh()
    )
    x = torch.randn(64, 16)
    row = 64 * 16 * 4
    checkpointing = Checkpointing(model)
    plain = saved_bytes(model, x)
    checkpointing.apply(["1"])
    first, later = (
        saved_bytes(model, x),
        saved_bytes(model, x),
    )  # the first call of a layer finds out whether it overwrites inputs
    assert plain - later == 7 * row  # each Linear's and each GELU's input, but for the first, which is the layer's own
    assert first - later <= 8  # bytes


class Mark:
    pass


def test_nothing_is_kept_alive_by_a_model_that_stores_its_output() -> None:
    """Evaluation with gradients on and no backward pass: each step's graph must go when the next output takes its place."""
    model: Any = nn.Sequential(nn.Linear(6, 6), Counting(), nn.Sequential(Stateful()))
    Checkpointing(model).apply(["1", "2"])
    graphs = []
    for _ in range(4):
        model(torch.randn(3, 6))
        mark = Mark()
        graphs.append(weakref.ref(mark))
        model[1].last.grad_fn.metadata["mark"] = mark
        del mark
    assert [ref() is not None for ref in graphs] == [False, False, False, True]


def test_a_model_in_which_no_graph_is_alive_is_freed_by_reference_count() -> None:
    import gc

    model = small_model()
    checkpointing = Checkpointing(model)
    checkpointing.apply(["0", "1", "1.1"])
    model(torch.randn(4, 6)).sum().backward()
    refs = [weakref.ref(module) for module in model.modules()]
    parameter = weakref.ref(model[0].weight)
    gc.collect()
    gc.disable()
    try:
        checkpointing.close()
        del model, checkpointing
        assert [ref() for ref in refs] == [None] * len(refs)
        assert parameter() is None
    finally:
        gc.enable()


def test_an_input_that_is_overwritten_later_is_an_error_not_a_wrong_gradient() -> None:
    class Later(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Sequential(nn.Tanh(), nn.Linear(6, 6))

        def forward(self, x):
            h = x * 1.0
            y = self.layer(h)
            h.add_(1.0)
            return y + h

    model = Later()
    Checkpointing(model).apply(["layer"])
    with pytest.raises(RecomputeError, match="an input of a checkpointed Sequential was overwritten in place after"):
        model(torch.randn(3, 6)).sum().backward()  # the first call, in which we hold the input
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.randn(3, 6)).sum().backward()  # later torch does


def test_a_layer_that_begins_to_overwrite_its_input_is_an_error_once() -> None:
    class Sometimes(nn.Module):
        def forward(self, x):
            if self.training:
                x.mul_(2.0)
            return x.sin()

    def run(model: nn.Module) -> torch.Tensor:
        x = torch.ones(3, requires_grad=True)
        model(x * 1.0).sum().backward()
        assert x.grad is not None
        return x.grad

    model = nn.Sequential(Sometimes()).eval()
    twin = copy.deepcopy(model)
    Checkpointing(model).apply(["0"])
    assert same(run(model), run(twin))
    model.train()
    twin.train()
    with pytest.raises(RecomputeError, match="Sometimes overwrote its input in place"):
        run(model)
    assert same(run(model), run(twin))


def test_a_large_buffer_that_changes_before_the_backward_pass_is_an_error() -> None:
    model: Any = nn.Sequential(Queue())
    Checkpointing(model).apply(["0"])
    loss = model(torch.randn(3, 6)).sum()
    with torch.no_grad():
        model[0].table.zero_()
    with pytest.raises(RecomputeError, match="'table' in a checkpointed layer was written to between"):
        loss.backward()


def test_a_large_buffer_that_a_layer_begins_to_write_to_is_an_error_once() -> None:
    class Remembers(Queue):
        def forward(self, x):
            if self.training:
                return super().forward(x)
            return self.linear(x) @ self.queue[:, :4]

    def run(model: nn.Module) -> torch.Tensor:
        x = torch.ones(3, 6, requires_grad=True)
        model(x).sum().backward()
        assert x.grad is not None
        return x.grad

    torch.manual_seed(0)
    model = nn.Sequential(Remembers()).eval()
    Checkpointing(model).apply(["0"])
    run(model)
    model.train()
    with pytest.raises(RecomputeError, match="Remembers wrote to its 'queue', which it had not done before"):
        run(model)
    twin = copy.deepcopy(model)
    assert same(run(model), run(twin))
    assert all(map(same, model.buffers(), twin.buffers()))


def test_a_large_buffer_that_is_only_read_is_copied_in_the_first_call_alone() -> None:
    model = nn.Sequential(Queue())
    Checkpointing(model).apply(["0"])
    clones = []
    for _ in range(3):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
            model(torch.randn(3, 6)).sum().backward()
        clones.append(sum(event.name == "aten::clone" and event.input_shapes[0] == [6, 50_000] for event in profile.events()))
    assert clones == [3, 2, 2]  # both; later the one that is written to; and each time that one for the recompute


def test_an_exception_in_the_recompute_leaves_the_modules_as_they_were() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)
            self.linear = nn.Linear(6, 6)

        def forward(self, x):
            x = self.norm(x)
            if recomputing():
                raise ValueError("in the recompute")
            return self.linear(x).exp()

    model = nn.Sequential(Fails())
    Checkpointing(model).apply(["0"])
    loss = model(torch.randn(4, 6)).sum()
    buffers = list(model.buffers())
    values = [buffer.clone() for buffer in buffers]
    with pytest.raises(ValueError, match="in the recompute"):
        loss.backward()
    assert all(now is then for now, then in zip(model.buffers(), buffers, strict=True))
    assert all(map(same, buffers, values))
    assert not recomputing()


def test_the_first_layer_of_a_thread_does_not_disturb_another() -> None:
    """`recomputing` is about the thread that asks."""
    import threading

    seen: list[bool] = []

    class Asks(nn.Module):
        def forward(self, x):
            if recomputing():
                thread = threading.Thread(target=lambda: seen.append(recomputing()))
                thread.start()
                thread.join()
            return x.sin()

    model = nn.Sequential(Asks())
    Checkpointing(model).apply(["0"])
    model(torch.ones(2, requires_grad=True)).sum().backward()
    assert seen == [False]
