"""What a terminal and the engine process say to each other: the calls of a Backend, and what comes of them."""

from typing import Any

from msgspec import Struct

from chatterm.backends.backend import (
    ChatOptions,
    Exchange,
    Figures,
    ModelInfo,
    Outcome,
    Request,
    ThinkCache,
    ThinkMode,
    TokenEvent,
    TurnStats,
)
from engine.events import FinishReason


class Welcome(Struct, frozen=True):
    """What a client is told that has said who it is."""

    pid: int
    options: ChatOptions
    """With which models are loaded."""


class LoadedModel(Struct, frozen=True, kw_only=True):
    """A model in the engine process, for people."""

    name: str
    device: str
    weight_bytes: int
    kv_bytes: int
    context_length: int
    users: int
    running: int
    """Answers that run for requests."""
    loaded_at: float
    """Seconds since the epoch."""
    keep_alive_s: float | None
    keep_alive_left_s: float | None
    """Seconds until it is unloaded; None: somebody uses it, or it stays."""


class Status(Struct, frozen=True, kw_only=True):
    """The server, for people."""

    pid: int
    version: str
    uptime_s: float
    address: str
    """Where the web API listens; "" where there is none."""
    terminals: int
    models: tuple[LoadedModel, ...]


class Open(Struct, frozen=True):
    """Begin with a model: the first call of a terminal, and again for another one."""

    model: str
    system: str | None
    think: ThinkMode
    think_cache: ThinkCache
    sampling: dict[str, Any]


class Answered(Struct, frozen=True, array_like=True):
    """How an answer stands: with the first tokens, and when it is over."""

    outcome: Outcome | None


class Tokens(Struct, frozen=True, array_like=True, tag="t"):
    """The next tokens of an answer, and its figures behind them."""

    events: list[TokenEvent]
    stats: TurnStats


class Begun(Struct, frozen=True, array_like=True, tag="b"):
    """An answer begins: what it was before its first token."""

    outcome: Outcome


class Parts(Struct, frozen=True, array_like=True, tag="p"):
    """What came of several answers, in order."""

    parts: list["OnePart"]


class OnePart(Struct, frozen=True, array_like=True):
    """A part of answer `index`: one of the three."""

    index: int
    token: TokenEvent | None = None
    outcome: Outcome | None = None
    error: str | None = None


class Wanted(Struct, frozen=True, array_like=True, tag="w"):
    """The next request is wanted."""


Said = Tokens | Begun | Parts | Wanted


class State(Struct, frozen=True):
    """What a backend knows of itself after a call."""

    info: ModelInfo | None
    used_tokens: int
    last: Outcome | None
    value: Any = None
    """What the call returns."""


class Look(Struct, frozen=True):
    """What can be looked at while anything else goes on."""

    figures: Figures | None
    title: str | None


__all__ = ["Exchange", "FinishReason", "Request"]
