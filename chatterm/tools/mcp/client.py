"""A blocking client of MCP servers: all connections live in an event loop on its own thread.

A server is started when it is first needed, restarted a few times if it dies, and stopped with the client.
What it sends is bounded and not trusted.
"""

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from chatterm.backends.backend import EngineError
from chatterm.sessions.schema import data_folder
from chatterm.terminal.sanitize import cleaned, one_line
from chatterm.tools.mcp import requests
from chatterm.tools.mcp.catalog import Offers
from chatterm.tools.mcp.config import Server
from chatterm.tools.mcp.http_transport import open_http
from chatterm.tools.mcp.stdio_transport import MOST_LOG, open_stdio
from chatterm.tools.output import unhidden
from chatterm.tools.tool import ToolError, ToolRun

if TYPE_CHECKING:
    from mcp import Client

T = TypeVar("T")

_LAST = 4_000
"""Bytes at the end of a log that are searched for its last line."""
START_S = 30.0
"""Seconds a server may take to start."""
CALL_S = 120.0
"""Seconds a call may take."""
VALUES_S = 3.0
"""Seconds a running server may take to complete an argument."""
RESTARTS = 3
"""How often a dead server is restarted without having answered anything in between."""
_LOOK = 0.1
_NOT_VALID = re.compile(r"(?:^|: )\d+ validation errors? for (\w+)")
_MOST_TOOLS = 128
_MOST_SCHEMA = 20_000


@dataclass(frozen=True, slots=True)
class ServerTool:
    """A tool as its server describes it, with bounded texts."""

    name: str
    description: str
    parameters: dict[str, Any]


