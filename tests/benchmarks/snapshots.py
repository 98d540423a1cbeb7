"""What a snapshot costs: time that training waits, and bytes; and how long it takes to go back. On the text demo.

    python tests/benchmarks/snapshots.py [STEPS]

Steps with and without a snapshot before them take turns in one run, so that a busy machine slows both.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time

import amp_widgets as aw

EVERY = 5


def main(steps: int) -> None:
    for place in ("memory", "folder"):
        with tempfile.TemporaryDirectory() as folder, aw.demo("text", display=False) as session:
            session.keep_snapshots(every=EVERY, folder=None if place == "memory" else f"{folder}/snapshots", keep=3)
            snapshots = session.snapshots
            assert snapshots is not None
            took_s: list[float] = []

            def look(session: aw.AmpSession = session, took_s: list[float] = took_s) -> None:
                if session.snapshots is not None and session.step % EVERY == 1:
                    took_s.append(session.snapshots.took_s)  # of the one before this step
                if session.step >= steps:
                    session.pause()

            session.on_boundary.append(look)
            session.start()
            while session.run_state != "paused":
                session.wait(0.1)
            step_s = statistics.median(session.history.columns("step_s")["step_s"][1:])
            median_s = statistics.median(took_s[1:])
            each = snapshots.bytes / len(snapshots.steps)
            began_s = time.perf_counter()
            session.fork(at_step=snapshots.steps[-1])
            exact_s = time.perf_counter() - began_s
            began_s = time.perf_counter()
            session.fork(at_step=snapshots.steps[-2] + 2)
            print(
                f"in {place}: {each / 1e6:.1f} MB and {1000 * median_s:.1f} ms each (of {len(took_s)}), which is "
                f"{1000 * median_s / 100:.2f} ms a step with one every 100, where a step takes {1000 * step_s:.0f} ms; back to "
                f"a snapshot in {1000 * exact_s:.0f} ms, to 2 steps after one in {time.perf_counter() - began_s:.2f} s"
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 41)
