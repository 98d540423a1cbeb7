"""What each scenario measures, against the same computed by other means: plain torch, or runs with one setting each."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from amp_widgets.core.history import History
from amp_widgets.demos import measures
from amp_widgets.demos.batches import ShuffledBatches
from amp_widgets.demos.digits import DigitsNet, digits_data
from amp_widgets.demos.overflow import BagOfPixels
from amp_widgets.demos.prepared_scenario import play
from amp_widgets.demos.scenarios import SCENARIOS
from amp_widgets.demos.text import text_session
from amp_widgets.demos.underflow import HeatMapNet, heat_maps
from amp_widgets.errors import RunError
from amp_widgets.session import AmpSession

Play = Callable[..., Any]
LITTLE_TEXT = {"batch_size": 4, "context": 32}


def test_zeros_of_a_loss_that_is_not_scaled(played: Play) -> None:
    done = played("scaling-off")
    inputs, maps = heat_maps()
    torch.manual_seed(0)
    model = HeatMapNet()
    gradients: list[torch.Tensor] = []
    for module in model.modules():
        if not list(module.children()) or module is model:
            module.register_forward_hook(lambda _module, _inputs, output: keep(output))

    def keep(output: torch.Tensor) -> None:
        output.register_hook(gradients.append)

    batch, target = next(iter(ShuffledBatches(inputs, maps, batch_size=1024)))
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.mse_loss(model(batch), target)
    loss.backward()
    stored = [gradient for gradient in gradients if gradient.dtype == torch.float16]
    zeros, elements = sum(int((one == 0).sum()) for one in stored), sum(one.numel() for one in stored)
    assert done.measured.value == pytest.approx(100 * zeros / elements, abs=1.0)
    assert done.measured.facts["gradients"] == f"{elements:,}"

    losses = done.session.history.columns("loss")["loss"]
    assert losses[19] > 0.9 * losses[0]  # it stands still
    assert losses[39] < 0.8 * losses[0]  # and goes on with the loss scaled
    assert float(done.measured.facts["scaled_share"].removesuffix(" %")) < 2


def plain_scales(steps: int, growth_interval: int = 2000) -> list[float]:
    """The loss scale of each step, and of the next, of a loop with torch's own scaler."""
    images, labels = digits_data()
    torch.manual_seed(0)
    model = BagOfPixels()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", growth_interval=growth_interval)
    batches = ShuffledBatches(images.flatten(1), labels, batch_size=64)
    scales = []
    for pixels, digits in itertools.islice(itertools.chain(batches, batches), steps):
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(model(pixels), digits)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return [*scales, scaler.get_scale()]


def test_the_search_for_the_scale(played: Play) -> None:
    done = played("first-scale")
    scales = plain_scales(20)
    assert done.measured.value == next(step for step in range(20) if scales[step + 1] >= scales[step])
    assert isinstance(done.measured.value, int)
    assert done.measured.facts["layer"] == "readout"
    assert done.measured.facts["fitting_scale"] == f"2^{16 - done.measured.value}"


def test_when_the_scale_grows(played: Play) -> None:
    done = played("growth")
    scales = plain_scales(30, growth_interval=20)
    assert done.measured.value == next(step for step in range(1, 30) if scales[step] > scales[step - 1])
    assert done.measured.value != 20  # or the question would be none
    assert int(done.measured.facts["last_skip"]) + 20 + 1 == done.measured.value


def test_fp16_overflows_and_bf16_is_coarser(played: Play) -> None:
    done = played("bf16-fp16")
    assert done.measured.value == "fp16 bf16"
    scales = plain_scales(20)
    assert done.measured.facts["fp16_skips"] == str(sum(scales[step + 1] < scales[step] for step in range(20)))
    assert done.measured.facts["bf16_skips"] == "0"
    pixels = digits_data()[0].flatten(1)[:64]
    model = done.session.model
    with torch.no_grad():
        exact = model(pixels)
        errors = {}
        for dtype in (torch.float16, torch.bfloat16):
            with torch.autocast("cpu", dtype):
                errors[dtype] = float((model(pixels).float() - exact).norm() / exact.norm())
    assert errors[torch.bfloat16] > 3 * errors[torch.float16]
    assert 5 < float(done.measured.facts["times"]) < 12  # three bits are 8 times


def peak_with(batch_size: int, **settings: Any) -> float:
    """Of the third step of a run with these settings from the beginning."""
    with text_session(batch_size=batch_size, context=32, device="cpu") as session:
        if settings:
            session.request(**settings)
        session.start()
        while session.step < 3 and session.run_state == "running":
            session.wait(0.005)
        session.stop()
        session.wait()
        return float(session.history.columns("peak_bytes")["peak_bytes"][2])


