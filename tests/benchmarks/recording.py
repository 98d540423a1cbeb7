"""What recording costs a step of 10 ms, and how many bytes a step takes: beside other recorders, where they are installed.

    python tests/benchmarks/recording.py [STEPS]

Every recorder gets the same values, and they take turns within one process. Printed are medians of the time that a step of
pure Python work takes, as ratios to the one that records nothing, and the size of what is on disk afterwards.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from amp_widgets.core.history import Event, History
from amp_widgets.core.settings import Settings
from amp_widgets.recording.recorder import Recorder
from amp_widgets.recording.run import open_run

STEP_S = 0.010
TURN = 25
VALUES = ("loss", "scale", "skipped", "step_s", "allocated_bytes", "peak_bytes")


class Source:
    """A session as far as a recorder knows one."""

    def __init__(self) -> None:
        self.history_so_far = History()
        self.settings = Settings()
        self.layers_seen = ()
        self.profiles = ()


class Recording:
    """One way to record."""

    def __init__(self, name: str, put: Callable[[int, dict[str, float]], object], end: Callable[[], object]) -> None:
        self.name, self.put, self.end = name, put, end
        self.times_s: list[float] = []


def main(steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ways = list(recordings(Path(folder)))
        for first in range(0, steps, TURN):
            for way in ways:
                for step in range(first, first + TURN):
                    way.times_s.append(a_step(step, way))
        for way in ways:
            way.end()
        base_s = statistics.median(ways[0].times_s)
        print(f"{steps} steps of {1000 * base_s:.2f} ms; {os.cpu_count()} processors")
        for way in ways:
            median_s, mean_s = statistics.median(way.times_s), statistics.fmean(way.times_s)
            size = sum(path.stat().st_size for path in (Path(folder) / way.name).rglob("*") if path.is_file())
            print(
                f"{way.name:>14}: median {median_s / base_s:6.4f}, mean {mean_s / statistics.fmean(ways[0].times_s):6.4f} of a "
                f"step without{f', {size / steps:7.1f} bytes a step' if size else ''}"
            )
        began_s = time.perf_counter()
        with open_run(Path(folder) / "amp_widgets" / "run.db") as run:
            print(f"{len(run.history)} steps read back in {time.perf_counter() - began_s:.3f} s")


def a_step(step: int, way: Recording) -> float:
    """Work of 10 ms that holds the interpreter's lock as a training loop does, at times."""
    began_s = time.perf_counter()
    while time.perf_counter() - began_s < STEP_S / 2:
        sum(range(100))
    time.sleep(STEP_S / 2)  # as an operator of torch: without the lock
    way.put(step, dict.fromkeys(VALUES, step * 7919 % 10007 / 7))
    return time.perf_counter() - began_s


def recordings(folder: Path) -> list[Recording]:
    """All that there are here."""
    ways = [Recording("nothing", lambda step, values: None, lambda: None)]
    for name in ("history", "amp_widgets"):
        source = Source()
        (folder / name).mkdir()

        def put(step: int, values: dict[str, float], source: Source = source) -> None:
            source.history_so_far.append(step=step, time_s=step * STEP_S, **values)
            if step % 100 == 0:
                source.history_so_far.record(Event(step=step, kind="note", reason="a hundred more", time_s=step * STEP_S))

        recorder = Recorder(folder / name / "run.db", source, facts={}) if name == "amp_widgets" else None
        ways.append(Recording(name, put, recorder.close if recorder is not None else lambda source=source: None))  # type: ignore[misc]
    if importlib.util.find_spec("tensorboard") is not None and importlib.util.find_spec("torch") is not None:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(folder / "tensorboard"))

        def scalars(step: int, values: dict[str, float]) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        ways.append(Recording("tensorboard", scalars, writer.close))
    if importlib.util.find_spec("wandb") is not None:
        import wandb

        run = wandb.init(mode="offline", dir=str(folder), project="benchmark")
        ways.append(Recording("wandb", lambda step, values: run.log(values, step=step), run.finish))
    missing = [name for name in ("tensorboard", "wandb", "trackio") if importlib.util.find_spec(name) is None]
    print(f"not installed, and not compared: {', '.join(missing) or 'none'}")
    return ways


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
