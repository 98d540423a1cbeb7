from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from amp_widgets.analysis.gradients import GradientRange
from amp_widgets.analysis.overflow import (
    GROWN_IN_A_ROW,
    OUTPUT,
    diagnose,
    explain_skips,
    nan_whatever_the_scale,
    no_inf_checks,
    scale_below_one,
    scale_without_bound,
    skip_runs,
    summarised,
)
from amp_widgets.core.gradient_counts import BUCKETS, INF_BUCKET, ZERO_BUCKET, CountedGradients, GradientCounts
from amp_widgets.core.history import Event, History
from amp_widgets.core.overflow_probe import NoChecksNote, OverflowProbe, SkipNote
from amp_widgets.core.scaler import ScaledStep
from amp_widgets.errors import NoGradientsError
from amp_widgets.session import AmpSession

# ---- made up ----


class Made:
    """A history as the journal writes it."""

    def __init__(self, scale: float = 2.0**16) -> None:
        self.history, self.scale, self.at = History(), scale, 0
        self.notes: list[SkipNote] = []

    def good(self, steps: int = 1, *, grows: bool = False, loss: float = 0.5) -> Made:
        for _ in range(steps):
            self.history.append(step=self.at, loss=loss, scale=self.scale, skipped=0.0)
            if grows:
                self._becomes(self.scale * 2)
            self.at += 1
        return self

    def skip(self, steps: int = 1, *, loss: float = 0.5, fixed: bool = False, **note: Any) -> Made:
        for _ in range(steps):
            self.history.append(step=self.at, loss=loss, scale=self.scale, skipped=1.0)
            self.history.record(Event(step=self.at, kind="skipped", reason="skipped", detail={"scale": self.scale}))
            if note:
                self.notes.append(note_of(self.at, scale=self.scale, **note))
            if not fixed:
                self._becomes(self.scale / 2)
            self.at += 1
        return self

    def _becomes(self, scale: float) -> None:
        detail = {"from": self.scale, "to": scale}
        self.history.record(Event(step=self.at + 1, kind="scale_changed", reason="scale", detail=detail))
        self.scale = scale

    def names(self, *refused: NoChecksNote, ranges: tuple[GradientRange, ...] = ()) -> list[str]:
        return [found.name for found in diagnose(self.history, self.notes, refused, ranges)]


def note_of(step: int, *parameters: str, first: str = "fc.weight", of: int = 8, **facts: Any) -> SkipNote:
    named = parameters or (first,)
    usual = {"scale": 1.0, "loss_finite": True, "nonfinite": len(named), "with_nan": 0, "seen": "arriving", "order_of": step}
    return SkipNote(step=step, parameters=named, of=of, **usual | facts)


def counted(step: int, *rows: tuple[str, str, int]) -> GradientRange:
    """Rows: layer, dtype, and the bucket of their ten gradients."""
    made = []
    for layer, dtype, bucket in rows:
        counts = np.zeros(BUCKETS)
        counts[bucket] = 10
        peak = {INF_BUCKET: math.inf, ZERO_BUCKET: 0.0}.get(bucket, 1.0)
        row = {"family": "output", "arrivals": 1, "elements": 10, "looked_at": 10, "peaks": {"": peak}}
        made.append(CountedGradients(layer=layer, dtype=dtype, counts=counts, **row))  # type: ignore[arg-type]
    return GradientRange.of(GradientCounts(step=step, scale=2.0**10, rows=tuple(made)))


FINE = 3 * 127  # 1.0


# ---- why a step was skipped ----


def test_a_run_of_skips_in_one_sentence() -> None:
    made = Made(2.0**40).good(40).skip(11, first="head.weight").skip(1, first="layers.3.mlp.fc2.weight").good(5)
    (run,) = skip_runs(made.history, made.notes)
    assert run.sentence == "12 skips from step 40: scale 2^40 → 2^28; first overflow in layers.3.mlp.fc2.weight"
    assert (run.first_step, run.last_step, run.scale_after) == (40, 51, 2.0**28)


def test_runs_are_told_apart_by_good_steps_between() -> None:
    made = Made().good(3).skip(2).good(1).skip(1, first="a.weight").good(2)
    runs = skip_runs(made.history, made.notes)
    assert [(run.first_step, len(run.steps)) for run in runs] == [(3, 2), (6, 1)]
    assert runs[0].sentence == "2 skips from step 3: scale 2^16 → 2^14; where it began was not looked up"
    assert runs[1].sentence == (
        "Step 6 was skipped at scale 2^14: first overflow in a.weight; 1 of 8 parameters have inf or NaN, the loss was finite"
    )


