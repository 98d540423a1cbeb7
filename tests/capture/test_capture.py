"""What a capture says of what it found, and the corners that the forms of loops do not have."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from amp_widgets.capture.capture import Capture
from amp_widgets.core.loop import LiveLoop
from amp_widgets.errors import SettingsError
from amp_widgets.session import AmpSession


def make(seed: int = 0) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    optimizer.zero_grad()
    output: torch.Tensor = model(X)
    output.float().pow(2).mean().backward()
    optimizer.step()
    return output


def inner_dtypes(model: nn.Sequential) -> list[torch.dtype]:
    """The dtype of the first layer's output, of each call from now on: what autocast made of it."""
    seen: list[torch.dtype] = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    return seen


class Watched:
    """A capture that keeps what it said after each step."""

    def __init__(self, script: dict[int, dict[str, Any]] | None = None, **kwargs: Any) -> None:
        self.said: list[str] = []
        self.sessions: list[LiveLoop] = []
        self.script = script or {}
        self.capture = Capture(AmpSession, on_found=self.found, **kwargs)

    def found(self, session: LiveLoop) -> None:
        self.sessions.append(session)
        session.on_boundary.append(lambda: self.said.append(" ".join(self.capture.remarks())))
        for at_step, changes in self.script.items():
            session.schedule(at_step=at_step, **changes)


def test_a_region_around_the_whole_loop_takes_the_format_that_is_chosen() -> None:
    model, optimizer = make()
    watched = Watched({2: {"autocast": "fp32"}, 4: {"autocast": "fp16", "scaling": False}})
    with watched.capture:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            dtypes = [step(model, optimizer).dtype for _ in range(6)]
            assert torch.get_autocast_dtype("cpu") == torch.float16
        assert not torch.is_autocast_enabled("cpu")
    assert dtypes == [torch.bfloat16] * 2 + [torch.float32] * 2 + [torch.float16] * 2


def test_an_island_in_such_a_region_stays_off() -> None:
    model, optimizer = make()
    with Watched({1: {"autocast": "fp16", "scaling": False}}).capture, torch.autocast("cpu", dtype=torch.bfloat16):
        step(model, optimizer)
        with torch.autocast("cpu", enabled=False):
            assert step(model, optimizer).dtype == torch.float32
        assert step(model, optimizer).dtype == torch.float16


def test_what_is_added_and_what_stays_off_is_said() -> None:
    model, optimizer = make()
    watched = Watched({2: {"autocast": "bf16"}, 3: {"autocast": "fp16"}, 4: {"autocast": "fp32"}})
    with watched.capture:
        for _ in range(6):
            step(model, optimizer)
    added = "Added by amp_widgets: autocast around the model's forward"
    assert watched.said[0].startswith(f"{added}; your loop")  # after step 1, of the one that begins next
    assert watched.said[1].startswith(f"{added} and loss scaling around backward and step; your loop")
    assert watched.said[2:] == ["", "", ""]


def test_a_loop_whose_regions_are_disabled_is_told_that_nothing_runs_in_fp16() -> None:
    model, optimizer = make()
    watched = Watched({1: {"autocast": "fp16"}})
    with watched.capture:
        for _ in range(3):
            with torch.autocast("cpu", enabled=False):
                assert step(model, optimizer).dtype == torch.float32
    assert "stay off: nothing runs in fp16" in watched.said[-1]
    assert "autocast around" not in watched.said[-1]


def test_a_scaler_that_scales_in_bf16_goes_on_and_it_is_said() -> None:
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    watched = Watched()
    with watched.capture:
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(X).float().sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert watched.sessions[0].history.columns("scale")["scale"].tolist() == [8.0] * 3
    assert "scales the loss in bf16 too" in watched.said[-1]


