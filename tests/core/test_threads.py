"""Numbers of threads that no other thread gets, and what depends on them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from amp_widgets.core.threads import is_alive, this_thread
from amp_widgets.session import AmpSession

cross_entropy = nn.functional.cross_entropy


def on_a_thread(job: Callable[[], object]) -> int:
    """Do it on a thread that is over afterwards; gives its identity."""
    thread = threading.Thread(target=job)
    thread.start()
    thread.join()
    assert thread.ident is not None
    return thread.ident


@pytest.fixture
def over() -> Iterator[threading.Event]:
    """When the threads of a test are to end."""
    event = threading.Event()
    yield event
    event.set()


def alive_with(ident: int, over: threading.Event) -> None:
    """Start threads that go on until one of them has the identity of one that has ended; most often the first one has."""
    for _ in range(100):
        thread = threading.Thread(target=over.wait, daemon=True)
        thread.start()
        if thread.ident == ident:
            return
    pytest.skip("this system gives no new thread the identity of one that has ended")


def test_each_thread_has_a_number_of_its_own_as_long_as_it_is_there() -> None:
    here = this_thread()
    seen: list[int] = []
    for _ in range(5):
        on_a_thread(lambda: seen.append(this_thread()) or seen.append(this_thread()))  # type: ignore[func-returns-value]
    assert seen[::2] == seen[1::2]
    assert len({here, *seen}) == 6
    assert here == this_thread()
    assert is_alive(here)
    assert not any(map(is_alive, seen))
    assert not is_alive(None)
    assert not is_alive(-1)
    asked: list[bool] = []
    on_a_thread(lambda: asked.append(is_alive(here)) or asked.append(is_alive(this_thread())))  # type: ignore[func-returns-value]
    assert asked == [True, True]


@pytest.mark.parametrize("own_loop", [False, True], ids=["fit", "own loop"])
def test_a_run_is_measured_though_another_thread_has_the_identity_of_its_last_one(over: threading.Event, own_loop: bool) -> None:
    """As a notebook's page starts threads in the kernel, one for its widgets for instance, after a run has ended."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.randn(128, 16), torch.randint(4, (128,))
    with AmpSession(model, optimizer) as session:

        def train() -> None:
            for inputs, targets in session.steps([batch] * 3):
                optimizer.zero_grad()
                session.scaler.scale(cross_entropy(model(inputs), targets)).backward()
                session.scaler.step(optimizer)
                session.scaler.update()

        def fit() -> int:
            idents: list[int] = []
            session.on_boundary.append(lambda: idents.append(threading.get_ident()))
            session.fit([batch], cross_entropy, 3)
            session.wait()
            return idents[-1]

        alive_with(on_a_thread(train) if own_loop else fit(), over)
        train() if own_loop else fit()
        columns = session.history.columns("peak_bytes", "allocated_bytes")
    first, *rest = columns["peak_bytes"].tolist()
    assert first < rest[0]  # without the optimizer's state
    assert rest == [rest[0]] * 5
    assert len(set(columns["allocated_bytes"].tolist())) == 1
