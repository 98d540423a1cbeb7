"""Globs over dotted names, as those of layers."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence


def is_glob(pattern: str) -> bool:
    """Whether it is more than a name."""
    return any(character in pattern for character in "*?[")


def parts_match(parts: Sequence[str], globs: Sequence[str]) -> bool:
    """Whether the parts of a dotted name fit those of a glob: ``*`` one part, ``**`` any number of them."""
    if not globs:
        return not parts
    if globs[0] == "**":
        return any(parts_match(parts[skipped:], globs[1:]) for skipped in range(len(parts) + 1))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], globs[0]) and parts_match(parts[1:], globs[1:])
