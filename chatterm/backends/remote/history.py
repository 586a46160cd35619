"""The conversation as it is sent to a server: the same messages, byte for byte, in every request."""

import json
import re
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Any

from chatterm.backends.backend import Exchange, Message
from chatterm.backends.remote.dialects.base import Entry
from chatterm.backends.remote.dialects.calls import CallingMessage, CallResult, HistoryCall

_UNANSWERED = "This was not run."
"""The result given for a call that has none: APIs require a result for each call."""
_OTHER = re.compile(r"[^A-Za-z0-9_-]")


def history(system: str | None, path: Iterable[Exchange]) -> list[Entry]:
    """Return an optional system message, then alternating user and assistant messages, or results of tool calls.

    If an answer is empty (it was stopped at once), the messages around it are merged: some templates accept nothing
    else. Thinking is left out, except with calls. Calls are numbered from the start, so their ids are the same in every
    request and match their results, whatever ids the server gave them.
    """
    messages: list[Entry] = [Message("system", system)] if system else []
    open_calls: list[HistoryCall] = []
    count = 0
    for exchange in path:
        told = [result.text for result in exchange.results]
        messages += [
            CallResult(call.id, call.name, told[number] if number < len(told) else _UNANSWERED)
            for number, call in enumerate(open_calls)
        ]
        if not (exchange.results and open_calls):
            messages = with_user(messages, exchange.user)
        open_calls = [_asking(count + n, call.name, call.arguments) for n, call in enumerate(exchange.calls)]
        count += len(open_calls)
        if open_calls:
            messages.append(CallingMessage(exchange.text, exchange.reasoning, open_calls))
        elif exchange.text:
            messages.append(Message("assistant", exchange.text))
    return messages


def with_user(messages: Sequence[Entry], text: str) -> list[Entry]:
    """Return `messages` with the user's next message."""
    last = messages[-1] if messages else None
    if isinstance(last, Message) and last.role == "user":
        return [*messages[:-1], Message("user", f"{last.content}\n\n{text}")]
    return [*messages, Message("user", text)]


def cache_key(messages: Sequence[Entry]) -> str:
    """Return a key for conversations with the same beginning: servers can route their requests to the cache that has
    it.
    """
    first = next(
        (n for n, said in enumerate(messages) if isinstance(said, Message) and said.role == "user"), 0
    )
    begins = "\0".join(message.content for message in messages[: first + 1])
    return "chatterm-" + sha256(begins.encode("utf-8", "replace")).hexdigest()[:32]


def _asking(number: int, name: str, arguments: str) -> HistoryCall:
    """Return a call in a form that every API accepts: an id of nine letters and digits (some templates insist), and {}
    in place of arguments that are not an object, as the call's result says.
    """
    return HistoryCall(
        f"call{number:05}",
        _OTHER.sub("_", name)[:64] or "unknown",
        arguments if _is_object(arguments) else "{}",
    )


def _is_object(text: str) -> bool:
    def refuse(constant: str) -> Any:
        raise ValueError(constant)  # NaN and the like, which other readers reject

    try:
        return isinstance(json.loads(text, parse_constant=refuse), dict)
    except (ValueError, RecursionError):
        return False
