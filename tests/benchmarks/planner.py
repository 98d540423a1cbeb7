"""Plans for memory budgets, and what people would choose: tests/benchmarks/planner.py [--threads N] [--rounds N] [TABLE ...]

Three tables. Peaks and times of plans for ten budgets on each of six nets, with the best of all layers, every second, √n and
greedily by bytes per second that also fits. The extra time that was predicted and that a step really took, on steps of over
100 ms. How long it takes to plan for a model with about 150 layers to choose from. It never fails on a time, and on a busy
machine the times say little.

The extra time is measured as a run has it: steps of one way follow each other in a row, of which the first one does not count, as
it asks the operating system for pages that the way before has given back. The rows of all ways take turns. Where a machine is
shared, its pace changes by half and more, for seconds on end: so what a row takes more is taken as a share of the row without
checkpointing in the same round, and compared with the predicted share of a pass. The milliseconds are those of the pass in the
prediction. Measured is the median over all rounds, and its standard error is found by resampling them: where the prediction is
off by more than 25 %, but by less than two of these errors, it cannot be told from noise.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_widgets.analysis.planner import Planner, plan, planning
from amp_widgets.core.memory.profile import memory_text
from amp_widgets.demos.text import TextGPT, next_byte_loss
from amp_widgets.session import AmpSession

TABLES = ("budgets", "times", "many")
BUDGETS = 10
Batch = tuple[Any, Any]
Rows = npt.NDArray[np.float64]
"""Seconds of the steps that count, shape (rounds, steps)."""


def session_on(model: nn.Module) -> AmpSession:
    return AmpSession(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))


def six_nets() -> dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], list[str]]]:
    """Those of the comparison with torch's own tracker."""
    path = Path(__file__).parent.parent / "core" / "memory" / "test_memtracker.py"
    specification = importlib.util.spec_from_file_location("nets_of_memtracker", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return dict(module.NETS)


def usual_s(planner: Planner, budget: float) -> float:
    """The least extra time of the sets that people would choose and that fit; NaN where none does."""
    order = planner._choice.by_bytes_per_second()
    sets = [planner._named[name] for name in ("all", "every second", "√n")]
    for count in range(len(order) + 1):
        names = planner._names(order[:count])
        if planner._estimate(names) <= 1.03 * budget and planner._peak(names) <= budget:
            sets.append(names)
            break
    return min((planner._cost_s(names) for names in sets if planner._peak(names) <= budget), default=math.nan)


def measured_bytes(session: AmpSession, batch: Batch, loss_fn: Any, layers: Any) -> int:
    session.request(checkpointed=layers)
    session.apply_pending()
    peak = session.profile_step(batch, loss_fn).peak_bytes
    session.request(checkpointed=())
    session.apply_pending()
    return peak


def budgets_table(autocast: str) -> None:
    print(f"{autocast}\n{'net':9} {'budget':>9} {'predicted':>9} {'measured':>9} {'layers':>6} {'extra':>8} {'usual':>8}")
    for name, (make, draw, _) in six_nets().items():
        torch.manual_seed(0)
        inputs = draw()
        batch = inputs, torch.randint(4, (len(inputs),))
        with session_on(make()) as session, planning(session, batch, F.cross_entropy) as planner:
            session.request(autocast=autocast)
            session.apply_pending()
            least = planner.plan(1.0).least_peak_bytes
            none = planner._peak(())
            for at in range(BUDGETS):
                budget = least + at / BUDGETS * (none - least)
                found = planner.plan(budget)
                measured = measured_bytes(session, batch, F.cross_entropy, found)
                usual = usual_s(planner, budget)
                wrong = "" if measured <= budget else "  ABOVE THE BUDGET"
                wrong += "  A USUAL SET IS CHEAPER" if usual < found.predicted_extra_s else ""
                print(
                    f"{name:9} {memory_text(budget):>9} {memory_text(found.predicted_peak_bytes):>9} {memory_text(measured):>9} "
                    f"{len(found.layers):6} {1e3 * found.predicted_extra_s:5.2f} ms {1e3 * usual:5.2f} ms{wrong}"
                )


class ResNet(nn.Module):
    def __init__(self, width: int = 48, depth: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1),
                nn.BatchNorm2d(width),
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = F.relu(x + block(x))
        y: Tensor = self.head(x.mean((2, 3)))
        return y


def step_s(session: AmpSession, batch: Batch, loss_fn: Any) -> float:
    """Run a step; gives the time of its forward and its backward pass."""
    model, (optimizer,) = session.model, session.optimizers
    assert model is not None
    optimizer.zero_grad()
    begun_s = time.perf_counter()
    with session.autocast():
        loss = loss_fn(model(batch[0]), batch[1])
    session.scaler.scale(loss).backward()
    passes_s = time.perf_counter() - begun_s
    session.scaler.step(optimizer)
    session.scaler.update()
    return passes_s


NOT_COUNTED, IN_A_ROW = 1, 3
"""Steps at the beginning of a row, and those after them."""
MOST_OFF = 0.25
"""By how much of what was measured a prediction may be off."""


def row_s(session: AmpSession, batch: Batch, loss_fn: Any, layers: tuple[str, ...]) -> list[float]:
    """The steps of a row with these layers checkpointed."""
    session.request(checkpointed=layers)
    session.apply_pending()
    row = [step_s(session, batch, loss_fn) for _ in range(NOT_COUNTED + IN_A_ROW)]
    return row[NOT_COUNTED:]


def more(plain: Rows, other: Rows) -> tuple[float, float]:
    """By which share of these rows those take longer, and its standard error."""
    shares = np.median(other, axis=1) / np.median(plain, axis=1) - 1
    drawn = np.random.default_rng(0).choice(shares, size=(1000, len(shares)))
    return float(np.median(shares)), float(np.median(drawn, axis=1).std())


def verdict(predicted_s: float, measured_s: float, error_s: float) -> str:
    off_s = abs(predicted_s - measured_s)
    if off_s <= MOST_OFF * abs(measured_s):
        return "within 25 %"
    return "within the noise" if off_s <= MOST_OFF * abs(measured_s) + 2 * error_s else "OFF"


def times_table(rounds: int) -> None:
    if rounds < 2:
        raise SystemExit(f"rounds: got {rounds}, expected at least 2: of one the error is not known")
    print(f"\n{'net':9} {'pass':>8} {'budget':>9} {'layers':>6} {'predicted':>9} {'measured':>19} {'ratio':>6}")
    tokens = torch.randint(256, (16, 128))
    cases: dict[str, tuple[nn.Module, Batch, Any]] = {
        "GPT": (TextGPT(depth=6), (tokens, tokens), next_byte_loss),
        "ResNet": (ResNet(), (torch.randn(24, 3, 32, 32), torch.randint(10, (24,))), F.cross_entropy),
    }
    for name, (model, batch, loss_fn) in cases.items():
        session = AmpSession(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), memory_every=0)
        with session, planning(session, batch, loss_fn) as planner:
            step_s(session, batch, loss_fn)
            none, least = planner.plan(1e15).predicted_peak_bytes, planner.plan(1.0).least_peak_bytes
            plans, passes_s = [], []
            for share in (0.0, 0.3, 0.6):
                plans.append(planner.plan(least + share * (none - least)))
                passes_s.append(planner._pass_s)
            ways: list[tuple[str, ...]] = [(), *(each.layers for each in plans)]
            taken_s = np.array([[row_s(session, batch, loss_fn, layers) for layers in ways] for _ in range(rounds)])
            for way, (found, pass_s) in enumerate(zip(plans, passes_s, strict=True), 1):
                measured_s, error_s = (pass_s * share for share in more(taken_s[:, 0], taken_s[:, way]))
                predicted_s = found.predicted_extra_s
                print(
                    f"{name:9} {1e3 * pass_s:5.0f} ms {memory_text(found.budget_bytes):>9} {len(found.layers):6} "
                    f"{1e3 * predicted_s:6.1f} ms {1e3 * measured_s:6.1f} ± {1e3 * error_s:4.1f} ms "
                    f"{predicted_s / measured_s:6.2f}  {verdict(predicted_s, measured_s, error_s)}"
                )


def many_layers() -> None:
    tokens = torch.randint(256, (8, 32))
    model = TextGPT(width=64, depth=16, heads=2, context=32)
    with session_on(model) as session:
        step_s(session, (tokens, tokens), next_byte_loss)
        none = session.profile_step((tokens, tokens), next_byte_loss).peak_bytes
        for share in (0.9, 0.7):
            begun_s = time.perf_counter()
            found = plan(session, budget_bytes=share * none, batch=(tokens, tokens), loss_fn=next_byte_loss)
            print(f"{time.perf_counter() - begun_s:.1f} s for {found}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(TABLES)}; all of them without")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=24)
    options = parser.parse_args()
    tables = options.tables or list(TABLES)
    if not set(tables) <= set(TABLES):
        parser.error(f"got {' '.join(tables)}, expected tables of {', '.join(TABLES)}")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if "budgets" in tables:
        for autocast in ("fp32", "bf16"):
            budgets_table(autocast)
    if "times" in tables:
        times_table(options.rounds)
    if "many" in tables:
        print("\nplanning for many layers")
        many_layers()


if __name__ == "__main__":
    main()
