"""On what a run was made: machine, Python and the packages that matter."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

_PACKAGES = ("amp-widgets", "torch", "numpy", "plotly", "ipywidgets", "anywidget", "ipykernel", "jupyterlab")


def environment() -> dict[str, Any]:
    """Facts for a run file, JSON-able; nothing in it names a person or a path."""
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "processors": os.cpu_count(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
