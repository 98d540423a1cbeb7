"""A run as tables: every column and every event comes back."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from amp_widgets.core.history import Event, History
from amp_widgets.errors import ExportError, MissingExtraError
from amp_widgets.export.tables import export_csv, export_parquet

sys.path.insert(0, str(Path(__file__).parent))
from exported import RunOf, odd_history

pandas = pytest.importorskip("pandas", reason="pandas is not installed: pip install 'amp-widgets[pandas]'")


@pytest.fixture
def history() -> History:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return odd_history(seed)


def read_csv(path: Path) -> object:
    return pandas.read_csv(path, keep_default_na=False, na_values=[""])


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_every_column_and_every_event_comes_back(tmp_path: Path, history: History, form: str) -> None:
    if form == "parquet":
        pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'amp-widgets[pandas]'")
    export, read = (export_csv, read_csv) if form == "csv" else (export_parquet, pandas.read_parquet)
    steps, events = export(RunOf(history), tmp_path / f"run.{form}")
    assert (steps.name, events.name) == (f"run.{form}", f"run.events.{form}")
    frame, ours = read(steps), history.columns()
    assert list(frame.columns) == list(ours)
    assert frame["step"].dtype == np.int64
    for name in ours:
        assert np.array_equal(frame[name].to_numpy(ours[name].dtype), ours[name], equal_nan=True), name
    told = read(events)
    assert list(told.columns) == ["step", "kind", "reason", "detail", "time_s"]
    for row, event in zip(told.to_dict("records"), history.events(), strict=True):
        assert (row["step"], row["kind"], row["reason"]) == (event.step, event.kind, event.reason)
        assert json.loads(row["detail"]) == dict(event.detail)
        assert row["time_s"] == event.time_s or (row["time_s"] != row["time_s"] and event.time_s != event.time_s)


def test_tables_in_memory(history: History) -> None:
    frame, events = history.to_pandas(), history.events_to_pandas()
    assert len(frame) == len(history)
    assert frame.dtypes.astype(str).to_dict() == {name: "int64" if name == "step" else "float64" for name in history.names}
    assert len(events) == len(history.events())
    assert list(History().events_to_pandas().columns) == list(events.columns)


@pytest.mark.parametrize("export", [export_csv, export_parquet])
def test_half_a_character_stops_nothing(tmp_path: Path, export: Callable[..., tuple[Path, Path]]) -> None:
    if export is export_parquet:
        pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'amp-widgets[pandas]'")
    history = History()
    history.record(Event(step=0, kind="note", reason="half: \ud800", detail={"layer": "\udfff"}, time_s=0.0))
    _, events = export(RunOf(history), tmp_path / "run")
    told = pandas.read_csv(events) if export is export_csv else pandas.read_parquet(events)
    assert told["reason"].tolist() == ["half: ?"]
    assert json.loads(told["detail"][0]) == {"layer": "\udfff"}


def test_neither_file_is_written_where_one_is_in_the_way(tmp_path: Path, history: History) -> None:
    (tmp_path / "run.events.csv").write_text("old")
    with pytest.raises(ExportError, match=r"export_csv: .*run\.events\.csv exists already"):
        export_csv(RunOf(history), tmp_path / "run.csv")
    assert not (tmp_path / "run.csv").exists()
    export_csv(RunOf(history), tmp_path / "run.csv", overwrite=True)
    assert (tmp_path / "run.events.csv").read_text() != "old"


def test_what_is_missing_is_named(tmp_path: Path, history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'amp-widgets\[pandas\]'"):
        export_parquet(RunOf(history), tmp_path / "run.parquet")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match=r"to_pandas: .*pip install 'amp-widgets\[pandas\]'"):
        history.to_pandas()
    assert list(tmp_path.iterdir()) == []
