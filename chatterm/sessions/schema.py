"""The session database as a file: its path, its tables, and its errors in plain words."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from chatterm.sessions.records import SessionError
from chatterm.sessions.rows import row
from chatterm.terminal.sanitize import one_line

VERSION = 5
"""The format that this program writes (PRAGMA user_version)."""
LOCK_WAIT = 1.0
"""Seconds to wait for another process that is writing."""

# One script per version; a database of version n runs those from index n on. Long columns stand last, so that a
# search of the short ones need not read past them.
_MIGRATIONS = (
    """
    CREATE TABLE sessions (
        id TEXT PRIMARY KEY, title TEXT NOT NULL, model TEXT NOT NULL, system TEXT, think TEXT NOT NULL,
        think_cache TEXT NOT NULL, sampling TEXT NOT NULL, head INTEGER, created REAL NOT NULL, updated REAL NOT NULL
    );
    CREATE INDEX sessions_by_update ON sessions (updated);
    CREATE TABLE exchanges (
        session TEXT NOT NULL REFERENCES sessions ON DELETE CASCADE, id INTEGER NOT NULL, parent INTEGER,
        created REAL NOT NULL, model TEXT NOT NULL, finish_reason TEXT, thinking_s REAL NOT NULL,
        shown_start INTEGER NOT NULL, shown_end INTEGER NOT NULL, tokens INTEGER NOT NULL, stats TEXT NOT NULL,
        opening BLOB NOT NULL, user TEXT NOT NULL, text TEXT NOT NULL, reasoning TEXT NOT NULL,
        token_ids BLOB NOT NULL, UNIQUE (session, id)
    );
    CREATE INDEX exchanges_tokens ON exchanges (session, tokens);
    CREATE TABLE drafts (session TEXT PRIMARY KEY, text TEXT NOT NULL);
    CREATE TABLE prompts (id INTEGER PRIMARY KEY AUTOINCREMENT, text TEXT NOT NULL);
    """,
    # The journal of running answers (chatterm/sessions/journal.py). `at` is the index of the first of `ids`.
    """
    ALTER TABLE exchanges ADD COLUMN seed INTEGER;
    ALTER TABLE exchanges ADD COLUMN ends_at INTEGER;
    CREATE TABLE journal (
        session TEXT NOT NULL, exchange INTEGER NOT NULL, at INTEGER NOT NULL, state TEXT NOT NULL,
        ids BLOB NOT NULL, text TEXT NOT NULL, reasoning TEXT NOT NULL, PRIMARY KEY (session, exchange, at),
        FOREIGN KEY (session, exchange) REFERENCES exchanges (session, id) ON DELETE CASCADE
    ) WITHOUT ROWID;
    """,
    # Tool calls and their results (chatterm/sessions/tool_calls_json.py).
    """
    ALTER TABLE exchanges ADD COLUMN called TEXT NOT NULL DEFAULT '';
    """,
    # What the model sees if that differs from the conversation: JSON, or NULL.
    """
    ALTER TABLE exchanges ADD COLUMN is_pinned INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE exchanges ADD COLUMN compaction TEXT;
    """,
    # The library (chatterm/sessions/library.py), and the documents that sessions began with (session_documents.py).
    """
    CREATE TABLE texts (sha256 TEXT PRIMARY KEY, text TEXT NOT NULL);
    CREATE TABLE library (
        name TEXT PRIMARY KEY, source TEXT NOT NULL, sha256 TEXT NOT NULL REFERENCES texts, added REAL NOT NULL
    );
    CREATE TABLE counts (
        sha256 TEXT NOT NULL REFERENCES texts ON DELETE CASCADE, model TEXT NOT NULL, tokens INTEGER NOT NULL,
        PRIMARY KEY (sha256, model)
    );
    CREATE TABLE begun_on (
        session TEXT NOT NULL REFERENCES sessions ON DELETE CASCADE, place INTEGER NOT NULL, name TEXT NOT NULL,
        sha256 TEXT NOT NULL REFERENCES texts, PRIMARY KEY (session, place)
    );
    """,
)


class NewerVersionError(SessionError):
    """The database has a format that this program does not know."""


_DAMAGE = ("malformed", "Could not decode to UTF-8")
"""Parts of the messages for damage of Python and of `rows`, which have no SQLite error code."""
_RETRIED = "; saving is retried every few seconds"


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why the database cannot be used."""

    what: str
    todo: str
    passes: bool
    """Whether it may go away while the program runs, so that retrying makes sense."""
    meanwhile: str = ""
    """What the program does in the meantime; in the chat it follows `todo`."""

    @property
    def in_chat(self) -> str:
        """One line for the chat."""
        return f"{self.what}: the chat continues in memory only. {self.todo}{self.meanwhile}."

    @property
    def in_shell(self) -> str:
        """One line for a command that needed the database."""
        return f"{self.what}. {self.todo}."

    @property
    def at_the_end(self) -> str:
        """One line for when the program ends before everything is written."""
        return f"{self.what}: the last messages are not saved. {self.todo}."


class _Connection(sqlite3.Connection):
    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        try:
            return super().execute(sql, parameters)
        except UnicodeDecodeError as error:  # SQLite quotes the name of what is damaged
            raise sqlite3.DatabaseError("malformed database schema") from error


