"""What a terminal and the engine process say to each other: the calls of a Backend, and what comes of them."""

from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from msgspec import Raw, Struct

from chatterm.backends.backend import (
    ChatOptions,
    Figures,
    ModelInfo,
    Outcome,
    TokenEvent,
    TurnStats,
)


@cache
def agreed() -> str:
    """What both sides must have in common: a name for everything that is said here."""
    root = Path(__file__).parents[2]
    files = (
        "backends/wire",
        "backends/backend",
        "backends/documents",
        "backends/exchange",
        "backends/chosen",
        "backends/process",
        "channel/messages",
    )
    paths = [*(f"chatterm/{name}.py" for name in files), "engine/events.py", "engine/params.py"]
    return sha256(b"".join((root / path).read_bytes() for path in paths)).hexdigest()[:16]


class Hello(Struct, frozen=True):
    """The first call of every client."""

    agreed: str
    kind: str
    """"terminal", "web" or "command"."""
    pid: int = 0
    address: str = ""
    """Of the web process: where it listens."""


class Welcome(Struct, frozen=True):
    """What it is told."""

    pid: int
    options: ChatOptions
    """With which models are loaded."""
    keep_alive_s: float = -1.0
    """Seconds that a model stays once nobody uses it; below 0: for ever."""
    ends_unused: bool = False
    """`chatterm run` has left it behind: it ends once no model is loaded and nobody is attached."""


class LoadedModel(Struct, frozen=True, kw_only=True):
    """A model in the engine process, for people."""

    name: str
    device: str
    weight_bytes: int
    """With all that a draft model takes."""
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
    uptime_s: float
    address: str
    """Where the web API listens; "" where there is none."""
    terminals: int
    ends_unused: bool = False
    """As in Welcome."""
    models: tuple[LoadedModel, ...]


class Open(Struct, frozen=True):
    """Begin with a model: the first call of a terminal."""

    model: str
    folder: str
    """The one that the terminal is in: names of files begin there."""
    options: ChatOptions
    """Of these the engine's own are not looked at."""
    keep_alive_s: float | None = None
    """Seconds that the model stays once nobody uses it; below 0: for ever, None: as the server was started."""


class Hold(Struct, frozen=True):
    """Load a model, or change how long it stays."""

    model: str
    folder: str
    """As in Open; "": the name is one of `models`, and no file."""
    keep_alive_s: float | None
    """0: unload it; below 0: it stays; None: as the server was started."""


class Begun(Struct, frozen=True, array_like=True, tag="begun"):
    """An answer begins: what it was before its first token."""

    outcome: Outcome


class Tokens(Struct, frozen=True, array_like=True, tag="tokens"):
    """The next tokens of an answer, and its figures behind them."""

    events: list[TokenEvent]
    stats: TurnStats


class OnePart(Struct, frozen=True, array_like=True, tag="part"):
    """What came of one of several answers: one of the three."""

    index: int
    token: TokenEvent | None = None
    outcome: Outcome | None = None
    error: tuple[str, str, dict[str, Any]] | None = None
    """What a Failed has."""


class Wanted(Struct, frozen=True, array_like=True, tag="wanted"):
    """The next request is wanted: the client feeds it, or None where there is none."""


class Loading(Struct, frozen=True, array_like=True, tag="loading"):
    """How far a download or a load is."""

    stage: str
    what: str
    done: int
    total: int | None


class Look(Struct, frozen=True):
    """What can be looked at while anything else goes on."""

    figures: Figures | None
    title: str | None


class State(Struct, frozen=True, array_like=True, tag="state"):
    """What a backend knows of itself after a call."""

    info: ModelInfo | None
    used_tokens: int
    last: tuple[Outcome | None, ...]
    """The latest answer, where the call may have changed it; else nothing."""
    look: Look
    value: Raw
    """What the call returns."""


Said = Begun | Tokens | OnePart | Wanted | Loading | State
"""What comes of a call before it is over; a State where it fails."""
