"""Runs the lessons and writes what they show as pages: ``python tools/export_lessons.py [--all] [NAME …]``.

A page is one HTML file, ``notebooks/results/NN_name.html`` or ``NN_name.ko.html``, that needs neither a kernel nor a network nor
a script: text, code, outputs, and dashboards as a picture of what they were. Each keeps a digest of its notebook; a lesson is run
again when its notebook has changed, or with ``--all``. It takes Chromium, which draws the charts and the controls.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

from build_lessons import NOTEBOOKS, ROOT, SUFFIXES, notebook, notebook_path, sources
from lesson_page import index_page, lesson_page
from lesson_stills import Stills

RESULTS = NOTEBOOKS / "results"
INDEX = RESULTS / "index.html"
LIMIT_S = 600
"""Of a cell, on a machine that has other things to do."""
MOST_BYTES = 250_000

_VIEW_OPENED = {"method": "custom", "content": {"view": "page", "open": True}}
"""What the page of a dashboard sends when it is shown: from then on the kernel keeps it up to date."""

# Run after the lesson. A demo that waits for its Start has it pressed, so that there is something in its picture; what is
# covered until there is a guess gets one, and the page folds it; then the dashboards have time to follow. It prints the facts
# for the page.
_LAST_CELL = """
import contextlib, json, os, platform, time
import torch
import amp_widgets as aw
from amp_widgets.errors import QuestionError
from amp_widgets.widgets.question import Question

played = {}
for one in list(globals().values()):
    if isinstance(one, aw.AmpSession) and not one.closed and one.run_state == "ready" and id(one) not in played:
        one.start()
        end = time.monotonic() + 20
        while one.run_state == "running" and len(one.history) < 50 and time.monotonic() < end:
            time.sleep(0.02)
        one.pause()
        while one.run_state == "running":
            time.sleep(0.02)
        played[id(one)] = len(one.history)
    if isinstance(one, Question):
        for guess in one.choices[:1] or (1, 50, 0, 0.5, 1000):
            with contextlib.suppress(QuestionError):
                one.guess(guess)
                break
