"""HTTP to one server, on a thread of its own: requests can be stopped at any moment, and callers never wait for a
socket.
"""

import asyncio
import json
import socket
import ssl
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from chatterm.backends.remote.address import Address
from chatterm.backends.remote.errors import Refused, explain_lost, refused_field, retry_delay
from engine.errors import EngineError
from models.hub.response_head import limit_head_async

if TYPE_CHECKING:
    import httpx

_CONNECT = 10.0
"""Time limit in seconds for a connection. The first token has no limit, as no sensible one is known."""
_MOST = 64 * 1024
"""Bytes of a refusal that are read."""
_LARGEST = 16 * 1024 * 1024
"""Bytes of a listing that are read."""
_AHEAD = 256
"""Most pieces that may wait in the inbox: a faster server is made to wait."""
_DRAIN = 1.0
"""Seconds for a request to end after the end of its answer."""
_PAUSE = 0.2
"""Seconds before a connection is retried."""


@dataclass(frozen=True, slots=True)
class Began:
    """The server replies; its data follows."""

    content_type: str
    packing: str = ""
    """How the data is compressed, although plain data was requested; "" if it is not."""


@dataclass(frozen=True, slots=True)
class Waits:
    """The server is busy and is asked again in `seconds`."""

    seconds: float
    status: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The connection failed or was lost."""

    line: str


@dataclass(frozen=True, slots=True)
class Over:
    """The request is over; nothing more follows."""

    future: "Future[None]"


Item = Began | bytes | Waits | Refused | Lost | Over
Inbox = SimpleQueue[tuple[int, Item]]
"""The items of several requests, each with its request's number."""


@dataclass(slots=True)
class Stage:
    """The latest stage of a request, as reported by httpcore. The head of its response has a deadline."""

    name: str = ""

    async def __call__(self, name: str, about: Mapping[str, Any]) -> None:
        self.name = name
        await limit_head_async(name, about)

    @property
    def in_handshake(self) -> bool:
        """Whether the connection is open but its TLS handshake is running or has failed."""
        return ".start_tls." in self.name and not self.name.endswith(".complete")


class Client:
    """Connects lazily: the thread and httpx come with the first request."""

    def __init__(self, address: Address, key: str | None) -> None:
        self.address = address
        self._key = key
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._http: httpx.AsyncClient | None = None
        self._without: set[str] = set()
        """Optional fields that this server rejects."""
        self._left: Future[None] | None = None
        """The request whose answer ended last; its connection is free once the request has ended."""

    def begin(self, path: str, body: Mapping[str, Any], inbox: Inbox, index: int = 0) -> "Future[None]":
        """Request a streamed answer: items go to `inbox`, with Over as the last. Cancelling the future ends the
        request.
        """
        future = self._submit(self._ask(path, dict(body), inbox, index, self._left))
        future.add_done_callback(lambda done: inbox.put((index, Over(done))))
        return future

    def get(self, path: str, seconds: float) -> "Future[bytes | Refused | Lost]":
        """Fetch a document within `seconds`."""
        return self._submit(self._get(path, seconds))

    def leave(self, future: "Future[None]") -> None:
        """Let a request whose answer is over end by itself, so that the next request can reuse the connection."""
        self._left = future
        if self._loop is not None and not future.done():
            self._loop.call_soon_threadsafe(self._loop.call_later, _DRAIN, future.cancel)

    def close(self) -> None:
        """End all requests. Closing twice is fine."""
        loop, self._loop = self._loop, None
        if loop is not None and self._thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join(2.0)

    def _submit(self, work: Coroutine[Any, Any, Any]) -> "Future[Any]":
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=_run, args=(self._loop, self._leave), name="chatterm-remote", daemon=True
            )
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _leave(self) -> None:
        if self._http is not None:
            await self._http.aclose()

    def _client(self) -> "httpx.AsyncClient":
        if self._http is None:
            self._http = made(self.address, self._key)
        return self._http

    async def _get(self, path: str, seconds: float) -> bytes | Refused | Lost:
        stage = Stage()
        try:
            async with (
                asyncio.timeout(seconds),
                self._client().stream("GET", self.address.url + path, extensions={"trace": stage}) as reply,
            ):
                if reply.status_code == 200:
                    return await _read(reply, _LARGEST)
                return await _refused(reply)
        except Exception as error:
            if isinstance(error, EngineError):
                raise
            return self._lost(error, stage)

    async def _ask(
        self, path: str, body: dict[str, Any], inbox: Inbox, index: int, left: "Future[None] | None"
    ) -> None:
        tries, is_fresh = 0, True
        if left is not None and not left.done():
            await asyncio.wait([asyncio.wrap_future(left)], timeout=_DRAIN)
        while True:
            body = {name: value for name, value in body.items() if name not in self._without}
            has_begun, stage = False, Stage()
            try:
                request = self._client().stream(
                    "POST",
                    self.address.url + path,
                    content=json.dumps(body, ensure_ascii=False).encode("utf-8", "replace"),
                    headers={"Content-Type": "application/json"},
                    extensions={"trace": stage},
                )
                async with request as reply:
                    has_begun = True
                    if reply.is_success:
                        packing = reply.headers.get("content-encoding", "").strip()
                        packing = "" if packing.lower() == "identity" else packing
                        inbox.put((index, Began(reply.headers.get("content-type", ""), packing)))
                        async for data in reply.aiter_raw():
                            inbox.put((index, data))
                            while inbox.qsize() > _AHEAD:
                                await asyncio.sleep(0.01)
                        return
                    refused = await _refused(reply)
            except Exception as error:
                if isinstance(error, EngineError):
                    raise
                if not has_begun and is_fresh and _may_pass(error):
                    is_fresh = False
                    await asyncio.sleep(_PAUSE)
                    continue
                inbox.put((index, self._lost(error, stage)))
                return
            tries += 1
            if (name := refused_field(refused, body)) is not None:
                self._without.add(name)
                continue
            seconds = retry_delay(refused, tries)
            if seconds is None:
                inbox.put((index, refused))
                return
            inbox.put((index, Waits(seconds, refused.status)))
            await asyncio.sleep(seconds)

    def _lost(self, error: Exception, stage: Stage) -> Lost:
        return Lost(
            explain_lost(error, self.address, proxy_for(self.address), in_handshake=stage.in_handshake)
        )


