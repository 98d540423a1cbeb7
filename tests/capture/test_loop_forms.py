"""Captured loops against hand-instrumented ones: same parameters bit for bit, same events, and nothing left behind."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import random
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.amp.autocast_mode import autocast
from torch.nn import functional as F
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.data import TensorDataset

from amp_widgets.capture.capture import Capture
from amp_widgets.core.history import History
from amp_widgets.core.loop import LiveLoop
from amp_widgets.session import AmpSession
from tests.capture.forms import (
    ADD_FP16,
    FORMS,
    OVERFLOW,
    AmpSwitchedOff,
    ClassBasedTrainer,
    Form,
    Net,
    OwnCheckpointing,
    PlainBf16,
    PlainClipping,
    PlainFp32,
    PlainScheduler,
    Tutorial,
    adam,
    batches,
)
from tests.capture.hand import Hand, Script

pytestmark = [
    # torch's own words about what some of the loops do
    pytest.mark.filterwarnings("ignore:.*torch.(cpu|cuda).amp.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*the use_reentrant parameter should be passed explicitly:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*CUDA is not available:UserWarning"),
]

each_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
each_script = pytest.mark.parametrize(
    ("form", "name"), [pytest.param(f, n, id=f"{f.__name__}-{n}") for f in FORMS for n in f.scripts]
)


@pytest.fixture(autouse=True, scope="module")
def all_that_torch_does_at_first_use() -> None:
    """It imports much, and gives hooks to every optimizer's ``step``.

    A capture asks the garbage collector who holds a module: what is there now is kept out of that, which is quicker.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for form in FORMS:
            untouched(form)
    gc.collect()
    gc.freeze()


# ---- running a form --------------------------------------------------------------------------------------------------


class Run:
    """A form that was run, and the state of all that it worked on."""

    def __init__(self, form: type[Form], run: Callable[..., dict[str, Any] | None]) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.things = form.make()
        self.things.update(run(**self.things) or {})
        self.random_states = (torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False))

    def state(self) -> dict[str, Any]:
        return {name: _state(thing) for name, thing in self.things.items()}


class KnownRun:
    """The end of a run, without what it worked on: a capture looks through all that there is."""

    def __init__(self, run: Run) -> None:
        self._state = run.state()
        self.random_states = run.random_states

    def state(self) -> dict[str, Any]:
        return self._state


class Captured(Run):
    """A form that was run unchanged, with a script as the only thing done to it."""

    def __init__(
        self,
        form: type[Form],
        script: Script | None = None,
        on_found: Callable[[LiveLoop], object] | None = None,
        *,
        in_namespace: bool = False,
    ) -> None:
        before = patchable()
        self.found: list[LiveLoop] = []

        def found(session: LiveLoop) -> None:
            self.found.append(session)
            scheduling(script or {})(session)
            if on_found is not None:
                on_found(session)

        def run(**made: Any) -> dict[str, Any] | None:
            namespace = dict(made) if in_namespace else None
            with Capture(AmpSession, on_found=found, namespace=namespace) as capture:
                assert replaced(before, patchable())  # so the comparison below can fail
                result = form.loop(**made)
            self.capture = capture
            return result

        super().__init__(form, run)
        assert_nothing_left(before)
        assert self.found == [self.capture.session]

    @property
    def session(self) -> LiveLoop:
        assert self.capture.session is not None
        return self.capture.session

    @property
    def history(self) -> History:
        return self.session.history


_UNTOUCHED: dict[type[Form], Run] = {}


def untouched(form: type[Form]) -> Run:
    if form not in _UNTOUCHED:
        _UNTOUCHED[form] = Run(form, form.loop)
    return _UNTOUCHED[form]


def scheduling(script: Script) -> Callable[[LiveLoop], None]:
    def on_found(session: LiveLoop) -> None:
        for at_step, changes in script.items():
            session.schedule(at_step=at_step, **changes)

    return on_found


_BY_HAND: dict[tuple[type[Form], str], tuple[KnownRun, Hand]] = {}


