"""What is written to a run file, when, and what becomes of it when something goes wrong."""

from __future__ import annotations

import gc
import json
import math
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from amp_widgets.core.history import Event
from amp_widgets.core.settings import Settings
from amp_widgets.errors import RecordingError
from amp_widgets.recording import recorder as recorder_module
from amp_widgets.recording import schema
from amp_widgets.recording.recorder import Recorder
from amp_widgets.recording.run import open_run

sys.path.insert(0, str(Path(__file__).parent))
from recorded import LayerOf, Source

NEVER_S = 1e6


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.db"


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def recorder(path: Path, source: Source) -> Iterator[Recorder]:
    made = Recorder(path, source, facts={"model": "Net"}, every_s=NEVER_S)
    yield made
    made.close()


class TestRoundTrip:
    def test_every_column_and_every_event_comes_back_bit_by_bit(self, path: Path) -> None:
        seed = random.randrange(2**32)
        print(f"seed {seed}")
        values = np.random.default_rng(seed)
        source = Source(extra_columns=('peak_bytes[cuda:0]"; DROP TABLE steps; --',))
        history = source.history_so_far
        recorder = Recorder(path, source, facts={}, every_s=NEVER_S)
        odd = [math.nan, math.inf, -math.inf, 5e-324, 1e308, 0.1]
        for step in range(2 * schema.BLOCK_ROWS + 100):
            row = {name: float(values.choice([*odd, values.standard_normal()])) for name in history.names[1:]}
            history.append(step=step, **row)
            if step % 1000 == 0:
                detail = {"from": 1.5, "to": None, "names": ["<script>", "ü", "층"], "source": "a'b\"c"}
                history.record(
                    Event(step=step, kind="note", reason="'; DROP TABLE events; --\n층", detail=detail, time_s=step / 7)
                )
            if step in (17, schema.BLOCK_ROWS, 5000):
                recorder.flush()
        recorder.close()
        with open_run(path) as run:
            theirs, ours = run.history.columns(), history.columns()
            assert list(theirs) == list(ours)
            for name in ours:
                assert theirs[name].tobytes() == ours[name].tobytes(), name
            assert run.history.events() == history.events()
            assert run.facts["columns"] == list(history.names)

    def test_after_reduction_the_file_still_has_every_step(self, path: Path) -> None:
        source = Source(capacity=64)
        recorder = Recorder(path, source, facts={}, every_s=NEVER_S)
        for _ in range(40):
            source.train(25)
            recorder.flush()
        recorder.close()
        assert len(source.history_so_far) <= 64
        with open_run(path) as run:
            assert run.history.columns("step")["step"].tolist() == list(range(1000))
            assert run.history.columns("loss")["loss"].tolist() == [1 / (step + 1) for step in range(1000)]

    def test_rows_of_blocks_are_those_of_the_table(self, path: Path, source: Source, recorder: Recorder) -> None:
        source.train(3 * schema.BLOCK_ROWS + 5)
        recorder.close()
        connection = sqlite3.connect(path)
        assert connection.execute("SELECT count(*), sum(rows), min(first), max(first) FROM blocks").fetchone() == (
            3, 3 * schema.BLOCK_ROWS, 0, 2 * schema.BLOCK_ROWS,
        )  # fmt: skip
        plain = np.array(connection.execute("SELECT * FROM steps ORDER BY rowid").fetchall(), dtype=float)
        connection.close()
        with open_run(path) as run:
            assert np.array_equal(plain.T, np.array(list(run.history.columns().values())), equal_nan=True)

    def test_settings_at_each_step(self, path: Path, source: Source, recorder: Recorder) -> None:
        source.train(3)
        source.apply(autocast="bf16")
        source.train(3)
        source.apply(checkpointed=("layers.0",), init_scale=2.0**10)
        source.train(1)
        source.history_so_far.record(Event(step=7, kind="rejected", reason="no", detail={"autocast": "fp16"}, time_s=1.0))
        recorder.close()
        with open_run(path) as run:
            assert run.settings_at(2) == Settings()
            assert run.settings_at(3) == Settings(autocast="bf16") == run.settings_at(5)
            assert run.settings_at(6) == source.settings == run.settings

    def test_settings_of_a_recording_that_began_later(self, path: Path, source: Source) -> None:
        source.train(3)
        source.apply(autocast="bf16")
        source.train(3)
        source.apply(autocast="fp16")
        Recorder(path, source, facts={}, every_s=NEVER_S).close()
        with open_run(path) as run:
            assert [run.settings_at(step).autocast for step in (0, 2, 3, 5, 6)] == ["fp32", "fp32", "bf16", "bf16", "fp16"]

    def test_half_a_character_stops_nothing(self, path: Path, source: Source, recorder: Recorder) -> None:
        source.layers_seen = (LayerOf("\ud800", why_not="\udfff"),)
        source.history_so_far.record(Event(step=0, kind="note", reason="half: \ud800", detail={"text": "\ud800"}, time_s=0.0))
        recorder.close()
        assert recorder.notice is None
        with open_run(path) as run:
            assert (run.events[0].reason, run.events[0].detail) == ("half: ?", {"text": "\ud800"})
            assert (run.layers[0].name, run.layers[0].why_not) == ("?", "?")

    def test_layers_as_they_are_now(self, path: Path, source: Source, recorder: Recorder) -> None:
        source.layers_seen = (LayerOf("a"), LayerOf("b", why_not=None, parameters=0), LayerOf("c"))
        recorder.close()
        with open_run(path) as run:
            assert [(one.name, one.type, one.parameters, one.why_not, one.structural) for one in run.layers] == [
                ("a", "Linear", 6, None, False), ("b", "Linear", 0, None, False), ("c", "Linear", 6, None, False),
            ]  # fmt: skip


