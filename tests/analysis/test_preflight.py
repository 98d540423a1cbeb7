"""``session.preflight``: every finding is provoked once, and once there is something close to it that it must not find."""

from __future__ import annotations

import collections
import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction, checkpoint, checkpoint_sequential

from amp_widgets.analysis.preflight import Finding, Findings, preflight
from amp_widgets.core.autocast import Support
from amp_widgets.errors import RunError, SessionClosedError
from amp_widgets.session import AmpSession

Untouched = Callable[[AmpSession], contextlib.AbstractContextManager[None]]
cross_entropy = nn.functional.cross_entropy

BCE = "BCELoss within autocast"
HALF = "The model's own parameters are fp16"
NORM = "BatchNorm in 16 bits"
FUSED = "A fused optimizer unscales the gradients in its own step"
EMULATED = "bf16 is emulated on this device"
TIED = "Weights are shared across checkpointed regions"
COMPILED = "Parts go through torch.compile"
REENTRANT = "Reentrant checkpoints in your own code"
CUT = "A reentrant checkpoint cuts the gradient off"
LOSS16 = "The loss is returned in bf16"
FUNCTION = "Custom autograd Functions without custom_fwd"
RANDOM = "Dropout in a checkpoint that does not preserve the random state"
STRANGERS = "The optimizer has parameters that are not the model's"
MOVED = "The optimizer's state is from before the model was moved or converted"
UNWATCHED = "No forward pass was watched"
FAILS = "The forward pass fails in bf16"


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def attach() -> Iterator[Callable[..., AmpSession]]:
    made: list[AmpSession] = []

    def session_of(*layers: nn.Module, optimizer: Any = None, **settings: Any) -> AmpSession:
        model = nn.Sequential(nn.Linear(4, 6), *layers, nn.Linear(6, 3))
        session = AmpSession(model, torch.optim.Adam(model.parameters(), lr=0.01) if optimizer is None else optimizer(model))
        made.append(session)
        session._support = {**session.support, "bf16": Support(available=True)}  # whatever this machine is
        if settings:
            session.request(**settings)
            session.apply_pending()
        return session

    yield session_of
    for session in made:
        session.close()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    own = torch.Generator().manual_seed(1)
    return torch.randn(8, 4, generator=own), torch.randint(3, (8,), generator=own)


def found(findings: Findings, title: str) -> Finding | None:
    hits = [finding for finding in findings if finding.title == title]
    assert len(hits) <= 1
    return hits[0] if hits else None


def grave(findings: Findings) -> list[str]:
    return [finding.title for finding in findings if finding.severity != "info"]


class Own(nn.Module):
    """A checkpoint of the user's own around a small block."""

    def __init__(self, *, p: float = 0.0, **arguments: Any) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Dropout(p))
        self.arguments = arguments

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.inner, x, **self.arguments)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class WrappedSquare(Square):
    forward = staticmethod(torch.amp.custom_fwd(device_type="cpu")(Square.forward))
    backward = staticmethod(torch.amp.custom_bwd(device_type="cpu")(Square.backward))


