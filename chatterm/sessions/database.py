"""The queries of the session database. One connection, used by one thread; callers manage transactions."""

import json
import sqlite3
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from time import time
from typing import Any, get_args

from chatterm.backends.backend import Compaction, Exchange, ThinkCache, ThinkMode
from chatterm.backends.exchange import NO_TOKEN
from chatterm.sessions.as_json import checked_sampling, is_count, is_number
from chatterm.sessions.journal import JournalRecord, RunningAnswerJournal
from chatterm.sessions.records import SessionError, SessionInfo
from chatterm.sessions.rows import Kind, malformed, row, rows
from chatterm.sessions.session_documents import begin_on, begun_on, drop_texts, storable
from chatterm.sessions.tool_calls_json import format_calls, parse_calls
from chatterm.sessions.tree import extent
from chatterm.terminal.sanitize import one_line

PROMPTS = 1000
"""The most messages that the composer's history keeps."""
FIELDS = ("title", "model", "system", "think", "think_cache", "sampling", "documents")
"""Fields of a session that may be changed."""

_COLUMNS = (
    "session, id, parent, created, model, finish_reason, thinking_s, shown_start, shown_end, tokens, stats, "
    "opening, user, text, reasoning, token_ids, seed, ends_at, called, is_pinned, compaction"
)
_NAMES = tuple(_COLUMNS.split(", "))
_KINDS: tuple[Kind, ...] = (
    *(str, int, int | None, float, str, str | None, float, int, int, int, str),
    *(bytes, str, str, str, bytes, int | None, int | None, str, int, str | None),
)
"""The types of these columns."""
_PUT = (
    f"INSERT INTO exchanges ({_COLUMNS}) VALUES ({', '.join('?' * 21)}) ON CONFLICT (session, id) DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in _NAMES[4:])
    + " WHERE created = excluded.created"
)
_INFO = (
    "SELECT s.id, s.title, s.model, s.system, s.think, s.think_cache, s.sampling, s.created, s.updated, "
    "count(e.tokens), coalesce(sum(e.tokens), 0) + "
    "(SELECT coalesce(sum(length(j.ids)), 0) / 4 FROM journal j WHERE j.session = s.id) "
    "FROM sessions s LEFT JOIN exchanges e ON e.session = s.id"
)
_INFO_KINDS: tuple[Kind, ...] = (str, str, str, str | None, str, str, str, float, float, int, int)


Renumbered = dict[tuple[str, int], int]
"""Exchanges whose number another process had taken: (session, our number) to the number on disk."""


