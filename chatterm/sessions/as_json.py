"""Sessions as JSON: lossless export and import of a whole tree. Nothing in an imported file is trusted."""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from typing import Any, TypeGuard, get_args

from chatterm.backends.backend import (
    Compaction,
    Document,
    EngineError,
    Exchange,
    FinishReason,
    ThinkCache,
    ThinkMode,
)
from chatterm.sessions.dates import LATEST
from chatterm.sessions.records import SessionError, SessionInfo
from chatterm.sessions.titles import make_title
from chatterm.sessions.tool_calls_json import checked_called
from chatterm.sessions.tree import Tree
from chatterm.terminal.sanitize import one_line

FORMAT = "chatterm-session"
VERSION = 1

_SESSION = ("title", "model", "system", "think", "think_cache", "sampling", "created", "updated")
_EXCHANGE = tuple(field.name for field in fields(Exchange))
_LARGEST = 2**31 - 1
_OF_REQUESTS = ("logit_bias", "logprobs", "constraint")
"""Fields of SamplingParams that are not saved with a conversation."""
# JSON allows these unescaped, but terminals obey some of them and UTF-8 cannot encode the others.
_UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def to_json(info: SessionInfo, tree: Tree) -> str:
    """Return the whole session as JSON, with every branch."""
    session = {name: getattr(info, name) for name in _SESSION}
    if info.documents:
        session["documents"] = [asdict(document) for document in info.documents]
    head = {"format": FORMAT, "version": VERSION, "session": session}
    records = (json.dumps(asdict(exchange), ensure_ascii=False) for exchange in tree.exchanges)
    start = json.dumps(head | {"head": tree.head}, ensure_ascii=False, indent=1).removesuffix("\n}")
    text = start + ',\n "exchanges": [\n' + ",\n".join(records) + "\n ]\n}\n"
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def from_json(text: str) -> tuple[SessionInfo, Tree]:
    """Parse the output of `to_json`, or a list of messages in the format of chat APIs.

    Raises SessionError, which says what is wrong and where.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SessionError(f"This is not JSON: {one_line(str(error), 100)}.") from error
    if isinstance(data, dict) and data.get("format") == FORMAT:
        version = data.get("version")
        if version != VERSION:
            raise SessionError(_other_version(version))
        info = _session(_Reader("session", data.get("session")))
        records = data.get("exchanges")
        if not isinstance(records, list):
            raise SessionError("exchanges must be a list.")
        exchanges = [_exchange(_Reader(f"exchange {n}", record)) for n, record in enumerate(records, 1)]
        _check_tree(exchanges)
        head = data.get("head")
        if head is not None and (not _is_int(head) or head not in {exchange.id for exchange in exchanges}):
            raise SessionError(f"head is {_shown(head)}; it must be the id of an exchange.")
        return info, Tree(exchanges, head)
    messages = data.get("messages") if isinstance(data, dict) else data
    if isinstance(messages, list):
        return _from_messages(messages)
    raise SessionError(
        "This is neither a chatterm session nor a list of messages; export one with --format json."
    )


def _shown(value: object) -> str:
    """Return a value as JSON writes it, cut to 40 characters."""
    return one_line(json.dumps(value), 40)


def _other_version(version: object) -> str:
    """Return why a file of this version cannot be read."""
    if not _is_int(version):
        return f'The file does not give its format version; it must contain "version": {VERSION}.'
    return f"The file has format version {version}; this chatterm reads version {VERSION}. Update chatterm."


class _Reader:
    """Takes checked values out of a JSON object."""

    def __init__(self, where: str, data: object) -> None:
        if not isinstance(data, dict):
            raise SessionError(f"{where} must be an object.")
        self.where = where
        self.data = data

    def take(self, name: str, default: Any, valid: Callable[[Any], bool], what: str) -> Any:
        value = self.data.get(name, default)
        if not valid(value):
            state = f"is {_shown(value)}" if name in self.data else "is missing"
            raise SessionError(f"{self.where}: {name} {state}; it must be {what}.")
        return value

    def text(self, name: str, default: str | None = "") -> str:
        value: str = self.take(name, default, lambda v: isinstance(v, str), "text")
        return value

    def number(self, name: str) -> float:
        return float(self.take(name, 0.0, is_number, "a number"))

    def moment(self, name: str) -> float:
        what = "seconds since 1970"
        return float(self.take(name, 0.0, lambda v: is_number(v) and 0 <= v <= LATEST, what))

    def ids(self, name: str) -> list[int]:
        def valid(value: object) -> bool:
            return isinstance(value, list) and all(_is_int(id) and 0 <= id <= _LARGEST for id in value)

        value: list[int] = self.take(name, [], valid, "a list of token ids")
        return value


def _session(reader: _Reader) -> SessionInfo:
    return SessionInfo(
        title=one_line(reader.text("title"), 200),
        model=one_line(reader.text("model")),
        system=reader.take("system", None, lambda v: v is None or isinstance(v, str), "text or null"),
        think=_choice(reader, "think", get_args(ThinkMode)),
        think_cache=_choice(reader, "think_cache", get_args(ThinkCache)),
        sampling=checked_sampling(reader.take("sampling", {}, lambda v: isinstance(v, dict), "an object")),
        created=reader.moment("created"),
        updated=reader.moment("updated"),
        documents=_documents(reader),
    )


def _documents(reader: _Reader) -> tuple[Document, ...]:
    found = reader.take("documents", [], lambda v: isinstance(v, list), "a list")
    readers = [_Reader(f"document {number}", record) for number, record in enumerate(found, 1)]
    return tuple(Document(one_line(one.text("name", None), 64), one.text("text", None)) for one in readers)


def _choice(reader: _Reader, name: str, choices: tuple[str, ...]) -> Any:
    return reader.take(name, choices[0], lambda v: v in choices, f"one of {', '.join(choices)}")


def checked_sampling(values: dict[str, Any]) -> dict[str, Any]:
    """Return a file's sampling settings, checked. Raises SessionError for an unknown setting or a wrong value."""
    from engine.params import SamplingParams

    if "stop" in values:
        stop = values["stop"]
        if not isinstance(stop, list) or not all(isinstance(text, str) for text in stop):
            raise SessionError("sampling: stop must be a list of strings.")
        values = values | {"stop": tuple(stop)}
    whole = ("top_k", "seed", "max_tokens")
    known = [field.name for field in fields(SamplingParams) if field.name not in _OF_REQUESTS]
    if not set(values) <= set(known):
        raise SessionError(f"sampling contains an unknown setting; choose one of: {', '.join(known)}.")
    for name, value in values.items():
        if name == "stop_repetition":
            if not isinstance(value, bool):
                raise SessionError(f"sampling: {name} is {_shown(value)}; it must be true or false.")
            continue
        if name in ("stop", "speculation") or (value is None and name in ("seed", "max_tokens")):
            continue
        if not (_is_int(value) if name in whole else is_number(value)):
            raise SessionError(f"sampling: {one_line(name, 40)} is {_shown(value)}; it must be a number.")
    try:
        SamplingParams(**values)
    except EngineError as error:
        raise SessionError(f"sampling: {error}") from error
    return values


