"""What clients that send the whole conversation back call an answer, and the ids that were sampled for it.

A tokenizer may spell a text in other tokens than the model did. With the sampled ids in its place, the next prompt of
such a client goes on from the rows that the answer left in the cache.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import sha256
from json import dumps
from threading import Lock
from typing import Any

from engine.conversation.turns import Turn

MOST_TOKENS = 4_000_000
"""Of all answers that are remembered, about 200 MB; the ones used longest ago are forgotten."""

BESIDE = 50
"""What an answer counts for beside its tokens: it takes 1 to 2 kB, and for each token some 45 bytes."""

Calls = Sequence[tuple[str, Any]]
"""Names of functions, and their arguments as JSON says them."""


class Place:
    """Everything that stands before an answer: what was said, and the ids that earlier answers had."""

    def __init__(
        self, *, tools: Sequence[Mapping[str, Any]] = (), names: Mapping[str, Any] | None = None
    ) -> None:
        self._hash = sha256(dumps([list(tools), dict(names or {})], sort_keys=True, default=repr).encode())

    def add(self, message: Mapping[str, Any]) -> None:
        """A message that is only known as text."""
        self._put(b"m", dumps(message, sort_keys=True, default=repr).encode())

    def add_ids(self, ids: Sequence[int]) -> None:
        """An answer with these ids."""
        self._put(b"i", b"".join(id.to_bytes(4, "little") for id in ids))

    def key(self, text: str, calls: Calls = ()) -> bytes:
        """The name of an answer that stands here, reads so and calls these functions with these arguments.

        Arguments are what JSON says, however it is written.
        """
        named = self._hash.copy()
        named.update(b"a" + (text.strip() if calls else text).encode("utf-8", "surrogatepass"))
        if calls:
            made = [[name, _plain(arguments)] for name, arguments in calls]
            named.update(b"\0c" + dumps(made, sort_keys=True).encode())
        return named.digest()

    def copy(self) -> "Place":
        """A place that can go on by itself."""
        twin = Place.__new__(Place)
        twin._hash = self._hash.copy()
        return twin

    def _put(self, kind: bytes, data: bytes) -> None:
        self._hash.update(kind + len(data).to_bytes(8, "little") + data)


class Recall:
    """Answers by their place and text, a bounded number of tokens of them. From any thread."""

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
        """The turn whose answer was noted under this name last."""
        with self._lock:
            if (turn := self._turns.get(key)) is not None:
                self._turns.move_to_end(key)
            return turn


def _plain(value: Any) -> Any:
    """A value of JSON without what writing it anew may change: 1.0 is 1."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _weight(turn: Turn) -> int:
    """What it counts for: a short one takes memory, too."""
    return len(turn.answer.token_ids) + BESIDE
