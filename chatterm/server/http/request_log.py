"""The log of requests: one line for each, and one for the fields of a client's requests that are ignored."""

import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from chatterm.server.logs import write
from chatterm.server.service import Generation, RequestError

ENTRY = "chatterm.entry"
"""The key of a request's entry in its ASGI scope."""
_MOST_NOTED = 10_000
"""Pairs of a client and a field that are remembered; after that they are logged again."""
_POLLED = ("/health", "/health/live", "/health/ready", "/metrics")


@dataclass(slots=True)
class RequestEntry:
    """What is logged of one request."""

    method: str
    path: str
    client: str
    """Its address, and the name of its key."""
    began: float = field(default_factory=monotonic)
    first_token: float | None = None
    status: int = 200
    why: str | None = None
    """Why it was refused, or failed."""
    model: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    answer_tokens: int | None = None
    prompts: list[Any] | None = None
    """Its prompts, if they are logged."""

    @classmethod
    def of(cls, scope: Any) -> "RequestEntry":
        """Begin the entry of a request."""
        return cls(scope["method"], scope["path"], scope["client"][0] if scope.get("client") else "")

    def refuse(self, error: RequestError) -> None:
        """Note that the request ends with this error."""
        self.status, self.why = error.status, error.message


class RequestLog:
    """Logs the requests of a server."""

    def __init__(self, has_prompts: bool = False) -> None:
        """`has_prompts`: whether the texts of prompts are logged, too."""
        self._has_prompts = has_prompts
        self._noted: set[tuple[str, str]] = set()

    def ignored(self, entry: RequestEntry, names: Collection[str]) -> None:
        """Log the ignored fields of a request, once for each client."""
        new = sorted(name for name in names if (entry.client, name) not in self._noted)
        if not new:
            return
        if len(self._noted) > _MOST_NOTED:
            self._noted.clear()
        self._noted.update((entry.client, name) for name in new)
        write(logging.INFO, "fields ignored", client=entry.client, path=entry.path, fields=new)

    def unenforced(self, entry: RequestEntry, names: Collection[str], fits: bool | None) -> None:
        """Log the constraints of a schema that were not enforced, and whether the answer keeps them; None: unknown."""
        level = logging.INFO if fits else logging.WARNING
        write(level, "constraints not enforced", client=entry.client, names=sorted(names), kept=fits)

    def asked(self, entry: RequestEntry, generations: Collection[Generation]) -> None:
        """Note the prompts of a request, if they are logged."""
        if self._has_prompts:
            entry.prompts = [one.prompt if one.messages is None else one.messages for one in generations]

    def finished(self, entry: RequestEntry) -> None:
        """Log a request that is over."""
        level = logging.WARNING if entry.status >= 500 else logging.INFO
        if entry.path in _POLLED and entry.status == 200:
            level = logging.DEBUG
        now, first = monotonic(), entry.first_token
        write(
            level,
            "request",
            client=entry.client,
            method=entry.method,
            path=entry.path,
            status=entry.status,
            model=entry.model,
            prompt_tokens=entry.prompt_tokens,
            cached_tokens=entry.cached_tokens,
            answer_tokens=entry.answer_tokens,
            first_token_ms=None if first is None else round((first - entry.began) * 1000),
            total_ms=round((now - entry.began) * 1000),
            why=entry.why,
            prompts=entry.prompts,
        )