def _exchange(reader: _Reader) -> Exchange:
    def valid_id(value: Any) -> bool:
        return _is_int(value) and 0 < value <= _LARGEST

    token_ids = reader.ids("token_ids")

    def valid_span(value: Any) -> bool:
        if not isinstance(value, list) or len(value) != 2 or not all(map(_is_int, value)):
            return False
        return bool(0 <= value[0] <= value[1] <= len(token_ids))

    def valid_stats(value: object) -> bool:
        return isinstance(value, dict) and all(map(is_number, value.values()))

    reasons = tuple(reason.value for reason in FinishReason)
    calls, results = checked_called(reader.data, reader.where)
    return Exchange(
        id=reader.take("id", None, valid_id, "a whole number of 1 or more"),
        parent=reader.take(
            "parent", None, lambda v: v is None or valid_id(v), "the id of an exchange or null"
        ),
        user=reader.text("user", None),
        text=reader.text("text"),
        reasoning=reader.text("reasoning"),
        token_ids=token_ids,
        shown=tuple(reader.take("shown", [0, 0], valid_span, "a start and an end within token_ids")),
        opening=reader.ids("opening"),
        # Without a reason it would pass for an answer of our own journal, whose tokens are trusted.
        finish_reason=reader.take(
            "finish_reason", None, lambda v: v is None or v in reasons, f"null or one of {', '.join(reasons)}"
        )
        or FinishReason.CANCELLED.value,
        stats=reader.take("stats", {}, valid_stats, "an object of numbers"),
        model=one_line(reader.text("model")),
        created=reader.moment("created"),
        thinking_s=reader.number("thinking_s"),
        seed=reader.take("seed", None, is_count, "a whole number or null"),
        ends_at=reader.take("ends_at", None, is_count, "a whole number or null"),
        calls=calls,
        results=results,
        is_pinned=reader.take("is_pinned", False, lambda v: isinstance(v, bool), "true or false"),
        compaction=_compaction(reader),
    )