def test_which_batch_fits_the_wall(played: Play) -> None:
    done = played("memory-wall", **LITTLE_TEXT)
    size = done.measured.value
    budget = peak_with(4)
    assert size > 4
    assert peak_with(size, checkpointed=["layers.*"]) <= budget < peak_with(size + 1, checkpointed=["layers.*"])
    assert done.measured.facts["before"] == "4"  # the wall is where the text says that it is


def test_the_peak_of_both(played: Play) -> None:
    done = played("both", **LITTLE_TEXT)
    ratio = peak_with(4, autocast="bf16", checkpointed=["layers.*"]) / peak_with(4)
    assert done.measured.value == pytest.approx(100 * ratio, rel=1e-3)
    assert done.measured.value < 100


def test_statistics_are_updated_once(played: Play) -> None:
    done = played("batchnorm", batch_size=16)
    assert done.measured.value == "once"
    assert done.measured.more is None
    model = DigitsNet()
    assert done.measured.facts["buffers"] == str(len(list(model.buffers())))
    assert done.measured.facts["gradients"] == str(len(list(model.parameters())))


class Naive(DigitsNet):
    """With torch's own checkpoint around its blocks, which does not know of running statistics."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x.mean(dim=(2, 3)))


def test_statistics_that_are_updated_twice_are_seen() -> None:
    images, labels = digits_data()
    with torch.random.fork_rng():
        model = Naive(channels=4, depth=2)
    scenario = SCENARIOS["batchnorm"]
    with AmpSession(model, torch.optim.Adam(model.parameters())) as session:
        session.fit(ShuffledBatches(images, labels, batch_size=16), nn.functional.cross_entropy, None, start=False)
        assert play(scenario, session).value == "twice"


class Clocked:
    """A session of which only the step times are known, in ms."""

    def __init__(self, *rounds: tuple[float, float, float]) -> None:
        self.history = History()
        turns = [ms for turn in rounds for format_ms in turn for ms in [format_ms] * 6]
        for step, ms in enumerate([*turns, *[1e-6] * 5]):  # some go beyond the scenario
            slow = 2 if step >= 36 else 1e6 if step % 6 < 2 else 1  # the machine becomes busy; and the first after a change
            self.history.append(step=step, step_s=slow * ms / 1000)

    def dashboard_state(self) -> Any:
        return SimpleNamespace(device="cpu")


@pytest.mark.parametrize(
    ("times", "fastest"),
    [((10, 20, 30), "fp32"), ((10, 5, 8), "fp16"), ((10, 8, 5), "bf16"), ((10, 9.5, 10), "none"), ((10, 5, 4.9), "none"),
     ((10, 10, 10), "none")],
)  # fmt: skip
def test_the_fastest_format(times: tuple[float, float, float], fastest: str) -> None:
    scenario = SCENARIOS["speed"]
    measured = measures.fastest(Clocked(times, times, times), scenario)  # type: ignore[arg-type]
    assert measured.value == fastest
    assert [scenario.changes[step]["autocast"] for step in sorted(scenario.changes)] == [
        "fp16",
        "bf16",
        *["fp32", "fp16", "bf16"] * 2,
    ]
    said = f"The median step of the three rounds took {times[0]:.1f} ms, {times[0]:.1f} ms, {2 * times[0]:.1f} ms in fp32"
    assert scenario.why_text(measured).startswith(said)
    assert "CPU" in scenario.more_text(measured, "cpu")
    assert "CPU" not in scenario.more_text(measured, "cuda")


def test_what_is_faster_in_two_rounds_of_three_is_not_clearly_the_fastest() -> None:
    twice, once = (10, 9, 5), (10, 5.2, 5)
    assert measures.fastest(Clocked(twice, twice, twice), SCENARIOS["speed"]).value == "bf16"  # type: ignore[arg-type]
    assert measures.fastest(Clocked(twice, once, twice), SCENARIOS["speed"]).value == "none"  # type: ignore[arg-type]


@pytest.mark.parametrize(("measure", "said"), [(measures.first_skips, "all of"), (measures.first_doubling, "not doubled")])
def test_what_cannot_be_told_is_said(measure: Any, said: str) -> None:
    session = SimpleNamespace(history=History())
    for step in range(20):
        session.history.append(step=step, skipped=1.0, scale=2.0**-step)
    with pytest.raises(RunError, match=said):
        measure(session, SCENARIOS["first-scale"])
    assert np.isfinite(session.history.last("scale"))
