"""What a run file is: an SQLite database, to be read with pandas or the ``sqlite3`` shell too.

``PRAGMA application_id`` is `APPLICATION_ID`, ``PRAGMA user_version`` the version of the schema, `VERSION`. NULL stands for NaN,
which is "not measured"; inf is kept as such, and of zero, SQLite keeps no sign. Sizes are bytes, times seconds. Values that are
not numbers or plain text are JSON; nothing in a run file is ever executed or unpickled.

========== ============================================================================================================
table      rows
========== ============================================================================================================
facts      ``name``, ``value`` (JSON): when the run began (UTC), model, device, versions of packages, names of columns;
           ``writer``: what writes it (`amp_widgets.recording.writer.this_process`); ``ended``: when it was closed (UTC)
steps      one a step, in order: the columns of `amp_widgets.core.history.COLUMNS`, and those of each device
blocks     the same rows again, `BLOCK_ROWS` at a time, as raw little-endian float64, column after column: ``first``,
           ``rows``, ``content``. A long run is read by them at once; a tool that knows nothing of them misses nothing.
events     one an event, in order of arrival: ``id``, ``step``, ``kind``, ``reason``, ``detail`` (JSON), ``time_s``
settings   ``after_events``: so many events had arrived; ``step``; ``content`` (JSON): all settings in force then
layers     the layer table: ``position``, ``name``, ``type``, ``parameters``, ``why_not``, ``structural``
profiles   ``id``, ``step``, ``label``, ``content`` (JSON): the memory within a step
gradients  how large the gradients of a step were: ``id``, ``step``, ``scale``, ``layers`` (JSON, one object a row: layer,
           family, dtype, arrivals, elements, looked_at, wide, peaks), ``notes`` (JSON), ``first`` and ``buckets``: which
           buckets there are, ``content``: how many gradients are in each, row after row, as little-endian unsigned
           integers of 64 bits, compressed by zlib. What the buckets are: `amp_widgets.core.gradient_probe.bucket_of`. They
           are held to so many bytes a step (`amp_widgets.recording.gradient_rows.BYTES_A_STEP`): of some steps all layers
           are there, of others only their sum, whose layer is "(all layers)", and where every step is counted, not of all.
========== ============================================================================================================
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

APPLICATION_ID = 0x414D5057
"""``AMPW``, by which ``file`` and this package know a run."""
VERSION = 2
"""1 had no gradients."""
BLOCK_ROWS = 4096

_TABLES = (
    "CREATE TABLE blocks (first INTEGER PRIMARY KEY, rows INTEGER NOT NULL, content BLOB NOT NULL)",
    "CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE events (id INTEGER PRIMARY KEY, step INTEGER NOT NULL, kind TEXT NOT NULL, reason TEXT NOT NULL,"
    " detail TEXT NOT NULL, time_s REAL)",
    "CREATE TABLE settings (after_events INTEGER NOT NULL, step INTEGER NOT NULL, content TEXT NOT NULL)",
    "CREATE TABLE layers (position INTEGER PRIMARY KEY, name TEXT NOT NULL, type TEXT NOT NULL, parameters INTEGER NOT NULL,"
    " why_not TEXT, structural INTEGER NOT NULL)",
    "CREATE TABLE profiles (id INTEGER PRIMARY KEY, step INTEGER NOT NULL, label TEXT NOT NULL, content TEXT NOT NULL)",
    "CREATE TABLE gradients (id INTEGER PRIMARY KEY, step INTEGER NOT NULL, scale REAL NOT NULL, layers TEXT NOT NULL,"
    " notes TEXT NOT NULL, first INTEGER NOT NULL, buckets INTEGER NOT NULL, content BLOB NOT NULL)",
)


def create(connection: sqlite3.Connection, columns: Sequence[str]) -> None:
    """Make the tables, in a database that is empty.

    Parameters
    ----------
    connection
        In autocommit mode.
    columns
        Of the table of steps; the first is ``step``.
    """
    connection.execute("PRAGMA journal_mode = WAL")  # a reader in another kernel never waits for the writer, nor it for a reader
    connection.execute("PRAGMA synchronous = NORMAL")  # a killed process loses nothing, and no write waits for the disk
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {VERSION}")
    numbers = ", ".join(f"{quoted(name)} {'INTEGER' if name == 'step' else 'REAL'}" for name in columns)
    connection.execute(f"CREATE TABLE steps ({numbers})")
    for table in _TABLES:
        connection.execute(table)
    connection.execute("COMMIT")


TABLES_SINCE = {
    "facts": 1, "steps": 1, "blocks": 1, "events": 1, "settings": 1, "layers": 1, "profiles": 1, "gradients": 2,
}  # fmt: skip
"""Table → the first version that has it."""


GRADIENT_COLUMNS = ("step", "scale", "layers", "notes", "first", "buckets", "content")


def quoted(name: str) -> str:
    """A name for SQL, whatever is in it."""
    return '"' + name.replace('"', '""') + '"'
