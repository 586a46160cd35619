"""The errors of engine/ that a user can cause."""

import re

from models.errors import NoRoomError


class EngineError(Exception):
    """A request that cannot be served. The message is one line: what was wrong, then what to do next."""


class OutOfRoomError(EngineError, NoRoomError):
    """There is too little memory for a model's KV cache."""


class GpuLostError(EngineError):
    """The GPU is lost to this process; another process may still use it."""


class ConstraintError(EngineError):
    """A constraint is too complex, which became apparent only during the answer."""


class ContextFullError(EngineError):
    """A prompt that does not fit into the context. Nothing was computed and nothing was dropped.

    `needed` and `available` count tokens.
    """

    def __init__(self, message: str, *, needed: int, available: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available


def check_device(name: str) -> None:
    """Raise EngineError unless `name` is a valid name of a device, whether or not there is such a device."""
    if re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", name) is None:
        raise EngineError(
            f"Unknown device {name[:40]!r}; it must be auto, cpu, cuda, or one GPU of several, as in cuda:1."
        )


def check_room(needed: int, available: int, *, goes_on: bool) -> None:
    """Raise ContextFullError if `needed` tokens exceed `available`; `goes_on`: to continue an answer."""
    if needed <= available:
        return
    message = (
        f"This message does not fit: the conversation would be {needed:,} tokens long, "
        f"{needed - available:,} more than the context of {available:,} allows. "
        "Shorten it, undo earlier messages, or start with a larger --context."
    )
    if goes_on:
        message = (
            f"The answer cannot continue: the context of {available:,} tokens is full. Undo earlier "
            "messages, or start with a larger --context."
        )
    raise ContextFullError(message, needed=needed, available=available)
