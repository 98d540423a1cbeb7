"""Who writes a run file: whether that process is still there, has closed the file, or has ended without."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

WriterState = Literal["there", "closed", "gone", "unknown"]
"""``"gone"``: its process has ended, or was killed, without closing the file. ``"unknown"``: it is on another machine, the file
is from before this was written down, or this system does not say."""


def this_process() -> dict[str, Any]:
    """What a file has of the process that writes it, JSON-able; the machine's name cannot be told from it."""
    process = os.getpid()
    return {"process": process, "began": _began(process), "machine": _machine()}


def state_of(writer: Any) -> WriterState:
    """What has become of the process of a file that was not closed.

    Parameters
    ----------
    writer
        What `this_process` gave there, as it was read: anything, in a damaged file.
    """
    if not isinstance(writer, Mapping) or writer.get("machine") != _machine() or sys.platform == "win32":
        return "unknown"  # on Windows, asking whether a process is there would end it
    process = writer.get("process")
    if type(process) is not int or not 0 < process < 2**31:
        return "unknown"
    return "there" if _is_there(process) and _began(process) == writer.get("began") else "gone"


def _is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return True


def _began(process: int) -> int | None:
    """When a process began, in ticks since the machine did; numbers of processes come again. None where that is not known.

    One that has ended, and that nobody has asked for what came of it, is not there: -1.
    """
    try:
        text = Path(f"/proc/{process}/stat").read_text(errors="replace")
        state, *fields = text.rpartition(")")[2].split()
        return -1 if state in ("Z", "X") else int(fields[18])
    except (OSError, ValueError, IndexError):
        return None


@functools.cache
def _machine() -> str:
    """A mark of what numbers of processes are good for: this machine since it was started, and this container of it."""
    known = [platform.node()]
    try:
        known += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    except OSError:
        pass  # no Linux
    return hashlib.sha256("\n".join(known).encode()).hexdigest()[:16]
