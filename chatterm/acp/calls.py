"""Tool calls in an editor: planned, approved, run and shown. Permissions work as in the chat."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from acp import RequestError, schema

from chatterm.acp import content
from chatterm.acp.dialogue import Dialogue
from chatterm.backends.backend import ToolCall, ToolResult
from chatterm.tools.output import Tail, bounded
from chatterm.tools.policy import Answer, choices
from chatterm.tools.session import performed, refused
from chatterm.tools.tool import ToolError, ToolPlan, ToolRun

_LOOK = 0.25
"""Seconds between updates of a running call's output."""
_SHOWN = 4_000
"""The most characters of running output shown, from its end."""
Show = Callable[[Any], Awaitable[None]]
"""Sends the editor an update."""


class Editor(Protocol):
    """The editor, as far as tool calls need it."""

    async def request_permission(
        self, session_id: str, tool_call: schema.ToolCallUpdate, options: list[schema.PermissionOption]
    ) -> schema.RequestPermissionResponse: ...


class EditorHost:
    """The calls of one answer in an editor, as a `CallHost`."""

    def __init__(self, dialogue: Dialogue, editor: Editor, show: Show) -> None:
        self._dialogue, self._editor, self._show = dialogue, editor, show
        self._id = ""
        """The editor's id of the call at work; empty while none is shown as running."""

    def is_stopped(self) -> bool:
        """Return whether the person has stopped the prompt."""
        return self._dialogue.stopped.is_set()

    async def plan(self, index: int, call: ToolCall) -> ToolPlan:
        """Plan a call in a thread, and show it. Raises ToolError."""
        id = f"call-{self._dialogue.numbers()}"
        try:
            plan = await asyncio.to_thread(self._dialogue.tools.plan, call)
        except ToolError as error:
            await self._show(content.unplanned(id, call, str(error)))
            raise
        self._id = id
        await self._show(content.started(id, call, plan, self._dialogue.folder))
        return plan

    async def ask(self, index: int, call: ToolCall, plan: ToolPlan, why: str) -> Answer | ToolResult:
        """Ask the person; no answer stops the prompt. Any unknown answer of an editor is a no."""
        dialogue = self._dialogue
        asking = asyncio.ensure_future(
            self._editor.request_permission(
                session_id=dialogue.id,
                tool_call=content.to_allow(self._id, call, plan, why, dialogue.folder),
                options=content.permission_options(plan),
            )
        )
        stopping = asyncio.ensure_future(dialogue.stopped.wait())
        outcome: Any = None
        try:
            await asyncio.wait([asking, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not dialogue.stopped.is_set() and asking.done():
                outcome = asking.result().outcome
        except (RequestError, ValueError):  # an editor without this request, or an invalid answer
            return "no"
        except ConnectionError:
            pass
        finally:
            asking.cancel()
            stopping.cancel()
        if outcome is None or isinstance(outcome, schema.DeniedOutcome):
            dialogue.stopped.set()
            return refused(call)
        return next((answer for answer in choices(plan) if answer == outcome.option_id), "no")

    async def warn(self, text: str) -> None:
        """Show a line beside the answer."""
        await self._show(content.said("reasoning", f"\n\n{text}\n\n"))

    async def perform(self, index: int, call: ToolCall, plan: ToolPlan) -> ToolResult:
        """Run a call in a thread and show its output meanwhile."""
        lock, tail = threading.Lock(), Tail()

        def say(text: str) -> None:
            with lock:
                tail.add(text)

        running = ToolRun(say=say)
        work = asyncio.ensure_future(asyncio.to_thread(performed, call, plan, running))
        shown = ""
        await self._show(content.progress(self._id, "in_progress"))
        try:
            while not work.done():
                await asyncio.wait([work], timeout=_LOOK)
                if self.is_stopped():
                    running.stopped.set()
                with lock:
                    said = bounded(tail.text[-_SHOWN:])
                if said != shown and not work.done():
                    shown = said
                    await self._show(content.progress(self._id, "in_progress", said))
            return work.result()
        finally:
            running.stopped.set()

    async def record(self, index: int, result: ToolResult) -> None:
        """Show the result of a call that was shown."""
        if self._id:
            await self._show(content.finished(self._id, result))
        self._id = ""
