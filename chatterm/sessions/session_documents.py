"""The documents that sessions began with. A text is stored once, while the library or any session refers to it."""

from collections.abc import Iterable, Sequence
from sqlite3 import Connection

from chatterm.backends.backend import Document
from chatterm.sessions.rows import rows


def begin_on(connection: Connection, session: str, documents: Sequence[Document]) -> None:
    """Save the documents that a session begins with. The transaction is the caller's, as in all of this module."""
    keep_texts(connection, documents)
    connection.execute("DELETE FROM begun_on WHERE session = ?", (session,))
    values = [(session, place, one.name, one.sha256) for place, one in enumerate(documents)]
    connection.executemany("INSERT INTO begun_on VALUES (?, ?, ?, ?)", values)


def begun_on(connection: Connection, session: str) -> tuple[Document, ...]:
    """Return the documents that a session began with, in their order."""
    query = "SELECT b.name, t.text FROM begun_on b JOIN texts t USING (sha256) WHERE b.session = ? ORDER BY b.place"
    return tuple(Document(name, text) for name, text in rows(connection, query, (session,), str, str))


def keep_texts(connection: Connection, documents: Iterable[Document]) -> None:
    """Store the texts of documents that the caller is about to refer to."""
    values = [(one.sha256, storable(one.text)) for one in documents]
    connection.executemany("INSERT OR IGNORE INTO texts VALUES (?, ?)", values)


def drop_texts(connection: Connection) -> None:
    """Delete the texts that neither the library nor a session refers to."""
    connection.execute(
        "DELETE FROM texts WHERE sha256 NOT IN (SELECT sha256 FROM library) "
        "AND sha256 NOT IN (SELECT sha256 FROM begun_on)"
    )


def storable(text: str) -> str:
    """Return text that SQLite accepts, with lone surrogates replaced."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text
