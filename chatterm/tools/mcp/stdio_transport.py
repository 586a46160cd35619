"""An MCP server that is a process: messages as lines on its standard input and output, none longer than MOST_LINE.

The SDK's own transport of that kind keeps a line until it ends, however long it gets.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, BinaryIO

from chatterm.tools.mcp.config import Server
from chatterm.tools.tool import ToolError

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams

MOST_LINE = 32 << 20
"""Bytes of a message. A result of a tool may have a picture in it."""
MOST_LOG = 1_000_000
"""Bytes that are kept of what a server writes on standard error while it runs."""
_PATIENCE_S = 2.0
"""Seconds that a server has to end by itself once nobody speaks to it, and again once it was asked to."""
_LOOK_S = 0.01
_LAST_S = 1.0
"""Seconds for what a server wrote before it ended."""


@contextlib.asynccontextmanager
async def open_stdio(
    server: Server, log: BinaryIO, on_end: Callable[[], None]
) -> "AsyncIterator[TransportStreams]":
    """A transport for the SDK's client; what the server writes on standard error goes to `log`. `on_end` is called
    when nothing more can come of it.

    Raises OSError or ValueError where it cannot be started, and, in a group, ToolError where it sends too long a line.
    """
    import anyio
    from mcp.client.stdio import get_default_environment
    from mcp.shared.message import SessionMessage

    process = await asyncio.create_subprocess_exec(
        server.command,
        *server.args,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=server.cwd or None,
        env=get_default_environment() | dict(server.env),
        start_new_session=True,  # Ctrl+C is not for it, and its own processes end with it
        limit=MOST_LINE // 2,  # a reader holds twice as much
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    stdin, stdout, stderr = process.stdin, process.stdout, process.stderr
    heard, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    write, said = anyio.create_memory_object_stream[SessionMessage](0)

    async def listen() -> None:
        async with heard:
            with contextlib.suppress(anyio.ClosedResourceError, anyio.BrokenResourceError, ConnectionError):
                while line := await _line(server.name, stdout):
                    await heard.send(_message(line))
            on_end()

    async def speak() -> None:
        async with said:
            try:
                async for message in said:
                    text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                    stdin.write(text.encode("utf-8", "replace") + b"\n")
                    await stdin.drain()
            except ConnectionError:  # it listens no more: no answer will come
                await heard.aclose()

    async def note() -> None:
        left = MOST_LOG
        while told := await stderr.read(65_536):
            with contextlib.suppress(OSError):  # a full disk
                log.write(told[:left])
                log.flush()
            left = max(left - len(told), 0)

    try:
        async with asyncio.TaskGroup() as tasks:
            begun = [tasks.create_task(work()) for work in (listen, speak, note)]
            try:
                yield read, write
            finally:
                if begun[0].done():  # it has ended: what it said last says why
                    await asyncio.wait(begun[2:], timeout=_LAST_S)
                for task in begun:
                    task.cancel()
    finally:
        read.close()
        write.close()
        await _ended(process)


async def _line(name: str, stdout: asyncio.StreamReader) -> bytes:
    """The next line, b"" at the end."""
    try:
        return await stdout.readline()
    except ValueError:
        raise ToolError(f"{name} sent a message of more than {MOST_LINE >> 20} MB") from None


def _message(line: bytes) -> Any:
    """An error where it is none, for the session to say so."""
    from mcp.shared.message import SessionMessage
    from mcp_types import jsonrpc_message_adapter

    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as error:
        return error


async def _ended(process: asyncio.subprocess.Process) -> None:
    """End it and its processes: by closing its input, then by asking, then by force; cancelled, by force at once."""
    assert process.stdin is not None
    process.stdin.close()
    clock = asyncio.get_running_loop().time
    cancelled: asyncio.CancelledError | None = None
    for sent in (None, signal.SIGTERM, signal.SIGKILL):
        if cancelled is not None and sent is not signal.SIGKILL:
            continue
        if sent is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, sent)
        until = clock() + _PATIENCE_S
        try:
            while (
                process.returncode is None and clock() < until
            ):  # `wait` would wait for its children's pipes, too
                await asyncio.sleep(_LOOK_S)
        except asyncio.CancelledError as error:
            cancelled = error
        if process.returncode is not None:
            break
    process._transport.close()  # type: ignore[attr-defined]
    if cancelled is not None:
        raise cancelled