class Calls(nn.Module):
    """Calls a function."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = [function]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function[0](x)


def bce(output: torch.Tensor, targets: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return nn.functional.binary_cross_entropy(output.sigmoid(), torch.ones_like(output), **kwargs)


def outside(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return bce(output.float(), targets)


# ---- nothing to find --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", ["fp32", "bf16"])
def test_a_clean_model_has_no_error_and_no_warning(attach: Any, untouched: Untouched, autocast: str) -> None:
    block = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Dropout(0.3))
    session, made = attach(block, autocast=autocast, checkpointed=["1"]), batch()
    with untouched(session):
        watched, read = preflight(session, made, cross_entropy), preflight(session)
    assert watched == ()
    assert [finding.title for finding in read] == [UNWATCHED]
    assert read[0].severity == "info"
    assert read[0].cure == "session.preflight(batch, loss_fn)"


def test_after_training_it_is_still_clean(attach: Any, untouched: Untouched) -> None:
    session, made = attach(nn.BatchNorm1d(6), autocast="fp16"), batch()
    for _ in range(2):
        session.optimizers[0].zero_grad()
        with session.autocast():
            loss = cross_entropy(session.model(made[0]), made[1])
        session.scaler.scale(loss).backward()
        session.scaler.step(session.optimizers[0])
        session.scaler.update()
    with untouched(session):
        assert preflight(session, made, cross_entropy) == ()


# ---- BCELoss ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_fn", [bce, lambda output, targets: nn.BCELoss()(output.sigmoid(), torch.ones_like(output))])
def test_binary_cross_entropy_is_seen_where_autocast_is_on(attach: Any, untouched: Untouched, loss_fn: Any) -> None:
    session, made = attach(), batch()
    with untouched(session):
        finding = found(preflight(session, made, loss_fn), BCE)
    assert finding is not None
    assert (finding.severity, finding.where, finding.predicted) == ("error", ("loss_fn",), True)


def test_binary_cross_entropy_in_a_layer_is_named(attach: Any) -> None:
    inside = Calls(lambda x: x + bce(x, x))
    finding = found(preflight(attach(inside), batch(), cross_entropy), BCE)
    assert finding is not None
    assert finding.where == ("1",)


@pytest.mark.parametrize("loss_fn", [outside, nn.functional.cross_entropy, nn.BCEWithLogitsLoss()])
def test_binary_cross_entropy_elsewhere_is_not(attach: Any, loss_fn: Any) -> None:
    inputs, targets = batch()
    targets = torch.rand(8, 3) if isinstance(loss_fn, nn.Module) else targets
    assert found(preflight(attach(), (inputs, targets), loss_fn), BCE) is None
    assert found(preflight(attach(), loss_fn=loss_fn), BCE) is None


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_a_region_that_switches_autocast_off_on_cuda_is_one_on_a_laptop_too(
    attach: Any, untouched: Untouched, device_type: str
) -> None:
    def off(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device_type, enabled=False):
            return bce(output.float(), targets)

    def off_and_on(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return off(output, targets) + bce(output, targets)

    session = attach()
    with untouched(session):
        assert found(preflight(session, batch(), off), BCE) is None
        finding = found(preflight(session, batch(), off_and_on), BCE)
    assert finding is not None
    assert finding.where == ("loss_fn",)
    assert not torch.is_autocast_enabled("cuda")
    assert torch.get_autocast_dtype("cuda") == torch.float16


def test_a_loss_that_is_kept_in_fp32_is_safe(attach: Any) -> None:
    for kept, expected in ((["1.criterion"], False), (["1"], False), (["0"], True)):
        session = attach(nn.Sequential(collections.OrderedDict(criterion=nn.BCELoss())))
        session.request(autocast="fp16", fp32_layers=kept)
        session.apply_pending()
        assert session.settings.fp32_layers
        assert (found(preflight(session), BCE) is not None) is expected


def test_without_a_batch_it_is_read_from_the_modules(attach: Any) -> None:
    assert found(preflight(attach()), BCE) is None
    for loss_fn in (nn.BCELoss(), nn.functional.binary_cross_entropy, functools.partial(nn.functional.binary_cross_entropy)):
        finding = found(preflight(attach(), loss_fn=loss_fn), BCE)
        assert finding is not None
        assert finding.where == ("loss_fn",)
    session = attach()
    session.model.criterion = nn.BCELoss()
    finding = found(preflight(session), BCE)
    assert finding is not None
    assert finding.where == ("criterion",)


def test_an_unused_module_does_no_harm_where_a_forward_pass_was_watched(attach: Any) -> None:
    class Net(nn.Sequential):
        criterion = nn.BCELoss()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[0](x)

    model = Net(nn.Linear(4, 3))
    with AmpSession(model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
        assert found(preflight(session, batch(), cross_entropy), BCE) is None


# ---- fp16 in the model itself -----------------------------------------------------------------------------------------------


def test_fp16_parameters(attach: Any, untouched: Untouched) -> None:
    session = attach(autocast="fp16")
    session.model[1].half()
    with untouched(session):
        finding = found(preflight(session), HALF)
    assert finding is not None
    assert (finding.severity, finding.where) == ("error", ("1.weight", "1.bias"))
    session.request(scaling=False)
    session.apply_pending()
    finding = found(preflight(session), HALF)
    assert finding is not None
    assert finding.severity == "warning"
    session.model[1].requires_grad_(False)  # frozen: nothing is unscaled
    assert found(preflight(session), HALF) is None
    session.model[1].requires_grad_().bfloat16()
    assert found(preflight(session), HALF) is None


def test_the_error_that_fp16_parameters_are_said_to_raise_is_raised(attach: Any) -> None:
    session = attach(autocast="fp16")
    session.model.half()
    with session.autocast():
        loss = cross_entropy(session.model(batch()[0].half()).float(), batch()[1])
    session.scaler.scale(loss).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        session.scaler.step(session.optimizers[0])
    session.abandon_step()


@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.bfloat16])
def test_batch_norm_in_16_bits(attach: Any, convert: Any) -> None:
    session = attach(nn.BatchNorm1d(6), nn.LayerNorm(6))
    assert found(preflight(session), NORM) is None
    convert(session.model[2])
    assert found(preflight(session), NORM) is None
    convert(session.model[1])
    finding = found(preflight(session), NORM)
    assert finding is not None
    assert (finding.severity, finding.where) == ("warning", ("1",))


# ---- optimizers and devices -------------------------------------------------------------------------------------------------


def test_fused_optimizers(attach: Any) -> None:
    finding = found(preflight(attach(optimizer=lambda m: torch.optim.Adam(m.parameters(), fused=True), autocast="fp16")), FUSED)
    assert finding is not None
    assert (finding.severity, finding.predicted) == ("info", False)
    assert "With Adam the gradients" in finding.text
    assert found(preflight(attach(autocast="fp16")), FUSED) is None


def test_emulated_bf16(attach: Any) -> None:
    session = attach()
    assert found(preflight(session), EMULATED) is None
    session._support = {**session.support, "bf16": Support(available=True, note="emulated on this CPU")}
    finding = found(preflight(session), EMULATED)
    assert finding is not None
    assert (finding.severity, finding.predicted, finding.text) == ("info", True, "cpu: emulated on this CPU.")
    session.request(autocast="bf16")
    session.apply_pending()
    finding = found(preflight(session), EMULATED)
    assert finding is not None
    assert (finding.severity, finding.predicted) == ("warning", False)
    session._support = {**session.support, "bf16": Support(available=False, note="none here")}
    assert found(preflight(session), "This device does not have bf16") is not None


def test_an_optimizer_of_layers_that_were_replaced(attach: Any, untouched: Untouched) -> None:
    session = attach()
    assert found(preflight(session), STRANGERS) is None
    session.model[1] = nn.Linear(6, 3)
    with untouched(session):
        finding = found(preflight(session), STRANGERS)
    assert finding is not None
    assert (finding.severity, finding.where) == ("error", ("1.weight", "1.bias"))
    assert finding.text.startswith("2 of its parameters are none of the model's, while 2 of the model's are in no optimizer")


def test_an_optimizer_that_also_trains_something_else_is_fine(attach: Any) -> None:
    scale = nn.Parameter(torch.ones(()))
    both = attach(optimizer=lambda model: torch.optim.SGD([*model.parameters(), scale], lr=0.1))
    some = attach(optimizer=lambda model: torch.optim.SGD(model[1].parameters(), lr=0.1))
    assert (found(preflight(both), STRANGERS), found(preflight(some), STRANGERS)) == (None, None)


class Scaled(nn.Module):
    """A loss that is trained with the model."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(shape) for shape in shapes)

    def forward(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = cross_entropy(output, targets) * sum(weight.sum() for weight in self.weights)
        return loss


def test_a_part_of_the_model_and_the_loss_may_be_all_that_is_trained(attach: Any) -> None:
    criterion = Scaled((), (6, 4), (6,))
    for loss_fn in (
        criterion,
        criterion.forward,
        functools.partial(lambda output, targets, loss: loss(output, targets), loss=criterion),
        lambda output, targets: criterion(output, targets),
    ):
        session = attach(optimizer=lambda model: torch.optim.SGD([*model[1].parameters(), *criterion.parameters()], lr=0.1))
        assert grave(preflight(session, batch(), loss_fn)) == []
    # without the loss: whether they are of another module cannot be known, unless each idle one has a stranger of its shape
    other = Scaled((), (2,))
    for loss, severity in ((criterion, "error"), (other, "warning")):
        parameters = list(loss.parameters())
        session = attach(optimizer=lambda model, also=parameters: torch.optim.SGD([*model[1].parameters(), *also], lr=0.1))
        finding = found(preflight(session), STRANGERS)
        assert finding is not None
        assert (finding.severity, finding.where) == (severity, ("0.weight", "0.bias"))
    assert "Nothing is wrong if they are those of another module" in finding.text


def test_parameters_that_a_conversion_has_replaced(attach: Any) -> None:
    session = attach()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        session.model.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    finding = found(preflight(session), STRANGERS)
    assert finding is not None
    assert len(finding.where) == 4


def test_an_optimizer_whose_state_is_older_than_the_model_is(attach: Any) -> None:
    session = attach()
    for parameter in session.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    session.optimizers[0].step()
    assert found(preflight(session), MOVED) is None
    session.model.double()
    finding = found(preflight(session), MOVED)
    assert finding is not None
    assert finding.severity == "error"
    assert "in another format" in finding.text
    assert finding.where == ("0.weight", "0.bias", "1.weight", "1.bias")
    session.optimizers[0].load_state_dict(session.optimizers[0].state_dict())  # the cure
    assert found(preflight(session), MOVED) is None
    state = session.optimizers[0].state[session.model[0].weight]
    state["exp_avg"] = state["exp_avg"].to("meta")
    finding = found(preflight(session), MOVED)
    assert finding is not None
    assert "on another device" in finding.text
    assert finding.where == ("0.weight",)


def test_state_that_is_no_average_of_a_parameter_may_be_of_another_format(attach: Any) -> None:
    session = attach(optimizer=lambda model: torch.optim.NAdam(model.double().parameters(), lr=0.1))
    for parameter in session.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    session.optimizers[0].step()
    assert {state["mu_product"].dtype for state in session.optimizers[0].state.values()} == {torch.float32}
    assert found(preflight(session), MOVED) is None


# ---- checkpoints ------------------------------------------------------------------------------------------------------------


def tied(session: AmpSession) -> AmpSession:
    session.model[2].weight = session.model[1].weight  # type: ignore[index]
    return session


def test_weights_shared_across_checkpointed_regions(attach: Any) -> None:
    def layers() -> tuple[nn.Module, ...]:
        return nn.Linear(6, 6), nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6))

    across, apart = tied(attach(*layers(), checkpointed=["1"])), tied(attach(*layers(), checkpointed=["3"]))
    finding = found(preflight(across), TIED)
    assert finding is not None
    assert (finding.severity, finding.where, finding.predicted) == ("info", ("1.weight", "2.weight"), True)
    assert found(preflight(apart), TIED) is None
    assert found(preflight(tied(attach(*layers(), checkpointed=["1", "2"]))), TIED) is not None
    assert found(preflight(attach(*layers(), checkpointed=["1", "2"])), TIED) is None
    shared = nn.Linear(6, 6)
    assert found(preflight(attach(nn.Sequential(shared, shared), checkpointed=["1"])), TIED) is None  # within one region
    assert found(preflight(attach(shared, shared, checkpointed=["1"])), TIED) is not None
    worse = tied(attach(*layers(), Own(use_reentrant=True), checkpointed=["1"]))
    finding = found(preflight(worse, batch(), cross_entropy), TIED)
    assert finding is not None
    assert finding.severity == "warning"


