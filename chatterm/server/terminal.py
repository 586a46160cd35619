"""The conversation of an attached terminal."""

from typing import Any


class Terminal:
    def __init__(self, host: Any, pump: Any) -> None: ...
    def close(self) -> None: ...
    def begin(self, call: Any, stream: Any) -> Any:
        raise NotImplementedError
