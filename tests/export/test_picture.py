"""A chart as a picture, by kaleido; and what is said where it, or its browser, is missing."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

import pytest

from amp_widgets.core.history import History
from amp_widgets.errors import ExportError, MissingExtraError
from amp_widgets.export import picture
from amp_widgets.export.picture import export_picture

sys.path.insert(0, str(Path(__file__).parent))
from exported import RunOf, odd_history


@pytest.fixture
def run() -> RunOf:
    return RunOf(odd_history(0))


def test_a_picture(tmp_path: Path, run: RunOf) -> None:
    if importlib.util.find_spec("kaleido") is None:
        pytest.skip("kaleido is not installed: pip install 'amp-widgets[pictures]'")
    if picture._browser() is None:
        pytest.skip("there is no Chrome or Chromium here, which kaleido needs")
    path = export_picture(run, tmp_path / "run.svg", theme="dark", width_px=700)
    content = path.read_text(encoding="utf-8")
    assert content.startswith("<svg")
    assert 'width="700"' in content
    assert "<script" not in content
    with pytest.raises(ExportError, match="exists already"):
        export_picture(run, path)


def test_what_is_missing_is_named(tmp_path: Path, run: RunOf, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(picture, "_browser", lambda: None)
        with pytest.raises(ExportError, match="kaleido draws in Chrome or Chromium, and none was found here; install one"):
            export_picture(run, tmp_path / "run.png")
    monkeypatch.setitem(sys.modules, "kaleido", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'amp-widgets\[pictures\]'"):
        export_picture(run, tmp_path / "run.png")
    assert list(tmp_path.iterdir()) == []


def test_where_the_browser_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROWSER_PATH", sys.executable)
    assert picture._browser() == sys.executable
    monkeypatch.setenv("BROWSER_PATH", "/nowhere")
    assert picture._browser() is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"path": "run.html"}, r"got 'run\.html', expected a name that ends in \.png, \.svg"),
        ({"what": "memory"}, "no step was profiled; session.profile_next_step"),
        ({"what": "gradients"}, "no gradients were counted; session.count_gradients"),
        ({"what": "loss"}, "what: got 'loss', expected one of 'training', 'step time'"),
        ({"theme": "red"}, "theme: got 'red', expected 'light' or 'dark'"),
    ],
)
def test_what_cannot_be_drawn(
    tmp_path: Path, run: RunOf, options: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picture, "_browser", lambda: "browser")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    options = {"path": "run.png"} | options
    with pytest.raises(ExportError, match=words):
        export_picture(run, tmp_path / options.pop("path"), **options)  # type: ignore[arg-type]
    with pytest.raises(ExportError, match="no training step was recorded"):
        export_picture(RunOf(History()), tmp_path / "run.png")


def test_an_error_of_the_browser_is_told(tmp_path: Path, run: RunOf, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object, **more: object) -> None:
        raise RuntimeError("\n the browser seemed to close\nand more")

    monkeypatch.setattr(picture, "_browser", lambda: "browser")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "kaleido", types.SimpleNamespace(write_fig_sync=fail))
    with pytest.raises(ExportError, match="kaleido could not draw: the browser seemed to close"):
        export_picture(run, tmp_path / "run.png")
    assert list(tmp_path.iterdir()) == []
