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


TOLD: Mapping[str, Mapping[str, Sequence[str]]] = {
    "01_quickstart": {"skips": ["{answer} skipped"]},
    "02_number_formats": {"next_number": [], "last_weight": ["torch.float16 {answer:.6f}", "survives ="]},
    "03_autocast": {
        "weights": ["(torch.", "first linear 1 fp32"],
        "logarithm": ["stored 0 log {answer}"],
        "casts": ["in fp32: {answer}", "forward and backward: {answer},"],
    },
    "04_underflow": {"zeros": ["{answer:.1f}%", "layers.1.1 fp32"], "enough": ["# 2^10"]},
    "05_overflow": {
        "first_skips": ["step {answer}: scale", "{answer} skips from step 0", "{answer} skipped"],
        "all_skips": ["step: loss scale, skipped"],
        "cure": ["bf16 skipped: 0"],
    },
    "06_memory_mountain": {
        "adam": ["gradients, optimizer state, activations", "optimizer 3."],
        "doubled": ["weights + optimizer activations peak", "batch: predicted, measured"],
        "sixteen": ["fp32 → bf16: peak", "before: fp32"],
    },
    "07_checkpointing": {
        "saved": ["(-{answer:.1f} %)"],
        "difference": ["largest difference: {answer}", "Bit-identical to a run without"],
        "extra": ["all blocks peak"],
    },
    "08_both_together": {
        "fastest": ["samples a second", "none checkpointed, all checkpointed"],
        "memory_saved": ["memory ×"],
        "closer": ["loss gradients skipped"],
    },
    "09_out_of_memory": {
        "phase": ["in the {answer} pass of"],
        "needed": ["{answer} layers checkpointed", "checkpoint {answer} of"],
        "fitting": ["{answer:,} ×"],
    },
    "10_your_own_model": {
        "difference": ["largest difference: {answer}"],
        "scale": ["loss scale {answer} ·"],
        "lost": ["{answer} skipped"],
    },
    "11_bf16_or_fp16": {
        "ratio": ["torch.bfloat16", "amp_widgets format lab", "relative errors against fp32"],
        "count": [],
        "zeros": ["zero: {answer:.1f}%"],
    },
    "12_a_recorded_run": {"skips": ["{answer} skipped", "last at step"], "left": ["peak 4.9 MB", "bf16 + 4 layers"]},
}
"""Lesson → question → how its answer is told beside the answer itself: by what is printed, by a report, a figure, a dashboard."""


PLAY = """
import time
for one in [*globals().values()]:
    if type(one).__name__ == "AmpSession" and not one.closed and one.run_state == "ready":
        one.start()
        end = time.monotonic() + 20
        while one.run_state == "running" and len(one.history) < 25 and time.monotonic() < end:
            time.sleep(0.02)
        one.pause()
"""
"""What a student does by hand where a lesson says to press Start: it must not tell the answer to a question further down."""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """In English as by "Run all cells", and no answer is told before there is a guess; in Korean as by a student, who gives a
    guess at every question."""
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
        with client.setup_kernel():
            for number, cell in enumerate(notebook.cells):
                client.execute_cell(cell, number)
            took_s = time.monotonic() - start
            if not korean:
                check_that_answers_wait(client, TOLD[path.stem])
    except CellExecutionError as error:
        pytest.fail(re.sub(r"\x1b\[[0-9;]*m", "", str(error)), pytrace=False)
    assert took_s < LIMIT_S

    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = {kind for output in outputs for kind in output.get("data", {})}
    assert "application/vnd.jupyter.widget-view+json" in shown, "no dashboard was shown"
    printed = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    assert [f"answer to {name}: shown" in printed for name in questions] == [True] * len(questions)
    told = re.findall(r"^\w+Error: (.+)$", printed, re.MULTILINE)  # as the lesson prints an error
    assert len(told) == (korean and path.stem.startswith("09"))
    assert [sentence for sentence in told if not re.search("[가-힣]", sentence)] == []


def check_that_answers_wait(client: NotebookClient, told: Mapping[str, Sequence[str]]) -> None:
    """After "Run all cells" nothing that is shown, nor a picture that stays of it, tells an answer; a guess at one question does
    not uncover what tells the answer to a later one; and after the last guess all is told."""
    cells = [*client.nb.cells]
    assert [name for cell in cells for name in asked_in(cell)] == list(told)

    def run(code: str) -> str:
        client.nb.cells.append(nbformat.v4.new_code_cell(code))
        client.execute_cell(client.nb.cells[-1], len(client.nb.cells) - 1)
        return "".join(output.get("text", "") for output in client.nb.cells[-1].outputs)

    parts = " ".join(str(model.get("_anywidget_id")) for model in client.widget_state.values())
    follow_s = 2 if "StatusLine" in parts or "ReplayStatus" in parts else 0  # of the dashboards, where there are some
    follow = f"import json, time; time.sleep({follow_s})"
    run(follow)
    run(PLAY)
    measured = json.loads(run(f"{follow}; print(json.dumps({{name: globals()[name]._measured[0] for name in {list(told)!r}}}))"))
    texts = {name: [text.format(answer=measured[name]) for text in each] for name, each in told.items()}
    waiting = list(told)
    for name in told:
        shown = shown_text(cells, client.widget_state)
        assert [(each, text) for each in waiting for text in texts[each] if text in shown] == [], "told before there is a guess"
        waiting.remove(name)
        run(guess_at(name))
    missing = [(name, text) for name in told for text in texts[name]]
    for _ in range(30):
        run(follow)
        shown = shown_text(cells, client.widget_state)
        if not (missing := [(name, text) for name, text in missing if text not in shown]) or not follow_s:
            break
    assert missing == [], "not told at all: look at TOLD"


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
        for name in asked_in(notebook.cells[number]):
            names.append(name)
            notebook.cells.insert(number + 1, nbformat.v4.new_code_cell(guess_at(name)))
    for name in names:
        asked = f"print('answer to {name}:', 'shown' if {name}.answer.shown else 'hidden')"
        notebook.cells.append(nbformat.v4.new_code_cell(asked))
    return names


def asked_in(cell: nbformat.NotebookNode) -> list[str]:
    """The names of the questions that a cell asks."""
    return re.findall(r"^(\w+) = aw\.ask\(", cell.source, re.MULTILINE) if cell.cell_type == "code" else []


def guess_at(name: str) -> str:
    """The code that gives a guess."""
    return f"{name}.guess({name}.choices[0] if {name}.choices else 1)"


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
