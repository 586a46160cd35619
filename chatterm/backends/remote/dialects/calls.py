"""Tool calls: as a conversation's history has them, and assembled from the parts that a server sends."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chatterm.backends.backend import ToolCall
from chatterm.backends.remote.thinking import whole

MOST_CALLS = 64
"""Most calls of one answer."""
MOST_CHARACTERS = 1_000_000
"""Most characters of the arguments of all its calls."""
_MOST_NAME = 200


@dataclass(frozen=True, slots=True)
class HistoryCall:
    """A call in the history: its arguments are a JSON object, and every API accepts its name."""

    id: str
    name: str
    arguments: str

    @property
    def given(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.arguments)
        return found


@dataclass(frozen=True, slots=True)
class CallingMessage:
    """An answer that calls tools."""

    content: str
    reasoning: str
    calls: Sequence[HistoryCall]


@dataclass(frozen=True, slots=True)
class CallResult:
    """The result of a call."""

    id: str
    name: str
    content: str


@dataclass(frozen=True, slots=True)
class CallPart:
    """A part of a call, from one message of a stream."""

    key: int | str | None = None
    """Identifies the call within its answer; None: a part with a name begins a call, others continue the latest."""
    id: str = ""
    name: str = ""
    arguments: str = ""
    is_whole: bool = False
    """Whether this is the whole call and replaces earlier parts."""
    is_again: bool = False
    """Whether this repeats the whole answer, so that it counts only if no other part came."""


@dataclass(slots=True)
class _Call:
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)
    size: int = 0


class CallAssembler:
    """Assembles the calls of one answer. No number, position or length that a server sends is trusted."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._by_key: dict[int | str, _Call] = {}
        self._size = 0
        self.problem = ""
        """Why the answer cannot continue, to follow the name of the server; "" if it can."""

    def __bool__(self) -> bool:
        return bool(self._calls)

    def take(self, parts: Iterable[CallPart]) -> list[str]:
        """Add the parts of one message; return the new text in each, to be counted."""
        is_first = not self._calls
        return [self._take(part) for part in parts if is_first or not part.is_again]

    def made(self) -> list[ToolCall]:
        """Return the calls so far. Their arguments are whatever the model wrote."""
        return [
            ToolCall(whole(call.name, is_end=True), whole("".join(call.arguments), is_end=True))
            for call in self._calls
        ]

    def _take(self, part: CallPart) -> str:
        call = self._find_call(part)
        if call is None:
            self.problem = f"calls more than {MOST_CALLS} tools at once"
            return ""
        call.id = call.id or part.id
        if part.name != call.name:  # some servers repeat it in every part, others cut it in two
            call.name = (part.name if part.is_whole and part.name else call.name + part.name)[:_MOST_NAME]
        is_known = part.is_whole and call.size > 0
        if is_known and part.arguments:
            self._size -= call.size
            call.arguments, call.size = [], 0
        call.arguments.append(part.arguments)
        call.size += len(part.arguments)
        self._size += len(part.arguments)
        if self._size > MOST_CHARACTERS:
            self.problem = f"calls tools with more than {MOST_CHARACTERS:,} characters"
        return "" if is_known else whole(part.name + part.arguments, is_end=True)

    def _find_call(self, part: CallPart) -> _Call | None:
        """Return the call that a part belongs to; None if there are too many."""
        if part.key is not None:
            known = self._by_key.get(part.key)
        else:
            known = self._calls[-1] if self._calls and not part.name else None
        is_other = known is not None and part.name and part.id and known.id and part.id != known.id
        if known is not None and not is_other:
            return known
        if len(self._calls) >= MOST_CALLS:
            return None
        made = _Call()
        self._calls.append(made)
        if part.key is not None:
            self._by_key[part.key] = made
        return made


def arguments_text(value: object) -> str:
    """Return arguments as JSON text: servers send either text or the object itself."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False) if isinstance(value, Mapping) else ""