def test_two_scalers_are_both_controlled_and_put_back() -> None:
    first, second = make(0), make(1)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**k) for k in (4, 6)]
    kinds = [type(scaler) for scaler in scalers]
    watched = Watched({4: {"autocast": "bf16"}, 6: {"autocast": "fp16", "init_scale": 2.0**3}})  # each update() ends a step
    scales = []
    with watched.capture:
        for _ in range(4):
            for (model, optimizer), scaler in zip((first, second), scalers, strict=True):
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = model(X).float().sum()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            scales.append([scaler.get_scale() for scaler in scalers])
    assert scales == [[16.0, 64.0], [16.0, 64.0], [1.0, 1.0], [8.0, 8.0]]
    history = watched.sessions[0].history
    assert history.columns("scale")["scale"].tolist() == [16.0, 64.0, 16.0, 64.0, 1.0, 1.0, 8.0, 8.0]
    assert [(e.step, e.detail["from"], e.detail["to"]) for e in history.events("scale_changed")] == [(6, 16, 8), (7, 64, 8)]
    assert [type(scaler) for scaler in scalers] == kinds
    assert all(scaler.is_enabled() for scaler in scalers)


def test_a_closure_gets_no_scaling() -> None:
    model, _ = make()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(X).float().pow(2).mean()
        loss.backward()
        return loss

    watched = Watched({1: {"autocast": "fp16", "init_scale": 2.0**120}})
    with watched.capture:
        for _ in range(3):
            optimizer.step(closure)  # type: ignore[no-untyped-call]
    history = watched.sessions[0].history
    assert history.columns("scale")["scale"].tolist() == [1.0] * 3
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("wanted", ["second", "holder.inner", "Sequential"])
def test_the_named_model(wanted: str) -> None:
    first, second = nn.Linear(4, 4), make()[0]
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    holder = type("Holder", (), {"inner": second})()
    watched = Watched(model_name=wanted, namespace={"first": first, "second": second, "holder": holder})
    with watched.capture:
        for _ in range(2):
            second(first(X)).sum().backward()
            optimizer.step()
    assert [layer.name for layer in watched.sessions[0].layers] == ["0", "1", "2"]


def test_a_model_is_free_after_the_block() -> None:
    def train() -> Callable[[], object]:
        model, optimizer = make()
        with Watched({1: {"autocast": "fp16", "checkpointed": ["0"]}}).capture:
            for _ in range(3):
                step(model, optimizer)
        return weakref.ref(model)

    reference = train()
    gc.collect()
    assert reference() is None


def test_what_was_asked_for_too_late_is_no_secret() -> None:
    model, optimizer = make()
    watched = Watched({7: {"autocast": "bf16"}})
    with watched.capture:
        for _ in range(3):
            step(model, optimizer)
    (event,) = watched.sessions[0].history.events("rejected")
    assert event.reason == "the session was closed before step 7"
    assert event.detail["autocast"] == "bf16"


def test_two_scheduled_requests_that_do_not_go_together_bother_no_third() -> None:
    model, optimizer = make()
    session = AmpSession(model, optimizer)
    session.schedule(at_step=50, min_scale=16.0)
    session.request(max_scale=8.0)
    session.schedule(at_step=60, autocast="bf16")
    with pytest.raises(SettingsError, match="above max_scale"):
        session.schedule(at_step=70, init_scale=32.0)
    session.close()


def test_two_models_in_turns_keep_one_session() -> None:
    torch.manual_seed(0)
    first, second = make(0), make(1)
    watched = Watched({2: {"autocast": "bf16"}}, namespace={"policy": first[0], "value": second[0]})
    with watched.capture:
        for _ in range(3):
            seen = [inner_dtypes(model) for model, _ in (first, second)]
            for _ in range(4):
                step(*first)
            for _ in range(4):
                step(*second)
    assert len(watched.sessions) == 1
    assert watched.sessions[0].status().step == 12
    assert seen == [[torch.bfloat16] * 4, [torch.float32] * 4]
    assert "also trains value, which is not controlled here" in watched.said[-1]


def test_a_model_lives_no_longer_than_the_code_lets_it_and_each_has_its_session() -> None:
    watched = Watched({2: {"autocast": "bf16"}})
    models: list[weakref.ref[nn.Module]] = []
    dtypes = []
    with watched.capture:
        for run in range(3):
            model, optimizer = make(run)
            assert [reference() for reference in models] == [None] * run
            models.append(weakref.ref(model))
            dtypes.append(inner_dtypes(model))
            for _ in range(4):
                step(model, optimizer)
    assert [session.status().step for session in watched.sessions] == [4, 4, 4]
    assert dtypes == [[torch.float32] * 2 + [torch.bfloat16] * 2] * 3
    assert [session.closed for session in watched.sessions] == [True] * 3


