"""Why a file cannot be read or written, in words of the catalogue: the system and SQLite say it in English only."""

from __future__ import annotations

import errno
import sqlite3

from amp_widgets.language import marked


def why_not(error: OSError | sqlite3.Error) -> str:
    """The reason by its number; what the error says itself where it has none of these.

    Parameters
    ----------
    error
        Of the system, or of SQLite.
    """
    if isinstance(error, OSError):
        return _OF_SYSTEM.get(error.errno or 0, "") or error.strerror or str(error)
    return _OF_SQLITE.get(getattr(error, "sqlite_errorcode", 0) & 0xFF, "") or str(error)  # its lowest byte is the kind


_NO_ROOM = marked("there is no room left")
_NOT_ALLOWED = marked("access is not allowed")
_OF_SYSTEM = {
    errno.ENOENT: marked("there is no such file or folder"),
    errno.EACCES: _NOT_ALLOWED,
    errno.EPERM: _NOT_ALLOWED,
    errno.EISDIR: marked("it is a folder"),
    errno.ENOTDIR: marked("a part of the path is no folder"),
    errno.ENAMETOOLONG: marked("the name is too long"),
    errno.EROFS: marked("it can only be read there"),
    errno.ENOSPC: _NO_ROOM,
}
_OF_SQLITE = {
    sqlite3.SQLITE_NOTADB: marked("it is no database"),
    sqlite3.SQLITE_CORRUPT: marked("it is damaged"),
    sqlite3.SQLITE_CANTOPEN: marked("it cannot be opened"),
    sqlite3.SQLITE_BUSY: marked("another program has locked it"),
    sqlite3.SQLITE_LOCKED: marked("another program has locked it"),
    sqlite3.SQLITE_READONLY: marked("it can only be read there"),
    sqlite3.SQLITE_IOERR: marked("reading or writing it has failed"),
    sqlite3.SQLITE_FULL: _NO_ROOM,
}
