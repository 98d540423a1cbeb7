"""The table of live storages: each counted once, from its first sight until it is freed."""

from __future__ import annotations

import gc
import random
import threading
import warnings
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_widgets.core.memory.storages import LiveStorages


@pytest.fixture
def storages() -> LiveStorages:
    return LiveStorages()


def bytes_of(storages: LiveStorages) -> int:
    storages.settle()
    return storages.bytes


def test_views_count_once_and_a_freed_storage_leaves(storages: LiveStorages) -> None:
    tensor = torch.zeros(10)
    view = tensor[2:5]
    storages.see(tensor, view, view.t().reshape(-1)[:1])
    assert (bytes_of(storages), len(storages)) == (40, 1)
    del tensor
    assert bytes_of(storages) == 40  # the view keeps it
    del view
    assert (bytes_of(storages), len(storages)) == (0, 0)


def test_a_storage_keeps_its_entry_while_only_c_plus_plus_holds_it(storages: LiveStorages) -> None:
    root = torch.ones(5, requires_grad=True)
    middle = root.exp()  # exp saves its result
    storages.see(middle)
    loss = middle.sum()
    del middle
    gc.collect()
    assert bytes_of(storages) == 20
    del loss
    assert bytes_of(storages) == 0


def test_what_is_seen(storages: LiveStorages) -> None:
    one, two, three, four = (torch.zeros(count, dtype=torch.uint8) for count in (1, 10, 100, 1000))
    storages.see([one, (two, None)], {"a": three, "b": {"c": [four]}}, 3, 2.0, "x", torch.float32, None, object())
    assert bytes_of(storages) == 1111


def test_parameters_and_subclasses(storages: LiveStorages) -> None:
    class Tagged(torch.Tensor):
        pass

    parameter = torch.nn.Parameter(torch.zeros(3))
    tagged = torch.zeros(5).as_subclass(Tagged)
    storages.see(parameter, tagged)
    assert bytes_of(storages) == 12 + 20
    del parameter, tagged
    assert bytes_of(storages) == 0


def test_a_resized_storage_counts_at_its_new_size_when_seen_again(storages: LiveStorages) -> None:
    tensor = torch.zeros(4)
    storages.see(tensor)
    tensor.resize_(100)
    storages.see(tensor)
    assert bytes_of(storages) == 400
    tensor.untyped_storage().resize_(0)
    storages.see(tensor)
    assert bytes_of(storages) == 0
    tensor.untyped_storage().resize_(16)
    storages.see(tensor)
    assert bytes_of(storages) == 16
    del tensor
    assert (bytes_of(storages), len(storages)) == (0, 0)


def test_set_swaps_the_storage(storages: LiveStorages) -> None:
    tensor, other = torch.zeros(4), torch.zeros(7)
    storages.see(tensor)
    tensor.set_(other)  # type: ignore[call-overload]
    storages.see(tensor)
    assert bytes_of(storages) == 28


def test_other_devices_are_not_cpu_bytes(storages: LiveStorages) -> None:
    with FakeTensorMode():
        fake = torch.zeros(1000)
    assert fake.device.type == "cpu"  # so it says
    storages.see(torch.zeros(1000, device="meta"), fake)
    assert bytes_of(storages) == 0


def test_sparse_tensors_count_their_parts(storages: LiveStorages) -> None:
    dense = torch.tensor([[0.0, 1.0, 0.0], [2.0, 0.0, 3.0]])
    coo = dense.to_sparse()
    storages.see(coo)
    assert bytes_of(storages) == 2 * 3 * 8 + 3 * 4  # indices of two dimensions, int64, and values
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows, columns, values = torch.tensor([0, 1, 3]), torch.tensor([1, 0, 2]), torch.ones(3)
        csr = torch.sparse_csr_tensor(rows, columns, values, (2, 3))
        csc = torch.sparse_csc_tensor(torch.tensor([0, 1, 2, 3]), torch.tensor([1, 0, 1]), torch.ones(3), (2, 3))
    storages.see(csr)
    assert bytes_of(storages) == 60 + (2 + 1) * 8 + 3 * 8 + 3 * 4
    del coo, csr, rows, columns, values
    assert bytes_of(storages) == 0
    storages.see(csc)
    assert bytes_of(storages) == (3 + 1) * 8 + 3 * 8 + 3 * 4


def test_a_sparse_gradient_that_requires_grad_is_left_alone(storages: LiveStorages) -> None:
    coo = torch.eye(2).to_sparse().requires_grad_()
    storages.see(coo)
    assert coo.is_leaf
    assert coo.grad_fn is None
    assert bytes_of(storages) == 2 * 2 * 8 + 2 * 4