class Database:
    """The session database. Its methods raise sqlite3.Error if the disk fails or the file is damaged."""

    def __init__(self, connection: sqlite3.Connection, renumbered: Renumbered | None = None) -> None:
        self.connection = connection
        self._renumbered: Renumbered = {} if renumbered is None else renumbered
        self._execute = connection.execute
        connection.create_function("holds", 2, _holds, deterministic=True)

    def close(self) -> None:
        self.connection.close()

    def version(self) -> int:
        """Return a number that changes when another program has written."""
        return int(row(self.connection, "PRAGMA data_version", (), int)[0])

    # --- sessions ---

    def has(self, session: str) -> bool:
        return self._execute("SELECT 1 FROM sessions WHERE id = ?", (session,)).fetchone() is not None

    def insert(self, info: SessionInfo) -> None:
        """Insert a session without exchanges."""
        now = time()
        row = (*_fields(info), None, info.created or now, info.updated or now)
        self._execute(f"INSERT INTO sessions VALUES ({', '.join('?' * 10)})", (info.id, *row))
        begin_on(self.connection, info.id, info.documents)

    def update(self, session: str, fields: dict[str, Any]) -> None:
        """Change some of FIELDS."""
        for name, value in fields.items():
            assert name in FIELDS
            if name == "documents":
                begin_on(self.connection, session, value)
                continue
            self._execute(f"UPDATE sessions SET {name} = ? WHERE id = ?", (_stored(name, value), session))

    def retitle(self, session: str, before: str, title: str) -> None:
        """Change the title if it is `before`."""
        values = (_stored("title", title), session, _stored("title", before))
        self._execute("UPDATE sessions SET title = ? WHERE id = ? AND title = ?", values)

    def set_head(self, session: str, id: int | None) -> None:
        self._execute("UPDATE sessions SET head = ? WHERE id = ?", (self.number(session, id), session))

    def delete(self, session: str) -> None:
        self._execute("DELETE FROM drafts WHERE session = ?", (session,))
        self._execute("DELETE FROM sessions WHERE id = ?", (session,))
        drop_texts(self.connection)

    def info(self, session: str) -> SessionInfo | None:
        found = next(self._rows(f"{_INFO} WHERE s.id = ? GROUP BY s.id", (session,), *_INFO_KINDS), None)
        if found is None:
            return None
        if found[0] != session:  # the index contradicts the table
            raise malformed()
        (info,) = self._counted([_info(found)])
        info.documents = begun_on(self.connection, session)
        return info

    def find(self, text: str) -> list[SessionInfo]:
        """Find the sessions whose title or messages contain every word of `text`, latest first; "" finds all."""
        where, values = "", []
        for word in text.split():
            test = "{0} LIKE ? ESCAPE '\\'" if word.isascii() else "holds({0}, ?)"
            value = f"%{_escaped(word)}%" if word.isascii() else word.casefold()
            title, user, answer = (test.format(column) for column in ("s.title", "m.user", "m.text"))
            said = f"EXISTS (SELECT 1 FROM exchanges m WHERE m.session = s.id AND ({user} OR {answer}))"
            where += f" {'AND' if where else 'WHERE'} ({title} OR {said})"
            values += [value] * 3
        query = f"{_INFO}{where} GROUP BY s.id ORDER BY s.updated DESC, s.rowid DESC"
        return self._counted([_info(found) for found in self._rows(query, values, *_INFO_KINDS)])

    def _counted(self, infos: list[SessionInfo]) -> list[SessionInfo]:
        """Return `infos` after setting their counts of messages and branches."""
        ids = json.dumps([info.id for info in infos])
        heads = dict(self._rows("SELECT id, head FROM sessions", (), str, int | None))
        parents: dict[str, dict[int, int | None]] = {info.id: {} for info in infos}
        query = "SELECT session, id, parent FROM exchanges WHERE session IN (SELECT value FROM json_each(?))"
        for session, id, parent in self._rows(query, (ids,), str, int, int | None):
            if session not in parents:  # the index contradicts the table
                raise malformed()
            parents[session][id] = parent
        for info in infos:
            info.messages, info.branches = extent(parents[info.id], heads.get(info.id))
        return infos

    def said(self, session: str) -> Iterator[str]:
        """Yield every message and answer of a session, latest first."""
        query = "SELECT user, text FROM exchanges WHERE session = ? ORDER BY id DESC"
        for user, text in self._rows(query, (session,), str, str):
            yield text
            yield user

    # --- exchanges ---

    def put(self, session: str, exchange: Exchange, *, touch: bool = True) -> None:
        """Insert or update an exchange and delete its journal records, whose tokens it has to contain.

        `touch` makes the session the latest. A missing session is not created.
        """
        number = self.number(session, exchange.id)
        assert number is not None
        is_taken = number <= (self.number(session, exchange.parent) or 0)  # a child's is larger
        if is_taken or not self._put(session, number, exchange):
            query = "SELECT max(id) FROM exchanges WHERE session = ?"
            number = 1 + int(row(self.connection, query, (session,), int)[0])
            self._renumbered[session, exchange.id] = number
            self._put(session, number, exchange)
        self._execute("DELETE FROM journal WHERE session = ? AND exchange = ?", (session, number))
        if touch:
            self._execute("UPDATE sessions SET updated = ? WHERE id = ?", (time(), session))

    def made(self, session: str) -> dict[int, float]:
        """Return when each exchange of a session was created, by its number."""
        query = "SELECT id, created FROM exchanges WHERE session = ?"
        return dict(self._rows(query, (session,), int, float))

    def _put(self, session: str, number: int, exchange: Exchange) -> bool:
        """Write an exchange; return False if another process has given this number to one of its own."""
        values = (
            session,
            number,
            self.number(session, exchange.parent),
            exchange.created,
            exchange.model,
            exchange.finish_reason,
            exchange.thinking_s,
            *exchange.shown,
            len(exchange.token_ids),
            json.dumps(exchange.stats),
            _packed(exchange.opening),
            *map(storable, (exchange.user, exchange.text, exchange.reasoning)),
            _packed(exchange.token_ids),
            exchange.seed,
            exchange.ends_at,
            format_calls(exchange),
            exchange.is_pinned,
            json.dumps(asdict(exchange.compaction)) if exchange.compaction is not None else None,
        )
        return self._execute(_PUT, values).rowcount > 0

    def append(self, session: str, running: RunningAnswerJournal) -> None:
        """Append what a running answer has gained since the last record, as one record; write nothing twice."""
        exchange = running.exchange
        where = (session, self.number(session, exchange.id))
        query = "SELECT length(token_ids) / 4 FROM exchanges WHERE session = ? AND id = ? AND created = ?"
        saved = next(self._rows(query, (*where, exchange.created), int), None)
        if saved is None or saved[0] < len(exchange.token_ids):  # it was not there when the answer began
            self.put(session, exchange)
            where, saved = (session, self.number(session, exchange.id)), (len(exchange.token_ids),)
        query = "SELECT at + length(ids) / 4 FROM journal WHERE session = ? AND exchange = ? ORDER BY at DESC LIMIT 1"
        last = next(self._rows(query, where, int), None)
        at = (last or saved)[0]
        if piece := running.since(at):
            values = (
                json.dumps(piece.state),
                _packed(piece.ids),
                storable(piece.text),
                storable(piece.reasoning),
            )
            self._execute("INSERT INTO journal VALUES (?, ?, ?, ?, ?, ?, ?)", (*where, at, *values))

    def fold(self) -> None:
        """Merge the journal's records into their exchanges: those of answers that a crash cut off.

        An answer that another process is still generating is not harmed: that process finds its tokens there.
        """
        for (session,) in list(self._rows("SELECT DISTINCT session FROM journal", (), str)):
            for exchange in self._positioned(session).values():
                self._execute(
                    "UPDATE exchanges SET token_ids = ?, tokens = ?, text = ?, reasoning = ?, stats = ?, "
                    "thinking_s = ?, ends_at = ? WHERE session = ? AND id = ? AND finish_reason IS NULL",
                    (
                        _packed(exchange.token_ids),
                        len(exchange.token_ids) - exchange.token_ids.count(NO_TOKEN),
                        *map(storable, (exchange.text, exchange.reasoning)),
                        json.dumps(exchange.stats),
                        exchange.thinking_s,
                        exchange.ends_at,
                        session,
                        exchange.id,
                    ),
                )
        self._execute("DELETE FROM journal")

    def drop(self, session: str, id: int, created: float) -> None:
        """Delete an exchange, and its session if that was the last one."""
        where = (session, self.number(session, id), created)
        self._execute("DELETE FROM exchanges WHERE session = ? AND id = ? AND created = ?", where)
        self._renumbered.pop((session, id), None)
        if self._execute("SELECT 1 FROM exchanges WHERE session = ? LIMIT 1", (session,)).fetchone() is None:
            self.delete(session)

    def number(self, session: str, id: int | None) -> int | None:
        """Return the number of an exchange on disk, which differs from `id` if it was renumbered."""
        return id if id is None else self._renumbered.get((session, id), id)

    def exchanges(self, session: str) -> list[Exchange]:
        """Return the exchanges of a session in the order of their ids, with their journal records applied."""
        found = self._positioned(session)
        for exchange in found.values():
            exchange.token_ids = [id for id in exchange.token_ids if id != NO_TOKEN]
        return list(found.values())

    def _positioned(self, session: str) -> dict[int, Exchange]:
        """Return the same by id, with every NO_TOKEN: they count the positions of the journal's records."""
        query = f"SELECT {_COLUMNS} FROM exchanges WHERE session = ? ORDER BY id"
        found = {values[1]: _exchange(values) for values in self._rows(query, (session,), *_KINDS)}
        pieces = "SELECT exchange, at, state, ids, text, reasoning FROM journal WHERE session = ? ORDER BY exchange, at"
        for id, at, state, ids, text, why in self._rows(pieces, (session,), int, int, str, bytes, str, str):
            if id not in found:
                raise malformed()
            JournalRecord(_unpacked(ids), text, why, _state(state)).add_to(found[id], at)
        return found

    def head(self, session: str) -> int | None:
        found = next(self._rows("SELECT head FROM sessions WHERE id = ?", (session,), int | None), None)
        return found[0] if found else None

    # --- drafts and prompts ---

    def set_draft(self, session: str, text: str) -> None:
        self._execute("INSERT OR REPLACE INTO drafts VALUES (?, ?)", (session, storable(text)))

    def drafts(self) -> dict[str, str]:
        """Return all drafts, by session."""
        return dict(self._rows("SELECT session, text FROM drafts", (), str, str))

    def draft(self, session: str) -> str | None:
        """Return the draft of a session; None if none was ever written."""
        found = next(self._rows("SELECT text FROM drafts WHERE session = ?", (session,), str), None)
        return found[0] if found else None

    def add_prompt(self, text: str) -> None:
        """Add a message to the history; one that is there already moves to the end."""
        text = storable(text)
        self._execute("DELETE FROM prompts WHERE text = ?", (text,))
        self._execute("INSERT INTO prompts (text) VALUES (?)", (text,))
        self._execute(
            "DELETE FROM prompts WHERE id <= (SELECT id FROM prompts ORDER BY id DESC LIMIT 1 OFFSET ?)",
            (PROMPTS,),
        )

    def prompts(self, limit: int) -> list[str]:
        """Return the latest messages of the history, newest last."""
        query = "SELECT text FROM prompts ORDER BY id DESC LIMIT ?"
        return [text for (text,) in self._rows(query, (limit,), str)][::-1]

    def _rows(self, query: str, values: Sequence[Any], *kinds: Kind) -> Iterator[tuple[Any, ...]]:
        return rows(self.connection, query, values, *kinds)