def by_hand(form: type[Form], script: Script | None = None) -> tuple[KnownRun, Hand]:
    key = form, repr(script)
    if key not in _BY_HAND:
        hand = Hand(script)
        run = Run(form, functools.partial(form.by_hand, hand))
        for name, thing in run.things.items():
            if isinstance(thing, GradScaler) and thing.is_enabled():  # a loop's own scaler gets its own rules back
                theirs = untouched(form).things[name].state_dict()
                rules = {rule: theirs[rule] for rule in ("growth_factor", "backoff_factor", "growth_interval")}
                thing.load_state_dict({**thing.state_dict(), **rules})
        _BY_HAND[key] = KnownRun(run), hand
    return _BY_HAND[key]


def _state(thing: Any) -> Any:
    """What counts of a thing, in a form that does not change any more."""
    if isinstance(thing, torch.Tensor):
        return thing.detach().clone()
    if isinstance(thing, (list, tuple)):
        return [_state(part) for part in thing]
    if isinstance(thing, nn.Module):
        return {"state": copy.deepcopy(thing.state_dict()), "mode": [m.training for m in thing.modules()]}
    if isinstance(thing, TensorDataset):
        return _state(thing.tensors)
    if isinstance(thing, (int, float)):
        return thing
    return copy.deepcopy(thing.state_dict())


def assert_equal(one: Any, other: Any, where: str = "") -> None:
    """Bit for bit; NaN equals NaN."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, where
        assert torch.equal(one.nan_to_num(1e9), other.nan_to_num(1e9)), where
        assert torch.equal(one.isnan(), other.isnan()), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_equal(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for i, pair in enumerate(zip(one, other, strict=True)):
            assert_equal(*pair, where=f"{where}.{i}")
    elif isinstance(one, np.ndarray):
        np.testing.assert_array_equal(one, other)
    else:
        assert one == other or (one != one and other != other), where


def assert_same_run(one: Run | KnownRun, other: Run | KnownRun) -> None:
    assert_equal(one.state(), other.state())
    assert_equal(one.random_states, other.random_states)


def assert_recorded(history: History, hand: Hand) -> None:
    """The rows and the events of the steps are those that were seen by hand."""
    columns = history.columns("step", "loss", "scale", "skipped")
    assert columns["step"].tolist() == list(range(len(hand.rows)))
    np.testing.assert_array_equal(columns["loss"], [row.loss for row in hand.rows])
    assert columns["scale"].tolist() == [row.scale for row in hand.rows]
    assert columns["skipped"].tolist() == [float(row.skipped) for row in hand.rows]
    assert [event.step for event in history.events("skipped")] == hand.skipped_steps()
    changed = history.events("scale_changed")
    assert [(event.step, event.detail["from"], event.detail["to"]) for event in changed] == hand.scale_events()


def assert_applied(history: History, script: Script, source: str = "schedule") -> None:
    """Every change of the script was in force from its step on, and nothing else was."""
    assert history.events("rejected") == []
    applied = history.events("applied")
    assert {event.detail["source"] for event in applied} <= {source}
    seen: dict[int, dict[str, Any]] = {}
    for event in applied:
        seen.setdefault(event.step, {}).update({k: v for k, v in event.detail.items() if k != "source"})
    assert seen == {step: dict(changes) for step, changes in script.items()}


def gradients(run: Run) -> list[str]:
    """Bit for bit, NaN included: a float's repr is exact."""
    models = [thing for thing in run.things.values() if isinstance(thing, nn.Module)]
    return [repr(None if p.grad is None else p.grad.to_dense().tolist()) for model in models for p in model.parameters()]


def layer_names(form: type[Form], run: Run, prefixes: tuple[str, ...]) -> list[str]:
    """What the layers of the session are to be called: with a prefix where there is more than one model."""
    models = [run.things[name] for name in form.models]
    if len(models) == 1:
        return [name for name, _ in models[0].named_modules() if name]
    parts = zip(prefixes, models, strict=True)
    return [f"{prefix}.{name}".rstrip(".") for prefix, model in parts for name, _ in model.named_modules()]


def checkpointable(session: LiveLoop) -> list[str]:
    return [layer.name for layer in session.layers if layer.why_not is None and not layer.structural]


