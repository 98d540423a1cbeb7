"""The table of differences, its numbers computed again by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from amp_widgets.core.history import Event, History
from amp_widgets.core.settings import Settings
from amp_widgets.errors import RunError
from amp_widgets.recording.differences import MOST_CHANGES, Differences, differences_of

nan, inf = math.nan, math.inf
EVIL = "<script>alert(1)</script>"


class Known:
    """A run by hand."""

    def __init__(self, name: str = "a", facts: Any = None, *, settings: Settings | None = None, **columns: Any) -> None:
        self.name, self.settings, self.history = name, settings or Settings(), History()
        self.facts = facts or {}
        if columns:
            rows = len(next(iter(columns.values())))
            self.history.extend({"step": np.arange(rows)} | columns)

    def event(self, step: int, kind: str, **detail: Any) -> None:
        self.history.record(Event(step=step, kind=kind, reason=f"reason {kind}", detail=detail, time_s=0.0))


def only(name: str, run: Known) -> tuple[Any, str]:
    row = differences_of([run]).row(name)
    return row.values[0], row.texts[0]


def test_settings_that_differ_come_first() -> None:
    table = differences_of([
        Known("fp32"),
        Known("bf16", settings=Settings(autocast="bf16", checkpointed=("a", "b"), max_scale=1024.0, scaling=False)),
    ])  # fmt: skip
    assert table.runs == ("fp32", "bf16")
    assert [row.name for row in table.differing] == ["autocast", "scaling", "max_scale", "checkpointed"]
    assert [row.texts for row in table.differing] == [("fp32", "bf16"), ("on", "off"), ("none", "2^10"), ("none", "a, b")]
    assert table.row("checkpointed").values == ((), ("a", "b"))
    assert table.row("growth_factor").texts == ("2", "2")
    names = [row[0] for row in table.to_table()]
    assert names[0] == ""
    assert names[1:5] == [row.name for row in table.differing]
    assert len(names) == 1 + len(table.rows)


def test_of_many_layers_those_are_named_that_not_every_run_has() -> None:
    names = tuple(f"blocks.{i}" for i in range(20))
    runs = [Known(settings=Settings(checkpointed=names[:count])) for count in (12, 20, 10, 2)]
    some = [f"blocks.{i}" for i in range(2, 20)]
    assert differences_of(runs[:3]).row("checkpointed").texts == (
        "12 layers, of which not in all runs: blocks.10, blocks.11",
        f"20 layers, of which not in all runs: {', '.join(names[10:16])}, and 4 more",
        "10 layers",
    )
    assert differences_of(runs).row("checkpointed").texts[1:] == (
        f"20 layers, of which not in all runs: {', '.join(some[:6])}, and 12 more",
        f"10 layers, of which not in all runs: {', '.join(some[:6])}, and 2 more",
        "blocks.0, blocks.1",
    )


def test_changes_on_the_way() -> None:
    run = Known()
    run.event(3, "applied", autocast="bf16", source="widget")
    run.event(4, "rejected", autocast="fp16")
    run.event(1200, "applied", checkpointed=["x", "y"], source="script")
    assert only("changes on the way", run) == (
        ((3, "autocast bf16"), (1200, "2 layers checkpointed")),
        "step 3: autocast bf16; step 1,200: 2 layers checkpointed",
    )
    assert only("changes on the way", Known()) == ((), "none")
    for step in range(2000, 2020):
        run.event(step, "applied", init_scale=2.0)
    assert only("changes on the way", run)[1].endswith(f"; {22 - MOST_CHANGES} more")


def test_the_final_loss_is_the_mean_of_the_last_finite_ones() -> None:
    rng = np.random.default_rng(4)
    print("seed 4")
    for steps, last in ((1, 1), (19, 1), (20, 2), (300, 30), (500, 50), (900, 50)):
        loss = rng.random(steps)
        assert only("final loss", Known(loss=loss))[0] == pytest.approx(np.mean(loss[-last:]), rel=1e-12), steps
    loss = rng.random(300)
    loss[[280, 290]] = [nan, inf]
    finite = np.delete(loss, [280, 290])
    value, text = only("final loss", Known(loss=loss))
    assert value == pytest.approx(np.mean(finite[-29:]), rel=1e-12)
    assert text == f"{value:#.4g}"
    assert only("losses inf or NaN", Known(loss=loss)) == (2, "2")
    assert only("final loss", Known(loss=[4.0, 2.0])) == (2.0, "2.000")


def test_a_loss_that_has_gone_is_said() -> None:
    value, text = only("final loss", Known(loss=[4.0, 2.0, nan, nan]))
    assert math.isnan(value)
    assert text == "nan, before it 2.000"
    assert only("losses inf or NaN", Known(loss=[nan, 4.0, inf, nan])) == (2, "2")  # the first was not recorded
    value, text = only("final loss", Known(loss=[nan, nan]))
    assert (math.isnan(value), text) == (True, "–")
    assert only("losses inf or NaN", Known(loss=[nan, nan])) == (0, "0")
    assert only("final loss", Known(loss=[inf]))[1] == "nan"


def test_peak_and_ratio() -> None:
    table = differences_of(
        [Known(peak_bytes=[5e6, nan, 8e6, 6e6], allocated_bytes=[1e6, 2e6, 3e6, nan]), Known(peak_bytes=[2e6])]
    )
    assert table.row("peak memory").values == (8e6, 2e6)
    assert table.row("peak memory").texts == ("8.0 MB", "2.0 MB ×0.25")
    assert table.row("allocated at the end").texts == ("3.0 MB", "–")


def test_the_step_time_is_the_median_of_the_steps_that_were_not_skipped() -> None:
    step_s = np.array([9.0, 0.010, 0.020, 0.030, 0.001, 0.040, nan])
    skipped = [0, 0, 0, 0, 1, 0, 0]
    counted = [9.0, 0.010, 0.020, 0.030, 0.040]
    value, text = only("step time", Known(step_s=step_s, skipped=skipped))
    low, median, high = np.percentile(counted, [25, 50, 75])
    assert value == median
    assert text == f"{1e3 * median:.3g} ms ({1e3 * low:.3g} ms to {1e3 * high:.3g} ms)"
    table = differences_of([Known(step_s=[0.5]), Known(step_s=[0.1]), Known(step_s=[nan])])
    assert table.row("step time").texts == ("0.5 s (0.5 s to 0.5 s)", "0.1 s (0.1 s to 0.1 s) ×0.20", "–") or table.row(
        "step time"
    ).texts == ("500 ms (500 ms to 500 ms)", "100 ms (100 ms to 100 ms) ×0.20", "–")


def test_skips_count_once_by_rows_and_events() -> None:
    run = Known(skipped=[0, 1, 0, 1, nan])
    run.event(1, "skipped")
    run.event(4, "skipped")
    assert only("skipped steps", run) == (3, "3")


def test_steps_are_all_that_there_were_also_of_a_thinned_history() -> None:
    run = Known()
    run.history = History(capacity=64)
    run.history.extend({"step": np.arange(5000), "loss": np.ones(5000)})
    assert only("steps", run) == (5000, "5,000")


def test_time_is_from_the_beginning_of_the_first_step() -> None:
    assert only("time", Known(time_s=[10.0, 11.0, 14.0], step_s=[0.5, 1, 3]))[0] == 4.5
    assert only("time", Known(time_s=[10.0, 14.0], step_s=[nan, 3]))[0] == 4.0
    assert only("time", Known())[1] == "–"


def test_machine_and_packages_as_far_as_they_are_known() -> None:
    facts = {
        "model": "Net",
        "device": "cpu",
        "packages": {"torch": "2.1", "numpy": "2"},
        "columns": ["step"],
        "memory_source": "counted",
    }
    table = differences_of([Known(facts=facts), Known(facts={"device": "cuda:0 (H200)", "packages": {"torch": "2.2"}})])
    found = {row.name: row.texts for row in table.rows[-5:]}
    assert found == {
        "model": ("Net", "–"), "device": ("cpu", "cuda:0 (H200)"), "memory measured by": ("counted", "–"),
        "torch": ("2.1", "2.2"), "numpy": ("2", "–"),
    }  # fmt: skip
    assert all(row.differs for row in table.rows[-5:])


def test_a_moment_is_easy_to_read() -> None:
    assert only("recording began", Known(facts={"began": "2026-01-02T03:04:05+00:00"}))[1] == "2026-01-02 03:04:05 UTC"
    assert only("recording began", Known(facts={"began": "Tuesday T+00:00"}))[1] == "Tuesday T+00:00"


def test_what_is_not_known_of_both_does_not_differ() -> None:
    table = differences_of([Known(), Known("b")])
    assert table.differing == ()
    assert repr(table).splitlines()[1] == "the same in both:"


def test_a_row_that_is_not_there() -> None:
    with pytest.raises(RunError, match="there is no row 'speed' here, expected one of 'autocast'"):
        differences_of([Known()]).row("speed")


def test_html_is_escaped_and_folds_what_is_equal() -> None:
    evil = Known(EVIL, facts={"model": EVIL, "packages": {EVIL: EVIL}}, settings=Settings(checkpointed=(EVIL,)))
    evil.event(1, "applied", checkpointed=[EVIL])
    evil.event(1, "applied", **{EVIL: EVIL})
    table = differences_of([evil, Known("b"), Known("c")], names=[EVIL, "b", "c"])
    html = table._repr_html_()
    assert "<script" not in html
    assert html.count("&lt;script&gt;") >= 5
    shown, folded = html.split("<details>")
    assert "checkpointed" in shown
    assert "growth_interval" in folded
    assert f"<summary>{len(table.equal)} rows are the same in all 3 runs</summary>" in folded


def test_it_is_frozen() -> None:
    table = differences_of([Known()])
    with pytest.raises(AttributeError):
        table.rows = ()  # type: ignore[misc]
    assert isinstance(table, Differences)
    assert table == differences_of([Known()]) or any(value != value for row in table.rows for value in row.values)
