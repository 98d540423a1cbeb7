"""A chart of a run as a picture."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from amp_widgets.analysis.gradients import GradientRange
from amp_widgets.charts.exponents import exponent_figure
from amp_widgets.charts.look import Theme
from amp_widgets.charts.mountain import mountain_figure
from amp_widgets.core.gradient_counts import GradientCounts
from amp_widgets.core.memory.profile import StepProfile
from amp_widgets.errors import ExportError, MissingExtraError
from amp_widgets.export.new_file import check_free, write_whole
from amp_widgets.export.run_figures import RunFigures
from amp_widgets.recording.run_like import RunLike, facts_of, newest_history

if TYPE_CHECKING:
    import plotly.graph_objects as go

What = Literal["training", "step time", "memory", "gradients"]
SUFFIXES = ("png", "svg", "pdf", "jpg", "webp")
BROWSERS = ("google-chrome", "google-chrome-stable", "chrome", "chromium", "chromium-browser", "microsoft-edge", "brave-browser")


def export_picture(
    run: RunLike,
    path: str | os.PathLike[str],
    *,
    what: What = "training",
    theme: Theme = "light",
    width_px: int = 1000,
    overwrite: bool = False,
) -> Path:
    """Write one of the charts of a run to a picture, by kaleido, which draws it in a browser that is never seen.

    Parameters
    ----------
    run
        A session, or a recorded run.
    path
        Of the file; its suffix says in which form: ``.png``, ``.svg``, ``.pdf``, ``.jpg`` or ``.webp``. Pixels are drawn twice as
        fine.
    what
        ``"training"``: loss, loss scale and memory; ``"step time"``; ``"memory"``: within the newest profiled step;
        ``"gradients"``: by size, of the newest step in which they were counted.
    theme
        ``"light"`` or ``"dark"``.
    width_px
        How wide it is.
    overwrite
        Whether a file that is there is replaced.

    Returns
    -------
    Path
        Of the file, absolute.

    Raises
    ------
    ExportError
        When there is a file and it may not be replaced, the run has no such chart, or there is no browser for kaleido.
    MissingExtraError
        When kaleido is not installed.
    """
    target = Path(path).absolute()
    if target.suffix.removeprefix(".").lower() not in SUFFIXES:
        raise ExportError(f"export_picture: got {target.name!r}, expected a name that ends in .{', .'.join(SUFFIXES)}")
    if theme not in get_args(Theme):
        raise ExportError(f"theme: got {theme!r}, expected 'light' or 'dark'")
    check_free(target, overwrite=overwrite, what="export_picture")
    if importlib.util.find_spec("kaleido") is None:
        raise MissingExtraError(
            "export_picture: kaleido is not installed; install it with: pip install 'amp-widgets[pictures]'. "
            "export_html(path, plotly='none') makes pictures without it"
        )
    if _browser() is None:
        raise ExportError(
            "export_picture: kaleido draws in Chrome or Chromium, and none was found here; install one (on Debian: apt install "
            "chromium), or set the variable BROWSER_PATH to where it is"
        )
    figure = _figure(run, what, theme)
    return write_whole(target, lambda made: _draw(figure, made, width_px), overwrite=overwrite, what="export_picture")


def _browser() -> str | None:
    named = os.environ.get("BROWSER_PATH")
    if named:
        return named if os.access(named, os.X_OK) else None
    found = next((place for name in BROWSERS if (place := shutil.which(name)) is not None), None)
    if found is not None:
        return found
    from choreographer.browsers.chromium import (
        Chromium,  # it also looks where these are on other systems, and where it puts its own
    )

    place = Chromium.find_browser(skip_local=False)
    return None if place is None else str(place)


def _draw(figure: go.Figure, made: Path, width_px: int) -> None:
    import kaleido

    form = made.suffix.removeprefix(".").lower()
    options = {"format": form, "width": width_px, "height": figure.layout.height, "scale": 1 if form in ("svg", "pdf") else 2}
    try:
        kaleido.write_fig_sync(figure, str(made), opts=options, kopts={"mathjax": False})  # which would come from a network
    except OSError:
        raise
    except Exception as error:  # of kaleido, of the browser, or of both
        words = str(error).strip().splitlines() or [type(error).__name__]
        raise ExportError(f"export_picture: kaleido could not draw: {words[0]}") from error


def _figure(run: RunLike, what: What, theme: Theme) -> go.Figure:
    history = newest_history(run)
    if what in ("training", "step time"):
        columns = history.columns()
        if not columns["step"].size:
            raise ExportError("export_picture: no training step was recorded, so that there is nothing to be drawn")
        source = str(facts_of(run).get("memory_source", "how it was measured is not known"))
        figures = RunFigures(columns, history.events(), memory_source=source)
        return figures.training(theme) if what == "training" else figures.step_times(theme)
    if what == "memory":
        profiles: Sequence[StepProfile] = [one for one in getattr(run, "profiles", ()) if len(one.time_s)]
        if not profiles:
            raise ExportError("export_picture: no step was profiled; session.profile_next_step() has that done")
        return mountain_figure((profiles[-1],), theme=theme)
    if what == "gradients":
        counted: Sequence[GradientCounts] = getattr(run, "gradients", ())
        if not len(counted):
            raise ExportError("export_picture: no gradients were counted; session.count_gradients(every=10) has that done")
        return exponent_figure(GradientRange.of(counted[-1]), theme=theme)
    raise ExportError(f"what: got {what!r}, expected one of {', '.join(map(repr, get_args(What)))}")
