"""Build the API reference from the docstrings: ``python tools/build_reference.py [FOLDER]``, or ``make docs``.

Pages are written to ``build/docs``, or the folder that is named. What has no docstring is told by parts of the package, not by
its users, and has no entry.
"""

from __future__ import annotations

import html
import importlib
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).parent.parent
PLACE = ROOT / "build" / "docs"
PAGES = (
    "amp_widgets",
    "amp_widgets.errors",
    "amp_widgets.session_analyses",
    "amp_widgets.core.loop",
    "amp_widgets.core.settings",
    "amp_widgets.core.history",
    "amp_widgets.core.formats",
    "amp_widgets.core.memory.profile",
    "amp_widgets.analysis.batch_sizes",
    "amp_widgets.analysis.compare",
    "amp_widgets.analysis.comparison",
    "amp_widgets.analysis.cuda_corners",
    "amp_widgets.analysis.dtype_map",
    "amp_widgets.analysis.gradients",
    "amp_widgets.analysis.on_cuda",
    "amp_widgets.analysis.parity",
    "amp_widgets.analysis.plan",
    "amp_widgets.analysis.planner",
    "amp_widgets.analysis.precision",
    "amp_widgets.analysis.preflight",
    "amp_widgets.analysis.profiled_step",
    "amp_widgets.analysis.step_profile",
    "amp_widgets.demos",
    "amp_widgets.export.exports",
    "amp_widgets.export.html",
    "amp_widgets.export.picture",
    "amp_widgets.export.sink",
    "amp_widgets.export.tables",
    "amp_widgets.export.tensorboard_sink",
    "amp_widgets.export.trackio_sink",
    "amp_widgets.left_branch",
    "amp_widgets.recorded_run",
    "amp_widgets.recording.branch",
    "amp_widgets.recording.differences",
    "amp_widgets.recording.run",
    "amp_widgets.recording.schema",
    "amp_widgets.runs_comparison",
    "amp_widgets.snapshots",
    "amp_widgets.widgets.question",
)
"""The package itself, what its names inherit, and what they give or refer to."""


def build(folder: Path = PLACE) -> None:
    """Write the pages to this folder."""
    import pdoc
    import pdoc.render

    # traits of widgets, whose annotations are for type checkers alone, have no entry
    warnings.filterwarnings("ignore", "Error parsing type annotation", UserWarning)
    pdoc.render.configure(docformat="numpy", include_undocumented=False, show_source=False)
    pdoc.pdoc(*PAGES, output_directory=folder)
    (folder / "index.html").write_text(_index(), encoding="utf-8")


def _index() -> str:
    """The pages, each with the first line of what it says of itself."""
    lines = []
    for name in PAGES:
        first, *_ = (importlib.import_module(name).__doc__ or "").strip().splitlines()
        lines.append(f'<dt><a href="{name.replace(".", "/")}.html">{name}</a></dt><dd>{html.escape(first)}</dd>')
    style = "body { font: 1rem/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto } dt { margin-top: .5rem }"
    head = f'<meta charset="utf-8"><title>amp_widgets: reference</title><style>{style}</style>'
    head = f'<html lang="en">{head}<h1>amp_widgets: reference</h1>'
    return "\n".join(["<!doctype html>", head, "<dl>", *lines, "</dl></html>", ""])


if __name__ == "__main__":
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else PLACE
    build(place)
    print(f"{place / 'index.html'}: {len(PAGES)} pages")