# ---- what may be patched ---------------------------------------------------------------------------------------------


def patchable() -> dict[str, Any]:
    """Whatever a capture could replace in torch, and every global hook."""
    cpu_amp: Any = torch.cpu.amp  # whose types name neither
    classes: set[type] = {
        autocast, cpu_amp.autocast, torch.cuda.amp.autocast, GradScaler, cpu_amp.GradScaler, torch.cuda.amp.GradScaler,
        torch.Tensor, nn.Module, nn.Linear, nn.Sequential, Net, torch.optim.Optimizer, torch.optim.SGD, torch.optim.Adam,
        torch.optim.AdamW, torch.optim.lr_scheduler.LRScheduler, torch.utils.data.DataLoader,
    }  # fmt: skip
    found = {f"{cls.__module__}.{cls.__name__}.{name}": value for cls in classes for name, value in vars(cls).items()}
    for owner in (torch, torch.amp, torch.autograd, torch.cpu.amp, torch.cuda.amp, torch_checkpoint, F, torch.nn.utils):
        found.update({f"{owner.__name__}.{name}": value for name, value in vars(owner).items() if callable(value)})
    for owner in (torch_module, torch_optimizer):
        for name, value in vars(owner).items():
            if name.startswith("_global_") and isinstance(value, dict):
                found.update({f"{name}[{key}]": hook for key, hook in value.items()})
    return found