def test_a_scale_that_is_held_at_its_floor() -> None:
    made = Made().good().skip(3, fixed=True, first="a.weight")
    assert skip_runs(made.history, made.notes)[0].sentence == "3 skips from step 1: scale 2^16; first overflow in a.weight"


def test_a_loss_that_is_not_finite_is_to_blame_whatever_the_gradients() -> None:
    made = Made().good().skip(1, loss=math.nan, first="a.weight", loss_finite=False)
    (step,) = explain_skips(made.history, made.notes)
    assert step.loss_finite is False
    assert "the loss itself was inf or NaN" in step.sentence
    made = Made().good().skip(2, loss=math.inf)
    assert [step.loss_finite for step in explain_skips(made.history)] == [False, False]
    assert "the forward pass is to blame" in skip_runs(made.history)[0].sentence
    made.skip(1)
    assert "in 2 of them the loss itself was inf or NaN" in skip_runs(made.history)[0].sentence


def test_a_loss_that_was_never_recorded_is_not_known() -> None:
    made = Made().good(loss=math.nan).skip(1, loss=math.nan)
    assert explain_skips(made.history)[0].loss_finite is None
    assert "not looked up" in explain_skips(made.history)[0].sentence


def test_nan_that_clipping_has_spread_names_no_first() -> None:
    names = tuple(f"{i}.weight" for i in range(4))
    made = Made().good().skip(1)
    spread = note_of(1, *names, of=4, with_nan=4, seen="afterwards")
    (step,) = explain_skips(made.history, [spread])
    assert (step.parameter, step.first) == ("", "")
    assert "which was the first is not known" in step.sentence
    (step,) = explain_skips(made.history, [note_of(1, *names, of=4, with_nan=4)])
    assert step.first == "0.weight"
    assert "first NaN in 0.weight" in step.sentence


def test_a_layer_without_parameters_is_named_where_its_outputs_were_counted() -> None:
    made = Made().good().skip(1, first="0.weight")
    ranges = [counted(1, ("4", "fp16", FINE), ("3.exp", "fp16", INF_BUCKET), ("0", "fp16", INF_BUCKET))]
    (step,) = explain_skips(made.history, made.notes, ranges)
    assert (step.layer, step.parameter, step.first) == ("3.exp", "0.weight", "3.exp")
    (step,) = explain_skips(made.history, made.notes, [counted(1, ("0", "fp16", INF_BUCKET))])
    assert step.first == "0.weight"
    (step,) = explain_skips(made.history, [note_of(1, "4.weight")], ranges)
    assert step.first == "4.weight"  # before anything else overflowed


# ---- what is wrong with the scale ----


def test_scale_below_one() -> None:
    made = Made(2.0**2).good(5).skip(3, first="head.weight").good(2)
    (found,) = diagnose(made.history, made.notes)
    assert (found.name, found.sentence) == ("scale below 1", "The loss scale has fallen to 2^-1, below 1")
    assert "first in head.weight" in found.cause
    made = Made(2.0**2).good(5).skip(3, loss=math.nan)
    assert "no scale can cure" in diagnose(made.history)[0].cause
    assert scale_below_one(Made(2.0**2).good(5).skip(2).good().history, ()) is None  # 1
    assert Made(2.0**2).good(5).skip(2).good(2).names() == []
    assert Made(0.5).good(5).names() == []  # as the user wants it
    assert Made(2.0).good().skip(2).good(1, grows=True).names() == []  # it has come back


@pytest.mark.parametrize(
    ("ranges", "cause"),
    [
        ((), "sample the gradients"),
        ((counted(3, ("a", "fp32", FINE)),), "no gradient of a layer's output was stored in fp16"),
        ((counted(3, ("a", "fp16", ZERO_BUCKET)),), "nearly all gradients were zero"),
        ((counted(3, ("a", "fp16", FINE)),), "sample the gradients"),
    ],
)
def test_scale_grows_without_bound(ranges: tuple[GradientRange, ...], cause: str) -> None:
    made = Made(2.0**30).good(3, grows=True).good(4)
    (found,) = diagnose(made.history, ranges=ranges)
    assert (found.name, found.sentence) == (
        "scale grows without bound",
        "The loss scale has grown to 2^33 without a step being skipped",
    )
    assert cause in found.cause


