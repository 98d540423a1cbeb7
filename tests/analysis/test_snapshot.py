"""A step that is only tried leaves nothing behind."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import random
import tempfile
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from amp_widgets.analysis.snapshot import Snapshot


class Net(nn.Module):
    """With what a step may change: batch statistics, a counter, a buffer that is replaced, random numbers of three kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2))
        self.register_buffer("running", torch.zeros(2))
        self.calls = 0
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.last = self.calls  # an attribute that was not there
        self.running = self.running + 1
        noise = random.random() + float(np.random.rand())
        output: torch.Tensor = self.body(x) * noise
        return output


def step(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    model(torch.randn(5, 4)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def look(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Any:
    """Everything, with the identities of what must stay the same objects."""
    tensors = {name: (id(t), t.detach().clone()) for name, t in (*model.named_parameters(), *model.named_buffers())}
    gradients = [(None, None) if p.grad is None else (id(p.grad), p.grad.clone()) for p in model.parameters()]
    states = [
        [
            [(name, id(v) if isinstance(v, torch.Tensor) else 0, torch.as_tensor(v).clone()) for name, v in sorted(s.items())]
            for s in o.state.values()
        ]
        for o in optimizers
    ]
    groups = [[{k: v for k, v in g.items() if k != "params"} for g in o.param_groups] for o in optimizers]
    plain = {name: value for name, value in vars(model).items() if name in ("calls", "seen", "last", "training")}
    return tensors, gradients, states, groups, repr(plain), torch.get_rng_state(), np.random.get_state()[1], random.getstate()


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, np.ndarray):
        assert (one == other).all()
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


MAKERS = {
    "adam": lambda p: [torch.optim.Adam(p, lr=0.01)],
    "fused": lambda p: [torch.optim.AdamW(p, lr=0.01, fused=True)],
    "momentum": lambda p: [torch.optim.SGD(p, lr=0.1, momentum=0.9)],
    "two": lambda p: [torch.optim.SGD(list(p)[:2], lr=0.1), torch.optim.RMSprop(list(p)[2:], lr=torch.tensor(0.1))],
}


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("name", MAKERS)
def test_a_step_is_undone(name: str, steps_before: int) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizers = MAKERS[name](list(model.parameters()))
    for _ in range(steps_before):
        step(model, optimizers)
    before = look(model, optimizers)
    with Snapshot(model, optimizers) as snapshot:
        step(model, optimizers)
        model.eval()
        optimizers[0].param_groups[0]["lr"] = 7.0
        first = look(model, optimizers)
        with pytest.raises(AssertionError):
            assert_same(before, first)
        snapshot.restore()
        assert_same(before, look(model, optimizers))
        step(model, optimizers)
    assert_same(before, look(model, optimizers))


def test_training_goes_on_as_if_nothing_had_been_tried() -> None:
    def train(tries: bool) -> Any:
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        model = Net()
        optimizers = MAKERS["adam"](list(model.parameters()))
        for _ in range(5):
            if tries:
                with Snapshot(model, optimizers):
                    step(model, optimizers)
            step(model, optimizers)
        return {name: t.detach().clone() for name, t in model.state_dict().items()}

    assert_same(train(False), train(True))


def test_it_is_put_back_after_an_exception() -> None:
    model = Net()
    optimizers = MAKERS["adam"](list(model.parameters()))
    before = look(model, optimizers)

    def interrupted() -> None:
        with Snapshot(model, optimizers):
            step(model, optimizers)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert_same(before, look(model, optimizers))


@dataclasses.dataclass
class Statistics:
    mean: torch.Tensor
    count: int = 0


class Keeper(nn.Module):
    """With attributes of its own, which its forward pass changes in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.average = torch.zeros(4)
        self.expanded = torch.zeros(1).expand(3, 4)
        self.leaf = torch.ones(4, requires_grad=True)
        self.memory = {"states": [torch.zeros(4)], "count": 0}
        self.queue: collections.deque[float] = collections.deque(maxlen=2)
        self.statistics = Statistics(torch.zeros(4))
        self.array = np.zeros(3)
        self.names = {"a"}
        self.unregistered = [nn.BatchNorm1d(4)]
        self.random = (torch.Generator().manual_seed(1), random.Random(1), np.random.default_rng(1), np.random.RandomState(1))
        self.opaque = object()
        self.replaced = torch.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x) * self.leaf
        self.average.mul_(0.9).add_(y.mean(0))  # has a graph from now on
        self.expanded.untyped_storage().copy_(torch.ones(1).untyped_storage())
        self.memory["states"].append(x)  # type: ignore[attr-defined]
        self.memory["states"][0].data.add_(1)  # type: ignore[index]
        self.memory["count"] += 1  # type: ignore[operator]
        self.queue.append(1.0)
        self.statistics.mean += 1
        self.statistics.count += 1
        self.array += 1
        self.names.add("b")
        self.opaque = object()
        self.replaced = y
        self.last = x
        self.made_late = nn.Linear(1, 1)
        one, two, three, four = self.random
        noise = torch.rand(1, generator=one) + two.random() + three.random() + four.rand()
        return self.unregistered[0](y) * noise  # type: ignore[no-any-return]


def look_inside(keeper: Keeper) -> Any:
    attributes = vars(keeper)
    contents = (
        keeper.average.tolist(), keeper.expanded.tolist(), keeper.memory["count"],
        [state.tolist() for state in keeper.memory["states"]], list(keeper.queue),  # type: ignore[attr-defined]
        keeper.statistics.mean.tolist(), keeper.statistics.count, keeper.array.tolist(), sorted(keeper.names),
        {name: buffer.tolist() for name, buffer in keeper.unregistered[0].named_buffers()},
        [parameter.grad for parameter in keeper.unregistered[0].parameters()],
        keeper.average.requires_grad, keeper.leaf.grad,
    )  # fmt: skip
    one, two, three, four = keeper.random
    state = four.get_state()[1].tolist()  # type: ignore[index]
    states = one.get_state().tolist(), two.getstate(), three.bit_generator.state, state
    objects = [(name, id(value)) for name, value in attributes.items() if name != "training"]
    return contents, states, objects, sorted(keeper._modules), [id(state) for state in keeper.memory["states"]]  # type: ignore[attr-defined]


def test_attributes_are_the_same_objects_with_the_same_content() -> None:
    keeper = Keeper()
    before = look_inside(keeper)
    x = torch.randn(5, 4)
    batch_is_alive = weakref.ref(x)
    with Snapshot(keeper, []) as snapshot:
        for _ in range(2):
            keeper(x).sum().backward()
            assert look_inside(keeper) != before
            snapshot.restore()
            assert look_inside(keeper) == before
        keeper(x).sum().backward()
    assert look_inside(keeper) == before
    del x, snapshot
    assert batch_is_alive() is None


def test_what_has_not_changed_is_not_written_to() -> None:
    """It may be memory that cannot be written to."""

    class WithView(nn.Module):
        def __init__(self, table: torch.Tensor) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.table = table

    with tempfile.NamedTemporaryFile() as file:
        np.ones(4096, dtype=np.float32).tofile(file.name)
        mapped = np.memmap(file.name, dtype=np.float32, mode="r")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = WithView(torch.from_numpy(mapped))
        with Snapshot(model, []):
            model.linear(model.table[:2]).sum().backward()
        assert model.table.sum() == 4096


def test_a_graph_made_before_can_still_be_used_after() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(3, 4)
    expected = torch.autograd.grad(model(x).sum(), model[0].weight)[0]
    loss = model(x).sum()
    with Snapshot(model, [optimizer]):
        step(model, [optimizer])
    assert torch.equal(torch.autograd.grad(loss, model[0].weight)[0], expected)


def test_parameters_that_are_moved_converted_and_frozen() -> None:
    model = nn.Linear(4, 4)
    addresses = [p.data_ptr() for p in model.parameters()]
    before = look(model, [])
    with Snapshot(model, []):
        model.half().requires_grad_(False)
        model.weight.data = torch.zeros(2)
        model.bias.data.untyped_storage().resize_(0)
    assert_same(before, look(model, []))
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert all(p.requires_grad for p in model.parameters())


def test_sparse_gradients_that_grow_in_place() -> None:
    model = nn.Embedding(10, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    model(torch.tensor([1, 2])).sum().backward()
    gradient = model.weight.grad
    assert gradient is not None
    before = gradient.to_dense().clone()
    with Snapshot(model, [optimizer]):
        model(torch.tensor([2, 3])).sum().backward()
        optimizer.step()
    assert model.weight.grad is gradient
    assert torch.equal(gradient.to_dense(), before)


def test_lbfgs_and_attributes_of_an_optimizer() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x = torch.randn(5, 4)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    for _ in range(2):
        optimizer.step(closure)
        before = copy.deepcopy(optimizer.state_dict()), model.weight.detach().clone()
        with Snapshot(model, [optimizer]):
            optimizer.step(closure)
            optimizer.marked = True  # type: ignore[attr-defined]
        assert_same(before, (optimizer.state_dict(), model.weight))
        assert not hasattr(optimizer, "marked")


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_torchscript_and_what_the_loss_function_has() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            y: torch.Tensor = self.norm(x)
            return y

    class Loss:
        def __init__(self) -> None:
            self.average = torch.zeros(1)
            self.calls = 0

        def __call__(self, output: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.average += 1
            return output.sum()

    model = nn.Sequential(torch.jit.script(Counting()), nn.Linear(4, 4))
    for loss, norm in ((Loss(), None), (nn.BatchNorm1d(4), 0), (functools.partial(nn.BatchNorm1d(4).forward), 1)):
        before = look(model, [])
        with Snapshot(model, [], loss_fn=loss):
            loss(model(torch.randn(5, 4))).sum().backward()  # type: ignore[operator]
            assert model[0].calls == 1
        assert_same(before, look(model, []))
        assert model[0].calls == 0
        if isinstance(loss, Loss):
            assert (loss.average.item(), loss.calls) == (0, 0)
        else:
            owner = loss if norm == 0 else loss.func.__self__  # type: ignore[attr-defined]
            assert owner.num_batches_tracked == 0
            assert owner.weight.grad is None


def test_lazily_shaped_and_cyclic_things_are_no_obstacle() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    model.itself = [model]  # type: ignore[assignment]
    model.table = {"table": None}  # type: ignore[assignment]
    model.table["table"] = model.table  # type: ignore[index, operator]
    itself, table = model.itself, model.table
    with Snapshot(model, []):
        model.itself, model.table = [], {}  # type: ignore[assignment]
    assert model.itself is itself
    assert itself[0] is model  # type: ignore[index]
    assert model.table is table
    assert table["table"] is table  # type: ignore[index]


def test_within_inference_mode() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    before = look(model, [])
    with torch.inference_mode():
        snapshot = Snapshot(model, [])
        with torch.inference_mode(False):
            model(torch.ones(1, 3)).sum().backward()
        snapshot.restore()
    assert_same(before, look(model, []))
    model(torch.ones(1, 3)).sum().backward()
