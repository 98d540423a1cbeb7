"""What is known of CUDA without one, against a real one: its autocast, and its allocator. Needs torch, numpy and pytest only."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

from amp_widgets.analysis.cuda_policy import cuda_policy
from amp_widgets.core.memory.caching_allocator import Block, CachingAllocator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA driver or GPU"),
]

MIB = 1 << 20


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


OPERATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "matmul": lambda x: x @ x,
    "linear": lambda x: F.linear(x, x, x[0]),
    "conv2d": lambda x: F.conv2d(x[None, None], x[None, None, :3, :3]),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
    "mv": lambda x: torch.mv(x, x[0]),
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(len(x), device=x.device)),
    "layer_norm": lambda x: F.layer_norm(x, (len(x),)),
    "mse_loss": lambda x: F.mse_loss(x, x.float()),
    "exp": torch.exp,
    "pow": lambda x: x**2,
    "sum": torch.sum,
    "cumsum": lambda x: torch.cumsum(x, 0),
    "norm": torch.norm,
    "norm.dim": lambda x: torch.norm(x, dim=0),
    "addcmul": lambda x: torch.addcmul(x, x.float(), x),
    "cat": lambda x: torch.cat([x, x.float()]),
    "gelu": F.gelu,
    "mean": torch.mean,
    "trace": torch.trace,
    "avg_pool2d": lambda x: F.avg_pool2d(x[None, None], 2),
}


@pytest.mark.parametrize("given", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", OPERATORS)
def test_a_cpu_under_cudas_policy_gives_the_formats_that_cuda_does(name: str, given: torch.dtype) -> None:
    x = torch.rand(8, 8).to(given)
    with torch.autocast("cuda", dtype=torch.float16):
        on_cuda = OPERATORS[name](x.cuda())
    with cuda_policy(), torch.autocast("cpu", dtype=torch.float16):
        on_cpu = OPERATORS[name](x)
    assert on_cpu.dtype == on_cuda.dtype


@pytest.mark.parametrize("seed", range(4))
def test_the_replay_counts_as_the_allocator_does(seed: int) -> None:
    print(f"seed {seed}")
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    draw = random.Random(seed)
    allocator = CachingAllocator()
    tensors: dict[int, torch.Tensor] = {}
    blocks: dict[int, Block | None] = {}
    for number in range(200):
        if tensors and draw.random() < 0.45:
            owner = draw.choice(list(tensors))
            del tensors[owner]
            allocator.free(blocks.pop(owner))
        else:
            nbytes = draw.choice((draw.randint(1, 4000), draw.randint(1, 2 * MIB), draw.randint(MIB, 40 * MIB)))
            tensors[number] = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
            blocks[number] = allocator.allocate(nbytes)
        assert torch.cuda.memory_allocated() - before[0] == allocator.allocated_bytes
    assert torch.cuda.max_memory_allocated() - before[0] == allocator.peak_allocated_bytes
    # Which of two equal free blocks lies lower is up to the device.
    reserved = torch.cuda.memory_reserved() - before[1]
    assert reserved == pytest.approx(allocator.reserved_bytes, rel=0.1)