def test_what_was_asked_for_ends_with_the_model_also_where_the_region_comes_first() -> None:
    dtypes = []
    watched = Watched({1: {"autocast": "fp32"}})
    with watched.capture:
        for run in range(2):
            model, optimizer = make(run)
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
            for _ in range(3):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    output = model(X)
                scaler.scale(output.float().sum()).backward()
                scaler.step(optimizer)
                scaler.update()
                dtypes.append((output.dtype, scaler.get_scale()))
    one = [(torch.bfloat16, 64.0), (torch.float32, 1.0), (torch.float32, 1.0)]
    assert dtypes == one * 2


class Odd(nn.Linear):
    """With all that a user may write."""

    def parameters(self, recurse: bool = True) -> Any:
        return [{"params": list(super().parameters(recurse)), "lr": 0.2}]

    @property
    def module(self) -> nn.Module:
        raise ValueError("not yet")

    def __eq__(self, other: object) -> bool:
        raise ValueError("compared")

    __hash__ = nn.Module.__hash__  # torch needs one


class Unbound:
    """A stand-in that stands for nothing yet."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("unbound")


def test_what_users_write_does_no_harm() -> None:
    def run(namespace: dict[str, Any] | None) -> torch.Tensor:
        torch.manual_seed(0)
        model, other = Odd(4, 2), Odd(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watched = Watched(namespace=namespace)
        with watched.capture if namespace is not None else torch.enable_grad():
            for _ in range(3):
                model(other(X)).sum().backward()
                optimizer.step()
        return model.weight.detach()

    assert torch.equal(run(None), run({"unbound": Unbound(), "_": 1}))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_tracing_sees_the_model_alone() -> None:
    with Watched().capture:
        model, optimizer = make()
        traced = torch.jit.trace(model, X)  # type: ignore[no-untyped-call]
        step(model, optimizer)
    assert torch.equal(traced(X), make()[0](X)) is False  # it shares the parameters, which have moved
    assert torch.equal(traced(X), model(X))


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_function_that_calls_the_model() -> None:
    model, optimizer = make()

    @torch.compile(backend="eager", fullgraph=True)
    def loss_of(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).pow(2).mean()
        return loss

    watched = Watched()
    with watched.capture:
        for _ in range(4):
            optimizer.zero_grad()
            loss_of(X).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    assert watched.sessions[0].status().step >= 3


def test_optimizers_that_step_within_backward_get_no_scaling() -> None:
    model, _ = make()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def hook(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    watched = Watched({2: {"autocast": "fp16", "init_scale": 1024.0}})
    losses = []
    with watched.capture:
        for _ in range(12):
            loss = model(X).pow(2).mean()
            loss.backward()
            losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert "no scaling can be added" in watched.said[-1]


def test_another_thread_that_calls_the_model_does_not_train_it() -> None:
    model, optimizer = make()
    stop = threading.Event()

    def infer() -> None:
        while not stop.is_set():
            model(torch.ones(16, 4))  # with gradients on, as people forget

    thread = threading.Thread(target=infer)
    watched = Watched()
    with watched.capture:
        thread.start()
        for _ in range(300):
            step(model, optimizer)
        stop.set()
        thread.join()
    assert watched.sessions[0].status().step == 300
    assert not watched.sessions[0].history.columns("loss")["loss"].tolist().count(float("nan"))


def test_a_new_thread_with_the_identity_of_one_that_was_there_before_trains() -> None:
    model, optimizer = make()
    over = threading.Event()
    before = threading.Thread(target=over.wait)
    before.start()
    watched = Watched()
    with watched.capture:
        over.set()
        before.join()
        new = threading.Thread(target=lambda: [step(model, optimizer) for _ in range(3)])
        new.start()
        new.join()
    if new.ident != before.ident:
        pytest.skip("this system gives no new thread the identity of one that has ended")
    assert watched.sessions[0].status().step == 3


def test_what_cannot_be_watched_is_said_and_the_code_goes_on() -> None:
    class Rigid(torch.amp.GradScaler):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "__class__":
                raise TypeError("it stays what it is")
            super().__setattr__(name, value)

    model, optimizer = make()
    scaler = Rigid("cpu", init_scale=8.0)
    watched = Watched()
    with watched.capture:
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(X).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() == 8.0
    assert "its Rigid cannot be controlled: it stays what it is" in watched.said[-1]