time.sleep(4)
print(json.dumps({
    "torch": torch.__version__, "system": f"{platform.system()} {platform.machine()}", "cores": os.cpu_count(),
    "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "", "played": len(played),
}))
"""


def result_path(source: Path, language: str) -> Path:
    """Where the page of a lesson belongs."""
    return RESULTS / notebook_path(source, language).with_suffix(".html").name


def digest(made: NotebookNode) -> str:
    """Of the cells of a notebook, as far as they decide what its page shows.

    Parameters
    ----------
    made
        The notebook; outputs do not count.
    """
    cells = [[cell.cell_type, cell.source, cell.metadata.get("tags", [])] for cell in made.cells]
    return hashlib.sha256(json.dumps(cells).encode()).hexdigest()[:16]


def digest_in(path: Path) -> str:
    """The digest that a page keeps; nothing where there is no page."""
    found = re.search(r'<meta name="lesson-source" content="(\w+)">', path.read_text(encoding="utf-8")) if path.exists() else None
    return "" if found is None else found[1]


def executed(made: NotebookNode, language: str, name: str) -> tuple[NotebookNode, dict[str, Any]]:
    """A notebook run from top to bottom, with its outputs and the state of its widgets; and the facts about the run.

    Parameters
    ----------
    made
        The notebook; it is left as it is.
    language
        Of what the widgets say.
    name
        Of its file.
    """
    run = nbformat.from_dict(json.loads(json.dumps(made)))
    last = nbformat.v4.new_code_cell(_LAST_CELL)
    with tempfile.TemporaryDirectory() as home, _own_jupyter(Path(home), language):
        place = Path(home) / "notebooks"
        place.mkdir()
        (place / name).touch()
        shutil.copytree(NOTEBOOKS / "runs", place / "runs")
        client = NotebookClient(
            run, timeout=LIMIT_S, kernel_name="python3", ipython_hist_file="", resources={"metadata": {"path": str(place)}}
        )
        with client.setup_kernel():
            looked_at: set[str] = set()
            for number, cell in enumerate(run.cells):
                client.execute_cell(cell, number)
                _look_at_dashboards(client, looked_at)
            waiting = [output for cell in run.cells for output in cell.get("outputs", ()) if _is_text(output)]
            texts = [output.data["text/plain"] for output in waiting]
            run.cells.append(last)
            client.execute_cell(last, len(run.cells) - 1)
            client.set_widgets_metadata()
            for output, text in zip(waiting, texts, strict=True):
                if output.data.get("text/plain") != text or len(output.data) > 1:  # it was shown when there was a guess
                    output.metadata["covered"] = True
    run.cells.remove(last)
    printed = "".join(output.text for output in last.outputs if output.output_type == "stream" and output.name == "stdout")
    return run, json.loads(printed.splitlines()[-1])


def export(source: Path, language: str, stills: Stills) -> int:
    """Run one lesson in one language and write its page; the size of it in bytes.

    Parameters
    ----------
    source
        The lesson.
    language
        Of it.
    stills
        What draws its charts and controls.
    """
    made = notebook(source, language)
    run, facts = executed(made, language, notebook_path(source, language).name)
    twin = {each: result_path(source, each).name for each in SUFFIXES}
    everything = sources()
    place = everything.index(source)
    around = [everything[i] if 0 <= i < len(everything) else None for i in (place - 1, place + 1)]
    before, after = (None if one is None else result_path(one, language).name for one in around)
    text = lesson_page(run, language, digest=digest(made), facts=facts, stills=stills, twins=twin, before=before, after=after)
    size_bytes = len(text.encode())
    if size_bytes > MOST_BYTES:
        raise SystemExit(f"{result_path(source, language).name}: got {size_bytes:,} bytes, expected {MOST_BYTES:,} at most")
    result_path(source, language).write_text(text, encoding="utf-8")
    return size_bytes


def index_text() -> str:
    """The page that lists the lessons."""
    return index_page(
        [
            {language: (notebook(source, language), result_path(source, language).name) for language in SUFFIXES}
            for source in sources()
        ]
    )


def main() -> None:
    names = [word for word in sys.argv[1:] if not word.startswith("-")]
    RESULTS.mkdir(exist_ok=True)
    chosen = [one for one in sources() if not names or any(name in one.stem for name in names)]
    wanted = [
        (source, language)
        for source in chosen
        for language in SUFFIXES
        if "--all" in sys.argv or digest_in(result_path(source, language)) != digest(notebook(source, language))
    ]
    if wanted:
        with Stills() as stills:
            for source, language in wanted:
                size_bytes = export(source, language, stills)
                print(f"{result_path(source, language).relative_to(ROOT)}: {size_bytes / 1e3:.0f} kB", flush=True)
    text = index_text()
    if not INDEX.exists() or INDEX.read_text(encoding="utf-8") != text:
        INDEX.write_text(text, encoding="utf-8")
        print(INDEX.relative_to(ROOT))


def _is_text(output: NotebookNode) -> bool:
    return output.output_type == "display_data" and list(output.data) == ["text/plain"]


def _look_at_dashboards(client: NotebookClient, looked_at: set[str]) -> None:
    """As a page does with each that it shows: the kernel draws for whoever looks."""
    assert client.kc is not None
    for comm_id, model in client.widget_state.items():
        if str(model.get("_anywidget_id", "")).endswith(("StatusLine", "ReplayStatus")) and comm_id not in looked_at:
            looked_at.add(comm_id)
            client.kc.shell_channel.send(client.kc.session.msg("comm_msg", {"comm_id": comm_id, "data": _VIEW_OPENED}))


@contextmanager
def _own_jupyter(home: Path, language: str) -> Iterator[None]:
    """The kernel of this environment with default settings, whatever the user has configured."""
    own = {
        **{f"JUPYTER_{name}_DIR": str(home / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")},
        "IPYTHONDIR": str(home / "ipython"),
        "JUPYTER_PREFER_ENV_PATH": "1",
        "AMP_WIDGETS_LANG": language,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    before = dict(os.environ)
    os.environ.update(own)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


if __name__ == "__main__":
    main()
