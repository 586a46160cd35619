"""Runs `chatterm serve`: starts and watches the engine process, with the web API beside it."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from chatterm.backends.backend import EngineError, ModelError
from chatterm.server.channel_service import ChannelService
from chatterm.server.service import RequestError, Service
from chatterm.server.spawn import EngineChild, ProcessOptions
from chatterm.terminal.signals import on_signals

_OFTEN = 60.0
"""Seconds: a process that ends within this time of the previous end is replaced only after a wait."""
_WAITS = (1.0, 60.0)
"""Seconds of the first of these waits, and of the longest."""


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
        self._has_served = False
        """Whether requests could be served once: then it goes on, whatever happens to the engine process."""

    async def run(self) -> None:
        """Serve until stopped. Raises EngineError and ModelError."""
        loop = asyncio.get_running_loop()
        on_signals(loop, self._stop.set)
        if self._make_web is not None:
            self._web = self._make_web(self._service)
        failed, wait = -_OFTEN, 0.0
        try:
            while not self._stop.is_set():
                try:
                    code = await self._once(await asyncio.to_thread(EngineChild, self._process))
                    why = f"The engine process ended unexpectedly (exit code {code})"
                except (EngineError, ModelError) as error:
                    if not self._has_served:
                        raise
                    code, why = -1, str(error).rstrip(".")
                if code == 0:
                    return
                is_again, failed = time.monotonic() - failed < _OFTEN, time.monotonic()
                if is_again and not self._has_served:
                    raise EngineError(f"{why}, again.")
                wait = min(max(2 * wait, _WAITS[0]), _WAITS[1]) if is_again else 0.0
                self._tell(f"{why}; another one starts{f' in {wait:g} s' if wait else ''}.")
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), wait)
                failed += wait
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
                self._has_served = True
                self._ready(self._address)
                waits = {ended, stopped} if self._serving is None else {ended, stopped, self._serving}
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return ended.result()
            self._tell("Shutting down; running answers end with a message.")
            return 0
        finally:
            stopped.cancel()
            if self._stop.is_set() and self._serving is not None and self._web is not None:
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
        try:
            await asyncio.to_thread(self._load)
        except (EngineError, ModelError) as error:
            if not self._has_served:
                raise
            self._tell(f"{error} The next request for it tries again.")
        with suppress(RequestError):  # the engine process has ended, which `_once` notices
            await self._service.look()

    def _serve(self) -> None:
        """Start to serve requests, unless it is done already."""
        if self._web is None or self._serving is not None:
            return
        self._serving = asyncio.get_running_loop().create_task(
            self._web.server.serve(sockets=[self._web.socket])
        )
