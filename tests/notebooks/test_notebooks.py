"""Every notebook runs from top to bottom without a click, and is committed without outputs."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
LIMIT_S = 60


@pytest.fixture(autouse=True)
def own_jupyter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of this environment with default settings, whatever the user has configured."""
    for name in ("CONFIG", "DATA", "RUNTIME"):
        monkeypatch.setenv(f"JUPYTER_{name}_DIR", str(tmp_path / name.lower()))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))))


def test_there_are_notebooks() -> None:
    assert "01_quickstart.ipynb" in [path.name for path in NOTEBOOKS]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / path.name
    shutil.copy(path, copy)
    notebook = nbformat.read(copy, as_version=4)
    start = time.monotonic()
    client = NotebookClient(notebook, timeout=LIMIT_S, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    try:
        client.execute()
    except CellExecutionError as error:
        pytest.fail(re.sub(r"\x1b\[[0-9;]*m", "", str(error)), pytrace=False)
    assert time.monotonic() - start < LIMIT_S

    shown = {kind for cell in notebook.cells for output in cell.get("outputs", []) for kind in output.get("data", {})}
    assert "application/vnd.jupyter.widget-view+json" in shown, "no dashboard was shown"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_committed_clean(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    dirty = [
        cell.id for cell in notebook.cells
        if cell.cell_type == "code" and (cell.outputs or cell.execution_count is not None)
    ]  # fmt: skip
    assert dirty == [], "clear the outputs: Edit > Clear Outputs of All Cells, then save"
    assert "widgets" not in notebook.metadata, "saved widget state: switch off 'Save Widget State Automatically'"
    assert notebook.metadata.kernelspec.name == "python3"