def _fields(info: SessionInfo) -> list[Any]:
    return [_stored(name, getattr(info, name)) for name in FIELDS if name != "documents"]


def _stored(name: str, value: Any) -> Any:
    if name == "sampling":
        return json.dumps(value)
    return one_line(value, 200) if name == "title" else value if value is None else storable(value)


def _info(row: Sequence[Any]) -> SessionInfo:
    info = SessionInfo(*row)
    info.title = one_line(info.title, 200)  # the file is not trusted
    if info.think not in get_args(ThinkMode):
        info.think = "auto"
    if info.think_cache not in get_args(ThinkCache):
        info.think_cache = "exact"
    info.sampling = {}
    for name, value in _decoded(row[6]).items():
        with suppress(SessionError):  # leave out unknown settings and wrong values
            info.sampling |= checked_sampling({name: value})
    return info


def _exchange(row: Sequence[Any]) -> Exchange:
    stored = dict(zip(_NAMES, row, strict=True))
    calls, results = parse_calls(stored["called"])
    return Exchange(
        stored["id"],
        stored["parent"],
        stored["user"],
        text=stored["text"],
        reasoning=stored["reasoning"],
        token_ids=_unpacked(stored["token_ids"]),
        shown=(stored["shown_start"], stored["shown_end"]),
        opening=_unpacked(stored["opening"]),
        finish_reason=stored["finish_reason"],
        stats=_numbers(_decoded(stored["stats"])),
        model=stored["model"],
        created=stored["created"],
        thinking_s=stored["thinking_s"],
        seed=stored["seed"] if is_count(stored["seed"]) else None,
        ends_at=stored["ends_at"] if is_count(stored["ends_at"]) else None,
        calls=calls,
        results=results,
        is_pinned=bool(stored["is_pinned"]),
        compaction=_compaction(stored["compaction"]),
    )


