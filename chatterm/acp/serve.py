"""`chatterm acp`: the protocol on standard input and output."""

import asyncio
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from acp import run_agent

from chatterm.acp.agent import Agent
from chatterm.acp.engine import EditorEngine
from chatterm.acp.jsonrpc import LineTransport
from chatterm.backends.backend import Backend
from chatterm.sessions.store import SessionStore
from chatterm.terminal.error_log import write_down


class _ToLog(logging.Handler):
    """Writes the SDK's errors to our error log, to keep them out of the protocol stream."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, ConnectionError):
            write_down(error)


def serve(
    backend: Backend,
    store: SessionStore | None,
    *,
    sampling: Mapping[str, Any],
    settings: Mapping[str, Any],
    tools: str,
    version: str,
) -> bool:
    """Serve until the editor closes its end; return whether everything was saved.

    The answering thread may still be loading a model then, which cannot be interrupted.
    """
    source, target = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # stray prints must not enter the protocol
    logging.getLogger().addHandler(_ToLog(logging.WARNING))

    async def run() -> None:
        engine = EditorEngine(backend, sampling, settings)
        agent = Agent(engine, store, tools, version)
        try:
            await run_agent(agent, LineTransport(source, target), use_unstable_protocol=True)  # type: ignore[arg-type]
        finally:
            agent.end()

    with suppress(KeyboardInterrupt, ConnectionError, BrokenPipeError):
        asyncio.run(run())
    return store is None or store.close()
