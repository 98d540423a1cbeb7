from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_widgets.core.overflow_probe import FOLLOWED_AFTER, NAMES_KEPT, OverflowProbe, SkipNote


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def mean_of_squares(model: nn.Module) -> Tensor:
    return model(torch.ones(6, 4)).pow(2).mean()


class Elsewhere(Tensor):
    """A number that is on a device."""

    is_cpu = False

    def __new__(cls, value: Tensor) -> Elsewhere:
        return value.as_subclass(cls)


class Loop:
    """A loop with a scaler, that tells the probe what the package's loop would."""

    def __init__(self, model: nn.Module, *, scale: float = 2.0**10, clip: bool = False, **how: Any) -> None:
        self.model, self.clip = model, clip
        self.probe = OverflowProbe(model, **how)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
        self.at = 0

    def step(
        self,
        loss: Callable[[nn.Module], Tensor] = mean_of_squares,
        *,
        spoil: Callable[[], None] | None = None,
        late: bool = False,
        tell_loss: bool = True,
        fp16: bool = False,
    ) -> bool:
        self.probe.begin(self.at)
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=fp16):
            value = loss(self.model)
        self.scaler.scale(value).backward()
        if spoil is not None:
            spoil()
        if self.clip:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        used = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        skipped = sum(float(v) for v in self.scaler._found_inf_per_device(self.optimizer).values()) > 0
        if skipped and not late:
            self.probe.skipping()
        self.optimizer.zero_grad(set_to_none=True) if not late else None
        self.scaler.update()
        found = Elsewhere(torch.tensor(float(skipped)))
        self.probe.end(self.at, used, None if late == "device" else skipped, value.detach() if tell_loss else None, found)
        self.at += 1
        return skipped


def put(parameter: nn.Parameter, value: float) -> Callable[[], None]:
    def spoil() -> None:
        assert parameter.grad is not None
        parameter.grad.view(-1)[0] = value

    return spoil


