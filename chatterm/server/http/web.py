"""Runs the HTTP API: uvicorn, with limits for slow and silent clients."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from chatterm.backends.remote.address import is_loopback
from chatterm.server.http.endpoint import ServerState
from chatterm.server.http.limits import Limits
from chatterm.server.write_coalescing import GatheringTransport
from engine.errors import EngineError


async def serve(app: Starlette, host: str, port: int, on_ready: Callable[[str], None] | None = None) -> None:
    """Serve `app` (of `make_app`) until SIGINT or SIGTERM, in the event loop of its service.

    `on_ready` gets the address once it accepts connections. Raises EngineError if it cannot start.
    """
    sock = listen(app, host, port)
    if on_ready is not None:
        name = f"[{host}]" if ":" in host else host
        on_ready(f"http://{name}:{sock.getsockname()[1]}")
    await make_server(app).serve(sockets=[sock])


def run(app: Starlette, host: str, port: int) -> None:
    """Run `serve` in an event loop of its own."""
    asyncio.run(serve(app, host, port))


def listen(app: Starlette, host: str, port: int) -> socket.socket:
    """Return a listening socket; `port` 0 takes any free port. Raises EngineError."""
    if not app.state.has_key and not is_loopback(host):
        raise EngineError(f"Anybody could use a server on {host}; give it a key with --api-key-file FILE.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise EngineError(f"There is no address {host!r}: {error}. Choose another --host.") from None
    # On Windows, SO_REUSEADDR would let others take a port that is in use.
    own = getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR)
    sock.setsockopt(socket.SOL_SOCKET, own, 1)
    # These detect clients that vanished silently; connections inherit them.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    patience = int(app.state.site.limits.write_s * 1000)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_USER_TIMEOUT", patience)):
        with suppress(AttributeError, OSError):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    try:
        sock.bind(address)
        sock.listen(512)
    except OSError as error:
        sock.close()
        raise EngineError(
            f"{host} port {port} cannot be used: {error.strerror or error}. Choose another --port or --host."
        ) from None
    sock.setblocking(False)
    return sock


def make_server(app: Starlette) -> uvicorn.Server:
    """Return a server of `app` that is not running yet; `serve(sockets=[...])` runs it in an event loop."""
    site: ServerState = app.state.site
    limits = site.limits

    class Protocol(BoundedProtocol):
        bounds = limits

    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="off",
        log_level="error",  # mistakes of clients are not logged
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=limits.connections,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=max(1, round(limits.shutdown_s)),
    )
    return _Server(config, site)


class _Server(uvicorn.Server):
    """Ends streams with an error that the clients understand before the connections are closed."""

    def __init__(self, config: uvicorn.Config, site: ServerState) -> None:
        super().__init__(config)
        self._site = site

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        await self._site.stop()
        await super().shutdown(sockets)


class BoundedProtocol(HttpToolsProtocol):
    """Closes connections whose headers do not arrive, and those that do not read what is sent to them.

    If a request is answered before it has arrived completely, the rest is read and discarded, within limits.
    """

    bounds = Limits()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._late: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None
        self._lingers: asyncio.TimerHandle | None = None
        self._answers: Any = None
        """The request being answered; `cycle` is the latest one, which waits for it if requests are pipelined."""
        self._in_head = False
        self._fed = 0
        """Bytes received of the latest request, including its headers; 0 once it is complete."""
        self._left = self.bounds.refused_bytes

    def connection_made(self, transport: Any) -> None:
        self._gathering = GatheringTransport(transport)
        self._gathering.lingers = self._linger
        super().connection_made(self._gathering)  # type: ignore[arg-type]
        self._watch()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():  # the rest of an answered request, or what follows an invalid one
            self._left -= len(data)
            if self._left < 0:
                self.transport.abort()
            return
        self._fed += len(data)
        super().data_received(data)
        if self._in_head and self._fed > self.bounds.header_bytes and not self.transport.is_closing():
            self.send_400_response("The headers are too long.")
        self._watch()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._fed > self.bounds.header_bytes:
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > self.bounds.header_bytes:
                raise ValueError("the headers are too long")  # the parser makes this a 400
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._fed = 0

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._late, self._stuck, self._lingers):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        self._gathering.lingers = None  # a reference cycle
        if self._answers is not None and not self._answers.response_complete:
            self._answers.disconnected = True
            self._answers.message_event.set()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._answers = cycle
        super()._start_asgi_task(cycle, app)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stuck = self._stuck or self.loop.call_later(self.bounds.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def _linger(self) -> bool:
        """Return whether the client is still sending: closing now would reset the connection before it reads."""
        if not self._fed:
            return False
        self.flow.resume_reading()
        self._lingers = self.loop.call_later(self.bounds.body_s, self.transport.abort)
        return True

    def _watch(self) -> None:
        """Limit the time for headers, from their first byte or the connection on; more bytes do not extend it."""
        waits = self.cycle is None or self.cycle.response_complete
        if waits and self._late is None:
            self._late = self.loop.call_later(self.bounds.header_s, self.transport.abort)
        elif not waits and self._late is not None:
            self._late.cancel()
            self._late = None
