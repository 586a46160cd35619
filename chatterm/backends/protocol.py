"""The messages between a terminal and the engine process: the calls of a Backend, and their results."""

from functools import cache
from hashlib import sha256
from pathlib import Path

from msgspec import Raw, Struct

from chatterm.backends.backend import ChatOptions, Figures, ModelInfo, Outcome, TokenEvent, TurnStats
from chatterm.ipc.messages import Failed
from models.progress import Progress


@cache
def agreed() -> str:
    """Return a hash of everything both sides must agree on: the sources that define the messages."""
    root = Path(__file__).parents[2]
    parts = ("protocol", "backend", "calls", "documents", "exchange", "base", "process")
    others = ("chatterm/ipc/messages.py", "engine/events.py", "engine/params.py", "models/progress.py")
    paths = [*(f"chatterm/backends/{part}.py" for part in parts), *others]
    return sha256(b"".join((root / path).read_bytes() for path in paths)).hexdigest()[:16]


class Hello(Struct, frozen=True):
    """The first call of every client."""

    agreed: str
    kind: str
    """"terminal", "web" or "command"."""
    pid: int = 0
    address: str = ""
    """Where the web process listens, if it is the client."""


class HelloReply(Struct, frozen=True):
    """The reply to Hello."""

    pid: int
    options: ChatOptions
    """The options that models are loaded with."""
    keep_alive_s: float = -1.0
    """Seconds that an unused model stays loaded; below 0: forever."""
    ends_unused: bool = False
    """Whether the server was left behind by `chatterm run`: it ends once no model is loaded and nothing is attached."""


class LoadedModel(Struct, frozen=True, kw_only=True):
    """A model in the engine process, as shown to people."""

    name: str
    device: str
    weight_bytes: int
    """Weights, plus everything that a draft model takes."""
    kv_bytes: int
    context_length: int
    users: int
    running: int
    """Running answers to API requests."""
    loaded_at: float
    """Seconds since the epoch."""
    keep_alive_s: float | None
    keep_alive_left_s: float | None
    """Seconds until it is unloaded; None: it is in use, or it stays."""


class ServerStatus(Struct, frozen=True, kw_only=True):
    """The state of the server, as shown to people."""

    pid: int
    uptime_s: float
    address: str
    """Where the web API listens; "" if there is none."""
    terminals: int
    ends_unused: bool = False
    """As in HelloReply."""
    models: tuple[LoadedModel, ...]


class Open(Struct, frozen=True):
    """Start with a model: the first call of a terminal."""

    model: str
    folder: str
    """The terminal's current folder: relative file names start there."""
    options: ChatOptions
    """The engine's own options among these are ignored."""
    keep_alive_s: float | None = None
    """Seconds that an unused model stays loaded; below 0: forever, None: the server's default."""


class Hold(Struct, frozen=True):
    """Load a model, or change how long it stays."""

    model: str
    folder: str
    """As in Open; "": the name is one of `models`, not a file."""
    keep_alive_s: float | None
    """0: unload it; below 0: it stays; None: the server's default."""


class BegunAnswer(Struct, frozen=True, array_like=True, tag="begun"):
    """An answer begins: its state before the first token."""

    outcome: Outcome


class Tokens(Struct, frozen=True, array_like=True, tag="tokens"):
    """The next tokens of an answer, and the statistics after them."""

    events: list[TokenEvent]
    stats: TurnStats


class OnePart(Struct, frozen=True, array_like=True, tag="part"):
    """An item of one of several answers: exactly one of the three fields."""

    index: int
    token: TokenEvent | None = None
    outcome: Outcome | None = None
    error: Failed | None = None


class Wanted(Struct, frozen=True, array_like=True, tag="wanted"):
    """Asks the client for the next request: it sends one, or None if there are no more."""


class Loading(Struct, frozen=True, array_like=True, tag="loading"):
    """The progress of a download or a load."""

    progress: Progress


class LiveState(Struct, frozen=True):
    """The state that can be read while anything else runs."""

    figures: Figures | None
    title: str | None


class State(Struct, frozen=True, array_like=True, tag="state"):
    """The state of a backend after a call."""

    info: ModelInfo | None
    used_tokens: int
    last: tuple[Outcome | None, ...]
    """The latest answer if the call may have changed it; otherwise empty."""
    look: LiveState
    value: Raw
    """The return value of the call."""


Said = BegunAnswer | Tokens | OnePart | Wanted | Loading | State
"""The messages of a call before its result; a State precedes a failure."""
