"""A run as JSON for programs, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from amp_widgets.core.history import COLUMNS, Event, History
from amp_widgets.core.settings import FIELD_NAMES, Settings
from amp_widgets.errors import ExportError
from amp_widgets.export.blocks import packed_array, read_block, unpacked_array

MOST_CELLS = 45_000
"""Of rows times columns: what is longer is reduced, so that it takes some 400 KB."""
MOST_LAYERS = 1_000
MOST_EXACT_TIMES = 20_000
"""Of events; where there are more, their times have 24 bits."""
_LINES = ("loss", "scale", "step_s", "allocated_bytes", "peak_bytes", "reserved_bytes")


def run_block(
    name: str,
    history: History,
    columns: Mapping[str, npt.NDArray[Any]],
    events: Iterable[Event],
    settings: Settings,
    facts: Mapping[str, Any],
    layers: Sequence[Any],
) -> dict[str, Any]:
    """The columns, reduced where they are long, and every event."""
    rows = kept_rows(columns)
    return {
        "name": name,
        "steps": history.total_rows,
        "rows": len(columns["step"]),
        "rows_here": len(rows),
        "columns": {column: packed_array(values[rows]) for column, values in columns.items()},
        "events": _events(list(events)),
        "settings": {one: _plain(getattr(settings, one)) for one in FIELD_NAMES},
        "facts": _plain(facts),
        "layers": [[one.name, one.type, one.parameters, one.why_not, bool(one.structural)] for one in layers[:MOST_LAYERS]],
    }


def run_of_page(page: str) -> History:
    """The history that is in an exported page: its columns, reduced as the page says, and every event.

    Raises
    ------
    ExportError
        When the page has none.
    """
    content = read_block(page, "run")
    try:
        columns = {name: unpacked_array(packed) for name, packed in content["columns"].items()}
        history = History(extra_columns=[name for name in columns if name not in COLUMNS])
        history.extend(columns)
        for event in _events_of(content["events"]):
            history.record(event)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ExportError(f"the run in this page cannot be read: {type(error).__name__}: {error}") from error
    return history


def kept_rows(columns: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.intp]:
    """Which rows: all, or where they are many the first and last, and the lowest and highest of each line in stretches."""
    total = len(columns["step"])
    most = max(MOST_CELLS // len(columns), 200)
    if total <= most:
        return np.arange(total)
    starts = np.linspace(0, total, max(most // (2 * len(_LINES)), 1) + 1).astype(np.intp)[:-1]
    kept = {0, total - 1}
    for name in _LINES:
        values = columns[name].astype(np.float64)
        for empty, pick in ((math.inf, np.minimum), (-math.inf, np.maximum)):
            filled = np.where(np.isnan(values), empty, values)
            extremes = np.repeat(pick.reduceat(filled, starts), np.diff(np.append(starts, total)))
            at = np.flatnonzero((filled == extremes) & ~np.isnan(values))
            stretch = np.searchsorted(starts, at, side="right")
            kept.update(at[np.unique(stretch, return_index=True)[1]].tolist())
    return np.array(sorted(kept), dtype=np.intp)


def _events(events: Sequence[Event]) -> dict[str, Any]:
    """Column by column, each text once: of a run whose loss has become NaN there are as many events as steps."""
    found: dict[str, Any] = {}
    for name, values in (
        ("kind", [event.kind for event in events]),
        ("reason", [event.reason for event in events]),
        ("detail", [json.dumps(_plain(event.detail), separators=(",", ":")) for event in events]),
    ):
        number = {text: i for i, text in enumerate(dict.fromkeys(values))}
        found[name] = {"texts": list(number), "at": packed_array(np.array([number[text] for text in values]))}
    found["step"] = packed_array(np.array([event.step for event in events], dtype=np.float64))
    times_s = np.array([event.time_s for event in events], dtype=np.float64)
    if len(events) > MOST_EXACT_TIMES:
        found["times_rounded"] = True
        times_s = times_s.astype(np.float32).astype(np.float64)
    found["time_s"] = packed_array(times_s)
    return found


def _events_of(content: Mapping[str, Any]) -> list[Event]:
    places = {name: unpacked_array(content[name]["at"]).astype(int).tolist() for name in ("kind", "reason", "detail")}
    texts = {name: content[name]["texts"] for name in places}
    details = [_restored(json.loads(text)) for text in texts["detail"]]
    steps, times_s = unpacked_array(content["step"]).tolist(), unpacked_array(content["time_s"]).tolist()
    return [
        Event(step=int(step), kind=texts["kind"][kind], reason=texts["reason"][reason], detail=details[detail], time_s=time_s)
        for step, time_s, kind, reason, detail in zip(steps, times_s, *places.values(), strict=True)
    ]


def _plain(value: Any) -> Any:
    """JSON of every browser: a number that is not finite becomes ``{"number": "inf"}``, and what is no JSON its text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"number": str(float(value))}
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _restored(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"number"} and value["number"] in ("inf", "-inf", "nan"):
            return float(value["number"])
        return {key: _restored(one) for key, one in value.items()}
    return [_restored(one) for one in value] if isinstance(value, list) else value
