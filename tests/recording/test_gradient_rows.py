"""Counted gradients in a run file: what comes back, how much room they take, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import sqlite3
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from amp_widgets.analysis.gradients import GradientRange
from amp_widgets.core.gradient_counts import BUCKETS, INF_BUCKET, NAN_BUCKET, CountedGradients, GradientCounts
from amp_widgets.errors import RecordingError
from amp_widgets.recording import gradient_rows
from amp_widgets.recording.gradient_rows import ALL_LAYERS, GradientAllowance, from_row, summed, to_row
from amp_widgets.recording.recorder import Recorder
from amp_widgets.recording.run import open_run

sys.path.insert(0, str(Path(__file__).parent))
from recorded import Source

HTML = "<img src=x onerror=alert(1)>'; DROP TABLE gradients; --\u5c42"


def counted(
    chance: np.random.Generator, *, step: int = 0, layers: int = 3, scale: float = 2.0**16, most: int = 2**40
) -> GradientCounts:
    """As of a model with so many layers; some inf, NaN, and a layer without any gradient."""
    rows = []
    for i in range(layers):
        for family in ("output", "parameter"):
            counts = np.zeros(BUCKETS)
            place = int(chance.integers(200, 500))
            counts[place : place + 60] = chance.integers(0, most if i else 3, 60)
            if i == 1:
                counts[[0, INF_BUCKET, NAN_BUCKET]] = 5, 1, 2
            peak = [math.inf, math.nan, 65504.0][i % 3]
            rows.append(
                CountedGradients(
                    layer=f"{HTML}.{i}" if i else "(model)",
                    family=family,  # type: ignore[arg-type]
                    dtype="fp16" if family == "output" else "fp32",
                    arrivals=i + 1,
                    elements=int(counts.sum()),
                    looked_at=int(counts.sum()) // 2,
                    counts=counts,
                    peaks={"": peak} if family == "output" else {"weight": peak, HTML: 0.0},
                    wide=i == 2,
                )
            )
    return GradientCounts(step=step, scale=scale, rows=tuple(rows), notes=(HTML,))


def assert_same(one: GradientCounts, other: GradientCounts) -> None:
    assert (one.step, one.scale, one.notes, len(one.rows)) == (other.step, other.scale, other.notes, len(other.rows))
    for mine, yours in zip(one.rows, other.rows, strict=True):
        for field in dataclasses.fields(CountedGradients):
            ours, theirs = getattr(mine, field.name), getattr(yours, field.name)
            if field.name == "counts":
                assert ours.tobytes() == theirs.tobytes()
            elif field.name == "peaks":
                assert str(dict(ours)) == str(dict(theirs))  # NaN is NaN
            else:
                assert ours == theirs, field.name


@pytest.fixture
def chance() -> np.random.Generator:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def test_it_comes_back_bit_by_bit_through_a_file(tmp_path: Path, chance: np.random.Generator) -> None:
    source = Source()
    recorder = Recorder(tmp_path / "run.db", source, facts={}, every_s=1e6)
    made = [counted(chance, step=step, layers=step % 5, scale=2.0**step) for step in range(6)]
    for i in range(6):
        source.train(1)
        source.gradients = tuple(made[max(0, i - 3) : i + 1])  # the probe holds the newest ones
        recorder.flush()
    with open_run(tmp_path / "run.db") as run:
        assert run.gradients.steps == (0, 1, 2, 3, 4, 5)
        for one, other in zip(run.gradients, made, strict=True):
            assert_same(one, other)
        assert run.gradients[-1] is run.gradients[5] is run.gradients[4:][1]
        assert repr(GradientRange.of(run.gradients[3]))
        source.gradients = (counted(chance, step=9),)
        recorder.close()
        assert run.gradients.steps[-1] == 9  # without a refresh


def test_estimated_numbers_are_rounded_and_none_becomes_zero(chance: np.random.Generator) -> None:
    made = counted(chance)
    estimated = dataclasses.replace(made.rows[0], counts=made.rows[0].counts * 1.37)
    back = from_row(to_row(dataclasses.replace(made, rows=(estimated,)))).rows[0].counts
    assert np.array_equal(back, np.rint(estimated.counts))
    assert np.array_equal(back > 0, estimated.counts > 0)


def test_the_sum_of_all_layers(chance: np.random.Generator) -> None:
    made = counted(chance)
    whole = summed(made)
    assert {(row.layer, row.family, row.dtype, row.wide) for row in whole.rows} == {
        (ALL_LAYERS, family, dtype, wide) for family, dtype in (("output", "fp16"), ("parameter", "fp32")) for wide in (0, 1)
    }  # fmt: skip
    outputs = [row for row in whole.rows if row.family == "output"]
    total = np.sum([row.counts for row in made.rows if row.family == "output"], axis=0)
    assert np.array_equal(np.sum([row.counts for row in outputs], axis=0), total)
    assert np.array_equal(GradientRange.of(whole).total.weights > 0, GradientRange.of(made).total.weights > 0)
    assert all(math.isnan(peak) for row in outputs if not row.wide for peak in row.peaks.values())  # NaN is larger than inf


def test_a_file_is_bounded_however_many_layers_there_are(tmp_path: Path, chance: np.random.Generator) -> None:
    """The bytes that histograms of every tenth step add to each step, of a model with 100 layers."""
    sizes, steps = {}, 20_000
    made = counted(chance, layers=100, most=2**20)
    for what in ("without", "with"):
        source = Source()
        recorder = Recorder(tmp_path / f"{what}.db", source, facts={}, every_s=1e6)
        for step in range(0, steps, 10):
            source.train(10)
            if what == "with":
                source.gradients = (dataclasses.replace(made, step=step),)
            if step % 100 == 0:
                recorder.flush()
        recorder.close()
        sizes[what] = (tmp_path / f"{what}.db").stat().st_size
    added = (sizes["with"] - sizes["without"] - gradient_rows.BYTES_AT_FIRST) / steps
    print(f"{sizes['without'] / steps:.1f} bytes a step, {added:.1f} more with gradients")
    assert 0 < added < 1.3 * gradient_rows.BYTES_A_STEP  # pages of SQLite are not full
    assert sizes["with"] / steps < 200
    with open_run(tmp_path / "with.db") as run:
        whole = [step for step, counts in zip(run.gradients.steps, run.gradients, strict=True) if len(counts.rows) > 4]
        print(f"{len(run.gradients)} of {steps // 100} steps, all layers of {len(whole)}")
        assert len(run.gradients) > 50
        assert len(whole) >= 3


def test_without_room_nothing_is_written_or_packed(monkeypatch: pytest.MonkeyPatch, chance: np.random.Generator) -> None:
    allowance, made = GradientAllowance(), counted(chance, layers=50)
    rows = allowance.rows_for([made] * 20, steps=0)
    assert sum(map(gradient_rows._size, rows)) <= gradient_rows.BYTES_AT_FIRST
    allowance.spend(rows)
    packed: list[int] = []
    monkeypatch.setattr(gradient_rows, "to_row", lambda counts: packed.append(len(counts.rows)) or to_row(counts))
    assert allowance.rows_for([made], steps=1) == []
    assert packed == [4]  # their sum was tried


GOOD = to_row(counted(np.random.default_rng(0)))
HOSTILE = {
    "a text for a blob": ("content", "text"),
    "nothing": ("content", b""),
    "no zlib": ("content", b"\x00" * 50),
    "too short": ("content", zlib.compress(b"\x00" * 8)),
    "more than it should": ("content", zlib.compress(b"\x00" * 10_000_000)),
    "cut off": ("content", GOOD[6][:-3]),
    "a bucket before the first": ("first", -1),
    "buckets beyond the last": ("buckets", 768),
    "so many that memory would not do": ("layers", "[" + "{}," * 200_000 + "{}]"),
    "layers that are no JSON": ("layers", "{"),
    "layers that are an object": ("layers", "{}"),
    "a layer that is a number": ("layers", "[1,1,1,1,1,1]"),
    "layers nested without end": ("layers", "[" * 100_000),
    "a family that there is not": ("layers", GOOD[2].replace("output", "<b>")),
    "a peak that is a text": ("layers", GOOD[2].replace('"inf"', '"1e5"')),
    "a peak below zero": ("layers", GOOD[2].replace("65504.0", "-1.0")),
    "a name that is a number": ("layers", GOOD[2].replace('"(model)"', "7")),
    "less than none": ("layers", json.dumps([json.loads(GOOD[2])[0] | {"elements": -1}] * 6)),
    "notes that are numbers": ("notes", "[1]"),
    "no scale": ("scale", 0.0),
    "a scale that is a blob": ("scale", b"1"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_such_row_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "run.db"
    source = Source()
    source.gradients = (counted(np.random.default_rng(0)),)
    source.train(5000)
    Recorder(path, source, facts={}, every_s=1e6).close()
    column, value = HOSTILE[name]
    connection = sqlite3.connect(path)
    connection.execute(f"UPDATE gradients SET {column} = ?", (value,))
    connection.commit()
    connection.close()
    with open_run(path) as run:
        assert len(run.gradients) == 1  # they are not read before they are looked at
        with pytest.raises(RecordingError, match=r"the gradients of a step cannot be read .*the file is damaged"):
            run.gradients[0]


def test_a_file_of_the_first_version_has_none(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    source = Source()
    source.train(3)
    Recorder(path, source, facts={}, every_s=1e6).close()
    connection = sqlite3.connect(path)
    connection.execute("DROP TABLE gradients")
    connection.execute("PRAGMA user_version = 1")
    connection.commit()
    connection.close()
    with open_run(path) as run:
        assert (len(run.history), len(run.gradients)) == (3, 0)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 2")
    connection.close()
    with pytest.raises(RecordingError, match="no table 'gradients'"):
        open_run(path)