class SpoiledBackward(nn.Module):
    """Puts a number into the gradient that flows back through it, and none into the forward pass."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        output = x * 1.0

        def change(gradient: Tensor) -> Tensor:
            gradient = gradient.clone()
            gradient.view(-1)[0] = self.value
            return gradient

        output.register_hook(change)
        return output


def test_steps_that_are_not_skipped_are_not_even_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(net())
    assert not loop.step()  # in the first one the order is learned

    def fails(*_: Any) -> None:
        raise AssertionError("a gradient was looked at")

    monkeypatch.setattr("amp_widgets.core.overflow_probe._extremes_of", fails)
    monkeypatch.setattr("amp_widgets.core.overflow_probe._Followed.__init__", fails)
    for _ in range(3):
        assert not loop.step()
    assert loop.probe.notes == ()


def test_overflow_in_one_weight_gradient_with_finite_activations() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    with torch.no_grad():
        for layer, weight in zip(model, (0.1, 1e-4, 0.5), strict=True):
            layer.weight.fill_(weight)
            layer.bias.zero_()
        model[0].bias.fill_(20_000.0)  # the input of layer 1 is large, and its weight's gradient is a sum over the batch
    seen: list[bool] = []
    for layer in model:
        layer.register_forward_hook(
            lambda _m, _a, output: (
                output.register_hook(lambda g: seen.append(bool(g.isfinite().all()))),
                seen.append(bool(output.isfinite().all())),
                None,
            )[2]
        )
    loop = Loop(model, scale=2.0**10)
    assert loop.step(lambda net: net(torch.ones(64, 4)).float().mean(), fp16=True)
    (note,) = loop.probe.notes
    assert seen
    assert all(seen)
    assert note == SkipNote(
        step=0, scale=2.0**10, loss_finite=True, parameters=("1.weight",), nonfinite=1, of=6, with_nan=0, seen="arriving",
        order_of=0,
    )  # fmt: skip
    for _ in range(7):  # until scale * 0.5 * 20,000 is less than 65,520
        assert loop.step(lambda net: net(torch.ones(64, 4)).float().mean(), fp16=True)
    assert not loop.step(lambda net: net(torch.ones(64, 4)).float().mean(), fp16=True)


@pytest.mark.parametrize(("value", "nan"), [(math.inf, False), (-math.inf, False), (math.nan, True)])
def test_the_first_in_the_order_of_the_backward_pass(value: float, nan: bool) -> None:
    loop = Loop(net())
    loop.step()
    good = loop.model[3]
    loop.model[3] = SpoiledBackward(value)
    assert loop.step()
    loop.model[3] = good
    (note,) = loop.probe.notes
    assert note.parameters[0].startswith("2.")
    assert set(note.parameters) == {"2.weight", "2.bias", "0.weight", "0.bias"}
    assert (note.step, note.nonfinite, note.of, note.seen, note.order_of) == (1, 4, 6, "afterwards", 0)
    assert (note.with_nan > 0) == nan or value != math.nan
    assert note.loss_finite is True


def test_order_is_that_of_the_graph_and_not_that_of_the_parameters() -> None:
    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Linear(4, 1), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x))

    model = Crossed()
    loop = Loop(model)
    loop.step()
    both = [put(model.first.weight, math.inf), put(model.last.weight, math.inf)]
    loop.step(spoil=lambda: [one() for one in both])  # type: ignore[arg-type,return-value]
    assert loop.probe.notes[0].parameters == ("last.weight", "first.weight")


def test_a_loss_that_is_not_finite_is_told_apart() -> None:
    loop = Loop(net())
    loop.step(lambda net: mean_of_squares(net) * math.nan)
    loop.step(lambda net: mean_of_squares(net) + math.inf * mean_of_squares(net))
    loop.step(lambda net: mean_of_squares(net) * math.nan, tell_loss=False)
    assert [note.loss_finite for note in loop.probe.notes] == [False, False, None]
    assert [note.with_nan for note in loop.probe.notes] == [6, 6, 6] or loop.probe.notes[1].nonfinite == 6


def test_looked_at_late_when_the_gradients_are_still_there() -> None:
    loop = Loop(net())
    loop.step()
    loop.step(spoil=put(loop.model[2].bias, math.inf), late=True)
    assert loop.probe.notes[0].parameters == ("2.bias",)
    assert loop.probe.notes[0].seen == "afterwards"


def test_after_a_skip_gradients_are_seen_before_clipping_spreads_nan() -> None:
    loop = Loop(net(), clip=True)
    loop.step()

    def loss(net: nn.Module) -> Tensor:
        return mean_of_squares(net)

    loop.model[3] = SpoiledBackward(math.nan)
    assert loop.step(loss)
    assert loop.step(loss)
    first, second = loop.probe.notes
    assert (first.seen, first.nonfinite, first.with_nan) == ("afterwards", 6, 6)  # all of them, also those of layer 4
    assert (second.seen, second.nonfinite, second.order_of) == ("arriving", 4, 2)
    assert second.parameters[0].startswith("2.")


def test_skips_that_only_the_device_knows_of_are_followed_from_then_on() -> None:
    loop = Loop(net())
    loop.step()
    bad = {"spoil": None, "late": "device"}
    loop.model[3] = SpoiledBackward(math.inf)
    loop.step(**bad)  # known of afterwards, and not looked at
    assert loop.probe.notes == ()
    loop.step(**bad)
    assert [note.step for note in loop.probe.notes] == [2]
    loop.model[3] = nn.Tanh()
    for _ in range(FOLLOWED_AFTER + 1):
        loop.step(late="device")
    assert loop.probe._following is None
    assert [note.step for note in loop.probe.notes] == [2]
    always = Loop(net(), every_step=True)
    always.step(late="device")
    always.model[3] = SpoiledBackward(math.inf)
    always.step(**bad)
    assert [note.step for note in always.probe.notes] == [1]


def test_on_a_cpu_it_is_known_also_of_a_fused_optimizer() -> None:
    model = net()
    probe = OverflowProbe(model)
    for step, factor in enumerate((1.0, 1.0, math.nan)):
        model.zero_grad()
        probe.begin(step)
        (mean_of_squares(model) * factor).backward()
        probe.end(step, 1.0, None, None, torch.tensor(float(factor != 1.0)))
    assert [(note.step, note.seen, note.nonfinite) for note in probe.notes] == [(2, "afterwards", 6)]


def test_micro_batches_count_together() -> None:
    loop = Loop(net())
    probe, model = loop.probe, loop.model
    probe.begin(0)
    mean_of_squares(model).backward()
    model[3] = SpoiledBackward(math.inf)
    mean_of_squares(model).backward()
    probe.end(0, 1.0, True, None)
    (note,) = probe.notes
    assert note.nonfinite == 4
    assert note.of == 6
    assert note.loss_finite is None


def test_many_names_are_counted_and_some_are_kept() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(NAMES_KEPT)))
    probe = OverflowProbe(model)
    probe.begin(0)
    (model(torch.ones(1, 2)).sum() * math.nan).backward()
    probe.end(0, None, True, None)
    (note,) = probe.notes
    assert (note.nonfinite, len(note.parameters), note.scale) == (2 * NAMES_KEPT, NAMES_KEPT, 1.0)


def test_refusals_are_kept_once_a_step() -> None:
    probe = OverflowProbe(net())
    probe.refuse(3, "No inf checks were recorded")
    probe.refuse(3, "No inf checks were recorded")
    probe.refuse(5, "No inf checks were recorded prior to update")
    assert [note.step for note in probe.refused] == [3, 5]


def test_it_leaves_no_trace() -> None:
    def run(watched: bool) -> list[Tensor]:
        model = net()
        probe = OverflowProbe(model, every_step=True)
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(4):
            if watched:
                probe.begin(step)
            optimizer.zero_grad()
            mean_of_squares(model).backward()
            optimizer.step()
            if watched:
                probe.end(step, None, step == 2, None)
        assert all(p._backward_hooks is None and p._post_accumulate_grad_hooks is None for p in model.parameters())
        return [*(p.detach() for p in model.parameters()), torch.get_rng_state()]

    assert all(torch.equal(one, other) for one, other in zip(run(True), run(False), strict=True))


def test_closing_lets_go_of_the_model_and_keeps_the_notes() -> None:
    model = net()
    probe = OverflowProbe(model)
    probe.begin(0)
    (mean_of_squares(model) * math.nan).backward()
    probe.end(0, 1.0, True, None)
    probe.begin(1)
    probe.close()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert len(probe.notes) == 1
    probe.begin(2)
    probe.end(2, None, True, None)
    probe.abandon()


def test_neither_probe_waits_for_the_device() -> None:
    """On a CPU nothing waits; what would, on a device, is an item() or a comparison in Python."""
    from amp_widgets.core.gradient_probe import GradientProbe

    model = net()
    counts, notes = GradientProbe(model, every=1), OverflowProbe(model, every_step=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for step, skipped in enumerate((False, True, None)):
            counts.begin(step)
            notes.begin(step)
            mean_of_squares(model).backward()
            notes.skipping()
            counts.end(torch.tensor(2.0))
            notes.end(step, torch.tensor(2.0), skipped, torch.tensor(0.5), Elsewhere(torch.tensor(1.0)))
    names = {event.key for event in profiler.key_averages()}
    assert names & {"aten::index_add_", "aten::bincount"}
    assert "aten::aminmax" in names
    assert not names & {"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero"}


def test_it_does_not_keep_the_model_alive() -> None:
    model = net()
    probe = OverflowProbe(model)
    probe.begin(0)
    mean_of_squares(model).backward()
    probe.end(0, 1.0, True, None)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    probe.begin(1)
    probe.end(1, 1.0, True, None)


def test_several_models_go_by_their_names() -> None:
    one, other = net(), net()
    probe = OverflowProbe(one)
    probe.watch([("generator", one), ("critic", other)])
    probe.begin(0)
    (mean_of_squares(nn.Sequential(one, nn.Linear(2, 4), other)) * math.nan).backward()
    probe.end(0, 1.0, True, None)
    (note,) = probe.notes
    assert (note.nonfinite, note.of) == (12, 12)
    assert note.parameters[0].startswith("critic.4.")
    assert note.parameters[-1].startswith("generator.0.")


def nan_from_the_loss(model: nn.Module) -> Tensor:
    output = model(torch.ones(6, 4))
    return output.pow(2).mean() + torch.sqrt((output * 0).sum())  # the derivative of the root at 0 is inf


@pytest.mark.parametrize("clip", [False, True])
def test_nan_that_the_loss_function_makes_every_third_step(clip: bool) -> None:
    loop = Loop(net(), clip=clip)
    for at in range(9):
        assert loop.step(nan_from_the_loss if at % 3 == 2 else mean_of_squares) == (at % 3 == 2)
    first, *later = loop.probe.notes
    assert (first.step, first.output, first.nonfinite, first.with_nan) == (2, None, 6, 6)
    assert first.parameters[0].startswith("4.")
    assert [(note.step, note.seen, note.output) for note in later] == [(5, "arriving", "nan"), (8, "arriving", "nan")]
    assert all(note.loss_finite and note.parameters[0].startswith("4.") for note in later)


def test_the_gradient_of_the_output_is_told_apart_from_what_the_model_makes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), SpoiledBackward(math.nan), nn.Linear(4, 2))
    loop = Loop(model)
    for _ in range(3):
        assert loop.step()
    assert [note.output for note in loop.probe.notes] == [None, "finite", "finite"]
    assert loop.probe.notes[1].parameters[0].startswith("0.")
    loop = Loop(net())
    for _ in range(2):
        assert loop.step(lambda model: mean_of_squares(model) * 1e38)
    assert loop.probe.notes[1].output == "inf"


def test_hooks_for_the_output_are_gone_after_each_step() -> None:
    hooks = torch.nn.modules.module._global_forward_hooks
    before = dict(hooks)
    loop = Loop(net())
    loop.step(nan_from_the_loss)
    loop.probe.begin(loop.at)
    assert len(hooks) == len(before) + 1
    loop.probe.abandon()
    assert dict(hooks) == before
    for _ in range(FOLLOWED_AFTER):
        loop.step()
        assert dict(hooks) == before


def test_what_the_scaler_has_unscaled_itself_was_not_clipped() -> None:
    loop = Loop(net())
    loop.step()
    loop.probe.begin(1)
    (mean_of_squares(loop.model) * math.nan).backward()
    loop.probe.skipping(as_arrived=True)
    loop.probe.end(1, 2.0, True, torch.tensor(1.0))
    (note,) = loop.probe.notes
    assert note.seen == "stepping"
    assert note.parameters[0].startswith("4.")
