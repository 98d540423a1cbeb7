"""Mixed precision and activation checkpointing as live switches on a running PyTorch model, in Jupyter.

Public names are resolved when they are first used: importing this package imports neither torch nor any widget library.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amp_widgets.charts.own_figure import figure_view
    from amp_widgets.core.settings import Settings
    from amp_widgets.demos import demo, scenario
    from amp_widgets.recorded_run import open_run
    from amp_widgets.runs_comparison import compare_runs
    from amp_widgets.session import AmpSession
    from amp_widgets.widgets.format_lab import FormatLab
    from amp_widgets.widgets.presenting_control import present
    from amp_widgets.widgets.question import Question, ask

__version__ = "0.1.0"
__all__ = [
    "AmpSession",
    "FormatLab",
    "Question",
    "Settings",
    "__version__",
    "ask",
    "compare_runs",
    "demo",
    "figure_view",
    "load_ipython_extension",
    "open_run",
    "present",
    "scenario",
    "unload_ipython_extension",
]

_HOMES = {
    "AmpSession": "amp_widgets.session",
    "FormatLab": "amp_widgets.widgets.format_lab",
    "Question": "amp_widgets.widgets.question",
    "Settings": "amp_widgets.core.settings",
    "ask": "amp_widgets.widgets.question",
    "compare_runs": "amp_widgets.runs_comparison",
    "demo": "amp_widgets.demos",
    "figure_view": "amp_widgets.charts.own_figure",
    "open_run": "amp_widgets.recorded_run",
    "present": "amp_widgets.widgets.presenting_control",
    "scenario": "amp_widgets.demos",
}


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext amp_widgets``: brings the ``%amp`` magic to a `shell` of IPython.

    Where torch is not installed, it knows recorded runs only.
    """
    with_torch = importlib.util.find_spec("torch") is not None
    importlib.import_module("amp_widgets.magics" if with_torch else "amp_widgets.replay_magics").register(shell)


def unload_ipython_extension(shell: Any) -> None:
    """``%unload_ext amp_widgets``: takes the ``%amp`` magic away from the `shell`, and closes the sessions that it made."""
    importlib.import_module("amp_widgets.replay_magics").unregister(shell)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'amp_widgets' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
