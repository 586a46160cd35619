"""The library: documents that conversations may begin with. Every call opens the session database anew."""

import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from time import time

from chatterm.backends.backend import Document
from chatterm.sessions.records import SessionError
from chatterm.sessions.rows import row, rows
from chatterm.sessions.schema import connect, connect_read_only, database_path, explain, transaction
from chatterm.sessions.session_documents import drop_texts, keep_texts
from chatterm.terminal.sanitize import one_line
from engine.store.folder import chunk_owner_name, default_folder, forget
from models.units import counted

CHARACTERS_PER_TOKEN = 4
"""An estimate, for documents that no model has read."""
_NAME = re.compile(r"\w[\w.-]{0,63}")
_NO_NAME = re.compile(r"[^\w.-]+")


@dataclass(frozen=True, slots=True)
class LibraryEntry:
    """A document, without its text."""

    name: str
    source: str
    """Where it came from: a path or a URL."""
    sha256: str
    added: float
    """Seconds since the epoch."""
    characters: int
    tokens: Mapping[str, int]
    """Its length in tokens, by the name of a model that has read it."""


class DocumentLibrary:
    """The documents on disk. Every method may wait up to a second for a lock, and raises SessionError (one line)."""

    def __init__(self, path: Path | None = None) -> None:
        """Use the session database at `path` (default: the user's own)."""
        self._path = path or database_path()

    def entries(self) -> list[LibraryEntry]:
        """Return all entries, by name."""
        if not self._path.exists():
            return []
        with self._reads() as connection:
            return _entries(connection)

    def add(self, document: Document, source: str) -> LibraryEntry:
        """Add a document under its name, which must be unused."""
        if not _NAME.fullmatch(document.name):
            raise SessionError(
                f"{one_line(document.name, 80)!r} cannot be the name of a document; use up to 64 letters, "
                "digits, - and _."
            )
        with self._writes() as connection:
            if (known := _named(_entries(connection), document.name)) is not None:
                same = "with the same text" if known.sha256 == document.sha256 else "with another text"
                raise SessionError(
                    f"{known.name} is already in the library, {same}; remove that, or give this another name."
                )
            keep_texts(connection, [document])
            row = (document.name, one_line(source, 2000), document.sha256, time())
            connection.execute("INSERT INTO library VALUES (?, ?, ?, ?)", row)
            found = _named(_entries(connection), document.name)
        assert found is not None
        return found

    def find(self, names: Iterable[str]) -> tuple[Document, ...]:
        """Return the documents with these names, in this order and each once."""
        wanted = {one_line(name).casefold(): name for name in names}
        with self._reads() as connection:
            entries = _entries(connection)
            found = [_known(entries, name) for name in wanted.values()]
            text = "SELECT text FROM texts WHERE sha256 = ?"
            return tuple(Document(one.name, *row(connection, text, (one.sha256,), str)) for one in found)

    def remove(self, name: str) -> LibraryEntry:
        """Remove a document and its KV cache. Sessions that began with it keep its text."""
        with self._writes() as connection:
            entry = _known(_entries(connection), name)
            connection.execute("DELETE FROM library WHERE name = ?", (entry.name,))
            drop_texts(connection)
            is_there = any(one.sha256 == entry.sha256 for one in _entries(connection))
        if not is_there:  # no other entry has this text
            forget(default_folder(), chunk_owner_name(entry.sha256))
        return entry

    def count(self, document: Document, model: str, tokens: int) -> None:
        """Save the length of a document in tokens of a model that has read it; do nothing if it was removed."""
        with self._writes() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO counts SELECT sha256, ?, ? FROM texts WHERE sha256 = ?",
                (model, tokens, document.sha256),
            )

    def unread(self) -> tuple[Document, ...]:
        """Return the documents that no model has read, latest first."""
        entries = [entry for entry in self.entries() if not entry.tokens]
        latest = sorted(entries, key=lambda entry: entry.added, reverse=True)
        return self.find(entry.name for entry in latest) if latest else ()

    def names(self) -> list[str]:
        """Return the names of all documents; [] if they cannot be read at once."""
        connection = connect_read_only(self._path) if self._path.exists() else None
        if connection is None:
            return []
        try:
            return [name for (name,) in rows(connection, "SELECT name FROM library ORDER BY name", (), str)]
        except sqlite3.Error:
            return []
        finally:
            connection.close()

    @contextmanager
    def _reads(self) -> Iterator[sqlite3.Connection]:
        with self._explained():
            try:
                connection = connect(self._path)
            except (sqlite3.Error, OSError):
                found = connect_read_only(self._path)
                if found is None:
                    raise
                connection = found
            try:
                yield connection
            finally:
                connection.close()

    @contextmanager
    def _writes(self) -> Iterator[sqlite3.Connection]:
        """Open a connection in a transaction: everything is written, or nothing."""
        with self._explained():
            connection = connect(self._path)
            try:
                with transaction(connection):
                    yield connection
            finally:
                connection.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except SessionError as error:
            if type(error) is SessionError:
                raise
            raise SessionError(explain(error, self._path).in_shell) from error
        except (sqlite3.Error, OSError) as error:
            raise SessionError(explain(error, self._path).in_shell) from error


def size_text(entry: LibraryEntry, model: str = "") -> str:
    """Return the length of a document: as counted by this model, else by any that has read it, else an estimate."""
    tokens = entry.tokens.get(model) or next(iter(entry.tokens.values()), None)
    if tokens is not None:
        return counted(tokens, "token")
    return f"about {counted(max(entry.characters // CHARACTERS_PER_TOKEN, 1), 'token')}"


def name_for(source: str) -> str:
    """Return the default name of a document from this file, folder or URL."""
    last = re.split(r"[?#]", source.rstrip("/"))[0].rsplit("/", 1)[-1]
    stem = (
        last
        if source.startswith(("http://", "https://")) and "/" not in source.rstrip("/")[8:]
        else Path(last).stem
    )
    return _NO_NAME.sub("-", stem).strip("-_.")[:64] or "document"


def _entries(connection: sqlite3.Connection) -> list[LibraryEntry]:
    counts: dict[str, dict[str, int]] = {}
    query = "SELECT sha256, model, tokens FROM counts"
    for sha256, model, tokens in rows(connection, query, (), str, str, int):
        counts.setdefault(sha256, {})[model] = tokens
    query = (
        "SELECT l.name, l.source, l.sha256, l.added, length(t.text) "
        "FROM library l JOIN texts t USING (sha256) ORDER BY l.name"
    )
    return [
        LibraryEntry(name, source, sha256, added, length, counts.get(sha256, {}))
        for name, source, sha256, added, length in rows(connection, query, (), str, str, str, float, int)
    ]


def _named(entries: Iterable[LibraryEntry], name: str) -> LibraryEntry | None:
    wanted = name.casefold()
    return next((entry for entry in entries if entry.name.casefold() == wanted), None)


def _known(entries: list[LibraryEntry], name: str) -> LibraryEntry:
    """Return the entry of this name. Raises SessionError, which suggests the closest names."""
    if (found := _named(entries, name)) is not None:
        return found
    shown = one_line(name, 80)
    if not entries:
        raise SessionError(
            f"There is no {shown!r}: the library is empty; chatterm library add FILE fills it."
        )
    names = {entry.name.casefold(): entry.name for entry in entries}
    close = [names[one] for one in get_close_matches(shown.casefold(), names, 3, 0.5)]
    offered = (
        f"did you mean {' or '.join(close)}?" if close else f"it has {', '.join(list(names.values())[:8])}."
    )
    raise SessionError(f"There is no {shown!r} in the library; {offered}")
