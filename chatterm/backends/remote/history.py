"""The conversation as a server is asked it: the same messages, byte for byte, in every request."""

from collections.abc import Iterable, Sequence
from hashlib import sha256

from chatterm.backends.backend import Exchange, Message


def history(system: str | None, path: Iterable[Exchange]) -> list[Message]:
    """A system message or none, then messages of the user and the assistant by turns, without what was thought.

    Where an answer has no text (it was stopped at once), the messages around it become one: some templates take
    nothing else.
    """
    messages = [Message("system", system)] if system else []
    for exchange in path:
        messages = with_user(messages, exchange.user)
        if exchange.text:
            messages.append(Message("assistant", exchange.text))
    return messages


def with_user(messages: Sequence[Message], text: str) -> list[Message]:
    """`messages` and what the user says next."""
    if messages and messages[-1].role == "user":
        return [*messages[:-1], Message("user", f"{messages[-1].content}\n\n{text}")]
    return [*messages, Message("user", text)]


def cache_key(messages: Sequence[Message]) -> str:
    """A name for conversations that begin like this one: its requests belong where their beginning is cached."""
    first = next((number for number, message in enumerate(messages) if message.role == "user"), 0)
    begins = "\0".join(message.content for message in messages[: first + 1])
    return "chatterm-" + sha256(begins.encode("utf-8", "replace")).hexdigest()[:32]
