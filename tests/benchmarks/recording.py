"""What recording costs a step of 10 ms, and how many bytes a step takes: beside other recorders, where they are installed.

    python tests/benchmarks/recording.py [STEPS]

Every recorder gets the same values. First they take turns within one process: printed are the time that a step takes, as ratios
to the one that records nothing, and the size of what is on disk afterwards. Then each has a process of its own, whose steps only
sleep: printed is the processor's time that it takes for each step, with all its threads and processes, and with its end.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from amp_widgets.core.history import Event, History
from amp_widgets.core.settings import Settings
from amp_widgets.export.sink import Sink
from amp_widgets.export.sink_follower import SinkFollower
from amp_widgets.recording.recorder import Recorder
from amp_widgets.recording.run import open_run

STEP_S = 0.010
TURN = 25
CPU_STEPS = 500
CPU = "processor's time a step: "
VALUES = ("loss", "scale", "skipped", "step_s", "allocated_bytes", "peak_bytes")


class Source:
    """A session as far as a recorder knows one."""

    def __init__(self) -> None:
        self.history_so_far = History()
        self.settings = Settings()
        self.layers_seen = ()
        self.profiles = ()
        self.gradients = ()


class Recording:
    """One way to record."""

    def __init__(self, name: str, put: Callable[[int, dict[str, float]], object], end: Callable[[], object]) -> None:
        self.name, self.put, self.end = name, put, end
        self.times_s: list[float] = []


def main(steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ways = [way for name in WAYS if (way := made(name, Path(folder))) is not None]
        missing = [name for name in WAYS if name not in {way.name for way in ways}]
        print(f"not installed, and not compared: {', '.join(missing) or 'none'}")
        for first in range(0, steps, TURN):
            for way in ways:
                for step in range(first, first + TURN):
                    way.times_s.append(a_step(step, way))
        for way in ways:
            with contextlib.redirect_stdout(io.StringIO()):
                way.end()
        base_s = statistics.median(ways[0].times_s)
        print(f"{steps} steps of {1000 * base_s:.2f} ms; {os.cpu_count()} processors")
        for way in ways:
            median_s, mean_s = statistics.median(way.times_s), statistics.fmean(way.times_s)
            size = sum(path.stat().st_size for path in (Path(folder) / way.name).rglob("*") if path.is_file())
            print(
                f"{way.name:>16}: median {median_s / base_s:6.4f}, mean {mean_s / statistics.fmean(ways[0].times_s):6.4f} of a "
                f"step without{f', {size / steps:7.1f} bytes a step' if size else ''}"
            )
        began_s = time.perf_counter()
        with open_run(Path(folder) / "amp_widgets" / "run.db") as run:
            print(f"{len(run.history)} steps read back in {time.perf_counter() - began_s:.3f} s")
    used_s = {way.name: cpu_of(way.name) for way in ways}
    print(f"processor's time a step, of {CPU_STEPS} steps that only sleep, with all threads and processes:")
    for name, time_s in used_s.items():
        more_s = time_s - used_s["nothing"]
        print(f"{name:>16}: {1e6 * more_s:7.0f} µs, {more_s / STEP_S:.2%} of a step of {1000 * STEP_S:.0f} ms")


def a_step(step: int, way: Recording) -> float:
    """Work of 10 ms that holds the interpreter's lock as a training loop does, at times."""
    began_s = time.perf_counter()
    while time.perf_counter() - began_s < STEP_S / 2:
        sum(range(100))
    time.sleep(STEP_S / 2)  # as an operator of torch: without the lock
    way.put(step, values(step))
    return time.perf_counter() - began_s


def values(step: int) -> dict[str, float]:
    """Of one step, the same for all."""
    return {name: (step * 7919 + i) % 10007 / 7 for i, name in enumerate(VALUES)}


def cpu_of(name: str) -> float:
    """The processor's time a step, of a process of its own."""
    said = subprocess.run([sys.executable, __file__, "--cpu", name], capture_output=True, text=True, check=True, timeout=300)
    return next(float(line.removeprefix(CPU)) for line in said.stdout.splitlines() if line.startswith(CPU))


def print_cpu(name: str) -> None:
    """What `cpu_of` reads."""
    with tempfile.TemporaryDirectory() as folder:
        way = made(name, Path(folder))
        assert way is not None
        for step in range(50):  # what is made at first is no cost of a step
            way.put(step, values(step))
        time.sleep(1.5)
        began_s = cpu_s()
        for step in range(50, 50 + CPU_STEPS):
            time.sleep(STEP_S)
            way.put(step, values(step))
        before_end_s = cpu_s()
        with contextlib.redirect_stdout(io.StringIO()):
            way.end()
        print(f"{CPU}{(max(before_end_s, cpu_s()) - began_s) / CPU_STEPS}")


def cpu_s() -> float:
    """Of this process, and of those that it has started."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + ended.ru_utime + ended.ru_stime
    with contextlib.suppress(ImportError):
        import psutil

        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                total += sum(child.cpu_times()[:2])
    return total


def history_with(follow: Callable[[Source], object | None], name: str) -> Recording:
    """The history alone, or with what follows it."""
    source = Source()
    follower = follow(source)

    def put(step: int, values: dict[str, float]) -> None:
        source.history_so_far.append(step=step, time_s=step * STEP_S, **values)
        if step % 100 == 0:
            source.history_so_far.record(Event(step=step, kind="note", reason="a hundred more", time_s=step * STEP_S))

    return Recording(name, put, getattr(follower, "close", lambda: None))


def made(name: str, folder: Path) -> Recording | None:
    """One of `WAYS`; None where what it needs is not installed."""
    place = folder / name
    place.mkdir(exist_ok=True)
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            return WAYS[name](name, place)
        except ImportError:
            return None


def _sink(make: Callable[[Path], Sink]) -> Callable[[str, Path], Recording]:
    return lambda name, place: history_with(lambda source: SinkFollower(make(place), source, facts={}), name)


def _tensorboard_sink(place: Path) -> Sink:
    from amp_widgets.export.tensorboard_sink import TensorBoardSink

    return TensorBoardSink(place)


def _summary_writer(name: str, place: Path) -> Recording:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(place))

    def put(step: int, values: dict[str, float]) -> None:
        for key, value in values.items():
            writer.add_scalar(key, value, step)

    return Recording(name, put, writer.close)


def _trackio(name: str, place: Path) -> Recording:
    os.environ["TRACKIO_DIR"] = str(place)
    import trackio

    run = trackio.init(project="benchmark", name="alone", embed=False, auto_log_gpu=False, auto_log_cpu=False)
    return Recording(name, lambda step, values: run.log(values, step=step), run.finish)


def _wandb(name: str, place: Path) -> Recording:
    import wandb

    run = wandb.init(mode="offline", dir=str(place), project="benchmark", settings=wandb.Settings(silent=True))
    return Recording(name, lambda step, values: run.log(values, step=step), run.finish)


WAYS: dict[str, Callable[[str, Path], Recording]] = {
    "nothing": lambda name, place: Recording(name, lambda step, values: None, lambda: None),
    "history": lambda name, place: history_with(lambda source: None, name),
    "amp_widgets": lambda name, place: history_with(lambda source: Recorder(place / "run.db", source, facts={}), name),
    "TensorBoardSink": _sink(_tensorboard_sink),
    "SummaryWriter": _summary_writer,
    "trackio": _trackio,
    "wandb": _wandb,
}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--cpu"]:
        print_cpu(sys.argv[2])
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
