"""What can be made of a run for others: the methods that sessions, recorded runs and branches have in common."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from amp_widgets.recording.run_like import RunLike

if TYPE_CHECKING:
    from amp_widgets.charts.look import Theme
    from amp_widgets.export.page import Plotly
    from amp_widgets.export.picture import What


class Exports:
    """For a class that has a ``history`` and ``settings``; what is needed for it is imported when it is asked for."""

    __slots__ = ()

    def export_html(
        self: RunLike,
        path: str | os.PathLike[str],
        *,
        plotly: Plotly = "inline",
        overwrite: bool = False,
        title: str | None = None,
    ) -> Path:
        """Write the run to one page that shows it anywhere; see `amp_widgets.export.html.export_html`.

        Parameters
        ----------
        path
            Of the file, such as ``"run.html"``.
        plotly
            Where the page has plotly.js from: ``"inline"``, it is in it (4.8 MB); ``"link"``, from Plotly's server, so that it
            needs a network; ``"none"``, it has pictures in place of charts.
        overwrite
            Whether a file that is there is replaced.
        title
            Of the page; None for the name of the run.

        Raises
        ------
        ExportError
            When there is a file and it may not be replaced, or it cannot be written.
        MissingExtraError
            When plotly is not installed.
        """
        from amp_widgets.export.html import export_html

        return export_html(self, path, plotly=plotly, overwrite=overwrite, title=title)

    def export_picture(
        self: RunLike,
        path: str | os.PathLike[str],
        *,
        what: What = "training",
        theme: Theme = "light",
        width_px: int = 1000,
        overwrite: bool = False,
    ) -> Path:
        """Write one of the charts to a picture, by kaleido; see `amp_widgets.export.picture.export_picture`.

        Parameters
        ----------
        path
            Of the file; its suffix says in which form: ``.png``, ``.svg``, ``.pdf``, ``.jpg`` or ``.webp``.
        what
            ``"training"``, ``"step time"``, ``"memory"`` or ``"gradients"``.
        theme
            ``"light"`` or ``"dark"``.
        width_px
            How wide it is.
        overwrite
            Whether a file that is there is replaced.

        Raises
        ------
        ExportError
            When there is a file and it may not be replaced, the run has no such chart, or there is no browser for kaleido.
        MissingExtraError
            When kaleido is not installed.
        """
        from amp_widgets.export.picture import export_picture

        return export_picture(self, path, what=what, theme=theme, width_px=width_px, overwrite=overwrite)

    def export_csv(self: RunLike, path: str | os.PathLike[str], *, overwrite: bool = False) -> tuple[Path, Path]:
        """Write the steps to ``run.csv``, and the events to ``run.events.csv``; see `amp_widgets.export.tables.export_csv`.

        Raises
        ------
        ExportError
            When there is a file and it may not be replaced, or it cannot be written.
        MissingExtraError
            When pandas is not installed.
        """
        from amp_widgets.export.tables import export_csv

        return export_csv(self, path, overwrite=overwrite)

    def export_parquet(self: RunLike, path: str | os.PathLike[str], *, overwrite: bool = False) -> tuple[Path, Path]:
        """Write the steps to ``run.parquet``, and events to ``run.events.parquet``; see `amp_widgets.export.tables.export_csv`.

        Raises
        ------
        ExportError
            When there is a file and it may not be replaced, or it cannot be written.
        MissingExtraError
            When pandas or pyarrow is not installed.
        """
        from amp_widgets.export.tables import export_parquet

        return export_parquet(self, path, overwrite=overwrite)