def test_scales_that_do_not_grow_without_bound() -> None:
    assert Made(2.0**29).good(3, grows=True).names() == []  # to 2^32, and no further
    assert Made(2.0**30).good(GROWN_IN_A_ROW - 1, grows=True).good(9).names() == []
    assert Made(2.0**40).good(9).names() == []  # set by the user
    made = Made(2.0**36).good(3, grows=True).skip(1, first="a.weight").good(2)
    assert made.names() == []
    assert scale_without_bound(History()) is None


def test_nan_every_few_steps_whatever_the_scale() -> None:
    made = Made().good(4)
    for _ in range(3):
        made.skip(1, first="norm.weight", with_nan=1).good(4)
    (found,) = diagnose(made.history, made.notes)
    assert found.name == "NaN whatever the scale"
    assert found.sentence == (
        "3 steps between 4 and 14 were skipped for NaN at scales from 2^14 to 2^16: the loss was finite, and NaN began in "
        "norm.weight"
    )
    assert "set_detect_anomaly" in found.cause
    made = Made().good(2).skip(3, loss=math.nan, fixed=True)
    (found,) = diagnose(made.history)
    assert found.sentence.endswith("at scale 2^16: the loss itself was inf or NaN, so that it comes from the forward pass or "
                                   "from the data")  # fmt: skip
    assert "logarithm" in found.cause


def test_overflows_are_no_nan_whatever_the_scale() -> None:
    # inf minus inf is NaN: so it is when a scale is first too high ...
    assert Made(2.0**40).skip(12, first="a.weight", with_nan=1).good(5).names() == []
    # ... and each time that it has grown to where it is too high again
    made = Made(2.0**14).good(3)
    for _ in range(4):
        made.good(1, grows=True).skip(1, first="a.weight", with_nan=1).good(3)
    assert made.names() == []
    made = Made(2.0**15).good(3)  # also where it was good once, when gradients were smaller
    made.skip(1, first="a.weight", with_nan=1).good(2)
    for _ in range(4):
        made.good(1, grows=True).skip(1, first="a.weight", with_nan=1).good(3)
    assert made.names() == []
    made = Made(2.0**14).good(3, grows=True).skip(1, first="a.weight", with_nan=1).good(2).skip(1, first="a.weight")
    assert made.names() == []
    assert Made().good(2).skip(2, loss=math.nan).good().names() == []
    assert nan_whatever_the_scale(History(), ()) is None


@pytest.mark.parametrize(("reason", "cause"), [
    ("No inf checks were recorded for this optimizer", "No parameter of the optimizer had a gradient"),
    ("No inf checks were recorded prior to update", "No parameter of the optimizer"),
    ("No inf checks were recorded prior to update: got update() without", "without a scaler.step(optimizer)"),
])  # fmt: skip
def test_no_inf_checks(reason: str, cause: str) -> None:
    made = Made().good(3)
    (found,) = diagnose(made.history, refused=[NoChecksNote(step=3, reason=reason)])
    assert found.name == "no inf checks recorded"
    assert cause in found.cause
    assert found.sentence == "In step 3 the scaler has stopped with “No inf checks were recorded”"
    made.good(1)
    assert made.names(NoChecksNote(step=3, reason=reason)) == []  # mended


def test_no_inf_checks_is_also_read_from_the_events_of_a_run() -> None:
    history = Made().good(2).history
    history.record(Event(step=2, kind="run", reason="failed: NoGradientsError: No inf checks were recorded for this optimizer"))
    assert no_inf_checks(history) is not None
    assert no_inf_checks(Made().good(2).history) is None


def test_an_empty_history_is_healthy() -> None:
    assert diagnose(History()) == ()
    assert skip_runs(History()) == ()


# ---- with real loops ----