def made(address: Address, key: str | None) -> "httpx.AsyncClient":
    """Make a client for this server only: redirects are not followed. Raises EngineError for an unusable ca_file."""
    import httpx

    headers = {"User-Agent": "chatterm", "Accept-Encoding": "identity"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, name):  # notices within two minutes that the server's machine is gone
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    trust = _trust(address)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=8, keepalive_expiry=60.0)
    timeout = httpx.Timeout(None, connect=_CONNECT, write=60.0)
    proxy = proxy_for(address)
    transport = httpx.AsyncHTTPTransport(verify=trust, limits=limits, socket_options=options, proxy=proxy)
    return httpx.AsyncClient(headers=headers, timeout=timeout, transport=transport, trust_env=False)


def proxy_for(address: Address) -> str | None:
    """Return the proxy set in HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and NO_PROXY; None for a server on this machine."""
    parts = urlsplit(address.url)
    if address.is_local or proxy_bypass(parts.hostname or ""):
        return None
    known = getproxies()
    proxy = known.get(parts.scheme) or known.get("all")
    return f"http://{proxy}" if proxy and "://" not in proxy else proxy or None


def _trust(address: Address) -> ssl.SSLContext:
    """Return the trusted authorities: those of the system and of certifi, and those of `ca_file`."""
    if not address.is_secure:
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # the others take time to read
    import httpx

    trust = httpx.create_ssl_context()
    trust.load_default_certs()
    if (path := address.remote.ca_file) is not None:
        from pathlib import Path

        try:
            trust.load_verify_locations(cafile=Path(path).expanduser())
        except (OSError, RuntimeError) as error:
            why = getattr(error, "strerror", None) or "it contains no certificates"
            raise EngineError(f"The ca_file {path} of {address.setting} cannot be used: {why}.") from None
    return trust


async def _read(reply: "httpx.Response", most: int) -> bytes:
    found = bytearray()
    async for data in reply.aiter_raw():
        found += data
        if len(found) > most:
            break
    return bytes(found[:most])


async def _refused(reply: "httpx.Response") -> Refused:
    body = b""
    with suppress(Exception):  # the status says enough
        async with asyncio.timeout(_CONNECT):
            body = await _read(reply, _MOST)
    headers = reply.headers
    return Refused(reply.status_code, body, headers.get("retry-after"), headers.get("location"))


def _may_pass(error: Exception) -> bool:
    """Return whether an immediate retry may succeed. No part of an answer has arrived yet."""
    import httpx

    broken = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError, httpx.ConnectError)
    return isinstance(error, broken) and "CERTIFICATE_VERIFY" not in str(error)


def _run(loop: asyncio.AbstractEventLoop, leave: Any) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))
        with suppress(Exception):
            loop.run_until_complete(asyncio.wait_for(leave(), 1.0))
    finally:
        loop.close()
