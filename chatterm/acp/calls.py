"""Tool calls in an editor: planned, approved, run and shown. Permissions work as in the chat."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from acp import RequestError, schema

from chatterm.acp import content
from chatterm.acp.dialogue import Dialogue
from chatterm.backends.backend import ToolCall, ToolResult
from chatterm.settings.settings import SettingsError
from chatterm.tools.output import Tail, bounded
from chatterm.tools.policy import Answer, choices
from chatterm.tools.session import failed, performed, refused, stopped
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


async def run_call(dialogue: Dialogue, call: ToolCall, editor: Editor, show: Show) -> ToolResult:
    """Plan one call, ask for permission if needed, run it and return its result."""
    if dialogue.stopped.is_set():
        return stopped(call)
    id = f"call-{dialogue.numbers()}"
    try:
        plan = await asyncio.to_thread(dialogue.tools.plan, call)
    except ToolError as error:
        await show(content.unplanned(id, call, str(error)))
        return failed(call, str(error))
    await show(content.started(id, call, plan, dialogue.folder))
    result = await _decided(dialogue, id, call, plan, editor, show)
    if result is None:
        result = await _done(dialogue, id, call, plan, show)
    await show(content.finished(id, result))
    return result


async def _decided(
    dialogue: Dialogue, id: str, call: ToolCall, plan: ToolPlan, editor: Editor, show: Show
) -> ToolResult | None:
    """Return the result of a call that may not run; None if it may."""
    policy = dialogue.tools.policy
    if not (why := policy.why_ask(plan)):
        policy.ran()
        return None
    answer = await _asked(dialogue, id, call, plan, why, editor)
    if answer is None:
        dialogue.stopped.set()
        return refused(call)
    try:
        policy.decided(plan, answer)
    except SettingsError as error:
        await show(content.said("reasoning", f"\n\nThe rule holds for this session only: {error}\n\n"))
    return refused(call) if answer == "no" else None


async def _asked(
    dialogue: Dialogue, id: str, call: ToolCall, plan: ToolPlan, why: str, editor: Editor
) -> Answer | None:
    """Ask the person. Return the answer; None means no, and stop. Any unknown answer of an editor is a no."""
    asking = asyncio.ensure_future(
        editor.request_permission(
            session_id=dialogue.id,
            tool_call=content.to_allow(id, call, plan, why, dialogue.folder),
            options=content.permission_options(plan),
        )
    )
    stopping = asyncio.ensure_future(dialogue.stopped.wait())
    try:
        await asyncio.wait([asking, stopping], return_when=asyncio.FIRST_COMPLETED)
        if dialogue.stopped.is_set() or not asking.done():
            return None
        outcome = asking.result().outcome
    except (RequestError, ValueError):  # an editor without this request, or an invalid answer
        return "no"
    except ConnectionError:
        return None
    finally:
        asking.cancel()
        stopping.cancel()
    if isinstance(outcome, schema.DeniedOutcome):
        return None
    return next((answer for answer in choices(plan) if answer == outcome.option_id), "no")


async def _done(dialogue: Dialogue, id: str, call: ToolCall, plan: ToolPlan, show: Show) -> ToolResult:
    lock, tail = threading.Lock(), Tail()

    def say(text: str) -> None:
        with lock:
            tail.add(text)

    running = ToolRun(say=say)
    work = asyncio.ensure_future(asyncio.to_thread(performed, call, plan, running))
    shown = ""
    await show(content.progress(id, "in_progress"))
    try:
        while not work.done():
            await asyncio.wait([work], timeout=_LOOK)
            if dialogue.stopped.is_set():
                running.stopped.set()
            with lock:
                said = bounded(tail.text[-_SHOWN:])
            if said != shown and not work.done():
                shown = said
                await show(content.progress(id, "in_progress", said))
        return work.result()
    finally:
        running.stopped.set()
