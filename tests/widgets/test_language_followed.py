"""What is open when the language changes changes with it: a replay, a view of runs, a format lab."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from amp_widgets.language import set_language
from amp_widgets.recorded_run import open_run
from amp_widgets.runs_comparison import compare_runs
from amp_widgets.session import AmpSession
from amp_widgets.widgets.dashboard_box import parts_of
from amp_widgets.widgets.format_lab import FormatLab


@pytest.fixture(autouse=True)
def english_again() -> Iterator[None]:
    yield
    set_language(None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    model = nn.Linear(2, 2)
    with AmpSession(model, torch.optim.SGD(model.parameters(), lr=0.1), record=tmp_path / "run.db") as session:
        session.fit([(torch.ones(3, 2), torch.zeros(3, dtype=torch.long))] * 4, nn.functional.cross_entropy, epochs=1)
        assert session.wait(30)
    return tmp_path / "run.db"


def scripts_of(widget: Any) -> list[str]:
    """The words that the pages' scripts say, of all parts."""
    return [part._esm.partition("const WORDS = ")[2].partition(";\n")[0] for part in parts_of(widget) if hasattr(part, "_esm")]


def test_a_replay(path: Path) -> None:
    with open_run(path) as run:
        dashboard = run.dashboard()
        dashboard._select("memory")
        dashboard._move("begin")
        assert all(words in ("{}", "") for words in scripts_of(dashboard))
        set_language("ko")
        assert sum("다" in words or "스텝" in words for words in scripts_of(dashboard)) > 3
        assert (dashboard.step, dashboard._tab) == (0, "memory")
        assert "다시 보기" in dashboard._transport.sentence
        set_language("en")
        assert all(words in ("{}", "") for words in scripts_of(dashboard))
        dashboard.close()
        set_language("ko")  # nothing happens to one that is closed


def test_a_view_of_runs(path: Path) -> None:
    compared = compare_runs(path, path)
    view = compared.view()
    assert view._control.metrics[0][1] != "손실"
    set_language("ko")
    assert "손실" in [text for _, text, _ in view._control.metrics]
    assert "최종 손실" in [row[0] for row in (*view._table.differing, *view._table.equal)]
    view.close()
    compared.close()


def test_a_format_lab() -> None:
    lab = FormatLab("0.1")
    english = lab._esm
    set_language("ko")
    assert "지수" in lab._esm
    assert lab.text == "0.1"
    set_language("en")
    assert lab._esm == english
    lab.close()
