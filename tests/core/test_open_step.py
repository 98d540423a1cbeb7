"""A step that nobody goes on with is told from one that is in progress."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from amp_widgets.core.loop import LiveLoop
from amp_widgets.core.open_step import graph_is_alive


@pytest.fixture(params=[1, 0])
def names(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """What cells share: a model, its optimizers, a loop."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = LiveLoop(model, [optimizer], memory_every=request.param)
    yield {"model": model, "optimizer": optimizer, "loop": loop, "x": torch.randn(3, 4), "nn": nn}
    loop.close()


def run_cell(number: int, code: str, names: dict[str, Any]) -> None:
    """As IPython does it: every cell is a file of its own."""
    exec(compile(code, f"<cell {number}>", "exec"), names)


def test_whether_a_graph_is_alive() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(3, 4)
    frozen, before = model[0].weight.requires_grad_(False), torch.is_grad_enabled()
    parameters = list(model.parameters())
    assert not graph_is_alive(parameters)
    output = model(x)
    assert graph_is_alive(parameters)
    assert not graph_is_alive([frozen])
    with torch.inference_mode():
        assert graph_is_alive(parameters)
    with torch.no_grad():
        alone = model(x)
    del output
    assert not graph_is_alive(parameters)
    with torch.inference_mode():
        assert not graph_is_alive(parameters)
    loss = model(x).sum()
    loss.backward()
    assert graph_is_alive(parameters)
    assert alone.grad_fn is None
    assert torch.is_grad_enabled() == before
    assert not torch.autograd.graph.get_gradient_edge(parameters[1]).node.metadata  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "cell",
    [
        "output = model(x)",  # and so on in Out[1]
        "with loop.autocast():\n    output = model(x)",
        "model(x).sum().backward()",
        "loop.scaler.scale(model(x).sum()).backward()",  # by 1, as autocast is off
        "loss = model(x).sum()\nloop.record_loss(loss)",
    ],
)
def test_a_step_whose_cell_is_over_is_forgotten(names: dict[str, Any], cell: str) -> None:
    loop = names["loop"]
    loop.request(autocast="bf16")
    loop.apply_pending()
    run_cell(1, cell, names)
    assert loop.step_in_progress
    assert not loop.apply_pending()
    assert loop.settle_step()
    assert not loop.step_in_progress
    assert loop.apply_pending()
    run_cell(2, "optimizer.zero_grad()\nmodel(x).sum().backward()\noptimizer.step()", names)
    assert (loop.step, len(loop.history)) == (1, 1)


def test_a_cell_that_was_left_by_an_error(names: dict[str, Any]) -> None:
    with pytest.raises(ZeroDivisionError):
        run_cell(1, "loss = model(x).sum()\n1 / 0", names)
    assert names["loop"].settle_step()


def test_an_optimizer_that_steps_later_still_makes_a_step(names: dict[str, Any]) -> None:
    loop = names["loop"]
    run_cell(1, "model(x).sum().backward()", names)
    assert loop.settle_step()
    run_cell(2, "optimizer.step()", names)
    assert loop.step == 1


@pytest.mark.parametrize(
    ("cell", "settled"),
    [
        ("model(x)", True),
        ("output = model(x)", False),
        ("loss = model(x).sum(); loss.backward()", False),
        ("loop.begin_step()", False),
        ("loss = model(x).sum(); loop.record_loss(loss); del loss", False),
    ],
)
def test_within_the_cell_the_graph_decides(names: dict[str, Any], cell: str, settled: bool) -> None:
    run_cell(1, f"{cell}\nsettled = loop.settle_step()", names)
    assert names["settled"] is settled
    assert names["loop"].step_in_progress is not settled


def test_in_the_midst_of_a_pass_a_step_is_in_progress(names: dict[str, Any]) -> None:
    names["seen"] = []
    names["model"][0].register_forward_hook(lambda *_: names["seen"].append(names["loop"].settle_step()))
    run_cell(1, "model(x)", names)
    names["model"][2].weight.register_hook(lambda _: names["seen"].append(names["loop"].settle_step()))
    run_cell(2, "model(x).sum().backward()", names)
    assert names["seen"] == [False, False, False]


def test_a_scaled_step_stays_until_it_is_abandoned(names: dict[str, Any]) -> None:
    loop = names["loop"]
    loop.request(autocast="fp16")
    loop.apply_pending()
    run_cell(1, "optimizer.zero_grad()\nwith loop.autocast():\n    loss = model(x).float().sum()", names)
    run_cell(2, "loop.scaler.scale(loss).backward()", names)
    assert not loop.settle_step()
    run_cell(3, "loop.scaler.step(optimizer)\nloop.scaler.update()", names)
    assert loop.settle_step()
    assert loop.step == 1
    run_cell(4, "loop.scaler.scale(model(x).sum()).backward()", names)
    assert not loop.settle_step()
    loop.abandon_step()
    assert loop.settle_step()


def test_a_step_of_several_optimizers_ends_with_its_cell() -> None:
    model = nn.ModuleDict({"one": nn.Linear(4, 4), "two": nn.Linear(4, 4)})
    first, second = (torch.optim.SGD(model[name].parameters(), lr=0.1) for name in ("one", "two"))
    loop = LiveLoop(model)
    names = {"model": model, "first": first, "second": second, "loop": loop, "x": torch.randn(3, 4)}
    both = "model['two'](model['one'](x)).sum().backward()\nfirst.step()\nsecond.step()\n"
    run_cell(1, both * 3, names)
    done = loop.step
    run_cell(2, "model['one'](x).sum().backward()\nfirst.step()\nsettled = loop.settle_step()", names)
    assert not names["settled"]  # the second may step yet
    assert loop.settle_step()
    assert loop.step > done
    loop.close()


def test_a_step_of_another_thread_is_left_alone_while_that_runs(names: dict[str, Any]) -> None:
    loop, go, begun = names["loop"], threading.Event(), threading.Event()
    names |= {"go": go, "begun": begun}
    cell = "output = model(x)\nbegun.set()\nassert go.wait(20)"
    other = threading.Thread(target=run_cell, args=(1, cell, names))
    other.start()
    assert begun.wait(20)
    assert not loop.settle_step()
    go.set()
    other.join()
    assert loop.settle_step()
    assert not loop.step_in_progress


def test_a_later_cell_that_goes_on_with_the_step_is_not_disturbed_by_another_thread(names: dict[str, Any]) -> None:
    loop, seen = names["loop"], []

    def ask() -> None:
        seen.append(loop.settle_step())

    def elsewhere() -> None:
        other = threading.Thread(target=ask)
        other.start()
        other.join()

    names["elsewhere"] = elsewhere
    run_cell(1, "output = model(x)", names)
    run_cell(2, "loss = model(x).sum()\nelsewhere()\nloss.backward()\noptimizer.step()", names)
    assert seen == [False]
    assert loop.step == 1