class Servers:
    """Connections to MCP servers, usable from any thread. Calls block and raise ToolError (one line)."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self.servers = {server.name: server for server in servers}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._links: dict[str, _Link] = {}
        self._lock = threading.Lock()

    def tools(self, name: str, running: ToolRun | None = None) -> list[ServerTool]:
        """Return the tools of a server, starting it if needed."""

        async def told(client: "Client") -> list[ServerTool]:
            return await requests.list_pages(
                lambda c: client.list_tools(cursor=c), "tools", _tool, _MOST_TOOLS
            )

        return self._ask(name, told, START_S, running or ToolRun())

    def call(self, name: str, tool: str, arguments: dict[str, Any], running: ToolRun) -> str:
        """Call a tool and return its result as text. Raises ToolError, also for an error that the server reports."""

        async def called(client: "Client") -> str:
            result = await client.call_tool(tool, arguments)
            text = requests.content_text(result.content) or requests.structured_text(
                result.structured_content
            )
            if result.is_error:
                raise ToolError(one_line(text, 1_000) or "The server reported a failure without a reason.")
            return text

        return self._ask(name, called, CALL_S, running)

    def offers(self, name: str, running: ToolRun | None = None) -> Offers:
        """Return the prompts and resources of a server, starting it if needed."""
        return self._ask(name, requests.offers, START_S, running or ToolRun())

    def prompt(self, name: str, prompt: str, arguments: Mapping[str, str]) -> str:
        """Return the text of a server's prompt."""
        return self._ask(name, lambda client: requests.prompt(client, prompt, arguments), START_S, ToolRun())

    def resource(self, name: str, uri: str) -> str:
        """Return the text of a server's resource."""
        return self._ask(name, lambda client: requests.resource(client, uri), START_S, ToolRun())

    def values(
        self, name: str, prompt: str, argument: str, begun: str, given: Mapping[str, str]
    ) -> list[str]:
        """Return the completions that a server offers for a prompt's argument."""
        return self._ask(
            name, lambda client: requests.values(client, prompt, argument, begun, given), VALUES_S, ToolRun()
        )

    def close(self) -> None:
        """Stop every server. Closing twice is fine."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is None or self._thread is None:
            return

        async def end() -> None:
            await asyncio.gather(*(link.end() for link in self._links.values()), return_exceptions=True)

        with contextlib.suppress(NotYet, RuntimeError):
            asyncio.run_coroutine_threadsafe(end(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join(5)

    def _ask(self, name: str, work: Callable[["Client"], Awaitable[T]], limit: float, running: ToolRun) -> T:
        server = self.servers.get(name)
        if server is None:
            raise ToolError(f"There is no server {one_line(name, 40)!r}; chatterm mcp list shows all.")
        loop = self._running_loop()
        link = self._links.setdefault(name, _Link(server))
        future: Future[T] = asyncio.run_coroutine_threadsafe(link.ask(work, limit), loop)
        while True:
            try:
                return future.result(_LOOK)
            except NotYet:
                if future.done():
                    raise ToolError(f"{name} did not answer within {limit:.0f} s.") from None
                if running.stopped.is_set():
                    future.cancel()
                    raise ToolError("Stopped.") from None
            except asyncio.CancelledError:
                raise ToolError(f"{name} has ended.") from None

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="mcp", daemon=True)
                self._thread.start()
            return self._loop


class _Link:
    """The connection to one server; used on the loop's thread only."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._task: asyncio.Task[None] | None = None
        self._client: asyncio.Future[Client] | None = None
        self._over = asyncio.Event()
        self._log_at = 0
        """The log's length when the server was last started."""
        self._is_dead = False
        """Whether its process has ended; the next request restarts it."""
        self._starts = 0
        self._lock = asyncio.Lock()

    async def ask(self, work: Callable[["Client"], Awaitable[T]], limit: float, *, again: bool = True) -> T:
        """Return the result of `work`; with `again`, retry in a new session if the server has forgotten this one."""
        client = await self._connected()
        task = self._task
        assert task is not None
        asked = asyncio.ensure_future(work(client))
        timer = asyncio.ensure_future(asyncio.sleep(limit))
        try:
            await asyncio.wait({asked, task, timer}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                given = asked.result()
                self._starts = 1
                return given
            if task.done():
                raise ToolError(self._ended(task))
            if limit >= START_S:  # it may hang or send endlessly; the next call restarts it
                await self.end()
            raise ToolError(f"{self._server.name} did not answer within {limit:.0f} s.")
        except (ToolError, asyncio.CancelledError):
            raise
        except Exception as error:  # noqa: BLE001 (whatever the SDK raises, one call fails)
            if _is_gone(error):
                if self._task is task:  # and nobody has connected again since
                    await self.end()
                raise ToolError(self._ended(task)) from None
            if (
                again and self._server.url and "Session terminated" in str(error)
            ):  # how the SDK tells of a 404
                if self._task is task:
                    await self.end()
                return await self.ask(work, limit, again=False)
            raise ToolError(f"{self._server.name}: {_why(error)}.") from None
        finally:
            asked.cancel()
            timer.cancel()

    async def end(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            self._over.set()
            if self._client is not None and self._client.done():
                await asyncio.wait({task}, timeout=5)
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=5)

    def _ended(self, task: "asyncio.Task[None]") -> str:
        """Return why the connection ended, in one line."""
        name = self._server.name
        error = task.exception() if task.done() and not task.cancelled() else None
        if not self._server.url:
            return _first(task) or f"{name} has ended{self._said()}."
        return _first(task) or f"{name} has ended{f': {_why(error)}' if error is not None else ''}."

    async def _connected(self) -> "Client":
        async with self._lock:
            if self._is_dead:
                await self.end()
            if self._task is None or self._task.done():
                if self._starts > RESTARTS:
                    raise ToolError(
                        f"{self._server.name} has ended {self._starts} times; it is not started again."
                    )
                self._starts += 1
                self._is_dead = False
                self._over = asyncio.Event()
                self._client = asyncio.get_running_loop().create_future()
                self._task = asyncio.ensure_future(self._serve(self._client))
                self._task.add_done_callback(_seen)
            assert self._client is not None
            assert self._task is not None
            begun: set[asyncio.Future[Any]] = {self._client, self._task}
            await asyncio.wait(begun, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
            if self._client.done() and not self._task.done():
                return self._client.result()
            task = self._task
            if not task.done():
                await self.end()
                raise ToolError(f"{self._server.name} did not start within {START_S:.0f} s{self._said()}.")
            error = task.exception() if not task.cancelled() else None
            why = _why(error) if error is not None else "it has ended"
            if "onnection closed" in why and self._server.command:
                why = f"it has ended{self._said()}"
            raise ToolError(f"{self._server.name} could not be started: {why}.")

    def _said(self) -> str:
        """Return the last line that the server's process has logged since its start, and the log's path.

        The text continues a sentence; it is "" for a server that chatterm does not run.
        """
        if not self._server.command:
            return ""
        path, said = log_path(self._server.name), b""
        with contextlib.suppress(OSError), path.open("rb") as log:
            log.seek(max(self._log_at, path.stat().st_size - _LAST))
            said = log.read()
        lines = [line for line in said.decode("utf-8", "replace").splitlines() if line.strip()]
        last = f" with “{one_line(lines[-1], 200)}”" if lines else ""
        return f"{last}; its log is {path}"

    def _note_death(self) -> None:
        self._is_dead = True

    async def _serve(self, ready: "asyncio.Future[Client]") -> None:
        """Hold the connection, in one task from its beginning to its end."""
        from mcp import Client

        server = self._server
        async with contextlib.AsyncExitStack() as stack:
            log = stack.enter_context(_log(server.name)) if server.command else None
            self._log_at = log.tell() if log is not None else 0
            transport = open_stdio(server, log, self._note_death) if log is not None else open_http(server)
            # Our own limits are shorter: they also stop a server that hangs.
            client = await stack.enter_async_context(Client(transport, read_timeout_seconds=CALL_S + 10))
            ready.set_result(client)
            await self._over.wait()


def _seen(task: "asyncio.Task[None]") -> None:
    """Mark the task's exception as retrieved: the next request reports it."""
    if not task.cancelled():
        task.exception()


def log_path(name: str) -> Path:
    """Return the file that receives a server's standard error."""
    return data_folder() / "mcp" / f"{name}.log"


def needed() -> None:
    """Raise EngineError if the MCP SDK is not installed."""
    from importlib.util import find_spec

    if find_spec("mcp") is None:
        raise EngineError("MCP servers need the MCP SDK; install it with: pip install 'chatterm[mcp]'")


def _log(name: str) -> BinaryIO:
    path = log_path(name)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    is_long = path.exists() and path.stat().st_size > MOST_LOG
    return path.open("wb" if is_long else "ab")


def _tool(tool: Any) -> ServerTool | None:
    """Parse a server's description of a tool; return None for one that cannot be offered to a model."""
    schema = tool.input_schema if isinstance(tool.input_schema, dict) else {}
    try:
        written = json.dumps(schema)
        schema = json.loads(unhidden(json.dumps(schema, ensure_ascii=False)))
    except (ValueError, TypeError, RecursionError):
        return None
    name, about = str(tool.name), unhidden(cleaned(str(tool.description or "")))[:1_000]
    if len(written) > _MOST_SCHEMA or not name or len(name) > 128:
        return None
    return ServerTool(name, about, {"type": "object", "properties": {}, **schema})


def _is_gone(error: Exception) -> bool:
    """Return whether `error` means that the connection is closed."""
    name = type(error).__name__
    return name in ("ClosedResourceError", "BrokenResourceError", "EndOfStream") or "onnection closed" in str(
        error
    )


def _first(task: "asyncio.Task[None] | None") -> str | None:
    """Return why chatterm itself closed the connection, or None."""
    error = task.exception() if task is not None and task.done() and not task.cancelled() else None
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return f"{error}; it was stopped." if isinstance(error, ToolError) else None


def _why(error: BaseException) -> str:
    """Return an error in one line; of a group, the first."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    told = str(error)
    if isinstance(error, OSError) and error.strerror:  # without the system's number
        told = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    elif (wrong := _NOT_VALID.search(told)) is not None:  # the rest is for developers of the SDK
        told = told[: wrong.start()] or f"what it sent is not a valid {wrong[1]} of MCP"
    return one_line(told, 300).rstrip(".") or type(error).__name__