def _compaction(reader: _Reader) -> Compaction | None:
    found = reader.take("compaction", None, lambda v: v is None or isinstance(v, dict), "an object or null")
    if found is None:
        return None
    inner = _Reader(f"{reader.where}: compaction", found)
    return Compaction(
        inner.take("summary", None, lambda v: v is None or isinstance(v, str), "text or null"),
        inner.take("without_files", False, lambda v: isinstance(v, bool), "true or false"),
    )


def _check_tree(exchanges: Iterable[Exchange]) -> None:
    known: set[int] = set()
    for exchange in sorted(exchanges, key=lambda e: e.id):
        if exchange.id in known:
            raise SessionError(f"Two exchanges have the id {exchange.id}; ids must be different.")
        if exchange.parent is not None and exchange.parent not in known:
            raise SessionError(
                f"exchange {exchange.id}: its parent {exchange.parent} is missing; it must be an earlier exchange."
            )
        known.add(exchange.id)


def _from_messages(messages: list[Any]) -> tuple[SessionInfo, Tree]:
    """Return a session made of these messages. It has no token ids: whoever continues it tokenises the texts."""
    info, tree = SessionInfo(), Tree()
    for number, message in enumerate(messages, 1):
        reader = _Reader(f"message {number}", message)
        text = reader.text("content", None)
        match reader.text("role", None):
            case "system" | "developer":
                info.system = f"{info.system}\n\n{text}" if info.system else text
            case "user":
                tree.add(tree.head, text, "").finish_reason = FinishReason.CANCELLED.value
            case "assistant" if tree.head is not None:
                answer = tree[tree.head]
                answer.text = f"{answer.text}\n\n{text}" if answer.text else text
                answer.finish_reason = FinishReason.EOS.value
            case "assistant":
                raise SessionError(f"message {number}: an answer comes before the first user message.")
            case role:
                raise SessionError(
                    f"message {number}: role is {_shown(role)}; it must be system, user or assistant."
                )
    if tree.head is None:
        raise SessionError("The file contains no user message.")
    info.title = make_title(tree.exchanges[0].user)
    return info, tree


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def is_count(value: object) -> bool:
    """Return whether `value` is None or a non-negative integer that the database can hold (below 2**63)."""
    return value is None or (_is_int(value) and 0 <= value < 2**63)


def is_number(value: object) -> bool:
    """Return whether `value` is a number (and no boolean) that can be calculated with: below 1e300 in magnitude."""
    # not isfinite: JSON may hold integers that are too large for a float
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