def replaced(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What is another object, or new, or gone."""
    return [name for name in before.keys() | after.keys() if before.get(name) is not after.get(name)]


def assert_nothing_left(before: dict[str, Any]) -> None:
    assert replaced(before, patchable()) == []
    assert not any(hooks for name, hooks in vars(torch_module).items() if name.startswith("_global_") and isinstance(hooks, dict))
    assert not torch_optimizer._global_optimizer_pre_hooks
    assert not torch_optimizer._global_optimizer_post_hooks


def fingerprint(thing: Any) -> Any:
    """Class, attributes and hooks of an object, and of those inside of it: what a do-no-harm capture leaves as it was."""
    if isinstance(thing, nn.Module):
        return [(type(m), sorted(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks)) for m in thing.modules()] + [
            (p.grad is None, len(p._backward_hooks or ())) for p in thing.parameters()
        ]
    if isinstance(thing, torch.optim.Optimizer):
        hooks = len(thing._optimizer_step_pre_hooks), len(thing._optimizer_step_post_hooks)
        # a scheduler puts its own `step` into the optimizer
        return type(thing), sorted(vars(thing)), *hooks, getattr(vars(thing).get("step"), "__qualname__", None)
    if isinstance(thing, GradScaler):
        return type(thing), {k: repr(v) for k, v in vars(thing).items() if k != "_per_optimizer_states"}
    return None


# ---- the references themselves ---------------------------------------------------------------------------------------


@each_form
def test_by_hand_without_a_script_is_the_loop(form: type[Form]) -> None:
    run, hand = by_hand(form)
    assert_same_run(run, untouched(form))
    assert len(hand.rows) == form.steps
    assert hand.chosen is None


@each_script
def test_each_script_changes_something_by_hand(form: type[Form], name: str) -> None:
    run, hand = by_hand(form, form.scripts[name])
    assert len(hand.rows) == form.steps
    without_effect = form is AmpSwitchedOff or (name == "fp32" and form.own == "fp32") or name == "bf16 again"
    with contextlib.nullcontext() if without_effect else pytest.raises(AssertionError):
        assert_equal(run.state(), untouched(form).state())
    if name == "overflow":
        assert hand.skipped_steps() == [next(iter(form.scripts[name]))]


# ---- (a) untouched ---------------------------------------------------------------------------------------------------


@each_form
def test_untouched_is_bit_identical_and_recorded(form: type[Form]) -> None:
    settings: list[str] = []
    captured = Captured(form, on_found=lambda session: settings.append(session.settings.autocast))
    plain = untouched(form)
    assert_same_run(captured, plain)
    assert gradients(captured) == gradients(plain)
    assert [fingerprint(thing) for thing in captured.things.values()] == [fingerprint(t) for t in plain.things.values()]
    _, hand = by_hand(form)
    assert_recorded(captured.history, hand)
    assert captured.history.events("applied", "rejected") == []
    assert captured.session.closed

    assert [layer.name for layer in captured.session.layers] == layer_names(form, captured, ("Sequential", "Sequential_2"))
    assert settings == [form.own]
    assert captured.session.settings.autocast == form.own
    scaler = captured.things.get("scaler")
    if isinstance(scaler, GradScaler) and scaler.is_enabled():
        known = captured.session.settings
        assert known.growth_interval == scaler.get_growth_interval()
        assert known.growth_factor == scaler.get_growth_factor()
        assert known.backoff_factor == scaler.get_backoff_factor()
        assert known.init_scale == hand.rows[0].scale


@pytest.mark.parametrize("form", [f for f in FORMS if f.models != ("model",)] + [PlainFp32], ids=lambda f: f.__name__)
def test_models_are_called_as_in_the_namespace(form: type[Form]) -> None:
    captured = Captured(form, in_namespace=True)
    assert_same_run(captured, untouched(form))
    assert [layer.name for layer in captured.session.layers] == layer_names(form, captured, form.models)


def test_a_loop_goes_on_after_the_capture() -> None:
    def twice(form: type[Form], context: Callable[[], Any]) -> Run:
        def run(**made: Any) -> None:
            with context():
                form.loop(**made)
            form.loop(**made)

        return Run(form, run)

    for form in (OwnCheckpointing, PlainBf16):
        assert_same_run(twice(form, lambda: Capture(AmpSession)), twice(form, contextlib.nullcontext))


def test_nothing_is_kept_alive() -> None:
    def run() -> tuple[Capture, list[weakref.ref[Any]]]:
        made = PlainScheduler.make()
        with Capture(AmpSession, on_found=scheduling(ADD_FP16)) as capture:
            made.update(PlainScheduler.loop(**made) or {})
        return capture, [weakref.ref(made[name]) for name in ("model", "optimizer", "warmup")]

    capture, references = run()
    gc.collect()
    assert [reference() for reference in references] == [None, None, None]
    assert capture.session is not None
    assert len(capture.session.history) == 8


def test_two_captures_one_after_the_other() -> None:
    first = Captured(PlainFp32, ADD_FP16)
    second = Captured(PlainFp32)
    assert_same_run(second, untouched(PlainFp32))
    assert len(first.history) == len(second.history) == PlainFp32.steps
    assert first.session is not second.session


# ---- (b) scripted ----------------------------------------------------------------------------------------------------


@each_script
def test_scripted_changes_equal_those_made_by_hand(form: type[Form], name: str) -> None:
    script = form.scripts[name]
    captured = Captured(form, script)
    expected, hand = by_hand(form, script)
    assert_recorded(captured.history, hand)
    assert_applied(captured.history, script)
    assert_same_run(captured, expected)


@each_form
def test_checkpointed_layers_change_no_bit(form: type[Form]) -> None:
    at_step = min(3, form.steps - 1)
    names: list[str] = []

    def on_found(session: LiveLoop) -> None:
        names.extend(checkpointable(session))
        session.schedule(at_step=at_step, checkpointed=names)

    captured = Captured(form, on_found=on_found)
    assert_same_run(captured, untouched(form))
    assert gradients(captured) == gradients(untouched(form))
    assert names
    assert_applied(captured.history, {at_step: {"checkpointed": names}})
    _, hand = by_hand(form)
    assert_recorded(captured.history, hand)
    fingerprints = [[fingerprint(thing) for thing in run.things.values()] for run in (captured, untouched(form))]
    assert fingerprints[0] == fingerprints[1]


@pytest.mark.parametrize("form", [form for form in FORMS if form.scripts], ids=lambda form: form.__name__)
def test_checkpointed_layers_within_a_script_change_no_bit(form: type[Form]) -> None:
    script = list(form.scripts.values())[-1]

    def on_found(session: LiveLoop) -> None:
        session.schedule(at_step=1, checkpointed=checkpointable(session))
        session.schedule(at_step=form.steps - 1, checkpointed=checkpointable(session)[:1])

    captured = Captured(form, script, on_found)
    expected, hand = by_hand(form, script)
    assert_same_run(captured, expected)
    assert_recorded(captured.history, hand)


def test_requests_made_when_found_are_in_force_from_step_1() -> None:
    captured = Captured(PlainFp32, on_found=lambda session: session.request(autocast="bf16"))
    expected, hand = by_hand(PlainFp32, {1: {"autocast": "bf16"}})
    assert_same_run(captured, expected)
    assert_recorded(captured.history, hand)
    assert_applied(captured.history, {1: {"autocast": "bf16"}}, source="script")


def test_a_step_with_overflow_leaves_optimizer_and_its_state_alone() -> None:
    """With the parameters and the optimizer's state looked at before and after each step, from inside the loop."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    changed = []
    with Capture(AmpSession, on_found=scheduling(OVERFLOW)) as capture:
        for x, y in batches():
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            grads = [p.grad for p in model.parameters()]
            before = copy.deepcopy((list(model.parameters()), optimizer.state_dict()))
            optimizer.step()
            after = copy.deepcopy((list(model.parameters()), optimizer.state_dict()))
            changed.append(repr(before) != repr(after))
            assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    assert changed == [True, True, False, True, True, True, True, True]
    assert capture.session is not None
    assert [event.step for event in capture.session.history.events("skipped")] == [2]


def test_a_thread_that_was_there_before_is_none_of_ours() -> None:
    """A loop with regions and a scaler of its own goes on there as it does, whatever is chosen here."""
    results: list[dict[str, Any]] = []
    start, go, done = Net().state_dict(), threading.Event(), threading.Event()

    def other() -> None:
        go.wait()
        model = Net().eval()
        model.body[2] = nn.Identity()  # dropout would draw random numbers, which the threads share
        model.load_state_dict(start)
        optimizer, scaler = adam(model), GradScaler("cpu", init_scale=2.0**10)
        OwnCheckpointing.loop(model, optimizer, scaler, batches())
        results.append(copy.deepcopy(model.state_dict()))
        done.set()

    def run(context: Callable[[], Any]) -> None:
        go.clear()
        done.clear()
        thread = threading.Thread(target=other)
        thread.start()
        torch.manual_seed(0)
        model = Net()
        optimizer = adam(model)
        with context():
            for i, (x, y) in enumerate(batches()):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                if i == 3:
                    go.set()
                    done.wait()
                loss.backward()
                optimizer.step()
        thread.join()

    run(contextlib.nullcontext)
    capture = Capture(AmpSession, on_found=scheduling({1: {"autocast": "bf16", "checkpointed": ["stem"]}}))
    run(lambda: capture)
    assert capture.session is not None
    assert len(capture.session.history) == 8
    assert_equal(results[0], results[1])


# ---- exceptions ------------------------------------------------------------------------------------------------------


class Breaking:
    """Raises `error` in the fourth of the places that it is in."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.count = 0

    def __call__(self, *_: Any) -> None:
        self.count += 1
        if self.count == 4:
            raise self.error


class BreakingNet(Net):
    def __init__(self, place: str, breaking: Breaking) -> None:
        super().__init__()
        self.place = place
        self.breaking = breaking

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(x)
        if self.place == "forward":
            self.breaking()
        if self.place == "backward" and hidden.requires_grad:
            hidden.register_hook(self.breaking)
        logits: torch.Tensor = self.head(self.body(hidden))
        return logits


PLACES = ("data", "forward", "backward", "step")
LOOPS: dict[str, Script] = {
    "scaled": {}, "scaled to bf16": {2: {"autocast": "bf16"}},
    "plain": {}, "plain to fp16": ADD_FP16, "plain to bf16": {1: {"autocast": "bf16"}},
}  # fmt: skip


def break_off(kind: str, place: str, error: BaseException, context: Callable[[], Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    breaking = Breaking(error)
    model = BreakingNet(place, breaking)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if place == "step":
        optimizer.register_step_pre_hook(breaking)
    scaler = GradScaler("cpu", init_scale=2.0**10)

    def data() -> Iterator[Any]:
        for batch in batches():
            if place == "data":
                breaking()
            yield batch

    def train() -> None:
        for x, y in data():
            optimizer.zero_grad()
            if kind.startswith("scaled"):
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = F.cross_entropy(model(x), y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

    with pytest.raises(type(error)) as caught, context():
        train()
    assert caught.value is error
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") == torch.bfloat16  # torch's default for a CPU
    return {"model": model, "optimizer": optimizer, "scaler": scaler}


@pytest.mark.parametrize("error", [ValueError("of the user's"), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", LOOPS)
def test_an_exception_leaves_nothing_behind(kind: str, place: str, error: BaseException) -> None:
    before = patchable()
    captures: list[Capture] = []

    def context() -> Capture:
        def on_found(session: LiveLoop) -> None:
            session.schedule(at_step=1, checkpointed=["stem"])
            scheduling(LOOPS[kind])(session)

        captures.append(Capture(AmpSession, on_found=on_found))
        return captures[0]

    captured = break_off(kind, place, error, context)
    assert_nothing_left(before)
    session = captures[0].session
    assert session is not None
    assert session.closed
    assert session.history.columns("step")["step"].tolist() == [0, 1, 2]
    plain = break_off(kind, place, error, contextlib.nullcontext)
    for name in captured:
        assert type(captured[name]) is type(plain[name])
        assert vars(captured[name]).keys() == vars(plain[name]).keys()
    if not LOOPS[kind]:
        assert [fingerprint(thing) for thing in captured.values()] == [fingerprint(thing) for thing in plain.values()]
        assert_equal({k: _state(v) for k, v in captured.items()}, {k: _state(v) for k, v in plain.items()})


def test_an_exception_in_the_step_leaves_true_gradients() -> None:
    """A plain loop never sees a scaled gradient, also where scaling was added and the step is broken off after the backward."""
    grads = []
    for init_scale in (2.0**2, 2.0**10):

        def context(init_scale: float = init_scale) -> Capture:
            return Capture(AmpSession, on_found=scheduling({2: {"autocast": "fp16", "init_scale": init_scale}}))

        model = break_off("plain", "step", ValueError(), context)["model"]
        grads.append([p.grad.norm().item() for p in model.parameters()])
    assert grads[0] == pytest.approx(grads[1], rel=1e-2, abs=1e-4)  # scaled ones would differ by 2^8


def test_nothing_is_left_when_no_model_was_seen() -> None:
    before = patchable()
    with Capture(AmpSession) as capture:
        torch.ones(3).sum()
    assert capture.session is None
    with pytest.raises(ZeroDivisionError), Capture(AmpSession):
        1 / 0  # noqa: B018
    assert_nothing_left(before)


def test_without_a_session_the_loop_goes_on() -> None:
    before = patchable()

    def refuse(model: nn.Module) -> LiveLoop:
        raise RuntimeError("no session today")

    def run(**made: Any) -> dict[str, Any] | None:
        with Capture(refuse) as capture:
            result = PlainFp32.loop(**made)
        assert capture.session is None
        assert capture.why_not is not None
        assert "no session today" in capture.why_not
        return result

    assert_same_run(Run(PlainFp32, run), untouched(PlainFp32))
    assert_nothing_left(before)


@pytest.mark.parametrize("form", [Tutorial, PlainClipping, PlainScheduler, ClassBasedTrainer], ids=lambda f: f.__name__)
def test_inside_of_a_function_that_is_called_in_the_block(form: type[Form]) -> None:
    """The same with some frames in between, and with a second, plain loop on the same model after the first."""

    def run(**made: Any) -> dict[str, Any] | None:
        def deep(levels: int) -> dict[str, Any] | None:
            return form.loop(**made) if levels == 0 else deep(levels - 1)

        with Capture(AmpSession) as capture:
            result = deep(20)
        assert capture.session is not None
        assert len(capture.session.history) == form.steps
        return result

    assert_same_run(Run(form, run), untouched(form))
