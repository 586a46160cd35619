"""The requests of an editor. The SDK finds these methods by their names and validates their arguments."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from acp import PROTOCOL_VERSION, RequestError, schema

from chatterm.acp import content
from chatterm.acp.calls import EditorHost
from chatterm.acp.dialogue import ALL, CHAT, GIVEN, Dialogue, modes, switch
from chatterm.acp.engine import EditorEngine
from chatterm.backends.backend import EngineError, ModelError, Outcome
from chatterm.conversation.headless import Talk
from chatterm.sessions.store import SessionStore
from chatterm.sessions.titles import make_title
from chatterm.terminal.error_log import error_line, write_down
from chatterm.terminal.sanitize import one_line
from chatterm.tools.loop import run_calls
from chatterm.tools.session import ToolSession
from chatterm.tools.tool import ToolError
from models.units import counted

MOST_ROUNDS = 50
"""The most rounds of tool calls for one prompt."""
MOST_OPEN = 200
"""The most sessions open at once; for one more, the idle one that was opened first is closed."""
_PAGE = 50
P = ParamSpec("P")
R = TypeVar("R")


def _answered(method: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
    """Turn exceptions of `method` into protocol errors of one line; log those that are unexpected."""

    @wraps(method)
    async def answered(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await method(*args, **kwargs)
        except (EngineError, ModelError) as error:
            raise RequestError(-32603, one_line(str(error))) from None
        except (RequestError, ConnectionError):
            raise
        except Exception as error:  # noqa: BLE001 (whatever it is, other sessions continue)
            write_down(error)
            raise RequestError(-32603, error_line(error)) from None

    return answered


class Agent:
    """The agent that the SDK calls, on the event loop where it was created."""

    def __init__(self, engine: EditorEngine, store: SessionStore | None, tools: str, version: str) -> None:
        """`tools` names those that are on from the start, as in `--tools`; without `store` nothing is saved."""
        self._engine = engine
        self._store = store
        self._tools = tools
        self._version = version
        self._dialogues: dict[str, Dialogue] = {}
        self._editor: Any = None

    def on_connect(self, conn: Any) -> None:
        self._editor = conn

    @_answered
    async def initialize(self, protocol_version: int, **_: Any) -> schema.InitializeResponse:
        listed = schema.SessionListCapabilities() if self._store is not None else None
        resumed = schema.SessionResumeCapabilities() if self._store is not None else None
        closed = schema.SessionCloseCapabilities()
        return schema.InitializeResponse(
            protocol_version=PROTOCOL_VERSION,
            agent_capabilities=schema.AgentCapabilities(
                load_session=self._store is not None,
                prompt_capabilities=schema.PromptCapabilities(embedded_context=True),
                mcp_capabilities=schema.McpCapabilities(http=True),
                session_capabilities=schema.SessionCapabilities(list=listed, resume=resumed, close=closed),
            ),
            agent_info=schema.Implementation(name="chatterm", title="chatterm", version=self._version),
            auth_methods=[],
        )

    @_answered
    async def authenticate(self, method_id: str, **_: Any) -> None:
        """Do nothing: no login is needed."""

    # --- sessions ---

    @_answered
    async def new_session(self, cwd: str, mcp_servers: Any = None, **_: Any) -> schema.NewSessionResponse:
        info = self._engine.fresh
        folder = _folder(cwd)
        talk = Talk(self._engine.backend, self._store)
        id = self._store.new(info) if self._store is not None else secrets.token_hex(4)
        talk.saved.session, talk.saved.info = id, replace(info, id=id)
        dialogue = await self._opened(id, talk, folder, mcp_servers or ())
        return schema.NewSessionResponse(session_id=id, modes=modes(self._tools, dialogue.mode))

    @_answered
    async def load_session(
        self, cwd: str, session_id: str, mcp_servers: Any = None, **_: Any
    ) -> schema.LoadSessionResponse:
        dialogue = await self._found(cwd, session_id, mcp_servers or ())
        for update in content.replay(dialogue.talk.path):
            await self._show(dialogue, update)
        return schema.LoadSessionResponse(modes=modes(self._tools, dialogue.mode))

    @_answered
    async def resume_session(
        self, session_id: str, cwd: str, mcp_servers: Any = None, **_: Any
    ) -> schema.ResumeSessionResponse:
        dialogue = await self._found(cwd, session_id, mcp_servers or ())
        return schema.ResumeSessionResponse(modes=modes(self._tools, dialogue.mode))

    @_answered
    async def list_sessions(
        self, cwd: str | None = None, cursor: str | None = None, **_: Any
    ) -> schema.ListSessionsResponse:
        """List all sessions, whatever the folder: sessions here are not tied to one."""
        if self._store is None:
            raise EngineError("Conversations are not saved, so there is nothing to list.")
        if cursor and not (cursor.isascii() and cursor.isdigit() and len(cursor) < 10):
            raise EngineError("Invalid session cursor; omit it.")
        found = await asyncio.to_thread(self._store.find)
        begin = int(cursor or 0)
        page = [
            schema.SessionInfo(
                session_id=info.id,
                cwd=cwd or str(Path.home()),
                title=info.title or None,
                updated_at=datetime.fromtimestamp(info.updated, UTC).isoformat(),
            )
            for info in found[begin : begin + _PAGE]
        ]
        more = str(begin + _PAGE) if begin + _PAGE < len(found) else None
        return schema.ListSessionsResponse(sessions=page, next_cursor=more)

    @_answered
    async def close_session(self, session_id: str, **_: Any) -> None:
        await self._close(self._dialogue(session_id))

    @_answered
    async def set_session_mode(self, mode_id: str, session_id: str, **_: Any) -> None:
        dialogue = self._dialogue(session_id)
        info = self._engine.backend.info
        if mode_id != CHAT and info is not None and not info.calls_tools:
            raise EngineError(f"{info.name} does not support tools; stay in Chat mode, or use another model.")
        switch(dialogue, mode_id, self._tools)

    # --- prompts ---

    @_answered
    async def prompt(self, prompt: Any, session_id: str, **_: Any) -> schema.PromptResponse:
        dialogue = self._dialogue(session_id)
        with _alone(dialogue):
            text = await asyncio.to_thread(content.to_message, prompt, dialogue.folder)
            dialogue.tools.policy.unasked = 0  # the person is present
            await self._start_servers(dialogue)
            is_first = not dialogue.talk.path
            reason, outcome = await self._turn(dialogue, text)
            if is_first and dialogue.talk.path:
                title = schema.SessionInfoUpdate(
                    session_update="session_info_update", title=make_title(dialogue.talk.path[0].user)
                )
                await self._show(dialogue, title)
            await self._show_room(dialogue)
            return schema.PromptResponse(stop_reason=reason, usage=content.to_usage(outcome))

    async def cancel(self, session_id: str, **_: Any) -> None:
        """Cancel the running prompt. This is a notification, so errors are not reported."""
        dialogue = self._dialogues.get(session_id)
        if dialogue is not None and dialogue.is_running:
            self._engine.stop(dialogue)

    async def _turn(self, dialogue: Dialogue, text: str) -> tuple[schema.StopReason, Outcome | None]:
        """Answer a message, running its tool calls and answering their results in turn."""

        async def show(kind: str, piece: str) -> None:
            await self._show(dialogue, content.said(kind, piece))

        async def show_call(update: Any) -> None:
            await self._show(dialogue, update)

        outcome = await self._engine.answer(dialogue, partial(dialogue.talk.ask, text), show)
        for _ in range(MOST_ROUNDS):
            calls = dialogue.talk.tree.open_calls
            if not calls or dialogue.stopped.is_set():
                return "cancelled" if dialogue.stopped.is_set() else content.stop_reason(outcome), outcome
            host = EditorHost(dialogue, self._editor, show_call)
            results = await run_calls(dialogue.tools.policy, calls, host)
            if dialogue.stopped.is_set():
                dialogue.talk.keep(results)
                self._engine.forget(dialogue)
                return "cancelled", outcome
            outcome = await self._engine.answer(dialogue, partial(dialogue.talk.tell, results), show)
        return "max_turn_requests", outcome

    async def _start_servers(self, dialogue: Dialogue) -> None:
        """Start the MCP servers that the editor named, if all tools are on."""
        if dialogue.mode != ALL or not dialogue.servers:
            return
        names, dialogue.servers = dialogue.servers, ()
        for name in names:
            try:
                found = await asyncio.to_thread(dialogue.tools.start, name)
            except (EngineError, ToolError) as error:
                await self._show(dialogue, content.said("reasoning", f"{error}\n\n"))
            else:
                dialogue.tools.box.on |= set(found)

    # --- open sessions ---

    def _dialogue(self, id: str) -> Dialogue:
        if (found := self._dialogues.get(id)) is None:
            raise EngineError(f"There is no open session {one_line(id, 60)!r}; load it, or begin a new one.")
        return found

    async def _found(self, cwd: str, id: str, servers: Sequence[Any]) -> Dialogue:
        """Open a saved session, closing it first if it is open already. Raises EngineError."""
        folder = _folder(cwd)
        if self._store is None:
            raise EngineError("Conversations are not saved; begin a new session.")
        if (open_one := self._dialogues.get(id)) is not None:
            if open_one.is_running:
                raise EngineError("An answer is running in this session; cancel it first.")
            await self._close(open_one)
        talk = await asyncio.to_thread(Talk, self._engine.backend, self._store, id)
        return await self._opened(id, talk, folder, servers)

    async def _opened(self, id: str, talk: Talk, folder: Path, servers: Sequence[Any]) -> Dialogue:
        """Open a session, closing an idle one if there are too many. Raises EngineError if all of those are busy."""
        is_full = len(self._dialogues) >= MOST_OPEN
        idle = [one for one in self._dialogues.values() if not one.is_running] if is_full else []
        if is_full and not idle:
            raise EngineError(f"{counted(MOST_OPEN, 'session')} are open; close some of them first.")
        tools = ToolSession.open(folder, lambda text: None)
        dialogue = Dialogue(id, talk, folder, tools, servers=_named(tools, servers))
        switch(dialogue, GIVEN if self._tools else CHAT, self._tools)
        self._dialogues[id] = dialogue
        self._engine.load()
        for one in idle[:1]:
            await self._close(one)
        return dialogue

    async def _close(self, dialogue: Dialogue) -> None:
        self._dialogues.pop(dialogue.id, None)
        self._engine.stop(dialogue)
        self._engine.forget(dialogue)
        await asyncio.to_thread(dialogue.tools.close)

    def end(self) -> None:
        """Stop everything: the editor is gone."""
        for dialogue in self._dialogues.values():
            dialogue.stopped.set()
            dialogue.tools.close()
        self._engine.end()

    async def _show(self, dialogue: Dialogue, update: Any) -> None:
        await self._editor.session_update(session_id=dialogue.id, update=update)

    async def _show_room(self, dialogue: Dialogue) -> None:
        backend = self._engine.backend
        size = backend.info.context_length if backend.info is not None else 0
        if size:
            used = min(backend.used_tokens, size)
            update = schema.UsageUpdate(session_update="usage_update", used=used, size=size)
            await self._show(dialogue, update)


@contextmanager
def _alone(dialogue: Dialogue) -> Iterator[None]:
    """Mark the session as running; raise EngineError if it already is: prompts run one at a time."""
    if dialogue.is_running:
        raise EngineError("An answer is running in this session; wait for its end, or cancel it.")
    dialogue.is_running = True
    dialogue.stopped.clear()
    try:
        yield
    finally:
        dialogue.is_running = False


def _folder(cwd: str) -> Path:
    """Return `cwd` as a path. Raises EngineError unless it is the full path of a folder."""
    path = Path(cwd)
    try:
        if path.is_absolute() and path.is_dir():
            return path
    except (OSError, ValueError):
        pass
    raise EngineError(f"The working folder must be the full path of a folder; {one_line(cwd, 100)!r} is not.")


def _named(tools: ToolSession, servers: Sequence[Any]) -> tuple[str, ...]:
    """Register the MCP servers of an editor and return their names; none is started. Raises EngineError."""
    if not servers:
        return ()
    from chatterm.tools.mcp.client import Servers
    from chatterm.tools.mcp.config import parse_server, read_servers, servers_path

    made = {server.name: server for server in read_servers(servers_path())}
    names = []
    for given in servers:
        data: dict[str, Any]
        if isinstance(given, schema.McpServerStdio):
            env = {one.name: one.value for one in given.env}
            data = {"command": given.command, "args": list(given.args), "env": env}
        elif isinstance(given, schema.HttpMcpServer):
            data = {"url": given.url, "headers": {one.name: one.value for one in given.headers}}
        else:
            continue  # a transport that is not supported
        name = "".join(c if c.isascii() and (c.isalnum() or c == "-") else "-" for c in given.name)[:32]
        made[name] = parse_server(name, data, "mcpServers")
        names.append(name)
    tools.servers = Servers(list(made.values()))
    return tuple(names)
