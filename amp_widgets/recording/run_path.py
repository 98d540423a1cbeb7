"""What is given as the path of a run file."""

from __future__ import annotations

import os
from pathlib import Path


def run_path(path: object) -> Path | None:
    """Its absolute path; None where it is none: no text, an empty one, or one that no file can have."""
    try:
        text = os.fspath(path)  # type: ignore[call-overload]  # it may be anything
    except TypeError:
        return None
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        return None
    return Path(text).absolute()
