"""The database on disk, and one in memory for writes that the disk refuses. Used by one thread.

While the disk works, everything is on it. When a write fails, that write and later ones go to memory, and readers of
a session get both parts as one. Every few seconds the disk is tried again; once it works, it takes over the writes.
"""

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from chatterm.backends.backend import Exchange
from chatterm.sessions.database import FIELDS, Database, Renumbered
from chatterm.sessions.kv_cleanup import tidy
from chatterm.sessions.records import SessionError, SessionInfo
from chatterm.sessions.schema import Trouble, connect, connect_read_only, explain, transaction
from chatterm.sessions.titles import matching_line
from chatterm.sessions.tree import Tree, extent
from engine.store.folder import default_folder, forget

NO_SESSION = ""
"""The key of the draft of a chat that is not a session yet."""
_SYNC = 0.5
"""Seconds within which writes `in_haste` are synced to the disk."""
_UNKNOWN = -1
"""Sentinel in memory: no branch was chosen since the disk could not be read."""
_RETRY = 3.0
"""Seconds between two attempts to use a disk that failed."""


@dataclass(slots=True)
class KnownSession:
    """A session that this process created or loaded, as it last saved it. Other processes may have added to it."""

    info: SessionInfo
    exchanges: dict[int, Exchange] = field(default_factory=dict)
    """By id; each a copy that is never changed."""
    head: int | None = None
    is_saved: bool = False
    """Whether it was ever written to the database, on disk or in memory."""
    was_deleted: bool = False
    """Whether another program deleted it, and it was saved again."""

    def write(self, db: Database) -> None:
        """Write what `db` lacks of the session; other programs may have deleted it, or saved it again since."""
        is_new = not db.has(self.info.id)
        if is_new:
            db.insert(self.info)
            self.was_deleted = self.was_deleted or self.is_saved
        self.is_saved = True
        there = db.made(self.info.id)
        # Parents first. sorted() copies them at once: another thread may add one.
        for exchange in sorted(self.exchanges.values(), key=lambda exchange: exchange.id):
            if exchange.created != there.get(db.number(self.info.id, exchange.id) or 0):
                db.put(self.info.id, exchange, touch=not is_new)  # a new session keeps its own date
        if is_new:
            db.set_head(self.info.id, self.head)

    def drop(self, db: Database, exchange: Exchange) -> None:
        """Delete an exchange, and the session with its last one; that is no deletion by another program."""
        db.drop(self.info.id, exchange.id, exchange.created)
        self.is_saved = db.has(self.info.id)


@dataclass(frozen=True, slots=True)
class Op:
    """One write."""

    session: str | None
    """The session that must exist for it; None: it needs none."""
    work: Callable[[Database], None]
    creates: KnownSession | None = None
    """The session to create if it is missing; None: the write is skipped instead."""
    known: SessionInfo | None = None
    """The session as it should be on disk, for when the disk cannot even be read; None: unknown."""
    deletes: str | None = None
    """The session that this deletes."""
    in_haste: bool = False
    """Whether a power failure within the next half second may lose it."""


