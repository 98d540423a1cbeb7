"""A run as tables, through pandas."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amp_widgets.errors import MissingExtraError
from amp_widgets.export.new_file import check_free, write_whole
from amp_widgets.recording.run_like import RunLike, newest_history

if TYPE_CHECKING:
    import pandas


def export_csv(run: RunLike, path: str | os.PathLike[str], *, overwrite: bool = False) -> tuple[Path, Path]:
    """Write the steps of a run to one file of comma-separated values, and its events to another beside it.

    Every number reads back as the same number (by pandas before 3.1: ``read_csv(path, float_precision="round_trip")``). What was
    not measured is empty. Of a run from somebody else, read the events by a program too: a spreadsheet takes a text that begins
    with ``=`` for a formula.

    Parameters
    ----------
    run
        A session, or a recorded run.
    path
        Of the file for steps, such as ``"run.csv"``; that for events is ``"run.events.csv"`` then. For what is in them, see
        `amp_widgets.core.history.History.to_pandas` and `events_to_pandas` there.
    overwrite
        Whether files that are there are replaced.

    Returns
    -------
    tuple
        Both paths, absolute.

    Raises
    ------
    ExportError
        When there is a file and it may not be replaced, or it cannot be written.
    MissingExtraError
        When pandas is not installed.
    """

    def write(frame: pandas.DataFrame, made: Path) -> None:
        frame.to_csv(made, index=False, lineterminator="\n")

    return _export(run, path, write, overwrite=overwrite, what="export_csv")


def export_parquet(run: RunLike, path: str | os.PathLike[str], *, overwrite: bool = False) -> tuple[Path, Path]:
    """Write the steps of a run to one Parquet file, and its events to another beside it; as in `export_csv`.

    Raises
    ------
    ExportError
        When there is a file and it may not be replaced, or it cannot be written.
    MissingExtraError
        When pandas, or pyarrow, by which it writes, is not installed.
    """

    def write(frame: pandas.DataFrame, made: Path) -> None:
        try:
            frame.to_parquet(made, index=False)
        except ImportError as error:
            raise MissingExtraError(
                f"export_parquet: {error.name or 'pyarrow'} is not installed; install it with: pip install 'amp-widgets[pandas]'"
            ) from error

    return _export(run, path, write, overwrite=overwrite, what="export_parquet")


def _export(
    run: RunLike, path: str | os.PathLike[str], write: Callable[[Any, Path], None], *, overwrite: bool, what: str
) -> tuple[Path, Path]:
    steps = Path(path).absolute()
    events = steps.with_name(f"{steps.stem}.events{steps.suffix}")
    for place in (steps, events):
        check_free(place, overwrite=overwrite, what=what)
    history = newest_history(run)
    for place, frame in ((steps, history.to_pandas()), (events, history.events_to_pandas())):
        write_whole(place, lambda made, frame=frame: write(frame, made), overwrite=overwrite, what=what)  # type: ignore[misc]
    return steps, events