class TestWhileItIsWritten:
    def test_an_event_is_in_the_file_at_once(self, path: Path, source: Source, recorder: Recorder) -> None:
        source.apply(autocast="bf16")
        with open_run(path) as run:
            assert [event.kind for event in run.events] == ["applied"]

    def test_a_reader_follows(self, path: Path, source: Source, recorder: Recorder) -> None:
        with open_run(path) as run:
            assert run.refresh() == 0
            source.train(schema.BLOCK_ROWS + 10)
            recorder.flush()
            assert run.refresh() == schema.BLOCK_ROWS + 10
            source.train(5)
            source.apply(scaling=False)
            recorder.flush()
            assert run.refresh() == 5
            assert len(run.history) == schema.BLOCK_ROWS + 15
            assert run.settings.scaling is False

    def test_steps_come_by_themselves(self, path: Path, source: Source) -> None:
        recorder = Recorder(path, source, facts={}, every_s=0.01)
        source.train(5)
        with open_run(path) as run:
            end_s = time.monotonic() + 20
            while not run.refresh() and time.monotonic() < end_s:
                time.sleep(0.005)
            assert len(run.history) == 5
        recorder.close()

    def test_the_source_is_not_kept_alive_and_its_end_ends_the_recording(self, path: Path) -> None:
        source = Source()
        recorder = Recorder(path, source, facts={}, every_s=0.01)
        source.train(5)
        gone = weakref.ref(source)
        del source
        gc.collect()
        assert gone() is None
        recorder._thread.join(20)
        assert recorder.closed
        with open_run(path) as run:
            assert len(run.history) == 5

    def test_a_recorder_that_nobody_holds_ends_its_thread(self, path: Path, source: Source) -> None:
        recorder = Recorder(path, source, facts={}, every_s=0.01)
        thread = recorder._thread
        del recorder
        gc.collect()
        thread.join(20)
        assert not thread.is_alive()
        source.train(1)
        source.apply(autocast="bf16")  # nobody listens, and nothing fails

    def test_closed_it_is_one_plain_file(self, path: Path, source: Source, recorder: Recorder) -> None:
        source.train(10)
        recorder.close()
        recorder.close()
        assert [one.name for one in path.parent.iterdir()] == ["run.db"]
        path.chmod(0o400)
        path.parent.chmod(0o500)
        try:
            with open_run(path) as run:
                assert len(run.history) == 10
        finally:
            path.parent.chmod(0o700)

    def test_closed_while_it_is_read_all_is_in_the_one_file(self, path: Path, source: Source, recorder: Recorder) -> None:
        source.train(10)
        recorder.flush()
        with open_run(path) as reader:
            recorder.close()
            alone = path.with_name("alone.db")
            alone.write_bytes(path.read_bytes())
            assert len(reader.history) == 10
        with open_run(alone) as run:
            assert len(run.history) == 10

    def test_a_copy_of_the_process_leaves_the_file_alone(
        self, path: Path, source: Source, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as copied:
            copied.setattr(os, "getpid", lambda: -1)
            recorder.close()
        assert not recorder.closed
        source.train(1)
        recorder.close()
        with open_run(path) as run:
            assert len(run.history) == 1


class TestWhenSomethingGoesWrong:
    def test_a_file_that_another_program_has_locked_is_waited_for_at_the_end(
        self, path: Path, source: Source, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(recorder_module, "_LAST_PATIENCE_S", 30)
        other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        other.execute("BEGIN IMMEDIATE")
        source.train(1)
        recorder.flush()
        assert "another program has locked it" in (recorder.notice or "")
        unlock = threading.Timer(0.2, other.execute, ["ROLLBACK"])
        unlock.start()
        recorder.close()
        unlock.join()
        other.close()
        with open_run(path) as run:
            assert len(run.history) == 1

    def test_what_cannot_be_made_leaves_nothing_behind(self, path: Path, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
        create = schema.create

        def no_room(connection: sqlite3.Connection, columns: tuple[str, ...]) -> None:
            create(connection, columns)
            for companion in ("-wal", "-shm"):  # as on a full disk, where SQLite cannot clear them away
                path.with_name(path.name + companion).touch()
            connection.close()
            raise sqlite3.OperationalError("disk I/O error")

        monkeypatch.setattr(schema, "create", no_room)
        with pytest.raises(RecordingError, match="disk I/O error; choose another place"):
            Recorder(path, source, facts={})
        assert not list(path.parent.iterdir())

    def test_a_file_that_exists_is_not_written_over(self, path: Path, source: Source, recorder: Recorder) -> None:
        with pytest.raises(RecordingError, match=r"record: .*run\.db exists already, expected the name of a new file"):
            Recorder(path, Source(), facts={})
        recorder.flush()
        with open_run(path) as run:
            assert run.facts["model"] == "Net"

    def test_nor_is_what_a_symbolic_link_points_to(self, path: Path, source: Source) -> None:
        victim = path.with_name("victim")
        path.symlink_to(victim)
        with pytest.raises(RecordingError, match="exists already"):
            Recorder(path, source, facts={})
        assert not victim.exists()

    def test_a_folder_that_is_not_there(self, path: Path, source: Source) -> None:
        with pytest.raises(RecordingError, match="there is no such file or folder; choose a folder that exists and can be wr"):
            Recorder(path / "deeper.db", source, facts={})

    def test_a_disk_that_is_full_at_the_end(self, path: Path, source: Source, recorder: Recorder) -> None:
        pages = recorder._connection.execute("PRAGMA page_count").fetchone()[0]
        recorder._connection.execute(f"PRAGMA max_page_count = {pages}")
        source.train(20_000)
        recorder.close()
        assert re.fullmatch(r"The end of the run was not recorded to run\.db: there is no room left\.", recorder.notice or "")

    def test_a_file_that_is_deleted(self, path: Path, source: Source, recorder: Recorder) -> None:
        assert recorder.notice is None
        path.unlink()
        source.train(1)
        recorder.flush()
        assert recorder.notice == "Recording has ended: run.db was deleted, moved or replaced."
        source.apply(autocast="bf16")  # goes on

    def test_a_full_disk_and_room_again(self, path: Path, source: Source, recorder: Recorder) -> None:
        source.train(1000)
        recorder.flush()
        pages = recorder._connection.execute("PRAGMA page_count").fetchone()[0]
        recorder._connection.execute(f"PRAGMA max_page_count = {pages}")
        source.train(20_000)
        recorder.flush()
        assert re.search(r"run\.db: there is no room left\. Training goes on", recorder.notice or "")
        source.apply(autocast="bf16")  # does not raise
        with open_run(path) as run:
            assert len(run.history) == 1000
        recorder._connection.execute("PRAGMA max_page_count = 1000000")
        recorder.flush()
        assert recorder.notice is None
        with open_run(path) as run:
            assert run.history.columns("step")["step"].tolist() == list(range(21_000))
            assert run.settings.autocast == "bf16"

    def test_an_event_does_not_wait_for_a_slow_disk(self, path: Path, source: Source, recorder: Recorder) -> None:
        held, let_go = threading.Event(), threading.Event()

        def hold() -> None:
            with recorder._lock:
                held.set()
                let_go.wait(20)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(20)
        began_s = time.monotonic()
        source.apply(autocast="bf16")
        waited_s = time.monotonic() - began_s
        let_go.set()
        thread.join()
        assert waited_s < 10
        with open_run(path) as run:  # the thread was woken, and writes it
            end_s = time.monotonic() + 20
            while not run.events and time.monotonic() < end_s:
                time.sleep(0.005)
                run.refresh()
            assert run.settings.autocast == "bf16"


KILLED = 50
WRITERS = """
import os, sys, time
sys.path[:0] = sys.argv[1:3]
from recorded import Source
from amp_widgets.core.history import Event
from amp_widgets.recording.recorder import Recorder

def write(number):
    said = os.open(f"{sys.argv[3]}/{number}.said", os.O_CREAT | os.O_WRONLY)
    source = Source()
    recorder = Recorder(f"{sys.argv[3]}/{number}.db", source, facts={})
    os.write(1, b"%d\\n" % os.getpid())
    for step in range(1000):  # an end, should nobody kill it
        source.train(1)
        os.write(said, b"step %d %.6f\\n" % (step, time.monotonic()))
        if step % 5 == 0:
            source.history_so_far.record(Event(step=step, kind="note", reason="note", detail={}, time_s=0.0))
            os.write(said, b"event %d 0\\n" % step)
        time.sleep(0.02)

for number in range(int(sys.argv[4])):
    if os.fork() == 0:
        write(number)
for number in range(int(sys.argv[4])):
    os.wait()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and kill -9")
def test_nothing_is_lost_when_the_process_is_killed(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    here = Path(__file__).parent
    arguments = [sys.executable, "-c", WRITERS, str(here), str(here.parent.parent), str(tmp_path), str(KILLED)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        writers = [int(parent.stdout.readline()) for _ in range(KILLED)]
        now_s = time.monotonic()
        for at_s, writer in sorted((now_s + chance.uniform(0, 2.5), writer) for writer in writers):
            time.sleep(max(0.0, at_s - time.monotonic()))
            os.kill(writer, signal.SIGKILL)
    older_than_a_second = 0
    for number in range(KILLED):
        said = [
            line.split() for line in (tmp_path / f"{number}.said").read_text().splitlines(keepends=True) if line.endswith("\n")
        ]
        times_s = {int(step): float(time_s) for what, step, time_s in said if what == "step"}
        old = {step for step, time_s in times_s.items() if time_s < max(times_s.values()) - 1}
        with open_run(tmp_path / f"{number}.db") as run:
            steps = run.history.columns("step")["step"].tolist()
            assert steps == list(range(len(steps)))
            assert {event.step for event in run.events} >= {int(step) for what, step, _ in said if what == "event"}
            assert set(steps) >= old
        older_than_a_second += len(old)
    assert older_than_a_second > 0, "no process lived long enough to tell"


def test_what_another_tool_reads(path: Path, source: Source, recorder: Recorder) -> None:
    source.train(10)
    source.apply(autocast="bf16")
    recorder.close()
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT max(loss) FROM steps WHERE skipped").fetchone() == (1 / 4,)
    kind, detail = connection.execute("SELECT kind, detail FROM events").fetchone()
    assert (kind, json.loads(detail)) == ("applied", {"autocast": "bf16", "source": "script"})
    assert connection.execute("SELECT value FROM facts WHERE name = 'model'").fetchone() == ('"Net"',)
    assert connection.execute("PRAGMA user_version").fetchone() == (schema.VERSION,)
    assert recorder_module.EVERY_S < 1
    connection.close()