def test_shared_weights_have_right_gradients_as_is_said(attach: Any) -> None:
    session, made = tied(attach(nn.Linear(6, 6), nn.Linear(6, 6), autocast="bf16")), batch()

    def gradients() -> list[torch.Tensor]:
        session.optimizers[0].zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = cross_entropy(session.model(made[0]), made[1])
        loss.backward()
        session.abandon_step()
        return [p.grad for p in session.model.parameters()]

    plain = gradients()
    session.request(checkpointed=["1"])
    session.apply_pending()
    assert found(preflight(session), TIED) is not None
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(), strict=True))


def test_reentrant_checkpoints(attach: Any, untouched: Untouched) -> None:
    session, made = attach(Own(use_reentrant=True)), batch()
    with untouched(session):
        findings = preflight(session, made, cross_entropy)
    finding = found(findings, REENTRANT)
    assert finding is not None
    assert (finding.severity, finding.where) == ("warning", ("1",))
    assert grave(findings) == [REENTRANT]
    assert grave(preflight(attach(Own(use_reentrant=False)), made, cross_entropy)) == []
    assert grave(preflight(attach(nn.Linear(6, 6), checkpointed=["1"]), made, cross_entropy)) == []
    sequential = Calls(lambda x: checkpoint_sequential(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), 2, x, use_reentrant=True))
    assert grave(preflight(attach(sequential), made, cross_entropy)) == [REENTRANT]
    direct = Calls(lambda x: CheckpointFunction.apply(torch.sigmoid, True, x))
    assert grave(preflight(attach(direct), made, cross_entropy)) == [REENTRANT]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_a_reentrant_checkpoint_of_inputs_without_gradient(attach: Any) -> None:
    class First(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.inner, self.reentrant = nn.Linear(4, 4), reentrant

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=self.reentrant)

    for reentrant, expected in ((True, [CUT]), (False, [])):
        session = attach()
        session.model.insert(0, First(reentrant))
        findings = preflight(session, batch(), cross_entropy)
        assert grave(findings) == expected
        assert [finding.where for finding in findings] == [("0",)] * reentrant
        cross_entropy(session.model(batch()[0]), batch()[1]).backward()
        assert (session.model[0].inner.weight.grad is None) == reentrant  # it is true
        session.abandon_step()


