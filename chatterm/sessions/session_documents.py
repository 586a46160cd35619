"""On which documents sessions were begun. A text is kept once, for as long as the library or a session has it."""

from collections.abc import Iterable, Sequence
from sqlite3 import Connection

from chatterm.backends.backend import Document
from chatterm.sessions.rows import rows


def begin_on(connection: Connection, session: str, documents: Sequence[Document]) -> None:
    """A session was begun on these. The transaction is the caller's, as everywhere here."""
    keep_texts(connection, documents)
    connection.execute("DELETE FROM begun_on WHERE session = ?", (session,))
    values = [(session, place, one.name, one.sha256) for place, one in enumerate(documents)]
    connection.executemany("INSERT INTO begun_on VALUES (?, ?, ?, ?)", values)


def begun_on(connection: Connection, session: str) -> tuple[Document, ...]:
    """In their order."""
    query = "SELECT b.name, t.text FROM begun_on b JOIN texts t USING (sha256) WHERE b.session = ? ORDER BY b.place"
    return tuple(Document(name, text) for name, text in rows(connection, query, (session,), str, str))


def keep_texts(connection: Connection, documents: Iterable[Document]) -> None:
    """Somebody is about to refer to them."""
    values = [(one.sha256, storable(one.text)) for one in documents]
    connection.executemany("INSERT OR IGNORE INTO texts VALUES (?, ?)", values)


def drop_texts(connection: Connection) -> None:
    """Those that nobody refers to are gone."""
    connection.execute(
        "DELETE FROM texts WHERE sha256 NOT IN (SELECT sha256 FROM library) "
        "AND sha256 NOT IN (SELECT sha256 FROM begun_on)"
    )


def storable(text: str) -> str:
    """Text that SQLite takes: lone surrogates are no characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text