class Watched:
    """A session whose loop tells a probe what it does, as it is to be wired."""

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        self.session = AmpSession(model, self.optimizer)
        self.probe = OverflowProbe(model)
        record = self.session._record

        def wired(scaled: ScaledStep) -> None:
            loss = None if self.session._open is None else self.session._open.loss
            self.probe.end(self.session.step, scaled.used, scaled.skipped, loss, scaled.found_inf)
            record(scaled)

        self.session._record = wired  # type: ignore[method-assign]
        self.session.request(**settings)

    def step(self, loss: Any) -> None:
        self.probe.begin(self.session.step)
        self.optimizer.zero_grad()
        with self.session.autocast():
            value = loss(self.model)
        self.session.scaler.scale(value).backward()
        try:
            self.session.scaler.step(self.optimizer)
        except NoGradientsError as error:
            self.probe.refuse(self.session.step, str(error))
            raise
        self.session.scaler.update()

    def names(self) -> list[str]:
        return [found.name for found in diagnose(self.session.history, self.probe.notes, self.probe.refused)]


def mean(model: nn.Module) -> Tensor:
    return model(torch.ones(2, 3)).float().pow(2).mean()


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def test_a_scale_that_is_too_high_at_first() -> None:
    watched = Watched(small(), autocast="fp16", init_scale=2.0**22)
    for _ in range(12):
        watched.step(mean)
    runs = skip_runs(watched.session.history, watched.probe.notes)
    watched.session.close()
    assert len(runs) == 1
    assert runs[0].sentence.startswith(f"{len(runs[0].steps)} skips from step 0: scale 2^22 → 2^{22 - len(runs[0].steps)}; first")
    assert runs[0].first
    assert all(step.loss_finite and step.of == 4 for step in runs[0].steps)
    assert watched.names() == []


def test_gradients_that_are_too_large_in_the_end_bring_the_scale_below_one() -> None:
    watched = Watched(small(), autocast="fp16", init_scale=4.0)
    for _ in range(6):
        watched.step(lambda model: model(torch.ones(2, 3)).float().sum() * 1e5)
    watched.session.close()
    assert watched.names() == ["scale below 1"]


def test_without_autocast_around_the_model_the_scale_grows_without_bound() -> None:
    watched = Watched(small(), autocast="fp16", init_scale=2.0**30, growth_interval=1)
    for _ in range(5):
        watched.optimizer.zero_grad()
        watched.session.scaler.scale(mean(watched.model)).backward()
        watched.session.scaler.step(watched.optimizer)
        watched.session.scaler.update()
    watched.session.close()
    assert watched.names() == ["scale grows without bound"]


def test_a_planted_nan_loss_is_seen_as_that() -> None:
    watched = Watched(small(), autocast="fp16", init_scale=2.0**4)
    for step in range(9):
        watched.step(lambda model, step=step: mean(model) * (math.nan if step % 3 == 2 else 1.0))
    found = diagnose(watched.session.history, watched.probe.notes)
    watched.session.close()
    assert [one.name for one in found] == ["NaN whatever the scale"]
    assert "the loss itself" in found[0].sentence


def test_a_loss_that_does_not_depend_on_the_model() -> None:
    watched = Watched(small(), autocast="fp16", init_scale=2.0**4)
    watched.step(mean)
    with pytest.raises(NoGradientsError):
        watched.step(lambda _model: torch.ones((), requires_grad=True))
    assert watched.names() == ["no inf checks recorded"]
    watched.session.abandon_step()
    watched.step(mean)
    watched.session.close()
    assert watched.names() == []


def test_nan_everywhere_that_nothing_has_spread_names_the_first() -> None:
    names = tuple(f"{i}.weight" for i in range(4))
    made = Made().good().skip(1)
    (step,) = explain_skips(made.history, [note_of(1, *names, of=4, with_nan=4, seen="stepping")])
    assert (step.layer, step.first) == ("0", "0.weight")
    assert "first NaN in 0.weight; 4 of 4 parameters have inf or NaN, the loss was finite" in step.sentence


def test_what_was_in_the_gradient_of_the_models_output_begins_in_the_loss() -> None:
    facts: dict[str, Any] = {"nonfinite": 8, "output": "nan", "with_nan": 8}
    made = Made().good(2).skip(1, first="head.weight", **facts)
    (run,) = skip_runs(made.history, made.notes)
    assert run.first == OUTPUT
    assert run.sentence == (
        "Step 2 was skipped at scale 2^16: NaN in the gradient of the model's output already: it begins in the loss function, "
        "and reaches head.weight first; 8 of 8 parameters have inf or NaN, the loss was finite"
    )
    made.good(2).skip(1, first="head.weight", **facts).good(2).skip(1, first="0.weight", with_nan=1)
    (found,) = diagnose(made.history, made.notes)
    assert "the loss was finite, and NaN began in the gradient of the model's output" in found.sentence
    assert found.cause.startswith("The backward pass of the loss function makes NaN")