@pytest.mark.parametrize("reentrant", [True, False])
def test_dropout_without_the_random_state(attach: Any, untouched: Untouched, reentrant: bool) -> None:
    def titles(own: Own) -> list[str]:
        session, made = attach(own), batch()
        with untouched(session):
            return [title for title in grave(preflight(session, made, cross_entropy)) if title != REENTRANT]

    forgets = {"use_reentrant": reentrant, "preserve_rng_state": False}
    assert titles(Own(p=0.5, **forgets)) == [RANDOM]
    assert titles(Own(p=0.0, **forgets)) == []
    assert titles(Own(p=0.5, use_reentrant=reentrant)) == []
    silent = Own(p=0.5, **forgets)
    silent.inner.eval()
    assert titles(silent) == []


# ---- what a forward pass shows ----------------------------------------------------------------------------------------------


def test_custom_functions_without_custom_fwd(attach: Any, untouched: Untouched) -> None:
    bare, made = attach(nn.Sequential(Calls(Square.apply)), Calls(WrappedSquare.apply)), batch()
    with untouched(bare):
        findings = preflight(bare, made, lambda *pair: Square.apply(cross_entropy(*pair)))
    finding = found(findings, FUNCTION)
    assert finding is not None
    assert (finding.severity, finding.where, finding.predicted) == ("warning", ("1.0", "loss_fn"), True)
    assert finding.text.startswith("Square: forward runs within autocast")
    assert grave(findings) == [FUNCTION]
    wrapped = attach(Calls(WrappedSquare.apply), autocast="bf16")
    assert grave(preflight(wrapped, made, cross_entropy)) == []