def _compaction(text: str | None) -> Compaction | None:
    """Parse a stored compaction; None if there is none, or none that can be read."""
    found = _decoded(text) if text is not None else {}
    if not found:
        return None
    summary, without = found.get("summary"), found.get("without_files")
    return Compaction(summary if isinstance(summary, str) else None, without is True)


def _state(text: str) -> dict[str, Any]:
    """Parse the state of a running answer (`journal.JournalRecord`); invalid values are left out."""
    found = _decoded(text)
    fits = {"stats": lambda v: isinstance(v, dict), "thinking_s": is_number, "ends_at": is_count}
    state = {name: found[name] for name, fit in fits.items() if name in found and fit(found[name])}
    if "stats" in state:
        state["stats"] = _numbers(state["stats"])
    return state


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in values.items() if is_number(value)}


def _decoded(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {}


def _packed(ids: Iterable[int]) -> bytes:
    """Return token ids as 32-bit little-endian integers."""
    numbers = array("i", ids)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def _unpacked(data: bytes) -> list[int]:
    numbers = array("i")
    numbers.frombytes(data[: len(data) // 4 * 4])
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


def _escaped(word: str) -> str:
    for character in "\\%_":
        word = word.replace(character, "\\" + character)
    return word


def _holds(text: object, wanted: str) -> bool:
    """Return whether `text` contains `wanted`, ignoring case: SQLite's LIKE ignores it for ASCII only."""
    return wanted in str(text).casefold()