def test_an_overflow_in_the_gradient_of_the_models_output_is_the_scales() -> None:
    made = Made(2.0**40).good().skip(3, first="head.weight", nonfinite=8, output="inf")
    (run,) = skip_runs(made.history, made.notes)
    assert run.sentence == (
        "3 skips from step 1: scale 2^40 → 2^37; first overflow in the gradient of the model's output, so that it begins in the "
        "loss, scaled by so much"
    )
    made = Made().good().skip(1, first="head.weight", output="finite")
    assert skip_runs(made.history, made.notes)[0].first == "head.weight"


def test_unscaling_too_early_has_a_cause_of_its_own() -> None:
    made = Made().good()
    reason = "No inf checks were recorded for this optimizer: got scaler.unscale_(optimizer) before any of its parameters had"
    (found,) = diagnose(made.history, refused=[NoChecksNote(step=1, reason=reason)])
    assert found.cause.startswith("scaler.unscale_(optimizer) looks for inf, and there was nothing to look at yet")


# ---- what belongs together ----


def test_a_request_between_skips_parts_them() -> None:
    made = Made(2.0**20).good(2).skip(1, first="head.weight")
    made.history.record(Event(step=3, kind="scale_changed", reason="set", detail={"from": made.scale, "to": 2.0**40}))
    made.scale = 2.0**40
    made.skip(22, first="head.weight").good(2)
    runs = skip_runs(made.history, made.notes)
    assert [(run.first_step, len(run.steps), run.scale_after) for run in runs] == [(2, 1, 2.0**19), (3, 22, 2.0**18)]
    assert runs[1].sentence == "22 skips from step 3: scale 2^40 → 2^18; first overflow in head.weight"
    assert summarised(runs) == runs


def test_a_request_for_a_lower_scale_parts_them_too() -> None:
    made = Made(2.0**40).skip(3)
    made.history.record(Event(step=3, kind="scale_changed", reason="set", detail={"from": made.scale, "to": 2.0**20}))
    made.scale = 2.0**20
    made.skip(2).good()
    assert [run.sentence.partition(";")[0] for run in skip_runs(made.history)] == [
        "3 skips from step 0: scale 2^40 → 2^37",
        "2 skips from step 3: scale 2^20 → 2^18",
    ]


def test_single_skips_for_one_cause_are_told_together() -> None:
    made = Made(2.0**30)
    for _ in range(30):
        made.skip(1, loss=math.nan).good(2)
    (told,) = summarised(skip_runs(made.history))
    assert told.sentence == (
        "30 single skips from step 0 to 87, every third step, at scales from 2^1 to 2^30: the loss itself was inf or NaN before "
        "it was scaled, so that the forward pass is to blame and not the scale"
    )
    assert (told.first_step, told.last_step, len(told.steps)) == (0, 87, 30)


def test_other_causes_and_runs_come_between() -> None:
    made = Made(2.0**16)
    for gap in (2, 5, 1):
        made.skip(1, first="a.weight").good(gap)
    made.skip(2, first="a.weight").good()
    for _ in range(2):
        made.skip(1, first="a.weight").good()
    for _ in range(3):
        made.skip(1, first="b.weight", fixed=True).good(3)
    told = summarised(skip_runs(made.history, made.notes))
    assert [len(one.steps) for one in told] == [3, 2, 1, 1, 3]
    assert told[0].sentence == "3 single skips from step 0 to 9, at scales from 2^14 to 2^16: first overflow in a.weight"
    assert told[-1].sentence == "3 single skips from step 18 to 26, every 4 steps, at scale 2^9: first overflow in b.weight"


def test_a_real_loop_with_a_request_between_its_skips() -> None:
    watched = Watched(small(), autocast="fp16", init_scale=2.0**40)
    watched.step(mean)
    watched.session.request(init_scale=2.0**40)
    for _ in range(3):
        watched.step(mean)
    runs = skip_runs(watched.session.history, watched.probe.notes)
    watched.session.close()
    assert [(run.first_step, len(run.steps)) for run in runs] == [(0, 1), (1, 3)]
    assert runs[1].sentence.startswith("3 skips from step 1: scale 2^40 → 2^37; ")