@pytest.mark.parametrize("stored", [False, True])
def test_a_custom_function_in_a_reentrant_checkpoint_is_seen(attach: Any, untouched: Untouched, stored: bool) -> None:
    class Inner(nn.Module):
        def __init__(self, function: Any) -> None:
            super().__init__()
            self.function, self.apply_of_it = [function], [function.apply]

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(lambda a: (self.apply_of_it[0] if stored else self.function[0].apply)(a), x, use_reentrant=True)

    before = sys.getprofile()
    session = attach(Inner(Square))
    with untouched(session):
        finding = found(preflight(session, batch(), cross_entropy), FUNCTION)
    assert finding is not None
    assert finding.where == ("1",)
    assert grave(preflight(attach(Inner(WrappedSquare)), batch(), cross_entropy)) == [REENTRANT]
    assert sys.getprofile() is before


def test_a_function_in_the_forward_pass_of_a_parent_is_not_its_childs(attach: Any) -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.child(Square.apply(x))
            return output

    finding = found(preflight(attach(Parent()), batch(), cross_entropy), FUNCTION)
    assert finding is not None
    assert finding.where == ("1",)


def test_a_loss_in_16_bits(attach: Any, untouched: Untouched) -> None:
    session, made = attach(autocast="bf16"), batch()
    with untouched(session):
        finding = found(preflight(session, made, lambda output, _: output.square().mean()), LOSS16)
    assert finding is not None
    assert (finding.severity, finding.where, finding.predicted) == ("warning", ("loss_fn",), True)
    for fine in (lambda output, _: output.float().square().mean(), cross_entropy):
        assert found(preflight(session, made, fine), LOSS16) is None
    session.request(autocast="fp16")
    session.apply_pending()
    finding = found(preflight(session, made, lambda output, _: output.square().mean()), "The loss is returned in fp16")
    assert finding is not None
    assert not finding.predicted
    assert preflight(session, made) == ()  # there is no loss


