"""What a session costs a training step, as ratios measured in one run: python tests/benchmarks/overhead.py [--steps N]

Variants take turns block by block, so that a machine that slows down slows all of them; the ratio is of medians. The first
two steps of a block are not counted, as `%%amp` begins anew in each and learns in them what the loop has. It never fails on a
time. The page's own share is not in here: no browser is open.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import amp_widgets as aw
from amp_widgets.capture.capture import Capture
from amp_widgets.session import AmpSession

BLOCKS = 10
UNCOUNTED = 2


class Variant:
    """One way to run the classic step of a demo, on a model of its own.

    Attached, the step uses the session's drop-ins. Captured, it is the bare loop, run as the `%%amp` magic runs a cell.
    """

    def __init__(
        self, demo: str, name: str, *, attach: bool = False, capture: bool = False, memory_every: int = 0, view: bool = False
    ) -> None:
        self.name = name
        self._make_captured = functools.partial(AmpSession, memory_every=memory_every) if capture else None
        seed = aw.demo(demo, display=False)
        training = seed._background.runner._training  # type: ignore[union-attr]  # the demo's own parts, without its session
        self.model, (self.optimizer,), self.loss_fn = training.model, training.optimizers, training.loss_fn
        self.batches = endless(training.batches)
        seed.close()
        self.session = AmpSession(self.model, self.optimizer, memory_every=memory_every) if attach else None
        self.dashboard: Any = self.session.dashboard() if view and self.session is not None else None
        self.scaler: Any = torch.amp.GradScaler("cpu", enabled=False) if self.session is None else self.session.scaler
        self.region: Callable[[], Any] = (
            (lambda: torch.autocast("cpu", enabled=False)) if self.session is None else self.session.autocast
        )
        self.times_s: list[float] = []

    def block(self, steps: int) -> None:
        """Some steps, of which the first two are not counted."""
        capture = None if self._make_captured is None else Capture(self._make_captured, namespace={"model": self.model})
        with capture or contextlib.nullcontext():
            for _ in range(UNCOUNTED):
                self.step()
            del self.times_s[-UNCOUNTED:]
            for _ in range(steps):
                self.step()
        if capture is not None and (capture.session is None or len(capture.session.history) != UNCOUNTED + steps):
            raise SystemExit(f"{self.name}: the steps were not seen, so there is nothing to measure; {capture.why_not}")

    def step(self) -> None:
        inputs, targets = next(self.batches)
        begun = time.perf_counter()
        self.optimizer.zero_grad()
        with self.region():
            loss = self.loss_fn(self.model(inputs), targets)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.times_s.append(time.perf_counter() - begun)

    def close(self) -> None:
        if self.dashboard is not None:
            self.dashboard.close()
        if self.session is not None:
            self.session.close()


def endless(batches: Any) -> Iterator[Any]:
    while True:
        yield from batches


def measure(demo: str, steps: int) -> None:
    variants = [
        Variant(demo, "bare loop"),
        Variant(demo, "session, memory not measured", attach=True),
        Variant(demo, "session and a live view, memory not measured", attach=True, view=True),
        Variant(demo, "session, memory measured on every step", attach=True, memory_every=1),
        Variant(demo, "%%amp (Capture), untouched, memory not measured", capture=True),
        Variant(demo, "%%amp (Capture), untouched", capture=True, memory_every=1),
    ]
    for variant in variants:
        variant.block(1)
        variant.times_s.clear()
    for _ in range(BLOCKS):
        for variant in variants:
            variant.block(max(1, steps // BLOCKS))
    bare_s = statistics.median(variants[0].times_s)
    print(f"\n{demo}: {len(variants[0].times_s)} steps each, on {torch.get_num_threads()} threads, torch {torch.__version__}")
    for variant in variants:
        median_s = statistics.median(variant.times_s)
        print(
            f"  {variant.name:<47} {median_s * 1e3:9.2f} ms   ratio {median_s / bare_s:5.3f}  "
            f"{(median_s - bare_s) * 1e6:+8.0f} us a step"
        )
        variant.close()


def measure_own_work(steps: int = 3000) -> None:
    """The session's own work on a step of nearly nothing, where it is not lost in the noise."""
    medians_s = []
    for way in ("bare", "session", "captured"):
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session = AmpSession(model, optimizer, memory_every=0) if way == "session" else None
        scaler: Any = torch.amp.GradScaler("cpu", enabled=False) if session is None else session.scaler
        capture = Capture(functools.partial(AmpSession, memory_every=0)) if way == "captured" else None
        x = torch.ones(2, 4)
        times_s = []
        with capture or contextlib.nullcontext():
            for _ in range(steps):
                begun = time.perf_counter()
                optimizer.zero_grad()
                with torch.autocast("cpu", enabled=False) if session is None else session.autocast():
                    loss = model(x).sum()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                times_s.append(time.perf_counter() - begun)
        medians_s.append(statistics.median(times_s))
        if session is not None:
            session.close()
    bare_s, session_s, captured_s = medians_s
    print(
        f"\nown work, fp32, memory not measured: session {(session_s - bare_s) * 1e6:.1f} us a step, "
        f"%%amp (Capture) {(captured_s - bare_s) * 1e6:.1f} us a step (step of {bare_s * 1e6:.0f} us)"
    )


def measure_imports() -> None:
    """Seconds that our own modules take, the libraries being there already."""
    code = (
        "import time, torch, plotly.graph_objects, ipywidgets, anywidget, IPython\n"
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        "t0 = time.perf_counter(); import amp_widgets; t1 = time.perf_counter()\n"
        "shell.run_line_magic('load_ext', 'amp_widgets'); t2 = time.perf_counter()\n"
        "import amp_widgets.widgets.dashboard; t3 = time.perf_counter()\n"
        "print(t1 - t0, t2 - t1, t3 - t2)"
    )
    runs = [
        [
            float(x)
            for x in subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
        ]
        for _ in range(3)
    ]
    first, second, third = (statistics.median(column) for column in zip(*runs, strict=True))
    print(
        f"\nbeyond torch, plotly, ipywidgets and IPython: import amp_widgets {first * 1e3:.1f} ms, "
        f"%load_ext {second * 1e3:.1f} ms, "
        f"the first dashboard's modules {third * 1e3:.1f} ms"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100, help="steps of each variant")
    steps = parser.parse_args().steps
    measure_own_work()
    measure("digits", steps)
    measure("text", max(BLOCKS, steps // 3))
    measure_imports()
