"""The store of sessions: writes are queued, and one thread carries them out.

In the queue, a later write of the same thing replaces the earlier one. The tokens of a running answer are written as
they come (`journal.py`).
"""

import sqlite3
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as NotInTime
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from os import urandom
from pathlib import Path
from threading import Condition, Thread
from time import monotonic, time
from typing import Any, TypeVar

from chatterm.backends.backend import Exchange, TokenEvent
from chatterm.sessions.database import FIELDS, Database
from chatterm.sessions.fallback_database import NO_SESSION, FallbackDatabase, KnownSession, Op
from chatterm.sessions.journal import RunningAnswerJournal
from chatterm.sessions.records import SessionError, SessionInfo
from chatterm.sessions.schema import Trouble, database_path, explain
from chatterm.sessions.titles import make_title
from chatterm.sessions.tree import Tree

T = TypeVar("T")

_INTERVAL = 0.5
"""Seconds that a draft may wait to be written."""
_BATCH = 0.015
"""Seconds that a token may wait to be written with others. A screen delivers tokens 30 times a second."""
_PATIENCE = 10.0
"""Seconds to wait for a read."""
_NEVER = float("inf")
_CLOSED = "The session database is closed."


class SessionStore:
    """The sessions on disk. Create it with `SessionStore.open`; every method may be called from any thread.

    Methods that write return at once. The others wait for the store's thread, at most some seconds, and raise
    SessionError: never call them on a thread that draws.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trouble: Trouble | None = None
        """Why writes stay in memory; None while all is well."""
        self._known: dict[str, KnownSession] = {}
        """Sessions that this process created or loaded. A new one is written with its first exchange."""
        self._running: dict[tuple[str, int], RunningAnswerJournal] = {}
        """Running answers, by session and exchange."""
        self._changed = Condition()
        self._ops: dict[Hashable, Op] = {}
        """Pending writes, oldest first."""
        self._due = _NEVER
        self._questions: deque[Callable[[FallbackDatabase], None]] = deque()
        self._awaited: set[Future[Any]] = set()
        """The results of reads that callers wait for."""
        self._closing = False
        self._thread = Thread(target=self._run, name="sessions", daemon=True)

    @classmethod
    def open(cls, path: Path | None = None) -> "SessionStore":
        """Open the store in this file (default: the user's own). `problem` says what is wrong with it."""
        store = cls(database_path() if path is None else path)
        store._thread.start()
        return store

    @property
    def problem(self) -> str:
        """One line for the chat while writes stay in memory; "" while all is well."""
        return self.trouble.in_chat if self.trouble is not None else ""

    @property
    def farewell(self) -> str:
        """One line for when the program ends before everything is written."""
        if self.trouble is not None:
            return self.trouble.at_the_end
        return "The session database does not respond: the last messages are not saved."

    def was_deleted(self, session: str) -> str:
        """Return one line, once, if another program had deleted the session (it was saved again); else ""."""
        known = self._known.get(session)
        if known is None or not known.was_deleted:
            return ""
        known.was_deleted = False
        return (
            "Another program had deleted this conversation; with what you sent it is saved again, all of it."
        )

    # --- writing ---

    def new(self, info: SessionInfo) -> str:
        """Create a session like `info` and return its id. It is written with its first exchange."""
        id, now = urandom(4).hex(), time()
        with self._changed:
            self._known[id] = KnownSession(replace(deepcopy(info), id=id, created=now, updated=now))
        return id

    def save(self, session: str, exchange: Exchange) -> None:
        """Save the exchange as it is now. Without a finish reason its answer begins; `say` adds its tokens.

        If another program has deleted the session, all that this process knows of it is saved again.
        """
        now = _copied(exchange)
        known = self._known.get(session)
        if known is not None:
            if not known.exchanges:
                self._begin(known, exchange.user)
            known.exchanges[exchange.id] = now
        self._follow(
            session, exchange.id, RunningAnswerJournal(now) if exchange.finish_reason is None else None
        )
        self._post(
            ("save", session, exchange.id), Op(session, lambda db: db.put(session, now), creates=known)
        )

    def say(self, session: str, exchange: Exchange, events: Sequence[TokenEvent]) -> None:
        """Write the next tokens of a saved, running answer; of `exchange`, only id, stats and timings are read.

        They are committed within 15 ms plus the time of a write.
        """
        running = self._running.get((session, exchange.id))
        if running is not None and running.add(events, exchange):
            work = partial(Database.append, session=session, running=running)
            op = Op(session, work, creates=self._known.get(session), in_haste=True)
            self._post(("say", session, exchange.id), op, _BATCH)

    def _follow(self, session: str, id: int, running: RunningAnswerJournal | None) -> None:
        """Set or remove the journal of an exchange about to be saved or dropped; cancel its pending appends."""
        with self._changed:
            self._running.pop((session, id), None)
            self._ops.pop(("say", session, id), None)
            if running is not None:
                self._running[session, id] = running

    def _begin(self, known: KnownSession, message: str) -> None:
        with self._changed:
            known.info = replace(known.info, title=known.info.title or make_title(message))
        self.draft(None, "")  # it became the message

    def drop(self, session: str, id: int) -> None:
        """Delete an exchange whose message was refused. A session is gone with its last one, until the next."""
        self._follow(session, id, None)
        dropped = None
        with self._changed:
            self._ops.pop(("save", session, id), None)
            if (known := self._known.get(session)) is not None:
                dropped = known.exchanges.pop(id, None)
                if not known.exchanges:
                    known.info = replace(known.info, title="")
        if known is not None and dropped is not None:
            self._post(("drop", session, id), Op(session, partial(known.drop, exchange=dropped)))

    def head(self, session: str, id: int | None) -> None:
        """Save which branch is selected, by its last exchange."""
        if (known := self._known.get(session)) is not None:
            known.head = id
        op = Op(session, lambda db: db.set_head(session, id), known=self._info(session))
        self._post(("head", session), op)

    def update(self, session: str, **fields: Any) -> None:
        """Change title, model, system, think, think_cache or sampling."""
        assert set(fields) <= set(FIELDS), fields
        fields = deepcopy(fields)
        with self._changed:
            if (known := self._known.get(session)) is not None:
                known.info = replace(known.info, **fields)
        for name, value in fields.items():
            work = partial(Database.update, session=session, fields={name: value})
            self._post(("update", session, name), Op(session, work, known=self._info(session)))

    def _info(self, session: str) -> SessionInfo | None:
        """Return a saved session as this process knows it; None if it does not."""
        known = self._known.get(session)
        return known.info if known is not None and known.exchanges else None

    def rename(self, session: str, title: str) -> None:
        self.update(session, title=title)

    def retitle(self, session: str, before: str, title: str) -> None:
        """Rename a session to `title` if its title is still `before`: the user may have renamed it meanwhile."""
        with self._changed:
            known = self._known.get(session)
            if known is not None and known.info.title == before:
                known.info = replace(known.info, title=title)
        op = Op(session, lambda db: db.retitle(session, before, title), known=self._info(session))
        self._post(("retitle", session), op)

    def delete(self, session: str) -> None:
        """Delete a session with all of its branches. Later writes to it are lost."""
        with self._changed:
            self._known.pop(session, None)
            self._running = {key: run for key, run in self._running.items() if key[0] != session}
            for key in [key for key, op in self._ops.items() if op.session == session]:
                del self._ops[key]
        self._post(("delete", session), Op(None, lambda db: db.delete(session), deletes=session))

    def draft(self, session: str | None, text: str) -> None:
        """Save the text in the composer; `session` is None for a chat that is not a session yet."""
        known = None if session is None else self._known.get(session)
        is_new = session is None or (known is not None and not known.exchanges)
        place = NO_SESSION if session is None or is_new else session
        self._post(
            ("draft", place), Op(None, lambda db: db.set_draft(place, text)), _INTERVAL if text else 0.0
        )

    def add_prompt(self, text: str) -> None:
        """Add a message to the composer's history."""
        self._post(object(), Op(None, lambda db: db.add_prompt(text)))

    def add(self, info: SessionInfo, exchanges: Iterable[Exchange], head: int | None) -> str:
        """Add a whole session from elsewhere, keeping its dates. Return its new id."""
        id, copies = urandom(4).hex(), deepcopy(list(exchanges))
        made = [exchange.created for exchange in copies if exchange.created] or [time()]
        title = info.title or make_title(copies[0].user if copies else "")
        info = replace(
            deepcopy(info),
            id=id,
            title=title,
            created=info.created or min(made),
            updated=info.updated or max(made),
        )
        known = KnownSession(info, {exchange.id: exchange for exchange in copies}, head)
        with self._changed:
            self._known[id] = known
        self._post(("add", id), Op(id, lambda db: None, creates=known))
        return id

    # --- reading ---

    def load(self, session: str) -> tuple[SessionInfo, Tree, str]:
        """Load a session to continue: its info, tree and draft. Raises SessionError if it does not exist."""

        def read(database: FallbackDatabase) -> tuple[SessionInfo, Tree, str]:
            known = self._known.get(session)
            if known is not None and not known.exchanges:
                return deepcopy(known.info), Tree(), database.draft(NO_SESSION)
            info, tree = database.load(session)
            exchanges = {exchange.id: _copied(exchange) for exchange in tree.exchanges}
            self._known[session] = KnownSession(deepcopy(info), exchanges, tree.head, is_saved=True)
            return info, tree, database.draft(session)

        return self._ask(read)

    def exchanges(self, session: str) -> list[Exchange]:
        """Return the exchanges of a session, only to be read. Raises SessionError if it does not exist."""
        return self._ask(lambda database: database.load(session)[1].exchanges)

    def find(self, text: str = "") -> list[SessionInfo]:
        """Find the sessions whose title or messages contain every word of `text`, latest first."""
        return self._ask(lambda database: database.find(text))

    def preview(self, session: str, text: str) -> str:
        """Return the line of a session that matches `text` best; its latest line for "". "" if there is none."""
        return self._ask(lambda database: database.preview(session, text))

    def info(self, session: str) -> SessionInfo | None:
        """Return a session that is on disk; None if it is not."""
        return self._ask(lambda database: database.info(session))

    def latest(self) -> SessionInfo | None:
        """Return the session that was written last; None if there is none."""
        return next(iter(self.find()), None)

    def new_draft(self) -> str:
        """Return the draft of a chat that was not a session yet."""
        return self._ask(lambda database: database.draft(NO_SESSION))

    def prompts(self, limit: int = 1000) -> list[str]:
        """Return the composer's history across sessions, newest last."""
        return self._ask(lambda database: database.prompts(limit))

    def flush(self, patience: float = _PATIENCE) -> None:
        """Wait at most `patience` seconds until all writes so far are on disk, or in memory (see `problem`)."""
        self._ask(lambda database: None, patience)

    def release(self) -> None:
        """End all waits for reads with a SessionError, because the program is ending."""
        with self._changed:
            for answer in self._awaited:
                with suppress(InvalidStateError):
                    answer.set_exception(SessionError(_CLOSED))

    def close(self, timeout: float = 5.0) -> bool:
        """Write what is left and end; return whether all of it is on disk. Closing twice is fine."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive() and self.trouble is None

    # --- the queue ---

    def _post(self, key: Hashable, op: Op, wait: float = 0.0) -> None:
        with self._changed:
            if op.creates is None:
                self._ops.pop(key, None)  # queue it last: it may need an exchange that was saved in between
            self._ops[key] = op
            self._due = min(self._due, monotonic() + wait)
            self._changed.notify()

    def _ask(self, question: Callable[[FallbackDatabase], T], patience: float = _PATIENCE) -> T:
        answer: Future[T] = Future()

        def ask(database: FallbackDatabase) -> None:
            try:
                give = partial(answer.set_result, question(database))
            except Exception as error:  # noqa: BLE001 - it is raised in the caller's thread
                give = partial(answer.set_exception, error)
            with suppress(InvalidStateError):  # the wait has ended
                give()

        with self._changed:
            if self._closing:
                raise SessionError(_CLOSED)
            self._awaited.add(answer)
            self._questions.append(ask)
            self._changed.notify()
        try:
            return answer.result(patience)
        except NotInTime:
            raise SessionError("The session database is not responding; try again.") from None
        except (sqlite3.Error, OSError) as error:
            raise SessionError(explain(error, self.path).in_shell) from error
        finally:
            with self._changed:
                self._awaited.discard(answer)

    def _run(self) -> None:
        database = FallbackDatabase(self.path)
        self.trouble = database.trouble
        closing = False
        while not closing:
            with self._changed:
                while not (
                    self._closing or self._questions or monotonic() >= min(self._due, database.retry_at)
                ):
                    moment = min(self._due, database.retry_at)
                    self._changed.wait(None if moment == _NEVER else max(0.0, moment - monotonic()))
                closing = self._closing
                ops, self._ops, self._due = list(self._ops.values()), {}, _NEVER
                questions, self._questions = self._questions, deque()
            database.write(ops, retry=closing)
            self.trouble = database.trouble
            for question in questions:
                question(database)
        database.close()


def _copied(exchange: Exchange) -> Exchange:
    """Return a copy of the exchange as it is now."""
    return replace(exchange, token_ids=exchange.token_ids[:], stats=dict(exchange.stats))
