"""The transport to an MCP server at an address: streamable HTTP with no response longer than MOST_BODY.

The SDK's own transport puts no limit on a response that is one JSON text.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from chatterm.tools.mcp.config import Server
from chatterm.tools.mcp.stdio_transport import MOST_LINE
from chatterm.tools.tool import ToolError

if TYPE_CHECKING:
    from httpx2 import AsyncByteStream, Request, Response
    from mcp.client._transport import TransportStreams

MOST_BODY = MOST_LINE
"""Bytes of the response to one message, and of one event of the endless stream that a server may send."""
PACE_S = 1.0
"""Least seconds between two openings of that stream: the server itself sets how soon it is reopened."""


@contextlib.asynccontextmanager
async def open_http(server: Server) -> "AsyncIterator[TransportStreams]":
    """Open a transport for the SDK's client.

    Raises ToolError (in a group) if the server sends too much or compressed data, or refuses the key.
    Redirects to another origin are not followed by the SDK.
    """
    from httpx2 import AsyncByteStream
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared._httpx_utils import create_mcp_http_client

    logging.getLogger("mcp").setLevel(logging.CRITICAL)  # its lines would corrupt the screen
    loop = asyncio.get_running_loop()
    wrong: asyncio.Future[str] = loop.create_future()

    async def watch() -> None:
        raise ToolError(f"{server.name} {await wrong}")

    async def give_up(why: str) -> None:
        """Make `watch` raise, and never return: the SDK would swallow an error raised here."""
        if not wrong.done():
            wrong.set_result(why)
        await loop.create_future()

    next_get = 0.0

    async def asked(request: "Request") -> None:
        nonlocal next_get
        if request.method == "GET":
            wait, next_get = next_get - loop.time(), max(next_get, loop.time()) + PACE_S
            await asyncio.sleep(max(wait, 0))

    async def answered(response: "Response") -> None:
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            await give_up("compresses its answers, although it was asked not to")
        if response.status_code in (401, 403):
            key = (
                "the key in its headers"
                if server.headers
                else "requests without a key (mcp add --header sends one)"
            )
            await give_up(f"refuses {key}: {response.status_code}")
        kind = response.headers.get("content-type", "").lower()
        is_endless = response.request.method == "GET" and kind.startswith("text/event-stream")
        if not is_endless and isinstance(response.stream, AsyncByteStream):
            response.stream = _bounded(response.stream, MOST_BODY, give_up)
            is_forgotten = response.status_code == 404 and "mcp-session-id" in response.request.headers
            if response.status_code >= 400 and not is_forgotten:
                response.stream = _as_mcp_error(response.stream, response.status_code)
                response.headers["content-type"] = "application/json"

    # A small compressed response may be huge once decompressed.
    headers = {"Accept-Encoding": "identity", **server.headers}
    async with asyncio.TaskGroup() as tasks, create_mcp_http_client(headers=headers) as http:
        http.event_hooks = {"request": [asked], "response": [answered]}
        watching = tasks.create_task(watch())
        try:
            async with streamable_http_client(
                server.url, http_client=http, max_sse_event_size=MOST_BODY
            ) as streams:
                yield streams
        finally:
            watching.cancel()


def _bounded(
    stream: "AsyncByteStream", most: int, give_up: Callable[[str], Awaitable[None]]
) -> "AsyncByteStream":
    """Return `stream` with a call of `give_up` once it exceeds `most` bytes."""
    from httpx2 import AsyncByteStream

    class Bounded(AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            left = most
            async for chunk in stream:
                left -= len(chunk)
                if left < 0:
                    await give_up(f"sent an answer of more than {most >> 20} MB")
                yield chunk

        async def aclose(self) -> None:
            await stream.aclose()

    return Bounded()


def _as_mcp_error(stream: "AsyncByteStream", code: int) -> "AsyncByteStream":
    """Return the body of an HTTP error response as an MCP error: unchanged if it is one, else one that has the status
    code, which the SDK would not report."""
    from httpx2 import AsyncByteStream

    class ErrorStream(AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            body = b"".join([chunk async for chunk in stream])
            yield body if _is_error(body) else json.dumps(_error(code)).encode()

        async def aclose(self) -> None:
            await stream.aclose()

    return ErrorStream()


def _is_error(body: bytes) -> bool:
    """Return whether `body` is a JSON-RPC error."""
    try:
        told = json.loads(body)
    except (ValueError, RecursionError):
        return False
    error = told.get("error") if isinstance(told, dict) else None
    return isinstance(error, dict) and type(error.get("code")) is int and type(error.get("message")) is str


def _error(code: int) -> dict[str, Any]:
    """Return a JSON-RPC error with the SDK's code for this HTTP status, which its message names."""
    try:
        phrase = f" {HTTPStatus(code).phrase}"
    except ValueError:
        phrase = ""
    number = -32601 if code == 404 else -32603
    return {"jsonrpc": "2.0", "id": None, "error": {"code": number, "message": f"it answered {code}{phrase}"}}
