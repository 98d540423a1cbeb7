"""Every notebook runs from top to bottom without a click, and is committed without outputs."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
LIMIT_S = 120
"""Of a notebook that takes some ten seconds where nothing else runs: what hangs is to be told, also on a busy machine."""

STARTED_ANEW = ("01_quickstart", "10_your_own_model")
"""In kernels as users have them; the others save the imports."""


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
def test_runs_from_top_to_bottom(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """In English as by "Run all cells"; in Korean as by a student, who gives a guess at every question."""
    korean = path.stem.endswith(".ko")
    monkeypatch.setenv("AMP_WIDGETS_LANG", "ko" if korean else "en")
    if path.stem not in STARTED_ANEW:
        monkeypatch.setenv("JUPYTER_PATH", str(request.getfixturevalue("quick_kernels")))
    copy = tmp_path / path.name
    shutil.copy(path, copy)
    shutil.copytree(path.parent / "runs", tmp_path / "runs")
    notebook = nbformat.read(copy, as_version=4)
    questions = guess(notebook) if korean else []
    start = time.monotonic()
    where = {"metadata": {"path": str(tmp_path)}}
    client = NotebookClient(notebook, timeout=LIMIT_S, kernel_name="python3", ipython_hist_file="", resources=where)
    try:
        client.execute()
    except CellExecutionError as error:
        pytest.fail(re.sub(r"\x1b\[[0-9;]*m", "", str(error)), pytrace=False)
    assert time.monotonic() - start < LIMIT_S

    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = {kind for output in outputs for kind in output.get("data", {})}
    assert "application/vnd.jupyter.widget-view+json" in shown, "no dashboard was shown"
    printed = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    assert [f"answer to {name}: shown" in printed for name in questions] == [True] * len(questions)


TOLD = {
    "01_quickstart": {"skips": "{answer} skipped"},
    "09_out_of_memory": {"phase": "in the {answer} pass of", "needed": "{answer} layers checkpointed"},
    "10_your_own_model": {"scale": "loss scale {answer} ·", "lost": "{answer} skipped"},
    "12_a_recorded_run": {"skips": "{answer} skipped", "left": "peak 4.9 MB"},
}
"""Lesson → question → how a dashboard tells its answer."""


@pytest.mark.parametrize("lesson", TOLD)
def test_no_dashboard_tells_an_answer_before_there_is_a_guess(
    lesson: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_kernels: Path
) -> None:
    """After "Run all cells": neither the dashboards that are shown, nor the pictures that stay of them."""
    monkeypatch.setenv("AMP_WIDGETS_LANG", "en")
    monkeypatch.setenv("JUPYTER_PATH", str(quick_kernels))
    [path] = [path for path in NOTEBOOKS if path.stem == lesson]
    shutil.copytree(path.parent / "runs", tmp_path / "runs")
    notebook = nbformat.read(path, as_version=4)
    answers = f"print(__import__('json').dumps({{name: globals()[name]._measured[0] for name in {list(TOLD[lesson])!r}}}))"
    guesses = "\n".join(f"{name}.guess({name}.choices[0] if {name}.choices else 1)" for name in TOLD[lesson])
    wait = "__import__('time').sleep(2)  # the dashboards follow"
    for code in (f"{wait}\n{answers}", f"{guesses}\n{wait}"):
        notebook.cells.append(nbformat.v4.new_code_cell(code))
    where = {"metadata": {"path": str(tmp_path)}}
    client = NotebookClient(notebook, timeout=LIMIT_S, kernel_name="python3", ipython_hist_file="", resources=where)
    with client.setup_kernel():
        for number, cell in enumerate(notebook.cells[:-1]):
            client.execute_cell(cell, number)
        measured = json.loads(notebook.cells[-2].outputs[0].text)
        told = {name: text.format(answer=measured[name]) for name, text in TOLD[lesson].items()}
        before = shown_text(notebook.cells[:-2], client.widget_state)
        client.execute_cell(notebook.cells[-1], len(notebook.cells) - 1)
        after = shown_text(notebook.cells[:-2], client.widget_state)
    assert [text for text in told.values() if text in before] == []
    assert [text for text in told.values() if text not in after] == []


def shown_text(cells: Sequence[nbformat.NotebookNode], widgets: Mapping[str, Mapping[str, Any]]) -> str:
    """The text of the outputs and of the widgets in them, in one line; an answer that is folded away does not count."""
    texts: list[str] = []
    waiting: list[str] = []
    for output in (output for cell in cells for output in cell.get("outputs", ())):
        data = output.get("data", {})
        texts += [output.get("text", ""), data.get("text/plain", ""), data.get("text/html", "")]
        texts[-1] = re.sub(r"<details>.*?</details>", "", texts[-1])
        waiting += [view["model_id"] for kind, view in data.items() if kind.endswith("widget-view+json")]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for value in widgets.get(name, {}).values():
            said = json.dumps(value, ensure_ascii=False)
            waiting += re.findall(r"IPY_MODEL_(\w+)", said)
            texts.append(said)
    return " ".join(" ".join(texts).split())


def guess(notebook: nbformat.NotebookNode) -> list[str]:
    """Have every question guessed at right below it, and say at the end whether its answer is shown. Returns their names."""
    names = []
    for number in reversed(range(len(notebook.cells))):
        cell = notebook.cells[number]
        found = re.search(r"^(\w+) = aw\.ask\(", cell.source, re.MULTILINE) if cell.cell_type == "code" else None
        if found:
            names.append(found[1])
            guessing = f"{found[1]}.guess({found[1]}.choices[0] if {found[1]}.choices else 1)"
            notebook.cells.insert(number + 1, nbformat.v4.new_code_cell(guessing))
    for name in names:
        asked = f"print('answer to {name}:', 'shown' if {name}.answer.shown else 'hidden')"
        notebook.cells.append(nbformat.v4.new_code_cell(asked))
    return names


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