class FallbackDatabase:
    """Both databases. Reads raise SessionError (unknown session) and sqlite3.Error (disk error); writes never raise."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trouble: Trouble | None = None
        """Why writes do not go to the disk; None while they do."""
        self.retry_at = float("inf")
        """When to try the disk again, on the clock of time.monotonic()."""
        self._synced = 0.0
        """When writes were last synced to the disk, on the same clock."""
        self._renumbered: Renumbered = {}
        self._deleted: set[str] = set()
        """Sessions that were deleted while the disk failed."""
        self._unread: set[str] = set()
        """Sessions on disk of which memory holds only the changes made while the disk could not be read."""
        self._known: dict[str, KnownSession] = {}
        """Sessions in memory, to be created again if the disk has lost them."""
        self._versions: dict[str | None, int] = {}
        """By session, the disk's data version at which the session was complete there."""
        self._memory: Database | None = None
        self._disk: Database | None = None
        self._open()

    def close(self) -> None:
        for database in self._databases():
            with suppress(sqlite3.Error):
                database.close()

    # --- writing ---

    def write(self, ops: Sequence[Op], *, retry: bool = False) -> None:
        """Write `ops` in one transaction. `retry` tries a failed disk again at once if anything is to be written."""
        for deleted in [op.deletes for op in ops if op.deletes is not None]:
            forget(default_folder(), deleted)  # its KV cache on disk
        needed = retry and (ops or self._memory is not None)
        if self.trouble is not None and self.trouble.passes and (needed or monotonic() >= self.retry_at):
            self._heal()
        if ops and self.trouble is None:
            try:
                self._transact(ops)
                return
            except Exception as error:  # noqa: BLE001 - whatever it is, the chat goes on
                self._fail(error)
        for op in ops:
            with suppress(Exception):
                self._remember(op)

    def _transact(self, ops: Sequence[Op]) -> None:
        """Write all `ops` to the disk, or none."""
        assert self._disk is not None
        now = monotonic()
        lasting = now >= self._synced + _SYNC or not all(op.in_haste for op in ops)
        self._synced = now if lasting else self._synced
        # With NORMAL the operating system writes the log to disk later; it survives if this process is killed.
        self._disk.connection.execute(f"PRAGMA synchronous = {'FULL' if lasting else 'NORMAL'}")
        with transaction(self._disk.connection):
            version = self._disk.version()
            for op in ops:
                if op.creates is not None and self._versions.get(op.session) != version:
                    op.creates.write(self._disk)
                _apply(self._disk, op)
        self._versions.update((op.session, version) for op in ops if op.creates is not None)
        if any(op.deletes for op in ops):  # otherwise the log would still contain the deleted text
            with suppress(sqlite3.Error):
                self._disk.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            tidy(self._disk.connection, self.path)

    def _remember(self, op: Op) -> None:
        """Write to memory, which holds only what is newer than the disk."""
        if self._memory is None:
            self._memory = Database(connect(None))
        session = op.session
        if session is not None and op.creates is not None:
            self._known[session] = op.creates
        if session is not None and session not in self._deleted and not self._memory.has(session):
            info = op.creates.info if op.creates is not None else op.known
            head: int | None = _UNKNOWN
            unread = op.creates is None
            if self._disk is not None:
                with suppress(sqlite3.Error):
                    info, head = self._disk.info(session), self._disk.head(session)
                    unread = False
            if info is not None:
                self._memory.insert(info)
                self._memory.set_head(session, head)
                if unread:
                    self._unread.add(session)
        _apply(self._memory, op)
        if op.deletes is not None:
            self._deleted.add(op.deletes)

    # --- when the disk fails ---

    def _open(self) -> None:
        self.trouble, self.retry_at, self._versions = None, float("inf"), {}
        try:
            self._disk = Database(connect(self.path), self._renumbered)
            with suppress(sqlite3.Error), transaction(self._disk.connection):
                self._disk.fold()  # if it fails, the next start does it: reading does not need it
            tidy(self._disk.connection, self.path)
        except Exception as error:  # noqa: BLE001 - whatever it is, the chat goes on
            self._fail(error)
            connection = connect_read_only(self.path)
            self._disk = Database(connection) if connection is not None else None

    def _fail(self, error: Exception) -> None:
        self.trouble = explain(error, self.path)
        self.retry_at = monotonic() + _RETRY if self.trouble.passes else float("inf")

    def _heal(self) -> None:
        """Try the disk again; if it works, move the writes in memory there."""
        if self._disk is not None:
            self._disk.close()
        self._open()
        if self.trouble is not None:
            return
        try:
            self._transact([Op(None, self._take_memory)])
        except Exception as error:  # noqa: BLE001 - whatever it is, the chat goes on
            self._fail(error)
            return
        if self._memory is not None:
            self._memory.close()
        self._memory, self._deleted, self._unread, self._known = None, set(), set(), {}

    def _take_memory(self, disk: Database) -> None:
        for session in self._deleted:
            disk.delete(session)
        memory = self._memory
        if memory is None:
            return
        for info in filter(None, [memory.info(listed.id) for listed in memory.find("")]):
            if (known := self._known.get(info.id)) is not None:
                known.write(disk)
            elif not disk.has(info.id):
                continue  # another program has deleted it
            disk.update(info.id, {name: getattr(info, name) for name in FIELDS})
            for exchange in memory.exchanges(info.id):
                disk.put(info.id, exchange)
            if (head := memory.head(info.id)) != _UNKNOWN:
                disk.set_head(info.id, head)
        for text in memory.prompts(-1):
            disk.add_prompt(text)
        for place, text in memory.drafts().items():
            disk.set_draft(place, text)

    # --- reading ---

    def load(self, session: str) -> tuple[SessionInfo, Tree]:
        """Load a session to continue. Its exchanges have the numbers on disk from now on."""
        info, exchanges, head = self._whole(session)
        for key in [key for key in self._renumbered if key[0] == session]:
            del self._renumbered[key]  # from now on its numbers are those on disk
        return info, Tree(exchanges, head)

    def find(self, text: str) -> list[SessionInfo]:
        """Find the sessions whose title or messages contain every word of `text`, latest first; "" finds all."""
        found = self._disk.find(text) if self._disk is not None else []
        if self._memory is not None:
            newer = [info.id for info in self._memory.find("")]
            fitting = {info.id for info in (*found, *self._memory.find(text))}
            found = [info for info in found if info.id not in self._deleted.union(newer)]
            for id in fitting.intersection(newer):
                with suppress(SessionError):  # it cannot be read now
                    found.append(self._whole(id)[0])
        return sorted(found, key=lambda info: info.updated, reverse=True)

    def preview(self, session: str, text: str) -> str:
        """Return the latest line of a session with the most words of `text`; its latest line for ""."""
        gone = self._disk if session in self._deleted else None
        databases = [db for db in reversed(self._databases()) if db is not gone]
        said = (text for db in databases for text in db.said(session))
        return matching_line(said, text.split())

    def info(self, session: str) -> SessionInfo | None:
        """Return a session that is on disk; None if it is not."""
        return self._disk.info(session) if self._disk is not None else None

    def draft(self, place: str) -> str:
        """Return the draft of a session, or of NO_SESSION; "" if there is none."""
        drafts = [db.draft(place) for db in self._databases()]
        return next((text for text in reversed(drafts) if text is not None), "")

    def prompts(self, limit: int) -> list[str]:
        """Return the composer's history, newest last."""
        return [text for db in self._databases() for text in db.prompts(limit)][-limit:]

    def _databases(self) -> list[Database]:
        return [db for db in (self._disk, self._memory) if db is not None]

    def _whole(self, session: str) -> tuple[SessionInfo, list[Exchange], int | None]:
        gone = self._disk if session in self._deleted else None
        holding = [db for db in self._databases() if db is not gone and db.has(session)]
        info = holding[-1].info(session) if holding else None
        if info is None:
            raise SessionError(f"Unknown session {session!r}; chatterm sessions list shows them all.")
        exchanges = {exchange.id: exchange for db in holding for exchange in db.exchanges(session)}
        if not exchanges and session in self._unread:
            raise SessionError(f"The session {session!r} cannot be read now; try again when the disk works.")
        info.exchanges = len(exchanges)
        info.tokens = sum(len(exchange.token_ids) for exchange in exchanges.values())
        heads = [head for db in holding if (head := db.head(session)) != _UNKNOWN]
        parents = {exchange.id: exchange.parent for exchange in exchanges.values()}
        info.messages, info.branches = extent(parents, heads[-1] if heads else None)
        return deepcopy(info), list(exchanges.values()), heads[-1] if heads else None


def _apply(db: Database, op: Op) -> None:
    if op.session is not None and not db.has(op.session):
        if op.creates is None:
            return
        op.creates.write(db)
    op.work(db)