def test_the_gradient_of_an_fp16_loss_is_inf_at_the_usual_scale_as_is_said() -> None:
    weight = torch.ones(3, requires_grad=True)
    for scale, finite in ((2.0**15, True), (2.0**16, False)):
        loss = (weight.half() * 1e-3).mean()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        weight.grad = None
        scaler.scale(loss).backward()
        assert weight.grad is not None
        assert bool(torch.isfinite(weight.grad).all()) == finite


def test_a_forward_pass_that_fails_in_autocast_alone(attach: Any, untouched: Untouched) -> None:
    class Strict(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.dtype != torch.float32:
                raise TypeError("I want <fp32>")
            return x

    session, made = attach(Strict()), batch()
    with untouched(session):
        findings = preflight(session, made, cross_entropy)
    finding = found(findings, FAILS)
    assert finding is not None
    assert (finding.severity, finding.predicted) == ("error", True)
    assert finding.text == "Without autocast it runs; with it: TypeError: I want <fp32>"
    assert found(preflight(attach(nn.ReLU()), made, cross_entropy), FAILS) is None
    # the loss was not reached, and is read instead
    assert found(preflight(session, made, nn.CrossEntropyLoss()), BCE) is None
    ones = made[0], torch.ones(8, 3)
    strict = attach(Strict(), Calls(torch.sigmoid))
    strict.model.append(nn.Sigmoid())
    assert found(preflight(strict, ones, nn.BCELoss()), BCE) is not None
    # what fails anyway is no finding
    with untouched(session), pytest.raises(ZeroDivisionError):
        preflight(session, made, lambda output, _: 1 / 0)  # type: ignore[arg-type,return-value]


# ---- what cannot be looked at -----------------------------------------------------------------------------------------------


def test_compiled_parts(attach: Any) -> None:
    session = attach(nn.ReLU())
    assert found(preflight(session), COMPILED) is None
    session.model[1]._compiled_call_impl = lambda *args: None  # what module.compile() leaves
    findings = preflight(session, batch(), cross_entropy)
    finding = found(findings, COMPILED)
    assert finding is not None
    assert (finding.severity, finding.where) == ("info", ("1",))
    unwatched = found(findings, UNWATCHED)
    assert unwatched is not None
    assert unwatched.text.startswith("The model is compiled by torch.compile, and compiled code cannot be watched.")
    del session.model[1]._compiled_call_impl
    assert found(preflight(session, batch(), cross_entropy), COMPILED) is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_model_in_a_compiled_wrapper(attach: Any) -> None:
    model = torch.compile(nn.Sequential(nn.Linear(4, 3)))
    with AmpSession(model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
        finding = found(preflight(session, batch(), cross_entropy), COMPILED)
        assert finding is not None
        assert finding.where == ("(model)",)


def test_when_it_is_refused(attach: Any) -> None:
    session = attach()
    session.begin_step()
    with pytest.raises(RunError, match="preflight: a step is in progress"):
        preflight(session)
    session.abandon_step()
    with pytest.raises(RunError, match="got 1 items as the batch"):
        preflight(session, (1,))  # type: ignore[arg-type]
    handle = next(session.model.parameters()).register_post_accumulate_grad_hook(lambda p: None)
    assert preflight(session, batch(), cross_entropy) == ()  # no backward pass, so that none of these runs
    handle.remove()
    session.close()
    with pytest.raises(SessionClosedError, match="this session was closed, and no longer controls the model"):
        preflight(session)


def test_within_the_users_own_region_its_casts_are_not_poisoned(attach: Any) -> None:
    session, made = attach(), batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            preflight(session, made, cross_entropy)
        loss = cross_entropy(session.model(made[0]), made[1])
    loss.backward()
    session.abandon_step()
    assert all(p.grad is not None for p in session.model.parameters())


def test_casts_are_neither_taken_from_the_users_region_nor_left_in_it(attach: Any) -> None:
    class Casts(TorchDispatchMode):
        def __init__(self, parameters: Any) -> None:
            super().__init__()
            self.ids, self.count = {p.data_ptr() for p in parameters}, 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += function is torch.ops.aten._to_copy.default and args[0].data_ptr() in self.ids
            return function(*args, **(kwargs or {}))

    session, made = attach(), batch()
    counts = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for run in (lambda: preflight(session, made, cross_entropy), lambda: session.model(made[0])) * 2:
            with Casts(session.model.parameters()) as casts:
                run()
            session.abandon_step()
            counts.append(casts.count)
    tried, trained, tried_again, trained_again = counts  # where it is tried, the parameters are also kept in copies
    assert trained == trained_again == 4
    assert tried == tried_again >= 4


# ---- how it shows itself ----------------------------------------------------------------------------------------------------


def test_the_gravest_comes_first_and_all_is_escaped(attach: Any) -> None:
    session = attach(nn.BatchNorm1d(6), optimizer=lambda m: torch.optim.Adam(m.parameters(), fused=True))
    session.model[1].half()
    findings = preflight(session, loss_fn=nn.BCELoss())
    assert [finding.severity for finding in findings] == ["error", "warning", "warning", "info", "info"]
    assert re.match(r"error \(predicted\): BCELoss within autocast \[loss_fn\]\. On CUDA, .* → Leave out", repr(findings))
    evil = "<img src=x onerror=alert(1)>"
    finding = Finding(severity="info", title=evil, text=evil, cure=evil, where=(evil,) * 7)
    shown = Findings([finding])._repr_html_()
    assert "<img" not in shown
    assert shown.count("&lt;img") == 8
    assert "and 2 more" in shown
    assert isinstance(findings, tuple)
    assert repr(Findings()) == "nothing found"
    with pytest.raises(AttributeError):
        finding.title = "mine"  # type: ignore[misc]
