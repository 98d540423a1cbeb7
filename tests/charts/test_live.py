from __future__ import annotations

import gc
import json
import math
import threading
import time
import weakref
from typing import Any

import ipywidgets
import numpy as np
import plotly.graph_objects as go
import pytest

from amp_widgets.charts.asset import plotly_asset
from amp_widgets.charts.live import TrainingChart
from amp_widgets.charts.page_data import MOST_POINTS, OVERVIEW_POINTS
from amp_widgets.charts.series import SERIES
from amp_widgets.core.history import Event, History
from amp_widgets.errors import SessionClosedError


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Page:
    """What a page does with what it is told, as live.js does."""

    def __init__(self, chart: TrainingChart) -> None:
        state = chart.get_state(["full"])["full"]
        self.sequence = -1
        self.bytes: list[int] = []
        self.kinds: list[str] = []
        self.details: list[dict[str, Any]] = []
        self.take(state["head"], state["data"])

    def receive(self, content: dict[str, Any], buffers: list[bytes]) -> None:
        (data,) = buffers
        json.dumps(content, allow_nan=False)
        if content["type"] == "detail":
            self.details.append({**content, "series": unpacked(content, data)})
            return
        if content["sequence"] <= self.sequence:
            return
        assert content["type"] == "whole" or content["sequence"] == self.sequence + 1
        self.bytes.append(len(data) + len(json.dumps(content)))
        self.kinds.append(content["type"])
        self.take(content, data)

    def take(self, head: dict[str, Any], data: bytes) -> None:
        if head["type"] != "append":
            self.series = {name: np.empty((2, 0)) for name in SERIES}
            self.events: list[dict[str, Any]] = []
        for name, points in unpacked(head, data).items():
            self.series[name] = np.concatenate([self.series[name], points], axis=1)
        self.events += head["events"]
        self.sequence = head["sequence"]
        self.head = head


def unpacked(head: dict[str, Any], data: bytes) -> dict[str, np.ndarray]:
    values = np.frombuffer(data, "<f8")
    parts, at = {}, 0
    for name, count in zip(SERIES, head["counts"], strict=True):
        parts[name] = values[at : at + 2 * count].reshape(2, count)
        at += 2 * count
    assert at == values.size
    return parts


