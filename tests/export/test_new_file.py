"""Files that are there whole or not at all, and never in place of another by accident."""

from __future__ import annotations

import errno
import os
import stat
import sys
from pathlib import Path

import pytest

from amp_widgets.errors import ExportError
from amp_widgets.export.html import export_html
from amp_widgets.export.new_file import write_whole

sys.path.insert(0, str(Path(__file__).parent))
from exported import RunOf, odd_history


def put(path: Path, text: str = "new", **options: bool) -> Path:
    return write_whole(path, lambda made: made.write_text(text), overwrite=options.get("overwrite", False), what="export_x")


def test_it_is_written_with_the_rights_that_a_file_gets(tmp_path: Path) -> None:
    put(tmp_path / "a.html")
    (tmp_path / "b").write_text("")
    assert stat.S_IMODE((tmp_path / "a.html").stat().st_mode) == stat.S_IMODE((tmp_path / "b").stat().st_mode)


def test_a_file_that_exists_stays_unless_it_is_said(tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    path.write_text("old")
    with pytest.raises(ExportError, match=r"export_x: .*a\.html exists already; choose another name, or overwrite=True"):
        put(path)
    assert path.read_text() == "old"
    assert put(path, overwrite=True).read_text() == "new"
    assert os.listdir(tmp_path) == ["a.html"]


def test_one_that_comes_meanwhile_stays_too(tmp_path: Path) -> None:
    path = tmp_path / "a.html"

    def write(made: Path) -> None:
        made.write_text("new")
        path.write_text("of somebody else")

    with pytest.raises(ExportError, match="exists already"):
        write_whole(path, write, overwrite=False, what="export_x")
    assert path.read_text() == "of somebody else"
    assert os.listdir(tmp_path) == ["a.html"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_a_symbolic_link_points_to_is_not_written(tmp_path: Path, overwrite: bool) -> None:
    victim = tmp_path / "victim"
    victim.write_text("old")
    (tmp_path / "a.html").symlink_to(victim)
    with pytest.raises(ExportError, match=r"exists already|is no plain file"):
        put(tmp_path / "a.html", overwrite=overwrite)
    assert victim.read_text() == "old"


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"there is no such file or folder; choose a folder that exists"):
        put(tmp_path / "nowhere" / "a.html")


def test_a_full_disk_leaves_the_old_page_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = export_html(RunOf(odd_history(0)), tmp_path / "run.html", plotly="none")
    before = path.read_bytes()

    def full(self: Path, text: str, **options: object) -> int:
        with self.open("w") as half:
            half.write(text[: len(text) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ExportError, match=r"export_html: .*run\.html: there is no room left; choose a folder"):
        export_html(RunOf(odd_history(1)), path, plotly="none", overwrite=True)
    with pytest.raises(ExportError, match="there is no room left"):
        export_html(RunOf(odd_history(1)), tmp_path / "new.html", plotly="none")
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["run.html"]
