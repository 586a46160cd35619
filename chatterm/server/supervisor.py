"""Runs `chatterm serve`: starts and watches the engine process, with the web API beside it."""

import asyncio
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from chatterm.backends.backend import EngineError, ModelError
from chatterm.server.channel_service import ChannelService
from chatterm.server.service import RequestError, Service
from chatterm.server.spawn import EngineChild, ProcessOptions

_OFTEN = 60.0
"""Seconds: a process that fails within this time of the previous failure is not replaced."""


@dataclass(frozen=True, slots=True)
class Web:
    """A web server that is listening but not serving yet."""

    address: str
    server: Any
    """A uvicorn.Server."""
    socket: Any


class Supervisor:
    """Runs a server from start to shutdown, in one event loop."""

    def __init__(
        self,
        process: ProcessOptions,
        make_web: Callable[[Service], Web] | None,
        load: Callable[[], None],
        ready: Callable[[str], None],
        tell: Callable[[str], None],
    ) -> None:
        """`load` loads the first model, and blocks; `tell` shows a line to the user.

        `ready` is called with the address of the web API ("" without one) each time that requests can be served.
        """
        self._process = process
        self._make_web = make_web
        self._load = load
        self._ready = ready
        self._tell = tell
        self._stop = asyncio.Event()
        self._service = ChannelService()
        self._web: Web | None = None
        self._serving: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Serve until stopped. Raises EngineError and ModelError."""
        loop = asyncio.get_running_loop()
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(name, self._stop.set)
        if self._make_web is not None:
            self._web = self._make_web(self._service)
        failed = -_OFTEN
        try:
            while not self._stop.is_set():
                code = await self._once(await asyncio.to_thread(EngineChild, self._process))
                if code == 0:
                    return
                is_again, failed = time.monotonic() - failed < _OFTEN, time.monotonic()
                if is_again:
                    raise EngineError(f"The engine process ended unexpectedly again (exit code {code}).")
                self._tell(f"The engine process ended unexpectedly (exit code {code}); another one starts.")
        finally:
            if self._serving is not None and self._web is not None:
                self._web.server.should_exit = True
                await self._serving
            await self._service.close()

    async def _once(self, child: EngineChild) -> int:
        """Serve with an engine process; return its exit code, or 0 on shutdown."""
        loop = asyncio.get_running_loop()
        ended = loop.run_in_executor(None, child.wait)
        stopped = loop.create_task(self._stop.wait())
        loading = loop.create_task(self._begin())
        try:
            waits: set[asyncio.Future[Any]] = {ended, stopped, loading}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
                self._serve()
                self._ready(self._address)
                waits = {ended, stopped} if self._serving is None else {ended, stopped, self._serving}
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return ended.result()
            self._tell("Shutting down; running answers end with a message.")
            return 0
        finally:
            stopped.cancel()
            if not ended.done() and self._serving is not None and self._web is not None:
                self._web.server.should_exit = True  # its clients first: their streams end with an error
                await self._serving
                self._serving = None
            await asyncio.to_thread(child.end)
            with suppress(EngineError, ModelError, RequestError):
                await loading

    @property
    def _address(self) -> str:
        return self._web.address if self._web is not None else ""

    async def _begin(self) -> None:
        try:
            await self._service.connect(self._address)
        except RequestError as error:
            raise EngineError(error.message) from None
        await asyncio.to_thread(self._load)
        with suppress(RequestError):  # the engine process has ended, which `_once` notices
            await self._service.look()

    def _serve(self) -> None:
        """Start to serve requests, unless it is done already."""
        if self._web is None or self._serving is not None:
            return
        self._serving = asyncio.get_running_loop().create_task(
            self._web.server.serve(sockets=[self._web.socket])
        )