def test_wrapper_subclasses_count_what_is_inside(storages: LiveStorages) -> None:
    two = TwoTensor(torch.zeros(3), torch.zeros(5))
    storages.see(two)
    assert bytes_of(storages) == 12 + 20
    storages.see(TwoTensor(two.a, two.b))
    assert bytes_of(storages) == 12 + 20
    del two
    assert bytes_of(storages) == 0


def test_nested_tensors(storages: LiveStorages) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        strided = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
        jagged = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    storages.see(strided)
    assert bytes_of(storages) >= 20
    before = bytes_of(storages)
    storages.see(jagged)
    assert bytes_of(storages) >= before + 20


def test_what_cannot_be_read_is_not_counted_and_does_no_harm(storages: LiveStorages) -> None:
    class Hostile(torch.Tensor):
        def untyped_storage(self) -> torch.UntypedStorage:
            raise RuntimeError("no")

    storages.see(torch.zeros(3).as_subclass(Hostile))
    assert bytes_of(storages) == 0
    lazy = torch.nn.LazyLinear(3)
    storages.see(*lazy.parameters())
    lazy(torch.zeros(1, 2))
    storages.see(*lazy.parameters())
    assert bytes_of(storages) == (3 * 2 + 3) * 4
    storages.see(torch.zeros(2, 2).to_mkldnn())
    assert bytes_of(storages) == 36


def test_no_reference_to_the_storage_is_held(storages: LiveStorages) -> None:
    tensor = torch.zeros(3)
    alive = weakref.ref(tensor)
    storages.see(tensor)
    del tensor
    assert alive() is None


def test_tensors_in_a_cycle_leave_when_collected(storages: LiveStorages) -> None:
    tensor = torch.zeros(3)
    storages.see(tensor)
    cycle: list[object] = [tensor]
    cycle.append(cycle)
    del tensor, cycle
    assert bytes_of(storages) == 12
    gc.collect()
    assert (bytes_of(storages), len(storages)) == (0, 0)


def test_clear_cuts_the_callbacks(storages: LiveStorages) -> None:
    tensor = torch.zeros(3)
    storages.see(tensor)
    storages.clear()
    del tensor
    assert (bytes_of(storages), len(storages)) == (0, 0)


def test_recount_repairs_an_interrupted_sum(storages: LiveStorages) -> None:
    tensor = torch.zeros(3)
    storages.see(tensor)
    storages.bytes = 5
    storages.recount()
    assert storages.bytes == 12


def test_storages_freed_by_many_threads_at_once(storages: LiveStorages) -> None:
    tensors = [torch.zeros(1 + index % 7) for index in range(4000)]
    kept = [torch.zeros(10) for _ in range(10)]
    storages.see(tensors, kept)
    shares = [tensors[index::4] for index in range(4)]
    tensors.clear()
    threads = [threading.Thread(target=share.clear) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:  # see() while others free: what is freed and made anew must not be mixed up
        more = [torch.zeros(3) for _ in range(200)]
        storages.see(more)
        thread.join()
    assert bytes_of(storages) == 400 + 200 * 12
    assert len(storages) == 210


def test_random_lives_against_a_list_of_what_is_held(storages: LiveStorages) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    choose = random.Random(seed)
    held: list[torch.Tensor] = []
    for _ in range(1000):
        action = choose.random()
        if action < 0.5 or not held:
            held.append(torch.empty(choose.randrange(50)))
            storages.see(held[-1])
        elif action < 0.6:
            held.append(choose.choice(held).view(-1)[:2])
            storages.see(held[-1])
        elif action < 0.7:
            tensor = choose.choice(held)
            if tensor._base is None:
                tensor.resize_(choose.randrange(100))
                storages.see(tensor)
            del tensor
        else:
            held.pop(choose.randrange(len(held)))
        expected = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
        expected.pop(0, None)
        assert bytes_of(storages) == sum(expected.values())


class TwoTensor(torch.Tensor):
    """A traceable wrapper subclass over two tensors."""

    a: torch.Tensor
    b: torch.Tensor

    @staticmethod
    def __new__(cls, a: torch.Tensor, b: torch.Tensor) -> TwoTensor:
        made = torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)  # type: ignore[attr-defined]
        made.a, made.b = a, b
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], meta: None, size: object, stride: object) -> TwoTensor:
        return TwoTensor(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        return NotImplemented


@pytest.fixture(autouse=True)
def no_collection_in_between() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()
