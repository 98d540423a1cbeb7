"""What the tests of notebooks share: the lessons' builder, which is a script, and kernels that have their imports already."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
HARNESS = ROOT / "tests" / "browser" / "harness"


@pytest.fixture(scope="session")
def build_lessons() -> ModuleType:
    """``tools/build_lessons.py``."""
    name = "build_lessons"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def quick_kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """For ``JUPYTER_PATH``: its ``python3`` is a fork of a process that has imported torch and more, not what is under test."""
    home = tmp_path_factory.mktemp("kernels")
    socket = home / "nursery.socket"
    spec = home / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True)
    client = [sys.executable, "-I", "-S", str(HARNESS / "kernel_client.py"), str(socket), "{connection_file}"]
    spec.write_text(json.dumps({"argv": client, "display_name": "Python 3", "language": "python"}))
    nursery = subprocess.Popen([sys.executable, str(HARNESS / "nursery.py"), str(socket)], stdin=subprocess.PIPE)
    yield home
    nursery.communicate()  # it ends with its standard input, and the kernels that are left with it
