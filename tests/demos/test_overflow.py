"""Held to what the demo is for: its first steps are skipped for one layer, which is named, and each cure cures it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from amp_widgets.analysis.overflow import explain_skips, skip_runs
from amp_widgets.demos.overflow import overflow_session
from amp_widgets.session import AmpSession

Train = Callable[[AmpSession, int], None]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_skipped_steps_name_the_layer_that_sums_up(train: Train, seed: int) -> None:
    session = overflow_session(seed=seed, device="cpu")
    train(session, 50)
    history, notes = session.history, session.numerics.overflow.notes
    first = skip_runs(history, notes)[0]
    assert first.first_step == 0
    assert 4 <= len(first.steps) <= 6
    assert first.sentence == (
        f"{len(first.steps)} skips from step 0: scale 2^16 → 2^{16 - len(first.steps)}; first overflow in readout.weight"
    )
    assert session.skip_report()[0] == f"{first.sentence}."
    for step in explain_skips(history, notes):
        assert (step.layer, step.nonfinite, step.of, step.loss_finite) == ("readout", 1, 6, True)
    losses = history.columns("loss")["loss"]
    assert losses[49] < losses[0] / 3


@pytest.mark.parametrize("cure", [{"fp32_layers": ["readout"]}, {"init_scale": 2.0**10}, {"autocast": "bf16"}])
def test_cures(train: Train, cure: dict[str, Any]) -> None:
    session = overflow_session(device="cpu")
    session.request(**cure)
    train(session, 30)
    assert session.skip_report() == ()
    losses = session.history.columns("loss")["loss"]
    assert losses[29] < losses[0] / 2