class Setup:
    """A history, a chart of it, and pages that are open."""

    def __init__(self, **kwargs: Any) -> None:
        self.clock = Clock()
        self.history = History(**kwargs)
        self.chart = TrainingChart(memory_source="counted", clock=self.clock)
        self.pages: list[Page] = []
        self.sent = 0
        self.chart.send = self.send  # type: ignore[method-assign]
        self.steps = 0

    def send(self, content: dict[str, Any], buffers: list[bytes]) -> None:
        self.sent += 1
        for page in self.pages:
            page.receive(content, buffers)

    def open_page(self) -> Page:
        self.pages.append(Page(self.chart))
        return self.pages[-1]

    def say(self, **content: Any) -> None:
        """What a page sends to the kernel."""
        self.chart._handle_custom_msg(content, [])

    def run(self, steps: int) -> None:
        for i in range(self.steps, self.steps + steps):
            skipped = i % 50 == 20
            self.history.append(step=i, loss=math.sin(i), scale=2.0 ** (i // 100 % 10), skipped=skipped, peak_bytes=i)
            if skipped:
                self.history.record(event(i, "skipped"))
        self.steps += steps

    def pull(self) -> bool:
        self.clock.now += 0.1
        sent = self.chart.pull(self.history)
        self.say(type="drawn", sequence=self.chart._sequence)
        return sent


def event(step: int, kind: str = "applied") -> Event:
    return Event(step=step, kind=kind, reason=f"at <{step}>", detail={}, time_s=0.0)


def same(one: Page, chart: TrainingChart) -> None:
    other = Page(chart)
    for name in SERIES:
        np.testing.assert_array_equal(one.series[name], other.series[name])
    assert one.events == other.events
    assert one.head["skipped"] == other.head["skipped"]
    assert one.head["last_step"] == other.head["last_step"]


def test_one_message_for_what_is_new_and_none_when_nothing_is() -> None:
    setup = Setup()
    page = setup.open_page()
    assert not setup.pull()
    setup.run(3)
    assert setup.pull()
    assert not setup.pull()
    setup.history.record(event(3))
    assert setup.pull()
    setup.run(2)
    setup.history.record(event(5))
    assert setup.pull()
    assert setup.sent == 3
    np.testing.assert_array_equal(page.series["loss"], [np.arange(5), np.sin(np.arange(5))])
    assert [one["label"] for one in page.events] == ["at &lt;3>", "at &lt;5>"]
    assert page.head["last_step"] == 4


def test_the_last_pull_need_not_wait() -> None:
    setup = Setup()
    page = setup.open_page()
    setup.run(1)
    setup.pull()
    setup.run(1)
    assert not setup.chart.pull(setup.history)
    assert setup.chart.pull(setup.history, at_once=True)
    assert page.head["last_step"] == 1


def test_every_page_has_the_same_whenever_it_was_opened() -> None:
    setup = Setup()
    pages = [setup.open_page()]
    for i in range(30):
        setup.run(13)
        setup.history.record(event(setup.steps))
        setup.pull()
        if i % 7 == 0:
            pages.append(setup.open_page())
    for page in pages:
        same(page, setup.chart)
    np.testing.assert_array_equal(pages[0].series["loss"][0], np.arange(30 * 13))
    assert pages[0].head["skipped"] == len(setup.history.events("skipped"))


def test_a_chart_made_late_shows_the_whole_history() -> None:
    setup = Setup()
    setup.run(500)
    setup.history.record(event(7))
    page = setup.open_page()
    assert setup.pull()
    assert page.series["loss"].shape == (2, 500)
    assert page.series["skipped"][0].tolist() == [event.step for event in setup.history.events("skipped")]
    assert len(page.events) == 1


class LongHistory:
    """Made at once; the chart needs no more of a history than this."""

    def __init__(self, rows: int) -> None:
        self.values = {"step": np.arange(rows + 1000), "loss": np.sin(np.arange(rows + 1000.0))}
        self.rows = rows

    def columns(self, *names: str) -> dict[str, np.ndarray]:
        return self.rows_since(0, *names)[0]

    def rows_since(self, cursor: Any, *names: str) -> tuple[dict[str, np.ndarray], Any, bool]:
        new = slice(cursor or 0, self.rows)
        return {name: self.values.get(name, self.values["loss"])[new].copy() for name in names}, self.rows, False

    def events(self, *kinds: str) -> list[Event]:
        return []

    def events_since(self, index: int) -> tuple[list[Event], int]:
        return [], index


def test_messages_do_not_grow_with_the_run() -> None:
    def sizes(rows: int) -> tuple[int, float]:
        setup, history = Setup(), LongHistory(rows)
        page = setup.open_page()
        setup.chart.pull(history)
        page.bytes.clear()
        cost = math.inf
        for _ in range(7):
            history.rows += 10
            setup.say(type="drawn", sequence=setup.chart._sequence)
            setup.clock.now += 0.1
            start = time.perf_counter()
            assert setup.chart.pull(history)
            cost = min(cost, time.perf_counter() - start)
        assert page.kinds[1:] == ["append"] * 7
        return max(page.bytes), cost

    (short, short_s), (long, long_s) = sizes(1000), sizes(1_000_000)
    assert long <= short + 20  # a few more digits in the header
    assert short < 1500
    assert long_s < 5 * short_s + 2e-3  # a copy of the history alone takes 20 ms


def test_long_runs_are_sent_as_an_overview_from_time_to_time() -> None:
    setup = Setup()
    page = setup.open_page()
    for _ in range(300):
        setup.run(100)
        setup.pull()
        assert all(points.shape[1] <= MOST_POINTS for points in page.series.values())
    same(page, setup.chart)
    assert page.kinds.count("whole") <= 1 + 30_000 / (MOST_POINTS - 2 * OVERVIEW_POINTS)
    assert page.head["exact_from"] > 0
    assert page.head["skipped"] == len(setup.history.events("skipped")) == 600
    x = page.series["loss"][0]
    assert x[-1] == 29_999
    np.testing.assert_array_equal(x[x > page.head["exact_from"]], np.arange(page.head["exact_from"] + 1, 30_000))


def test_after_a_reduction_of_the_history_the_page_starts_over() -> None:
    setup = Setup(capacity=1000)
    page = setup.open_page()
    setup.history.record(event(0))
    for _ in range(30):
        setup.run(100)
        setup.pull()
    assert page.kinds.count("whole") > 2
    same(page, setup.chart)
    np.testing.assert_array_equal(page.series["loss"][0], setup.history.columns("step")["step"])
    assert page.series["skipped"][0].tolist() == [event.step for event in setup.history.events("skipped")]
    assert page.head["skipped"] == 60
    assert len(page.events) == 1


def test_another_history_replaces_the_first() -> None:
    setup = Setup()
    page = setup.open_page()
    setup.run(100)
    setup.history.record(event(5))
    setup.pull()
    setup.history = History()
    assert setup.pull()
    assert all(points.shape[1] == 0 for points in page.series.values())
    assert page.events == []
    assert page.head["last_step"] is None
    assert not setup.pull()
    setup.steps = 0
    setup.run(5)
    setup.pull()
    same(page, setup.chart)
    assert page.series["loss"].shape == (2, 5)


def test_nothing_is_lost_while_no_page_answers() -> None:
    setup = Setup()
    page = setup.open_page()
    sent = 0
    for _ in range(1200):  # two minutes
        setup.run(1)
        setup.clock.now += 0.1
        sent += setup.chart.pull(setup.history)
    assert 125 <= sent <= 140  # 2 Hz for a minute, then one in 5 s
    setup.say(type="drawn", sequence=setup.chart._sequence)
    assert setup.pull()
    same(page, setup.chart)
    np.testing.assert_array_equal(page.series["loss"][0], np.arange(1200))


def test_a_page_that_missed_a_message_gets_everything() -> None:
    setup = Setup()
    setup.run(10)
    setup.pull()
    page = setup.open_page()
    pages, setup.pages = setup.pages, []
    setup.run(10)
    setup.pull()
    setup.pages = pages
    setup.say(type="missed")
    same(page, setup.chart)
    assert page.series["loss"].shape == (2, 20)


def test_zooming_in_fetches_every_step_for_that_view() -> None:
    setup = Setup()
    setup.run(50_000)
    page = setup.open_page()
    setup.pull()
    assert page.series["loss"].shape[1] <= 2 * OVERVIEW_POINTS
    setup.say(type="detail", view="a", request=7, range=[20_000.4, 21_000])
    (detail,) = page.details
    assert (detail["view"], detail["request"], detail["range"], detail["last_step"]) == ("a", 7, [20_000.4, 21_000], 49_999)
    steps = np.arange(20_001, 21_001)
    np.testing.assert_array_equal(detail["series"]["loss"], [steps, np.sin(steps)])
    assert detail["series"]["skipped"][0].tolist() == [step for step in steps if step % 50 == 20]
    setup.say(type="detail", view="a", request=8, range=[0, 49_999])
    assert all(points.shape[1] <= 4 * OVERVIEW_POINTS for points in page.details[1]["series"].values())
    setup.say(type="detail", view="a", request=9, range=[-10, -5])
    assert sum(page.details[2]["counts"]) == 0
    same(page, setup.chart)


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"type": "detail"},
        {"type": "detail", "view": 1, "request": "x", "range": None},
        {"type": "detail", "view": "a", "request": 1, "range": ["0", {}]},
        {"type": "drawn", "sequence": "1"},
        {"type": "unknown"},
    ],
)
def test_what_a_page_says_wrong_is_left_alone(content: dict[str, Any]) -> None:
    setup = Setup()
    setup.run(5)
    setup.open_page()
    setup.chart.pull(setup.history)
    sent = setup.sent
    setup.say(**content)
    assert setup.sent == sent


