"""Access control: the API key, and the protection of a local server from web pages in a browser."""

from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

import msgspec

from chatterm.backends.remote.address import is_loopback
from chatterm.server.http.errors import error_for, error_headers
from chatterm.server.http.keys import ApiKeys
from chatterm.server.http.request_log import ENTRY
from chatterm.server.service import RequestError

App = Callable[[Any, Any, Any], Awaitable[None]]

_OPEN = ("/health", "/health/live", "/health/ready")
"""Paths that need no key."""


class Guard:
    """Guards every path. With keys, their holders may call; without, programs of this machine may, but no web pages.

    A page in a browser can send requests to this machine, even under its own domain name if that is made to point here
    (DNS rebinding). So, without a key, `Host` must be a name of this machine, and `Origin` the server itself.
    """

    def __init__(self, app: App, keys: ApiKeys | None) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and (error := self._refusal(scope)) is not None:
            scope[ENTRY].refuse(error)
            await send_json(send, error.status, error_for(scope["path"], error), error_headers(error))
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Any) -> RequestError | None:
        headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name, value)
        if self._keys is not None:
            kind, _, given = headers.get(b"authorization", b"").partition(b" ")
            name = self._keys.name_of(given.strip()) if kind.lower() == b"bearer" else None
            if name:
                scope[ENTRY].client = f"{scope[ENTRY].client} {name}".strip()
            if name is not None or scope["path"] in _OPEN:
                return None
            return RequestError(
                401,
                "authentication_error",
                "The API key is missing or wrong; send it as Authorization: Bearer KEY.",
                code="invalid_api_key",
            )
        host = _host(headers.get(b"host", b""))
        if host is None or not is_loopback(host):
            return _forbidden("The Host header does not name this machine; use 127.0.0.1 or localhost.")
        origin = headers.get(b"origin")
        if origin is not None and origin.lower() != b"http://" + headers[b"host"].lower():
            return _forbidden("Web pages may not use this server; ask it from a program of this machine.")
        return None


def _forbidden(message: str) -> RequestError:
    return RequestError(403, "permission_error", message, code="forbidden")


@lru_cache(256)
def _host(header: bytes) -> str | None:
    try:
        return urlsplit(f"//{header.decode('ascii')}").hostname
    except ValueError:
        return None


async def send_json(send: Any, status: int, body: Any, headers: list[tuple[bytes, bytes]]) -> None:
    """Send a response that ends the connection: nothing more of the request is read."""
    kept = [(b"content-type", b"application/json"), (b"connection", b"close"), *headers]
    data = msgspec.json.encode(body)
    kept.append((b"content-length", str(len(data)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": kept})
    await send({"type": "http.response.body", "body": data, "more_body": False})
