"""The one-way order of the parts, read from the imports: also those inside functions and under ``TYPE_CHECKING``."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parent.parent / "amp_widgets"

# From the ground up. A part may import every part on a lower line, and nothing on its own line or above.
ORDER: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("language",),
    ("size_text",),
    ("charts", "kernel", "cell"),
    ("core",),
    ("analysis", "runner", "recording", "capture"),
    ("export",),
    ("widgets",),
    ("runs_comparison",),
    ("cell_views",),
    ("compare_magic",),
    ("background_run",),  # from here the rooms of the session, up to itself
    ("on_demand",),
    ("session_state", "session_analyses", "snapshots"),
    ("run_recording", "run_sinks", "left_branch"),
    ("forks",),
    ("cell_steps",),
    ("session", "recorded_run"),
    ("replay_magics",),
    ("demos", "integrations", "captured_cell"),
    ("magics",),
    ("__init__",),
)
RANK = {part: rank for rank, parts in enumerate(ORDER) for part in parts}

# Stricter than the order: all that these may import of the package.
ONLY = {
    "language": {"errors"}, "size_text": {"language"}, "kernel": {"errors"}, "cell": {"errors"},
    "charts": {"errors", "language", "size_text"}, "core": {"errors", "language", "size_text"},
}  # fmt: skip

# What these may import of others, beside the standard library.
OTHERS = {
    "errors": set[str](),
    "language": set[str](),
    "size_text": set[str](),
    "kernel": {"IPython", "ipykernel", "comm", "zmq", "tornado", "traitlets", "ipywidgets"},
    "cell": {"IPython"},
    "charts": {"plotly", "numpy", "anywidget", "ipywidgets", "tsdownsample", "traitlets", "IPython"},
    "core": {"torch", "numpy", "pandas"},
}
# Modules that must not import torch, nor a module of the package that does.
WITHOUT_TORCH = (
    "errors", "language", "size_text", "charts", "kernel", "cell", "core.settings", "core.history", "core.formats", "export",
    "recording", "runs_comparison", "cell_views", "compare_magic", "widgets.runs_view",
)  # fmt: skip


class Import(NamedTuple):
    """One import found in a file."""

    name: str  # dotted and absolute
    line: int
    at_import: bool  # runs when the module is imported


def imports_of(path: Path, package: Path = PACKAGE) -> list[Import]:
    """Every import in the file; ``from x import y`` gives ``x.y`` where that is a module of the package."""
    found: list[Import] = []
    parent = (package.name, *path.relative_to(package).parent.parts)

    def visit(node: ast.AST, at_import: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(parent[: len(parent) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                found.append(Import(inner if _is_module(inner, package) else module, node.lineno, at_import))
        elif isinstance(node, ast.Call) and _dynamic(node) is not None:
            found.append(Import(str(_dynamic(node)), node.lineno, at_import))
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for statement in node.body:
                visit(statement, False)
            for statement in node.orelse:
                visit(statement, at_import)
            return
        inside = at_import and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(path.read_text(encoding="utf-8"), str(path)), True)
    return found


def complaints(package: Path = PACKAGE) -> list[str]:
    """What breaks the order, one sentence each."""
    found: list[str] = []
    for path in sorted(package.rglob("*.py")):
        where = path.relative_to(package)
        part = _part(where)
        if part not in RANK:
            found.append(
                f"{package.name}/{where}: no layer is known for {part!r}. Put it into ORDER in tests/test_layering.py, "
                "on the line above everything that it imports."
            )
            continue
        for imported in imports_of(path, package):
            line = f"{package.name}/{where}:{imported.line}"
            top, _, rest = imported.name.partition(".")
            if top != package.name:
                allowed = OTHERS.get(part)
                if allowed is not None and top not in sys.stdlib_module_names and top not in allowed:
                    known = ", ".join(sorted(allowed)) or "nothing"
                    found.append(f"{line}: {part} imports {top}; beside the standard library it may import {known}")
                continue
            target = rest.partition(".")[0] or "__init__"
            if target == part or (target == "__init__" and part == "__init__"):
                continue
            if target not in RANK:
                found.append(f"{line}: imports {imported.name}, for which no layer is known")
            elif part in ONLY and target not in ONLY[part]:
                found.append(f"{line}: {part} imports {target}; of the package it may import {', '.join(ONLY[part])}")
            elif RANK[target] >= RANK[part]:
                found.append(f"{line}: {part} imports {target}, which is not below it")
    return found


def torch_complaints(package: Path = PACKAGE) -> list[str]:
    """Modules named in WITHOUT_TORCH that import torch, directly or through modules of the package."""
    modules = {_dotted(path, package): path for path in package.rglob("*.py")}
    found = []
    for module, path in sorted(modules.items()):
        short = module.removeprefix(f"{package.name}.")
        if not any(short == name or short.startswith(f"{name}.") for name in WITHOUT_TORCH):
            continue
        seen, waiting = {module}, [(module, path, module)]
        while waiting:
            here, file, trail = waiting.pop()
            for imported in imports_of(file, package):
                if imported.name.partition(".")[0] == "torch" and (imported.at_import or here == module):
                    found.append(f"{module} must do without torch, but {trail} imports it (line {imported.line})")
                elif imported.at_import and imported.name in modules and imported.name not in seen:
                    seen.add(imported.name)
                    waiting.append((imported.name, modules[imported.name], f"{trail} > {imported.name}"))
    return found


def test_the_parts_import_only_what_is_below_them() -> None:
    assert complaints() == []


def test_modules_that_do_without_torch() -> None:
    assert torch_complaints() == []


def test_package_inits_import_nothing_heavy() -> None:
    heavy = []
    for path in sorted(PACKAGE.rglob("__init__.py")):
        for imported in imports_of(path):
            if not imported.at_import:
                continue
            top = imported.name.partition(".")[0]
            memory_meters = path.parent.name == "memory" and top in ("torch", "amp_widgets")  # holds the meters' protocol
            light = top in sys.stdlib_module_names or imported.name == "amp_widgets.errors"
            if not (light or memory_meters):
                heavy.append(f"{path.relative_to(PACKAGE)}:{imported.line} imports {imported.name} at import")
    assert heavy == []


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("core/loop.py", "import amp_widgets.session", "core imports session"),
        ("core/loop.py", "def f():\n    from ..widgets import dashboard", "core imports widgets"),
        ("core/loop.py", "import typing\nif typing.TYPE_CHECKING:\n    import amp_widgets.magics", "core imports magics"),
        ("core/loop.py", "import importlib\nimportlib.import_module('amp_widgets.runner')", "core imports runner"),
        ("core/loop.py", "import scipy", "core imports scipy"),
        ("core/loop.py", "from amp_widgets.charts import figures", "core imports charts"),
        ("charts/figures.py", "from amp_widgets.core.history import History", "charts imports core"),
        ("charts/figures.py", "def f():\n    import torch", "charts imports torch"),
        ("runner.py", "from amp_widgets.capture import x", "runner imports capture, which is not below it"),
        ("session.py", "import amp_widgets", "session imports __init__"),
        ("surprise.py", "", "no layer is known for 'surprise'"),
        ("session.py", "from amp_widgets.surprise import x", "for which no layer is known"),
    ],
)  # fmt: skip
def test_what_breaks_the_order_is_found(tmp_path: Path, file: str, text: str, expected: str) -> None:
    package = _package(tmp_path, {file: text})
    [complaint] = complaints(package)
    assert expected in complaint


def test_what_keeps_the_order_is_left_alone(tmp_path: Path) -> None:
    package = _package(
        tmp_path,
        {
            "core/loop.py": "import torch, numpy, math\nfrom . import settings\nfrom .memory import x\nfrom ..errors import y",
            "session.py": "from amp_widgets.core import loop\ndef f():\n    from .widgets import dashboard",
            "__init__.py": "def f():\n    from amp_widgets import magics, session",
            "core/settings.py": "import math",
            "core/memory/__init__.py": "import torch\nfrom .. import settings",
        },
    )
    assert complaints(package) == []


def test_torch_is_found_behind_another_module(tmp_path: Path) -> None:
    package = _package(
        tmp_path, {"core/history.py": "from amp_widgets.core.clock import now", "core/clock.py": "if 1:\n    import torch"}
    )
    [complaint] = torch_complaints(package)
    assert "amp_widgets.core.history > amp_widgets.core.clock imports it (line 2)" in complaint


def _package(root: Path, files: dict[str, str]) -> Path:
    package = root / "amp_widgets"
    for name, text in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return package


def _part(where: Path) -> str:
    """The part that a file (relative to the package) belongs to: its folder or its own name."""
    return where.parts[0].removesuffix(".py")


def _dotted(path: Path, package: Path) -> str:
    parts = (package.name, *path.relative_to(package).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


def _is_module(dotted: str, package: Path) -> bool:
    top, *rest = dotted.split(".")
    if top != package.name:
        return False
    path = package.joinpath(*rest)
    return path.with_suffix(".py").is_file() or path.is_dir() or (len(rest) == 1 and rest[0] in RANK)


def _dynamic(node: ast.Call) -> str | None:
    """The name in ``importlib.import_module("name")`` or ``__import__("name")``."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
        return str(node.args[0].value)
    return None
