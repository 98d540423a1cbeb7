"""What is given as the path of a run file."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def run_path(path: object) -> Path | None:
    """Its absolute path, where ``~`` is the home; None where it is none: no text, an empty one, or one that no file can have."""
    try:
        text = os.fspath(path)  # type: ignore[call-overload]  # it may be anything
    except TypeError:
        return None
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        return None
    with contextlib.suppress(RuntimeError):  # there is no such user
        return Path(text).expanduser().absolute()
    return Path(text).absolute()
