"""Finds the sampled ids of an answer that a client sends back as text with the whole conversation.

A tokenizer may split a text into other tokens than the model generated. With the sampled ids in its place, the next
prompt of such a client continues from the rows that the answer left in the cache.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import sha256
from json import dumps
from threading import Lock
from typing import Any

from engine.conversation.turns import Turn

MOST_TOKENS = 4_000_000
"""The limit on the tokens of all answers remembered, about 200 MB; the least recently used are forgotten."""

BESIDE = 50
"""What an answer counts in addition to its tokens: it takes 1 to 2 kB, and about 45 bytes per token."""

Calls = Sequence[tuple[str, Any]]
"""Names of functions, and their arguments as JSON values."""


class AnswerPlace:
    """A hash of everything before an answer: the messages, and the ids of earlier answers."""

    def __init__(
        self, *, tools: Sequence[Mapping[str, Any]] = (), names: Mapping[str, Any] | None = None
    ) -> None:
        self._hash = sha256(dumps([list(tools), dict(names or {})], sort_keys=True, default=repr).encode())

    def add(self, message: Mapping[str, Any]) -> None:
        """Add a message known only as text."""
        self._put(b"m", dumps(message, sort_keys=True, default=repr).encode())

    def add_ids(self, ids: Sequence[int]) -> None:
        """Add an answer with these ids."""
        self._put(b"i", b"".join(id.to_bytes(4, "little") for id in ids))

    def key(self, text: str, calls: Calls = ()) -> bytes:
        """Return the key of an answer at this place with this text and these calls.

        Arguments are compared as JSON values, however they are written.
        """
        named = self._hash.copy()
        named.update(b"a" + (text.strip() if calls else text).encode("utf-8", "surrogatepass"))
        if calls:
            made = [[name, _plain(arguments)] for name, arguments in calls]
            named.update(b"\0c" + dumps(made, sort_keys=True).encode())
        return named.digest()

    def _put(self, kind: bytes, data: bytes) -> None:
        self._hash.update(kind + len(data).to_bytes(8, "little") + data)


class Recall:
    """Remembers answers by their key, up to a number of tokens. Thread-safe."""

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._most = most_tokens
        self._held = 0
        self._turns: OrderedDict[bytes, Turn] = OrderedDict()
        self._lock = Lock()

    def note(self, key: bytes, turn: Turn) -> None:
        """Remember a finished answer."""
        with self._lock:
            if (before := self._turns.pop(key, None)) is not None:
                self._held -= _weight(before)
            self._turns[key] = turn
            self._held += _weight(turn)
            while self._held > self._most:
                self._held -= _weight(self._turns.popitem(last=False)[1])

    def find(self, key: bytes) -> Turn | None:
        """Return the turn last noted under this key; None if there is none."""
        with self._lock:
            if (turn := self._turns.get(key)) is not None:
                self._turns.move_to_end(key)
            return turn


def _plain(value: Any) -> Any:
    """Return a JSON value without differences that rewriting it may introduce: 1.0 becomes 1."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _weight(turn: Turn) -> int:
    """Return what a turn counts towards the limit: a short one takes memory, too."""
    return len(turn.answer.token_ids) + BESIDE
