"""Mixed precision and activation checkpointing as live switches on a running PyTorch model, in Jupyter.

Public names are resolved when they are first used: importing this package imports neither torch nor any widget library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amp_widgets.core.settings import Settings
    from amp_widgets.demos import demo
    from amp_widgets.recording.run import open_run
    from amp_widgets.session import AmpSession
    from amp_widgets.widgets.format_lab import FormatLab

__version__ = "0.1.0"
__all__ = [
    "AmpSession",
    "FormatLab",
    "Settings",
    "__version__",
    "demo",
    "load_ipython_extension",
    "open_run",
    "unload_ipython_extension",
]

_HOMES = {
    "AmpSession": "amp_widgets.session",
    "FormatLab": "amp_widgets.widgets.format_lab",
    "Settings": "amp_widgets.core.settings",
    "demo": "amp_widgets.demos",
    "open_run": "amp_widgets.recording.run",
}


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext amp_widgets``: brings the ``%amp`` magic."""
    importlib.import_module("amp_widgets.magics").register(shell)


def unload_ipython_extension(shell: Any) -> None:
    """``%unload_ext amp_widgets``: takes the ``%amp`` magic away and closes the sessions that it made."""
    importlib.import_module("amp_widgets.magics").unregister(shell)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'amp_widgets' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
