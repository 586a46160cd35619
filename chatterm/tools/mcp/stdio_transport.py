"""The transport to an MCP server process: messages as lines on its stdin and stdout, none longer than MOST_LINE.

The SDK's own stdio transport puts no limit on a line.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, BinaryIO

from chatterm.tools.mcp.config import Server
from chatterm.tools.tool import ToolError
from models.system import own_group

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams

MOST_LINE = 32 << 20
"""Bytes of a message. A tool's result may contain a picture."""
MOST_LOG = 1_000_000
"""Bytes of a server's standard error that are logged per run."""
_PATIENCE_S = 2.0
"""Seconds a server has to exit after its input is closed, and again after SIGTERM."""
_LOOK_S = 0.01
_LAST_S = 1.0
"""Seconds to read the last stderr output of a server that has ended."""


@contextlib.asynccontextmanager
async def open_stdio(
    server: Server, log: BinaryIO, on_end: Callable[[], None]
) -> "AsyncIterator[TransportStreams]":
    """Start the server and open a transport for the SDK's client; its standard error goes to `log`. `on_end` is called
    when its output ends.

    Raises OSError or ValueError if it cannot be started, and ToolError (in a group) if it sends too long a line.
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
        **own_group(),  # and so one group to kill
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
            except ConnectionError:  # it no longer reads: no response will come
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
                if begun[0].done():  # it has ended: its last output says why
                    await asyncio.wait(begun[2:], timeout=_LAST_S)
                for task in begun:
                    task.cancel()
    finally:
        read.close()
        write.close()
        await _ended(process)


async def _line(name: str, stdout: asyncio.StreamReader) -> bytes:
    """Read the next line; return b"" at the end. Raises ToolError if it is too long."""
    try:
        return await stdout.readline()
    except ValueError:
        raise ToolError(f"{name} sent a message of more than {MOST_LINE >> 20} MB") from None


def _message(line: bytes) -> Any:
    """Parse a line; return the ValueError for an invalid one, which the session reports."""
    from mcp.shared.message import SessionMessage
    from mcp_types import jsonrpc_message_adapter

    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as error:
        return error


def _terminate(process: asyncio.subprocess.Process) -> None:
    """Ask a process and its group to end; Windows, which has no groups, ends only the process."""
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGTERM)
    else:
        process.terminate()


def _kill(process: asyncio.subprocess.Process) -> None:
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()


async def _ended(process: asyncio.subprocess.Process) -> None:
    """End a process and its group: close its input, then SIGTERM, then SIGKILL; if cancelled, SIGKILL at once."""
    assert process.stdin is not None
    process.stdin.close()
    clock = asyncio.get_running_loop().time
    cancelled: asyncio.CancelledError | None = None
    for end in (None, _terminate, _kill):
        if cancelled is not None and end is not _kill:
            continue
        if end is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                end(process)
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
