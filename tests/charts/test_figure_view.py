from __future__ import annotations

import gc
import json
import weakref
from typing import Any

import comm
import ipywidgets
import plotly.graph_objects as go
import pytest
from comm.base_comm import BaseComm

from amp_widgets.charts.asset import plotly_asset
from amp_widgets.charts.figure_view import FigureView
from amp_widgets.charts.look import Theme


def draw(theme: Theme, *, y: tuple[int, ...] = (1, 3, 2)) -> go.Figure:
    colour = {"light": "#0072b2", "dark": "#56b4e9"}[theme]
    layout = {
        "paper_bgcolor": {"light": "#ffffff", "dark": "#111111"}[theme],
        "annotations": [{"text": "peak", "bgcolor": colour}],
    }
    return go.Figure([{"type": "scatter", "y": y, "line": {"color": colour}}], layout | {"template": go.layout.Template()})


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    class RecordingComm(BaseComm):
        def publish_msg(self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **keys: Any) -> None:
            if msg_type == "comm_msg":
                found.append(data["state"])

    monkeypatch.setattr(comm, "create_comm", lambda *args, **options: RecordingComm(*args, **options))
    return found


def in_dark(figure: dict[str, Any]) -> dict[str, Any]:
    """What the page makes of it, as figure_view.js does."""
    made: dict[str, Any] = json.loads(json.dumps({"data": figure["data"], "layout": figure["layout"]}))
    for path, value in figure["dark"]:
        into: Any = made
        for key in path[:-1]:
            into = into[key]
        into[path[-1]] = value
    return made


def test_it_has_the_figure_once_and_what_is_different_in_dark() -> None:
    view = FigureView()
    view.show(draw, label="a line")
    assert {key: view.figure[key] for key in ("data", "layout")} == json.loads(draw("light").to_json())
    assert in_dark(view.figure) == json.loads(draw("dark").to_json())
    assert [path for path, _ in view.figure["dark"]] == [
        ["data", 0, "line", "color"], ["layout", "annotations", 0, "bgcolor"], ["layout", "paper_bgcolor"],
    ]  # fmt: skip
    assert view.label == "a line"
    assert repr(view) == "<FigureView: a line>"


def test_themes_with_unlike_parts_are_told_apart_too() -> None:
    view = FigureView()
    view.show(
        lambda theme: draw(theme, y=(1, 3, 2) if theme == "light" else (1, 2)).update_layout(
            title=theme if theme == "dark" else None
        ),
        label="",
    )
    assert in_dark(view.figure) == json.loads(draw("dark", y=(1, 2)).update_layout(title="dark").to_json())


def test_an_equal_figure_is_not_sent_again(sent: list[dict[str, Any]]) -> None:
    view = FigureView(note="nothing")
    view.show(draw, label="a line")
    [first] = sent
    assert set(first) == {"figure", "label"}
    view.show(draw, label="a line")
    assert len(sent) == 1
    view.show(lambda theme: draw(theme, y=(5, 5)), label="another")
    assert len(sent) == 2


def test_a_page_that_is_opened_later_has_all_of_it() -> None:
    view = FigureView()
    view.show(draw, label="a line")
    assert view.get_state()["figure"] == view.figure


def test_a_note_where_there_is_no_figure() -> None:
    view = FigureView(note="nothing yet")
    assert (view.figure, view.note, view.label) == ({}, "nothing yet", "nothing yet")
    view.show(draw, label="a line")
    view.clear("gone")
    assert (view.figure, view.note, view.label) == ({}, "gone", "gone")


def test_views_share_plotly_and_close_frees_all() -> None:
    view = FigureView()
    assert view.asset is plotly_asset()
    view.show(draw, label="a line")
    layout_id, kept = view.layout.model_id, weakref.ref(view)
    view.close()
    view.close()
    assert layout_id not in ipywidgets.widgets.widget._instances
    assert plotly_asset().comm is not None
    del view
    gc.collect()
    assert kept() is None
