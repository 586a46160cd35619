"""Reads the body of a request, of bounded size and in bounded time."""

import asyncio
from typing import Any

from chatterm.server.http.limits import Limits
from chatterm.server.http.sse import ClientGone, Receive
from chatterm.server.service import RequestError


async def read_body(scope: Any, receive: Receive, limits: Limits) -> bytes:
    """Read a body. Raises RequestError: 413 if it is too large, 408 if it takes too long, 415 if it is compressed."""
    headers = dict(scope["headers"])
    if headers.get(b"content-encoding", b"identity") != b"identity":
        raise RequestError(
            415, "invalid_request_error", "Compressed bodies are not supported; send plain JSON."
        )
    size = headers.get(b"content-length", b"")
    if size.isdigit() and int(size[:20]) > limits.body_bytes:
        raise _too_large(limits)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                body += message.get("body", b"")
                if len(body) > limits.body_bytes:
                    raise _too_large(limits)
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise RequestError(
            408, "invalid_request_error", f"The body did not arrive within {limits.body_s:g} seconds."
        ) from None


def _too_large(limits: Limits) -> RequestError:
    most = limits.body_bytes / 2**20
    return RequestError(413, "invalid_request_error", f"The body is larger than {most:g} MiB; send less.")