def data_folder() -> Path:
    """Return the folder of the sessions: CHATTERM_DATA, or the platform's folder for application data."""
    if chosen := os.environ.get("CHATTERM_DATA"):
        return Path(chosen).expanduser()
    from platformdirs import user_data_path

    return user_data_path("chatterm", appauthor=False)


def database_path() -> Path:
    return data_folder() / "sessions.db"


def connect(path: Path | None) -> sqlite3.Connection:
    """Open the database, creating or updating it; None keeps it in memory.

    The connection may be used by one thread; transactions are the caller's.
    Raises sqlite3.Error, OSError and NewerVersionError; `explain` says what they mean.
    """
    if path is None:
        connection = sqlite3.connect(":memory:", isolation_level=None, factory=_Connection)
    else:
        if not path.exists():  # other users must not read conversations
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        connection = sqlite3.connect(path, timeout=LOCK_WAIT, isolation_level=None, factory=_Connection)
    try:
        _set_up(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _set_up(connection: sqlite3.Connection) -> None:
    _check_version(connection)
    end = monotonic() + LOCK_WAIT
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            break
        except sqlite3.OperationalError as error:
            # SQLite does not wait here for another process that is creating the same file.
            if not error.sqlite_errorname.startswith("SQLITE_BUSY") or monotonic() > end:
                raise
            sleep(0.01)
    connection.execute("PRAGMA synchronous = FULL")  # answers survive power failures, too
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA secure_delete = ON")  # deleted text is overwritten in the file
    _migrate(connection)


def connect_read_only(path: Path) -> sqlite3.Connection | None:
    """Connect to a database that cannot be written; return None if it cannot be read either."""
    address = f"{path.absolute().as_uri()}?mode=ro"
    wal = path.with_name(path.name + "-wal")
    # SQLite cannot create the WAL's index in a read-only folder; without a WAL the file itself is complete.
    options = ("",) if wal.exists() else ("", "&immutable=1")
    for option in options:
        try:
            connection: sqlite3.Connection = sqlite3.connect(
                address + option, uri=True, timeout=LOCK_WAIT, isolation_level=None, factory=_Connection
            )
        except sqlite3.Error:
            continue
        try:
            _check_version(connection)
            connection.execute("SELECT count(*) FROM (SELECT 1 FROM exchanges LIMIT 1)").fetchone()
            connection = _up_to_date(connection)
        except (sqlite3.Error, SessionError):
            connection.close()
        else:
            return connection
    return None


def _up_to_date(connection: sqlite3.Connection) -> sqlite3.Connection:
    """Return the connection, or for an earlier format one to a migrated copy in memory, closing the first."""
    if _version(connection) == VERSION:
        return connection
    copy = sqlite3.connect(":memory:", isolation_level=None, factory=_Connection)
    connection.backup(copy)
    connection.close()
    _migrate(copy)
    return copy


def _version(connection: sqlite3.Connection) -> int:
    return int(row(connection, "PRAGMA user_version", (), int)[0])


def _check_version(connection: sqlite3.Connection) -> None:
    found = _version(connection)
    if found > VERSION:
        raise NewerVersionError(
            f"The session database was written by a newer chatterm (format {found}; this one reads {VERSION})"
        )


def _migrate(connection: sqlite3.Connection) -> None:
    with transaction(connection):  # this also tests at once whether the file can be written
        found = _version(connection)
        for script in _MIGRATIONS[found:]:
            for statement in filter(str.strip, script.split(";")):
                connection.execute(statement)
        if found < VERSION:
            connection.execute(f"PRAGMA user_version = {VERSION}")


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Run the block in a transaction: everything is written, or nothing. The write lock is taken at once."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def explain(error: Exception, path: Path) -> Trouble:
    """Return what a database error means for the user."""
    place = one_line(str(path), 200)
    elsewhere = "set CHATTERM_DATA to another folder"
    if isinstance(error, NewerVersionError):
        return Trouble(str(error), f"Update chatterm, or {elsewhere}", passes=False)
    code = getattr(error, "sqlite_errorname", None) or ""
    if code.startswith(("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_PROTOCOL")):
        what = "Another program has locked the session database"
        return Trouble(what, "Close that program", passes=True, meanwhile=_RETRIED)
    if code == "SQLITE_FULL" or getattr(error, "errno", None) in (28, 122):  # ENOSPC, EDQUOT
        what = f"There is no disk space left for the session database ({place})"
        return Trouble(what, "Free some space", passes=True, meanwhile=_RETRIED)
    if code.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")) or any(part in str(error) for part in _DAMAGE):
        what = f"The session database is damaged ({place})"
        return Trouble(what, f"Move that file away to start a new one, or {elsewhere}", passes=False)
    if code.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_AUTH")) or isinstance(
        error, OSError
    ):
        what = f"The session database cannot be written ({place})"
        return Trouble(what, f"Make it writable, or {elsewhere}", passes=True)
    what = f"The session database failed: {one_line(str(error), 200) or type(error).__name__} ({place})"
    return Trouble(what, f"Check the disk, or {elsewhere}", passes=True)
