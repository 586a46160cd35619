"""The disk, and a database in memory for what the disk does not take. Used by one thread.

While the disk works everything is on it. When a write fails, that write and those after it go to memory, and whoever
reads a session gets both parts as one. Every few seconds the disk is tried again, and then takes what is in memory.
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
"""Where the draft of a chat stands that is no session yet."""
_SYNC = 0.5
"""Seconds after which what was written in haste is on the disk for good."""
_UNKNOWN = -1
"""In memory: nobody has chosen a branch since the disk could not be read."""
_RETRY = 3.0
"""Seconds between two attempts to use a disk that failed."""


@dataclass(slots=True)
class KnownSession:
    """A session that this process made or loaded, as it was last saved here. Others may have added to it."""

    info: SessionInfo
    exchanges: dict[int, Exchange] = field(default_factory=dict)
    """By id; each a copy that nobody changes."""
    head: int | None = None
    is_saved: bool = False
    """Whether it was ever written to the database, on disk or in memory."""
    was_deleted: bool = False
    """Whether another program deleted it, and it was saved again."""

    def write(self, db: Database) -> None:
        """Write what is missing of the session; another program may have deleted it, and a third begun it again."""
        is_new = not db.has(self.info.id)
        if is_new:
            db.insert(self.info)
            self.was_deleted = self.was_deleted or self.is_saved
        self.is_saved = True
        there = db.made(self.info.id)
        # Parents first. They are listed at once: another thread may add one.
        for exchange in sorted(self.exchanges.values(), key=lambda exchange: exchange.id):
            if exchange.created != there.get(db.number(self.info.id, exchange.id) or 0):
                db.put(self.info.id, exchange, touch=not is_new)  # a new session keeps its own date
        if is_new:
            db.set_head(self.info.id, self.head)

    def drop(self, db: Database, exchange: Exchange) -> None:
        """Delete an exchange, and the session with its last one; that does not count as deleted by another program."""
        db.drop(self.info.id, exchange.id, exchange.created)
        self.is_saved = db.has(self.info.id)


@dataclass(frozen=True, slots=True)
class Op:
    """Something to write."""

    session: str | None
    """The session that has to be there for it; None: none."""
    work: Callable[[Database], None]
    creates: KnownSession | None = None
    """The session to make when it is not there; None: then there is nothing to do."""
    known: SessionInfo | None = None
    """The session as it should be on the disk, for when that cannot even be read; None: nothing is known."""
    deletes: str | None = None
    """The session that is gone afterwards."""
    in_haste: bool = False
    """It need not survive a cut of the power before the next half second is over."""


class FallbackDatabase:
    """Reading raises SessionError for what is not there and sqlite3.Error for a disk that fails; writing nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trouble: Trouble | None = None
        """Why the disk is not used for writing."""
        self.retry_at = float("inf")
        """When the disk should be tried again, on the clock of time.monotonic()."""
        self._synced = 0.0
        """When the disk was last told to write for good, on the same clock."""
        self._renumbered: Renumbered = {}
        self._deleted: set[str] = set()
        """Sessions that were deleted while the disk failed."""
        self._unread: set[str] = set()
        """Sessions of the disk of which memory has only what was changed while that could not be read."""
        self._known: dict[str, KnownSession] = {}
        """Sessions in memory that have to be made where the disk has lost them."""
        self._versions: dict[str | None, int] = {}
        """Of a session the version of the disk at which nothing was missing of it."""
        self._memory: Database | None = None
        self._disk: Database | None = None
        self._open()

    def close(self) -> None:
        for database in self._databases():
            with suppress(sqlite3.Error):
                database.close()

    # --- writing ---

    def write(self, ops: Sequence[Op], *, retry: bool = False) -> None:
        """Write `ops`, all in one transaction. `retry` tries a failed disk again at once if something needs it."""
        for deleted in [op.deletes for op in ops if op.deletes is not None]:
            forget(default_folder(), deleted)  # what was computed for it
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
        """Write to the disk: everything or nothing."""
        assert self._disk is not None
        now = monotonic()
        lasting = now >= self._synced + _SYNC or not all(op.in_haste for op in ops)
        self._synced = now if lasting else self._synced
        # Where it is NORMAL the log is left to the operating system, which a killed process does not take with it.
        self._disk.connection.execute(f"PRAGMA synchronous = {'FULL' if lasting else 'NORMAL'}")
        with transaction(self._disk.connection):
            version = self._disk.version()
            for op in ops:
                if op.creates is not None and self._versions.get(op.session) != version:
                    op.creates.write(self._disk)
                _apply(self._disk, op)
        self._versions.update((op.session, version) for op in ops if op.creates is not None)
        if any(op.deletes for op in ops):  # or the log would still have it
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
                self._disk.fold()  # another time where it fails: whoever reads does without
            tidy(self._disk.connection, self.path)
        except Exception as error:  # noqa: BLE001 - whatever it is, the chat goes on
            self._fail(error)
            connection = connect_read_only(self.path)
            self._disk = Database(connection) if connection is not None else None

    def _fail(self, error: Exception) -> None:
        self.trouble = explain(error, self.path)
        self.retry_at = monotonic() + _RETRY if self.trouble.passes else float("inf")

    def _heal(self) -> None:
        """Try the disk again; if it works, bring there what is in memory."""
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
        """A session to go on with."""
        info, exchanges, head = self._whole(session)
        for key in [key for key in self._renumbered if key[0] == session]:
            del self._renumbered[key]  # from now on its numbers are those of the disk
        return info, Tree(exchanges, head)

    def find(self, text: str) -> list[SessionInfo]:
        """Sessions in whose title or messages every word of `text` occurs, latest first; "" finds all."""
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
        """The line of a session that has most of the words of `text`, the latest of several; its latest for none."""
        gone = self._disk if session in self._deleted else None
        databases = [db for db in reversed(self._databases()) if db is not gone]
        said = (text for db in databases for text in db.said(session))
        return matching_line(said, text.split())

    def info(self, session: str) -> SessionInfo | None:
        """A session that the disk has; None where it has not."""
        return self._disk.info(session) if self._disk is not None else None

    def draft(self, place: str) -> str:
        """Of a session, or of NO_SESSION."""
        drafts = [db.draft(place) for db in self._databases()]
        return next((text for text in reversed(drafts) if text is not None), "")

    def prompts(self, limit: int) -> list[str]:
        """The composer's history, newest last."""
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
