"""Run files that somebody else has made: nothing in them runs, and what is wrong with them is said."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from amp_widgets.errors import AmpWidgetsError, RecordingError
from amp_widgets.language import in_language
from amp_widgets.recording import schema
from amp_widgets.recording.recorder import Recorder
from amp_widgets.recording.run import open_run

sys.path.insert(0, str(Path(__file__).parent))
from recorded import LayerOf, Source

HTML = "<img src=x onerror=alert(1)><script>alert(2)</script>"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a good run."""
    path = tmp_path / "run.db"
    source = Source()
    source.layers_seen = (LayerOf("layers.0"), LayerOf(HTML, type=HTML, why_not=HTML))
    recorder = Recorder(path, source, facts={"model": HTML}, every_s=1e6)
    source.train(schema.BLOCK_ROWS + 50)
    source.apply(autocast="bf16")
    recorder.close()
    return path


def changed(path: Path, *statements: str) -> Path:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA writable_schema = ON")
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()
    return path


def read_all(path: Path) -> None:
    with open_run(path) as run:
        run.history.columns()
        assert run.settings is not None
        assert run.layers is not None
        assert run.facts is not None


HOSTILE: dict[str, tuple[tuple[str, ...], str]] = {
    "a text for a number": (("UPDATE steps SET loss = 'abc' WHERE rowid > 4100",), "a value that is no number"),
    "a blob for a number": (("UPDATE steps SET loss = zeroblob(9) WHERE rowid > 4100",), "a value that is no number"),
    "no step": (("UPDATE steps SET step = NULL WHERE rowid > 4100",), "a step has no number"),
    "a step beyond all bounds": (("UPDATE steps SET step = 9e300 WHERE rowid > 4100",), "a step has no number"),
    "a short block": (("UPDATE blocks SET content = x'00'",), "not the length that it should"),
    "a block of another type": (("UPDATE blocks SET content = 'text'",), "not the length that it should"),
    "a block that says it has more": (("UPDATE blocks SET rows = 1000000000000",), "not the length that it should"),
    "a block of none": (("UPDATE blocks SET rows = 0, content = x''",), "not the length that it should"),
    "a huge text": (("UPDATE events SET reason = zeroblob(100000000)",), "too big"),
    "details that are no JSON": (("UPDATE events SET detail = '{'",), "no JSON"),
    "details nested without end": ((f"UPDATE events SET detail = '{'[' * 100_000}'",), "no JSON"),
    "details nested too deep": ((f"UPDATE events SET detail = '{{\"a\": {'[' * 400 + ']' * 400}}}'",), "more than 50 deep"),
    "a step of an event without end": (("UPDATE events SET step = 9e999",), "inf where a whole number belongs"),
    "settings after events without end": (("UPDATE settings SET after_events = -9e999",), "-inf where a whole number belongs"),
    "parameters without end": (("UPDATE layers SET parameters = 9e999",), "inf where a whole number belongs"),
    "details that are a list": (("UPDATE events SET detail = '[]'",), "no JSON object"),
    "a kind that is a blob": (("UPDATE events SET kind = x'80'",), "bytes where a text belongs"),
    "settings that cannot be": (("UPDATE settings SET content = '{\"autocast\": \"fp7\"}'",), "autocast: got 'fp7'"),
    "settings that are a number": (("UPDATE settings SET content = '7'",), "no JSON object"),
    "a change that cannot be": (
        ("UPDATE events SET detail = '{\"init_scale\": -1}'", "DELETE FROM settings"),
        "init_scale: got -1",
    ),
    "layers with numbers for names": (("UPDATE layers SET name = x'00'",), "where a text belongs"),
    "a missing table": (("DROP TABLE events",), "no table 'events'"),
    "a view in place of a table": (
        (
            "DROP TABLE steps",
            "CREATE VIEW steps AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM n) SELECT * FROM n",
        ),
        "no table 'steps'",
    ),
    "a computed column": (("ALTER TABLE events ADD COLUMN more AS (reason || reason)",), "computed columns"),
    "another order of columns": (("ALTER TABLE steps RENAME COLUMN loss TO gain",), "expected step, time_s, loss"),
    "a newer version": (("PRAGMA user_version = 99",), "recorded by a newer amp_widgets .version 99"),
    "a database of something else": (("PRAGMA application_id = 1",), "but not of a run"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_gives_an_error_that_says_what(path: Path, name: str) -> None:
    statements, words = HOSTILE[name]
    with pytest.raises(RecordingError, match=words):
        read_all(changed(path, *statements))


def test_a_trigger_does_not_run(path: Path) -> None:
    changed(path, "CREATE TRIGGER t AFTER INSERT ON events BEGIN DELETE FROM steps; END")
    read_all(path)
    with open_run(path) as run:
        assert len(run.history) == schema.BLOCK_ROWS + 50


def test_names_are_text_and_nothing_else(path: Path) -> None:
    changed(path, """ALTER TABLE steps ADD COLUMN "x""; DROP TABLE steps; --" REAL""")
    with pytest.raises(RecordingError, match="not the length that it should"):  # blocks have no such column
        read_all(path)
    changed(path, "DELETE FROM blocks")
    with open_run(path) as run:
        assert run.history.names[-1] == 'x"; DROP TABLE steps; --'
        assert run.layers[1].name == HTML == run.facts["model"]
        assert len(run.history) == schema.BLOCK_ROWS + 50


def _text(path: Path) -> None:
    path.write_text("step,loss\n0,1\n")


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def _noise(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[100:4000] = b"\xff" * 3900
    path.write_bytes(bytes(content))


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _nothing(path: Path) -> None:
    path.unlink()


def _dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


@pytest.mark.parametrize("damage", [_text, _empty, _cut, _noise, _pipe, _endless, _folder, _nothing, _dangling])
def test_what_is_no_run_gives_an_error_that_says_so(path: Path, damage: Callable[[Path], None]) -> None:
    damage(path)
    with pytest.raises(RecordingError, match=r"expected (a file|one) that a session has recorded|damaged"):
        read_all(path)


def test_reading_changes_nothing(path: Path) -> None:
    before = path.read_bytes()
    read_all(path)
    assert path.read_bytes() == before
    assert [one.name for one in path.parent.iterdir()] == ["run.db"]


def test_a_closed_run_keeps_what_was_read(path: Path) -> None:
    run = open_run(path)
    run.close()
    assert len(run.history) == schema.BLOCK_ROWS + 50
    with pytest.raises(RecordingError, match=r"this run was closed; open it again: aw\.open_run"):
        run.refresh()


def test_all_of_it_without_torch(path: Path) -> None:
    code = f"""
import sys
sys.modules["torch"] = None
from amp_widgets.recording.run import open_run
run = open_run({str(path)!r})
print(len(run.history), run.settings.autocast, len(run.layers), len(run.events))
"""
    root = str(Path(__file__).parent.parent.parent)
    said = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True)
    assert said.stdout.split() == [str(schema.BLOCK_ROWS + 50), "bf16", "2", "1"], said.stderr


def test_errors_are_ours() -> None:
    assert issubclass(RecordingError, AmpWidgetsError)


@pytest.mark.parametrize(
    ("content", "said"), [(None, "그런 파일이나 폴더가 없습니다"), (b"no run" * 99, "데이터베이스가 아닙니다")]
)
def test_what_the_system_says_is_said_in_the_language(
    content: bytes | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("amp_widgets.language._chosen", "ko")
    path = tmp_path / "run.db"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RecordingError) as refused:
        open_run(path)
    assert in_language(str(refused.value)) == f"open_run: {path}: {said}; 세션이 기록한 파일이 필요합니다"