def test_detail_without_a_history_says_nothing() -> None:
    setup = Setup()
    setup.say(type="detail", view="a", request=1, range=[0, 1])
    assert setup.sent == 0


def test_pulls_from_many_threads_neither_double_nor_lose() -> None:
    setup = Setup()
    page = setup.open_page()
    done = threading.Event()

    def pull() -> None:
        while not done.is_set():
            setup.clock.now += 1
            setup.chart.pull(setup.history)
            setup.chart.get_state(["full"])

    threads = [threading.Thread(target=pull) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        setup.run(10)
    done.set()
    for thread in threads:
        thread.join()
    setup.clock.now += 100
    setup.chart.pull(setup.history)
    same(page, setup.chart)
    np.testing.assert_array_equal(page.series["loss"][0], np.arange(2000))


def test_the_figure_has_all_data() -> None:
    setup = Setup()
    assert isinstance(setup.chart.figure(), go.Figure)
    setup.run(20_000)
    setup.history.record(event(3))
    setup.pull()
    figure = setup.chart.figure(theme="dark")
    line = next(trace for trace in figure.data if trace.meta == {"series": "loss", "part": "line"})
    np.testing.assert_array_equal(line.y, np.sin(np.arange(20_000)))
    assert len(figure.layout.shapes) == 1
    assert len(next(t for t in setup.chart.figure(limit=100).data if t.meta["series"] == "loss").x) <= 200


def test_it_is_no_figure_widget_and_its_text_is_short() -> None:
    setup = Setup()
    assert "FigureWidget" not in [base.__name__ for base in type(setup.chart).__mro__]
    assert repr(setup.chart) == "<TrainingChart: no steps yet>"
    setup.run(5)
    setup.pull()
    assert repr(setup.chart) == "<TrainingChart: up to step 4>"
    bundle = setup.chart._repr_mimebundle_()
    assert bundle is not None
    assert bundle[0]["text/plain"] == repr(setup.chart)
    setup.chart.close()
    assert repr(setup.chart) == "<TrainingChart: closed>"


def test_the_description_has_both_themes_no_data_and_the_source_of_memory_escaped() -> None:
    setup = Setup()
    setup.chart.memory_source = "torch <b> & more"
    text = json.dumps(setup.chart.spec)
    assert text.count("torch &lt;b> &amp; more") == 2
    assert "bdata" not in text
    assert len(text) < 30_000
    for theme in ("light", "dark"):
        for trace in setup.chart.spec["themes"][theme]["traces"]:
            assert not {"x", "y", "text", "visible"} & set(trace)


def test_closing_frees_the_chart_and_the_history() -> None:
    chart, history = TrainingChart(clock=Clock()), History()
    history.append(step=0, loss=1.0)
    chart.pull(history)
    layout_id = chart.layout.model_id
    kept = weakref.ref(chart), weakref.ref(history), weakref.ref(chart._page)
    chart.close()
    chart.close()
    assert not chart.pull(history)
    with pytest.raises(SessionClosedError, match="closed"):
        chart.figure()
    assert layout_id not in ipywidgets.widgets.widget._instances
    del history
    gc.collect()
    assert kept[1]() is None
    assert kept[2]() is None
    del chart
    gc.collect()
    assert kept[0]() is None


def test_charts_share_plotly() -> None:
    one, other = TrainingChart(), TrainingChart()
    assert one.asset is other.asset is plotly_asset()
    assert len(one.asset.gzipped) < 2_000_000
    one.close()
    assert plotly_asset().comm is not None
    other.close()
    plotly_asset().close()
    again = plotly_asset()
    assert again.comm is not None
    assert again is plotly_asset()
