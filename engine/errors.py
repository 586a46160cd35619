"""The errors of engine/ that a person can cause."""


class EngineError(Exception):
    """A request that cannot be served. The message is one line: what was wrong, then what to do next."""


class ContextFullError(EngineError):
    """A prompt that does not fit into the context. Nothing was computed and nothing was dropped.

    `needed` and `available` count tokens.
    """

    def __init__(self, message: str, *, needed: int, available: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available
