"""Files that are there whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from amp_widgets.errors import ExportError
from amp_widgets.recording.system_error import why_not


def write_whole(path: str | os.PathLike[str], write: Callable[[Path], object], *, overwrite: bool, what: str) -> Path:
    """Have a file written beside the place where it belongs, and put it there when that is done.

    Parameters
    ----------
    path
        Where it belongs.
    write
        Writes to the path that it is given, which has the same suffix.
    overwrite
        Whether a file that is there may be replaced; until that moment it stays as it is.
    what
        The name of the function that the user has called, for errors.

    Returns
    -------
    Path
        Absolute.

    Raises
    ------
    ExportError
        When there is a file already, or the new one cannot be written, as on a full disk; nothing is left of it then.
    """
    target = Path(path).absolute()
    check_free(target, overwrite=overwrite, what=what)
    made: Path | None = None
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.stem[:40]}-", suffix=target.suffix, dir=target.parent)
        os.close(handle)
        made = Path(name)
        write(made)
        made.chmod(0o666 & ~_umask())  # a temporary file is its owner's alone
        if overwrite:
            made.replace(target)
        else:
            os.link(made, target)  # fails where there is a file by now
    except FileExistsError:
        raise ExportError(_exists(target, what)) from None
    except OSError as error:
        reason = why_not(error)
        raise ExportError(f"{what}: {target}: {reason}; choose a folder that exists, can be written to and has room") from error
    finally:
        if made is not None:
            with contextlib.suppress(OSError):
                made.unlink()
    return target


def check_free(path: Path, *, overwrite: bool, what: str) -> None:
    """Raise where a file is in the way, before there is work for it.

    Raises
    ------
    ExportError
        When there is a file that may not be replaced, or something else than a file.
    """
    try:
        status = path.lstat()
    except OSError:
        return
    if not overwrite:
        raise ExportError(_exists(path, what))
    if not stat.S_ISREG(status.st_mode):
        raise ExportError(f"{what}: {path} is no plain file, expected one that can be replaced; choose another name")


def _exists(path: Path, what: str) -> str:
    return f"{what}: {path} exists already; choose another name, or overwrite=True to replace it"


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
